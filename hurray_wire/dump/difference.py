"""`--diff A B`: the first field, page, sequence and token in which two files differ.

Tensors are paired in the order of their files. How they are stored (form, chunks, compression, the stream they stand
in) is no difference; every field, every page and every token is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hurray_wire.arrays import Bytes
from hurray_wire.dtypes import Dtype
from hurray_wire.dump.buffers import BufferReader
from hurray_wire.dump.model import POOL, Item
from hurray_wire.dump.source import Source
from hurray_wire.forms import Form
from hurray_wire.sections import BUFFERS
from hurray_wire.structs.descriptor import descriptor_spans

_STEP_BYTES = 1 << 20
_STORED = ("version_minor", "descriptor_length", "flags", "buffer_count")
"""Fields that follow from others, or say only how the descriptor was written."""


class Side(NamedTuple):
    """One tensor of one file."""

    name: str
    source: Source
    item: Item


class Field(NamedTuple):
    """A field that differs, and both its values."""

    path: str
    first: Any
    second: Any


class Element(NamedTuple):
    """The first element that differs: in which page, slot, head and dim, and both its values."""

    page: int
    slot: int
    head: int | None
    dim: int | None
    first: str
    second: str


class Token(NamedTuple):
    """The first token that differs, and where its slots are."""

    sequence: int
    token: int
    element: Element
    other_page: int
    other_slot: int


class Difference(NamedTuple):
    """All in which two tensors differ; what could not be compared is said in words."""

    fields: list[Field]
    tables: list[Field]
    pages: int
    page: Element | None
    page_words: str
    sequences: int
    token: Token | None
    token_words: str

    @property
    def none(self) -> bool:
        """Whether nothing differs."""
        return not (self.fields or self.tables or self.pages or self.sequences)


def compare(a: Side, b: Side) -> Difference:
    """Two tensors, field by field, page by page, token by token."""
    fields = [*_fields(a.item, b.item)]
    tables = [*_tables(a, b)]
    pages, page, page_words = _pages(a, b)
    sequences, token, token_words = _sequences(a, b)
    return Difference(fields, tables, pages, page, page_words, sequences, token, token_words)


def _fields(a: Item, b: Item) -> Iterator[Field]:
    """Descriptor fields in wire order, then metadata."""
    first, second = (
        {span.path: span.value for span in descriptor_spans(item.descriptor_bytes) if span.path not in _STORED}
        for item in (a, b)
    )
    for path in [*first, *(path for path in second if path not in first)]:
        one, two = first.get(path), second.get(path)
        if one != two and not (one != one and two != two):
            yield Field(path, one, two)
    one_told, two_told = a.metadata or {}, b.metadata or {}
    for name in sorted({*one_told, *two_told}):
        if one_told.get(name) != two_told.get(name):
            yield Field(f"metadata.{name}", one_told.get(name), two_told.get(name))


def _tables(a: Side, b: Side) -> Iterator[Field]:
    """The first entry that differs of each table, scales and zero points."""
    for name in ("seq_lens", "seq_ptr", "block_table"):
        one, two = getattr(a.item, name), getattr(b.item, name)
        if one is None or two is None:
            if one is not two:
                yield Field(name, *("not known" if array is None else f"{array.size} entries" for array in (one, two)))
            continue
        shared = min(one.size, two.size)
        wrong = np.flatnonzero(one[:shared] != two[:shared])
        if wrong.size:
            at = int(wrong[0])
            yield Field(f"{name}[{at}]", int(one[at]), int(two[at]))
        elif one.size != two.size:
            yield Field(f"{name}[{shared}]", *(int(t[shared]) if t.size > shared else None for t in (one, two)))
    for buffer, name in ((3, "scales"), (4, "zero_points")):
        at_byte = _first_byte(a, b, BUFFERS.start + buffer)
        if at_byte is not None:
            yield Field(f"{name}, byte {at_byte[0]}", *at_byte[1:])


def readable(item: Item) -> bool:
    """Whether the item's buffers lie where its sections say, all of them."""
    return item.descriptor is not None and not item.cut and (item.form is Form.BARE or item.cover is not None)


