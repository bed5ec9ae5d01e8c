"""A prefill process keeps a cache in Redis, layer by layer; a decode process takes it into pages of its own.

    python examples/redis_prefill_decode.py [--url redis://127.0.0.1:6379]

Without a URL a server of its own is started on loopback, and ended (`redis-server` must be there). The real snapshot in
`fixtures/real` stands for every layer. Needs the extra `redis`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import redis
from snapshot import ROLES, Snapshot

import hurray_wire as hw
from hurray_wire.integrations.redis import RedisStore

LAYERS = 16


def key(layer: int, role: str) -> str:
    """Where a layer is kept: whatever names a prompt's cache, then layer and role."""
    return f"cache:prompt-1:{layer}:{role}"


def prefill(url: str) -> None:
    """Put every layer as it is computed, for an hour."""
    snapshot = Snapshot.load()
    with redis.Redis.from_url(url) as client:
        store = RedisStore(client)
        for layer in range(LAYERS):
            for role in ROLES:
                tensor = snapshot.tensor(role).replace(layer_index=layer)
                store.put(key(layer, role), tensor, ttl=3600, pages="live", chunk_bytes=12 << 10)


def decode(url: str) -> None:
    """Take every layer into free pages of this process's pool, and one sequence of one layer alone."""
    snapshot = Snapshot.load()
    with redis.Redis.from_url(url) as client:
        store = RedisStore(client)
        frame = store.open(key(0, "key"), expect={"dtype": "bfloat16"})
        asked = sum(length for _, length in frame.ranges(1))
        print(
            f"sequence 1 of layer 0: {len(frame.gather(1))} tokens, {asked:,} of {frame.inspection.total_bytes:,} bytes"
        )
        num_pages = frame.descriptor.layout.num_pages
        pool = np.zeros((num_pages + 5, *snapshot.pools["key"].shape[1:]), np.uint16).view(hw.bfloat16.numpy)
        free = np.random.default_rng(7).permutation(num_pages + 5)[:num_pages]
        for layer in range(LAYERS):
            for role in ROLES:
                expect = {"layer_index": layer, "kv_role": role, "page_size": snapshot.about["page_size"]}
                tensor = store.get_into(key(layer, role), pool, free, expect=expect)
                if not snapshot.agrees(tensor):
                    sys.exit("tokens differ")
                store.delete(key(layer, role))
        print(f"identical: every token of {LAYERS} layers has the bits that the model computed")


@contextmanager
def server() -> Iterator[str]:
    """A Redis server on loopback for as long as the context lasts; its URL."""
    command = shutil.which("redis-server") or shutil.which("valkey-server")
    if command is None:
        sys.exit("no redis-server here: install one, or give --url")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        words = [command, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        try:
            yield started(f"redis://127.0.0.1:{port}")
        finally:
            process.kill()
            process.wait()


def started(url: str) -> str:
    """The URL, when the server there answers."""
    for _ in range(100):
        try:
            with redis.Redis.from_url(url) as client:
                client.ping()
                return url
        except redis.exceptions.ConnectionError:
            time.sleep(0.05)
    sys.exit("the server does not answer")


def run(url: str) -> None:
    """Both processes, one after the other."""
    for work in (prefill, decode):
        process = multiprocessing.get_context("spawn").Process(target=work, args=(url,))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)


def main() -> None:
    """Against the server that is named, or one of its own."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--url")
    url = arguments.parse_args().url
    if url:
        run(url)
        return
    with server() as own:
        run(own)


if __name__ == "__main__":
    main()
