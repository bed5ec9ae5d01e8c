"""A prefill actor makes a cache layer by layer; a decode actor reads it where it lies, in Ray's shared memory.

    python examples/ray_prefill_decode.py [--layers 16] [--mib 64]

The real snapshot in `fixtures/real` stands for every layer. A second pass moves frames of `--mib` MiB (up to what fits
the store) and tells how much memory of its own the reader took for them: none. Needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import ray
from snapshot import ROLES, Snapshot

import hurray_wire as hw
from hurray_wire.integrations.ray import from_object, to_object

FOLDER = Path(__file__).resolve().parent


class Prefill:
    """Computes layers; here it has them from the snapshot, or makes noise of a size."""

    def layers(self, count: int) -> Iterator[Any]:
        """Each layer's keys and values as soon as they are there."""
        snapshot = Snapshot.load()
        for layer in range(count):
            for role in ROLES:
                yield to_object(snapshot.tensor(role).replace(layer_index=layer), pages="live")

    def noise(self, mib: int, count: int) -> Iterator[Any]:
        """Frames of about `mib` MiB."""
        pool = np.frombuffer(np.random.default_rng(0).bytes(mib << 20), np.float16).reshape(-1, 16, 8, 128)
        table = np.arange(len(pool))
        tensor = hw.BlockPagedTensor(pool, block_table=table, seq_ptr=[0, table.size], seq_lens=[table.size * 16])
        for layer in range(count):
            yield to_object(tensor.replace(layer_index=layer))


class Decode:
    """Reads layers: what it gets are views of shared memory."""

    def __init__(self) -> None:
        self.snapshot = Snapshot.load()

    def check(self, value: Any, layer: int) -> bool:
        """Whether every token of a layer has the bits that the model computed."""
        expect = {"layer_index": layer, "dtype": "bfloat16", "page_size": self.snapshot.about["page_size"]}
        return self.snapshot.agrees(from_object(value, expect=expect))

    def read(self, value: Any) -> tuple[int, int, float]:
        """Bytes of a verified pool, how many more this process has of its own after reading all, and the seconds."""
        before, begun = private_bytes(), time.perf_counter()
        tensor = from_object(value)
        taken = time.perf_counter() - begun
        tensor.page_pool.view(np.uint64).max()
        return tensor.page_pool.nbytes, private_bytes() - before, taken


def private_bytes() -> int:
    """What of this process is in memory of its own, not shared."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def main() -> None:
    """Two actors on this machine."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--layers", type=int, default=16)
    arguments.add_argument("--mib", type=int, default=64)
    options = arguments.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    paths = os.pathsep.join((str(FOLDER), str(FOLDER.parent)))
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        object_store_memory=max(256, 4 * options.mib) << 20,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    try:
        prefill, decode = ray.remote(Prefill).remote(), ray.remote(Decode).remote()
        stream = prefill.layers.options(num_returns="streaming").remote(options.layers)
        agreed = [ray.get(decode.check.remote(ref, i // 2)) for i, ref in enumerate(stream)]
        if len(agreed) != 2 * options.layers or not all(agreed):
            sys.exit("tokens differ")
        for ref in prefill.noise.options(num_returns="streaming").remote(options.mib, 3):
            nbytes, grown, seconds = ray.get(decode.read.remote(ref))
            print(f"{nbytes >> 20} MiB read, verified in {seconds * 1e3:.0f} ms; {grown >> 20} MiB of the reader's own")
    finally:
        ray.shutdown()
    print(f"identical: every token of {options.layers} layers has the bits that the model computed")


if __name__ == "__main__":
    main()
