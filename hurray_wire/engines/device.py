"""Pages of a torch tensor that is not in the CPU's memory: selected or placed there, moved once.

Written against torch's interface and **not tested on a device**: no machine of this project has one. The same calls
run on CPU tensors in the tests. torch is here already when a tensor of its comes in, and is not imported.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from hurray_wire.indices import Int64Array

Array = npt.NDArray[Any]


def fetch_pages(view: Any, ids: Int64Array | None, out: Array) -> None:
    """Copy pages of a tensor `[pages, ...]` into host memory: `torch.index_select` on the device, one transfer.

    The selection comes out contiguous in the order of `view`, so the device does the transposing. A transfer into
    pinned memory needs no staging buffer; `out` may lie in a pinned tensor's memory.

    Args:
        view: any strides, on any device.
        ids: which pages; None for all.
        out: contiguous, of the pages' shape and element size.
    """
    torch = sys.modules["torch"]
    picked = _as_integers(view)
    if ids is not None:
        picked = torch.index_select(picked, 0, torch.from_numpy(ids).to(view.device))
    host = torch.from_numpy(out.view(_integer_name(out.itemsize)))
    host.copy_(picked)


def store_pages(view: Any, ids: Int64Array, pages: Array) -> None:
    """Copy pages in host memory to pages `ids` (all different) of a tensor: one transfer, `index_copy_` on the device.

    Args:
        view: `[pages, ...]`, any strides, on any device.
        pages: as many pages as ids, of the same shape and element size.
    """
    torch = sys.modules["torch"]
    host = torch.from_numpy(np.ascontiguousarray(pages).view(_integer_name(pages.itemsize)))
    _as_integers(view).index_copy_(0, torch.from_numpy(ids).to(view.device), host.to(view.device))


def _as_integers(view: Any) -> Any:
    """The same bits as integers: device kernels for float8 do not exist everywhere."""
    return view.view(getattr(sys.modules["torch"], _integer_name(view.element_size())))


def _integer_name(width: int) -> str:
    return {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}[width]
