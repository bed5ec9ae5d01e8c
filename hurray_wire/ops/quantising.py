"""Values to stored elements: quantize, so that `dequantize` turns them back.

Slots that no token owns come out as zero; their contents, which may be anything, decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hurray_wire.dtypes import Dtype, pack
from hurray_wire.errors import Code, InvalidDescriptorError, UnsupportedError, violations_error
from hurray_wire.indices import IntArray
from hurray_wire.ops import derived as d
from hurray_wire.ops.chunks import chunks, clear, owned_or_named, stored
from hurray_wire.ops.dequantising import dequantize
from hurray_wire.ops.derived import Array, derived, fresh, whole_pages
from hurray_wire.ops.float8 import LARGEST, narrow, widen
from hurray_wire.ops.spans import Mask
from hurray_wire.quantization import MXFP, NF4, PerBlockAffine, PerChannelAffine, PerTensorAffine, Quantization
from hurray_wire.rules import ZERO_POINT_RANGES, check_scheme_fit, check_storage
from hurray_wire.tensor import BlockPagedTensor

Float32 = npt.NDArray[np.float32]

_SHORT_ROW = 64
"""Elements a slot below which NumPy's loop over a row costs more than the row."""


class _Target(NamedTuple):
    """What values become: a type, the range of its stored numbers, a scheme; constants are found unless `fixed`."""

    dtype: Dtype
    least: float
    most: float
    scheme: Quantization
    fixed: bool

    @property
    def symmetric(self) -> bool:
        """Whether zero is stored as zero."""
        return self.least == -self.most

    @property
    def scale_type(self) -> np.dtype[Any]:
        """The element type of scales."""
        found = self.scheme.scale_type.numpy if isinstance(self.scheme, PerBlockAffine) else None
        return np.dtype(np.float32) if found is None else found


def quantize(t: BlockPagedTensor, scheme: Quantization | str, *, dtype: Any) -> BlockPagedTensor:
    """The tokens' values in a storage type, with the scales that fit them; what `dequantize` turns back.

    - Signed integers, symmetric: scale = largest magnitude / 127 (7 for int4), stored = rint(value / scale), clipped to
      +-127. Unsigned ones, and asymmetric schemes: the range, zero included, over 0 to 255 (-128 to 127), with a
      zero point.
    - float8: scale = largest magnitude / 448 (57344 for float8_e5m2), stored = value / scale, clipped to that and
      rounded to the nearest, ties to even.
    - A block (or channel, or tensor) of zeros has scale 1.0. A scale is rounded to its type before it is used.

    Only slots that hold tokens count; where seq_lens are not known, every slot of the pages that are named. The other
    slots come out as zero, their per-block scales as 1.0. Tables, ids, metadata stay; statistics are dropped. A tensor
    that is quantised already is taken by its values.

    Args:
        t: a tensor of float elements `[num_pages, page_size, num_heads, head_dim]`.
        scheme: "per_tensor"; "per_channel", one scale an index of head_dim; "per_block", one float32 scale a page slot
            (page_size a power of two of at least 2); zero points where `dtype` is unsigned. Or an object, which says
            axis, scale type and symmetry; a `PerTensorAffine` is used with the scale and zero point that it has.
        dtype: int8, uint8, int16, uint16, int4, uint4, int2, uint2 (packed), float8_e4m3, float8_e5m2.

    Raises:
        InvalidDescriptorError: `quantization_scale`, for a NaN, an infinity or a value whose scale does not fit its
            type, under a valid token; `quantization_storage`, `quantization_block`, `quantization_axis`,
            `quantization_scheme`, where scheme, type and page size do not go together; the tensor has violations.
        UnsupportedError: `scheme` (NF4, MXFP; symmetric on an unsigned type), `dtype`, `packed_pool`.

    Example:
        >>> pool = np.array([0.5, -1, 2, 4], np.float16).reshape(1, 4, 1, 1)
        >>> t = BlockPagedTensor(pool, block_table=[0], seq_ptr=[0, 1], seq_lens=[3])
        >>> q = quantize(t, "per_tensor", dtype="int8")
        >>> q.page_pool.reshape(-1).tolist(), q.quantization.scale * 127
        ([32, -64, 127, 0], 1.9999999925494194)
    """
    whole_pages(t)
    target = _target(scheme, Dtype.of(dtype), t.page_size)
    if t.page_size * t.num_heads * t.head_dim * target.dtype.bit_width % 8:
        raise d.packed_pool(f"pages of {t.page_size} x {t.num_heads} x {t.head_dim} {dtype} end inside bytes")
    values = t if t.quantization is None else dequantize(t)
    if values.dtype.numpy is None or values.dtype.numpy.kind == "c":
        raise UnsupportedError(f"{values.dtype.name} has no float32 value", code=Code.DTYPE, where="dtype")
    raw, pool = fresh((t.num_pages, t.page_size, t.num_heads, t.head_dim), target.dtype, target.dtype.bit_width)
    by_slot = isinstance(target.scheme, PerBlockAffine)
    scale, zero = (_store_by_slot if by_slot else _store_alike)(values, owned_or_named(values), target, raw)
    return derived(t, page_pool=pool, dtype=target.dtype, statistics=None, **_fields(target, scale, zero))


