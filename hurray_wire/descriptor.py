"""`TensorDescriptor`: all that a blob says of a tensor before its bytes (section 1), to and from wire bytes.

Values on one side, `structs` on the other, `rules` between them in both directions. Arrays never enter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hurray_wire import dtypes, rules
from hurray_wire.dtypes import Dtype
from hurray_wire.errors import (
    Code,
    FrameError,
    HurrayWireError,
    InvalidDescriptorError,
    TruncatedError,
    UnsupportedError,
    Violation,
    located,
    violations_error,
)
from hurray_wire.layout import INDEX_DTYPES, INDEX_TYPES, KV_ROLES, BlockPagedLayout
from hurray_wire.quantization import CLASSES, Quantization, from_record
from hurray_wire.structs.descriptor import (
    COMPOSITE_PLAN,
    FRONT_PLAN,
    HEAD_PLAN,
    STATISTICS_PLAN,
    Fields,
    build_descriptor,
    descriptor_bytes,
    descriptor_offset,
    descriptor_spans,
    parse_descriptor,
)
from hurray_wire.structs.fused import Record, Span
from hurray_wire.tables import BufferHandle, ExtensionType, Statistics
from hurray_wire.tags import BARE_MAGIC, BLOCK_PAGED, NO_LAYER, RANK, VERSION_MAJOR, CompositeRole, Flag

__all__ = ["TensorDescriptor"]

_ROLE_NAMES = {int(tag): name for name, tag in KV_ROLES.items()}
_INDEX_NAMES = {int(tag): name for name, tag in INDEX_TYPES.items()}
_COMPOSITE = {role.name.lower(): int(role) for role in CompositeRole}
_COMPOSITE_NAMES = {value: name for name, value in _COMPOSITE.items()}


class _Relayed(NamedTuple):
    """What a decoded descriptor keeps so that it is written again as it was: no value of the tensor's."""

    version_minor: int = 0
    scheme_padding: bytes = b""


