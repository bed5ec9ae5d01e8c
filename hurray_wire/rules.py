"""Every rule of the descriptor (section 1), each a small function from fields to the violations it finds.

The functions stand in tables; a reader runs them over what it parsed, a writer over what it is about to build, so
that nothing is written which would not be read. They see records of plain, unbounded integers: nothing wraps.
No bytes are read and no arrays looked at here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from hurray_wire.dtypes import by_tag, packed_bytes
from hurray_wire.errors import Code, InvalidDescriptorError, Violation
from hurray_wire.structs.descriptor import HANDLE_PLAN, SCHEME_HEAD_BYTES, Fields, scheme_takes
from hurray_wire.tags import (
    BARE_MAGIC,
    BLOCK_PAGED,
    DYNAMIC,
    MIN_ALIGNMENT,
    NO_BUFFER,
    PRIVATE_DEVICES,
    PRIVATE_MEMORY,
    PRIVATE_TYPES,
    RANK,
    VERSION_MAJOR,
    CompositeRole,
    DeviceTag,
    Flag,
    IndexType,
    KvRole,
    ScaleType,
    SchemeFlag,
    SchemeTag,
    StatisticsMask,
    SyncMode,
    TypeTag,
)

Record = Any
Found = Iterable[Violation]
Rule = Callable[[Fields], Found]

NONE: tuple[Violation, ...] = ()

# Plain ints for the hot path: arithmetic on enum members costs microseconds.
_FLAGS = sum(map(int, Flag))
_SHARD = int(Flag.SHARD)
_EXTENSION_TYPE = int(Flag.EXTENSION_TYPE)
_QUANTIZATION = int(Flag.QUANTIZATION)
_FUSED = int(KvRole.FUSED)
_STATISTICS = sum(map(int, StatisticsMask))
_NON_FINITE = int(StatisticsMask.NON_FINITE)
_SYMMETRIC = int(SchemeFlag.SYMMETRIC)
_PER_TENSOR, _PER_CHANNEL, _PER_BLOCK, _NF4, _MXFP = map(int, SchemeTag)
_UNIFIED, _PEER = range(3), range(4)

MEMORY_CLASSES: dict[int, range] = {
    DeviceTag.CPU: _UNIFIED,
    DeviceTag.METAL: _UNIFIED,
    DeviceTag.HEXAGON: _UNIFIED,
    DeviceTag.OPENCL: _UNIFIED,
    DeviceTag.CUDA: _PEER,
    DeviceTag.ROCM: _PEER,
    DeviceTag.VULKAN: _PEER,
    DeviceTag.LEVEL_ZERO: _PEER,
    DeviceTag.WEBGPU: range(1),
}
INDEX_BYTES = {IndexType.UINT32: 4, IndexType.UINT64: 8}
SCALE_BYTES = {ScaleType.FLOAT16: 2, ScaleType.BFLOAT16: 2, ScaleType.FLOAT32: 4}
ZERO_POINT_BYTES = 4

ZERO_POINT_RANGES: dict[int, tuple[int, int]] = {
    TypeTag.INT8: (-(1 << 7), (1 << 7) - 1),
    TypeTag.UINT8: (0, (1 << 8) - 1),
    TypeTag.INT16: (-(1 << 15), (1 << 15) - 1),
    TypeTag.UINT16: (0, (1 << 16) - 1),
    TypeTag.INT32: (-(1 << 31), (1 << 31) - 1),
    TypeTag.UINT32: (0, (1 << 32) - 1),
    TypeTag.INT4: (-8, 7),
    TypeTag.UINT4: (0, 15),
    TypeTag.INT2: (-2, 1),
    TypeTag.UINT2: (0, 3),
    TypeTag.FLOAT8_E4M3: (0, 0),
    TypeTag.FLOAT8_E5M2: (0, 0),
}
"""Affine storage types and the zero points they allow; float8 is ours by decision, and has no zero point."""

_WIDE = {TypeTag.INT16, TypeTag.UINT16, TypeTag.INT32, TypeTag.UINT32}
STORAGE: dict[int, frozenset[int]] = {
    _PER_TENSOR: frozenset(ZERO_POINT_RANGES),
    _PER_CHANNEL: frozenset(ZERO_POINT_RANGES),
    _PER_BLOCK: frozenset(ZERO_POINT_RANGES.keys() - _WIDE),
    _NF4: frozenset({TypeTag.UINT4}),
    _MXFP: frozenset(
        {
            TypeTag.FLOAT8_E4M3,
            TypeTag.FLOAT8_E5M2,
            TypeTag.FLOAT4_E2M1,
            TypeTag.FLOAT6_E2M3,
            TypeTag.FLOAT6_E3M2,
            TypeTag.INT8,
            TypeTag.INT4,
        }
    ),
}
BLOCK_SIZES = {_PER_BLOCK: (2, 1 << 31), _NF4: (8, 1 << 31), _MXFP: (16, 2048)}


def integer(value: Any, bits: int, where: str, code: Code) -> int:
    """A caller's own unsigned integer of so many bits: TypeError for another type, our error for the range."""
    if isinstance(value, bool):
        raise TypeError(f"{where} must be an integer, not {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{where} must be an integer, not {value!r}") from None
    if not 0 <= number < 1 << bits:
        message = f"is {number}, must fit {bits} bits unsigned"
        raise InvalidDescriptorError(message, code=code, where=where)
    return number


