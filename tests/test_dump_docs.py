"""The documentation of hurray-dump shows what it prints: every block is a part of the real output."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dump_corpus import ROOT, broken, run_here, write

from hurray_wire.dump.arguments import parser

PAGE = (ROOT / "docs" / "hurray-dump.md").read_text(encoding="utf-8")
BLOCKS = [block.splitlines() for block in re.findall(r"```text\n\$ hurray-dump (.*?)\n```", PAGE, re.DOTALL)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("docs")
    write(path)
    return path


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block[0])
def test_a_block_is_real_output(block: list[str], folder: Path) -> None:
    found = run_here(block[0].split(), folder)
    printed = (found.out + found.err).splitlines()
    at = 0
    for line in block[1:]:
        if line == "...":
            continue
        assert line in printed[at:], line
        at += printed[at:].index(line) + 1


def test_the_ten_lines(folder: Path) -> None:
    for name in broken():
        assert run_here([name], folder).err in PAGE


def test_every_option_is_described() -> None:
    options = {string for action in parser()._actions for string in action.option_strings if string.startswith("--")}
    assert {option for option in options if option not in PAGE} == {"--help", "--version"}


def test_the_picture_is_there() -> None:
    assert (ROOT / "docs" / "hurray-dump.svg").read_text(encoding="utf-8").startswith("<svg")
