"""What makes frames a stream (section 4, "A stream"): one form, one stream_id, sequence from 0 in steps of 1, LAST.

State and rules, no bytes: `iter_decode` and the stream readers tell it what they meet.
"""

from __future__ import annotations

from typing import Any

from hurray_wire.errors import Code, FrameError, TruncatedError
from hurray_wire.frame_reader import is_last
from hurray_wire.options import Limits
from hurray_wire.structs.frame import PROLOGUE_PLAN


class StreamOrder:
    """Holds each item to its place: missing, repeated, reordered and foreign frames are named by their sequence."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bounded = limits.stream_bytes is not None or limits.frames is not None
        self.open = False
        """Whether a framed stream has begun and not seen its LAST."""
        self.streams = 0
        """Framed streams and bare items that have ended."""
        self._sequence = 0
        self._stream_id = 0
        self._bytes = 0
        self._frames = 0
        self._at_last = False

    def bare(self, offset: int) -> None:
        """A bare item at `offset`: not inside a framed stream."""
        self._at_last = False
        if self.open:
            message = f"a bare item stands where frame {self._sequence} of stream {self._stream_id:#x} must follow"
            raise FrameError(message, code=Code.MAGIC, where="magic", offset=offset)

    def frame(self, prologue: Any, base: int) -> None:
        """A frame whose header is sound, and which begins at `base`.

        Raises:
            FrameError: `sequence`, `stream_id`.
        """
        if prologue.sequence != self._sequence:
            message = f"is {prologue.sequence}, must be {self._sequence}"
            offset = base + PROLOGUE_PLAN.offset_of("sequence")
            raise FrameError(message, code=Code.SEQUENCE, where="sequence", offset=offset)
        if self.open and prologue.stream_id != self._stream_id:
            message = f"is {prologue.stream_id:#x}, frame {prologue.sequence} must be of stream {self._stream_id:#x}"
            offset = base + PROLOGUE_PLAN.offset_of("stream_id")
            raise FrameError(message, code=Code.STREAM_ID, where="stream_id", offset=offset)
        self._stream_id = prologue.stream_id
        self._sequence += 1
        self.open = True
        self._at_last = is_last(prologue)
        if self._at_last:
            self.open = False
            self.streams += 1
            self._sequence = 0

    def count(self, item_bytes: int) -> None:
        """Add an item to what the limits bound; both counts begin anew behind a LAST, which the bare form lacks."""
        self._bytes += item_bytes
        self._frames += 1
        if self._bounded:
            self._limits.check("stream_bytes", self._bytes, "stream")
            self._limits.check("frames", self._frames, "stream")
        if self._at_last:
            self._bytes = self._frames = 0

    @property
    def sequence(self) -> int:
        """The sequence number that the next frame must have."""
        return self._sequence

    def end(self, offset: int) -> None:
        """The source has ended at `offset`.

        Raises:
            TruncatedError: `stream_truncated`, inside a framed stream.
        """
        if self.open:
            message = f"ends before frame {self._sequence} of stream {self._stream_id:#x}, which must follow"
            raise TruncatedError(
                message, needed=1, available=0, code=Code.STREAM_TRUNCATED, where="stream", offset=offset
            )