def _first_byte(a: Side, b: Side, kind: int) -> tuple[int, str, str] | None:
    if not (readable(a.item) and readable(b.item)):
        return None
    sizes = [_size(side.item, kind) for side in (a, b)]
    readers = [BufferReader(side.source, side.item, kind) for side in (a, b)]
    for start in range(0, min(sizes), _STEP_BYTES):
        one, two = (reader.read(start, min(start + _STEP_BYTES, *sizes)) for reader in readers)
        wrong = np.flatnonzero(one != two)
        if wrong.size:
            at = int(wrong[0])
            return start + at, f"{int(one[at]):#04x}", f"{int(two[at]):#04x}"
    if sizes[0] != sizes[1]:
        return min(sizes), f"{sizes[0]} bytes", f"{sizes[1]} bytes"
    return None


def _size(item: Item, kind: int) -> int:
    buffer = kind - BUFFERS.start
    sizes = item.descriptor.sizes if item.descriptor is not None else ()
    return sizes[buffer] if buffer < len(sizes) else 0


class _Geometry(NamedTuple):
    """What a page's bytes mean."""

    dtype: Dtype
    bits: int
    page_bytes: int
    page_size: int
    heads: int
    dim: int

    @property
    def slot_bytes(self) -> int:
        return self.page_bytes // self.page_size if self.page_size else 0


def _geometry(item: Item) -> _Geometry | None:
    d = item.descriptor
    if d is None or not readable(item):
        return None
    return _Geometry(d.dtype, d.bit_width, d.page_bytes, d.layout.page_size, d.shape[1], d.shape[2])


