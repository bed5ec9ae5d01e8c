"""The golden corpus: every case through every decoder, and what each of them says is what the manifest says.

The package, `tools/refdecode.py` (standard library, written from the prose), and for bare items the reference itself,
live in a process of its own. Nothing here writes a fixture.
"""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from support import ROOT

import hurray_wire as hw
from hurray_wire.testing import Corpus, report
from hurray_wire.testing.encoding import encode_case, request
from hurray_wire.testing.runner import OK, judge

import refdecode  # isort: skip - a tool, found by the path that `support` sets

CORPUS = Corpus.load()
CASES = {case.name: case for case in CORPUS}
ACCEPTED = [name for name, case in CASES.items() if case.verdict == "accept"]
REFUSED = [name for name, case in CASES.items() if case.verdict == "reject"]
PLAIN = ("accept", "reject")


def test_the_corpus_is_what_would_be_made_today() -> None:
    command = [sys.executable, str(ROOT / "tools" / "make_fixtures.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wrong = [line for line in done.stdout.splitlines() if not line.startswith("ok ")]
    assert done.returncode == 0, f"{wrong} {done.stderr}"


def test_there_are_cases_of_every_kind() -> None:
    assert len(ACCEPTED) >= 150
    assert len(REFUSED) >= 200
    assert {case.form for case in CORPUS} == {"bare", "hrkv", "none"}
    assert {case.origin.partition("/")[0] for case in CORPUS} == {
        "pyhurray 0.1.0",
        "an independent encoder, from the specification",
        "source",
    }


def test_every_file_of_the_corpus_is_small_and_in_the_manifest() -> None:
    for folder in PLAIN:
        files = {path for path in (CORPUS.root / folder).iterdir() if path.is_file()}
        assert files == {case.path for case in CORPUS if case.path.parent.name == folder}
        assert max(path.stat().st_size for path in files) <= 8192


@pytest.mark.parametrize("name", CASES)
def test_the_file_is_the_one_in_the_manifest(name: str) -> None:
    assert CASES[name].data() is not None  # raises where it is another


@pytest.mark.parametrize("name", CASES)
def test_the_package_agrees(name: str) -> None:
    case = CASES[name]
    assert judge(case, report(case.data(), case.options)) == (OK, "")


@pytest.mark.parametrize("name", CASES)
def test_the_independent_decoder_agrees(name: str) -> None:
    case = CASES[name]
    state, message = judge(case, refdecode.report(case.data(), case.options))
    if case.implementation_limit:
        assert state == "skipped"
    else:
        assert (state, message) == (OK, "")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_without_the_payload_verified_or_viewed(name: str) -> None:
    """Only what stage 8 says of the payload may be missed, and only where it was asked for."""
    case = CASES[name]
    if case.is_stream:
        pytest.skip("a reader of one item")
    options = {key: value for key, value in case.options.items() if key != "limits"}
    if "limits" in case.options:
        options["limits"] = hw.Limits(**case.options["limits"])
    assert case.error is not None
    missed = case.error["code"] == "section_checksum" and case.error["where"] in ("sections[2]", "sections[3]")
    several: tuple[dict[str, Any], ...] = ({"verify": False}, {"copy": True}, {"threads": 2})
    for extra in several:
        kind = refusal(case.data(), **options, **extra)
        assert kind == case.error["error_class"] or (missed and "verify" in extra and kind == "")


def refusal(data: bytes, **options: Any) -> str:
    """The class of the error, or "" for none."""
    try:
        hw.decode(data, **options)
    except hw.HurrayWireError as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.encode is not None])
def test_a_writer_gives_the_same_bytes(name: str) -> None:
    case = CASES[name]
    assert encode_case(request(case)) == case.data()


def test_writing_is_asked_of_both_forms() -> None:
    framings = [case.encode["framing"] for case in CORPUS if case.encode is not None]
    assert framings.count("bare") >= 100
    assert framings.count("hrkv") >= 8


# Values, without bytes.


def wide(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else value


def called(entry: dict[str, Any]) -> Any:
    """The call of a case of values, on the package."""
    told = {name: wide(value) for name, value in entry["arguments"].items()}
    if entry["call"] == "validate_index_buffers":
        seq_ptr, block_table = told.pop("seq_ptr"), told.pop("block_table")
        hw.BlockPagedLayout(paged_axis=0, **told).validate_index_buffers(seq_ptr, block_table)
        return None
    if entry["call"] == "layout":
        hw.BlockPagedLayout(paged_axis=0, **told)
        return None
    if entry["call"] == "element_offset":
        coordinates = [told.pop(name) for name in ("seq", "token", "head", "dim")]
        return str(int(hw.element_offset(*coordinates, **told)))
    tensor = hw.decode(CASES[told["case"]].data())
    if "seq_lens" in told:
        tensor = tensor.replace(seq_lens=told["seq_lens"])
    values = tensor.dequantize(told["seq"])
    return struct.pack(">d", float(values[told["token"], told["head"], told["dim"]])).hex()


@pytest.mark.parametrize("entry", CORPUS.values, ids=lambda entry: entry["name"])
def test_values(entry: dict[str, Any]) -> None:
    if "error" not in entry:
        assert called(entry) == entry.get("result")
        return
    with pytest.raises(hw.HurrayWireError) as caught:
        called(entry)
    error = caught.value
    told = {"error_class": type(error).__name__, "code": str(error.code), "where": error.where}
    assert told == entry["error"]


# The reference, live.

REFERENCE = [case.name for case in CORPUS if case.reference is not None]


@cache
def reference_answers() -> dict[str, dict[str, Any]]:
    """What the reference's reader says of every bare case: one process for all, as it may abort."""
    if importlib.util.find_spec("hurray") is None:
        pytest.skip("pyhurray is not installed")
    command = [sys.executable, str(ROOT / "tools" / "reference_cases.py"), "read"]
    lines = "".join(CASES[name].data().hex() + "\n" for name in REFERENCE)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(REFERENCE), f"it ended at {REFERENCE[len(answers)]}: {done.stderr[-500:]}"
    return dict(zip(REFERENCE, answers, strict=True))


@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_says_what_the_manifest_says_it_says(name: str) -> None:
    case, answer = CASES[name], reference_answers()[name]
    assert case.reference is not None
    assert answer["verdict"] == case.reference["verdict"]
    if case.verdict != answer["verdict"]:
        assert case.reference["why"], "it differs, and the case does not say why"
    if case.verdict == answer["verdict"] == "accept":
        expected = case.expected or {}
        items = expected.get("items", [expected])
        assert len(answer["items"]) == len(items)
        for item, found in zip(items, answer["items"], strict=True):
            assert (found["type_tag"], found["shape"]) == (item["type_tag"], item["shape"])
            layout = found["layout"]
            for ours in ("page_size", "num_pages", "num_seqs", "kv_role", "layer_index"):
                assert layout[ours] == item[ours]
            assert layout["block_table_index_type"] == item["index_type"]


@pytest.mark.parametrize("name", [n for n in REFERENCE if CASES[n].verdict == "accept"])
def test_the_reference_writes_accepted_items_as_they_are(name: str) -> None:
    case, answer = CASES[name], reference_answers()[name]
    if case.covers & {"descriptor-trailing-bytes", "statistics-left-out"}:
        assert not case.canonical  # nor do we
    elif answer["verdict"] == "accept":
        assert "".join(item["blob"] for item in answer["items"]) == case.data().hex()
