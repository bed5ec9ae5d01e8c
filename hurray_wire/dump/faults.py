"""Faults in words: one line for standard error, and what a code means to somebody who has to do something about it."""

from __future__ import annotations

import re

from hurray_wire.dump.accounting import affected
from hurray_wire.dump.model import POOL, Fault, Item
from hurray_wire.dump.words import place, safe

HINTS = {
    "truncated": "the end is missing: an upload or copy that did not finish, or a writer that was stopped",
    "stream_truncated": "frames are missing at the end: the writer was stopped between two of them",
    "header_checksum": "the header was changed after it was written: no length or offset in it can be believed",
    "section_checksum": "these bytes were changed after they were written",
    "sequence": "a frame is missing, repeated or out of place",
    "stream_id": "a frame of another stream stands here: two streams were mixed",
    "magic": "no tensor begins here: bytes were lost or added before this place, or it is something else",
    "padding": "padding is zero, always: bytes were written over, or an offset is wrong",
    "zstd": "the compressed bytes are damaged, or their writer does not keep the rules for chunks",
    "page_id": "an entry points outside the pool",
    "seq_ptr_start": "offsets into block_table begin at 0",
    "seq_ptr_order": "a sequence would end before it begins",
    "seq_ptr_end": "sequences and block_table do not belong together",
    "seq_lens_sum": "token counts and tensor do not belong together",
    "seq_lens_range": "a sequence says it has more tokens than its pages hold",
    "token_count": "there are more tokens than the pages in block_table hold",
    "dtype": "the element type is unknown to this version, or the byte was damaged",
    "layout": "it is a Hurray tensor, but no paged KV cache",
    "version": "it was written by a newer version, or the byte was damaged",
    "dynamic": "a snapshot has no unknown sizes",
    "buffer_size": "shape, layout and buffers do not belong together",
    "quantization_buffer": "scales are buffer 3 and zero points buffer 4 on this layout",
    "metadata": "the buffers can be read all the same",
    "section_offset": "sections lie where the rules put them, nowhere else",
    "section_cover": "the chunks of a buffer leave a gap, overlap, or are too long",
    "container": "this is not a stream but a file with a table of contents",
}
"""What to think of it, for the codes that people meet; the message says what was found and what must be there."""


_SHOWN = 8
_FEW_BITS = 4
"""Checksums of different bytes differ in half of their bits; in so few only where one of them was damaged itself."""


def specific(fault: Fault) -> str:
    """What follows from the very values that were found, or ""."""
    if fault.code == "sequence" and (found := re.fullmatch(r"is (\d+), must be (\d+)", fault.message)):
        given, wanted = map(int, found.groups())
        if given == wanted + 1:
            return f"frame {wanted} is missing"
        return f"frames {wanted} to {given - 1} are missing" if given > wanted else "repeated, or out of order"
    sums = re.search(r"bytes have (0x[0-9a-f]{16}), the frame states (0x[0-9a-f]{16})", fault.message)
    if sums and (int(sums[1], 16) ^ int(sums[2], 16)).bit_count() <= _FEW_BITS:
        return "the stated checksum was changed, not the bytes"
    return ""


def advice(fault: Fault) -> str:
    """What to think of a fault, or ""."""
    return specific(fault) or HINTS.get(fault.code, "")


def told(fault: Fault) -> str:
    """Field, place, found and expected, in one line."""
    where = fault.where or "input"
    at = "" if fault.offset is None else f" at {place(fault.offset)}"
    return safe(f"{where}{at}: {fault.message}")


def pages_hit(item: Item, fault: Fault) -> str:
    """Of a damaged piece of the page pool: which pages, and whose; else ""."""
    index = fault.where.removeprefix("sections[").removesuffix("]")
    if not index.isdecimal() or int(index) >= len(item.sections) or item.sections[int(index)].kind != POOL:
        return ""
    section = item.sections[int(index)]
    hit = affected(item, section.raw_offset, section.raw_offset + section.raw_length)
    if hit is None:
        return ""
    pages = (
        f"page {hit.first_page}" if hit.first_page == hit.last_page else f"pages {hit.first_page} to {hit.last_page}"
    )
    if hit.referenced < 0:
        return f"it holds {pages}"
    if not hit.referenced:
        return f"it holds {pages}, which no sequence has"
    shown = ", ".join(map(str, hit.sequences[:_SHOWN].tolist())) + (", ..." if hit.sequences.size > _SHOWN else "")
    noun = "sequence" if hit.sequences.size == 1 else f"{hit.sequences.size:,} sequences:"
    return f"it holds {pages}, {hit.referenced:,} of them in use by {noun} {shown}"


def line(name: str, owner: str, fault: Fault, more: int) -> str:
    """The line for standard error: file, item, field, offset, found and expected, code, and how many more there are."""
    others = f" (and {more} more)" if more else ""
    follows = f": {specific(fault)}" if specific(fault) else ""
    return f"hurray-dump: {safe(name)}: {owner + ': ' if owner else ''}{told(fault)} [{fault.code}]{follows}{others}"
