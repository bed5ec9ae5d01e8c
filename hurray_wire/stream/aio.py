"""The asyncio pair: the same generators and frames, awaited; work that takes long runs in a thread."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from hurray_wire.arrays import Stored
from hurray_wire.inspection import Inspection
from hurray_wire.options import Alloc, Limits, Sending
from hurray_wire.stream.decoder import Streams
from hurray_wire.stream.endpoints import Vector, bounded, check_timeout
from hurray_wire.stream.incoming import Asking, Incoming
from hurray_wire.stream.reader import reader_progress
from hurray_wire.stream.writer import Framing
from hurray_wire.tensor import BlockPagedTensor

__all__ = ["AsyncFrameHeader", "AsyncStreamReader", "AsyncStreamWriter"]

_THREAD_ABOVE = 1 << 20
"""Payload bytes whose checking would hold up other tasks for longer than a thread costs."""


class AsyncStreamReader:
    """`StreamReader` for asyncio: over a non-blocking socket or an `asyncio.StreamReader`; arguments as there.

    A cancelled read leaves the stream in the middle of an item: the reader is then closed.

    Example:
        >>> import asyncio, socket
        >>> import numpy as np, hurray_wire as hw
        >>> t = hw.BlockPagedTensor(np.ones((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> async def main():
        ...     a, b = socket.socketpair()
        ...     a.setblocking(False), b.setblocking(False)
        ...     async with hw.AsyncStreamWriter(a) as writer:
        ...         await writer.write(t)
        ...     found = [x async for x in hw.AsyncStreamReader(b)]
        ...     a.close(), b.close()
        ...     return found == [t]
        >>> asyncio.run(main())
        True
    """

    def __init__(
        self,
        source: socket.socket | asyncio.StreamReader,
        *,
        strict: bool = True,
        verify: bool = True,
        expect: Any = None,
        limits: Limits | None = None,
        alloc: Alloc | None = None,
        require_last: bool = True,
        streams: Streams = None,
        timeout: float | None = None,
        threads: int | None = None,
    ) -> None:
        self._progress = reader_progress(
            strict=strict,
            verify=verify,
            expect=expect,
            limits=limits,
            alloc=alloc,
            require_last=require_last,
            streams=streams or "one",
            threads=threads,
        )
        _check_endpoint(source, asyncio.StreamReader, "source")
        check_timeout(timeout)
        self._source: Any = source
        self._timeout = timeout
        self._lock = asyncio.Lock()
        self._turn = asyncio.Lock()
        self._pending: Incoming | None = None
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> BlockPagedTensor:
        async with self._turn:  # tasks that share a reader get whole tensors, each one
            header = await self.next_header()
            if header is None:
                raise StopAsyncIteration
            return await header.read()

    async def next_header(self) -> AsyncFrameHeader | None:
        """The next tensor's header; None at the end. One whose payload was not read is skipped."""
        pending, self._pending = self._pending, None
        if pending is not None:
            await self.drive(pending.skip())
        if self._ended:
            return None
        incoming: Incoming | None = await self.drive(self._progress.next_head())
        if incoming is None:
            self._ended = True
            return None
        self._pending = incoming
        return AsyncFrameHeader(self, incoming)

    async def drive(self, asking: Asking) -> Any:
        """Move bytes for a generator until it returns."""
        if self._source is None:
            raise ValueError("the reader is closed")
        async with self._lock:
            try:
                vector = next(asking)
                while True:
                    try:
                        count = await asyncio.wait_for(self._fill(vector), self._timeout)
                    except BaseException as error:
                        asking.throw(error)  # so that it says which pages have been written
                        raise
                    vector = asking.send(count)
            except StopIteration as stop:
                return stop.value
            except BaseException:
                self.fail()
                raise

    async def _fill(self, vector: Vector) -> int:
        piece = bounded(vector)[0]
        if isinstance(self._source, socket.socket):
            return await asyncio.get_running_loop().sock_recv_into(self._source, piece)
        data = await self._source.read(len(piece))
        piece[: len(data)] = data
        return len(data)

    def claim(self, incoming: Incoming | None, *, take: bool = True) -> Incoming:
        """The item whose payload comes next, if it is this one; `take`: its payload is dealt with from now on."""
        if incoming is None or self._pending is not incoming:
            raise ValueError("the payload was read or skipped")
        if take:
            self._pending = None
        return incoming

    def fail(self) -> None:
        """Close after an error, which has been told: nothing more comes."""
        self._ended = True
        self.close()

    def close(self) -> None:
        """Read no more; the source stays open."""
        self._source = None
        self._ended |= self._progress.done and self._pending is None
        self._pending = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncFrameHeader:
    """`FrameHeader` for asyncio: `.inspection`, then awaited `read`, `read_into` or `skip`, once.

    Example:
        >>> import asyncio
        >>> import numpy as np, hurray_wire as hw
        >>> t = hw.BlockPagedTensor(np.ones((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> async def main():
        ...     source = asyncio.StreamReader()
        ...     source.feed_data(hw.encode(t))
        ...     header = await hw.AsyncStreamReader(source).next_header()
        ...     return header.inspection.framing, await header.read() == t
        >>> asyncio.run(main())
        ('hrkv', True)
    """

    def __init__(self, reader: AsyncStreamReader, incoming: Incoming) -> None:
        self._reader = reader
        self._incoming: Incoming | None = incoming
        self.inspection: Inspection = incoming.inspection()

    def _taken(self) -> Incoming:
        incoming = self._reader.claim(self._incoming)
        self._incoming = None
        return incoming

    async def _finished(self, asking: Asking, nbytes: int) -> BlockPagedTensor:
        finish = await self._reader.drive(asking)
        try:
            if nbytes > _THREAD_ABOVE:
                return await asyncio.to_thread(finish)
            tensor: BlockPagedTensor = finish()
        except BaseException:
            self._reader.fail()
            raise
        return tensor

    async def read(self) -> BlockPagedTensor:
        """Receive the payload and decode it."""
        incoming = self._taken()
        return await self._finished(incoming.read(), incoming.total_bytes)

    async def read_into(self, pool: Any, page_ids: Any) -> BlockPagedTensor:
        """Receive the pages straight into `pool[page_ids[j]]`."""
        incoming = self._reader.claim(self._incoming, take=False)
        asking = incoming.read_into(pool, page_ids)  # refuses a pool or ids that cannot serve; then it is taken
        self._taken()
        return await self._finished(asking, incoming.total_bytes)

    async def skip(self) -> None:
        """Receive the payload and forget it."""
        if self._incoming is not None:
            await self._reader.drive(self._taken().skip())


class AsyncStreamWriter:
    """`StreamWriter` for asyncio: over a non-blocking socket or an `asyncio.StreamWriter`; arguments as there.

    Tasks may share a writer: frames are never interleaved.

    Example:
        >>> import asyncio, socket
        >>> import numpy as np, hurray_wire as hw
        >>> t = hw.BlockPagedTensor(np.ones((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> async def main(sock):
        ...     async with hw.AsyncStreamWriter(sock) as writer:
        ...         await writer.write(t)
        >>> left, right = socket.socketpair()
        >>> left.setblocking(False)
        >>> asyncio.run(main(left))
        >>> list(hw.StreamReader(right)) == [t]
        True
        >>> left.close(), right.close()
        (None, None)
    """

    def __init__(
        self,
        sink: socket.socket | asyncio.StreamWriter,
        *,
        framing: Literal["hrkv", "bare"] = "hrkv",
        frame_alignment: int = 64,
        stream_id: int | None = None,
        timeout: float | None = None,
        **options: Unpack[Sending],
    ) -> None:
        self._framing = Framing(framing, frame_alignment, stream_id, options)
        _check_endpoint(sink, asyncio.StreamWriter, "sink")
        check_timeout(timeout)
        self._sink: Any = sink
        self._timeout = timeout
        self._lock = asyncio.Lock()
        self._finished = False

    @property
    def stream_id(self) -> int:
        """The stream's number, the same in each of its frames."""
        return self._framing.options.stream_id

    async def write(self, tensor: BlockPagedTensor) -> None:
        """Send one tensor; errors as `StreamWriter.write`."""
        async with self._lock:
            self._check_open()
            if tensor.nbytes > _THREAD_ABOVE:
                parts = await asyncio.to_thread(self._framing.parts, tensor)
            else:
                parts = self._framing.parts(tensor)
            await self._send(parts)
            self._framing.sent()

    def _check_open(self) -> None:
        if self._sink is None or self._finished:
            raise ValueError("the writer is closed" if self._sink is None else "the stream is finished")

    async def _send(self, parts: Sequence[Stored]) -> None:
        try:
            for part in parts:
                await self._send_piece(memoryview(part))
        except BaseException:
            self.close()
            raise

    async def _send_piece(self, piece: memoryview) -> None:
        """A megabyte at a time, so that a timeout measures progress."""
        for at in range(0, len(piece), _THREAD_ABOVE):
            part = piece[at : at + _THREAD_ABOVE]
            if isinstance(self._sink, socket.socket):
                await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(self._sink, part), self._timeout)
            else:
                self._sink.write(bytes(part))  # a transport may keep what it is given until it is sent
                await asyncio.wait_for(self._sink.drain(), self._timeout)

    async def finish(self) -> None:
        """End the stream: send the closing frame. Once; later calls do nothing."""
        async with self._lock:
            if self._finished:
                return
            self._check_open()
            await self._send(self._framing.closing())
            self._finished = True

    def close(self) -> None:
        """Write no more; the sink stays open, and a stream that was not finished is not ended."""
        self._sink = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._sink is not None:
                await self.finish()
        finally:
            self.close()


def _check_endpoint(endpoint: Any, stream: type, name: str) -> None:
    if isinstance(endpoint, socket.socket):
        if endpoint.gettimeout() != 0:
            raise ValueError(f"the {name} socket must be non-blocking: setblocking(False)")
    elif not isinstance(endpoint, stream) and not asyncio.iscoroutinefunction(
        getattr(endpoint, "read" if name == "source" else "drain", None)
    ):
        raise TypeError(f"a {name} is a non-blocking socket or an asyncio.{stream.__name__}, not {endpoint!r}")
