"""Frames that break one rule each, sealed by true checksums: class, code and place as the specification says.

`frames.build` makes them apart from the package; `tools/refdecode.py` judges them too.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from frames import (
    BLOCK_TABLE,
    CHECKSUM,
    DESCRIPTOR,
    OPTIONAL,
    PAGE_POOL,
    PROLOGUE,
    SEQ_LENS,
    SEQ_PTR,
    Section,
    added,
    build,
    changed,
    entries_of,
    header_resealed,
    patched,
    resealed,
    with_content,
    without,
    worked_sections,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Built, tensors
from support import (
    BOTH_BROKEN,
    BT,
    POOL,
    disagreement,
    disagreements,
    frame_vector,
    reference_verdict,
    under_a_ceiling,
    verdict,
    worked,
)

import hurray_wire as hw

BOTH = CHECKSUM | OPTIONAL
RAW = build(worked_sections())
POOL_BYTES = POOL.tobytes()


def chunks(*bounds: tuple[int, int], **fields: Any) -> list[Section]:
    """The worked example with its pool in chunks."""
    pieces = [Section(PAGE_POOL, POOL_BYTES[a:b], raw_offset=a, **fields) for a, b in bounds]
    found = worked_sections()
    return [*found[:2], *pieces, *found[3:]]


def unknown(kind: int, flags: int, data: bytes = b"later", **fields: Any) -> list[Section]:
    return added(Section(kind, data, flags=flags, **fields))


FAULTS: dict[str, tuple[bytes, str, str]] = {
    # kinds
    "kind 0": (build(unknown(0x00, BOTH)), "section_kind", "sections[0].kind"),
    "kind FF": (build(unknown(0xFF, BOTH)), "section_kind", "sections[5].kind"),
    **{
        f"unknown kind {kind:#04x}": (build(unknown(kind, CHECKSUM), version=(1, minor)), "section_kind", "")
        for kind in (0x04, 0x0F, 0x20, 0x7F, 0x80, 0xFE)
        for minor in (0, 1, 255)
    },
    "OPTIONAL without CHECKSUM": (build(unknown(0x20, OPTIONAL)), "section_flags", "sections[5].flags"),
    "OPTIONAL on a known kind": (build(changed(PAGE_POOL, flags=BOTH)), "section_flags", "sections[2].flags"),
    "OPTIONAL on a buffer of no scheme": (build(unknown(0x1F, BOTH)), "section_flags", "sections[5].flags"),
    "a buffer that the descriptor does not have": (build(unknown(0x13, CHECKSUM)), "section_kind", "sections[5].kind"),
    "no descriptor": (build(without(DESCRIPTOR)), "section_kind", "sections[0].kind"),
    # order
    "two descriptors": (build(added(worked_sections()[0])), "section_order", "sections[1].raw_offset"),
    "two seq_lens": (build(added(worked_sections()[1])), "section_order", "sections[2].raw_offset"),
    "two seq_ptr": (build(added(worked_sections()[4])), "section_order", "sections[5].raw_offset"),
    "tables exchanged": (build(worked_sections()[:3] + worked_sections()[:2:-1]), "section_order", "sections[4].kind"),
    "chunks exchanged": (build(chunks((256, 640), (0, 256))), "section_order", "sections[3].raw_offset"),
    # flags, reserved
    "flag bit 2": (build(changed(PAGE_POOL, flags=CHECKSUM | 4)), "section_flags", "sections[2].flags"),
    "flag bit 15": (build(changed(PAGE_POOL, flags=CHECKSUM | 0x8000)), "section_flags", "sections[2].flags"),
    "reserved": (build(changed(SEQ_LENS, reserved=1)), "section_flags", "sections[1].reserved"),
    **{
        f"kind {s.kind} without checksum": (build(changed(s.kind, flags=0)), "section_flags", f"sections[{i}].flags")
        for i, s in enumerate(worked_sections())
        if s.kind != PAGE_POOL
    },
    "a checksum that is not announced": (
        *(build(changed(PAGE_POOL, flags=0, checksum=5)), "section_flags", "sections[2].checksum"),
    ),
    "frame flag bit 1": (build(worked_sections(), flags=3), "section_flags", "flags"),
    "frame reserved": (build(worked_sections(), reserved=1), "section_flags", "reserved"),
    # codec, filter
    "codec 2": (build(changed(PAGE_POOL, codec=2)), "section_codec", "sections[2].codec"),
    "raw of another length": (build(changed(PAGE_POOL, raw_length=639)), "section_codec", "sections[2].stored_length"),
    "zstd that is not smaller": (build(changed(PAGE_POOL, codec=1)), "section_codec", "sections[2].stored_length"),
    "zstd descriptor": (build(changed(DESCRIPTOR, codec=1, raw_length=200)), "section_codec", "sections[0].codec"),
    "filter 2": (build(changed(PAGE_POOL, codec=1, filter=2, raw_length=641)), "section_filter", "sections[2].filter"),
    "filter on raw": (build(changed(PAGE_POOL, filter=1, element_width=2)), "section_filter", "sections[2].filter"),
    "width without filter": (build(changed(PAGE_POOL, element_width=2)), "section_filter", "sections[2].element_width"),
    **{
        f"shuffle of width {width}": (
            build(changed(PAGE_POOL, codec=1, filter=1, element_width=width, raw_length=960)),
            "section_filter",
            "sections[2].element_width",
        )
        for width in (0, 1, 3, 5, 32, 255)
    },
    "shuffle of part of an element": (
        build(changed(PAGE_POOL, codec=1, filter=1, element_width=8, raw_length=644)),
        "section_filter",
        "sections[2].element_width",
    ),
    # cover
    "no pool": (build(without(PAGE_POOL)), "section_cover", "buffers[0]"),
    "no seq_ptr": (build(without(SEQ_PTR)), "section_cover", "buffers[2]"),
    "nothing in a section": (build(changed(SEQ_LENS, data=b"")), "section_cover", "sections[1].raw_length"),
    "raw_offset of the descriptor": (
        build(changed(DESCRIPTOR, raw_offset=8)),
        "section_cover",
        "sections[0].raw_offset",
    ),
    "raw_offset that wraps": (build(changed(PAGE_POOL, raw_offset=2**64 - 64)), "section_cover", ""),
    "short pool": (build(chunks((0, 512))), "section_cover", "sections[2].raw_length"),
    "long table": (build(changed(BLOCK_TABLE, data=BT.tobytes() + b"\0")), "section_cover", "sections[3].raw_length"),
    "gap": (build(chunks((0, 256), (384, 640))), "section_cover", "sections[3].raw_offset"),
    "overlap": (build(chunks((0, 384), (256, 640))), "section_cover", "sections[3].raw_offset"),
    "not from 0": (build(chunks((128, 640))), "section_cover", "sections[2].raw_offset"),
    "half a page": (build(chunks((0, 64), (64, 640))), "section_cover", "sections[2].raw_length"),
    # offsets
    "before the header": (build(changed(SEQ_PTR, offset=287)), "section_offset", "sections[4].offset"),
    "behind the frame": (build(changed(SEQ_PTR, offset=1216 - 11)), "section_offset", "sections[4].offset"),
    "offset that wraps": (build(changed(SEQ_PTR, offset=2**64 - 4)), "section_offset", "sections[4].offset"),
    "pool at a multiple of 16": (build(changed(PAGE_POOL, alignment=16)), "section_offset", "sections[2].offset"),
    "pool one step later": (build(changed(PAGE_POOL, alignment=512)), "section_offset", "sections[2].offset"),
    "two chunks in one place": (
        build(chunks((0, 256), (256, 640), offset=512)),
        "section_offset",
        "sections[3].offset",
    ),
    # lengths of the whole
    "frame longer by 2 MiB": (
        *(build(worked_sections(), frame_length=1216 + (2 << 20)) + bytes(2 << 20), "frame_length", "frame_length"),
    ),
    "frame length of no alignment": (build(worked_sections(), frame_length=1217), "frame_length", "frame_length"),
    "frame within its header": (build(worked_sections(), frame_length=256), "frame_length", "frame_length"),
    "header length": (build(worked_sections(), header_length=296), "header_length", "header_length"),
    "one section": (build(worked_sections()[:1]), "header_length", "section_count"),
    "no section and not LAST": (build([], flags=0), "header_length", "section_count"),
    "closing frame": (build([]), "last", "section_count"),
    # padding
    "padding between": (patched(RAW, 421, b"\1"), "padding", "padding"),
    "padding behind": (patched(RAW, 1215, b"\1"), "padding", "padding"),
    "padding before the pool": (patched(RAW, 447, b"\x80"), "padding", "padding"),
    "padding everywhere": (build(worked_sections(), padding=b"\7"), "padding", "padding"),
    "bytes behind": (RAW + bytes(64), "trailing_bytes", "trailing_bytes"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    data, code, where = FAULTS[name]
    found = verdict(data)
    if code:
        assert (found.kind, found.code) == ("FrameError", code)
    if where:
        assert found.where == where
    assert found.offset is not None
    theirs = reference_verdict(data)
    assert (found.kind, found.code) == theirs[:2] or {found.code, theirs.code} in BOTH_BROKEN
    for options in ({"strict": False}, {"verify": False}, {"copy": True}):
        assert verdict(data, **options)[:4] == found[:4]


def test_the_builder_builds_what_is_sound() -> None:
    assert hw.encode(worked()) == RAW
    for sound in (chunks((0, 128), (128, 640)), unknown(0x20, BOTH), unknown(0x04, BOTH), unknown(0xFE, BOTH)):
        for minor in (0, 1):
            data = build(sound, version=(1, minor))
            assert disagreement(verdict(data), reference_verdict(data)) == ""
            assert hw.decode(data) == worked()


def test_an_unknown_section_is_verified_before_it_is_skipped() -> None:
    data = build(unknown(0x20, BOTH, checksum=5))
    for options in ({}, {"verify": False}, {"strict": False}):
        assert verdict(data, **options)[:2] == ("ChecksumError", "section_checksum")


# Against the other decoder.

SAMPLES = (0, 1, 2, 3, 8, 0x10, 0x13, 0x14, 0x20, 0x7F, 0x80, 0xFF)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
@pytest.mark.parametrize(
    "name", ["raw", "raw-chunks", "optional-unknown-section", "uint64-int8-per-block", "raw-metadata"]
)
def test_resealed_changes_of_the_header(name: str, strict: bool) -> None:
    data = frame_vector(name)
    end = PROLOGUE.size + 48 * len(entries_of(data))
    values = SAMPLES if strict else SAMPLES[::3]
    told = ((at, value) for at in range(8, end) for value in {*values, data[at] ^ 1} - {data[at]})
    changes = ((f"{at} = {value:#x}", header_resealed(patched(data, at, bytes([value])))) for at, value in told)
    assert disagreements(changes, strict=strict) == {}


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
@pytest.mark.parametrize("name", ["raw", "uint64-int8-per-block", "raw-metadata"])
def test_resealed_changes_of_the_sections(name: str, strict: bool) -> None:
    data = frame_vector(name)
    small = [entry for entry in entries_of(data) if entry["kind"] != PAGE_POOL]
    places = [at for e in small for at in range(e["offset"], e["offset"] + e["stored_length"])]
    values = SAMPLES if strict else SAMPLES[::3]
    told = ((at, value) for at in places for value in {*values, data[at] ^ 1} - {data[at]})
    changes = ((f"{at} = {value:#x}", resealed(patched(data, at, bytes([value])))) for at, value in told)
    assert disagreements(changes, strict=strict) == {}


@settings(max_examples=150)
@given(built=tensors(with_metadata=True), data=st.data())
def test_resealed_changes_of_any_frame(built: Built, data: st.DataObject) -> None:
    blob = hw.encode(built.tensor, compression=data.draw(st.sampled_from((None, "zstd"))), chunk_bytes=64)
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(8, len(blob) - 1))
        blob = patched(blob, at, bytes([data.draw(st.sampled_from(SAMPLES))]))
    try:
        blob = resealed(blob)
    except struct.error:  # the number of sections was hit
        return
    assert verdict(blob).kind == reference_verdict(blob).kind or verdict(blob).code == "shape"


def test_a_changed_payload_with_true_checksums_is_another_tensor() -> None:
    other = with_content(RAW, PAGE_POOL, lambda content: content[::-1])
    assert hw.decode(other).page_pool.tobytes() == POOL_BYTES[::-1]


# Lies about lengths, under a memory ceiling.


def test_lies_about_lengths_cost_nothing() -> None:
    fields = {"sequence": (12, 4), "header_length": (16, 4), "section_count": (20, 2), "frame_length": (24, 8)}
    for i, _ in enumerate(worked_sections()):
        at = PROLOGUE.size + 48 * i
        fields |= {f"{i}.{name}": (at + 8 + 8 * n, 8) for n, name in enumerate(("raw_offset", "raw_length", "offset"))}
        fields[f"{i}.stored_length"] = (at + 32, 8)
    zstd = hw.encode(worked(page_pool=np.zeros((5, 64, 2, 8), np.float16), seq_lens=[9, 3]), compression="zstd")
    blobs = []
    for lie in (0, 2**31, 2**32 - 1, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1):
        for at, width in fields.values():
            told = (lie % (1 << 8 * width)).to_bytes(width, "little")
            blobs += [patched(RAW, at, told), *map(header_resealed, (patched(RAW, at, told),) if at != 20 else ())]
            blobs += [header_resealed(patched(zstd, at, told))] if at != 20 else []
    wide = {"frame_bytes": 2**70, "decoded_bytes": 2**70, "sections": 2**20}
    options: list[dict[str, Any]] = [{}, {"verify": False}, {"limits": wide}, {"strict": False}]
    verdicts = under_a_ceiling([(blob, dict(option)) for option in options for blob in blobs])
    assert {"TruncatedError", "LimitError", "FrameError", "ChecksumError"} <= {told.split()[0] for told in verdicts}
