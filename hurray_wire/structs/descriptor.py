"""The Hurray descriptor (section 1), every table of it, byte for byte: the only place that describes them.

Magic, reserved bytes and padding are plain bytes here, so that a damaged descriptor still parses and can be shown;
that they hold what they must is said by `rules`, once, for readers and writers alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from struct import Struct as StructOfBytes
from typing import Any, NamedTuple

from construct import (
    Array,
    Bytes,
    Container,
    Float32l,
    Float64l,
    If,
    Int8ul,
    Int16ul,
    Int32sl,
    Int32ul,
    Int64ul,
    Pass,
    Struct,
    Switch,
    this,
)

from hurray_wire import tags
from hurray_wire.structs.fused import Groups, Named, Plan, Record, Span, new_record

BLOCK_PAGED = Struct(
    "page_size" / Int32ul * "tokens per page",
    "num_pages" / Int64ul * "pages in the pool",
    "paged_axis" / Int32ul * "axis 0 is the paged one",
    "num_seqs" / Int32ul * "sequences in the batch",
    "kv_role" / Named(Int8ul, tags.KvRole),
    "layer_index" / Named(Int32ul, tags.LayerIndex) * "layer, or none",
    "block_table_index_type" / Named(Int8ul, tags.IndexType) * "type of block_table and seq_ptr",
    "reserved" / Bytes(6) * "zero",
)

HEAD = Struct(
    "magic" / Bytes(4) * "HRRY",
    "version_major" / Int8ul,
    "version_minor" / Int8ul,
    "descriptor_length" / Int32ul * "bytes, this header included",
    "flags" / Named(Int32ul, tags.Flag),
    "type_tag" / Named(Int8ul, tags.TypeTag),
    "layout_tag" / Named(Int8ul, tags.LayoutTag),
    "rank" / Int32ul,
)

GEOMETRY = Struct(
    "shape" / Array(this.rank, Int64ul) * "total_tokens, num_heads, head_dim",
    "byte_offset" / Int64ul * "zero",
)

HANDLE = Struct(
    "byte_size" / Int64ul * "bytes",
    "alignment" / Int32ul * "bytes",
    "device_tag" / Named(Int8ul, tags.DeviceTag),
    "sync_mode" / Named(Int8ul, tags.SyncMode),
    "memory_class" / Named(Int8ul, tags.MemoryClass),
    "reserved" / Int8ul * "zero",
)

SCHEME_HEAD = Struct(
    "scheme_tag" / Named(Int8ul, tags.SchemeTag),
    "scheme_version" / Int8ul,
    "flags" / Named(Int16ul, tags.SchemeFlag),
)
PER_TENSOR = Struct("scale" / Float32l, "zero_point" / Int32sl, "reserved" / Bytes(4) * "zero")
PER_CHANNEL = Struct(
    "axis" / Int32ul * "1 num_heads, 2 head_dim",
    "scale_buffer_index" / Int32ul,
    "zero_point_buffer_index" / Int32ul * "FFFFFFFF when symmetric",
    "scale_type" / Named(Int8ul, tags.ScaleType),
    "reserved" / Bytes(3) * "zero",
)
PER_BLOCK = Struct(
    "axis" / Int32ul * "zero",
    "block_size" / Int32ul * "page_size",
    "scale_buffer_index" / Int32ul,
    "zero_point_buffer_index" / Int32ul * "FFFFFFFF when symmetric",
    "scale_type" / Named(Int8ul, tags.ScaleType),
    "reserved" / Bytes(3) * "zero",
)
FLOAT_BLOCK = Struct("axis" / Int32ul, "block_size" / Int32ul, "scale_buffer_index" / Int32ul)

PARAMETERS = {
    tags.SchemeTag.PER_TENSOR: PER_TENSOR,
    tags.SchemeTag.PER_CHANNEL: PER_CHANNEL,
    tags.SchemeTag.PER_BLOCK: PER_BLOCK,
    tags.SchemeTag.NF4: FLOAT_BLOCK,
    tags.SchemeTag.MXFP: FLOAT_BLOCK,
}
SCHEME_HEAD_BYTES: int = SCHEME_HEAD.sizeof()
SCHEME_BYTES = {int(tag): SCHEME_HEAD_BYTES + table.sizeof() for tag, table in PARAMETERS.items()}


def _padding(context: Any) -> int:
    """Bytes of `length` behind the scheme that it announces."""
    return int(context.length) - SCHEME_BYTES.get(context.scheme_tag, SCHEME_HEAD_BYTES)


SCHEME_START = Struct("length" / Int32ul * "bytes of the scheme and its padding", *SCHEME_HEAD.subcons)
QUANTIZATION = Struct(
    *SCHEME_START.subcons,
    "_parameters" / Switch(this.scheme_tag, PARAMETERS, default=Pass),
    "padding" / Bytes(_padding) * "ignored, relayed",
)

SHARD = Struct("payload" / Bytes(48) * "forbidden on block-paged")

STATISTICS = Struct(
    "mask" / Named(Int32ul, tags.StatisticsMask),
    "reserved" / Int32ul * "zero",
    "nnz" / Int64ul,
    "sparsity_ratio" / Float64l,
    "value_min" / Float64l,
    "value_max" / Float64l,
    "value_abs_max" / Float64l,
    "value_mean" / Float64l,
    "value_stddev" / Float64l,
    "nm_n" / Int8ul,
    "nm_m" / Int8ul,
    "has_nan" / Int8ul,
    "has_inf" / Int8ul,
    "reserved_tail" / Bytes(4) * "zero",
)

EXTENSION_TYPE = Struct(
    "bit_width" / Int32ul * "bits per element",
    "packing" / Int8ul * "elements per byte, 1 for whole bytes",
    "is_float" / Int8ul,
    "is_signed" / Int8ul,
    "sign_bits" / Int8ul,
    "exponent_bits" / Int8ul,
    "mantissa_bits" / Int8ul,
    "reserved" / Bytes(2) * "zero",
    "exponent_bias" / Int32ul,
    "has_nan" / Int8ul,
    "has_inf" / Int8ul,
    "reserved_tail" / Bytes(2) * "zero",
)

COMPOSITE = Struct("role" / Named(Int8ul, tags.CompositeRole), "reserved" / Bytes(15) * "zero")


def _flagged(flag: tags.Flag, table: Struct) -> Any:
    return If(this.flags & int(flag), table)


FRONT = Struct(*HEAD.subcons, *GEOMETRY.subcons, "layout" / BLOCK_PAGED, "buffer_count" / Int8ul)
TAIL = Struct(
    "buffers" / Array(this.buffer_count, HANDLE),
    "quantization" / _flagged(tags.Flag.QUANTIZATION, QUANTIZATION),
    "shard" / _flagged(tags.Flag.SHARD, SHARD),
    "statistics" / _flagged(tags.Flag.STATISTICS, STATISTICS),
    "extension_type" / _flagged(tags.Flag.EXTENSION_TYPE, EXTENSION_TYPE),
    "composite" / _flagged(tags.Flag.COMPOSITE_MEMBER, COMPOSITE),
)
DESCRIPTOR = Struct(*FRONT.subcons, *TAIL.subcons)

# Plain ints: arithmetic on IntFlag members costs microseconds, and this is the hot path.
_KNOWN_FLAGS = sum(map(int, tags.Flag))
_QUANTIZATION = int(tags.Flag.QUANTIZATION)
_RANK, _LAYOUT_TAG = int(tags.RANK), int(tags.BLOCK_PAGED)

HEAD_PLAN = Plan(HEAD)
FRONT_PLAN = Plan(FRONT, Container(rank=tags.RANK))
HANDLE_PLAN = Plan(HANDLE)
STATISTICS_PLAN = Plan(STATISTICS)
EXTENSION_PLAN = Plan(EXTENSION_TYPE)
COMPOSITE_PLAN = Plan(COMPOSITE)
_SCHEME_PLAN = Plan(SCHEME_START)
_CUT_SCHEME_PLAN = Plan("quantization" / SCHEME_START)  # what can be read of a section that cannot be
_LENGTH_BYTES = _SCHEME_PLAN.packed_size("length")


class Fields(NamedTuple):
    """A descriptor as it stands in the bytes: a record a table, None where a table is absent or out of reach.

    `front` ends with `rank` where the rank or layout leaves the rest unreadable (`buffers` is then None).
    `end` is where the last table ended; `cut` the path of what runs past the bytes that are there;
    `scheme_start` is what could be read of a quantisation section that could not be read whole.
    """

    front: Record
    buffers: tuple[Record, ...] | None = None
    quantization: Record | None = None
    shard: Record | None = None
    statistics: Record | None = None
    extension_type: Record | None = None
    composite: Record | None = None
    end: int = 0
    cut: str = ""
    scheme_start: Record | None = None


@lru_cache(maxsize=64)
def quantization_plan(scheme_tag: int, length: int) -> Plan:
    """The plan of one scheme whose section states `length`."""
    return Plan(QUANTIZATION, Container(length=length, scheme_tag=scheme_tag))


MOST_BUFFERS = 16
"""Handles that are read. No layout has so many: what is behind them is not looked for."""


@lru_cache(maxsize=256)
def _tail_groups(buffer_count: int, flags: int, scheme_tag: int, length: int) -> Groups:
    scheme = Container(length=length, scheme_tag=scheme_tag)
    return Groups(Plan(TAIL, Container(buffer_count=buffer_count, flags=flags, quantization=scheme)))


def scheme_takes(start: Record) -> int:
    """What `length` of a quantisation section must be at least; one shorter than its head holds no tag."""
    if start.length < SCHEME_HEAD_BYTES:
        return SCHEME_HEAD_BYTES
    return SCHEME_BYTES.get(start.scheme_tag, SCHEME_HEAD_BYTES)


def _scheme_offset(front: Record) -> int:
    return FRONT_PLAN.size + HANDLE_PLAN.size * int(front.buffer_count)


def _tail_of(data: bytes, front: Record) -> tuple[Groups, str, Record | None]:
    """The plan of what follows the front; of a quantisation section that cannot be read, its path and its start."""
    flags = front.flags & _KNOWN_FLAGS
    if front.buffer_count > MOST_BUFFERS:
        return _tail_groups(MOST_BUFFERS, 0, 0, 0), "", None
    if not flags & _QUANTIZATION:
        return _tail_groups(front.buffer_count, flags, 0, 0), "", None
    offset = _scheme_offset(front)
    there = data[offset : offset + _SCHEME_PLAN.size]
    start = None
    if len(there) >= _LENGTH_BYTES:
        # A descriptor may end behind a length that leaves no room for a tag: the length is told all the same.
        start = _SCHEME_PLAN.unpack(there.ljust(_SCHEME_PLAN.size, b"\0"))
        if scheme_takes(start) <= start.length <= len(data) - offset - _LENGTH_BYTES:
            return _tail_groups(front.buffer_count, flags, start.scheme_tag, start.length), "", None
    # What follows the scheme cannot be found: only the handles can be read.
    return _tail_groups(front.buffer_count, 0, 0, 0), "quantization.length", start


def _plain(count: int) -> tuple[Callable[[bytes], tuple[Any, ...]], tuple[slice, ...]]:
    """A descriptor of front and handles alone, what nearly all are, in one struct; which values are each handle's."""
    width = len(HANDLE_PLAN.fields)
    codes = [field.code for field in (*FRONT_PLAN.fields, *HANDLE_PLAN.fields * count)]
    starts = range(len(FRONT_PLAN.fields), len(codes), width)
    return StructOfBytes("<" + "".join(codes)).unpack, tuple(slice(start, start + width) for start in starts)


