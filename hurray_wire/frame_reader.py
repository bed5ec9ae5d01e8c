"""An HRKV frame to the parts of a tensor (section 4), by the stages of section 3.

The mirror of `frame_writer`. Everything is looked at in a private copy: header, small sections and tables are copied
before they are hashed and read, since shared memory can change between a check and its use. The pool is not touched
but to verify it, and is viewed where it lies raw.

`fetch(offset, length)` gives bytes of the frame, counted from its first: a slice of memory, or a read from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from hurray_wire import familiar
from hurray_wire.arrays import Bytes, as_bytes
from hurray_wire.assembly import Parts, of_buffers
from hurray_wire.compression import decompress_chunk, default_threads, run_chunks
from hurray_wire.descriptor import TensorDescriptor, decode_descriptor, in_descriptor, sound_descriptor
from hurray_wire.errors import (
    ChecksumError,
    Code,
    FrameError,
    InvalidDescriptorError,
    TruncatedError,
    UnsupportedError,
)
from hurray_wire.memory import allocated, placed, private
from hurray_wire.metadata import read_metadata
from hurray_wire.options import DecodeOptions, Limits, check_expected
from hurray_wire.sections import (
    BUFFERS,
    Cover,
    SectionTable,
    check_frame_length,
    covered,
    digest_of,
    entry_offset,
    header_length,
    read_table,
)
from hurray_wire.structs.descriptor import FRONT_PLAN
from hurray_wire.structs.frame import CHECKSUM_PLAN, PROLOGUE_PLAN
from hurray_wire.tags import MIN_ALIGNMENT, Codec, FrameFlag, SectionFlag, SectionKind

Fetch = Callable[[int, int], Bytes]

_CHECKSUM = int(SectionFlag.CHECKSUM)
_LAST = int(FrameFlag.LAST)
_RAW = int(Codec.RAW)
_DESCRIPTOR, _SEQ_LENS, _METADATA = int(SectionKind.DESCRIPTOR), int(SectionKind.SEQ_LENS), int(SectionKind.METADATA)
_TABLES = (int(SectionKind.BLOCK_TABLE), int(SectionKind.SEQ_PTR))
_POOL = int(SectionKind.PAGE_POOL)
_ZERO = b"\0"
_SMALL_PADDING = 4096
_MOST_BYTES = 1 << 62
"""No frame is so long: below it sums of offsets stay within 64 bits."""


def is_last(prologue: Any) -> bool:
    """No frame of its stream follows."""
    return bool(prologue.flags & _LAST)


class Head(NamedTuple):
    """A frame's own tables, checked: prologue, section table, checksums, and where the frame begins."""

    prologue: Any
    table: SectionTable
    checksums: Sequence[int]
    base: int
    header: bytes
    """Their bytes."""

    @property
    def last(self) -> bool:
        """No frame of its stream follows."""
        return is_last(self.prologue)

    @property
    def closing(self) -> bool:
        """Ends a stream and holds no tensor."""
        return bool(self.prologue.section_count == 0)


class Described(NamedTuple):
    """A frame after its first six stages: all that is known before the payload is touched."""

    head: Head
    descriptor: TensorDescriptor
    metadata: dict[str, Any] | None
    cover: Cover


# Stages 2 and 3.


