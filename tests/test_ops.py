"""What all operations have in common: what they refuse, odd element types, memory; and the maths beneath."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from batches import float_block, packed_example, tokens, unknown_lens, unsound, worked_example

import hurray_wire as hw
from hurray_wire import indices, ops
from hurray_wire.errors import Code
from hurray_wire.ops import blocks, spans

# What every operation refuses.

UNARY: dict[str, Callable[[hw.BlockPagedTensor], Any]] = {
    "compact": ops.compact,
    "select": lambda t: ops.select(t, [0]),
    "concat": lambda t: ops.concat([t, t]),
    "repage": lambda t: ops.repage(t, t.page_size * 2),
    "suffix": lambda t: ops.suffix(t, 1),
    "slice_heads": lambda t: ops.slice_heads(t, 0, 1),
    "merge_heads": lambda t: ops.merge_heads([t, t]),
    "split_fused": lambda t: ops.split_fused(t.replace(kv_role="fused"), 1) if not t.violations else ops.split_fused(t),
    "scrub": ops.scrub,
    "scatter": lambda t: ops.scatter(t, np.zeros((5, 4, 2, 8), np.float16), [0, 1, 2], [0, 2, 3]),
    "quantize": lambda t: ops.quantize(t, "per_tensor", dtype="int8"),
    "dequantize": ops.dequantize,
}


@pytest.mark.parametrize("name", UNARY)
def test_violations_are_refused(name: str) -> None:
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        UNARY[name](unsound())
    assert caught.value.code is Code.PAGED_AXIS


@pytest.mark.parametrize("name", UNARY)
def test_pages_that_end_inside_bytes_are_refused(name: str) -> None:
    with pytest.raises(hw.UnsupportedError) as caught:
        UNARY[name](packed_example(whole=False))
    assert caught.value.code is Code.PACKED_POOL


@pytest.mark.parametrize("name", ["select", "repage", "suffix", "scrub", "scatter"])
def test_unknown_seq_lens_are_named(name: str) -> None:
    with pytest.raises(hw.UnsupportedError) as caught:
        UNARY[name](unknown_lens())
    assert caught.value.code is Code.SEQ_LENS_UNKNOWN


@pytest.mark.parametrize("name", ["compact", "slice_heads", "merge_heads", "concat", "dequantize", "quantize"])
def test_what_does_not_need_seq_lens_does_without(name: str) -> None:
    assert UNARY[name](unknown_lens()).seq_lens is None


@pytest.mark.parametrize("name", ["compact", "repage", "slice_heads", "merge_heads", "split_fused", "dequantize"])
def test_scales_that_cannot_follow_are_refused(name: str) -> None:
    with pytest.raises(hw.UnsupportedError) as caught:
        UNARY[name](float_block())
    assert caught.value.code is Code.SCHEME
    assert ops.select(float_block(), [1]).quantization == float_block().quantization
    with pytest.raises(hw.UnsupportedError):
        ops.concat([float_block(), float_block()])


def test_packed_pools_of_whole_pages() -> None:
    t = packed_example(whole=True)
    held = tokens(t)
    assert tokens(ops.compact(t)) == held
    assert tokens(ops.concat([t, ops.compact(t)])) == held * 2
    assert tokens(ops.select(t, [1])) == held[1:]
    assert tokens(ops.suffix(t, 1)) == [held[0][3:], []]
    assert tokens(ops.scrub(t)) == held
    assert tokens(ops.repage(t, 1)) == tokens(ops.repage(t, 4)) == held
    odd = hw.BlockPagedTensor(
        t.page_pool, block_table=[0], seq_ptr=[0, 1], seq_lens=[2], dtype="int4", page_size=2, num_heads=3, head_dim=1
    )
    attempts: list[Callable[[], Any]] = [
        lambda: ops.repage(odd, 1),
        lambda: ops.repage(odd, 3),
        lambda: ops.slice_heads(odd, 0, 1),
    ]
    for attempt in attempts:
        with pytest.raises(hw.UnsupportedError) as caught:
            attempt()
        assert caught.value.code is Code.PACKED_POOL


def test_unnamed_and_private_types_are_moved_as_bytes() -> None:
    data = np.arange(64, dtype=np.uint8)
    sizes: dict[str, Any] = {"page_size": 2, "num_heads": 2, "head_dim": 1}
    quad = hw.BlockPagedTensor(data, block_table=[0], seq_ptr=[0, 1], seq_lens=[2], dtype="float128", **sizes)
    assert tokens(ops.merge_heads([ops.slice_heads(quad, 0, 1), ops.slice_heads(quad, 1, 2)])) == tokens(quad)
    own = hw.ExtensionType(24, is_float=False, is_signed=False)
    odd = hw.BlockPagedTensor(
        data[:60],
        block_table=[4, 0],
        seq_ptr=[0, 2],
        seq_lens=[3],
        dtype=hw.Dtype.private(0xF1),
        extension_type=own,
        **sizes,
    )
    assert tokens(ops.compact(odd)) == tokens(ops.repage(odd, 3)) == tokens(odd)
    pool = np.zeros((2, 3, 2, 1), "V3")
    ops.scatter(odd, pool, [1], [0, 1])
    assert pool[1].tobytes() == b"".join(tokens(odd)[0])


def test_statistics_go_with_the_values_they_were_of() -> None:
    t = worked_example(statistics=hw.Statistics(nnz=3))
    assert ops.compact(t).statistics == ops.repage(t, 2).statistics == ops.scrub(t).statistics == t.statistics
    for made in (ops.select(t, [0]), ops.suffix(t, 1), ops.concat([t, t]), ops.slice_heads(t, 0, 1)):
        assert made.statistics is None


# Index maths.


def test_first_use_of_few_pages_in_a_large_pool() -> None:
    table = np.array([10**6, 5, 10**6], np.uint32)
    for pages in (10**6 + 1, 4):
        ids, ranks = spans.first_use(table % pages if pages == 4 else table, pages)
        assert ranks.tolist() == [0, 1, 0]
        assert ids.size == 2


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
@pytest.mark.parametrize("pages", [3, 50_000, 150_000, 1_000_000])
def test_first_use_over_many_entries(pages: int, dtype: type) -> None:
    table: Any = np.random.default_rng(pages).integers(0, pages, 200_000).astype(dtype)
    found, expected = spans.first_use(table, pages), indices.first_use(table)
    assert [a.tolist() for a in found] == [a.tolist() for a in expected]
    assert found[1].dtype == table.dtype


def test_spans_over_many_entries() -> None:
    starts, counts = np.array([5, 0, 10**10, 7]), np.array([70_000, 0, 70_000, 1])
    expected = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, counts, strict=True)])
    assert (spans.spans(starts, counts) == expected).all()


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_marked_ranges(share: float) -> None:
    held = np.random.default_rng(4).random(1000) < share
    edges = np.flatnonzero(np.diff(np.concatenate(([0], held, [0]))))
    assert (spans.marked(edges[::2], edges[1::2] - edges[::2], 1000) == held).all()


@pytest.mark.parametrize("end", [1 << 31, (1 << 31) + 1])
@pytest.mark.parametrize("dtype", ["<u4", "<u8", ">u4", "i2", "i8"])
def test_signed_ids(dtype: str, end: int) -> None:
    ids = spans.signed(np.array([0, 5, 32767], dtype), end)
    assert ids.tolist() == [0, 5, 32767]
    assert ids.dtype.kind == "i"
    assert ids.itemsize == (4 if end <= 1 << 31 else 8)


@pytest.mark.parametrize("large", [1, 64, 1 << 14])
@pytest.mark.parametrize("order", ["neighbours", "ascending", "any", "sparse", "repeated"])
def test_blocks_move(order: str, large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "LARGE_BYTES", large)
    monkeypatch.setattr(blocks, "_RELEASED_BYTES", 100)
    monkeypatch.setattr(blocks, "_STEP_ENTRIES", 7)
    rng = np.random.default_rng(6)
    ids = {
        "neighbours": np.arange(3, 40),
        "ascending": np.flatnonzero(rng.random(60) < 0.8),
        "any": rng.permutation(60)[:50],
        "sparse": rng.permutation(60)[:9],
        "repeated": rng.integers(0, 60, 70),
    }[order]
    pool = rng.integers(0, 256, (60, 1, 1, 8), np.uint8)
    for to in (np.arange(5, 5 + ids.size), rng.permutation(90)[: ids.size]):
        target = rng.integers(0, 256, (90, 1, 1, 8), np.uint8)
        expected = target.copy()
        expected[to] = pool[ids]
        kind = np.int32 if large == 1 else np.int64
        blocks.move(blocks.Blocks(pool, 1, 8), ids.astype(kind), blocks.Blocks(target, 1, 8), to.astype(kind))
        assert (target == expected).all()


@pytest.mark.parametrize("rounds", [0, 1, 8])
def test_distinct_rows(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_ROUNDS", rounds)
    rng = np.random.default_rng(3)
    for count in (1, 2, 30, 100_000):
        rows = rng.integers(0, count, (500, 3))
        rows[:, 2] -= rows[:, 2] == 0  # padding
        firsts, ranks = spans.distinct_rows(rows, count)
        seen: dict[tuple[int, ...], int] = {}
        expected = [seen.setdefault(tuple(row), len(seen)) for row in rows.tolist()]
        assert ranks.tolist() == expected
        assert (rows if firsts is None else rows[firsts]).tolist() == [list(row) for row in seen]


def test_results_are_aligned_and_writable() -> None:
    t = worked_example()
    made = [
        ops.compact(t),
        ops.concat([t, ops.compact(t)]),
        ops.repage(t, 8),
        ops.scrub(t),
        ops.fuse(t, t.replace(kv_role="value")),
    ]
    made += [ops.paginate(t.gather(0), [6], 4), ops.quantize(t, "per_tensor", dtype="int8"), ops.dequantize(t)]
    for other in made:
        assert other.page_pool.flags.writeable
        assert other.page_pool.ctypes.data % 64 == 0


def test_tokens_of_no_bytes_are_not_listed_without_end() -> None:
    pool = np.zeros((2, 2**32 - 2, 0, 1), np.int8)
    t = hw.BlockPagedTensor(pool, block_table=[0, 1, 0], seq_ptr=[0, 3], seq_lens=[3 * (2**32 - 2)])
    ops.scatter(t, pool, [0, 1, 0], [0, 3])
    assert ops.scrub(t) is t
    with pytest.raises(hw.UnsupportedError) as caught:
        ops.repage(t, 1)
    assert caught.value.code is Code.SHAPE
