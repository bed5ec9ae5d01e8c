"""What the socket engine reads from one peer: the order of requests and answers, and what an end of one leaves."""

from __future__ import annotations

import gc
import socket
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from plugin_helpers import until

from hurray_wire.transports.runs import Runs
from hurray_wire.transports.socket_reader import GRANTED, READ, REFUSED, REQUEST, Reader, Work, fill

SECONDS = 10.0


class Peer:
    """The other end of a reader, played by hand; `memory` is where the reader's addresses begin."""

    def __init__(self, nbytes: int = 1 << 20) -> None:
        self.memory = bytearray(nbytes)
        self.connections: list[socket.socket] = []
        self.reader = Reader("peer", self._connect, lambda start, length: memoryview(self.memory)[start:][:length])

    def _connect(self) -> socket.socket:
        mine, theirs = socket.socketpair()
        theirs.settimeout(SECONDS)
        self.connections.append(theirs)
        return mine

    def post(self, start: int, length: int, runs: int = 1) -> Work:
        """Ask for so many bytes, in equal runs, to be read to where `start` says."""
        each = length // runs
        at = start + np.arange(runs) * each
        work = Work("peer", Runs(at, at, np.full(runs, each)), [bytes(16)])
        self.reader.post(work)
        return work

    def request(self, connection: int = -1) -> list[tuple[int, int]]:
        """The next request's runs."""
        self.connected(1)
        kind, _, runs, keys = REQUEST.unpack(self._exactly(REQUEST.size, connection))
        assert (kind, self._exactly(16 * keys, connection)) == (READ, bytes(16))
        return [tuple(pair) for pair in np.frombuffer(self._exactly(16 * runs, connection), "<i8").reshape(-1, 2)]

    def _exactly(self, count: int, connection: int) -> bytes:
        data = bytearray(count)
        fill(self.connections[connection], [memoryview(data)])
        return bytes(data)

    def answer(self, data: bytes, connection: int = -1) -> None:
        self.connections[connection].sendall(data)

    def connected(self, count: int) -> None:
        """Wait for the connection of that number."""
        until(lambda: len(self.connections) >= count)

    def reads_again(self, work: Work) -> None:
        """The second connection is for the bytes from 10 to 20."""
        self.connected(2)
        assert self.request() == [(10, 10)]
        self.answer(GRANTED + b"b" * 10)
        assert ended(work) is None


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.reader.close(SECONDS)
    assert not made.reader._thread.is_alive()
    for connection in made.connections:
        connection.close()


def ended(work: Work) -> str | None:
    """How it ended, waited for: an error's code."""
    assert work.finished.wait(SECONDS)
    return None if work.error is None else work.error.code


def test_the_next_request_is_there_before_the_answer_has_ended(peer: Peer) -> None:
    one, other = peer.post(0, 100), peer.post(100, 50)
    assert peer.request() == [(0, 100)]
    peer.answer(GRANTED + b"a" * 99)
    assert peer.request() == [(100, 50)]
    assert not one.finished.is_set()
    peer.answer(b"a" + GRANTED + b"b" * 50)
    assert (ended(one), ended(other)) == (None, None)
    assert peer.memory[:150] == b"a" * 100 + b"b" * 50
    assert len(peer.connections) == 1


def test_one_that_is_posted_while_another_comes_is_asked_for_at_once(peer: Peer) -> None:
    one = peer.post(0, 100)
    assert peer.request() == [(0, 100)]
    peer.answer(GRANTED + b"a" * 50)
    other = peer.post(100, 50)
    peer.answer(b"a" * 49)  # it looks again when something has come
    assert peer.request() == [(100, 50)]
    peer.answer(b"a" + GRANTED + b"b" * 50)
    assert (ended(one), ended(other)) == (None, None)


def test_neither_end_waits_for_the_other_to_take_a_long_request(peer: Peer) -> None:
    runs = 1 << 17  # 2 MiB of request, more than a socket holds
    one, other = peer.post(0, 1 << 20), peer.post(0, 1 << 20, runs)
    assert peer.request() == [(0, 1 << 20)]
    peer.answer(GRANTED + b"a" * (1 << 20))  # takes nothing until all of it is gone
    assert ended(one) is None
    assert len(peer.request()) == runs
    peer.answer(GRANTED + b"b" * (1 << 20))
    assert ended(other) is None
    assert peer.memory == b"b" * (1 << 20)


