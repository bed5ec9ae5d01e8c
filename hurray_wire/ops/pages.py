"""Which pages and sequences: compact, select, concat, suffix, scrub."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, overload

import numpy as np

from hurray_wire import indices
from hurray_wire.arrays import Bytes, address, frozen
from hurray_wire.errors import Difference, MismatchError
from hurray_wire.indices import Int64Array, IntArray, starts_of
from hurray_wire.ops import derived as d
from hurray_wire.ops.blocks import PIECE_BYTES, Blocks, blocks_of, copy_fresh, move
from hurray_wire.ops.derived import Array, derived, fresh, per_slot, selected, united, whole_pages
from hurray_wire.ops.spans import at_most, first_use, given, one_a_sequence, owned_slots, slots_of, spans, steps
from hurray_wire.payload import clear_slots, resized
from hurray_wire.tensor import BlockPagedTensor

_MOST = 0.8
"""The share of owned pages from which it is cheaper to copy all and clear the rest."""


@overload
def compact(t: BlockPagedTensor, *, return_pages: Literal[False] = False) -> BlockPagedTensor: ...
@overload
def compact(t: BlockPagedTensor, *, return_pages: Literal[True]) -> tuple[BlockPagedTensor, IntArray]: ...


def compact(t: BlockPagedTensor, *, return_pages: bool = False) -> BlockPagedTensor | tuple[BlockPagedTensor, IntArray]:
    """Only the pages that block_table names, in order of first use: what `encode(t, pages="live")` sends (section 4).

    Spare pages of a sequence are named, and stay. Aliasing is kept: a page that several sequences name is there once.
    One copy of those pages; `t` itself where every page of the pool is named in the order it has.

    Args:
        t: tables over a pool `[num_pages, page_size, num_heads, head_dim]`.
        return_pages: also return the ids that the pages had in `t`, in their new order, `[num_pages of the result]`.

    Raises:
        InvalidDescriptorError: the tensor has violations.
        UnsupportedError: `packed_pool`; `scheme` (NF4, MXFP: their scales cannot follow their pages).

    Example:
        >>> import numpy as np
        >>> pool = np.arange(5, dtype=np.int8).reshape(5, 1, 1, 1)
        >>> t = BlockPagedTensor(pool, block_table=[3, 0, 3], seq_ptr=[0, 2, 3], seq_lens=[2, 1])
        >>> small, pages = compact(t, return_pages=True)
        >>> small.block_table.tolist(), small.page_pool.reshape(-1).tolist(), pages.tolist()
        ([0, 1, 0], [3, 0], [3, 0])
    """
    d.sound(t)
    ids, table = first_use(t.block_table, t.num_pages)
    small = t
    if ids.size != t.num_pages or not (ids == np.arange(ids.size)).all():
        whole_pages(t)
        d.no_float_blocks(t, "selecting pages")
        small = taken(t, ids, table)
    return (small, ids.copy()) if return_pages else small


def taken(t: BlockPagedTensor, ids: IntArray, table: IntArray) -> BlockPagedTensor:
    """These pages of the pool, copied into memory of their own, under a table in terms of their new positions."""
    raw, pool = fresh((ids.size, t.page_size, t.num_heads, t.head_dim), t.dtype, t.descriptor.bit_width)
    t.pool.copy(ids, raw)
    arrays: dict[str, Any] = {name: a[ids] for name, a in per_slot(t).items()}
    descriptor = resized(t.parts, ids.size)
    parts = t.parts._replace(descriptor=descriptor, page_pool=pool, block_table=frozen(table), **arrays)
    return BlockPagedTensor.of_parts(parts)


def select(t: BlockPagedTensor, seqs: Any) -> BlockPagedTensor:
    """Those sequences, in that order; one may stand several times.

    The pool is the same memory, and keeps pages that no chosen sequence names: `compact` the result, or encode it with
    `pages="live"`. seq_ids and first_tokens of the metadata are selected too; statistics are dropped.

    Args:
        seqs: indices from 0 to num_seqs - 1: a list, tuple, range or integer array.

    Raises:
        IndexError: no such sequence.
        InvalidDescriptorError: `not_integer`, `negative_index`; the tensor has violations.
        UnsupportedError: `seq_lens_unknown`, `packed_pool`.

    Example:
        >>> import numpy as np
        >>> pool = np.zeros((5, 4, 2, 8), np.float16)
        >>> t = BlockPagedTensor(pool, block_table=[0, 1, 0], seq_ptr=[0, 2, 3], seq_lens=[6, 3])
        >>> select(t, [1]).block_table.tolist(), select(t, [1, 0]).seq_lens.tolist()
        ([0], [3, 6])
    """
    whole_pages(t)
    lens = t.known_lens()
    chosen = _sequences(seqs, t.num_seqs)
    starts = t.seq_ptr[:-1][chosen]
    counts = t.seq_ptr[1:][chosen] - starts
    return derived(
        t,
        block_table=t.block_table[spans(starts, counts)],
        seq_ptr=starts_of(counts),
        seq_lens=lens[chosen],
        metadata=selected(t, chosen),
        statistics=None,
    )


def _sequences(seqs: Any, num_seqs: int) -> Int64Array:
    array = given(seqs, "seqs")
    if indices.largest(array) >= num_seqs and array.size:
        raise IndexError(f"sequence {indices.largest(array)} of {num_seqs}")
    return array.astype(np.int64)


def concat(tensors: Iterable[BlockPagedTensor]) -> BlockPagedTensor:
    """Batches of one layer and role as one batch, sequences in the order of the tensors.

    Sharing within each tensor is kept. Tensors over one and the same pool memory (`select` and `suffix` give such)
    keep that pool, uncopied, and with it the sharing between them; else each distinct pool is copied whole, behind one
    another: `compact` first where much of it is not in use. Equal pages of distinct pools are not looked for.

    seq_ids and first_tokens are joined (a tensor without first_tokens begins at 0); other metadata must not
    contradict itself, and names of the user's that do are dropped, as are statistics. seq_lens are known where all are.

    Args:
        tensors: at least one; page_size, num_heads, head_dim, element type, scheme and constants all the same.

    Raises:
        MismatchError: they differ; `.differences` names all. Also where some tensors have seq_ids and others none.
        ValueError: no tensor.
        InvalidDescriptorError: a tensor has violations.
        UnsupportedError: `packed_pool`; `scheme` (NF4, MXFP, over several pools).

    Example:
        >>> import numpy as np
        >>> pool = np.arange(3, dtype=np.int8).reshape(3, 1, 1, 1)
        >>> t = BlockPagedTensor(pool, block_table=[2, 0], seq_ptr=[0, 1, 2], seq_lens=[1, 1])
        >>> both = concat([t, t.replace(page_pool=pool.copy())])
        >>> both.block_table.tolist(), concat([t, t]).page_pool is pool
        ([2, 0, 5, 3], True)
    """
    parts = list(tensors)
    whole_pages(*parts)
    d.agree(parts, (*d.IDENTITY, "composite"), arrays=() if not parts or per_slot(parts[0]) else _CONSTANTS)
    if len(parts) == 1:
        return parts[0]
    pools, which = _distinct_pools(parts)
    raw, joined = (None, {}) if len(pools) == 1 else _joined_pools(pools)
    known = all(t.seq_lens is not None for t in parts)
    made = derived(
        parts[0],
        **joined,
        block_table=_shifted([t.block_table for t in parts], [pool.num_pages for pool in pools], which),
        seq_ptr=_shifted([t.seq_ptr[bool(i) :] for i, t in enumerate(parts)], [t.block_table.size for t in parts]),
        seq_lens=np.concatenate([t.seq_lens for t in parts if t.seq_lens is not None]) if known else None,
        total_tokens=sum(t.total_tokens for t in parts),
        index_type="uint64" if any(t.layout.block_table_index_type == "uint64" for t in parts) else None,
        metadata=_joined_metadata(parts),
        statistics=None,
    )
    if raw is not None:  # tables first, while the cache still has them
        ends = starts_of(np.array([t.num_pages * t.page_bytes for t in pools])).tolist()
        for t, start, stop in zip(pools, ends[:-1], ends[1:], strict=True):
            copy_fresh(t.pool, raw[start:stop])
    return made


_CONSTANTS = ("scales", "zero_points")


def _distinct_pools(tensors: Sequence[BlockPagedTensor]) -> tuple[list[BlockPagedTensor], list[int]]:
    """A tensor for each pool memory that there is, and for each tensor which of those is its own."""
    found: dict[Any, int] = {}
    which = [found.setdefault(tuple(map(_memory, (t.page_pool, t.scales, t.zero_points))), len(found)) for t in tensors]
    return [tensors[which.index(i)] for i in range(len(found))], which


def _memory(array: Array | None) -> Any:
    if array is None:
        return None
    return address(array), array.shape, array.strides, array.dtype


def _joined_pools(pools: Sequence[BlockPagedTensor]) -> tuple[Bytes, dict[str, Array]]:
    """Memory for the pools behind one another, and the fields of their tensor."""
    first = pools[0]
    d.no_float_blocks(first, "joining pools")
    shape = (sum(t.num_pages for t in pools), first.page_size, first.num_heads, first.head_dim)
    raw, pool = fresh(shape, first.dtype, first.descriptor.bit_width)
    arrays = {name: np.concatenate([per_slot(t)[name] for t in pools]) for name in per_slot(first)}
    return raw, {"page_pool": pool, **arrays}


def _shifted(tables: Sequence[IntArray], sizes: Sequence[int], which: Sequence[int] | None = None) -> IntArray:
    """The tables behind one another, each moved by what lies before its pool (or table)."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    wide = sum(sizes) >= 1 << 32
    moved = []
    for i, table in enumerate(tables):
        start = starts[i if which is None else which[i]]
        kind = np.dtype(np.uint64) if wide else table.dtype
        moved.append(np.add(table, kind.type(start), dtype=kind) if start or wide else table)
    return np.concatenate(moved)


