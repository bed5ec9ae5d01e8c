"""FlashInfer: how full the last page is, and nothing about pages that hold no token."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_engines_layouts import Geometry, engine_cache, numbered, tokens

import hurray_wire as hw
from hurray_wire import engines
from hurray_wire.errors import Code

KEY, VALUE = numbered(Geometry(5, 4, 2, 8)), numbered(Geometry(5, 4, 2, 8), -1)


def read(indptr: Any, last: Any, indices: Any = (0, 1, 0), **options: Any) -> hw.BlockPagedTensor:
    pool = np.arange(320, dtype="<f2").reshape(5, 4, 2, 8)
    return engines.from_flashinfer((pool, pool), indptr, list(indices), last, axes="PSHD", **options)[0]


def test_b8_the_last_page_is_between_one_token_and_full() -> None:
    for indptr, last, lens in (([0, 2, 3], [2, 3], [6, 3]), ([0, 0, 3], [0, 4], [0, 12]), ([0, 0, 3], [1, 4], [0, 12])):
        t = read(indptr, last)
        assert t.seq_lens is not None
        assert (t.seq_lens.tolist(), t.total_tokens) == (lens, sum(lens))
    for indptr, last, code, where in (
        ([0, 2, 3], [5, 3], Code.SEQ_LENS_RANGE, "last_page_len[0]"),
        ([0, 2, 3], [0, 3], Code.SEQ_LENS_RANGE, "last_page_len[0]"),
        ([0, 2, 3], [-1, 3], Code.SEQ_LENS_RANGE, "last_page_len[0]"),
        ([0, 2, 4], [2, 3], Code.SEQ_PTR_END, "indptr[2]"),
        ([0, 3, 2], [2, 3], Code.SEQ_PTR_ORDER, "indptr[2]"),
        ([1, 2, 3], [2, 3], Code.SEQ_PTR_START, "indptr[0]"),
        ([], [], Code.SEQ_PTR_START, "indptr"),
        ([0, 2, 3], [2], Code.SEQ_LENS_COUNT, "last_page_len"),
        ([0, -2, 3], [2, 3], Code.NEGATIVE_INDEX, "indptr[1]"),
    ):
        with pytest.raises(hw.InvalidDescriptorError) as error:
            read(indptr, last)
        assert (error.value.code, error.value.where) == (code, where)
        assert "seq_ptr" not in str(error.value)
        assert "block_table" not in str(error.value)
    for indices, code, where in (
        ([0, 5, 0], Code.PAGE_ID, "indices[1]"),
        ([0, 1, -1], Code.NEGATIVE_INDEX, "indices[2]"),
    ):
        with pytest.raises(hw.InvalidDescriptorError) as error:
            read([0, 2, 3], [2, 3], indices)
        assert (error.value.code, error.value.where) == (code, where)
    key = read([0, 2, 3], [2, 3])
    for keep in (key, read([0, 2, 3], [2, 3], pages="all")):
        _, *arrays = engines.to_flashinfer(keep, keep.replace(kv_role="value"), axes="P2SHD")
        assert [a.tolist() for a in arrays] == [[0, 2, 3], [0, 1, 0], [2, 3]]
        assert {a.dtype for a in arrays} == {np.dtype(np.int32)}


def test_entries_behind_the_last_offset_are_ignored() -> None:
    t = read([0, 1, 1], [3, 0], [4, -1, 99, 2])  # a buffer kept for CUDA graphs
    assert (t.block_table.tolist(), t.seq_ptr.tolist(), t.num_pages) == ([0], [0, 1, 1], 1)


@pytest.mark.parametrize("axes", [engines.FLASHINFER_NHD, engines.FLASHINFER_HND, "PSHD", "PHSD"])
def test_round_trips(axes: str) -> None:
    cache = engine_cache(axes, KEY, VALUE)
    key, value = engines.from_flashinfer(cache, [0, 2, 2, 3], [4, 2, 4], [1, 0, 4], axes=axes, layer_index=5)
    assert [key.gather(s).tolist() for s in range(3)] == [tokens(KEY, [4, 2], 5), [], tokens(KEY, [4], 4)]
    assert value.gather(0).tolist() == tokens(VALUE, [4, 2], 5)
    theirs = engines.to_flashinfer(key, value, axes=axes)
    assert [a.tolist() for a in theirs[1:]] == [[0, 2, 2, 3], [0, 1, 0], [1, 0, 4]]
    assert engines.from_flashinfer(*theirs, axes=axes, layer_index=5) == (key, value)


def test_pages_allocated_ahead_are_trimmed() -> None:
    key = hw.BlockPagedTensor(KEY, block_table=[3, 1, 2, 0], seq_ptr=[0, 3, 4], seq_lens=[4, 1])
    value = hw.BlockPagedTensor(VALUE, block_table=[3, 1, 2, 0], seq_ptr=[0, 3, 4], seq_lens=[4, 1], kv_role="value")
    cache, indptr, indices, last = engines.to_flashinfer(key, value, axes="P2SHD")
    assert [a.tolist() for a in (indptr, indices, last)] == [[0, 1, 2], [3, 0], [4, 1]]
    assert np.array_equal(cache[3, 0], KEY[3])
    assert not cache[[1, 2, 4]].any()


def test_a_pair_of_types_and_a_name() -> None:
    values = np.zeros((5, 4, 2, 8), np.uint8)
    key, value = engines.from_flashinfer((values, values), [0, 1], [4], [1], axes="PSHD", dtype="fp8_e5m2")
    assert key.dtype is value.dtype is hw.float8_e5m2
    halves = KEY.astype(np.float16)
    key, value = engines.from_flashinfer((halves, values.view(ml_dtypes.float8_e4m3fn)), [0, 1], [4], [1], axes="PSHD")
    assert (key.dtype, value.dtype) == (hw.float16, hw.float8_e4m3)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=6))
def test_lengths_are_what_flashinfer_computes(batch: list[tuple[int, int]]) -> None:
    indptr = np.cumsum([0] + [pages for pages, _ in batch])
    last = [tokens_left if pages else 0 for pages, tokens_left in batch]
    indices = np.resize([3, 0, 4, 1], int(indptr[-1]))
    t = read(indptr, last, indices)
    assert t.seq_lens is not None
    assert t.seq_lens.tolist() == [max(pages - 1, 0) * 4 + n for (pages, _), n in zip(batch, last, strict=True)]
    back = engines.to_flashinfer(t, t.replace(kv_role="value"), axes="P2SHD")
    assert (back[1].tolist(), back[3].tolist()) == (indptr.tolist(), last)
