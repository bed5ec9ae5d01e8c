"""The stages in their order: first bytes, versions, descriptor, token counts; which error wins."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from frames import (
    BLOCK_TABLE,
    DESCRIPTOR,
    PAGE_POOL,
    SEQ_LENS,
    SEQ_PTR,
    Section,
    build,
    changed,
    worked_sections,
)
from support import POOL, desc, raw, reference_verdict, verdict, worked

import hurray_wire as hw

POOL_BYTES = POOL.tobytes()


@pytest.mark.parametrize("alignment", [128, 256, 4096, 2 << 20])
def test_a_stream_may_pad_to_a_greater_alignment(alignment: int) -> None:
    data = build(worked_sections(), alignment=alignment)
    assert len(data) % alignment == 0
    assert hw.decode(data) == worked()
    assert reference_verdict(data).kind == "ok"
    longer = build(worked_sections(), frame_length=len(data) + (2 << 20)) + bytes(len(data) - 1216 + (2 << 20))
    assert verdict(longer)[:2] == ("FrameError", "frame_length")


def test_a_frame_is_as_long_as_some_alignment_makes_it() -> None:
    """The smallest multiple of 64 behind 1164 bytes is 1216, of 128 and 256 it is 1280; none ends at 1344."""
    for length in range(1216, 4096, 64):
        data = build(worked_sections(), frame_length=length) + bytes(length - 1216)
        lawful = any(length == -(-1164 // (64 << n)) * (64 << n) for n in range(16))
        assert (verdict(data).kind, lawful) in (("ok", True), ("FrameError", False))
    for length in range(64, 1024, 64):
        closing = build([], frame_length=length) + bytes(length - 64)
        found = verdict(closing)
        assert found.code == ("last" if length & (length - 1) == 0 else "frame_length")


# Versions.


def test_versions() -> None:
    for major in (0, 2, 255):
        for data in (build(worked_sections(), version=(major, 0)), build(worked_sections(), version=(major, 0))[:9]):
            assert verdict(data)[:4] == ("UnsupportedError", "version", "version_major", 8)
    for minor in (1, 7, 255):
        assert hw.decode(build(worked_sections(), version=(1, minor))) == worked()
        longer = changed(DESCRIPTOR, data=desc(minor=minor, tail=bytes(5)))
        assert hw.decode(build(longer, version=(1, minor))) == worked()
        assert verdict(build(longer[1:2] + longer[:1] + longer[2:], version=(1, minor))).kind == "FrameError"
    assert verdict(build(changed(DESCRIPTOR, data=desc(tail=bytes(5)))))[:2] == (
        *("InvalidDescriptorError", "descriptor_length"),
    )


def test_the_descriptor_section_is_the_descriptor() -> None:
    for data, kind, code in (
        (desc() + b"\0", "InvalidDescriptorError", "descriptor_length"),
        (desc()[:-1], "InvalidDescriptorError", "descriptor_length"),
        (desc()[:9], "InvalidDescriptorError", "descriptor_length"),
        (b"HRRX" + desc()[4:], "FrameError", "magic"),
        (b"HRRYFILE" + bytes(64), "UnsupportedError", "version"),
        (desc(major=2), "UnsupportedError", "version"),
        (desc(layout_tag=9), "UnsupportedError", "layout"),
        (desc(type_tag=0xFF), "UnsupportedError", "dtype"),
        (desc(shape=(2**64 - 1, 2, 8)), "UnsupportedError", "dynamic"),
        (desc(kv_role=3), "InvalidDescriptorError", "kv_role"),
    ):
        blob = build(changed(DESCRIPTOR, data=data))
        assert verdict(blob)[:2] == (kind, code)
        assert reference_verdict(blob)[:2] == (kind, code)


# Token counts.


@pytest.mark.parametrize(
    ("lens", "codes"),
    [
        (struct.pack("<2I", 5, 3), ["seq_lens_sum"]),
        (struct.pack("<2I", 9, 0), ["seq_lens_range"]),
        (struct.pack("<2I", 2**32 - 1, 10), ["seq_lens_range", "seq_lens_sum"]),
        (struct.pack("<1I", 9), ["seq_lens_count"]),
        (struct.pack("<3I", 6, 3, 0), ["seq_lens_count"]),
        (struct.pack("<2Q", 6, 3), ["seq_lens_count"]),
        *((struct.pack("<2I", 6, 3) + bytes(n), ["seq_lens_count"]) for n in (1, 2, 3)),
        (b"\6", ["seq_lens_count"]),
    ],
)
def test_seq_lens(lens: bytes, codes: list[str]) -> None:
    data = build(changed(SEQ_LENS, data=lens))
    found = verdict(data)
    assert (found.kind, found.code, set(found.codes)) == ("InvalidDescriptorError", codes[0], set(codes))
    assert reference_verdict(data)[:2] == found[:2]
    assert found.offset is not None
    lenient = hw.decode(data, strict=False)
    assert {str(v.code) for v in lenient.violations} == set(codes)
    assert lenient.seq_lens is None


def test_seq_lens_where_there_is_no_sequence() -> None:
    sections = [
        Section(DESCRIPTOR, desc(shape=(0, 2, 8), num_seqs=0, sizes=(640, 0, 4))),
        Section(PAGE_POOL, POOL_BYTES),
        Section(SEQ_PTR, bytes(4)),
    ]
    assert hw.decode(build(sections)).num_seqs == 0
    stray = [sections[0], Section(SEQ_LENS, bytes(4)), *sections[1:]]
    assert verdict(build(stray))[:2] == ("InvalidDescriptorError", "seq_lens_count")


def test_the_first_of_stage_9_leads() -> None:
    """seq_ptr, then block_table, then seq_lens, then totals."""
    sections = changed(DESCRIPTOR, data=desc(shape=(99, 2, 8)))
    assert verdict(build(sections)).code == "seq_lens_sum"
    assert set(verdict(build(sections)).codes) == {"seq_lens_sum", "token_count"}
    sections[3] = replace(sections[3], data=np.array([0, 9, 0], "<u4").tobytes())
    assert verdict(build(sections)).code == "page_id"
    sections[4] = replace(sections[4], data=np.array([1, 2, 3], "<u4").tobytes())
    assert verdict(build(sections)).code == "seq_ptr_start"


# Which error wins. Each entry breaks a rule of its stage; with all the later ones broken too, the earliest is told.

BAD_LENS = struct.pack("<2I", 8, 1)
BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("version", {"version": (2, 0)}),
    ("header_length", {"header_length": 5}),
    ("header_checksum", {"seal": False}),
    ("section_flags", {"sections": {PAGE_POOL: {"flags": 0xFF01}}}),
    ("section_checksum", {"sections": {SEQ_LENS: {"checksum": 1}}}),
    ("kv_role", {"sections": {DESCRIPTOR: {"data": desc(kv_role=9)}}}),
    ("section_offset", {"sections": {PAGE_POOL: {"alignment": 512}}}),
    ("mismatch", {"expect": {"dtype": "int8"}}),
    ("section_checksum", {"sections": {PAGE_POOL: {"checksum": 1}}}),
    ("padding", {"padding": b"\1"}),
    ("page_id", {"sections": {BLOCK_TABLE: {"data": np.array([0, 9, 0], "<u4").tobytes()}}}),
    ("seq_lens_range", {"sections": {SEQ_LENS: {"data": BAD_LENS}, SEQ_PTR: {"data": struct.pack("<3I", 0, 1, 3)}}}),
]


@pytest.mark.parametrize("first", range(len(BROKEN)))
def test_the_earliest_stage_is_told(first: int) -> None:
    fields: dict[int, dict[str, Any]] = {}
    frame: dict[str, Any] = {}
    expect = None
    for _, broken in reversed(BROKEN[first:]):
        for kind, told in broken.get("sections", {}).items():
            fields[kind] = fields.get(kind, {}) | told
        expect = broken.get("expect", expect)
        frame |= {name: value for name, value in broken.items() if name not in ("sections", "expect")}
    sections = [replace(s, **fields.get(s.kind, {})) for s in worked_sections()]
    data = build(sections, **frame)
    assert verdict(data, expect=expect).code == BROKEN[first][0]
    if first < 7 or expect is None:
        assert reference_verdict(data).code == BROKEN[first][0]


def test_an_unsupported_thing_wins_over_the_violations_beside_it() -> None:
    wrong: dict[str, Any] = {"kv_role": 9, "reserved": b"\1" * 6, "align": 3}
    quant = struct.pack("<BBHfi4x", 9, 1, 0, 1.0, 0)
    for code, fields in (
        ("dtype", {"type_tag": 0xFF}),
        ("layout", {"layout_tag": 3}),
        ("dynamic", {"shape": (9, 2**64 - 1, 8)}),
        ("scheme", {"flags": 1, "quant": quant}),
        ("scheme", {"flags": 1, "quant": struct.pack("<BBHfi4x", 1, 2, 0, 1.0, 0)}),
    ):
        for data in (raw(**wrong, **fields), build(changed(DESCRIPTOR, data=desc(**wrong, **fields)))):
            assert verdict(data)[:2] == ("UnsupportedError", code)
            assert verdict(data, strict=False)[:2] == ("UnsupportedError", code)


# First bytes.


CUT, FOREIGN, OTHER = ("TruncatedError", "truncated"), ("UnsupportedError", "foreign"), ("FrameError", "magic")
FIRST_BYTES: list[tuple[bytes, tuple[str, str]]] = [
    *((start, CUT) for start in (b"", b"H", b"HRRY", b"HRRYF", b"HRRYFIL", b"\x89", b"\x89HRKV\r\n")),
    (b"HRRYFILE", ("UnsupportedError", "container")),
    *((start + bytes(60), FOREIGN) for start in (b"PK\3\4", b"PK\5\6", b"\x1f\x8b", b"\x93NUMPY\1\0")),
    (b"\x28\xb5\x2f\xfd" + bytes(60), FOREIGN),
    *((b"\x80" + bytes([protocol, 0x95]) + bytes(9), FOREIGN) for protocol in range(2, 6)),
    *((start, FOREIGN) for start in (b"\x89PNG\r\n\x1a\n", b"\x7fELF\2\1\1", b"<html><head>", b"<!DOCTYPE html>")),
    (b'\x40\0\0\0\0\0\0\0{"a"', FOREIGN),
    (b"version https://git-lfs.github.com/spec/v1\noid", FOREIGN),
    *((start + bytes(60), OTHER) for start in (b"", b"\xff", b"hrry", b"HRRX", b"\nHRRY", b"\x89HRKV\n\x1a\n")),
]


@pytest.mark.parametrize(("data", "told"), FIRST_BYTES)
def test_first_bytes(data: bytes, told: tuple[str, str]) -> None:
    assert verdict(data)[:2] == told
    assert reference_verdict(data)[:2] == told
    for limits in (hw.Limits(frame_bytes=0, decoded_bytes=0, descriptor_bytes=0), hw.DEFAULT_LIMITS):
        assert verdict(data, limits=limits)[:2] == told
