"""A writer whose sink or tensor is at fault: the error reaches the caller, and nothing half-sent looks whole."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from stream_helpers import PATIENCE, TENSOR, encoded, large, per_block, sample
from stream_ways import drained
from support import raw

import hurray_wire as hw

FORMS: dict[str, dict[str, Any]] = {"raw": {}, "zstd": {"compression": "zstd"}, "bare": {"framing": "bare"}}


class Broken(io.RawIOBase):
    """A file that fails after so many bytes."""

    def __init__(self, after: int = 100) -> None:
        self.after = after
        self.taken = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        room = self.after - len(self.taken)
        if room <= 0:
            raise OSError(28, "no space left")
        piece = bytes(memoryview(data)[:room])
        self.taken += piece
        return len(piece)


def until_it_fails(writer: hw.StreamWriter, tensor: TENSOR, times: int = 4) -> None:
    for _ in range(times):
        writer.write(tensor)
    writer.finish()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("after", [0, 100, 3000])
def test_an_error_of_the_sink_reaches_the_caller_and_ends_the_writer(form: str, after: int) -> None:
    """Case 44: never logged and forgotten."""
    sink = Broken(after)
    writer = hw.StreamWriter(sink, **FORMS[form])
    with pytest.raises(OSError, match="no space left"):
        until_it_fails(writer, large(0, pages=2))
    for call in (writer.finish, lambda: writer.write(sample(0))):
        with pytest.raises(ValueError, match="closed"):
            call()
    writer.close()
    assert len(sink.taken) == after


@pytest.mark.parametrize("form", FORMS)
def test_an_error_on_the_last_frame_comes_out_of_finish_or_of_leaving(form: str) -> None:
    """With compression the frame may still be on its way when `write` returns."""
    for leave in (False, True):
        writer = hw.StreamWriter(Broken(2000), **FORMS[form])
        with pytest.raises(OSError, match="no space left"):
            write_one(writer, leave)


def write_one(writer: hw.StreamWriter, leave: bool) -> None:
    if leave:
        with writer:
            writer.write(large(0, pages=2))
    else:
        writer.write(large(0, pages=2))
        writer.finish()


@pytest.mark.parametrize("form", ["raw", "zstd"])
def test_a_path_whose_stream_failed_is_not_there(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, pieces: Any) -> int:
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="no space left"):
        write_one(hw.StreamWriter(tmp_path / "cache", **FORMS[form]), leave=True)
    assert list(tmp_path.iterdir()) == []


def test_a_full_device() -> None:
    with Path("/dev/full").open("wb", 0) as full:
        writer = hw.StreamWriter(full.fileno())
        with pytest.raises(OSError, match="No space left"):
            writer.write(sample(0))
        with pytest.raises(ValueError, match="closed"):
            writer.write(sample(0))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["socket", "pipe"])
def test_a_reader_that_has_gone(kind: str, form: str) -> None:
    read, write = os.pipe()
    ours, theirs = socket.socketpair()
    with ours:
        os.close(read)
        theirs.close()
        writer = hw.StreamWriter(ours if kind == "socket" else write, **FORMS[form])
        with pytest.raises(BrokenPipeError):
            until_it_fails(writer, large(0))
        with pytest.raises(ValueError, match="closed"):
            writer.write(sample(0))
    os.close(write)


# A tensor that cannot be sent sends nothing.


def unsound() -> TENSOR:
    """A tensor with violations, as a lenient reader gives it."""
    return hw.decode(raw(bt=np.array([0, 9, 0], "<u4")), strict=False)


BAD: dict[str, tuple[Any, dict[str, Any], type[Exception]]] = {
    "violations": (unsound, {}, hw.InvalidDescriptorError),
    "scrub-unknown-lens": (
        lambda: sample(0, seq_lens=None, total_tokens=20),
        {"scrub": True},
        hw.UnsupportedError,
    ),
    "bare-metadata": (lambda: sample(0, metadata={"model": "m"}), {"framing": "bare"}, hw.UnsupportedError),
    "not-a-tensor": (lambda: np.zeros(3), {}, (TypeError, AttributeError, ValueError)),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("form", ["raw", "zstd"])
@pytest.mark.parametrize("name", BAD)
def test_an_invalid_tensor_sends_nothing_and_the_next_write_works(name: str, form: str) -> None:
    """Case 44: the stream then holds exactly the good frames, numbered as if nothing had been."""
    make, options, error = BAD[name]
    if options.get("framing") != "bare":
        options = options | FORMS[form]
    sink = io.BytesIO()
    with hw.StreamWriter(sink, **options) as writer:
        with pytest.raises(error):
            writer.write(make())
        assert sink.getvalue() == b""
        writer.write(sample(1))
        with pytest.raises(error):
            writer.write(make())
        writer.write(sample(2))
    assert [t.layer_index for t in hw.StreamReader(io.BytesIO(sink.getvalue()))] == [1, 2]


def test_metadata_that_is_reserved_sends_nothing() -> None:
    sink = io.BytesIO()
    with hw.StreamWriter(sink) as writer:
        with pytest.raises(hw.FrameError) as caught:
            writer.write(sample(0, metadata={"unknown": 1}))
        assert (caught.value.code, sink.getvalue()) == ("metadata", b"")
        writer.write(sample(1))
    assert len(list(hw.iter_decode(sink.getvalue()))) == 1


# What is sent while the next is made.


class Gate:
    """A callable sink that takes nothing before it is opened."""

    def __init__(self) -> None:
        self.open = Event()
        self.entered = Event()
        self.taken = bytearray()

    def __call__(self, vector: list[memoryview]) -> None:
        self.entered.set()
        assert self.open.wait(PATIENCE)
        for piece in vector:
            self.taken += piece


def packed_pages() -> TENSOR:
    """A packed pool that does not compress, 4 KiB a page."""
    pool = np.random.default_rng(0).integers(0, 256, 6 * 4096).astype(np.uint8)
    return sample(0, page_pool=pool, dtype="int4", page_size=4, num_heads=2, head_dim=1024)


OVERWRITTEN: dict[str, Callable[[], TENSOR]] = {
    "compressible": lambda: large(0, pages=4),
    "noise": lambda: large(0, pages=4, noise=True),
    "strided": lambda: sample(0, page_pool=np.random.default_rng(0).random((6, 4, 2, 16))[..., ::2]),
    "live": lambda: large(1, pages=4, noise=True).replace(block_table=[3, 1], seq_ptr=[0, 2], seq_lens=[32]),
    "scales": lambda: per_block(0, pages=600, asymmetric=False),
    "zero-points": lambda: per_block(0, pages=600),
    "packed": packed_pages,
}


@pytest.mark.parametrize("kind", OVERWRITTEN)
def test_the_caller_may_overwrite_its_arrays_after_write(kind: str) -> None:
    """Compressed frames are sent behind the caller's back: with what the tensor held when `write` was called."""
    tensor = OVERWRITTEN[kind]()
    pages: Any = "live" if kind == "live" else "all"
    gate = Gate()
    writer = hw.StreamWriter(gate, compression="zstd", pages=pages)
    expected = hw.decode(hw.encode(tensor, pages=pages))
    writer.write(tensor)
    assert gate.entered.wait(PATIENCE)
    tensor.page_pool[...] = 7
    for array in (tensor.scales, tensor.zero_points):
        if array is not None:
            array[...] = 99
    gate.open.set()
    writer.finish()
    writer.close()
    assert list(hw.iter_decode(bytes(gate.taken))) == [expected]


