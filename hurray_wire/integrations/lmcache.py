"""A serde for LMCache's distributed storage (`lmcache/v1/distributed/serde`): each memory object as HRKV frames.

`register()` puts it into LMCache's own registry as "hrkv"; an L2 adapter's configuration then names it:

    {"type": "fs", "base_path": "/cache", "serde": {"type": "hrkv", "page_size": 16, "num_heads": 8}}

LMCache 0.5.6 stores raw bytes under a key and nothing beside them: no element type, heads, page size or checksum. Here
they are in the value, with model, rank and chunk hash of the key, and all are compared on load. Nothing here needs a
GPU. For the older remote backends see `lmcache_remote`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from lmcache.v1.distributed.serde import (
    AsyncSerdeProcessor,
    Deserializer,
    SerdeProcessor,
    Serializer,
    get_registered_serde_types,
    register_serde_factory,
)

from hurray_wire.arrays import as_bytes, from_torch
from hurray_wire.errors import Code, UnsupportedError
from hurray_wire.integrations.chunks import Chunk, ChunkForm, chunk_bound, read_chunk, write_chunk

__all__ = ["HrkvDeserializer", "HrkvSerializer", "chunk_of", "register", "serde"]

_BLOCK_BYTES = 4096
"""Values are whole blocks of this size, so that LMCache's O_DIRECT files take them."""
_FORM = ("page_size", "num_heads", "dtype", "compression", "threads")


def chunk_of(memory_obj: Any, format: str | None = None) -> Chunk:
    """A memory object's tensors, not copied, and its format.

    Args:
        memory_obj: an LMCache `MemoryObj` on the CPU.
        format: the MemoryFormat's name that the object has; None for what it says. The distributed storage's
            allocators mark whatever they make KV_2LTD or UNDEFINED, so that there the name given counts.

    Raises:
        UnsupportedError: `layout`, for bytes that are no tensor, or an object that says another format.
    """
    said = memory_obj.get_memory_format().name
    name = said if format is None else format
    if name != said and said not in ("UNDEFINED", "KV_2LTD"):
        raise UnsupportedError(f"{said}: the object is not {name}", code=Code.LAYOUT, where="format")
    count = len(memory_obj.metadata.shapes or ())
    tensors = [memory_obj.get_tensor(i) for i in range(count)] if count else [memory_obj.tensor]
    if any(tensor is None for tensor in tensors):
        raise UnsupportedError(f"{name}: the object is bytes, not a tensor", code=Code.LAYOUT, where="format")
    return Chunk(name, [from_torch(tensor) for tensor in tensors])


def _identity(key: Any) -> dict[str, Any]:
    """What an `ObjectKey` says of a chunk, as metadata."""
    return {
        "model": key.model_name,
        "lmcache.kv_rank": key.kv_rank,
        "lmcache.object_group": key.object_group_id,
        "lmcache.chunk_hash": key.chunk_hash.hex(),
    }


class HrkvSerializer(Serializer):  # type: ignore[misc]
    """A memory object's frames into LMCache's buffer.

    Args:
        form: page size, heads, compression: what the object does not say.
        format: the objects' format, see `chunk_of`.
        fit: the size of every value, as a share of what raw frames need. LMCache's own file adapter takes back only
            values of exactly the estimated size, so the frames are padded to it with zeros; 1 fits whatever comes.
            Below 1, with compression, values are smaller, and a chunk that does not fit is refused: LMCache then
            counts a failed store. None gives the frames' own size, for adapters that take it.

    Example:
        >>> serializer = HrkvSerializer(ChunkForm(page_size=16, num_heads=8, compression="zstd"), fit=0.75)
        >>> import torch
        >>> from lmcache.v1.distributed.api import MemoryLayoutDesc
        >>> layout = MemoryLayoutDesc([torch.Size([2, 32, 256, 1024])], [torch.bfloat16])
        >>> serializer.estimate_serialized_size(layout) / (2 * 32 * 256 * 1024 * 2) < 0.76
        True
    """

    def __init__(self, form: ChunkForm, *, format: str = "KV_2LTD", fit: float | None = 1.0) -> None:
        if fit is not None and not 0 < fit <= 1:
            raise ValueError(f"fit must be above 0 and at most 1, not {fit!r}")
        self._form, self._format, self._fit = form, format, fit

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """Bytes of every value of that layout; with fit None, bytes that suffice."""
        blank = [
            from_torch(torch.zeros((), dtype=dtype).expand(tuple(shape)))
            for shape, dtype in zip(layout_desc.shapes, layout_desc.dtypes, strict=True)
        ]
        share = chunk_bound(Chunk(self._format, blank), self._form) * (self._fit or 1)
        return math.ceil(share / _BLOCK_BYTES) * _BLOCK_BYTES

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        """Frames of src into dst; gives the bytes of the value.

        Raises:
            UnsupportedError: a format that frames cannot say, by its name; an element type.
            LimitError: `frame_bytes`: the chunk does not fit into the share that `fit` leaves.
        """
        out = as_bytes(dst.byte_array)
        size = write_chunk(chunk_of(src, self._format), out, self._form, _identity(key))
        if self._fit is None:
            return size
        out[size:] = 0
        return out.size


class HrkvDeserializer(Deserializer):  # type: ignore[misc]
    """Frames out of LMCache's buffer into a memory object; arguments as `HrkvSerializer`."""

    def __init__(self, form: ChunkForm, *, format: str = "KV_2LTD") -> None:
        self._form, self._format = form, format

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        """The value in src into dst, once it is known to be that key's, of dst's type, shape and heads, and sound.

        Raises:
            HurrayWireError: as `read_chunk` says; dst is then to be discarded, as LMCache does.
        """
        read_chunk(src.byte_array, chunk_of(dst, self._format), self._form, _identity(key))


def serde(options: Mapping[str, Any]) -> SerdeProcessor:
    """LMCache's processor of a configuration: the factory that `register` hands over.

    Args:
        options: page_size and num_heads (one number a group where they differ); and where they are not the defaults
            dtype, compression, threads, format, fit, max_workers, as `ChunkForm` and `HrkvSerializer` have them.

    Raises:
        ValueError: an option is missing or not known.
    """
    unknown = sorted(set(options) - {*_FORM, "format", "fit", "max_workers"})
    missing = sorted({"page_size", "num_heads"} - set(options))
    if unknown or missing:
        raise ValueError(f"serde hrkv: options missing: {missing}, not known: {unknown}")
    form = ChunkForm(**{name: options[name] for name in _FORM if name in options})
    format = options.get("format", "KV_2LTD")
    return AsyncSerdeProcessor(
        HrkvSerializer(form, format=format, fit=options.get("fit", 1.0)),
        HrkvDeserializer(form, format=format),
        max_workers=options.get("max_workers", 1),
    )


def register(name: str = "hrkv") -> None:
    """Make the serde known to LMCache under a name; again is of no effect.

    Example:
        >>> register()
        >>> "hrkv" in get_registered_serde_types()
        True
    """
    if name not in get_registered_serde_types():
        register_serde_factory(name, serde)
