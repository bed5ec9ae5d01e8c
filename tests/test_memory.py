"""Memory: what decoding views, what it copies, who owns it, and for how long it stays."""

from __future__ import annotations

import gc
import mmap
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from strategies import NAMED
from support import POOL, Array, frame_vector, pool_bytes, raw, worked

import hurray_wire as hw


def placed(data: bytes, shift: int) -> Array:
    """The bytes at an address `shift` behind a multiple of 64."""
    block = np.zeros(len(data) + 192, np.uint8)
    start = -block.ctypes.data % 64 + shift
    block[start : start + len(data)] = np.frombuffer(data, np.uint8)
    return block[start : start + len(data)]


def blob(dtype: Any = np.float16, **options: Any) -> bytes:
    pool = np.arange(320 * np.dtype(dtype).itemsize).astype(np.uint8).view(dtype).reshape(5, 4, 2, 8)
    return hw.encode(worked(page_pool=pool), **options)


@pytest.mark.parametrize("dtype", NAMED, ids=str)
@pytest.mark.parametrize("shift", [0, 1, 2, 3, 4, 8, 16, 32])
def test_a_raw_pool_is_viewed_where_it_is_aligned_for_its_element(dtype: hw.Dtype, shift: int) -> None:
    assert dtype.numpy is not None
    source = placed(blob(dtype.numpy), shift)
    t = hw.decode(source)
    fits = shift % dtype.numpy.alignment == 0
    assert np.shares_memory(t.page_pool, source) == fits
    assert t.page_pool.flags.aligned
    assert t.page_pool.flags.writeable == (not fits)
    assert pool_bytes(t) == pool_bytes(hw.decode(bytes(source), copy=True))
    if fits:
        assert np.shares_memory(hw.decode(source, copy=False).page_pool, source)
        return
    assert t.page_pool.ctypes.data % 64 == 0
    with pytest.raises(hw.UnsupportedError) as caught:
        hw.decode(source, copy=False)
    assert caught.value.code == "copy_required"


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int8, ml_dtypes.float8_e4m3fn])
def test_the_bare_pool_starts_at_an_odd_offset(dtype: Any) -> None:
    data = blob(dtype, framing="bare")
    one_byte = np.dtype(dtype).itemsize == 1
    source = placed(data, 0)
    assert np.shares_memory(hw.decode(source).page_pool, source) == one_byte
    assert np.shares_memory(hw.decode(placed(data, 1)).page_pool, source) is False
    shifted = placed(data, 1)  # then the pool lies at an even address, and can be viewed
    assert np.shares_memory(hw.decode(shifted).page_pool, shifted)


@pytest.mark.parametrize("options", [{}, {"framing": "bare"}, {"compression": "zstd"}], ids=str)
def test_copies_are_owned_aligned_and_writable(options: dict[str, Any]) -> None:
    source = placed(blob(**options), 0)
    t = hw.decode(source, copy=True)
    assert not np.shares_memory(t.page_pool, source)
    assert t.page_pool.flags.writeable
    assert t.page_pool.ctypes.data % 64 == 0
    before = pool_bytes(t)
    source[:] = 0
    assert pool_bytes(t) == before
    t.page_pool[...] = 0


def test_decompressed_memory_is_the_librarys() -> None:
    data = frame_vector("zstd-shuffle2")
    t = hw.decode(data)
    assert t.page_pool.flags.writeable
    assert t.page_pool.ctypes.data % 64 == 0
    with pytest.raises(hw.UnsupportedError) as caught:
        hw.decode(data, copy=False)
    assert caught.value.code == "copy_required"


class Arena:
    """An allocator that remembers what it was asked for."""

    def __init__(self, fill: int = 0x55) -> None:
        self.asked: list[tuple[int, int]] = []
        self.blocks: list[Array] = []
        self.fill = fill

    def __call__(self, nbytes: int, alignment: int) -> Array:
        self.asked.append((nbytes, alignment))
        block = np.full(nbytes + alignment, self.fill, np.uint8)
        start = -block.ctypes.data % alignment
        self.blocks.append(block)
        return block[start : start + nbytes]


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (hw.encode(worked()), {"copy": True}),
        (hw.encode(worked(), framing="bare"), {"copy": True}),
        (hw.encode(worked(), compression="zstd"), {}),
        (hw.encode(worked(), compression="zstd", chunk_bytes=128), {"threads": 2}),
        (frame_vector("zstd-shuffle2-chunks"), {}),
    ],
    ids=["raw", "bare", "zstd", "zstd in chunks", "vector"],
)
def test_alloc_serves_what_is_copied_or_decompressed(data: bytes, options: dict[str, Any]) -> None:
    arena = Arena()
    t = hw.decode(data, alloc=arena, **options)
    plain = hw.decode(data)
    assert t == plain
    assert (plain.page_pool.nbytes, 64) in [(n, max(a, 64)) for n, a in arena.asked]
    assert any(np.shares_memory(t.page_pool, block) for block in arena.blocks)
    assert pool_bytes(t) == pool_bytes(plain)  # nothing of the arena's own is left in it


