"""What an item says of itself, in words: from the fields as they stand in the bytes, sound or not."""

from __future__ import annotations

import json
from typing import Any

from hurray_wire.dump.model import Item
from hurray_wire.dump.words import LAYOUTS, counted, dtype_name, layout_name, safe
from hurray_wire.forms import Form
from hurray_wire.rules import element_bits
from hurray_wire.structs.descriptor import Fields, descriptor_spans
from hurray_wire.tags import (
    BLOCK_PAGED,
    NO_LAYER,
    RANK,
    DeviceTag,
    MemoryClass,
    ScaleType,
    SchemeFlag,
    SchemeTag,
    StatisticsMask,
)

ROLES = {0: "key", 1: "value", 2: "fused"}
_ROLE_WORDS = {0: "keys", 1: "values", 2: "keys and values in one (fused)"}
INDEX_TYPES = {0: "uint32", 1: "uint64"}
_SCHEMES = {1: "per-tensor affine", 2: "per-channel affine", 3: "per-block affine", 4: "NF4", 5: "MXFP"}
_AXES = {0: "tokens", 1: "num_heads", 2: "head_dim"}


def is_block_paged(item: Item) -> bool:
    """Whether the fields behind the head could be read."""
    return item.fields is not None and item.fields.front.layout_tag == BLOCK_PAGED and _has_layout(item.fields)


def _has_layout(fields: Fields) -> bool:
    return hasattr(fields.front, "layout_page_size")


def title(item: Item) -> str:
    """ "frame 0", "tensor 0": what an item is called in every line about it."""
    return f"{'frame' if item.form is Form.HRKV else 'tensor'} {item.index}"


def form(item: Item) -> str:
    """Form and version."""
    major, minor = item.version
    name = "HRKV" if item.form is Form.HRKV else "Hurray stream item (bare)"
    return f"{name} {major}.{minor}"


def dtype(item: Item) -> str:
    """Element type, tag and width."""
    assert item.fields is not None
    tag = item.fields.front.type_tag
    bits = element_bits(item.fields)
    width = f", {counted(bits, 'bit')} an element" if bits else ""
    return f"{dtype_name(tag)} ({tag:#04x}){width}"


def shape(item: Item) -> str:
    """The logical shape, with the names of its axes where it has three."""
    sizes = shape_of(item)
    assert item.fields is not None
    if item.fields.front.rank == RANK and len(sizes) == RANK:
        return f"{counted(sizes[0], 'token')} x {counted(sizes[1], 'head')} x {sizes[2]:,} head_dim"
    most = 8
    told = " x ".join(f"{n:,}" for n in sizes[:most]) + (" x ..." if len(sizes) > most else "")
    return f"rank {item.fields.front.rank:,}" + (f": {told}" if told else "")


def shape_of(item: Item) -> list[int]:
    """The dimensions that can be read."""
    return [span.value for span in descriptor_spans(item.descriptor_bytes) if span.path.startswith("shape[")]


def layout(item: Item) -> str:
    """Layout, role and layer."""
    assert item.fields is not None
    front = item.fields.front
    tag = front.layout_tag
    name = LAYOUTS.get(tag, layout_name(tag))
    if not is_block_paged(item):
        other = "" if tag == BLOCK_PAGED else ", which is not read here"
        return f"{name} ({tag:#04x}){other}"
    role = front.layout_kv_role
    words = f"{_ROLE_WORDS[role]}, kv_role {ROLES[role]}" if role in ROLES else f"kv_role {role}, which is none"
    return f"{name} ({tag:#04x}): {words}, {layer(item)}"


def layer(item: Item) -> str:
    """ "layer 3", "not layer-scoped"."""
    index = None if item.fields is None else layer_of(item.fields)
    return "not layer-scoped" if index is None else f"layer {index}"


def layer_of(fields: Fields) -> int | None:
    """The layer, or None."""
    index: int = fields.front.layout_layer_index
    return None if index == NO_LAYER else index


def role(item: Item) -> str:
    """ "keys", "values" or "fused", shortly."""
    assert item.fields is not None
    return {0: "keys", 1: "values", 2: "fused"}.get(item.fields.front.layout_kv_role, "no role")


def pool(item: Item) -> str:
    """Pages, and what one takes."""
    assert item.fields is not None
    front = item.fields.front
    bits = front.layout_page_size * front.shape_1 * front.shape_2 * element_bits(item.fields)
    each = f"{counted(bits // 8, 'byte')} a page" if bits % 8 == 0 else f"{counted(bits, 'bit')} a page"
    tokens = "token" if front.layout_page_size == 1 else "tokens"
    return f"num_pages {front.layout_num_pages}, page_size {front.layout_page_size} {tokens}, {each}"


