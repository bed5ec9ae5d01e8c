"""A shared folder of segments: runs of chunks of one sequence, all layers in one stream of frames, found by chunk.

A segment is written beside and gets its name when it is whole; every other chunk in it is a hard link to the same
file. What is found is therefore complete, a reader of a file that is replaced meanwhile goes on reading the old one,
and no index can disagree with the files. Several ranks keep a file each; a chunk is there when all ranks' are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from hurray_wire.errors import StoreError
from hurray_wire.options import Alloc
from hurray_wire.stream.reader import StreamReader
from hurray_wire.stream.writer import StreamWriter
from hurray_wire.tensor import BlockPagedTensor

__all__ = ["FoundSegment", "Segment", "SegmentFolder", "SegmentSink", "SegmentStore", "SegmentWriter"]

_SUFFIX = ".hrkv"


class FoundSegment(Protocol):
    """A segment that holds chunks of those that were asked for: `keys[first:stop]`; `where` is its name in errors."""

    @property
    def first(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def where(self) -> str: ...

    def open(self, expect: Mapping[str, Any], *, alloc: Alloc | None = None) -> StreamReader:
        """A reader of its frames; `expect`, `alloc` as in `decode`. StoreError: it is gone."""


class SegmentSink(Protocol):
    """A segment that is written: whole after `finish`, nothing where it was closed before. StoreError from each."""

    def write(self, tensor: BlockPagedTensor) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()


class SegmentStore(Protocol):
    """Where segments are kept, or go: a folder, or connections."""

    def has(self, key: str) -> bool: ...

    def leading(self, keys: Sequence[str]) -> int: ...

    def segments(self, keys: Sequence[str]) -> Sequence[FoundSegment]: ...

    def writer(self, keys: Sequence[str]) -> SegmentSink: ...

    def discard(self, keys: Sequence[str]) -> None: ...

    def close(self) -> None: ...


class Segment(NamedTuple):
    """A file, and which of the chunks that were asked for it holds: `keys[first:stop]`."""

    path: Path
    first: int
    stop: int

    @property
    def where(self) -> str:
        """Its name in errors."""
        return str(self.path)

    def open(self, expect: Mapping[str, Any], *, alloc: Alloc | None = None) -> StreamReader:
        """A reader of its frames; `expect`, `alloc` as in `decode`.

        Raises:
            StoreError: the file is gone.
        """
        try:
            return StreamReader(self.path, expect=dict(expect), alloc=alloc)
        except OSError as error:
            raise StoreError(f"the segment is gone: {error}", where=self.where, cause=error) from error


class SegmentFolder:
    """Segments under a folder.

    Args:
        folder: made where it is missing; on a file system with hard links.
        rank, ranks: which of how many parts of each chunk is this process's.
        **options: of `StreamWriter`: compression, checksum, threads.

    Example:
        >>> import numpy as np
        >>> t = BlockPagedTensor(np.ones((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> folder = SegmentFolder("segments")
        >>> with folder.writer(["aa", "bb"]) as writer:
        ...     writer.write(t)
        >>> folder.leading(["aa", "bb", "cc"]), folder.segments(["bb"])[0].path.name
        (2, 'bb.0of1.hrkv')
    """

    def __init__(self, folder: str | os.PathLike[str], *, rank: int = 0, ranks: int = 1, **options: Any) -> None:
        self._folder, self._rank, self._ranks, self._options = Path(folder), rank, ranks, options

    def path(self, key: str, rank: int | None = None) -> Path:
        """Where a chunk's file is, of this rank or another; two levels keep folders small."""
        name = f"{key}.{self._rank if rank is None else rank}of{self._ranks}{_SUFFIX}"
        return self._folder / key[:2] / name

    def has(self, key: str) -> bool:
        """Whether all ranks' parts of a chunk are there."""
        return all(self.path(key, rank).exists() for rank in range(self._ranks))

    def leading(self, keys: Sequence[str]) -> int:
        """How many of a sequence's chunks are there, from the first on, without a gap."""
        return next((i for i, key in enumerate(keys) if not self.has(key)), len(keys))

    def segments(self, keys: Sequence[str]) -> list[Segment]:
        """The files that hold chunks, in order, each once for a run of chunks.

        Raises:
            StoreError: a chunk is gone.
        """
        found: list[Segment] = []
        last = None
        for i, key in enumerate(keys):
            path = self.path(key)
            try:
                stat = path.stat()
            except OSError as error:
                raise StoreError(f"chunk {key} is gone: {error}", where=str(path), cause=error) from error
            if (stat.st_dev, stat.st_ino) == last:
                found[-1] = found[-1]._replace(stop=i + 1)
            else:
                found.append(Segment(path, i, i + 1))
            last = stat.st_dev, stat.st_ino
        return found

    def writer(self, keys: Sequence[str]) -> SegmentWriter:
        """A segment to be written, of the chunks that follow one another."""
        return SegmentWriter(self, keys, self._options)

    def discard(self, keys: Sequence[str]) -> None:
        """Take chunks away, this rank's part: nobody finds them then. A file that is not there is of no account."""
        for key in keys:
            self.path(key).unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is open between two calls."""


class SegmentWriter(SegmentSink):
    """One segment: frames are written, then it gets its names. Left by an exception, or closed, it leaves nothing.

    Raises (from every method):
        StoreError: the folder is full, read-only, gone; nothing is left under any name then.
    """

    def __init__(self, folder: SegmentFolder, keys: Sequence[str], options: Any) -> None:
        self._folder, self._keys = folder, list(keys)
        self._path = folder.path(self._keys[-1])
        self._writer = self._guarded(lambda: self._open(options))

    def _open(self, options: Any) -> StreamWriter:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return StreamWriter(self._path, **options)

    def _guarded(self, call: Any) -> Any:
        try:
            return call()
        except OSError as error:
            self.close()
            raise StoreError(f"the segment was not kept: {error}", where=str(self._path), cause=error) from error

    def write(self, tensor: BlockPagedTensor) -> None:
        """Add a frame."""
        self._guarded(lambda: self._writer.write(tensor))

    def finish(self) -> None:
        """The segment is whole: name it, its last chunk first, so that a name found leads to all of it."""
        self._guarded(self._writer.finish)
        self._guarded(self._link)

    def _link(self) -> None:
        for key in self._keys[:-1]:
            path = self._folder.path(key)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(self._path, path)
            except FileExistsError:
                continue  # somebody else has kept the same chunk

    def close(self) -> None:
        """Give up what was not finished."""
        writer = getattr(self, "_writer", None)
        if writer is not None:
            writer.close()
