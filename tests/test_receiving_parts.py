"""Buffers that travel by other means: `encode_header` on one side, `decode_parts` on the other."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from frames import PAGE_POOL, section_of
from hypothesis import given
from strategies import Built, tensors
from stream_helpers import TENSOR, as_sent, closing, int4, mixed_chunks, per_block, sample
from support import BT, POOL, SP, worked

import hurray_wire as hw

HEADER = hw.encode_header(worked())
BARE_HEADER = hw.encode_header(worked(), framing="bare")
HEADERS = {"hrkv": HEADER, "bare": BARE_HEADER}
BUFFERS: list[Any] = [POOL, BT, SP]


def parts_of(tensor: TENSOR) -> list[Any]:
    arrays = (tensor.page_pool, tensor.block_table, tensor.seq_ptr, tensor.scales, tensor.zero_points)
    return [np.array(a, a.dtype.newbyteorder("<"), order="C") for a in arrays if a is not None]


@pytest.mark.parametrize("framing", ["hrkv", "bare"])
@given(built=tensors())
def test_header_and_buffers_put_together(framing: Any, built: Built) -> None:
    header = hw.encode_header(built.tensor, framing=framing)
    assert hw.encode(built.tensor, framing=framing).startswith(header)
    if framing == "hrkv":
        assert len(header) == hw.inspect(header).header_bytes
    for buffers in (built.buffers, parts_of(built.tensor)):
        assert hw.decode_parts(header, buffers) == as_sent(built.tensor, framing)


def test_a_header_of_live_pages_with_metadata() -> None:
    tensor = sample(0, metadata={"model": "m"}, block_table=[4, 4, 1], seq_ptr=[0, 2, 3], seq_lens=[7, 2])
    header = hw.encode_header(tensor, pages="live", sequence=7, stream_id=9)
    live = hw.decode(hw.encode(tensor, pages="live"))
    assert hw.decode_parts(header, [tensor.page_pool[[4, 1]], live.block_table, live.seq_ptr]) == live


def test_more_than_the_header_may_be_given() -> None:
    """ "What `encode_header` gave, or anything that begins with it": a whole blob too."""
    for framing, header in HEADERS.items():
        blob = hw.encode(worked(), framing=framing)  # type: ignore[arg-type]  # a name of the two
        assert hw.decode_parts(blob, BUFFERS) == hw.decode_parts(header, BUFFERS) == as_sent(worked(), framing)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.frombuffer])
def test_buffers_of_any_kind(kind: Any) -> None:
    make = (lambda b: np.frombuffer(b, np.uint8)) if kind is np.frombuffer else kind
    buffers = [make(np.ascontiguousarray(b).tobytes()) for b in BUFFERS]
    for header in HEADERS.values():
        assert hw.decode_parts(make(header), buffers).page_pool.tobytes() == POOL.tobytes()


# Views.


@pytest.mark.parametrize("framing", HEADERS)
def test_the_pool_and_the_scales_are_viewed_and_the_tables_copied(framing: Any) -> None:
    tensor = per_block(0)
    buffers = parts_of(tensor)
    found = hw.decode_parts(hw.encode_header(tensor, framing=framing), buffers)
    assert np.shares_memory(found.page_pool, buffers[0])
    for array, buffer in ((found.scales, buffers[3]), (found.zero_points, buffers[4])):
        assert array is not None
        assert np.shares_memory(array, buffer)
        assert not array.flags.writeable
    assert not found.page_pool.flags.writeable
    assert buffers[0].flags.writeable
    assert not np.shares_memory(found.block_table, buffers[1])
    assert not np.shares_memory(found.seq_ptr, buffers[2])
    buffers[1][:] = 77
    assert 77 not in found.block_table


@pytest.mark.parametrize("framing", HEADERS)
def test_copy(framing: Any) -> None:
    header = HEADERS[framing]
    own = hw.decode_parts(header, BUFFERS, copy=True)
    assert not np.shares_memory(own.page_pool, POOL)
    assert own.page_pool.flags.writeable
    assert own.page_pool.ctypes.data % 64 == 0
    assert np.shares_memory(hw.decode_parts(header, BUFFERS, copy=False).page_pool, POOL)
    odd = np.zeros(641, np.uint8)[1:]
    odd[:] = POOL.reshape(-1).view(np.uint8)
    moved = hw.decode_parts(header, [odd, BT, SP])
    assert moved.page_pool.flags.aligned
    assert np.array_equal(moved.page_pool, POOL)
    with pytest.raises(hw.UnsupportedError) as caught:
        hw.decode_parts(header, [odd, BT, SP], copy=False)
    assert (caught.value.code, caught.value.where) == ("copy_required", "buffers[0]")


def test_alloc_gives_the_memory_of_a_copy() -> None:
    given_out: list[Any] = []

    def alloc(nbytes: int, alignment: int) -> Any:
        block = np.zeros(nbytes + alignment, np.uint8)
        given_out.append(block)
        return block[-block.ctypes.data % alignment :][:nbytes]

    found = hw.decode_parts(HEADER, BUFFERS, copy=True, alloc=alloc)
    assert np.shares_memory(found.page_pool, given_out[0])


def test_ml_dtypes_arrays_are_buffers() -> None:
    pool = POOL.astype(ml_dtypes.bfloat16)
    tensor = worked(page_pool=pool)
    assert hw.decode_parts(hw.encode_header(tensor), [pool, BT, SP]) == tensor


# What does not fit.


@pytest.mark.parametrize("framing", HEADERS)
@pytest.mark.parametrize("buffers", [[], [POOL], [POOL, BT], [POOL, BT, SP, SP], [POOL, BT, SP, b""]], ids=len)
def test_another_number_of_buffers_is_a_value_error(framing: str, buffers: list[Any]) -> None:
    """The caller's own argument: not that the bytes of those that are missing fail a checksum."""
    with pytest.raises(ValueError, match="buffers") as caught:
        hw.decode_parts(HEADERS[framing], buffers)
    assert not isinstance(caught.value, hw.HurrayWireError)


