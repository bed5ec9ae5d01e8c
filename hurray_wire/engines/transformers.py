"""Hugging Face transformers' `DynamicCache`, 4.48 to 5.x (`src/transformers/cache_utils.py`): dense, padded batches.

Which columns hold tokens is in the attention mask alone. Keys are stored after rotation, so that a token's position
is in its bytes: a cache is right only with the positions it was made with (left padding with explicit position_ids).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hurray_wire.arrays import as_array, is_torch, to_torch
from hurray_wire.engines.axes import on_device
from hurray_wire.engines.inbound import check_pair
from hurray_wire.engines.storage import own_dtype
from hurray_wire.engines.tables import on_host
from hurray_wire.engines.tokens import checked_page_size, paged, write_tokens
from hurray_wire.errors import Code, InvalidDescriptorError, UnsupportedError
from hurray_wire.tensor import BlockPagedTensor

__all__ = ["from_transformers", "to_transformers"]

Array = npt.NDArray[Any]
Pair = tuple[BlockPagedTensor, BlockPagedTensor]

_PLAIN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""Layers whose state is keys and values of `[batch, heads, tokens, dim]` and nothing else; others hold more."""
_WINDOW = "transformers.sliding_window"
"""Our name in the metadata for the window of a sliding layer, which a rebuilt cache needs."""


class _Layer(NamedTuple):
    keys: Any
    values: Any
    tokens: int
    """Columns that the layer has seen, of which it keeps the last."""
    window: int | None


def from_transformers(
    cache: Any, attention_mask: Any, *, page_size: int, metadata: Mapping[str, Any] | None = None
) -> list[Pair]:
    """The layers of a `DynamicCache` as pairs of tensors, padding left out; each token copied once.

    A sliding-window layer keeps its last tokens only: its tensors say in metadata `first_tokens` where each sequence
    begins, and in `transformers.sliding_window` how wide the window is.

    Args:
        cache: a `DynamicCache` of any version from 4.48 on (`.layers[i].keys`, or `.key_cache[i]`), on any device
            (other than the CPU: **not tested**). Static, quantised and hybrid caches are refused.
        attention_mask: `[batch, tokens]`, 1 where a column holds a token; padding left or right, no holes. As many
            columns as the cache has, generated tokens included. None where nothing is padded.
        page_size: tokens a page of the result.
        metadata: goes into every tensor (`{"model": ...}`).

    Returns:
        A pair (key, value) a layer, layer_index from 0 on.

    Raises:
        TypeError: not a DynamicCache; a mask that is none.
        InvalidDescriptorError: `rank`, `shape` (at `attention_mask`, `cache.layers[i]`), `page_size`.
        UnsupportedError: `layout`, for a mask with holes or a layer of another kind; `dtype`.

    Example:
        >>> import torch, transformers
        >>> cache = transformers.DynamicCache()
        >>> _ = cache.update(torch.ones(2, 4, 5, 8), torch.ones(2, 4, 5, 8), 0)
        >>> [(key, value)] = from_transformers(cache, [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], page_size=4)
        >>> key.seq_lens.tolist(), key.page_pool.shape
        ([3, 5], (3, 4, 4, 8))
    """
    page_size = checked_page_size(page_size)
    layers = _layers(cache)
    mask = _mask(attention_mask, layers[0])
    return [_from_layer(layer, i, mask, page_size, metadata) for i, layer in enumerate(layers)]


def _layers(cache: Any) -> list[_Layer]:
    if hasattr(cache, "layers"):
        found = [_of_layer(layer, i) for i, layer in enumerate(cache.layers)]
    elif type(cache).__name__ == "DynamicCache" and hasattr(cache, "key_cache"):
        pairs = zip(cache.key_cache, cache.value_cache, strict=True)
        found = [_checked(_Layer(k, v, k.shape[-2] if is_torch(k) else 0, None), i) for i, (k, v) in enumerate(pairs)]
    else:
        raise TypeError(f"a transformers DynamicCache is needed, not {type(cache).__name__}")
    if not found:
        raise InvalidDescriptorError("has no layers", code=Code.SHAPE, where="cache")
    return found


def _of_layer(layer: Any, i: int) -> _Layer:
    kind = type(layer).__name__
    if kind not in _PLAIN_LAYERS:
        message = (
            f"is a {kind}, which is not (or not only) keys and values that grow: copy the tokens it holds into a "
            "DynamicCache with update(), and send any other state by other means"
        )
        raise UnsupportedError(message, code=Code.LAYOUT, where=f"cache.layers[{i}]")
    if not is_torch(layer.keys):
        return _checked(_Layer(layer.keys, layer.values, 0, None), i)
    window = getattr(layer, "sliding_window", None) if kind != "DynamicLayer" else None
    tokens = layer.keys.shape[-2] if window is None else int(layer.get_seq_length())
    return _checked(_Layer(layer.keys, layer.values, int(tokens), window), i)


