"""Sources and sinks: whatever moves bytes, behind two calls. The only I/O of the package below its command line.

A source fills a vector of memory and says how many bytes it gave, 0 at the end; a sink takes from a vector and says
how many it took. Short transfers are the caller's loop to continue. Here the system's own limits are met: how many
pieces a call takes, how many bytes, calls that are interrupted or would block.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

Vector = list[memoryview]

_MOST_PIECES = min(os.sysconf("SC_IOV_MAX"), 1024) if hasattr(os, "sysconf") else 16
_MOST_BYTES = 1 << 30
"""A call moves at most 0x7ffff000 bytes, whatever it is asked."""
_MOST_WHOLE = 256 << 20


class Source(Protocol):
    """Where a stream comes from."""

    one_stream: bool
    """A connection, which may carry something else behind a stream: read not one byte more."""

    def fill(self, vector: Vector) -> int:
        """Bytes written into the vector's memory from its beginning; 0 at the end."""

    def close(self) -> None:
        """Give back what this end opened."""


class Sink(Protocol):
    """Where a stream goes."""

    def take(self, vector: Vector) -> int:
        """Bytes taken from the vector's beginning, at least one."""

    def commit(self) -> None:
        """The stream is whole."""

    def close(self) -> None:
        """Give back what this end opened; what was not committed must not look whole."""


def bounded(vector: Sequence[memoryview]) -> Vector:
    """As much of a vector's beginning as one call takes."""
    pieces: Vector = []
    room = _MOST_BYTES
    for piece in vector[:_MOST_PIECES]:
        pieces.append(piece[:room])
        room -= len(pieces[-1])
        if not room:
            break
    return pieces


def advanced(vector: Vector, count: int) -> Vector:
    """What of a vector is left behind its first `count` bytes."""
    for i, piece in enumerate(vector):
        if count < len(piece):
            return [piece[count:], *vector[i + 1 :]]
        count -= len(piece)
    return []


def believed(count: int, least: int, most: int, told: str) -> int:
    """What the other side says it moved, if that can be."""
    if not least <= count <= most:
        raise OSError(errno.EIO, f"{told} {count} bytes, by its own account; {least} to {most} can be")
    return int(count)


def wait(fd: int, events: int, timeout: float | None) -> None:
    """Until a descriptor is ready, or TimeoutError after `timeout` seconds without."""
    poll = select.poll()
    poll.register(fd, events)
    if not poll.poll(None if timeout is None else timeout * 1000):
        raise TimeoutError(f"nothing moved for {timeout} seconds")


class _Descriptor:
    """A file descriptor: vectored calls, waiting where it would block."""

    def __init__(self, fd: int, timeout: float | None) -> None:
        self.fd = fd
        self.timeout = timeout

    def moved(self, events: int, call: Callable[[], int]) -> int:
        while True:
            if self.timeout is not None:
                wait(self.fd, events, self.timeout)
            try:
                return call()
            except (BlockingIOError, InterruptedError):
                wait(self.fd, events, self.timeout)


class FdSource(_Descriptor):
    """A file descriptor to read from."""

    def __init__(self, fd: int, timeout: float | None, *, owns: bool = False, one_stream: bool = True) -> None:
        super().__init__(fd, timeout)
        self.owns = owns
        self.one_stream = one_stream

    def fill(self, vector: Vector) -> int:
        pieces = bounded(vector)
        return self.moved(select.POLLIN, lambda: os.readv(self.fd, pieces))

    def close(self) -> None:
        if self.owns:
            fd, self.fd, self.owns = self.fd, -1, False  # another file may get the number at once
            os.close(fd)


