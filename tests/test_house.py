"""The package's own rules: who may import whom, who alone may import what, and what never stands anywhere."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import ROOT

import hurray_wire as hw

PACKAGE = ROOT / "hurray_wire"

# Data flows down the rows: a room imports only from rows above its own. A package (`structs`, `ops`, ...) is one room.
ROWS: dict[str, int] = {
    row: number
    for number, rooms in enumerate(
        (
            ("errors", "tags", "version"),
            ("structs", "dtypes", "indices", "metadata", "forms", "compression"),
            ("arrays", "rules", "sections"),
            ("quantization", "pages", "tables"),
            ("layout", "schemes", "dequantization"),
            ("descriptor",),
            ("assembly", "options"),
            ("tensor", "memory"),
            ("payload",),
            ("familiar",),
            ("bare", "frame_writer", "frame_reader"),
            ("ops", "order", "inspection", "receiving"),
            ("codec", "engines"),
            ("stream",),
            ("transports",),
            ("dump", "testing", "integrations"),
        )
    )
    for row in rooms
}
FORMS = ("bare", "frame_writer", "frame_reader")
ONLY_IN: dict[str, set[str]] = {
    "construct": {"structs.descriptor", "structs.frame", "structs.fused"},
    "zstandard": {"compression"},
    "xxhash": {
        "sections",
        "familiar",
        "frame_reader",
        "frame_writer",
        "stream.incoming",
        "dump.payload_walk",
        "integrations.sealed",
    },
    "asyncio": {"stream.aio"},
}
PRINTERS = ("dump", "testing")
NO_IO = {"socket", "select", "selectors", "asyncio", "mmap", "io", "ssl", "fcntl", "tempfile", "subprocess", "shutil"}
NEVER = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "ctypes", "cffi"}
NEVER_CALLED = {"eval", "exec", "compile", "__import__"}


def modules() -> dict[str, ast.Module]:
    """Dotted name below the package, and tree, of every module."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


MODULES = modules()


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, anywhere in the tree, by its absolute name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_of(name: str) -> set[str]:
    """The rooms that a module imports from, its own left out."""
    own = name.split(".")[0]
    rooms = {target.split(".")[1] for target in imported(MODULES[name]) if target.startswith("hurray_wire.")}
    return rooms - {own}


