"""From arguments or wire buffers to the checked parts of a tensor.

`assemble` takes what a caller has, `of_buffers` what a reader found; both end in the same `Parts`, both run the
validator of `indices` over the tables, and neither copies the pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hurray_wire import indices, rules
from hurray_wire.arrays import Bytes, as_array, frozen, raw_view
from hurray_wire.descriptor import TensorDescriptor
from hurray_wire.dtypes import Dtype, packed_bytes
from hurray_wire.errors import (
    Code,
    FrameError,
    InvalidDescriptorError,
    UnsupportedError,
    Violation,
    located,
    violations_error,
)
from hurray_wire.indices import IntArray
from hurray_wire.layout import INDEX_DTYPES, BlockPagedLayout
from hurray_wire.metadata import plain, validate_metadata
from hurray_wire.pages import PagePool
from hurray_wire.quantization import PerBlockAffine, PerChannelAffine, Quantization
from hurray_wire.schemes import quantized
from hurray_wire.structs.descriptor import STATISTICS_PLAN
from hurray_wire.tables import BufferHandle, ExtensionType
from hurray_wire.tags import MIN_ALIGNMENT

Array = npt.NDArray[Any]

Offsets = Callable[[], Mapping[str, int]]
"""Where the descriptor, block_table, seq_ptr and seq_lens begin in the input."""

_UINT32_END = 1 << 32


class Parts(NamedTuple):
    """A descriptor and its arrays, checked together: what a `BlockPagedTensor` is made of."""

    descriptor: TensorDescriptor
    page_pool: Array
    block_table: IntArray
    seq_ptr: IntArray
    seq_lens: IntArray | None = None
    scales: Array | None = None
    zero_points: Array | None = None
    metadata: dict[str, Any] | None = None
    violations: tuple[Violation, ...] = ()

    def identity(self) -> tuple[Any, ...]:
        """What two equal tensors share besides their arrays; statistics by their bits, NaNs included."""
        d = self.descriptor
        statistics = None if d.statistics is None else STATISTICS_PLAN.pack(*d.statistics.record())
        return (
            d.dtype,
            d.shape,
            d.layout,
            d.quantization,
            statistics,
            d.extension_type,
            d.composite,
            self.metadata,
        )

    def small_arrays(self) -> tuple[Array | None, ...]:
        """Every array but the pool."""
        return self.block_table, self.seq_ptr, self.seq_lens, self.scales, self.zero_points

    def with_pool(self, pool: Bytes) -> Parts:
        """The parts with the bytes of a pool, where they were made without."""
        return self._replace(page_pool=_pool_view(self.descriptor, pool))

    def replaced(self, fields: Mapping[str, Any]) -> Parts:
        """The parts with other constructor arguments."""
        d = self.descriptor
        arguments: dict[str, Any] = {
            "page_pool": self.page_pool,
            "block_table": self.block_table,
            "seq_ptr": self.seq_ptr,
            "seq_lens": self._lens_of_table_type(),
            "total_tokens": d.shape[0],
            "kv_role": d.layout.kv_role,
            "layer_index": d.layout.layer_index,
            "index_type": d.layout.block_table_index_type,
            "dtype": d.dtype,
            "page_size": d.layout.page_size,
            "num_heads": d.shape[1],
            "head_dim": d.shape[2],
            "quantization": d.quantization,
            "scales": self.scales,
            "zero_points": self.zero_points,
            "statistics": d.statistics,
            "extension_type": d.extension_type,
            "composite": d.composite,
            "metadata": self.metadata,
        }
        unknown = fields.keys() - arguments.keys()
        if unknown:
            raise TypeError(f"replace() has no {', '.join(sorted(unknown))}: named as in the constructor")
        _forget(arguments, fields, self)
        arguments |= fields
        return assemble(**arguments, like=self)

    def _lens_of_table_type(self) -> IntArray | None:
        """seq_lens, or None where they are beyond the tables' type: then they are forced, and found again."""
        lens = self.seq_lens
        return None if lens is None or lens.dtype != self.seq_ptr.dtype else lens

    def pickled(self, pool: PagePool) -> tuple[Any, ...]:
        """Everything as values and 1-D uint8 arrays, which pickle protocol 5 keeps out of band."""
        flat = pool.flat()
        if flat is None:
            flat = np.empty(pool.nbytes, np.uint8)
            pool.copy_all(flat)
        arrays = self._replace(seq_lens=self._lens_of_table_type()).small_arrays()
        small = [None if a is None else raw_view(np.ascontiguousarray(a)) for a in arrays]
        return self.descriptor, flat, small, self.metadata, self.violations

    @classmethod
    def unpickled(
        cls, descriptor: TensorDescriptor, flat: Bytes, small: list[Bytes | None], metadata: Any, violations: Any
    ) -> Parts:
        """The inverse of `pickled`: views of the arrays, tables copied and checked again."""
        table, ptr, lens = (None if a is None else a.tobytes() for a in small[:3])
        assert table is not None
        assert ptr is not None
        scales = [a for a in small[3:] if a is not None]
        if len(scales) > len(descriptor.buffers) - 3:  # scales and zero points of one buffer
            scales = [np.concatenate(scales)]
        return of_buffers(descriptor, flat, (table, ptr), scales, lens, metadata, strict=not violations)


