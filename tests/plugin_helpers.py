"""What tests of plug-ins share: other people's modules without their warnings, newer frames, a full disk."""

from __future__ import annotations

import importlib
import logging
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import xxhash


def imported(name: str) -> Any:
    """A module; LMCache's logging warns of its own dependency at every import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def until(true: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    for _ in range(2000):
        if true():
            return
        time.sleep(0.005)
    raise AssertionError("it does not happen")


@contextmanager
def quiet() -> Iterator[None]:
    """LMCache logs what it refuses."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def newer(data: Any) -> bytes:
    """A frame, or what begins with one, as a writer of version 2 would have it: its header's checksum in order."""
    changed = bytearray(data)
    changed[8] = 2  # version_major
    end = int.from_bytes(changed[16:20], "little") - 8  # header_length, whose last 8 bytes are the checksum
    changed[end : end + 8] = xxhash.xxh3_64_intdigest(bytes(changed[:end])).to_bytes(8, "little")
    return bytes(changed)


@contextmanager
def no_larger_file_than(nbytes: int) -> Iterator[None]:
    """What a full disk does: a write ends in the middle, the next one fails."""
    resource = pytest.importorskip("resource", reason="no limits on file sizes here")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
