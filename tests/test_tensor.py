"""Making a `BlockPagedTensor`: what is refused and how it is said, what is copied and what never is."""

from __future__ import annotations

import sys
import tracemalloc
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, MAKES, NAMED, PACKED, Built, Geometry, made, tensors
from support import BT, POOL, SP, worked

import hurray_wire as hw

EXPECTED = "[pages, page_size, heads, head_dim]"
PACKED_SIZES = {"page_size": 4, "num_heads": 2, "head_dim": 8}


def test_the_worked_example() -> None:
    t = worked()
    assert (t.num_pages, t.page_size, t.num_heads, t.head_dim, t.num_seqs, t.total_tokens) == (5, 4, 2, 8, 2, 9)
    assert (t.kv_role, t.layer_index, t.shape, t.nbytes) == ("key", 3, (9, 2, 8), 664)
    assert t.layout == hw.BlockPagedLayout(4, 5, 0, 2, layer_index=3)
    assert t.dtype is hw.float16
    assert t.page_pool is POOL or np.shares_memory(t.page_pool, POOL)
    assert t.seq_lens is not None
    assert (t.block_table.tolist(), t.seq_ptr.tolist(), t.seq_lens.tolist()) == ([0, 1, 0], [0, 2, 3], [6, 3])
    assert (t.scales, t.zero_points, t.quantization, t.statistics, t.metadata) == (None,) * 5
    assert (t.violations, t.check()) == ((), [])
    assert t.validate() is None  # type: ignore[func-returns-value]
    assert t.descriptor.buffers == (hw.BufferHandle(640), hw.BufferHandle(12), hw.BufferHandle(12))


@given(built=tensors())
def test_anything_that_can_be_drawn_is_sound(built: Built) -> None:
    t = built.tensor
    assert t.check() == []
    assert t.nbytes == sum(map(len, built.buffers)) == sum(h.byte_size for h in t.descriptor.buffers)
    assert t.total_tokens == sum(built.lens)
    assert repr(t).count("\n") == 0


def test_lengths_or_their_sum_are_needed() -> None:
    with pytest.raises(TypeError, match="seq_lens"):
        hw.BlockPagedTensor(POOL, block_table=BT, seq_ptr=SP)
    assert worked(total_tokens=9) == worked()
    with pytest.raises(TypeError):
        worked(seq_lens=None, total_tokens=9.0)
    with pytest.raises(TypeError):
        hw.BlockPagedTensor(POOL, BT, SP, [6, 3])  # type: ignore[call-arg]


@pytest.mark.parametrize("shape", [(), (12,), (12, 16), (3, 4, 16), (2, 3, 4, 2, 8), (1,) * 7])
def test_pools_of_other_ranks(shape: tuple[int, ...]) -> None:
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        hw.BlockPagedTensor(np.zeros(shape, "f2"), block_table=[0], seq_ptr=[0, 1], total_tokens=1)
    assert EXPECTED in str(caught.value)
    assert str(shape) in str(caught.value)


def test_page_size_zero() -> None:
    for lens in ({"seq_lens": [0, 0]}, {"seq_lens": None, "total_tokens": 0}, {"seq_lens": None, "total_tokens": 9}):
        with pytest.raises(hw.InvalidDescriptorError) as caught:
            worked(page_pool=np.zeros((5, 0, 2, 8), "f2"), **lens)
        assert "page_size" in {str(v.code) for v in caught.value.violations}


def dtype_error(**arguments: Any) -> hw.UnsupportedError:
    with pytest.raises(hw.UnsupportedError) as caught:
        worked(**arguments)
    assert caught.value.code in ("dtype", "packed_pool")
    return caught.value


def test_untyped_bytes_need_a_dtype() -> None:
    untyped = POOL.view("V2")
    dtype_error(page_pool=untyped)
    t = worked(page_pool=untyped, dtype="bfloat16")
    assert t.dtype is hw.bfloat16
    assert t.page_pool.tobytes() == POOL.tobytes()
    assert np.shares_memory(t.page_pool, POOL)
    bytes_ = np.arange(320, dtype=np.uint8).reshape(5, 4, 2, 8)
    for name in ("float8_e4m3", "float8_e5m2", "float8_e8m0"):
        t = worked(page_pool=bytes_, dtype=name)
        assert t.dtype is hw.Dtype.of(name)
        assert np.shares_memory(t.page_pool, bytes_)
    for wrong in ("V4", "V1", "V3"):
        dtype_error(page_pool=np.zeros((5, 4, 2, 8), wrong), dtype="bfloat16")


@pytest.mark.parametrize(
    ("own", "label"),
    [
        *((np.float16, "bfloat16"), (ml_dtypes.bfloat16, "float16"), (np.float32, "float16"), (np.float16, "float32")),
        *((ml_dtypes.float8_e4m3fn, "float8_e5m2"), (ml_dtypes.float8_e5m2, "uint8"), (np.int8, "float8_e4m3")),
        *(
            (np.float32, "int32"),
            (np.float64, "complex64"),
            (np.complex64, "float64"),
            (ml_dtypes.float8_e8m0fnu, "int8"),
        ),
    ],
)
def test_elements_are_never_relabelled(own: Any, label: str) -> None:
    dtype_error(page_pool=np.zeros((5, 4, 2, 8), own), dtype=label)


