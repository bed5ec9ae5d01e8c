"""A stream is whole or an error says what is missing: order, identity, ends (wire.md, section 4, "A stream")."""

from __future__ import annotations

import io
import random
from typing import Any, NamedTuple

import pytest
from frames import PROLOGUE, header_resealed, patched
from stream_helpers import TENSOR, as_sent, closing, encoded, frames_of, large, sample
from stream_ways import FEW, WAYS, drained

import hurray_wire as hw

TENSORS = [sample(i) for i in range(4)]
FRAMES = frames_of(TENSORS)
"""Frames 0 to 3 and the closing frame 4, of stream 77."""
FOREIGN = frames_of(TENSORS, stream_id=78)
BARE = hw.encode(sample(9), framing="bare")


class Fault(NamedTuple):
    """A stream that is not whole: what is wrong with it, and how many tensors came before."""

    frames: list[bytes]
    before: int
    code: str
    where: str
    told: str
    """What the message names: the sequence number that should follow, or does not fit."""


def some(*indices: int) -> list[bytes]:
    return [FRAMES[i] for i in indices]


FAULTS = {
    "missing": Fault(some(0, 2, 3, 4), 1, "sequence", "sequence", "1"),
    "missing-first": Fault(some(1, 2, 3, 4), 0, "sequence", "sequence", "0"),
    "missing-before-closing": Fault(some(0, 1, 2, 4), 3, "sequence", "sequence", "3"),
    "repeated": Fault(some(0, 1, 1, 2, 3, 4), 2, "sequence", "sequence", "2"),
    "repeated-first": Fault(some(0, 0, 1), 1, "sequence", "sequence", "1"),
    "reordered": Fault(some(0, 2, 1, 3, 4), 1, "sequence", "sequence", "1"),
    "foreign": Fault([*some(0, 1), FOREIGN[2], *some(3, 4)], 2, "stream_id", "stream_id", "0x4d"),
    "foreign-closing": Fault([*some(0, 1, 2, 3), closing(4, 1)], 4, "stream_id", "stream_id", "4"),
    "foreign-stream-within": Fault([*some(0, 1), *FOREIGN], 2, "sequence", "sequence", "2"),
    "bare-within": Fault([*some(0, 1), BARE, *some(2, 3, 4)], 2, "magic", "magic", "2"),
    "begun-anew": Fault([*some(0, 1), *frames_of(TENSORS)], 2, "sequence", "sequence", "2"),
    "cut-between": Fault(some(0, 1), 2, "stream_truncated", "stream", "2"),
    "cut-before-closing": Fault(some(0, 1, 2, 3), 4, "stream_truncated", "stream", "4"),
    "empty": Fault([], 0, "stream_truncated", "stream", ""),
    "closing-twice": Fault([*FRAMES, closing(5)], 4, "sequence", "sequence", "0"),
    "closing-of-another-number": Fault([*some(0, 1), closing(3)], 2, "sequence", "sequence", "2"),
    "closing-alone-with-a-number": Fault([closing(1)], 0, "sequence", "sequence", "0"),
    "second-stream-cut": Fault([*FRAMES, *some(0, 1)], 6, "stream_truncated", "stream", "2"),
    "second-stream-without-its-first": Fault([*FRAMES, *some(1, 2, 3, 4)], 4, "sequence", "sequence", "0"),
    "rubbish-behind": Fault([*FRAMES, b"\0" * 64], 4, "magic", "magic", ""),
    "sequence-at-its-end": Fault([hw.encode(sample(0), sequence=2**32 - 1)], 0, "sequence", "sequence", "4294967295"),
}


@pytest.mark.parametrize("way", FEW)
@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_named(name: str, way: str) -> None:
    fault = FAULTS[name]
    outcome = WAYS[way].run(b"".join(fault.frames), streams="all")
    assert outcome.tensors == [TENSORS[i % 4] for i in range(fault.before)]
    error = outcome.error
    assert error is not None
    assert (error.code, error.where) == (fault.code, fault.where)
    assert fault.told in error.message
    kind = hw.TruncatedError if fault.code == "stream_truncated" else hw.FrameError
    assert type(error) is kind


