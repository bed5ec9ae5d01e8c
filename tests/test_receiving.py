"""Into the receiver's own pages: `decode_into` (`decode_parts` is test_receiving_parts.py's).

What `read_into` does over a stream (test_stream_into.py) `decode_into` does in memory, and better: there everything
but the payload is checked before the first write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from frames import (
    BLOCK_TABLE,
    PAGE_POOL,
    SCALES,
    SEQ_LENS,
    SEQ_PTR,
    Section,
    added,
    build,
    entries_of,
    section_of,
    with_content,
)
from hypothesis import given
from hypothesis import strategies as st
from strategies import Built, tensors
from stream_helpers import closing, coded_tables, int4, large, mixed_chunks, per_block, sample
from support import BT, SP, raw, worked
from test_stream_into import FAULTS, IDS, MAKES, blank, flipped, make_pool

import hurray_wire as hw

FRAME = hw.encode(worked())
BARE = raw()
FORMS: dict[str, dict[str, Any]] = {
    "raw": {"chunk_bytes": 256},
    "zstd": {"compression": "zstd", "chunk_bytes": 8192},
    "bare": {"framing": "bare"},
}
PLACES = [8, 2, 6, 0, 5]


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("form", FORMS)
def test_pages_land_where_they_should(form: str, make: str, ids: str) -> None:
    tensor = large(0, pages=6) if form == "zstd" else sample(0, numpy=ml_dtypes.bfloat16)
    places = IDS[ids](tensor.num_pages)
    pool = make_pool(make, tensor, tensor.num_pages + 5)
    blob = hw.encode(tensor, **FORMS[form])
    found = hw.decode_into(blob, pool, places)
    assert np.array_equal(pool[places], tensor.page_pool)
    assert not np.delete(pool, places, axis=0).astype(bool).any()
    assert np.shares_memory(found.page_pool, pool)
    assert np.array_equal(found.block_table, np.asarray(places)[tensor.block_table.astype(int)])
    assert found.num_pages == tensor.num_pages + 5
    if hw.decode(blob).seq_lens is not None:
        assert found.same_tokens(tensor)
    assert hw.decode(hw.encode(found)) == found
    pool[places] = 0
    assert not found.page_pool.astype(bool).any()  # a view, not a copy


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_scales_follow_the_receivers_ids(form: str, asymmetric: bool) -> None:
    tensor = per_block(0, asymmetric=asymmetric)
    found = hw.decode_into(hw.encode(tensor, **FORMS[form]), np.zeros((9, 4, 2, 8), np.int8), PLACES)
    if form == "bare":
        found = found.replace(seq_lens=tensor.seq_lens)
    assert found.same_tokens(tensor)
    for seq in range(2):
        assert np.array_equal(found.dequantize(seq), tensor.dequantize(seq))


@given(built=tensors(with_metadata=True, private=False), seed=st.integers(0, 99), extra=st.integers(0, 3))
def test_any_tensor_into_a_larger_pool(built: Built, seed: int, extra: int) -> None:
    """Every type, strides and tables, both forms: the same tokens, at the receiver's ids, and a sound tensor."""
    tensor = built.tensor
    total = tensor.num_pages + extra
    ids = np.random.default_rng(seed).permutation(total)[: tensor.num_pages]
    flat = tensor.page_pool.ndim == 1
    if flat and tensor.page_bytes == 0 and tensor.page_pool.size:
        with pytest.raises(hw.UnsupportedError) as caught:
            hw.decode_into(hw.encode(tensor), np.zeros(tensor.page_pool.size, np.uint8), ids)
        assert caught.value.code == "packed_pool"
        return
    shape = (total * tensor.page_bytes,) if flat else (total, *tensor.page_pool.shape[1:])
    pool = np.zeros(shape, np.uint8 if flat else tensor.page_pool.dtype.newbyteorder("="))
    found = hw.decode_into(hw.encode(tensor), pool, ids)
    if not flat:
        assert found.num_pages == total
    assert np.array_equal(found.block_table, ids[tensor.block_table.astype(np.int64)])
    assert hw.decode(hw.encode(found)) == found
    assert found.metadata == tensor.metadata
    if tensor.seq_lens is not None and not flat:
        assert found.same_tokens(tensor)


