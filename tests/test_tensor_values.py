"""A tensor as a value: equality, replace, pickling, and what a lenient reader leaves."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from frames import Section, build
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, Built, schemes_of, tensors
from support import BT, POOL, SP, pool_bytes, raw, sha256, verdict, worked

import hurray_wire as hw

BATCHES = [(name, scheme) for name, scheme in ((d.name, s) for d in DTYPES for s in ["", *schemes_of(d)])]


def differing() -> dict[str, hw.BlockPagedTensor]:
    """Tensors that each differ from the worked example in one thing."""
    one_bit = POOL.copy()
    one_bit.view(np.uint8)[4, 3, 1, 15] ^= 1
    return {
        "pool": worked(page_pool=one_bit),
        "dtype": worked(page_pool=POOL.view(np.uint16), dtype="bfloat16"),
        "block_table": worked(block_table=[0, 1, 1]),
        "seq_ptr": worked(seq_ptr=[0, 1, 3], seq_lens=[4, 5]),
        "seq_lens": worked(seq_lens=[5, 4]),
        "unknown seq_lens": worked(seq_lens=None, total_tokens=9),
        "role": worked(kv_role="value"),
        "layer": worked(layer_index=4),
        "no layer": worked(layer_index=None),
        "index type": worked(index_type="uint64"),
        "metadata": worked(metadata={"model": "tiny"}),
        "statistics": worked(statistics=hw.Statistics(nnz=1)),
        "composite": worked(composite="base"),
        "spare page": worked(page_pool=np.concatenate([POOL, POOL[:1]])),
    }


@pytest.mark.parametrize("name", differing())
def test_equality_is_bit_for_bit(name: str) -> None:
    other = differing()[name]
    assert other != worked()
    assert worked() != other
    assert other == differing()[name]


def test_equality_with_other_things() -> None:
    others: list[Any] = [None, 1, "x", hw.encode(worked()), worked().descriptor, POOL]
    assert all(worked() != other for other in others if not isinstance(other, np.ndarray))
    assert worked() == worked(page_pool=POOL.astype(">f2"))
    assert worked() == worked(page_pool=POOL.copy(), block_table=BT.astype("i8"), seq_ptr=SP.tolist())


def test_equality_looks_at_bits_not_values() -> None:
    zero, minus = np.zeros((5, 4, 2, 8), np.float16), np.full((5, 4, 2, 8), -0.0, np.float16)
    assert worked(page_pool=zero) != worked(page_pool=minus)
    nan = np.full((5, 4, 2, 8), np.nan, np.float16)
    other = nan.copy()
    other.view(np.uint16)[...] ^= 1
    assert worked(page_pool=nan) == worked(page_pool=nan.copy())
    assert worked(page_pool=nan) != worked(page_pool=other)
    told = hw.Statistics(value_mean=math.nan, value_stddev=math.nan)
    assert worked(statistics=told) == hw.decode(hw.encode(worked(statistics=told)))


@settings(max_examples=150)
@given(built=tensors(with_metadata=True), data=st.data())
def test_equality_sees_any_changed_bit(built: Built, data: st.DataObject) -> None:
    t, buffer = built.tensor, bytearray(built.buffers[0])
    assert t == t.replace(kv_role=t.kv_role)
    count = t.num_pages * t.page_size * t.num_heads * t.head_dim * t.descriptor.bit_width
    if not count:
        return
    bit = data.draw(st.integers(0, count - 1))
    buffer[bit // 8] ^= 1 << bit % 8
    changed = np.frombuffer(bytes(buffer), np.uint8)
    if t.page_pool.ndim == 4:
        assert t.dtype.numpy is not None
        changed = changed.view(t.dtype.numpy).reshape(t.page_pool.shape)
    assert t.replace(page_pool=changed) != t
    assert t != t.replace(page_pool=changed)


def test_same_tokens() -> None:
    t = worked()
    scrubbed = POOL.copy()
    scrubbed[1, 2:] = 9
    scrubbed[2:] = 9
    moved = np.zeros((7, 4, 2, 8), np.float16)
    moved[[6, 2]] = POOL[:2]
    halves = POOL.reshape(10, 2, 2, 8)
    same = [
        worked(page_pool=scrubbed),
        worked(page_pool=moved, block_table=[6, 2, 6], kv_role="value", layer_index=None),
        worked(page_pool=halves, block_table=[0, 1, 2, 0, 1], seq_ptr=[0, 3, 5], metadata={"model": "x"}),
        worked(index_type="uint64"),
    ]
    for other in same:
        assert t.same_tokens(other)
        assert other.same_tokens(t)
    scrubbed[0, 3] = 9  # used by the first sequence only
    for other in (
        worked(page_pool=scrubbed),
        worked(seq_lens=[5, 4]),
        worked(page_pool=POOL.view("u2"), dtype="uint16"),
    ):
        assert not t.same_tokens(other)
    with pytest.raises(hw.UnsupportedError):
        t.same_tokens(worked(seq_lens=None, total_tokens=9))


@settings(max_examples=60)
@given(built=tensors(lens_known=True))
def test_same_tokens_is_reflexive_and_survives_the_wire(built: Built) -> None:
    t = built.tensor
    assert t.same_tokens(t)
    assert t.same_tokens(hw.decode(hw.encode(t)))


# replace.


def test_replace() -> None:
    t = worked(metadata={"model": "tiny"}, statistics=hw.Statistics(nnz=3), composite="base")
    changed = t.replace(layer_index=7, kv_role="fused")
    assert (changed.layer_index, changed.kv_role) == (7, "fused")
    assert changed.replace(layer_index=3, kv_role="key") == t
    assert changed.page_pool is t.page_pool
    assert (changed.metadata, changed.statistics, changed.descriptor.composite) == (t.metadata, t.statistics, "base")
    assert t.replace() == t
    assert t.replace(metadata=None).metadata is None
    assert t.layer_index == 3
    for wrong in ({"layer": 1}, {"num_pages": 5}, {"descriptor": None}):
        with pytest.raises(TypeError):
            t.replace(**wrong)


@pytest.mark.parametrize("framing", ["bare", "hrkv"])
def test_replace_attaches_lengths(framing: Any) -> None:
    t = hw.decode(hw.encode(worked(seq_lens=None, total_tokens=9), framing=framing))
    assert t.seq_lens is None
    assert t.replace(seq_lens=[6, 3]) == worked()
    assert t.replace(seq_lens=[6, 3]).replace(seq_lens=[5, 3]).total_tokens == 8
    for lens in ([6, 2], [9, 0], [6, 3, 0], [6.0, 3.0], [-1, 10]):
        with pytest.raises(hw.InvalidDescriptorError):
            t.replace(seq_lens=lens)


def test_replace_validates_what_it_changes() -> None:
    t = worked()
    broken: list[dict[str, Any]] = [
        {"block_table": [0, 1, 5]},
        {"page_pool": POOL[:1]},
        {"seq_ptr": [0, 2, 2]},
        {"total_tokens": 13},
        {"layer_index": 2**32},
        {"page_size": 8},
        {"kv_role": "both"},
        {"quantization": hw.PerTensorAffine(1.0)},
    ]
    for fields in broken:
        with pytest.raises(hw.InvalidDescriptorError):
            t.replace(**fields)
    assert t.replace(page_pool=POOL[:2]).num_pages == 2
    assert t.replace(page_pool=POOL.astype(np.float32)).dtype is hw.float32
    assert t.replace(block_table=[0], seq_ptr=[0, 1], seq_lens=[4]).num_seqs == 1
    assert t.replace(page_pool=POOL.reshape(5, 4, 4, 4)).shape == (9, 4, 4)


def test_replace_keeps_where_buffers_lived_and_how_they_align() -> None:
    aligned = hw.decode(hw.encode(worked(), alignment=4096))
    assert {h.alignment for h in aligned.replace(layer_index=9).descriptor.buffers} == {4096}
    on_gpu = hw.decode(raw(device=1, memclass=0)).replace(seq_lens=[6, 3])
    assert {h.device for h in on_gpu.descriptor.buffers} == {"cuda"}
    assert on_gpu == worked()  # where it lived is no part of what it is


# Pickling.


def out_of_band(t: hw.BlockPagedTensor) -> tuple[bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(t, protocol=5, buffer_callback=buffers.append), buffers


@pytest.mark.parametrize(("name", "scheme"), BATCHES)
@settings(max_examples=5)
@given(data=st.data())
def test_pickles_of_every_type_and_scheme(name: str, scheme: str, data: st.DataObject) -> None:
    made = tensors(dtypes=[hw.Dtype.of(name)], private=False, scheme=scheme, with_metadata=True)
    t = data.draw(made).tensor
    for protocol in range(2, 6):
        again = pickle.loads(pickle.dumps(t, protocol=protocol))
        assert again == t
        assert again.violations == ()
    body, buffers = out_of_band(t)
    assert pickle.loads(body, buffers=buffers) == t
    moved = [bytes(memoryview(b)) for b in buffers]
    assert pickle.loads(body, buffers=moved) == t
    assert copy.copy(t) == copy.deepcopy(t) == t


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float64])
def test_pickling_copies_no_pool(dtype: Any) -> None:
    pool = np.zeros((64, 16, 8, 16), dtype)
    t = worked(page_pool=pool)
    body, buffers = out_of_band(t)
    assert len(body) < 2000
    views = [np.frombuffer(memoryview(b), np.uint8) for b in buffers]
    assert any(view.nbytes == pool.nbytes and np.shares_memory(view, pool) for view in views)
    again = pickle.loads(body, buffers=buffers)
    assert np.shares_memory(again.page_pool, pool)
    assert again == t


LONG = 3 * 2**31
LONG_LENS = [
    ([0, 3], LONG, [LONG]),
    ([0, 3], LONG - 5, [LONG - 5]),
    ([0, 2, 3], LONG, [2**32, 2**31]),
]


@pytest.mark.parametrize(("ptr", "total", "lens"), LONG_LENS)
def test_forced_lengths_beyond_the_tables_own_type(ptr: list[int], total: int, lens: list[int]) -> None:
    """uint32 tables may force a length of 33 bits: tokens of no bytes, which cost nothing. It is known, and no less."""
    sizes = (0, 12, 4 * len(ptr))
    fields: dict[str, Any] = {"shape": (total, 0, 8), "page_size": 2**31, "num_pages": 1, "num_seqs": len(ptr) - 1}
    data = raw(bt=np.zeros(3, "<u4"), sp=np.array(ptr, "<u4"), pool=POOL[:0], sizes=sizes, **fields)
    t = hw.decode(data)
    assert t.seq_lens is not None
    assert t.seq_lens.tolist() == lens
    assert hw.encode(t, framing="bare") == data
    assert pickle.loads(pickle.dumps(t)) == t
    assert t.replace(layer_index=9).layer_index == 9
    found = verdict(build_frame(data))
    assert found.kind == "ok"
    assert found.item == t


def build_frame(bare: bytes) -> bytes:
    """A bare blob of an empty pool as a frame without token counts."""
    return build([Section(1, bare[:133]), Section(17, bare[133:145]), Section(18, bare[145:])])


def test_a_pickle_is_checked_when_it_comes_back() -> None:
    body, buffers = out_of_band(worked())
    small = [bytearray(memoryview(b)) for b in buffers]
    table = next(i for i, b in enumerate(small) if bytes(b) == BT.tobytes())
    small[table][0] = 99
    with pytest.raises(hw.InvalidDescriptorError):
        pickle.loads(body, buffers=small)


def test_errors_cross_processes_whole() -> None:
    found: list[hw.HurrayWireError] = []
    wrong: list[tuple[bytes, Any]] = [(b"", {}), (raw()[:-1], {}), (raw(kv_role=7), {})]
    wrong += [(raw(), {"expect": {"dtype": "int8"}}), (raw(), {"limits": hw.Limits(frame_bytes=9)})]
    for data, options in wrong:
        with pytest.raises(hw.HurrayWireError) as caught:
            hw.decode(data, **options)
        found.append(caught.value)
    for error in found:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.__dict__) == (type(error), str(error), error.__dict__)


def test_nothing_keeps_a_tensor_alive() -> None:
    data = bytearray(hw.encode(worked()))
    t = hw.decode(data)
    gone = weakref.ref(t)
    del t
    gc.collect()
    assert gone() is None
    data.append(0)  # no export is left


def test_repr_says_what_it_is() -> None:
    told = repr(worked())
    for word in ("key", "3", "2 sequences", "9 tokens", "2 heads", "8", "float16", "5 pages of 4", "664"):
        assert word in told
    assert "PerTensorAffine" in repr(worked(page_pool=POOL.astype("i1"), quantization=hw.PerTensorAffine(1.0)))
    assert "no layer" in repr(worked(layer_index=None))


# What a lenient reader leaves.

UNSOUND: dict[str, bytes] = {
    "page id": raw(bt=np.array([0, 9, 0], "<u4")),
    "order": raw(sp=np.array([0, 9, 3], "<u4")),
    "start": raw(sp=np.array([1, 2, 3], "<u4")),
    "tokens": raw(shape=(13, 2, 8)),
    "page size 0": raw(page_size=0, shape=(0, 2, 8), sizes=(0, 12, 12), pool=POOL[:0]),
    "byte offset": raw(byte_offset=64),
    "paged axis": raw(paged_axis=1),
    "sync mode": raw(sync=1),
    "oversized": raw(sizes=(700, 12, 12), pool=np.resize(POOL, 350)),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_violations_are_reported_and_index_operations_refuse(name: str) -> None:
    assert verdict(UNSOUND[name]).kind == "InvalidDescriptorError"
    t = hw.decode(UNSOUND[name], strict=False)
    assert t.violations
    assert t.check() == list(t.violations)
    assert str(len(t.violations)) in repr(t)
    if name not in ("page size 0", "oversized"):
        assert sha256(pool_bytes(t)) == sha256(POOL.tobytes())
    refusing: list[Any] = [
        t.validate,
        lambda: t.pages(0),
        lambda: t.live_pages(0),
        lambda: t.token_slots(),
        lambda: t.token_slots(0),
        lambda: t.gather(0),
        lambda: t.dequantize(0),
        lambda: t.element_offset(0, 0, 0, 0),
        lambda: t.page_references(),
        lambda: hw.encode(t),
        lambda: hw.encode(t, framing="bare"),
        lambda: hw.encoded_size(t),
        lambda: t.same_tokens(worked()),
        t.descriptor.encode if name in ("byte offset", "paged axis", "sync mode", "oversized") else t.validate,
    ]
    for refuse in refusing:
        with pytest.raises(hw.InvalidDescriptorError):
            refuse()
    assert t == hw.decode(UNSOUND[name], strict=False)
    again = pickle.loads(pickle.dumps(t))
    assert [(v.code, v.where) for v in again.violations] == [(v.code, v.where) for v in t.violations]


def test_an_unsound_tensor_can_be_mended() -> None:
    t = hw.decode(UNSOUND["page id"], strict=False)
    assert t.replace(block_table=[0, 1, 0], seq_lens=[6, 3]) == worked()
    with pytest.raises(hw.InvalidDescriptorError):
        t.replace(layer_index=4)
