"""value = scale * (stored - zero_point): subtract exactly, round to float32, one float32 multiplication.

Scales and zero points are judged where a valid token uses them, nowhere else.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import AFFINE, NAMED, schemes_of, tensors
from support import Array, worked

import hurray_wire as hw


def values(stored: Array, zero: Any, scale: Any) -> Array:
    """Doubles hold every stored value of up to 32 bits and its difference from an int32 exactly."""
    exact = stored.astype(np.float64) - np.asarray(zero, np.float64)
    with np.errstate(all="ignore"):
        return exact.astype(np.float32) * np.asarray(scale).astype(np.float32)


def expected_of(tensor: hw.BlockPagedTensor, seq: int) -> Array:
    scheme, stored = tensor.quantization, tensor.gather(seq)
    if isinstance(scheme, hw.PerTensorAffine):
        return values(stored, scheme.zero_point, scheme.scale)
    assert isinstance(scheme, hw.PerChannelAffine | hw.PerBlockAffine)
    assert tensor.scales is not None
    zeros = np.zeros(tensor.scales.shape, np.int32) if tensor.zero_points is None else tensor.zero_points
    if isinstance(scheme, hw.PerBlockAffine):
        slots = tensor.token_slots(seq)
        scales, zeros = (a.reshape(-1)[slots].reshape(-1, 1, 1) for a in (tensor.scales, zeros))
        return values(stored, zeros, scales)
    shape = (-1, 1) if scheme.axis == 1 else (1, -1)
    return values(stored, zeros.reshape(shape), tensor.scales.reshape(shape))


@pytest.mark.parametrize(
    ("name", "scheme"), [(d.name, s) for d in AFFINE for s in schemes_of(d) if s not in ("nf4", "mxfp")]
)
@settings(max_examples=20)
@given(data=st.data())
def test_dequantize_is_the_specifications_arithmetic(name: str, scheme: str, data: st.DataObject) -> None:
    kind: dict[str, Any] = {"private": False, "scheme": scheme, "lens_known": True, "lawful_scales": True}
    tensor = data.draw(tensors(dtypes=[hw.Dtype.of(name)], **kind)).tensor
    for seq in range(tensor.num_seqs):
        found, expected = tensor.dequantize(seq), expected_of(tensor, seq)
        assert (str(found.dtype), found.shape) == ("float32", expected.shape)
        assert np.array_equal(found, expected, equal_nan=True)
        out = np.full(expected.shape, 7, np.float32)
        assert tensor.dequantize(seq, out=out) is out
        assert np.array_equal(out, expected, equal_nan=True)


def test_int32_differences_are_exact_before_they_are_rounded() -> None:
    pool = np.array([2**31 - 1, -(2**31), 2**24 + 1, -5], np.int32).reshape(1, 4, 1, 1)
    for zero in (-(2**31), 2**31 - 1, 2**24 - 1, -5):
        t = hw.BlockPagedTensor(
            pool, block_table=[0], seq_ptr=[0, 1], seq_lens=[4], quantization=hw.PerTensorAffine(1.0, zero)
        )
        expected = [np.float32(float(int(v) - zero)) for v in pool.reshape(-1)]
        assert t.dequantize(0).reshape(-1).tolist() == expected


def per_block(dtype: Any = np.int8, **changes: Any) -> hw.BlockPagedTensor:
    """One sequence of 6 tokens in pages 3 and 2 of 5: slots 12 to 15, 8 and 9."""
    arrays = {"scales": np.ones((5, 4), np.float32), "zero_points": np.zeros((5, 4), np.int32)} | changes
    pool = np.arange(320, dtype=np.uint8).view(dtype).reshape(5, 4, 2, 8)
    return hw.BlockPagedTensor(
        pool, block_table=[3, 2], seq_ptr=[0, 2], seq_lens=[6], quantization="per_block", **arrays
    )


@pytest.mark.parametrize("bad", [0.0, -0.0, np.nan, np.inf, -np.inf])
def test_scales_are_judged_under_valid_tokens_only(bad: float) -> None:
    scales = np.full((5, 4), bad, np.float32)
    scales[3], scales[2, :2] = 1, 2
    assert per_block(scales=scales).dequantize(0).shape == (6, 2, 8)
    scales[2, 1] = bad
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        per_block(scales=scales).dequantize(0)
    assert caught.value.code == "quantization_scale"


def test_zero_points_are_judged_under_valid_tokens_only() -> None:
    points = np.full((5, 4), 128, np.int32)
    points[3], points[2, :2] = 127, -128
    assert per_block(zero_points=points).dequantize(0).shape == (6, 2, 8)
    points[3, 2] = -129
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        per_block(zero_points=points).dequantize(0)
    assert caught.value.code == "quantization_zero_point"


def test_the_place_of_a_bad_entry_is_its_slot() -> None:
    """Where it stands in the array, not the number of the token that it is used for."""
    scales, points = np.ones((5, 4), np.float32), np.zeros((5, 4), np.int32)
    scales[2, 1], points[3, 2] = 0, 200
    for arrays, where in (({"scales": scales}, "scales[9]"), ({"zero_points": points}, "zero_points[14]")):
        with pytest.raises(hw.InvalidDescriptorError) as caught:
            per_block(**arrays).dequantize(0)
        assert caught.value.where == where


def test_a_sequence_without_tokens_uses_no_scale() -> None:
    t = worked(
        page_pool=np.zeros((5, 4, 2, 8), np.int8),
        seq_lens=[8, 0],
        quantization="per_channel",
        scales=np.array([np.nan, 1], np.float32),
    )
    assert t.dequantize(1).shape == (0, 2, 8)
    with pytest.raises(hw.InvalidDescriptorError):
        t.dequantize(0)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_float8_zero_points_are_zero(dtype: Any) -> None:
    assert np.isfinite(per_block(dtype).dequantize(0)).any()
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        worked(page_pool=np.zeros((5, 4, 2, 8), dtype), quantization=hw.PerTensorAffine(0.5, 1))
    assert caught.value.code == "quantization_zero_point"
    points = np.zeros((5, 4), np.int32)
    points[3, 0] = 1
    t = per_block(dtype, zero_points=points)
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        t.dequantize(0)
    assert caught.value.code == "quantization_zero_point"


def test_float_blocks_are_carried_and_not_interpreted() -> None:
    packed = np.arange(160, dtype=np.uint8)
    sizes: dict[str, Any] = {"page_size": 4, "num_heads": 2, "head_dim": 8, "scales": np.arange(7, dtype=np.uint8)}
    for dtype, scheme in (("uint4", hw.NF4(2, 8, 3)), ("float4_e2m1", hw.MXFP(2, 16, 3))):
        t = worked(page_pool=packed, dtype=dtype, quantization=scheme, **sizes)
        for framing in ("bare", "hrkv"):
            again = hw.decode(hw.encode(t, framing=framing)).replace(seq_lens=[6, 3])
            assert again == t
            with pytest.raises(hw.UnsupportedError) as caught:
                again.dequantize(0)
            assert caught.value.code == "scheme"


@pytest.mark.parametrize("dtype", [d for d in NAMED if not d.name.startswith("complex")], ids=str)
@settings(max_examples=20)
@given(data=st.data())
def test_values_of_an_unquantised_tensor_are_its_elements(dtype: hw.Dtype, data: st.DataObject) -> None:
    """Whatever the bits are, and without a warning: a float64 may well be no float32."""
    tensor = data.draw(tensors(dtypes=[dtype], private=False, scheme="", lens_known=True)).tensor
    for seq in range(tensor.num_seqs):
        with np.errstate(all="ignore"):
            expected = tensor.gather(seq).astype(np.float32)
        assert np.array_equal(tensor.dequantize(seq), expected, equal_nan=True)


def test_what_has_no_float32_value() -> None:
    sizes: dict[str, Any] = {"page_size": 4, "num_heads": 2, "head_dim": 8}
    extension = hw.ExtensionType(8, is_float=False, is_signed=False)
    for t in (
        worked(page_pool=np.zeros((5, 4, 2, 8), np.complex64)),
        worked(page_pool=np.zeros(5120, np.uint8), dtype="float128", **sizes),
        worked(page_pool=np.zeros(320, np.uint8), dtype=0xF1, extension_type=extension, **sizes),
    ):
        with pytest.raises(hw.UnsupportedError) as caught:
            t.dequantize(0)
        assert caught.value.code == "dtype"


def test_out_must_fit() -> None:
    t = worked()
    outs: list[Any] = [np.zeros((6, 2, 8), np.float64), np.zeros((5, 2, 8), np.float32), np.zeros(96, np.float32)]
    for out in outs:
        with pytest.raises(ValueError, match="out must be"):
            t.dequantize(0, out=out)
    wide = np.zeros((6, 2, 16), np.float32)
    assert np.array_equal(t.dequantize(0, out=wide[:, :, ::2]), t.gather(0).astype(np.float32))
    assert not wide[:, :, 1::2].any()
