"""Every operation keeps what every sequence holds, over random batches, and gives tensors that go over the wire.

HURRAY_WIRE_BATCHES is the number of batches each law is tried on (200 where it is not set); batch n is the same in
every run: a failure's note says which.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from batches import PAGE_SIZES, Rng, elements, owned, random_batch, random_tables, slot_of, tokens

import hurray_wire as hw
from hurray_wire import ops
from hurray_wire.errors import Code

BATCHES = int(os.environ.get("HURRAY_WIRE_BATCHES", "200"))
Tensor = hw.BlockPagedTensor
Law = Callable[[Rng], None]


def crosses(t: Tensor) -> None:
    """Both forms bring it back; the bare one but for seq_lens and metadata, which it cannot carry."""
    assert hw.decode(hw.encode(t)) == t
    plain = t.replace(metadata=None)
    assert hw.decode(hw.encode(plain, framing="bare")).replace(seq_lens=t.seq_lens) == plain
    assert t.layout.block_table_index_type in ("uint32", "uint64")


def same(t: Tensor, expected: list[list[bytes]]) -> None:
    """It holds these tokens, its own `gather` says so too, and it crosses the wire."""
    assert tokens(t) == expected
    crosses(t)


def values(t: Tensor) -> list[bytes]:
    return [t.dequantize(seq).tobytes() for seq in range(t.num_seqs)] if t.quantization is not None else []


def follows(t: Tensor, before: Tensor) -> None:
    """What an operation on pages alone must leave as it was."""
    assert (t.kv_role, t.layer_index, t.dtype) == (before.kv_role, before.layer_index, before.dtype)
    assert (t.num_heads, t.head_dim) == (before.num_heads, before.head_dim)
    if before.layout.block_table_index_type == "uint64":
        assert t.layout.block_table_index_type == "uint64"


def compacted(rng: Rng) -> None:
    t = random_batch(rng)
    small, pages = ops.compact(t, return_pages=True)
    assert small == hw.decode(hw.encode(t, pages="live")) == ops.compact(t)
    assert hw.encode(small) == hw.encode(t, pages="live")
    same(small, tokens(t))
    follows(small, t)
    assert values(small) == values(t)
    assert (pages[small.block_table] == t.block_table).all()
    assert small.num_pages == len(set(t.block_table.tolist()))
    assert list(dict.fromkeys(small.block_table.tolist())) == list(range(small.num_pages))
    assert small.metadata == t.metadata


def selects(rng: Rng) -> None:
    t = random_batch(rng)
    seqs = rng.integers(0, max(1, t.num_seqs), int(rng.integers(0, 2 * t.num_seqs + 1))).tolist()
    chosen = ops.select(t, seqs)
    held = tokens(t)
    same(chosen, [held[seq] for seq in seqs])
    follows(chosen, t)
    assert np.shares_memory(chosen.page_pool, t.page_pool) or not t.page_pool.size
    assert [chosen.pages(i).tolist() for i in range(len(seqs))] == [t.pages(seq).tolist() for seq in seqs]
    for name in ("seq_ids", "first_tokens"):
        if name in (t.metadata or {}):
            assert (chosen.metadata or {})[name] == [(t.metadata or {})[name][seq] for seq in seqs]


def concatenates(rng: Rng) -> None:
    t = random_batch(rng)
    cuts = [rng.permutation(t.num_seqs)[: int(rng.integers(0, t.num_seqs + 1))] for _ in range(3)]
    parts = [ops.select(t, seqs) for seqs in cuts]
    held = [run for part in parts for run in tokens(part)]
    over_one_pool = ops.concat(parts)
    same(over_one_pool, held)
    assert np.shares_memory(over_one_pool.page_pool, t.page_pool) or not t.page_pool.size
    apart = [ops.compact(part) if rng.random() < 0.7 else part for part in parts]
    joined = ops.concat(apart)
    same(joined, held)
    follows(joined, t)
    assert values(joined) == [v for part in parts for v in values(part)]
    assert [joined.seq_lens.tolist()] == [[n for part in parts for n in part.seq_lens.tolist()]]  # type: ignore[union-attr]
    distinct = sum(len(set(part.block_table.tolist())) for part in apart)
    assert len(set(joined.block_table.tolist())) <= distinct


def repages(rng: Rng) -> None:
    t = random_batch(rng)
    size = int(rng.choice((*PAGE_SIZES, 5, 6, 12, 24, 32)))
    if values_are_per_slot(t) and (size & (size - 1) or size == 1):
        with pytest.raises(hw.InvalidDescriptorError) as caught:
            ops.repage(t, size)
        assert caught.value.code is Code.QUANTIZATION_BLOCK
        return
    other = ops.repage(t, size)
    assert other.page_size == size
    same(other, tokens(t))
    follows(other, t)
    assert values(other) == values(t)
    assert other.metadata == t.metadata
    if size == t.page_size:
        assert other is t
        return
    assert np.diff(other.seq_ptr.astype(np.int64)).tolist() == [-(-n // size) for n in t.seq_lens.tolist()]  # type: ignore[union-attr]
    if t.page_size % size == 0:
        assert len(set(other.block_table.tolist())) == len({slot // size for slot in t.token_slots().tolist()})
        return
    assert other.num_pages == len(identical_groups(t, size))
    assert not any(elements(other)[padding(t, other)].tobytes())


def values_are_per_slot(t: Tensor) -> bool:
    return t.scales is not None and t.scales.ndim == 2


def identical_groups(t: Tensor, size: int) -> set[tuple[Any, ...]]:
    """The new pages that differ, as the slots of the old pages, in parts that both have, that they are made of."""
    part = int(np.gcd(size, t.page_size))
    groups = set()
    for seq, length in enumerate(t.seq_lens.tolist()):  # type: ignore[union-attr]
        parts = []
        for token in range(0, length, part):
            page, slot = slot_of(t, seq, token)
            parts.append((page, slot // part))
        groups |= {tuple(parts[i : i + size // part]) for i in range(0, len(parts), size // part)}
    return groups


def padding(t: Tensor, other: Tensor) -> Any:
    """The slots of merged pages that lie behind all parts of old pages that hold tokens."""
    part = int(np.gcd(other.page_size, t.page_size))
    mask = np.ones((other.num_pages, other.page_size), np.bool_)
    for seq, length in enumerate(t.seq_lens.tolist()):  # type: ignore[union-attr]
        for token in range(-(-length // part) * part):
            mask[slot_of(other, seq, token)] = False
    return mask


def suffixes(rng: Rng) -> None:
    t = random_batch(rng)
    one = int(rng.integers(0, 4))
    skips = rng.integers(0, 4, t.num_seqs).tolist() if rng.random() < 0.5 else [one] * t.num_seqs
    rest = ops.suffix(t, one if skips == [one] * t.num_seqs else skips)
    held = tokens(t)
    same(rest, [run[skip * t.page_size :] for run, skip in zip(held, skips, strict=True)])
    follows(rest, t)
    before = (t.metadata or {}).get("first_tokens", [0] * t.num_seqs)
    after = (rest.metadata or {})["first_tokens"]
    assert [a + len(run) for a, run in zip(after, tokens(rest), strict=True)] == [
        b + len(run) for b, run in zip(before, held, strict=True)
    ]
    assert np.shares_memory(rest.page_pool, t.page_pool) or not t.page_pool.size


def slices_and_merges(rng: Rng) -> None:
    t = random_batch(rng, num_heads=int(rng.choice((1, 2, 4, 6))))
    size = int(rng.choice([n for n in (1, 2, 3, 4, 6, 8, 12) if max(n, t.num_heads) % min(n, t.num_heads) == 0]))
    ranges = [ops.heads_of_rank(rank, size, t.num_heads) for rank in range(size)]
    ranks = [ops.slice_heads(t, r.start, r.stop) for r in ranges]
    width = t.head_dim
    for r, rank in zip(ranges, ranks, strict=True):
        assert (rank.metadata or {})["heads"] == [r.start, r.stop, t.num_heads]
        pool = elements(t)[:, :, r.start : r.stop]
        assert np.ascontiguousarray(pool).tobytes() == elements(rank).tobytes()
        crosses(rank)
        assert rank.head_dim == width
    whole = ops.merge_heads([ranks[i] for i in rng.permutation(size)])
    assert whole.replace(metadata=t.metadata, statistics=None) == t
    shuffled = [moved(rng, rank) for rank in ranks]
    again = ops.merge_heads(shuffled)
    same(again, tokens(t))
    assert values(again) == values(t)
    assert again.num_pages <= max(t.num_pages, len(t.block_table))


def moved(rng: Rng, t: Tensor) -> Tensor:
    """The same sequences with pages elsewhere, as another rank may have them."""
    if not t.num_pages or t.page_pool.ndim == 1:
        return t
    order = rng.permutation(t.num_pages)
    back = np.argsort(order)
    arrays = {} if not values_are_per_slot(t) else {"scales": t.scales[order]}  # type: ignore[index]
    if arrays and t.zero_points is not None:
        arrays["zero_points"] = t.zero_points[order]
    return t.replace(page_pool=t.page_pool[order], block_table=back[t.block_table.astype(np.int64)], **arrays)


def splits_and_fuses(rng: Rng) -> None:
    t = random_batch(rng, kv_role="fused", head_dim=16, metadata=False)
    at = 8 if t.page_pool.ndim == 1 else int(rng.integers(0, t.head_dim + 1))
    key, value = ops.split_fused(t, at)
    assert (key.kv_role, value.kv_role, key.head_dim, value.head_dim) == ("key", "value", at, t.head_dim - at)
    pool = elements(t)
    for side, part in ((key, pool[..., :at]), (value, pool[..., at:])):
        assert elements(side).tobytes() == np.ascontiguousarray(part).tobytes()
        crosses(side)
    fused = ops.fuse(key, value)
    assert fused.metadata == {"key_dim": at}
    assert fused.replace(metadata=None) == t
    assert [s == u for s, u in zip(ops.split_fused(fused), (key, value), strict=True)] == [True, True]
    same(ops.fuse(moved(rng, key), moved(rng, value)), tokens(t))


def scrubs(rng: Rng) -> None:
    t = random_batch(rng)
    clean = ops.scrub(t)
    assert clean == hw.decode(hw.encode(t, scrub=True))
    same(clean, tokens(t))
    follows(clean, t)
    mask = owned(t)
    assert not any(elements(clean)[~mask].tobytes())
    for array in (clean.scales, clean.zero_points):
        if array is not None and array.ndim == 2:
            assert not array[~mask].any()
    assert ops.scrub(clean) == clean


def scatters(rng: Rng) -> None:
    t = random_batch(rng, dtype=str(rng.choice(("float16", "bfloat16", "float8_e4m3", "int64"))), scheme="none")
    assert t.seq_lens is not None
    size = int(rng.choice(PAGE_SIZES))
    first = rng.integers(0, 2 * size, t.num_seqs) if rng.random() < 0.5 else np.zeros(t.num_seqs, np.int64)
    if rng.random() < 0.3:
        first = first // size * size
    counts = -(-(first + t.seq_lens.astype(np.int64)) // size) + rng.integers(0, 2, t.num_seqs)
    ptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    pages = int(ptr[-1]) + 2
    table = rng.permutation(pages)[: ptr[-1]]
    if size == t.page_size and rng.random() < 0.5:  # pages that are shared here are shared there
        pages, ptr, first = t.num_pages, t.seq_ptr.astype(np.int64), np.zeros(t.num_seqs, np.int64)
        table = rng.permutation(pages)[t.block_table.astype(np.int64)]
    dtype = t.dtype.numpy
    assert dtype is not None
    pool = receiver(rng, (pages, size, t.num_heads, t.head_dim), dtype)
    expected = np.ascontiguousarray(pool)
    given = elements(t).view(dtype)
    for seq, length in enumerate(t.seq_lens.tolist()):
        for token in range(length):
            at = int(first[seq]) + token
            expected[int(table[ptr[seq] + at // size]), at % size] = given[slot_of(t, seq, token)]
    ops.scatter(t, pool, table, ptr, first_tokens=first)
    assert np.ascontiguousarray(pool).tobytes() == expected.tobytes()


def receiver(rng: Rng, shape: tuple[int, int, int, int], dtype: Any) -> Any:
    """Somebody's pool, its memory as engines lay it."""
    pages, size, heads, dim = shape
    way = int(rng.integers(0, 4))
    if way == 0:
        whole = np.zeros((pages, 2, size, heads, dim), dtype)
        pool = whole[:, int(rng.integers(0, 2))]
    elif way == 1:
        pool = np.zeros((pages, heads, size, dim), dtype).swapaxes(1, 2)
    elif way == 2:
        pool = np.zeros((pages, size, heads, dim + 1), dtype)[..., 1:]
    else:
        pool = np.zeros(shape, dtype)
    pool[...] = rng.integers(0, 99, shape).astype(dtype)
    return pool


