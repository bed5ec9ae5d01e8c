"""Block tables as engines hold them: only what holds tokens counts, and there nothing is let through."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_engines_layouts import tokens

import hurray_wire as hw
from hurray_wire import engines
from hurray_wire.errors import Code

POOL = np.arange(5 * 4 * 2 * 3, dtype=np.float32).reshape(5, 4, 2, 3)


def read(block_table: Any, seq_lens: Any, **options: Any) -> hw.BlockPagedTensor:
    """The keys of a cache whose pages are POOL's."""
    return engines.from_vllm((POOL, POOL), block_table, seq_lens, axes="PSHD", **options)[0]


def refusal(block_table: Any, seq_lens: Any) -> tuple[Code, str, str]:
    with pytest.raises(hw.InvalidDescriptorError) as error:
        read(block_table, seq_lens)
    return error.value.code, error.value.where, error.value.message


def test_b6_padding_and_page_zero() -> None:
    table = np.array([[0, 1, -1], [2, -1, -1]], "i4")
    t = read(table, [6, 3], layer_index=3)
    assert t.block_table.tolist() == [0, 1, 2]
    assert t.block_table.dtype == np.uint32
    assert t.seq_ptr.tolist() == [0, 2, 3]
    assert np.array_equal(t.page_pool, POOL[:3])  # page 0 is a page like others
    code, where, message = refusal(table, [9, 3])
    assert (code, where) == (Code.NEGATIVE_INDEX, "block_table[0, 2]")
    assert "-1" in message
    with pytest.raises(hw.InvalidDescriptorError):
        hw.BlockPagedTensor(POOL, block_table=np.array([0, -1, 0], "i4"), seq_ptr=[0, 2, 3], seq_lens=[6, 3])
    assert b"\xff\xff\xff\xff" not in hw.encode(t)


