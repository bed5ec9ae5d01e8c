"""The connector's folder against the same folder holding raw bytes: one request's layers saved, and loaded elsewhere.

Both take a request's blocks out of vLLM's packed cache, write beside, sync and rename, and put the tokens into other
blocks of another cache. Raw bytes are a file a layer, read by somebody who knows what they are.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from caches import real_bits
from measure import Results

import hurray_wire as hw
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
