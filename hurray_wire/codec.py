"""Encode and decode: picks the form by option or magic, and hands over to it.

The public functions over bytes in memory. Nothing here knows a byte of either form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Unpack

from hurray_wire import bare, familiar, frame_reader, frame_writer
from hurray_wire.arrays import Bytes, Stored, as_bytes
from hurray_wire.assembly import Parts
from hurray_wire.forms import PREFIX_BYTES, Form, identify
from hurray_wire.memory import allocated
from hurray_wire.options import DecodeOptions, Decoding, EncodeOptions, Encoding, decode_options, encode_options
from hurray_wire.order import StreamOrder
from hurray_wire.payload import Payload, payload_of
from hurray_wire.structs.frame import PROLOGUE_PLAN
from hurray_wire.tensor import BlockPagedTensor

__all__ = [
    "decode",
    "decode_from",
    "encode",
    "encode_buffer",
    "encode_header",
    "encode_into",
    "encode_parts",
    "encoded_size",
    "iter_decode",
]


def encode(tensor: BlockPagedTensor, **options: Unpack[Encoding]) -> bytes:
    """One tensor as fresh bytes: convenient, and the slowest way (`encode_parts` copies nothing).

    Args:
        tensor: what to send; must be sound.
        framing: "hrkv" (section 4) or "bare" (section 1).
        pages: "all", or "live" for the pages that block_table names, in order of first use.
        scrub: zero every slot that no sequence owns, in what is sent only; needs seq_lens.
        compression: None or "zstd", of the page pool.
        checksum: False leaves page_pool, scales and zero_points without; all else always has one.
        alignment: bytes, a power of two of at least 64; None keeps the tensor's (64 for a new one).
        chunk_bytes: of the pool, rounded to whole pages; None for 4 MiB raw, 1 MiB compressed.
        threads: None for one below 4 MiB of pool and the cores at hand above.
        sequence, last, stream_id: a frame's place in a stream; a single blob is a stream of one.

    Raises:
        InvalidDescriptorError: the tensor has violations.
        UnsupportedError: `bare_form`, `packed_pool`, `seq_lens_unknown`.
        FrameError: `metadata`, for a reserved name.

    Example:
        >>> import numpy as np
        >>> pool = np.zeros((2, 4, 1, 8), np.float16)
        >>> t = BlockPagedTensor(pool, block_table=[1], seq_ptr=[0, 1], seq_lens=[3])
        >>> decode(encode(t)) == t, len(encode(t, framing="bare"))
        (True, 273)
    """
    return b"".join(encode_parts(tensor, **options))


def encode_parts(tensor: BlockPagedTensor, **options: Unpack[Encoding]) -> list[memoryview]:
    """One tensor as a list of pieces for writev or sendmsg: the pool's own memory where it is stored raw.

    What happens to that memory between here and sending is the caller's affair: checksums are those of now.
    Arguments and errors as `encode`.

    Example:
        >>> import numpy as np
        >>> pool = np.zeros((64, 16, 2, 8), np.float16)
        >>> t = BlockPagedTensor(pool, block_table=[1], seq_ptr=[0, 1], seq_lens=[3])
        >>> any(np.shares_memory(np.frombuffer(part, np.uint8), pool) for part in encode_parts(t))
        True
    """
    chosen = encode_options(options)
    return [memoryview(part) for part in parts_of(payload_of(tensor, chosen), chosen)]


def parts_of(payload: Payload, options: EncodeOptions) -> Sequence[Stored]:
    """The pieces of either form."""
    if options.framing == Form.BARE:
        return bare.bare_parts(payload, options)
    return frame_writer.frame_parts(payload, options)


def encode_buffer(tensor: BlockPagedTensor, **options: Unpack[Encoding]) -> memoryview:
    """One tensor in one contiguous, writable, 64-byte aligned piece, without the cost of fresh `bytes`.

    Arguments and errors as `encode`.

    Example:
        >>> import numpy as np
        >>> t = BlockPagedTensor(np.zeros((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> encode_buffer(t) == encode(t)
        True
    """
    size, write = encoding(tensor, **options)
    out = allocated(size, None)
    write(out)
    return memoryview(out)


def encoding(tensor: BlockPagedTensor, **options: Unpack[Encoding]) -> tuple[int, Callable[[Bytes], None]]:
    """The exact bytes that a tensor takes, and what writes them into memory of so many; arguments as `encode`."""
    chosen = encode_options(options)
    payload = payload_of(tensor, chosen)
    if chosen.compression and chosen.framing == Form.HRKV:
        frame = frame_writer.CompressedFrame(payload, chosen)
        return frame.size, frame.write
    return _size(payload, chosen), lambda out: _write(payload, chosen, out)


def encode_into(tensor: BlockPagedTensor, buffer: Any, **options: Unpack[Encoding]) -> int:
    """One tensor into a caller's writable buffer, from its first byte; gives the bytes written.

    The pool is copied once, straight into place. Arguments and errors as `encode`.

    Raises:
        ValueError: the buffer is too small or read-only; it is then untouched.

    Example:
        >>> import numpy as np
        >>> t = BlockPagedTensor(np.zeros((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> memory = bytearray(encoded_size(t))
        >>> encode_into(t, memory) == len(memory), memory == encode(t)
        (True, True)
    """
    out = as_bytes(buffer)
    if not out.flags.writeable:
        raise ValueError("the buffer is read-only")
    size, write = encoding(tensor, **options)
    if out.size < size:
        raise ValueError(f"the buffer has {out.size} bytes, {size} are needed")
    write(out[:size])
    return size


def _write(payload: Payload, options: EncodeOptions, out: Bytes) -> None:
    if options.framing == Form.BARE:
        bare.write_bare(payload, options, out)
    else:
        frame_writer.write_frame(payload, options, out)


def _size(payload: Payload, options: EncodeOptions) -> int:
    if options.framing == Form.BARE:
        return bare.bare_size(payload, options)
    return frame_writer.frame_size(payload, options)


def encode_header(tensor: BlockPagedTensor, **options: Unpack[Encoding]) -> bytes:
    """A frame up to its first buffer's offset, padding included (a bare item's descriptor), for buffers that travel
    by other means: `decode_parts` puts both together and checks them. Arguments and errors as `encode`.

    Raises:
        FrameError: `section_codec`, with compression.

    Example:
        >>> import numpy as np
        >>> t = BlockPagedTensor(np.zeros((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> encode(t).startswith(encode_header(t))
        True
    """
    chosen = encode_options(options)
    payload = payload_of(tensor, chosen)
    if chosen.framing == Form.BARE:
        bare.refuse_frame_only(payload, chosen)
        return payload.descriptor.encode()
    return frame_writer.frame_header(payload, chosen)


def encoded_size(tensor: BlockPagedTensor, **options: Unpack[Encoding]) -> int:
    """Bytes that `encode` gives: exact when raw, an upper bound when compressed. Arguments and errors as `encode`.

    Example:
        >>> import numpy as np
        >>> t = BlockPagedTensor(np.zeros((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> encoded_size(t) == len(encode(t))
        True
    """
    chosen = encode_options(options)
    return _size(payload_of(tensor, chosen), chosen)


def decode(data: Any, **options: Unpack[Decoding]) -> BlockPagedTensor:
    """The one tensor in `data`, either form, checked by the stages of section 3.

    Args:
        data: any contiguous buffer, kept alive by the tensor's views of it.
        strict: False reports what a lenient reader tolerates in `.violations`.
        verify: False leaves page_pool, scales and zero_points unverified; then the cost of decoding does not depend
            on their size. All else is always verified.
        expect: a mapping of what the tensor must be: dtype, page_size, num_heads, head_dim, kv_role, layer_index,
            num_seqs, quantization, or a metadata key.
        limits: `Limits`, looked at before anything is allocated.
        copy: None views the pool read-only where it is raw and aligned for its element, else copies; True always
            owns; False never copies.
        alloc: `alloc(nbytes, alignment)` for what is copied or decompressed.
        threads: None for one below 4 MiB of payload and the cores at hand above.

    Raises:
        TruncatedError, ChecksumError, FrameError, InvalidDescriptorError, UnsupportedError, LimitError, MismatchError.

    Example:
        >>> import numpy as np
        >>> t = BlockPagedTensor(np.ones((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> decode(encode(t), expect={"dtype": "int8", "page_size": 4}).gather(0).sum()
        np.int64(32)
    """
    raw = as_bytes(data)
    parts, _ = read_item(raw, 0, decode_options(options), alone=True)
    return BlockPagedTensor.of_parts(parts)


def decode_from(data: Any, offset: int = 0, **options: Unpack[Decoding]) -> tuple[BlockPagedTensor, int]:
    """The tensor that begins at `offset`, and where the next item begins. Arguments and errors as `decode`.

    Example:
        >>> import numpy as np
        >>> t = BlockPagedTensor(np.ones((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> two = encode(t) + encode(t, framing="bare")
        >>> decode_from(two, decode_from(two)[1])[1] == len(two)
        True
    """
    raw = as_bytes(data)
    if not 0 <= offset <= raw.size:
        raise ValueError(f"offset {offset} is outside the {raw.size} bytes")
    parts, end = read_item(raw, offset, decode_options(options), alone=False)
    return BlockPagedTensor.of_parts(parts), end


def read_item(data: Bytes, offset: int, options: DecodeOptions, *, alone: bool) -> tuple[Parts, int]:
    """One item of either form."""
    reading = familiar.read(data, offset, options, alone=alone)
    if reading is not None:
        return reading.parts, offset + reading.frame_length
    return read_by_stages(data, offset, options, alone=alone)


def read_by_stages(data: Bytes, offset: int, options: DecodeOptions, *, alone: bool) -> tuple[Parts, int]:
    """One item of either form, whether or not its like was read before."""
    form = identify(data[offset : offset + PREFIX_BYTES].tobytes(), offset)
    if form is Form.BARE:
        return bare.read_bare(data, offset, options, alone=alone)
    return frame_reader.read_frame(data, offset, options, alone=alone)


def iter_decode(data: Any, **options: Unpack[Decoding]) -> Iterator[BlockPagedTensor]:
    """Every tensor of a concatenation of streams and items, of either form; closing frames are passed over.

    Within a stream frames count up from 0 under one stream_id, and LAST ends it. Arguments and errors as `decode`.

    Raises:
        FrameError: `sequence`, `stream_id`.
        TruncatedError: `stream_truncated`: the data ends before a LAST.

    Example:
        >>> import numpy as np
        >>> t = BlockPagedTensor(np.ones((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> len(list(iter_decode(encode(t) + encode(t, framing="bare"))))
        2
    """
    chosen = decode_options(options)
    raw = as_bytes(data)
    at = 0
    order = StreamOrder(chosen.limits)
    while at < raw.size:
        reading = familiar.read(raw, at, chosen, alone=False)
        if reading is not None:
            order.frame(PROLOGUE_PLAN.unpack(reading.header), at)
            order.count(reading.frame_length)
            at += reading.frame_length
            yield BlockPagedTensor.of_parts(reading.parts)
            continue
        form = identify(raw[at : at + PREFIX_BYTES].tobytes(), at)
        if form is Form.BARE:
            order.bare(at)
            start = at
            parts, at = bare.read_bare(raw, at, chosen, alone=False)
            order.count(at - start)
            yield BlockPagedTensor.of_parts(parts)
            continue
        head = frame_reader.read_frame_head(raw, at, chosen.limits)
        order.frame(head.prologue, head.base)
        order.count(head.prologue.frame_length)
        at += head.prologue.frame_length
        if head.closing:
            frame_reader.check_closing(raw, head)
        else:
            yield BlockPagedTensor.of_parts(frame_reader.read_tensor(raw, head, chosen))
    order.end(at)
