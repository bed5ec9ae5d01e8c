"""The section table of an HRKV frame (section 4): where sections lie, and every rule that says so.

`lay_out` gives a writer the offsets; `read_table` and `covered` hold a reader's table to the same rules, vectorised,
naming the first entry that breaks one. A table is checked once for its content: layer after layer of a cache comes
with the same one but for the checksums, which are no part of what is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from struct import Struct
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import xxhash

from hurray_wire.errors import Code, FrameError
from hurray_wire.structs.frame import CHECKSUM_PLAN, PROLOGUE_PLAN, SECTION_PLAN
from hurray_wire.tags import MAX_FRAME_ALIGNMENT, MIN_ALIGNMENT, Codec, Filter, SectionFlag, SectionKind

SECTION_DTYPE = np.dtype([(name, f"<u{SECTION_PLAN.packed_size(name)}") for name in SECTION_PLAN.names], align=False)
FIXED_BYTES = PROLOGUE_PLAN.size + CHECKSUM_PLAN.size
MAX_SECTIONS = 65535
SHUFFLE_WIDTHS = (2, 4, 8, 16)
SMALL_ALIGNMENT = 8
BUFFERS = range(SectionKind.PAGE_POOL, SectionKind.PAGE_POOL + 16)

_CHECKSUM, _OPTIONAL = int(SectionFlag.CHECKSUM), int(SectionFlag.OPTIONAL)
_DESCRIPTOR, _SEQ_LENS, _METADATA = int(SectionKind.DESCRIPTOR), int(SectionKind.SEQ_LENS), int(SectionKind.METADATA)
_ALWAYS_CHECKED = (_DESCRIPTOR, _SEQ_LENS, _METADATA, int(SectionKind.BLOCK_TABLE), int(SectionKind.SEQ_PTR))

Entries = npt.NDArray[Any]
Extents = tuple[tuple[int, ...], tuple[int, ...], int]
Mask = npt.NDArray[np.bool_]


def align(offset: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `offset`."""
    return -(-offset // alignment) * alignment


def digest_of(pieces: Sequence[Any]) -> int:
    """The checksum of a section's stored bytes, which lie in one piece or several (XXH3-64)."""
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0])
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def header_length(section_count: int) -> int:
    """Bytes of prologue, table and checksum."""
    return FIXED_BYTES + SECTION_PLAN.size * section_count


def section_alignment(kind: int, raw: bool, first: bool, behind_raw: bool, alignments: Sequence[int]) -> int:
    """What a payload's offset is a multiple of, from where it stands (section 4)."""
    if kind in BUFFERS and first:
        return min(alignments[kind - BUFFERS.start], MAX_FRAME_ALIGNMENT)
    return 1 if raw and behind_raw else SMALL_ALIGNMENT


def frame_alignment(sizes: Sequence[int], alignments: Sequence[int]) -> int:
    """The largest of the non-empty buffers' alignments, 64 to 2 MiB."""
    filled = [alignment for size, alignment in zip(sizes, alignments, strict=True) if size]
    return min(max([MIN_ALIGNMENT, *filled]), MAX_FRAME_ALIGNMENT)


class Planned(NamedTuple):
    """A section of a writer before it has an offset."""

    kind: int
    codec: int
    element_width: int
    raw_offset: int
    raw_length: int
    stored_length: int


def lay_out(planned: Sequence[Planned], alignments: Sequence[int]) -> tuple[list[int], int]:
    """The offset of every section from the frame's first byte, and where the last one ends."""
    offsets = []
    end = header_length(len(planned))
    before: Planned | None = None
    for section in planned:
        raw = section.codec == Codec.RAW
        same = before is not None and before.kind == section.kind
        behind_raw = same and before is not None and before.codec == Codec.RAW
        start = align(end, section_alignment(section.kind, raw, not same, behind_raw, alignments))
        offsets.append(start)
        end = start + section.stored_length
        before = section
    return offsets, end


