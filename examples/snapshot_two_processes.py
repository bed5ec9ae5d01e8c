"""The main job, smallest: one process encodes a real cache, another decodes, validates and gathers it.

python examples/snapshot_two_processes.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from snapshot import ROLES, Snapshot

import hurray_wire as hw


def send() -> None:
    """Encode keys and values to standard output."""
    snapshot = Snapshot.load()
    for role in ROLES:
        sys.stdout.buffer.write(hw.encode(snapshot.tensor(role)))


def receive(blob: bytes) -> None:
    """Decode what came and compare every token with what the model computed."""
    snapshot = Snapshot.load()
    print(f"{len(blob):,} bytes came from the other process")
    for tensor in hw.iter_decode(blob):
        print(tensor)
        shared = int((tensor.page_references() > 1).sum())
        print(f"  {shared} pages are shared by both sequences; metadata {tensor.metadata}")
        if not snapshot.agrees(tensor):
            sys.exit(f"{tensor.kv_role}: tokens differ")
    print("every byte agreed")


if __name__ == "__main__":
    if sys.argv[1:] == ["send"]:
        send()
    else:
        receive(subprocess.run([sys.executable, __file__, "send"], stdout=subprocess.PIPE, check=True).stdout)
