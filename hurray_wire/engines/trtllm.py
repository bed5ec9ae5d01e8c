"""TensorRT-LLM's pool of all layers (`tensorrt_llm/_torch/pyexecutor/resource_manager.py` KVCacheManager).

A page's bytes are heads-first, whatever `get_buffers` calls them: its "NHD" is the same memory under another shape,
which is how issue 6507 read keys as garbage. Heads and page size are therefore the caller's to say.
"""

from __future__ import annotations

import operator
from typing import Any

from hurray_wire.arrays import as_array
from hurray_wire.engines.axes import TRTLLM, on_device, page_views
from hurray_wire.engines.inbound import Placed, check_pair, landing, write_pages
from hurray_wire.engines.outbound import pair_of
from hurray_wire.engines.tables import live_table
from hurray_wire.errors import Code, InvalidDescriptorError
from hurray_wire.tensor import BlockPagedTensor

__all__ = ["from_trtllm", "to_trtllm"]


def from_trtllm(
    pool: Any, block_table: Any, seq_lens: Any, *, layer: int, num_heads: int, page_size: int
) -> tuple[BlockPagedTensor, BlockPagedTensor]:
    """The keys and values that a batch has in one layer of TensorRT-LLM's pool; live pages, copied once.

    Args:
        pool: `[pages, layers, 2, page_size * heads * dim]`, interior heads, slots, dims. fp8 pools that come as
            uint8 are to be viewed as their type. On a GPU: **not tested**, as in `from_vllm`.
        block_table: rows of page ids of this pool, as `get_batch_cache_indices` gives them: padded, or lists. The
            kernels' block offsets count layers and key/value planes, too, and are no page ids.
        seq_lens: tokens a sequence.
        layer: the position along the pool's layers, and the tensors' layer_index.
        num_heads, page_size: what the last axis is made of (`num_kv_heads_per_layer`, `tokens_per_block`).

    Raises:
        InvalidDescriptorError: `rank`, `shape`, `layer_index`; tables as in `from_vllm`.
        UnsupportedError: `dtype`.

    Example:
        >>> import numpy as np
        >>> pool = np.zeros((6, 3, 2, 4 * 2 * 8), np.float16)              # pages of 4 tokens, 2 heads of 8
        >>> key, value = from_trtllm(pool, [[5, 1]], [7], layer=2, num_heads=2, page_size=4)
        >>> key.page_pool.shape, key.layer_index
        ((2, 4, 2, 8), 2)
    """
    views = page_views(_interior(pool, num_heads, page_size), TRTLLM, layer=layer)
    table = live_table(block_table, seq_lens, num_pages=views[0].num_pages, page_size=page_size)
    return pair_of(views, table, layer_index=layer)


def to_trtllm(key: BlockPagedTensor, value: BlockPagedTensor, *, pool: Any, layer: int, block_table: Any) -> Placed:
    """Write a pair's pages into one layer of TensorRT-LLM's pool; pages with tokens, copied once.

    Args:
        key, value: one layer's, over the same tables; `layer` says where they go, not their layer_index.
        pool: as in `from_trtllm`, of any strides; uint8 takes float8.
        layer: the position along the pool's layers.
        block_table: a row of the pool's page ids a sequence, as many as hold its tokens.

    Returns:
        (pool, block_table, seq_lens), as `to_vllm`.

    Raises:
        InvalidDescriptorError: `rank`, `shape`, `layer_index`; as `to_vllm`.
        UnsupportedError: as `to_vllm`.

    Example:
        >>> import numpy as np
        >>> pool = np.arange(6 * 3 * 2 * 64, dtype=np.float32).reshape(6, 3, 2, 64)
        >>> key, value = from_trtllm(pool, [[5, 1]], [7], layer=2, num_heads=2, page_size=4)
        >>> theirs, block_table, seq_lens = to_trtllm(key, value, pool=pool.copy() * 0, layer=0, block_table=[[3, 4]])
        >>> bool((theirs[3, 0] == pool[5, 2]).all()), block_table.tolist()
        (True, [[3, 4]])
    """
    check_pair(key, value)
    views = page_views(_interior(pool, key.num_heads, key.page_size), TRTLLM, layer=layer)
    where = landing(key, block_table, views[0].num_pages)
    write_pages((key, value), views, where)
    return (pool, *where.rows())


def _interior(pool: Any, num_heads: int, page_size: int) -> Any:
    """The pool with its last axis taken apart: a view."""
    array = pool if on_device(pool) else as_array(pool)
    shape = tuple(array.shape)
    if len(shape) != 4 or shape[2] != 2:
        message = f"has shape {shape}, must be [pages, layers, 2, page_size * heads * dim]"
        raise InvalidDescriptorError(message, code=Code.RANK, where="pool")
    num_heads, page_size = operator.index(num_heads), operator.index(page_size)
    if num_heads < 1 or page_size < 1 or shape[3] % (num_heads * page_size):
        message = f"has {shape[3]} elements a page, no whole number for {num_heads} heads and {page_size} tokens"
        raise InvalidDescriptorError(message, code=Code.SHAPE, where="pool")
    return array.reshape(*shape[:3], num_heads, page_size, shape[3] // (num_heads * page_size))
