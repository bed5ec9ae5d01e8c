"""`ATTACKS.md` says what is so: every attack on it has a test that is there, every attack of `attacks.py` is on it."""

from __future__ import annotations

import ast
from typing import NamedTuple

import pytest
from attacks import ATTACKS
from support import ROOT

PAGE = ROOT / "tests" / "ATTACKS.md"


class Row(NamedTuple):
    """One line of the page."""

    number: int
    name: str
    outcome: str
    test: str


def rows() -> list[Row]:
    """The table."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0].isdigit():
            found.append(Row(int(cells[0]), cells[1], cells[2], cells[3].strip("`")))
    return found


def functions_of(name: str) -> set[str]:
    """The test functions of a file."""
    tree = ast.parse((ROOT / "tests" / name).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_attacks_are_numbered_from_1() -> None:
    assert [row.number for row in rows()] == list(range(1, len(rows()) + 1))
    assert len(rows()) >= 60


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"attack-{row.number}")
def test_a_row_is_true(row: Row) -> None:
    file, _, name = row.test.partition("::")
    assert name.partition("[")[0] in functions_of(file)
    attack = ATTACKS.get(row.number)
    if attack is not None:
        assert (row.name, row.outcome) == (attack.name, ", ".join(sorted(attack.outcomes)))
        assert name == f"test_an_attack_is_met[attack-{row.number}]"
    else:
        assert row.outcome


def test_every_attack_is_on_the_page() -> None:
    assert set(ATTACKS) <= {row.number for row in rows()}
