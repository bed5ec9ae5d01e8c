"""The same frames for LMCache's older remote backends (`lmcache/v1/storage_backend`): file, server, Redis connectors.

There a serde makes a memory object of a memory object, and the switch `CreateSerde` that picks one is closed. `Hrkv...`
are LMCache's own base classes filled in; `create_serde` is that switch with "hrkv" added, to be put in its place, and
`remote_serde` gives the pair for a backend that exists. 28 bytes of header stand before the value there: no magic, no
checksum, a length of 32 bits. What they lack is in the frames.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.storage_backend.naive_serde.serde import Deserializer, Serializer

from hurray_wire.arrays import as_bytes, to_torch
from hurray_wire.errors import Difference, MismatchError
from hurray_wire.integrations.chunks import ChunkForm, chunk_encoding, describe_chunk, read_chunk
from hurray_wire.integrations.lmcache import chunk_of
from hurray_wire.memory import allocated

__all__ = ["HrkvRemoteDeserializer", "HrkvRemoteSerializer", "create_serde", "remote_serde"]


def _identity(metadata: Any) -> dict[str, Any]:
    """What an `LMCacheMetadata` says of its chunks."""
    return {
        "model": metadata.model_name,
        "lmcache.world_size": metadata.world_size,
        "lmcache.worker_id": metadata.worker_id,
    }


class HrkvRemoteSerializer(Serializer):  # type: ignore[misc]
    """A memory object's frames as an object of bytes, which every remote connector stores.

    It is not marked as bytes (`BINARY_BUFFER`) but as a tensor of uint8: for those, whoever fetches it takes memory out
    of LMCache's own, for bytes a fresh `bytearray`, whose zeroing and page faults take longer than the fetch.

    Args:
        form, metadata: as `HrkvRemoteDeserializer`.
        allocate: as there; the frames are then in LMCache's memory, and in memory of their own where it has no room.
    """

    def __init__(self, form: ChunkForm, metadata: Any, allocate: Callable[..., Any] | None = None) -> None:
        self._form, self._about, self._allocate = form, _identity(metadata), allocate

    def serialize(self, memory_obj: Any) -> Any:
        """The object's frames.

        Raises:
            UnsupportedError: a format that frames cannot say, by its name; an element type.
        """
        size, write = chunk_encoding(chunk_of(memory_obj), self._form, self._about)
        shapes, dtypes = [torch.Size([1, 1, 1, size])], [torch.uint8]
        made = None
        if self._allocate is not None:  # never waiting: stores that wait for each other's memory wait for ever
            made = self._allocate(shapes, dtypes, MemoryFormat.KV_2LTD, busy_loop=False)
        if made is None:
            made = _own(shapes, dtypes, MemoryFormat.KV_2LTD)
        write(as_bytes(made.byte_array))
        return made


class HrkvRemoteDeserializer(Deserializer):  # type: ignore[misc]
    """A value's frames as a memory object.

    Args:
        form: the receiver's; heads and element type are compared.
        metadata: LMCache's own of this worker: model, rank, type and shape are compared, and no value makes more
            memory be taken than one of its chunks.
        allocate: `allocate` of LMCache's CPU backend, which makes the objects; None for memory of the result's own.
    """

    def __init__(self, form: ChunkForm, metadata: Any, allocate: Callable[..., Any] | None = None) -> None:
        self._form, self._metadata, self._allocate = form, metadata, allocate
        self._about = _identity(metadata)

    def deserialize(self, memory_obj: Any) -> Any:
        """The object, or None where `allocate` had no room. The value's memory is given back.

        Raises:
            MismatchError: a chunk of another model, rank, type or shape than this worker's.
            HurrayWireError: as `read_chunk` says.
        """
        try:
            return self._read(memory_obj.byte_array)
        finally:
            memory_obj.ref_count_down()

    def _read(self, data: Any) -> Any:
        name, shapes, _ = describe_chunk(data)
        dtypes = self._metadata.get_dtypes()
        self._check(name, shapes)
        make = self._allocate or _own
        made = make([torch.Size(shape) for shape in shapes], dtypes, MemoryFormat[name])
        if made is not None:
            try:
                read_chunk(data, chunk_of(made), self._form, self._about)
            except BaseException:
                made.ref_count_down()
                raise
        return made

    def _check(self, name: str, shapes: list[tuple[int, ...]]) -> None:
        """No more tokens than a chunk's, and all else as this worker has it; a layer-wise object is one layer of it."""
        whole = [tuple(shape) for shape in self._metadata.get_shapes()]
        limit = sum(math.prod(shape) for shape in whole)
        wanted = [_like(name, shape, mine) for shape, mine in zip(shapes, whole, strict=False)]
        if len(shapes) != len(whole) or shapes != wanted or sum(map(math.prod, shapes)) > limit:
            raise MismatchError([Difference("lmcache.shapes", shapes, wanted or whole)])


