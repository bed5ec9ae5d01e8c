"""From an engine's pages to tensors: which pages, one copy of them, one tensor a role.

Every `from_*` ends here. What an engine's tables and axis orders mean is known before; what a tensor must obey is
checked by the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hurray_wire import indices
from hurray_wire.arrays import as_array, as_bytes, is_torch
from hurray_wire.dtypes import Dtype
from hurray_wire.engines.axes import PageView
from hurray_wire.engines.copying import PageCopy, copy_pages
from hurray_wire.engines.device import fetch_pages
from hurray_wire.engines.storage import per_tensor, storage_dtype
from hurray_wire.engines.tables import LiveTable
from hurray_wire.indices import Int64Array
from hurray_wire.memory import allocated
from hurray_wire.quantization import PerTensorAffine
from hurray_wire.tensor import BlockPagedTensor

Array = npt.NDArray[Any]


class Role(NamedTuple):
    """What of a cache becomes one tensor."""

    kv_role: str
    view: PageView
    dtype: Dtype
    quantization: PerTensorAffine | None = None
    metadata: Mapping[str, Any] | None = None


def pair_of(
    views: Sequence[PageView],
    table: LiveTable,
    *,
    layer_index: int | None,
    dtype: Any = None,
    scales: Sequence[Any] = (None, None),
    pages: str = "live",
    outs: Sequence[Any] | None = None,
) -> tuple[BlockPagedTensor, BlockPagedTensor]:
    """The pair (key, value) of two views of one page size; `dtype` and `scales` as the engine says them."""
    roles = []
    for kv_role, view, scale in zip(("key", "value"), views, scales, strict=True):
        found = storage_dtype(view.array.dtype, dtype)
        roles.append(Role(kv_role, view, found, per_tensor(scale, found, f"{kv_role}_scale")))
    key, value = tensors_of(roles, table, layer_index=layer_index, pages=pages, outs=outs)
    return key, value


def tensors_of(
    roles: Sequence[Role], table: LiveTable, *, layer_index: int | None, pages: str, outs: Sequence[Any] | None = None
) -> tuple[BlockPagedTensor, ...]:
    """A tensor a role, all over the same tables.

    Args:
        pages: "live" copies the pages that hold tokens, in first-use order; "all" keeps the pool and its ids, as a
            view where the order allows.
        outs: a writable contiguous buffer a role that the pages are copied into, from its first byte on.

    Raises:
        ValueError: another `pages`; a buffer that does not fit.
    """
    if pages not in ("live", "all"):
        raise ValueError(f"pages must be 'live' or 'all', not {pages!r}")
    ids, entries = indices.first_use(table.ids) if pages == "live" else (None, table.ids)
    pools = _pools([role.view for role in roles], ids, outs)
    return tuple(
        BlockPagedTensor(
            pool,
            block_table=entries,
            seq_ptr=table.seq_ptr,
            seq_lens=table.seq_lens,
            kv_role=role.kv_role,
            layer_index=layer_index,
            dtype=role.dtype,
            quantization=role.quantization,
            metadata=role.metadata,
        )
        for role, pool in zip(roles, pools, strict=True)
    )


def _pools(views: Sequence[PageView], ids: Int64Array | None, outs: Sequence[Any] | None) -> list[Array]:
    if outs is not None and len(outs) != len(views):
        raise ValueError(f"out must be {len(views)} buffers, one a role, not {len(outs)}")
    count = views[0].num_pages if ids is None else ids.size
    pools, copies = [], []
    for view, buffer in zip(views, outs if outs is not None else [None] * len(views), strict=True):
        if ids is None and buffer is None and view.is_pool:
            pools.append(view.array)
            continue
        pool = _room((count, *view.inner), view.numpy, buffer)
        if is_torch(view.array):
            fetch_pages(view.array, ids, view.split(pool))
        else:
            copies.append(PageCopy(view.array, view.split(pool)))
        pools.append(pool)
    copy_pages(copies, count, ids)
    return pools


def _room(shape: tuple[int, ...], dtype: np.dtype[Any], buffer: Any) -> Array:
    """Memory for a pool: aligned and new, or the caller's."""
    nbytes = math.prod(shape) * dtype.itemsize
    if buffer is None:
        memory = allocated(nbytes, None)
    else:
        memory = as_bytes(as_array(buffer) if is_torch(buffer) else buffer)
        if memory.size < nbytes or not memory.flags.writeable:
            kind = "writable" if memory.flags.writeable else "read-only"
            raise ValueError(f"out must have {nbytes} writable bytes for {shape}, has {memory.size}, {kind}")
    return memory[:nbytes].view(dtype).reshape(shape)
