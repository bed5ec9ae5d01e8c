"""Random batches, and what they hold read the slow way: token by token, from the format's own sentence.

`random_batch(rng)` draws what real caches are made of: empty sequences, spare pages, pages that several sequences or
one sequence twice name, odd page sizes, pools that are views of other pools, every kind of scale. The readers below
use no index maths of the package, so laws about operations do not lean on it.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import hurray_wire as hw

Array = npt.NDArray[Any]
Rng = np.random.Generator

PLAIN = ("float16", "bfloat16", "float32", "float64", "float8_e4m3", "float8_e5m2", "int8", "uint16", "int64")
PACKED = ("int4", "uint2", "bool", "float4_e2m1", "float6_e3m2", "float128")
STORAGE = ("int8", "uint8", "int4", "uint4", "float8_e4m3", "float8_e5m2")
WIDE = ("int16", "int32", "uint32")
PAGE_SIZES = (1, 2, 3, 4, 8, 16)
SCHEMES = ("per_tensor", "per_head", "per_dim", "per_block")
SCALE_TYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


def random_batch(
    rng: Rng,
    *,
    dtype: str | None = None,
    scheme: str | None = None,
    page_size: int | None = None,
    num_heads: int | None = None,
    head_dim: int | None = None,
    num_seqs: int | None = None,
    kv_role: str | None = None,
    metadata: bool | None = None,
) -> hw.BlockPagedTensor:
    """A sound tensor; what is not given is drawn. `scheme` is one of SCHEMES or "none"; seq_lens are known."""
    scheme = str(rng.choice(("none", "none", *SCHEMES))) if scheme is None else scheme
    if page_size is None:
        page_size = int(rng.choice([n for n in PAGE_SIZES if scheme != "per_block" or (n > 1 and n != 3)]))
    if dtype is None:
        dtype = str(
            rng.choice(PLAIN + PACKED if scheme == "none" else STORAGE if scheme == "per_block" else STORAGE + WIDE)
        )
    heads = int(rng.integers(1, 5)) if num_heads is None else num_heads
    dim = int(rng.integers(1, 7)) if head_dim is None else head_dim
    if head_dim is None and hw.Dtype.of(dtype).is_flat:
        dim = 4 * int(rng.integers(1, 3)) * (2 if dtype == "bool" else 1)  # heads are whole bytes
    table, ptr, lens, pages = random_tables(rng, page_size, num_seqs)
    shape = (pages, page_size, heads, dim)
    pool, sizes = _pool(rng, dtype, shape)
    return hw.BlockPagedTensor(
        pool,
        block_table=table,
        seq_ptr=ptr,
        seq_lens=lens,
        kv_role=str(rng.choice(("key", "value", "fused"))) if kv_role is None else kv_role,
        layer_index=None if rng.random() < 0.2 else int(rng.integers(0, 90)),
        index_type="uint64" if rng.random() < 0.3 else None,
        metadata=_metadata(rng, lens, dim) if (rng.random() < 0.5 if metadata is None else metadata) else None,
        **sizes,
        **_scheme(rng, scheme, dtype, shape),
    )


def random_tables(rng: Rng, page_size: int, num_seqs: int | None = None) -> tuple[Array, Array, Array, int]:
    """block_table, seq_ptr, seq_lens, and a number of pages in which some may be named by nobody."""
    seqs = int(rng.integers(0, 7)) if num_seqs is None else num_seqs
    lens = rng.integers(0, 4 * page_size + 1, seqs)
    lens[rng.random(seqs) < 0.25] = 0
    counts = -(-lens // page_size) + (rng.random(seqs) < 0.3) * rng.integers(0, 3, seqs)
    ptr = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    total = int(ptr[-1])
    pages = total + int(rng.integers(0, 4))
    table = rng.permutation(pages)[:total]
    if total and rng.random() < 0.6:  # shared prefixes, as engines make them
        for seq in range(1, seqs):
            like = int(rng.integers(0, seq))
            shared = int(rng.integers(0, min(counts[seq], counts[like]) + 1))
            table[ptr[seq] : ptr[seq] + shared] = table[ptr[like] : ptr[like] + shared]
    if total and rng.random() < 0.2:  # and pages named at random, twice in one sequence too
        table = rng.integers(0, max(1, pages // 2), total)
    return table, ptr, lens, pages


def _pool(rng: Rng, dtype: str, shape: tuple[int, int, int, int]) -> tuple[Array, dict[str, Any]]:
    """Random bits as a pool, the memory of a larger one as often as not; 1-D where the type asks for it."""
    found = hw.Dtype.of(dtype)
    elements = int(np.prod(shape))
    if found.is_flat or found.numpy is None:
        assert elements * found.bit_width % 8 == 0
        sizes = dict(zip(("page_size", "num_heads", "head_dim"), shape[1:], strict=True))
        packed = rng.integers(0, 256, 2 * elements * found.bit_width // 8, dtype=np.uint8)
        strides = (slice(0, packed.size // 2), slice(None, None, 2), slice(None, None, -2))
        return packed[strides[int(rng.integers(0, 3))]], {"dtype": dtype, **sizes}
    ways = (_plain, _plain, _half, _heads_first, _fused_side, _other_order, _every_second)
    return ways[int(rng.integers(0, len(ways)))](rng, shape, found.numpy), {}


def bits(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array of random bit patterns, NaNs among them."""
    count = int(np.prod(shape)) * dtype.itemsize
    return rng.integers(0, 256, count, dtype=np.uint8).view(dtype).reshape(shape)


