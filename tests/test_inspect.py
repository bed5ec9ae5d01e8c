"""`inspect`: what a blob says of itself, from the bytes before its payload alone."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from frames import METADATA, PAGE_POOL, Section, added, build, entries_of, patched, worked_sections
from hypothesis import given
from hypothesis import strategies as st
from strategies import Built, tensors
from stream_helpers import closing, encoded, frames_of, kinds, large, per_block, sample
from support import BARE_CASES, FRAME_CASES, bare_vector, desc, frame_vector, raw, worked
from test_stream_into import flipped

import hurray_wire as hw

KINDS = kinds()
FORMS: dict[str, dict[str, Any]] = {"raw": {}, "zstd": {"compression": "zstd"}, "bare": {"framing": "bare"}}


def end_of_small(inspection: hw.Inspection) -> int:
    """Where the last section before the buffers ends; a bare item's descriptor."""
    if inspection.framing == "bare":
        return inspection.header_bytes
    return max(s.offset + s.stored_length for s in inspection.sections if s.kind < 16)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", KINDS)
def test_what_it_says(name: str, form: str) -> None:
    tensor = KINDS[name]
    if form != "bare":
        tensor = tensor.replace(metadata={"model": "m", "my.own": [1, None]})
    place: dict[str, Any] = {"sequence": 3, "last": False, "stream_id": 9}
    blob = hw.encode(tensor, **(FORMS[form] if form == "bare" else FORMS[form] | place))
    found = hw.inspect(blob)
    assert found.framing == ("bare" if form == "bare" else "hrkv")
    assert found.version == (1, 0)
    assert found.total_bytes == len(blob)
    assert found.descriptor == hw.decode(blob).descriptor
    if form == "bare":
        assert found.header_bytes == found.descriptor.encoded_length
        assert (found.metadata, found.sequence, found.last, found.stream_id, found.sections) == (*[None] * 4, ())
        return
    assert (found.sequence, found.last, found.stream_id) == (3, False, 9)
    assert found.metadata == {"model": "m", "my.own": [1, None]}
    buffers = [s for s in found.sections if s.kind >= 16]
    assert found.header_bytes == buffers[0].offset
    assert hw.encode_header(tensor) == hw.encode(tensor)[: hw.inspect(hw.encode(tensor)).header_bytes]


@pytest.mark.parametrize("form", FORMS)
def test_the_header_alone_is_enough_and_every_shorter_prefix_is_truncated(form: str) -> None:
    for tensor in (sample(0), per_block(1), sample(2, metadata={"rope": "x" * 99}) if form != "bare" else sample(2)):
        blob = hw.encode(tensor, **FORMS[form])
        whole = hw.inspect(blob)
        end = end_of_small(whole)
        for cut in range(end):
            with pytest.raises(hw.TruncatedError) as caught:
                hw.inspect(blob[:cut])
            assert caught.value.available == cut
            assert caught.value.needed > cut
            assert caught.value.offset == cut
        for cut in (end, whole.header_bytes, len(blob) - 1):
            found = hw.inspect(blob[:cut])
            assert (found.total_bytes, found.descriptor, found.metadata) == (
                len(blob),
                whole.descriptor,
                whole.metadata,
            )
            assert found.spans == whole.spans
            assert found.sections == whole.sections


@pytest.mark.parametrize("form", FORMS)
def test_no_payload_is_touched(form: str) -> None:
    blob = hw.encode(large(0), **FORMS[form])
    found = hw.inspect(blob)
    damaged = blob[: found.header_bytes] + bytes(len(blob) - found.header_bytes)
    assert hw.inspect(damaged).spans == found.spans


@pytest.mark.parametrize("name", [n for n in FRAME_CASES if "stream" not in n])
def test_golden_frames(name: str) -> None:
    data, case = frame_vector(name), FRAME_CASES[name]
    found = hw.inspect(data)
    assert found.total_bytes == len(data) == case["bytes"]
    for section, entry in zip(found.sections, entries_of(data), strict=True):
        assert section._asdict() | {"name": "", "reserved": 0} == entry | {"name": ""}
    assert found.last


