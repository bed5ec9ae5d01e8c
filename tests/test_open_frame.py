"""`open_frame`: only what is touched is read and verified; what it gives is what `decode` would give."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frames import BLOCK_TABLE, PAGE_POOL, entries_of, section_of
from hypothesis import given
from hypothesis import strategies as st
from strategies import Built, tensors
from stream_helpers import (
    TENSOR,
    as_sent,
    closing,
    coded_tables,
    encoded,
    int4,
    kinds,
    large,
    mixed_chunks,
    per_block,
    sample,
)
from support import FRAME_CASES, frame_vector, raw
from test_stream_into import flipped

import hurray_wire as hw

KINDS = kinds()
FORMS: dict[str, dict[str, Any]] = {
    "raw": {},
    "chunks": {"chunk_bytes": 8192},
    "zstd": {"compression": "zstd", "chunk_bytes": 16384},
    "bare": {"framing": "bare"},
}


class ReadAt:
    """A `read_at` that remembers what was read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.read: list[tuple[int, int]] = []

    def __call__(self, offset: int, length: int) -> bytes:
        found = self.data[offset : offset + length]
        self.read.append((offset, len(found)))
        return found

    def touched(self) -> set[int]:
        return {byte for offset, length in self.read for byte in range(offset, offset + length)}

    def forget(self) -> None:
        self.read = []


Source = Callable[[bytes, Path], Any]


def as_path(data: bytes, folder: Path) -> Path:
    path = folder / "frame"
    path.write_bytes(data)
    return path


SOURCES: dict[str, Source] = {
    "bytes": lambda data, _: data,
    "bytearray": lambda data, _: bytearray(data),
    "array": lambda data, _: np.frombuffer(data, np.uint8),
    "path": as_path,
    "str": lambda data, folder: str(as_path(data, folder)),
    "read_at": lambda data, _: ReadAt(data),
    "read_at-memoryview": lambda data, _: lambda offset, length: memoryview(data)[offset : offset + length],
    "read_at-array": lambda data, _: lambda offset, length: np.frombuffer(data, np.uint8)[offset:][:length],
    "read_at-more": lambda data, _: lambda offset, length: data[offset : offset + length + 999],
}


@pytest.mark.parametrize("offset", [0, 64, 101])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("form", FORMS)
def test_the_same_as_decode(form: str, source: str, offset: int, tmp_path: Path) -> None:
    """Every kind of tensor, at any offset, with other bytes around it."""
    for name, tensor in KINDS.items():
        blob = hw.encode(tensor, **FORMS[form])
        expected = hw.decode(blob)
        data = b"\x89" * offset + blob + hw.encode(sample(0))
        with hw.open_frame(SOURCES[source](data, tmp_path), offset) as frame:
            assert frame.tensor() == expected, name
            assert frame.descriptor == expected.descriptor
            assert np.array_equal(frame.block_table, expected.block_table)
            assert np.array_equal(frame.seq_ptr, expected.seq_ptr)
            assert frame.inspection.total_bytes == len(blob)
            if expected.seq_lens is not None:
                for seq in range(expected.num_seqs):
                    assert np.array_equal(frame.gather(seq), expected.gather(seq)), name


@pytest.mark.parametrize("form", ["raw", "bare"])
def test_the_inspection_is_that_of_inspect(form: str) -> None:
    """Offsets are absolute in either form."""
    data = bytes(101) + hw.encode(sample(0), **FORMS[form])
    found, expected = hw.open_frame(data, 101).inspection, hw.inspect(data, 101)
    assert found.spans == expected.spans
    assert found.spans[0].offset == 101
    for name in ("framing", "version", "total_bytes", "header_bytes", "descriptor", "sections", "sequence", "last"):
        assert getattr(found, name) == getattr(expected, name), name


@given(built=tensors(with_metadata=False), data=st.data(), verify=st.booleans())
def test_any_tensor(built: Built, data: st.DataObject, verify: bool) -> None:
    options = data.draw(st.sampled_from(list(FORMS.values())))
    blob = hw.encode(built.tensor, **options)
    expected = hw.decode(blob)
    with hw.open_frame(blob, verify=verify) as frame:
        assert frame.tensor() == expected
        if expected.seq_lens is None or (expected.dtype.bit_width < 8 and not expected.page_bytes):
            return
        for seq in range(expected.num_seqs):
            assert frame.gather(seq).tobytes() == expected.gather(seq).tobytes()
            assert frame.gather(seq).shape == expected.gather(seq).shape
        if expected.num_pages and expected.page_bytes:
            ids = data.draw(st.lists(st.integers(0, expected.num_pages - 1), max_size=6))
            pool = np.ascontiguousarray(expected.page_pool).reshape(expected.num_pages, -1)
            assert frame.pages(ids).tobytes() == pool[ids].tobytes()


