"""What the two ends of a segment's connection say to each other beside frames: small sealed records, length first.

sender                                   receiver
segment {"keys": [...]}                  (refused {"why": "..."} and the end, at any time)
frames, to the closing one, the end
                                         kept {"bytes": 1234}
ask {"keys": [...]}                      held {"held": [1, 0, ...]}
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from hurray_wire.errors import Code, LimitError, StoreError, TruncatedError
from hurray_wire.integrations.sealed import Fields, seal, unseal

__all__ = ["Address", "address_of", "ask", "connected", "receive_record", "send_record"]

Address = tuple[str, int]
_VERSION = 1
_LENGTH_BYTES = 4
_MOST_BYTES = 1 << 20
_KINDS = ("segment", "ask", "kept", "held", "refused")


def address_of(text: str, rank: int = 0) -> Address:
    """`host:port` of a rank: each has the port behind the one before; port 0 is any.

    Raises:
        ValueError: it is not that.

    Example:
        >>> address_of("127.0.0.1:7000", 2), address_of("[::1]:7000")
        (('127.0.0.1', 7002), ('::1', 7000))
    """
    host, _, port = str(text).rpartition(":")
    if not host or not port.isdecimal() or int(port) + rank > 65535:
        raise ValueError(f"must be host:port, not {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port) + (rank if int(port) else 0)


def connected(address: Address, timeout: float) -> socket.socket:
    """A connection whose small records leave at once; OSError where nobody listens."""
    made = socket.create_connection(address, timeout)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def send_record(sock: socket.socket, kind: str, **fields: Any) -> None:
    """Send a record."""
    data = seal(kind, _VERSION, fields)
    sock.sendall(len(data).to_bytes(_LENGTH_BYTES, "little") + data)


def receive_record(sock: socket.socket, kinds: Sequence[str], where: str) -> tuple[str, Fields]:
    """The next record, one of these kinds.

    Raises:
        TruncatedError: the other end went away. LimitError: `metadata_bytes`.
        FrameError, ChecksumError, UnsupportedError: no such record, damage, a newer version, as `unseal`.
        StoreError: the other end refused, and says why.
    """
    length = int.from_bytes(_exactly(sock, _LENGTH_BYTES, where), "little")
    if length > _MOST_BYTES:
        message = f"a record of {length} bytes"
        raise LimitError(message, claimed=length, limit=_MOST_BYTES, code=Code.METADATA_BYTES, where=where)
    data = _exactly(sock, length, where)
    said = data[:64].split(b" ")[1:2]
    kind = next((name for name in _KINDS if said == [name.encode()]), kinds[0])
    fields, _ = unseal(kind, _VERSION, data, where)
    if kind == "refused":
        raise StoreError(f"the other end refused: {fields.string('why')}", where=where)
    if kind not in kinds:
        raise fields.error("kind", f"is {kind}, must be {' or '.join(kinds)}")
    return kind, fields


def _exactly(sock: socket.socket, count: int, where: str) -> bytes:
    data = bytearray()
    while len(data) < count:
        got = sock.recv(count - len(data))
        if not got:
            raise TruncatedError(needed=count, available=len(data), where=where, offset=len(data))
        data += got
    return bytes(data)


def ask(address: Address, keys: Sequence[str], timeout: float) -> list[bool]:
    """Which chunks the listener at an address has, or is receiving; none where nobody answers.

    Raises:
        HurrayWireError: as `receive_record`: what answers there is something else, or newer.
    """
    try:
        with connected(address, timeout) as sock:
            send_record(sock, "ask", keys=list(keys))
            _, fields = receive_record(sock, ["held"], "held")
    except OSError:
        return [False] * len(keys)
    held = [bool(n) for n in fields.counts("held")]
    if len(held) != len(keys):
        raise fields.error("held", f"has {len(held)} answers to {len(keys)} keys")
    return held
