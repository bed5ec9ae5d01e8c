"""Transfers between two processes: the same engine moving raw bytes against a tensor, offered, read and verified."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from caches import pool_of, tensor_of
from measure import Results

from hurray_wire import transports
from hurray_wire.transports.runs import Runs

MiB = 1 << 20
SECONDS = 60.0
PACKAGES = {"nixl": "nixl", "mooncake": "mooncake", "socket": "socket"}
BOUND = 1.15


def transfers(results: Results, quick: bool) -> None:
    """Every engine that is installed; over UCX, by what it chooses (shared memory here) and by TCP."""
    if not Path("/sys/class/infiniband").exists():
        os.environ.setdefault("UCX_MODULES", "^ib")  # else UCX's own library crashes when the process ends
    for name, package in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            print(f"skipped {name}: {package} is not installed")
            continue
        for tls in ("", "tcp") if name == "nixl" else ("",):
            _with_peer(results, name, tls, (16 if quick else 256) * MiB)


def _with_peer(results: Results, name: str, tls: str, nbytes: int) -> None:
    kept = os.environ.get("UCX_TLS")
    if tls:
        os.environ["UCX_TLS"] = tls
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(there, name, nbytes))
    process.start()
    try:
        _measure(results, here, name, f"{name} ({tls})" if tls else name, nbytes)
    finally:
        here.send("end")
        process.join(SECONDS)
        os.environ.pop("UCX_TLS", None)
        if kept is not None:
            os.environ["UCX_TLS"] = kept


def _serve(pipe: Connection, name: str, nbytes: int) -> None:
    """The sender's process: offers when it is told to."""
    pool = pool_of(nbytes)
    tensor = tensor_of(pool)
    with transports.endpoint(name) as end, end.register(pool) as registration:
        pipe.send((end.address, registration.region._replace(token=None)))
        peer = end.connect(pipe.recv())
        outgoing: list[transports.Outgoing] = []
        while (word := pipe.recv()) != "end":
            if word == "one":  # those before it have been read, and their blocks serve again
                outgoing = [offer for offer in outgoing if not offer.done]
            outgoing += [end.send(peer, tensor) for _ in range(1 if word == "one" else word)]
            pipe.send("done")
        for offer in outgoing:
            offer.wait(SECONDS)


def _measure(results: Results, pipe: Connection, name: str, title: str, nbytes: int) -> None:
    mine = np.zeros_like(pool_of(nbytes))
    ids = np.arange(len(mine))
    options = {"progress": False} if name == "nixl" else {}  # its thread would take a core that hashing can use
    with transports.endpoint(name, **options) as end, end.register(mine) as registration:
        address, region = pipe.recv()
        pipe.send(end.address)
        peer = end.connect(address)
        end.engine.admit(peer, region.access)
        one = [np.array([number]) for number in (region.start, registration.region.start, mine.nbytes)]

        def raw() -> None:
            work = end.engine.post(peer, Runs(*one))
            end.until(lambda: end.engine.poll(work), SECONDS, "raw bytes")

        def read(**options: Any) -> None:
            end.receive(timeout=SECONDS, **options).read_into(mine, ids, timeout=SECONDS)

        def asked(word: int | str) -> None:
            pipe.send(word)
            pipe.recv()

        def whole() -> None:
            pipe.send("one")
            read()
            pipe.recv()

        rounds = results.rounds
        contenders: dict[str, Callable[[], object]] = {
            "raw bytes": raw,
            "read, not verified": lambda: read(verify=False),
            "read and verified": read,
        }
        raw()
        asked(2 * rounds + 1)
        read()  # warm
        took = results.race(contenders, dict.fromkeys(contenders, 1))
        asked_all = results.race({"raw bytes": raw, "whole": whole}, {"raw bytes": 1, "whole": 1})
    group = f"transfers, {nbytes // MiB} MiB, {title}"
    results.add(group, "raw bytes", took["raw bytes"], note=f"{nbytes / took['raw bytes'] / 1e9:.2f} GB/s")
    for what in ("read, not verified", "read and verified"):
        bound = BOUND if what.endswith("and verified") else None
        results.add(group, what, took[what], took["raw bytes"], "raw bytes", at_most=bound)
    results.add(
        group,
        "hashed, offered, read and verified",
        asked_all["whole"],
        asked_all["raw bytes"],
        "raw bytes",
        at_most=BOUND,
    )