@pytest.mark.parametrize("name", [n for n in BARE_CASES if n != "container"])
def test_golden_blobs(name: str) -> None:
    data = bare_vector(name)
    found = hw.inspect(data)
    assert found.total_bytes == len(data)
    assert found.descriptor is not None
    assert data.startswith(found.descriptor.encode())


# Spans.


@pytest.mark.parametrize("offset", [0, 64, 101])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", KINDS)
def test_spans_tile_header_and_descriptor(name: str, form: str, offset: int) -> None:
    """Every byte of both is in one span and only one, in order, at its absolute offset, with its value."""
    data = b"\xaa" * offset + hw.encode(KINDS[name], **FORMS[form]) + b"behind"
    found = hw.inspect(data, offset)
    assert found.descriptor is not None
    length = found.descriptor.encoded_length
    if form == "bare":
        regions = [(offset, offset + length)]
    else:
        table = 48 + 48 * len(found.sections)
        start = offset + found.sections[0].offset
        regions = [(offset, offset + table), (start, start + length)]
    at = iter(found.spans)
    for begin, end in regions:
        while begin < end:
            span = next(at)
            assert span.offset == begin, span.path
            assert span.length > 0
            assert value_at(data, span) == span.value, span.path
            begin += span.length
        assert begin == end
    assert next(at, None) is None
    paths = [span.path for span in found.spans]
    shared = {"magic", "version_major", "version_minor", "flags"}  # a frame and its descriptor have both
    assert {path for path in paths if paths.count(path) > 1} == (set() if form == "bare" else shared)


def value_at(data: bytes, span: hw.Span) -> Any:
    """The field as `struct` reads it, little-endian."""
    piece = data[span.offset : span.offset + span.length]
    if isinstance(span.value, bytes):
        return piece
    if isinstance(span.value, float):
        return struct.unpack("<f" if span.length == 4 else "<d", piece)[0]
    return int.from_bytes(piece, "little", signed=span.value < 0)


def test_spans_are_named_as_the_format_names_them() -> None:
    spans = {span.path: span for span in hw.inspect(hw.encode(worked(), stream_id=7)).spans}
    offsets = {"frame_length": 24, "stream_id": 32, "sections[0].kind": 40, "sections[1].checksum": 40 + 48 + 40}
    assert {path: spans[path].offset for path in offsets} == offsets
    bare = {span.path: span for span in hw.inspect(raw()).spans}
    offsets = {"layout.page_size": 52, "layout.num_pages": 56, "buffer_count": 84, "buffers[1].byte_size": 101}
    assert {path: bare[path].offset for path in offsets} == offsets
    assert bare["layout.page_size"].value == 4
    assert "float16" in bare["type_tag"].meaning
    assert "block_paged" in bare["layout_tag"].meaning


@given(built=tensors(with_metadata=True), offset=st.integers(0, 99), form=st.sampled_from(("raw", "zstd")))
def test_any_tensor(built: Built, offset: int, form: str) -> None:
    blob = hw.encode(built.tensor, **FORMS[form])
    found = hw.inspect(bytes(offset) + blob, offset)
    assert found.descriptor == hw.decode(blob).descriptor
    assert found.metadata == built.tensor.metadata
    assert found.total_bytes == len(blob)
    assert found.spans[0].offset == offset


# Streams.


def test_a_closing_frame_is_shown() -> None:
    for data, offset in ((closing(5), 0), (bytes(64) + closing(5), 64), (closing(5)[:48], 0)):
        found = hw.inspect(data, offset)
        assert (found.framing, found.descriptor, found.sections, found.metadata) == ("hrkv", None, (), None)
        assert (found.sequence, found.last, found.stream_id, found.total_bytes) == (5, True, 77, 64)
        assert found.spans[0].offset == offset
        assert sum(span.length for span in found.spans) == 48
    for cut in range(48):
        with pytest.raises(hw.TruncatedError):
            hw.inspect(closing(5)[:cut])


