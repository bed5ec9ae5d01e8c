"""asyncio: timeouts, cancellation, peers that go, arrays that change; and `FrameDecoder` as a BufferedProtocol."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import numpy as np
import pytest
from stream_helpers import TENSOR, encoded, kinds, large, sample
from stream_ways import adrained
from test_aio import BIG, ends, running

import hurray_wire as hw

SHORT = 0.2


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("sent", [0, 5, 300, 700])
def test_a_sender_that_stalls_is_a_timeout(sent: int, streams: bool) -> None:
    async def main() -> None:
        async with ends(streams=streams) as (sink, source):
            (sink.write if streams else sink.send)(hw.encode(sample(0))[:sent])
            reader = hw.AsyncStreamReader(source, timeout=SHORT)
            with pytest.raises(TimeoutError):
                await anext(reader)
            assert await adrained(reader) == ([], None)

    running(main)


async def without_end(writer: hw.AsyncStreamWriter) -> None:
    for _ in range(20):
        await writer.write(BIG)


@pytest.mark.parametrize("streams", [False, True])
def test_a_receiver_that_stalls_is_a_timeout(streams: bool) -> None:
    async def main() -> None:
        async with ends(streams=streams) as (sink, _):
            writer = hw.AsyncStreamWriter(sink, timeout=SHORT)
            with pytest.raises(TimeoutError):
                await without_end(writer)
            with pytest.raises(ValueError, match="closed"):
                await writer.write(sample(0))
            if streams:
                sink.transport.abort()

    running(main)


def test_a_timeout_while_pages_are_received_names_them() -> None:
    async def main() -> None:
        async with ends() as (sink, source):
            blob = hw.encode(large(0, pages=8), chunk_bytes=8192)
            sink.send(blob[: len(blob) // 2])
            header = await hw.AsyncStreamReader(source, timeout=SHORT).next_header()
            assert header is not None
            pool = np.zeros((10, 16, 4, 64), np.uint16)
            with pytest.raises(TimeoutError) as caught:
                await header.read_into(pool, range(8))
            written = getattr(caught.value, "pages_written", None)
            assert written is not None
            assert {0, 1, 2} <= set(np.asarray(written).tolist()) <= set(range(8))

    running(main)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("sent", [0, 300, 700])
def test_a_cancelled_read_closes_the_reader(sent: int, streams: bool) -> None:
    """ "A cancelled read leaves the stream in the middle of an item: the reader is then closed." """

    async def main() -> None:
        async with ends(streams=streams) as (sink, source):
            (sink.write if streams else sink.send)(hw.encode(sample(0))[:sent])
            reader = hw.AsyncStreamReader(source)
            task = asyncio.create_task(reader.next_header() if sent < 500 else anext(reader))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await adrained(reader) == ([], None)

    running(main)


def test_a_cancelled_write_closes_the_writer() -> None:
    async def main() -> None:
        async with ends() as (sink, source):
            writer = hw.AsyncStreamWriter(sink)
            task = asyncio.create_task(writer.write(BIG))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for call in (writer.write(sample(0)), writer.finish()):
                with pytest.raises(ValueError, match="closed"):
                    await call
            sink.shutdown(socket.SHUT_WR)
            tensors, error = await adrained(hw.AsyncStreamReader(source))
            assert tensors == []
            assert isinstance(error, hw.TruncatedError)

    running(main)


def test_a_write_that_is_cancelled_before_its_turn_sends_nothing() -> None:
    """It waits for another task's frame: the writer is not to blame, and goes on."""

    async def main() -> None:
        async with ends() as (sink, source):
            writer = hw.AsyncStreamWriter(sink)
            first = asyncio.create_task(writer.write(BIG))
            await asyncio.sleep(0.02)
            second = asyncio.create_task(writer.write(sample(5)))
            await asyncio.sleep(0.02)
            second.cancel()
            reading = asyncio.create_task(adrained(hw.AsyncStreamReader(source)))
            await first
            await writer.write(sample(1))
            await writer.finish()
            assert await reading == ([BIG, sample(1)], None)
            assert second.cancelled()

    running(main)