def test_pages_of_no_bytes() -> None:
    """num_heads may be 0: the receiver's pool has its own number of pages all the same, and scales go by its ids."""
    empty = sample(0, page_pool=np.zeros((5, 4, 0, 8), np.int8), **FIVE)
    found = hw.decode_into(hw.encode(empty), np.zeros((9, 4, 0, 8), np.int8), PLACES)
    assert found.num_pages == 9
    assert hw.decode(hw.encode(found)) == found
    scaled = empty.replace(quantization="per_block", scales=np.arange(20, dtype=np.float32).reshape(5, 4))
    found = hw.decode_into(hw.encode(scaled), np.zeros((9, 4, 0, 8), np.int8), PLACES)
    assert found.scales is not None
    assert np.array_equal(found.scales[PLACES], np.arange(20).reshape(5, 4))


FIVE: dict[str, Any] = {"pages": 5, "block_table": [4, 0, 2], "seq_ptr": [0, 2, 3], "seq_lens": [7, 2]}


def test_no_pages_and_no_batch() -> None:
    for tensor in (sample(0, pages=0), sample(0, pages=5, block_table=[], seq_ptr=[0], seq_lens=[])):
        pool = np.zeros((7, 4, 2, 8), np.float16)
        found = hw.decode_into(hw.encode(tensor), pool, range(tensor.num_pages))
        assert (found.num_pages, found.num_seqs) == (7, tensor.num_seqs)


def test_frames_of_others() -> None:
    """Tables that are compressed, chunks raw and compressed in turn."""
    for frame in (coded_tables(), mixed_chunks()):
        expected = hw.decode(frame)
        found = hw.decode_into(frame, blank(expected, expected.num_pages), np.arange(expected.num_pages)[::-1])
        assert found.same_tokens(expected)


# Before the first write.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAULTS)
def test_the_callers_faults_leave_the_pool_alone(name: str, form: str) -> None:
    shape, ids, error = FAULTS[name]
    pool = np.full(shape, 7, np.float16)
    with pytest.raises(error):
        hw.decode_into(hw.encode(sample(0), **FORMS[form]), pool, ids)
    assert (pool == 7).all()


def test_every_difference_of_a_pool_is_listed() -> None:
    with pytest.raises(hw.MismatchError) as caught:
        hw.decode_into(FRAME, np.zeros((9, 5, 3, 9), np.float32), range(5))
    assert [d.where for d in caught.value.differences] == ["dtype", "page_size", "num_heads", "head_dim"]


@pytest.mark.parametrize("shape", [(160, 2), (32 * 6,)], ids=str)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int8])
def test_a_packed_pool_is_bytes_of_whole_pages(shape: tuple[int, ...], dtype: Any) -> None:
    blob = hw.encode(int4(0))
    pool = np.zeros(shape, dtype)
    if dtype is np.uint8 and len(shape) == 1:
        assert hw.decode_into(blob, pool, [5, 4, 3, 2, 1, 0]).same_tokens(int4(0))
        for wrong in (np.zeros(32 * 6 + 1, np.uint8), np.zeros(32 * 12, np.uint8)[::2]):
            with pytest.raises(ValueError, match="pool"):
                hw.decode_into(blob, wrong, range(6))
    else:
        with pytest.raises(ValueError, match="pool"):
            hw.decode_into(blob, pool, range(6))


def first_page_id(content: bytes) -> bytes:
    return b"\xff\xff\xff\xff" + content[4:]


