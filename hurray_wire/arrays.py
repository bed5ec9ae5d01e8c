"""The one door through which foreign memory comes in: NumPy arrays, buffers and torch tensors, never copied.

Also the way back to torch. torch is used only where a torch tensor is already there, or asked for.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from hurray_wire.dtypes import Dtype

__all__ = ["from_torch", "to_torch"]

Bytes = npt.NDArray[np.uint8]
Stored = Bytes | bytes
"""Bytes on their way out: memory that is viewed, or what was made for them; both have a length."""


def is_torch(x: Any) -> bool:
    """Whether `x` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def from_torch(tensor: Any) -> npt.NDArray[Any]:
    """The memory of a torch CPU tensor as an array: strides kept, nothing copied.

    bfloat16 and the float8 types, which `.numpy()` refuses, pass through an integer view of the same bits.

    Raises:
        TypeError: not a torch tensor, or one on a device.
        UnsupportedError: `dtype`, for a type without a tag (fnuz float8).

    Example:
        >>> import torch
        >>> from_torch(torch.ones(2, dtype=torch.bfloat16)).dtype
        dtype(bfloat16)
    """
    if not is_torch(tensor):
        raise TypeError(f"from_torch takes a torch tensor, not {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise TypeError(
            f"the tensor is on {tensor.device}: fetch it first, with .cpu() or into a pinned buffer by copy_()"
        )
    dtype = Dtype.of(tensor.dtype)
    tensor = tensor.detach()
    if dtype.numpy is None or dtype.numpy.isbuiltin == 1:
        return np.asarray(tensor.numpy())
    torch = sys.modules["torch"]
    integer = {8: torch.uint8, 16: torch.int16}[dtype.bit_width]
    return np.asarray(tensor.view(integer).numpy().view(dtype.numpy))


def to_torch(array: npt.NDArray[Any]) -> Any:
    """An array's memory as a torch tensor: strides kept, nothing copied.

    torch has no read-only tensors: one made of a read-only array must not be written to.

    Raises:
        ImportError: torch is not installed.
        UnsupportedError: `dtype`, for a type without a tag.
        TypeError: an element type or byte order that torch does not have.

    Example:
        >>> import ml_dtypes, numpy as np
        >>> to_torch(np.ones(2, ml_dtypes.bfloat16)).dtype
        torch.bfloat16
    """
    import torch

    dtype = Dtype.of(array.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        if array.dtype.isbuiltin == 1:
            return torch.from_numpy(array)
        name = {"float8_e4m3": "float8_e4m3fn", "float8_e8m0": "float8_e8m0fnu"}.get(dtype.name, dtype.name)
        target = getattr(torch, name, None)
        if target is None or dtype.bit_width not in (8, 16):
            raise TypeError(f"torch has no {dtype.name}")
        integer = np.int16 if dtype.bit_width == 16 else np.uint8
        return torch.from_numpy(array.view(integer)).view(target)


def as_array(x: Any) -> npt.NDArray[Any]:
    """Anything NumPy reads without copying, and torch CPU tensors, as an array."""
    if isinstance(x, np.ndarray):
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError("a masked array has no values where it is masked: give .filled() or .data")
        return x
    if is_torch(x):
        return from_torch(x)
    if isinstance(x, bytes | bytearray | memoryview):
        return np.asarray(memoryview(x))
    if hasattr(x, "__cuda_array_interface__") or _device_of(x) not in _HOST:
        raise TypeError(f"the {type(x).__name__} is on a device: fetch it first, into host memory")
    if hasattr(x, "__array_interface__") or hasattr(x, "__array__"):
        return np.asarray(x)
    if hasattr(x, "__dlpack__"):
        return np.from_dlpack(x)
    try:
        return np.asarray(memoryview(x))
    except TypeError:
        raise TypeError(f"an array is needed, not {type(x).__name__}") from None


_HOST = (1, 3, 11)
"""DLPack's device types whose memory the host reads: CPU, CUDA and ROCm pinned host memory."""


def _device_of(x: Any) -> int:
    device = getattr(x, "__dlpack_device__", None)
    return int(device()[0]) if callable(device) else _HOST[0]


def refuse_overlap(pool: npt.NDArray[Any]) -> None:
    """Memory that is written to must have a place for every element.

    Raises:
        ValueError: elements lie on one another, as in a broadcast array or a sliding window.
    """
    if not pool.size:
        return
    end = pool.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(pool.strides, pool.shape, strict=True)):
        if size > 1:
            if stride < end:
                raise ValueError(
                    f"the pool's elements lie on one another (strides {pool.strides}): it cannot be written"
                )
            end = stride * (size - 1) + end


def as_bytes(data: Any) -> Bytes:
    """A contiguous buffer as 1-D uint8, keeping `data` alive; ml_dtypes arrays too, which memoryview refuses."""
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise ValueError("the buffer is not contiguous")
        return data.reshape(-1).view(np.uint8)
    view = memoryview(data)
    if not view.contiguous:
        raise ValueError("the buffer is not contiguous")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.zeros(0, np.uint8)


def address(array: npt.NDArray[Any]) -> int:
    """Where the first byte lies."""
    return int(array.__array_interface__["data"][0])


def raw_view(array: npt.NDArray[Any]) -> Bytes:
    """The bytes of a C-contiguous array of any type, as 1-D uint8 of the same memory."""
    return (array if array.ndim == 1 else array.reshape(-1)).view(np.uint8)


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, made read-only."""
    array.flags.writeable = False
    return array
