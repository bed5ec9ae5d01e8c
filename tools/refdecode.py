"""An independent reader of both wire forms, written from the prose of the specification alone.

It shares no code with the package that it checks and needs the standard library only.  "The specification,
section N" is the page that fixes the bytes: 1 descriptor, 2 element types, 3 stages and errors, 4 frame.

    python tools/refdecode.py FILE [OPTIONS]

prints one JSON object on one line: integers above 32 bits as strings, floats as the hex digits of their 64
bits, bytes as sha256.  OPTIONS is another JSON object: "stream" (true reads a whole stream), "strict", "limits",
"expect".  Exit status 0 accepted, 1 refused, 2 usage or unreadable file.

A refusal names the first violation in the order of the specification, section 3: the descriptor's fields as they
are read, buffer_count before the handles, a scheme's own fields before what relates it to the tensor, and what needs
the whole descriptor (its length, then the buffers' sizes) last.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from refdecode_xxh3 import xxh3_64
from refdecode_zstd import ZstdError, decompress

INVALID, FRAME, UNSUPPORTED = "InvalidDescriptorError", "FrameError", "UnsupportedError"
TRUNCATED, CHECKSUM, LIMIT = "TruncatedError", "ChecksumError", "LimitError"

# The limits that a reader has by default; one of a whole stream is absent unless it is asked for.
LIMITS = {
    **{"descriptor_bytes": 64 << 10, "metadata_bytes": 1 << 20, "sections": 65535},
    **{"frame_bytes": 64 << 30, "decoded_bytes": 64 << 30},
}


# === what comes out =========================================================================================


class Fault(NamedTuple):
    """One broken rule: the class of error, its code, the field, the field's absolute offset."""

    error_class: str
    code: str
    where: str
    offset: int | None


class Refused(Exception):
    """The bytes are no item of this wire; the only exception that leaves this module for bad bytes."""

    def __init__(self, error_class: str, code: str, where: str, offset: int | None = None) -> None:
        super().__init__(f"{error_class} {code}: {where} at offset {offset}")
        self.error_class = error_class
        self.code = code
        self.where = where
        self.offset = offset


class Asked(NamedTuple):
    """What a reader is asked for: strictness, limits, and what the tensor must be (stage 7)."""

    strict: bool
    limits: dict[str, int]
    expect: dict[str, Any]


class Handle(NamedTuple):
    """A buffer handle (the specification, section 1)."""

    byte_size: int
    alignment: int
    device_tag: int
    sync_mode: int
    memory_class: int
    reserved: int


@dataclass(slots=True)
class Decoded:
    """One item: the descriptor's fields, the index tables, the raw buffers, and what only a frame carries."""

    form: str
    descriptor: bytes
    dtype: str
    type_tag: int
    shape: tuple[int, int, int]
    page_size: int
    num_pages: int
    num_seqs: int
    kv_role: str
    layer_index: int | None
    index_type: str
    handles: list[Handle]
    quantization: dict[str, Any] | None
    statistics: dict[str, Any] | None
    extension_type: dict[str, Any] | None
    composite: str | None
    buffers: list[bytes]
    seq_ptr: list[int]
    block_table: list[int]
    seq_lens: list[int] | None
    violations: list[Fault]
    metadata: dict[str, Any] | None = None
    sequence: int | None = None
    last: bool | None = None
    stream_id: int | None = None


class _Notes:
    """The violations of descriptor and index tables, stages 5 and 9 (the specification, section 3)."""

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self.faults: list[Fault] = []
        self.tolerated: list[Fault] = []

    def add(self, code: str, where: str, offset: int | None) -> None:
        self.faults.append(Fault(INVALID, code, where, offset))

    def tolerate(self, code: str, where: str, offset: int | None) -> None:
        """A violation that a lenient reader reports and a strict one refuses."""
        (self.faults if self.strict else self.tolerated).append(Fault(INVALID, code, where, offset))

    def settle(self) -> None:
        """Refuse with the first violation, if there is one."""
        if self.faults:
            raise Refused(*self.faults[0])


# === the format's tables (the specification, sections 1 and 2) ==============================================

BARE_MAGIC = b"HRRY"
CONTAINER_MAGIC = b"HRRYFILE"
FRAME_MAGIC = bytes.fromhex("8948524b560d0a1a")

DTYPES: dict[int, tuple[str, int]] = {
    0x01: ("float16", 16),
    0x02: ("bfloat16", 16),
    0x03: ("float32", 32),
    0x04: ("float64", 64),
    0x10: ("int8", 8),
    0x11: ("uint8", 8),
    0x12: ("int16", 16),
    0x13: ("uint16", 16),
    0x14: ("int32", 32),
    0x15: ("uint32", 32),
    0x16: ("int64", 64),
    0x17: ("uint64", 64),
    0x20: ("bool", 1),
    0x40: ("float8_e4m3", 8),
    0x41: ("float8_e5m2", 8),
    0x42: ("float8_e8m0", 8),
    0x43: ("float4_e2m1", 4),
    0x44: ("float6_e2m3", 6),
    0x45: ("float6_e3m2", 6),
    0x46: ("float128", 128),
    0x48: ("int4", 4),
    0x49: ("uint4", 4),
    0x4A: ("int2", 2),
    0x4B: ("uint2", 2),
    0x50: ("complex64", 64),
    0x51: ("complex128", 128),
}
PRIVATE = range(0xF0, 0xFF)

QUANTIZATION, SHARD, EXTENSION, STATISTICS, COMPOSITE = 1, 2, 4, 8, 16
NONE = 0xFFFFFFFF
DYNAMIC = 0xFFFFFFFFFFFFFFFF
KV_ROLES = ("key", "value", "fused")
INDEX_TYPES = ("uint32", "uint64")

_MEMORY_CLASSES: dict[int, frozenset[int]] = {
    **dict.fromkeys((0, 3, 6, 8), frozenset((0, 1, 2))),
    **dict.fromkeys((1, 2, 4, 7), frozenset((0, 1, 2, 3))),
    5: frozenset((0,)),
    **dict.fromkeys(PRIVATE, frozenset((0, *PRIVATE))),
}

_FLOAT8 = (0x40, 0x41)
_NARROW = frozenset((0x10, 0x11, 0x48, 0x49, 0x4A, 0x4B, *_FLOAT8))
_WIDE = _NARROW | {0x12, 0x13, 0x14, 0x15}
_SIGNED = frozenset((0x10, 0x12, 0x14, 0x48, 0x4A))
_ZERO_POINTS: dict[int, tuple[int, int]] = {
    **{tag: (0, (1 << DTYPES[tag][1]) - 1) for tag in _WIDE},
    **{tag: (-1 << DTYPES[tag][1] - 1, (1 << DTYPES[tag][1] - 1) - 1) for tag in _SIGNED},
    **dict.fromkeys(_FLOAT8, (0, 0)),
}


class Scheme(NamedTuple):
    """A quantization scheme: name, bytes, storage types, lawful flags."""

    name: str
    size: int
    storage: frozenset[int]
    flags: int


