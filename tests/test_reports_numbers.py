"""Every case that public bug reports gave has a test with its number in its id, and the last of the cases themselves.

The numbers are those of the collection that this project began with; each test says what was reported. An id holds its
number as `test_a1_...`, `[12-...]`, or `[49-...]`.
"""

from __future__ import annotations

import io
import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frames import header_resealed, patched
from support import ROOT, desc, raw, worked
from test_reports import case

import hurray_wire as hw

NUMBERS = (
    *(1, 3, 5, 6, 8, 10, 12, 15, 17, 18, 20, 22, 23, 26),
    *(28, 30, 32, 33, 36, 38, 40, 41, 44, 45, 47, 49),
)
IDS = re.compile(r"def test_[a-l](\d+)_|case\((\d+)|[=\[(]f?\"(\d+)-")


@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_a_case_has_a_test(number: int) -> None:
    found = set()
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        for groups in IDS.findall(path.read_text(encoding="utf-8")):
            found |= {int(group) for group in groups if group}
    assert number in found


# 41: one read is taken to deliver everything.


class Dribble(io.RawIOBase):
    """Gives 1 to 7 bytes a call."""

    def __init__(self, data: bytes) -> None:
        self.inner, self.rng = io.BytesIO(data), random.Random(3)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self.inner.readinto(memoryview(buffer)[: self.rng.randint(1, 7)])


class Sip(io.RawIOBase):
    """Takes at most 13 bytes a call."""

    def __init__(self) -> None:
        self.taken = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = memoryview(data).cast("B")[:13]
        self.taken += piece
        return len(piece)


@pytest.mark.parametrize("_", [case(41, "short-reads-and-writes")])
def test_short_reads_and_writes(_: int) -> None:
    data = hw.encode(worked()) * 3
    frames = list(hw.StreamReader(Dribble(data), streams="all"))
    assert frames == [worked()] * 3
    sink = Sip()
    with hw.StreamWriter(sink) as writer:
        for frame in frames:
            writer.write(frame)
    again = bytes(sink.taken)
    assert list(hw.StreamReader(Dribble(again))) == frames
    found = [hw.inspect(again, offset) for offset in offsets_of(again)]
    assert [(f.sequence, f.last, f.descriptor is None) for f in found] == [
        *((n, False, False) for n in range(3)),
        (3, True, True),
    ]
    assert len({f.stream_id for f in found}) == 1


def offsets_of(data: bytes) -> list[int]:
    found, at = [], 0
    while at < len(data):
        found.append(at)
        at += hw.inspect(data, at).total_bytes
    return found


@pytest.mark.parametrize("_", [case(41, "small-send-buffer-slow-reader")])
def test_a_small_send_buffer_and_a_slow_reader(_: int) -> None:
    left, right = socket.socketpair()
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
    got = bytearray()

    def read() -> None:
        while piece := right.recv(100):
            got.extend(piece)
            time.sleep(0.001)

    reader = threading.Thread(target=read)
    reader.start()
    with left, hw.StreamWriter(left) as writer:
        for _n in range(3):
            writer.write(worked())
    reader.join()
    right.close()
    assert list(hw.StreamReader(io.BytesIO(bytes(got)))) == [worked()] * 3


# 44: a failed write is logged and forgotten.


class Broken(io.RawIOBase):
    """Fails once it has 100 bytes."""

    def __init__(self) -> None:
        self.taken = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.taken >= 100:
            raise OSError(28, "no space left")
        count = min(memoryview(data).nbytes, 100 - self.taken)
        self.taken += count
        return count


@pytest.mark.parametrize("_", [case(44, "a-failed-write-is-logged-and-forgotten")])
def test_a_failed_write_is_told(_: int) -> None:
    sink = io.BytesIO()
    writer = hw.StreamWriter(sink)
    before = len(sink.getvalue())
    with pytest.raises(hw.InvalidDescriptorError):
        writer.write(worked(block_table=np.array([0, 9, 0], "u4")))
    assert len(sink.getvalue()) == before
    writer.write(worked())
    writer.finish()
    assert list(hw.StreamReader(io.BytesIO(sink.getvalue()))) == [worked()]
    broken = hw.StreamWriter(Broken())
    with pytest.raises(OSError, match="no space"):
        broken.write(worked())
    with pytest.raises(ValueError, match="closed"):
        broken.write(worked())


# 49: the inspection tool on damaged or huge files.

BLOB = hw.encode(worked())


def dumped(*arguments: str | Path) -> tuple[int, str, str]:
    """Status, output and errors of the command."""
    command = [sys.executable, "-m", "hurray_wire.dump", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("_", [case(49, "a-sound-file")])
def test_a_sound_file_is_told(_: int, tmp_path: Path) -> None:
    path = tmp_path / "good.hw"
    path.write_bytes(BLOB)
    status, out, err = dumped(path)
    assert (status, err) == (0, "")
    for words in ("page_size 4", "num_pages 5", "num_seqs 2", "kv_role key", "layer 3", "float16", "uint32"):
        assert words in out
    path.write_bytes(hw.encode(worked(layer_index=None)))
    told = json.dumps(json.loads(dumped("--json", path)[1]))
    assert '"layer_index": null' in told


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(BLOB[:-1], id="49-cut"),
        pytest.param(b"", id="49-empty"),
        pytest.param(None, id="49-missing"),
        pytest.param(patched(raw(), 68, b"\xff" * 4), id="49-huge-count-bare"),
        pytest.param(header_resealed(patched(BLOB, 20, b"\xff\xff")), id="49-huge-count"),
    ],
)
def test_a_damaged_file_is_one_line(data: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "bad.hw"
    if data is not None:
        path.write_bytes(data)
    status, out, err = dumped(path)
    assert status in (1, 2)
    assert len(err.splitlines()) == 1
    assert "Traceback" not in out + err


@pytest.mark.parametrize("_", [case(49, "many-entries")])
def test_a_large_table_is_told_in_short(_: int, tmp_path: Path) -> None:
    pool = np.zeros((8, 4, 2, 8), np.float16)
    t = hw.BlockPagedTensor(pool, block_table=np.arange(200_000) % 8, seq_ptr=[0, 200_000], seq_lens=[800_000])
    path = tmp_path / "big.hw"
    path.write_bytes(hw.encode(t))
    status, out, err = dumped(path)
    assert (status, err) == (0, "")
    assert len(out.splitlines()) < 200
    line = f"{sys.executable} -m hurray_wire.dump {path} | head -1"
    piped = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert piped.stderr == ""
    assert piped.stdout.count("\n") == 1


def of_a_sparse_file(path: str) -> None:
    """Run in a child: what the command takes for 3 GiB of which nothing is there."""
    from attack_child import in_a_fork

    from hurray_wire.dump import main

    sys.stderr.write(json.dumps(in_a_fork(lambda: main([path]))))


@pytest.mark.parametrize("_", [case(49, "sparse")])
def test_a_sparse_file_costs_what_its_header_does(_: int, tmp_path: Path) -> None:
    pages = (3 << 30) // 128
    path = tmp_path / "sparse.hw"
    path.write_bytes(desc(sizes=(3 << 30, 12, 12), num_pages=pages))
    with path.open("r+b") as file:
        file.seek(133 + (3 << 30))
        file.write(np.array([0, 1, 0, 0, 2, 3], "<u4").tobytes())
    code = f"import test_reports_numbers as t; t.of_a_sparse_file({str(path)!r})"
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    met = json.loads(done.stderr)
    assert met["answer"] == "ok 0", done.stdout
    assert met["grown"] < 150 << 20
    assert "no checksums" in " ".join(done.stdout.split())
