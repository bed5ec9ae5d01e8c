"""LMCache's stores with its naive serde and with frames: what is stored, and what a put and a get take.

LMCache's naive serde hands the object on as it is, so all of its time is the store's; both go through the same code of
LMCache's: its remote backend over its file connector, over Redis and over its own server on the loopback. What the
serdes themselves take, from memory object to memory object, stands against one copy of the chunk.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from caches import copy_of, real_bits, snapshot_chunks
from measure import Results
from stores import redis_on_loopback

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
        "real snapshot, 141 tokens of 1 layer": (snapshot_chunks()[0], 12, 1),
        f"256 tokens of {layers} layers": (bits, 8, 1),
        f"a prompt of 4 chunks of {layers} layers": (bits, 8, 4),
    }
    with ExitStack() as stack:
        folder, loop = stack.enter_context(tempfile.TemporaryDirectory()), stack.enter_context(_loop())
        stores = {"files": f"fs://localhost:0/{folder}"}
        redis = stack.enter_context(redis_on_loopback())
        if redis is None:
            results.skip("lmcache, Redis", "needs redis-server")
        else:
            stores["Redis"] = f"redis://127.0.0.1:{redis}"
        stores["its server"] = f"lm://127.0.0.1:{stack.enter_context(_server(None))}"
        if sys.platform == "linux":
            stores["its server at 1 Gbit/s"] = f"lm://127.0.0.1:{stack.enter_context(_server(GIGABIT))}"
        for name, (chunk, heads, count) in chunks.items():
            for store, url in stores.items():
                if count == 1 or not store.endswith("Gbit/s"):
                    _measure(results, f"lmcache, {name}, {store}", url, chunk, heads, count, loop)


def _measure(results: Results, group: str, url: str, chunk: Any, heads: int, count: int, loop: Any) -> None:
    rate = GIGABIT if group.endswith("Gbit/s") else None
    serdes = {"naive": None, "frames": {"compression": None}, "frames, zstd": {"compression": "zstd"}}
    backends = {
        name: _Backend(url, chunk, heads, count, loop, options, i, rate)
        for i, (name, options) in enumerate(serdes.items())
    }
    took = results.race({name: each.put_and_get for name, each in backends.items()})
    for name, each in backends.items():
        assert each.is_whole(), name
    for name in ("frames", "frames, zstd"):
        results.add(group, f"put and get, {name}", took[name], took["naive"], "naive")
    zstd = backends["frames, zstd"]
    if group.endswith(", files") and count == 1:
        _serdes(results, group.removesuffix(", files"), chunk, backends)
    ratio = backends["naive"].stored / zstd.stored
    results.value(group, "bytes stored, naive / zstd", ratio, at_least=1.3)
    for each in backends.values():
        each.close()


def _serdes(results: Results, group: str, chunk: Any, backends: dict[str, Any]) -> None:
    """What serialising and deserialising take, without a store; naive does nothing."""
    work: dict[str, Callable[[], object]] = {"copy": copy_of(chunk)}
    for name in ("frames", "frames, zstd"):
        work |= {f"serialise, {name}": backends[name].serialize, f"deserialise, {name}": backends[name].deserialize}
    took = results.race(work)
    for name in list(work)[1:]:
        saved = backends["naive"].stored - backends["frames, zstd"].stored
        note = f"pays below {saved / took[name] / 1e6:,.0f} MB/s" if name.endswith("zstd") else ""
        results.add(f"{group}, serde alone", name, took[name], took["copy"], "a copy of the chunk", note=note)


class _Backend:
    """LMCache's remote backend at a URL, one chunk under `count` keys; `rate` bytes a second at most on its way."""

    def __init__(
        self, url: str, chunk: Any, heads: int, count: int, loop: Any, options: Any, number: int, rate: Any
    ) -> None:
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
        first = hash((url, chunk.shape)) % 1000 * 100 + 10 * number
        self._keys = [CacheEngineKey("bench", 1, 0, first + i, torch.bfloat16) for i in range(count)]
        self._object = self._memory.allocate([torch.Size(chunk.shape)], [torch.bfloat16], MemoryFormat.KV_2LTD)
        self._object.tensor.copy_(hw.to_torch(chunk.view(hw.bfloat16.numpy)))
        self._value = self._remote.serializer.serialize(self._object)
        self.stored = len(self._value.byte_array)
        self.put()

    def put(self) -> None:
        """Serialise and store the chunks, one while the one before is on its way, as LMCache does."""
        for task in [self._remote.submit_put_task(key, self._object) for key in self._keys]:
            task.result(60)

    def put_and_get(self) -> None:
        """Store, fetch and deserialise the chunks."""
        self.put()
        for found in self._fetch():
            found.ref_count_down()

    def serialize(self) -> None:
        """Without a store."""
        self._remote.serializer.serialize(self._object).ref_count_down()

    def deserialize(self) -> None:
        """Without a store."""
        self._value.ref_count_up()  # it is given back when it has been read
        self._remote.deserializer.deserialize(self._value).ref_count_down()

    def is_whole(self) -> bool:
        """Whether what comes back has the bits that went."""
        mine, same = hw.from_torch(self._object.tensor).view(np.uint16), True
        for found in self._fetch():
            same &= np.array_equal(hw.from_torch(found.tensor).view(np.uint16), mine)
            found.ref_count_down()
        return same

    def close(self) -> None:
        """Give the memory back. (To close its Redis connector LMCache waits for the loop that it waits in.)"""
        self._value.ref_count_down()
        self._object.ref_count_down()
        if not self._remote.remote_url.startswith("redis"):
            self._remote.close()

    def _fetch(self) -> list[Any]:
        found = self._remote.batched_get_blocking(self._keys)
        assert None not in found, "LMCache found less"
        return list(found)


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
    """LMCache's own server, in a process of its own; `rate` bytes a second at most on the way back."""
    command = [sys.executable, __file__, str(rate or 0)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        port = next(int(line.split()[1]) for line in child.stdout if line.startswith("port "))
        try:
            yield port
        finally:
            child.kill()


def _serve(rate: int) -> None:
    from lmcache.v1.server.__main__ import LMCacheServer

    class Server(LMCacheServer):  # type: ignore[misc]
        def handle_client(self, client_socket: socket.socket) -> None:
            if rate:
                client_socket.setsockopt(socket.SOL_SOCKET, _PACING, rate)
            super().handle_client(client_socket)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Server("127.0.0.1", port, "cpu")
    print(f"port {port}", flush=True)
    server.run()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
