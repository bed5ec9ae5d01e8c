"""Reading tokens by sequence: gather, pages, slots, offsets; whatever memory the pool is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, Built, schemes_of, tensors
from support import POOL, Array, raw, worked

import hurray_wire as hw

GEOMETRY: dict[str, Any] = {"page_size": 4, "num_pages": 5, "num_heads": 2, "head_dim": 8}
TABLES: dict[str, Any] = {"block_table": [0, 1, 0], "seq_ptr": [0, 2, 3]}


def unknown_lens() -> hw.BlockPagedTensor:
    return worked(seq_lens=None, total_tokens=9)


def codes(built: Built) -> Array:
    """Every element's bit pattern as a Python integer, `[slot, head, dim]`, from the bytes alone."""
    t = built.tensor
    bits, shape = t.descriptor.bit_width, (-1, t.num_heads, t.head_dim)
    count = t.num_pages * t.page_size * t.num_heads * t.head_dim
    if bits % 8 == 0:
        step = bits // 8
        values = [int.from_bytes(built.buffers[0][i * step : (i + 1) * step], "little") for i in range(count)]
    else:
        run = int.from_bytes(built.buffers[0], "little")
        values = [run >> (i * bits) & ((1 << bits) - 1) for i in range(count)]
    if not count:
        return np.zeros((t.num_pages * t.page_size, t.num_heads, t.head_dim), object)
    return np.array(values, object).reshape(shape)


