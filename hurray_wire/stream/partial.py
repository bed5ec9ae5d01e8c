"""`open_frame`: some pages, or one sequence, of an item that stays where it is; only what is touched is read.

Over a buffer, a file, or anything that can `read_at(offset, length)`: a mapped file, an object store, another machine.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hurray_wire import bare, frame_reader
from hurray_wire.arrays import Bytes, raw_view
from hurray_wire.assembly import Parts, of_buffers
from hurray_wire.descriptor import TensorDescriptor, decode_descriptor, stated_length
from hurray_wire.errors import Code, UnsupportedError
from hurray_wire.forms import PREFIX_BYTES, Form, identify
from hurray_wire.indices import as_integers
from hurray_wire.inspection import Inspection, inspect_bare, inspection_of
from hurray_wire.memory import allocated, placed, private
from hurray_wire.options import DEFAULT_LIMITS, DecodeOptions, Limits, check_expected
from hurray_wire.pages import PagePool
from hurray_wire.receiving import tables_only
from hurray_wire.sections import header_bytes
from hurray_wire.stream.ranges import RangeReader
from hurray_wire.structs.frame import PROLOGUE_PLAN
from hurray_wire.tags import MIN_ALIGNMENT, Codec, SectionKind
from hurray_wire.tensor import BlockPagedTensor, token_elements

__all__ = ["Frame", "open_frame"]

Array = npt.NDArray[Any]


def open_frame(
    source: Any,
    offset: int = 0,
    *,
    limits: Limits = DEFAULT_LIMITS,
    expect: Any = None,
    verify: bool = True,
) -> Frame:
    """Read the head and the tables of the item at `offset`, and leave its pool where it is. Sections 3 and 4.

    Args:
        source: a buffer, a path, or `read_at(offset, length) -> bytes`, which gives less only at its end; an object
            with that method and, where it fetches several ranges at once, `read_ranges([(offset, length), ...])`.
        limits, expect: as in `decode`.
        verify: whether the chunks that are touched are held to their checksums; without it raw chunks are read by
            the page.

    Returns:
        A `Frame`, a context manager that closes what a path opened.

    Raises:
        As `decode`, for all but the payload; OSError of reading. ValueError: a negative offset.

    Example:
        >>> import numpy as np
        >>> import hurray_wire as hw
        >>> pool = np.arange(64, dtype=np.int8).reshape(2, 4, 1, 8)
        >>> t = hw.BlockPagedTensor(pool, block_table=[1, 0], seq_ptr=[0, 1, 2], seq_lens=[3, 4])
        >>> with open_frame(hw.encode(t)) as frame:
        ...     frame.gather(0)[0, 0].tolist(), len(frame.ranges(0))
        ([32, 33, 34, 35, 36, 37, 38, 39], 1)
    """
    if operator.index(offset) < 0:
        raise ValueError(f"offset must be at least 0, not {offset}")
    reader = RangeReader.of(source)
    options = DecodeOptions(limits=limits, expect=expect, verify=verify, owned=reader.owned)
    try:
        return _opened(reader, offset, options)
    except BaseException:
        reader.close()
        raise


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of whole wire pages as stored: a section of a frame, or the pool of a bare item."""

    first_page: int
    num_pages: int
    offset: int
    stored_bytes: int
    index: int
    raw: bool


def _opened(reader: RangeReader, offset: int, options: DecodeOptions) -> Frame:
    prefix = reader.read(offset, PREFIX_BYTES).tobytes()
    if identify(prefix, offset) is Form.BARE:
        return _opened_bare(reader, offset, options)
    size = PROLOGUE_PLAN.size
    prologue = frame_reader.read_prologue(reader.read(offset, size).tobytes(), offset, options.limits)
    total = prologue.frame_length
    header = reader.exactly(offset, prologue.header_length, offset, total, "header_length").tobytes()
    head = frame_reader.read_head(header, prologue, offset)
    frame_reader.refuse_closing(head)
    reader.exactly(offset + total - 1, 1, offset, total, "frame_length")  # stage 2: all of it must be there

    def fetch(start: int, length: int) -> Bytes:
        return reader.exactly(offset + start, length, offset, total, "frame_length")

    found, small = frame_reader.describe(head, fetch, options)
    parts = tables_only(found, small, fetch, options)
    runs = _runs_of(head, found.descriptor)
    front = fetch(0, header_bytes(head.table, total))
    inspection = inspection_of(head, found, small.descriptor, front)
    return Frame(reader, parts, runs, inspection, options, found, small, offset)


