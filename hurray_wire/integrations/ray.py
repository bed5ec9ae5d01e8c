"""Frames in Ray's object store: copied into shared memory once, read there by every process of the node.

What is stored is a plain list of byte arrays: a frame's header, the page pool, block_table, seq_ptr, and scales where
there are; or one array, the whole frame, where the pool does not go as it lies. Ray keeps arrays out of band, aligned,
and gives them as read-only views of the shared memory: no pool is copied but once, and the header makes the list a
frame again, with all that a frame is held to.

`ray.put(tensor)` works too, and copies no more, for tensors that need no checking: a BlockPagedTensor pickles its
arrays out of band. ray is imported only by `put` and `get`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from hurray_wire import frame_writer
from hurray_wire.arrays import Bytes, as_bytes, raw_view
from hurray_wire.codec import decode, encode_buffer
from hurray_wire.errors import Code, FrameError, StoreError
from hurray_wire.options import Decoding, Sending, encode_options
from hurray_wire.payload import payload_of
from hurray_wire.receiving import decode_parts
from hurray_wire.tensor import BlockPagedTensor

__all__ = ["from_object", "get", "put", "to_object"]


def to_object(tensor: BlockPagedTensor, **options: Unpack[Sending]) -> list[Bytes]:
    """A tensor as a value for Ray: to return from a task or an actor, or to `put`.

    A contiguous pool is handed over as it lies. A strided one, live pages of one, a scrubbed or compressed one make a
    frame in one piece first, which is a copy more.

    Args:
        **options: of `encode`: pages, scrub, compression, checksum, alignment, chunk_bytes, threads.

    Raises:
        As `encode`.

    Example:
        >>> import numpy as np, hurray_wire as hw
        >>> from hurray_wire.integrations.ray import from_object, to_object
        >>> pool = np.ones((1, 4, 1, 8), np.int8)
        >>> t = hw.BlockPagedTensor(pool, block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> value = to_object(t)
        >>> np.shares_memory(value[1], pool), from_object(value, expect={"page_size": 4}) == t
        (True, True)
    """
    unknown = options.keys() - Sending.__annotations__.keys()
    if unknown:
        raise TypeError(f"to_object() has no option {', '.join(sorted(unknown))}")
    chosen = encode_options(options)
    payload = payload_of(tensor, chosen)
    pool = payload.pages.flat()
    if chosen.compression or pool is None:
        return [as_bytes(encode_buffer(tensor, **options))]
    header = np.frombuffer(frame_writer.frame_header(payload, chosen), np.uint8)
    return [header, pool, *(raw_view(np.ascontiguousarray(table)) for table in payload.tables)]


def from_object(value: Sequence[Any], **options: Unpack[Decoding]) -> BlockPagedTensor:
    """The tensor of what `to_object` gave, its pool a view of what Ray shares (read-only), checked as by `decode`.

    Args:
        **options: of `decode`. With `verify=False` the pool is not touched.

    Raises:
        FrameError: `magic`: no such value. TruncatedError, FrameError `trailing_bytes`: a buffer of another size than
            the header says. All else as `decode`.
    """
    if not isinstance(value, list | tuple) or not value or not all(isinstance(part, np.ndarray) for part in value):
        message = f"no frame, but a {type(value).__name__}"
        raise FrameError(message, code=Code.MAGIC, where="object")
    if len(value) == 1:
        return decode(value[0], **options)
    return decode_parts(value[0], value[1:], **options)


def put(tensor: BlockPagedTensor, **options: Unpack[Sending]) -> Any:
    """Put a tensor into the object store as a frame; gives the ObjectRef. Options and errors as `to_object`.

    Raises:
        StoreError: the store and the disk that it spills to are full.
    """
    import ray

    value = to_object(tensor, **options)
    try:
        return ray.put(value)
    except ray.exceptions.RayError as error:
        raise StoreError(f"the object was not stored: {error}", where="put", cause=error) from error


def get(ref: Any, *, timeout: float | None = None, **options: Unpack[Decoding]) -> BlockPagedTensor:
    """The tensor behind an ObjectRef, or of a value that Ray has fetched already. Options and errors as `from_object`.

    Ray's own errors (the object is lost, its task failed, the time is over) pass through.
    """
    import ray

    return from_object(ray.get(ref, timeout=timeout) if isinstance(ref, ray.ObjectRef) else ref, **options)
