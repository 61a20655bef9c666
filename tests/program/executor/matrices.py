"""EMBED and the matrix instructions of one CTA, over the very instruction words and the CTA's tape run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megakernel_runtime.program.isa import Op
from megakernel_runtime.program.placement import ROW_TILE
from tests.program.executor.memory import Indices
from tests.program.executor.numbers import F32, U32, pack, root_mean_square, silu_gate, unpack
from tests.program.executor.thread import Row, Thread, Turn


class Matrices:
    """The instructions of one step on one CTA that have row tiles."""

    def __init__(self, thread: Thread, rows: list[Row], step: int) -> None:
        self.thread, self.rows, self.step = thread, rows, step
        self.world, self.shape = thread.world, thread.world.shape
        self.written: list[Indices] = []

    def embed(self, first: int, count: int) -> Iterator[Turn]:
        """This CTA's columns of the token embeddings."""
        tokens = [row.token for row in self.rows] + [0] * (self.shape.rows - len(self.rows))
        columns = slice(first * ROW_TILE, (first + count) * ROW_TILE)
        if count:
            value = self.world.small["embed"][tokens][:, columns]
            self._keep(first, count, value)
            yield from self._store(0, self.shape.hidden, columns.start, pack(value))

    def matrix(self, words: tuple[int, ...]) -> Iterator[Turn]:
        """One instruction."""
        op, layer, first, count, source, target, columns, width, normed = words[:9]
        if not count:
            if op == Op.LM_HEAD:
                self._finish_head(first, np.zeros((self.shape.rows, 0), np.float32))
            return
        n, of = len(self.rows), (self.thread.number, op, layer)
        read = np.arange(source // 2, (source + n * columns) // 2)
        x = yield from self.thread.await_words(read, self.step)
        key = (*of, n, x.tobytes())
        if key not in self.world.memo:
            product = self._product(of, unpack(x).reshape(n, columns), normed)
            self.world.memo[key] = self._result(Op(op), layer, first, product)
        out, packed = self.world.memo[key]
        if op == Op.LM_HEAD:
            self._finish_head(first, out)
        elif op == Op.GATE_UP:
            yield from self._store(target, width, first * ROW_TILE // 2, packed)
        elif op == Op.QKV:
            yield from self._store(target, width, first * ROW_TILE, packed)
        else:
            out = out + self._kept(first, count)
            self._keep(first, count, out)
            yield from self._store(target, width, first * ROW_TILE, pack(out))

    def _product(self, of: tuple[int, int, int], x: F32, normed: int) -> F32:
        """(T, rows of this CTA): rows of the step beyond the real ones are zero."""
        scale = root_mean_square(x, self.shape.eps) if normed else np.ones((len(x), 1))
        matrix = self.world.matrices[of]
        out = np.zeros((self.shape.rows, len(matrix)), np.float32)
        out[: len(x)] = x.astype(np.float64) @ matrix.T * scale
        return out

    def _result(self, op: Op, layer: int, first: int, out: F32) -> tuple[F32, U32]:
        """Return what the products become, and as words."""
        if op is Op.QKV and self.shape.qkv_bias:
            bias = np.concatenate([self.world.small[f"layers.{layer}.{leaf}_bias"] for leaf in "qkv"])
            out = out + bias[first * ROW_TILE : first * ROW_TILE + out.shape[1]]
        if op is Op.GATE_UP:
            out = silu_gate(out[:, 0::2], out[:, 1::2])
        return out, pack(out)

    def _finish_head(self, first: int, out: F32) -> None:
        """Logits, and this CTA's best token of each row; a CTA without rows says so too."""
        n = min(out.shape[1], self.shape.vocab - first * ROW_TILE)
        self.thread.plain_write(self.world.cell["best"] + self.thread.number)
        if n > 0:
            self.world.logits[:, first * ROW_TILE : first * ROW_TILE + n] = out[:, :n]
            token = out[:, :n].argmax(-1)
            best = np.stack((out[np.arange(len(out)), token], token + first * ROW_TILE), axis=1)
        else:
            best = np.full((self.shape.rows, 2), (-np.inf, 0))
        self.world.best[self.thread.number] = best

    # ---------------------------------------------------------------- stores

    def _store(self, target: int, width: int, first: int, packed: U32) -> Iterator[Turn]:
        """Write columns from `first` on of all rows."""
        at = (target + np.arange(self.shape.rows) * width + first) // 2
        words = (at[:, None] + np.arange(packed.shape[1])).ravel()
        self.written.append(words)
        yield from self.thread.store(words, packed.ravel(), self.step)

    def _kept(self, first: int, count: int) -> F32:
        self.thread.plain_read(self.world.cell["resid"] + np.arange(first, first + count))
        return self.world.resid[:, first * ROW_TILE : (first + count) * ROW_TILE]

    def _keep(self, first: int, count: int, value: F32) -> None:
        self.thread.plain_write(self.world.cell["resid"] + np.arange(first, first + count))
        self.world.resid[:, first * ROW_TILE : (first + count) * ROW_TILE] = value

    def empty_too_early(self) -> None:
        """What no CTA may do: empty what it has written in this step before all have read it."""
        for words in self.written:
            self.thread.empty_words(words, self.step + 1)
