"""Index maths that operations share: ranges laid end to end, first uses, equal rows. No loop over entries.

Plain arrays in and out; no tensor enters. Positions are signed, of 32 bits where those hold them: beside a pool of
small pages, the time that indices take is the memory that they pass through, most of it touched for the first time.
"""

from __future__ import annotations

from collections.abc import Iterator
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
_STEP_ENTRIES = 1 << 16
"""Entries worked on at a time where several passes go over them: those after the first find them in the cache."""
_ROUNDS = 8
"""Hash rounds before rows are sorted: each settles all but a few rows, unless somebody made them to collide."""

Mask = npt.NDArray[np.bool_]


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


def narrow(end: int) -> np.dtype[Any]:
    """The signed type for numbers from -1 to below `end`."""
    return np.dtype(np.int32 if end <= 1 << 31 else np.int64)


def signed(ids: IntArray, end: int) -> IntArray:
    """Non-negative ids below `end` as `narrow(end)`: the same memory, read-only or not, where the width is the same."""
    kind = narrow(end)
    if ids.itemsize == kind.itemsize:
        return ids.view(ids.dtype.str.replace("u", "i"))
    return ids.astype(kind)


def steps(size: int, step: int = _STEP_ENTRIES) -> Iterator[slice]:
    """So many entries, a few at a time."""
    for at in range(0, size, step):
        yield slice(at, min(at + step, size))


def spans(starts: IntArray, counts: IntArray) -> Int64Array:
    """start, start + 1, ... of every range, one range behind the other.

    Raises:
        UnsupportedError: `shape`, for more than can be listed.
    """
    ends = starts_of(counts)
    indices.check_listable(int(ends[-1]), "tokens")
    shifts = starts.astype(np.int64) - ends[:-1]
    result = np.repeat(shifts, counts.astype(np.int64))
    for step in steps(result.size):
        result[step] += np.arange(step.start, step.stop)
    return result


def marked(starts: Int64Array, counts: Int64Array, end: int) -> Mask:
    """Which numbers below `end` lie in these ranges, which ascend and do not overlap."""
    if int(counts.sum()) * 2 < end:
        inside = np.zeros(end, np.bool_)
        inside[spans(starts, counts)] = True
        return inside
    begins = np.concatenate(([0], starts + counts))
    gaps = np.concatenate((starts, [end])) - begins
    some = np.flatnonzero(gaps)
    inside = np.ones(end, np.bool_)
    inside[spans(begins[some], gaps[some])] = False
    return inside


def numbered(
    block_table: IntArray,
    seq_ptr: IntArray,
    counts: Int64Array,
    num_pages: int,
    factor: int = 1,
    first: Int64Array | None = None,
) -> IntArray:
    """The blocks `first` to first + count of every sequence, page * factor + part, where pages have `factor` blocks."""
    starts = seq_ptr[:-1].astype(np.int64) * factor
    total, end = int(counts.sum()), block_table.size * factor
    indices.check_listable(end, "tokens")
    blocks = in_parts(block_table, num_pages, factor)
    if total == end:
        return blocks
    if first is not None:
        starts += first
    if total * 2 < end:
        return blocks[spans(starts, counts)]
    return blocks[marked(starts, counts, end)]


def in_parts(block_table: IntArray, num_pages: int, factor: int) -> IntArray:
    """Every part of every page of a table, page * factor + part; of pages of one part the table's own memory."""
    end = num_pages * factor
    if factor == 1:
        return signed(block_table, end)
    pages = block_table.astype(narrow(end))
    pages *= factor
    parts = np.empty((pages.size, factor), pages.dtype)
    if factor > _FEW_PARTS:
        np.add(pages[:, None], np.arange(factor, dtype=pages.dtype), out=parts)
    else:  # NumPy's inner loop would be as short as the last axis
        for part in range(factor):
            np.add(pages, part, out=parts[:, part])
    return parts.reshape(-1)


