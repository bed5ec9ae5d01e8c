"""Every single bit of a checksummed frame counts; without verification every bit outside the payload still does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from frames import CHECKSUM, entries_of
from support import frame_vector, verdict, worked

import hurray_wire as hw

COMPRESSIBLE = (np.arange(5 * 16 * 2 * 8) % 50).astype(np.float16).reshape(5, 16, 2, 8)
FRAMES = {
    **{name: frame_vector(name) for name in ("raw", "raw-metadata", "raw-chunks", "uint64-int8-per-block")},
    **{name: frame_vector(name) for name in ("optional-unknown-section", "empty-batch")},
    "zstd": hw.encode(worked(page_pool=COMPRESSIBLE, seq_lens=[20, 3]), compression="zstd"),
    "zstd chunks": hw.encode(worked(page_pool=COMPRESSIBLE, seq_lens=[20, 3]), compression="zstd", chunk_bytes=512),
}
PAYLOAD = (16, 19, 20)


def flips(data: bytes, places: range | None = None) -> Iterator[tuple[int, bytes]]:
    """Each bit in turn, changed in place and back."""
    changed = bytearray(data)
    for at in places if places is not None else range(len(data)):
        for bit in range(8):
            changed[at] ^= 1 << bit
            yield at, bytes(changed)
            changed[at] ^= 1 << bit


def payload_of(data: bytes) -> set[int]:
    """Bytes that `verify=False` leaves alone: page_pool, scales, zero_points as stored."""
    return {
        at
        for entry in entries_of(data)
        if entry["kind"] in PAYLOAD
        for at in range(entry["offset"], entry["offset"] + entry["stored_length"])
    }


def test_the_compressed_frames_are_compressed() -> None:
    for name in ("zstd", "zstd chunks"):
        codecs = [entry["codec"] for entry in entries_of(FRAMES[name]) if entry["kind"] == 16]
        assert codecs == [1] * (5 if "chunks" in name else 1)


@pytest.mark.parametrize("name", FRAMES)
def test_every_flip_is_an_error(name: str) -> None:
    data = FRAMES[name]
    assert verdict(data).kind == "ok"
    assert [at for at, changed in flips(data) if verdict(changed).kind == "ok"] == []


@pytest.mark.parametrize("name", FRAMES)
def test_every_flip_is_an_error_to_a_lenient_reader_too(name: str) -> None:
    data = FRAMES[name]
    step = range(0, len(data), 5)
    assert [at for at, changed in flips(data, step) if verdict(changed, strict=False).kind == "ok"] == []


@pytest.mark.parametrize("name", FRAMES)
def test_without_verification_every_flip_outside_the_payload_is_an_error(name: str) -> None:
    data = FRAMES[name]
    payload = payload_of(data)
    found = {at for at, changed in flips(data) if at not in payload and verdict(changed, verify=False).kind == "ok"}
    assert found == set()


@pytest.mark.parametrize("name", [name for name in FRAMES if "zstd" not in name])
def test_without_verification_a_flip_in_a_raw_payload_is_a_flip_in_the_tensor(name: str) -> None:
    data = FRAMES[name]
    payload = sorted(payload_of(data))
    sound = hw.decode(data)
    for at, changed in flips(data, range(0)) if not payload else flips(data, range(payload[0], payload[-1] + 1, 11)):
        if at in payload:
            found = hw.decode(changed, verify=False)
            assert found != sound
            arrays = [(found.page_pool, sound.page_pool), (found.scales, sound.scales)]
            pairs = [(a.view(np.uint8), b.view(np.uint8)) for a, b in arrays if a is not None and b is not None]
            assert sum(int(np.bitwise_count(a ^ b).sum()) for a, b in pairs) == 1


@pytest.mark.parametrize("name", ["zstd", "zstd chunks"])
def test_without_verification_a_flip_in_a_compressed_payload_is_refused_or_stays_within_the_pool(name: str) -> None:
    data = FRAMES[name]
    payload, sound = payload_of(data), hw.decode(data)
    refused = 0
    for at, changed in flips(data):
        if at not in payload:
            continue
        found = verdict(changed, verify=False)
        refused += found.kind != "ok"
        if found.kind == "ok":
            assert found.item.replace(page_pool=sound.page_pool) == sound
        else:
            assert found[:2] == ("FrameError", "zstd")
    assert refused > 100


@pytest.mark.parametrize("name", ["raw", "uint64-int8-per-block"])
def test_where_there_is_no_checksum_only_the_payload_may_flip(name: str) -> None:
    data = hw.encode(hw.decode(FRAMES[name]), checksum=False)
    assert {e["kind"] for e in entries_of(data) if not e["flags"] & CHECKSUM} <= set(PAYLOAD)
    payload = payload_of(data)
    sound = {at for at, changed in flips(data) if verdict(changed).kind == "ok"}
    assert sound == payload


def test_the_place_of_a_flip_is_told() -> None:
    data = FRAMES["raw"]
    names = {1: "descriptor", 2: "seq_lens", 16: "page_pool", 17: "block_table", 18: "seq_ptr"}
    for index, entry in enumerate(entries_of(data)):
        changed = bytearray(data)
        changed[entry["offset"]] ^= 1
        found = verdict(bytes(changed))
        assert found[:4] == ("ChecksumError", "section_checksum", f"sections[{index}]", entry["offset"])
        with pytest.raises(hw.ChecksumError, match=names[entry["kind"]]):
            hw.decode(bytes(changed))
    for at in (12, 40, 100, 287):
        changed = bytearray(data)
        changed[at] ^= 1
        assert verdict(bytes(changed)).code == "header_checksum"
    changed = bytearray(data)
    changed[-1] = 1
    assert verdict(bytes(changed))[:4] == ("FrameError", "padding", "padding", len(data) - 1)
