"""Into somebody's pool: what is written, what is left alone, what is refused before anything is written."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from batches import worked_example

import hurray_wire as hw
from hurray_wire import ops
from hurray_wire.errors import Code

Array = npt.NDArray[Any]
FILL = 99.0


def receiver(page_size: int, pages: int = 6, dtype: Any = np.float16) -> Array:
    return np.full((pages, page_size, 2, 8), FILL, dtype)


def read(pool: Array, table: list[int], start: int, stop: int) -> Array:
    """Tokens start to stop of the sequence whose pages these are."""
    return pool[table].reshape(-1, *pool.shape[2:])[start:stop]


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("first", [0, 1, 4, [3, 0], [0, 8]])
def test_any_page_size_and_position(page_size: int, first: Any) -> None:
    t = worked_example()
    firsts = first if isinstance(first, list) else [first, first]
    counts = [-(-(n + start) // page_size) for n, start in zip((6, 3), firsts, strict=True)]
    pool = receiver(page_size, pages=sum(counts) + 2)
    table = np.random.default_rng(0).permutation(len(pool))[: sum(counts)]
    ptr = [0, counts[0], sum(counts)]
    ops.scatter(t, pool, table, ptr, first_tokens=first)
    for seq in range(2):
        mine = table[ptr[seq] : ptr[seq + 1]].tolist()
        end = firsts[seq] + (6, 3)[seq]
        assert (read(pool, mine, firsts[seq], end) == t.gather(seq)).all()
        assert (read(pool, mine, 0, firsts[seq]) == FILL).all()
        assert (read(pool, mine, end, page_size * counts[seq]) == FILL).all()
    others = sorted(set(range(len(pool))) - set(table.tolist()))
    assert (pool[others] == FILL).all()


def test_shared_pages_may_be_shared_there_too() -> None:
    pool = receiver(4)
    ops.scatter(worked_example(), pool, [5, 2, 5], [0, 2, 3])
    assert (pool[5] == worked_example().page_pool[0]).all()
    assert (pool[2, :2] == worked_example().page_pool[1, :2]).all()
    assert (pool[2, 2:] == FILL).all()
    assert (pool[[0, 1, 3, 4]] == FILL).all()


def test_two_tokens_for_one_slot_are_refused_before_the_first_write() -> None:
    t = worked_example()
    for table, ptr, first in (
        ([5, 5, 2], [0, 2, 3], 0),
        ([5, 2, 2], [0, 2, 3], 0),
        ([5, 2, 4, 5], [0, 3, 4], [1, 0]),
        ([5, 2, 1, 5], [0, 3, 4], [4, 0]),
    ):
        pool = receiver(4)
        if table == [5, 2, 1, 5]:  # page 5 lies before the first sequence's first token
            ops.scatter(t, pool, table, ptr, first_tokens=first)
            continue
        with pytest.raises(hw.InvalidDescriptorError, match="two tokens") as caught:
            ops.scatter(t, pool, table, ptr, first_tokens=first)
        assert caught.value.code is Code.PAGE_ID
        assert (pool == FILL).all()


def test_a_page_that_a_sequence_names_twice() -> None:
    pool = np.arange(12, dtype=np.float16).reshape(3, 4, 1, 1)
    t = hw.BlockPagedTensor(pool, block_table=[2, 2, 0, 2], seq_ptr=[0, 3, 4], seq_lens=[12, 4])
    target = np.zeros((5, 4, 1, 1), np.float16)
    ops.scatter(t, target, [1, 1, 3, 4], [0, 3, 4])
    assert target.reshape(5, 4).tolist() == [[0] * 4, [8, 9, 10, 11], [0] * 4, [0, 1, 2, 3], [8, 9, 10, 11]]


@pytest.mark.parametrize(
    "way", ["key half", "heads first", "every second head", "reversed", "other order", "wide rows"]
)
def test_strided_pools(way: str) -> None:
    t = worked_example()
    whole = np.full((6, 2, 4, 4, 16), FILL, np.float16)
    pool = {
        "key half": whole[:, 1, :, :2, :8].copy()[:, None].repeat(2, 1)[:, 1],
        "heads first": np.full((6, 2, 4, 8), FILL, np.float16).swapaxes(1, 2),
        "every second head": whole[:, 0, :, ::2, :8],
        "reversed": receiver(4)[::-1],
        "other order": receiver(4, dtype=">f2"),
        "wide rows": whole[:, 0, :, :2, 3:11],
    }[way]
    ops.scatter(t, pool, [5, 2, 4], [0, 2, 3])
    assert (read(pool, [5, 2], 0, 6) == t.gather(0)).all()
    assert (read(pool, [4], 0, 3) == t.gather(1)).all()
    assert (pool[[0, 1, 3]] == FILL).all()
    assert (pool[4, 3] == FILL).all()


def test_the_other_half_of_a_pool_of_keys_and_values_is_left_alone() -> None:
    whole = np.full((6, 2, 4, 2, 8), FILL, np.float16)
    ops.scatter(worked_example(), whole[:, 0], [5, 2, 4], [0, 2, 3])
    assert (whole[:, 1] == FILL).all()
    assert (read(whole[:, 0], [5, 2], 0, 6) == worked_example().gather(0)).all()


def test_large_pages_one_by_one() -> None:
    rng = np.random.default_rng(1)
    pool = rng.standard_normal((40, 16, 8, 64)).astype(np.float32)
    t = hw.BlockPagedTensor(pool, block_table=rng.permutation(40), seq_ptr=[0, 20, 40], seq_lens=[320, 301])
    target = np.zeros_like(pool)
    table = rng.permutation(40)
    ops.scatter(t, target, table, [0, 20, 40])
    for seq in range(2):
        assert (read(target, table[20 * seq : 20 * seq + 20].tolist(), 0, len(t.gather(seq))) == t.gather(seq)).all()


def test_pages_that_move_within_their_own_pool() -> None:
    pool = np.arange(12, dtype=np.float16).reshape(6, 2, 1, 1)
    t = hw.BlockPagedTensor(pool, block_table=[0, 1, 2], seq_ptr=[0, 3], seq_lens=[6])
    ops.scatter(t, pool, [1, 2, 3], [0, 3])
    assert pool.reshape(-1).tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 8, 9, 10, 11]


def test_sequences_of_other_lengths_in_other_pools_cross_the_wire_first() -> None:
    t = worked_example()
    pool = receiver(16, pages=3)
    ops.scatter(hw.decode(hw.encode(ops.suffix(t, [1, 0]))), pool, [2, 0], [0, 1, 2], first_tokens=[4, 0])
    assert (pool[2, 4:6] == t.gather(0)[4:]).all()
    assert (pool[2, :4] == FILL).all()
    assert (pool[0, :3] == t.gather(1)).all()


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"dtype": ml_dtypes.bfloat16}, "dtype"),
        ({"dtype": np.uint16}, "dtype"),
        ({"shape": (6, 4, 1, 8)}, "num_heads"),
        ({"shape": (6, 4, 2, 9)}, "head_dim"),
        ({"dtype": ml_dtypes.float8_e4m3fnuz}, "dtype"),
    ],
)
def test_other_pools_are_a_mismatch(changes: dict[str, Any], where: str) -> None:
    pool = np.zeros(changes.get("shape", (6, 4, 2, 8)), changes.get("dtype", np.float16))
    with pytest.raises(hw.MismatchError) as caught:
        ops.scatter(worked_example(), pool, [0, 1, 2], [0, 2, 3])
    assert [d.where for d in caught.value.differences] == [where]


@pytest.mark.parametrize(
    ("table", "ptr", "first", "code"),
    [
        ([0, 1, 6], [0, 2, 3], 0, Code.PAGE_ID),
        ([0, 1, -1], [0, 2, 3], 0, Code.NEGATIVE_INDEX),
        ([0, 1, 2], [0, 3, 3], 0, Code.SEQ_LENS_RANGE),
        ([0, 1, 2], [0, 2, 3], 3, Code.SEQ_LENS_RANGE),
        ([0, 1, 2], [0, 2, 3], 2**64 - 1, Code.SEQ_LENS_RANGE),
        ([0, 1, 2], [0, 2, 3], -1, Code.NEGATIVE_INDEX),
        ([0, 1, 2], [0, 2, 4], 0, Code.SEQ_PTR_END),
        ([0, 1, 2], [0, 4, 3], 0, Code.SEQ_PTR_ORDER),
        ([0, 1, 2], [1, 2, 3], 0, Code.SEQ_PTR_START),
        ([0.0, 1.0, 2.0], [0, 2, 3], 0, Code.NOT_INTEGER),
    ],
)
def test_tables_are_checked_before_the_first_write(table: Any, ptr: Any, first: int, code: Code) -> None:
    pool = receiver(4)
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        ops.scatter(worked_example(), pool, table, ptr, first_tokens=first)
    assert caught.value.code is code
    assert (pool == FILL).all()


def test_other_batches_and_pools_that_are_none() -> None:
    t = worked_example()
    with pytest.raises(hw.MismatchError):
        ops.scatter(t, receiver(4), [0, 1, 2], [0, 3])
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        ops.scatter(t, receiver(4)[0], [0, 1, 2], [0, 2, 3])
    assert caught.value.code is Code.RANK
    locked = receiver(4)
    locked.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        ops.scatter(t, locked, [0, 1, 2], [0, 2, 3])
    with pytest.raises(TypeError):
        ops.scatter(t, [[1.0]], [0, 1, 2], [0, 2, 3])
    with pytest.raises(TypeError, match="copy"):
        ops.scatter(t, Copies(), [0, 1, 2], [0, 2, 3])
    with pytest.raises(hw.InvalidDescriptorError):
        ops.scatter(t, np.zeros((6, 0, 2, 8), np.float16), [0, 1, 2], [0, 2, 3])


class Copies:
    """An array-like that hands out copies."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return receiver(4)


