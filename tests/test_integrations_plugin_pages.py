"""docs/integrations/lmcache.md and vllm.md: their examples run, and every option and format stands there."""

from __future__ import annotations

import importlib
import importlib.util
import re
import warnings
from typing import Any

import pytest
import vllm_driver
from support import ROOT

from hurray_wire.integrations import chunk_forms

PAGES = {name: (ROOT / "docs" / "integrations" / f"{name}.md").read_text() for name in ("lmcache", "vllm")}
BLOCKS = [
    (name, block) for name, text in PAGES.items() for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
]
pytestmark = pytest.mark.filterwarnings("ignore:.*LoggingHandler.*:DeprecationWarning")


@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[f"{name}{i}" for i, (name, _) in enumerate(BLOCKS)])
def test_an_example_runs(name: str, block: str) -> None:
    packages = [package for package in ("torch", "lmcache", "transformers") if package in block or "remote" in block]
    for package in packages if name == "lmcache" else ["vllm"] if "from vllm" in block else []:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(block, f"docs/integrations/{name}.md", "exec"), found)
    if name == "vllm":
        module, _ = vllm_driver.load()
        told = [vars(made) if hasattr(made, "kv_connector") else made for made in found.values()]
        transfers = [each for each in told if isinstance(each, dict) and each.get("kv_connector_extra_config")]
        assert transfers
        for transfer in transfers:
            assert set(transfer["kv_connector_extra_config"]) <= set(module._OPTIONS)
            assert importlib.util.find_spec(transfer["kv_connector_module_path"]) is not None
            assert hasattr(module, transfer["kv_connector"])


def test_every_option_and_format_stands_there() -> None:
    module, _ = vllm_driver.load()
    assert {name for name in module._OPTIONS if f"`{name}`" not in PAGES["vllm"]} == set()
    formats = {*chunk_forms.FORMATS, *chunk_forms._REFUSED}
    assert {name for name in formats if f"`{name}`" not in PAGES["lmcache"]} == set()
    options = ("page_size", "num_heads", "dtype", "compression", "threads", "format", "fit")
    assert {name for name in options if f"`{name}`" not in PAGES["lmcache"]} == set()
