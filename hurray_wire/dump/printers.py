"""Where lines go: a pipe, a terminal, a picture; and the bar that shows how far a long check has come."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Any, TextIO

from hurray_wire.dump.paper import STYLES, Line, Paper

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 100
_MOST_WIDTH = 200


class OutputError(Exception):
    """What is printed cannot be written; not a fault of the file that is read."""


def paper_for(out: TextIO) -> Paper:
    """Paper that prints: coloured where `out` is a terminal, plain elsewhere.

    Raises:
        OutputError: from whatever is written on it; BrokenPipeError passes.
    """
    if out.isatty():
        console = _console(out)
        return Paper(lambda line: _guarded(lambda: _print(console, line)), console.width)
    return Paper(lambda line: _guarded(lambda: _write(out, line)), plain_width())


def _guarded(write: Callable[[], None]) -> None:
    try:
        write()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.strerror or str(error)) from error


def flush(out: TextIO) -> None:
    """What is printed so far goes out, before a line on standard error follows it."""
    _guarded(out.flush)


def plain_width() -> int:
    """The width of what goes to a pipe: COLUMNS where it is set, else a hundred."""
    columns = os.environ.get("COLUMNS", "")
    return min(int(columns), _MOST_WIDTH) if columns.isdecimal() and int(columns) else PIPE_WIDTH


def _write(out: TextIO, line: Line) -> None:
    out.write("".join(text for text, _ in line).rstrip() + "\n")


def _console(out: TextIO, **options: Any) -> Console:
    from rich.console import Console
    from rich.theme import Theme

    width = shutil.get_terminal_size((80, 24)).columns
    settings: dict[str, Any] = {"width": min(width, _MOST_WIDTH), "highlight": False, "markup": False, "emoji": False}
    return Console(file=out, theme=Theme(STYLES, inherit=False), **(settings | options))


def _print(console: Console, line: Line) -> None:
    from rich.text import Text

    runs = ((style, "".join(text for text, _ in run)) for style, run in groupby(line, key=lambda part: part[1]))
    text = Text.assemble(*((text, style) for style, text in runs))
    text.rstrip()
    console.print(text, no_wrap=True, overflow="ignore", crop=False)


class Picture:
    """Paper whose lines become an SVG; nothing is printed."""

    def __init__(self) -> None:
        self._console = _console(io.StringIO(), width=plain_width(), record=True, force_terminal=True)
        self.paper = Paper(lambda line: _print(self._console, line), self._console.width)

    def svg(self, title: str) -> str:
        """The picture; fonts are those at hand, none is fetched from elsewhere."""
        from rich._export_format import CONSOLE_SVG_FORMAT

        form = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
        return self._console.export_svg(title=title, code_format=form)


class Bar:
    """How far a file has been read, on standard error where that is a terminal and somebody wants to know."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted and sys.stderr.isatty()
        self._bar: Any = None
        self._label = ""
        self._total: int | None = None

    def begin(self, label: str, total: int | None) -> None:
        """A file of `total` bytes follows."""
        self.clear()
        self._bar, self._label, self._total = None, label, total

    def reached(self, offset: int) -> None:
        """So far."""
        if not self._wanted:
            return
        if self._bar is None:
            self._bar = _progress()
            self._bar.add_task(self._label, total=self._total)
        self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=offset)

    def clear(self) -> None:
        """Make room for lines."""
        if self._bar is not None:
            self._bar.stop()


def _progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
    return Progress(*columns, console=Console(file=sys.stderr), transient=True)
