"""The attacks that are bytes, numbered as in `ATTACKS.md`: how each is made, what `decode` must say of it. Not a test.

Made by `struct`, xxhash and zstandard alone (`frames`, `support`), never by the package's own encoder.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import zstandard
from frames import (
    BLOCK_TABLE,
    DESCRIPTOR,
    METADATA,
    PAGE_POOL,
    SEQ_LENS,
    SEQ_PTR,
    Section,
    added,
    build,
    changed,
    header_resealed,
    patched,
    section_of,
    with_content,
    without,
    worked_sections,
)
from support import BT, POOL, SP, desc, raw

import hurray_wire as hw

Make = Callable[[], bytes]
NUMBERS = (0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1)
"""What every length field is tried with, besides one less and one more than it should be."""
SMALL = hw.Limits(frame_bytes=1 << 24, decoded_bytes=1 << 20)


@dataclass(frozen=True)
class Attack:
    """One attack: its variants, and every answer that `decode` may give to one."""

    number: int
    name: str
    outcomes: frozenset[str]
    variants: dict[str, Make]
    options: dict[str, Any] = field(default_factory=dict)
    room: int = 8 << 20
    """Bytes that a process may grow by besides three times the input."""

    @property
    def accepted(self) -> bool:
        """Whether it is no attack on this reader: it decodes."""
        return self.outcomes == {"ok"}


ATTACKS: dict[int, Attack] = {}


def attack(number: int, name: str, outcomes: str, variants: dict[str, Make], **more: Any) -> None:
    """Put an attack on the list; outcomes are "Class code" by commas, or "ok"."""
    assert number not in ATTACKS
    ATTACKS[number] = Attack(number, name, frozenset(outcomes.split(", ")), variants, **more)


def tried(true: int, bits: int, make: Callable[[int], bytes]) -> dict[str, Make]:
    """Variants of a field of so many bits whose right value is `true`."""
    values = {n % (1 << bits) for n in (*NUMBERS, true - 1, true + 1)} - {true}
    return {f"{n:#x}": lambda n=n: make(n) for n in sorted(values)}  # type: ignore[misc]


def at(offset: int, width: int, data: bytes) -> Callable[[int], bytes]:
    """The blob with a number of so many bytes somewhere."""
    return lambda n: patched(data, offset, n.to_bytes(width, "little"))


def many(**named: bytes) -> dict[str, Make]:
    """Variants that are made already."""
    return {name.replace("_", " "): lambda d=d: d for name, d in named.items()}  # type: ignore[misc]


BARE, FRAME = raw(), build(worked_sections())
SHORT, LONG = "TruncatedError truncated", "FrameError trailing_bytes"
SIZE, LIMIT = "InvalidDescriptorError buffer_size", "LimitError decoded_bytes"


def entry_at(kind: int, name: str) -> int:
    """Where a field of a section's entry stands in the worked frame."""
    places = {"raw_offset": 8, "raw_length": 16, "offset": 24, "stored_length": 32, "checksum": 40}
    index = [section.kind for section in worked_sections()].index(kind)
    return 40 + 48 * index + places[name]


def in_frame(offset: int, width: int) -> Callable[[int], bytes]:
    """The worked frame with a number of its header another, sealed again."""
    return lambda n: header_resealed(patched(FRAME, offset, n.to_bytes(width, "little")))


def described(**fields: Any) -> bytes:
    """The worked frame with another descriptor."""
    return build(changed(DESCRIPTOR, data=desc(**fields)))


# Lengths.

