"""`--json`: one document with all that the other views show, as `schema/hurray-dump.schema.json` describes it.

Counts and offsets are integers of any size; checksums and stream ids are hex strings, since many readers of JSON keep
no more than 53 bits; what is not known is null.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hurray_wire.dump import describe
from hurray_wire.dump.accounting import references, usage
from hurray_wire.dump.faults import advice
from hurray_wire.dump.model import Fault, Item
from hurray_wire.dump.scan import StreamEnd
from hurray_wire.dump.sequences import sequence_rows
from hurray_wire.dump.words import LAYOUTS, dtype_name
from hurray_wire.forms import Form
from hurray_wire.inspection import Section, Span
from hurray_wire.rules import element_bits
from hurray_wire.structs.descriptor import Fields
from hurray_wire.tags import Codec

if TYPE_CHECKING:
    from hurray_wire.dump.difference import Difference, Field, Side
    from hurray_wire.dump.statistics import BufferStatistics

FORMAT = 1
"""Version of the document; a greater one may add members and values of enumerations, never change their meaning."""


def document(member: str, facts: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole document: `files`, or the pairs of `diff`."""
    from hurray_wire.version import __version__

    return {"hurray_dump": FORMAT, "version": __version__, member: facts}


def fault_facts(fault: Fault) -> dict[str, Any]:
    """A fault."""
    return {
        "code": fault.code,
        "where": fault.where,
        "offset": fault.offset,
        "message": fault.message,
        "hint": advice(fault) or None,
    }


def item_facts(item: Item) -> dict[str, Any]:
    """An item: all that the summary says."""
    prologue = item.prologue
    return {
        "index": item.index,
        "form": "hrkv" if item.form is Form.HRKV else "bare",
        "version": list(item.version),
        "offset": item.offset,
        "total_bytes": item.total,
        "sequence": None if prologue is None else prologue.sequence,
        "stream_id": None if prologue is None else f"{prologue.stream_id:#x}",
        "last": item.last if item.head is not None else None,
        "closing": item.closing,
        "sound": not item.faults,
        "payload_verified": item.verified,
        "descriptor": descriptor_facts(item),
        "metadata": item.metadata,
        "sections": [_section(s, str(state)) for s, state in zip(item.sections, item.states, strict=True)],
        "num_entries": None if item.block_table is None else int(item.block_table.size),
        "pages": _pages(item),
        "notes": item.notes,
        "faults": [fault_facts(fault) for fault in item.faults],
    }


def _section(section: Section, state: str) -> dict[str, Any]:
    codec = Codec(section.codec).name.lower() if section.codec in set(Codec) else section.codec
    return {
        "kind": section.name,
        "codec": codec,
        "shuffle": section.element_width if section.filter else 0,
        "offset": section.offset,
        "raw_offset": section.raw_offset,
        "raw_length": section.raw_length,
        "stored_length": section.stored_length,
        "checksum": f"{section.checksum:#018x}" if section.flags & 1 else None,
        "state": state,
    }


def descriptor_facts(item: Item) -> dict[str, Any] | None:
    """The descriptor's fields as they stand; what follows an unknown layout is left out."""
    fields = item.fields
    if fields is None:
        return None
    front = fields.front
    facts: dict[str, Any] = {
        "length": front.descriptor_length,
        "dtype": dtype_name(front.type_tag),
        "type_tag": front.type_tag,
        "bit_width": element_bits(fields) or None,
        "layout": LAYOUTS.get(front.layout_tag),
        "layout_tag": front.layout_tag,
        "rank": front.rank,
        "shape": describe.shape_of(item),
    }
    return facts | _layout(fields) if describe.is_block_paged(item) else facts


