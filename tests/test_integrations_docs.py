"""The examples of docs/integrations.md run, each against the real thing, and everything public is shown there."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from plugin_helpers import quiet
from ray_helpers import ray_node
from redis_helpers import redis_server

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "integrations.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
TOLD_OF = sorted(set(re.findall(r"`integrations\.(\w+)`", TEXT)))


@contextmanager
def redis_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with redis_server() as port:
        monkeypatch.setenv("REDIS_URL", f"redis://127.0.0.1:{port}")
        yield


def needed(block: str) -> str:
    """The package that an example needs."""
    return re.findall(r"hurray_wire\.integrations\.([a-z]+)", block)[0]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("block", BLOCKS, ids=[f"{needed(block)}-{i}" for i, block in enumerate(BLOCKS)])
def test_an_example_runs(block: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    name = needed(block)
    contexts: dict[str, Any] = {"redis": redis_url(monkeypatch), "ray": ray_node()}
    if name not in contexts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for package in (name, "torch", "transformers") if name == "lmcache" else (name,):
                pytest.importorskip(package, exc_type=ImportError)
    with contexts.get(name, nullcontext()), quiet():
        exec(compile(block, "docs/integrations.md", "exec"), {})


def test_the_stores_are_told_of() -> None:
    """LMCache and vLLM have pages of their own, and their lines here."""
    assert {"redis", "fsspec", "ray"} <= set(TOLD_OF) == set(map(needed, BLOCKS)) - {"lmcache", "vllm"}


@pytest.mark.parametrize("name", TOLD_OF)
def test_everything_public_is_shown(name: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(f"hurray_wire.integrations.{name}")
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    assert module.__all__
    assert {item for item in module.__all__ if f"`{item}" not in TEXT and f"{item}(" not in TEXT} == set()


def test_what_the_page_says_of_the_records() -> None:
    """The names and the first line are those of the code."""
    from hurray_wire.integrations.file_index import Index
    from hurray_wire.integrations.redis_parts import Record

    record, index = Record("ab", (5,), b"head", b"tail").sealed(), Index([], 64).encode()
    for data, kind in ((record, b"parts"), (index, b"index")):
        words = data.partition(b"\n")[0].split(b" ")
        assert words[:3] == [b"hurray_wire", kind, b"1"]
        assert len(words) == 6
        assert len(words[5]) == 16
        fields = re.findall(rb'"(\w+)":', data)
        told = TEXT[TEXT.index(f"**`{kind.decode()}`**") :].partition("\n- ")[0]
        assert fields
        assert {field for field in map(bytes.decode, fields) if f"`{field}`" not in told} == set()
    assert Record("ab", (5,), b"", b"").names(b"key") == [b"{key}:ab:0"]
    assert Record("ab", (5,), b"", b"").names(b"a{t}b") == [b"a{t}b:ab:0"]
