"""The five quantisation schemes (section 1) as values: what a descriptor says of them, and their bytes.

Values only: scales and zero points are arrays of the tensor, and arithmetic with them stands in `dequantization`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, TypeAlias

import numpy as np

from hurray_wire.dtypes import Dtype
from hurray_wire.errors import Code, TruncatedError, violations_error
from hurray_wire.rules import Record, check_scheme, integer
from hurray_wire.structs.descriptor import SCHEME_BYTES, SCHEME_HEAD_BYTES, quantization_plan
from hurray_wire.tags import NO_BUFFER, ScaleType, SchemeFlag, SchemeTag, TypeTag

__all__ = [
    "MXFP",
    "NF4",
    "PerBlockAffine",
    "PerChannelAffine",
    "PerTensorAffine",
    "Quantization",
    "decode_quantization",
]

_SCALE_DTYPES = {
    ScaleType.FLOAT16: Dtype.of(TypeTag.FLOAT16),
    ScaleType.BFLOAT16: Dtype.of(TypeTag.BFLOAT16),
    ScaleType.FLOAT32: Dtype.of(TypeTag.FLOAT32),
}
_SCALE_TYPES = {dtype: scale_type for scale_type, dtype in _SCALE_DTYPES.items()}


def _uint32(value: Any, name: str, code: Code) -> int:
    return integer(value, 32, f"quantization.{name}", code)


class _Scheme:
    """What all schemes share: a record of the wire's fields, checked when the value is made."""

    __slots__ = ()

    scheme_tag: ClassVar[SchemeTag]

    def _parameters(self) -> tuple[Any, ...]:
        raise NotImplementedError

    @property
    def _flags(self) -> int:
        return 0

    def record(self, padding: bytes = b"") -> Record:
        """The section's fields in wire order; `padding` is what a decoded section had behind its scheme."""
        length = SCHEME_BYTES[self.scheme_tag] + len(padding)
        plan = quantization_plan(self.scheme_tag, length)
        return plan.make((length, int(self.scheme_tag), 1, self._flags, *self._parameters(), padding))

    def encode(self) -> bytes:
        """The scheme's bytes, without the length that stands before it in a descriptor.

        Example:
            >>> PerTensorAffine(0.5, -3).encode().hex()
            '010100000000003ffdffffff00000000'
        """
        record = self.record()
        return quantization_plan(self.scheme_tag, record.length).pack(*record)[4:]

    def _check(self) -> None:
        violations = check_scheme(self.record())
        if violations:
            raise violations_error(violations)

    @property
    def is_symmetric(self) -> bool:
        """Whether there are no zero points: value = scale * stored."""
        return True


@dataclass(frozen=True, slots=True)
class PerTensorAffine(_Scheme):
    """One scale and zero point for the whole tensor: value = scale * (stored - zero_point). Scheme 0x01.

    Args:
        scale: finite and not 0; rounded to float32, as the wire holds it.
        zero_point: int32, within the storage type's range; 0 for float8 storage.

    Raises:
        InvalidDescriptorError: `quantization_scale`, `quantization_zero_point`.

    Example:
        >>> PerTensorAffine(0.1).scale
        0.10000000149011612
    """

    scale: float
    zero_point: int = 0

    scheme_tag: ClassVar[SchemeTag] = SchemeTag.PER_TENSOR

    def __post_init__(self) -> None:
        if not isinstance(self.scale, Real) or isinstance(self.scale, bool):
            raise TypeError(f"scale must be a number, not {self.scale!r}")
        with np.errstate(over="ignore"):
            object.__setattr__(self, "scale", float(np.float32(self.scale)))
        where = "quantization.zero_point"
        offset = 1 << 31  # the range of an int32, as an unsigned number
        zero_point = integer(operator.index(self.zero_point) + offset, 32, where, Code.QUANTIZATION_ZERO_POINT) - offset
        object.__setattr__(self, "zero_point", zero_point)
        self._check()

    def _parameters(self) -> tuple[Any, ...]:
        return (self.scale, self.zero_point, bytes(4))

    @classmethod
    def _of(cls, record: Record) -> PerTensorAffine:
        return cls(record.scale, record.zero_point)


