"""The five schemes as values and bytes, and the names that follow from arrays."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from strategies import BLOCK_STORAGE
from support import BT, raw, verdict, worked

import hurray_wire as hw

NONE = 0xFFFFFFFF
SCHEMES: list[tuple[Any, bytes]] = [
    (hw.PerTensorAffine(0.5, -3), struct.pack("<BBHfi4x", 1, 1, 0, 0.5, -3)),
    (hw.PerTensorAffine(-2.0), struct.pack("<BBHfi4x", 1, 1, 0, -2.0, 0)),
    (hw.PerChannelAffine.symmetric(1, 3), struct.pack("<BBHIIIB3x", 2, 1, 1, 1, 3, NONE, 3)),
    (hw.PerChannelAffine.asymmetric(2, 3, 4), struct.pack("<BBHIIIB3x", 2, 1, 0, 2, 3, 4, 3)),
    (hw.PerChannelAffine.symmetric(0, 3), struct.pack("<BBHIIIB3x", 2, 1, 1, 0, 3, NONE, 3)),
    (hw.PerBlockAffine.symmetric(0, 4, 3, hw.float16), struct.pack("<BBHIIIIB3x", 3, 1, 1, 0, 4, 3, NONE, 1)),
    (hw.PerBlockAffine.symmetric(0, 2, 3, "bfloat16"), struct.pack("<BBHIIIIB3x", 3, 1, 1, 0, 2, 3, NONE, 2)),
    (hw.PerBlockAffine.asymmetric(0, 2**31, 3, 4, "float32"), struct.pack("<BBHIIIIB3x", 3, 1, 0, 0, 2**31, 3, 4, 3)),
    (hw.NF4(2, 64, 3), struct.pack("<BBHIII", 4, 1, 0, 2, 64, 3)),
    (hw.MXFP(1, 32, 3), struct.pack("<BBHIII", 5, 1, 0, 1, 32, 3)),
]
IDS = [f"{type(scheme).__name__}-{i}" for i, (scheme, _) in enumerate(SCHEMES)]


@pytest.mark.parametrize(("scheme", "data"), SCHEMES, ids=IDS)
def test_bytes_both_ways(scheme: Any, data: bytes) -> None:
    assert scheme.encode() == data
    assert scheme.scheme_tag == data[0]
    for buffer in (data, bytearray(data), memoryview(data), data + b"padding"):
        again = hw.decode_quantization(buffer)
        assert (again, type(again), hash(again)) == (scheme, type(scheme), hash(scheme))
    assert pickle.loads(pickle.dumps(scheme)) == copy.deepcopy(scheme) == scheme
    field = dataclasses.fields(scheme)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(scheme, field, 1)
    for cut in range(len(data)):
        with pytest.raises(hw.TruncatedError) as caught:
            hw.decode_quantization(data[:cut])
        assert (caught.value.available, caught.value.needed > cut) == (cut, True)


def test_schemes_differ_from_each_other() -> None:
    assert len({scheme for scheme, _ in SCHEMES}) == len(SCHEMES)


@pytest.mark.parametrize(("scheme", "data"), SCHEMES, ids=IDS)
def test_no_byte_breaks_the_reader(scheme: Any, data: bytes) -> None:
    """Each single-byte change is refused, or is a value whose bytes are the changed ones."""
    for at in range(len(data)):
        for value in range(256):
            changed = data[:at] + bytes([value]) + data[at + 1 :]
            try:
                found = hw.decode_quantization(changed)
            except (hw.UnsupportedError, hw.TruncatedError):
                continue
            except hw.InvalidDescriptorError:
                assert not (at == 0 and value not in range(1, 6))
                assert at != 1
                continue
            assert changed.startswith(found.encode())


def test_symmetric_and_zero_point_index_exclude_each_other() -> None:
    """The index is FFFFFFFF when SYMMETRIC: of the scheme's own bytes, whatever tensor it stands on."""
    for data in (
        struct.pack("<BBHIIIB3x", 2, 1, 1, 1, 3, 4, 3),
        struct.pack("<BBHIIIIB3x", 3, 1, 1, 0, 4, 3, 4, 3),
    ):
        with pytest.raises(hw.InvalidDescriptorError) as caught:
            hw.decode_quantization(data)
        assert caught.value.code == "quantization_buffer"


@pytest.mark.parametrize("scale", [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e39, 1e-60, -1e39])
def test_scales_that_no_scheme_has(scale: float) -> None:
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        hw.PerTensorAffine(scale)
    assert caught.value.code == "quantization_scale"