def _pages(a: Side, b: Side) -> tuple[int, Element | None, str]:
    """How many pages differ, and the first element that does."""
    one, two = _geometry(a.item), _geometry(b.item)
    if one is None or two is None:
        return 0, None, "not compared: one of them is damaged"
    if one != two:
        names = [n for n in ("dtype", "page_size", "heads", "dim") if getattr(one, n) != getattr(two, n)]
        return 0, None, f"not compared: {', '.join(names) or 'the widths'} differ"
    if not one.page_bytes:
        return _flat_pool(a, b)
    counts = [side.item.descriptor.layout.num_pages for side in (a, b) if side.item.descriptor is not None]
    readers = [BufferReader(side.source, side.item, POOL) for side in (a, b)]
    step = max(1, _STEP_BYTES // one.page_bytes)
    found, first = 0, None
    for start in range(0, min(counts), step):
        stop = min(start + step, *counts)
        data = [reader.read(start * one.page_bytes, stop * one.page_bytes) for reader in readers]
        wrong = (data[0] != data[1]).reshape(stop - start, one.page_bytes).any(axis=1)
        found += int(np.count_nonzero(wrong))
        if first is None and wrong.any():
            at = int(wrong.argmax())
            rows = [piece[at * one.page_bytes : (at + 1) * one.page_bytes] for piece in data]
            first = _element(rows[0], rows[1], one, start + at, 0)
    extra = abs(counts[0] - counts[1])
    words = f"{min(counts):,} compared" + (f"; {extra:,} more in one pool" if extra else "")
    return found, first, words


def _flat_pool(a: Side, b: Side) -> tuple[int, Element | None, str]:
    """Pools whose pages end inside bytes, or that hold nothing: as one run."""
    found = _first_byte(a, b, POOL)
    if found is None:
        return 0, None, "compared as one run: pages are not whole bytes"
    return 1, Element(0, found[0], None, None, found[1], found[2]), "pages are not whole bytes: slot is a byte here"


def _element(one: Bytes, two: Bytes, geometry: _Geometry, page: int, slot: int) -> Element:
    """The first element that differs in two runs of slots, of which the first is `slot` of `page`."""
    at = int((one != two).argmax())
    if geometry.bits < 8:
        position = at // geometry.slot_bytes if geometry.slot_bytes else 0
        return Element(page, slot + position, None, None, f"{int(one[at]):#04x}", f"{int(two[at]):#04x}")
    width = geometry.bits // 8
    element = at // width
    values = [_value(run[element * width : (element + 1) * width], geometry.dtype) for run in (one, two)]
    position, rest = divmod(element, geometry.heads * geometry.dim)
    return Element(page, slot + position, rest // geometry.dim, rest % geometry.dim, values[0], values[1])


def _value(data: Bytes, dtype: Dtype) -> str:
    """An element's value and its bytes as they lie."""
    told = data.tobytes().hex(" ")
    if dtype.numpy is None:
        return told
    value = data.view(dtype.numpy)[0]
    if dtype.numpy.kind in "iu":
        return f"{int(value)} ({told})"
    number = f"{complex(value):.6g}" if dtype.numpy.kind == "c" else f"{float(value):.6g}"
    return f"{number} ({told})"


def _sequences(a: Side, b: Side) -> tuple[int, Token | None, str]:
    """How many sequences differ in a token, and the first token that does."""
    one, two = _geometry(a.item), _geometry(b.item)
    if one is None or two is None or not (a.item.tables_sound and b.item.tables_sound):
        return 0, None, "not compared: one of them is damaged"
    if (one.dtype, one.bits, one.heads, one.dim) != (two.dtype, two.bits, two.heads, two.dim):
        return 0, None, "not compared: elements or their shape differ"
    if a.item.seq_lens is None or b.item.seq_lens is None:
        return 0, None, "not compared: the bare form does not carry token counts"
    if one.bits * one.heads * one.dim % 8 or not one.page_bytes or not two.page_bytes:
        return 0, None, "not compared: tokens are not whole bytes"
    walk = _TokenWalk(a, b, one, two)
    count = min(a.item.seq_lens.size, b.item.seq_lens.size)
    found, first = 0, None
    for seq in range(count):
        token = walk.first(seq)
        found += token is not None
        first = first or token
    more = abs(a.item.seq_lens.size - b.item.seq_lens.size)
    return found, first, f"{count:,} compared" + (f"; {more:,} more in one batch" if more else "")


class _TokenWalk:
    """Compares sequences token by token through both block tables, each pair of pages once."""

    def __init__(self, a: Side, b: Side, one: _Geometry, two: _Geometry) -> None:
        self._items = (a.item, b.item)
        self._geometry = (one, two)
        self._readers = [BufferReader(side.source, side.item, POOL) for side in (a, b)]
        self._same: set[tuple[int, ...]] = set()

    def first(self, seq: int) -> Token | None:
        """The first token of a sequence that differs."""
        lens = [int(item.seq_lens[seq]) for item in self._items if item.seq_lens is not None]
        token, most = 0, min(lens)
        sizes = [geometry.page_size for geometry in self._geometry]
        while token < most:
            run = min(most - token, *(size - token % size for size in sizes))
            pages = [self._page(item, seq, token // size) for item, size in zip(self._items, sizes, strict=True)]
            slots = [token % size for size in sizes]
            found = self._run(seq, token, pages, slots, run)
            if found is not None:
                return found
            token += run
        if lens[0] != lens[1]:
            missing = Element(0, 0, None, None, f"{lens[0]} tokens", f"{lens[1]} tokens")
            return Token(seq, most, missing, 0, 0)
        return None

    @staticmethod
    def _page(item: Item, seq: int, nth: int) -> int:
        assert item.seq_ptr is not None
        assert item.block_table is not None
        return int(item.block_table[int(item.seq_ptr[seq]) + nth])

    def _run(self, seq: int, token: int, pages: Sequence[int], slots: Sequence[int], run: int) -> Token | None:
        key = (*pages, *slots, run)
        if key in self._same:
            return None
        one, two = (
            reader.read(start, start + run * geometry.slot_bytes)
            for reader, geometry, page, slot in zip(self._readers, self._geometry, pages, slots, strict=True)
            for start in (page * geometry.page_bytes + slot * geometry.slot_bytes,)
        )
        if np.array_equal(one, two):
            if len(self._same) < 1 << 20:
                self._same.add(key)
            return None
        element = _element(one, two, self._geometry[0], pages[0], slots[0])
        past = element.slot - slots[0]
        return Token(seq, token + past, element, pages[1], slots[1] + past)
