"""The heads axis: slices for the ranks of a tensor-parallel group, and their reunion."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from hurray_wire.errors import Difference, MismatchError
from hurray_wire.ops import derived as d
from hurray_wire.ops.derived import derived, per_channel, united, whole_pages
from hurray_wire.ops.joining import element_pool, joined
from hurray_wire.tensor import BlockPagedTensor


def slice_heads(t: BlockPagedTensor, start: int, stop: int) -> BlockPagedTensor:
    """Heads `start` to `stop` of a tensor: a strided view of its pool (of a 1-D pool a copy, as the format packs it).

    Tables, ids and per-block scales stay; per-channel scales along the heads are sliced. Metadata `heads` becomes
    [start, stop, total], counted from the heads that `t` has of its model where its own metadata says so. Statistics
    are dropped.

    Args:
        start, stop: 0 <= start < stop <= num_heads.

    Raises:
        IndexError: not heads of this tensor.
        UnsupportedError: `layout`, for a latent, which has no heads; `packed_pool`, where a head ends inside a byte;
            `scheme` (NF4, MXFP).
        MismatchError: metadata `heads` says another number of heads than there are.
        InvalidDescriptorError: the tensor has violations.

    Example:
        >>> pool = np.arange(320, dtype=np.float16).reshape(5, 4, 2, 8)
        >>> t = BlockPagedTensor(pool, block_table=[0, 1, 0], seq_ptr=[0, 2, 3], seq_lens=[6, 3])
        >>> half = slice_heads(t, 1, 2)
        >>> half.page_pool.shape, half.metadata, np.shares_memory(half.page_pool, pool)
        ((5, 4, 1, 8), {'heads': [1, 2, 2]}, True)
    """
    whole_pages(t)
    d.no_latent(t, "slicing")
    d.no_float_blocks(t, "slicing heads")
    start, stop = operator.index(start), operator.index(stop)
    if not 0 <= start < stop <= t.num_heads:
        raise IndexError(f"heads {start} to {stop} of {t.num_heads}: must be 0 <= start < stop <= {t.num_heads}")
    first, _, total = _heads(t) or (0, t.num_heads, t.num_heads)
    pool = element_pool(t)[:, :, start:stop]
    return derived(
        t,
        page_pool=pool if t.page_pool.ndim == 4 else np.ascontiguousarray(pool).reshape(-1),
        num_heads=stop - start,
        **{name: a[start:stop] for name, a in per_channel(t, 1).items()},
        metadata=dict(t.parts.metadata or {}) | {"heads": [first + start, first + stop, total]},
        statistics=None,
    )


def _heads(t: BlockPagedTensor) -> tuple[int, int, int] | None:
    """Metadata `heads`, which must count as many as the tensor has."""
    told = (t.parts.metadata or {}).get("heads")
    if told is None:
        return None
    start, stop, total = told
    if stop - start != t.num_heads:
        raise MismatchError([Difference("heads", list(told), f"a range of num_heads {t.num_heads}")])
    return start, stop, total


def merge_heads(tensors: Iterable[BlockPagedTensor]) -> BlockPagedTensor:
    """The ranks of one batch, layer and role as one tensor with all their heads: one copy.

    With metadata `heads` the tensors may come in any order, and those that hold heads which another one holds too
    (replicas, where there are more ranks than heads) are left out; without it they are joined in the order given,
    and must not repeat. The result's `heads` is what they cover together; statistics are dropped.

    Equal block tables are kept, with every page of the pools. Where ranks have page ids of their own, the result has
    the pages that the tables name, in order of first use; pages that are shared on every rank stay shared.
    Per-channel scales along the heads are joined. Per-block scales are one a slot for all heads: they must be the same
    on every rank, as must all other constants.

    Raises:
        MismatchError: the tensors differ in more than heads and ids, or their `heads` overlap or leave a gap.
        UnsupportedError: `layout` (a latent), `packed_pool`, `scheme` (NF4, MXFP).
        ValueError: no tensor.
        InvalidDescriptorError: a tensor has violations.

    Example:
        >>> pool = np.arange(320, dtype=np.float16).reshape(5, 4, 2, 8)
        >>> t = BlockPagedTensor(pool, block_table=[0, 1, 0], seq_ptr=[0, 2, 3], seq_lens=[6, 3])
        >>> whole = merge_heads([slice_heads(t, 1, 2), slice_heads(t, 0, 1), slice_heads(t, 1, 2)])
        >>> whole.metadata, bool((whole.page_pool == pool).all())
        ({'heads': [0, 2, 2]}, True)
    """
    parts = list(tensors)
    whole_pages(*parts)
    for t in parts:
        d.no_latent(t, "joining")
    names = [name for name in d.IDENTITY if name != "num_heads"]
    d.agree(parts, (*names, "composite"))
    metadata = united(parts, apart=("heads",))
    kept, heads = _in_order(parts)
    metadata |= {} if heads is None else {"heads": heads}
    fields = joined(kept, 2) if len(kept) > 1 else {}
    return derived(kept[0], **fields, metadata=metadata, statistics=None)


def _in_order(tensors: Sequence[BlockPagedTensor]) -> tuple[list[BlockPagedTensor], list[int] | None]:
    """The tensors by their first head, each once, and the heads that they cover."""
    told = [_heads(t) for t in tensors]
    totals = [h[2] for h in told if h is not None]
    if not totals:
        return list(tensors), None
    wrong = [(i, h) for i, h in enumerate(told) if h is None or h[2] != totals[0]]
    if wrong:
        raise MismatchError([Difference(f"tensors[{i}].heads", h, f"a range of {totals[0]} heads") for i, h in wrong])
    ranges = {h: i for i, h in reversed(list(enumerate(told))) if h is not None}
    order = sorted(ranges)
    for before, after in pairwise(order):
        if after[0] != before[1]:
            where = f"tensors[{ranges[after]}].heads"
            raise MismatchError([Difference(where, list(after), f"to begin at {before[1]}, behind {list(before)}")])
    return [tensors[ranges[h]] for h in order], [order[0][0], order[-1][1], order[0][2]]


def heads_of_rank(rank: int, size: int, total: int) -> range:
    """The heads of `total` that one of `size` tensor-parallel ranks holds, as vLLM and SGLang share them out.

    Up to as many ranks as heads each has total / size of them; beyond, size / total ranks in a row hold the same head.

    Raises:
        ValueError: neither number divides the other, or there is no such rank.

    Example:
        >>> heads_of_rank(1, 2, 8), [list(heads_of_rank(rank, 4, 2)) for rank in range(4)]
        (range(4, 8), [[0], [0], [1], [1]])
    """
    rank, size, total = map(operator.index, (rank, size, total))
    if size < 1 or total < 1 or max(size, total) % min(size, total):
        raise ValueError(f"{total} heads are not shared out over {size} ranks: neither divides the other")
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size}")
    each = max(1, total // size)
    start = rank * total // size
    return range(start, start + each)