class TensorDescriptor:
    """Element type, shape, layout, buffers and optional tables of one tensor; frozen, compared by value.

    Args:
        dtype: a `Dtype` or anything that `Dtype.of` takes.
        shape: (total_tokens, num_heads, head_dim), uint64 each.
        layout: a `BlockPagedLayout`.
        buffers: a `BufferHandle` each for page_pool, block_table, seq_ptr, and scales, zero_points if quantised.
        quantization, statistics, extension_type: values of those classes, or None.
        composite: None, "base" or "correction".

    Raises:
        InvalidDescriptorError, UnsupportedError: a rule of section 1 is broken; the same rules as on reading.

    Example:
        >>> layout = BlockPagedLayout(page_size=4, num_pages=5, paged_axis=0, num_seqs=2, layer_index=3)
        >>> buffers = [BufferHandle(640), BufferHandle(12), BufferHandle(12)]
        >>> descriptor = TensorDescriptor("float16", (9, 2, 8), layout, buffers)
        >>> TensorDescriptor.decode(descriptor.encode()) == descriptor, descriptor.encoded_length
        (True, 133)
    """

    __slots__ = (
        "_encoded",
        "_relayed",
        "alignments",
        "bit_width",
        "buffers",
        "composite",
        "dtype",
        "extension_type",
        "extents",
        "index_dtype",
        "layout",
        "page_bytes",
        "pool_dtype",
        "pool_shape",
        "quantization",
        "shape",
        "sizes",
        "statistics",
        "total_bytes",
        "violations",
    )

    dtype: Dtype
    shape: tuple[int, int, int]
    layout: BlockPagedLayout
    buffers: tuple[BufferHandle, ...]
    quantization: Quantization | None
    statistics: Statistics | None
    extension_type: ExtensionType | None
    composite: str | None
    _relayed: _Relayed
    _encoded: bytes
    sizes: tuple[int, ...]
    """Bytes of each buffer."""
    alignments: tuple[int, ...]
    bit_width: int
    """Bits an element, from the extension type where the element type is private."""
    pool_shape: tuple[int, int, int, int]
    """(num_pages, page_size, num_heads, head_dim)."""
    extents: tuple[tuple[int, ...], tuple[int, ...], int]
    """Sizes, alignments and page_bytes: all that decides how a frame covers the buffers."""
    total_bytes: int
    """Of all buffers together."""
    page_bytes: int
    """Bytes of one page, 0 where a page of packed elements ends inside a byte (or holds nothing)."""
    index_dtype: np.dtype[Any]
    """Of block_table, seq_ptr and seq_lens."""
    pool_dtype: np.dtype[Any] | None
    """Of the pool where it is an array of `pool_shape`: not of bytes, and not empty."""
    violations: tuple[Violation, ...]
    """What a lenient reader tolerated; empty on every other descriptor."""

    def __init__(
        self,
        dtype: Any,
        shape: Sequence[int],
        layout: BlockPagedLayout,
        buffers: Sequence[BufferHandle],
        *,
        quantization: Quantization | None = None,
        statistics: Statistics | None = None,
        extension_type: ExtensionType | None = None,
        composite: str | None = None,
        _relayed: _Relayed = _Relayed(),  # noqa: B008 - an immutable tuple
    ) -> None:
        self._set(
            dtype=Dtype.of(dtype),
            shape=_shape(shape),
            layout=_of(layout, (BlockPagedLayout,), "layout"),
            buffers=tuple(_of(handle, (BufferHandle,), f"buffers[{i}]") for i, handle in enumerate(buffers)),
            quantization=_optional(quantization, tuple(CLASSES.values()), "quantization"),
            statistics=_optional(statistics, (Statistics,), "statistics"),
            extension_type=_optional(extension_type, (ExtensionType,), "extension_type"),
            composite=_composite(composite),
            violations=(),
            _relayed=_relayed,
        )
        self._derive()
        self._set(_encoded=self._checked_bytes())

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _derive(self) -> None:
        """What readers and writers ask for again and again."""
        layout, extension = self.layout, self.extension_type
        bits = self.dtype.bit_width if extension is None else extension.bit_width
        page_bits = layout.page_size * self.shape[1] * self.shape[2] * bits
        page_bytes = 0 if page_bits % 8 else page_bits // 8
        sizes = tuple(handle.byte_size for handle in self.buffers)
        alignments = tuple(handle.alignment for handle in self.buffers)
        self._set(
            sizes=sizes,
            alignments=alignments,
            bit_width=bits,
            pool_shape=(layout.num_pages, layout.page_size, *self.shape[1:]),
            page_bytes=page_bytes,
            extents=(sizes, alignments, page_bytes),
            total_bytes=sum(sizes),
            index_dtype=INDEX_DTYPES[layout.block_table_index_type],
            pool_dtype=None if self.dtype.is_flat or not page_bytes * layout.num_pages else self.dtype.numpy,
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"TensorDescriptor is frozen: cannot set {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"TensorDescriptor is frozen: cannot delete {name}")

    def _key(self) -> tuple[Any, ...]:
        return (
            self.dtype,
            self.shape,
            self.layout,
            self.buffers,
            self.quantization,
            None if self.statistics is None else STATISTICS_PLAN.pack(*self.statistics.record()),  # NaNs too
            self.extension_type,
            self.composite,
        )

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, TensorDescriptor) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        optional = ("quantization", "statistics", "extension_type", "composite")
        extra = "".join(f", {name}={getattr(self, name)!r}" for name in optional if getattr(self, name) is not None)
        return f"TensorDescriptor({self.dtype.name!r}, {self.shape}, {self.layout!r}, {list(self.buffers)!r}{extra})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _decode_pickled, (self._encoded, not self.violations)

    @property
    def encoded_length(self) -> int:
        """Bytes of `encode()`: 133 unquantised, up to 301."""
        return len(self._encoded)

    def encode(self) -> bytes:
        """The descriptor's bytes (section 1), a pure function of its values.

        Raises:
            InvalidDescriptorError: of a descriptor that a lenient reader tolerated.
        """
        if self.violations:
            raise violations_error(self.violations)
        return self._encoded

    def offset_of(self, path: str) -> int | None:
        """Where a field begins in the descriptor's bytes."""
        return descriptor_offset(self._encoded, path)

    def spans(self, base: int = 0) -> list[Span]:
        """Every field of the descriptor's bytes, which begin at `base`, those of a tolerated one too."""
        return descriptor_spans(self._encoded, base)

    @staticmethod
    def decode(data: Any, *, strict: bool = True) -> TensorDescriptor:
        """Read a descriptor; bytes behind its stated length are ignored.

        Args:
            data: any contiguous buffer.
            strict: False reports page_size 0, paged_axis, byte_offset, sync_mode and buffers larger than
                needed in `.violations` instead of raising.

        Raises:
            TruncatedError, FrameError, UnsupportedError, InvalidDescriptorError: by the stages of section 3.
        """
        view = memoryview(data).cast("B")
        length = stated_length(view, base=0)
        if len(view) < length:
            raise TruncatedError(needed=length, available=len(view), where="descriptor_length", offset=len(view))
        return decode_descriptor(bytes(view[:length]), strict=strict)

    def replaced(self, *, layout: BlockPagedLayout | None = None, buffers: Sequence[BufferHandle]) -> TensorDescriptor:
        """The same descriptor with other buffers, and another layout where given; relays what this one relays."""
        return TensorDescriptor(
            self.dtype,
            self.shape,
            self.layout if layout is None else layout,
            buffers,
            quantization=self.quantization,
            statistics=self.statistics,
            extension_type=self.extension_type,
            composite=self.composite,
            _relayed=self._relayed,
        )

    def _checked_bytes(self) -> bytes:
        fields = self._fields()
        violations = rules.check_descriptor(fields)
        if violations:
            raise violations_error(violations)
        return build_descriptor(fields)

    def _fields(self) -> Fields:
        scheme = None if self.quantization is None else self.quantization.record(self._relayed.scheme_padding)
        tables = {
            Flag.QUANTIZATION: scheme,
            Flag.STATISTICS: None if self.statistics is None else self.statistics.record(),
            Flag.EXTENSION_TYPE: None if self.extension_type is None else self.extension_type.record(),
            Flag.COMPOSITE_MEMBER: self._composite_record(),
        }
        flags = sum(int(flag) for flag, table in tables.items() if table is not None)
        fields = Fields(
            self._front(flags, 0),
            tuple(handle.record() for handle in self.buffers),
            scheme,
            None,
            tables[Flag.STATISTICS],
            tables[Flag.EXTENSION_TYPE],
            tables[Flag.COMPOSITE_MEMBER],
        )
        end = descriptor_bytes(fields)
        return fields._replace(front=self._front(flags, end), end=end)

    def _composite_record(self) -> Record | None:
        return None if self.composite is None else COMPOSITE_PLAN.make((_COMPOSITE[self.composite], bytes(15)))

    def _front(self, flags: int, length: int) -> Record:
        layout = self.layout
        return FRONT_PLAN.make(
            (
                BARE_MAGIC,
                VERSION_MAJOR,
                self._relayed.version_minor,
                length,
                flags,
                self.dtype.tag,
                BLOCK_PAGED,
                RANK,
                *self.shape,
                0,  # byte_offset
                layout.page_size,
                layout.num_pages,
                layout.paged_axis,
                layout.num_seqs,
                int(KV_ROLES[layout.kv_role]),
                NO_LAYER if layout.layer_index is None else layout.layer_index,
                int(INDEX_TYPES[layout.block_table_index_type]),
                bytes(6),
                len(self.buffers),
            )
        )