def _forget(arguments: dict[str, Any], fields: Mapping[str, Any], parts: Parts) -> None:
    """Drop what a replaced field makes stale, so that it is derived anew."""
    if "page_pool" in fields:
        pool = as_array(fields["page_pool"])
        if pool.ndim != 1:
            arguments |= {"page_size": None, "num_heads": None, "head_dim": None}
            arguments |= {} if pool.dtype == parts.page_pool.dtype else {"dtype": None}
    if "seq_lens" in fields and parts.seq_lens is not None:
        arguments["total_tokens"] = None
    if "total_tokens" in fields or {"block_table", "seq_ptr"} & fields.keys():
        arguments["seq_lens"] = None if "total_tokens" in fields else arguments["seq_lens"]
        arguments["index_type"] = None


class _Pool(NamedTuple):
    array: Array
    dtype: Dtype
    num_pages: int
    page_size: int
    num_heads: int
    head_dim: int


def assemble(
    page_pool: Any,
    *,
    block_table: Any,
    seq_ptr: Any,
    seq_lens: Any,
    total_tokens: int | None,
    kv_role: str,
    layer_index: int | None,
    index_type: str | None,
    dtype: Any,
    page_size: int | None,
    num_heads: int | None,
    head_dim: int | None,
    quantization: Quantization | str | None,
    scales: Any,
    zero_points: Any,
    statistics: Any,
    extension_type: ExtensionType | None,
    composite: str | None,
    metadata: Mapping[str, Any] | None,
    like: Parts | None = None,
) -> Parts:
    """The parts of a tensor from a constructor's arguments (`like`: the tensor whose placement they keep)."""
    if seq_lens is None and total_tokens is None:
        raise TypeError("one of seq_lens and total_tokens is needed")
    if extension_type is not None and not isinstance(extension_type, ExtensionType):
        raise TypeError(f"extension_type must be an ExtensionType, not {extension_type!r}")
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a mapping, not {metadata!r}")
    pool = _pool(page_pool, dtype, (page_size, num_heads, head_dim), extension_type, like)
    tables = _tables(block_table, seq_ptr, seq_lens, total_tokens, index_type, pool, like)
    shape = (tables.total_tokens, pool.num_heads, pool.head_dim)
    scheme, scales, zero_points = quantized(
        quantization, scales, zero_points, pool.num_pages, pool.page_size, shape, author=like is None
    )
    layout = BlockPagedLayout(
        page_size=pool.page_size,
        num_pages=pool.num_pages,
        paged_axis=0,
        num_seqs=tables.seq_ptr.size - 1,
        kv_role=kv_role,
        layer_index=layer_index,
        block_table_index_type=tables.index_type,
    )
    bits = extension_type.bit_width if extension_type is not None else pool.dtype.bit_width
    elements = pool.num_pages * pool.page_size * pool.num_heads * pool.head_dim
    sizes = [packed_bytes(elements, bits), tables.block_table.nbytes, tables.seq_ptr.nbytes]
    sizes += _scale_sizes(scheme, scales, zero_points)
    descriptor = TensorDescriptor(
        pool.dtype,
        shape,
        layout,
        _handles(sizes, like),
        quantization=scheme,
        statistics=statistics,
        extension_type=extension_type,
        composite=composite,
    )
    kept = _own_metadata(metadata) if metadata else None
    if kept:
        validate_metadata(kept, layout.num_seqs, pool.head_dim)
    return Parts(descriptor, pool.array, tables.block_table, tables.seq_ptr, tables.seq_lens, scales, zero_points, kept)


