"""An HRKV frame from a payload (section 4): sections planned, compressed, hashed, laid out.

The mirror of `frame_reader`. A raw pool stays where it is: parts are views of it, and writing into a buffer copies it
once, straight into place. Only offsets and checksums are computed here; which pages are sent is `payload`'s matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash

from hurray_wire.arrays import Bytes, as_bytes
from hurray_wire.compression import (
    PackedChunk,
    compress_chunk,
    default_threads,
    pack_chunk,
    run_chunks,
    shuffle_width,
)
from hurray_wire.descriptor import TensorDescriptor
from hurray_wire.errors import Code, FrameError
from hurray_wire.metadata import encode_metadata
from hurray_wire.options import EncodeOptions
from hurray_wire.payload import PageSource, Payload
from hurray_wire.sections import (
    MAX_SECTIONS,
    Planned,
    align,
    digest_of,
    frame_alignment,
    header_length,
    lay_out,
)
from hurray_wire.structs.frame import PROLOGUE_PLAN, SECTION_PLAN
from hurray_wire.tags import (
    FRAME_MAGIC,
    MIN_ALIGNMENT,
    VERSION_MAJOR,
    Codec,
    Filter,
    FrameFlag,
    SectionFlag,
    SectionKind,
)

RAW_CHUNK_BYTES = 4 << 20
"""One digest a chunk lets threads share a pool; measured best for raw chunks."""
COMPRESSED_CHUNK_BYTES = 1 << 20
"""A plateau from 256 KiB to 2 MiB; small enough for the cache, and for reading single pages."""
_JOIN_BELOW = 4096
"""Smaller pieces are joined: each costs a vector of its own in the kernel."""

_RAW, _ZSTD = int(Codec.RAW), int(Codec.ZSTD)
_NONE, _SHUFFLE = int(Filter.NONE), int(Filter.SHUFFLE)
_CHECKSUM = int(SectionFlag.CHECKSUM)
_LAST = int(FrameFlag.LAST)
_POOL, _BLOCK_TABLE = int(SectionKind.PAGE_POOL), int(SectionKind.BLOCK_TABLE)
_DESCRIPTOR, _SEQ_LENS, _METADATA = int(SectionKind.DESCRIPTOR), int(SectionKind.SEQ_LENS), int(SectionKind.METADATA)
_MAY_DO_WITHOUT = frozenset((_POOL, int(SectionKind.SCALES), int(SectionKind.ZERO_POINTS)))


class Contents(NamedTuple):
    """What a frame holds: kind and bytes of the sections before the pool, the pool's chunks as ranges of wire pages,
    kind and bytes of the sections behind it."""

    front: list[tuple[int, Bytes]]
    ranges: Sequence[tuple[int, int]]
    back: list[tuple[int, Bytes]]


class Geometry(NamedTuple):
    """Where everything lies: the section table with its checksums left 0, each section's offset and stored length."""

    table: bytes
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    frame_length: int
    ranges: tuple[tuple[int, int], ...]
    hashed: tuple[int, ...]
    """The rows that have a checksum."""


# What the frame holds.


def front_sections(payload: Payload) -> list[tuple[int, Bytes]]:
    """Kind and bytes of what stands before the buffers: descriptor, seq_lens, metadata."""
    sections = [(_DESCRIPTOR, as_bytes(payload.descriptor.encode()))]
    if payload.seq_lens is not None and payload.seq_lens.size:
        sections.append((_SEQ_LENS, payload.seq_lens))
    if payload.metadata:
        sections.append((_METADATA, as_bytes(encode_metadata(payload.metadata))))
    return sections


def back_sections(payload: Payload) -> list[tuple[int, Bytes]]:
    """Kind and bytes of the non-empty buffers behind the pool."""
    return [(_BLOCK_TABLE + i, table) for i, table in enumerate(payload.tables) if table.size]


