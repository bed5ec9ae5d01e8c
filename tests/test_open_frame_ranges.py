"""`open_frame` over sources that fetch several ranges at once, and over sources that change between two reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frames import OPTIONAL, PAGE_POOL, Section, build, section_of, worked_sections
from stream_helpers import TENSOR, coded_tables, kinds, large, mixed_chunks, per_block
from test_open_frame import FORMS, ReadAt

import hurray_wire as hw
from hurray_wire.stream import ranges

Ranges = list[tuple[int, int]]


class Several(ReadAt):
    """A source that also fetches several ranges in one call."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.calls: list[Ranges] = []

    def read_at(self, offset: int, length: int) -> bytes:
        return self(offset, length)

    def read_ranges(self, wanted: Ranges) -> list[bytes]:
        self.calls.append(list(wanted))
        return [self(offset, length) for offset, length in wanted]


SCATTERED: dict[str, Any] = {"block_table": [3, 4, 30, 9, 3], "seq_ptr": [0, 3, 3, 5], "seq_lens": [40, 0, 32]}


@pytest.mark.parametrize("offset", [0, 101])
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_the_ranges_of_a_sequence_are_asked_for_at_once(form: str, verify: bool, offset: int) -> None:
    tensor = TENSOR(large(0, pages=40).page_pool, **SCATTERED)
    source = Several(bytes(offset) + hw.encode(tensor, **FORMS[form]))
    frame = hw.open_frame(source, offset, verify=verify)
    assert frame.tensor().page_pool.tobytes() == tensor.page_pool.tobytes()
    assert source.calls == [], "one range needs no list"
    found = frame.pages([30, 9, 4, 3, 30])
    assert np.array_equal(found, tensor.page_pool[[30, 9, 4, 3, 30]])
    if form == "raw" and verify:
        assert source.calls == [], "all pages lie in one chunk"
        return
    assert len(source.calls) == 1
    assert source.calls[0] == sorted(source.calls[0])
    assert len(source.calls[0]) == (4 if form in ("chunks", "zstd") else 3)
    if form != "bare":
        assert np.array_equal(frame.gather(0), tensor.gather(0))
        assert len(source.calls) == 2


def test_not_more_is_asked_for_at_once_than_may_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_AT_ONCE_BYTES", 3 * 8192)
    tensor = large(0, pages=40)
    source = Several(hw.encode(tensor, chunk_bytes=8192))
    assert np.array_equal(hw.open_frame(source).gather(0), tensor.gather(0))
    assert [len(call) for call in source.calls] == [3] * 13


def test_fewer_ranges_than_asked_for_are_an_end() -> None:
    tensor = large(0, pages=12)
    blob = hw.encode(tensor, chunk_bytes=8192)
    for kept in range(4):

        class Fewer(Several):
            def read_ranges(self, wanted: Ranges) -> list[bytes]:
                return super().read_ranges(wanted)[:kept]  # noqa: B023 - asked in this round

        frame = hw.open_frame(Fewer(blob))
        with pytest.raises(hw.TruncatedError):
            frame.pages([0, 3, 6, 9])
    short = Several(blob)
    frame = hw.open_frame(short)
    short.data = blob[:-90_000]
    with pytest.raises(hw.TruncatedError) as caught:
        frame.pages([0, 11])
    assert (caught.value.needed, caught.value.available) == (len(blob), len(blob) - 90_000)


class Turning(ReadAt):
    """A source whose bytes are others at the second look at them."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.looks = np.zeros(len(data), np.uint8)

    def __call__(self, offset: int, length: int) -> bytes:
        found = np.frombuffer(self.data, np.uint8)[offset : offset + length].copy()
        looks = self.looks[offset : offset + length]
        found[looks > 0] ^= 0xFF
        looks += 1
        return found.tobytes()


@pytest.mark.parametrize("form", [name for name in FORMS if name != "bare"])
@pytest.mark.parametrize("name", kinds())
def test_the_whole_tensor_is_of_one_reading(name: str, form: str) -> None:
    """What is verified is what is handed out: a file that is written to meanwhile is noticed, or was not seen."""
    blob = hw.encode(kinds()[name], **FORMS[form])
    turning = Turning(blob)
    source = [ReadAt(blob)]
    frame = hw.open_frame(lambda offset, length: source[0](offset, length))
    source[0] = turning
    assert frame.tensor() == hw.decode(blob)
    assert turning.looks.max() == 1
    with pytest.raises(hw.FrameError):
        frame.tensor()


def test_scales_are_those_that_were_verified() -> None:
    """They are read when the frame is opened, before the payload's checksums are looked at."""
    tensor = per_block(0)
    blob = bytearray(hw.encode(tensor))
    source = Several(bytes(blob))
    scales = next(s for s in hw.inspect(bytes(blob)).sections if s.name == "scales")
    blob[scales.offset] ^= 1
    source.data = bytes(blob)
    frame = hw.open_frame(source)
    source.data = hw.encode(tensor)
    assert frame.tensor() == tensor


def test_frames_of_others_in_one_reading() -> None:
    """Compressed tables, chunks in turn raw and compressed, a section that nobody knows before the pool."""
    private = Section(0x0A, b"whatever", flags=OPTIONAL | 1)
    sections = worked_sections()
    behind = next(i for i, section in enumerate(sections) if section.kind == PAGE_POOL)
    unknown = build([*sections[:behind], private, *sections[behind:]])
    assert section_of(unknown, PAGE_POOL)["offset"] > section_of(unknown, 0x0A)["offset"]
    for data in (coded_tables(), mixed_chunks(), unknown):
        assert hw.open_frame(ReadAt(data)).tensor() == hw.decode(data)


def test_a_source_of_its_own_memory_gives_it_to_keep() -> None:
    blob = hw.encode(large(0, pages=12))

    class Fresh:
        owned = True

        def read_at(self, offset: int, length: int) -> Any:
            return np.frombuffer(blob, np.uint8)[offset : offset + length].copy()

    assert hw.open_frame(Fresh()).tensor().page_pool.flags.writeable
    assert not hw.open_frame(ReadAt(blob)).tensor().page_pool.flags.writeable
