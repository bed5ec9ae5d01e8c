"""Files that are cut, written anew, half sent, and disks that are full: our error, and nothing that looks whole."""

from __future__ import annotations

import errno
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec_helpers import Asked, Objects, fsspec
from stream_helpers import encoded, large, sample
from test_integrations_fsspec import STORES, FileOf, layers, written

import hurray_wire as hw
from hurray_wire.integrations import fsspec as ours
from hurray_wire.integrations.file_index import Index
from hurray_wire.integrations.file_source import sink_of
from hurray_wire.integrations.fsspec import SUFFIX, FrameFile, FrameFileWriter, build_index, open_frame
from hurray_wire.integrations.sealed import seal

OTHERS = [large(n + 50, pages=12) for n in range(3)]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, str]:
    return STORES[request.param](tmp_path)


def names(fs: Any, path: str) -> set[str]:
    """The files that there are."""
    if isinstance(fs, Objects):
        return set(fs.files)
    folder = path.rpartition("/")[0] or "/"
    return {name.rpartition("/")[2] for name in fs.ls(folder, detail=False)}


def write_others(fs: Any, path: str) -> None:
    with FrameFileWriter(path, fs=fs) as writer:
        for tensor in OTHERS:
            writer.write(tensor)


def sound(fs: Any, path: str, tensors: list[hw.BlockPagedTensor]) -> bool:
    file = FrameFile(path, fs=fs)
    return [file.tensor(entry=entry) for entry in file] == tensors


# Writing.


@contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """No file of this process may be longer: to a writer, a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("there", [True, False], ids=["over", "new"])
@pytest.mark.parametrize("room", [0, 10, 100_000, 200_000])
def test_a_full_disk(tmp_path: Path, room: int, there: bool) -> None:
    fs, path = fsspec.filesystem("file"), str(tmp_path / "frames.hrkv")
    if there:
        tensors = written(fs, path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with room_for(room), pytest.raises(hw.StoreError, match="not written") as caught:
        write_others(fs, path)
    assert caught.value.errno == errno.EFBIG
    assert isinstance(caught.value, OSError)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    if there:
        assert sound(fs, path, tensors)


@pytest.mark.parametrize("room", [0, 100_000, 200_000])
def test_a_full_object_store(room: int) -> None:
    fs = Objects()
    tensors = written(fs, "frames")
    before = dict(fs.files)
    fs.room = room
    with pytest.raises(hw.StoreError) as caught:
        write_others(fs, "frames")
    assert caught.value.errno == errno.ENOSPC
    assert fs.files == before
    assert fs.discarded
    assert sound(fs, "frames", tensors)


class Filling(Asked):
    """Files in memory, which take so much and then fail."""

    room = 1 << 40

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        if "w" in mode:
            take = file.write

            def write(data: Any) -> int:
                if file.tell() + len(data) > self.room:
                    take(data[: max(0, self.room - file.tell())])
                    raise OSError(errno.ENOSPC, "No space left on device")
                return int(take(data))

            file.write = write
        return file


@pytest.mark.parametrize("room", [0, 10, 100_000, 200_000])
def test_a_full_store_without_commits(room: int) -> None:
    """Where a file is there from its first byte, it is written beside its name."""
    fs = Filling()
    tensors = written(fs, "/frames")
    before = names(fs, "/frames")
    fs.room = room
    with pytest.raises(hw.StoreError):
        write_others(fs, "/frames")
    assert names(fs, "/frames") == before
    fs.room = 1 << 40
    assert sound(fs, "/frames", tensors)
    write_others(fs, "/frames")
    assert sound(fs, "/frames", OTHERS)
    assert names(fs, "/frames") == before


class Failing:
    """A sink whose nth call fails, over a real one; calls are counted over all sinks of a writing."""

    def __init__(self, sink: Any, count: list[int], at: int, error: BaseException) -> None:
        self.sink, self.count, self.at, self.error = sink, count, at, error

    def _count(self) -> None:
        self.count[0] += 1
        if self.count[0] == self.at:
            raise self.error

    def take(self, vector: Any) -> int:
        self._count()
        return int(self.sink.take(vector))

    def commit(self) -> None:
        self._count()
        self.sink.commit()

    def close(self) -> None:
        self.sink.close()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("at", range(1, 9))
def test_whatever_fails_no_file_is_half_and_no_index_is_anothers(
    store: tuple[Any, str], at: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three frames, the closing one, the index, the file's commit, the index's commit: each of them."""
    fs, path = store
    tensors = written(fs, path)
    before = names(fs, path)
    count = [0]
    monkeypatch.setattr(ours, "sink_of", lambda *where: Failing(sink_of(*where), count, at, error))
    if at == 8:
        write_others(fs, path)
    else:
        with pytest.raises(hw.StoreError if isinstance(error, OSError) else KeyboardInterrupt):
            write_others(fs, path)
    assert count[0] == min(at, 7)
    monkeypatch.undo()
    if at == 7:  # the file is there, its index could not be put beside it
        assert names(fs, path) == before - {(path + SUFFIX).rpartition("/")[2]}
        with pytest.raises(FileNotFoundError):
            FrameFile(path, fs=fs)
        build_index(path, fs=fs)
    assert names(fs, path) == before
    assert sound(fs, path, tensors if at < 7 else OTHERS)


