"""The index beside a file of many frames: where each one lies, what it is of, and by what it is known again.

A `sealed` record in a file of its own, so that the frames' file stays a plain HRKV stream that every reader reads, and
an index can be made for any such file at any time. It is no part of the HRKV format. Its fields are columns, one value
a frame: name, layer, role, offset, length; head and tail, between which the page pool lies; and header, the frame's own
header checksum, which covers its section table and so, where pools are hashed, all that it holds. A frame that is not
the one that was indexed has another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hurray_wire.frame_reader import Head
from hurray_wire.integrations.sealed import Fields, seal, unseal
from hurray_wire.sections import header_bytes
from hurray_wire.structs.frame import CHECKSUM_PLAN
from hurray_wire.tags import SectionKind

KIND, VERSION = "index", 1
_WHERE = "index"


class Entry(NamedTuple):
    """One frame of a file: what it is of, and where it lies, in bytes; `head` and `tail` count from its first byte."""

    name: str | None
    layer_index: int | None
    kv_role: str
    offset: int
    length: int
    head: int
    tail: int
    header_checksum: int


def entry_of(head: Head, header: bytes, name: str | None, layer_index: int | None, kv_role: str) -> Entry:
    """The entry of a frame from its header, at the offset where the header says it begins."""
    total = head.prologue.frame_length
    rows = head.table.numbers(int(SectionKind.PAGE_POOL))
    first = tail = header_bytes(head.table, total)
    if rows:
        last = head.table.records[rows[-1]]
        tail = last.offset + last.stored_length
    checksum = CHECKSUM_PLAN.unpack(header, head.prologue.header_length - CHECKSUM_PLAN.size).header_checksum
    return Entry(name, layer_index, kv_role, head.base, total, first, tail, checksum)


class Index(Sequence[Entry]):
    """The frames of a file in order, and the bytes of the whole file."""

    def __init__(self, entries: Sequence[Entry], nbytes: int) -> None:
        self._entries = tuple(entries)
        self.nbytes = nbytes

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, at: Any) -> Any:
        return self._entries[at]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def find(self, **wanted: Any) -> Entry:
        """The one frame of this name, layer_index, kv_role: whichever are given.

        Raises:
            KeyError: none, or several.
        """
        found = [entry for entry in self._entries if all(getattr(entry, k) == v for k, v in wanted.items())]
        if len(found) != 1:
            raise KeyError(f"{len(found) or 'no'} frames have {wanted}")
        return found[0]

    def encode(self) -> bytes:
        """The index as its file holds it."""
        columns = {
            "name": [entry.name for entry in self],
            "layer": [entry.layer_index for entry in self],
            "role": [entry.kv_role for entry in self],
            **{field: [getattr(entry, field) for entry in self] for field in ("offset", "length", "head", "tail")},
            "header": [f"{entry.header_checksum:016x}" for entry in self],
        }
        return seal(KIND, VERSION, {"bytes": self.nbytes, **columns})

    @classmethod
    def decode(cls, data: bytes) -> Index:
        """The index in a file's bytes.

        Raises:
            FrameError: `magic`, `metadata` (a field is missing, of another type, or says what cannot be).
            UnsupportedError: `version`. TruncatedError: it ends early. ChecksumError: `header_checksum`.
        """
        fields, rest = unseal(KIND, VERSION, data, _WHERE)
        if rest:
            raise fields.error("bytes", "something follows the fields")
        nbytes = fields.count("bytes")
        places = [fields.counts(field) for field in ("offset", "length", "head", "tail")]
        names, roles = fields.strings("name", (None,)), fields.strings("role")
        columns = [names, _layers(fields), roles, *places, _checksums(fields)]
        if len({len(column) for column in columns}) != 1:
            raise fields.error("name", "must be as many as the other columns have")
        _check_places(fields, nbytes, *places)
        return cls(list(map(Entry, *columns)), nbytes)


def _layers(fields: Fields) -> list[int | None]:
    found = fields.values.get("layer")
    sound = isinstance(found, list) and all(x is None or (type(x) is int and 0 <= x < 0xFFFF_FFFF) for x in found)
    if not sound:
        raise fields.error("layer", "must be layer numbers or null")
    layers: list[int | None] = fields.values["layer"]
    return layers


def _checksums(fields: Fields) -> list[int]:
    found = fields.strings("header")
    if not all(len(text) == 16 and set(text) <= set("0123456789abcdef") for text in found):
        raise fields.error("header", "must be checksums of 16 hexadecimal digits")
    return [int(text, 16) for text in found]


def _check_places(
    fields: Fields, nbytes: int, offset: list[int], length: list[int], head: list[int], tail: list[int]
) -> None:
    """Frames lie behind each other within the file, each with its pool within itself."""
    begin, size, first, last = (np.array(column, np.int64) for column in (offset, length, head, tail))
    room = np.append(begin[1:], nbytes) - begin  # below 2**63 either way: no sum that could overflow
    for name, wrong in (
        ("offset", (size > room) | (size <= 0)),
        ("head", (first > last) | (first <= 0)),
        ("tail", last > size),
    ):
        if wrong.any():
            place = f"{name}[{int(wrong.argmax())}]"
            raise fields.error(place, "lies outside its frame, or its frame outside the file")
