"""Is the work linear? Ten times the sequences, or the table entries, must take about ten times the processor time.

    python tools/linear.py

Each door meets a tenth and the whole of 1.3 million sequences, and of 10 million table entries, in forks of one
process; of three rounds the fastest counts. Exit status 1 where ten times the entries take more than 25 times the time
(caches that overflow cost a factor of two), or more than four times the blob's bytes of memory; twelve times where
page ids are sorted, which is the sender's own work.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from attack_child import in_a_fork  # noqa: E402 - found by the path just set

import hurray_wire as hw  # noqa: E402

ROUNDS, MOST_RATIO, MOST_MEMORY, MOST_TO_SORT = 3, 25.0, 4.0, 12.0
LEAST_SECONDS = 0.002
SEQUENCES, ENTRIES = 1_300_000, 10_000_000


def many_sequences(count: int) -> bytes:
    """Sequences of one token, each with a page entry of its own: pages are shared, the pool is small."""
    return _blob(np.arange(count + 1), np.arange(count) % 64, np.ones(count, np.int64))


def long_table(count: int) -> bytes:
    """Eight sequences with all the entries between them."""
    ends = np.linspace(0, count, 9).astype(np.int64)
    return _blob(ends, np.arange(count) % 64, np.diff(ends) * 4)


def _blob(seq_ptr: Any, block_table: Any, seq_lens: Any) -> bytes:
    pool = np.zeros((64, 4, 1, 8), np.float16)
    return hw.encode(hw.BlockPagedTensor(pool, block_table=block_table, seq_ptr=seq_ptr, seq_lens=seq_lens))


def by_feeding(data: bytes) -> None:
    """A stream's way."""
    decoder = hw.FrameDecoder()
    for at in range(0, len(data), 1 << 20):
        decoder.feed(data[at : at + (1 << 20)])
    decoder.next()


DOORS: dict[str, Callable[[bytes], Any]] = {
    "decode": hw.decode,
    "inspect": hw.inspect,
    "open_frame": hw.open_frame,
    "FrameDecoder": by_feeding,
    "StreamReader": lambda data: list(hw.StreamReader(io.BytesIO(data))),
    "encode": lambda data: hw.encode(hw.decode(data)),
    "live pages": lambda data: hw.encode(hw.decode(data), pages="live"),
    "page_references": lambda data: hw.decode(data).page_references(),
}


def most_memory(door: str) -> float:
    """Bytes a byte of the blob."""
    return MOST_TO_SORT if door == "live pages" else MOST_MEMORY


def least(door: Callable[[bytes], Any], data: bytes, rounds: int = ROUNDS) -> tuple[float, int]:
    """Seconds and bytes of the best round."""

    def once() -> None:
        door(data)

    met = [in_a_fork(once) for _ in range(rounds)]
    bad = next((r["answer"] for r in met if not r["answer"].startswith("ok")), None)
    if bad is not None:
        raise RuntimeError(bad)
    return min(r["seconds"] for r in met), min(r["grown"] for r in met)


def main() -> int:
    """Measure and print; gives the exit status."""
    missed = 0
    print(f"{'what':22} {'door':16} {'a tenth':>10} {'all':>10} {'ratio':>7} {'memory / blob':>14}")
    for name, make, count in (("sequences", many_sequences, SEQUENCES), ("table entries", long_table, ENTRIES)):
        small, whole = make(count // 10), make(count)
        for door, call in DOORS.items():
            call(small)  # what is made once
            (first, _), (second, grown) = least(call, small), least(call, whole)
            ratio, memory = second / max(first, LEAST_SECONDS), grown / len(whole)
            bad = ratio > MOST_RATIO or memory > most_memory(door)
            missed += bad
            told = f"{count:,} {name}"
            print(
                f"{told:22} {door:16} {first * 1e3:8.1f}ms {second * 1e3:8.1f}ms {ratio:7.1f} {memory:13.2f}x"
                f"{'  MISSED' if bad else ''}",
                flush=True,
            )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
