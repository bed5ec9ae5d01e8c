"""Views keep what they view alive, and nothing keeps anything longer: maps that close, buffers that grow, no cycles."""

from __future__ import annotations

import gc
import io
import mmap
import socket
import sys
import tempfile
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frames import PAGE_POOL, section_of
from stream_helpers import TENSOR, Metered, encoded, frames_of, large, per_block, run_child, sample
from support import worked
from test_stream_into import flipped

import hurray_wire as hw

# Case 36: a map that is closed while arrays use it.


def mapped(framing: str) -> None:
    """Run in a child, which must not crash: close a map beneath a tensor, read the tensor, let go, close again."""
    for how in ("decode", "iter_decode", "open_frame"):
        map_and_close(framing, how)


def map_and_close(framing: str, how: str) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(hw.encode(worked(), framing=framing))  # type: ignore[arg-type]  # one of the two
        file.flush()
        map_ = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        tensor: TENSOR | None
        if how == "decode":
            tensor = hw.decode(map_)
        elif how == "iter_decode":
            (tensor,) = hw.iter_decode(map_)
        else:
            tensor = hw.open_frame(map_).tensor()
        inspection: hw.Inspection | None = hw.inspect(map_)
        tokens = tensor.gather(0) if framing == "hrkv" else None
        with suppress(BufferError):
            map_.close()
        total = float(tensor.page_pool.astype("f8").sum())
        assert total == 51040.0, total
        if framing == "hrkv":
            assert not tensor.page_pool.flags.writeable
        assert inspection is not None
        assert inspection.spans
        del tensor, tokens, inspection
        gc.collect()
        map_.close()  # nothing views it any more


@pytest.mark.parametrize("framing", ["hrkv", "bare"])
def test_a_map_that_is_closed(framing: str) -> None:
    run_child("test_stream_lifetime", "mapped", framing)


def test_open_frame_over_a_path_is_a_context_manager_without_buffer_errors(tmp_path: Path) -> None:
    path = tmp_path / "frame"
    path.write_bytes(hw.encode(worked()))
    with hw.open_frame(path) as frame:
        kept = frame.tensor()
        tokens = frame.gather(0)
    del frame
    gc.collect()
    path.unlink()
    assert float(kept.page_pool.astype("f8").sum()) == 51040.0
    assert float(tokens.sum()) == 4560.0


def test_views_keep_the_data_alive() -> None:
    blob = np.frombuffer(hw.encode(large(0)), np.uint8).copy()
    data = weakref.ref(blob)
    tensor: TENSOR | None = hw.decode(blob)
    del blob
    gc.collect()
    assert data() is not None
    pool = tensor.page_pool if tensor else np.zeros(0)
    tensor = None
    assert data() is not None
    assert np.array_equal(pool, large(0).page_pool)
    del pool
    assert data() is None


@pytest.mark.parametrize("form", ["raw", "zstd", "bare"])
def test_what_came_over_a_stream_outlives_reader_and_source(form: str) -> None:
    options: dict[str, Any] = {"raw": {}, "zstd": {"compression": "zstd"}, "bare": {"framing": "bare"}}[form]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(encoded([sample(0), per_block(1)], **options))
        theirs.close()
        with hw.StreamReader(ours) as reader:
            tensors = list(reader)
    del reader, ours, theirs
    gc.collect()
    assert [np.array_equal(a.page_pool, b.page_pool) for a, b in zip(tensors, (sample(0), per_block(1)), strict=True)]


# Nothing is kept: with the collector off, what is let go is gone.


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def gone(make: Callable[[], Any]) -> bool:
    thing = make()
    there = weakref.ref(thing)
    del thing
    return there() is None


def read_to_the_end(**options: Any) -> hw.StreamReader:
    reader = hw.StreamReader(io.BytesIO(encoded([sample(0), sample(1)])), **options)
    assert len(list(reader)) == 2
    return reader


def broken_reader() -> hw.StreamReader:
    reader = hw.StreamReader(io.BytesIO(frames_of([sample(0)])[0]))
    with suppress(hw.TruncatedError):
        list(reader)
    return reader


def reader_with_a_header() -> hw.StreamReader:
    reader = hw.StreamReader(io.BytesIO(encoded([sample(0)])))
    reader.next_header()
    return reader


def fed(data: bytes, *, close: bool = False) -> hw.FrameDecoder:
    decoder = hw.FrameDecoder()
    decoder.feed(data)
    while isinstance(decoder.next(), TENSOR):
        pass
    if close:
        decoder.close()
    return decoder


def broken_decoder() -> hw.FrameDecoder:
    decoder = hw.FrameDecoder()
    decoder.feed(flipped(hw.encode(sample(0)), 500))
    with suppress(hw.ChecksumError):
        decoder.next()
    return decoder


def writer(*, finish: bool, **options: Any) -> hw.StreamWriter:
    made = hw.StreamWriter(io.BytesIO(), **options)
    made.write(sample(0))
    if finish:
        made.finish()
    made.close()
    return made