def test_one_that_is_given_up_before_its_turn_ends_nobody_else(peer: Peer) -> None:
    one, other, third = peer.post(0, 10), peer.post(10, 10), peer.post(20, 10)
    peer.request()
    peer.answer(GRANTED + b"a" * 5)
    assert peer.request() == [(10, 10)]  # asked for, and its answer will come
    peer.reader.abandon(other)
    peer.answer(b"a" * 5)
    assert (ended(one), ended(other)) == (None, None)
    peer.connected(2)
    assert peer.request() == [(20, 10)]
    peer.answer(GRANTED + b"c" * 10)
    assert ended(third) is None
    assert peer.memory[:30] == b"a" * 10 + bytes(10) + b"c" * 10


def test_one_that_is_given_up_and_was_not_asked_for_costs_no_connection(peer: Peer) -> None:
    one, other, third, fourth = (peer.post(10 * i, 10) for i in range(4))
    peer.request()
    peer.reader.abandon(third)
    for letter in (b"a", b"b"):
        peer.answer(GRANTED + letter * 10)
    assert [ended(work) for work in (one, other, third)] == [None] * 3
    peer.request()
    assert peer.request() == [(30, 10)]
    peer.answer(GRANTED + b"d" * 10)
    assert ended(fourth) is None
    assert peer.memory[:40] == b"a" * 10 + b"b" * 10 + bytes(10) + b"d" * 10
    assert len(peer.connections) == 1


def test_one_that_is_given_up_in_the_middle_is_cut_short_and_the_next_asked_for_again(peer: Peer) -> None:
    one, other = peer.post(0, 10), peer.post(10, 10)
    peer.request()
    peer.answer(GRANTED + b"a" * 5)
    peer.request()
    peer.reader.abandon(one)
    assert one.finished.wait(SECONDS)
    peer.reads_again(other)
    assert peer.memory[10:20] == b"b" * 10


@pytest.mark.parametrize("answer", [REFUSED, b""], ids=["refused", "lost"])
def test_what_was_asked_for_behind_a_failure_is_asked_for_again(peer: Peer, answer: bytes) -> None:
    one, other = peer.post(0, 10), peer.post(10, 10)
    peer.request()
    peer.answer(answer)
    if not answer:
        peer.connections[0].close()
    assert ended(one) == ("memory_refused" if answer else "peer_lost")
    peer.reads_again(other)


def test_a_reader_that_is_closed_stops_in_the_middle(peer: Peer) -> None:
    one = peer.post(0, 10)
    peer.request()
    peer.answer(GRANTED + b"a" * 5)
    peer.post(10, 10)
    peer.reader.close(SECONDS)
    assert ended(one) == "peer_lost"
    assert len(peer.connections) == 1


def test_whatever_goes_wrong_is_said_and_those_behind_it_are_read(peer: Peer) -> None:
    class Broken(Work):
        def request(self) -> bytes:
            raise MemoryError("no room for it")

    one = Broken("peer", Runs(*[np.array([1])] * 3), [])
    peer.reader.post(one)
    other = peer.post(10, 10)
    assert ended(one) == "transfer_failed"
    peer.reads_again(other)


def test_what_has_been_read_cannot_be_given_up_any_more(peer: Peer) -> None:
    one = peer.post(0, 10)
    peer.request()
    peer.answer(GRANTED + b"a" * 10)
    assert ended(one) is None
    assert peer.reader.abandon(one)
    other = peer.post(10, 10)
    peer.request()
    peer.answer(GRANTED + b"b" * 10)
    assert (ended(other), len(peer.connections)) == (None, 1)


def test_what_is_not_being_read_is_let_go_of_at_once(peer: Peer) -> None:
    one, other = peer.post(0, 10), peer.post(10, 10)
    peer.request()
    assert peer.reader.abandon(other)
    assert not peer.reader.abandon(one)
    assert one.finished.wait(SECONDS)
    assert peer.reader.abandon(one)


def test_a_thread_that_waits_keeps_nothing_of_what_failed(peer: Peer) -> None:
    one = peer.post(0, 10)
    peer.request()
    peer.answer(REFUSED)
    assert ended(one) == "memory_refused"
    gone = weakref.ref(one)
    del one
    until(lambda: gc.collect() >= 0 and gone() is None)
