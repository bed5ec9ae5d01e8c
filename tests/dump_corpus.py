"""The files that tests of hurray-dump look at, the commands whose output is kept, and how both are run.

Made from fixed seeds by the encoder where nothing depends on a version of zstd, else taken from `fixtures/`. Ten of
them are broken, each in another way. `tools/make_dump_goldens.py` writes the outputs, a test only compares them.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from frames import PROLOGUE, entries_of, header_resealed, patched, section_of, with_content
from support import worked

import hurray_wire as hw
from hurray_wire.dump import main

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "fixtures"
GOLDENS = Path(__file__).resolve().parent / "golden_dump"
ENTRY_BYTES = 48


def batch(**changes: object) -> hw.BlockPagedTensor:
    """Five requests, three of them with a prefix in common, spare pages, a NaN and infinities."""
    rng = np.random.default_rng(3)
    pool = (rng.integers(-900, 900, (256, 16, 2, 16)) / 1024).astype("<f2")
    pool[3, 2, 1, 5] = np.nan
    pool[210] = np.inf
    prefix = np.arange(25)
    table = np.concatenate([np.arange(40), prefix, np.arange(60, 90), prefix, [200, 201, 202]])
    arguments: dict[str, object] = {
        "block_table": table,
        "seq_ptr": [0, 40, 65, 95, 120, 123],
        "seq_lens": [640, 400, 470, 399, 20],
        "layer_index": 2,
        "metadata": {"model": "tiny-1", "seq_ids": [f"req-{i}" for i in range(5)], "x.note": "bell \a, \x1b[31mred"},
    } | changes
    return hw.BlockPagedTensor(arguments.pop("page_pool", pool), **arguments)  # type: ignore[arg-type]


def stream(count: int = 8, stream_id: int = 77) -> list[bytes]:
    """The frames of a stream: keys and values of layer after layer."""
    tensors = [worked(layer_index=i // 2, kv_role=("key", "value")[i % 2]) for i in range(count)]
    return [
        hw.encode(t, sequence=i, last=i == count - 1, stream_id=stream_id, threads=1) for i, t in enumerate(tensors)
    ]


def quantised() -> hw.BlockPagedTensor:
    """int8 with a scale a slot."""
    pool = np.arange(320).astype(np.int8).reshape(5, 4, 2, 8)
    return worked(page_pool=pool, quantization="per_block", scales=np.full((5, 4), 0.5, "<f4"), layer_index=None)


def zstd_chunk(frame: bytes, nth: int = 0) -> dict[str, int]:
    """The nth compressed chunk of a frame's page pool."""
    return [entry for entry in entries_of(frame) if entry["kind"] == 16 and entry["codec"] == 1][nth]


def _wrong_index(descriptor: bytes) -> bytes:
    return patched(descriptor, 85 + 16 * 4 + 4 + 4 + 8, struct.pack("<I", 1))


def broken() -> dict[str, bytes]:
    """Ten blobs, each broken in a way of its own."""
    blob, frames, compressed = hw.encode(worked()), stream(), (FIXTURES / "hrkv/zstd-shuffle2-chunks.hrkv").read_bytes()
    chunk = zstd_chunk(compressed, 1)
    damaged = patched(compressed, chunk["offset"], b"\xff\xff\xff\xff")
    index = next(i for i, entry in enumerate(entries_of(damaged)) if entry == chunk)
    at = PROLOGUE.size + index * ENTRY_BYTES + ENTRY_BYTES - 8
    stored = damaged[chunk["offset"] : chunk["offset"] + chunk["stored_length"]]
    pool = section_of(blob, 16)
    checksum_at = PROLOGUE.size + 2 * ENTRY_BYTES + ENTRY_BYTES - 8
    return {
        "truncated.hrkv": blob[:700],
        "flipped-bit.hrkv": patched(blob, pool["offset"] + 52, bytes([blob[pool["offset"] + 52] ^ 4])),
        "page-id.hrkv": with_content(blob, 17, lambda _: struct.pack("<3I", 0, 9, 0)),
        "type-tag.hrkv": with_content(blob, 1, lambda c: patched(c, 14, b"\x99")),
        "seq-ptr.hrkv": with_content(blob, 18, lambda _: struct.pack("<3I", 0, 5, 3)),
        "checksum.hrkv": header_resealed(patched(blob, checksum_at, bytes([blob[checksum_at] ^ 1]))),
        "missing-frame.hrkv": b"".join(frames[:3] + frames[4:]),
        "foreign.hrkv": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 1376320\n",
        "zstd.hrkv": header_resealed(patched(damaged, at, checksum(stored))),
        "quantisation-index.hrkv": with_content(hw.encode(quantised()), 1, _wrong_index),
    }


def checksum(data: bytes) -> bytes:
    """XXH3-64 as it stands in a section table."""
    return xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")


