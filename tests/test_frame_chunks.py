"""Compressed chunks in frames: what a reader demands of a zstd frame, and knows before a byte is decompressed."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import zstandard
from frames import (
    BLOCK_TABLE,
    DESCRIPTOR,
    PAGE_POOL,
    SCALES,
    SEQ_PTR,
    Section,
    build,
    changed,
    worked_sections,
)
from support import POOL, desc, disagreement, reference_verdict, under_a_ceiling, verdict, worked

import hurray_wire as hw

ZEROS = np.zeros((5, 4, 2, 8), np.float16)
RAW = ZEROS.tobytes()
COMPRESS = zstandard.ZstdCompressor(write_content_size=True)
SOUND = COMPRESS.compress(RAW)
NO_SIZE = zstandard.ZstdCompressor(write_content_size=False).compress(RAW)
SKIPPABLE = bytes.fromhex("502a4d18") + (4).to_bytes(4, "little") + b"skip"


def header(flags: int, *rest: bytes) -> bytes:
    return bytes.fromhex("28b52ffd") + bytes([flags]) + b"".join(rest)


EMPTY_BLOCK = bytes([1, 0, 0])


def framed(stored: bytes, raw_length: int = 640, **fields: Any) -> bytes:
    return build(changed(PAGE_POOL, data=stored, codec=1, raw_length=raw_length, **fields))


ZSTD: dict[str, bytes] = {
    "no content size": NO_SIZE,
    "content size too small": COMPRESS.compress(RAW[:-1]),
    "content size too large": COMPRESS.compress(RAW + b"\0"),
    "a second frame": SOUND + COMPRESS.compress(b""),
    "the same frame twice": COMPRESS.compress(RAW[:320]) * 2,
    "a byte behind": SOUND + b"\0",
    "a byte less": SOUND[:-1],
    "a skippable frame before": SKIPPABLE + SOUND,
    "a skippable frame behind": SOUND + SKIPPABLE,
    "a skippable frame alone": SKIPPABLE,
    "no zstd at all": b"nothing of the kind",
    "one byte": b"\x28",
    "only a magic": bytes.fromhex("28b52ffd"),
    "a dictionary id": header(0x60 | 1, b"\7", (640 - 256).to_bytes(2, "little"), EMPTY_BLOCK),
    "a dictionary id of 0": header(0x60 | 1, b"\0", (640 - 256).to_bytes(2, "little"), EMPTY_BLOCK),
    "exabytes in 13 bytes": header(0xE0, (2**60).to_bytes(8, "little")),
    "a reserved bit": SOUND[:4] + bytes([SOUND[4] | 0x08]) + SOUND[5:],
    "a window of 16 MiB": header(0x40, bytes([14 << 3]), (640 - 256).to_bytes(2, "little"), EMPTY_BLOCK),
    "a reserved block": header(0x60, (640 - 256).to_bytes(2, "little"), bytes([0x07, 0, 0])),
    "an empty block": header(0x60, (640 - 256).to_bytes(2, "little"), EMPTY_BLOCK),
    "a block beyond the window": header(
        0x60, (640 - 256).to_bytes(2, "little"), (1 | 0 | 2000 << 3).to_bytes(3, "little")
    ),
}


def test_a_sound_chunk() -> None:
    run_of_zeros = header(0x60, (640 - 256).to_bytes(2, "little"), (3 | 640 << 3).to_bytes(3, "little"), b"\0")
    for data in (framed(SOUND), framed(run_of_zeros)):
        assert hw.decode(data) == worked(page_pool=ZEROS)
        assert reference_verdict(data).kind == "ok"
    checked = zstandard.ZstdCompressor(write_checksum=True).compress(RAW)
    assert hw.decode(framed(checked)) == worked(page_pool=ZEROS)
    broken = checked[:-1] + bytes([checked[-1] ^ 1])
    assert verdict(framed(broken))[:2] == ("FrameError", "zstd")


@pytest.mark.parametrize("name", ZSTD)
def test_zstd_faults(name: str) -> None:
    stored = ZSTD[name]
    data = framed(stored)
    for options in ({}, {"verify": False}, {"strict": False}):
        assert verdict(data, **options)[:3] == ("FrameError", "zstd", "sections[2]")
    assert reference_verdict(data)[:2] == ("FrameError", "zstd")
    start = 448
    offset = verdict(data).offset
    assert offset is not None
    assert start <= offset <= start + len(stored)


def test_checksums_come_before_decompression() -> None:
    data = build(changed(PAGE_POOL, data=b"no zstd", codec=1, raw_length=640, checksum=1))
    assert verdict(data)[:2] == ("ChecksumError", "section_checksum")
    assert verdict(data, verify=False)[:2] == ("FrameError", "zstd")


def test_bombs_cost_nothing() -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(64 << 20))
    blobs = [framed(bomb), framed(bomb, raw_length=64 << 20), *map(framed, ZSTD.values())]
    told = under_a_ceiling([(blob, options) for blob in blobs for options in ({}, {"verify": False})])
    assert all(word.startswith("FrameError") for word in told)
    sizes = (64 << 20, 12, 12)
    large = [replace_descriptor(s, sizes) for s in changed(PAGE_POOL, data=bomb, codec=1, raw_length=64 << 20)]
    tracemalloc.start()
    try:
        found = verdict(build(large), limits=hw.Limits(decoded_bytes=1 << 20))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found[:2] == ("LimitError", "decoded_bytes")
    assert peak < 1 << 20
    assert hw.decode(build(large)).page_pool.nbytes == 64 << 20


def replace_descriptor(section: Section, sizes: tuple[int, ...]) -> Section:
    if section.kind != DESCRIPTOR:
        return section
    return Section(DESCRIPTOR, desc(sizes=sizes, num_pages=sizes[0] // 128))


def test_chunks_of_either_kind_mix() -> None:
    pool = np.concatenate([ZEROS[:2], POOL[2:4], ZEROS[4:]])
    data = pool.tobytes()
    stored = COMPRESS.compress(data[:256])
    last = COMPRESS.compress(data[512:])
    sections = worked_sections()
    sections[2:3] = [
        Section(PAGE_POOL, stored, codec=1, raw_length=256),
        Section(PAGE_POOL, data[256:384], raw_offset=256),
        Section(PAGE_POOL, data[384:512], raw_offset=384),
        Section(PAGE_POOL, last, codec=1, raw_offset=512, raw_length=128),
    ]
    blob = build(sections)
    assert disagreement(verdict(blob), reference_verdict(blob)) == ""
    assert hw.decode(blob) == worked(page_pool=pool)
    assert hw.decode(blob, threads=3) == hw.decode(blob)
    with pytest.raises(hw.UnsupportedError):
        hw.decode(blob, copy=False)


def test_tables_and_scales_may_be_compressed() -> None:
    """Our writer never does; the wire allows it."""
    table, ptr = np.zeros(200, "<u4"), np.array([0, 100, 200], "<u4")
    scales = np.ones((5, 4), "<f4")
    quant = hw.PerBlockAffine.symmetric(0, 4, 3, "float32").encode()
    told = desc(type_tag=0x10, flags=1, quant=quant, shape=(800, 2, 8), sizes=(320, 800, 12, 80))
    sections = [
        Section(DESCRIPTOR, told),
        Section(PAGE_POOL, bytes(320)),
        Section(BLOCK_TABLE, COMPRESS.compress(table.tobytes()[:400]), codec=1, raw_length=400),
        Section(BLOCK_TABLE, COMPRESS.compress(table.tobytes()[400:]), codec=1, raw_length=400, raw_offset=400),
        Section(SEQ_PTR, ptr.tobytes()),
        Section(SCALES, COMPRESS.compress(scales.tobytes()), codec=1, raw_length=80),
    ]
    blob = build(sections)
    assert disagreement(verdict(blob), reference_verdict(blob)) == ""
    t = hw.decode(blob)
    assert t.scales is not None
    assert (t.block_table.tolist(), t.seq_ptr.tolist()) == (table.tolist(), ptr.tolist())
    assert np.array_equal(t.scales, scales)
    table[150] = 5
    sections[3] = Section(
        BLOCK_TABLE, COMPRESS.compress(table.tobytes()[400:]), codec=1, raw_length=400, raw_offset=400
    )
    found = verdict(build(sections))
    assert found[:3] == ("InvalidDescriptorError", "page_id", "block_table[150]")


@pytest.mark.parametrize("width", [2, 4, 8, 16])
def test_the_shuffle_is_the_specifications(width: int) -> None:
    """Byte j of element i is stored at j * n + i."""
    n = 640 // width
    raw = POOL.tobytes()
    shuffled = bytes(raw[i * width + j] for j in range(width) for i in range(n))
    stored = zstandard.ZstdCompressor(level=19).compress(shuffled)
    data = framed(stored, filter=1, element_width=width)
    assert hw.decode(data) == worked()
    assert disagreement(verdict(data), reference_verdict(data)) == ""