def test_a_scale_is_a_float32() -> None:
    assert hw.PerTensorAffine(0.1).scale == float(np.float32(0.1)) != 0.1
    assert hw.PerTensorAffine(0.1) == hw.PerTensorAffine(float(np.float32(0.1)))
    assert hw.PerTensorAffine(np.float64(2)).scale == 2.0
    for wrong in ("0.5", None, 1j, [0.5]):
        with pytest.raises(TypeError):
            hw.PerTensorAffine(wrong)  # type: ignore[arg-type]


def test_zero_points_are_int32() -> None:
    for point in (-(2**31), 2**31 - 1):
        assert hw.PerTensorAffine(1.0, point).zero_point == point
    for point in (-(2**31) - 1, 2**31, 2**80):
        with pytest.raises(hw.InvalidDescriptorError) as caught:
            hw.PerTensorAffine(1.0, point)
        assert caught.value.code == "quantization_zero_point"
    for wrong in (1.0, "1", None):
        with pytest.raises(TypeError):
            hw.PerTensorAffine(1.0, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "allowed"),
    [
        (lambda size: hw.PerBlockAffine.symmetric(0, size, 3, "float32"), [2**n for n in range(1, 32)]),
        (lambda size: hw.NF4(0, size, 3), [2**n for n in range(3, 32)]),
        (lambda size: hw.MXFP(0, size, 3), [2**n for n in range(4, 12)]),
    ],
    ids=["per_block", "nf4", "mxfp"],
)
def test_block_sizes(make: Any, allowed: list[int]) -> None:
    for size in {*range(70), *(2**n + d for n in range(33) for d in (-1, 0, 1)), 2**40, -4}:
        if size in allowed:
            assert make(size).block_size == size
            continue
        with pytest.raises(hw.InvalidDescriptorError) as caught:
            make(size)
        assert caught.value.code == "quantization_block"


def test_scale_types() -> None:
    for name in ("float16", "bfloat16", "float32", np.float16, ml_dtypes.bfloat16, hw.float32):
        assert hw.PerBlockAffine.symmetric(0, 4, 3, name).scale_type is hw.Dtype.of(name)
    for wrong in ("float64", "int8", hw.float8_e4m3, None):
        with pytest.raises((hw.InvalidDescriptorError, hw.UnsupportedError)):
            hw.PerBlockAffine.symmetric(0, 4, 3, wrong)


@pytest.mark.parametrize("value", [-1, 2**32, 2**70])
def test_axes_and_indices_are_uint32(value: int) -> None:
    for make in (
        lambda: hw.PerChannelAffine.symmetric(value, 3),
        lambda: hw.PerChannelAffine.symmetric(1, value),
        lambda: hw.PerChannelAffine.asymmetric(1, 3, value),
        lambda: hw.PerBlockAffine.symmetric(value, 4, 3, "float32"),
        lambda: hw.PerBlockAffine.asymmetric(0, 4, 3, value, "float32"),
        lambda: hw.NF4(0, 8, value),
        lambda: hw.MXFP(value, 16, 3),
    ):
        with pytest.raises(hw.InvalidDescriptorError):
            make()


# Names: the rest follows from the arrays.


def test_names() -> None:
    pool = np.zeros((5, 4, 2, 8), np.int8)
    scales, heads = np.ones((5, 4), np.float16), np.ones(2, np.float32)
    points = np.zeros((5, 4), np.int32)
    for arguments, expected in (
        ({"quantization": "per_tensor", "scales": 0.5}, hw.PerTensorAffine(0.5)),
        ({"quantization": "per_tensor", "scales": np.array([0.5]), "zero_points": 3}, hw.PerTensorAffine(0.5, 3)),
        ({"quantization": "per_channel", "scales": heads}, hw.PerChannelAffine.symmetric(1, 3)),
        ({"quantization": "per_channel", "scales": np.ones(8, "f4")}, hw.PerChannelAffine.symmetric(2, 3)),
        ({"quantization": "per_block", "scales": scales}, hw.PerBlockAffine.symmetric(0, 4, 3, "float16")),
        (
            {"quantization": "per_block", "scales": scales, "zero_points": points},
            hw.PerBlockAffine.asymmetric(0, 4, 3, 4, "float16"),
        ),
        (
            {"quantization": "per_channel", "scales": heads, "zero_points": np.zeros(2, np.int64)},
            hw.PerChannelAffine.asymmetric(1, 3, 4),
        ),
    ):
        tensor = worked(page_pool=pool, **arguments)
        assert tensor.quantization == expected
        assert hw.decode(hw.encode(tensor)) == tensor


