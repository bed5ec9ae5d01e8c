"""What is measured, in groups; each adds its rows to the results. Targets are ratios within one run."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import interpreted
import numpy as np
import xxhash
import zstandard
from caches import compressible, copy_of, entropy_ratio, pool_of, tensor_of
from layouts import layouts
from lmcache_stores import lmcache
from measure import Results
from operations import operations
from peers import peers
from stores import files_elsewhere, ray_objects, redis_values
from transport_groups import transfers
from vllm_folder import vllm

import hurray_wire as hw
from hurray_wire import indices
from hurray_wire.arrays import as_bytes
from hurray_wire.structs import descriptor as declared

MiB = 1 << 20


def descriptors(results: Results, quick: bool) -> None:
    """The fused descriptor against interpreted construct."""
    data = tensor_of(pool_of(MiB)).descriptor.encode()
    fields, parsed = declared.parse_descriptor(data), declared.DESCRIPTOR.parse(data)
    took = results.race(
        {
            "parse": lambda: declared.parse_descriptor(data),
            "construct parse": lambda: declared.DESCRIPTOR.parse(data),
            "build": lambda: declared.build_descriptor(fields),
            "construct build": lambda: declared.DESCRIPTOR.build(parsed),
        }
    )
    for name, bound in (("parse", 40), ("build", 25)):
        slow = took[f"construct {name}"]
        row = results.add("descriptor", f"interpreted {name}", slow, took[name], f"fused {name}", at_least=bound)
        row.note = f"fused {took[name] * 1e6:.2f} us"


def frames(results: Results, quick: bool) -> None:
    """Costs per frame that must not depend on the pool.

    A frame in 12 us and its encoding in 15 us were asked for where construct's interpreter reads the descriptor in
    55 us, with 1.3 of both for noise: so they are held against the interpreter in the same run.
    """
    sizes = [MiB, 16 * MiB] if quick else [MiB, 16 * MiB, 256 * MiB, 1024 * MiB]
    work: dict[str, Callable[[], object]] = {}
    for size in sizes:
        tensor = tensor_of(pool_of(size))
        blob = hw.encode_buffer(tensor)
        name = f"{size // MiB} MiB"
        work[f"decode, payload not verified, {name}"] = partial(hw.decode, blob, verify=False)
        work[f"encode_parts, no payload checksum, {name}"] = partial(hw.encode_parts, tensor, checksum=False)
        if size == MiB:
            assert interpreted.agrees(blob)
            work["interpreted"] = partial(interpreted.decode, blob)
            work["construct"] = partial(declared.DESCRIPTOR.parse, tensor.descriptor.encode())
    took = results.race(work)
    interpreter = "interpreted descriptor"
    for verb, asked in (("decode, payload not verified", 12), ("encode_parts, no payload checksum", 15)):
        least = took[f"{verb}, 1 MiB"]
        bound = round(1.3 * asked / 55, 3)
        row = results.add("one frame", f"{verb}, 1 MiB", least, took["construct"], interpreter, at_most=bound)
        row.note = f"{asked} us are {asked / 55:.3f}; it took {took['construct'] * 1e6:.0f} us"
        for size in sizes[1:]:
            name = f"{verb}, {size // MiB} MiB"
            flat = 1.2 if verb.startswith("decode") else None
            results.add("one frame", name, took[name], least, "1 MiB", at_most=flat)
    results.add("one frame", "the whole frame, interpreted", took["interpreted"], took["construct"], interpreter)
    _many_frames(results)


def _many_frames(results: Results) -> None:
    """A cache of 160 small frames, layer by layer."""
    small = tensor_of(pool_of(16 << 10, (16, 2, 8)), entries=64, num_seqs=8)
    frames = [hw.encode(small.replace(layer_index=i), sequence=i, last=i == 159) for i in range(160)]
    many = b"".join(frames)
    assert all(map(interpreted.agrees, frames[:2]))
    took = results.race(
        {
            "160 frames of 16 KiB": lambda: sum(1 for _ in hw.iter_decode(many, verify=False)),
            "160 frames of 16 KiB, verified": lambda: sum(1 for _ in hw.iter_decode(many)),
            "interpreted": lambda: list(map(interpreted.decode, frames)),
        }
    )
    for name, bound in (("160 frames of 16 KiB", 0.08), ("160 frames of 16 KiB, verified", None)):
        row = results.add("one frame", name, took[name], took["interpreted"], "interpreted", at_most=bound)
        row.note = f"{took[name] / 160e-6:.1f} us each"


def memory(results: Results, quick: bool) -> None:
    """Encoding and decoding whole pools against a warm copy."""
    for size in [16 * MiB] if quick else [16 * MiB, 256 * MiB]:
        _memory_of(results, size)


def _memory_of(results: Results, size: int) -> None:
    pool = pool_of(size)
    tensor = tensor_of(pool)
    blob = hw.encode_buffer(tensor)
    reused = np.empty(hw.encoded_size(tensor), np.uint8)
    raw = pool.reshape(-1).view(np.uint8)
    mine = np.zeros_like(pool)
    ids = np.random.default_rng(2).permutation(len(pool))
    took = results.race(
        {
            "copy": copy_of(pool),
            "encode_into, no payload checksum": lambda: hw.encode_into(tensor, reused, checksum=False, threads=1),
            "encode_into": lambda: hw.encode_into(tensor, reused),
            "encode_into, one thread": lambda: hw.encode_into(tensor, reused, threads=1),
            "NumPy's copy, then xxh3 of each 4 MiB": lambda: _copied_and_hashed(raw, reused[:size]),
            "encode_parts": lambda: hw.encode_parts(tensor, threads=1),
            "encode_buffer (fresh)": lambda: hw.encode_buffer(tensor),
            "encode (fresh bytes)": lambda: hw.encode(tensor),
            "decode, verified": lambda: hw.decode(blob, threads=1),
            "decode, verified, threads": lambda: hw.decode(blob),
            "decode, copied": lambda: hw.decode(blob, copy=True, verify=False),
            "decode_into, scattered": lambda: hw.decode_into(blob, mine, ids, verify=False, threads=1),
            "decode_into, verified": lambda: hw.decode_into(blob, mine, ids, threads=1),
            "gather all": lambda: [tensor.gather(seq) for seq in range(tensor.num_seqs)],
        }
    )
    bounds = {"encode_into, no payload checksum": 1.10, "encode_into": 1.75, "decode, verified": 1.0}
    for name in list(took)[1:]:
        results.add(f"{size // MiB} MiB", name, took[name], took["copy"], "copy", at_most=bounds.get(name))


def _copied_and_hashed(source: Any, target: Any) -> list[int]:
    np.copyto(target, source)
    return [xxhash.xxh3_64_intdigest(target[at : at + 4 * MiB]) for at in range(0, target.size, 4 * MiB)]


def validation(results: Results, quick: bool) -> None:
    """The validator against one read pass over a table."""
    for count in [1000, 100_000] if quick else [1000, 100_000, 1_000_000, 10_000_000]:
        _validation_of(results, count)


def _validation_of(results: Results, count: int) -> None:
    table = np.random.default_rng(0).integers(0, 1000, count).astype(np.uint32)
    ptr = np.linspace(0, count, count + 1).astype(np.uint32)
    took = results.race(
        {
            "read pass": lambda: table.max(),
            "validate": lambda: (indices.check_seq_ptr(ptr, count), indices.check_block_table(table, 1000)),
        }
    )
    bound = 3.2 if count == 1_000_000 else None
    name = f"{count:,} + {count:,} entries"
    results.add("validation", name, took["validate"], took["read pass"], "read pass", at_most=bound)


def compression(results: Results, quick: bool) -> None:
    """The chunk codec against a copy, plain zstd level 1, and blosc2 where it is installed."""
    size = (8 if quick else 64) * MiB
    for name, bounds in _BOUNDS.items():
        _compression_of(results, name, size, bounds, quick)


class _Bounds(NamedTuple):
    """Least ratio; copies that encoding and decoding may take without payload checksums; and what part of the time of
    zstd level 1, since the speeds of copies and of cores do not go together."""

    ratio: float = 1.0
    encode: float | None = None
    decode: float | None = None
    of_zstd_encode: float | None = None
    of_zstd_decode: float | None = None


_BOUNDS = {
    "bf16": _Bounds(1.47, 7, 5, 1 / 1.25, 1 / 1.7),
    "fp16": _Bounds(1.17, 7, 5.5),
    "fp8": _Bounds(1.21),
    "int8": _Bounds(1.25),
    "noise": _Bounds(0.999),
    "half empty": _Bounds(),
}


def _compression_of(results: Results, name: str, size: int, bounds: _Bounds, quick: bool) -> None:
    pool = compressible(name, size)
    tensor = tensor_of(pool)
    raw = pool.reshape(-1).view(np.uint8)
    reused = np.empty(hw.encoded_size(tensor, compression="zstd"), np.uint8)
    blob = bytes(hw.encode_buffer(tensor, compression="zstd"))
    plain = zstandard.ZstdCompressor(level=1).compress(raw.data)
    out = np.empty_like(pool)
    memory = as_bytes(hw.encode_buffer(tensor))  # as large, and aligned
    work: dict[str, Callable[[], object]] = {
        "copy": copy_of(pool),
        _ENCODE: lambda: hw.encode_into(tensor, reused, compression="zstd", threads=1, checksum=False),
        "encode_into": lambda: hw.encode_into(tensor, reused, compression="zstd", threads=1),
        "encode_into, threads": lambda: hw.encode_into(tensor, reused, compression="zstd"),
        _PARTS: lambda: hw.encode_parts(tensor, compression="zstd", threads=1, checksum=False),
        "encode_parts": lambda: hw.encode_parts(tensor, compression="zstd", threads=1),
        _DECODE: lambda: hw.decode(blob, alloc=lambda nbytes, _: memory[:nbytes], threads=1, verify=False),
        "decode_into": lambda: hw.decode_into(blob, out, range(len(pool)), threads=1),
        "decode_into, threads": lambda: hw.decode_into(blob, out, range(len(pool))),
        "zstd 1 encode": lambda: zstandard.ZstdCompressor(level=1).compress(raw.data),
        "zstd 1 decode": lambda: zstandard.ZstdDecompressor().decompress(plain),
    }
    work |= _blosc2(raw, pool.itemsize)
    if name == "bf16":
        work |= _zipnn(raw)
    took = results.race(work)
    group = f"compression, {name} ({size // MiB} MiB)"
    note = f"zstd 1: {raw.size / len(plain):.3f}; what the bytes' distribution allows: {entropy_ratio(pool):.3f}"
    results.value(group, "ratio", tensor.nbytes / len(blob), at_least=bounds.ratio, note=note)
    within: dict[str, float | None] = {}
    if not quick:  # 8 MiB stay in the cache
        within |= {_ENCODE: bounds.encode, _DECODE: bounds.decode}
    if name == "noise":  # stored as it is, and not copied
        within[_PARTS] = 0.5
    for verb in list(took)[1:]:
        results.add(group, verb, took[verb], took["copy"], "copy", at_most=within.get(verb))
    for verb, theirs, bound in (
        (_ENCODE, "zstd 1 encode", bounds.of_zstd_encode),
        (_DECODE, "zstd 1 decode", bounds.of_zstd_decode),
    ):
        if bound is not None:
            results.add(group, verb, took[verb], took[theirs], theirs, at_most=bound)


_ENCODE, _PARTS = "encode_into, no payload checksum", "encode_parts, no payload checksum"
_DECODE = "decode into reused memory, not verified"


def _zipnn(raw: Any) -> dict[str, Callable[[], object]]:
    """zipnn changes what it is given, so each time it is given a copy."""
    try:
        from zipnn import ZipNN
    except ImportError:
        return {}
    codec = ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
    packed = codec.compress(bytearray(raw))
    return {
        "zipnn encode": lambda: codec.compress(bytearray(raw)),
        "zipnn decode": lambda: codec.decompress(packed),
    }


def _blosc2(raw: Any, itemsize: int) -> dict[str, Callable[[], object]]:
    try:
        import blosc2
    except ImportError:
        return {}
    blosc2.set_nthreads(1)
    codec = {"typesize": max(itemsize, 2), "clevel": 1, "filter": blosc2.Filter.SHUFFLE, "codec": blosc2.Codec.ZSTD}
    packed = blosc2.compress2(raw, **_blosc2_parameters(blosc2, codec))
    return {
        "blosc2 encode": lambda: blosc2.compress2(raw, **_blosc2_parameters(blosc2, codec)),
        "blosc2 decode": lambda: blosc2.decompress2(packed),
    }


def _blosc2_parameters(blosc2: Any, codec: dict[str, Any]) -> dict[str, Any]:
    return {
        "typesize": codec["typesize"],
        "clevel": codec["clevel"],
        "codec": codec["codec"],
        "filters": [codec["filter"]],
        "nthreads": 1,
    }


def files(results: Results, quick: bool) -> None:
    """A file written and mapped."""
    pool = pool_of((16 if quick else 256) * MiB)
    tensor = tensor_of(pool)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.hrkv"

        def write() -> None:
            with hw.StreamWriter(path) as writer:
                writer.write(tensor)

        def plain() -> None:
            with (Path(folder) / "plain").open("wb", buffering=0) as file:
                file.write(memoryview(pool.reshape(-1).view(np.uint8)))
                os.fsync(file.fileno())

        write()

        def mapped() -> hw.BlockPagedTensor:
            with path.open("rb") as file:
                return hw.decode_from(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), verify=False)[0]

        def one() -> object:
            with hw.open_frame(path) as frame:
                return frame.gather(3)

        took = results.race({"write": write, "plain": plain, "mapped": mapped, "one": one})
    results.add("files", "write a stream", took["write"], took["plain"], "plain write with fsync")
    results.add("files", "map and decode, payload not verified", took["mapped"])
    results.add("files", "open_frame and gather one sequence, verified", took["one"])


def start(results: Results, quick: bool) -> None:
    """What a process pays before its first frame: the package's import, and the command's on a small frame."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.hrkv"
        path.write_bytes(hw.encode(tensor_of(pool_of(MiB))))
        programs = {
            "numpy": "import numpy",
            "package": "import hurray_wire",
            "dump": f"from hurray_wire.dump import main; main([{str(path)!r}])",
        }
        work = {name: partial(_python, program) for name, program in programs.items()}
        took = results.race(work, dict.fromkeys(work, 1))
    beyond = f"{(took['package'] - took['numpy']) * 1e3:.0f} ms beyond numpy; 150 are allowed"
    results.add("start", "import hurray_wire", took["package"], took["numpy"], "import numpy").note = beyond
    results.add("start", "hurray-dump of a frame of 1 MiB", took["dump"], took["numpy"], "import numpy")


