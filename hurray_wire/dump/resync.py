"""Where the next item is, behind damage: a magic whose header holds what a header must.

A frame's header checksum settles it. A bare item has none: it counts where its descriptor is sound and it ends with
the file or before another item. So the descriptor inside a damaged frame is not taken for an item.
"""

from __future__ import annotations

from hurray_wire.dump import bare_item, frame_item
from hurray_wire.dump.source import GoneError, Source
from hurray_wire.errors import HurrayWireError
from hurray_wire.forms import PREFIX_BYTES, Form, identify
from hurray_wire.tags import BARE_MAGIC, FRAME_MAGIC

_BLOCK_BYTES = 1 << 20
_OVERLAP = len(FRAME_MAGIC) - 1


def find_item(source: Source, start: int) -> int | None:
    """The offset of the first item from `start` on, or None."""
    at = max(start, source.kept)
    while True:
        block = source.read(at, _BLOCK_BYTES + _OVERLAP)
        for found in _magics(block):
            if found < _BLOCK_BYTES and is_item(source, at + found):
                return at + found
        if len(block) <= _OVERLAP:
            return None
        at += min(_BLOCK_BYTES, len(block))
        source.forget(at)


def _magics(block: bytes) -> list[int]:
    places = []
    for magic in (FRAME_MAGIC, BARE_MAGIC):
        at = block.find(magic)
        while at >= 0:
            places.append(at)
            at = block.find(magic, at + 1)
    return sorted(places)


def is_item(source: Source, offset: int) -> bool:
    """Whether an item whose header is sound begins there."""
    try:
        form = identify(source.read(offset, PREFIX_BYTES), offset)
        if form is Form.HRKV:
            item = frame_item.read_header(source, offset, 0)
            return item.head is not None and item.trusted
        item = bare_item.read_header(source, offset, 0)
        if item.descriptor is None or item.faults or item.end is None:
            return False
        behind = source.read(item.end, PREFIX_BYTES)
        return not behind or bool(identify(behind, item.end))
    except (HurrayWireError, GoneError):
        return False
