"""Element types: names, tags, widths, lookup from anything; packing of the sub-byte ones against plain integers."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, NAMED, PACKED, packed_size

import hurray_wire as hw

# name, tag, bits (section 2)
TABLE = [
    *(("float16", 0x01, 16), ("bfloat16", 0x02, 16), ("float32", 0x03, 32), ("float64", 0x04, 64)),
    *(("int8", 0x10, 8), ("uint8", 0x11, 8), ("int16", 0x12, 16), ("uint16", 0x13, 16), ("int32", 0x14, 32)),
    *(("uint32", 0x15, 32), ("int64", 0x16, 64), ("uint64", 0x17, 64), ("bool", 0x20, 1)),
    *(("float8_e4m3", 0x40, 8), ("float8_e5m2", 0x41, 8), ("float8_e8m0", 0x42, 8), ("float4_e2m1", 0x43, 4)),
    *(("float6_e2m3", 0x44, 6), ("float6_e3m2", 0x45, 6), ("float128", 0x46, 128), ("int4", 0x48, 4)),
    *(("uint4", 0x49, 4), ("int2", 0x4A, 2), ("uint2", 0x4B, 2), ("complex64", 0x50, 64), ("complex128", 0x51, 128)),
]
ML = {
    **{"bfloat16": ml_dtypes.bfloat16, "float8_e4m3": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2},
    **{"float8_e8m0": ml_dtypes.float8_e8m0fnu, "float4_e2m1": ml_dtypes.float4_e2m1fn},
    **{"float6_e2m3": ml_dtypes.float6_e2m3fn, "float6_e3m2": ml_dtypes.float6_e3m2fn},
    **{"int4": ml_dtypes.int4, "uint4": ml_dtypes.uint4, "int2": ml_dtypes.int2, "uint2": ml_dtypes.uint2},
}
PACKED_IDS = [dtype.name for dtype in PACKED]


def test_the_table_is_all_there_is() -> None:
    assert {(d.name, d.tag, d.bit_width) for d in DTYPES} == set(TABLE)
    known = {tag for _, tag, _ in TABLE} | set(range(0xF0, 0xFF))
    for tag in set(range(-2, 300)) - known:
        with pytest.raises(hw.UnsupportedError) as caught:
            hw.Dtype.of(tag)
        assert caught.value.code == "dtype"


@pytest.mark.parametrize(("name", "tag", "bits"), TABLE)
def test_singletons(name: str, tag: int, bits: int) -> None:
    dtype = getattr(hw, "bool_" if name == "bool" else name)
    assert (dtype.name, dtype.tag, dtype.bit_width, str(dtype)) == (name, tag, bits, name)
    numpy = None if name == "float128" else np.dtype(ML.get(name, name))
    assert dtype.numpy == numpy
    for same in (dtype, name, tag, *((numpy, numpy.type, numpy.newbyteorder(">")) if numpy else ())):
        assert hw.Dtype.of(same) is dtype
    assert pickle.loads(pickle.dumps(dtype)) is dtype
    assert copy.deepcopy(dtype) is dtype
    with pytest.raises(AttributeError):
        dtype.name = "x"


def test_private_types() -> None:
    for tag in range(0xF0, 0xFF):
        dtype = hw.Dtype.private(tag)
        assert dtype is hw.Dtype.private(tag) is hw.Dtype.of(tag) is pickle.loads(pickle.dumps(dtype))
        assert (dtype.tag, dtype.numpy) == (tag, None)
    for tag in (0, 1, 0x7F, 0xEF, 0xFF, -1, 2**40):
        with pytest.raises(hw.UnsupportedError):
            hw.Dtype.private(tag)
    for wrong in ("0xF0", 240.0, None, True):
        with pytest.raises(TypeError):
            hw.Dtype.private(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        *(None, "", "float7", "half-precision", "float8_e4m3fnuz", "complex256", object(), [], {}, (1, 2), True, 1.0),
        *(np.dtype("V2"), np.dtype("S4"), np.dtype("O"), np.dtype("M8[s]"), np.dtype([("a", "f2")]), np.longdouble),
        *(ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e4m3b11fnuz),
        *(ml_dtypes.float8_e4m3, ml_dtypes.float8_e3m4),
    ],
    ids=lambda other: re.sub(" at 0x.*", ">", repr(other)),
)
def test_what_has_no_tag_is_refused(other: Any) -> None:
    with pytest.raises(hw.UnsupportedError) as caught:
        hw.Dtype.of(other)
    assert caught.value.code == "dtype"


def test_fnuz_is_told_what_to_do() -> None:
    for fnuz in (ml_dtypes.float8_e4m3fnuz, np.dtype(ml_dtypes.float8_e5m2fnuz), "float8_e4m3fnuz"):
        with pytest.raises(hw.UnsupportedError, match="convert"):
            hw.Dtype.of(fnuz)


@settings(max_examples=500)
@given(text=st.text(max_size=6) | st.text("fiucbVSOMm?aU0123456789<>=|,()[]: ", max_size=6))
def test_no_name_breaks_the_lookup(text: str) -> None:
    try:
        found = hw.Dtype.of(text)
    except hw.UnsupportedError:
        return
    assert hw.Dtype.of(found.tag) is found


# Packing. The run is one little number: element i at bit i * width.


def number(values: list[int], width: int) -> bytes:
    """Packed by the specification: lowest bits first, in one run."""
    total = sum(value << (width * i) for i, value in enumerate(values))
    return total.to_bytes(packed_size(len(values), width), "little")


def patterns(dtype: hw.Dtype) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 2**dtype.bit_width - 1), max_size=40)


@pytest.mark.parametrize("dtype", PACKED, ids=PACKED_IDS)
@given(data=st.data())
def test_pack_and_unpack(dtype: hw.Dtype, data: st.DataObject) -> None:
    values = data.draw(patterns(dtype))
    raw = np.array(values, np.uint8)
    packed = hw.pack(raw, dtype)
    assert packed.dtype == np.uint8
    assert packed.ndim == 1
    assert packed.tobytes() == number(values, dtype.bit_width)
    elements = hw.unpack(packed, dtype, len(values))
    assert elements.dtype == dtype.numpy
    assert elements.shape == (len(values),)
    assert (elements.view(np.uint8) & (2**dtype.bit_width - 1)).tolist() == values
    assert hw.pack(elements, dtype).tobytes() == packed.tobytes()
    assert hw.pack(elements, dtype.name).tobytes() == packed.tobytes()


@pytest.mark.parametrize("dtype", PACKED, ids=PACKED_IDS)
def test_values_are_those_of_the_numpy_type(dtype: hw.Dtype) -> None:
    assert dtype.numpy is not None
    every = np.arange(2**dtype.bit_width, dtype=np.uint8)
    values = hw.unpack(hw.pack(every, dtype), dtype, every.size).astype(np.float64)
    if dtype.name.startswith("int"):
        half = 2 ** (dtype.bit_width - 1)
        assert values.tolist() == [*range(half), *range(-half, 0)]
    elif dtype.name.startswith(("uint", "bool")):
        assert values.tolist() == every.tolist()
    else:
        assert np.array_equal(values, every.view(dtype.numpy).astype(np.float64))


@pytest.mark.parametrize("dtype", PACKED, ids=PACKED_IDS)
def test_unused_bits_are_written_zero_and_not_read(dtype: hw.Dtype) -> None:
    for count in range(1, 9):
        ones = np.full(count, 2**dtype.bit_width - 1, np.uint8)
        assert hw.pack(ones, dtype).tobytes() == number(ones.tolist(), dtype.bit_width)
        dirty = np.full(packed_size(count, dtype.bit_width) + 2, 0xFF, np.uint8)
        assert hw.unpack(dirty, dtype, count).size == count
        assert hw.pack(hw.unpack(dirty, dtype, count), dtype).tobytes() == number(ones.tolist(), dtype.bit_width)


def test_pack_takes_any_shape_and_strides() -> None:
    values = np.arange(24, dtype=np.uint8).reshape(2, 3, 4) % 16
    assert hw.pack(values, "uint4").tobytes() == number(values.reshape(-1).tolist(), 4)
    turned = values.transpose(2, 0, 1)[::-1]
    assert hw.pack(turned, "uint4").tobytes() == number(turned.reshape(-1).tolist(), 4)
    assert hw.pack(np.zeros(0, np.uint8), "bool").size == hw.unpack(np.zeros(0, np.uint8), "int4", 0).size == 0


def test_pack_and_unpack_refuse() -> None:
    for dtype in (*NAMED, hw.float128, hw.Dtype.private(0xF0)):
        with pytest.raises(hw.UnsupportedError):
            hw.pack(np.zeros(2, np.uint8), dtype)
        with pytest.raises(hw.UnsupportedError):
            hw.unpack(np.zeros(2, np.uint8), dtype, 1)
    for wrong in (np.zeros(2, np.float32), np.zeros(2, np.int64), np.zeros(2, ml_dtypes.int4)):
        with pytest.raises(TypeError):
            hw.pack(wrong, "uint4")
    for count in (-1, 5, 2**70):
        with pytest.raises(ValueError, match="elements"):
            hw.unpack(np.zeros(2, np.uint8), "uint4", count)
