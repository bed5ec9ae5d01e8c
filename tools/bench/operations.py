"""The operations against the memory copy that each cannot avoid, and over a hundred thousand sequences.

A copy is one NumPy call that moves the same bytes in the same order to fresh memory (or, for `scatter`, to the same
pool), so its cost per page and its page faults are in both. Where NumPy has no such call, because both sides are
somewhere else, it is two calls by way of the cache: through fresh memory of the payload's size it would be slower than
it must be. All of them are of one thread. What only changes tables is held against a read of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from measure import Results, Work

import hurray_wire as hw
from hurray_wire import ops

Indices = npt.NDArray[np.int64]
CACHED_BYTES = 1 << 18
"""What is copied at a time by way of the cache."""
Pair = tuple[Work, Work]

BOUND = 1.3
"""Of the unavoidable copy."""


@dataclass
class Batch:
    """Sequences of about the same number of pages, in shuffled pages of one pool."""

    pages: int
    page: tuple[int, int, int]
    num_seqs: int
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))

    def __post_init__(self) -> None:
        size = self.pages * int(np.prod(self.page))
        self.pool = self.rng.standard_normal(size, np.float32).astype(np.float16).reshape(self.pages, *self.page)
        counts = np.full(self.num_seqs, self.pages // self.num_seqs)
        counts[: self.pages - int(counts.sum())] += 1
        ptr = np.concatenate(([0], np.cumsum(counts)))
        lens = counts * self.page[0] - self.rng.integers(0, self.page[0], self.num_seqs)
        self.ids = self.rng.permutation(self.pages)
        self.ptr: Indices = ptr.astype(np.int64)
        self.lens: Indices = lens.astype(np.int64)
        self.tensor = hw.BlockPagedTensor(
            self.pool, block_table=self.ids.astype(np.uint32), seq_ptr=ptr, seq_lens=lens, layer_index=0
        )


def rows(pool: Any) -> Any:
    """A pool's pages as rows of bytes."""
    return pool.reshape(len(pool), -1).view(np.uint8)


def taken(source: Any, ids: Any) -> Work:
    """The copy of some rows, in their order, into fresh memory."""

    def copy() -> object:
        out = np.empty((ids.size, source.shape[1]), np.uint8)
        return np.take(source, ids, axis=0, out=out, mode="clip")

    return copy


