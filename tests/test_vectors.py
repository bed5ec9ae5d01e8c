"""The golden bytes: the reference's bare blobs and the independent encoder's frames say what their manifests say."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from frames import PAGE_POOL, entries_of
from strategies import packed_size
from support import BARE_CASES, FRAME_CASES, bare_vector, frame_vector, pool_bytes, sha256, verdict

import hurray_wire as hw

RAW_FRAMES = [name for name in FRAME_CASES if name.startswith(("raw", "uint64", "empty"))]
SCHEMES = {"per_tensor": hw.PerTensorAffine, "per_channel": hw.PerChannelAffine, "per_block": hw.PerBlockAffine}


def told_lens(name: str) -> hw.BlockPagedTensor:
    """A vector with the token counts that only its generator knew."""
    return hw.decode(bare_vector(name)).replace(seq_lens=BARE_CASES[name]["seq_lens"])


def codes(elements: Any, bits: int) -> list[int]:
    """The bit patterns of gathered elements, as unsigned integers."""
    data = elements.tobytes()
    step = max(1, bits // 8)
    mask = (1 << bits) - 1
    return [int.from_bytes(data[i : i + step], "little") & mask for i in range(0, len(data), step)]


def test_there_are_vectors_of_both_forms() -> None:
    assert len(BARE_CASES) >= 40
    assert len(FRAME_CASES) >= 12
    assert {case["file"] for case in BARE_CASES.values()} == {f"{name}.hrry" for name in BARE_CASES}


@pytest.mark.parametrize("name", BARE_CASES)
def test_the_file_is_the_one_in_the_manifest(name: str) -> None:
    case, data = BARE_CASES[name], bare_vector(name)
    assert (len(data), sha256(data)) == (case["bytes"], case["sha256"])


@pytest.mark.parametrize("name", BARE_CASES)
def test_bare_fields(name: str) -> None:
    case, tensor = BARE_CASES[name], hw.decode(bare_vector(name))
    layout = case["layout"]
    assert (tensor.dtype.name, tensor.dtype.tag) == (case["dtype"], case["type_tag"])
    assert tensor.descriptor.bit_width == case["bit_width"]
    assert tensor.shape == tuple(case["shape"])
    assert tensor.layout == hw.BlockPagedLayout(**layout)
    assert (tensor.kv_role, tensor.layer_index) == (layout["kv_role"], layout["layer_index"])
    assert tensor.block_table.tolist() == case["block_table"]
    assert tensor.seq_ptr.tolist() == case["seq_ptr"]
    assert tensor.block_table.dtype == tensor.seq_ptr.dtype == np.dtype(layout["block_table_index_type"])
    assert tensor.violations == ()
    assert tensor.metadata is None


@pytest.mark.parametrize("name", BARE_CASES)
def test_bare_buffers(name: str) -> None:
    case, tensor = BARE_CASES[name], hw.decode(bare_vector(name))
    arrays = (tensor.page_pool, tensor.block_table, tensor.seq_ptr, tensor.scales, tensor.zero_points)
    found = [a.tobytes().hex() for a in arrays if a is not None]
    assert found == [buffer["hex"] for buffer in case["buffers"]]
    handles = [(h.byte_size, h.alignment, h.device, h.memory_class) for h in tensor.descriptor.buffers]
    place = (case["device"]["kind"], case["device"]["memory_class"])
    assert handles == [(b["byte_size"], b["alignment"], *place) for b in case["buffers"]]
    if not tensor.dtype.is_flat:
        layout = case["layout"]
        assert tensor.page_pool.shape == (layout["num_pages"], layout["page_size"], *case["shape"][1:])
        assert tensor.page_pool.dtype == tensor.dtype.numpy


@pytest.mark.parametrize("name", BARE_CASES)
def test_bare_optional_tables(name: str) -> None:
    case, tensor = BARE_CASES[name], hw.decode(bare_vector(name))
    scheme = case["quantization"]
    if scheme is None:
        assert tensor.quantization is None
    else:
        assert type(tensor.quantization) is SCHEMES[scheme["scheme"]]
        for field in scheme.keys() - {"scheme", "scale_type"}:
            assert getattr(tensor.quantization, field) == scheme[field]
        if "scale_type" in scheme:
            assert isinstance(tensor.quantization, hw.PerBlockAffine)
            assert tensor.quantization.scale_type is hw.Dtype.of(scheme["scale_type"])
            assert tensor.scales is not None
            assert tensor.scales.dtype == hw.Dtype.of(scheme["scale_type"]).numpy
    told = case["statistics"]
    assert tensor.statistics == (None if told is None else hw.Statistics(**told))
    extension = tensor.descriptor.extension_type
    if case["extension_type"] is None:
        assert extension is None
    else:
        assert extension == hw.ExtensionType(**{"is_float": False, **case["extension_type"]})


@pytest.mark.parametrize("name", BARE_CASES)
def test_bare_tokens(name: str) -> None:
    case, tensor = BARE_CASES[name], told_lens(name)
    expected = case["expected"]
    assert tensor.token_slots().tolist() == expected["token_slots"]
    per_sequence = [slot for seq in range(tensor.num_seqs) for slot in tensor.token_slots(seq).tolist()]
    assert per_sequence == expected["token_slots"]
    rows = [token for seq in range(tensor.num_seqs) for token in tensor.gather(seq)]
    assert [codes(row, case["bit_width"]) for row in rows] == expected["token_codes"]


@pytest.mark.parametrize("name", [name for name, case in BARE_CASES.items() if "token_values" in case["expected"]])
def test_bare_values(name: str) -> None:
    case, tensor = BARE_CASES[name], told_lens(name)
    for row, expected in zip(
        (token for seq in range(tensor.num_seqs) for token in tensor.gather(seq)),
        case["expected"]["token_values"],
        strict=True,
    ):
        for value, told in zip(row.reshape(-1).tolist(), expected, strict=True):
            number = math.nan if told is None or told == "nan" else float(told)
            assert float(value) == number or (math.isnan(float(value)) and math.isnan(number))


@pytest.mark.parametrize("name", [name for name, case in BARE_CASES.items() if case["quantization"]])
def test_bare_dequantized(name: str) -> None:
    tensor = told_lens(name)
    rows = [token.reshape(-1) for seq in range(tensor.num_seqs) for token in tensor.dequantize(seq)]
    expected = np.array(BARE_CASES[name]["expected"]["token_dequantized"], np.float32)
    assert np.array(rows).dtype == np.float32
    assert np.array_equal(np.array(rows), expected)


@pytest.mark.parametrize("name", BARE_CASES)
def test_bare_bytes_come_back(name: str) -> None:
    data, case = bare_vector(name), BARE_CASES[name]
    tensor = hw.decode(data)
    assert hw.encode(tensor, framing="bare") == data
    assert tensor.descriptor.encode().hex() == case["descriptor_hex"]
    assert hw.TensorDescriptor.decode(data).encode().hex() == case["descriptor_hex"]
    assert tensor.descriptor.encoded_length == case["descriptor_length"]


def pages_follow_from_bytes(name: str) -> bool:
    """Whether a 1-D pool says how many pages it has: small packed pages hide in the bits that fill up a byte."""
    case = BARE_CASES[name]
    layout, bits = case["layout"], case["bit_width"]
    page = layout["page_size"] * case["shape"][1] * case["shape"][2]
    sizes = {packed_size(pages * page, bits) for pages in (layout["num_pages"], layout["num_pages"] + 1)}
    return bits >= 8 or len(sizes) == 2


@pytest.mark.parametrize("name", [name for name in BARE_CASES if pages_follow_from_bytes(name)])
def test_bare_bytes_are_ours_when_built_anew(name: str) -> None:
    """From arrays, without a decoded descriptor to relay: what the reference wrote is what we write."""
    tensor, case = told_lens(name), BARE_CASES[name]
    again = hw.BlockPagedTensor(
        tensor.page_pool,
        block_table=case["block_table"],
        seq_ptr=case["seq_ptr"],
        seq_lens=case["seq_lens"],
        kv_role=case["layout"]["kv_role"],
        layer_index=case["layout"]["layer_index"],
        index_type=case["layout"]["block_table_index_type"],
        dtype=tensor.dtype,
        page_size=case["layout"]["page_size"],
        num_heads=case["shape"][1],
        head_dim=case["shape"][2],
        quantization=tensor.quantization,
        scales=tensor.scales,
        zero_points=tensor.zero_points,
        statistics=tensor.statistics,
        extension_type=tensor.descriptor.extension_type,
    )
    assert hw.encode(again, framing="bare") == bare_vector(name)


@pytest.mark.parametrize("name", BARE_CASES)
def test_every_prefix_of_a_bare_blob_is_truncated(name: str) -> None:
    _prefixes_are_truncated(bare_vector(name))


@pytest.mark.parametrize("name", [name for name, case in FRAME_CASES.items() if case["bytes"] < 1500])
def test_every_prefix_of_a_frame_is_truncated(name: str) -> None:
    _prefixes_are_truncated(frame_vector(name))


@pytest.mark.parametrize("name", [name for name, case in FRAME_CASES.items() if case["bytes"] >= 1500])
def test_prefixes_of_a_long_frame_are_truncated(name: str) -> None:
    data = frame_vector(name)
    _prefixes_are_truncated(data, [*range(700), *range(700, len(data), 97), *range(len(data) - 70, len(data))])


def _prefixes_are_truncated(data: bytes, lengths: Any = None) -> None:
    for length in range(len(data)) if lengths is None else lengths:
        with pytest.raises(hw.TruncatedError) as caught:
            hw.decode(data[:length])
        error = caught.value
        assert error.code == "truncated"
        assert error.available == length
        assert length < error.needed <= len(data)
        assert error.offset == length
        for options in ({"strict": False}, {"verify": False}, {"copy": True}):
            assert verdict(data[:length], **options).kind == "TruncatedError"


def test_the_container_is_recognised() -> None:
    data = bare_vector("container")
    found = verdict(data)
    assert (found.kind, found.code, found.where, found.offset) == ("UnsupportedError", "container", "magic", 0)
    assert verdict(data[:8]).code == "container"
    assert verdict(data[:7]).kind == "TruncatedError"


# Frames.


@pytest.mark.parametrize("name", FRAME_CASES)
def test_frame_values(name: str) -> None:
    case, data = FRAME_CASES[name], frame_vector(name)
    assert (len(data), sha256(data)) == (case["bytes"], case["sha256"])
    tensor = hw.decode(data)
    assert tensor.descriptor.encode().hex() == case["descriptor_hex"]
    arrays = (tensor.page_pool, tensor.block_table, tensor.seq_ptr, tensor.scales, tensor.zero_points)
    assert [sha256(a.tobytes()) for a in arrays if a is not None] == case["buffers_sha256"]
    assert [a.nbytes for a in arrays if a is not None] == case["buffer_bytes"]
    assert (None if tensor.seq_lens is None else tensor.seq_lens.tolist()) == case["seq_lens"]
    assert tensor.metadata == case["metadata"]
    assert tensor.violations == ()


@pytest.mark.parametrize("name", FRAME_CASES)
def test_frame_values_without_verification_and_as_copies(name: str) -> None:
    case, data = FRAME_CASES[name], frame_vector(name)
    several: list[Any] = [{"verify": False}, {"copy": True}, {"strict": False}, {"threads": 3}]
    for options in several:
        tensor = hw.decode(data, **options)
        assert sha256(pool_bytes(tensor)) == case["buffers_sha256"][0]
        assert tensor == hw.decode(data)


def chunk_bytes_of(data: bytes) -> int | None:
    chunks = [entry["raw_length"] for entry in entries_of(data) if entry["kind"] == PAGE_POOL]
    return chunks[0] if len(chunks) > 1 else None


@pytest.mark.parametrize("name", RAW_FRAMES)
def test_raw_frames_come_back_byte_for_byte(name: str) -> None:
    case, data = FRAME_CASES[name], frame_vector(name)
    options: Any = {
        "checksum": "without-checksum" not in name,
        "chunk_bytes": chunk_bytes_of(data),
        "sequence": case["sequence"],
        "last": case["last"],
        "stream_id": case["stream_id"],
    }
    assert hw.encode(hw.decode(data), **options) == data


def test_one_raw_frame_has_chunks() -> None:
    assert [name for name in RAW_FRAMES if chunk_bytes_of(frame_vector(name))] == ["raw-chunks"]


@pytest.mark.parametrize("name", [name for name in FRAME_CASES if name.startswith("zstd")])
def test_compressed_frames_hold_what_ours_hold(name: str) -> None:
    data = frame_vector(name)
    tensor = hw.decode(data)
    again = hw.decode(hw.encode(tensor, compression="zstd", chunk_bytes=chunk_bytes_of(data)))
    assert again == tensor
    assert pool_bytes(again) == pool_bytes(tensor)


def test_an_optional_section_of_a_newer_minor_is_skipped() -> None:
    assert hw.decode(frame_vector("optional-unknown-section")) == hw.decode(frame_vector("raw"))


def test_the_stream_vector_holds_two_tensors_and_a_closing_frame() -> None:
    data = frame_vector("stream-of-two-closing-frame")
    first, second = hw.iter_decode(data)
    assert first == hw.decode(frame_vector("raw"))
    assert isinstance(second.quantization, hw.PerBlockAffine)
    one, middle = hw.decode_from(data)
    two, end = hw.decode_from(data, middle)
    assert (one == first, two == second) == (True, True)
    found = verdict(data[end:])
    assert (found.kind, found.code) == ("FrameError", "last")
    with pytest.raises(hw.FrameError) as caught:
        hw.decode(data)
    assert caught.value.code == "trailing_bytes"
    for cut in (middle, end):
        with pytest.raises(hw.TruncatedError) as truncated:
            list(hw.iter_decode(data[:cut]))
        assert truncated.value.code == "stream_truncated"