def paginates(rng: Rng) -> None:
    t = random_batch(rng, metadata=False)
    assert t.seq_lens is not None
    runs = [t.gather(seq) for seq in range(t.num_seqs)]
    size = int(rng.choice([n for n in PAGE_SIZES if not values_are_per_slot(t) or n in (2, 4, 8, 16)]))
    if not runs:
        return
    ragged = np.concatenate(runs)
    slots = t.token_slots()
    options: dict[str, Any] = {"kv_role": t.kv_role, "layer_index": t.layer_index, "dtype": t.dtype}
    options |= {"quantization": t.quantization, "scales": t.scales, "zero_points": t.zero_points}
    if values_are_per_slot(t):
        options |= {"quantization": "per_block", "scales": t.scales.reshape(-1)[slots]}  # type: ignore[union-attr]
        options["zero_points"] = None if t.zero_points is None else t.zero_points.reshape(-1)[slots]
    paged = ops.paginate(ragged, t.seq_lens, size, **options)
    same(paged, tokens(t))
    assert values(paged) == values(t)
    assert paged.block_table.tolist() == list(range(paged.num_pages))
    assert not any(elements(paged)[~owned(paged)].tobytes())


def dequantizes(rng: Rng) -> None:
    t = random_batch(rng, dtype=None, scheme=str(rng.choice(("per_tensor", "per_head", "per_dim", "per_block"))))
    plain = ops.dequantize(t)
    assert plain.dtype is hw.float32
    assert plain.quantization is None
    assert [plain.gather(seq).tobytes() for seq in range(t.num_seqs)] == values(t)
    assert not plain.page_pool[~owned(t)].any()
    assert (plain.block_table.tolist(), plain.metadata) == (t.block_table.tolist(), t.metadata)
    crosses(plain)


