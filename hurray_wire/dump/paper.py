"""Lines for people: words that wrap under their label, tables with aligned columns, styles by name.

What is written is the same everywhere; only where the lines go differs: plain text to a pipe, colours to a terminal,
a picture to a file. A table that is too wide for its paper becomes a paragraph for each row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

Part = str | tuple[str, str]
"""Text, or text and the name of its style."""
Line = list[tuple[str, str]]

STYLES = {
    "title": "bold",
    "label": "cyan",
    "good": "green",
    "warn": "yellow",
    "bad": "bold red",
    "dim": "bright_black",
    "nobody": "bright_black",
    "spare": "black on blue",
    "once": "black on green",
    "shared": "black on yellow",
    "busy": "black on magenta",
}
"""Style names and what rich makes of them: only colours that every terminal theme shows."""

LABEL_WIDTH = 12
_NARROW = 60


class Column(NamedTuple):
    """A column's title, and whether its cells stand at the right."""

    title: str
    right: bool = False


class Paper:
    """Something to write on, of a width in characters."""

    def __init__(self, emit: Callable[[Line], None], width: int) -> None:
        self._emit = emit
        self.width = max(width, 20)

    def line(self, *parts: Part) -> None:
        """One line as it is, however long."""
        self._emit([part if isinstance(part, tuple) else (part, "") for part in parts])

    def blank(self) -> None:
        """An empty line."""
        self._emit([])

    def field(self, label: str, *parts: Part, style: str = "label") -> None:
        """A label, and words that wrap beside it; below it on narrow paper."""
        narrow = self.width < _NARROW
        head: Line = [(f"  {label}:" if narrow else f"  {label:<{LABEL_WIDTH}}", style)]
        indent = 4 if narrow else LABEL_WIDTH + 2
        lines = wrapped(parts, self.width - indent, self.width - len(head[0][0]) - 1 if narrow else None)
        for i, line in enumerate(lines):
            lead: Line = [*head, (" ", "")] if narrow and i == 0 else head if i == 0 else [(" " * indent, "")]
            self._emit(lead + line)

    def text(self, *parts: Part, indent: int = 2) -> None:
        """Words that wrap, indented."""
        for line in wrapped(parts, self.width - indent):
            self._emit([(" " * indent, ""), *line])

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[Part]], indent: int = 2) -> None:
        """Rows under titles in aligned columns, or a paragraph a row where they do not fit."""
        cells = [[part if isinstance(part, tuple) else (part, "") for part in row] for row in rows]
        widths = [max(len(c.title), *(len(row[i][0]) for row in cells), 0) for i, c in enumerate(columns)]
        shown = [i for i, width in enumerate(widths) if width and any(row[i][0] for row in cells)]
        if indent + sum(widths[i] + 2 for i in shown) - 2 > self.width:
            self._paragraphs(columns, cells, indent)
            return
        titles: Line = [(column.title, "label") for column in columns]
        for row in [titles, *cells]:
            line: Line = [(" " * indent, "")]
            for i in shown:
                text, style = row[i]
                padding = " " * (widths[i] - len(text))
                line += [(padding, ""), (text, style)] if columns[i].right else [(text, style), (padding, "")]
                line.append(("  ", ""))
            self._emit(line)

    def _paragraphs(self, columns: Sequence[Column], cells: Iterable[Line], indent: int) -> None:
        for row in cells:
            words: list[Part] = []
            for column, (text, style) in zip(columns, row, strict=True):
                if text:
                    joined = text.replace(" ", _HELD)
                    name = column.title.replace(" ", _HELD)
                    words += [(f"{name}{_HELD}", "label"), (joined, style), "  "]
            for i, line in enumerate(wrapped(words, self.width - indent - 2)):
                held = [(text.replace(_HELD, " "), style) for text, style in line]
                self._emit([(" " * (indent if i == 0 else indent + 2), ""), *held])


_HELD = "\N{NO-BREAK SPACE}"


def wrapped(parts: Iterable[Part], width: int, first: int | None = None) -> list[Line]:
    """Parts broken into lines of at most `width` (`first` for the first), between words where there are any."""
    lines: list[Line] = [[]]
    room = width if first is None else first
    for word in _words(parts):
        size = sum(len(text) for text, _ in word)
        if word[0][0].isspace():  # falls away at both ends of a line
            if lines[-1] and size < room:
                lines[-1] += word
            room = max(room - size, 0) if lines[-1] else room
            continue
        if size > room and lines[-1]:
            lines.append([])
            room = width
        for text, style in word:
            while len(text) > room:
                lines[-1].append((text[:room], style))
                lines.append([])
                text, room = text[room:], width
            lines[-1].append((text, style))
            room -= len(text)
    return lines


def _words(parts: Iterable[Part]) -> Iterable[Line]:
    """Words and the blanks between them; a word may have parts of several styles."""
    word: Line = []
    for part in parts:
        text, style = part if isinstance(part, tuple) else (part, "")
        for piece in re.findall(r" +|[^ ]+", text):
            if piece[0] == " ":
                if word:
                    yield word
                yield [(piece, style)]
                word = []
            else:
                word.append((piece, style))
    if word:
        yield word