@pytest.mark.parametrize(
    "dtype",
    [
        *(ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e4m3b11fnuz, ml_dtypes.float8_e3m4),
        *(np.longdouble, np.clongdouble, "S2", "U1", "M8[s]", "m8[s]"),
    ],
    ids=str,
)
def test_types_without_a_tag(dtype: Any) -> None:
    dtype_error(page_pool=np.zeros((5, 4, 2, 8), dtype))
    if np.dtype(dtype).itemsize == 1:
        dtype_error(page_pool=np.zeros((5, 4, 2, 8), dtype), dtype="float8_e4m3")


def test_objects_and_records() -> None:
    for pool in (np.array([[[[None]]]], dtype=object), np.zeros((1, 1, 1, 1), dtype=[("a", "f2")])):
        for dtype in (None, "float16", "float64"):
            with pytest.raises((hw.HurrayWireError, TypeError)):
                hw.BlockPagedTensor(pool, block_table=[0], seq_ptr=[0, 1], seq_lens=[1], dtype=dtype)
    for other in ([[[[1.0]]]], None, 5, "pool", {}, object(), iter([])):
        with pytest.raises(TypeError):
            worked(page_pool=other)


@pytest.mark.parametrize("dtype", PACKED, ids=str)
def test_unpacked_sub_byte_pools(dtype: hw.Dtype) -> None:
    assert dtype.numpy is not None
    unpacked = np.zeros((5, 4, 2, 8), np.uint8).view(dtype.numpy)
    for arguments in ({}, {"dtype": dtype}, {"dtype": dtype, **PACKED_SIZES}):
        error = dtype_error(page_pool=unpacked, **arguments)
        assert error.code == "packed_pool"
        assert "pack(" in str(error)
    packed = hw.pack(unpacked, dtype)
    t = worked(page_pool=packed, dtype=dtype, **PACKED_SIZES)
    assert (t.num_pages, t.dtype) == (5, dtype)
    assert np.shares_memory(t.page_pool, packed)


@pytest.mark.parametrize("left_out", [*PACKED_SIZES])
def test_packed_pools_need_their_sizes(left_out: str) -> None:
    sizes: dict[str, Any] = {name: size for name, size in PACKED_SIZES.items() if name != left_out}
    with pytest.raises(TypeError, match="page_size, num_heads and head_dim"):
        worked(page_pool=np.zeros(160, np.uint8), dtype="int4", **sizes)
    for size in (0.5, "4", None):
        with pytest.raises(TypeError):
            worked(page_pool=np.zeros(160, np.uint8), dtype="int4", **sizes, **{left_out: size})
    for number in (-1, 2**64):
        with pytest.raises(hw.InvalidDescriptorError):
            worked(page_pool=np.zeros(160, np.uint8), dtype="int4", **sizes, **{left_out: number})


def test_packed_pools_hold_whole_pages() -> None:
    for nbytes in (159, 161, 1):
        with pytest.raises(hw.InvalidDescriptorError) as caught:
            worked(page_pool=np.zeros(nbytes, np.uint8), dtype="int4", **PACKED_SIZES)
        assert caught.value.code == "buffer_size"


@pytest.mark.parametrize("name", ["page_size", "num_heads", "head_dim"])
def test_sizes_are_checked_against_the_pool(name: str) -> None:
    assert worked(**PACKED_SIZES) == worked()
    with pytest.raises(hw.InvalidDescriptorError):
        worked(**PACKED_SIZES | {name: 3})


def test_private_types() -> None:
    pool = np.arange(960, dtype=np.uint8)
    extension = hw.ExtensionType(24, is_float=False, is_signed=True)
    t = worked(page_pool=pool, dtype=hw.Dtype.private(0xF2), extension_type=extension, **PACKED_SIZES)
    assert (t.num_pages, t.descriptor.bit_width) == (5, 24)
    assert np.shares_memory(t.page_pool, pool)
    dtype_error(page_pool=pool, dtype=0xF2, **PACKED_SIZES)
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        worked(extension_type=hw.ExtensionType(16, is_float=True, is_signed=False))
    assert caught.value.code == "extension_type"
    with pytest.raises(hw.HurrayWireError):  # no quantisation with it
        worked(
            page_pool=pool,
            dtype=0xF2,
            extension_type=extension,
            quantization=hw.PerTensorAffine(1.0),
            **PACKED_SIZES,
        )


# A tensor on a device.


class OnDevice:
    """What an array of a GPU library shows: a device pointer, and a refusal to be exported."""

    __cuda_array_interface__: ClassVar = {"shape": (5, 4, 2, 8), "typestr": "<f2", "data": (4096, False), "version": 3}

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("Cannot export device memory to the CPU")