def pages_a_chunk(pages: PageSource, options: EncodeOptions, others: int) -> int:
    """Whole pages, at least one, doubled until 65535 sections suffice."""
    asked = options.chunk_bytes or (COMPRESSED_CHUNK_BYTES if options.compression else RAW_CHUNK_BYTES)
    step = max(1, asked // max(1, pages.page_bytes))
    while -(-pages.num_pages // step) + others > MAX_SECTIONS:
        step *= 2
    return step


def _ranges(num_pages: int, step: int) -> tuple[tuple[int, int], ...]:
    return tuple((start, min(start + step, num_pages)) for start in range(0, num_pages, step))


# Where it lies.


def _raw(kind: int, raw_offset: int, length: int) -> Planned:
    return Planned(kind, _RAW, 0, raw_offset, length, length)


def geometry_of(
    planned: Sequence[Planned],
    descriptor: GeometryKey | TensorDescriptor,
    ranges: tuple[tuple[int, int], ...],
    checksum: bool,
    padded_to: int,
) -> Geometry:
    """Lay sections out; the frame is padded to the greater of its own alignment and `padded_to`."""
    offsets, end = lay_out(planned, descriptor.alignments)
    own = frame_alignment(descriptor.sizes, descriptor.alignments)
    hashed = [checksum or section.kind not in _MAY_DO_WITHOUT for section in planned]
    rows = zip(planned, offsets, hashed, strict=True)
    table = b"".join(_entry(section, offset, asked) for section, offset, asked in rows)
    lengths = tuple(section.stored_length for section in planned)
    asked_rows = tuple(row for row, asked in enumerate(hashed) if asked)
    return Geometry(table, tuple(offsets), lengths, align(end, max(own, padded_to)), ranges, asked_rows)


def _entry(section: Planned, offset: int, hashed: bool) -> bytes:
    return SECTION_PLAN.pack(
        section.kind,
        section.codec,
        _SHUFFLE if section.element_width else _NONE,
        section.element_width,
        _CHECKSUM if hashed else 0,
        0,
        section.raw_offset,
        section.raw_length,
        offset,
        section.stored_length,
        0,
    )


@lru_cache(maxsize=256)
def _raw_geometry(
    front: tuple[tuple[int, int], ...],
    back: tuple[tuple[int, int], ...],
    pages: tuple[int, int],
    step: int,
    descriptor: GeometryKey,
    checksum: bool,
    padded_to: int,
) -> Geometry:
    """Of a frame without compression, from sizes alone: the same for every layer and role of a cache."""
    num_pages, page_bytes = pages
    ranges = _ranges(num_pages, step) if page_bytes else ()
    planned = [_raw(kind, 0, size) for kind, size in front]
    planned += [_raw(_POOL, start * page_bytes, (stop - start) * page_bytes) for start, stop in ranges]
    planned += [_raw(kind, 0, size) for kind, size in back]
    return geometry_of(planned, descriptor, ranges, checksum, padded_to)


class GeometryKey(NamedTuple):
    """Of a descriptor, what decides where sections lie."""

    sizes: tuple[int, ...]
    alignments: tuple[int, ...]


def raw_contents(payload: Payload, options: EncodeOptions, padded_to: int) -> tuple[Contents, Geometry]:
    """A frame without compression: what it holds, and where."""
    front, back = front_sections(payload), back_sections(payload)
    pages = payload.pages
    geometry = _raw_geometry(
        tuple([(kind, data.size) for kind, data in front]),
        tuple([(kind, data.size) for kind, data in back]),
        (pages.num_pages, pages.page_bytes),
        pages_a_chunk(pages, options, len(front) + len(back)),
        GeometryKey(payload.descriptor.sizes, payload.descriptor.alignments),
        options.checksum,
        padded_to,
    )
    return Contents(front, geometry.ranges, back), geometry


# Checksums and the header.


def build_header(geometry: Geometry, piece: Callable[[int], Sequence[Bytes]], options: EncodeOptions) -> bytes:
    """Prologue, section table and header checksum; `piece`: the stored bytes of a section that has a checksum."""
    rows = geometry.hashed
    total = sum(geometry.lengths[row] for row in rows)
    digests = run_chunks(lambda row: digest_of(piece(row)), rows, threads=default_threads(total, options.threads))
    header = bytearray(_prologue(len(geometry.offsets), geometry.frame_length, options) + geometry.table)
    for row, digest in zip(rows, digests, strict=True):
        _U64.pack_into(header, _CHECKSUM_AT + SECTION_PLAN.size * row, digest)
    return _sealed(bytes(header))


_U64 = Struct("<Q")
_CHECKSUM_AT = PROLOGUE_PLAN.size + SECTION_PLAN.offset_of("checksum")


def _prologue(section_count: int, frame_length: int, options: EncodeOptions) -> bytes:
    return PROLOGUE_PLAN.pack(
        FRAME_MAGIC,
        VERSION_MAJOR,
        0,
        _LAST if options.last else 0,
        options.sequence,
        header_length(section_count),
        section_count,
        0,
        frame_length,
        options.stream_id,
    )


def _sealed(header: bytes) -> bytes:
    return header + xxhash.xxh3_64_intdigest(header).to_bytes(8, "little")


def closing_frame(options: EncodeOptions, padded_to: int = MIN_ALIGNMENT) -> bytes:
    """A frame without sections that ends a stream."""
    frame_length = align(header_length(0), padded_to)
    return _sealed(_prologue(0, frame_length, options)).ljust(frame_length, b"\0")


# The frame in pieces.


def frame_parts(payload: Payload, options: EncodeOptions, padded_to: int = MIN_ALIGNMENT) -> list[Bytes]:
    """The frame's bytes in order: the pool's own memory where it is stored raw, small pieces joined."""
    if options.compression:
        contents, geometry, chunks = _compressed(payload, options, padded_to, _pack_now)
        flat = None
    else:
        contents, geometry = raw_contents(payload, options, padded_to)
        flat = payload.pages.flat()
        chunks = [] if flat is not None else [payload.pages.views(*chunk) for chunk in contents.ranges]
    pieces = _pieces(payload.pages, contents, flat, chunks)
    header = build_header(geometry, pieces, options)
    first, last = len(contents.front), len(contents.front) + len(contents.ranges)
    if flat is not None and contents.ranges:  # raw chunks lie in one piece, in the frame as in memory
        pool: list[Block] = [(geometry.offsets[first], flat.size, (flat,))]
    else:
        pool = [(geometry.offsets[row], geometry.lengths[row], pieces(row)) for row in range(first, last)]
    front = [(geometry.offsets[row], geometry.lengths[row], pieces(row)) for row in range(first)]
    back = [(geometry.offsets[row], geometry.lengths[row], pieces(row)) for row in range(last, len(geometry.offsets))]
    return _joined(_in_order(header, [*front, *pool, *back], geometry.frame_length))


def _pieces(
    pages: PageSource, contents: Contents, flat: Bytes | None, chunks: Sequence[Sequence[Bytes]]
) -> Callable[[int], Sequence[Bytes]]:
    """The stored bytes of a section, by its row; of a flat pool, the slice that the chunk is."""
    first, width = len(contents.front), pages.page_bytes
    last = first + len(contents.ranges)

    def piece(row: int) -> Sequence[Bytes]:
        if row < first:
            return (contents.front[row][1],)
        if row >= last:
            return (contents.back[row - last][1],)
        if flat is None:
            return chunks[row - first]
        start, stop = contents.ranges[row - first]
        return (flat[start * width : stop * width],)

    return piece


Packed = TypeVar("Packed", Bytes, PackedChunk)


def _compressed(
    payload: Payload, options: EncodeOptions, padded_to: int, pack: Callable[[Bytes, int], Packed | None]
) -> tuple[Contents, Geometry, list[Sequence[Bytes | Packed]]]:
    """Every chunk compressed where that is worth it, and where all lies then."""
    front, back, pages = front_sections(payload), back_sections(payload), payload.pages
    step = pages_a_chunk(pages, options, len(front) + len(back))
    ranges = _ranges(pages.num_pages, step) if pages.page_bytes else ()
    width = shuffle_width(payload.descriptor.bit_width // 8)
    threads = default_threads(pages.nbytes, options.threads)
    chunks = run_chunks(lambda chunk: _stored(pages, chunk, width, pack), ranges, threads=threads)
    planned = [_raw(kind, 0, data.size) for kind, data in front]
    planned += [section for section, _ in chunks]
    planned += [_raw(kind, 0, data.size) for kind, data in back]
    geometry = geometry_of(planned, payload.descriptor, ranges, options.checksum, padded_to)
    return Contents(front, ranges, back), geometry, [pieces for _, pieces in chunks]


def _stored(
    pages: PageSource, chunk: tuple[int, int], width: int, pack: Callable[[Bytes, int], Packed | None]
) -> tuple[Planned, Sequence[Bytes | Packed]]:
    """One chunk as it is stored: compressed, or the pool's own memory."""
    start, stop = (page * pages.page_bytes for page in chunk)
    planned = _raw(_POOL, start, stop - start)
    pieces = pages.views(*chunk)
    if len(pieces) == 1:
        whole = pieces[0]
    else:
        whole = np.empty(planned.raw_length, np.uint8)
        pages.copy(*chunk, whole)
    shuffled = width if width and planned.raw_length % width == 0 else 0
    packed = pack(whole, shuffled)
    if packed is None:
        return planned, pieces
    return planned._replace(codec=_ZSTD, element_width=shuffled, stored_length=packed.size), (packed,)


def _pack_now(whole: Bytes, width: int) -> Bytes | None:
    compressed = compress_chunk(whole, width)
    return None if compressed is None else as_bytes(compressed)


Block = tuple[int, int, Sequence[Bytes]]
"""Offset in the frame, length, and the bytes in pieces."""


def _in_order(header: bytes, blocks: Sequence[Block], frame_length: int) -> Iterator[Bytes | bytes]:
    yield header
    end = len(header)
    for offset, length, pieces in blocks:
        if offset > end:
            yield _zeros(offset - end)
        yield from pieces
        end = offset + length
    if frame_length > end:
        yield _zeros(frame_length - end)


_ZEROS = bytes(4096)


def _zeros(count: int) -> bytes:
    return _ZEROS[:count] if count <= len(_ZEROS) else bytes(count)


def _joined(pieces: Iterator[Bytes | bytes]) -> list[Bytes]:
    joined: list[Bytes] = []
    small: list[Bytes | bytes] = []
    for piece in pieces:
        if len(piece) < _JOIN_BELOW:
            small.append(piece)
            continue
        if small:
            joined.append(as_bytes(b"".join(small)))
            small = []
        joined.append(as_bytes(piece))
    if small:
        joined.append(as_bytes(b"".join(small)))
    return joined


def frame_size(payload: Payload, options: EncodeOptions, padded_to: int = MIN_ALIGNMENT) -> int:
    """Bytes of the frame: exact when raw, an upper bound when compressed."""
    _, geometry = raw_contents(payload, options, padded_to)
    if not options.compression:
        return geometry.frame_length
    # Each compressed chunk is smaller than raw, and may stand up to 7 bytes behind the one before it.
    return geometry.frame_length + align(8 * len(geometry.offsets), MIN_ALIGNMENT)


# The frame in one piece.


class CompressedFrame:
    """A compressed frame that lies nowhere yet: `size` bytes, and `write` to put it into memory of that size.

    Of a contiguous pool most of a frame's bytes are read only then, once, into their place.
    """

    def __init__(self, payload: Payload, options: EncodeOptions) -> None:
        self._options = options
        # Where the pool is no piece of memory, what a chunk is packed from is a copy that would be kept till then.
        pack: Callable[[Bytes, int], Any] = _pack_now if payload.pages.flat() is None else pack_chunk
        self._contents, self._geometry, self._chunks = _compressed(payload, options, MIN_ALIGNMENT, pack)
        self.size = self._geometry.frame_length

    def write(self, out: Bytes) -> None:
        """Put the frame into `out`; each section is put there by the thread that hashes it then."""
        geometry = self._geometry
        header = build_header(geometry, lambda row: (self._place(row, out),), self._options)
        rest = sorted(set(range(len(geometry.offsets))) - set(geometry.hashed))
        total = sum(geometry.lengths[row] for row in rest)
        run_chunks(lambda row: self._place(row, out), rest, threads=default_threads(total, self._options.threads))
        _close_up(out, header, geometry)

    def _place(self, row: int, out: Bytes) -> Bytes:
        front, chunks, back = self._contents.front, self._chunks, self._contents.back
        place = out[self._geometry.offsets[row] :][: self._geometry.lengths[row]]
        if row < len(front):
            place[:] = front[row][1]
        elif row >= len(front) + len(chunks):
            place[:] = back[row - len(front) - len(chunks)][1]
        else:
            at = 0
            for piece in chunks[row - len(front)]:
                if isinstance(piece, PackedChunk):
                    piece.write(place)
                else:
                    place[at : at + piece.size] = piece
                    at += piece.size
        return place


def write_frame(payload: Payload, options: EncodeOptions, out: Bytes) -> None:
    """A raw frame into `out`, of exactly `frame_size`: the pool is copied once, then hashed where it lies."""
    contents, geometry = raw_contents(payload, options, MIN_ALIGNMENT)
    first = len(contents.front)
    if contents.ranges:
        start = geometry.offsets[first]
        threads = default_threads(payload.pages.nbytes, options.threads)
        _copy_pool(payload.pages, contents.ranges, out[start : start + payload.pages.nbytes], threads)
    rows = [*range(first), *range(first + len(contents.ranges), len(geometry.offsets))]
    for row, (_, data) in zip(rows, [*contents.front, *contents.back], strict=True):
        out[geometry.offsets[row] :][: data.size] = data
    offsets, lengths = geometry.offsets, geometry.lengths
    _close_up(out, build_header(geometry, lambda row: (out[offsets[row] :][: lengths[row]],), options), geometry)


def _close_up(out: Bytes, header: bytes, geometry: Geometry) -> None:
    """The header, and zeros wherever nothing lies."""
    out[: len(header)] = as_bytes(header)
    end = len(header)
    for offset, length in zip(geometry.offsets, geometry.lengths, strict=True):
        if offset > end:
            out[end:offset] = 0
        end = offset + length
    out[end:] = 0


def _copy_pool(pages: PageSource, ranges: Sequence[tuple[int, int]], out: Bytes, threads: int) -> None:
    """Whole when one thread copies (large copies bypass the cache), else a share of the chunks a thread."""
    count = min(threads, len(ranges))
    cuts = [ranges[len(ranges) * i // count][0] for i in range(count)] + [pages.num_pages]
    width = pages.page_bytes

    def copy(index: int) -> None:
        start, stop = cuts[index], cuts[index + 1]
        pages.copy(start, stop, out[start * width : stop * width])

    run_chunks(copy, range(count), threads=count)


def frame_header(payload: Payload, options: EncodeOptions) -> bytes:
    """The frame up to its first buffer's offset, padding included, for buffers that travel by other means.

    Raises:
        FrameError: `section_codec`: buffers that travel as they are cannot be described as compressed.
    """
    if options.compression:
        message = "the header of a compressed frame describes bytes that nobody sends: use compression=None"
        raise FrameError(message, code=Code.SECTION_CODEC, where="compression")
    contents, geometry = raw_contents(payload, options, MIN_ALIGNMENT)
    first = len(contents.front)

    def pieces(row: int) -> Sequence[Bytes]:
        """A chunk's bytes when they are hashed, and not before: a header needs no pool."""
        if first <= row < first + len(contents.ranges):
            return payload.pages.views(*contents.ranges[row - first])
        return ([*contents.front, *contents.back][row if row < first else row - len(contents.ranges)][1],)

    header = build_header(geometry, pieces, options)
    front = [(geometry.offsets[row], geometry.lengths[row], pieces(row)) for row in range(first)]
    return b"".join(_in_order(header, front, geometry.offsets[first]))
