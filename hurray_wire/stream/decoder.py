"""`FrameDecoder`: streams from bytes that somebody else moves; no I/O.

And `Progress`, the state that every reader shares: which item is being received, where in the stream, in what order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from hurray_wire.arrays import as_bytes
from hurray_wire.errors import Code, HurrayWireError, TruncatedError
from hurray_wire.options import Alloc, DecodeOptions, Limits
from hurray_wire.order import StreamOrder
from hurray_wire.stream.endpoints import Vector
from hurray_wire.stream.incoming import Asking, Closing, Incoming, receive
from hurray_wire.tensor import BlockPagedTensor

__all__ = ["NEED_DATA", "FrameDecoder"]

Streams = Literal["one", "all"] | None


class _NeedData:
    """The one value that says: no whole tensor yet, feed more."""

    def __repr__(self) -> str:
        return "NEED_DATA"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "NEED_DATA"


NEED_DATA = _NeedData()


class Progress:
    """Where in a stream a reader stands, and when it has had enough."""

    def __init__(self, options: DecodeOptions, *, require_last: bool, streams: Streams) -> None:
        if streams not in (None, "one", "all"):
            raise ValueError(f"streams must be 'one', 'all' or None, not {streams!r}")
        self.options = options
        self.order = StreamOrder(options.limits)
        self.require_last = require_last
        self.streams = streams
        self.base = 0
        self.items = 0

    @property
    def done(self) -> bool:
        """Whether one stream was asked for and has ended with its LAST."""
        return self.streams == "one" and self.order.streams > 0

    def next_head(self) -> Asking:
        """Ask for the next item's head, closing frames passed over; returns an `Incoming`, or None at the end."""
        while not self.done:
            incoming: Incoming | None = yield from receive(self.order, self.options, self.base)
            if incoming is None:
                self._ended()
                return None
            self.items += 1
            self.base += incoming.total_bytes
            if not isinstance(incoming, Closing):
                return incoming
        return None

    def _ended(self) -> None:
        """The source ends between two items: lawful in the bare form, and behind a LAST."""
        if not self.require_last:
            return
        self.order.end(self.base)
        if not self.items:
            message = "the source is empty: not even a closing frame came"
            where = "stream"
            raise TruncatedError(
                message, needed=1, available=0, code=Code.STREAM_TRUNCATED, where=where, offset=self.base
            )


class FrameDecoder:
    """Tensors of a stream from bytes that are fed, or received into the memory that it offers.

    Args:
        strict, verify, expect, limits, alloc, threads: as in `decode`.
        require_last: whether the end before a LAST (an empty stream too) is an error.
        streams: "one" stops after LAST, what is fed behind it is `unused_data`; "all", and None, go on.

    Fed bytes are copied once, into the memory that the tensor then views; `get_buffer` and `buffer_updated` (as
    `asyncio.BufferedProtocol` has them) receive into it without that copy.

    Example:
        >>> import numpy as np
        >>> import hurray_wire as hw
        >>> t = hw.BlockPagedTensor(np.ones((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> decoder, blob = FrameDecoder(), hw.encode(t)
        >>> decoder.feed(blob[:100])
        >>> decoder.next()
        NEED_DATA
        >>> decoder.feed(blob[100:])
        >>> decoder.next() == t
        True
        >>> decoder.close()
    """

    def __init__(
        self,
        *,
        strict: bool = True,
        verify: bool = True,
        expect: Any = None,
        limits: Limits | None = None,
        alloc: Alloc | None = None,
        require_last: bool = True,
        streams: Streams = None,
        threads: int | None = None,
    ) -> None:
        options = DecodeOptions(strict=strict, verify=verify, expect=expect, alloc=alloc, threads=threads)
        if limits is not None:
            options = replace(options, limits=limits)
        self._progress = Progress(options, require_last=require_last, streams=streams)
        self._ready: deque[BlockPagedTensor | HurrayWireError] = deque()
        self._items = _received(self._progress, self._ready)
        self._wanted: Vector = []
        self._closed = self._broken = False
        self._unused = bytearray()
        self._resume(None)

    def _resume(self, count: int | None) -> None:
        """Let the receiving go on to its next wish; an error comes out of `next`, behind what was whole before it."""
        try:
            self._wanted = self._items.send(count)  # type: ignore[arg-type]
        except StopIteration:
            self._wanted = []
        except HurrayWireError as error:
            self._wanted, self._broken = [], True
            self._ready.append(error.with_traceback(None))  # which holds what was fed
        except BaseException:  # the caller's own, of its alloc: what was fed is lost
            self._wanted, self._broken, self._closed = [], True, True
            raise

    @property
    def eof(self) -> bool:
        """Whether nothing more is wanted: after LAST with streams="one", after an error, after the end."""
        return not self._wanted

    @property
    def unused_data(self) -> bytes:
        """What was fed behind the end."""
        return bytes(self._unused)

    def feed(self, data: Any) -> None:
        """Take bytes, any number of them.

        Raises:
            ValueError: the decoder is closed.
        """
        if self._closed:
            raise ValueError("feed after close")
        source = as_bytes(data)
        at = 0
        while at < source.size and self._wanted:
            room = self._wanted[0]
            count = min(len(room), source.size - at)
            np.frombuffer(room, np.uint8)[:count] = source[at : at + count]
            at += count
            self._resume(count)
        if at < source.size and not self._broken:
            self._unused += source[at:].tobytes()

    def get_buffer(self, hint: int = -1) -> memoryview:
        """Memory to receive into, at least one byte; then `buffer_updated`.

        Raises:
            ValueError: nothing more is wanted (`eof`), or the decoder is closed.
        """
        if self._closed or not self._wanted:
            raise ValueError("no more bytes are wanted")
        return self._wanted[0]

    def buffer_updated(self, count: int) -> None:
        """`count` bytes were received into what `get_buffer` gave."""
        if not self._wanted or not 0 < count <= len(self._wanted[0]):
            raise ValueError(f"{count} bytes were not asked for")
        self._resume(count)

    def next(self) -> BlockPagedTensor | _NeedData:
        """The next whole tensor, or NEED_DATA.

        Raises:
            HurrayWireError: as `decode`, and `sequence`, `stream_id`; after that the decoder is closed.
        """
        if not self._ready:
            return NEED_DATA
        item = self._ready.popleft()
        if isinstance(item, HurrayWireError):
            self._closed = True
            try:
                raise item
            finally:
                del item  # else the error's traceback holds the error
        return item

    def close(self) -> None:
        """No more bytes will come.

        Raises:
            TruncatedError: `truncated` inside an item, `stream_truncated` between items before LAST. Tensors that
                were whole before can still be had from `next`.
        """
        if self._closed:
            return
        self._closed = True
        if self._wanted:
            self._resume(0)
            self._wanted = []
            if self._ready and isinstance(self._ready[-1], HurrayWireError):
                raise self._ready.pop()  # type: ignore[misc]  # an error, seen just now


def _received(progress: Progress, ready: deque[BlockPagedTensor | HurrayWireError]) -> Asking:
    """Ask for item after item; tensors go to `ready`. It knows no decoder: one that is dropped goes at once."""
    while True:
        incoming: Incoming | None = yield from progress.next_head()
        if incoming is None:
            return
        finish = yield from incoming.read()
        ready.append(finish())
        del incoming, finish  # a frame's memory is its tensor's alone