attack(
    1,
    "a bare descriptor_length of 0, one less, one more, up to 2^32-1",
    "FrameError descriptor_length, InvalidDescriptorError descriptor_length, LimitError descriptor_bytes",
    tried(133, 32, at(6, 4, BARE)),
)
attack(
    2,
    "a handle's byte_size of page_pool, block_table, seq_ptr: 0, one less, one more, up to 2^64-1",
    f"{SIZE}, {SHORT}, {LIMIT}, {LONG}",
    {
        f"{name} {label}": make
        for i, (name, true) in enumerate((("page_pool", 640), ("block_table", 12), ("seq_ptr", 12)))
        for label, make in tried(true, 64, at(85 + 16 * i, 8, BARE)).items()
    },
)
attack(
    3,
    "num_seqs of 0, one less, one more, up to 4 billion",
    SIZE,
    {
        f"{form} {label}": make
        for form, data in (("bare", at(68, 4, BARE)),)
        for label, make in tried(2, 32, data).items()
    }
    | {f"frame {n}": lambda n=n: described(num_seqs=n) for n in (0, 1, 3, 2**31, 2**32 - 1)},
)
attack(
    4,
    "counts whose product wraps 64 bits to the pool's true size",
    f"{SIZE}, UnsupportedError dynamic, InvalidDescriptorError token_count",
    {
        "pages": lambda: desc(num_pages=5 + 2**57) + BARE[133:],
        "heads": lambda: desc(shape=(9, 2 + 2**56, 8)) + BARE[133:],
        "dims": lambda: desc(shape=(9, 2, 8 + 2**58)) + BARE[133:],
        "heads and dims": lambda: desc(shape=(9, 2**63, 2**63)) + BARE[133:],
        "page size and pages": lambda: desc(page_size=2**31, num_pages=2**63) + BARE[133:],
        "tokens": lambda: desc(shape=(2**64 - 2, 2, 8)) + BARE[133:],
        "dynamic": lambda: desc(shape=(9, 2**64 - 1, 8)) + BARE[133:],
        "frame": lambda: described(num_pages=5 + 2**57),
    },
)
PER_TENSOR = struct.pack("<BBHfiI", 1, 1, 0, 0.5, 0, 0)
QUANT = desc(type_tag=0x10, sizes=(320, 12, 12), flags=1, quant=PER_TENSOR)
attack(
    5,
    "a quantisation length of 0, one less, up to 2^32-1; one more is padding, and then the descriptor is too short",
    "InvalidDescriptorError descriptor_length, InvalidDescriptorError quantization_scheme",
    tried(16, 32, at(133, 4, QUANT + bytes(320) + BT.tobytes() + SP.tobytes())),
)
attack(6, "a frame's header_length of anything else", "FrameError header_length", tried(288, 32, in_frame(16, 4)))
attack(
    7,
    "a section_count of anything else, up to 65,535 entries that are not there",
    "FrameError header_length, FrameError frame_length",
    {
        **tried(5, 16, in_frame(20, 2)),
        "with its header_length": lambda: build(worked_sections(), section_count=65535, header_length=48 + 48 * 65535),
    },
)
attack(
    8,
    "a frame_length of 0, one less, one more, up to 2^64-1",
    f"FrameError frame_length, {SHORT}, LimitError frame_bytes",
    {**tried(len(FRAME), 64, in_frame(24, 8)), "a block more": lambda: in_frame(24, 8)(len(FRAME) + 64)},
)


def both_lengths(kind: int) -> Callable[[int], bytes]:
    """The worked frame with both lengths of a raw section another."""
    place = entry_at(kind, "raw_length")

    def make(n: int) -> bytes:
        data = patched(FRAME, place, struct.pack("<Q", n))
        return header_resealed(patched(data, place + 16, struct.pack("<Q", n)))

    return make


attack(
    9,
    "raw_offset, raw_length, offset, stored_length of a section, both lengths at once: 0, one less, one more, 2^64-1",
    "FrameError section_cover, FrameError section_codec, FrameError section_offset, ChecksumError section_checksum",
    {
        f"{kind:#x} both {label}": make
        for kind, true in ((DESCRIPTOR, 133), (PAGE_POOL, 640), (SEQ_PTR, 12))
        for label, make in tried(true, 64, both_lengths(kind)).items()
    }
    | {
        f"{kind:#x} {name} {label}": make
        for kind, true in ((DESCRIPTOR, 133), (PAGE_POOL, 640), (SEQ_PTR, 12))
        for name in ("raw_offset", "raw_length", "offset", "stored_length")
        for label, make in tried(true if "length" in name else 0, 64, in_frame(entry_at(kind, name), 8)).items()
    },
)


