"""Redis that is full, goes away, gives half, or is written to meanwhile: our error, and nothing that looks whole."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from redis_helpers import fresh_client, module_port, redis_server
from stream_helpers import as_sent, large, sample

import hurray_wire as hw
from hurray_wire.integrations import redis_wire
from hurray_wire.integrations.redis import RedisStore
from hurray_wire.integrations.redis_parts import Record
from hurray_wire.integrations.redis_wire import Request, receive
from hurray_wire.integrations.sealed import seal

OLD, NEW = large(0, pages=5), large(1, pages=5)
PART = 8192


port = pytest.fixture(scope="module")(module_port)
client = pytest.fixture(fresh_client)


@pytest.fixture
def store(client: Any) -> RedisStore:
    return RedisStore(client, part_bytes=PART)


def parts_of(client: Any) -> list[bytes]:
    return Record.unsealed(client.get("k")).names(b"k")


# Values that are not what was written.


Damage = Callable[[Any, bytes], Any]
DAMAGES: dict[str, tuple[Damage, type[hw.HurrayWireError], str]] = {
    "half": (lambda c, part: c.set(part, c.get(part)[:4000]), hw.TruncatedError, "parts[2]"),
    "one byte less": (lambda c, part: c.set(part, c.get(part)[:-1]), hw.TruncatedError, "parts[2]"),
    "nothing": (lambda c, part: c.set(part, b""), hw.TruncatedError, "parts[2]"),
    "gone": (lambda c, part: c.delete(part), hw.TruncatedError, "parts[2]"),
    "more": (lambda c, part: c.append(part, b"x"), hw.FrameError, "parts[2]"),
    "another byte": (lambda c, part: c.setrange(part, 77, b"\xff\xff"), hw.ChecksumError, "sections[4]"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_part_that_is_not_what_was_written(client: Any, store: RedisStore, name: str) -> None:
    damage, error, where = DAMAGES[name]
    store.put("k", OLD, chunk_bytes=PART)
    damage(client, parts_of(client)[2])
    mine = np.zeros((5, 16, 4, 64), np.uint16)
    calls: list[Callable[[], Any]] = [
        lambda: store.get("k"),
        lambda: store.open("k").tensor(),
        lambda: store.get_into("k", mine, range(5)),
    ]
    for call in calls:
        with pytest.raises(error) as caught:
            call()
        assert caught.value.where == where
        if isinstance(caught.value, hw.TruncatedError):
            assert (caught.value.needed, caught.value.available) == (PART, client.strlen(parts_of(client)[2]))
    with pytest.raises(error):
        store.open("k").pages([2])
    assert np.array_equal(store.open("k").pages([0, 1, 3, 4]), OLD.page_pool[[0, 1, 3, 4]])
    if error is not hw.ChecksumError:
        with pytest.raises(error):
            store.get("k", verify=False)


def test_every_cut_and_every_changed_byte_of_the_keys_value(client: Any, store: RedisStore) -> None:
    store.put("k", sample(0))
    value = client.get("k")
    for cut in range(len(value)):
        with pytest.raises(hw.FrameError):
            Record.unsealed(value[:cut])
    for at in range(len(value)):
        for flip in (0x01, 0x80):
            changed = value[:at] + bytes([value[at] ^ flip]) + value[at + 1 :]
            with pytest.raises(hw.HurrayWireError):
                Record.unsealed(changed)
    client.set("k", value[:300])
    for call in (store.get, store.open):
        with pytest.raises(hw.TruncatedError) as caught:
            call("k")
        assert caught.value.where == "value"
    client.set("k", value + b"x")
    with pytest.raises(hw.FrameError) as later:
        store.get("k")
    assert later.value.code == "trailing_bytes"


@pytest.mark.parametrize(
    ("value", "error", "code"),
    [
        (b"", hw.TruncatedError, "truncated"),
        (b"hurray_wire pa", hw.TruncatedError, "truncated"),
        (b"hello", hw.FrameError, "magic"),
        (hw.encode(sample(0)), hw.FrameError, "magic"),
        (seal("index", 1, {}), hw.FrameError, "magic"),
        (seal("parts", 2, {"later": True}), hw.UnsupportedError, "version"),
        (seal("parts", 1, {}), hw.FrameError, "metadata"),
        (seal("parts", 1, {"generation": "a", "head": 99, "parts": []}), hw.FrameError, "metadata"),
        (seal("parts", 1, {"generation": "a", "head": True, "parts": []}), hw.FrameError, "metadata"),
        (seal("parts", 1, {"generation": "a", "head": 0, "parts": [-1]}), hw.FrameError, "metadata"),
        (seal("parts", 1, {"generation": "a", "head": 0, "parts": [2**70]}), hw.FrameError, "metadata"),
        (seal("parts", 1, {"generation": "*", "head": 0, "parts": [1]}), hw.FrameError, "metadata"),
        (seal("parts", 1, {"generation": "a", "head": 0, "parts": [0]}), hw.FrameError, "metadata"),
        (seal("parts", 1, {"generation": "a", "head": 0, "parts": [2**62] * 3}), hw.HurrayWireError, ""),
        (seal("parts", 1, {"generation": "a", "head": 0, "parts": []}), hw.TruncatedError, "truncated"),
    ],
    ids=str,
)
def test_a_value_that_is_none_of_ours(
    client: Any, store: RedisStore, value: bytes, error: type[hw.HurrayWireError], code: str
) -> None:
    client.set("k", value)
    for call in (store.get, store.open):
        with pytest.raises(error) as caught:
            call("k")
        assert not code or caught.value.code == code
    assert store.delete("k")


def resealed(client: Any, change: Callable[[bytes], bytes]) -> None:
    """Give the key a value whose head is another, sound in itself."""
    old = Record.unsealed(client.get("k"))
    client.set("k", Record(old.generation, old.lengths, change(old.head), old.tail).sealed())


def test_a_frame_of_a_newer_version(client: Any, store: RedisStore) -> None:
    store.put("k", OLD)
    resealed(client, lambda head: head[:8] + b"\x02" + head[9:])
    for call in (store.get, store.open):
        with pytest.raises(hw.UnsupportedError) as caught:
            call("k")
        assert caught.value.code == "version"


def test_a_record_and_a_frame_of_different_lengths(client: Any, store: RedisStore) -> None:
    store.put("k", OLD)
    old = Record.unsealed(client.get("k"))
    for tail, error in ((old.tail + bytes(64), hw.FrameError), (old.tail[:-64], hw.TruncatedError)):
        client.set("k", Record(old.generation, old.lengths, old.head, tail).sealed())
        for call in (store.get, store.open):
            with pytest.raises(error):
                call("k")


# Writing that fails on the way.


class Breaking:
    """A client whose nth command of writing fails."""

    def __init__(self, client: Any, command: str, after: int, error: Exception) -> None:
        self._client, self.command, self.after, self.error = client, command, after, error

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)
        if name != self.command:
            return call

        def breaking(*arguments: Any, **options: Any) -> Any:
            self.after -= 1
            if self.after < 0:
                raise self.error
            return call(*arguments, **options)

        return breaking


@pytest.mark.parametrize("after", range(5))
@pytest.mark.parametrize("there", [True, False], ids=["over", "new"])
def test_a_writing_that_breaks(client: Any, store: RedisStore, there: bool, after: int) -> None:
    import redis

    if there:
        store.put("k", OLD)
    before = sorted(client.keys())
    refused = redis.exceptions.ConnectionError("gone")
    for error in (refused, OSError(28, "No space left on device"), TimeoutError("slow")):
        with pytest.raises(hw.StoreError, match="not written") as caught:
            RedisStore(Breaking(client, "set", after, error), part_bytes=PART).put("k", NEW)
        assert caught.value.__cause__ is error
        assert isinstance(caught.value, OSError)
        assert caught.value.errno == (28 if isinstance(error, OSError) and error.args[0] == 28 else None)
        assert sorted(client.keys()) == before, "no part is left"
    if there:
        assert store.get("k") == OLD
    for error in (KeyboardInterrupt(), ZeroDivisionError()):
        with pytest.raises(type(error)):
            RedisStore(Breaking(client, "set", after, error), part_bytes=PART).put("k", NEW)  # type: ignore[arg-type]
        assert sorted(client.keys()) == before


def test_a_client_without_transactions(client: Any, store: RedisStore) -> None:
    class Without(Breaking):
        def pipeline(self, **options: Any) -> Any:
            if options:
                raise NotImplementedError("transaction is deprecated in cluster mode")
            return client.pipeline(transaction=False)

    store.put("k", OLD)
    RedisStore(Without(client, "", 0, OSError()), part_bytes=PART).put("k", NEW)
    assert store.get("k") == NEW
    assert len(client.keys()) == 6


def test_a_commit_that_breaks(client: Any, store: RedisStore) -> None:
    import redis

    store.put("k", OLD)
    before = sorted(client.keys())
    with pytest.raises(hw.StoreError):
        RedisStore(Breaking(client, "pipeline", 0, redis.RedisError("no")), part_bytes=PART).put("k", NEW)
    assert sorted(client.keys()) == before
    assert store.get("k") == OLD


def test_parts_that_the_server_drops_while_others_come(client: Any, store: RedisStore) -> None:
    store.put("k", OLD)

    class Dropping(Breaking):
        def exists(self, *names: bytes) -> int:
            client.delete(names[1])
            return int(client.exists(*names))

    with pytest.raises(hw.StoreError, match="dropped"):
        RedisStore(Dropping(client, "", 0, OSError()), part_bytes=PART).put("k", NEW)
    assert store.get("k") == OLD
    assert len(client.keys()) == 6


def test_a_writer_that_dies_leaves_nothing_for_long(client: Any) -> None:
    """Until they are named, parts have a time to live."""

    class Dies(BaseException):
        pass

    class Dead(Breaking):
        def unlink(self, *names: bytes) -> None:
            raise OSError("nobody is there to clean up")

    with pytest.raises(Dies):
        RedisStore(Dead(client, "set", 3, Dies()), part_bytes=PART, upload_ttl=50).put("k", NEW)  # type: ignore[arg-type]
    left = client.keys()
    assert len(left) == 3
    assert all(0 < client.pttl(part) <= 50_000 for part in left)


def test_a_full_server() -> None:
    with redis_server("--maxmemory", "6mb", "--maxmemory-policy", "noeviction") as port:
        import redis

        with redis.Redis(port=port) as client:
            store = RedisStore(client, part_bytes=1 << 20)
            store.put("k", OLD)
            big = large(0, pages=1500)
            with pytest.raises(hw.StoreError) as caught:
                store.put("k", big)
            assert isinstance(caught.value.__cause__, redis.exceptions.OutOfMemoryError)
            assert store.get("k") == OLD
            assert len(client.keys()) == 2


def test_a_part_beyond_the_servers_limit() -> None:
    """Redis takes 512 MB a value, or what it was told to; the same frame in smaller parts is taken."""
    with redis_server("--proto-max-bulk-len", "1mb") as port:
        import redis

        with redis.Redis(port=port) as client:
            tensor = large(0, pages=400)
            assert tensor.nbytes > 3 << 20
            with pytest.raises(redis.exceptions.RedisError):
                client.set("whole", hw.encode(tensor))
            with pytest.raises(hw.StoreError):
                RedisStore(client, part_bytes=2 << 20).put("k", tensor)
            assert client.keys() == []
            RedisStore(client, part_bytes=1 << 20).put("k", tensor, chunk_bytes=1 << 18)
            assert RedisStore(client).get("k") == tensor


def test_a_tensor_that_cannot_be_encoded_sends_nothing(client: Any, store: RedisStore) -> None:
    store.put("k", OLD)
    with pytest.raises(hw.FrameError):
        store.put("k", NEW.replace(metadata={"reserved": 1}))
    assert store.get("k") == OLD


# Written anew while it is read.


class Meanwhile:
    """A client that does something else right after it has given a key's value."""

    def __init__(self, client: Any, then: Callable[[], Any]) -> None:
        self._client, self._then = client, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def get(self, key: bytes) -> Any:
        found = self._client.get(key)
        self._then()
        return found


