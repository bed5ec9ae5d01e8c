"""LMCache's memory formats as frames: a chunk's keys in one, its values in another, the layers as their sequences.

NumPy only; `lmcache` puts its memory objects in. A chunk is token-major and says neither how many heads its last axis
holds, nor what page size it was cut from, nor whose it is: that comes from the caller (`ChunkForm`), travels in every
frame, and is compared before a byte of the receiver's chunk is written. A frame a layer would cost a chunk of many
layers more than its bytes do; as sequences of one batch (`seq_ids` names them) each is still found alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hurray_wire import frame_reader, receiving
from hurray_wire.arrays import Bytes, as_bytes
from hurray_wire.codec import encoded_size, encoding
from hurray_wire.dtypes import Dtype
from hurray_wire.errors import (
    Code,
    Difference,
    FrameError,
    LimitError,
    MismatchError,
    TruncatedError,
)
from hurray_wire.forms import PREFIX_BYTES, Form, identify
from hurray_wire.inspection import Inspection, inspect
from hurray_wire.integrations.chunk_forms import FORMATS, Chunk, ChunkForm, Plane, planes_of
from hurray_wire.options import DEFAULT_LIMITS, Encoding, Limits, decode_options
from hurray_wire.order import StreamOrder
from hurray_wire.tensor import BlockPagedTensor

__all__ = ["Chunk", "ChunkForm", "chunk_bound", "chunk_encoding", "describe_chunk", "read_chunk", "write_chunk"]

Array = npt.NDArray[Any]

_METADATA_ROOM = 512
"""Bytes of JSON that an estimate allows a frame for what it does not know yet: key, model, shape."""
_LANDED_BYTES = 1 << 20
"""Planes of so many bytes are read straight into place; for less, memory of their own is cheaper than the checks."""


def _tensor(plane: Plane, form: ChunkForm, metadata: Mapping[str, Any]) -> BlockPagedTensor:
    """The layers as sequences of one batch: a view where pages divide the tokens, else one copy of them."""
    layers, tokens, heads, dim = plane.tokens.shape
    about = {**metadata, "lmcache.group": plane.group, **_named(plane)}
    if plane.role == "fused":
        about["content"] = "latent"
    like = _tables(layers, tokens, (form.page_size, heads, dim), plane.tokens.dtype, plane.role)
    return like.replace(page_pool=_paged(plane.tokens, form.page_size, like.page_pool.shape), metadata=about)


def _paged(tokens: Array, page_size: int, shape: tuple[int, ...]) -> Array:
    count = tokens.shape[1]
    if not count % page_size:
        return tokens.reshape(shape)
    pool = np.empty(shape, tokens.dtype)
    layers = pool.reshape(tokens.shape[0], -1, *tokens.shape[2:])
    layers[:, :count] = tokens
    layers[:, count:] = 0
    return pool


@lru_cache(maxsize=64)
def _tables(layers: int, tokens: int, inner: tuple[int, int, int], dtype: np.dtype[Any], role: str) -> BlockPagedTensor:
    """A plane's tensor but for its values: the same for every chunk of a store, and checked once."""
    pages = -(-tokens // inner[0])
    return BlockPagedTensor(
        np.broadcast_to(np.zeros((), dtype), (layers * pages, *inner)),
        block_table=np.arange(layers * pages),
        seq_ptr=np.arange(layers + 1) * pages,
        seq_lens=[tokens] * layers,
        kv_role=role,
    )


def _named(plane: Plane) -> dict[str, Any]:
    return {} if plane.seq_ids is None else {"seq_ids": plane.seq_ids}


def chunk_encoding(chunk: Chunk, form: ChunkForm, metadata: Mapping[str, Any]) -> tuple[int, Callable[[Bytes], None]]:
    """The exact bytes of a chunk's frames, and what writes them into memory of so many: each token once, into place.

    Args:
        chunk: KV_2LTD, KV_T2D, KV_2TD or KV_MLA_FMT; it must not change before it is written.
        metadata: what identifies the chunk; format and shapes are added.

    Raises:
        UnsupportedError: `layout`, another format by its name; `dtype`.
        InvalidDescriptorError: `shape`.

    Example:
        >>> chunk = Chunk("KV_2LTD", [np.ones((2, 3, 32, 4 * 8), np.float16)])
        >>> size, write = chunk_encoding(chunk, ChunkForm(page_size=16, num_heads=4), {"model": "tiny"})
        >>> value = np.empty(size, np.uint8)
        >>> write(value)
        >>> describe_chunk(value)[0]
        'KV_2LTD'
    """
    planes = planes_of(chunk, form)
    about = {**metadata, "lmcache.format": chunk.format, "lmcache.shapes": [list(a.shape) for a in chunk.groups]}
    options: Encoding = {"compression": form.compression, "threads": form.threads}
    options["stream_id"] = int.from_bytes(os.urandom(8), "little")
    frames = []
    for i, plane in enumerate(planes):
        options |= {"sequence": i, "last": i == len(planes) - 1}
        frames.append(encoding(_tensor(plane, form, about), **options))

    def write(out: Bytes) -> None:
        at = 0
        for size, write_frame in frames:
            write_frame(out[at : at + size])
            at += size

    return sum(size for size, _ in frames), write


def write_chunk(chunk: Chunk, out: Any, form: ChunkForm, metadata: Mapping[str, Any]) -> int:
    """A chunk's frames into a buffer, from its first byte; gives the bytes written. Arguments as `chunk_encoding`.

    Raises:
        LimitError: `frame_bytes`: the buffer is too small; it is then untouched.
        ValueError: the buffer is read-only. All else as `chunk_encoding`.

    Example:
        >>> chunk, form = Chunk("KV_2LTD", [np.ones((2, 3, 32, 32), np.float16)]), ChunkForm(16, 4)
        >>> out = np.empty(chunk_bound(chunk, form), np.uint8)
        >>> size = write_chunk(chunk, out, form, {"model": "tiny"})
        >>> mine = Chunk("KV_2LTD", [np.zeros((2, 3, 32, 32), np.float16)])
        >>> read_chunk(out[:size], mine, form, {"model": "tiny"})
        >>> bool((mine.groups[0] == 1).all())
        True
    """
    raw = as_bytes(out)
    if not raw.flags.writeable:
        raise ValueError("the buffer is read-only")
    size, write = chunk_encoding(chunk, form, metadata)
    if size > raw.size:
        message = f"the frames are {size} bytes, there is room for {raw.size}"
        raise LimitError(message, claimed=size, limit=raw.size, code=Code.FRAME_BYTES, where="value")
    write(raw[:size])
    return size


def chunk_bound(chunk: Chunk, form: ChunkForm) -> int:
    """Bytes that suffice for `write_chunk`, whatever the values; only shapes and types are looked at.

    Example:
        >>> like = np.broadcast_to(np.float16(), (2, 32, 256, 1024))  # no memory behind it
        >>> chunk_bound(Chunk("KV_2LTD", [like]), ChunkForm(page_size=16, num_heads=8)) / like.nbytes < 1.001
        True
    """
    total = 0
    for plane in planes_of(chunk, form):
        layers, tokens, heads, dim = plane.tokens.shape
        whole = -(-tokens // form.page_size) * form.page_size
        blank = np.broadcast_to(np.zeros((), plane.tokens.dtype), (layers, whole, heads, dim))
        tensor = _tensor(plane._replace(tokens=blank), form, {"lmcache.about": "x" * _METADATA_ROOM})
        total += encoded_size(tensor, compression=form.compression)
    return total


def describe_chunk(data: Any) -> tuple[str, list[tuple[int, ...]], Inspection]:
    """Format and shapes of the chunk whose frames `data` begins with, and its first frame's inspection.

    Raises:
        FrameError: `metadata`, for frames that are no chunk's; all that `inspect` raises.

    Example:
        >>> chunk, form = Chunk("KV_T2D", [np.ones((5, 2, 8), np.float16)]), ChunkForm(page_size=4, num_heads=2)
        >>> out = np.empty(chunk_bound(chunk, form), np.uint8)
        >>> describe_chunk(out[: write_chunk(chunk, out, form, {})])[:2]
        ('KV_T2D', [(5, 2, 8)])
    """
    found = inspect(data)
    about = found.metadata or {}
    name, shapes = about.get("lmcache.format"), about.get("lmcache.shapes")
    sound = isinstance(shapes, list) and all(
        isinstance(shape, list) and shape and all(type(n) is int and n >= 0 for n in shape) for shape in shapes
    )
    if name not in FORMATS or not sound or not shapes:
        message = "names no LMCache format and shapes: these are not the frames of a chunk"
        raise FrameError(message, code=Code.METADATA, where="metadata")
    return name, [tuple(shape) for shape in shapes], found


def read_chunk(
    data: Any, chunk: Chunk, form: ChunkForm, expect: Mapping[str, Any], *, limits: Limits = DEFAULT_LIMITS
) -> None:
    """Frames of a chunk into a chunk of the receiver's, checked and verified; what follows the stream is not read.

    Every frame's type, heads, layer, token count and identity is compared before its first token is written. Where a
    frame fails, the layers before it have been written: discard the chunk.

    Args:
        data: what `write_chunk` wrote, or more.
        chunk: where it goes, of the same shape.
        form: the receiver's; page_size, compression and threads are the sender's affair.
        expect: metadata that each frame must have.

    Raises:
        MismatchError: another chunk, shape, format, model, element type or number of heads.
        TruncatedError, ChecksumError, FrameError, InvalidDescriptorError, UnsupportedError, LimitError: as `decode`.

    Example:
        >>> chunk, form = Chunk("KV_2TD", [np.ones((2, 5, 8), np.float16)]), ChunkForm(page_size=4, num_heads=2)
        >>> out = np.empty(chunk_bound(chunk, form), np.uint8)
        >>> size = write_chunk(chunk, out, form, {"model": "tiny"})
        >>> try:
        ...     read_chunk(out[: size // 2], chunk, form, {"model": "tiny"})
        ... except TruncatedError as error:
        ...     print(error.code)
        stream_truncated
    """
    raw, at = as_bytes(data), 0
    order = StreamOrder(limits)
    shapes = [list(array.shape) for array in chunk.groups]
    expect = {**expect, "lmcache.format": chunk.format, "lmcache.shapes": shapes}
    for plane in planes_of(chunk, form):
        if at and not order.open:
            raise _short(order, at)
        if not raw[at:].size:
            raise TruncatedError(needed=1, available=0, code=Code.STREAM_TRUNCATED, where="stream", offset=at)
        if identify(raw[at : at + PREFIX_BYTES].tobytes(), at) is Form.BARE:
            message = "a bare item, which has no metadata: these are not the frames of a chunk"
            raise FrameError(message, code=Code.MAGIC, where="magic", offset=at)
        head = frame_reader.read_frame_head(raw, at, limits)
        order.frame(head.prologue, head.base)
        if head.closing:
            raise _short(order, at)
        _read_plane(raw, head, plane, expect, limits, form.threads)
        at += head.prologue.frame_length
    if order.open:
        message = f"goes on behind frame {order.sequence - 1}, the last that the chunk has a place for"
        raise FrameError(message, code=Code.LAST, where="last", offset=at)


def _short(order: StreamOrder, at: int) -> TruncatedError:
    message = "the stream has ended, and the chunk has more groups"
    return TruncatedError(message, needed=1, available=0, code=Code.STREAM_TRUNCATED, where="stream", offset=at)


def _read_plane(
    raw: Bytes,
    head: frame_reader.Head,
    plane: Plane,
    expect: Mapping[str, Any],
    limits: Limits,
    threads: int | None,
) -> None:
    layers, tokens, heads, dim = plane.tokens.shape
    wanted = {
        **expect,
        "lmcache.group": plane.group,
        **_named(plane),
        "dtype": Dtype.of(plane.tokens.dtype),
        "num_heads": heads,
        "head_dim": dim,
        "kv_role": plane.role,
        "num_seqs": layers,
        "quantization": None,
    }
    options = decode_options({"expect": wanted, "limits": limits, "threads": threads})
    fetch = frame_reader.fetch_from(raw, head.base)
    found, small = frame_reader.describe(head, fetch, options)
    parts = receiving.tables_only(found, small, fetch, options)
    lens = [tokens] * layers
    if parts.seq_lens is None or parts.seq_lens.tolist() != lens:
        raise MismatchError([Difference("seq_lens", None if parts.seq_lens is None else parts.seq_lens.tolist(), lens)])
    layout = found.descriptor.layout
    pages, odd = divmod(tokens, layout.page_size)
    in_order = not odd and np.array_equal(parts.block_table, np.arange(layout.num_pages))
    if in_order and layout.num_pages == layers * pages and plane.tokens.nbytes >= _LANDED_BYTES:
        pool = plane.tokens.reshape(layers * pages, layout.page_size, heads, dim)
        receiving.frame_into(found, small, fetch, pool, range(layers * pages), options)
        return
    frame_reader.check_payload(found, fetch, options)
    t = BlockPagedTensor.of_parts(frame_reader.finish(found, small, fetch, options))
    for layer, run in enumerate(plane.tokens):
        t.gather(layer, out=run)
