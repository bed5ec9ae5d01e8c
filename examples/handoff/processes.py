"""The processes: one that decodes, two that prefill, and how the first process tells them what to do."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from handoff import connection, generation, latents, models, transports
from handoff.decode_end import Decoder
from handoff.generation import Prefilled, Prompts
from handoff.jobs import Job, Received, Sent
from handoff.prefill_end import Rank


@dataclass(frozen=True)
class Settings:
    """What all processes know from the beginning."""

    prompts: Prompts
    steps: int
    repeats: int
    transport: str


class Engine:
    """The models of one process, and what they prefilled: made when first asked for."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(1)
        self.settings = settings
        self._models: dict[tuple[str, str], Any] = {}
        self._prefilled: dict[tuple[str, str, str], Prefilled] = {}

    def model(self, name: str, dtype: str) -> Any:
        """A model, the same in every process."""
        if (name, dtype) not in self._models:
            self._models[name, dtype] = models.build(name, dtype)
        return self._models[name, dtype]

    def prefilled(self, name: str, dtype: str, form: str) -> Prefilled:
        """The prompts' cache."""
        if (name, dtype, form) not in self._prefilled:
            run = latents.prefill if form == "latent" else generation.prefill
            self._prefilled[name, dtype, form] = run(self.model(name, dtype), self.settings.prompts)
        return self._prefilled[name, dtype, form]

    def prefill_seconds(self, name: str, dtype: str) -> float:
        """How long the prefill takes here, once everything is warm."""
        model, times = self.model(name, dtype), []
        for _ in range(1 + self.settings.repeats):
            begun = time.perf_counter()
            generation.prefill(model, self.settings.prompts)
            times.append(time.perf_counter() - begun)
        return min(times[1:])


def prefill_process(orders: Connection, settings: Settings, number: int, address: Any) -> None:
    """Send what is ordered, until there is nothing more."""
    engine = Engine(settings)
    rank = Rank(number, transports.make(settings.transport), address)

    def work(order: Job | tuple[str, str]) -> Sent | float:
        if isinstance(order, Job):
            return rank.send(order, engine.prefilled(order.model, order.dtype, order.form))
        for form in models.forms(order[0]):
            engine.prefilled(*order, form)
        return engine.prefill_seconds(*order)

    _serve(orders, work)


def decode_process(orders: Connection, settings: Settings) -> None:
    """Say where to connect to, then receive what is ordered."""
    engine = Engine(settings)
    listener = transports.make(settings.transport).listen()
    orders.send(listener.address)

    def work(order: Job | tuple[str, str]) -> Received | float:
        if isinstance(order, Job):
            model = engine.model(order.model, order.dtype)
            return Decoder(listener, model, settings.prompts, settings.steps).receive(order)
        return engine.prefill_seconds(*order)

    try:
        _serve(orders, work)
    finally:
        listener.close()


def _serve(orders: Connection, work: Callable[[Any], Any]) -> None:
    while (order := orders.recv()) is not None:
        try:
            orders.send(work(order))
        except Exception:
            orders.send(traceback.format_exc())


class Worker:
    """A process of its own, told what to do through a pipe."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def order(self, order: Any) -> None:
        """Have something done."""
        self._orders.send(order)

    def answer(self) -> Any:
        """What came of it.

        Raises:
            RuntimeError: with the process's traceback, where it failed; where it is gone or does not answer.
        """
        if not self._orders.poll(connection.TIMEOUT * 2):
            raise RuntimeError("a process does not answer")
        try:
            answer = self._orders.recv()
        except EOFError:
            raise RuntimeError(f"a process is gone, with exit code {self._process.exitcode}") from None
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process.is_alive():
            try:
                self._orders.send(None)
                self._process.join(5)
            except OSError:
                pass
            self._process.terminate()
        self._process.join()


class Workers:
    """One decode process and two prefill ranks."""

    def __init__(self, settings: Settings) -> None:
        self._all = [Worker(decode_process, settings)]
        try:
            address = self._all[0].answer()
            self._all += [Worker(prefill_process, settings, number, address) for number in (0, 1)]
        except BaseException:
            self.close()
            raise

    def run(self, job: Job) -> tuple[list[Sent], Received]:
        """One transfer."""
        decode, *ranks = self._all
        chosen = [ranks[number] for number in job.ranks]
        for worker in (decode, *chosen):
            worker.order(job)
        received = decode.answer()
        return [rank.answer() for rank in chosen], received

    def prefill_seconds(self, model: str, dtype: str) -> float:
        """How long the decode process takes to compute the cache itself; all others are then ready to send theirs."""
        seconds = 0.0
        for worker in reversed(self._all):
            worker.order((model, dtype))
            seconds = worker.answer()
        return seconds

    def close(self) -> None:
        """End all of them."""
        for worker in self._all:
            worker.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