def test_a_key_that_is_written_anew_is_read_again(client: Any, store: RedisStore) -> None:
    store.put("k", OLD)
    writes = iter([NEW])

    def once() -> None:
        for tensor in writes:
            store.put("k", tensor)

    assert RedisStore(Meanwhile(client, once)).get("k") == NEW
    store.put("k", OLD)
    frame = store.open("k")
    store.put("k", NEW)
    with pytest.raises(hw.TruncatedError):
        frame.gather(0)
    assert np.array_equal(store.open("k").gather(0), NEW.gather(0))


def test_a_key_that_is_always_written_anew_ends_in_an_error(client: Any, store: RedisStore) -> None:
    store.put("k", OLD)
    with pytest.raises(hw.TruncatedError):
        RedisStore(Meanwhile(client, lambda: store.put("k", NEW))).get("k")
    with pytest.raises(KeyError):
        RedisStore(Meanwhile(client, lambda: store.delete("k"))).get("k")


def test_readers_beside_a_writer_see_one_frame_or_another(port: int, store: RedisStore) -> None:
    """Every tensor that is read is one that was written, whole; a reader that always comes too late is told."""
    import redis

    written = [large(n, pages=5) for n in range(4)]
    store.put("k", written[0])
    done, some = threading.Event(), threading.Event()
    found: list[int] = []
    wrong: list[Any] = []

    def read() -> None:
        with redis.Redis(port=port) as mine:
            while not done.is_set():
                try:
                    tensor = RedisStore(mine).get("k")
                except hw.TruncatedError:
                    continue
                except Exception as error:
                    wrong.append(error)
                    some.set()
                    return
                found.extend([n for n, other in enumerate(written) if tensor == other] or [-1])
                some.set()

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for turn in range(150):
        store.put("k", written[turn % 4])
    assert some.wait(60)
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert -1 not in found