def read_prologue(prefix: bytes, base: int, limits: Limits) -> Any:
    """Stage 2: the outer lengths, from the frame's first bytes.

    Raises:
        TruncatedError: fewer than 40 bytes.
        LimitError: `sections`, `frame_bytes`.
        FrameError: `header_length`, `frame_length`, `last`.
    """
    if len(prefix) < PROLOGUE_PLAN.size:
        raise truncated(PROLOGUE_PLAN.size, len(prefix), base, "frame_length")
    prologue = PROLOGUE_PLAN.unpack(prefix)
    count, length = prologue.section_count, prologue.frame_length
    if count > limits.sections or length > limits.frame_bytes:
        limits.check("sections", count, "section_count", base + PROLOGUE_PLAN.offset_of("section_count"))
        limits.check("frame_bytes", length, "frame_length", base + PROLOGUE_PLAN.offset_of("frame_length"))
    if prologue.header_length != header_length(count):
        message = f"is {prologue.header_length}, must be {header_length(count)} for {count} sections"
        raise _prologue_error("header_length", Code.HEADER_LENGTH, message, base)
    if count == 1 or (count == 0 and not prologue.flags & _LAST):
        message = f"is {count}, must be at least 2 (descriptor and seq_ptr), or 0 in a closing frame"
        raise _prologue_error("section_count", Code.HEADER_LENGTH, message, base)
    if not prologue.header_length <= length < _MOST_BYTES or length % MIN_ALIGNMENT:
        message = f"is {length}, must be a multiple of {MIN_ALIGNMENT} that holds {prologue.header_length} bytes"
        raise _prologue_error("frame_length", Code.FRAME_LENGTH, message, base)
    return prologue


def truncated(needed: int, available: int, base: int, where: str) -> TruncatedError:
    """An item that ends early; counts are from its first byte."""
    return TruncatedError(needed=needed, available=available, where=where, offset=base + available)


def _prologue_error(field: str, code: Code, message: str, base: int) -> FrameError:
    return FrameError(message, code=code, where=field, offset=base + PROLOGUE_PLAN.offset_of(field))


def read_head(header: bytes, prologue: Any, base: int) -> Head:
    """Stage 3: header checksum, then the prologue's other fields and the section table in itself."""
    if PROLOGUE_PLAN.unpack(header) != prologue:
        message = "the prologue changed while the header was read"
        raise ChecksumError(message, code=Code.HEADER_CHECKSUM, where="header_checksum", offset=base)
    body = len(header) - CHECKSUM_PLAN.size
    stated = CHECKSUM_PLAN.unpack(header, body).header_checksum
    found = xxhash.xxh3_64_intdigest(memoryview(header)[:body])
    if found != stated:
        raise ChecksumError(
            differ(found, stated), code=Code.HEADER_CHECKSUM, where="header_checksum", offset=base + body
        )
    _check_prologue(prologue, base)
    table, checksums = read_table(header, prologue.frame_length, base)
    return Head(prologue, table, checksums, base, header)


def differ(found: int, stated: int) -> str:
    """A checksum that does not fit, in words."""
    return f"bytes have {found:#018x}, the frame states {stated:#018x}"


def _check_prologue(prologue: Any, base: int) -> None:
    if prologue.flags & ~_LAST:
        message = f"are {prologue.flags:#06x}, bits 1 to 15 must be 0"
        raise _prologue_error("flags", Code.SECTION_FLAGS, message, base)
    if prologue.reserved:
        message = f"is {prologue.reserved:#06x}, must be 0"
        raise _prologue_error("reserved", Code.SECTION_FLAGS, message, base)
    if prologue.section_count == 0:
        check_frame_length(prologue.frame_length, prologue.header_length, MIN_ALIGNMENT, base)


# Stages 4 to 7.


def describe(head: Head, fetch: Fetch, options: DecodeOptions, *, tables: bool = True) -> tuple[Described, Small]:
    """Stages 4 to 7: small sections verified and read, the table held to the descriptor, `expect` asked.

    Args:
        tables: whether block_table and seq_ptr are there to be verified (not in a header alone).
    """
    check_limits(head, options.limits)
    small = _read_small(head, fetch, tables)
    offset = head.base + head.table.first(_DESCRIPTOR).offset
    descriptor = _descriptor(small.descriptor, offset, options)
    cover = covered(head.table, descriptor.extents, head.base)
    check_frame_length(head.prologue.frame_length, cover.end, cover.alignment, head.base)
    options.limits.check("decoded_bytes", descriptor.total_bytes, "buffers", offset + FRONT_PLAN.size)
    metadata = None
    if small.metadata is not None:
        at = head.base + head.table.first(_METADATA).offset
        metadata = read_metadata(small.metadata, descriptor.layout.num_seqs, descriptor.shape[2], at)
    check_expected(descriptor, metadata, options.expect)
    return Described(head, descriptor, metadata, cover), small


