"""Ways to bring bytes to a reader: every kind of source, whole, byte by byte and in ragged pieces.

A `Way` brings a stream's bytes to one kind of reader in pieces of one kind, and gives what came out, the error that
ended it, and the bytes that were left where they came from. Every reader test goes through several of them.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from stream_helpers import PATIENCE, TENSOR, Dribble, Metered, OnlyFileno, OnlyRead, fed, send_all

import hurray_wire as hw

Pieces = Callable[[bytes], Iterable[bytes]]


def whole(data: bytes) -> Iterable[bytes]:
    return [data] if data else []


def bytewise(data: bytes) -> Iterable[bytes]:
    return (data[i : i + 1] for i in range(len(data)))


def ragged(data: bytes) -> Iterable[bytes]:
    """Pieces of 1 byte to a few hundred."""
    rng = random.Random(len(data))
    at = 0
    while at < len(data):
        size = rng.choice((1, 2, 9, 10, 11, 39, 40, 41, rng.randint(1, 400)))
        yield data[at : at + size]
        at += size


class Outcome(NamedTuple):
    """What came out, what ended it, and the bytes that were not taken."""

    tensors: list[TENSOR]
    error: hw.HurrayWireError | None
    left: bytes


def drained(reader: Iterable[TENSOR]) -> tuple[list[TENSOR], hw.HurrayWireError | None]:
    """All that a reader gives, and the error that it ends with."""
    tensors = []
    try:
        for tensor in reader:
            tensors.append(tensor)
    except hw.HurrayWireError as error:
        return tensors, error
    return tensors, None


class Way(NamedTuple):
    name: str
    run: Callable[..., Outcome]
    """`run(data, **options of a reader) -> Outcome`"""


# The decoder without I/O.


def _pull(decoder: hw.FrameDecoder) -> Iterator[TENSOR]:
    while True:
        item = decoder.next()
        if not isinstance(item, TENSOR):
            assert item is hw.NEED_DATA
            return
        yield item


def _feed(pieces: Pieces, data: bytes, **options: Any) -> Outcome:
    decoder = hw.FrameDecoder(**options)

    def everything() -> Iterator[TENSOR]:
        for piece in pieces(data):
            decoder.feed(piece)
            yield from _pull(decoder)
        decoder.close()
        yield from _pull(decoder)

    return Outcome(*drained(everything()), decoder.unused_data)


def _buffer(most: int, data: bytes, **options: Any) -> Outcome:
    decoder, source = hw.FrameDecoder(**options), io.BytesIO(data)

    def everything() -> Iterator[TENSOR]:
        while not decoder.eof:
            memory = decoder.get_buffer(-1)
            assert len(memory) > 0
            count = source.readinto(memory[:most])
            if not count:
                break
            decoder.buffer_updated(count)
            yield from _pull(decoder)
        yield from _pull(decoder)
        decoder.close()

    return Outcome(*drained(everything()), source.read())


# The blocking reader.


def _over_object(make: Callable[[bytes], Any], rest: Callable[[Any], bytes], data: bytes, **options: Any) -> Outcome:
    source = make(data)
    with hw.StreamReader(source, **options) as reader:
        found = drained(reader)
    return Outcome(*found, rest(source))


def _over_path(data: bytes, **options: Any) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream.hrkv"
        path.write_bytes(data)
        with hw.StreamReader(path, **options) as reader:
            return Outcome(*drained(reader), b"")


def _rest(read: Callable[[int], bytes]) -> bytes:
    parts = []
    while part := read(1 << 16):
        parts.append(part)
    return b"".join(parts)


def _over_pipe(wrap: Callable[[int], Any], pieces: Pieces, data: bytes, **options: Any) -> Outcome:
    source, sink = os.pipe()
    wrapped = wrap(source)
    read = wrapped.read if hasattr(wrapped, "read") else partial(os.read, source)
    with fed(send_all(sink), pieces(data), lambda: os.close(sink)):
        with hw.StreamReader(wrapped, **options) as reader:
            found = drained(reader)
        outcome = Outcome(*found, _rest(read))
    wrapped.close() if hasattr(wrapped, "close") else os.close(source)
    return outcome


def _over_socket(timeout: float | None, blocking: bool, pieces: Pieces, data: bytes, **options: Any) -> Outcome:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(blocking)
        with fed(theirs.sendall, pieces(data), lambda: theirs.shutdown(socket.SHUT_WR)):
            with hw.StreamReader(ours, timeout=timeout, **options) as reader:
                found = drained(reader)
            ours.setblocking(True)
            return Outcome(*found, _rest(ours.recv))


def _over_makefile(data: bytes, **options: Any) -> Outcome:
    ours, theirs = socket.socketpair()
    feeding = fed(theirs.sendall, ragged(data), lambda: theirs.shutdown(socket.SHUT_WR))
    with ours, theirs, ours.makefile("rb") as file, feeding:
        with hw.StreamReader(file, **options) as reader:
            found = drained(reader)
        return Outcome(*found, file.read())


# asyncio.


async def adrained(reader: hw.AsyncStreamReader) -> tuple[list[TENSOR], hw.HurrayWireError | None]:
    tensors = []
    try:
        async for tensor in reader:
            tensors.append(tensor)
    except hw.HurrayWireError as error:
        return tensors, error
    return tensors, None


def _over_asyncio(stream: bool, pieces: Pieces, data: bytes, **options: Any) -> Outcome:
    async def receive(ours: socket.socket) -> Outcome:
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        if not stream:
            async with hw.AsyncStreamReader(ours, **options) as reader:
                found = await adrained(reader)
            parts = []
            while part := await loop.sock_recv(ours, 1 << 16):
                parts.append(part)
            return Outcome(*found, b"".join(parts))
        source, sink = await asyncio.open_connection(sock=ours)
        async with hw.AsyncStreamReader(source, **options) as reader:
            found = await adrained(reader)
        outcome = Outcome(*found, await source.read())
        sink.close()
        await sink.wait_closed()
        return outcome

    ours, theirs = socket.socketpair()
    with ours, theirs, fed(theirs.sendall, pieces(data), lambda: theirs.shutdown(socket.SHUT_WR)):
        return asyncio.run(receive(ours))


_object = partial(partial, _over_object)
WAYS = {
    way.name: way
    for way in (
        Way("feed-whole", partial(_feed, whole)),
        Way("feed-bytes", partial(_feed, bytewise)),
        Way("feed-ragged", partial(_feed, ragged)),
        Way("buffer-whole", partial(_buffer, 1 << 30)),
        Way("buffer-bytes", partial(_buffer, 1)),
        Way("buffer-some", partial(_buffer, 23)),
        Way("bytesio", _object(io.BytesIO, lambda s: s.read())),
        Way("dribble", _object(Dribble, lambda s: s.inner.read())),
        Way("callable", _object(Metered, lambda s: s.inner.read())),
        Way("only-read", _object(OnlyRead, lambda s: s.inner.read())),
        Way("path", _over_path),
        Way("pipe", partial(_over_pipe, int, whole)),
        Way("pipe-bytes", partial(_over_pipe, int, bytewise)),
        Way("fileno", partial(_over_pipe, OnlyFileno, ragged)),
        Way("fdopen", partial(_over_pipe, lambda fd: os.fdopen(fd, "rb"), ragged)),
        Way("fdopen-raw", partial(_over_pipe, lambda fd: os.fdopen(fd, "rb", 0), ragged)),
        Way("socket", partial(_over_socket, None, True, whole)),
        Way("socket-bytes", partial(_over_socket, None, True, bytewise)),
        Way("socket-timeout", partial(_over_socket, PATIENCE, True, ragged)),
        Way("socket-nonblocking", partial(_over_socket, None, False, ragged)),
        Way("makefile", _over_makefile),
        Way("aio-socket", partial(_over_asyncio, False, whole)),
        Way("aio-socket-bytes", partial(_over_asyncio, False, bytewise)),
        Way("aio-stream", partial(_over_asyncio, True, ragged)),
    )
}
FEW = ("feed-ragged", "buffer-some", "bytesio", "socket", "aio-socket", "aio-stream")
"""One way of each kind, for tests with many inputs."""
