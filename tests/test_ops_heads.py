"""Heads, keys and values: exact results and edges. The laws stand in test_ops_laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from batches import sums, worked_example

import hurray_wire as hw
from hurray_wire import ops

Array = npt.NDArray[Any]
POOL = np.arange(320, dtype=np.float16).reshape(5, 4, 2, 8)


def f32(values: Any) -> Array:
    return np.asarray(values, np.float32)


# Heads.


def test_heads_of_rank_as_engines_share_them_out() -> None:
    for heads in (1, 2, 4, 8, 16):
        for size in (1, 2, 4, 8, 16):
            for rank in range(size):
                expected = range(rank * heads // size, (rank + 1) * heads // size)
                if size > heads:
                    expected = range(rank * heads // size, rank * heads // size + 1)
                assert ops.heads_of_rank(rank, size, heads) == expected


@pytest.mark.parametrize(("rank", "size", "total"), [(0, 3, 8), (0, 8, 3), (4, 4, 8), (-1, 4, 8), (0, 0, 8), (0, 1, 0)])
def test_heads_of_rank_refuses(rank: int, size: int, total: int) -> None:
    with pytest.raises(ValueError, match=r"rank|heads"):
        ops.heads_of_rank(rank, size, total)


def test_slices_count_heads_of_the_model() -> None:
    t = worked_example(metadata={"heads": [2, 4, 8]})
    half = ops.slice_heads(t, 1, 2)
    assert half.metadata == {"heads": [3, 4, 8]}
    assert np.shares_memory(half.page_pool, t.page_pool)
    with pytest.raises(hw.MismatchError):
        ops.slice_heads(t.replace(metadata={"heads": [0, 8, 8]}), 0, 1)
    for start, stop in ((0, 0), (1, 1), (2, 1), (0, 3), (-1, 1)):
        with pytest.raises(IndexError):
            ops.slice_heads(t, start, stop)


def test_merge_leaves_replicas_out() -> None:
    t = worked_example()
    ranks = [ops.slice_heads(t, r.start, r.stop) for r in (ops.heads_of_rank(rank, 8, 2) for rank in range(8))]
    whole = ops.merge_heads(reversed(ranks))
    assert (whole.page_pool == POOL).all()
    assert whole.metadata == {"heads": [0, 2, 2]}
    assert ops.merge_heads(ranks[:4]).metadata == {"heads": [0, 1, 2]}
    assert ops.merge_heads([t]).page_pool is t.page_pool


def test_merge_without_metadata_takes_the_order_given() -> None:
    t = worked_example()
    twice = ops.merge_heads([t, t.replace(page_pool=-POOL)])
    assert twice.num_heads == 4
    assert (twice.page_pool == np.concatenate([POOL, -POOL], axis=2)).all()
    assert twice.metadata is None


def test_merge_joins_ranks_with_ids_of_their_own() -> None:
    t = worked_example()
    order = np.array([3, 0, 4, 1, 2])
    low, high = ops.slice_heads(t, 0, 1), ops.slice_heads(t, 1, 2)
    moved = high.replace(page_pool=high.page_pool[order], block_table=np.argsort(order)[[0, 1, 0]])
    whole = ops.merge_heads([low, moved])
    assert whole.same_tokens(t)
    assert whole.block_table.tolist() == [0, 1, 0]
    assert whole.num_pages == 2


@pytest.mark.parametrize("heads", [[[0, 1, 4], [2, 3, 4]], [[0, 1, 4], [1, 2, 5]], [[0, 1, 4], None]])
def test_merge_refuses_gaps_and_strangers(heads: list[Any]) -> None:
    t = ops.slice_heads(worked_example(), 0, 1)
    with pytest.raises(hw.MismatchError):
        ops.merge_heads([t.replace(metadata=None if h is None else {"heads": h}) for h in heads])


def test_merge_refuses_other_batches() -> None:
    t = worked_example()
    for other in (t.replace(seq_lens=[5, 4]), ops.select(t, [0]), t.replace(layer_index=9), ops.repage(t, 2)):
        with pytest.raises(hw.MismatchError):
            ops.merge_heads([t, other])


def test_merge_joins_scales_along_the_heads_only() -> None:
    pool = POOL.astype(np.int8)
    by_head = worked_example(page_pool=pool, quantization=hw.PerChannelAffine(1, 3), scales=f32([1, 2]))
    low, high = ops.slice_heads(by_head, 0, 1), ops.slice_heads(by_head, 1, 2)
    assert high.scales is not None
    assert high.scales.tolist() == [2]
    assert ops.merge_heads([high, low]).replace(metadata=None) == by_head
    scales = np.ones((5, 4), np.float32)
    by_slot = worked_example(page_pool=pool, quantization="per_block", scales=scales)
    low, high = ops.slice_heads(by_slot, 0, 1), ops.slice_heads(by_slot, 1, 2)
    unused = scales.copy()
    unused[4] = np.nan
    assert ops.merge_heads([low, high.replace(scales=unused)]).replace(metadata=None) == by_slot
    used = scales.copy()
    used[1, 1] = 3
    with pytest.raises(hw.MismatchError):
        ops.merge_heads([low, high.replace(scales=used)])


# Keys and values.


def test_split_takes_key_dim_from_the_metadata() -> None:
    t = worked_example(kv_role="fused", metadata={"key_dim": 6, "model": "m"})
    key, value = ops.split_fused(t)
    assert (key.page_pool == POOL[..., :6]).all()
    assert (value.page_pool == POOL[..., 6:]).all()
    assert key.metadata == value.metadata == {"model": "m"}
    assert np.shares_memory(key.page_pool, t.page_pool)
    assert ops.fuse(key, value) == t
    assert ops.split_fused(t, 2)[0].head_dim == 2


def test_split_refuses() -> None:
    fused = worked_example(kv_role="fused")
    with pytest.raises(TypeError):
        ops.split_fused(fused)
    with pytest.raises(ValueError, match="key_dim"):
        ops.split_fused(fused, 9)
    with pytest.raises(hw.MismatchError):
        ops.split_fused(worked_example(), 4)


def test_a_latent_is_never_taken_apart() -> None:
    latent = worked_example(kv_role="fused", metadata={"content": "latent"})
    for attempt in (
        lambda: ops.split_fused(latent, 4),
        lambda: ops.slice_heads(latent, 0, 1),
        lambda: ops.merge_heads([latent, latent]),
    ):
        with pytest.raises(hw.UnsupportedError) as caught:
            attempt()
        assert caught.value.where == "metadata.content"
    assert sums(ops.repage(latent, 2)) == [4560.0, 1128.0]


def test_fuse_takes_heads_of_other_width_but_not_other_tensors() -> None:
    key, value = worked_example(), worked_example(kv_role="value", page_pool=POOL[..., :3])
    fused = ops.fuse(key, value)
    assert (fused.kv_role, fused.head_dim, fused.metadata) == ("fused", 11, {"key_dim": 8})
    for other in (
        value.replace(page_pool=value.page_pool.astype(np.float32)),
        value.replace(layer_index=None),
        value.replace(kv_role="key"),
        value.replace(seq_lens=[5, 4]),
        ops.slice_heads(value, 0, 1),
    ):
        with pytest.raises(hw.MismatchError):
            ops.fuse(key, other)
    with pytest.raises(hw.MismatchError):
        ops.fuse(value, key)
