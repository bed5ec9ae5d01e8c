"""transformers: what the mask says is what travels, and a model goes on from it as if nothing had happened."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hurray_wire as hw
from hurray_wire import engines
from hurray_wire.errors import Code

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
cache_utils = pytest.importorskip("transformers.cache_utils")

Pair = tuple[hw.BlockPagedTensor, hw.BlockPagedTensor]

HEADS, DIM, LAYERS = 2, 4, 3
LEFT = [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]
RIGHT = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]


def states(batch: int, tokens: int, seed: int = 0, dtype: Any = None) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, HEADS, tokens, DIM, generator=generator).to(dtype or torch.float32)


def dynamic(batch: int = 3, tokens: int = 5, dtype: Any = None) -> Any:
    cache = transformers.DynamicCache()
    for layer in range(LAYERS):
        cache.update(states(batch, tokens, 2 * layer, dtype), states(batch, tokens, 2 * layer + 1, dtype), layer)
    return cache


def kept(cache: Any, layer: int) -> tuple[Any, Any]:
    if hasattr(cache, "layers"):
        return cache.layers[layer].keys, cache.layers[layer].values
    return cache.key_cache[layer], cache.value_cache[layer]


def sent_over(layers: list[Pair]) -> list[Pair]:
    return [(hw.decode(hw.encode(key)), hw.decode(hw.encode(value))) for key, value in layers]


def sliding(window: int, batch: int, tokens: int) -> Any:
    kind = getattr(cache_utils, "DynamicSlidingWindowLayer", None)
    if kind is None:
        pytest.skip("no sliding layers in this version's DynamicCache")
    cache = transformers.DynamicCache()
    cache.layers.append(kind(sliding_window=window))
    cache.update(states(batch, tokens, 0), states(batch, tokens, 1), 0)
    cache.update(states(batch, tokens, 2), states(batch, tokens, 3), 1)
    return cache


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("mask", [LEFT, RIGHT], ids=["left", "right"])
def test_padding_stays_behind(mask: list[list[int]], page_size: int) -> None:
    cache = dynamic()
    layers = engines.from_transformers(cache, torch.tensor(mask), page_size=page_size, metadata={"model": "tiny"})
    assert len(layers) == LAYERS
    for i, pair in enumerate(layers):
        for t, plain in zip(pair, kept(cache, i), strict=True):
            assert (t.layer_index, t.page_size, t.metadata) == (i, page_size, {"model": "tiny"})
            assert t.seq_lens is not None
            assert t.seq_lens.tolist() == [3, 5, 0]
            for seq, row in enumerate(mask):
                columns = [c for c, held in enumerate(row) if held]
                expected = [plain[seq, :, c].tolist() for c in columns]
                assert t.gather(seq).tolist() == expected
            unused = np.ones(t.num_pages * page_size, bool)
            unused[t.token_slots()] = False
            assert not t.page_pool.reshape(-1, HEADS, DIM)[unused].any()


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_round_trips(padding: str, dtype: str) -> None:
    cache = dynamic(dtype=getattr(torch, dtype))
    layers = engines.from_transformers(cache, torch.tensor(LEFT), page_size=2)
    sent = sent_over(layers)
    back, mask = engines.to_transformers(sent, padding=padding)
    assert isinstance(back, transformers.DynamicCache)
    assert mask.tolist() == (LEFT if padding == "left" else RIGHT)
    assert int(back.get_seq_length()) == 5
    for i in range(LAYERS):
        for mine, theirs in zip(kept(back, i), kept(cache, i), strict=True):
            assert mine.dtype == theirs.dtype
            assert mine.shape == theirs.shape
            for seq, row in enumerate(LEFT):
                held = mask[seq].bool()
                assert torch.equal(mine[seq][:, held], theirs[seq][:, torch.tensor(row).bool()])
                assert not mine[seq][:, ~held].any()
    assert engines.from_transformers(back, mask, page_size=2) == layers


@pytest.mark.parametrize(
    "mask",
    [None, np.ones((2, 4), np.int64), [[True] * 4] * 2, torch.ones(2, 4)],
    ids=["none", "numpy", "list", "float"],
)
def test_masks_of_any_kind(mask: Any) -> None:
    (key, _), *_ = engines.from_transformers(dynamic(2, 4), mask, page_size=4)
    assert key.seq_lens is not None
    assert key.seq_lens.tolist() == [4, 4]


@pytest.mark.parametrize(
    ("mask", "kind", "code", "where"),
    [
        ([[1, 0, 1, 1], [1, 1, 1, 1]], hw.UnsupportedError, Code.LAYOUT, "attention_mask[0, 1]"),
        ([[1, 1, 1, 1], [0, 1, 1, 0]], None, None, None),
        ([[1, 1, 1], [1, 1, 1]], hw.InvalidDescriptorError, Code.SHAPE, "attention_mask"),
        ([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]], hw.InvalidDescriptorError, Code.SHAPE, "attention_mask"),
        ([[1, 1, 1, 1]], hw.InvalidDescriptorError, Code.SHAPE, "attention_mask"),
        ([1, 1, 1, 1], hw.InvalidDescriptorError, Code.RANK, "attention_mask"),
        ([[1, 1, 2, 1], [1, 1, 1, 1]], hw.InvalidDescriptorError, Code.RANK, "attention_mask"),
        ([[0.0, -1e4, 0, 0]] * 2, hw.InvalidDescriptorError, Code.RANK, "attention_mask"),
    ],
)
def test_masks_that_say_something_else(mask: Any, kind: Any, code: Any, where: Any) -> None:
    if kind is None:  # padding on both sides is no hole
        (key, _), *_ = engines.from_transformers(dynamic(2, 4), mask, page_size=4)
        assert key.seq_lens is not None
        assert key.seq_lens.tolist() == [4, 2]
        return
    with pytest.raises(kind) as error:
        engines.from_transformers(dynamic(2, 4), mask, page_size=4)
    assert (error.value.code, error.value.where) == (code, where)


def test_dims_of_keys_and_values_may_differ() -> None:
    cache = transformers.DynamicCache()  # DeepSeek's latents in 5.24: 512 beside 64
    latent, rope = torch.randn(2, 1, 3, 16), torch.randn(2, 1, 3, 4)
    cache.update(latent, rope, 0)
    [(key, value)] = engines.from_transformers(cache, [[0, 1, 1], [1, 1, 1]], page_size=2)
    assert (key.head_dim, value.head_dim) == (16, 4)
    back, mask = engines.to_transformers([(key, value)])
    assert torch.equal(kept(back, 0)[1][1], rope[1])
    assert mask.tolist() == [[0, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("tokens", [2, 3, 4, 9])
def test_sliding_layers_keep_their_window(tokens: int) -> None:
    cache = sliding(4, 2, tokens)
    mask = [[0] + [1] * (tokens - 1), [1] * tokens]
    layers = engines.from_transformers(cache, mask, page_size=2)
    columns = min(tokens, 3)
    gone = [max(0, tokens - 1 - 3), max(0, tokens - 3)]
    key = layers[0][0]
    assert key.metadata == {"first_tokens": gone, "transformers.sliding_window": 4}
    assert layers[1][0].metadata is None
    assert key.seq_lens is not None
    assert key.seq_lens.tolist() == [min(tokens - 1, columns if tokens > 3 else tokens - 1), columns]
    assert np.array_equal(key.gather(1), cache.layers[0].keys[1].numpy().swapaxes(0, 1))
    sent = sent_over(layers)
    back, theirs = engines.to_transformers(sent)
    assert theirs.tolist() == mask
    assert type(back.layers[0]) is type(cache.layers[0])
    assert int(back.layers[0].get_seq_length()) == int(back.layers[1].get_seq_length()) == tokens
    assert torch.equal(back.layers[0].keys[1], cache.layers[0].keys[1])
    for layer in (back, cache):
        layer.update(states(2, 1, 7), states(2, 1, 8), 0)
    assert torch.equal(back.layers[0].keys[1], cache.layers[0].keys[1])
    assert int(back.layers[0].get_seq_length()) == tokens + 1


def test_a_window_for_another_padding_is_refused() -> None:
    right = [[1] * 7 + [0] * 2, [1] * 9]
    layers = engines.from_transformers(sliding(4, 2, 9), right, page_size=2)
    assert layers[0][0].metadata == {"first_tokens": [6, 6], "transformers.sliding_window": 4}
    back, mask = engines.to_transformers(layers, padding="right")
    assert mask.tolist() == right
    assert torch.equal(back.layers[0].keys[0, :, :1], sliding(4, 2, 9).layers[0].keys[0, :, :1])
    with pytest.raises(hw.UnsupportedError, match="sequence 0 begins at token 6") as error:
        engines.to_transformers(layers, padding="left")
    assert (error.value.code, error.value.where) == (Code.LAYOUT, "metadata.first_tokens[0]")


def test_what_is_no_dynamic_cache() -> None:
    others: list[Any] = [None, {}, [states(1, 1)], SimpleNamespace(key_cache=[], value_cache=[])]
    for cache in others:
        with pytest.raises(TypeError, match="DynamicCache is needed"):
            engines.from_transformers(cache, None, page_size=4)
    with pytest.raises(
        hw.InvalidDescriptorError, match=r"no layers|holds no keys"
    ):  # 4.54 begins with one that is empty
        engines.from_transformers(transformers.DynamicCache(), None, page_size=4)
    with pytest.raises(hw.InvalidDescriptorError) as error:
        engines.from_transformers(dynamic(), torch.tensor(LEFT), page_size=0)
    assert error.value.code is Code.PAGE_SIZE


class DynamicLayer:
    """A stand-in, so that odd layers need no version of transformers that has them."""

    def __init__(self, keys: Any, values: Any) -> None:
        self.keys, self.values = keys, values


class QuantizedLayer(DynamicLayer):
    pass


def test_layers_that_hold_something_else() -> None:
    good = DynamicLayer(states(2, 3), states(2, 3))
    for odd, kind, code in (
        (QuantizedLayer(states(2, 3), states(2, 3)), hw.UnsupportedError, Code.LAYOUT),
        (DynamicLayer(None, None), hw.InvalidDescriptorError, Code.RANK),
        (DynamicLayer(states(2, 3)[0], states(2, 3)[0]), hw.InvalidDescriptorError, Code.RANK),
        (DynamicLayer(states(2, 3), states(2, 4)), hw.InvalidDescriptorError, Code.SHAPE),
        (DynamicLayer(states(2, 4), states(2, 4)), hw.InvalidDescriptorError, Code.SHAPE),
        (DynamicLayer(states(3, 3), states(3, 3)), hw.InvalidDescriptorError, Code.SHAPE),
    ):
        with pytest.raises(kind) as error:
            engines.from_transformers(SimpleNamespace(layers=[good, odd]), None, page_size=4)
        assert (error.value.code, error.value.where) == (code, "cache.layers[1]")


def test_the_attributes_of_versions_before_layers() -> None:
    kind = type("DynamicCache", (), {})  # 4.48 to 4.53
    cache = kind()
    cache.key_cache, cache.value_cache = [states(2, 3, 0)], [states(2, 3, 1)]
    [(key, value)] = engines.from_transformers(cache, [[0, 1, 1], [1, 1, 1]], page_size=2)
    assert np.array_equal(key.gather(0), cache.key_cache[0][0, :, 1:].numpy().swapaxes(0, 1))
    assert np.array_equal(value.gather(1), cache.value_cache[0][1].numpy().swapaxes(0, 1))
    cache.key_cache.append([])
    cache.value_cache.append([])
    with pytest.raises(hw.InvalidDescriptorError) as error:
        engines.from_transformers(cache, None, page_size=2)
    assert error.value.where == "cache.layers[1]"


def test_layers_that_do_not_belong_together() -> None:
    three = engines.from_transformers(dynamic(2, 3), None, page_size=2)
    four = engines.from_transformers(dynamic(2, 4), None, page_size=2)
    with pytest.raises(hw.InvalidDescriptorError) as error:
        engines.to_transformers([three[0], four[1]])
    assert (error.value.code, error.value.where) == (Code.SEQ_LENS_RANGE, "layers[1]")
    with pytest.raises(hw.InvalidDescriptorError, match="are none"):
        engines.to_transformers([])
    with pytest.raises(ValueError, match="'left' or 'right'"):
        engines.to_transformers(three, padding="both")
    key, value = (t.replace(metadata={"first_tokens": [2, 2]}) for t in three[0])
    with pytest.raises(hw.UnsupportedError) as refusal:
        engines.to_transformers([(key, value)])
    assert refusal.value.code is Code.LAYOUT
    int8 = hw.BlockPagedTensor(
        np.zeros((1, 4, 1, 2), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[1],
        quantization="per_tensor", scales=0.5,
    )  # fmt: skip
    with pytest.raises(hw.UnsupportedError) as refusal:
        engines.to_transformers([(int8, int8.replace(kv_role="value"))])
    assert refusal.value.code is Code.SCHEME


def test_pages_of_an_engine_become_a_cache() -> None:
    pool = np.arange(7 * 4 * HEADS * DIM, dtype=np.float32).reshape(7, 4, HEADS, DIM)
    pair = engines.from_vllm((pool, -pool), [[5, 2, 5], [5, -1, -1]], [9, 3], axes="PSHD", pages="all")
    cache, mask = engines.to_transformers([pair])
    keys, values = kept(cache, 0)
    assert mask.sum(1).tolist() == [9, 3]
    assert np.array_equal(keys[0].numpy().swapaxes(0, 1), pool[[5, 2, 5]].reshape(12, HEADS, DIM)[:9])
    assert np.array_equal(values[1, :, 6:].numpy().swapaxes(0, 1), -pool[5, :3])


# With a model.


def model_of(name: str, **config: Any) -> Any:
    small = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}ForCausalLM")
    return kind(getattr(transformers, f"{name}Config")(**(small | config))).eval()


def run(model: Any, tokens: Any, mask: Any, cache: Any) -> tuple[Any, Any]:
    """Logits of the last column, and the cache; the argument's name has changed in 5.24."""
    import inspect

    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    with torch.no_grad():
        out = model(tokens, attention_mask=mask, position_ids=positions, use_cache=True, **{name: cache})
    return out.logits[:, -1], getattr(out, name)


@pytest.mark.parametrize("page_size", [3, 16])
@pytest.mark.parametrize(("name", "config"), [("Llama", {}), ("Mistral", {"sliding_window": 6})])
def test_a_model_goes_on_bit_for_bit(name: str, config: dict[str, Any], page_size: int) -> None:
    model = model_of(name, **config)
    tokens = torch.randint(1, 61, (3, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    mask[2, :7] = 0
    try:
        empty = transformers.DynamicCache(config=model.config)
    except TypeError:
        empty = transformers.DynamicCache()
    _, cache = run(model, tokens, mask, empty)
    sent = sent_over(engines.from_transformers(cache, mask, page_size=page_size))
    theirs, their_mask = engines.to_transformers(sent)
    assert torch.equal(their_mask, mask)
    for step in range(3):
        following = torch.randint(1, 61, (3, 1), generator=torch.Generator().manual_seed(2 + step))
        mask = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], dim=1)
        wanted, cache = run(model, following, mask, cache)
        got, theirs = run(model, following, mask, theirs)
        assert torch.equal(got, wanted)
