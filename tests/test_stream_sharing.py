"""Threads and processes: many on one writer, readers anywhere, fork and spawn; and more pieces than a call takes."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import Any

import numpy as np
import pytest
from frames import PROLOGUE
from stream_helpers import PATIENCE, TENSOR, encoded, kinds, large, received, run_child, sample
from stream_ways import drained

import hurray_wire as hw

FORMS: dict[str, dict[str, Any]] = {"raw": {}, "zstd": {"compression": "zstd"}, "bare": {"framing": "bare"}}


def together(count: int, work: Callable[[int], None]) -> None:
    """`work(0)` to `work(count - 1)`, each in a thread, begun at once; their first error is raised."""
    barrier, errors = Barrier(count), list[BaseException]()

    def run(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=run, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sink", ["file", "socket", "bytewise"])
def test_threads_that_share_a_writer(sink: str, form: str) -> None:
    """Frames are never interleaved, and their numbers are 0 to n-1 in the order in which they lie."""
    ours, theirs = socket.socketpair()
    taken, found = bytearray(), list[TENSOR]()

    def sip(vector: list[memoryview]) -> int:
        piece = bytes(vector[0][: random.randint(1, 999)])
        taken.extend(piece)
        return len(piece)

    file = io.BytesIO()
    over_socket = sink == "socket"
    receiving = received(theirs, theirs.close) if over_socket else nullcontext(found)
    with ours, theirs, receiving as found:
        with hw.StreamWriter({"file": file, "socket": ours, "bytewise": sip}[sink], **FORMS[form]) as writer:

            def work(number: int) -> None:
                for i in range(12):
                    writer.write(sample(100 * number + i) if i % 3 else large(100 * number + i, pages=3))

            together(6, work)
        ours.close()
    if not over_socket:
        data = file.getvalue() or bytes(taken)
        found = list(hw.iter_decode(data))
        if form != "bare":
            assert sequences(data) == list(range(73))
    layers = [t.layer_index for t in found]
    assert sorted(layers, key=int) == [100 * n + i for n in range(6) for i in range(12)]  # type: ignore[arg-type]
    for number in range(6):  # each thread's own order is kept
        own = [n for n in layers if n is not None and n // 100 == number]
        assert own == sorted(own)
    for tensor in found[::7]:
        layer = tensor.layer_index
        assert layer is not None
        assert np.array_equal(tensor.page_pool, (sample(layer) if layer % 100 % 3 else large(layer, pages=3)).page_pool)


def sequences(data: bytes) -> list[int]:
    found, at = [], 0
    while at < len(data):
        prologue = PROLOGUE.unpack_from(data, at)
        found.append(prologue[4])
        at += prologue[8]
    return found


@pytest.mark.parametrize("form", FORMS)
def test_threads_that_share_a_reader(form: str) -> None:
    """Each gets whole tensors, none twice, none lost."""
    data = encoded([sample(i) for i in range(40)], **FORMS[form])
    reader = hw.StreamReader(io.BytesIO(data))
    found: list[TENSOR] = []
    together(5, lambda _: found.extend(reader))
    assert sorted(t.layer_index or 0 for t in found) == list(range(40))
    assert all(np.array_equal(t.page_pool, sample(t.layer_index or 0).page_pool) for t in found)


def test_a_reader_may_be_read_in_another_thread_than_its_header() -> None:
    reader = hw.StreamReader(io.BytesIO(encoded([sample(0), sample(1)])))
    header = reader.next_header()
    assert header is not None
    found: list[TENSOR] = []
    together(1, lambda _: found.append(header.read()))
    assert [*found, *reader] == [sample(0), sample(1)]


def test_a_reader_closed_by_another_thread_reads_no_other_file(tmp_path: Path) -> None:
    """A path's descriptor is given back, and its number is the next file's; the reader that waited for it ends."""
    fifo, other = tmp_path / "fifo", tmp_path / "other"
    os.mkfifo(fifo)
    blob = hw.encode(large(0))
    other.write_bytes(bytes(len(blob)))
    raised: list[BaseException] = []
    opened: list[hw.StreamReader] = []
    begun = Event()

    def receive() -> None:
        opened.append(hw.StreamReader(fifo))
        begun.set()
        try:
            next(opened[0])
        except BaseException as error:
            raised.append(error)

    thread = Thread(target=receive, daemon=True)
    thread.start()
    with fifo.open("wb", 0) as sink:
        sink.write(blob[:100])
        assert begun.wait(PATIENCE)
        time.sleep(0.1)  # it waits for more
        opened[0].close()
        with other.open("rb", 0) as file:
            sink.write(blob[100:200])
            thread.join(PATIENCE)
            assert not thread.is_alive()
            assert file.tell() == 0, "it read the other file"
    assert len(raised) == 1
    assert isinstance(raised[0], (OSError, ValueError))


def test_finish_and_writes_of_other_threads() -> None:
    """A write comes before the closing frame, or is refused."""
    for seed in range(20):
        sink = io.BytesIO()
        writer = hw.StreamWriter(sink, compression="zstd" if seed % 2 else None)
        written: list[int] = []

        def work(number: int, writer: hw.StreamWriter = writer, written: list[int] = written) -> None:
            if not number:
                writer.finish()
                return
            try:
                writer.write(sample(number))
            except ValueError:
                return
            written.append(number)

        together(4, work)
        writer.close()
        tensors, error = drained(hw.StreamReader(io.BytesIO(sink.getvalue())))
        assert error is None
        assert sorted(t.layer_index or 0 for t in tensors) == sorted(written)


# More pieces than a vectored call takes.


@pytest.mark.parametrize("form", ["raw", "bare"])
@pytest.mark.parametrize("page_bytes", [64, 4096])
def test_thousands_of_live_pages(page_bytes: int, form: str) -> None:
    """In no order, over a pipe and into scattered pages at the other end: IOV_MAX is respected at both."""
    count = 3000
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 256, (count * 2, 1, 1, page_bytes)).astype(np.uint8)
    ids = rng.permutation(count * 2)[:count]
    tensor = TENSOR(pool, block_table=ids, seq_ptr=[0, count], seq_lens=[count])
    ours, theirs = socket.socketpair()
    target = np.zeros((count * 2, 1, 1, page_bytes), np.uint8)
    places = rng.permutation(count * 2)[:count]
    found: list[TENSOR] = []

    def receive() -> None:
        header = hw.StreamReader(theirs).next_header()
        assert header is not None
        found.append(header.read_into(target, places))

    with ours, theirs:
        thread = Thread(target=receive, daemon=True)
        thread.start()
        with hw.StreamWriter(ours, pages="live", **FORMS[form]) as writer:
            writer.write(tensor)
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert np.array_equal(target[places], pool[ids])
    assert not np.delete(target, places, axis=0).any()
    assert np.array_equal(found[0].block_table, places)


# Processes.


def send_kinds(sock: socket.socket, compression: Any) -> None:
    with sock, hw.StreamWriter(sock, compression=compression) as writer:
        for tensor in kinds().values():
            writer.write(tensor)


def echo(connection: Any, tensors: list[TENSOR]) -> None:
    """Tensors through pickle, and a stream over the connection's descriptor."""
    connection.send(tensors)
    with hw.StreamWriter(connection) as writer:
        for tensor in tensors:
            writer.write(tensor)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_spawned_process_sends_over_a_socket(compression: Any) -> None:
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(target=send_kinds, args=(theirs, compression))
    with ours:
        process.start()
        theirs.close()
        found = list(hw.StreamReader(ours, timeout=PATIENCE))
        process.join(PATIENCE)
    assert process.exitcode == 0
    assert found == list(kinds().values())