@pytest.mark.parametrize("name", FRAME_CASES)
def test_golden_frames(name: str) -> None:
    data = frame_vector(name)
    if "stream" in name:
        with hw.open_frame(data) as frame:
            assert frame.tensor() == next(iter(hw.iter_decode(data)))
        return
    with hw.open_frame(data) as frame:
        assert frame.tensor() == hw.decode(data)


def test_frames_of_others() -> None:
    for data in (coded_tables(), mixed_chunks()):
        expected = hw.decode(data)
        frame = hw.open_frame(data)
        assert frame.tensor() == expected
        assert all(np.array_equal(frame.gather(s), expected.gather(s)) for s in range(0, expected.num_seqs, 7))


# Pages.


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "ids", [[], [0], [11], [3, 4, 5], [5, 4, 3], [7, 0, 7, 7, 1, 0], list(range(12)), np.arange(11, -1, -2), range(3)]
)
def test_pages_in_the_order_given(ids: Any, form: str, verify: bool) -> None:
    tensor = large(0, pages=12)
    with hw.open_frame(hw.encode(tensor, **FORMS[form]), verify=verify) as frame:
        found = frame.pages(ids)
        assert found.shape == (len(ids), 16, 4, 64)
        assert found.dtype == np.uint16
        assert np.array_equal(found, tensor.page_pool[list(ids)])
        assert found.flags.writeable
        assert not len(ids) or found.ctypes.data % 64 == 0
        wide = np.full((len(ids), 16, 4, 128), 9, np.uint16)
        out = frame.pages(ids, out=wide[..., ::2])
        assert np.shares_memory(out, wide) or not len(ids)
        assert np.array_equal(wide[..., ::2], tensor.page_pool[list(ids)])
        assert (wide[..., 1::2] == 9).all()


@pytest.mark.parametrize("ids", [[12], [-1], [0, 99], np.array([2**64 - 1], np.uint64)], ids=str)
def test_pages_out_of_range(ids: Any) -> None:
    with pytest.raises(IndexError):
        hw.open_frame(hw.encode(large(0, pages=12))).pages(ids)