# Replies read from the socket.


class Scripted:
    """A client with one connection, to a server that says what the test says, in pieces of so many bytes."""

    def __init__(self, said: bytes, step: int, *, close: bool = False) -> None:
        self.near, self.far = socket.socketpair()
        self.near.settimeout(20)
        self.said, self.step, self.closes = said, step, close
        self.connection_pool = self
        self._sock: Any = self.near
        self.disconnected = self.released = 0
        self.thread = threading.Thread(target=self._say)

    def _say(self) -> None:
        for at in range(0, len(self.said), self.step):
            self.far.sendall(self.said[at : at + self.step])
        if self.closes:
            self.far.close()

    def get_connection(self, *words: Any) -> Any:
        return self

    def pack_commands(self, commands: Any) -> Any:
        return commands

    def send_packed_command(self, commands: Any) -> None:
        self.thread.start()

    def disconnect(self) -> None:
        self.disconnected += 1

    def release(self, connection: Any) -> None:
        self.released += 1

    def execute_command(self, *words: Any) -> bytes:
        return b"from the client"

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.join()
        self.near.close()
        self.far.close()


def requests(*sizes: int) -> list[Request]:
    return [Request(("GET", b"k"), np.zeros(size, np.uint8), i) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100_000])
def test_replies_in_pieces(step: int) -> None:
    values = [b"", b"a\r\nb", bytes(range(256)) * 20, b"\r\n" * 9]
    said = b"".join(b"$%d\r\n%s\r\n" % (len(value), value) for value in values)
    wanted = requests(*map(len, values), 9, 9)
    with Scripted(said + b"$-1\r\n$3\r\nabc\r\n", step) as client:
        assert receive(client, wanted) == [*map(len, values), 0, 3]
        assert [request.memory.tobytes() for request in wanted[:4]] == values
        assert wanted[5].memory.tobytes() == b"abc" + bytes(6)
        assert (client.disconnected, client.released) == (0, 1)


