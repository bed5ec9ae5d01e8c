"""`read_into`: pages straight into the receiver's own pool, while they come, and what is said where it fails."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from frames import BLOCK_TABLE, PAGE_POOL, SCALES, entries_of, section_of
from stream_helpers import (
    Dribble,
    Metered,
    coded_tables,
    encoded,
    frames_of,
    int4,
    large,
    mixed_chunks,
    per_block,
    sample,
)
from support import raw

import hurray_wire as hw

FORMS: dict[str, dict[str, Any]] = {
    "raw": {"chunk_bytes": 256},
    "zstd": {"compression": "zstd", "chunk_bytes": 8192},
    "bare": {"framing": "bare"},
}
Pool = Any


def header_of(data: bytes, source: type = Metered, **options: Any) -> hw.FrameHeader:
    header = hw.StreamReader(source(data), **options).next_header()
    assert header is not None
    return header


def blank(tensor: hw.BlockPagedTensor, pages: int, fill: int = 0x55) -> Pool:
    pool = np.empty((pages, *tensor.page_pool.shape[1:]), tensor.page_pool.dtype)
    pool.reshape(-1).view(np.uint8)[:] = fill
    return pool


def make_pool(make: str, tensor: hw.BlockPagedTensor, pages: int) -> Pool:
    """A pool of so many pages, in one make of memory or another, and not all of that memory the pool's."""
    n, s, h, d = pages, *tensor.page_pool.shape[1:]
    dtype = tensor.page_pool.dtype
    if make == "contiguous":
        return np.zeros((n, s, h, d), dtype)
    if make == "big-endian":
        return np.zeros((n, s, h, d), dtype.newbyteorder(">"))
    if make == "pages":
        return np.zeros((n, 2, s, h, d), dtype)[:, 1]
    if make == "slots":
        return np.zeros((n, s * 2, h, d), dtype)[:, ::2]
    if make == "heads":
        return np.zeros((n, s, h * 3, d), dtype)[:, :, h : 2 * h]
    if make == "dims":
        return np.zeros((n, s, h, d * 2), dtype)[..., 1::2]
    if make == "transposed":
        return np.zeros((n, h, s, d), dtype).transpose(0, 2, 1, 3)
    if make == "reversed":
        return np.zeros((n, s, h, d), dtype)[::-1, ::-1]
    assert make == "fortran"
    return np.zeros((n, s, h, d), dtype, order="F")