SCHEMES = {
    1: Scheme("per_tensor", 16, _WIDE, 0),
    2: Scheme("per_channel", 20, _WIDE, 1),
    3: Scheme("per_block", 24, _NARROW, 1),
    4: Scheme("nf4", 16, frozenset((0x49,)), 0),
    5: Scheme("mxfp", 16, frozenset((*_FLOAT8, 0x43, 0x44, 0x45, 0x10, 0x48)), 0),
}
SCALE_TYPES = {1: ("float16", 2), 2: ("bfloat16", 2), 3: ("float32", 4)}

_STATISTICS_BITS = {
    "nnz": 0,
    "sparsity_ratio": 1,
    **dict.fromkeys(("value_min", "value_max", "value_abs_max"), 2),
    **dict.fromkeys(("value_mean", "value_stddev"), 3),
    **dict.fromkeys(("nm_n", "nm_m"), 4),
    **dict.fromkeys(("has_nan", "has_inf"), 5),
}


def _is_power(value: int, low: int, high: int) -> bool:
    return low <= value <= high and value & value - 1 == 0


# === the descriptor, stage 5 (the specification, sections 1 and 3) ==========================================

_HEAD = struct.Struct("<4sBBIIBBI")
_FIXED = struct.Struct("<3QQIQIIBIB6sB")
_HANDLE = struct.Struct("<QIBBBB")
_SCHEME_HEAD = struct.Struct("<BBH")
_PER_TENSOR = struct.Struct("<fi4s")
_PER_CHANNEL = struct.Struct("<IIIB3s")
_PER_BLOCK = struct.Struct("<IIIIB3s")
_PER_GROUP = struct.Struct("<III")
_STATISTICS = struct.Struct("<IIQ6d4B4s")
_EXTENSION = struct.Struct("<I6B2sI2B2s")
_COMPOSITE = struct.Struct("<B15s")

_Rule = tuple[str, str, int, bool]  # code, field, offset within the section, whether it holds