OPTIONAL = added(Section(0x30, b"private", flags=3))
UNSOUND: dict[str, tuple[Callable[[], bytes], dict[str, Any], type[hw.HurrayWireError], str]] = {
    "header": (lambda: flipped(FRAME, 30), {}, hw.LimitError, "frame_bytes"),
    "checksum": (lambda: flipped(FRAME, 100), {}, hw.ChecksumError, "header_checksum"),
    "descriptor": (lambda: flipped(FRAME, 300), {}, hw.ChecksumError, "section_checksum"),
    "page-id": (lambda: with_content(FRAME, BLOCK_TABLE, first_page_id), {}, hw.InvalidDescriptorError, "page_id"),
    "seq-ptr": (lambda: with_content(FRAME, SEQ_PTR, first_page_id), {}, hw.InvalidDescriptorError, "seq_ptr_start"),
    "seq-lens": (lambda: with_content(FRAME, SEQ_LENS, lambda b: b[4:] + b[:4]), {}, hw.InvalidDescriptorError, ""),
    "table": (lambda: flipped(FRAME, section_of(FRAME, BLOCK_TABLE)["offset"]), {}, hw.ChecksumError, ""),
    "padding": (lambda: flipped(FRAME, len(FRAME) - 1), {}, hw.FrameError, "padding"),
    "unknown": (lambda: flipped(build(OPTIONAL), 1152), {}, hw.FrameError, ""),
    "expect": (lambda: FRAME, {"expect": {"page_size": 5, "kv_role": "value"}}, hw.MismatchError, "mismatch"),
    "limit": (lambda: FRAME, {"limits": hw.Limits(decoded_bytes=600)}, hw.LimitError, "decoded_bytes"),
    "short": (lambda: FRAME[:-1], {}, hw.TruncatedError, "truncated"),
    "trailing": (lambda: FRAME + b"\0", {}, hw.FrameError, "trailing_bytes"),
    "closing": (lambda: closing(0), {}, hw.FrameError, "last"),
    "bare-page-id": (lambda: raw(bt=BT + np.uint32(4)), {}, hw.InvalidDescriptorError, "page_id"),
    "bare-short": (lambda: BARE[:-1], {}, hw.TruncatedError, "truncated"),
    "bare-trailing": (lambda: BARE + b"x", {}, hw.FrameError, "trailing_bytes"),
    "bare-expect": (lambda: BARE, {"expect": {"num_seqs": 3}}, hw.MismatchError, "mismatch"),
    "foreign": (lambda: b"PK\x03\x04" + bytes(60), {}, hw.UnsupportedError, "foreign"),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_all_that_is_not_payload_is_checked_before_the_first_write(name: str) -> None:
    make, options, error, code = UNSOUND[name]
    pool = np.full((9, 4, 2, 8), 7, np.float16)
    with pytest.raises(error) as caught:
        hw.decode_into(make(), pool, PLACES, **options)
    assert not code or caught.value.code == code
    assert (pool == 7).all()


def test_scales_are_checked_before_the_first_write() -> None:
    blob = hw.encode(per_block(0))
    pool = np.full((9, 4, 2, 8), 7, np.int8)
    with pytest.raises(hw.ChecksumError):
        hw.decode_into(flipped(blob, section_of(blob, SCALES)["offset"]), pool, PLACES)
    assert (pool == 7).all()


@pytest.mark.parametrize("table", [np.array([0, 9, 0]), np.array([0, 2**64 - 1, 0], np.uint64), np.array([0, 1])])
def test_a_lenient_reader_does_not_lead_outside_the_tables(table: Any) -> None:
    """A violation that `strict=False` reports: the ids cannot be the receiver's, so it is an error of this tree or a
    tensor that says so and holds no other id than the receiver's or one that is out of range."""
    blob = raw(bt=table.astype("<u8"), sp=SP.astype("<u8"), sizes=(640, table.size * 8, 24), index_type=1)
    pool = np.zeros((9, 4, 2, 8), np.float16)
    try:
        found = hw.decode_into(blob, pool, PLACES, strict=False)
    except hw.HurrayWireError:
        return
    assert found.violations
    unsound = table.astype(np.uint64) >= 5
    assert (found.block_table[unsound] >= 9).all()
    assert np.array_equal(found.block_table[~unsound], np.asarray(PLACES)[table[~unsound].astype(int)])


# The payload's faults.


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("form", ["raw", "zstd"])
@pytest.mark.parametrize("page", [0, 5, 11])
def test_a_damaged_chunk_names_what_was_written(page: int, form: str, threads: int) -> None:
    tensor = large(0, pages=12)
    blob = hw.encode(tensor, **FORMS[form] | {"chunk_bytes": 8192})
    chunk = [e for e in entries_of(blob) if e["kind"] == PAGE_POOL][page]
    ids = np.random.default_rng(0).permutation(20)[:12]
    pool = blank(tensor, 20)
    with pytest.raises(hw.ChecksumError) as caught:
        hw.decode_into(flipped(blob, chunk["offset"] + 9), pool, ids, threads=threads)
    written = np.asarray(caught.value.pages_written)
    assert set(written.tolist()) <= set(ids.tolist()) - {int(ids[page])}  # verified before it is written
    assert (np.delete(pool, written, axis=0).view(np.uint8) == 0x55).all()


def test_a_chunk_that_does_not_decompress() -> None:
    """Its checksum is sound, or not asked for: zstd finds it, and the pages may have been written to."""
    tensor = large(0, pages=3)
    blob = hw.encode(tensor, compression="zstd", chunk_bytes=8192)
    chunk = [e for e in entries_of(blob) if e["kind"] == PAGE_POOL][1]
    damaged = bytearray(blob)
    start, length = chunk["offset"], chunk["stored_length"]
    damaged[start + 12 : start + length] = b"\xff" * (length - 12)
    pool = blank(tensor, 9)
    with pytest.raises(hw.FrameError) as caught:
        hw.decode_into(damaged, pool, [7, 1, 4], verify=False, threads=1)
    assert caught.value.code == "zstd"
    assert 7 in np.asarray(caught.value.pages_written)
    assert (np.delete(pool, caught.value.pages_written, axis=0).view(np.uint8) == 0x55).all()
