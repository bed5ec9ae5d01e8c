"""Element types (section 2): names, tags, widths, NumPy equivalents, and packing of the sub-byte ones.

A `Dtype` is a singleton a tag. Bit patterns are never changed here, NaNs included; no conversion of values
enters this room. ml_dtypes supplies what NumPy lacks; torch is recognised by name and never imported.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hurray_wire.errors import Code, UnsupportedError
from hurray_wire.tags import PRIVATE_TYPES, TypeTag

__all__ = ["Dtype", "pack", "packed_bytes", "unpack"]

_SIX_BIT_GROUP = 4  # elements that share three bytes


class Dtype:
    """One element type: `.name`, `.tag`, `.bit_width`, `.numpy` (None where NumPy has no such type).

    Compared by identity; `Dtype.of` finds the singleton. Section 2.

    Example:
        >>> Dtype.of("bfloat16").tag, Dtype.of("int4").bit_width
        (2, 4)
    """

    __slots__ = ("bit_width", "is_flat", "is_private", "is_sub_byte", "name", "numpy", "tag")

    name: str
    tag: int
    bit_width: int
    numpy: Any
    """The NumPy (or ml_dtypes) dtype, None where there is none: typed Any, so that it serves where it is known."""
    is_private: bool
    """A type of somebody's own, 0xF0 to 0xFE; an extension section gives its width."""
    is_sub_byte: bool
    """Several elements share a byte: pools of it travel packed."""
    is_flat: bool
    """Pools of it are handed out as one run of uint8: packed types, and those that NumPy cannot name."""

    def __init__(self, name: str, tag: int, bit_width: int, numpy: npt.DTypeLike | None = None) -> None:
        for field, value in (
            ("name", name),
            ("tag", int(tag)),
            ("bit_width", bit_width),
            ("numpy", None if numpy is None else np.dtype(numpy)),
            ("is_private", tag in PRIVATE_TYPES),
            ("is_sub_byte", 0 < bit_width < 8),
            ("is_flat", numpy is None or bit_width < 8),
        ):
            object.__setattr__(self, field, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Dtype is frozen: cannot set {name}")

    def __repr__(self) -> str:
        if self.is_private:
            return f"Dtype.private({self.tag:#04X})"
        return f"hurray_wire.{'bool_' if self.name == 'bool' else self.name}"

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return (Dtype.private if self.is_private else Dtype.of), (self.tag,)

    @staticmethod
    def of(x: Any) -> Dtype:
        """The singleton for a Dtype, a name, a tag, a numpy or a torch dtype.

        Raises:
            UnsupportedError: `dtype`, for what has no tag (AMD's fnuz float8 types are never relabelled).

        Example:
            >>> import numpy as np
            >>> Dtype.of(np.dtype(">f2")) is Dtype.of(0x01) is Dtype.of("float16")
            True
        """
        if isinstance(x, Dtype):
            return x
        if isinstance(x, str) and x in _BY_NAME:
            return _BY_NAME[x]
        if isinstance(x, int) and not isinstance(x, bool):
            found = by_tag(x)
        elif type(x).__module__.partition(".")[0] == "torch":
            found = _BY_NAME.get(_TORCH_NAMES.get(str(x), str(x).removeprefix("torch.")))
        else:
            found = _of_numpy(x)
        if found is None:
            raise UnsupportedError(f"{x!r} has no tag in the format{_hint(x)}", code=Code.DTYPE, where="dtype")
        return found

    @staticmethod
    def private(tag: int) -> Dtype:
        """The type of a private tag; its width stands in the tensor's `ExtensionType`.

        Example:
            >>> Dtype.private(0xF2).name
            'extension'
        """
        if isinstance(tag, bool) or not isinstance(tag, int):
            raise TypeError(f"a private type tag is an integer, not {tag!r}")
        if tag not in PRIVATE_TYPES:
            raise UnsupportedError(f"{tag:#x} is no private tag: 0xF0 to 0xFE", code=Code.DTYPE, where="dtype")
        return _PRIVATE[tag]


def _hint(x: Any) -> str:
    if "fnuz" in str(x):
        return ": fnuz bytes mean other values, convert them to float8_e4m3 or float8_e5m2"
    return ""


def _of_numpy(x: Any) -> Dtype | None:
    """Only of what is a type already: NumPy reads types into strings, None and lists."""
    if not isinstance(x, np.dtype | type):
        return None
    try:
        return _BY_NUMPY.get(np.dtype(x).newbyteorder("="))
    except TypeError:
        return None


_ALL = (
    Dtype("float16", TypeTag.FLOAT16, 16, np.float16),
    Dtype("bfloat16", TypeTag.BFLOAT16, 16, ml_dtypes.bfloat16),
    Dtype("float32", TypeTag.FLOAT32, 32, np.float32),
    Dtype("float64", TypeTag.FLOAT64, 64, np.float64),
    Dtype("int8", TypeTag.INT8, 8, np.int8),
    Dtype("uint8", TypeTag.UINT8, 8, np.uint8),
    Dtype("int16", TypeTag.INT16, 16, np.int16),
    Dtype("uint16", TypeTag.UINT16, 16, np.uint16),
    Dtype("int32", TypeTag.INT32, 32, np.int32),
    Dtype("uint32", TypeTag.UINT32, 32, np.uint32),
    Dtype("int64", TypeTag.INT64, 64, np.int64),
    Dtype("uint64", TypeTag.UINT64, 64, np.uint64),
    Dtype("bool", TypeTag.BOOL, 1, np.bool_),
    Dtype("float8_e4m3", TypeTag.FLOAT8_E4M3, 8, ml_dtypes.float8_e4m3fn),
    Dtype("float8_e5m2", TypeTag.FLOAT8_E5M2, 8, ml_dtypes.float8_e5m2),
    Dtype("float8_e8m0", TypeTag.FLOAT8_E8M0, 8, ml_dtypes.float8_e8m0fnu),
    Dtype("float4_e2m1", TypeTag.FLOAT4_E2M1, 4, ml_dtypes.float4_e2m1fn),
    Dtype("float6_e2m3", TypeTag.FLOAT6_E2M3, 6, ml_dtypes.float6_e2m3fn),
    Dtype("float6_e3m2", TypeTag.FLOAT6_E3M2, 6, ml_dtypes.float6_e3m2fn),
    Dtype("float128", TypeTag.FLOAT128, 128),
    Dtype("int4", TypeTag.INT4, 4, ml_dtypes.int4),
    Dtype("uint4", TypeTag.UINT4, 4, ml_dtypes.uint4),
    Dtype("int2", TypeTag.INT2, 2, ml_dtypes.int2),
    Dtype("uint2", TypeTag.UINT2, 2, ml_dtypes.uint2),
    Dtype("complex64", TypeTag.COMPLEX64, 64, np.complex64),
    Dtype("complex128", TypeTag.COMPLEX128, 128, np.complex128),
)
_BY_TAG = {dtype.tag: dtype for dtype in _ALL}
_BY_NUMPY = {dtype.numpy: dtype for dtype in _ALL if dtype.numpy is not None}
_BY_NAME = {dtype.name: dtype for dtype in _ALL} | {"bool_": _BY_TAG[TypeTag.BOOL]}
_PRIVATE = {tag: Dtype("extension", tag, 0) for tag in PRIVATE_TYPES}
_TORCH_NAMES = {
    "torch.float8_e4m3fn": "float8_e4m3",
    "torch.float8_e8m0fnu": "float8_e8m0",
    "torch.half": "float16",
    "torch.float": "float32",
    "torch.double": "float64",
}


def by_tag(tag: int) -> Dtype | None:
    """The type of a wire tag, private ones included, or None."""
    return _BY_TAG.get(tag) or _PRIVATE.get(tag)


def packed_bytes(count: int, bit_width: int) -> int:
    """Bytes that `count` elements take, in unbounded integers: ceil(count * bits / 8), 6-bit ones 3 * ceil(count / 4).

    Example:
        >>> packed_bytes(5, 4), packed_bytes(5, 6), packed_bytes(5, 16)
        (3, 6, 10)
    """
    if bit_width == 6:
        return 3 * -(-count // _SIX_BIT_GROUP)
    return -(-count * bit_width // 8)


def _sub_byte(dtype: Any) -> Dtype:
    found = Dtype.of(dtype)
    if not found.is_sub_byte or found.numpy is None:
        raise UnsupportedError(f"{found.name} is not a sub-byte type", code=Code.DTYPE, where="dtype")
    return found


def pack(array: npt.ArrayLike, dtype: Any) -> npt.NDArray[np.uint8]:
    """Pack sub-byte elements, lowest bits first, in one run; unused bits at the end are zero. Section 2.

    Args:
        array: elements of `dtype.numpy` (or raw bit patterns as uint8, low bits), any shape, taken in C order.
        dtype: the element type: bool_, int4, uint4, int2, uint2, float4_e2m1, float6_e2m3, float6_e3m2.

    Returns:
        1-D uint8 of `packed_bytes(count, bit_width)`.

    Example:
        >>> import numpy as np
        >>> pack(np.array([1, 2, 3], np.uint8), "uint4").tolist()
        [33, 3]
    """
    chosen = _sub_byte(dtype)
    elements = np.ascontiguousarray(array).reshape(-1)
    if elements.dtype != chosen.numpy and elements.dtype != np.uint8:
        raise TypeError(f"pack takes elements of {chosen.numpy} or their bits as uint8, not {elements.dtype}")
    width = chosen.bit_width
    codes = elements.view(np.uint8) & np.uint8((1 << width) - 1)
    if width == 1:
        return np.packbits(codes, bitorder="little")
    size = packed_bytes(codes.size, width)
    groups = np.zeros((-(-codes.size // _per_group(width)), _per_group(width)), np.uint8)
    groups.reshape(-1)[: codes.size] = codes
    if width != 6:
        packed = groups[:, 0].copy()
        for i in range(1, groups.shape[1]):
            packed |= groups[:, i] << np.uint8(width * i)
        return packed
    words = np.bitwise_or.reduce(groups.astype("<u4") << (np.arange(4, dtype="<u4") * np.uint32(6)), axis=1)
    return words.view(np.uint8).reshape(-1, 4)[:, :3].reshape(-1)[:size].copy()


def unpack(packed: npt.ArrayLike, dtype: Any, count: int) -> npt.NDArray[Any]:
    """The first `count` elements of a packed run, as 1-D `dtype.numpy`: the inverse of `pack`. Section 2.

    Raises:
        ValueError: fewer bytes than `count` elements take.

    Example:
        >>> unpack(pack([True, False, True], "bool_"), "bool_", 3).tolist()
        [True, False, True]
    """
    chosen = _sub_byte(dtype)
    given = np.asarray(packed)
    if given.size and (given.dtype.kind not in "iu" or given.min() < 0 or given.max() > 0xFF):
        raise TypeError(f"unpack takes bytes as uint8, not {given.dtype}")
    data = np.ascontiguousarray(given.astype(np.uint8, copy=False)).reshape(-1)
    width = chosen.bit_width
    if count < 0 or data.size < packed_bytes(count, width):
        raise ValueError(f"{count} elements of {chosen.name} take {packed_bytes(count, width)} bytes, not {data.size}")
    codes = unpack_codes(data, width, count)
    if chosen.name in ("int4", "int2"):  # the NumPy types hold signed values in a whole byte
        sign = np.uint8(1 << (width - 1))
        codes = (codes ^ sign) - sign
    assert chosen.numpy is not None
    return codes.view(chosen.numpy)


def unpack_codes(data: npt.NDArray[np.uint8], width: int, count: int) -> npt.NDArray[np.uint8]:
    """The bit patterns of the first `count` elements of `width` bits, one a byte."""
    data = data[: packed_bytes(count, width)]
    if width == 1:
        return np.unpackbits(data, count=count, bitorder="little")
    if width == 6:
        three = data.reshape(-1, 3).astype(np.uint32)
        words = three[:, 0] | three[:, 1] << np.uint32(8) | three[:, 2] << np.uint32(16)
    else:
        words = data
    kind = words.dtype.type
    codes = np.empty((words.size, _per_group(width)), np.uint8)
    for i in range(codes.shape[1]):
        np.copyto(codes[:, i], (words >> kind(width * i)) & kind((1 << width) - 1), casting="unsafe")
    return codes.reshape(-1)[:count]


def _per_group(width: int) -> int:
    return _SIX_BIT_GROUP if width == 6 else 8 // width


def clear_tail(packed: npt.NDArray[np.uint8], count: int, width: int) -> npt.NDArray[np.uint8]:
    """The run with the unused bits behind its last element at 0: itself where they are, else a copy."""
    spare = packed.size * 8 - count * width
    if not count or not spare:
        return packed
    tail = int.from_bytes(packed[-3:].tobytes(), "little")
    kept = tail & ((1 << (8 * min(packed.size, 3) - spare)) - 1)
    if kept == tail:
        return packed
    cleared = packed.copy()
    cleared[-3:] = np.frombuffer(kept.to_bytes(min(packed.size, 3), "little"), np.uint8)
    return cleared