def calls(tree: ast.AST) -> Iterator[str]:
    """What is called, dotted as it is written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


INNER = [name for name in MODULES if name != "__init__"]


@pytest.mark.parametrize("name", INNER)
def test_a_room_imports_only_from_rows_above(name: str) -> None:
    own = name.split(".")[0]
    assert own in ROWS, f"{own} needs a row"
    rooms = rooms_of(name)
    assert rooms <= set(ROWS)
    assert {room for room in rooms if ROWS[room] >= ROWS[own]} == set()
    front = {"hurray_wire"} & set(imported(MODULES[name]))
    assert not front or own == "testing", "a room does not import the package's front"


def test_every_row_is_a_room() -> None:
    assert set(ROWS) == {name.split(".")[0] for name in INNER}


def test_the_lowest_rooms_know_what_they_are_said_to_know() -> None:
    assert rooms_of("errors") == rooms_of("tags") == rooms_of("version") == set()
    assert rooms_of("indices") == rooms_of("metadata") == rooms_of("compression") == {"errors"}
    assert rooms_of("structs.fused") == set()
    assert {room for name in INNER if name.startswith("structs") for room in rooms_of(name)} == {"tags"}


def test_the_forms_know_nothing_of_each_other() -> None:
    for form in FORMS:
        assert rooms_of(form) & set(FORMS) == set()


@pytest.mark.parametrize("library", ONLY_IN)
def test_single_importers(library: str) -> None:
    importers = {name for name in MODULES if library in {target.split(".")[0] for target in imported(MODULES[name])}}
    assert importers == ONLY_IN[library]


@pytest.mark.parametrize("name", MODULES)
def test_nothing_is_unpickled_evaluated_or_linked(name: str) -> None:
    tree = MODULES[name]
    assert {target.split(".")[0] for target in imported(tree)} & NEVER == set()
    found = set(calls(tree))
    assert found & NEVER_CALLED == set()
    assert {call for call in found if call.endswith(("loads", "unpackb"))} <= {"json.loads"}
    assert found & {"np.load", "numpy.load", "torch.load", "yaml.load", "np.fromfile", "np.genfromtxt"} == set()
    keywords = {keyword.arg for node in ast.walk(tree) if isinstance(node, ast.Call) for keyword in node.keywords}
    assert "allow_pickle" not in keywords


@pytest.mark.parametrize("name", MODULES)
def test_no_wildcards_and_a_docstring(name: str) -> None:
    assert not [target for target in imported(MODULES[name]) if target.endswith(".*")]
    told = ast.get_docstring(MODULES[name])
    assert told
    assert len(told) > 20


@pytest.mark.parametrize("name", [name for name in MODULES if name.split(".")[0] not in PRINTERS])
def test_nothing_prints_below_the_command_line(name: str) -> None:
    found = set(calls(MODULES[name]))
    assert not found & {"print", "input", "sys.stdout.write", "sys.stderr.write", "warnings.warn"}
    assert not any(call.startswith(("logging.", "logger.")) for call in found)


@pytest.mark.parametrize("name", [name for name in INNER if ROWS.get(name.split(".")[0], 99) < ROWS["stream"]])
def test_no_io_below_the_streams(name: str) -> None:
    tree = MODULES[name]
    assert {target.split(".")[0] for target in imported(tree)} & NO_IO == set()
    assert {
        call for call in calls(tree) if re.search(r"(^|\.)(open|read_bytes|write_bytes|read_text|recv|send)$", call)
    } == set()


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, hurray_wire; print(*sorted({'torch', 'rich', 'asyncio', 'transformers'} & set(sys.modules)))"
    path = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=path, check=True
    )
    assert (done.stdout.strip(), done.stderr) == ("", "")


# What is public is documented, and its examples run.


def exports() -> Iterator[tuple[str, str, Any]]:
    """Room, name and object of every public callable."""
    for room in ("", "ops", "engines", "transports"):
        module = importlib.import_module(f"hurray_wire.{room}".rstrip("."))
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing) or inspect.isroutine(thing):
                yield room, name, thing


EXPORTS = {f"{room}.{name}".lstrip("."): thing for room, name, thing in exports()}
RECORDS = {"Code", "Difference", "Span", "Violation"}


def needs_example(name: str, thing: Any) -> bool:
    return not (inspect.isclass(thing) and issubclass(thing, Exception)) and name not in RECORDS


@pytest.mark.parametrize("name", EXPORTS)
def test_public_names_are_documented(name: str) -> None:
    thing = EXPORTS[name]
    told = inspect.getdoc(thing) or ""
    assert len(told) > 20
    if needs_example(name, thing):
        assert ">>> " in told, f"{name} has no example"
    if inspect.isclass(thing):
        for method, value in vars(thing).items():
            if not method.startswith("_") and (
                callable(value) or isinstance(value, property | classmethod | staticmethod)
            ):
                inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                assert (inner.__doc__ or "").strip(), f"{name}.{method} has no docstring"


def test_what_is_exported_is_there() -> None:
    assert len(set(hw.__all__)) == len(hw.__all__)
    assert {name for name in hw.__all__ if not hasattr(hw, name)} == set()
    assert len(EXPORTS) > 40


def every_module() -> list[str]:
    names = [info.name for info in pkgutil.walk_packages([str(PACKAGE)], "hurray_wire.")]
    return ["hurray_wire", *(name for name in names if not name.endswith("__main__"))]


def missing(source: str) -> list[str]:
    """Optional libraries that a piece of code asks for and that are not installed."""
    optional = ("torch", "transformers", "fsspec")
    return [name for name in optional if name in source and importlib.util.find_spec(name) is None]


def optional_module(name: str) -> ModuleType:
    """A module; where it is an integration of something that is not installed, the test is skipped."""
    try:
        with warnings.catch_warnings():
            if name.startswith("hurray_wire.integrations."):
                warnings.simplefilter("ignore")  # what others warn of while they are imported is theirs
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith("hurray_wire.integrations.") or (error.name or "").startswith("hurray_wire"):
            raise
        pytest.skip(f"{error.name} is not installed")


@pytest.mark.parametrize("name", every_module())
def test_docstring_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = optional_module(name)
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        if not missing("".join(example.source for example in test.examples)):
            runner.run(test, out=lambda text: pytest.fail(text))
    assert runner.summarize(verbose=False).failed == 0


def readme_blocks() -> list[str]:
    readme = ROOT / "README.md"
    return re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL) if readme.exists() else []


@pytest.mark.parametrize("block", readme_blocks(), ids=lambda block: repr(block[:30]))
def test_readme_examples_run(block: str, tmp_path: Path) -> None:
    if missing(block):
        pytest.skip("needs a library that is not installed")
    path = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", block]
    done = subprocess.run(command, capture_output=True, text=True, env=path, cwd=tmp_path, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
