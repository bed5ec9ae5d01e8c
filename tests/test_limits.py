"""What a reader refuses before it reads on: limits, `expect`, and the order of frames in a stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frames import DESCRIPTOR, METADATA, PAGE_POOL, Section, added, build, changed, patched, worked_sections
from support import bare_vector, desc, frame_vector, raw, verdict, worked

import hurray_wire as hw


@pytest.mark.parametrize(
    ("data", "name", "claimed"),
    [
        (raw(), "descriptor_bytes", 133),
        (raw(), "frame_bytes", 797),
        (raw(), "decoded_bytes", 664),
        (build(worked_sections()), "descriptor_bytes", 133),
        (build(worked_sections()), "sections", 5),
        (build(worked_sections()), "frame_bytes", 1216),
        (build(worked_sections()), "decoded_bytes", 664),
        (build(added(Section(METADATA, b'{"a.b":1}'))), "metadata_bytes", 9),
        (frame_vector("zstd-shuffle2"), "decoded_bytes", 32768 + 176 + 12),
    ],
)
def test_limits(data: bytes, name: str, claimed: int) -> None:
    exact: dict[str, Any] = {name: claimed}
    assert verdict(data, limits=hw.Limits(**exact)).kind == "ok"
    for limit in (claimed - 1, 0):
        below: dict[str, Any] = {name: limit}
        with pytest.raises(hw.LimitError) as caught:
            hw.decode(data, limits=hw.Limits(**below))
        error = caught.value
        assert (error.code, error.claimed, error.limit) == (name, claimed, limit)
        assert str(claimed) in str(error)
        assert str(limit) in str(error)
    assert verdict(data[:200], limits=hw.Limits(frame_bytes=1)).kind in ("LimitError", "TruncatedError")


def test_limits_come_before_anything_is_read() -> None:
    """Of outer lengths, whatever else is wrong: a cut frame, a broken checksum."""
    data = patched(build(worked_sections()), 24, (2**40).to_bytes(8, "little"))
    assert verdict(data[:40])[:2] == ("LimitError", "frame_bytes")
    bare = patched(raw(), 6, (2**20).to_bytes(4, "little"))
    assert verdict(bare[:10])[:2] == ("LimitError", "descriptor_bytes")
    assert hw.Limits() == hw.DEFAULT_LIMITS
    assert hw.Limits.untrusted(1 << 20).decoded_bytes == hw.Limits.untrusted(1 << 20).frame_bytes == 1 << 20
    others: list[dict[str, Any]] = [{"frames": -1}, {"sections": 1.5}, {"frame_bytes": None}, {"decoded_bytes": True}]
    for wrong in others:
        with pytest.raises(TypeError):
            hw.Limits(**wrong)


def test_limits_of_a_stream() -> None:
    frames = [hw.encode(worked(), sequence=i, last=i == 2) for i in range(3)]
    data = b"".join(frames)
    assert len(list(hw.iter_decode(data, limits=hw.Limits(frames=3, stream_bytes=len(data))))) == 3
    for limits in (hw.Limits(frames=2), hw.Limits(stream_bytes=len(data) - 1)):
        with pytest.raises(hw.LimitError) as caught:
            list(hw.iter_decode(data, limits=limits))
        assert caught.value.code in ("frames", "stream_bytes")
    tensors = hw.iter_decode(data, limits=hw.Limits(frames=2))
    assert [next(tensors), next(tensors)] == [worked()] * 2
    with pytest.raises(hw.LimitError):
        next(tensors)  # not after one more has been read and handed out


# expect.


def test_expect() -> None:
    t = worked(metadata={"model": "tiny", "heads": [0, 2, 4]})
    sound: dict[str, Any] = {
        **{"dtype": "float16", "page_size": 4, "num_heads": 2, "head_dim": 8, "kv_role": "key", "layer_index": 3},
        **{"num_seqs": 2, "quantization": None, "model": "tiny", "heads": [0, 2, 4]},
    }
    data = hw.encode(t)
    assert hw.decode(data, expect=sound) == t
    others: list[Any] = [{"dtype": hw.float16}, {"dtype": np.float16}, {"dtype": 1}, {"heads": (0, 2, 4)}, {}]
    for same in others:
        assert hw.decode(data, expect=same) == t
    with pytest.raises(hw.MismatchError) as caught:
        hw.decode(data, expect={"dtype": "int8", "page_size": 8, "model": "large", "tokenizer": "x", "num_seqs": 2})
    told = {(d.where, d.found, d.expected) for d in caught.value.differences}
    assert told == {
        ("dtype", "float16", "int8"),
        ("page_size", 4, 8),
        ("model", "tiny", "large"),
        ("tokenizer", None, "x"),
    }
    assert caught.value.code == "mismatch"
    for word in ("float16", "int8", "large"):
        assert word in str(caught.value)


def test_expect_a_scheme() -> None:
    data = bare_vector("int8_per_block_sym")
    scheme = hw.PerBlockAffine.symmetric(0, 4, 3, "float32")
    for sound in ("per_block", scheme):
        assert hw.decode(data, expect={"quantization": sound}).quantization == scheme
    for other in ("per_tensor", None, hw.PerBlockAffine.symmetric(0, 4, 3, "float16")):
        assert verdict(data, expect={"quantization": other}).kind == "MismatchError"
    assert verdict(raw(), expect={"quantization": "per_block"}).kind == "MismatchError"


def test_expect_before_the_payload_is_touched() -> None:
    data = build(changed(PAGE_POOL, checksum=1))
    assert verdict(data, expect={"layer_index": 4}).kind == "MismatchError"
    assert verdict(data, expect={"layer_index": 3}).code == "section_checksum"
    assert verdict(raw(bt=np.array([9, 9, 9], "<u4")), expect={"layer_index": 4}).kind == "MismatchError"


# Streams in memory.


def test_order_within_a_stream() -> None:
    def frame(sequence: int, last: bool = False, stream_id: int = 5) -> bytes:
        return hw.encode(worked(), sequence=sequence, last=last, stream_id=stream_id)

    closing = build([], sequence=1, stream_id=5)
    for data, count in (
        (frame(0, True), 1),
        (frame(0) + frame(1, True), 2),
        (frame(0) + closing, 1),
        (frame(0, True) + frame(0, True, 6), 2),
        (frame(0, True) + raw() + frame(0, True), 3),
        (build([]) + build([]), 0),
        (raw() + raw(), 2),
    ):
        assert len(list(hw.iter_decode(data))) == count
    for data, code in (
        (frame(1, True), "sequence"),
        (frame(0) + frame(0, True), "sequence"),
        (frame(0) + frame(2, True), "sequence"),
        (frame(0) + frame(1, True, 6), "stream_id"),
        (frame(0) + raw(), "magic"),
        (frame(0), "stream_truncated"),
        (frame(0) + frame(1), "stream_truncated"),
        (frame(0) + closing[:-1], "truncated"),
        (frame(0, True) + bytes(64), "magic"),
        (frame(0) + patched(closing, 60, b"\1"), "padding"),
    ):
        with pytest.raises(hw.FrameError) as caught:
            list(hw.iter_decode(data))
        assert caught.value.code == code


def test_offsets_count_from_the_input() -> None:
    data = worked_blob = hw.encode(worked())
    broken = build(changed(DESCRIPTOR, data=desc(kv_role=9)))
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        hw.decode_from(data + broken, len(worked_blob))
    assert caught.value.offset == len(worked_blob) + 288 + 72
    for offset in (-1, len(data) + 1):
        with pytest.raises(ValueError, match="offset"):
            hw.decode_from(data, offset)
    assert hw.decode_from(b"x" + data, 1) == (worked(), 1 + len(data))
