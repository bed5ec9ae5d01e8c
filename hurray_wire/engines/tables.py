"""Block tables of engines: padded rows to sequence offsets and back, token slots, and the checks on the way.

An engine's row is garbage behind the pages that hold tokens: stale ids, -1, blocks allocated ahead. What is live
follows from seq_lens alone, and only that is looked at; page 0 is a page like others. No page's bytes enter here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hurray_wire import indices
from hurray_wire.arrays import as_array, is_torch
from hurray_wire.errors import Code, InvalidDescriptorError, UnsupportedError, Violation, violations_error
from hurray_wire.indices import Int64Array, IntArray
from hurray_wire.tensor import BlockPagedTensor

__all__ = ["padded_block_table", "slot_mapping"]

_INT32_END = 1 << 31
_INT64_MAX = (1 << 63) - 1


class LiveTable(NamedTuple):
    """The pages that hold tokens, sequence by sequence: page ids, sequence offsets into them, token counts."""

    ids: IntArray
    seq_ptr: Int64Array
    seq_lens: Int64Array

    def place(self, at: int) -> str:
        """The path of an id: its sequence, and its position there."""
        seq = int(np.searchsorted(self.seq_ptr, at, side="right")) - 1
        return f"block_table[{seq}, {at - int(self.seq_ptr[seq])}]"

    def rows(self, width: int | None = None, fill: int = 0) -> npt.NDArray[np.int32]:
        """The ids as int32 rows of one width."""
        counts = np.diff(self.seq_ptr)
        most = int(counts.max(initial=0))
        if width is not None and width < most:
            raise ValueError(f"width is {width}, but sequence {int(counts.argmax())} has {most} pages")
        rows = np.full((counts.size, most if width is None else width), fill, np.int32)
        seq = np.repeat(np.arange(counts.size), counts)
        rows[seq, np.arange(self.ids.size) - self.seq_ptr[seq]] = as_int32(self.ids, self.place)
        return rows


def live_table(block_table: Any, seq_lens: Any, *, num_pages: int | None, page_size: int) -> LiveTable:
    """The live part of an engine's rows, range-checked.

    Args:
        block_table: `[num_seqs, pages]` integers, or a list of rows of any lengths.
        seq_lens: tokens a sequence.
        num_pages: what ids must be below; None for no bound.

    Raises:
        InvalidDescriptorError: `page_size`, `seq_lens_count`, `seq_lens_range`, `negative_index`, `page_id`,
            `not_integer`; `where` names the sequence and, in its row, the position.
    """
    if page_size < 1:
        raise InvalidDescriptorError("is 0, must be at least 1", code=Code.PAGE_SIZE, where="cache")
    rows, widths = _rows(block_table)
    lens = indices.as_indices(on_host(seq_lens), "seq_lens")
    if lens.size != widths.size:
        message = f"has {lens.size} entries, block_table has {widths.size} rows: slice both to the batch"
        raise InvalidDescriptorError(message, code=Code.SEQ_LENS_COUNT, where="seq_lens")
    _check_lengths(lens, widths, page_size)
    lens = lens.astype(np.int64)
    counts = indices.live_counts(lens, page_size)
    seq_ptr = indices.starts_of(counts)
    seq = np.repeat(np.arange(counts.size), counts)
    table = LiveTable(rows[seq, np.arange(seq_ptr[-1]) - seq_ptr[seq]], seq_ptr, lens)
    check_ids(table.ids, num_pages, table.place)
    return table._replace(ids=table.ids.astype(np.int64))


def on_host(values: Any) -> Any:
    """Small index data as NumPy takes it: fetched where it is a torch tensor on a device."""
    if is_torch(values):
        return as_array(values.cpu())
    return values if isinstance(values, list | tuple | range) else as_array(values)


def _rows(block_table: Any) -> tuple[IntArray, Int64Array]:
    """The table as a 2-D array, and how many entries of each row are the caller's."""
    table = on_host(block_table)
    if not isinstance(table, np.ndarray):
        return _of_lists(table)
    if table.ndim != 2 or table.dtype.kind not in "iu":
        message = f"must be [num_seqs, pages] integers, is {table.dtype} of shape {table.shape}"
        raise InvalidDescriptorError(message, code=Code.NOT_INTEGER, where="block_table")
    return table, np.full(table.shape[0], table.shape[1], np.int64)


def _of_lists(lists: Any) -> tuple[IntArray, Int64Array]:
    rows = [indices.as_integers(on_host(row), f"block_table[{i}]") for i, row in enumerate(lists)]
    widths = np.array([row.size for row in rows], np.int64)
    table = np.zeros((len(rows), int(widths.max(initial=0))), np.int64)
    for padded, row in zip(table, rows, strict=True):
        padded[: row.size] = np.minimum(row, np.uint64(_INT64_MAX)) if row.dtype == np.uint64 else row
    return table, widths


def _check_lengths(lens: IntArray, widths: Int64Array, page_size: int) -> None:
    over = lens > (widths * page_size).astype(np.uint64) if lens.dtype.kind == "u" else lens > widths * page_size
    if over.any():
        found = indices.offence(over, lens)
        width = int(widths[found.at])
        message = f"is {found.value}, but row {found.at} of block_table has {width} pages of {page_size}"
        raise refused(Code.SEQ_LENS_RANGE, f"seq_lens[{found.at}]", message, found)


