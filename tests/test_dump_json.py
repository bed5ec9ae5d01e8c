"""`--json` keeps to `schema/hurray-dump.schema.json`, whatever the file; a validator of what that schema uses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from dump_corpus import ROOT, corpus, run_here, write

SCHEMA = json.loads((ROOT / "schema" / "hurray-dump.schema.json").read_text())
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
}
KEYWORDS = {
    *("$schema", "title", "description", "$defs", "$ref", "type", "const", "enum", "pattern", "minimum", "maximum"),
    *("required", "properties", "additionalProperties", "items", "minItems", "maxItems", "anyOf", "oneOf"),
}


def errors(value: Any, schema: dict[str, Any], path: str = "$") -> list[str]:
    """What of JSON Schema 2020-12 the schema uses; a keyword that is not known here fails."""
    assert schema.keys() <= KEYWORDS, schema.keys() - KEYWORDS
    found = []
    if "$ref" in schema:
        found += errors(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")], path)
    kinds = schema.get("type", [])
    if kinds and not any(_is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        found.append(f"{path}: {value!r} is no {kinds}")
    if "const" in schema and value != schema["const"]:
        found.append(f"{path}: {value!r}")
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{path}: {value!r} is none of {schema['enum']}")
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        found.append(f"{path}: {value!r} does not match {schema['pattern']}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        found += (
            [f"{path}: {value}"] if not schema.get("minimum", value) <= value <= schema.get("maximum", value) else []
        )
    if isinstance(value, dict):
        found += _members(value, schema, path)
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            found.append(f"{path}: {len(value)} items")
        found += [e for i, v in enumerate(value) for e in errors(v, schema.get("items", {}), f"{path}[{i}]")]
    for name, wanted in (("anyOf", range(1, 99)), ("oneOf", range(1, 2))):
        if name in schema and sum(not errors(value, one, path) for one in schema[name]) not in wanted:
            found.append(f"{path}: {name}")
    return found


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _members(value: dict[str, Any], schema: dict[str, Any], path: str) -> list[str]:
    found = [f"{path}: no {name}" for name in schema.get("required", []) if name not in value]
    others = schema.get("additionalProperties", {})
    for name, member in value.items():
        if name in schema.get("properties", {}):
            found += errors(member, schema["properties"][name], f"{path}.{name}")
        elif others is False:
            found.append(f"{path}: {name} is unexpected")
        else:
            found += errors(member, others, f"{path}.{name}")
    return found


def test_the_validator_refuses() -> None:
    good = {"hurray_dump": 1, "version": "0", "files": []}
    assert not errors(good, SCHEMA)
    for bad in (
        {**good, "x": 1},
        {**good, "diff": []},
        {"hurray_dump": 2, "version": "0", "files": []},
        {**good, "files": 3},
    ):
        assert errors(bad, SCHEMA)


@pytest.mark.parametrize(
    "options", [[], ["--hex", "--seqs", "--map", "--stats", "--verify"], ["--resync", "--frame", "0"]]
)
def test_every_file_of_the_corpus(options: list[str], tmp_path: Path) -> None:
    write(tmp_path)
    for name in corpus():
        found = run_here(["--json", *options, name], tmp_path)
        document = json.loads(found.out)
        assert errors(document, SCHEMA) == [], name
        assert document["files"][0]["sound"] == (found.status == 0)


def test_files_and_pairs(tmp_path: Path) -> None:
    write(tmp_path)
    found = run_here(["--json", "worked.hrkv", "absent", "empty.hrkv"], tmp_path)
    document = json.loads(found.out)
    assert (found.status, errors(document, SCHEMA)) == (2, [])
    assert [file["error"] for file in document["files"]] == [None, "No such file or directory", None]
    for pair in (
        ("batch.hrkv", "batch-live.hrkv"),
        ("stream.hrkv", "missing-frame.hrkv"),
        ("worked.hrkv", "hole.hrkv"),
    ):
        found = run_here(["--json", "--diff", *pair], tmp_path)
        assert errors(json.loads(found.out), SCHEMA) == []
        assert found.status == 1


def test_the_schema_describes_itself_in_terms_that_exist() -> None:
    text = json.dumps(SCHEMA)
    assert set(re.findall(r"#/\$defs/(\w+)", text)) == set(SCHEMA["$defs"])
