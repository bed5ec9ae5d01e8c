"""Damaged bare blobs: nothing but our errors comes out, and an independent decoder says the same.

Every byte of a descriptor, with each of its 255 other values; tables, lengths and lies about sizes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Built, tensors
from support import (
    BT,
    POOL,
    SP,
    bare_vector,
    byte_changes,
    desc,
    disagreement,
    disagreements,
    fill,
    raw,
    reference_verdict,
    under_a_ceiling,
    verdict,
    worked,
)

import hurray_wire as hw

FEW = (0x00, 0x01, 0x02, 0x03, 0x40, 0x80, 0xFF)
TOLERATED = [*range(44, 56), *range(64, 68), 98, 114, 130]
"""Places of byte_offset, page_size, paged_axis and the first three sync modes."""


def float_block(name: str) -> bytes:
    dtype, scheme = {"nf4": ("uint4", hw.NF4(2, 8, 3)), "mxfp": ("int8", hw.MXFP(2, 16, 3))}[name]
    pool: Any = np.zeros(160, np.uint8) if name == "nf4" else np.zeros((5, 4, 2, 8), np.int8)
    sizes = {"page_size": 4, "num_heads": 2, "head_dim": 8, "dtype": dtype}
    scales = np.arange(9, dtype=np.uint8)
    return hw.encode(
        worked(page_pool=pool, quantization=scheme, scales=scales, composite="base", **sizes), framing="bare"
    )


BLOBS = {
    name: bare_vector(name)
    for name in (
        *("fp16", "int8_per_block_asym", "int8_per_tensor", "int8_per_channel_axis1_sym", "statistics"),
        *("extension_f2_24bit", "uint64_index", "empty_batch", "zero_pages", "int4_odd", "uint4_per_tensor"),
    )
} | {name: float_block(name) for name in ("nf4", "mxfp")}


def head_of(name: str) -> int:
    return int.from_bytes(BLOBS[name][6:10], "little")


@pytest.mark.parametrize("name", BLOBS)
def test_both_decoders_read_the_undamaged_blob(name: str) -> None:
    assert disagreement(verdict(BLOBS[name]), reference_verdict(BLOBS[name])) == ""


@pytest.mark.parametrize("part", range(4))
def test_every_change_of_every_byte_of_a_descriptor(part: int) -> None:
    assert disagreements(byte_changes(BLOBS["fp16"], range(part, 133, 4))) == {}


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("int8_per_block_asym", range(133, 193)),
        ("int8_per_tensor", range(133, 153)),
        ("statistics", [*range(133, 141), *range(197, 205)]),  # between them any double is a sound one
        ("extension_f2_24bit", range(133, 153)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_change_of_every_byte_behind_the_third_handle(name: str, places: Iterable[int]) -> None:
    """Handles of scales and zero points, quantisation, statistics, extension type, composite member."""
    assert disagreements(byte_changes(BLOBS[name], places)) == {}


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
@pytest.mark.parametrize("name", BLOBS)
def test_some_changes_of_every_byte(name: str, strict: bool) -> None:
    data = BLOBS[name]
    places = [*range(head_of(name)), *range(head_of(name), len(data), 7), *range(len(data) - 24, len(data))]
    assert disagreements(byte_changes(data, places, FEW[:: 2 - strict]), strict=strict) == {}


def test_changes_of_the_tolerated_fields_before_a_lenient_reader() -> None:
    assert disagreements(byte_changes(BLOBS["fp16"], TOLERATED, range(0, 256, 5)), strict=False) == {}


def test_every_change_of_the_tables() -> None:
    data = BLOBS["fp16"]
    places = range(len(data) - 24, len(data))
    assert disagreements(byte_changes(data, places)) == {}
    assert disagreements(byte_changes(data, places, FEW), strict=False) == {}


def test_every_type_tag_with_and_without_an_extension_section() -> None:
    """An unsupported element type wins over an extension section that has no place."""
    tail = struct.pack("<I6B2xI2B2x", 16, 1, 0, 0, 0, 0, 0, 0, 0, 0)
    told = (
        (f"type {tag:#04x} {ext}", raw(type_tag=tag, flags=4 * ext, tail=tail * ext))
        for tag in range(256)
        for ext in (0, 1)
    )
    assert disagreements(told) == {}
    for tag in (0x00, 0xFF, 0x47, 0x80, 0xEF, 0x21):
        assert verdict(raw(type_tag=tag, flags=4, tail=tail))[:2] == ("UnsupportedError", "dtype")


def test_an_unsupported_scheme_wins_over_its_length() -> None:
    """Its tag and version can be read, however little the section holds of it."""
    for quant in (struct.pack("<BBH", 3, 2, 0), struct.pack("<BBH", 3, 0, 0), struct.pack("<BBH", 0x33, 1, 0)):
        assert verdict(raw(flags=1, quant=quant))[:2] == ("UnsupportedError", "scheme")


def test_a_stage_reports_all_that_it_finds() -> None:
    """A count that no scheme has is wrong also where its handles run past the descriptor."""
    found = verdict(desc()[:84] + b"\xc8" + raw()[85:])
    assert {"buffer_count", "descriptor_length"} <= set(found.codes)
    several = verdict(raw(kv_role=9, index_type=7, reserved=b"\1" * 6, align=3, hres=1, byte_offset=8))
    assert {"byte_offset", "kv_role", "index_type", "reserved_not_zero", "alignment"} <= set(several.codes)


def test_a_lenient_reader_raises_for_what_it_does_not_tolerate() -> None:
    fields: list[dict[str, Any]] = [{"page_size": 0}, {"byte_offset": 64}, {"paged_axis": 1}, {"sync": 1}]
    for tolerated in fields:
        found = verdict(raw(kv_role=9, **tolerated), strict=False)
        assert (found.kind, found.code, found.where) == ("InvalidDescriptorError", "kv_role", "layout.kv_role")


@pytest.mark.parametrize(
    ("data", "where", "offset"),
    [
        (raw(shape=(13, 2, 8)), "shape[0]", 20),
        (raw(kv_role=3), "layout.kv_role", 72),
        (raw(reserved=b"\0\0\1\0\0\0"), "layout.reserved", 78),
        (raw(flags=1, quant=struct.pack("<BBH", 3, 1, 1)), "quantization.length", 133),
        (raw(flags=1, type_tag=16, quant=struct.pack("<BBHfi4x", 1, 1, 0, 0.0, 0)), "quantization.scale", 141),
        (raw(sizes=(640, 12, 13)), "buffers[2].byte_size", 117),
        (raw(sizes=(2**40, 12, 12), num_pages=2**33), "buffers", 85),
    ],
)
def test_the_offset_is_that_of_the_field(data: bytes, where: str, offset: int) -> None:
    for base in (0, 1000):
        with pytest.raises(hw.HurrayWireError) as caught:
            hw.decode_from(bytes(base) + data, base)
        assert (caught.value.where, caught.value.offset) == (where, base + offset)


@settings(max_examples=300)
@given(built=tensors(), data=st.data())
def test_several_changes_of_any_blob(built: Built, data: st.DataObject) -> None:
    blob = bytearray(hw.encode(built.tensor, framing="bare"))
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(st.integers(4, len(blob) - 1))] = data.draw(st.sampled_from(FEW))
    for strict in (True, False):
        ours, theirs = verdict(bytes(blob), strict=strict), reference_verdict(bytes(blob), strict=strict)
        assert ours.kind == theirs.kind or "shape" in (ours.code, theirs.code)


@settings(max_examples=200)
@given(data=st.binary(max_size=300))
def test_random_bytes_behind_a_sound_beginning(data: bytes) -> None:
    for start in (b"", b"HRRY", desc()[:20], desc()[:85], desc(), bare_vector("int8_per_block_asym")[:165]):
        blob = start + data
        told = disagreement(verdict(blob), reference_verdict(blob))
        assert not told or {verdict(blob).code, reference_verdict(blob).code} & {"foreign", "magic"}


# Trailing bytes, oversized buffers, newer minors.


def test_trailing_bytes() -> None:
    found = verdict(raw() + b"\0")
    assert found[:4] == ("FrameError", "trailing_bytes", "trailing_bytes", 797)
    tensor, end = hw.decode_from(raw() + b"\0", 0)
    assert (tensor.replace(seq_lens=[6, 3]), end) == (worked(), 797)
    assert verdict(raw() + b"\0", strict=False).code == "trailing_bytes"


@pytest.mark.parametrize("buffer", [0, 2])
def test_oversized_buffers(buffer: int) -> None:
    sizes = [640, 12, 12]
    sizes[buffer] += 64
    data = desc(sizes=tuple(sizes)) + fill(tuple(sizes))
    assert verdict(data)[:3] == ("InvalidDescriptorError", "buffer_size", f"buffers[{buffer}].byte_size")
    lenient = hw.decode(data, strict=False)
    assert [v.where for v in lenient.violations] == [f"buffers[{buffer}].byte_size"]
    assert np.array_equal(lenient.page_pool, POOL)
    assert (lenient.block_table.tolist(), lenient.seq_ptr.tolist()) == (BT.tolist(), SP.tolist())
    sizes[buffer] -= 65
    assert verdict(desc(sizes=tuple(sizes)) + fill(tuple(sizes)), strict=False).code == "buffer_size"


def test_newer_minors_may_be_longer() -> None:
    for minor in (1, 255):
        for tail in (b"", b"\xff" * 9):
            found = verdict(raw(minor=minor, tail=tail))
            assert found.kind == "ok"
            assert found.item.replace(seq_lens=[6, 3]) == worked()
    assert verdict(raw(tail=b"\0"))[:2] == ("InvalidDescriptorError", "descriptor_length")
    for major in (0, 2, 255):
        assert verdict(raw(major=major))[:4] == ("UnsupportedError", "version", "version_major", 4)
        assert verdict(raw(major=major)[:5])[:2] == ("UnsupportedError", "version")


# Lies about lengths, under a memory ceiling.

LIES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1)
BARE_LENGTHS = {
    **{"descriptor_length": (6, 4), "rank": (16, 4), "shape[0]": (20, 8), "shape[1]": (28, 8), "shape[2]": (36, 8)},
    **{"page_size": (52, 4), "num_pages": (56, 8), "num_seqs": (68, 4), "buffer_count": (84, 1)},
    **{f"buffers[{i}].byte_size": (85 + 16 * i, 8) for i in range(5)},
    **{"quantization.length": (165, 4), "quantization.block_size": (177, 4)},
}


def lies() -> Iterator[bytes]:
    data = BLOBS["int8_per_block_asym"]
    for at, width in BARE_LENGTHS.values():
        for lie in LIES:
            if lie < 1 << 8 * width:
                yield data[:at] + lie.to_bytes(width, "little") + data[at + width :]
    for lie in LIES[2:]:
        for shape in ((9, 0, 8), (9, 2, 0)):
            yield raw(num_pages=lie, sizes=(0, 12, 12), pool=POOL[:0], shape=shape)
        yield raw(num_pages=max(1, lie // 128), sizes=(lie, 12, 12))
        if lie < 2**32:
            yield raw(page_size=lie, shape=(9, 0, 8), sizes=(0, 12, 12), pool=POOL[:0])
            yield raw(num_seqs=lie, sizes=(640, 12, 4 * (lie + 1)))


def test_lies_about_lengths_cost_nothing() -> None:
    blobs = list(lies())
    wide = {"frame_bytes": 2**70, "decoded_bytes": 2**70, "descriptor_bytes": 2**70}
    options: list[dict[str, Any]] = [{}, {"strict": False}, {"limits": wide}, {"copy": True}]
    verdicts = under_a_ceiling([(blob, dict(option)) for option in options for blob in blobs])
    kinds = {told.split()[0] for told in verdicts}
    assert {"ok", "TruncatedError", "LimitError", "InvalidDescriptorError", "UnsupportedError"} <= kinds
    unlimited = verdicts[2 * len(blobs) : 3 * len(blobs)]
    assert "LimitError decoded_bytes" not in unlimited
    assert "TruncatedError truncated" in unlimited
