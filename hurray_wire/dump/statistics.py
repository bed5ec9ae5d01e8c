"""`--stats`: what values a buffer holds, gathered piece by piece: range, zeros, NaN, infinities, compressibility.

Compressibility is that of the byte planes by themselves (their entropy), which is what the writer's codec lives on;
repetitions, which it does not look for, are not counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hurray_wire.arrays import Bytes
from hurray_wire.compression import shuffle_width
from hurray_wire.dtypes import Dtype, unpack
from hurray_wire.dump.accounting import Int64
from hurray_wire.dump.model import POOL, Item
from hurray_wire.dump.paper import Column, Paper, Part
from hurray_wire.dump.words import counted, size
from hurray_wire.quantization import PerBlockAffine, PerChannelAffine
from hurray_wire.sections import BUFFERS
from hurray_wire.tags import SectionKind

_GROUP_BYTES = 48
"""Divides into whole elements of every type: 3 bytes for four of six bits, 16 for the widest."""


class BufferStatistics:
    """One buffer's values so far."""

    def __init__(self, name: str, dtype: Dtype | None, bits: int, count: int) -> None:
        self.name = name
        self.dtype = dtype
        self.bits = bits
        self.count = count
        """Elements that the buffer should have."""
        self.seen = self.zeros = self.nan = self.infinite = self.nbytes = self.lost = 0
        self.low: float | int | None = None
        self.high: float | int | None = None
        self.first_bad: int | None = None
        """The first element that is NaN or infinite."""
        self._left = np.zeros(0, np.uint8)
        self._planes = np.zeros((shuffle_width(bits // 8) or 1, 256), np.int64)

    def feed(self, data: Bytes) -> None:
        """The next bytes, any number of them."""
        self.nbytes += data.size
        data = np.concatenate((self._left, data)) if self._left.size else data
        whole = data.size // _GROUP_BYTES * _GROUP_BYTES
        self._left = data[whole:].copy()
        self._count(data[:whole])

    def finish(self) -> None:
        """What is left, which may end inside a group."""
        left, self._left = self._left, np.zeros(0, np.uint8)
        self._count(left)

    def _count(self, data: Bytes) -> None:
        width = self._planes.shape[0]
        for plane in range(width):
            self._planes[plane] += np.bincount(data[plane::width], minlength=256)
        with np.errstate(all="ignore"):  # a cast of a signalling NaN says so
            values = self._values(data)
        if values is None or not values.size:
            return
        start = self.seen
        self.seen += values.size
        self.zeros += values.size - int(np.count_nonzero(values))
        if values.dtype.kind == "f":
            values = self._finite(values, start)
        if values.size:
            low, high = values.min().item(), values.max().item()
            self.low = low if self.low is None else min(self.low, low)
            self.high = high if self.high is None else max(self.high, high)

    def _values(self, data: Bytes) -> npt.NDArray[Any] | None:
        """The elements as a type that NumPy computes with, None where there is none."""
        if self.dtype is None or self.dtype.numpy is None:
            return None
        if self.bits < 8:
            there = data.size // 3 * 4 if self.bits == 6 else data.size * 8 // self.bits
            most = min(there, self.count - self.seen)
            elements = unpack(data, self.dtype, max(most, 0))
        else:
            elements = data[: data.size // (self.bits // 8) * (self.bits // 8)].view(self.dtype.numpy)
        if elements.dtype.kind == "c":
            return elements.view(elements.real.dtype)
        if elements.dtype.kind == "b" or self.dtype.name in ("int4", "uint4", "int2", "uint2"):
            return elements.astype(np.int8)
        return elements if elements.dtype.kind in "iu" or elements.dtype.itemsize > 3 else elements.astype(np.float32)

    def _finite(self, values: npt.NDArray[Any], start: int) -> npt.NDArray[Any]:
        finite = np.isfinite(values)
        if finite.all():
            return values
        nan = int(np.count_nonzero(np.isnan(values)))
        self.nan += nan
        self.infinite += values.size - int(np.count_nonzero(finite)) - nan
        if self.first_bad is None:
            self.first_bad = start + int(finite.argmin())
        return values[finite]

    @property
    def entropy(self) -> float | None:
        """Bits that a byte carries, 0 to 8; None without bytes."""
        total = int(self._planes.sum())
        if not total:
            return None
        bits = 0.0
        for plane in self._planes:
            counts = plane[plane > 0]
            bits -= float((counts * np.log2(counts / counts.sum())).sum())
        return abs(bits / total)


class ItemStatistics:
    """A consumer of one item's payload: the statistics of each of its buffers."""

    def __init__(self, item: Item) -> None:
        self.buffers = dict(_expected(item))

    def feed(self, kind: int, raw_offset: int, data: Bytes) -> None:
        """Pieces come in order."""
        if kind in self.buffers:
            self.buffers[kind].feed(data)

    def lost(self, kind: int, raw_offset: int, length: int) -> None:
        """What is damaged counts for nothing."""
        if kind in self.buffers:
            self.buffers[kind].lost += length

    def finish(self, item: Item) -> None:
        """The tables too, and all that is left over."""
        for kind, array in ((SectionKind.BLOCK_TABLE, item.block_table), (SectionKind.SEQ_PTR, item.seq_ptr)):
            if array is not None:
                table = BufferStatistics(kind.name.lower(), Dtype.of(array.dtype), array.itemsize * 8, array.size)
                table.feed(np.frombuffer(array.tobytes(), np.uint8))
                self.buffers[int(kind)] = table
        for statistics in self.buffers.values():
            statistics.finish()


def statistics_of(item: Item) -> list[BufferStatistics]:
    """What was gathered of an item's buffers, in their order; nothing where nobody asked."""
    for consumer in item.consumers:
        if isinstance(consumer, ItemStatistics):
            return [consumer.buffers[kind] for kind in sorted(consumer.buffers)]
    return []


def _expected(item: Item) -> list[tuple[int, BufferStatistics]]:
    """The payload buffers of an item, with the types of their elements."""
    descriptor = item.descriptor
    if descriptor is None:
        return []
    elements = descriptor.sizes[0] * 8 // descriptor.bit_width
    found = [(POOL, BufferStatistics("page_pool", descriptor.dtype, descriptor.bit_width, elements))]
    scheme = descriptor.quantization
    affine = isinstance(scheme, PerChannelAffine | PerBlockAffine)
    for buffer, nbytes in enumerate(descriptor.sizes[3:], 3):
        scaled = buffer == 3 and isinstance(scheme, PerChannelAffine | PerBlockAffine)
        dtype: Dtype | None = Dtype.of("int32") if affine else None
        if scaled and isinstance(scheme, PerChannelAffine | PerBlockAffine):
            shared = scheme.zero_point_buffer_index == scheme.scale_buffer_index
            dtype = None if shared else scheme.scale_type
        bits = dtype.bit_width if dtype is not None else 8
        name = "scales" if buffer == 3 else "zero_points"
        found.append((BUFFERS.start + buffer, BufferStatistics(name, dtype, bits, nbytes * 8 // bits)))
    return found


_COLUMNS = (
    Column("buffer"),
    Column("type"),
    Column("elements", right=True),
    Column("least", right=True),
    Column("greatest", right=True),
    Column("zeros", right=True),
    Column("NaN", right=True),
    Column("inf", right=True),
    Column("entropy", right=True),
    Column("at best", right=True),
)


def print_statistics(paper: Paper, item: Item, buffers: list[BufferStatistics]) -> None:
    """The table, and where the first NaN or infinity stands."""
    if not buffers:
        paper.field("values", "none without a sound descriptor")
        return
    paper.field("values", "by buffer; all pages and slots are counted, whoever has them")
    paper.table(_COLUMNS, [_row(buffer) for buffer in buffers], indent=4)
    explained = "entropy: bits that a byte carries by itself; at best: raw / stored of a codec that codes bytes"
    paper.text((explained, "dim"), indent=4)
    for buffer in buffers:
        if buffer.first_bad is not None:
            paper.text((f"first NaN or infinity in {buffer.name}: {_place(item, buffer)}", "bad"), indent=4)
        if buffer.lost:
            paper.text((f"{buffer.name}: {size(buffer.lost)} damaged or missing, not counted", "bad"), indent=4)


def _row(buffer: BufferStatistics) -> list[Part]:
    entropy = buffer.entropy
    known = buffer.seen > 0
    floating = known and buffer.dtype is not None and buffer.dtype.name.startswith(("float", "bfloat", "complex"))
    return [
        buffer.name,
        buffer.dtype.name if buffer.dtype is not None else "bytes",
        f"{buffer.count:,}",
        number(buffer.low),
        number(buffer.high),
        f"{buffer.zeros:,}" if known else "",
        (f"{buffer.nan:,}", "bad" if buffer.nan else "") if floating else "",
        (f"{buffer.infinite:,}", "bad" if buffer.infinite else "") if floating else "",
        "" if entropy is None else f"{entropy:.2f}",
        "" if entropy is None else f"{8 / entropy:.2f}" if entropy > 0.005 else "> 1000",
    ]


def number(value: float | None) -> str:
    """A value in six digits."""
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else f"{value}"


def _place(item: Item, buffer: BufferStatistics) -> str:
    """An element's page, slot, head and dim, and whose token it is."""
    at = buffer.first_bad or 0
    if buffer.name != "page_pool" or item.descriptor is None or buffer.bits < 8:
        return f"element {at}"
    if buffer.dtype is not None and buffer.dtype.name.startswith("complex"):
        at //= 2
    _, page_size, heads, dim = item.descriptor.pool_shape
    if not page_size * heads * dim:
        return f"element {at}"
    slot, rest = divmod(at, heads * dim)
    page, position = divmod(slot, page_size)
    words = f"page {page}, slot {position}, head {rest // dim}, dim {rest % dim}"
    owner = owner_of(item, page, position)
    return f"{words} ({owner})" if owner else words


def owner_of(item: Item, page: int, position: int) -> str:
    """Whose token a slot holds, as far as the tables say."""
    table, ptr, lens = item.block_table, item.seq_ptr, item.seq_lens
    if not item.tables_sound or table is None or ptr is None or item.descriptor is None:
        return ""
    entries: Int64 = np.flatnonzero(table == page)
    if not entries.size:
        return "a page that no sequence has"
    page_size = item.descriptor.layout.page_size
    for entry in entries[:1000].tolist():
        seq = int(np.searchsorted(ptr, entry, side="right")) - 1
        token = (entry - int(ptr[seq])) * page_size + position
        if lens is None or token < int(lens[seq]):
            unsure = ", if it has so many" if lens is None else ""
            return f"sequence {seq}, token {token}{unsure}"
    return f"a slot that no sequence uses, {counted(int(entries.size), 'reference')} to the page"
