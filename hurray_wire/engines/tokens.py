"""Between runs of tokens and pages: engines that keep a sequence's tokens side by side, without a block table.

The pages of such a sequence follow one another, none is shared. One copy each way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hurray_wire import indices
from hurray_wire.dtypes import Dtype
from hurray_wire.engines.copying import copy_array
from hurray_wire.errors import Code, InvalidDescriptorError
from hurray_wire.memory import allocated
from hurray_wire.tensor import BlockPagedTensor

Array = npt.NDArray[Any]

_TEMPORARY_BYTES = 128 << 10


def checked_page_size(page_size: Any) -> int:
    """A caller's page size.

    Raises:
        InvalidDescriptorError: `page_size`.
    """
    if isinstance(page_size, bool) or not isinstance(page_size, int | np.integer) or page_size < 1:
        message = f"is {page_size!r}, must be an integer of at least 1"
        raise InvalidDescriptorError(message, code=Code.PAGE_SIZE, where="page_size")
    return int(page_size)


def paged(
    runs: Sequence[Iterable[Array]],
    seq_lens: Sequence[int],
    inner: tuple[int, int, int],
    dtype: Dtype,
    *,
    kv_role: str,
    layer_index: int | None,
    metadata: Mapping[str, Any] | None = None,
) -> BlockPagedTensor:
    """A tensor of sequences, each given as runs `[tokens, heads, dim]` that follow one another.

    Slots behind a sequence's last token are zero.
    """
    page_size, num_heads, head_dim = inner
    lens = np.array(seq_lens, np.int64)
    seq_ptr = indices.starts_of(indices.live_counts(lens, page_size))
    shape = (int(seq_ptr[-1]), page_size, num_heads, head_dim)
    assert dtype.numpy is not None
    pool = allocated(math.prod(shape) * dtype.numpy.itemsize, None).view(dtype.numpy).reshape(shape)
    slots = pool.reshape(-1, num_heads, head_dim)
    for sequence, first, last in zip(runs, seq_ptr.tolist(), seq_ptr.tolist()[1:], strict=False):
        at = first * page_size
        for run in sequence:
            copy_array(run, slots[at : at + len(run)])
            at += len(run)
        slots[at : last * page_size] = np.zeros((), dtype.numpy)
    return BlockPagedTensor(
        pool,
        block_table=np.arange(shape[0]),
        seq_ptr=seq_ptr,
        seq_lens=lens,
        kv_role=kv_role,
        layer_index=layer_index,
        metadata=metadata,
    )


def write_tokens(t: BlockPagedTensor, seq: int, out: Array) -> None:
    """Copy a sequence's tokens into `out`, `[tokens, heads, dim]` of any strides.

    Pages that follow one another are read in place, others a temporary's worth at a time.
    """
    ids = t.live_pages(seq).astype(np.int64)
    if not out.size:
        return
    size, first = t.page_size, int(ids[0])
    if t.page_pool.flags.c_contiguous and np.array_equal(ids, np.arange(first, first + ids.size)):
        copy_array(t.page_pool.reshape(-1, *t.shape[1:])[first * size : first * size + len(out)], out)
        return
    step = max(1, _TEMPORARY_BYTES // t.page_bytes)
    for at in range(0, ids.size, step):
        target = out[at * size : (at + step) * size]
        block = t.page_pool[ids[at : at + step]].reshape(-1, *t.shape[1:])
        copy_array(block[: len(target)], target)
