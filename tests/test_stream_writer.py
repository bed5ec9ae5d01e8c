"""`StreamWriter`: what it writes, and when: finish, close, leaving by an exception, paths, alignment, short writes."""

from __future__ import annotations

import io
import os
import random
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frames import PROLOGUE
from stream_helpers import PATIENCE, TENSOR, OnlyFileno, encoded, large, per_block, received, sample
from stream_ways import drained

import hurray_wire as hw

SAMPLES = [sample(0), per_block(1), large(2, pages=3)]
FORMS: dict[str, dict[str, Any]] = {
    "raw": {},
    "zstd": {"compression": "zstd"},
    "bare": {"framing": "bare"},
    "aligned": {"frame_alignment": 4096},
}


def prologues(data: bytes) -> list[dict[str, int]]:
    """Where each frame of a stream begins and what its prologue says."""
    found, at = [], 0
    while at < len(data):
        _, _, _, flags, sequence, _, count, _, length, stream_id = PROLOGUE.unpack_from(data, at)
        found.append({"at": at, "last": flags, "sequence": sequence, "sections": count, "id": stream_id})
        at += length
    assert at == len(data)
    return found


def test_frames_count_up_under_one_id_and_the_closing_one_is_last() -> None:
    data = encoded(SAMPLES, stream_id=0xABCDEF)
    found = prologues(data)
    assert [f["sequence"] for f in found] == [0, 1, 2, 3]
    assert [f["last"] for f in found] == [0, 0, 0, 1]
    assert {f["id"] for f in found} == {0xABCDEF}
    assert found[3]["sections"] == 0


def test_a_frame_of_a_stream_is_what_encode_makes_of_it() -> None:
    data = encoded(SAMPLES, stream_id=5, chunk_bytes=256)
    frames = [hw.encode(t, sequence=i, last=False, stream_id=5, chunk_bytes=256) for i, t in enumerate(SAMPLES)]
    assert data.startswith(b"".join(frames))
    assert encoded(SAMPLES, framing="bare") == b"".join(hw.encode(t, framing="bare") for t in SAMPLES)
    assert encoded([], framing="bare") == b""


def test_stream_ids_are_drawn() -> None:
    writers = [hw.StreamWriter(io.BytesIO()) for _ in range(64)]
    assert len({w.stream_id for w in writers}) == 64
    assert all(0 <= w.stream_id < 2**64 for w in writers)
    assert max(w.stream_id for w in writers) >= 2**32
    assert prologues(encoded([sample(0)]))[0]["id"] != prologues(encoded([sample(0)]))[0]["id"]
    assert hw.StreamWriter(io.BytesIO(), stream_id=0).stream_id == 0


@pytest.mark.parametrize("alignment", [64, 128, 4096, 1 << 16, 2 << 20])
def test_every_frame_starts_at_a_multiple(alignment: int) -> None:
    data = encoded([*SAMPLES[:2], large(0, pages=3)], frame_alignment=alignment)
    assert [f["at"] % alignment for f in prologues(data)] == [0] * 4
    assert len(data) % alignment == 0
    assert len(list(hw.iter_decode(data))) == 3


def test_a_frames_own_alignment_may_be_greater() -> None:
    data = encoded([sample(0), sample(1)], frame_alignment=128, alignment=4096)
    assert [f["at"] % 4096 for f in prologues(data)] == [0, 0, 0]


@pytest.mark.parametrize("value", [0, 1, 32, 63, 65, 96, 100, 4 << 20, -64, True, 64.0, "64", None])
def test_frame_alignment_is_a_power_of_two_up_to_2_mib(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        hw.StreamWriter(io.BytesIO(), frame_alignment=value)


@pytest.mark.parametrize(
    "options",
    [{"sequence": 1}, {"last": True}, {"framing": "other"}, {"compression": "lz4"}, {"stream_id": -1}, {"nothing": 1}],
    ids=str,
)
def test_options_are_checked_before_the_sink_is_touched(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError)):
        hw.StreamWriter(tmp_path / "stream", **options)
    assert list(tmp_path.iterdir()) == []


