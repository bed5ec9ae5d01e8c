"""Engines' caches to tensors and back, against the copy that each layout cannot do without.

64 MiB of live pages (16 tokens of 8 heads of 128, bfloat16), in shuffled places of a larger cache. Where a page's keys
lie in one piece the copy is one `take` of them; where heads come first it is NumPy's assignment of the reordered pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from measure import Results, Work

import hurray_wire as hw
from hurray_wire import engines

BOUND = 1.3
PAGE_SIZE, HEADS, DIM = 16, 8, 128
BF16 = hw.bfloat16.numpy


class Live:
    """Some pages of a cache, and the tables that name them."""

    def __init__(self, shape: tuple[int, ...], pages: int, num_seqs: int = 8) -> None:
        rng = np.random.default_rng(3)
        self.cache: Any = rng.integers(0, 1 << 14, shape, np.uint16).view(BF16)
        total = max(shape[:2]) if shape[0] == 2 else shape[0]
        self.table = rng.permutation(total)[:pages].reshape(num_seqs, -1).astype(np.int32)
        self.ids = self.table.reshape(-1).astype(np.intp)
        self.lens = np.full(num_seqs, self.table.shape[1] * PAGE_SIZE - 3, np.int32)


def in_one_piece(pages: int, total: int) -> tuple[Work, Work, Work, Work]:
    """vLLM's kv-first cache: both ways, each beside its copy."""
    live = Live((2, total, PAGE_SIZE, HEADS, DIM), pages)
    key, value = engines.from_vllm(live.cache, live.table, live.lens, axes=engines.VLLM_KV_FIRST)
    rows = live.cache.view(np.uint8).reshape(2, total, -1)
    width = rows.shape[2]
    back = np.zeros_like(live.cache)
    to = back.view(np.uint8).reshape(2, total, -1).view(f"V{width}")[:, :, 0]
    sources = [np.ascontiguousarray(t.page_pool).view(np.uint8).reshape(pages, -1) for t in (key, value)]

    def taken() -> object:
        return [np.take(half, live.ids, axis=0, out=np.empty((pages, width), np.uint8), mode="clip") for half in rows]

    def put() -> None:
        for half, source in zip(to, sources, strict=True):
            half[live.ids] = source.view(f"V{width}")[:, 0]

    return (
        lambda: engines.from_vllm(live.cache, live.table, live.lens, axes=engines.VLLM_KV_FIRST),
        taken,
        lambda: engines.to_vllm(key, value, axes=engines.VLLM_KV_FIRST, pool=back, block_table=live.table),
        put,
    )


def heads_first(pages: int, total: int) -> tuple[Work, Work, Work, Work]:
    """vLLM's packed cache, `[pages, heads, slots, keys and values]`: both ways, each beside its copy."""
    live = Live((total, HEADS, PAGE_SIZE, 2 * DIM), pages)
    axes = engines.VLLM_PACKED
    key, value = engines.from_vllm(live.cache, live.table, live.lens, axes=axes, key_dim=DIM)
    back = np.zeros_like(live.cache)
    pools = [np.ascontiguousarray(t.page_pool) for t in (key, value)]
    halves = (slice(0, DIM), slice(DIM, None))

    def reordered() -> object:
        outs = [np.empty((pages, PAGE_SIZE, HEADS, DIM), BF16) for _ in halves]
        for out, half in zip(outs, halves, strict=True):
            out[...] = live.cache[live.ids, :, :, half].transpose(0, 2, 1, 3)
        return outs

    def put() -> None:
        for pool, half in zip(pools, halves, strict=True):
            back[live.ids, :, :, half] = pool.transpose(0, 2, 1, 3)

    return (
        lambda: engines.from_vllm(live.cache, live.table, live.lens, axes=axes, key_dim=DIM),
        reordered,
        lambda: engines.to_vllm(key, value, axes=axes, pool=back, block_table=live.table),
        put,
    )


Maker = Callable[[int, int], tuple[Work, Work, Work, Work]]


def layouts(results: Results, quick: bool) -> None:
    """`from_vllm` and `to_vllm` in one piece and heads first, and a few live pages of a large cache."""
    pages = 256 if quick else 1024
    makers: dict[str, Maker] = {"in one piece": in_one_piece, "heads first": heads_first}
    for name, make in makers.items():
        out, out_copy, back, back_copy = make(pages, 2 * pages)
        took = results.race({"from": out, "copy from": out_copy, "to": back, "copy to": back_copy})
        group = f"engines, {pages * PAGE_SIZE * HEADS * DIM * 4 >> 20} MiB live"
        for way in ("from", "to"):
            row = f"{way}_vllm, {name}"
            results.add(group, row, took[way], took[f"copy {way}"], "NumPy's copy", at_most=BOUND)
    few = {total: heads_first(64, total)[0] for total in (64, 1024 if quick else 4096)}
    took = results.race({str(total): work for total, work in few.items()})
    (small, large) = map(str, few)
    results.add("engines, 64 live pages", f"of {large}", took[large], took[small], f"of {small}", at_most=BOUND)
