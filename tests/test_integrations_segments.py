"""Names of prefixes, and a folder of segments: what is found is whole, and whose it says."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hurray_wire as hw
from hurray_wire.errors import Code
from hurray_wire.integrations.prefix_keys import PrefixKeys, root_of
from hurray_wire.integrations.segments import SegmentFolder

ROOT = root_of({"model": "tiny"})


def tensor(value: int = 1) -> hw.BlockPagedTensor:
    pool = np.full((2, 4, 1, 8), value, np.float32)
    return hw.BlockPagedTensor(pool, block_table=[1, 0], seq_ptr=[0, 2], seq_lens=[7])


def keep(folder: SegmentFolder, *tensors: hw.BlockPagedTensor) -> None:
    with folder.writer(["aa", "bb"]) as writer:
        for t in tensors:
            writer.write(t)


def everything(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@contextmanager
def no_larger_file_than(nbytes: int) -> Iterator[None]:
    """What a full disk does: a write ends in the middle, the next one fails."""
    resource = pytest.importorskip("resource", reason="no limits on file sizes here")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


# Names.


@pytest.mark.parametrize("lengths", [[40], [3, 4, 9, 40], range(41), [40, 12, 40]])
def test_names_do_not_depend_on_how_a_sequence_grew(lengths: Any) -> None:
    tokens = list(range(7, 47))
    keys = PrefixKeys(ROOT, 4)
    found = [keys.of(tokens[:length]) for length in lengths]
    whole = PrefixKeys(ROOT, 4).of(tokens)
    assert [len(names) for names in found] == [length // 4 for length in lengths]
    assert all(names == whole[: len(names)] for names in found)
    assert len(set(whole)) == 10


def test_equal_names_are_equal_prefixes() -> None:
    tokens = list(range(16))
    base = PrefixKeys(ROOT, 4).of(tokens)
    for at in range(16):
        changed = [*tokens[:at], 99, *tokens[at + 1 :]]
        names = PrefixKeys(ROOT, 4).of(changed)
        assert [a == b for a, b in zip(base, names, strict=True)] == [i < at // 4 for i in range(4)]
    assert not set(base) & set(PrefixKeys(root_of({"model": "other"}), 4).of(tokens))
    assert not set(base) & set(PrefixKeys(ROOT, 2).of(tokens))
    assert PrefixKeys(ROOT, 4).of(np.arange(16).tolist()) == base
    assert PrefixKeys(ROOT, 4).of([1 << 40, 0, 0, 0]) != PrefixKeys(ROOT, 4).of([0, 0, 0, 0])


# Segments.


def test_every_chunk_of_a_segment_leads_to_it(tmp_path: Path) -> None:
    folder = SegmentFolder(tmp_path)
    assert folder.leading(["aa", "bb"]) == 0
    for keys, value in ((["aa", "bb"], 1), (["cc"], 2)):
        with folder.writer(keys) as writer:
            writer.write(tensor(value))
    assert folder.leading(["aa", "bb", "cc", "dd"]) == 3
    assert folder.leading(["dd", "aa"]) == 0
    assert [(s.first, s.stop) for s in folder.segments(["aa", "bb", "cc"])] == [(0, 2), (2, 3)]
    (segment,) = folder.segments(["bb"])
    assert [t == tensor(1) for t in hw.StreamReader(segment.path)] == [True]
    assert everything(tmp_path) == ["aa.0of1.hrkv", "bb.0of1.hrkv", "cc.0of1.hrkv"]


def test_nothing_is_found_before_it_is_whole(tmp_path: Path) -> None:
    folder = SegmentFolder(tmp_path)
    writer = folder.writer(["aa", "bb"])
    writer.write(tensor())
    assert (folder.has("aa"), folder.has("bb")) == (False, False)
    writer.close()
    assert everything(tmp_path) == []
    with pytest.raises(hw.FrameError):
        keep(folder, tensor(), tensor().replace(metadata={"reserved": 1}))
    assert everything(tmp_path) == []


def test_who_comes_second_does_not_replace_what_others_read(tmp_path: Path) -> None:
    folder = SegmentFolder(tmp_path)
    for keys, value in ((["aa", "bb"], 1), (["aa", "bb", "cc"], 2)):
        with folder.writer(keys) as writer:
            writer.write(tensor(value))
    found = [next(hw.StreamReader(folder.path(key))) for key in ("aa", "bb", "cc")]
    assert [t == tensor(value) for t, value in zip(found, (1, 1, 2), strict=True)] == [True] * 3
    assert [(s.first, s.stop) for s in folder.segments(["aa", "bb", "cc"])] == [(0, 2), (2, 3)]


def test_ranks(tmp_path: Path) -> None:
    ranks = [SegmentFolder(tmp_path, rank=rank, ranks=2) for rank in (0, 1)]
    with ranks[1].writer(["aa"]) as writer:
        writer.write(tensor())
    assert [each.has("aa") for each in ranks] == [False, False]
    with ranks[0].writer(["aa"]) as writer:
        writer.write(tensor())
    assert [each.has("aa") for each in ranks] == [True, True]
    ranks[0].discard(["aa", "never"])
    assert everything(tmp_path) == ["aa.1of2.hrkv"]


def test_what_is_gone_is_our_error(tmp_path: Path) -> None:
    with pytest.raises(hw.StoreError, match="chunk aa is gone") as caught:
        SegmentFolder(tmp_path).segments(["aa"])
    assert caught.value.code is Code.STORE


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("most", [0, 100, 700])
def test_a_full_disk_is_our_error_and_leaves_nothing(tmp_path: Path, most: int, compression: Any) -> None:
    folder = SegmentFolder(tmp_path, compression=compression)
    noise = tensor().replace(page_pool=np.random.default_rng(0).standard_normal((2, 4, 1, 8)).astype(np.float32))
    with no_larger_file_than(most), pytest.raises(hw.StoreError) as caught:
        keep(folder, noise)
    assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    assert everything(tmp_path) == []
    keep(folder, noise)
    assert folder.leading(["aa", "bb"]) == 2


def test_a_folder_that_is_read_only(tmp_path: Path) -> None:
    (tmp_path / "aa").write_bytes(b"")  # a file stands where the folder of the key must
    with pytest.raises(hw.StoreError):
        SegmentFolder(tmp_path).writer(["aa"])


def test_names_that_cannot_be_linked_leave_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where links fail, the chunk that has the file is kept; without those before it, it is no hit."""

    def refused(*_: Any) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refused)
    folder = SegmentFolder(tmp_path)
    writer = folder.writer(["aa", "bb"])
    writer.write(tensor())
    with pytest.raises(hw.StoreError, match="no links here"):
        writer.finish()
    assert (folder.leading(["aa", "bb"]), folder.has("bb")) == (0, True)
