"""A small record beside frames in a store: a line that says what follows, its fields as JSON, bytes that go with them.

    hurray_wire parts 1 86 5206 0123456789abcdef        kind, version, bytes of JSON, bytes behind this line, XXH3-64
    {"generation":"00c1...","head":4096,"parts":[67108864,1048576]}...

The checksum is of all else, the line's other words included. What the stores here keep beside frames to find them
again is no part of the HRKV format: a frame says all that it takes to read it, and knows not where it is kept.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import xxhash

from hurray_wire.errors import ChecksumError, Code, FrameError, TruncatedError, UnsupportedError
from hurray_wire.metadata import decode_metadata

_MARK = b"hurray_wire"
_LINE_BYTES = 128
"""More than any first line takes."""


class Fields(NamedTuple):
    """A record's fields, held to their types as they are asked for."""

    values: dict[str, Any]
    where: str

    def count(self, name: str) -> int:
        """An integer from 0 on that fits 63 bits."""
        return self._counts(name, [self.values.get(name)])[0]

    def counts(self, name: str) -> list[int]:
        """A list of such."""
        return self._counts(name, self._list(name))

    def strings(self, name: str, allowed: tuple[Any, ...] = ()) -> list[Any]:
        """A list of strings, or of those and what else is allowed."""
        found = self._list(name)
        if not all(isinstance(value, str) or value in allowed for value in found):
            raise self.error(name, "must be strings")
        return found

    def string(self, name: str) -> str:
        """A string."""
        found = self.values.get(name)
        if not isinstance(found, str):
            raise self.error(name, f"is {found!r}, must be a string")
        return found

    def _list(self, name: str) -> list[Any]:
        found = self.values.get(name)
        if not isinstance(found, list):
            raise self.error(name, "must be a list")
        return found

    def _counts(self, name: str, found: list[Any]) -> list[int]:
        if not all(type(value) is int and 0 <= value < 1 << 63 for value in found):
            raise self.error(name, "must be integers from 0 on")
        return found

    def error(self, name: str, message: str) -> FrameError:
        """A field that is not what it must be."""
        return FrameError(message, code=Code.METADATA, where=f"{self.where}.{name}")


def seal(kind: str, version: int, fields: dict[str, Any], rest: bytes = b"") -> bytes:
    """A record of these fields, and bytes that go with it."""
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    front = b"%s %s %d %d %d" % (_MARK, kind.encode(), version, len(text), len(text) + len(rest))
    return b"".join((front, b" %016x\n" % _digest(front, text, rest), text, rest))


def _digest(*pieces: Any) -> int:
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def unseal(kind: str, version: int, data: bytes, where: str) -> tuple[Fields, memoryview]:
    """The fields of a record, and what goes with it, checked.

    Args:
        where: what the record is called in errors.

    Raises:
        FrameError: `magic`, no such record; `trailing_bytes`; `metadata`, no JSON object.
        UnsupportedError: `version`, of a writer that came later.
        TruncatedError: less than the first line promises.
        ChecksumError: `header_checksum`.
    """
    mark = b"%s %s " % (_MARK, kind.encode())
    if not data.startswith(mark[: len(data)]):
        message = f"no {kind} of hurray_wire, begins with {data[:16]!r}"
        raise FrameError(message, code=Code.MAGIC, where=where, offset=0)
    line, end, _ = data[:_LINE_BYTES].partition(b"\n")
    words = line[len(mark) :].split(b" ")
    if end and words[0].isdigit() and int(words[0]) != version:
        message = f"version {int(words[0])} found, this reader knows {version}"
        raise UnsupportedError(message, code=Code.VERSION, where=where, offset=len(mark))
    if not end and len(data) < _LINE_BYTES:
        raise TruncatedError(needed=_LINE_BYTES, available=len(data), where=where, offset=len(data))
    if not end or len(words) != 4 or not all(word.isdigit() for word in words[:3]):
        message = f"is no {kind}'s first line: {line[:64]!r}"
        raise ChecksumError(message, code=Code.HEADER_CHECKSUM, where=where, offset=0)
    text_bytes, body_bytes = int(words[1]), int(words[2])
    start = len(line) + 1
    if len(data) < start + body_bytes:
        raise TruncatedError(needed=start + body_bytes, available=len(data), where=where, offset=len(data))
    body = memoryview(data)[start : start + body_bytes]
    if words[3] != b"%016x" % _digest(line.rpartition(b" ")[0], body) or text_bytes > body_bytes:
        message = f"the {kind}'s checksum is not that of its bytes"
        raise ChecksumError(message, code=Code.HEADER_CHECKSUM, where=where, offset=0)
    if len(data) > start + body_bytes:
        message = f"{len(data) - start - body_bytes} bytes follow"
        raise FrameError(message, code=Code.TRAILING_BYTES, where=where, offset=start + body_bytes)
    return Fields(decode_metadata(bytes(body[:text_bytes]), start), where), body[text_bytes:]
