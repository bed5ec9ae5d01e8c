"""Attacks on `hurray-dump --resync`: files full of what begins like an item cost in proportion to their bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from attacks import BARE, FRAME, full_table
from frames import MAGIC, PROLOGUE, header_resealed, patched

from hurray_wire.dump.model import Item
from hurray_wire.dump.resync import Finder
from hurray_wire.dump.scan import Scan, Stop


class Counted:
    """Bytes in memory, and how many of them were asked for."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.given = 0

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def kept(self) -> int:
        return 0

    def read(self, offset: int, length: int) -> bytes:
        found = self.data[offset : offset + length]
        self.given += len(found)
        return found

    def forget(self, offset: int) -> None:
        """All is kept."""


def huge_headers() -> bytes:
    """A prologue that announces 65,535 sections."""
    return PROLOGUE.pack(MAGIC, 1, 0, 1, 0, 48 + 48 * 65535, 65535, 0, 1 << 40, 0)


def middling_headers() -> bytes:
    return PROLOGUE.pack(MAGIC, 1, 0, 1, 0, 48 + 48 * 100, 100, 0, 1 << 40, 0)


def long_descriptors() -> bytes:
    return b"HRRY\1\0" + struct.pack("<I", 65535) + bytes(10)


def magics() -> bytes:
    return MAGIC


def cut_frames() -> bytes:
    """A sound header of a frame whose payload is not there."""
    return header_resealed(patched(FRAME, 24, (1 << 40).to_bytes(8, "little")))[:288]


FULL: dict[str, Callable[[], bytes]] = {
    make.__name__: make for make in (huge_headers, middling_headers, long_descriptors, magics, cut_frames)
}


@pytest.mark.parametrize("name", FULL)
def test_what_is_read_is_in_proportion_to_the_file(name: str) -> None:
    """Attack 69: twice the file, about twice the bytes looked at, and no more than 200 for each."""
    piece, given = FULL[name](), []
    for size in (1 << 17, 1 << 18):
        source = Counted((piece * (size // len(piece) + 1))[:size])
        stops = sum(isinstance(event, Stop) for event in Scan(source, resync=True).events())
        assert stops
        given.append(source.given)
        assert source.given < 200 * size
    assert given[1] < 2.6 * given[0]


def test_an_item_behind_what_looks_like_many_is_found() -> None:
    """A real frame, a bare item, and a frame of a thousand sections, behind a hundred false headers each."""
    large = full_table(1000)
    for item in (FRAME, BARE, large):
        for piece in (magics(), long_descriptors(), middling_headers()):
            front = piece * 100
            assert Finder(Counted(front + item)).find(1) == len(front)
    data = FRAME[:600] + FRAME + large[:100] + large
    items = [event for event in Scan(Counted(data), resync=True).events() if isinstance(event, Item)]
    assert [item.offset for item in items if not item.faults] == [600, 600 + len(FRAME) + 100]
