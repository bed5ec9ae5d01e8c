"""Cases drawn from public bug reports, by their numbers in the collection; what concerns these rooms of the package.

Each stands for a fault that somebody shipped: an id tells which.
"""

from __future__ import annotations

import pickle
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from frames import PAGE_POOL, build, changed, worked_sections
from support import BT, RAW64_SHA256, RAW_SHA256, SP, desc, raw, sha256, under_a_ceiling, verdict, worked

import hurray_wire as hw

BLOB = hw.encode(worked())
OURS = ("TruncatedError", "LimitError", "FrameError", "ChecksumError", "UnsupportedError", "InvalidDescriptorError")


def case(number: int, name: str = "") -> Any:
    return pytest.param(number, id=f"{number}{'-' if name else ''}{name}")


def test_golden_facts() -> None:
    wide = raw(bt=BT.astype("<u8"), sp=SP.astype("<u8"), index_type=1, sizes=(640, 24, 24))
    assert (len(desc()), len(raw()), sha256(raw())) == (133, 797, RAW_SHA256)
    assert (len(wide), sha256(wide)) == (821, RAW64_SHA256)
    assert hw.encode(worked(), framing="bare") == raw()
    assert hw.encode(worked(index_type="uint64"), framing="bare") == wide
    first, second = worked().gather(0), worked().gather(1)
    assert (first.shape, float(first[5, 1, 7]), float(first.astype("f8").sum())) == ((6, 2, 8), 95.0, 4560.0)
    assert (second.shape, float(second[2, 0, 0]), float(second.astype("f8").sum())) == ((3, 2, 8), 32.0, 1128.0)


