"""What the corpus covers, counted: every tag, flag, kind, codec and every error code, none by chance.

What only a caller can provoke stands in one table here, each code with the call that provokes it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_conformance import CASES, CORPUS

import hurray_wire as hw
from hurray_wire import tags
from hurray_wire.errors import Code
from hurray_wire.integrations.redis import RedisStore
from hurray_wire.rules import STORAGE
from hurray_wire.testing import Case

COVERED = {tag for case in CORPUS for tag in case.covers}
PLAIN = CASES["plain-float16"]


def bare(**changes: Any) -> hw.BlockPagedTensor:
    """A tensor of whose tokens only the sum is known."""
    arguments: dict[str, Any] = {"block_table": [0, 1, 0], "seq_ptr": [0, 2, 3], "total_tokens": 5, **changes}
    pool = arguments.pop("page_pool", np.zeros((2, 2, 1, 4), np.float16))
    return hw.BlockPagedTensor(pool, **arguments)


class Full:
    """A store's client that takes nothing."""

    def set(self, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    def unlink(self, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")


CALLERS: dict[Code, tuple[type[hw.HurrayWireError], Callable[[], Any]]] = {
    Code.SHAPE: (hw.InvalidDescriptorError, lambda: bare(num_heads=3)),
    Code.NUM_PAGES: (hw.InvalidDescriptorError, lambda: hw.BlockPagedLayout(4, 2**64, 0, 2)),
    Code.NUM_SEQS: (hw.InvalidDescriptorError, lambda: hw.BlockPagedLayout(4, 5, 0, 2**32)),
    Code.LAYER_INDEX: (hw.InvalidDescriptorError, lambda: bare(layer_index=0xFFFF_FFFF)),
    Code.NEGATIVE_INDEX: (hw.InvalidDescriptorError, lambda: bare(block_table=[0, -1, 0])),
    Code.NOT_INTEGER: (hw.InvalidDescriptorError, lambda: bare(block_table=[0, 1.5, 0])),
    Code.SEQ_LENS_UNKNOWN: (hw.UnsupportedError, lambda: hw.decode(PLAIN.data()).gather(0)),
    Code.COPY_REQUIRED: (hw.UnsupportedError, lambda: hw.decode(CASES["frame-zstd-shuffle-2"].data(), copy=False)),
    Code.BARE_FORM: (hw.UnsupportedError, lambda: hw.encode(bare(), framing="bare", compression="zstd")),
    Code.STORE: (hw.StoreError, lambda: RedisStore(Full()).put("key", bare())),
    Code.PACKED_POOL: (hw.UnsupportedError, lambda: bare(page_pool=np.zeros((2, 2, 1, 4), np.int8), dtype="int4")),
}
"""Codes that no bytes provoke; `shape` also has a case, which other implementations may accept."""


def missing(wanted: set[str]) -> set[str]:
    return wanted - COVERED


def test_every_code_has_a_case_or_a_call() -> None:
    from_bytes = {tag.removeprefix("code:") for tag in COVERED if tag.startswith("code:")}
    from_values = {entry["error"]["code"] for entry in CORPUS.values if "error" in entry}
    assert set(map(str, Code)) == from_bytes | from_values | set(map(str, CALLERS))
    assert set(map(str, CALLERS)) & from_bytes == {"shape"}
    assert len(from_bytes) >= 70


@pytest.mark.parametrize("code", CALLERS, ids=str)
def test_codes_that_only_a_caller_provokes(code: Code) -> None:
    kind, call = CALLERS[code]
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.code is code


def test_descriptor_length_is_refused_by_both_of_its_classes() -> None:
    classes = {case.error["error_class"] for case in CORPUS if case.error and case.error["code"] == "descriptor_length"}
    assert classes == {"FrameError", "InvalidDescriptorError"}


def test_every_class_and_limit() -> None:
    classes = ("InvalidDescriptor", "Frame", "Truncated", "Checksum", "Unsupported", "Limit", "Mismatch")
    assert not missing({f"class:{name}Error" for name in classes})
    assert not missing({f"limit:{name}" for name in hw.Limits.__dataclass_fields__})


def test_every_element_type() -> None:
    names = {f"dtype:{tag.name.lower()}" for tag in tags.TypeTag}
    assert not missing(names | {f"dtype:extension-{tag:02x}" for tag in (0xF0, 0xFE)})
    assert not missing({f"extension-bits:{bits}" for bits in (1, 2, 4, 8, 24, 40)})


def test_every_name_of_the_layout() -> None:
    assert not missing({f"role:{role.name.lower()}" for role in tags.KvRole})
    assert not missing({f"index-type:{kind.name.lower()}" for kind in tags.IndexType})
    assert not missing({"layer:none", "layer:some", "seq-lens:known", "seq-lens:unknown", "empty-buffer"})


def test_every_place() -> None:
    assert not missing({f"device:{int(device):#04x}" for device in tags.DeviceTag} | {"device:0xf0", "device:0xfe"})
    assert not missing({f"memory-class:{int(kind):#04x}" for kind in tags.MemoryClass} | {"memory-class:0xf5"})
    assert not missing({f"alignment:{n}" for n in (1, 2, 64, 256, 4096, 1 << 22, 1 << 31)} | {"alignment-cap"})


def test_every_scheme_on_every_storage_type() -> None:
    for scheme, storage in STORAGE.items():
        name = tags.SchemeTag(scheme).name.lower()
        kinds = {hw.Dtype.of(int(tag)).name for tag in storage}
        assert not missing({f"storage:{name}:{kind}" for kind in kinds})
    kinds = {f"scheme:{name}:{kind}" for name in ("per_channel", "per_block") for kind in ("symmetric", "asymmetric")}
    assert not missing(kinds | {"axis:per_channel:1", "axis:per_channel:2"})
    assert not missing({f"scale-type:{kind.name.lower()}" for kind in tags.ScaleType})
    assert not missing({"quantization-padding", "shared-buffer", "buffers:3", "buffers:4", "buffers:5"})


def test_every_flag_and_optional_table() -> None:
    flags = {f"flag:{flag.name.lower()}" for flag in tags.Flag if flag.name and flag is not tags.Flag.SHARD}
    assert not missing(flags | {"code:shard", "composite:base", "composite:correction", "statistics:none"})
    assert not missing({f"statistics:{name}" for name in hw.Statistics.__dataclass_fields__})


def test_every_kind_codec_filter_and_width_of_a_section() -> None:
    small = {"kind:descriptor", "kind:seq_lens", "kind:metadata", "kind:later", "kind:private"}
    assert not missing(small | {f"kind:buffer-{i}" for i in range(5)})
    assert not missing({f"codec:{codec.name.lower()}" for codec in tags.Codec})
    assert not missing({f"filter:{kind.name.lower()}" for kind in tags.Filter})
    assert not missing({f"width:{width}" for width in (0, 2, 4, 8, 16)})
    assert not missing({"section-flag:checksum", "section-flag:no-checksum", "section-flag:optional"})
    assert not missing({"frame-flag:last", "frame-flag:not-last", "minor:0", "minor:newer", "chunked", "no-checksum"})


def test_every_name_of_metadata() -> None:
    names = ("model", "revision", "tokenizer", "rope", "seq_ids", "first_tokens", "heads", "key_dim", "content")
    assert not missing({f"metadata:{name}" for name in names})


def test_what_a_stream_and_a_newer_minor_may_hold() -> None:
    wanted = {"closing-frame", "empty-stream", "second-stream", "bare-stream", "newer-minor", "optional-section"}
    assert not missing(wanted | {"private-section", "descriptor-trailing-bytes", "dirty-tail", "frame-alignment"})
    assert not missing({"stream:0-items", "stream:1-items", "stream:2-items", "stream:3-items"})


def test_compressed_cases_are_judged_by_their_decoded_bytes() -> None:
    compressed = [case for case in CORPUS if "codec:zstd" in case.covers]
    assert len(compressed) >= 9
    for case in compressed:
        assert case.encode is None
        assert case.expected is not None
        assert all(len(digest) == 64 for digest in case.expected["buffers"])


def of_reference(case: Case) -> bool:
    return case.origin.startswith("pyhurray")


def test_origins_are_not_our_encoder() -> None:
    assert sum(map(of_reference, CORPUS)) >= 120
    sources = {case.origin for case in CORPUS if case.origin.startswith("source/")}
    assert {f"source/{path.name}" for path in (CORPUS.root / "source").glob("*.hex")} == sources
