"""Frames in a real Redis server: whole, by sequence, over several values; what goes out and what comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from redis_helpers import free_port, fresh_client, module_port, redis_server
from stream_helpers import TENSOR, as_sent, kinds, large, sample

import hurray_wire as hw
from hurray_wire.integrations.redis import RedisStore
from hurray_wire.integrations.redis_parts import PartsSource, Record
from hurray_wire.integrations.redis_wire import receive

KINDS = kinds()
OPTIONS: dict[str, dict[str, Any]] = {
    "raw": {},
    "chunks": {"chunk_bytes": 8192},
    "zstd": {"compression": "zstd", "chunk_bytes": 16384},
    "live": {"pages": "live"},
    "unhashed": {"checksum": False},
}


port = pytest.fixture(scope="module")(module_port)
client = pytest.fixture(fresh_client)


class Recorder:
    """A client that remembers what was asked of it; without a pool, so that nothing goes past it."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        if name == "connection_pool":
            raise AttributeError(name)
        call = getattr(self._client, name)

        def recorded(*arguments: Any, **options: Any) -> Any:
            self.asked.append((name, *arguments))
            return call(*arguments, **options)

        return recorded


def size_of(client: Any) -> list[int]:
    return sorted(client.strlen(key) for key in client.keys())  # noqa: SIM118 - a command, no mapping


@pytest.mark.parametrize("part_bytes", [100, 8192, 20_000, 64 << 20])
@pytest.mark.parametrize("form", OPTIONS)
def test_what_was_put_is_got(client: Any, form: str, part_bytes: int) -> None:
    store = RedisStore(client, part_bytes=part_bytes)
    for name, tensor in KINDS.items():
        expected = hw.decode(hw.encode(tensor, **OPTIONS[form]))
        store.put(name, tensor, **OPTIONS[form])
        assert name in store
        found = store.get(name)
        assert found == expected, name
        assert not found.page_pool.size or found.page_pool.flags.writeable
        assert found.page_pool.ctypes.data % 64 == 0 or not found.page_pool.size
        frame = store.open(name)
        assert frame.tensor() == expected
        if expected.seq_lens is not None:
            assert all(np.array_equal(frame.gather(s), expected.gather(s)) for s in range(expected.num_seqs)), name


@pytest.mark.parametrize("options", [{}, {"verify": False}], ids=["verified", "not"])
def test_one_sequence_is_read_by_its_ranges(client: Any, options: dict[str, Any]) -> None:
    tensor = TENSOR(
        large(0, pages=40).page_pool, block_table=[3, 4, 30, 9, 3], seq_ptr=[0, 3, 3, 5], seq_lens=[40, 0, 32]
    )
    recorder = Recorder(client)
    store = RedisStore(recorder, part_bytes=10 * 8192)
    store.put("k", tensor, chunk_bytes=2 * 8192)
    recorder.asked = []
    frame = store.open("k", **options)
    assert [ask[0] for ask in recorder.asked] == ["get"], "opening takes one value"
    recorder.asked = []
    assert np.array_equal(frame.gather(0), tensor.gather(0))
    asked = [ask[1:] for ask in recorder.asked]
    assert {words[0] for words in asked} == {"GETRANGE"}
    read = sum(words[3] - words[2] + 1 for words in asked)
    assert read == sum(length for _, length in frame.ranges(0)) == (3 if options else 6) * 8192
    assert all(tensor.page_pool[page].tobytes() in bytes(client.get(asked[0][1])) for page in (3, 4))


def test_pages_go_into_the_receivers_pool(client: Any) -> None:
    tensor = large(0, pages=12)
    store = RedisStore(client, part_bytes=30_000)
    store.put("k", tensor)
    mine = np.zeros((50, 16, 4, 64), np.uint16)
    ids = np.random.default_rng(3).permutation(50)[:12]
    found = store.get_into("k", mine, ids)
    assert np.shares_memory(found.page_pool, mine)
    assert found.same_tokens(tensor)
    assert np.array_equal(mine[ids], tensor.page_pool)
    with pytest.raises(ValueError, match="page_ids"):
        store.get_into("k", mine, ids[:3])


