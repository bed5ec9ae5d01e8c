"""Chunks judged by threads while others are on their way; the thread that waits for them joins in.

One thread fewer than there are cores: the engine copies on the one that is left, in this process or, where both ends
share a machine, in the peer's. Once nothing is on its way any more, the caller's thread takes what is left to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread

Job = Callable[[], None]


class Checks:
    """Jobs done by some threads; none where there is nothing to share.

    Example:
        >>> done, checks = [], Checks(2)
        >>> checks.add(lambda i=i: done.append(i) for i in range(5))
        >>> checks.finish()
        >>> sorted(done)
        [0, 1, 2, 3, 4]
    """

    def __init__(self, threads: int) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._threads: list[Thread] = []
        with suppress(RuntimeError):  # threads that cannot be had cost speed only
            for _ in range(threads):
                thread = Thread(target=self._work, name="hurray_wire transfer", daemon=True)
                thread.start()
                self._threads.append(thread)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(job)

    def _do(self, job: Job) -> None:
        if self._error is None:
            try:
                job()
            except BaseException as error:
                self._error = error

    def add(self, jobs: Iterable[Job]) -> None:
        """Have them done: at once where there are no threads.

        Raises:
            Whatever a job that was done so far has raised.
        """
        for job in jobs:
            if self._threads:
                self._jobs.put(job)
            else:
                self._do(job)
        self.look()

    def look(self) -> None:
        """Raise what a job has raised."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Do what is left, wait for the rest.

        Raises:
            Whatever a job has raised.
        """
        with suppress(Empty):
            while (job := self._jobs.get_nowait()) is not None:
                self._do(job)
        self._end()
        self.look()

    def drop(self) -> None:
        """Do nothing more; wait for what is being done."""
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()
        self._end()

    def _end(self) -> None:
        threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join()
