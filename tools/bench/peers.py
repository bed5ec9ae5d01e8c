"""Other ways to put the same pool into bytes and back, those that are installed, beside ours and a memory copy.

None of them checks tables or bytes; those without a copy (pyarrow, pickle out of band) say nothing of pages.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from caches import copy_of, pool_of, tensor_of
from measure import Results, Work

import hurray_wire as hw

KiB, MiB = 1 << 10, 1 << 20


class Peer(NamedTuple):
    """To bytes and back; None where there is nothing of the kind."""

    encode: Work | None
    decode: Work | None


def _ours(tensor: hw.BlockPagedTensor) -> dict[str, Peer]:
    blob = hw.encode_buffer(tensor)
    reused = np.empty(len(blob), np.uint8)
    return {
        "hurray_wire": Peer(lambda: hw.encode_parts(tensor), lambda: hw.decode(blob)),
        "hurray_wire, payload unverified": Peer(
            lambda: hw.encode_parts(tensor, checksum=False), lambda: hw.decode(blob, verify=False)
        ),
        "hurray_wire, one piece": Peer(lambda: hw.encode_into(tensor, reused), lambda: hw.decode(blob, copy=True)),
    }


def _pyhurray(tensor: hw.BlockPagedTensor) -> Peer:
    import hurray

    layout = tensor.layout
    names = ("page_size", "num_pages", "paged_axis", "num_seqs", "kv_role", "layer_index", "block_table_index_type")
    told = hurray.BlockPagedLayout(**{name: getattr(layout, name) for name in names})
    tables = [tensor.block_table.tobytes(), tensor.seq_ptr.tobytes()]
    made = hurray.Tensor(
        tensor.page_pool.tobytes(),
        hurray.Dtype.from_tag(tensor.dtype.tag),
        list(tensor.shape),
        aux_buffers=tables,
        layout=told,
    )

    def write() -> object:
        with hurray.StreamWriter() as writer:
            writer.write(made)
        return writer.getvalue()

    blob = hw.encode(tensor, framing="bare")
    return Peer(write, lambda: list(hurray.StreamReader(blob)))


def _safetensors(tensor: hw.BlockPagedTensor) -> Peer:
    from safetensors.numpy import load, save

    pool = {"pool": tensor.page_pool}
    blob = save(pool)
    return Peer(lambda: save(pool), lambda: load(blob))


def _pickle(tensor: hw.BlockPagedTensor) -> Peer:
    blob = pickle.dumps(tensor.page_pool, protocol=5)
    return Peer(lambda: pickle.dumps(tensor.page_pool, protocol=5), lambda: pickle.loads(blob))


def _pickle_out_of_band(tensor: hw.BlockPagedTensor) -> Peer:
    buffers: list[Any] = []
    head = pickle.dumps(tensor.page_pool, protocol=5, buffer_callback=buffers.append)
    return Peer(
        lambda: pickle.dumps(tensor.page_pool, protocol=5, buffer_callback=[].append),  # type: ignore[arg-type]
        lambda: pickle.loads(head, buffers=buffers),
    )


def _pyarrow(tensor: hw.BlockPagedTensor) -> Peer:
    import pyarrow as pa

    wrapped = pa.Tensor.from_numpy(tensor.page_pool)

    def write() -> object:
        sink = pa.BufferOutputStream()
        pa.ipc.write_tensor(wrapped, sink)
        return sink.getvalue()

    blob = write()
    return Peer(write, lambda: pa.ipc.read_tensor(pa.BufferReader(blob)))


def _torch(tensor: hw.BlockPagedTensor) -> Peer:
    import torch

    wrapped = torch.from_numpy(tensor.page_pool)

    def save() -> bytes:
        file = io.BytesIO()
        torch.save(wrapped, file)
        return file.getvalue()

    blob = save()
    return Peer(save, lambda: torch.load(io.BytesIO(blob), weights_only=True))


def _numpy(tensor: hw.BlockPagedTensor) -> Peer:
    def save() -> bytes:
        file = io.BytesIO()
        np.save(file, tensor.page_pool)
        return file.getvalue()

    blob = save()
    return Peer(save, lambda: np.load(io.BytesIO(blob)))


_PEERS: dict[str, Callable[[hw.BlockPagedTensor], Peer]] = {
    "pyhurray": _pyhurray,
    "safetensors": _safetensors,
    "pickle 5, in band": _pickle,
    "pickle 5, out of band": _pickle_out_of_band,
    "pyarrow tensor IPC": _pyarrow,
    "torch.save, in memory": _torch,
    "np.save, in memory": _numpy,
}


def all_of(tensor: hw.BlockPagedTensor) -> dict[str, Peer]:
    """Ours and every peer that is installed."""
    found = _ours(tensor)
    for name, make in _PEERS.items():
        with suppress(ImportError):
            found[name] = make(tensor)
    return found


def peers(results: Results, quick: bool) -> None:
    """To bytes and back in memory, against a copy of the pool; and our bounds against pyhurray."""
    for size in [16 * MiB] if quick else [16 * MiB, 256 * MiB]:
        tensor = tensor_of(pool_of(size))
        work: dict[str, Work] = {"copy": copy_of(tensor.page_pool)}
        for name, peer in all_of(tensor).items():
            for verb, way in (("encode", peer.encode), ("decode", peer.decode)):
                if way is not None:
                    work[f"{verb}: {name}"] = way
        took = results.race(work)
        group = f"peers, {size // MiB} MiB"
        for name in sorted(list(took)[1:]):
            results.add(group, name, took[name], took["copy"], "copy")
        if "decode: pyhurray" in took and size >= 256 * MiB:
            ours, theirs = took["decode: hurray_wire"], took["decode: pyhurray"]
            results.add(group, "decode: hurray_wire", ours, theirs, "pyhurray", at_most=0.06)
    _small_frames(results)


def _arrays(tensor: Any) -> tuple[Any, ...]:
    """pyhurray's tensor, and its buffers as the arrays that ours are: pool, block_table, seq_ptr."""
    pool, table, ptr = (np.asarray(tensor.buffer(i)) for i in range(3))
    return tensor, pool.view(np.float16).reshape(-1, 16, 2, 8), table.view(np.uint32), ptr.view(np.uint32)


