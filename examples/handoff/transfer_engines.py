"""The same over a transfer engine, NIXL or Mooncake: offers instead of frames, pages read out of the sender's memory.

`hurray_wire.transports` does the work. A TCP connection beside it tells the two ends of each other, and how many
tensors there are. Nothing is compressed: an engine moves pages as they lie.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import hurray_wire as hw
from handoff.connection import TIMEOUT, Address, Meter

_POLL_SECONDS = 0.05


class EngineTransport:
    """One endpoint of an engine, for all streams of a process."""

    def __init__(self, name: str) -> None:
        self._transports: Any = import_module("hurray_wire.transports")
        if name == "nixl" and not Path("/sys/class/infiniband").exists():
            os.environ.setdefault("UCX_MODULES", "^ib")  # its UCX crashes at exit where it finds no InfiniBand
        self.endpoint = self._transports.endpoint(name)
        self._peers: dict[bytes, str] = {}
        self.offered: dict[str, deque[Any]] = defaultdict(deque)

    def introduced(self, control: socket.socket) -> str:
        """Tell the other end of a connection who this is, and get to know it; gives its name."""
        mine = bytes(self.endpoint.address)
        control.sendall(len(mine).to_bytes(4, "little") + mine)
        theirs = _received(control, int.from_bytes(_received(control, 4), "little"))
        if theirs not in self._peers:
            self._peers[theirs] = self.endpoint.connect(theirs)
        return self._peers[theirs]

    def next_from(self, peer: str, expect: Mapping[str, Any]) -> Any:
        """What a peer offers next; None if it offers nothing for a moment. Offers of others are kept for their turn."""
        try:
            while not self.offered[peer]:
                incoming = self.endpoint.receive(timeout=_POLL_SECONDS, expect=expect)
                self.offered[incoming.peer].append(incoming)
        except TimeoutError:
            return None
        return self.offered[peer].popleft()

    def listen(self) -> EngineListener:
        """Where prefill ranks introduce themselves."""
        return EngineListener(self)

    def connect(self, address: Address, compression: str | None) -> EngineSender:
        """A stream to a listener."""
        if compression is not None:
            raise ValueError("a transfer engine moves pages as they lie: nothing is compressed")
        return EngineSender(self, address)


class EngineListener:
    """A TCP port on loopback, for introductions."""

    def __init__(self, transport: EngineTransport) -> None:
        self._transport = transport
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(TIMEOUT)
        self.address: Address = self._server.getsockname()

    def accept(self) -> EngineStream:
        """The next stream."""
        control, _ = self._server.accept()
        control.settimeout(TIMEOUT)
        return EngineStream(self._transport, control)

    def close(self) -> None:
        """Take no more."""
        self._server.close()
        self._transport.endpoint.close()


class EngineSender:
    """Offers tensors, and holds their memory registered until all have been read."""

    def __init__(self, transport: EngineTransport, address: Address) -> None:
        self.meter = Meter()
        self._control = socket.create_connection(address, timeout=TIMEOUT)
        self._transport = transport
        self._peer = transport.introduced(self._control)
        self._offers: list[tuple[Any, Any]] = []

    def write(self, tensor: hw.BlockPagedTensor) -> None:
        """Offer a tensor."""
        registration = self._transport.endpoint.register(tensor.page_pool)
        outgoing = self._transport.endpoint.send(self._peer, tensor, pages="live")
        self.meter.bytes += len(hw.encode_header(tensor, pages="live")) + outgoing.nbytes
        self._offers.append((registration, outgoing))

    def __enter__(self) -> EngineSender:
        return self

    def __exit__(self, *error: Any) -> None:
        begun = time.perf_counter()
        with self._control:
            try:
                if error[0] is None:
                    self._control.sendall(len(self._offers).to_bytes(4, "little"))
                    for _, outgoing in self._offers:
                        _ended(outgoing)
            finally:
                self.meter.seconds += time.perf_counter() - begun
                for registration, _ in self._offers:
                    registration.close()


class EngineStream:
    """What one peer offers, in order."""

    def __init__(self, transport: EngineTransport, control: socket.socket) -> None:
        self.meter = Meter()
        self._transport = transport
        self._control = control
        self._peer = transport.introduced(control)

    def arrivals(self, expect: Mapping[str, Any]) -> Iterator[EngineArrival]:
        """Offers whose pages have not been read."""
        taken, total = 0, None
        while taken != total:
            begun = time.perf_counter()
            incoming = self._transport.next_from(self._peer, expect)
            self.meter.seconds += time.perf_counter() - begun
            if incoming is not None:
                taken += 1
                yield EngineArrival(incoming, self.meter)
            elif total is None and select.select([self._control], [], [], 0)[0]:
                total = int.from_bytes(_received(self._control, 4), "little")

    def __enter__(self) -> EngineStream:
        return self

    def __exit__(self, *error: Any) -> None:
        with self._control:
            if error[0] is not None:
                self._decline()

    def _decline(self) -> None:
        """Take nothing more, until the sender has noticed."""
        self._control.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            incoming = self._transport.next_from(self._peer, {})
            if incoming is not None:
                incoming.decline("this stream was refused")
            elif select.select([self._control], [], [], 0)[0] and not self._control.recv(64):
                return


class EngineArrival:
    """An offer: its header is here."""

    def __init__(self, incoming: Any, meter: Meter) -> None:
        self._incoming = incoming
        self._meter = meter

    def read(self) -> hw.BlockPagedTensor:
        """Have the engine read the pages, tables and scales."""
        sizes = [handle.byte_size for handle in self._incoming.descriptor.buffers]
        self._meter.bytes += len(self._incoming.header) + sum(sizes)
        tensor: hw.BlockPagedTensor = self._incoming.read(timeout=TIMEOUT)
        return tensor


def _ended(outgoing: Any) -> None:
    """Wait until an offer has been read."""
    try:
        outgoing.wait(TIMEOUT)
    except hw.HurrayWireError as error:
        raise ConnectionError(str(error)) from error


def _received(control: socket.socket, count: int) -> bytes:
    data = control.recv(count, socket.MSG_WAITALL)
    if len(data) < count:
        raise ConnectionError("the other end is gone")
    return data