def steps(count: int, size: int) -> Iterator[slice]:
    """Rows of `size` bytes, as many at a time as pass through the cache."""
    step = max(1, CACHED_BYTES // size)
    return (slice(at, at + step) for at in range(0, count, step))


def on_pages(batch: Batch) -> dict[str, Pair]:
    """Operations that move whole pages."""
    t, pool, ids, page_size = batch.tensor, batch.pool, batch.ids, batch.page[0]
    half = ops.select(t, np.arange(0, batch.num_seqs, 2))
    shared = ops.concat([t, ops.select(t, np.arange(0, batch.num_seqs, 3))])
    cut = batch.num_seqs // 2
    parts = [ops.compact(ops.select(t, np.arange(a, b))) for a, b in ((0, cut), (cut, batch.num_seqs))]
    split = rows(pool.reshape(len(pool) * 2, page_size // 2, *batch.page[1:]))
    halves = (ids[:, None] * 2 + np.arange(2)).reshape(-1)
    larger = ops.repage(t, page_size * 3 // 2)
    halves = np.resize(halves, larger.num_pages * 3)  # the result's last pages have empty parts
    per_token = rows(pool).reshape(-1, rows(pool).shape[1] // page_size)
    tokens = per_token[t.token_slots()].view(pool.dtype).reshape(-1, *batch.page[1:])
    return {
        "compact": (lambda: ops.compact(t), taken(rows(pool), ids)),
        "compact, half of the pool live": (
            lambda: ops.compact(half),
            taken(rows(pool), half.block_table.astype(np.intp)),
        ),
        "compact, a third shared": (lambda: ops.compact(shared), taken(rows(pool), ids)),
        "concat of two pools": (lambda: ops.concat(parts), lambda: np.concatenate([p.page_pool for p in parts])),
        "repage to twice the size": (lambda: ops.repage(t, page_size * 2), taken(rows(pool), ids)),
        "repage to one and a half": (lambda: ops.repage(t, page_size * 3 // 2), taken(split, halves)),
        "scrub": (lambda: ops.scrub(t), lambda: pool.copy()),
        "paginate": (lambda: ops.paginate(tokens, t.seq_lens, page_size), lambda: tokens.copy()),
    }


def scattering(batch: Batch) -> dict[str, Pair]:
    """`scatter` into a pool of the same pages, of pages twice as large, and between two tokens."""
    t, pool, page_size = batch.tensor, batch.pool, batch.page[0]
    ordered = ops.compact(t)
    target, theirs = np.zeros_like(pool), batch.rng.permutation(batch.pages)
    nbytes = rows(pool).shape[1]
    target_rows = rows(target).view(f"V{nbytes}")[:, 0]

    wide = np.zeros((batch.pages // 2 + batch.num_seqs, page_size * 2, *batch.page[1:]), pool.dtype)
    lens = batch.lens
    wide_ptr = np.concatenate(([0], np.cumsum(-(-lens // (page_size * 2)))))
    wide_ids = batch.rng.permutation(len(wide))[: wide_ptr[-1]]
    wide_rows = rows(wide).reshape(-1, nbytes).view(f"V{nbytes}")[:, 0]
    counts: Indices = np.diff(batch.ptr)
    of_sequence = np.arange(batch.pages) - np.repeat(batch.ptr[:-1], counts)
    first = np.repeat(wide_ptr[:-1], counts)
    places = wide_ids[first + of_sequence // 2] * 2 + of_sequence % 2
    source_rows = rows(ordered.page_pool).view(f"V{nbytes}")[:, 0]

    def put() -> None:
        target_rows[theirs] = source_rows

    def put_wide() -> None:
        wide_rows[places] = source_rows

    return {
        "scatter to other ids": (
            lambda: ops.scatter(ordered, target, theirs, t.seq_ptr),
            put,
        ),
        "scatter to pages twice as large": (lambda: ops.scatter(ordered, wide, wide_ids, wide_ptr), put_wide),
        "scatter one token later, against a copy by way of the cache": _shifted(batch, ordered),
    }


def _shifted(batch: Batch, ordered: hw.BlockPagedTensor) -> Pair:
    """Every token to the slot behind its own: no two pages agree, a row is a token."""
    page_size = batch.page[0]
    lens = batch.lens
    ptr = np.concatenate(([0], np.cumsum(-(-(lens + 1) // page_size))))
    target = np.zeros((int(ptr[-1]), *batch.pool.shape[1:]), batch.pool.dtype)
    ids = batch.rng.permutation(len(target))
    nbytes = rows(target).shape[1] // page_size
    first = np.concatenate(([0], np.cumsum(lens)))[:-1]
    token = np.arange(int(lens.sum())) - np.repeat(first, lens) + 1
    places = ids[np.repeat(ptr[:-1], lens) + token // page_size] * page_size + token % page_size
    slots = ordered.token_slots()
    to = rows(target).reshape(-1, nbytes).view(f"V{nbytes}")[:, 0]
    source = rows(ordered.page_pool).reshape(-1, nbytes).view(f"V{nbytes}")[:, 0]

    def put() -> None:
        for step in steps(slots.size, nbytes):
            to[places[step]] = source[slots[step]]

    return lambda: ops.scatter(ordered, target, ids, ptr, first_tokens=1), put


def on_heads(batch: Batch) -> dict[str, Pair]:
    """Operations that put tensors side by side."""
    t, (_, heads, dim) = batch.tensor, batch.page
    slices = [ops.slice_heads(t, 0, heads // 2), ops.slice_heads(t, heads // 2, heads)]
    half = rows(batch.pool).shape[1] // batch.page[0] // 2
    ranks = [part.replace(page_pool=part.page_pool.copy()) for part in slices]
    order = batch.rng.permutation(batch.pages)
    table = np.argsort(order)[ranks[1].block_table.astype(np.intp)]
    elsewhere = ranks[1].replace(page_pool=ranks[1].page_pool[order], block_table=table)
    key, value = (
        part.replace(page_pool=part.page_pool.copy()) for part in ops.split_fused(t.replace(kv_role="fused"), dim // 2)
    )

    first, second = (rows(part.page_pool).reshape(-1, half).view(f"V{half}")[:, 0] for part in (ranks[0], elsewhere))
    of_page = np.arange(batch.page[0])
    mine, others = (
        (part.block_table.astype(np.intp)[:, None] * batch.page[0] + of_page).reshape(-1)
        for part in (ranks[0], elsewhere)
    )

    def joined_by_ids() -> object:
        out = np.empty((batch.pages * batch.page[0], 2), f"V{half}")
        for step in steps(len(out), half):
            out[step, 0] = first[mine[step]]
            out[step, 1] = second[others[step]]
        return out

    def joined() -> object:
        return np.concatenate([part.page_pool for part in ranks], axis=2)

    return {
        "merge_heads": (lambda: ops.merge_heads(ranks), joined),
        "merge_heads, ids that differ, against a copy by way of the cache": (
            lambda: ops.merge_heads([ranks[0], elsewhere]),
            joined_by_ids,
        ),
        "fuse": (lambda: ops.fuse(key, value), lambda: np.concatenate([key.page_pool, value.page_pool], axis=3)),
    }


def quantising(batch: Batch) -> dict[str, Pair]:
    """Quantising and back, against the plain NumPy expressions of the same arithmetic."""
    t, pool = batch.tensor, batch.pool
    quantized = {to: ops.quantize(t, "per_tensor", dtype=to) for to in ("int8", "float8_e4m3")}
    scale = np.float32(np.abs(pool.astype(np.float32)).max() / 127)
    float8 = hw.float8_e4m3.numpy

    def to_int8() -> object:
        wide = pool.astype(np.float32)
        return np.clip(np.rint(wide / np.float32(np.abs(wide).max() / 127)), -127, 127).astype(np.int8)

    def to_float8() -> object:
        wide = pool.astype(np.float32)
        return np.clip(wide / np.float32(np.abs(wide).max() / 448), -448, 448).astype(float8)

    return {
        "quantize to int8, against NumPy's expression": (lambda: ops.quantize(t, "per_tensor", dtype="int8"), to_int8),
        "quantize to fp8, against NumPy's expression": (
            lambda: ops.quantize(t, "per_tensor", dtype="float8_e4m3"),
            to_float8,
        ),
        "dequantize from int8, against NumPy's expression": (
            lambda: ops.dequantize(quantized["int8"]),
            lambda: quantized["int8"].page_pool.astype(np.float32) * scale,
        ),
        "dequantize from fp8, against NumPy's expression": (
            lambda: ops.dequantize(quantized["float8_e4m3"]),
            lambda: quantized["float8_e4m3"].page_pool.astype(np.float32) * scale,
        ),
    }


def on_tables(num_seqs: int) -> dict[str, Work]:
    """Every operation on a batch of very many sequences, each with an id and metadata of its own."""
    batch = Batch(4 * num_seqs, (16, 1, 8), num_seqs)
    named = {"seq_ids": [str(i) for i in range(num_seqs)], "first_tokens": [0] * num_seqs, "model": "m"}
    t = batch.tensor.replace(metadata=named)
    target, order = np.zeros_like(batch.pool), batch.rng.permutation(num_seqs)
    theirs = batch.rng.permutation(len(target))
    tokens = np.zeros((t.total_tokens, 1, 8), np.float16)
    layers = [t.replace(layer_index=i // 2, kv_role=("key", "value")[i % 2]) for i in range(64)]
    quantized = ops.quantize(t, "per_block", dtype="int8")
    return {
        "compact": lambda: ops.compact(t),
        "select": lambda: ops.select(t, order),
        "suffix": lambda: ops.suffix(t, 1),
        "concat": lambda: ops.concat([t, t]),
        "repage to half": lambda: ops.repage(t, 8),
        "repage to twice the size": lambda: ops.repage(t, 32),
        "repage to one and a half": lambda: ops.repage(t, 24),
        "scrub": lambda: ops.scrub(t),
        "slice_heads": lambda: ops.slice_heads(t, 0, 1),
        "merge_heads": lambda: ops.merge_heads([t, t]),
        "scatter": lambda: ops.scatter(t, target, theirs, t.seq_ptr),
        "paginate": lambda: ops.paginate(tokens, t.seq_lens, 16),
        "quantize per block": lambda: ops.quantize(t, "per_block", dtype="int8"),
        "dequantize per block": lambda: ops.dequantize(quantized),
        "compatible": lambda: ops.compatible(t, t),
        "check_layers of 64": lambda: ops.check_layers(layers),
    }


def operations(results: Results, quick: bool) -> None:
    """Each operation against its copy: 64 MiB of pages of 32 KiB, a million pages of 512 bytes, 100,000 sequences."""
    large = Batch(256 if quick else 2048, (16, 8, 128), 64)
    small = Batch(1 << (16 if quick else 20), (2, 2, 64), 6_000 if quick else 100_000)
    kinds: dict[str, tuple[Batch, tuple[Callable[[Batch], dict[str, Pair]], ...]]] = {
        f"operations, {large.pool.nbytes >> 20} MiB": (large, (on_pages, scattering, on_heads, quantising)),
        f"operations, {small.pages:,} pages": (small, (on_pages, scattering, on_heads)),
    }
    for group, (batch, makers) in kinds.items():
        for make in makers:  # one after the other: what several hold would leave no large pages for the results
            for name, (work, copy) in make(batch).items():
                took = results.race({"work": work, "copy": copy})
                results.add(group, name, took["work"], took["copy"], "copy", at_most=BOUND)
    num_seqs = 10_000 if quick else 100_000
    for name, work in on_tables(num_seqs).items():
        results.add(f"operations, {num_seqs:,} sequences", name, results.race({"work": work})["work"])
