"""A picture of times against sizes, both on logarithmic axes, as SVG: one line a contender."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 80, 250, 30, 60
COLOURS = ("#1b6ca8", "#56a3d9", "#0a3d62", "#c0392b", "#e67e22", "#8e44ad", "#16a085", "#7f8c8d", "#b7950b", "#2c3e50")

Point = tuple[str, int, float]


def svg(points: Iterable[Point], title: str) -> str:
    """The picture of (name, bytes, seconds)."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for name, nbytes, seconds in points:
        lines.setdefault(name, []).append((nbytes, seconds))
    sizes = [n for line in lines.values() for n, _ in line]
    times = [s for line in lines.values() for _, s in line]
    across = _Axis(math.log2(min(sizes)), math.log2(max(sizes)), LEFT, WIDTH - RIGHT)
    up = _Axis(math.floor(math.log10(min(times))), math.ceil(math.log10(max(times))), HEIGHT - BOTTOM, TOP)
    drawn = [
        *_grid(across, up),
        *(part for i, (n, line) in enumerate(lines.items()) for part in _line(n, line, i, across, up)),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#333">'
    )
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([head, ground, _text(LEFT, 18, title, weight="bold"), *drawn, "</svg>", ""])


class _Axis:
    """From exponents to places on the paper."""

    def __init__(self, low: float, high: float, start: int, stop: int) -> None:
        self.low, self.high, self._start, self._stop = low, max(high, low + 1), start, stop

    def place(self, exponent: float) -> float:
        share = (exponent - self.low) / (self.high - self.low)
        return round(self._start + share * (self._stop - self._start), 1)


def _text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal", fill: str = "#333") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}">{escape(words)}</text>'


def _grid(across: _Axis, up: _Axis) -> Iterable[str]:
    for power in range(int(up.low), int(up.high) + 1):
        y = up.place(power)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#ddd"/>'
        yield _text(LEFT - 8, y + 4, _seconds(power), anchor="end")
    for power in range(math.ceil(across.low), int(across.high) + 1, 2):
        x = across.place(power)
        yield f'<line x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#eee"/>'
        yield _text(x, HEIGHT - BOTTOM + 18, _bytes(power), anchor="middle")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, "bytes of the pool", anchor="middle")


def _line(name: str, line: list[tuple[int, float]], index: int, across: _Axis, up: _Axis) -> Iterable[str]:
    colour = COLOURS[index % len(COLOURS)]
    places = [(across.place(math.log2(n)), up.place(math.log10(s))) for n, s in sorted(line)]
    path = " ".join(f"{x},{y}" for x, y in places)
    width = 3 if name.startswith("hurray_wire") else 1.5
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
    yield from (f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in places)
    y = TOP + 20 * (index + 1)
    x = WIDTH - RIGHT + 20
    yield f'<line x1="{x}" x2="{x + 24}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="{width}"/>'
    yield _text(x + 32, y, name)


def _seconds(power: int) -> str:
    unit, scale = next((u, p) for u, p in (("s", 0), ("ms", -3), ("us", -6), ("ns", -9)) if power >= p)
    return f"{10 ** (power - scale)} {unit}"


def _bytes(power: int) -> str:
    unit, scale = next((u, p) for u, p in (("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0)) if power >= p)
    return f"{2 ** (power - scale)} {unit}"
