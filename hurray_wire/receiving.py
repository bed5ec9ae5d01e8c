"""Decoding into memory that the receiver chose: whole buffers that came by other means, and pages of its own pool.

`decode_parts` puts a header and buffers together, `decode_into` scatters a blob's pages to the receiver's page ids,
decompressing there. All that is not payload is checked before the first page is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from hurray_wire import bare, frame_reader, indices
from hurray_wire.arrays import Bytes, address, as_array, as_bytes, refuse_overlap
from hurray_wire.assembly import Parts, of_buffers
from hurray_wire.compression import default_threads, run_chunks
from hurray_wire.descriptor import TensorDescriptor
from hurray_wire.errors import (
    Code,
    Difference,
    FrameError,
    MismatchError,
    TruncatedError,
    UnsupportedError,
    violations_error,
)
from hurray_wire.forms import PREFIX_BYTES, Form, identify
from hurray_wire.indices import Int64Array
from hurray_wire.memory import allocated, placed, private
from hurray_wire.options import DecodeOptions, Decoding, check_expected, decode_options
from hurray_wire.payload import resized
from hurray_wire.quantization import PerBlockAffine
from hurray_wire.sections import BUFFERS, header_bytes, small_end
from hurray_wire.tags import Codec, SectionKind
from hurray_wire.tensor import BlockPagedTensor

__all__ = ["decode_into", "decode_parts"]

Array = npt.NDArray[Any]


# Buffers that came by other means.


def decode_parts(header: Any, buffers: Sequence[Any], **options: Unpack[Decoding]) -> BlockPagedTensor:
    """The tensor of a header and one buffer for each of the descriptor's handles, checked as `decode` would.

    Args:
        header: what `encode_header` gave, or anything that begins with it.
        buffers: page_pool, block_table, seq_ptr, and scales, zero_points where there are; contiguous, of exactly the
            handles' sizes. The pool and the scales are viewed (copied with `copy=True`), tables are copied.

    Raises:
        TruncatedError, FrameError `trailing_bytes`: a buffer of another size than its handle says.
        ValueError: another number of buffers. All else as `decode`.

    Example:
        >>> import numpy as np
        >>> import hurray_wire as hw
        >>> pool = np.ones((1, 4, 1, 8), np.int8)
        >>> t = hw.BlockPagedTensor(pool, block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> hw.decode_parts(hw.encode_header(t), [pool, t.block_table, t.seq_ptr]) == t
        True
    """
    chosen = decode_options(options)
    raw, given = as_bytes(header), [as_bytes(as_array(buffer)) for buffer in buffers]
    if identify(raw[:PREFIX_BYTES].tobytes()) is Form.BARE:
        return BlockPagedTensor.of_parts(_bare_parts(raw, given, chosen))
    found, small = described_header(raw, chosen)
    fetch = fetch_from_buffers(found.head, raw, given)
    _check_buffers(found.descriptor, given)
    small = small._replace(tables=frame_reader.read_tables(found.head, fetch))
    frame_reader.check_payload(found, fetch, chosen)
    return BlockPagedTensor.of_parts(frame_reader.finish(found, small, fetch, chosen))


def described_header(raw: Bytes, options: DecodeOptions) -> tuple[frame_reader.Described, frame_reader.Small]:
    """The first seven stages of a frame whose buffers travel by other means, from its header; tables are not there."""
    head = frame_reader.read_frame_head(raw, 0, options.limits, whole=False)
    frame_reader.refuse_closing(head)
    _refuse_compressed(head)
    _refuse_left_behind(head)
    if raw.size < small_end(head.table):
        raise frame_reader.truncated(small_end(head.table), raw.size, 0, "sections")
    return frame_reader.describe(head, fetch_from_buffers(head, raw, ()), options, tables=False)


def _bare_parts(header: Bytes, given: Sequence[Bytes], options: DecodeOptions) -> Parts:
    descriptor, length = bare.read_bare_descriptor(header, 0, options)
    bare.check_bare_sizes([handle.byte_size for handle in descriptor.buffers], length, 0, options)
    _check_buffers(descriptor, given)
    check_expected(descriptor, None, options.expect)
    pool, *scales = (placed(b, descriptor, i, options) for i, b in enumerate(given) if i not in (1, 2))
    tables = private(given[1]), private(given[2])
    return of_buffers(descriptor, pool, tables, scales, None, None, strict=options.strict)


def _check_buffers(descriptor: TensorDescriptor, given: Sequence[Bytes]) -> None:
    if len(given) != len(descriptor.buffers):
        raise ValueError(f"the descriptor has {len(descriptor.buffers)} buffers, {len(given)} were given")
    for i, (handle, buffer) in enumerate(zip(descriptor.buffers, given, strict=True)):
        if buffer.size < handle.byte_size:
            raise TruncatedError(needed=handle.byte_size, available=buffer.size, where=f"buffers[{i}]")
        if buffer.size > handle.byte_size:
            message = f"has {buffer.size} bytes, its handle says {handle.byte_size}"
            raise FrameError(message, code=Code.TRAILING_BYTES, where=f"buffers[{i}]")


def _refuse_compressed(head: frame_reader.Head) -> None:
    packed = head.table.entries["codec"] != Codec.RAW
    if packed.any():
        index = int(packed.argmax())
        message = "the section is compressed: buffers that travel by other means travel raw"
        raise FrameError(message, code=Code.SECTION_CODEC, where=f"sections[{index}].codec")


def _refuse_left_behind(head: frame_reader.Head) -> None:
    if not head.table.unknown:
        return
    first = header_bytes(head.table, head.prologue.frame_length)
    for index in head.table.unknown:
        if head.table.records[index].offset >= first:
            message = "the section lies behind the buffers, and neither they nor the header hold it"
            raise FrameError(message, code=Code.SECTION_KIND, where=f"sections[{index}].kind")


def fetch_from_buffers(head: frame_reader.Head, header: Bytes, given: Sequence[Bytes]) -> frame_reader.Fetch:
    """Bytes of the frame as if it lay in one piece; padding between buffers did not travel."""
    starts = []
    for i, buffer in enumerate(given):
        rows = head.table.rows(BUFFERS.start + i)
        starts.append((int(rows[0]["offset"]) if len(rows) else -1, buffer))
    first = header_bytes(head.table, head.prologue.frame_length)

    def fetch(start: int, length: int) -> Bytes:
        if start < first:
            return header[start : start + length]
        for begin, buffer in starts:
            if 0 <= begin <= start < begin + buffer.size:
                return buffer[start - begin : start - begin + length]
        return header[:0]

    return fetch


# Pages of the receiver's pool.


def decode_into(data: Any, pool: Any, page_ids: Any, **options: Unpack[Decoding]) -> BlockPagedTensor:
    """Decode a blob's pages into a pool of the receiver's: wire page j lands in `pool[page_ids[j]]`.

    Args:
        data: one item, either form.
        pool: `[pages, page_size, num_heads, head_dim]` of the tensor's element type, strided along any axis, writable;
            for packed types 1-D uint8 of whole pages.
        page_ids: distinct ids within the pool, as many as the blob has pages.

    Returns:
        A tensor that views `pool`, its block_table in the receiver's ids.

    Raises:
        MismatchError: the pool's element type, page size, heads or head_dim are not the blob's.
        ValueError, IndexError: page_ids, or a pool that cannot be written.
        FrameError: with `.pages_written`, the ids to discard, where the payload fails; nothing else was touched, and
            all that is not payload was checked before the first write. All else as `decode`.

    Example:
        >>> import numpy as np
        >>> import hurray_wire as hw
        >>> t = hw.BlockPagedTensor(np.ones((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> mine = np.zeros((9, 4, 1, 8), np.int8)
        >>> hw.decode_into(hw.encode(t), mine, [7]).block_table.tolist(), int(mine[7].sum())
        ([7], 32)
    """
    chosen = decode_options(options)
    raw = as_bytes(data)
    if identify(raw[:PREFIX_BYTES].tobytes()) is Form.BARE:
        return _bare_into(raw, pool, page_ids, chosen)
    head = frame_reader.read_frame_head(raw, 0, chosen.limits)
    frame_reader.refuse_closing(head)
    fetch = frame_reader.fetch_from(raw, 0)
    found, small = frame_reader.describe(head, fetch, chosen)
    if raw.size > head.prologue.frame_length:
        message = f"{raw.size - head.prologue.frame_length} bytes follow the frame"
        raise FrameError(message, code=Code.TRAILING_BYTES, where="trailing_bytes", offset=head.prologue.frame_length)
    return frame_into(found, small, fetch, pool, page_ids, chosen)


def frame_into(
    found: frame_reader.Described,
    small: frame_reader.Small,
    fetch: frame_reader.Fetch,
    pool: Any,
    page_ids: Any,
    options: DecodeOptions,
) -> BlockPagedTensor:
    """The rest of `decode_into` for a frame whose first seven stages have passed."""
    target = destination(found.descriptor, pool, page_ids)
    frame_reader.check_payload(found, fetch, options, pool=False)
    parts = target.mappable(tables_only(found, small, fetch, options))

    def write(index: int) -> None:
        entry = found.head.table.records[index]
        stored = fetch(entry.offset, entry.stored_length)
        if options.verify:
            frame_reader.verify_section(found.head, index, stored)
        target.put(entry.raw_offset, entry.raw_length, _decoder(found.head, index, stored))

    rows = found.head.table.numbers(int(SectionKind.PAGE_POOL))
    threads = default_threads(found.descriptor.buffers[0].byte_size, options.threads)
    try:
        run_chunks(write, rows, threads=threads)
    except FrameError as error:
        error.pages_written = target.written()
        raise
    return BlockPagedTensor.of_parts(target.adopted(parts))


def tables_only(
    found: frame_reader.Described, small: frame_reader.Small, fetch: frame_reader.Fetch, options: DecodeOptions
) -> Parts:
    """Stage 9 of a frame without touching its pool: everything else of the tensor."""
    scales = [frame_reader.read_buffer(found, i, fetch, options) for i in range(3, len(found.descriptor.buffers))]
    return of_buffers(
        found.descriptor,
        None,
        frame_reader.decoded_tables(found, small, options),
        scales,
        small.seq_lens,
        found.metadata,
        strict=options.strict,
        offsets=lambda: frame_reader.table_offsets(found),
    )


def _decoder(head: frame_reader.Head, index: int, stored: Bytes) -> Chunk:
    if head.table.records[index].codec == Codec.RAW:
        return Chunk(stored, None)
    return Chunk(None, lambda out: frame_reader.decode_chunk(head, index, stored, out))


def _bare_into(raw: Bytes, pool: Any, page_ids: Any, options: DecodeOptions) -> BlockPagedTensor:
    item = bare.read_bare_item(raw, 0, options, alone=True)
    target = destination(item.descriptor, pool, page_ids)
    scales = [placed(item.buffers[i], item.descriptor, i, options) for i in range(3, len(item.buffers))]
    tables = private(item.buffers[1]), private(item.buffers[2])
    parts = of_buffers(item.descriptor, None, tables, scales, None, None, strict=options.strict, offsets=item.offsets)
    target.mappable(parts)
    size = item.descriptor.buffers[0].byte_size
    target.put(0, min(size, target.page_bytes * target.ids.size), Chunk(item.buffers[0], None))
    return BlockPagedTensor.of_parts(target.adopted(parts))


Vector = list[memoryview]
_VECTOR_PAGES = 512
"""Pages whose memory is listed at a time: vectored calls take about a thousand pieces."""


def _nothing() -> None:
    """Pages that were received in place need nothing more."""


class Chunk(NamedTuple):
    """A run of wire pages: their bytes as they lie, or how to decode them into memory."""

    raw: Bytes | None
    decode: Callable[[Bytes], None] | None


class Destination:
    """The receiver's pool and where each wire page goes in it."""

    def __init__(self, pool: Array, ids: Int64Array, page_bytes: int, flat: bool) -> None:
        self.pool = pool
        self.ids = ids
        self.page_bytes = page_bytes
        self._rows = pool.reshape(-1, page_bytes) if flat and page_bytes else pool
        self._lock = Lock()
        self._done: list[slice | Int64Array] = []

    def put(self, raw_offset: int, raw_length: int, chunk: Chunk) -> None:
        """Write a run of whole wire pages; they count as written from the moment that the first byte may be."""
        if not self.page_bytes or not raw_length:
            return
        pages = slice(raw_offset // self.page_bytes, (raw_offset + raw_length) // self.page_bytes)
        ids = self.ids[pages]
        raw = chunk.raw
        if raw is None:
            assert chunk.decode is not None
            place = self._in_place(ids)
            if place is not None:
                self.note(pages)
                chunk.decode(place)
                return
            raw = allocated(raw_length, None)
            chunk.decode(raw)
        self.note(pages)
        self._rows[_run(ids)] = self._typed(raw[:raw_length], ids.size)

    def vectors(
        self, raw_offset: int, raw_length: int, scratch_bytes: int
    ) -> Iterator[tuple[int, Vector, Callable[[], None]]]:
        """Memory to receive a run of wire pages into: where it begins in the pool's bytes, the vector, and what to
        call when it is full. The pages' own memory where each is one piece as on the wire, else a scratch that is
        then copied to its pages."""
        if not self.page_bytes or not raw_length:
            return
        pages = range(raw_offset // self.page_bytes, (raw_offset + raw_length) // self.page_bytes)
        own = self._pieces()
        step = _VECTOR_PAGES if own else max(1, scratch_bytes // self.page_bytes)
        scratch = None if own else np.empty(min(step, len(pages)) * self.page_bytes, np.uint8)
        for start in range(pages.start, pages.stop, step):
            part = slice(start, min(start + step, pages.stop))
            if scratch is None:
                self.note(part)
                yield part.start * self.page_bytes, self._memory(self.ids[part]), _nothing
            else:
                run = scratch[: (part.stop - part.start) * self.page_bytes]
                yield part.start * self.page_bytes, [memoryview(run)], partial(self._place, part, run)

    def _place(self, pages: slice, run: Bytes) -> None:
        self.note(pages)
        ids = self.ids[pages]
        self._rows[_run(ids)] = self._typed(run, ids.size)

    def addresses(self) -> Int64Array | None:
        """Where each wire page begins in the receiver's memory, or None where pages do not lie there as on the wire."""
        if not self._pieces():
            return None
        stride = self._rows.strides[0] if self._rows.shape[0] > 1 else self.page_bytes
        return self.ids * stride + address(self._rows)

    def memory(self, pages: slice) -> Vector:
        """The memory of wire pages, where each lies as on the wire; neighbours in one piece."""
        ids = self.ids[pages]
        return self._memory(ids) if ids.size else []

    def fill_held(self, start: int, held: npt.NDArray[np.bool_], out: Bytes) -> None:
        """Copy the pages that the receiver has already, of a run of wire pages from `start`, to their places in it."""
        if held.any():
            self._typed(out, held.size)[held] = self._rows[self.ids[start : start + held.size][held]]

    def put_wanted(self, start: int, wanted: npt.NDArray[np.bool_], run: Bytes) -> None:
        """Write those pages of a run of wire pages from `start` that the receiver did not have."""
        pages = np.flatnonzero(wanted) + start
        self.note(pages)
        self._rows[self.ids[pages]] = self._typed(run, wanted.size)[wanted]

    def _pieces(self) -> bool:
        """Whether each page is one piece of memory as on the wire."""
        little = self._rows.dtype.newbyteorder("<") == self._rows.dtype
        return little and bool(self._rows.shape[0]) and self._rows[0].flags.c_contiguous

    def _memory(self, ids: Int64Array) -> Vector:
        """The pages' memory, neighbours in one piece."""
        whole = self._rows.flags.c_contiguous
        cuts = np.flatnonzero(ids[1:] != ids[:-1] + 1) + 1 if whole else np.arange(1, ids.size)
        bounds = [0, *cuts.tolist(), ids.size]
        runs = [(int(ids[a]), b - a) for a, b in pairwise(bounds)]
        return [memoryview(self._rows[first : first + n].reshape(-1).view(np.uint8)) for first, n in runs]

    def note(self, pages: slice | Int64Array) -> None:
        """Count wire pages as written: from now on they may be."""
        with self._lock:
            self._done.append(pages)

    def _typed(self, raw: Bytes, count: int) -> Array:
        """Wire pages as elements of the pool; wherever they lie, NumPy copies from there."""
        element = self._rows.dtype.newbyteorder("<")
        return np.ndarray((count, *self._rows.shape[1:]), element, buffer=raw)

    def _in_place(self, ids: Int64Array) -> Bytes | None:
        """The pool's own memory for these pages, where it is one run as on the wire."""
        run = _run(ids)
        if not isinstance(run, slice) or self._rows.dtype.newbyteorder("<") != self._rows.dtype:
            return None
        pages = self._rows[run]
        return pages.reshape(-1).view(np.uint8) if pages.flags.c_contiguous else None

    def written(self) -> Int64Array:
        """The receiver's ids that may have been written so far."""
        return np.concatenate([self.ids[done] for done in self._done] or [self.ids[:0]])

    def mappable(self, parts: Parts) -> Parts:
        """The parts, whose ids can be turned into the receiver's: those that a lenient reader tolerated may not."""
        if parts.block_table.size and indices.largest(parts.block_table) >= self.ids.size:
            raise violations_error(parts.violations)
        return parts

    def adopted(self, parts: Parts) -> Parts:
        """The tensor over the receiver's pool: table, scales and sizes in its ids."""
        layout = parts.descriptor.layout
        num_pages = layout.num_pages if self.pool.ndim == 1 and not self.page_bytes else self._rows.shape[0]
        table = self.ids[parts.block_table.astype(np.int64)].astype(parts.descriptor.index_dtype)
        table.flags.writeable = False
        scales, zero_points = parts.scales, parts.zero_points
        if isinstance(parts.descriptor.quantization, PerBlockAffine):
            scales, zero_points = (self._scattered(a, num_pages) for a in (scales, zero_points))
        descriptor = resized(parts, num_pages)
        return parts._replace(
            descriptor=descriptor, page_pool=self.pool, block_table=table, scales=scales, zero_points=zero_points
        )

    def _scattered(self, entries: Array | None, num_pages: int) -> Array | None:
        if entries is None:
            return None
        spread = np.zeros((num_pages, entries.shape[1]), entries.dtype)
        spread[self.ids] = entries
        return spread


def _run(ids: Int64Array) -> slice | Int64Array:
    """Neighbouring ids as a slice: copied whole, and in place where memory allows."""
    first = int(ids[0])
    if ids.size == 1 or (int(ids[-1]) - first == ids.size - 1 and bool((ids[1:] - ids[:-1] == 1).all())):
        return slice(first, first + ids.size)
    return ids


def destination(descriptor: TensorDescriptor, pool: Any, page_ids: Any) -> Destination:
    """A receiver's pool and ids, held to the descriptor before anything is written."""
    array, layout = as_array(pool), descriptor.layout
    page_bytes = descriptor.page_bytes
    flat = descriptor.dtype.is_flat
    if not array.flags.writeable:
        raise ValueError("the pool is read-only")
    refuse_overlap(array)
    if flat:
        if not page_bytes and descriptor.buffers[0].byte_size:
            message = "pages end inside bytes: they cannot be placed one by one"
            raise UnsupportedError(message, code=Code.PACKED_POOL, where="page_pool")
        if (
            array.ndim != 1
            or array.dtype != np.uint8
            or not array.flags.c_contiguous
            or array.size % max(1, page_bytes)
        ):
            raise ValueError(
                f"a pool of {descriptor.dtype.name} is contiguous 1-D uint8 of whole {page_bytes}-byte pages"
            )
        count = array.size // page_bytes if page_bytes else layout.num_pages
    else:
        _check_pool(descriptor, array)
        count = array.shape[0]
    ids = _page_ids(page_ids, layout.num_pages, count)
    most = np.iinfo(descriptor.index_dtype).max
    if count > most and ids.size and int(ids.max()) > most:
        raise IndexError(f"page id {int(ids.max())} does not fit the blob's {layout.block_table_index_type} table")
    return Destination(array, ids, page_bytes, flat)


def _check_pool(descriptor: TensorDescriptor, array: Array) -> None:
    expected = (descriptor.layout.page_size, *descriptor.shape[1:])
    if array.ndim != 4:
        raise ValueError(f"the pool has shape {array.shape}, must be [pages, page_size, num_heads, head_dim]")
    pairs = zip(("page_size", "num_heads", "head_dim"), expected, array.shape[1:], strict=True)
    differences = [Difference(name, found, mine) for name, found, mine in pairs if found != mine]
    if array.dtype.newbyteorder("=") != descriptor.dtype.numpy:
        differences.insert(0, Difference("dtype", descriptor.dtype.name, str(array.dtype)))
    if differences:
        raise MismatchError(differences)


def _page_ids(page_ids: Any, needed: int, available: int) -> Int64Array:
    ids = indices.as_integers(
        page_ids if isinstance(page_ids, list | tuple | range) else as_array(page_ids), "page_ids"
    )
    if ids.size != needed:
        raise ValueError(f"the blob has {needed} pages, {ids.size} page_ids were given")
    rising = bool((ids[1:] > ids[:-1]).all())
    ordered = ids if rising else np.sort(ids)  # a tenth of the time of np.unique, which hashes
    if ids.size and (int(ordered[0]) < 0 or int(ordered[-1]) >= available):
        at = int(((ids < 0) | (ids >= available)).argmax())
        raise IndexError(f"page_ids[{at}] is {int(ids[at])}, must be from 0 to {available - 1}")
    if not rising and (ordered[1:] == ordered[:-1]).any():
        order = np.argsort(ids, kind="stable")
        twin = int((ids[order][1:] == ids[order][:-1]).argmax())
        first, second = order[twin], order[twin + 1]
        raise ValueError(f"page_ids[{second}] is {int(ids[second])}, as page_ids[{first}] is; they must be distinct")
    return ids.astype(np.int64)
