"""LMCache's memory formats as frames, without LMCache: each format and type round, each other one refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash

import hurray_wire as hw
from hurray_wire.errors import Code
from hurray_wire.integrations.chunks import Chunk, ChunkForm, chunk_bound, describe_chunk, read_chunk, write_chunk

LAYERS, HEADS, DIM = 3, 2, 8
HIDDEN = HEADS * DIM
FORM = ChunkForm(page_size=4, num_heads=HEADS)
ABOUT = {"model": "tiny", "lmcache.chunk_hash": "07" * 32}
SHAPES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "KV_2LTD": lambda tokens: (2, LAYERS, tokens, HIDDEN),
    "KV_T2D": lambda tokens: (tokens, 2, HIDDEN),
    "KV_2TD": lambda tokens: (2, tokens, HIDDEN),
    "KV_MLA_FMT": lambda tokens: (1, LAYERS, tokens, 18),
    "layer-wise KV_MLA_FMT": lambda tokens: (tokens, 18),
}


def values(shape: tuple[int, ...], dtype: Any = np.float16, seed: int = 1) -> Any:
    wide = np.random.default_rng(seed).standard_normal(shape)
    return (wide * 40).astype(dtype) if np.dtype(dtype) == np.int8 else wide.astype(dtype)


def chunk(name: str = "KV_2LTD", tokens: int = 10, dtype: Any = np.float16) -> Chunk:
    return Chunk(name.split()[-1], [values(SHAPES[name](tokens), dtype)])


def blank(like: Chunk) -> Chunk:
    return like._replace(groups=[np.full_like(array, 7) for array in like.groups])


def written(source: Chunk, form: ChunkForm = FORM, about: Any = ABOUT) -> Any:
    out = np.full(chunk_bound(source, form), 0xEE, np.uint8)
    return out[: write_chunk(source, out, form, about)]


def newer(data: Any) -> Any:
    """A frame of version 2, its header checksum in order."""
    spans = {span.path: span for span in reversed(hw.inspect(data).spans)}
    length = spans["header_length"]
    body = int.from_bytes(data[length.offset : length.offset + length.length], "little") - 8
    data[spans["version_major"].offset] += 1
    data[body : body + 8] = np.frombuffer(xxhash.xxh3_64_intdigest(data[:body]).to_bytes(8, "little"), np.uint8)
    return data


def same(a: Chunk, b: Chunk) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(a.groups, b.groups, strict=True))


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("tokens", [1, 4, 10, 16])
@pytest.mark.parametrize("name", SHAPES)
def test_every_format_comes_back(name: str, tokens: int, compression: Any) -> None:
    source = chunk(name, tokens)
    form = ChunkForm(page_size=4, num_heads=HEADS, compression=compression)
    data, mine = written(source, form), blank(source)
    read_chunk(data, mine, form, ABOUT)
    assert same(mine, source)
    frames = list(hw.iter_decode(data))
    assert [t.page_size for t in frames] == [4] * len(frames)
    assert {t.kv_role for t in frames} == ({"fused"} if "MLA" in name else {"key", "value"})
    layers = [f"layer {i}" for i in range(LAYERS)] if len(source.groups[0].shape) == 4 else None
    for t in frames:
        assert t.metadata is not None
        assert (t.metadata["model"], t.metadata.get("seq_ids")) == ("tiny", layers)
        assert t.seq_lens is not None
        assert t.seq_lens.tolist() == [tokens] * (LAYERS if layers else 1)
    assert describe_chunk(data)[:2] == (source.format, [source.groups[0].shape])


@pytest.mark.parametrize(
    "dtype", [np.float16, np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8]
)
def test_types_travel_by_name(dtype: Any) -> None:
    source = chunk(dtype=dtype)
    data, mine = written(source), blank(source)
    read_chunk(data, mine, FORM, ABOUT)
    assert same(mine, source)
    assert hw.inspect(data).descriptor.dtype is hw.Dtype.of(dtype)  # type: ignore[union-attr]


def test_one_layer_is_found_alone() -> None:
    source = chunk()
    with hw.open_frame(written(source)) as frame:
        layer = frame.inspection.metadata["seq_ids"].index("layer 2")  # type: ignore[index]
        assert np.array_equal(frame.gather(layer).reshape(10, HIDDEN), source.groups[0][0, 2])


def test_bytes_without_a_name_are_refused_and_named_ones_are_what_they_are_called() -> None:
    source = chunk(dtype=ml_dtypes.float8_e4m3fn)
    bare = source._replace(groups=[source.groups[0].view(np.uint8)])
    with pytest.raises(hw.UnsupportedError, match="uint8") as caught:
        written(bare)
    assert caught.value.code is Code.DTYPE
    form = ChunkForm(page_size=4, num_heads=HEADS, dtype="fp8_e4m3")
    data, mine = written(bare, form), blank(bare)
    read_chunk(data, mine, form, ABOUT)
    assert same(mine, source)
    with pytest.raises(hw.MismatchError, match="float8_e4m3"):
        read_chunk(data, mine, ChunkForm(page_size=4, num_heads=HEADS, dtype="fp8_e5m2"), ABOUT)


@pytest.mark.parametrize("name", ["UNDEFINED", "BINARY", "BINARY_BUFFER", "EC_TD", "HS_TD", "KV_BLOB"])
def test_other_formats_are_refused_by_name(name: str) -> None:
    source = Chunk(name, [values((4, HIDDEN))])
    for call in (lambda: written(source), lambda: read_chunk(written(chunk()), source, FORM, ABOUT)):
        with pytest.raises(hw.UnsupportedError, match=f"^format: {name}:") as caught:
            call()
        assert caught.value.code is Code.LAYOUT


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("KV_2LTD", (1, 3, 4, HIDDEN)),
        ("KV_2LTD", (2, 4, HIDDEN)),
        ("KV_T2D", (4, 1, HIDDEN)),
        ("KV_2TD", (4, 2, HIDDEN)),
        ("KV_MLA_FMT", (2, 3, 4, 18)),
        ("KV_MLA_FMT", (4,)),
        ("KV_2LTD", (2, 3, 4, 15)),
    ],
)
def test_a_shape_of_another_format_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(hw.InvalidDescriptorError) as caught:
        written(Chunk(name, [values(shape)]))
    assert (caught.value.code, caught.value.where) == (Code.SHAPE, "groups[0]")


def test_a_chunk_of_nothing_is_refused() -> None:
    for source in (Chunk("KV_2LTD", []), Chunk("KV_2LTD", [values((2, 0, 4, HIDDEN))])):
        with pytest.raises(hw.InvalidDescriptorError, match="no layer"):
            write_chunk(source, np.empty(4096, np.uint8), FORM, ABOUT)


def test_groups_of_different_heads() -> None:
    source = Chunk("KV_2LTD", [values((2, 2, 8, 16)), values((2, 1, 8, 40), ml_dtypes.bfloat16)])
    form = ChunkForm(page_size=4, num_heads=[2, 5])
    data, mine = written(source, form), blank(source)
    read_chunk(data, mine, form, ABOUT)
    assert same(mine, source)
    assert [t.num_heads for t in hw.iter_decode(data)] == [2, 2, 5, 5]
    with pytest.raises(hw.InvalidDescriptorError, match="a group 1"):
        written(source, ChunkForm(page_size=4, num_heads=[2]))


@pytest.mark.parametrize(
    ("form", "error"),
    [({"page_size": 0, "num_heads": 1}, "page_size"), ({"page_size": 4, "num_heads": 0}, "num_heads")],
)
def test_a_form_is_checked(form: Any, error: str) -> None:
    with pytest.raises(hw.InvalidDescriptorError, match=error):
        ChunkForm(**form)


# What a receiver refuses.


@pytest.mark.parametrize(
    ("mine", "form", "about", "where"),
    [
        (chunk(), FORM, {**ABOUT, "model": "other"}, "model"),
        (chunk(), FORM, {**ABOUT, "lmcache.chunk_hash": "08" * 32}, "lmcache.chunk_hash"),
        (chunk(), ChunkForm(page_size=4, num_heads=4), ABOUT, "num_heads"),
        (chunk(dtype=ml_dtypes.bfloat16), FORM, ABOUT, "dtype"),
        (chunk(tokens=9), FORM, ABOUT, "lmcache.shapes"),
        (chunk("KV_2TD"), FORM, ABOUT, "lmcache.format"),
        (Chunk("KV_2LTD", [values((2, 2, 10, HIDDEN))]), FORM, ABOUT, "lmcache.shapes"),
    ],
)
def test_another_chunk_is_refused_before_it_is_written(mine: Chunk, form: ChunkForm, about: Any, where: str) -> None:
    before = mine.groups[0].copy()
    with pytest.raises(hw.MismatchError) as caught:
        read_chunk(written(chunk()), mine, form, about)
    assert where in {difference.where for difference in caught.value.differences}
    assert mine.groups[0].tobytes() == before.tobytes()


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_every_part_of_a_value_is_an_error(compression: Any) -> None:
    source = chunk()
    data = written(source, ChunkForm(page_size=4, num_heads=HEADS, compression=compression))
    for size in [*range(0, data.size, 97), data.size - 1]:
        with pytest.raises(hw.HurrayWireError) as caught:
            read_chunk(data[:size], blank(source), FORM, ABOUT)
        assert isinstance(caught.value, hw.TruncatedError)
        stale = np.concatenate([data[:size], np.zeros(data.size - size, np.uint8)])  # a buffer that is not all written
        if stale.tobytes() != data.tobytes():
            with pytest.raises(hw.HurrayWireError):
                read_chunk(stale, blank(source), FORM, ABOUT)


def test_a_value_that_was_overwritten_half_way_is_two_streams() -> None:
    source = chunk()
    old, new = written(source), written(source)
    frame = hw.inspect(old).total_bytes
    mixed = np.concatenate([new[:frame], old[frame:]])
    with pytest.raises(hw.FrameError) as caught:
        read_chunk(mixed, blank(source), FORM, ABOUT)
    assert (caught.value.code, caught.value.offset is not None) == (Code.STREAM_ID, True)


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_is_an_error(seed: int) -> None:
    source = chunk(tokens=8)
    data = written(source)
    rng = np.random.default_rng(seed)
    for _ in range(40):
        spot, bit = int(rng.integers(data.size)), 1 << int(rng.integers(8))
        data[spot] ^= bit
        with pytest.raises(hw.HurrayWireError):
            read_chunk(data, blank(source), FORM, ABOUT)
        data[spot] ^= bit
    read_chunk(data, blank(source), FORM, ABOUT)


def test_a_newer_version_is_refused() -> None:
    data = newer(written(chunk()))
    with pytest.raises(hw.UnsupportedError) as caught:
        read_chunk(data, blank(chunk()), FORM, ABOUT)
    assert caught.value.code is Code.VERSION


def test_a_bare_item_is_no_chunk() -> None:
    t = next(hw.iter_decode(written(chunk())))
    with pytest.raises(hw.FrameError) as caught:
        read_chunk(hw.encode(t.replace(metadata=None), framing="bare"), blank(chunk()), FORM, ABOUT)
    assert caught.value.code is Code.MAGIC


def test_what_follows_the_stream_is_not_read() -> None:
    source = chunk()
    mine = blank(source)
    read_chunk(np.concatenate([written(source), np.full(500, 0xAB, np.uint8)]), mine, FORM, ABOUT)
    assert same(mine, source)


def test_more_and_fewer_layers_than_there_is_place_for() -> None:
    source = chunk("KV_2TD")
    frames = [hw.encode(t, sequence=i, last=False, stream_id=5) for i, t in enumerate(hw.iter_decode(written(source)))]
    closing = hw.encode(next(hw.iter_decode(written(source))), sequence=2, stream_id=5)
    with pytest.raises(hw.FrameError) as caught:
        read_chunk(b"".join([*frames, closing]), blank(source), FORM, ABOUT)
    assert caught.value.code is Code.LAST
    short = hw.encode(next(hw.iter_decode(written(source))))
    with pytest.raises(hw.TruncatedError) as cut:
        read_chunk(short, blank(source), FORM, ABOUT)
    assert cut.value.code is Code.STREAM_TRUNCATED


@pytest.mark.parametrize("tokens", [8, 10])
@pytest.mark.parametrize("page_size", [1, 2, 5, 16])
def test_a_writer_of_other_pages_in_another_order(page_size: int, tokens: int) -> None:
    """Frames need not come from here: any page size, pages in any order, pages that nobody names."""
    source = chunk("KV_2TD", tokens)
    frames = []
    for i, t in enumerate(hw.iter_decode(written(source))):
        other = hw.ops.paginate(t.gather(0), [tokens], page_size, kv_role=t.kv_role, metadata=t.metadata)
        shuffled = np.random.default_rng(i).permutation(other.num_pages + 3)
        pool = np.full((shuffled.size, *other.page_pool.shape[1:]), 9, other.page_pool.dtype)
        pool[shuffled[: other.num_pages]] = other.page_pool
        moved = other.replace(page_pool=pool, block_table=shuffled[: other.num_pages])
        frames.append(hw.encode(moved, sequence=i, last=i == 1, stream_id=3))
    mine = blank(source)
    read_chunk(b"".join(frames), mine, FORM, ABOUT)
    assert same(mine, source)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_large_planes_land_in_place(compression: Any) -> None:
    source = Chunk("KV_2LTD", [values((2, 1, 1024, 1024))])
    form = ChunkForm(page_size=16, num_heads=8, compression=compression)
    mine = blank(source)
    read_chunk(written(source, form), mine, form, ABOUT)
    assert same(mine, source)
    shuffled = [  # the same pages in another order cannot land as they come
        hw.encode(t.replace(page_pool=t.page_pool[::-1], block_table=np.arange(64)[::-1]), sequence=i, last=i == 1)
        for i, t in enumerate(hw.iter_decode(written(source, form)))
    ]
    mine = blank(source)
    read_chunk(b"".join(shuffled), mine, form, ABOUT)
    assert same(mine, source)


# Room.


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_bound_suffices_for_noise_and_is_close(name: str, compression: Any) -> None:
    form = ChunkForm(page_size=4, num_heads=HEADS, compression=compression)
    like = chunk(name, 64)
    noise = np.frombuffer(np.random.default_rng(3).bytes(like.groups[0].nbytes), np.float16)
    source = like._replace(groups=[noise.reshape(like.groups[0].shape)])
    assert written(source, form).size <= chunk_bound(source, form)
    big = Chunk("KV_2LTD", [np.broadcast_to(np.float16(), (2, 80, 256, 1024))])
    assert chunk_bound(big, ChunkForm(page_size=16, num_heads=8)) < 1.005 * big.groups[0].nbytes


def test_too_small_a_buffer_says_so_and_holds_no_whole_stream() -> None:
    source = chunk()
    whole = written(source).size
    out = np.zeros(whole - 1, np.uint8)
    with pytest.raises(hw.LimitError) as caught:
        write_chunk(source, out, FORM, ABOUT)
    assert (caught.value.code, caught.value.limit, caught.value.claimed) == (Code.FRAME_BYTES, whole - 1, whole)
    with pytest.raises(hw.HurrayWireError):
        read_chunk(out, blank(source), FORM, ABOUT)
    with pytest.raises(hw.LimitError):
        written(source, about={**ABOUT, "lmcache.note": "x" * 4000})
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        write_chunk(source, out, FORM, ABOUT)


@pytest.mark.parametrize("about", [{}, {"lmcache.format": "KV_2LTD"}, {"lmcache.format": "BINARY", "x.y": 1}])
def test_frames_of_no_chunk_are_told(about: Any) -> None:
    t = hw.BlockPagedTensor(np.zeros((1, 4, 1, 8)), block_table=[0], seq_ptr=[0, 1], seq_lens=[4], metadata=about)
    with pytest.raises(hw.FrameError) as caught:
        describe_chunk(hw.encode(t))
    assert caught.value.code is Code.METADATA
    odd: list[Any] = [3, [3], [], [[-1]], [[True]], [[]]]
    for shapes in odd:
        wrong: dict[str, Any] = {"lmcache.format": "KV_2TD", "lmcache.shapes": shapes}
        with pytest.raises(hw.FrameError):
            describe_chunk(hw.encode(t.replace(metadata=wrong)))
