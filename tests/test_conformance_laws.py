"""Laws over the corpus: prefixes, single-byte changes, re-encoding, delivery in pieces.

A part of the single-byte changes is looked at in every run; HURRAY_WIRE_FULL=1 looks at all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from support import same_item
from test_conformance import CASES

import hurray_wire as hw
from hurray_wire.testing import tensors

import refdecode  # isort: skip - a tool, found by the path that `support` sets

FULL = bool(os.environ.get("HURRAY_WIRE_FULL"))
ACCEPTED = [name for name, case in CASES.items() if case.verdict == "accept" and not case.options]
BARE = [name for name in ACCEPTED if CASES[name].form == "bare"]
STREAMS = [name for name, case in CASES.items() if case.verdict == "accept" and case.is_stream]


# Prefixes.


def lengths_of(data: bytes) -> list[int]:
    """Every length of a small blob; of a large one the header's, some of the rest, the last ones."""
    if len(data) <= 1500:
        return list(range(len(data)))
    step = max(97, len(data) // 200)
    return [*range(700), *range(700, len(data), step), *range(len(data) - 70, len(data))]


@pytest.mark.parametrize("name", ACCEPTED)
def test_every_prefix_is_truncated(name: str) -> None:
    data = CASES[name].data()
    for length in lengths_of(data):
        with pytest.raises(hw.TruncatedError) as caught:
            hw.decode(data[:length])
        error = caught.value
        assert (error.code, error.offset, error.available) == ("truncated", length, length)
        assert length < error.needed <= len(data)


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_independent_decoder_says_so_too(name: str) -> None:
    data = CASES[name].data()
    for length in lengths_of(data)[:: 1 if FULL else 9]:
        with pytest.raises(refdecode.Refused) as caught:
            refdecode.decode(data[:length])
        refused = caught.value
        assert (refused.error_class, refused.code, refused.offset) == ("TruncatedError", "truncated", length)


@pytest.mark.parametrize("name", [name for name in STREAMS if CASES[name].form == "hrkv"])
def test_every_prefix_of_a_framed_stream_is_truncated(name: str) -> None:
    data = CASES[name].data()
    ends = {0, *stream_ends(data)}
    for length in lengths_of(data):
        if length in ends and length:
            continue  # a whole stream, with another behind it
        decoder = hw.FrameDecoder(streams="all")
        decoder.feed(data[:length])
        with pytest.raises(hw.TruncatedError):
            decoder.close()


def stream_ends(data: bytes) -> Iterator[int]:
    """Where a stream within a concatenation ends with its LAST."""
    at = 0
    while at < len(data):
        found = hw.inspect(data, at)
        at += found.total_bytes
        if found.last is not False:
            yield at


# Encoding again.


@pytest.mark.parametrize("name", BARE)
def test_bare_items_come_back_byte_for_byte(name: str) -> None:
    case = CASES[name]
    data = case.data()
    again = hw.encode(hw.decode(data), framing="bare")
    assert (again == data) is case.canonical
    assert hw.encode(hw.decode(again), framing="bare") == again
    reasons = {"descriptor-trailing-bytes", "dirty-tail", "statistics-left-out"}
    assert case.canonical or case.covers & reasons


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_decoded_is_the_same_in_the_other_form(name: str) -> None:
    tensor = hw.decode(CASES[name].data())
    if name == "frame-metadata-every-name":  # a name of a later version is read, and not written
        with pytest.raises(hw.FrameError, match=r"metadata\.later"):
            hw.encode(tensor)
        tensor = tensor.replace(metadata=None)
    several: tuple[Any, ...] = ({}, {"compression": "zstd"}, {"checksum": False}, {"alignment": 128})
    for options in several:
        assert hw.decode(hw.encode(tensor, **options)) == tensor


@settings(max_examples=150)
@given(tensor=tensors())
def test_drawn_tensors_come_back(tensor: hw.BlockPagedTensor) -> None:
    found = hw.decode(hw.encode(tensor))
    assert found == tensor
    lens = found.seq_lens
    assert lens is not None or tensor.seq_lens is None


@settings(max_examples=150)
@given(tensor=tensors(with_metadata=False))
def test_drawn_tensors_are_read_by_the_independent_decoder(tensor: hw.BlockPagedTensor) -> None:
    several: tuple[Any, ...] = ({}, {"framing": "bare"}, {"compression": "zstd"})
    for options in several:
        blob = hw.encode(tensor, **options)
        assert same_item(hw.decode(blob), refdecode.decode(blob))


# Single-byte changes.


def values_at(name: str, at: int, byte: int) -> list[int]:
    """The values that a byte is changed to: all others, or a few that differ from place to place and case to case."""
    if FULL:
        return [value for value in range(256) if value != byte]
    drawn = (at * 37 + len(name) * 101 + byte) & 0xFF
    return [value for value in dict.fromkeys((byte ^ 1, byte ^ 0x80, drawn)) if value != byte]


def places_of(data: bytes) -> Iterator[int]:
    """Every byte, or the descriptor's, and of the buffers' some, the last 24 all."""
    head = int.from_bytes(data[6:10], "little")
    yield from range(head)
    yield from (
        range(head, len(data)) if FULL else [*range(head, len(data), 23), *range(max(head, len(data) - 24), len(data))]
    )


def verdict(data: bytes) -> tuple[str, str, Any]:
    try:
        return "ok", "", hw.decode(data)
    except hw.HurrayWireError as error:
        return type(error).__name__, str(error.code), None


def independent_verdict(data: bytes) -> tuple[str, str, Any]:
    try:
        return "ok", "", refdecode.decode(data)
    except refdecode.Refused as refused:
        return refused.error_class, refused.code, None


def is_beyond_memory(ours: tuple[str, str, Any], theirs: tuple[str, str, Any]) -> bool:
    """A pool of no bytes whose shape no array can have (section 3, limits)."""
    return ours[:2] == ("UnsupportedError", "shape") and theirs[2] is not None and not theirs[2].buffers[0]


@pytest.mark.parametrize("name", BARE)
def test_both_decoders_agree_on_single_byte_changes(name: str) -> None:
    data = CASES[name].data()
    wrong: dict[str, str] = {}
    for at in dict.fromkeys(places_of(data)):
        for value in values_at(name, at, data[at]):
            changed = data[:at] + bytes([value]) + data[at + 1 :]
            ours, theirs = verdict(changed), independent_verdict(changed)
            same = ours[:2] == theirs[:2] and (ours[0] != "ok" or same_item(ours[2], theirs[2]))
            if not same and not is_beyond_memory(ours, theirs):
                wrong.setdefault(f"{ours[:2]} against {theirs[:2]}", f"byte {at} = {value:#04x}")
    assert wrong == {}


# Delivery.


def fed(data: bytes, step: int) -> list[hw.BlockPagedTensor]:
    """What a stream gives that comes in pieces."""
    decoder = hw.FrameDecoder(streams="all")
    found: list[hw.BlockPagedTensor] = []
    for start in range(0, len(data), step):
        decoder.feed(data[start : start + step])
        while isinstance(tensor := decoder.next(), hw.BlockPagedTensor):
            found.append(tensor)
    decoder.close()
    return found


@pytest.mark.parametrize("name", [*ACCEPTED, *STREAMS])
def test_whole_in_pieces_and_byte_by_byte(name: str) -> None:
    case = CASES[name]
    data = case.data()
    if not case.is_stream and case.form == "hrkv":
        found = hw.inspect(data)
        if found.sequence or not found.last:
            pytest.skip("one frame of a stream")
    whole = fed(data, len(data))
    assert len(whole) == (len((case.expected or {})["items"]) if case.is_stream else 1)
    for step in (1, 7, 4096) if len(data) < 30000 else (4096,):
        assert fed(data, step) == whole
    if not case.is_stream:
        assert whole == [hw.decode(data)]


@pytest.mark.parametrize("name", ACCEPTED)
def test_bytes_left_over_are_told_and_left(name: str) -> None:
    data = CASES[name].data()
    with pytest.raises(hw.FrameError) as caught:
        hw.decode(data + b"\0")
    assert (caught.value.code, caught.value.offset) == ("trailing_bytes", len(data))
    tensor, end = hw.decode_from(b"left" + data + b"over", 4)
    assert end == 4 + len(data)
    assert tensor == hw.decode(data)


# Single-bit flips of what is checksummed.


@pytest.mark.parametrize("name", ["frame-plain", "frame-zstd-shuffle-4-chunks", "frame-metadata-spaced"])
def test_every_bit_flip_of_a_checksummed_frame_is_an_error(name: str) -> None:
    data = bytearray(CASES[name].data())
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            with pytest.raises(hw.HurrayWireError):
                hw.decode(bytes(data))
            data[at] ^= 1 << bit
