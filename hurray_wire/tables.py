"""The descriptor's smaller tables as values: buffer handle, statistics, extension type (section 1).

Each knows its record on the wire and back; what their fields may hold is said in `rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from numbers import Real
from typing import Any

import numpy as np

from hurray_wire import rules, tags
from hurray_wire.errors import Code, InvalidDescriptorError, violations_error
from hurray_wire.rules import Record, integer
from hurray_wire.structs.descriptor import EXTENSION_PLAN, HANDLE_PLAN, STATISTICS_PLAN, Fields
from hurray_wire.tags import StatisticsMask

__all__ = ["BufferHandle", "ExtensionType", "Statistics"]

_DEVICES = {tag.name.lower(): tag for tag in tags.DeviceTag}
_SYNC_MODES = {mode.name.lower(): mode for mode in tags.SyncMode}
_MEMORY = {memory.name.lower(): memory for memory in tags.MemoryClass}


def _byte(value: Any, names: dict[str, Any], where: str, code: Code) -> int:
    """The wire's byte for a name, or for a private number itself."""
    if isinstance(value, str):
        if value not in names:
            raise InvalidDescriptorError(f"is {value!r}, must be one of {', '.join(names)}", code=code, where=where)
        return int(names[value])
    return integer(value, 8, where, code)


_DEVICE_NAMES, _SYNC_NAMES, _MEMORY_NAMES = (
    {int(tag): name for name, tag in names.items()} for names in (_DEVICES, _SYNC_MODES, _MEMORY)
)


@dataclass(frozen=True, slots=True)
class BufferHandle:
    """One buffer as the descriptor lists it: size and alignment in bytes, and where the tensor lived.

    Args:
        byte_size: uint64.
        alignment: bytes, a power of two, at least 64 unless the buffer is empty.
        device: "cpu", "cuda", "rocm", "metal", "vulkan", "webgpu", "hexagon", "level_zero", "opencl", or a
            private number 0xF0 to 0xFE. Bytes in a blob are host memory whatever it says.
        sync_mode: "producer_synced"; "event" and "consumer_stream" mean nothing in copied bytes.
        memory_class: "standard", "host_pinned", "unified", "peer" where the device has it, or a private number.

    Raises:
        InvalidDescriptorError: `alignment`, `device`, `memory_class`, `sync_mode`, `buffer_size`.

    Example:
        >>> BufferHandle(640).alignment
        64
    """

    byte_size: int
    alignment: int = tags.MIN_ALIGNMENT
    device: str | int = "cpu"
    sync_mode: str | int = "producer_synced"
    memory_class: str | int = "standard"

    def __post_init__(self) -> None:
        record = self.record()
        violations = rules.check_handle(record)
        if violations:
            raise violations_error(violations)
        for name, value in zip(BufferHandle.__slots__, _handle_values(record), strict=True):
            object.__setattr__(self, name, value)  # by number or by name, a handle is what it reads back as

    def record(self) -> Record:
        """The handle's fields in wire order."""
        values = (
            integer(self.byte_size, 64, "byte_size", Code.BUFFER_SIZE),
            integer(self.alignment, 32, "alignment", Code.ALIGNMENT),
            _byte(self.device, _DEVICES, "device_tag", Code.DEVICE),
            _byte(self.sync_mode, _SYNC_MODES, "sync_mode", Code.SYNC_MODE),
            _byte(self.memory_class, _MEMORY, "memory_class", Code.MEMORY_CLASS),
            0,
        )
        return HANDLE_PLAN.make(values)

    @staticmethod
    @lru_cache(maxsize=256)
    def of_record(record: Record) -> BufferHandle:
        """A handle as it was read: a lenient reader has already reported what breaks a rule."""
        handle = BufferHandle.__new__(BufferHandle)
        for name, value in zip(BufferHandle.__slots__, _handle_values(record), strict=True):
            object.__setattr__(handle, name, value)
        return handle

    @property
    def is_empty(self) -> bool:
        """Whether the buffer holds no bytes."""
        return self.byte_size == 0


def _handle_values(record: Record) -> tuple[Any, ...]:
    return (
        record.byte_size,
        record.alignment,
        _DEVICE_NAMES.get(record.device_tag, record.device_tag),
        _SYNC_NAMES.get(record.sync_mode, record.sync_mode),
        _MEMORY_NAMES.get(record.memory_class, record.memory_class),
    )


_GROUPS = {
    StatisticsMask.NNZ: ("nnz",),
    StatisticsMask.SPARSITY_RATIO: ("sparsity_ratio",),
    StatisticsMask.RANGE: ("value_min", "value_max", "value_abs_max"),
    StatisticsMask.MOMENTS: ("value_mean", "value_stddev"),
    StatisticsMask.NM: ("nm_n", "nm_m"),
    StatisticsMask.NON_FINITE: ("has_nan", "has_inf"),
}
_BITS = {"nnz": 64, "nm_n": 8, "nm_m": 8}