def _own_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    try:
        kept: dict[str, Any] = plain(metadata)
    except RecursionError:
        raise FrameError("is nested too deep", code=Code.METADATA, where="metadata") from None
    return kept


def _scale_sizes(scheme: Quantization | None, scales: Array | None, zero_points: Array | None) -> list[int]:
    sizes = [a.nbytes for a in (scales, zero_points) if a is not None]
    shared = isinstance(scheme, PerChannelAffine | PerBlockAffine) and (
        scheme.zero_point_buffer_index == scheme.scale_buffer_index
    )
    return [sum(sizes)] if shared else sizes


def _handles(sizes: Sequence[int], like: Parts | None) -> list[BufferHandle]:
    """A handle a buffer: as a tensor's before it where there is one, else alignment 64, and 1 where empty."""
    before = like.descriptor.buffers if like is not None else ()
    handles = []
    for i, size in enumerate(sizes):
        if i < len(before) and (before[i].byte_size == size or (size and before[i].byte_size)):
            old = before[i]
            handles.append(BufferHandle(size, old.alignment, old.device, "producer_synced", old.memory_class))
        else:
            place = (before[0].device, "producer_synced", before[0].memory_class) if before else ()
            handles.append(BufferHandle(size, MIN_ALIGNMENT if size else 1, *place))
    return handles


# The pool.


def _pool(
    page_pool: Any,
    dtype: Any,
    sizes: tuple[int | None, int | None, int | None],
    extension_type: ExtensionType | None,
    like: Parts | None,
) -> _Pool:
    array = as_array(page_pool)
    chosen = Dtype.of(array.dtype if dtype is None else dtype)
    if chosen.is_flat:
        return _flat_pool(array, chosen, sizes, extension_type, like)
    if array.ndim != 4:
        message = f"has shape {array.shape}, must be [pages, page_size, heads, head_dim]"
        raise InvalidDescriptorError(message, code=Code.RANK, where="page_pool")
    for given, found, name, code in zip(sizes, array.shape[1:], _SIZE_NAMES, _SIZE_CODES, strict=True):
        if given is not None and given != found:
            message = f"is {given}, but the pool's shape is {array.shape}"
            raise InvalidDescriptorError(message, code=code, where=name)
    return _Pool(_typed(array, chosen), chosen, *array.shape)


_SIZE_NAMES = ("page_size", "num_heads", "head_dim")
_SIZE_CODES = (Code.PAGE_SIZE, Code.SHAPE, Code.SHAPE)


def _typed(array: Array, dtype: Dtype) -> Array:
    """The array under its element type: bytes without a type of their own may be given one, others never."""
    assert dtype.numpy is not None
    if array.dtype.newbyteorder("=") == dtype.numpy:
        return array
    plain = array.dtype.type is np.void and array.dtype.names is None  # ml_dtypes types are of kind "V" too
    untyped = (plain or array.dtype.kind == "u") and array.dtype.itemsize == dtype.numpy.itemsize
    if not untyped:
        message = f"{array.dtype} elements are not relabelled as {dtype.name}: view them as unsigned integers first"
        raise UnsupportedError(message, code=Code.DTYPE, where="dtype")
    big = array.dtype.byteorder == ">"
    return array.view(dtype.numpy.newbyteorder(">") if big else dtype.numpy)