class Stored(NamedTuple):
    """A section's place: its row, its offset from the frame's first byte, its bytes."""

    row: int
    offset: int
    length: int


@dataclass(frozen=True, eq=False, slots=True)
class SectionTable:
    """A table that keeps the rules of stage 3; `entries` without their checksums."""

    entries: Entries
    records: Sequence[Any]
    """The same entries as plain integers, for looking at one."""
    kinds: dict[int, slice]
    """The rows of each kind."""
    payload: tuple[int, ...]
    """The rows whose checksums `verify` asks for: page_pool, scales, zero_points, where they have one."""
    unknown: tuple[int, ...]
    """The rows that only a later version knows."""
    unchecked: tuple[int, ...]
    """The rows without a checksum."""
    small: dict[int, tuple[Stored, ...]]
    """Where the bytes lie of each kind that is always copied and verified."""
    covers: dict[Extents, Cover] = field(default_factory=dict)
    """What `covered` has found about descriptors that came with this table."""

    def rows(self, kind: int) -> Entries:
        """The entries of a kind, none where it does not stand."""
        return self.entries[self.kinds.get(kind, slice(0, 0))]

    def numbers(self, kind: int) -> range:
        """The numbers of the rows of a kind, none where it does not stand."""
        rows = self.kinds.get(kind, slice(0, 0))
        return range(rows.start, rows.stop)

    def first(self, kind: int) -> Any:
        """The first record of a kind that stands here."""
        return self.records[self.kinds[kind].start]


_SEEN_TABLES = 256
_SEEN_SECTIONS = 1024
"""Longer tables are not remembered: memory is not a sender's to fill."""
_SEEN_ALTOGETHER = 16384
"""Sections of all tables that are remembered, about 300 bytes each."""


class _Seen:
    """Tables that kept the rules, by all their bytes but the checksums; all are forgotten when they become too many."""

    def __init__(self) -> None:
        self._tables: dict[tuple[Any, ...], SectionTable] = {}
        self._sections = 0
        self.find = self._tables.get

    def keep(self, key: tuple[Any, ...], table: SectionTable) -> None:
        """Remember a table, with what will be found out about it."""
        count = len(table.entries)
        if len(self._tables) >= _SEEN_TABLES or self._sections + count > _SEEN_ALTOGETHER:
            self._tables.clear()
            self._sections = 0
        self._tables[key] = table
        self._sections += count


_seen = _Seen()


class _Records(Sequence[Any]):
    """The records of a long table, each made when it is asked for: all of them would be ten times the table."""

    def __init__(self, table: bytes) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table) // SECTION_PLAN.size

    @overload
    def __getitem__(self, row: int) -> Any: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Any]: ...
    def __getitem__(self, row: int | slice) -> Any:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        return SECTION_PLAN.unpack(self._table, (row % len(self)) * SECTION_PLAN.size)


def read_table(header: bytes, frame_length: int, base: int) -> tuple[SectionTable, Sequence[int]]:
    """Stage 3: the table in itself, and its column of checksums.

    Args:
        header: the frame's bytes up to and with the header checksum, which has been verified.
        base: where the frame begins in the input, for errors.

    Raises:
        FrameError: the first entry that breaks a rule, with its field.
    """
    count = (len(header) - FIXED_BYTES) // SECTION_PLAN.size
    if count > _SEEN_SECTIONS:
        entries = np.frombuffer(header, SECTION_DTYPE, count, PROLOGUE_PLAN.size)
        table, checksums = _checked(entries, frame_length, base), entries["checksum"].tolist()
    else:
        columns = _columns(count).unpack_from(header, PROLOGUE_PLAN.size)
        checksums = columns[1::2]
        key = (frame_length, *columns[::2])
        table = _seen.find(key) or _remembered(key, header, count, base)
    if table.unchecked and any(map(checksums.__getitem__, table.unchecked)):
        row = next(row for row in table.unchecked if checksums[row])
        message = f"is {checksums[row]:#018x}, must be 0 without CHECKSUM"
        offset = entry_offset(row, "checksum", base)
        raise FrameError(message, code=Code.SECTION_FLAGS, where=f"sections[{row}].checksum", offset=offset)
    return table, checksums