@pytest.mark.parametrize(
    "said",
    [
        b"-ERR no\r\n",
        b"+OK\r\n",
        b":7\r\n",
        b"$x\r\n",
        b"$-7\r\n",
        b"$999\r\n" + bytes(999) + b"\r\n",
        b"$3\r\nabcde\r\n",
        b"$3\r\nabc\r\n$3\r\nabc\r\n",
        b"*1\r\n$3\r\nabc\r\n",
        b">2\r\n",
        b"\x00" * 9000,
    ],
    ids=lambda said: repr(said[:12]),
)
def test_a_reply_that_is_no_value_is_the_clients_to_read(said: bytes) -> None:
    """The connection is dropped: what is still on its way must not be taken for another's reply."""
    with Scripted(said, 4096) as client:
        wanted = requests(20)
        assert receive(client, wanted) == [15]
        assert wanted[0].memory.tobytes() == b"from the client" + bytes(5)
        assert (client.disconnected, client.released) == (1, 1)


def test_a_connection_that_ends_or_hangs() -> None:
    for said in (b"", b"$", b"$5\r\nab", b"$5\r\nabcde"):
        with Scripted(said, 100, close=True) as client:
            assert receive(client, requests(20)) == [15]
            assert (client.disconnected, client.released) == (1, 1)
    with Scripted(b"$5\r\nab", 100) as client:
        client.near.settimeout(0.05)
        with pytest.raises(TimeoutError):
            receive(client, requests(5))
        assert (client.disconnected, client.released) == (1, 1)


