"""The rest of an item in the order of its bytes: tables taken, payload verified or skipped, padding looked at.

One pass forward, so a pipe serves as well as a file, and piece by piece, so memory does not follow the pool's size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import xxhash

from hurray_wire import frame_reader
from hurray_wire.arrays import Bytes, as_bytes
from hurray_wire.dump.frame_item import indices_of, read_section, verify
from hurray_wire.dump.model import (
    BLOCK_TABLE,
    MOST_TABLE_BYTES,
    SEQ_PTR,
    Fault,
    Item,
    Stage,
    State,
    faults_of,
)
from hurray_wire.dump.source import GoneError, Source
from hurray_wire.dump.words import size
from hurray_wire.errors import HurrayWireError
from hurray_wire.forms import Form
from hurray_wire.inspection import Section
from hurray_wire.sections import BUFFERS
from hurray_wire.tags import MAX_FRAME_ALIGNMENT, Codec, SectionFlag, SectionKind

PIECE_BYTES = 1 << 20
MOST_CHUNK_BYTES = 256 << 20
"""A compressed chunk that is greater is not decompressed: it would have to be held whole."""
_CHECKSUM = int(SectionFlag.CHECKSUM)


class Budget:
    """Payload bytes that are verified without being asked for; None for all."""

    def __init__(self, left: int | None) -> None:
        self.left = left

    def take(self, count: int) -> bool:
        """Whether so many bytes are still within it."""
        if self.left is None:
            return True
        fits = count <= self.left
        self.left = self.left - count if fits else 0
        return fits


class _Piece(NamedTuple):
    start: int
    stop: int
    section: int | None


class Walk:
    """One item's way through its sections, gaps and padding."""

    def __init__(self, source: Source, item: Item, budget: Budget, progress: Callable[[int], None]) -> None:
        self.source = source
        self.item = item
        self.progress = progress
        self._parts: dict[int, list[tuple[int, Bytes]]] = {}
        self.verifying = self._verifies(budget)

    def _verifies(self, budget: Budget) -> bool:
        """Whether this item's payload is read; a bare item's only for those who want its bytes.

        Sections that overlap are not read, lest a small file keep a reader busy for ever.
        """
        item = self.item
        if item.form is Form.BARE:
            return bool(item.consumers)
        overlap = item.head is None or sum(s.stored_length for s in item.sections) > (item.total or 0)
        return not overlap and (bool(item.consumers) or budget.take(item.payload_bytes))

    def run(self) -> None:
        """Through all pieces; what the walk learns stands in the item."""
        item = self.item
        for piece in self._pieces():
            if piece.section is None:
                self._padding(piece)
            else:
                self._section(piece.section)
        if item.payload_bytes and item.form is Form.HRKV:
            item.verified = self.verifying
        for kind in (BLOCK_TABLE, SEQ_PTR):
            self._table(kind)

    def _pieces(self) -> list[_Piece]:
        """In the order of their bytes; none where a table is not to be believed at all."""
        item = self.item
        if item.form is Form.HRKV and item.head is None:
            return []
        pieces = [
            _Piece(s.offset, s.offset + s.stored_length, i)
            for i, s in enumerate(item.sections)
            if s.kind > SectionKind.METADATA
        ]
        if item.cover is not None:
            end = item.cover.end
            pieces += [_Piece(start, stop, None) for start, stop in (*item.cover.gaps, (end, item.total or end))]
        elif item.closing:
            pieces.append(_Piece(len(item.header), item.total or 0, None))
        return sorted(pieces, key=lambda piece: piece[:2])

    def _padding(self, piece: _Piece) -> None:
        """Look at a gap; of one that is wider than any lawful one, at its beginning."""
        item, length = self.item, min(piece.stop - piece.start, MAX_FRAME_ALIGNMENT)
        try:
            data = self.source.read(item.offset + piece.start, length)
        except GoneError:
            return
        if len(data) < length:
            item.note_cut(self.source.size or 0)
        with item.stage(Stage.PADDING):
            if not any(fault.stage == Stage.PADDING for fault in item.faults):
                frame_reader.check_padding(as_bytes(data), item.offset + piece.start)

    def _section(self, index: int) -> None:
        section = self.item.sections[index]
        start = self.item.offset + section.offset
        if section.kind in (BLOCK_TABLE, SEQ_PTR):
            self._take_table(index)
        elif not self.verifying:
            self._skip(index)
        elif section.codec == Codec.RAW or section.kind not in BUFFERS:
            self._stream(index, feed=section.kind in BUFFERS)
        else:
            self._chunk(index)
        self.source.forget(start + section.stored_length)
        self.progress(start + section.stored_length)

    def _skip(self, index: int) -> None:
        """Pass over a payload section; whether it is there at all is known without reading it."""
        section = self.item.sections[index]
        stop = self.item.offset + section.offset + section.stored_length
        self.source.forget(stop)
        if self.source.size is not None and self.source.size < stop:
            self._missing(index)

    def _missing(self, index: int, got: int = 0) -> None:
        section = self.item.sections[index]
        self.item.states[index] = State.MISSING
        self.item.note_cut(self.source.size or 0)
        for consumer in self.item.consumers:
            consumer.lost(section.kind, section.raw_offset + got, section.raw_length - got)

    def _stream(self, index: int, *, feed: bool) -> None:
        """A raw section, or one that nobody knows, hashed and handed on piece by piece."""
        item, section = self.item, self.item.sections[index]
        digest, at = xxhash.xxh3_64(), 0
        start = item.offset + section.offset
        while at < section.stored_length:
            try:
                piece = self.source.read(start + at, min(PIECE_BYTES, section.stored_length - at))
            except GoneError:
                piece = b""
            if not piece:
                self._missing(index, at)
                return
            digest.update(piece)
            for consumer in item.consumers if feed else ():
                consumer.feed(section.kind, section.raw_offset + at, as_bytes(piece))
            at += len(piece)
            self.source.forget(start + at)
            self.progress(start + at)
        self._compare(index, digest.intdigest())

    def _compare(self, index: int, found: int) -> None:
        item, section = self.item, self.item.sections[index]
        if not section.flags & _CHECKSUM:
            return
        item.states[index] = State.OK
        if found != section.checksum:
            item.states[index] = State.WRONG
            message = f"{section.name}: bytes have {found:#018x}, the frame states {section.checksum:#018x}"
            place = item.offset + section.offset
            item.faults.append(Fault(Stage.PAYLOAD, "section_checksum", f"sections[{index}]", place, message))

    def _chunk(self, index: int) -> None:
        """A compressed chunk of the payload: verified, decompressed, handed on."""
        item, section = self.item, self.item.sections[index]
        if max(section.raw_length, section.stored_length) > MOST_CHUNK_BYTES:
            self._stream(index, feed=False)
            self._lost(index)
            item.notes.append(f"sections[{index}]: a chunk of {size(section.raw_length)} is not decompressed")
            return
        data = self._stored(index)
        if data is None:
            return
        raw = self._decoded(index, data, Stage.CODEC)
        if raw is None:
            self._lost(index)
            return
        for consumer in item.consumers:
            consumer.feed(section.kind, section.raw_offset, raw)

    def _stored(self, index: int) -> bytes | None:
        """The stored bytes of a payload chunk where they are there and right."""
        section = self.item.sections[index]
        try:
            data = self.source.read(self.item.offset + section.offset, section.stored_length)
        except GoneError:
            data = b""
        if len(data) < section.stored_length:
            self._missing(index)
            return None
        if section.flags & _CHECKSUM and not verify(self.item, index, data, Stage.PAYLOAD):
            self._lost(index)
            return None
        return data

    def _lost(self, index: int) -> None:
        section = self.item.sections[index]
        for consumer in self.item.consumers:
            consumer.lost(section.kind, section.raw_offset, section.raw_length)

    def _decoded(self, index: int, data: bytes, stage: float) -> Bytes | None:
        item, section = self.item, self.item.sections[index]
        assert item.head is not None
        out = np.empty(section.raw_length, np.uint8)
        try:
            frame_reader.decode_chunk(item.head, index, as_bytes(data), out)
        except HurrayWireError as error:
            item.states[index] = State.DAMAGED
            item.faults += faults_of(error, stage)
            return None
        return out

    def _take_table(self, index: int) -> None:
        """A section of block_table or seq_ptr, held until all of the table is there."""
        item, section = self.item, self.item.sections[index]
        whole = sum(s.raw_length for s in item.sections if s.kind == section.kind)
        if max(whole, section.stored_length) > MOST_TABLE_BYTES:
            self._too_large(section, whole)
            return
        data = read_section(self.source, item, index)
        if not data:
            return
        raw: Bytes | None = as_bytes(data)
        if section.codec != Codec.RAW:
            right = item.states[index] is State.OK
            raw = self._decoded(index, data, Stage.TABLE_CODEC) if right else None
        if raw is not None:
            self._parts.setdefault(section.kind, []).append((section.raw_offset, raw))

    def _too_large(self, section: Section, whole: int) -> None:
        where = f"buffers[{section.kind - BUFFERS.start}].byte_size"
        if any(fault.where == where and fault.code == "decoded_bytes" for fault in self.item.faults):
            return
        message = f"declares {whole}, hurray-dump holds tables of up to {MOST_TABLE_BYTES} bytes"
        self.item.faults.append(Fault(Stage.TABLE_CODEC, "decoded_bytes", where, None, message))

    def _table(self, kind: int) -> None:
        """The whole table, or what is there of it; nothing where none of it could be read."""
        item, parts = self.item, self._parts.get(kind, [])
        if not parts and any(section.kind == kind for section in item.sections):
            return
        data = b"".join(raw.tobytes() for _, raw in sorted(parts, key=lambda part: part[0]))
        item.tables[kind] = data
        if kind == BLOCK_TABLE:
            item.block_table = indices_of(item, data)
        else:
            found = indices_of(item, data)
            seqs = item.fields.front.layout_num_seqs if found is not None and item.fields is not None else 0
            item.seq_ptr = None if found is None else found[: seqs + 1]  # a buffer may be larger than it needs
