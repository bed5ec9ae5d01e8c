"""torch tensors: CPU memory through integer views, and the calls that a device would be asked to make.

No test here runs on a device. `as_device` makes CPU tensors take the path of those that are elsewhere, so that its
torch calls run and its results are compared; what it cannot show is how a device's kernels and transfers behave.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_engines_layouts import LAYOUTS, Geometry, engine_cache, layer_of, numbered

import hurray_wire as hw
from hurray_wire import engines
from hurray_wire.engines import axes as axes_room
from hurray_wire.engines import device, lmcache, sglang, trtllm, vllm
from hurray_wire.engines import transformers as transformers_room
from hurray_wire.errors import Code

torch = pytest.importorskip("torch")

GEOMETRY = Geometry(6, 4, 2, 8)
KEY, VALUE = numbered(GEOMETRY), numbered(GEOMETRY, -1)
ROWS, LENS = [[4, 1, -1], [1, 99, 5]], [7, 3]
WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@pytest.fixture
def as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every torch tensor counts as one outside the CPU's memory."""
    for room in (axes_room, vllm, sglang, trtllm, transformers_room):
        monkeypatch.setattr(room, "on_device", lambda x: isinstance(x, torch.Tensor))


def tensors(cache: Any) -> Any:
    return torch.from_numpy(cache) if isinstance(cache, np.ndarray) else tuple(map(torch.from_numpy, cache))


@pytest.mark.parametrize("dtype", WIDTHS)
def test_cpu_tensors_are_memory(dtype: str) -> None:
    cache = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 6, 4, 2, 8))).to(getattr(torch, dtype))
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[WIDTHS[dtype]]
    table = torch.tensor(ROWS, dtype=torch.int32)
    lens = torch.tensor(LENS, dtype=torch.int32)
    pair = engines.from_vllm(cache, table, lens, axes="2PSHD")
    for t, plain in zip(pair, cache.view(integer).numpy(), strict=True):
        assert t.dtype is hw.Dtype.of(getattr(torch, dtype))
        assert t.page_pool.tobytes() == plain[[4, 1]].tobytes()
    whole = engines.from_vllm(cache, table, lens, axes="2PSHD", pages="all")
    assert whole[1].page_pool.__array_interface__["data"][0] == cache[1].data_ptr()
    into = torch.zeros(2, 3, 4, 2, 8).to(getattr(torch, dtype))
    back, *_ = engines.to_vllm(*pair, axes="2PSHD", pool=into, block_table=torch.tensor([[2, 0], [0, 1]]))
    assert back is into
    assert torch.equal(into.view(integer)[:, [2, 0]], cache.view(integer)[:, [4, 1]])
    out = [torch.empty(2 * 4 * 2 * 8, dtype=getattr(torch, dtype)) for _ in range(2)]
    again = engines.from_vllm(cache, table, lens, axes="2PSHD", out=out)
    assert again == pair
    assert again[0].page_pool.__array_interface__["data"][0] == out[0].data_ptr()


