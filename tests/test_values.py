"""`BufferHandle`, `Statistics`, `ExtensionType`, `TensorDescriptor`, `Limits` and the errors, as values."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Built, extension_types, statistics, tensors
from support import desc

import hurray_wire as hw

LAYOUT = hw.BlockPagedLayout(4, 5, 0, 2, layer_index=3)
BUFFERS = [hw.BufferHandle(640), hw.BufferHandle(12), hw.BufferHandle(12)]
NAMES = ("cpu", "cuda", "rocm", "metal", "vulkan", "webgpu", "hexagon", "level_zero", "opencl")
MEMORY = ("standard", "host_pinned", "unified", "peer")


def refused(code: str, call: Any, *args: Any, **kwargs: Any) -> hw.HurrayWireError:
    with pytest.raises(hw.HurrayWireError) as caught:
        call(*args, **kwargs)
    assert caught.value.code == code
    return caught.value


def described(**changes: Any) -> hw.TensorDescriptor:
    arguments: dict[str, Any] = {"dtype": "float16", "shape": (9, 2, 8), "layout": LAYOUT, "buffers": BUFFERS} | changes
    return hw.TensorDescriptor(
        arguments.pop("dtype"),
        arguments.pop("shape"),
        arguments.pop("layout"),
        arguments.pop("buffers"),
        **arguments,
    )


# Buffer handles.


def test_a_handle() -> None:
    handle = hw.BufferHandle(640)
    assert dataclasses.astuple(handle) == (640, 64, "cpu", "producer_synced", "standard")
    assert handle == hw.BufferHandle(byte_size=640, alignment=64)
    assert len({handle, hw.BufferHandle(640), hw.BufferHandle(641)}) == 2
    assert pickle.loads(pickle.dumps(handle)) == copy.deepcopy(handle) == handle
    with pytest.raises(dataclasses.FrozenInstanceError):
        handle.byte_size = 1  # type: ignore[misc]
    assert hw.BufferHandle(2**64 - 1, 2**31).byte_size == 2**64 - 1


def test_a_handle_holds_python_integers() -> None:
    handle = hw.BufferHandle(np.int64(640), np.uint8(128))  # type: ignore[arg-type]
    assert (type(handle.byte_size), type(handle.alignment)) == (int, int)


def test_handle_alignment() -> None:
    for exponent in range(32):
        alignment = 1 << exponent
        assert hw.BufferHandle(0, alignment).alignment == alignment
        if alignment >= 64:
            assert hw.BufferHandle(1, alignment).alignment == alignment
        else:
            refused("alignment", hw.BufferHandle, 1, alignment)
    for alignment in (0, 3, 65, 96, 2**32 - 1, 2**32, -64):
        refused("alignment", hw.BufferHandle, 1, alignment)
        refused("alignment", hw.BufferHandle, 0, alignment)
    for size in (-1, 2**64):
        refused("buffer_size", hw.BufferHandle, size)


@pytest.mark.parametrize("device", [*NAMES, *range(0xF0, 0xFF)])
def test_handle_places(device: Any) -> None:
    classes = {
        **dict.fromkeys(("cpu", "metal", "hexagon", "opencl"), MEMORY[:3]),
        **dict.fromkeys(("cuda", "rocm", "vulkan", "level_zero"), MEMORY),
        "webgpu": MEMORY[:1],
    }.get(device, ("standard", *range(0xF0, 0xFF)))
    for memory in (*MEMORY, *range(0xF0, 0xFF), 4, 0xEF, 0xFF):
        if memory in classes:
            handle = hw.BufferHandle(640, device=device, memory_class=memory)
            assert (handle.device, handle.memory_class) == (device, memory)
            moved = described(buffers=[dataclasses.replace(b, device=device, memory_class=memory) for b in BUFFERS])
            assert hw.TensorDescriptor.decode(moved.encode()) == moved
        else:
            refused("memory_class", hw.BufferHandle, 640, device=device, memory_class=memory)


def test_a_place_has_one_name() -> None:
    """By number or by name, a handle is what it reads back as."""
    for tag, name in enumerate(NAMES):
        try:
            handle = hw.BufferHandle(640, device=tag)
        except hw.InvalidDescriptorError:
            continue
        assert handle == hw.BufferHandle(640, device=name)


def test_unknown_places() -> None:
    for device in ("CPU", "tpu", "", 9, 0x80, 0xEF, 0xFF, 256, -1):
        refused("device", hw.BufferHandle, 640, device=device)
    for memory in ("pinned", "", 256, -1):
        refused("memory_class", hw.BufferHandle, 640, memory_class=memory)
    for mode in ("event", "consumer_stream", "none", 1, 2, 3, 255, 256):
        refused("sync_mode", hw.BufferHandle, 640, sync_mode=mode)
    wrong: list[dict[str, Any]] = [
        *({"device": None}, {"device": 1.0}, {"memory_class": True}, {"sync_mode": b"event"}, {"alignment": "64"})
    ]
    for fields in wrong:
        with pytest.raises(TypeError):
            hw.BufferHandle(640, **fields)
    with pytest.raises(TypeError):
        hw.BufferHandle(640.0)  # type: ignore[arg-type]


# Statistics.


@given(statistics=statistics())
def test_statistics_come_back_bit_for_bit(statistics: hw.Statistics) -> None:
    d = described(statistics=statistics)
    data = d.encode()
    again = hw.TensorDescriptor.decode(data)
    assert len(data) == 133 + 72
    assert again.encode() == data
    assert again == d
    names = [field.name for field in dataclasses.fields(statistics)]
    for name in names:
        mine, theirs = getattr(statistics, name), getattr(again.statistics, name)
        assert (mine is None, type(mine)) == (theirs is None, type(theirs))
        if isinstance(mine, float):
            assert struct.pack("<d", mine) == struct.pack("<d", theirs)
        else:
            assert mine == theirs


def test_statistics_layout() -> None:
    told = hw.Statistics(nnz=319, value_min=-0.0, value_max=1.5, value_abs_max=1.5, has_nan=True, has_inf=False)
    data = described(statistics=told).encode()
    assert data[10:14] == b"\x08\0\0\0"
    assert data[133:] == struct.pack("<IIQ6d4B4x", 1 | 4 | 32, 0, 319, 0.0, -0.0, 1.5, 1.5, 0.0, 0.0, 0, 0, 1, 0)
    assert told.computed_mask == 1 | 4 | 32
    assert hw.Statistics().computed_mask == 0


def test_what_the_mask_leaves_out_is_ignored_and_written_zero() -> None:
    dirty = struct.pack("<IIQ6d4B4x", 1, 0, 7, 1.0, 2.0, 3.0, 4.0, 5.0, math.nan, 9, 9, 77, 99)
    clean = struct.pack("<IIQ6d4B4x", 1, 0, 7, *[0.0] * 6, 0, 0, 0, 0)
    found = hw.TensorDescriptor.decode(desc(flags=8, tail=dirty))
    assert found.statistics == hw.Statistics(nnz=7)
    assert found.encode() == desc(flags=8, tail=clean)


@pytest.mark.parametrize(
    "group", [("value_min", "value_max", "value_abs_max"), ("value_mean", "value_stddev"), ("nm_n", "nm_m")]
)
def test_half_a_group_is_refused(group: tuple[str, ...]) -> None:
    for left_out in group:
        half: dict[str, Any] = {name: 1 for name in group if name != left_out}
        refused("statistics", hw.Statistics, **half)
    whole: dict[str, Any] = dict.fromkeys(group, 1)
    assert hw.Statistics(**whole).computed_mask


def test_statistics_of_the_wrong_kind_are_refused_when_made() -> None:
    ranges: list[dict[str, Any]] = [{"nnz": -1}, {"nnz": 2**64}, {"nm_n": 256, "nm_m": 1}, {"nm_n": 1, "nm_m": -1}]
    for fields in ranges:
        refused("statistics", hw.Statistics, **fields)
    wrong: list[dict[str, Any]] = [
        *({"nnz": 1.5}, {"nnz": "1"}, {"sparsity_ratio": "0.5"}, {"sparsity_ratio": [0.5]}, {"sparsity_ratio": 1j}),
        *({"value_mean": b"x", "value_stddev": 1.0}, {"nm_n": 1.0, "nm_m": 2}),
    ]
    for fields in wrong:
        with pytest.raises(TypeError):
            hw.Statistics(**fields)
    huge: list[dict[str, Any]] = [{"sparsity_ratio": 10**400}, {"value_mean": 10**400, "value_stddev": 1}]
    for fields in huge:
        with pytest.raises((TypeError, ValueError)):
            hw.Statistics(**fields)
    with pytest.raises((TypeError, ValueError)):
        hw.Statistics(has_nan=2, has_inf=False)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        hw.Statistics(319)  # type: ignore[call-arg]


def test_statistics_take_numpy_numbers() -> None:
    told = hw.Statistics(nnz=np.int64(3), sparsity_ratio=np.float32(0.5), has_nan=np.bool_(True), has_inf=False)  # type: ignore[arg-type]
    assert (
        described(statistics=told).encode()
        == described(statistics=hw.Statistics(nnz=3, sparsity_ratio=0.5, has_nan=True, has_inf=False)).encode()
    )


# Extension types.


@given(extension=extension_types(widths=(1, 2, 4, 8, 16, 24, 2**32 - 8)), tag=st.integers(0xF0, 0xFE))
def test_extension_types_come_back(extension: hw.ExtensionType, tag: int) -> None:
    bits = extension.bit_width
    sizes = (5 * 4 * 2 * 8 * bits // 8, 12, 12)
    d = described(dtype=tag, buffers=[hw.BufferHandle(n) for n in sizes], extension_type=extension)
    assert d.encoded_length == 153
    packing = {1: 8, 2: 4, 4: 2}.get(bits, 1)
    assert extension.packing == packing
    tail = struct.pack(
        "<I6B2xI2B2x",
        *(bits, packing, extension.is_float, extension.is_signed, extension.sign_bits, extension.exponent_bits),
        *(extension.mantissa_bits, extension.exponent_bias, extension.has_nan, extension.has_inf),
    )
    assert d.encode() == desc(type_tag=tag, flags=4, sizes=sizes, tail=tail)
    again = hw.TensorDescriptor.decode(d.encode())
    assert again == d
    assert again.extension_type == extension
    assert hash(again.extension_type) == hash(extension)


def test_extension_types_refuse() -> None:
    kind: dict[str, Any] = {"is_float": False, "is_signed": False}
    for width in (0, 3, 5, 6, 7, 9, 12, 2**32 - 1, 2**32, -8):
        refused("extension_type", hw.ExtensionType, width, **kind)
    for name in ("sign_bits", "exponent_bits", "mantissa_bits"):
        refused("extension_type", hw.ExtensionType, 8, **kind, **{name: 256})
    refused("extension_type", hw.ExtensionType, 8, **kind, exponent_bias=2**32)
    with pytest.raises(TypeError):
        hw.ExtensionType(8)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        hw.ExtensionType(8, False, False)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        hw.ExtensionType(8.0, **kind)  # type: ignore[arg-type]


# Descriptors.


@given(built=tensors())
def test_descriptors_come_back(built: Built) -> None:
    d = built.tensor.descriptor
    data = d.encode()
    again = hw.TensorDescriptor.decode(data)
    assert again.encode() == data
    assert again == d
    assert hash(again) == hash(d)
    assert pickle.loads(pickle.dumps(d)) == d
    assert d.encoded_length == len(data) == int.from_bytes(data[6:10], "little")
    assert len(data) % 2 == 1
    for buffer in (bytearray(data), memoryview(data), np.frombuffer(data, np.uint8), data + b"payload"):
        assert hw.TensorDescriptor.decode(buffer) == d


def test_a_descriptor_is_frozen() -> None:
    d = described()
    for name in ("dtype", "shape", "layout", "buffers", "quantization", "anything"):
        with pytest.raises(AttributeError):
            setattr(d, name, None)
    assert repr(d).startswith("TensorDescriptor(")
    assert d != described(shape=(8, 2, 8))
    assert d not in [None, d.encode(), repr(d)]
    assert {d, described()} == {d}


def test_lengths_to_check_against() -> None:
    def length(*, scheme: Any = None, extra: tuple[int, ...] = (), bits: int = 8, **more: Any) -> int:
        buffers = [hw.BufferHandle(n) for n in (320 * bits // 8, 12, 12, *extra)]
        dtype = more.pop("dtype", "int8")
        return described(dtype=dtype, buffers=buffers, quantization=scheme, **more).encoded_length

    channel, block = hw.PerChannelAffine, hw.PerBlockAffine
    assert length() == 133
    assert length(scheme=hw.PerTensorAffine(1.0)) == 153
    assert length(scheme=channel.symmetric(1, 3), extra=(8,)) == 173
    assert length(scheme=channel.asymmetric(1, 3, 4), extra=(8, 8)) == 189
    assert length(scheme=block.symmetric(0, 4, 3, "float32"), extra=(80,)) == 177
    assert length(scheme=block.asymmetric(0, 4, 3, 4, "float16"), extra=(40, 80)) == 193
    assert length(scheme=hw.NF4(2, 8, 3), extra=(5,), dtype="uint4", bits=4) == 169
    assert length(scheme=hw.MXFP(2, 16, 3), extra=(0,)) == 169
    assert length(statistics=hw.Statistics()) == 133 + 72
    assert length(composite="base") == length(composite="correction") == 133 + 16
    everything: dict[str, Any] = {"statistics": hw.Statistics(nnz=1), "composite": "base"}
    assert length(scheme=block.asymmetric(0, 4, 3, 4, "float16"), extra=(40, 80), **everything) == 193 + 72 + 16


def test_the_writer_refuses_what_the_reader_refuses() -> None:
    """One set of rules for both directions."""
    broken: list[tuple[str, dict[str, Any]]] = [
        ("rank", {"shape": (9, 2)}),
        ("shape", {"shape": (-1, 2, 8)}),
        ("shape", {"shape": (2**64, 2, 8)}),
        ("dynamic", {"shape": (2**64 - 1, 2, 8)}),
        ("page_size", {"layout": hw.BlockPagedLayout(0, 5, 0, 2)}),
        ("paged_axis", {"layout": hw.BlockPagedLayout(4, 5, 1, 2)}),
        ("buffer_count", {"buffers": BUFFERS[:2]}),
        ("buffer_count", {"buffers": [*BUFFERS, hw.BufferHandle(0, 1)]}),
        ("buffer_size", {"buffers": [hw.BufferHandle(641), *BUFFERS[1:]]}),
        ("buffer_size", {"buffers": [hw.BufferHandle(639), *BUFFERS[1:]]}),
        ("buffer_size", {"buffers": [*BUFFERS[:2], hw.BufferHandle(16)]}),
        ("colocation", {"buffers": [hw.BufferHandle(640, device="cuda"), *BUFFERS[1:]]}),
        ("dtype", {"dtype": 0xF0}),
        ("quantization_storage", {"quantization": hw.PerTensorAffine(1.0)}),
        ("composite", {"composite": "member"}),
    ]
    for code, changes in broken:
        refused(code, described, **changes)
    extension = hw.ExtensionType(16, is_float=True, is_signed=False)
    refused("extension_type", described, extension_type=extension)
    others: list[dict[str, Any]] = [
        *({"layout": None}, {"buffers": [640, 12, 12]}, {"quantization": "per_tensor"}, {"statistics": {}})
    ]
    for wrong in others:
        with pytest.raises(TypeError):
            described(**wrong)


def test_every_sum_and_product_is_exact() -> None:
    """Sizes that wrap to the right number in 64 bits are not right."""
    wraps: list[dict[str, Any]] = [
        {"shape": (9, 2**33, 2**33), "layout": hw.BlockPagedLayout(4, 2**33, 0, 2), "size": 0},
        {"shape": (9, 2**32 + 1, 2**32 + 1), "layout": hw.BlockPagedLayout(1, 1, 0, 2), "size": (2**33 + 1) * 2},
        {"shape": (9, 2**62, 8), "layout": hw.BlockPagedLayout(1, 1, 0, 2), "size": 0},
    ]
    for told in wraps:
        refused("buffer_size", described, buffers=[hw.BufferHandle(told.pop("size"), 64), *BUFFERS[1:]], **told)
