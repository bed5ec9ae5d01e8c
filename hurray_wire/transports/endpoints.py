"""One end: memory registered once, peers, and the tensors that go out and come in over a transfer engine."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, Unpack

from hurray_wire.arrays import Bytes
from hurray_wire.errors import HurrayWireError, TransferError
from hurray_wire.indices import Int64Array
from hurray_wire.options import Decoding, Sending, decode_options, encode_options
from hurray_wire.tensor import BlockPagedTensor
from hurray_wire.transports.checks import Checks
from hurray_wire.transports.engine import Engine, Region
from hurray_wire.transports.incoming import Incoming
from hurray_wire.transports.memory import Held, Memory, Registration, span_of
from hurray_wire.transports.messages import Assembler, Kind, Message, parse_offer, parts_of
from hurray_wire.transports.outgoing import Outgoing, Prepared, as_message

_ASKS = 16
"""Asks before the first nap: what is nearly done is not slept over, which on a busy machine takes milliseconds."""
_NAP = 100e-6
_LONGEST_NAP = 2e-3
_SLEPT_OVER = 1 / 32
"""Of what has been waited for, at most so much more by a nap that is too long."""
_MOST_HELPERS = 256
"""Threads that hash for all readings together; as many are started as readings call for."""
_GRACE = 2.0
"""Seconds that an engine is given to stop a transfer that has been given up."""


class Endpoint:
    """One end of a transfer engine: `transports.endpoint` makes it. Not to be shared by threads without a lock.

    `.address` is what a peer's `connect` takes; it travels by a channel of the caller's.

    Example:
        >>> from hurray_wire import transports
        >>> with transports.endpoint("socket") as one, transports.endpoint("socket") as other:
        ...     peer = one.connect(other.address)
        ...     isinstance(one.address, bytes)
        True
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.memory = Memory(engine)
        self._assembler = Assembler()
        self._peers: set[str] = set()
        self._offers: deque[tuple[str, Message] | HurrayWireError] = deque()
        self._sums: dict[tuple[str, int], Message] = {}
        self._outgoing: dict[tuple[str, int], Outgoing] = {}
        self._incoming: dict[tuple[str, int], Incoming] = {}
        self._next = int.from_bytes(os.urandom(6), "little")
        self._stuck: list[Held] = []
        self._withdrawn: list[tuple[Region, Bytes]] = []
        self._helpers: Executor | None = None
        self._lock = threading.RLock()
        self._closed = False

    # Peers and memory.

    @property
    def address(self) -> bytes:
        """What a peer needs to connect to this end."""
        return self.engine.address()

    def connect(self, address: bytes) -> str:
        """Know a peer by its address; gives its name. Each end connects to the other.

        Raises:
            TransferError: `memory_refused`, `peer_lost`.
        """
        peer = self.engine.connect(bytes(address))
        self._peers.add(peer)
        return peer

    def register(self, pool: Any) -> Registration:
        """Register memory, once, to be sent from and read into: an array, strided or not; kept alive until closed.

        Raises:
            TransferError: `memory_refused`: the engine does not take it. ValueError: the endpoint is closed.
        """
        self._check_open()
        number, region = self.memory.add(span_of(pool))
        return Registration(self, number, region)

    def deregister(self, number: int, region: Region) -> None:
        """The end of a `Registration`: what was offered out of it is withdrawn first."""
        for outgoing in [o for o in self._outgoing.values() if o.uses(region)]:
            outgoing.cancel()
        if not self._closed:
            self._withdrawn.append(self.memory.withdraw(number))
            self._deregister_withdrawn()

    def _deregister_withdrawn(self) -> None:
        """What an engine may write to still stays registered, and alive."""
        while self._withdrawn and not self._stuck:
            self.engine.deregister(self._withdrawn.pop()[0])

    def check_registered(self, addresses: Int64Array, nbytes: int) -> None:
        """ValueError unless `nbytes` at every address are registered."""
        if not self.memory.holding(addresses, nbytes):
            raise ValueError("the pool is not registered with this endpoint: register it once, then read into it")

    # Tensors.

    def send(self, peer: str, tensor: BlockPagedTensor, **options: Unpack[Sending]) -> Outgoing:
        """Offer a tensor to a peer, who reads it when it wants; nothing but the header is sent.

        Args:
            peer: a name that `connect` gave.
            tensor: its pool within registered memory; not to be changed until the `Outgoing` has ended.
            options: pages, scrub, checksum, alignment, chunk_bytes, threads, as `encode_header` takes them.

        Raises:
            ValueError: the pool is not registered, or the endpoint closed. KeyError: no such peer.
            TransferError: `peer_lost`. All else as `encode_header`.
        """
        self._check_open()
        if peer not in self._peers:
            raise KeyError(f"{peer} is not connected")
        prepared = Prepared(self.memory, tensor, encode_options(options))
        self._next += 1
        outgoing = Outgoing(self, peer, self._next, prepared)
        self._outgoing[peer, self._next] = outgoing
        try:
            self.tell(peer, as_message(outgoing.transfer, prepared))
            sums = prepared.sums()
            if sums is not None:
                self.tell(peer, Message(Kind.SUMS, outgoing.transfer, sums))
        except BaseException as error:
            outgoing.ended(error if isinstance(error, TransferError) else None)
            self._answer(peer, Message(Kind.WITHDRAWN, outgoing.transfer, b""))
            raise
        return outgoing

    def receive(self, *, timeout: float | None = None, **options: Unpack[Decoding]) -> Incoming:
        """The next tensor that a peer offers, its header checked as `decode_parts` would, nothing of it read.

        Args:
            timeout: seconds, at most; None waits for ever.
            options: strict, verify, expect, limits, threads, as `decode` takes them.

        Raises:
            TimeoutError: nothing came.
            MismatchError, UnsupportedError, FrameError and all else that `decode_parts` raises: the offer has then
                been declined, the sender told why.
        """
        chosen = decode_options(options)
        self.until(self._offered, timeout, "no tensor has been offered")
        offered = self._offers.popleft()
        if isinstance(offered, HurrayWireError):
            raise offered
        peer, message = offered
        try:
            incoming = Incoming(self, peer, message.transfer, parse_offer(message.body), chosen)
        except HurrayWireError as error:
            self._sums.pop((peer, message.transfer), None)
            self._answer(peer, Message(Kind.DECLINED, message.transfer, str(error).encode()))
            raise
        self._incoming[peer, message.transfer] = incoming
        sums = self._sums.pop((peer, message.transfer), None)
        if sums is not None:
            incoming.heard(sums)
        return incoming

    def _offered(self) -> bool:
        self.poll()
        return bool(self._offers)

    def checks(self, threads: int) -> Checks:
        """Jobs for a reading to share with so many threads, which are kept for the next one."""
        if threads < 1:
            return Checks(None, 0)
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(_MOST_HELPERS, "hurray_wire transfer")
        return Checks(self._helpers, threads)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the endpoint is closed")

    # Messages.

    def tell(self, peer: str, message: Message) -> None:
        """Send a message in as many parts as the engine needs."""
        with self._lock:
            for part in parts_of(message, self.engine.message_bytes):
                self.engine.tell(peer, part)

    def _answer(self, peer: str, message: Message) -> None:
        with suppress(TransferError):  # nobody is there to hear it
            self.tell(peer, message)

    def told(self, incoming: Incoming, message: Message) -> None:
        """The last word on a tensor that was offered to this end."""
        self._incoming.pop((incoming.peer, incoming.transfer), None)
        self._answer(incoming.peer, message)

    def forget(self, outgoing: Outgoing) -> None:
        """An offer that has ended."""
        self._outgoing.pop((outgoing.peer, outgoing.transfer), None)

    def poll(self) -> None:
        """Hear what peers say: how their readings ended, what they offer and take back."""
        with self._lock:
            self._check_open()
            if self._stuck:
                self._let_go()
            for peer, data in self.engine.hear():
                try:
                    message = self._assembler.take(peer, data)
                except HurrayWireError as error:
                    self._offers.append(error)
                    continue
                if message is not None:
                    self._heard(peer, message)

    def _heard(self, peer: str, message: Message) -> None:
        key = peer, message.transfer
        if message.kind is Kind.OFFER:
            self._offers.append((peer, message))
        elif message.kind in (Kind.WITHDRAWN, Kind.SUMS):
            waiting = [o for o in self._offers if isinstance(o, tuple) and (o[0], o[1].transfer) == key]
            if key in self._incoming:
                self._incoming[key].heard(message)
            elif waiting and message.kind is Kind.SUMS:
                self._sums[key] = message
            elif waiting:
                self._offers.remove(waiting[0])
                self._sums.pop(key, None)
                self._answer(peer, Message(Kind.STOPPED, message.transfer, b""))
        elif key in self._outgoing:
            self._outgoing[key].heard(message)

    # Waiting.

    def until(
        self,
        ended: Callable[[], bool | None],
        timeout: float | None,
        what: str,
        rest: Callable[[float], None] = time.sleep,
    ) -> None:
        """Ask until it is true; None asks again at once, False after a nap that grows while nothing happens.

        Raises:
            TimeoutError: with `what`.
        """
        since = now = time.monotonic()
        deadline = None if timeout is None else now + timeout
        asked = 0
        while (answer := ended()) is not True:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise TimeoutError(f"{what} after {timeout} s")
            if answer is None:
                since, asked = now, 0
                continue
            asked += 1
            if asked >= _ASKS:
                rest(min(max(_NAP, (now - since) * _SLEPT_OVER), _LONGEST_NAP))

    def abandon(self, works: Sequence[Held]) -> bool:
        """Stop transfers; True where the engine still has not let go of one after a grace of some seconds.

        Blocks are given back as the engine lets go of them.
        """
        self._stuck += works

        def ended() -> bool:
            self._let_go()
            return not any(held in self._stuck for held in works)

        with suppress(TimeoutError):
            self.until(ended, _GRACE, "")
        return not ended()

    def _let_go(self) -> None:
        free = [held for held in self._stuck if self.engine.abandon(held.work)]
        self._stuck = [held for held in self._stuck if held not in free]
        for held in free:
            if held.block is not None:
                held.block.release()
        self._deregister_withdrawn()

    # The end.

    def close(self) -> None:
        """Take back what is offered, give up what is being read, and let go of the engine."""
        if self._closed:
            return
        for incoming in list(self._incoming.values()):
            if incoming.reading is not None:
                incoming.reading.cancel()
            incoming.finish(Kind.DECLINED, "the receiver has closed")
        for outgoing in list(self._outgoing.values()):
            outgoing.cancel()
        self._closed = True
        if self._helpers is not None:
            self._helpers.shutdown()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
