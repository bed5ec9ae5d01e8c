"""vLLM's caches: every era of the layer's shape, latents, padded block tables (vLLM 0.33 `vllm/v1/`).

The cache of one layer, one group's block table and the batch's seq_lens make a pair of tensors; and back. What only a
dtype's name tells apart is decided in `storage`, axis orders in `axes`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hurray_wire.arrays import as_array
from hurray_wire.dtypes import Dtype
from hurray_wire.engines.axes import Axes, PageView, on_device, page_views
from hurray_wire.engines.inbound import Placed, landing, place_pair, write_pages
from hurray_wire.engines.outbound import Role, pair_of, tensors_of
from hurray_wire.engines.storage import check_importable, latent_row, per_tensor, storage_dtype
from hurray_wire.engines.tables import live_table
from hurray_wire.errors import Code, InvalidDescriptorError, UnsupportedError
from hurray_wire.tensor import BlockPagedTensor

__all__ = ["from_vllm", "from_vllm_latent", "to_vllm", "to_vllm_latent"]


def from_vllm(
    cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    axes: Axes,
    key_dim: int | None = None,
    layer_index: int | None = None,
    dtype: Any = None,
    key_scale: Any = None,
    value_scale: Any = None,
    pages: str = "live",
    out: Any = None,
) -> tuple[BlockPagedTensor, BlockPagedTensor]:
    """The keys and values that a batch has in one layer's cache of vLLM.

    Pages that hold tokens are copied once, in first-use order, pages shared by sequences once; nothing else of the
    cache is read. What a row names behind `ceil(seq_len / page_size)` pages is ignored: stale ids, -1, blocks
    allocated ahead. Block 0 is a block like others: a sliding-window group has it in place of blocks that have left
    the window, and such leading blocks are the caller's to cut off (see `docs/engines.md`).

    Since vLLM 0.28 a layer is a logical `[blocks, heads, block_size, key_dim + value_dim]` view, `VLLM_PACKED`,
    whatever its strides (`vllm/v1/kv_cache_layout.py`, `kv_cache_interface.py` create_kv_cache_views); before,
    `VLLM_KV_FIRST` or `VLLM_BLOCKS_FIRST`. CPU_ATTN's blocks are not what that shape says: see `VLLM_CPU`.

    Args:
        cache: one array, or a pair (keys, values) where `axes` has neither 2 nor C. NumPy, ml_dtypes or torch. A
            torch tensor on a GPU has its live pages selected there and fetched once (**not tested on a GPU**).
        block_table: `[num_seqs, blocks]` integers, or a list of rows; ids count the pages of `cache`.
        seq_lens: tokens a sequence.
        axes: the order of the cache's axes, in letters; never guessed from a shape.
        key_dim: where the C axis splits; by default in the middle.
        layer_index: the layer; where `axes` has L, also its position there.
        dtype: what the bytes are, where the array does not say: vLLM keeps fp8 as uint8. Names of vLLM's
            `--kv-cache-dtype` count, "fp8" as float8_e4m3 (on AMD gfx94x it is a fnuz type, which is refused).
        key_scale, value_scale: the layer's `_k_scale` and `_v_scale`: value = stored * scale.
        pages: "live", or "all" for the whole pool with its own ids: a view where the order allows (no X, CPU).
        out: two writable contiguous buffers (of pinned memory, say) that take the pages instead of new memory.

    Returns:
        (key, value), each `[pages, page_size, heads, dim]`.

    Raises:
        TypeError, ValueError: `axes`, `pages`, `out` or `key_dim` are not of this cache.
        InvalidDescriptorError: a live entry that is negative or beyond the pool (`negative_index`, `page_id`, at
            `block_table[sequence, position]`); a row shorter than its seq_len (`seq_lens_range`); `seq_lens_count`;
            `quantization_scale`, `quantization_storage`; `layer_index`; `shape`.
        UnsupportedError: a dtype that cannot be carried (`dtype`, `layout`, `scheme`).

    Example:
        >>> import numpy as np
        >>> cache = np.zeros((8, 2, 16, 128), np.float16)                  # blocks, heads, block_size, keys|values
        >>> key, value = from_vllm(cache, [[5, 2, -1]], [20], axes="PHSC", layer_index=7)
        >>> key.page_pool.shape, key.block_table.tolist(), value.kv_role, value.layer_index
        ((2, 16, 2, 64), [0, 1], 'value', 7)
    """
    views = page_views(cache, axes, key_dim=key_dim, layer=layer_index)
    table = live_table(block_table, seq_lens, num_pages=views[0].num_pages, page_size=views[0].inner[0])
    scales = (key_scale, value_scale)
    return pair_of(views, table, layer_index=layer_index, dtype=dtype, scales=scales, pages=pages, outs=out)


def from_vllm_latent(
    cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    layer_index: int | None = None,
    dtype: Any = None,
    scale: Any = None,
    pages: str = "live",
    out: Any = None,
) -> BlockPagedTensor:
    """The latent rows (MLA) that a batch has in one layer's cache of vLLM, as one fused tensor of one head.

    Source: vLLM `vllm/model_executor/layers/attention/mla_attention.py`. Rows of values and scales of several types,
    a token each (`fp8_ds_mla` of 656 or 528 bytes, `nvfp4_ds_mla` of 352), travel as uint8, uninterpreted, with
    metadata content "opaque"; other latents have content "latent".

    Args:
        cache: `[blocks, block_size, dim]`, or with the head axis of extent 1 as second or third.
        block_table, seq_lens, layer_index, pages: as in `from_vllm`.
        dtype: as in `from_vllm`; "uint8" for rows as they are, or vLLM's name of them.
        scale: the layer's `_k_scale`: value = stored * scale.
        out: one writable contiguous buffer that takes the pages.

    Raises:
        InvalidDescriptorError: as `from_vllm`; `rank`, `shape`.
        UnsupportedError: a dtype that cannot be carried; `layout`, for rows whose scales stand elsewhere in the page.

    Example:
        >>> import numpy as np
        >>> latent = from_vllm_latent(np.zeros((3, 4, 576), np.float16), [[0, 1, 2]], [10])
        >>> latent.page_pool.shape, latent.kv_role, latent.metadata
        ((3, 4, 1, 576), 'fused', {'content': 'latent'})
    """
    view = _latent_view(cache if on_device(cache) else as_array(cache))
    name = latent_row(dtype, view.inner[2] * view.numpy.itemsize)
    found = storage_dtype(view.array.dtype, dtype if name is None else "uint8")
    metadata = {"content": "opaque" if found is Dtype.of("uint8") else "latent"}
    if name is not None:
        metadata["vllm.cache_dtype"] = name
    table = live_table(block_table, seq_lens, num_pages=view.num_pages, page_size=view.inner[0])
    role = Role("fused", view, found, per_tensor(scale, found, "scale"), metadata)
    outs = None if out is None else [out]
    return tensors_of([role], table, layer_index=layer_index, pages=pages, outs=outs)[0]


def _latent_view(array: Any) -> PageView:
    """Rows as pages of one head: an axis of extent 1 says nothing, so that its place decides nothing."""
    if array.ndim == 3:
        return PageView(array[:, :, None, :], "PSHD")
    if array.ndim != 4:
        message = f"has shape {tuple(array.shape)}, must be [blocks, block_size, dim]"
        raise InvalidDescriptorError(message, code=Code.RANK, where="cache")
    if array.shape[2] == 1:
        return PageView(array, "PSHD")
    if array.shape[1] == 1:
        return PageView(array.swapaxes(1, 2), "PSHD")
    message = f"has shape {tuple(array.shape)}: latents have one head, so the second or the third axis is 1"
    raise InvalidDescriptorError(message, code=Code.SHAPE, where="cache")


def to_vllm(
    key: BlockPagedTensor, value: BlockPagedTensor, *, axes: Axes, pool: Any = None, block_table: Any = None
) -> Placed:
    """Write a pair's pages into a cache of vLLM, and give the tables that name them there.

    Pages with tokens are copied once; pages that sequences share stay shared where the rows say so. Scales are not
    in the pool: hand `key.quantization.scale` to the layer.

    Args:
        key, value: one layer's, over the same tables (vLLM `vllm/v1/kv_cache_interface.py`).
        axes: the order of the cache to write; the dims of keys and values may differ with C.
        pool: the cache to write into, of any strides (a torch tensor on a GPU: **not tested**); uint8 takes float8.
            With L in `axes`, the tensors' layer. None makes a new one, zero where no page lands. It must not be the
            tensors' own memory.
        block_table: a row of the receiver's ids a sequence, as many as hold its tokens; block 0 is vLLM's null
            block, so an allocator starts at 1. None keeps the tensors' ids.

    Returns:
        (cache, block_table, seq_lens): the pool given or made, rows padded with 0 and lengths, both int32.

    Raises:
        TypeError, ValueError: `axes`, or a pool that is not of them.
        InvalidDescriptorError: no pair; a pool of another `page_size` or `shape`; rows as in `from_vllm`, or two
            different pages sent to one place (`page_id`).
        UnsupportedError: `dtype`, `scheme`, `packed_pool`, `index_type`, `seq_lens_unknown`.

    Example:
        >>> import numpy as np
        >>> cache = np.arange(8 * 2 * 4 * 6, dtype=np.float32).reshape(8, 2, 4, 6)
        >>> key, value = from_vllm(cache, [[5, 2]], [7], axes="PHSC")
        >>> theirs, block_table, seq_lens = to_vllm(key, value, axes="2PSHD", block_table=[[1, 3]])
        >>> theirs.shape, block_table.tolist(), seq_lens.tolist()
        ((2, 4, 4, 2, 3), [[1, 3]], [7])
        >>> theirs[0, 3, 0, 1].tolist() == cache[2, 1, 0, :3].tolist()
        True
    """
    cache, where = place_pair(key, value, axes=axes, pool=pool, block_table=block_table)
    return (cache, *where.rows())


def to_vllm_latent(fused: BlockPagedTensor, *, pool: Any = None, block_table: Any = None) -> Placed:
    """Write latent pages into a cache of vLLM: the inverse of `from_vllm_latent`, arguments as in `to_vllm`.

    Args:
        fused: a tensor of one head; opaque rows go into a uint8 pool.
        pool: `[blocks, block_size, dim]`, or with a head axis of extent 1; None makes one.
        block_table: a row of the receiver's ids a sequence; None keeps the tensor's.

    Returns:
        (cache, block_table, seq_lens).

    Raises:
        InvalidDescriptorError: `kv_role`; as `to_vllm`.
        UnsupportedError: `layout`, for keys and values side by side; as `to_vllm`.

    Example:
        >>> import numpy as np
        >>> latent = from_vllm_latent(np.ones((3, 4, 576), np.float16), [[2, 1]], [5])
        >>> cache, block_table, seq_lens = to_vllm_latent(latent, block_table=[[1, 2]])
        >>> cache.shape, block_table.tolist(), float(cache[0].max())
        ((3, 4, 576), [[1, 2]], 0.0)
    """
    check_importable(fused)
    if fused.kv_role != "fused" or fused.num_heads != 1:
        message = f"is {fused.kv_role!r} of {fused.num_heads} heads, a latent is 'fused' of one"
        raise InvalidDescriptorError(message, code=Code.KV_ROLE, where="layout.kv_role")
    if (fused.metadata or {}).get("content") == "kv":
        message = "holds keys and values side by side: split it, and use to_vllm"
        raise UnsupportedError(message, code=Code.LAYOUT, where="metadata.content")
    if pool is None:
        where = landing(fused, block_table, None)
        count = fused.num_pages if block_table is None else int(where.targets.max(initial=-1)) + 1
        pool = np.zeros((count, fused.page_size, fused.head_dim), fused.dtype.numpy)
        view = _latent_view(pool)
    else:
        view = _latent_view(pool if on_device(pool) else as_array(pool))
        where = landing(fused, block_table, view.num_pages)
    write_pages((fused,), (view,), where)
    return (pool, *where.rows())
