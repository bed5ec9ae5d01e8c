"""A compiler of annotated hex: golden bytes written down by hand, with the sums done by machine.

It knows no format: hex, numbers, regions and their lengths, places and XXH3 digests, other files and changes to them.
What a byte means is said by the comment beside it. A source holds any number of cases:

    == name-of-the-case
    @note   a line for the reader of the case: any key, any text, not interpreted here
    48 52 52 59  01 00      ; hex, in any grouping
    u32=9 i32=-7 f32=0.5    ; numbers, little-endian
    [pool                   ; a region begins
    ramp 64                 ; 64 bytes: 00 01 02 ... (also: ramp COUNT FIRST STEP)
    ]                       ; the innermost region ends
    u64=len(pool)           ; also start(), end(), xxh3() of a region, wherever it stands
    pad 64                  ; zeros up to the next multiple (pad N HH: other bytes)
    repeat 3 = 00 3C        ; the bytes so many times
    text {"model":"tiny"}   ; the rest of the line as UTF-8
    file DIR/NAME 0 133     ; bytes of a file, or of a case compiled before it: all, from START, or START to END

and, on what has been laid down so far:

    at 72 = 03              ; overwrite; behind `=` any of the tokens above
    insert 153 = 00 00      ; insert
    delete 20 8             ; so many bytes away
    cut 100                 ; keep so many bytes
    xxh3 0 288 at 288       ; the digest of bytes 0 to 288, written at 288

`macro NAME` ... `end` names some lines for the rest of the file; $1, $2 are what stands behind the name where it is
used. A line `include FILE` reads another file of macros.

    python tools/hexcase.py SOURCE [NAME]     lists the cases of a source, or dumps one
"""

from __future__ import annotations

import hashlib
import re
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

Load = Callable[[str], bytes]
"""Bytes of a file that a source names."""

_NUMBER = re.compile(r"(?:(u8|u16|u32|u64|i32|f32|f64)=)(.+)")
_CALL = re.compile(r"(len|start|end|xxh3)\(([\w.-]+)\)")
_HEX = re.compile(r"(?:[0-9A-Fa-f]{2})+")
_FORMS = {"u8": "<B", "u16": "<H", "u32": "<I", "u64": "<Q", "i32": "<i", "f32": "<f", "f64": "<d"}


class SourceError(Exception):
    """A line that says nothing that can be compiled."""


@dataclass
class Case:
    """One compiled case: its name, what stands behind its `@` keys, its bytes."""

    name: str
    keys: dict[str, str] = field(default_factory=dict)
    data: bytes = b""


@dataclass(frozen=True)
class _Hole:
    """A number that waits for its region."""

    at: int
    form: str
    call: str
    region: str