def test_live_and_scrubbed_are_options_of_a_stream_too() -> None:
    tensor = sample(0, block_table=[4, 4, 1], seq_ptr=[0, 2, 3], seq_lens=[7, 2])
    (live,) = hw.iter_decode(encoded([tensor], pages="live", scrub=True))
    assert live.num_pages == 2
    assert live.same_tokens(tensor)
    assert live.page_pool[1, 2:].sum() == 0


# Ends.


@pytest.mark.parametrize("form", FORMS)
def test_finish_ends_the_stream_once(form: str) -> None:
    sink = io.BytesIO()
    writer = hw.StreamWriter(sink, **FORMS[form])
    writer.write(sample(0))
    writer.finish()
    length = len(sink.getvalue())
    writer.finish()
    with pytest.raises(ValueError, match="finished"):
        writer.write(sample(1))
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match=r"closed|finished"):
        writer.write(sample(1))
    assert len(sink.getvalue()) == length
    assert len(list(hw.StreamReader(io.BytesIO(sink.getvalue())))) == 1
    assert not sink.closed


@pytest.mark.parametrize("form", ["raw", "zstd", "aligned"])
def test_a_stream_that_was_closed_and_not_finished_does_not_look_whole(form: str) -> None:
    sink = io.BytesIO()
    writer = hw.StreamWriter(sink, **FORMS[form])
    writer.write(sample(0))
    writer.close()
    for call in (writer.finish, lambda: writer.write(sample(1))):
        with pytest.raises(ValueError, match="closed"):
            call()
    _, error = drained(hw.StreamReader(io.BytesIO(sink.getvalue())))
    assert isinstance(error, hw.TruncatedError)


def left(writer: hw.StreamWriter, reason: type[BaseException]) -> None:
    """Write one tensor, then leave by an exception."""
    with writer:
        writer.write(sample(0))
        raise reason


@pytest.mark.parametrize("form", ["raw", "zstd", "aligned"])
@pytest.mark.parametrize("reason", [RuntimeError, KeyboardInterrupt])
def test_leaving_by_an_exception_sends_no_closing_frame(form: str, reason: type[BaseException]) -> None:
    sink = io.BytesIO()
    with pytest.raises(reason):
        left(hw.StreamWriter(sink, **FORMS[form]), reason)
    tensors, error = drained(hw.StreamReader(io.BytesIO(sink.getvalue())))
    assert tensors in ([], [sample(0)])
    assert isinstance(error, hw.TruncatedError)