def test_clients_without_a_socket_of_their_own(client: Any) -> None:
    client.set("k", b"value")
    with Scripted(b"", 1) as scripted:
        scripted._sock = None
        assert receive(scripted, requests(20)) == [15]
        scripted.thread.start()

    class Old:
        """A pool of before 2025 wants a command's name."""

        def get_connection(self, command: str) -> Any:
            assert command == "GET"
            try:
                return client.connection_pool.get_connection()
            except TypeError:  # the client is such a one
                return client.connection_pool.get_connection(command)

        def release(self, connection: Any) -> None:
            client.connection_pool.release(connection)

    class Older:
        connection_pool = Old()

    wanted = requests(5)
    assert receive(Older(), wanted) == [5]
    assert wanted[0].memory.tobytes() == b"value"


def test_connections_that_the_server_closed(client: Any, store: RedisStore) -> None:
    import redis

    store.put("k", OLD)
    for _ in range(3):
        client.client_kill_filter(_type="normal", skipme=False)
        try:
            assert store.get("k") == OLD
        except redis.exceptions.ConnectionError:
            assert store.get("k") == OLD
    client.delete(*parts_of(client)[:1])
    client.lpush(parts_of(client)[0], "a list")
    with pytest.raises(redis.exceptions.ResponseError, match="WRONGTYPE"):
        store.get("k")
    assert client.ping()


def test_the_replies_are_read_where_they_can_be(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> int:
        raise AssertionError("the client was asked")

    monkeypatch.setattr(redis_wire, "_through_client", never)
    store.put("k", OLD)
    assert store.get("k") == OLD
    assert np.array_equal(store.open("k").gather(0), OLD.gather(0))
    store.put("k", sample(0))
    assert store.get("k") == as_sent(sample(0))