def _power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _zero(where: str, value: Any) -> Found:
    if not value or value == bytes(len(value) if isinstance(value, bytes) else 0):
        return NONE
    told = value.hex(" ") if isinstance(value, bytes) else f"{value:#x}"
    return (Violation(Code.RESERVED_NOT_ZERO, where, f"reserved bytes are {told}, must be 0"),)


# The head: 20 bytes that every Hurray descriptor has.


def magic(d: Fields) -> Found:
    if d.front.magic == BARE_MAGIC:
        return NONE
    return (Violation(Code.MAGIC, "magic", f"is {d.front.magic.hex(' ')}, must be {BARE_MAGIC.hex(' ')}"),)


def version(d: Fields) -> Found:
    if d.front.version_major == VERSION_MAJOR:
        return NONE
    message = f"version {d.front.version_major} found, this reader knows {VERSION_MAJOR}"
    return (Violation(Code.VERSION, "version_major", message),)


def descriptor_length(d: Fields) -> Found:
    length = d.front.descriptor_length
    if d.scheme_start is not None and d.scheme_start.length < scheme_takes(d.scheme_start):
        found = d.scheme_start.length
        message = f"is {found}, the scheme takes {scheme_takes(d.scheme_start)}"
        return (Violation(Code.QUANTIZATION_SCHEME, "quantization.length", message, value=found),)
    if d.cut:
        return (Violation(Code.DESCRIPTOR_LENGTH, d.cut, f"runs past the descriptor's {length} bytes"),)
    if d.buffers is None or length == d.end or (length > d.end and d.front.version_minor):
        return NONE
    message = f"is {length}, but the tables end at {d.end}"
    return (Violation(Code.DESCRIPTOR_LENGTH, "descriptor_length", message),)


def flags(d: Fields) -> Found:
    found = d.front.flags
    if found <= _FLAGS and not found & _SHARD:
        return NONE
    violations = []
    if found & ~_FLAGS:
        violations.append(Violation(Code.FLAG_RESERVED, "flags", f"are {found:#x}, bits 5 to 31 must be 0"))
    if found & _SHARD:
        violations.append(Violation(Code.SHARD, "flags", f"are {found:#x}: a shard is forbidden on block-paged"))
    return violations


def type_tag(d: Fields) -> Found:
    tag = d.front.type_tag
    private, extended = tag in PRIVATE_TYPES, bool(d.front.flags & _EXTENSION_TYPE)
    if private and not extended:
        return (Violation(Code.DTYPE, "type_tag", f"private type {tag:#04x} without an extension section"),)
    violations: list[Violation] = []
    if extended and not private:
        message = f"announce an extension section, but type {tag:#04x} is not private (0xF0 to 0xFE)"
        violations.append(Violation(Code.EXTENSION_TYPE, "flags", message))
    if by_tag(tag) is not None:
        return violations
    kind = "invalid" if tag in (0x00, 0xFF) else "reserved" if 0x80 <= tag <= 0xEF or tag == 0x47 else "unknown"
    return [*violations, Violation(Code.DTYPE, "type_tag", f"{kind} element type {tag:#04x}")]


def layout_tag(d: Fields) -> Found:
    if d.front.layout_tag == BLOCK_PAGED:
        return NONE
    message = f"layout {d.front.layout_tag:#04x} found, this reader knows {BLOCK_PAGED:#04x} block-paged"
    return (Violation(Code.LAYOUT, "layout_tag", message),)


