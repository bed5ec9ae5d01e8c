"""LMCache: chunks of one sequence, token-major, heads unsaid."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hurray_wire as hw
from hurray_wire import engines
from hurray_wire.errors import Code

LAYERS, HEADS, DIM = 3, 2, 5


def chunks_of(tokens: int, size: int, dtype: Any = np.float32) -> list[Any]:
    whole = np.arange(2 * LAYERS * tokens * HEADS * DIM).reshape(2, LAYERS, tokens, HEADS * DIM).astype(dtype)
    return [np.ascontiguousarray(whole[:, :, at : at + size]) for at in range(0, tokens, size)]


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
@pytest.mark.parametrize(("tokens", "size"), [(8, 8), (8, 4), (9, 8), (21, 16), (5, 256), (1, 1)])
def test_round_trips_at_any_page_size(tokens: int, size: int, page_size: int) -> None:
    chunks = chunks_of(tokens, size)
    layers = engines.from_lmcache(chunks, num_heads=HEADS, page_size=page_size)
    assert [(k.layer_index, v.layer_index) for k, v in layers] == [(i, i) for i in range(LAYERS)]
    whole = np.concatenate(chunks, axis=2)
    for layer, pair in enumerate(layers):
        for plane, t in enumerate(pair):
            assert t.seq_lens is not None
            assert (t.seq_lens.tolist(), t.page_size, t.kv_role) == ([tokens], page_size, ("key", "value")[plane])
            for token, head, dim in itertools.product(range(tokens), range(HEADS), range(DIM)):
                assert t.gather(0)[token, head, dim] == whole[plane, layer, token, head * DIM + dim]
            assert not t.page_pool.reshape(-1, HEADS, DIM)[tokens:].any()
    back = engines.to_lmcache(layers, chunk_tokens=size)
    assert all(map(np.array_equal, back, chunks))
    assert all(c.flags.c_contiguous for c in back)
    other = engines.to_lmcache(layers, chunk_tokens=7)
    assert np.array_equal(np.concatenate(other, axis=2), whole)


def test_pages_of_an_engine_become_chunks() -> None:
    pool = np.arange(5 * 4 * HEADS * DIM, dtype=np.float32).reshape(5, 4, HEADS, DIM)
    pair = engines.from_vllm((pool, -pool), [[3, 0, 4]], [10], axes="PSHD", layer_index=7, pages="all")
    for size in (4, 8, 3):
        chunks = engines.to_lmcache([pair], chunk_tokens=size)
        whole = np.concatenate(chunks, axis=2)[:, 0]
        assert np.array_equal(whole[0], pool[[3, 0, 4]].reshape(12, -1)[:10])
        assert np.array_equal(whole[1], -whole[0])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8])
def test_types_are_kept(dtype: Any) -> None:
    chunks = chunks_of(3, 2, np.uint8)
    chunks = [c.view(dtype) if np.dtype(dtype).itemsize == 1 else c.astype(dtype) for c in chunks]
    layers = engines.from_lmcache(chunks, num_heads=HEADS, page_size=4)
    assert layers[0][0].dtype is hw.Dtype.of(dtype)
    back = engines.to_lmcache(layers, chunk_tokens=2)
    assert [c.tobytes() for c in back] == [c.tobytes() for c in chunks]


def test_chunks_that_do_not_belong_together() -> None:
    full = chunks_of(8, 4)
    cases: list[tuple[Any, dict[str, int], Code, str]] = [
        ([], {}, Code.SHAPE, "chunks"),
        ([full[0][0]], {}, Code.RANK, "chunks[0]"),
        ([full[0], full[1][:, :2]], {}, Code.SHAPE, "chunks[1]"),
        ([full[0], full[1][..., :5]], {}, Code.SHAPE, "chunks[1]"),
        ([full[0], full[1].astype(np.float16)], {}, Code.SHAPE, "chunks[1]"),
        ([full[0], full[1][:, :, :3], full[0]], {}, Code.SHAPE, "chunks[1]"),
        ([full[0][:, :, :3], full[1]], {}, Code.SHAPE, "chunks[1]"),
        ([np.concatenate([full[0], full[0]])], {}, Code.SHAPE, "chunks[0]"),
        (full, {"num_heads": 3}, Code.SHAPE, "chunks[0]"),
        (full, {"num_heads": 0}, Code.SHAPE, "chunks[0]"),
        (full, {"page_size": 0}, Code.PAGE_SIZE, "page_size"),
    ]
    for chunks, changes, code, where in cases:
        with pytest.raises(hw.InvalidDescriptorError) as error:
            engines.from_lmcache(chunks, **({"num_heads": HEADS, "page_size": 4} | changes))
        assert (error.value.code, error.value.where) == (code, where)
    for chunks, code in (([full[0][:1]], Code.LAYOUT), ([full[0].astype(np.uint8)], Code.DTYPE)):
        with pytest.raises(hw.UnsupportedError) as refusal:
            engines.from_lmcache(chunks, num_heads=HEADS, page_size=4)
        assert refusal.value.code is code


def test_layers_that_do_not_belong_together() -> None:
    layers = engines.from_lmcache(chunks_of(8, 4), num_heads=HEADS, page_size=4)
    with pytest.raises(ValueError, match="at least 1"):
        engines.to_lmcache(layers, chunk_tokens=0)
    short = engines.from_lmcache(chunks_of(7, 7), num_heads=HEADS, page_size=4)
    batch = engines.from_vllm((np.zeros((2, 4, 2, 5), "f4"),) * 2, [[0], [1]], [1, 1], axes="PSHD")
    cases: list[tuple[Any, type[hw.HurrayWireError], Code, str]] = [
        ([], hw.InvalidDescriptorError, Code.SHAPE, "layers"),
        ([layers[1], layers[0]], hw.InvalidDescriptorError, Code.LAYER_INDEX, "layers[1]"),
        ([layers[0], layers[2]], hw.InvalidDescriptorError, Code.LAYER_INDEX, "layers[1]"),
        ([layers[0], short[1]], hw.InvalidDescriptorError, Code.SHAPE, "layers[1]"),
        ([layers[0][::-1]], hw.InvalidDescriptorError, Code.KV_ROLE, "key.kv_role"),
        ([batch], hw.UnsupportedError, Code.SHAPE, "layers[0]"),
    ]
    for chosen, kind, code, where in cases:
        with pytest.raises(kind) as error:
            engines.to_lmcache(chosen)
        assert (error.value.code, error.value.where) == (code, where)
    unnumbered = [(k.replace(layer_index=None), v.replace(layer_index=None)) for k, v in layers]
    assert len(engines.to_lmcache(unnumbered, chunk_tokens=4)) == 2
