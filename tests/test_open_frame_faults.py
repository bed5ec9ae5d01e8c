"""`open_frame` where the source is cut, shrinks, fails or lies; what it gives as memory; what it closes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frames import PAGE_POOL, section_of
from stream_helpers import TENSOR, encoded, kinds, large, sample
from support import bare_vector, frame_vector
from test_open_frame import ReadAt, as_path
from test_stream_into import flipped

import hurray_wire as hw

FORMS: dict[str, dict[str, Any]] = {
    "raw": {},
    "zstd": {"compression": "zstd", "chunk_bytes": 16384},
    "bare": {"framing": "bare"},
}


def refusal(call: Callable[[], Any]) -> tuple[Any, ...] | None:
    """Class, code, where, offset, and what a TruncatedError counts; None where there is none."""
    try:
        call()
    except hw.HurrayWireError as error:
        counts = (error.needed, error.available) if isinstance(error, hw.TruncatedError) else ()
        return type(error).__name__, str(error.code), error.where, error.offset, *counts
    return None


@pytest.mark.parametrize("form", FORMS)
def test_every_cut_is_said_as_decode_says_it(form: str) -> None:
    """ "Raises: as `decode`, for all but the payload": class, code, offset, and how many bytes there are."""
    blob = hw.encode(sample(0), **FORMS[form])
    for cut in range(len(blob)):
        expected = refusal(lambda: hw.decode(blob[:cut]))  # noqa: B023 - called at once
        found = refusal(lambda: hw.open_frame(blob[:cut]))  # noqa: B023
        assert expected is not None
        assert found is not None
        # Which field names the end (`where`) may differ: header_length, where decode looks at frame_length first.
        assert (*found[:2], *found[3:]) == (*expected[:2], *expected[3:]), cut


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["path", "read_at"])
def test_a_cut_source_at_an_offset(kind: str, form: str, tmp_path: Path) -> None:
    blob = hw.encode(sample(0), **FORMS[form])
    for cut in (0, 3, 9, 30, 200, len(blob) - 1):
        data = bytes(100) + blob[:cut]
        source = as_path(data, tmp_path) if kind == "path" else ReadAt(data)
        with pytest.raises(hw.TruncatedError) as caught:
            hw.open_frame(source, 100)
        assert caught.value.available == cut
        assert caught.value.offset == 100 + cut
    with pytest.raises(hw.TruncatedError):
        hw.open_frame(source, 10**9)


@pytest.mark.parametrize("offset", [0, 100])
@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_shrinks(form: str, offset: int, tmp_path: Path) -> None:
    """It was whole when it was opened."""
    blob = hw.encode(large(0, pages=40), **FORMS[form])
    path = as_path(bytes(offset) + blob, tmp_path)
    with hw.open_frame(path, offset) as frame:
        left = 2000
        os.truncate(path, offset + left)
        for call in (lambda: frame.pages([39]), lambda: frame.tensor()):
            with pytest.raises(hw.TruncatedError) as caught:
                call()
            error = caught.value
            assert left <= error.available < error.needed == len(blob)  # what is there, or where it was looked for
            assert error.offset == offset + error.available
            assert form != "bare" or error.available <= 133 + 39 * 8192  # counted from the item's first byte


@pytest.mark.parametrize("after", range(9))
@pytest.mark.parametrize("form", FORMS)
def test_an_error_of_read_at_passes_through(form: str, after: int) -> None:
    blob = hw.encode(large(0, pages=12), **FORMS[form])
    calls = [0]

    def read_at(offset: int, length: int) -> bytes:
        calls[0] += 1
        if calls[0] > after:
            raise ConnectionResetError("gone")
        return blob[offset : offset + length]

    with pytest.raises(ConnectionResetError, match="gone"):
        read_all(read_at)


def read_all(source: Any) -> None:
    with hw.open_frame(source) as frame:
        for _ in range(9):
            frame.pages([1, 7])
            frame.tensor()


@pytest.mark.parametrize("form", FORMS)
def test_a_read_at_that_gives_less_is_at_its_end(form: str) -> None:
    """ "Gives less only at its end": less than that is the end."""
    blob = hw.encode(large(0, pages=12), **FORMS[form])
    for most in (0, 5, 30, 100, 1000, 5000):
        with pytest.raises(hw.HurrayWireError):
            read_all(lambda offset, length, n=most: blob[offset : offset + min(n, length)])


@pytest.mark.parametrize("form", ["raw", "bare"])
def test_expect_and_limits(form: str) -> None:
    blob = hw.encode(large(0, pages=12), **FORMS[form])
    source = ReadAt(blob)
    with pytest.raises(hw.MismatchError) as caught:
        hw.open_frame(source, expect={"dtype": "float32", "page_size": 16, "num_seqs": 2})
    assert [d.where for d in caught.value.differences] == ["dtype", "num_seqs"]
    assert len(source.touched()) < 3000
    for limit in ({"frame_bytes": 90_000}, {"decoded_bytes": 90_000}, {"descriptor_bytes": 100}):
        source.forget()
        with pytest.raises(hw.LimitError):
            hw.open_frame(source, limits=hw.Limits(**limit))
        assert len(source.touched()) < 3000
    hw.open_frame(blob, limits=hw.Limits.untrusted(100_000), expect={"dtype": "uint16"})


def test_what_is_no_frame() -> None:
    for data, error in (
        (b"", hw.TruncatedError),
        (bytes(64), hw.FrameError),
        (b"PK\x03\x04" + bytes(60), hw.UnsupportedError),
        (bare_vector("container"), hw.UnsupportedError),
        (flipped(hw.encode(sample(0)), 50), hw.ChecksumError),
    ):
        for source in (data, ReadAt(data)):
            with pytest.raises(error):
                hw.open_frame(source)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hw.open_frame(tmp_path / "nothing")
    with pytest.raises(IsADirectoryError):
        hw.open_frame(tmp_path)
    for source in (3.5, None, ["a"]):
        with pytest.raises(TypeError):
            hw.open_frame(source)


# Memory.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["path", "bytearray", "bytearray-odd", "read_at"])
def test_a_tensor_is_aligned_for_its_elements(kind: str, form: str, tmp_path: Path) -> None:
    """As decode: a view that is aligned, or memory of the library's own (case 40)."""
    for name, tensor in kinds().items():
        blob = hw.encode(tensor, **FORMS[form])
        sources: dict[str, Callable[[], Any]] = {
            "path": lambda b=blob: as_path(b, tmp_path),  # type: ignore[misc]
            "bytearray": lambda b=blob: bytearray(b),  # type: ignore[misc]
            "bytearray-odd": lambda b=blob: memoryview(bytearray(b"x" + b))[1:],  # type: ignore[misc]
            "read_at": lambda b=blob: ReadAt(b),  # type: ignore[misc]
        }
        with hw.open_frame(sources[kind]()) as frame:
            found = frame.tensor()
        assert found == hw.decode(blob), name
        for array in (found.page_pool, found.block_table, found.seq_ptr, found.scales):
            assert array is None or array.flags.aligned, name


