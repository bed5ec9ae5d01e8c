"""What is known of an item of a file so far: filled in stage by stage, with every fault found on the way.

An item is one frame or one bare tensor. Readers stop at the first fault; here each stage notes its own and the next
one goes on with what there is, so that everything readable is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from hurray_wire.descriptor import TensorDescriptor
from hurray_wire.errors import HurrayWireError, InvalidDescriptorError, TruncatedError
from hurray_wire.forms import Form
from hurray_wire.frame_reader import Head
from hurray_wire.indices import IntArray
from hurray_wire.inspection import Section, Span, frame_spans
from hurray_wire.options import Limits
from hurray_wire.sections import BUFFERS, Cover
from hurray_wire.structs.descriptor import Fields, descriptor_spans
from hurray_wire.tags import SectionKind

LIMITS = Limits(metadata_bytes=16 << 20, frame_bytes=1 << 62, decoded_bytes=1 << 62)
"""Payloads are never held, so they may be of any size; what is held stays bounded."""
MOST_TABLE_BYTES = 64 << 20
"""A greater block_table, seq_ptr or seq_lens is not read: sixteen million pages of one layer."""

POOL, BLOCK_TABLE, SEQ_PTR = int(SectionKind.PAGE_POOL), int(SectionKind.BLOCK_TABLE), int(SectionKind.SEQ_PTR)


class Stage:
    """The stages of section 3, as keys to sort faults by: the first one is what `decode` would raise, but for one."""

    FIRST_BYTES, LENGTHS, HEADER, ORDER, CHECKSUMS, DESCRIPTOR, FIT = 1.0, 2.0, 3.0, 3.5, 4.0, 5.0, 6.0
    HEADER_CHECKSUM = 1.5
    """Before the lengths, which it vouches for: a frame that seems cut may be one whose length was damaged."""
    PAYLOAD, PADDING, CODEC, TABLE_CODEC, TABLES = 8.0, 8.1, 8.2, 8.3, 9.0


class Fault(NamedTuple):
    """One thing that is wrong, and where."""

    stage: float
    code: str
    where: str
    offset: int | None
    message: str


def faults_of(error: HurrayWireError, stage: float) -> list[Fault]:
    """An exception as faults, one for each violation that it carries."""
    if isinstance(error, InvalidDescriptorError):
        return [Fault(stage, str(v.code), v.where, v.offset, v.message) for v in error.violations]
    return [Fault(stage, str(error.code), error.where, error.offset, error.message)]


class State(StrEnum):
    """What is known of a section's bytes."""

    OK = "ok"
    WRONG = "WRONG"
    DAMAGED = "DAMAGED"
    MISSING = "MISSING"
    ABSENT = "none"
    """It carries no checksum."""
    UNREAD = "not verified"


BAD_STATES = (State.WRONG, State.DAMAGED, State.MISSING)


class Consumer(Protocol):
    """Somebody who wants a payload's decoded bytes, in order, piece by piece."""

    def feed(self, kind: int, raw_offset: int, data: Any) -> None:
        """Bytes of buffer `kind` from `raw_offset` on."""

    def lost(self, kind: int, raw_offset: int, length: int) -> None:
        """Bytes that are damaged or missing."""

    def finish(self, item: Any) -> None:
        """The item is through."""


@dataclass(slots=True)
class Item:
    """One frame or bare tensor. What could not be read is None, or empty."""

    index: int
    offset: int
    form: Form
    version: tuple[int, int] = (0, 0)
    prologue: Any = None
    header: bytes = b""
    head: Head | None = None
    sections: list[Section] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    descriptor_bytes: bytes = b""
    descriptor_offset: int = 0
    fields: Fields | None = None
    descriptor: TensorDescriptor | None = None
    cover: Cover | None = None
    metadata: dict[str, Any] | None = None
    seq_lens: IntArray | None = None
    tables: dict[int, bytes] = field(default_factory=dict)
    """Bytes of seq_lens, block_table and seq_ptr by their kind, decoded, as far as they are there."""
    block_table: IntArray | None = None
    seq_ptr: IntArray | None = None
    tables_sound: bool = False
    total: int | None = None
    cut: bool = False
    there: int = 0
    """Bytes of it that are there, as far as it is known: all of them unless it is cut."""
    verified: bool | None = None
    """Whether the payload was read and held to its checksums; None where it has no bytes."""
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a person should know that is no fault."""
    consumers: list[Consumer] = field(default_factory=list)

    @contextmanager
    def stage(self, stage: float) -> Iterator[None]:
        """Note what the stage raises, and go on."""
        try:
            yield
        except HurrayWireError as error:
            self.faults += faults_of(error, stage)

    def note_cut(self, size: int) -> None:
        """Note once that the source ends, at `size`, inside the item, as `decode` would."""
        if self.cut or self.total is None or size >= self.offset + self.total:
            return
        self.cut = True
        self.there = available = max(size - self.offset, 0)
        where, stage = "frame_length", Stage.LENGTHS
        if self.form is Form.BARE:
            ends = ((s.kind - BUFFERS.start, s.offset + s.stored_length) for s in self.sections)
            where = f"buffers[{next((i for i, end in ends if available < end), 0)}].byte_size"
            stage = Stage.FIT
        error = TruncatedError(needed=self.total, available=available, where=where, offset=size)
        self.faults += faults_of(error, stage)

    @property
    def end(self) -> int | None:
        """Where the next item should begin, as far as the lengths can be believed."""
        return None if self.total is None else self.offset + self.total

    @property
    def closing(self) -> bool:
        """Ends a stream and holds no tensor."""
        return self.head is not None and self.head.closing

    @property
    def last(self) -> bool:
        """No frame of its stream follows."""
        return self.head is not None and self.head.last

    @property
    def trusted(self) -> bool:
        """Whether lengths were confirmed: by the header checksum, or by a sound descriptor."""
        stages = {fault.stage for fault in self.faults}
        doubtful = (
            {Stage.HEADER, Stage.HEADER_CHECKSUM} if self.form is Form.HRKV else {Stage.LENGTHS, Stage.DESCRIPTOR}
        )
        return not stages & doubtful

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload after decoding, as the sections state them."""
        return sum(s.raw_length for s in self.sections if is_payload(s.kind))

    @property
    def spans(self) -> list[Span]:
        """Every field of header and descriptor, as far as they are there."""
        spans = frame_spans(self.header, self.offset) if self.form is Form.HRKV else []
        return spans + descriptor_spans(self.descriptor_bytes, self.descriptor_offset)


def is_payload(kind: int) -> bool:
    """Whether a section may go unverified: page pool, scales, zero points, and what a later version adds."""
    return kind > SectionKind.METADATA and kind not in (BLOCK_TABLE, SEQ_PTR)
