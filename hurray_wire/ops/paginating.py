"""Pages for tokens that had none: paginate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hurray_wire import indices
from hurray_wire.arrays import Bytes, as_array, raw_view
from hurray_wire.dtypes import Dtype, pack
from hurray_wire.errors import Code, InvalidDescriptorError
from hurray_wire.indices import Int64Array, IntArray, starts_of
from hurray_wire.memory import allocated
from hurray_wire.ops import derived as d
from hurray_wire.ops.derived import Array
from hurray_wire.ops.repaging import checked_page_size
from hurray_wire.ops.spans import Mask, given, marked, steps
from hurray_wire.pages import PagePool, is_little
from hurray_wire.quantization import PerBlockAffine
from hurray_wire.tensor import BlockPagedTensor

_PIECE_BYTES = 1 << 24
"""Slots that are filled at a time, and then cleared where they hold no token: the cache still has them."""


def paginate(tokens: Any, seq_lens: Any, page_size: int, **options: Any) -> BlockPagedTensor:
    """Pages for tokens that lie behind one another: sequence s has the next seq_lens[s] of them.

    Each sequence gets ceil(seq_len / page_size) pages of its own, in order; nothing is shared, as ragged tokens do not
    say what is. A view of `tokens` where every sequence fills its pages, else one copy; slots behind the last token are
    zero. The inverse is `gather`, sequence by sequence.

    Args:
        tokens: `[total_tokens, num_heads, head_dim]`, any strides, or a torch CPU tensor; sub-byte types unpacked.
        seq_lens: tokens a sequence.
        page_size: tokens a page.
        options: what else a `BlockPagedTensor` takes: kv_role, layer_index, dtype, metadata, quantization, scales,
            zero_points; per-block scales and zero points as `[total_tokens]`, or `[num_pages, page_size]`.

    Raises:
        InvalidDescriptorError: `rank`, `page_size`, `seq_lens_sum`, `negative_index`, and what the tensor's own
            construction refuses.
        UnsupportedError: `packed_pool`, for sub-byte pages that end inside bytes.

    Example:
        >>> t = paginate(np.arange(5).reshape(5, 1, 1), [3, 2], 2, layer_index=0)
        >>> t.block_table.tolist(), t.seq_ptr.tolist(), t.page_pool.reshape(-1).tolist()
        ([0, 1, 2], [0, 2, 3], [0, 1, 2, 0, 3, 4])
    """
    array, size = as_array(tokens), checked_page_size(page_size)
    if array.ndim != 3:
        message = f"has shape {array.shape}, must be [tokens, heads, head_dim]"
        raise InvalidDescriptorError(message, code=Code.RANK, where="tokens")
    lens = given(seq_lens, "seq_lens")
    if indices.exact_sum(lens) != len(array):
        message = f"sum to {indices.exact_sum(lens)}, must sum to the {len(array)} tokens"
        raise InvalidDescriptorError(message, code=Code.SEQ_LENS_SUM, where="seq_lens")
    ptr = starts_of(indices.live_counts(lens, size))
    dtype = Dtype.of(options.get("dtype") or array.dtype)
    for name in ("scales", "zero_points"):
        entries = options.get(name)
        if _per_block(options.get("quantization")) and entries is not None and np.ndim(entries) == 1:
            options[name] = _paged(as_array(entries), lens, ptr, size)
    pool = _paged(array, lens, ptr, size)
    if dtype.is_flat:
        pool = _packed(pool, dtype)
        options |= {"dtype": dtype, "page_size": size, "num_heads": array.shape[1], "head_dim": array.shape[2]}
    table = np.arange(ptr[-1], dtype=np.uint32 if ptr[-1] <= 1 << 32 else np.uint64)
    return BlockPagedTensor(pool, block_table=table, seq_ptr=ptr, seq_lens=lens, **options)


def _per_block(quantization: Any) -> bool:
    return quantization == "per_block" or isinstance(quantization, PerBlockAffine)


def _paged(tokens: Array, lens: IntArray, ptr: Int64Array, page_size: int) -> Array:
    """Entries a token as `[pages, page_size, ...]`."""
    pages = int(ptr[-1])
    shape = (pages, page_size, *tokens.shape[1:])
    if pages * page_size == len(tokens):
        return tokens.reshape(shape)
    raw = allocated(math.prod(shape) * tokens.itemsize, None)
    if raw.size:
        held = marked(ptr[:-1] * page_size, lens.astype(np.int64), pages * page_size)
        slots = raw.view(f"V{raw.size // held.size}")
        if tokens.flags.c_contiguous and is_little(tokens.dtype):
            _filled(slots, held, raw_view(tokens).view(slots.dtype))
        else:
            _token_by_token(tokens, held, raw)
            slots[~held] = np.zeros((), slots.dtype)
    return raw.view(tokens.dtype.newbyteorder("<")).reshape(shape)


def _filled(slots: Array, held: Mask, tokens: Array) -> None:
    """Tokens in order into the slots that hold some, zeros into the others: NumPy copies by runs of the mask."""
    at = 0
    nothing = np.zeros((), slots.dtype)
    for step in steps(slots.size, max(1, _PIECE_BYTES // slots.itemsize)):
        some, piece = held[step], slots[step]
        count = int(np.count_nonzero(some))
        piece[some] = tokens[at : at + count]
        piece[~some] = nothing
        at += count


def _token_by_token(tokens: Array, held: Mask, out: Bytes) -> None:
    source = np.cumsum(held) - 1
    np.maximum(source, 0, out=source)
    single = tokens.reshape(len(tokens), 1, *(tokens.shape[1:] or (1, 1)))  # pages of one token
    PagePool(single, len(tokens), out.size // source.size).copy(source, out)


def _packed(pool: Array, dtype: Dtype) -> Array:
    """A pool of unpacked elements as the 1-D bytes that a tensor of their type takes."""
    if not dtype.is_sub_byte:
        return np.ascontiguousarray(pool).reshape(-1).view(np.uint8)
    if math.prod(pool.shape[1:]) * dtype.bit_width % 8:
        raise d.packed_pool(f"pages of {' x '.join(map(str, pool.shape[1:]))} {dtype.name} end inside bytes")
    return pack(pool, dtype)
