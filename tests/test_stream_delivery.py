"""What was written comes out: every kind of tensor, both forms, by every way that bytes can come.

Whole, byte by byte, with bytes left over; what a reader stopped before is still where it was.
"""

from __future__ import annotations

import copy
import io
import pickle
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frames import entries_of
from hypothesis import given
from hypothesis import strategies as st
from stream_helpers import TENSOR, Dribble, Metered, as_sent, encoded, fed, frames_of, kinds, large, sample
from stream_ways import FEW, WAYS, drained

import hurray_wire as hw

KINDS = kinds()
FORMS: dict[str, dict[str, Any]] = {
    "raw": {},
    "zstd": {"compression": "zstd"},
    "chunks": {"chunk_bytes": 256},
    "zstd-chunks": {"compression": "zstd", "chunk_bytes": 8192},
    "no-checksum": {"checksum": False},
    "aligned": {"frame_alignment": 4096, "alignment": 256},
    "bare": {"framing": "bare"},
}


def sent(form: dict[str, Any]) -> tuple[bytes, list[TENSOR]]:
    """A stream of every kind, and what must come out."""
    tensors = list(KINDS.values())
    return encoded(tensors, **form), [as_sent(t, form.get("framing", "hrkv")) for t in tensors]


def same(found: list[TENSOR], expected: list[TENSOR]) -> bool:
    return len(found) == len(expected) and all(map(TENSOR.__eq__, found, expected))


def test_the_streams_hold_what_they_should() -> None:
    """Compressed chunks, several chunks, so that the tests below mean something."""
    codecs = [[e["codec"] for e in entries_of(f) if e["kind"] == 16] for f in frames_of([large(0)], compression="zstd")]
    assert codecs[0] == [1]
    frame = frames_of([large(0)], chunk_bytes=8192)[0]
    assert sum(e["kind"] == 16 for e in entries_of(frame)) == 64


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", [name for name in WAYS if not name.endswith("-bytes")])
def test_every_tensor_comes_out(way: str, form: str) -> None:
    data, expected = sent(FORMS[form])
    tensors, error, left = WAYS[way].run(data, streams="all")
    assert error is None
    assert same(tensors, expected)
    assert left == b""


@pytest.mark.parametrize("way", [name for name in WAYS if name.endswith("-bytes")])
@pytest.mark.parametrize("form", ["raw", "zstd", "bare"])
def test_byte_by_byte(way: str, form: str) -> None:
    tensors = [sample(0), KINDS["per_block"], KINDS["no-batch"]]
    if form == "zstd":
        tensors.append(large(1, pages=1))
    outcome = WAYS[way].run(encoded(tensors, **FORMS[form]), streams="all")
    assert outcome.error is None
    assert same(outcome.tensors, [as_sent(t, FORMS[form].get("framing", "hrkv")) for t in tensors])


@pytest.mark.parametrize("way", [name for name in WAYS if name != "path"])
@pytest.mark.parametrize("tail", [b"x", b"HRRY", encoded([sample(9)]), bytes(5000)], ids=["x", "magic", "stream", "0"])
def test_one_stream_and_not_one_byte_more(way: str, tail: bytes) -> None:
    tensors = [sample(0), sample(1)]
    outcome = WAYS[way].run(encoded(tensors, compression="zstd") + tail, streams="one")
    assert outcome.error is None
    assert same(outcome.tensors, tensors)
    assert outcome.left == tail


@pytest.mark.parametrize("way", [name for name in WAYS if name != "path"])
def test_last_on_a_tensor_ends_a_stream_as_a_closing_frame_does(way: str) -> None:
    """A single blob is a stream of one frame."""
    outcome = WAYS[way].run(hw.encode(sample(0)) + b"next", streams="one")
    assert (outcome.error, len(outcome.tensors), outcome.left) == (None, 1, b"next")