def _checked(layer: _Layer, i: int) -> _Layer:
    where = f"cache.layers[{i}]"
    if not is_torch(layer.keys) or not is_torch(layer.values) or layer.keys.ndim != 4 or layer.values.ndim != 4:
        raise InvalidDescriptorError("holds no keys and values of 4 axes", code=Code.RANK, where=where)
    if layer.keys.shape[:3] != layer.values.shape[:3] or layer.keys.shape[2] > layer.tokens:
        message = f"has keys {tuple(layer.keys.shape)}, values {tuple(layer.values.shape)}, {layer.tokens} tokens seen"
        raise InvalidDescriptorError(message, code=Code.SHAPE, where=where)
    return layer


class _Mask(NamedTuple):
    """Where each sequence's tokens stand among the columns: `start` to `stop`."""

    start: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]
    columns: int


def _mask(attention_mask: Any, layer: _Layer) -> _Mask:
    batch = int(layer.keys.shape[0])
    if attention_mask is None:
        return _Mask(np.zeros(batch, np.int64), np.full(batch, layer.tokens, np.int64), layer.tokens)
    mask = np.asarray(on_host(attention_mask))
    if mask.ndim != 2 or mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all():
        message = f"must be [batch, tokens] of 0 and 1, is {mask.dtype} of shape {mask.shape}"
        raise InvalidDescriptorError(message, code=Code.RANK, where="attention_mask")
    if mask.shape != (batch, layer.tokens):
        message = (
            f"has shape {mask.shape}, the cache has ({batch}, {layer.tokens}): it covers every token that the cache "
            "holds, generated ones included"
        )
        raise InvalidDescriptorError(message, code=Code.SHAPE, where="attention_mask")
    held = mask != 0
    count = held.sum(axis=1)
    start = held.argmax(axis=1) if held.size else np.zeros(batch, np.int64)
    columns = np.arange(layer.tokens)
    holes = ((columns >= start[:, None]) & (columns < (start + count)[:, None])) & ~held
    if holes.any():
        seq, token = np.unravel_index(int(holes.argmax()), holes.shape)
        message = "is 0 between tokens: a sequence's tokens follow one another here, so cut it there or mask nothing"
        raise UnsupportedError(message, code=Code.LAYOUT, where=f"attention_mask[{seq}, {token}]")
    return _Mask(start.astype(np.int64), (start + count).astype(np.int64), layer.tokens)


def _from_layer(
    layer: _Layer, i: int, mask: _Mask, page_size: int, metadata: Mapping[str, Any] | None
) -> tuple[BlockPagedTensor, BlockPagedTensor]:
    found, wanted = (int(layer.keys.shape[0]), layer.tokens), (mask.start.size, mask.columns)
    if found != wanted:
        message = f"has (batch, tokens) {found}, layer 0 has {wanted}"
        raise InvalidDescriptorError(message, code=Code.SHAPE, where=f"cache.layers[{i}]")
    kept = mask.columns - int(layer.keys.shape[2])
    start, stop = np.maximum(mask.start, kept), np.maximum(mask.stop, kept)
    told = dict(metadata or {})
    if layer.window is not None:
        gone = np.clip(kept - mask.start, 0, mask.stop - mask.start)
        told |= {"first_tokens": gone.tolist(), _WINDOW: int(layer.window)}

    def tensor(role: str, states: Any) -> BlockPagedTensor:
        array = as_array(states.detach().cpu() if on_device(states) else states)
        rows = [[row[:, a - kept : b - kept].swapaxes(0, 1)] for row, a, b in zip(array, start, stop, strict=True)]
        inner = (page_size, array.shape[1], array.shape[3])
        lens = (stop - start).tolist()
        return paged(rows, lens, inner, own_dtype(array.dtype), kv_role=role, layer_index=i, metadata=told)

    return tensor("key", layer.keys), tensor("value", layer.values)


