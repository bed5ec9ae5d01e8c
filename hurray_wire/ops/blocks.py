"""A pool read, and somebody's pool written, in blocks: equal parts of pages, numbered page * factor + part.

A block is as many tokens as divide the pages of both sides, so what moves is as large as it can be. Whole blocks only;
which of them, and whether they exist, callers have settled. Nothing but the blocks that are named is read or written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hurray_wire.arrays import Bytes, raw_view
from hurray_wire.indices import IntArray
from hurray_wire.ops.spans import steps
from hurray_wire.pages import PagePool, is_little
from hurray_wire.tensor import BlockPagedTensor

Array = npt.NDArray[Any]

_STEP_ENTRIES = 1 << 16
"""Indices that NumPy takes at a time: it makes 64-bit ones of them first, which stay in the cache then."""
_STEP_BYTES = 1 << 18
"""Blocks that pass through memory of our own pass through the second-level cache."""
_NEARLY_ALL = 1.5
"""How many blocks a stretch of the source may have for each that is asked for, to be read as a whole."""
LARGE_BYTES = 1 << 16
"""Pieces from this size on are copied one by one: a step of the loop costs a twentieth of the copy, and saves a second;
of a quarter of that size, a tenth of it (measured)."""
PIECE_BYTES = 1 << 24
"""What is copied at a time into memory that was never touched: the system zeroes that memory first, as much as a few
MiB at a time. Half a GiB in one copy takes a tenth longer than so much at a time, and so do pieces of one MiB."""
_RELEASED_BYTES = 1 << 20
"""Pieces from this size on are copied by NumPy, which lets other threads go on meanwhile."""


class Blocks:
    """A pool in blocks of `size` bytes, `factor` of them a page.

    Args:
        pool: `[pages, page_size, heads, head_dim]`, or the bytes of whole pages in one dimension; any strides.
        factor: divides page_size.
        size: bytes of a block; not 0.
    """

    def __init__(self, pool: Array, factor: int, size: int) -> None:
        self.pool = pool if pool.ndim == 4 else pool.reshape(-1, factor, size, 1)  # a view: one stride is split
        self.size = size
        self.factor = factor
        self.step = max(1, _STEP_BYTES // size)
        self.per_page = factor
        """Blocks from one page to the next in `rows`."""
        self.rows = self._rows()
        """The blocks as elements of `size` bytes, where each is one piece of memory; else None."""

    def _rows(self) -> Array | None:
        """As one contiguous array: between the pages of a key half of `[pages, 2, ...]` lie those of the other half,
        elements that are never named."""
        pool = self.pool
        page = self.size * self.factor
        stride = pool.strides[0] if len(pool) > 1 else page
        if not is_little(pool.dtype) or not pool[0].flags.c_contiguous or stride < page or stride % self.size:
            return None
        self.per_page = stride // self.size
        shape = ((len(pool) - 1) * self.per_page + self.factor, self.size)
        rows = np.lib.stride_tricks.as_strided(raw_view(pool[0]), shape, (self.size, 1))
        return rows.view(f"V{self.size}").reshape(-1)

    @property
    def parts(self) -> Array:
        """The pool with the blocks of a page as an axis of their own: cutting an axis is always a view."""
        pages, page_size, heads, dim = self.pool.shape
        return self.pool.reshape(pages, self.factor, page_size // self.factor, heads, dim)

    def places(self, ids: IntArray) -> IntArray:
        """Blocks in terms of `rows`."""
        if self.rows is None or self.per_page == self.factor:
            return ids
        wide = ids.astype(np.int64)
        return wide // self.factor * self.per_page + wide % self.factor

    def copy(self, ids: IntArray, out: Bytes) -> None:
        """Copy blocks into contiguous `out`."""
        places = self.places(ids)
        for step in steps(ids.size, _STEP_ENTRIES if self.rows is not None else self.step):
            self.read(places[step], out, step.start)

    def read(self, places: IntArray, out: Bytes, at: int = 0) -> None:
        """Copy the blocks at `places` behind the first `at` of `out`."""
        target = out[at * self.size : (at + places.size) * self.size]
        if self.rows is not None:
            # mode="clip" writes straight into `out`; ids were checked when the tensor was made.
            self.rows.take(places, out=target.view(self.rows.dtype), mode="clip")
            return
        parts = self.parts
        typed = target.view(parts.dtype.newbyteorder("<")).reshape(places.size, *parts.shape[2:])
        typed[...] = parts[places // self.factor, places % self.factor]

    def write(self, places: IntArray, blocks: Bytes) -> None:
        """Write contiguous `blocks` to `places`."""
        if self.rows is not None:
            self.rows[places] = blocks.view(self.rows.dtype)
            return
        parts = self.parts
        typed = blocks.view(parts.dtype.newbyteorder("<")).reshape(places.size, *parts.shape[2:])
        parts[places // self.factor, places % self.factor] = typed


def blocks_of(t: BlockPagedTensor, factor: int) -> Blocks:
    """A tensor's pool in blocks of page_size / factor tokens, which are whole bytes, and not none."""
    return Blocks(t.page_pool, factor, t.page_bytes // factor)


def copy_fresh(pool: PagePool, out: Bytes) -> None:
    """Copy a pool of whole pages into memory that was never touched."""
    size = pool.page_bytes
    for step in steps(pool.num_pages if size else 0, max(1, PIECE_BYTES // max(1, size))):
        pool.copy(step, out[step.start * size : step.stop * size])


def cut(pool: Array, factor: int) -> Array | None:
    """A 4-D pool with every page cut into so many, as a view of the same memory; None where only a copy would be."""
    pages, page_size, heads, dim = pool.shape
    if pages > 1 and pool.size and pool.strides[0] != page_size * pool.strides[1]:
        return None
    return pool.reshape(pages * factor, page_size // factor, heads, dim)


def move(source: Blocks, ids: IntArray, target: Blocks, to: IntArray) -> None:
    """Copy the source's blocks `ids` to the target's blocks `to`, which differ from one another."""
    ids, to = source.places(ids), target.places(to)
    if source.rows is None or target.rows is None:
        _by_way_of_cache(source, ids, to, target)
        return
    for some, places in _in_source_order(ids, to):
        for step in steps(some.size, _STEP_ENTRIES):
            _move_some(source, some[step], target, places[step])


def _in_source_order(ids: IntArray, to: IntArray) -> list[tuple[IntArray, IntArray]]:
    """What goes where, ascending where that takes no sorting; apart from it the blocks that go to one more place."""
    low, high = int(ids.min()), int(ids.max())
    if high - low >= _NEARLY_ALL * ids.size or bool((ids[1:] >= ids[:-1]).all()):
        return [(ids, to)]
    places = np.full(high - low + 1, -1, to.dtype)
    places[ids - low] = to
    named = np.flatnonzero(places >= 0)
    left = np.flatnonzero(places[ids - low] != to)
    return [(named + low, places[named]), (ids[left], to[left])]


def _move_some(source: Blocks, ids: IntArray, target: Blocks, to: IntArray) -> None:
    """Copy blocks in pieces of memory where these are large, else by NumPy's indices, where one side needs none."""
    assert source.rows is not None
    assert target.rows is not None
    apart = (ids[1:] != ids[:-1] + 1) | (to[1:] != to[:-1] + 1)
    low, high = int(ids.min()), int(ids.max())
    if source.size * ids.size >= LARGE_BYTES * (1 + int(np.count_nonzero(apart))):
        _in_pieces(source, ids, target, to, np.concatenate(([0], np.flatnonzero(apart) + 1, [ids.size])))
    elif consecutive(to):
        source.rows.take(ids, out=target.rows[to[0] : int(to[0]) + to.size], mode="clip")
    elif high - low < _NEARLY_ALL * ids.size:
        _in_one_sweep(source, ids, target, to, low, high - low + 1)
    else:
        _by_way_of_cache(source, ids, to, target)


def consecutive(ids: IntArray) -> bool:
    """Whether the ids are neighbours, each one more than the one before."""
    return int(ids[-1]) - int(ids[0]) == ids.size - 1 and bool((ids[1:] > ids[:-1]).all())


def _in_pieces(source: Blocks, ids: IntArray, target: Blocks, to: IntArray, cuts: IntArray) -> None:
    """Copy runs of blocks that are neighbours on both sides: large enough for a step of a loop."""
    assert source.rows is not None
    assert target.rows is not None
    sides: list[Any] = [rows.view(np.uint8) for rows in (source.rows, target.rows)]
    size = source.size
    if size * ids.size < _RELEASED_BYTES * (cuts.size - 1):
        sides = [memoryview(side) for side in sides]
    rows, places = sides
    firsts = cuts[:-1]
    starts = ((ends[firsts].astype(np.int64) * size).tolist() for ends in (ids, to))
    for i, j, n in zip(*starts, ((cuts[1:] - firsts) * size).tolist(), strict=True):
        places[j : j + n] = rows[i : i + n]


def _in_one_sweep(source: Blocks, ids: IntArray, target: Blocks, to: IntArray, low: int, reach: int) -> None:
    """Copy nearly every block of a stretch of the source, which is read once from end to end.

    Blocks that nobody asked for go where the first one belongs, which is written last: no other place is touched.
    """
    assert source.rows is not None
    assert target.rows is not None
    places = np.full(reach, to[0], np.intp)
    places[ids - low] = to
    left = np.flatnonzero(places[ids - low] != to)  # blocks that go to several places
    try:
        target.rows[places] = source.rows[low : low + reach]
        if left.size:
            _by_way_of_cache(source, ids[left], to[left], target)
    finally:
        target.rows[to[0]] = source.rows[ids[0]]


def _by_way_of_cache(source: Blocks, ids: IntArray, to: IntArray, target: Blocks) -> None:
    own = np.empty(min(source.step, ids.size) * source.size, np.uint8)
    for step in steps(ids.size, source.step):
        some, places = ids[step], to[step]
        if source.rows is not None and consecutive(some):
            blocks = source.rows[some[0] : int(some[0]) + some.size].view(np.uint8)
        else:
            blocks = own[: some.size * source.size]
            source.read(some, blocks)
        target.write(places, blocks)
