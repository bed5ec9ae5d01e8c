"""`StreamReader` step by step: headers before payloads, what is refused before a payload byte is taken, `alloc`."""

from __future__ import annotations

import io
import itertools
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frames import METADATA, Section, build, worked_sections
from stream_helpers import TENSOR, Metered, OnlyFileno, encoded, frames_of, large, per_block, sample
from stream_ways import drained

import hurray_wire as hw

SAMPLES = [sample(0), per_block(1), sample(2)]
STREAMS = {
    "raw": encoded(SAMPLES),
    "zstd": encoded([large(0, pages=2), per_block(1), sample(2)], compression="zstd"),
    "bare": encoded(SAMPLES, framing="bare"),
}


def header_of(reader: hw.StreamReader) -> hw.FrameHeader:
    header = reader.next_header()
    assert header is not None
    return header


def into(header: hw.FrameHeader) -> TENSOR:
    """Read into a new pool, pages in reverse."""
    descriptor = header.inspection.descriptor
    assert descriptor is not None
    layout = descriptor.layout
    pool = np.zeros((layout.num_pages + 2, layout.page_size, *descriptor.shape[1:]), descriptor.dtype.numpy)
    return header.read_into(pool, np.arange(layout.num_pages)[::-1])


@pytest.mark.parametrize("form", STREAMS)
@pytest.mark.parametrize("acts", list(itertools.product(("read", "into", "skip", "leave"), repeat=3)), ids=str)
def test_in_every_order(acts: tuple[str, ...], form: str) -> None:
    """Each item read, received into pages, skipped, or left to the next call: the others come out whole."""
    expected = list(hw.iter_decode(STREAMS[form]))
    with hw.StreamReader(Metered(STREAMS[form])) as reader:
        for act, tensor in zip(acts, expected, strict=True):
            header = header_of(reader)
            assert header.inspection.descriptor == tensor.descriptor
            if act == "read":
                assert header.read() == tensor
            elif act == "into":
                found = into(header)
                if tensor.seq_lens is not None:
                    assert found.same_tokens(tensor)
                assert np.array_equal(found.page_pool[: tensor.num_pages][::-1], tensor.page_pool)
            elif act == "skip":
                header.skip()
        assert reader.next_header() is None
        assert reader.next_header() is None


@pytest.mark.parametrize("act", ["read", "read_into", "skip"])
def test_a_payload_is_taken_once(act: str) -> None:
    with hw.StreamReader(io.BytesIO(STREAMS["raw"])) as reader:
        header = header_of(reader)
        if act == "skip":
            header.skip()
        else:
            into(header) if act == "read_into" else header.read()
        for again in (header.read, lambda: into(header)):
            with pytest.raises(ValueError, match="read or skipped"):
                again()
        header.skip()  # nothing is left to skip
        assert next(reader) == SAMPLES[1]


def test_a_header_that_was_passed_over_is_gone() -> None:
    with hw.StreamReader(io.BytesIO(STREAMS["raw"])) as reader:
        first, second = header_of(reader), header_of(reader)
        with pytest.raises(ValueError, match="read or skipped"):
            first.read()
        assert second.read() == SAMPLES[1]


def test_the_inspection_is_there_before_the_payload_and_after() -> None:
    blob = hw.encode(large(3), sequence=0, last=True, stream_id=5)
    source = Metered(blob)
    header = header_of(hw.StreamReader(source))
    inspection = header.inspection
    assert source.taken <= inspection.header_bytes
    assert (inspection.total_bytes, inspection.framing) == (len(blob), "hrkv")
    assert (inspection.sequence, inspection.last, inspection.stream_id) == (0, True, 5)
    assert inspection.descriptor == large(3).descriptor
    assert header.read() == large(3)
    assert header.inspection.spans == inspection.spans  # and it stays


@pytest.mark.parametrize("framing", ["hrkv", "bare"])
def test_inspections_in_a_stream_say_where_in_the_stream(framing: Any) -> None:
    """`Inspection.spans` have absolute offsets: of the second item, behind the first (design/api.md)."""
    items = [hw.encode(t, framing=framing, sequence=i, last=i == 1) for i, t in enumerate(SAMPLES[:2])]
    reader = hw.StreamReader(io.BytesIO(b"".join(items)))
    header_of(reader)
    found = header_of(reader).inspection
    expected = hw.inspect(b"".join(items), len(items[0]))
    assert found.spans == expected.spans
    assert found.spans[0].offset == len(items[0])
    assert (found.sections, found.total_bytes) == (expected.sections, expected.total_bytes)