def _decode_pickled(data: bytes, strict: bool) -> TensorDescriptor:
    return decode_descriptor(data, strict=strict)


def _shape(shape: Sequence[int]) -> tuple[int, int, int]:
    if len(shape) != RANK:
        message = f"is {len(shape)}, must be {RANK}: total_tokens, num_heads, head_dim"
        raise InvalidDescriptorError(message, code=Code.RANK, where="rank")
    tokens, heads, dim = (rules.integer(n, 64, f"shape[{i}]", Code.SHAPE) for i, n in enumerate(shape))
    return tokens, heads, dim


def _of(value: Any, classes: tuple[type, ...], where: str) -> Any:
    if not isinstance(value, classes):
        raise TypeError(f"{where} must be {' or '.join(c.__name__ for c in classes)}, not {value!r}")
    return value


def _optional(value: Any, classes: tuple[type, ...], where: str) -> Any:
    return None if value is None else _of(value, classes, where)


def _composite(value: Any) -> str | None:
    if value is not None and value not in _COMPOSITE:
        message = f"is {value!r}, must be None, 'base' or 'correction'"
        raise InvalidDescriptorError(message, code=Code.COMPOSITE, where="composite.role")
    return value


def stated_length(view: memoryview, base: int) -> int:
    """The descriptor_length of bytes that begin with the bare magic, after their first stages (section 3).

    Raises:
        TruncatedError, FrameError `magic` `descriptor_length`, UnsupportedError `version`.
    """
    if bytes(view[:4]) != BARE_MAGIC:
        if BARE_MAGIC.startswith(bytes(view[:4])):
            raise TruncatedError(needed=4, available=len(view), where="magic", offset=base + len(view))
        message = f"is {bytes(view[:4]).hex(' ')}, must be {BARE_MAGIC.hex(' ')}"
        raise FrameError(message, code=Code.MAGIC, where="magic", offset=base)
    if len(view) > 4 and view[4] != VERSION_MAJOR:
        message = f"version {view[4]} found, this reader knows {VERSION_MAJOR}"
        raise UnsupportedError(message, code=Code.VERSION, where="version_major", offset=base + 4)
    if len(view) < _LENGTH_END:
        raise TruncatedError(
            needed=_LENGTH_END, available=len(view), where="descriptor_length", offset=base + len(view)
        )
    length = int.from_bytes(view[_LENGTH_END - 4 : _LENGTH_END], "little")
    if length < HEAD_PLAN.size:
        message = f"is {length}, must be at least {HEAD_PLAN.size}"
        raise FrameError(message, code=Code.DESCRIPTOR_LENGTH, where="descriptor_length", offset=base + 6)
    return length