@lru_cache(maxsize=_SEEN_TABLES)
def _columns(count: int) -> Struct:
    """Of so many entries, in turn: all that stands before the checksum, as bytes, and the checksum, which is last."""
    return Struct("<" + f"{SECTION_PLAN.offset_of('checksum')}sQ" * count)


def _remembered(key: tuple[Any, ...], header: bytes, count: int, base: int) -> SectionTable:
    table = _checked(np.frombuffer(header, SECTION_DTYPE, count, PROLOGUE_PLAN.size), key[0], base)
    _seen.keep(key, table)
    return table


class _Rule(NamedTuple):
    code: Code
    field: str
    broken: Callable[[Entries, int], Mask]
    must: str


def _known(e: Entries) -> Mask:
    kind = e["kind"]
    return ((kind >= _DESCRIPTOR) & (kind <= _METADATA)) | _buffer(kind)


def _buffer(kind: npt.NDArray[np.uint8]) -> Mask:
    return (kind >= BUFFERS.start) & (kind < BUFFERS.stop)


def _flag(e: Entries, flag: int) -> Mask:
    return (e["flags"] & np.uint16(flag)) != 0


def _outside(e: Entries, frame_length: int) -> Mask:
    end = np.uint64(frame_length)
    too_long = e["stored_length"] > end
    past = e["offset"] > end - np.where(too_long, np.uint64(0), e["stored_length"])
    return too_long | past | (e["offset"] < np.uint64(header_length(len(e))))


_RAW, _ZSTD, _SHUFFLE = int(Codec.RAW), int(Codec.ZSTD), int(Filter.SHUFFLE)

_RULES = (
    _Rule(Code.SECTION_KIND, "kind", lambda e, _: (e["kind"] == 0) | (e["kind"] == 0xFF), "not 0x00 or 0xff"),
    _Rule(Code.SECTION_FLAGS, "flags", lambda e, _: e["flags"] > (_CHECKSUM | _OPTIONAL), "bits 2 to 15 zero"),
    _Rule(Code.SECTION_FLAGS, "reserved", lambda e, _: e["reserved"] != 0, "0"),
    _Rule(
        Code.SECTION_KIND,
        "kind",
        lambda e, _: ~_known(e) & ~_flag(e, _OPTIONAL),
        "known, or marked OPTIONAL",
    ),
    _Rule(
        Code.SECTION_FLAGS,
        "flags",
        lambda e, _: _flag(e, _OPTIONAL) & (_known(e) | ~_flag(e, _CHECKSUM)),
        "OPTIONAL only on kinds of a later version, and together with CHECKSUM",
    ),
    _Rule(
        Code.SECTION_FLAGS,
        "flags",
        lambda e, _: np.isin(e["kind"], _ALWAYS_CHECKED) & ~_flag(e, _CHECKSUM),
        "CHECKSUM on all but page_pool, scales and zero_points",
    ),
    _Rule(Code.SECTION_CODEC, "codec", lambda e, _: e["codec"] > _ZSTD, "0 raw or 1 zstd"),
    _Rule(Code.SECTION_FILTER, "filter", lambda e, _: e["filter"] > _SHUFFLE, "0 none or 1 shuffle"),
    _Rule(
        Code.SECTION_FILTER,
        "filter",
        lambda e, _: (e["codec"] == _RAW) & (e["filter"] != 0),
        "0 on a raw section",
    ),
    _Rule(
        Code.SECTION_FILTER,
        "element_width",
        lambda e, _: np.where(
            e["filter"] == _SHUFFLE, ~np.isin(e["element_width"], SHUFFLE_WIDTHS), e["element_width"] != 0
        ),
        "2, 4, 8 or 16 for the shuffle, else 0",
    ),
    _Rule(Code.SECTION_COVER, "raw_length", lambda e, _: e["raw_length"] == 0, "at least 1"),
    _Rule(Code.SECTION_CODEC, "stored_length", lambda e, _: e["stored_length"] == 0, "at least 1"),
    _Rule(
        Code.SECTION_COVER,
        "raw_length",
        lambda e, _: e["raw_offset"] + e["raw_length"] < e["raw_offset"],
        "within 64 bits behind raw_offset",
    ),
    _Rule(
        Code.SECTION_CODEC,
        "stored_length",
        lambda e, _: (e["codec"] == _RAW) & (e["stored_length"] != e["raw_length"]),
        "raw_length on a raw section",
    ),
    _Rule(
        Code.SECTION_CODEC,
        "stored_length",
        lambda e, _: (e["codec"] == _ZSTD) & (e["stored_length"] >= e["raw_length"]),
        "less than raw_length on a zstd section",
    ),
    _Rule(
        Code.SECTION_FILTER,
        "element_width",
        lambda e, _: (e["filter"] == _SHUFFLE) & (e["raw_length"] % np.maximum(e["element_width"], 1) != 0),
        "a divisor of raw_length",
    ),
    _Rule(
        Code.SECTION_CODEC,
        "codec",
        lambda e, _: (e["kind"] <= _METADATA) & (e["codec"] != _RAW),
        "raw on descriptor, seq_lens and metadata",
    ),
    _Rule(
        Code.SECTION_COVER,
        "raw_offset",
        lambda e, _: (e["kind"] <= _METADATA) & (e["raw_offset"] != 0),
        "0 on descriptor, seq_lens and metadata",
    ),
    _Rule(Code.SECTION_OFFSET, "offset", _outside, "between the header and the end of the frame"),
)