def corpus() -> dict[str, bytes]:
    """Every file by its name."""
    blob, frames, tensor = hw.encode(worked()), stream(), batch()
    other = np.array(tensor.page_pool)
    other[70, 3, 1, 2] = 0.5
    bare = hw.encode(worked(), framing="bare")
    made = {
        "worked.hrkv": blob,
        "worked.hrry": bare,
        "batch.hrkv": hw.encode(tensor, threads=1),
        "batch-changed.hrkv": hw.encode(tensor.replace(page_pool=other, layer_index=3), threads=1),
        "batch-live.hrkv": hw.encode(tensor, pages="live", threads=1),
        "quantised.hrkv": hw.encode(quantised()),
        "stream.hrkv": b"".join(frames),
        "no-last.hrkv": b"".join(frames[:3]),
        "two-streams.hrkv": b"".join(stream(2, 1) + stream(1, 2)) + bare,
        "garbage.hrkv": frames[0] + b"not a frame " * 40 + b"".join(frames[1:3]),
        "hole.hrkv": frames[0][:700] + frames[0][1000:] + b"".join(frames[1:]),
        "header.hrkv": patched(blob, 30, b"\x01"),
        "cut-header.hrkv": blob[:100],
        "reserved.hrry": patched(patched(bare, 78, b"\x07"), 64, b"\x01"),
        "other-layout.hrry": patched(bare, 15, b"\x07"),
        "bare-cut.hrry": bare[:500],
        "empty.hrkv": b"",
    }
    return made | broken() | fixtures()


def fixtures() -> dict[str, bytes]:
    """The vectors of other encoders, small ones."""
    paths = sorted([*FIXTURES.glob("hrkv/*.hrkv"), *FIXTURES.glob("hurray-0.1.0/*.hrry")])
    return {path.name: path.read_bytes() for path in paths if path.stat().st_size < 1 << 17}


def write(folder: Path, names: Sequence[str] | None = None) -> None:
    """The corpus as files."""
    for name, data in corpus().items():
        if names is None or name in names:
            (folder / name).write_bytes(data)


class Outcome(NamedTuple):
    """What a run printed, and its status."""

    status: int
    out: str
    err: str


def run_here(arguments: Sequence[str], folder: Path, width: int = 100) -> Outcome:
    """`main` in this process, its files named from `folder`."""
    out, err = io.StringIO(), io.StringIO()
    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ["COLUMNS"] = str(width)
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(arguments))
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    return Outcome(status, out.getvalue(), err.getvalue())


def run_child(
    arguments: Sequence[str], folder: Path, stdin: bytes | None = None, timeout: float = 120, **environment: str
) -> Outcome:
    """The real entry point, in a process of its own."""
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "PYTHONWARNINGS": "error"} | environment
    done = subprocess.run(
        [sys.executable, "-m", "hurray_wire.dump", *arguments],
        cwd=folder,
        input=b"" if stdin is None else stdin,
        capture_output=True,
        timeout=timeout,
        env=settings,
        check=False,
    )
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())


class Golden(NamedTuple):
    """A command whose output is kept."""

    name: str
    arguments: tuple[str, ...]
    width: int = 100

    @property
    def path(self) -> Path:
        """Where it is kept."""
        return GOLDENS / f"{self.name}.txt"

    def text(self, folder: Path) -> str:
        """The output now: command, standard output, standard error, status."""
        found = run_here(self.arguments, folder, self.width)
        error = f"--- standard error\n{found.err}" if found.err else ""
        out = found.out.replace(f'"version": "{hw.__version__}"', '"version": "..."')
        return f"$ hurray-dump {' '.join(self.arguments)}\n{out}{error}--- exit {found.status}\n"


_VIEWS = (
    Golden("hex-frame", ("--hex", "worked.hrkv")),
    Golden("hex-bare", ("--hex", "int8_per_block_asym.hrry")),
    Golden("hex-narrow", ("--hex", "worked.hrry"), 60),
    Golden("hex-header", ("--hex", "header.hrkv")),
    Golden("hex-page-id", ("--hex", "page-id.hrkv")),
    Golden("hex-quantisation-index", ("--hex", "quantisation-index.hrkv")),
    Golden("hex-reserved", ("--hex", "reserved.hrry")),
    Golden("hex-cut-header", ("--hex", "cut-header.hrkv")),
    Golden("hex-statistics", ("--hex", "statistics.hrry")),
    Golden("hex-chunks", ("--hex", "zstd-shuffle2-chunks.hrkv")),
    Golden("views", ("--seqs", "--map", "--stats", "batch.hrkv")),
    Golden("views-narrow", ("--seqs", "--map", "--stats", "batch.hrkv"), 40),
    Golden("stats-quantised", ("--stats", "quantised.hrkv", "int4.hrry", "type_complex128.hrry")),
    Golden("json", ("--json", "--hex", "--seqs", "--map", "--stats", "quantised.hrkv")),
    Golden("json-broken", ("--json", "hole.hrkv", "foreign.hrkv", "other-layout.hrry")),
    Golden("diff-changed", ("--diff", "batch.hrkv", "batch-changed.hrkv")),
    Golden("diff-live", ("--diff", "batch.hrkv", "batch-live.hrkv")),
    Golden("diff-same", ("--diff", "worked.hrkv", "raw.hrkv")),
    Golden("diff-streams", ("--diff", "stream.hrkv", "missing-frame.hrkv")),
    Golden("diff-json", ("--diff", "--json", "batch.hrkv", "batch-changed.hrkv")),
    Golden("resync-garbage", ("--resync", "garbage.hrkv")),
    Golden("resync-hole", ("--resync", "hole.hrkv")),
    Golden("narrow", ("batch.hrkv",), 40),
    Golden("full", ("--full", "two-streams.hrkv")),
    Golden("one-frame", ("--frame", "3", "stream.hrkv")),
    Golden("several-files", ("worked.hrkv", "empty.hrkv", "worked.hrry")),
    Golden("usage", ("--diff", "worked.hrkv")),
)


def goldens() -> list[Golden]:
    """Every command whose output is kept: the summary of each file, and the views."""
    return [*(Golden(name.replace(".", "-"), (name,)) for name in corpus()), *_VIEWS]