def test_the_pool_goes_out_of_its_own_memory(client: Any) -> None:
    tensor = large(0, pages=64)
    recorder = Recorder(client)
    RedisStore(recorder, part_bytes=100_000).put("k", tensor)
    values = [ask[2] for ask in recorder.asked if ask[0] == "set"]
    assert len(values) == 6
    assert all(np.shares_memory(np.frombuffer(value, np.uint8), tensor.page_pool) for value in values)


def test_parts_are_whole_chunks(client: Any) -> None:
    """A chunk is read from one value; no value is larger than was said."""
    for part_bytes in (8192, 8191, 30_000, 70_000):
        recorder = Recorder(client)
        RedisStore(recorder, part_bytes=part_bytes).put("k", large(0, pages=40), chunk_bytes=8192)
        lengths = [len(ask[2]) for ask in recorder.asked if ask[0] == "set"]
        assert max(lengths) <= part_bytes
        assert sum(lengths) == 40 * 8192
        whole = part_bytes // 8192 * 8192
        assert not whole or lengths[0] == whole


def test_large_tables_are_a_part_of_their_own(client: Any) -> None:
    count = 300_000
    tensor = TENSOR(np.zeros((2, 1, 1, 8), np.int8), block_table=[1] * count, seq_ptr=[0, count], seq_lens=[count])
    store = RedisStore(client)
    store.put("k", tensor)
    assert client.strlen("k") < 2000
    assert store.get("k") == tensor
    assert store.open("k").pages([1]).shape == (1, 1, 1, 8)


@pytest.mark.parametrize("key", ["plain", b"\xff\x00 \r\n", "{tag}rest", "a{b", "a}b", "{}x", "ü"])
def test_keys(client: Any, key: str | bytes) -> None:
    store = RedisStore(client, part_bytes=8192)
    store.put(key, large(0, pages=5))
    raw = key if isinstance(key, bytes) else key.encode()
    assert raw in client.keys()  # noqa: SIM118
    assert store.get(key) == store.get(raw) == large(0, pages=5)
    assert len(client.keys()) == 6
    assert store.delete(key)
    assert client.keys() == []
    assert key not in store
    assert not store.delete(key)
    for call in (store.get, store.open):
        with pytest.raises(KeyError):
            call(key)


def test_writing_anew_leaves_nothing_of_the_old(client: Any) -> None:
    store = RedisStore(client, part_bytes=8192)
    for pages in (12, 3, 7):
        store.put("k", large(pages, pages=pages))
        assert len(client.keys()) == 1 + pages
        assert store.get("k") == large(pages, pages=pages)
    client.set("k", b"something else")
    store.put("k", sample(0))
    assert store.get("k") == as_sent(sample(0))


def test_time_to_live(client: Any) -> None:
    store = RedisStore(client, part_bytes=8192)
    store.put("k", large(0, pages=3), ttl=100)
    parts = Record.unsealed(client.get("k")).names(b"k")
    assert 99_000 < client.pttl("k") <= 100_000
    assert all(100_000 < client.pttl(part) <= 160_000 for part in parts), "parts outlive what names them"
    store.put("k", large(0, pages=3))
    assert {client.pttl(key) for key in client.keys()} == {-1}  # noqa: SIM118
    store.put("k", large(0, pages=3), ttl=0.05)
    for _ in range(200):
        if "k" not in store:
            break
        time.sleep(0.02)
    with pytest.raises(KeyError):
        store.get("k")


def test_expect_and_limits_before_the_pool_is_asked_for(client: Any) -> None:
    recorder = Recorder(client)
    store = RedisStore(recorder, part_bytes=8192)
    store.put("k", large(0, pages=12))
    for options, error in (
        ({"expect": {"dtype": "float32", "page_size": 3}}, hw.MismatchError),
        ({"limits": hw.Limits(frame_bytes=90_000)}, hw.LimitError),
        ({"limits": hw.Limits(decoded_bytes=90_000)}, hw.LimitError),
    ):
        mine = np.zeros((12, 16, 4, 64), np.uint16)
        calls: list[Callable[..., Any]] = [
            store.get,
            store.open,
            partial(store.get_into, pool=mine, page_ids=range(12)),
        ]
        for call in calls:
            recorder.asked = []
            with pytest.raises(error):
                call("k", **options)
            assert [ask[0] for ask in recorder.asked] == ["get"]
        assert not mine.any()
    assert store.get("k", expect={"dtype": "uint16"}, limits=hw.Limits.untrusted(200_000)) == large(0, pages=12)


