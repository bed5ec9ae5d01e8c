"""An HRKV frame from a payload (section 4): sections planned, compressed, hashed, laid out.

The mirror of `frame_reader`. A raw pool stays where it is: parts are views of it, and writing into a buffer copies it
once, straight into place. Only offsets and checksums are computed here; which pages are sent is `payload`'s matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash

from hurray_wire.arrays import Bytes, Stored, as_bytes
from hurray_wire.compression import (
    PackedChunk,
    compress_chunk,
    default_threads,
    pack_chunk,
    run_chunks,
    shuffle_width,
)
from hurray_wire.errors import Code, FrameError
from hurray_wire.metadata import encode_metadata
from hurray_wire.options import EncodeOptions
from hurray_wire.payload import PageSource, Payload
from hurray_wire.sections import (
    MAX_SECTIONS,
    Extents,
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
_FRONT = _DESCRIPTOR, _SEQ_LENS, _METADATA = (
    int(SectionKind.DESCRIPTOR),
    int(SectionKind.SEQ_LENS),
    int(SectionKind.METADATA),
)
_MAY_DO_WITHOUT = frozenset((_POOL, int(SectionKind.SCALES), int(SectionKind.ZERO_POINTS)))


class Contents(NamedTuple):
    """What a frame holds: kind and bytes of the sections before the pool, the pool's chunks as ranges of wire pages,
    kind and bytes of the sections behind it."""

    front: list[tuple[int, Stored]]
    ranges: Sequence[tuple[int, int]]
    back: list[tuple[int, Stored]]


class Geometry(NamedTuple):
    """Where everything lies: the section table with its checksums left 0, each section's offset and stored length, and
    the padding before each, with that behind the last."""

    table: bytes
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    gaps: tuple[int, ...]
    frame_length: int
    ranges: tuple[tuple[int, int], ...]
    hashed: tuple[int, ...]
    """The rows that have a checksum, and their bytes altogether."""
    hashed_bytes: int


# What the frame holds.


def front_sections(payload: Payload) -> list[tuple[int, Stored]]:
    """Kind and bytes of what stands before the buffers: descriptor, seq_lens, metadata."""
    sections: list[tuple[int, Stored]] = [(_DESCRIPTOR, payload.descriptor.encode())]
    if payload.seq_lens is not None and payload.seq_lens.size:
        sections.append((_SEQ_LENS, payload.seq_lens))
    if payload.metadata:
        sections.append((_METADATA, encode_metadata(payload.metadata)))
    return sections


def back_sections(payload: Payload) -> list[tuple[int, Stored]]:
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
    sizes: Sequence[int],
    alignments: Sequence[int],
    ranges: tuple[tuple[int, int], ...],
    checksum: bool,
    padded_to: int,
) -> Geometry:
    """Lay sections out; the frame is padded to the greater of its own alignment and `padded_to`.

    Args:
        sizes, alignments: of the descriptor's buffers.
    """
    offsets, end = lay_out(planned, alignments)
    own = frame_alignment(sizes, alignments)
    hashed = [checksum or section.kind not in _MAY_DO_WITHOUT for section in planned]
    rows = zip(planned, offsets, hashed, strict=True)
    table = b"".join(_entry(section, offset, asked) for section, offset, asked in rows)
    lengths = tuple(section.stored_length for section in planned)
    frame_length = align(end, max(own, padded_to))
    ends = [header_length(len(planned)), *map(sum, zip(offsets, lengths, strict=True))]
    gaps = tuple(start - end for end, start in zip(ends, [*offsets, frame_length], strict=True))
    asked_rows = tuple(row for row, asked in enumerate(hashed) if asked)
    asked_bytes = sum(lengths[row] for row in asked_rows)
    return Geometry(table, tuple(offsets), lengths, gaps, frame_length, ranges, asked_rows, asked_bytes)


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
    front: tuple[int, int, int],
    extents: Extents,
    num_pages: int,
    step: int,
    checksum: bool,
    padded_to: int,
) -> Geometry:
    """Of a frame without compression, from sizes alone: the same for every layer and role of a cache.

    Args:
        front: bytes of descriptor, seq_lens and metadata, 0 for what there is not.
    """
    sizes, alignments, page_bytes = extents
    page_bytes = page_bytes or sizes[0]  # pages that end inside bytes go as one
    ranges = _ranges(num_pages, step) if page_bytes else ()
    planned = [_raw(kind, 0, size) for kind, size in zip(_FRONT, front, strict=True) if size]
    planned += [_raw(_POOL, start * page_bytes, (stop - start) * page_bytes) for start, stop in ranges]
    planned += [_raw(kind, 0, size) for kind, size in enumerate(sizes[1:], _BLOCK_TABLE) if size]
    return geometry_of(planned, sizes, alignments, ranges, checksum, padded_to)


def raw_contents(payload: Payload, options: EncodeOptions, padded_to: int) -> tuple[Contents, Geometry]:
    """A frame without compression: what it holds, and where."""
    front, back = front_sections(payload), back_sections(payload)
    lens, metadata = payload.seq_lens, front[-1][1] if payload.metadata else b""
    geometry = _raw_geometry(
        (len(front[0][1]), 0 if lens is None else lens.size, len(metadata)),
        payload.descriptor.extents,
        payload.pages.num_pages,
        pages_a_chunk(payload.pages, options, len(front) + len(back)),
        options.checksum,
        padded_to,
    )
    return Contents(front, geometry.ranges, back), geometry


# Checksums and the header.


def build_header(geometry: Geometry, piece: Callable[[int], Sequence[Stored]], options: EncodeOptions) -> bytes:
    """Prologue, section table and header checksum; `piece`: the stored bytes of a section that has a checksum."""
    rows = geometry.hashed
    threads = default_threads(geometry.hashed_bytes, options.threads)
    digests = run_chunks(lambda row: digest_of(piece(row)), rows, threads=threads)
    header = bytearray(_prologue(len(geometry.offsets), geometry.frame_length, options) + geometry.table)
    put, step = _U64.pack_into, SECTION_PLAN.size
    for row, digest in zip(rows, digests, strict=True):
        put(header, _CHECKSUM_AT + step * row, digest)
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


def frame_parts(payload: Payload, options: EncodeOptions, padded_to: int = MIN_ALIGNMENT) -> list[Stored]:
    """The frame's bytes in order: the pool's own memory where it is stored raw, small pieces joined."""
    if options.compression:
        contents, geometry, chunks = _compressed(payload, options, padded_to, _pack_now)
        flat = None
    else:
        contents, geometry = raw_contents(payload, options, padded_to)
        flat = payload.pages.flat()
        chunks = [] if flat is not None else [payload.pages.views(*chunk) for chunk in contents.ranges]
    piece = _pieces(contents, chunks.__getitem__ if flat is None else _slices(flat, contents, payload.pages.page_bytes))
    gaps, first = geometry.gaps, len(contents.front)
    last = first + len(contents.ranges)
    pieces: list[Stored] = [build_header(geometry, piece, options), *_apart(gaps[:first], contents.front)]
    if flat is not None and contents.ranges:  # raw chunks lie in one piece, in the frame as in memory
        pieces += (_zeros(gaps[first]), flat)
    else:
        for row in range(first, last):
            pieces += (_zeros(gaps[row]), *piece(row))
    pieces += _apart(gaps[last:-1], contents.back)
    pieces.append(_zeros(gaps[-1]))
    return _joined(pieces)


def _pieces(contents: Contents, chunk: Callable[[int], Sequence[Any]]) -> Callable[[int], Sequence[Any]]:
    """The stored bytes of a section in pieces, by its row; `chunk`: those of a chunk of the pool, by its number."""
    first = len(contents.front)
    last = first + len(contents.ranges)

    def piece(row: int) -> Sequence[Any]:
        if row < first:
            return (contents.front[row][1],)
        if row >= last:
            return (contents.back[row - last][1],)
        return chunk(row - first)

    return piece


def _slices(flat: Bytes, contents: Contents, width: int) -> Callable[[int], Sequence[Bytes]]:
    """The chunks of a pool that lies in one piece, of pages of `width` bytes."""

    def chunk(number: int) -> Sequence[Bytes]:
        start, stop = contents.ranges[number]
        return (flat[start * width : stop * width],)

    return chunk


def _apart(gaps: Sequence[int], sections: Sequence[tuple[int, Stored]]) -> list[Stored]:
    """Sections, each behind its padding."""
    return [piece for gap, (_, data) in zip(gaps, sections, strict=True) for piece in (_zeros(gap), data)]


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
    planned = [_raw(kind, 0, len(data)) for kind, data in front]
    planned += [section for section, _ in chunks]
    planned += [_raw(kind, 0, len(data)) for kind, data in back]
    sizes, alignments, _ = payload.descriptor.extents
    geometry = geometry_of(planned, sizes, alignments, ranges, options.checksum, padded_to)
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


_ZEROS = bytes(4096)


def _zeros(count: int) -> bytes:
    return _ZEROS[:count] if count <= len(_ZEROS) else bytes(count)


def _joined(pieces: Sequence[Stored]) -> list[Stored]:
    joined: list[Stored] = []
    small: list[Stored] = []
    for piece in pieces:
        if len(piece) < _JOIN_BELOW:
            small.append(piece)
            continue
        if small:
            joined.append(b"".join(small))
            small = []
        joined.append(piece)
    if small:
        joined.append(b"".join(small))
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
        contents, self._geometry, chunks = _compressed(payload, options, MIN_ALIGNMENT, pack)
        self._pieces = _pieces(contents, chunks.__getitem__)
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
        place = out[self._geometry.offsets[row] :][: self._geometry.lengths[row]]
        at = 0
        for piece in self._pieces(row):
            if isinstance(piece, PackedChunk):
                piece.write(place)
            else:
                place[at : at + len(piece)] = as_bytes(piece)
                at += len(piece)
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
        out[geometry.offsets[row] :][: len(data)] = as_bytes(data)
    offsets, lengths = geometry.offsets, geometry.lengths
    _close_up(out, build_header(geometry, lambda row: (out[offsets[row] :][: lengths[row]],), options), geometry)


def _close_up(out: Bytes, header: bytes, geometry: Geometry) -> None:
    """The header, and zeros wherever nothing lies."""
    out[: len(header)] = as_bytes(header)
    for gap, end in zip(geometry.gaps, (*geometry.offsets, geometry.frame_length), strict=True):
        out[end - gap : end] = 0


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

    # A chunk's bytes are asked for when they are hashed, and not before: a header needs no pool.
    piece = _pieces(contents, lambda number: payload.pages.views(*contents.ranges[number]))
    front = _apart(geometry.gaps[:first], contents.front)
    return b"".join([build_header(geometry, piece, options), *front, _zeros(geometry.gaps[first])])
