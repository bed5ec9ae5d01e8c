"""An HRKV frame, read as far as it goes: `frame_reader`'s stages one by one, each noting what it finds."""

from __future__ import annotations

import numpy as np

from hurray_wire import frame_reader
from hurray_wire.arrays import as_bytes
from hurray_wire.descriptor import decode_descriptor, in_descriptor
from hurray_wire.dump.model import LIMITS, MOST_TABLE_BYTES, Fault, Item, Stage, State, faults_of
from hurray_wire.dump.source import GoneError, Source
from hurray_wire.errors import ChecksumError, Code, HurrayWireError, InvalidDescriptorError
from hurray_wire.forms import Form
from hurray_wire.frame_reader import Head
from hurray_wire.inspection import parse_sections
from hurray_wire.metadata import decode_metadata, validate_metadata
from hurray_wire.sections import check_frame_length, covered, entry_offset, header_length, read_table
from hurray_wire.structs.descriptor import HEAD_PLAN, parse_descriptor
from hurray_wire.structs.frame import PROLOGUE_PLAN
from hurray_wire.tags import BARE_MAGIC, SectionFlag, SectionKind

_CHECKSUM = int(SectionFlag.CHECKSUM)


def read_header(source: Source, offset: int, index: int) -> Item:
    """Stages 2 and 3: prologue, section table, header checksum; whatever of them is there."""
    item = Item(index, offset, Form.HRKV)
    prefix = source.read(offset, PROLOGUE_PLAN.size)
    item.header = prefix
    item.version = (prefix[8], prefix[9]) if len(prefix) > 9 else (0, 0)
    if len(prefix) == PROLOGUE_PLAN.size:
        item.prologue = PROLOGUE_PLAN.unpack(prefix)
        item.header = source.read(offset, header_length(item.prologue.section_count))
    sound = False
    with item.stage(Stage.LENGTHS):
        prologue = frame_reader.read_prologue(prefix, offset, LIMITS)
        item.total = prologue.frame_length
        sound = True
    if sound:
        if source.size is not None:
            item.note_cut(source.size)
        _read_head(item)
    item.sections = list(parse_sections(item.header))
    item.states = [State.UNREAD if s.flags & _CHECKSUM else State.ABSENT for s in item.sections]
    return item


def _read_head(item: Item) -> None:
    """Stage 3. A wrong header checksum is noted; the table is then held to its rules all the same."""
    whole = header_length(item.prologue.section_count)
    if len(item.header) < whole:
        return
    with item.stage(Stage.HEADER):
        try:
            item.head = frame_reader.read_head(item.header, item.prologue, item.offset)
        except ChecksumError as error:
            item.faults += faults_of(error, Stage.HEADER_CHECKSUM)
            table, checksums = read_table(item.header, item.prologue.frame_length, item.offset)
            item.head = Head(item.prologue, table, checksums, item.offset, item.header)


def read_small(source: Source, item: Item) -> None:
    """Stages 4 to 6: descriptor, seq_lens and metadata, the table held to the descriptor.

    Where the table breaks its own rules, what it says of other bytes is shown and not judged.
    """
    found = {int(kind): _small_bytes(source, item, int(kind)) for kind in _SMALL}
    descriptor, lens, metadata = (found[kind] for kind in _SMALL)
    if item.head is None:
        item.descriptor_bytes = descriptor if descriptor is not None and descriptor.startswith(BARE_MAGIC) else b""
        show_fields(item)
        return
    if descriptor is not None:
        _read_descriptor(item, descriptor)
    _read_cover(item)
    if metadata is not None:
        _read_metadata(item, metadata)
    if lens is not None:
        item.tables[int(SectionKind.SEQ_LENS)] = lens
        item.seq_lens = indices_of(item, lens)


_SMALL = (SectionKind.DESCRIPTOR, SectionKind.SEQ_LENS, SectionKind.METADATA)
_MOST_BYTES = {
    int(SectionKind.DESCRIPTOR): ("descriptor_bytes", LIMITS.descriptor_bytes),
    int(SectionKind.SEQ_LENS): ("decoded_bytes", MOST_TABLE_BYTES),
    int(SectionKind.METADATA): ("metadata_bytes", LIMITS.metadata_bytes),
}


