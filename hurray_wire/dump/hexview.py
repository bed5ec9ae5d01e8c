"""`--hex`: every field of header and descriptor as it lies in the bytes, from the one definition that readers use.

What is wrong is marked in its place: on its field, or on a line of its own where it lies behind the header.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hurray_wire.dump.faults import told
from hurray_wire.dump.model import Fault, Item
from hurray_wire.dump.paper import Paper, Part, wrapped
from hurray_wire.dump.source import GoneError, Source
from hurray_wire.dump.words import counted, place, safe
from hurray_wire.forms import Form
from hurray_wire.inspection import Span
from hurray_wire.sections import header_length
from hurray_wire.structs.frame import PROLOGUE_PLAN

_PER_LINE = 8
_MOST_BYTES = 32
_SECTIONS_SHOWN = 24
_HEX_NAMES = ("flags", "kind", "mask", "_tag")
_BYTES_AT, _BYTES_END = 13, 38


def print_hex(paper: Paper, item: Item, source: Source, *, full: bool) -> None:
    """The fields of an item, section entries in the middle of a long table left out unless `full`."""
    spans = item.spans
    marks = marked(item, spans)
    rows = _Rows(paper, item, source, max((len(span.path) for span in spans), default=0))
    left_out, group = 0, ""
    for i, span in enumerate(spans):
        if not full and not marks.get(i) and _is_middle(span, item):
            left_out += span.path.endswith(".kind")
            continue
        if left_out:
            paper.blank()
            paper.text((f"... {counted(left_out, 'section')} like these (--full shows all)", "dim"))
            left_out = 0
        if i and (_group(span) != group or span.path == "magic"):
            paper.blank()
        group = _group(span)
        rows.field(span, marks.get(i, []))
    if _is_cut(item):
        end = spans[-1].offset + spans[-1].length if spans else item.offset
        paper.text((f"... nothing can be read behind {place(end)}", "bad"))
    for fault in marks.get(-1, []):
        rows.behind(fault)


def _group(span: Span) -> str:
    """What stands together: a section entry, a handle, a table; the fields that are of none of these."""
    head, dot, _ = span.path.partition(".")
    return head if dot else ""


def _is_cut(item: Item) -> bool:
    """Whether header or descriptor end before their last field."""
    short = item.form is Form.HRKV and len(item.header) < _header_bytes(item)
    return short or (not item.closing and (item.fields is None or bool(item.fields.cut)))


def _header_bytes(item: Item) -> int:
    return PROLOGUE_PLAN.size if item.prologue is None else header_length(item.prologue.section_count)


def _is_middle(span: Span, item: Item) -> bool:
    """Whether a span belongs to a section entry that may be left out."""
    if not span.path.startswith("sections["):
        return False
    index = int(span.path[len("sections[") : span.path.index("]")])
    return _SECTIONS_SHOWN // 2 <= index < len(item.sections) - _SECTIONS_SHOWN // 2


def marked(item: Item, spans: list[Span]) -> dict[int, list[Fault]]:
    """The faults by the index of the span that they belong to; -1 for those that lie behind the header."""
    marks: dict[int, list[Fault]] = {}
    for fault in item.faults:
        marks.setdefault(_span_of(fault, spans), []).append(fault)
    return marks


def _span_of(fault: Fault, spans: list[Span]) -> int:
    """By path and place; a whole section by the field that vouches for it; else by place alone."""
    where, at = fault.where, fault.offset
    if where.startswith("sections[") and where.endswith("]"):
        where, at = where + (".checksum" if fault.code == "section_checksum" else ".offset"), None
    same = [i for i, span in enumerate(spans) if span.path == where]
    if at is None:
        return same[0] if same else -1
    exact = [i for i in same if spans[i].offset == at]
    around = [i for i, span in enumerate(spans) if span.offset <= at < span.offset + span.length]
    return next(iter([*exact, *around]), -1)


class _Rows:
    """Lines of offset, bytes, path, value and meaning, in columns or, on narrow paper, in two lines each."""

    def __init__(self, paper: Paper, item: Item, source: Source, path_width: int) -> None:
        self.paper = paper
        self.item = item
        self.source = source
        self.path_width = path_width
        self.indent = _BYTES_END + path_width + 2
        self.wide = paper.width >= self.indent + 20

    def field(self, span: Span, faults: list[Fault]) -> None:
        """One field, its bytes in as many lines as they take, and what is wrong with it."""
        data = self._bytes(span.offset, min(span.length, _MOST_BYTES))
        value, style = _value(span), "bad" if faults else ""
        words: list[Part] = [(value, style), "  " if value and span.meaning else "", (span.meaning, "dim")]
        self._lines(span.offset, data, span.path, words, style)
        if span.length > _MOST_BYTES:
            self.paper.text((f"... {counted(span.length - _MOST_BYTES, 'more byte')}", "dim"), indent=_BYTES_AT)
        for fault in faults:
            self._wrong(fault)

    def _lines(self, offset: int, data: bytes, path: str, words: list[Part], style: str) -> None:
        lines = list(_hex_lines(data))
        told = wrapped(words, self.paper.width - self.indent) if self.wide else []
        blank = max(len(lines), len(told))
        for i, (text, more) in enumerate(zip(_padded(lines, blank, ""), _padded(told, blank, []), strict=True)):
            at = f"{offset + i * _PER_LINE:08x}" if i < len(lines) else ""
            head: list[Part] = [("!! " if style and i == 0 else "   ", "bad"), (f"{at:<8}  ", "dim"), f"{text:<23}"]
            name = path if i == 0 and self.wide else ""
            self.paper.line(*head, "  ", (f"{name:<{self.path_width}}", style or "label"), "  ", *more)
        if not self.wide:
            self.paper.text((path, style or "label"), "  ", *words, indent=5)

    def behind(self, fault: Fault) -> None:
        """A fault that lies in no field of the header: in a table, in padding, or where the bytes end."""
        if fault.offset is None:
            self.paper.text(("!! ", "bad"), (told(fault), "bad"), f"  [{fault.code}]", indent=0)
            return
        table = {"block_table": self.item.block_table, "seq_ptr": self.item.seq_ptr, "seq_lens": self.item.seq_lens}
        array = table.get(fault.where.partition("[")[0])
        data = self._bytes(fault.offset, _PER_LINE if array is None else array.itemsize)
        self.paper.blank()
        self._lines(fault.offset, data, fault.where, [], "bad")
        self._wrong(fault)

    def _wrong(self, fault: Fault) -> None:
        self.paper.text(("^^ ", "bad"), (safe(fault.message), "bad"), f"  [{fault.code}]", indent=_BYTES_AT)

    def _bytes(self, offset: int, length: int) -> bytes:
        """From what is held of the item (a pipe has nothing else), or from the file."""
        item = self.item
        for start, data in ((item.offset, item.header), (item.descriptor_offset, item.descriptor_bytes)):
            if start <= offset and offset + length <= start + len(data):
                return data[offset - start : offset - start + length]
        try:
            return self.source.read(offset, length)
        except GoneError:
            return b""


def _padded(lines: list[Any], count: int, blank: Any) -> list[Any]:
    return [*lines, *[blank] * (count - len(lines))]


def _hex_lines(data: bytes) -> Iterator[str]:
    if not data:
        yield "(no bytes)"
    for at in range(0, len(data), _PER_LINE):
        yield data[at : at + _PER_LINE].hex(" ")


def _value(span: Span) -> str:
    value: Any = span.value
    if isinstance(value, bytes):
        printable = value.isascii() and value.decode("ascii", "replace").isprintable()
        return repr(value.decode("ascii")) if printable else "" if value.strip(b"\0") else "zero"
    if isinstance(value, float):
        return f"{value:.9g}"
    name = span.path.rpartition(".")[2]
    if name.endswith(("checksum", "stream_id")):
        return f"{value:#018x}"
    return f"{value:#x}" if name.endswith(_HEX_NAMES) and value > 9 else str(value)
