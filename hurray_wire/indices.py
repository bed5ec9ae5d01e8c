"""Vectorised NumPy over seq_ptr, block_table and seq_lens: the validator, and the index maths (section 1).

Plain arrays and integers in, arrays and `Violation`s out; no tensor, no bytes. Nothing here loops in Python over
entries. Differences are never taken of unsigned arrays (they wrap): neighbours are compared, and products are
formed in 64 bits after the bounds that make them exact have been checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hurray_wire.errors import Code, InvalidDescriptorError, UnsupportedError, Violation

IntArray = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]

_CHUNK_ENTRIES = 1 << 16
_CHUNKED_ABOVE = 1 << 18
"""Above this many entries the temporaries of a whole-array comparison leave the nearer cache (measured)."""
_FEW = 256
"""Entries that Python sums sooner than NumPy has begun."""
_MOST_LISTED = 1 << 32
"""Tokens or pages that can be listed: only those of no bytes can be more."""


class Offence(NamedTuple):
    """Where a condition fails first, the value there, and how often it fails in all."""

    at: int
    value: int
    times: int


def offence(bad: npt.NDArray[np.bool_], values: IntArray) -> Offence:
    """The first place where `bad` holds; the caller knows that there is one."""
    first = int(bad.argmax())
    return Offence(first, int(values[first]), int(np.count_nonzero(bad)))


def _told(where: str, code: Code, found: Offence, message: str, shift: int = 0) -> Violation:
    index = found.at + shift
    more = f", and {found.times - 1} more" if found.times > 1 else ""
    return Violation(code, f"{where}[{index}]", message + more, index=index, value=found.value)


def as_integers(values: Any, where: str) -> IntArray:
    """A 1-D integer array from a list, tuple or array of any integer type, without copying an array.

    Raises:
        InvalidDescriptorError: `not_integer`, naming the first entry that is none; booleans are none.
    """
    if isinstance(values, np.ndarray):
        array = values
    elif isinstance(values, list | tuple | range):
        array = _from_sequence(values, where)
    else:
        array = np.asarray(values)
    if array.ndim != 1:
        raise _not_integer(where, f"must be one-dimensional, has shape {array.shape}")
    if array.dtype.kind not in "iu":
        if array.size == 0 and array.dtype.kind == "f":
            return array.astype(np.uint32)
        raise _not_integer(where, f"must hold integers, not {array.dtype}")
    return array


def _from_sequence(values: Any, where: str) -> IntArray:
    kinds = set(map(type, values))
    if kinds <= {int}:
        try:
            array = np.array(values) if len(values) else np.zeros(0, np.uint32)
        except OverflowError:
            array = np.array(values, dtype=object)
        if array.dtype.kind in "iu":
            return array
        return _wide(values, where)  # NumPy finds no common 64-bit type: too big, or of both signs
    for i, value in enumerate(values):
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
            raise _not_integer(f"{where}[{i}]", f"must be an integer, is {value!r}", i)
    return _from_sequence([int(value) for value in values], where)


def _wide(values: Any, where: str) -> IntArray:
    for i, value in enumerate(values):
        if value < 0:
            raise negative_index(where, Offence(i, value, sum(v < 0 for v in values)))
        if value >= 1 << 64:
            raise InvalidDescriptorError(
                f"{value} needs more than 64 bits", code=Code.INDEX_TYPE, where=f"{where}[{i}]"
            )
    return np.array(values, dtype=np.uint64)


def _not_integer(where: str, message: str, index: int | None = None) -> InvalidDescriptorError:
    violation = Violation(Code.NOT_INTEGER, where, message, index=index)
    return InvalidDescriptorError(message, code=Code.NOT_INTEGER, where=where, violations=[violation])


def negative_index(where: str, found: Offence) -> InvalidDescriptorError:
    """The error for a negative entry: -1 is padding in engines, never a page id on the wire."""
    told = _told(where, Code.NEGATIVE_INDEX, found, f"{found.value} is negative")
    return InvalidDescriptorError(told.message, code=told.code, where=told.where, violations=[told])


def as_indices(values: Any, where: str) -> IntArray:
    """As `as_integers`, and nothing negative: refused before any cast could make it a huge page id."""
    array = as_integers(values, where)
    if array.dtype.kind == "i" and array.size and array.min() < 0:
        raise negative_index(where, offence(array < 0, array))
    return array


def largest(array: IntArray) -> int:
    """The greatest entry, 0 for none. argmax reads once, and has the least overhead on short arrays."""
    return array.item(array.argmax()) if array.size else 0


def some(mask: npt.NDArray[np.bool_]) -> bool:
    """Whether any holds: as `any`, at a fifth of its overhead on short masks."""
    return bool(mask.size and mask.item(mask.argmax()))


def check_seq_ptr(seq_ptr: IntArray, entries: int) -> list[Violation]:
    """Starts at 0, never decreases, ends at the number of table entries (section 1)."""
    if not seq_ptr.size:
        return [Violation(Code.SEQ_PTR_START, "seq_ptr", "is empty; must hold num_seqs + 1 entries, the first 0")]
    violations = []
    first, last = seq_ptr.item(0), seq_ptr.item(-1)
    if first != 0:
        violations.append(Violation(Code.SEQ_PTR_START, "seq_ptr[0]", f"is {first}, must be 0", 0, first))
    if not _ascending(seq_ptr):
        found = offence(seq_ptr[1:] < seq_ptr[:-1], seq_ptr[1:])
        before = int(seq_ptr[found.at])
        message = f"is {found.value}, less than the {before} before it; must never decrease"
        violations.append(_told("seq_ptr", Code.SEQ_PTR_ORDER, found, message, shift=1))
    if last != entries:
        end = seq_ptr.size - 1
        message = f"is {last}, must be {entries}, the number of block_table entries"
        violations.append(Violation(Code.SEQ_PTR_END, f"seq_ptr[{end}]", message, end, last))
    return violations


def _ascending(seq_ptr: IntArray) -> bool:
    if seq_ptr.size <= _CHUNKED_ABOVE:
        return not some(np.less(seq_ptr[1:], seq_ptr[:-1]))
    starts = range(0, seq_ptr.size - 1, _CHUNK_ENTRIES)
    chunks = (seq_ptr[i : i + _CHUNK_ENTRIES + 1] for i in starts)
    return not any(some(np.less(chunk[1:], chunk[:-1])) for chunk in chunks)


def check_block_table(block_table: IntArray, num_pages: int) -> list[Violation]:
    """Every id, spare ones too, is below num_pages; an id may stand any number of times (section 1)."""
    if largest(block_table) < num_pages or not block_table.size:
        return []
    found = offence(block_table >= np.uint64(num_pages), block_table)
    message = f"is {found.value}, must be below num_pages {num_pages}"
    return [_told("block_table", Code.PAGE_ID, found, message)]


_BRIEF = 1 << 12
"""Entries up to which one look at everything at once beats the rules one by one, which name what they find."""


def sound(
    block_table: IntArray, seq_ptr: IntArray, seq_lens: IntArray | None, num_pages: int, page_size: int, tokens: int
) -> bool:
    """Whether short tables keep every rule of this room. False says nothing: ask the rules.

    A step down in unsigned seq_ptr wraps to a step of at least 2^width - seq_ptr's greatest entry. No entry is above
    num_seqs * entries while no step is above `entries`; with that product below half the range, every wrap is.
    """
    entries, num_seqs = block_table.size, seq_ptr.size - 1
    if num_seqs < 0 or not 0 < entries + num_seqs <= _BRIEF or seq_ptr.item(0) != 0 or seq_ptr.item(-1) != entries:
        return False
    end = 1 << (8 * seq_ptr.itemsize - 1)
    slots = entries * page_size
    if num_seqs * entries >= end or slots >= end or largest(block_table) >= num_pages:
        return False
    if seq_lens is None:
        return tokens <= slots and _ascending(seq_ptr)
    if seq_lens.size != num_seqs or not num_seqs or exact_sum(seq_lens) != tokens:
        return False
    pages = seq_ptr[1:] - seq_ptr[:-1]
    if pages.item(pages.argmax()) > entries:
        return False
    over = seq_lens > pages * page_size
    return not over.item(over.argmax())


def check_token_count(total_tokens: int, entries: int, page_size: int) -> list[Violation]:
    """Tokens fit the pages that the sequences name (section 3)."""
    if total_tokens <= entries * page_size:
        return []
    message = f"is {total_tokens}, but {entries} pages of {page_size} hold {entries * page_size} tokens"
    return [Violation(Code.TOKEN_COUNT, "shape[0]", message, value=total_tokens)]


def check_seq_lens(seq_lens: IntArray, seq_ptr: IntArray, page_size: int, total_tokens: int) -> list[Violation]:
    """One length a sequence, each within its pages, their sum total_tokens; seq_ptr is already sound."""
    if seq_lens.size != seq_ptr.size - 1:
        message = f"has {seq_lens.size} entries, must have num_seqs {seq_ptr.size - 1}"
        return [Violation(Code.SEQ_LENS_COUNT, "seq_lens", message)]
    violations = []
    over = _over_capacity(seq_lens, seq_ptr, page_size)
    if some(over):
        found = offence(over, seq_lens)
        pages = int(seq_ptr[found.at + 1]) - int(seq_ptr[found.at])
        message = f"is {found.value}, but sequence {found.at} has {pages} pages of {page_size}"
        violations.append(_told("seq_lens", Code.SEQ_LENS_RANGE, found, message))
    total = exact_sum(seq_lens)
    if total != total_tokens:
        message = f"sum to {total}, must sum to total_tokens {total_tokens}"
        violations.append(Violation(Code.SEQ_LENS_SUM, "seq_lens", message, value=total))
    return violations


def _over_capacity(seq_lens: IntArray, seq_ptr: IntArray, page_size: int) -> npt.NDArray[np.bool_]:
    """Where a length is more than its pages hold."""
    pages = seq_ptr[1:] - seq_ptr[:-1]
    if seq_ptr.item(-1) * page_size < 1 << (8 * seq_ptr.itemsize):  # then no product wraps
        return seq_lens > pages * page_size
    wide, size = seq_lens.astype(np.uint64), np.uint64(page_size)
    return wide // size + (wide % size > 0) > pages


def exact_sum(array: IntArray) -> int:
    """The sum as an unbounded integer."""
    if array.size <= _FEW:
        return sum(array.tolist())
    if largest(array) * array.size < 1 << 63:
        return int(np.add.reduce(array))
    return sum(map(int, array.tolist()))


def forced_seq_lens(seq_ptr: IntArray, page_size: int, total_tokens: int) -> IntArray | None:
    """The token counts where the tables leave no choice, else None (section 3, first row); tables are sound."""
    num_seqs = seq_ptr.size - 1
    entries = seq_ptr.item(-1)
    if num_seqs == 0 or total_tokens == 0:
        return np.zeros(num_seqs, seq_ptr.dtype)
    if total_tokens >= 1 << 32:  # tokens of no bytes can be more than the table's own type counts
        seq_ptr = seq_ptr.astype(np.uint64)
    if total_tokens == entries * page_size:
        return (seq_ptr[1:] - seq_ptr[:-1]) * seq_ptr.dtype.type(page_size)
    # One sequence has all the pages exactly when seq_ptr steps once, from 0 to the end.
    step = int(np.searchsorted(seq_ptr, 1))
    if seq_ptr.item(step) == entries:
        lens = np.zeros(num_seqs, seq_ptr.dtype)
        lens[step - 1] = total_tokens
        return lens
    return None


def starts_of(seq_lens: IntArray) -> Int64Array:
    """Where each sequence's tokens begin in the batch, int64[num_seqs + 1]."""
    starts = np.zeros(seq_lens.size + 1, np.int64)
    np.cumsum(seq_lens, out=starts[1:])
    return starts


