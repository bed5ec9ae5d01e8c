"""Tensors in Mooncake's Store: a frame a key, put from where it lies, read whole, into pages, or a range at a time.

A store holds bytes by key for whoever asks later, so it takes whole frames, compressed ones too: they carry their own
lengths and checksums, and what comes out is checked as any bytes are. `store` is a `MooncakeDistributedStore` that has
been set up; it must have registered nothing.

    from mooncake.store import MooncakeDistributedStore
    store = MooncakeDistributedStore()
    store.setup("10.0.0.1", "P2PHANDSHAKE", 512 << 20, 64 << 20, "tcp", "", "10.0.0.9:50051")
    put(store, "prefix/17/key/3", tensor)
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from hurray_wire.arrays import address
from hurray_wire.codec import decode, encode_parts
from hurray_wire.errors import Code, TransferError
from hurray_wire.memory import allocated
from hurray_wire.options import Decoding, Encoding
from hurray_wire.receiving import decode_into
from hurray_wire.stream.partial import Frame, open_frame
from hurray_wire.tensor import BlockPagedTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hurray_wire.arrays import Bytes

__all__ = ["get", "open_stored", "put"]


def put(store: Any, key: str, tensor: BlockPagedTensor, **options: Unpack[Encoding]) -> int:
    """Put a tensor under a key; gives the bytes of its frame. The store copies the pool's own memory, nobody else does.

    Raises:
        TransferError: the store did not take it; a key that is there already keeps what it has, and is no error.
        All else as `encode`.
    """
    parts = encode_parts(tensor, **options)
    status = store.put_parts(key, *parts)
    if status:
        raise TransferError(f"the store did not take {key!r} ({status})", where="key")
    return sum(part.nbytes for part in parts)


def get(store: Any, key: str, pool: Any = None, page_ids: Any = None, **options: Unpack[Decoding]) -> BlockPagedTensor:
    """The tensor under a key: over one read into memory of its own, or its pages in a pool, as `decode_into` does.

    Raises:
        TransferError: `memory_refused`: no such key; `transfer_failed`. All else as `decode`, `decode_into`.
    """
    size = _size(store, key)
    memory = allocated(size, options.get("alloc"))
    with _registered(store, memory):
        came = store.get_into(key, address(memory), size)
    if came != size:
        raise TransferError(f"the store gave {came} of the {size} bytes of {key!r}", where="key")
    if pool is None:
        return decode(memory, **options)
    return decode_into(memory, pool, page_ids, **options)


def open_stored(store: Any, key: str, **options: Any) -> Frame:
    """A stored frame of which only what is asked for is read: one sequence's chunks, say. As `open_frame`.

    Raises:
        As `get`, now and when something is read.
    """
    size = _size(store, key)

    def read_at(offset: int, length: int) -> Bytes:
        length = max(0, min(length, size - offset))
        memory = allocated(length, None)
        if length:
            with _registered(store, memory):
                came = store.get_into_ranges([address(memory)], [[key]], [[[0]]], [[[offset]]], [[[length]]])
            if np.ravel(came).tolist() != [length]:
                raise TransferError(f"the store gave {came} of {length} bytes of {key!r}", where="key")
        return memory

    return open_frame(read_at, **options)


def _size(store: Any, key: str) -> int:
    size = int(store.get_size(key))
    if size < 0:
        raise TransferError(f"the store has no {key!r} ({size})", code=Code.MEMORY_REFUSED, where="key")
    return size


@contextmanager
def _registered(store: Any, memory: Bytes) -> Iterator[None]:
    if store.register_buffer(address(memory), memory.size):
        raise TransferError("the store does not register memory", code=Code.MEMORY_REFUSED, where="memory")
    try:
        yield
    finally:
        store.unregister_buffer(address(memory))
