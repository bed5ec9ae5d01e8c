"""One declaration a table: what construct interprets and what is derived from it agree, in every byte and name.

The declarations are the only place where a field's name, width and order stand; the fused plans are walked out of
them. construct itself is the oracle here, and this file and `structs` are all that ever import it.
"""

from __future__ import annotations

import ast
import re
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import construct as c
import pytest
from frames import ENTRY, PROLOGUE, entries_of
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Built, tensors
from support import BARE_CASES, FRAME_CASES, bare_vector, desc, frame_vector

from hurray_wire.structs import descriptor as declared
from hurray_wire.structs import frame
from hurray_wire.structs.fused import Plan, Span

SCHEME_SIZES = {1: 16, 2: 20, 3: 24, 4: 16, 5: 16}
TABLES = {
    "handle": declared.HANDLE,
    "statistics": declared.STATISTICS,
    "extension_type": declared.EXTENSION_TYPE,
    "composite": declared.COMPOSITE,
    "head": declared.HEAD,
    "prologue": frame.PROLOGUE,
    "section": frame.SECTION,
    "checksum": frame.CHECKSUM,
}
PREFIXES = [bare_vector(name) for name in BARE_CASES] + [desc(minor=1, tail=bytes(7))]
DESCRIPTORS = [data[: int.from_bytes(data[6:10], "little")] for data in PREFIXES]


def plain(value: Any) -> Any:
    """A value that compares by its bits."""
    return struct.pack("<d", value) if isinstance(value, float) else value