def test_sequences_without_tokens_ask_for_nothing() -> None:
    t = hw.BlockPagedTensor(worked_example().page_pool, block_table=[0], seq_ptr=[0, 0, 1], seq_lens=[0, 1])
    pool = receiver(4)
    ops.scatter(t, pool, [3], [0, 0, 1], first_tokens=[77, 3])
    assert (pool[3, 3] == t.page_pool[0, 0]).all()
    assert (pool[3, :3] == FILL).all()
    ops.scatter(ops.select(t, [0]), pool[:0], [], [0, 0])


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn"])
def test_torch_pools(name: str) -> None:
    torch = pytest.importorskip("torch")
    pool = torch.zeros((6, 2, 4, 8), dtype=getattr(torch, name)).transpose(1, 2)
    source = torch.arange(320, dtype=torch.float32).reshape(5, 4, 2, 8).to(getattr(torch, name))
    t = hw.BlockPagedTensor(source, block_table=[0, 1, 0], seq_ptr=[0, 2, 3], seq_lens=[6, 3])
    table, ptr = torch.tensor([5, 2, 4], dtype=torch.int32), torch.tensor([0, 2, 3])
    ops.scatter(t, pool, table, ptr, first_tokens=torch.tensor([0, 1]))
    assert (hw.from_torch(pool)[4, 1:] == t.gather(1)).all()
    assert "torch" in sys.modules