def rank(d: Fields) -> Found:
    if d.front.rank == RANK or d.front.layout_tag != BLOCK_PAGED:
        return NONE
    return (Violation(Code.RANK, "rank", f"is {d.front.rank}, must be {RANK}: total_tokens, num_heads, head_dim"),)


# The body: shape, layout, handles.


def dynamic(d: Fields) -> Found:
    shape = (d.front.shape_0, d.front.shape_1, d.front.shape_2)
    if DYNAMIC not in shape:
        return NONE
    axis = shape.index(DYNAMIC)
    return (Violation(Code.DYNAMIC, f"shape[{axis}]", "is dynamic; a snapshot has no unknown size"),)


def byte_offset(d: Fields) -> Found:
    if not d.front.byte_offset:
        return NONE
    message = f"is {d.front.byte_offset}, must be 0"
    return (Violation(Code.BYTE_OFFSET, "byte_offset", message, tolerable=True),)


def page_size(d: Fields) -> Found:
    if d.front.layout_page_size:
        return NONE
    return (Violation(Code.PAGE_SIZE, "layout.page_size", "is 0, must be at least 1", value=0, tolerable=True),)


def paged_axis(d: Fields) -> Found:
    axis = d.front.layout_paged_axis
    if not axis:
        return NONE
    message = f"is {axis}, must be 0"
    return (Violation(Code.PAGED_AXIS, "layout.paged_axis", message, value=axis, tolerable=True),)


def kv_role(d: Fields) -> Found:
    role = d.front.layout_kv_role
    if role <= _FUSED:
        return NONE
    return (Violation(Code.KV_ROLE, "layout.kv_role", f"is {role}, must be 0 key, 1 value or 2 fused"),)


def index_type(d: Fields) -> Found:
    found = d.front.layout_block_table_index_type
    if found in INDEX_BYTES:
        return NONE
    where = "layout.block_table_index_type"
    return (Violation(Code.INDEX_TYPE, where, f"is {found}, must be 0 uint32 or 1 uint64"),)


def layout_reserved(d: Fields) -> Found:
    return _zero("layout.reserved", d.front.layout_reserved)


def buffer_count(d: Fields) -> Found:
    expected = len(buffer_names(d.quantization))
    unread = d.quantization is None and d.front.flags & _QUANTIZATION
    unknown = d.quantization is not None and d.quantization.scheme_tag not in STORAGE
    if d.front.buffer_count == expected or (3 <= d.front.buffer_count <= 5 and (unread or unknown)):
        return NONE
    message = f"is {d.front.buffer_count}, must be {expected}"
    return (Violation(Code.BUFFER_COUNT, "buffer_count", message),)


def handles(d: Fields) -> Found:
    violations: list[Violation] = []
    for i, handle in enumerate(d.buffers or ()):
        if not _plain(handle.byte_size > 0, *handle[1:]):
            violations += check_handle(handle, f"buffers[{i}].")
    return violations


@lru_cache(maxsize=64)
def _plain(filled: bool, alignment: int, device_tag: int, sync_mode: int, memory_class: int, reserved: int) -> bool:
    """Whether a handle keeps every rule: all but its size are the same few values in frame after frame."""
    return not check_handle(HANDLE_PLAN.make((filled, alignment, device_tag, sync_mode, memory_class, reserved)))


def check_handle(handle: Record, where: str = "") -> list[Violation]:
    """The rules of one buffer handle."""
    violations: list[Violation] = []
    least = MIN_ALIGNMENT if handle.byte_size else 1
    if handle.alignment < least or not _power_of_two(handle.alignment):
        message = f"is {handle.alignment}, must be a power of two of at least {least}"
        violations.append(Violation(Code.ALIGNMENT, where + "alignment", message))
    if handle.device_tag not in MEMORY_CLASSES and handle.device_tag not in PRIVATE_DEVICES:
        violations.append(Violation(Code.DEVICE, where + "device_tag", f"unknown device {handle.device_tag:#04x}"))
    elif not _has_memory(handle.device_tag, handle.memory_class):
        message = f"device {handle.device_tag:#04x} has no memory class {handle.memory_class:#04x}"
        violations.append(Violation(Code.MEMORY_CLASS, where + "memory_class", message))
    if handle.sync_mode:
        known = handle.sync_mode <= SyncMode.CONSUMER_STREAM
        message = f"is {handle.sync_mode}, in copied bytes only 0 producer_synced means anything"
        violations.append(Violation(Code.SYNC_MODE, where + "sync_mode", message, tolerable=known))
    violations += _zero(where + "reserved", handle.reserved)
    return violations