def _small_frames(results: Results) -> None:
    """160 frames of a small cache, layer by layer, all kept, against pyhurray's reader of the same tensors."""
    try:
        import hurray
    except ImportError:
        return
    for size, bound in ((16 * KiB, 1.2), (64 * KiB, 0.5), (MiB, 0.05)):
        tensor = tensor_of(pool_of(size, (16, 2, 8)), entries=64, num_seqs=8)
        layers = [tensor.replace(layer_index=i // 2, kv_role=("key", "value")[i % 2]) for i in range(160)]
        framed = b"".join(hw.encode(t, sequence=i, last=i == 159, checksum=False) for i, t in enumerate(layers))
        bare = b"".join(hw.encode(t, framing="bare") for t in layers)
        took = results.race(
            {
                "ours": lambda framed=framed: list(hw.iter_decode(framed, verify=False)),  # type: ignore[misc]
                "pyhurray": lambda bare=bare: [_arrays(one) for one in hurray.StreamReader(bare)],  # type: ignore[misc]
            }
        )
        name = f"160 frames of {size // KiB} KiB"
        results.add("peers, small frames", name, took["ours"], took["pyhurray"], "pyhurray", at_most=bound)


def decode_times(results: Results, sizes: list[int]) -> Iterator[tuple[str, int, float]]:
    """Name, pool bytes and median seconds of every decoder at every size; a decoder that copies stops at 256 MiB."""
    for size in sizes:
        tensor = tensor_of(pool_of(size, (16, 8, 128) if size >= 256 * KiB else (16, 2, 8)))
        work = {"memory copy": copy_of(tensor.page_pool)}
        work |= {name: peer.decode for name, peer in all_of(tensor).items() if peer.decode is not None}
        if size > 256 * MiB:
            work = {name: way for name, way in work.items() if name in _FLAT}
        for name, seconds in results.race(work).items():
            yield name, tensor.page_pool.nbytes, seconds


_FLAT = ("memory copy", "hurray_wire", "hurray_wire, payload unverified", "pickle 5, out of band", "pyarrow tensor IPC")
