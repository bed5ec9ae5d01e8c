"""How a frame is spread over a server's values: what the key's own value says, where the cuts are, reads over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hurray_wire.arrays import Bytes, as_bytes
from hurray_wire.errors import Code, FrameError, HurrayWireError, TruncatedError
from hurray_wire.frame_reader import Head
from hurray_wire.integrations.redis_wire import Request, receive
from hurray_wire.integrations.sealed import seal, unseal
from hurray_wire.memory import allocated
from hurray_wire.sections import header_bytes
from hurray_wire.tags import SectionKind

KIND, VERSION = "parts", 1
_INLINE_BYTES = 1 << 20
"""What stands behind the pool goes with the record up to here, and is a part of its own above."""


@dataclass(frozen=True)
class Record:
    """The value at a key: a frame's bytes before its pool (`head`), the lengths of the parts that follow, and the bytes
    behind them (`tail`)."""

    generation: str
    lengths: tuple[int, ...]
    head: bytes
    tail: bytes

    def names(self, key: bytes) -> list[bytes]:
        """The parts' keys: in the same slot of a cluster as the key, and no other writing's."""
        tagged = b"{" in key and b"}" in key[key.index(b"{") + 2 :]
        base = key if tagged else b"{%s}" % key
        return [b"%s:%s:%d" % (base, self.generation.encode(), i) for i in range(len(self.lengths))]

    @property
    def nbytes(self) -> int:
        """Bytes of the frame."""
        return len(self.head) + sum(self.lengths) + len(self.tail)

    def sealed(self) -> bytes:
        """The record as the key's value."""
        fields = {"generation": self.generation, "head": len(self.head), "parts": list(self.lengths)}
        return seal(KIND, VERSION, fields, self.head + self.tail)

    @classmethod
    def unsealed(cls, data: bytes) -> Record:
        """The record in a key's value.

        Raises:
            FrameError, UnsupportedError, TruncatedError, ChecksumError: see `unseal`.
        """
        fields, rest = unseal(KIND, VERSION, data, "value")
        generation, head, lengths = fields.string("generation"), fields.count("head"), fields.counts("parts")
        if head > len(rest):
            raise fields.error("head", f"is {head}, the value has {len(rest)} bytes")
        if not generation.isalnum() or not all(lengths):
            raise fields.error("parts", "must be named, and hold something")
        return cls(generation, tuple(lengths), bytes(rest[:head]), bytes(rest[head:]))

    @classmethod
    def old_names(cls, key: bytes, data: bytes | None) -> list[bytes]:
        """The parts that a value names which stands no more; none where it was no record of ours."""
        try:
            return [] if data is None else cls.unsealed(bytes(data)).names(key)
        except HurrayWireError:
            return []


def cuts(head: Head, part_bytes: int) -> list[int]:
    """Where a frame is cut, from 0 to its length: [0, first part, ..., end of the last part, end].

    Between sections wherever they fit, so that a chunk of the pool is read from one value.
    """
    total = head.prologue.frame_length
    rows = head.table.numbers(int(SectionKind.PAGE_POOL))
    first = header_bytes(head.table, total)
    entries = head.table.records[rows.start : rows.stop]
    ends = [entry.offset + entry.stored_length for entry in entries]
    end = ends[-1] if ends else first
    if total - end > _INLINE_BYTES:
        ends, end = [*ends, total], total
    found = [0, first]
    while found[-1] < end:
        most = found[-1] + part_bytes
        index = int(np.searchsorted(ends, most, side="right"))
        found.append(ends[index - 1] if index and ends[index - 1] > found[-1] else min(most, end))
    return [*found, total]


def sliced(pieces: Sequence[Bytes], places: Sequence[int]) -> list[list[Bytes]]:
    """Between each two places the bytes of a frame that lies in pieces, as views of those."""
    found: list[list[Bytes]] = []
    queue, at = list(reversed(pieces)), 0
    for place in places[1:]:
        found.append([])
        while at < place:
            piece = queue.pop()
            taken, rest = piece[: place - at], piece[place - at :]
            found[-1].append(taken)
            at += taken.size
            if rest.size:
                queue.append(rest)
    return found


class PartsSource:
    """A frame's bytes by offset, for `open_frame`: of the record in memory, of the parts from the server."""

    owned = True

    def __init__(self, client: Any, key: bytes, record: Record) -> None:
        self.record = record
        self.nbytes = record.nbytes
        self._client = client
        self._names = record.names(key)
        self._lengths = record.lengths
        self._starts = np.cumsum([len(record.head), *record.lengths], dtype=np.int64)
        self._head, self._tail = as_bytes(record.head), as_bytes(record.tail)

    def read_at(self, offset: int, length: int) -> Bytes:
        """The bytes from `offset` on, fewer at the end."""
        return self.read_ranges([(offset, length)])[0]

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[Bytes]:
        """Several ranges, in one round trip.

        Raises:
            TruncatedError: a part is missing or short: `parts[i]`.
        """
        found = [self._memory(offset, length) for offset, length in ranges]
        wanted = [request for memory, requests in found for request in requests]
        self._receive(wanted)
        return [memory for memory, _ in found]

    def _memory(self, offset: int, length: int) -> tuple[Bytes, list[Request]]:
        """Where a range goes, and what is still to be asked of the server for it."""
        stop = min(offset + length, self.nbytes)
        first, last = int(self._starts[0]), int(self._starts[-1])
        if stop <= first:
            return self._head[offset:stop], []
        if offset >= last:
            return self._tail[offset - last : max(0, stop - last)], []
        # From a multiple of 64 on where the frame has one: what is aligned in the frame is in memory.
        lead = offset % 64
        memory = allocated(lead + stop - offset, None)[lead:]
        if offset < first:
            memory[: first - offset] = self._head[offset:]
        if stop > last:
            memory[last - offset :] = self._tail[: stop - last]
        return memory, self._requests(offset, stop, memory)

    def _requests(self, offset: int, stop: int, memory: Bytes) -> list[Request]:
        requests = []
        begin = max(0, int(np.searchsorted(self._starts, offset, side="right")) - 1)
        for part in range(begin, len(self._names)):
            start, length = int(self._starts[part]), self._lengths[part]
            low, high = max(offset, start), min(stop, start + length)
            if low >= high:
                break
            name, place = self._names[part], memory[low - offset : high - offset]
            whole = high - low == length
            words = ("GET", name) if whole else ("GETRANGE", name, low - start, high - start - 1)
            requests.append(Request(words, place, part))
        return requests

    def _receive(self, requests: Sequence[Request]) -> None:
        for request, length in zip(requests, receive(self._client, requests), strict=True):
            where = f"parts[{request.part}]"
            if length > request.memory.size:
                message = f"has {length} bytes, {request.memory.size} were asked for"
                raise FrameError(message, code=Code.TRAILING_BYTES, where=where)
            if length < request.memory.size:
                name = self._names[request.part]
                message = (
                    f"value {name!r} has {length} of {request.memory.size} bytes: written anew, expired or dropped"
                )
                raise TruncatedError(message, needed=request.memory.size, available=length, where=where)