def _layout(fields: Fields) -> dict[str, Any]:
    front = fields.front
    index = describe.INDEX_TYPES.get(front.layout_block_table_index_type)
    return {
        "page_size": front.layout_page_size,
        "num_pages": front.layout_num_pages,
        "paged_axis": front.layout_paged_axis,
        "num_seqs": front.layout_num_seqs,
        "kv_role": describe.ROLES.get(front.layout_kv_role),
        "layer_index": describe.layer_of(fields),
        "block_table_index_type": index,
        "buffers": [_record(handle) for handle in fields.buffers or ()],
        "quantization": _record(fields.quantization),
        "statistics": _record(fields.statistics),
        "extension_type": _record(fields.extension_type),
        "composite": _record(fields.composite),
    }


def _record(record: Any) -> dict[str, Any] | None:
    """A table's own fields by name; bytes as hex."""
    if record is None:
        return None
    return {name: plain(value) for name, value in zip(record._fields, record, strict=True)}


def plain(value: Any) -> Any:
    """What JSON can say: bytes as hex, numbers that it does not have as strings."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _pages(item: Item) -> dict[str, Any] | None:
    found = references(item)
    return None if found is None else usage(item, found)._asdict()


# What the options add.


def span_facts(span: Span) -> dict[str, Any]:
    """One field of `--hex`."""
    return {
        "offset": span.offset,
        "length": span.length,
        "path": span.path,
        "value": plain(span.value),
        "meaning": span.meaning,
    }


def sequence_facts(item: Item) -> list[dict[str, Any]]:
    """`--seqs`: every sequence with its page ids."""
    table = item.block_table
    return [
        {
            "index": row.seq,
            "id": row.name or None,
            "tokens": row.tokens,
            "pages": [] if table is None or row.start > row.stop else table[row.start : row.stop].tolist(),
            "shared_prefix_pages": row.shared_pages,
            "shared_prefix_with": row.shared_with if row.shared_pages else None,
        }
        for row in sequence_rows(item)
    ]


def map_facts(item: Item) -> list[list[int]] | None:
    """`--map`: page id and number of references, for every page that is named."""
    found = references(item)
    return (
        None if found is None else [list(pair) for pair in zip(found.ids.tolist(), found.counts.tolist(), strict=True)]
    )


def statistics_facts(buffers: list[BufferStatistics]) -> list[dict[str, Any]]:
    """`--stats`."""
    return [
        {
            "buffer": buffer.name,
            "type": buffer.dtype.name if buffer.dtype is not None else None,
            "elements": buffer.count,
            "least": plain(buffer.low),
            "greatest": plain(buffer.high),
            "zeros": buffer.zeros if buffer.seen else None,
            "nan": buffer.nan,
            "infinite": buffer.infinite,
            "entropy": None if buffer.entropy is None else round(buffer.entropy, 4),
            "lost_bytes": buffer.lost,
        }
        for buffer in buffers
    ]


def stream_facts(stream: StreamEnd) -> dict[str, Any]:
    """What a stream came to."""
    framed = stream.form is Form.HRKV
    return {
        "form": "hrkv" if framed else "bare",
        "stream_id": f"{stream.stream_id:#x}" if framed else None,
        "first_item": stream.first,
        "items": stream.frames,
        "tensors": stream.tensors,
        "stored_bytes": stream.stored_bytes,
        "raw_bytes": stream.raw_bytes,
        "complete": stream.complete,
    }


# Differences.


def difference_facts(a: Side, b: Side, found: Difference) -> dict[str, Any]:
    """One pair of `--diff`."""
    token = found.token
    return {
        "a": a.item.index,
        "b": b.item.index,
        "same": found.none,
        "fields": [_field(field) for field in (*found.fields, *found.tables)],
        "pages": found.pages,
        "pages_note": found.page_words,
        "first_page": None if found.page is None else found.page._asdict(),
        "sequences": found.sequences,
        "sequences_note": found.token_words,
        "first_token": None
        if token is None
        else {"sequence": token.sequence, "token": token.token, "element": token.element._asdict()},
    }


def lone_facts(side: str, item: Item) -> dict[str, Any]:
    """A tensor that stands in one of the two files only."""
    return {"a": item.index if side == "A" else None, "b": item.index if side == "B" else None, "same": False}


def _field(field: Field) -> dict[str, Any]:
    return {"path": field.path, "a": plain(field.first), "b": plain(field.second)}