# Paths.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [Path, str])
def test_a_path_is_written_beside_and_renamed(form: str, make: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "cache.hrkv"
    with hw.StreamWriter(make(path), **FORMS[form]) as writer:
        writer.write(sample(0))
        writer.write(sample(1))
        assert not path.exists()
        writer.finish()
        assert path.exists()
    assert list(tmp_path.iterdir()) == [path]
    assert [t.layer_index for t in hw.StreamReader(path)] == [0, 1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", ["exception", "close", "interrupt"])
def test_what_is_not_finished_leaves_nothing(form: str, way: str, tmp_path: Path) -> None:
    path = tmp_path / "cache.hrkv"
    path.write_bytes(b"what was there before")
    writer = hw.StreamWriter(path, **FORMS[form])
    if way == "close":
        writer.write(sample(0))
        writer.close()
    else:
        reason = RuntimeError if way == "exception" else KeyboardInterrupt
        with pytest.raises(reason):
            left(writer, reason)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"what was there before"


def test_a_path_is_replaced_whole_and_readers_of_the_old_one_are_not_disturbed(tmp_path: Path) -> None:
    path = tmp_path / "cache.hrkv"
    path.write_bytes(encoded([sample(0), sample(1)]))
    with hw.StreamReader(path) as reader:
        assert next(reader) == sample(0)
        with hw.StreamWriter(path) as writer:
            writer.write(sample(5))
        assert next(reader) == sample(1)
    assert list(hw.StreamReader(path)) == [sample(5)]


def test_a_file_is_everybodys_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with hw.StreamWriter(tmp_path / "cache") as writer:
            writer.write(sample(0))
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o640


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for n in range(4):
        with hw.StreamWriter(tmp_path / f"cache{n}", compression="zstd") as writer:
            writer.write(sample(0))
        hw.StreamWriter(tmp_path / "never").close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"cache{n}" for n in range(4)]


def test_a_long_file_name_is_no_worse_than_a_short_one(tmp_path: Path) -> None:
    """255 bytes are lawful; what is written beside must not need more."""
    path = tmp_path / ("n" * 250)
    with hw.StreamWriter(path) as writer:
        writer.write(sample(0))
    assert list(hw.StreamReader(path)) == [sample(0)]


# Sinks.


class Sip(io.RawIOBase):
    """A file that takes at most 13 bytes a call."""

    def __init__(self) -> None:
        self.taken = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = bytes(memoryview(data)[:13])
        self.taken += piece
        return len(piece)


class Gulp:
    """A callable that takes any part of a vector, or all of it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.taken = bytearray()

    def __call__(self, vector: list[memoryview]) -> int | None:
        data = b"".join(vector)
        if self.random.random() < 0.2:
            self.taken += data
            return None
        count = self.random.randint(1, len(data))
        self.taken += data[:count]
        return count


def collected(make: Callable[[int], Any], form: dict[str, Any]) -> list[TENSOR]:
    """The samples through a pipe."""
    read, write = os.pipe()
    with received(read, lambda: os.close(read)) as found:
        sink = make(write)
        with hw.StreamWriter(sink, **form) as writer:
            for tensor in SAMPLES:
                writer.write(tensor)
        sink.close() if hasattr(sink, "close") else os.close(write)
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sink", ["sip", "gulp", "fd", "fileno", "fdopen", "fdopen-raw", "socket", "socket-timeout"])
def test_all_comes_out_of_every_sink(sink: str, form: str) -> None:
    options = FORMS[form]
    expected = list(hw.iter_decode(encoded(SAMPLES, **options)))
    if sink in ("sip", "gulp"):
        taker: Any = Sip() if sink == "sip" else Gulp(1)
        with hw.StreamWriter(taker, **options) as writer:
            for tensor in SAMPLES:
                writer.write(tensor)
        assert list(hw.iter_decode(bytes(taker.taken))) == expected
    elif sink.startswith("socket"):
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        with ours, received(theirs, theirs.close) as found:
            with hw.StreamWriter(ours, timeout=PATIENCE if sink == "socket-timeout" else None, **options) as writer:
                for tensor in SAMPLES:
                    writer.write(tensor)
            ours.close()
        assert found == expected
    else:
        makes: dict[str, Any] = {"fd": int, "fileno": OnlyFileno, "fdopen": lambda fd: os.fdopen(fd, "wb")}
        makes["fdopen-raw"] = lambda fd: os.fdopen(fd, "wb", 0)
        assert collected(makes[sink], options) == expected


def test_the_pool_is_not_joined_or_copied_on_its_way_out() -> None:
    """A callable sink is given the pool's own memory."""
    tensor = large(0)
    seen: list[bool] = []

    def sink(vector: list[memoryview]) -> None:
        seen.append(any(np.shares_memory(np.frombuffer(piece, np.uint8), tensor.page_pool) for piece in vector))

    with hw.StreamWriter(sink) as writer:
        writer.write(tensor)
    assert seen == [True, False]


def test_a_call_larger_than_the_kernel_takes() -> None:
    """A call moves at most 0x7ffff000 bytes: the rest follows. Zero pages, never touched, to where nothing is kept."""
    pool = np.zeros((1, 1, 1, (5 << 29) // 2), np.uint16)
    tensor = TENSOR(pool, block_table=[0], seq_ptr=[0, 1], seq_lens=[1])
    moved: list[int] = []
    with Path("/dev/null").open("wb", 0) as null:
        with hw.StreamWriter(null.fileno(), checksum=False) as writer:
            writer.write(tensor)
        hw.StreamWriter(lambda v: moved.append(sum(map(len, v))), checksum=False).write(tensor)
    assert moved[0] > 5 << 29