def test_reading_in_few_round_trips(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges are asked for together, up to what the server should hold for one connection."""
    from hurray_wire.integrations import redis_parts

    asked: list[int] = []

    def counted(of: Any, requests: Any) -> Any:
        asked.append(len(requests))
        return receive(of, requests)

    monkeypatch.setattr(redis_parts, "receive", counted)
    tensor = large(0, pages=40)
    store = RedisStore(client, part_bytes=8192)
    store.put("k", tensor)
    assert np.array_equal(store.open("k", verify=False).gather(0), tensor.gather(0))
    assert asked == [40]
    asked.clear()
    monkeypatch.setattr(redis_parts, "_AT_ONCE_BYTES", 20_000)
    assert store.get("k") == tensor
    assert asked == [2] * 20


def test_over_another_protocol(port: int, client: Any) -> None:
    import redis

    RedisStore(client).put("k", large(0, pages=5))
    with redis.Redis(port=port, protocol=3, socket_timeout=30) as other:
        assert RedisStore(other).get("k") == large(0, pages=5)


def test_in_a_cluster() -> None:
    """Parts lie in the slot of their key, so that one transaction names them."""
    with redis_server("--cluster-enabled", "yes", "--cluster-port", str(free_port())) as port:
        import redis
        from redis.cluster import RedisCluster

        with redis.Redis(port=port) as node:
            node.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            for _ in range(200):
                if b"cluster_state:ok" in bytes(node.execute_command("CLUSTER", "INFO")):
                    break
                time.sleep(0.05)
        with RedisCluster(host="127.0.0.1", port=port) as cluster:
            store = RedisStore(cluster, part_bytes=8192)
            for key in ("plain", "user:{7}:layer"):
                store.put(key, large(0, pages=5), ttl=100)
                store.put(key, large(1, pages=5))
                assert store.get(key) == large(1, pages=5)
                assert np.array_equal(store.open(key).gather(0), large(1, pages=5).gather(0))
                slots = {cluster.keyslot(name) for name in cluster.keys()}  # noqa: SIM118
                assert len(slots) == 1
                assert store.delete(key)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"part_bytes": 0}, ValueError),
        ({"part_bytes": (512 << 20) + 1}, ValueError),
        ({"upload_ttl": 0}, ValueError),
        ({"upload_ttl": "1"}, TypeError),
    ],
    ids=str,
)
def test_arguments_of_a_store(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        RedisStore(object(), **options)


def test_arguments(client: Any) -> None:
    import redis

    store = RedisStore(client)
    for options in ({"framing": "bare"}, {"sequence": 1}, {"last": False}, {"nonsense": 1}):
        with pytest.raises(TypeError, match="no option"):
            store.put("k", sample(0), **options)
    for ttl, error in (
        (0, ValueError),
        (-1, ValueError),
        ("1", TypeError),
        (True, TypeError),
        (float("nan"), ValueError),
    ):
        with pytest.raises(error):
            store.put("k", sample(0), ttl=ttl)  # type: ignore[arg-type]
    for key in (7, None, ("a",)):
        with pytest.raises(TypeError, match="key"):
            store.put(key, sample(0))  # type: ignore[arg-type]
    assert client.keys() == []
    with pytest.raises(ValueError, match="decode_responses"):
        RedisStore(redis.Redis(decode_responses=True))


def test_any_range_of_a_frame(client: Any) -> None:
    """What a source gives is the frame's bytes, wherever a range begins and ends."""
    blob = hw.encode(large(0, pages=5))
    store = RedisStore(client, part_bytes=8192)
    store.put("k", large(0, pages=5))
    source = PartsSource(client, b"k", Record.unsealed(client.get("k")))
    assert source.nbytes == len(blob)
    places = [0, 1, 63, 64, 500, *range(600, len(blob) + 99, 4099), len(blob) - 1, len(blob), len(blob) + 5]
    for start in places:
        ranges = [(start, stop - start) for stop in places if stop >= start]
        for (offset, length), found in zip(ranges, source.read_ranges(ranges), strict=True):
            assert found.tobytes() == blob[offset : offset + length], (offset, length)
            assert length < 4096 or found.ctypes.data % 64 == offset % 64 or start < 500