@pytest.mark.parametrize("name", ["page_pool", "block_table", "seq_ptr", "seq_lens", "scales"])
def test_an_array_on_a_gpu_is_a_type_error(name: str) -> None:
    arguments: dict[str, Any] = {name: OnDevice()}
    if name == "scales":
        arguments |= {"quantization": "per_block", "page_pool": np.zeros((5, 4, 2, 8), np.int8)}
    with pytest.raises(TypeError):
        worked(**arguments)


# Memory.


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("dtype", NAMED, ids=str)
def test_the_pool_is_never_copied(make: str, dtype: hw.Dtype) -> None:
    assert dtype.numpy is not None
    pool = made(np.zeros(320, dtype.numpy), Geometry(5, 4, 2, 8), make)
    t = worked(page_pool=pool)
    assert np.shares_memory(t.page_pool, pool)
    assert (t.page_pool.shape, t.page_pool.strides) == (pool.shape, pool.strides)


def test_a_pool_larger_than_memory_can_be_described_and_read() -> None:
    """One page, broadcast to 2^40 of them: 256 TiB that are nowhere."""
    page = np.arange(128, dtype=np.float16).reshape(1, 8, 2, 8)
    tracemalloc.start()
    try:
        t = worked(page_pool=np.broadcast_to(page, (2**40, 8, 2, 8)), block_table=[2**40 - 1, 7, 2**35])
        assert (t.num_pages, t.nbytes) == (2**40, 2**48 + 24 + 24)
        assert np.array_equal(t.gather(1), page[0, :3])
        three = worked(page_pool=np.repeat(page, 3, 0), block_table=[0, 1, 2], index_type="uint64")
        assert hw.encode(t, pages="live") == hw.encode(three)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.is_flat], ids=str)
def test_a_packed_pool_is_never_copied(dtype: hw.Dtype) -> None:
    size = 320 * dtype.bit_width // 8
    for pool in (np.zeros(size, np.uint8), np.zeros(2 * size, np.uint8)[::2], np.zeros(size, np.uint8)[::-1]):
        assert np.shares_memory(worked(page_pool=pool, dtype=dtype, **PACKED_SIZES).page_pool, pool)


def test_a_packed_pool_with_dirty_spare_bits_is_never_copied() -> None:
    pool = np.full(8, 0xFF, np.uint8)
    t = worked(page_pool=pool, dtype="int4", page_size=1, num_heads=1, head_dim=3, seq_lens=[2, 1])
    assert t.num_pages == 5
    assert np.shares_memory(t.page_pool, pool)
    assert hw.encode(t, framing="bare").endswith(bytes([*[0xFF] * 7, 0x0F]) + BT.tobytes() + SP.tobytes())
    assert hw.decode(hw.encode(t)) == t


def test_index_arrays_are_copied_and_frozen() -> None:
    table, ptr, lens = BT.copy(), SP.copy(), np.array([6, 3], "<u4")
    t = worked(block_table=table, seq_ptr=ptr, seq_lens=lens)
    table[:], ptr[:], lens[:] = 99, 99, 99
    assert t == worked()
    assert t.seq_lens is not None
    for array in (t.block_table, t.seq_ptr, t.seq_lens):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


@pytest.mark.parametrize("framing", ["bare", "hrkv"])
def test_index_arrays_are_copied_and_frozen_on_decode(framing: Any) -> None:
    data = bytearray(hw.encode(worked(), framing=framing))
    t = hw.decode(data)
    before = [a.copy() for a in (t.block_table, t.seq_ptr)]
    data[:] = b"\xff" * len(data)
    for array, kept in zip((t.block_table, t.seq_ptr), before, strict=True):
        assert np.array_equal(array, kept)
        assert not array.flags.writeable
    if framing == "hrkv":
        assert t.seq_lens is not None
        assert t.seq_lens.tolist() == [6, 3]


def test_metadata_is_copied_in_and_out() -> None:
    told: dict[str, Any] = {"seq_ids": ["a", "b"], "my.x": {"deep": [1]}}
    t = worked(metadata=told)
    told["my.x"]["deep"].append(2)
    assert t.metadata == {"seq_ids": ["a", "b"], "my.x": {"deep": [1]}}
    t.metadata["my.x"]["deep"].append(3)
    assert t.metadata == {"seq_ids": ["a", "b"], "my.x": {"deep": [1]}}
    assert worked(metadata={}).metadata is None


@given(data=st.data())
def test_a_tensor_is_frozen(data: st.DataObject) -> None:
    t = data.draw(tensors()).tensor
    for name in ("page_pool", "block_table", "metadata", "layer_index", "anything"):
        with pytest.raises(AttributeError):
            setattr(t, name, None)
    with pytest.raises(TypeError):
        hash(t)


def test_torch_is_not_needed() -> None:
    if "torch" not in sys.modules:
        with pytest.raises(TypeError):
            hw.from_torch(POOL)
