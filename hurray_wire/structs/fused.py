"""From one construct declaration: a `struct.Struct`, the path of every field, its meaning.

construct interprets a declaration field by field, which costs about a hundred microseconds for a descriptor.
`resolve` walks the same declaration once, for one shape of the data (how many handles, which optional tables),
into a flat `Plan`: one `struct.Struct` and the fields in order. The plan parses, builds, locates and lists spans;
the interpreted declaration remains the oracle that tests hold it to. No field is named here.

A name that begins with an underscore is a grouping that does not appear in paths.
"""

from __future__ import annotations

import struct
from collections import namedtuple
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import construct as c

Record = Any
"""A namedtuple whose fields are those of the declaration: mypy cannot know them, tests do."""


class Named(c.Adapter):  # type: ignore[misc]  # construct is untyped
    """A number whose values have names: an `IntEnum`'s members or an `IntFlag`'s bits. Any number passes.

    construct's own Enum and FlagsEnum give strings for known values and lose unknown bits; what a blob
    may hold is for `rules` to say, and a damaged field must still be shown as it is.
    """

    def __init__(self, subcon: Any, names: type[IntEnum] | type[IntFlag]) -> None:
        super().__init__(subcon)
        self.names = names

    def _decode(self, obj: int, context: Any, path: str) -> int:
        return obj

    def _encode(self, obj: int, context: Any, path: str) -> int:
        return obj


class Span(NamedTuple):
    """One field as it lies in the bytes: absolute offset, length, dotted path, value, and what it means."""

    offset: int
    length: int
    path: str
    value: Any
    meaning: str


class Place(NamedTuple):
    """Where a field lies, from its plan's first byte."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Field:
    """One leaf of a plan."""

    path: str
    code: str
    declared: Any
    note: str


def resolve(declared: Any, context: c.Container, path: str = "", note: str = "") -> Iterator[Field]:
    """The leaves of a declaration in wire order; counts, conditions and switches are asked of `context`."""
    if isinstance(declared, c.Renamed):
        note = declared.docs or note
        if isinstance(declared.subcon, c.Renamed):  # a note wraps a name that is already given
            yield from resolve(declared.subcon, context, path, note)
            return
        hidden = declared.name.startswith("_")
        inner = path if hidden else f"{path}.{declared.name}" if path else declared.name
        yield from resolve(declared.subcon, context, inner, note)
    elif isinstance(declared, c.Struct):
        own = context.get(path, context)  # as construct nests its contexts
        for subcon in declared.subcons:
            yield from resolve(subcon, own, path)
    elif isinstance(declared, c.Array):
        for i in range(_asked(declared.count, context)):
            yield from resolve(declared.subcon, context, f"{path}[{i}]", note)
    elif isinstance(declared, c.IfThenElse):
        chosen = declared.thensubcon if _asked(declared.condfunc, context) else declared.elsesubcon
        yield from resolve(chosen, context, path, note)
    elif isinstance(declared, c.Switch):
        key = _asked(declared.keyfunc, context)
        yield from resolve(declared.cases.get(key, declared.default), context, path, note)
    elif declared is not c.Pass:
        yield Field(path, _format_code(declared, context), declared, note)


def _format_code(declared: Any, context: c.Container) -> str:
    if isinstance(declared, Named):
        declared = declared.subcon
    if isinstance(declared, c.Bytes):
        return f"{_asked(declared.length, context)}s"
    if isinstance(declared, c.FormatField) and declared.fmtstr[0] == "<":
        return str(declared.fmtstr[1:])
    raise TypeError(f"a wire table holds little-endian numbers and bytes, not {declared!r}")


def _asked(value: Any, context: c.Container) -> Any:
    return value(context) if callable(value) else value


_MOST_REMEMBERED = 256
"""Fields of a record whose class is kept: a hostile count makes thousands, and memory is not a sender's to fill."""


def _record_class(names: tuple[str, ...]) -> type[Record]:
    return _made(names) if len(names) <= _MOST_REMEMBERED else _made.__wrapped__(names)


@lru_cache(maxsize=256)
def _made(names: tuple[str, ...]) -> type[Record]:
    return namedtuple("Record", names)


new_record: Any = tuple.__new__
"""Makes a record of its values: `_make` without its length check, at half its time."""


