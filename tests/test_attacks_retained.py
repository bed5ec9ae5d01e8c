"""What a sender leaves behind: nothing that is remembered of one blob grows with how many other ones come."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from attack_child import in_a_fork
from attacks import BARE, FRAME, full_table, told, wide
from frames import METADATA, Section, added, build, section_of, with_content, worked_sections
from stream_helpers import run_child
from support import desc, worked

import hurray_wire as hw


def ranks() -> Iterator[bytes]:
    """Descriptors of another layout, each of another rank: none is like one before."""
    yield from (wide(8000 - n) for n in range(60))


def buffer_counts() -> Iterator[bytes]:
    for flags in range(0, 32, 4):
        for count in range(60, 256, 3):
            head = bytearray(desc(flags=flags))
            head[84] = count
            yield bytes(head) + BARE[133:]


def section_tables() -> Iterator[bytes]:
    """Sound frames of a thousand sections, each laid out otherwise."""
    frame = full_table(1000)
    assert section_of(frame, 16)
    for n in range(300):
        head = desc(shape=(9, 1, 1), sizes=(8 * 996, 12, 12), num_pages=996)
        front = [Section(1, head), Section(2, struct.pack("<2I", 6, 3)), Section(3, b'{"a.b":"' + b"x" * 8 * n + b'"}')]
        pool = [Section(16, bytes(8), raw_offset=8 * i) for i in range(996)]
        yield build([*front, *pool, *worked_sections()[3:]])


def descriptors() -> Iterator[bytes]:
    """Sound tensors, each with a descriptor of its own."""
    for layer in range(3000):
        yield desc(layer_index=layer) + BARE[133:]


def paddings() -> Iterator[bytes]:
    """Schemes with padding behind them, of every length."""
    scheme = struct.pack("<BBHfiI", 1, 1, 0, 0.5, 0, 0)
    for n in range(1, 3000):
        yield desc(type_tag=0x10, sizes=(320, 12, 12), flags=1, quant=scheme + bytes(n)) + bytes(320) + BARE[-24:]


def padded_frames() -> Iterator[bytes]:
    """Sound frames, each of another shape, with a quarter of a megabyte between their tables."""
    pool = np.zeros((1, 1, 1, 1), np.int8)
    for n in range(1, 100):
        tensor = hw.BlockPagedTensor(pool, block_table=[0] * n, seq_ptr=[0, n], seq_lens=[1])
        yield hw.encode(tensor, alignment=256 << 10)


def documents() -> Iterator[bytes]:
    for n in range(40):
        yield told(b'{"a.b":["' + str(n).encode() * 100_000 + b'"]}')


FLOODS: dict[str, Callable[[], Iterator[bytes]]] = {
    flood.__name__: flood
    for flood in (ranks, buffer_counts, section_tables, descriptors, paddings, padded_frames, documents)
}
ROOM = 12 << 20


def flood(name: str) -> None:
    """Run in a child: decode one after another, and say how far the memory grew over what one alone takes."""

    def one() -> None:
        for data in FLOODS[name]():
            try:
                hw.decode(data)
            except hw.HurrayWireError:
                continue

    hw.decode(hw.encode(worked()))
    sys.stdout.write(json.dumps(in_a_fork(one)))


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_leaves_little_behind(name: str) -> None:
    met = json.loads(run_child("test_attacks_retained", "flood", name))
    assert met["answer"] == "ok None"
    assert met["grown"] < ROOM


def test_an_error_does_not_keep_the_input_alive() -> None:
    """A service that logs errors and keeps them keeps words, not gigabytes."""
    data = with_content(FRAME, 16, lambda pool: pool)
    with pytest.raises(hw.HurrayWireError) as caught:
        hw.decode(bytearray(data[:-1]))
    error = caught.value.with_traceback(None)
    assert error.__cause__ is None
    assert not any(isinstance(value, bytes | bytearray | memoryview) for value in vars(error).values())


@pytest.mark.parametrize("name", ["model", "seq_ids", "heads"])
def test_a_message_is_short_whatever_is_sent(name: str) -> None:
    """Values that came with the bytes are shown in short: a log is not a sender's to fill."""
    value = json.dumps({name: [["x" * 500_000]]}).encode()
    with pytest.raises(hw.FrameError) as caught:
        hw.decode(build(added(Section(METADATA, value))))
    assert caught.value.code == "metadata"
    assert 20 < len(str(caught.value)) < 500
    long = build(added(Section(METADATA, json.dumps({"a.b": "y" * 500_000}).encode())))
    with pytest.raises(hw.MismatchError) as mismatch:
        hw.decode(long, expect={"a.b": "z"})
    assert 20 < len(str(mismatch.value)) < 500
    assert mismatch.value.differences[0].found == "y" * 500_000


def test_no_blob_of_a_flood_is_like_another() -> None:
    """The floods are what they say: each blob differs from every other."""
    for name, make in FLOODS.items():
        first = [hash(data) for data, _ in zip(make(), range(20), strict=False)]
        assert len(set(first)) == len(first), name
