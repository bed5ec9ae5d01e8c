"""Other pages for the same tokens: repage."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from hurray_wire import indices, rules
from hurray_wire.errors import Code, InvalidDescriptorError
from hurray_wire.indices import Int64Array, IntArray, starts_of
from hurray_wire.ops import derived as d
from hurray_wire.ops.blocks import blocks_of, cut
from hurray_wire.ops.derived import derived, fresh, per_slot, whole_pages
from hurray_wire.ops.pages import taken
from hurray_wire.ops.spans import distinct_rows, first_use, marked, numbered
from hurray_wire.quantization import PerBlockAffine
from hurray_wire.tensor import BlockPagedTensor


def repage(t: BlockPagedTensor, page_size: int) -> BlockPagedTensor:
    """The same tokens in pages of another size.

    - The same size: `t` itself.
    - A whole part of it (32 to 16): every page is cut, a view of the same memory where the pool's strides allow, else
      over one copy of the pages in use. All aliasing is kept.
    - A multiple of it (16 to 32), or any other size (16 to 24, by way of their greatest common divisor): one copy of
      the tokens' pages. Aliasing is kept for new pages made of identical old ones only: two sequences that share
      pages 7, 3, 9 and part then share the page of 7 and 3, while 9 is there twice: a page is shared whole or not at
      all. Slots behind a sequence's last page are zero.

    Spare pages are dropped: a sequence keeps ceil(seq_len / page_size). Per-block scales and zero points follow.

    Args:
        page_size: tokens a page, at least 1; a power of two of at least 2 where there are per-block scales.

    Raises:
        InvalidDescriptorError: `page_size`; `quantization_block`, for a page size that per-block scales cannot have;
            the tensor has violations.
        UnsupportedError: `seq_lens_unknown`; `packed_pool`, where old, new or common pages end inside bytes; `scheme`.

    Example:
        >>> pool = np.arange(320, dtype=np.float16).reshape(5, 4, 2, 8)
        >>> t = BlockPagedTensor(pool, block_table=[0, 1, 0], seq_ptr=[0, 2, 3], seq_lens=[6, 3])
        >>> repage(t, 2).block_table.tolist(), repage(t, 8).seq_ptr.tolist()
        ([0, 1, 2, 0, 1], [0, 1, 2])
        >>> np.shares_memory(repage(t, 2).page_pool, pool)
        True
    """
    whole_pages(t)
    size = checked_page_size(page_size)
    if size == t.page_size:
        return t
    lens = t.known_lens()
    d.no_float_blocks(t, "other pages")
    scheme = t.quantization
    if isinstance(scheme, PerBlockAffine):
        scheme = dataclasses.replace(scheme, block_size=size)
    block = math.gcd(size, t.page_size)
    if block * t.num_heads * t.head_dim * t.descriptor.bit_width % 8:
        raise d.packed_pool(f"pages of {block} x {t.num_heads} x {t.head_dim} {t.dtype.name} end inside bytes")
    change = _split if block == size else _merged
    return change(t, lens, block, {"page_size": size, "quantization": scheme})


def checked_page_size(page_size: Any) -> int:
    """A caller's page size.

    Raises:
        TypeError: no integer.
        InvalidDescriptorError: `page_size`, for 0 and for what no uint32 holds.
    """
    size = rules.integer(page_size, 32, "page_size", Code.PAGE_SIZE)
    if size < 1:
        raise InvalidDescriptorError("is 0, must be at least 1", code=Code.PAGE_SIZE, where="page_size")
    return size


def _block_ids(t: BlockPagedTensor, lens: IntArray, block: int) -> tuple[IntArray, Int64Array]:
    """The blocks that hold each sequence's tokens, page * factor + part, and how many each sequence has."""
    counts = indices.live_counts(lens, block)
    return numbered(t.block_table, t.seq_ptr, counts, t.num_pages, t.page_size // block), counts


def _split(t: BlockPagedTensor, lens: IntArray, block: int, fields: dict[str, Any]) -> BlockPagedTensor:
    factor = t.page_size // block
    pool = t.page_pool[:] if t.page_pool.ndim == 1 else cut(t.page_pool, factor)
    if pool is None:
        return _split(taken(t, *first_use(t.block_table, t.num_pages)), lens, block, fields)
    ids, counts = _block_ids(t, lens, block)
    arrays = {name: a.reshape(-1, block) for name, a in per_slot(t).items()}
    return derived(t, page_pool=pool, block_table=ids, seq_ptr=starts_of(counts), seq_lens=lens, **arrays, **fields)


def _merged(t: BlockPagedTensor, lens: IntArray, block: int, fields: dict[str, Any]) -> BlockPagedTensor:
    size = fields["page_size"]
    pages = indices.live_counts(lens, size)
    rows, empty, table = _grouped(t, lens, block, pages, size // block)
    arrays = {name: a.reshape(-1, block)[rows] for name, a in per_slot(t).items()}
    for name, a in arrays.items():
        a[empty] = 0
        arrays[name] = a.reshape(-1, size)
    shape = (rows.size // (size // block), size, t.num_heads, t.head_dim)
    raw, pool = fresh(shape, t.dtype, t.descriptor.bit_width)
    made = derived(t, page_pool=pool, block_table=table, seq_ptr=starts_of(pages), seq_lens=lens, **arrays, **fields)
    if raw.size:  # tables first, while the cache still has them
        blocks_of(t, t.page_size // block).copy(rows, raw)
        held = raw.view(f"V{raw.size // rows.size}")
        held[empty] = np.zeros((), held.dtype)
    return made


def _grouped(
    t: BlockPagedTensor, lens: IntArray, block: int, pages: Int64Array, parts: int
) -> tuple[IntArray, Int64Array, IntArray]:
    """The blocks of the new pages in order, which of them are empty (there block 0 stands), and the table over them."""
    ids, counts = _block_ids(t, lens, block)
    total = int(pages.sum()) * parts
    rows, empty = ids, np.zeros(0, np.int64)
    if total != ids.size:
        rows = np.full(total, -1, ids.dtype)
        rows[marked(starts_of(pages)[:-1] * parts, counts, total)] = ids
    firsts, table = distinct_rows(rows.reshape(-1, parts), t.num_pages * (t.page_size // block))
    if firsts is not None:
        rows = rows.reshape(-1, parts)[firsts].reshape(-1)
    if total != ids.size:
        empty = np.flatnonzero(rows < 0)
        rows[empty] = 0
    return rows, empty, table