def _has_memory(device_tag: int, memory_class: int) -> bool:
    if device_tag in PRIVATE_DEVICES:
        return memory_class == 0 or memory_class in PRIVATE_MEMORY
    return memory_class in MEMORY_CLASSES[device_tag]


def colocation(d: Fields) -> Found:
    if not d.buffers:
        return NONE
    first = d.buffers[0]
    for i, handle in enumerate(d.buffers):
        if handle[2:] == first[2:]:
            continue
        for name in ("device_tag", "memory_class"):
            found, expected = getattr(handle, name), getattr(first, name)
            if found != expected:
                message = f"is {found:#04x}, but buffer 0's is {expected:#04x}; all buffers share one place"
                return (Violation(Code.COLOCATION, f"buffers[{i}].{name}", message),)
    return NONE


# Quantisation.


def quantization(d: Fields) -> Found:
    scheme = d.quantization
    if scheme is None:
        start = d.scheme_start
        # A section that runs past the descriptor may stand anywhere: its tag is no tag to go by.
        readable = start is not None and SCHEME_HEAD_BYTES <= start.length < scheme_takes(start)
        return check_scheme_known(start) if readable else NONE
    violations = list(check_scheme(scheme))
    if any(v.code is Code.SCHEME for v in violations):
        return violations
    violations += check_scheme_fit(scheme, d.front.layout_page_size)
    violations += check_scheme_buffers(scheme)
    violations += check_storage(scheme, d.front.type_tag)
    return violations


def check_scheme(scheme: Record, where: str = "quantization.") -> list[Violation]:
    """What a scheme's own bytes must hold, whatever tensor it stands on."""
    unknown = check_scheme_known(scheme, where)
    if unknown:
        return unknown
    tag = scheme.scheme_tag
    violations = []
    allowed = _SYMMETRIC if tag in (_PER_CHANNEL, _PER_BLOCK) else 0
    if scheme.flags & ~allowed:
        message = f"are {scheme.flags:#06x}, allowed are {allowed:#06x}"
        violations.append(Violation(Code.FLAG_RESERVED, where + "flags", message))
    if tag == _PER_TENSOR and (not math.isfinite(scheme.scale) or scheme.scale == 0):
        message = f"is {scheme.scale}, must be finite and not 0"
        violations.append(Violation(Code.QUANTIZATION_SCALE, where + "scale", message))
    if tag in BLOCK_SIZES:
        violations += _block_size(scheme, where)
    if tag in (_PER_CHANNEL, _PER_BLOCK) and bool(scheme.flags & _SYMMETRIC) != (
        scheme.zero_point_buffer_index == NO_BUFFER
    ):
        message = f"is {scheme.zero_point_buffer_index:#x}, must be {NO_BUFFER:#x} exactly when SYMMETRIC"
        violations.append(Violation(Code.QUANTIZATION_BUFFER, where + "zero_point_buffer_index", message))
    if tag in (_PER_CHANNEL, _PER_BLOCK):
        types = (ScaleType.FLOAT32,) if tag == _PER_CHANNEL else tuple(ScaleType)
        if scheme.scale_type not in types:
            message = f"is {scheme.scale_type}, must be one of {', '.join(map(str, map(int, types)))}"
            violations.append(Violation(Code.QUANTIZATION_SCHEME, where + "scale_type", message))
    violations += _zero(where + "reserved", getattr(scheme, "reserved", b""))
    return violations


def check_scheme_known(scheme: Record, where: str = "quantization.") -> list[Violation]:
    """A scheme and version that this reader has heard of."""
    if scheme.scheme_tag not in STORAGE:
        return [Violation(Code.SCHEME, where + "scheme_tag", f"unknown scheme {scheme.scheme_tag:#04x}")]
    if scheme.scheme_version != 1:
        message = f"version {scheme.scheme_version} found, this reader knows 1"
        return [Violation(Code.SCHEME, where + "scheme_version", message)]
    return []


def _block_size(scheme: Record, where: str) -> list[Violation]:
    least, most = BLOCK_SIZES[scheme.scheme_tag]
    if least <= scheme.block_size <= most and _power_of_two(scheme.block_size):
        return []
    message = f"is {scheme.block_size}, must be a power of two from {least} to {most}"
    return [Violation(Code.QUANTIZATION_BLOCK, where + "block_size", message)]