@pytest.mark.parametrize("name", [name for name in FAULTS if name != "empty"])
def test_every_reader_and_iter_decode_say_the_same(name: str) -> None:
    """Class, code, where, offset: the same in memory and over anything."""
    data = b"".join(FAULTS[name].frames)
    tensors, error = drained(hw.iter_decode(data))
    assert error is not None
    told = (len(tensors), type(error), error.code, error.where, error.offset)
    for way in FEW:
        outcome = WAYS[way].run(data, streams="all")
        found = outcome.error
        assert found is not None
        assert (len(outcome.tensors), type(found), found.code, found.where, found.offset) == told, way


@pytest.mark.parametrize("way", FEW)
def test_the_offset_of_a_fault_counts_from_the_streams_first_byte(way: str) -> None:
    outcome = WAYS[way].run(b"".join(FAULTS["missing"].frames), streams="all")
    assert outcome.error is not None
    assert outcome.error.offset == len(FRAMES[0]) + 12  # the field `sequence`
    outcome = WAYS[way].run(b"".join(FAULTS["foreign"].frames), streams="all")
    assert outcome.error is not None
    assert outcome.error.offset == len(FRAMES[0]) + len(FRAMES[1]) + 32


@pytest.mark.parametrize("way", FEW)
def test_without_require_last_an_end_between_frames_is_the_end(way: str) -> None:
    for name in ("cut-between", "cut-before-closing", "empty", "second-stream-cut"):
        fault = FAULTS[name]
        outcome = WAYS[way].run(b"".join(fault.frames), streams="all", require_last=False)
        assert (len(outcome.tensors), outcome.error) == (fault.before, None), name


@pytest.mark.parametrize("way", FEW)
@pytest.mark.parametrize("name", [n for n, f in FAULTS.items() if f.code != "stream_truncated"])
def test_without_require_last_all_else_is_still_an_error(name: str, way: str) -> None:
    outcome = WAYS[way].run(b"".join(FAULTS[name].frames), streams="all", require_last=False)
    assert outcome.error is not None
    assert outcome.error.code == FAULTS[name].code


@pytest.mark.parametrize("way", FEW)
def test_a_cut_inside_a_frame_is_an_error_even_without_require_last(way: str) -> None:
    data = b"".join(FRAMES)
    for cut in (len(FRAMES[0]) + 1, len(FRAMES[0]) + 300, len(data) - 1):
        outcome = WAYS[way].run(data[:cut], require_last=False)
        assert isinstance(outcome.error, hw.TruncatedError), cut
        assert outcome.error.code == "truncated"


