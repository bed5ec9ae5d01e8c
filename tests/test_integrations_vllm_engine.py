"""vLLM's own engine on the CPU, over a folder and a stream: examples/vllm_connector.py, where vLLM is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from support import ROOT


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.skipif("VLLM_ENGINE" not in os.environ, reason="VLLM_ENGINE is not set: six engines take minutes to start")
def test_two_engines_share_a_prompt() -> None:
    command = [sys.executable, str(ROOT / "examples" / "vllm_connector.py")]
    settings = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "second instance: 192 of 200 tokens loaded" in done.stdout
    assert "third instance: computed what a damaged file held" in done.stdout
    assert "in a stream: 192 of 200 tokens loaded" in done.stdout