def quantizes(rng: Rng) -> None:
    source = str(rng.choice(("float16", "bfloat16", "float32")))
    t = random_batch(rng, dtype=source, scheme="none", page_size=int(rng.choice((2, 4, 8))))
    pool = (rng.standard_normal(t.page_pool.shape) * 10.0 ** rng.integers(-3, 3)).astype(t.page_pool.dtype)
    pool[rng.random(pool.shape[:2]) < 0.2] = 0
    garbage = pool.copy()
    garbage[~owned(t)] = np.nan
    t = t.replace(page_pool=garbage)
    dtype = str(rng.choice(("int8", "uint8", "int4", "uint4", "float8_e4m3", "float8_e5m2", "int16")))
    if dtype.endswith("int4") and t.page_size * t.num_heads * t.head_dim % 2:
        return
    scheme: Any = str(rng.choice(("per_tensor", "per_channel", "per_block")))
    if scheme == "per_channel" and rng.random() < 0.5:
        scheme = hw.PerChannelAffine(1, 3, 4 if rng.random() < 0.5 or dtype.startswith("u") else None)
    if scheme == "per_block" and dtype == "int16":
        return
    stored = ops.quantize(t, scheme, dtype=dtype)
    assert stored.dtype.name == dtype
    crosses(stored)
    mask = owned(t)
    error = np.abs(ops.dequantize(stored).page_pool - np.where(mask[..., None, None], pool, 0).astype(np.float32))
    assert (error <= tolerance(stored, pool.astype(np.float32)))[mask].all()
    assert not any(elements(stored)[~mask].tobytes())
    assert (stored.block_table.tolist(), stored.metadata) == (t.block_table.tolist(), t.metadata)


