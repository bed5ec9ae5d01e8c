"""A sender killed at any moment is noticed every time, and everything handed out before was whole."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
import warnings
from typing import Any

import numpy as np
import pytest
from stream_helpers import TENSOR, large, run_child, sample
from stream_ways import drained

import hurray_wire as hw

LAYERS = 6
FORMS: dict[str, dict[str, Any]] = {
    "raw": {},
    "zstd": {"compression": "zstd"},
    "scattered": {"pages": "live", "chunk_bytes": 8192},
}


def tensor(layer: int) -> TENSOR:
    return sample(layer) if layer % 2 else large(layer, pages=5)


def killed_at(byte: int) -> Any:
    """A sink that sends so many bytes and then dies, as by the kernel's hand."""
    left = [byte]

    def sink(vector: list[memoryview]) -> int:
        piece = vector[0][: left[0]]
        if not piece:
            os.kill(os.getpid(), signal.SIGKILL)
        sent = os.write(1, piece)
        left[0] -= sent
        return sent

    return sink


def send(fd: int, byte: int, form: dict[str, Any]) -> None:
    """In a fork: send the layers, and die behind so many bytes; with a negative count send without end."""
    os.dup2(fd, 1)
    sink = killed_at(byte) if byte >= 0 else 1
    with hw.StreamWriter(sink, **form) as writer:
        for layer in range(LAYERS if byte >= 0 else 10**6):
            writer.write(tensor(layer % LAYERS))


def receive(sock: socket.socket, into: bool) -> tuple[int, BaseException | None]:
    """How many tensors came whole, and what ended them."""
    reader = hw.StreamReader(sock)
    whole = 0
    try:
        while True:
            header = reader.next_header()
            if header is None:
                return whole, None
            expected = tensor(whole % LAYERS)
            if into:
                pool = np.zeros(expected.page_pool.shape, expected.page_pool.dtype)
                found = header.read_into(pool, np.arange(expected.num_pages)[::-1])
                assert found.same_tokens(expected)
            else:
                assert header.read().same_tokens(expected)
            whole += 1
    except (hw.HurrayWireError, OSError) as error:
        return whole, error


def experiment(name: str, times: str) -> None:
    """Run in a child: so many senders, killed at random bytes and, every fourth, at a random moment from outside."""
    signal.alarm(100)
    warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on, of forks beside threads (NumPy has some)
    rng = random.Random(name)
    form = FORMS[name]
    ends = np.cumsum([0, *(len(hw.encode(tensor(n), **form)) for n in range(LAYERS)), 64]).tolist()
    wholes = set()
    for turn in range(int(times)):
        moment = turn % 4 == 3
        frame = rng.randrange(LAYERS + 1)  # the closing one too
        cut = rng.randrange(ends[frame], ends[frame + 1])
        ours, theirs = socket.socketpair()
        child = os.fork()
        if not child:
            ours.close()
            send(theirs.fileno(), -1 if moment else cut, form)
            os._exit(7)
        theirs.close()
        if moment:
            time.sleep(rng.random() * 0.01)
            os.kill(child, signal.SIGKILL)
        whole, error = receive(ours, into=turn % 2 == 0)
        ours.close()
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), status
        assert isinstance(error, hw.TruncatedError), (turn, cut, whole, error)
        assert moment or whole == frame
        wholes.add(whole)
    assert wholes >= set(range(LAYERS + 1)), wholes


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("form", FORMS)
def test_killing_the_sender_is_noticed_every_time(form: str) -> None:
    """210 times in all."""
    run_child("test_stream_kill", "experiment", form, 70)


def test_a_reset_connection_is_noticed() -> None:
    """TCP: a peer that resets is an OSError, and the reader is closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        with ours:
            theirs.sendall(hw.encode(large(0))[:100_000])
            ours.sendall(b"never read")
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            theirs.close()
            reader = hw.StreamReader(ours, timeout=30)
            with pytest.raises((ConnectionResetError, hw.TruncatedError)):
                next(reader)
            assert drained(reader) == ([], None)
