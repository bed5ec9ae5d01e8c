"""Any stretch of a decoded buffer, read where it lies: raw bytes at once, compressed chunks one at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict

import numpy as np

from hurray_wire import frame_reader
from hurray_wire.arrays import Bytes, as_bytes
from hurray_wire.dump.model import Item
from hurray_wire.dump.payload_walk import MOST_CHUNK_BYTES
from hurray_wire.dump.source import Source
from hurray_wire.errors import Code, LimitError, TruncatedError
from hurray_wire.tags import Codec

_CHUNKS_KEPT = 8


class BufferReader:
    """Reads buffer `kind` of an item whose sections keep the rules, from a source that can be read again."""

    def __init__(self, source: Source, item: Item, kind: int) -> None:
        self._source = source
        self._item = item
        self._sections = [i for i, section in enumerate(item.sections) if section.kind == kind]
        self._starts = [item.sections[i].raw_offset for i in self._sections]
        self._chunks: OrderedDict[int, Bytes] = OrderedDict()

    def read(self, start: int, stop: int) -> Bytes:
        """The buffer's bytes from `start` to `stop`.

        Raises:
            TruncatedError, FrameError, LimitError: they are not there, damaged, or in too large a chunk.
        """
        pieces = []
        while start < stop:
            index = self._sections[bisect_right(self._starts, start) - 1]
            section = self._item.sections[index]
            end = min(stop, section.raw_offset + section.raw_length)
            pieces.append(self._piece(index, start - section.raw_offset, end - section.raw_offset))
            start = end
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.zeros(0, np.uint8), *pieces])

    def _piece(self, index: int, start: int, stop: int) -> Bytes:
        section = self._item.sections[index]
        if section.codec == Codec.RAW:
            return self._stored(index, start, stop - start)
        if index not in self._chunks:
            if section.raw_length > MOST_CHUNK_BYTES:
                where = f"sections[{index}].raw_length"
                raise LimitError(
                    claimed=section.raw_length, limit=MOST_CHUNK_BYTES, code=Code.DECODED_BYTES, where=where
                )
            self._chunks[index] = self._decoded(index)
            if len(self._chunks) > _CHUNKS_KEPT:
                self._chunks.popitem(last=False)
        self._chunks.move_to_end(index)
        return self._chunks[index][start:stop]

    def _stored(self, index: int, start: int, length: int) -> Bytes:
        offset = self._item.offset + self._item.sections[index].offset + start
        data = self._source.read(offset, length)
        if len(data) < length:
            where = f"sections[{index}]"
            raise TruncatedError(needed=length, available=len(data), where=where, offset=offset + len(data))
        return as_bytes(data)

    def _decoded(self, index: int) -> Bytes:
        section = self._item.sections[index]
        assert self._item.head is not None
        out = np.empty(section.raw_length, np.uint8)
        stored = self._stored(index, 0, section.stored_length)
        frame_reader.verify_section(self._item.head, index, stored)
        frame_reader.decode_chunk(self._item.head, index, stored, out)
        return out
