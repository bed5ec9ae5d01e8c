"""Frames in files of fsspec's file systems: whole, by layer, by sequence; the index beside a file of many."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec_helpers import Asked, Objects, fsspec
from stream_helpers import TENSOR, as_sent, encoded, kinds, large, sample

import hurray_wire as hw
from hurray_wire.integrations import file_source
from hurray_wire.integrations.file_index import Index
from hurray_wire.integrations.file_source import merged
from hurray_wire.integrations.fsspec import SUFFIX, FrameFile, FrameFileWriter, build_index, open_frame

KINDS = kinds()
FORMS: dict[str, dict[str, Any]] = {
    "raw": {},
    "chunks": {"chunk_bytes": 8192},
    "zstd": {"compression": "zstd", "chunk_bytes": 16384},
    "bare": {"framing": "bare"},
}
SCATTERED: dict[str, Any] = {"block_table": [3, 4, 30, 9, 3], "seq_ptr": [0, 3, 3, 5], "seq_lens": [40, 0, 32]}


def local(folder: Path) -> tuple[Any, str]:
    return fsspec.filesystem("file"), str(folder / "frames.hrkv")


STORES: dict[str, Callable[[Path], tuple[Any, str]]] = {
    "file": local,
    "memory": lambda _: (Asked(), "/frames.hrkv"),
    "objects": lambda _: (Objects(), "frames.hrkv"),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, str]:
    return STORES[request.param](tmp_path)


# One frame.


@pytest.mark.parametrize("offset", [0, 640, 1001])
@pytest.mark.parametrize("form", FORMS)
def test_a_frame_as_open_frame_has_it(store: tuple[Any, str], form: str, offset: int) -> None:
    fs, path = store
    for name, tensor in KINDS.items():
        blob = hw.encode(tensor, **FORMS[form])
        with FileOf(fs, path) as write:
            write(b"\x89" * offset + blob + hw.encode(sample(0)))
        expected = hw.decode(blob)
        with open_frame(path, offset, fs=fs) as frame:
            assert frame.tensor() == expected, name
            if expected.seq_lens is not None:
                assert all(np.array_equal(frame.gather(s), expected.gather(s)) for s in range(expected.num_seqs)), name


class FileOf:
    """A file's bytes put there by other means."""

    def __init__(self, fs: Any, path: str) -> None:
        self.fs, self.path = fs, path

    def __enter__(self) -> Callable[[bytes], None]:
        return self.write

    def write(self, data: bytes) -> None:
        if isinstance(self.fs, Objects):
            self.fs.files[self.path] = data
        else:
            self.fs.pipe_file(self.path, data)

    def __exit__(self, *_: object) -> None:
        """Nothing is held open."""


@pytest.mark.parametrize("tail", [0, 1 << 20], ids=["alone", "followed"])
def test_opening_costs_a_round_trip_and_a_sequence_another(tail: int) -> None:
    tensor = TENSOR(large(0, pages=400).page_pool, **SCATTERED)
    fs = Asked(frame=hw.encode(tensor, chunk_bytes=4 * 8192) + bytes(tail))
    frame = open_frame("/frame", fs=fs)
    if not tail:
        assert fs.calls == ["cat_ranges"]
        assert sum(length for *_, length in fs.requests) == 2 * (64 << 10)
    fs.forget()
    assert np.array_equal(frame.gather(0), tensor.gather(0))
    assert fs.calls == ["cat_ranges"]
    assert [length for *_, length in fs.requests] == [2 * 4 * 8192, 4 * 8192], "neighbouring chunks in one request"
    fs.forget()
    assert frame.tensor() == tensor
    assert fs.calls == ["cat_file"], "and all of it in one"


def test_ranges_near_each_other_are_one_request() -> None:
    tensor = large(0, pages=40)
    fs = Asked(frame=hw.encode(tensor))
    for max_gap, sizes in ((0, [8192] * 3), (8192, [3 * 8192, 8192]), (1 << 20, [21 * 8192])):
        frame = open_frame("/frame", fs=fs, verify=False, max_gap=max_gap)
        frame.seq_ptr.tolist()
        fs.forget()
        assert np.array_equal(frame.pages([22, 2, 4]), tensor.page_pool[[22, 2, 4]])
        assert [length for *_, length in fs.requests] == sizes


@pytest.mark.parametrize(
    ("ranges", "max_gap", "expected"),
    [
        ([], 9, []),
        ([(5, 0)], 9, []),
        ([(0, 5), (5, 5)], 0, [(0, 10)]),
        ([(0, 5), (6, 5)], 0, [(0, 5), (6, 11)]),
        ([(0, 5), (6, 5)], 1, [(0, 11)]),
        ([(6, 5), (0, 20)], 1, [(0, 20)]),
        ([(0, 60 << 20), (60 << 20, 5 << 20)], 1, [(0, 60 << 20), (60 << 20, 65 << 20)]),
    ],
    ids=str,
)
def test_merging(ranges: Any, max_gap: int, expected: Any) -> None:
    assert merged(ranges, max_gap) == expected


