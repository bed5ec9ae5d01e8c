"""Frames like one that was read before: the same checks, in a straight line.

Layer after layer of a cache comes in frames that differ in checksums, sequence, descriptor and payload, and in nothing
else. When `frame_reader` has taken one through all stages, `learn` keeps what its header says about where things lie;
`read` then takes its like through what is left to check: every checksum, the descriptor, the padding, every table.

`read` accepts or declines, and never says what is wrong: what it declines goes through the stages, which name it. Tests
hold it to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from hurray_wire.arrays import Bytes
from hurray_wire.assembly import Array, Parts, check_tables, forced_lens, scale_arrays
from hurray_wire.compression import default_threads, run_chunks
from hurray_wire.descriptor import TensorDescriptor, sound_descriptor
from hurray_wire.errors import HurrayWireError
from hurray_wire.memory import placed, private
from hurray_wire.metadata import read_metadata
from hurray_wire.options import DecodeOptions, Limits, check_expected
from hurray_wire.sections import FIXED_BYTES, Cover, Extents, SectionTable, header_length
from hurray_wire.structs.frame import PROLOGUE_PLAN, SECTION_PLAN
from hurray_wire.structs.fused import new_record
from hurray_wire.tags import FrameFlag, SectionKind

Words = npt.NDArray[np.uint64]

_WORD = np.dtype("<u8")
_LAST = int(FrameFlag.LAST)
_COUNT_AT = PROLOGUE_PLAN.offset_of("section_count")
_FIRST_CHECKSUM = (PROLOGUE_PLAN.size + SECTION_PLAN.offset_of("checksum")) // _WORD.itemsize
_ROW_WORDS = SECTION_PLAN.size // _WORD.itemsize
_MOST_SECTIONS = 1024
"""Longer tables are not learned, nor are more sections altogether than `_MOST_ALTOGETHER`: memory is not a sender's."""
_MOST_ALTOGETHER = 4096
_SHORT_GAP = 4096


class Piece(NamedTuple):
    """Where a section lies, from the first byte of what holds it, and the word of the header that is its checksum."""

    checksum: int
    place: slice