def _checked(entries: Entries, frame_length: int, base: int) -> SectionTable:
    for rule in _RULES:
        broken = rule.broken(entries, frame_length)
        if broken.any():
            raise entry_error(entries, int(broken.argmax()), rule.field, rule.code, rule.must, base)
    _check_order(entries, base)
    own = entries.copy()
    own["checksum"] = 0
    own.flags.writeable = False
    kinds, firsts = np.unique(own["kind"], return_index=True)
    bounds = pairwise([*firsts.tolist(), len(own)])
    rows = {kind: slice(*rows) for kind, rows in zip(kinds.tolist(), bounds, strict=True)}
    if len(own) and _DESCRIPTOR not in rows:
        message = "there is no descriptor section"
        raise FrameError(message, code=Code.SECTION_KIND, where="sections[0].kind", offset=base + PROLOGUE_PLAN.size)
    records: Sequence[Any] = _Records(own.tobytes())
    if len(own) <= _SEEN_SECTIONS:
        records = tuple(records)
    bulk = _buffer(own["kind"]) & ~np.isin(own["kind"], _ALWAYS_CHECKED) & _flag(own, _CHECKSUM)
    return SectionTable(
        own,
        records,
        rows,
        payload=_rows_of(bulk),
        unknown=_rows_of(_flag(own, _OPTIONAL)),
        unchecked=_rows_of(~_flag(own, _CHECKSUM)),
        small={kind: _stored(own, rows[kind]) for kind in _ALWAYS_CHECKED if kind in rows},
    )


def _stored(entries: Entries, rows: slice) -> tuple[Stored, ...]:
    offsets, lengths = entries["offset"][rows].tolist(), entries["stored_length"][rows].tolist()
    return tuple(map(Stored, range(rows.start, rows.stop), offsets, lengths))


def _rows_of(mask: Mask) -> tuple[int, ...]:
    return tuple(np.flatnonzero(mask).tolist())


