"""More cases drawn from public bug reports: element types, byte order, empty shapes, memory, versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from frames import entries_of
from support import BT, POOL, ROOT, SP, raw, verdict, worked

import hurray_wire as hw

BLOB = hw.encode(worked())


def case(number: int, name: str = "") -> Any:
    return pytest.param(number, id=f"{number}{'-' if name else ''}{name}")


@pytest.mark.parametrize(
    ("dtype", "tag"),
    [
        pytest.param(dtype, tag, id=f"28-{name}")
        for name, dtype, tag in (
            ("bfloat16", ml_dtypes.bfloat16, 0x02),
            ("e5m2", ml_dtypes.float8_e5m2, 0x41),
            ("e4m3", ml_dtypes.float8_e4m3fn, 0x40),
            ("float16", np.float16, 0x01),
        )
    ],
)
def test_narrow_floats_keep_their_identity(dtype: Any, tag: int) -> None:
    if np.dtype(dtype).itemsize == 2:
        pool = np.arange(65536, dtype="<u2").view(dtype).reshape(64, 16, 8, 8)  # every pattern
    else:
        pool = np.arange(256, dtype="u1").view(dtype).reshape(2, 16, 1, 8)
    for options in ({}, {"framing": "bare"}, {"compression": "zstd"}):
        t = hw.decode(hw.encode(worked(page_pool=pool, seq_lens=[6, 3]), **options))  # type: ignore[arg-type]
        assert (t.page_pool.dtype, t.page_pool.tobytes()) == (pool.dtype, pool.tobytes())
        assert t.dtype.tag == t.descriptor.encode()[14] == tag


@pytest.mark.parametrize("_", [case(28, "untyped")])
def test_untyped_elements(_: int) -> None:
    untyped = POOL.view("V2")
    with pytest.raises(hw.UnsupportedError):
        worked(page_pool=untyped)
    assert worked(page_pool=untyped, dtype="bfloat16").dtype is hw.bfloat16


@pytest.mark.parametrize("_", [case(30, "byte-order-taken-from-the-host-or-the-array")])
def test_byte_order(_: int) -> None:
    swapped = worked(page_pool=POOL.astype(">f2"), block_table=BT.astype(">u4"), seq_ptr=SP.astype(">u4"))
    assert hw.encode(swapped) == BLOB
    bare = hw.encode(swapped, framing="bare")
    assert bare == raw()
    assert bare[133 + 2 : 133 + 4] == bytes.fromhex("003c")
    assert hw.decode(BLOB).page_pool.dtype == np.dtype("<f2")
    for kind in ("i8", "i4", "u2", ">i8", ">u2", "u1"):
        assert hw.encode(worked(block_table=BT.astype(kind), seq_ptr=SP.astype(kind))) == BLOB
    for order in "<>":
        scales = np.arange(1, 21, dtype=order + "f4").reshape(5, 4)
        t = worked(page_pool=POOL.astype("i1"), quantization="per_block", scales=scales)
        assert hw.encode(t, framing="bare").endswith(scales.astype("<f4").tobytes())


@pytest.mark.parametrize("_", [case(32, "k-and-v-differ-in-type-or-width")])
def test_keys_and_values_of_different_make(_: int) -> None:
    k = np.arange(2 * 4 * 192, dtype="f2").reshape(2, 4, 1, 192)
    v = np.arange(1024).astype("u1").view(ml_dtypes.float8_e4m3fn).reshape(2, 4, 1, 128)
    tables: dict[str, Any] = {"block_table": [0, 1], "seq_ptr": [0, 2], "seq_lens": [8], "layer_index": 7}
    blob = hw.encode(hw.BlockPagedTensor(k, kv_role="key", **tables), last=False) + hw.encode(
        hw.BlockPagedTensor(v, kv_role="value", **tables), sequence=1
    )
    key, value = hw.iter_decode(blob)
    assert (key.page_pool.nbytes, value.page_pool.nbytes) == (3072, 1024)
    assert (key.page_pool.dtype, value.page_pool.dtype) == (k.dtype, v.dtype)
    assert (key.head_dim, value.head_dim, key.kv_role, value.kv_role) == (192, 128, "key", "value")
    assert key.layer_index == value.layer_index == 7
    assert np.array_equal(key.block_table, value.block_table)


@pytest.mark.parametrize("compression", [pytest.param(None, id="33-raw"), pytest.param("zstd", id="33-zstd")])
def test_zero_length_buffers(compression: Any) -> None:
    batches: list[tuple[int, list[int], list[int]]] = [
        (0, [0], []),
        (5, [0], []),
        (5, [0, 0, 0], [0, 0]),
        (0, [0, 0], [0]),
    ]
    for pages, ptr, lens in batches:
        t = hw.BlockPagedTensor(
            np.zeros((pages, 4, 2, 8), "f2"),
            block_table=np.array([], "u4"),
            seq_ptr=np.array(ptr, "u4"),
            seq_lens=lens,
            kv_role="fused",
        )
        blob = hw.encode(t, compression=compression)
        found = hw.decode(blob)
        assert (found.page_pool.shape, found.block_table.shape, found.seq_ptr.shape) == (
            *((pages, 4, 2, 8), (0,), (len(ptr),)),
        )
        for seq in range(len(lens)):
            assert found.gather(seq).shape == (0, 2, 8)
        for handle in found.descriptor.buffers:
            assert handle.alignment == (64 if handle.byte_size else 1)
        assert found == t
        assert [x == t for x in hw.iter_decode(blob + blob)] == [True, True]
        assert hw.decode(hw.encode(t, framing="bare")) == t
    headless = hw.BlockPagedTensor(np.zeros((1, 4, 0, 8), "f2"), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
    for framing in ("hrkv", "bare"):
        found = hw.decode(hw.encode(headless, framing=framing))
        assert (found == headless, found.gather(0).shape) == (True, (4, 0, 8))


MAPPED = """
import gc, mmap, sys, warnings
warnings.simplefilter("error")
import hurray_wire as hw
with open(sys.argv[1], "rb") as f:
    m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    t = hw.decode(m, copy=True if sys.argv[2] == "copy" else None)
    x = t.gather(0)
    closed = True
    try:
        m.close()
    except BufferError:
        closed = False
    s = float(t.page_pool.astype("f8").sum())
    writeable = t.page_pool.flags.writeable
    del t, x
    gc.collect()
    m.close()
