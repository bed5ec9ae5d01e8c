"""Index maths that operations share: ranges laid end to end, first uses, equal rows. No loop over entries.

Plain arrays in and out; no tensor enters. Positions are int64, table entries keep their type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hurray_wire import indices
from hurray_wire.arrays import as_array
from hurray_wire.indices import Int64Array, IntArray, starts_of

_DENSE = 8
"""A page of the pool costs this many times less to mark than an entry of the table costs to sort."""
_FEW = 4096
_FEW_PARTS = 8
_ROUNDS = 8
"""Hash rounds before rows are sorted: each settles all but a few rows, unless somebody made them to collide."""


def given(values: Any, where: str) -> IntArray:
    """A caller's non-negative integers: a list, a tuple, a range, or an array of any integer type, torch CPU too.

    Raises:
        InvalidDescriptorError: `not_integer`, `negative_index`.
    """
    if not isinstance(values, list | tuple | range):
        values = as_array(values)
    return indices.as_indices(values, where)


def one_a_sequence(values: Any, num_seqs: int, where: str) -> IntArray:
    """A caller's non-negative integers, one a sequence; a single one counts for all.

    Raises:
        ValueError: another number of them.
    """
    if np.ndim(values) == 0:
        return np.repeat(given([values], where), num_seqs)
    array = given(values, where)
    if array.size != num_seqs:
        raise ValueError(f"{where} has {array.size} entries, must be one integer or {num_seqs}, one a sequence")
    return array


def at_most(values: IntArray, most: int) -> Int64Array:
    """The values as int64, none of them above `most`."""
    end = min(most, int(np.iinfo(values.dtype).max))
    return np.minimum(values, values.dtype.type(end)).astype(np.int64)


def spans(starts: IntArray, counts: IntArray) -> Int64Array:
    """start, start + 1, ... of every range, one range behind the other.

    Raises:
        UnsupportedError: `shape`, for more than can be listed.
    """
    ends = starts_of(counts)
    indices.check_listable(int(ends[-1]), "tokens")
    shifts = starts.astype(np.int64) - ends[:-1]
    return np.arange(ends[-1]) + np.repeat(shifts, counts.astype(np.int64))


def numbered(
    block_table: IntArray, seq_ptr: IntArray, counts: Int64Array, factor: int = 1, first: Int64Array | None = None
) -> Int64Array:
    """The blocks `first` to first + count of every sequence, page * factor + part, where pages have `factor` blocks."""
    starts = seq_ptr[:-1].astype(np.int64) * factor
    everything = int(counts.sum()) == block_table.size * factor
    indices.check_listable(block_table.size * factor, "tokens")
    blocks = in_parts(block_table, factor)
    return blocks if everything else blocks[spans(starts if first is None else starts + first, counts)]


def in_parts(block_table: IntArray, factor: int) -> Int64Array:
    """Every part of every page of a table, page * factor + part."""
    pages = block_table.astype(np.int64)
    if factor == 1:
        return pages
    pages *= factor
    parts = np.empty((pages.size, factor), np.int64)
    if factor > _FEW_PARTS:
        np.add(pages[:, None], np.arange(factor), out=parts)
    else:  # NumPy's inner loop would be as short as the last axis
        for part in range(factor):
            np.add(pages, part, out=parts[:, part])
    return parts.reshape(-1)


def owned_slots(
    block_table: IntArray, seq_ptr: IntArray, seq_lens: IntArray, page_size: int, num_pages: int
) -> Int64Array:
    """How many leading slots of each page any sequence owns, `[num_pages]`: the most that one of them uses."""
    indices.check_listable(num_pages, "pages")
    lens = seq_lens.astype(np.int64)
    whole, rest = lens // page_size, lens % page_size
    owned = np.zeros(num_pages, np.int64)
    part = rest > 0
    np.maximum.at(owned, block_table[(seq_ptr[:-1].astype(np.int64) + whole)[part]], rest[part])
    owned[numbered(block_table, seq_ptr, whole)] = page_size  # whole pages, nearly all, need no comparing
    return owned


def nth_block(block_table: IntArray, starts: Int64Array, nth: Int64Array, factor: int) -> Int64Array:
    """One block of each sequence, numbered as `numbered` does, counted from the sequence's first."""
    return block_table[starts + nth // factor].astype(np.int64) * factor + nth % factor


def named_once(count: int, *arrays: IntArray) -> bool:
    """Whether no id below `count` stands twice in these arrays together."""
    size = sum(ids.size for ids in arrays)
    if size > count:
        return False
    if count > _DENSE * size + _FEW:
        return np.unique(np.concatenate(arrays)).size == size
    seen = np.zeros(count, np.bool_)
    for ids in arrays:
        seen[ids] = True
    return int(np.count_nonzero(seen)) == size


def first_use(block_table: IntArray, num_pages: int) -> tuple[IntArray, IntArray]:
    """The distinct page ids in order of first use, and the table in terms of their positions, of the table's type."""
    size = block_table.size
    if num_pages > _DENSE * size + _FEW:  # marking every page would cost more than sorting the few that are named
        return indices.first_use(block_table)
    if named_once(num_pages, block_table):
        return block_table, np.arange(size, dtype=block_table.dtype)
    kind = np.int32 if max(size, num_pages) < 1 << 31 else np.int64
    positions = np.arange(size, dtype=kind)
    first = np.full(num_pages, size, kind)
    np.minimum.at(first, block_table, positions)
    ids = block_table[first[block_table] == positions]
    rank = np.empty(num_pages, block_table.dtype)
    rank[ids] = np.arange(ids.size, dtype=block_table.dtype)
    return ids, rank[block_table]


def distinct_rows(rows: Int64Array, count: int) -> tuple[Int64Array, Int64Array]:
    """Where each distinct row stands first, ascending, and for every row the rank of its like among those.

    Args:
        rows: ids, `[rows, columns]`; those of the first column from 0 to count - 1.
    """
    if not rows.size or named_once(count, rows[:, 0]):
        return np.arange(len(rows)), np.arange(len(rows))
    first = _first_equal(rows)
    own = first == np.arange(first.size)
    rank = np.cumsum(own) - 1
    return np.flatnonzero(own), rank[first]


def _first_equal(rows: Int64Array) -> Int64Array:
    """The first row that equals each row, by hashing: linear where sorting rows would cost far more than their copy."""
    result = np.arange(len(rows))
    pending = _shared(rows)
    for salt in range(_ROUNDS):
        if not pending.size:
            return result
        buckets = _hashed(rows[pending], salt)
        heads = np.full(int(buckets.max()) + 1, len(rows))
        np.minimum.at(heads, buckets, pending)
        like = heads[buckets]
        same: npt.NDArray[np.bool_] = (rows[pending] == rows[like]).all(axis=1)
        result[pending[same]] = like[same]
        pending = pending[~same]  # rows that are equal stay together: settled, or pending, all of them
    _, firsts, inverse = np.unique(rows[pending], axis=0, return_index=True, return_inverse=True)
    result[pending] = pending[firsts[inverse.reshape(-1)]]
    return result


def _shared(rows: Int64Array) -> Int64Array:
    """The rows that can have an equal: those whose first entry stands first in another row too."""
    column = rows[:, 0]
    most = int(column.max())
    if most > _DENSE * column.size + _FEW:
        return np.arange(column.size)
    return np.flatnonzero(np.bincount(column, minlength=most + 1)[column] > 1)


def _hashed(rows: Int64Array, salt: int) -> Int64Array:
    """A bucket for each row, of about twice as many as there are rows."""
    bits = max(4, (2 * len(rows)).bit_length())
    odd: Any = np.random.default_rng(salt).integers(1 << 60, 1 << 63, rows.shape[1], dtype=np.uint64)
    odd |= np.uint64(1)
    mixed = np.zeros(len(rows), np.uint64)
    for i in range(rows.shape[1]):
        mixed = (mixed ^ rows[:, i].astype(np.uint64)) * odd[i]
        mixed ^= mixed >> np.uint64(32)
    return (mixed & np.uint64((1 << bits) - 1)).astype(np.int64)
