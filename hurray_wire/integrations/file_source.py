"""Bytes of a file on any fsspec file system, by ranges that are worth a request; and files that appear whole or not."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hurray_wire.arrays import Bytes, as_bytes
from hurray_wire.stream.endpoints import PathSink, Vector, believed

Range = tuple[int, int]

_MERGED_BYTES = 64 << 20
"""What one request for several ranges may come to."""
_PIECE_BYTES = 16 << 20
"""What a file is given at a time: some buffer all that they are given."""
_APPEARS_WHOLE = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "tos"))
"""Object stores whose files are there when they are committed, and where a rename would be another copy."""


def is_local(fs: Any) -> bool:
    """Whether paths are the operating system's."""
    return not protocols(fs).isdisjoint(("file", "local"))


def protocols(fs: Any) -> set[str]:
    """What a file system's paths may begin with."""
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


class FileSource:
    """A file's bytes by offset, for `open_frame`: near ranges in one request, several requests at once.

    Args:
        size: of the file, or None where the store does not say: then ranges are not held to it.
        ahead: ranges that opening is known to want, fetched together at the first read.
        max_gap: bytes between two ranges below which they are one request.
    """

    def __init__(self, fs: Any, path: str, size: int | None, ahead: Sequence[Range], max_gap: int) -> None:
        self._fs = fs
        self._path = path
        self._size = size
        self._ahead = [self._within(*one) for one in ahead]
        self._max_gap = max_gap
        self._kept: list[tuple[int, Bytes]] = []

    def read_at(self, offset: int, length: int) -> Any:
        """The bytes from `offset` on, fewer at the end of the file."""
        if self._ahead:
            wanted, self._ahead = self._ahead, []
            self._kept = [(start, data) for (start, _), data in zip(wanted, self._fetch(wanted), strict=True)]
        start, length = self._within(offset, length)
        if not length:
            return b""
        for first, data in self._kept:
            if first <= start and start + length <= first + data.size:
                return data[start - first : start - first + length]
        return self._fs.cat_file(self._path, start=start, end=start + length)

    def read_ranges(self, ranges: Sequence[Range]) -> list[Bytes]:
        """Several ranges, in few requests, which an asynchronous store answers at once."""
        return self._fetch([self._within(*one) for one in ranges])

    def _within(self, offset: int, length: int) -> Range:
        """As much of a range as the file has: stores differ in what they make of the rest."""
        if self._size is None:
            return offset, length
        start = min(offset, self._size)
        return start, min(length, self._size - start)

    def _fetch(self, ranges: Sequence[Range]) -> list[Bytes]:
        requests = merged(ranges, self._max_gap)
        starts, ends = [start for start, _ in requests], [end for _, end in requests]
        answers = self._fs.cat_ranges([self._path] * len(requests), starts, ends, on_error="raise") if requests else []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        blocks = list(map(as_bytes, answers)) + [as_bytes(b"")] * (len(requests) - len(answers))
        places = [(bisect_right(starts, start) - 1, start, length) for start, length in ranges]
        return [blocks[i][start - starts[i] :][:length] if length else as_bytes(b"") for i, start, length in places]


def merged(ranges: Sequence[Range], max_gap: int) -> list[tuple[int, int]]:
    """(start, end) of requests that cover the ranges, those together that are no more than `max_gap` apart."""
    requests: list[tuple[int, int]] = []
    for start, length in sorted(ranges):
        if not length:
            continue
        if requests and start <= requests[-1][1] + max_gap and start + length - requests[-1][0] <= _MERGED_BYTES:
            requests[-1] = (requests[-1][0], max(requests[-1][1], start + length))
        else:
            requests.append((start, start + length))
    return requests


class _FileSink:
    """What both ways of writing to a file system share."""

    file: Any

    def take(self, vector: Vector) -> int:
        """All of the vector."""
        for memory in vector:
            for at in range(0, len(memory), _PIECE_BYTES):
                piece = memory[at : at + _PIECE_BYTES]
                while len(piece):
                    count = self.file.write(piece)
                    piece = piece[len(piece) if count is None else believed(count, 1, len(piece), "the file took") :]
        return sum(map(len, vector))


class CommittedSink(_FileSink):
    """A file of an object store: there when it is committed."""

    def __init__(self, fs: Any, path: str) -> None:
        self.file: Any = fs.open(path, "wb", autocommit=False)

    def commit(self) -> None:
        """The file is there from now on."""
        self.file.close()
        self.file.commit()
        self.file = None

    def close(self) -> None:
        """Drop what was not committed."""
        file, self.file = self.file, None
        if file is not None:
            with suppress(Exception):  # what it has to upload still is of no use
                file.close()
            with suppress(Exception):  # uncommitted, it is nothing that anybody sees
                file.discard()


class RenamedSink(_FileSink):
    """A file written beside its name and moved there when it is whole."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path
        self._beside = f"{path}.{os.urandom(8).hex()}.part"
        self.file: Any = fs.open(self._beside, "wb")

    def commit(self) -> None:
        """The file is there from now on."""
        self.file.close()
        self._fs.mv(self._beside, self._path)
        self.file = None

    def close(self) -> None:
        """Drop what was not moved."""
        file, self.file = self.file, None
        if file is not None:
            with suppress(Exception):
                file.close()
            with suppress(Exception):  # under its own name it looks like what it is
                self._fs.rm_file(self._beside)


def sink_of(fs: Any, path: str) -> PathSink | CommittedSink | RenamedSink:
    """A sink whose file appears under `path` at `commit`, whole, in the place of what was there."""
    if is_local(fs):
        return PathSink(path)
    return RenamedSink(fs, path) if protocols(fs).isdisjoint(_APPEARS_WHOLE) else CommittedSink(fs, path)