def test_leaving_by_an_exception_leaves_what_was_there(store: tuple[Any, str]) -> None:
    fs, path = store
    tensors = written(fs, path)
    before = names(fs, path)

    def broken() -> None:
        with FrameFileWriter(path, fs=fs) as writer:
            writer.write(OTHERS[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert names(fs, path) == before
    assert sound(fs, path, tensors)
    writer = FrameFileWriter(path, fs=fs)
    writer.write(OTHERS[0])
    writer.close()
    writer.close()
    assert names(fs, path) == before


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    for call in (lambda path: FrameFileWriter(path), lambda path: build_index(path)):
        with pytest.raises(OSError):  # noqa: PT011 - a StoreError, or the system's own of what is not there
            call(tmp_path / "nowhere" / "frames")
    with pytest.raises(hw.StoreError) as caught:
        FrameFileWriter(tmp_path / "nowhere" / "frames")
    assert caught.value.errno == errno.ENOENT


# An index that is not the file's.


def test_a_file_that_was_written_anew(store: tuple[Any, str]) -> None:
    """Under an index that somebody still holds, or that another program left behind."""
    fs, path = store
    tensors = written(fs, path)
    file = FrameFile(path, fs=fs)
    opened = file.open(layer_index=2, kv_role="key")
    put = FileOf(fs, path).write
    other = encoded([t.replace(metadata={"model": "other"}) for t in tensors])
    assert len(other) > fs.info(path)["size"]
    same = encoded(tensors, stream_id=99)
    assert len(same) == fs.info(path)["size"]
    put(same)
    for call in (
        lambda: file.open(name="request/1"),
        lambda: file.gather(0, name="request/1"),
        FrameFile(path, fs=fs).tensor,
    ):
        with pytest.raises((hw.ChecksumError, KeyError)):
            call()
    with pytest.raises(hw.ChecksumError) as caught:
        file.tensor(name="request/1")
    assert (caught.value.code, caught.value.where) == ("header_checksum", "index.header")
    assert caught.value.offset == file.find(name="request/1").offset
    assert np.array_equal(opened.gather(0), tensors[4].gather(0)), "the same payload is at the same place"
    put(encoded([large(n + 9, pages=12) for n in range(8)]))
    if opened.inspection.total_bytes:
        with pytest.raises(hw.FrameError):
            opened.gather(0)
    for data, error, code in ((same[:-1], hw.TruncatedError, "truncated"), (other, hw.FrameError, "trailing_bytes")):
        put(data)
        with pytest.raises(error) as found:
            FrameFile(path, fs=fs)
        assert (found.value.code, found.value.where) == (code, "index.bytes")
    fs.rm_file(path)
    with pytest.raises(FileNotFoundError):
        FrameFile(path, fs=fs)


def test_every_cut_and_every_changed_byte_of_an_index() -> None:
    fs = Asked()
    written(fs, "/f")
    data = fs.cat_file("/f" + SUFFIX)
    for cut in range(len(data)):
        with pytest.raises(hw.TruncatedError):
            Index.decode(data[:cut])
    for at in range(len(data)):
        for flip in (0x01, 0x10, 0x80):
            with pytest.raises(hw.HurrayWireError):
                Index.decode(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])
    with pytest.raises(hw.FrameError) as caught:
        Index.decode(data + b" ")
    assert caught.value.code == "trailing_bytes"


COLUMNS: dict[str, Any] = {
    "bytes": 1000,
    "name": [None, "b"],
    "layer": [0, None],
    "role": ["key", "value"],
    "offset": [0, 640],
    "length": [640, 320],
    "head": [448, 64],
    "tail": [480, 64],
    "header": ["0" * 16, "f" * 16],
}


def test_what_an_index_may_say() -> None:
    index = Index.decode(seal("index", 1, COLUMNS))
    assert [entry.header_checksum for entry in index] == [0, 2**64 - 1]
    assert Index.decode(index.encode()).nbytes == 1000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bytes", 959),
        ("bytes", -1),
        ("bytes", "1000"),
        ("bytes", None),
        ("bytes", 1e3),
        ("bytes", True),
        ("bytes", 2**63),
        ("name", [None]),
        ("name", [1, 2]),
        ("name", {}),
        ("layer", [0, -1]),
        ("layer", [0, 0xFFFF_FFFF]),
        ("layer", [True, 1]),
        ("layer", 7),
        ("role", [None, "key"]),
        ("offset", [0, 639]),
        ("offset", [640, 0]),
        ("offset", [0, 2**63 - 1]),
        ("offset", [-64, 640]),
        ("offset", [0]),
        ("offset", [[0], [640]]),
        ("length", [641, 320]),
        ("length", [640, 361]),
        ("length", [0, 320]),
        ("length", [640, 2**63 - 1]),
        ("head", [0, 64]),
        ("head", [481, 64]),
        ("tail", [641, 64]),
        ("tail", [447, 64]),
        ("header", ["0" * 15, "f" * 16]),
        ("header", ["0" * 16, "F" * 16]),
        ("header", [0, 1]),
    ],
    ids=str,
)
def test_what_an_index_may_not_say(field: str, value: Any) -> None:
    """Sound by its checksum, and wrong: no other file is reached by it, nothing is allocated for it."""
    for fields in (COLUMNS | {field: value}, {k: v for k, v in COLUMNS.items() if k != field}):
        with pytest.raises(hw.FrameError) as caught:
            Index.decode(seal("index", 1, fields))
        assert caught.value.code == "metadata"
        assert caught.value.where.startswith("index.")


