"""SGLang's pools of token rows and its request table (`srt/mem_cache/memory_pool.py` MHATokenToKVPool, ReqToTokenPool).

A row of the request table names a slot a token; pages are found in it and verified, since a page size that is not the
allocator's reads other requests' tokens. Page 0 is SGLang's dummy: nothing is imported there.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from hurray_wire import indices
from hurray_wire.arrays import as_array, is_torch
from hurray_wire.engines.axes import SGLANG, PageView, on_device, page_views
from hurray_wire.engines.inbound import Landing, check_pair, write_pages
from hurray_wire.engines.outbound import pair_of
from hurray_wire.engines.tables import LiveTable, as_int32, check_ids, on_host, refused, table_of
from hurray_wire.errors import Code, InvalidDescriptorError
from hurray_wire.indices import Int64Array
from hurray_wire.tensor import BlockPagedTensor

__all__ = ["from_sglang", "to_sglang"]

_POOLS = ("key_pool", "value_pool")


def from_sglang(
    key_pool: Any,
    value_pool: Any,
    req_to_token: Any,
    req_ids: Any,
    seq_lens: Any,
    *,
    page_size: int,
    layer_index: int | None = None,
) -> tuple[BlockPagedTensor, BlockPagedTensor]:
    """The keys and values that requests have in one layer's pools of SGLang; live pages, copied once.

    Args:
        key_pool, value_pool: `[slots, heads, dim]`, slots a multiple of page_size; dims may differ. SGLang keeps fp8
            as uint8: view it as its type (`get_key_buffer` does). On a GPU: **not tested**, as in `from_vllm`.
        req_to_token: `[requests, max_context_len]` slots.
        req_ids: which rows, one a sequence.
        seq_lens: tokens a sequence.
        page_size: the allocator's (1 unless set).
        layer_index: the layer.

    Raises:
        InvalidDescriptorError: `rank`, `shape`, `seq_lens_count`, `seq_lens_range`; `page_id`, `negative_index` at
            `req_ids[...]` or `req_to_token[row, token]`, also where slots do not lie in whole pages.
        UnsupportedError: `dtype`.

    Example:
        >>> import numpy as np
        >>> pool = np.arange(12, dtype=np.float32).reshape(12, 1, 1)       # 6 pages of 2 slots
        >>> req_to_token = np.array([[0, 0, 0], [8, 9, 4]], np.int32)      # row 0 is a dummy
        >>> key, value = from_sglang(pool, -pool, req_to_token, [1], [3], page_size=2)
        >>> key.gather(0).ravel().tolist(), value.page_pool.shape
        ([8.0, 9.0, 4.0], (2, 2, 1, 1))
    """
    views = _views(key_pool, value_pool, page_size)
    table = _table(req_to_token, req_ids, seq_lens, views[0].num_pages, views[0].inner[0])
    return pair_of(views, table, layer_index=layer_index)


def _views(key_pool: Any, value_pool: Any, page_size: int) -> tuple[PageView, PageView]:
    keys, values = (_paged(pool, page_size, name) for pool, name in zip((key_pool, value_pool), _POOLS, strict=True))
    if keys.shape[0] != values.shape[0]:
        message = f"has {values.shape[0]} pages, key_pool has {keys.shape[0]}"
        raise InvalidDescriptorError(message, code=Code.NUM_PAGES, where="value_pool")
    return page_views((keys, values), SGLANG)


def _paged(pool: Any, page_size: int, name: str) -> Any:
    """Rows as pages, a view (`srt/mem_cache/layout/paged_view.py`)."""
    array = pool if on_device(pool) else as_array(pool)
    page_size, shape = operator.index(page_size), tuple(array.shape)
    if len(shape) != 3:
        message = (
            f"has shape {shape}, must be [slots, heads, dim]: paged pools go through from_vllm with axes 'PHSD', "
            "latents through from_vllm_latent"
        )
        raise InvalidDescriptorError(message, code=Code.RANK, where=name)
    if page_size < 1 or shape[0] % page_size:
        message = f"{shape[0]} slots are no whole pages of {page_size}"
        raise InvalidDescriptorError(message, code=Code.PAGE_SIZE, where=name)
    return array.reshape(shape[0] // page_size, page_size, *shape[1:])


def _table(req_to_token: Any, req_ids: Any, seq_lens: Any, num_pages: int, page_size: int) -> LiveTable:
    lens = indices.as_indices(on_host(seq_lens), "seq_lens")
    rows = indices.as_integers(on_host(req_ids), "req_ids")
    if lens.size != rows.size:
        message = f"has {lens.size} entries, req_ids {rows.size}"
        raise InvalidDescriptorError(message, code=Code.SEQ_LENS_COUNT, where="seq_lens")
    slots = _slots(req_to_token, rows, lens)
    lens = lens.astype(np.int64)
    starts = indices.starts_of(lens)
    seq = np.repeat(np.arange(lens.size), lens)
    token = np.arange(starts[-1]) - starts[seq]

    def place(at: int) -> str:
        return f"req_to_token[{rows[seq[at]]}, {token[at]}]"

    check_ids(slots, num_pages * page_size, place)
    first = starts[seq] + token // page_size * page_size
    stray = slots != slots[first] // page_size * page_size + token % page_size
    if stray.any():
        found = indices.offence(stray, slots)
        message = f"is {found.value}, which is not the place of token {token[found.at]} in a page of {page_size}"
        raise refused(Code.PAGE_ID, place(found.at), message, found)
    ids = slots[token % page_size == 0].astype(np.int64) // page_size
    return LiveTable(ids, indices.starts_of(indices.live_counts(lens, page_size)), lens)


def _slots(req_to_token: Any, rows: Any, lens: Any) -> Int64Array:
    """The slots of all tokens, sequence by sequence; of the request table only those rows are fetched."""
    shape = tuple(req_to_token.shape) if is_torch(req_to_token) else np.shape(req_to_token)
    if len(shape) != 2:
        message = f"has shape {shape}, must be [requests, max_context_len]"
        raise InvalidDescriptorError(message, code=Code.RANK, where="req_to_token")
    check_ids(rows, shape[0], lambda at: f"req_ids[{at}]")
    over = lens > shape[1]
    if over.any():
        found = indices.offence(over, lens)
        message = f"is {found.value}, a row of req_to_token has {shape[1]} tokens"
        raise refused(Code.SEQ_LENS_RANGE, f"seq_lens[{found.at}]", message, found)
    if on_device(req_to_token):
        width = int(lens.max(initial=0))
        req_to_token, rows = req_to_token[rows.tolist(), :width].cpu(), np.arange(rows.size)
    table = as_array(req_to_token)
    if table.dtype.kind not in "iu":
        raise InvalidDescriptorError(f"holds {table.dtype}", code=Code.NOT_INTEGER, where="req_to_token")
    counts = lens.astype(np.int64)
    starts = indices.starts_of(counts)
    nth = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    return table[np.repeat(rows.astype(np.int64), counts), nth].astype(np.int64)


def to_sglang(
    key: BlockPagedTensor, value: BlockPagedTensor, *, key_pool: Any, value_pool: Any, page_ids: Any
) -> npt.NDArray[np.int32]:
    """Write a pair's pages into one layer's pools of SGLang; pages with tokens, copied once.

    Args:
        key, value: one layer's, over the same tables.
        key_pool, value_pool: as in `from_sglang`, of any strides; uint8 takes float8.
        page_ids: the receiver's page for each page of the tensors, `num_pages` of them, all different, none of them
            0 (SGLang's dummy, `srt/mem_cache/allocator/paged.py`). Compact the tensors first if many are unused.

    Returns:
        Rows for req_to_token: int32 `[num_seqs, longest seq_len]`, the slot of every token, 0 behind the last.

    Raises:
        InvalidDescriptorError: no pair; `page_id`, `negative_index`, `num_pages` (at `page_ids[...]`); pools of
            other `shape`, `page_size`, `rank`.
        UnsupportedError: as `to_vllm`.

    Example:
        >>> import numpy as np
        >>> pool = np.arange(12, dtype=np.float32).reshape(12, 1, 1)
        >>> key, value = from_sglang(pool, -pool, np.array([[8, 9, 4]]), [0], [3], page_size=2)
        >>> mine = np.zeros((8, 1, 1), np.float32), np.zeros((8, 1, 1), np.float32)
        >>> to_sglang(key, value, key_pool=mine[0], value_pool=mine[1], page_ids=[3, 1]).tolist()
        [[6, 7, 2]]
        >>> mine[0].ravel().tolist()
        [0.0, 0.0, 4.0, 5.0, 0.0, 0.0, 8.0, 9.0]
    """
    check_pair(key, value)
    views = _views(key_pool, value_pool, key.page_size)
    chosen = _page_ids(page_ids, key.num_pages, views[0].num_pages)
    own = table_of(key)
    sources = indices.first_use(own.ids)[0].astype(np.int64)
    table = own._replace(ids=chosen[own.ids])
    slots = indices.token_slots(table.ids, table.seq_ptr, table.seq_lens, key.page_size)
    entries = as_int32(slots, lambda at: f"req_to_token, token {at} of the batch")
    write_pages((key, value), views, Landing(sources, chosen[sources], table), _POOLS)
    rows = np.zeros((table.seq_lens.size, int(table.seq_lens.max(initial=0))), np.int32)
    rows[np.arange(rows.shape[1]) < table.seq_lens[:, None]] = entries
    return rows


def _page_ids(page_ids: Any, count: int, num_pages: int) -> Int64Array:
    ids = indices.as_integers(on_host(page_ids), "page_ids")
    if ids.size != count:
        message = f"has {ids.size} entries, the tensors have {count} pages"
        raise InvalidDescriptorError(message, code=Code.NUM_PAGES, where="page_ids")
    check_ids(ids, num_pages, lambda at: f"page_ids[{at}]")
    dummy = ids == 0
    if dummy.any():
        found = indices.offence(dummy, ids)
        message = "is 0, SGLang's dummy page, where padding is written"
        raise refused(Code.PAGE_ID, f"page_ids[{found.at}]", message, found)
    order = np.argsort(ids, kind="stable")
    again = np.zeros(ids.size, np.bool_)
    again[order[1:]] = ids[order[1:]] == ids[order[:-1]]
    if again.any():
        found = indices.offence(again, ids)
        raise refused(Code.PAGE_ID, f"page_ids[{found.at}]", f"is {found.value} a second time", found)
    return ids.astype(np.int64)
