"""The examples of docs/engines.md run, each on its own, and every engine has one."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from hurray_wire import engines

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "engines.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=[f"block{i}" for i in range(len(BLOCKS))])
def test_an_example_runs(block: str) -> None:
    for package in ("torch", "transformers"):
        if f"import {package}" in block or f", {package}" in block:
            pytest.importorskip(package)
    exec(compile(block, "docs/engines.md", "exec"), {})


def test_every_function_is_shown() -> None:
    shown = "\n".join(BLOCKS)
    names = {name for name in engines.__all__ if name.startswith(("from_", "to_"))}
    assert {name for name in names if f"engines.{name}(" not in shown} == set()
    assert "engines.slot_mapping(" in shown


def test_every_name_is_exported_and_says_what_it_is() -> None:
    for name in engines.__all__:
        exported = getattr(engines, name)
        if callable(exported):
            assert exported.__doc__ is not None
            assert "Example:" in exported.__doc__, name
            assert "Raises:" in exported.__doc__, name
        else:
            assert name in TEXT or name == "SGLANG" or re.search(r"VLLM_L|VLLM_B|TRTLLM", name), name


def test_nothing_but_what_comes_in_is_needed() -> None:
    found = importlib.util.find_spec("hurray_wire.engines")
    assert found is not None
    rooms = Path(found.origin or "").parent.glob("*.py")
    for room in rooms:
        for line in room.read_text().splitlines():
            assert not re.match(r"(import|from) (torch|transformers)\b", line), f"{room.name}: {line}"
