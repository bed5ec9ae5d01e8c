"""LMCache's chunks of one sequence: `KV_2LTD`, `[2, layers, tokens, heads * dim]` (`lmcache/v1/memory_management.py`).

Chunks are token-major, their pages flattened away; how the last axis divides into heads is not in them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hurray_wire.arrays import as_array
from hurray_wire.engines.inbound import check_pair
from hurray_wire.engines.storage import own_dtype
from hurray_wire.engines.tokens import checked_page_size, paged
from hurray_wire.errors import Code, InvalidDescriptorError, UnsupportedError
from hurray_wire.tensor import BlockPagedTensor

__all__ = ["from_lmcache", "to_lmcache"]

Array = npt.NDArray[Any]
Pair = tuple[BlockPagedTensor, BlockPagedTensor]


def from_lmcache(chunks: Any, *, num_heads: int, page_size: int) -> list[Pair]:
    """The layers of one sequence's chunks, as batches of one sequence; each token copied once.

    Args:
        chunks: arrays `[2, layers, tokens, heads * dim]` in the order of their tokens, all of one length (256 unless
            configured) but the last, which may be shorter. fp8 that comes as uint8 is to be viewed as its type.
        num_heads: key/value heads that the last axis holds.
        page_size: tokens a page of the result.

    Returns:
        A pair (key, value) a layer, layer_index from 0 on.

    Raises:
        InvalidDescriptorError: `rank`, `shape` (at `chunks[...]`), `page_size`.
        UnsupportedError: `dtype`; `layout`, for latent chunks (`KV_MLA_FMT`, `[1, layers, tokens, dim]`).

    Example:
        >>> import numpy as np
        >>> chunks = [np.zeros((2, 3, 256, 2 * 64), np.float16), np.ones((2, 3, 10, 2 * 64), np.float16)]
        >>> layers = from_lmcache(chunks, num_heads=2, page_size=16)
        >>> key, value = layers[2]
        >>> len(layers), key.page_pool.shape, key.seq_lens.tolist(), value.layer_index
        (3, (17, 16, 2, 64), [266], 2)
    """
    arrays = [as_array(chunk) for chunk in chunks]
    page_size, num_heads = checked_page_size(page_size), operator.index(num_heads)
    _check_chunks(arrays, num_heads)
    tokens = sum(chunk.shape[2] for chunk in arrays)
    dtype = own_dtype(arrays[0].dtype)
    inner = (page_size, num_heads, arrays[0].shape[3] // num_heads)

    def tensor(plane: int, layer: int) -> BlockPagedTensor:
        runs = [chunk[plane, layer].reshape(-1, *inner[1:]) for chunk in arrays]
        return paged([runs], [tokens], inner, dtype, kv_role=("key", "value")[plane], layer_index=layer)

    return [(tensor(0, layer), tensor(1, layer)) for layer in range(arrays[0].shape[1])]


def _check_chunks(chunks: list[Array], num_heads: int) -> None:
    if not chunks:
        raise InvalidDescriptorError("are none, so that layers and dims are unknown", code=Code.SHAPE, where="chunks")
    first = chunks[0]
    for i, chunk in enumerate(chunks):
        if chunk.ndim != 4:
            message = f"has shape {chunk.shape}, must be [2, layers, tokens, heads * dim]"
            raise InvalidDescriptorError(message, code=Code.RANK, where=f"chunks[{i}]")
        if chunk.shape[0] == 1:
            message = "holds latents (KV_MLA_FMT), which are no pair: page its rows, chunk[0, layer], as a fused tensor"
            raise UnsupportedError(message, code=Code.LAYOUT, where=f"chunks[{i}]")
        like = (2, first.shape[1], first.shape[3])
        if (*chunk.shape[:2], chunk.shape[3]) != like or chunk.dtype != first.dtype:
            message = f"is {chunk.dtype} of shape {chunk.shape}; the first is {first.dtype} of {first.shape}"
            raise InvalidDescriptorError(message, code=Code.SHAPE, where=f"chunks[{i}]")
        whole = chunk.shape[2] == first.shape[2] or (i == len(chunks) - 1 and chunk.shape[2] < first.shape[2])
        if not whole:
            message = f"has {chunk.shape[2]} tokens, the first {first.shape[2]}: only the last may be shorter"
            raise InvalidDescriptorError(message, code=Code.SHAPE, where=f"chunks[{i}]")
    if num_heads < 1 or first.shape[3] % num_heads:
        message = f"has {first.shape[3]} elements a token, no whole number for {num_heads} heads"
        raise InvalidDescriptorError(message, code=Code.SHAPE, where="chunks[0]")


def to_lmcache(layers: Sequence[Pair], *, chunk_tokens: int = 256) -> list[Array]:
    """One sequence's layers as LMCache's chunks; each token copied once where pages divide a chunk, else twice.

    Args:
        layers: a pair (key, value) a layer, in order, each of one sequence, all of one type and shape.
        chunk_tokens: tokens a chunk (`lmcache/v1/config.py` chunk_size).

    Returns:
        Arrays `[2, layers, tokens, heads * dim]`; the last one is short where tokens do not fill it.

    Raises:
        ValueError: chunk_tokens below 1.
        InvalidDescriptorError: no pair, no layer; layers of other `shape`, lengths or order (`layer_index`).
        UnsupportedError: `dtype`; `shape`, for a batch that is not one sequence; as `to_vllm`.

    Example:
        >>> import numpy as np
        >>> chunk = np.arange(2 * 3 * 7 * 4, dtype=np.float32).reshape(2, 3, 7, 4)
        >>> layers = from_lmcache([chunk], num_heads=2, page_size=4)
        >>> chunks = to_lmcache(layers, chunk_tokens=4)
        >>> [c.shape for c in chunks], bool((np.concatenate(chunks, axis=2) == chunk).all())
        ([(2, 3, 4, 4), (2, 3, 3, 4)], True)
    """
    chunk_tokens = operator.index(chunk_tokens)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
    tokens, num_heads, head_dim = _check_layers(layers)
    sizes = [min(chunk_tokens, tokens - at) for at in range(0, tokens, chunk_tokens)]
    dtype = layers[0][0].dtype.numpy
    chunks = [np.empty((2, len(layers), size, num_heads * head_dim), dtype) for size in sizes]
    for layer, pair in enumerate(layers):
        for plane, tensor in enumerate(pair):
            _write(tensor, [c[plane, layer].reshape(-1, num_heads, head_dim) for c in chunks], chunk_tokens)
    return chunks


def _write(t: BlockPagedTensor, outs: list[Array], chunk_tokens: int) -> None:
    """A sequence's tokens into one run after the other: a run is a sequence of its own where it begins with a page."""
    if chunk_tokens % t.page_size:
        tokens = t.gather(0)
        for i, out in enumerate(outs):
            out[...] = tokens[i * chunk_tokens : i * chunk_tokens + len(out)]
        return
    ids = t.live_pages(0)
    ends = np.minimum(np.arange(len(outs) + 1) * (chunk_tokens // t.page_size), ids.size)
    runs = t.replace(block_table=ids, seq_ptr=ends, seq_lens=[len(out) for out in outs], metadata=None)
    for i, out in enumerate(outs):
        runs.gather(i, out=out)


def _check_layers(layers: Sequence[Pair]) -> tuple[int, int, int]:
    """(tokens, heads, dim) of all layers."""
    if not layers:
        raise InvalidDescriptorError("are none", code=Code.SHAPE, where="layers")
    first = layers[0][0]
    for i, (key, value) in enumerate(layers):
        check_pair(key, value)
        if key.num_seqs != 1:
            message = f"holds {key.num_seqs} sequences, chunks hold one: select one at a time"
            raise UnsupportedError(message, code=Code.SHAPE, where=f"layers[{i}]")
        for tensor in (key, value):
            if tensor.shape != first.shape or tensor.dtype is not first.dtype:
                message = (
                    f"has {tensor.dtype} {tensor.kv_role} tokens of {tensor.shape}, others {first.dtype} {first.shape}"
                )
                raise InvalidDescriptorError(message, code=Code.SHAPE, where=f"layers[{i}]")
        if None not in (key.layer_index, first.layer_index) and key.layer_index != (first.layer_index or 0) + i:
            message = f"is layer {key.layer_index} behind layer {first.layer_index} and {i - 1} more: out of order"
            raise InvalidDescriptorError(message, code=Code.LAYER_INDEX, where=f"layers[{i}]")
    return first.shape
