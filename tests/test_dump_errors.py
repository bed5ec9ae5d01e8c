"""Every way that a run can end badly, through the real entry point: what is said, where, and with which status."""

from __future__ import annotations

import gzip
import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import zstandard
from dump_corpus import Outcome, broken, corpus, run_child, stream
from support import worked

import hurray_wire as hw


def run(tmp_path: Path, data: bytes, *arguments: str, name: str = "x.hrkv") -> Outcome:
    (tmp_path / name).write_bytes(data)
    return run_child([*arguments, name], tmp_path)


def one_line(found: Outcome) -> str:
    assert found.err.count("\n") == 1, found.err
    assert "Traceback" not in found.err
    assert found.err.startswith("hurray-dump: ")
    return found.err


TEN: dict[str, tuple[str, ...]] = {
    "truncated.hrkv": ("frame_length at byte 700", "needs 1216 bytes, 700 are there", "[truncated]"),
    "flipped-bit.hrkv": ("sections[2] at byte 448", "page_pool: bytes have 0x", "[section_checksum]"),
    "page-id.hrkv": ("block_table[1] at byte 1092", "is 9, must be below num_pages 5", "[page_id]"),
    "type-tag.hrkv": ("type_tag at byte 302", "reserved element type 0x99", "[dtype]"),
    "seq-ptr.hrkv": ("seq_ptr[2] at byte 1160", "is 3, less than the 5 before it", "[seq_ptr_order]"),
    "checksum.hrkv": ("sections[2] at byte 448", "[section_checksum]: the stated checksum was changed, not the bytes"),
    "missing-frame.hrkv": ("sequence at byte 3660", "is 4, must be 3", "[sequence]: frame 3 is missing"),
    "foreign.hrkv": ("magic at byte 0", "a Git LFS pointer", "[foreign]"),
    "zstd.hrkv": ("sections[3] at byte 6856", "found ff ff ff ff, a zstd frame begins with 28 b5 2f fd", "[zstd]"),
    "quantisation-index.hrkv": (
        "quantization.scale_buffer_index at byte 501",
        "is 1, must be 3",
        "[quantization_buffer]",
    ),
}


@pytest.mark.parametrize("name", TEN)
def test_ten_broken_blobs_are_told_apart(name: str, tmp_path: Path) -> None:
    found = run(tmp_path, broken()[name], name=name)
    assert found.status == 1
    line = one_line(found)
    assert all(words in line for words in TEN[name]), line
    if name != "foreign.hrkv":  # everything readable, and the fault where a reader of the report looks for it
        assert "NOT SOUND" in found.out
        assert "FAULT" in found.out


def test_the_ten_lines_differ(tmp_path: Path) -> None:
    lines = {run(tmp_path, data, name=name).err.partition(": ")[2] for name, data in broken().items()}
    assert len(lines) == 10


def test_a_flipped_bit_says_whose_pages_it_hits(tmp_path: Path) -> None:
    out = run(tmp_path, broken()["zstd.hrkv"]).out
    assert "it holds pages 16 to 31, 16 of them in use by 2 sequences: 0, 1" in out


def _npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(8))
    return file.getvalue()


def _zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", b"b")
    return file.getvalue()


FOREIGN = {
    "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\n",
    "HTML page": b"<!DOCTYPE html><html></html>",
    "pickle": pickle.dumps({"a": 1}),
    "safetensors": (8).to_bytes(8, "little") + b'{"a":{}}' + bytes(8),
    "gzip": gzip.compress(b"x" * 100),
    "zstd": zstandard.compress(b"x" * 100),
    "zip": _zip(),
    ".npy": _npy(),
    "PNG": b"\x89PNG\r\n\x1a\n" + bytes(60),
    "ELF": b"\x7fELF" + bytes(60),
    "HRRYFILE": b"HRRYFILE" + bytes(100),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file_is_named_in_one_line(kind: str, tmp_path: Path) -> None:
    found = run(tmp_path, FOREIGN[kind])
    assert (found.status, found.out) == (1, "")
    line = one_line(found)
    assert kind in line
    assert "magic at byte 0" in line
    assert "needs" not in line  # no size is made of bytes that are none


@pytest.mark.parametrize("data", [b"", b"H", b"\x89HR", bytes(64), b"garbage" * 20])
def test_what_is_nothing_is_refused(data: bytes, tmp_path: Path) -> None:
    found = run(tmp_path, data)
    assert (found.status, found.out) == (1, "")
    assert "hurray_wire blob" in one_line(found)


def test_a_huge_count_costs_nothing(tmp_path: Path) -> None:
    blob = bytearray(hw.encode(worked(), framing="bare"))
    blob[68:72] = b"\xff" * 4
    found = run(tmp_path, bytes(blob))
    assert found.status == 1
    assert "takes 17179869184" in one_line(found)


def test_a_buffer_larger_than_it_needs(tmp_path: Path) -> None:
    blob = bytearray(hw.encode(worked(), framing="bare") + b"\xff" * 8)
    blob[117:125] = (20).to_bytes(8, "little")
    for options in (["--seqs"], ["--map"], ["--json", "--seqs"], []):
        found = run(tmp_path, bytes(blob), *options)
        assert found.status == 1
        assert "buffers[2].byte_size at byte 117 (0x75): is 20, seq_ptr takes 12" in one_line(found)


def test_pages_of_no_bytes_in_any_number(tmp_path: Path) -> None:
    tensor = hw.BlockPagedTensor(np.zeros((3, 4, 0, 8), np.float16), block_table=[0, 2], seq_ptr=[0, 2], seq_lens=[5])
    blob = bytearray(hw.encode(tensor, framing="bare"))
    blob[56:64] = (1 << 62).to_bytes(8, "little")
    for options in ([], ["--map"], ["--stats"], ["--json", "--map"]):
        found = run(tmp_path, bytes(blob), *options)
        assert (found.status, found.err) == (0, ""), options
    assert "4,611,686,018,427,387,904 in the pool" in run(tmp_path, bytes(blob)).out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: FILE"),
        (["--nonsense", "a"], "--nonsense"),
        (["--diff", "a"], "--diff takes two files"),
        (["--extract", "d", "a", "b"], "--extract takes one file"),
        (["--json", "--svg", "s", "a"], "do not go together"),
        (["--frame", "x", "a"], "invalid int"),
        (["-", "-"], "standard input can be read once"),
    ],
)
def test_wrong_usage_is_one_line_and_2(arguments: list[str], words: str, tmp_path: Path) -> None:
    found = run_child(arguments, tmp_path)
    assert (found.status, found.out) == (2, "")
    assert words in one_line(found)