def in_descriptor(data: bytes, base: int) -> bytes:
    """A frame's descriptor section, cut where the descriptor says it ends (stage 5).

    Raises:
        FrameError: `magic`, for another inner magic.
        UnsupportedError: `version`.
        InvalidDescriptorError: `descriptor_length`, for one that runs past the section.
    """
    try:
        length = stated_length(memoryview(data), base)
    except TruncatedError:
        length = HEAD_PLAN.size
    except FrameError as error:
        if error.code is Code.MAGIC:
            raise
        length = len(data) + 1
    if length > len(data) or len(data) < HEAD_PLAN.size:
        message = f"runs past the section's {len(data)} bytes"
        raise InvalidDescriptorError(
            message, code=Code.DESCRIPTOR_LENGTH, where="descriptor_length", offset=base + _LENGTH_END - 4
        )
    return data[:length]


_LENGTH_END = 10
"""Bytes up to and with descriptor_length: magic 4, version 2, length 4."""


def decode_descriptor(data: bytes, *, base: int = 0, strict: bool = True) -> TensorDescriptor:
    """Stage 5 (section 3): a descriptor's own bytes, which begin at `base` of the input, to its value."""
    return sound_descriptor(data) or _decode(data, base, strict)


def sound_descriptor(data: bytes) -> TensorDescriptor | None:
    """A descriptor's own bytes to its value, where they break no rule and are no longer than descriptors are."""
    return _remembered(data) if len(data) <= _REMEMBERED_BYTES else None


_REMEMBERED_BYTES = 512
"""Longer descriptors are mostly padding: nobody sends them twice, and memory is not theirs to fill."""


@lru_cache(maxsize=1024)
def _remembered(data: bytes) -> TensorDescriptor | None:
    """Kept by content: a cache is sent layer by layer, step by step, with descriptors that come again."""
    if len(data) < HEAD_PLAN.size or HEAD_PLAN.unpack(data).descriptor_length != len(data):
        return None
    try:
        return _decode(data, 0, True)
    except HurrayWireError:
        return None


def _decode(data: bytes, base: int, strict: bool) -> TensorDescriptor:
    fields = parse_descriptor(data)
    violations = rules.check_descriptor(fields)
    if violations:
        violations = _placed(violations, data, base)
        told = violations if strict else [v for v in violations if not v.tolerable]
        if told:
            raise violations_error(told)
    return _from_fields(fields, data, tuple(violations))


def _placed(violations: list[Violation], data: bytes, base: int) -> list[Violation]:
    """The violations with the absolute offsets of their fields."""
    placed = []
    for violation in violations:
        offset = descriptor_offset(data, violation.where)
        placed.append(located(violation, base + (len(data) if offset is None else offset)))
    return placed


def _from_fields(fields: Fields, data: bytes, violations: tuple[Violation, ...]) -> TensorDescriptor:
    front, scheme = fields.front, fields.quantization
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    whole = fields.end == len(data)
    descriptor._set(
        dtype=dtypes.by_tag(front.type_tag),
        shape=(front.shape_0, front.shape_1, front.shape_2),
        layout=_layout(front),
        buffers=tuple(BufferHandle.of_record(record) for record in fields.buffers or ()),
        quantization=None if scheme is None else from_record(scheme),
        statistics=None if fields.statistics is None else Statistics.of_record(fields.statistics),
        extension_type=None if fields.extension_type is None else ExtensionType.of_record(fields.extension_type),
        composite=None if fields.composite is None else _COMPOSITE_NAMES[fields.composite.role],
        violations=violations,
        # What a newer minor version put behind the tables we know is dropped, and its number with it.
        _relayed=_Relayed(front.version_minor if whole else 0, b"" if scheme is None else scheme.padding),
    )
    descriptor._derive()
    # Bytes that are written back as they came; what a statistics mask leaves out is written 0.
    same = (whole and fields.statistics is None) or violations
    descriptor._set(_encoded=data if same else build_descriptor(descriptor._fields()))
    return descriptor


def _layout(front: Record) -> BlockPagedLayout:
    return BlockPagedLayout.unchecked(
        front.layout_page_size,
        front.layout_num_pages,
        front.layout_paged_axis,
        front.layout_num_seqs,
        _ROLE_NAMES[front.layout_kv_role],
        None if front.layout_layer_index == NO_LAYER else front.layout_layer_index,
        _INDEX_NAMES[front.layout_block_table_index_type],
    )
