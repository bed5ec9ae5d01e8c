"""No hidden copies: what each path allocates, as Python and NumPy tell it, and as the page faults of the process do.

A path is run once before it is watched: what is made once and kept is no cost of a frame.
"""

from __future__ import annotations

import gc
import pickle
import resource
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import hurray_wire as hw
from hurray_wire import engines, ops

MIB = 1 << 20
PAGES, PAGE = 1024, (16, 8, 128)
POOL = np.random.default_rng(1).integers(0, 1 << 16, (PAGES, *PAGE), np.uint16).view(np.float16)
"""32 MiB of noise."""
SMOOTH = np.sort(POOL.reshape(PAGES, -1).view(np.uint16) >> 4, axis=1).view(np.float16).reshape(POOL.shape)
"""As much that zstd makes smaller."""
SEQS = 16
PTR = np.linspace(0, PAGES, SEQS + 1).astype(np.int64)
LENS = np.diff(PTR) * PAGE[0] - 5
TABLE = np.random.default_rng(2).permutation(PAGES)
SLACK = 3 * MIB // 2
"""Tables, headers and what stays in the cache; a chunk's scratch where there is compression."""


def tensor(pool: Any = POOL, table: Any = TABLE) -> hw.BlockPagedTensor:
    return hw.BlockPagedTensor(pool, block_table=table, seq_ptr=PTR, seq_lens=LENS)


T, IN_ORDER, COMPRESSIBLE = tensor(), tensor(table=np.arange(PAGES)), tensor(SMOOTH)
BLOB = bytearray(hw.encode(T))
ZSTD = hw.encode(COMPRESSIBLE, compression="zstd")
HEADER, BUFFERS = hw.encode_header(T), [T.page_pool, T.block_table, T.seq_ptr]
MINE = np.zeros_like(POOL)
ROOM = np.zeros(len(BLOB), np.uint8)
OUT = np.zeros((int(LENS[0]), *PAGE[1:]), np.float16)
PAIRS = np.stack([POOL[:512], POOL[512:]])


def fed_in_place(data: Any) -> object:
    """A decoder that reads into the buffers it asks for."""
    decoder, source, at = hw.FrameDecoder(), memoryview(data), 0
    while True:
        buffer = memoryview(decoder.get_buffer(-1))
        count = min(len(buffer), len(source) - at)
        buffer[:count] = source[at : at + count]
        decoder.buffer_updated(count)
        at += count
        if (found := decoder.next()) is not hw.NEED_DATA:
            return found


def from_vllm(pages: Any) -> object:
    table = np.arange(512).reshape(4, 128)
    return engines.from_vllm(PAIRS, table, [2047] * 4, axes=engines.VLLM_KV_FIRST, pages=pages)


class Way(NamedTuple):
    """Something that is done with a pool of 32 MiB, and the bytes it may allocate besides `SLACK`."""

    work: Callable[[], object]
    nbytes: int = 0


POOL_BYTES = POOL.nbytes
PATHS = {
    "make a tensor": Way(lambda: tensor()),
    "encode_parts": Way(lambda: hw.encode_parts(T)),
    "encode_parts, live pages": Way(lambda: hw.encode_parts(T, pages="live")),
    "encode_parts, bare": Way(lambda: hw.encode_parts(T, framing="bare")),
    "encode_parts, noise with compression": Way(lambda: hw.encode_parts(T, compression="zstd", threads=1), 2 * MIB),
    "encode_parts, compressed": Way(
        lambda: hw.encode_parts(COMPRESSIBLE, compression="zstd", threads=1), len(ZSTD) + 4 * MIB
    ),
    "encode_header": Way(lambda: hw.encode_header(T)),
    "encode_into": Way(lambda: hw.encode_into(T, ROOM)),
    "encode_buffer": Way(lambda: hw.encode_buffer(T), POOL_BYTES),
    "encode": Way(lambda: hw.encode(T), POOL_BYTES),
    "decode": Way(lambda: hw.decode(BLOB)),
    "decode, payload not verified": Way(lambda: hw.decode(BLOB, verify=False)),
    "decode, copied": Way(lambda: hw.decode(BLOB, copy=True), POOL_BYTES),
    "decode, compressed": Way(lambda: hw.decode(ZSTD, threads=1), POOL_BYTES + 4 * MIB),
    "decode_parts": Way(lambda: hw.decode_parts(HEADER, BUFFERS)),
    "decode_into": Way(lambda: hw.decode_into(BLOB, MINE, TABLE)),
    "decode_into, compressed": Way(lambda: hw.decode_into(ZSTD, MINE, TABLE, threads=1), 4 * MIB),
    "iter_decode": Way(lambda: list(hw.iter_decode(BLOB))),
    "inspect": Way(lambda: hw.inspect(BLOB).descriptor),
    "open_frame, one sequence": Way(lambda: hw.open_frame(BLOB, verify=False).gather(0), OUT.nbytes),
    "FrameDecoder, its own buffers": Way(lambda: fed_in_place(BLOB), POOL_BYTES),
    "gather into memory": Way(lambda: T.gather(0, out=OUT)),
    "pickle 5 out of band": Way(lambda: pickle.dumps(T, protocol=5, buffer_callback=lambda buffer: None)),
    "select": Way(lambda: ops.select(T, [3, 1])),
    "suffix": Way(lambda: ops.suffix(T, 2)),
    "slice_heads": Way(lambda: ops.slice_heads(T, 2, 5)),
    "repage to half": Way(lambda: ops.repage(T, 8)),
    "repage to twice": Way(lambda: ops.repage(IN_ORDER, 32), POOL_BYTES),
    "compact": Way(lambda: ops.compact(T), POOL_BYTES),
    "scatter": Way(lambda: ops.scatter(T, MINE, TABLE, PTR)),
    "from_vllm, all pages": Way(lambda: from_vllm("all")),
    "from_vllm, live pages": Way(lambda: from_vllm("live"), POOL_BYTES),
}
COPIES = [name for name, path in PATHS.items() if path.nbytes >= POOL_BYTES]


def peak_of(work: Callable[[], object]) -> int:
    work()
    gc.collect()
    tracemalloc.start()
    try:
        kept = work()
        peak = tracemalloc.get_traced_memory()[1]
        del kept
        return peak
    finally:
        tracemalloc.stop()


def faults_of(work: Callable[[], object]) -> int:
    """Pages of memory that the process touched for the first time."""
    work()
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = work()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    del kept
    return after - before


@pytest.mark.parametrize("name", PATHS)
def test_what_a_path_allocates(name: str) -> None:
    assert peak_of(PATHS[name].work) <= PATHS[name].nbytes + SLACK


@pytest.mark.parametrize("name", COPIES)
def test_the_measure_sees_a_copy(name: str) -> None:
    assert peak_of(PATHS[name].work) >= POOL_BYTES


@pytest.mark.parametrize("name", PATHS)
def test_what_a_path_touches_for_the_first_time(name: str) -> None:
    faults = faults_of(PATHS[name].work)
    assert faults * resource.getpagesize() <= PATHS[name].nbytes + 2 * SLACK


@pytest.mark.parametrize("verify", [True, False])
def test_a_mapped_file_is_viewed(tmp_path: Path, verify: bool) -> None:
    path = tmp_path / "cache.hrkv"
    path.write_bytes(BLOB)
    mapped = np.memmap(path, np.uint8, "r")
    assert peak_of(lambda: hw.decode(mapped, verify=verify)) <= SLACK