def _plain(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return bits(rng, shape, dtype)


def _half(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return bits(rng, (shape[0], 2, *shape[1:]), dtype)[:, int(rng.integers(0, 2))]


def _heads_first(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    pages, size, heads, dim = shape
    return bits(rng, (pages, heads, size, dim), dtype).swapaxes(1, 2)


def _fused_side(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return bits(rng, (*shape[:3], shape[3] + 3), dtype)[..., 2 : 2 + shape[3]]


def _other_order(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    if dtype.isbuiltin != 1 or dtype.itemsize == 1:
        return bits(rng, shape, dtype)
    return bits(rng, shape, dtype.newbyteorder(">"))


def _every_second(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return bits(rng, (2 * shape[0], *shape[1:]), dtype)[::-2] if shape[0] else bits(rng, shape, dtype)


def _scheme(rng: Rng, scheme: str, dtype: str, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    if scheme == "none":
        return {}
    zeros = "float" not in dtype and rng.random() < 0.5
    least, most = (0, 4) if dtype.startswith("uint") else (-4, 4)
    if scheme == "per_tensor":
        return {"quantization": hw.PerTensorAffine(rng.random() + 0.1, int(rng.integers(least, most)) if zeros else 0)}
    index = 4 if zeros else None
    if scheme == "per_block":
        scale_type = np.dtype(SCALE_TYPES[int(rng.integers(0, 3))])
        entries: tuple[int, ...] = shape[:2]
        chosen = hw.PerBlockAffine(0, shape[1], 3, index, hw.Dtype.of(scale_type))
        arrays: dict[str, Any] = {"quantization": chosen, "scales": (rng.random(entries) + 0.1).astype(scale_type)}
    else:
        axis = 1 if scheme == "per_head" else 2
        entries = (shape[axis + 1],)
        arrays = {"quantization": hw.PerChannelAffine(axis, 3, index), "scales": rng.random(entries, np.float32) + 0.1}
    if zeros:
        arrays["zero_points"] = rng.integers(least, most, entries, dtype=np.int32)
    return arrays


def _metadata(rng: Rng, lens: Array, dim: int) -> dict[str, Any]:
    names = {
        "model": "tiny",
        "seq_ids": [f"s{i}-{int(rng.integers(0, 1000))}" for i in range(lens.size)],
        "first_tokens": rng.integers(0, 1000, lens.size).tolist(),
        "key_dim": dim // 2,
        "a.note": {"x": [1, None, "é"]},
    }
    return {name: value for name, value in names.items() if rng.random() < 0.7}


# The slow way.


def elements(t: hw.BlockPagedTensor) -> Array:
    """The pool unpacked, `[pages, page_size, heads, dim]` of bit patterns: a void or an unsigned integer each."""
    shape = (t.num_pages, t.page_size, t.num_heads, t.head_dim)
    if t.dtype.is_sub_byte:
        return hw.unpack(t.page_pool, t.dtype, int(np.prod(shape))).view(np.uint8).reshape(shape)
    if t.page_pool.ndim == 1:
        return np.ascontiguousarray(t.page_pool).view(f"V{t.descriptor.bit_width // 8}").reshape(shape)
    little = t.page_pool.astype(t.page_pool.dtype.newbyteorder("<"))
    return np.ascontiguousarray(little).view(f"V{little.itemsize}").reshape(shape)


def tokens(t: hw.BlockPagedTensor) -> list[list[bytes]]:
    """The bits of every token of every sequence; with its scale and zero point where each slot has its own."""
    assert t.seq_lens is not None
    pool = elements(t)
    slots = [a for a in (t.scales, t.zero_points) if a is not None and a.ndim == 2]
    return [
        [
            b"".join([pool[place].tobytes(), *(a[place].tobytes() for a in slots)])
            for place in (slot_of(t, seq, token) for token in range(length))
        ]
        for seq, length in enumerate(t.seq_lens.tolist())
    ]


def slot_of(t: hw.BlockPagedTensor, seq: int, token: int) -> tuple[int, int]:
    """Token t of sequence s is slot t % page_size of page block_table[seq_ptr[s] + t // page_size]."""
    page = int(t.block_table[int(t.seq_ptr[seq]) + token // t.page_size])
    return page, token % t.page_size


def owned(t: hw.BlockPagedTensor) -> Array:
    """Which slots hold a token of any sequence, `[pages, page_size]`."""
    assert t.seq_lens is not None
    mask = np.zeros((t.num_pages, t.page_size), np.bool_)
    for seq, length in enumerate(t.seq_lens.tolist()):
        for token in range(length):
            mask[slot_of(t, seq, token)] = True
    return mask


def worked_example(**changes: Any) -> hw.BlockPagedTensor:
    """The format's own example: sequences of 6 and 3 tokens, the second re-using page 0; element type float16."""
    pool = changes.pop("page_pool", np.arange(320, dtype=np.float16).reshape(5, 4, 2, 8))
    fields: dict[str, Any] = {"block_table": [0, 1, 0], "seq_ptr": [0, 2, 3], "seq_lens": [6, 3], "layer_index": 3}
    fields |= changes
    return hw.BlockPagedTensor(pool, **fields)


def packed_example(*, whole: bool) -> hw.BlockPagedTensor:
    """Two sequences of int4, in pages of whole bytes or of one and a half."""
    elements = np.arange(4 * 3 * (2 if whole else 1), dtype=np.uint8) % 16
    return hw.BlockPagedTensor(
        hw.pack(elements, "int4"),
        block_table=[2, 0, 3],
        seq_ptr=[0, 2, 3],
        seq_lens=[5, 2],
        dtype="int4",
        page_size=3,
        num_heads=1,
        head_dim=2 if whole else 1,
    )


def sums(t: hw.BlockPagedTensor) -> list[float]:
    """The sum of each sequence's elements."""
    return [float(t.gather(seq).astype(np.float64).sum()) for seq in range(t.num_seqs)]


def unknown_lens() -> hw.BlockPagedTensor:
    """The worked example as the bare form brings it."""
    pool = worked_example().page_pool
    return hw.BlockPagedTensor(pool, block_table=[0, 1, 0], seq_ptr=[0, 2, 3], total_tokens=9)


def unsound() -> hw.BlockPagedTensor:
    """What a lenient reader let pass."""
    blob = bytearray(hw.encode(worked_example(), framing="bare"))
    blob[64] = 1  # paged_axis
    return hw.decode(bytes(blob), strict=False)


def float_block() -> hw.BlockPagedTensor:
    """Scales that are carried, not interpreted."""
    return worked_example(
        page_pool=np.zeros((5, 4, 2, 32), np.int8),
        quantization=hw.MXFP(2, 32, 3),
        scales=np.ones(40, np.uint8),
    )