@pytest.mark.parametrize(
    ("data", "error", "code"),
    [
        (b"", hw.TruncatedError, "truncated"),
        (b"hurray_wire index 1", hw.TruncatedError, "truncated"),
        (json.dumps(COLUMNS).encode(), hw.FrameError, "magic"),
        (hw.encode(sample(0)), hw.FrameError, "magic"),
        (seal("parts", 1, COLUMNS), hw.FrameError, "magic"),
        (seal("index", 2, {"new": 1}), hw.UnsupportedError, "version"),
        (seal("index", 1, COLUMNS, b"more"), hw.FrameError, "metadata"),
        (b"hurray_wire index 1 x y z\n" + bytes(200), hw.ChecksumError, "header_checksum"),
        (b"hurray_wire index 1 9 2 0000000000000000\n{}", hw.ChecksumError, "header_checksum"),
        (b"hurray_wire index " + b"1" * 500, hw.ChecksumError, "header_checksum"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_no_index(data: bytes, error: type[hw.HurrayWireError], code: str) -> None:
    fs = Asked()
    written(fs, "/f")
    fs.pipe_file("/f" + SUFFIX, data)
    with pytest.raises(error) as caught:
        FrameFile("/f", fs=fs)
    assert caught.value.code == code
    assert caught.value.where.startswith("index")


def test_an_index_too_large_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fs = Asked()
    written(fs, "/f")
    monkeypatch.setattr(ours, "_MOST_INDEX_BYTES", 100)
    fs.forget()
    with pytest.raises(hw.FrameError, match="bytes"):
        FrameFile("/f", fs=fs)
    assert fs.calls == []


def test_files_that_cannot_be_indexed() -> None:
    tensors = layers(2)
    data = encoded(tensors)
    cases: dict[str, tuple[bytes, type[hw.HurrayWireError], str]] = {
        "cut in a frame": (data[: len(data) // 2], hw.TruncatedError, "truncated"),
        "cut in a header": (data[: hw.inspect(data).total_bytes + 100], hw.TruncatedError, "truncated"),
        "without its end": (data[:-64], hw.TruncatedError, "stream_truncated"),
        "without its first frame": (data[hw.inspect(data).total_bytes :], hw.FrameError, "sequence"),
        "bare": (hw.encode(tensors[0], framing="bare"), hw.UnsupportedError, "bare_form"),
        "something else": (data + b"something else altogether", hw.FrameError, "magic"),
        "newer": (data[:8] + b"\x02" + data[9:], hw.UnsupportedError, "version"),
    }
    for name, (wrong, error, code) in cases.items():
        fs = Asked(f=wrong)
        with pytest.raises(error) as caught:
            build_index("/f", fs=fs)
        assert caught.value.code == code, name
        assert names(fs, "/f") == {"f"}
    for called in (["one"], ["a"] * 5, []):
        with pytest.raises(ValueError, match="names"):
            build_index("/f", fs=Asked(f=data), names=called)


# Stores that do not give what was asked for.


MANGLED: dict[str, tuple[Callable[[bytes], Any], type[hw.HurrayWireError]]] = {
    "half": (lambda answer: answer[: len(answer) // 2], hw.TruncatedError),
    "a byte less": (lambda answer: answer[:-1], hw.TruncatedError),
    "nothing": (lambda answer: b"", hw.TruncatedError),
    "another byte": (
        lambda answer: answer[: len(answer) // 2] + b"\xaa\x55" + answer[len(answer) // 2 + 2 :],
        hw.ChecksumError,
    ),
    "zeros": (lambda answer: bytes(len(answer)), hw.ChecksumError),
}


@pytest.mark.parametrize("name", MANGLED)
def test_answers_that_are_not_what_is_there(name: str) -> None:
    mangle, error = MANGLED[name]
    fs = Asked()
    tensors = written(fs, "/f", chunk_bytes=8192)
    file = FrameFile("/f", fs=fs, max_gap=0)
    frame = file.open(file[2])
    fs.mangle = mangle
    calls: list[Callable[[], Any]] = [lambda: frame.gather(0), lambda: frame.pages([3]), frame.tensor]
    for call in calls:
        with pytest.raises(error):
            call()
    fresh: list[Callable[[], Any]] = [lambda: file.open(file[3]), lambda: open_frame("/f", fs=fs)]
    for call in fresh:
        with pytest.raises(hw.FrameError):
            call()
    with pytest.raises(hw.FrameError):
        FrameFile("/f", fs=fs)
    fs.mangle = None
    assert frame.tensor() == tensors[2]


def test_a_frame_of_a_newer_version() -> None:
    fs = Asked()
    written(fs, "/f")
    file = FrameFile("/f", fs=fs)
    data = bytearray(fs.cat_file("/f"))
    data[file[2].offset + 8] = 2
    fs.pipe_file("/f", bytes(data))
    with pytest.raises(hw.UnsupportedError) as caught:
        FrameFile("/f", fs=fs).open(file[2])
    assert (caught.value.code, caught.value.offset) == ("version", file[2].offset + 8)
    assert FrameFile("/f", fs=fs).tensor(entry=file[1]) == layers()[1]


def test_errors_among_the_answers() -> None:
    """Some stores put what went wrong where the bytes should be, whatever they were told."""

    class Putting(Asked):
        def cat_ranges(self, paths: Any, starts: Any, ends: Any, **options: Any) -> Any:
            assert options["on_error"] == "raise"
            return [*super().cat_ranges(paths, starts, ends)[:-1], ConnectionResetError("gone")]

    class Fewer(Asked):
        def cat_ranges(self, paths: Any, starts: Any, ends: Any, **options: Any) -> Any:
            return super().cat_ranges(paths, starts, ends)[:-1]

    blob = hw.encode(large(0, pages=40))
    with pytest.raises(ConnectionResetError):
        open_frame("/f", fs=Putting(f=blob))
    frame = open_frame("/f", fs=Fewer(f=blob), verify=False, max_gap=0)
    with pytest.raises(hw.TruncatedError):
        frame.pages([3, 30])
    with pytest.raises(FileNotFoundError):
        open_frame("/other", fs=Asked(f=blob))


def test_a_file_that_shrinks_while_it_is_open(store: tuple[Any, str]) -> None:
    fs, path = store
    written(fs, path, chunk_bytes=8192)
    file = FrameFile(path, fs=fs)
    with file.open(file[7]) as frame:
        FileOf(fs, path).write(fs.cat_file(path)[: file[7].offset + 20_000])
        for call in (lambda: frame.gather(0), frame.tensor):
            with pytest.raises(hw.TruncatedError):
                call()
        assert frame.pages([0]).shape == (1, 16, 4, 64)
