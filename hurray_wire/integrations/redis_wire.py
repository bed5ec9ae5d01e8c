"""GET and GETRANGE whose replies go straight into memory.

A client gives values as fresh bytes, assembled from pieces: three to four times what receiving them takes (measured).
Here the connection comes from the client's pool and carries the client's commands; only the replies are read from its
socket, into place. Where a client has no such connection, or anything but a value comes back, the client is asked.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from hurray_wire.arrays import Bytes, as_bytes

_LINE_BYTES = 4096
"""What is read to find a reply's first line: bytes of the value that come with it are copied into place."""


class Request(NamedTuple):
    """A command, where its reply goes, and the part that it asks for."""

    words: tuple[Any, ...]
    memory: Bytes
    part: int


class _Otherwise(Exception):
    """The connection is none that can be read here, or does not say what was expected: ask the client."""


def receive(client: Any, requests: Sequence[Request]) -> list[int]:
    """How many bytes each value has; those are in its memory, as far as they fit. 0 for one that is missing.

    Raises:
        TimeoutError: of the client's socket. The client's own errors pass through.
    """
    try:
        return _directly(client, requests)
    except _Otherwise:
        return [_through_client(client, request) for request in requests]


def _through_client(client: Any, request: Request) -> int:
    data = as_bytes(client.execute_command(*request.words) or b"")
    fits = min(data.size, request.memory.size)
    request.memory[:fits] = data[:fits]
    return int(data.size)


def _directly(client: Any, requests: Sequence[Request]) -> list[int]:
    pool: Any = getattr(client, "connection_pool", None)
    if not hasattr(pool, "get_connection"):
        raise _Otherwise
    try:
        connection = pool.get_connection()
    except TypeError:  # clients of before 2025 want the command's name
        connection = pool.get_connection("GET")
    try:
        return _over(connection, requests)
    except BaseException as error:
        connection.disconnect()  # replies may be on their way: nobody must take them for others
        if any(kind.__name__ == "ConnectionError" for kind in type(error).__mro__):
            raise _Otherwise from error  # the system's or the client's: it had been closed; the client connects anew
        raise
    finally:
        pool.release(connection)


def _over(connection: Any, requests: Sequence[Request]) -> list[int]:
    sock = getattr(connection, "_sock", None)
    if not isinstance(sock, socket.socket) or not hasattr(connection, "pack_commands"):
        raise _Otherwise
    connection.send_packed_command(connection.pack_commands([request.words for request in requests]))
    replies = _Replies(sock)
    found = [replies.value(request.memory) for request in requests]
    if replies.held:
        raise _Otherwise
    return found


class _Replies:
    """Values as the protocol sends them: `$` and a length, the bytes, an end of line."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.held = b""

    def value(self, memory: Bytes) -> int:
        """Read one value into memory; its length, which is that of the memory or this is not the place to read on."""
        line = self._line()
        if line in (b"$-1", b"_"):
            return 0
        if not line.startswith(b"$") or not line[1:].isdigit():
            raise _Otherwise
        length = int(line[1:])
        if length > memory.size:
            raise _Otherwise
        self._into(memoryview(memory)[:length])
        if self._line():
            raise _Otherwise
        return length

    def _line(self) -> bytes:
        while b"\r\n" not in self.held:
            if len(self.held) > _LINE_BYTES:
                raise _Otherwise
            more = self._sock.recv(_LINE_BYTES)
            if not more:
                raise ConnectionResetError("the server closed the connection")
            self.held += more
        line, _, self.held = self.held.partition(b"\r\n")
        return line

    def _into(self, memory: memoryview) -> None:
        at = min(len(memory), len(self.held))
        memory[:at] = self.held[:at]
        self.held = self.held[at:]
        while at < len(memory):
            count = self._sock.recv_into(memory[at:])
            if not count:
                raise ConnectionResetError("the server closed the connection")
            at += count
