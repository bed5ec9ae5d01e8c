"""SGLang: slots a token, pages verified, the dummy page never written to."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hurray_wire as hw
from hurray_wire import engines
from hurray_wire.errors import Code

SLOTS, HEADS, DIM = 24, 2, 3
KEYS = np.arange(SLOTS * HEADS * DIM, dtype=np.float32).reshape(SLOTS, HEADS, DIM)
VALUES = -KEYS[..., :2] - 1  # v_head_dim of its own


def table(rows: dict[int, list[int]]) -> Any:
    filled = np.full((4, 10), -7, np.int32)
    filled[0] = 0
    for row, slots in rows.items():
        filled[row, : len(slots)] = slots
    return filled


def read(rows: dict[int, list[int]], ids: Any, lens: Any, page_size: int, **options: Any) -> Any:
    return engines.from_sglang(KEYS, VALUES, table(rows), ids, lens, page_size=page_size, **options)


def test_page_size_one() -> None:
    key, value = read({2: [5, 23, 1], 1: [5, 7]}, [2, 1], [3, 2], 1, layer_index=9)
    assert (key.page_size, key.num_pages, key.layer_index, value.kv_role) == (1, 4, 9, "value")
    assert key.block_table.tolist() == [0, 1, 2, 0, 3]
    assert np.array_equal(key.gather(0), KEYS[[5, 23, 1]])
    assert np.array_equal(value.gather(1), VALUES[[5, 7]])


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8])
def test_pages_of_four(length: int) -> None:
    slots = [20, 21, 22, 23, 4, 5, 6, 7][:length]
    key, value = read({3: slots, 1: []}, [1, 3], [0, length], 4)
    assert key.seq_ptr.tolist() == [0, 0, -(-length // 4)]
    assert np.array_equal(key.gather(1), KEYS[slots])
    assert np.array_equal(value.gather(1), VALUES[slots])


@pytest.mark.parametrize(
    ("rows", "ids", "lens", "page_size", "code", "where"),
    [
        ({1: [4, 5, 6, 8]}, [1], [4], 4, Code.PAGE_ID, "req_to_token[1, 3]"),
        ({1: [5, 6, 7, 8]}, [1], [4], 4, Code.PAGE_ID, "req_to_token[1, 0]"),
        ({1: [4, 5, 6, 7, 10]}, [1], [5], 4, Code.PAGE_ID, "req_to_token[1, 4]"),
        ({1: [5, 24]}, [1], [2], 1, Code.PAGE_ID, "req_to_token[1, 1]"),
        ({1: [5]}, [1], [2], 1, Code.NEGATIVE_INDEX, "req_to_token[1, 1]"),
        ({}, [4], [1], 1, Code.PAGE_ID, "req_ids[0]"),
        ({}, [0, -1], [0, 0], 1, Code.NEGATIVE_INDEX, "req_ids[1]"),
        ({}, [0], [11], 1, Code.SEQ_LENS_RANGE, "seq_lens[0]"),
        ({}, [0], [1, 1], 1, Code.SEQ_LENS_COUNT, "seq_lens"),
        ({}, [0], [-1], 1, Code.NEGATIVE_INDEX, "seq_lens[0]"),
        ({}, [0], [1], 7, Code.PAGE_SIZE, "key_pool"),
        ({}, [0], [1], 0, Code.PAGE_SIZE, "key_pool"),
    ],
)
def test_rows_that_are_no_pages(
    rows: dict[int, list[int]], ids: Any, lens: Any, page_size: int, code: Code, where: str
) -> None:
    with pytest.raises(hw.InvalidDescriptorError) as error:
        read(rows, ids, lens, page_size)
    assert (error.value.code, error.value.where) == (code, where)


def test_pools_of_another_shape() -> None:
    for pools, code, where in (
        ((KEYS[:, 0], VALUES), Code.RANK, "key_pool"),
        ((KEYS.reshape(6, 2, 4, 3), VALUES), Code.RANK, "key_pool"),
        ((KEYS, VALUES[:20]), Code.NUM_PAGES, "value_pool"),
    ):
        with pytest.raises(hw.InvalidDescriptorError) as error:
            engines.from_sglang(*pools, table({}), [0], [1], page_size=4)
        assert (error.value.code, error.value.where) == (code, where)
    for request in (np.zeros(4, np.int32), np.zeros((1, 2, 3), np.int32)):
        with pytest.raises(hw.InvalidDescriptorError) as error:
            engines.from_sglang(KEYS, VALUES, request, [0], [1], page_size=4)
        assert (error.value.code, error.value.where) == (Code.RANK, "req_to_token")
    with pytest.raises(hw.InvalidDescriptorError) as error:
        engines.from_sglang(KEYS, VALUES, np.zeros((1, 4)), [0], [1], page_size=4)
    assert (error.value.code, error.value.where) == (Code.NOT_INTEGER, "req_to_token")
    with pytest.raises(hw.UnsupportedError, match="view the array as its type") as unnamed:
        engines.from_sglang(KEYS.view(np.uint8), VALUES.view(np.uint8), table({}), [0], [1], page_size=4)
    assert unnamed.value.code is Code.DTYPE


def test_a_layer_that_is_a_strided_view() -> None:
    both = np.stack([KEYS, KEYS + 1000], axis=1)  # [slots, 2, heads, dim]: the slot stride is twice a row
    for page_size in (1, 4):
        key, value = engines.from_sglang(both[:, 0], both[:, 1], table({1: [8, 9, 10]}), [1], [3], page_size=page_size)
        assert np.array_equal(key.gather(0), KEYS[8:11])
        assert np.array_equal(value.gather(0), KEYS[8:11] + 1000)


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_round_trips(page_size: int) -> None:
    rows = {1: [8, 9, 10, 11, 20, 21, 22], 2: [8, 9, 10, 11, 4]}
    source = read(rows, [2, 3, 1], [5, 0, 7], page_size)
    mine = np.zeros((16, HEADS, DIM), np.float32), np.zeros((16, HEADS, 2), np.float32)
    free = np.random.default_rng(1).permutation(np.arange(1, 16 // page_size))[: source[0].num_pages]
    slots = engines.to_sglang(*source, key_pool=mine[0], value_pool=mine[1], page_ids=free)
    assert slots.dtype == np.int32
    assert slots.shape == (3, 7)
    assert slots[0, :4].tolist() == slots[2, :4].tolist()  # the prefix is shared there, too
    assert not slots[0, 5:].any()
    assert not slots[1].any()
    assert np.array_equal(mine[0][slots[2]], KEYS[rows[1]])
    assert np.array_equal(mine[1][slots[0, :5]], VALUES[rows[2]])
    assert not mine[0][:page_size].any()
    again = engines.from_sglang(*mine, slots, [0, 1, 2], [5, 0, 7], page_size=page_size)
    assert again == source


@pytest.mark.parametrize(
    ("page_ids", "code", "where"),
    [
        ([1, 0], Code.PAGE_ID, "page_ids[1]"),
        ([2, 2], Code.PAGE_ID, "page_ids[1]"),
        ([1, 6], Code.PAGE_ID, "page_ids[1]"),
        ([-1, 1], Code.NEGATIVE_INDEX, "page_ids[0]"),
        ([1], Code.NUM_PAGES, "page_ids"),
    ],
)
def test_pages_that_sglang_cannot_give(page_ids: list[int], code: Code, where: str) -> None:
    source = read({1: [20, 21, 22, 23, 4]}, [1], [5], 4)
    blank = np.zeros_like(KEYS), np.zeros_like(VALUES)
    with pytest.raises(hw.InvalidDescriptorError) as error:
        engines.to_sglang(*source, key_pool=blank[0], value_pool=blank[1], page_ids=page_ids)
    assert (error.value.code, error.value.where) == (code, where)
    assert not blank[0].any()


def test_unused_pages_are_not_written() -> None:
    pool = KEYS.reshape(6, 4, 2, 3)
    key = hw.BlockPagedTensor(pool, block_table=[5, 0, 1], seq_ptr=[0, 3], seq_lens=[5])  # page 1 is spare
    value = key.replace(kv_role="value")
    mine = np.zeros((32, 2, 3), np.float32), np.zeros((32, 2, 3), np.float32)
    slots = engines.to_sglang(key, value, key_pool=mine[0], value_pool=mine[1], page_ids=[7, 6, 5, 4, 3, 2])
    assert slots.tolist() == [[8, 9, 10, 11, 28]]
    assert np.array_equal(mine[0][[8, 9, 10, 11]], pool[5])
    assert not mine[0][12:28].any()


def test_fp8_pools_of_bytes_take_fp8() -> None:
    rows = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
    keys = rows.view(ml_dtypes.float8_e4m3fn)
    key, value = engines.from_sglang(keys, keys, np.array([[2, 3]]), [0], [2], page_size=2)
    mine = np.zeros((4, 2, 3), np.uint8), np.zeros((4, 2, 3), np.uint8)
    engines.to_sglang(key, value, key_pool=mine[0], value_pool=mine[1], page_ids=[1])
    assert np.array_equal(mine[0][2:], rows[2:])


@given(st.lists(st.lists(st.integers(1, 5), max_size=2), max_size=4), st.integers(0, 3), st.data())
def test_slots_mean_what_the_loops_say(batch: list[list[int]], short: int, data: st.DataObject) -> None:
    lens = [max(0, 4 * len(pages) - short) for pages in batch]
    rows = np.full((len(batch) + 1, 8), data.draw(st.sampled_from([-1, 0, 999])), np.int64)
    for row, pages in zip(rows[1:], batch, strict=True):
        row[: 4 * len(pages)] = [page * 4 + i for page in pages for i in range(4)]
    key, _ = engines.from_sglang(KEYS, KEYS, rows, range(1, len(batch) + 1), lens, page_size=4)
    for seq, (row, length) in enumerate(zip(rows[1:], lens, strict=True)):
        assert np.array_equal(key.gather(seq), KEYS[row[:length]])
