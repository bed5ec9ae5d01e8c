"""What hurray-dump prints is what people agreed to see; `tools/make_dump_goldens.py` writes it, this only looks."""

from __future__ import annotations

from pathlib import Path

import pytest
from dump_corpus import GOLDENS, Golden, goldens, run_child, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dump")
    write(path)
    return path


@pytest.mark.parametrize("golden", goldens(), ids=lambda golden: golden.name)
def test_output(golden: Golden, folder: Path) -> None:
    assert golden.text(folder) == golden.path.read_text(encoding="utf-8")


def test_there_is_no_other_golden_output() -> None:
    assert {path.name for path in GOLDENS.glob("*")} == {golden.path.name for golden in goldens()}


def test_a_process_of_its_own_prints_the_same(folder: Path) -> None:
    golden = next(g for g in goldens() if g.name == "several-files")
    found = run_child(golden.arguments, folder)
    told = f"$ hurray-dump {' '.join(golden.arguments)}\n{found.out}--- standard error\n{found.err}"
    assert f"{told}--- exit {found.status}\n" == golden.path.read_text(encoding="utf-8")


def test_lines_keep_to_the_width(folder: Path) -> None:
    for golden in goldens():
        if golden.arguments[0] != "--json" and "--json" not in golden.arguments:
            printed = golden.text(folder).partition("--- standard error")[0].splitlines()[1:]
            assert max(map(len, printed), default=0) <= golden.width, golden.name
