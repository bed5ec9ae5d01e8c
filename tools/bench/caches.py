"""The data that is measured: pools of every size, and the values that caches hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import hurray_wire as hw

REAL = Path(__file__).resolve().parent.parent.parent / "fixtures" / "real"
PAGE = (16, 8, 128)
"""page_size, num_heads, head_dim: 32 KiB a page in 16 bits."""


def random_bytes(nbytes: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Noise."""
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8).copy()


def pool_of(nbytes: int, page: tuple[int, int, int] = PAGE) -> npt.NDArray[Any]:
    """A float16 pool of about `nbytes`, every byte touched."""
    pages = max(1, nbytes // (2 * page[0] * page[1] * page[2]))
    return random_bytes(pages * 2 * page[0] * page[1] * page[2]).view(np.float16).reshape(pages, *page)


def tensor_of(pool: npt.NDArray[Any], entries: int = 512, num_seqs: int = 64, **options: Any) -> hw.BlockPagedTensor:
    """A batch over a pool: `entries` table entries shared out over `num_seqs` sequences."""
    pages, page_size = pool.shape[:2]
    table = np.arange(entries) * 7 % pages
    ptr = np.linspace(0, entries, num_seqs + 1).astype(np.int64)
    lens = np.maximum(np.diff(ptr) * page_size - 3, 0)
    return hw.BlockPagedTensor(
        pool, block_table=table, seq_ptr=ptr, seq_lens=lens, kv_role="key", layer_index=3, **options
    )


def copy_of(payload: Any) -> Callable[[], object]:
    """A warm memory copy of the payload into a reused buffer: the yardstick W."""
    source = np.ascontiguousarray(payload).reshape(-1).view(np.uint8)
    target = np.empty_like(source)
    target[:] = source
    return lambda: np.copyto(target, source)


def snapshot_chunks() -> list[npt.NDArray[np.uint16]]:
    """The real snapshot's sequences as LMCache keeps them: bfloat16 bits, `[2, 1, tokens, heads * dim]`."""
    about = json.loads((REAL / "snapshot.json").read_text())
    pools = [np.load(REAL / about["files"][role]["path"]) for role in ("key", "value")]
    runs = zip(about["seq_ptr"], about["seq_ptr"][1:], about["seq_lens"], strict=False)
    return [
        np.stack([pool[about["block_table"][a:b]].reshape(-1, pool[0, 0].size)[:n] for pool in pools])[:, None]
        for a, b, n in runs
    ]


def real_bits(nbytes: int) -> npt.NDArray[np.uint16]:
    """The real snapshot's tokens (bfloat16 bits), repeated to `nbytes`: half of it keys, then values.

    A pool holds one or the other, and so does each chunk here. In each repetition every channel's values are shuffled
    on their own: the distributions stay, and nothing stands twice for a compressor to find.
    """
    about = json.loads((REAL / "snapshot.json").read_text())
    pools = [np.load(REAL / about["files"][role]["path"]) for role in ("key", "value")]
    table, lens, ptr = (np.array(about[name]) for name in ("block_table", "seq_lens", "seq_ptr"))
    rng = np.random.default_rng(5)
    halves = []
    for pool in pools:
        tokens = _tokens(pool, table, ptr, lens)
        count = -(-nbytes // 2 // tokens.nbytes)
        halves.append(np.concatenate([rng.permuted(tokens, axis=0).reshape(-1) for _ in range(count)])[: nbytes // 4])
    return np.concatenate(halves)


def _tokens(pool: Any, table: Any, ptr: Any, lens: Any) -> npt.NDArray[np.uint16]:
    """Every token of every sequence, its channels in a row."""
    rows = [pool[table[a:b]].reshape(-1, pool[0, 0].size)[:n] for a, b, n in zip(ptr, ptr[1:], lens, strict=False)]
    return np.concatenate(rows)


def compressible(name: str, nbytes: int) -> npt.NDArray[Any]:
    """A pool of the named kind: real bfloat16, the same as float16, float8, int8 per tensor; noise; half empty."""
    values = real_bits(nbytes).view(hw.bfloat16.numpy)
    if name == "bf16":
        flat: npt.NDArray[Any] = values
    elif name == "fp16":
        flat = values.astype(np.float16)
        noise = random_bytes(nbytes, 3).view(np.uint16)
        flat.view(np.uint16)[:] |= noise & 7  # three more bits of the mantissa, which are noise in real caches too
    elif name == "fp8":
        flat = np.resize(values, nbytes).astype(np.float32).astype(hw.float8_e4m3.numpy)
    elif name == "int8":
        wide = np.resize(values, nbytes).astype(np.float32)
        flat = np.clip(np.rint(wide / (np.abs(wide).max() / 127)), -127, 127).astype(np.int8)
    elif name == "noise":
        flat = random_bytes(nbytes).view(np.float16)
    else:
        flat = values.copy()
        pages = flat[: flat.size // 2048 * 2048].reshape(-1, 2048)
        pages[np.random.default_rng(1).random(len(pages)) < 0.4] = 0
    per_page = 16 * 8 * 128
    whole = flat.size // per_page
    return flat[: whole * per_page].reshape(whole, 16, 8, 128)


def entropy_ratio(pool: npt.NDArray[Any]) -> float:
    """What coding byte by byte can reach at best: the planes' entropies, each chunk's of its own.

    A plane within one percent of noise counts as noise: so much a megabyte's own distribution differs by chance.
    """
    width = pool.itemsize
    flat = pool.reshape(-1).view(np.uint8)
    chunks = [flat[i : i + (1 << 20)] for i in range(0, flat.size, 1 << 20)]
    bits = [min(_entropy(chunk[j::width]), 8.0) for chunk in chunks for j in range(width)]
    return 8 / float(np.mean([8.0 if plane > 7.92 else plane for plane in bits]))


def _entropy(values: npt.NDArray[np.uint8]) -> float:
    """Bits a byte, order 0."""
    counts = np.bincount(values, minlength=256)
    shares = counts[counts > 0] / values.size
    return float(-(shares * np.log2(shares)).sum())
