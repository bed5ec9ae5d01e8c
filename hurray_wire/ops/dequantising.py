"""Stored elements to values: dequantize, by the arithmetic of section 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hurray_wire.dequantization import to_float32
from hurray_wire.dtypes import Dtype
from hurray_wire.indices import IntArray
from hurray_wire.ops.chunks import chunks, clear, owned_or_named, stored
from hurray_wire.ops.derived import derived, fresh, no_float_blocks, whole_pages
from hurray_wire.ops.float8 import LARGEST, widen
from hurray_wire.ops.spans import slots_of
from hurray_wire.quantization import PerBlockAffine
from hurray_wire.tensor import BlockPagedTensor

Array = npt.NDArray[Any]


def dequantize(t: BlockPagedTensor) -> BlockPagedTensor:
    """The same tokens as float32 values: scale * (stored - zero_point), as `BlockPagedTensor.dequantize` gives them.

    The difference is exact, rounded to float32, and multiplied once in float32 (section 1). The result has no scheme;
    tables, ids and metadata stay, slots that no token owns are zero, statistics are dropped. An unquantised tensor's
    values are its elements; one of float32 is returned as it is.

    Raises:
        InvalidDescriptorError: `quantization_scale`, `quantization_zero_point`, judged under valid tokens; the tensor
            has violations.
        UnsupportedError: `scheme` (NF4, MXFP), `dtype`, `packed_pool`; `seq_lens_unknown`, for per-block scales. (Of
            other schemes every slot of the pages that are named is then taken for valid.)

    Example:
        >>> pool = np.array([4, 6, 99, 0], np.int8).reshape(2, 2, 1, 1)
        >>> t = BlockPagedTensor(pool, block_table=[0], seq_ptr=[0, 1], seq_lens=[1], quantization="per_tensor",
        ...                      scales=0.5, zero_points=2)
        >>> dequantize(t).page_pool.reshape(-1).tolist()
        [1.0, 0.0, 0.0, 0.0]
    """
    whole_pages(t)
    if t.quantization is None and t.dtype.name == "float32":
        return t
    no_float_blocks(t, "reading values")
    if isinstance(t.quantization, PerBlockAffine):
        t.known_lens()
    owned = owned_or_named(t)
    constants = _Constants(t, owned)
    _, pool = fresh((t.num_pages, t.page_size, t.num_heads, t.head_dim), Dtype.of("float32"), 32)
    for pages, valid in chunks(t, owned):
        out = pool[pages].reshape(-1, t.num_heads, t.head_dim)
        if valid is None:
            out[...] = 0
            continue
        elements = stored(t, pages)
        if t.dtype.name in LARGEST:
            widen(elements, t.dtype, out)
            elements = out
        to_float32(elements, t.dtype, t.quantization, *constants.of(pages), out)
        clear(out, valid)
    return derived(t, page_pool=pool, quantization=None, scales=None, zero_points=None, statistics=None)


class _Constants:
    """Scales and zero points by pages, all of them judged before the first page is touched."""

    def __init__(self, t: BlockPagedTensor, owned: IntArray) -> None:
        self._page_size = t.page_size if isinstance(t.quantization, PerBlockAffine) else 0
        self._arrays = (t.scales, t.zero_points)
        if self._page_size:  # those of slots that no token owns may be anything, and are replaced by lawful ones
            valid = slots_of(owned, t.page_size)
            fills = zip(self._arrays, (1, 0), strict=True)
            scales, zeros = (None if a is None else np.where(valid, a, a.dtype.type(n)).reshape(-1) for a, n in fills)
            self._arrays = (scales, zeros)
        to_float32(np.zeros(0, np.float32), t.dtype, None, None, None)  # whether the type has values
        if t.total_tokens:
            slots = t.num_pages * self._page_size
            anything = np.zeros((slots, 1, 1) if slots else (1, t.num_heads, t.head_dim), np.float32)
            to_float32(anything, t.dtype, t.quantization, *self._arrays)

    def of(self, pages: slice) -> tuple[Array | None, Array | None]:
        """What `to_float32` takes for these pages' slots."""
        if not self._page_size:
            return self._arrays
        slots = slice(pages.start * self._page_size, pages.stop * self._page_size)
        scales, zeros = (None if a is None else a[slots] for a in self._arrays)
        return scales, zeros
