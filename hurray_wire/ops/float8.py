"""float8 elements to float32 and back by table: the same bits as a cast gives, at a fraction of its time.

Values beyond the largest finite one become that one: a plain cast of ml_dtypes makes NaN of them in float8_e4m3.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hurray_wire.dtypes import Dtype

LARGEST = {"float8_e4m3": 448.0, "float8_e5m2": 57344.0}
"""The largest finite value of each float8 storage type."""

Float32 = npt.NDArray[np.float32]


@lru_cache(maxsize=len(LARGEST))
def _values(dtype: Dtype) -> Float32:
    assert dtype.numpy is not None
    return np.arange(256, dtype=np.uint8).view(dtype.numpy).astype(np.float32)


@lru_cache(maxsize=len(LARGEST))
def _codes(dtype: Dtype) -> npt.NDArray[np.uint8]:
    """The element nearest to every float32 whose lower half is 0, and to those that round to odd there."""
    assert dtype.numpy is not None
    halves = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore"):
        most = np.float32(LARGEST[dtype.name])
        return np.clip(halves, -most, most).astype(dtype.numpy).view(np.uint8)


def widen(stored: npt.NDArray[Any], dtype: Dtype, out: Float32) -> None:
    """The elements as float32, exactly."""
    if dtype.name in LARGEST:
        np.take(_values(dtype), stored.view(np.uint8), out=out, mode="clip")
    else:
        np.copyto(out, stored, casting="unsafe")


def narrow(values: Float32, dtype: Dtype, out: npt.NDArray[np.uint8]) -> None:
    """The nearest elements of a float8 type, ties to even, clipped to its finite values; `values` is spoilt.

    The table is asked with the upper half of a float32 whose last bit says whether anything was cut off (rounding to
    odd): it has more than twice the mantissa of a float8, so that rounding twice gives what rounding once would.
    """
    bits = values.view(np.uint32)
    sticky = np.bitwise_and(bits, np.uint32(0xFFFF))
    np.add(sticky, np.uint32(0xFFFF), out=sticky)
    np.bitwise_or(bits, sticky, out=bits)
    np.right_shift(bits, np.uint32(16), out=bits)
    np.take(_codes(dtype), bits, out=out, mode="clip")