_PLAIN = {FRONT_PLAN.size + HANDLE_PLAN.size * count: _plain(count) for count in range(3, 6)}
_FRONT_VALUES = slice(len(FRONT_PLAN.fields))
_FRONT_RECORD, _HANDLE_RECORD = FRONT_PLAN.record, HANDLE_PLAN.record
_AT_FLAGS, _AT_LAYOUT, _AT_RANK, _AT_COUNT = (
    FRONT_PLAN.names.index(name) for name in ("flags", "layout_tag", "rank", "buffer_count")
)


def parse_descriptor(data: bytes) -> Fields:
    """Read a descriptor's tables as they are; `data` ends where the descriptor does, and holds its head."""
    plain = _PLAIN.get(len(data))
    if plain is not None:
        unpack, places = plain
        values = unpack(data)
        block_paged = values[_AT_RANK] == _RANK and values[_AT_LAYOUT] == _LAYOUT_TAG
        if block_paged and values[_AT_COUNT] == len(places) and not values[_AT_FLAGS] & _KNOWN_FLAGS:
            front = new_record(_FRONT_RECORD, values[_FRONT_VALUES])
            buffers = tuple([new_record(_HANDLE_RECORD, values[place]) for place in places])
            found: Fields = new_record(Fields, (front, buffers, None, None, None, None, None, len(data), "", None))
            return found
    return _parse_any(data)