def _target(scheme: Quantization | str, dtype: Dtype, page_size: int) -> _Target:
    unsigned = dtype.name.startswith("uint")
    chosen = _named(scheme, page_size, unsigned) if isinstance(scheme, str) else scheme
    if isinstance(chosen, NF4 | MXFP):
        message = f"{type(chosen).__name__} is carried, not computed"
        raise UnsupportedError(message, code=Code.SCHEME, where="scheme")
    if not isinstance(chosen, PerTensorAffine | PerChannelAffine | PerBlockAffine):
        raise TypeError(f"scheme must be a name or a scheme object, not {scheme!r}")
    record = chosen.record()
    violations = check_storage(record, dtype.tag) + check_scheme_fit(record, page_size)
    if violations:
        raise violations_error(violations)
    if dtype.bit_width > 16:
        raise UnsupportedError(f"{dtype.name} is wider than float32 counts", code=Code.DTYPE, where="dtype")
    fixed = isinstance(chosen, PerTensorAffine) and not isinstance(scheme, str)
    zeros = chosen.zero_point != 0 if isinstance(chosen, PerTensorAffine) and fixed else not chosen.is_symmetric
    zeros = zeros or (unsigned and isinstance(chosen, PerTensorAffine))
    if unsigned and not zeros:
        message = f"{dtype.name} without zero points has no negative values: give an asymmetric scheme"
        raise UnsupportedError(message, code=Code.SCHEME, where="scheme")
    return _Target(dtype, *_range(dtype, zeros), chosen, fixed)


def _named(name: str, page_size: int, asymmetric: bool) -> Quantization:
    if name == "per_tensor":
        return PerTensorAffine(1.0)
    zero_points = 4 if asymmetric else None
    if name == "per_channel":
        return PerChannelAffine(2, 3, zero_points)
    if name == "per_block":
        return PerBlockAffine(0, page_size, 3, zero_points, Dtype.of("float32"))
    message = f"is {name!r}, must be per_tensor, per_channel or per_block, or a scheme object"
    raise InvalidDescriptorError(message, code=Code.QUANTIZATION_SCHEME, where="scheme")


def _range(dtype: Dtype, zeros: bool) -> tuple[float, float]:
    if dtype.name in LARGEST:
        return -LARGEST[dtype.name], LARGEST[dtype.name]
    least, most = ZERO_POINT_RANGES[dtype.tag]
    return (least, most) if zeros else (-most, most)


def _values(t: BlockPagedTensor, owned: IntArray) -> Iterator[tuple[slice, Mask | None, Float32]]:
    """The values of some pages at a time, `[slots, num_heads * head_dim]`, zero where no token is: one array reused."""
    width = t.num_heads * t.head_dim
    own = np.empty(0, np.float32)
    for pages, valid in chunks(t, owned):
        size = (pages.stop - pages.start) * t.page_size * width
        own = own if own.size >= size else np.empty(size, np.float32)
        values = own[:size].reshape(-1, width)
        if valid is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                widen(stored(t, pages), t.dtype, values.reshape(-1, t.num_heads, t.head_dim))
            clear(values, valid)
        yield pages, valid, values


def _store_by_slot(t: BlockPagedTensor, owned: IntArray, target: _Target, raw: Array) -> tuple[Array, Array]:
    """Stored elements of every page into `raw`; a scale and a zero point for each slot, found page by page."""
    scales = np.ones((t.num_pages, t.page_size), target.scale_type)
    zeros = np.zeros((t.num_pages, t.page_size), np.int32)
    for pages, valid, values in _values(t, owned):
        out = _place(raw, pages, t.num_pages)
        if valid is None:
            out[...] = 0
            continue
        short = values.shape[1] < _SHORT_ROW
        rows, axis = (np.ascontiguousarray(values.T), 0) if short else (values, 1)
        scale, zero = _constants(target, *(f.reduce(rows, axis=axis, initial=0) for f in (np.minimum, np.maximum)))
        scales[pages], zeros[pages] = (a.reshape(-1, t.page_size) for a in (scale, zero))
        divisor, shift = (a.astype(np.float32)[:, None] for a in (scale, zero))
        if short:
            divisor, shift = (np.repeat(a, values.shape[1], axis=1) for a in (divisor, shift))
        _store(values, target, divisor, shift, valid, out)
    return scales, zeros


def _store_alike(t: BlockPagedTensor, owned: IntArray, target: _Target, raw: Array) -> tuple[Array, Array]:
    """Stored elements of every page into `raw`; the constants that all pages share, found beforehand."""
    scale, zero = _constants(target, *_limits(t, owned, target.scheme))
    divisor, shift = (_spread(a.astype(np.float32), t, target.scheme) for a in (scale, zero))
    for pages, valid, values in _values(t, owned):
        out = _place(raw, pages, t.num_pages)
        if valid is None:
            out[...] = 0
        else:
            _store(values, target, divisor, shift, valid, out)
    return scale, zero