def token_slots(block_table: IntArray, seq_ptr: IntArray, seq_lens: IntArray, page_size: int) -> Int64Array:
    """The slot of every token of every sequence, int64: page id * page_size + position in the page."""
    check_listable(exact_sum(seq_lens), "tokens")
    starts = starts_of(seq_lens)
    seq = np.repeat(np.arange(seq_lens.size), seq_lens.astype(np.int64))
    token = np.arange(starts[-1]) - starts[seq]
    entry = seq_ptr.astype(np.int64)[seq] + token // page_size
    return block_table[entry].astype(np.int64) * page_size + token % page_size


def check_listable(count: int, what: str) -> None:
    """Tokens and pages of no bytes cost their sender nothing: refuse to make a list of more than can be held.

    Raises:
        UnsupportedError: `shape`.
    """
    if count > _MOST_LISTED:
        message = f"{count} {what}, of no bytes each, are more than can be listed"
        raise UnsupportedError(message, code=Code.SHAPE, where="shape")


def live_counts(seq_lens: IntArray, page_size: int) -> Int64Array:
    """Pages that hold at least one token, a sequence: ceil(seq_len / page_size)."""
    return -(-seq_lens.astype(np.int64) // page_size)


def live_entries(seq_ptr: IntArray, seq_lens: IntArray, page_size: int) -> tuple[Int64Array, Int64Array]:
    """Positions in block_table that hold tokens, and how many tokens each, sequence by sequence."""
    counts = live_counts(seq_lens, page_size)
    starts = starts_of(counts)
    seq = np.repeat(np.arange(counts.size), counts)
    nth = np.arange(starts[-1]) - starts[seq]
    entries = seq_ptr[:-1].astype(np.int64)[seq] + nth
    tokens = np.minimum(seq_lens.astype(np.int64)[seq] - nth * page_size, page_size)
    return entries, tokens


def owned_slots(
    block_table: IntArray, seq_ptr: IntArray, seq_lens: IntArray, page_size: int, num_pages: int
) -> Int64Array:
    """How many leading slots of each page any sequence owns, int64[num_pages]: the most that one of them uses."""
    check_listable(num_pages, "pages")
    entries, tokens = live_entries(seq_ptr, seq_lens, page_size)
    owned = np.zeros(num_pages, np.int64)
    np.maximum.at(owned, block_table[entries], tokens)
    return owned


def first_use(block_table: IntArray) -> tuple[IntArray, IntArray]:
    """The distinct page ids in order of first use, and the table in terms of their positions."""
    ids, first, inverse = np.unique(block_table, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty(order.size, np.int64)
    rank[order] = np.arange(order.size)
    return ids[order], rank[inverse.reshape(-1)].astype(block_table.dtype)


def element_offset(
    coordinates: tuple[Int64Array, ...],
    geometry: tuple[int, ...],
    block_table: IntArray,
    seq_ptr: IntArray,
    seq_lens: IntArray | None,
) -> Any:
    """The element offset of (seq, token, head, dim) in a pool of (page_size, num_pages, num_heads, head_dim)."""
    page_size, num_pages, num_heads, head_dim = geometry
    seq, token, head, dim = np.broadcast_arrays(*coordinates)
    for array, bound, name in ((seq, seq_ptr.size - 1, "seq"), (head, num_heads, "head"), (dim, head_dim, "dim")):
        _bounded(array, bound, name)
    start, stop = seq_ptr[seq], seq_ptr[seq + 1]
    _sound_entries(start, stop, block_table.size)
    if page_size < 1:
        raise InvalidDescriptorError("is 0, must be at least 1", code=Code.PAGE_SIZE, where="layout.page_size")
    start, stop = (np.asarray(bound).astype(np.int64) for bound in (start, stop))  # within the table, so it fits
    entry = token // page_size
    if np.any(entry >= stop - start) or (seq_lens is not None and np.any(token >= seq_lens[seq])):
        raise IndexError(f"token {int(np.max(token))} is out of range")
    pages = block_table[start + entry]
    if pages.size and largest(pages.reshape(-1)) >= num_pages:
        message = f"is {largest(pages.reshape(-1))}, must be below num_pages {num_pages}"
        raise InvalidDescriptorError(message, code=Code.PAGE_ID, where="block_table")
    if num_pages * page_size * num_heads * head_dim >= 1 << 63:
        message = "the pool's elements are more than an int64 offset counts"
        raise InvalidDescriptorError(message, code=Code.BUFFER_SIZE, where="buffers[0].byte_size")
    slot = pages.astype(np.int64) * page_size + token % page_size
    return (slot * num_heads + head) * head_dim + dim


def _bounded(array: Int64Array, bound: int, name: str) -> None:
    if array.size and array.max() >= bound:
        raise IndexError(f"{name} {int(array.max())} is out of range: {max(bound, 0)}")


def _sound_entries(start: IntArray, stop: IntArray, entries: int) -> None:
    if np.any(start > stop):
        raise InvalidDescriptorError("decreases", code=Code.SEQ_PTR_ORDER, where="seq_ptr")
    if np.any(stop > entries):
        message = f"points past the {entries} block_table entries"
        raise InvalidDescriptorError(message, code=Code.SEQ_PTR_END, where="seq_ptr")
