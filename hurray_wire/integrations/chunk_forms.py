"""What LMCache's memory formats are: their axes, and a chunk's planes in them.

NumPy only. A chunk is token-major, its pages flattened away, and says neither how many heads its last axis holds nor
what page size it was cut from: that is the caller's `ChunkForm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy.typing as npt

from hurray_wire.dtypes import Dtype
from hurray_wire.engines.storage import storage_dtype
from hurray_wire.engines.tokens import checked_page_size
from hurray_wire.errors import Code, InvalidDescriptorError, UnsupportedError

__all__ = ["FORMATS", "LATENT", "Chunk", "ChunkForm", "Plane", "planes_of"]

Array = npt.NDArray[Any]

LATENT = "KV_MLA_FMT"
_AXES = {
    "KV_2LTD": "[2, layers, tokens, heads * dim]",
    "KV_T2D": "[tokens, 2, heads * dim]",
    "KV_2TD": "[2, tokens, heads * dim]",
    LATENT: "[1, layers, tokens, dim] or [tokens, dim]",
}
"""LMCache 0.5.6 `lmcache/v1/memory_management.py` MemoryFormat; there a member's shape stands above it."""
FORMATS = tuple(_AXES)
"""The formats that a frame can say; each other one is refused by its name."""
_REFUSED = {
    "UNDEFINED": "the object does not say how its axes are ordered: name its format (format='KV_2LTD')",
    "BINARY": "its bytes are somebody's encoding already",
    "BINARY_BUFFER": "its bytes are somebody's encoding already",
    "EC_TD": "encoder outputs are no keys and values",
    "HS_TD": "hidden states are no keys and values",
}


@dataclass(frozen=True)
class ChunkForm:
    """What a chunk's bytes do not say.

    Args:
        page_size: tokens a page of the engine that made the chunk. A receiver of another one takes the chunk all the
            same: a chunk has no pages.
        num_heads: key/value heads that the last axis holds; one number a group where groups differ. 1 for latents.
        dtype: the element type's name where the tensor does not say it (fp8 that is kept as uint8).
        compression: None or "zstd".
        threads: as in `encode`.

    Raises:
        InvalidDescriptorError: `page_size`, `shape`.

    Example:
        >>> ChunkForm(page_size=16, num_heads=8).heads_of(0)
        8
    """

    page_size: int
    num_heads: int | Sequence[int]
    dtype: Any = None
    compression: Literal["zstd"] | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        checked_page_size(self.page_size)
        for heads in [self.num_heads] if isinstance(self.num_heads, int) else self.num_heads:
            if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1:
                message = f"is {heads!r}, must be an integer of at least 1"
                raise InvalidDescriptorError(message, code=Code.SHAPE, where="num_heads")

    def heads_of(self, group: int) -> int:
        """Heads in the last axis of a group's tensor."""
        if isinstance(self.num_heads, int):
            return self.num_heads
        if group >= len(self.num_heads):
            message = f"has {len(self.num_heads)} numbers, the object a group {group}"
            raise InvalidDescriptorError(message, code=Code.SHAPE, where="num_heads")
        return self.num_heads[group]


class Chunk(NamedTuple):
    """A memory object's tensors, one a group, and the name of their format."""

    format: str
    groups: Sequence[Array]


class Plane(NamedTuple):
    """A group's keys, values or latents: `[layers, tokens, heads, dim]`, a view.

    `seq_ids` names the layers, None where the object is one layer and does not say which.
    """

    role: str
    group: int
    tokens: Array
    seq_ids: list[str] | None


def planes_of(chunk: Chunk, form: ChunkForm) -> list[Plane]:
    """Keys and values, or latents, group by group.

    Raises:
        UnsupportedError: `layout`, a format that frames cannot say, by its name; `dtype`.
        InvalidDescriptorError: `shape`.

    Example:
        >>> import numpy as np
        >>> chunk = Chunk("KV_2LTD", [np.zeros((2, 32, 256, 1024), np.float16)])
        >>> [(plane.role, plane.tokens.shape) for plane in planes_of(chunk, ChunkForm(page_size=16, num_heads=8))]
        [('key', (32, 256, 8, 128)), ('value', (32, 256, 8, 128))]
    """
    if chunk.format not in _AXES:
        message = f"{chunk.format}: {_REFUSED.get(chunk.format, 'a format that is not known')}"
        raise UnsupportedError(message, code=Code.LAYOUT, where="format")
    planes = []
    for group, array in enumerate(chunk.groups):
        heads = 1 if chunk.format == LATENT else form.heads_of(group)
        typed = array.view(_numpy(storage_dtype(array.dtype, form.dtype)))
        for role, rows in _rows(typed, chunk.format, group):
            layers, tokens, elements = rows.shape
            if elements % heads:
                message = f"has {elements} elements a token, no whole number for {heads} heads"
                raise InvalidDescriptorError(message, code=Code.SHAPE, where=f"groups[{group}]")
            names = [f"layer {i}" for i in range(layers)] if array.ndim == 4 else None
            planes.append(Plane(role, group, rows.reshape(layers, tokens, heads, elements // heads), names))
    if not any(len(plane.tokens) for plane in planes):
        raise InvalidDescriptorError("has no layer", code=Code.SHAPE, where="groups")
    return planes


def _numpy(dtype: Dtype) -> Any:
    if dtype.numpy is None:
        raise UnsupportedError(f"{dtype.name} has no NumPy type", code=Code.DTYPE, where="dtype")
    return dtype.numpy


def _rows(array: Array, name: str, group: int) -> list[tuple[str, Array]]:
    """Roles, and `[layers, tokens, elements]` of each."""
    shape = array.shape
    if name == "KV_2LTD" and len(shape) == 4 and shape[0] == 2:
        return [("key", array[0]), ("value", array[1])]
    if name == "KV_T2D" and len(shape) == 3 and shape[1] == 2:
        return [("key", array[None, :, 0]), ("value", array[None, :, 1])]
    if name == "KV_2TD" and len(shape) == 3 and shape[0] == 2:
        return [("key", array[None, 0]), ("value", array[None, 1])]
    if name == LATENT and len(shape) == 4 and shape[0] == 1:
        return [("fused", array[0])]
    if name == LATENT and len(shape) == 2:
        return [("fused", array[None])]
    message = f"has shape {shape}, {name} is {_AXES[name]}"
    raise InvalidDescriptorError(message, code=Code.SHAPE, where=f"groups[{group}]")