def _python(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def sockets(results: Results, quick: bool) -> None:
    """A stream between two processes over a Unix socket, TCP and a pipe, against bare loops."""
    size = (64 if quick else 1024) * MiB
    pool = pool_of(size // 16)
    tensor = tensor_of(pool)
    for kind in ("unix", "tcp", "pipe"):
        _sockets_of(results, kind, size, pool, tensor)


def _sockets_of(results: Results, kind: str, size: int, pool: Any, tensor: hw.BlockPagedTensor) -> None:
    contenders = {
        "bare loop": lambda: _bare(kind, pool, 16),
        "stream": lambda: _stream(kind, tensor, 16, {"checksum": False}, {"verify": False}),
        "stream, verified": lambda: _stream(kind, tensor, 16, {}, {}),
        "stream, read_into": lambda: _stream(kind, tensor, 16, {"checksum": False}, {"verify": False}, into=True),
    }
    took = results.race(contenders, dict.fromkeys(contenders, 1))
    bounds = {"stream": 1.1, "stream, verified": 1.5, "stream, read_into": 1.4}
    for name in list(took)[1:]:
        bound = bounds[name] if kind != "pipe" else None
        group = f"sockets and pipes, {size // MiB} MiB"
        results.add(group, f"{kind}: {name}", took[name], took["bare loop"], "bare loop", at_most=bound)


def _pair(kind: str) -> tuple[Any, Any]:
    """What is written to, and what is read from."""
    if kind == "pipe":
        reading, writing = os.pipe()
        return open(writing, "wb", buffering=0), open(reading, "rb", buffering=0)  # noqa: PTH123
    if kind == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        return left, server.accept()[0]


def _forked(kind: str, send: Callable[[Any], None], receive: Callable[[Any], None]) -> None:
    """The sender in a child process, the receiver here."""
    left, right = _pair(kind)
    child = os.fork()
    if not child:
        right.close()
        send(left)
        left.close()
        os._exit(0)
    left.close()
    receive(right)
    right.close()
    os.waitpid(child, 0)


def _bare(kind: str, pool: Any, times: int) -> None:
    payload = memoryview(pool.reshape(-1).view(np.uint8))
    target = memoryview(_reused(payload.nbytes))

    def send(sink: Any) -> None:
        for _ in range(times):
            at = 0
            while at < len(payload):
                at += os.write(sink.fileno(), payload[at:])

    def receive(source: Any) -> None:
        for _ in range(times):
            at = 0
            while at < len(target):
                at += os.readv(source.fileno(), [target[at:]])

    _forked(kind, send, receive)


_memory: dict[int, Any] = {}


def _reused(nbytes: int) -> Any:
    """Memory that has been touched before, as a receiver that keeps its buffers has."""
    if nbytes not in _memory:
        _memory[nbytes] = np.ones(nbytes, np.uint8)
    return _memory[nbytes]


def _stream(kind: str, tensor: hw.BlockPagedTensor, times: int, sending: Any, reading: Any, into: bool = False) -> None:
    pool = _reused(tensor.page_pool.nbytes).view(np.float16).reshape(tensor.page_pool.shape)
    ids = np.random.default_rng(3).permutation(len(pool))

    def send(sock: Any) -> None:
        with hw.StreamWriter(sock, **sending) as writer:
            for _ in range(times):
                writer.write(tensor)

    def alloc(nbytes: int, alignment: int) -> Any:
        block = _reused(nbytes + alignment)
        start = -block.ctypes.data % alignment
        return block[start : start + nbytes]

    def receive(sock: Any) -> None:
        with hw.StreamReader(sock, alloc=None if into else alloc, **reading) as reader:
            for header in iter(reader.next_header, None):
                if into:
                    header.read_into(pool, ids)
                else:
                    header.read()

    _forked(kind, send, receive)


GROUPS: dict[str, Callable[[Results, bool], None]] = {
    "descriptors": descriptors,
    "frames": frames,
    "memory": memory,
    "validation": validation,
    "compression": compression,
    "files": files,
    "sockets": sockets,
    "start": start,
    "engines": layouts,
    "operations": operations,
    "peers": peers,
    "redis": redis_values,
    "fsspec": files_elsewhere,
    "ray": ray_objects,
    "lmcache": lmcache,
    "vllm": vllm,
    "transfers": transfers,
}
