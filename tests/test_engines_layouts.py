"""Every axis order against a definition in plain loops, both ways; orders are given, never guessed.

`engine_cache` puts one element at a time where an order's letters say, and is all that the other engine tests lean on.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hurray_wire as hw
from hurray_wire import engines
from hurray_wire.engines import copying
from hurray_wire.errors import Code

Array = npt.NDArray[Any]
Axes = str | tuple[str, str]

LAYOUTS: dict[str, Axes] = {
    "kv_first": engines.VLLM_KV_FIRST,
    "blocks_first": engines.VLLM_BLOCKS_FIRST,
    "diffkv": engines.VLLM_DIFFKV,
    "packed": engines.VLLM_PACKED,
    "LBHNC": engines.VLLM_LBHNC,
    "LBNHC": engines.VLLM_LBNHC,
    "LHBNC": engines.VLLM_LHBNC,
    "BLHNC": engines.VLLM_BLHNC,
    "BLNHC": engines.VLLM_BLNHC,
    "BHLNC": engines.VLLM_BHLNC,
    "v0": engines.VLLM_V0,
    "cpu": engines.VLLM_CPU,
    "aiter": ("PHDSX", "PHSDX"),
    "flashinfer_nhd": engines.FLASHINFER_NHD,
    "flashinfer_hnd": engines.FLASHINFER_HND,
    "sglang": engines.SGLANG,
    "sglang_hnd": "PHSD",
    "trtllm": engines.TRTLLM,
    "kv_after_slots": "PS2HD",
}
SIDED = [name for name, axes in LAYOUTS.items() if not isinstance(axes, str)]
LAYERED = [name for name, axes in LAYOUTS.items() if "L" in axes]
PACK = 4  # of float32: 16 bytes
LAYERS, LAYER = 3, 1
POISON = 12345.0


class Geometry(NamedTuple):
    pages: int
    slots: int
    heads: int
    dims: int


GEOMETRIES = [
    Geometry(7, 8, 3, 4),
    Geometry(7, 4, 4, 4),  # slots, heads and dims alike: the shape says nothing
    Geometry(2, 4, 2, 8),  # two of everything that a key/value axis could be
    Geometry(5, 4, 1, 4),
]


def numbered(g: Geometry, sign: int = 1) -> Array:
    """`[pages, slots, heads, dims]`, every element another; values are negative keys, less 1."""
    plain = np.arange(g.pages * g.slots * g.heads * g.dims, dtype=np.float32).reshape(g)
    return plain if sign > 0 else -plain - 1


def place(order: str, position: dict[str, int], dims: int, key_dim: int, *, is_value: bool) -> tuple[int, ...]:
    """Where an element (p, s, h, d) of keys or values stands in an array of an order: the definition of the letters."""
    at = dict(position)
    at["2"] = int(is_value)
    at["C"] = key_dim + at["D"] if is_value else at["D"]
    at["L"] = LAYER
    if order.endswith("SX"):  # the dim in packs
        at["D"], at["X"] = divmod(at["D"], PACK)
    elif order.endswith("DX"):  # the slots in packs
        at["S"], at["X"] = divmod(at["S"], PACK)
    return tuple(at[letter] for letter in order)


def shape(order: str, g: Geometry, width: int) -> tuple[int, ...]:
    sizes = {"P": g.pages, "S": g.slots, "H": g.heads, "D": g.dims, "C": width, "2": 2, "L": LAYERS, "X": PACK}
    if order.endswith("SX"):
        sizes["D"] //= PACK
    elif order.endswith("DX"):
        sizes["S"] //= PACK
    return tuple(sizes[letter] for letter in order)


def engine_cache(axes: Axes, key: Array, value: Array, fill: float = POISON) -> Any:
    """An engine's cache of an order, element by element."""
    single = isinstance(axes, str) and ("2" in axes or "C" in axes)
    orders = (axes, axes) if isinstance(axes, str) else axes
    caches = []
    for order, array in zip(orders, (key, value), strict=True):
        g = Geometry(*array.shape)
        caches.append(np.full(shape(order, g, key.shape[3] + value.shape[3]), fill, array.dtype))
    if single:
        caches[1] = caches[0]
    for order, array, cache, is_value in zip(orders, (key, value), caches, (False, True), strict=True):
        for p, s, h, d in itertools.product(*map(range, array.shape)):
            position = {"P": p, "S": s, "H": h, "D": d}
            cache[place(order, position, array.shape[3], key.shape[3], is_value=is_value)] = array[p, s, h, d]
    return caches[0] if single else (caches[0], caches[1])


