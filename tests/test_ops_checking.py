"""What two ends must have in common: every difference is found, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batches import unsound, worked_example

import hurray_wire as hw
from hurray_wire import ops
from hurray_wire.errors import Code


def where(a: hw.BlockPagedTensor, b: hw.BlockPagedTensor) -> list[str]:
    return [difference.where for difference in ops.compatible(a, b)]


def layers(count: int, **changes: Any) -> list[hw.BlockPagedTensor]:
    roles = ("key", "value")
    return [worked_example(layer_index=i, kv_role=role, **changes) for i in range(count) for role in roles]


def found(tensors: list[hw.BlockPagedTensor]) -> list[tuple[str, Code]]:
    return [(v.where, v.code) for v in ops.check_layers(tensors)]


def test_other_pages_tokens_and_ids_are_compatible() -> None:
    t = worked_example()
    assert ops.compatible(t, t) == []
    assert where(t, ops.compact(ops.select(t, [1]))) == []
    assert where(t, t.replace(metadata={"model": "m", "seq_ids": ["a", "b"]})) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"page_pool": np.zeros((5, 4, 2, 8), np.int16)}, ["dtype"]),
        ({"page_pool": np.zeros((5, 8, 2, 8), np.float16)}, ["page_size"]),
        ({"page_pool": np.zeros((5, 4, 1, 8), np.float16)}, ["num_heads"]),
        ({"page_pool": np.zeros((5, 4, 2, 4), np.float32)}, ["dtype", "head_dim"]),
        ({"kv_role": "value", "layer_index": None}, ["kv_role", "layer_index"]),
        ({"composite": "base"}, ["composite"]),
    ],
)
def test_every_trait_is_compared(changes: dict[str, Any], expected: list[str]) -> None:
    assert where(worked_example(), worked_example(**changes)) == expected


def test_constants_that_do_not_travel_with_a_page() -> None:
    pool = np.zeros((5, 4, 2, 8), np.int8)
    plain = worked_example(page_pool=pool)
    one = worked_example(page_pool=pool, quantization="per_tensor", scales=0.5)
    assert where(plain, one) == ["quantization"]
    assert where(one, worked_example(page_pool=pool, quantization="per_tensor", scales=0.25)) == ["quantization"]
    by_dim = worked_example(page_pool=pool, quantization="per_channel", scales=np.ones(8, np.float32))
    other = by_dim.replace(scales=np.full(8, 2, np.float32))
    assert where(by_dim, other) == ["scales"]
    by_slot = worked_example(page_pool=pool, quantization="per_block", scales=np.ones((5, 4), np.float32))
    assert where(by_slot, by_slot.replace(scales=np.zeros((5, 4), np.float32))) == []


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [
        ("model", "a", "b"),
        ("revision", "a", "b"),
        ("tokenizer", "a", "b"),
        ("rope", "a", "b"),
        ("heads", [0, 2, 4], [2, 4, 4]),
        ("content", "kv", "latent"),
        ("key_dim", 4, 6),
    ],
)
def test_metadata_is_compared_where_both_have_it(name: str, value: Any, other: Any) -> None:
    t = worked_example(metadata={name: value})
    assert where(t, t.replace(metadata={name: other})) == [name]
    assert where(t, worked_example()) == []
    difference = ops.compatible(t, t.replace(metadata={name: other}))[0]
    assert (difference.found, difference.expected) == (value, other)


def test_private_types_are_told_apart() -> None:
    data = np.zeros(6, np.uint8)
    fields: dict[str, Any] = {"block_table": [0], "seq_ptr": [0, 1], "seq_lens": [1], "page_size": 1}
    fields |= {"num_heads": 1, "head_dim": 2, "dtype": hw.Dtype.private(0xF1)}
    a, b = (
        hw.BlockPagedTensor(data, extension_type=hw.ExtensionType(24, is_float=False, is_signed=signed), **fields)
        for signed in (True, False)
    )
    assert where(a, a) == []
    assert where(a, b) == ["dtype"]


def test_whole_batches_pass() -> None:
    assert ops.check_layers([]) == []
    assert ops.check_layers(layers(3)) == []
    assert ops.check_layers(reversed(layers(3))) == []
    assert ops.check_layers([worked_example(layer_index=i, kv_role="fused") for i in (4, 5)]) == []
    value = worked_example(kv_role="value", page_pool=np.zeros((5, 4, 2, 3), np.int8))
    assert ops.check_layers([worked_example(), value]) == []


def test_missing_layers_and_roles() -> None:
    whole = layers(4)
    assert found(whole[:2] + whole[6:]) == [("layers[1]", Code.LAYER_INDEX), ("layers[2]", Code.LAYER_INDEX)]
    assert found(whole[:5] + whole[6:]) == [("layers[2]", Code.KV_ROLE)]
    assert found([*whole, worked_example(layer_index=1, kv_role="fused")]) == [("layers[1]", Code.KV_ROLE)]
    far = ops.check_layers([*layers(1), *[t.replace(layer_index=2**32 - 2) for t in layers(1)]])
    assert {v.code for v in far} == {Code.LAYER_INDEX}


def test_repeated_and_nameless_layers() -> None:
    whole = layers(2)
    assert found([*whole, whole[3]]) == [("tensors[4].layout.layer_index", Code.LAYER_INDEX)]
    assert found([*whole, whole[0].replace(layer_index=None)]) == [("tensors[4].layout.layer_index", Code.LAYER_INDEX)]
    base = [t.replace(composite="base") for t in whole]
    assert found([*base, whole[0].replace(composite="correction")]) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"block_table": [0, 1, 2]}, ["block_table"]),
        ({"seq_ptr": [0, 3, 3], "seq_lens": [9, 0]}, ["seq_ptr", "seq_lens"]),
        ({"seq_lens": [5, 4]}, ["seq_lens"]),
        ({"page_pool": np.zeros((7, 4, 2, 8), np.float16)}, ["layout.num_pages"]),
        ({"page_pool": np.zeros((5, 6, 2, 8), np.float16)}, ["layout.page_size"]),
        ({"metadata": {"seq_ids": ["a", "c"]}}, ["metadata.seq_ids"]),
        ({"metadata": {"seq_ids": ["a", "b"], "model": "n"}}, ["metadata.model"]),
    ],
)
def test_tables_that_differ(changes: dict[str, Any], expected: list[str]) -> None:
    whole = layers(2, metadata={"seq_ids": ["a", "b"], "model": "m"})
    whole[2] = worked_example(layer_index=1, **({"metadata": whole[0].metadata} | changes))
    assert [name for name, _ in found(whole)] == [f"tensors[2].{name}" for name in expected]


def test_heads_that_differ_within_a_layer() -> None:
    key, value = layers(1)
    violations = ops.check_layers([key, ops.slice_heads(value, 0, 1).replace(metadata=None)])
    assert [(v.where, v.code) for v in violations] == [("layers[0]", Code.SHAPE)]


def test_unknown_lengths_are_compared_by_their_sum() -> None:
    key, value = layers(1)
    loose = hw.BlockPagedTensor(
        value.page_pool, block_table=[0, 1, 0], seq_ptr=[0, 2, 3], total_tokens=8, kv_role="value", layer_index=0
    )
    assert found([key, loose]) == [("tensors[1].shape[0]", Code.TOKEN_COUNT)]


def test_tensors_with_violations_are_refused() -> None:
    with pytest.raises(hw.InvalidDescriptorError):
        ops.check_layers([worked_example(), unsound()])
    with pytest.raises(hw.InvalidDescriptorError):
        ops.compatible(worked_example(), unsound())
