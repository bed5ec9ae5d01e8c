"""`BlockPagedTensor`: a descriptor and its arrays, checked together; reading tokens by sequence (section 1).

The pool is never copied here, index arrays always are: engines reuse theirs, and shared memory can change after a
check. How a tensor becomes bytes is no matter of this room.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hurray_wire import indices
from hurray_wire.arrays import Bytes, frozen
from hurray_wire.assembly import Parts, assemble
from hurray_wire.dequantization import to_float32
from hurray_wire.descriptor import TensorDescriptor
from hurray_wire.dtypes import Dtype, clear_tail, unpack, unpack_codes
from hurray_wire.errors import Code, UnsupportedError, Violation, violations_error
from hurray_wire.indices import Int64Array, IntArray
from hurray_wire.layout import BlockPagedLayout
from hurray_wire.pages import PagePool
from hurray_wire.quantization import PerBlockAffine, Quantization
from hurray_wire.tables import Statistics

__all__ = ["BlockPagedTensor", "element_offset"]

Array = npt.NDArray[Any]


class BlockPagedTensor:
    """A snapshot of one batch's cache for one {kv_role, layer}: a page pool and the tables into it.

    Construction validates everything (section 1 and 3) and never copies the pool; strided, broadcast and
    byte-swapped pools are read page by page when encoded or gathered.

    Args:
        page_pool: `[num_pages, page_size, num_heads, head_dim]` of a NumPy or ml_dtypes type, or a torch CPU
            tensor; packed sub-byte types, float128 and private types as 1-D uint8 with dtype and sizes given.
        block_table: page ids, `seq_ptr[-1]` of them; any integer type, copied.
        seq_ptr: num_seqs + 1 offsets into block_table, the first 0; copied.
        seq_lens: tokens a sequence, copied; or total_tokens, their sum, where they are not known.
        kv_role: "key", "value" or "fused".
        layer_index: uint32, or None.
        index_type: "uint32", "uint64", or None for the narrowest that holds every id, count and length.
        dtype: the element type, where the array's own does not say it (uint8 bytes of a float8 type).
        page_size, num_heads, head_dim: needed for 1-D pools, checked against 4-D ones.
        quantization: a scheme object, or "per_tensor", "per_channel", "per_block": the rest follows from the arrays.
        scales, zero_points: `[num_pages, page_size]` per block, `[shape[axis]]` per channel; 1-D uint8 for NF4, MXFP.
        statistics, extension_type, composite: relayed as they are.
        metadata: a JSON object for people and engines.

    Raises:
        TypeError: neither seq_lens nor total_tokens, a pool on a GPU, an argument of another type.
        InvalidDescriptorError: a rule of the format is broken; `.violations` lists all.
        UnsupportedError: `dtype`, `packed_pool`.

    Example:
        >>> import numpy as np
        >>> pool = np.arange(320, dtype=np.float16).reshape(5, 4, 2, 8)
        >>> t = BlockPagedTensor(pool, block_table=[0, 1, 0], seq_ptr=[0, 2, 3], seq_lens=[6, 3], layer_index=3)
        >>> t.gather(1).shape, float(t.gather(0)[5, 1, 7])
        ((3, 2, 8), 95.0)
    """

    __slots__ = ("__weakref__", "_parts", "_pool")
    _parts: Parts
    _pool: PagePool | None
    __hash__ = None  # type: ignore[assignment]  # compared by content, which is large

    def __init__(
        self,
        page_pool: Any,
        *,
        block_table: Any,
        seq_ptr: Any,
        seq_lens: Any = None,
        total_tokens: int | None = None,
        kv_role: str = "key",
        layer_index: int | None = None,
        index_type: str | None = None,
        dtype: Any = None,
        page_size: int | None = None,
        num_heads: int | None = None,
        head_dim: int | None = None,
        quantization: Quantization | str | None = None,
        scales: Any = None,
        zero_points: Any = None,
        statistics: Statistics | None = None,
        extension_type: Any = None,
        composite: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        arguments = dict(locals())
        del arguments["self"]
        _set_parts(self, assemble(**arguments))
        _set_pool(self, None)

    @classmethod
    def of_parts(cls, parts: Parts) -> BlockPagedTensor:
        """A tensor of parts that have been checked: how readers and operations make one."""
        tensor: BlockPagedTensor = object.__new__(cls)
        _set_parts(tensor, parts)
        _set_pool(tensor, None)
        return tensor

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"BlockPagedTensor is frozen: use replace({name}=...)")

    # What it holds.

    @property
    def parts(self) -> Parts:
        """Descriptor and arrays, for the rooms that turn tensors into bytes and other tensors."""
        return self._parts

    @property
    def descriptor(self) -> TensorDescriptor:
        """All that a blob says of this tensor before its bytes."""
        return self.parts.descriptor

    @property
    def layout(self) -> BlockPagedLayout:
        """The block-paged layout."""
        return self.descriptor.layout

    @property
    def dtype(self) -> Dtype:
        """The element type."""
        return self.descriptor.dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        """(total_tokens, num_heads, head_dim)."""
        return self.descriptor.shape

    @property
    def page_pool(self) -> Array:
        """`[num_pages, page_size, num_heads, head_dim]`, or 1-D uint8 of packed and unnamed types."""
        return self.parts.page_pool

    @property
    def block_table(self) -> IntArray:
        """Page ids of all sequences, one behind the other; read-only."""
        return self.parts.block_table

    @property
    def seq_ptr(self) -> IntArray:
        """Where each sequence's ids begin in block_table, num_seqs + 1 entries; read-only."""
        return self.parts.seq_ptr

    @property
    def seq_lens(self) -> IntArray | None:
        """Tokens a sequence, read-only; None where the bytes did not say (the bare form)."""
        return self.parts.seq_lens

    @property
    def scales(self) -> Array | None:
        """`[num_pages, page_size]` per block, `[shape[axis]]` per channel, uint8 for NF4 and MXFP, else None."""
        return self.parts.scales

    @property
    def zero_points(self) -> Array | None:
        """int32 in the shape of scales, or None."""
        return self.parts.zero_points

    @property
    def quantization(self) -> Quantization | None:
        """The scheme, or None."""
        return self.descriptor.quantization

    @property
    def statistics(self) -> Statistics | None:
        """What somebody computed of the values, or None."""
        return self.descriptor.statistics

    @property
    def metadata(self) -> dict[str, Any] | None:
        """The JSON object that travels along, as a copy, or None."""
        return copy.deepcopy(self.parts.metadata)

    @property
    def violations(self) -> tuple[Violation, ...]:
        """What a lenient reader (`strict=False`) tolerated; empty on every other tensor."""
        return self.parts.violations

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers together, as they go over the wire uncompressed."""
        return sum(handle.byte_size for handle in self.descriptor.buffers)

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return self.layout.num_seqs

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self.layout.num_pages

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.layout.page_size

    @property
    def num_heads(self) -> int:
        """Key/value heads."""
        return self.shape[1]

    @property
    def head_dim(self) -> int:
        """Elements a head and token."""
        return self.shape[2]

    @property
    def kv_role(self) -> str:
        """ "key", "value" or "fused"."""
        return self.layout.kv_role

    @property
    def layer_index(self) -> int | None:
        """The layer, or None."""
        return self.layout.layer_index

    @property
    def total_tokens(self) -> int:
        """Tokens of all sequences together."""
        return self.shape[0]

    @property
    def pool(self) -> PagePool:
        """The page pool as rows of bytes."""
        pool = self._pool
        if pool is None:
            pool = PagePool(self.page_pool, self.num_pages, self.page_bytes)
            _set_pool(self, pool)
        return pool

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, 0 where a page of packed elements ends inside a byte (or holds nothing)."""
        return self.descriptor.page_bytes

    def __repr__(self) -> str:
        tokens, heads, dim = self.shape
        layer = "no layer" if self.layer_index is None else f"layer {self.layer_index}"
        scheme = "" if self.quantization is None else f", {type(self.quantization).__name__}"
        unsound = f", {len(self.violations)} violations" if self.violations else ""
        return (
            f"<BlockPagedTensor {self.kv_role} {layer}: {self.num_seqs} sequences, {tokens} tokens of "
            f"{heads} heads x {dim} {self.dtype.name}{scheme}, {self.num_pages} pages of {self.page_size}, "
            f"{self.nbytes} bytes{unsound}>"
        )

    # Whether it is sound.

    def check(self) -> list[Violation]:
        """Every violation: those that a lenient reader tolerated; none on a tensor that was constructed.

        Example:
            >>> import numpy as np
            >>> pool = np.zeros((1, 4, 1, 8), np.float16)
            >>> BlockPagedTensor(pool, block_table=[0], seq_ptr=[0, 1], seq_lens=[4]).check()
            []
        """
        return list(self.violations)

    def validate(self) -> None:
        """Raise what `check` lists.

        Raises:
            InvalidDescriptorError: with all `.violations`.
        """
        if self.violations:
            raise violations_error(self.violations)

    def known_lens(self) -> IntArray:
        """seq_lens of a sound tensor.

        Raises:
            UnsupportedError: `seq_lens_unknown`.
        """
        self.validate()
        if self.seq_lens is None:
            message = "the bare form does not carry them: attach them with replace(seq_lens=...)"
            raise UnsupportedError(message, code=Code.SEQ_LENS_UNKNOWN, where="seq_lens")
        return self.seq_lens

    # Tokens by sequence.

    def _seq(self, seq: int) -> int:
        if isinstance(seq, bool):
            raise TypeError(f"a sequence is named by an integer, not {seq}")
        index = operator.index(seq)
        if not 0 <= index < self.num_seqs:
            raise IndexError(f"sequence {seq} of {self.num_seqs}")
        return index

    def pages(self, seq: int) -> IntArray:
        """The page ids of a sequence, spare ones too.

        Raises:
            IndexError: no such sequence.
        """
        self.validate()
        index = self._seq(seq)
        return self.block_table[int(self.seq_ptr[index]) : int(self.seq_ptr[index + 1])]

    def live_pages(self, seq: int) -> IntArray:
        """The page ids of a sequence that hold valid tokens: the first ceil(seq_len / page_size).

        Raises:
            IndexError: no such sequence.
            UnsupportedError: `seq_lens_unknown`.
        """
        tokens = int(self.known_lens()[self._seq(seq)])
        return self.pages(seq)[: -(-tokens // self.page_size)]

    def token_slots(self, seq: int | None = None) -> Int64Array:
        """The slot in the pool of every token, page id * page_size + position; of one sequence, or of all in turn.

        Raises:
            IndexError: no such sequence.
            UnsupportedError: `seq_lens_unknown`.

        Example:
            >>> import numpy as np
            >>> pool = np.zeros((3, 2, 1, 1), np.float16)
            >>> BlockPagedTensor(pool, block_table=[2, 0], seq_ptr=[0, 2], seq_lens=[3]).token_slots().tolist()
            [4, 5, 0]
        """
        lens = self.known_lens()
        if seq is None:
            return indices.token_slots(self.block_table, self.seq_ptr, lens, self.page_size)
        index = self._seq(seq)
        return indices.token_slots(self.pages(seq), _FROM_START, lens[index : index + 1], self.page_size)

    def element_offset(self, seq: Any, token: Any, head: Any, dim: Any) -> Any:
        """Where an element stands in the pool, in elements: int64; scalars, or arrays that broadcast.

        Raises:
            IndexError: a coordinate out of range; tokens are bounded by seq_lens where they are known.
        """
        self.validate()
        return element_offset(
            seq,
            token,
            head,
            dim,
            page_size=self.page_size,
            num_pages=self.num_pages,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            block_table=self.block_table,
            seq_ptr=self.seq_ptr,
            seq_lens=self.seq_lens,
        )

    def gather(self, seq: int, *, out: Array | None = None) -> Array:
        """The tokens of a sequence, in order: `[tokens, num_heads, head_dim]`, one copy.

        Sub-byte types come unpacked, as `dtype.numpy`; float128 and private types as void of their width.

        Args:
            out: where to write, of the result's shape and type, any strides.

        Raises:
            IndexError: no such sequence.
            UnsupportedError: `seq_lens_unknown`.
            ValueError: `out` does not fit.
        """
        tokens = int(self.known_lens()[self._seq(seq)])
        indices.check_listable(tokens, "tokens")
        shape = (tokens, self.num_heads, self.head_dim)
        element = element_of(self.descriptor)
        _check_out(out)
        if out is None:
            out = np.empty(shape, element)
        elif out.shape != shape or out.dtype != element:
            raise ValueError(f"out must be {shape} of {element}, is {out.shape} of {out.dtype}")
        if not out.size:
            return out
        if self.descriptor.bit_width < 8:
            out[...] = self._unpacked(seq, tokens)
        elif out.flags.c_contiguous:
            self._gather_into(self.live_pages(seq), out.reshape(-1).view(np.uint8))
        else:
            out[...] = self.gather(seq)
        return out

    def _gather_into(self, ids: IntArray, out: Bytes) -> None:
        """Whole pages straight into place; of the last, as much as `out` has room for."""
        whole = out.size // self.page_bytes
        self.pool.copy(ids[:whole], out[: whole * self.page_bytes])
        rest = out[whole * self.page_bytes :]
        if rest.size:
            last = np.empty(self.page_bytes, np.uint8)
            self.pool.copy(ids[whole : whole + 1], last)
            rest[...] = last[: rest.size]

    def _unpacked(self, seq: int, tokens: int) -> Array:
        """The elements of a sequence's tokens, one a byte or more."""
        ids = self.live_pages(seq)
        if self.page_bytes:
            run = np.empty(ids.size * self.page_bytes, np.uint8)
            self.pool.copy(ids, run)
            return token_elements(self.descriptor, run, tokens)
        # Pages begin inside bytes: the format packs one run over the whole pool.
        pool = token_elements(self.descriptor, self.page_pool, self.num_pages * self.page_size)
        pages = pool.reshape(self.num_pages, self.page_size, *self.shape[1:])[ids]
        return pages.reshape(-1, *self.shape[1:])[:tokens]

    def dequantize(self, seq: int, *, out: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
        """The values of a sequence's tokens, float32 `[tokens, num_heads, head_dim]`: scale * (stored - zero_point).

        An unquantised tensor's values are its elements.

        Raises:
            InvalidDescriptorError: `quantization_scale`, `quantization_zero_point`, judged under valid tokens.
            UnsupportedError: `scheme` (NF4, MXFP), `dtype`, `seq_lens_unknown`.

        Example:
            >>> import numpy as np
            >>> pool = np.full((1, 2, 1, 1), 6, np.int8)
            >>> t = BlockPagedTensor(pool, block_table=[0], seq_ptr=[0, 1], seq_lens=[1], quantization="per_tensor",
            ...                      scales=0.5, zero_points=2)
            >>> t.dequantize(0).tolist()
            [[[2.0]]]
        """
        scales, zero_points, slots = self.scales, self.zero_points, None
        if isinstance(self.quantization, PerBlockAffine) and scales is not None:
            slots = self.token_slots(seq)
            scales = scales.reshape(-1)[slots]
            zero_points = None if zero_points is None else zero_points.reshape(-1)[slots]
        stored = self.gather(seq)
        _check_out(out)
        if out is not None and (out.shape != stored.shape or out.dtype != np.float32):
            raise ValueError(f"out must be {stored.shape} of float32, is {out.shape} of {out.dtype}")
        return to_float32(stored, self.dtype, self.quantization, scales, zero_points, out, slots)

    def page_references(self) -> Int64Array:
        """How many table entries name each page, int64[num_pages]; 0 for a page that no sequence has.

        Example:
            >>> import numpy as np
            >>> pool = np.zeros((3, 4, 1, 1), np.int8)
            >>> BlockPagedTensor(pool, block_table=[0, 2, 0], seq_ptr=[0, 2, 3], seq_lens=[8, 1]).page_references()
            array([2, 0, 1])
        """
        self.validate()
        indices.check_listable(self.num_pages, "pages")
        return np.bincount(self.block_table.astype(np.int64), minlength=self.num_pages)

    # Tensors like it.

    def replace(self, **fields: Any) -> BlockPagedTensor:
        """The same tensor with other fields, named as in the constructor; unchanged tables are not validated again.

        Attaches seq_lens after a bare decode: they must then sum to total_tokens.

        Example:
            >>> import numpy as np
            >>> t = BlockPagedTensor(np.zeros((2, 4, 1, 1), np.int8), block_table=[0, 1], seq_ptr=[0, 1, 2],
            ...                      total_tokens=5)
            >>> t.replace(seq_lens=[4, 1], layer_index=7).seq_lens.tolist()
            [4, 1]
        """
        return BlockPagedTensor.of_parts(self.parts.replaced(fields))

    # Comparison.

    def __eq__(self, other: object) -> bool:
        """Bit for bit: type, shape, layout, tables, pool, scales, metadata; not where the buffers lived."""
        if not isinstance(other, BlockPagedTensor):
            return NotImplemented
        mine, theirs = self.parts, other.parts
        return (
            mine.identity() == theirs.identity()
            and all(map(_same_array, mine.small_arrays(), theirs.small_arrays()))
            and self._same_pool(other)
        )

    def _same_pool(self, other: BlockPagedTensor) -> bool:
        if self.page_pool.ndim == 1:
            count = self.num_pages * self.page_size * self.num_heads * self.head_dim
            width = self.descriptor.bit_width
            first, second = (clear_tail(t.page_pool, count, width) for t in (self, other))
            return bool(np.array_equal(first, second))
        if self.pool.flat() is not None and other.pool.flat() is not None:
            return all(map(np.array_equal, self.pool.chunks(), other.pool.chunks()))
        step = max(1, (1 << 20) // max(1, self.page_bytes))
        return all(map(np.array_equal, self.pool.paged_chunks(step), other.pool.paged_chunks(step)))

    def same_tokens(self, other: BlockPagedTensor) -> bool:
        """Whether the sequences hold the same tokens, wherever their pages lie and whatever unused slots hold.

        Element type, shape, quantisation and every token's bits (with the scale and zero point that it has) are
        compared; page size, ids, layer, role and metadata are not.

        Raises:
            UnsupportedError: `seq_lens_unknown`.
        """
        if not isinstance(other, BlockPagedTensor):
            raise TypeError(f"same_tokens compares with a BlockPagedTensor, not {other!r}")
        mine, theirs = self.known_lens(), other.known_lens()
        if self.dtype is not other.dtype or self.shape != other.shape or not np.array_equal(mine, theirs):
            return False
        if type(self.quantization) is not type(other.quantization) or not self._same_constants(other):
            return False
        return all(self._same_sequence(other, seq) for seq in np.flatnonzero(mine).tolist())

    def _same_constants(self, other: BlockPagedTensor) -> bool:
        if isinstance(self.quantization, PerBlockAffine):
            return True  # a scale a slot: compared token by token
        return self.quantization == other.quantization and all(
            map(_same_array, (self.scales, self.zero_points), (other.scales, other.zero_points))
        )

    def _same_sequence(self, other: BlockPagedTensor, seq: int) -> bool:
        first, second = (t.gather(seq).view(np.uint8) if t.shape[1] and t.shape[2] else None for t in (self, other))
        if first is not None and not np.array_equal(first, cast(Any, second)):
            return False
        if not isinstance(self.quantization, PerBlockAffine):
            return True
        pairs = ((self.scales, other.scales), (self.zero_points, other.zero_points))
        slots, others = self.token_slots(seq), other.token_slots(seq)
        return all(
            a is b or (a is not None and b is not None and _same_array(a.reshape(-1)[slots], b.reshape(-1)[others]))
            for a, b in pairs
        )

    # Pickling (protocol 5): every array out of band, float8 and bfloat16 as their bytes.

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _unpickled, self.parts.pickled(self.pool)


_set_parts, _set_pool = (vars(BlockPagedTensor)[slot].__set__ for slot in ("_parts", "_pool"))


def _check_out(out: Any) -> None:
    if out is not None and not isinstance(out, np.ndarray):
        raise TypeError(f"out must be an array, not {out!r}")


_FROM_START = frozen(np.zeros(1, np.int64))


def element_of(descriptor: TensorDescriptor) -> np.dtype[Any]:
    """The NumPy type of gathered elements: void of their width, or bits in a byte, where NumPy has no name for them."""
    if descriptor.dtype.numpy is not None:
        return descriptor.dtype.numpy
    width = descriptor.bit_width
    return np.dtype(np.uint8) if width < 8 else np.dtype(f"V{width // 8}")


def token_elements(descriptor: TensorDescriptor, run: Bytes, tokens: int) -> Array:
    """The first `tokens` of a run of page bytes, `[tokens, num_heads, head_dim]`: a view, or unpacked."""
    _, num_heads, head_dim = descriptor.shape
    count, width = tokens * num_heads * head_dim, descriptor.bit_width
    if width >= 8:
        elements = run[: count * width // 8].view(element_of(descriptor))
    elif descriptor.dtype.numpy is not None:
        elements = unpack(run, descriptor.dtype, count)
    else:
        elements = unpack_codes(run, width, count)
    return elements.reshape(tokens, num_heads, head_dim)


def _same_array(a: Array | None, b: Array | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    first, second = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return bool(np.array_equal(first, second))


def _unpickled(*state: Any) -> BlockPagedTensor:
    return BlockPagedTensor.of_parts(Parts.unpickled(*state))


def element_offset(
    seq: Any,
    token: Any,
    head: Any,
    dim: Any,
    *,
    page_size: int,
    num_pages: int,
    num_heads: int,
    head_dim: int,
    block_table: Any,
    seq_ptr: Any,
    seq_lens: Any = None,
) -> Any:
    """Where an element stands in a page pool, in elements (section 1): int64; scalars, or arrays that broadcast.

    Args:
        seq, token, head, dim: coordinates; `token` counts from the sequence's first.
        block_table, seq_ptr: as in the tensor; only the entries that are asked for are judged.
        seq_lens: bounds the tokens; without it the sequence's pages do.

    Raises:
        IndexError: a coordinate out of range.
        InvalidDescriptorError: the tables point outside themselves or the pool.

    Example:
        >>> int(element_offset(0, 4, 0, 0, page_size=4, num_pages=5, num_heads=2, head_dim=8,
        ...                    block_table=[0, 1, 0], seq_ptr=[0, 2, 3]))
        64
    """
    return indices.element_offset(
        tuple(_coordinate(x, name) for x, name in ((seq, "seq"), (token, "token"), (head, "head"), (dim, "dim"))),
        tuple(map(operator.index, (page_size, num_pages, num_heads, head_dim))),
        indices.as_indices(block_table, "block_table"),
        indices.as_indices(seq_ptr, "seq_ptr"),
        None if seq_lens is None else indices.as_indices(seq_lens, "seq_lens"),
    )


def _coordinate(value: Any, name: str) -> Int64Array:
    array = np.asarray(value)
    if array.dtype.kind == "O" and all(isinstance(number, int) for number in array.reshape(-1)):
        raise IndexError(f"{name} {value} is out of range")  # beyond 64 bits
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be an integer or an array of integers, not {value!r}")
    if array.size and (array.min() < 0 or array.max() >= 1 << 63):
        raise IndexError(f"{name} {int(array.min())} is out of range")
    return frozen(array.astype(np.int64))
