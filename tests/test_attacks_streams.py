"""Attacks that are no bytes at rest: streams that drip, never end or end anywhere, memory that changes meanwhile."""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import xxhash
from attacks import BARE, FRAME, at
from frames import (
    BLOCK_TABLE,
    DESCRIPTOR,
    PAGE_POOL,
    SEQ_PTR,
    Section,
    added,
    build,
    header_resealed,
    patched,
    section_of,
)
from stream_helpers import TENSOR, closing, encoded, frames_of, sample
from stream_ways import drained
from support import POOL, worked

import hurray_wire as hw

# Streams that drip, never end, or end anywhere.


class Endless(io.RawIOBase):
    """A source that goes on for ever with the same bytes, and gives up before the test does."""

    def __init__(self, first: bytes, again: bytes, most: int = 1 << 26) -> None:
        self._data = itertools.chain(first, itertools.cycle(again))
        self.given, self.most = 0, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.given += len(buffer)
        if self.given > self.most:
            raise AssertionError("read for ever")
        buffer[:] = bytes(itertools.islice(self._data, len(buffer)))
        return len(buffer)


def test_a_stream_that_drips_is_read_byte_by_byte() -> None:
    """Attack 43: one byte at a time, each taken; nothing is asked for twice and nothing is kept but the frame."""
    data = encoded([sample(0), sample(1)])
    decoder = hw.FrameDecoder()
    found = 0
    for byte in data:
        decoder.feed(bytes([byte]))
        found += isinstance(decoder.next(), TENSOR)
    decoder.close()
    assert found == 2


def counted(n: int) -> bytes:
    """The worked frame as number n of a stream without end."""
    return header_resealed(patched(patched(FRAME, 10, b"\0\0"), 12, n.to_bytes(4, "little")))


