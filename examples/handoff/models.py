"""Tiny causal language models from configs, with fixed random weights, and one call that every version answers.

No weights can be downloaded where this runs, and none are needed: whether a cache arrived shows in the bits of the
logits, whatever the model has learnt.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import transformers

_COMMON = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,  # far from zero: attention then looks at some tokens more than at others
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_hidden_layers": 6, "num_key_value_heads": 4}),
    "deepseek": (
        "DeepseekV3",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 8,
            "q_lora_rank": 64,
            "kv_lora_rank": 96,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 128,
        },
    ),
}


class Geometry(NamedTuple):
    """What a layer of a model's cache holds for one token: `key` and `value` as (heads, dim)."""

    layers: int
    key: tuple[int, int]
    value: tuple[int, int]


def is_known(name: str) -> bool:
    """Whether this version of transformers has the model: DeepSeek-V3 came with 4.51."""
    return hasattr(transformers, f"{_CONFIGS[name][0]}ForCausalLM")


def forms(name: str) -> tuple[str, ...]:
    """As what a model's cache is sent: what transformers holds of it, and where there are such, the latents."""
    return ("cache", "latent") if "kv_lora_rank" in _CONFIGS[name][1] else ("cache",)


def build(name: str, dtype: str) -> Any:
    """The model with the weights that it has in every process."""
    kind, own = _CONFIGS[name]
    config = getattr(transformers, f"{kind}Config")(**_COMMON, **own)
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(getattr(torch, dtype)).eval()


def forward(model: Any, tokens: Any, mask: Any, positions: Any, cache: Any) -> tuple[Any, Any]:
    """Logits `[batch, tokens, vocabulary]` and the grown cache; the argument's name has changed in 5.24."""
    word = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.inference_mode():
        out = model(tokens, attention_mask=mask, position_ids=positions, use_cache=True, **{word: cache})
    return out.logits, getattr(out, word)


def states(cache: Any) -> list[tuple[Any, Any]]:
    """Keys and values of every layer, `[batch, heads, tokens, dim]`; the attributes have changed in 4.54."""
    if hasattr(cache, "layers"):
        return [(layer.keys, layer.values) for layer in cache.layers]
    return list(zip(cache.key_cache, cache.value_cache, strict=True))


def cache_of(pairs: list[tuple[Any, Any]]) -> Any:
    """A `DynamicCache` that holds these keys and values."""
    cache = transformers.DynamicCache()
    for i, (keys, values) in enumerate(pairs):
        cache.update(keys, values, i)
    return cache


def geometry(model: Any) -> Geometry:
    """What the model's cache holds, seen after one token: configs do not say it alike in all versions."""
    one = torch.ones(1, 1, dtype=torch.int64)
    _, cache = forward(model, one, one, one - 1, transformers.DynamicCache())
    pairs = states(cache)
    (_, heads, _, dim), (_, value_heads, _, value_dim) = (x.shape for x in pairs[0])
    return Geometry(len(pairs), (heads, dim), (value_heads, value_dim))
