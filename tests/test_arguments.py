"""A caller's own mistakes are TypeError or ValueError, whatever argument they are made in; nothing else comes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import POOL, raw, worked

import hurray_wire as hw

JUNK: list[Any] = [
    *(
        None,
        True,
        -1,
        2**70,
        1.5,
        float("nan"),
        1j,
        "",
        "x",
        b"x",
        (),
        [],
        [1],
        ["x"],
        {},
        {"a": 1},
        {1},
        object(),
        int,
    ),
    *(np.zeros(3), np.zeros((2, 2)), np.array(5), np.array("x"), np.array([None]), np.float32(1), np.zeros(0)),
    *(range(3), iter([1]), Ellipsis, ValueError, lambda: 1, memoryview(b"abc"), slice(1)),
]
ARGUMENTS = (
    *("page_pool", "block_table", "seq_ptr", "seq_lens", "total_tokens", "kv_role", "layer_index", "index_type"),
    *("dtype", "page_size", "num_heads", "head_dim", "quantization", "scales", "zero_points", "statistics"),
    *("extension_type", "composite", "metadata"),
)
PACKED: dict[str, Any] = {
    **{"page_pool": np.zeros(160, np.uint8), "dtype": "int4", "page_size": 4, "num_heads": 2, "head_dim": 8},
}
PRIVATE: dict[str, Any] = {
    **PACKED,
    "dtype": 0xF1,
    "extension_type": hw.ExtensionType(4, is_float=False, is_signed=True),
}
QUANTISED: dict[str, Any] = {
    **{"page_pool": np.zeros((5, 4, 2, 8), np.int8), "quantization": "per_block"},
    **{"scales": np.ones((5, 4), np.float32), "zero_points": np.zeros((5, 4), np.int32)},
}
SOUND: dict[str, dict[str, Any]] = {"plain": {}, "packed": PACKED, "private": PRIVATE, "quantised": QUANTISED}


def only_expected(call: Any) -> None:
    try:
        call()
    except (TypeError, ValueError):
        return


@pytest.mark.parametrize("kind", SOUND)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_constructing(name: str, kind: str) -> None:
    for junk in JUNK:
        only_expected(lambda junk=junk: worked(**SOUND[kind] | {name: junk}))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_replacing(name: str) -> None:
    for t in (worked(), worked(**QUANTISED), worked(**PRIVATE)):
        for junk in JUNK:
            only_expected(lambda junk=junk, t=t: t.replace(**{name: junk}))


OPTIONS = ("framing", "pages", "scrub", "compression", "checksum", "alignment", "chunk_bytes", "threads", "sequence")


@pytest.mark.parametrize("name", [*OPTIONS, "last", "stream_id"])
def test_encoding(name: str) -> None:
    for write in (hw.encode, hw.encode_parts, hw.encode_buffer, hw.encode_header, hw.encoded_size):
        for junk in JUNK:
            only_expected(lambda junk=junk, write=write: write(worked(), **{name: junk}))


@pytest.mark.parametrize("name", ["strict", "verify", "expect", "limits", "copy", "alloc", "threads"])
def test_decoding(name: str) -> None:
    for data in (raw(), hw.encode(worked()), hw.encode(worked(page_pool=np.zeros_like(POOL)), compression="zstd")):
        for junk in JUNK:
            only_expected(lambda junk=junk, data=data: hw.decode(data, **{name: junk}))


def test_what_is_no_tensor_and_no_buffer() -> None:
    for write in (hw.encode, hw.encode_parts, hw.encode_buffer, hw.encode_header, hw.encoded_size):
        for junk in JUNK:
            with pytest.raises((TypeError, ValueError)):
                write(junk)
    for junk in JUNK:
        with pytest.raises((TypeError, ValueError)):
            hw.decode(junk)
        with pytest.raises((TypeError, ValueError)):
            hw.encode_into(worked(), junk)
        with pytest.raises((TypeError, ValueError)):
            hw.TensorDescriptor.decode(junk)
        with pytest.raises((TypeError, ValueError)):
            hw.decode_quantization(junk)


EXPECTABLE = (
    "dtype",
    "page_size",
    "num_heads",
    "head_dim",
    "kv_role",
    "layer_index",
    "num_seqs",
    "quantization",
    "model",
)


@pytest.mark.parametrize("name", EXPECTABLE)
def test_expecting(name: str) -> None:
    for junk in JUNK:
        only_expected(lambda junk=junk: hw.decode(raw(), expect={name: junk}))


def test_expecting_what_is_no_mapping() -> None:
    for junk in JUNK:
        if junk is not None and not isinstance(junk, dict):
            with pytest.raises((TypeError, ValueError)):
                hw.decode(raw(), expect=junk)


VALUES: dict[str, Any] = {
    "layout": lambda junk: hw.BlockPagedLayout(4, 5, 0, junk),
    "layout role": lambda junk: hw.BlockPagedLayout(4, 5, 0, 2, junk),
    "shape": lambda junk: hw.BlockPagedLayout(4, 5, 0, 2).validate_against_shape(junk),
    "seq_ptr": lambda junk: hw.BlockPagedLayout(4, 5, 0, 2).validate_index_buffers(junk, [0]),
    "block_table": lambda junk: hw.BlockPagedLayout(4, 5, 0, 2).validate_index_buffers([0, 1, 1], junk),
    "compatibility": lambda junk: hw.BlockPagedLayout(4, 5, 0, 2).validate_quantization_compatibility(junk),
    "Dtype.of": hw.Dtype.of,
    "Dtype.private": hw.Dtype.private,
    "pack": lambda junk: hw.pack(junk, "int4"),
    "pack dtype": lambda junk: hw.pack(np.zeros(2, np.uint8), junk),
    "unpack": lambda junk: hw.unpack(junk, "int4", 2),
    "unpack count": lambda junk: hw.unpack(np.zeros(2, np.uint8), "int4", junk),
    "scale": hw.PerTensorAffine,
    "zero point": lambda junk: hw.PerTensorAffine(1.0, junk),
    "channel": lambda junk: hw.PerChannelAffine.asymmetric(1, junk, junk),
    "block": lambda junk: hw.PerBlockAffine.symmetric(0, junk, 3, "float32"),
    "scale type": lambda junk: hw.PerBlockAffine.symmetric(0, 4, 3, junk),
    "NF4": lambda junk: hw.NF4(junk, 8, 3),
    "MXFP": lambda junk: hw.MXFP(0, 16, junk),
    "handle": hw.BufferHandle,
    "handle alignment": lambda junk: hw.BufferHandle(1, junk),
    "handle device": lambda junk: hw.BufferHandle(1, device=junk),
    "handle sync": lambda junk: hw.BufferHandle(1, sync_mode=junk),
    "handle memory": lambda junk: hw.BufferHandle(1, memory_class=junk),
    "nnz": lambda junk: worked(statistics=hw.Statistics(nnz=junk)),
    "sparsity": lambda junk: worked(statistics=hw.Statistics(sparsity_ratio=junk)),
    "moments": lambda junk: worked(statistics=hw.Statistics(value_mean=junk, value_stddev=1.0)),
    "flags": lambda junk: worked(statistics=hw.Statistics(has_nan=junk, has_inf=False)),
    "bits": lambda junk: hw.ExtensionType(junk, is_float=False, is_signed=False),
    "bias": lambda junk: hw.ExtensionType(8, is_float=False, is_signed=False, exponent_bias=junk),
    "limit": lambda junk: hw.Limits(frame_bytes=junk),
    "descriptor": lambda junk: hw.TensorDescriptor(junk, junk, junk, junk),
    "same_tokens": lambda junk: worked().same_tokens(junk),
    "gather out": lambda junk: worked().gather(0, out=junk),
    "dequantize out": lambda junk: worked().dequantize(0, out=junk),
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    for junk in JUNK:
        only_expected(lambda junk=junk: VALUES[name](junk))


@pytest.mark.parametrize("reader", ["gather", "dequantize", "pages", "live_pages", "token_slots"])
def test_reading(reader: str) -> None:
    for junk in JUNK:
        try:
            getattr(worked(), reader)(junk)
        except (TypeError, ValueError, IndexError):
            continue
        assert junk is None
        assert reader == "token_slots"


def test_offsets() -> None:
    for at in range(4):
        for junk in JUNK:
            coordinates: list[Any] = [0, 0, 0, 0]
            coordinates[at] = junk
            try:
                worked().element_offset(*coordinates)
            except (TypeError, ValueError, IndexError):
                continue
            assert isinstance(junk, list | range | np.ndarray | tuple | memoryview)
