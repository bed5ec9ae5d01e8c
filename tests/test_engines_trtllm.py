"""TensorRT-LLM: one pool of all layers, its pages heads-first whatever the view of them is called."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_engines_layouts import tokens

import hurray_wire as hw
from hurray_wire import engines
from hurray_wire.errors import Code

PAGES, LAYERS, HEADS, SLOTS, DIM = 5, 3, 2, 4, 6


def plain() -> Any:
    """`[layers, 2, pages, slots, heads, dim]`, every element another."""
    shape = (LAYERS, 2, PAGES, SLOTS, HEADS, DIM)
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def trt_pool(values: Any) -> Any:
    """The engine's pool, element by element: page, layer, key/value, then heads, slots, dims."""
    pool = np.zeros((PAGES, LAYERS, 2, SLOTS * HEADS * DIM), np.float32)
    for layer, kv, p, s, h, d in itertools.product(*map(range, values.shape)):
        pool[p, layer, kv, (h * SLOTS + s) * DIM + d] = values[layer, kv, p, s, h, d]
    return pool


@pytest.mark.parametrize("layer", range(LAYERS))
def test_reads_one_layer(layer: int) -> None:
    values = plain()
    rows = [[4, 1, -1], [1, 0, 0]]
    key, value = engines.from_trtllm(trt_pool(values), rows, [7, 4], layer=layer, num_heads=HEADS, page_size=SLOTS)
    assert (key.layer_index, value.layer_index, key.num_pages) == (layer, layer, 2)
    for seq, length in enumerate((7, 4)):
        assert key.gather(seq).tolist() == tokens(values[layer, 0], rows[seq], length)
        assert value.gather(seq).tolist() == tokens(values[layer, 1], rows[seq], length)


def test_the_same_through_the_letters() -> None:
    pool = trt_pool(plain())
    apart = pool.reshape(PAGES, LAYERS, 2, HEADS, SLOTS, DIM)
    direct = engines.from_trtllm(pool, [[4, 1]], [7], layer=2, num_heads=HEADS, page_size=SLOTS)
    assert direct == engines.from_vllm(apart, [[4, 1]], [7], axes=engines.TRTLLM, layer_index=2)


def test_round_trips_into_any_layer() -> None:
    pool = trt_pool(plain())
    source = engines.from_trtllm(pool, [[4, 1], [1]], [7, 3], layer=0, num_heads=HEADS, page_size=SLOTS)
    mine = np.full((6, LAYERS, 2, SLOTS * HEADS * DIM + 8), -5.0, np.float32)[..., :-8]  # pages with padding between
    back, table, lens = engines.to_trtllm(*source, pool=mine, layer=2, block_table=[[3, 5], [5]])
    assert back is mine
    assert (table.tolist(), lens.tolist()) == ([[3, 5], [5, 0]], [7, 3])
    assert np.array_equal(mine[[3, 5], 2], pool[[4, 1], 0])
    assert (mine[:, :2] == -5).all()
    assert (mine[[0, 1, 2, 4]] == -5).all()
    again = engines.from_trtllm(mine, table, lens, layer=2, num_heads=HEADS, page_size=SLOTS)
    assert [t.replace(layer_index=0) for t in again] == list(source)


def test_what_cannot_be() -> None:
    pool = trt_pool(plain())

    def read(pool: Any = pool, layer: int = 0, num_heads: int = HEADS, page_size: int = SLOTS) -> Any:
        return engines.from_trtllm(pool, [[0]], [1], layer=layer, num_heads=num_heads, page_size=page_size)

    for options, code, where in (
        ({"pool": pool[0]}, Code.RANK, "pool"),
        ({"pool": pool[:, :, :1]}, Code.RANK, "pool"),
        ({"layer": 3}, Code.LAYER_INDEX, "layer_index"),
        ({"layer": -1}, Code.LAYER_INDEX, "layer_index"),
        ({"num_heads": 5}, Code.SHAPE, "pool"),
        ({"page_size": 0}, Code.SHAPE, "pool"),
    ):
        with pytest.raises(hw.InvalidDescriptorError) as error:
            read(**options)
        assert (error.value.code, error.value.where) == (code, where)
    with pytest.raises(hw.UnsupportedError) as unnamed:
        read(pool.astype(np.uint8))
    assert unnamed.value.code is Code.DTYPE
    assert read(pool.astype(np.uint8).view(ml_dtypes.float8_e4m3fn))[0].dtype is hw.float8_e4m3
    key, value = read()
    with pytest.raises(hw.InvalidDescriptorError) as error:
        engines.to_trtllm(key, value, pool=np.zeros((5, 3, 2, 24), np.float32), layer=0, block_table=[[1]])
    assert error.value.code is Code.SHAPE
