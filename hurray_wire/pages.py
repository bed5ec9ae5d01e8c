"""A pool of pages as memory: any strides, any byte order, packed or not, read without copying the pool.

`PagePool` is what encoding, gathering and comparing read through. Copies go page by page, a megabyte of temporary
at a time at the most, and straight into their destination where the pool's memory allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hurray_wire.arrays import Bytes, address, raw_view
from hurray_wire.indices import IntArray

_TEMPORARY_BYTES = 1 << 17
"""Temporary of one step over a strided pool: it stays in the first- or second-level cache (measured)."""
_CHUNK_BYTES = 1 << 20


class PagePool:
    """The pages of a pool as rows of `page_bytes` little-endian bytes.

    Args:
        array: `[num_pages, page_size, num_heads, head_dim]`, or 1-D uint8 where elements are packed.
        num_pages: pages of the pool.
        page_bytes: bytes of one page, or 0 where a page does not end with a byte (then only `flat` serves).
    """

    __slots__ = ("_rows", "_scale", "array", "num_pages", "page_bytes")

    def __init__(self, array: npt.NDArray[Any], num_pages: int, page_bytes: int) -> None:
        if array.ndim == 1 and page_bytes and num_pages:
            array = array.reshape(num_pages, page_bytes)  # a view: one stride is split in two
        self.array = array
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self._rows: Bytes | None = None
        self._scale = 1
        if page_bytes and num_pages:
            self._rows, self._scale = _rows(array, num_pages, page_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_pages * self.page_bytes if self.page_bytes else self.array.nbytes

    def flat(self) -> Bytes | None:
        """The whole pool's own memory in wire order, or None where only a copy would be that."""
        if self.array.flags.c_contiguous and is_little(self.array.dtype):
            return raw_view(self.array)
        return None

    def run(self, start: int, stop: int) -> Bytes | None:
        """The own memory of pages `start` to `stop`, or None where they do not lie in one piece."""
        if self._rows is None or (self._scale != 1 and stop - start > 1):
            return None
        first = start * self._scale
        return self._rows[first : first + stop - start].reshape(-1)

    def begin(self) -> tuple[int, int] | None:
        """Address of the first page, and bytes from one page to the next; None where pages are not whole pieces."""
        if self._rows is None:
            return None
        return address(self._rows), self.page_bytes * self._scale

    def copy_all(self, out: Bytes) -> None:
        """Copy the whole pool into contiguous `out`."""
        if self.page_bytes:
            self.copy(slice(0, self.num_pages), out)
        elif self.array.ndim == 1:
            np.copyto(out, self.array)

    @property
    def lies_in_pages(self) -> bool:
        """Whether each page is one piece of memory in wire order."""
        return self._rows is not None

    def copy(self, ids: IntArray | slice, out: Bytes) -> None:
        """Copy pages, by ids within the pool or a contiguous slice, into contiguous `out` of their bytes."""
        count = ids.stop - ids.start if isinstance(ids, slice) else ids.size
        if not count or not self.page_bytes:
            return
        if self._rows is not None:
            self._copy_rows(ids, out.reshape(count, self.page_bytes))
            return
        target = out.view(self.array.dtype.newbyteorder("<")).reshape(count, *self.array.shape[1:])
        step = max(1, _TEMPORARY_BYTES // self.page_bytes)
        for at in range(0, count, step):
            stop = min(at + step, count)
            part = slice(ids.start + at, ids.start + stop) if isinstance(ids, slice) else ids[at:stop]
            target[at:stop] = self.array[part]

    def _copy_rows(self, ids: IntArray | slice, out: Bytes) -> None:
        assert self._rows is not None
        if isinstance(ids, slice):
            np.copyto(out, self._rows[ids.start * self._scale : (ids.stop - 1) * self._scale + 1 : self._scale])
            return
        # `take` copies a strided source whole before it looks at the ids; these rows are contiguous by making.
        # mode="clip" writes straight into `out`; ids were checked when the tensor was made.
        index = ids.astype(np.intp) * self._scale if self._scale != 1 else ids.astype(np.intp, copy=False)
        np.take(self._rows, index, axis=0, out=out, mode="clip")

    def chunks(self) -> Iterator[Bytes]:
        """The own memory of a contiguous pool, about a megabyte at a time."""
        whole = self.flat()
        assert whole is not None
        for at in range(0, whole.size, _CHUNK_BYTES):
            yield whole[at : at + _CHUNK_BYTES]

    def paged_chunks(self, page_step: int) -> Iterator[Bytes]:
        """The pool's bytes in order, so many pages at a time: own memory, or a copy that the next one overwrites."""
        if not self.page_bytes:
            return
        scratch = np.empty(min(page_step, self.num_pages) * self.page_bytes, np.uint8)
        for start in range(0, self.num_pages, page_step):
            stop = min(start + page_step, self.num_pages)
            part = self.run(start, stop)
            if part is None:
                part = scratch[: (stop - start) * self.page_bytes]
                self.copy(slice(start, stop), part)
            yield part


def is_little(dtype: np.dtype[Any]) -> bool:
    """Whether elements lie in memory as on the wire."""
    return dtype.newbyteorder("<") == dtype


def _rows(array: npt.NDArray[Any], num_pages: int, page_bytes: int) -> tuple[Bytes | None, int]:
    """The pool as contiguous rows, and how many rows stand from one page to the next; None if pages are not whole.

    A key half of `[pages, 2, ...]` has its pages in one piece each, two rows apart: the rows between them are
    the other half's, and are never read.
    """
    if not is_little(array.dtype):
        return None, 1
    if array.flags.c_contiguous:
        return raw_view(array).reshape(num_pages, page_bytes), 1
    stride = array.strides[0] if num_pages > 1 else page_bytes
    if not array[0].flags.c_contiguous or stride <= 0 or stride % page_bytes:
        return None, 1
    scale = stride // page_bytes
    shape = ((num_pages - 1) * scale + 1, page_bytes)
    base = raw_view(array[0])
    return np.lib.stride_tricks.as_strided(base, shape, (page_bytes, 1), writeable=False), scale
