"""What a caller does wrong is refused by name, before anything is read or written."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import worked

import hurray_wire as hw
from hurray_wire import ops

T = worked()
BLOB = hw.encode(T)


def two() -> io.BytesIO:
    sink = io.BytesIO()
    with hw.StreamWriter(sink) as writer:
        writer.write(T)
        writer.write(T)
    return io.BytesIO(sink.getvalue())


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_reader_that_was_closed_early_is_no_stream_that_ended(count: int) -> None:
    reader = hw.StreamReader(two())
    assert [next(reader) for _ in range(count)] == [T] * count
    reader.close()
    for ask in (reader.next_header, lambda: next(reader)):
        with pytest.raises(ValueError, match="the reader is closed"):
            ask()


def test_a_stream_that_ended_stays_ended() -> None:
    reader = hw.StreamReader(two())
    assert len(list(reader)) == 2
    assert (list(reader), reader.next_header()) == ([], None)
    reader.close()
    assert reader.next_header() is None


def test_the_same_holds_for_asyncio() -> None:
    async def main() -> None:
        left, right = socket.socketpair()
        for sock in (left, right):
            sock.setblocking(False)
        async with hw.AsyncStreamWriter(left) as writer:
            await writer.write(T)
        reader = hw.AsyncStreamReader(right)
        assert [found async for found in reader] == [T]
        assert await reader.next_header() is None
        other = hw.AsyncStreamReader(right)
        other.close()
        with pytest.raises(ValueError, match="the reader is closed"):
            await other.next_header()
        left.close()
        right.close()

    asyncio.run(main())


@pytest.mark.parametrize(("timeout", "error"), [(-1, ValueError), (float("nan"), ValueError), ("1", TypeError)])
@pytest.mark.parametrize("make", [hw.StreamReader, hw.StreamWriter, hw.AsyncStreamReader, hw.AsyncStreamWriter])
def test_a_timeout_is_a_number_of_seconds(make: Callable[..., Any], timeout: Any, error: type[Exception]) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        with pytest.raises(error, match="timeout must be"):
            make(left, timeout=timeout)


OVERLAPPING: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "one page for all": lambda: np.lib.stride_tricks.as_strided(
        np.zeros(4000, np.float16), (20, 4, 2, 8), (0, 32, 16, 2)
    ),
    "sliding window": lambda: np.lib.stride_tricks.as_strided(
        np.zeros(4000, np.float16), (20, 4, 2, 8), (64, 32, 16, 2)
    ),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_a_pool_whose_elements_share_memory_is_not_written(name: str) -> None:
    pool = OVERLAPPING[name]()
    for write in (
        lambda: hw.decode_into(BLOB, pool, range(5)),
        lambda: ops.scatter(T, pool, T.block_table, T.seq_ptr),
    ):
        with pytest.raises(ValueError, match="lie on one another"):
            write()
    assert not pool.any()


def test_strided_pools_are_written() -> None:
    both = np.zeros((20, 2, 4, 2, 8), np.float16)
    for pool in (both[:, 1], both[::2, 0], both[::-1, 1], both[:, 0].transpose(0, 1, 2, 3), both[:1, 0][:0]):
        if len(pool) >= 5:
            assert hw.decode_into(BLOB, pool, range(5)).same_tokens(T)


def test_masks_are_not_lost() -> None:
    pool = np.ma.masked_array(T.page_pool, mask=T.page_pool > 5)
    with pytest.raises(TypeError, match="masked array"):
        worked(page_pool=pool)
    assert worked(page_pool=pool.data) == T


def test_an_offset_is_not_negative() -> None:
    with pytest.raises(ValueError, match="offset must be at least 0, not -1"):
        hw.open_frame(BLOB, -1)
    with pytest.raises(TypeError):
        hw.open_frame(BLOB, "1")  # type: ignore[arg-type]


def test_the_wrong_page_id_is_named() -> None:
    pool = np.zeros((20, 4, 2, 8), np.float16)
    with pytest.raises(IndexError, match=r"page_ids\[4\] is 20, must be from 0 to 19"):
        hw.decode_into(BLOB, pool, [1, 2, 3, 4, 20])
    with pytest.raises(IndexError, match=r"page_ids\[1\] is -1, must"):
        hw.decode_into(BLOB, pool, [1, -1, 3, 4, 20])
    with pytest.raises(ValueError, match=r"page_ids\[3\] is 7, as page_ids\[1\] is"):
        hw.decode_into(BLOB, pool, [1, 7, 2, 7, 9])


NO_TENSORS: dict[str, Callable[[], Any]] = {
    "compact": lambda: ops.compact(None),  # type: ignore[call-overload]
    "repage": lambda: ops.repage(T.page_pool, 8),  # type: ignore[arg-type]
    "scrub": lambda: ops.scrub(3),  # type: ignore[arg-type]
    "concat": lambda: ops.concat([T, 3]),  # type: ignore[list-item]
    "compatible": lambda: ops.compatible(T, 3),  # type: ignore[arg-type]
    "check_layers": lambda: ops.check_layers([3]),  # type: ignore[list-item]
}


@pytest.mark.parametrize("name", NO_TENSORS)
def test_operations_say_that_a_tensor_is_needed(name: str) -> None:
    with pytest.raises(TypeError, match="a BlockPagedTensor is needed, not"):
        NO_TENSORS[name]()


def test_a_blob_is_no_source_and_is_not_printed() -> None:
    with pytest.raises(TypeError, match=r"callable, not bytes$"):
        hw.StreamReader(BLOB)