def test_a_url_needs_no_file_system(tmp_path: Path) -> None:
    tensor = sample(0)
    path = tmp_path / "frame"
    path.write_bytes(hw.encode(tensor))
    for url in (path, str(path), f"file://{path}"):
        with open_frame(url) as frame:
            assert frame.tensor() == tensor
    fsspec.filesystem("memory").pipe_file("/hurray/frame", hw.encode(tensor))
    assert open_frame("memory://hurray/frame").tensor() == tensor
    fsspec.filesystem("memory").rm("/hurray/frame")


def test_a_store_that_does_not_say_sizes() -> None:
    class Silent(Asked):
        def info(self, path: str, **options: Any) -> Any:
            return super().info(path) | {"size": None}

    tensor = large(0, pages=40)
    frame = open_frame("/frame", fs=Silent(frame=hw.encode(tensor)))
    assert frame.tensor() == tensor
    assert np.array_equal(frame.gather(0), tensor.gather(0))


# Many frames.


def layers(count: int = 4) -> list[TENSOR]:
    return [large(n, pages=12).replace(kv_role=role) for n in range(count) for role in ("key", "value")]


def written(fs: Any, path: str, **options: Any) -> list[TENSOR]:
    tensors = layers()
    with FrameFileWriter(path, fs=fs, **options) as writer:
        for i, tensor in enumerate(tensors):
            writer.write(tensor, name=f"request/{i}" if i % 2 else None)
    return tensors