def patterns(elements: Array, bits: int) -> Array:
    """Gathered elements as bit patterns."""
    step, mask = max(1, bits // 8), (1 << bits) - 1
    data = elements.tobytes()
    values = [int.from_bytes(data[i : i + step], "little") & mask for i in range(0, len(data), step)]
    return np.array(values, object).reshape(elements.shape)


def slots_of(built: Built, seq: int) -> list[int]:
    """The slot of each token of a sequence (section 1)."""
    t = built.tensor
    ptr, table, size = t.seq_ptr.tolist(), t.block_table.tolist(), t.page_size
    return [table[ptr[seq] + i // size] * size + i % size for i in range(built.lens[seq])]


@pytest.mark.parametrize("name", [*(dtype.name for dtype in DTYPES), "private"])
@settings(max_examples=25)
@given(data=st.data())
def test_gather(name: str, data: st.DataObject) -> None:
    dtypes = DTYPES if name == "private" else [hw.Dtype.of(name)]
    built = data.draw(tensors(dtypes=dtypes, private=name == "private", scheme="", lens_known=True))
    t, every = built.tensor, codes(built)
    bits = t.descriptor.bit_width
    all_slots: list[int] = []
    for seq, tokens in enumerate(built.lens):
        slots = slots_of(built, seq)
        all_slots += slots
        found = t.gather(seq)
        assert found.shape == (tokens, t.num_heads, t.head_dim)
        assert found.dtype == (t.dtype.numpy or found.dtype)
        assert found.flags.owndata or found.base is not None
        assert np.array_equal(patterns(found, bits), every[slots])
        assert t.token_slots(seq).tolist() == slots
        for out in (np.empty_like(found), np.empty((2, *found.shape), found.dtype)[1], found[::-1].copy()[::-1]):
            out.view(np.uint8)[...] = 0x55
            assert t.gather(seq, out=out) is out
            assert out.tobytes() == found.tobytes()
        wide = np.zeros((tokens, t.num_heads, 2 * t.head_dim), found.dtype)
        t.gather(seq, out=wide[:, :, ::2])
        assert wide[:, :, ::2].tobytes() == found.tobytes()
    assert t.token_slots().tolist() == all_slots
    assert (str(t.token_slots().dtype), t.token_slots().ndim) == ("int64", 1)


@settings(max_examples=150)
@given(built=tensors(lens_known=True))
def test_pages_and_references(built: Built) -> None:
    t = built.tensor
    ptr, table = t.seq_ptr.tolist(), t.block_table.tolist()
    for seq, tokens in enumerate(built.lens):
        pages = table[ptr[seq] : ptr[seq + 1]]
        assert t.pages(seq).tolist() == pages
        live = -(-tokens // t.page_size)
        assert t.live_pages(seq).tolist() == pages[:live]
        assert not t.pages(seq).flags.writeable
    references = t.page_references()
    assert references.dtype == np.int64
    assert references.tolist() == [table.count(page) for page in range(t.num_pages)]


@settings(max_examples=150)
@given(built=tensors(lens_known=True, private=False))
def test_element_offset(built: Built) -> None:
    t = built.tensor
    every = codes(built).reshape(-1)
    for seq, tokens in enumerate(built.lens):
        if not tokens * t.num_heads * t.head_dim:
            continue
        token, head, dim = np.ogrid[:tokens, : t.num_heads, : t.head_dim]
        offsets = t.element_offset(seq, token, head, dim)
        assert (str(offsets.dtype), offsets.shape) == ("int64", (tokens, t.num_heads, t.head_dim))
        assert np.array_equal(every[offsets], patterns(t.gather(seq), t.descriptor.bit_width))
        one = t.element_offset(seq, tokens - 1, t.num_heads - 1, t.head_dim - 1)
        assert np.ndim(one) == 0
        assert one == offsets[-1, -1, -1]


def test_element_offset_of_the_worked_example() -> None:
    t = worked()
    assert t.element_offset(0, 4, 0, 0) == 64
    assert t.element_offset(0, 1, 1, 5) == t.element_offset(1, 1, 1, 5) == 29
    assert isinstance(t.element_offset(0, 4, 0, 0), np.int64)
    for kind in (np.int8, np.uint64, np.int64):
        assert t.element_offset(kind(0), kind(4), kind(0), kind(0)) == 64
    assert t.element_offset([0, 1], 0, 0, 0).tolist() == [0, 0]
    assert t.element_offset(0, np.zeros(0, np.int64), 0, 0).shape == (0,)
    for wrong in (0.0, "0", None, True, [0.5]):
        with pytest.raises(TypeError):
            t.element_offset(0, wrong, 0, 0)


@pytest.mark.parametrize(
    "coordinates",
    [
        *((-1, 0, 0, 0), (2, 0, 0, 0), (0, -1, 0, 0), (0, 6, 0, 0), (1, 3, 0, 0), (0, 0, -1, 0), (0, 0, 2, 0)),
        *((0, 0, 0, -1), (0, 0, 0, 8), (2**63, 0, 0, 0), (0, 2**63, 0, 0), (0, 0, 2**64, 0), (0, 0, 0, -(2**70))),
        *((0, 2**32, 0, 0), (0, 2**34, 0, 0), (0, 2**34 + 4, 0, 0), (0, 2**63 - 1, 0, 0), (0, [0, 6], 0, 0)),
        *(([0, 2], 0, 0, 0), (0, 0, [[0], [2]], 0), (2**32, 0, 0, 0), (0, np.uint64(2**64 - 1), 0, 0)),
    ],
    ids=str,
)
def test_coordinates_out_of_range(coordinates: Any) -> None:
    with pytest.raises(IndexError):
        worked().element_offset(*coordinates)


@pytest.mark.parametrize("tokens", [8, 2**32, 2**34, 2**34 + 1, 2**36, 2**63 - 1, 2**63, 2**64 - 1])
def test_tokens_are_bounded_by_pages_where_lengths_are_unknown(tokens: int) -> None:
    """A page index must not wrap in the table's own 32 bits."""
    bare = hw.decode(raw())
    assert bare.seq_lens is None
    assert bare.element_offset(0, 7, 0, 0) == 112
    for t in (bare, worked(index_type="uint64", seq_lens=None, total_tokens=9)):
        with pytest.raises(IndexError):
            t.element_offset(0, tokens, 0, 0)


@pytest.mark.parametrize("kind", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "list"])
def test_offsets_alone_do_not_wrap_in_any_table(kind: str) -> None:
    tables: dict[str, Any] = {
        name: values if kind == "list" else np.array(values, kind) for name, values in TABLES.items()
    }
    assert hw.element_offset(0, 7, 1, 7, **GEOMETRY, **tables) == 127
    for token in (8, 4 * 2**7, 4 * 2**8, 4 * 2**8 + 4, 4 * 2**16, 4 * 2**31, 4 * 2**32):
        with pytest.raises(IndexError):
            hw.element_offset(0, token, 0, 0, **GEOMETRY, **tables)
    full = np.arange(100).astype(kind if kind != "list" else "i8")
    geometry = GEOMETRY | {"num_pages": 100}
    assert hw.element_offset(0, 399, 1, 7, **geometry, block_table=full, seq_ptr=[0, 100]) == 100 * 64 - 1


def test_sizes_as_numpy_integers() -> None:
    geometry = {"page_size": 4, "num_pages": 2**29, "num_heads": 2, "head_dim": 8}
    for kind in (np.int32, np.uint32, np.int64):
        sizes: dict[str, Any] = {name: kind(size) for name, size in geometry.items()}
        assert hw.element_offset(0, 4, 0, 0, **sizes, **TABLES) == 64


@pytest.mark.parametrize(
    ("code", "tables"),
    [
        ("page_id", {"block_table": [5, 1, 0], "seq_ptr": [0, 2, 3]}),
        ("page_id", {"block_table": [2**64 - 1, 1, 0], "seq_ptr": [0, 2, 3]}),
        ("seq_ptr_order", {"block_table": [0, 1, 0], "seq_ptr": [3, 2, 3]}),
        ("seq_ptr_end", {"block_table": [0, 1, 0], "seq_ptr": [0, 4, 4]}),
        ("seq_ptr_end", {"block_table": [], "seq_ptr": [0, 2**64 - 1]}),
        ("negative_index", {"block_table": [-1, 1, 0], "seq_ptr": [0, 2, 3]}),
        ("not_integer", {"block_table": [0.5, 1, 0], "seq_ptr": [0, 2, 3]}),
    ],
)
def test_offsets_alone_over_unsound_tables(code: str, tables: dict[str, Any]) -> None:
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        hw.element_offset(0, 0, 0, 0, **GEOMETRY, **tables)
    assert caught.value.code == code


def test_offsets_alone_with_lengths_and_sizes_of_zero() -> None:
    with pytest.raises(IndexError):
        hw.element_offset(0, 6, 0, 0, **GEOMETRY, **TABLES, seq_lens=[6, 3])
    assert hw.element_offset(0, 5, 0, 0, **GEOMETRY, **TABLES, seq_lens=[6, 3]) == 80
    for name in ("num_heads", "head_dim"):
        with pytest.raises(IndexError):
            hw.element_offset(0, 0, 0, 0, **GEOMETRY | {name: 0}, **TABLES)
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        hw.element_offset(0, 0, 0, 0, **GEOMETRY | {"page_size": 0}, **TABLES)
    assert caught.value.code == "page_size"


def test_offsets_beyond_an_int64_are_refused() -> None:
    huge = {"page_size": 2**31, "num_pages": 2**31, "num_heads": 2, "head_dim": 8}
    with pytest.raises(hw.InvalidDescriptorError):
        hw.element_offset(0, 0, 0, 0, **huge, block_table=[2**31 - 1], seq_ptr=[0, 1])
    large = {"page_size": 2**20, "num_pages": 2**35, "num_heads": 2, "head_dim": 8}
    last = hw.element_offset(0, 2**20 - 1, 1, 7, **large, block_table=[2**35 - 1], seq_ptr=[0, 1])
    assert last == 2**59 - 1


READERS = ("gather", "dequantize", "pages", "live_pages", "token_slots")


@pytest.mark.parametrize("reader", READERS)
def test_sequences_out_of_range(reader: str) -> None:
    read = getattr(worked(), reader)
    for seq in (-1, 2, 3, 2**32, 2**64, -(2**64), np.int64(-1), np.uint64(2**64 - 1)):
        with pytest.raises(IndexError):
            read(seq)
    assert np.array_equal(read(1), read(np.uint8(1)))
    empty = worked(block_table=[], seq_ptr=[0], seq_lens=[])
    with pytest.raises(IndexError):
        getattr(empty, reader)(0)


@pytest.mark.parametrize("reader", READERS)
def test_a_sequence_is_named_by_an_integer(reader: str) -> None:
    for wrong in (1.0, 1.7, "1", [0, 1], b"1", 1j, np.float64(1)):
        with pytest.raises((TypeError, ValueError)):
            getattr(worked(), reader)(wrong)


def test_out_must_fit() -> None:
    t = worked()
    for out in (
        *(np.zeros((6, 2, 8), np.float32), np.zeros((6, 2, 8), ">f2"), np.zeros((5, 2, 8), np.float16)),
        *(np.zeros((7, 2, 8), np.float16), np.zeros(96, np.float16), np.zeros((6, 2, 8), np.uint16)),
    ):
        with pytest.raises(ValueError, match="out"):
            t.gather(0, out=out)
    frozen = np.zeros((6, 2, 8), np.float16)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        t.gather(0, out=frozen)
    assert not frozen.any()


def test_nothing_beyond_the_tokens_is_written() -> None:
    memory = np.full((8, 2, 8), 7, np.float16)
    worked().gather(0, out=memory[1:7])
    assert (memory[[0, 7]] == 7).all()
    assert np.array_equal(memory[1:7], POOL.reshape(20, 2, 8)[:6])


@pytest.mark.parametrize("reader", ["gather", "dequantize", "live_pages", "token_slots"])
def test_unknown_lengths_are_said(reader: str) -> None:
    for t in (unknown_lens(), hw.decode(raw()), hw.decode(hw.encode(unknown_lens()))):
        with pytest.raises(hw.UnsupportedError) as caught:
            getattr(t, reader)(0)
        assert caught.value.code == "seq_lens_unknown"
        assert t.pages(0).tolist() == [0, 1]
        assert t.page_references().tolist() == [2, 1, 0, 0, 0]


@pytest.mark.parametrize(("name", "scheme"), [(d.name, s) for d in DTYPES for s in schemes_of(d) if "block" in s])
@settings(max_examples=10)
@given(data=st.data())
def test_scales_lie_in_the_shape_of_slots(name: str, scheme: str, data: st.DataObject) -> None:
    built = data.draw(tensors(dtypes=[hw.Dtype.of(name)], private=False, scheme=scheme))
    for t in (built.tensor, hw.decode(hw.encode(built.tensor)), hw.decode(hw.encode(built.tensor, framing="bare"))):
        assert t.scales is not None
        assert t.scales.shape == (t.num_pages, t.page_size)
        assert t.scales.tobytes() == built.buffers[3]
        assert (t.zero_points is None) == ("asymmetric" not in scheme)
        if t.zero_points is not None:
            assert (t.zero_points.shape, str(t.zero_points.dtype)) == (t.scales.shape, "int32")
            assert t.zero_points.tobytes() == built.buffers[4]