@pytest.mark.parametrize("streams", [False, True])
def test_a_reader_that_has_gone_is_an_os_error(streams: bool) -> None:
    async def main() -> None:
        a, b = socket.socketpair()
        a.setblocking(False)
        b.close()
        with a:
            sink: Any = a
            if streams:
                _, sink = await asyncio.open_connection(sock=a)
            writer = hw.AsyncStreamWriter(sink)
            with pytest.raises(ConnectionError):
                await without_end(writer)
            with pytest.raises(ValueError, match="closed"):
                await writer.write(sample(0))
            if streams:
                sink.transport.abort()

    running(main)


class Keeping:
    """A sink as asyncio's transports have been since Python 3.12: what cannot be sent at once is kept, not copied."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def write(self, data: Any) -> None:
        self.kept.append(data)

    async def drain(self) -> None:
        """There is room: below the high-water mark nothing is waited for."""


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_the_caller_may_overwrite_its_pool_after_write(compression: Any) -> None:
    """When `write` has returned the tensor is the caller's again, as with the blocking writer."""
    tensor = large(0, pages=6, noise=True)
    pool = tensor.page_pool
    expected = hw.decode(hw.encode(tensor))

    async def main() -> bytes:
        sink = Keeping()
        writer = hw.AsyncStreamWriter(sink, compression=compression)  # type: ignore[arg-type]  # has what is needed
        await writer.write(tensor)
        pool[...] = 9
        await writer.finish()
        return b"".join(sink.kept)

    assert list(hw.iter_decode(running(main))) == [expected]


# FrameDecoder under asyncio's own protocol.


class Receiver(asyncio.BufferedProtocol):
    """What api.md promises: `get_buffer` and `buffer_updated` as `asyncio.BufferedProtocol` has them."""

    def __init__(self) -> None:
        self.decoder = hw.FrameDecoder(streams="one")
        self.found: list[TENSOR] = []
        self.ended = asyncio.get_running_loop().create_future()
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.decoder.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        self.decoder.buffer_updated(nbytes)
        while isinstance(item := self.decoder.next(), TENSOR):
            self.found.append(item)
        if self.decoder.eof:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        try:
            self.decoder.close()
        except hw.HurrayWireError as error:
            self.ended.set_result(error)
        else:
            self.ended.set_result(exc)


@pytest.mark.parametrize("cut", [0, 64, 70, 5000])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_buffered_protocol(compression: Any, cut: int) -> None:
    tensors = [*kinds().values(), BIG]
    data = encoded(tensors, compression=compression)

    async def main() -> tuple[list[TENSOR], Any]:
        a, b = socket.socketpair()
        a.setblocking(False)
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(Receiver, sock=b)
        with a:
            await loop.sock_sendall(a, data[: len(data) - cut])
            a.shutdown(socket.SHUT_WR)
            return protocol.found, await protocol.ended

    found, error = running(main)
    assert found == [hw.decode(hw.encode(t)) for t in tensors[: len(found)]]
    if cut:
        assert isinstance(error, hw.TruncatedError)
        assert len(found) >= len(tensors) - 1
    else:
        assert error is None
        assert len(found) == len(tensors)


@pytest.mark.parametrize("call", ["get", "update", "update-too-many", "update-none"])
def test_buffers_that_were_not_asked_for(call: str) -> None:
    """ValueError, and nothing is harmed by the asking."""
    decoder = hw.FrameDecoder(streams="one")
    if call == "update-too-many":
        with pytest.raises(ValueError, match="asked"):
            decoder.buffer_updated(len(decoder.get_buffer()) + 1)
    if call == "update-none":
        for count in (0, -1):
            with pytest.raises(ValueError, match="asked"):
                decoder.buffer_updated(count)
    decoder.feed(hw.encode(sample(0)))
    assert decoder.eof
    if call == "get":
        with pytest.raises(ValueError, match="no more"):
            decoder.get_buffer()
    if call == "update":
        with pytest.raises(ValueError, match="asked"):
            decoder.buffer_updated(1)
    assert decoder.next() == sample(0)
    decoder.close()
    decoder.close()