def to_transformers(layers: Sequence[Pair], *, padding: str = "left") -> tuple[Any, Any]:
    """A `DynamicCache` of a batch's layers, and the attention mask that says where its tokens stand.

    Left padding is what generation wants; hand the mask to the model, and position_ids too where they are not taken
    from it (`mask.cumsum(-1) - 1`). A layer from a sliding window becomes one again, `cumulative_length` included.

    Args:
        layers: a pair (key, value) a layer, in order, over the same sequences; unquantised.
        padding: "left" or "right".

    Returns:
        (cache, attention_mask): `transformers.DynamicCache`, filled with `update()`; int64 `[batch, tokens]`.

    Raises:
        ImportError: torch or transformers is not installed.
        ValueError: another padding.
        InvalidDescriptorError: no pair, no layer; layers of other lengths (`seq_lens_range`).
        UnsupportedError: `layout`, for sequences whose first tokens are not here, and no window says why; `scheme`.

    Example:
        >>> import numpy as np
        >>> import hurray_wire as hw
        >>> key = hw.BlockPagedTensor(np.ones((2, 4, 1, 8), np.float32), block_table=[1, 0], seq_ptr=[0, 1, 2],
        ...                           seq_lens=[3, 1])
        >>> cache, attention_mask = to_transformers([(key, key.replace(kv_role="value"))])
        >>> attention_mask.tolist(), cache.get_seq_length()
        ([[1, 1, 1], [0, 0, 1]], 3)
    """
    if padding not in ("left", "right"):
        raise ValueError(f"padding must be 'left' or 'right', not {padding!r}")
    import torch
    import transformers

    totals = _totals(layers)
    columns = int(totals.max(initial=0))
    cache = transformers.DynamicCache()
    for i, (key, value) in enumerate(layers):
        window = (key.metadata or {}).get(_WINDOW)
        starts, kept = _columns(key, totals, columns, window, padding)
        states = [to_torch(_states(t, starts, kept)) for t in (key, value)]
        if window is not None:
            _append_sliding(cache, i, window)
        cache.update(*states, i)
        if window is not None:
            cache.layers[i].cumulative_length = columns
    at = np.arange(columns)
    mask = at >= columns - totals[:, None] if padding == "left" else at < totals[:, None]
    return cache, torch.from_numpy(mask.astype(np.int64))


def _totals(layers: Sequence[Pair]) -> npt.NDArray[np.int64]:
    """Tokens that each sequence has, those that a window has left behind included."""
    if not layers:
        raise InvalidDescriptorError("are none", code=Code.SHAPE, where="layers")
    totals = []
    for i, (key, value) in enumerate(layers):
        check_pair(key, value, scaled=False)
        totals.append(_first_tokens(key) + key.known_lens().astype(np.int64))
        if not np.array_equal(totals[i], totals[0]):
            message = f"has sequences of {totals[i].tolist()} tokens, layer 0 of {totals[0].tolist()}"
            raise InvalidDescriptorError(message, code=Code.SEQ_LENS_RANGE, where=f"layers[{i}]")
    return totals[0]


def _first_tokens(t: BlockPagedTensor) -> npt.NDArray[np.int64]:
    first = (t.metadata or {}).get("first_tokens")
    return np.zeros(t.num_seqs, np.int64) if first is None else np.array(first, np.int64)


def _columns(
    key: BlockPagedTensor, totals: npt.NDArray[np.int64], columns: int, window: int | None, padding: str
) -> tuple[npt.NDArray[np.int64], int]:
    """At which of the layer's columns each sequence's tokens begin, and how many columns the layer keeps."""
    first = _first_tokens(key)
    padded = columns - totals if padding == "left" else np.zeros_like(totals)
    kept = columns if window is None else min(columns, window - 1)
    missing = padded + first > np.maximum(padded, columns - kept)
    if missing.any():
        seq = int(missing.argmax())
        message = (
            f"sequence {seq} begins at token {int(first[seq])}, and with {padding} padding the cache has earlier ones"
        )
        raise UnsupportedError(message, code=Code.LAYOUT, where=f"metadata.first_tokens[{seq}]")
    return padded + first - (columns - kept), kept


def _states(t: BlockPagedTensor, starts: npt.NDArray[np.int64], columns: int) -> Array:
    """`[batch, heads, columns, dim]`, zero where no token stands."""
    out = np.zeros((t.num_seqs, t.num_heads, columns, t.head_dim), t.dtype.numpy)
    lens = t.known_lens().tolist()
    for seq, (start, tokens) in enumerate(zip(starts.tolist(), lens, strict=True)):
        write_tokens(t, seq, out[seq].swapaxes(0, 1)[start : start + tokens])
    return out


def _append_sliding(cache: Any, i: int, window: int) -> None:
    """A sliding layer where `update` would make a plain one."""
    try:
        from transformers.cache_utils import DynamicSlidingWindowLayer
    except ImportError:
        message = "this version of transformers has no sliding layers in a DynamicCache, 4.57 has"
        raise UnsupportedError(message, code=Code.LAYOUT, where=f"layers[{i}]") from None
    while len(cache.layers) <= i:
        cache.layers.append(DynamicSlidingWindowLayer(sliding_window=window))