@dataclass(frozen=True, slots=True)
class PerChannelAffine(_Scheme):
    """A float32 scale (and an int32 zero point) for each index of an axis: 1 num_heads or 2 head_dim. Scheme 0x02.

    Make one with `symmetric` or `asymmetric`. Scales are buffer 3 and zero points buffer 4 on block-paged;
    axis 0 can be said here, and is refused by the layout.

    Example:
        >>> PerChannelAffine.symmetric(axis=1, scale_buffer_index=3).zero_point_buffer_index is None
        True
    """

    axis: int
    scale_buffer_index: int
    zero_point_buffer_index: int | None = None

    scheme_tag: ClassVar[SchemeTag] = SchemeTag.PER_CHANNEL

    def __post_init__(self) -> None:
        _check_axis_and_buffers(self)
        self._check()

    @classmethod
    def symmetric(cls, axis: int, scale_buffer_index: int) -> PerChannelAffine:
        """Scales only."""
        return cls(axis, scale_buffer_index)

    @classmethod
    def asymmetric(cls, axis: int, scale_buffer_index: int, zero_point_buffer_index: int) -> PerChannelAffine:
        """Scales and zero points."""
        return cls(axis, scale_buffer_index, _uint32(zero_point_buffer_index, *_ZERO_POINTS))

    @property
    def is_symmetric(self) -> bool:
        """Whether there are no zero points."""
        return self.zero_point_buffer_index is None

    @property
    def scale_type(self) -> Dtype:
        """float32, the only one that the scheme knows."""
        return _SCALE_DTYPES[ScaleType.FLOAT32]

    @property
    def _flags(self) -> int:
        return int(SchemeFlag.SYMMETRIC) if self.is_symmetric else 0

    def _parameters(self) -> tuple[Any, ...]:
        return (self.axis, self.scale_buffer_index, _wire_index(self), int(ScaleType.FLOAT32), bytes(3))

    @classmethod
    def _of(cls, record: Record) -> PerChannelAffine:
        return cls(record.axis, record.scale_buffer_index, _value_index(record))


@dataclass(frozen=True, slots=True)
class PerBlockAffine(_Scheme):
    """A scale (and an int32 zero point) for each page slot, through the values' own block table. Scheme 0x03.

    Args:
        axis: 0 on block-paged.
        block_size: tokens, a power of two of at least 2; the page size on block-paged.
        scale_buffer_index: 3 on block-paged.
        zero_point_buffer_index: 4 on block-paged, None when symmetric.
        scale_type: float16, bfloat16 or float32.

    Example:
        >>> PerBlockAffine.symmetric(axis=0, block_size=4, scale_buffer_index=3, scale_type="float32").block_size
        4
    """

    axis: int
    block_size: int
    scale_buffer_index: int
    zero_point_buffer_index: int | None
    scale_type: Dtype

    scheme_tag: ClassVar[SchemeTag] = SchemeTag.PER_BLOCK

    def __post_init__(self) -> None:
        _check_axis_and_buffers(self)
        _check_block_size(self)
        object.__setattr__(self, "scale_type", Dtype.of(self.scale_type))
        self._check()

    @classmethod
    def symmetric(cls, axis: int, block_size: int, scale_buffer_index: int, scale_type: Any) -> PerBlockAffine:
        """Scales only."""
        return cls(axis, block_size, scale_buffer_index, None, scale_type)

    @classmethod
    def asymmetric(
        cls, axis: int, block_size: int, scale_buffer_index: int, zero_point_buffer_index: int, scale_type: Any
    ) -> PerBlockAffine:
        """Scales and zero points."""
        index = _uint32(zero_point_buffer_index, *_ZERO_POINTS)
        return cls(axis, block_size, scale_buffer_index, index, scale_type)

    @property
    def is_symmetric(self) -> bool:
        """Whether there are no zero points."""
        return self.zero_point_buffer_index is None

    @property
    def _flags(self) -> int:
        return int(SchemeFlag.SYMMETRIC) if self.is_symmetric else 0

    def _parameters(self) -> tuple[Any, ...]:
        scale_type = int(_SCALE_TYPES.get(self.scale_type, 0))  # 0 is no scale type: the rule names it
        return (self.axis, self.block_size, self.scale_buffer_index, _wire_index(self), scale_type, bytes(3))

    @classmethod
    def _of(cls, record: Record) -> PerBlockAffine:
        scale_type = _SCALE_DTYPES[ScaleType(record.scale_type)]
        return cls(record.axis, record.block_size, record.scale_buffer_index, _value_index(record), scale_type)


