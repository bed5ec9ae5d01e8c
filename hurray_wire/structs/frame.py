"""The HRKV frame's own tables (section 4): prologue, section table, header checksum."""

from __future__ import annotations

from construct import Bytes, Int8ul, Int16ul, Int32ul, Int64ul, Struct

from hurray_wire import tags
from hurray_wire.structs.fused import Named, Plan

PROLOGUE = Struct(
    "magic" / Bytes(8) * "89 'HRKV' 0D 0A 1A",
    "version_major" / Int8ul,
    "version_minor" / Int8ul,
    "flags" / Named(Int16ul, tags.FrameFlag),
    "sequence" / Int32ul * "position in the stream",
    "header_length" / Int32ul * "48 + 48 x section_count",
    "section_count" / Int16ul,
    "reserved" / Int16ul * "zero",
    "frame_length" / Int64ul * "bytes, final padding included",
    "stream_id" / Int64ul * "zero in a single blob",
)

SECTION = Struct(
    "kind" / Named(Int8ul, tags.SectionKind),
    "codec" / Named(Int8ul, tags.Codec),
    "filter" / Named(Int8ul, tags.Filter),
    "element_width" / Int8ul * "bytes per element for the shuffle",
    "flags" / Named(Int16ul, tags.SectionFlag),
    "reserved" / Int16ul * "zero",
    "raw_offset" / Int64ul * "bytes into the whole buffer",
    "raw_length" / Int64ul * "bytes after decoding",
    "offset" / Int64ul * "bytes from the frame's first",
    "stored_length" / Int64ul * "bytes as stored",
    "checksum" / Int64ul * "XXH3-64 of the stored bytes",
)

CHECKSUM = Struct("header_checksum" / Int64ul * "XXH3-64 of every byte before it")

PROLOGUE_PLAN = Plan(PROLOGUE)
SECTION_PLAN = Plan(SECTION)
CHECKSUM_PLAN = Plan(CHECKSUM)
