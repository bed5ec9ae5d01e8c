"""The connector's folder against the same folder holding raw bytes: one request's layers saved, and loaded elsewhere;
and its streams against the same bytes over a connection, the layers loaded as they come.

Both take a request's blocks out of vLLM's packed cache, write beside, sync and rename, and put the tokens into other
blocks of another cache. Raw bytes are a file a layer, read by somebody who knows what they are.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from caches import real_bits
from measure import Results

import hurray_wire as hw
from hurray_wire.integrations.segment_streams import SegmentStreams
from hurray_wire.integrations.segments import SegmentFolder
from hurray_wire.integrations.vllm_layers import LayerForm
from hurray_wire.integrations.vllm_scheduling import Move, Step
from hurray_wire.integrations.vllm_working import Working

HEADS, SLOTS, DIM = 8, 16, 128
CHUNK = 256


def vllm(results: Results, quick: bool) -> None:
    """A prompt of 1024 tokens, bfloat16; layers of 4 MiB."""
    layers, blocks = (2 if quick else 8), 1024 // SLOTS
    bits = real_bits(layers * blocks * HEADS * SLOTS * 2 * DIM * 2)
    caches = [np.zeros((2 * blocks, HEADS, SLOTS, 2 * DIM), hw.bfloat16.numpy) for _ in range(layers)]
    ids = np.random.default_rng(0).permutation(2 * blocks)[:blocks]
    for cache, part in zip(caches, bits.reshape(layers, blocks, HEADS, SLOTS, 2 * DIM), strict=True):
        cache[ids] = part.view(hw.bfloat16.numpy)
    into = np.random.default_rng(1).permutation(2 * blocks)[:blocks]
    with tempfile.TemporaryDirectory() as name:
        contenders: dict[str, _Raw | _Frames] = {"raw": _Raw(Path(name) / "raw", caches, ids, into)}
        for said, compression in (("frames", None), ("frames, zstd", "zstd")):
            contenders[said] = _Frames(Path(name) / said, caches, ids, into, compression)
        work: dict[str, Callable[[], object]] = {f"save, {said}": each.save for said, each in contenders.items()}
        work |= {f"load, {said}": each.load for said, each in contenders.items()}
        took = results.race(work, dict.fromkeys(work, 1))
        for each in contenders.values():
            each.load()
            for source, target in zip(caches, each.targets, strict=True):
                assert source[ids].tobytes() == target[into].tobytes()
    group = f"vllm, 1024 tokens of {layers} layers in a folder"
    for said in ("frames", "frames, zstd"):
        for verb in ("save", "load"):
            results.add(group, f"{verb}, {said}", took[f"{verb}, {said}"], took[f"{verb}, raw"], f"raw {verb}")
        saved = contenders["raw"].stored / contenders[said].stored
        results.value(group, f"bytes, raw / {said}", saved, at_least=0.99 if said == "frames" else 1.4)
    _streams(results, caches, ids, into)


def _streams(results: Results, caches: list[Any], ids: Any, into: Any) -> None:
    """From one thread to another over loopback, the second one a layer behind."""
    contenders: dict[str, _RawStream | _FrameStream] = {"raw": _RawStream(caches, ids, into)}
    for said, compression in (("frames", None), ("frames, zstd", "zstd")):
        contenders[said] = _FrameStream(caches, ids, into, compression)
    work: dict[str, Callable[[], object]] = {said: each.send_and_load for said, each in contenders.items()}
    took = results.race(work, dict.fromkeys(work, 1))
    group = f"vllm, 1024 tokens of {len(caches)} layers in a stream"
    for said, each in contenders.items():
        for source, target in zip(caches, each.targets, strict=True):
            assert source[ids].tobytes() == target[into].tobytes()
        each.close()
        if said != "raw":
            results.add(group, f"save and load, {said}", took[said], took["raw"], "raw")


class _RawStream:
    """The blocks' bytes, over a connection that stands."""

    def __init__(self, caches: list[Any], ids: Any, into: Any) -> None:
        self.caches, self.ids, self.into = caches, ids, into
        self.targets = [np.zeros_like(cache) for cache in caches]
        self.here, self.there = _connection()

    def send_and_load(self) -> None:
        with _beside(self._send):
            for target in self.targets:
                data = np.empty((len(self.into), *target.shape[1:]), target.dtype)
                rest = memoryview(data.view(np.uint8).reshape(-1))
                while rest:
                    rest = rest[self.there.recv_into(rest) :]
                target[self.into] = data

    def _send(self) -> None:
        for cache in self.caches:
            self.here.sendall(cache[self.ids].view(np.uint8).data)

    def close(self) -> None:
        self.here.close()
        self.there.close()


