"""A prefill rank: pages the cache of a batch and streams it, layer by layer."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import hurray_wire as hw
from handoff import connection, paging
from handoff.generation import Prefilled
from handoff.jobs import Job, Sent

NEXT_TOKENS = "generation.next_tokens"
"""Our name in the metadata for the tokens that the prefill ends with."""


@dataclass
class Rank:
    """One of the processes that send: which, and how far the decode process is."""

    number: int
    transport: connection.Transport
    address: Any

    def send(self, job: Job, prefilled: Prefilled) -> Sent:
        """Do this rank's part of a job."""
        if job.known_prefix:
            prefix = paging.paged(prefilled.prefix_cache, None, job.form, {"model": job.model})
            self._stream([t for layer in prefix for t in layer], None)
        sent, begun = Sent(), time.perf_counter()
        columns = int(prefilled.prefix_cache.get_seq_length())
        metadata = {"model": job.model, NEXT_TOKENS: prefilled.next_tokens.tolist()}
        tensors = []
        for layer in paging.paged(prefilled.cache, prefilled.mask, job.form, metadata):
            for t in layer:
                shared = paging.share_prefix(t, columns)
                part = paging.share_of(shared, job, self.number, columns)
                tensors.append(paging.quantized(part, job))
                _count(sent, shared, part)
        sent.seconds["paging"] = time.perf_counter() - begun
        sent.header_bytes = len(hw.encode_header(tensors[0], pages="live"))
        try:
            self._stream(tensors, job.compression, sent)
        except OSError as error:
            sent.broken = f"{type(error).__name__}: {error}"
        return sent

    def _stream(
        self, tensors: Iterable[hw.BlockPagedTensor], compression: str | None, sent: Sent | None = None
    ) -> None:
        sent = sent or Sent()
        with self.transport.connect(self.address, compression) as sender:
            meter, begun = sender.meter, time.perf_counter()
            for t in tensors:
                sender.write(t)
            writing = time.perf_counter() - begun
            # Without compression a frame is sent before `write` returns; with it, while the next one is made.
            sent.seconds["encoding"] = writing if compression else writing - meter.seconds
        sent.seconds["sending"], sent.bytes = meter.seconds, meter.bytes


def _count(sent: Sent, whole: hw.BlockPagedTensor, part: hw.BlockPagedTensor) -> None:
    heads = part.num_heads
    sent.token_bytes += whole.total_tokens * heads * whole.head_dim * whole.page_pool.itemsize
    sent.pages_named += whole.block_table.size
    sent.pages_sent += int((part.page_references() > 0).sum())
