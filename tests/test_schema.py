"""`schema/` and the package say the same: field names, order, sizes; error codes; the manifest's own form.

The Kaitai parsers are compiled by `tools/kaitai.py`; where they are not there those tests are skipped, and say so.
"""

from __future__ import annotations

import importlib
import json
import re
import struct
import sys
from functools import cache
from types import ModuleType
from typing import Any

import construct
import pytest
from support import ROOT
from test_conformance import CASES, CORPUS

import hurray_wire as hw
from hurray_wire.dtypes import by_tag
from hurray_wire.errors import Code
from hurray_wire.structs import descriptor as d
from hurray_wire.structs import frame as f
from hurray_wire.structs.fused import Plan
from hurray_wire.tags import TypeTag

import kaitai  # isort: skip - a tool, found by the path that `support` sets

SCHEMA = ROOT / "schema"
PROSE = (SCHEMA / "hrkv.md").read_text()
Row = tuple[int, int, str]

FRONT = construct.Container(rank=3)
TABLES: dict[str, Plan] = {
    "front": Plan(d.FRONT, FRONT),
    "handle": Plan(d.HANDLE),
    "quantization": Plan(d.SCHEME_START),
    "per_tensor": Plan(d.PER_TENSOR),
    "per_channel": Plan(d.PER_CHANNEL),
    "per_block": Plan(d.PER_BLOCK),
    "float_block": Plan(d.FLOAT_BLOCK),
    "shard": Plan(d.SHARD),
    "statistics": Plan(d.STATISTICS),
    "extension_type": Plan(d.EXTENSION_TYPE),
    "composite": Plan(d.COMPOSITE),
    "prologue": Plan(f.PROLOGUE),
    "section": Plan(f.SECTION),
    "header_checksum": Plan(f.CHECKSUM),
}


def declared(plan: Plan) -> list[Row]:
    """Offset, size and name of every field of a table; an array counts as one."""
    rows: list[Row] = []
    at = 0
    for field in plan.fields:
        size, name = struct.calcsize("<" + field.code), re.sub(r"\[\d+\]$", "", field.path)
        if rows and rows[-1][2] == name:
            rows[-1] = (rows[-1][0], rows[-1][1] + size, name)
        else:
            rows.append((at, size, name))
        at += size
    return rows


# The prose.


def told(name: str) -> tuple[int, list[Row]]:
    """A table of the prose: the bytes that its heading states, and its rows."""
    found = re.search(rf"[Tt]able \*\*{name}\*\*, (\d+) bytes.*?\n\n(\|.*?)\n\n", PROSE, re.DOTALL)
    assert found, name
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[2].splitlines()[2:]]
    return int(found[1]), [(int(row[0]), int(row[1]), row[2].strip("`")) for row in rows]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_the_prose_is_the_declared_one(name: str) -> None:
    size, rows = told(name)
    assert rows == declared(TABLES[name])
    assert size == TABLES[name].size == sum(row[1] for row in rows)


def test_every_declared_table_is_in_the_prose() -> None:
    assert set(re.findall(r"[Tt]able \*\*(\w+)\*\*", PROSE)) == set(TABLES)
    structs = {name for module in (d, f) for name, value in vars(module).items() if isinstance(value, construct.Struct)}
    whole = {"HEAD", "GEOMETRY", "BLOCK_PAGED", "SCHEME_HEAD", "QUANTIZATION", "TAIL", "DESCRIPTOR"}  # parts and sums
    names = {"CHECKSUM": "header_checksum", "SCHEME_START": "quantization"}
    assert {names.get(name, name.lower()) for name in structs - whole} == set(TABLES)


def test_every_rule_has_words() -> None:
    for line in PROSE.splitlines():
        if re.match(r"\| \d+ \| \d+ \| `", line):
            assert len(line.strip("|").split("|")) == 4
            assert line.strip("|").split("|")[3].strip()


def test_the_element_types_of_the_prose_are_the_package_s() -> None:
    rows = re.findall(r"`0x([0-9A-F]{2})` \| (\w+) \| (\d+)", PROSE)
    found = {(int(tag, 16), name, int(bits)) for tag, name, bits in rows}
    types = [by_tag(int(tag)) for tag in TypeTag]
    assert found == {(t.tag, t.name, t.bit_width) for t in types if t is not None}


def test_the_prose_is_numbered_as_the_package_cites_it() -> None:
    headings = re.findall(r"^## (\d)\. (.*)$", PROSE, re.MULTILINE)
    assert [number for number, _ in headings] == ["1", "2", "3", "4"]
    assert re.search(r"RFC 2119", PROSE)


