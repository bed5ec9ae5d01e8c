"""Two processes and a real transfer engine: `python transport_child.py ENGINE SCENARIO`, what became of it as JSON.

The sender is a process of its own, started from here, so that it can be killed; what it tells goes over a pipe.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import hurray_wire as hw
from hurray_wire import transports
from hurray_wire.transports import batches

PAGE = (16, 8, 32)
PAGES = 4096
SECONDS = 30.0
IDS = np.random.default_rng(3).permutation(PAGES + 40)[:PAGES]


def pool_of(pages: int = PAGES) -> Any:
    return np.random.default_rng(1).integers(0, 2000, (pages, *PAGE)).astype(np.float16)


def tensor_of(pool: Any, **options: Any) -> hw.BlockPagedTensor:
    """Two sequences that share their first five pages and name all but the last seven, not in order."""
    rest = np.random.default_rng(9).permutation(np.arange(5, len(pool) - 7))
    table = np.concatenate([np.arange(5), np.arange(5), rest])
    lens = [5 * 16, (table.size - 5) * 16 - 3]
    return hw.BlockPagedTensor(pool, block_table=table, seq_ptr=[0, 5, table.size], seq_lens=lens, **options)


def quantised() -> hw.BlockPagedTensor:
    rng = np.random.default_rng(5)
    pool = rng.integers(-99, 99, (PAGES, *PAGE)).astype(np.int8)
    scales, zeros = rng.random((PAGES, 16), np.float32) + 1, rng.integers(-3, 3, (PAGES, 16)).astype(np.int32)
    return tensor_of(pool, quantization="per_block", scales=scales, zero_points=zeros)


def serve(pipe: Connection, engine: str) -> None:
    """The sender: does what it is told, and says how each offer ended."""
    tensor = tensor_of(pool_of())
    coded = quantised()
    with transports.endpoint(engine) as end:
        registration = end.register(tensor.page_pool)
        end.register(coded.page_pool)
        pipe.send(end.address)
        peer = end.connect(pipe.recv())
        outgoing: Any = None
        while (word := pipe.recv()) != "end":
            if word == "offer":
                outgoing = end.send(peer, tensor, pages="live", chunk_bytes=1 << 20)
            elif word == "quantised":
                outgoing = end.send(peer, coded, pages="live", scrub=True)
            elif word == "change":
                tensor.page_pool[300, 3] += 1
            elif word == "deregister":
                registration.close()
            elif word == "withdraw":
                outgoing.cancel()
            elif word == "ended":
                try:
                    outgoing.wait(SECONDS)
                    pipe.send("done")
                except hw.TransferError as error:
                    pipe.send(str(error.code))
                continue
            pipe.send("ok")


class Ends:
    """The receiving end, and what it can tell the sender's process."""

    def __init__(self, engine: str) -> None:
        self.pipe, there = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=serve, args=(there, engine), daemon=True)
        self.process.start()
        self.end = transports.endpoint(engine)
        address = self.pipe.recv()
        self.pipe.send(self.end.address)
        self.peer = self.end.connect(address)
        self.mine = np.full((PAGES + 40, *PAGE), 7, np.float16)
        self.end.register(self.mine)

    def say(self, word: str) -> Any:
        self.pipe.send(word)
        return self.pipe.recv()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def untouched(self, written: Any) -> bool:
        return bool((np.delete(self.mine, written, axis=0) == 7).all())

    def outcome(self, act: Callable[[], Any]) -> dict[str, Any]:
        """The error that an act ends with, and whether only the pages that it names were written."""
        try:
            act()
        except (hw.HurrayWireError, TimeoutError) as error:
            written = getattr(error, "pages_written", None)
            written = np.zeros(0, np.int64) if written is None else written
            return {
                "error": type(error).__name__,
                "code": str(getattr(error, "code", "")),
                "written": int(written.size),
                "untouched": self.untouched(written),
            }
        return {"error": None}

    def close(self) -> None:
        if self.process.is_alive():
            self.pipe.send("end")
        self.end.close()
        self.process.join(SECONDS)


def read(ends: Ends, **options: Any) -> hw.BlockPagedTensor:
    incoming = ends.end.receive(timeout=SECONDS)
    return incoming.read_into(ends.mine, IDS[: incoming.descriptor.layout.num_pages], timeout=SECONDS, **options)