@pytest.mark.parametrize("framing", HEADERS)
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("by", [-1, 1, -4, 4, 64, 4096, None])
def test_a_buffer_of_another_size_is_named(framing: str, index: int, by: int | None) -> None:
    """TruncatedError, or FrameError `trailing_bytes`, whichever buffer it is (decode_parts, "Raises")."""
    buffers = [np.ascontiguousarray(b).tobytes() for b in BUFFERS]
    whole = buffers[index]
    buffers[index] = b"" if by is None else whole[:by] if by < 0 else whole + bytes(by)
    with pytest.raises(hw.FrameError) as caught:
        hw.decode_parts(HEADERS[framing], buffers)
    short = by is None or by < 0
    assert type(caught.value) is (hw.TruncatedError if short else hw.FrameError)
    assert caught.value.code == ("truncated" if short else "trailing_bytes")
    assert caught.value.where == f"buffers[{index}]"


def test_buffers_out_of_order_are_noticed() -> None:
    with pytest.raises(hw.FrameError):
        hw.decode_parts(HEADER, [POOL, SP, BT])
    with pytest.raises(hw.HurrayWireError):
        hw.decode_parts(BARE_HEADER, [POOL, SP, BT])


@pytest.mark.parametrize("framing", HEADERS)
def test_every_shorter_header_is_truncated(framing: str) -> None:
    """To the end of the last section before the buffers; what pads it to the first buffer may be left away."""
    header = HEADERS[framing]
    inspection = hw.inspect(header)
    small = [s for s in inspection.sections if s.kind < 16]
    end = max((s.offset + s.stored_length for s in small), default=len(header))
    for cut in range(end):
        with pytest.raises(hw.TruncatedError):
            hw.decode_parts(header[:cut], BUFFERS)


def test_every_flip_of_a_header_is_an_error() -> None:
    for bit in range(len(HEADER) * 8):
        damaged = bytearray(HEADER)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(hw.HurrayWireError):
            hw.decode_parts(damaged, BUFFERS)


@pytest.mark.parametrize("verify", [True, False])
def test_every_flip_of_a_buffer_is_an_error(verify: bool) -> None:
    """Without `verify` those of the pool and the scales are the caller's risk."""
    tensor = per_block(0)
    header = hw.encode_header(tensor)
    for index, buffer in enumerate(parts_of(tensor)):
        for at in range(0, buffer.nbytes, 1 if index in (1, 2) else 13):
            buffers = [bytearray(b.tobytes()) for b in parts_of(tensor)]
            buffers[index][at] ^= 1 << at % 8
            if verify or index in (1, 2):
                with pytest.raises(hw.ChecksumError):
                    hw.decode_parts(header, buffers, verify=verify)
            else:
                assert hw.decode_parts(header, buffers, verify=False) != tensor


def test_tables_are_judged_in_the_bare_form_too() -> None:
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        hw.decode_parts(BARE_HEADER, [POOL, np.array([0, 9, 0], "<u4"), SP])
    assert caught.value.code == "page_id"
    lenient = hw.decode_parts(BARE_HEADER, [POOL, np.array([0, 9, 0], "<u4"), SP], strict=False)
    assert [v.code for v in lenient.violations] == ["page_id"]


@pytest.mark.parametrize("framing", HEADERS)
def test_expect_and_limits(framing: str) -> None:
    with pytest.raises(hw.MismatchError):
        hw.decode_parts(HEADERS[framing], BUFFERS, expect={"page_size": 8})
    with pytest.raises(hw.LimitError):
        hw.decode_parts(HEADERS[framing], BUFFERS, limits=hw.Limits(decoded_bytes=600))


def test_a_pool_that_is_not_contiguous_is_a_value_error() -> None:
    wide = np.zeros((5, 4, 2, 16), np.float16)
    with pytest.raises(ValueError, match="contiguous"):
        hw.decode_parts(HEADER, [wide[..., ::2], BT, SP])


# Compression.


def test_compression_is_refused_at_both_ends() -> None:
    """What is compressed is not the buffer that travels."""
    with pytest.raises(hw.FrameError) as caught:
        hw.encode_header(worked(), compression="zstd")
    assert caught.value.code == "section_codec"
    frame = mixed_chunks()
    pool = hw.decode(frame).page_pool
    with pytest.raises(hw.FrameError) as caught:
        hw.decode_parts(frame, [pool, BT, SP])
    assert caught.value.code == "section_codec"
    with pytest.raises(hw.UnsupportedError) as unsupported:
        hw.encode_header(worked(), framing="bare", compression="zstd")
    assert unsupported.value.code == "bare_form"


def test_a_closing_frame_has_no_parts() -> None:
    with pytest.raises(hw.FrameError) as caught:
        hw.decode_parts(closing(0), [])
    assert caught.value.code == "last"


def test_a_header_says_where_the_buffers_would_lie() -> None:
    """Two transports that share memory: the header is that of the frame, offsets and checksums included."""
    frame = hw.encode(int4(0), alignment=4096)
    header = hw.encode_header(int4(0), alignment=4096)
    assert len(header) == section_of(frame, PAGE_POOL)["offset"] == 4096
    assert frame[:4096] == header
