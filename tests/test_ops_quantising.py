"""Values to stored elements and back: exact numbers, edges, refusals. Tolerances stand in test_ops_laws."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import hurray_wire as hw
from hurray_wire import ops
from hurray_wire.errors import Code
from hurray_wire.ops.float8 import narrow, widen

Array = npt.NDArray[Any]


def f32(values: Any) -> Array:
    return np.asarray(values, np.float32)


def tensor(values: Any, *, lens: int | None = None, dtype: Any = np.float32, **fields: Any) -> hw.BlockPagedTensor:
    """One sequence in pages of `[page, slot, head, dim]` values."""
    pool = np.asarray(values, dtype)
    known = {"seq_lens": [pool.shape[0] * pool.shape[1] if lens is None else lens]}
    return hw.BlockPagedTensor(pool, block_table=range(len(pool)), seq_ptr=[0, len(pool)], **(known | fields))


def row(values: Any, **fields: Any) -> hw.BlockPagedTensor:
    """One page of as many slots, a head and an element each."""
    return tensor(np.asarray(values).reshape(1, -1, 1, 1), **fields)


def test_int8_is_symmetric_and_stays_off_its_least() -> None:
    q = ops.quantize(row([-2.0, 1.0, 0.5, 0.0]), "per_tensor", dtype="int8")
    assert q.page_pool.reshape(-1).tolist() == [-127, 64, 32, 0]
    assert q.quantization == hw.PerTensorAffine(2 / 127)
    fixed = ops.quantize(row([-9.0, 9.0]), hw.PerTensorAffine(0.01), dtype="int8")
    assert fixed.page_pool.reshape(-1).tolist() == [-127, 127]


def test_ties_go_to_even() -> None:
    q = ops.quantize(row([0.5, 1.5, 2.5, -0.5, -1.5, -2.5]), hw.PerTensorAffine(1.0), dtype="int8")
    assert q.page_pool.reshape(-1).tolist() == [0, 2, 2, 0, -2, -2]


def test_uint8_has_a_zero_point_within_its_range() -> None:
    q = ops.quantize(row([-1.0, 0.0, 4.1, 2.0]), "per_tensor", dtype="uint8")
    assert isinstance(q.quantization, hw.PerTensorAffine)
    assert (q.quantization.scale, q.quantization.zero_point) == (float(np.float32(5.1 / 255)), 50)
    assert q.page_pool.reshape(-1).tolist() == [0, 50, 255, 150]
    above = ops.quantize(row([3.0, 5.0]), "per_tensor", dtype="uint8")
    assert above.quantization == hw.PerTensorAffine(5 / 255)
    below = ops.quantize(row([-3.0, -5.0]), "per_tensor", dtype="uint8")
    assert below.quantization == hw.PerTensorAffine(5 / 255, 255)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "uint4", "int2", "uint2", "float8_e4m3", "float8_e5m2"])
@pytest.mark.parametrize("scheme", ["per_tensor", "per_channel", "per_block"])
def test_zeros_have_scale_one(dtype: str, scheme: str) -> None:
    q = ops.quantize(tensor(np.zeros((2, 4, 1, 2))), scheme, dtype=dtype)
    scale = [q.quantization.scale] if isinstance(q.quantization, hw.PerTensorAffine) else q.scales.reshape(-1).tolist()  # type: ignore[union-attr]
    assert set(scale) == {1.0}
    assert not ops.dequantize(q).page_pool.any()
    assert q.zero_points is None or not q.zero_points.any()


def test_a_block_of_zeros_beside_others() -> None:
    q = ops.quantize(row([0.0, 254.0, 0.0, 0.127]), "per_block", dtype="int8")
    assert q.scales is not None
    assert q.scales.tolist() == [[1.0, 2.0, 1.0, float(np.float32(0.001))]]
    assert q.page_pool.reshape(-1).tolist() == [0, 127, 0, 127]


def test_int4_is_packed() -> None:
    q = ops.quantize(row([-7.0, 7.0, 3.0, -1.0]), "per_tensor", dtype="int4")
    assert q.page_pool.tolist() == [0x79, 0xF3]
    assert ops.dequantize(q).page_pool.reshape(-1).tolist() == [-7.0, 7.0, 3.0, -1.0]
    with pytest.raises(hw.UnsupportedError) as caught:
        ops.quantize(row([1.0, 2.0, 3.0]), "per_tensor", dtype="int4")
    assert caught.value.code is Code.PACKED_POOL


@pytest.mark.parametrize(("dtype", "most"), [("float8_e4m3", 448.0), ("float8_e5m2", 57344.0)])
def test_float8_is_clipped_before_it_is_rounded(dtype: str, most: float) -> None:
    q = ops.quantize(row([1e9, -1e9, most, 1.0]), hw.PerTensorAffine(1.0), dtype=dtype)
    assert ops.dequantize(q).page_pool.reshape(-1).tolist() == [most, -most, most, 1.0]
    fitted = ops.quantize(row([2 * most, -most, 0.0, 2.0]), "per_tensor", dtype=dtype)
    assert fitted.quantization == hw.PerTensorAffine(2.0)
    assert ops.dequantize(fitted).page_pool.reshape(-1).tolist() == [2 * most, -most, 0.0, 2.0]


@pytest.mark.parametrize(("name", "most"), [("float8_e4m3", 448.0), ("float8_e5m2", 57344.0)])
def test_float8_tables_say_what_casts_say(name: str, most: float) -> None:
    dtype = hw.Dtype.of(name)
    assert dtype.numpy is not None
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    codes = np.arange(256, dtype=np.uint8).view(dtype.numpy).astype(np.float32)
    finite = codes[np.isfinite(codes)]
    halves = ((finite[:, None].astype(np.float64) + finite) / 2).astype(np.float32).reshape(-1)  # ties
    near = [np.nextafter(halves, np.float32(side)) for side in (np.inf, -np.inf)]
    values = np.concatenate([bits.view(np.float32), halves, *near, f32([0.0, -0.0, np.inf, -np.inf])])
    values = values[~np.isnan(values)]
    out = np.empty(values.size, np.uint8)
    narrow(values.copy(), dtype, out)
    assert (out == np.clip(values, -most, most).astype(dtype.numpy).view(np.uint8)).all()
    wide = np.empty(256, np.float32)
    widen(np.arange(256, dtype=np.uint8).view(dtype.numpy), dtype, wide)
    assert wide.tobytes() == codes.tobytes()


def test_scales_by_head_and_by_dim() -> None:
    values = np.array([[1.0, 2.0], [10.0, 40.0]]).reshape(1, 1, 2, 2).repeat(2, axis=1)
    by_dim = ops.quantize(tensor(values), "per_channel", dtype="int8")
    assert by_dim.scales is not None
    assert by_dim.scales.tolist() == f32([10 / 127, 40 / 127]).tolist()
    by_head = ops.quantize(tensor(values), hw.PerChannelAffine.symmetric(1, 3), dtype="int8")
    assert by_head.scales is not None
    assert by_head.scales.tolist() == f32([2 / 127, 40 / 127]).tolist()
    asymmetric = ops.quantize(tensor(values), hw.PerChannelAffine.asymmetric(1, 3, 4), dtype="int8")
    assert asymmetric.zero_points is not None
    assert asymmetric.zero_points.tolist() == [-128, -128]
    assert np.abs(ops.dequantize(asymmetric).page_pool - values).max() <= 0.5 * 40 / 255 * 1.001


@pytest.mark.parametrize("scale_type", ["float16", "bfloat16", "float32"])
def test_scales_are_rounded_before_they_are_used(scale_type: str) -> None:
    scheme = hw.PerBlockAffine.symmetric(0, 2, 3, scale_type)
    q = ops.quantize(row([1.0, 3.3]), scheme, dtype="int8")
    assert q.scales is not None
    rounded = (np.array([1.0, 3.3]) / 127).astype(q.scales.dtype)
    assert q.scales.tobytes() == rounded.tobytes()
    back = ops.dequantize(q).page_pool.reshape(-1)
    assert (back == rounded.astype(np.float32) * np.float32(q.page_pool.reshape(-1))).all()


def test_values_so_small_that_their_scale_would_be_zero() -> None:
    tiny = float(np.float32(1e-45))
    q = ops.quantize(row([tiny, 0.0]), "per_tensor", dtype="int8")
    assert ops.dequantize(q).page_pool.reshape(-1).tolist() == [tiny, 0.0]
    half = hw.PerBlockAffine.symmetric(0, 2, 3, "float16")
    assert ops.quantize(row([1e-7, 1e-6]), half, dtype="int8").scales.tolist() == [[2.0**-24, 2.0**-24]]  # type: ignore[union-attr]


def test_values_whose_scale_does_not_fit_its_type() -> None:
    half = hw.PerBlockAffine.symmetric(0, 2, 3, "float16")
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        ops.quantize(row([1e9, 1.0]), half, dtype="int8")
    assert caught.value.code is Code.QUANTIZATION_SCALE
    big = float(np.finfo(np.float32).max)
    q = ops.quantize(row([-big / 2, big / 2]), "per_tensor", dtype="uint8")
    assert np.isfinite(ops.dequantize(q).page_pool).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scheme", ["per_tensor", "per_channel", "per_block"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e5m2"])
def test_values_that_are_no_numbers_count_where_a_token_is(bad: float, scheme: str, dtype: str) -> None:
    values = row([1.0, bad, 2.0, 0.0])
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        ops.quantize(values, scheme, dtype=dtype)
    assert caught.value.code is Code.QUANTIZATION_SCALE
    q = ops.quantize(values.replace(seq_lens=[1]), scheme, dtype=dtype)
    assert np.abs(ops.dequantize(q).page_pool.reshape(-1) - [1.0, 0, 0, 0]).max() < 0.01
    assert not np.any(q.page_pool.reshape(-1)[1:].view(np.uint8))


def test_without_seq_lens_every_slot_of_a_named_page_counts() -> None:
    pool = f32([1, 2, 3, 254, 5, 600]).reshape(3, 2, 1, 1)
    fields: dict[str, Any] = {"block_table": [0, 1], "seq_ptr": [0, 1, 2], "total_tokens": 2}
    q = ops.quantize(hw.BlockPagedTensor(pool, **fields), "per_tensor", dtype="int8")
    assert q.quantization == hw.PerTensorAffine(2.0)
    assert q.page_pool.reshape(-1).tolist() == [0, 1, 2, 127, 0, 0]
    assert ops.dequantize(q).page_pool.reshape(-1).tolist() == [0, 2, 4, 254, 0, 0]
    blocks = ops.quantize(hw.BlockPagedTensor(pool, **fields), "per_block", dtype="int8")
    with pytest.raises(hw.UnsupportedError) as caught:
        ops.dequantize(blocks)
    assert caught.value.code is Code.SEQ_LENS_UNKNOWN
    assert ops.dequantize(blocks.replace(seq_lens=[1, 1])).total_tokens == 2


@pytest.mark.parametrize(
    ("scheme", "dtype", "code"),
    [
        ("per_tensor", "float16", Code.QUANTIZATION_STORAGE),
        ("per_block", "int16", Code.QUANTIZATION_STORAGE),
        ("per_tensor", "int32", Code.DTYPE),
        ("per_token", "int8", Code.QUANTIZATION_SCHEME),
        (hw.PerChannelAffine.symmetric(0, 3), "int8", Code.QUANTIZATION_AXIS),
        (hw.PerBlockAffine.symmetric(0, 8, 3, "float32"), "int8", Code.QUANTIZATION_BLOCK),
        (hw.PerChannelAffine.symmetric(1, 3), "uint8", Code.SCHEME),
        (hw.NF4(2, 64, 3), "uint4", Code.SCHEME),
        (hw.MXFP(2, 32, 3), "int8", Code.SCHEME),
        (hw.PerTensorAffine(1.0, 3), "float8_e4m3", Code.QUANTIZATION_ZERO_POINT),
        ("per_tensor", "float8_e4m3fnuz", Code.DTYPE),
    ],
)
def test_schemes_and_types_that_do_not_go_together(scheme: Any, dtype: str, code: Code) -> None:
    with pytest.raises(hw.HurrayWireError) as caught:
        ops.quantize(row([1.0, 2.0, 3.0, 4.0]), scheme, dtype=dtype)
    assert caught.value.code is code


def test_what_is_no_scheme_or_has_no_values() -> None:
    with pytest.raises(TypeError):
        ops.quantize(row([1.0, 2.0]), 3, dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        ops.quantize(row([1.0, 2.0, 3.0]), "per_block", dtype="int8")
    assert caught.value.code is Code.QUANTIZATION_BLOCK
    with pytest.raises(hw.UnsupportedError) as unsupported:
        ops.quantize(row([1j, 2.0], dtype=np.complex64), "per_tensor", dtype="int8")
    assert unsupported.value.code is Code.DTYPE


def test_a_quantised_tensor_is_taken_by_its_values() -> None:
    q = ops.quantize(row([1.0, -2.0, 0.0, 3.0]), "per_block", dtype="int8")
    again = ops.quantize(q, "per_tensor", dtype="float8_e4m3")
    assert again.scales is None
    assert np.abs(ops.dequantize(again).page_pool.reshape(-1) - [1, -2, 0, 3]).max() < 0.1


def test_dequantize_of_plain_elements() -> None:
    t = row([1.0, 2.0])
    assert ops.dequantize(t) is t
    wide = ops.dequantize(row([1.0, 2.5], dtype=ml_dtypes.bfloat16, lens=1))
    assert wide.page_pool.reshape(-1).tolist() == [1.0, 0.0]
    assert ops.dequantize(row([1.5, 2.5], dtype=">f8")).page_pool.reshape(-1).tolist() == [1.5, 2.5]


def test_dequantize_subtracts_before_it_rounds() -> None:
    pool = np.array([2**31 - 1, 2**31 - 2], np.int32).reshape(1, 2, 1, 1)
    t = tensor(pool, dtype=np.int32, quantization=hw.PerTensorAffine(1.0, 2**31 - 3))
    assert ops.dequantize(t).page_pool.reshape(-1).tolist() == [2.0, 1.0]
    assert t.dequantize(0).reshape(-1).tolist() == [2.0, 1.0]


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_scales_are_judged_under_tokens_only(bad: float) -> None:
    t = row([1.0, 2.0], dtype=np.int8, quantization="per_block", scales=f32([[2.0, bad]]))
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        ops.dequantize(t)
    assert caught.value.code is Code.QUANTIZATION_SCALE
    assert ops.dequantize(t.replace(seq_lens=[1])).page_pool.reshape(-1).tolist() == [2.0, 0.0]


def test_zero_points_are_judged_under_tokens_only() -> None:
    constants: dict[str, Any] = {"scales": f32([[2.0, 1.0]]), "zero_points": np.array([[1, 999]], np.int32)}
    t = row([1.0, 2.0], dtype=np.int8, quantization="per_block", **constants)
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        ops.dequantize(t)
    assert caught.value.code is Code.QUANTIZATION_ZERO_POINT
    assert ops.dequantize(t.replace(seq_lens=[1])).page_pool.reshape(-1).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("width", [1, 63, 64, 200])
def test_rows_short_and_long(width: int) -> None:
    rng = np.random.default_rng(width)
    values = rng.standard_normal((3, 4, 2, width)).astype(np.float32)
    for scheme in ("per_tensor", "per_channel", "per_block", hw.PerChannelAffine.asymmetric(1, 3, 4)):
        q = ops.quantize(tensor(values), scheme, dtype="int8")
        assert np.abs(ops.dequantize(q).page_pool - values).max() <= np.abs(values).max() / 127
    q = ops.quantize(tensor(values), "per_block", dtype="int8")
    assert q.scales is not None
    assert q.scales.tolist() == np.float32(np.abs(values).max(axis=(2, 3)).astype(np.float64) / 127).tolist()


def test_pages_beyond_one_chunk() -> None:
    rng = np.random.default_rng(9)
    values = rng.standard_normal((40, 16, 4, 64)).astype(np.float16)
    t = hw.BlockPagedTensor(values, block_table=range(0, 40, 2), seq_ptr=[0, 20], seq_lens=[320])
    q = ops.quantize(t, "per_channel", dtype="int8")
    live = values[::2].astype(np.float32)
    assert q.scales is not None
    assert q.scales.tolist() == np.float32(np.abs(live).max(axis=(0, 1, 2)).astype(np.float64) / 127).tolist()
    assert (q.page_pool[::2] == np.clip(np.rint(live / q.scales), -127, 127)).all()
    assert not q.page_pool[1::2].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3"])
def test_constants_that_are_given_do_not_let_them_pass(bad: float, dtype: str) -> None:
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        ops.quantize(row([1.0, bad]), hw.PerTensorAffine(1.0), dtype=dtype)
    assert caught.value.code is Code.QUANTIZATION_SCALE


def test_errors_say_which_slot_of_the_tensor() -> None:
    scales = np.ones((40, 2), np.float32)
    scales[37, 1] = 0
    t = tensor(np.ones((40, 2, 64, 64)), dtype=np.int8, quantization="per_block", scales=scales)
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        ops.dequantize(t)
    assert caught.value.where == "scales[75]"


def test_scales_of_no_tokens_are_not_judged() -> None:
    pool = np.ones((1, 2, 1, 3), np.int8)
    by_dim: dict[str, Any] = {"quantization": hw.PerChannelAffine(2, 3), "scales": f32([1, 0, np.nan])}
    t = hw.BlockPagedTensor(pool, block_table=[0], seq_ptr=[0, 1], seq_lens=[0], **by_dim)
    assert not ops.dequantize(t).page_pool.any()
    with pytest.raises(hw.InvalidDescriptorError):
        ops.dequantize(t.replace(seq_lens=[1]))


def test_what_has_no_values_is_refused_without_tokens_too() -> None:
    fields: dict[str, Any] = {"block_table": [], "seq_ptr": [0], "seq_lens": []}
    carried = hw.BlockPagedTensor(
        np.zeros((1, 2, 1, 32), np.int8), quantization=hw.MXFP(2, 32, 3), scales=np.ones(2, np.uint8), **fields
    )
    for t, code in ((carried, Code.SCHEME), (hw.BlockPagedTensor(np.zeros((1, 2, 1, 1), "c8"), **fields), Code.DTYPE)):
        with pytest.raises(hw.UnsupportedError) as caught:
            ops.dequantize(t)
        assert caught.value.code is code
