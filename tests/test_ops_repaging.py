"""Other page sizes, and pages for tokens that had none: exact results and edges. The laws stand in test_ops_laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from batches import sums, tokens, worked_example

import hurray_wire as hw
from hurray_wire import ops
from hurray_wire.errors import Code

Array = npt.NDArray[Any]
POOL = np.arange(320, dtype=np.float16).reshape(5, 4, 2, 8)


def f32(values: Any) -> Array:
    return np.asarray(values, np.float32)


# The reports' case 5: other page sizes.


def test_repage_to_a_part() -> None:
    small = ops.repage(worked_example(), 2)
    assert small.seq_ptr.tolist() == [0, 3, 5]
    assert small.block_table.tolist() == [0, 1, 2, 0, 1]
    assert (small.page_pool == POOL.reshape(10, 2, 2, 8)).all()
    assert sums(small) == [4560.0, 1128.0]


def test_repage_to_a_multiple() -> None:
    large = ops.repage(worked_example(), 8)
    assert large.seq_ptr.tolist() == [0, 1, 2]
    assert large.page_size == 8
    assert sums(large) == [4560.0, 1128.0]
    assert float(large.gather(0)[5, 1, 7]) == 95.0
    assert float(large.gather(1)[2, 0, 0]) == 32.0
    assert not large.page_pool[1, 4:].any()


def test_repage_to_its_own_size_is_itself() -> None:
    t = worked_example()
    assert ops.repage(t, 4) is t


def test_repage_to_a_part_is_a_view_where_pages_lie_side_by_side() -> None:
    t = worked_example()
    assert np.shares_memory(ops.repage(t, 1).page_pool, t.page_pool)
    half = t.replace(page_pool=np.stack([POOL, -POOL], axis=1)[:, 1])
    small = ops.repage(half, 2)
    assert small.num_pages == 4  # the pages in use, two of two tokens each
    assert sums(small) == [-4560.0, -1128.0]


def test_merged_pages_are_shared_where_all_their_parts_are() -> None:
    ids = [7, 3, 9, 7, 3, 9, 11]
    pool = np.arange(12, dtype=np.int8).reshape(12, 1, 1, 1)
    t = hw.BlockPagedTensor(pool, block_table=ids, seq_ptr=[0, 3, 7], seq_lens=[3, 4])
    merged = ops.repage(t, 2)
    assert merged.block_table.tolist() == [0, 1, 0, 2]
    assert merged.page_pool.reshape(-1, 2).tolist() == [[7, 3], [9, 0], [9, 11]]


def test_repage_drops_spare_pages() -> None:
    t = hw.BlockPagedTensor(POOL, block_table=[4, 3, 2, 1], seq_ptr=[0, 2, 4], seq_lens=[1, 0])
    assert ops.repage(t, 2).block_table.tolist() == [8]
    assert ops.repage(t, 8).seq_ptr.tolist() == [0, 1, 1]


@pytest.mark.parametrize("tokens_in_last", [1, 15, 16])
def test_repage_by_way_of_the_common_divisor(tokens_in_last: int) -> None:
    pool = np.arange(96, dtype=np.int16).reshape(6, 16, 1, 1)
    t = hw.BlockPagedTensor(pool, block_table=[5, 2, 0, 5], seq_ptr=[0, 3, 4], seq_lens=[32 + tokens_in_last, 9])
    other = ops.repage(t, 24)
    assert tokens(other) == tokens(t)
    assert np.diff(other.seq_ptr).tolist() == [2, 1]
    assert ops.repage(other, 16).same_tokens(t)


def test_repage_keeps_shared_prefixes_through_the_common_divisor() -> None:
    pool = np.arange(64, dtype=np.int16).reshape(4, 16, 1, 1)
    t = hw.BlockPagedTensor(pool, block_table=[0, 1, 2, 0, 1, 3], seq_ptr=[0, 3, 6], seq_lens=[48, 48])
    assert ops.repage(t, 24).block_table.tolist() == [0, 1, 0, 2]


def test_ids_that_a_part_of_a_page_pushes_past_uint32() -> None:
    pool = np.broadcast_to(np.zeros((1, 1, 1, 1), np.int8), (2**31, 4, 1, 1))
    t = hw.BlockPagedTensor(pool, block_table=[2**31 - 1], seq_ptr=[0, 1], seq_lens=[4])
    assert t.layout.block_table_index_type == "uint32"
    small = ops.repage(t, 1)
    assert small.block_table.tolist() == list(range(2**33 - 4, 2**33))
    assert small.layout.block_table_index_type == "uint64"


@pytest.mark.parametrize("size", [0, -1, 1 << 32])
def test_page_sizes_that_are_none(size: int) -> None:
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        ops.repage(worked_example(), size)
    assert caught.value.code is Code.PAGE_SIZE
    with pytest.raises(TypeError):
        ops.repage(worked_example(), 2.0)  # type: ignore[arg-type]


def test_per_block_scales_need_a_power_of_two() -> None:
    t = worked_example(page_pool=POOL.astype(np.int8), quantization="per_block", scales=np.ones((5, 4), np.float32))
    assert ops.repage(t, 2).scales is not None
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        ops.repage(t, 3)
    assert caught.value.code is Code.QUANTIZATION_BLOCK


# Pages.


def test_paginate_is_a_view_where_pages_are_full() -> None:
    ragged = np.arange(48, dtype=np.float32).reshape(8, 2, 3)
    t = ops.paginate(ragged, [4, 0, 4], 2)
    assert np.shares_memory(t.page_pool, ragged)
    assert t.seq_ptr.tolist() == [0, 2, 2, 4]


@pytest.mark.parametrize("lens", [[1, 5, 3], [9], [0, 0, 9], [1] * 9, [8, 1]])
@pytest.mark.parametrize("order", ["C", "strided", "big"])
def test_paginate_ragged(lens: list[int], order: str) -> None:
    ragged = np.arange(9 * 6, dtype=">i4" if order == "big" else "<i4").reshape(9, 2, 3)
    source = np.stack([ragged, ragged], axis=1)[:, 1] if order == "strided" else ragged
    t = ops.paginate(source, lens, 4, layer_index=1, metadata={"model": "m"})
    assert np.concatenate([t.gather(seq) for seq in range(t.num_seqs)]).tolist() == ragged.tolist()
    assert ops.scrub(t) == t


def test_paginate_long_sequences() -> None:
    ragged = np.arange(5000 * 16, dtype=np.int32).reshape(5000, 2, 8)
    t = ops.paginate(ragged, [4999, 1], 16)
    assert (np.concatenate([t.gather(0), t.gather(1)]) == ragged).all()
    assert ops.scrub(t) == t


def test_paginate_packs_and_pages_scales() -> None:
    stored = np.arange(6, dtype=np.int8).reshape(3, 1, 2)
    t = ops.paginate(stored.view(np.uint8), [3], 2, dtype="int4", quantization="per_block", scales=f32([1, 2, 4]))
    assert t.dequantize(0).reshape(-1).tolist() == [0, 1, 4, 6, 16, 20]
    assert t.scales is not None
    assert t.scales.shape == (2, 2)
    with pytest.raises(hw.UnsupportedError) as caught:
        ops.paginate(stored[:, :, :1].view(np.uint8), [3], 1, dtype="int4")
    assert caught.value.code is Code.PACKED_POOL


def test_paginate_refuses() -> None:
    ragged = np.zeros((3, 1, 2), np.float16)
    for lens, code in (([1, 1], Code.SEQ_LENS_SUM), ([4, -1], Code.NEGATIVE_INDEX), ([1.5, 1.5], Code.NOT_INTEGER)):
        with pytest.raises(hw.InvalidDescriptorError) as caught:
            ops.paginate(ragged, lens, 4)
        assert caught.value.code is code
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        ops.paginate(ragged[0], [1], 4)
    assert caught.value.code is Code.RANK
