"""The pool a few pages at a time, for arithmetic that stays in the cache: which slots count, and what they store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hurray_wire import indices
from hurray_wire.indices import IntArray
from hurray_wire.ops.spans import Mask, owned_slots, slots_of
from hurray_wire.tensor import BlockPagedTensor, token_elements

Array = npt.NDArray[Any]

_CHUNK_ELEMENTS = 1 << 17
"""Elements worked on at a time: as float32 half a megabyte, which stays in the second-level cache."""


def owned_or_named(t: BlockPagedTensor) -> IntArray:
    """The leading slots of each page that hold tokens; all of a named page where seq_lens are not known."""
    if t.seq_lens is not None:
        return owned_slots(t.block_table, t.seq_ptr, t.seq_lens, t.page_size, t.num_pages)
    indices.check_listable(t.num_pages, "pages")
    owned = np.zeros(t.num_pages, np.min_scalar_type(t.page_size))
    owned[t.block_table] = t.page_size
    return owned


def chunks(t: BlockPagedTensor, owned: IntArray) -> Iterator[tuple[slice, Mask | None]]:
    """Some pages at a time, with which of their slots hold tokens; None where none does."""
    elements = t.page_size * t.num_heads * t.head_dim
    step = max(1, _CHUNK_ELEMENTS // elements) if elements else 1
    for start in range(0, t.num_pages if elements else 0, step):
        pages = slice(start, min(start + step, t.num_pages))
        some = owned[pages]
        yield pages, slots_of(some, t.page_size).reshape(-1) if some.any() else None


def stored(t: BlockPagedTensor, pages: slice) -> Array:
    """The elements of some pages, `[slots, num_heads, head_dim]`: the pool's own memory where it can be."""
    if t.page_pool.ndim == 4:
        return t.page_pool[pages].reshape(-1, t.num_heads, t.head_dim)
    run = t.page_pool[pages.start * t.page_bytes : pages.stop * t.page_bytes]
    return token_elements(t.descriptor, run, (pages.stop - pages.start) * t.page_size)


def clear(slots: Array, valid: Mask) -> None:
    """Zero the slots that hold no token."""
    if not valid.all():
        slots[~valid] = 0
