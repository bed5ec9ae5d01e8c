"""Attack 56: readers, writers, decoders and compressors used from many threads at once, across fork and spawn.

What they share is what the package remembers of one call for the next: descriptors, section tables, zstd contexts.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from attacks import ATTACKS
from stream_helpers import encoded, large, run_child, sample
from support import worked

import hurray_wire as hw

THREADS, ROUNDS = 8, 12


def job(n: int) -> list[str]:
    """Everything at once, on data that is this round's own: encode, compress, decode, stream, open, refuse."""
    told = []
    tensor = large(n % 3, pages=6).replace(layer_index=n)
    for options in ({}, {"compression": "zstd", "chunk_bytes": 4096, "threads": 2}, {"framing": "bare"}):
        blob = hw.encode(tensor, **options)
        found = hw.decode(blob, threads=2)
        told.append("same" if found.page_pool.tobytes() == tensor.page_pool.tobytes() else "differs")
        pool = np.zeros((6, *tensor.page_pool.shape[1:]), tensor.page_pool.dtype)
        into = hw.decode_into(blob, pool, np.arange(6)[::-1])
        told.append("same" if into.page_pool[::-1].tobytes() == tensor.page_pool.tobytes() else "differs")
    with hw.open_frame(hw.encode(tensor, compression="zstd")) as frame:
        told.append("same" if frame.gather(0).tobytes() == tensor.gather(0).tobytes() else "differs")
    data = encoded([sample(n), sample(n + 1)], compression="zstd" if n % 2 else None)
    told.append(f"{[t.layer_index for t in hw.StreamReader(io.BytesIO(data))] == [n, n + 1]}")
    for number in (9, 11, 26, 31, 35):
        for make in list(ATTACKS[number].variants.values())[n % 5 :: 11]:
            try:
                hw.decode(make())
                told.append("accepted")
            except hw.HurrayWireError as error:
                told.append(str(error.code))
    return told


def together(rounds: int = ROUNDS) -> None:
    """Many threads, all of them beginning at once; each must say what one alone says."""
    alone = [job(n) for n in range(rounds)]
    assert not any({"differs", "accepted", "False"} & set(told) for told in alone)
    barrier = threading.Barrier(THREADS)

    def work(start: int) -> list[list[str]]:
        barrier.wait(60)
        return [job((start + n) % rounds) for n in range(rounds)]

    switched = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # between any two instructions, so to say
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            for start, found in enumerate(pool.map(work, range(THREADS))):
                assert found == [alone[(start + n) % rounds] for n in range(rounds)]
    finally:
        sys.setswitchinterval(switched)


def test_many_threads_at_once() -> None:
    together()


def test_writers_of_many_threads_share_no_frame() -> None:
    """One writer a thread, one that all share: every stream is sound and holds what was written to it."""
    shared = io.BytesIO()
    owns = [io.BytesIO() for _ in range(THREADS)]
    with hw.StreamWriter(shared, compression="zstd") as everybodys:

        def write(n: int) -> None:
            with hw.StreamWriter(owns[n], compression="zstd" if n % 2 else None) as own:
                for layer in range(6):
                    own.write(sample(10 * n + layer))
                    everybodys.write(sample(10 * n + layer))

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(write, range(THREADS)))
    for n, sink in enumerate(owns):
        assert [t.layer_index for t in hw.StreamReader(io.BytesIO(sink.getvalue()))] == [10 * n + i for i in range(6)]
    layers = [t.layer_index for t in hw.StreamReader(io.BytesIO(shared.getvalue()))]
    assert sorted(map(str, layers)) == sorted(str(10 * n + i) for n in range(THREADS) for i in range(6))
    for n in range(THREADS):  # each thread's frames in the order in which it wrote them
        assert [layer for layer in layers if layer is not None and layer // 10 == n] == [10 * n + i for i in range(6)]


def forked() -> None:
    """Run in a child: threads are at work, and the process forks in their midst; parent and children all go on."""
    warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is what is tried
    expected = [job(n) for n in range(3)]
    stop = threading.Event()

    def busy(n: int) -> None:
        while not stop.is_set():
            job(n % 3)

    threads = [threading.Thread(target=busy, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    statuses = []
    for _ in range(4):
        child = os.fork()
        if not child:
            os._exit(0 if [job(n) for n in range(3)] == expected else 1)
        statuses.append(os.waitpid(child, 0)[1])
    stop.set()
    for thread in threads:
        thread.join()
    assert [job(n) for n in range(3)] == expected
    sys.stdout.write(f"{statuses}")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_amid_threads() -> None:
    assert run_child("test_attacks_threads", "forked") == "[0, 0, 0, 0]"


def spawned(method: str) -> None:
    """Run in a child: workers of either kind decode what this process encoded, and send tensors back."""
    context: Any = multiprocessing.get_context(method)
    blobs = [hw.encode(worked(layer_index=n), compression="zstd" if n % 2 else None) for n in range(8)]
    with context.Pool(2) as pool:
        found = pool.map(hw.decode, blobs)
    assert found == [worked(layer_index=n) for n in range(8)]
    sys.stdout.write("ok")


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_workers_of_every_start_method(method: str) -> None:
    assert run_child("test_attacks_threads", "spawned", method) == "ok"


def test_a_decoder_fed_by_many_threads_in_turn() -> None:
    """One after the other, each in a thread of its own: nothing of a decoder belongs to a thread."""
    data = encoded([sample(n) for n in range(4)], compression="zstd")
    decoder, found = hw.FrameDecoder(threads=2), []

    def feed(at: int) -> None:
        decoder.feed(data[at : at + 97])
        while isinstance(tensor := decoder.next(), hw.BlockPagedTensor):
            found.append(tensor.layer_index)

    for at in range(0, len(data), 97):
        thread = threading.Thread(target=feed, args=(at,))
        thread.start()
        thread.join()
    decoder.close()
    assert found == [0, 1, 2, 3]
