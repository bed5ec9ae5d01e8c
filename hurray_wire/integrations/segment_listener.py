"""Segments as they arrive: a listener that keeps the bytes of connections in memory, where readers wait for them.

Nothing is decoded here: whoever reads a segment holds its frames to everything that a stream is held to. A segment
can be read from its first byte on, by any number of readers; one that breaks off is given up at once, so that nobody
begins to read it any more.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Condition, Lock, Thread
from typing import Any, NamedTuple

import numpy as np

from hurray_wire import frame_reader
from hurray_wire.arrays import Bytes
from hurray_wire.errors import Code, HurrayWireError, LimitError, StoreError, TruncatedError
from hurray_wire.integrations.segment_wire import Address, receive_record, send_record
from hurray_wire.options import DEFAULT_LIMITS, Alloc
from hurray_wire.stream.reader import StreamReader

__all__ = ["HeldSegment", "SegmentListener"]

_BLOCK_BYTES = 1 << 20
_CLOSING_BYTES = 64
"""A closing frame, as `StreamWriter` ends every stream."""


class _Arriving:
    """One segment's bytes, of which more may come."""

    def __init__(self, keys: list[str], timeout: float) -> None:
        self.keys = keys
        self.size = 0
        self.blocks: list[Bytes] = []
        self.ended = False
        self._timeout = timeout
        self._changed = Condition()

    def receive(self, sock: socket.socket, room_for: Callable[[int], None]) -> None:
        """Take all that comes; `room_for(bytes)` is asked before memory is taken."""
        try:
            while True:
                at = self.size % _BLOCK_BYTES
                if at == 0:
                    room_for(_BLOCK_BYTES)
                    self.blocks.append(np.empty(_BLOCK_BYTES, np.uint8))
                count = sock.recv_into(self.blocks[-1][at:].data)
                if not count:
                    return
                self._tell(count)
        finally:
            self.ended = True
            self._tell(0)

    def _tell(self, count: int) -> None:
        with self._changed:
            self.size += count
            self._changed.notify_all()

    def is_whole(self) -> bool:
        """Whether it ends as a stream does: a look at its last bytes, not at what stands before them."""
        places = range(max(self.size - _CLOSING_BYTES, 0), self.size)
        end = np.array([self.blocks[at // _BLOCK_BYTES][at % _BLOCK_BYTES] for at in places], np.uint8)
        try:
            return frame_reader.read_frame_head(end, 0, DEFAULT_LIMITS).closing
        except HurrayWireError:
            return False

    def source(self) -> Callable[[memoryview], int]:
        """A stream's source from the first byte on, which waits for bytes that are still to come."""
        at = 0

        def read(out: memoryview) -> int:
            nonlocal at
            with self._changed:
                if not self._changed.wait_for(lambda: self.size > at or self.ended, self._timeout):
                    raise TimeoutError(f"nothing came for {self._timeout:g} s")
            begin = at % _BLOCK_BYTES
            count = min(len(out), self.size - at, _BLOCK_BYTES - begin)
            if count:
                out[:count] = self.blocks[at // _BLOCK_BYTES].data[begin : begin + count]
            at += count
            return count

        return read


class HeldSegment(NamedTuple):
    """A segment in memory, and which of the chunks that were asked for it holds: `keys[first:stop]`."""

    arriving: _Arriving
    first: int
    stop: int

    @property
    def where(self) -> str:
        """Its name in errors."""
        return f"segment {self.arriving.keys[-1]}"

    def open(self, expect: Mapping[str, Any], *, alloc: Alloc | None = None) -> StreamReader:
        """A reader of its frames, which waits for those that are still to come; `expect`, `alloc` as in `decode`."""
        return StreamReader(self.arriving.source(), expect=dict(expect), alloc=alloc)


class SegmentListener:
    """Takes segments at an address and keeps them.

    Args:
        address: host and port, of one's own machine; port 0 is any, see `address`.
        most_bytes: what is kept; the oldest segments that have arrived make room. A segment that finds none is refused.
        timeout: seconds that a sender may be silent, and a reader waits.

    Example:
        >>> with SegmentListener(("127.0.0.1", 0)) as listener:
        ...     listener.held(["aa"])
        [False]
    """

    def __init__(self, address: Address, *, most_bytes: int = 4 << 30, timeout: float = 30) -> None:
        self._most_bytes, self._timeout = most_bytes, timeout
        self._lock = Lock()
        self._segments: list[_Arriving] = []
        self._by_key: dict[str, _Arriving] = {}
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._server = _server(address)
        self.address: Address = self._server.getsockname()[:2]
        self._threads: list[Thread] = []
        self._acceptor = Thread(target=self._accept, name="hurray_wire segments", daemon=True)
        self._acceptor.start()

    def held(self, keys: Sequence[str]) -> list[bool]:
        """Which chunks are here, or arriving."""
        with self._lock:
            return [key in self._by_key for key in keys]

    def segments(self, keys: Sequence[str]) -> list[HeldSegment]:
        """The segments that hold chunks, in order, each once for a run of chunks.

        Raises:
            StoreError: a chunk is gone.
        """
        found: list[HeldSegment] = []
        for i, key in enumerate(keys):
            with self._lock:
                arriving = self._by_key.get(key)
            if arriving is None:
                raise StoreError(f"chunk {key} is gone", where=f"segment {key}")
            if found and found[-1].arriving is arriving:
                found[-1] = found[-1]._replace(stop=i + 1)
            else:
                found.append(HeldSegment(arriving, i, i + 1))
        return found

    def discard(self, keys: Sequence[str]) -> None:
        """Take chunks away: nobody finds them then; those who read go on."""
        with self._lock:
            for key in keys:
                self._by_key.pop(key, None)
            self._drop_unnamed()

    def _drop_unnamed(self) -> None:
        """Give back what has arrived and that no chunk's name leads to any more."""
        named = {id(arriving) for arriving in self._by_key.values()}
        self._segments = [each for each in self._segments if not each.ended or id(each) in named]

    def close(self) -> None:
        """Stop listening, break off what is arriving."""
        self._closed = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # `close` alone does not wake the thread that accepts
        self._server.close()
        self._acceptor.join()
        with self._lock:
            for sock in self._connections:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> SegmentListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Threads.

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._server.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # too many files are open: later there may be fewer
                continue
            sock.settimeout(self._timeout)
            with self._lock:
                self._connections.add(sock)
            thread = Thread(target=self._serve, args=(sock,), name="hurray_wire segment", daemon=True)
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with suppress(OSError):
                try:
                    kind, fields = receive_record(sock, ["segment", "ask"], "segment")
                    keys = fields.strings("keys")
                    if kind == "ask":
                        send_record(sock, "held", held=[int(held) for held in self.held(keys)])
                    else:
                        send_record(sock, "kept", bytes=self._receive(sock, keys))
                except HurrayWireError as error:
                    send_record(sock, "refused", why=str(error))
        finally:
            with self._lock:
                self._connections.discard(sock)
            sock.close()

    def _receive(self, sock: socket.socket, keys: list[str]) -> int:
        if not keys:
            raise StoreError("a segment of no chunks", where="segment")
        arriving = _Arriving(keys, self._timeout)
        with self._lock:
            self._segments.append(arriving)
            self._by_key.update(dict.fromkeys(keys, arriving))
            self._drop_unnamed()
        whole = False
        try:
            arriving.receive(sock, lambda count: self._make_room(count, arriving))
            whole = arriving.is_whole()
        finally:
            if whole:
                with self._lock:
                    self._drop_unnamed()
            else:
                self._give_up(arriving)
        if not whole:
            message = "the segment broke off"
            raise TruncatedError(message, needed=1, available=0, code=Code.STREAM_TRUNCATED, where="segment")
        return arriving.size

    def _give_up(self, arriving: _Arriving) -> None:
        with self._lock:
            for key in [key for key in arriving.keys if self._by_key.get(key) is arriving]:
                del self._by_key[key]
            if arriving in self._segments:
                self._segments.remove(arriving)

    def _make_room(self, count: int, arriving: _Arriving) -> None:
        while True:
            with self._lock:
                taken = count + sum(len(each.blocks) * _BLOCK_BYTES for each in self._segments)
                if taken <= self._most_bytes:
                    return
                oldest = next((each for each in self._segments if each.ended and each is not arriving), None)
            if oldest is None:
                message = f"no room for {taken} bytes of segments"
                limit = self._most_bytes
                raise LimitError(message, claimed=taken, limit=limit, code=Code.STREAM_BYTES, where="segment")
            self._give_up(oldest)


def _server(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        return socket.create_server(address, family=family)
    except OSError as error:
        where = f"{address[0]}:{address[1]}"
        raise StoreError(f"cannot listen: {error}", where=where, cause=error) from error