def test_limits_by_default_are_those_of_the_prose() -> None:
    limits = hw.DEFAULT_LIMITS
    assert (limits.descriptor_bytes, limits.metadata_bytes, limits.sections) == (64 << 10, 1 << 20, 65535)
    assert (limits.frame_bytes, limits.decoded_bytes) == (64 << 30, 64 << 30)
    assert (limits.stream_bytes, limits.frames) == (None, None)
    assert "64 KiB of descriptor, 1 MiB of metadata, 65535 sections, 64 GiB" in re.sub(r"\s+", " ", PROSE)


# Error codes.


def test_the_table_of_codes_is_the_enum() -> None:
    text = (SCHEMA / "codes.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| (.+?) \|", text, re.MULTILINE)
    assert sorted(code for code, _ in listed) == sorted(map(str, Code))
    classes = re.findall(r"^## (\w+)$", text, re.MULTILINE)
    for name in classes:
        assert issubclass(getattr(hw, name), hw.HurrayWireError)
    told_of = {case.error["error_class"] for case in CORPUS if case.error}
    assert told_of | {"StoreError"} == set(classes), "no bytes provoke a store's error"


def test_a_code_stands_under_the_class_that_carries_it() -> None:
    text = (SCHEMA / "codes.md").read_text()
    parts = re.split(r"^## (\w+)$", text, flags=re.MULTILINE)
    homes = {
        code: name
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
        for code in re.findall(r"^\| `(\w+)`", body, re.MULTILINE)
    }
    for case in CORPUS:
        if case.error:
            other = (case.error["code"], case.error["error_class"])
            assert homes[other[0]] == other[1] or other in {
                ("descriptor_length", "FrameError"),
                ("shape", "UnsupportedError"),
            }


# The manifest against its JSON Schema: the part of the language that it uses.


def faults(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "$") -> list[str]:
    """Where a value is not as a schema says."""
    if "$ref" in schema:
        return faults(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, at)
    if "anyOf" in schema:
        tries = [faults(value, option, root, at) for option in schema["anyOf"]]
        return [] if not all(tries) else [f"{at}: none of several: {min(tries, key=len)}"]
    if "const" in schema and value != schema["const"]:
        return [f"{at}: is {value!r}, must be {schema['const']!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{at}: is {value!r}, must be one of {schema['enum']}"]
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}
    kind = schema.get("type")
    if kind and (not isinstance(value, kinds[kind]) or (kind == "integer" and isinstance(value, bool))):
        return [f"{at}: is {value!r:.80}, must be of type {kind}"]
    found = (
        [f"{at}: {value!r} does not fit {schema['pattern']}"]
        if "pattern" in schema and not re.search(schema["pattern"], value)
        else []
    )
    if isinstance(value, dict):
        found += _object_faults(value, schema, root, at)
    elif isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            found.append(f"{at}: has {len(value)} items")
        for i, item in enumerate(value):
            found += faults(item, schema.get("items", {}), root, f"{at}[{i}]")
    elif isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        found.append(f"{at}: {value} is out of range")
    return found


def _object_faults(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], at: str) -> list[str]:
    properties = schema.get("properties", {})
    found = [f"{at}: lacks {name}" for name in schema.get("required", ()) if name not in value]
    for name, item in value.items():
        if name in properties:
            found += faults(item, properties[name], root, f"{at}.{name}")
        elif schema.get("additionalProperties") is False:
            found.append(f"{at}: has {name}, which it may not")
    return found


@cache
def manifest_schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((SCHEMA / "manifest.schema.json").read_text())
    return schema


def test_the_manifest_fits_its_schema() -> None:
    manifest = json.loads((CORPUS.root / "manifest.json").read_text())
    assert faults(manifest, manifest_schema(), manifest_schema()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "maybe"},
        {"bytes": -1},
        {"bytes": True},
        {"sha256": "00"},
        {"more": 1},
        {"covers": "dtype:int8"},
        {"covers": ["Dtype:int8"]},
        {"error": {"code": "rank"}},
    ],
    ids=str,
)
def test_the_validator_finds_what_does_not_fit(change: dict[str, Any]) -> None:
    manifest = json.loads((CORPUS.root / "manifest.json").read_text())
    case = {**manifest["cases"][0], **change}
    assert faults({**manifest, "cases": [case]}, manifest_schema(), manifest_schema())


def test_a_full_validator_agrees() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads((CORPUS.root / "manifest.json").read_text()), manifest_schema())


# Kaitai: the definitions as text, then the compiled parsers on every accepted case.

_SIZES = {"u1": 1, "u2": 2, "u4": 4, "u8": 8, "s4": 4, "f4": 4, "f8": 8}


def ksy_types(name: str) -> dict[str, list[dict[str, str]]]:
    """The fields of every type of a definition, each with its keys: the few lines of YAML that these files use."""
    types: dict[str, list[dict[str, str]]] = {}
    current: list[dict[str, str]] | None = None
    for line in (SCHEMA / f"{name}.ksy").read_text().splitlines():
        if found := re.fullmatch(r"  (\w+):", line):
            current = types.setdefault(found[1], [])
        elif re.match(r"    (params|instances):", line):
            current = None
        elif re.match(r"    seq:", line):
            current = next(reversed(types.values()))
        elif current is not None and (found := re.fullmatch(r"(      - |        )([\w-]+): ?(.*)", line)):
            if found[1].strip() == "-":
                current.append({})
            current[-1][found[2]] = found[3]
    return types