def full_table(count: int, size: int = 8) -> bytes:
    """A sound frame whose section table is full: one page a chunk."""
    pages = count - 4
    pool = [Section(PAGE_POOL, bytes(size), raw_offset=size * i) for i in range(pages)]
    head = desc(shape=(9, 1, 1), sizes=(size * pages, 12, 12), num_pages=pages)
    return build(
        [
            Section(DESCRIPTOR, head),
            Section(SEQ_LENS, struct.pack("<2I", 6, 3)),
            *pool,
            Section(BLOCK_TABLE, BT.tobytes()),
            Section(SEQ_PTR, SP.tobytes()),
        ]
    )


attack(
    10,
    "a section table of 65,535 entries, all of them there: sound",
    "ok",
    {"one page a chunk": lambda: full_table(65535)},
    room=24 << 20,
)

# Tables.

attack(
    11,
    "seq_ptr that starts elsewhere, falls, ends elsewhere, wraps",
    "InvalidDescriptorError seq_ptr_start, InvalidDescriptorError seq_ptr_order, InvalidDescriptorError seq_ptr_end",
    {
        f"{width} {label}": lambda values=values, width=width: tables(seq_ptr=values, width=width)  # type: ignore[misc]
        for width in (4, 8)
        for label, values in {
            "start": (1, 2, 3),
            "falls": (0, 4, 3),
            "end": (0, 2, 2),
            "high": (0, 2, 2**31 + 3),
            "wraps": (0, 2 ** (8 * width) - 1, 3),
            "top": (0, 2, 2 ** (8 * width) - 1),
        }.items()
    },
)


def tables(
    *, block_table: Iterable[int] = (0, 1, 0), seq_ptr: Iterable[int] = (0, 2, 3), width: int = 4, lens: Any = (6, 3)
) -> bytes:
    """The worked frame with other tables, of either width."""
    code = "<u4" if width == 4 else "<u8"
    made = [np.array(list(values), np.uint64).astype(code).tobytes() for values in (block_table, seq_ptr, lens)]
    head = desc(sizes=(640, len(made[0]), len(made[1])), index_type=int(width == 8))
    return build(
        [
            Section(DESCRIPTOR, head),
            Section(SEQ_LENS, made[2]),
            Section(PAGE_POOL, POOL.tobytes()),
            Section(BLOCK_TABLE, made[0]),
            Section(SEQ_PTR, made[1]),
        ]
    )


attack(
    12,
    "page ids at, above and far above num_pages, -1 as unsigned",
    "InvalidDescriptorError page_id",
    {
        f"{width} {n:#x}": lambda n=n, width=width: tables(block_table=(0, n, 0), width=width)  # type: ignore[misc]
        for width, numbers in ((4, (5, 2**31, 2**32 - 1)), (8, (5, 2**32, 2**63, 2**64 - 1)))
        for n in numbers
    },
)
attack(
    13,
    "seq_lens beyond a sequence's pages, with another sum, with a sum that wraps 64 bits, one too many",
    "InvalidDescriptorError seq_lens_range, InvalidDescriptorError seq_lens_sum, InvalidDescriptorError seq_lens_count",
    {
        "range": lambda: tables(lens=(9, 0)),
        "sum": lambda: tables(lens=(6, 2)),
        "wraps": lambda: tables(lens=(2**63 + 6, 2**63 + 3), width=8),
        "wraps 32": lambda: tables(lens=(2**31 + 6, 2**31 + 3)),
        "count": lambda: tables(lens=(6, 3, 0)),
    },
)
attack(
    14,
    "tokens without end that cost no bytes: no heads, pages of 2^32-1 slots",
    "ok",
    {
        "2^34 tokens": lambda: (
            desc(shape=(3 * (2**32 - 1), 0, 8), page_size=2**32 - 1, sizes=(0, 12, 12)) + BT.tobytes() + SP.tobytes()
        ),
    },
)

# Metadata.


def told(text: bytes) -> bytes:
    """The worked frame with this for metadata."""
    return build(added(Section(METADATA, text)))