def _own(shapes: list[Any], dtypes: list[Any], format: MemoryFormat) -> Any:
    """An object in memory of its own."""
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    about = MemoryObjMetadata(
        shape=shapes[0],
        dtype=dtypes[0],
        address=0,
        phy_size=size,
        ref_count=1,
        fmt=format,
        shapes=shapes,
        dtypes=dtypes,
    )
    return TensorMemoryObj(to_torch(allocated(size, None)), about, None)


def _like(name: str, shape: tuple[int, ...], whole: tuple[int, ...]) -> tuple[int, ...]:
    """What a shape of that format must be, its own number of tokens aside, in a worker of `[kv, L, T, hidden]`."""
    planes, layers, tokens, hidden = whole
    axis = MemoryFormat[name].token_dim() if name in ("KV_2LTD", "KV_MLA_FMT") else {"KV_T2D": 0, "KV_2TD": 1}[name]
    mine = min(shape[axis], tokens) if axis < len(shape) else tokens
    if name == "KV_T2D":
        return mine, planes, hidden
    if name == "KV_2TD":
        return planes, mine, hidden
    if name == "KV_MLA_FMT" and len(shape) == 2:
        return min(shape[0], tokens), hidden
    return planes, layers, mine, hidden


def remote_serde(
    metadata: Any,
    *,
    page_size: int,
    compression: Literal["zstd"] | None = "zstd",
    dtype: Any = None,
    threads: int | None = None,
    allocate: Callable[..., Any] | None = None,
) -> tuple[HrkvRemoteSerializer, HrkvRemoteDeserializer]:
    """A serializer and a deserializer for one worker: `backend.serializer, backend.deserializer = remote_serde(...)`.

    Args:
        metadata: the worker's `LMCacheMetadata`, which says model, rank, type, layers and heads.
        page_size: tokens a page of the engine.
        compression, dtype, threads: as `ChunkForm`.
        allocate: see `HrkvRemoteDeserializer`.

    Example:
        >>> from lmcache.v1.metadata import LMCacheMetadata
        >>> about = LMCacheMetadata("tiny", 1, 1, 0, 0, torch.float16, (3, 2, 256, 4, 8))
        >>> serializer, deserializer = remote_serde(about, page_size=16)
    """
    form = ChunkForm(page_size, metadata.kv_shape[3], dtype, compression, threads)
    return HrkvRemoteSerializer(form, metadata, allocate), HrkvRemoteDeserializer(form, metadata, allocate)


def create_serde(others: Callable[..., Any], *, page_size: int, **options: Any) -> Callable[..., Any]:
    """LMCache's `CreateSerde` with "hrkv" added: `remote_backend.CreateSerde = create_serde(remote_backend.CreateSerde,
    page_size=16)` before the engine starts, and `remote_serde: hrkv` in its configuration.

    Args:
        others: the function that knows the other names.
        page_size, options: as `remote_serde`.

    Example:
        >>> create_serde(lambda kind, metadata, config: kind, page_size=16)("naive", None, None)
        'naive'
    """

    def create(serde_type: str, metadata: Any, config: Any) -> Any:
        if serde_type == "hrkv":
            return remote_serde(metadata, page_size=page_size, **options)
        return others(serde_type, metadata, config)

    return create