def test_scales_and_zero_points_of_any_memory() -> None:
    pool = np.zeros((5, 4, 2, 8), np.int8)
    scales, points = np.arange(1, 21, dtype="<f4").reshape(5, 4), np.arange(20, dtype="<i4").reshape(5, 4)
    expected = worked(page_pool=pool, quantization="per_block", scales=scales, zero_points=points)
    makes: list[Any] = [
        lambda a: a.astype(a.dtype.newbyteorder(">")),
        lambda a: np.repeat(a, 2, axis=1)[:, ::2],
        lambda a: np.ascontiguousarray(a[::-1])[::-1],
        np.asfortranarray,
    ]
    for make in makes:
        t = worked(page_pool=pool, quantization="per_block", scales=make(scales), zero_points=make(points))
        for options in ({}, {"framing": "bare"}, {"pages": "live"}, {"scrub": True}):
            assert hw.encode(t, **options) == hw.encode(expected, **options)
        assert t == expected
        assert np.array_equal(t.dequantize(0), expected.dequantize(0))
    for kind in ("i1", "u1", "i2", ">u2", "i8", "u8"):
        t = worked(page_pool=pool, quantization="per_block", scales=scales, zero_points=points.astype(kind))
        assert t == expected
    one = worked(page_pool=pool, quantization="per_block", scales=np.broadcast_to(np.float32(2), (5, 4)))
    assert hw.decode(hw.encode(one)).scales.tolist() == [[2.0] * 4] * 5  # type: ignore[union-attr]


def test_what_does_not_follow_is_asked_for() -> None:
    square = np.zeros((5, 4, 8, 8), np.int8)
    with pytest.raises(TypeError, match="num_heads and head_dim"):
        worked(page_pool=square, quantization="per_channel", scales=np.ones(8, np.float32))
    pool = np.zeros((5, 4, 2, 8), np.int8)
    broken: list[dict[str, Any]] = [
        {"quantization": "per_token", "scales": 1.0},
        {"quantization": "per_channel", "scales": np.ones(3, np.float32)},
        {"quantization": "per_channel", "scales": np.ones(2, np.float64)},
        {"quantization": "per_block", "scales": np.ones((4, 5), np.float32)},
        {"quantization": "per_block", "scales": np.ones((5, 4), np.float32), "zero_points": np.zeros((5, 4))},
        {"quantization": hw.PerBlockAffine.symmetric(0, 8, 3, "float32"), "scales": np.ones((5, 4), np.float32)},
        {"quantization": hw.PerChannelAffine.symmetric(0, 3), "scales": np.ones(9, np.float32)},
        {"quantization": hw.PerChannelAffine.asymmetric(1, 3, 3), "scales": np.ones(2, "f4"), "zero_points": BT[:2]},
        *(
            {"quantization": "per_block", "scales": np.ones((5, 4), np.float32), "zero_points": points}
            for points in (np.full((5, 4), 2**31), np.full((5, 4), -(2**31) - 1), np.full((5, 4), 2**63, np.uint64))
        ),
    ]
    for arguments in broken:
        with pytest.raises(hw.InvalidDescriptorError):
            worked(page_pool=pool, **arguments)
    missing: list[dict[str, Any]] = [
        {"scales": np.ones(2, np.float32)},
        {"quantization": "per_block"},
        {"quantization": hw.PerTensorAffine(1.0), "scales": np.ones(1, np.float32)},
        {"quantization": hw.PerChannelAffine.asymmetric(1, 3, 4), "scales": np.ones(2, np.float32)},
        {"quantization": b"\x01"},
        {"quantization": "per_tensor", "scales": np.ones(2)},
        {"quantization": "per_tensor", "scales": 1.0, "zero_points": np.zeros(2, np.int32)},
        {"quantization": "per_tensor", "scales": 1.0, "zero_points": 0.5},
        {"quantization": hw.MXFP(2, 16, 3)},
    ]
    for arguments in missing:
        with pytest.raises(TypeError):
            worked(page_pool=pool, **arguments)


@pytest.mark.parametrize("dtype", BLOCK_STORAGE, ids=str)
def test_one_buffer_for_scales_and_zero_points_is_read_and_relayed(dtype: hw.Dtype) -> None:
    pool = np.arange(320 * dtype.bit_width // 8, dtype=np.uint8)
    scales, points = np.arange(20, dtype="<f4") + 1, np.zeros(20, "<i4")
    quant = struct.pack("<BBHIIIIB3x", 3, 1, 0, 0, 4, 3, 3, 3)
    fields: dict[str, Any] = {"type_tag": dtype.tag, "sizes": (pool.nbytes, 12, 12, 160), "flags": 1, "quant": quant}
    data = raw(pool=pool, **fields) + scales.tobytes() + points.tobytes()
    found = verdict(data)
    assert found.kind == "ok"
    t = found.item
    assert (t.scales.tobytes(), t.zero_points.tobytes()) == (scales.tobytes(), points.tobytes())
    assert hw.encode(t, framing="bare") == data
    assert hw.decode(hw.encode(t)) == t
    assert pickle.loads(pickle.dumps(t)) == t
    assert t.replace(seq_lens=[6, 3], layer_index=4).dequantize(1).shape == (3, 2, 8)
