"""Segments over connections: what one process saves, another loads while it is still saved. As `SegmentFolder`.

A sender connects for each segment, and its frames go out as the model reaches its layers. The receiver's listener keeps
them in memory, and a reader takes them from there, as far as they have come.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

from hurray_wire.errors import HurrayWireError, StoreError
from hurray_wire.integrations.segment_listener import HeldSegment, SegmentListener
from hurray_wire.integrations.segment_wire import (
    Address,
    address_of,
    ask,
    connected,
    receive_record,
    send_record,
)
from hurray_wire.integrations.segments import SegmentSink
from hurray_wire.stream.writer import StreamWriter
from hurray_wire.tensor import BlockPagedTensor

__all__ = ["SegmentStreams", "StreamedSegmentWriter"]


class SegmentStreams:
    """Segments to a peer, and from those who send here.

    Args:
        peer: `host:port` that segments are sent to; None where none are.
        listen: `host:port` of this end that they are taken at; None where none are. Each rank has the port behind the
            one before.
        rank, ranks: which of how many parts of each chunk is this process's.
        listens: whether this process is the one that takes them, or only asks it.
        most_bytes, timeout: as `SegmentListener`.
        **options: of `StreamWriter`: compression, checksum, threads.

    Example:
        >>> import numpy as np
        >>> t = BlockPagedTensor(np.ones((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> here = SegmentStreams(listen="127.0.0.1:0")
        >>> there = SegmentStreams(peer="%s:%d" % here.address)
        >>> with there.writer(["aa", "bb"]) as writer:
        ...     writer.write(t)
        >>> there.has("aa"), here.leading(["aa", "bb", "cc"])
        (True, 2)
        >>> [found == t for found in here.segments(["bb"])[0].open({})]
        [True]
        >>> here.close()
    """

    def __init__(
        self,
        *,
        peer: str | None = None,
        listen: str | None = None,
        rank: int = 0,
        ranks: int = 1,
        listens: bool = True,
        most_bytes: int = 4 << 30,
        timeout: float = 30,
        **options: Any,
    ) -> None:
        self._rank, self._timeout, self._options = rank, timeout, options
        self._peers = [] if peer is None else [address_of(peer, r) for r in range(ranks)]
        self._here = [] if listen is None else [address_of(listen, r) for r in range(ranks)]
        self._listener: SegmentListener | None = None
        if listen is not None and listens:
            self._listener = SegmentListener(self._here[rank], most_bytes=most_bytes, timeout=timeout)
            self._here[rank] = self._listener.address

    @property
    def address(self) -> Address:
        """Where this rank listens."""
        return self._here[self._rank]

    def has(self, key: str) -> bool:
        """Whether the peer's ranks all have a chunk, so that it need not be sent."""
        return bool(self._peers) and self._leading(self._peers, [key]) == 1

    def held(self, keys: Sequence[str]) -> list[bool]:
        """Which chunks this rank has taken, or is taking."""
        return [False] * len(keys) if self._listener is None else self._listener.held(keys)

    def leading(self, keys: Sequence[str]) -> int:
        """How many of a sequence's chunks are here, or arriving, from the first on, without a gap."""
        return self._leading(self._here, keys) if self._here and keys else 0

    def _leading(self, addresses: Sequence[Address], keys: Sequence[str]) -> int:
        """As all ranks say; one that does not answer, or cannot be understood, has none."""
        found = len(keys)
        for address in addresses:
            try:
                held = ask(address, keys, self._timeout)
            except HurrayWireError:
                return 0
            found = min(found, next((i for i, here in enumerate(held) if not here), found))
        return found

    def segments(self, keys: Sequence[str]) -> list[HeldSegment]:
        """The segments that hold chunks, in order, each once for a run of chunks.

        Raises:
            StoreError: a chunk is gone.
        """
        if self._listener is None:
            raise StoreError("nothing is taken here", where=f"segment {keys[0]}")
        return self._listener.segments(keys)

    def writer(self, keys: Sequence[str]) -> StreamedSegmentWriter:
        """A segment to be sent, of the chunks that follow one another.

        Raises:
            StoreError: there is no peer.
        """
        if not self._peers:
            raise StoreError("there is no peer to send to", where=f"segment {keys[-1]}")
        return StreamedSegmentWriter(self._peers[self._rank], keys, self._timeout, self._options)

    def discard(self, keys: Sequence[str]) -> None:
        """Take chunks away: nobody finds them here then."""
        if self._listener is not None:
            self._listener.discard(keys)

    def close(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            self._listener.close()


class StreamedSegmentWriter(SegmentSink):
    """One segment on its way; `finish` returns when the other end has all of it. Left by an exception, or closed, it
    breaks off, which the other end notices.

    Raises (from every method):
        StoreError: nobody listens, the connection broke, or the other end refused; its reason is in the message.
    """

    def __init__(self, address: Address, keys: Sequence[str], timeout: float, options: Any) -> None:
        self._where = f"{address[0]}:{address[1]}"
        self._socket: socket.socket | None = None
        self._writer: StreamWriter | None = None
        self._guarded(lambda: self._open(address, keys, timeout, options))

    def _open(self, address: Address, keys: Sequence[str], timeout: float, options: Any) -> None:
        self._socket = connected(address, timeout)
        send_record(self._socket, "segment", keys=list(keys))
        self._writer = StreamWriter(self._socket, timeout=timeout, **options)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except HurrayWireError:  # StoreError, which is an OSError, among them
            self.close()
            raise
        except OSError as error:
            told = self._told()
            self.close()
            raise told or StoreError(f"the segment was not sent: {error}", where=self._where, cause=error) from error

    def _told(self) -> StoreError | None:
        """What the other end said before it went away."""
        try:
            if self._socket is not None:
                self._socket.settimeout(1)
                receive_record(self._socket, ["kept"], self._where)
        except StoreError as error:
            return error
        except (OSError, HurrayWireError):
            pass
        return None

    def write(self, tensor: BlockPagedTensor) -> None:
        """Send a frame."""
        self._guarded(lambda: self._sending().write(tensor))

    def _sending(self) -> StreamWriter:
        if self._writer is None:
            raise ValueError("the writer is closed")
        return self._writer

    def finish(self) -> None:
        """The segment is whole: wait until the other end says so."""
        self._guarded(self._finish)

    def _finish(self) -> None:
        self._sending().finish()
        assert self._socket is not None
        self._socket.shutdown(socket.SHUT_WR)
        try:
            receive_record(self._socket, ["kept"], self._where)
        except OSError:
            raise
        except HurrayWireError as error:
            message = f"the other end did not say that it has the segment: {error}"
            raise StoreError(message, where=self._where, cause=error) from error
        self.close()

    def close(self) -> None:
        """Break off what was not finished."""
        if self._writer is not None:
            self._writer.close()
        if self._socket is not None:
            self._socket.close()
        self._writer = self._socket = None
