"""A dense cache as pages, and what a prefill rank sends of them."""

from __future__ import annotations

from typing import Any

import numpy as np

import hurray_wire as hw
from handoff.jobs import SENDER_PAGE_SIZE, Job
from hurray_wire import engines, ops


def paged(cache: Any, mask: Any, form: str, metadata: dict[str, Any]) -> list[list[hw.BlockPagedTensor]]:
    """Every layer's tensors: a key and a value, or the latents of a token side by side as one."""
    pairs = engines.from_transformers(cache, mask, page_size=SENDER_PAGE_SIZE, metadata=metadata)
    if form == "cache":
        return [list(pair) for pair in pairs]
    return [[ops.fuse(*pair).replace(metadata={**metadata, "content": "latent"})] for pair in pairs]


def share_prefix(t: hw.BlockPagedTensor, prefix: int) -> hw.BlockPagedTensor:
    """The same tokens with the pages of the first `prefix` tokens once: those of the first sequence serve all.

    transformers has a copy of the prefix in every row of its cache, so paging it gave every sequence pages of its own.
    That the copies are the same is what the caller knows, having computed the prefix once.
    """
    starts = t.seq_ptr.astype(np.int64)
    place = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
    table = t.block_table.copy()
    shared = place < prefix // t.page_size
    table[shared] = t.block_table[place[shared]]
    return t.replace(block_table=table)


def share_of(t: hw.BlockPagedTensor, job: Job, rank: int, prefix: int) -> hw.BlockPagedTensor:
    """What one rank sends of a tensor: its heads, the pages that the receiver lacks."""
    if job.form == "cache":
        heads = ops.heads_of_rank(rank, job.size, t.num_heads)
        t = ops.slice_heads(t, heads.start, heads.stop)
    return ops.suffix(t, prefix // t.page_size) if job.known_prefix else t


def quantized(t: hw.BlockPagedTensor, job: Job) -> hw.BlockPagedTensor:
    """The pages that are sent, in the element type in which they are."""
    return t if job.quantization is None else ops.quantize(ops.compact(t), job.quantization, dtype="int8")
