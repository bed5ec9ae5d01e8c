"""The parts of `examples/handoff` that need no model: pages that are shared, a receiver's pool, the socket between."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from threading import Thread
from typing import Any

import numpy as np
import pytest
from support import ROOT

import hurray_wire as hw
from hurray_wire import ops

sys.path.insert(0, str(ROOT / "examples"))
from handoff import connection, paging, pool, transfer_engines, transports
from handoff.jobs import RECEIVER_PAGE_SIZE, SENDER_PAGE_SIZE, Job, same_bits

PREFIX, LENS = 48, [60, 49, 96]
HEADS, DIM, LAYERS = 4, 6, 2


def batch(role: str = "key", layer: int = 0, prefix: int = PREFIX) -> hw.BlockPagedTensor:
    """Ragged sequences that begin with the same tokens, each with pages of its own."""
    generator = np.random.default_rng([layer, role == "key"])
    first = generator.standard_normal((prefix, HEADS, DIM)).astype(np.float32)
    rows = [
        np.concatenate([first, generator.standard_normal((n - prefix, HEADS, DIM)).astype(np.float32)]) for n in LENS
    ]
    return ops.paginate(np.concatenate(rows), LENS, SENDER_PAGE_SIZE, kv_role=role, layer_index=layer)


def job(**changes: Any) -> Job:
    return Job("", "llama", "float32", **changes)


@pytest.mark.parametrize(("prefix", "pages"), [(PREFIX, 3), (PREFIX - 1, 2), (SENDER_PAGE_SIZE, 1), (15, 0)])
def test_whole_pages_of_the_prefix_are_shared(prefix: int, pages: int) -> None:
    t = batch()
    shared = paging.share_prefix(t, prefix)
    assert shared.same_tokens(t)
    assert (shared.page_references() == len(LENS)).sum() == pages
    assert t.block_table.size - (shared.page_references() > 0).sum() == pages * (len(LENS) - 1)
    assert pool.shared_tokens(shared) == pages * SENDER_PAGE_SIZE


def test_a_prefix_that_is_not_the_same_is_not_kept() -> None:
    t = batch(prefix=0)
    assert not paging.share_prefix(t, PREFIX).same_tokens(t)
    assert pool.shared_tokens(t) == 0
    assert pool.shared_tokens(ops.select(t, [1])) == 0


def filled(size: int = 1, known: bool = False) -> tuple[pool.Pool, dict[tuple[str, int], hw.BlockPagedTensor]]:
    """A pool after all that `size` ranks send, and what was sent."""
    mine = pool.Pool(LAYERS, {"key": (HEADS, DIM), "value": (HEADS, DIM)}, "float32", 60)
    sent = {(role, i): paging.share_prefix(batch(role, i), PREFIX) for i in range(LAYERS) for role in ("key", "value")}
    prefix_pages = None
    if known:
        for i, t in enumerate(sent.values()):
            one = ops.select(t, [0])
            first = one.replace(
                block_table=one.block_table[: PREFIX // SENDER_PAGE_SIZE], seq_ptr=[0, 3], seq_lens=[48]
            )
            if not i:
                mine.seat(first)
            mine.put(first)
        mine.check_complete()
        prefix_pages = mine.table
        assert prefix_pages.size == PREFIX // RECEIVER_PAGE_SIZE
    for i, t in enumerate(sent.values()):
        parts = [paging.share_of(t, job(size=size, known_prefix=known), rank, PREFIX) for rank in range(size)]
        if not i:
            mine.seat(parts[0], prefix_pages)
        for part in parts:
            mine.put(hw.decode(hw.encode(part, pages="live")))
    return mine, sent


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_pool_holds_what_was_sent(size: int, known: bool) -> None:
    mine, sent = filled(size, known)
    mine.check_complete()
    for (role, layer), t in sent.items():
        for seq in range(len(LENS)):
            assert same_bits(mine.tensor(role, layer).gather(seq), t.gather(seq))
    here = mine.tensor("key", 0)
    assert (here.page_references() == len(LENS)).sum() == PREFIX // RECEIVER_PAGE_SIZE
    assert 0 not in here.block_table
    assert here.block_table.tolist() != sorted(here.block_table.tolist())


def test_what_is_missing_or_twice_is_noticed() -> None:
    mine, sent = filled()
    t = paging.share_of(sent["value", 1], job(size=2), 1, PREFIX)
    mine.put(t)
    with pytest.raises(ValueError, match="value head 2 of layer 1 arrived 2 times"):
        mine.check_complete()
    mine.seat(t)
    with pytest.raises(ValueError, match="key head 0 of layer 0 arrived 0 times"):
        mine.check_complete()


def test_a_pool_that_is_too_small_says_so() -> None:
    with pytest.raises(MemoryError, match="are free"):
        pool.Pool(1, {"key": (HEADS, DIM)}, "float32", 5).seat(batch())


def test_a_latent_is_two_views_of_its_pages() -> None:
    mine = pool.Pool(1, {"fused": (HEADS, DIM)}, "float32", 60)
    t = batch().replace(kv_role="fused")
    mine.seat(t)
    mine.put(t)
    [(key, value)] = mine.layers(4)
    assert np.shares_memory(key.page_pool, mine.arrays["fused"])
    assert same_bits(np.concatenate([key.gather(1), value.gather(1)], axis=2), t.gather(1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_pages_are_the_live_ones_and_come_back_as_values(dtype: str) -> None:
    t = paging.share_prefix(batch(), PREFIX)
    small = paging.quantized(t, job(quantization="per_block"))
    assert small.dtype is hw.Dtype.of("int8")
    assert small.num_pages == (t.page_references() > 0).sum()
    back = pool.in_dtype(small, dtype)
    assert back.dtype is hw.Dtype.of(dtype)
    for seq in range(len(LENS)):
        wanted = t.gather(seq)
        bound = np.abs(wanted).max(axis=(1, 2), keepdims=True) * (0.5 / 127 + 2**-8)
        assert (np.abs(back.gather(seq).astype(np.float32) - wanted) <= bound).all()
    assert pool.in_dtype(t, dtype) is t
    assert paging.quantized(t, job()) is t


# The transports. The engine that is plain sockets stands for the others, which need packages and processes.


@pytest.fixture(params=["frames", "engine"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[connection.Transport, connection.Listener]]:
    """What sends, and a listener."""
    if request.param == "frames":
        socket = connection.SocketTransport()
        listener: connection.Listener = socket.listen()
        yield socket, listener
    else:
        pytest.importorskip("hurray_wire.transports", reason="transfer engines are not part of this version")
        mine, theirs = (transfer_engines.EngineTransport("socket") for _ in range(2))
        listener = mine.listen()
        yield theirs, listener
        theirs.endpoint.close()
    listener.close()


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_streams_arrive_and_both_ends_count_the_same_bytes(ends: Any, compression: str | None) -> None:
    transport, listener = ends
    tensors, meters, refused = [batch("key", i) for i in range(3)], [], []

    def send() -> None:
        try:
            for _ in range(2):
                with transport.connect(listener.address, compression) as sender:
                    meters.append(sender.meter)
                    for t in tensors:
                        sender.write(t)
        except ValueError as error:
            refused.append(error)

    thread = Thread(target=send, daemon=True)
    thread.start()
    if compression and not isinstance(transport, connection.SocketTransport):
        thread.join()
        assert "nothing is compressed" in str(refused[0])
        return
    for i in range(2):
        with listener.accept() as stream:
            assert [header.read() for header in stream.arrivals({"dtype": "float32"})] == tensors
        assert stream.meter.seconds > 0
        while len(meters) == i:
            pass
    thread.join()
    assert not refused
    assert stream.meter.bytes == meters[0].bytes == meters[1].bytes > sum(t.nbytes for t in tensors) / 2


def test_a_wrong_end_reads_no_payload_and_the_next_stream_is_as_if_nothing_had_been(ends: Any) -> None:
    transport, listener = ends
    tensors = [batch("key", i).replace(metadata={"model": "llama"}) for i in range(4)]

    def send() -> None:
        for _ in range(2):
            with suppress(OSError), transport.connect(listener.address, None) as sender:
                for t in tensors:
                    sender.write(t)  # the receiver may be gone before all is sent

    thread = Thread(target=send, daemon=True)
    thread.start()
    with pytest.raises(hw.MismatchError) as error, listener.accept() as stream:
        next(stream.arrivals({"model": "other", "page_size": SENDER_PAGE_SIZE}))
    assert [str(d) for d in error.value.differences] == ["model: found 'llama', expected 'other'"]
    assert stream.meter.bytes <= len(hw.encode_header(tensors[0], pages="live"))
    with listener.accept() as stream:
        assert [header.read() for header in stream.arrivals({"model": "llama"})] == tensors
    thread.join()


def test_what_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert transports.names()[0] == "socket"
    assert transports.compresses("socket")
    assert not transports.compresses("nixl")
    monkeypatch.setattr(transports, "find_spec", lambda name: None if name == "nixl" else object())
    assert transports.names() == ["socket", "mooncake"]
    monkeypatch.setattr(transports, "find_spec", lambda name: None if name == "hurray_wire.transports" else object())
    assert transports.names() == ["socket"]
    assert isinstance(transports.make("socket"), connection.SocketTransport)
