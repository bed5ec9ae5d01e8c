"""hurray-dump and the readers judge by the same rules: what `iter_decode` raises first, it tells first."""

from __future__ import annotations

import contextlib
import io
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from dump_corpus import FIXTURES, corpus
from frames import MAGIC, header_resealed, resealed

import hurray_wire as hw
from hurray_wire.dump import main
from hurray_wire.dump.model import Fault, Item, Stage
from hurray_wire.dump.payload_walk import Budget
from hurray_wire.dump.scan import Scan, Stop
from hurray_wire.dump.source import FileSource, PipeSource, Source

EDGES = (0, 1, 2, 3, 7, 8, 63, 64, 127, 128, 255, 256, 65535, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1)
OPTIONS: tuple[list[str], ...] = (
    *([], ["--hex"], ["--seqs"], ["--map"], ["--stats"], ["--verify"], ["--resync", "--full"], ["--frame", "0"]),
    *(["--json", "--hex", "--seqs", "--map", "--stats"], ["--diff"], ["--diff", "--json"]),
)


def faults_of(source: Source) -> list[Fault]:
    found: list[Fault] = []
    for event in Scan(source, Budget(None)).events():
        if isinstance(event, Item | Stop):
            found += event.faults
    return found


@contextlib.contextmanager
def opened(path: Path) -> Iterator[FileSource]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield FileSource(fd)
    finally:
        os.close(fd)


def piped(data: bytes) -> list[Fault]:
    reading, writing = os.pipe()
    thread = threading.Thread(target=_fill, args=(writing, data))
    thread.start()
    try:
        return faults_of(PipeSource(reading))
    finally:
        os.close(reading)
        thread.join()


def _fill(fd: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), open(fd, "wb") as pipe:
        pipe.write(data)


def raised(data: bytes) -> hw.HurrayWireError | None:
    try:
        for _ in hw.iter_decode(data):
            pass
    except hw.HurrayWireError as error:
        return error
    return None


def assert_same_verdict(data: bytes, faults: list[Fault]) -> None:
    error = raised(data)
    if error is None:
        assert not faults or not data
        return
    if isinstance(error, hw.LimitError) or error.code == "shape":
        return  # limits are the reader's own, and NumPy's
    places = [(fault.code, fault.where) for fault in faults]
    wanted = (str(error.code), error.where)
    assert wanted in places, (str(error), faults)
    if faults[0].stage != Stage.HEADER_CHECKSUM:
        assert places[0] == wanted
        assert error.offset in (None, faults[0].offset)


@pytest.mark.parametrize("name", sorted(corpus()))
def test_each_file_of_the_corpus(name: str, tmp_path: Path) -> None:
    data = corpus()[name]
    (tmp_path / "x").write_bytes(data)
    with opened(tmp_path / "x") as source:
        faults = faults_of(source)
    assert_same_verdict(data, faults)
    assert [fault[1:] for fault in piped(data)] == [fault[1:] for fault in faults]


def test_the_fixtures() -> None:
    for path in sorted([*FIXTURES.glob("accept/*.hr*"), *FIXTURES.glob("reject/*.hr*")]):
        with opened(path) as source:
            faults = faults_of(source)
        assert_same_verdict(path.read_bytes(), faults)


@pytest.mark.parametrize("name", ["worked.hrkv", "worked.hrry", "quantised.hrkv", "zstd-shuffle2-chunks.hrkv"])
def test_every_prefix(name: str, tmp_path: Path) -> None:
    data = corpus()[name]
    step = 3 if len(data) < 2000 else 131
    for size in range(0, len(data), step):
        (tmp_path / "x").write_bytes(data[:size])
        with opened(tmp_path / "x") as source:
            faults = faults_of(source)
        assert faults[0].code == "truncated"
        assert_same_verdict(data[:size], faults)


def test_every_bit_of_a_frame(tmp_path: Path) -> None:
    data = corpus()["worked.hrkv"]
    for bit in range(0, len(data) * 8, 11):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "x").write_bytes(flipped)
        with opened(tmp_path / "x") as source:
            faults = faults_of(source)
        assert faults, bit
        assert_same_verdict(bytes(flipped), faults)


def mutated(rng: random.Random, files: list[bytes]) -> bytes:
    data = bytearray(rng.choice(files))
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(min(len(data), 480)) if rng.random() < 0.8 else rng.randrange(len(data))
        width = rng.choice((1, 2, 4, 8))
        match rng.randrange(6):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1 | 2:
                data[at : at + width] = (rng.choice(EDGES) & ((1 << 8 * width) - 1)).to_bytes(width, "little")
            case 3:
                del data[at : at + rng.randrange(1, 64)]
            case 4:
                data[at:at] = rng.randbytes(rng.randrange(1, 40))
            case _:
                data += rng.choice(files)
        if not data:
            return b""
    changed = bytes(data)
    if changed.startswith(MAGIC) and rng.random() < 0.7:
        with contextlib.suppress(Exception):
            return rng.choice((resealed, header_resealed))(changed)
    return changed


@pytest.mark.parametrize("seed", range(4))
def test_mutations(seed: int, tmp_path: Path) -> None:
    rng, files = random.Random(seed), [data for data in corpus().values() if 0 < len(data) < 30_000]
    for _ in range(150):
        data = mutated(rng, files)
        (tmp_path / "x").write_bytes(data)
        with opened(tmp_path / "x") as source:
            assert_same_verdict(data, faults_of(source))


@pytest.mark.parametrize("seed", range(4))
def test_mutations_through_the_command_line(seed: int, tmp_path: Path) -> None:
    rng, files = random.Random(100 + seed), [data for data in corpus().values() if 0 < len(data) < 30_000]
    path, other = tmp_path / "x", tmp_path / "y"
    for _ in range(150):
        path.write_bytes(mutated(rng, files))
        other.write_bytes(rng.choice(files))
        options = rng.choice(OPTIONS)
        paths = [str(path), str(other)] if "--diff" in options else [str(path)]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main([*options, *paths])
        told = err.getvalue()
        assert status in (0, 1, 2)
        assert "internal error" not in told, told
        assert "--diff" in options or bool(told) == bool(status)