def _parse_any(data: bytes) -> Fields:
    if len(data) < FRONT_PLAN.size:
        head = HEAD_PLAN.unpack(data)
        block_paged = head.rank == _RANK and head.layout_tag == _LAYOUT_TAG
        return Fields(head, cut="descriptor_length" if block_paged else "")
    front = FRONT_PLAN.unpack(data)
    if front.rank != _RANK or front.layout_tag != _LAYOUT_TAG:
        return Fields(HEAD_PLAN.unpack(data))
    groups, cut, scheme_start = _tail_of(data, front)
    records = groups.unpack(data, FRONT_PLAN.size)
    count = min(front.buffer_count, MOST_BUFFERS)
    if len(records) == count == len(groups.cuts):
        return Fields(front, tuple(records), end=FRONT_PLAN.size + groups.size, cut=cut, scheme_start=scheme_start)
    if len(records) < len(groups.cuts):
        cut = groups.cuts[len(records)][0]
    tables = {name: record for (name, _), record in zip(groups.cuts[count:], records[count:], strict=False)}
    end = FRONT_PLAN.size + sum(packed.size for _, packed in groups.cuts[: len(records)])
    return Fields(front, tuple(records[:count]), **tables, end=end, cut=cut, scheme_start=scheme_start)


def _groups_for(fields: Fields) -> Groups:
    scheme = fields.quantization
    tag, length = (0, 0) if scheme is None else (scheme.scheme_tag, scheme.length)
    return _tail_groups(fields.front.buffer_count, fields.front.flags, tag, length)


