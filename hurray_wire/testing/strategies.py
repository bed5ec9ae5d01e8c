"""hypothesis strategies for valid tensors: everything that the format can say, in small.

The only module of the package that needs hypothesis. What `tensors()` draws can be encoded, decoded, gathered; its
tables share pages, repeat them, and leave some to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

import hurray_wire as hw
from hurray_wire.dtypes import packed_bytes
from hurray_wire.rules import STORAGE, ZERO_POINT_RANGES
from hurray_wire.tags import SchemeTag, TypeTag

__all__ = ["metadata", "tensors"]

_ALL = tuple(hw.Dtype.of(int(tag)) for tag in TypeTag)
_LAYERS = st.none() | st.integers(0, 2**32 - 2)
_SCALE_TYPES = ("float16", "bfloat16", "float32")


@st.composite
def metadata(draw: st.DrawFn, *, num_seqs: int, head_dim: int) -> dict[str, Any] | None:
    """Metadata that a frame may carry (section 4), or None."""
    start, held, beyond = draw(st.integers(0, 9)), draw(st.integers(1, 9)), draw(st.integers(0, 9))
    text = st.text(max_size=8)
    known = {
        **dict.fromkeys(("model", "revision", "tokenizer", "rope"), text),
        "seq_ids": st.lists(text, min_size=num_seqs, max_size=num_seqs),
        "first_tokens": st.lists(st.integers(0, 2**40), min_size=num_seqs, max_size=num_seqs),
        "heads": st.just([start, start + held, start + held + beyond]),
        "key_dim": st.integers(0, head_dim),
        "content": st.sampled_from(("kv", "latent", "opaque")),
        "x.y": st.none() | st.booleans() | st.integers(-(2**60), 2**60) | text | st.lists(text, max_size=2),
    }
    names = draw(st.sets(st.sampled_from(sorted(known)), max_size=4))
    return {name: draw(known[name]) for name in sorted(names)} or None


@st.composite
def tensors(
    draw: st.DrawFn,
    *,
    dtypes: Sequence[Any] = _ALL,
    quantized: bool | None = None,
    lens_known: bool | None = None,
    with_metadata: bool | None = None,
) -> hw.BlockPagedTensor:
    """A valid tensor of any kind.

    Args:
        dtypes: element types to draw from, anything that `Dtype.of` takes.
        quantized: whether it has a scheme; None draws it. Types that no scheme takes have none.
        lens_known: whether its token counts are given; None draws it.
        with_metadata: whether it may carry metadata, as only a frame can; None draws it.

    Example:
        >>> from hypothesis import given
        >>> import hurray_wire as hw
        >>> from hurray_wire.testing import tensors
        >>> @given(tensors())
        ... def test_comes_back(tensor):
        ...     assert hw.decode(hw.encode(tensor)) == tensor
    """
    dtype = draw(st.sampled_from([hw.Dtype.of(d) for d in dtypes]))
    schemes = [tag for tag, storage in STORAGE.items() if dtype.tag in storage]
    wanted = draw(st.booleans()) if quantized is None else quantized
    scheme = draw(st.sampled_from(schemes)) if wanted and schemes else None
    geometry = draw(_geometries(dtype, block=scheme == SchemeTag.PER_BLOCK))
    tables = draw(_tables(geometry[0], geometry[1], known=lens_known))
    carries = draw(st.booleans()) if with_metadata is None else with_metadata
    return hw.BlockPagedTensor(
        **draw(_pools(dtype, geometry)),
        **tables,
        **(draw(_schemes(scheme, dtype, geometry)) if scheme is not None else {}),
        kv_role=draw(st.sampled_from(("key", "value", "fused"))),
        layer_index=draw(_LAYERS),
        index_type=draw(st.sampled_from((None, "uint32", "uint64"))),
        composite=draw(st.sampled_from((None, "base", "correction"))),
        metadata=draw(metadata(num_seqs=len(tables["seq_ptr"]) - 1, head_dim=geometry[3])) if carries else None,
    )


@st.composite
def _geometries(draw: st.DrawFn, dtype: hw.Dtype, *, block: bool) -> tuple[int, int, int, int]:
    """Pages, slots, heads, dims; pages of packed types are of whole bytes, from which their number follows."""
    pages = draw(st.integers(0, 4))
    slots = draw(st.sampled_from((2, 4, 8)) if block else st.integers(1, 4))
    if dtype.is_flat:
        return pages, slots, draw(st.integers(1, 2)), draw(st.sampled_from((8, 16, 24)))
    return pages, slots, draw(st.integers(0, 3)), draw(st.integers(0, 4))


@st.composite
def _pools(draw: st.DrawFn, dtype: hw.Dtype, geometry: tuple[int, int, int, int]) -> dict[str, Any]:
    """The pool of random bits, every bit pattern among them."""
    count = int(np.prod(geometry))
    seed = draw(st.integers(0, 2**32 - 1))
    data = np.frombuffer(np.random.default_rng(seed).bytes(packed_bytes(count, dtype.bit_width)), np.uint8)
    if dtype.is_flat:
        sizes = {"page_size": geometry[1], "num_heads": geometry[2], "head_dim": geometry[3]}
        return {"page_pool": data, "dtype": dtype, **sizes}
    assert dtype.numpy is not None
    return {"page_pool": data.view(dtype.numpy).reshape(geometry)}


@st.composite
def _tables(draw: st.DrawFn, num_pages: int, page_size: int, *, known: bool | None) -> dict[str, Any]:
    """Tables over a pool, and token counts or their sum."""
    counts = draw(st.lists(st.integers(0, 3 if num_pages else 0), max_size=4))
    ids = draw(st.lists(st.integers(0, max(0, num_pages - 1)), min_size=sum(counts), max_size=sum(counts)))
    lens = [draw(st.integers(0, count * page_size)) for count in counts]
    told = draw(st.booleans()) if known is None else known
    return {
        "block_table": ids,
        "seq_ptr": np.cumsum([0, *counts]).tolist(),
        **({"seq_lens": lens} if told else {"total_tokens": sum(lens)}),
    }


@st.composite
def _schemes(draw: st.DrawFn, scheme: int, dtype: hw.Dtype, geometry: tuple[int, int, int, int]) -> dict[str, Any]:
    """A scheme on a storage type, with scales that dequantise."""
    if scheme in (SchemeTag.NF4, SchemeTag.MXFP):
        cls = hw.NF4 if scheme == SchemeTag.NF4 else hw.MXFP
        made = cls(draw(st.integers(0, 2)), draw(st.sampled_from((16, 32, 2048))), 3)
        return {"quantization": made, "scales": np.frombuffer(draw(st.binary(max_size=9)), np.uint8)}
    low, high = ZERO_POINT_RANGES[dtype.tag]
    points = st.integers(max(low, -(2**31)), min(high, 2**31 - 1))
    if scheme == SchemeTag.PER_TENSOR:
        scale = draw(st.floats(2**-20, 2**20, width=32))
        return {"quantization": hw.PerTensorAffine(scale, draw(points))}
    zero_index = draw(st.sampled_from((None, 4)))
    affine: hw.PerBlockAffine | hw.PerChannelAffine
    shape: tuple[int, ...]
    if scheme == SchemeTag.PER_BLOCK:
        scale_type, shape = draw(st.sampled_from(_SCALE_TYPES)), geometry[:2]
        affine = hw.PerBlockAffine(0, geometry[1], 3, zero_index, hw.Dtype.of(scale_type))
    else:
        axis = draw(st.sampled_from((1, 2)))
        scale_type, shape = "float32", (geometry[axis + 1],)
        affine = hw.PerChannelAffine(axis, 3, zero_index)
    scales = np.linspace(0.25, 4, int(np.prod(shape))).reshape(shape).astype(hw.Dtype.of(scale_type).numpy)
    zeros = {} if zero_index is None else {"zero_points": np.full(shape, draw(points), np.int32)}
    return {"quantization": affine, "scales": scales, **zeros}