def _small_bytes(source: Source, item: Item, kind: int) -> bytes | None:
    """A small section's bytes, its checksum looked at; None where it is not there, too large, or cut."""
    index = next((i for i, section in enumerate(item.sections) if section.kind == kind), None)
    if index is None:
        return None
    section = item.sections[index]
    code, most = _MOST_BYTES[kind]
    if section.stored_length > most:
        message = f"declares {section.stored_length}, the limit {code} is {most}"
        offset = entry_offset(index, "raw_length", item.offset)
        item.faults.append(Fault(Stage.CHECKSUMS, code, f"sections[{index}].raw_length", offset, message))
        return None
    data = read_section(source, item, index)
    if data is None or (len(data) < section.stored_length and kind != SectionKind.DESCRIPTOR):
        return None
    if kind == SectionKind.DESCRIPTOR:
        item.descriptor_offset = item.offset + section.offset
    return data


def read_section(source: Source, item: Item, index: int) -> bytes | None:
    """A section's stored bytes, checksum verified and noted; None where they cannot be had again."""
    section = item.sections[index]
    try:
        data = source.read(item.offset + section.offset, section.stored_length)
    except GoneError:
        item.states[index] = State.MISSING
        return None
    if len(data) < section.stored_length:
        item.states[index] = State.MISSING
        item.note_cut(source.size or 0)
    elif section.flags & _CHECKSUM and item.head is not None:
        verify(item, index, data)
    return data


def verify(item: Item, index: int, data: bytes, stage: float = Stage.CHECKSUMS) -> bool:
    """Hold a section's bytes to its checksum; whether they are what was sent."""
    assert item.head is not None
    try:
        frame_reader.verify_section(item.head, index, data)
    except ChecksumError as error:
        item.states[index] = State.WRONG
        item.faults += faults_of(error, stage)
        return False
    item.states[index] = State.OK
    return True


def _read_descriptor(item: Item, data: bytes) -> None:
    item.descriptor_bytes = data
    if len(data) < next(s.stored_length for s in item.sections if s.kind == SectionKind.DESCRIPTOR):
        show_fields(item)
        return
    with item.stage(Stage.DESCRIPTOR):
        own = in_descriptor(data, item.descriptor_offset)
        if len(own) != len(data):
            message = f"is {len(own)}, the section holds {len(data)} bytes"
            offset = item.descriptor_offset + 6
            raise InvalidDescriptorError(message, code=Code.DESCRIPTOR_LENGTH, where="descriptor_length", offset=offset)
    parse(item)


def show_fields(item: Item) -> None:
    """The descriptor's fields as they stand, judged by nobody."""
    if len(item.descriptor_bytes) >= HEAD_PLAN.size:
        item.fields = parse_descriptor(item.descriptor_bytes)


def parse(item: Item) -> None:
    """Stage 5: the descriptor's fields as they stand, and its value where it has one."""
    data = item.descriptor_bytes
    show_fields(item)
    if item.fields is None:
        return
    try:
        item.descriptor = decode_descriptor(data, base=item.descriptor_offset)
    except HurrayWireError as error:
        known = {(fault.code, fault.where) for fault in item.faults}
        item.faults += [f for f in faults_of(error, Stage.DESCRIPTOR) if (f.code, f.where) not in known]
        try:  # what a lenient reader tolerates leaves the rest readable
            item.descriptor = decode_descriptor(data, base=item.descriptor_offset, strict=False)
        except HurrayWireError:
            return


def _read_cover(item: Item) -> None:
    """Stage 6: the section table against the descriptor."""
    head, descriptor = item.head, item.descriptor
    if head is None or descriptor is None or head.closing:
        return
    with item.stage(Stage.FIT):
        item.cover = covered(head.table, descriptor.extents, head.base)
        check_frame_length(head.prologue.frame_length, item.cover.end, item.cover.alignment, head.base)
        LIMITS.check("decoded_bytes", sum(descriptor.sizes), "buffers", item.descriptor_offset)


def _read_metadata(item: Item, data: bytes) -> None:
    offset = item.offset + next(s.offset for s in item.sections if s.kind == SectionKind.METADATA)
    with item.stage(Stage.FIT):
        item.metadata = decode_metadata(data, offset)
        if item.descriptor is not None:
            shape, layout = item.descriptor.shape, item.descriptor.layout
            validate_metadata(item.metadata, layout.num_seqs, shape[2], offset=offset)


def indices_of(item: Item, data: bytes) -> np.ndarray[tuple[int], np.dtype[np.unsignedinteger]] | None:
    """A table's bytes as the descriptor's index type, whole entries only; None where the type is not known."""
    front = None if item.fields is None or item.fields.buffers is None else item.fields.front
    width = None if front is None else {0: 4, 1: 8}.get(front.layout_block_table_index_type)
    if width is None:
        return None
    whole = len(data) // width * width
    return as_bytes(data)[:whole].view(f"<u{width}")