def check_scheme_fit(scheme: Record, page_size: int, where: str = "quantization.") -> list[Violation]:
    """A scheme on a block-paged layout: which axis it may name, and that a block is a page."""
    tag = scheme.scheme_tag
    if tag == _PER_TENSOR:
        return []
    allowed = {_PER_CHANNEL: (1, 2), _PER_BLOCK: (0,)}.get(tag, (0, 1, 2))
    violations = []
    if scheme.axis not in allowed:
        message = f"is {scheme.axis}, must be {' or '.join(map(str, allowed))} on block-paged"
        violations.append(Violation(Code.QUANTIZATION_AXIS, where + "axis", message, value=scheme.axis))
    if tag == _PER_BLOCK and scheme.block_size != page_size:
        message = f"is {scheme.block_size}, must be page_size {page_size}"
        violations.append(Violation(Code.QUANTIZATION_BLOCK, where + "block_size", message, value=scheme.block_size))
    return violations


def check_scheme_buffers(scheme: Record, where: str = "quantization.") -> list[Violation]:
    """Scales are buffer 3, zero points buffer 4, or both buffer 3, one behind the other."""
    if scheme.scheme_tag == _PER_TENSOR:
        return []
    violations = []
    if scheme.scale_buffer_index != 3:
        message = f"is {scheme.scale_buffer_index}, must be 3"
        violations.append(Violation(Code.QUANTIZATION_BUFFER, where + "scale_buffer_index", message))
    if scheme.scheme_tag in (_PER_CHANNEL, _PER_BLOCK) and scheme.zero_point_buffer_index not in (3, 4, NO_BUFFER):
        message = f"is {scheme.zero_point_buffer_index:#x}, must be 3 or 4"
        violations.append(Violation(Code.QUANTIZATION_BUFFER, where + "zero_point_buffer_index", message))
    return violations


def check_storage(scheme: Record, type_tag: int) -> list[Violation]:
    """The element type that a scheme quantises to, and an inline zero point within it."""
    if type_tag not in STORAGE[scheme.scheme_tag]:
        name = SchemeTag(scheme.scheme_tag).name.lower()
        found = by_tag(type_tag)
        message = f"{found.name if found else hex(type_tag)} is no storage type of scheme {name}"
        return [Violation(Code.QUANTIZATION_STORAGE, "type_tag", message)]
    if scheme.scheme_tag == _PER_TENSOR:
        least, most = ZERO_POINT_RANGES[type_tag]
        if not least <= scheme.zero_point <= most:
            message = f"is {scheme.zero_point}, must be from {least} to {most}"
            return [Violation(Code.QUANTIZATION_ZERO_POINT, "quantization.zero_point", message)]
    return []


def buffer_names(scheme: Record | None) -> tuple[str, ...]:
    """The buffers that a descriptor with this scheme has, in table order."""
    names: tuple[str, ...] = ("page_pool", "block_table", "seq_ptr")
    if scheme is None or scheme.scheme_tag == _PER_TENSOR:
        return names
    names += ("scales",)
    if scheme.scheme_tag in (_PER_CHANNEL, _PER_BLOCK) and not scheme.flags & _SYMMETRIC:
        shared = scheme.zero_point_buffer_index == scheme.scale_buffer_index
        names += () if shared else ("zero_points",)
    return names


# Statistics, extension type, composite member.


def statistics(d: Fields) -> Found:
    table = d.statistics
    if table is None:
        return NONE
    violations: list[Violation] = []
    if table.mask & ~_STATISTICS:
        message = f"is {table.mask:#x}, bits 6 to 31 must be 0"
        violations.append(Violation(Code.STATISTICS, "statistics.mask", message))
    violations += _zero("statistics.reserved", table.reserved)
    if table.mask & _NON_FINITE:
        violations += _booleans(table, "statistics", ("has_nan", "has_inf"), Code.STATISTICS)
    violations += _zero("statistics.reserved_tail", table.reserved_tail)
    return violations


def _booleans(table: Record, where: str, names: Iterable[str], code: Code) -> list[Violation]:
    wrong = ((name, getattr(table, name)) for name in names)
    return [Violation(code, f"{where}.{n}", f"is {v}, must be 0 or 1", value=v) for n, v in wrong if v > 1]


