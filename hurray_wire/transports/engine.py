"""The seam: what a transfer engine must do for an endpoint, and nothing that it does beside.

Memory is registered once; a peer's registered memory is read, one-sided, into one's own; short messages go both ways.
Implementations translate their engine's failures into `TransferError`, and import their package when they are made.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from hurray_wire.arrays import Bytes
from hurray_wire.transports.runs import Runs


class Region(NamedTuple):
    """Registered memory: where it lies, the engine's own token for it, and what a peer needs to read it."""

    start: int
    nbytes: int
    token: Any
    access: bytes


class Engine(ABC):
    """One end of a transfer engine, to be implemented for one that is not here.

    Example:
        >>> from hurray_wire import transports
        >>> from hurray_wire.transports.sockets import SocketEngine
        >>> issubclass(SocketEngine, transports.Engine)
        True
        >>> transports.endpoint(SocketEngine()).close()
    """

    message_bytes: int
    """The longest message that it carries; endpoints cut longer ones."""

    @abstractmethod
    def address(self) -> bytes:
        """What a peer must have to connect to this end; it travels by a channel of the caller's."""

    @abstractmethod
    def connect(self, address: bytes) -> str:
        """Know a peer; gives the name under which its messages come.

        Raises:
            TransferError: `memory_refused`, for bytes that are no address of this engine.
        """

    @abstractmethod
    def register(self, memory: Bytes) -> Region:
        """Make memory readable for peers, and writable for reads of one's own."""

    @abstractmethod
    def deregister(self, region: Region) -> None:
        """Take it back."""

    @abstractmethod
    def admit(self, peer: str, access: bytes) -> None:
        """Take what a peer said is needed to read a region of its memory (`Region.access`).

        Raises:
            TransferError: `memory_refused`.
        """

    @abstractmethod
    def post(self, peer: str, runs: Runs) -> Any:
        """Begin to read; gives what `poll` and `abandon` ask for.

        Raises:
            TransferError: `memory_refused`, `peer_lost`, `transfer_failed`.
        """

    @abstractmethod
    def poll(self, work: Any) -> bool:
        """Whether the bytes are all there.

        Raises:
            TransferError: as `post`; the engine will write nothing more for this work.
        """

    def rest(self, work: Any, seconds: float) -> None:
        """Wait for the work to end, or for about so long: an engine that can be woken may wait some milliseconds."""
        time.sleep(seconds)

    @abstractmethod
    def abandon(self, work: Any) -> bool:
        """Stop; True once nothing can be written any more. Asked again until it is."""

    @abstractmethod
    def tell(self, peer: str, message: bytes) -> None:
        """Send a message of at most `message_bytes`.

        Raises:
            TransferError: `peer_lost`.
        """

    @abstractmethod
    def hear(self) -> list[tuple[str, bytes]]:
        """The messages that have come, with the names of the peers that sent them."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""
