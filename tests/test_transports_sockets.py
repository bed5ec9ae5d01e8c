"""The engine over sockets, with what its peers and its callers do to it."""

from __future__ import annotations

import socket
import time

import numpy as np
import pytest

import hurray_wire as hw
from hurray_wire import transports

PAGE = (4, 2, 8)


def test_a_reading_that_is_given_up_ends_no_other_and_keeps_no_memory() -> None:
    """Over sockets: the first stands still, since its peer does; the second is behind it."""
    theirs = np.ones((64, *PAGE), np.float16)
    pools = [np.zeros_like(theirs), np.zeros_like(theirs)]
    t = hw.BlockPagedTensor(theirs, block_table=range(64), seq_ptr=[0, 64], seq_lens=[256])
    with transports.endpoint("socket") as one, transports.endpoint("socket") as other:
        peer, _ = one.connect(other.address), other.connect(one.address)
        one.register(theirs)
        registrations = [other.register(pool) for pool in pools]
        for _ in pools:
            one.send(peer, t)
        readings = [other.receive(timeout=10).start(pool, range(64)) for pool in pools]
        with one.engine._lock:  # type: ignore[attr-defined]  # nothing is answered meanwhile
            for _ in range(20):
                for reading in readings:
                    reading.poll()
            started = time.monotonic()
            readings[1].cancel()
            registrations[1].close()
            assert time.monotonic() - started < 1
        assert readings[0].wait(10).same_tokens(t)
        assert [region.start for region, _ in other.memory._regions.values()] == [registrations[0].region.start]


def test_a_closed_endpoint_does_nothing_more() -> None:
    pool = np.ones((4, *PAGE), np.float16)
    t = hw.BlockPagedTensor(pool, block_table=[0], seq_ptr=[0, 1], seq_lens=[2])
    end = transports.endpoint("socket")
    end.close()
    for call in (lambda: end.register(pool), lambda: end.send("anybody", t), lambda: end.receive(timeout=1)):
        with pytest.raises(ValueError, match="closed"):
            call()


@pytest.mark.parametrize("address", [b"x . 80", b"x " + b"a" * 70 + b" 80", b"x a..b 1", b"x y"])
def test_addresses_that_are_none(address: bytes) -> None:
    with transports.endpoint("socket") as end, pytest.raises(hw.TransferError) as caught:
        end.connect(address)
    assert caught.value.code == "memory_refused"


def test_a_peer_whose_name_is_no_text_is_hung_up_on() -> None:
    with transports.endpoint("socket") as end:
        _, host, port = end.address.decode().split(" ")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"HRTS" + b"\xff" * 16)
            assert connection.recv(1) == b""