def _joined_metadata(tensors: Sequence[BlockPagedTensor]) -> dict[str, Any]:
    metadata = united(tensors, apart=d.PER_SEQUENCE)
    told = [t.parts.metadata or {} for t in tensors]
    if any("first_tokens" in m for m in told):
        firsts = (m.get("first_tokens", [0] * t.num_seqs) for m, t in zip(told, tensors, strict=True))
        metadata["first_tokens"] = [n for values in firsts for n in values]
    named = [t for m, t in zip(told, tensors, strict=True) if "seq_ids" in m]
    unnamed = [i for i, m in enumerate(told) if "seq_ids" not in m and tensors[i].num_seqs]
    if named and unnamed:
        raise MismatchError(
            [Difference(f"tensors[{i}].metadata.seq_ids", None, "one string a sequence") for i in unnamed]
        )
    if named:
        metadata["seq_ids"] = [name for t in named for name in (t.parts.metadata or {})["seq_ids"]]
    return metadata


def suffix(t: BlockPagedTensor, skip_pages: Any) -> BlockPagedTensor:
    """The sequences without their first pages: what a receiver that holds those pages still needs.

    A sequence loses no more than the pages that hold its tokens, and is empty then. Metadata first_tokens says where
    each sequence now begins, so that first token + seq_len stays what it was, counted on from where `t` begins.
    Spare pages stay. The pool is the same memory: `compact` the result, or encode it with `pages="live"`.

    Args:
        skip_pages: pages to leave out: an integer, or one a sequence.

    Raises:
        InvalidDescriptorError: `not_integer`, `negative_index`; the tensor has violations.
        UnsupportedError: `seq_lens_unknown`, `packed_pool`.
        ValueError: not one number a sequence.

    Example:
        >>> import numpy as np
        >>> pool = np.zeros((5, 4, 2, 8), np.float16)
        >>> t = BlockPagedTensor(pool, block_table=[0, 1, 0], seq_ptr=[0, 2, 3], seq_lens=[6, 3])
        >>> rest = suffix(t, [1, 0])
        >>> rest.seq_lens.tolist(), rest.block_table.tolist(), rest.metadata
        ([2, 3], [1, 0], {'first_tokens': [4, 0]})
    """
    whole_pages(t)
    lens = t.known_lens().astype(np.int64)
    skip = one_a_sequence(skip_pages, t.num_seqs, "skip_pages")
    live = indices.live_counts(lens, t.page_size)
    skipped = np.minimum(at_most(skip, indices.largest(live)), live)
    kept = np.maximum(lens - skipped * t.page_size, 0)
    starts = t.seq_ptr[:-1].astype(np.int64) + skipped
    counts = t.seq_ptr[1:].astype(np.int64) - starts
    metadata = dict(t.parts.metadata or {})
    before = metadata.get("first_tokens", [0] * t.num_seqs)
    metadata["first_tokens"] = [first + gone for first, gone in zip(before, (lens - kept).tolist(), strict=True)]
    return derived(
        t,
        block_table=t.block_table[spans(starts, counts)],
        seq_ptr=starts_of(counts),
        seq_lens=kept,
        metadata=metadata,
        statistics=None,
    )