class Small(NamedTuple):
    """The bytes of the sections that are always copied and verified."""

    descriptor: bytes
    seq_lens: bytes | None
    metadata: bytes | None
    tables: tuple[bytes, bytes]
    """block_table and seq_ptr as stored, every chunk behind the other."""


def check_limits(head: Head, limits: Limits) -> None:
    """The end of stage 3: sections whose size a limit bounds, before they are read."""
    for kind, name, limit in (
        (_DESCRIPTOR, "descriptor_bytes", limits.descriptor_bytes),
        (_METADATA, "metadata_bytes", limits.metadata_bytes),
    ):
        stored = head.table.small.get(kind)
        if stored is not None and stored[0].length > limit:  # raw: as long as what it holds
            row = stored[0].row
            offset = entry_offset(row, "raw_length", head.base)
            limits.check(name, stored[0].length, f"sections[{row}].raw_length", offset)


def _read_small(head: Head, fetch: Fetch, tables: bool) -> Small:
    descriptor = _verified(head, _DESCRIPTOR, fetch)
    assert descriptor is not None  # stage 3 has seen it
    seq_lens, metadata = _verified(head, _SEQ_LENS, fetch), _verified(head, _METADATA, fetch)
    return Small(descriptor, seq_lens, metadata, read_tables(head, fetch) if tables else (b"", b""))


def read_tables(head: Head, fetch: Fetch) -> tuple[bytes, bytes]:
    """Private copies of block_table and seq_ptr as stored, verified: the end of stage 4."""
    return _verified(head, _TABLES[0], fetch) or b"", _verified(head, _TABLES[1], fetch) or b""


def _verified(head: Head, kind: int, fetch: Fetch) -> bytes | None:
    """A private copy of all bytes stored under a kind, verified; None where it does not stand."""
    places = head.table.small.get(kind)
    if places is None:
        return None
    chunks = []
    for row, offset, length in places:
        stored = private(fetch(offset, length))
        if xxhash.xxh3_64_intdigest(stored) != head.checksums[row]:
            verify_section(head, row, stored)  # says what differs
        chunks.append(stored)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def verify_section(head: Head, index: int, stored: Bytes | bytes) -> None:
    """Hold a section's stored bytes to its checksum, where it has one."""
    verify_pieces(head, index, (stored,))


def verify_pieces(head: Head, index: int, stored: Sequence[Bytes | bytes | memoryview]) -> None:
    """Hold a section whose stored bytes lie in pieces to its checksum, where it has one."""
    if head.table.records[index].flags & _CHECKSUM:
        verify_digest(head, index, digest_of(stored))


def verify_digest(head: Head, index: int, found: int) -> None:
    """Hold what a section's stored bytes were hashed to against its checksum, where it has one."""
    entry, stated = head.table.records[index], head.checksums[index]
    if entry.flags & _CHECKSUM and found != stated:
        kind = entry.kind
        name = SectionKind(kind).name.lower() if kind in set(SectionKind) else f"kind {kind:#04x}"
        offset = head.base + entry.offset
        raise ChecksumError(f"{name}: {differ(found, stated)}", where=f"sections[{index}]", offset=offset)


def _descriptor(data: bytes, offset: int, options: DecodeOptions) -> TensorDescriptor:
    found = sound_descriptor(data)
    if found is not None:
        return found
    descriptor = in_descriptor(data, offset)
    if len(descriptor) != len(data):
        message = f"is {len(descriptor)}, the section holds {len(data)} bytes"
        raise InvalidDescriptorError(message, code=Code.DESCRIPTOR_LENGTH, where="descriptor_length", offset=offset + 6)
    return decode_descriptor(data, base=offset, strict=options.strict)


# Stage 8.


