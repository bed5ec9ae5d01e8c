"""Whether a transfer led to what one process that did both would have had; nothing here knows of pages or frames."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from handoff import generation, latents, models
from handoff.generation import Prompts
from handoff.jobs import Array, Job, Received, Sent, same_bits

_STEPS = 127
"""int8, symmetric: the largest magnitude of a token's row is stored as 127."""


@dataclass(frozen=True)
class Reference:
    """What one process has that prefills and goes on."""

    tokens: Array
    logits: Array
    caches: dict[str, list[tuple[Array, Array]]]
    """By form, as `Received.held`."""
    mask: npt.NDArray[np.bool_]


@dataclass
class Verdict:
    """What is wrong with a transfer (nothing, if all is well), and what there is to say of it."""

    problems: list[str] = field(default_factory=list)
    note: str = "tokens and logits bit for bit those of one process"


def reference(name: str, dtype: str, prompts: Prompts, steps: int) -> Reference:
    """Prefill and go on, in this process, with the cache as it is."""
    model = models.build(name, dtype)
    done = generation.prefill(model, prompts)
    caches = {"cache": generation.arrays(done.cache)}
    if "latent" in models.forms(name):
        caches["latent"] = generation.arrays(latents.prefill(model, prompts).cache)
    generated = generation.generate(model, done.cache, done.mask, done.next_tokens, steps)
    return Reference(generated.tokens, generated.logits, caches, done.mask.numpy() != 0)


def judge(job: Job, expected: Reference, sent: list[Sent], received: Received) -> Verdict:
    """The verdict on a transfer."""
    if job.expect:
        return _refusal(job, sent, received)
    if received.differences or received.tokens is None or received.logits is None:
        return Verdict([f"refused: {', '.join(received.differences)}"])
    verdict = _exact(job, expected, received) if job.exact else _bounded(job, expected, received)
    named, pages = (sum(getattr(s, name) for s in sent) for name in ("pages_named", "pages_sent"))
    if not pages < named:
        verdict.problems.append(f"{pages} pages sent for {named} named: the prefix was not shared")
    if sum(s.bytes for s in sent) != received.bytes:
        verdict.problems.append(f"{received.bytes} bytes arrived of {sum(s.bytes for s in sent)}")
    return verdict


def _refusal(job: Job, sent: list[Sent], received: Received) -> Verdict:
    """A receiver that expects something else names each difference, and has read no byte of any payload."""
    verdict = Verdict(
        note=f"{received.bytes} bytes read, payload begins at {sent[0].header_bytes}: "
        + "; ".join(received.differences)
    )
    named = sorted(text.split(":")[0] for text in received.differences)
    if named != sorted(job.expect):
        verdict.problems.append(f"differences in {named} were named, there are some in {sorted(job.expect)}")
    if received.bytes > sent[0].header_bytes:
        verdict.problems.append(f"{received.bytes} bytes were read, the payload begins at {sent[0].header_bytes}")
    return verdict


def _exact(job: Job, expected: Reference, received: Received) -> Verdict:
    verdict = Verdict()
    for layer, (mine, theirs) in enumerate(zip(received.held, expected.caches[job.form], strict=True)):
        for role, found, wanted in zip(("keys", "values"), mine, theirs, strict=True):
            if not same_bits(tokens_of(found, expected.mask), tokens_of(wanted, expected.mask)):
                verdict.problems.append(f"{role} of layer {layer} differ")
    for name in ("tokens", "logits"):
        if not same_bits(getattr(received, name), getattr(expected, name)):
            verdict.problems.append(f"{name} differ")
    return verdict


def _bounded(job: Job, expected: Reference, received: Received) -> Verdict:
    """Half a step of each token's scale is what rounding may cost, and half a unit in the last place of bfloat16."""
    worst, largest = 0.0, 0.0
    for mine, theirs in zip(received.held, expected.caches[job.form], strict=True):
        pairs = [[tokens_of(a, expected.mask).astype(np.float64) for a in pair] for pair in (mine, theirs)]
        if job.form == "latent":  # both parts are one row, with one scale
            pairs = [[np.concatenate(pair, axis=-1)] for pair in pairs]
        for found, wanted in zip(*pairs, strict=True):
            magnitude = np.abs(wanted).max(axis=(1, 2), keepdims=True)
            bound = magnitude * (0.5 / _STEPS * (1 + 2**-14) + (2**-8 if job.dtype == "bfloat16" else 0))
            error = np.abs(found - wanted)
            worst = max(worst, float((error / np.maximum(bound, np.finfo(np.float64).tiny)).max()))
            largest = max(largest, float(error.max()))
    verdict = Verdict(
        note=f"largest error of the cache {largest:.4f}, {worst:.2f} of its bound; {_drift(expected, received)}"
    )
    if not worst <= 1:
        verdict.problems.append(f"the cache is {worst:.3f} times as wrong as rounding allows")
    return verdict


def _drift(expected: Reference, received: Received) -> str:
    """How far tokens and logits went along, prompt by prompt until the first other token."""
    assert received.tokens is not None
    assert received.logits is not None
    same = received.tokens == expected.tokens
    along = np.logical_and.accumulate(np.concatenate([np.ones_like(same[:, :1]), same[:, :-1]], axis=1), axis=1)
    gap = np.abs(received.logits.astype(np.float64) - expected.logits.astype(np.float64)).max(axis=-1).T
    spread = float(expected.logits.astype(np.float64).std())
    return (
        f"{int(same.sum())} of {same.size} tokens the same, "
        f"logits up to {float(gap[along].max()):.3f} off (their standard deviation is {spread:.2f})"
    )


def tokens_of(states: Any, mask: npt.NDArray[np.bool_]) -> Array:
    """What columns with a token hold, `[tokens, heads, dim]`."""
    held: Array = states.swapaxes(1, 2)[mask]
    return held
