"""Frames in Redis or Valkey, by key: sections spread over values that fit, one small value last that names them.

The value at the key (a `sealed` record) holds what stands before and behind the page pool, and names the parts that
hold the pool: values under names that no other writing has. So whoever reads the key has the whole of one frame or is
told, never half of one and half of another. The pool goes out of its own memory, and comes straight into aligned
memory.

Any synchronous client with redis-py's interface serves; this module imports none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from hurray_wire.arrays import Bytes, as_bytes
from hurray_wire.codec import encode_parts
from hurray_wire.errors import Code, FrameError, HurrayWireError, StoreError, TruncatedError
from hurray_wire.frame_reader import read_frame_head
from hurray_wire.integrations.redis_parts import PartsSource, Record, cuts, sliced
from hurray_wire.options import DEFAULT_LIMITS, Limits, Sending
from hurray_wire.receiving import decode_into
from hurray_wire.stream import Frame, open_frame
from hurray_wire.tensor import BlockPagedTensor

__all__ = ["RedisStore"]

MOST_PART_BYTES = 512 << 20
"""What a value of Redis may have (proto-max-bulk-len)."""
_TRIES = 4
"""How often a key that is written anew while it is read is read again."""
_MARGIN_MS = 60_000
"""By how much parts outlive the value that names them."""


class RedisStore:
    """Frames by key in a Redis or Valkey server.

    Args:
        client: a `redis.Redis`, `valkey.Valkey` or the like, made without `decode_responses`.
        part_bytes: of the pool in one value at the most; whole chunks, up to 512 MiB. The server copies a value before
            it sends it: 4 MiB come two to three times as fast as 64 (measured).
        upload_ttl: seconds after which the parts of a writing that was never finished are gone.

    The client's own errors of reading (a connection that breaks, a server that is busy) pass through.

    Example::

        store = RedisStore(redis.Redis())
        store.put("request-7/layer-0/key", tensor, ttl=3600)
        store.get("request-7/layer-0/key", expect={"page_size": 16})  # all of it
        store.open("request-7/layer-0/key").gather(3)  # one sequence of it
    """

    def __init__(self, client: Any, *, part_bytes: int = 4 << 20, upload_ttl: float = 600) -> None:
        if not 1 <= part_bytes <= MOST_PART_BYTES:
            raise ValueError(f"part_bytes must be from 1 to {MOST_PART_BYTES}, not {part_bytes}")
        pool = getattr(client, "connection_pool", None)
        if getattr(pool, "connection_kwargs", {}).get("decode_responses"):
            raise ValueError("the client decodes replies as text: make it without decode_responses")
        self._client = client
        self._part_bytes = part_bytes
        self._upload_ms = _milliseconds("upload_ttl", upload_ttl)

    def put(self, key: str | bytes, tensor: BlockPagedTensor, *, ttl: float | None = None, **options: Any) -> None:
        """Keep a tensor under a key, in the place of what was there; seen whole or not at all.

        Args:
            ttl: seconds until it is gone; None for never.
            **options: of `encode`: pages, scrub, compression, checksum, alignment, chunk_bytes, threads. Smaller
                chunks let `open` read less for one sequence.

        Raises:
            StoreError: the server took less than all of it; what was there before still is, and no part is left (those
                of a server that went away expire after `upload_ttl`).
            All else as `encode`, before anything is sent.
        """
        name = _key(key)
        ttl_ms = None if ttl is None else _milliseconds("ttl", ttl)
        unknown = options.keys() - Sending.__annotations__.keys()
        if unknown:
            raise TypeError(f"put() has no option {', '.join(sorted(unknown))}")
        record, values = self._cut(encode_parts(tensor, **options))
        names = record.names(name)
        try:
            for part, value in zip(names, values, strict=True):
                self._client.set(part, value, px=self._upload_ms)
            old = self._commit(name, names, record, ttl_ms)
        except BaseException as error:
            with suppress(Exception):  # a server that is away forgets them after `upload_ttl`
                self._remove(names)
            if not _of_client(error):
                raise
            message = f"key {name!r} was not written: {error}"
            raise StoreError(message, where="put", cause=error) from error
        with suppress(Exception):  # the key is written: what it no longer names costs memory, and no answer
            self._remove(Record.old_names(name, old))

    def _cut(self, pieces: Sequence[memoryview]) -> tuple[Record, Any]:
        """What the key names, and the parts' values one by one."""
        arrays = [as_bytes(piece) for piece in pieces]
        places = cuts(read_frame_head(arrays[0], 0, DEFAULT_LIMITS, whole=False), self._part_bytes)
        front, *parts, back = sliced(arrays, places)
        lengths = tuple(np.diff(places[1:-1]).tolist())
        record = Record(os.urandom(8).hex(), lengths, _joined(front), _joined(back))
        return record, map(_value, parts)

    def _commit(self, key: bytes, names: Sequence[bytes], record: Record, ttl_ms: int | None) -> bytes | None:
        """Make the parts last and name them, in one transaction; gives what stood there before."""
        if names and self._client.exists(*names) != len(names):
            raise StoreError(f"key {key!r} was not written: the server dropped some of its parts", where="put")
        with self._transaction() as pipe:
            for name in names:
                pipe.persist(name) if ttl_ms is None else pipe.pexpire(name, ttl_ms + _MARGIN_MS)
            pipe.set(key, record.sealed(), px=ttl_ms, get=True)
            old = pipe.execute()[-1]
        return None if old is None else bytes(old)

    def _transaction(self) -> Any:
        try:
            return self._client.pipeline(transaction=True)
        except Exception:  # a cluster's client of before 2025 has none: the parts last, then the key names them
            return self._client.pipeline()

    def _remove(self, names: Sequence[bytes]) -> None:
        if names:
            self._client.unlink(*names)

    def get(
        self, key: str | bytes, *, expect: Any = None, limits: Limits = DEFAULT_LIMITS, verify: bool = True
    ) -> BlockPagedTensor:
        """The tensor under a key: its pool straight from the server into aligned memory that nobody else has.

        A key that is written anew meanwhile is read again.

        Raises:
            KeyError: no such key.
            TruncatedError: a part is missing or short; `where` names it.
            All else as `decode`; for `expect` and `limits` no part has been asked for.
        """
        return self._read(key, lambda frame, source: frame.tensor(), expect, limits, verify)

    def get_into(
        self,
        key: str | bytes,
        pool: Any,
        page_ids: Any,
        *,
        expect: Any = None,
        limits: Limits = DEFAULT_LIMITS,
        verify: bool = True,
    ) -> BlockPagedTensor:
        """The tensor under a key with its wire page j in `pool[page_ids[j]]`: `decode_into` of what is read.

        Raises:
            As `get`, and as `decode_into`.
        """

        def into(frame: Frame, source: PartsSource) -> BlockPagedTensor:
            return decode_into(source.read_at(0, source.nbytes), pool, page_ids, limits=limits, verify=verify)

        return self._read(key, into, expect, limits, verify)

    def _read(
        self,
        key: str | bytes,
        use: Callable[[Frame, PartsSource], BlockPagedTensor],
        expect: Any,
        limits: Limits,
        verify: bool,
    ) -> BlockPagedTensor:
        for left in reversed(range(_TRIES)):
            frame, source = self._open(key, expect, limits, verify)
            try:
                return use(frame, source)
            except TruncatedError:
                if not left or self._record(key).generation == source.record.generation:
                    raise
        raise AssertionError("the last try returns or raises")

    def open(
        self, key: str | bytes, *, expect: Any = None, limits: Limits = DEFAULT_LIMITS, verify: bool = True
    ) -> Frame:
        """The frame under a key, its pool left on the server: one sequence, or some pages, by GETRANGE.

        One value is read: what says where the pages are. What a `Frame` then asks for comes in one round trip. It goes
        on naming the parts that it was opened with: where the key is written anew they are TruncatedError.

        Raises:
            KeyError: no such key. All else as `hurray_wire.open_frame`.
        """
        return self._open(key, expect, limits, verify)[0]

    def _open(self, key: str | bytes, expect: Any, limits: Limits, verify: bool) -> tuple[Frame, PartsSource]:
        name = _key(key)
        source = PartsSource(self._client, name, self._record(key))
        frame = open_frame(source, expect=expect, limits=limits, verify=verify)
        if frame.inspection.total_bytes != source.nbytes:
            message = f"{source.nbytes - frame.inspection.total_bytes} bytes follow the frame"
            offset = frame.inspection.total_bytes
            raise FrameError(message, code=Code.TRAILING_BYTES, where="trailing_bytes", offset=offset)
        return frame, source

    def _record(self, key: str | bytes) -> Record:
        data = self._client.get(_key(key))
        if data is None:
            raise KeyError(key)
        return Record.unsealed(bytes(data))

    def delete(self, key: str | bytes) -> bool:
        """Remove a key and its parts; whether it was there."""
        name = _key(key)
        old = self._client.getdel(name)
        self._remove(Record.old_names(name, old))
        return old is not None

    def __contains__(self, key: str | bytes) -> bool:
        return bool(self._client.exists(_key(key)))


def _key(key: str | bytes) -> bytes:
    if not isinstance(key, str | bytes):
        raise TypeError(f"a key is a string or bytes, not {key!r}")
    return key.encode() if isinstance(key, str) else key


def _milliseconds(name: str, seconds: float) -> int:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{name} is in seconds, not {seconds!r}")
    if not 0.001 <= seconds < 1e12:
        raise ValueError(f"{name} must be at least a millisecond, not {seconds}")
    return round(seconds * 1000)


def _joined(pieces: Sequence[Bytes]) -> bytes:
    return b"".join(map(memoryview, pieces))


def _value(pieces: Sequence[Bytes]) -> memoryview:
    """A part as one piece: the pool's own memory where it is one."""
    return memoryview(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))


def _of_client(error: BaseException) -> bool:
    """Whether an error is the store's: the system's, or of the client library, whichever that is."""
    names = {kind.__name__ for kind in type(error).__mro__}
    ours = isinstance(error, HurrayWireError)
    return not ours and (isinstance(error, OSError) or not names.isdisjoint(("RedisError", "ValkeyError")))