def tokens(pool: Array, row: list[int], length: int) -> list[list[Any]]:
    """A sequence's tokens, read by the format's definition: slot t % page_size of page row[t // page_size]."""
    size = pool.shape[1]
    return [pool[row[t // size], t % size].tolist() for t in range(length)]


def layer_of(axes: Axes) -> int | None:
    return LAYER if "L" in axes else None


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_reads_what_the_letters_say(name: str, geometry: Geometry) -> None:
    axes = LAYOUTS[name]
    key, value = numbered(geometry), numbered(geometry, -1)
    cache = engine_cache(axes, key, value)
    last = geometry.pages - 1
    rows = [[last, 0], [0, last], [last, -1]]
    lens = [2 * geometry.slots - 1, geometry.slots + 1, 1]
    got = engines.from_vllm(cache, rows, lens, axes=axes, layer_index=layer_of(axes))
    for tensor, plain, role in zip(got, (key, value), ("key", "value"), strict=True):
        assert (tensor.kv_role, tensor.layer_index, tensor.num_pages) == (role, layer_of(axes), 2)
        assert tensor.block_table.tolist() == [0, 1, 1, 0, 0]
        assert tensor.seq_ptr.tolist() == [0, 2, 4, 5]
        assert tensor.page_pool.flags.c_contiguous
        for seq, (row, length) in enumerate(zip(rows, lens, strict=True)):
            assert tensor.gather(seq).tolist() == tokens(plain, row, length)


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_pages_keep_their_ids_and_are_a_view_where_nothing_is_packed(name: str) -> None:
    axes = LAYOUTS[name]
    key, value = numbered(GEOMETRIES[0]), numbered(GEOMETRIES[0], -1)
    cache = engine_cache(axes, key, value)
    pair = engines.from_vllm(cache, [[6, 2]], [9], axes=axes, layer_index=layer_of(axes), pages="all")
    for tensor, plain, i in zip(pair, (key, value), (0, 1), strict=True):
        assert tensor.block_table.tolist() == [6, 2]
        assert np.array_equal(tensor.page_pool, plain)
        own = cache if isinstance(cache, np.ndarray) else cache[i]
        order = axes if isinstance(axes, str) else axes[i]
        assert np.shares_memory(tensor.page_pool, own) == ("X" not in order)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_writes_what_the_letters_say(name: str, geometry: Geometry) -> None:
    axes = LAYOUTS[name]
    pools = numbered(geometry), numbered(geometry, -1)
    rows, lens = [[1, 0], [0]], [geometry.slots + 1, geometry.slots]
    source = engines.from_vllm(pools, rows, lens, axes="PSHD", layer_index=LAYER)
    expected = [np.full(geometry, POISON, np.float32) for _ in pools]
    for page, plain in itertools.product((0, 1), zip(expected, pools, strict=True)):
        plain[0][1 - page] = plain[1][page]  # the receiver's rows below turn the two round
    blank_pool = np.full(geometry, POISON, np.float32)
    blank = engine_cache(axes, blank_pool, blank_pool)
    back = engines.to_vllm(*source, axes=axes, pool=blank, block_table=[[0, 1], [1]])
    wanted = engine_cache(axes, expected[0], expected[1])
    assert back[0] is blank
    assert all(map(np.array_equal, _arrays(back[0]), _arrays(wanted)))
    assert (back[1].tolist(), back[2].tolist()) == ([[0, 1], [1, 0]], lens)
    assert back[1].dtype == back[2].dtype == np.int32
    again = engines.from_vllm(back[0], back[1], back[2], axes=axes, layer_index=LAYER)
    assert all(map(hw.BlockPagedTensor.same_tokens, again, source))


@pytest.mark.parametrize("name", sorted(set(LAYOUTS) - set(LAYERED)))
def test_a_new_cache_keeps_ids_and_is_zero_elsewhere(name: str) -> None:
    axes, geometry = LAYOUTS[name], GEOMETRIES[0]
    key, value = numbered(geometry), numbered(geometry, -1)
    pair = engines.from_vllm((key, value), [[5, 1]], [12], axes="PSHD", pages="all")
    cache, table, lens = engines.to_vllm(*pair, axes=axes)
    for plain in (key, value):
        plain[[0, 2, 3, 4, 6]] = 0
    assert all(map(np.array_equal, _arrays(cache), _arrays(engine_cache(axes, key, value, 0))))
    assert (table.tolist(), lens.tolist()) == ([[5, 1]], [12])
    cache, table, _ = engines.to_vllm(*pair, axes=axes, block_table=[[3, 2]])
    assert [a.shape[order.index("P")] for a, order in _sided(cache, axes)] == [4] * len(_arrays(cache))
    assert table.tolist() == [[3, 2]]


def _arrays(cache: Any) -> list[Array]:
    return [cache] if isinstance(cache, np.ndarray) else list(cache)


def _sided(cache: Any, axes: Axes) -> list[tuple[Array, str]]:
    arrays = _arrays(cache)
    orders = [axes] * len(arrays) if isinstance(axes, str) else list(axes)
    return list(zip(arrays, orders, strict=True))


# vLLM 0.33: one buffer, six physical orders of the logical axes (L, B, H, N, C).

STRIDE_ORDERS = {  # vllm/v1/kv_cache_layout.py
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


@pytest.mark.parametrize("name", STRIDE_ORDERS)
def test_the_physical_orders_and_the_logical_view_say_the_same(name: str) -> None:
    sizes = (LAYERS, 5, 2, 4, 6)
    order = STRIDE_ORDERS[name]
    physical = np.arange(np.prod(sizes), dtype=np.float32).reshape([sizes[axis] for axis in order])
    logical = np.empty(sizes, np.float32)
    for at in itertools.product(*map(range, sizes)):
        logical[at] = physical[tuple(at[axis] for axis in order)]
    whole = engines.from_vllm(physical, [[4, 2]], [7], axes=getattr(engines, f"VLLM_{name}"), layer_index=2)
    strided = physical.transpose(np.argsort(order))[2]  # the view that a layer gets: strides tell the order
    layer = engines.from_vllm(strided, [[4, 2]], [7], axes=engines.VLLM_PACKED, layer_index=2)
    assert whole == layer
    for t in range(7):
        page, slot = (4, 2)[t // 4], t % 4
        assert layer[0].gather(0)[t].tolist() == logical[2, page, :, slot, :3].tolist()
        assert layer[1].gather(0)[t].tolist() == logical[2, page, :, slot, 3:].tolist()


# Cases from public reports.


def test_a1_heads_and_slots_are_not_exchanged() -> None:
    nhd = np.arange(72, dtype="f4").reshape(3, 4, 2, 3)
    hnd = np.ascontiguousarray(nhd.transpose(0, 2, 1, 3))
    a = engines.from_vllm((nhd, nhd), [[0, 1, 2]], [12], axes="PSHD")
    b = engines.from_vllm((hnd, hnd), [[0, 1, 2]], [12], axes="PHSD")
    assert [hw.encode(t) for t in a] == [hw.encode(t) for t in b]
    assert np.array_equal(hw.decode(hw.encode(b[0])).page_pool, nhd)
    assert b[0].page_pool[1, 2, 1, 0] == 39.0
    (cache, _), *_ = engines.to_vllm(*a, axes="PHSD")
    assert np.array_equal(cache, hnd)
    square = np.arange(8, dtype="f4").reshape(2, 2, 2, 1)
    with pytest.raises(TypeError):
        engines.from_vllm((square, square), [[0, 1]], [4])  # type: ignore[call-arg]
    for axes, pool in (("PSHD", square), ("PHSD", square.transpose(0, 2, 1, 3))):
        assert np.array_equal(engines.from_vllm((square, square), [[0, 1]], [4], axes=axes)[0].page_pool, pool)


def test_a3_keys_and_values_side_by_side_are_not_taken_for_heads() -> None:
    k = np.arange(48, dtype="f4").reshape(2, 4, 2, 3)
    v = -k - 1
    packed = np.concatenate([k, v], -1)
    key, value = engines.from_vllm(packed, [[0, 1]], [8], axes="PSHC")
    assert np.array_equal(key.page_pool, k)
    assert np.array_equal(value.page_pool, v)
    assert (key.page_pool[1, 3, 1, 2], value.page_pool[1, 3, 1, 2]) == (47.0, -48.0)
    fused = hw.BlockPagedTensor(packed, block_table=[0, 1], seq_ptr=[0, 2], seq_lens=[8], kv_role="fused")
    assert fused.head_dim == 6
    assert hw.decode(hw.encode(fused)) == fused
    with pytest.raises(ValueError, match="pair"):
        engines.from_vllm(packed, [[0, 1]], [8], axes="PSHD")


def test_unequal_dims_split_where_the_caller_says() -> None:
    g = Geometry(3, 4, 2, 5)
    key, value = numbered(g), numbered(Geometry(3, 4, 2, 2), -1)
    for axes in ("PHSC", "PSHC"):
        cache = engine_cache(axes, key, value)
        got = engines.from_vllm(cache, [[2, 1]], [6], axes=axes, key_dim=5)
        assert np.array_equal(got[0].page_pool, key[[2, 1]])
        assert np.array_equal(got[1].page_pool, value[[2, 1]])
        back, *_ = engines.to_vllm(*got, axes=axes, block_table=[[2, 1]])
        cache[0] = 0
        assert np.array_equal(back, cache)
        with pytest.raises(hw.InvalidDescriptorError, match="7 wide") as error:
            engines.from_vllm(cache, [[2, 1]], [6], axes=axes)
        assert (error.value.code, error.value.where) == (Code.SHAPE, "key_dim")
        with pytest.raises(hw.InvalidDescriptorError, match="is 8") as error:
            engines.from_vllm(cache, [[2, 1]], [6], axes=axes, key_dim=8)
        assert error.value.where == "key_dim"
    with pytest.raises(hw.InvalidDescriptorError, match="head_dim") as error:
        engines.to_vllm(*got, axes="2PSHD")
    assert error.value.where == "value.head_dim"


FIVE = np.zeros((2, 3, 4, 2, 8), np.float32)


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        ("NB2SHD", "unknown letters B, N"),
        ("2PSHDD", r"names D \(dim\) twice"),
        ("2PSH", "must have D, D and 2, or C alone"),
        ("2PSHC", "must have D, D and 2, or C alone"),
        ("2PSDX", r"lacks H \(head\)"),
        ("XPSHD", "X stands last"),
        ("PSHCX", "X stands last"),
        ("", "must have D"),
        ("P2SHDL", "names 6 axes, cache has 5"),
        ("PHSC", "names 4 axes, cache has 5"),
        (("2PSHD", "2PSHD"), "not of one of a pair"),
        (("PSHD", "PSHD"), "pair of arrays"),
        ("LPSHD", "pair of arrays"),
    ],
)
def test_axes_that_are_none_are_named(axes: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told) as error:
        engines.from_vllm(FIVE, [[0]], [1], axes=axes, layer_index=0)
    assert not isinstance(error.value, hw.HurrayWireError)


@pytest.mark.parametrize("axes", [None, 5, ("PSHD",) * 3, (b"PSHD", b"PSHD"), ()])
def test_axes_of_another_type(axes: Any) -> None:
    with pytest.raises(TypeError, match="axes must be letters"):
        engines.from_vllm(FIVE, [[0]], [1], axes=axes)


def test_what_does_not_belong_together() -> None:
    pool = np.zeros((3, 4, 2, 8), np.float32)
    with pytest.raises(ValueError, match="'2PSHD' is of one array"):
        engines.from_vllm((pool, pool), [[0]], [1], axes="2PSHD")
    with pytest.raises(ValueError, match="key_dim says where C splits"):
        engines.from_vllm(FIVE, [[0]], [1], axes="2PSHD", key_dim=4)
    with pytest.raises(TypeError, match="say which, with layer_index"):
        engines.from_vllm(FIVE, [[0]], [1], axes="LPSHC")
    with pytest.raises(TypeError, match="give the pool"):
        engines.to_vllm(*engines.from_vllm(FIVE, [[0]], [1], axes="2PSHD"), axes="LPSHC")
    cases: list[tuple[Any, str, str, Code]] = [
        (FIVE, "P2SHD", "cache", Code.SHAPE),
        ((pool, pool[:2]), "PSHD", "value_cache", Code.NUM_PAGES),
        ((pool, pool[:, :2]), "PSHD", "value_cache", Code.PAGE_SIZE),
        (FIVE, "LPSHC", "layer_index", Code.LAYER_INDEX),
        (np.zeros((2, 3, 0, 2, 8), np.float32), "2PSHD", "cache", Code.PAGE_SIZE),
    ]
    for cache, axes, where, code in cases:
        with pytest.raises(hw.InvalidDescriptorError) as error:
            engines.from_vllm(cache, [[0]], [1], axes=axes, layer_index=9)
        assert (error.value.where, error.value.code) == (where, code)


# The copies themselves, over any strides.


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...], fill: int) -> Array:
    """An array of a shape whose axes lie in any order, with gaps, in larger memory."""
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.integers(0, 2)) for _ in shape]
    memory = np.full([shape[axis] + gap for axis, gap in zip(order, gaps, strict=True)], fill, np.int16)
    return memory[tuple(slice(0, shape[axis]) for axis in order)].transpose(np.argsort(order))