def flattened(parsed: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of every field that construct read, in its order; fields of no bytes left out."""
    if isinstance(parsed, c.Container):
        for name, value in parsed.items():
            if name == "_parameters":
                yield from flattened(value, path)
            elif not name.startswith("_"):
                yield from flattened(value, f"{path}.{name}" if path else name)
    elif isinstance(parsed, c.ListContainer):
        for i, value in enumerate(parsed):
            yield from flattened(value, f"{path}[{i}]")
    elif parsed is not None and parsed != b"":
        yield path, plain(parsed)


def told(spans: list[Span]) -> list[tuple[str, Any]]:
    return [(span.path, plain(span.value)) for span in spans]


def tiles(spans: list[Span], base: int, length: int) -> bool:
    """Whether the spans lie end to end over all the bytes."""
    at = base
    for span in spans:
        if span.offset != at or span.length < 1:
            return False
        at += span.length
    return at == base + length


def interpreted(data: bytes) -> tuple[Any, int]:
    """What construct makes of a descriptor, and where it stopped."""
    stream_end = c.Struct("fields" / declared.DESCRIPTOR, "end" / c.Tell)
    found = stream_end.parse(data)
    return found.fields, found.end


@st.composite
def descriptors(draw: st.DrawFn) -> bytes:
    """Random bytes with just those values lawful that say how many tables there are."""
    flags, count = draw(st.integers(0, 31)), draw(st.integers(0, 7))
    scheme, padding = draw(st.sampled_from([1, 2, 3, 4, 5, 0, 77])), draw(st.integers(0, 9))
    size = SCHEME_SIZES.get(scheme, 4) + padding
    length = 85 + 16 * count + (4 + size) * (flags & 1)
    length += 48 * (flags >> 1 & 1) + 72 * (flags >> 3 & 1) + 20 * (flags >> 2 & 1) + 16 * (flags >> 4 & 1)
    data = bytearray(draw(st.binary(min_size=length, max_size=length)))
    data[10:14], data[15], data[16:20], data[84] = flags.to_bytes(4, "little"), 0x0A, b"\3\0\0\0", count
    if flags & 1:
        at = 85 + 16 * count
        data[at : at + 5] = size.to_bytes(4, "little") + bytes([scheme])
        if scheme == 1:  # a float32 signalling NaN does not survive being a Python float
            data[at + 8 : at + 12] = struct.pack("<f", draw(st.floats(width=32, allow_nan=False)))
    return bytes(data)


def agree(data: bytes) -> None:
    """Both readings of one descriptor, in both directions."""
    parsed, end = interpreted(data)
    fields = declared.parse_descriptor(data)
    spans = declared.descriptor_spans(data, 0)
    assert told(spans) == list(flattened(parsed))
    tables = (fields.quantization, fields.shard, fields.statistics, fields.extension_type, fields.composite)
    records = [fields.front, *(fields.buffers or ()), *(table for table in tables if table is not None)]
    values = [plain(value) for record in records for value in record if value != b""]
    assert values == [value for _, value in told(spans)]
    assert (fields.end, fields.cut) == (end, "")
    assert tiles(spans, 0, end)
    assert declared.build_descriptor(fields) == declared.DESCRIPTOR.build(parsed) == data[:end]


@pytest.mark.parametrize("data", DESCRIPTORS, ids=[*BARE_CASES, "newer minor"])
def test_readings_agree_on_every_vector(data: bytes) -> None:
    agree(data)


@settings(max_examples=400)
@given(data=descriptors())
def test_readings_agree_on_random_bytes(data: bytes) -> None:
    agree(data)


@given(built=tensors())
def test_readings_agree_on_what_is_written(built: Built) -> None:
    agree(built.tensor.descriptor.encode())


@settings(max_examples=200)
@given(data=descriptors(), cut=st.integers(0, 400))
def test_a_cut_descriptor_shows_the_fields_that_are_there(data: bytes, cut: int) -> None:
    whole = declared.descriptor_spans(data, 0)
    part = data[:cut]
    spans = declared.descriptor_spans(part, 0)
    assert spans == whole[: len(spans)]
    if len(part) >= 20:
        fields = declared.parse_descriptor(part)
        assert fields.end <= len(part)
        assert bool(fields.cut) == (len(part) < len(data))
        assert all(
            a == b for a, b in zip(fields.buffers or (), declared.parse_descriptor(data).buffers or (), strict=False)
        )


@settings(max_examples=200)
@given(data=descriptors(), cut=st.integers(0, 400))
def test_an_error_finds_the_places_of_the_spans(data: bytes, cut: int) -> None:
    for part in (data, data[:cut]):
        spans = declared.descriptor_spans(part)
        places = dict(reversed([(span.path, span.offset) for span in spans]))
        tables = {span.path.partition(".")[0]: span.offset for span in reversed(spans)}
        for path, offset in (tables | places).items():
            assert declared.descriptor_offset(part, path) == offset
        assert declared.descriptor_offset(part, "layout.nothing") is None


@pytest.mark.parametrize("base", [0, 1, 4096, 2**40])
def test_spans_are_absolute(base: int) -> None:
    for data in DESCRIPTORS:
        spans = declared.descriptor_spans(data, base)
        end = declared.parse_descriptor(data).end
        assert tiles(spans, base, end)
        for span in spans:
            piece = data[span.offset - base : span.offset - base + span.length]
            if isinstance(span.value, bytes):
                assert span.value == piece
            elif isinstance(span.value, int):
                assert span.value == int.from_bytes(piece, "little", signed=span.value < 0)
            else:
                assert span.value == struct.unpack("<f" if span.length == 4 else "<d", piece)[0]


@pytest.mark.parametrize("name", TABLES)
@given(data=st.binary(min_size=96, max_size=96))
def test_plans_agree_with_their_tables_on_random_bytes(name: str, data: bytes) -> None:
    table, plan = TABLES[name], Plan(TABLES[name])
    parsed = table.parse(data)
    record = plan.unpack(data)
    assert plan.size == table.sizeof()
    assert [(n, plain(v)) for n, v in zip(plan.names, record, strict=True)] == list(flattened(parsed))
    assert plan.pack(*record) == table.build(parsed) == data[: plan.size]
    assert told(list(plan.spans(data, 0, 0))) == list(flattened(parsed))
    assert tiles(list(plan.spans(data, 0, 7)), 7, plan.size)
    assert [plan.offset_of(field.path) for field in plan.fields] == [s.offset for s in plan.spans(data, 0, 0)]
    assert [plan.packed_size(field.path) for field in plan.fields] == [s.length for s in plan.spans(data, 0, 0)]


@pytest.mark.parametrize("name", FRAME_CASES)
def test_plans_agree_on_every_frame(name: str) -> None:
    data = frame_vector(name)
    prologue = frame.PROLOGUE_PLAN.unpack(data)
    assert tuple(prologue) == PROLOGUE.unpack_from(data)
    assert dict(flattened(frame.PROLOGUE.parse(data))) == prologue._asdict()
    for i, entry in enumerate(entries_of(data)):
        at = PROLOGUE.size + ENTRY.size * i
        record = frame.SECTION_PLAN.unpack(data, at)
        assert record._asdict() == entry
        assert dict(flattened(frame.SECTION.parse(data[at:]))) == entry


def test_sizes_are_those_of_the_specification() -> None:
    sizes = {name: table.sizeof() for name, table in TABLES.items()}
    assert sizes == {
        **{"handle": 16, "statistics": 72, "extension_type": 20, "composite": 16, "head": 20},
        **{"prologue": 40, "section": 48, "checksum": 8},
    }
    assert declared.SHARD.sizeof() == 48
    assert declared.SCHEME_BYTES == SCHEME_SIZES
    assert declared.FRONT_PLAN.size == 85


def test_meanings_name_what_the_wire_names() -> None:
    spans = {span.path: span.meaning for span in declared.descriptor_spans(bare_vector("int8_per_block_sym"), 0)}
    for path, word in {
        **{"type_tag": "int8", "layout_tag": "block_paged", "layout.kv_role": "key", "flags": "quantization"},
        **{"layout.block_table_index_type": "uint32", "buffers[0].device_tag": "cpu"},
        **{"quantization.scheme_tag": "per_block", "quantization.flags": "symmetric"},
        **{"quantization.scale_type": "float32", "buffers[3].sync_mode": "producer_synced"},
    }.items():
        assert word in spans[path], (path, spans[path])
    none = {span.path: span.meaning for span in declared.descriptor_spans(bare_vector("layer_none"), 0)}
    assert "none" in none["layout.layer_index"]


# One declaration a field.


def leaves(table: Any, path: str = "", scheme: int | None = None) -> Iterator[tuple[str, int | None, Any]]:
    """Path, scheme and declaration of every field below a declaration; array indices left out of paths."""
    if isinstance(table, c.Renamed):
        if isinstance(table.subcon, c.Renamed):
            yield from leaves(table.subcon, path, scheme)
            return
        hidden = table.name.startswith("_")
        inner = path if hidden else f"{path}.{table.name}" if path else table.name
        yield from leaves(table.subcon, inner, scheme)
    elif isinstance(table, c.Struct):
        for subcon in table.subcons:
            yield from leaves(subcon, path, scheme)
    elif isinstance(table, c.Array):
        yield from leaves(table.subcon, f"{path}[]", scheme)
    elif isinstance(table, c.IfThenElse):
        yield from leaves(table.thensubcon, path, scheme)
    elif isinstance(table, c.Switch):
        for key, case in table.cases.items():
            yield from leaves(case, path, int(key))
    elif table is not c.Pass:
        yield path, scheme, table


def every_path() -> dict[int | None, set[str]]:
    """The field paths of descriptors with all tables, a set a scheme."""
    found: dict[int | None, set[str]] = {None: set()}
    for scheme, size in SCHEME_SIZES.items():
        quant = bytes([scheme]) + bytes(size - 1 + 2)
        data = desc(flags=31, quant=quant, tail=bytes(48 + 72 + 20 + 16))
        spans = declared.descriptor_spans(data, 0)
        assert tiles(spans, 0, len(data))
        found[scheme] = {re.sub(r"\[\d+\]", "[]", span.path) for span in spans}
    return found


def test_each_field_path_is_declared_once() -> None:
    walked = list(leaves(declared.DESCRIPTOR))
    for scheme, paths in every_path().items():
        counted = Counter(path for path, of, _ in walked if of in (None, scheme))
        assert {path: counted[path] for path in paths} == dict.fromkeys(paths, 1)
    everywhere = set().union(*every_path().values())
    assert {path for path, *_ in walked} == everywhere


def struct_calls() -> Iterator[tuple[str, str, list[str]]]:
    """File, name and the fields declared in place of every `Struct(...)` in `structs`; "" for an unnamed one."""
    for path in sorted(Path(declared.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text())
        named = {
            id(node.value): target.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Struct":
                yield path.name, named.get(id(node), ""), [field for arg in node.args for field in _declares(arg)]


def _declares(argument: ast.expr) -> list[str]:
    """The name in `"name" / subcon`, where the argument is one."""
    while isinstance(argument, ast.BinOp):
        argument = argument.left
    return [argument.value] if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else []


def test_fields_are_declared_in_named_structs_only() -> None:
    """An unnamed struct may put tables together; a field that it declares would stand in a second place."""
    calls = list(struct_calls())
    assert len(calls) >= 15
    assert [(file, fields) for file, name, fields in calls if not name and fields] == []


def test_no_field_is_declared_twice_in_one_struct() -> None:
    for file, name, fields in struct_calls():
        assert len(fields) == len(set(fields)), (file, name)


def test_the_declarations_hold_every_field_of_every_path() -> None:
    """Each last component of a path is declared somewhere, and nothing is declared that no path shows."""
    paths = set().union(*every_path().values())
    shown = {part for path in paths for part in re.split(r"\.|\[\]", path) if part}
    in_place = {field for file, _, fields in struct_calls() if file == "descriptor.py" for field in fields}
    assert {field for field in in_place if not field.startswith("_")} == shown
