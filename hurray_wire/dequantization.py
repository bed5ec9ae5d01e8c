"""value = scale * (stored - zero_point): the arithmetic of the affine schemes (section 1).

Arrays in, float32 out: subtract exactly, round to float32, one float32 multiplication. Scales and zero points are
judged here, when they are used; slots that no token uses may hold anything.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hurray_wire.dtypes import Dtype
from hurray_wire.errors import Code, InvalidDescriptorError, UnsupportedError
from hurray_wire.quantization import MXFP, NF4, PerBlockAffine, PerChannelAffine, PerTensorAffine, Quantization
from hurray_wire.rules import ZERO_POINT_RANGES

Float32 = npt.NDArray[np.float32]


def to_float32(
    stored: npt.NDArray[Any],
    dtype: Dtype,
    quantization: Quantization | None,
    scales: npt.NDArray[Any] | None,
    zero_points: npt.NDArray[Any] | None,
    out: Float32 | None = None,
    places: npt.NDArray[np.int64] | None = None,
) -> Float32:
    """Stored elements `[tokens, num_heads, head_dim]` as float32.

    Args:
        stored: elements of `dtype.numpy`.
        scales, zero_points: for per-block one entry a token, in the tokens' order; for per-channel one an index of
            the axis; None for per-tensor, where they stand in the scheme.
        places: for per-block the entries' places in the tensor's own arrays, for errors.

    Raises:
        InvalidDescriptorError: `quantization_scale`, `quantization_zero_point`.
        UnsupportedError: `scheme` for NF4 and MXFP, `dtype` for what has no float32 value.
    """
    if isinstance(quantization, NF4 | MXFP):
        name = type(quantization).__name__
        raise UnsupportedError(f"{name} values are carried, not interpreted", code=Code.SCHEME, where="quantization")
    if dtype.numpy is None or dtype.numpy.kind == "c":
        raise UnsupportedError(f"{dtype.name} has no float32 value", code=Code.DTYPE, where="dtype")
    result = np.empty(stored.shape, np.float32) if out is None else out
    if not stored.size:
        return result  # no token uses a scale
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return _values(result, stored, dtype, quantization, scales, zero_points, places)


def _values(
    result: Float32,
    stored: npt.NDArray[Any],
    dtype: Dtype,
    quantization: Quantization | None,
    scales: npt.NDArray[Any] | None,
    zero_points: npt.NDArray[Any] | None,
    places: npt.NDArray[np.int64] | None,
) -> Float32:
    if quantization is None:
        np.copyto(result, stored, casting="unsafe")
        return result
    assert not isinstance(quantization, NF4 | MXFP)
    assert dtype.numpy is not None
    if isinstance(quantization, PerTensorAffine):
        scale: Any = np.float32(quantization.scale)
        zero: Any = quantization.zero_point
    else:
        scale, zero = _entries(quantization, scales, zero_points, dtype, places)
    plain = not (zero if isinstance(zero, int) else np.any(zero))
    if plain and np.ndim(scale) == 0 and dtype.numpy.isbuiltin == 1:  # the same roundings, in one pass
        return np.multiply(stored, scale, out=result, dtype=np.float32, casting="unsafe")
    if plain:
        np.copyto(result, stored, casting="unsafe")
    elif dtype.bit_width <= 16:  # both sides and their difference are exact in float32
        np.copyto(result, stored, casting="unsafe")
        np.subtract(result, np.asarray(zero, np.float32), out=result)
    else:
        np.copyto(result, stored.astype(np.int64) - np.asarray(zero, np.int64), casting="unsafe")
    np.multiply(result, scale, out=result)
    return result


def _entries(
    quantization: PerChannelAffine | PerBlockAffine,
    scales: npt.NDArray[Any] | None,
    zero_points: npt.NDArray[Any] | None,
    dtype: Dtype,
    places: npt.NDArray[np.int64] | None,
) -> tuple[Any, Any]:
    assert scales is not None
    scale = _shaped(quantization, scales.astype(np.float32))
    _judge_scales(scale, places)
    if zero_points is None:
        return scale, 0
    least, most = ZERO_POINT_RANGES[dtype.tag]
    wrong = (zero_points < least) | (zero_points > most)
    if wrong.any():
        index = int(wrong.argmax())
        message = f"is {int(zero_points.reshape(-1)[index])}, must be from {least} to {most} for {dtype.name}"
        where = f"zero_points[{_place(index, places)}]"
        raise InvalidDescriptorError(message, code=Code.QUANTIZATION_ZERO_POINT, where=where)
    return scale, _shaped(quantization, zero_points)


def _shaped(quantization: PerChannelAffine | PerBlockAffine, entries: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if isinstance(quantization, PerBlockAffine):
        return entries.reshape(-1, 1, 1)
    return entries.reshape(1, -1, 1) if quantization.axis == 1 else entries.reshape(1, 1, -1)


def _place(index: int, places: npt.NDArray[np.int64] | None) -> int:
    return index if places is None else int(places[index])


def _judge_scales(scale: Float32, places: npt.NDArray[np.int64] | None) -> None:
    wrong = ~np.isfinite(scale) | (scale == 0)
    if wrong.any():
        index = int(wrong.argmax())
        message = f"is {float(scale.reshape(-1)[index])} under a valid token, must be finite and not 0"
        raise InvalidDescriptorError(message, code=Code.QUANTIZATION_SCALE, where=f"scales[{_place(index, places)}]")
