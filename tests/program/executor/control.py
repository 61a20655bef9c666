"""Who decides what the next step is: CTA 0, as kernels/control.py does, and the host that writes plans for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tests.program.executor.thread import Thread, Turn
from tests.program.executor.world import (
    PLANS_TAKEN,
    PLANS_WRITTEN,
    PUBLISHED,
    RESULTS,
    RING,
    STEPS_REPORTED,
    Plan,
    Slot,
    World,
)


class Control:
    """CTA 0's second job."""

    def __init__(self, cta: Thread) -> None:
        self.cta, self.world = cta, cta.world
        self.published = False  # whether the next step is
        self.plans = 0  # taken from the host
        self.lease = 0  # steps left of the running plan

    def decide_early(self, step: int) -> None:
        """During a step: publish the next one if it needs no writes."""
        self.published = False
        cmd, after = self.world.cmd[step & 1], 1 - (step & 1)
        written = self.cta.memory.look(self.cta.number, PLANS_WRITTEN, newest=False)
        if written > self.plans:
            plan = self._read_record()
            if plan.n_rows and not (plan.changes and self.world.rules.writes_taken_late):
                self._apply(plan)
                self._take()
                self.world.seen.add("a plan was taken early" if self.lease < 1 else "a plan cut a lease short")
                self.lease = plan.lease - 1
                self._publish(after, plan, step + 1)
                self.published = True
        elif self.lease > 0:
            if self._goes_on(cmd):
                self.lease -= 1
                self._publish(after, replace(cmd, prefill=()), step + 1)
                self.published = True
                self.world.seen.add("a lease went on")
            else:
                self.lease = 0

    def decide_late(self, step: int) -> Iterator[Turn]:
        """Between steps: wait for a plan, and publish it as this step."""
        if self.published:
            return
        plan = Plan()
        while not (plan.n_rows or plan.quits):  # a plan without rows only writes
            yield from self.cta.await_counter(PLANS_WRITTEN, self.plans + 1)
            plan = self._read_record()
            self._apply(plan)
            self._take()
        self.lease = plan.lease - 1
        self._publish(step & 1, plan, step)

    def report(self, step: int) -> None:
        """Tell the host that a step is over."""
        self.cta.publish(STEPS_REPORTED, step + 1)

    def _read_record(self) -> Plan:
        self.cta.plain_read(self.world.cell["records"] + self.plans % RING)
        return self.world.records[self.plans % RING]

    def _take(self) -> None:
        self.plans += 1
        self.cta.publish(PLANS_TAKEN, self.plans)

    def _apply(self, plan: Plan) -> None:
        for slot, fields in plan.fields.items():
            self.cta.plain_write(self.world.cell["fields"] + slot)
            for field, value in fields.items():
                self.world.fields[slot, field] = value
        for slot, pages in plan.pages.items():
            self.cta.plain_write(self.world.cell["pages"] + slot)
            self.world.pages[slot, : len(pages)] = pages

    def _publish(self, cmd: int, plan: Plan, step: int) -> None:
        self.cta.plain_write(self.world.cell["cmd"] + cmd)
        self.world.cmd[cmd] = plan
        self.cta.publish(PUBLISHED, step + 1)

    def _goes_on(self, cmd: Plan) -> bool:
        """Whether a decode row will live on, and every live one has room for its next position."""
        goes_on = False
        for slot in cmd.decode:
            self.cta.plain_read(self.world.cell["fields"] + slot)
            field = self.world.fields[slot]
            if field[Slot.LIVE] and field[Slot.GENERATED] + 1 < field[Slot.LIMIT]:
                if field[Slot.POSITION] + 1 >= field[Slot.ROOM]:
                    self.world.seen.add("a lease ended for lack of room")
                    return False
                goes_on = True
        return goes_on


class Host(Thread):
    """Writes the plans of a scene, ahead of the kernel as far as they allow, and reads every step's results."""

    def __init__(self, world: World, plans: Sequence[Plan]) -> None:
        super().__init__(world, world.shape.grid)
        self._plans = plans
        self._read = 0

    def run(self) -> Iterator[Turn]:
        """Write all plans, the last of which makes the kernel leave."""
        for i, plan in enumerate(self._plans):
            if plan.waits:
                yield from self.await_counter(STEPS_REPORTED, sum(before.n_rows > 0 for before in self._plans[:i]))
            if self.world.rules.host_waits_for_room:
                yield from self.await_counter(PLANS_TAKEN, i - RING + 1)
            self.plain_write(self.world.cell["records"] + i % RING)
            self.world.records[i % RING] = plan
            self.publish(PLANS_WRITTEN, i + 1)
            self.read_results(newest=False)
            yield Turn.GO

    def read_results(self, *, newest: bool) -> None:
        """Read what has been reported since."""
        reported = self.memory.look(self.number, STEPS_REPORTED, newest=newest)
        for step in range(self._read, reported):
            for t in range(self.world.shape.rows):
                cell = self.world.cell["tokens"] + step % RESULTS * self.world.shape.rows + t
                self.plain_read(cell)
                slot, token = self.world.tokens.pop(cell, (-1, 0))
                if slot >= 0:
                    self.world.reported.append((slot, token))
        self._read = max(self._read, reported)
