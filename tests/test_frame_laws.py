"""What goes into a frame comes out of it, by every way of writing and under every option."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from frames import PAGE_POOL, Section, build, entries_of
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, MAKES, Built, Geometry, made, schemes_of, tensors
from support import disagreement, pool_bytes, reference_verdict, verdict, worked

import hurray_wire as hw

BATCHES = [(name, scheme) for name, scheme in ((d.name, s) for d in DTYPES for s in ["", *schemes_of(d)])]
KINDS = (16, 17, 18, 19, 20)

options = st.fixed_dictionaries(
    {},
    optional={
        "compression": st.sampled_from((None, "zstd")),
        "chunk_bytes": st.integers(1, 200),
        "alignment": st.sampled_from((64, 128, 4096)),
        "checksum": st.booleans(),
        "threads": st.integers(1, 3),
        "sequence": st.integers(0, 2**32 - 1),
        "last": st.booleans(),
        "stream_id": st.integers(0, 2**64 - 1),
    },
)


def comes_back(built: Built, chosen: dict[str, Any]) -> bytes:
    data = hw.encode(built.tensor, **chosen)
    again = hw.decode(data)
    assert again == built.tensor
    assert pool_bytes(again) == built.buffers[0]
    assert again.metadata == built.tensor.metadata
    assert disagreement(verdict(data), reference_verdict(data)) == ""
    return data


@settings(max_examples=250)
@given(built=tensors(with_metadata=True), chosen=options)
def test_what_is_encoded_is_decoded(built: Built, chosen: dict[str, Any]) -> None:
    data = comes_back(built, chosen)
    again = hw.decode(data)
    assert hw.encode(again, **(chosen | {"alignment": None})) == data
    assert hw.decode(data, verify=False) == hw.decode(data, copy=True) == built.tensor


@pytest.mark.parametrize(("name", "scheme"), BATCHES)
@settings(max_examples=6)
@given(data=st.data())
def test_every_type_and_scheme(name: str, scheme: str, data: st.DataObject) -> None:
    built = data.draw(tensors(dtypes=[hw.Dtype.of(name)], private=False, scheme=scheme))
    for compression in (None, "zstd"):
        comes_back(built, {"compression": compression})
    bare = hw.decode(hw.encode(built.tensor, framing="bare"))
    assert pool_bytes(bare) == built.buffers[0]
    assert bare.replace(seq_lens=built.lens) == built.tensor.replace(seq_lens=built.lens)


@settings(max_examples=200)
@given(built=tensors(with_metadata=True), chosen=options)
def test_the_layout_is_the_specifications(built: Built, chosen: dict[str, Any]) -> None:
    """A raw frame is determined by its sections: an independent builder must give the very same bytes."""
    t = built.tensor
    chosen = {k: v for k, v in chosen.items() if k not in ("compression", "chunk_bytes")}
    data = hw.encode(t, **chosen)
    handles = hw.decode(data).descriptor.buffers
    width = "<u4" if t.layout.block_table_index_type == "uint32" else "<u8"
    small = [Section(1, hw.decode(data).descriptor.encode())]
    if t.seq_lens is not None and t.num_seqs:
        small.append(Section(2, t.seq_lens.astype(width).tobytes()))
    small += [Section(3, text) for text in metadata_of(data)]
    buffers = [
        Section(kind, buffer, alignment=handle.alignment, flags=int(chosen.get("checksum", True) or kind in (17, 18)))
        for kind, buffer, handle in zip(KINDS, built.buffers, handles, strict=False)
        if buffer
    ]
    expected = build(
        [*small, *buffers],
        flags=int(chosen.get("last", True)),
        sequence=chosen.get("sequence", 0),
        stream_id=chosen.get("stream_id", 0),
        alignment=chosen.get("alignment", 64),
    )
    assert data == expected


@settings(max_examples=150)
@given(built=tensors(), data=st.data())
def test_every_buffer_has_an_alignment_of_its_own(built: Built, data: st.DataObject) -> None:
    """A decoded handle keeps its alignment; one above 2 MiB counts as 2 MiB in a frame."""
    d = built.tensor.descriptor
    any_size, filled = st.sampled_from((1, 2, 64, 4096)), st.sampled_from((64, 128, 256, 1024, 1 << 22))
    handles = [replace(h, alignment=data.draw(filled if h.byte_size else any_size)) for h in d.buffers]
    if sum(h.alignment == 1 << 22 for h in handles) > 1:  # two megabytes of padding are enough
        return
    head = hw.TensorDescriptor(
        *(d.dtype, d.shape, d.layout, handles),
        quantization=d.quantization,
        statistics=d.statistics,
        extension_type=d.extension_type,
        composite=d.composite,
    ).encode()
    bare = head + b"".join(built.buffers)
    t = hw.decode(bare)
    assert hw.encode(t, framing="bare") == bare
    frame = hw.encode(t)
    lens = [] if t.seq_lens is None or not t.num_seqs else [Section(2, t.seq_lens.tobytes())]
    rows = zip(KINDS, built.buffers, handles, strict=False)
    buffers = [Section(kind, b, alignment=min(h.alignment, 2 << 20)) for kind, b, h in rows if b]
    largest = max(min(h.alignment, 2 << 20) for h in handles if h.byte_size)
    assert frame == build([Section(1, head), *lens, *buffers], alignment=largest)
    assert hw.decode(frame) == t
    assert len(frame) > 1 << 20 or disagreement(verdict(frame), reference_verdict(frame)) == ""


def metadata_of(data: bytes) -> list[bytes]:
    return [data[e["offset"] : e["offset"] + e["raw_length"]] for e in entries_of(data) if e["kind"] == 3]


@settings(max_examples=200)
@given(built=tensors(with_metadata=True), chosen=options, framing=st.sampled_from(("hrkv", "bare")))
def test_every_way_of_writing_agrees(built: Built, chosen: dict[str, Any], framing: str) -> None:
    t = built.tensor
    if framing == "bare":
        chosen = {k: v for k, v in chosen.items() if k != "compression"}
        t = t.replace(metadata=None)
    kwargs: dict[str, Any] = {"framing": framing, **chosen}
    data = hw.encode(t, **kwargs)
    assert b"".join(hw.encode_parts(t, **kwargs)) == data
    assert bytes(hw.encode_buffer(t, **kwargs)) == data
    memory = bytearray(b"\xaa" * (len(data) + 5))
    assert hw.encode_into(t, memory, **kwargs) == len(data)
    assert memory == data + b"\xaa" * 5
    short = bytearray(b"\xaa" * (len(data) - 1))
    with pytest.raises(ValueError, match=str(len(data))):
        hw.encode_into(t, short, **kwargs)
    assert short == b"\xaa" * (len(data) - 1)
    size = hw.encoded_size(t, **kwargs)
    if chosen.get("compression"):
        assert size >= len(data)
        with pytest.raises(hw.FrameError) as caught:
            hw.encode_header(t, **kwargs)
        assert caught.value.code == "section_codec"
        return
    assert size == len(data)
    header = hw.encode_header(t, **kwargs)
    assert data.startswith(header)
    first = min(e["offset"] for e in entries_of(data) if e["kind"] >= 16) if framing == "hrkv" else None
    assert len(header) == (first or t.descriptor.encoded_length)


@settings(max_examples=200)
@given(built=tensors(lens_known=True), framing=st.sampled_from(("hrkv", "bare")), compression=st.booleans())
def test_live_pages(built: Built, framing: str, compression: bool) -> None:
    """What is sent is the tensor over the named pages, in the order of their first use."""
    t = built.tensor
    if t.page_pool.ndim == 1 and t.page_bytes == 0:
        return
    kwargs: dict[str, Any] = {"framing": framing, "pages": "live"}
    if compression and framing == "hrkv":
        kwargs["compression"] = "zstd"
    found = hw.decode(hw.encode(t, **kwargs)).replace(seq_lens=built.lens)
    table = t.block_table.tolist()
    ids = list(dict.fromkeys(table))
    assert found.num_pages == len(ids)
    assert found.block_table.tolist() == [ids.index(page) for page in table]
    step = t.page_bytes
    assert pool_bytes(found) == b"".join(built.buffers[0][page * step : (page + 1) * step] for page in ids)
    assert found.same_tokens(t)
    for mine, theirs in ((found.scales, t.scales), (found.zero_points, t.zero_points)):
        if mine is not None and theirs is not None:
            block = isinstance(t.quantization, hw.PerBlockAffine)
            assert mine.tobytes() == (theirs[ids] if block else theirs).tobytes()
    assert hw.encoded_size(t, **kwargs) >= len(hw.encode(t, **kwargs))


@settings(max_examples=200)
@given(built=tensors(lens_known=True), live=st.booleans())
def test_scrub(built: Built, live: bool) -> None:
    """Every slot that no sequence owns is zero in what is sent, and only there."""
    t = built.tensor
    if t.page_pool.ndim == 1 and t.page_bytes == 0:
        return
    before = pool_bytes(t)
    found = hw.decode(hw.encode(t, scrub=True, pages="live" if live else "all"))
    assert pool_bytes(t) == before == built.buffers[0]
    assert found.same_tokens(t)
    owned = set(found.token_slots().tolist())
    bits = t.num_heads * t.head_dim * t.descriptor.bit_width
    run, kept = int.from_bytes(pool_bytes(found), "little"), int.from_bytes(before, "little")
    for slot in range(found.num_pages * found.page_size):
        part = run >> (slot * bits) & ((1 << bits) - 1)
        if slot not in owned:
            assert part == 0
        elif not live:
            assert part == kept >> (slot * bits) & ((1 << bits) - 1)


@pytest.mark.parametrize("make", MAKES)
def test_large_pools_of_every_make_by_several_threads(make: str) -> None:
    flat = np.random.default_rng(0).integers(0, 1 << 12, 96 * 16 * 32 * 64).astype("<u2").view(np.float16)
    pool = made(flat, Geometry(96, 16, 32, 64), make)  # 6 MiB
    table = np.random.default_rng(1).permutation(96)[:60]
    told: dict[str, Any] = {"block_table": table, "seq_ptr": [0, 40, 60], "seq_lens": [630, 300]}
    mine, plain = worked(page_pool=pool, **told), worked(page_pool=np.ascontiguousarray(pool).astype("<f2"), **told)
    ways: list[dict[str, Any]] = [{}, {"pages": "live"}, {"scrub": True}, {"compression": "zstd", "pages": "live"}]
    for way in ways:
        expected = hw.encode(plain, threads=1, chunk_bytes=1 << 20, **way)
        kwargs = {**way, "threads": 3, "chunk_bytes": 1 << 20}
        assert bytes(hw.encode_buffer(mine, **kwargs)) == expected
        memory = bytearray(len(expected))
        hw.encode_into(mine, memory, **kwargs)
        assert memory == expected
        assert b"".join(hw.encode_parts(mine, **kwargs)) == expected
        assert hw.decode(expected, threads=3, copy=True) == hw.decode(expected, threads=1)
    assert hw.encode(mine, framing="bare") == hw.encode(plain, framing="bare")


def test_pages_that_end_inside_bytes_are_neither_selected_nor_scrubbed() -> None:
    pool = np.arange(8, dtype=np.uint8)
    t = worked(page_pool=pool, dtype="int4", page_size=1, num_heads=1, head_dim=3, seq_lens=[2, 1])
    asked: list[Any] = [{"pages": "live"}, {"scrub": True}]
    for kwargs in asked:
        with pytest.raises(hw.UnsupportedError) as caught:
            hw.encode(t, **kwargs)
        assert caught.value.code == "packed_pool"
    unknown = worked(seq_lens=None, total_tokens=9)
    with pytest.raises(hw.UnsupportedError) as caught:
        hw.encode(unknown, scrub=True)
    assert caught.value.code == "seq_lens_unknown"
    assert hw.decode(hw.encode(unknown, pages="live")).num_pages == 2


# Chunks.


@pytest.mark.parametrize(("chunk_bytes", "pages"), [(1, 1), (128, 1), (255, 1), (256, 2), (640, 5), (2**40, 5)])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_chunks_are_whole_pages(chunk_bytes: int, pages: int, compression: Any) -> None:
    data = hw.encode(worked(), chunk_bytes=chunk_bytes, compression=compression)
    chunks = [e for e in entries_of(data) if e["kind"] == PAGE_POOL]
    assert [c["raw_offset"] for c in chunks] == list(range(0, 640, 128 * pages))
    assert [c["raw_length"] for c in chunks] == [min(128 * pages, 640 - c["raw_offset"]) for c in chunks]
    assert hw.decode(data) == worked()


def test_chunks_double_until_the_table_suffices() -> None:
    pool = np.arange(70_000, dtype=np.uint16).reshape(-1, 1, 1, 1)
    data = hw.encode(worked(page_pool=pool, seq_lens=[2, 1]), chunk_bytes=1)
    chunks = [e["raw_length"] for e in entries_of(data) if e["kind"] == PAGE_POOL]
    assert chunks == [4] * 35_000
    assert hw.decode(data) == worked(page_pool=pool, seq_lens=[2, 1])


@pytest.mark.parametrize(("compression", "most"), [(None, 4 << 20), ("zstd", 1 << 20)])
def test_chunks_by_default(compression: Any, most: int) -> None:
    pool = np.zeros((9 * 8, 32, 32, 64), np.float16)  # 9 MiB, pages of 128 KiB
    t = worked(page_pool=pool)
    data = hw.encode(t, compression=compression)
    chunks = [e["raw_length"] for e in entries_of(data) if e["kind"] == PAGE_POOL]
    assert chunks == [most] * (9 * 2**20 // most) + [9 * 2**20 % most] * bool(9 * 2**20 % most)
    assert hw.decode(data) == t
    assert (len(data) < 9 << 20) == bool(compression)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c16", "i1"])
def test_compressed_chunks_are_shuffled_by_element(dtype: str) -> None:
    pool = (np.arange(64 * 1024) % 100).astype(dtype).reshape(64, 16, 8, 8)
    data = hw.encode(worked(page_pool=pool), compression="zstd")
    (entry,) = (e for e in entries_of(data) if e["kind"] == PAGE_POOL)
    width = np.dtype(dtype).itemsize if np.dtype(dtype).itemsize > 1 else 0
    assert (entry["codec"], entry["filter"], entry["element_width"]) == (1, int(width > 0), width)
    assert entry["stored_length"] < entry["raw_length"] == pool.nbytes
    assert hw.decode(data) == worked(page_pool=pool)
    assert disagreement(verdict(data), reference_verdict(data)) == ""


def test_noise_stays_raw_and_uncopied() -> None:
    pool = np.random.default_rng(1).integers(0, 256, (256, 16, 8, 32), np.uint8)
    t = worked(page_pool=pool)
    parts = hw.encode_parts(t, compression="zstd")
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), pool) for part in parts)
    assert {e["codec"] for e in entries_of(b"".join(parts))} == {0}


@pytest.mark.parametrize("kind", ["contiguous", "strided", "live", "scrubbed"])
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_large_compressed_frames_are_the_same_in_place(kind: str, checksum: bool, threads: int) -> None:
    """Chunks with noise in their low bytes, chunks of nothing but noise, and chunks of zeros, put where they go."""
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((192, 16, 8, 64)).astype(hw.bfloat16.numpy)  # 16 KiB a page
    pool[64:128] = rng.integers(0, 1 << 16, pool[64:128].shape, np.uint16).view(hw.bfloat16.numpy)
    pool[128:140] = 0
    if kind == "strided":
        pool = np.stack([pool, pool], axis=1)[:, 0]
    t = hw.BlockPagedTensor(pool, block_table=np.arange(1, 192)[::-1], seq_ptr=[0, 191], seq_lens=[191 * 16 - 3])
    kwargs: dict[str, Any] = {"compression": "zstd", "checksum": checksum, "threads": threads, "stream_id": 7}
    kwargs |= {"pages": "live"} if kind == "live" else {"scrub": True} if kind == "scrubbed" else {}
    data = hw.encode(t, **kwargs)
    memory = np.full(len(data), 0xAA, np.uint8)
    assert hw.encode_into(t, memory, **kwargs) == len(data)
    assert memory.tobytes() == data
    assert hw.decode(data).same_tokens(t)
