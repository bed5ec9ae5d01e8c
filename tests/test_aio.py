"""The asyncio pair: over non-blocking sockets and asyncio streams, beside other tasks, cancelled, stalled."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from stream_helpers import PATIENCE, TENSOR, encoded, frames_of, kinds, large, per_block, sample
from stream_ways import adrained, drained
from support import raw

import hurray_wire as hw

FORMS: dict[str, dict[str, Any]] = {"raw": {}, "zstd": {"compression": "zstd"}, "aligned": {"frame_alignment": 4096}}
BIG = large(0, pages=256)
"""2 MiB: worked on in a thread, and more than sockets hold."""


@asynccontextmanager
async def ends(*, streams: bool = False) -> AsyncIterator[tuple[Any, Any]]:
    """What a writer and a reader take: two non-blocking sockets, or asyncio streams over them."""
    a, b = socket.socketpair()
    a.setblocking(False)
    b.setblocking(False)
    if not streams:
        with a, b:
            yield a, b
        return
    source_a, sink_a = await asyncio.open_connection(sock=a)
    source_b, sink_b = await asyncio.open_connection(sock=b)
    try:
        yield sink_a, source_b
    finally:
        for sink in (sink_a, sink_b):
            sink.close()
        await asyncio.gather(sink_a.wait_closed(), sink_b.wait_closed(), return_exceptions=True)
        del source_a


def running(main: Callable[[], Awaitable[Any]]) -> Any:
    """Run to the end, in debug mode (which complains of what is never awaited), or fail: never hang."""

    async def bounded() -> Any:
        return await asyncio.wait_for(main(), PATIENCE)

    return asyncio.run(bounded())


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_there_and_back(form: str, streams: bool) -> None:
    tensors = [*kinds().values(), BIG]

    async def main() -> list[TENSOR]:
        async with ends(streams=streams) as (sink, source):

            async def send() -> None:
                async with hw.AsyncStreamWriter(sink, **FORMS[form]) as writer:
                    for tensor in tensors:
                        await writer.write(tensor)

            task = asyncio.create_task(send())
            async with hw.AsyncStreamReader(source) as reader:
                found = [tensor async for tensor in reader]
            await task
            return found

    assert running(main) == [hw.decode(hw.encode(t)) for t in tensors]


def test_bytes_are_those_of_the_blocking_writer() -> None:
    tensors = [sample(0), per_block(1), large(2, pages=3)]

    async def main() -> bytes:
        async with ends() as (sink, source):
            async with hw.AsyncStreamWriter(sink, stream_id=7, frame_alignment=256) as writer:
                for tensor in tensors:
                    await writer.write(tensor)
            sink.shutdown(socket.SHUT_WR)
            parts = []
            while part := await asyncio.get_running_loop().sock_recv(source, 1 << 16):
                parts.append(part)
            return b"".join(parts)

    assert running(main) == encoded(tensors, stream_id=7, frame_alignment=256)


def test_headers_read_read_into_skip() -> None:
    layers = [sample(n) for n in range(5)]
    pool = np.zeros((9, 4, 2, 8), np.float16)

    async def main() -> None:
        async with ends() as (sink, source):
            sink.send(encoded(layers))
            reader = hw.AsyncStreamReader(source)
            header = await reader.next_header()
            assert header is not None
            assert header.inspection.descriptor == layers[0].descriptor
            assert await header.read() == layers[0]
            with pytest.raises(ValueError, match="read or skipped"):
                await header.read()
            header = await reader.next_header()
            assert header is not None
            assert (await header.read_into(pool, [8, 2, 6, 0, 5, 1])).same_tokens(layers[1])
            header = await reader.next_header()
            assert header is not None
            await header.skip()
            await header.skip()
            await reader.next_header()  # passed over
            assert await anext(reader) == layers[4]
            assert await reader.next_header() is None
            assert await reader.next_header() is None

    running(main)
    assert np.array_equal(pool[[8, 2, 6, 0, 5, 1]], layers[1].page_pool)


@pytest.mark.parametrize("ids", [[0], [0, 1, 2, 3, 4, 9], [0, 1, 2, 3, 4, 4]], ids=str)
def test_after_a_callers_fault_right_arguments_work(ids: list[int]) -> None:
    """As with the blocking reader: nothing was taken from the stream."""

    async def main() -> None:
        async with ends() as (sink, source):
            sink.send(encoded([sample(0)]))
            header = await hw.AsyncStreamReader(source).next_header()
            assert header is not None
            pool = np.zeros((9, 4, 2, 8), np.float16)
            with pytest.raises((ValueError, IndexError)):
                await header.read_into(pool, ids)
            assert not pool.any()
            assert (await header.read_into(pool, range(6))).same_tokens(sample(0))

    running(main)


def test_tasks_that_share_a_writer() -> None:
    async def main() -> list[int]:
        async with ends() as (sink, source):
            writer = hw.AsyncStreamWriter(sink)

            async def send(number: int) -> None:
                for i in range(5):
                    layer = number * 10 + i
                    await writer.write(large(layer, pages=20) if i % 2 else sample(layer))

            async def all_of_it() -> None:
                await asyncio.gather(*map(send, range(4)))
                await writer.finish()

            task = asyncio.create_task(all_of_it())
            found = [t.layer_index or 0 async for t in hw.AsyncStreamReader(source)]
            await task
            return found

    assert sorted(running(main)) == [n * 10 + i for n in range(4) for i in range(5)]


def test_tasks_that_share_a_reader() -> None:
    """As threads that share a blocking one: each gets whole tensors, none twice, none lost."""

    async def main() -> list[int]:
        async with ends() as (sink, source):
            reader, found = hw.AsyncStreamReader(source), list[int]()

            async def receive() -> None:
                async for tensor in reader:
                    assert np.array_equal(tensor.page_pool, large(tensor.layer_index or 0, pages=20).page_pool)
                    found.append(tensor.layer_index or 0)

            async def send() -> None:
                async with hw.AsyncStreamWriter(sink) as writer:
                    for layer in range(12):
                        await writer.write(large(layer, pages=20))

            task = asyncio.create_task(send())
            try:
                await asyncio.gather(*(receive() for _ in range(3)))
                await task
            finally:
                task.cancel()
            return found

    assert sorted(running(main)) == list(range(12))


def test_other_tasks_run_meanwhile() -> None:
    """Encoding, waiting and decoding of large tensors leave the loop to others."""
    ticks = [0]

    async def tick() -> None:
        while True:
            await asyncio.sleep(0)
            ticks[0] += 1

    async def main() -> None:
        ticker = asyncio.create_task(tick())
        async with ends() as (sink, source):

            async def send() -> None:
                async with hw.AsyncStreamWriter(sink, compression="zstd") as writer:
                    await writer.write(BIG)

            task = asyncio.create_task(send())
            found = [t async for t in hw.AsyncStreamReader(source)]
            await task
        ticker.cancel()
        assert found == [BIG]

    running(main)
    assert ticks[0] > 10


# Ends and faults.


@pytest.mark.parametrize("streams", [False, True])
def test_leaving_by_an_exception_does_not_end_the_stream(streams: bool) -> None:
    async def leave(writer: hw.AsyncStreamWriter) -> None:
        async with writer:
            await writer.write(sample(0))
            raise RuntimeError("left")

    async def main() -> tuple[list[TENSOR], hw.HurrayWireError | None]:
        async with ends(streams=streams) as (sink, source):
            with pytest.raises(RuntimeError, match="left"):
                await leave(hw.AsyncStreamWriter(sink))
            sink.write_eof() if streams else sink.shutdown(socket.SHUT_WR)
            return await adrained(hw.AsyncStreamReader(source))

    tensors, error = running(main)
    assert tensors == [sample(0)]
    assert isinstance(error, hw.TruncatedError)
    assert error.code == "stream_truncated"


def test_finish_once_and_closed_is_closed() -> None:
    async def main() -> None:
        async with ends() as (sink, source):
            writer = hw.AsyncStreamWriter(sink)
            await writer.write(sample(0))
            await writer.finish()
            await writer.finish()
            with pytest.raises(ValueError, match="finished"):
                await writer.write(sample(1))
            writer.close()
            writer.close()
            with pytest.raises(ValueError, match="closed"):
                await writer.write(sample(1))
            assert await adrained(hw.AsyncStreamReader(source)) == ([sample(0)], None)
            sink.send(encoded([sample(2)]))  # the sockets are their owner's
            assert await adrained(hw.AsyncStreamReader(source)) == ([sample(2)], None)

    running(main)


def test_an_invalid_tensor_sends_nothing_and_the_next_write_works() -> None:
    unsound = hw.decode(raw(bt=np.array([0, 9, 0], "<u4")), strict=False)

    async def main() -> None:
        async with ends() as (sink, source):
            async with hw.AsyncStreamWriter(sink) as writer:
                with pytest.raises(hw.InvalidDescriptorError):
                    await writer.write(unsound)
                await writer.write(sample(1))
            assert await adrained(hw.AsyncStreamReader(source)) == ([sample(1)], None)

    running(main)


@pytest.mark.parametrize("where", ["header", "payload"])
def test_after_an_error_the_reader_is_closed(where: str) -> None:
    frames = [bytearray(f) for f in frames_of([sample(0), sample(1), sample(2)])]
    frames[1][10 if where == "header" else 800] ^= 1

    async def main() -> None:
        async with ends() as (sink, source):
            sink.send(b"".join(frames))
            reader = hw.AsyncStreamReader(source)
            tensors, error = await adrained(reader)
            assert tensors == [sample(0)]
            assert isinstance(error, hw.FrameError)
            assert await adrained(reader) == ([], None)

    running(main)


@pytest.mark.parametrize("kind", ["file", "blocking", "number"])
def test_what_is_no_asyncio_endpoint(kind: str) -> None:
    a, b = socket.socketpair()
    with a, b:
        endpoint: Any = {"file": io.BytesIO(b"data"), "blocking": a, "number": 3}[kind]
        for make in (hw.AsyncStreamReader, hw.AsyncStreamWriter):
            with pytest.raises((TypeError, ValueError)):
                make(endpoint)


def test_drained_is_the_same_either_way() -> None:
    """A cut stream, by both readers: the same tensors, the same error."""
    data = encoded([sample(0), sample(1)])[:-100]

    async def main() -> tuple[list[TENSOR], hw.HurrayWireError | None]:
        source = asyncio.StreamReader()
        source.feed_data(data)
        source.feed_eof()
        return await adrained(hw.AsyncStreamReader(source))

    ours, theirs = running(main), drained(hw.StreamReader(io.BytesIO(data)))
    assert ours[0] == theirs[0]
    assert str(ours[1]) == str(theirs[1])
