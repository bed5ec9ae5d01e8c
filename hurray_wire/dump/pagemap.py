"""`--map`: the pool as a grid, a character a page, by how many table entries name it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hurray_wire.dump.accounting import References, references
from hurray_wire.dump.model import Item
from hurray_wire.dump.paper import Paper, Part
from hurray_wire.dump.words import counted

_ROWS = 64
_MOST_ROWS = 100_000
_UNREFERENCED, _SPARE, _ONCE, _MANY = 0, 1, 2, 11
"""Cell codes: nobody's, spare, then 1 + references up to nine, then many."""
SYMBOLS = ".o123456789+"
_STYLES = ("nobody", "spare", "once", *("shared",) * 8, "busy")


class Grid(NamedTuple):
    """Cells of so many pages each, row by row."""

    cells: npt.NDArray[np.uint8]
    pages_each: int
    columns: int


def grid(item: Item, found: References, columns: int, *, full: bool) -> Grid:
    """The pool's pages as cell codes; a cell of several pages shows the one that is named most."""
    pages = item.descriptor.layout.num_pages if item.descriptor is not None else 0
    most = columns * (_MOST_ROWS if full else _ROWS)
    each = max(1, -(-pages // most))
    cells = np.zeros(-(-pages // each), np.uint8)
    np.maximum.at(cells, found.ids // each, _codes(found))
    return Grid(cells, each, columns)


def _codes(found: References) -> npt.NDArray[np.uint8]:
    """The cell code of each page that is named."""
    codes = np.minimum(found.counts + 1, _MANY).astype(np.uint8)
    if found.live is not None:
        codes[~np.isin(found.ids, found.live, assume_unique=True)] = _SPARE
    return codes


def print_map(paper: Paper, item: Item, *, full: bool) -> None:
    """The grid with its legend."""
    found = references(item)
    if found is None or item.descriptor is None:
        paper.field("map", "none without sound tables")
        return
    columns = 64 if paper.width >= 80 else 32 if paper.width >= 46 else 16
    drawn = grid(item, found, columns, full=full)
    each = f"a character is {counted(drawn.pages_each, 'page')}"
    shows = ", and shows the one that is named most" if drawn.pages_each > 1 else ""
    paper.field("map", f"{counted(item.descriptor.layout.num_pages, 'page')}; {each}{shows}")
    _print_cells(paper, drawn)
    _print_legend(paper, item, found)


def _print_cells(paper: Paper, drawn: Grid) -> None:
    width = len(f"{drawn.cells.size * drawn.pages_each:,}")
    for start in range(0, drawn.cells.size, drawn.columns):
        row = drawn.cells[start : start + drawn.columns]
        label = f"    {start * drawn.pages_each:>{width},}  "
        paper.line((label, "label"), *_runs(row))


def _runs(row: npt.NDArray[np.uint8]) -> list[Part]:
    """A row's characters, neighbours of one style together, a blank after each sixteen."""
    parts: list[Part] = []
    for i, code in enumerate(row.tolist()):
        if i and i % 16 == 0:
            parts.append(" ")
        parts.append((SYMBOLS[code], _STYLES[code]))
    return parts


def _print_legend(paper: Paper, item: Item, found: References) -> None:
    pages = item.descriptor.layout.num_pages if item.descriptor is not None else 0
    counts = np.bincount(_codes(found), minlength=_MANY + 1).tolist()
    shared = sum(counts[_ONCE + 1 :])
    rows: list[tuple[list[Part], str]] = [
        ([(SYMBOLS[_UNREFERENCED], _STYLES[_UNREFERENCED])], f"unreferenced: {counted(pages - sum(counts), 'page')}"),
        ([(SYMBOLS[_ONCE], _STYLES[_ONCE])], f"named once: {counted(counts[_ONCE], 'page')}"),
    ]
    if counts[_SPARE]:
        words = f"spare, named but without a token: {counted(counts[_SPARE], 'page')}"
        rows.append(([(SYMBOLS[_SPARE], _STYLES[_SPARE])], words))
    if shared:
        marks: list[Part] = [("2", "shared"), "-", ("9", "shared"), " ", ("+", "busy")]
        most = counted(int(found.counts.max()), "time")
        rows.append(
            (marks, f"shared, named so many times, + for more than nine: {counted(shared, 'page')}, {most} at most")
        )
    for symbols, words in rows:
        paper.text(*symbols, f"  {words}", indent=4)
