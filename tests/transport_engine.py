"""A transfer engine inside one process, that does what a test wants of it: stand still, fail, lose its peer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hurray_wire.arrays import Bytes, address
from hurray_wire.errors import Code, TransferError
from hurray_wire.transports import Endpoint, Engine
from hurray_wire.transports.engine import Region
from hurray_wire.transports.runs import Runs


@dataclass(eq=False)
class Work:
    """Reads that have been asked for, and how many of them are done."""

    peer: str
    runs: Runs
    done: int = 0
    given_up: bool = False


@dataclass
class Switches:
    """What an engine is to do."""

    runs_a_poll: int = 1 << 30
    """Runs that a poll moves; 0 stands still."""
    refuses: bool = False
    fails: bool = False
    stubborn: bool = False
    """Does not let go of what is given up."""
    silent: bool = False
    """Messages are lost."""


@dataclass(eq=False)
class LocalEngine(Engine):
    """One end; `network` holds all of them by name."""

    network: dict[str, LocalEngine]
    name: str
    message_bytes: int = 1 << 20
    switches: Switches = field(default_factory=Switches)
    regions: dict[int, tuple[Region, Bytes]] = field(default_factory=dict)
    heard: list[tuple[str, bytes]] = field(default_factory=list)
    posted: list[Runs] = field(default_factory=list)
    registrations: int = 0
    dead: bool = False

    def __post_init__(self) -> None:
        self.network[self.name] = self

    def address(self) -> bytes:
        return self.name.encode()

    def connect(self, address: bytes) -> str:
        return address.decode()

    def register(self, memory: Bytes) -> Region:
        self.registrations += 1
        region = Region(address(memory), memory.size, self.registrations, f"{self.name} {self.registrations}".encode())
        self.regions[self.registrations] = region, memory
        return region

    def deregister(self, region: Region) -> None:
        del self.regions[region.token]

    def admit(self, peer: str, access: bytes) -> None:
        if not access.startswith(peer.encode() + b" "):
            raise TransferError("a key of somebody else", code=Code.MEMORY_REFUSED, where="access")

    def _peer(self, name: str) -> LocalEngine:
        if name not in self.network or self.network[name].dead:
            raise TransferError(f"{name} is gone", code=Code.PEER_LOST, where="peer")
        return self.network[name]

    def memory(self, start: int, nbytes: int) -> Bytes:
        """Registered bytes at an address."""
        for region, memory in self.regions.values():
            if region.start <= start and start + nbytes <= region.start + region.nbytes:
                return memory[start - region.start :][:nbytes]
        raise TransferError("not registered", code=Code.MEMORY_REFUSED, where="access")

    def post(self, peer: str, runs: Runs) -> Work:
        if self.switches.refuses:
            raise TransferError("refused", code=Code.MEMORY_REFUSED, where="access")
        self._peer(peer)
        self.posted.append(runs)
        return Work(peer, runs)

    def poll(self, work: Work) -> bool:
        if self.switches.fails:
            raise TransferError("the engine does not say why", where="transfer")
        count = min(self.switches.runs_a_poll, work.runs.source.size - work.done)
        for i in range(work.done, work.done + count):
            source, target, length = (int(part[i]) for part in work.runs)
            self.memory(target, length)[:] = self._peer(work.peer).memory(source, length)
        self._peer(work.peer)
        work.done += count
        return work.done == work.runs.source.size

    def abandon(self, work: Work) -> bool:
        work.given_up = True
        return not self.switches.stubborn

    def tell(self, peer: str, message: bytes) -> None:
        assert len(message) <= self.message_bytes
        if not self.switches.silent:
            self._peer(peer).heard.append((self.name, message))

    def hear(self) -> list[tuple[str, bytes]]:
        heard, self.heard = self.heard, []
        return heard

    def close(self) -> None:
        self.dead = True

    @property
    def bytes_read(self) -> int:
        """Of everything that was asked for so far."""
        return sum(runs.nbytes for runs in self.posted)


class Pair:
    """Two ends that know each other: tensors go from `one` to `other`."""

    def __init__(self, **options: Any) -> None:
        network: dict[str, LocalEngine] = {}
        self.sender, self.receiver = LocalEngine(network, "one", **options), LocalEngine(network, "other", **options)
        self.one, self.other = Endpoint(self.sender), Endpoint(self.receiver)
        self.peer = self.one.connect(self.other.address)
        self.other.connect(self.one.address)


def whole(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Ids that leave holes, and are not in order."""
    return np.random.default_rng(count).permutation(count + 9)[:count].astype(np.int64)
