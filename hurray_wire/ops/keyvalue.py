"""Keys and values side by side in head_dim: split a fused tensor, fuse two."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from hurray_wire.errors import Difference, MismatchError
from hurray_wire.ops import derived as d
from hurray_wire.ops.derived import derived, per_channel, united, whole_pages
from hurray_wire.ops.joining import element_pool, joined
from hurray_wire.tensor import BlockPagedTensor


def split_fused(t: BlockPagedTensor, key_dim: int | None = None) -> tuple[BlockPagedTensor, BlockPagedTensor]:
    """A fused tensor `[..., key_dim + value_dim]` as its key and its value tensor: views of the same pool.

    Both keep tables, layer, metadata (without key_dim), per-tensor constants and per-block scales; per-channel scales
    along head_dim are split. Of a 1-D pool both are copies, as the format packs them. Statistics are dropped.

    Args:
        key_dim: elements of head_dim that are the key's, the first ones; None takes metadata `key_dim`.

    Raises:
        TypeError: key_dim is neither given nor in the metadata.
        ValueError: key_dim is more than head_dim, or negative.
        MismatchError: the tensor is not fused.
        UnsupportedError: `layout`, for a latent; `packed_pool`, where a key or value ends inside a byte; `scheme`.
        InvalidDescriptorError: the tensor has violations.

    Example:
        >>> pool = np.arange(12, dtype=np.float16).reshape(1, 2, 1, 6)
        >>> t = BlockPagedTensor(pool, block_table=[0], seq_ptr=[0, 1], seq_lens=[2], kv_role="fused")
        >>> key, value = split_fused(t, 4)
        >>> key.kv_role, key.page_pool[0, 1, 0].tolist(), value.page_pool[0, 1, 0].tolist()
        ('key', [6.0, 7.0, 8.0, 9.0], [10.0, 11.0])
    """
    whole_pages(t)
    if t.kv_role != "fused":
        raise MismatchError([Difference("kv_role", t.kv_role, "fused")])
    d.no_latent(t, "splitting")
    d.no_float_blocks(t, "splitting")
    metadata = dict(t.parts.metadata or {})
    told = metadata.pop("key_dim", None)
    if key_dim is None and told is None:
        raise TypeError("key_dim is needed: the tensor's metadata does not say where its head_dim splits")
    at = operator.index(told if key_dim is None else key_dim)
    if not 0 <= at <= t.head_dim:
        raise ValueError(f"key_dim {at} is not from 0 to head_dim {t.head_dim}")
    return _side(t, "key", 0, at, metadata), _side(t, "value", at, t.head_dim, metadata)


def _side(t: BlockPagedTensor, role: str, start: int, stop: int, metadata: dict[str, Any]) -> BlockPagedTensor:
    pool = element_pool(t)
    bits = t.descriptor.bit_width
    if t.page_pool.ndim == 4:
        side = pool[..., start:stop]
    elif start * bits % 8 or stop * bits % 8 or start == stop:
        raise d.packed_pool(f"elements {start} to {stop} of {t.dtype.name} end inside bytes, or are none")
    else:
        side = np.ascontiguousarray(pool[..., start * bits // 8 : stop * bits // 8]).reshape(-1)
    return derived(
        t,
        page_pool=side,
        head_dim=stop - start,
        kv_role=role,
        **{name: a[start:stop] for name, a in per_channel(t, 2).items()},
        metadata=metadata,
        statistics=None,
    )


def fuse(key: BlockPagedTensor, value: BlockPagedTensor) -> BlockPagedTensor:
    """Key and value of a layer as one fused tensor, `[..., key_dim + value_dim]`: one copy; metadata says key_dim.

    Equal block tables are kept, with every page of the pools; tables with other ids are brought together as
    `merge_heads` does. head_dim may differ; all else, constants too, must be the same, but per-channel scales along
    head_dim, which are joined. Statistics are dropped.

    Raises:
        MismatchError: they are not a key and a value of one layer and batch, or not of one type.
        UnsupportedError: `packed_pool`, `scheme` (NF4, MXFP).
        InvalidDescriptorError: a tensor has violations.

    Example:
        >>> pool = np.arange(8, dtype=np.float16).reshape(1, 2, 1, 4)
        >>> key = BlockPagedTensor(pool, block_table=[0], seq_ptr=[0, 1], seq_lens=[2])
        >>> fused = fuse(key, key.replace(page_pool=pool[..., :1], kv_role="value"))
        >>> fused.page_pool[0, 1, 0].tolist(), fused.metadata
        ([4.0, 5.0, 6.0, 7.0, 4.0], {'key_dim': 4})
    """
    sides = (key, value)
    whole_pages(*sides)
    roles = zip(("key", "value"), sides, strict=True)
    wrong = [Difference(f"{role}.kv_role", t.kv_role, role) for role, t in roles if t.kv_role != role]
    if wrong:
        raise MismatchError(wrong)
    names = ("dtype", "page_size", "num_heads", "layer_index", "quantization", "composite")
    d.agree(sides, names)
    metadata = united(sides, apart=("key_dim",)) | {"key_dim": key.head_dim}
    return derived(key, **joined(sides, 3), kv_role="fused", metadata=metadata, statistics=None)
