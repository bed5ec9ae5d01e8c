"""What every operation shares: memory for a result, the tensor made of it, what is refused, what must agree.

Metadata follows its tensor: what is one entry a sequence is selected and joined with the sequences, the rest must not
contradict itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hurray_wire.arrays import Bytes, address
from hurray_wire.dtypes import Dtype, packed_bytes
from hurray_wire.errors import Code, Difference, MismatchError, UnsupportedError
from hurray_wire.indices import Int64Array
from hurray_wire.memory import allocated
from hurray_wire.metadata import KNOWN_NAMES
from hurray_wire.quantization import MXFP, NF4, PerChannelAffine
from hurray_wire.tensor import BlockPagedTensor

Array = npt.NDArray[Any]
Tensor = BlockPagedTensor

PER_SEQUENCE = ("seq_ids", "first_tokens")
"""Metadata that holds one entry a sequence."""
IDENTITY = ("dtype", "page_size", "num_heads", "head_dim", "kv_role", "layer_index", "quantization")
"""What tensors of one layer and role have in common, named as `expect` names it."""


# Results.


def fresh(shape: tuple[int, ...], dtype: Dtype, bits: int, *, zeroed: bool = False) -> tuple[Bytes, Array]:
    """Memory for a pool of `shape` elements, uninitialised or zero: as bytes, and as the array that a tensor takes."""
    raw = allocated(packed_bytes(math.prod(shape), bits), _zeros if zeroed else None)
    if dtype.is_flat or dtype.numpy is None:
        return raw, raw
    return raw, raw.view(dtype.numpy.newbyteorder("<")).reshape(shape)


def _zeros(nbytes: int, alignment: int) -> Bytes:
    """Zeros that cost nothing where nothing is written to them."""
    block = np.zeros(nbytes + alignment, np.uint8)
    start = -address(block) % alignment
    return block[start : start + nbytes]


def derived(t: Tensor, **fields: Any) -> Tensor:
    """`t.replace`, where tables of uint64 stay that: a receiver that expects them gets them."""
    if "block_table" in fields and t.layout.block_table_index_type == "uint64":
        fields["index_type"] = "uint64"
    return t.replace(**fields)


def per_slot(t: Tensor) -> dict[str, Array]:
    """The arrays of a per-block scheme, one entry a page slot; none of another scheme."""
    arrays = {"scales": t.scales, "zero_points": t.zero_points}
    return {name: a for name, a in arrays.items() if a is not None and a.ndim == 2}


def per_channel(t: Tensor, axis: int) -> dict[str, Array]:
    """The arrays of a per-channel scheme along this axis of the shape; none of another scheme."""
    scheme = t.quantization
    if not isinstance(scheme, PerChannelAffine) or scheme.axis != axis:
        return {}
    return {name: a for name, a in (("scales", t.scales), ("zero_points", t.zero_points)) if a is not None}


# Refusals.


def sound(t: Any) -> None:
    """Refuse what is no tensor, and a tensor with violations."""
    if not isinstance(t, BlockPagedTensor):
        raise TypeError(f"a BlockPagedTensor is needed, not {type(t).__name__}")
    t.validate()


def whole_pages(*tensors: Tensor) -> None:
    """Refuse tensors with violations, and pools whose pages end inside bytes.

    Raises:
        TypeError: not a tensor.
        InvalidDescriptorError: with the tensor's violations.
        UnsupportedError: `packed_pool`.
    """
    for t in tensors:
        sound(t)
        if t.page_pool.ndim == 1 and t.num_pages and not t.page_pool.size:
            raise packed_pool(f"pages of no elements cannot be counted in a 1-D pool of {t.dtype.name}")
        if t.pool.nbytes and not t.page_bytes:
            raise packed_pool(f"pages of {t.page_size} x {t.num_heads} x {t.head_dim} {t.dtype.name} end inside bytes")


def packed_pool(message: str) -> UnsupportedError:
    """The refusal of packed elements that cannot be taken apart at bytes."""
    return UnsupportedError(message, code=Code.PACKED_POOL, where="page_pool")


def no_float_blocks(t: Tensor, doing: str) -> None:
    """Refuse NF4 and MXFP where pages or heads change: the format does not say how their scales lie (section 3).

    Raises:
        UnsupportedError: `scheme`.
    """
    if isinstance(t.quantization, NF4 | MXFP):
        name = type(t.quantization).__name__
        message = f"{name} scales are carried, not interpreted: {doing} would part them from their values"
        raise UnsupportedError(message, code=Code.SCHEME, where="quantization")


def no_latent(t: Tensor, doing: str) -> None:
    """Refuse what would take a latent apart: no part of one means anything.

    Raises:
        UnsupportedError: `layout`.
    """
    if (t.parts.metadata or {}).get("content") == "latent":
        message = f"is 'latent': a latent is one vector a token, {doing} it would be nonsense"
        raise UnsupportedError(message, code=Code.LAYOUT, where="metadata.content")


# What must agree.


def trait(t: Tensor, name: str) -> Any:
    """One thing that a tensor says of itself, in the notation of `expect`."""
    if name == "dtype":
        extension = t.descriptor.extension_type
        return t.dtype.name if extension is None else (t.dtype.tag, extension)
    if name == "composite":
        return t.descriptor.composite
    value = getattr(t, name)
    return value.tolist() if isinstance(value, np.ndarray) else value


def same_bits(a: Array | None, b: Array | None) -> bool:
    """Whether two arrays hold the same bytes."""
    if a is b or a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and bool(np.array_equal(_raw(a), _raw(b)))


def _raw(array: Array) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def table_differences(t: Tensor, first: Tensor, names: Iterable[str]) -> list[Difference]:
    """Which of these arrays differ, told by their sizes: the arrays themselves may have millions of entries."""
    pairs = ((name, getattr(t, name), getattr(first, name)) for name in names)
    return [
        Difference(name, _told(found), _told(expected))
        for name, found, expected in pairs
        if not (found is expected or (found is not None and expected is not None and np.array_equal(found, expected)))
    ]


def _told(array: Array | None) -> Any:
    if array is None or array.size <= 8:
        return None if array is None else array.tolist()
    return f"{array.size} entries, {', '.join(map(str, array[:4].tolist()))}, ..."


def agree(tensors: Sequence[Tensor], names: Iterable[str], *, arrays: Iterable[str] = ()) -> None:
    """Raise everything in which a later tensor differs from the first.

    Raises:
        MismatchError: `.differences`, each `tensors[i].name`.
        ValueError: no tensor.
    """
    if not tensors:
        raise ValueError("at least one tensor is needed")
    first, names, arrays = tensors[0], tuple(names), tuple(arrays)
    differences = []
    for i, t in enumerate(tensors):
        pairs = ((name, trait(t, name), trait(first, name)) for name in names)
        found = [Difference(name, mine, others) for name, mine, others in pairs if mine != others]
        found += table_differences(t, first, arrays)
        differences += [Difference(f"tensors[{i}].{d.where}", d.found, d.expected) for d in found]
    if differences:
        raise MismatchError(differences)


# Metadata.


def selected(t: Tensor, seqs: Int64Array) -> dict[str, Any]:
    """A tensor's metadata for some of its sequences."""
    metadata = dict(t.parts.metadata or {})
    chosen = seqs.tolist()
    for name in PER_SEQUENCE:
        if name in metadata:
            values = metadata[name]
            metadata[name] = [values[i] for i in chosen]
    return metadata


def united(tensors: Sequence[Tensor], *, apart: Iterable[str] = ()) -> dict[str, Any]:
    """The metadata of tensors that become one, but for the names that are set apart.

    A name with a meaning must have one value wherever it stands; a user's name that has several is dropped.

    Raises:
        MismatchError: names with a meaning whose values contradict each other.
    """
    merged: dict[str, Any] = {}
    disputed: set[str] = set()
    differences = []
    for i, t in enumerate(tensors):
        for name, value in (t.parts.metadata or {}).items():
            plain = list(value) if isinstance(value, tuple) else value
            if merged.setdefault(name, plain) != plain and name not in apart:
                disputed.add(name)
                if name in KNOWN_NAMES:
                    differences.append(Difference(f"tensors[{i}].metadata.{name}", plain, merged[name]))
    if differences:
        raise MismatchError(differences)
    return {name: value for name, value in merged.items() if name not in disputed and name not in apart}