def _check_order(entries: Entries, base: int) -> None:
    kind, start = entries["kind"], entries["raw_offset"]
    falls = (kind[1:] < kind[:-1]) | ((kind[1:] == kind[:-1]) & (start[1:] <= start[:-1]))
    falls |= (kind[1:] == kind[:-1]) & (kind[1:] <= _METADATA)
    if falls.any():
        index = int(falls.argmax()) + 1
        field = "raw_offset" if kind[index] == kind[index - 1] else "kind"
        must = "ordered by kind, then raw_offset; descriptor, seq_lens and metadata once"
        raise entry_error(entries, index, field, Code.SECTION_ORDER, must, base)


def entry_offset(index: int, field: str, base: int) -> int:
    """Where a field of an entry stands in the input."""
    fields = SECTION_DTYPE.fields
    assert fields is not None
    return base + PROLOGUE_PLAN.size + index * SECTION_PLAN.size + int(fields[field][1])


def entry_error(entries: Entries, index: int, field: str, code: Code, must: str, base: int) -> FrameError:
    """What is wrong with one field of one entry."""
    message = (
        f"is {int(entries[index][field]):#x} in a section of kind {int(entries[index]['kind']):#04x}, must be {must}"
    )
    return FrameError(message, code=code, where=f"sections[{index}].{field}", offset=entry_offset(index, field, base))


def is_checked(entry: Any) -> bool:
    """Whether an entry states a checksum."""
    return bool(entry.flags & _CHECKSUM)


def small_end(table: SectionTable) -> int:
    """Where the sections before the buffers end, from the frame's first byte."""
    small = table.entries[table.entries["kind"] <= _METADATA]
    return int((small["offset"] + small["stored_length"]).max())


def header_bytes(table: SectionTable, frame_length: int) -> int:
    """Bytes of a frame up to its first buffer, padding included; the whole of a frame that has none."""
    buffers = table.entries[_buffer(table.entries["kind"])]
    return int(buffers["offset"][0]) if len(buffers) else frame_length


# Stage 6: the table against the descriptor.


class Cover(NamedTuple):
    """A table that fits its descriptor: `raw[i]` is where buffer i begins when it is one raw run, else None."""

    raw: tuple[int | None, ...]
    raw_tables: bool
    """Whether block_table and seq_ptr are stored as they are."""
    gaps: tuple[tuple[int, int], ...]
    """Where padding lies between sections: start and end, from the frame's first byte."""
    alignment: int
    end: int


def covered(table: SectionTable, extents: Extents, base: int) -> Cover:
    """Stage 6: each buffer covered without gap or overlap, the pool by whole pages, every offset the lawful one.

    Found once for each table and extents: layer after layer of a cache comes with the same.

    Args:
        extents: of the descriptor's buffers their sizes and alignments in bytes, and the bytes of one page, 0 where a
            page does not end with a byte.

    Raises:
        FrameError: `section_kind`, `section_cover`, `section_offset`.
    """
    found = table.covers.get(extents)
    if found is None:
        found = _covered(table, *extents, base)
        if len(table.covers) < _SEEN_COVERS:
            table.covers[extents] = found
    return found


_SEEN_COVERS = 16


def _covered(
    table: SectionTable, sizes: tuple[int, ...], alignments: tuple[int, ...], page_bytes: int, base: int
) -> Cover:
    entries = table.entries
    for kind in table.kinds:
        if kind in BUFFERS and kind - BUFFERS.start >= len(sizes):
            index = table.kinds[kind].start
            raise entry_error(entries, index, "kind", Code.SECTION_KIND, f"a buffer of {len(sizes)}", base)
    for buffer, size in enumerate(sizes):
        _check_buffer(table, buffer, size, base)
    _check_pages(table, sizes[0], page_bytes, base)
    ends = _check_offsets(table, alignments, base)
    starts = entries["offset"].tolist()
    gaps = tuple((end, start) for end, start in zip(ends[:-1], starts, strict=True) if end < start)
    raw = tuple(_raw_start(table, buffer) for buffer in range(len(sizes)))
    plain = all(start is not None or not size for start, size in zip(raw[1:3], sizes[1:3], strict=True))
    return Cover(raw, plain, gaps, frame_alignment(sizes, alignments), ends[-1])


