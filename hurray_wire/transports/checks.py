"""Chunks judged by threads while others are on their way; the thread that waits for them joins in.

One thread fewer than there are cores: the engine copies on the one that is left, in this process or, where both ends
share a machine, in the peer's. Once nothing is on its way any more, the caller's thread takes what is left to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from contextlib import suppress

Job = Callable[[], object]


class Checks:
    """Jobs shared with some threads of an executor, which an endpoint keeps between transfers.

    Args:
        executor: None where nothing is to be shared: jobs are done as they are added.
        threads: how many it has.

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
        self._helpers: list[Future[None]] = []
        self._error: BaseException | None = None

    def _work(self) -> None:
        with suppress(IndexError):
            while self._error is None:
                job = self._jobs.popleft()
                try:
                    job()
                except BaseException as error:
                    self._error = error

    def add(self, jobs: Iterable[Job]) -> None:
        """Have them done: at once where there are no threads.

        Raises:
            Whatever a job that was done so far has raised.
        """
        self._jobs += jobs
        if self._executor is None:
            self._work()
        elif self._jobs:
            self._call(self._executor)
        self.look()

    def _call(self, executor: Executor) -> None:
        """Have the threads look again: one that is about to leave may not have seen the jobs that are new."""
        self._helpers = [helper for helper in self._helpers if not helper.done()]
        try:
            self._helpers += [executor.submit(self._work) for _ in range(min(self._threads, len(self._jobs)))]
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
        wait(self._helpers)
        self.look()

    def drop(self) -> None:
        """Do nothing more; wait for what is being done."""
        self._jobs.clear()
        wait(self._helpers)
