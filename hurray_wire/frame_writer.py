"""An HRKV frame from a payload (section 4): sections planned, compressed, hashed, laid out.

The mirror of `frame_reader`. A raw pool stays where it is: parts are views of it, and writing into a buffer copies it
once, straight into place. Only offsets and checksums are computed here; which pages are sent is `payload`'s matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from hurray_wire.arrays import Bytes, as_bytes
from hurray_wire.compression import compress_chunk, default_threads, run_chunks, shuffle_width
from hurray_wire.errors import Code, FrameError
from hurray_wire.metadata import encode_metadata
from hurray_wire.options import EncodeOptions
from hurray_wire.payload import PageSource, Payload
from hurray_wire.sections import (
    BUFFERS,
    MAX_SECTIONS,
    Planned,
    align,
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
_POOL, _BLOCK_TABLE, _SEQ_PTR = int(SectionKind.PAGE_POOL), int(SectionKind.BLOCK_TABLE), int(SectionKind.SEQ_PTR)
_DESCRIPTOR, _SEQ_LENS, _METADATA = int(SectionKind.DESCRIPTOR), int(SectionKind.SEQ_LENS), int(SectionKind.METADATA)
_MAY_DO_WITHOUT = frozenset((_POOL, int(SectionKind.SCALES), int(SectionKind.ZERO_POINTS)))


class Section(NamedTuple):
    """One section with its stored bytes, in as few pieces as its memory allows."""

    planned: Planned
    pieces: Sequence[Bytes]


def small_sections(payload: Payload) -> list[tuple[int, Bytes]]:
    """Kind and bytes of what stands before the buffers: descriptor, seq_lens, metadata."""
    sections = [(_DESCRIPTOR, as_bytes(payload.descriptor.encode()))]
    if payload.seq_lens is not None and payload.seq_lens.size:
        sections.append((_SEQ_LENS, payload.seq_lens))
    metadata = encode_metadata(payload.metadata)
    if metadata:
        sections.append((_METADATA, as_bytes(metadata)))
    return sections


def table_sections(payload: Payload) -> list[tuple[int, Bytes]]:
    """Kind and bytes of the non-empty buffers behind the pool."""
    kinds = range(BUFFERS.start + 1, BUFFERS.start + 1 + len(payload.tables))
    return [(kind, table) for kind, table in zip(kinds, payload.tables, strict=True) if table.size]


def chunk_ranges(pages: PageSource, options: EncodeOptions, others: int) -> list[tuple[int, int]]:
    """The pool's chunks as ranges of wire pages: whole pages, doubled until 65535 sections suffice."""
    if not pages.nbytes:
        return []
    asked = options.chunk_bytes or (COMPRESSED_CHUNK_BYTES if options.compression else RAW_CHUNK_BYTES)
    step = max(1, asked // pages.page_bytes)
    while -(-pages.num_pages // step) + others > MAX_SECTIONS:
        step *= 2
    return [(start, min(start + step, pages.num_pages)) for start in range(0, pages.num_pages, step)]


def _raw(kind: int, raw_offset: int, length: int) -> Planned:
    return Planned(kind, _RAW, 0, raw_offset, length, length)


def plan_raw(payload: Payload, options: EncodeOptions) -> tuple[list[Planned], list[tuple[int, int]]]:
    """The sections of a frame without compression, from sizes alone, and the pool's chunks."""
    small, tables = small_sections(payload), table_sections(payload)
    ranges = chunk_ranges(payload.pages, options, len(small) + len(tables))
    width = payload.pages.page_bytes
    planned = [_raw(kind, 0, data.size) for kind, data in small]
    planned += [_raw(_POOL, start * width, (stop - start) * width) for start, stop in ranges]
    planned += [_raw(kind, 0, data.size) for kind, data in tables]
    return planned, ranges


def build_sections(payload: Payload, options: EncodeOptions) -> list[Section]:
    """All sections with their bytes: chunks compressed where asked and worth it, else the pool's own memory."""
    planned, ranges = plan_raw(payload, options)
    small, tables = small_sections(payload), table_sections(payload)
    threads = default_threads(payload.pages.nbytes, options.threads)
    width = shuffle_width(payload.descriptor.bit_width // 8)
    chunks = planned[len(small) : len(small) + len(ranges)]

    def stored(item: tuple[Planned, tuple[int, int]]) -> Section:
        return _stored(item[0], payload.pages, item[1], width)

    if options.compression:
        pool = run_chunks(stored, list(zip(chunks, ranges, strict=True)), threads=threads)
    else:
        pool = [Section(p, payload.pages.views(*r)) for p, r in zip(chunks, ranges, strict=True)]
    others = [Section(_raw(kind, 0, data.size), (data,)) for kind, data in (*small, *tables)]
    return [*others[: len(small)], *pool, *others[len(small) :]]


def _stored(planned: Planned, pages: PageSource, chunk: tuple[int, int], width: int) -> Section:
    pieces = pages.views(*chunk)
    if len(pieces) == 1:
        whole = pieces[0]
    else:
        whole = np.empty(planned.raw_length, np.uint8)
        pages.copy(*chunk, whole)
    shuffled = width if width and planned.raw_length % width == 0 else 0
    compressed = compress_chunk(whole, shuffled)
    if compressed is None:
        return Section(planned, pieces)
    data = as_bytes(compressed)
    return Section(planned._replace(codec=_ZSTD, element_width=shuffled, stored_length=data.size), (data,))


def _digest(pieces: Sequence[Bytes]) -> int:
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0])
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def _checked(kind: int, options: EncodeOptions) -> bool:
    return options.checksum or kind not in _MAY_DO_WITHOUT


class Laid(NamedTuple):
    """Sections in their places: where each begins, and how long the frame is."""

    planned: Sequence[Planned]
    offsets: Sequence[int]
    frame_length: int


def laid(planned: Sequence[Planned], payload: Payload, padded_to: int = MIN_ALIGNMENT) -> Laid:
    """Lay sections out; the frame is padded to the greater of its own alignment and `padded_to`."""
    handles = payload.descriptor.buffers
    alignments = [handle.alignment for handle in handles]
    offsets, end = lay_out(planned, alignments)
    own = frame_alignment([handle.byte_size for handle in handles], alignments)
    return Laid(planned, offsets, align(end, max(own, padded_to)))


def build_header(frame: Laid, checksums: Sequence[int], options: EncodeOptions) -> bytes:
    """Prologue, section table and header checksum."""
    parts = [_prologue(len(frame.planned), frame.frame_length, options)]
    for section, offset, checksum in zip(frame.planned, frame.offsets, checksums, strict=True):
        parts.append(
            SECTION_PLAN.pack(
                section.kind,
                section.codec,
                _SHUFFLE if section.element_width else _NONE,
                section.element_width,
                _CHECKSUM if _checked(section.kind, options) else 0,
                0,
                section.raw_offset,
                section.raw_length,
                offset,
                section.stored_length,
                checksum,
            )
        )
    return _sealed(b"".join(parts))


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


def frame_parts(payload: Payload, options: EncodeOptions, padded_to: int = MIN_ALIGNMENT) -> list[Bytes]:
    """The frame's bytes in order: the pool's own memory where it is stored raw, small pieces joined."""
    sections = build_sections(payload, options)
    frame = laid([section.planned for section in sections], payload, padded_to)
    threads = default_threads(payload.pages.nbytes, options.threads)
    header = build_header(frame, _digests([s.pieces for s in sections], frame, options, threads), options)
    return _joined(_in_order(header, sections, frame))


def _digests(pieces: Sequence[Sequence[Bytes]], frame: Laid, options: EncodeOptions, threads: int) -> list[int]:
    """The checksum of each section, 0 where it has none."""

    def digest(index: int) -> int:
        return _digest(pieces[index]) if _checked(frame.planned[index].kind, options) else 0

    return run_chunks(digest, range(len(pieces)), threads=threads)


def _in_order(header: bytes, sections: Sequence[Section], frame: Laid) -> Iterator[Bytes]:
    yield as_bytes(header)
    end = len(header)
    for section, offset in zip(sections, frame.offsets, strict=True):
        if offset > end:
            yield np.zeros(offset - end, np.uint8)
        yield from section.pieces
        end = offset + section.planned.stored_length
    if frame.frame_length > end:
        yield np.zeros(frame.frame_length - end, np.uint8)


def _joined(pieces: Iterator[Bytes]) -> list[Bytes]:
    joined: list[Bytes] = []
    small: list[Bytes] = []
    for piece in pieces:
        if piece.size < _JOIN_BELOW:
            small.append(piece)
            continue
        if small:
            joined.append(as_bytes(b"".join(small)))
            small = []
        joined.append(piece)
    if small:
        joined.append(as_bytes(b"".join(small)))
    return joined


def frame_size(payload: Payload, options: EncodeOptions, padded_to: int = MIN_ALIGNMENT) -> int:
    """Bytes of the frame: exact when raw, an upper bound when compressed."""
    planned, _ = plan_raw(payload, options)
    if not options.compression:
        return laid(planned, payload, padded_to).frame_length
    # Each compressed chunk is smaller than raw, and may stand up to 7 bytes behind the one before it.
    return laid(planned, payload, padded_to).frame_length + align(8 * len(planned), MIN_ALIGNMENT)


def write_frame(payload: Payload, options: EncodeOptions, out: Bytes) -> None:
    """A raw frame into `out`, of exactly `frame_size`: the pool is copied once, then hashed where it lies."""
    planned, ranges = plan_raw(payload, options)
    frame = laid(planned, payload)
    smalls = [data for _, data in small_sections(payload)]
    tables = [data for _, data in table_sections(payload)]
    threads = default_threads(payload.pages.nbytes, options.threads)
    if ranges:
        start = frame.offsets[len(smalls)]
        _copy_pool(payload.pages, ranges, out[start : start + payload.pages.nbytes], threads)
    singles = [*range(len(smalls)), *range(len(planned) - len(tables), len(planned))]
    for index, data in zip(singles, [*smalls, *tables], strict=True):
        out[frame.offsets[index] :][: data.size] = data
    stored = [(out[o : o + p.stored_length],) for p, o in zip(planned, frame.offsets, strict=True)]
    header = build_header(frame, _digests(stored, frame, options, threads), options)
    out[: len(header)] = as_bytes(header)
    _clear_padding(frame, len(header), out)


def _copy_pool(pages: PageSource, ranges: Sequence[tuple[int, int]], out: Bytes, threads: int) -> None:
    """Whole when one thread copies (large copies bypass the cache), else a share of the chunks a thread."""
    count = min(threads, len(ranges))
    cuts = [ranges[len(ranges) * i // count][0] for i in range(count)] + [pages.num_pages]
    width = pages.page_bytes

    def copy(index: int) -> None:
        start, stop = cuts[index], cuts[index + 1]
        pages.copy(start, stop, out[start * width : stop * width])

    run_chunks(copy, range(count), threads=count)


def _clear_padding(frame: Laid, header: int, out: Bytes) -> None:
    end = header
    for section, offset in zip(frame.planned, frame.offsets, strict=True):
        if offset > end:
            out[end:offset] = 0
        end = offset + section.stored_length
    out[end:] = 0


def frame_header(payload: Payload, options: EncodeOptions) -> bytes:
    """The frame up to its first buffer's offset, padding included, for buffers that travel by other means.

    Raises:
        FrameError: `section_codec`: buffers that travel as they are cannot be described as compressed.
    """
    if options.compression:
        message = "the header of a compressed frame describes bytes that nobody sends: use compression=None"
        raise FrameError(message, code=Code.SECTION_CODEC, where="compression")
    parts: list[Bytes] = []
    planned, ranges = plan_raw(payload, options)
    frame = laid(planned, payload)
    small = len(planned) - len(ranges) - len(table_sections(payload))
    sections = build_sections(payload, options)
    threads = default_threads(payload.pages.nbytes, options.threads)
    header = build_header(frame, _digests([s.pieces for s in sections], frame, options, threads), options)
    before = sections[:small]
    parts = list(_in_order(header, before, Laid(planned[:small], frame.offsets[:small], frame.offsets[small])))
    return b"".join(parts)