@given(st.data())
def test_pages_are_copied_over_any_strides(data: st.DataObject) -> None:
    inner = tuple(data.draw(st.sampled_from([1, 1, 2, 3])) for _ in range(data.draw(st.integers(1, 4))))
    source, target = data.draw(strided((5, *inner), 0)), data.draw(strided((6, *inner), -1))
    source[...] = np.arange(source.size).reshape(source.shape)
    count = data.draw(st.integers(0, 5))
    sources = data.draw(st.none() | st.just(np.array([4, 4, 0, 2, 1])[:count]))
    targets = data.draw(st.none() | st.just(np.array([3, 0, 5, 1, 2])[:count]))
    expected = target.copy()
    for i in range(count):
        expected[i if targets is None else targets[i]] = source[i if sources is None else sources[i]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_LARGE_PAGE", data.draw(st.sampled_from([1, 1 << 20])))
        patch.setattr(copying, "_TEMPORARY_BYTES", data.draw(st.sampled_from([1, 40, 1 << 20])))
        copying.copy_pages([copying.PageCopy(source, target)], count, sources, targets)
    assert np.array_equal(target, expected)
    memory = target if target.base is None else target.base
    assert np.count_nonzero(memory == -1) == memory.size - target.size + np.count_nonzero(target == -1)
