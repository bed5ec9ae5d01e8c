"""A tensor's tokens into somebody else's pages: scatter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hurray_wire import indices
from hurray_wire.arrays import as_array, refuse_overlap
from hurray_wire.dtypes import Dtype
from hurray_wire.errors import (
    Code,
    Difference,
    InvalidDescriptorError,
    MismatchError,
    UnsupportedError,
    Violation,
    violations_error,
)
from hurray_wire.indices import Int64Array, IntArray
from hurray_wire.ops import derived as d
from hurray_wire.ops.blocks import Blocks, blocks_of, move
from hurray_wire.ops.derived import Array, whole_pages
from hurray_wire.ops.pages import taken
from hurray_wire.ops.spans import at_most, first_use, given, named_once, nth_block, numbered, one_a_sequence, spans
from hurray_wire.tensor import BlockPagedTensor, element_of

_FAR = 1 << 62
"""Positions from here on are in no pool, and are not told apart."""


def scatter(t: BlockPagedTensor, pool: Any, block_table: Any, seq_ptr: Any, *, first_tokens: Any = 0) -> None:
    """Write a tensor's tokens into the pages of somebody's pool, of any page size, ids and strides: one copy.

    Token i of sequence s goes to position first_tokens[s] + i of the pages that block_table names for s. All is
    checked before the first write. Slots that receive no token keep what they hold, in pages that are named too. Where
    page sizes and positions allow, whole parts of pages are copied; else token by token.

    Pages that sequences share in `t` may be shared in the receiver's table: the same tokens are written there once.
    Stored elements are written as they are; per-block scales stay with `t`, whose slots `token_slots` tells.

    Args:
        t: what to write; its metadata first_tokens is not looked at.
        pool: writable `[pages, page_size, num_heads, head_dim]` of the tensor's element type (float128 and private
            types as void of their width), strided along any axis, or a torch CPU tensor.
        block_table, seq_ptr: the receiver's tables, ids in `pool`; as many sequences as `t` has.
        first_tokens: an integer, or one a sequence; as `suffix` notes them where the table begins before them.

    Raises:
        MismatchError: element type, heads, head_dim or number of sequences differ.
        InvalidDescriptorError: `rank`, `page_id`, `seq_ptr_*`, `negative_index`, `not_integer`; `seq_lens_range`, where
            a sequence has too few pages; `page_id` too, where two different tokens would be written to one slot.
        UnsupportedError: `seq_lens_unknown`; `packed_pool`, for sub-byte types.
        ValueError: the pool is read-only.
        TypeError: the pool is no array, or gives only copies of itself.

    Example:
        >>> t = BlockPagedTensor(np.arange(1, 5, dtype=np.int8).reshape(2, 2, 1, 1), block_table=[1, 0],
        ...                      seq_ptr=[0, 2], seq_lens=[3])
        >>> pool = np.zeros((3, 3, 1, 1), np.int8)
        >>> scatter(t, pool, [2, 0], [0, 2], first_tokens=2)
        >>> pool.reshape(3, 3).tolist()
        [[4, 1, 0], [0, 0, 0], [0, 0, 3]]
    """
    whole_pages(t)
    lens = t.known_lens().astype(np.int64)
    target = _checked_pool(t, pool)
    table, ptr = _checked_tables(t, block_table, seq_ptr, len(target))
    first = at_most(one_a_sequence(first_tokens, t.num_seqs, "first_tokens"), _FAR)
    first[lens == 0] = 0
    _check_room(first + lens, ptr, target.shape[1])
    if not target.size or not t.total_tokens:
        return
    moves = _moves(t, lens, _Receiver(table, ptr, first, *target.shape[:2]))
    _check_apart(moves, len(target), target.shape[1] // moves.block)
    if np.may_share_memory(target, t.page_pool):  # of its own pool, pages could be read after they were written
        t = taken(t, *first_use(t.block_table, t.num_pages))
        moves = _moves(t, lens, _Receiver(table, ptr, first, *target.shape[:2]))
    _write(t, target, moves)


def _checked_pool(t: BlockPagedTensor, pool: Any) -> Array:
    if t.dtype.is_sub_byte or t.descriptor.bit_width < 8:
        raise d.packed_pool(f"{t.dtype.name} elements have no place of their own in a pool of somebody's")
    array = as_array(pool)
    if array.ndim != 4:
        message = f"has shape {array.shape}, must be [pages, page_size, heads, head_dim]"
        raise InvalidDescriptorError(message, code=Code.RANK, where="pool")
    found = (_name(array.dtype), array.shape[2], array.shape[3])
    expected = (_name(element_of(t.descriptor)), t.num_heads, t.head_dim)
    names = zip(("dtype", "num_heads", "head_dim"), found, expected, strict=True)
    differences = [Difference(name, mine, theirs) for name, mine, theirs in names if mine != theirs]
    if differences:
        raise MismatchError(differences)
    if not array.flags.writeable:
        raise ValueError("the pool is read-only")
    refuse_overlap(array)
    if array is not pool and array.size and not np.may_share_memory(array, as_array(pool)):
        raise TypeError(f"{type(pool).__name__} gives a copy of itself: what is written to that is lost")
    if array.shape[1] == 0:
        raise InvalidDescriptorError("is 0, must be at least 1", code=Code.PAGE_SIZE, where="pool.page_size")
    return array


def _name(dtype: np.dtype[Any]) -> str:
    try:
        return Dtype.of(dtype).name
    except UnsupportedError:
        return str(dtype)


def _checked_tables(t: BlockPagedTensor, block_table: Any, seq_ptr: Any, num_pages: int) -> tuple[IntArray, Int64Array]:
    table, ptr = _own(block_table, "block_table"), _own(seq_ptr, "seq_ptr")
    _raise_any(indices.check_seq_ptr(ptr, table.size) + indices.check_block_table(table, num_pages))
    if ptr.size != t.num_seqs + 1:
        raise MismatchError([Difference("num_seqs", ptr.size - 1, t.num_seqs)])
    return table, ptr.astype(np.int64)


def _own(values: Any, where: str) -> IntArray:
    """A copy, taken before it is looked at: an engine's tables go on changing."""
    return given(values if isinstance(values, list | tuple | range) else np.array(as_array(values)), where)