def test_alloc_is_not_asked_for_what_is_viewed() -> None:
    arena = Arena()
    hw.decode(placed(hw.encode(worked()), 0), alloc=arena)
    assert arena.asked == []


@pytest.mark.parametrize(
    "alloc",
    [
        lambda nbytes, _: bytearray(nbytes - 1),
        lambda nbytes, _: bytes(nbytes),
        lambda nbytes, _: placed(bytes(nbytes), 1),
        lambda nbytes, _: placed(bytes(nbytes), 32),
    ],
    ids=["short", "read-only", "odd", "half aligned"],
)
def test_a_buffer_that_does_not_serve_is_refused(alloc: Any) -> None:
    with pytest.raises(ValueError, match="alloc must give") as caught:
        hw.decode(hw.encode(worked()), copy=True, alloc=alloc)
    assert not isinstance(caught.value, hw.HurrayWireError)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.frombuffer, "readonly", "int16", "2-D"])
def test_every_contiguous_buffer_is_read(kind: Any) -> None:
    data = hw.encode(worked())
    source: Any
    if kind == "readonly":
        source = memoryview(data).toreadonly()
    elif kind == "int16":
        source = np.frombuffer(data, np.int16)
    elif kind == "2-D":
        source = np.frombuffer(data, np.uint8).reshape(-1, 64)
    else:
        source = np.frombuffer(data, np.uint8) if kind is np.frombuffer else kind(data)
    assert hw.decode(source) == worked()
    assert not hw.decode(source).page_pool.flags.writeable or not np.shares_memory(
        hw.decode(source).page_pool, np.frombuffer(data, np.uint8)
    )


def test_what_is_no_contiguous_buffer() -> None:
    data = np.frombuffer(hw.encode(worked()), np.uint8)
    strided: list[Any] = [np.repeat(data, 2)[::2], memoryview(bytes(np.repeat(data, 2)))[::2], data[::-1]]
    for source in strided:
        with pytest.raises(ValueError, match="contiguous"):
            hw.decode(source)
    others: list[Any] = ["text", None, 5, [1, 2], object()]
    for source in others:
        with pytest.raises(TypeError):
            hw.decode(source)


def test_a_map_stays_while_it_is_viewed(tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(hw.encode(worked()))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        t = hw.decode(mapped)
        with pytest.raises(BufferError):
            mapped.close()
        assert np.array_equal(t.page_pool, POOL)
        assert not t.page_pool.flags.writeable
        del t
        gc.collect()
        mapped.close()


class Source(bytearray):
    """Memory that can be watched."""


def test_views_keep_their_source_and_nothing_else_does() -> None:
    source = Source(hw.encode(worked()))
    gone = weakref.ref(source)
    t = hw.decode(source)
    pool = t.page_pool
    del source, t
    gc.collect()
    assert gone() is not None
    assert np.array_equal(pool, POOL)
    del pool
    gc.collect()
    assert gone() is None


def test_parts_are_the_pools_own_memory() -> None:
    pool = np.zeros((64, 16, 8, 16), np.float16)
    for framing in ("hrkv", "bare"):
        parts = hw.encode_parts(worked(page_pool=pool), framing=framing)
        own = [part for part in parts if np.shares_memory(np.frombuffer(part, np.uint8), pool)]
        assert sum(part.nbytes for part in own) == pool.nbytes
    halves = np.zeros((64, 2, 16, 8, 16), np.float16)  # keys and values side by side: every other page
    parts = hw.encode_parts(worked(page_pool=halves[:, 0]))
    own = [part for part in parts if np.shares_memory(np.frombuffer(part, np.uint8), halves)]
    assert sum(part.nbytes for part in own) == pool.nbytes
    live = hw.encode_parts(worked(page_pool=pool, block_table=[9, 10, 40]), pages="live")
    own = [part for part in live if np.shares_memory(np.frombuffer(part, np.uint8), pool)]
    assert [part.nbytes for part in own] == [2 * pool[0].nbytes, pool[0].nbytes]


def test_encode_buffer_is_fresh_and_writable() -> None:
    buffer = hw.encode_buffer(worked())
    assert (buffer.readonly, buffer.contiguous) == (False, True)
    assert np.frombuffer(buffer, np.uint8).ctypes.data % 64 == 0
    assert not np.shares_memory(np.frombuffer(buffer, np.uint8), POOL)


def test_a_read_only_destination_is_refused() -> None:
    with pytest.raises(ValueError, match="read-only"):
        hw.encode_into(worked(), bytes(5000))


def test_tables_are_copies_also_where_all_is_viewed() -> None:
    source = placed(hw.encode(worked(), framing="bare"), 1)
    t = hw.decode(source, copy=False)
    for table in (t.block_table, t.seq_ptr):
        assert not np.shares_memory(table, source)
        assert table.flags.aligned
    assert hw.decode(raw()).block_table.flags.aligned
