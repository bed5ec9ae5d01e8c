"""The bare form: a descriptor, then each buffer's bytes, nothing between and nothing behind (sections 1 to 3).

`bare_parts` and `read_bare` mirror each other. The form has no checksums, no lengths up front and no token counts;
what it cannot say is refused on writing and unknown on reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hurray_wire.arrays import Bytes, as_bytes
from hurray_wire.assembly import Parts, of_buffers
from hurray_wire.descriptor import TensorDescriptor, decode_descriptor, stated_length
from hurray_wire.errors import Code, FrameError, TruncatedError, UnsupportedError
from hurray_wire.memory import placed, private
from hurray_wire.options import DecodeOptions, EncodeOptions, check_expected
from hurray_wire.payload import Payload
from hurray_wire.structs.descriptor import FRONT_PLAN

_STEP_BYTES = 4 << 20
"""Pages that must be copied on the way out are copied so many bytes at a time."""


def bare_parts(payload: Payload, options: EncodeOptions) -> list[Bytes]:
    """The item's bytes in order, the pool's own memory where it lies as on the wire.

    Raises:
        UnsupportedError: `bare_form`, for what only a frame can carry.
    """
    refuse_frame_only(payload, options)
    parts = [as_bytes(payload.descriptor.encode())]
    step = max(1, _STEP_BYTES // max(1, payload.pages.page_bytes))
    if payload.pages.whole():
        step = max(1, payload.pages.num_pages)
    for start in range(0, payload.pages.num_pages, step):
        parts += payload.pages.views(start, min(start + step, payload.pages.num_pages))
    return parts + [table for table in payload.tables if table.size]


def refuse_frame_only(payload: Payload, options: EncodeOptions) -> None:
    """Compression and metadata have no place in the bare form."""
    for name, asked in (("compression", options.compression), ("metadata", payload.metadata)):
        if asked:
            message = f'the bare form has no place for {name}: use framing="hrkv"'
            raise UnsupportedError(message, code=Code.BARE_FORM, where=name)


def bare_size(payload: Payload, options: EncodeOptions) -> int:
    """Bytes of the whole item."""
    refuse_frame_only(payload, options)
    return payload.descriptor.encoded_length + payload.pages.nbytes + sum(table.size for table in payload.tables)


def write_bare(payload: Payload, options: EncodeOptions, out: Bytes) -> None:
    """The item into `out`, of exactly `bare_size`: one copy of the pool, straight into place."""
    refuse_frame_only(payload, options)
    at = payload.descriptor.encoded_length
    out[:at] = as_bytes(payload.descriptor.encode())
    payload.pages.copy(0, payload.pages.num_pages, out[at : at + payload.pages.nbytes])
    at += payload.pages.nbytes
    for table in payload.tables:
        out[at : at + table.size] = table
        at += table.size


def read_bare_descriptor(data: Bytes, offset: int, options: DecodeOptions) -> tuple[TensorDescriptor, int]:
    """Stages 1, 2 and 5: the descriptor at `offset`, and its length."""
    view = memoryview(data)[offset:]
    length = stated_length(view, offset)
    options.limits.check("descriptor_bytes", length, "descriptor_length", offset + 6)
    if len(view) < length:
        raise TruncatedError(needed=length, available=len(view), where="descriptor_length", offset=offset + len(view))
    return decode_descriptor(bytes(view[:length]), base=offset, strict=options.strict), length


class BareItem(NamedTuple):
    """An item after its first seven stages: the descriptor, each buffer's bytes and where they begin, and the end."""

    descriptor: TensorDescriptor
    buffers: list[Bytes]
    starts: list[int]
    end: int

    def offsets(self) -> dict[str, int]:
        """Where the descriptor and the tables begin, for errors."""
        return bare_offsets(self.starts[0] - self.descriptor.encoded_length, self.starts)


def bare_offsets(descriptor: int, starts: Sequence[int]) -> dict[str, int]:
    """Where the descriptor and the tables of an item begin."""
    return {"descriptor": descriptor, "block_table": starts[1], "seq_ptr": starts[2]}


def read_bare_item(data: Bytes, offset: int, options: DecodeOptions, *, alone: bool) -> BareItem:
    """Stages 1 to 7 of the item at `offset`; `alone`: nothing may follow it."""
    descriptor, length = read_bare_descriptor(data, offset, options)
    sizes = [handle.byte_size for handle in descriptor.buffers]
    total = check_bare_sizes(sizes, length, offset, options)
    available = data.size - offset
    if available < total:
        raise TruncatedError(
            needed=total, available=available, where=_cut_buffer(sizes, length, available), offset=data.size
        )
    if alone and available > total:
        message = f"{available - total} bytes follow the last buffer"
        raise FrameError(message, code=Code.TRAILING_BYTES, where="trailing_bytes", offset=offset + total)
    check_expected(descriptor, None, options.expect)
    starts, at = [], offset + length
    for size in sizes:
        starts.append(at)
        at += size
    buffers = [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    return BareItem(descriptor, buffers, starts, at)


def read_bare(data: Bytes, offset: int, options: DecodeOptions, *, alone: bool) -> tuple[Parts, int]:
    """One item at `offset`, and where the next one begins; `alone`: nothing may follow it."""
    item = read_bare_item(data, offset, options, alone=alone)
    count = len(item.buffers)
    pool, *scales = (placed(item.buffers[i], item.descriptor, i, options) for i in range(count) if i not in (1, 2))
    tables = private(item.buffers[1]), private(item.buffers[2])
    parts = of_buffers(item.descriptor, pool, tables, scales, None, None, strict=options.strict, offsets=item.offsets)
    return parts, item.end


def check_bare_sizes(sizes: list[int], length: int, offset: int, options: DecodeOptions) -> int:
    """Bytes of the whole item, within the limits."""
    options.limits.check("decoded_bytes", sum(sizes), "buffers", offset + FRONT_PLAN.size)
    options.limits.check("frame_bytes", length + sum(sizes), "buffers", offset + FRONT_PLAN.size)
    return length + sum(sizes)


def _cut_buffer(sizes: list[int], length: int, available: int) -> str:
    for i, size in enumerate(sizes):
        length += size
        if available < length:
            return f"buffers[{i}].byte_size"
    return "buffers"
