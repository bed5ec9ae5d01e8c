"""Latent rows (MLA): one head, values or bytes; what is planar in its page is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from test_engines_vllm import KEY, pair, refused

import hurray_wire as hw
from hurray_wire import engines
from hurray_wire.errors import Code


def test_k47_latents() -> None:
    mla = np.arange(3 * 4 * 576, dtype="f2").reshape(3, 4, 576)
    for cache in (mla, mla[:, None], mla[:, :, None]):
        latent = engines.from_vllm_latent(cache, [[0, 1, 2]], [10], layer_index=2)
        kv = hw.decode(hw.encode(latent))
        assert (kv.kv_role, kv.layer_index, kv.metadata) == ("fused", 2, {"content": "latent"})
        assert kv.page_pool.shape == (3, 4, 1, 576)
        assert np.array_equal(kv.gather(0), mla.reshape(12, 1, 576)[:10])
        back, table, lens = engines.to_vllm_latent(kv)
        assert np.array_equal(back, mla)
        assert (table.tolist(), lens.tolist()) == ([[0, 1, 2]], [10])
        into = np.zeros((5, *cache.shape[1:]), "f2")
        engines.to_vllm_latent(kv, pool=into, block_table=[[4, 2, 1]])
        assert np.array_equal(into[[4, 2, 1]], cache)
        assert not into[[0, 3]].any()


def test_latents_that_are_not_said_to_be() -> None:
    for shape, code in (((12, 16), Code.RANK), ((3, 4, 2, 8), Code.SHAPE), ((2, 3, 4, 2, 8), Code.RANK)):
        act = lambda s=shape: engines.from_vllm_latent(np.zeros(s, "f2"), [[0]], [1])  # noqa: E731
        assert refused(act) == (code, "cache")
    key, _ = pair()
    assert refused(lambda: engines.to_vllm_latent(key)) == (Code.KV_ROLE, "layout.kv_role")
    both = hw.BlockPagedTensor(
        KEY[:, :, :1], block_table=[0], seq_ptr=[0, 1], seq_lens=[1], kv_role="fused", metadata={"content": "kv"}
    )
    assert refused(lambda: engines.to_vllm_latent(both), hw.UnsupportedError)[0] is Code.LAYOUT


@pytest.mark.parametrize(
    ("name", "width", "kept"),
    [
        ("uint8", 656, None),
        ("fp8_ds_mla", 656, "fp8_ds_mla"),
        ("fp8_ds_mla", 528, "fp8_ds_mla"),
        ("nvfp4_ds_mla", 352, "nvfp4_ds_mla"),
    ],
)
def test_rows_of_several_types_travel_uninterpreted(name: str, width: int, kept: str | None) -> None:
    rows = np.random.default_rng(3).integers(0, 256, (5, 4, width), np.uint8)
    latent = engines.from_vllm_latent(rows, [[3, 1]], [6], dtype=name, scale=1.0)
    kv = hw.decode(hw.encode(latent))
    assert (kv.dtype, kv.head_dim, kv.quantization) == (hw.uint8, width, None)
    assert kv.metadata == {"content": "opaque"} | ({} if kept is None else {"vllm.cache_dtype": kept})
    cache, *_ = engines.to_vllm_latent(kv, pool=np.zeros((5, 4, width), np.uint8), block_table=[[3, 1]])
    assert np.array_equal(cache[[3, 1]], rows[[3, 1]])


@pytest.mark.parametrize(("name", "width"), [("fp8_ds_mla", 584), ("fp8_ds_mla", 576), ("nvfp4_ds_mla", 288)])
def test_rows_whose_scales_stand_elsewhere_are_refused(name: str, width: int) -> None:
    with pytest.raises(hw.UnsupportedError, match="scales follow all of its data") as error:
        engines.from_vllm_latent(np.zeros((5, 4, width), np.uint8), [[3, 1]], [6], dtype=name)
    assert (error.value.code, error.value.where) == (Code.LAYOUT, "dtype")


def test_latents_of_fp8_have_one_scale() -> None:
    rows = np.ones((5, 4, 576), ml_dtypes.float8_e4m3fn)
    latent = engines.from_vllm_latent(rows.view(np.uint8), [[3, 1]], [6], dtype="fp8", scale=0.5, out=bytearray(9999))
    assert latent.quantization == hw.PerTensorAffine(0.5)
    assert (latent.dequantize(0) == 0.5).all()
    assert refused(lambda: engines.from_vllm_latent(rows.view(np.uint8), [[3]], [1]), hw.UnsupportedError) == (
        Code.DTYPE,
        "dtype",
    )
