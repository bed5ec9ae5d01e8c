"""Latent attention (MLA): one compressed vector a token and layer, whatever transformers itself keeps of it.

Newer versions (5.18, not yet 5.12) hold in their cache the two latents of a token: the normed compression,
`[batch, 1, tokens, kv_lora_rank]`, and the rotated key that all heads share, `[batch, 1, tokens, qk_rope_head_dim]`.
Older ones hold the keys and values that the model makes of them, which are several times as large. The latents are
then taken where the model computes them, and expanded by the model's own projection where they arrive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from handoff import generation, models
from handoff.generation import Prefilled, Prompts

Pieces = list[list[Any]]
"""What each layer compresses, `[batch, tokens, kv_lora_rank]`, one piece a call of the model."""


def are_cached(model: Any) -> bool:
    """Whether this version's cache holds the latents themselves."""
    return models.geometry(model).key == (1, model.config.kv_lora_rank)


def prefill(model: Any, prompts: Prompts) -> Prefilled:
    """As `generation.prefill`, with caches of latents whatever this version's own caches hold."""
    if are_cached(model):
        return generation.prefill(model, prompts)
    with _captured(model) as found:
        done = generation.prefill(model, prompts)
    first = _beside([pieces[:1] for pieces in found], model, done.prefix_cache)
    return dataclasses.replace(done, prefix_cache=first, cache=_beside(found, model, done.cache))


def _beside(found: Pieces, model: Any, cache: Any) -> Any:
    """A cache of the compressions, and of the rotated keys that a cache of expanded ones holds once a head."""
    nope = model.config.qk_nope_head_dim
    pairs = []
    for pieces, (keys, _) in zip(found, models.states(cache), strict=True):
        whole = [piece.expand(keys.shape[0], -1, -1) for piece in pieces]  # the prefix is a batch of one
        pairs.append((torch.cat(whole, dim=1)[:, None], keys[:, :1, :, nope:]))
    return models.cache_of(pairs)


@contextmanager
def _captured(model: Any) -> Iterator[Pieces]:
    """While a model runs, note what its layers compress."""
    norms = [layer.self_attn.kv_a_layernorm for layer in model.model.layers]
    found: Pieces = [[] for _ in norms]

    def noting(pieces: list[Any]) -> Any:
        return lambda _module, _inputs, output: pieces.append(output)

    hooks = [norm.register_forward_hook(noting(pieces)) for norm, pieces in zip(norms, found, strict=True)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def expanded(model: Any, latents: Any) -> Any:
    """A cache of keys and values from a cache of latents, by the projection with which the model makes them."""
    config = model.config
    widths = [config.qk_nope_head_dim, config.v_head_dim]
    pairs = []
    with torch.inference_mode():
        for layer, (compressed, rotated) in zip(model.model.layers, models.states(latents), strict=True):
            batch, _, tokens, _ = compressed.shape
            made = layer.self_attn.kv_b_proj(compressed[:, 0]).view(batch, tokens, -1, sum(widths)).transpose(1, 2)
            keys, values = made.split(widths, dim=-1)
            pairs.append((torch.cat([keys, rotated.expand(-1, keys.shape[1], -1, -1)], dim=-1), values))
    return models.cache_of(pairs)
