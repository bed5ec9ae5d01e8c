"""Tensors of one batch side by side: heads beside heads, keys beside values. One copy, pages kept where they agree.

The sides may come from pools with other page ids, as ranks of a group have them: then a page of the result is made for
every combination of pages that stands at one place of the tables, so pages that are shared on every side stay shared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hurray_wire.errors import Difference, MismatchError
from hurray_wire.indices import IntArray
from hurray_wire.ops import derived as d
from hurray_wire.ops.blocks import Blocks
from hurray_wire.ops.derived import Array, fresh, per_slot, whole_pages
from hurray_wire.ops.spans import distinct_rows, narrow, owned_slots, slots_of, steps
from hurray_wire.tensor import BlockPagedTensor

_AXES = {2: 1, 3: 2}
"""Axes of the pool, and what they are in the tensor's shape."""
_PIECE_BYTES = 1 << 20
"""Of the target, filled by one side after the other: it has to be in the cache still when the last one comes."""
_LARGE_BYTES = 1 << 14
"""A page's part from this size on is copied by a call of its own: those that differ are twice as slow by indices."""


def element_pool(t: BlockPagedTensor) -> Array:
    """The pool as 4-D: its elements, or of a 1-D pool the bytes that each head and token has.

    Raises:
        UnsupportedError: `packed_pool`, where a head ends inside a byte.
    """
    if t.page_pool.ndim == 4:
        return t.page_pool
    bits = t.head_dim * t.descriptor.bit_width
    if bits % 8:
        raise d.packed_pool(f"heads of {t.head_dim} {t.dtype.name} end inside bytes")
    return t.page_pool.reshape(t.num_pages, t.page_size, t.num_heads, bits // 8)


def joined(tensors: Sequence[BlockPagedTensor], axis: int) -> dict[str, Any]:
    """The fields of one tensor with the others beside it on an axis of the pool: 2 heads, 3 head_dim.

    Raises:
        MismatchError: other page counts, token counts, or scales that one tensor cannot have.
        UnsupportedError: `packed_pool`, `scheme`.
    """
    whole_pages(*tensors)
    first = tensors[0]
    d.no_float_blocks(first, "joining")
    d.agree(tensors, ("num_seqs", "total_tokens"), arrays=("seq_ptr", "seq_lens"))
    pages, table = _common_pages(tensors)
    pools = [element_pool(t) for t in tensors]
    shape = list(first.shape)
    shape[_AXES[axis]] = sum(t.shape[_AXES[axis]] for t in tensors)
    count = first.num_pages if pages is None else len(pages)
    raw, pool = fresh((count, first.page_size, *shape[1:]), first.dtype, first.descriptor.bit_width)
    target = pool if pool.ndim == 4 else raw.reshape(count, first.page_size, shape[1], -1) if raw.size else None
    if target is not None:
        _put(pools, axis, pages, target)
    sizes = {"page_size": first.page_size, "num_heads": shape[1], "head_dim": shape[2]}
    tables: dict[str, Any] = {} if pages is None else {"block_table": table, "seq_ptr": first.seq_ptr}
    return {"page_pool": pool, **sizes, **tables, **_scales(tensors, axis, pages, table)}


def _common_pages(tensors: Sequence[BlockPagedTensor]) -> tuple[IntArray | None, IntArray]:
    """None where all tables are the same; else the page of each tensor for every new page, and the table over them."""
    first = tensors[0]
    same = (np.array_equal(t.block_table, first.block_table) and t.num_pages == first.num_pages for t in tensors)
    if all(same):
        return None, first.block_table
    kind = narrow(max(t.num_pages for t in tensors))
    rows = np.empty((first.block_table.size, len(tensors)), kind)
    for i, t in enumerate(tensors):
        rows[:, i] = t.block_table
    firsts, table = distinct_rows(rows, first.num_pages)
    return (rows if firsts is None else rows[firsts]), table


def _put(pools: Sequence[Array], axis: int, pages: IntArray | None, target: Array) -> None:
    """Copy the sides, a piece of the target at a time: what one side leaves free, the next finds in the cache."""
    page_bytes = math.prod(target.shape[1:]) * target.itemsize
    for step in steps(len(target), max(1, _PIECE_BYTES // max(1, page_bytes))):
        at = 0
        for i, pool in enumerate(pools):
            width = pool.shape[axis]
            place = target[(step, *[slice(None)] * (axis - 1), slice(at, at + width))]
            at += width
            if pages is None:
                place[...] = pool[step]
            else:
                _put_pages(pool, pages[step, i], place)


def _put_pages(pool: Array, ids: IntArray, target: Array) -> None:
    size = math.prod(pool.shape[1:]) * pool.itemsize
    if not size or not ids.size:
        return
    if size >= _LARGE_BYTES:
        for place, page in zip(target, ids.tolist(), strict=True):
            place[...] = pool[page]
        return
    source = Blocks(pool, 1, size)
    own = np.empty(min(source.step, ids.size) * size, np.uint8)
    for step in steps(ids.size, source.step):
        pages = own[: (step.stop - step.start) * size]
        source.copy(ids[step], pages)
        target[step] = pages.view(pool.dtype.newbyteorder("<")).reshape(-1, *pool.shape[1:])


def _scales(
    tensors: Sequence[BlockPagedTensor], axis: int, pages: IntArray | None, table: IntArray
) -> dict[str, Array]:
    """The scales and zero points that the joined tensor has: beside one another, or the same on every side."""
    first = tensors[0]
    along = [d.per_channel(t, _AXES[axis]) for t in tensors]
    if along[0]:
        return {name: np.concatenate([arrays[name] for arrays in along]) for name in along[0]}
    if not per_slot(first):
        d.agree(tensors, (), arrays=("scales", "zero_points"))
        return {}
    sides = [
        per_slot(t) if pages is None else {name: a[pages[:, i]] for name, a in per_slot(t).items()}
        for i, t in enumerate(tensors)
    ]
    used = _used(first, table, len(sides[0]["scales"]))
    for i, side in enumerate(sides):
        wrong = [name for name, a in side.items() if not d.same_bits(a[used], sides[0][name][used])]
        if wrong:
            told = "a scale a slot, which is one for all of its heads"
            raise MismatchError([Difference(f"tensors[{i}].{name}", "others", told) for name in wrong])
    return {} if pages is None else sides[0]


def _used(t: BlockPagedTensor, table: IntArray, num_pages: int) -> Array:
    """Which slots hold tokens, `[pages, page_size]`; all of them where seq_lens are not known."""
    if t.seq_lens is None:
        return np.ones((num_pages, t.page_size), np.bool_)
    return slots_of(owned_slots(table, t.seq_ptr, t.seq_lens, t.page_size, num_pages), t.page_size)
