"""Where hurray-dump's bytes come from and go: pipes, huge and shrinking files, readers that leave, little memory."""

from __future__ import annotations

import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from dump_corpus import ROOT, batch, corpus, run_child, run_here, stream
from frames import entries_of
from support import worked

import hurray_wire as hw
from hurray_wire.dump.source import FileSource

COMMAND = [sys.executable, "-m", "hurray_wire.dump"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
MIB = 1 << 20


# Standard input.


@pytest.mark.parametrize("name", ["worked.hrkv", "stream.hrkv", "batch.hrkv", "worked.hrry", "two-streams.hrkv"])
@pytest.mark.parametrize("options", [[], ["--hex"], ["--seqs", "--map", "--stats"], ["--verify"], ["--json"]])
def test_a_pipe_says_what_the_file_says(name: str, options: list[str], tmp_path: Path) -> None:
    data = corpus()[name]
    (tmp_path / name).write_bytes(data)
    file, pipe = run_child([*options, name], tmp_path), run_child([*options, "-"], tmp_path, stdin=data)
    size = f"{len(data)}" if "--json" in options else ""
    expected = file.out.replace(name, "stdin").replace(f'"size": {size}', '"size": null', 1)
    if "--json" not in options:
        expected = "stdin\n" + expected.partition("\n")[2]
    assert (pipe.status, pipe.out) == (file.status, expected)


@pytest.mark.parametrize("name", ["truncated.hrkv", "page-id.hrkv", "zstd.hrkv", "missing-frame.hrkv", "garbage.hrkv"])
@pytest.mark.parametrize("options", [[], ["--resync"]])
def test_a_broken_pipe_of_bytes_says_what_the_file_says(name: str, options: list[str], tmp_path: Path) -> None:
    data = corpus()[name]
    (tmp_path / name).write_bytes(data)
    file, pipe = run_child([*options, name], tmp_path), run_child([*options, "-"], tmp_path, stdin=data)
    assert (pipe.status, pipe.err) == (1, file.err.replace(name, "stdin"))


def test_standard_input_that_can_seek(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(hw.encode(worked()))
    with (tmp_path / "x").open("rb") as file:
        done = subprocess.run([*COMMAND, "-"], stdin=file, capture_output=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0
    assert b"1.19 KiB" in done.stdout


def test_diff_with_a_pipe(tmp_path: Path) -> None:
    blob = hw.encode(worked())
    (tmp_path / "x").write_bytes(blob)
    assert run_child(["--diff", "x", "-"], tmp_path, stdin=blob).status == 0
    assert run_child(["--diff", "-", "x"], tmp_path, stdin=hw.encode(worked(layer_index=9))).status == 1


def test_a_live_stream_is_shown_as_it_comes_and_left_quietly(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [*COMMAND, "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background inherit it ignored
    )
    assert child.stdin is not None
    assert child.stdout is not None
    frames = stream()
    child.stdin.write(frames[0] + frames[1][:16])
    child.stdin.flush()
    assert child.stdout.readline() == b"stdin\n"
    time.sleep(1)  # until it waits for the rest: it is left at its prompt, so to say, not amid its imports
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=60)
    assert (child.returncode, error) == (2, b"")


# Standard output.


@pytest.mark.parametrize("options", [["--seqs"], ["--json", "--seqs"], ["--full", "--hex"]])
def test_a_reader_that_leaves_is_not_complained_of(options: list[str], tmp_path: Path) -> None:
    count = 200_000
    tensor = hw.BlockPagedTensor(
        np.zeros((count, 1, 1, 1), np.int8),
        block_table=np.arange(count),
        seq_ptr=np.arange(0, count + 1, 10),
        seq_lens=np.full(count // 10, 10),
    )
    (tmp_path / "big.hrkv").write_bytes(hw.encode(tensor))
    child = subprocess.Popen(
        [*COMMAND, *options, *["big.hrkv"] * 3],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    error = child.stderr.read()
    child.stderr.close()
    assert (child.wait(timeout=60), error) == (0, b"")
    assert len(run_child(["big.hrkv"], tmp_path).out.splitlines()) < 200


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_disk_is_no_fault_of_the_file(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(hw.encode(worked()))
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, *options, "x"], cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, env=ENVIRONMENT, check=False
        )
    assert (done.returncode, done.stderr) == (2, b"hurray-dump: No space left on device\n")


def test_closed_standard_output(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(hw.encode(worked()))
    script = f"exec {sys.executable} -m hurray_wire.dump x >&-"
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, stderr=subprocess.PIPE, env=ENVIRONMENT, check=False)
    assert (done.returncode, done.stderr) == (2, b"hurray-dump: standard output is closed\n")


# Files that change, and huge ones.


def test_a_file_that_shrinks_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = hw.encode(batch(), chunk_bytes=MIB // 16) + hw.encode(worked(), framing="bare")
    path = tmp_path / "x.hrkv"
    plain, reads = FileSource.read, 0

    def shrinking(self: FileSource, offset: int, length: int) -> bytes:
        nonlocal reads
        reads += 1
        if reads == at and offset < len(blob):
            os.truncate(path, min(offset + length // 2, len(blob) - 1))
        return plain(self, offset, length)

    monkeypatch.setattr(FileSource, "read", shrinking)
    for at in range(1, 40):
        reads = 0
        path.write_bytes(blob)
        found = run_here(["x.hrkv"], tmp_path)
        if reads < at:
            break
        assert found.status == (path.stat().st_size < len(blob)), at
        assert "internal" not in found.err
    assert at > 10


def test_a_file_that_shrinks_under_a_process(tmp_path: Path) -> None:
    path = tmp_path / "x.hrkv"
    _sparse(path, 512 * MIB)
    timer = threading.Timer(0.4, lambda: os.truncate(path, MIB))
    timer.start()
    found = run_child(["--verify", "x.hrkv"], tmp_path)
    timer.join()
    assert found.status in (0, 1)
    assert "Traceback" not in found.err


def _sparse(path: Path, pool_bytes: int, *, checksum: bool = False) -> hw.BlockPagedTensor:
    """A frame whose pool is a hole in the file."""
    page_bytes = 16 * 8 * 64 * 2
    pages = pool_bytes // page_bytes
    pool_path = path.with_suffix(".pool")
    with pool_path.open("wb") as file:
        try:
            file.truncate(pages * page_bytes)
        except OSError:
            pytest.skip("the file system has no room for a sparse file of this size")
    pool = np.memmap(pool_path, np.float16, "r", shape=(pages, 16, 8, 64))
    tensor = hw.BlockPagedTensor(pool, block_table=np.arange(0, pages, 7), seq_ptr=[0, -(-pages // 7)], total_tokens=9)
    header = hw.encode_header(tensor, checksum=checksum)
    with path.open("wb") as file:
        file.write(header)
        for entry in entries_of(header):
            if entry["kind"] in (0x11, 0x12):
                file.seek(entry["offset"])
                file.write((tensor.block_table, tensor.seq_ptr)[entry["kind"] - 0x11].tobytes())
        file.truncate(struct.unpack_from("<Q", header, 24)[0])
    pool_path.unlink()
    return tensor


@pytest.mark.parametrize("options", [[], ["--json"], ["--map", "--hex"]])
def test_a_hundred_gibibytes_cost_their_headers_and_tables(options: list[str], tmp_path: Path) -> None:
    path = tmp_path / "huge.hrkv"
    _sparse(path, 100 << 30)
    started = time.monotonic()
    found = run_child([*options, "huge.hrkv"], tmp_path, timeout=60)
    assert (found.status, found.err) == (0, "")
    assert time.monotonic() - started < 60
    if not options:
        assert "100.00 GiB" in found.out
        assert "not verified: 100.00 GiB" in found.out
        assert "sound; payload not verified" in found.out


_MEASURED = """
import resource, sys
from hurray_wire.dump import main
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
status = main(sys.argv[1:])
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base
print("grown", grown >> 10, file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.parametrize("options", [["--verify"], ["--stats"], ["--verify", "--json"]])
def test_memory_stays_flat(options: list[str], tmp_path: Path) -> None:
    _sparse(tmp_path / "x.hrkv", 320 * MIB, checksum=True)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, *options, "x.hrkv"],
        cwd=tmp_path,
        capture_output=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split()[-1]) < 96


def test_compressed_memory_stays_flat(tmp_path: Path) -> None:
    tensor = hw.BlockPagedTensor(
        np.zeros((4096, 16, 8, 256), np.float16), block_table=np.arange(4096), seq_ptr=[0, 4096], seq_lens=[65536]
    )
    (tmp_path / "x.hrkv").write_bytes(hw.encode(tensor, compression="zstd"))
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, "--verify", "x.hrkv"],
        cwd=tmp_path,
        capture_output=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split()[-1]) < 96


def test_hostile_claims_within_little_memory(tmp_path: Path) -> None:
    blob, bare = hw.encode(worked()), hw.encode(worked(), framing="bare")
    for i, at in enumerate((20, 24, 44, 56, 68, 85, 93, 101, 117)):
        for size in (1 << 31, (1 << 40) - 1, 1 << 62, (1 << 64) - 1):
            width = min(8, 4 if at in (20, 68, 93) else 8)
            value = (size & ((1 << 8 * width) - 1)).to_bytes(width, "little")
            for name, data in (("h", blob), ("b", bare)):
                changed = data[:at] + value + data[at + width :]
                (tmp_path / f"{name}{i}-{size:x}").write_bytes(changed)
    names = sorted(path.name for path in tmp_path.iterdir())
    done = subprocess.run(
        [*COMMAND, "--verify", "--resync", "--map", "--seqs", "--stats", *names],
        cwd=tmp_path,
        capture_output=True,
        env=ENVIRONMENT,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)),
    )
    assert done.returncode == 1
    assert b"memory" not in done.stderr.replace(b"memory_class", b"")
    assert b"internal" not in done.stderr
