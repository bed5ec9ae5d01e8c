"""Segments over connections: read while they arrive, whole or given up, and what answers is who it should be."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from threading import Thread
from typing import Any

import numpy as np
import pytest
from plugin_helpers import newer, until

import hurray_wire as hw
from hurray_wire.integrations.sealed import seal
from hurray_wire.integrations.segment_streams import SegmentStreams
from hurray_wire.integrations.segment_wire import Address, address_of, connected, receive_record, send_record

KEYS = ["aa", "bb"]
MIB = 1 << 20


@pytest.fixture
def here() -> Iterator[SegmentStreams]:
    made = SegmentStreams(listen="127.0.0.1:0", timeout=20)
    yield made
    made.close()


def to(address: Address, **options: Any) -> SegmentStreams:
    return SegmentStreams(peer=f"{address[0]}:{address[1]}", timeout=20, **options)


def tensor(value: int = 1, pages: int = 2) -> hw.BlockPagedTensor:
    pool = np.full((pages, 4, 1, 8), value, np.float32)
    return hw.BlockPagedTensor(pool, block_table=np.arange(pages), seq_ptr=[0, pages], seq_lens=[4 * pages])


def read(streams: SegmentStreams, keys: list[str] = KEYS) -> list[hw.BlockPagedTensor]:
    (segment,) = streams.segments(keys)
    return list(segment.open({}))


def write_many(writer: Any, count: int) -> None:
    """Frames of 128 kB each."""
    for _ in range(count):
        writer.write(tensor(pages=1000))


def stream(*tensors: hw.BlockPagedTensor) -> bytes:
    sent: list[bytes] = []
    with hw.StreamWriter(lambda parts: sent.extend(map(bytes, parts))) as writer:
        for t in tensors:
            writer.write(t)
    return b"".join(sent)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_what_is_sent_is_found_and_read(here: SegmentStreams, compression: Any) -> None:
    there = to(here.address, compression=compression)
    assert not there.has("aa")
    for keys, first in ((KEYS, 1), (["cc"], 5)):
        with there.writer(keys) as writer:
            for value in range(3):
                writer.write(tensor(first + value, pages=20_000))  # several blocks of the listener's
    assert here.leading(["aa", "bb", "cc", "dd"]) == 3
    assert here.leading(["dd", "aa"]) == here.leading([]) == 0
    assert [there.has(key) for key in ("aa", "cc", "dd")] == [True, True, False]
    found = here.segments(["aa", "bb", "cc"])
    assert [(segment.first, segment.stop) for segment in found] == [(0, 2), (2, 3)]
    for segment, first in zip(found, (1, 5), strict=True):
        assert [t.page_pool.flat[0] for t in segment.open({})] == [first, first + 1, first + 2]
    assert len(read(here, ["bb"])) == 3, "again, and from another chunk"


def test_frames_are_read_before_the_next_one_is_made(here: SegmentStreams) -> None:
    writer = to(here.address).writer(KEYS)
    until(lambda: here.leading(KEYS) == 2)
    reader = here.segments(KEYS)[0].open({})
    for value in range(3):
        writer.write(tensor(value))
        assert next(reader) == tensor(value)
    writer.finish()
    assert list(reader) == []


@pytest.mark.parametrize("whole_frames", [True, False])
def test_a_sender_that_dies_half_way(here: SegmentStreams, whole_frames: bool) -> None:
    """The reader that has begun is told, and nobody else finds the half."""
    data = stream(tensor(1), tensor(2))
    cut = len(data) - 64 if whole_frames else len(data) // 2
    sock = connected(here.address, 20)
    send_record(sock, "segment", keys=KEYS)
    sock.sendall(data[:cut])
    until(lambda: here.leading(KEYS) == 2)
    reader = here.segments(KEYS)[0].open({})
    assert next(reader) == tensor(1)
    sock.close()
    with pytest.raises(hw.TruncatedError):
        list(reader)
    until(lambda: here.leading(KEYS) == 0)
    with pytest.raises(hw.StoreError):
        here.segments(KEYS)


def test_a_writer_left_by_an_exception_leaves_nothing(here: SegmentStreams) -> None:
    def half() -> None:
        with to(here.address).writer(KEYS) as writer:
            writer.write(tensor())
            raise KeyError

    with pytest.raises(KeyError):
        half()
    until(lambda: here.leading(KEYS) == 0)
    with pytest.raises(hw.StoreError):
        here.segments(["aa"])


def test_a_silent_sender_is_not_waited_for_for_ever() -> None:
    here = SegmentStreams(listen="127.0.0.1:0", timeout=0.2)
    writer = to(here.address).writer(KEYS)
    until(lambda: here.leading(KEYS) == 2)
    reader = here.segments(KEYS)[0].open({})
    with pytest.raises((TimeoutError, hw.TruncatedError)):  # either end may give up first
        next(reader)
    until(lambda: here.leading(KEYS) == 0)  # else the sender may just have spoken in time
    with pytest.raises(hw.StoreError):
        write_many(writer, 1000)
    here.close()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda data: data[:300] + bytes([data[300] ^ 1]) + data[301:], hw.HurrayWireError),
        (newer, hw.UnsupportedError),
        (lambda data: b"not a frame" + data, hw.FrameError),
    ],
)
def test_damage_and_newer_frames_are_the_reader_s_errors(here: SegmentStreams, change: Any, error: Any) -> None:
    with connected(here.address, 20) as sock:
        send_record(sock, "segment", keys=KEYS)
        sock.sendall(change(stream(tensor())))
        sock.shutdown(socket.SHUT_WR)
        receive_record(sock, ["kept"], "")
    with pytest.raises(error):
        read(here)


def test_expectations_are_compared_before_a_payload_is_read(here: SegmentStreams) -> None:
    with to(here.address).writer(KEYS) as writer:
        writer.write(tensor().replace(metadata={"model": "a"}))
    with pytest.raises(hw.MismatchError):
        next(here.segments(KEYS)[0].open({"model": "b"}))


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (seal("segment", 2, {"keys": KEYS}), "version 2"),
        (seal("segment", 1, {"keys": []}), "no chunks"),
        (seal("segment", 1, {"keys": [1]}), "must be strings"),
        (seal("kept", 1, {"bytes": 1}), "is kept"),
        (seal("segment", 1, {"keys": KEYS})[:-1] + b"?", "checksum"),
        (b"GET / HTTP/1.1", "begins with"),
        (b"", "begins with|truncated|fewer|0"),
    ],
)
def test_what_is_no_record_is_refused_with_a_reason(here: SegmentStreams, sent: bytes, why: str) -> None:
    with connected(here.address, 20) as sock:
        sock.sendall(len(sent).to_bytes(4, "little") + sent)
        with pytest.raises(hw.StoreError, match=why):
            receive_record(sock, ["kept"], "")
    assert here.leading(KEYS) == 0
    to(here.address).writer(KEYS).close()  # others are served


def test_a_record_that_would_fill_memory_is_refused(here: SegmentStreams) -> None:
    with connected(here.address, 20) as sock:
        sock.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(hw.StoreError, match="4294967295 bytes"):
            receive_record(sock, ["kept"], "")


def test_the_oldest_make_room_and_what_has_none_is_refused() -> None:
    here = SegmentStreams(listen="127.0.0.1:0", most_bytes=3 * MIB)
    there = to(here.address)
    for key in ("a", "b", "c", "d"):  # a block each
        with there.writer([key]) as writer:
            writer.write(tensor())
    assert [there.has(key) for key in "abcd"] == [False, True, True, True]
    with pytest.raises(hw.StoreError), there.writer(["e"]) as writer:
        write_many(writer, 40)  # 5 MB in all
    until(lambda: here.leading(["e"]) == 0)
    with there.writer(["f"]) as writer:
        writer.write(tensor())
    assert read(here, ["f"]) == [tensor()]
    here.close()


def test_discarded_chunks_are_found_no_more(here: SegmentStreams) -> None:
    there = to(here.address)
    with there.writer(KEYS) as writer:
        writer.write(tensor())
    here.discard(["aa"])
    assert (there.has("aa"), there.has("bb")) == (False, True)
    here.discard(KEYS)
    assert not there.has("bb")
    with pytest.raises(hw.StoreError):
        here.segments(["bb"])


def test_what_no_name_leads_to_takes_no_room() -> None:
    here = SegmentStreams(listen="127.0.0.1:0", most_bytes=2 * MIB)
    there = to(here.address)
    with there.writer(["other"]) as writer:
        writer.write(tensor(9))
    for value in range(5):  # a block each; each takes the names of the one before
        with there.writer(KEYS) as writer:
            writer.write(tensor(value))
        assert here.held(["other", *KEYS]) == [True, True, True]
        if value % 2:
            here.discard(KEYS)
    assert read(here) == [tensor(4)]
    here.close()


def test_nobody_at_the_other_end(here: SegmentStreams) -> None:
    address = here.address
    here.close()
    there = to(address)
    assert not there.has("aa")
    with pytest.raises(hw.StoreError) as caught:
        there.writer(KEYS)
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


def test_a_listener_that_goes_away(here: SegmentStreams) -> None:
    writer = to(here.address).writer(KEYS)
    until(lambda: here.leading(KEYS) == 2)
    here.close()
    with pytest.raises(hw.StoreError):
        write_many(writer, 1000)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", seal("held", 2, {"held": [1, 1]})])
def test_somebody_else_at_the_other_end_has_nothing(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(2):
                sock, _ = server.accept()
                with sock:
                    sock.recv(4096)
                    sock.sendall(len(answer).to_bytes(4, "little") + answer if answer else b"")

        thread = Thread(target=serve)
        thread.start()
        there = to(server.getsockname()[:2])
        assert not there.has("aa")
        with pytest.raises(hw.StoreError):
            there.writer(KEYS).finish()
        thread.join()


def test_a_chunk_is_there_when_all_ranks_have_theirs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = f"127.0.0.1:{port}"
    here = [SegmentStreams(listen=text, rank=rank, ranks=2) for rank in (0, 1)]
    there = [SegmentStreams(peer=text, rank=rank, ranks=2) for rank in (0, 1)]
    scheduler = SegmentStreams(listen=text, ranks=2, listens=False)
    for rank in (0, 1):
        assert scheduler.leading(KEYS) == 0
        with there[rank].writer(KEYS) as writer:
            writer.write(tensor(rank))
    assert scheduler.leading(KEYS) == 2
    assert there[0].has("aa")
    assert [read(each) for each in here] == [[tensor(0)], [tensor(1)]]
    with pytest.raises(hw.StoreError):
        scheduler.segments(KEYS)
    with pytest.raises(hw.StoreError):
        scheduler.writer(KEYS)
    for each in here:
        each.close()


def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(hw.StoreError):
        SegmentStreams(listen=f"127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.parametrize("text", ["", "7000", "host:", ":7000", "host:port", "host:70000"])
def test_addresses_are_checked(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        address_of(text)