def owned_slots(
    block_table: IntArray, seq_ptr: IntArray, seq_lens: IntArray, page_size: int, num_pages: int
) -> IntArray:
    """How many leading slots of each page any sequence owns, `[num_pages]`: the most that one of them uses.

    Of the narrowest type that holds a page size.
    """
    indices.check_listable(num_pages, "pages")
    lens = seq_lens.astype(np.int64)
    whole, rest = lens // page_size, lens % page_size
    owned = np.zeros(num_pages, np.min_scalar_type(page_size))
    part = np.flatnonzero(rest)
    np.maximum.at(owned, block_table[seq_ptr[part].astype(np.int64) + whole[part]], rest[part].astype(owned.dtype))
    pages = numbered(block_table, seq_ptr, whole, num_pages)
    for step in steps(pages.size):
        owned[pages[step]] = page_size  # whole pages, nearly all, need no comparing
    return owned


def slots_of(owned: IntArray, page_size: int) -> Mask:
    """Which slots are owned, `[pages, page_size]`, where so many leading ones of each page are."""
    return np.arange(page_size, dtype=owned.dtype) < owned[:, None]


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
        for step in steps(ids.size):
            seen[ids[step]] = True
    return int(np.count_nonzero(seen)) == size


def first_use(block_table: IntArray, num_pages: int) -> tuple[IntArray, IntArray]:
    """The distinct page ids in order of first use, and the table in terms of their positions, of the table's type."""
    size = block_table.size
    if num_pages > _DENSE * size + _FEW:  # marking every page would cost more than sorting the few that are named
        return indices.first_use(block_table)
    if named_once(num_pages, block_table):
        return block_table, np.arange(size, dtype=block_table.dtype)
    rank = np.full(num_pages, -1, narrow(size))
    ids, table = np.empty(min(size, num_pages), block_table.dtype), np.empty_like(block_table)
    known = 0
    for step in steps(size):
        some = block_table[step].astype(np.intp)
        new = some[rank[some] < 0]
        firsts = new if new.size < 2 else _distinct(new, rank)
        rank[firsts] = np.arange(known, known + firsts.size, dtype=rank.dtype)
        ids[known : known + firsts.size] = firsts
        known += firsts.size
        table[step] = rank[some]
    return ids[:known].copy(), table


def _distinct(ids: Int64Array, scratch: IntArray) -> Int64Array:
    """The ids in order, each once; the entries of `scratch` that they name are overwritten."""
    positions = np.arange(ids.size, dtype=scratch.dtype)
    scratch[ids] = ids.size
    np.minimum.at(scratch, ids, positions)
    return ids[scratch[ids] == positions]


def distinct_rows(rows: IntArray, count: int) -> tuple[Int64Array | None, IntArray]:
    """Where each distinct row stands first, ascending, and for every row the rank of its like among those.

    None for all of them, where no two are alike.

    Args:
        rows: ids, `[rows, columns]`; those of the first column from 0 to count - 1.
    """
    if not rows.size or named_once(count, rows[:, 0]):
        return None, np.arange(len(rows), dtype=np.uint32 if len(rows) <= 1 << 32 else np.uint64)
    first = _first_equal(rows)
    own = first == np.arange(first.size)
    rank = np.cumsum(own) - 1
    return np.flatnonzero(own), rank[first]


def _first_equal(rows: IntArray) -> Int64Array:
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


def _shared(rows: IntArray) -> Int64Array:
    """The rows that can have an equal: those whose first entry stands first in another row too."""
    column = rows[:, 0]
    most = int(column.max())
    if most > _DENSE * column.size + _FEW:
        return np.arange(column.size)
    return np.flatnonzero(np.bincount(column, minlength=most + 1)[column] > 1)


def _hashed(rows: IntArray, salt: int) -> Int64Array:
    """A bucket for each row, of about twice as many as there are rows."""
    bits = max(4, (2 * len(rows)).bit_length())
    odd: Any = np.random.default_rng(salt).integers(1 << 60, 1 << 63, rows.shape[1], dtype=np.uint64)
    odd |= np.uint64(1)
    mixed = np.zeros(len(rows), np.uint64)
    for i in range(rows.shape[1]):
        mixed = (mixed ^ rows[:, i].astype(np.uint64)) * odd[i]
        mixed ^= mixed >> np.uint64(32)
    return (mixed & np.uint64((1 << bits) - 1)).astype(np.int64)
