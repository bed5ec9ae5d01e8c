"""Where the next item is, behind damage: a magic whose header holds what a header must.

A frame's header checksum settles it. A bare item has none: it counts where its descriptor is sound and it ends with
the file or before another item. So the descriptor inside a damaged frame is not taken for an item.

A file may be full of what begins like an item. Large headers are looked at while they are few: those of a real stream
lie apart, and are together no longer than the file.
"""

from __future__ import annotations

from collections.abc import Iterator

from hurray_wire import frame_reader
from hurray_wire.descriptor import stated_length
from hurray_wire.dump import bare_item
from hurray_wire.dump.model import LIMITS
from hurray_wire.dump.source import GoneError, Source
from hurray_wire.errors import HurrayWireError
from hurray_wire.forms import PREFIX_BYTES, Form, identify
from hurray_wire.structs.descriptor import HEAD_PLAN
from hurray_wire.structs.frame import PROLOGUE_PLAN
from hurray_wire.tags import BARE_MAGIC, FRAME_MAGIC

_FIRST_BLOCK_BYTES, _BLOCK_BYTES = 4 << 10, 1 << 20
_OVERLAP = len(FRAME_MAGIC) - 1
_SMALL_HEADER = 4 << 10
"""Bytes of a header that is always looked at."""
_FREE_BYTES = 16 << 20
"""Bytes of larger headers that are looked at, besides twice those of the file so far."""


class Finder:
    """The search through one file, from damage to damage."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._looked = 0

    def find(self, start: int) -> int | None:
        """The offset of the first item from `start` on, or None."""
        source, length = self._source, _FIRST_BLOCK_BYTES
        at = max(start, source.kept)
        while True:
            block = source.read(at, length + _OVERLAP)
            for found in _magics(block):
                if found < length and self._is_item(at + found):
                    return at + found
            if len(block) <= _OVERLAP:
                return None
            at += min(length, len(block))
            source.forget(at)
            length = min(2 * length, _BLOCK_BYTES)

    def _is_item(self, offset: int) -> bool:
        """Whether an item whose header is sound begins there."""
        try:
            form = identify(self._source.read(offset, PREFIX_BYTES), offset)
            return self._is_frame(offset) if form is Form.HRKV else self._is_bare(offset)
        except (HurrayWireError, GoneError):
            return False

    def _may_look(self, offset: int, size: int) -> bool:
        """Whether a header of so many bytes is worth looking at."""
        if size <= _SMALL_HEADER:
            return True
        if self._looked + size > _FREE_BYTES + 2 * offset:
            return False
        self._looked += size
        return True

    def _is_frame(self, offset: int) -> bool:
        prologue = frame_reader.read_prologue(self._source.read(offset, PROLOGUE_PLAN.size), offset, LIMITS)
        if not self._may_look(offset, prologue.header_length):
            return False
        header = self._source.read(offset, prologue.header_length)
        if len(header) < prologue.header_length:
            return False
        frame_reader.read_head(header, prologue, offset)
        return True

    def _is_bare(self, offset: int) -> bool:
        length = stated_length(memoryview(self._source.read(offset, HEAD_PLAN.size)), offset)
        if not self._may_look(offset, length):
            return False
        item = bare_item.read_header(self._source, offset, 0)
        if item.descriptor is None or item.faults or item.end is None:
            return False
        behind = self._source.read(item.end, PREFIX_BYTES)
        return not behind or bool(identify(behind, item.end))


def _magics(block: bytes) -> Iterator[int]:
    """Where a magic stands, one after the other, each looked for when it is asked for."""
    places = {magic: block.find(magic) for magic in (FRAME_MAGIC, BARE_MAGIC)}
    while found := [(place, magic) for magic, place in places.items() if place >= 0]:
        place, magic = min(found)
        yield place
        places[magic] = block.find(magic, place + 1)