def _check_buffer(table: SectionTable, buffer: int, size: int, base: int) -> None:
    kind = BUFFERS.start + buffer
    rows = table.rows(kind)
    if not len(rows):
        if size:
            message = f"buffer {buffer} of {size} bytes has no section"
            raise FrameError(message, code=Code.SECTION_COVER, where=f"buffers[{buffer}]", offset=base)
        return
    first = table.kinds[kind].start
    expected = np.concatenate((np.zeros(1, np.uint64), (rows["raw_offset"] + rows["raw_length"])[:-1]))
    wrong = rows["raw_offset"] != expected
    if wrong.any():
        at = int(wrong.argmax())
        must = f"{int(expected[at])}, where the chunk before it ends"
        raise entry_error(table.entries, first + at, "raw_offset", Code.SECTION_COVER, must, base)
    end = int(rows[-1]["raw_offset"]) + int(rows[-1]["raw_length"])
    if end != size:
        last = first + len(rows) - 1
        must = f"{size - int(rows[-1]['raw_offset'])}, so that buffer {buffer} has its {size} bytes"
        raise entry_error(table.entries, last, "raw_length", Code.SECTION_COVER, must, base)


_MOST_WIDTH = (1 << 64) - 1


def _check_pages(table: SectionTable, size: int, page_bytes: int, base: int) -> None:
    rows = table.rows(SectionKind.PAGE_POOL)
    if len(rows) < 2:
        return
    width = min(page_bytes, _MOST_WIDTH)  # no chunk is as long as that
    wrong = rows["raw_length"] % np.uint64(width) != 0 if width else np.ones(len(rows), bool)
    if wrong.any():
        index = table.kinds[int(SectionKind.PAGE_POOL)].start + int(wrong.argmax())
        must = f"whole pages of {page_bytes} bytes" if page_bytes else f"all {size} bytes: pages end inside bytes"
        raise entry_error(table.entries, index, "raw_length", Code.SECTION_COVER, must, base)


def _check_offsets(table: SectionTable, alignments: Sequence[int], base: int) -> list[int]:
    """Every payload at the smallest lawful offset; gives the end of the header and of each section."""
    entries = table.entries
    kind, raw = entries["kind"], entries["codec"] == _RAW
    ends = np.concatenate(([np.uint64(header_length(len(entries)))], entries["offset"] + entries["stored_length"]))
    need = np.full(len(entries), SMALL_ALIGNMENT, np.uint64)
    need[1:][(kind[1:] == kind[:-1]) & raw[1:] & raw[:-1] & _buffer(kind[1:])] = 1
    for buffer, alignment in enumerate(alignments):
        rows = table.kinds.get(BUFFERS.start + buffer)
        if rows is not None:
            need[rows.start] = min(alignment, MAX_FRAME_ALIGNMENT)
    expected = (ends[:-1] + need - np.uint64(1)) // need * need
    wrong = entries["offset"] != expected
    if wrong.any():
        index = int(wrong.argmax())
        raise entry_error(entries, index, "offset", Code.SECTION_OFFSET, f"{int(expected[index]):#x}", base)
    return [int(end) for end in ends.tolist()]


def _raw_start(table: SectionTable, buffer: int) -> int | None:
    rows = table.rows(BUFFERS.start + buffer)
    return int(rows[0]["offset"]) if len(rows) and (rows["codec"] == _RAW).all() else None


def check_frame_length(frame_length: int, end: int, alignment: int, base: int) -> None:
    """The smallest multiple of the frame's alignment behind the last section, or of a greater one up to 2 MiB."""
    lawful = alignment
    while lawful <= MAX_FRAME_ALIGNMENT:
        if frame_length == align(end, lawful):
            return
        lawful *= 2
    message = f"is {frame_length}, must be {align(end, alignment)}, or padded to a greater power of two up to 2 MiB"
    raise FrameError(
        message, code=Code.FRAME_LENGTH, where="frame_length", offset=base + PROLOGUE_PLAN.offset_of("frame_length")
    )
