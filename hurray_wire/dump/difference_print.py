"""The words of `--diff`."""

from __future__ import annotations

from hurray_wire.dump.describe import title
from hurray_wire.dump.difference import Difference, Element, Field, Side
from hurray_wire.dump.paper import Paper, Part
from hurray_wire.dump.words import clipped, counted, safe

_SHOWN = 12
_VALUE_SHOWN = 60


def print_difference(paper: Paper, a: Side, b: Side, found: Difference) -> None:
    """One pair of tensors."""
    for label, side in (("A", a), ("B", b)):
        paper.field(label, f"{safe(side.name)}, {title(side.item)} at byte {side.item.offset}")
    differ = [*found.fields, *found.tables]
    paper.field("fields", *_count(len(differ), "differs", "differ", "the same"))
    for field in differ[:_SHOWN]:
        paper.text(*_field(field), indent=4)
    if len(differ) > _SHOWN:
        paper.text((f"... {len(differ) - _SHOWN} more", "dim"), indent=4)
    paper.field("pages", *_verdict(found.pages, found.page_words, "page"))
    if found.page is not None:
        paper.text("first: ", *_place(found.page), indent=4)
    paper.field("sequences", *_verdict(found.sequences, found.token_words, "sequence"))
    if found.token is not None:
        token = found.token
        words = f"first: sequence {token.sequence}, token {token.token}, in A: "
        paper.text(words, *_place(token.element), *_other(token.other_page, token.other_slot, token.element), indent=4)


def print_shortly(paper: Paper, a: Side, b: Side, found: Difference) -> None:
    """One line for a pair that is not the first to differ."""
    counts = [(len(found.fields) + len(found.tables), "field"), (found.pages, "page"), (found.sequences, "sequence")]
    words = ", ".join(counted(number, noun) for number, noun in counts if number)
    paper.text((f"A {title(a.item)}, B {title(b.item)}", "label"), f": differ in {words} (--full tells more)", indent=0)


def _count(number: int, one: str, many: str, none: str) -> list[Part]:
    if not number:
        return [(none, "good")]
    return [(f"{number} {one if number == 1 else many}", "bad")]


def _verdict(number: int, words: str, noun: str) -> list[Part]:
    if words.startswith("not compared"):
        return [(words, "warn")]
    if number:
        verb = "differs" if number == 1 else "differ"
        return [(f"{counted(number, noun)} {verb}", "bad"), f" ({words})"]
    return [("the same", "good"), f" ({words})"]


def _field(field: Field) -> list[Part]:
    return [(f"{safe(field.path)}: ", "label"), "A ", (_shown(field.first), ""), ", B ", (_shown(field.second), "")]


def _shown(value: object) -> str:
    if value is None:
        return "absent"
    text = value.hex(" ") if isinstance(value, bytes) else str(value)
    return clipped(safe(text), _VALUE_SHOWN)


def _place(element: Element) -> list[Part]:
    place = f"page {element.page}, slot {element.slot}"
    if element.head is not None:
        place += f", head {element.head}, dim {element.dim}"
    return [(place, "label"), f": A {element.first}, B {element.second}"]


def _other(page: int, slot: int, element: Element) -> list[Part]:
    """Where the token's slot is in B, where it is another."""
    return [] if (page, slot) == (element.page, element.slot) else [f" (in B page {page}, slot {slot})"]
