"""Tensors over an engine: what arrives, where, by how many reads; nothing is registered or read twice."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from support import ROOT
from transport_engine import Pair, whole

import hurray_wire as hw
from hurray_wire import transports
from hurray_wire.transports.runs import folded, merged, unfolded

PAGE = (4, 2, 8)


@pytest.fixture(params=[1 << 22, 1], ids=["hashed first", "hashed meanwhile"], autouse=True)
def _hashed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hurray_wire.transports.outgoing.HASHED_LATER_BYTES", request.param)


def pool_of(pages: int, dtype: Any = np.float16, page: tuple[int, int, int] = PAGE) -> Any:
    values = np.random.default_rng(pages).integers(0, 120, (pages, *page))
    return values.astype(dtype)


def batch(pool: Any, **options: Any) -> hw.BlockPagedTensor:
    """Three sequences, one page shared, one unused; the last page of each partly filled."""
    pages = len(pool)
    table = [0, 2, 3, 2, pages - 1, 5, 4]
    return hw.BlockPagedTensor(pool, block_table=table, seq_ptr=[0, 3, 5, 7], seq_lens=[10, 7, 5], **options)


def moved(pair: Pair, t: hw.BlockPagedTensor, mine: Any, ids: Any, held: Any = (), **sending: Any) -> Any:
    outgoing = pair.one.send(pair.peer, t, **sending)
    back = pair.other.receive(timeout=1).read_into(mine, ids, held=held, timeout=5)
    assert outgoing.done
    return back


@pytest.mark.parametrize("pages", ["all", "live"])
@pytest.mark.parametrize("chunk_bytes", [None, 128, 256])
@pytest.mark.parametrize("scrub", [False, True])
def test_pages_land_where_they_are_wanted_and_nothing_else_changes(pages: Any, chunk_bytes: Any, scrub: bool) -> None:
    pair, theirs = Pair(), pool_of(9)
    t = batch(theirs, layer_index=3, metadata={"model": "m"})
    sent = hw.decode(hw.encode(t, pages=pages))
    mine = np.full((30, *PAGE), 99, np.float16)
    ids = whole(sent.num_pages)
    pair.one.register(theirs), pair.other.register(mine)
    back = moved(pair, t, mine, ids, pages=pages, chunk_bytes=chunk_bytes, scrub=scrub)
    assert back.same_tokens(t)
    assert (back.page_pool is mine, back.layer_index, back.metadata) == (True, 3, {"model": "m"})
    expected = hw.decode(hw.encode(t, pages=pages, scrub=scrub)).page_pool
    assert (mine[ids] == expected).all()
    assert (np.delete(mine, ids, axis=0) == 99).all()


POOLS: dict[str, Any] = {
    "contiguous": lambda pages: pool_of(pages),
    "key half": lambda pages: np.stack([pool_of(pages)] * 2, axis=1)[:, 0],
    "heads of more": lambda pages: np.concatenate([pool_of(pages)] * 2, axis=2)[:, :, :2],
    "big-endian": lambda pages: pool_of(pages).astype(">f2"),
    "backwards": lambda pages: pool_of(pages)[::-1].copy()[::-1],
}


@pytest.mark.parametrize("theirs", POOLS)
@pytest.mark.parametrize("ours", POOLS)
@pytest.mark.parametrize("held", [(), (1, 2)], ids=["lacks all", "holds two"])
def test_any_pool_of_pages_serves_at_either_end(theirs: str, ours: str, held: Any) -> None:
    pair, source, mine = Pair(), POOLS[theirs](9), POOLS[ours](20)
    t = batch(source)
    pair.one.register(source), pair.other.register(mine)
    ids = whole(9)
    mine[ids[list(held)]] = source[list(held)]
    back = moved(pair, t, mine, ids, held, chunk_bytes=384)
    assert back.same_tokens(t)
    assert (mine[ids] == source).all()


def test_pages_that_are_held_are_not_read() -> None:
    pair, theirs, mine = Pair(), pool_of(9), pool_of(20)
    t = batch(theirs)
    pair.one.register(theirs), pair.other.register(mine)
    ids = whole(9)
    mine[ids[[0, 4]]] = theirs[[0, 4]]
    small = t.block_table.nbytes + t.seq_ptr.nbytes
    assert moved(pair, t, mine, ids, held=[0, 4]).same_tokens(t)
    assert pair.receiver.bytes_read == small + 7 * t.page_bytes
    before = pair.receiver.bytes_read
    assert moved(pair, t, mine, ids, held=range(9)).same_tokens(t)
    assert pair.receiver.bytes_read - before == small


def test_a_page_that_is_held_and_differs_is_found() -> None:
    pair, theirs, mine = Pair(), pool_of(9), pool_of(20)
    pair.one.register(theirs), pair.other.register(mine)
    pair.one.send(pair.peer, batch(theirs), chunk_bytes=1)
    with pytest.raises(hw.ChecksumError) as caught:
        pair.other.receive().read_into(mine, range(9), held=[3], timeout=5)
    assert caught.value.where == "sections[5]"  # descriptor, seq_lens, then a page each
    assert 3 not in caught.value.pages_written


def test_neighbours_travel_as_one() -> None:
    pair, theirs, mine = Pair(), pool_of(64), np.zeros((80, *PAGE), np.float16)
    t = hw.BlockPagedTensor(theirs, block_table=range(64), seq_ptr=[0, 64], seq_lens=[256])
    pair.one.register(theirs), pair.other.register(mine)
    moved(pair, t, mine, range(9, 73))
    assert [runs.length.tolist() for runs in pair.receiver.posted] == [[256, 8], [theirs.nbytes]]
    ids = np.r_[9:41, 50:66, 0:8, 70:78]
    mine[ids[40]] = theirs[40]
    moved(pair, t, mine, ids, held=[40])
    width = t.page_bytes
    assert pair.receiver.posted[-1].length.tolist() == [32 * width, 8 * width, 7 * width, 8 * width, 8 * width]


def test_runs_are_what_pages_were() -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        pages = rng.permutation(40)[: rng.integers(1, 40)] * 32 + 4096
        assert unfolded(*folded(pages, 32), 32).tolist() == pages.tolist()
        targets = rng.permutation(pages.size) * 32
        runs = merged(pages, targets, 32)
        assert unfolded(runs.source, runs.length // 32, 32).tolist() == pages.tolist()
        assert unfolded(runs.target, runs.length // 32, 32).tolist() == targets.tolist()
    nothing = np.zeros(0, np.int64)
    assert merged(nothing, nothing, 8).nbytes == 0
    assert unfolded(nothing, nothing, 8).size == 0


def test_runs_are_cut_where_batches_end() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        size = int(rng.integers(0, 40))
        pages = np.cumsum(rng.integers(1, 3, size)) * 32 + 4096  # neighbours, often
        ends = np.sort(np.r_[rng.integers(0, size + 1, rng.integers(0, 6)), size])
        parts = merged(pages, pages + 5, 32, ends).cut(ends, 32)
        assert len(parts) == ends.size
        for runs, start, end in zip(parts, [0, *ends], ends, strict=False):
            assert unfolded(runs.source, runs.length // 32, 32).tolist() == pages[start:end].tolist()
            assert (runs.target - runs.source == 5).all()
            assert runs.length.tolist() == merged(pages[start:end], pages[start:end], 32).length.tolist()


def test_pools_are_registered_once_and_blocks_used_again() -> None:
    pair, theirs, mine = Pair(), pool_of(9), pool_of(20)
    pair.one.register(theirs), pair.other.register(mine)
    for layer in range(20):
        assert moved(pair, batch(theirs, layer_index=layer), mine, whole(9)).layer_index == layer
    assert (pair.sender.registrations, pair.receiver.registrations) == (2, 2)


def test_many_offers_at_a_time_each_keep_their_own() -> None:
    pair = Pair()
    pools = [pool_of(9) + np.float16(i) for i in range(5)]
    mine = np.zeros((5, 20, *PAGE), np.float16)
    pair.other.register(mine)
    for pool in pools:
        pair.one.register(pool)
    outgoing = [pair.one.send(pair.peer, batch(pool)) for pool in pools]
    incoming = [pair.other.receive() for _ in pools]
    readings = [item.start(mine[i], whole(9)) for i, item in enumerate(incoming)]
    while not all([reading.poll() for reading in readings]):  # noqa: C419 - each of them takes its step
        pass
    for i, (pool, reading) in enumerate(zip(pools, readings, strict=True)):
        assert reading.result().same_tokens(batch(pool))
        assert (mine[i][whole(9)] == pool).all()
    assert all(item.done for item in outgoing)


def quantised(scheme: str) -> tuple[Any, dict[str, Any]]:
    rng = np.random.default_rng(6)
    pool = rng.integers(-9, 9, (9, *PAGE)).astype(np.int8)
    if scheme == "per_block":
        scales, zeros = rng.random((9, 4), np.float32) + 1, rng.integers(-3, 3, (9, 4)).astype(np.int32)
    elif scheme == "per_channel":
        scales, zeros = rng.random(2, np.float32) + 1, rng.integers(-3, 3, 2).astype(np.int32)
    else:
        return pool, {"quantization": hw.PerTensorAffine(0.5, 3)}
    axis = {"quantization": hw.PerChannelAffine.asymmetric(1, 3, 4)} if scheme == "per_channel" else {}
    return pool, {"quantization": scheme, "scales": scales, "zero_points": zeros} | axis


@pytest.mark.parametrize("scheme", ["per_tensor", "per_channel", "per_block"])
@pytest.mark.parametrize("registered", [False, True], ids=["scales staged", "scales registered"])
@pytest.mark.parametrize("pages", ["all", "live"])
def test_scales_come_along(scheme: str, registered: bool, pages: Any) -> None:
    pair, (pool, options) = Pair(), quantised(scheme)
    t = batch(pool, **options)
    mine = np.zeros((20, *PAGE), np.int8)
    pair.one.register(pool), pair.other.register(mine)
    if registered and t.scales is not None and t.zero_points is not None:
        pair.one.register(t.scales), pair.one.register(t.zero_points)
    back = moved(pair, t, mine, whole(hw.decode(hw.encode(t, pages=pages)).num_pages), pages=pages)
    assert back.same_tokens(t)
    assert all((back.dequantize(seq) == t.dequantize(seq)).all() for seq in range(t.num_seqs))


def test_packed_pools_of_whole_pages() -> None:
    pair = Pair()
    packed = np.random.default_rng(1).integers(0, 256, 9 * 32, dtype=np.uint8)
    mine = np.zeros(20 * 32, np.uint8)
    options: dict[str, Any] = {"dtype": "int4", "page_size": 4, "num_heads": 2, "head_dim": 8}
    t = hw.BlockPagedTensor(packed, block_table=[4, 8], seq_ptr=[0, 2], seq_lens=[7], **options)
    pair.one.register(packed), pair.other.register(mine)
    assert moved(pair, t, mine, [19, 3], pages="live").same_tokens(t)


def test_pages_that_end_inside_bytes_are_refused_at_once() -> None:
    pair, packed = Pair(), np.zeros(1, np.uint8)
    options: dict[str, Any] = {"dtype": "int4", "page_size": 1, "num_heads": 1, "head_dim": 1}
    three = hw.BlockPagedTensor(packed, block_table=[0], seq_ptr=[0, 1], seq_lens=[1], **options)
    pair.one.register(packed)
    with pytest.raises(hw.UnsupportedError) as caught:
        pair.one.send(pair.peer, three)
    assert caught.value.code == "packed_pool"


def test_a_pool_without_pages() -> None:
    pair, nothing, mine = Pair(), np.zeros((0, *PAGE), np.float16), pool_of(3)
    t = hw.BlockPagedTensor(nothing, block_table=[], seq_ptr=[0], seq_lens=[])
    pair.other.register(mine)
    assert moved(pair, t, mine, []).num_seqs == 0


@pytest.mark.parametrize("page", [(2, 1, 0), (2, 0, 8)])
@pytest.mark.parametrize("order", ["<", ">"])
def test_pages_of_no_bytes(page: tuple[int, int, int], order: str) -> None:
    pair, theirs, mine = Pair(), np.zeros((5, *page), np.float16), np.zeros((7, *page), f"{order}f2")
    t = hw.BlockPagedTensor(theirs, block_table=range(5), seq_ptr=[0, 5], seq_lens=[10])
    pair.one.register(theirs), pair.other.register(mine)
    assert moved(pair, t, mine, range(2, 7)).block_table.tolist() == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("message_bytes", [64, 100, 4096])
def test_long_offers_travel_in_parts(message_bytes: int) -> None:
    pair, theirs, mine = Pair(message_bytes=message_bytes), pool_of(9), pool_of(20)
    pair.one.register(theirs), pair.other.register(mine)
    t = batch(theirs, metadata={"model": "x" * 5000})
    assert moved(pair, t, mine, whole(9)).metadata == {"model": "x" * 5000}


@pytest.mark.parametrize("scheme", ["per_tensor", "per_block"])
def test_a_tensor_over_a_pool_of_its_own(scheme: str) -> None:
    pair, (pool, options) = Pair(), quantised(scheme)
    t = batch(pool, **options)
    pair.one.register(pool)
    pair.one.send(pair.peer, t, pages="live")
    back = pair.other.receive().read(timeout=1)
    assert back.same_tokens(t)
    assert (back.num_pages, back.page_pool.flags.writeable) == (6, True)
    assert len(pair.receiver.regions) == 1  # the block of its tables
    packed = np.arange(64, dtype=np.uint8)
    sizes: dict[str, Any] = {"dtype": "int4", "page_size": 4, "num_heads": 2, "head_dim": 8}
    t = hw.BlockPagedTensor(packed, block_table=[1], seq_ptr=[0, 1], seq_lens=[3], **sizes)
    pair.one.register(packed)
    pair.one.send(pair.peer, t)
    assert pair.other.receive().read(timeout=1) == t


def test_progress_counts_bytes_of_pages() -> None:
    pair, theirs, mine = Pair(), pool_of(9), pool_of(20)
    pair.one.register(theirs), pair.other.register(mine)
    pair.one.send(pair.peer, batch(theirs))
    mine[whole(9)[2]] = theirs[2]
    reading = pair.other.receive().start(mine, whole(9), held=[2])
    seen = [reading.progress]
    while not reading.poll():
        seen.append(reading.progress)
    assert (seen[0], reading.progress) == ((0, 8 * 128), (8 * 128, 8 * 128))
    assert [came for came, _ in seen] == sorted(came for came, _ in seen)


def test_memory_that_is_not_registered_is_a_callers_error() -> None:
    pair, theirs, mine = Pair(), pool_of(9), pool_of(20)
    with pytest.raises(ValueError, match="not registered"):
        pair.one.send(pair.peer, batch(theirs))
    pair.one.register(theirs)
    outgoing = pair.one.send(pair.peer, batch(theirs))
    incoming = pair.other.receive()
    with pytest.raises(ValueError, match="not registered"):
        incoming.start(mine, whole(9))
    pair.other.register(mine[:12])
    with pytest.raises(ValueError, match="not registered"):
        incoming.start(mine, range(9, 18))
    assert incoming.read_into(mine, range(9), timeout=1).same_tokens(batch(theirs))
    assert outgoing.done
    with pytest.raises(ValueError, match="has been read"):
        incoming.start(mine, range(9))
    with pytest.raises(KeyError):
        pair.one.send("nobody", batch(theirs))


def test_no_engine_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, hurray_wire; from hurray_wire import transports\n"
        "print(*sorted({'nixl', 'mooncake', 'socket', 'hurray_wire.transports.sockets'} & set(sys.modules)))\n"
        "print('hurray_wire.transports' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[1] == "True"
    assert not {"nixl", "mooncake", "hurray_wire.transports.sockets"} & set(done.stdout.splitlines()[0].split())
    plain = "import sys, hurray_wire; print('hurray_wire.transports' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", plain], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"


def test_an_engine_that_is_not_known() -> None:
    with pytest.raises(ValueError, match="'nixl', 'mooncake', 'socket'"):
        transports.endpoint("rdma")
