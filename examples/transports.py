"""A prefill process offers a cache of 16 layers; a decode process has an engine read it into pages of its own.

    python examples/transports.py [--transport nixl | mooncake | socket] [--layers 16] [--copies 8]

Without --transport, over every engine that is installed. Both register their memory once. First all pages are read;
then the same again by a receiver that holds the first sequence already, and is brought only what it lacks; then a page
changes after it has been hashed, which is found, and the pages to discard are named. The data is the real snapshot in
`fixtures/real`; every token is compared with what the model computed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from prefill_decode import batch
from snapshot import ROLES, Snapshot

import hurray_wire as hw
from hurray_wire import transports

SECONDS = 60.0
PACKAGES = {"nixl": "nixl", "mooncake": "mooncake.engine", "socket": "socket"}


def prefill(pipe: Connection, engine: str, layers: int, copies: int) -> None:
    """Hold the cache, registered once, and offer every layer's keys and values when asked to."""
    snapshot = Snapshot.load()
    tensors = [batch(snapshot, role, copies) for role in ROLES]
    cache = np.stack([np.stack([tensor.page_pool for tensor in tensors])] * layers)
    with transports.endpoint(engine) as end, end.register(cache):
        pipe.send(end.address)
        peer = end.connect(pipe.recv())
        while (word := pipe.recv()) != "end":
            offers = []
            for layer in range(layers):
                for role, tensor in enumerate(tensors):
                    mine = tensor.replace(page_pool=cache[layer, role], layer_index=layer)
                    offers.append(end.send(peer, mine, pages="live"))
            if word == "spoil":
                cache.view(np.uint16)[-1, -1, int(tensors[-1].block_table[0])] ^= 1
            for offer in offers:
                try:
                    offer.wait(SECONDS)
                except hw.TransferError as error:
                    pipe.send(str(error))
            pipe.send(None)


class Decode:
    """The receiving process: a pool of its own, registered once, with other page ids."""

    def __init__(self, end: transports.Endpoint, layers: int, copies: int) -> None:
        self.snapshot = Snapshot.load()
        self.end = end
        self.layers = layers
        one = batch(self.snapshot, "key", copies)
        shape = (layers, 2, one.num_pages + 7, *one.page_pool.shape[1:])
        self.pool = np.zeros(shape, np.uint16).view(hw.bfloat16.numpy)
        self.free = np.random.default_rng(7).permutation(np.arange(1, one.num_pages + 7))
        self.registration = end.register(self.pool)
        self.expect = {
            "dtype": "bfloat16",
            "page_size": one.page_size,
            "model": self.snapshot.about["origin"]["model"]["name"],
        }

    def take(self, held: Any) -> tuple[list[hw.BlockPagedTensor], int]:
        """Every layer's keys and values: the tensors, and the bytes of pages that were read."""
        tensors, read = [], 0
        for _ in range(2 * self.layers):
            incoming = self.end.receive(timeout=SECONDS, expect=self.expect)
            layout = incoming.descriptor.layout
            target = self.pool[layout.layer_index, ROLES.index(layout.kv_role)]
            reading = incoming.start(target, self.free[: layout.num_pages], held=held)
            tensors.append(reading.wait(SECONDS))
            read += reading.progress[1]
        return tensors, read


def show(engine: str, layers: int, copies: int) -> None:
    """One engine, end to end."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=prefill, args=(there, engine, layers, copies))
    process.start()
    with transports.endpoint(engine) as end:
        address = here.recv()
        here.send(end.address)
        end.connect(address)
        decode = Decode(end, layers, copies)
        first = _request(here, decode, "all pages", ())
        held = np.unique(first[0].block_table[: int(first[0].seq_ptr[1])], return_index=True)[1]
        known = {page: j for j, page in enumerate(decode.free.tolist())}
        pages = [known[int(page)] for page in first[0].block_table[np.sort(held)]]
        _request(here, decode, f"{len(pages)} of {len(known)} pages held", pages)
        here.send("spoil")
        try:
            decode.take(())
        except hw.ChecksumError as error:
            print(
                f"  changed after hashing: {error.code} in {error.where}, {len(error.pages_written)} pages to discard"
            )
        else:
            sys.exit("a page that changed was not found")
        print(f"  and the sender is told: {here.recv()}")
        here.send("end")
        while here.poll(SECONDS) and here.recv() is not None:
            pass
    process.join(SECONDS)
    if process.exitcode:
        sys.exit(f"the prefill process ended with {process.exitcode}")


def _request(pipe: Connection, decode: Decode, what: str, held: Any) -> list[hw.BlockPagedTensor]:
    pipe.send("offer")
    begun = time.perf_counter()
    tensors, read = decode.take(held)
    seconds = time.perf_counter() - begun
    if not all(map(decode.snapshot.agrees, tensors)):
        sys.exit("tokens differ")
    print(f"  {what}: {len(tensors)} tensors, {read / 1e6:.1f} MB read and verified in {seconds:.3f} s, identical")
    while pipe.recv() is not None:
        pass
    return tensors


def why_not(engine: str) -> str | None:
    """What keeps an engine from being imported here."""
    try:
        import_module(PACKAGES[engine])
    except ImportError as error:  # the package, or a library of the system that it needs
        return str(error)
    return None


def main() -> None:
    """Every engine that was asked for."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--transport", choices=list(PACKAGES))
    arguments.add_argument("--layers", type=int, default=16)
    arguments.add_argument("--copies", type=int, default=8)
    options = arguments.parse_args()
    if not Path("/sys/class/infiniband").exists():
        os.environ.setdefault("UCX_MODULES", "^ib")  # NIXL's UCX crashes at exit where it finds no InfiniBand
    for variable, level in (("NIXL_LOG_LEVEL", "WARN"), ("MC_LOG_LEVEL", "ERROR")):
        os.environ.setdefault(variable, level)  # the engines' own logs
    for engine in [options.transport] if options.transport else PACKAGES:
        reason = why_not(engine)
        if reason and options.transport:
            sys.exit(f"{engine}: {reason}")
        print(f"{engine}:{f' not here: {reason}' if reason else ''}", flush=True)
        if not reason:
            show(engine, options.layers, options.copies)


if __name__ == "__main__":
    main()