@pytest.mark.parametrize(
    ("limits", "code"),
    [(hw.Limits(frames=9), "frames"), (hw.Limits.untrusted(10_000), "stream_bytes")],
    ids=["frames", "stream_bytes"],
)
def test_a_stream_that_never_ends_is_stopped_by_its_limits(limits: hw.Limits, code: str) -> None:
    """Attack 44: sound frames, one behind the other; `Limits` of a stream stop it, an item that never ends too."""
    decoder = hw.FrameDecoder(limits=limits)
    for n in range(100):
        decoder.feed(counted(n))
    tensors, error = drained(iter(cast(Any, decoder.next), hw.NEED_DATA))
    assert error is not None
    assert error.code == code
    assert len(tensors) == (9 if code == "frames" else 10_000 // len(FRAME))


@pytest.mark.parametrize("first", [b"", FRAME[:40], FRAME, BARE[:133]], ids=["noise", "prologue", "frame", "bare"])
def test_bytes_without_end_are_refused_early(first: bytes) -> None:
    """Attack 45: what follows is noise for ever: refused within the item that was announced."""
    source = Endless(first, b"\x5a")
    with pytest.raises(hw.HurrayWireError):
        list(hw.StreamReader(source, streams="all", limits=hw.Limits.untrusted(1 << 20)))
    assert source.given < (1 << 20)


def test_empty_streams_without_end_are_passed_over_one_at_a_time() -> None:
    """Attack 46: closing frames for ever hold no tensor; a reader of one stream stops at the first."""
    again = closing(0)
    source = Endless(b"", again)
    assert list(hw.StreamReader(source, streams="one")) == []
    assert source.given == len(again)
    decoder = hw.FrameDecoder(streams="all", limits=hw.Limits(stream_bytes=4 * len(again)))
    for _ in range(1000):
        decoder.feed(again)
        assert decoder.next() is hw.NEED_DATA


@pytest.mark.parametrize("form", ["raw", "zstd", "bare"])
def test_a_stream_that_ends_anywhere_is_an_error(form: str) -> None:
    """Attack 47: every cut is TruncatedError, but in the bare form between two items, which is its end."""
    options: dict[str, Any] = {"raw": {}, "zstd": {"compression": "zstd"}, "bare": {"framing": "bare"}}[form]
    data = encoded([sample(0), sample(1)], **options)
    whole = len(encoded([sample(0)], **options)) if form == "bare" else -1
    for cut in (*range(1, len(data) - 1, 7), len(data) - 1):
        if cut == whole:
            continue
        with pytest.raises(hw.TruncatedError):
            list(hw.StreamReader(io.BytesIO(data[:cut])))


def streamed(data: bytes) -> list[TENSOR]:
    """What a reader of streams makes of the bytes."""
    return list(hw.StreamReader(io.BytesIO(data)))


def reordered() -> Iterator[tuple[str, bytes]]:
    """Streams whose frames are sound, and not those that were sent."""
    first, second, third, last = frames_of([sample(n) for n in range(3)])
    yield "left out", first + third + last
    yield "twice", first + second + second + third + last
    yield "swapped", second + first + third + last
    yield "of another stream", first + frames_of([sample(n) for n in range(3)], stream_id=9)[1] + third + last
    yield "first again", first + first
    yield "bare between", first + BARE + second + third + last


@pytest.mark.parametrize(("told", "data"), list(reordered()), ids=[name for name, _ in reordered()])
def test_frames_that_were_not_sent_so_are_refused(told: str, data: bytes) -> None:
    """Attack 48: a frame left out, repeated, swapped, of another stream, or of the other form."""
    for read in (streamed, lambda d: list(hw.iter_decode(d))):
        with pytest.raises(hw.FrameError) as caught:
            read(data)
        assert caught.value.code in ("sequence", "stream_id", "magic"), told


# Memory that changes while it is checked.


class Changing:
    """An allocator that changes the input at the moment it is asked: behind the checks, before the use."""

    def __init__(self, data: bytearray, places: tuple[int, ...]) -> None:
        self.data, self.places, self.calls = data, places, 0

    def __call__(self, nbytes: int, alignment: int) -> Any:
        self.calls += 1
        for place in self.places:
            self.data[place] ^= 0xFF
        block = np.zeros(nbytes + alignment, np.uint8)
        start = -block.ctypes.data % alignment
        return block[start : start + nbytes]


@pytest.mark.parametrize("kind", [DESCRIPTOR, 2, BLOCK_TABLE, SEQ_PTR])
def test_tables_that_change_after_the_check_are_those_that_were_checked(kind: int) -> None:
    """Attack 49: header, descriptor and tables are judged and used in a private copy."""
    data = bytearray(FRAME)
    start = section_of(FRAME, kind)["offset"]
    alloc = Changing(data, tuple(range(start, start + 8)))
    found = hw.decode(data, copy=True, alloc=alloc)
    assert alloc.calls == 1
    assert bytes(data) != FRAME
    assert found == hw.decode(FRAME)
    assert found.gather(1).tobytes() == hw.decode(FRAME).gather(1).tobytes()


def test_a_bare_items_tables_too() -> None:
    """Attack 49 in the bare form, without checksums: tables are judged as they were copied, behind the pool."""
    data = bytearray(BARE)
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        hw.decode(data, copy=True, alloc=Changing(data, (785, 788)))
    assert caught.value.code == "seq_ptr_start"
    found = hw.decode(data := bytearray(BARE))
    data[773:] = bytes(24)
    assert found.block_table.tolist() == [0, 1, 0]
    assert found.seq_ptr.tolist() == [0, 2, 3]


def test_memory_that_another_thread_writes_meanwhile() -> None:
    """Attack 49, not staged: whatever was seen, a tensor's tables lead nowhere but into its pool."""
    data = bytearray(FRAME)
    places = [section_of(FRAME, kind)["offset"] for kind in (DESCRIPTOR, BLOCK_TABLE, SEQ_PTR)]
    stop = threading.Event()

    def write() -> None:
        rng = np.random.default_rng(1)
        while not stop.is_set():
            place = int(rng.choice(places)) + int(rng.integers(12))
            kept = data[place]
            data[place] = int(rng.integers(256))
            data[place] = kept

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(600):
            try:
                found = hw.decode(data, verify=False)
            except hw.HurrayWireError:
                continue
            assert int(found.block_table.max()) < found.num_pages
            assert [found.gather(seq).shape for seq in range(2)] == [(6, 2, 8), (3, 2, 8)]
    finally:
        stop.set()
        writer.join()


def test_a_source_that_gives_other_bytes_the_second_time() -> None:
    """Attack 50: `read_at` of a file that is written meanwhile: each part is checked as it was read."""
    others = [at(68, 4, FRAME)(9), patched(FRAME, 1200, bytes(16)), FRAME[::-1], b""]
    for other, after in itertools.product(others, range(1, 6)):
        calls = itertools.count()
        frame = None
        try:
            frame = hw.open_frame(lambda o, n, c=calls, b=other, k=after: (FRAME if next(c) < k else b)[o : o + n])
            rows = frame.gather(0)
            tensor = frame.tensor()
        except hw.HurrayWireError:
            continue
        assert frame is not None
        assert rows.tobytes() == worked().gather(0).tobytes()
        assert tensor.page_pool.tobytes() == POOL.tobytes()


def test_a_payload_that_fails_names_the_pages_and_touches_no_others() -> None:
    """Attack 51: pages that were written before the fault are named; the receiver's other pages are as they were."""
    data = patched(FRAME, section_of(FRAME, PAGE_POOL)["offset"] + 200, b"\xff\xfe")
    pool = np.full((9, 4, 2, 8), 7, np.float16)
    with pytest.raises(hw.ChecksumError) as caught:
        hw.decode_into(data, pool, [8, 1, 2, 3, 4])
    assert set(caught.value.pages_written) <= {8, 1, 2, 3, 4}
    assert (pool[[0, 5, 6, 7]] == 7).all()


# Work that is out of proportion.


def test_tokens_of_no_bytes_are_not_listed() -> None:
    """Attack 52: no heads, and tokens by the billion: what would list them refuses, nothing is made."""
    t = hw.BlockPagedTensor(
        np.zeros((1, 2**31, 0, 8), np.float16), block_table=[0] * 40, seq_ptr=[0, 40], seq_lens=[2**31 * 40]
    )
    data = hw.encode(t)
    assert len(data) < 2000
    found = hw.decode(data)
    for call in (lambda: found.gather(0), found.token_slots, lambda: found.token_slots(0)):
        with pytest.raises(hw.UnsupportedError) as caught:
            call()
        assert caught.value.code == "shape"


def test_a_page_that_many_sequences_name_is_sent_once() -> None:
    """Attack 53: 2,000 sequences of one page: what is held is the page; gathering is asked for sequence by sequence."""
    seqs = 2000
    t = hw.BlockPagedTensor(
        np.zeros((1, 16, 2, 8), np.float16),
        block_table=[0] * seqs,
        seq_ptr=range(seqs + 1),
        seq_lens=[16] * seqs,
    )
    for pages in ("all", "live"):
        found = hw.decode(hw.encode(t, pages=pages))
        assert found.page_pool.nbytes == 512
        assert found.gather(seqs - 1).nbytes == 512


def test_a_section_of_which_nobody_sends_the_bytes() -> None:
    """Attack 54: what neither header nor buffers hold is refused by name, not as damage."""
    data = build(added(Section(0x40, b"private", flags=3)))
    found = hw.inspect(data)
    starts = {section.kind: section for section in found.sections}
    buffers = [data[starts[k].offset :][: starts[k].raw_length] for k in (PAGE_POOL, BLOCK_TABLE, SEQ_PTR)]
    with pytest.raises(hw.FrameError) as caught:
        hw.decode_parts(data[: found.header_bytes], buffers)
    assert (caught.value.code, caught.value.where) == ("section_kind", "sections[5].kind")
    assert hw.decode_parts(FRAME[: hw.inspect(FRAME).header_bytes], buffers) == hw.decode(FRAME)


def test_a_small_section_behind_the_first_buffer_is_named_by_a_stream_too() -> None:
    """Attack 55: a reader of a stream has not yet received it, and says what is wrong, not that it is damaged."""
    place = 40 + 48 + 24
    data = header_resealed(patched(FRAME, place, (1208).to_bytes(8, "little")))
    seen = data[1208:1216]
    data = header_resealed(patched(data, place + 16, xxhash.xxh3_64_intdigest(seen).to_bytes(8, "little")))
    for read in (hw.decode, streamed):
        with pytest.raises(hw.FrameError) as caught:
            read(data)
        assert caught.value.code == "section_offset"


@pytest.mark.parametrize("page", [b"<!DOCTYPE HTML>\n<p>404", b"\n\n<HtMl><head>502", b"  <!doctype html>"])
def test_a_page_is_known_from_its_first_bytes(page: bytes) -> None:
    """Attack 38 in a stream, of which only the first ten bytes are looked at."""
    for read in (hw.decode, streamed):
        with pytest.raises(hw.UnsupportedError, match="HTML"):
            read(page)