def test_walking_a_stream() -> None:
    data = encoded([sample(0), large(1), sample(2)], frame_alignment=4096, compression="zstd")
    at, sequences, layers = 0, [], []
    while at < len(data):
        found = hw.inspect(data, at)
        sequences.append((found.sequence, found.last))
        layers.append(found.descriptor.layout.layer_index if found.descriptor else None)
        at += found.total_bytes
    assert sequences == [(0, False), (1, False), (2, False), (3, True)]
    assert layers == [0, 1, 2, None]


@pytest.mark.parametrize("offset", [-1, 1217, 10**12])
def test_an_offset_outside_is_a_value_error(offset: int) -> None:
    with pytest.raises(ValueError, match="offset"):
        hw.inspect(hw.encode(worked()), offset)


def test_the_end_is_truncated() -> None:
    blob = hw.encode(worked())
    with pytest.raises(hw.TruncatedError) as caught:
        hw.inspect(blob, len(blob))
    assert (caught.value.offset, caught.value.available) == (len(blob), 0)


# What is wrong is said before the payload.


@pytest.mark.parametrize("at", [3, 8, 10, 16, 24, 41, 100, 281, 290, 400])
def test_damage_before_the_payload(at: int) -> None:
    blob = hw.encode(worked())
    with pytest.raises(hw.HurrayWireError):
        hw.inspect(flipped(blob, at))


def test_sizes_beyond_32_bits() -> None:
    """Case 12: a header of a 3 GiB pool is enough."""
    found = hw.inspect(desc(sizes=(3 << 30, 12, 12), num_pages=(3 << 30) // 128))
    assert found.descriptor is not None
    size = found.descriptor.buffers[0].byte_size
    assert (size, found.descriptor.layout.num_pages) == (3_221_225_472, 25_165_824)
    assert type(size) is int
    assert found.total_bytes == 133 + (3 << 30) + 24


def test_sections_that_only_a_later_version_knows() -> None:
    data = build(added(Section(0x06, b"later", flags=3)), version=(1, 1))
    found = hw.inspect(data)
    assert found.version == (1, 1)
    assert [s.name for s in found.sections][:3] == ["descriptor", "seq_lens", "kind 0x06"]
    assert found.descriptor == worked().descriptor


def test_sections_are_named() -> None:
    sections = worked_sections()
    sections.insert(2, Section(METADATA, b'{"model":"m"}'))
    names = [s.name for s in hw.inspect(build(sections)).sections]
    assert names == ["descriptor", "seq_lens", "metadata", "page_pool", "block_table", "seq_ptr"]
    names = [s.name for s in hw.inspect(hw.encode(per_block(0))).sections]
    assert names[-2:] == ["scales", "zero_points"]


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint32)])
def test_any_buffer(make: Any) -> None:
    assert hw.inspect(make(frames_of([sample(0)])[0])).sequence == 0


def test_an_inspection_keeps_no_payload_alive() -> None:
    """Its spans come from a copy of the header: the blob may go, or change."""
    blob = bytearray(hw.encode(large(0)))
    found = hw.inspect(blob)
    blob[:] = bytes(len(blob))
    blob.append(0)  # nothing exports it any more
    assert found.spans[0].value == b"\x89HRKV\r\n\x1a"
    assert found.sections[2].kind == PAGE_POOL
    assert "hrkv" in repr(found)


def test_a_newer_major_is_named_first() -> None:
    with pytest.raises(hw.UnsupportedError) as caught:
        hw.inspect(patched(hw.encode(worked()), 8, b"\x02")[:9])
    assert caught.value.code == "version"
