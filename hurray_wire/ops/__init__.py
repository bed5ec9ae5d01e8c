"""Tensors from tensors: what two ends with other pages, heads, ids or element types need between them.

Every operation takes checked tensors and gives checked tensors; the tokens that `gather` gives stay what they were.
Where the result's elements already lie in the pool as the format wants them it is a view of the same memory; else one
copy is made, 64-byte aligned. Scales, zero points, token counts and metadata follow. Tables are worked on as whole
arrays, never sequence by sequence.

What must never enter: bytes of the wire, files, sockets, the names of engines, and anything that changes a tensor in
place (`scatter` writes into the caller's pool, which is its purpose). A tensor with violations is refused, and so is
a pool of sub-byte elements whose pages end inside bytes (`packed_pool`).

Example:
    >>> import numpy as np
    >>> from hurray_wire import BlockPagedTensor, ops
    >>> pool = np.arange(320, dtype=np.float16).reshape(5, 4, 2, 8)
    >>> t = BlockPagedTensor(pool, block_table=[0, 1, 0], seq_ptr=[0, 2, 3], seq_lens=[6, 3], layer_index=3)
    >>> small = ops.repage(ops.compact(t), 2)
    >>> small.block_table.tolist(), small.same_tokens(t)
    ([0, 1, 2, 0, 1], True)
"""

from hurray_wire.ops.checking import check_layers, compatible
from hurray_wire.ops.dequantising import dequantize
from hurray_wire.ops.heads import heads_of_rank, merge_heads, slice_heads
from hurray_wire.ops.keyvalue import fuse, split_fused
from hurray_wire.ops.pages import compact, concat, scrub, select, suffix
from hurray_wire.ops.paginating import paginate
from hurray_wire.ops.quantising import quantize
from hurray_wire.ops.repaging import repage
from hurray_wire.ops.scattering import scatter

__all__ = [
    "check_layers",
    "compact",
    "compatible",
    "concat",
    "dequantize",
    "fuse",
    "heads_of_rank",
    "merge_heads",
    "paginate",
    "quantize",
    "repage",
    "scatter",
    "scrub",
    "select",
    "slice_heads",
    "split_fused",
    "suffix",
]
