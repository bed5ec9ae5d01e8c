"""What the views say is true: held against counts and values computed another way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dump_corpus import batch, corpus, fixtures, run_here, stream
from hypothesis import given
from hypothesis import strategies as st
from support import worked

import hurray_wire as hw
from hurray_wire.dtypes import Dtype, pack
from hurray_wire.dump.accounting import shared_prefixes
from hurray_wire.dump.sequences import runs
from hurray_wire.dump.statistics import BufferStatistics
from hurray_wire.dump.words import counted, safe, scaled, size


def facts(data: bytes, tmp_path: Path, *options: str) -> dict[str, Any]:
    (tmp_path / "x").write_bytes(data)
    found = run_here(["--json", *options, "x"], tmp_path)
    document: dict[str, Any] = json.loads(found.out)["files"][0]
    return document


# Words.


def test_words() -> None:
    assert (counted(1, "page"), counted(2_000, "page"), counted(2, "entry", "entries")) == (
        "1 page",
        "2,000 pages",
        "2 entries",
    )
    assert (size(640), size(1344), scaled(1 << 80)) == ("640 bytes", "1.31 KiB (1,344 bytes)", "1,048,576.00 EiB")
    assert safe("a\x1b\x7f\x9b\u202e\ud800 ü") == "a\\x1b\\x7f\\x9b\\u202e\\ud800 ü"


@given(st.lists(st.integers(0, 30), max_size=40))
def test_runs_of_page_ids_can_be_read_back(ids: list[int]) -> None:
    told = [list(map(int, run.split("-"))) for run in runs(ids)]
    assert [page for run in told for page in range(run[0], run[-1] + 1)] == ids


# Sequences and pages.


def _leading(one: list[int], two: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=7))
def test_shared_prefixes(sequences: list[list[int]]) -> None:
    table = np.array([page for pages in sequences for page in pages], np.uint32)
    ptr = np.concatenate([[0], np.cumsum([len(pages) for pages in sequences])]).astype(np.uint32)
    found = shared_prefixes(table, ptr)
    for i, pages in enumerate(sequences):
        common = [_leading(pages, other) if j != i else 0 for j, other in enumerate(sequences)]
        assert found.pages[i] == max(common)
        assert found.partner[i] == (common.index(max(common)) if max(common) else -1)


@pytest.mark.parametrize("name", ["worked.hrkv", "batch.hrkv", "shared_prefix.hrry", "raw-chunks.hrkv"])
def test_pages_and_sequences(name: str, tmp_path: Path) -> None:
    data = corpus()[name]
    tensor, item = hw.decode(data), facts(data, tmp_path, "--seqs", "--map")["items"][0]
    references = tensor.page_references()
    assert item["page_references"] == [[int(i), int(references[i])] for i in np.flatnonzero(references)]
    pages = item["pages"]
    assert pages["pages"] == tensor.num_pages
    assert pages["shared"] == int((references > 1).sum())
    assert pages["unreferenced"] == int((references == 0).sum())
    assert pages["unreferenced_bytes"] == pages["unreferenced"] * tensor.page_bytes
    if tensor.seq_lens is not None:
        live = {int(page) for seq in range(tensor.num_seqs) for page in tensor.live_pages(seq)}
        slots = {int(slot) for slot in tensor.token_slots()}
        assert pages["live"] == len(live)
        assert pages["empty_slots"] == len(live) * tensor.page_size - len(slots)
        assert [s["tokens"] for s in item["sequences"]] == tensor.seq_lens.tolist()
    assert [s["pages"] for s in item["sequences"]] == [tensor.pages(i).tolist() for i in range(tensor.num_seqs)]


# Fields.


@pytest.mark.parametrize("name", sorted(fixtures()))
def test_hex_shows_every_byte_of_header_and_descriptor(name: str, tmp_path: Path) -> None:
    data = fixtures()[name]
    items = facts(data, tmp_path, "--hex")["items"]
    told = [hw.inspect(data, item["offset"]).spans for item in items]
    assert [[(s["offset"], s["length"], s["path"]) for s in item["spans"]] for item in items] == [
        [(span.offset, span.length, span.path) for span in spans] for spans in told
    ]
    printed = run_here(["--hex", "--full", "x"], tmp_path).out
    for spans in told:
        for span in spans:
            assert f"{span.offset:08x}  {data[span.offset : span.offset + min(span.length, 8)].hex(' ')}" in printed


# Values.


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "float8_e5m2", "float8_e4m3", "int8", "uint16", "complex64"]
)
def test_statistics(dtype: str) -> None:
    kind = Dtype.of(dtype)
    assert kind.numpy is not None
    rng = np.random.default_rng(5)
    values = rng.integers(-50, 50, 1001).astype(kind.numpy)
    if dtype.startswith(("float", "bfloat")):
        values[[3, 40]] = np.nan
        values[17] = np.inf if dtype != "float8_e4m3" else values[17]
    found = BufferStatistics("x", kind, kind.bit_width, values.size)
    data, at = values.view(np.uint8), 0
    for step in rng.integers(1, 200, 200).tolist():
        found.feed(data[at : at + step])
        at += step
    found.feed(data[at:])
    found.finish()
    plain = values.view(values.real.dtype) if dtype == "complex64" else values
    wide = plain.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    assert (found.low, found.high) == (finite.min(), finite.max())
    assert (found.nan, found.infinite) == (np.isnan(wide).sum(), np.isinf(wide).sum())
    assert found.zeros == (wide == 0).sum()
    assert found.first_bad == (int(np.isfinite(wide).argmin()) if found.nan else None)


@pytest.mark.parametrize("dtype", ["int4", "uint2", "bool_", "float6_e2m3", "float4_e2m1"])
def test_statistics_of_packed_elements(dtype: str) -> None:
    kind = Dtype.of(dtype)
    codes = (np.arange(1001) * 7 % (1 << kind.bit_width)).astype(np.uint8)
    packed = pack(codes, dtype)
    found = BufferStatistics("x", kind, kind.bit_width, codes.size)
    for at in range(0, packed.size, 37):
        found.feed(packed[at : at + 37])
    found.finish()
    values = hw.unpack(packed, dtype, codes.size).astype(np.float64)
    assert (found.seen, found.low, found.high) == (codes.size, values.min(), values.max())


def test_statistics_of_what_is_cut() -> None:
    for dtype in ("float6_e2m3", "int4", "float16", "float64"):
        kind = Dtype.of(dtype)
        for there in range(60):
            found = BufferStatistics("x", kind, kind.bit_width, 1000)
            found.feed(np.zeros(there, np.uint8))
            found.finish()
            assert found.seen * kind.bit_width <= there * 8


def test_entropy() -> None:
    for values, bits in ((np.zeros(4096, np.uint8), 0.0), (np.arange(4096).astype(np.uint8), 8.0)):
        found = BufferStatistics("x", Dtype.of("uint8"), 8, values.size)
        found.feed(values)
        found.finish()
        assert found.entropy == pytest.approx(bits)


def test_the_first_nan_is_traced_to_its_token(tmp_path: Path) -> None:
    pool = np.zeros((5, 4, 2, 8), np.float16)
    pool[1, 1, 1, 2] = np.nan
    (tmp_path / "x").write_bytes(hw.encode(worked(page_pool=pool)))
    out = run_here(["--stats", "x"], tmp_path).out
    assert "first NaN or infinity in page_pool: page 1, slot 1, head 1, dim 2 (sequence 0, token 5)" in out


# Differences.


@pytest.mark.parametrize("seed", range(6))
def test_the_first_difference(seed: int, tmp_path: Path) -> None:
    rng, tensor = np.random.default_rng(seed), batch()
    pool = np.array(tensor.page_pool)
    page, slot, head, dim = (int(rng.integers(n)) for n in pool.shape)
    pool[page, slot, head, dim] = 7
    (tmp_path / "a").write_bytes(hw.encode(tensor, compression=("zstd", None)[seed % 2], chunk_bytes=1 << 14))
    (tmp_path / "b").write_bytes(hw.encode(tensor.replace(page_pool=pool)))
    found = run_here(["--json", "--diff", "a", "b"], tmp_path)
    pair = json.loads(found.out)["diff"][0]
    place = {"page": page, "slot": slot, "head": head, "dim": dim}
    assert found.status == 1
    assert pair["pages"] == 1
    assert {name: pair["first_page"][name] for name in place} == place
    tokens = [(seq, *np.flatnonzero(tensor.token_slots(seq) == page * 16 + slot).tolist()) for seq in range(5)]
    hit = [token for token in tokens if len(token) > 1]
    assert pair["sequences"] == len(hit)
    first = pair["first_token"]
    assert (first is None) == (not hit)
    assert first is None or (first["sequence"], first["token"]) == hit[0]


def test_tokens_are_compared_across_page_sizes(tmp_path: Path) -> None:
    small = worked()
    pool = np.array(small.page_pool).reshape(10, 2, 2, 8)
    other = hw.BlockPagedTensor(pool, block_table=[0, 1, 2, 0, 1], seq_ptr=[0, 3, 5], seq_lens=[6, 3], layer_index=3)
    pool[2, 1] += 1
    changed = hw.BlockPagedTensor(pool, block_table=[0, 1, 2, 0, 1], seq_ptr=[0, 3, 5], seq_lens=[6, 3], layer_index=3)
    for name, tensor in (("a", small), ("c", changed)):
        (tmp_path / name).write_bytes(hw.encode(tensor))
    pair = json.loads(run_here(["--json", "--diff", "a", "c"], tmp_path).out)["diff"][0]
    assert pair["pages_note"] == "not compared: page_size differ"
    assert (pair["first_token"]["sequence"], pair["first_token"]["token"]) == (0, 5)
    assert other.same_tokens(small) is False  # its pool was changed in place, as a caller may


# Taking out and finding again.


@pytest.mark.parametrize("name", [*sorted(fixtures()), "batch.hrkv", "quantised.hrkv", "two-streams.hrkv"])
def test_what_is_extracted_is_what_was_there(name: str, tmp_path: Path) -> None:
    data = corpus()[name]
    if name == "container.hrry":
        return
    (tmp_path / "x").write_bytes(data)
    assert run_here(["--extract", "out", "x"], tmp_path).status == 0
    for i, tensor in enumerate(hw.iter_decode(data)):
        stem = next(p for p in (tmp_path / "out").glob(f"*{i}.json")).name.removesuffix(".json")
        arrays = {"page_pool": tensor.page_pool, "scales": tensor.scales, "zero_points": tensor.zero_points}
        arrays |= {"block_table": tensor.block_table, "seq_ptr": tensor.seq_ptr}
        for part, array in arrays.items():
            if array is None:
                continue
            saved = np.load(tmp_path / "out" / f"{stem}.{part}.npy")
            assert saved.tobytes() == array.tobytes(), part
            assert saved.shape == array.shape, part
            if array.size:
                assert (tmp_path / "out" / f"{stem}.{part}.raw").read_bytes() == array.tobytes()
        told = json.loads((tmp_path / "out" / f"{stem}.json").read_text())
        assert told["descriptor"]["dtype"] == (
            tensor.dtype.name if tensor.dtype.name != "extension" else "private type"
        )


def test_extracting_what_is_damaged_keeps_the_rest_in_place(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(corpus()["zstd.hrkv"])
    assert run_here(["--extract", "out", "x"], tmp_path).status == 1
    whole = hw.decode(corpus()["zstd-shuffle2-chunks.hrkv"]).page_pool.tobytes()
    saved = (tmp_path / "out" / "frame0.page_pool.raw").read_bytes()
    assert len(saved) == len(whole)
    wrong = np.flatnonzero(np.frombuffer(saved, np.uint8) != np.frombuffer(whole, np.uint8))
    assert wrong.min() >= 16 * 512
    assert wrong.max() < 32 * 512


@pytest.mark.parametrize("seed", range(8))
def test_resync_finds_the_frame_behind_the_damage(seed: int, tmp_path: Path) -> None:
    rng, frames = np.random.default_rng(seed), stream(4)
    junk = rng.bytes(int(rng.integers(1, 5000))) + b"HRRY" + frames[0][288:400] + rng.bytes(9)
    data = [junk + b"".join(frames), frames[0] + junk + b"".join(frames[1:]), b"".join(frames[:2]) + junk + frames[3]]
    for parts in data:
        found = facts(parts, tmp_path, "--resync")
        sound = [item["offset"] for item in found["items"] if item["sound"]]
        assert sound == [i for i in range(len(parts)) if any(parts.startswith(f, i) for f in frames)]
        assert found["stops"][0]["resumed"] in sound
        assert not found["sound"]


def test_resync_finds_a_frame_that_lost_bytes_hide(tmp_path: Path) -> None:
    frames = stream(3)
    data = frames[0][:500] + frames[0][900:] + frames[1] + frames[2]
    found = facts(data, tmp_path, "--resync")
    assert [item["offset"] for item in found["items"] if item["sound"]] == [816, 816 + len(frames[1])]


def test_resync_in_the_bare_form(tmp_path: Path) -> None:
    bare = hw.encode(worked(), framing="bare")
    found = facts(bare + b"????" + bare + bare, tmp_path, "--resync")
    assert [item["offset"] for item in found["items"]] == [0, len(bare) + 4, 2 * len(bare) + 4]


def test_frames_alike_are_one_line_each(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"".join(stream(160)))
    lines = run_here(["x"], tmp_path).out.splitlines()
    assert len(lines) < 200
    assert sum("else as frame 0; payload verified" in line for line in lines) == 159
    assert len(run_here(["--full", "x"], tmp_path).out.splitlines()) > 160 * 20


def test_a_good_blob_shows_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(hw.encode(worked()))
    out = run_here(["x"], tmp_path).out
    for words in ("page_size 4", "num_pages 5", "num_seqs 2", "kv_role key", "layer 3", "float16", "uint32"):
        assert words in out
    assert facts(hw.encode(worked(layer_index=None)), tmp_path)["items"][0]["descriptor"]["layer_index"] is None
    (tmp_path / "x").write_bytes(hw.encode(worked(layer_index=None)))
    assert "not layer-scoped" in run_here(["x"], tmp_path).out
