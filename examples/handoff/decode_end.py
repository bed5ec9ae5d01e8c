"""The decode process: takes the pages that arrive into its own, rebuilds the cache, and goes on generating."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

import hurray_wire as hw
from handoff import connection, generation, latents, models, pool
from handoff.generation import Prompts
from handoff.jobs import RECEIVER_PAGE_SIZE, Job, Received
from handoff.prefill_end import NEXT_TOKENS
from hurray_wire import engines


class Decoder:
    """Receives what prefill ranks send to a listener, for one model."""

    def __init__(self, listener: connection.Listener, model: Any, prompts: Prompts, steps: int) -> None:
        self.listener = listener
        self.model = model
        self.prompts = prompts
        self.steps = steps

    def receive(self, job: Job) -> Received:
        """Do this end's part of a job: refuse it, or go on from what arrived."""
        received = Received()
        geometry = models.geometry(self.model)
        mine = pool.Pool(geometry.layers, self._roles(job, geometry), job.dtype, self._pages())
        prefix_pages = self._known_prefix(job, mine) if job.known_prefix else None
        started = time.perf_counter()
        try:
            next_tokens = self._take_in(job, mine, received, prefix_pages)
        except hw.MismatchError as error:
            received.differences = [str(difference) for difference in error.differences]
            return received
        begun = time.perf_counter()
        key_dim = geometry.key[1] if job.form == "cache" else self.model.config.kv_lora_rank
        cache, mask = engines.to_transformers(mine.layers(key_dim), padding="right")
        received.held = generation.arrays(cache)  # views: nothing is copied
        if job.form == "latent" and not latents.are_cached(self.model):
            cache = latents.expanded(self.model, cache)
        received.seconds["rebuilding"] = time.perf_counter() - begun
        received.seconds["elapsed"] = time.perf_counter() - started
        done = generation.generate(self.model, cache, mask, next_tokens, self.steps)
        received.tokens, received.logits = done.tokens, done.logits
        return received

    def _pages(self) -> int:
        """Twice as many as the prompts would need if nothing was shared."""
        totals = (self.prompts.prefix + length for length in self.prompts.lengths)
        return 2 * sum(-(-total // RECEIVER_PAGE_SIZE) for total in totals)

    def _roles(self, job: Job, geometry: models.Geometry) -> dict[str, tuple[int, int]]:
        if job.form == "cache":
            return {"key": geometry.key, "value": geometry.value}
        return {"fused": (1, self.model.config.kv_lora_rank + self.model.config.qk_rope_head_dim)}

    def _known_prefix(self, job: Job, mine: pool.Pool) -> Any:
        """Receive the prefix, as an earlier request would have brought it; the ids of its pages."""
        with self.listener.accept() as stream:
            for i, arrival in enumerate(stream.arrivals({"model": job.model, "dtype": job.dtype})):
                t = arrival.read()
                if not i:
                    mine.seat(t)
                mine.put(t)
        mine.check_complete()
        return mine.table

    def _take_in(self, job: Job, mine: pool.Pool, received: Received, prefix_pages: Any) -> Any:
        """Scatter all that the ranks send, frame by frame; the tokens that come next."""
        expect = self._expect(job)
        seconds, tokens = received.seconds, None
        seconds |= {"decoding": 0.0, "scattering": 0.0}
        with ExitStack() as open_streams:
            streams = [open_streams.enter_context(self.listener.accept()) for _ in job.ranks]
            open_streams.callback(lambda: _count(received, streams))
            for t in _timed(zip(*(stream.arrivals(expect) for stream in streams), strict=True), seconds, streams):
                begun = time.perf_counter()
                if tokens is None:
                    tokens = (t.metadata or {})[NEXT_TOKENS]
                    mine.seat(t, prefix_pages)
                mine.put(pool.in_dtype(t, job.dtype))
                seconds["scattering"] += time.perf_counter() - begun
            mine.check_complete()
        return torch.tensor(tokens)

    def _expect(self, job: Job) -> dict[str, Any]:
        """What every frame must say of itself before its payload is read."""
        stored = job.dtype if job.quantization is None else "int8"
        expect: dict[str, Any] = {"model": job.model, "dtype": stored, "quantization": job.quantization}
        expect["num_seqs"] = len(self.prompts.lengths)
        if job.form == "latent":
            expect["content"] = "latent"
        else:
            expect["num_heads"] = models.geometry(self.model).key[0] // job.size
        return expect | job.expect


def _count(received: Received, streams: Sequence[connection.Stream]) -> None:
    received.bytes = sum(stream.meter.bytes for stream in streams)


def _timed(arrivals: Iterator[Any], seconds: dict[str, float], streams: list[Any]) -> Iterator[hw.BlockPagedTensor]:
    """Tensors of all ranks in turn; the time that it takes to have one, without that of its bytes' way."""
    while True:
        begun, moving = time.perf_counter(), sum(stream.meter.seconds for stream in streams)
        tensors = [arrival.read() for arrival in next(arrivals, ())]
        moved = sum(stream.meter.seconds for stream in streams) - moving
        seconds["decoding"] += time.perf_counter() - begun - moved
        if not tensors:
            return
        yield from tensors
