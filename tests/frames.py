"""An HRKV frame builder for tests (section 4), apart from the package: `struct` and xxhash, nothing of hurray_wire.

Every field can be said to be something else than it should be; what is left out is as the wire wants it. So a test
breaks one rule, and the checksums around it are sound.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash
from support import BT, POOL, SP, desc

MAGIC = bytes.fromhex("8948524b560d0a1a")
DESCRIPTOR, SEQ_LENS, METADATA, PAGE_POOL, BLOCK_TABLE, SEQ_PTR, SCALES, ZERO_POINTS = 1, 2, 3, 16, 17, 18, 19, 20
CHECKSUM, OPTIONAL = 1, 2
PROLOGUE = struct.Struct("<8sBBHIIHHQQ")
ENTRY = struct.Struct("<BBBBHHQQQQQ")
FIELDS = (
    *("kind", "codec", "filter", "element_width", "flags", "reserved"),
    *("raw_offset", "raw_length", "offset", "stored_length", "checksum"),
)


@dataclass(frozen=True)
class Section:
    """One section: its stored bytes, and the entry that describes them; None is what the wire wants."""

    kind: int
    data: bytes
    raw_offset: int = 0
    raw_length: int | None = None
    codec: int = 0
    filter: int = 0
    element_width: int = 0
    flags: int = CHECKSUM
    reserved: int = 0
    offset: int | None = None
    stored_length: int | None = None
    checksum: int | None = None
    alignment: int = 64


def worked_sections() -> list[Section]:
    """The worked example: descriptor, seq_lens, page_pool, block_table, seq_ptr."""
    return [
        Section(DESCRIPTOR, desc()),
        Section(SEQ_LENS, struct.pack("<2I", 6, 3)),
        Section(PAGE_POOL, POOL.tobytes()),
        Section(BLOCK_TABLE, BT.tobytes()),
        Section(SEQ_PTR, SP.tobytes()),
    ]


def changed(kind: int, **fields: Any) -> list[Section]:
    """The worked example with one section's fields changed."""
    return [replace(s, **fields) if s.kind == kind else s for s in worked_sections()]


def without(kind: int) -> list[Section]:
    return [s for s in worked_sections() if s.kind != kind]


def added(section: Section) -> list[Section]:
    """The worked example with one more section, in its place by kind."""
    return sorted([*worked_sections(), section], key=lambda s: s.kind)


def align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _lawful(section: Section, before: Section | None, end: int) -> int:
    buffer = 0x10 <= section.kind <= 0x1F
    if buffer and section.raw_offset == 0:
        return align(end, section.alignment)
    follows = before is not None and before.kind == section.kind and before.codec == 0
    return end if buffer and section.codec == 0 and follows else align(end, 8)


def build(
    sections: Sequence[Section],
    *,
    version: tuple[int, int] = (1, 0),
    flags: int = 1,
    sequence: int = 0,
    stream_id: int = 0,
    reserved: int = 0,
    header_length: int | None = None,
    section_count: int | None = None,
    frame_length: int | None = None,
    alignment: int = 64,
    padding: bytes = b"\0",
    seal: bool = True,
) -> bytes:
    """A frame of these sections, sealed by its header checksum."""
    table = PROLOGUE.size + ENTRY.size * len(sections)
    end = table + 8
    entries, pieces = [], []
    before: Section | None = None
    for section in sections:
        start = _lawful(section, before, end)
        offset = start if section.offset is None else section.offset
        checksum = section.checksum
        if checksum is None:
            checksum = xxhash.xxh3_64_intdigest(section.data) if section.flags & CHECKSUM else 0
        length = len(section.data)
        entries.append(
            ENTRY.pack(
                section.kind,
                section.codec,
                section.filter,
                section.element_width,
                section.flags,
                section.reserved,
                section.raw_offset,
                length if section.raw_length is None else section.raw_length,
                offset,
                length if section.stored_length is None else section.stored_length,
                checksum,
            )
        )
        pieces += [padding * (start - end), section.data]
        end = start + length
        before = section
    total = align(end, alignment)
    header = PROLOGUE.pack(
        MAGIC,
        *version,
        flags,
        sequence,
        table + 8 if header_length is None else header_length,
        len(sections) if section_count is None else section_count,
        reserved,
        total if frame_length is None else frame_length,
        stream_id,
    ) + b"".join(entries)
    seal_bytes = xxhash.xxh3_64_intdigest(header).to_bytes(8, "little") if seal else bytes(8)
    return header + seal_bytes + b"".join(pieces) + padding * (total - end)


def entries_of(frame: bytes) -> list[dict[str, int]]:
    """The section table of a frame."""
    count = PROLOGUE.unpack_from(frame)[6]
    rows = (ENTRY.unpack_from(frame, PROLOGUE.size + ENTRY.size * i) for i in range(count))
    return [dict(zip(FIELDS, row, strict=True)) for row in rows]


def resealed(frame: bytes) -> bytes:
    """The frame with its header checksum, and those of its sections, made true again."""
    data = bytearray(frame)
    count = PROLOGUE.unpack_from(data)[6]
    for i in range(count):
        at = PROLOGUE.size + ENTRY.size * i
        entry = dict(zip(FIELDS, ENTRY.unpack_from(data, at), strict=True))
        stored = data[entry["offset"] : entry["offset"] + entry["stored_length"]]
        if entry["flags"] & CHECKSUM:
            data[at + 40 : at + 48] = xxhash.xxh3_64_intdigest(bytes(stored)).to_bytes(8, "little")
    return header_resealed(bytes(data))


def header_resealed(frame: bytes) -> bytes:
    """The frame with its header checksum made true again, for the number of sections that it states."""
    end = PROLOGUE.size + ENTRY.size * int(PROLOGUE.unpack_from(frame)[6])
    return frame[:end] + xxhash.xxh3_64_intdigest(frame[:end]).to_bytes(8, "little") + frame[end + 8 :]


def patched(data: bytes, offset: int, value: bytes) -> bytes:
    """The bytes with some of them changed."""
    return data[:offset] + value + data[offset + len(value) :]


def section_of(frame: bytes, kind: int) -> dict[str, int]:
    return next(entry for entry in entries_of(frame) if entry["kind"] == kind)


Change = Callable[[bytes], bytes]


def with_content(frame: bytes, kind: int, change: Change) -> bytes:
    """The frame with a section's content changed, its length kept, and sealed again."""
    entry = section_of(frame, kind)
    start, length = entry["offset"], entry["stored_length"]
    content = change(frame[start : start + length])
    assert len(content) == length
    return resealed(patched(frame, start, content))
