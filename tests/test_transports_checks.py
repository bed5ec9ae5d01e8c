"""Which chunks are read together, and who judges them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import hurray_wire as hw
from hurray_wire import transports
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


@pytest.fixture
def threads() -> int:
    return 1


@pytest.fixture
def executor(threads: int) -> Iterator[ThreadPoolExecutor | None]:
    """An executor of so many threads; none for 0."""
    with ThreadPoolExecutor(threads or 1) as made:
        yield made if threads else None


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_every_job_is_done_before_the_end(executor: ThreadPoolExecutor, threads: int) -> None:
    done: list[int] = []
    checks = Checks(executor, threads)
    for start in range(0, 100, 10):
        checks.add(lambda i=i: done.append(i) for i in range(start, start + 10))  # type: ignore[misc]
    checks.finish()
    assert sorted(done) == list(range(100))


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_one_that_fails_is_never_passed_over(executor: ThreadPoolExecutor, threads: int) -> None:
    checks = Checks(executor, threads)

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


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_jobs_are_shared_by_so_many_threads(executor: ThreadPoolExecutor, threads: int) -> None:
    together = threading.Barrier(threads)
    checks = Checks(executor, threads)
    checks.add([lambda: together.wait(10)] * threads)  # nobody comes past it alone
    checks.finish()
    assert not together.broken


@pytest.mark.parametrize("threads", [2])
def test_readings_share_the_threads_and_nothing_else(executor: ThreadPoolExecutor) -> None:
    entered, leave = threading.Event(), threading.Event()
    one, other = Checks(executor, 1), Checks(executor, 1)

    def fail() -> None:
        entered.set()
        leave.wait(10)
        raise ValueError("not whole")

    one.add([fail])
    entered.wait(10)
    done: list[int] = []
    other.add([lambda: done.append(1)])
    other.finish()
    assert done == [1]
    leave.set()
    with pytest.raises(ValueError, match="not whole"):
        one.finish()
    other.look()


def test_what_is_dropped_is_not_done(executor: ThreadPoolExecutor) -> None:
    entered, leave, done = threading.Event(), threading.Event(), []
    checks = Checks(executor, 1)

    def wait() -> None:
        entered.set()
        leave.wait()

    checks.add([wait])
    entered.wait()
    checks.add([lambda: done.append(1)])
    threading.Timer(0.01, leave.set).start()
    checks.drop()
    assert done == []


def test_threads_that_cannot_be_had_cost_speed_only(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    checks = Checks(executor, 2)
    checks.add([lambda: done.append(1)])
    assert done == [1]
    checks.finish()


@pytest.mark.parametrize("threads", [4])
def test_a_job_counts_until_it_has_ended_whatever_became_of_its_thread(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor that cannot start a second thread has taken the calls already: its first thread runs them."""
    start, started = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) > 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    entered, leave = threading.Event(), threading.Event()

    def fail() -> None:
        entered.set()
        leave.wait(10)
        raise ValueError("not whole")

    def finished() -> None:
        checks.add([fail, *[lambda: entered.wait(10)] * 8])  # the first is the one thread's
        checks.finish()

    timer = threading.Timer(0.2, leave.set)
    timer.start()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    checks = Checks(executor, 4)
    with pytest.raises(ValueError, match="not whole"):
        finished()
    assert len(started) > 1


@pytest.mark.parametrize("threads", [3])
def test_no_more_threads_help_than_were_asked_for(executor: ThreadPoolExecutor) -> None:
    inside, most, lock = 0, 0, threading.Lock()

    def job() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.001)
        with lock:
            inside -= 1

    checks = Checks(executor, 1)
    for _ in range(30):
        checks.add([job, job])
    checks.drop()
    assert most == 1


def test_threads_that_have_ended_cost_speed_only(executor: ThreadPoolExecutor) -> None:
    executor.shutdown()
    done: list[int] = []
    checks = Checks(executor, 2)
    checks.add([lambda: done.append(1)])
    checks.finish()
    assert done == [1]


def test_an_endpoint_keeps_its_threads_and_ends_them() -> None:
    theirs, mine = np.ones((99, 64, 8, 64), np.float16), np.zeros((99, 64, 8, 64), np.float16)  # more than 4 MiB
    t = hw.BlockPagedTensor(theirs, block_table=range(99), seq_ptr=[0, 99], seq_lens=[99 * 64])

    def helpers() -> set[int | None]:
        return {th.ident for th in threading.enumerate() if th.name.startswith("hurray_wire transfer")}

    before = helpers()
    with transports.endpoint("socket") as one, transports.endpoint("socket") as other:
        peer, _ = one.connect(other.address), other.connect(one.address)
        registrations = one.register(theirs), other.register(mine)
        seen = set()
        for _ in range(3):
            one.send(peer, t)
            assert other.receive(timeout=10, threads=2).read_into(mine, range(99), timeout=10).same_tokens(t)
            seen |= helpers() - before
        assert len(seen) == 1
        del registrations
    assert helpers() == before