@pytest.mark.parametrize("tail", [4, 0, -1, 5, 2**31 - 1, -(2**31), 3], ids=str)
def test_what_stands_behind_the_live_pages_is_not_looked_at(tail: int) -> None:
    table = np.full((3, 6), tail, np.int32)
    table[0, :2], table[2, :1] = (3, 1), (1,)
    t = read(table, [5, 0, 4])  # an empty sequence in the middle
    assert (t.block_table.tolist(), t.seq_ptr.tolist(), t.num_pages) == ([0, 1, 1], [0, 2, 2, 3], 2)
    assert np.array_equal(t.page_pool, POOL[[3, 1]])


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8])
def test_the_last_page_may_be_partly_full(length: int) -> None:
    t = read([[3, 1]], [length])
    assert t.block_table.tolist() == [0, 1][: -(-length // 4)]
    assert t.gather(0).tolist() == tokens(POOL, [3, 1], length)


def test_pages_are_shared_and_repeated() -> None:
    t = read([[2, 2, 0], [2, 4, 4]], [12, 4])
    assert (t.block_table.tolist(), t.num_pages) == ([0, 0, 1, 0], 2)
    assert t.gather(0).tolist() == tokens(POOL, [2, 2, 0], 12)
    t = read([[0, 1], [0, 9]], [6, 3])  # page 0: four tokens for one, three for the other
    assert (t.block_table.tolist(), t.seq_lens.tolist()) == ([0, 1, 0], [6, 3])  # type: ignore[union-attr]


@pytest.mark.parametrize("rows", [[], np.zeros((0, 7), np.int32)], ids=["list", "array"])
def test_an_empty_batch(rows: Any) -> None:
    t = read(rows, [])
    assert (t.num_seqs, t.num_pages, t.seq_ptr.tolist()) == (0, 0, [0])
    assert hw.decode(hw.encode(t)) == t
    t = read(rows, np.zeros(0, np.int64), pages="all")
    assert (t.num_seqs, t.num_pages) == (0, 5)


@pytest.mark.parametrize("kind", ["i4", "u4", "i8", "u8", "i2", "u1"])
def test_tables_of_any_integer_type(kind: str) -> None:
    t = read(np.array([[3, 1, 7], [4, 7, 7]], kind), np.array([8, 2], kind))
    assert (t.block_table.tolist(), t.seq_lens.tolist()) == ([0, 1, 2], [8, 2])  # type: ignore[union-attr]


def test_rows_may_be_lists_of_any_lengths() -> None:
    t = read([[3, 1], [], np.array([4, 0, 3], np.uint16), (2,)], [8, 0, 9, 1])
    assert t.block_table.tolist() == [0, 1, 2, 3, 0, 4]
    assert refusal([[3], [3, 1]], [5, 5])[1:] == ("seq_lens[0]", "is 5, but row 0 of block_table has 1 pages of 4")
    assert refusal([[3, 2**64 - 1]], [5])[:2] == (Code.PAGE_ID, "block_table[0, 1]")


@pytest.mark.parametrize(
    ("block_table", "seq_lens", "code", "where"),
    [
        ([[0, 1], [5, 1]], [8, 1], Code.PAGE_ID, "block_table[1, 0]"),
        ([[0, 1], [2, -7]], [8, 8], Code.NEGATIVE_INDEX, "block_table[1, 1]"),
        (np.array([[2**31, 0]], np.uint32), [1], Code.PAGE_ID, "block_table[0, 0]"),
        (np.array([[2**63 + 1, 0]], np.uint64), [1], Code.PAGE_ID, "block_table[0, 0]"),
        ([[0, 1]], [9], Code.SEQ_LENS_RANGE, "seq_lens[0]"),
        ([[0], [1]], [4, 2**62], Code.SEQ_LENS_RANGE, "seq_lens[1]"),
        ([[0], [1]], np.array([4, 2**64 - 1], np.uint64), Code.SEQ_LENS_RANGE, "seq_lens[1]"),
        ([[0], [1]], [4, -1], Code.NEGATIVE_INDEX, "seq_lens[1]"),
        ([[0], [1]], [4], Code.SEQ_LENS_COUNT, "seq_lens"),
        ([[0], [1]], [4.0, 1.0], Code.NOT_INTEGER, "seq_lens[0]"),
        (np.zeros((1, 2)), [4], Code.NOT_INTEGER, "block_table"),
        (np.zeros(2, np.int32), [4, 4], Code.NOT_INTEGER, "block_table"),
        ([[0], [True]], [4, 4], Code.NOT_INTEGER, "block_table[1][0]"),
    ],
)
def test_what_cannot_be_is_named(block_table: Any, seq_lens: Any, code: Code, where: str) -> None:
    assert refusal(block_table, seq_lens)[:2] == (code, where)


def test_an_error_says_how_many_more_there_are() -> None:
    code, where, message = refusal([[0, -1, -1, 9]], [16])
    assert (code, where) == (Code.NEGATIVE_INDEX, "block_table[0, 1]")
    assert message.endswith("and 1 more")


@given(
    st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 4), min_size=3, max_size=3)), max_size=6),
    st.integers(-3, 9),
)
def test_rows_mean_what_the_loops_say(batch: list[tuple[int, list[int]]], tail: int) -> None:
    table = np.full((len(batch), 5), tail, np.int64)
    for row, (_, ids) in zip(table, batch, strict=True):
        row[:3] = ids
    t = read(table, [length for length, _ in batch])
    order: list[int] = []
    for length, ids in batch:
        order += [page for page in dict.fromkeys(ids[: -(-length // 4)]) if page not in order]
    assert np.array_equal(t.page_pool, POOL[order])
    for seq, (length, ids) in enumerate(batch):
        assert t.gather(seq).tolist() == tokens(POOL, ids, length)
        assert [order[i] for i in t.pages(seq)] == ids[: -(-length // 4)]
    rows = engines.padded_block_table(t, width=5, fill=-1)
    assert read_back(rows, t) == [t.gather(seq).tolist() for seq in range(t.num_seqs)]


def read_back(rows: npt.NDArray[np.int32], t: hw.BlockPagedTensor) -> list[Any]:
    assert t.seq_lens is not None
    return [tokens(t.page_pool, row.tolist(), int(n)) for row, n in zip(rows, t.seq_lens, strict=True)]


# The way back.


def test_slots_and_padded_rows() -> None:
    t = hw.BlockPagedTensor(POOL, block_table=[4, 2, 3, 0], seq_ptr=[0, 3, 3, 4], seq_lens=[5, 0, 2])
    slots = engines.slot_mapping(t)
    assert slots.dtype == np.int64
    assert slots.tolist() == [16, 17, 18, 19, 8, 0, 1]
    rows = engines.padded_block_table(t)  # page 3 is allocated ahead: it holds nothing
    assert rows.dtype == np.int32
    assert rows.tolist() == [[4, 2], [0, 0], [0, 0]]
    assert engines.padded_block_table(t, width=4, fill=-1).tolist() == [[4, 2, -1, -1], [-1] * 4, [0, -1, -1, -1]]
    with pytest.raises(ValueError, match="sequence 0 has 2 pages"):
        engines.padded_block_table(t, width=1)
    empty = hw.BlockPagedTensor(POOL, block_table=[], seq_ptr=[0], seq_lens=[])
    assert engines.padded_block_table(empty).shape == (0, 0)
    assert engines.slot_mapping(empty).shape == (0,)


def test_slots_beyond_32_bits() -> None:
    pool = np.broadcast_to(np.zeros((1, 16, 1, 1), np.int8), (2**29, 16, 1, 1))
    t = hw.BlockPagedTensor(pool, block_table=[2**29 - 1], seq_ptr=[0, 1], seq_lens=[2])
    assert engines.slot_mapping(t).tolist() == [2**33 - 16, 2**33 - 15]


def test_ids_that_int32_does_not_hold_are_refused() -> None:
    pool = np.broadcast_to(np.zeros((1, 1, 1, 1), np.int8), (2**31 + 2, 1, 1, 1))
    key = hw.BlockPagedTensor(pool, block_table=[1, 2**31 - 1, 2**31], seq_ptr=[0, 3], seq_lens=[3])
    value = key.replace(kv_role="value")
    for act in (
        lambda: engines.padded_block_table(key),
        lambda: engines.to_flashinfer(key, value, axes="P2SHD"),
        lambda: engines.to_vllm(key, value, axes="P2SHD"),
    ):
        with pytest.raises(hw.UnsupportedError, match="2147483648") as error:
            act()
        assert (error.value.code, error.value.where) == (Code.INDEX_TYPE, "block_table[0, 2]")
    assert engines.padded_block_table(key.replace(seq_lens=[2], total_tokens=2)).tolist() == [[1, 2**31 - 1]]


def test_unknown_lengths_are_said() -> None:
    t = hw.BlockPagedTensor(POOL, block_table=[0, 1, 2], seq_ptr=[0, 2, 3], total_tokens=9)
    for act in (engines.slot_mapping, engines.padded_block_table):
        with pytest.raises(hw.UnsupportedError) as error:
            act(t)
        assert error.value.code is Code.SEQ_LENS_UNKNOWN
