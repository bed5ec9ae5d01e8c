"""`BlockPagedLayout`, and code written for the reference that must run unchanged."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from strategies import layouts
from support import BARE_CASES

import hurray_wire as hurray
import hurray_wire as hw

FIELDS = ("page_size", "num_pages", "paged_axis", "num_seqs", "kv_role", "layer_index", "block_table_index_type")
LAYOUT = hw.BlockPagedLayout(page_size=4, num_pages=5, paged_axis=0, num_seqs=2, layer_index=3)


def refused(code: str, call: Any, *args: Any, **kwargs: Any) -> hw.InvalidDescriptorError:
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        call(*args, **kwargs)
    assert caught.value.code == code
    return caught.value


def test_fields_and_defaults() -> None:
    layout = hw.BlockPagedLayout(4, 5, 0, 2)
    assert [getattr(layout, name) for name in FIELDS] == [4, 5, 0, 2, "key", None, "uint32"]
    assert (layout.tag, layout.name, layout.buffer_count) == (0x0A, "block_paged", 3)
    assert layout.is_dense is False
    assert layout.is_virtual is False


@given(layout=layouts())
def test_a_value(layout: hw.BlockPagedLayout) -> None:
    same = hw.BlockPagedLayout(**{name: getattr(layout, name) for name in FIELDS})
    assert same == layout
    assert hash(same) == hash(layout)
    assert {same, layout} == {layout}
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert copy.deepcopy(layout) == layout
    assert eval(repr(layout), {"BlockPagedLayout": hw.BlockPagedLayout}) == layout
    for name in FIELDS:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(layout, name, getattr(layout, name))


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_counts_in_comparison(name: str) -> None:
    other: dict[str, Any] = {
        **{"page_size": 8, "num_pages": 6, "paged_axis": 1, "num_seqs": 3, "kv_role": "value", "layer_index": None},
        "block_table_index_type": "uint64",
    }
    assert dataclasses.replace(LAYOUT, **{name: other[name]}) != LAYOUT
    others: list[Any] = [tuple(getattr(LAYOUT, field) for field in FIELDS), repr(LAYOUT), None]
    assert LAYOUT not in others


@pytest.mark.parametrize(("name", "bits"), [("page_size", 32), ("num_pages", 64), ("paged_axis", 32), ("num_seqs", 32)])
def test_integer_ranges(name: str, bits: int) -> None:
    told: dict[str, Any] = {"page_size": 4, "num_pages": 5, "paged_axis": 0, "num_seqs": 2}
    assert getattr(hw.BlockPagedLayout(**(told | {name: 2**bits - 1})), name) == 2**bits - 1
    for value in (-1, 2**bits, 2**200, -(2**63)):
        error = refused(name, hw.BlockPagedLayout, **(told | {name: value}))
        assert error.where == f"layout.{name}"
        assert str(value) in str(error)
    for wrong in (4.0, "4", None, True, np.bool_(True), [4], np.float32(4)):
        with pytest.raises(TypeError):
            hw.BlockPagedLayout(**(told | {name: wrong}))


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int64, np.uint64])
def test_numpy_integers_become_python_integers(kind: Any) -> None:
    layout = hw.BlockPagedLayout(kind(4), kind(5), kind(0), kind(2), layer_index=kind(3))
    assert layout == LAYOUT
    assert {type(getattr(layout, name)) for name in (*FIELDS[:4], "layer_index")} == {int}


def test_layer_index() -> None:
    assert hw.BlockPagedLayout(4, 5, 0, 2, layer_index=2**32 - 2).layer_index == 2**32 - 2
    assert hw.BlockPagedLayout(4, 5, 0, 2, layer_index=None).layer_index is None
    for value in (0xFFFFFFFF, 2**32, -1, 2**70):
        assert refused("layer_index", hw.BlockPagedLayout, 4, 5, 0, 2, layer_index=value).where == "layout.layer_index"
    for wrong in (1.0, "1", False):
        with pytest.raises(TypeError):
            hw.BlockPagedLayout(4, 5, 0, 2, layer_index=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "code", "allowed"),
    [
        ("kv_role", "kv_role", ("key", "value", "fused")),
        ("block_table_index_type", "index_type", ("uint32", "uint64")),
    ],
)
def test_names(name: str, code: str, allowed: tuple[str, ...]) -> None:
    for value in allowed:
        assert getattr(hw.BlockPagedLayout(4, 5, 0, 2, **{name: value}), name) == value  # type: ignore[arg-type]
    for value in ("KEY", "keys", "", "int32", "0", "uint8"):
        error = refused(code, hw.BlockPagedLayout, 4, 5, 0, 2, **{name: value})
        assert all(word in str(error) for word in (repr(value), *allowed))
    for wrong in (0, None, b"key", ["key"], np.uint32):
        with pytest.raises(TypeError):
            hw.BlockPagedLayout(4, 5, 0, 2, **{name: wrong})  # type: ignore[arg-type]


def test_validate_against_shape() -> None:
    assert LAYOUT.validate_against_shape([9, 2, 8]) is None  # type: ignore[func-returns-value]
    LAYOUT.validate_against_shape((0, 0, 0))
    for shape in ([], [9], [9, 2], [9, 2, 8, 1]):
        assert str(len(shape)) in str(refused("rank", LAYOUT.validate_against_shape, shape))
    refused("page_size", hw.BlockPagedLayout(0, 5, 0, 2).validate_against_shape, [9, 2, 8])
    refused("paged_axis", hw.BlockPagedLayout(4, 5, 1, 2).validate_against_shape, [9, 2, 8])
    several = refused("rank", hw.BlockPagedLayout(0, 5, 7, 2).validate_against_shape, [9, 2])
    assert [v.code for v in several.violations] == ["rank", "page_size", "paged_axis"]


def test_quantization_compatibility() -> None:
    float32 = hw.float32
    for sound in (
        hw.PerTensorAffine(0.5),
        hw.PerChannelAffine.symmetric(1, 3),
        hw.PerChannelAffine.asymmetric(2, 3, 4),
        hw.PerBlockAffine.symmetric(0, 4, 3, float32),
        hw.PerBlockAffine.asymmetric(0, 4, 3, 4, "bfloat16"),
        hw.NF4(2, 64, 3),
        hw.MXFP(1, 32, 3),
    ):
        assert LAYOUT.validate_quantization_compatibility(sound) is None  # type: ignore[func-returns-value]
    for code, broken in (
        ("quantization_axis", hw.PerChannelAffine.symmetric(0, 3)),
        ("quantization_axis", hw.PerChannelAffine.symmetric(3, 3)),
        ("quantization_axis", hw.PerBlockAffine.symmetric(1, 4, 3, float32)),
        ("quantization_axis", hw.NF4(3, 64, 3)),
        ("quantization_axis", hw.MXFP(2**32 - 1, 32, 3)),
        ("quantization_block", hw.PerBlockAffine.symmetric(0, 8, 3, float32)),
    ):
        refused(code, LAYOUT.validate_quantization_compatibility, broken)


@pytest.mark.parametrize("other", [None, "per_tensor", 1, b"\x01\x01", {}, hw.PerTensorAffine, np.float32(0.5)])
def test_what_is_no_scheme_is_refused_naming_the_classes(other: Any) -> None:
    error = refused("quantization_scheme", LAYOUT.validate_quantization_compatibility, other)
    for name in ("PerTensorAffine", "PerChannelAffine", "PerBlockAffine", "NF4", "MXFP"):
        assert name in str(error)


# Written for the reference: issue "Foundation", item 6.


def test_drop_in() -> None:
    layout = hurray.BlockPagedLayout(
        page_size=4,
        num_pages=5,
        paged_axis=0,
        num_seqs=2,
        kv_role="key",
        layer_index=3,
        block_table_index_type="uint32",
    )
    layout.validate_against_shape([9, 2, 8])
    layout.validate_index_buffers([0, 2, 3], [0, 1, 0])  # a shared prefix is fine
    with pytest.raises(hurray.InvalidDescriptorError):
        layout.validate_index_buffers([0, 2, 3], [0, 1, 5])  # a page id equal to num_pages
    empty = hurray.BlockPagedLayout(page_size=4, num_pages=5, paged_axis=0, num_seqs=0)
    empty.validate_index_buffers([0], [])
    empty.validate_index_buffers(seq_ptr=[0], block_table=[])

    per_block = hurray.PerBlockAffine.symmetric(axis=0, block_size=4, scale_buffer_index=3, scale_type=hurray.float32)
    layout.validate_quantization_compatibility(per_block)
    per_channel = hurray.PerChannelAffine.symmetric(axis=0, scale_buffer_index=3)
    with pytest.raises(hurray.InvalidDescriptorError):
        layout.validate_quantization_compatibility(per_channel)
    try:
        layout.validate_against_shape([9, 2])
    except ValueError as error:
        caught = error
    assert type(caught) is hurray.InvalidDescriptorError


def test_drop_in_repr_is_the_references() -> None:
    for case in BARE_CASES.values():
        assert repr(hurray.BlockPagedLayout(**case["layout"])) == case["repr"]


def test_drop_in_element_offset() -> None:
    tables: dict[str, Any] = {"block_table": [0, 1, 0], "seq_ptr": [0, 2, 3]}
    geometry = {"page_size": 4, "num_pages": 5, "num_heads": 2, "head_dim": 8}
    assert hurray.element_offset(0, 4, 0, 0, **geometry, **tables) == 64
    assert hurray.element_offset(seq=0, token=4, head=0, dim=0, **geometry, **tables) == 64
    shared = [hurray.element_offset(seq, 1, 1, 5, **geometry, **tables) for seq in (0, 1)]
    assert shared[0] == shared[1] == (1 * 2 + 1) * 8 + 5
