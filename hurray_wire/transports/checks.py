"""Chunks judged by threads while others are on their way; the thread that waits for them joins in.

One thread fewer than there are cores: the engine copies on the one that is left, in this process or, where both ends
share a machine, in the peer's. Once nothing is on its way any more, the caller's thread takes what is left to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from threading import Condition

Job = Callable[[], object]


class Checks:
    """Jobs shared with some threads of an executor, which an endpoint keeps between transfers.

    What has become of a job is counted here, not asked of the executor: one that cannot start a thread may have taken
    the call all the same, and run it later.

    Args:
        executor: None where nothing is to be shared: jobs are done as they are added.
        threads: how many of it help at a time.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> done = []
        >>> with ThreadPoolExecutor(2) as executor:
        ...     checks = Checks(executor, 2)
        ...     checks.add([lambda i=i: done.append(i) for i in range(5)])
        ...     checks.finish()
        >>> sorted(done)
        [0, 1, 2, 3, 4]
    """

    def __init__(self, executor: Executor | None, threads: int) -> None:
        self._executor = executor
        self._threads = threads
        self._jobs: deque[Job] = deque()
        self._turn = Condition()
        self._called = 0  # threads that have been called, and have not left since
        self._busy = 0  # jobs that have been begun, and have not ended
        self._error: BaseException | None = None

    def _take(self, leaving: int) -> Job | None:
        """The next job; where there is none the caller leaves, in the same breath, so that none is overlooked."""
        with self._turn:
            if self._jobs and self._error is None:
                self._busy += 1
                return self._jobs.popleft()
            self._called -= leaving
            return None

    def _work(self, leaving: int = 0) -> None:
        while (job := self._take(leaving)) is not None:
            try:
                job()
            except BaseException as error:
                self._error = error
            finally:
                del job  # what it holds is not kept by a thread that waits
                with self._turn:
                    self._busy -= 1
                    self._turn.notify_all()

    def add(self, jobs: Iterable[Job]) -> None:
        """Have them done: at once where there are no threads.

        Raises:
            Whatever a job that was done so far has raised.
        """
        with self._turn:
            self._jobs += jobs
            missing = min(self._threads - self._called, len(self._jobs))
            self._called += missing
        if self._executor is None:
            self._work()
        else:
            self._call(self._executor, missing)
        self.look()

    def _call(self, executor: Executor, count: int) -> None:
        try:
            for _ in range(count):
                executor.submit(self._work, 1)
        except RuntimeError:  # threads that cannot be had cost speed only
            self._work()

    def look(self) -> None:
        """Raise what a job has raised."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Do what is left, wait for the rest.

        Raises:
            Whatever a job has raised.
        """
        self._work()
        self._settle()
        self.look()

    def drop(self) -> None:
        """Do nothing more; wait for what is being done."""
        with self._turn:
            self._jobs.clear()
        self._settle()

    def _settle(self) -> None:
        with self._turn:
            self._turn.wait_for(lambda: not self._busy)
