"""ATTEND of one CTA: its units, then the joins of rows with several spans, then the words it empties."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.program.executor.memory import EMPTY, Values
from tests.program.executor.numbers import F32, Partial, absorb, attend, pack, root_mean_square, rotate, rounded, unpack
from tests.program.executor.thread import Row, Thread, Turn


def span_count(shape, position: int) -> tuple[int, int, int]:
    """How many spans lie before a row at `position`, the first, and the first position that it sees."""
    low = max(position - shape.window + 1, 0) if shape.window else 0
    first = low // shape.span
    return ((position - 1) // shape.span - first + 1 if position > low else 0), first, low


class Attention:
    """One layer of one step on one CTA."""

    def __init__(self, thread: Thread, rows: list[Row], rows_before: int, step: int, layer: int) -> None:
        self.thread, self.rows, self.rows_before, self.step, self.layer = thread, rows, rows_before, step, layer
        self.world, self.shape, self.rules = thread.world, thread.world.shape, thread.world.rules
        self.heads = self.shape.n_kv_heads
        self.spans = max(1, *(span_count(self.shape, row.position)[0] for row in rows))
        self.mark = step * self.shape.layers + layer if self.rules.marks_layers else step

    def run(self) -> Iterator[Turn]:
        """Do this CTA's part."""
        n, c, grid = len(self.rows), self.thread.number, self.shape.grid
        units = [lambda u=u: self._unit(u) for u in range(c, n * self.heads * self.spans, grid)]
        joins = [lambda u=u: self._join(u) for u in range(c, n * self.heads, grid)] if self.spans > 1 else []
        for part in units + joins if self.rules.units_before_joins else joins + units:
            yield from part()
        if self.rules.clears_rows:
            for u in range(n * self.heads + c, self.rows_before * self.heads, grid):
                self.thread.empty_words(self._result_words(u // self.heads, u % self.heads), self.step)

    def _unit(self, u: int) -> Iterator[Turn]:
        """Row t, one key head, one span."""
        n = len(self.rows)
        head, t, j = u % self.heads, u // self.heads % n, u // (self.heads * n)
        row = self.rows[t]
        count, first_span, low = span_count(self.shape, row.position)
        if j >= max(count, 1):
            return
        yield Turn.GO
        begin = (first_span + j) * self.shape.span
        start, end = max(begin, low), min(begin + self.shape.span, row.position)
        new_from = max(start, row.first_position, low) if self.rules.new_keys_from_words else end
        k, v = self._from_pages(row, head, start, min(new_from, end))
        fresh = range(new_from, max(new_from, end))
        if fresh:
            self.world.seen.add("a row saw another of its step")
        lines = [(t, row.position), *((row.first + position - row.first_position, position) for position in fresh)]
        (q, own_key, own_value), *others = yield from self._stage(lines, head)
        k = np.concatenate((k, *(key for _, key, _ in others)))
        v = np.concatenate((v, *(value for _, _, value in others)))
        partial = self._attend(q, k, v)
        if count > 1:
            yield from self._store_partial(u, partial)
        else:
            yield from self._finish(t, head, partial, q, own_key, own_value)

    def _attend(self, q: F32, k: F32, v: F32) -> Partial:
        key = (q.tobytes(), k.tobytes(), v.tobytes())
        if key not in self.world.attended:
            self.world.attended[key] = attend(q, k, v)
        return self.world.attended[key]

    def _join(self, u: int) -> Iterator[Turn]:
        """Merge the spans of a row and key head."""
        t, head = u // self.heads, u % self.heads
        count = span_count(self.shape, self.rows[t].position)[0]
        if count <= 1:
            return
        self.world.seen.add("a row had several spans")
        ((q, key, value),) = yield from self._stage([(t, self.rows[t].position)], head)
        partial = yield from self._load_partial(u)
        for j in range(1, count):
            partial = absorb(partial, (yield from self._load_partial(u + j * len(self.rows) * self.heads)))
        yield from self._finish(t, head, partial, q, key, value)

    def _finish(self, t: int, head: int, partial: Partial, q: F32, key: F32, value: F32) -> Iterator[Turn]:
        """Write the own key and value to their page, merge them, write the result."""
        row, world = self.rows[t], self.world
        if row.alive or not self.rules.dead_rows_keep_off:
            page, token = self._page_of(row, row.position)
            self.thread.plain_write(world.kv_cells(self.layer, int(page), head, token))
            world.kv[self.layer, page, head, token] = np.concatenate((key, value))
        _, total, out = absorb(partial, self._attend(q, key, value))
        yield Turn.GO
        yield from self.thread.store(self._result_words(t, head), pack(out / total[:, None]).ravel(), self.step)

    def _result_words(self, t: int, head: int):
        shape = self.shape
        n = shape.group * shape.head_dim // 2
        at = (shape.at_attn + (self.layer * shape.rows + t) * shape.q) // 2 + head * n
        return np.arange(at, at + n)

    # ---------------------------------------------------------------- operands

    def _stage(self, lines: list[tuple[int, int]], head: int):
        """Await the raw queries of a group, key and value of (row, position) each; return them rotated, values as were.

        The kernel awaits one row after the other; which of them is late makes no difference here.
        """
        words = [self._raw_words(t, head) for t, _ in lines]
        raw = yield from self.thread.await_words(np.concatenate(words), self.step)
        return [
            self._rotated(part, position) for part, (_, position) in zip(np.split(raw, len(lines)), lines, strict=True)
        ]

    def _raw_words(self, t: int, head: int):
        key = (self.layer, t, head)
        if key not in self.world.raw_words:
            shape, d = self.shape, self.shape.head_dim
            at = shape.at_qkv + (self.layer * shape.rows + t) * shape.qkv
            starts = (at + head * shape.group * d, at + shape.q + head * d, at + shape.q + shape.kv + head * d)
            runs = zip(starts, (shape.group * d, d, d), strict=True)
            self.world.raw_words[key] = np.concatenate([np.arange(s // 2, (s + width) // 2) for s, width in runs])
        return self.world.raw_words[key]

    def _rotated(self, words: Values, position: int) -> tuple[F32, F32, F32]:
        key = (self.layer, position, words.tobytes())
        if key in self.world.staged:
            return self.world.staged[key]
        shape, small = self.shape, self.world.small
        raw = unpack(words).reshape(-1, shape.head_dim)
        q, k, v = raw[: shape.group], raw[shape.group : shape.group + 1], raw[shape.group + 1 :]
        if shape.qk_norm:
            name = f"layers.{self.layer}."
            q = (q * root_mean_square(q, shape.eps) * small[name + "q_norm"]).astype(np.float32)
            k = (k * root_mean_square(k, shape.eps) * small[name + "k_norm"]).astype(np.float32)
        angles = self.world.cos[position], self.world.sin[position]
        self.world.staged[key] = rounded(rotate(q, *angles)), rounded(rotate(k, *angles)), v
        return self.world.staged[key]

    def _page_of(self, row: Row, positions):
        self.thread.plain_read(self.world.cell["pages"] + row.slot)
        return self.world.pages[row.slot, positions // self.shape.page], positions % self.shape.page

    def _from_pages(self, row: Row, head: int, start: int, end: int) -> tuple[F32, F32]:
        """Keys and values that earlier steps wrote."""
        if start >= end:
            nothing = np.zeros((0, self.shape.head_dim), np.float32)
            return nothing, nothing
        positions = np.arange(start, end)
        page, token = self._page_of(row, positions)
        self.thread.plain_read(self.world.kv_cells(self.layer, page, head, token))
        both = self.world.kv[self.layer, page, head, token]
        return both[:, 0], both[:, 1]

    # ---------------------------------------------------------------- partial results

    def _partial_words(self, u: int):
        at = self.world.partials_at + u * self.world.unit_words
        return np.arange(at, at + self.world.unit_words)

    def _store_partial(self, u: int, partial: Partial) -> Iterator[Turn]:
        top, total, out = partial
        bits = np.concatenate((out.ravel(), top, total)).astype(np.float32).view(np.uint32).astype(np.uint64)
        stamp = self.step * self.shape.layers + self.layer
        yield from self.thread.store_plainly(self._partial_words(u), bits | np.uint64(self.mark << 32), stamp)

    def _load_partial(self, u: int):
        mark = self.mark if self.rules.checks_marks else None
        stamp = self.step * self.shape.layers + self.layer
        words = yield from self.thread.await_marked(self._partial_words(u), mark, stamp)
        values = (words & np.uint64(EMPTY)).astype(np.uint32).view(np.float32).astype(np.float64)
        g = self.shape.group
        return values[-2 * g : -g], values[-g:], values[: -2 * g].reshape(g, -1)