def check_payload(found: Described, fetch: Fetch, options: DecodeOptions, *, pool: bool = True) -> None:
    """Stage 8: checksums of the payload (where `verify` asks), of sections that nobody knows, and padding.

    Args:
        pool: False leaves the page pool to whoever reads it chunk by chunk.
    """
    head, table = found.head, found.head.table
    indices = (*(table.payload if options.verify else ()), *table.unknown)
    if not pool:
        indices = tuple(i for i in indices if table.records[i].kind != _POOL)
    if indices:

        def verify(index: int) -> None:
            entry = table.records[index]
            verify_section(head, index, fetch(entry.offset, entry.stored_length))

        total = sum(table.records[index].stored_length for index in indices)
        run_chunks(verify, indices, threads=default_threads(total, options.threads))
    for start, stop in found.cover.gaps:
        check_padding(fetch(start, stop - start), head.base + start)
    start = found.cover.end
    check_padding(fetch(start, head.prologue.frame_length - start), head.base + start)


def check_padding(padding: Bytes, offset: int) -> None:
    """Padding is zero."""
    if padding.size <= _SMALL_PADDING and not padding.tobytes().strip(_ZERO):
        return  # a few bytes: a microsecond less than NumPy's reduction
    if padding.any():
        index = int((padding != 0).argmax())
        message = f"is {int(padding[index]):#04x}, must be 0"
        raise FrameError(message, code=Code.PADDING, where="padding", offset=offset + index)


def decode_chunk(head: Head, index: int, stored: Bytes, out: Bytes) -> None:
    """One section's stored bytes, verified already, decoded into `out` of its raw_length."""
    entry = head.table.records[index]
    if entry.codec == _RAW:
        np.copyto(out, stored)
        return
    offset = head.base + entry.offset
    width = entry.element_width
    decompress_chunk(memoryview(stored), out.size, width, out, where=f"sections[{index}]", offset=offset)


def read_buffer(found: Described, buffer: int, fetch: Fetch, options: DecodeOptions) -> Bytes:
    """A payload buffer whole: viewed where it lies raw, else decoded chunk by chunk into its own memory."""
    size = found.descriptor.buffers[buffer].byte_size
    raw = found.cover.raw[buffer]
    if raw is not None:
        return placed(fetch(raw, size), found.descriptor, buffer, options)
    if not size:
        return placed(np.zeros(0, np.uint8), found.descriptor, buffer, options)
    if options.copy is False:
        refuse_copy(buffer)
    out = allocated(size, options.alloc)
    decode_rows(found, buffer, fetch, out, options)
    return out


def refuse_copy(buffer: int) -> None:
    """A compressed buffer cannot be a view."""
    message = "it is compressed, and copy=False"
    raise UnsupportedError(message, code=Code.COPY_REQUIRED, where=f"buffers[{buffer}]")


def decode_rows(found: Described, buffer: int, fetch: Fetch, out: Bytes, options: DecodeOptions) -> None:
    """Every chunk of a buffer into its place."""
    head = found.head
    rows = head.table.numbers(BUFFERS.start + buffer)

    def decode(index: int) -> None:
        entry = head.table.records[index]
        stored = fetch(entry.offset, entry.stored_length)
        start = entry.raw_offset
        decode_chunk(head, index, stored, out[start : start + entry.raw_length])

    run_chunks(decode, rows, threads=default_threads(out.size, options.threads))


def decoded_tables(found: Described, small: Small, options: DecodeOptions) -> tuple[bytes, bytes]:
    """block_table and seq_ptr: as they were stored, unless a writer compressed them."""
    return small.tables if found.cover.raw_tables else _decoded_tables(found, small, options)


def _decoded_tables(found: Described, small: Small, options: DecodeOptions) -> tuple[bytes, bytes]:
    tables = []
    for kind, stored in zip(_TABLES, small.tables, strict=True):
        buffer = kind - BUFFERS.start
        if found.cover.raw[buffer] is not None or not stored:
            tables.append(stored)
            continue
        tables.append(_decoded_table(found, buffer, as_bytes(stored), options))
    return tables[0], tables[1]


