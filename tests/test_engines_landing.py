"""Where pages land in an engine's cache: what the caller's rows say, all of it checked before the first write."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_engines_layouts import engine_cache
from test_engines_vllm import KEY, VALUE, Pair, pair, refused

import hurray_wire as hw
from hurray_wire import engines
from hurray_wire.errors import Code


def test_a5_another_page_size_names_both() -> None:
    pool = np.zeros((2, 6, 8, 2, 8), np.float32)
    with pytest.raises(hw.InvalidDescriptorError, match="8 tokens, the tensor's hold 4") as error:
        engines.to_vllm(*pair(), axes="2PSHD", pool=pool)
    assert error.value.code is Code.PAGE_SIZE


def test_landing_rows_decide_what_is_shared() -> None:
    source = pair([[4, 1], [4, 2]], [8, 6])
    cache, table, _ = engines.to_vllm(*source, axes="P2SHD", block_table=[[5, 3, -1], [5, 1, -1]])
    assert cache.shape[0] == 6
    assert np.array_equal(cache[[5, 3, 1], 0], KEY[[4, 1, 2]])
    assert not cache[[0, 2, 4]].any()
    assert table.tolist() == [[5, 3], [5, 1]]
    cache, table, _ = engines.to_vllm(*source, axes="P2SHD", block_table=[[5, 3], [2, 1]])  # a page to each
    assert np.array_equal(cache[[5, 3, 2, 1], 1], VALUE[[4, 1, 4, 2]])
    with pytest.raises(hw.InvalidDescriptorError, match="page 3 would take the tensor's pages 1 and 2") as error:
        engines.to_vllm(*source, axes="P2SHD", block_table=[[5, 3], [2, 3]])
    assert (error.value.code, error.value.where) == (Code.PAGE_ID, "block_table[1, 1]")


def test_nothing_is_written_before_all_is_known() -> None:
    pool = np.zeros((6, 2, 4, 2, 8), np.float32)
    key, value = pair()
    cases: list[tuple[dict[str, Any], Code, str]] = [
        ({"block_table": [[1], [2]]}, Code.SEQ_LENS_RANGE, "seq_lens[0]"),
        ({"block_table": [[1, 6], [2]]}, Code.PAGE_ID, "block_table[0, 1]"),
        ({"block_table": [[1, -1], [2]]}, Code.NEGATIVE_INDEX, "block_table[0, 1]"),
        ({"block_table": [[1, 2]]}, Code.SEQ_LENS_COUNT, "seq_lens"),
        ({"pool": pool[:1]}, Code.PAGE_ID, "block_table[0, 1]"),
        ({"pool": pool[:, :, :, :1]}, Code.SHAPE, "pool"),
    ]
    for changes, code, where in cases:
        options: dict[str, Any] = {"axes": "P2SHD", "pool": pool} | changes
        assert refused(functools.partial(engines.to_vllm, key, value, **options)) == (code, where)
    half = pool.astype(np.float16)
    assert refused(lambda: engines.to_vllm(key, value, axes="P2SHD", pool=half), hw.UnsupportedError) == (
        Code.DTYPE,
        "pool",
    )
    bytewise = np.zeros((6, 2, 4, 2, 8), np.uint8)
    assert refused(lambda: engines.to_vllm(key, value, axes="P2SHD", pool=bytewise), hw.UnsupportedError)[1] == "pool"
    frozen = pool.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        engines.to_vllm(key, value, axes="P2SHD", pool=frozen)
    deep = np.zeros((3, 6, 2, 4, 16), np.float32)
    assert refused(lambda: engines.to_vllm(key, value, axes="LPHSC", pool=deep)) == (Code.LAYER_INDEX, "layer_index")
    assert not pool.any()


def test_g32_keys_and_values_of_different_types() -> None:
    k = np.arange(2 * 4 * 192, dtype="f2").reshape(2, 4, 1, 192)
    v = np.arange(1024).astype("u1").view(ml_dtypes.float8_e4m3fn).reshape(2, 4, 1, 128)
    source = engines.from_vllm((k, v), [[0, 1]], [8], axes="PSHD", layer_index=7)
    key, value = (hw.decode(hw.encode(t)) for t in source)
    assert (key.page_pool.nbytes, value.page_pool.nbytes) == (3072, 1024)
    assert (key.dtype, value.dtype) == (hw.float16, hw.float8_e4m3)
    assert (key.page_pool.shape, value.page_pool.shape) == (k.shape, v.shape)
    assert (key.kv_role, value.kv_role, key.layer_index, value.layer_index) == ("key", "value", 7, 7)
    (keys, values), table, lens = engines.to_vllm(key, value, axes="PSHD")
    assert (keys.tobytes(), values.tobytes()) == (k.tobytes(), v.tobytes())
    assert (table.tolist(), lens.tolist()) == ([[0, 1]], [8])
    assert refused(lambda: engines.to_vllm(key, value, axes="PHSC"), hw.UnsupportedError) == (
        Code.DTYPE,
        "value.dtype",
    )
    with pytest.raises(hw.InvalidDescriptorError) as error:
        engines.to_vllm(key, value.replace(block_table=[1, 0]), axes="PSHD")
    assert [v.where for v in error.value.violations] == ["value.block_table"]


def test_what_is_no_pair_is_listed() -> None:
    key, value = pair(layer_index=3)
    other = value.replace(layer_index=4, seq_lens=[5, 4], seq_ptr=[0, 2, 3])
    with pytest.raises(hw.InvalidDescriptorError) as error:
        engines.to_vllm(other, key, axes="P2SHD")
    assert [v.code for v in error.value.violations] == [
        Code.KV_ROLE,
        Code.KV_ROLE,
        Code.LAYER_INDEX,
        Code.SEQ_LENS_RANGE,
    ]
    short = engines.from_vllm((KEY, VALUE), [[4]], [4], axes="PSHD", layer_index=3)[1]
    with pytest.raises(hw.InvalidDescriptorError) as error:
        engines.to_vllm(key, short, axes="P2SHD")
    assert {v.where for v in error.value.violations} == {
        f"value.{name}" for name in ("num_pages", "seq_lens", "seq_ptr", "block_table")
    }


def test_what_no_pool_holds() -> None:
    def tensors(**options: Any) -> Pair:
        key = hw.BlockPagedTensor(block_table=[0], seq_ptr=[0, 1], seq_lens=[4], **options)
        return key, key.replace(kv_role="value")

    int8 = np.zeros((1, 4, 2, 8), np.int8)
    sizes = {"page_size": 4, "num_heads": 2, "head_dim": 8}
    cases: list[tuple[dict[str, Any], Code]] = [
        ({"page_pool": int8, "quantization": "per_block", "scales": np.ones((1, 4), np.float32)}, Code.SCHEME),
        ({"page_pool": int8, "quantization": "per_channel", "scales": np.ones(2, np.float32)}, Code.SCHEME),
        ({"page_pool": int8, "quantization": hw.PerTensorAffine(0.5, 3)}, Code.SCHEME),
        ({"page_pool": np.zeros(32, np.uint8), "dtype": "int4", **sizes}, Code.PACKED_POOL),
    ]
    for options, code in cases:
        key, value = tensors(**options)
        act = lambda k=key, v=value: engines.to_vllm(k, v, axes="P2SHD")  # noqa: E731
        assert refused(act, hw.UnsupportedError)[0] is code


@pytest.mark.parametrize("wanted", ["2PSHD", "PHSC", "P2HSD", ("PHDSX", "PHDS")])
def test_a_round_trip_between_eras(wanted: Any) -> None:
    cache = engine_cache("PHSC", KEY, VALUE)
    rows, lens = [[5, 2], [5, 3], [5, 2]], [8, 7, 6]
    sent = [hw.encode(t) for t in engines.from_vllm(cache, rows, lens, axes="PHSC")]
    key, value = map(hw.decode, sent)
    assert key.block_table.tolist() == [0, 1, 0, 2, 0, 1]
    theirs, table, their_lens = engines.to_vllm(key, value, axes=wanted, block_table=[[1, 2], [1, 3], [1, 2]])
    again = engines.from_vllm(theirs, table, their_lens, axes=wanted)
    assert [hw.encode(t) for t in again] == sent