def tolerance(stored: Tensor, pool: Any) -> Any:
    """Half a step, with room for the rounding of the scale itself."""
    scheme = stored.quantization
    if isinstance(scheme, hw.PerTensorAffine):
        scale: Any = np.float32(scheme.scale)
    elif isinstance(scheme, hw.PerBlockAffine):
        scale = stored.scales[:, :, None, None]  # type: ignore[index]
    else:
        assert isinstance(scheme, hw.PerChannelAffine)
        assert stored.scales is not None
        scale = stored.scales[:, None] if scheme.axis == 1 else stored.scales
    if "float8" not in stored.dtype.name:
        return scale * (0.51 if stored.dtype.name == "int16" else 0.5001)
    mantissa, least = (3, 2.0**-9) if stored.dtype.name == "float8_e4m3" else (2, 2.0**-16)
    return np.maximum(np.abs(pool) * 2.0 ** -(mantissa + 1), scale * least / 2) * 1.0001


LAWS: tuple[Law, ...] = (
    compacted,
    selects,
    concatenates,
    repages,
    suffixes,
    slices_and_merges,
    splits_and_fuses,
    scrubs,
    scatters,
    paginates,
    dequantizes,
    quantizes,
)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law(law: Law) -> None:
    for batch in range(BATCHES):
        try:
            law(np.random.default_rng([LAWS.index(law), batch]))
        except BaseException as error:
            error.add_note(f"batch {batch} of law {law.__name__}")
            raise


def test_batches_are_what_caches_are_made_of() -> None:
    rng = np.random.default_rng(1)
    drawn = [random_batch(rng) for _ in range(400)]
    lens = [t.seq_lens.astype(int) for t in drawn if t.seq_lens is not None]
    assert any(t.num_seqs == 0 for t in drawn)
    assert any((n == 0).any() and (n > 0).any() for n in lens)
    assert any((t.page_references() > 1).any() for t in drawn)
    assert any((t.page_references() == 0).any() for t in drawn)
    assert any(t.layout.block_table_index_type == "uint64" for t in drawn)
    assert {t.page_size for t in drawn} == set(PAGE_SIZES)
    assert any(not t.page_pool.flags.c_contiguous for t in drawn)
    assert any(t.page_pool.dtype.byteorder == ">" for t in drawn)
    assert {type(t.quantization).__name__ for t in drawn} == {
        "NoneType",
        "PerTensorAffine",
        "PerChannelAffine",
        "PerBlockAffine",
    }
    table, ptr, counts, pages = random_tables(rng, 4, 50)
    assert (table < pages).all()
    assert (np.diff(ptr) * 4 >= counts).all()