def _decoded_table(found: Described, buffer: int, stored: Bytes, options: DecodeOptions) -> bytes:
    head = found.head
    out = allocated(found.descriptor.buffers[buffer].byte_size, None)
    at = 0
    for index in head.table.numbers(BUFFERS.start + buffer):
        entry = head.table.records[index]
        start, length = entry.raw_offset, entry.stored_length
        decode_chunk(head, index, stored[at : at + length], out[start : start + entry.raw_length])
        at += length
    return private(out)


# Whole frames in memory.


def read_frame_head(data: Bytes, offset: int, limits: Limits, *, whole: bool = True) -> Head:
    """Stages 2 and 3 of the frame at `offset`, all of whose bytes must be there, or those of its header."""
    prologue = read_prologue(data[offset : offset + PROLOGUE_PLAN.size].tobytes(), offset, limits)
    needed = prologue.frame_length if whole else prologue.header_length
    available = data.size - offset
    if available < needed:
        raise truncated(needed, available, offset, "frame_length" if whole else "header_length")
    header = data[offset : offset + prologue.header_length].tobytes()
    return read_head(header, prologue, offset)


def read_frame(data: Bytes, offset: int, options: DecodeOptions, *, alone: bool) -> tuple[Parts, int]:
    """One frame at `offset`, and where the next one begins; `alone`: nothing may follow it."""
    head = read_frame_head(data, offset, options.limits)
    return read_tensor(data, head, options, alone=alone), offset + head.prologue.frame_length


def read_tensor(data: Bytes, head: Head, options: DecodeOptions, *, alone: bool = False) -> Parts:
    """Stages 4 to 9 of a frame in memory."""
    refuse_closing(head)
    fetch = fetch_from(data, head.base)
    found, small = describe(head, fetch, options)
    end = head.base + head.prologue.frame_length
    if alone and data.size > end:
        message = f"{data.size - end} bytes follow the frame"
        raise FrameError(message, code=Code.TRAILING_BYTES, where="trailing_bytes", offset=end)
    check_payload(found, fetch, options)
    parts = finish(found, small, fetch, options)
    if not options.copy:
        familiar.learn(head.header, head.prologue.frame_length, head.table, found.cover, found.descriptor.extents)
    return parts


def fetch_from(data: Bytes, base: int) -> Fetch:
    """Bytes of the frame that begins at `base` of `data`."""

    def fetch(start: int, length: int) -> Bytes:
        return data[base + start : base + start + length]

    return fetch


def check_closing(data: Bytes, head: Head) -> None:
    """The padding of a closing frame."""
    start, end = head.prologue.header_length, head.prologue.frame_length
    check_padding(data[head.base + start : head.base + end], head.base + start)


def refuse_closing(head: Head) -> None:
    """A closing frame has no tensor."""
    if head.closing:
        message = "a closing frame has no tensor"
        raise _prologue_error("section_count", Code.LAST, message, head.base)


def finish(found: Described, small: Small, fetch: Fetch, options: DecodeOptions) -> Parts:
    """The end of stage 8 and stage 9: buffers in memory, tables checked."""
    count = len(found.descriptor.buffers)
    pool = read_buffer(found, 0, fetch, options)
    scales = [read_buffer(found, i, fetch, options) for i in range(3, count)] if count > 3 else ()
    tables = decoded_tables(found, small, options)
    return of_buffers(
        found.descriptor,
        pool,
        tables,
        scales,
        small.seq_lens,
        found.metadata,
        strict=options.strict,
        offsets=lambda: table_offsets(found),
    )


def table_offsets(found: Described) -> dict[str, int]:
    """Where the descriptor and the tables begin in the input, for errors; not of one that is compressed."""
    head = found.head
    kinds = {"descriptor": _DESCRIPTOR, "seq_lens": _SEQ_LENS}
    places = {
        name: head.base + head.table.first(kind).offset for name, kind in kinds.items() if kind in head.table.kinds
    }
    for name, start in zip(("block_table", "seq_ptr"), found.cover.raw[1:3], strict=True):
        if start is not None:
            places[name] = head.base + start
    return places