def _place(raw: Array, pages: slice, num_pages: int) -> Array:
    page = raw.size // num_pages
    return raw[pages.start * page : pages.stop * page]


def _limits(t: BlockPagedTensor, owned: IntArray, scheme: Quantization) -> tuple[Float32, Float32]:
    """The least and greatest value, zero included, of the tensor or of each channel."""
    columns = [np.zeros(t.num_heads * t.head_dim, np.float32) for _ in range(2)]
    for _, valid, values in _values(t, owned):
        if valid is not None:
            for f, limits in zip((np.minimum, np.maximum), columns, strict=True):
                alike = f.reduce(values, axis=None) if isinstance(scheme, PerTensorAffine) else f.reduce(values, axis=0)
                f(limits, alike, out=limits)
    axis = {1: 1, 2: 0}[scheme.axis] if isinstance(scheme, PerChannelAffine) else None
    grids = (limits.reshape(t.num_heads, t.head_dim) for limits in columns)
    least, most = (
        f.reduce(grid, axis=axis, initial=0) for f, grid in zip((np.minimum, np.maximum), grids, strict=True)
    )
    return least, most


def _constants(target: _Target, least: Float32, most: Float32) -> tuple[Array, Array]:
    """Scales in their own type, and zero points, for these limits."""
    low, high = np.asarray(least, np.float64), np.asarray(most, np.float64)
    span = np.maximum(-low, high) if target.symmetric else high - low
    steps = target.most if target.symmetric else target.most - target.least
    with np.errstate(over="ignore", under="ignore"):
        scale = np.asarray(np.where(span == 0, 1.0, span / steps)).astype(target.scale_type)
    scale[scale == 0] = _least_positive(target.scale_type)
    wrong = ~np.isfinite(scale)
    if wrong.any():
        found = float(span[wrong][0])
        message = f"would be {found / steps}, for a NaN, an infinity or a value that is too large under a valid token"
        raise InvalidDescriptorError(message, code=Code.QUANTIZATION_SCALE, where="scales")
    if target.fixed and isinstance(target.scheme, PerTensorAffine):
        return np.array(target.scheme.scale, np.float32), np.array(target.scheme.zero_point, np.int32)
    if target.symmetric:
        return scale, np.zeros(scale.shape, np.int32)
    zero = np.where(span == 0, 0.0, np.rint(target.least - low / scale.astype(np.float64)))
    return scale, np.clip(zero, target.least, target.most).astype(np.int32)


def _least_positive(scale_type: np.dtype[Any]) -> Any:
    """The smallest scale there is: that of values so small that theirs would round to 0."""
    bits = np.array(1, f"u{scale_type.itemsize}")
    return bits.view(scale_type)[()]


def _spread(constants: Float32, t: BlockPagedTensor, scheme: Quantization) -> Float32:
    """Constants against `[slots, num_heads * head_dim]`."""
    if not isinstance(scheme, PerChannelAffine):
        return constants
    grid = constants[:, None] if scheme.axis == 1 else constants
    return np.broadcast_to(grid, (t.num_heads, t.head_dim)).reshape(-1)


def _store(values: Float32, target: _Target, divisor: Float32, shift: Float32, valid: Mask, out: Array) -> None:
    """Stored elements of some pages' values, which are spoilt."""
    with np.errstate(over="ignore", under="ignore"):
        np.divide(values, divisor, out=values)
    if target.dtype.name in LARGEST:
        narrow(values, target.dtype, out.reshape(values.shape))
        return
    _round(values, target, shift, valid)
    if target.dtype.is_sub_byte:
        out[...] = pack(values.astype(np.int8).view(np.uint8), target.dtype)
    else:
        assert target.dtype.numpy is not None
        np.copyto(out.view(target.dtype.numpy).reshape(values.shape), values, casting="unsafe")


def _round(values: Float32, target: _Target, shift: Float32, valid: Mask) -> None:
    """The nearest integers, in place, shifted by the zero point and clipped."""
    np.rint(values, out=values)
    if not target.symmetric:
        np.add(values, shift, out=values)
    np.clip(values, np.float32(target.least), np.float32(target.most), out=values)
    if not target.symmetric:
        clear(values, valid)  # where no token is, zero is stored, not the zero point


def _fields(target: _Target, scale: Array, zero: Array) -> dict[str, Any]:
    scheme = target.scheme
    if isinstance(scheme, PerTensorAffine):
        scheme = PerTensorAffine(float(scale), int(zero))
        return {"quantization": scheme, "scales": None, "zero_points": None}
    return {"quantization": scheme, "scales": scale, "zero_points": None if scheme.is_symmetric else zero}
