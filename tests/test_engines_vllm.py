"""vLLM: what its bytes mean, which pages leave, where they land; latents; the edges that reports are made of."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from test_engines_layouts import LAYOUTS, Geometry, engine_cache, layer_of, numbered

import hurray_wire as hw
from hurray_wire import engines
from hurray_wire.errors import Code

Array = npt.NDArray[Any]
Pair = tuple[hw.BlockPagedTensor, hw.BlockPagedTensor]

GEOMETRY = Geometry(6, 4, 2, 8)
KEY, VALUE = numbered(GEOMETRY), numbered(GEOMETRY, -1)


def pair(rows: Any = ((4, 1), (1,)), lens: Any = (6, 4), **options: Any) -> Pair:
    return engines.from_vllm((KEY, VALUE), [list(row) for row in rows], list(lens), axes="PSHD", **options)


def refused(act: Callable[[], Any], kind: type[hw.HurrayWireError] = hw.InvalidDescriptorError) -> tuple[Code, str]:
    with pytest.raises(kind) as error:
        act()
    return error.value.code, error.value.where


def refused_dtype(cache: Any, name: Any) -> tuple[Code, str]:
    return refused(lambda: engines.from_vllm(cache, [[4]], [1], axes="2PSHD", dtype=name), hw.UnsupportedError)


# What leaves: live pages, and nothing else.


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_poisoned_page_never_leaves(name: str, compression: Any) -> None:
    axes = LAYOUTS[name]
    poison = np.float32(777.25)
    key, value = KEY.copy(), VALUE.copy()
    for plain in (key, value):
        plain[[0, 2, 3, 5]] = poison
    cache = engine_cache(axes, key, value, float(poison))
    table = np.array([[4, 1, 5, -1], [1, 0, 99, 2]], np.int32)
    for tensor in engines.from_vllm(cache, table, [7, 4], axes=axes, layer_index=layer_of(axes)):
        blob = hw.encode(tensor, compression=compression)
        assert poison not in hw.decode(blob).page_pool
        assert compression or poison.tobytes() not in blob
        assert tensor.num_pages == 2


def test_a_pool_with_padded_pages_and_strided_tokens() -> None:
    wide = np.full((6, 5, 4, 2, 16), 777.25, np.float32)
    cache = wide[:, 1:3, :, :, 3:11].transpose(1, 0, 2, 3, 4)  # page stride longer than a page, gaps between tokens
    cache[0], cache[1] = KEY, VALUE
    live = engines.from_vllm(cache, [[4, 1], [1]], [6, 4], axes="2PSHD")
    assert all(map(hw.BlockPagedTensor.same_tokens, live, pair()))
    assert all(777.25 not in t.page_pool for t in live)
    whole = engines.from_vllm(cache, [[4, 1], [1]], [6, 4], axes="2PSHD", pages="all")
    assert all(np.shares_memory(t.page_pool, wide) for t in whole)
    assert all(map(hw.BlockPagedTensor.same_tokens, whole, live))
    engines.to_vllm(*live, axes="2PSHD", pool=cache, block_table=[[0, 2], [2]])
    assert np.array_equal(cache[0, [0, 2]], KEY[[4, 1]])
    cache[...] = 777.25
    assert (wide == 777.25).all()  # nothing was written between the pages


@pytest.mark.parametrize("order", [">", "<"])
def test_byte_order_is_not_the_hosts(order: str) -> None:
    cache = tuple(a.astype(f"{order}f4") for a in (KEY, VALUE))
    for axes in ("PSHD", "PHSD"):
        shaped = tuple(a if axes == "PSHD" else np.ascontiguousarray(a.swapaxes(1, 2)) for a in cache)
        got = engines.from_vllm(shaped, [[4, 1], [1]], [6, 4], axes=axes)
        assert [hw.encode(t) for t in got] == [hw.encode(t) for t in pair()]
        theirs, *_ = engines.to_vllm(*got, axes="PSHD")
        assert theirs[0].dtype == np.dtype("<f4")
        assert np.array_equal(theirs[0], KEY[[4, 1]])


@pytest.mark.parametrize("axes", ["PSHD", "PHSD", ("PHDSX", "PHDS")])
@pytest.mark.parametrize("pages", ["live", "all"])
def test_out_takes_the_pages(axes: Any, pages: str) -> None:
    cache = engine_cache(axes, KEY, VALUE)
    out: list[Any] = [np.full(KEY.nbytes + 7, 0x55, np.uint8), bytearray(KEY.nbytes)]
    got = engines.from_vllm(cache, [[4, 1], [1]], [6, 4], axes=axes, pages=pages, out=out)
    assert all(map(hw.BlockPagedTensor.same_tokens, got, pair()))
    assert np.shares_memory(got[0].page_pool, out[0])
    assert bytes(out[1][: got[1].page_pool.nbytes]) == got[1].page_pool.tobytes()
    assert set(out[0][got[0].page_pool.nbytes :].tolist()) == {0x55}


def test_out_that_does_not_fit() -> None:
    size = KEY[:2].nbytes
    for out, told in (
        ([np.zeros(size, np.uint8)], "2 buffers, one a role, not 1"),
        ([np.zeros(size, np.uint8), np.zeros(size - 1, np.uint8)], f"has {size - 1}, writable"),
        ([np.zeros(size, np.uint8), bytes(size)], f"{size} writable bytes .* has {size}, read-only"),
        ([np.zeros(size, np.uint8), np.zeros((size, 2), np.uint8)[:, 0]], "not contiguous"),
    ):
        with pytest.raises(ValueError, match=told):
            pair(out=out)
    with pytest.raises(ValueError, match="'live' or 'all'"):
        pair(pages="some")


# What bytes mean.


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("fp8", 0x40),
        ("fp8_e4m3", 0x40),
        ("float8_e4m3", 0x40),
        ("torch.float8_e4m3fn", 0x40),
        (ml_dtypes.float8_e4m3fn, 0x40),
        (hw.float8_e5m2, 0x41),
        ("fp8_e5m2", 0x41),
        ("uint8", 0x11),
    ],
)
def test_bytes_are_what_the_name_says(name: Any, tag: int) -> None:
    cache = np.arange(2 * 6 * 4 * 2 * 8, dtype=np.uint8).reshape(2, 6, 4, 2, 8)
    for tensor, plain in zip(engines.from_vllm(cache, [[4, 1]], [6], axes="2PSHD", dtype=name), cache, strict=True):
        assert tensor.dtype.tag == tag
        assert tensor.page_pool.tobytes() == plain[[4, 1]].tobytes()


def test_bytes_that_nobody_named_are_refused() -> None:
    for kind in ("uint8", "uint16"):
        cache = np.zeros((2, 6, 4, 2, 8), kind)
        for name in (None, "auto"):
            assert refused_dtype(cache, name) == (Code.DTYPE, "dtype")
    bf16 = np.zeros((2, 6, 4, 2, 8), np.uint16)
    assert engines.from_vllm(bf16, [[4]], [1], axes="2PSHD", dtype="bf16")[0].dtype is hw.bfloat16
    assert engines.from_vllm(bf16.view("<f2"), [[4]], [1], axes="2PSHD", dtype="auto")[0].dtype is hw.float16


@pytest.mark.parametrize(
    ("name", "code", "instead"),
    [
        ("float8_e4m3fnuz", Code.DTYPE, "quantise them anew"),
        ("torch.float8_e5m2fnuz", Code.DTYPE, "quantise them anew"),
        ("nvfp4", Code.LAYOUT, "all heads' scales"),
        ("nvfp4_4over6", Code.LAYOUT, "keep the cache in fp8"),
        ("fp8_per_token_head", Code.SCHEME, "one a token and head"),
        ("int8_per_token_head", Code.SCHEME, "dequantise in the engine"),
        ("int4_per_token_head", Code.SCHEME, "dequantise in the engine"),
        ("fp8_ds_mla", Code.DTYPE, "from_vllm_latent"),
        ("nvfp4_ds_mla", Code.DTYPE, "from_vllm_latent"),
        ("turboquant_k8v4", Code.DTYPE, "dequantise in the engine"),
        ("octave_k3v4", Code.DTYPE, "dequantise in the engine"),
        ("ultraquant_4bit", Code.DTYPE, "dequantise in the engine"),
        ("mxfp8", Code.SCHEME, "dequantise"),
        ("fp4_e2m1", Code.DTYPE, "dequantise in the engine"),
        ("fp7", Code.DTYPE, "no tag"),
        (ml_dtypes.float8_e4m3fnuz, Code.DTYPE, "fnuz"),
    ],
)
def test_names_that_cannot_be_carried_say_what_to_do(name: Any, code: Code, instead: str) -> None:
    cache = np.zeros((2, 6, 4, 2, 8), np.uint8)
    with pytest.raises(hw.UnsupportedError, match=instead) as error:
        engines.from_vllm(cache, [[4]], [1], axes="2PSHD", dtype=name)
    assert (error.value.code, error.value.where) == (code, "dtype")


def test_arrays_are_not_relabelled() -> None:
    for cache, name in (
        (np.zeros((2, 6, 4, 2, 8), np.float16), "bfloat16"),
        (np.zeros((2, 6, 4, 2, 8), ml_dtypes.float8_e5m2), "fp8_e4m3"),
        (np.zeros((2, 6, 4, 2, 8), np.uint8), "bfloat16"),
        (np.zeros((2, 6, 4, 2, 8), ml_dtypes.float8_e4m3fnuz), None),
        (np.zeros((2, 6, 4, 2, 8), "V2"), None),
    ):
        assert refused_dtype(cache, name)[0] is Code.DTYPE
    assert refused_dtype(np.zeros((2, 6, 4, 2, 8), np.uint8), "int4")[0] is Code.PACKED_POOL


# Scales.


@pytest.mark.parametrize("scale", [0.5, np.float32(0.5), np.array(0.5), np.array([0.5], ml_dtypes.bfloat16)])
def test_one_scale_a_tensor(scale: Any) -> None:
    stored = np.array([[[[1.5, -2.0]]]], ml_dtypes.float8_e4m3fn)
    cache = np.stack([stored, stored]).view(np.uint8)
    got = engines.from_vllm(cache, [[0]], [1], axes="2PSHD", dtype="fp8", key_scale=scale, value_scale=2)
    assert [t.quantization for t in got] == [hw.PerTensorAffine(0.5), hw.PerTensorAffine(2.0)]
    decoded = [hw.decode(hw.encode(t)) for t in got]
    assert [t.dequantize(0).tolist() for t in decoded] == [[[[0.75, -1.0]]], [[[3.0, -4.0]]]]
    back, *_ = engines.to_vllm(*decoded, axes="2PSHD")
    assert back.tobytes() == cache.tobytes()
    into = np.zeros((2, 3, 1, 1, 2), np.uint8)  # as vLLM keeps it
    engines.to_vllm(*decoded, axes="2PSHD", pool=into, block_table=[[2]])
    assert into[:, 2].tobytes() == cache.tobytes()


def test_scales_where_nothing_is_quantised() -> None:
    assert [t.quantization for t in pair(key_scale=1.0, value_scale=np.array(1.0))] == [None, None]
    assert refused(lambda: pair(key_scale=0.5)) == (Code.QUANTIZATION_STORAGE, "key_scale")
    int8 = np.zeros((2, 6, 4, 2, 8), np.int8)
    key, value = engines.from_vllm(int8, [[4]], [1], axes="2PSHD", key_scale=0.25)
    assert (key.quantization, value.quantization) == (hw.PerTensorAffine(0.25), None)
    for scale in (0.0, float("nan"), float("inf")):
        act = lambda s=scale: engines.from_vllm(int8, [[4]], [1], axes="2PSHD", value_scale=s)  # noqa: E731
        assert refused(act) == (Code.QUANTIZATION_SCALE, "value_scale")
    for wrong in (np.ones(2), "0.5", [0.5, 0.5]):
        with pytest.raises(TypeError, match="key_scale is one number"):
            pair(key_scale=wrong)


# Cases from public reports.


def test_b10_a_page_named_several_times() -> None:
    cache = (KEY[:5], VALUE[:5])
    key, _ = engines.from_vllm(cache, [[2, 2, 0], [2, -1, -1]], [12, 4], axes="PSHD", pages="all")
    kv = hw.decode(hw.encode(key))
    assert (kv.block_table.tolist(), kv.seq_ptr.tolist()) == ([2, 2, 0, 2], [0, 3, 4])
    first = kv.gather(0)
    for part in (first[0:4], first[4:8], kv.gather(1)):
        assert np.array_equal(part, KEY[2])
    other, _ = engines.from_vllm(cache, [[2, 1, 0], [3]], [12, 4], axes="PSHD", pages="all")
    assert len(hw.encode(key)) == len(hw.encode(other))
    live, _ = engines.from_vllm(cache, [[2, 2, 0], [2]], [12, 4], axes="PSHD")
    assert (live.block_table.tolist(), live.num_pages) == ([0, 0, 1, 0], 2)


def test_c12_pages_beyond_4_gib() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate((2**20 + 2) * 4096)
        file.seek((2**20 + 1) * 4096)
        file.write(b"\xab" * 4096)
        file.flush()
        pool = np.memmap(file, np.uint8, "r", shape=(2**20 + 2, 16, 1, 256))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for axes, cache in (("PSHD", (pool, pool)), ("PHSD", (pool.swapaxes(1, 2),) * 2)):
            for pages in ("live", "all"):
                key, _ = engines.from_vllm(cache, [[2**20 + 1]], [16], axes=axes, dtype="uint8", pages=pages)
                assert (key.gather(0) == 0xAB).all()
                assert int(key.element_offset(0, 0, 0, 0)) == (4294971392 if pages == "all" else 0)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize(
    ("pages", "rows", "lens"),
    [(0, [], []), (5, [], []), (5, [[], []], [0, 0]), (0, [[]], [0]), (5, [[-1], [7]], [0, 0])],
)
def test_h33_empty_batches(pages: int, rows: Any, lens: list[int], compression: Any) -> None:
    cache = (np.zeros((pages, 4, 2, 8), "f2"),) * 2
    for keep in ("live", "all"):
        source = engines.from_vllm(cache, rows, lens, axes="PSHD", pages=keep)
        for t in source:
            kv = hw.decode(hw.encode(t, compression=compression))
            assert kv.page_pool.shape == (pages if keep == "all" else 0, 4, 2, 8)
            assert (kv.block_table.size, kv.seq_ptr.tolist()) == (0, [0] * (len(lens) + 1))
            assert all(kv.gather(i).shape == (0, 2, 8) for i in range(len(lens)))
        back, table, theirs = engines.to_vllm(*source, axes="P2SHD")
        assert (back.shape[1:], table.shape, theirs.tolist()) == ((2, 4, 2, 8), (len(lens), 0), lens)
        into = np.ones((3, 2, 4, 2, 8), "f2")
        engines.to_vllm(*source, axes="P2SHD", pool=into, block_table=[[] for _ in lens])
        assert (into == 1).all()


def test_h33_zero_heads() -> None:
    for axes in ("PSHD", "PHSD"):
        cache = (np.zeros((3, 4, 0, 8), "f2") if axes == "PSHD" else np.zeros((3, 0, 4, 8), "f2"),) * 2
        source = engines.from_vllm(cache, [[2]], [4], axes=axes)
        assert hw.decode(hw.encode(source[0])) == source[0]
        assert source[0].page_pool.shape == (1, 4, 0, 8)
        (keys, _), *_ = engines.to_vllm(*source, axes=axes)
        assert keys.size == 0


@pytest.mark.parametrize("axes", ["2PSHD", "PHSC", ("PHDSX", "PHDS")])
def test_every_bit_pattern_of_bfloat16_is_kept(axes: Any) -> None:
    bits = np.arange(65536, dtype="<u2").reshape(64, 16, 8, 8)
    plain = bits.view(ml_dtypes.bfloat16)
    table = [list(range(64))]
    cache, *_ = engines.to_vllm(*engines.from_vllm((plain, plain[::-1]), table, [1024], axes="PSHD"), axes=axes)
    key, value = (hw.decode(hw.encode(t)) for t in engines.from_vllm(cache, table, [1024], axes=axes))
    assert key.page_pool.tobytes() == bits.tobytes()
    assert value.page_pool.tobytes() == bits[::-1].tobytes()


def test_packs_that_do_not_divide() -> None:
    source = engines.from_vllm((KEY[..., :6], VALUE[..., :6]), [[1]], [4], axes="PSHD")
    assert refused(lambda: engines.to_vllm(*source, axes=engines.VLLM_V0)) == (Code.SHAPE, "cache")