@pytest.mark.parametrize("framing", ["hrkv", "bare"])
def test_in_the_bare_form_the_end_of_the_source_is_the_end(framing: Any) -> None:
    data = encoded(TENSORS, framing=framing)
    for cut, count in ((0, 0), (len(data) // 4, 1), (len(data) // 2, 2)):
        if framing == "hrkv":
            cut = sum(map(len, FRAMES[:count]))
        tensors, error = drained(hw.StreamReader(io.BytesIO(data[:cut])))
        assert len(tensors) == count
        # An empty source is an error in either form: nothing says which it would have been.
        assert (error is None) == (framing == "bare" and cut > 0), cut


def cuts(data: bytes, edges: list[int], count: int) -> list[int]:
    """Positions to cut at: around every frame's edge, and some anywhere."""
    near = {edge + by for edge in edges for by in (-65, -64, -1, 0, 1, 3, 4, 9, 10, 11, 39, 40, 41, 287, 288)}
    rng = random.Random(len(data))
    anywhere = {rng.randrange(len(data)) for _ in range(count)}
    return sorted(cut for cut in near | anywhere if 0 <= cut < len(data))


FORMS: dict[str, dict[str, Any]] = {
    "raw": {},
    "zstd": {"compression": "zstd"},
    "bare": {"framing": "bare"},
    "aligned": {"frame_alignment": 4096},
}


@pytest.mark.parametrize("way", FEW)
@pytest.mark.parametrize("form", FORMS)
def test_cut_anywhere(form: str, way: str) -> None:
    """What came before the cut is whole, and the cut is noticed; in the bare form only a cut inside an item can be."""
    tensors = [sample(0), large(1, pages=1), sample(2)]
    options = FORMS[form]
    items = [len(encoded(tensors[:n], **options)) for n in range(4)]
    if form != "bare":
        empty = items[0]
        items = [n - empty for n in items]  # without the closing frame
    data = encoded(tensors, **options)
    expected = [as_sent(t, options.get("framing", "hrkv")) for t in tensors]
    for cut in cuts(data, [*items, len(data)], 30 if "feed" in way else 8):
        outcome = WAYS[way].run(data[:cut], streams="all")
        whole = sum(0 < end <= cut for end in items)
        assert outcome.tensors == expected[:whole], cut
        if form == "bare" and cut in items[1:]:
            assert outcome.error is None
            continue
        assert isinstance(outcome.error, hw.TruncatedError), cut
        between = cut in items
        assert outcome.error.code == ("stream_truncated" if between else "truncated"), cut
        if not between:
            begin = items[whole]
            assert outcome.error.available == cut - begin, cut
            assert outcome.error.needed > outcome.error.available, cut
            assert outcome.error.offset == cut, cut


def test_cut_at_every_byte() -> None:
    """Every one of a small stream's bytes, by the decoder."""
    data = b"".join(frames_of([sample(0, pages=2)]))
    for cut in range(len(data)):
        decoder = hw.FrameDecoder()
        decoder.feed(data[:cut])
        with pytest.raises(hw.TruncatedError):
            decoder.close()
        assert (decoder.next() is hw.NEED_DATA) == (cut < len(data) - 64), cut


@pytest.mark.parametrize("way", FEW)
@pytest.mark.parametrize("at", [48, 63, 100, 4095])
def test_a_closing_frames_padding_is_zero(way: str, at: int) -> None:
    data = encoded([sample(0)], frame_alignment=4096)
    start = len(data) - 4096
    outcome = WAYS[way].run(patched(data, start + at, b"\x01"), streams="all")
    assert outcome.tensors == [sample(0)]
    assert outcome.error is not None
    assert (type(outcome.error), outcome.error.code, outcome.error.offset) == (hw.FrameError, "padding", start + at)


def test_every_flip_in_a_closing_frame_is_an_error() -> None:
    data = b"".join([FRAMES[0], closing(1)])
    start = len(FRAMES[0])
    for bit in range(64 * 8):
        changed = patched(data, start + bit // 8, bytes([data[start + bit // 8] ^ 1 << bit % 8]))
        tensors, error = drained(hw.StreamReader(io.BytesIO(changed)))
        assert (len(tensors), error is not None) == (1, True), bit


def shaped(sections: int, flags: int, length: int) -> bytes:
    frame = bytearray(closing(0).ljust(length, b"\0"))
    PROLOGUE.pack_into(frame, 0, frame[:8], 1, 0, flags, 0, 48 + 48 * sections, sections, 0, length, 77)
    return header_resealed(bytes(frame))


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (shaped(0, 0, 64), "header_length"),  # no sections, but not LAST
        (shaped(0, 1, 2 << 20), None),
        (shaped(0, 1, (2 << 20) + 64), "frame_length"),  # final padding is less than 2 MiB
        (shaped(0, 1, (4 << 20)), "frame_length"),
        (shaped(0, 3, 64), "section_flags"),
    ],
    ids=["not-last", "2-MiB", "over-2-MiB", "4-MiB", "flag"],
)
def test_a_closing_frame_has_a_closing_frames_shape(frame: bytes, code: str | None) -> None:
    tensors, error = drained(hw.StreamReader(io.BytesIO(frame)))
    assert tensors == []
    assert (error.code if error else None) == code


@pytest.mark.parametrize("way", FEW)
def test_decode_takes_any_frame_of_a_stream_but_the_closing_one(way: str) -> None:
    """It takes a frame out of its stream; a stream reader does not (section 4)."""
    assert hw.decode(FRAMES[2]) == TENSORS[2]
    with pytest.raises(hw.FrameError) as caught:
        hw.decode(FRAMES[4])
    assert caught.value.code == "last"
    outcome = WAYS[way].run(FRAMES[2], streams="all")
    assert outcome.error is not None
    assert outcome.error.code == "sequence"


def test_tensors_of_a_broken_stream_can_be_had_to_the_last() -> None:
    """The decoder holds the error back until what was whole before it has been taken."""
    decoder = hw.FrameDecoder()
    decoder.feed(b"".join(FAULTS["missing-before-closing"].frames))
    found: list[TENSOR] = []
    for _ in range(3):
        item = decoder.next()
        assert isinstance(item, TENSOR)
        found.append(item)
    assert found == TENSORS[:3]
    with pytest.raises(hw.FrameError):
        decoder.next()
    assert decoder.eof
    with pytest.raises(ValueError, match="close"):
        decoder.feed(b"x")
