"""`examples/transformers_prefill_decode.py` ends with "identical", and would not if a bit were another.

CI runs this where torch and transformers are installed: `python3 tools/run.py model`.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from support import ROOT

torch = pytest.importorskip("torch", reason="the example computes with torch")
transformers = pytest.importorskip("transformers", reason="the example's models are those of transformers")

sys.path.insert(0, str(ROOT / "examples"))
import transformers_prefill_decode as example  # noqa: E402 - found by the path just set
from handoff import generation, judge, latents, models, processes  # noqa: E402
from handoff.jobs import STAGES, Job, Received, Sent  # noqa: E402

PROMPTS = generation.Prompts(48, (5, 1, 20))
STEPS = 3
MODELS = [name for name in ("llama", "deepseek") if models.is_known(name)]


@pytest.fixture(scope="module")
def printed() -> str:
    """What a small run prints."""
    options = ["--prefix", "48", "--lengths", "5", "1", "20", "--steps", "3", "--repeats", "1"]
    command = [sys.executable, str(ROOT / "examples" / "transformers_prefill_decode.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_ends_with_identical(printed: str) -> None:
    assert printed.split()[-1] == "identical"


@pytest.mark.parametrize("dtype", example.DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_every_transfer_has_a_row_and_sends_fewer_pages_than_it_names(printed: str, model: str, dtype: str) -> None:
    table = printed.split(f"\n{model}, {dtype} ")[1].split("prefill computed again")[0]
    for job in example.transfers(model, dtype):
        [found] = re.findall(rf"^{re.escape(job.name)} +([\d,]+) +([\d.]+) +(\d+)/(\d+)( +[\d.]+){{7}}$", table, re.M)
        assert int(found[0].replace(",", "")) > 0
        assert int(found[2]) < int(found[3])


def test_every_wrong_end_is_refused_with_its_differences(printed: str) -> None:
    told = printed.split("wrong ends")[1]
    assert len(re.findall(r"^  [a-z_ ]+: \d+ bytes read, payload begins at \d+: ", told, re.M)) == 5
    everything = told.split("everything: ")[1]
    for difference in (
        "dtype: found 'float32', expected 'bfloat16'",
        "page_size: found 16, expected 32",
        "model: found 'llama', expected 'another-llama'",
        "heads: found [2, 4, 4], expected [0, 2, 4]",
    ):
        assert difference in everything


# The judge.


@pytest.fixture(scope="module")
def expected() -> judge.Reference:
    return judge.reference("llama", "float32", PROMPTS, STEPS)


def job(**changes: Any) -> Job:
    return Job("", "llama", "float32", **changes)


def right(expected: judge.Reference) -> Received:
    """What a transfer that changes nothing leads to."""
    held = [(keys.copy(), values.copy()) for keys, values in expected.caches["cache"]]
    return Received(expected.tokens.copy(), expected.logits.copy(), held, bytes=100)


def problems(expected: judge.Reference, received: Received, sent: Sent | None = None, **changes: Any) -> list[str]:
    sent = sent or Sent(bytes=100, pages_named=9, pages_sent=5, header_bytes=640)
    return judge.judge(job(**changes), expected, [sent], received).problems


def flipped(array: Any, place: Any) -> None:
    """The lowest bit of an element is another."""
    array.view(np.uint32)[place] ^= 1


def test_the_judge_is_content_with_the_same_bits(expected: judge.Reference) -> None:
    assert problems(expected, right(expected)) == []
    assert problems(expected, right(expected), quantization="per_block") == []


def test_the_judge_sees_a_bit(expected: judge.Reference) -> None:
    received = right(expected)
    flipped(received.logits, (2, 1, 17))
    assert problems(expected, received) == ["logits differ"]
    received = right(expected)
    assert received.tokens is not None
    received.tokens[0, 1] += 1
    assert problems(expected, received) == ["tokens differ"]
    received = right(expected)
    flipped(received.held[3][1], (0, 2, 50, 9))
    assert problems(expected, received) == ["values of layer 3 differ"]
    received = right(expected)
    flipped(received.held[3][1], (1, 2, 60, 9))  # padding: the second prompt has 49 tokens
    assert problems(expected, received) == []


def test_the_judge_bounds_what_quantisation_costs(expected: judge.Reference) -> None:
    received = right(expected)
    keys = received.held[2][0]
    step = np.abs(keys[0, :, 50]).max() / 127
    keys[0, 1, 50, 3] += 0.49 * step
    assert problems(expected, received, quantization="per_block") == []
    keys[0, 1, 50, 3] += 0.02 * step
    assert "times as wrong" in problems(expected, received, quantization="per_block")[0]


def test_the_judge_sees_pages_and_bytes(expected: judge.Reference) -> None:
    received = right(expected)
    assert "not shared" in problems(expected, received, Sent(bytes=100, pages_named=9, pages_sent=9))[0]
    assert "arrived" in problems(expected, received, Sent(bytes=101, pages_named=9, pages_sent=5))[0]
    assert problems(expected, Received(differences=["dtype: ..."])) == ["refused: dtype: ..."]


def test_the_judge_of_refusals(expected: judge.Reference) -> None:
    refused = Received(differences=["dtype: found a, expected b"], bytes=640)
    assert problems(expected, refused, expect={"dtype": "b"}) == []
    assert "were named" in problems(expected, refused, expect={"model": "b"})[0]
    assert (
        "payload begins at 640" in problems(expected, dataclasses.replace(refused, bytes=641), expect={"dtype": 1})[0]
    )
    assert problems(expected, right(expected), expect={"dtype": "b"})


def test_what_is_wrong_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Workers:
        """Both ends at once, with one bit wrong in every answer."""

        def __init__(self, _: Any) -> None:
            self.references = {key: judge.reference(*key, PROMPTS, STEPS) for key in [("llama", "float32")]}

        def __enter__(self) -> Workers:
            return self

        def __exit__(self, *_: object) -> None: ...

        def run(self, job: Job) -> tuple[list[Sent], Received]:
            seconds = dict.fromkeys((*STAGES, "elapsed"), 0.0)
            received = right(self.references["llama", "float32"])
            flipped(received.logits, (0, 0, 0))
            received.seconds = seconds
            return [Sent(bytes=100, pages_named=9, pages_sent=5, header_bytes=640, seconds=seconds)], received

        def prefill_seconds(self, *_: str) -> float:
            return 0.0

    monkeypatch.setattr(example, "Workers", Workers)
    monkeypatch.setattr(example, "DTYPES", ("float32",))
    monkeypatch.setattr(models, "is_known", lambda name: name == "llama")
    monkeypatch.setattr(sys, "argv", ["example", "--prefix", "48", "--lengths", "5", "1", "20", "--steps", "3"])
    with pytest.raises(SystemExit, match="llama float32, zstd: logits differ"):
        example.main()
    assert "identical" not in capsys.readouterr().out


# Models and processes.


def test_next_to_nothing_is_the_same_for_another_dtype() -> None:
    """The comparison is of bits that depend on the model: the other element type has others."""
    tokens = [judge.reference("llama", dtype, PROMPTS, STEPS).logits for dtype in example.DTYPES]
    assert (tokens[0] == tokens[1].astype(np.float32)).mean() < 0.1


@pytest.mark.skipif(not models.is_known("deepseek"), reason="this version of transformers has no DeepSeek-V3")
@pytest.mark.parametrize("dtype", example.DTYPES)
def test_latents_become_the_keys_and_values_of_the_model(dtype: str) -> None:
    model = models.build("deepseek", dtype)
    config = model.config
    done = latents.prefill(model, PROMPTS)
    for keys, values in models.states(done.cache):
        assert keys.shape == (3, 1, 68, config.kv_lora_rank)
        assert values.shape == (3, 1, 68, config.qk_rope_head_dim)
    made = latents.expanded(model, done.cache)
    if not latents.are_cached(model):
        for mine, theirs in zip(
            models.states(made), models.states(generation.prefill(model, PROMPTS).cache), strict=True
        ):
            assert torch.equal(mine[0], theirs[0])
            assert torch.equal(mine[1], theirs[1])


def fail(orders: Any) -> None:
    processes._serve(orders, lambda job: 1 // job)


def leave(orders: Any) -> None:
    sys.exit(3)


def test_what_fails_in_a_process_is_told() -> None:
    worker = processes.Worker(fail)
    try:
        worker.order(1)
        assert worker.answer() == 1
        worker.order(0)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            worker.answer()
    finally:
        worker.close()
    gone = processes.Worker(leave)
    with pytest.raises(RuntimeError, match="a process is gone"):
        gone.answer()
    gone.close()


@pytest.mark.parametrize(
    "arguments",
    [["--prefix", "47"], ["--prefix", "0"], ["--lengths", "3"], ["--lengths", "3", "0"], ["--steps", "0"]],
)
def test_options_that_cannot_be(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["example", *arguments])
    with pytest.raises(SystemExit) as error:
        example.settings()
    assert error.value.code == 2
