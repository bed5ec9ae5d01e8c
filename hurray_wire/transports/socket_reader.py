"""What the socket engine reads from one peer: requests in their order, over one connection, by one thread.

A request goes out while the answer to the one before it is still coming in, so that the peer is never without work.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from struct import Struct

import numpy as np

from hurray_wire.errors import Code, TransferError
from hurray_wire.transports.runs import Runs

REQUEST = Struct("<BIII")
"""Kind; bytes of a message; or of a read, runs and keys, which follow: 16 bytes each."""
MESSAGE, READ = 1, 2
GRANTED, REFUSED = b"\0", b"\1"
VECTOR = 512
"""Pieces of memory that one call takes."""
_AT_ONCE: int | None = getattr(socket, "MSG_DONTWAIT", None)

Local = Callable[[int, int], memoryview]
"""Registered memory of this end, from an address and a length."""


class Work:
    """Reads that have been asked for together."""

    def __init__(self, peer: str, runs: Runs, keys: list[bytes]) -> None:
        self.peer = peer
        self.runs = runs
        self.keys = keys
        self.given_up = False
        self.finished = threading.Event()
        self.error: TransferError | None = None

    def request(self) -> bytes:
        """What asks the peer for them."""
        pairs = np.stack([self.runs.source, self.runs.length], axis=1).astype("<i8").tobytes()
        return REQUEST.pack(READ, 0, self.runs.source.size, len(self.keys)) + b"".join(self.keys) + pairs


class Reader:
    """The thread that reads from one peer.

    Args:
        connect: makes a connection to the peer.
        local: finds the memory that is read into.
    """

    def __init__(self, peer: str, connect: Callable[[], socket.socket], local: Local) -> None:
        self._peer = peer
        self._connect = connect
        self._local = local
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._posted: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._next: deque[Work | None] = deque()
        self._asked = 0  # how many of them, from the first on, have been asked for on this connection
        self._unsent = memoryview(b"")  # what has not gone of the last one's request
        self._now: Work | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="hurray_wire sockets", daemon=True)
        self._thread.start()

    # Of the endpoint's thread.

    def post(self, work: Work) -> None:
        """Read it after those that were posted before."""
        self._posted.put(work)

    def abandon(self, work: Work) -> bool:
        """Do not read it; where it is being read, the connection ends in the middle. True once nothing is written."""
        with self._lock:
            work.given_up = True
            if self._now is not work:
                return True
            self._hang_up()
            return False

    def close(self, seconds: float) -> None:
        """Read nothing more; wait for the thread, at most so long."""
        with self._lock:
            self._closed = True
            self._hang_up()
        self._posted.put(None)
        self._thread.join(seconds)

    def _hang_up(self) -> None:
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    # Of the reader's own thread.

    def _run(self) -> None:
        while (work := self._first()) is not None and not self._closed:
            with self._lock:
                self._now = None if work.given_up and not self._asked else work
            if self._now is not None:
                self._do(work)
            self._next.popleft()
            work.finished.set()
            del work  # what its error's traceback holds is not kept while the thread waits
        self._drop()

    def _first(self) -> Work | None:
        """What is to be read next, waited for; None at the end."""
        if not self._next:
            self._next.append(self._posted.get())
        return self._next[0]

    def _do(self, work: Work) -> None:
        """Read it or say why not; what was asked for behind it is asked for again if the connection ends with it."""
        try:
            self._read(work)
        except TransferError as error:
            work.error = error
        except OSError as error:
            work.error = TransferError(f"{self._peer}: {error}", code=Code.PEER_LOST, where="peer")
        except Exception as error:  # those behind it are still to be read
            work.error = TransferError(f"{self._peer}: {error!r}", where="transfer")
        with self._lock:  # what is given up from here on has been read
            self._now = None
            broken = work.error is not None or work.given_up
        if broken:
            self._drop()
        else:
            self._asked -= 1

    def _drop(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        self._asked, self._unsent = 0, memoryview(b"")
        if connection is not None:
            connection.close()

    def _connected(self) -> socket.socket:
        if self._connection is None:
            connection = self._connect()
            with self._lock:
                self._connection = connection
        return self._connection

    def _read(self, work: Work) -> None:
        connection = self._connected()
        if self._closed:
            raise ConnectionAbortedError("the endpoint is closed")
        if work.given_up:
            return
        if not self._asked:
            self._asked, self._unsent = 1, memoryview(work.request())
        connection.sendall(self._unsent)
        self._unsent = memoryview(b"")
        answer = bytearray(1)
        fill(connection, [memoryview(answer)])
        if answer != GRANTED:
            raise TransferError(f"{work.peer} refuses its memory", code=Code.MEMORY_REFUSED, where="access")
        places = zip(work.runs.target.tolist(), work.runs.length.tolist(), strict=True)
        fill(connection, [self._local(start, nbytes) for start, nbytes in places], self._ask_ahead)

    def _ask_ahead(self) -> None:
        """Send what goes at once of the request behind the one that is being answered.

        Only at once: while this end waited to send, the peer could wait for it to receive.
        """
        if _AT_ONCE is None or self._connection is None:
            return
        if self._asked == 1:
            if len(self._next) == 1 and not self._posted.empty():
                self._next.append(self._posted.get())
            work = self._next[1] if len(self._next) > 1 else None
            if work is None or work.given_up:
                return
            self._asked, self._unsent = 2, memoryview(work.request())
        if self._unsent:
            with suppress(BlockingIOError):
                self._unsent = self._unsent[self._connection.send(self._unsent, _AT_ONCE) :]


def past(vector: list[memoryview], count: int) -> list[memoryview]:
    """What is left of a vector after so many bytes."""
    for i, piece in enumerate(vector):
        if count < len(piece):
            return [piece[count:], *vector[i + 1 :]]
        count -= len(piece)
    return []


def fill(connection: socket.socket, vector: list[memoryview], between: Callable[[], None] = lambda: None) -> None:
    """Receive into all of a vector; `between` is called before each time that more is waited for."""
    for at in range(0, len(vector), VECTOR):
        part = vector[at : at + VECTOR]
        while part:
            between()
            count = connection.recvmsg_into(part)[0]
            if not count:
                raise ConnectionResetError("the connection ended in the middle of a transfer")
            part = past(part, count)
