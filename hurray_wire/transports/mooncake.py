"""Mooncake's Transfer Engine: reads of registered memory over TCP, peers found by handshake. Needs `mooncake`.

Messages travel as the engine's notifications. Those are strings that go with a transfer, so each end registers a
mailbox of some bytes: a read of one of them carries the message. What is too long for the engine's handshake is lost
without a word; endpoints cut messages well below that.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from contextlib import suppress
from threading import Event, Lock, Thread
from time import sleep
from typing import Any

from hurray_wire.arrays import Bytes, address
from hurray_wire.errors import Code, TransferError
from hurray_wire.memory import allocated
from hurray_wire.transports.engine import Engine, Region
from hurray_wire.transports.memory import region_bytes
from hurray_wire.transports.runs import Runs

_MAILBOX_BYTES = 64
_SLICE_RUNS = 512
"""Over TCP the engine queues about two thousand reads a peer; more fail, and so does what is asked for soon after.

One slice of several is under way at a time: the engine waits for those by looking without pause, so each one more would
take a core.
"""
_NAP = 200e-6


class Work:
    """Reads, handed to the engine a slice at a time by a thread that waits for each.

    The engine's own look at a batch that does not wait tells of its first read only: a batch of which the first had
    come was reported done while others were on their way (0.3.13). It serves where there is one read; several are
    waited for as the engine does it, which takes a core.
    """

    def __init__(self, engine: Any, peer: str, runs: Runs, turn: Lock) -> None:
        self.peer = peer
        self.ended = Event()
        self.given_up = False
        self.failed = False
        Thread(target=self._move, args=(engine, runs, turn), name="hurray_wire mooncake", daemon=True).start()

    def _move(self, engine: Any, runs: Runs, turn: Lock) -> None:
        lists = [part.tolist() for part in (runs.target, runs.source, runs.length)]
        for at in range(0, runs.source.size, _SLICE_RUNS):
            if self.given_up or self.failed:
                break
            asked = [part[at : at + _SLICE_RUNS] for part in lists]
            self.failed = not (self._one(engine, asked) if len(asked[0]) == 1 else self._several(engine, asked, turn))
        self.ended.set()

    def _one(self, engine: Any, asked: list[list[int]]) -> bool:
        batch = engine.batch_transfer_async_read(self.peer, *asked)
        while batch and not (state := engine.transfer_check_status(batch)):
            sleep(_NAP)
        return bool(batch) and state > 0

    def _several(self, engine: Any, asked: list[list[int]], turn: Lock) -> bool:
        with turn:
            batch = not self.given_up and engine.batch_transfer_async_read(self.peer, *asked)
            return bool(batch) and not engine.get_batch_transfer_status([batch])


class MooncakeEngine(Engine):
    """One Transfer Engine.

    Args:
        host: this machine's address, as peers reach it.
        protocol: "tcp", or what else the installed engine has.
        device: names of its devices, for protocols that need them.
    """

    message_bytes = 384 << 10

    def __init__(self, host: str = "127.0.0.1", *, protocol: str = "tcp", device: str = "") -> None:
        from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

        self._engine: Any = TransferEngine()
        self._notify, self._read = TransferNotify, TransferOpcode.Read
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, device):
            raise TransferError(f"Mooncake does not start with {protocol} at {host}", where="engine")
        self._name = f"{host}:{self._engine.get_rpc_port()}"
        self._mailbox = allocated(_MAILBOX_BYTES, None)
        self._turn = Lock()
        self._mailboxes: dict[str, int] = {}
        self._regions: dict[int, Region] = {}
        self.register(self._mailbox)

    def address(self) -> bytes:
        return f"{self._name} {address(self._mailbox)}".encode()

    def connect(self, address: bytes) -> str:
        try:
            name, mailbox = address.decode().split(" ")
            self._mailboxes[name] = int(mailbox)
        except ValueError:
            message = f"{address[:80]!r} is no address of a Mooncake engine"
            raise TransferError(message, code=Code.MEMORY_REFUSED, where="address") from None
        return name

    def register(self, memory: Bytes) -> Region:
        start = address(memory)
        if self._engine.register_memory(start, memory.size):
            message = "Mooncake does not register this memory"
            raise TransferError(message, code=Code.MEMORY_REFUSED, where="memory")
        region = region_bytes(memory, None, b"")
        self._regions[start] = region
        return region

    def deregister(self, region: Region) -> None:
        if self._regions.pop(region.start, None) is not None:
            self._engine.unregister_memory(region.start)

    def admit(self, peer: str, access: bytes) -> None:
        """Mooncake's peers tell each other what they have registered."""

    def post(self, peer: str, runs: Runs) -> Work:
        return Work(self._engine, peer, runs, self._turn)

    def poll(self, work: Work) -> bool:
        if not work.ended.is_set():
            return False
        if work.failed:
            raise self._failed(work.peer)
        return True

    def _failed(self, peer: str) -> TransferError:
        """The engine says that it failed, not why: whether the peer answers tells the one from the other."""
        if self._engine.send_probe(peer):
            return TransferError(f"{peer} does not answer", code=Code.PEER_LOST, where="peer")
        message = f"{peer} does not let Mooncake read its memory"
        return TransferError(message, code=Code.MEMORY_REFUSED, where="access")

    def rest(self, work: Work, seconds: float) -> None:
        work.ended.wait(seconds)

    def abandon(self, work: Work) -> bool:
        """Mooncake cannot stop a slice that is under way: it is waited for."""
        work.given_up = True
        return work.ended.is_set()

    def tell(self, peer: str, message: bytes) -> None:
        notify = self._notify()
        notify.name, notify.msg = self._name, b64encode(message).decode()
        there, here = self._mailboxes.get(peer), address(self._mailbox) + _MAILBOX_BYTES // 2
        if there is None or self._engine.transfer_sync(peer, here, there, 1, self._read, notify):
            raise TransferError(f"{peer} does not answer", code=Code.PEER_LOST, where="peer")

    def hear(self) -> list[tuple[str, bytes]]:
        heard = []
        for notify in self._engine.get_notifies():
            with suppress(NotBase64, ValueError):  # somebody else's
                heard.append((str(notify.name), b64decode(notify.msg, validate=True)))
        return heard

    def close(self) -> None:
        for region in list(self._regions.values()):
            self.deregister(region)
        self._engine = None