def _flat_pool(
    array: Array,
    dtype: Dtype,
    sizes: tuple[int | None, int | None, int | None],
    extension_type: ExtensionType | None,
    like: Parts | None,
) -> _Pool:
    if array.ndim != 1 or array.dtype != np.uint8:
        message = (
            f"a pool of {dtype.name} is 1-D uint8, packed with hurray_wire.pack(pool, {dtype.name!r}); "
            f"found {array.dtype} of shape {array.shape}"
        )
        raise UnsupportedError(message, code=Code.PACKED_POOL, where="page_pool")
    names_and_codes = zip(_SIZE_NAMES, sizes, _SIZE_CODES, strict=True)
    if None in sizes:
        raise TypeError(f"a 1-D pool of {dtype.name} needs page_size, num_heads and head_dim")
    page_size, num_heads, head_dim = (rules.integer(size, 64, name, code) for name, size, code in names_and_codes)
    if dtype.is_private and extension_type is None:
        raise UnsupportedError("a private type needs an extension_type", code=Code.DTYPE, where="extension_type")
    bits = extension_type.bit_width if extension_type is not None else dtype.bit_width
    page_elements = page_size * num_heads * head_dim
    if like is not None and like.page_pool is array:
        num_pages = like.descriptor.layout.num_pages
    else:
        num_pages = array.size * 8 // (page_elements * bits) if page_elements else 0
    elements = num_pages * page_elements
    if array.size != packed_bytes(elements, bits):
        message = f"{array.size} bytes hold no whole number of pages of {page_elements} {bits}-bit elements"
        raise InvalidDescriptorError(message, code=Code.BUFFER_SIZE, where="page_pool")
    return _Pool(array, dtype, num_pages, page_size, num_heads, head_dim)


# The tables.


class _Tables(NamedTuple):
    block_table: IntArray
    seq_ptr: IntArray
    seq_lens: IntArray | None
    total_tokens: int
    index_type: str


def _tables(
    block_table: Any,
    seq_ptr: Any,
    seq_lens: Any,
    total_tokens: int | None,
    index_type: str | None,
    pool: _Pool,
    like: Parts | None,
) -> _Tables:
    if like is not None and _same_tables(like, block_table, seq_ptr, index_type, pool):
        table, ptr = like.block_table, like.seq_ptr
    else:
        table, ptr = _own(block_table, "block_table"), _own(seq_ptr, "seq_ptr")
        _raise_any(indices.check_seq_ptr(ptr, table.size) + indices.check_block_table(table, pool.num_pages))
    lens = None if seq_lens is None else _own(seq_lens, "seq_lens")
    chosen = _index_type(
        index_type, [pool.num_pages, *map(indices.largest, (table, ptr, *(() if lens is None else (lens,))))]
    )
    table, ptr = (frozen(a.astype(INDEX_DTYPES[chosen], copy=False)) for a in (table, ptr))
    total = None if total_tokens is None else rules.integer(total_tokens, 64, "shape[0]", Code.TOKEN_COUNT)
    if lens is not None:
        lens = frozen(lens.astype(INDEX_DTYPES[chosen], copy=False))
        total = indices.exact_sum(lens) if total is None else total
    assert total is not None
    if pool.page_size:  # a page size of 0 is the descriptor's to refuse
        _raise_any(_check_tokens(lens, ptr, pool.page_size, total))
        if lens is None:
            lens = forced_lens(ptr, pool.page_size, total)
    return _Tables(table, ptr, lens, total, chosen)


def _same_tables(like: Parts, block_table: Any, seq_ptr: Any, index_type: str | None, pool: _Pool) -> bool:
    same = block_table is like.block_table and seq_ptr is like.seq_ptr and not like.violations
    layout = like.descriptor.layout
    return same and index_type == layout.block_table_index_type and pool.num_pages >= layout.num_pages


