"""FlashInfer's paged caches: indptr, indices, last-page lengths (`docs/tutorials/kv_layout.rst`, `flashinfer/page.py`).

The tables are this format's own but for the counts: FlashInfer says how full each sequence's last page is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hurray_wire import indices as index_maths
from hurray_wire.engines.axes import Axes, page_views
from hurray_wire.engines.inbound import place_pair
from hurray_wire.engines.outbound import pair_of
from hurray_wire.engines.tables import LiveTable, as_int32, check_ids, check_offsets, on_host, refused
from hurray_wire.errors import Code, InvalidDescriptorError
from hurray_wire.indices import IntArray
from hurray_wire.tensor import BlockPagedTensor

__all__ = ["from_flashinfer", "to_flashinfer"]

Int32Array = npt.NDArray[np.int32]


def from_flashinfer(
    cache: Any,
    indptr: Any,
    indices: Any,
    last_page_len: Any,
    *,
    axes: Axes,
    layer_index: int | None = None,
    dtype: Any = None,
    pages: str = "live",
) -> tuple[BlockPagedTensor, BlockPagedTensor]:
    """The keys and values of a batch as FlashInfer's wrappers take them.

    A sequence has `(pages - 1) * page_size + last_page_len` tokens, none without pages
    (`flashinfer/page.py` get_seq_lens). Every page of a row counts as live.

    Args:
        cache: `[pages, 2, page_size, heads, dim]` (`FLASHINFER_NHD`), `[pages, 2, heads, page_size, dim]`
            (`FLASHINFER_HND`), or a pair of arrays without the 2. On a GPU: **not tested**, as in `from_vllm`.
        indptr: num_seqs + 1 offsets into `indices`.
        indices: page ids; entries behind `indptr[-1]` (of buffers kept for CUDA graphs) are ignored.
        last_page_len: tokens in each sequence's last page, 1 to page_size; not looked at without pages.
        axes, layer_index, dtype, pages: as in `from_vllm`.

    Raises:
        TypeError, ValueError: `axes`, `pages`.
        InvalidDescriptorError: `seq_ptr_start`, `seq_ptr_order`, `seq_ptr_end` (at `indptr[...]`), `page_id`,
            `negative_index` (at `indices[...]`), `seq_lens_count`, `seq_lens_range` (at `last_page_len[...]`).
        UnsupportedError: a dtype that cannot be carried.

    Example:
        >>> import numpy as np
        >>> cache = np.zeros((5, 2, 4, 2, 8), np.float16)
        >>> key, value = from_flashinfer(cache, [0, 2, 3], [0, 1, 0], [2, 3], axes="P2SHD")
        >>> key.seq_lens.tolist(), key.seq_ptr.tolist(), value.block_table.tolist()
        ([6, 3], [0, 2, 3], [0, 1, 0])
    """
    views = page_views(cache, axes, layer=layer_index)
    offsets = index_maths.as_indices(on_host(indptr), "indptr")
    ids = index_maths.as_integers(on_host(indices), "indices")
    check_offsets(offsets, ids.size, "indptr", "indices")
    ids = ids[: int(offsets[-1])]
    check_ids(ids, views[0].num_pages, lambda at: f"indices[{at}]")
    offsets = offsets.astype(np.int64)
    lens = _seq_lens(np.diff(offsets), last_page_len, views[0].inner[0])
    table = LiveTable(ids.astype(np.int64), offsets, lens)
    return pair_of(views, table, layer_index=layer_index, dtype=dtype, pages=pages)


def _seq_lens(counts: IntArray, last_page_len: Any, page_size: int) -> npt.NDArray[np.int64]:
    last = index_maths.as_integers(on_host(last_page_len), "last_page_len")
    if last.size != counts.size:
        message = f"has {last.size} entries, must have num_seqs {counts.size}"
        raise InvalidDescriptorError(message, code=Code.SEQ_LENS_COUNT, where="last_page_len")
    wrong = (counts > 0) & ((last < 1) | (last > page_size))
    if wrong.any():
        found = index_maths.offence(wrong, last)
        message = f"is {found.value}, but sequence {found.at} has pages: its last one holds 1 to {page_size} tokens"
        raise refused(Code.SEQ_LENS_RANGE, f"last_page_len[{found.at}]", message, found)
    return np.where(counts > 0, (counts - 1) * page_size + last.astype(np.int64), 0)


def to_flashinfer(
    key: BlockPagedTensor, value: BlockPagedTensor, *, axes: Axes
) -> tuple[Any, Int32Array, Int32Array, Int32Array]:
    """A pair as FlashInfer takes it: a new cache of an axis order, page ids as they are, int32 tables.

    Rows end with the last page that holds a token, since FlashInfer counts every page of a row.

    Args:
        key, value: one layer's, over the same tables.
        axes: `FLASHINFER_NHD`, `FLASHINFER_HND`, or of a pair of arrays ("PSHD").

    Returns:
        (cache, indptr, indices, last_page_len); the last is 0 for a sequence without tokens.

    Raises:
        TypeError, ValueError: `axes`.
        InvalidDescriptorError, UnsupportedError: as `to_vllm`.

    Example:
        >>> import numpy as np
        >>> cache = np.ones((5, 2, 4, 2, 8), np.float16)
        >>> key, value = from_flashinfer(cache, [0, 2, 3], [4, 1, 4], [2, 3], axes="P2SHD")
        >>> theirs, indptr, indices, last_page_len = to_flashinfer(key, value, axes="P2HSD")
        >>> theirs.shape, indptr.tolist(), indices.tolist(), last_page_len.tolist()
        ((2, 2, 2, 4, 8), [0, 2, 3], [0, 1, 0], [2, 3])
    """
    cache, where = place_pair(key, value, axes=axes, pool=None, block_table=None)
    lens = where.table.seq_lens
    last = np.where(lens == 0, 0, (lens - 1) % key.page_size + 1)
    indptr = as_int32(where.table.seq_ptr, lambda at: f"indptr[{at}]")
    return cache, indptr, as_int32(where.table.ids, where.table.place), last.astype(np.int32)