def _check_room(ends: Int64Array, ptr: Int64Array, page_size: int) -> None:
    _raise_any(indices.check_seq_lens(ends, ptr, page_size, indices.exact_sum(ends)))


def _raise_any(violations: Sequence[Violation]) -> None:
    if violations:
        raise violations_error(violations)


class _Receiver(NamedTuple):
    """The receiver's tables, and where in them each sequence's tokens begin."""

    block_table: IntArray
    seq_ptr: Int64Array
    first: Int64Array
    num_pages: int
    page_size: int


class _Moves(NamedTuple):
    """Blocks of so many tokens and where they go, and the sequences' last blocks, of which only some tokens go."""

    block: int
    ids: IntArray
    to: IntArray
    last_ids: Int64Array
    last_to: Int64Array
    last_tokens: Int64Array


def _moves(t: BlockPagedTensor, lens: Int64Array, receiver: _Receiver) -> _Moves:
    """The largest blocks that both sides' pages and every first token are multiples of."""
    block = math.gcd(t.page_size, receiver.page_size, int(np.gcd.reduce(receiver.first, initial=0)))
    whole, first, rest = lens // block, receiver.first // block, lens % block
    here, there = t.page_size // block, receiver.page_size // block
    ids = numbered(t.block_table, t.seq_ptr, whole, t.num_pages, here)
    to = numbered(receiver.block_table, receiver.seq_ptr, whole, receiver.num_pages, there, first)
    last = np.flatnonzero(rest)
    last_ids = nth_block(t.block_table, t.seq_ptr[last].astype(np.int64), whole[last], here)
    last_to = nth_block(receiver.block_table, receiver.seq_ptr[last], (first + whole)[last], there)
    return _Moves(block, ids, to, last_ids, last_to, rest[last])


def _check_apart(moves: _Moves, num_pages: int, factor: int) -> None:
    """No two different blocks go to one place: blocks begin at their first slot, so any two there would overlap."""
    if named_once(num_pages * factor, moves.to, moves.last_to):
        return
    to, ids = np.concatenate((moves.to, moves.last_to)), np.concatenate((moves.ids, moves.last_ids))
    order = np.argsort(to, kind="stable")
    to, ids = to[order], ids[order]
    clash = (to[1:] == to[:-1]) & (ids[1:] != ids[:-1])
    if clash.any():
        page = int(to[1:][clash][0]) // factor
        message = f"two tokens would be written to one slot of page {page}, and {int(clash.sum()) - 1} more times"
        violation = Violation(Code.PAGE_ID, "block_table", message, value=page)
        raise InvalidDescriptorError(message, code=Code.PAGE_ID, where="block_table", violations=[violation])


def _write(t: BlockPagedTensor, pool: Array, moves: _Moves) -> None:
    _write_blocks(t, pool, moves.block, moves.ids, moves.to)
    ids, to = (spans(blocks * moves.block, moves.last_tokens) for blocks in (moves.last_ids, moves.last_to))
    _write_blocks(t, pool, 1, ids, to)


def _write_blocks(t: BlockPagedTensor, pool: Array, block: int, ids: IntArray, to: IntArray) -> None:
    if ids.size:
        source = blocks_of(t, t.page_size // block)
        move(source, ids, Blocks(pool, pool.shape[1] // block, source.size), to)
