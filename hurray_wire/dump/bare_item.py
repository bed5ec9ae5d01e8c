"""A bare item, read as far as it goes: its descriptor, then where its buffers should lie."""

from __future__ import annotations

from hurray_wire.descriptor import stated_length
from hurray_wire.dump.frame_item import parse, show_fields
from hurray_wire.dump.model import LIMITS, Item, Stage, State
from hurray_wire.dump.source import Source
from hurray_wire.errors import Code, TruncatedError
from hurray_wire.forms import Form
from hurray_wire.inspection import Section, section_name
from hurray_wire.sections import BUFFERS
from hurray_wire.structs.descriptor import HEAD_PLAN
from hurray_wire.tags import Codec, Filter

_LENGTH_OFFSET = 6


def read_header(source: Source, offset: int, index: int) -> Item:
    """Stages 2 and 5: the descriptor, and what follows from it for the buffers."""
    item = Item(index, offset, Form.BARE, descriptor_offset=offset)
    head = source.read(offset, HEAD_PLAN.size)
    item.descriptor_bytes = head
    item.version = (head[4], head[5]) if len(head) > 5 else (0, 0)
    length = 0
    with item.stage(Stage.LENGTHS):
        length = stated_length(memoryview(head), offset)
        LIMITS.check("descriptor_bytes", length, "descriptor_length", offset + _LENGTH_OFFSET)
        item.descriptor_bytes = source.read(offset, length)
        if len(item.descriptor_bytes) < length:
            available = len(item.descriptor_bytes)
            at = offset + available
            raise TruncatedError(needed=length, available=available, where="descriptor_length", offset=at)
    item.cut = any(fault.code == Code.TRUNCATED for fault in item.faults)
    if item.faults:
        show_fields(item)
    else:
        parse(item)
    _lay_out(source, item, length)
    return item


def _lay_out(source: Source, item: Item, length: int) -> None:
    """Sections for the buffers as a frame would have them, and the item's end."""
    fields = item.fields
    if fields is None or fields.buffers is None or fields.cut or item.cut or not length:
        return
    at = length
    for i, handle in enumerate(fields.buffers):
        if handle.byte_size and BUFFERS.start + i in BUFFERS:
            item.sections.append(_section(BUFFERS.start + i, at, handle.byte_size))
        at += handle.byte_size
    item.states = [State.ABSENT] * len(item.sections)
    item.total = at
    _check_sizes(source, item)


def _section(kind: int, offset: int, length: int) -> Section:
    return Section(
        section_name(kind), kind, int(Codec.RAW), int(Filter.NONE), 0, 0, 0, length, offset, length, checksum=0
    )


def _check_sizes(source: Source, item: Item) -> None:
    """Stage 6: within limits, and all there as far as the source can say already."""
    assert item.total is not None
    with item.stage(Stage.FIT):
        LIMITS.check("frame_bytes", item.total, "buffers", item.offset)
        if source.size is not None:
            item.note_cut(source.size)