class _Builder:
    """The bytes of one case as its lines lay them down."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.data = bytearray()
        self.regions: dict[str, tuple[int, int]] = {}
        self.open: list[tuple[str, int]] = []
        self.holes: list[_Hole] = []

    def line(self, text: str) -> None:
        """One statement, or a line of tokens."""
        word, _, rest = text.partition(" ")
        statement = getattr(self, f"_do_{word}", None)
        if statement is not None:
            statement(rest.strip())
        else:
            self.tokens(text)

    def tokens(self, text: str) -> None:
        for token in text.split():
            if _HEX.fullmatch(token):
                self.data += bytes.fromhex(token)
            elif token.startswith("["):
                self.open.append((token[1:], len(self.data)))
            elif token == "]":
                name, start = self.open.pop()
                self.regions[name] = (start, len(self.data))
            else:
                self._number(token)

    def _number(self, token: str) -> None:
        found = _NUMBER.fullmatch(token)
        if not found:
            raise SourceError(f"{token!r} is neither hex nor a number")
        form, value = _FORMS[found[1]], found[2]
        call = _CALL.fullmatch(value)
        if call:
            self.holes.append(_Hole(len(self.data), form, call[1], call[2]))
            self.data += bytes(struct.calcsize(form))
        else:
            self.data += struct.pack(form, float(value) if form in ("<f", "<d") else int(value, 0))

    def settle(self) -> None:
        """Fill the holes: places and lengths first, then digests, those within other digests before them."""
        if self.open:
            raise SourceError(f"region {self.open[-1][0]!r} does not end")
        waiting = []
        for hole in self.holes:
            start, end = self.regions[hole.region]
            if hole.call == "xxh3":
                waiting.append(hole)
            else:
                self._fill(hole, {"start": start, "end": end, "len": end - start}[hole.call])
        while waiting:
            ready = [hole for hole in waiting if not any(self._within(other, hole) for other in waiting)]
            if not ready:
                raise SourceError("digests of one another")
            for hole in ready:
                start, end = self.regions[hole.region]
                self._fill(hole, xxhash.xxh3_64_intdigest(bytes(self.data[start:end])))
            waiting = [hole for hole in waiting if hole not in ready]
        self.holes = []

    def _within(self, inner: _Hole, outer: _Hole) -> bool:
        start, end = self.regions[outer.region]
        return start <= inner.at < end

    def _fill(self, hole: _Hole, value: int) -> None:
        self.data[hole.at : hole.at + struct.calcsize(hole.form)] = struct.pack(hole.form, value)

    def _apart(self, text: str) -> bytes:
        """The bytes of some tokens that stand for themselves."""
        builder = _Builder(self.load)
        builder.line(text)
        builder.settle()
        return bytes(builder.data)

    # Statements.

    def _do_pad(self, rest: str) -> None:
        step, _, filler = rest.partition(" ")
        short = -len(self.data) % int(step, 0)
        self.data += (self._apart(filler) if filler else b"\0") * short

    def _do_repeat(self, rest: str) -> None:
        count, _, body = rest.partition("=")
        self.data += self._apart(body.strip()) * int(count, 0)

    def _do_ramp(self, rest: str) -> None:
        words = [int(word, 0) for word in rest.split()]
        count, first, step = (*words, *(0, 1)[len(words) - 1 :])
        self.data += bytes((first + i * step) & 0xFF for i in range(count))

    def _do_text(self, rest: str) -> None:
        self.data += rest.encode()

    def _do_file(self, rest: str) -> None:
        name, *bounds = rest.split()
        self.data += self.load(name)[int(bounds[0], 0) if bounds else 0 :][: _span(bounds)]

    def _do_at(self, rest: str) -> None:
        start, body = self._placed(rest)
        if start + len(body) > len(self.data):
            raise SourceError(f"only {len(self.data)} bytes are there")
        self.data[start : start + len(body)] = body

    def _do_insert(self, rest: str) -> None:
        start, body = self._placed(rest)
        self.data[start:start] = body

    def _placed(self, rest: str) -> tuple[int, bytes]:
        self.settle()
        start, _, body = rest.partition("=")
        return int(start, 0), self._apart(body.strip())

    def _do_delete(self, rest: str) -> None:
        self.settle()
        start, count = (int(word, 0) for word in rest.split())
        del self.data[start : start + count]

    def _do_cut(self, rest: str) -> None:
        self.settle()
        del self.data[int(rest, 0) :]

    def _do_xxh3(self, rest: str) -> None:
        self.settle()
        start, end, _, at = rest.split()
        digest = xxhash.xxh3_64_intdigest(bytes(self.data[int(start, 0) : int(end, 0)]))
        self.data[int(at, 0) : int(at, 0) + 8] = digest.to_bytes(8, "little")


def _span(bounds: list[str]) -> int | None:
    return int(bounds[1], 0) - int(bounds[0], 0) if len(bounds) == 2 else None


def _plain(text: str) -> str:
    """A line without its comment; a `text` line has none."""
    return text.strip() if text.lstrip().startswith(("text ", "@")) else text.partition(";")[0].strip()


class _Source:
    """The lines of a source, macros unfolded."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.macros: dict[str, list[str]] = {}

    def lines(self, text: str) -> Iterator[tuple[int, str]]:
        numbered = enumerate(map(_plain, text.splitlines()), 1)
        for number, line in numbered:
            if line.startswith("macro "):
                self.macros[line.split()[1]] = self._body(numbered)
            elif line.startswith("include "):
                for _ in self.lines(self.load(line.split()[1]).decode()):
                    raise SourceError("an included file holds macros only")
            elif line:
                for unfolded in self._unfolded(line):
                    yield number, unfolded

    @staticmethod
    def _body(numbered: Iterator[tuple[int, str]]) -> list[str]:
        body: list[str] = []
        for _, line in numbered:
            if line == "end":
                return body
            if line:
                body.append(line)
        raise SourceError("a macro does not end")

    def _unfolded(self, line: str) -> Iterator[str]:
        name, *arguments = line.split()
        if name not in self.macros:
            yield line
            return
        for body in self.macros[name]:
            filled = re.sub(r"\$(\d)", lambda found: arguments[int(found[1]) - 1], body)
            yield from self._unfolded(filled)


def compile_source(text: str, load: Load) -> Iterator[Case]:
    """Every case of a source, in order, each before the next one is begun; `load` gives the files that it names.

    Raises:
        SourceError: with the number of the line.
    """
    case: Case | None = None
    builder = _Builder(load)
    at = 0
    try:
        for at, line in _Source(load).lines(text):  # noqa: B007 - told below
            if line.startswith("=="):
                if case is not None:
                    yield _finished(case, builder)
                case, builder = Case(line[2:].strip()), _Builder(load)
            elif case is None:
                raise SourceError("a case begins with == and its name")
            elif line.startswith("@"):
                key, _, value = line[1:].partition(" ")
                case.keys[key] = value.strip()
            else:
                builder.line(line)
        if case is not None:
            yield _finished(case, builder)
    except (SourceError, OSError, ValueError, KeyError, IndexError, struct.error) as error:
        raise SourceError(f"line {at}: {error!r}") from error


def _finished(case: Case, builder: _Builder) -> Case:
    builder.settle()
    case.data = bytes(builder.data)
    return case


def main() -> int:
    """List the cases of a source, or dump one of them."""
    if len(sys.argv) not in (2, 3):
        print(__doc__)
        return 2
    path = Path(sys.argv[1])
    for case in compile_source(path.read_text(), lambda name: (path.parent.parent / name).read_bytes()):
        if len(sys.argv) == 2:
            print(f"{case.name}  {len(case.data)} bytes  {hashlib.sha256(case.data).hexdigest()}")
        elif case.name == sys.argv[2]:
            for at in range(0, len(case.data), 16):
                print(f"{at:6}  {case.data[at : at + 16].hex(' ')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