def test_tensors_and_streams_between_processes() -> None:
    """A multiprocessing connection is anything with fileno(); tensors also go through it pickled."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=echo, args=(theirs, list(kinds().values())))
    process.start()
    theirs.close()
    assert ours.recv() == list(kinds().values())
    assert list(hw.StreamReader(ours, timeout=PATIENCE)) == list(kinds().values())
    process.join(PATIENCE)
    assert process.exitcode == 0
    ours.close()


@pytest.mark.parametrize("name", kinds())
def test_what_a_stream_gave_can_be_pickled(name: str) -> None:
    (tensor,) = hw.StreamReader(io.BytesIO(encoded([kinds()[name]])))
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(tensor, protocol=5, buffer_callback=buffers.append)
    assert pickle.loads(data, buffers=buffers) == tensor


def test_errors_cross_processes_whole() -> None:
    """An error of a reader comes out of an executor as what it was."""
    _, error = drained(hw.StreamReader(io.BytesIO(encoded([sample(0)])[:-64])))
    copied = pickle.loads(pickle.dumps(error))
    assert isinstance(error, hw.TruncatedError)
    assert (type(copied), str(copied), copied.code, copied.where) == (type(error), str(error), error.code, error.where)
    assert (copied.needed, copied.available, copied.offset) == (error.needed, error.available, error.offset)


def forked(compression: str, before: str) -> None:
    """Run in a child: a writer made (and, where said, used) before a fork is used behind it."""
    signal.alarm(30)
    warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on, of forks beside threads
    options: dict[str, Any] = {"compression": compression} if compression != "raw" else {}
    read, write = os.pipe()
    writer = hw.StreamWriter(write, **options)
    if before == "used":
        writer.write(sample(0))  # fits in the pipe
    gc.collect()
    child = os.fork()
    if not child:
        signal.alarm(10)
        os.close(read)
        for layer in range(1, 6):
            writer.write(large(layer, noise=True, pages=2))
        writer.finish()
        writer.close()
        os._exit(0)
    os.close(write)
    tensors, error = drained(hw.StreamReader(read))
    _, status = os.waitpid(child, 0)
    first = [0] if before == "used" else []
    assert status == 0, f"the child ended with {status}; {error}"
    assert error is None
    assert [t.layer_index for t in tensors] == [*first, 1, 2, 3, 4, 5]


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("before", ["used", "made"])
@pytest.mark.parametrize("compression", ["raw", "zstd"])
def test_a_writer_goes_on_behind_a_fork(compression: str, before: str) -> None:
    """The thread that sends compressed frames is not there in the child: no reason to wait for it for ever."""
    run_child("test_stream_sharing", "forked", compression, before)


def forked_readers() -> None:
    """Run in a child: each of four forks reads a stream of its own, compressed, with threads."""
    signal.alarm(60)
    warnings.simplefilter("ignore", DeprecationWarning)
    data = encoded([large(i, pages=600) for i in range(2)], compression="zstd")
    expected = list(hw.iter_decode(data, threads=2))
    for _ in range(4):
        child = os.fork()
        if not child:
            good = list(hw.StreamReader(io.BytesIO(data), threads=2)) == expected
            os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_threads_of_chunks_are_not_lost_in_a_fork() -> None:
    run_child("test_stream_sharing", "forked_readers")
