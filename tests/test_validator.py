"""The validator over seq_ptr, block_table and seq_lens: held to a plain loop, on every kind of integers there is."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import POOL, Array, raw, verdict, worked

import hurray_wire as hw
from hurray_wire import indices

KINDS = [np.dtype(order + code) for order in "<>" for code in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")]
CONTAINERS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "numpy integers": lambda values: [np.int64(v) if v < 2**63 else np.uint64(v) for v in values],
    "array.array": lambda values: array.array("Q", values),
    "memoryview": lambda values: memoryview(array.array("Q", values)),
    "strided": lambda values: np.repeat(np.array(values, np.uint64), 2)[::2],
    "reversed": lambda values: np.array(values[::-1], np.uint64)[::-1],
    "read-only": lambda values: np.frombuffer(np.array(values, np.uint64).tobytes(), np.uint64),
}


def expected(seq_ptr: list[int], table: list[int], num_pages: int) -> list[tuple[str, str, int, int, int]]:
    """Code, where, index, value and how many more, by a plain loop (section 1)."""
    found = []
    if seq_ptr[0] != 0:
        found.append(("seq_ptr_start", "seq_ptr[0]", 0, seq_ptr[0], 0))
    falls = [i for i in range(1, len(seq_ptr)) if seq_ptr[i] < seq_ptr[i - 1]]
    if falls:
        found.append(("seq_ptr_order", f"seq_ptr[{falls[0]}]", falls[0], seq_ptr[falls[0]], len(falls) - 1))
    if seq_ptr[-1] != len(table):
        end = len(seq_ptr) - 1
        found.append(("seq_ptr_end", f"seq_ptr[{end}]", end, seq_ptr[end], 0))
    outside = [i for i, page in enumerate(table) if page >= num_pages]
    if outside:
        found.append(("page_id", f"block_table[{outside[0]}]", outside[0], table[outside[0]], len(outside) - 1))
    return found


def judged(seq_ptr: Any, table: Any, num_pages: int, num_seqs: int) -> list[Any]:
    """What the layout says."""
    layout = hw.BlockPagedLayout(4, num_pages, 0, num_seqs)
    try:
        layout.validate_index_buffers(seq_ptr, table)
    except hw.InvalidDescriptorError as error:
        return list(error.violations)
    return []


def agrees(found: list[Any], wanted: list[tuple[str, str, int, int, int]]) -> None:
    assert [(v.code, v.where, v.index, v.value) for v in found] == [w[:4] for w in wanted]
    for violation, (*_, value, more) in zip(found, wanted, strict=True):
        assert str(value) in violation.message
        assert (f"{more} more" in violation.message) == bool(more)


small = st.integers(0, 6)


@settings(max_examples=400)
@given(seq_ptr=st.lists(small, min_size=1, max_size=8), table=st.lists(small, max_size=8), num_pages=small)
def test_against_a_plain_loop(seq_ptr: list[int], table: list[int], num_pages: int) -> None:
    agrees(judged(seq_ptr, table, num_pages, len(seq_ptr) - 1), expected(seq_ptr, table, num_pages))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(seq_ptr=st.lists(small, min_size=1, max_size=8), table=st.lists(small, max_size=8), num_pages=small)
def test_every_integer_type(kind: np.dtype[Any], seq_ptr: list[int], table: list[int], num_pages: int) -> None:
    ptr, ids = np.array(seq_ptr, kind), np.array(table, kind)
    agrees(judged(ptr, ids, num_pages, len(seq_ptr) - 1), expected(seq_ptr, table, num_pages))


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container(name: str) -> None:
    make = CONTAINERS[name]
    for seq_ptr, table in (([0, 2, 3], [0, 1, 0]), ([0, 2, 3], [0, 5, 7]), ([1, 4, 2], [0, 1, 0])):
        agrees(judged(make(seq_ptr), make(table), 5, 2), expected(seq_ptr, table, 5))
    assert worked(block_table=make([0, 1, 0]), seq_ptr=make([0, 2, 3]), seq_lens=make([6, 3])) == worked()


edges = st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1])


@settings(max_examples=300)
@given(
    seq_ptr=st.lists(edges, min_size=1, max_size=6),
    table=st.lists(edges, max_size=6),
    num_pages=edges,
    as_array=st.booleans(),
)
def test_nothing_wraps_near_the_ends_of_64_bits(
    seq_ptr: list[int], table: list[int], num_pages: int, as_array: bool
) -> None:
    ptr, ids = (np.array(values, np.uint64) if as_array else values for values in (seq_ptr, table))
    agrees(judged(ptr, ids, num_pages, len(seq_ptr) - 1), expected(seq_ptr, table, num_pages))


def refused(code: str, seq_ptr: Any, table: Any) -> Any:
    (violation,) = judged(seq_ptr, table, 5, 2)
    assert violation.code == code
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        worked(seq_ptr=seq_ptr, block_table=table)
    assert caught.value.code == code
    return violation


@pytest.mark.parametrize("kind", ["i1", "i2", "i4", ">i4", "i8", "list", "tuple"])
def test_negatives_are_refused_before_any_cast(kind: str) -> None:
    def make(values: list[int]) -> Any:
        return {"list": list, "tuple": tuple}.get(kind, lambda v: np.array(v, kind))(values)

    found = refused("negative_index", make([0, 2, 3]), make([0, -1, -7]))
    assert (found.where, found.index, found.value) == ("block_table[1]", 1, -1)
    assert "1 more" in found.message
    found = refused("negative_index", make([0, -2, 3]), make([0, 1, 0]))
    assert (found.where, found.index, found.value) == ("seq_ptr[1]", 1, -2)
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        worked(seq_lens=make([6, -3]))
    assert caught.value.code == "negative_index"


def test_lists_of_both_signs_and_of_any_size() -> None:
    found = refused("negative_index", [0, 2, 3], [2**63, -1, 2**64 - 1])
    assert (found.index, found.value) == (1, -1)
    found = refused("negative_index", [0, 2, 3], [1, -(2**200), 0])
    assert (found.index, found.value) == (1, -(2**200))
    for huge in (2**64, 2**200):
        for arguments in ({"block_table": [0, 1, huge]}, {"seq_ptr": [0, 2, huge]}, {"seq_lens": [6, huge]}):
            with pytest.raises(hw.InvalidDescriptorError, match=str(huge)):
                worked(**arguments)
    assert judged([0, 1], [2**63], 2**63 + 1, 1) == []
    assert judged([0, 2], [2**63, 0], 2**63 + 1, 1) == []


@pytest.mark.parametrize(
    "table",
    [
        *([0, 1.0, 0], [0.5, 1, 0], [0, 1, True], [False, 1, 0], [0, None, 0], [0, "1", 0], [0, [1], 0], [0, b"1", 0]),
        *([0, np.float32(1), 0], [0, np.bool_(True), 0], [0, float("nan"), 0], "010", None, 3, {0: 1}),
        *(np.array([0.0, 1.0, 0.0]), np.zeros(3, bool), np.array([0, 1, 0], object), np.array(["0", "1", "0"])),
        *(np.zeros((3, 1), np.int64), np.int64(0), np.zeros(3, "M8[s]"), np.zeros(3, complex), [[0, 1, 0]]),
        np.zeros(3, [("a", "u4")]),
    ],
    ids=repr,
)
def test_what_is_no_integer_is_refused(table: Any) -> None:
    layout = hw.BlockPagedLayout(4, 5, 0, 2)
    for arguments in (([0, 2, 3], table), (table, [0, 1, 0])):
        with pytest.raises(hw.InvalidDescriptorError) as caught:
            layout.validate_index_buffers(*arguments)
        assert caught.value.code == "not_integer"
    for name in ("block_table", "seq_ptr", "seq_lens"):
        if name == "seq_lens" and table is None:
            continue
        with pytest.raises((hw.InvalidDescriptorError, TypeError)):
            worked(**{name: table})


def test_the_first_that_is_none_is_named() -> None:
    for wrong in (1.5, True, None, "1"):
        with pytest.raises(hw.InvalidDescriptorError) as caught:
            hw.BlockPagedLayout(4, 5, 0, 2).validate_index_buffers([0, 2, 3], [0, 0, wrong])
        assert caught.value.where == "block_table[2]"
        assert repr(wrong) in str(caught.value)


def test_lengths() -> None:
    layout = hw.BlockPagedLayout(4, 5, 0, 2)
    for seq_ptr, table in (([], []), ([0], []), ([0, 3], [0, 1, 0]), ([0, 1, 2, 3], [0, 1, 0])):
        with pytest.raises(hw.InvalidDescriptorError):
            layout.validate_index_buffers(seq_ptr, table)
    empties: list[Any] = [[], (), np.array([]), np.zeros(0, np.uint64)]
    for empty in empties:
        hw.BlockPagedLayout(4, 5, 0, 0).validate_index_buffers([0], empty)
        assert worked(seq_ptr=[0], block_table=empty, seq_lens=empty).num_seqs == 0
        with pytest.raises(hw.InvalidDescriptorError) as caught:
            worked(seq_ptr=empty, block_table=empty, seq_lens=empty)
        assert caught.value.code == "seq_ptr_start"


# Long tables: whole-array and piecewise comparisons must give the same answer.

LONG = 5_000_000


@pytest.fixture(scope="module")
def ramp() -> Array:
    return np.arange(LONG, dtype=np.uint32)


def test_long_tables_that_are_sound(ramp: Array) -> None:
    assert judged(ramp, np.zeros(LONG - 1, np.uint32), 1, LONG - 1) == []
    assert judged(np.zeros(LONG, np.uint64), [], 0, LONG - 1) == []
    assert judged([0, LONG], ramp, LONG, 1) == []


@pytest.mark.parametrize("at", [1, 65535, 65536, 65537, 2**20, 2**22, 2**22 + 65536, LONG - 2])
def test_long_tables_with_one_fault(ramp: Array, at: int) -> None:
    ptr = ramp.copy()
    ptr[at] = at - 2 if at > 1 else LONG
    wanted = at if at > 1 else 2  # entry 1 is above entry 2: that one is less than the one before it
    (order,) = judged(ptr, np.zeros(LONG - 1, np.uint32), 1, LONG - 1)
    assert (order.code, order.index, order.value) == ("seq_ptr_order", wanted, int(ptr[wanted]))
    (page,) = judged([0, LONG], np.where(ramp == at, np.uint32(9), np.uint32(0)), 9, 1)
    assert (page.code, page.index, page.value) == ("page_id", at, 9)


def test_long_tables_with_many_faults(ramp: Array) -> None:
    order, end, page = judged(ramp[::-1], ramp, LONG - 1000, LONG - 1)[1:]
    assert (order.code, order.index, f"{LONG - 2} more" in order.message) == ("seq_ptr_order", 1, True)
    assert (end.code, page.code, page.index) == ("seq_ptr_end", "page_id", LONG - 1000)
    assert "999 more" in page.message


# Token counts.


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("seq_lens_count", {"seq_lens": [9]}),
        ("seq_lens_count", {"seq_lens": [6, 3, 0]}),
        ("seq_lens_range", {"seq_lens": [9, 0]}),
        ("seq_lens_range", {"seq_lens": [4, 5]}),
        ("seq_lens_range", {"seq_lens": [0, 2**64 - 1], "total_tokens": 2}),
        ("seq_lens_range", {"seq_lens": np.array([2**64 - 1, 2], np.uint64), "total_tokens": 1}),
        ("seq_lens_sum", {"seq_lens": [6, 3], "total_tokens": 8}),
        ("seq_lens_sum", {"seq_lens": [6, 3], "total_tokens": 10}),
        ("token_count", {"seq_lens": None, "total_tokens": 13}),
        ("token_count", {"seq_lens": None, "total_tokens": 2**64 - 2}),
        ("token_count", {"seq_lens": None, "total_tokens": 2**64}),
        ("token_count", {"seq_lens": None, "total_tokens": -1}),
    ],
)
def test_token_counts(code: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        worked(**arguments)
    assert code in {str(v.code) for v in caught.value.violations}


def test_the_offending_sequence_is_named() -> None:
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        worked(seq_lens=[8, 5])
    (violation,) = [v for v in caught.value.violations if v.code == "seq_lens_range"]
    assert (violation.where, violation.index, violation.value) == ("seq_lens[1]", 1, 5)


@pytest.mark.parametrize(
    ("seq_ptr", "total", "lens"),
    [
        ([0], 0, []),
        ([0, 0, 0], 0, [0, 0]),
        ([0, 2, 3], 0, [0, 0]),
        ([0, 2, 3], 12, [8, 4]),
        ([0, 3, 3], 9, [9, 0]),
        ([0, 0, 3, 3], 5, [0, 5, 0]),
        ([0, 3], 7, [7]),
        ([0, 2, 3], 9, None),
        ([0, 2, 3], 11, None),
        ([0, 0, 2, 3], 1, None),
    ],
)
def test_counts_are_known_where_they_are_forced(seq_ptr: list[int], total: int, lens: list[int] | None) -> None:
    table = np.array([0, 1, 0][: seq_ptr[-1]], "<u4")
    built = worked(seq_ptr=seq_ptr, block_table=table, seq_lens=None, total_tokens=total)
    sizes = (640, table.nbytes, 4 * len(seq_ptr))
    data = raw(bt=table, sp=np.array(seq_ptr, "<u4"), shape=(total, 2, 8), num_seqs=len(seq_ptr) - 1, sizes=sizes)
    found = [built, hw.decode(data), hw.decode(hw.encode(built)), hw.decode(hw.encode(built, framing="bare"))]
    assert [None if t.seq_lens is None else t.seq_lens.tolist() for t in found] == [lens] * 4
    assert hw.encode(built, framing="bare") == data


# From bytes: every violation with the absolute offset of its entry.


@pytest.mark.parametrize(
    ("tables", "code", "where", "offset"),
    [
        (([0, 1, 0], [1, 2, 3]), "seq_ptr_start", "seq_ptr[0]", 785),
        (([0, 1, 0], [0, 4, 3]), "seq_ptr_order", "seq_ptr[2]", 793),
        (([0, 1, 0], [0, 2, 2]), "seq_ptr_end", "seq_ptr[2]", 793),
        (([0, 1, 5], [0, 2, 3]), "page_id", "block_table[2]", 781),
        (([2**32 - 1, 1, 0], [0, 2, 3]), "page_id", "block_table[0]", 773),
    ],
)
def test_faults_in_bytes_have_their_offset(tables: Any, code: str, where: str, offset: int) -> None:
    data = raw(bt=np.array(tables[0], "<u4"), sp=np.array(tables[1], "<u4"))
    found = verdict(data)
    assert (found.kind, found.code, found.where, found.offset) == ("InvalidDescriptorError", code, where, offset)
    lenient = hw.decode(data, strict=False)
    first = lenient.violations[0]
    assert (first.code, first.where, first.offset) == (code, where, offset)
    assert lenient.seq_lens is None
    embedded = memoryview(bytes(1000) + data)[1000:]
    assert verdict(embedded).offset == offset


def test_index_types_follow_from_the_numbers() -> None:
    nothing = np.empty((2**33, 4, 0, 1), np.float16)  # eight thousand million pages of no bytes
    huge = np.empty((3, 2**32 - 1, 0, 1), np.float16)
    for pool, table, lens, kind in (
        (POOL, [0, 1, 0], [6, 3], "uint32"),
        (nothing, [2**33 - 1, 1, 0], [6, 3], "uint64"),
        (nothing, [0, 1, 0], [6, 3], "uint64"),
        (nothing[: 2**32 - 1], [0, 1, 0], [6, 3], "uint32"),
        (huge, [0, 1, 2], [2**32 - 1, 0], "uint32"),
        (huge, [0, 1, 2], [2**32, 0], "uint64"),
    ):
        t = worked(page_pool=pool, block_table=table, seq_lens=lens)
        assert t.layout.block_table_index_type == kind
        assert t.seq_lens is not None
        assert {str(a.dtype) for a in (t.block_table, t.seq_ptr, t.seq_lens)} == {kind}
        again = worked(page_pool=pool, block_table=table, seq_lens=lens, index_type="uint64")
        assert again.layout.block_table_index_type == "uint64"
        if kind == "uint64":
            with pytest.raises(hw.InvalidDescriptorError) as caught:
                worked(page_pool=pool, block_table=table, seq_lens=lens, index_type="uint32")
            assert caught.value.code == "index_type"
    for name in ("int32", "UINT32", ""):
        with pytest.raises(hw.InvalidDescriptorError) as caught:
            worked(index_type=name)
        assert caught.value.code == "index_type"


def test_the_one_look_at_short_tables_is_never_kinder_than_the_rules() -> None:
    """`indices.sound` against the rules one by one, over tables that are nearly right, empty ones too."""
    rng = np.random.default_rng(4)
    verdicts = []
    for _ in range(3000):
        kind: Any = (np.uint32, np.uint64)[int(rng.integers(2))]
        num_seqs, page_size = int(rng.integers(0, 5)), int(rng.integers(1, 4))
        counts = rng.integers(0, 4, num_seqs)
        ptr = np.concatenate(([0], np.cumsum(counts))).astype(kind)[: None if rng.random() < 0.9 else 0]
        table = rng.integers(0, 6, int(counts.sum())).astype(kind)
        lens = np.array([rng.integers(0, n * page_size + 1) for n in counts], kind)
        num_pages, tokens = int(rng.integers(5, 8)), int(lens.sum()) + int(rng.random() < 0.1)
        several: tuple[Array, ...] = (ptr, lens)
        for entries in several:
            if entries.size and rng.random() < 0.2:
                entries[rng.permutation(entries.size)[:1]] += kind([1, 2, np.iinfo(kind).max][rng.integers(3)])
        found = indices.check_seq_ptr(ptr, table.size) + indices.check_block_table(table, num_pages)
        if not found:
            found = indices.check_seq_lens(lens, ptr, page_size, tokens)
        told = indices.sound(table, ptr, lens, num_pages, page_size, tokens)
        assert not (told and found), (table, ptr, lens, num_pages, page_size, tokens, found)
        verdicts.append((told, bool(found)))
    assert {(True, False), (False, True)} <= set(verdicts)
    assert verdicts.count((True, False)) > 500