def descriptor_bytes(fields: Fields) -> int:
    """How long the bytes of these records are."""
    return FRONT_PLAN.size + _groups_for(fields).size


def build_descriptor(fields: Fields) -> bytes:
    """The bytes of a descriptor whose records are complete: the inverse of `parse_descriptor`."""
    groups = _groups_for(fields)
    tables = (
        *(fields.buffers or ()),
        fields.quantization,
        fields.shard,
        fields.statistics,
        fields.extension_type,
        fields.composite,
    )
    values = [value for table in tables if table is not None for value in table]
    return FRONT_PLAN.pack(*fields.front) + groups.plan.pack(*values)


def _plans_of(data: bytes) -> Iterator[tuple[Plan, int]]:
    """What a descriptor is read by, in order, as far as the bytes go: a plan, and where it begins."""
    if len(data) < HEAD_PLAN.size:
        yield HEAD_PLAN, 0
        return
    head = HEAD_PLAN.unpack(data)
    if head.layout_tag != tags.BLOCK_PAGED or head.rank != tags.RANK:
        yield Plan(Struct(*HEAD.subcons, *GEOMETRY.subcons), Container(rank=min(head.rank, len(data) // 8))), 0
        return
    yield FRONT_PLAN, 0
    if len(data) >= FRONT_PLAN.size:
        front = FRONT_PLAN.unpack(data)
        groups, cut, _ = _tail_of(data, front)
        yield groups.plan, FRONT_PLAN.size
        if cut:
            yield _CUT_SCHEME_PLAN, _scheme_offset(front)


def descriptor_spans(data: bytes, base: int = 0) -> list[Span]:
    """Every field of a descriptor in order, as far as the bytes go; `base` is where `data` begins."""
    return [span for plan, offset in _plans_of(data) for span in plan.spans(data, offset, base)]


def descriptor_offset(data: bytes, path: str) -> int | None:
    """Where a field or a whole table begins in a descriptor's bytes; None where they do not hold it."""
    for plan, offset in _plans_of(data):
        place = plan.places.get(path)
        if place is not None and offset + place.stop <= len(data):
            return offset + place.start
    return None
