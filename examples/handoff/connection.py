"""How tensors get from one process to another: what a transport is, and the one over sockets.

It has a listener for the decode process and senders for prefill ranks. Each connection carries one stream of one batch.
Both ends have a meter, so that moving bytes can be told from encoding and decoding them.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import hurray_wire as hw

TIMEOUT = 120.0
Address = Any


@dataclass
class Meter:
    """Bytes that were moved, and the seconds in which nothing but that was done, waiting for the peer included."""

    bytes: int = 0
    seconds: float = 0.0

    def moved(self, call: Callable[[], int]) -> int:
        """Make a call that moves bytes and says how many."""
        begun = time.perf_counter()
        try:
            count = call()
            self.bytes += count
            return count
        finally:
            self.seconds += time.perf_counter() - begun


class Sender(Protocol):
    """One stream to the decode process; leaving its context completes it."""

    meter: Meter

    def write(self, tensor: hw.BlockPagedTensor) -> None:
        """Send a layer's tensor: the pages that its sequences name."""

    def __enter__(self) -> Sender: ...
    def __exit__(self, *error: Any) -> None: ...


class Arrival(Protocol):
    """A tensor whose header is here."""

    def read(self) -> hw.BlockPagedTensor:
        """Receive the payload."""


class Stream(Protocol):
    """One stream from a prefill rank."""

    meter: Meter

    def arrivals(self, expect: Mapping[str, Any]) -> Iterator[Arrival]:
        """Headers in order, to the last; one that is not as expected is a MismatchError, its payload not read."""

    def __enter__(self) -> Stream: ...
    def __exit__(self, *error: Any) -> None: ...


class Listener(Protocol):
    """Where prefill ranks connect to."""

    address: Address

    def accept(self) -> Stream:
        """The next connection."""

    def close(self) -> None:
        """Take no more."""


class Transport(Protocol):
    """A way from prefill ranks to the decode process; each process makes one of its own."""

    def listen(self) -> Listener:
        """For the decode process."""

    def connect(self, address: Address, compression: str | None) -> Sender:
        """For a prefill rank: a stream to a listener."""


class MeteredSocket(socket.socket):
    """A socket that counts what it moves."""

    def __init__(self, connection: socket.socket, meter: Meter) -> None:
        super().__init__(fileno=connection.detach())
        self.settimeout(TIMEOUT)  # its own, so that waiting is within the calls that are metered
        self.meter = meter

    def sendmsg(self, *arguments: Any) -> int:
        """As the socket's."""
        return self.meter.moved(lambda: socket.socket.sendmsg(self, *arguments))

    def recv_into(self, *arguments: Any) -> int:
        """As the socket's."""
        return self.meter.moved(lambda: socket.socket.recv_into(self, *arguments))

    def recvmsg_into(self, *arguments: Any) -> tuple[int, list[Any], int, Any]:
        """As the socket's, for callers that want the count alone."""
        return self.meter.moved(lambda: socket.socket.recvmsg_into(self, *arguments)[0]), [], 0, None


class SocketSender:
    """A stream of HRKV frames over TCP."""

    def __init__(self, address: Address, compression: Any) -> None:
        self.meter = Meter()
        self._socket = MeteredSocket(socket.create_connection(address, timeout=TIMEOUT), self.meter)
        self._writer = hw.StreamWriter(self._socket, pages="live", compression=compression)

    def write(self, tensor: hw.BlockPagedTensor) -> None:
        """Send a frame."""
        self._writer.write(tensor)

    def __enter__(self) -> SocketSender:
        return self

    def __exit__(self, *error: Any) -> None:
        with self._socket:
            self._writer.__exit__(*error)


class SocketStream:
    """What arrives over one TCP connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.meter = Meter()
        self._socket = MeteredSocket(connection, self.meter)

    def arrivals(self, expect: Mapping[str, Any]) -> Iterator[hw.FrameHeader]:
        """Frames whose payload has not been read."""
        with hw.StreamReader(self._socket, expect=expect) as reader:
            yield from iter(reader.next_header, None)

    def __enter__(self) -> SocketStream:
        return self

    def __exit__(self, *error: Any) -> None:
        self._socket.close()


class SocketListener:
    """A TCP port on loopback."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(TIMEOUT)
        self.address: Address = self._server.getsockname()

    def accept(self) -> SocketStream:
        """The next connection."""
        connection, _ = self._server.accept()
        return SocketStream(connection)

    def close(self) -> None:
        """Take no more."""
        self._server.close()


class SocketTransport:
    """HRKV frames over TCP."""

    def listen(self) -> SocketListener:
        """A port on loopback."""
        return SocketListener()

    def connect(self, address: Address, compression: str | None) -> SocketSender:
        """A connection a stream."""
        return SocketSender(address, compression)
