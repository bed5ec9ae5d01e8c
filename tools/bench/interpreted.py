"""The same frame read by construct's own interpreter: what declared structs cost where nothing is derived from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

import hurray_wire as hw
from hurray_wire import indices
from hurray_wire.structs.descriptor import DESCRIPTOR
from hurray_wire.structs.frame import CHECKSUM, PROLOGUE, SECTION


def decode(blob: Any) -> tuple[Any, ...]:
    """Header, descriptor, checksums of all but the pool, views, tables checked: `decode(blob, verify=False)` of a raw
    frame whose pool has one chunk or more, with seq_lens; without its errors, padding and limits."""
    data = np.frombuffer(blob, np.uint8)
    prologue = PROLOGUE.parse(data[: PROLOGUE.sizeof()].tobytes())
    header = data[: prologue.header_length].tobytes()
    body = len(header) - CHECKSUM.sizeof()
    assert xxhash.xxh3_64_intdigest(header[:body]) == CHECKSUM.parse(header[body:]).header_checksum
    at, size = PROLOGUE.sizeof(), SECTION.sizeof()
    places: dict[int, Any] = {}
    for row in range(prologue.section_count):
        entry = SECTION.parse(header[at + size * row : at + size * (row + 1)])
        places.setdefault(entry.kind, entry)
    small = {kind: _verified(data, entry) for kind, entry in places.items() if kind != _POOL}
    descriptor = DESCRIPTOR.parse(small[_DESCRIPTOR])
    layout = descriptor.layout
    shape = layout.num_pages, layout.page_size, *descriptor.shape[1:]
    pool = np.ndarray(shape, np.float16, data, places[_POOL].offset)
    table, ptr, lens = (np.frombuffer(small[kind], np.uint32) for kind in (_BLOCK_TABLE, _SEQ_PTR, _SEQ_LENS))
    assert indices.sound(table, ptr, lens, layout.num_pages, layout.page_size, descriptor.shape[0])
    return descriptor, pool, table, ptr, lens


_DESCRIPTOR, _SEQ_LENS, _POOL, _BLOCK_TABLE, _SEQ_PTR = 0x01, 0x02, 0x10, 0x11, 0x12


def _verified(data: Any, entry: Any) -> bytes:
    stored: bytes = data[entry.offset : entry.offset + entry.stored_length].tobytes()
    assert xxhash.xxh3_64_intdigest(stored) == entry.checksum
    return stored


def agrees(blob: Any) -> bool:
    """Whether it reads what `hw.decode` reads."""
    tensor = hw.decode(blob)
    _, pool, table, ptr, lens = decode(blob)
    pairs = zip((pool, table, ptr, lens), tensor.parts[1:5], strict=True)
    return all(np.array_equal(a.view(np.uint8), np.asarray(b).view(np.uint8)) for a, b in pairs)
