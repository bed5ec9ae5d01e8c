"""What an engine says of its cache's bytes: names of element types, and one scale a tensor.

Engines keep float8 as uint8 and say what it means elsewhere, so the name decides, never the array. Names whose bytes
cannot be carried faithfully are refused here, each with what to do instead.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from hurray_wire.arrays import is_torch
from hurray_wire.dtypes import Dtype
from hurray_wire.errors import Code, InvalidDescriptorError, UnsupportedError
from hurray_wire.quantization import PerTensorAffine
from hurray_wire.tensor import BlockPagedTensor

_NAMES = {
    "half": "float16",
    "fp16": "float16",
    "float": "float32",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3",
    "fp8_e4m3": "float8_e4m3",
    "fp8_inc": "float8_e4m3",
    "float8_e4m3fn": "float8_e4m3",
    "fp8_e5m2": "float8_e5m2",
}
"""vLLM 0.33 `vllm/utils/torch_utils.py` STR_DTYPE_TO_TORCH_DTYPE, and the short names of others."""

_UNSCALED = ("float16", "bfloat16", "float32", "float64", "uint8")
"""Elements that are values already, or opaque bytes: vLLM has a scale of 1 beside them, too."""


class _Refusal(NamedTuple):
    part: str
    code: Code
    message: str


_OPAQUE = "send its rows as they are, with from_vllm_latent(..., dtype='uint8'), or keep the cache in bfloat16 or fp8"
_REFUSED = (
    _Refusal(
        "fnuz",
        Code.DTYPE,
        "AMD's fnuz bytes are other values, half of what float8_e4m3 reads in them: convert the values and quantise "
        "them anew to float8_e4m3, or keep the cache in bfloat16",
    ),
    _Refusal("ds_mla", Code.DTYPE, f"its rows hold values, scales and rope of several types: {_OPAQUE}"),
    _Refusal(
        "nvfp4",
        Code.LAYOUT,
        "a page holds all heads' data, then all heads' scales, which is no row a token: keep the cache in fp8 or "
        "bfloat16, or dequantise in the engine",
    ),
    _Refusal(
        "per_token_head",
        Code.SCHEME,
        "its scales stand inside the rows, one a token and head; the format has one a token slot, a channel or a "
        "tensor: dequantise in the engine, or keep the cache in fp8 with one scale",
    ),
    _Refusal("mxfp", Code.SCHEME, "its scales are one for 32 elements, in a buffer of their own: dequantise first"),
    *(
        _Refusal(name, Code.DTYPE, "only its own kernels read these bytes: dequantise in the engine")
        for name in ("turboquant", "octave", "ultraquant", "int4", "fp4")
    ),
)
_INTERLEAVED_ROWS = {"fp8_ds_mla": (656, 528), "nvfp4_ds_mla": (352,)}
"""Bytes a token where a token's scales follow its own data (vLLM 0.33 `vllm/v1/attention/backends/mla/
flashmla_sparse.py`: V3.2 and V4.1; V4's 584 are planar in the page)."""


def storage_dtype(array_dtype: Any, name: Any) -> Dtype:
    """The element type of an engine's array, by the name given or by its own.

    Args:
        array_dtype: the array's NumPy or torch dtype.
        name: a Dtype, a name of ours, of NumPy's, torch's or an engine's; None or "auto" for the array's own.

    Raises:
        UnsupportedError: bytes that cannot be carried, or that nobody has named (`dtype`, `layout`, `scheme`).
    """
    if name is None or (isinstance(name, str) and name == "auto"):
        return own_dtype(array_dtype)
    if not isinstance(name, str):
        return Dtype.of(name)
    short = name.removeprefix("torch.")
    if short in _NAMES:
        return Dtype.of(_NAMES[short])
    for refusal in _REFUSED:
        if refusal.part in short and short not in ("int4", "uint4"):
            raise UnsupportedError(f"{name}: {refusal.message}", code=refusal.code, where="dtype")
    return Dtype.of(short)


def own_dtype(array_dtype: Any) -> Dtype:
    """The array's own type; unsigned integers are bytes of something, which is to be said.

    Raises:
        UnsupportedError: `dtype`.
    """
    dtype = Dtype.of(array_dtype)
    if dtype.name.startswith("uint"):
        message = (
            f"the cache is {dtype.name}, which does not say what its bytes mean: name it (dtype='float8_e4m3', "
            f"dtype='bfloat16', dtype={dtype.name!r} for plain numbers), or view the array as its type first"
        )
        raise UnsupportedError(message, code=Code.DTYPE, where="dtype")
    return dtype


def latent_row(name: Any, row_bytes: int) -> str | None:
    """The vLLM name of a latent row whose bytes travel uninterpreted, or None for a row of one element type.

    Raises:
        UnsupportedError: `layout`, for a row whose scales stand elsewhere in its page.
    """
    if not isinstance(name, str) or name not in _INTERLEAVED_ROWS:
        return None
    if row_bytes not in _INTERLEAVED_ROWS[name]:
        widths = " or ".join(map(str, _INTERLEAVED_ROWS[name]))
        message = (
            f"{name} rows of {row_bytes} bytes are not known to hold a token each: rows of {widths} bytes do; in "
            "others the page's scales follow all of its data. Keep such a cache in bfloat16 to send it"
        )
        raise UnsupportedError(message, code=Code.LAYOUT, where="dtype")
    return name


def per_tensor(scale: Any, dtype: Dtype, name: str) -> PerTensorAffine | None:
    """One scale as the scheme: value = scale * stored. A scale of 1 on an unquantised type is none.

    Args:
        scale: a number, or an array or torch tensor (of any device) of one element; None for none.

    Raises:
        TypeError: not one number.
        InvalidDescriptorError: `quantization_scale`, `quantization_storage`.
    """
    if scale is None:
        return None
    value = _number(scale, name)
    if not math.isfinite(value) or value == 0:
        message = f"is {value}, must be finite and not 0"
        raise InvalidDescriptorError(message, code=Code.QUANTIZATION_SCALE, where=name)
    if dtype.name in _UNSCALED:
        if value == 1:
            return None
        message = f"is {value}, but {dtype.name} elements are stored as they are: a scale is for float8 and int8"
        raise InvalidDescriptorError(message, code=Code.QUANTIZATION_STORAGE, where=name)
    return PerTensorAffine(value)


def _number(scale: Any, name: str) -> float:
    if is_torch(scale):
        if scale.numel() != 1:
            raise TypeError(f"{name} is one number for the whole cache, not {tuple(scale.shape)}")
        return float(scale.item())
    array = np.asarray(scale)
    if array.size != 1 or array.dtype.kind not in "fiuV":
        raise TypeError(f"{name} is one number for the whole cache, not {scale!r}")
    return float(array.reshape(-1)[0])


def check_importable(t: BlockPagedTensor, *, scaled: bool = True) -> None:
    """Whether an engine's pool can hold what a tensor holds: whole elements, at most one scale.

    Args:
        scaled: whether the engine keeps a scale for the whole cache beside the pool; the caller hands it over.

    Raises:
        InvalidDescriptorError: the tensor has violations.
        UnsupportedError: `packed_pool`, `scheme`.
    """
    t.validate()
    if t.page_pool.ndim != 4:
        message = f"a pool of packed {t.dtype.name} has no place in an engine's array: unpack it first"
        raise UnsupportedError(message, code=Code.PACKED_POOL, where="page_pool")
    scheme = t.quantization
    if scheme is None or (scaled and isinstance(scheme, PerTensorAffine) and scheme.zero_point == 0):
        return
    keeps = "one scale for the whole cache, and no zero point" if scaled else "no scales"
    message = f"is {type(scheme).__name__}, the engine keeps {keeps}: dequantise first"
    raise UnsupportedError(message, code=Code.SCHEME, where="quantization")