MADE: dict[str, Callable[[], Any]] = {
    "tensor": lambda: hw.decode(hw.encode(per_block(0))),
    "tensor-zstd": lambda: hw.decode(hw.encode(large(0), compression="zstd", chunk_bytes=8192), threads=2),
    "tensor-into": lambda: hw.decode_into(hw.encode(large(0)), np.zeros((64, 16, 4, 64), np.uint16), range(64)),
    "gathered-from": lambda: gathered(sample(0)),
    "frame": lambda: hw.open_frame(hw.encode(sample(0))),
    "frame-used": lambda: gathered(hw.open_frame(hw.encode(sample(0)))),
    "reader": read_to_the_end,
    "reader-one": lambda: read_to_the_end(streams="one"),
    "reader-broken": broken_reader,
    "reader-unused": lambda: hw.StreamReader(io.BytesIO(encoded([sample(0)]))),
    "reader-with-a-header": reader_with_a_header,
    "decoder": lambda: fed(encoded([sample(0)])),
    "decoder-closed": lambda: fed(encoded([sample(0)]), close=True),
    "decoder-mid-frame": lambda: fed(hw.encode(large(0))[:9000]),
    "decoder-new": lambda: hw.FrameDecoder(),
    "decoder-broken": broken_decoder,
    "writer": lambda: writer(finish=True),
    "writer-zstd": lambda: writer(finish=True, compression="zstd"),
    "writer-unfinished": lambda: writer(finish=False, compression="zstd"),
}


def gathered(thing: Any) -> Any:
    thing.gather(0)
    return thing


@pytest.mark.parametrize("name", MADE)
def test_no_cycles(name: str) -> None:
    """Buffers of gigabytes must not wait for the collector: a decoder that is let go in mid-frame holds its frame."""
    MADE[name]()  # what is made once
    assert gone(MADE[name])


def test_a_decoders_frame_goes_with_its_tensor() -> None:
    """The decoder itself holds on to no frame that it has handed out."""
    decoder = hw.FrameDecoder()
    decoder.feed(hw.encode(large(0)))
    tensor: Any = decoder.next()
    memory = weakref.ref(tensor.page_pool.base)
    assert memory() is not None
    del tensor
    assert memory() is None
    decoder.close()


def test_a_reader_holds_one_frame_at_a_time() -> None:
    data = encoded([large(n) for n in range(12)])
    reader = hw.StreamReader(Metered(data))
    next(reader)
    tracemalloc.start()
    for _ in range(11):
        next(reader)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * large(0).nbytes


@pytest.mark.parametrize("at", [30, 100, 300, 700, None])
@pytest.mark.parametrize("how", ["decode", "open_frame", "iter_decode", "inspect", "decode_into", "feed"])
def test_an_error_lets_the_buffer_go(how: str, at: int | None) -> None:
    """When the error has been dealt with nothing exports the caller's memory any more."""
    blob = hw.encode(worked())
    data = bytearray(blob[:-1] if at is None else flipped(blob, at))

    def call() -> None:
        if how == "decode_into":
            hw.decode_into(data, np.zeros((9, 4, 2, 8), np.float16), range(5))
        elif how == "iter_decode":
            list(hw.iter_decode(data))
        elif how == "open_frame":
            hw.open_frame(data).tensor()
        elif how == "feed":
            decoder = hw.FrameDecoder()
            decoder.feed(data)
            decoder.next()
        else:
            getattr(hw, how)(data)

    with suppress(hw.HurrayWireError):
        call()
    data.append(0)


def test_a_tensor_of_a_written_frame_is_not_kept() -> None:
    """Neither by the writer nor by its sender, when `write` has returned and the frame is sent."""
    for options in ({}, {"compression": "zstd"}):
        with hw.StreamWriter(io.BytesIO(), **options) as made:  # type: ignore[arg-type]  # options of a writer
            tensor = large(0, noise=True)
            pool = weakref.ref(tensor.page_pool)
            made.write(tensor)
            del tensor
            made.finish()
            assert pool() is None


def test_nothing_leaks_from_stream_to_stream() -> None:
    """References to what is shared stay what they were."""
    data = encoded([sample(0), per_block(1)], compression="zstd")

    def turn() -> None:
        list(hw.StreamReader(io.BytesIO(data)))
        fed(data, close=True)
        broken_reader()
        writer(finish=True, compression="zstd")

    for _ in range(3):
        turn()
    gc.collect()
    before = sys.getrefcount(hw.NEED_DATA), len(gc.get_objects())
    for _ in range(20):
        turn()
    gc.collect()
    after = sys.getrefcount(hw.NEED_DATA), len(gc.get_objects())
    assert abs(after[0] - before[0]) <= 2
    assert after[1] - before[1] < 200


def test_sections_of_a_frame_that_was_viewed_stay_readable() -> None:
    blob = bytearray(hw.encode(worked()))
    tensor = hw.decode(blob)
    with pytest.raises(BufferError):
        blob.append(0)  # the view exports it
    at = section_of(bytes(blob), PAGE_POOL)["offset"]
    blob[at : at + 2] = np.float16(7).tobytes()
    assert tensor.page_pool[0, 0, 0, 0] == 7  # a view: what the owner changes is seen
    tables = tensor.block_table.copy()
    blob[:] = bytes(len(blob))
    assert np.array_equal(tensor.block_table, tables)  # tables are copies
