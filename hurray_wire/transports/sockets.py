"""One-sided reads over plain TCP sockets, by threads: what the interface costs where there is no engine to plug into.

A thread for each connection answers requests out of registered memory, and out of nothing else: a request names the
keys of the regions that it reads. It needs no package, and trusts the network as much as the other engines do: keys
travel in the clear.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from os import urandom
from struct import Struct
from typing import NamedTuple

import numpy as np

from hurray_wire.arrays import Bytes, address
from hurray_wire.errors import Code, TransferError
from hurray_wire.transports.engine import Engine, Region
from hurray_wire.transports.memory import region_bytes
from hurray_wire.transports.runs import Runs
from hurray_wire.transports.socket_reader import (
    GRANTED,
    MESSAGE,
    READ,
    REFUSED,
    REQUEST,
    VECTOR,
    Reader,
    Work,
    fill,
    past,
)

_HELLO = Struct("<4s16s")
_ACCESS = Struct("<qq16s")
_MAGIC = b"HRTS"
_MOST_RUNS = 1 << 22
_CONNECT_SECONDS = 10.0
_REST_SECONDS = 2e-3
"""Between two looks at messages while a read goes on, whose end is told at once: each look takes time from it."""


class _Peer(NamedTuple):
    host: str
    port: int


class SocketEngine(Engine):
    """One end over TCP.

    Args:
        host: the address to listen at.
        port: 0 for one that is free.
    """

    message_bytes = 1 << 20

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._name = urandom(8).hex()
        self._server = socket.create_server((host, port))
        self._host, self._port = self._server.getsockname()[:2]
        self._peers: dict[str, _Peer] = {}
        self._admitted: dict[str, dict[tuple[int, int], bytes]] = {}
        self._regions: dict[bytes, tuple[Bytes, Region]] = {}
        self._heard: deque[tuple[str, bytes]] = deque()
        self._speaking: dict[str, socket.socket] = {}
        self._readers: dict[str, Reader] = {}
        self._accepted: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="hurray_wire sockets", daemon=True)  # type: ignore[arg-type]
        thread.start()
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]

    # The engine.

    def address(self) -> bytes:
        return f"{self._name} {self._host} {self._port}".encode()

    def connect(self, address: bytes) -> str:
        try:
            name, host, port = address.decode().split(" ")
            host.encode("idna")  # as connecting does: ValueError for what can be no name
            self._peers[name] = _Peer(host, int(port))
        except ValueError:
            message = f"{address[:80]!r} is no address of a socket engine"
            raise TransferError(message, code=Code.MEMORY_REFUSED, where="address") from None
        return name

    def register(self, memory: Bytes) -> Region:
        key = urandom(16)
        region = region_bytes(memory, key, _ACCESS.pack(address(memory), memory.size, key))
        with self._lock:
            self._regions[key] = memory, region
        return region

    def deregister(self, region: Region) -> None:
        with self._lock:
            self._regions.pop(region.token, None)

    def admit(self, peer: str, access: bytes) -> None:
        if len(access) != _ACCESS.size:
            raise TransferError("that is no access to memory", code=Code.MEMORY_REFUSED, where="access")
        start, nbytes, key = _ACCESS.unpack(access)
        self._admitted.setdefault(peer, {})[start, nbytes] = key

    def post(self, peer: str, runs: Runs) -> Work:
        if peer not in self._peers:
            raise TransferError(f"{peer} is not connected", code=Code.PEER_LOST, where="peer")
        if peer not in self._readers:
            self._readers[peer] = Reader(peer, partial(self._connected, peer), self._local)
        work = Work(peer, runs, list(dict.fromkeys(self._keys(peer, runs))))
        self._readers[peer].post(work)
        return work

    def _keys(self, peer: str, runs: Runs) -> Iterator[bytes]:
        """The keys of the regions that the runs touch."""
        for (start, nbytes), key in self._admitted.get(peer, {}).items():
            if bool(((runs.source >= start) & (runs.source < start + nbytes)).any()):
                yield key

    def poll(self, work: Work) -> bool:
        if not work.finished.is_set():
            return False
        if work.error is not None:
            raise work.error
        return True

    def rest(self, work: Work, seconds: float) -> None:
        work.finished.wait(max(seconds, _REST_SECONDS))

    def abandon(self, work: Work) -> bool:
        return self._readers[work.peer].abandon(work)

    def tell(self, peer: str, message: bytes) -> None:
        try:
            if peer not in self._speaking:
                self._speaking[peer] = self._connected(peer)
            self._speaking[peer].sendall(REQUEST.pack(MESSAGE, len(message), 0, 0) + message)
        except (OSError, KeyError) as error:
            broken = self._speaking.pop(peer, None)
            if broken is not None:
                broken.close()
            raise TransferError(f"{peer}: {error}", code=Code.PEER_LOST, where="peer") from None

    def hear(self) -> list[tuple[str, bytes]]:
        heard = []
        while self._heard:
            heard.append(self._heard.popleft())
        return heard

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._threads[0].join()  # from here on nobody is accepted
        for reader in self._readers.values():
            reader.close(_CONNECT_SECONDS)
        with self._lock:
            self._regions.clear()
            open_ones = [*self._speaking.values(), *self._accepted]
        for connection in open_ones:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_CONNECT_SECONDS)
        for connection in open_ones:
            connection.close()

    def _connected(self, peer: str) -> socket.socket:
        host, port = self._peers[peer]
        connection = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(_HELLO.pack(_MAGIC, self._name.encode()))
            connection.settimeout(None)
        except OSError:
            connection.close()
            raise
        return connection

    def _local(self, start: int, nbytes: int) -> memoryview:
        """Registered memory of this end."""
        with self._lock:
            return self._inside(self._regions.keys(), start, nbytes)

    def _inside(self, keys: object, start: int, nbytes: int) -> memoryview:
        for key in keys:  # type: ignore[attr-defined]
            memory, region = self._regions.get(key, (None, None))
            if memory is not None and region is not None and region.start <= start:
                at = start - region.start
                if at + nbytes <= region.nbytes:
                    return memoryview(memory)[at : at + nbytes]
        raise TransferError("memory that is not registered", code=Code.MEMORY_REFUSED, where="access")

    # Serving.

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # closed
            with self._lock:
                self._accepted.add(connection)
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            magic, name = _HELLO.unpack(_exactly(connection, _HELLO.size))
            while magic == _MAGIC and self._served(connection, name.decode()):
                pass
        except (OSError, TransferError, ValueError):
            pass  # whoever it is speaks something else
        finally:
            with self._lock:
                self._accepted.discard(connection)
            connection.close()

    def _served(self, connection: socket.socket, name: str) -> bool:
        """Do what is asked next; False for what cannot be."""
        kind, length, runs, keys = REQUEST.unpack(_exactly(connection, REQUEST.size))
        if kind == MESSAGE and length <= self.message_bytes:
            self._heard.append((name, _exactly(connection, length)))
        elif kind == READ and runs <= _MOST_RUNS and keys <= _MOST_RUNS:
            self._answer(connection, runs, keys)
        else:
            return False
        return True

    def _answer(self, connection: socket.socket, runs: int, keys: int) -> None:
        named = _exactly(connection, 16 * keys)
        allowed = [named[i : i + 16] for i in range(0, len(named), 16)]
        pairs = np.frombuffer(_exactly(connection, 16 * runs), "<i8").reshape(-1, 2)
        asked = pairs.tolist()
        try:
            with self._lock:
                for start, nbytes in asked:
                    self._inside(allowed, start, nbytes)
        except TransferError:
            connection.sendall(REFUSED)
            return
        connection.sendall(GRANTED)
        for at in range(0, len(asked), VECTOR):
            with self._lock:  # memory that has been deregistered meanwhile is not read
                vector = [self._inside(allowed, start, nbytes) for start, nbytes in asked[at : at + VECTOR]]
            while vector:
                vector = past(vector, connection.sendmsg(vector))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    if count:
        fill(connection, [memoryview(data)])
    return bytes(data)
