"""Frames in files of any file system or object store that fsspec reaches: one sequence, or one layer, by byte ranges.

A file of many frames is a plain HRKV stream; an index beside it (`file_index`) says where each frame lies. Data comes
first and the index last, both appear whole, and the index names each frame by its header's checksum: a file without its
index can be given one, and an index that is not the file's is noticed before a value is handed out.

fsspec is imported only where a path comes without its file system.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, Unpack

from hurray_wire.errors import ChecksumError, Code, FrameError, StoreError, TruncatedError, UnsupportedError
from hurray_wire.forms import Form
from hurray_wire.frame_reader import read_head, read_prologue
from hurray_wire.inspection import inspect
from hurray_wire.integrations.file_index import Entry, Index, entry_of
from hurray_wire.integrations.file_source import FileSource, is_local, sink_of
from hurray_wire.options import DEFAULT_LIMITS, Limits, Sending
from hurray_wire.order import StreamOrder
from hurray_wire.stream import Frame
from hurray_wire.stream import open_frame as open_source
from hurray_wire.stream.endpoints import Sink
from hurray_wire.stream.writer import Framing, send, vector_of
from hurray_wire.structs.frame import PROLOGUE_PLAN
from hurray_wire.tensor import BlockPagedTensor

__all__ = ["FrameFile", "FrameFileWriter", "build_index", "open_frame"]

SUFFIX = ".hrkx"
"""What an index is called after its file."""
MAX_GAP = 64 << 10
"""Bytes that cost less than another request: a tenth of a millisecond at a gigabyte a second."""
_AHEAD_BYTES = 64 << 10
"""Of a frame that no index tells of, what is read at both ends of the file to begin with."""
_MOST_INDEX_BYTES = 1 << 30


def open_frame(
    path: Any,
    offset: int = 0,
    *,
    fs: Any = None,
    limits: Limits = DEFAULT_LIMITS,
    expect: Any = None,
    verify: bool = True,
    max_gap: int = MAX_GAP,
) -> Frame:
    """`hurray_wire.open_frame` of a file on any file system: head and tables in one round trip, the pool left there.

    Args:
        path: a URL, or a path of `fs`.
        fs: an fsspec file system; None for that of the URL.
        max_gap: bytes between two ranges below which they are fetched as one.

    Raises:
        As `hurray_wire.open_frame`; FileNotFoundError and other errors of the file system pass through.

    Example:
        >>> import numpy as np, fsspec, hurray_wire as hw
        >>> t = hw.BlockPagedTensor(np.ones((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> memory = fsspec.filesystem("memory")
        >>> memory.pipe_file("/one.hrkv", hw.encode(t))
        >>> open_frame("memory://one.hrkv").gather(0).shape, open_frame("/one.hrkv", fs=memory).tensor() == t
        ((4, 1, 8), True)
    """
    store, name = _reached(path, fs)
    if is_local(store):
        return open_source(name, offset, limits=limits, expect=expect, verify=verify)
    size = store.info(name).get("size")
    ahead = [(offset, _AHEAD_BYTES)]
    if size is not None:
        ahead.append((max(offset, size - _AHEAD_BYTES), _AHEAD_BYTES))
    source = FileSource(store, name, size, ahead, max_gap)
    return open_source(source, offset, limits=limits, expect=expect, verify=verify)


def _reached(path: Any, fs: Any) -> tuple[Any, str]:
    """The file system, and the path as it knows it."""
    path = os.fspath(path)
    if fs is None:
        import fsspec

        fs, name = fsspec.core.url_to_fs(path)
        return fs, name
    return fs, fs._strip_protocol(path)


class FrameFileWriter:
    """A file of many frames, and its index: both appear whole when the context is left, or not at all.

    Args:
        path: a URL, or a path of `fs`.
        fs: an fsspec file system; None for that of the URL.
        frame_alignment, stream_id, **options: as for `StreamWriter`. Smaller chunks (`chunk_bytes`) let readers fetch
            less for one sequence.

    Raises:
        StoreError: the file system took less than all (it is full, say). What was there before still is.

    Example:
        >>> import numpy as np, hurray_wire as hw
        >>> from hurray_wire.integrations.fsspec import FrameFile, FrameFileWriter
        >>> t = hw.BlockPagedTensor(np.ones((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> with FrameFileWriter("memory://many.hrkv", chunk_bytes=1 << 18) as writer:
        ...     for layer in range(3):
        ...         writer.write(t.replace(layer_index=layer), name=f"request-7/{layer}")
        >>> file = FrameFile("memory://many.hrkv")
        >>> len(file), file.open(layer_index=1).gather(0).shape
        (3, (4, 1, 8))
    """

    def __init__(
        self,
        path: Any,
        *,
        fs: Any = None,
        frame_alignment: int = 64,
        stream_id: int | None = None,
        **options: Unpack[Sending],
    ) -> None:
        self._framing = Framing(Form.HRKV, frame_alignment, stream_id, options)
        self._fs, self._path = _reached(path, fs)
        self._entries: list[Entry] = []
        self._at = 0
        self._sink: Sink | None = self._stored(lambda: sink_of(self._fs, self._path))

    def _stored(self, work: Any) -> Any:
        """What a piece of work on the file system gives; what it raises, as StoreError, and nothing is kept."""
        try:
            return work()
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError) or isinstance(error, StoreError):
                raise
            raise StoreError(f"{self._path!r} was not written: {error}", where="write", cause=error) from error

    def write(self, tensor: BlockPagedTensor, name: str | None = None) -> None:
        """Add a frame; `name` is how it is found again, beside its layer and role.

        Raises:
            HurrayWireError: the tensor cannot be encoded; nothing was written, and the file can go on.
            StoreError: the file system took less; nothing is left of the file.
            ValueError: the file is closed.
        """
        if self._sink is None:
            raise ValueError("the file is closed")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"a name is a string, not {name!r}")
        parts = self._framing.parts(tensor)
        sink = self._sink
        self._stored(lambda: send(sink, vector_of(parts)))
        self._framing.sent()
        prologue = read_prologue(bytes(parts[0][: PROLOGUE_PLAN.size]), self._at, DEFAULT_LIMITS)
        header = bytes(parts[0][: prologue.header_length])
        head = read_head(header, prologue, self._at)
        self._entries.append(entry_of(head, header, name, tensor.layer_index, tensor.kv_role))
        self._at += prologue.frame_length

    def finish(self) -> None:
        """End the stream; the file appears, then its index. Once; a second time is a ValueError.

        Raises:
            StoreError: as `write`; where only the index could not be put in place, the file is there without one, and
                `build_index` makes it.
        """
        if self._sink is None:
            raise ValueError("the file is closed")
        closing = self._framing.closing()
        index = Index(self._entries, self._at + sum(map(len, closing)))
        sink = self._sink

        def end() -> None:
            send(sink, vector_of(closing))
            _index_written(self._fs, self._path, index, sink)

        self._stored(end)
        self.close()

    def close(self) -> None:
        """Give up what was not finished: nothing of it is left."""
        sink, self._sink = getattr(self, "_sink", None), None
        if sink is not None:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._sink is not None:
                self.finish()
        finally:
            self.close()


def _index_written(fs: Any, path: str, index: Index, data: Sink | None) -> None:
    """Put the file in place, then its index.

    In between, an old index is beside a new file: it is not that file's, and who reads it notices. So nothing is
    taken away before all that can fail for want of room has not failed.
    """
    sink = sink_of(fs, path + SUFFIX)
    try:
        send(sink, [memoryview(index.encode())])
        if data is not None:
            data.commit()
        try:
            sink.commit()
        except BaseException:
            if data is not None:
                with suppress(Exception):  # a file without an index says so sooner than one with another's
                    fs.rm_file(path + SUFFIX)
            raise
    finally:
        sink.close()


class FrameFile:
    """The frames of a file by its index: a layer, a role, a name, and of it one sequence, without reading the rest.

    A sequence of frames' entries. `find`, `open` and `gather` take what tells the frame: name, layer_index, kv_role,
    any of them, as long as one frame has it.

    Args:
        path: of the frames' file, as for `open_frame`; its index is read, in one request.
        fs, max_gap: as there.

    Raises:
        FileNotFoundError: no index (`build_index` makes one), or no file.
        TruncatedError, FrameError, ChecksumError, UnsupportedError: no sound index, or not one of this file.
    """

    def __init__(self, path: Any, *, fs: Any = None, max_gap: int = MAX_GAP) -> None:
        self._fs, self._path = _reached(path, fs)
        self._max_gap = max_gap
        size = self._fs.info(self._path + SUFFIX).get("size")
        if size is not None and size > _MOST_INDEX_BYTES:
            raise FrameError(f"has {size} bytes", code=Code.METADATA, where="index")
        self._index = Index.decode(bytes(self._fs.cat_file(self._path + SUFFIX)))
        self._check_size()

    def _check_size(self) -> None:
        size, needed = self._fs.info(self._path).get("size"), self._index.nbytes
        if size is not None and size < needed:
            message = f"the file has {size} bytes, its index knows of {needed}"
            raise TruncatedError(message, needed=needed, available=size, where="index.bytes")
        if size is not None and size > needed:
            message = f"the file has {size} bytes, its index knows of {needed}: build_index makes a new one"
            raise FrameError(message, code=Code.TRAILING_BYTES, where="index.bytes")

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._index)

    def __getitem__(self, at: int) -> Entry:
        entry: Entry = self._index[at]
        return entry

    def find(self, **which: Any) -> Entry:
        """The entry of the one frame of this name, layer_index, kv_role.

        Raises:
            KeyError: no frame, or several.
        """
        return self._index.find(**which)

    def open(
        self,
        entry: Entry | None = None,
        *,
        limits: Limits = DEFAULT_LIMITS,
        expect: Any = None,
        verify: bool = True,
        **which: Any,
    ) -> Frame:
        """A frame, its head and tables read in one round trip, its pool left where it is.

        Raises:
            KeyError: as `find`.
            ChecksumError: `header_checksum`: the frame there is not the one that was indexed.
            All else as `hurray_wire.open_frame`.
        """
        found = self.find(**which) if entry is None else entry
        ends = [(found.offset, found.head), (found.offset + found.tail, found.length - found.tail)]
        return self._open(found, ends, limits, expect, verify)

    def _open(self, found: Entry, ahead: list[tuple[int, int]], limits: Limits, expect: Any, verify: bool) -> Frame:
        """The frame of an entry, of which some ranges are read to begin with."""
        source: Any = self._path
        if not is_local(self._fs):
            source = FileSource(self._fs, self._path, self._index.nbytes, ahead, self._max_gap)
        frame = open_source(source, found.offset, limits=limits, expect=expect, verify=verify)
        if frame.inspection.header_checksum != found.header_checksum:
            frame.close()
            message = "not the frame that was indexed: the file was written anew, build_index makes a new index"
            raise ChecksumError(message, code=Code.HEADER_CHECKSUM, where="index.header", offset=found.offset)
        return frame

    def gather(self, seq: int, **options: Any) -> Any:
        """The tokens of one sequence of one frame, `[tokens, num_heads, head_dim]`: `open(...).gather(seq)`."""
        with self.open(**options) as frame:
            return frame.gather(seq)

    def tensor(
        self,
        entry: Entry | None = None,
        *,
        limits: Limits = DEFAULT_LIMITS,
        expect: Any = None,
        verify: bool = True,
        **which: Any,
    ) -> BlockPagedTensor:
        """One frame whole: `open(...).tensor()`, in a single round trip where nothing is to be expected of it first."""
        found = self.find(**which) if entry is None else entry
        if expect is not None:
            with self.open(found, limits=limits, expect=expect, verify=verify) as frame:
                return frame.tensor()
        limits.check("frame_bytes", found.length, "index.length", found.offset)
        with self._open(found, [(found.offset, found.length)], limits, None, verify) as frame:
            return frame.tensor()


def build_index(path: Any, *, fs: Any = None, names: Any = None) -> int:
    """Give an HRKV stream in a file its index, from the frames' headers; gives the number of frames.

    Args:
        path, fs: as for `open_frame`. No payload is read: some KiB a frame.
        names: of the frames in their order; None for none.

    Raises:
        TruncatedError: the file ends inside a frame, or before the frame that ends its stream.
        UnsupportedError: `bare_form`: bare items have nothing to be known again by.
        ValueError: not as many names as frames.
        FrameError, ChecksumError: as reading the stream. StoreError: the index could not be written.
    """
    store, place = _reached(path, fs)
    size = store.info(place)["size"]
    source = FileSource(store, place, size, [], 0)
    order = StreamOrder(DEFAULT_LIMITS)
    called: list[str | None] = [] if names is None else list(names)
    entries: list[Entry] = []
    at = 0
    while at < size:
        head, found, header = _front(source, at, size)
        order.frame(head.prologue, head.base)
        if found.descriptor is not None:
            layout = found.descriptor.layout
            name = called[len(entries)] if len(entries) < len(called) else None
            entries.append(entry_of(head, header, name, layout.layer_index, layout.kv_role))
        at += head.prologue.frame_length
    order.end(at)
    if names is not None and len(called) != len(entries):
        raise ValueError(f"the file has {len(entries)} frames, {len(called)} names were given")
    try:
        _index_written(store, place, Index(entries, size), None)
    except OSError as error:
        raise StoreError(f"the index of {place!r} was not written: {error}", where="write", cause=error) from error
    return len(entries)


def _front(source: FileSource, at: int, size: int) -> tuple[Any, Any, bytes]:
    """A frame's head, what it says of itself, and its header; from as little of it as that takes."""
    length = 4096
    while True:
        data = bytes(source.read_at(at, length))
        try:
            found = inspect(data)
            break
        except TruncatedError as error:
            if len(data) < length:
                raise TruncatedError(needed=error.needed, available=len(data), where=error.where, offset=size) from None
            length = max(error.needed, 2 * length)
    if found.framing != Form.HRKV:
        message = "a bare item has no checksum to be known again by"
        raise UnsupportedError(message, code=Code.BARE_FORM, where="magic", offset=at)
    prologue = read_prologue(data[: PROLOGUE_PLAN.size], at, DEFAULT_LIMITS)
    if at + prologue.frame_length > size:
        raise TruncatedError(needed=prologue.frame_length, available=size - at, where="frame_length", offset=size)
    header = data[: prologue.header_length]
    return read_head(header, prologue, at), found, header
