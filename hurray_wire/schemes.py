"""A caller's quantisation argument and arrays, made one: the scheme object, scales, zero points.

Which axis, block size, indices and scale type a name stands for follows from the arrays; nothing is guessed where
two readings are possible.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from hurray_wire.arrays import as_array
from hurray_wire.dtypes import Dtype
from hurray_wire.errors import Code, InvalidDescriptorError
from hurray_wire.quantization import CLASSES, PerBlockAffine, PerChannelAffine, PerTensorAffine, Quantization

Array = npt.NDArray[Any]
Quantized = tuple[Quantization | None, Array | None, Array | None]

NAMES = {"per_tensor": PerTensorAffine, "per_channel": PerChannelAffine, "per_block": PerBlockAffine}


def quantized(
    quantization: Quantization | str | None,
    scales: Any,
    zero_points: Any,
    num_pages: int,
    page_size: int,
    shape: tuple[int, int, int],
    *,
    author: bool,
) -> Quantized:
    """The scheme and its arrays, shapes and types checked against the tensor's.

    Args:
        author: whether this makes a new tensor: one buffer for scales and zero points is relayed, never authored.

    Raises:
        TypeError, InvalidDescriptorError, UnsupportedError: arrays that the scheme does not have, or of other shape.
    """
    if isinstance(quantization, str):
        return _named(quantization, scales, zero_points, num_pages, page_size, shape)
    if quantization is None or isinstance(quantization, PerTensorAffine):
        _absent(scales, "scales", quantization)
        _absent(zero_points, "zero_points", quantization)
        return quantization, None, None
    if type(quantization) not in CLASSES.values():
        names = ", ".join(c.__name__ for c in CLASSES.values())
        raise TypeError(f"quantization must be a name, None or one of {names}, not {quantization!r}")
    if not isinstance(quantization, PerChannelAffine | PerBlockAffine):
        _absent(zero_points, "zero_points", quantization)
        return quantization, _bytes(scales, quantization), None
    if author and quantization.zero_point_buffer_index == quantization.scale_buffer_index:
        message = "names one buffer for scales and zero points, which is read and relayed, never written anew"
        where = "quantization.zero_point_buffer_index"
        raise InvalidDescriptorError(message, code=Code.QUANTIZATION_BUFFER, where=where)
    entries = _entries_shape(quantization, num_pages, page_size, shape)
    if quantization.zero_point_buffer_index is None:
        _absent(zero_points, "zero_points", quantization)
        return quantization, _scales(scales, quantization.scale_type, entries), None
    zeros = _zero_points(zero_points, entries)
    return quantization, _scales(scales, quantization.scale_type, entries), zeros


def _named(
    name: str, scales: Any, zero_points: Any, num_pages: int, page_size: int, shape: tuple[int, int, int]
) -> Quantized:
    if name not in NAMES:
        message = f"is {name!r}, must be one of {', '.join(NAMES)}, or a scheme object"
        raise InvalidDescriptorError(message, code=Code.QUANTIZATION_SCHEME, where="quantization")
    if scales is None:
        raise TypeError(f"{name} needs scales")
    if name == "per_tensor":
        scale = float(np.asarray(scales, np.float64).reshape(-1)[0]) if np.size(scales) == 1 else None
        if scale is None or np.size(0 if zero_points is None else zero_points) != 1:
            raise TypeError("per_tensor takes one scale and at most one zero point")
        zero = 0 if zero_points is None else operator.index(np.asarray(zero_points).reshape(-1)[0])
        return PerTensorAffine(scale, zero), None, None
    array = as_array(scales)
    dtype = Dtype.of(array.dtype)
    zero_index = None if zero_points is None else 4
    scheme: Quantization
    if name == "per_block":
        scheme = PerBlockAffine(0, page_size, 3, zero_index, dtype)
    else:
        scheme = PerChannelAffine(_axis(array, shape), 3, zero_index)
    return quantized(scheme, scales, zero_points, num_pages, page_size, shape, author=True)


def _axis(scales: Array, shape: tuple[int, int, int]) -> int:
    axes = [axis for axis in (1, 2) if scales.shape == (shape[axis],)]
    if len(axes) == 2:
        raise TypeError(
            f"num_heads and head_dim are both {shape[1]}: give PerChannelAffine.symmetric(axis=1 or 2, "
            "scale_buffer_index=3)"
        )
    if not axes:
        message = f"scales have shape {scales.shape}, must be [num_heads] = [{shape[1]}] or [head_dim] = [{shape[2]}]"
        raise InvalidDescriptorError(message, code=Code.BUFFER_SIZE, where="scales")
    return axes[0]


def _entries_shape(
    scheme: PerChannelAffine | PerBlockAffine, num_pages: int, page_size: int, shape: tuple[int, int, int]
) -> tuple[int, ...]:
    if isinstance(scheme, PerBlockAffine):
        return (num_pages, page_size)
    if scheme.axis not in (1, 2):
        message = f"is {scheme.axis}, must be 1 or 2 on block-paged"
        raise InvalidDescriptorError(message, code=Code.QUANTIZATION_AXIS, where="quantization.axis")
    return (shape[scheme.axis],)


def _absent(value: Any, name: str, scheme: Quantization | None) -> None:
    if value is not None:
        told = "an unquantised tensor" if scheme is None else repr(scheme)
        raise TypeError(f"{told} has no {name}")


def _bytes(scales: Any, scheme: Quantization) -> Array:
    if scales is None:
        raise TypeError(f"{scheme!r} needs scales, as 1-D uint8")
    array = as_array(scales)
    if array.ndim != 1 or array.dtype != np.uint8:
        message = f"scales of {type(scheme).__name__} are 1-D uint8, found {array.dtype} of shape {array.shape}"
        raise InvalidDescriptorError(message, code=Code.BUFFER_SIZE, where="scales")
    return array


def _scales(scales: Any, scale_type: Dtype, entries: tuple[int, ...]) -> Array:
    if scales is None:
        raise TypeError("the scheme needs scales")
    array = _shaped(as_array(scales), entries, "scales")
    if array.dtype.newbyteorder("=") != scale_type.numpy:
        message = f"scales are {array.dtype}, the scheme says {scale_type.name}"
        raise InvalidDescriptorError(message, code=Code.QUANTIZATION_SCALE, where="scales")
    return array.astype(scale_type.numpy, copy=False)


def _zero_points(zero_points: Any, entries: tuple[int, ...]) -> Array:
    if zero_points is None:
        raise TypeError("an asymmetric scheme needs zero_points")
    array = _shaped(as_array(zero_points), entries, "zero_points")
    if array.dtype.kind not in "iu":
        message = f"zero_points are {array.dtype}, must be integers"
        raise InvalidDescriptorError(message, code=Code.QUANTIZATION_ZERO_POINT, where="zero_points")
    limits = np.iinfo(np.int32)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        message = "zero_points do not fit int32"
        raise InvalidDescriptorError(message, code=Code.QUANTIZATION_ZERO_POINT, where="zero_points")
    return array.astype("<i4", copy=False)


def _shaped(array: Array, entries: tuple[int, ...], name: str) -> Array:
    if array.shape != entries:
        message = f"has shape {array.shape}, must be {entries}"
        raise InvalidDescriptorError(message, code=Code.BUFFER_SIZE, where=name)
    return array


def scheme_name(quantization: Quantization | None) -> str | None:
    """The name that `expect` and people use for a scheme."""
    if quantization is None:
        return None
    named = {scheme: name for name, scheme in NAMES.items()}
    return named.get(type(quantization), type(quantization).__name__.lower())
