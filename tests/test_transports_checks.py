"""Which chunks are read together, and who judges them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import hurray_wire as hw
from hurray_wire.options import decode_options
from hurray_wire.receiving import described_header
from hurray_wire.transports import batches
from hurray_wire.transports.checks import Checks


@pytest.mark.parametrize("pages", [1, 2, 3, 7, 64, 100])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize(("most", "least"), [(1, 1), (3, 2), (16, 4), (1 << 20, 1)])
def test_batches_hold_every_chunk_once_in_order(
    monkeypatch: pytest.MonkeyPatch, pages: int, chunk: int, most: int, least: int
) -> None:
    width = 2 * 1 * 8 * 2
    monkeypatch.setattr(batches, "BATCH_BYTES", most * width)
    monkeypatch.setattr(batches, "LEAST_BYTES", least * width)
    pool = np.ones((pages, 2, 1, 8), np.float16)
    t = hw.BlockPagedTensor(pool, block_table=[0], seq_ptr=[0, 1], seq_lens=[2])
    header = np.frombuffer(hw.encode_header(t, chunk_bytes=chunk * width), np.uint8)
    found, _ = described_header(header, decode_options({}))
    made = batches.batches_of(found)
    assert [row for batch in made for part in batch.parts() for row in part] == list(
        range(made[0].rows.start, made[-1].rows.stop)
    )
    assert [batch.start for batch in made] == [0, *(batch.stop for batch in made[:-1])]
    assert made[-1].stop == pages
    assert sum(batch.nbytes for batch in made) == pool.nbytes
    assert all(batch.nbytes <= max(most, chunk) * width for batch in made)


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_every_job_is_done_before_the_end(threads: int) -> None:
    done: list[int] = []
    checks = Checks(threads)
    for start in range(0, 100, 10):
        checks.add(lambda i=i: done.append(i) for i in range(start, start + 10))  # type: ignore[misc]
    checks.finish()
    assert sorted(done) == list(range(100))


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_one_that_fails_is_never_passed_over(threads: int) -> None:
    checks = Checks(threads)

    def fail() -> None:
        raise ValueError("not whole")

    def everything() -> None:
        checks.add([fail])
        for _ in range(50):
            checks.add([lambda: None])
        checks.finish()

    with pytest.raises(ValueError, match="not whole"):
        everything()
    with pytest.raises(ValueError, match="not whole"):
        checks.finish()


def test_what_is_dropped_is_not_done() -> None:
    entered, leave, done = threading.Event(), threading.Event(), []
    checks = Checks(1)

    def wait() -> None:
        entered.set()
        leave.wait()

    checks.add([wait])
    entered.wait()
    checks.add([lambda: done.append(1)])
    threading.Timer(0.01, leave.set).start()
    checks.drop()
    assert done == []


def test_threads_that_cannot_be_had_cost_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    checks = Checks(2)
    checks.add([lambda: done.append(1)])
    assert done == [1]
    checks.finish()