@dataclass(frozen=True, slots=True)
class _FloatBlock(_Scheme):
    """What NF4 and MXFP share: carried and re-encoded, their scales not interpreted."""

    axis: int
    block_size: int
    scale_buffer_index: int

    def __post_init__(self) -> None:
        _check_axis_and_buffers(self)
        _check_block_size(self)
        self._check()

    def _parameters(self) -> tuple[Any, ...]:
        return (self.axis, self.block_size, self.scale_buffer_index)

    @classmethod
    def _of(cls, record: Record) -> Any:
        return cls(record.axis, record.block_size, record.scale_buffer_index)


@dataclass(frozen=True, slots=True)
class NF4(_FloatBlock):
    """4-bit NormalFloat on uint4 storage; block_size a power of two of at least 8. Scheme 0x04, carried only.

    Example:
        >>> len(NF4(axis=2, block_size=64, scale_buffer_index=3).encode())
        16
    """

    scheme_tag: ClassVar[SchemeTag] = SchemeTag.NF4


@dataclass(frozen=True, slots=True)
class MXFP(_FloatBlock):
    """Microscaling formats; block_size a power of two from 16 to 2048. Scheme 0x05, carried only.

    Example:
        >>> MXFP(axis=2, block_size=32, scale_buffer_index=3).scheme_tag.value
        5
    """

    scheme_tag: ClassVar[SchemeTag] = SchemeTag.MXFP


Quantization: TypeAlias = PerTensorAffine | PerChannelAffine | PerBlockAffine | NF4 | MXFP
CLASSES: dict[int, Any] = {c.scheme_tag: c for c in (PerTensorAffine, PerChannelAffine, PerBlockAffine, NF4, MXFP)}
_ZERO_POINTS = ("zero_point_buffer_index", Code.QUANTIZATION_BUFFER)


def _check_axis_and_buffers(scheme: Any) -> None:
    axis = _uint32(scheme.axis, "axis", Code.QUANTIZATION_AXIS)
    index = _uint32(scheme.scale_buffer_index, "scale_buffer_index", Code.QUANTIZATION_BUFFER)
    object.__setattr__(scheme, "axis", axis)
    object.__setattr__(scheme, "scale_buffer_index", index)


def _check_block_size(scheme: Any) -> None:
    block_size = _uint32(scheme.block_size, "block_size", Code.QUANTIZATION_BLOCK)
    object.__setattr__(scheme, "block_size", block_size)


def _wire_index(scheme: PerChannelAffine | PerBlockAffine) -> int:
    return NO_BUFFER if scheme.zero_point_buffer_index is None else scheme.zero_point_buffer_index


def _value_index(record: Record) -> int | None:
    symmetric = record.flags & int(SchemeFlag.SYMMETRIC)
    return None if symmetric else int(record.zero_point_buffer_index)


def from_record(record: Record) -> Quantization:
    """The value of a section's record; the rules have passed it."""
    return CLASSES[record.scheme_tag]._of(record)


def decode_quantization(data: Any) -> Quantization:
    """One scheme from its bytes, without the length before it; bytes behind it are ignored (section 1).

    Raises:
        UnsupportedError: `scheme`, for an unknown scheme or scheme version.
        InvalidDescriptorError: the scheme's own bytes break a rule.
        TruncatedError: fewer bytes than the scheme takes.

    Example:
        >>> decode_quantization(PerTensorAffine(0.5, -3).encode())
        PerTensorAffine(scale=0.5, zero_point=-3)
    """
    raw = bytes(memoryview(data).cast("B")[: max(SCHEME_BYTES.values())])
    needed = SCHEME_HEAD_BYTES if len(raw) < SCHEME_HEAD_BYTES else SCHEME_BYTES.get(raw[0], SCHEME_HEAD_BYTES)
    if len(raw) < needed:
        raise TruncatedError(needed=needed, available=len(raw), where="quantization", offset=len(raw))
    plan = quantization_plan(raw[0], needed)
    record = plan.unpack(needed.to_bytes(4, "little") + raw[:needed])
    violations = check_scheme(record)
    if violations:
        raise violations_error(violations)
    return from_record(record)
