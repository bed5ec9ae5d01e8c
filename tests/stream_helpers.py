"""What the stream tests share: small tensors, streams of them, odd sources and sinks, children that may be killed."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import zstandard
from frames import BLOCK_TABLE, DESCRIPTOR, PAGE_POOL, SEQ_LENS, SEQ_PTR, Section, build, worked_sections
from support import POOL, ROOT, desc

import hurray_wire as hw

Array = npt.NDArray[Any]
TENSOR = hw.BlockPagedTensor
PATIENCE = 60.0
"""Seconds after which something hangs: far more than anything here takes on a busy machine."""


def sample(layer: int = 0, *, pages: int = 6, numpy: Any = np.float16, **changes: Any) -> TENSOR:
    """A tensor of small numbers (they compress), two sequences, pages in no order, the last one not full."""
    rng = np.random.default_rng(layer + 1)
    pool = rng.integers(0, 40, (pages, 4, 2, 8)).astype(numpy)
    half = pages // 2
    arguments: dict[str, Any] = {
        "block_table": rng.permutation(pages),
        "seq_ptr": [0, half, pages],
        "seq_lens": [half * 4, max(0, (pages - half) * 4 - 3)],
        "layer_index": layer,
    }
    return TENSOR(changes.pop("page_pool", pool), **arguments | changes)


def large(layer: int, *, pages: int = 64, page_size: int = 16, dim: int = 64, noise: bool = False) -> TENSOR:
    """A tensor of `pages` pages of 8 KiB (by default): more than a socket holds."""
    rng = np.random.default_rng(layer)
    pool = rng.integers(0, 65000 if noise else 30, (pages, page_size, 4, dim)).astype(np.uint16)
    table = rng.permutation(pages)
    lens = [pages * page_size]
    return TENSOR(pool, block_table=table, seq_ptr=[0, pages], seq_lens=lens, layer_index=layer)


def per_block(layer: int = 0, *, pages: int = 5, asymmetric: bool = True, numpy: Any = np.int8) -> TENSOR:
    """Scales (and zero points) a slot, all of them different."""
    rng = np.random.default_rng(layer)
    pool = rng.integers(0, 100, (pages, 4, 2, 8)).astype(numpy)
    scales = rng.uniform(0.5, 2, (pages, 4)).astype(np.float32)
    zeros = rng.integers(0, 50, (pages, 4)).astype(np.int32) if asymmetric else None
    more = {"quantization": "per_block", "scales": scales, "zero_points": zeros}
    return sample(layer, pages=pages, page_pool=pool, **more)


def int4(layer: int = 0, *, pages: int = 6, **changes: Any) -> TENSOR:
    """A packed pool: 32 bytes a page."""
    packed = np.random.default_rng(layer).integers(0, 256, pages * 32).astype(np.uint8)
    sizes = {"dtype": "int4", "page_size": 4, "num_heads": 2, "head_dim": 8}
    return sample(layer, pages=pages, page_pool=packed, **sizes | changes)


def kinds() -> dict[str, TENSOR]:
    """A tensor of every kind that a reader treats differently."""
    swapped = sample(3, numpy=">f4")
    empty: dict[str, Any] = {"block_table": [], "seq_ptr": [0], "seq_lens": []}
    return {
        "float16": sample(0),
        "bfloat16": sample(1, numpy=ml_dtypes.bfloat16),
        "strided": sample(2, page_pool=np.arange(6 * 4 * 2 * 16, dtype=np.int32).reshape(6, 4, 2, 16)[..., ::2]),
        "swapped": swapped,
        "per_block": per_block(4),
        "int4": int4(5),
        "uint64": sample(6, index_type="uint64"),
        "no-batch": sample(7, **empty),
        "no-pages": sample(8, pages=0, **empty),
        "no-heads": sample(9, page_pool=np.zeros((6, 4, 0, 8), np.float16)),
        "large": large(10, pages=12),
    }


def encoded(tensors: Iterable[TENSOR], **options: Any) -> bytes:
    """The tensors as one stream."""
    sink = io.BytesIO()
    with hw.StreamWriter(sink, **options) as writer:
        for tensor in tensors:
            writer.write(tensor)
    return sink.getvalue()


def frames_of(tensors: Iterable[TENSOR], *, closed: bool = True, stream_id: int = 77, **options: Any) -> list[bytes]:
    """The frames of a stream, one by one, for taking some away."""
    frames = [hw.encode(t, sequence=i, last=False, stream_id=stream_id, **options) for i, t in enumerate(tensors)]
    return [*frames, closing(len(frames), stream_id)] if closed else frames


def closing(sequence: int, stream_id: int = 77) -> bytes:
    """A closing frame of 64 bytes."""
    return build([], sequence=sequence, stream_id=stream_id)


def as_sent(tensor: TENSOR, framing: str = "hrkv") -> TENSOR:
    """The tensor as this form can carry it: the bare one forgets seq_lens."""
    return hw.decode(hw.encode(tensor, framing=framing))  # type: ignore[arg-type]  # a name of the two


def coded_tables() -> bytes:
    """A frame whose block_table is compressed, in two chunks, and whose seq_ptr is: lawful, though we write neither."""
    table = np.repeat(np.arange(5, dtype="<u4"), 400)
    ptr = np.arange(0, 2001, 1, dtype="<u4")
    head = desc(shape=(2000, 2, 8), num_seqs=2000, sizes=(640, table.nbytes, ptr.nbytes))
    lens = np.ones(2000, "<u4").tobytes()
    halves = (table[:1000].tobytes(), table[1000:].tobytes())
    sections = [Section(DESCRIPTOR, head), Section(SEQ_LENS, lens), Section(PAGE_POOL, POOL.tobytes())]
    sections += [coded(BLOCK_TABLE, half, i * len(halves[0])) for i, half in enumerate(halves)]
    sections.append(coded(SEQ_PTR, ptr.tobytes()))
    return build(sections)


def coded(kind: int, data: bytes, raw_offset: int = 0) -> Section:
    """A compressed section."""
    stored = zstandard.ZstdCompressor().compress(data)
    return Section(kind, stored, raw_offset=raw_offset, raw_length=len(data), codec=1)


def mixed_chunks() -> bytes:
    """The worked example with a pool of 64 pages, its chunks raw and compressed in turn."""
    pool = np.resize(POOL, (64, 4, 2, 8))
    pieces = [pool[i : i + 16].tobytes() for i in range(0, 64, 16)]
    chunks = [
        coded(PAGE_POOL, piece, i * 2048) if i % 2 else Section(PAGE_POOL, piece, raw_offset=i * 2048)
        for i, piece in enumerate(pieces)
    ]
    head = Section(DESCRIPTOR, desc(num_pages=64, sizes=(8192, 12, 12)))
    others = [s for s in worked_sections() if s.kind not in (DESCRIPTOR, PAGE_POOL)]
    return build(sorted([head, *chunks, *others], key=lambda s: s.kind))


# Sources.


class Dribble(io.RawIOBase):
    """A file that gives 1 to 7 bytes a call."""

    def __init__(self, data: bytes, seed: int = 3) -> None:
        self.inner = io.BytesIO(data)
        self.random = random.Random(seed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self.inner.readinto(memoryview(buffer)[: self.random.randint(1, 7)])


class Metered:
    """A callable source that counts what is taken from it."""

    def __init__(self, data: bytes) -> None:
        self.inner = io.BytesIO(data)

    def __call__(self, memory: memoryview) -> int:
        return self.inner.readinto(memory)

    @property
    def taken(self) -> int:
        return self.inner.tell()


class OnlyRead:
    """A file object with `read` alone."""

    def __init__(self, data: bytes) -> None:
        self.inner = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self.inner.read(size)


class OnlyFileno:
    """Anything with `fileno()`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def fileno(self) -> int:
        return self.fd