# Refused before a byte of the payload is taken.


def taken_by(data: bytes, **options: Any) -> tuple[hw.HurrayWireError, int]:
    source = Metered(data)
    with pytest.raises(hw.HurrayWireError) as caught:
        hw.StreamReader(source, **options).next_header()
    return caught.value, source.taken


@pytest.mark.parametrize("framing", ["hrkv", "bare"])
@pytest.mark.parametrize(
    "expect",
    [{"dtype": "float32"}, {"page_size": 5}, {"layer_index": 1, "kv_role": "value"}, {"quantization": "per_block"}],
    ids=str,
)
def test_expect_is_asked_before_the_payload(expect: dict[str, Any], framing: Any) -> None:
    blob = hw.encode(large(0), framing=framing)
    error, taken = taken_by(blob, expect=expect)
    assert isinstance(error, hw.MismatchError)
    assert {d.where for d in error.differences} == set(expect)
    assert taken <= hw.inspect(blob).header_bytes


@pytest.mark.parametrize("framing", ["hrkv", "bare"])
@pytest.mark.parametrize("name", ["descriptor_bytes", "frame_bytes", "decoded_bytes", "stream_bytes", "frames"])
def test_limits_are_looked_at_before_the_payload(name: str, framing: Any) -> None:
    blob = hw.encode(large(0), framing=framing)
    limit = {"descriptor_bytes": 132, "frames": 0}.get(name, 400_000)
    error, taken = taken_by(blob, limits=hw.Limits(**{name: limit}))
    assert isinstance(error, hw.LimitError)
    assert (error.code, error.limit) == (name, limit)
    assert error.claimed > limit
    assert taken <= hw.inspect(blob).header_bytes


def test_a_section_that_is_over_a_limit_is_not_received() -> None:
    """Stage 3: nothing is read for what is refused. The header alone says 8 MiB of metadata."""
    sections = worked_sections()
    sections.insert(2, Section(METADATA, b'{"a.b": "' + b"x" * (8 << 20) + b'"}'))
    frame = build(sections)
    error, taken = taken_by(frame)
    assert isinstance(error, hw.LimitError)
    assert error.code == "metadata_bytes"
    assert taken <= 48 + 48 * len(sections)


@pytest.mark.parametrize("framing", ["hrkv", "bare"])
def test_limits_of_a_whole_stream(framing: Any) -> None:
    """The third tensor is one too many: two come out, its payload is not taken."""
    data = encoded(map(sample, range(4)), framing=framing)
    one = len(hw.encode(sample(0), framing=framing))
    for limits in (hw.Limits(frames=2), hw.Limits(stream_bytes=3 * one - 1)):
        source = Metered(data)
        tensors, error = drained(hw.StreamReader(source, limits=limits))
        assert isinstance(error, hw.LimitError)
        assert len(tensors) == 2
        assert source.taken < 3 * one
        decoder = hw.FrameDecoder(limits=limits)
        decoder.feed(data)
        assert all(isinstance(decoder.next(), TENSOR) for _ in range(2))
        with pytest.raises(hw.LimitError):
            decoder.next()