class Plan:
    """One declaration, resolved: `unpack` gives a record, `pack` takes its values in order.

    Example:
        >>> from hurray_wire.structs.descriptor import HANDLE
        >>> plan = Plan(HANDLE)
        >>> plan.size, plan.unpack(plan.pack(640, 64, 0, 0, 0, 0), 0).byte_size
        (16, 640)
    """

    __slots__ = ("fields", "names", "pack", "packed", "places", "record", "size")
    record: type[Record]
    """The class of its records."""
    places: dict[str, Place]
    """Where each field stands, and each whole table, which begins with its first field, from the first byte."""

    def __init__(self, declared: Any, context: c.Container | None = None) -> None:
        self.fields = tuple(resolve(declared, context if context is not None else c.Container()))
        self.packed = struct.Struct("<" + "".join(field.code for field in self.fields))
        self.size = self.packed.size
        self.names = tuple(_record_name(field.path) for field in self.fields)
        self.pack = self.packed.pack

    def __getattr__(self, name: str) -> Any:
        """`record` and `places`, at the first asking: a plan of hostile size is asked for neither.

        Not functools.cached_property: its lock, one for all plans, would stay held in a process forked meanwhile.
        """
        if name == "record":
            self.record = _record_class(self.names)
        elif name == "places":
            self.places = _places(self.fields)
        else:
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    def make(self, values: Iterable[Any]) -> Record:
        """A record of values in order."""
        return new_record(self.record, values)

    def unpack(self, data: Any, offset: int = 0) -> Record:
        """The record at `offset`; the caller has made sure that `size` bytes are there."""
        return new_record(self.record, self.packed.unpack_from(data, offset))

    def packed_size(self, path: str) -> int:
        """Bytes of one field."""
        place = self.places[path]
        return place.stop - place.start

    def offset_of(self, path: str) -> int:
        """Where a field stands, from the table's first byte."""
        return self.places[path].start

    def spans(self, data: Any, offset: int, base: int, prefix: str = "") -> Iterator[Span]:
        """Every field that is there whole, `base` added to its place; ends at the first that is cut."""
        for field in self.fields:
            size = self.packed_size(field.path)
            if offset + size > len(data):
                return
            (value,) = struct.unpack_from("<" + field.code, data, offset)
            if size:
                yield Span(base + offset, size, prefix + field.path, value, meaning(field, value))
            offset += size


def _places(fields: tuple[Field, ...]) -> dict[str, Place]:
    found: dict[str, Place] = {}
    start = 0
    for field in fields:
        place = Place(start, start + struct.calcsize("<" + field.code))
        found.setdefault(field.path, place)
        found.setdefault(field.path.partition(".")[0], place)
        start = place.stop
    return found


class Groups:
    """A plan cut at its paths' first component: `buffers[0].byte_size` goes to the record of `buffers[0]`."""

    __slots__ = ("cuts", "plan", "rows", "size")
    cuts: list[tuple[str, struct.Struct]]
    """The name and the bytes of each group."""
    rows: list[tuple[type[Record], slice]]
    """The class of its record, and its values among all."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.size = plan.size
        heads = [field.path.partition(".")[0] for field in plan.fields]
        firsts = [i for i, head in enumerate(heads) if i == 0 or head != heads[i - 1]]
        self.cuts, self.rows = [], []
        for start, stop in pairwise([*firsts, len(heads)]):
            fields = plan.fields[start:stop]
            names = tuple(_record_name(field.path.partition(".")[2]) for field in fields)
            packed = struct.Struct("<" + "".join(field.code for field in fields))
            self.cuts.append((heads[start], packed))
            self.rows.append((_record_class(names), slice(start, stop)))

    def unpack(self, data: bytes, offset: int) -> list[Record]:
        """A record a group, in wire order; only those that are there whole."""
        if offset + self.size <= len(data):
            values = self.plan.packed.unpack_from(data, offset)
            return [new_record(record, values[place]) for record, place in self.rows]
        records = []
        for (_, packed), (record, _) in zip(self.cuts, self.rows, strict=True):
            if offset + packed.size > len(data):
                break
            records.append(new_record(record, packed.unpack_from(data, offset)))
            offset += packed.size
        return records


def _record_name(path: str) -> str:
    return path.replace("[", "_").replace("]", "").replace(".", "_")


def meaning(field: Field, value: Any) -> str:
    """What a value says, for a person: the name that an enumeration gives it, and the field's note."""
    declared = field.declared
    told = _named(declared.names, value) if isinstance(declared, Named) else ""
    return ", ".join(part for part in (told, field.note) if part)


def _named(names: type[IntEnum] | type[IntFlag], value: int) -> str:
    if issubclass(names, IntFlag):
        known = [flag for flag in names if value & flag]
        rest = value & ~sum(known)
        return " + ".join([*(str(flag.name).lower() for flag in known), *([f"reserved {rest:#x}"] if rest else [])])
    return names(value).name.lower() if value in set(names) else ""
