"""Mooncake's Store on loopback: its master comes with the package, and runs for as long as these tests do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from support import ROOT
from test_transports_real import why_not

SCENE = """
import json, os, pathlib, subprocess, sys, time
import mooncake
import numpy as np
import hurray_wire as hw
from hurray_wire.transports import store as stored

master = pathlib.Path(mooncake.__file__).parent / "mooncake_master"
master.chmod(0o755)
port, metrics = sys.argv[1:]
command = [str(master), "--rpc_port", port, "--metrics_port", metrics]
process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    from mooncake.store import MooncakeDistributedStore
    time.sleep(1)
    store = MooncakeDistributedStore()
    for _ in range(20):
        if not store.setup("127.0.0.1", "P2PHANDSHAKE", 256 << 20, 32 << 20, "tcp", "", f"127.0.0.1:{port}"):
            break
        time.sleep(0.5)
    pool = np.random.default_rng(1).integers(0, 99, (600, 16, 4, 32)).astype(np.float16)
    t = hw.BlockPagedTensor(pool, block_table=range(600), seq_ptr=[0, 3, 600], seq_lens=[40, 9552], layer_index=2)
    mine = np.zeros((700, 16, 4, 32), np.float16)
    facts = {}
    facts["bytes"] = stored.put(store, "a", t, chunk_bytes=1 << 16) == len(hw.encode(t, chunk_bytes=1 << 16))
    stored.put(store, "b", t, compression="zstd", pages="live")
    facts["whole"] = stored.get(store, "a") == t
    facts["compressed"] = stored.get(store, "b").same_tokens(t)
    back = stored.get(store, "a", mine, np.arange(650, 50, -1))
    facts["into pages"] = back.same_tokens(t) and bool((mine[650] == pool[0]).all())
    asked = []
    ranges = store.get_into_ranges
    class Counting:
        def __getattr__(self, name):
            if name == "get_into_ranges":
                return lambda *a: (asked.append(a[4][0][0][0]), ranges(*a))[1]
            return getattr(store, name)
    with stored.open_stored(Counting(), "a") as frame:
        facts["one sequence"] = bool((frame.gather(0) == t.gather(0)).all())
    facts["only its chunks"] = sum(asked) < len(hw.encode(t)) // 2
    def error(call):
        try:
            call()
        except hw.HurrayWireError as raised:
            return [type(raised).__name__, str(raised.code)]
    facts["no key"] = error(lambda: stored.get(store, "c"))
    facts["nor open"] = error(lambda: stored.open_stored(store, "c"))
    damaged = bytearray(hw.encode(t))
    damaged[-5000] ^= 1
    store.put("d", bytes(damaged))
    facts["damaged"] = error(lambda: stored.get(store, "d"))
    store.put("e", bytes(damaged[:-64]))
    facts["cut"] = error(lambda: stored.get(store, "e"))
    facts["not expected"] = error(lambda: stored.get(store, "a", expect={"dtype": "int8"}))
    store.close()
    print("RESULT", json.dumps(facts), flush=True)
finally:
    process.terminate()
    process.wait(20)
"""


def free_ports(count: int) -> list[str]:
    """Ports that nobody listens at."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(server.getsockname()[1]) for server in servers]
    for server in servers:
        server.close()
    return ports


def test_frames_in_a_store() -> None:
    reason = why_not("mooncake")
    if reason:
        pytest.skip(f"mooncake: {reason}")
    path = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(SCENE), *free_ports(2)]
    done = subprocess.run(command, capture_output=True, text=True, env=path, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    facts: dict[str, Any] = json.loads(done.stdout.rpartition("RESULT ")[2].partition("\n")[0])
    refused = {
        "no key": ["TransferError", "memory_refused"],
        "nor open": ["TransferError", "memory_refused"],
        "damaged": ["ChecksumError", "section_checksum"],
        "cut": ["TruncatedError", "truncated"],
        "not expected": ["MismatchError", "mismatch"],
    }
    moved = ("bytes", "whole", "compressed", "into pages", "one sequence", "only its chunks")
    assert facts == dict.fromkeys(moved, True) | refused