MAKES = ("contiguous", "big-endian", "pages", "slots", "heads", "dims", "transposed", "reversed", "fortran")
IDS: dict[str, Callable[[int], Any]] = {
    "run": lambda n: np.arange(2, 2 + n),
    "scattered": lambda n: np.random.default_rng(1).permutation(n + 5)[:n],
    "backwards": lambda n: list(range(n + 4, 4, -1)),
    "two-runs": lambda n: [*range(n // 2, n), *range(n // 2)],
}


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("form", FORMS)
def test_pages_land_where_they_should(form: str, make: str, ids: str) -> None:
    tensor = large(0, pages=6) if form == "zstd" else sample(0, numpy=np.int32)
    places = IDS[ids](tensor.num_pages)
    pool = make_pool(make, tensor, tensor.num_pages + 5)
    blob = hw.encode(tensor, **FORMS[form])
    expected = hw.decode(blob)
    found = header_of(blob).read_into(pool, places)
    assert np.array_equal(pool[places], tensor.page_pool)
    assert not np.delete(pool, places, axis=0).any()
    whole = pool.base if pool.base is not None else pool
    assert np.count_nonzero(whole) == np.count_nonzero(tensor.page_pool)  # nothing beside the pool either
    assert np.shares_memory(found.page_pool, pool)
    assert np.array_equal(found.block_table, np.asarray(places)[tensor.block_table.astype(int)])
    assert (found.num_pages, found.seq_ptr.tolist()) == (tensor.num_pages + 5, tensor.seq_ptr.tolist())
    if expected.seq_lens is not None:
        assert found.same_tokens(tensor)
    found.validate()
    assert hw.decode(hw.encode(found, pages="live")).num_pages == tensor.num_pages


@pytest.mark.parametrize("form", FORMS)
def test_by_dribbles(form: str) -> None:
    tensor = large(0, pages=2) if form == "zstd" else sample(0)
    pool = blank(tensor, 9)
    places = [7, 3, 8, 0, 4, 1][: tensor.num_pages]
    header_of(hw.encode(tensor, **FORMS[form]), Dribble).read_into(pool, places)
    assert np.array_equal(pool[places], tensor.page_pool)


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_scales_follow_the_receivers_ids(form: str, asymmetric: bool) -> None:
    tensor = per_block(0, asymmetric=asymmetric)
    found = header_of(hw.encode(tensor, **FORMS[form])).read_into(np.zeros((9, 4, 2, 8), np.int8), [8, 2, 6, 0, 5])
    assert found.scales is not None
    assert tensor.scales is not None
    assert np.array_equal(found.scales[[8, 2, 6, 0, 5]], tensor.scales)
    assert found.scales.shape == (9, 4)
    if form == "bare":
        found = found.replace(seq_lens=tensor.seq_lens)
    for seq in range(2):
        assert np.array_equal(found.dequantize(seq), tensor.dequantize(seq))


@pytest.mark.parametrize("form", FORMS)
def test_a_packed_pool(form: str) -> None:
    tensor = int4(0)
    pool = np.full(32 * 9, 0x55, np.uint8)
    found = header_of(hw.encode(tensor, **FORMS[form])).read_into(pool, [8, 2, 6, 0, 5, 1])
    rows, wire = pool.reshape(9, 32), tensor.page_pool.reshape(6, 32)
    assert np.array_equal(rows[[8, 2, 6, 0, 5, 1]], wire)
    assert (rows[[3, 4, 7]] == 0x55).all()
    assert found.num_pages == 9
    assert found.page_pool is pool


def test_a_frame_whose_tables_are_compressed_and_whose_chunks_are_mixed() -> None:
    for frame in (coded_tables(), mixed_chunks()):
        expected = hw.decode(frame)
        (whole,) = hw.StreamReader(io.BytesIO(frame))
        assert whole == expected
        places = np.arange(expected.num_pages)[::-1]
        found = header_of(frame).read_into(blank(expected, expected.num_pages), places)
        assert found.same_tokens(expected)
        with hw.open_frame(frame) as opened:
            assert opened.tensor() == expected


# The caller's own faults: before anything is written, and the payload can still be read.

FAULTS: dict[str, tuple[Any, Any, type[Exception]]] = {
    "few-ids": ((9, 4, 2, 8), range(5), ValueError),
    "many-ids": ((9, 4, 2, 8), range(7), ValueError),
    "id-range": ((9, 4, 2, 8), [0, 1, 2, 3, 4, 9], IndexError),
    "id-negative": ((9, 4, 2, 8), [0, 1, 2, 3, 4, -1], IndexError),
    "id-twice": ((9, 4, 2, 8), [0, 1, 2, 3, 4, 4], ValueError),
    "id-float": ((9, 4, 2, 8), [0, 1, 2, 3, 4, 5.0], ValueError),
    "page-size": ((9, 5, 2, 8), range(6), hw.MismatchError),
    "heads": ((9, 4, 3, 8), range(6), hw.MismatchError),
    "head-dim": ((9, 4, 2, 9), range(6), hw.MismatchError),
    "rank": ((9, 4, 16), range(6), ValueError),
    "no-pages": ((0, 4, 2, 8), range(6), IndexError),
}


@pytest.mark.parametrize("form", ["raw", "bare"])
@pytest.mark.parametrize("name", FAULTS)
def test_the_callers_faults_are_found_before_the_payload_is_taken(name: str, form: str) -> None:
    """ "Check the receiver's own arguments before the payload counts as taken" (reader.py): right ones then work."""
    shape, ids, error = FAULTS[name]
    source = Metered(hw.encode(sample(0), **FORMS[form]))
    header = hw.StreamReader(source).next_header()
    assert header is not None
    taken = source.taken
    pool = np.full(shape, 7, np.float16)
    with pytest.raises(error):
        header.read_into(pool, ids)
    assert source.taken == taken
    assert (pool == 7).all()


@pytest.mark.parametrize("name", ["few-ids", "id-range", "heads"])
def test_after_a_callers_fault_right_arguments_work(name: str) -> None:
    """reader.py: "Check the receiver's own arguments before the payload counts as taken." Nothing was, so nothing
    is lost: the stream goes on."""
    shape, ids, error = FAULTS[name]
    tensor = sample(0)
    reader = hw.StreamReader(Metered(encoded([tensor, sample(1)])))
    header = reader.next_header()
    assert header is not None
    with pytest.raises(error):
        header.read_into(np.zeros(shape, np.float16), ids)
    right = np.zeros((9, 4, 2, 8), np.float16)
    header.read_into(right, range(6))
    assert np.array_equal(right[:6], tensor.page_pool)
    assert list(reader) == [sample(1)]


def test_a_pool_of_another_type_or_read_only() -> None:
    frozen = np.zeros((9, 4, 2, 8), np.float16)
    frozen.flags.writeable = False
    for pool, error in ((np.zeros((9, 4, 2, 8), np.int16), hw.MismatchError), (frozen, ValueError)):
        with pytest.raises(error):
            header_of(hw.encode(sample(0))).read_into(pool, range(6))


# The payload's faults: what to discard is named, the rest is untouched.


def broken(data: bytes, pool: Pool, ids: Any, **options: Any) -> hw.HurrayWireError:
    reader = hw.StreamReader(io.BytesIO(data), **options)
    header = reader.next_header()
    assert header is not None
    with pytest.raises(hw.HurrayWireError) as caught:
        header.read_into(pool, ids)
    assert list(reader) == []
    error = caught.value
    assert error.pages_written is not None
    written = np.asarray(error.pages_written)
    assert set(written.tolist()) <= set(np.asarray(ids).tolist())
    untouched = np.delete(pool.view(np.uint8), written, axis=0)
    assert (untouched == 0x55).all()
    return error


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


@pytest.mark.parametrize("page", [0, 3, 5])
@pytest.mark.parametrize("form", ["raw", "zstd"])
def test_a_damaged_chunk(form: str, page: int) -> None:
    tensor = large(0, pages=6)
    data = hw.encode(tensor, **FORMS[form] | {"chunk_bytes": 8192})
    chunks = [e for e in entries_of(data) if e["kind"] == PAGE_POOL]
    assert len(chunks) == 6
    pool = blank(tensor, 9)
    ids = [8, 2, 6, 0, 5, 1]
    error = broken(flipped(data, chunks[page]["offset"] + 40), pool, ids)
    assert (type(error), error.code) == (hw.ChecksumError, "section_checksum")
    assert set(ids[:page]) <= set(np.asarray(error.pages_written).tolist())
    assert np.array_equal(pool[ids[:page]], tensor.page_pool[:page])
    assert (pool[ids[page + 1 :]].view(np.uint8) == 0x55).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_cut_inside_the_pool(form: str) -> None:
    tensor = large(0, pages=6)
    data = hw.encode(tensor, **FORMS[form])
    for cut in range(hw.inspect(data).header_bytes, len(data), len(data) // 7):
        error = broken(data[:cut], blank(tensor, 9), [8, 2, 6, 0, 5, 1])
        assert type(error) is hw.TruncatedError
        assert (error.available, error.needed) == (cut, len(data))


def test_tables_come_after_the_pool_and_their_faults_name_all_pages() -> None:
    """Section 4's order: block_table and seq_ptr stand behind page_pool."""
    tensor, ids = sample(0), [8, 2, 6, 0, 5, 1]
    frame = hw.encode(tensor)
    damaged = flipped(frame, section_of(frame, BLOCK_TABLE)["offset"])
    error = broken(damaged, blank(tensor, 9), ids)
    assert type(error) is hw.ChecksumError
    assert sorted(error.pages_written) == sorted(ids)
    unsound = raw(bt=np.array([0, 9, 0], "<u4"))
    error = broken(unsound, blank(tensor, 9), [8, 2, 6, 0, 5])
    assert (type(error), error.code) == (hw.InvalidDescriptorError, "page_id")
    assert error.offset == 133 + 640 + 4
    scaled = hw.encode(per_block(0))
    error = broken(flipped(scaled, section_of(scaled, SCALES)["offset"]), blank(per_block(0), 9), [8, 2, 6, 0, 5])
    assert type(error) is hw.ChecksumError
    padded = hw.encode(tensor, alignment=4096)
    at = section_of(padded, BLOCK_TABLE)["offset"] - 8
    error = broken(flipped(padded, at), blank(tensor, 9), ids)
    assert (error.code, error.offset) == ("padding", at)


def test_without_verify_damage_is_the_callers_risk_but_tables_are_checked() -> None:
    tensor = sample(0)
    frame = hw.encode(tensor)
    damaged = flipped(frame, section_of(frame, PAGE_POOL)["offset"])
    pool = blank(tensor, 9)
    header_of(damaged, verify=False).read_into(pool, range(6))
    assert np.count_nonzero(pool[:6].view(np.uint8) != tensor.page_pool.view(np.uint8)) == 1
    error = broken(flipped(frame, section_of(frame, BLOCK_TABLE)["offset"]), blank(tensor, 9), range(6), verify=False)
    assert type(error) is hw.ChecksumError


@pytest.mark.parametrize("make", ["contiguous", "pages", "dims", "big-endian"])
def test_hardly_anything_is_allocated(make: str) -> None:
    """Issue 4: pages are received in place, with less than 1 MiB allocated, however many there are."""
    tensor = large(0, pages=1024)
    pool = make_pool(make, tensor, 1030)
    header = header_of(hw.encode(tensor))
    ids = np.random.default_rng(0).permutation(1030)[:1024]
    tracemalloc.start()
    header.read_into(pool, ids)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert np.array_equal(pool[ids], tensor.page_pool)


def test_a_whole_stream_into_one_pool() -> None:
    """What a decode process does: layer by layer into pages that it has free."""
    layers = [sample(n) for n in range(4)]
    pools = np.zeros((4, 20, 4, 2, 8), np.float16)
    free = np.random.default_rng(3).permutation(20)[:6]
    with hw.StreamReader(io.BytesIO(encoded(layers, compression="zstd"))) as reader:
        for layer, tensor in enumerate(layers):
            header = reader.next_header()
            assert header is not None
            assert header.read_into(pools[layer], free).same_tokens(tensor)
    assert len(frames_of(layers)) == 5
