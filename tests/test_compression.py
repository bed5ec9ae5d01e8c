"""What is shuffled or compressed comes back, and no hostile byte gets past the room."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from hurray_wire import compression
from hurray_wire.compression import (
    SHUFFLE_WIDTHS,
    check_zstd_frame,
    compress_chunk,
    decompress_chunk,
    default_threads,
    run_chunks,
    shuffle,
    shuffle_width,
    unshuffle,
)
from hurray_wire.errors import Code, FrameError

Bytes = npt.NDArray[np.uint8]
MIB = 1 << 20
MAGIC = bytes.fromhex("28b52ffd")
UNSIZED = bytes.fromhex("28b52ffd00004d00001000000100e32b8005")  # 1000 zero bytes, size not recorded
SIZED = bytes.fromhex("28b52ffd60e8024d00001000000100e32b8005")  # the same, size recorded


def rng() -> np.random.Generator:
    return np.random.default_rng(20240607)


def as_bytes(array: npt.NDArray[np.generic]) -> Bytes:
    return np.frombuffer(array.tobytes(), np.uint8)


def gaussian(dtype: npt.DTypeLike, size: int) -> Bytes:
    """`size` bytes of Gaussian noise: the same entropy as keys and values."""
    itemsize = np.dtype(dtype).itemsize
    return as_bytes(rng().standard_normal(size // itemsize).astype(dtype))


def noise(size: int) -> Bytes:
    return rng().integers(0, 256, size, dtype=np.uint8)


def with_zero_pages(raw: Bytes, page: int = 16 << 10) -> Bytes:
    """The chunk with two in five of its pages zeroed."""
    pages = raw.copy().reshape(-1, page)
    pages[rng().permutation(len(pages))[: len(pages) * 2 // 5]] = 0
    return pages.reshape(-1)


def int8_per_tensor(size: int) -> Bytes:
    values = rng().standard_normal((size // 128, 128)) * np.exp(rng().standard_normal(128) / 3)
    return as_bytes(np.round(values / np.abs(values).max() * 127).astype(np.int8))


CHUNKS: dict[str, tuple[Callable[[], Bytes], int]] = {
    "bf16": (lambda: gaussian(ml_dtypes.bfloat16, MIB), 2),
    "bf16-ragged": (lambda: gaussian(ml_dtypes.bfloat16, 2 * (128 << 10) + 2), 2),
    "bf16-small": (lambda: gaussian(ml_dtypes.bfloat16, 64 << 10), 2),
    "bf16-zero-pages": (lambda: with_zero_pages(gaussian(ml_dtypes.bfloat16, MIB)), 2),
    "fp16": (lambda: gaussian(np.float16, MIB), 2),
    "f32": (lambda: gaussian(np.float32, 4 * 200_001), 4),
    "f64": (lambda: gaussian(np.float64, MIB), 8),
    "c128": (lambda: gaussian(np.float64, MIB), 16),
    "bf16-in-f32": (
        lambda: as_bytes(gaussian(ml_dtypes.bfloat16, 1 << 18).view("<u2").astype("<u4") << 16),
        4,
    ),
    "fp8": (lambda: gaussian(ml_dtypes.float8_e4m3fn, MIB), 0),
    "int8": (lambda: int8_per_tensor(MIB), 0),
    "noise-zero-pages": (lambda: with_zero_pages(noise(MIB)), 2),
    "noise-over-ramp": (lambda: as_bytes(noise(MIB // 2).astype("<u2") << 8), 2),
    "zeros": (lambda: np.zeros(MIB, np.uint8), 0),
    "zeros-shuffled": (lambda: np.zeros(5 * MIB, np.uint8), 16),
    "page-of-ids": (lambda: as_bytes(np.arange(50_000, dtype="<u4")), 4),
    "tiny": (lambda: np.zeros(64, np.uint8), 2),
}
SMALLEST_RATIO = {"bf16": 1.47, "fp16": 1.17, "fp8": 1.21, "int8": 1.25, "bf16-zero-pages": 2.4, "f32": 1.19}


def naive_shuffle(raw: bytes, width: int) -> bytes:
    return bytes(raw[i + j] for j in range(width) for i in range(0, len(raw), width))


def check(stored: bytes, raw_length: int) -> None:
    check_zstd_frame(memoryview(stored), raw_length, where="chunk", offset=1000)


def decompress(stored: bytes | memoryview, raw_length: int, width: int = 0) -> Bytes:
    """Decompress between guards: nothing beside `out` may be written."""
    room = np.full(raw_length + 64, 0xA5, np.uint8)
    out = room[32 : 32 + raw_length]
    try:
        decompress_chunk(memoryview(stored), raw_length, width, out, where="chunk", offset=1000)
    finally:
        assert (room[:32] == 0xA5).all()
        assert (room[32 + raw_length :] == 0xA5).all()
    return out


def stored_chunk(raw: Bytes, width: int) -> bytes | memoryview:
    stored = compress_chunk(raw, width)
    assert stored is not None
    return stored


# Byte shuffle


def test_shuffle_width_is_the_item_size_or_no_filter() -> None:
    assert [shuffle_width(n) for n in range(20)] == [n if n in SHUFFLE_WIDTHS else 0 for n in range(20)]


@pytest.mark.parametrize("width", SHUFFLE_WIDTHS)
@given(data=st.data(), skew=st.integers(0, 3))
def test_shuffle_is_the_definition_and_unshuffle_its_inverse(width: int, data: st.DataObject, skew: int) -> None:
    raw = data.draw(st.integers(0, 40).flatmap(lambda n: st.binary(min_size=n * width, max_size=n * width)))
    source = np.frombuffer(bytes(skew) + raw, np.uint8)[skew:]  # at any alignment
    planes, back = (np.zeros(skew + len(raw), np.uint8)[skew:] for _ in range(2))
    shuffle(source, width, planes)
    assert planes.tobytes() == naive_shuffle(raw, width)
    unshuffle(planes, width, back)
    assert back.tobytes() == raw


@pytest.mark.parametrize("width", SHUFFLE_WIDTHS)
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_shuffle_of_more_than_one_cached_piece(width: int, extra: int) -> None:
    raw = noise((512 << 10) + extra * width)
    planes, back = np.empty_like(raw), np.empty_like(raw)
    shuffle(raw.data, width, planes.data)
    assert np.array_equal(planes, raw.reshape(-1, width).T.reshape(-1))
    unshuffle(planes.data, width, back.data)
    assert np.array_equal(back, raw)


@pytest.mark.parametrize(("size", "width", "room"), [(8, 3, 8), (8, 0, 8), (7, 2, 7), (8, 2, 6), (8, 2, 10)])
def test_shuffle_refuses_what_does_not_fit(size: int, width: int, room: int) -> None:
    for function in (shuffle, unshuffle):
        with pytest.raises(ValueError, match="cannot shuffle"):
            function(np.zeros(size, np.uint8), width, np.zeros(room, np.uint8))


# Compress, decompress


@pytest.mark.parametrize("name", CHUNKS)
def test_what_is_compressed_comes_back(name: str) -> None:
    make, width = CHUNKS[name]
    raw = make()
    stored = stored_chunk(raw, width)
    assert len(stored) < raw.size
    assert raw.size / len(stored) >= SMALLEST_RATIO.get(name, 1)
    assert np.array_equal(decompress(stored, raw.size, width), raw)


@pytest.mark.parametrize("name", CHUNKS)
def test_any_zstd_decoder_reads_what_we_store(name: str) -> None:
    make, width = CHUNKS[name]
    raw = make()
    stored = bytes(stored_chunk(raw, width))
    planes = (raw.reshape(-1, width).T if width else raw).tobytes()
    header = zstandard.get_frame_parameters(stored)
    assert (header.content_size, header.dict_id, header.has_checksum) == (raw.size, 0, False)
    assert header.window_size <= max(raw.size, 128 << 10)
    assert zstandard.ZstdDecompressor().decompress(stored) == planes
    streaming = zstandard.ZstdDecompressor().decompressobj()  # block by block, unlike the one above
    assert b"".join(streaming.decompress(stored[i : i + 999]) for i in range(0, len(stored), 999)) == planes
    assert streaming.eof
    assert streaming.unused_data == b""


@pytest.mark.skipif(shutil.which("zstd") is None, reason="needs the zstd program")
@pytest.mark.parametrize("name", ["bf16", "bf16-ragged", "f32", "fp8", "tiny"])
def test_the_zstd_program_reads_what_we_store(name: str) -> None:
    make, width = CHUNKS[name]
    raw = make()
    told = subprocess.run(["zstd", "-dc"], input=stored_chunk(raw, width), capture_output=True, check=True)
    assert told.stdout == (raw.reshape(-1, width).T if width else raw).tobytes()


@given(raw=st.binary(max_size=300), width=st.sampled_from((0, *SHUFFLE_WIDTHS)), times=st.integers(1, 20))
def test_any_bytes_come_back_or_are_stored_raw(raw: bytes, width: int, times: int) -> None:
    chunk = np.frombuffer((raw * times)[: len(raw) * times // (width or 1) * (width or 1)], np.uint8)
    stored = compress_chunk(chunk, width)
    if stored is not None:
        assert len(stored) < chunk.size
        assert np.array_equal(decompress(stored, chunk.size, width), chunk)


@pytest.mark.parametrize("width", [0, *SHUFFLE_WIDTHS])
@pytest.mark.parametrize("size", [0, 16, 4096, 64 << 10, MIB])
def test_noise_is_stored_raw(size: int, width: int) -> None:
    assert compress_chunk(noise(size), width) is None


def test_compress_takes_any_buffer_and_changes_none() -> None:
    raw = gaussian(ml_dtypes.bfloat16, 1 << 18)
    expected = bytes(stored_chunk(raw, 2))
    shifted = np.concatenate([np.zeros(1, np.uint8), raw])[1:]
    for chunk in (raw.data, memoryview(raw.tobytes()), shifted, shifted.data.toreadonly()):
        assert compress_chunk(chunk, 2) == expected
    assert np.array_equal(shifted, raw)


@pytest.mark.parametrize(("size", "width"), [(8, 3), (7, 2), (8, -2), (24, 16)])
def test_compress_refuses_a_width_that_does_not_fit(size: int, width: int) -> None:
    with pytest.raises(ValueError, match="whole elements"):
        compress_chunk(np.zeros(size, np.uint8), width)


@pytest.mark.parametrize("level", [-5, 1, 3, 19])
@pytest.mark.parametrize("width", [0, *SHUFFLE_WIDTHS])
def test_frames_of_other_writers_are_read(level: int, width: int) -> None:
    raw = with_zero_pages(gaussian(np.float16, 160 << 10), 8 << 10)
    planes = naive_shuffle(raw.tobytes(), width) if width else raw.tobytes()
    stored = zstandard.ZstdCompressor(level=level, write_checksum=level > 1).compress(planes)
    assert np.array_equal(decompress(stored, raw.size, width), raw)


def test_decompress_writes_into_a_memoryview() -> None:
    room = bytearray(b"\xa5" * 1010)
    decompress_chunk(memoryview(SIZED), 1000, 0, memoryview(room)[5:1005], where="", offset=0)
    assert room == b"\xa5" * 5 + bytes(1000) + b"\xa5" * 5


@pytest.mark.parametrize("size", [0, 999, 1001])
def test_decompress_refuses_an_out_of_another_size(size: int) -> None:
    with pytest.raises(ValueError, match=f"out has {size} bytes"):
        decompress_chunk(memoryview(SIZED), 1000, 0, bytearray(size), where="", offset=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [1, 3, 16, 32])
def test_a_width_that_does_not_fit_is_a_section_filter_error(width: int) -> None:
    with pytest.raises(FrameError) as caught:
        decompress(SIZED, 1000, width)
    error = caught.value
    assert (error.code, error.where, error.offset) == (Code.SECTION_FILTER, "chunk", 1000)


# Hostile frames


def framed(flags: int, fields: bytes, blocks: bytes = b"\x01\x00\x00") -> bytes:
    return MAGIC + bytes([flags]) + fields + blocks


HOSTILE: dict[str, tuple[bytes, int, int, str]] = {
    # name: bytes, raw_length, position of the offence, what is told
    "empty": (b"", 1, 0, "found nothing"),
    "half-a-magic": (MAGIC[:2], 1, 0, "found 28 b5"),
    "foreign": (b"\x04\x22\x4d\x18" + SIZED[4:], 1000, 0, "found 04 22 4d 18"),
    "skippable": (b"\x50\x2a\x4d\x18" + (15).to_bytes(4, "little") + bytes(15), 15, 0, "found 50 2a 4d 18"),
    "skippable-first": (b"\x5f\x2a\x4d\x18\x00\x00\x00\x00" + SIZED, 1000, 0, "found 5f 2a 4d 18"),
    "skippable-behind": (SIZED + b"\x50\x2a\x4d\x18\x00\x00\x00\x00", 1000, 19, "is 19 bytes, 27 are stored"),
    "no-flags": (MAGIC, 1, 4, "ends inside its header of 6"),
    "half-a-size": (framed(0xC0, bytes(8), b""), 0, 13, "ends inside its header of 14"),
    "no-content-size": (UNSIZED, 1000, 4, "does not state its content size"),
    "size-too-small": (SIZED, 1001, 4, "content size of 1000, must be 1001"),
    "size-too-large": (SIZED, 999, 4, "content size of 1000, must be 999"),
    "exabytes": (framed(0xE0, b"\xff" * 7 + b"\x7f", b""), 1000, 4, "content size of 9223372036854775807"),
    "reserved-bit": (framed(0x28, b"\x01"), 1, 4, "bit 3 is reserved"),
    "dictionary": (framed(0x21, b"\x07\x01"), 1, 4, "dictionary id"),
    "dictionary-zero": (framed(0x23, b"\x00\x00\x00\x00\x01"), 1, 4, "not even 0"),
    "window-9-mib": (framed(0x80, b"\x69\xe8\x03\x00\x00"), 1000, 5, "window of 9437184, at most 8388608"),
    "window-3-tib": (framed(0x80, b"\xff\xe8\x03\x00\x00"), 1000, 5, "window of 4123168604160"),
    "no-block": (framed(0x20, b"\x05", b""), 5, 6, "where a block must follow"),
    "half-a-block-header": (framed(0x20, b"\x05", b"\x01\x00"), 5, 8, "where a block must follow"),
    "no-last-block": (framed(0x20, b"\x05", b"\x28\x00\x00hello"), 5, 14, "where a block must follow"),
    "reserved-block": (framed(0x20, b"\x05", b"\x2f\x00\x00hello"), 5, 6, "type 3"),
    "block-past-the-end": (framed(0x20, b"\x05", b"\x29\x00\x00hell"), 5, 13, "is 14 bytes, 13 are stored"),
    "block-above-window": (framed(0x20, b"\x05", b"\x31\x00\x00hello!"), 5, 6, "block of 6 bytes, at most 5"),
    "rle-too-long": (framed(0xA0, b"\x01\x00\x02\x00", b"\x0b\x00\x10\x00"), 131073, 9, "at most 131072"),
    "no-checksum": (framed(0x24, b"\x05", b"\x29\x00\x00hello"), 5, 14, "is 18 bytes, 14 are stored"),
    "wrong-checksum": (framed(0x24, b"\x05", b"\x29\x00\x00hello" + bytes(4)), 5, 0, "corrupt"),
    "trailing-byte": (SIZED + b"\x00", 1000, 19, "is 19 bytes, 20 are stored"),
    "second-frame": (SIZED + SIZED, 1000, 19, "is 19 bytes, 38 are stored"),
    "second-frame-completes": (SIZED + SIZED, 2000, 4, "content size of 1000"),
    "too-little-inside": (framed(0x20, b"\x06", b"\x29\x00\x00hello"), 6, 0, "corrupt"),
    "too-much-inside": (framed(0x20, b"\x06", b"\x28\x00\x00hello\x29\x00\x00hello"), 6, 0, "corrupt"),
    "bomb-of-blocks": (framed(0x20, b"\xff", b"\xfa\x07\x00\x00" * 99 + b"\x01\x00\x00"), 255, 0, "corrupt"),
    "garbage-block": (framed(0x20, b"\xff", b"\x2d\x00\x00\xff\xff\xff\xff\xff"), 255, 0, "corrupt"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_frame_is_refused(name: str) -> None:
    stored, raw_length, at, told = HOSTILE[name]
    with pytest.raises(FrameError) as caught:
        decompress(stored, raw_length)
    error = caught.value
    assert (error.code, error.where, error.offset) == (Code.ZSTD, "chunk", 1000 + at)
    assert told in error.message
    if "corrupt" not in told:  # known before a byte is decompressed
        with pytest.raises(FrameError, match="zstd"):
            check(stored, raw_length)


def test_frame_of_the_report_is_read_once_its_size_is_stated() -> None:
    assert not decompress(SIZED, 1000).any()


@pytest.mark.parametrize(
    ("name", "stored", "raw_length"),
    [
        ("unused bit 4 is ignored", framed(0x30, b"\x05", b"\x29\x00\x00hello"), 5),
        ("window of 8 MiB", framed(0x40, b"\x68\x00\x00", b"\x03\x08\x00h"), 256),
        ("two-byte size", framed(0x60, b"\x2c\x01", b"\x63\x11\x00h"), 556),
        ("four-byte size", framed(0xA0, b"\x05\x00\x00\x00", b"\x29\x00\x00hello"), 5),
        ("eight-byte size", framed(0xE0, b"\x05" + bytes(7), b"\x29\x00\x00hello"), 5),
        ("empty blocks", framed(0x20, b"\x05", b"\x00\x00\x00\x28\x00\x00hello\x00\x00\x00\x01\x00\x00"), 5),
        ("checksum", zstandard.ZstdCompressor(write_checksum=True).compress(b"hello" * 9), 45),
    ],
)
def test_lawful_frame_is_read(name: str, stored: bytes, raw_length: int) -> None:
    assert decompress(stored, raw_length).tobytes().startswith(b"h"), name


@pytest.mark.parametrize(("size", "lawful"), [(9 * MIB, True), (9 * MIB - 1, False)])
def test_window_may_be_as_large_as_the_chunk(size: int, lawful: bool) -> None:
    stored = framed(0x80, b"\x69" + size.to_bytes(4, "little"), b"\x02\x00\x10h" * (size >> 17) + b"\x01\x00\x00")
    if lawful:
        check(stored, size)
        return
    with pytest.raises(FrameError, match=r"window of 9437184, at most 9437183"):
        check(stored, size)


@pytest.mark.parametrize("width", [0, 2])
def test_every_prefix_is_refused(width: int) -> None:
    raw = gaussian(ml_dtypes.bfloat16, 600)
    stored = bytes(stored_chunk(raw, width))
    for length in range(len(stored)):
        with pytest.raises(FrameError, match="zstd frame") as caught:
            check(stored[:length], raw.size)
        assert caught.value.code == Code.ZSTD


def mutilated(stored: bytes, raw_length: int, width: int) -> None:
    """Decompress what may be anything: bytes between their guards or a located FrameError, nothing else."""
    offset: int | None = 1000
    try:
        decompress(stored, raw_length, width)
    except FrameError as error:
        offset = error.offset if error.code == Code.ZSTD else None
    assert offset is not None
    assert 1000 <= offset <= 1000 + len(stored)


@pytest.mark.parametrize("width", [0, 2, 4])
def test_every_bit_flip_is_an_error_or_as_many_bytes(width: int) -> None:
    raw = gaussian(ml_dtypes.bfloat16, 400)
    stored = stored_chunk(raw, width)
    for bit in range(8 * len(stored)):
        flipped = bytearray(stored)
        flipped[bit >> 3] ^= 1 << (bit & 7)
        mutilated(bytes(flipped), raw.size, width)
    assert np.array_equal(decompress(stored, raw.size, width), raw)  # the contexts survived it


@given(tail=st.binary(max_size=60), flags=st.integers(0, 255), raw_length=st.integers(1, 70_000))
def test_any_bytes_are_an_error_or_as_many_bytes(tail: bytes, flags: int, raw_length: int) -> None:
    mutilated(framed(flags, tail, b""), raw_length, 0)
    mutilated(framed(0xE0, raw_length.to_bytes(8, "little") + tail, b""), raw_length, 0)
    mutilated(tail, raw_length, 0)


def test_a_bomb_is_refused_before_it_expands() -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(64 * MIB))
    check(bomb, 64 * MIB)
    tracemalloc.start()
    try:
        with pytest.raises(FrameError, match="content size of 67108864, must be 1000"):
            decompress(bomb, 1000)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


# Threads


def test_results_come_in_the_order_of_the_items() -> None:
    def late(item: int) -> int:
        time.sleep(0.002 * (item % 3 == 0))
        return item * item

    for threads in (-1, 1, 2, 5, 100):
        assert run_chunks(late, range(20), threads=threads) == [item * item for item in range(20)]
        assert run_chunks(late, [], threads=threads) == []
        assert run_chunks(late, (7,), threads=threads) == [49]


def test_the_calling_thread_works_beside_the_others_and_outlives_them() -> None:
    meeting = threading.Barrier(3, timeout=60)

    def meet(_: int) -> int:
        meeting.wait()
        return threading.get_ident()

    before = threading.active_count()
    idents = run_chunks(meet, range(3), threads=3)
    assert len(set(idents)) == 3
    assert threading.get_ident() in idents
    assert threading.active_count() == before


@pytest.mark.parametrize(("threads", "count"), [(1, 5), (8, 1)])
def test_one_thread_or_one_item_runs_in_the_calling_thread(threads: int, count: int) -> None:
    idents = run_chunks(lambda _: threading.get_ident(), range(count), threads=threads)
    assert set(idents) == {threading.get_ident()}


def test_the_error_of_the_first_item_is_raised_and_no_item_begun_after_it() -> None:
    begun: list[int] = []
    second_failed = threading.Event()

    def fail(item: int) -> None:
        begun.append(item)
        if item == 0:
            assert second_failed.wait(60)
        second_failed.set()
        raise ArithmeticError(item)

    with pytest.raises(ArithmeticError, match=r"^0$"):
        run_chunks(fail, range(1000), threads=2)
    assert sorted(begun) == [0, 1]
    begun.clear()
    with pytest.raises(ArithmeticError, match=r"^0$"):
        run_chunks(fail, range(1000), threads=1)
    assert begun == [0]


def test_items_under_way_are_finished_before_the_error_is_raised() -> None:
    finished: list[int] = []
    meeting = threading.Barrier(2, timeout=60)

    def work(item: int) -> None:
        meeting.wait()
        if item == 1:
            raise ArithmeticError
        time.sleep(0.05)
        finished.append(item)

    with pytest.raises(ArithmeticError):
        run_chunks(work, range(2), threads=2)
    assert finished == [0]


def test_an_interrupt_goes_before_the_error_of_any_item() -> None:
    meeting = threading.Barrier(2, timeout=60)

    def work(item: int) -> None:
        meeting.wait()
        raise KeyboardInterrupt if item else ArithmeticError

    with pytest.raises(KeyboardInterrupt):
        run_chunks(work, range(9), threads=2)


def test_an_error_keeps_no_chunk_alive() -> None:
    class Chunk(list[int]):
        pass

    def fail(chunk: Chunk) -> None:
        raise ArithmeticError

    chunks = [Chunk(), Chunk(), Chunk()]
    gone = [weakref.ref(chunk) for chunk in chunks]
    gc.collect()
    gc.disable()
    try:
        try:
            run_chunks(fail, chunks, threads=2)
        except ArithmeticError:
            chunks.clear()
        assert [ref() for ref in gone] == [None] * 3
    finally:
        gc.enable()


def test_threads_that_cannot_be_had_cost_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert run_chunks(abs, range(-5, 0), threads=4) == [5, 4, 3, 2, 1]


def test_the_bytes_do_not_depend_on_the_threads() -> None:
    raw = with_zero_pages(gaussian(ml_dtypes.bfloat16, 2 * MIB))
    chunks = [raw[at : at + 100_000 + at % 7 * 2] for at in range(0, raw.size - 200_000, 90_000)]
    chunks.append(noise(200_000))
    alone = [compress_chunk(chunk, 2) for chunk in chunks]
    assert run_chunks(lambda chunk: compress_chunk(chunk, 2), chunks, threads=3) == alone


def test_many_callers_at_once() -> None:
    def round_trip(seed: int) -> None:
        raw = np.roll(gaussian(np.float16, 300_000), 2 * seed)
        chunks = [raw[at : at + 70_000] for at in range(0, raw.size, 70_000)]
        stored = run_chunks(lambda chunk: stored_chunk(chunk, 2), chunks, threads=3)
        back = run_chunks(lambda i: decompress(stored[i], chunks[i].size, 2), range(len(chunks)), threads=3)
        assert np.array_equal(np.concatenate(back), raw)

    run_chunks(round_trip, range(24), threads=8)


def test_a_forked_child_compresses() -> None:
    raw = gaussian(ml_dtypes.bfloat16, 1 << 18)
    expected = run_chunks(lambda width: stored_chunk(raw, width), [2, 4], threads=2)
    child = os.fork()
    if child == 0:
        again = run_chunks(lambda width: stored_chunk(raw, width), [2, 4], threads=2)
        os._exit(0 if again == expected else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_chunk_met_while_another_is_worked_on_gets_contexts_of_its_own() -> None:
    with compression._kit() as outer, compression._kit() as inner:
        assert outer is not inner
    with compression._kit() as later:
        assert later is outer


@pytest.mark.parametrize(("size", "kept"), [(4 * MIB, 4 * MIB), (4 * MIB + 2, 0)])
def test_scratch_beyond_the_bound_is_not_kept(size: int, kept: int) -> None:
    held = run_chunks(lambda _: compression._Kit(), [0], threads=1)[0]
    assert held.scratch(size).size == size
    assert held._scratch.size == kept


@pytest.mark.parametrize(("total", "expected"), [(0, 1), (4 * MIB - 1, 1), (4 * MIB, 5), (1 << 40, 5)])
def test_threads_by_default(monkeypatch: pytest.MonkeyPatch, total: int, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)), raising=False)
    assert default_threads(total, None) == expected


def test_threads_by_default_are_bounded_and_know_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for cores, expected in ((None, 1), (3, 3), (96, 8)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert default_threads(1 << 30, None) == expected


def test_threads_that_are_given_are_taken_as_they_are() -> None:
    assert [default_threads(0, n) for n in (1, 3, 64)] == [1, 3, 64]
    assert type(default_threads(0, np.int64(3))) is int  # type: ignore[arg-type]
    for below in (0, -1):
        with pytest.raises(ValueError, match=f"at least 1, not {below}"):
            default_threads(1 << 30, below)
    for foreign in (True, False, 1.0, "2"):
        with pytest.raises(TypeError):
            default_threads(1 << 30, foreign)  # type: ignore[arg-type]
