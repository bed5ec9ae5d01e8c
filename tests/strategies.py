"""Every hypothesis strategy of the suite: tensors of every kind, with the bytes that they must become.

`tensors()` draws a `Built`: a tensor, and apart from it the bytes of its buffers as the wire wants them, made from the
drawn bits and not by the package. Pools come in every make of memory: contiguous, strided, broadcast, byte-swapped.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

import hurray_wire as hw

Array = npt.NDArray[Any]

NAMED = tuple(
    hw.Dtype.of(name)
    for name in (
        *("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
        *("int64", "uint64", "float8_e4m3", "float8_e5m2", "float8_e8m0", "complex64", "complex128"),
    )
)
"""Types whose pools are four-dimensional arrays."""
PACKED = tuple(
    map(hw.Dtype.of, ("bool", "int4", "uint4", "int2", "uint2", "float4_e2m1", "float6_e2m3", "float6_e3m2"))
)
DTYPES = (*NAMED, *PACKED, hw.float128)
AFFINE = tuple(
    map(
        hw.Dtype.of,
        (
            *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int4", "uint4", "int2", "uint2"),
            *("float8_e4m3", "float8_e5m2"),
        ),
    )
)
BLOCK_STORAGE = tuple(d for d in AFFINE if d.bit_width <= 8)
MXFP_STORAGE = tuple(
    map(hw.Dtype.of, ("float8_e4m3", "float8_e5m2", "float4_e2m1", "float6_e2m3", "float6_e3m2", "int8", "int4"))
)
ROLES = ("key", "value", "fused")
INDEX_TYPES = ("uint32", "uint64")
LAYERS = (None, 0, 7, 2**32 - 2)
MAKES = ("contiguous", "halves", "slots", "dims", "pages", "reversed", "transposed", "swapped", "broadcast")
SCALES = {"float16": "<f2", "bfloat16": "<u2", "float32": "<f4"}

layers = st.one_of(st.sampled_from(LAYERS), st.integers(0, 2**32 - 2))
finite = st.floats(allow_nan=False, allow_infinity=False)


class Built(NamedTuple):
    """A tensor, and what it must be on the wire."""

    tensor: hw.BlockPagedTensor
    buffers: list[bytes]
    """page_pool, block_table, seq_ptr, and scales, zero_points where there are any."""
    lens: list[int]
    """Tokens a sequence, whether or not the tensor was told."""
    make: str


class Tables(NamedTuple):
    block_table: list[int]
    seq_ptr: list[int]
    lens: list[int]


class Geometry(NamedTuple):
    num_pages: int
    page_size: int
    num_heads: int
    head_dim: int

    @property
    def elements(self) -> int:
        return self.num_pages * self.page_size * self.num_heads * self.head_dim


@st.composite
def layouts(draw: st.DrawFn) -> hw.BlockPagedLayout:
    """Any layout that can be constructed, lawful or not."""
    return hw.BlockPagedLayout(
        draw(st.integers(0, 2**32 - 1)),
        draw(st.integers(0, 2**64 - 1)),
        draw(st.integers(0, 2**32 - 1)),
        draw(st.integers(0, 2**32 - 1)),
        draw(st.sampled_from(ROLES)),
        draw(layers),
        draw(st.sampled_from(INDEX_TYPES)),
    )


@st.composite
def statistics(draw: st.DrawFn) -> hw.Statistics:
    """Any groups of statistics, any doubles in them."""
    values: dict[str, Any] = {}
    doubles, bytes_, truths = st.floats(), st.integers(0, 255), st.booleans()
    groups = (
        (("nnz",), st.integers(0, 2**64 - 1)),
        (("sparsity_ratio",), doubles),
        (("value_min", "value_max", "value_abs_max"), doubles),
        (("value_mean", "value_stddev"), doubles),
        (("nm_n", "nm_m"), bytes_),
        (("has_nan", "has_inf"), truths),
    )
    for names, strategy in groups:
        if draw(st.booleans()):
            values |= {name: draw(strategy) for name in names}
    return hw.Statistics(**values)


@st.composite
def extension_types(draw: st.DrawFn, widths: Sequence[int] = (1, 2, 4, 8, 24, 40)) -> hw.ExtensionType:
    """The make of a private type."""
    return hw.ExtensionType(
        draw(st.sampled_from(widths)),
        is_float=draw(st.booleans()),
        is_signed=draw(st.booleans()),
        sign_bits=draw(st.integers(0, 255)),
        exponent_bits=draw(st.integers(0, 255)),
        mantissa_bits=draw(st.integers(0, 255)),
        exponent_bias=draw(st.integers(0, 2**32 - 1)),
        has_nan=draw(st.booleans()),
        has_inf=draw(st.booleans()),
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | finite | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def metadata(draw: st.DrawFn, num_seqs: int, head_dim: int) -> dict[str, Any] | None:
    """Metadata that a frame may carry, or None; never empty."""
    start = draw(st.integers(0, 5))
    stop = start + draw(st.integers(1, 5))
    counts = st.integers(0, 2**40)
    known = {
        "model": st.text(max_size=8),
        "rope": st.text(max_size=8),
        "seq_ids": st.lists(st.text(max_size=6), min_size=num_seqs, max_size=num_seqs),
        "first_tokens": st.lists(counts, min_size=num_seqs, max_size=num_seqs),
        "heads": st.just([start, stop, stop + draw(st.integers(0, 5))]),
        "key_dim": st.integers(0, head_dim),
        "content": st.sampled_from(("kv", "latent", "opaque")),
        "my.own": json_values,
        "ü.€": json_values,
    }
    names = draw(st.sets(st.sampled_from(sorted(known)), max_size=4))
    return {name: draw(known[name]) for name in sorted(names)} or None


@st.composite
def tables(draw: st.DrawFn, num_pages: int, page_size: int) -> Tables:
    """Tables over a pool: shared pages, repeated pages, spare pages, sequences without any."""
    most = 3 if num_pages else 0
    counts = draw(st.lists(st.integers(0, most), max_size=4))
    ids = draw(st.lists(st.integers(0, max(num_pages - 1, 0)), min_size=sum(counts), max_size=sum(counts)))
    ends = np.cumsum([0, *counts]).tolist()
    lens = [draw(st.integers(0, count * page_size)) for count in counts]
    return Tables(ids, ends, lens)


def made(flat: Array, geometry: Geometry, make: str) -> Array:
    """A pool of the same values in another make of memory."""
    pool = flat.reshape(geometry)
    if make == "swapped":
        return pool.astype(pool.dtype.newbyteorder(">"))
    if make == "halves":  # keys and values side by side, as an engine keeps them
        return np.stack([np.zeros_like(pool), pool], axis=1)[:, 1]
    if make == "transposed":
        return np.ascontiguousarray(pool.transpose(3, 2, 1, 0)).transpose(3, 2, 1, 0)
    if make == "reversed":
        return np.ascontiguousarray(pool[::-1, :, ::-1])[::-1, :, ::-1]
    if make in ("pages", "slots", "dims"):
        axis = {"pages": 0, "slots": 1, "dims": 3}[make]
        wide = np.repeat(pool, 2, axis=axis)
        index = [slice(None)] * 4
        index[axis] = slice(None, None, 2)
        return wide[tuple(index)]
    if make == "broadcast" and geometry.num_pages:
        return np.broadcast_to(pool[:1], geometry)
    return pool


def _bits(draw: st.DrawFn, nbytes: int) -> bytes:
    return np.random.default_rng(draw(st.integers(0, 2**32 - 1))).bytes(nbytes)


def packed_size(count: int, bits: int) -> int:
    """Bytes of packed elements (section 2), as the specification says it."""
    return 3 * ((count + 3) // 4) if bits == 6 else (count * bits + 7) // 8


def cleared(data: bytes, count: int, bits: int) -> bytes:
    """A packed run with its unused bits at 0."""
    return (int.from_bytes(data, "little") & ((1 << count * bits) - 1)).to_bytes(len(data), "little")


class Pool(NamedTuple):
    array: Array
    wire: bytes
    arguments: dict[str, Any]


def _pool(draw: st.DrawFn, dtype: hw.Dtype, geometry: Geometry, bits: int, make: str) -> Pool:
    data = _bits(draw, packed_size(geometry.elements, bits))
    if dtype.numpy is not None and bits >= 8:
        flat = np.frombuffer(data, dtype.numpy)
        array = made(flat, geometry, make)
        if make == "broadcast" and geometry.num_pages:
            data = data[: len(data) // geometry.num_pages] * geometry.num_pages
        return Pool(array, data, {})
    wire = cleared(data, geometry.elements, bits) if bits < 8 else data
    sizes = {"page_size": geometry.page_size, "num_heads": geometry.num_heads, "head_dim": geometry.head_dim}
    return Pool(np.frombuffer(wire, np.uint8), wire, {"dtype": dtype, **sizes})


@st.composite
def geometries(draw: st.DrawFn, flat: bool, block: bool) -> Geometry:
    """Sizes of a pool. Packed pools have pages of 24 bits or more, from whose bytes their number follows."""
    page_size = draw(st.sampled_from((2, 4, 8)) if block else st.integers(1, 5))
    if flat:
        heads, dim = draw(st.sampled_from(((4, 6), (3, 8), (1, 24), (5, 5), (25, 1))))
        return Geometry(draw(st.integers(0, 4)), page_size, heads, dim)
    return Geometry(draw(st.integers(0, 5)), page_size, draw(st.integers(0, 3)), draw(st.integers(0, 4)))


class Scheme(NamedTuple):
    arguments: dict[str, Any]
    buffers: list[bytes]


def _entries(draw: st.DrawFn, shape: tuple[int, ...], scale_type: str, lawful: bool) -> tuple[Array, bytes]:
    count = int(np.prod(shape, dtype=np.int64))
    if lawful:
        values = np.random.default_rng(draw(st.integers(0, 999))).uniform(0.01, 4, count).astype("<f4")
        scales = values.astype(hw.Dtype.of(scale_type).numpy)
    else:
        scales = np.frombuffer(
            _bits(draw, count * np.dtype(SCALES[scale_type]).itemsize), hw.Dtype.of(scale_type).numpy
        )
    return scales.reshape(shape), scales.tobytes()


def _scheme(draw: st.DrawFn, dtype: hw.Dtype, geometry: Geometry, name: str, lawful: bool) -> Scheme:
    zero = name.endswith("asymmetric")
    if name == "per_tensor":
        low, high = zero_range(dtype)
        scale = draw(st.floats(width=32, allow_nan=False, allow_infinity=False).filter(bool))
        point = draw(st.integers(max(low, -(2**31)), min(high, 2**31 - 1)))
        return Scheme({"quantization": hw.PerTensorAffine(scale, point)}, [])
    if name in ("nf4", "mxfp"):
        cls = hw.NF4 if name == "nf4" else hw.MXFP
        data = _bits(draw, draw(st.integers(0, 20)))
        scheme = cls(draw(st.integers(0, 2)), draw(st.sampled_from((16, 64, 2048))), 3)
        return Scheme({"quantization": scheme, "scales": np.frombuffer(data, np.uint8)}, [data])
    quantization: hw.PerBlockAffine | hw.PerChannelAffine
    if name.startswith("per_block"):
        scale_type, shape = draw(st.sampled_from(sorted(SCALES))), tuple(geometry[:2])
        quantization = hw.PerBlockAffine(0, geometry.page_size, 3, 4 if zero else None, hw.Dtype.of(scale_type))
    else:
        axis = draw(st.sampled_from((1, 2)))
        scale_type, shape = "float32", (geometry[axis + 1],)
        quantization = hw.PerChannelAffine(axis, 3, 4 if zero else None)
    scales, wire = _entries(draw, shape, scale_type, lawful)
    if not zero:
        return Scheme({"quantization": quantization, "scales": scales}, [wire])
    low, high = zero_range(dtype) if lawful else (-(2**31), 2**31 - 1)
    generator = np.random.default_rng(draw(st.integers(0, 999)))
    points = generator.integers(max(low, -(2**31)), min(high, 2**31 - 1), shape, np.int64, True).astype("<i4")
    return Scheme({"quantization": quantization, "scales": scales, "zero_points": points}, [wire, points.tobytes()])


def zero_range(dtype: hw.Dtype) -> tuple[int, int]:
    """The zero points that a storage type allows (section 1)."""
    if dtype.name.startswith("float8"):
        return 0, 0
    if dtype.name.startswith("u"):
        return 0, 2**dtype.bit_width - 1
    return -(2 ** (dtype.bit_width - 1)), 2 ** (dtype.bit_width - 1) - 1


def schemes_of(dtype: hw.Dtype) -> list[str]:
    """The schemes that a storage type may carry."""
    names = []
    if dtype in AFFINE:
        names += ["per_tensor", "per_channel", "per_channel_asymmetric"]
    if dtype in BLOCK_STORAGE:
        names += ["per_block", "per_block_asymmetric"]
    if dtype is hw.uint4:
        names.append("nf4")
    if dtype in MXFP_STORAGE:
        names.append("mxfp")
    return names


@st.composite
def tensors(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[hw.Dtype] = DTYPES,
    private: bool = True,
    scheme: str | None = None,
    with_metadata: bool = False,
    lens_known: bool | None = None,
    lawful_scales: bool = False,
) -> Built:
    """A tensor of any kind; `scheme` None draws one or none, "" is none; `lens_known` None draws it."""
    as_private = private and not scheme and draw(st.integers(0, 9)) == 0
    extension = draw(extension_types()) if as_private else None
    dtype = hw.Dtype.private(draw(st.integers(0xF0, 0xFE))) if as_private else draw(st.sampled_from(dtypes))
    bits = extension.bit_width if extension is not None else dtype.bit_width
    names = [scheme] if scheme is not None else [""] if as_private else ["", *schemes_of(dtype)]
    name = draw(st.sampled_from(names))
    geometry = draw(geometries(dtype.numpy is None or bits < 8, name.startswith("per_block")))
    make = draw(st.sampled_from(MAKES))
    pool = _pool(draw, dtype, geometry, bits, make)
    found = _scheme(draw, dtype, geometry, name, lawful_scales) if name else Scheme({}, [])
    rows = draw(tables(geometry.num_pages, geometry.page_size))
    index_type = draw(st.sampled_from(INDEX_TYPES))
    known = draw(st.booleans()) if lens_known is None else lens_known
    tensor = hw.BlockPagedTensor(
        pool.array,
        block_table=rows.block_table,
        seq_ptr=rows.seq_ptr,
        seq_lens=rows.lens if known else None,
        total_tokens=None if known else sum(rows.lens),
        kv_role=draw(st.sampled_from(ROLES)),
        layer_index=draw(layers),
        index_type=index_type,
        statistics=draw(st.none() | statistics()),
        extension_type=extension,
        composite=draw(st.sampled_from((None, "base", "correction"))),
        metadata=draw(metadata(len(rows.lens), geometry.head_dim)) if with_metadata else None,
        **pool.arguments,
        **found.arguments,
    )
    width = "I" if index_type == "uint32" else "Q"
    wire_tables = [struct.pack(f"<{len(t)}{width}", *t) for t in (rows.block_table, rows.seq_ptr)]
    return Built(tensor, [pool.wire, *wire_tables, *found.buffers], rows.lens, make)
