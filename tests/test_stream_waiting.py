"""Peers that are slow, stall or speak TLS; signals; descriptors that would block: waiting, and TimeoutError."""

from __future__ import annotations

import io
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from stream_helpers import PATIENCE, OnlyFileno, encoded, fed, large, received, sample, send_all

import hurray_wire as hw

SHORT = 0.2
"""Seconds after which a stalled peer is given up in these tests."""
BIG = large(0, pages=256)
"""2 MiB: more than sockets and pipes hold."""


def outcome(call: Callable[[], Any], unblock: Callable[[], None]) -> BaseException | None:
    """What a call raised; `unblock` frees it where it hangs, which fails the test."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)
        else:
            raised.append(None)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(SHORT + 6)
    hung = thread.is_alive()
    unblock()
    thread.join(PATIENCE)
    assert not hung, "still waiting, long after its timeout"
    return raised[0]


# A sender that stalls.


@pytest.mark.parametrize("sent", [0, 5, 30, 300, 700])
@pytest.mark.parametrize("kind", ["socket", "nonblocking", "pipe", "fileno"])
def test_a_sender_that_stalls_is_a_timeout(kind: str, sent: int) -> None:
    blob = hw.encode(sample(0))[:sent]
    read, write = os.pipe()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        os.write(write, blob)
        theirs.sendall(blob)
        ours.setblocking(kind != "nonblocking")
        source: Any = {"socket": ours, "nonblocking": ours, "pipe": read, "fileno": OnlyFileno(read)}[kind]
        reader = hw.StreamReader(source, timeout=SHORT)
        error = outcome(lambda: next(reader), theirs.close)
        assert type(error) is TimeoutError
        assert list(reader) == []
    os.close(read)
    os.close(write)


def test_a_sockets_own_timeout_passes_through() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(SHORT)
        assert type(outcome(lambda: next(hw.StreamReader(ours)), theirs.close)) is TimeoutError


def test_a_timeout_while_pages_are_received_names_them() -> None:
    """`read_into`: "whatever fails then has `.pages_written`"; a peer that stalls is the commonest failure of all."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        blob = hw.encode(large(0, pages=8), chunk_bytes=8192)
        theirs.sendall(blob[: len(blob) // 2])
        pool = np.zeros((10, 16, 4, 64), np.uint16)
        header = hw.StreamReader(ours, timeout=SHORT).next_header()
        assert header is not None
        error = outcome(lambda: header.read_into(pool, range(8)), theirs.close)
        assert type(error) is TimeoutError
        written = getattr(error, "pages_written", None)
        assert written is not None
        assert {0, 1, 2} <= set(np.asarray(written).tolist()) <= set(range(8))
        assert not np.delete(pool, written, axis=0).any()


def test_a_slow_sender_is_no_stalled_one() -> None:
    """The timeout is of one wait, not of a whole frame."""
    ours, theirs = socket.socketpair()
    blob = hw.encode(sample(0))

    def slowly() -> Iterator[bytes]:
        for at in range(0, len(blob), 80):
            time.sleep(0.12)
            yield blob[at : at + 80]

    with ours, theirs, fed(theirs.sendall, slowly(), theirs.close):
        assert next(hw.StreamReader(ours, timeout=1.5)) == sample(0)


# A receiver that stalls.


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("kind", ["socket", "nonblocking", "pipe", "nonblocking-pipe", "fileno-of-a-socket"])
def test_a_receiver_that_stalls_is_a_timeout(kind: str, compression: Any) -> None:
    """On sockets and descriptors, blocking ones too (design/api.md): a call must not wait for ever for room."""
    read, write = os.pipe()
    ours, theirs = socket.socketpair()
    ours.setblocking(kind != "nonblocking")
    os.set_blocking(write, kind != "nonblocking-pipe")
    sinks: dict[str, Any] = {"pipe": write, "nonblocking-pipe": write, "fileno-of-a-socket": OnlyFileno(ours.fileno())}
    writer = hw.StreamWriter(sinks.get(kind, ours), timeout=SHORT, compression=compression)

    def send() -> None:
        for _ in range(4):
            writer.write(BIG)
        writer.finish()

    closed = [False]

    def unblock() -> None:
        os.close(read)
        theirs.close()
        closed[0] = True

    error = outcome(send, unblock)
    assert type(error) is TimeoutError
    with pytest.raises(ValueError, match="closed"):
        writer.write(BIG)
    ours.close()
    os.close(write)


def test_a_slow_receiver_is_no_stalled_one() -> None:
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    def source(memory: memoryview) -> int:
        time.sleep(0.02)
        return theirs.recv_into(memory[:60000])

    with ours, received(source, theirs.close) as found, hw.StreamWriter(ours, timeout=1.5) as writer:
        writer.write(BIG)
    assert found == [BIG]


# Would block, was interrupted.


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("kind", ["socket", "pipe"])
def test_descriptors_that_would_block_at_both_ends(kind: str, compression: Any) -> None:
    ends: tuple[Any, Any] = os.pipe() if kind == "pipe" else socket.socketpair()
    for end in ends:
        os.set_blocking(end, False) if kind == "pipe" else end.setblocking(False)

    def close(end: Any) -> None:
        os.close(end) if kind == "pipe" else end.close()

    with received(ends[0], lambda: close(ends[0])) as found:
        with hw.StreamWriter(ends[1], compression=compression) as writer:
            for _ in range(3):
                writer.write(BIG)
        close(ends[1])
    assert found == [BIG] * 3


def test_a_raw_file_that_would_block() -> None:
    """A raw file object then says None, to `readinto` and to `write`."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    source, sink = os.fdopen(read, "rb", 0), os.fdopen(write, "wb", 0)
    with sink, received(source, source.close) as found, hw.StreamWriter(sink) as writer:
        writer.write(BIG)
    assert found == [BIG]


@contextmanager
def alarms(handler: Callable[..., None]) -> Iterator[None]:
    """A signal every few milliseconds."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("timeout", [None, PATIENCE])
def test_signals_interrupt_nothing(timeout: float | None) -> None:
    """EINTR: reading in the main thread, then writing in it."""
    caught: list[int] = []
    ours, theirs = socket.socketpair()
    data = encoded([sample(0), sample(1)])

    def slowly() -> Iterator[bytes]:
        for at in range(0, len(data), 300):
            time.sleep(0.01)
            yield data[at : at + 300]

    with ours, theirs, alarms(lambda signum, frame: caught.append(signum)):
        with fed(theirs.sendall, slowly(), lambda: None):
            assert list(hw.StreamReader(ours, timeout=timeout)) == [sample(0), sample(1)]
        number = len(caught)
        assert number

        def source(memory: memoryview) -> int:
            time.sleep(0.002)
            return theirs.recv_into(memory[:30000])

        with received(source, theirs.close) as found, hw.StreamWriter(ours, timeout=timeout) as writer:
            writer.write(BIG)
    assert found == [BIG]
    assert len(caught) > number


def test_an_exception_of_a_signal_handler_comes_out_and_closes_the_reader() -> None:
    class Stop(BaseException):
        pass

    def stop(number: int, frame: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise Stop

    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(hw.encode(sample(0))[:500])
        reader = hw.StreamReader(ours)
        with pytest.raises(Stop), alarms(stop):
            next(reader)
        assert list(reader) == []


# TLS: a socket too, without vectored calls, and with bytes that the descriptor no longer shows.


def tls_pair() -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    for context in (server, client):
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers("ADH:AECDH:@SECLEVEL=0")  # without certificates
    a, b = socket.socketpair()
    found: list[ssl.SSLSocket] = []
    thread = Thread(target=lambda: found.append(server.wrap_socket(a, server_side=True)), daemon=True)
    thread.start()
    wrapped = client.wrap_socket(b)
    thread.join(PATIENCE)
    return found[0], wrapped


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("timeout", [None, 3])
def test_tls(timeout: float | None, blocking: bool) -> None:
    """What TLS has already decrypted is there to be read, whatever poll says of the descriptor."""
    try:
        ours, theirs = tls_pair()
    except ssl.SSLError as error:
        pytest.skip(f"this OpenSSL has no anonymous ciphers: {error}")
    with ours, theirs:
        ours.setblocking(blocking)
        theirs.setblocking(blocking)
        failed: list[BaseException] = []

        def send() -> None:
            try:
                with hw.StreamWriter(ours, timeout=timeout) as writer:
                    for layer in range(3):
                        writer.write(sample(layer))
                    writer.write(BIG)
            except BaseException as error:
                failed.append(error)

        thread = Thread(target=send, daemon=True)
        thread.start()
        try:
            found = list(hw.StreamReader(theirs, timeout=timeout))
        finally:
            theirs.close()
            thread.join(PATIENCE)
        assert failed == []
        assert found == [sample(0), sample(1), sample(2), BIG]


def test_a_tls_peer_that_stalls_is_a_timeout_and_the_sockets_own_timeout_is_kept() -> None:
    try:
        ours, theirs = tls_pair()
    except ssl.SSLError as error:
        pytest.skip(f"this OpenSSL has no anonymous ciphers: {error}")
    with ours, theirs:
        ours.settimeout(77)
        theirs.sendall(hw.encode(sample(0))[:500])
        reader = hw.StreamReader(ours, timeout=SHORT)
        assert type(outcome(lambda: next(reader), theirs.close)) is TimeoutError
        assert ours.gettimeout() == 77


def test_a_descriptor_of_a_socket_is_left_as_it_was() -> None:
    """With a timeout a socket is made around it; it is the caller's still, and nothing is left open."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for blocking in (True, False):
            ours.setblocking(blocking)
            with hw.StreamWriter(ours.fileno(), timeout=PATIENCE) as writer:
                writer.write(sample(0))
            assert os.get_blocking(ours.fileno()) is blocking
            assert list(hw.StreamReader(theirs.fileno(), timeout=PATIENCE)) == [sample(0)]
        ours.send(b"still open")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_named_pipe(tmp_path: Any) -> None:
    """A path to read from may be a fifo."""
    path = tmp_path / "fifo"
    os.mkfifo(path)

    def send() -> None:
        with closing(io.FileIO(path, "w")) as file:
            send_all(file.fileno())(encoded([sample(0), BIG]))

    thread = Thread(target=send, daemon=True)
    thread.start()
    assert list(hw.StreamReader(path)) == [sample(0), BIG]
    thread.join(PATIENCE)
