"""One layer of vLLM's cache: tokens of a request out of its blocks, and into others, of another size and order.

What `hurray_wire.engines` converts, for the connector: manager blocks that the kernels see as several, a layer's
scales, and a run of tokens that begins or ends inside a page of the sender's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hurray_wire import ops
from hurray_wire.arrays import as_array
from hurray_wire.engines.axes import VLLM_CPU, Axes, PageView, page_views
from hurray_wire.engines.storage import per_tensor, storage_dtype
from hurray_wire.engines.vllm import from_vllm, from_vllm_latent, to_vllm, to_vllm_latent
from hurray_wire.errors import Code, Difference, InvalidDescriptorError, MismatchError, UnsupportedError
from hurray_wire.indices import Int64Array
from hurray_wire.tensor import BlockPagedTensor

__all__ = ["CPU", "LATENT", "LayerForm", "Scales"]

LATENT, CPU = "latent", "cpu"
Scales = tuple[Any, Any]
Tensors = tuple[BlockPagedTensor, ...]


class LayerForm(NamedTuple):
    """How every layer's cache is read.

    Args:
        axes: the order of its axes in letters (`engines.VLLM_PACKED` and others), "latent" for MLA, "cpu" for
            CPU_ATTN's vector kernels.
        block_size: tokens a block of the scheduler's; the cache's own blocks may be a part of it.
        dtype: vLLM's name of what the bytes are, "auto" for the tensor's own.
        key_dim: where the C axis splits, in the middle by default.
    """

    axes: str
    block_size: int
    dtype: str = "auto"
    key_dim: int | None = None

    def tensors(self, cache: Any, block_ids: Sequence[int], tokens: int, layer: int, scales: Scales) -> Tensors:
        """A pair, or one of latents: the first `tokens` of blocks, copied once.

        Blocks behind them, allocated ahead for tokens to come, are not looked at.

        Raises:
            InvalidDescriptorError, UnsupportedError: as `from_vllm`.
        """
        ids = self._own_ids(cache, block_ids)[None]
        if self.axes == LATENT:
            return (from_vllm_latent(cache, ids, [tokens], layer_index=layer, dtype=self._name(), scale=scales[0]),)
        named: dict[str, Any] = {"dtype": self._name(), "layer_index": layer, "key_dim": self.key_dim}
        named |= {"key_scale": scales[0], "value_scale": scales[1]}
        return from_vllm(self._typed(cache), ids, [tokens], axes=self._axes, **named)

    def place(self, tensors: Tensors, first: int, stop: int, cache: Any, block_ids: Sequence[int]) -> None:
        """Tokens from `first` to `stop` of what `tensors` gave, into whole blocks of another cache.

        Raises:
            MismatchError, InvalidDescriptorError, UnsupportedError: as `to_vllm`.
        """
        ids = self._own_ids(cache, block_ids)
        size = self._page_size(cache)
        cut = [_run(t, first, stop, size) for t in tensors]
        table = ids[None, : -(-(stop - first) // size)]
        if self.axes == LATENT:
            to_vllm_latent(cut[0], pool=cache, block_table=table)
        else:
            to_vllm(cut[0], cut[1], axes=self._axes, pool=self._typed(cache), block_table=table)

    def expected(self, cache: Any) -> dict[str, Any]:
        """What a frame must be to go into a cache."""
        if self.axes == LATENT:
            return {"kv_role": "fused", "num_heads": 1, "head_dim": cache.shape[-1]}
        views = page_views(self._typed(cache), self._axes, key_dim=self.key_dim)
        _, heads, dim = views[0].inner
        wanted = {"num_heads": heads, "dtype": storage_dtype(views[0].array.dtype, self._name()).name}
        return wanted | ({"head_dim": dim} if dim == views[1].inner[2] else {})

    def check_scales(self, tensors: Tensors, scales: Scales) -> None:
        """A scale is the layer's, not the pool's: bytes that another scale stored are other values.

        Raises:
            MismatchError: `quantization`.
        """
        for t, scale in zip(tensors, scales, strict=False):
            mine = per_tensor(scale, t.dtype, "scale")
            if t.quantization != mine:
                raise MismatchError([Difference("quantization", t.quantization, mine)])

    def _name(self) -> str | None:
        return None if self.dtype == "auto" else self.dtype

    def _page_size(self, cache: Any) -> int:
        if self.axes == LATENT:
            return int(max(cache.shape[1:-1]))  # a head axis of 1 may stand there, too
        return self._view(cache).inner[0]

    def _view(self, cache: Any) -> PageView:
        return page_views(self._typed(cache), self._axes, key_dim=self.key_dim)[0]

    @property
    def _axes(self) -> Axes:
        return VLLM_CPU if self.axes == CPU else self.axes

    def _typed(self, cache: Any) -> Any:
        """CPU_ATTN's blocks are not what their shape says: all of a head's keys, a column a token, then its values."""
        if self.axes != CPU:
            return cache
        array = as_array(cache)
        blocks, heads, size, dims = array.shape
        halves = array.reshape(blocks, heads, 2, size * dims // 2)
        if not np.may_share_memory(array, halves):
            message = "has tokens of a block apart from one another: CPU_ATTN's lie in one piece"
            raise UnsupportedError(message, code=Code.LAYOUT, where="cache")
        keys = halves[:, :, 0].reshape(blocks, heads, dims // 2, size)
        return keys, halves[:, :, 1].reshape(blocks, heads, size, dims // 2)

    def _own_ids(self, cache: Any, block_ids: Sequence[int]) -> Int64Array:
        """Ids of the cache's own blocks: vLLM may split a block of its manager's into several of its kernels'."""
        size = self._page_size(cache)
        if self.block_size % size:
            message = f"has blocks of {size} tokens, no whole number of them in vLLM's {self.block_size}"
            raise InvalidDescriptorError(message, code=Code.PAGE_SIZE, where="cache")
        ids = np.array(block_ids, np.int64)
        parts = self.block_size // size
        return (ids[:, None] * parts + np.arange(parts)).reshape(-1)


def _run(t: BlockPagedTensor, first: int, stop: int, page_size: int) -> BlockPagedTensor:
    """A run of a tensor's one sequence, in pages of a size; a view where its own pages allow."""
    if first % t.page_size:
        tokens = t.gather(0)[first:stop]
        roles: dict[str, Any] = {"kv_role": t.kv_role, "layer_index": t.layer_index, "quantization": t.quantization}
        return ops.paginate(tokens, [stop - first], page_size, **roles)
    ids = t.pages(0)[first // t.page_size : -(-stop // t.page_size)]
    run = t.replace(block_table=ids, seq_ptr=[0, ids.size], seq_lens=[stop - first], metadata=None)
    return run if t.page_size == page_size else ops.repage(run, page_size)
