"""The real engines, two processes each: what moves, and how each fault ends. `transport_child` has the scenes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

CHILD = Path(__file__).resolve().parent / "transport_child.py"
PACKAGES = {"socket": "socket", "nixl": "nixl", "mooncake": "mooncake.engine"}
ALIVE = {"error": None}


@cache
def why_not(engine: str) -> str:
    """What keeps an engine from running here; empty if nothing does. Asked of a process of its own: NIXL prints."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {PACKAGES[engine]}"], capture_output=True, text=True, check=False
    )
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


def played(engine: str, scene: str, **environment: str) -> dict[str, Any]:
    """What became of a scene; the processes must end by themselves, and well."""
    reason = why_not(engine)
    if reason:
        pytest.skip(f"{engine}: {reason}")
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, str(CHILD), engine, scene]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | path | environment, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.rpartition("RESULT ")[2].partition("\n")[0])
    return result


ENGINES = pytest.mark.parametrize("engine", PACKAGES)


@ENGINES
def test_tensors_move_pages_are_held_and_scales_come_along(engine: str) -> None:
    assert played(engine, "moves") == {"facts": [True] * 8, "pages": 4089}


def test_tensors_move_over_tcp_alone() -> None:
    assert played("nixl", "moves", UCX_TLS="tcp")["facts"] == [True] * 8


@ENGINES
def test_a_sender_that_is_killed_in_the_middle(engine: str) -> None:
    result = played(engine, "dies")
    assert (result["error"], result["code"], result["untouched"]) == ("TransferError", "peer_lost", True)
    assert result["written"] > 0


@ENGINES
def test_a_sender_that_is_killed_before_it_is_read(engine: str) -> None:
    result = played(engine, "dies_before")
    assert result == {"error": "TransferError", "code": "peer_lost", "written": 0, "untouched": True}


@ENGINES
def test_a_page_that_changes_after_it_was_hashed(engine: str) -> None:
    result = played(engine, "changes")
    assert (result["error"], result["code"], result["untouched"]) == ("ChecksumError", "section_checksum", True)
    assert result["told"] == "declined"
    assert result["written"] > 0


@ENGINES
def test_memory_that_is_deregistered(engine: str) -> None:
    result = played(engine, "deregisters")
    assert (result["error"], result["code"], result["untouched"]) == ("TransferError", "withdrawn", True)


@ENGINES
def test_addresses_that_nobody_registered(engine: str) -> None:
    result = played(engine, "forged")
    assert (result["error"], result["code"], result["untouched"]) == ("TransferError", "memory_refused", True)


@pytest.mark.parametrize("engine", ["socket", "nixl"])  # Mooncake has no keys
def test_a_key_that_does_not_match(engine: str) -> None:
    result = played(engine, "wrong_key")
    assert result == {"error": "TransferError", "code": "memory_refused", "written": 0, "untouched": True}


@pytest.mark.parametrize(("engine", "tls"), [*((engine, "") for engine in PACKAGES), ("nixl", "tcp")])
def test_a_reading_that_is_cancelled(engine: str, tls: str) -> None:
    result = played(engine, "cancels", **({"UCX_TLS": tls} if tls else {}))
    assert (result["error"], result["code"], result["untouched"]) == ("TransferError", "cancelled", True)
    assert (result["told"], result["still"], result["again"]) == ("declined", True, True)


@ENGINES
def test_bytes_that_are_no_address(engine: str) -> None:
    result = played(engine, "no_address")
    assert result == {"error": "TransferError", "code": "memory_refused", "written": 0, "untouched": True}


@ENGINES
def test_the_example_runs(engine: str) -> None:
    reason = why_not(engine)
    if reason:
        pytest.skip(f"{engine}: {reason}")
    command = [sys.executable, str(ROOT / "examples" / "transports.py"), "--transport", engine, "--layers", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("identical") == 2
    assert "section_checksum" in done.stdout
