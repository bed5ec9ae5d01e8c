"""The quick way through a frame like one before (`familiar`) gives what the stages give, and says nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frames import DESCRIPTOR, METADATA, Section, added, build, changed, resealed, section_of
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Built, tensors
from support import desc, frame_vector, verdict, worked

import hurray_wire as hw
from hurray_wire import familiar
from hurray_wire.arrays import as_bytes
from hurray_wire.codec import read_by_stages
from hurray_wire.options import decode_options

VECTORS = (
    *("raw", "raw-pool-without-checksum", "raw-metadata", "raw-chunks"),
    *("uint64-int8-per-block", "raw-lens-unknown", "raw-align-4096"),
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"verify": False},
    {"strict": False},
    {"copy": False},
    {"copy": True},
    {"threads": 2},
    {"expect": {"layer_index": 3, "kv_role": "key"}},
    {"limits": hw.Limits(decoded_bytes=600)},
    {"limits": hw.Limits(descriptor_bytes=132)},
    {"limits": hw.Limits(frame_bytes=1000, sections=4)},
    {"limits": hw.Limits(metadata_bytes=10)},
)


def by_the_stages(data: bytes, options: dict[str, Any]) -> Any:
    """What the stages alone say: a tensor, or class, code, place and words of an error."""
    try:
        parts, _ = read_by_stages(as_bytes(data), 0, decode_options(options), alone=True)  # type: ignore[arg-type]
    except hw.HurrayWireError as error:
        return type(error).__name__, str(error.code), error.where, error.offset, str(error)
    return hw.BlockPagedTensor.of_parts(parts)


def by_both(data: bytes, options: dict[str, Any]) -> Any:
    """What decoding says, the quick way being tried first."""
    try:
        return hw.decode(data, **options)
    except hw.HurrayWireError as error:
        return type(error).__name__, str(error.code), error.where, error.offset, str(error)


def is_familiar(data: Any, **options: Any) -> bool:
    """Whether the quick way takes it."""
    return familiar.read(as_bytes(data), 0, decode_options(options), alone=True) is not None  # type: ignore[arg-type]


def flags(array: Any) -> tuple[bool, bool]:
    """Whether it may be written to, and is aligned."""
    return array.flags.writeable, array.flags.aligned


def agree(data: bytes, options: dict[str, Any]) -> bool:
    """Whether both say the same of bytes, arrays and their flags included."""
    ours, theirs = by_both(data, options), by_the_stages(data, options)
    if isinstance(ours, tuple) or isinstance(theirs, tuple):
        return bool(ours == theirs)
    pairs = zip(ours.parts.small_arrays(), theirs.parts.small_arrays(), strict=True)
    same = all(a is b or (a.dtype == b.dtype and flags(a) == flags(b)) for a, b in pairs)
    pools = ours.page_pool, theirs.page_pool
    views = [np.shares_memory(pool, np.frombuffer(data, np.uint8)) for pool in pools]
    return bool(
        ours == theirs
        and same
        and views[0] == views[1]
        and pools[0].dtype == pools[1].dtype
        and flags(pools[0]) == flags(pools[1])
        and ours.violations == theirs.violations
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", VECTORS)
def test_golden_frames_are_read_alike(name: str, options: dict[str, Any]) -> None:
    data = frame_vector(name)
    hw.decode(data)
    assert agree(data, options)
    for at in range(0, len(data), 3 if len(data) < 4096 else 17):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        assert agree(bytes(changed), options), at
        assert agree(resealed(bytes(changed)), options) if at > 40 else True, at


@settings(max_examples=150)
@given(built=tensors(with_metadata=True), data=st.data())
def test_any_frame_is_read_alike(built: Built, data: st.DataObject) -> None:
    chosen: dict[str, Any] = {
        "compression": data.draw(st.sampled_from((None, None, "zstd"))),
        "chunk_bytes": data.draw(st.sampled_from((None, 64))),
        "alignment": data.draw(st.sampled_from((None, 512, 8192))),
        "checksum": data.draw(st.booleans()),
    }
    blob = hw.encode(built.tensor, **chosen)
    hw.decode(blob)
    options = {"strict": data.draw(st.booleans()), "verify": data.draw(st.booleans())}
    assert agree(blob, options)
    assert agree(blob + b"\0", options)
    assert agree(blob[:-1], options)
    at = data.draw(st.integers(0, len(blob) - 1))
    changed = bytearray(blob)
    changed[at] ^= data.draw(st.integers(1, 255))
    assert agree(bytes(changed), options)
    if at >= 40:
        assert agree(resealed(bytes(changed)), options)


def layers(**changes: Any) -> list[hw.BlockPagedTensor]:
    """Layers of one cache, keys and values."""
    return [worked(layer_index=i, kv_role=role, **changes) for i in range(3) for role in ("key", "value")]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk_bytes": 1},
        {"checksum": False},
        {"alignment": 256},
        {"alignment": 4096},
        {"sequence": 7, "stream_id": 9, "last": False},
    ],
    ids=str,
)
def test_the_next_layer_is_familiar(options: dict[str, Any]) -> None:
    first, *rest = (hw.encode(tensor, **options) for tensor in layers())
    hw.decode(first)
    assert [is_familiar(blob) for blob in rest] == [True] * 5


@pytest.mark.parametrize(
    "changes",
    [
        {"seq_lens": None, "total_tokens": 12},
        {"seq_lens": None, "total_tokens": 9},
        {"metadata": {"model": "tiny", "my.note": "x"}},
        {"index_type": "uint64"},
        {
            "page_pool": np.ones((5, 4, 2, 8), np.int8),
            "quantization": "per_block",
            "scales": np.ones((5, 4), np.float32),
        },
    ],
    ids=str,
)
def test_every_kind_of_frame_becomes_familiar(changes: dict[str, Any]) -> None:
    tensors_ = layers(**changes)
    first, *rest = (hw.encode(tensor) for tensor in tensors_)
    hw.decode(first)
    assert [is_familiar(blob) for blob in rest] == [True] * 5
    assert [hw.decode(blob) == tensor for blob, tensor in zip(rest, tensors_[1:], strict=True)] == [True] * 5


def test_what_is_no_view_is_for_the_stages() -> None:
    blob = hw.encode(worked())
    hw.decode(blob)
    assert not is_familiar(blob, copy=True)
    shifted = b"\0" + blob
    assert familiar.read(as_bytes(shifted), 1, decode_options({}), alone=True) is None
    assert hw.decode_from(shifted, 1)[0] == worked()


def test_other_tables_of_the_same_size_are_checked() -> None:
    """The header is that of a sound frame, every checksum is right, and the table names a page that is not there."""
    blob = hw.encode(worked())
    hw.decode(blob)
    table = np.frombuffer(blob, np.uint8).copy()
    at = blob.index(worked().block_table.tobytes(), 640)
    table[at] = 5
    wrong = resealed(table.tobytes())
    assert not is_familiar(wrong)
    told = verdict(wrong)
    assert (told.code, told.where, told.offset) == ("page_id", "block_table[0]", at)


def test_routes_are_forgotten_before_they_are_many() -> None:
    pool = np.zeros((1, 1, 1, 1), np.int8)
    for entries in range(1, 3 * familiar._MOST_ALTOGETHER // 5, 97):
        hw.decode(hw.encode(hw.BlockPagedTensor(pool, block_table=[0] * entries, seq_ptr=[0, entries], seq_lens=[1])))
    kept = sum(route.sections for route in familiar._known.routes.values())
    assert 0 < kept <= familiar._MOST_ALTOGETHER
    assert kept == familiar._known._sections


def test_descriptors_of_other_shapes_fit_a_known_header() -> None:
    """uint64 tables of k entries are the bytes of uint32 tables of 2k, but seq_lens are then too few."""
    pool = np.zeros((4, 4, 2, 8), np.float16)
    for options in ({"alignment": 8192}, {}):
        wide = hw.BlockPagedTensor(
            pool, block_table=[0, 1], seq_ptr=[0, 1, 2, 2], seq_lens=[3, 2, 0], index_type="uint64", layer_index=0
        )
        blob = bytearray(hw.encode(wide, **options))  # type: ignore[arg-type]
        hw.decode(blob)
        at = section_of(bytes(blob), DESCRIPTOR)["offset"]
        blob[at + 68 : at + 72] = (7).to_bytes(4, "little")  # num_seqs
        blob[at + 77] = 0  # uint32
        assert agree(resealed(bytes(blob)), {})
        assert verdict(resealed(bytes(blob))).kind == "InvalidDescriptorError"


def test_a_limit_is_for_the_section_and_not_for_what_is_kept_of_it() -> None:
    """A descriptor of a newer minor version is rewritten without what that put behind it."""
    descriptor = bytearray(desc()) + b"x" * 100
    descriptor[5] = 1
    descriptor[6:10] = len(descriptor).to_bytes(4, "little")
    blob = build(changed(DESCRIPTOR, data=bytes(descriptor)))
    hw.decode(blob)
    told = verdict(blob, limits=hw.Limits(descriptor_bytes=140))
    assert (told.kind, told.code) == ("LimitError", "descriptor_bytes")
    assert agree(blob, {"limits": hw.Limits(descriptor_bytes=140)})


def test_limits_come_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = build(added(Section(METADATA, b'{"a.b":[' + b"{}," * 1000 + b"{}]}")))
    hw.decode(blob)
    asked: list[str] = []
    monkeypatch.setattr(familiar, "read_metadata", lambda *_: asked.append("metadata"))
    monkeypatch.setattr(familiar, "private", lambda *_: asked.append("copy"))
    for limits in (
        hw.Limits(metadata_bytes=1000),
        hw.Limits(sections=5),
        hw.Limits(frame_bytes=1024),
        hw.Limits(decoded_bytes=100),
        hw.Limits(descriptor_bytes=100),
    ):
        assert verdict(blob, limits=limits).kind == "LimitError"
    assert asked == []


def test_arrays_keep_no_more_alive_than_they_are() -> None:
    document = {"a.b": "x" * 500_000}
    blob = hw.encode(worked(metadata=document))
    hw.decode(blob)
    assert is_familiar(blob)
    tensor = hw.decode(blob)
    for array in (tensor.block_table, tensor.seq_ptr, tensor.seq_lens):
        assert array is not None
        base = array.base
        while isinstance(base, np.ndarray):
            base = base.base
        assert isinstance(base, bytes)
        assert len(base) < 1000
