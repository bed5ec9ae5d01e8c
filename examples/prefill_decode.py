"""A prefill process streams a cache of 32 layers over a loopback socket into a decode process's own pages.

    python examples/prefill_decode.py [--layers 32] [--copies 8]

The real snapshot in `fixtures/real` stands for every layer, and `copies` times for more sequences. The decode process
has a pool of its own with other page ids: it reads each header, chooses pages, and receives straight into them. Sent
raw and compressed; every token is then compared with what the model computed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from rich.progress import Progress
from snapshot import ROLES, Snapshot

import hurray_wire as hw


def batch(snapshot: Snapshot, role: str, copies: int) -> hw.BlockPagedTensor:
    """The snapshot's sequences `copies` times, each time with pages of their own."""
    one = snapshot.tensor(role)
    pages = np.arange(copies)[:, None] * one.num_pages
    steps = np.arange(copies)[:, None] * int(one.seq_ptr[-1])
    return hw.BlockPagedTensor(
        np.concatenate([one.page_pool] * copies),
        block_table=(pages + one.block_table.astype(np.int64)).reshape(-1),
        seq_ptr=np.concatenate([(steps + one.seq_ptr[:-1].astype(np.int64)).reshape(-1), steps[-1] + one.seq_ptr[-1]]),
        seq_lens=np.tile(one.seq_lens, copies) if one.seq_lens is not None else None,
        kv_role=role,
        metadata=one.metadata,
    )


def prefill(port: int, layers: int, copies: int, compression: Any) -> None:
    """Stream every layer's keys and values; only pages that a sequence names are sent."""
    snapshot = Snapshot.load()
    caches = {role: batch(snapshot, role, copies) for role in ROLES}
    with (
        socket.create_connection(("127.0.0.1", port)) as connection,
        hw.StreamWriter(connection, pages="live", compression=compression) as writer,
    ):
        for layer in range(layers):
            for role in ROLES:
                writer.write(caches[role].replace(layer_index=layer))


def decode(server: socket.socket, layers: int, copies: int) -> tuple[list[hw.BlockPagedTensor], int, float]:
    """Receive into a pool of this process: the tensors over it, the bytes that came, and the seconds it took."""
    snapshot = Snapshot.load()
    num_pages = snapshot.about["num_pages"] * copies
    shape = (layers, 2, num_pages + 7, *snapshot.pools["key"].shape[1:])
    pool = np.zeros(shape, np.uint16).view(hw.bfloat16.numpy)
    free = np.random.default_rng(7).permutation(np.arange(1, num_pages + 7))
    connection, _ = server.accept()
    expect = {"dtype": "bfloat16", "page_size": snapshot.about["page_size"], "model": batch_model(snapshot)}
    tensors, came, begun = [], 0, time.perf_counter()
    with connection, hw.StreamReader(connection, expect=expect, timeout=60) as reader, bar(layers * 2) as progress:
        for header in iter(reader.next_header, None):
            descriptor = header.inspection.descriptor
            assert descriptor is not None  # only a closing frame has none
            layout = descriptor.layout
            target = pool[layout.layer_index, ROLES.index(layout.kv_role)]
            tensors.append(header.read_into(target, free[: layout.num_pages]))
            came += header.inspection.total_bytes
            next(progress)
    return tensors, came, time.perf_counter() - begun


def batch_model(snapshot: Snapshot) -> str:
    """The name under which the sender must announce its model."""
    return str(snapshot.about["origin"]["model"]["name"])


class bar:
    """A progress bar on a terminal, nothing elsewhere; each `next` is a frame."""

    def __init__(self, total: int) -> None:
        self.progress = Progress(disable=not sys.stderr.isatty(), transient=True)
        self.task = self.progress.add_task("receiving", total=total)

    def __enter__(self) -> Iterator[None]:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def __iter__(self) -> Iterator[None]:
        return self

    def __next__(self) -> None:
        self.progress.advance(self.task)


def transfer(layers: int, copies: int, compression: str | None) -> None:
    """One run: both processes, and what went over."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=prefill, args=(server.getsockname()[1], layers, copies, compression))
        process.start()
        server.settimeout(60)
        tensors, came, seconds = decode(server, layers, copies)
        process.join()
    snapshot = Snapshot.load()
    if process.exitcode or len(tensors) != 2 * layers or not all(map(snapshot.agrees, tensors)):
        sys.exit("tokens differ")
    held = sum(tensor.total_tokens * tensor.num_heads * tensor.head_dim * 2 for tensor in tensors)
    named = sum(tensor.block_table.size for tensor in tensors)
    sent = sum(int((tensor.page_references() > 0).sum()) for tensor in tensors)
    print(
        f"{compression or 'raw':>5}: {len(tensors)} frames, {came / 1e6:.1f} MB in {seconds:.3f} s "
        f"({came / 1e9 / seconds:.2f} GB/s, waiting for the sender included); {named} pages named, {sent} sent; "
        f"{held / came:.3f} bytes of tokens a byte sent"
    )


def main() -> None:
    """Raw, then compressed."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--layers", type=int, default=32)
    arguments.add_argument("--copies", type=int, default=8)
    options = arguments.parse_args()
    print(Snapshot.load().tensor("key"))
    for compression in (None, "zstd"):
        transfer(options.layers, options.copies, compression)
    print("identical: every token of every layer has the bits that the model computed")


if __name__ == "__main__":
    main()