BAD = "FrameError metadata"
attack(
    15,
    "metadata nested deep",
    BAD,
    many(
        arrays=told(b'{"a.b":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        objects=told(b'{"a.b":' + b'{"a":' * 65 + b"1" + b"}" * 66),
        open=told(b"[" * 500_000),
        behind_strings=told(b'{"a.b":["' + b"[" * 99 + b'","\\"",' + b"[" * 65 + b"]" * 65 + b"]}"),
    ),
)
attack(
    16,
    "metadata of more than metadata_bytes",
    "LimitError metadata_bytes",
    many(spaces=told(b"{" + b" " * (1 << 20) + b"}")),
)
attack(
    17,
    "metadata whose keys stand twice, in the object or in one inside it",
    BAD,
    many(
        same=told(b'{"model":"a","model":"b"}'),
        escaped=told(b'{"model":"a","\\u006dodel":"b"}'),
        inner=told(b'{"a.b":{"x":1,"x":2}}'),
        long=told(b'{"' + b"k" * 100_000 + b'":1,"' + b"k" * 100_000 + b'":2}'),
    ),
)
attack(
    18,
    "metadata with NaN, infinities, numbers beyond doubles and integers of thousands of digits",
    BAD,
    many(
        nan=told(b'{"a.b":NaN}'),
        infinity=told(b'{"a.b":-Infinity}'),
        overflow=told(b'{"a.b":1e999}'),
        digits=told(b'{"a.b":' + b"9" * 100_000 + b"}"),
    ),
)
attack(
    19,
    "metadata that is not UTF-8, begins with a mark, escapes half a surrogate pair, or is no object",
    BAD,
    many(
        latin=told(b'{"a.b":"\xff"}'),
        overlong=told(b'{"a.b":"\xc0\xaf"}'),
        surrogate=told(b'{"a.b":"\xed\xa0\x80"}'),
        utf16=told('{"a.b":1}'.encode("utf-16")),
        mark=told(b"\xef\xbb\xbf{}"),
        half=told(b'{"a.b":"\\ud800"}'),
        array=told(b"[]"),
        null=told(b"null"),
        cut=told(b'{"a.b":'),
        zeros=told(bytes(64)),
    ),
)
attack(
    20,
    "metadata whose known names have other types, however long the value",
    BAD,
    many(
        model=told(b'{"model":["' + b"x" * 200_000 + b'"]}'),
        heads=told(b'{"heads":[0,0,0]}'),
        key_dim=told(b'{"key_dim":9}'),
        seq_ids=told(b'{"seq_ids":["a"]}'),
        first_tokens=told(b'{"first_tokens":[true,2]}'),
    ),
)

# Sections.

SHARED = [replace(s, data=BT.tobytes() if s.kind == SEQ_PTR else s.data) for s in worked_sections()]
attack(
    21,
    "sections that overlap, alias each other, or lie in the header",
    "FrameError section_offset",
    {
        "alias": lambda: in_shared(entry_at(SEQ_PTR, "offset"), section_of(FRAME, BLOCK_TABLE)["offset"]),
        "in the header": lambda: build(changed(PAGE_POOL, offset=0)),
        "in the table": lambda: build(changed(SEQ_PTR, offset=40)),
        "overlap": lambda: build(changed(BLOCK_TABLE, offset=1208)),
    },
)


def in_shared(offset: int, value: int) -> bytes:
    """Two tables with the same bytes, whose entries name one place."""
    return header_resealed(patched(build(SHARED), offset, struct.pack("<Q", value)))


attack(
    22,
    "bytes hidden between sections, or behind the last",
    "FrameError padding, FrameError section_offset, FrameError frame_length",
    {
        "padding": lambda: build(worked_sections(), padding=b"\1"),
        "a gap": lambda: build(changed(BLOCK_TABLE, offset=4096)),
        "final padding of 4 MiB": lambda: build(worked_sections(), alignment=4 << 20),
    },
)
attack(
    23,
    "sections twice, out of order, of unknown kinds, without a descriptor",
    "FrameError section_order, FrameError section_kind, FrameError section_flags, FrameError section_cover, "
    "FrameError header_length",
    {
        "descriptor twice": lambda: build([worked_sections()[0], *worked_sections()]),
        "pool twice": lambda: build(sorted([*worked_sections(), worked_sections()[2]], key=lambda s: s.kind)),
        "reversed": lambda: build(worked_sections()[::-1]),
        "no descriptor": lambda: build(without(DESCRIPTOR)),
        "no seq_ptr": lambda: build(without(SEQ_PTR)),
        "no pool": lambda: build(without(PAGE_POOL)),
        "only a descriptor": lambda: build(worked_sections()[:1]),
        "must be known": lambda: build(added(Section(0x40, b"x"))),
        "kind 0": lambda: build(added(Section(0, b"x", flags=3))),
        "optional pool": lambda: build(changed(PAGE_POOL, flags=3)),
        "buffer 9": lambda: build(added(Section(0x19, b"x"))),
    },
)
attack(
    24,
    "sections that nobody knows, marked OPTIONAL: verified and passed over",
    "ok",
    many(
        small=build(added(Section(0x30, b"private", flags=3))),
        large=build(added(Section(0x80, bytes(1 << 20), flags=3))),
        in_front=build(added(Section(0x0F, bytes(4096), flags=3))),
    ),
)

# zstd.


def coded(data: bytes, **fields: Any) -> bytes:
    """The worked frame, its pool these stored bytes."""
    return build(changed(PAGE_POOL, data=data, **({"raw_length": 640, "codec": 1} | fields)))


def zstd(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


ZEROS = bytes(640)
SMALL_FRAME = zstd(ZEROS, level=3)
BOMB = zstd(bytes(64 << 20), level=19)


def bomb(size: int, stored: bytes) -> bytes:
    """A frame that says its pool has `size` bytes, as its chunk may too."""
    head = desc(sizes=(size, 12, 12), num_pages=size // 128)
    sections = [s for s in changed(PAGE_POOL, data=stored, raw_length=size, codec=1) if s.kind != DESCRIPTOR]
    return build([Section(DESCRIPTOR, head), *sections])


attack(
    25,
    "a zstd bomb in a chunk that says it is small, and one over the limit",
    f"FrameError zstd, {LIMIT}",
    {
        "64 MiB in 640 bytes": lambda: coded(BOMB[:600]),
        "64 MiB in 2,560 bytes": lambda: bomb(2560, BOMB),
        "64 MiB over 1 MiB": lambda: bomb(64 << 20, BOMB),
        "2^40": lambda: bomb(1 << 40, BOMB),
    },
    options={"limits": SMALL},
)
attack(
    26,
    "zstd frames chained, skippable frames before, behind or alone, bytes behind",
    "FrameError zstd",
    {
        "chained": lambda: coded(zstd(ZEROS[:320]) + zstd(ZEROS[320:])),
        "twice": lambda: coded(SMALL_FRAME * 2),
        "skippable first": lambda: coded(struct.pack("<II", 0x184D2A50, 4) + b"hide" + SMALL_FRAME),
        "skippable last": lambda: coded(SMALL_FRAME + struct.pack("<II", 0x184D2A5F, 4) + b"hide"),
        "skippable alone": lambda: coded(struct.pack("<II", 0x184D2A50, 4) + b"hide"),
        "behind": lambda: coded(SMALL_FRAME + b"\0"),
        "cut": lambda: coded(SMALL_FRAME[:-1]),
    },
)
attack(
    27,
    "zstd with a dictionary, by id or without one",
    "FrameError zstd",
    {
        "id": lambda: coded(zstd(ZEROS, dict_data=dictionary())),
        "id 0": lambda: coded(patched(SMALL_FRAME, 4, bytes([SMALL_FRAME[4] | 1]))),
    },
)


def dictionary() -> zstandard.ZstdCompressionDict:
    samples: list[Any] = [bytes(str(n) * 40, "ascii") for n in range(400)]
    return zstandard.train_dictionary(1024, samples)


def windowed(log: int, size: int = 640) -> bytes:
    """A zstd frame that asks for a window of 2^log."""
    head = bytes.fromhex("28b52ffd") + bytes([0x40, (log - 10) << 3]) + struct.pack("<H", size - 256)
    return head + (size << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"


attack(
    28,
    "zstd with windows of 16 MiB to 2^41",
    "FrameError zstd",
    {f"2^{log}": lambda log=log: coded(windowed(log)) for log in (24, 27, 31, 41)},  # type: ignore[misc]
)
attack(
    29,
    "zstd whose content size is absent, 0, less or more than what it holds",
    "FrameError zstd",
    {
        "absent": lambda: coded(zstd(ZEROS, write_content_size=False)),
        "less": lambda: coded(zstd(ZEROS[:512])),
        "more": lambda: coded(zstd(ZEROS + ZEROS)),
        "lies": lambda: coded(patched(SMALL_FRAME, 5, struct.pack("<H", 639 - 256))),
        "holds less": lambda: coded(patched(zstd(ZEROS[:512]), 5, struct.pack("<H", 640 - 256))),
        "no magic": lambda: coded(b"\1" * 40),
        "corrupt": lambda: coded(patched(SMALL_FRAME, len(SMALL_FRAME) - 3, b"\xff\xff")),
    },
)
attack(
    30,
    "a chunk that is compressed to no less than it was, shuffled by a width that does not divide it, of codec 2",
    "FrameError section_codec, FrameError section_filter",
    {
        "no less": lambda: coded(bytes(640)),
        "width": lambda: coded(SMALL_FRAME, raw_length=639, filter=1, element_width=2),
        "width 3": lambda: coded(SMALL_FRAME, filter=1, element_width=3),
        "filter on raw": lambda: build(changed(PAGE_POOL, filter=1, element_width=2)),
        "codec 2": lambda: coded(SMALL_FRAME, codec=2),
        "coded descriptor": lambda: build(changed(DESCRIPTOR, data=zstd(desc()), codec=1, raw_length=133)),
    },
)

# Checksums.

SUMS = "FrameError section_flags, ChecksumError section_checksum, ChecksumError header_checksum"
attack(
    31,
    "checksums absent where they are asked for, zero, swapped, of other bytes, left where none is stated",
    SUMS,
    {
        **{
            f"absent on {kind:#x}": lambda kind=kind: build(changed(kind, flags=0))  # type: ignore[misc]
            for kind in (DESCRIPTOR, SEQ_LENS, BLOCK_TABLE, SEQ_PTR)
        },
        **{
            f"zero on {kind:#x}": lambda kind=kind: build(changed(kind, checksum=0))  # type: ignore[misc]
            for kind in (DESCRIPTOR, SEQ_LENS, PAGE_POOL, BLOCK_TABLE, SEQ_PTR)
        },
        "swapped": lambda: swapped(BLOCK_TABLE, SEQ_PTR),
        "left": lambda: build(changed(PAGE_POOL, flags=0, checksum=1)),
        "header": lambda: build(worked_sections(), seal=False),
        "header of another": lambda: patched(FRAME, 32, b"\1"),
        "flags 4": lambda: build(changed(PAGE_POOL, flags=5)),
        "prologue flags": lambda: build(worked_sections(), flags=3),
        "prologue reserved": lambda: build(worked_sections(), reserved=1),
    },
)


def swapped(first: int, second: int) -> bytes:
    """The worked frame with two sections' checksums exchanged."""
    one, two = (FRAME[entry_at(kind, "checksum") :][:8] for kind in (first, second))
    data = patched(patched(FRAME, entry_at(first, "checksum"), two), entry_at(second, "checksum"), one)
    return header_resealed(data)


# Descriptors.

attack(
    32,
    "alignments of 0, 3, 32, 96, 2^32-1, and a lawful 2^31 that the payload does not keep",
    "InvalidDescriptorError alignment, FrameError section_offset",
    {
        **{f"{n}": lambda n=n: desc(align=n) + BARE[133:] for n in (0, 3, 32, 96, 2**32 - 1)},  # type: ignore[misc]
        "2^31 in a frame": lambda: described(align=2**31),
        "4096 in a frame": lambda: described(align=4096),
    },
)
attack(
    33,
    "tags of GPU devices: the bytes are host memory all the same",
    "ok",
    {
        f"{form} {device:#x}": lambda device=device, form=form: (  # type: ignore[misc]
            described(device=device) if form == "frame" else desc(device=device) + BARE[133:]
        )
        for device in (1, 2, 3, 4, 5, 6, 7, 8, 0xF0, 0xFE)
        for form in ("frame", "bare")
    },
)
attack(
    34,
    "devices, memory classes and sync modes that nobody has",
    "InvalidDescriptorError device, InvalidDescriptorError memory_class, InvalidDescriptorError sync_mode, "
    "InvalidDescriptorError reserved_not_zero",
    {
        "device": lambda: desc(device=9) + BARE[133:],
        "device 0xff": lambda: desc(device=255) + BARE[133:],
        "class": lambda: desc(memclass=3) + BARE[133:],
        "class 0xff": lambda: desc(memclass=255) + BARE[133:],
        "sync": lambda: desc(sync=1) + BARE[133:],
        "reserved": lambda: desc(hres=1) + BARE[133:],
    },
)
attack(
    35,
    "a rank of thousands under another layout, 255 buffers, every flag, all bytes 0xff",
    "UnsupportedError layout, InvalidDescriptorError rank, InvalidDescriptorError buffer_count, "
    "InvalidDescriptorError flag_reserved, UnsupportedError version, FrameError descriptor_length",
    {
        "rank": lambda: wide(8000),
        "rank of the layout": lambda: wide(8000, layout=0x0A),
        "rank 2^32-1": lambda: wide(2**32 - 1),
        "buffers": lambda: patched(BARE, 84, b"\xff"),
        "buffers in a frame": lambda: build(changed(DESCRIPTOR, data=patched(desc(), 84, b"\xff"))),
        "flags": lambda: patched(BARE, 10, b"\xff\xff\xff\xff"),
        "ones": lambda: b"HRRY" + b"\xff" * 200,
        "zeros": lambda: b"HRRY\1" + bytes(5) + b"\x85" + bytes(200),
    },
)


def wide(rank: int, layout: int = 1, size: int = 65000) -> bytes:
    """A descriptor of a large rank, padded."""
    data = patched(desc(), 15, bytes([layout]) + struct.pack("<I", rank)) + bytes(size - 133)
    return patched(data, 6, struct.pack("<I", size))


def scheme(fields: bytes, **more: Any) -> bytes:
    told: dict[str, Any] = {"type_tag": 0x10, "sizes": (320, 12, 12), "flags": 1, "quant": fields} | more
    return desc(**told) + bytes(320) + BT.tobytes() + SP.tobytes()


attack(
    36,
    "schemes that are unknown, of another version, with scales of zero, NaN or infinity, buffers that are not there",
    "UnsupportedError scheme, InvalidDescriptorError quantization_scale, "
    "InvalidDescriptorError quantization_zero_point, InvalidDescriptorError buffer_count, "
    "InvalidDescriptorError quantization_axis, InvalidDescriptorError quantization_block",
    {
        "unknown": lambda: scheme(struct.pack("<BBHfiI", 9, 1, 0, 0.5, 0, 0)),
        "version": lambda: scheme(struct.pack("<BBHfiI", 1, 2, 0, 0.5, 0, 0)),
        "zero": lambda: scheme(struct.pack("<BBHfiI", 1, 1, 0, 0.0, 0, 0)),
        "nan": lambda: scheme(struct.pack("<BBHfiI", 1, 1, 0, float("nan"), 0, 0)),
        "infinity": lambda: scheme(struct.pack("<BBHfiI", 1, 1, 0, float("inf"), 0, 0)),
        "zero point": lambda: scheme(struct.pack("<BBHfiI", 1, 1, 0, 0.5, 200, 0)),
        "buffer": lambda: scheme(struct.pack("<BBHIIIBBH", 2, 1, 1, 1, 9, 2**32 - 1, 3, 0, 0)),
        "axis": lambda: scheme(struct.pack("<BBHIII", 5, 1, 0, 2**31, 16, 3), sizes=(320, 12, 12, 8)),
        "block": lambda: scheme(struct.pack("<BBHIII", 5, 1, 0, 0, 2**31, 3), sizes=(320, 12, 12, 8)),
    },
)

# What is no blob.

attack(
    37,
    "pickles of every protocol: refused unread",
    "UnsupportedError foreign",
    {f"protocol {n}": lambda n=n: pickled(n) for n in range(6)},  # type: ignore[misc]
)


def pickled(protocol: int) -> bytes:
    """What would call `os.system` where it were unpickled."""
    head = b"" if protocol < 2 else b"\x80" + bytes([protocol])
    return head + b"cos\nsystem\n(S'true'\ntR."


attack(
    38,
    "Git LFS pointers, HTML pages, archives, other formats, the reference's container",
    "UnsupportedError foreign, UnsupportedError container",
    many(
        lfs=b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        html=b"<!DOCTYPE html><html></html>",
        html_later=b"\n <HTML><body>502",
        zip=b"PK\3\4" + bytes(60),
        gzip=b"\x1f\x8b\x08\x00" + bytes(60),
        zstd=zstd(bytes(99)),
        npy=np.lib.format.magic(1, 0) + bytes(60),
        safetensors=struct.pack("<Q", 60) + json.dumps({"a": 1}).encode() + bytes(60),
        png=b"\x89PNG\r\n\x1a\n" + bytes(60),
        elf=b"\x7fELF" + bytes(60),
        container=b"HRRYFILE" + bytes(60),
    ),
)
attack(
    39,
    "zeros, noise, nothing, half a magic, a text",
    f"FrameError magic, {SHORT}",
    many(
        zeros=bytes(64),
        noise=np.random.default_rng(3).bytes(4096),
        nothing=b"",
        half=FRAME[:5],
        text=b"GET / HTTP/1.1\r\n\r\n",
        carriage=FRAME.replace(b"\r\n", b"\n"),
    ),
)
attack(
    40,
    "another version, whatever follows",
    "UnsupportedError version",
    {
        f"{form} {n}": lambda data=data, place=place, n=n: patched(data, place, bytes([n]) + b"\xff" * 50)  # type: ignore[misc]
        for form, data, place in (("bare", BARE, 4), ("frame", FRAME, 8))
        for n in (0, 2, 255)
    },
)
attack(
    41,
    "a flip of one bit in the payload, the tables, the descriptor, the header",
    "ChecksumError section_checksum, ChecksumError header_checksum, FrameError padding, FrameError header_length, "
    "FrameError frame_length, LimitError frame_bytes",
    {
        f"byte {at}": lambda place=at: patched(FRAME, place, bytes([FRAME[place] ^ 16]))  # type: ignore[misc]
        for at in (*range(10, 60, 7), 300, 440, *range(576, len(FRAME), 97))
    },
)


CUTS = (1, 9, 10, 13, 17, 19, 20, 21, 84, 85, 101, 132)


def cut_to(size: int) -> bytes:
    """The first bytes of a descriptor that says it has no more, as far as there is room to say so."""
    return patched(desc()[:size], 6, struct.pack("<I", size))[:size] if size >= 10 else desc()[:size]


attack(
    42,
    "descriptors of which half is another's: wrong inside a sound envelope",
    "InvalidDescriptorError kv_role, InvalidDescriptorError index_type, InvalidDescriptorError page_size, "
    "InvalidDescriptorError paged_axis, InvalidDescriptorError byte_offset, InvalidDescriptorError reserved_not_zero, "
    "FrameError magic, InvalidDescriptorError descriptor_length, UnsupportedError dtype",
    {
        "role": lambda: described(kv_role=3),
        "index type": lambda: described(index_type=2),
        "page size": lambda: described(page_size=0),
        "axis": lambda: described(paged_axis=1),
        "byte offset": lambda: described(byte_offset=8),
        "reserved": lambda: described(reserved=b"\0\0\0\0\0\1"),
        "type": lambda: described(type_tag=0x7F),
        "magic": lambda: with_content(FRAME, DESCRIPTOR, lambda d: b"HRRX" + d[4:]),
        "longer": lambda: build(changed(DESCRIPTOR, data=desc() + b"\0")),
        **{f"{n} bytes, and says so": lambda n=n: build(changed(DESCRIPTOR, data=cut_to(n))) for n in CUTS},  # type: ignore[misc]
    },
)
