"""Pages from one array to another, once, whatever the axis order of either: the price of engines' layouts.

Only the pages asked for are read. Pages that lie in one piece are taken as rows; others are moved in whole last axes,
page by page where pages are large, else a temporary's worth at a time that stays in the cache (sizes measured: a
megabyte at a time costs 1.5 times as much).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hurray_wire.arrays import raw_view
from hurray_wire.indices import Int64Array
from hurray_wire.pages import PagePool

Array = npt.NDArray[Any]

_LARGE_PAGE = 16 << 10
"""From here a page of its own costs less than its share of a temporary."""
_TEMPORARY_BYTES = 128 << 10


class PageCopy(NamedTuple):
    """From pages of one array to pages of another: `[pages, ...]` each, of one inner shape and element type."""

    source: Array
    target: Array

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return math.prod(self.target.shape[1:]) * self.target.itemsize

    def in_rows(self) -> PagePool | None:
        """The source as rows, where its pages and the target lie in one piece each."""
        same = self.source.dtype == self.target.dtype
        if not self.page_bytes or not same or not self.target.flags.c_contiguous:
            return None
        pool = PagePool(self.source, self.source.shape[0], self.page_bytes)
        return pool if pool.lies_in_pages else None

    def in_runs(self) -> PageCopy:
        """The last axes that lie in one piece in both, as single elements: NumPy then moves runs, not elements."""
        axes = min(map(_axes_in_one_piece, self))
        if self.source.dtype != self.target.dtype or not axes:
            return self
        return PageCopy(*(_as_elements(array, axes) for array in self))


def _axes_in_one_piece(array: Array) -> int:
    """How many of the last axes, the first one left out, hold elements side by side; 0 where that is one element."""
    axes, run = 0, array.itemsize
    for size, stride in zip(array.shape[:0:-1], array.strides[:0:-1], strict=True):
        if size != 1 and stride != run:
            break
        axes, run = axes + 1, run * size
    return axes if run > array.itemsize else 0


def _as_elements(array: Array, axes: int) -> Array:
    merged = array.reshape(*array.shape[: array.ndim - axes], -1)
    return merged.view(f"V{merged.shape[-1] * merged.itemsize}")[..., 0]


def copy_array(source: Array, target: Array) -> None:
    """Copy an array into another of its shape and type, any strides, in runs."""
    if target.size:
        run = PageCopy(source, target).in_runs()
        run.target[...] = run.source


def copy_pages(
    copies: Sequence[PageCopy], count: int, sources: Int64Array | None = None, targets: Int64Array | None = None
) -> None:
    """Copy `count` pages: page `sources[i]` of each source to page `targets[i]` of its target; None is 0, 1, 2, ...

    Keys and values go in one call: of a page that holds both, the second half is still in the cache.
    """
    sources, targets = _slice(sources), _slice(targets)
    strided = []
    for copy in copies:
        pool = copy.in_rows() if targets is None else None
        if pool is not None:
            pool.copy(slice(0, count) if sources is None else sources, raw_view(copy.target[:count]))
        elif copy.page_bytes and count:
            strided.append(copy)
    if not strided:
        return
    runs = [copy.in_runs() for copy in strided]
    page_bytes = max(copy.page_bytes for copy in strided)
    if page_bytes < _LARGE_PAGE or all(run.target.ndim == 1 for run in runs):
        _copy_some_at_a_time(runs, count, page_bytes, sources, targets)
        return
    for source, target in zip(_each(sources, count), _each(targets, count), strict=True):
        for run in runs:
            run.target[target] = run.source[source]


def _copy_some_at_a_time(
    runs: Sequence[PageCopy], count: int, page_bytes: int, sources: Int64Array | None, targets: Int64Array | None
) -> None:
    step = count if sources is None else max(1, _TEMPORARY_BYTES // page_bytes)
    for at in range(0, count, step):
        stop = min(at + step, count)
        for run in runs:
            run.target[_part(targets, at, stop)] = run.source[_part(sources, at, stop)]


def _slice(ids: Int64Array | None) -> Int64Array | None:
    """None for 0, 1, 2, ...: a slice is read in place, ids through a temporary."""
    return None if ids is None or np.array_equal(ids, np.arange(ids.size)) else ids


def _each(ids: Int64Array | None, count: int) -> Iterable[int]:
    return range(count) if ids is None else ids.tolist()


def _part(ids: Int64Array | None, start: int, stop: int) -> Int64Array | slice:
    return slice(start, stop) if ids is None else ids[start:stop]