class FdSink(_Descriptor):
    """A file descriptor to write to."""

    def take(self, vector: Vector) -> int:
        pieces = bounded(vector)
        if self.timeout is not None and stat.S_ISFIFO(os.fstat(self.fd).st_mode):
            # A pipe that is ready takes so many bytes at once, and would make us wait for more.
            pieces = [vector[0][: select.PIPE_BUF]]
        return self.moved(select.POLLOUT, lambda: os.writev(self.fd, pieces))

    def commit(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """The descriptor is its owner's."""


class SocketSource(_Descriptor):
    """A socket to receive from."""

    one_stream = True

    def __init__(self, sock: socket.socket, timeout: float | None) -> None:
        super().__init__(sock.fileno(), timeout)
        self.sock = sock

    def fill(self, vector: Vector) -> int:
        pieces = bounded(vector)
        if len(pieces) == 1:
            return self.moved(select.POLLIN, lambda: self.sock.recv_into(pieces[0]))
        return self.moved(select.POLLIN, lambda: self.sock.recvmsg_into(pieces)[0])

    def close(self) -> None:
        """The socket is its owner's."""


class SocketSink(_Descriptor):
    """A socket to send to; `owns`: one that was made here, around a descriptor."""

    def __init__(self, sock: socket.socket, timeout: float | None, *, owns: bool = False) -> None:
        super().__init__(sock.fileno(), timeout)
        self.sock = sock
        self.owns = owns

    def take(self, vector: Vector) -> int:
        pieces = bounded(vector)
        # A blocking socket would send all of it or block for ever: with a timeout it is asked for what it can take.
        flags = 0 if self.timeout is None else socket.MSG_DONTWAIT
        return self.moved(select.POLLOUT, lambda: self.sock.sendmsg(pieces, [], flags))

    def commit(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        if self.owns:
            self.sock.close()


class TlsEnd:
    """Either end of a TLS socket: no vectored calls, bytes held back in its own buffer, and waits of its own."""

    one_stream = True

    def __init__(self, sock: Any, timeout: float | None) -> None:
        self.sock = sock
        self.timeout = timeout

    def fill(self, vector: Vector) -> int:
        return self._moved(lambda: self.sock.recv_into(vector[0][:_MOST_BYTES]))

    def take(self, vector: Vector) -> int:
        return self._moved(lambda: self.sock.send(vector[0][:_MOST_BYTES]))

    def _moved(self, call: Callable[[], int]) -> int:
        before = self.sock.gettimeout()
        if self.timeout is not None:
            self.sock.settimeout(self.timeout)
        try:
            while True:
                try:
                    return call()
                except (BlockingIOError, InterruptedError):
                    wait(self.sock.fileno(), select.POLLIN | select.POLLOUT, self.timeout)
                except OSError as error:  # SSLWantReadError and SSLWantWriteError, without importing ssl
                    wanted = {"SSLWantReadError": select.POLLIN, "SSLWantWriteError": select.POLLOUT}
                    if type(error).__name__ not in wanted:
                        raise
                    wait(self.sock.fileno(), wanted[type(error).__name__], self.timeout)
        finally:
            if self.timeout is not None:
                self.sock.settimeout(before)

    def commit(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """The socket is its owner's."""


def _is_tls(sock: Any) -> bool:
    return hasattr(sock, "cipher") and hasattr(sock, "pending")


class FileSource:
    """A binary file object, by its `readinto` or `read`: never by its descriptor, which may be ahead of it."""

    def __init__(self, file: Any, *, one_stream: bool) -> None:
        self.file = file
        self.one_stream = one_stream

    def fill(self, vector: Vector) -> int:
        piece = vector[0][:_MOST_WHOLE]
        if hasattr(self.file, "readinto"):
            while True:
                count = self.file.readinto(piece)
                if count is not None:
                    return believed(count, 0, len(piece), "the file gave")
                wait(self.file.fileno(), select.POLLIN, None)  # a raw file that would block says None
        data = self.file.read(len(piece))
        believed(len(data), 0, len(piece), "the file gave")
        piece[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """The file is its owner's."""


class FileSink:
    """A binary file object, by its `write`, which may take less than it is given."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def take(self, vector: Vector) -> int:
        piece = vector[0][:_MOST_WHOLE]
        while True:
            count = self.file.write(piece)
            if count is not None:
                return believed(count, 1, len(piece), "the file took")
            wait(self.file.fileno(), select.POLLOUT, None)

    def commit(self) -> None:
        if hasattr(self.file, "flush"):
            self.file.flush()

    def close(self) -> None:
        """The file is its owner's."""


class CallSource:
    """`source(memoryview) -> int`."""

    one_stream = True

    def __init__(self, call: Callable[[memoryview], int]) -> None:
        self.call = call

    def fill(self, vector: Vector) -> int:
        return believed(self.call(vector[0]), 0, len(vector[0]), "the source gave")

    def close(self) -> None:
        """Nothing to give back."""


class CallSink:
    """`sink(list of memoryviews)`, which takes all of it (None) or says how many bytes it took."""

    def __init__(self, call: Callable[[Vector], int | None]) -> None:
        self.call = call

    def take(self, vector: Vector) -> int:
        count = self.call(vector)
        total = sum(map(len, vector))
        return total if count is None else believed(count, 1, total, "the sink took")

    def commit(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing to give back."""


class PathSink(FdSink):
    """A file written beside its path and renamed over it when the stream is whole."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.fspath(path))
        beside = self.path.parent / f".hurray_wire-{os.urandom(8).hex()}.part"
        # Not mkstemp: its mode is private, and a stream's file is everybody's default.
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        super().__init__(fd, None)
        self.beside: Path | None = beside

    def commit(self) -> None:
        if self.beside is not None:
            os.fsync(self.fd)
            self.beside.replace(self.path)
            self.beside = None

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self.beside is not None:
            self.beside.unlink(missing_ok=True)
            self.beside = None


def check_timeout(timeout: float | None) -> None:
    """A timeout is a number of seconds, or None for no end of patience.

    Raises:
        TypeError: no number. ValueError: negative, or not a number.
    """
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be seconds or None, not {timeout!r}")
    if not timeout >= 0:
        raise ValueError(f"timeout must be at least 0 seconds, not {timeout}")


def source_of(source: Any, timeout: float | None) -> Source:
    """The source behind a path, file object, socket, descriptor or callable.

    Raises:
        TypeError: none of these. OSError of opening a path passes through.
    """
    check_timeout(timeout)
    if isinstance(source, str | os.PathLike):
        return FdSource(os.open(source, os.O_RDONLY | os.O_CLOEXEC), None, owns=True, one_stream=False)
    if isinstance(source, socket.socket):
        return TlsEnd(source, timeout) if _is_tls(source) else SocketSource(source, timeout)
    if isinstance(source, int) and not isinstance(source, bool):
        return FdSource(source, timeout)
    if hasattr(source, "readinto") or hasattr(source, "read"):
        return FileSource(source, one_stream=_is_connection(source))
    if hasattr(source, "fileno"):
        return FdSource(source.fileno(), timeout)
    if callable(source):
        return CallSource(source)
    raise TypeError(
        f"a source is a path, binary file, socket, file descriptor or callable, not {type(source).__name__}"
    )


def _is_connection(file: Any) -> bool:
    """Whether a file object is a pipe or socket, behind which something else may come."""
    try:
        return not file.seekable()
    except AttributeError:
        return False


def sink_of(sink: Any, timeout: float | None) -> Sink:
    """The sink behind a path, file object, socket, descriptor or callable; errors as `source_of`."""
    check_timeout(timeout)
    if isinstance(sink, str | os.PathLike):
        return PathSink(sink)
    if isinstance(sink, socket.socket):
        return TlsEnd(sink, timeout) if _is_tls(sink) else SocketSink(sink, timeout)
    if isinstance(sink, int) and not isinstance(sink, bool):
        return _fd_sink(sink, timeout)
    if hasattr(sink, "write"):
        return FileSink(sink)
    if hasattr(sink, "fileno"):
        return _fd_sink(sink.fileno(), timeout)
    if callable(sink):
        return CallSink(sink)
    raise TypeError(f"a sink is a path, binary file, socket, file descriptor or callable, not {type(sink).__name__}")


def _fd_sink(fd: int, timeout: float | None) -> Sink:
    if timeout is not None and stat.S_ISSOCK(os.fstat(fd).st_mode):
        return SocketSink(socket.socket(fileno=os.dup(fd)), timeout, owns=True)
    return FdSink(fd, timeout)
