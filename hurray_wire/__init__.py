"""A self-describing, checked wire codec for paged KV caches.

Build a `BlockPagedTensor` of a page pool, a block table and sequence offsets, `encode` it, send it, `decode` it: the
receiver knows element type, page size, layout and quantisation from the bytes, and every table has been checked.

Example:
    >>> import numpy as np
    >>> import hurray_wire as hw
    >>> pool = np.arange(320, dtype=np.float16).reshape(5, 4, 2, 8)
    >>> t = hw.BlockPagedTensor(pool, block_table=[0, 1, 0], seq_ptr=[0, 2, 3], seq_lens=[6, 3], layer_index=3)
    >>> hw.decode(hw.encode(t)).gather(1).shape
    (3, 2, 8)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hurray_wire.arrays import from_torch, to_torch
from hurray_wire.codec import (
    decode,
    decode_from,
    encode,
    encode_buffer,
    encode_header,
    encode_into,
    encode_parts,
    encoded_size,
    iter_decode,
)
from hurray_wire.descriptor import TensorDescriptor
from hurray_wire.dtypes import Dtype, pack, unpack
from hurray_wire.errors import (
    ChecksumError,
    Code,
    Difference,
    FrameError,
    HurrayWireError,
    InvalidDescriptorError,
    LimitError,
    MismatchError,
    StoreError,
    TruncatedError,
    UnsupportedError,
    Violation,
)
from hurray_wire.inspection import Inspection, Span, inspect
from hurray_wire.layout import BlockPagedLayout
from hurray_wire.options import DEFAULT_LIMITS, Limits
from hurray_wire.quantization import (
    MXFP,
    NF4,
    PerBlockAffine,
    PerChannelAffine,
    PerTensorAffine,
    decode_quantization,
)
from hurray_wire.receiving import decode_into, decode_parts
from hurray_wire.stream import NEED_DATA, Frame, FrameDecoder, FrameHeader, StreamReader, StreamWriter, open_frame
from hurray_wire.tables import BufferHandle, ExtensionType, Statistics
from hurray_wire.tensor import BlockPagedTensor, element_offset
from hurray_wire.version import __version__

if TYPE_CHECKING:
    from hurray_wire.stream.aio import AsyncFrameHeader, AsyncStreamReader, AsyncStreamWriter

float16 = Dtype.of("float16")
bfloat16 = Dtype.of("bfloat16")
float32 = Dtype.of("float32")
float64 = Dtype.of("float64")
int8 = Dtype.of("int8")
uint8 = Dtype.of("uint8")
int16 = Dtype.of("int16")
uint16 = Dtype.of("uint16")
int32 = Dtype.of("int32")
uint32 = Dtype.of("uint32")
int64 = Dtype.of("int64")
uint64 = Dtype.of("uint64")
bool_ = Dtype.of("bool")
float8_e4m3 = Dtype.of("float8_e4m3")
float8_e5m2 = Dtype.of("float8_e5m2")
float8_e8m0 = Dtype.of("float8_e8m0")
float4_e2m1 = Dtype.of("float4_e2m1")
float6_e2m3 = Dtype.of("float6_e2m3")
float6_e3m2 = Dtype.of("float6_e3m2")
float128 = Dtype.of("float128")
int4 = Dtype.of("int4")
uint4 = Dtype.of("uint4")
int2 = Dtype.of("int2")
uint2 = Dtype.of("uint2")
complex64 = Dtype.of("complex64")
complex128 = Dtype.of("complex128")

__all__ = [
    "DEFAULT_LIMITS",
    "MXFP",
    "NEED_DATA",
    "NF4",
    "AsyncFrameHeader",
    "AsyncStreamReader",
    "AsyncStreamWriter",
    "BlockPagedLayout",
    "BlockPagedTensor",
    "BufferHandle",
    "ChecksumError",
    "Code",
    "Difference",
    "Dtype",
    "ExtensionType",
    "Frame",
    "FrameDecoder",
    "FrameError",
    "FrameHeader",
    "HurrayWireError",
    "Inspection",
    "InvalidDescriptorError",
    "LimitError",
    "Limits",
    "MismatchError",
    "PerBlockAffine",
    "PerChannelAffine",
    "PerTensorAffine",
    "Span",
    "Statistics",
    "StoreError",
    "StreamReader",
    "StreamWriter",
    "TensorDescriptor",
    "TruncatedError",
    "UnsupportedError",
    "Violation",
    "__version__",
    "bfloat16",
    "bool_",
    "complex64",
    "complex128",
    "decode",
    "decode_from",
    "decode_into",
    "decode_parts",
    "decode_quantization",
    "element_offset",
    "encode",
    "encode_buffer",
    "encode_header",
    "encode_into",
    "encode_parts",
    "encoded_size",
    "float4_e2m1",
    "float6_e2m3",
    "float6_e3m2",
    "float8_e4m3",
    "float8_e5m2",
    "float8_e8m0",
    "float16",
    "float32",
    "float64",
    "float128",
    "from_torch",
    "inspect",
    "int2",
    "int4",
    "int8",
    "int16",
    "int32",
    "int64",
    "iter_decode",
    "open_frame",
    "pack",
    "to_torch",
    "uint2",
    "uint4",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "unpack",
]


def __getattr__(name: str) -> Any:
    """asyncio and the rooms above are imported when they are asked for."""
    if name in ("ops", "engines", "testing"):
        return import_module(f"{__name__}.{name}")
    if name in ("AsyncFrameHeader", "AsyncStreamReader", "AsyncStreamWriter"):
        from hurray_wire.stream import aio

        return getattr(aio, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