def _own(values: Any, where: str) -> IntArray:
    """A copy of a caller's integers, taken before they are looked at."""
    if not isinstance(values, list | tuple | range):
        values = as_array(values)
    checked = indices.as_integers(values, where)
    return indices.as_indices(np.array(checked) if isinstance(values, np.ndarray) else checked, where)


def _index_type(index_type: str | None, numbers: Iterable[int]) -> str:
    most = max(numbers)
    if index_type is None:
        return "uint32" if most < _UINT32_END else "uint64"
    if index_type not in INDEX_DTYPES:
        message = f"is {index_type!r}, must be one of {', '.join(INDEX_DTYPES)}"
        raise InvalidDescriptorError(message, code=Code.INDEX_TYPE, where="layout.block_table_index_type")
    if index_type == "uint32" and most >= _UINT32_END:
        message = f"is uint32, which cannot hold {most}"
        raise InvalidDescriptorError(message, code=Code.INDEX_TYPE, where="layout.block_table_index_type")
    return index_type


def _check_tokens(lens: IntArray | None, ptr: IntArray, page_size: int, total: int) -> list[Violation]:
    violations = [] if lens is None else indices.check_seq_lens(lens, ptr, page_size, total)
    return violations + indices.check_token_count(total, ptr.item(-1), page_size)


def forced_lens(ptr: IntArray, page_size: int, total: int) -> IntArray | None:
    """Token counts where the tables leave no choice, read-only."""
    lens = indices.forced_seq_lens(ptr, page_size, total)
    return None if lens is None else frozen(lens)


def _raise_any(violations: Sequence[Violation]) -> None:
    if violations:
        raise violations_error(violations)


# From a reader.

_NO_POOL = frozen(np.zeros(0, np.uint8))


def of_buffers(
    descriptor: TensorDescriptor,
    pool: Bytes | None,
    tables: Sequence[bytes],
    scales: Sequence[Bytes],
    seq_lens: bytes | None,
    metadata: dict[str, Any] | None,
    *,
    strict: bool,
    offsets: Offsets | None = None,
) -> Parts:
    """The parts of a tensor from its buffers' bytes: stage 9 (section 3).

    Args:
        pool, scales: the bytes of buffer 0 (None: the caller will give the parts another), and of buffers 3 and 4
            where the descriptor has them; viewed.
        tables: block_table and seq_ptr, as copies of the input that nobody else can change.
        seq_lens: likewise the bytes of a frame's section; None where there is none.
        offsets: asked where things begin in the input, for errors.
    """
    layout = descriptor.layout
    index = descriptor.index_dtype
    table, ptr = _indices(tables[0], index), _indices(tables[1], index)
    ptr = ptr[: layout.num_seqs + 1]
    misfit = seq_lens is not None and len(seq_lens) % index.itemsize
    lens = None if seq_lens is None or misfit else _indices(seq_lens, index)
    violations = check_tables(descriptor, table, ptr, lens)
    if seq_lens is not None and misfit:
        message = f"take {len(seq_lens)} bytes, must be {layout.num_seqs} indices of {index.itemsize}"
        violations.append(Violation(Code.SEQ_LENS_COUNT, "seq_lens", message))
    if violations:
        violations = _placed(violations, descriptor, offsets, index.itemsize)
        if strict:
            raise violations_error(violations)
        lens = None
    elif lens is None and layout.page_size:
        lens = forced_lens(ptr, layout.page_size, descriptor.shape[0])
    found = (*descriptor.violations, *violations) if violations else descriptor.violations
    arrays = scale_arrays(descriptor, scales)
    view = _NO_POOL if pool is None else _pool_view(descriptor, pool)
    return Parts(descriptor, view, table, ptr, lens, *arrays, metadata, found)