def tables(item: Item) -> str:
    """Sequences, entries, index type."""
    assert item.fields is not None
    front = item.fields.front
    index = INDEX_TYPES.get(front.layout_block_table_index_type, "no index type")
    table = item.block_table
    entries = "" if table is None else f", {counted(table.size, 'block_table entry', 'block_table entries')}"
    return f"num_seqs {front.layout_num_seqs}{entries}, {index}"


def quantization(item: Item) -> str:
    """The scheme and its parameters."""
    scheme = item.fields.quantization if item.fields is not None else None
    if scheme is None:
        return "none"
    tag = scheme.scheme_tag
    name = f"{_SCHEMES.get(tag, 'unknown scheme')} ({tag:#04x})"
    if tag == SchemeTag.PER_TENSOR:
        return f"{name}: scale {scheme.scale:.9g}, zero_point {scheme.zero_point}"
    if tag not in _SCHEMES:
        return name
    parts = [f"axis {scheme.axis} ({_AXES.get(scheme.axis, 'no axis')})"]
    if hasattr(scheme, "block_size"):
        parts.append(f"block_size {scheme.block_size}")
    parts.append(f"scales in buffer {scheme.scale_buffer_index}{_scale_type(scheme)}")
    if tag in (SchemeTag.PER_CHANNEL, SchemeTag.PER_BLOCK):
        symmetric = scheme.flags & SchemeFlag.SYMMETRIC
        parts.append("symmetric" if symmetric else f"zero points in buffer {scheme.zero_point_buffer_index}")
    return f"{name}: {', '.join(parts)}"


def _scale_type(scheme: Any) -> str:
    kind = getattr(scheme, "scale_type", None)
    return f" ({ScaleType(kind).name.lower()})" if kind in set(ScaleType) else ""


def extension(item: Item) -> str:
    """A private element type's own description, or ""."""
    table = item.fields.extension_type if item.fields is not None else None
    if table is None:
        return ""
    kind = ("float" if table.is_float else "integer") + (", signed" if table.is_signed else ", unsigned")
    if not table.is_float:
        return f"{counted(table.bit_width, 'bit')} {kind}"
    bits = f"{table.sign_bits} sign, {table.exponent_bits} exponent, {table.mantissa_bits} mantissa bits"
    return f"{counted(table.bit_width, 'bit')} {kind}: {bits}, bias {table.exponent_bias}"


def statistics(item: Item) -> str:
    """The statistics that travel with the tensor, or ""."""
    table = item.fields.statistics if item.fields is not None else None
    if table is None:
        return ""
    parts = {
        StatisticsMask.NNZ: f"nnz {table.nnz}",
        StatisticsMask.SPARSITY_RATIO: f"sparsity {table.sparsity_ratio:.6g}",
        StatisticsMask.RANGE: f"values {table.value_min:.6g} to {table.value_max:.6g}",
        StatisticsMask.MOMENTS: f"mean {table.value_mean:.6g}, stddev {table.value_stddev:.6g}",
        StatisticsMask.NM: f"{table.nm_n}:{table.nm_m} sparse",
        StatisticsMask.NON_FINITE: f"NaN {bool(table.has_nan)}, infinity {bool(table.has_inf)}",
    }
    return "; ".join(text for mask, text in parts.items() if table.mask & mask) or "none computed"


def placement(item: Item) -> str:
    """Where the tensor lived, "" for ordinary host memory."""
    buffers = item.fields.buffers if item.fields is not None else None
    if not buffers or (buffers[0].device_tag, buffers[0].memory_class) == (0, 0):
        return ""
    device, memory = buffers[0].device_tag, buffers[0].memory_class
    name = DeviceTag(device).name.lower() if device in set(DeviceTag) else f"device {device:#04x}"
    kind = MemoryClass(memory).name.lower() if memory in set(MemoryClass) else f"memory class {memory:#04x}"
    return f"{name}, {kind} (where it lived; these bytes are host memory)"


def composite(item: Item) -> str:
    """The role in a composite, or ""."""
    table = item.fields.composite if item.fields is not None else None
    return "" if table is None else {0: "correction", 1: "base"}.get(table.role, f"role {table.role}, which is none")


def metadata(item: Item) -> list[tuple[str, str]]:
    """Names and values, safe to print."""
    pairs = (item.metadata or {}).items()
    return [(safe(name), safe(json.dumps(value, ensure_ascii=False))) for name, value in pairs]