def test_unreadable_files_are_2_and_the_others_are_still_shown(tmp_path: Path) -> None:
    (tmp_path / "good.hrkv").write_bytes(hw.encode(worked()))
    found = run_child(["absent.hrkv", ".", "good.hrkv"], tmp_path)
    assert found.status == 2
    assert found.err.splitlines() == [
        "hurray-dump: absent.hrkv: No such file or directory",
        "hurray-dump: .: Is a directory",
    ]
    assert "page_size 4" in found.out


def test_a_frame_that_is_not_there(tmp_path: Path) -> None:
    found = run(tmp_path, b"".join(stream(2)), "--frame", "9")
    assert found.status == 2
    assert "has no frame 9" in one_line(found)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    blob = hw.encode(worked())
    found = run(tmp_path, blob, "--svg", "no/such/folder.svg")
    assert found.status == 2
    assert "No such file" in one_line(found)
    (tmp_path / "out").mkdir()
    assert run(tmp_path, blob, "--extract", "out").status == 0
    again = run(tmp_path, blob, "--extract", "out")
    assert again.status == 2
    assert "File exists" in one_line(again)


def test_the_help_has_examples_and_statuses(tmp_path: Path) -> None:
    found = run_child(["--help"], tmp_path)
    assert (found.status, found.err) == (0, "")
    assert all(words in found.out for words in ("examples:", "hurray-dump --diff", "exit status: 0 sound"))
    assert run_child(["--version"], tmp_path).out == f"hurray-dump {hw.__version__}\n"


def test_strange_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    tensor = worked(metadata={"a.b": "\x1b[2J\x07\u202e\u0085", "c.\x1b]0;d": 1, "seq_ids": ["\x9b", "\u200f"]})
    blob = hw.encode(tensor)
    for options in ([], ["--seqs"], ["--hex"], ["--json"]):
        found = run(tmp_path, blob, *options, name="x\x1b[31m\u202e.hrkv")
        assert found.status == 0
        assert all(c == "\n" or c.isprintable() for c in found.out), options
    (tmp_path / "\x1b[31m").write_bytes(b"junk")
    assert all(c == "\n" or c.isprintable() for c in run_child(["\x1b[31m"], tmp_path).err)


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    name = b"bad-\xff.hrkv"
    (Path(str(tmp_path)) / name.decode("utf-8", "surrogateescape")).write_bytes(b"junk")
    found = run_child([name.decode("utf-8", "surrogateescape")], tmp_path)
    assert found.status == 1
    assert "bad-\\udcff.hrkv" in found.err


def test_an_encoding_without_our_characters(tmp_path: Path) -> None:
    blob = hw.encode(worked(metadata={"model": "Größe 模型"}))
    (tmp_path / "x.hrkv").write_bytes(blob)
    found = run_child(["x.hrkv"], tmp_path, PYTHONIOENCODING="ascii")
    assert found.status == 0
    assert "Gr\\xf6\\xdfe" in found.out


def test_every_status_is_0_1_or_2(tmp_path: Path) -> None:
    for name, data in corpus().items():
        (tmp_path / name).write_bytes(data)
    found = run_child(sorted(corpus()), tmp_path)
    assert found.status == 1
    assert all(line.startswith("hurray-dump: ") for line in found.err.splitlines())