@pytest.mark.parametrize("form", FORMS)
def test_a_view_of_the_callers_buffer_is_read_only(form: str) -> None:
    data = bytearray(hw.encode(large(0, pages=3), **FORMS[form]))
    pool = hw.open_frame(data).tensor().page_pool
    if np.shares_memory(pool, np.frombuffer(data, np.uint8)):
        assert not pool.flags.writeable
    else:
        assert pool.flags.writeable
        assert pool.ctypes.data % 64 == 0


@pytest.mark.parametrize("form", FORMS)
def test_what_was_read_from_a_file_is_writable_and_aligned(form: str, tmp_path: Path) -> None:
    """What the library allocates is writable and 64-byte aligned (design/api.md, Bytes)."""
    with hw.open_frame(as_path(hw.encode(large(0, pages=3), **FORMS[form]), tmp_path)) as frame:
        pools = [frame.tensor().page_pool for _ in range(8)]
    assert all(pool.flags.writeable for pool in pools)
    assert all(pool.ctypes.data % 64 == 0 for pool in pools)


def test_a_buffer_is_not_copied_where_it_can_be_viewed() -> None:
    blob = frame_vector("raw")
    frame = hw.open_frame(blob)
    assert np.shares_memory(frame.tensor().page_pool, np.frombuffer(blob, np.uint8))


