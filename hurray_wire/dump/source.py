"""Where bytes come from: a file read by bounded pieces at any place, or a pipe read through once, forward only.

Never a memory map: a mapped file that shrinks kills the process, a short read can be told.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

_STDIN = 0
_PIECE_BYTES = 1 << 20
_MOST_KEPT_BYTES = 256 << 20
"""A pipe's bytes that are held for reading again: a hostile table must not have a whole stream kept."""


class GoneError(Exception):
    """Bytes of a pipe that cannot be had any more, or not without holding everything before them."""


class Source(Protocol):
    """Bytes by absolute offset. What lies before the last `forget` may not be asked for again."""

    @property
    def size(self) -> int | None:
        """Bytes in all; None while a pipe has not ended."""

    @property
    def kept(self) -> int:
        """The first offset that can still be read."""

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes, fewer where the source ends."""

    def forget(self, offset: int) -> None:
        """Nothing before `offset` will be read again; a pipe reads on to there."""


class FileSource:
    """A file or block device, read at any place."""

    def __init__(self, fd: int, start: int = 0) -> None:
        self._fd = fd
        self._start = start
        self._block_bytes = 0
        if stat.S_ISBLK(os.fstat(fd).st_mode):
            self._block_bytes = os.lseek(fd, 0, os.SEEK_END)

    @property
    def size(self) -> int:
        """Asked anew every time: a file may be cut, or grow, while it is read."""
        return max((self._block_bytes or os.fstat(self._fd).st_size) - self._start, 0)

    @property
    def kept(self) -> int:
        """Everything can be read again."""
        return 0

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes, fewer where the file ends now."""
        length = min(length, self.size - offset)
        if length <= 0:
            return b""
        os.lseek(self._fd, self._start + offset, os.SEEK_SET)
        data = os.read(self._fd, length)
        while len(data) < length and (more := os.read(self._fd, length - len(data))):
            data += more
        return data

    def forget(self, offset: int) -> None:
        """A file is skipped over for nothing."""


class PipeSource:
    """A pipe, socket or terminal, read through once; keeps what has not been forgotten."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._held = bytearray()
        self._first = 0
        self._ended = False

    @property
    def size(self) -> int | None:
        """Known once the end has been met."""
        return self._first + len(self._held) if self._ended else None

    @property
    def kept(self) -> int:
        """What has been forgotten is gone."""
        return self._first

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes, fewer where the pipe has ended.

        Raises:
            GoneError: before what is kept, or so far on that everything in between would have to be held.
        """
        at = offset - self._first
        if at < 0 or at + length > _MOST_KEPT_BYTES:
            raise GoneError
        while len(self._held) < at + length and self._fill(at + length - len(self._held)):
            pass
        return bytes(memoryview(self._held)[at : at + length])

    def _fill(self, wanted: int) -> bool:
        piece = b"" if self._ended else os.read(self._fd, min(wanted, _PIECE_BYTES))
        self._ended = not piece
        self._held += piece
        return bool(piece)

    def forget(self, offset: int) -> None:
        """Drop what lies before, reading on to `offset` where the pipe is not there yet."""
        drop = min(max(offset - self._first, 0), len(self._held))
        del self._held[:drop]
        self._first += drop
        while self._first < offset and not self._ended:
            piece = os.read(self._fd, min(offset - self._first, _PIECE_BYTES))
            self._ended = not piece
            self._first += len(piece)


@contextmanager
def opened(path: str) -> Iterator[Source]:
    """The source behind a path, or standard input for "-".

    Raises:
        OSError: as opening and reading do; a directory is one.
    """
    if path == "-":
        yield _source(_STDIN)
        return
    with Path(path).open("rb", buffering=0) as file:
        yield _source(file.fileno())


def _source(fd: int) -> Source:
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(21, "Is a directory")
    if stat.S_ISREG(mode) or stat.S_ISBLK(mode):
        return FileSource(fd, os.lseek(fd, 0, os.SEEK_CUR))
    return PipeSource(fd)
