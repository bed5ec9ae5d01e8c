"""Sinks and sources that say they moved other than they did: an OSError, not silence, a gap or an endless loop."""

from __future__ import annotations

import io
from typing import Any

import pytest
from stream_helpers import TENSOR, large, sample
from test_stream_faults import write_one

import hurray_wire as hw

FORMS: dict[str, dict[str, Any]] = {"raw": {}, "zstd": {"compression": "zstd"}}


@pytest.mark.parametrize("value", [0, -1, 10**9])
@pytest.mark.parametrize("form", ["raw", "zstd"])
def test_a_callable_that_lies_is_an_os_error(value: int, form: str) -> None:
    with pytest.raises(OSError, match="sink"):
        write_one(hw.StreamWriter(lambda vector: value, **FORMS[form]), leave=False)


class Nothing(io.RawIOBase):
    """A file whose write takes nothing, for ever; it gives up before the test does."""

    calls = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.calls += 1
        if self.calls > 5000:
            raise AssertionError("asked for ever")
        return 0


def test_a_file_that_takes_nothing_is_an_os_error_and_not_an_endless_loop() -> None:
    """As a callable that says so: a sink takes at least one byte of a vector."""
    with pytest.raises(OSError, match=r".+"):
        hw.StreamWriter(Nothing()).write(sample(0))


class Boasting(Nothing):
    """A file that says it took more than it was given."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes + 10


def test_a_file_that_takes_more_than_it_was_given_is_an_os_error() -> None:
    """Else bytes of the next piece would be passed over."""
    with pytest.raises(OSError, match=r".+"):
        hw.StreamWriter(Boasting()).write(large(0))


class Lying(io.RawIOBase):
    """A file that says it gave another number of bytes than it could have; it gives up before the test does."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.calls = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.calls += 1
        assert self.calls < 5000, "asked for ever"
        return self.count


@pytest.mark.parametrize("count", [-1, 10**6])
@pytest.mark.parametrize("kind", ["callable", "file"])
def test_a_source_that_lies_is_an_os_error(kind: str, count: int) -> None:
    """Else memory that nobody wrote would pass for what was received, or the reader would ask for ever."""
    file = Lying(count)
    with pytest.raises(OSError, match=r".+"):
        next(hw.StreamReader(file if kind == "file" else file.readinto))


@pytest.mark.parametrize("cut", [0, 10, 300, 500])
def test_a_source_that_runs_out_of_an_iterator_is_no_end(cut: int) -> None:
    """A caller's `next(chunks)` may raise StopIteration: that is not the end of the stream, and not silence."""
    chunks = iter([hw.encode(sample(0))[i : i + 1] for i in range(cut)])

    def source(memory: memoryview) -> int:
        memory[:1] = next(chunks)
        return 1

    reader = hw.StreamReader(source, require_last=False)
    with pytest.raises((RuntimeError, StopIteration)):
        read_one(reader)


def read_one(reader: hw.StreamReader) -> TENSOR:
    header = reader.next_header()
    assert header is not None, "it looked like the end"
    return header.read()
