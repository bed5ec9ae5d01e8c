"""Interleaved measurement: medians of rounds in which every contender runs once, and ratios within one run.

Machines drift; a ratio of two things that ran side by side holds, an absolute time does not.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

Work = Callable[[], object]

MIN_SECONDS = 0.002
"""A contender that is quicker is run in a loop until a round takes as long."""


@dataclass
class Row:
    """One line of the results."""

    group: str
    name: str
    seconds: float
    ratio: float | None = None
    against: str = ""
    target: str = ""
    met: bool | None = None
    note: str = ""

    def cells(self) -> list[str]:
        """As a table shows it."""
        took = f"{self.seconds * 1e6:,.2f} us" if self.seconds < 1e-3 else f"{self.seconds * 1e3:,.2f} ms"
        ratio = "" if self.ratio is None else f"{self.ratio:.3f} x {self.against}"
        verdict = {None: "", True: "met", False: "MISSED"}[self.met]
        return [self.name, took, ratio, self.target, verdict, self.note]


@dataclass
class Results:
    """Everything one run measured."""

    rounds: int
    rows: list[Row] = field(default_factory=list)

    def race(self, contenders: Mapping[str, Work], loops: dict[str, int] | None = None) -> dict[str, float]:
        """Median seconds of each contender; they take turns, the order rotated, with the garbage collector off."""
        counts = loops or {name: loops_for(work) for name, work in contenders.items()}
        names = list(contenders)
        taken: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(self.rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                taken[name].append(timed(contenders[name], counts[name]))
        return {name: statistics.median(times) for name, times in taken.items()}

    def add(
        self,
        group: str,
        name: str,
        seconds: float,
        base: float | None = None,
        against: str = "",
        at_most: float | None = None,
        at_least: float | None = None,
        note: str = "",
    ) -> Row:
        """A row, its ratio to `base`, and whether that keeps its bound."""
        ratio = None if base is None else seconds / base
        met, target = None, ""
        if ratio is not None and at_most is not None:
            met, target = ratio <= at_most, f"<= {at_most:g}"
        if ratio is not None and at_least is not None:
            met, target = ratio >= at_least, f">= {at_least:g}"
        row = Row(group, name, seconds, ratio, against, target, met, note)
        self.rows.append(row)
        return row

    def value(self, group: str, name: str, value: float, *, at_least: float, note: str = "") -> None:
        """A row that is no time: a compression ratio."""
        row = Row(group, name, 0.0, value, "", f">= {at_least:g}", value >= at_least, note)
        self.rows.append(row)

    def skip(self, group: str, reason: str) -> None:
        """A row for what could not be measured here."""
        self.rows.append(Row(group, "not measured", 0.0, note=reason))

    def markdown(self) -> str:
        """A table a group."""
        lines: list[str] = []
        for group in dict.fromkeys(row.group for row in self.rows):
            lines += [f"\n### {group}\n", "| what | median | ratio | target | | |", "|---|--:|--:|--:|---|---|"]
            lines += [f"| {' | '.join(row.cells())} |" for row in self.rows if row.group == group]
        return "\n".join(lines)

    def json(self) -> list[dict[str, object]]:
        """The rows as plain values."""
        return [asdict(row) for row in self.rows]


def timed(work: Work, loops: int) -> float:
    """Seconds of one call, from a loop of calls."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        begun = time.perf_counter()
        for _ in range(loops):
            work()
        return (time.perf_counter() - begun) / loops
    finally:
        if enabled:
            gc.enable()


def loops_for(work: Work) -> int:
    """Calls that take about `MIN_SECONDS`; also warms up."""
    work()
    loops = 1
    while timed(work, loops) * loops < MIN_SECONDS and loops < 1 << 16:
        loops *= 2
    return loops


def missed(rows: Sequence[Row]) -> list[Row]:
    """The rows that do not keep their bound."""
    return [row for row in rows if row.met is False]