# Moving bytes.


@contextmanager
def fed(send: Callable[[bytes], Any], pieces: Iterable[bytes], close: Callable[[], None]) -> Iterator[None]:
    """A thread that sends pieces and closes; it gives up when nobody listens any more."""

    def run() -> None:
        with suppress(OSError):
            for piece in pieces:
                send(piece)
        close()

    thread = Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(PATIENCE)
    assert not thread.is_alive()


@contextmanager
def received(source: Any, close: Callable[[], None]) -> Iterator[list[TENSOR]]:
    """A thread that reads a stream. When it ends, well or not, it closes its end: no writer waits for it for ever."""
    found, failed = list[TENSOR](), list[BaseException]()

    def run() -> None:
        try:
            found.extend(hw.StreamReader(source))
        except BaseException as error:
            failed.append(error)
        finally:
            close()

    thread = Thread(target=run, daemon=True)
    thread.start()
    yield found
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert failed == []


def send_all(fd: int) -> Callable[[bytes], None]:
    def send(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    return send


# Children.


def run_child(module: str, function: str, *arguments: object, timeout: float = 120) -> str:
    """Call `module.function(*arguments)` (strings) in a process of its own, warnings as errors; gives its output."""
    code = f"import sys, {module}; {module}.{function}(*sys.argv[1:])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )
    assert child.returncode == 0, f"exit status {child.returncode}\n{child.stdout}\n{child.stderr}"
    return child.stdout
