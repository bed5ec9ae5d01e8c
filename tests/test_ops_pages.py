"""compact, select, concat, suffix, scrub: exact results and edges. The laws stand in test_ops_laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from batches import sums, unknown_lens, worked_example

import hurray_wire as hw
from hurray_wire import ops

Array = npt.NDArray[Any]
POOL = np.arange(320, dtype=np.float16).reshape(5, 4, 2, 8)


def f32(values: Any) -> Array:
    return np.asarray(values, np.float32)


# compact, select, concat, suffix, scrub.


def test_compact_of_what_is_compact_is_itself() -> None:
    t = worked_example(page_pool=POOL[:2])
    small, pages = ops.compact(t, return_pages=True)
    assert small is t
    assert pages.tolist() == [0, 1]


def test_compact_keeps_the_order_of_first_use() -> None:
    t = hw.BlockPagedTensor(POOL, block_table=[4, 1, 4, 0], seq_ptr=[0, 2, 4], seq_lens=[8, 8], index_type="uint64")
    small, pages = ops.compact(t, return_pages=True)
    assert small.block_table.tolist() == [0, 1, 0, 2]
    assert pages.tolist() == [4, 1, 0]
    assert (small.page_pool == POOL[[4, 1, 0]]).all()
    assert small.layout.block_table_index_type == "uint64"


def test_page_zero_is_a_page_like_others() -> None:
    t = worked_example()
    assert ops.compact(t).num_pages == 2
    assert ops.suffix(t, 1).block_table.tolist() == [1]


def test_empty_batches() -> None:
    for pages in (0, 5):
        t = hw.BlockPagedTensor(POOL[:pages], block_table=[], seq_ptr=[0], seq_lens=[])
        for made in (ops.compact(t), ops.select(t, []), ops.suffix(t, 1), ops.scrub(t), ops.repage(t, 8)):
            assert (made.num_seqs, made.total_tokens) == (0, 0)
            assert hw.decode(hw.encode(made)) == made
        assert ops.concat([t, worked_example(layer_index=None)]).num_seqs == 2
        assert ops.dequantize(ops.quantize(t, "per_block", dtype="int8")).num_seqs == 0


def test_an_empty_sequence_between_two() -> None:
    t = hw.BlockPagedTensor(POOL, block_table=[0, 1], seq_ptr=[0, 1, 1, 2], seq_lens=[4, 0, 1])
    assert ops.repage(t, 2).seq_ptr.tolist() == [0, 2, 2, 3]
    assert ops.repage(t, 8).seq_ptr.tolist() == [0, 1, 1, 2]
    assert ops.select(t, [1, 2]).seq_lens.tolist() == [0, 1]  # type: ignore[union-attr]
    assert ops.suffix(t, 1).seq_lens.tolist() == [0, 0, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize("heads", [0, 2])
def test_pools_that_hold_nothing(heads: int) -> None:
    t = worked_example(page_pool=np.zeros((5, 4, heads, 8 if heads == 0 else 0), np.float16))
    made = [ops.compact(t), ops.select(t, [1]), ops.concat([t, t]), ops.repage(t, 2), ops.repage(t, 8), ops.scrub(t)]
    made += [ops.suffix(t, 1), ops.dequantize(t), ops.quantize(t, "per_tensor", dtype="int8")]
    for other in made:
        assert hw.decode(hw.encode(other)) == other
    ops.scatter(t, t.page_pool.copy(), [0, 1, 2], [0, 2, 3])


def test_select_names_what_is_no_sequence() -> None:
    t = worked_example()
    assert ops.select(t, range(2)).same_tokens(t)
    with pytest.raises(IndexError, match="sequence 2 of 2"):
        ops.select(t, [0, 2])
    with pytest.raises(hw.InvalidDescriptorError):
        ops.select(t, [-1])
    with pytest.raises(hw.InvalidDescriptorError):
        ops.select(t, np.array([True, False]))


def test_concat_of_views_of_one_pool_copies_nothing() -> None:
    t = worked_example()
    both = ops.concat([ops.select(t, [1]), ops.select(t, [0])])
    assert both.page_pool is t.page_pool
    assert both.block_table.tolist() == [0, 0, 1]
    assert ops.concat([t]) is t


def test_concat_moves_ids_behind_the_pools_before() -> None:
    t = worked_example()
    other = t.replace(page_pool=POOL + 1)
    three = ops.concat([t, other, t])
    assert three.num_pages == 10
    assert three.block_table.tolist() == [0, 1, 0, 5, 6, 5, 0, 1, 0]
    assert three.seq_ptr.tolist() == [0, 2, 3, 5, 6, 8, 9]


def test_concat_joins_metadata_by_sequence() -> None:
    a = worked_example(metadata={"seq_ids": ["a", "b"], "first_tokens": [4, 0], "model": "m", "x.y": 1, "x.z": 1})
    b = worked_example(metadata={"seq_ids": ["c", "d"], "model": "m", "x.y": 2})
    assert ops.concat([a, b]).metadata == {
        "seq_ids": ["a", "b", "c", "d"],
        "first_tokens": [4, 0, 0, 0],
        "model": "m",
        "x.z": 1,
    }
    nobody = hw.BlockPagedTensor(POOL, block_table=[], seq_ptr=[0], seq_lens=[], layer_index=3)
    assert ops.concat([a, nobody]).metadata == a.metadata


def test_concat_names_every_difference() -> None:
    t = worked_example(metadata={"model": "m", "seq_ids": ["a", "b"]})
    with pytest.raises(hw.MismatchError) as caught:
        ops.concat([t, t.replace(layer_index=4, kv_role="value")])
    assert [d.where for d in caught.value.differences] == ["tensors[1].kv_role", "tensors[1].layer_index"]
    for metadata in ({"model": "n", "seq_ids": ["c", "d"]}, {"model": "m"}):
        with pytest.raises(hw.MismatchError):
            ops.concat([t, t.replace(metadata=metadata)])
    with pytest.raises(ValueError, match="at least one"):
        ops.concat([])


def test_concat_of_other_constants_is_refused() -> None:
    pool = POOL.astype(np.int8)
    t = worked_example(page_pool=pool, quantization="per_tensor", scales=0.5)
    with pytest.raises(hw.MismatchError):
        ops.concat([t, t.replace(quantization=hw.PerTensorAffine(0.25))])
    scheme = hw.PerChannelAffine.symmetric(1, 3)
    t = worked_example(page_pool=pool, quantization=scheme, scales=f32([1, 2]))
    with pytest.raises(hw.MismatchError):
        ops.concat([t, t.replace(scales=f32([1, 3]))])


def test_concat_without_seq_lens_keeps_their_sum() -> None:
    both = ops.concat([unknown_lens(), worked_example(layer_index=None)])
    assert both.seq_lens is None
    assert both.total_tokens == 18


def test_suffix_counts_on_from_where_the_tensor_begins() -> None:
    t = worked_example(metadata={"first_tokens": [100, 2**70]})
    rest = ops.suffix(t, [1, 0])
    assert rest.metadata == {"first_tokens": [104, 2**70]}
    gone = ops.suffix(t, 9)
    assert gone.metadata == {"first_tokens": [106, 2**70 + 3]}
    assert gone.seq_lens.tolist() == [0, 0]  # type: ignore[union-attr]


def test_suffix_keeps_spare_pages_and_takes_any_integers() -> None:
    t = hw.BlockPagedTensor(POOL, block_table=[0, 1, 2], seq_ptr=[0, 3], seq_lens=[5])
    assert ops.suffix(t, np.array([2**64 - 1], np.uint64)).block_table.tolist() == [2]
    assert ops.suffix(t, np.int8(1)).block_table.tolist() == [1, 2]
    with pytest.raises(ValueError, match="2 entries"):
        ops.suffix(t, [1, 2])
    with pytest.raises(hw.InvalidDescriptorError):
        ops.suffix(t, -1)


def test_scrub_keeps_what_the_longest_user_of_a_page_has() -> None:
    pool = POOL.copy()
    pool[1, 2:] = 1234.0
    pool[2:] = 1234.0
    before = pool.copy()
    clean = ops.scrub(worked_example(page_pool=pool))
    assert (clean.page_pool[0] == POOL[0]).all()  # slot 3 is sequence 0's only
    assert (clean.page_pool[1, :2] == POOL[1, :2]).all()
    assert not clean.page_pool[1, 2:].any()
    assert not clean.page_pool[2:].any()
    assert (pool == before).all()
    assert sums(clean) == [4560.0, 1128.0]


def test_scrub_of_slots_that_end_inside_bytes() -> None:
    t = hw.BlockPagedTensor(
        np.full(4, 0xFF, np.uint8),
        block_table=[1, 0],
        seq_ptr=[0, 1, 2],
        seq_lens=[3, 1],
        dtype="int4",
        page_size=4,
        num_heads=1,
        head_dim=1,
    )
    assert ops.scrub(t).page_pool.tolist() == [0x0F, 0, 0xFF, 0x0F]
    assert ops.scrub(t) == hw.decode(hw.encode(t, scrub=True))


def test_scrub_of_what_is_owned_is_itself() -> None:
    t = hw.BlockPagedTensor(POOL, block_table=range(5), seq_ptr=[0, 5], seq_lens=[20])
    assert ops.scrub(t) is t