class _FrameStream:
    """Two connectors' workers."""

    def __init__(self, caches: list[Any], ids: Any, into: Any, compression: Any) -> None:
        self.listening = SegmentStreams(listen="127.0.0.1:0")
        peer = SegmentStreams(peer="{}:{}".format(*self.listening.address), compression=compression)
        form, about = LayerForm("PHSC", SLOTS), {"model": "bench"}
        self.writer, self.reader = (
            Working(store, form, chunk_tokens=CHUNK, metadata=about) for store in (peer, self.listening)
        )
        names = [f"layer.{i}" for i in range(len(caches))]
        self.caches, self.targets = dict(zip(names, caches, strict=True)), [np.zeros_like(cache) for cache in caches]
        self.writer.register(self.caches)
        self.reader.register(dict(zip(names, self.targets, strict=True)))
        self.ids, self.into, self.sent = ids, into, 0

    def send_and_load(self) -> None:
        tokens, self.sent = len(self.ids) * SLOTS, self.sent + 1
        keys = [f"{self.sent:016x}{i:016x}" for i in range(tokens // CHUNK)]
        out = Move("a", keys, 0, 0, tokens, self.ids.tolist())
        self.writer.begin(Step([], [out]))
        with _beside(self._send):
            while not all(self.listening.held(keys)):
                time.sleep(0)
            self.reader.begin(Step([out._replace(block_ids=self.into.tolist())], []))
            self.reader.load()
            for name in self.caches:
                self.reader.wait_for_layer(name)
            self.reader.end()
        assert not self.reader.failures + self.writer.failures
        self.listening.discard(keys)

    def _send(self) -> None:
        for name, cache in self.caches.items():
            self.writer.save_layer(name, cache)
        self.writer.end()

    def close(self) -> None:
        self.listening.close()


@contextmanager
def _beside(work: Callable[[], None]) -> Iterator[None]:
    thread = Thread(target=work)
    thread.start()
    yield
    thread.join()


def _connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    return here, there


class _Raw:
    """A file a layer: the blocks' bytes."""

    def __init__(self, folder: Path, caches: list[Any], ids: Any, into: Any) -> None:
        self.folder, self.caches, self.ids, self.into = folder, caches, ids, into
        self.targets = [np.zeros_like(cache) for cache in caches]
        self.folder.mkdir()
        self.save()
        self.stored = sum(path.stat().st_size for path in folder.iterdir())

    def save(self) -> None:
        for layer, cache in enumerate(self.caches):
            beside = self.folder / f"{layer}.part"
            with beside.open("wb", buffering=0) as file:
                file.write(cache[self.ids].view(np.uint8).data)
                os.fsync(file.fileno())
            beside.replace(self.folder / f"{layer}.bin")

    def load(self) -> None:
        for layer, target in enumerate(self.targets):
            data = np.fromfile(self.folder / f"{layer}.bin", target.dtype)
            target[self.into] = data.reshape(len(self.into), *target.shape[1:])


class _Frames:
    """The connector's worker."""

    def __init__(self, folder: Path, caches: list[Any], ids: Any, into: Any, compression: Any) -> None:
        self.folder = folder
        form, about = LayerForm("PHSC", SLOTS), {"model": "bench"}
        segments = SegmentFolder(folder, compression=compression)
        self.writer, self.reader = (Working(segments, form, chunk_tokens=CHUNK, metadata=about) for _ in range(2))
        names = [f"layer.{i}" for i in range(len(caches))]
        self.caches, self.targets = dict(zip(names, caches, strict=True)), [np.zeros_like(cache) for cache in caches]
        self.writer.register(self.caches)
        self.reader.register(dict(zip(names, self.targets, strict=True)))
        tokens = len(ids) * SLOTS
        keys = [f"{i:032x}" for i in range(tokens // CHUNK)]
        self.out = Move("a", keys, 0, 0, tokens, ids.tolist())
        self.back = self.out._replace(block_ids=into.tolist())
        self.save()
        self.stored = next(path for path in folder.rglob("*.hrkv")).stat().st_size

    def save(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.writer.begin(Step([], [self.out]))
        for name, cache in self.caches.items():
            self.writer.save_layer(name, cache)
        self.writer.end()
        assert not self.writer.failures

    def load(self) -> None:
        self.reader.begin(Step([self.back], []))
        self.reader.load()
        for name in self.caches:
            self.reader.wait_for_layer(name)
        self.reader.end()
        assert not self.reader.failures
