"""`StreamReader`: tensors from a file, a socket, a pipe, a callable; thin I/O around `incoming`."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from threading import RLock
from types import TracebackType
from typing import Any

from hurray_wire.errors import HurrayWireError
from hurray_wire.inspection import Inspection
from hurray_wire.options import Alloc, DecodeOptions, Limits
from hurray_wire.stream.decoder import Progress, Streams
from hurray_wire.stream.endpoints import Source, Vector, source_of
from hurray_wire.stream.incoming import Asking, Incoming
from hurray_wire.tensor import BlockPagedTensor

__all__ = ["FrameHeader", "StreamReader"]


def reader_progress(
    *,
    strict: bool,
    verify: bool,
    expect: Any,
    limits: Limits | None,
    alloc: Alloc | None,
    require_last: bool,
    streams: Streams,
    threads: int | None,
) -> Progress:
    """The checked options of every reader."""
    options = DecodeOptions(strict=strict, verify=verify, expect=expect, alloc=alloc, threads=threads)
    if limits is not None:
        options = replace(options, limits=limits)
    return Progress(options, require_last=require_last, streams=streams)


class StreamReader:
    """Every tensor of a source, in order; complete, or an error that says what is missing.

    Args:
        source: a path, a binary file object, a socket, a file descriptor, anything with fileno(), or a callable
            `source(memoryview) -> int`.
        strict, verify, expect, limits, alloc, threads: as in `decode`.
        require_last: whether the end of the source before LAST (an empty source too) is an error.
        streams: "one" stops after LAST having read not one byte more, so that a connection carries stream after
            stream (default on sockets, pipes and callables); "all" goes on (default on paths and files).
        timeout: seconds without a byte after which TimeoutError is raised, on sockets and descriptors.

    Payloads are received straight into aligned memory that a checked header has sized. May be used from any thread.
    After an error the reader is closed.

    Raises (from iterating):
        HurrayWireError: as `decode`, and `sequence`, `stream_id`, `last`, `stream_truncated`. OSError, TimeoutError.

    Example:
        >>> import io, numpy as np
        >>> import hurray_wire as hw
        >>> t = hw.BlockPagedTensor(np.ones((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> sink = io.BytesIO()
        >>> with hw.StreamWriter(sink) as writer:
        ...     writer.write(t)
        >>> [found == t for found in hw.StreamReader(io.BytesIO(sink.getvalue()))]
        [True]
    """

    def __init__(
        self,
        source: Any,
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
            streams=streams,
            threads=threads,
        )
        self._source: Source | None = source_of(source, timeout)
        if streams is None:
            self._progress.streams = "one" if self._source.one_stream else "all"
        self._lock = RLock()
        self._pending: Incoming | None = None
        self._ended = False

    def __iter__(self) -> Iterator[BlockPagedTensor]:
        return self

    def __next__(self) -> BlockPagedTensor:
        with self._lock:
            header = self.next_header()
            if header is None:
                raise StopIteration
            return header.read()

    def next_header(self) -> FrameHeader | None:
        """The next tensor's header, whose payload has not been read; None at the end.

        The header before it is skipped if its payload was not read.

        Raises:
            ValueError: the reader was closed before the end. After an error there is nothing more: None.
        """
        with self._lock:
            pending, self._pending = self._pending, None
            if pending is not None:
                self.drive(pending.skip())
            if self._ended:
                return None
            incoming: Incoming | None = self.drive(self._progress.next_head())
            if incoming is None:
                self._ended = True
                return None
            self._pending = incoming
            return FrameHeader(self, incoming)

    def drive(self, asking: Asking) -> Any:
        """Move bytes for a generator until it returns."""
        if self._source is None:
            raise ValueError("the reader is closed")
        try:
            return _driven(asking, self._source)
        except BaseException:
            self.fail()
            raise

    def claim(self, incoming: Incoming | None, *, take: bool = True) -> Incoming:
        """The item whose payload comes next, if it is this one; `take`: its payload is dealt with from now on."""
        if incoming is None or self._pending is not incoming:
            raise ValueError("the payload was read or skipped")
        if take:
            self._pending = None
        return incoming

    @property
    def lock(self) -> RLock:
        """Held while bytes move."""
        return self._lock

    def fail(self) -> None:
        """Close after an error, which has been told: nothing more comes."""
        self._ended = True
        self.close()

    def close(self) -> None:
        """Give back what the reader opened; a source that was given stays open."""
        source, self._source = self._source, None
        self._ended |= self._progress.done and self._pending is None
        self._pending = None
        if source is not None:
            source.close()

    def __enter__(self) -> StreamReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _driven(asking: Generator[Vector, int, Any], source: Source) -> Any:
    try:
        vector = next(asking)
        while True:
            try:
                count = source.fill(vector)
            except BaseException as error:
                asking.throw(error)  # so that it says which pages have been written
                raise
            vector = asking.send(count)
    except StopIteration as stop:
        return stop.value


class FrameHeader:
    """A tensor of a stream before its payload: look at `.inspection`, then `read`, `read_into` or `skip` it, once.

    Example:
        >>> import io, numpy as np
        >>> import hurray_wire as hw
        >>> t = hw.BlockPagedTensor(np.ones((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> header = hw.StreamReader(io.BytesIO(hw.encode(t))).next_header()
        >>> header.inspection.descriptor.layout.page_size, header.read() == t
        (4, True)
    """

    def __init__(self, reader: StreamReader, incoming: Incoming) -> None:
        self._reader = reader
        self._incoming: Incoming | None = incoming
        self._inspection: Inspection | None = None

    @property
    def inspection(self) -> Inspection:
        """What the header says."""
        if self._inspection is None:
            if self._incoming is None:
                raise ValueError("the payload was read or skipped")
            self._inspection = self._incoming.inspection()
        return self._inspection

    def _taken(self) -> Incoming:
        incoming = self._reader.claim(self._incoming)
        self._inspection = incoming.inspection()
        self._incoming = None
        return incoming

    def _finished(self, asking: Asking) -> BlockPagedTensor:
        finish = self._reader.drive(asking)
        try:
            tensor: BlockPagedTensor = finish()
        except HurrayWireError:
            self._reader.fail()
            raise
        return tensor

    def read(self) -> BlockPagedTensor:
        """Receive the payload and decode it, as `decode` does."""
        with self._reader.lock:
            return self._finished(self._taken().read())

    def read_into(self, pool: Any, page_ids: Any) -> BlockPagedTensor:
        """Receive the pages straight into `pool[page_ids[j]]`, as `decode_into` does.

        Tables stand behind the pool in a stream, so pages are written before they can be checked: whatever fails then
        has `.pages_written`.
        """
        with self._reader.lock:
            incoming = self._reader.claim(self._incoming, take=False)
            asking = incoming.read_into(pool, page_ids)  # refuses a pool or ids that cannot serve; then it is taken
            self._taken()
            return self._finished(asking)

    def skip(self) -> None:
        """Receive the payload and forget it; it is not verified."""
        with self._reader.lock:
            if self._incoming is not None:
                self._reader.drive(self._taken().skip())