def _statistic(name: str, value: Any) -> int | float | bool:
    """A caller's number as the field holds it."""
    where = f"statistics.{name}"
    if name in _BITS:
        return integer(value, _BITS[name], where, Code.STATISTICS)
    if name in _GROUPS[StatisticsMask.NON_FINITE]:
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{where} must be a boolean, not {value!r}")
        return bool(value)
    if not isinstance(value, Real):
        raise TypeError(f"{where} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        message = f"is {value}, no 64-bit float"
        raise InvalidDescriptorError(message, code=Code.STATISTICS, where=where) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What somebody computed of the values; advisory, relayed, never computed here.

    Fields of one group are given together: value_min, value_max, value_abs_max; value_mean, value_stddev;
    nm_n, nm_m; has_nan, has_inf. None is "not computed".

    Raises:
        InvalidDescriptorError: `statistics`, for half a group or a number out of range.

    Example:
        >>> int(Statistics(nnz=319, has_nan=False, has_inf=False).computed_mask)
        33
    """

    nnz: int | None = None
    sparsity_ratio: float | None = None
    value_min: float | None = None
    value_max: float | None = None
    value_abs_max: float | None = None
    value_mean: float | None = None
    value_stddev: float | None = None
    nm_n: int | None = None
    nm_m: int | None = None
    has_nan: bool | None = None
    has_inf: bool | None = None

    def __post_init__(self) -> None:
        for names in _GROUPS.values():
            given = [name for name in names if getattr(self, name) is not None]
            if given and len(given) < len(names):
                message = f"{', '.join(names)} are given together or not at all, only {', '.join(given)} found"
                raise InvalidDescriptorError(message, code=Code.STATISTICS, where=f"statistics.{given[0]}")
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                object.__setattr__(self, field.name, _statistic(field.name, value))

    @property
    def computed_mask(self) -> StatisticsMask:
        """Which groups are there."""
        groups = (mask for mask, names in _GROUPS.items() if getattr(self, names[0]) is not None)
        return StatisticsMask(sum(groups))

    def record(self) -> Record:
        """The table's fields in wire order; what the mask leaves out is 0."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {name: 0 if value is None else value for name, value in given.items()}
        values |= {"mask": int(self.computed_mask), "reserved": 0, "reserved_tail": bytes(4)}
        return STATISTICS_PLAN.make([values[name] for name in STATISTICS_PLAN.names])

    @classmethod
    def of_record(cls, record: Record) -> Statistics:
        """The value of a table that the rules have passed."""
        given = [name for mask, names in _GROUPS.items() if record.mask & mask for name in names]
        values = {name: getattr(record, name) for name in given}
        return cls(**{name: bool(value) if name in ("has_nan", "has_inf") else value for name, value in values.items()})


@dataclass(frozen=True, slots=True)
class ExtensionType:
    """The width and make of a private element type; it sizes the pool.

    Args:
        bit_width: bits an element: 1, 2, 4 (packed) or a multiple of 8.
        is_float, is_signed, has_nan, has_inf: booleans.
        sign_bits, exponent_bits, mantissa_bits: uint8.
        exponent_bias: uint32.

    Raises:
        InvalidDescriptorError: `extension_type`.

    Example:
        >>> ExtensionType(24, is_float=False, is_signed=True).packing
        1
    """

    bit_width: int
    is_float: bool
    is_signed: bool
    sign_bits: int = 0
    exponent_bits: int = 0
    mantissa_bits: int = 0
    exponent_bias: int = 0
    has_nan: bool = False
    has_inf: bool = False

    def __init__(
        self,
        bit_width: int,
        *,
        is_float: bool,
        is_signed: bool,
        sign_bits: int = 0,
        exponent_bits: int = 0,
        mantissa_bits: int = 0,
        exponent_bias: int = 0,
        has_nan: bool = False,
        has_inf: bool = False,
    ) -> None:
        wide = {"bit_width": bit_width, "exponent_bias": exponent_bias}
        narrow = {"sign_bits": sign_bits, "exponent_bits": exponent_bits, "mantissa_bits": mantissa_bits}
        truths = {"is_float": is_float, "is_signed": is_signed, "has_nan": has_nan, "has_inf": has_inf}
        for values, bits in ((wide, 32), (narrow, 8)):
            for name, value in values.items():
                number = integer(value, bits, f"extension_type.{name}", Code.EXTENSION_TYPE)
                object.__setattr__(self, name, number)
        for name, value in truths.items():
            object.__setattr__(self, name, bool(value))
        violations = list(rules.extension_type(Fields(None, extension_type=self.record())))
        if violations:
            raise violations_error(violations)

    @property
    def packing(self) -> int:
        """Elements a byte."""
        return rules.extension_packing(self.bit_width)

    def record(self) -> Record:
        """The table's fields in wire order."""
        values = {field.name: int(getattr(self, field.name)) for field in fields(self)}
        values |= {"packing": self.packing}
        zeros = {"reserved": bytes(2), "reserved_tail": bytes(2)}
        return EXTENSION_PLAN.make([zeros[n] if n in zeros else values[n] for n in EXTENSION_PLAN.names])

    @classmethod
    def of_record(cls, record: Record) -> ExtensionType:
        """The value of a table that the rules have passed."""
        return cls(**{field.name: getattr(record, field.name) for field in fields(cls)})