class _Descriptor:
    """Walks a descriptor once, front to back, and notes what is wrong with it; then holds its fields."""

    shape: tuple[int, int, int]
    page_size: int
    num_pages: int
    num_seqs: int
    scale_bytes: int

    def __init__(self, raw: bytes, base: int, notes: _Notes) -> None:
        self.raw, self.base, self.notes = raw, base, notes
        self.at, self.end = 0, len(raw)
        self.handles: list[Handle] = []
        self.quantization: dict[str, Any] | None = None
        self.statistics: dict[str, Any] | None = None
        self.extension_type: dict[str, Any] | None = None
        self.composite: str | None = None
        self.before_handles: int | None = None  # how many faults stand before those of the handles
        self._read_head()
        self._read_fixed()
        self._read_handles()
        self._read_sections()
        if self.at != self.end and self.minor == 0:
            self._note("descriptor_length", "descriptor_length", 6)
        notes.settle()
        self._check_sizes()
        notes.settle()

    # --- notes ---

    def _note(self, code: str, where: str, at: int) -> None:
        self.notes.add(code, where, self.base + at)

    def _stop(self, code: str, where: str, at: int) -> NoReturn:
        """Nothing behind this can be located: refuse with the first violation found so far, or this one."""
        self._note(code, where, at)
        if self.before_handles is not None:
            self._judge_count(_extra_buffers(self.quantization) if self.quantization else None)
        raise Refused(*self.notes.faults[0])

    def _judge_count(self, extra: int | None) -> None:
        """buffer_count, told before the handles; `extra` is None where the scheme could not be read."""
        lawful = (3, 4, 5) if extra is None and self.flags & QUANTIZATION else (3 + (extra or 0),)
        if self.count not in lawful:
            fault = Fault(INVALID, "buffer_count", "buffer_count", self.base + 84)
            self.notes.faults.insert(self.before_handles or 0, fault)

    def _unsupported(self, code: str, where: str, at: int) -> NoReturn:
        """An unsupported thing wins over the violations of its stage (section 3)."""
        raise Refused(UNSUPPORTED, code, where, self.base + at)

    def _require(self, section: str, start: int, rules: Sequence[_Rule]) -> None:
        for code, name, at, holds in rules:
            if not holds:
                self._note(code, f"{section}.{name}", start + at)

    def _take(self, size: int, where: str = "descriptor_length", found: int | None = None) -> int:
        """The start of the next `size` bytes of `where`, which must lie within the descriptor."""
        start = self.at
        self.at = start + size
        if self.at > self.end:
            self._stop("descriptor_length", where, start if found is None else found)
        return start

    # --- the fixed part ---

    def _read_head(self) -> None:
        raw = self.raw
        if raw[:4] != BARE_MAGIC:
            raise Refused(FRAME, "magic", "magic", self.base)
        if len(raw) > 4 and raw[4] != 1:
            self._unsupported("version", "version_major", 4)
        self._take(_HEAD.size)
        _, _, self.minor, length, self.flags, self.type_tag, layout_tag, rank = _HEAD.unpack_from(raw)
        if length != self.end:
            self._stop("descriptor_length", "descriptor_length", 6)
        if self.flags >> 5:
            self._note("flag_reserved", "flags", 10)
        if self.flags & SHARD:
            self._note("shard", "flags", 10)
        self._check_type_tag()
        if layout_tag != 0x0A:
            self._unsupported("layout", "layout_tag", 15)
        if rank != 3:
            self._stop("rank", "rank", 16)

    def _check_type_tag(self) -> None:
        extended, private = bool(self.flags & EXTENSION), self.type_tag in PRIVATE
        if not (extended if private else self.type_tag in DTYPES):
            self._unsupported("dtype", "type_tag", 14)
        if extended and not private:
            self._note("extension_type", "flags", 10)

    def _read_fixed(self) -> None:
        values = _FIXED.unpack_from(self.raw, self._take(_FIXED.size, found=6))
        self.shape, (byte_offset, self.page_size, self.num_pages, paged_axis) = values[:3], values[3:7]
        self.num_seqs, self.kv_role, self.layer_index, self.index_type, reserved, self.count = values[7:]
        if DYNAMIC in self.shape:
            axis = self.shape.index(DYNAMIC)
            self._unsupported("dynamic", f"shape[{axis}]", 20 + 8 * axis)
        if byte_offset:
            self.notes.tolerate("byte_offset", "byte_offset", self.base + 44)
        if not self.page_size:
            self.notes.tolerate("page_size", "layout.page_size", self.base + 52)
        if paged_axis:
            self.notes.tolerate("paged_axis", "layout.paged_axis", self.base + 64)
        if self.kv_role > 2:
            self._note("kv_role", "layout.kv_role", 72)
        if self.index_type > 1:
            self._note("index_type", "layout.block_table_index_type", 77)
        if any(reserved):
            self._note("reserved_not_zero", "layout.reserved", 78)

    def _read_handles(self) -> None:
        """The handles that are there whole; `buffer_count` is judged when the scheme has been read."""
        self.before_handles, start = len(self.notes.faults), self.at
        whole = min(self.count, (self.end - start) // _HANDLE.size)
        rows = self.raw[start : start + whole * _HANDLE.size]
        self.handles = [Handle._make(values) for values in _HANDLE.iter_unpack(rows)]
        for index, handle in enumerate(self.handles):
            for code, name, at in _handle_faults(handle):
                lenient = name == "sync_mode" and handle.sync_mode < 3
                note = self.notes.tolerate if lenient else self.notes.add
                note(code, f"buffers[{index}].{name}", self.base + start + _HANDLE.size * index + at)
        for index, name, at in _strangers(self.handles):
            self._note("colocation", f"buffers[{index}].{name}", start + _HANDLE.size * index + at)
        self.at = start + whole * _HANDLE.size
        if whole < self.count:
            self._stop("descriptor_length", f"buffers[{whole}]", self.at)
        self.at = start + self.count * _HANDLE.size

    # --- the optional sections, in the order in which they are stored ---

    def _read_sections(self) -> None:
        if self.flags & QUANTIZATION:
            self._read_quantization()
        if self.flags & SHARD:
            self._take(48, "shard")
        if self.flags & STATISTICS:
            self._read_statistics()
        if self.flags & EXTENSION:
            self._read_extension_type()
        if self.flags & COMPOSITE:
            self._read_composite()
        self._judge_count(_extra_buffers(self.quantization) if self.quantization else 0)

    def _read_quantization(self) -> None:
        (length,) = struct.unpack_from("<I", self.raw, self._take(4, "quantization.length"))
        start = self.at
        if length < 4:
            self._stop("quantization_scheme", "quantization.length", start - 4)
        if start + 4 > self.end:
            self._stop("descriptor_length", "quantization.length", start - 4)
        tag, version, flags = _SCHEME_HEAD.unpack_from(self.raw, start)
        name, size, storage, lawful_flags = SCHEMES.get(tag, Scheme("", 4, frozenset(), 0))
        if length >= size:
            self._take(length, "quantization.length", start - 4)
        if not name:
            self._unsupported("scheme", "quantization.scheme_tag", start)
        if version != 1:
            self._unsupported("scheme", "quantization.scheme_version", start + 1)
        if length < size:
            self._stop("quantization_scheme", "quantization.length", start - 4)
        if flags & ~lawful_flags:
            self._note("flag_reserved", "quantization.flags", start + 2)
        readers: dict[int, Callable[[int, int], dict[str, Any]]] = {
            1: self._read_per_tensor,
            2: self._read_per_channel,
            3: self._read_per_block,
        }
        values = readers.get(tag, self._read_per_group)(tag if tag > 3 else flags & 1, start + 4)
        if self.type_tag not in storage:
            self._note("quantization_storage", "type_tag", 14)
        elif tag == 1:
            low, high = _ZERO_POINTS[self.type_tag]
            if not low <= values["zero_point"] <= high:
                self._note("quantization_zero_point", "quantization.zero_point", start + 8)
        self.quantization = {"scheme": name, **values}

    def _read_per_tensor(self, _flags: int, start: int) -> dict[str, Any]:
        scale, zero_point, zeros = _PER_TENSOR.unpack_from(self.raw, start)
        rules = (
            ("quantization_scale", "scale", 0, math.isfinite(scale) and scale != 0),
            ("reserved_not_zero", "reserved", 8, not any(zeros)),
        )
        self._require("quantization", start, rules)
        return {"scale": scale, "zero_point": zero_point}

    def _read_per_channel(self, symmetric: int, start: int) -> dict[str, Any]:
        axis, scales, zero_points, scale_type, zeros = _PER_CHANNEL.unpack_from(self.raw, start)
        rules = (
            ("quantization_buffer", "zero_point_buffer_index", 8, (zero_points == NONE) == bool(symmetric)),
            ("quantization_scheme", "scale_type", 12, scale_type == 3),
            ("reserved_not_zero", "reserved", 13, not any(zeros)),
            ("quantization_axis", "axis", 0, axis in (1, 2)),
            ("quantization_buffer", "scale_buffer_index", 4, scales == 3),
            ("quantization_buffer", "zero_point_buffer_index", 8, zero_points in (3, 4, NONE)),
        )
        self._require("quantization", start, rules)
        return {"axis": axis, **_indices(scales, zero_points, symmetric)}

    def _read_per_block(self, symmetric: int, start: int) -> dict[str, Any]:
        axis, block_size, scales, zero_points, scale_type, zeros = _PER_BLOCK.unpack_from(self.raw, start)
        rules = (
            ("quantization_block", "block_size", 4, _is_power(block_size, 2, NONE)),
            ("quantization_buffer", "zero_point_buffer_index", 12, (zero_points == NONE) == bool(symmetric)),
            ("quantization_scheme", "scale_type", 16, scale_type in SCALE_TYPES),
            ("reserved_not_zero", "reserved", 17, not any(zeros)),
            ("quantization_axis", "axis", 0, axis == 0),
            ("quantization_block", "block_size", 4, block_size == self.page_size),
            ("quantization_buffer", "scale_buffer_index", 8, scales == 3),
            ("quantization_buffer", "zero_point_buffer_index", 12, zero_points in (3, 4, NONE)),
        )
        self._require("quantization", start, rules)
        name, self.scale_bytes = SCALE_TYPES.get(scale_type, ("", 0))
        return {"axis": axis, "block_size": block_size, **_indices(scales, zero_points, symmetric), "scale_type": name}

    def _read_per_group(self, tag: int, start: int) -> dict[str, Any]:
        axis, block_size, scales = _PER_GROUP.unpack_from(self.raw, start)
        low, high = (8, NONE) if tag == 4 else (16, 2048)
        rules = (
            ("quantization_block", "block_size", 4, _is_power(block_size, low, high)),
            ("quantization_axis", "axis", 0, axis < 3),
            ("quantization_buffer", "scale_buffer_index", 8, scales == 3),
        )
        self._require("quantization", start, rules)
        return {"axis": axis, "block_size": block_size, "scale_buffer_index": scales}

    def _read_statistics(self) -> None:
        start = self._take(_STATISTICS.size, "statistics")
        mask, zero, *values, padding = _STATISTICS.unpack_from(self.raw, start)
        flags_known = bool(mask & 32)
        rules = (
            ("statistics", "mask", 0, mask < 64),
            ("reserved_not_zero", "reserved", 4, zero == 0),
            ("statistics", "has_nan", 66, not flags_known or values[9] < 2),
            ("statistics", "has_inf", 67, not flags_known or values[10] < 2),
            ("reserved_not_zero", "reserved_tail", 68, not any(padding)),
        )
        self._require("statistics", start, rules)
        values[9:] = map(bool, values[9:])
        named = zip(_STATISTICS_BITS.items(), values, strict=True)
        self.statistics = {name: value for (name, bit), value in named if mask >> bit & 1}

    def _read_extension_type(self) -> None:
        start = self._take(_EXTENSION.size, "extension_type")
        *values, zeros, bias, has_nan, has_inf, more_zeros = _EXTENSION.unpack_from(self.raw, start)
        width, packing, is_float, is_signed, sign_bits, exponent_bits, mantissa_bits = values
        rules = (
            ("extension_type", "bit_width", 0, width in (1, 2, 4) or (width > 0 and width % 8 == 0)),
            ("extension_type", "packing", 4, packing == {1: 8, 2: 4, 4: 2}.get(width, 1)),
            ("extension_type", "is_float", 5, is_float < 2),
            ("extension_type", "is_signed", 6, is_signed < 2),
            ("extension_type", "has_nan", 16, has_nan < 2),
            ("extension_type", "has_inf", 17, has_inf < 2),
            ("reserved_not_zero", "reserved", 10, not any(zeros)),
            ("reserved_not_zero", "reserved_tail", 18, not any(more_zeros)),
        )
        self._require("extension_type", start, rules)
        sizes = {"sign_bits": sign_bits, "exponent_bits": exponent_bits, "mantissa_bits": mantissa_bits}
        kind = {"is_float": is_float == 1, "is_signed": is_signed == 1}
        specials = {"exponent_bias": bias, "has_nan": has_nan == 1, "has_inf": has_inf == 1}
        self.extension_type = {"bit_width": width, "packing": packing, **kind, **sizes, **specials}

    def _read_composite(self) -> None:
        start = self._take(_COMPOSITE.size, "composite")
        role, zeros = _COMPOSITE.unpack_from(self.raw, start)
        rules = (
            ("composite", "role", 0, role < 2),
            ("reserved_not_zero", "reserved", 1, not any(zeros)),
        )
        self._require("composite", start, rules)
        self.composite = "base" if role else "correction"

    # --- sizes ---

    @property
    def bits(self) -> int:
        """The bits of one element; a private type states its own."""
        return int(self.extension_type["bit_width"]) if self.extension_type else DTYPES[self.type_tag][1]

    @property
    def index_width(self) -> int:
        return 8 if self.index_type else 4

    def page_elements(self) -> int:
        return self.page_size * self.shape[1] * self.shape[2]

    def needed_sizes(self) -> Iterator[tuple[int, int]]:
        """Buffer index and exact size of every buffer but block_table, whose size seq_ptr tells (stage 9)."""
        elements = self.num_pages * self.page_elements()
        yield 0, (elements + 3) // 4 * 3 if self.bits == 6 else (elements * self.bits + 7) // 8
        yield 2, (self.num_seqs + 1) * self.index_width
        scheme = self.quantization or {}
        if "zero_point_buffer_index" not in scheme:  # no affine scales in a buffer
            return
        per_block = scheme["scheme"] == "per_block"
        entries = self.num_pages * self.page_size if per_block else self.shape[scheme["axis"]]
        scales = entries * (self.scale_bytes if per_block else 4)
        shared = scheme["zero_point_buffer_index"] == 3
        yield 3, scales + (4 * entries if shared else 0)
        if scheme["zero_point_buffer_index"] == 4:
            yield 4, 4 * entries

    def _check_sizes(self) -> None:
        for index, need in self.needed_sizes():
            have = self.handles[index].byte_size
            if have != need:
                note = self.notes.tolerate if have > need else self.notes.add
                note("buffer_size", f"buffers[{index}].byte_size", self.base + 85 + _HANDLE.size * index)


def _indices(scales: int, zero_points: int, symmetric: int) -> dict[str, Any]:
    return {"scale_buffer_index": scales, "zero_point_buffer_index": None if symmetric else zero_points}


def _extra_buffers(scheme: dict[str, Any]) -> int:
    zero_points = scheme.get("zero_point_buffer_index")
    return 0 if "scale" in scheme else 1 + (zero_points is not None and zero_points != scheme["scale_buffer_index"])


def _handle_faults(handle: Handle) -> Iterator[tuple[str, str, int]]:
    """Code, field and offset of every rule that a handle breaks (the specification, section 1)."""
    size, alignment, device, sync_mode, memory_class, reserved = handle
    if not _is_power(alignment, 64 if size else 1, NONE):
        yield "alignment", "alignment", 8
    if device not in _MEMORY_CLASSES:
        yield "device", "device_tag", 12
    elif memory_class not in _MEMORY_CLASSES[device]:
        yield "memory_class", "memory_class", 14
    if sync_mode:
        yield "sync_mode", "sync_mode", 13
    if reserved:
        yield "reserved_not_zero", "reserved", 15


def _strangers(handles: Sequence[Handle]) -> Iterator[tuple[int, str, int]]:
    """Index, field and offset of the handles that are not where the first one is."""
    for index, handle in enumerate(handles):
        if handle.device_tag != handles[0].device_tag:
            yield index, "device_tag", 12
        elif handle.memory_class != handles[0].memory_class:
            yield index, "memory_class", 14


# === the index tables, stage 9 (the specification, sections 1 and 3) ========================================


class _Table(NamedTuple):
    """An index table: its values, and where it lies in the input (None where it had to be decompressed)."""

    values: list[int]
    place: int | None
    width: int
    rest: int
    """Bytes behind the last whole entry."""

    def offset(self, index: int) -> int | None:
        return None if self.place is None else self.place + index * self.width


def _read_table(data: bytes, place: int | None, width: int) -> _Table:
    count = len(data) // width
    form = f"<{count}{'Q' if width == 8 else 'I'}"
    return _Table(list(struct.unpack_from(form, data)), place, width, len(data) % width)


def _check_seq_ptr(seq_ptr: _Table, notes: _Notes) -> None:
    values = seq_ptr.values
    if values[0]:
        notes.tolerate("seq_ptr_start", "seq_ptr[0]", seq_ptr.offset(0))
    if values != sorted(values):
        index = next(i for i in range(1, len(values)) if values[i] < values[i - 1])
        notes.tolerate("seq_ptr_order", f"seq_ptr[{index}]", seq_ptr.offset(index))


def _check_block_table(own: _Descriptor, table: _Table, seq_ptr: _Table, notes: _Notes) -> None:
    values, last = table.values, len(seq_ptr.values) - 1
    if seq_ptr.values[last] != len(values):
        notes.tolerate("seq_ptr_end", f"seq_ptr[{last}]", seq_ptr.offset(last))
    if own.handles[1].byte_size % table.width:
        notes.tolerate("buffer_size", "buffers[1].byte_size", own.base + 101)
    if values and max(values) >= own.num_pages:
        index = next(i for i, page in enumerate(values) if page >= own.num_pages)
        notes.tolerate("page_id", f"block_table[{index}]", table.offset(index))


def _check_seq_lens(own: _Descriptor, lens: _Table, seq_ptr: list[int], notes: _Notes) -> None:
    values = lens.values
    if len(values) != own.num_seqs:
        notes.tolerate("seq_lens_count", "seq_lens", lens.place)
        return
    for index, (length, start, end) in enumerate(zip(values, seq_ptr, seq_ptr[1:], strict=False)):
        if length > (end - start) * own.page_size:
            notes.tolerate("seq_lens_range", f"seq_lens[{index}]", lens.offset(index))
            break
    if sum(values) != own.shape[0]:
        notes.tolerate("seq_lens_sum", "seq_lens", lens.place)


def _forced_lens(own: _Descriptor, seq_ptr: list[int]) -> list[int] | None:
    """The token counts where nothing else is possible (the specification, section 3, the first hole)."""
    pages = [end - start for start, end in pairwise(seq_ptr)]
    total = own.shape[0]
    if total == seq_ptr[-1] * own.page_size:  # every page full; no sequence; no page
        return [count * own.page_size for count in pages]
    if total == 0 or sum(count > 0 for count in pages) == 1:
        return [total if count else 0 for count in pages]
    return None


def _judge_tables(own: _Descriptor, seq_ptr: _Table, block_table: _Table, lens: _Table | None) -> list[int] | None:
    """Stage 9; the token counts where they are known."""
    notes, earlier = own.notes, len(own.notes.tolerated)
    _check_seq_ptr(seq_ptr, notes)
    _check_block_table(own, block_table, seq_ptr, notes)
    sound = not notes.faults and len(notes.tolerated) == earlier
    if sound and own.page_size:  # token counts mean something only over sound tables
        if lens is not None:
            _check_seq_lens(own, lens, seq_ptr.values, notes)
        if own.shape[0] > seq_ptr.values[-1] * own.page_size:
            notes.tolerate("token_count", "shape[0]", own.base + 20)
    if lens is not None and lens.rest:
        notes.tolerate("seq_lens_count", "seq_lens", lens.place)
    notes.settle()
    if len(notes.tolerated) > earlier:
        return None
    if lens is not None:
        return lens.values
    return _forced_lens(own, seq_ptr.values) if own.page_size else None


def _assemble(
    form: str, own: _Descriptor, buffers: list[bytes], places: list[int | None], lens: _Table | None
) -> Decoded:
    """The item, once its index tables are judged."""
    for index, need in own.needed_sizes():  # a lenient reader uses the part of a larger buffer that is needed
        buffers[index] = buffers[index][:need]
    pointers = buffers[2]
    seq_ptr = _read_table(pointers, places[2], own.index_width)
    block_table = _read_table(buffers[1], places[1], own.index_width)
    seq_lens = _judge_tables(own, seq_ptr, block_table, lens)
    return Decoded(
        form=form,
        descriptor=own.raw,
        dtype=DTYPES.get(own.type_tag, ("extension", 0))[0],
        type_tag=own.type_tag,
        shape=own.shape,
        page_size=own.page_size,
        num_pages=own.num_pages,
        num_seqs=own.num_seqs,
        kv_role=KV_ROLES[own.kv_role],
        layer_index=None if own.layer_index == NONE else own.layer_index,
        index_type=INDEX_TYPES[own.index_type],
        handles=own.handles,
        quantization=own.quantization,
        statistics=own.statistics,
        extension_type=own.extension_type,
        composite=own.composite,
        buffers=buffers,
        seq_ptr=seq_ptr.values,
        block_table=block_table.values,
        seq_lens=seq_lens,
        violations=own.notes.tolerated,
    )


# === the first bytes, stage 1 (the specification, section 3) ================================================

_FOREIGN = (
    *(b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08"),  # zip
    *(b"\x1f\x8b", b"\x28\xb5\x2f\xfd"),  # gzip, zstd
    *(b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),  # pickle
    *(b"\x93NUMPY", b"\x89PNG\r\n\x1a\n", b"\x7fELF", b"version https://git-lfs"),
)


def _is_foreign(head: bytes) -> bool:
    """Whether the bytes begin like a file of a well-known other kind."""
    text = head.lstrip().lower()
    header_bytes = int.from_bytes(head[:8], "little")
    safetensors = head[8:9] == b"{" and header_bytes < 100 << 20
    return head.startswith(_FOREIGN) or text.startswith((b"<!doctype html", b"<html")) or safetensors


def _is_framed(data: bytes, at: int) -> bool:
    """True for a frame, False for a bare item; anything else, other versions too, is refused."""
    head = data[at : at + 8]
    if head == CONTAINER_MAGIC:
        raise Refused(UNSUPPORTED, "container", "magic", at)
    framed = head == FRAME_MAGIC
    if len(head) < 8 and (FRAME_MAGIC.startswith(head) or CONTAINER_MAGIC.startswith(head)):
        _refuse_cut("magic", len(data))
    if not framed and head[:4] != BARE_MAGIC:
        if _is_foreign(data[at : at + 64]):
            raise Refused(UNSUPPORTED, "foreign", "magic", at)
        raise Refused(FRAME, "magic", "magic", at)
    major_at = at + (8 if framed else 4)
    if data[major_at : major_at + 1] not in (b"", b"\x01"):
        raise Refused(UNSUPPORTED, "version", "version_major", major_at)
    return framed


def _refuse_cut(where: str, end: int) -> NoReturn:
    """The input ends early, at `end`: name what says or would say how long it is."""
    raise Refused(TRUNCATED, "truncated", where, end)


# === the bare form, stages 2, 5, 6 and 9 (the specification, sections 1 and 3) ==============================


def _read_bare(data: bytes, at: int, asked: Asked, *, alone: bool) -> tuple[Decoded, int]:
    """The bare item that begins at `at`, and where it ends."""
    have = len(data) - at
    if have < 10:
        _refuse_cut("descriptor_length", len(data))
    length = int.from_bytes(data[at + 6 : at + 10], "little")
    if length < _HEAD.size:
        raise Refused(FRAME, "descriptor_length", "descriptor_length", at + 6)
    if length > asked.limits["descriptor_bytes"]:
        raise Refused(LIMIT, "descriptor_bytes", "descriptor_length", at + 6)
    if have < length:
        _refuse_cut("descriptor_length", len(data))
    own = _Descriptor(data[at : at + length], at, _Notes(strict=asked.strict))
    _check_limits(own, length, asked.limits)
    places, end = [], at + length
    for index, handle in enumerate(own.handles):
        places.append(end)
        end += handle.byte_size
        if end > len(data):
            _refuse_cut(f"buffers[{index}].byte_size", len(data))
    if alone and end != len(data):
        raise Refused(FRAME, "trailing_bytes", "trailing_bytes", end)
    _check_expected(own, {}, asked.expect)
    buffers = [data[start:stop] for start, stop in zip(places, [*places[1:], end], strict=True)]
    return _assemble("bare", own, buffers, [*places], None), end


def _check_limits(own: _Descriptor, length: int, limits: dict[str, int]) -> None:
    """What the handles declare; `length` is that of the descriptor in the bare form, which has no frame_length."""
    decoded = sum(handle.byte_size for handle in own.handles)
    if decoded > limits["decoded_bytes"]:
        raise Refused(LIMIT, "decoded_bytes", "buffers", own.base + 85)
    if length and length + decoded > limits["frame_bytes"]:
        raise Refused(LIMIT, "frame_bytes", "buffers", own.base + 85)


def _check_expected(own: _Descriptor, metadata: dict[str, Any], expect: dict[str, Any]) -> None:
    """Stage 7: a sound tensor that is not the one that was asked for."""
    found = {
        **metadata,
        "dtype": DTYPES.get(own.type_tag, ("extension", 0))[0],
        "page_size": own.page_size,
        "num_heads": own.shape[1],
        "head_dim": own.shape[2],
        "kv_role": KV_ROLES[own.kv_role],
        "layer_index": None if own.layer_index == NONE else own.layer_index,
        "num_seqs": own.num_seqs,
        "quantization": own.quantization and own.quantization["scheme"],
    }
    if any(found.get(name) != value for name, value in expect.items()):
        raise Refused("MismatchError", "mismatch", "expect")


# === the frame (the specification, section 4) ===============================================================

_PROLOGUE = struct.Struct("<8sBBHIIHHQQ")
_PROLOGUE_FIELDS = {
    "version_major": (8, 9),
    "version_minor": (9, 10),
    "flags": (10, 12),
    "sequence": (12, 16),
    "header_length": (16, 20),
    "section_count": (20, 22),
    "reserved": (22, 24),
    "frame_length": (24, 32),
    "stream_id": (32, 40),
}
_ENTRY = struct.Struct("<BBBBHHQQQQQ")
_ENTRY_FIELDS = {
    "kind": 0,
    "codec": 1,
    "filter": 2,
    "element_width": 3,
    "flags": 4,
    "reserved": 6,
    "raw_offset": 8,
    "raw_length": 16,
    "offset": 24,
    "stored_length": 32,
    "checksum": 40,
}
_DESCRIPTOR, _SEQ_LENS, _METADATA = 1, 2, 3
_BUFFER = range(0x10, 0x20)
_BLOCK_TABLE, _SEQ_PTR = 0x11, 0x12
_KNOWN = frozenset((_DESCRIPTOR, _SEQ_LENS, _METADATA, *_BUFFER))
_ALWAYS_VERIFIED = frozenset((_DESCRIPTOR, _SEQ_LENS, _METADATA, _BLOCK_TABLE, _SEQ_PTR))
_HAS_CHECKSUM, _OPTIONAL = 1, 2
_ALIGNMENT_CAP = 2 << 20


class _Entry(NamedTuple):
    """One row of the section table."""

    kind: int
    codec: int
    filter: int
    element_width: int
    flags: int
    reserved: int
    raw_offset: int
    raw_length: int
    offset: int
    stored_length: int
    checksum: int


_Judgement = Callable[[_Entry, int, int], bool]


def _is_unlawfully_optional(entry: _Entry, _start: int, _end: int) -> bool:
    return bool(entry.flags & _OPTIONAL) and (entry.kind in _KNOWN or not entry.flags & _HAS_CHECKSUM)


def _has_unlawful_width(entry: _Entry, _start: int, _end: int) -> bool:
    return entry.element_width not in ((2, 4, 8, 16) if entry.filter else (0,))


def _is_outside(entry: _Entry, start: int, end: int) -> bool:
    return not start <= entry.offset <= end - entry.stored_length


# Code, field, and what breaks the rule, given an entry, where the header ends and where the frame does; in the order
# of the specification, section 4: of several broken rules the first one names the refusal, of several entries too.
_ENTRY_RULES: tuple[tuple[str, str, _Judgement], ...] = (
    ("section_kind", "kind", lambda e, *_: e.kind in (0x00, 0xFF)),
    ("section_flags", "flags", lambda e, *_: e.flags > 3),
    ("section_flags", "reserved", lambda e, *_: e.reserved != 0),
    ("section_kind", "kind", lambda e, *_: e.kind not in _KNOWN and not e.flags & _OPTIONAL),
    ("section_flags", "flags", _is_unlawfully_optional),
    ("section_flags", "flags", lambda e, *_: e.kind in _ALWAYS_VERIFIED and not e.flags & _HAS_CHECKSUM),
    ("section_codec", "codec", lambda e, *_: e.codec > 1),
    ("section_filter", "filter", lambda e, *_: e.filter > 1),
    ("section_filter", "filter", lambda e, *_: e.codec == 0 and e.filter != 0),
    ("section_filter", "element_width", _has_unlawful_width),
    ("section_cover", "raw_length", lambda e, *_: e.raw_length == 0),
    ("section_codec", "stored_length", lambda e, *_: e.stored_length == 0),
    ("section_cover", "raw_length", lambda e, *_: e.raw_offset + e.raw_length >= 1 << 64),
    ("section_codec", "stored_length", lambda e, *_: e.codec == 0 and e.stored_length != e.raw_length),
    ("section_codec", "stored_length", lambda e, *_: e.codec == 1 and e.stored_length >= e.raw_length),
    ("section_filter", "element_width", lambda e, *_: e.filter == 1 and e.raw_length % e.element_width != 0),
    ("section_codec", "codec", lambda e, *_: e.kind <= _METADATA and e.codec != 0),
    ("section_cover", "raw_offset", lambda e, *_: e.kind <= _METADATA and e.raw_offset != 0),
    ("section_offset", "offset", _is_outside),
)


def _misplaced(entry: _Entry, before: _Entry) -> str | None:
    """The field by which an entry does not stand behind the one before it."""
    if entry.kind < before.kind:
        return "kind"
    if entry.kind == before.kind and (entry.raw_offset <= before.raw_offset or entry.kind <= _METADATA):
        return "raw_offset"
    return None


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _is_padded(length: int, end: int, alignment: int) -> bool:
    """Whether a frame ends at the next multiple of its alignment, or of a greater power of two up to 2 MiB."""
    steps = (1 << exponent for exponent in range(alignment.bit_length() - 1, _ALIGNMENT_CAP.bit_length()))
    return any(length == _round_up(end, step) for step in steps)


class _Frame:
    """The frame that begins at `start`, judged stage by stage (the specification, section 3)."""

    def __init__(self, data: bytes, start: int, asked: Asked) -> None:
        """Stage 2 and the header's checksum."""
        self.data, self.start, self.asked = data, start, asked
        have = len(data) - start
        if have < _PROLOGUE.size:
            _refuse_cut("frame_length", len(data))
        _, _, _, self.flags, self.sequence, header_length, count, reserved, frame_length, self.stream_id = (
            _PROLOGUE.unpack_from(data, start)
        )
        self.section_count, self.header_length, self.frame_length = count, header_length, frame_length
        self.last = self.flags & 1 == 1
        if count > asked.limits["sections"]:
            self._refuse(LIMIT, "sections", "section_count")
        if frame_length > asked.limits["frame_bytes"]:
            self._refuse(LIMIT, "frame_bytes", "frame_length")
        if header_length != 48 + _ENTRY.size * count:
            self._refuse(FRAME, "header_length", "header_length")
        if count < 2 and not (self.last and count == 0):
            self._refuse(FRAME, "header_length", "section_count")
        if frame_length < header_length or frame_length % 64:
            self._refuse(FRAME, "frame_length", "frame_length")
        if have < frame_length:
            _refuse_cut("frame_length", len(data))
        self._verify_header(reserved)

    def _refuse(self, error_class: str, code: str, name: str) -> NoReturn:
        raise Refused(error_class, code, name, self.start + _PROLOGUE_FIELDS[name][0])

    def _refuse_entry(self, error_class: str, code: str, index: int, name: str) -> NoReturn:
        offset = self.start + _PROLOGUE.size + _ENTRY.size * index + _ENTRY_FIELDS[name]
        raise Refused(error_class, code, f"sections[{index}].{name}", offset)

    def _verify_header(self, reserved: int) -> None:
        end = self.start + self.header_length - 8
        stated = int.from_bytes(self.data[end : end + 8], "little")
        if xxh3_64(self.data[self.start : end]) != stated:
            raise Refused(CHECKSUM, "header_checksum", "header_checksum", end)
        if self.flags > 1:
            self._refuse(FRAME, "section_flags", "flags")
        if reserved:
            self._refuse(FRAME, "section_flags", "reserved")

    def _stored(self, entry: _Entry) -> bytes:
        start = self.start + entry.offset
        return self.data[start : start + entry.stored_length]

    def tensor(self, *, alone: bool) -> Decoded:
        """The rest of the stages, in their order."""
        self._read_table()
        for index, entry in enumerate(self.entries):
            if entry.kind in _ALWAYS_VERIFIED:
                self._verify_section(index, entry)
        first = self.entries[0]
        own = _Descriptor(self._stored(first), self.start + first.offset, _Notes(strict=self.asked.strict))
        self._check_kinds(own)
        self._check_cover(own)
        self._check_pages(own)
        self._check_offsets(own)
        _check_limits(own, 0, self.asked.limits)
        metadata = self._read_metadata(own)
        _check_expected(own, metadata or {}, self.asked.expect)
        if alone and self.start + self.frame_length != len(self.data):
            raise Refused(FRAME, "trailing_bytes", "trailing_bytes", self.start + self.frame_length)
        for index, entry in enumerate(self.entries):
            if entry.kind not in _ALWAYS_VERIFIED and entry.flags & _HAS_CHECKSUM:
                self._verify_section(index, entry)
        self.check_padding()
        buffers, places = self._read_buffers(own)
        decoded = _assemble("hrkv", own, buffers, places, self._read_lens(own))
        decoded.metadata, decoded.sequence = metadata, self.sequence
        decoded.last, decoded.stream_id = self.last, self.stream_id
        return decoded

    # --- stages 3 and 4 ---

    def _read_table(self) -> None:
        start = self.start + _PROLOGUE.size
        table = self.data[start : start + _ENTRY.size * self.section_count]
        self.entries = [_Entry._make(values) for values in _ENTRY.iter_unpack(table)]
        for code, name, is_broken in _ENTRY_RULES:
            for index, entry in enumerate(self.entries):
                if is_broken(entry, self.header_length, self.frame_length):
                    self._refuse_entry(FRAME, code, index, name)
        for index in range(1, len(self.entries)):
            misplaced = _misplaced(self.entries[index], self.entries[index - 1])
            if misplaced:
                self._refuse_entry(FRAME, "section_order", index, misplaced)
        if self.entries[0].kind != _DESCRIPTOR:
            self._refuse_entry(FRAME, "section_kind", 0, "kind")
        for index, entry in enumerate(self.entries):
            if entry.checksum and not entry.flags & _HAS_CHECKSUM:
                self._refuse_entry(FRAME, "section_flags", index, "checksum")
        for kind, name in ((_DESCRIPTOR, "descriptor_bytes"), (_METADATA, "metadata_bytes")):
            for index, entry in enumerate(self.entries):
                if entry.kind == kind and entry.raw_length > self.asked.limits[name]:
                    self._refuse_entry(LIMIT, name, index, "raw_length")

    def _verify_section(self, index: int, entry: _Entry) -> None:
        if xxh3_64(self._stored(entry)) != entry.checksum:
            raise Refused(CHECKSUM, "section_checksum", f"sections[{index}]", self.start + entry.offset)

    # --- stage 6 ---

    def _check_kinds(self, own: _Descriptor) -> None:
        for index, entry in enumerate(self.entries):
            if entry.kind in _BUFFER and entry.kind - 0x10 >= len(own.handles):
                self._refuse_entry(FRAME, "section_kind", index, "kind")

    def _check_cover(self, own: _Descriptor) -> None:
        """Chunks lie end to end from 0 to the handle's byte_size."""
        for buffer, handle in enumerate(own.handles):
            end, last = 0, -1
            for index, entry in enumerate(self.entries):
                if entry.kind != 0x10 + buffer:
                    continue
                if entry.raw_offset != end:
                    self._refuse_entry(FRAME, "section_cover", index, "raw_offset")
                end, last = end + entry.raw_length, index
            if end != handle.byte_size and last >= 0:
                self._refuse_entry(FRAME, "section_cover", last, "raw_length")
            if end != handle.byte_size:
                raise Refused(FRAME, "section_cover", f"buffers[{buffer}]", self.start)

    def _check_pages(self, own: _Descriptor) -> None:
        """Each of several chunks of the pool is whole pages; a page that is not whole bytes forbids a second chunk."""
        page, rest = divmod(own.page_elements() * own.bits, 8)
        chunks = [index for index, entry in enumerate(self.entries) if entry.kind == 0x10]
        for index in chunks if len(chunks) > 1 else ():
            if rest or not page or self.entries[index].raw_length % page:
                self._refuse_entry(FRAME, "section_cover", index, "raw_length")

    def _check_offsets(self, own: _Descriptor) -> None:
        """Every payload lies at the smallest lawful offset, and the frame ends as it must."""
        end, before = self.header_length, self.entries[0]
        for index, entry in enumerate(self.entries):
            if entry.kind in _BUFFER and entry.raw_offset == 0:
                lawful = _round_up(end, min(own.handles[entry.kind - 0x10].alignment, _ALIGNMENT_CAP))
            elif entry.kind in _BUFFER and not entry.codec and not before.codec:
                lawful = end
            else:
                lawful = _round_up(end, 8)
            if entry.offset != lawful:
                self._refuse_entry(FRAME, "section_offset", index, "offset")
            end, before = entry.offset + entry.stored_length, entry
        alignments = [min(handle.alignment, _ALIGNMENT_CAP) for handle in own.handles if handle.byte_size]
        if not _is_padded(self.frame_length, end, max([64, *alignments])):
            self._refuse(FRAME, "frame_length", "frame_length")

    def _read_metadata(self, own: _Descriptor) -> dict[str, Any] | None:
        for entry in self.entries:
            if entry.kind == _METADATA:
                offset = self.start + entry.offset
                try:
                    metadata = _parse_metadata(self._stored(entry))
                except (ValueError, RecursionError) as error:
                    raise Refused(FRAME, "metadata", "metadata", offset) from error
                for name in _metadata_faults(metadata, own):
                    raise Refused(FRAME, "metadata", f"metadata.{name}", offset)
                return metadata or None  # an empty object says nothing
        return None

    # --- stage 8 ---

    def check_padding(self) -> None:
        """Everything between and behind the payloads is zero."""
        end = self.start + self.header_length
        extents = [(self.start + entry.offset, entry.stored_length) for entry in self.entries]
        for start, length in [*extents, (self.start + self.frame_length, 0)]:
            gap = self.data[end:start]
            if any(gap):
                raise Refused(FRAME, "padding", "padding", start - len(gap.lstrip(b"\0")))
            end = start + length

    def _read_buffers(self, own: _Descriptor) -> tuple[list[bytes], list[int | None]]:
        """Every buffer's bytes, and where a buffer that lies raw in the input begins."""
        buffers: list[bytes] = []
        places: list[int | None] = []
        for buffer in range(len(own.handles)):
            chunks = [entry for entry in self.entries if entry.kind == 0x10 + buffer]
            raw = bool(chunks) and not any(entry.codec for entry in chunks)
            places.append(self.start + chunks[0].offset if raw else None)
            buffers.append(b"".join(self._decode_chunk(entry) for entry in chunks))
        return buffers, places

    def _decode_chunk(self, entry: _Entry) -> bytes:
        stored = self._stored(entry)
        if not entry.codec:
            return stored
        try:
            content = decompress(stored, entry.raw_length)
        except ZstdError as error:
            where = f"sections[{self.entries.index(entry)}]"
            raise Refused(FRAME, "zstd", where, self.start + entry.offset) from error
        if not entry.filter:
            return content
        shuffled, count = bytearray(len(content)), len(content) // entry.element_width
        for byte in range(entry.element_width):
            shuffled[byte :: entry.element_width] = content[byte * count : (byte + 1) * count]
        return bytes(shuffled)

    # --- stage 9 ---

    def _read_lens(self, own: _Descriptor) -> _Table | None:
        """The token counts."""
        for entry in self.entries:
            if entry.kind == _SEQ_LENS:
                return _read_table(self._stored(entry), self.start + entry.offset, own.index_width)
        return None


# === metadata (the specification, section 4) ================================================================

_MAX_NESTING = 64


def _parse_metadata(raw: bytes) -> dict[str, Any]:
    """The JSON object; ValueError (or RecursionError) if it is not one."""
    value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    _check_json(value, 0)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands twice")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check_json(value: object, depth: int) -> None:
    """Numbers are finite and text is Unicode: no overflowing exponent, no lone surrogate."""
    if isinstance(value, dict | list) and depth >= _MAX_NESTING:
        raise ValueError("nested too deep")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("number too large")
    if isinstance(value, str):
        value.encode("utf-8")
    elif isinstance(value, dict):
        for item in (*value, *value.values()):
            _check_json(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_json(item, depth + 1)


def _are_indices(values: object) -> bool:
    """A list of integers that are not negative; booleans are no integers."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _are_strings(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _metadata_faults(metadata: dict[str, Any], own: _Descriptor) -> Iterator[str]:
    """The names whose value breaks a rule, in the order in which the specification lists them."""
    for name in ("model", "revision", "tokenizer", "rope"):
        if not isinstance(metadata.get(name, ""), str):
            yield name
    for name, are_sound in (("seq_ids", _are_strings), ("first_tokens", _are_indices)):
        if name in metadata and not (are_sound(metadata[name]) and len(metadata[name]) == own.num_seqs):
            yield name
    heads = metadata.get("heads", [0, 1, 1])
    if not (_are_indices(heads) and len(heads) == 3 and heads[0] < heads[1] <= heads[2]):
        yield "heads"
    key_dim = metadata.get("key_dim", 0)
    if not (_are_indices([key_dim]) and key_dim <= own.shape[2]):
        yield "key_dim"
    if metadata.get("content", "kv") not in ("kv", "latent", "opaque"):
        yield "content"


# === entry points ===========================================================================================


def asked_of(strict: bool, limits: dict[str, int] | None, expect: dict[str, Any] | None) -> Asked:
    """A reader's options; limits that are not given are the usual ones."""
    return Asked(strict, {**LIMITS, **(limits or {})}, expect or {})


def decode(
    data: bytes,
    *,
    strict: bool = True,
    limits: dict[str, int] | None = None,
    expect: dict[str, Any] | None = None,
) -> Decoded:
    """Exactly one item, a bare one or a frame of any sequence number; Refused for anything else.

    With `strict=False` the violations that the specification, section 3, marks as reported do not refuse the
    item but stand in its `violations`.
    """
    asked = asked_of(strict, limits, expect)
    if not _is_framed(data, 0):
        return _read_bare(data, 0, asked, alone=True)[0]
    frame = _Frame(data, 0, asked)
    if not frame.section_count:
        _check_closing_length(frame)
        raise Refused(FRAME, "last", "section_count", _PROLOGUE_FIELDS["section_count"][0])
    return frame.tensor(alone=True)


def decode_stream(
    data: bytes,
    *,
    strict: bool = True,
    limits: dict[str, int] | None = None,
    expect: dict[str, Any] | None = None,
) -> list[Decoded]:
    """All items of a concatenation of streams, with the rules of a stream (the specification, section 4)."""
    asked, items = asked_of(strict, limits, expect), []
    at, before, counts = 0, None, [0, 0]  # the frame before while its stream is open; bytes and frames of the stream
    while at < len(data):
        start = at
        if _is_framed(data, at):
            frame = _Frame(data, at, asked)
            _check_succession(frame, before)
            before = None if frame.last else frame
            at += frame.frame_length
            _count(counts, at - start, asked.limits)
            if frame.section_count:
                items.append(frame.tensor(alone=False))
            else:
                _check_closing_length(frame)
                frame.entries = []
                frame.check_padding()
        else:
            if before:
                raise Refused(FRAME, "magic", "magic", at)
            item, at = _read_bare(data, at, asked, alone=False)
            _count(counts, at - start, asked.limits)
            items.append(item)
        counts = counts if before else [0, 0]
    if before or not data:
        raise Refused(TRUNCATED, "stream_truncated", "stream", len(data))
    return items


def _count(counts: list[int], size: int, limits: dict[str, int]) -> None:
    """One more item of a stream, and its bytes."""
    counts[0] += size
    counts[1] += 1
    for name, count in zip(("stream_bytes", "frames"), counts, strict=True):
        if count > limits.get(name, count):
            raise Refused(LIMIT, name, "stream")


def _check_succession(frame: _Frame, before: _Frame | None) -> None:
    if frame.sequence != (before.sequence + 1 if before else 0):
        raise Refused(FRAME, "sequence", "sequence", frame.start + 12)
    if before and frame.stream_id != before.stream_id:
        raise Refused(FRAME, "stream_id", "stream_id", frame.start + 32)


def _check_closing_length(frame: _Frame) -> None:
    if not _is_padded(frame.frame_length, frame.header_length, 64):
        raise Refused(FRAME, "frame_length", "frame_length", frame.start + 24)


# === command line ===========================================================================================


def _plain(value: object) -> object:
    """A value as JSON shows it: wide integers as strings, floats as their bits, bytes as sha256."""
    if isinstance(value, float):
        return struct.pack(">d", value).hex()
    if isinstance(value, int) and not -(1 << 31) <= value < 1 << 32:
        return str(value)
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def values(item: Decoded) -> dict[str, Any]:
    """An item's fields as JSON shows them."""
    return {own.name: _plain(getattr(item, own.name)) for own in fields(item)}


def report(data: bytes, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """The verdict on one item, or with the option "stream" on a whole stream, as the command line prints it."""
    asked = dict(options or {})
    try:
        if asked.pop("stream", False):
            return {"verdict": "accept", "items": [values(item) for item in decode_stream(data, **asked)]}
        return {"verdict": "accept", **values(decode(data, **asked))}
    except Refused as refused:
        names = ("error_class", "code", "where", "offset")
        return {"verdict": "reject", **{name: _plain(getattr(refused, name)) for name in names}}


def main(arguments: Sequence[str]) -> int:
    """Print the verdict on one file; 0 accepted, 1 refused, 2 usage or unreadable file."""
    if len(arguments) not in (1, 2):
        print("usage: refdecode.py FILE [OPTIONS]", file=sys.stderr)
        return 2
    try:
        data = Path(arguments[0]).read_bytes()
        options = json.loads(arguments[1]) if len(arguments) == 2 else {}
    except (OSError, ValueError) as error:
        print(f"refdecode.py: {error}", file=sys.stderr)
        return 2
    verdict = report(data, options)
    print(json.dumps(verdict))
    return 0 if verdict["verdict"] == "accept" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