def scrub(t: BlockPagedTensor) -> BlockPagedTensor:
    """The same tensor with every slot at zero that no sequence owns: what `encode(t, scrub=True)` sends.

    A slot of a page that several sequences name is owned where any of them uses it; pages that none names, and spare
    ones, are zero throughout. Per-block scales and zero points go with their slots. One copy of the pool, never in
    place; `t` itself where every slot is owned.

    Raises:
        InvalidDescriptorError: the tensor has violations.
        UnsupportedError: `seq_lens_unknown`, `packed_pool`.

    Example:
        >>> import numpy as np
        >>> t = BlockPagedTensor(np.ones((2, 3, 1, 1), np.int8), block_table=[0, 0], seq_ptr=[0, 1, 2], seq_lens=[1, 2])
        >>> scrub(t).page_pool.reshape(2, 3).tolist()
        [[1, 1, 0], [0, 0, 0]]
    """
    whole_pages(t)
    lens = t.known_lens()
    if not t.pool.nbytes and not per_slot(t):
        return t
    owned = owned_slots(t.block_table, t.seq_ptr, lens, t.page_size, t.num_pages)
    if (owned == t.page_size).all():
        return t
    few = bool(np.count_nonzero(owned) < _MOST * t.num_pages)
    shape = (t.num_pages, t.page_size, t.num_heads, t.head_dim)
    raw, pool = fresh(shape, t.dtype, t.descriptor.bit_width, zeroed=few)
    entries = per_slot(t)
    arrays = {name: np.where(slots_of(owned, t.page_size), a, a.dtype.type(0)) for name, a in entries.items()}
    made = derived(t, page_pool=pool, **arrays)
    if raw.size:  # tables first, while the cache still has them
        (_copy_named if few else _copy_all)(t, owned, raw)
    return made