def test_the_next_frame_is_compressed_while_one_is_sent() -> None:
    """The first write returns though the sink is stuck; the stream is whole when the sink goes on."""
    gate = Gate()
    writer = hw.StreamWriter(gate, compression="zstd")
    writer.write(large(0, pages=2))
    assert gate.entered.wait(PATIENCE)
    writer.write(large(1, pages=2))
    assert not gate.taken
    gate.open.set()
    writer.write(large(2, pages=2))
    writer.finish()
    writer.close()
    assert [t.layer_index for t in hw.iter_decode(bytes(gate.taken))] == [0, 1, 2]


def test_an_error_of_the_sender_comes_out_of_the_next_call() -> None:
    gate = Gate()

    def sink(vector: list[memoryview]) -> None:
        gate(vector)
        raise ConnectionResetError("gone")

    for last in ("write", "finish"):
        gate.open.clear()
        gate.entered.clear()
        writer = hw.StreamWriter(sink, compression="zstd")
        writer.write(sample(0))
        gate.open.set()
        with pytest.raises(ConnectionResetError):
            until_it_fails(writer, sample(1), times=3 if last == "write" else 0)
        with pytest.raises(ValueError, match="closed"):
            writer.write(sample(2))


def test_whatever_a_sink_raises_comes_out_as_it_is() -> None:
    class Own(Exception):
        pass

    def sink(vector: list[memoryview]) -> None:
        raise Own("mine")

    for options in FORMS.values():
        with pytest.raises(Own, match="mine"):
            write_one(hw.StreamWriter(sink, **options), leave=False)


def test_a_stream_broken_at_any_byte_is_noticed() -> None:
    """Whatever a broken sink took of a stream, its reader knows that the stream is not whole."""
    total = len(encoded([sample(0), sample(1)]))
    for after in range(1, total, 37):
        sink = Broken(after)
        writer = hw.StreamWriter(sink)
        with pytest.raises(OSError, match="no space"):
            until_it_fails(writer, sample(0), times=2)
        _, error = drained(hw.StreamReader(io.BytesIO(bytes(sink.taken))))
        assert isinstance(error, hw.TruncatedError), after