def moves(ends: Ends) -> dict[str, Any]:
    """Several tensors out of one registered pool, the second time with pages that are held, the third quantised."""
    tensor, facts = tensor_of(pool_of()), []
    for held in ((), range(0, 200)):
        ends.say("offer")
        back = read(ends, held=held)
        facts += [bool(back.same_tokens(tensor)), ends.say("ended") == "done", ends.untouched(IDS[: PAGES - 7])]
    ends.say("quantised")
    coded, back = quantised(), ends.end.receive(timeout=SECONDS).read(timeout=SECONDS)
    facts += [bool(back.same_tokens(coded)), bool((back.dequantize(1) == coded.dequantize(1)).all())]
    return {"facts": facts, "pages": int(back.num_pages)}


def dies(ends: Ends) -> dict[str, Any]:
    """The sender is killed in the middle of a transfer."""
    ends.say("offer")
    incoming = ends.end.receive(timeout=SECONDS)
    begun = incoming.start(ends.mine, IDS[: incoming.descriptor.layout.num_pages])
    while not begun.pages_written.size:
        begun.poll()
    ends.kill()
    return ends.outcome(lambda: begun.wait(SECONDS))


def dies_before(ends: Ends) -> dict[str, Any]:
    """The sender is killed before its offer is read."""
    ends.say("offer")
    incoming = ends.end.receive(timeout=SECONDS)
    ends.kill()
    return ends.outcome(lambda: incoming.read_into(ends.mine, IDS[: incoming.descriptor.layout.num_pages], timeout=5))


def changes(ends: Ends) -> dict[str, Any]:
    """A page changes between hashing and reading."""
    ends.say("offer")
    ends.say("change")
    return {**ends.outcome(lambda: read(ends)), "told": ends.say("ended")}


def deregisters(ends: Ends) -> dict[str, Any]:
    """The sender takes its memory back while its offer is out; the receiver may hear of it or read."""
    ends.say("offer")
    incoming = ends.end.receive(timeout=SECONDS)
    ends.pipe.send("deregister")
    time.sleep(0.3)
    done = ends.outcome(lambda: incoming.read_into(ends.mine, IDS[: incoming.descriptor.layout.num_pages], timeout=5))
    ends.pipe.recv()
    return {**done, "told": ends.say("ended")}


def forged(ends: Ends) -> dict[str, Any]:
    """An offer that points where the sender has registered nothing."""
    ends.say("offer")
    incoming = ends.end.receive(timeout=SECONDS)
    incoming.offer = incoming.offer._replace(first=incoming.offer.first + (1 << 40))
    return ends.outcome(lambda: incoming.read_into(ends.mine, IDS[: incoming.descriptor.layout.num_pages], timeout=5))


def wrong_key(ends: Ends) -> dict[str, Any]:
    """Access to memory that is not the peer's, or garbled."""
    ends.say("offer")
    incoming = ends.end.receive(timeout=SECONDS)
    incoming.offer = incoming.offer._replace(access=[blob[:-30] + bytes(30) for blob in incoming.offer.access])
    return ends.outcome(lambda: incoming.read_into(ends.mine, IDS[: incoming.descriptor.layout.num_pages], timeout=5))


def cancels(ends: Ends) -> dict[str, Any]:
    """The receiver stops, the sender is told, nothing is written any more, and the next transfer works."""
    ends.say("offer")
    incoming = ends.end.receive(timeout=SECONDS)
    begun = incoming.start(ends.mine, IDS[: incoming.descriptor.layout.num_pages])
    while not begun.pages_written.size:
        begun.poll()
    begun.cancel()
    done = ends.outcome(begun.poll)
    ends.mine[:] = 9  # the pages are somebody else's now
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        ends.end.poll()  # an engine that had not stopped would go on here
    done |= {"still": bool((ends.mine == 9).all()), "told": ends.say("ended")}
    ends.say("offer")
    return {**done, "again": bool(read(ends).same_tokens(tensor_of(pool_of())))}


def no_address(ends: Ends) -> dict[str, Any]:
    """Bytes that are no address."""
    return ends.outcome(lambda: ends.end.connect(b"what is this"))


SCENARIOS: dict[str, Callable[[Ends], dict[str, Any]]] = {
    scene.__name__: scene
    for scene in (moves, dies, dies_before, changes, deregisters, forged, wrong_key, cancels, no_address)
}


def main() -> None:
    if not Path("/sys/class/infiniband").exists():
        os.environ.setdefault("UCX_MODULES", "^ib")
    batches.BATCH_BYTES = 4 << 20  # several batches, so that there is a middle to die in
    ends = Ends(sys.argv[1])
    try:
        result = SCENARIOS[sys.argv[2]](ends)
    finally:
        ends.close()
    sys.stdout.write(f"\nRESULT {json.dumps(result)}\n")


if __name__ == "__main__":
    main()