class Gap(NamedTuple):
    """Where padding lies, from the first byte of what holds it, and the zeros that it must be."""

    place: slice
    zeros: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Neighbouring sections, copied at once before they are looked at, and what lies where in the copy."""

    start: int
    """From the frame's first byte; likewise `stop`."""
    stop: int
    pieces: tuple[Piece, ...]
    gaps: tuple[Gap, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """What a header says of where things lie."""

    header: bytes
    """The bits that do not differ from frame to frame."""
    frame_length: int
    sections: int
    extents: Extents
    """Of a descriptor that the section table fits."""
    total_bytes: int
    """Of its buffers."""
    descriptor_bytes: int
    metadata_bytes: int
    front: Run
    """Descriptor, seq_lens and metadata: where each lies in the run."""
    descriptor: slice
    seq_lens: slice | None
    metadata: slice | None
    back: Run
    """block_table and seq_ptr: where each begins in the run."""
    block_table: int
    seq_ptr: int
    starts: tuple[int, ...]
    """Where page_pool, scales and zero_points begin in the frame."""
    payload: tuple[Piece, ...]
    """Their chunks that have a checksum."""
    payload_bytes: int
    unchecked: tuple[int, ...]
    """Words of the header that stand for no checksum, and must be 0."""
    gaps: tuple[slice, ...]
    """Padding outside of the runs, as it lies in the frame."""


class Reading(NamedTuple):
    """A frame that was accepted: the parts of its tensor, its length, and its header from the prologue on."""

    parts: Parts
    frame_length: int
    header: bytes


class _Known:
    """The routes that were learned, by what of a header does not differ; all are forgotten when they are too many."""

    def __init__(self) -> None:
        self.masks: dict[int, tuple[Words, int]] = {}
        """By section count: the bits that do not differ, and the header's length."""
        self.routes: dict[int, Route] = {}
        """By the digest of those bits."""
        self._sections = 0

    def keep(self, mask: Words, route: Route) -> None:
        """Remember a route, and that headers of so many sections may be familiar."""
        digest = xxhash.xxh3_64_intdigest(route.header)
        before = self.routes.get(digest)
        self._sections += route.sections - (0 if before is None else before.sections)
        if self._sections > _MOST_ALTOGETHER:
            self.masks, self.routes, self._sections = {}, {}, route.sections
        self.routes[digest] = route
        self.masks[route.sections] = mask, len(route.header)


_known = _Known()
_UNKNOWN = np.zeros(0, _WORD), 0


def read(data: Bytes, offset: int, options: DecodeOptions, *, alone: bool) -> Reading | None:
    """The frame at `offset`, or None where it is for the stages of `frame_reader`: unfamiliar, unsound, or copied."""
    available = data.size - offset
    if available < FIXED_BYTES or options.copy:
        return None
    count = data.item(offset + _COUNT_AT) | data.item(offset + _COUNT_AT + 1) << 8
    mask, length = _known.masks.get(count, _UNKNOWN)
    if not length or available < length:
        return None
    header = data[offset : offset + length].tobytes()
    words = np.frombuffer(header, _WORD)
    same = (words & mask).tobytes()
    route = _known.routes.get(xxhash.xxh3_64_intdigest(same))
    if (
        route is None
        or route.header != same
        or xxhash.xxh3_64_intdigest(words[:-1]) != words.item(-1)
        or (available != route.frame_length if alone else available < route.frame_length)
        or not _within(route, options.limits)
    ):
        return None
    try:
        parts = _parts(data, offset, route, words, options)
    except HurrayWireError:
        return None
    return None if parts is None else new_record(Reading, (parts, route.frame_length, header))


def _within(route: Route, limits: Limits) -> bool:
    return (
        route.sections <= limits.sections
        and route.frame_length <= limits.frame_bytes
        and route.descriptor_bytes <= limits.descriptor_bytes
        and route.metadata_bytes <= limits.metadata_bytes
        and route.total_bytes <= limits.decoded_bytes
    )


def _parts(data: Bytes, offset: int, route: Route, words: Words, options: DecodeOptions) -> Parts | None:
    """Stages 4 to 9 of a frame whose header is familiar and within the limits, and the end of stage 3."""
    if route.unchecked and any(map(words.item, route.unchecked)):
        return None
    front = _copied(data, offset, route.front, words)
    descriptor = None if front is None else sound_descriptor(front[route.descriptor])
    if front is None or descriptor is None or descriptor.extents != route.extents or descriptor.pool_dtype is None:
        return None
    pool: Array = np.ndarray(descriptor.pool_shape, descriptor.pool_dtype, data, offset + route.starts[0])
    flags = pool.flags
    if not flags.aligned:
        return None
    if not options.owned:
        flags.writeable = False
    layout, index = descriptor.layout, descriptor.index_dtype
    metadata = None
    if route.metadata is not None:
        metadata = read_metadata(front[route.metadata], layout.num_seqs, descriptor.shape[2])
    if options.expect:
        check_expected(descriptor, metadata, options.expect)
    if (options.verify or route.gaps) and not _payload_keeps(data, offset, route, words, options):
        return None
    back = _copied(data, offset, route.back, words)
    if back is None:
        return None
    table = np.frombuffer(back, index, descriptor.sizes[1] // index.itemsize, route.block_table)
    ptr = np.frombuffer(back, index, layout.num_seqs + 1, route.seq_ptr)
    lens = None
    if route.seq_lens is not None:
        stored = front[route.seq_lens]  # of its own: metadata would be kept alive with it
        if len(stored) != layout.num_seqs * index.itemsize:
            return None
        lens = np.frombuffer(stored, index)
    if check_tables(descriptor, table, ptr, lens):
        return None
    if lens is None:
        lens = forced_lens(ptr, layout.page_size, descriptor.shape[0])
    scales = zero_points = None
    if len(route.starts) > 1:
        scales, zero_points = _scales(data, offset, route, descriptor, options)
    found: Parts = new_record(Parts, (descriptor, pool, table, ptr, lens, scales, zero_points, metadata, ()))
    return found


def _copied(data: Bytes, offset: int, run: Run, words: Words) -> bytes | None:
    """A private copy of a run, or None where a checksum or padding in it is wrong."""
    copy = private(data[offset + run.start : offset + run.stop])
    view = memoryview(copy)
    for checksum, place in run.pieces:
        if xxhash.xxh3_64_intdigest(view[place]) != words.item(checksum):
            return None
    for place, zeros in run.gaps:
        if copy[place] != zeros:
            return None
    return copy


def _payload_keeps(data: Bytes, offset: int, route: Route, words: Words, options: DecodeOptions) -> bool:
    """Whether the checksums of the payload, where `verify` asks, and the padding around it are right."""
    frame = data[offset:]
    if options.verify:
        payload, threads = route.payload, default_threads(route.payload_bytes, options.threads)
        found = run_chunks(lambda piece: xxhash.xxh3_64_intdigest(frame[piece.place]), payload, threads=threads)
        if found != [words.item(checksum) for checksum, _ in payload]:
            return False
    return not any(frame[place].any() for place in route.gaps)


def _scales(
    data: Bytes, offset: int, route: Route, descriptor: TensorDescriptor, options: DecodeOptions
) -> tuple[Array | None, Array | None]:
    places = zip(route.starts[1:], descriptor.sizes[3:], strict=True)
    stored = [data[offset + start : offset + start + size] for start, size in places]
    return scale_arrays(descriptor, [placed(each, descriptor, i, options) for i, each in enumerate(stored, 3)])


# Learning.


def learn(header: bytes, frame_length: int, table: SectionTable, cover: Cover, extents: Extents) -> None:
    """Remember the header of a frame that was sound: stored raw throughout, pool and tables not empty, and these close
    together, so that no copy of them is much larger than they are."""
    count = len(table.records)
    starts = [start for start in cover.raw if start is not None]
    if len(starts) < len(cover.raw) or count > _MOST_SECTIONS or table.unknown:
        return
    mask = _mask(count)
    same = (np.frombuffer(header, _WORD) & mask).tobytes()
    before = _known.routes.get(xxhash.xxh3_64_intdigest(same))
    if before is not None and before.header == same and before.extents == extents:
        return
    gaps = [gap for gap in (*cover.gaps, (cover.end, frame_length)) if gap[0] < gap[1]]
    small, tables = ([row for kind in kinds for row in table.numbers(kind)] for kinds in _RUNS)
    front, back = _run(table, small, gaps), _run(table, tables, gaps)
    if front is None or back is None:
        return
    outside = [gap for gap in gaps if not any(run.start <= gap[0] and gap[1] <= run.stop for run in (front, back))]
    places = {table.records[row].kind: piece.place for row, piece in zip(small, front.pieces, strict=True)}
    lengths = {table.records[row].kind: table.records[row].stored_length for row in small}
    route = Route(
        header=same,
        frame_length=frame_length,
        sections=count,
        extents=extents,
        total_bytes=sum(extents[0]),
        descriptor_bytes=lengths[_DESCRIPTOR],
        metadata_bytes=lengths.get(_METADATA, 0),
        front=front,
        descriptor=places[_DESCRIPTOR],
        seq_lens=places.get(_SEQ_LENS),
        metadata=places.get(_METADATA),
        back=back,
        block_table=starts[1] - back.start,
        seq_ptr=starts[2] - back.start,
        starts=(starts[0], *starts[3:]),
        payload=tuple(_piece(table, row, 0) for row in table.payload),
        payload_bytes=sum(table.records[row].stored_length for row in table.payload),
        unchecked=tuple(_FIRST_CHECKSUM + _ROW_WORDS * row for row in table.unchecked),
        gaps=tuple(slice(*gap) for gap in outside),
    )
    _known.keep(mask, route)


_DESCRIPTOR, _SEQ_LENS, _METADATA = map(int, (SectionKind.DESCRIPTOR, SectionKind.SEQ_LENS, SectionKind.METADATA))
_RUNS = (_DESCRIPTOR, _SEQ_LENS, _METADATA), (int(SectionKind.BLOCK_TABLE), int(SectionKind.SEQ_PTR))


def _mask(sections: int) -> Words:
    """The bits of a header that do not differ: all but LAST, sequence, stream_id and checksums."""
    mask = np.full(header_length(sections) // _WORD.itemsize, ~np.uint64(0), _WORD)
    mask[_FIRST_CHECKSUM::_ROW_WORDS] = 0
    mask[-1] = 0
    own = mask.view(np.uint8)
    for name in ("sequence", "stream_id"):
        own[slice(*PROLOGUE_PLAN.places[name])] = 0
    own[PROLOGUE_PLAN.offset_of("flags")] &= 0xFF & ~_LAST
    return mask


def _run(table: SectionTable, rows: Sequence[int], gaps: Sequence[tuple[int, int]]) -> Run | None:
    """Neighbouring sections and the padding between them, with that at either end where it is short; None where they
    are far apart."""
    first, last = table.records[rows[0]], table.records[rows[-1]]
    start, stop = first.offset, last.offset + last.stored_length
    short = [gap for gap in gaps if gap[1] - gap[0] <= _SHORT_GAP]
    start = next((begin for begin, end in short if end == start), start)
    start -= start % _WORD.itemsize  # so that tables are as aligned in the copy as in the frame
    stop = next((end for begin, end in short if begin == stop), stop)
    within = [(begin, end) for begin, end in gaps if start <= begin and end <= stop]
    if any(end - begin > _SHORT_GAP for begin, end in within):
        return None
    zeros = tuple(Gap(slice(begin - start, end - start), bytes(end - begin)) for begin, end in within)
    return Run(start, stop, tuple(_piece(table, row, start) for row in rows), zeros)


def _piece(table: SectionTable, row: int, start: int) -> Piece:
    entry = table.records[row]
    at = entry.offset - start
    return Piece(_FIRST_CHECKSUM + _ROW_WORDS * row, slice(at, at + entry.stored_length))
