"""`StreamWriter`: tensors into a file, a socket, a pipe, a callable; vectored calls, never joined."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from queue import Queue
from threading import Lock, Thread
from types import TracebackType
from typing import Any, Literal, Unpack

import numpy as np

from hurray_wire import frame_writer
from hurray_wire.arrays import Stored
from hurray_wire.codec import parts_of
from hurray_wire.errors import Code, UnsupportedError
from hurray_wire.forms import Form
from hurray_wire.options import Sending, check_alignment, encode_options
from hurray_wire.payload import payload_of
from hurray_wire.stream.endpoints import Sink, Vector, advanced, sink_of
from hurray_wire.tags import MAX_FRAME_ALIGNMENT, MIN_ALIGNMENT
from hurray_wire.tensor import BlockPagedTensor

__all__ = ["StreamWriter"]

_WRITERS_OWN = ("sequence", "last", "stream_id", "framing")


class Framing:
    """What a stream of frames is made of: options, the next sequence number, the frames' bytes. No I/O."""

    def __init__(self, framing: str, frame_alignment: int, stream_id: int | None, options: Sending) -> None:
        given = [name for name in _WRITERS_OWN if name in options]
        if given:
            raise TypeError(f"{', '.join(given)} of a stream's frames are the writer's affair")
        check_alignment("frame_alignment", frame_alignment, MAX_FRAME_ALIGNMENT)
        if framing == Form.BARE and frame_alignment != MIN_ALIGNMENT:
            message = 'the bare form has no padding to align items with: use framing="hrkv"'
            raise UnsupportedError(message, code=Code.BARE_FORM, where="frame_alignment")
        if stream_id is None:
            stream_id = int.from_bytes(os.urandom(8), "little")
        checked = encode_options(options)
        self.options = replace(checked, framing=framing, stream_id=stream_id, last=False)
        self.frame_alignment = frame_alignment
        self.sequence = 0

    def parts(self, tensor: BlockPagedTensor) -> Sequence[Stored]:
        """The next frame's bytes; its number counts only when `sent` says so."""
        options = replace(self.options, sequence=self.sequence)
        payload = payload_of(tensor, options)
        if options.framing == Form.BARE:
            return parts_of(payload, options)
        return frame_writer.frame_parts(payload, options, self.frame_alignment)

    def sent(self) -> None:
        """The frame that `parts` gave is on its way."""
        self.sequence += 1

    def closing(self) -> Sequence[Stored]:
        """What ends the stream: a closing frame; nothing in the bare form."""
        if self.options.framing == Form.BARE:
            return []
        options = replace(self.options, sequence=self.sequence, last=True)
        return [frame_writer.closing_frame(options, self.frame_alignment)]

    @property
    def compresses(self) -> bool:
        """Whether making a frame takes long enough to do it while the one before is sent."""
        return self.options.compression is not None


def vector_of(parts: Sequence[Stored]) -> Vector:
    """The pieces as memory for vectored calls."""
    return [memoryview(part) for part in parts if len(part)]