@pytest.mark.parametrize("way", WAYS)
def test_all_streams(way: str) -> None:
    """After LAST a new stream may begin, of either form and any id, and an empty one counts too."""
    groups = [[sample(0), sample(1)], [], [sample(2)]]
    data = b"".join(encoded(group) for group in groups) + hw.encode(sample(3)) + hw.encode(sample(4), framing="bare")
    expected = [*map(sample, range(4)), as_sent(sample(4), "bare")]
    outcome = WAYS[way].run(data, streams="all")
    assert outcome.error is None
    assert same(outcome.tensors, expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("streams", ["one", "all"])
def test_an_empty_stream_is_complete(way: str, streams: str) -> None:
    outcome = WAYS[way].run(encoded([]), streams=streams)
    assert outcome == ([], None, b"")


@pytest.mark.parametrize("alignment", [4096, 2 << 20])
@pytest.mark.parametrize("way", FEW)
def test_aligned_frames(way: str, alignment: int) -> None:
    data = encoded([sample(0), sample(1)], frame_alignment=alignment)
    assert len(data) == 3 * alignment
    assert same(WAYS[way].run(data, streams="one").tensors, [sample(0), sample(1)])


@pytest.mark.parametrize("framing", ["hrkv", "bare"])
def test_a_connection_carries_stream_after_stream(framing: Any) -> None:
    """Each reader takes its own stream; the bare form has no end but the connection's."""
    ours, theirs = socket.socketpair()
    blobs = [encoded([sample(i), sample(i + 1)]) for i in range(3)]
    blobs.append(encoded([sample(7)], framing=framing))
    with ours, theirs, fed(theirs.sendall, blobs, lambda: theirs.shutdown(socket.SHUT_WR)):
        for i in range(3):
            assert [t.layer_index for t in hw.StreamReader(ours)] == [i, i + 1]
        assert [t.layer_index for t in hw.StreamReader(ours)] == [7]
        assert list(hw.StreamReader(ours, require_last=False)) == []


DEFAULTS: dict[str, Any] = {
    "bytesio": io.BytesIO,
    "dribble": Dribble,
    "callable": Metered,
}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_defaults(kind: str) -> None:
    """ "all" on what can be sought in, "one" on what is a connection."""
    data = encoded([sample(0)]) + encoded([sample(1)])
    found = [t.layer_index for t in hw.StreamReader(DEFAULTS[kind](data))]
    assert found == ([0, 1] if kind == "bytesio" else [0])


def test_a_path_goes_on_by_default(tmp_path: Path) -> None:
    path = tmp_path / "two.hrkv"
    path.write_bytes(encoded([sample(0)]) + encoded([sample(1)]))
    assert [t.layer_index for t in hw.StreamReader(path)] == [0, 1]
    assert [t.layer_index for t in hw.StreamReader(str(path))] == [0, 1]
    assert [t.layer_index for t in hw.StreamReader(path, streams="one")] == [0]
    with path.open("rb") as file:
        assert [t.layer_index for t in hw.StreamReader(file, streams="one")] == [0]
        assert [t.layer_index for t in hw.StreamReader(file, streams="one")] == [1]


@pytest.mark.parametrize("way", FEW)
@pytest.mark.parametrize("form", ["raw", "zstd", "bare"])
def test_what_comes_over_a_stream_is_writable_and_aligned(way: str, form: str) -> None:
    """The library allocated it: 64 bytes, whatever the wire's offsets are (design/api.md, Bytes)."""
    kinds = {name: t for name, t in KINDS.items() if t.page_pool.size}
    outcome = WAYS[way].run(encoded(kinds.values(), **FORMS[form]), streams="all")
    for name, tensor in zip(kinds, outcome.tensors, strict=True):
        pool = tensor.page_pool
        assert pool.flags.writeable, name
        assert pool.flags.aligned, name
        assert pool.ctypes.data % 64 == 0, name
        pool[:1] = 0
        assert not tensor.block_table.flags.writeable, name


def test_a_fed_tensor_is_apart_from_what_was_fed() -> None:
    memory = bytearray(hw.encode(sample(0)))
    decoder = hw.FrameDecoder()
    decoder.feed(memory)
    memory[:] = bytes(len(memory))
    memory.append(0)  # and nothing holds on to it
    assert decoder.next() == sample(0)


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint16)])
def test_feed_takes_any_buffer(make: Any) -> None:
    decoder = hw.FrameDecoder()
    decoder.feed(make(hw.encode(sample(0))))
    decoder.feed(b"")
    assert decoder.next() == sample(0)
    decoder.close()


@given(seed=st.integers(0, 2**16), cuts=st.lists(st.integers(0, 8000), max_size=12))
def test_any_split_gives_the_same(seed: int, cuts: list[int]) -> None:
    data = encoded([sample(seed), large(seed, pages=1)], compression="zstd" if seed % 2 else None)
    decoder = hw.FrameDecoder()
    bounds = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    for start, stop in pairwise(bounds):
        decoder.feed(data[start:stop])
    decoder.close()
    assert [decoder.next(), decoder.next(), decoder.next()] == [sample(seed), large(seed, pages=1), hw.NEED_DATA]


def test_need_data_is_one_value() -> None:
    assert copy.deepcopy(hw.NEED_DATA) is hw.NEED_DATA
    assert pickle.loads(pickle.dumps(hw.NEED_DATA)) is hw.NEED_DATA
    assert repr(hw.NEED_DATA) == "NEED_DATA"
    assert not hw.NEED_DATA


@pytest.mark.parametrize("option", [{"streams": "two"}, {"expect": 3}, {"threads": 0}, {"limits": 5}])
def test_wrong_options_are_the_callers(option: dict[str, Any]) -> None:
    for make in (hw.FrameDecoder, lambda **o: hw.StreamReader(io.BytesIO(), **o)):
        with pytest.raises((TypeError, ValueError)):
            make(**option)


@pytest.mark.parametrize("source", [3.5, None, object(), True])
def test_what_is_no_source_is_a_type_error(source: Any) -> None:
    with pytest.raises(TypeError):
        hw.StreamReader(source)
    with pytest.raises(TypeError):
        hw.StreamWriter(source)


def test_a_source_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hw.StreamReader(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError):
        hw.StreamWriter(tmp_path / "nowhere" / "stream")


def test_three_blobs_by_dribbles() -> None:
    """Case 41."""
    blob = hw.encode(sample(0))
    tensors, error = drained(hw.StreamReader(Dribble(blob * 3), streams="all"))
    assert error is None
    assert tensors == [sample(0)] * 3
