"""Bytes taken apart and put together again, for a fuzzer: leniently, so that damaged ones can be mutated too.

A mutated frame is laid out and sealed anew, so that a mutation meets the rules behind the checksums.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import frames
from frames import Section

FRAME_MAGIC, BARE_MAGIC = frames.MAGIC, b"HRRY"
DESCRIPTOR, SEQ_LENS, METADATA, PAGE_POOL, BLOCK_TABLE, SEQ_PTR = 1, 2, 3, 16, 17, 18
HANDLES, HANDLE_BYTES = 85, 16
MOST_SECTIONS = 80


@dataclass
class Frame:
    """One frame: what its prologue says and its sections; a prologue field that is None is as the wire wants it."""

    sections: list[Section]
    prologue: dict[str, Any] = field(default_factory=dict)

    def content(self, kind: int) -> bytes:
        """The stored bytes of the first section of a kind, or none."""
        return next((section.data for section in self.sections if section.kind == kind), b"")

    def built(self) -> bytes:
        """The bytes, laid out by the handles' alignments and sealed."""
        aligned = alignments(self.content(DESCRIPTOR))
        sections = [
            replace(s, alignment=aligned[s.kind - PAGE_POOL]) if 0 <= s.kind - PAGE_POOL < len(aligned) else s
            for s in self.sections
        ]
        filled = {s.kind - PAGE_POOL for s in sections}
        frame = max([64, *(alignment for i, alignment in enumerate(aligned) if i in filled)])
        return frames.build(sections, **{"alignment": frame, **self.prologue})


def alignments(descriptor: bytes) -> list[int]:
    """The handles' alignments as they count in a frame; small ones, lest a fuzzer's frames grow."""
    if len(descriptor) <= HANDLES:
        return []
    count = min(descriptor[HANDLES - 1], (len(descriptor) - HANDLES) // HANDLE_BYTES)
    found = [int.from_bytes(descriptor[HANDLES + 16 * i + 8 : HANDLES + 16 * i + 12], "little") for i in range(count)]
    return [n if n in (1, 2, 4, 8, 16, 32) or (64 <= n <= 4096 and not n & (n - 1)) else 64 for n in found]


def taken_apart(data: bytes) -> Frame | None:
    """A frame's parts, or None where its table does not lie in its bytes."""
    if not data.startswith(FRAME_MAGIC) or len(data) < 48:
        return None
    _, major, minor, flags, sequence, _, count, reserved, _, stream_id = frames.PROLOGUE.unpack_from(data)
    if count > MOST_SECTIONS or 48 + 48 * count > len(data):
        return None
    sections = []
    for entry in frames.entries_of(data):
        start, length = entry.pop("offset"), entry.pop("stored_length")
        entry.pop("checksum")
        stored = data[start : start + length]
        told: dict[str, Any] = {**entry, "raw_length": None if entry["raw_length"] == length else entry["raw_length"]}
        sections.append(Section(data=stored, **told))
    prologue = {"flags": flags, "sequence": sequence, "stream_id": stream_id, "reserved": reserved}
    return Frame(sections, {"version": (major, minor), **prologue})


def sizes(descriptor: bytes) -> list[int]:
    """The byte sizes of a descriptor's handles."""
    if len(descriptor) <= HANDLES:
        return []
    count = min(descriptor[HANDLES - 1], (len(descriptor) - HANDLES) // HANDLE_BYTES)
    return [struct.unpack_from("<Q", descriptor, HANDLES + HANDLE_BYTES * i)[0] for i in range(count)]


@dataclass
class Bare:
    """A bare item: descriptor and buffers."""

    descriptor: bytes
    buffers: list[bytes]
    rest: bytes = b""

    def built(self) -> bytes:
        """The bytes."""
        return self.descriptor + b"".join(self.buffers) + self.rest


def bare_apart(data: bytes) -> Bare | None:
    """A bare item's parts, cut short where the bytes are."""
    if not data.startswith(BARE_MAGIC) or len(data) < 20:
        return None
    length = int.from_bytes(data[6:10], "little")
    descriptor, at = data[:length], length
    buffers = []
    for size in sizes(descriptor):
        buffers.append(data[at : at + size])
        at += size
    return Bare(descriptor, buffers, data[at:])


def as_frame(item: Bare, rng_lens: bytes) -> Frame:
    """The same tensor in a frame; `rng_lens` are its seq_lens as bytes, none for no section."""
    sections = [Section(DESCRIPTOR, item.descriptor)]
    if rng_lens:
        sections.append(Section(SEQ_LENS, rng_lens))
    sections += [Section(PAGE_POOL + i, buffer) for i, buffer in enumerate(item.buffers[:16]) if buffer]
    return Frame(sections)


def as_bare(frame: Frame) -> Bare:
    """The same tensor without its envelope; what is compressed stays so."""
    descriptor = frame.content(DESCRIPTOR)
    count = len(sizes(descriptor))
    joined = [b"".join(s.data for s in frame.sections if s.kind == PAGE_POOL + i) for i in range(count)]
    return Bare(descriptor, joined)


def items(data: bytes) -> Iterator[bytes]:
    """A concatenation cut at the items' own lengths; the last one is what is left."""
    while data:
        length = len(data)
        if data.startswith(FRAME_MAGIC) and len(data) >= 40:
            length = int.from_bytes(data[24:32], "little")
        elif data.startswith(BARE_MAGIC) and len(data) >= 20:
            own = int.from_bytes(data[6:10], "little")
            length = own + sum(sizes(data[:own]))
        length = min(max(length, 1), len(data))
        yield data[:length]
        data = data[length:]