def _copy_named(t: BlockPagedTensor, owned: IntArray, out: Bytes) -> None:
    """The pages that are owned, into zeros."""
    ids = np.flatnonzero(owned)
    if ids.size:
        move(blocks_of(t, 1), ids, Blocks(out, 1, t.page_bytes), ids)
        _clear_ends(t, owned, out)


def _copy_all(t: BlockPagedTensor, owned: IntArray, out: Bytes) -> None:
    """Every page, some of them cleared, a piece of the pool at a time."""
    if t.page_bytes % t.page_size:  # slots end inside bytes
        copy_fresh(t.pool, out)
        pages = out.view(f"V{t.page_bytes}")
        pages[owned == 0] = np.zeros((), pages.dtype)
        _clear_ends(t, owned, out)
        return
    some = np.flatnonzero(owned < t.page_size)
    unowned = spans(some * t.page_size + owned[some], t.page_size - owned[some])
    slots = out.view(f"V{t.page_bytes // t.page_size}")
    pieces = list(steps(t.num_pages, max(1, PIECE_BYTES // t.page_bytes)))
    cuts = np.searchsorted(unowned, [step.stop * t.page_size for step in pieces]).tolist()
    for step, first, last in zip(pieces, [0, *cuts], cuts, strict=False):
        t.pool.copy(step, out[step.start * t.page_bytes : step.stop * t.page_bytes])
        slots[unowned[first:last]] = np.zeros((), slots.dtype)


def _clear_ends(t: BlockPagedTensor, owned: IntArray, out: Bytes) -> None:
    """The slots behind the owned ones of pages that are owned in part."""
    part = np.flatnonzero((owned > 0) & (owned < t.page_size))
    if t.page_bytes % t.page_size == 0:
        slots = out.view(f"V{t.page_bytes // t.page_size}")
        slots[spans(part * t.page_size + owned[part], t.page_size - owned[part])] = np.zeros((), slots.dtype)
    elif part.size:
        pages = out.view(f"V{t.page_bytes}")
        some = pages[part].view(np.uint8)
        clear_slots(some, owned[part], t.page_size)
        pages[part] = some.view(pages.dtype)
