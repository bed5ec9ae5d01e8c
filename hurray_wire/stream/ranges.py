"""Bytes by offset of an item that stays where it is: a buffer, a file, or whatever can `read_at(offset, length)`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hurray_wire.arrays import Bytes, as_bytes
from hurray_wire.errors import TruncatedError
from hurray_wire.memory import allocated

ReadAt = Callable[[int, int], Any]
ReadRanges = Callable[[list[tuple[int, int]]], Sequence[Any]]

_AT_ONCE_BYTES = 64 << 20
"""What several ranges asked for in one call may come to: the memory that holds them until they are decoded."""


class RangeReader:
    """Bytes by offset; short only at the end of the source.

    Args:
        read_at: `read_at(offset, length)`.
        read_ranges: several ranges in one call, in the order asked; None where that is no quicker than one by one.
        close: gives back what was opened here.
        owned: whether what is read is memory that nobody else has.
    """

    def __init__(
        self,
        read_at: ReadAt,
        *,
        read_ranges: ReadRanges | None = None,
        close: Callable[[], None] | None = None,
        owned: bool = False,
    ) -> None:
        self._read_at = read_at
        self._read_ranges = read_ranges
        self._close = close
        self.owned = owned

    @classmethod
    def of(cls, source: Any) -> RangeReader:
        """The reader behind a path, a `read_at`, an object that has one, or a buffer."""
        if isinstance(source, str | os.PathLike):
            fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
            return cls(lambda offset, length: _pread(fd, offset, length), close=lambda: os.close(fd), owned=True)
        if hasattr(source, "read_at"):
            ranges, owned = getattr(source, "read_ranges", None), bool(getattr(source, "owned", False))
            return cls(source.read_at, read_ranges=ranges, owned=owned)
        if callable(source):
            return cls(source)
        data = as_bytes(source)
        return cls(lambda offset, length: data[offset : offset + length])

    def read(self, offset: int, length: int) -> Bytes:
        """All `length` bytes, or as many as there are."""
        return as_bytes(self._read_at(offset, length))[:length] if length else np.zeros(0, np.uint8)

    def exactly(self, offset: int, length: int, base: int, needed: int, where: str) -> Bytes:
        """All `length` bytes of an item that begins at `base` and takes `needed`, or TruncatedError."""
        return self._whole(self.read(offset, length), offset, length, base, needed, where)

    def batches(self, ranges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """The ranges, in runs that are worth reading at once: each on its own where the source reads one by one."""
        if self._read_ranges is None:
            return [[one] for one in ranges]
        runs: list[list[tuple[int, int]]] = []
        held = 0
        for offset, length in ranges:
            if not runs or held + length > _AT_ONCE_BYTES:
                runs.append([])
                held = 0
            runs[-1].append((offset, length))
            held += length
        return runs

    def many(self, ranges: list[tuple[int, int]], base: int, needed: int, where: str) -> list[Bytes]:
        """What `exactly` gives, of several ranges."""
        if self._read_ranges is None or len(ranges) < 2:
            return [self.exactly(offset, length, base, needed, where) for offset, length in ranges]
        read = list(self._read_ranges(ranges))
        read += [b""] * (len(ranges) - len(read))  # a source that gives fewer has given none
        return [
            self._whole(as_bytes(data)[:length], offset, length, base, needed, where)
            for data, (offset, length) in zip(read, ranges, strict=False)
        ]

    def _whole(self, data: Bytes, offset: int, length: int, base: int, needed: int, where: str) -> Bytes:
        if data.size < length:
            available = self._available(base, offset + data.size - base)
            raise TruncatedError(needed=needed, available=available, where=where, offset=base + available)
        return data

    def _available(self, base: int, most: int) -> int:
        """How many bytes there are from `base`, of at most so many: found by halves, a byte a look."""
        least = 0
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self.read(base + middle - 1, 1).size else (least, middle - 1)
        return least

    def close(self) -> None:
        """Give back what was opened here; reading is an error from now on."""
        close, self._close = self._close, None
        if close is not None:
            self._read_at = _closed  # the descriptor's number may be another file's by now
            close()


def _closed(offset: int, length: int) -> Any:
    raise ValueError("the frame is closed")


def _pread(fd: int, offset: int, length: int) -> Bytes:
    """A read may give less than asked long before the end."""
    out = allocated(length, None)
    at = 0
    while at < length:
        count = os.preadv(fd, [memoryview(out)[at : at + (1 << 30)]], offset + at)
        if not count:
            break
        at += count
    return out[:at]