def ksy_size(field: dict[str, str]) -> int:
    if "contents" in field:
        return 4 if field["contents"] == "HRRY" else len(field["contents"].split(","))
    count = int(field.get("repeat-expr", "1"))
    return count * (_SIZES[field["type"]] if "type" in field else int(field["size"]))


def ksy_rows(name: str, fields: list[dict[str, str]]) -> list[Row]:
    rows: list[Row] = []
    at = 0
    for field in fields:
        rows.append((at, ksy_size(field), field["id"]))
        at += rows[-1][1]
    return rows


@pytest.mark.parametrize("name", [name for name in TABLES if name not in ("front", "quantization")])
def test_a_type_of_the_ksy_is_the_declared_table(name: str) -> None:
    types = {**ksy_types("hurray"), **ksy_types("hrkv")}
    assert ksy_rows(name, types[name]) == declared(TABLES[name])


def test_the_descriptor_of_the_ksy_is_the_declared_one() -> None:
    types = ksy_types("hurray")
    layout, scheme = types["block_paged"], types["scheme"]
    assert ksy_rows("block_paged", layout) == declared(Plan(d.BLOCK_PAGED))
    assert ksy_rows("scheme", scheme[:3]) == declared(Plan(d.SCHEME_HEAD))
    names = [field["id"] for field in types["descriptor"]]
    assert names == [subcon.name for subcon in d.DESCRIPTOR.subcons] + ["of_a_newer_minor"]
    front = names.index("layout")
    fixed = [row for row in declared(TABLES["front"]) if not row[2].startswith("layout.") and row[2] != "buffer_count"]
    assert ksy_rows("descriptor", types["descriptor"][:front]) == fixed
    assert types["quantization"][0] == {"id": "length", "type": "u4"}


@cache
def parsers() -> tuple[ModuleType, ModuleType]:
    """The compiled parsers of both forms."""
    if not kaitai.STAMP.is_file():
        pytest.skip("no compiled Kaitai parsers: `python tools/kaitai.py` makes them (needs npm)")
    assert kaitai.is_current(), "build/kaitai is of other definitions: run `python tools/kaitai.py`"
    sys.path[:0] = [str(kaitai.RUNTIME), str(kaitai.PARSERS)]
    return importlib.import_module("hurray"), importlib.import_module("hrkv")


ACCEPTED = [name for name, case in CASES.items() if case.verdict == "accept" and not case.is_stream]


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_generated_parser_reads_the_same_fields(name: str) -> None:
    bare, framed = parsers()
    case = CASES[name]
    data = case.data()
    if case.form == "bare":
        item = bare.Hurray.from_bytes(data)
        assert [len(buffer.bytes) for buffer in item.buffers] == [
            handle.byte_size for handle in item.descriptor.buffers
        ]
        assert_descriptor(item.descriptor, data[: item.descriptor_length])
        return
    frame = framed.Hrkv.from_bytes(data)
    assert_record(frame.prologue, f.PROLOGUE_PLAN, data, 0)
    for index, section in enumerate(frame.sections):
        assert_record(section, f.SECTION_PLAN, data, f.PROLOGUE_PLAN.size + index * f.SECTION_PLAN.size)
        assert section.stored == data[section.offset : section.offset + section.stored_length]
    assert frame.header_checksum.header_checksum == int.from_bytes(
        data[frame.prologue.header_length - 8 :][:8], "little"
    )
    assert_descriptor(frame.descriptor, frame.sections[0].stored)


def assert_record(found: Any, plan: Plan, data: bytes, at: int) -> None:
    """Every field of a table is what the package's declaration finds there."""
    for name, value in zip(plan.names, plan.unpack(data, at), strict=True):
        told = getattr(found, name)
        assert told == value or (told != told and value != value), name


def assert_descriptor(found: Any, data: bytes) -> None:
    """Every field that the package lists of a descriptor stands in the parsed one under the same path."""
    for span in d.descriptor_spans(data):
        value: Any = found
        path = span.path
        if path.startswith("quantization.") and path != "quantization.length":
            path = path.replace("quantization.", "quantization.scheme.")
            if path.rpartition(".")[2] not in ("scheme_tag", "scheme_version", "flags", "padding"):
                path = path.replace("scheme.", "scheme.parameters.")
        for name, index in re.findall(r"(\w+)(?:\[(\d+)\])?", path):
            value = getattr(value, name)
            value = value[int(index)] if index else value
        assert value == span.value or (value != value and span.value != span.value), span.path
