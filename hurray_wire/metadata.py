"""The JSON object that may travel with a frame (section 4): for people and engines, never for reading buffers.

Names with a meaning have a checked type; a name with a '.' is the user's; other names are kept for later versions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hurray_wire.errors import Code, FrameError, shown

__all__ = ["Metadata", "check_metadata", "decode_metadata", "encode_metadata"]

Metadata = Mapping[str, Any]

_MAX_DEPTH = 64
"""Nesting that is followed: Python's own parser recurses, and hostile bytes must not reach its limit."""


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _strings(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _heads(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 3 or not all(map(_count, value)):
        return False
    start, stop, total = value
    return bool(start < stop <= total)


def check_metadata(metadata: Metadata, num_seqs: int, head_dim: int) -> list[tuple[str, str]]:
    """The names whose value is not of their type, with what it must be (section 4)."""
    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        **{name: (lambda v: isinstance(v, str), "a string") for name in ("model", "revision", "tokenizer", "rope")},
        "seq_ids": (lambda v: _strings(v) and len(v) == num_seqs, f"a list of {num_seqs} strings, one a sequence"),
        "first_tokens": (
            lambda v: isinstance(v, list | tuple) and len(v) == num_seqs and all(map(_count, v)),
            f"a list of {num_seqs} integers of at least 0, one a sequence",
        ),
        "heads": (_heads, "[start, stop, total] with 0 <= start < stop <= total"),
        "key_dim": (lambda v: _count(v) and v <= head_dim, f"an integer from 0 to head_dim {head_dim}"),
        "content": (lambda v: v in ("kv", "latent", "opaque"), '"kv", "latent" or "opaque"'),
    }
    return [
        (name, f"is {shown(value)}, must be {rules[name][1]}")
        for name, value in metadata.items()
        if name in rules and not rules[name][0](value)
    ]


KNOWN_NAMES = frozenset(
    ("model", "revision", "tokenizer", "rope", "seq_ids", "first_tokens", "heads", "key_dim", "content")
)


def validate_metadata(metadata: Metadata, num_seqs: int, head_dim: int, *, offset: int | None = None) -> None:
    """Raise the first breach of `check_metadata` as FrameError `metadata`."""
    for name, message in check_metadata(metadata, num_seqs, head_dim):
        raise FrameError(message, code=Code.METADATA, where=f"metadata.{name}", offset=offset)


def encode_metadata(metadata: Metadata | None) -> bytes:
    """Compact UTF-8 JSON, keys sorted by code point, nothing escaped that need not be; b"" for none.

    Raises:
        FrameError: `metadata`, for a reserved name, a value that JSON does not have (NaN too), a key that is no string.

    Example:
        >>> encode_metadata({"model": "tiny", "my.note": "ü"}).decode()
        '{"model":"tiny","my.note":"ü"}'
    """
    if not metadata:
        return b""
    for name in metadata:
        if not isinstance(name, str):
            raise FrameError(f"name {name!r} is no string", code=Code.METADATA, where="metadata")
        if name not in KNOWN_NAMES and "." not in name:
            message = "name is reserved: put a '.' into names of your own"
            raise FrameError(message, code=Code.METADATA, where=f"metadata.{name}")
    try:
        _check_depth(metadata)
        text = json.dumps(dict(metadata), ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"is not JSON: {error}", code=Code.METADATA, where="metadata") from error


def plain(value: Any) -> Any:
    """A copy of a JSON value that shares nothing with it; tuples are the lists that they become."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH + 1):
        nested = [v.values() if isinstance(v, Mapping) else v for v in level if isinstance(v, Mapping | list | tuple)]
        level = [item for items in nested for item in items]
        for item in level:
            if isinstance(item, Mapping) and not all(isinstance(key, str) for key in item):
                raise TypeError("a key is no string")
        if not level:
            return
    raise ValueError(f"nested more than {_MAX_DEPTH} deep")


def read_metadata(data: bytes, num_seqs: int, head_dim: int, offset: int | None = None) -> dict[str, Any] | None:
    """The object in a metadata section, held to the tensor that it came with; None for an empty one.

    Raises:
        FrameError: `metadata`.
    """
    metadata = decode_metadata(data, offset)
    validate_metadata(metadata, num_seqs, head_dim, offset=offset)
    return metadata or None


def decode_metadata(data: bytes, offset: int | None = None) -> dict[str, Any]:
    """The object in a metadata section: RFC 8259, UTF-8 without BOM, unique keys, no NaN.

    Raises:
        FrameError: `metadata`.

    Example:
        >>> decode_metadata(b'{"model":"tiny"}')
        {'model': 'tiny'}
    """
    try:
        text = data.decode("utf-8")
        if text.startswith("\ufeff"):
            raise ValueError("begins with a byte order mark")
        _check_brackets(text)
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
        if "\\u" in text:  # an escaped half of a surrogate pair is no text, and could not be written again
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FrameError(f"is not JSON: {error}", code=Code.METADATA, where="metadata", offset=offset) from None
    if not isinstance(value, dict):
        message = f"is a {type(value).__name__}, must be an object"
        raise FrameError(message, code=Code.METADATA, where="metadata", offset=offset)
    return value


_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
"""A JSON string, to the end where it is not closed: so none is looked at twice, whatever stands in it."""


def _check_brackets(text: str) -> None:
    """Refuse deep nesting before the parser recurses into it; by arrays, for a megabyte may be brackets."""
    if text.count("[") + text.count("{") <= _MAX_DEPTH:
        return
    code = np.frombuffer(_STRING.sub("", text).encode(), np.uint8)
    steps = np.isin(code, _OPENING).astype(np.int32) - np.isin(code, _CLOSING)
    if steps.cumsum(dtype=np.int32).max(initial=0) > _MAX_DEPTH:
        raise ValueError(f"nested more than {_MAX_DEPTH} deep")


_OPENING, _CLOSING = (np.frombuffer(brackets, np.uint8) for brackets in (b"[{", b"]}"))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"key {shown(twice)} stands twice")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is out of range")
    return value