def _runs_of(head: frame_reader.Head, descriptor: TensorDescriptor) -> list[_Run]:
    page_bytes = descriptor.page_bytes
    runs = []
    for index in head.table.numbers(int(SectionKind.PAGE_POOL)):
        entry = head.table.records[index]
        raw = entry.codec == Codec.RAW
        first, count = (n // max(1, page_bytes) for n in (entry.raw_offset, entry.raw_length))
        runs.append(_Run(first, count, head.base + entry.offset, entry.stored_length, index, raw))
    return runs


def _opened_bare(reader: RangeReader, offset: int, options: DecodeOptions) -> Frame:
    prefix = reader.read(offset, 20)
    length = stated_length(memoryview(prefix), offset)
    options.limits.check("descriptor_bytes", length, "descriptor_length", offset + 6)
    data = reader.exactly(offset, length, offset, length, "descriptor_length")
    descriptor = decode_descriptor(data.tobytes(), base=offset)
    sizes = [handle.byte_size for handle in descriptor.buffers]
    total = bare.check_bare_sizes(sizes, length, offset, options)
    reader.exactly(offset + total - 1, 1, offset, total, "buffers")
    check_expected(descriptor, None, options.expect)
    starts = [offset + length + sum(sizes[:i]) for i in range(len(sizes))]
    read = [reader.exactly(starts[i], sizes[i], offset, total, f"buffers[{i}]") for i in range(1, len(sizes))]
    tables = private(read[0]), private(read[1])
    parts = of_buffers(
        descriptor, None, tables, read[2:], None, None, strict=True, offsets=lambda: bare.bare_offsets(offset, starts)
    )
    runs = [_Run(0, descriptor.layout.num_pages, starts[0], sizes[0], 0, raw=True)] if sizes[0] else []
    inspection = inspect_bare(data, 0, options, base=offset)
    return Frame(reader, parts, runs, inspection, options, None, None, offset)


class Frame:
    """An item whose pool has not been read: `.inspection`, and pages or tokens on demand.

    `.block_table`, `.seq_ptr`, `.seq_lens` and `.descriptor` are read and checked already.

    Example:
        >>> import numpy as np
        >>> import hurray_wire as hw
        >>> t = hw.BlockPagedTensor(np.ones((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> frame = hw.open_frame(hw.encode(t))
        >>> frame.pages([0]).shape, frame.tensor() == t
        ((1, 4, 1, 8), True)
    """

    def __init__(
        self,
        reader: RangeReader,
        parts: Parts,
        runs: list[_Run],
        inspection: Inspection,
        options: DecodeOptions,
        found: frame_reader.Described | None,
        small: frame_reader.Small | None,
        base: int,
    ) -> None:
        self.inspection = inspection
        self.descriptor = parts.descriptor
        self.block_table = parts.block_table
        self.seq_ptr = parts.seq_ptr
        self.seq_lens = parts.seq_lens
        self._reader = reader
        self._parts = parts
        self._runs = runs
        self._firsts = np.array([run.first_page for run in runs], np.int64)
        self._options = options
        self._found = found
        self._small = small
        self._base = base
        self._page_bytes = parts.descriptor.page_bytes

    # What to read.

    def ranges(self, seq: int) -> list[tuple[int, int]]:
        """(offset, length) of the stored bytes that `gather(seq)` reads, in order, neighbours joined.

        Raises:
            IndexError: no such sequence.
            UnsupportedError: `seq_lens_unknown`.
        """
        touched = self._touched(np.unique(self._live_pages(seq)).astype(np.int64))
        return _joined([one for run, pages in touched for one in self._stored_ranges(run, pages)])

    def _by_page(self, run: _Run) -> bool:
        """Whether single pages of a run can be read: not where its checksum wants all of it."""
        return run.raw and not (self._options.verify and self._found is not None)

    def _touched(self, ids: npt.NDArray[np.int64]) -> list[tuple[_Run, npt.NDArray[np.int64]]]:
        """The runs that hold any of the (sorted) pages, with those."""
        if not ids.size or not self._page_bytes:
            return []
        numbers = np.searchsorted(self._firsts, ids, side="right") - 1
        return [(self._runs[n], ids[numbers == n]) for n in np.unique(numbers).tolist()]

    def _live_pages(self, seq: int) -> Array:
        layout = self.descriptor.layout
        if not 0 <= seq < layout.num_seqs:
            raise IndexError(f"sequence {seq} of {layout.num_seqs}")
        if self.seq_lens is None:
            message = "the item does not carry them"
            raise UnsupportedError(message, code=Code.SEQ_LENS_UNKNOWN, where="seq_lens")
        pages = self.block_table[int(self.seq_ptr[seq]) : int(self.seq_ptr[seq + 1])]
        return pages[: -(-int(self.seq_lens[seq]) // layout.page_size)]

    # Reading it.

    def pages(self, ids: Any, *, out: Array | None = None) -> Array:
        """Pages by their ids in the item, in the order given: `[len(ids), page_size, num_heads, head_dim]`.

        Packed types come as `[len(ids), page_bytes]` of uint8.

        Raises:
            IndexError: an id out of range.
            UnsupportedError: `packed_pool`, where pages end inside bytes.
            ValueError: `out` does not fit.
            ChecksumError, FrameError, TruncatedError: of the chunks that are touched.
        """
        wanted = as_integers(ids if isinstance(ids, list | tuple | range) else np.asarray(ids), "ids").astype(np.int64)
        num_pages = self.descriptor.layout.num_pages
        if wanted.size and (wanted.min() < 0 or wanted.max() >= num_pages):
            raise IndexError(f"page ids must be from 0 to {num_pages - 1}")
        shape, element = self._page_shape()
        if out is None:
            out = allocated(wanted.size * self._page_bytes, None).view(element).reshape(wanted.size, *shape)
        elif out.shape != (wanted.size, *shape) or out.dtype != element:
            raise ValueError(f"out must be {(wanted.size, *shape)} of {element}, is {out.shape} of {out.dtype}")
        order = np.argsort(wanted, kind="stable")
        done = 0
        for run, pages, read in self._read(wanted[order]):
            places = order[done : done + pages.size]
            out[places] = self._pages_of(run, pages, read).view(element).reshape(pages.size, *shape)
            done += pages.size
        return out

    def _read(self, ids: npt.NDArray[np.int64]) -> Iterator[tuple[_Run, npt.NDArray[np.int64], list[Bytes]]]:
        """The runs that hold any of the (sorted) pages, with those and the stored bytes of `_stored_ranges`."""
        touched = self._touched(ids)
        ranges = [self._stored_ranges(run, pages) for run, pages in touched]
        total, at = self.inspection.total_bytes, 0
        read: list[Bytes] = []
        batches = iter(self._reader.batches([one for several in ranges for one in several]))
        for (run, pages), several in zip(touched, ranges, strict=True):
            while len(read) - at < len(several):
                read = read[at:] + self._reader.many(next(batches), self._base, total, "page_pool")
                at = 0
            yield run, pages, read[at : at + len(several)]
            at += len(several)

    def _page_shape(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        descriptor = self.descriptor
        if not self._page_bytes and descriptor.buffers[0].byte_size:
            message = "pages end inside bytes: they cannot be read one by one"
            raise UnsupportedError(message, code=Code.PACKED_POOL, where="page_pool")
        if descriptor.dtype.is_flat or descriptor.dtype.numpy is None:
            return (self._page_bytes,), np.dtype(np.uint8)
        return (descriptor.layout.page_size, *descriptor.shape[1:]), descriptor.dtype.numpy

    def _stored_ranges(self, run: _Run, pages: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        """What to read for (sorted) pages of one run: those pages, neighbours joined, or all of it."""
        if not self._by_page(run):
            return [(run.offset, run.stored_bytes)]
        distinct = np.unique(pages)
        spans = np.split(distinct, np.flatnonzero(np.diff(distinct) != 1) + 1)
        width = self._page_bytes
        return [(run.offset + (int(span[0]) - run.first_page) * width, span.size * width) for span in spans]

    def _pages_of(self, run: _Run, pages: npt.NDArray[np.int64], read: list[Bytes]) -> Bytes:
        """The bytes of (sorted) pages of one run, one behind the other, from what was read for them."""
        if self._by_page(run):
            return _repeated(read[0] if len(read) == 1 else np.concatenate(read), pages, self._page_bytes)
        rows = self._decoded(run, read[0]).reshape(run.num_pages, self._page_bytes)
        first, count = int(pages[0]) - run.first_page, pages.size
        if int(pages[-1]) - int(pages[0]) == count - 1 and np.unique(pages).size == count:
            return rows[first : first + count].reshape(-1)  # neighbours, as they lie
        out = allocated(count * self._page_bytes, None)
        PagePool(rows, run.num_pages, self._page_bytes).copy(pages - run.first_page, out)
        return out

    def _decoded(self, run: _Run, stored: Bytes) -> Bytes:
        """A whole chunk, verified and decoded."""
        if self._found is None:
            return stored
        if self._options.verify:
            frame_reader.verify_section(self._found.head, run.index, stored)
        if run.raw:
            return stored
        out = allocated(run.num_pages * self._page_bytes, None)
        frame_reader.decode_chunk(self._found.head, run.index, stored, out)
        return out

    def _exactly(self, offset: int, length: int) -> Bytes:
        return self._reader.exactly(offset, length, self._base, self.inspection.total_bytes, "page_pool")

    def gather(self, seq: int) -> Array:
        """The tokens of a sequence, `[tokens, num_heads, head_dim]`; only its chunks are read and verified.

        Raises:
            As `pages`; IndexError, UnsupportedError `seq_lens_unknown`.
        """
        ids = self._live_pages(seq)
        assert self.seq_lens is not None
        run = raw_view(self.pages(ids))
        return token_elements(self.descriptor, run, int(self.seq_lens[seq]))

    def tensor(self) -> BlockPagedTensor:
        """The whole tensor, read once, verified and decoded, its padding checked."""
        if self._found is None or self._small is None:
            stored = self._exactly(self._runs[0].offset, self._runs[0].stored_bytes) if self._runs else _NOTHING
            return BlockPagedTensor.of_parts(self._parts.with_pool(placed(stored, self.descriptor, 0, self._options)))
        fetch = self._fetch()
        frame_reader.check_payload(self._found, fetch, self._options)
        return BlockPagedTensor.of_parts(frame_reader.finish(self._found, self._small, fetch, self._options))

    def _fetch(self) -> frame_reader.Fetch:
        """Bytes of the frame from one reading of all behind its header: what is verified is what is handed out."""
        assert self._found is not None
        total = self.inspection.total_bytes
        # From a multiple of 64 on, so that what is aligned in the frame is aligned in memory.
        start = self._found.head.prologue.header_length // MIN_ALIGNMENT * MIN_ALIGNMENT
        rest = self._exactly(self._base + start, total - start)
        return lambda at, length: rest[at - start : at - start + length]

    def close(self) -> None:
        """Close what a path opened."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_NOTHING = np.zeros(0, np.uint8)


def _repeated(unique: Bytes, pages: npt.NDArray[np.int64], width: int) -> Bytes:
    """Pages that were asked for more than once, from the bytes of the distinct ones."""
    distinct, inverse = np.unique(pages, return_inverse=True)
    if distinct.size == pages.size:
        return unique
    return unique.reshape(distinct.size, width)[inverse].reshape(-1)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for offset, length in sorted(ranges):
        if joined and joined[-1][0] + joined[-1][1] == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((offset, length))
    return joined
