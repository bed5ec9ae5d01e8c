"""What a case covers, read off its bytes by `refdecode`: tags such as `dtype:int4`, `scheme:per_block`, `code:page_id`.

`make_fixtures.py` puts them into the manifest, beside those that a source states; a test counts that none is missing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import refdecode

_FLAGS = {1: "quantization", 2: "shard", 4: "extension_type", 8: "statistics", 16: "composite_member"}
_PROLOGUE, _ENTRY = struct.Struct("<8sBBHIIHHQQ"), struct.Struct("<BBBBHHQQQQQ")
_KINDS = {1: "descriptor", 2: "seq_lens", 3: "metadata"}
_CODECS, _FILTERS = ("raw", "zstd"), ("none", "shuffle")


def covers(data: bytes, report: dict[str, Any], options: dict[str, Any]) -> Iterator[str]:
    """The tags of one case."""
    if report["verdict"] == "reject":
        yield f"code:{report['code']}"
        yield f"class:{report['error_class']}"
        for name in options.get("limits", {}):
            yield f"limit:{name}"
        return
    items = report.get("items", [report])
    if "items" in report:
        yield f"stream:{len(items)}-items"
    for item in items:
        yield from _item(item)
    if data.startswith(refdecode.FRAME_MAGIC):
        yield from _frames(data)
    elif "items" not in report:
        flags = int.from_bytes(data[10:14], "little")
        yield from (f"flag:{name}" for bit, name in _FLAGS.items() if flags & bit)


def _item(item: dict[str, Any]) -> Iterator[str]:
    yield f"form:{item['form']}"
    tag = item["type_tag"]
    yield f"dtype:{item['dtype'] if tag < 0xF0 else f'extension-{tag:02x}'}"
    yield f"role:{item['kv_role']}"
    yield f"index-type:{item['index_type']}"
    yield "layer:none" if item["layer_index"] is None else "layer:some"
    yield "seq-lens:unknown" if item["seq_lens"] is None else "seq-lens:known"
    for byte_size, alignment, device, _, memory, _ in item["handles"]:
        yield f"device:{device:#04x}"
        yield f"memory-class:{memory:#04x}"
        yield f"alignment:{int(alignment)}"
        if int(byte_size) == 0:
            yield "empty-buffer"
    yield f"buffers:{len(item['handles'])}"
    yield from _tables(item)
    yield from (f"violation:{fault[1]}" for fault in item["violations"])


def _tables(item: dict[str, Any]) -> Iterator[str]:
    scheme = item["quantization"]
    if scheme:
        yield f"scheme:{scheme['scheme']}"
        yield f"storage:{scheme['scheme']}:{item['dtype']}"
        if "zero_point_buffer_index" in scheme:
            symmetric = scheme["zero_point_buffer_index"] is None
            yield f"scheme:{scheme['scheme']}:{'symmetric' if symmetric else 'asymmetric'}"
            yield f"axis:{scheme['scheme']}:{scheme['axis']}"
        if "scale_type" in scheme:
            yield f"scale-type:{scheme['scale_type']}"
    if item["statistics"] is not None:
        yield from (f"statistics:{name}" for name in item["statistics"] or ("none",))
    if item["extension_type"]:
        yield f"extension-bits:{item['extension_type']['bit_width']}"
    if item["composite"]:
        yield f"composite:{item['composite']}"
    yield from (f"metadata:{name}" for name in item["metadata"] or ())


def _frames(data: bytes) -> Iterator[str]:
    """Section kinds, codecs, filters, widths and flags of every frame."""
    at = 0
    while data[at : at + 8] == refdecode.FRAME_MAGIC:
        _, _, minor, flags, _, _, count, _, length, _ = _PROLOGUE.unpack_from(data, at)
        yield "frame-flag:last" if flags & 1 else "frame-flag:not-last"
        yield "minor:newer" if minor else "minor:0"
        if not count:
            yield "closing-frame"
        for i in range(count):
            yield from _section(*_ENTRY.unpack_from(data, at + _PROLOGUE.size + _ENTRY.size * i)[:5])
        at += length


def _section(kind: int, codec: int, filtered: int, width: int, flags: int) -> Iterator[str]:
    buffer = kind - 0x10 if 0x10 <= kind <= 0x1F else None
    named = _KINDS.get(kind, "private" if 0x80 <= kind <= 0xFE else "later")
    yield f"kind:{named if buffer is None else f'buffer-{buffer}'}"
    yield f"codec:{_CODECS[codec]}"
    yield f"filter:{_FILTERS[filtered]}"
    yield f"width:{width}"
    yield "section-flag:checksum" if flags & 1 else "section-flag:no-checksum"
    if flags & 2:
        yield "section-flag:optional"