class StreamWriter:
    """Tensors to a sink as one stream; complete when `finish` has sent the closing frame.

    Args:
        sink: a path, a binary file object, a socket, a file descriptor, anything with fileno(), or a callable
            `sink(list of memoryviews)` that takes all (None) or says how many bytes it took.
        framing: "hrkv" or "bare" (which has no closing frame, order or completeness).
        frame_alignment: bytes, a power of two up to 2 MiB to which every frame is padded.
        stream_id: None draws one.
        timeout: seconds without progress after which TimeoutError is raised, on sockets and descriptors.
        **options: of `encode`, but sequence, last and stream_id, which are the writer's affair.

    Leaving the context sends the closing frame; leaving it by an exception does not, so that the receiver notices. A
    path is written beside and renamed by `finish`. Threads may share a writer: frames are never interleaved. With
    compression, `write` returns when a frame is compressed, and it is sent while the next one is; its errors come out
    of the next call. After an error of the sink the writer is closed; a tensor that cannot be encoded sends nothing
    and leaves the stream as it was.

    Example:
        >>> import io, numpy as np
        >>> import hurray_wire as hw
        >>> t = hw.BlockPagedTensor(np.ones((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> sink = io.BytesIO()
        >>> with StreamWriter(sink, compression="zstd") as writer:
        ...     writer.write(t)
        >>> len(list(hw.iter_decode(sink.getvalue())))
        1
    """

    def __init__(
        self,
        sink: Any,
        *,
        framing: Literal["hrkv", "bare"] = "hrkv",
        frame_alignment: int = 64,
        stream_id: int | None = None,
        timeout: float | None = None,
        **options: Unpack[Sending],
    ) -> None:
        self._framing = Framing(framing, frame_alignment, stream_id, options)
        self._sink: Sink | None = sink_of(sink, timeout)
        self._lock = Lock()
        self._finished = False
        self._sender: Sender | None = None

    @property
    def stream_id(self) -> int:
        """The stream's number, the same in each of its frames."""
        return self._framing.options.stream_id

    def write(self, tensor: BlockPagedTensor) -> None:
        """Send one tensor.

        Raises:
            HurrayWireError: the tensor cannot be encoded; nothing was sent.
            OSError, TimeoutError: of the sink; the writer is then closed.
            ValueError: the writer is finished or closed.
        """
        with self._lock:
            self._check_open()
            parts = self._framing.parts(tensor)
            if self._framing.compresses:
                self._queue([_own(part, tensor) for part in parts])
            else:
                self._send(parts)
            self._framing.sent()

    def _check_open(self) -> None:
        if self._sink is None or self._finished:
            raise ValueError("the writer is closed" if self._sink is None else "the stream is finished")

    def _queue(self, parts: Sequence[Stored]) -> None:
        if self._sender is None or not self._sender.here:
            assert self._sink is not None
            self._sender = Sender(self._sink)
        try:
            self._sender.put(vector_of(parts))
        except BaseException:
            self._close()
            raise

    def _send(self, parts: Sequence[Stored]) -> None:
        assert self._sink is not None
        try:
            send(self._sink, vector_of(parts))
        except BaseException:
            self._close()
            raise

    def finish(self) -> None:
        """End the stream: send the closing frame, and give a path its name. Once; later calls do nothing."""
        with self._lock:
            if self._finished:
                return
            self._check_open()
            try:
                self._drain()
                assert self._sink is not None
                send(self._sink, vector_of(self._framing.closing()))
                self._sink.commit()
            except BaseException:
                self._close()
                raise
            self._finished = True

    def _drain(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None and sender.here:
            sender.join()

    def close(self) -> None:
        """Give back what the writer opened; a stream that was not finished does not look whole."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        sink, self._sink = self._sink, None
        sender, self._sender = self._sender, None
        if sender is not None and sender.here:
            sender.abandon()
        if sink is not None:
            sink.close()

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._sink is not None:
                self.finish()
        finally:
            self.close()


def send(sink: Sink, vector: Vector) -> None:
    """All of a vector, in as many calls as it takes."""
    while vector:
        count = sink.take(vector)
        if count <= 0:
            raise OSError(errno.EIO, "the sink takes no more bytes, and does not say why")
        vector = advanced(vector, count)


def _own(part: Stored, tensor: BlockPagedTensor) -> Stored:
    """A part that is the caller's memory is copied, since `write` returns before it is sent."""
    if isinstance(part, bytes):
        return part
    callers = (tensor.page_pool, tensor.scales, tensor.zero_points)
    return part.copy() if any(a is not None and np.may_share_memory(part, a) for a in callers) else part


class Sender:
    """A thread that sends one frame while the next is made."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._frames: Queue[Vector | None] = Queue(maxsize=1)
        self._error: BaseException | None = None
        self._process = os.getpid()
        self._abandoned = False
        self._thread = Thread(target=self._run, name="hurray_wire sender", daemon=True)
        self._thread.start()

    @property
    def here(self) -> bool:
        """Whether the thread is one of this process: a fork leaves it, and what it was to send, behind."""
        return self._process == os.getpid()

    def _run(self) -> None:
        while True:
            vector = self._frames.get()
            if vector is None:
                return
            if self._error is None and not self._abandoned:
                try:
                    send(self._sink, vector)
                except BaseException as error:
                    self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            self._abandoned = True
            raise error

    def put(self, vector: Vector) -> None:
        """Queue a frame behind the one that is being sent; raises the error of an earlier one."""
        self._raise()
        self._frames.put(vector)

    def join(self) -> None:
        """Until all is sent; raises the first error."""
        self._frames.put(None)
        self._thread.join()
        self._raise()

    def abandon(self) -> None:
        """Send nothing more; what is on its way may still fail or go through."""
        self._abandoned = True
        self._frames.put(None)
        self._thread.join()
