"""One CTA: step after step, its instruction list in order, as kernels/step.py runs it; CTA 0 also takes plans."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megakernel_runtime.program.isa import Op
from tests.program.executor.attention import Attention
from tests.program.executor.control import Control
from tests.program.executor.matrices import Matrices
from tests.program.executor.memory import Stale
from tests.program.executor.thread import Row, Thread, Turn
from tests.program.executor.world import (
    HEADS_DONE,
    PUBLISHED,
    RESULTS,
    SAMPLERS_DONE,
    Plan,
    Sampled,
    Slot,
    World,
)


class Cta(Thread):
    """A consumer of instructions."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        first, n = world.image.meta[number][2:]
        self.code = world.image.code[first : first + n]
        self.control = Control(self) if number == 0 else None

    def run(self) -> Iterator[Turn]:
        """Run steps until the plan says to leave."""
        world, rules, grid = self.world, self.world.rules, self.world.shape.grid
        step, rows_before = 0, 0
        while True:
            if rules.begins_when_done:
                yield from self.await_counter(SAMPLERS_DONE, step * (grid - rules.done_missing))
            if self.control:
                yield from self.control.decide_late(step)
            if rules.begins_when_published:
                yield from self.await_counter(PUBLISHED, step + 1)
            self.plain_read(world.cell["cmd"] + (step & 1))
            plan = world.cmd[step & 1]
            if plan.quits:
                return
            if not plan.n_rows:
                raise Stale(f"CTA {self.number} runs step {step} before there is a plan")
            rows = self._compose(plan)
            yield from self._run_step(rows, rows_before, step)
            rows_before = len(rows)
            if self.control:
                yield from self.await_counter(SAMPLERS_DONE, (step + 1) * grid)
                self.control.report(step)
            step += 1

    def _compose(self, plan: Plan) -> list[Row]:
        """Rows of slots that have ended or lack room are computed as if at position 0."""
        world = self.world
        rows: list[Row] = []
        for t, slot in enumerate(plan.decode):
            self.plain_read(world.cell["fields"] + slot)
            field = world.fields[slot]
            alive = bool(field[Slot.LIVE]) and field[Slot.POSITION] < field[Slot.ROOM]
            position = int(field[Slot.POSITION]) if alive else 0
            rows.append(Row(slot, position, t, position, int(field[Slot.TOKEN]), alive, alive))
            if not alive:
                world.seen.add("a slot had ended" if field[Slot.POSITION] < field[Slot.ROOM] else "a slot had no room")
        for row in plan.prefill:
            first_position = row.position - (len(rows) - row.first)
            rows.append(Row(row.slot, row.position, row.first, first_position, row.token, row.samples, alive=True))
        return rows

    def _run_step(self, rows: list[Row], rows_before: int, step: int) -> Iterator[Turn]:
        rules = self.world.rules
        matrices = Matrices(self, rows, step)
        if rows_before != len(rows):
            self.world.seen.add("fewer rows than before" if len(rows) < rows_before else "more rows than before")
        for words in self.code:
            yield Turn.GO
            op, layer, first, count = words[:4]
            if op == Op.EMBED:
                if not rules.done_signals_after_work:
                    self.signal(SAMPLERS_DONE)
                yield from matrices.embed(first, count)
            elif op == Op.ATTEND:
                yield from Attention(self, rows, rows_before, step, layer).run()
            elif op == Op.SAMPLE:
                if not rules.empties_in_time:
                    matrices.empty_too_early()
                yield from self._sample(rows, step)
            else:
                if op == Op.LM_HEAD:
                    if not rules.heads_signal_after_stores and self._signals:
                        self.signal(HEADS_DONE)
                    if self.control:
                        self.control.decide_early(step)
                yield from matrices.matrix(words)

    @property
    def _signals(self) -> bool:
        return self.number != 1 or self.world.rules.heads_signal

    def _sample(self, rows: list[Row], step: int) -> Iterator[Turn]:
        """This CTA's rows, once all LM heads are done; then the step is done here."""
        rules, grid = self.world.rules, self.world.shape.grid
        if rules.heads_signal_after_stores and self._signals:
            self.signal(HEADS_DONE)
        if self.number < len(rows):
            yield from self.await_counter(HEADS_DONE, (step + 1) * (grid - rules.heads_missing))
            for t in range(self.number, len(rows), grid):
                self._sample_row(rows[t], step, t)
                yield Turn.GO
        if rules.done_signals_after_work and (rules.done_signals or self.number != 1):
            self.signal(SAMPLERS_DONE)

    def _sample_row(self, row: Row, step: int, t: int) -> None:
        world = self.world
        cell = world.cell["tokens"] + step % RESULTS * world.shape.rows + t
        if not row.samples:
            self.plain_write(cell)
            world.tokens[cell] = (-1, 0)
            return
        self.plain_read(world.cell["best"] + np.arange(world.shape.grid))
        self.plain_read(world.cell["fields"] + row.slot)
        best = world.best[:, t]
        token = int(best[best[:, 0] == best[:, 0].max(), 1].min())
        field = world.fields[row.slot].copy()
        world.sampled.append(Sampled(int(field[Slot.SEQUENCE]), row.position, token, world.logits[t].copy()))
        field[Slot.POSITION] = row.position + 1
        field[Slot.TOKEN] = token
        field[Slot.GENERATED] += 1
        field[Slot.LIVE] = field[Slot.GENERATED] < field[Slot.LIMIT]
        self.plain_write(world.cell["fields"] + row.slot)
        world.fields[row.slot] = field
        self.plain_write(cell)
        world.tokens[cell] = (row.slot, token)