def extension_type(d: Fields) -> Found:
    table = d.extension_type
    if table is None:
        return NONE
    violations: list[Violation] = []
    width, where = table.bit_width, "extension_type."
    if width not in (1, 2, 4) and (not width or width % 8):
        message = f"is {width}, must be 1, 2, 4 or a multiple of 8"
        violations.append(Violation(Code.EXTENSION_TYPE, where + "bit_width", message))
    elif table.packing != extension_packing(width):
        message = f"is {table.packing}, must be {extension_packing(width)} for {width} bits"
        violations.append(Violation(Code.EXTENSION_TYPE, where + "packing", message))
    names = ("is_float", "is_signed", "has_nan", "has_inf")
    violations += _booleans(table, "extension_type", names, Code.EXTENSION_TYPE)
    violations += _zero(where + "reserved", table.reserved)
    violations += _zero(where + "reserved_tail", table.reserved_tail)
    return violations


def extension_packing(bit_width: int) -> int:
    """Elements a byte: 8 / bit_width for 1, 2 and 4 bits, else 1."""
    return 8 // bit_width if bit_width in (1, 2, 4) else 1


def composite(d: Fields) -> Found:
    table = d.composite
    if table is None:
        return NONE
    violations: list[Violation] = []
    if table.role not in set(CompositeRole):
        message = f"is {table.role}, must be 0 correction or 1 base"
        violations.append(Violation(Code.COMPOSITE, "composite.role", message))
    violations += _zero("composite.reserved", table.reserved)
    return violations


# Sizes: what the buffers must hold, from shape, layout and scheme.


def element_bits(d: Fields) -> int:
    """Bits an element, 0 where the type is not known."""
    if d.extension_type is not None:
        width: int = d.extension_type.bit_width
        return width
    dtype = by_tag(d.front.type_tag)
    return dtype.bit_width if dtype else 0


def sizes(d: Fields) -> Found:
    if d.buffers is None or len(d.buffers) < RANK or d.cut:
        return NONE
    needed = needed_bytes(d)
    violations = []
    for i, (handle, least) in enumerate(zip(d.buffers, needed, strict=False)):
        if least is None or handle.byte_size == least:
            continue
        message = f"is {handle.byte_size}, {buffer_names(d.quantization)[i]} takes {least}"
        larger = handle.byte_size > least
        violations.append(Violation(Code.BUFFER_SIZE, f"buffers[{i}].byte_size", message, tolerable=larger))
    return violations


def needed_bytes(d: Fields) -> list[int | None]:
    """Bytes that each buffer takes, None where that is not for the descriptor to say (block_table, NF4, MXFP)."""
    front = d.front
    slots = front.layout_num_pages * front.layout_page_size
    bits = element_bits(d)
    pool = packed_bytes(slots * front.shape_1 * front.shape_2, bits) if bits else None
    width = INDEX_BYTES.get(front.layout_block_table_index_type)
    needed = [pool, None, None if width is None else (front.layout_num_seqs + 1) * width]
    scheme = d.quantization
    if scheme is None or scheme.scheme_tag not in (_PER_CHANNEL, _PER_BLOCK):
        return needed
    scale = SCALE_BYTES.get(scheme.scale_type)
    block = scheme.scheme_tag == _PER_BLOCK
    count = slots if block else {1: front.shape_1, 2: front.shape_2}.get(scheme.axis)
    if scale is None or count is None:
        return needed
    parts = [count * scale, count * ZERO_POINT_BYTES]
    if scheme.flags & _SYMMETRIC:
        return [*needed, parts[0]]
    if scheme.zero_point_buffer_index == scheme.scale_buffer_index:
        return [*needed, sum(parts)]
    return [*needed, *parts]


# In the order in which the stages name them (section 3): the first violation leads.
HEAD_RULES: tuple[Rule, ...] = (magic, version, flags, type_tag, layout_tag, rank)
BODY_RULES: tuple[Rule, ...] = (
    dynamic,
    byte_offset,
    page_size,
    paged_axis,
    kv_role,
    index_type,
    layout_reserved,
    buffer_count,
    handles,
    colocation,
    quantization,
    statistics,
    extension_type,
    composite,
)
LAST_RULES: tuple[Rule, ...] = (descriptor_length, sizes)


def check_descriptor(d: Fields) -> list[Violation]:
    """Run every rule that the readable part of a descriptor allows."""
    violations: list[Violation] = []
    tables = (HEAD_RULES, BODY_RULES, LAST_RULES) if d.buffers is not None else (HEAD_RULES, LAST_RULES)
    for table in tables:
        for rule in table:
            violations += rule(d)
    return violations
