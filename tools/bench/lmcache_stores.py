"""LMCache's stores with its naive serde and with frames: what is stored, and what a put and a get take.

LMCache's naive serde hands the object on as it is, so all of its time is the store's; both go through the same code of
LMCache's: its remote backend over its file connector and over its own server on the loopback.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from caches import real_bits, snapshot_chunks
from measure import Results

import hurray_wire as hw

GIGABIT = 125_000_000
_PACING = 47
"""SO_MAX_PACING_RATE (Linux `include/uapi/asm-generic/socket.h`), which Python does not name."""


def lmcache(results: Results, quick: bool) -> None:
    """The real snapshot's chunks, and one of a model's size, through LMCache's own backend."""
    try:
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        import lmcache.v1.storage_backend.remote_backend  # noqa: F401
    except ImportError:
        results.skip("lmcache", "LMCache, or transformers, which its serdes import, is not installed")
        return
    layers = 4 if quick else 16
    bits = real_bits(2 * layers * 256 * 1024 * 2).reshape(2, layers, 256, 1024)
    chunks = {
        "real snapshot, 141 tokens of 1 layer": (snapshot_chunks()[0], 12),
        f"256 tokens of {layers} layers": (bits, 8),
    }
    with tempfile.TemporaryDirectory() as folder, _loop() as loop, _server(None) as fast, _server(GIGABIT) as slow:
        stores = {"files": f"fs://localhost:0/{folder}", "its server": f"lm://127.0.0.1:{fast}"}
        if sys.platform == "linux":
            stores["its server at 1 Gbit/s"] = f"lm://127.0.0.1:{slow}"
        for name, (chunk, heads) in chunks.items():
            for store, url in stores.items():
                _measure(results, f"lmcache, {name}, {store}", url, chunk, heads, loop)


def _measure(results: Results, group: str, url: str, chunk: Any, heads: int, loop: Any) -> None:
    rate = GIGABIT if group.endswith("Gbit/s") else None
    serdes = {"naive": None, "frames": {"compression": None}, "frames, zstd": {"compression": "zstd"}}
    backends = {
        name: _Backend(url, chunk, heads, loop, options, i, rate) for i, (name, options) in enumerate(serdes.items())
    }
    puts: dict[str, Callable[[], object]] = {f"put, {name}": each.put for name, each in backends.items()}
    gets: dict[str, Callable[[], object]] = {f"get, {name}": each.get for name, each in backends.items()}
    took = results.race(puts | gets)
    for name, each in backends.items():
        assert each.is_whole(), name
    for verb in ("put", "get"):
        for name in ("frames", "frames, zstd"):
            results.add(group, f"{verb}, {name}", took[f"{verb}, {name}"], took[f"{verb}, naive"], f"naive {verb}")
    zstd, naive = backends["frames, zstd"], backends["naive"]
    slower = sum(took[f"{verb}, frames, zstd"] - took[f"{verb}, naive"] for verb in ("put", "get"))
    saved = 2 * (naive.stored - zstd.stored)
    pays = "always" if slower <= 0 else f"below {saved / slower / 1e6:,.0f} MB/s"
    results.value(group, "bytes stored, naive / zstd", naive.stored / zstd.stored, at_least=1.3, note=f"pays {pays}")
    for each in backends.values():
        each.close()


class _Backend:
    """LMCache's remote backend at a URL, with one chunk under one key; `rate` bytes a second at most on its way."""

    def __init__(self, url: str, chunk: Any, heads: int, loop: Any, options: Any, number: int, rate: Any) -> None:
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.remote_backend import RemoteBackend

        from hurray_wire.integrations.lmcache_remote import remote_serde

        layers, hidden = chunk.shape[1], chunk.shape[3]
        shape = (layers, 2, 256, heads, hidden // heads)
        about = LMCacheMetadata("bench", 1, 1, 0, 0, torch.bfloat16, shape)
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=256, remote_url=url, remote_serde="naive", max_local_cpu_size=0.3, local_cpu=False
        )
        self._memory = LocalCPUBackend(config, about, dst_device="cpu")
        self._remote = RemoteBackend(config, about, loop, self._memory, "cpu")
        if rate is not None:
            self._remote.connection._connector.client_socket.setsockopt(socket.SOL_SOCKET, _PACING, rate)
        if options is not None:
            allocate = self._memory.allocate
            pair = remote_serde(about, page_size=16, allocate=allocate, **options)
            self._remote.serializer, self._remote.deserializer = pair
        self._key = CacheEngineKey("bench", 1, 0, hash((url, chunk.shape)) % 1000 * 10 + number, torch.bfloat16)
        self._object = self._memory.allocate([torch.Size(chunk.shape)], [torch.bfloat16], MemoryFormat.KV_2LTD)
        self._object.tensor.copy_(hw.to_torch(chunk.view(hw.bfloat16.numpy)))
        self.stored = len(self._remote.serializer.serialize(self._object).byte_array)
        self.put()

    def put(self) -> None:
        """Serialise and store the chunk."""
        self._remote.submit_put_task(self._key, self._object).result(60)

    def get(self) -> None:
        """Fetch and deserialise it."""
        self._fetch().ref_count_down()

    def is_whole(self) -> bool:
        """Whether what comes back has the bits that went."""
        found = self._fetch()
        same = np.array_equal(
            hw.from_torch(found.tensor).view(np.uint16), hw.from_torch(self._object.tensor).view(np.uint16)
        )
        found.ref_count_down()
        return same

    def close(self) -> None:
        """Give the memory back."""
        self._object.ref_count_down()
        self._remote.close()

    def _fetch(self) -> Any:
        found = self._remote.get_blocking(self._key)
        assert found is not None, "LMCache found nothing"
        return found


@contextmanager
def _loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@contextmanager
def _server(rate: int | None) -> Iterator[int]:
    """LMCache's own server, in this process; `rate` bytes a second at most on the way back, by the kernel's pacing."""
    from lmcache.v1.server.__main__ import LMCacheServer

    class Server(LMCacheServer):  # type: ignore[misc]
        def handle_client(self, client_socket: socket.socket) -> None:
            if rate is not None:
                client_socket.setsockopt(socket.SOL_SOCKET, _PACING, rate)
            super().handle_client(client_socket)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    threading.Thread(target=Server("127.0.0.1", port, "cpu").run, daemon=True).start()
    yield port