@pytest.mark.parametrize("options", [{}, {"chunk_bytes": 8192}, {"compression": "zstd"}, {"frame_alignment": 4096}])
def test_any_frame_of_a_file(store: tuple[Any, str], options: dict[str, Any]) -> None:
    fs, path = store
    tensors = written(fs, path, **options)
    file = FrameFile(path, fs=fs)
    assert len(file) == len(list(file)) == 8
    for n, tensor in enumerate(tensors):
        which: dict[str, Any] = {"layer_index": n // 2, "kv_role": tensor.kv_role}
        assert file[n] == file.find(**which)
        assert file.tensor(**which) == tensor
        assert np.array_equal(file.gather(0, **which), tensor.gather(0))
        with file.open(file[n], verify=False, expect={"layer_index": n // 2}) as frame:
            assert np.array_equal(frame.pages([7, 1]), tensor.page_pool[[7, 1]])
    assert file.tensor(name="request/3") == tensors[3]
    for which in ({"layer_index": 9}, {"layer_index": 1}, {"name": "request/0"}, {}):
        with pytest.raises(KeyError):
            file.open(**which)
    with pytest.raises(hw.MismatchError):
        file.open(file[0], expect={"page_size": 1})
    with pytest.raises(hw.LimitError):
        file.open(file[0], limits=hw.Limits(frame_bytes=100))


def test_the_file_is_a_plain_stream(store: tuple[Any, str]) -> None:
    """Every reader of streams reads it; an index can be made for any stream, and is the same."""
    fs, path = store
    tensors = written(fs, path, stream_id=7)
    data = fs.cat_file(path)
    assert list(hw.iter_decode(data)) == tensors
    assert data == encoded(tensors, stream_id=7)
    index = fs.cat_file(path + SUFFIX)
    fs.rm_file(path + SUFFIX)
    with pytest.raises(FileNotFoundError):
        FrameFile(path, fs=fs)
    assert build_index(path, fs=fs, names=[f"request/{i}" if i % 2 else None for i in range(8)]) == 8
    assert fs.cat_file(path + SUFFIX) == index
    assert build_index(path, fs=fs) == 8
    assert [entry.name for entry in FrameFile(path, fs=fs)] == [None] * 8


@pytest.mark.parametrize("last", ["closing", "in the last frame"])
def test_an_index_for_a_file_of_others(last: str) -> None:
    tensors = [t for t in kinds().values() if t.num_seqs]
    if last == "closing":
        data = encoded(tensors, chunk_bytes=64, frame_alignment=4096)
    else:
        data = b"".join(hw.encode(t, sequence=i, last=t is tensors[-1]) for i, t in enumerate(tensors))
        data += hw.encode(tensors[0])
    fs = Asked(other=data)
    count = len(tensors) + (last != "closing")
    assert build_index("/other", fs=fs) == count
    assert sum(length for *_, length in fs.requests) < len(data) + 4096 * (count + 1)
    file = FrameFile("/other", fs=fs)
    assert [file.tensor(entry=entry) for entry in file] == [as_sent(t) for t in [*tensors, tensors[0]][:count]]


def test_a_frame_by_its_index_costs_two_round_trips() -> None:
    tensor = TENSOR(large(0, pages=400).page_pool, **SCATTERED)
    fs = Asked()
    with FrameFileWriter("/many", fs=fs, chunk_bytes=4 * 8192) as writer:
        for n in range(5):
            writer.write(tensor.replace(layer_index=n))
    fs.forget()
    file = FrameFile("/many", fs=fs)
    assert fs.calls == ["cat_file"]
    fs.forget()
    frame = file.open(layer_index=3)
    assert fs.calls == ["cat_ranges"]
    assert sum(length for *_, length in fs.requests) == file[3].head + file[3].length - file[3].tail < 20_000
    fs.forget()
    assert np.array_equal(frame.gather(2), tensor.gather(2))
    assert fs.calls == ["cat_ranges"]
    fs.forget()
    assert file.tensor(layer_index=3).same_tokens(tensor)
    assert fs.requests == [("/many", file[3].offset, file[3].length)], "all of it in one"
    fs.forget()
    with pytest.raises(hw.MismatchError):
        file.tensor(layer_index=3, expect={"page_size": 1})
    assert sum(length for *_, length in fs.requests) < 20_000, "what is not expected is not fetched"
    fs.forget()
    with pytest.raises(hw.LimitError):
        file.tensor(layer_index=3, limits=hw.Limits(frame_bytes=1000))
    assert fs.requests == []


def test_a_tensor_that_cannot_be_encoded_leaves_the_file_going() -> None:
    fs = Asked()
    with FrameFileWriter("/f", fs=fs) as writer:
        writer.write(sample(0))
        with pytest.raises(hw.FrameError):
            writer.write(sample(1).replace(metadata={"reserved": 1}))
        writer.write(sample(2))
    assert [entry.layer_index for entry in FrameFile("/f", fs=fs)] == [0, 2]
    assert list(hw.iter_decode(fs.cat_file("/f"))) == [sample(0), sample(2)]


def test_no_frames_and_tensors_without_pages() -> None:
    fs = Asked()
    with FrameFileWriter("/none", fs=fs):
        pass
    assert len(FrameFile("/none", fs=fs)) == 0
    assert build_index("/none", fs=fs) == 0
    with FrameFileWriter("/kinds", fs=fs) as writer:
        for name, tensor in KINDS.items():
            writer.write(tensor, name)
    file = FrameFile("/kinds", fs=fs)
    assert all(file.tensor(name=name) == as_sent(tensor) for name, tensor in KINDS.items())


def test_a_closed_writer(store: tuple[Any, str]) -> None:
    fs, path = store
    writer = FrameFileWriter(path, fs=fs)
    writer.write(sample(0))
    writer.finish()
    for call in (writer.finish, lambda: writer.write(sample(1))):
        with pytest.raises(ValueError, match="closed"):
            call()
    writer.close()
    assert FrameFile(path, fs=fs).tensor() == sample(0)


def test_arguments() -> None:
    fs = Asked()
    for options in ({"last": True}, {"sequence": 1}, {"framing": "bare"}, {"nonsense": 1}):
        with pytest.raises(TypeError):
            FrameFileWriter("/f", fs=fs, **options)
    with FrameFileWriter("/f", fs=fs) as writer, pytest.raises(TypeError, match="name"):
        writer.write(sample(0), name=7)  # type: ignore[arg-type]
    assert len(FrameFile("/f", fs=fs)) == 0


def test_large_frames_are_given_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of object stores keep all that they are given until it makes a part."""
    monkeypatch.setattr(file_source, "_PIECE_BYTES", 10_000)
    given: list[int] = []

    class Short(io.BytesIO):
        def write(self, data: Any) -> int:
            given.append(len(data))
            return super().write(data[:7000])

    sink = file_source.RenamedSink(Asked(), "/f")
    sink.file = Short()
    data = hw.encode(large(0, pages=12))
    assert sink.take([memoryview(data)]) == len(data)
    assert sink.file.getvalue() == data
    assert max(given) == 10_000


def test_an_index_says_what_it_says(store: tuple[Any, str]) -> None:
    fs, path = store
    written(fs, path)
    data = fs.cat_file(path + SUFFIX)
    index = Index.decode(data)
    assert index.encode() == data
    assert index.nbytes == fs.info(path)["size"]
    blob = fs.cat_file(path)
    for entry in index:
        frame = hw.open_frame(blob, entry.offset)
        sections = frame.inspection.sections
        pool = [section for section in sections if section.name == "page_pool"]
        assert entry.head == pool[0].offset == frame.inspection.header_bytes
        assert entry.tail == pool[-1].offset + pool[-1].stored_length
        assert entry.length == frame.inspection.total_bytes
        assert entry.header_checksum == frame.inspection.header_checksum
