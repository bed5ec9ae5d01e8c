"""Stores that keep frames, against the same store holding the pool's bytes as they are. Each is skipped where it is
not installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from caches import pool_of, tensor_of
from measure import Results

import hurray_wire as hw

MiB = 1 << 20
ROOT = Path(__file__).resolve().parent.parent.parent


def batch(nbytes: int) -> tuple[hw.BlockPagedTensor, memoryview]:
    """A tensor, and the bytes of its pool."""
    pool = pool_of(nbytes)
    return tensor_of(pool), memoryview(pool.reshape(-1).view(np.uint8))


def compared(
    results: Results,
    group: str,
    work: dict[str, Callable[[], object]],
    against: dict[str, str],
    bounds: dict[str, float],
) -> None:
    """A race, each row against the contender that it is named to be against."""
    took = results.race(work, dict.fromkeys(work, 1))
    for name in work:
        base = against.get(name)
        results.add(group, name, took[name], took[base] if base else None, base or "", at_most=bounds.get(name))


def redis_values(results: Results, quick: bool) -> None:
    """Frames by key in a Redis server on loopback."""
    with redis_on_loopback() as port:
        if port is None:
            results.skip("redis", "needs the redis package, and redis-server")
            return
        import redis

        with redis.Redis(port=port) as client:
            for size in [16 * MiB] if quick else [16 * MiB, 256 * MiB]:
                _redis_of(results, client, size)


@contextmanager
def redis_on_loopback() -> Iterator[int | None]:
    """The port of a server of one's own; None where there is none, or no client."""
    command = shutil.which("redis-server") or shutil.which("valkey-server")
    try:
        import redis
    except ImportError:
        command = None
    if command is None:
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        words = [command, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        try:
            for _ in range(100):
                try:
                    with redis.Redis(port=port) as client:
                        client.ping()
                    break
                except redis.exceptions.ConnectionError:
                    time.sleep(0.05)
            yield port
        finally:
            process.kill()
            process.wait()


def _redis_of(results: Results, client: Any, size: int) -> None:
    from hurray_wire.integrations.redis import RedisStore

    tensor, raw = batch(size)
    store = RedisStore(client)
    small = tensor.replace(layer_index=4)
    mine, ids = np.zeros_like(tensor.page_pool), np.random.default_rng(2).permutation(tensor.num_pages)
    work: dict[str, Callable[[], object]] = {
        "set raw bytes": lambda: client.set("raw", raw),
        "put": lambda: store.put("frame", tensor),
        "get raw bytes": lambda: client.get("raw"),
        "get, verified": lambda: store.get("frame"),
        "get, not verified": lambda: store.get("frame", verify=False),
        "get_into pages, verified": lambda: store.get_into("frame", mine, ids),
        "open and gather one sequence": lambda: store.open("small").gather(3),
    }
    client.set("raw", raw)
    store.put("frame", tensor)
    store.put("small", small, chunk_bytes=256 << 10)
    against = dict.fromkeys(list(work)[3:], "get raw bytes") | {"put": "set raw bytes"}
    compared(results, f"redis, {size // MiB} MiB", work, against, {"get, verified": 1.0, "put": 1.5})
    client.flushall()


def files_elsewhere(results: Results, quick: bool) -> None:
    """Frames in files of fsspec's file systems: this machine's, one in memory, and one that takes time to answer."""
    try:
        import fsspec
    except ImportError:
        results.skip("fsspec", "needs the fsspec package")
        return
    size = (8 if quick else 64) * MiB
    with tempfile.TemporaryDirectory() as folder:
        _files_of(results, "local", fsspec.filesystem("file"), f"{folder}/frames", size)
    memory = fsspec.filesystem("memory")
    _files_of(results, "memory", memory, "/hurray_wire/frames", size)
    _files_of(results, "20 ms a request", _slow(memory), "/hurray_wire/frames", size)
    memory.rm("/hurray_wire", recursive=True)


def _slow(memory: Any) -> Any:
    """The same files, each request a fiftieth of a second later: an object store not far away."""

    class Slow(type(memory)):  # type: ignore[misc]
        cachable = False

        def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> Any:
            time.sleep(0.02)
            return super().cat_file(path, start, end)

        def cat_ranges(self, paths: Any, starts: Any, ends: Any, **options: Any) -> Any:
            time.sleep(0.02)  # all at once, as asynchronous stores do
            read = super().cat_file
            return [read(path, start, end) for path, start, end in zip(paths, starts, ends, strict=True)]

    return Slow()


def _files_of(results: Results, name: str, fs: Any, path: str, size: int) -> None:
    from hurray_wire.integrations.fsspec import FrameFile, FrameFileWriter

    tensor, raw = batch(size // 4)
    layers = [tensor.replace(layer_index=n) for n in range(4)]
    flat = bytes(raw) * 4

    def write(where: str) -> None:
        with FrameFileWriter(where, fs=fs, chunk_bytes=256 << 10) as writer:
            for layer in layers:
                writer.write(layer)

    write(path)
    fs.pipe_file(path + ".raw", flat)
    file = FrameFile(path, fs=fs)
    each = tensor.page_pool.nbytes

    def write_raw() -> None:
        with fs.open(path + ".raw2", "wb") as opened:
            opened.write(flat)

    work: dict[str, Callable[[], object]] = {
        "write raw bytes": write_raw,
        "write 4 frames and the index": lambda: write(path + "2"),
        "read a layer's raw bytes": lambda: fs.cat_file(path + ".raw", 2 * each, 3 * each),
        "read a layer, verified": lambda: file.tensor(layer_index=2),
        "read a layer, not verified": lambda: file.tensor(layer_index=2, verify=False),
        "read one sequence of a layer": lambda: file.gather(3, layer_index=2),
        "open the file and read one sequence": lambda: FrameFile(path, fs=fs).gather(3, layer_index=2),
    }
    against = dict.fromkeys(list(work)[3:], "read a layer's raw bytes")
    against["write 4 frames and the index"] = "write raw bytes"
    compared(results, f"fsspec, {name}, {size // MiB} MiB", work, against, {})


def ray_objects(results: Results, quick: bool) -> None:
    """Frames in a Ray object store on this machine."""
    try:
        import ray
    except ImportError:
        results.skip("ray", "needs the ray package")
        return
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    sizes = [16 * MiB] if quick else [64 * MiB, 1024 * MiB]
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        configure_logging=False,
        log_to_driver=False,
        object_store_memory=max(256 * MiB, 6 * sizes[-1]),
    )
    try:
        for size in sizes:
            _ray_of(results, ray, size)
    finally:
        ray.shutdown()


def _ray_of(results: Results, ray: Any, size: int) -> None:
    from hurray_wire.integrations.ray import get, put

    tensor, raw = batch(size)
    flat = np.frombuffer(raw, np.uint8)
    kept, frame, plain = ray.put(flat), put(tensor), ray.put(tensor)
    work: dict[str, Callable[[], object]] = {
        "put raw bytes": lambda: ray.put(flat),
        "put a frame": lambda: put(tensor),
        "put a frame, no payload checksum": lambda: put(tensor, checksum=False),
        "put a plain tensor": lambda: ray.put(tensor),
        "get raw bytes": lambda: ray.get(kept),
        "get raw bytes and read them once": lambda: ray.get(kept).view(np.uint64).max(),
        "get a frame, verified": lambda: get(frame),
        "get a frame, not verified": lambda: get(frame, verify=False),
        "get a plain tensor": lambda: ray.get(plain),
    }
    against = {
        "put a frame": "put raw bytes",
        "put a frame, no payload checksum": "put raw bytes",
        "put a plain tensor": "put raw bytes",
        "get a frame, verified": "get raw bytes and read them once",
        "get a frame, not verified": "get raw bytes",
        "get a plain tensor": "get raw bytes",
    }
    compared(results, f"ray, {size // MiB} MiB", work, against, {})