def _indices(data: bytes, dtype: np.dtype[Any]) -> IntArray:
    """A read-only array over a table's own copy of its bytes."""
    whole = len(data) // dtype.itemsize
    return np.frombuffer(data, dtype, whole) if whole else frozen(np.zeros(0, dtype))


def check_tables(
    descriptor: TensorDescriptor, table: IntArray, ptr: IntArray, lens: IntArray | None
) -> list[Violation]:
    """Everything that is wrong with the tables (section 3, stage 9)."""
    layout, size = descriptor.layout, descriptor.sizes[1]
    if size == table.nbytes and indices.sound(
        table, ptr, lens, layout.num_pages, layout.page_size, descriptor.shape[0]
    ):
        return []
    violations = indices.check_seq_ptr(ptr, table.size)
    if size % table.itemsize:
        message = f"is {size}, no multiple of {table.itemsize} bytes"
        violations.append(Violation(Code.BUFFER_SIZE, "buffers[1].byte_size", message))
    violations += indices.check_block_table(table, layout.num_pages)
    if not violations and layout.page_size:
        violations += _check_tokens(lens, ptr, layout.page_size, descriptor.shape[0])
    return violations


def _placed(
    violations: list[Violation], descriptor: TensorDescriptor, offsets: Offsets | None, width: int
) -> list[Violation]:
    """With byte offsets: of the entry in its table, of the field in the descriptor."""
    if offsets is None:
        return violations
    starts = offsets()
    placed = []
    for violation in violations:
        start = starts.get(violation.where.partition("[")[0])
        if start is not None:
            at: int | None = start + (violation.index or 0) * width
        elif (at := descriptor.offset_of(violation.where)) is not None:
            at += starts.get("descriptor", 0)
        placed.append(located(violation, at))
    return placed


def _pool_view(descriptor: TensorDescriptor, data: Bytes) -> Array:
    dtype, shape = descriptor.dtype, descriptor.pool_shape
    if dtype.is_flat:
        return data[: packed_bytes(math.prod(shape), descriptor.bit_width)]
    assert dtype.numpy is not None
    if not descriptor.page_bytes or not shape[0]:
        # NumPy multiplies even an empty shape out, in 64 bits: a pool that holds nothing is one page of it.
        return frozen(_empty_pool(shape, dtype.numpy))
    view: Array = np.ndarray(shape, dtype.numpy, buffer=data)
    view.flags.writeable = data.flags.writeable
    return view


def _empty_pool(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    try:
        return np.empty(shape, dtype)
    except ValueError:
        message = f"shape {shape} of {dtype} is larger than an address space, though it holds nothing"
        raise UnsupportedError(message, code=Code.SHAPE, where="shape") from None


def scale_arrays(descriptor: TensorDescriptor, buffers: Sequence[Bytes]) -> tuple[Array | None, Array | None]:
    """scales and zero_points as the scheme shapes them, from the buffers behind seq_ptr."""
    scheme, layout = descriptor.quantization, descriptor.layout
    if not buffers or scheme is None:
        return None, None
    if not isinstance(scheme, PerChannelAffine | PerBlockAffine):
        return buffers[0], None
    block = isinstance(scheme, PerBlockAffine)
    shape = (layout.num_pages, layout.page_size) if block else (descriptor.shape[scheme.axis],)
    scale_dtype = scheme.scale_type.numpy
    assert scale_dtype is not None
    size = math.prod(shape) * scale_dtype.itemsize
    scales = _viewed(buffers[0][:size], scale_dtype, shape)
    if scheme.zero_point_buffer_index is None:
        return scales, None
    zeros = buffers[0][size:] if len(buffers) == 1 else buffers[1]
    zeros = zeros[: math.prod(shape) * 4]
    return scales, _viewed(zeros, np.dtype("<i4"), shape)


def _viewed(data: Bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """A view where the memory is aligned for the type, else a small copy."""
    if data.size and data.ctypes.data % dtype.alignment:
        data = data.copy()
    return data.view(dtype).reshape(shape)