def check_ids(ids: IntArray, num_pages: int | None, place: Callable[[int], str]) -> None:
    """Ids of live pages are neither negative nor beyond the pool: refused before any cast could hide it."""
    negative = ids < 0
    if negative.any():
        found = indices.offence(negative, ids)
        message = f"is {found.value} where a page holds tokens"
        raise refused(Code.NEGATIVE_INDEX, place(found.at), message, found)
    beyond = np.zeros(ids.shape, np.bool_) if num_pages is None else ids >= num_pages
    if beyond.any():
        found = indices.offence(beyond, ids)
        message = f"is {found.value}, the pool has {num_pages} pages"
        raise refused(Code.PAGE_ID, place(found.at), message, found)


def refused(code: Code, where: str, message: str, found: indices.Offence) -> InvalidDescriptorError:
    """The error for an entry of an engine's table."""
    more = f", and {found.times - 1} more" if found.times > 1 else ""
    violation = Violation(code, where, message + more, index=found.at, value=found.value)
    return InvalidDescriptorError(violation.message, code=code, where=where, violations=[violation])


def check_offsets(offsets: IntArray, entries: int, where: str, table: str) -> None:
    """Sequence offsets under an engine's names: they start at 0, never decrease, and end within the table."""
    end = min(int(offsets[-1]), entries) if offsets.size else entries
    violations = indices.check_seq_ptr(offsets, end)
    if violations:
        first = violations[0]
        message = first.message.replace("block_table", table)
        place = first.where.replace("seq_ptr", where)
        raise violations_error([Violation(first.code, place, message, first.index, first.value)])


def table_of(t: BlockPagedTensor) -> LiveTable:
    """A tensor's own pages that hold tokens.

    Raises:
        UnsupportedError: `seq_lens_unknown`.
    """
    lens = t.known_lens().astype(np.int64)
    entries, _ = indices.live_entries(t.seq_ptr, lens, t.page_size)
    return LiveTable(t.block_table[entries], indices.starts_of(indices.live_counts(lens, t.page_size)), lens)


def slot_mapping(t: BlockPagedTensor) -> Int64Array:
    """The slot of every token of the batch, `page id * page_size + position`: int64[total_tokens].

    What vLLM's writers take (vLLM `vllm/v1/worker/block_table.py` compute_slot_mapping), here for all tokens that
    the tensor holds, sequence by sequence; there are no padding entries.

    Args:
        t: a tensor that knows its seq_lens.

    Raises:
        UnsupportedError: `seq_lens_unknown`.

    Example:
        >>> import numpy as np
        >>> import hurray_wire as hw
        >>> pool = np.zeros((8, 4, 1, 2), np.float16)
        >>> t = hw.BlockPagedTensor(pool, block_table=[7, 2, 5], seq_ptr=[0, 2, 3], seq_lens=[5, 2])
        >>> slot_mapping(t).tolist()
        [28, 29, 30, 31, 8, 20, 21]
    """
    return t.token_slots()


def padded_block_table(t: BlockPagedTensor, *, width: int | None = None, fill: int = 0) -> npt.NDArray[np.int32]:
    """The table as rows of one width: int32 `[num_seqs, width]` (vLLM `vllm/v1/worker/block_table.py`).

    Rows hold the pages with tokens; pages that the tensor names beyond them are left out.

    Args:
        t: a tensor that knows its seq_lens.
        width: pages a row, by default the longest sequence's.
        fill: what stands behind a row's pages: vLLM reads 0, the null block; others -1.

    Raises:
        UnsupportedError: `index_type`, for an id of 2**31 and more; `seq_lens_unknown`.
        ValueError: a sequence has more pages than `width`.

    Example:
        >>> import numpy as np
        >>> import hurray_wire as hw
        >>> pool = np.zeros((8, 4, 1, 2), np.float16)
        >>> t = hw.BlockPagedTensor(pool, block_table=[7, 2, 5], seq_ptr=[0, 2, 3], seq_lens=[5, 2])
        >>> padded_block_table(t, width=3).tolist()
        [[7, 2, 0], [5, 0, 0]]
    """
    return table_of(t).rows(width, fill)


def as_int32(values: IntArray, place: Callable[[int], str]) -> npt.NDArray[np.int32]:
    """Unsigned values for a consumer that counts in int32.

    Raises:
        UnsupportedError: `index_type`, naming the first value of 2**31 and more.
    """
    if indices.largest(values) >= _INT32_END:
        found = indices.offence(values >= _INT32_END, values)
        message = f"is {found.value}, and the engine's tables are int32: move the pages below 2**31"
        raise UnsupportedError(message, code=Code.INDEX_TYPE, where=place(found.at))
    return values.astype(np.int32)


def lens_as_int32(seq_lens: IntArray) -> npt.NDArray[np.int32]:
    """Token counts for a consumer that counts in int32."""
    return as_int32(seq_lens, lambda at: f"seq_lens[{at}]")