def test_each_stream_has_its_own_limits() -> None:
    data = encoded(map(sample, range(2))) * 3
    limits = hw.Limits(frames=3, stream_bytes=len(data) // 3)
    assert len(list(hw.StreamReader(io.BytesIO(data), limits=limits))) == 6


# After an error.


@pytest.mark.parametrize("where", ["header", "payload"])
def test_after_an_error_the_reader_is_closed(where: str) -> None:
    frames = frames_of(map(sample, range(3)))
    damaged = bytearray(frames[1])
    damaged[10 if where == "header" else 700] ^= 1
    source = Metered(frames[0] + damaged + frames[2] + frames[3])
    reader = hw.StreamReader(source)
    assert next(reader) == sample(0)
    with pytest.raises(hw.FrameError):
        next(reader)
    taken = source.taken
    assert list(reader) == []
    assert reader.next_header() is None
    assert source.taken == taken


class Failing(Metered):
    """A source that fails where it should end."""

    def __call__(self, memory: memoryview) -> int:
        count = super().__call__(memory)
        if not count:
            raise ConnectionResetError("gone")
        return count


@pytest.mark.parametrize("cut", [0, 5, 100, 440, 700])
def test_an_error_of_the_source_passes_through_and_closes(cut: int) -> None:
    reader = hw.StreamReader(Failing(hw.encode(sample(0))[:cut]))
    with pytest.raises(ConnectionResetError, match="gone"):
        next(reader)
    assert list(reader) == []


def test_a_reader_that_is_closed_gives_nothing_and_leaves_the_source_open() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(hw.encode(sample(0)) * 2)
        with hw.StreamReader(ours) as reader:
            assert next(reader) == sample(0)
        assert list(reader) == []
        assert list(hw.StreamReader(ours)) == [sample(0)]
    file = io.BytesIO(hw.encode(sample(0)))
    hw.StreamReader(file).close()
    assert not file.closed


def test_a_path_that_the_reader_opened_is_closed_again(tmp_path: Any) -> None:
    path = tmp_path / "stream"
    path.write_bytes(STREAMS["raw"])
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with hw.StreamReader(path) as reader:
            assert len(list(reader)) == 3
        path.write_bytes(STREAMS["raw"][:-70])
        with pytest.raises(hw.TruncatedError):
            list(hw.StreamReader(path))  # closed by the error
        path.write_bytes(STREAMS["raw"])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# Memory.


class Memory:
    """An `alloc` that keeps what it gave."""

    def __init__(self, *, slack: int = 0) -> None:
        self.given: list[tuple[int, int, Any]] = []
        self.slack = slack

    def __call__(self, nbytes: int, alignment: int) -> Any:
        block = np.full(nbytes + alignment + self.slack, 0xEE, np.uint8)
        start = -block.ctypes.data % alignment
        memory = block[start : start + nbytes + self.slack]
        self.given.append((nbytes, alignment, memory))
        return memory


@pytest.mark.parametrize("slack", [0, 100])
@pytest.mark.parametrize("form", ["raw", "zstd", "bare", "aligned"])
def test_alloc_gives_the_payloads_memory(form: str, slack: int) -> None:
    forms: dict[str, dict[str, Any]] = {
        "raw": {},
        "zstd": {"compression": "zstd"},
        "bare": {"framing": "bare"},
        "aligned": {"alignment": 4096},
    }
    memory = Memory(slack=slack)
    blob = hw.encode(large(0, pages=3), **forms[form])
    (found,) = hw.StreamReader(io.BytesIO(blob), alloc=memory)
    assert found == hw.decode(blob)
    assert any(np.shares_memory(found.page_pool, given) for _, _, given in memory.given)
    assert all(alignment & (alignment - 1) == 0 and alignment >= 64 for _, alignment, _ in memory.given)
    assert found.page_pool.ctypes.data % (4096 if form == "aligned" else 64) == 0
    decoder = hw.FrameDecoder(alloc=memory)
    decoder.feed(blob)
    tensor = decoder.next()
    assert isinstance(tensor, TENSOR)
    assert np.shares_memory(tensor.page_pool, memory.given[-1][2])


@pytest.mark.parametrize(
    "alloc",
    [lambda n, a: bytearray(max(0, n - 1)), lambda n, a: bytes(n), lambda n, a: np.empty(n + 128, np.uint8)[1:]],
    ids=["small", "read-only", "unaligned"],
)
def test_memory_that_does_not_do_is_the_callers_error(alloc: Any) -> None:
    with pytest.raises(ValueError, match="alloc"):
        next(hw.StreamReader(io.BytesIO(hw.encode(sample(0))), alloc=alloc))


def test_a_decoder_whose_alloc_fails_does_not_look_like_the_end() -> None:
    """The error is the caller's, but what was fed is lost: the stream must not then seem whole."""

    def alloc(nbytes: int, alignment: int) -> Any:
        raise MemoryError("no pinned memory left")

    decoder = hw.FrameDecoder(alloc=alloc)
    blob = hw.encode(sample(0))
    with pytest.raises(MemoryError):
        decoder.feed(blob)
    with pytest.raises(ValueError, match="close"):
        decoder.feed(blob)


def test_an_object_with_fileno_alone_is_read_by_its_descriptor() -> None:
    read, write = os.pipe()
    os.write(write, hw.encode(sample(0)))
    os.close(write)
    assert list(hw.StreamReader(OnlyFileno(read))) == [sample(0)]
    os.close(read)