@pytest.mark.usefixtures("as_device")
@pytest.mark.parametrize("pages", ["live", "all"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_path_of_a_device_gives_the_same(name: str, pages: str) -> None:
    axes = LAYOUTS[name]
    cache = engine_cache(axes, KEY, VALUE)
    options: dict[str, Any] = {"axes": axes, "layer_index": layer_of(axes), "pages": pages}
    expected = engines.from_vllm(cache, ROWS, LENS, **options)
    got = engines.from_vllm(tensors(cache), torch.tensor(ROWS), torch.tensor(LENS), **options)
    assert got == expected
    out = [np.zeros(KEY.nbytes, np.uint8), torch.zeros(KEY.size)]
    assert engines.from_vllm(tensors(cache), ROWS, LENS, out=out, **options) == expected
    assert bytes(out[0][: expected[0].page_pool.nbytes]) == expected[0].page_pool.tobytes()


@pytest.mark.usefixtures("as_device")
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_path_into_a_device_gives_the_same(name: str) -> None:
    axes = LAYOUTS[name]
    source = engines.from_vllm((KEY, VALUE), ROWS, LENS, axes="PSHD", layer_index=1)
    mine, theirs = (engine_cache(axes, KEY * 0, VALUE * 0) for _ in range(2))
    engines.to_vllm(*source, axes=axes, pool=mine, block_table=[[0, 3], [3]])
    pool = tensors(theirs)
    back, table, _ = engines.to_vllm(*source, axes=axes, pool=pool, block_table=torch.tensor([[0, 3], [3, 7]]))
    assert back is pool
    assert table.tolist() == [[0, 3], [3, 0]]
    pairs = [(mine, theirs)] if isinstance(mine, np.ndarray) else zip(mine, theirs, strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.usefixtures("as_device")
def test_the_other_engines_on_that_path() -> None:
    pool = np.arange(5 * 3 * 2 * 64, dtype=np.float16).reshape(5, 3, 2, 64)
    options: dict[str, Any] = {"layer": 1, "num_heads": 2, "page_size": 4}
    got = engines.from_trtllm(torch.from_numpy(pool), [[4, 1]], [7], **options)
    assert got == engines.from_trtllm(pool, [[4, 1]], [7], **options)
    mine = torch.zeros(5, 3, 2, 64, dtype=torch.float16)
    engines.to_trtllm(*got, pool=mine, layer=2, block_table=[[0, 3]])
    assert np.array_equal(mine[[0, 3], 2].numpy(), pool[[4, 1], 1])

    rows = np.arange(24 * 6, dtype=np.float32).reshape(24, 2, 3)
    requests = np.array([[0] * 6, [8, 9, 10, 11, 20, 21]], np.int32)
    expected = engines.from_sglang(rows, -rows, requests, [1], [6], page_size=4)
    pools = torch.from_numpy(rows), torch.from_numpy(-rows)
    ids, lens = torch.tensor([1]), torch.tensor([6])
    assert engines.from_sglang(*pools, torch.from_numpy(requests), ids, lens, page_size=4) == expected
    theirs = torch.zeros(12, 2, 3), torch.zeros(12, 2, 3)
    engines.to_sglang(*expected, key_pool=theirs[0], value_pool=theirs[1], page_ids=torch.tensor([2, 1]))
    assert np.array_equal(theirs[0][8:].numpy(), rows[8:12])

    latents = np.arange(3 * 4 * 8, dtype=np.float16).reshape(3, 4, 8)
    expected_latent = engines.from_vllm_latent(latents, [[2, 0]], [5])
    for view in (torch.from_numpy(latents), torch.from_numpy(latents)[:, None]):
        assert engines.from_vllm_latent(view, [[2, 0]], [5]) == expected_latent
    cache = torch.zeros(4, 4, 8, dtype=torch.float16)
    engines.to_vllm_latent(expected_latent, pool=cache, block_table=[[3, 1]])
    assert np.array_equal(cache[[3, 1]].numpy(), latents[[2, 0]])


@pytest.mark.parametrize("dtype", [*WIDTHS, "float64"])
def test_pages_move_as_integers(dtype: str) -> None:
    kind = getattr(torch, dtype)
    pool = torch.arange(5 * 2 * 3 * 4).reshape(5, 2, 3, 4).to(kind)
    view = pool.permute(0, 2, 1, 3)
    element = hw.Dtype.of(kind).numpy
    out = np.empty((2, 3, 2, 4), element)
    device.fetch_pages(view, np.array([4, 1]), out)
    expected = np.ascontiguousarray(hw.from_torch(pool).swapaxes(1, 2)[[4, 1]])
    assert out.tobytes() == expected.tobytes()
    device.store_pages(view, np.array([0, 2]), out)
    assert hw.from_torch(pool)[[0, 2]].tobytes() == hw.from_torch(pool)[[4, 1]].tobytes()


def test_scales_and_names_of_torch() -> None:
    cache = torch.zeros(2, 6, 4, 2, 8, dtype=torch.uint8)
    scale = torch.tensor(0.5)
    key, value = engines.from_vllm(cache, [[4]], [1], axes="2PSHD", dtype=torch.float8_e4m3fn, key_scale=scale)
    assert (key.quantization, value.quantization) == (hw.PerTensorAffine(0.5), None)
    with pytest.raises(TypeError, match=r"not \(2,\)"):
        engines.from_vllm(cache, [[4]], [1], axes="2PSHD", dtype="fp8", key_scale=torch.ones(2))
    with pytest.raises(hw.UnsupportedError, match="fnuz") as error:
        engines.from_vllm(cache.view(torch.float8_e4m3fnuz), [[4]], [1], axes="2PSHD")
    assert error.value.code is Code.DTYPE


def test_lmcache_chunks_of_torch() -> None:
    chunk = torch.arange(2 * 3 * 7 * 10).reshape(2, 3, 7, 10).to(torch.bfloat16)
    layers = lmcache.from_lmcache([chunk[:, :, :4], chunk[:, :, 4:]], num_heads=2, page_size=4)
    assert layers[0][0].dtype is hw.bfloat16
    back = engines.to_lmcache(layers)
    assert torch.equal(hw.to_torch(back[0]), chunk)
