"""Every way to read agrees with `decode` on what is sound, whatever byte before the payload is another.

Each byte of header, table and small sections is changed, and the checksums around it made true again, so that the
rules are met and not the checksums. Nothing but the package's own errors comes out.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from frames import Section, added, build, header_resealed, patched, resealed
from stream_helpers import TENSOR, encoded, int4, large, mixed_chunks, per_block, sample
from stream_ways import WAYS, drained
from support import raw, worked

import hurray_wire as hw

BLOBS: dict[str, bytes] = {
    "raw": hw.encode(worked(metadata={"model": "m", "heads": [0, 2, 4]})),
    "per_block": hw.encode(per_block(0)),
    "zstd": hw.encode(large(0, pages=3), compression="zstd", chunk_bytes=8192),
    "mixed": mixed_chunks(),
    "int4": hw.encode(int4(0)),
    "optional": build(added(Section(0x30, b"private", flags=3))),
    "bare": raw(),
    "bare-per_block": hw.encode(per_block(0), framing="bare"),
}
MOST_BYTES = 1 << 24
"""Pools that a changed header asks for are not made above this."""


def by_stream(data: bytes) -> Any:
    (tensor,) = hw.StreamReader(io.BytesIO(data), require_last=False)
    return tensor


def by_opening(data: bytes) -> Any:
    with hw.open_frame(data) as frame:
        return frame.tensor()


def receivers_pool(data: bytes) -> Any:
    descriptor = hw.inspect(data).descriptor
    assert descriptor is not None
    pages = descriptor.layout.num_pages + 1
    if descriptor.dtype.is_flat:
        return np.zeros(pages * max(1, descriptor.page_bytes), np.uint8), pages - 1
    shape = (pages, descriptor.layout.page_size, *descriptor.shape[1:])
    if np.prod([float(n) for n in shape]) > MOST_BYTES:
        return None, 0
    return np.zeros(shape, descriptor.dtype.numpy), pages - 1


def into_pages(data: bytes) -> Any:
    pool, pages = receivers_pool(data)
    return hw.decode(data) if pool is None else hw.decode_into(data, pool, range(pages))


def stream_into_pages(data: bytes) -> Any:
    pool, pages = receivers_pool(data)
    if pool is None:
        return hw.decode(data)
    header = hw.StreamReader(io.BytesIO(data), require_last=False).next_header()
    assert header is not None
    return header.read_into(pool, range(pages))


READERS: dict[str, Callable[[bytes], Any]] = {
    function.__name__: function for function in (by_stream, by_opening, into_pages, stream_into_pages)
}
ONLY_IN_A_STREAM = {"sequence", "stream_truncated"}


def verdict(read: Callable[[bytes], Any], data: bytes) -> TENSOR | str:
    """The tensor, or the code of the refusal; anything else passes through and fails the test."""
    try:
        found = read(data)
    except hw.HurrayWireError as error:
        return str(error.code)
    assert isinstance(found, TENSOR)
    return found


def changes(data: bytes) -> list[bytes]:
    """The blob with each byte before its payload changed in turn, and sealed again."""
    framed = data[:4] != b"HRRY"
    rng = random.Random(len(data))
    header_end = int.from_bytes(data[16:20], "little") if framed else 0
    found = []
    for at in range(9 if framed else 5, hw.inspect(data).header_bytes):
        if framed and 20 <= at < 22:
            continue  # another section count: there is no telling where the seal is
        value = rng.choice((data[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
        changed = patched(data, at, bytes([value]))
        found.append((header_resealed if at < header_end else resealed)(changed) if framed else changed)
    return found


@pytest.mark.parametrize("name", BLOBS)
def test_all_agree_with_decode(name: str) -> None:
    for data in changes(BLOBS[name]):
        expected = verdict(hw.decode, data)
        for reader, read in READERS.items():
            if reader.endswith("pages") and isinstance(expected, str):
                continue  # what receives into pages needs a header that can be read
            found = verdict(read, data)
            if isinstance(found, str) and found in ONLY_IN_A_STREAM:
                continue
            if isinstance(expected, str):
                assert isinstance(found, str), (reader, expected)
            elif reader.endswith("pages"):
                assert isinstance(found, TENSOR), (reader, found)
                assert expected.seq_lens is None or not expected.page_pool.size or found.same_tokens(expected), reader
            else:
                assert found == expected, (reader, found)


@pytest.mark.parametrize("name", ["raw", "per_block", "bare", "bare-per_block"])
def test_a_lenient_reader_lets_nothing_else_out(name: str) -> None:
    """`strict=False`, and into pages: tensors with violations, or this tree's errors."""
    for data in changes(BLOBS[name]):
        for read in (
            lambda d: hw.decode(d, strict=False),
            lambda d: next(hw.StreamReader(io.BytesIO(d), strict=False)),
            lambda d: hw.decode_into(d, *_five(d), strict=False),
        ):
            found = verdict(read, data)
            if isinstance(found, TENSOR):
                repr(found)
                assert found.check() == list(found.violations)


def _five(data: bytes) -> tuple[Any, Any]:
    pool, pages = receivers_pool(data)
    if pool is None:
        raise hw.LimitError(claimed=0, limit=0, code=hw.Code.DECODED_BYTES)
    return pool, range(pages)


@pytest.mark.parametrize("form", ["raw", "zstd", "bare"])
def test_damage_anywhere_in_a_stream(form: str) -> None:
    """Not sealed again: one to three bytes of a stream are others, and readers agree with `iter_decode`."""
    options: dict[str, Any] = {"raw": {}, "zstd": {"compression": "zstd"}, "bare": {"framing": "bare"}}[form]
    data = encoded([sample(0), large(1, pages=1), per_block(2)], **options)
    rng = random.Random(form)
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        tensors, error = drained(hw.iter_decode(bytes(damaged)))
        assert form == "bare" or error is not None
        for way in ("feed-ragged", "bytesio"):
            outcome = WAYS[way].run(bytes(damaged), streams="all")
            assert outcome.tensors == tensors
            assert (outcome.error is None) == (error is None)