print(s, closed, writeable)
"""


@pytest.mark.parametrize(
    ("way", "told"), [("view", "51040.0 False False"), ("copy", "51040.0 True True")], ids=["36-view", "36-copy"]
)
def test_a_map_closed_while_arrays_use_it(way: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(BLOB)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MAPPED, str(path), way]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", told)


@pytest.mark.parametrize("framing", [pytest.param("hrkv", id="38-hrkv"), pytest.param("bare", id="38-bare")])
def test_leftovers_in_unused_slots(framing: Any) -> None:
    pool = POOL.copy()
    pool[1, 2:] = 1234.0
    pool[2:] = 1234.0
    before = pool.copy()
    t = worked(page_pool=pool)
    found = hw.decode(hw.encode(t, framing=framing, scrub=True)).replace(seq_lens=[6, 3])
    assert not (found.page_pool.view("<u2") == int.from_bytes(bytes.fromhex("d264"), "little")).any()
    for seq in (0, 1):
        assert np.array_equal(found.gather(seq), worked().gather(seq))
    assert np.array_equal(found.page_pool[0, 3], POOL[0, 3])  # used by the first sequence only
    assert np.array_equal(pool, before)
    assert np.array_equal(hw.decode(hw.encode(t, framing=framing)).page_pool, pool)


@pytest.mark.parametrize("_", [case(38, "receiving-memory")])
def test_nothing_of_the_receiving_memory_is_left(_: int) -> None:
    def alloc(nbytes: int, alignment: int) -> Any:
        block = np.full(nbytes + alignment, 0x55, np.uint8)
        return block[-block.ctypes.data % alignment :][:nbytes]

    plain = np.zeros((5, 64, 2, 8), np.float16)
    for options in ({}, {"compression": "zstd"}, {"framing": "bare"}):
        blob = hw.encode(worked(page_pool=plain), **options)  # type: ignore[arg-type]
        assert not hw.decode(blob, copy=True, alloc=alloc).page_pool.any()


@pytest.mark.parametrize("shift", [pytest.param(k, id=f"40-{k}") for k in range(8)])
def test_misaligned_arrays(shift: int) -> None:
    pool = np.arange(21, dtype=np.int8).reshape(7, 1, 1, 3)
    t = hw.BlockPagedTensor(pool, block_table=[0, 6], seq_ptr=[0, 2], seq_lens=[2])
    blob = hw.encode(t)
    for data in (blob, hw.encode(t, framing="bare"), BLOB, raw()):
        found = hw.decode(memoryview(bytes(shift) + data)[shift:])
        assert found.replace(seq_lens=[2] if found.num_seqs == 1 else [6, 3]) in (t, worked())
        for array in (found.page_pool, found.block_table, found.seq_ptr):
            assert array.flags.aligned
    end = 48 + 48 * len(entries_of(blob))
    for entry in entries_of(blob):
        assert entry["kind"] < 16 or entry["offset"] % 64 == 0
        assert not any(blob[end : entry["offset"]])
        end = entry["offset"] + entry["stored_length"]
    source = np.zeros(len(blob) + 64, np.uint8)
    start = -source.ctypes.data % 64
    source[start : start + len(blob)] = np.frombuffer(blob, np.uint8)
    assert np.shares_memory(hw.decode(source[start : start + len(blob)]).page_pool, source)


@pytest.mark.parametrize("_", [case(45, "version-looked-at-too-late")])
def test_versions_are_looked_at_first(_: int) -> None:
    noise = np.random.default_rng(45)
    for major in (0, 2, 7):
        changed_blob = bytearray(BLOB)
        changed_blob[8] = major
        changed_blob[16:] = noise.bytes(len(BLOB) - 16)
        for data, offset in (
            (bytes(changed_blob), 8),
            (bytes(changed_blob[:9]), 8),
            (raw(major=major), 4),
            (raw(major=major)[:5], 4),
        ):
            with pytest.raises(hw.UnsupportedError, match=rf"{major}.*1") as caught:
                hw.decode(data)
            assert (caught.value.code, caught.value.offset) == ("version", offset)
    for data in (raw(minor=1), raw(minor=1, tail=bytes(8))):
        assert hw.decode(data).replace(seq_lens=[6, 3]) == worked()
    for bit in range(5, 32):
        assert verdict(raw(flags=1 << bit))[:2] == ("InvalidDescriptorError", "flag_reserved")


@pytest.mark.parametrize(
    "shape", [pytest.param(s, id=f"47-{len(s)}-D") for s in ((12, 16), (3, 4, 16), (2, 3, 4, 2, 8))]
)
def test_other_numbers_of_dimensions(shape: tuple[int, ...]) -> None:
    with pytest.raises(hw.HurrayWireError) as caught:
        hw.BlockPagedTensor(np.zeros(shape, "f2"), block_table=[0], seq_ptr=[0, 1], seq_lens=[1])
    assert "[pages, page_size, heads, head_dim]" in str(caught.value)
    assert str(shape) in str(caught.value)


@pytest.mark.parametrize("_", [case(47, "latent")])
def test_a_latent_cache_is_one_fused_head(_: int) -> None:
    latent = np.arange(3 * 4 * 576).astype("f2").reshape(3, 4, 576)
    t = worked(page_pool=latent[:, :, None], block_table=[0, 1, 2], seq_ptr=[0, 3], seq_lens=[10], kv_role="fused")
    found = hw.decode(hw.encode(t))
    assert (found.kv_role, found.page_pool.shape) == ("fused", (3, 4, 1, 576))
    assert np.array_equal(found.gather(0), latent.reshape(12, 1, 576)[:10])


@pytest.mark.parametrize("_", [case(47, "optimised")])
def test_refusals_do_not_hang_on_assertions(_: int) -> None:
    """Under `python -O` assertions are gone; refusals are not."""
    code = (
        "import numpy as np, hurray_wire as hw\n"
        "for shape in ((12, 16), (2, 3, 4, 2, 8)):\n"
        "    try: hw.BlockPagedTensor(np.zeros(shape, 'f2'), block_table=[0], seq_ptr=[0, 1], seq_lens=[1])\n"
        "    except hw.HurrayWireError as error: print(error.code)\n"
        "pool = np.zeros((1, 4, 1, 8), 'f2')\n"
        "t = hw.BlockPagedTensor(pool, block_table=[0], seq_ptr=[0, 1], seq_lens=[4])\n"
        "blob = bytearray(hw.encode(t))\n"
        "for at in range(len(blob)):\n"
        "    blob[at] ^= 1\n"
        "    try: hw.decode(blob); print('accepted', at)\n"
        "    except hw.HurrayWireError: pass\n"
        "    blob[at] ^= 1\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", ["rank", "rank"])