@pytest.mark.parametrize("ids", [[0.5], [True], [[0]], "0", np.array([1.0])], ids=str)
def test_ids_are_integers(ids: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        hw.open_frame(hw.encode(large(0, pages=12))).pages(ids)


@pytest.mark.parametrize("shape", [(2, 16, 4, 63), (3, 16, 4, 64), (2, 4096)], ids=str)
def test_an_out_that_does_not_fit(shape: tuple[int, ...]) -> None:
    frame = hw.open_frame(hw.encode(large(0, pages=12)))
    for dtype in (np.uint16, np.uint8):
        with pytest.raises(ValueError, match="out"):
            frame.pages([0, 1], out=np.zeros(shape, dtype))


def test_packed_pages() -> None:
    frame = hw.open_frame(hw.encode(int4(0)))
    assert np.array_equal(frame.pages([5, 0]), int4(0).page_pool.reshape(6, 32)[[5, 0]])
    odd = sample(0, page_pool=np.zeros(5, np.uint8), dtype="int2", page_size=1, num_heads=1, head_dim=3, **SIX)
    frame = hw.open_frame(hw.encode(odd))
    with pytest.raises(hw.UnsupportedError) as caught:
        frame.pages([1])
    assert caught.value.code == "packed_pool"
    assert frame.tensor() == odd


SIX: dict[str, Any] = {"block_table": [1], "seq_ptr": [0, 1], "seq_lens": [1]}


@pytest.mark.parametrize("seq", [-1, 2, 10**9])
def test_no_such_sequence(seq: int) -> None:
    frame = hw.open_frame(hw.encode(sample(0)))
    for call in (frame.gather, frame.ranges):
        with pytest.raises(IndexError):
            call(seq)


def test_lengths_that_are_not_known() -> None:
    frame = hw.open_frame(hw.encode(sample(0), framing="bare"))
    assert frame.seq_lens is None
    for call in (frame.gather, frame.ranges):
        with pytest.raises(hw.UnsupportedError) as caught:
            call(0)
        assert caught.value.code == "seq_lens_unknown"
    assert np.array_equal(frame.pages([2]), sample(0).page_pool[[2]])


# Only what is touched.


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_opening_reads_no_payload_and_gathering_reads_the_ranges(form: str, verify: bool) -> None:
    tensor = TENSOR(
        large(0, pages=40).page_pool, block_table=[3, 4, 30, 9, 3], seq_ptr=[0, 3, 3, 5], seq_lens=[40, 0, 32]
    )
    blob = hw.encode(tensor, **FORMS[form])
    source = ReadAt(blob)
    frame = hw.open_frame(source, verify=verify)
    pool = hw.inspect(blob).sections and [e for e in entries_of(blob) if e["kind"] == PAGE_POOL]
    start, end = 133, 133 + tensor.page_pool.nbytes
    if pool:
        start, end = pool[0]["offset"], pool[-1]["offset"] + pool[-1]["stored_length"]
    assert not source.touched() & set(range(start, end))
    if form == "bare":
        frame.pages([30])
        page = range(start + 30 * 8192, start + 31 * 8192)
        assert source.touched() & set(range(start, end)) == set(page)
        return
    for seq in range(3):
        source.forget()
        found = frame.gather(seq)
        assert np.array_equal(found, tensor.gather(seq))
        ranges = frame.ranges(seq)
        assert source.touched() == {byte for o, n in ranges for byte in range(o, o + n)}
        assert ranges == sorted(ranges)
        assert all(a + n < b for (a, n), (b, _) in pairwise(ranges)), "neighbours are joined"
        if form == "raw" and not verify:
            assert sum(n for _, n in ranges) == len(set(tensor.live_pages(seq).tolist())) * 8192
        if form == "chunks":
            assert len(source.touched()) == len(set(tensor.live_pages(seq).tolist())) * 8192


def test_damage_counts_only_where_it_is_touched() -> None:
    tensor = large(0, pages=12).replace(block_table=[3, 4], seq_ptr=[0, 1, 2], seq_lens=[16, 16])
    for options in (FORMS["chunks"], {"compression": "zstd", "chunk_bytes": 8192}):
        blob = hw.encode(tensor, **options)
        chunks = [e for e in entries_of(blob) if e["kind"] == PAGE_POOL]
        frame = hw.open_frame(flipped(blob, chunks[4]["offset"] + 30))
        assert np.array_equal(frame.gather(0), tensor.gather(0))
        assert np.array_equal(frame.pages([3, 5, 11]), tensor.page_pool[[3, 5, 11]])
        for call in (partial(frame.gather, 1), partial(frame.pages, [0, 4]), frame.tensor):
            with pytest.raises(hw.ChecksumError) as caught:
                call()
            assert caught.value.offset == chunks[4]["offset"]
        assert np.array_equal(frame.gather(0), tensor.gather(0))  # an error ends nothing here


def test_padding_is_the_whole_tensors_matter() -> None:
    blob = hw.encode(sample(0))
    frame = hw.open_frame(flipped(blob, len(blob) - 1))
    assert np.array_equal(frame.gather(0), sample(0).gather(0))
    with pytest.raises(hw.FrameError) as caught:
        frame.tensor()
    assert (caught.value.code, caught.value.offset) == ("padding", len(blob) - 1)


def test_without_verify_a_page_is_read_without_its_chunk() -> None:
    tensor = large(0, pages=12)
    blob = hw.encode(tensor)
    start = section_of(blob, PAGE_POOL)["offset"]
    source = ReadAt(flipped(blob, start + 5 * 8192))
    frame = hw.open_frame(source, verify=False)
    source.forget()
    assert np.array_equal(frame.pages([6, 4, 7]), tensor.page_pool[[6, 4, 7]])
    assert sorted(source.read) == [(start + 4 * 8192, 8192), (start + 6 * 8192, 2 * 8192)]
    assert np.count_nonzero(frame.pages([5]) != tensor.page_pool[5]) == 1


def test_scales_and_tables_are_held_to_their_checksums_on_opening() -> None:
    blob = hw.encode(per_block(0))
    for entry in entries_of(blob):
        damaged = flipped(blob, entry["offset"])
        if entry["kind"] == PAGE_POOL:
            hw.open_frame(damaged)
            continue
        if entry["kind"] <= BLOCK_TABLE + 1:
            with pytest.raises(hw.HurrayWireError):
                hw.open_frame(damaged, verify=False)
    with pytest.raises(hw.InvalidDescriptorError):
        hw.open_frame(raw(bt=np.array([0, 9, 0], "<u4")))


def test_any_frame_of_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "stream"
    layers = [large(n, pages=3) for n in range(3)]
    path.write_bytes(encoded(layers, frame_alignment=4096))
    at = 0
    for layer in layers:
        with hw.open_frame(path, at) as frame:
            assert frame.tensor() == as_sent(layer)
            at += frame.inspection.total_bytes
    with pytest.raises(hw.FrameError) as caught:
        hw.open_frame(path, at)
    assert caught.value.code == "last"
    assert caught.value.offset == at + 20
    with pytest.raises(hw.FrameError):
        hw.open_frame(closing(3))


def test_over_a_map_of_a_file(tmp_path: Path) -> None:
    path = as_path(hw.encode(large(0, pages=12)), tmp_path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        with hw.open_frame(mapped) as frame:
            assert np.array_equal(frame.gather(0), large(0, pages=12).gather(0))
        del frame
