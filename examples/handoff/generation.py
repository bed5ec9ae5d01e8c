"""What every process does with a model: prefill a batch of prompts with a common prefix, and go on greedily.

The prefix is computed once, and its keys and values serve every prompt, as an engine with a prefix cache does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import hurray_wire as hw
from handoff import models


@dataclass(frozen=True)
class Prompts:
    """Ragged prompts: `prefix` tokens that all of them begin with, and so many more each."""

    prefix: int
    lengths: tuple[int, ...]

    def tokens(self) -> tuple[Any, Any, Any]:
        """The prefix `[1, prefix]`, what follows `[prompts, longest]`, padded on the right, and its mask."""
        generator = torch.Generator().manual_seed(1)
        prefix, rest = (
            torch.randint(3, 512, shape, generator=generator)
            for shape in ((1, self.prefix), (len(self.lengths), max(self.lengths)))
        )
        mask = torch.arange(rest.shape[1]) < torch.tensor(self.lengths)[:, None]
        return prefix, torch.where(mask, rest, 0), mask.to(torch.int64)


@dataclass(frozen=True)
class Prefilled:
    """A prefilled batch: its cache, which columns of it hold tokens, and the tokens that come next."""

    prefix_cache: Any
    cache: Any
    mask: Any
    next_tokens: Any
    """`[prompts]`"""


@dataclass(frozen=True)
class Generated:
    """Greedy tokens `[prompts, steps]`, and the logits that each was chosen by, `[steps, prompts, vocabulary]`."""

    tokens: Any
    logits: Any


def prefill(model: Any, prompts: Prompts) -> Prefilled:
    """The prefix alone, then every prompt from there on."""
    prefix, rest, held = prompts.tokens()
    ones = torch.ones_like(prefix)
    _, prefix_cache = models.forward(model, prefix, ones, ones.cumsum(-1) - 1, models.cache_of([]))
    batch = len(prompts.lengths)
    cache = models.cache_of(
        [(k.expand(batch, -1, -1, -1), v.expand(batch, -1, -1, -1)) for k, v in models.states(prefix_cache)]
    )
    mask = torch.cat([ones.expand(batch, -1), held], dim=1)
    positions = (mask.cumsum(-1) - 1)[:, prompts.prefix :]
    logits, cache = models.forward(model, rest, mask, positions, cache)
    last = held.sum(-1) - 1
    return Prefilled(prefix_cache, cache, mask, logits[torch.arange(batch), last].argmax(-1))


def generate(model: Any, cache: Any, mask: Any, next_tokens: Any, steps: int) -> Generated:
    """Greedy steps from a cache on; new columns stand behind the padding, positions follow the tokens."""
    tokens, logits = [], []
    for _ in range(steps):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        positions = mask.sum(-1, keepdim=True) - 1
        out, cache = models.forward(model, next_tokens[:, None], mask, positions, cache)
        logits.append(out[:, -1])
        next_tokens = out[:, -1].argmax(-1)
        tokens.append(next_tokens)
    return Generated(torch.stack(tokens, 1).numpy(), hw.from_torch(torch.stack(logits)))


def arrays(cache: Any) -> list[tuple[Any, Any]]:
    """A cache's keys and values as arrays, which what is generated later does not change."""
    return [(hw.from_torch(keys), hw.from_torch(values)) for keys, values in models.states(cache)]