def test_gathered_tokens_are_the_callers_to_change() -> None:
    blob = bytearray(hw.encode(sample(0)))
    before = bytes(blob)
    frame = hw.open_frame(blob, verify=False)
    tokens = frame.gather(0)
    tokens[...] = 0
    frame.pages([0, 1])[...] = 0
    assert blob == before


# What it opened.


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_context_closes_what_a_path_opened(tmp_path: Path) -> None:
    path = as_path(hw.encode(sample(0)), tmp_path)
    before = descriptors()
    with hw.open_frame(path) as frame:
        assert descriptors() == before + 1
        kept = frame.tensor()
    frame.close()
    assert descriptors() == before
    assert kept == sample(0)
    with pytest.raises((OSError, ValueError)):
        frame.pages([0])


def test_a_refused_file_is_closed(tmp_path: Path) -> None:
    before = descriptors()
    blob = hw.encode(sample(0))
    for data in (b"", blob[:100], blob[:-1], flipped(blob, 100), flipped(blob, 300), bytes(100)):
        with pytest.raises(hw.HurrayWireError):
            hw.open_frame(as_path(data, tmp_path))
    with pytest.raises(hw.MismatchError):
        hw.open_frame(as_path(blob, tmp_path), expect={"page_size": 9})
    assert descriptors() == before


@pytest.mark.parametrize("verify", [True, False])
def test_a_closed_frame_does_not_read_somebody_elses_file(verify: bool, tmp_path: Path) -> None:
    """The descriptor's number is the next file's then: even the same bytes are not this frame's any more."""
    path = as_path(hw.encode(large(0, pages=3)), tmp_path)
    frame = hw.open_frame(path, verify=verify)
    frame.close()
    with path.open("rb"):
        for call in (lambda: frame.pages([0]), lambda: frame.gather(0), frame.tensor):
            with pytest.raises((OSError, ValueError)) as caught:
                call()
            assert not isinstance(caught.value, hw.HurrayWireError)


def test_frames_of_one_path_are_apart(tmp_path: Path) -> None:
    """Several may be open, and read in any order."""
    path = as_path(encoded([large(n, pages=3) for n in range(2)]), tmp_path)
    first = hw.open_frame(path)
    second = hw.open_frame(path, first.inspection.total_bytes)
    with first, second:
        for page in (2, 0, 1):
            assert np.array_equal(first.pages([page])[0], large(0, pages=3).page_pool[page])
            assert np.array_equal(second.pages([page])[0], large(1, pages=3).page_pool[page])


def test_verify_false_still_decompresses_and_finds_what_cannot_be() -> None:
    tensor: TENSOR = large(0, pages=4)
    blob = hw.encode(tensor, compression="zstd")
    at = section_of(blob, PAGE_POOL)["offset"]
    assert np.array_equal(hw.open_frame(blob, verify=False).gather(0), tensor.gather(0))
    damaged = blob[: at + 12] + b"\xff" * 200 + blob[at + 212 :]
    frame = hw.open_frame(damaged, verify=False)
    for call in (lambda: frame.gather(0), frame.tensor):
        with pytest.raises(hw.FrameError) as caught:
            call()
        assert caught.value.code == "zstd"
