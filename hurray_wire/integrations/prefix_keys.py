"""Names of what a cache holds: one for each whole chunk of a prompt, which says all tokens up to its end and whose.

A chunk's name hashes the one before it, so that equal names are equal prefixes, whoever computed them, with whatever
page size. No names are made for tokens behind the last whole chunk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["PrefixKeys", "root_of"]

_DIGEST_BYTES = 16


def root_of(identity: Mapping[str, Any]) -> bytes:
    """What the first chunk's name begins with: everything that keys and values depend on besides the tokens.

    Example:
        >>> root_of({"model": "tiny", "lora": None}) == root_of({"lora": None, "model": "tiny"})
        True
    """
    text = json.dumps(dict(identity), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


class PrefixKeys:
    """The chunk names of one sequence, which grows; each chunk is hashed once.

    Example:
        >>> keys, longer = PrefixKeys(b"model", 4), PrefixKeys(b"model", 4)
        >>> first = keys.of(range(9))
        >>> len(first), longer.of(range(12))[:2] == first
        (2, True)
    """

    def __init__(self, root: bytes, chunk_tokens: int) -> None:
        self._last = root
        self._chunk_tokens = chunk_tokens
        self._keys: list[str] = []

    def of(self, tokens: Sequence[int]) -> list[str]:
        """The names of all whole chunks of a sequence, of which those asked for before are the beginning."""
        size = self._chunk_tokens
        while (end := (len(self._keys) + 1) * size) <= len(tokens):
            chunk = np.array(tokens[end - size : end], np.dtype("<i8"))
            self._last = hashlib.blake2b(self._last + chunk.tobytes(), digest_size=_DIGEST_BYTES).digest()
            self._keys.append(self._last.hex())
        return self._keys[: len(tokens) // size]
