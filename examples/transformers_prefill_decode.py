"""A real model, prefilled in one process and decoded in another, bit for bit as if one had done both.

    python examples/transformers_prefill_decode.py [--transport socket] [--steps 8] [--repeats 3]

A Llama and a DeepSeek-V3 (latent attention), tiny, from configs, with fixed random weights. A prefill process runs
ragged prompts with a common prefix, pages its cache, and streams it layer by layer. The decode process has pages of
another size and other ids: it scatters what arrives into them, rebuilds the cache, and goes on greedily. The first
process then compares cache, tokens and logits with those of a run that never left it. `handoff/` has the parts;
docs/model.md says how to read what is printed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from handoff import judge, latents, models, report, transports
from handoff.generation import Prompts
from handoff.jobs import RECEIVER_PAGE_SIZE, SENDER_PAGE_SIZE, Job
from handoff.processes import Settings, Workers

DTYPES = ("float32", "bfloat16")
PREFIX_KNOWN: Mapping[str, Any] = {"known_prefix": True}
ZSTD: Mapping[str, Any] = {"compression": "zstd"}
INT8: Mapping[str, Any] = {"quantization": "per_block"}


def transfers(model: str, dtype: str) -> list[Job]:
    """What is sent of one model."""
    if models.forms(model) == ("cache",):
        kinds = {"cache": {}, "two ranks": {"ranks": (0, 1), "size": 2}, "prefix known": PREFIX_KNOWN}
        return [Job(name, model, dtype, **changes) for name, changes in {**kinds, "zstd": ZSTD, "int8": INT8}.items()]
    kinds = {"latent": {}, "latent, prefix known": PREFIX_KNOWN, "latent, zstd": ZSTD, "latent, int8": INT8}
    plain = Job("cache", model, dtype)
    return [plain, *(replace(plain, name=name, form="latent", **changes) for name, changes in kinds.items())]


def wrong_ends() -> list[Job]:
    """Receivers that have been set up for something else; the sender has the second half of the heads."""
    wrong = {"dtype": "bfloat16", "page_size": 32, "model": "another-llama", "heads": [0, 2, 4]}
    half = Job("everything", "llama", "float32", ranks=(1,), size=2, expect=wrong)
    return [*(replace(half, name=f"other {name}", expect={name: value}) for name, value in wrong.items()), half]


class Show:
    """Runs transfers, prints what they took, and keeps what is wrong with them."""

    def __init__(self, workers: Workers, settings: Settings) -> None:
        self.workers = workers
        self.settings = settings
        self.problems: list[str] = []

    def _judged(self, job: Job, expected: judge.Reference) -> tuple[str, str]:
        """A job done as often as asked for: its row of the table, with the least time of each stage, and a note."""
        seconds: dict[str, float] = {}
        for _ in range(self.settings.repeats):
            sent, received = self.workers.run(job)
            verdict = judge.judge(job, expected, sent, received)
            self.problems += [f"{job.model} {job.dtype}, {job.name}: {problem}" for problem in verdict.problems]
            took = {} if received.differences else report.stages(sent, received)
            seconds = {name: min(took[name], seconds.get(name, math.inf)) for name in took}
        row = report.row(job, sent, received, seconds) if seconds else ""
        return row, f"  {job.name}: {verdict.note}"

    def table(self, model: str, dtype: str, expected: judge.Reference) -> None:
        """All transfers of one model."""
        compressed = transports.compresses(self.settings.transport)
        jobs = [job for job in transfers(model, dtype) if job.compression is None or compressed]
        alone = self.workers.prefill_seconds(model, dtype)
        print(f"\n{report.head(f'{model}, {dtype}')}", flush=True)
        notes = []
        for job in jobs:
            row, note = self._judged(job, expected)
            print(row, flush=True)
            notes.append(note)
        print(report.recomputed(alone))
        print("\n".join(notes), flush=True)

    def refusals(self, expected: judge.Reference) -> None:
        """What becomes of wrong ends."""
        print("\nwrong ends, refused by what they expect:")
        for job in wrong_ends():
            print(self._judged(job, expected)[1], flush=True)


def what_is_cached() -> str:
    """What this version of transformers keeps of a latent-attention model."""
    version = f"transformers {transformers.__version__}"
    if not models.is_known("deepseek"):
        return f"{version} has no DeepSeek-V3: without latent attention"
    if latents.are_cached(models.build("deepseek", "float32")):
        return f"{version} keeps DeepSeek's latents: its cache is sent as the pair that it is, and as one latent"
    return (
        f"{version} keeps DeepSeek's keys and values, made of latents: they are sent as they are ('cache'), and the "
        "latents themselves, taken where the model computes them and expanded by its kv_b_proj ('latent')"
    )


def settings() -> Settings:
    """From the command line."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--transport", choices=transports.names(), default="socket")
    arguments.add_argument("--prefix", type=int, default=96, help="tokens that all prompts begin with")
    arguments.add_argument("--lengths", type=int, nargs="+", default=[150, 37, 80, 1, 120, 64], help="tokens behind it")
    arguments.add_argument("--steps", type=int, default=8, help="tokens to generate")
    arguments.add_argument("--repeats", type=int, default=3, help="of each transfer; the least times are shown")
    options = arguments.parse_args()
    unit = math.lcm(SENDER_PAGE_SIZE, RECEIVER_PAGE_SIZE)
    if options.prefix < unit or options.prefix % unit or min(options.lengths) < 1 or len(options.lengths) < 2:
        arguments.error(f"the prefix is whole pages on both sides, a multiple of {unit}, of at least two prompts")
    if options.steps < 1 or options.repeats < 1:
        arguments.error("there is at least one step, done at least once")
    prompts = Prompts(options.prefix, tuple(options.lengths))
    return Settings(prompts, options.steps, options.repeats, options.transport)


def main() -> None:
    """Compare, print, and leave with an error where anything is not the same."""
    chosen = settings()
    torch.set_num_threads(1)
    known = [name for name in ("llama", "deepseek") if models.is_known(name)]
    print(what_is_cached())
    references = {(m, d): judge.reference(m, d, chosen.prompts, chosen.steps) for m in known for d in DTYPES}
    with Workers(chosen) as workers:
        show = Show(workers, chosen)
        for (model, dtype), expected in references.items():
            show.table(model, dtype, expected)
        show.refusals(references["llama", "float32"])
    if show.problems:
        sys.exit("\n".join(["not the same:", *show.problems]))
    print("\nevery transfer that changes no bit led to the tokens and logits of one process: identical")


if __name__ == "__main__":
    main()