@pytest.mark.parametrize("_", [case(12, "page-id-times-stride-beyond-32-bits")])
def test_wide_offsets(_: int) -> None:
    pages = 2**20 + 2
    with tempfile.TemporaryFile() as file:
        file.truncate(pages * 4096)
        file.seek((2**20 + 1) * 4096)
        file.write(b"\xab" * 4096)
        file.flush()
        pool = np.memmap(file, np.uint8, "r", shape=(pages, 16, 1, 256))
        t = hw.BlockPagedTensor(
            pool, block_table=np.array([2**20 + 1], "u4"), seq_ptr=np.array([0, 1], "u4"), seq_lens=[16]
        )
        assert (t.gather(0) == 0xAB).all()
        assert t.element_offset(0, 0, 0, 0) == (2**20 + 1) * 4096 == 4_294_971_392
        assert hw.decode(hw.encode(t, pages="live")).gather(0).tobytes() == b"\xab" * 4096
    told = hw.TensorDescriptor.decode(desc(sizes=(3 << 30, 12, 12), num_pages=(3 << 30) // 128))
    assert (told.buffers[0].byte_size, told.layout.num_pages) == (3_221_225_472, 25_165_824)
    assert type(told.buffers[0].byte_size) is type(told.layout.num_pages) is int


@pytest.mark.parametrize("_", [case(15, "declared-length-allocated-before-the-bytes-arrive")])
def test_declared_lengths(_: int) -> None:
    sizes = (2**34, 2**40, 2**62, 2**63, 2**64 - 1)
    blobs = [desc(sizes=(n, 12, 12), num_pages=max(1, n // 128)) for n in sizes]
    frames = [build(changed(1, data=blob)) for blob in blobs]
    frames += [build(worked_sections(), frame_length=n)[:133] for n in sizes]
    wide = {"frame_bytes": 2**66, "decoded_bytes": 2**66}
    options: list[dict[str, Any]] = [{}, {"limits": wide}, {"limits": wide, "strict": False}]
    told = under_a_ceiling([(blob, dict(option)) for blob in (*blobs, *frames) for option in options])
    assert {word.split()[0] for word in told} <= set(OURS)
    for blob in blobs:
        assert verdict(blob).kind in ("TruncatedError", "LimitError", "InvalidDescriptorError")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(data, id=f"17-{name}")
        for name, data in {
            "git-lfs": b"version https://git-lfs.github.com/spec/v1\n",
            "html": b"<!DOCTYPE html>",
            "nothing": b"",
            "one byte": b"H",
            "three bytes": BLOB[:3],
            "gzip": b"\x1f\x8b\x08\x00" + bytes(60),
            "zstd": b"\x28\xb5\x2f\xfd" + bytes(60),
            "npy": np.lib.format.magic(1, 0) + bytes(60),
            "zeros": bytes(64),
        }.items()
    ],
)
def test_the_file_is_not_what_its_name_says(data: bytes) -> None:
    with pytest.raises(hw.HurrayWireError) as caught:
        hw.decode(data)
    text = str(caught.value)
    assert "hurray_wire blob" in text
    assert "2336927755350992246" not in text
    assert data[:3].hex(" ") in text


class Boom:
    """Whoever unpickles this leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("_", [case(18, "code-execution-through-the-decoder")])
def test_nothing_is_unpickled(_: int, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for protocol in range(6):
        data = pickle.dumps(Boom(marker), protocol=protocol)
        assert verdict(data).kind in OURS
        with pytest.raises(hw.HurrayWireError):
            list(hw.iter_decode(data))
    assert not marker.exists()
    for pool in (np.array([[[[None]]]], dtype=object), np.zeros((1, 1, 1, 1), dtype=[("a", "f2")])):
        with pytest.raises((hw.HurrayWireError, TypeError)):
            hw.encode(hw.BlockPagedTensor(pool, block_table=[0], seq_ptr=[0, 1], seq_lens=[1]))


@pytest.mark.parametrize("compression", [pytest.param(None, id="20-raw"), pytest.param("zstd", id="20-zstd")])
def test_truncated_or_shortened_data(compression: Any) -> None:
    data = hw.encode(worked(), compression=compression)
    for n in range(len(data)):
        assert verdict(data[:n]).kind == "TruncatedError"
        assert verdict(data[:n] + data[n + 1 :]).kind in OURS


@pytest.mark.parametrize("_", [case(22, "checksum-wrong-for-some-offsets-or-split-points")])
def test_checksums_at_any_offset(_: int) -> None:
    block = np.random.default_rng(22).integers(0, 256, 4096, np.uint8)
    whole = block.tobytes()
    frozen = block.copy()
    frozen.flags.writeable = False
    for offset in range(32):
        for length in range(0, 301, 7):
            part = slice(offset, offset + length)
            digest = xxhash.xxh3_64_intdigest(whole[part])
            kinds: list[Any] = [bytearray(whole[part]), memoryview(whole)[part], frozen[part], block[part]]
            assert {xxhash.xxh3_64_intdigest(kind) for kind in kinds} == {digest}
    for cut in range(301):
        fed = xxhash.xxh3_64(block[3 : 3 + cut])
        fed.update(memoryview(whole)[3 + cut : 304])
        assert fed.intdigest() == xxhash.xxh3_64_intdigest(whole[3:304])
    for shift in range(64):
        moved = np.zeros(len(BLOB) + 64, np.uint8)
        moved[shift : shift + len(BLOB)] = np.frombuffer(BLOB, np.uint8)
        assert hw.decode(moved[shift : shift + len(BLOB)]) == worked()
    strided = np.random.default_rng(1).integers(0, 256, (5, 4, 2, 16), np.uint8).view(np.float16)
    for pool in (strided[..., ::2], strided[:, ::-1], strided.transpose(0, 1, 3, 2)):
        assert hw.decode(hw.encode(worked(page_pool=pool))).page_pool.tobytes() == pool.tobytes()


@pytest.mark.parametrize("size", [pytest.param(size, id=f"23-{size}") for size in (999, 1000, 1001)])
def test_a_zstd_frame_without_a_content_size(size: int) -> None:
    unsized = bytes.fromhex("28b52ffd00004d00001000000100e32b8005")
    sized = bytes.fromhex("28b52ffd60e8024d00001000000100e32b8005")
    pool = np.zeros((size, 1, 1, 1), np.uint8)
    t = worked(page_pool=pool, seq_lens=[2, 1])
    told = t.descriptor.encode()

    def framed(stored: bytes) -> bytes:
        fields: dict[int, dict[str, Any]] = {
            1: {"data": told},
            2: {"data": np.array([2, 1], "<u4").tobytes()},
            PAGE_POOL: {"data": stored, "codec": 1, "raw_length": size},
        }
        return build([replace(s, **fields.get(s.kind, {})) for s in worked_sections()])

    with pytest.raises(hw.FrameError, match="content size") as caught:
        hw.decode(framed(unsized))
    assert caught.value.code == "zstd"
    assert verdict(framed(sized))[:2] == (("ok", "") if size == 1000 else ("FrameError", "zstd"))


@pytest.mark.parametrize("_", [case(26, "decompression-bomb")])
def test_bombs(_: int) -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(64 << 20))
    assert len(bomb) < 4096
    (told,) = under_a_ceiling([(build(changed(PAGE_POOL, data=bomb, codec=1, raw_length=1000)), {})])
    assert told == "FrameError zstd" or told.startswith("FrameError section")
    pool = np.zeros((4096, 16, 8, 64), np.float16)
    table, ptr = np.arange(4096, dtype="u4"), np.array([0, 4096], "u4")
    big = hw.encode(hw.BlockPagedTensor(pool, block_table=table, seq_ptr=ptr, seq_lens=[65536]), compression="zstd")
    assert len(big) < 1 << 20
    with pytest.raises(hw.LimitError) as caught:
        hw.decode(big, limits=hw.Limits(decoded_bytes=1 << 20))
    assert (caught.value.limit, caught.value.claimed) == (1_048_576, 67_108_864 + 4096 * 4 + 8)
    assert not hw.decode(big).page_pool.any()
