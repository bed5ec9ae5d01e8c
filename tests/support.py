"""What several test files share: the reports' fixtures, the vectors, and both decoders' verdicts in one form.

`desc` and `raw` are written from the specification alone, so that a test of the decoder does not lean on the
encoder. `tools/refdecode.py` is an independent reader of both forms.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import hurray_wire as hw

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "fixtures"
BARE, FRAMES = FIXTURES / "hurray-0.1.0", FIXTURES / "hrkv"
sys.path.insert(0, str(ROOT / "tools"))
import refdecode as refdecode  # noqa: E402 - a tool, found by the path just set; for other files too

Array = npt.NDArray[Any]


def _cases(folder: Path) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((folder / "manifest.json").read_text())["cases"]
    return cases


BARE_CASES = {case["name"]: case for case in _cases(BARE)}
FRAME_CASES = {case["name"]: case for case in _cases(FRAMES)}


def bare_vector(name: str) -> bytes:
    """A blob that the reference wrote."""
    return (BARE / f"{name}.hrry").read_bytes()


def frame_vector(name: str) -> bytes:
    """A frame that the independent encoder wrote."""
    return (FRAMES / f"{name}.hrkv").read_bytes()


def sha256(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


# The fixtures of cases/reports.md, as they stand there.


def desc(
    shape: tuple[int, ...] = (9, 2, 8),
    type_tag: int = 1,
    page_size: int = 4,
    num_pages: int = 5,
    paged_axis: int = 0,
    num_seqs: int = 2,
    kv_role: int = 0,
    layer_index: int = 3,
    index_type: int = 0,
    sizes: tuple[int, ...] = (640, 12, 12),
    flags: int = 0,
    rank: int | None = None,
    byte_offset: int = 0,
    reserved: bytes = bytes(6),
    align: int = 64,
    device: int = 0,
    sync: int = 0,
    memclass: int = 0,
    hres: int = 0,
    major: int = 1,
    minor: int = 0,
    layout_tag: int = 0x0A,
    quant: bytes = b"",
    tail: bytes = b"",
) -> bytes:
    """A descriptor, field by field (section 1)."""
    b = struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<Q", byte_offset)
    b += (
        struct.pack("<IQIIBIB", page_size, num_pages, paged_axis, num_seqs, kv_role, layer_index, index_type) + reserved
    )
    b += bytes([len(sizes)])
    b += b"".join(struct.pack("<QIBBBB", s, align if s else 1, device, sync, memclass, hres) for s in sizes)
    b += (struct.pack("<I", len(quant)) + quant if quant else b"") + tail
    head = struct.pack("<BBIIBBI", major, minor, 20 + len(b), flags, type_tag, layout_tag, rank or len(shape))
    return b"HRRY" + head + b


POOL = np.arange(320, dtype="<f2").reshape(5, 4, 2, 8)
BT = np.array([0, 1, 0], "<u4")
SP = np.array([0, 2, 3], "<u4")
RAW_SHA256 = "f9f9b57e42c2e73ffaf832fe3393f9edbf03e4f484c0b4afc3abca434eec163f"
RAW64_SHA256 = "893be02993879c1531d323a6821a0fccce01390ee425b7417ab986ed06ca2f42"


def raw(bt: Array = BT, sp: Array = SP, pool: Array = POOL, **fields: Any) -> bytes:
    """The worked example in the bare form."""
    return desc(**fields) + pool.tobytes() + bt.tobytes() + sp.tobytes()


def fill(sizes: tuple[int, ...], bufs: tuple[bytes, ...] = (POOL.tobytes(), BT.tobytes(), SP.tobytes())) -> bytes:
    """Payload cut or zero-padded to the declared sizes."""
    return b"".join((b + bytes(n))[:n] for b, n in zip(bufs + (b"",) * 9, sizes, strict=False))


def worked(**changes: Any) -> hw.BlockPagedTensor:
    """F0: two sequences of 6 and 3 tokens, the second re-using page 0."""
    arguments: dict[str, Any] = {"block_table": BT, "seq_ptr": SP, "seq_lens": [6, 3], "layer_index": 3} | changes
    pool = arguments.pop("page_pool", POOL)
    return hw.BlockPagedTensor(pool, **arguments)


# Verdicts.


class Verdict(NamedTuple):
    """What a decoder said: an item and "ok", or class and code, where and offset of the refusal."""

    kind: str
    code: str = ""
    where: str = ""
    offset: int | None = None
    codes: tuple[str, ...] = ()
    """Every code reported: of an error its violations', of an item those that a lenient reader tolerated."""
    item: Any = None


def verdict(data: Any, **options: Any) -> Verdict:
    """Ours; anything but a HurrayWireError passes through and fails the test."""
    try:
        tensor = hw.decode(data, **options)
    except hw.HurrayWireError as error:
        violations = error.violations if isinstance(error, hw.InvalidDescriptorError) else ()
        codes = tuple(str(v.code) for v in violations) or (str(error.code),)
        return Verdict(type(error).__name__, str(error.code), error.where, error.offset, codes)
    return Verdict("ok", codes=tuple(str(v.code) for v in tensor.violations), item=tensor)


def reference_verdict(data: bytes, *, strict: bool = True) -> Verdict:
    """The independent decoder's."""
    try:
        item = refdecode.decode(data, strict=strict)
    except refdecode.Refused as refused:
        return Verdict(refused.error_class, refused.code, refused.where, refused.offset, (refused.code,))
    return Verdict("ok", codes=tuple(fault.code for fault in item.violations), item=item)


def same_item(tensor: hw.BlockPagedTensor, item: refdecode.Decoded) -> bool:
    """Whether both decoders read the same values: fields, tables, buffers."""
    lens = None if tensor.seq_lens is None else tensor.seq_lens.tolist()
    ours = (
        tensor.dtype.tag,
        tensor.shape,
        tensor.page_size,
        tensor.num_pages,
        tensor.num_seqs,
        tensor.kv_role,
        tensor.layer_index,
        tensor.layout.block_table_index_type,
        tensor.block_table.tolist(),
        tensor.seq_ptr.tolist(),
        lens,
        tensor.metadata,
    )
    theirs = (
        item.type_tag,
        item.shape,
        item.page_size,
        item.num_pages,
        item.num_seqs,
        item.kv_role,
        item.layer_index,
        item.index_type,
        item.block_table,
        item.seq_ptr,
        item.seq_lens,
        item.metadata,
    )
    whole = pool_bytes(tensor)
    return ours == theirs and item.buffers[0][: len(whole)] == whole


def pool_bytes(tensor: hw.BlockPagedTensor) -> bytes:
    """The pool's bytes in wire order."""
    pool = tensor.page_pool
    return pool.astype(pool.dtype.newbyteorder("<"), copy=False).tobytes()


# Two decoders, one specification.

BOTH_BROKEN = (
    {"section_codec", "section_offset"},
    {"section_order", "section_kind"},
    {"section_flags", "section_kind"},
    {"section_flags", "section_order"},
    {"section_cover", "section_order"},
    {"section_cover", "section_codec"},
)
"""Where one entry of a section table breaks both rules: each decoder names the one that it comes to first."""

ELSEWHERE = {
    "truncated": "ours tells where the input ends, the other decoder which field promised more",
    "descriptor_length": "ours names the table that is cut, the other decoder the length",
    "quantization_storage": "type_tag here, the scheme's tag there: the rule relates the two",
    "extension_type": "flags here, type_tag there: the rule relates the two",
    "section_checksum": "the stored bytes here, the entry's field there",
    "section_cover": "the last chunk's length here, the handle's size there",
    "section_codec": "stored_length here, codec there, where both are wrong",
}
"""Codes whose place the two decoders tell differently, both within the specification."""


def disagreement(ours: Verdict, theirs: Verdict) -> str:
    """In what two verdicts on the same bytes differ, or "": class, code, values, place."""
    if "ok" in (ours.kind, theirs.kind):
        if ours[:2] == ("UnsupportedError", "shape") and not theirs.item.buffers[0]:
            return ""  # a pool that holds nothing, of a shape that no NumPy array can have
        if ours.kind != theirs.kind:
            return f"{ours[:4]} against {theirs[:4]}"
        if sorted(ours.codes) != sorted(theirs.codes):
            return f"reported {ours.codes} against {theirs.codes}"
        return "" if same_item(ours.item, theirs.item) else "the values differ"
    both_broken = {ours.code, theirs.code} in BOTH_BROKEN
    if ours.kind != theirs.kind or not (theirs.code in ours.codes or both_broken):
        return f"{ours[:4]} {ours.codes} against {theirs[:4]}"
    if ours.code != theirs.code or ours.code in ELSEWHERE:
        return ""
    return "" if ours[2:4] == theirs[2:4] else f"{ours[:4]} against {theirs[:4]}: the place"


def disagreements(changed: Iterable[tuple[str, bytes]], *, strict: bool = True) -> dict[str, str]:
    """Every disagreement over changed bytes, with the first change that shows it."""
    found: dict[str, str] = {}
    count = 0
    for name, data in changed:
        count += 1
        told = disagreement(verdict(data, strict=strict), reference_verdict(data, strict=strict))
        if told:
            found.setdefault(told, name)
    assert count
    return found


def byte_changes(
    data: bytes, places: Iterable[int], values: Iterable[int] | None = None
) -> Iterator[tuple[str, bytes]]:
    """Every single-byte change at some places, to all other values or to those given."""
    told = None if values is None else list(values)
    for at in places:
        for value in range(256) if told is None else told:
            if value != data[at]:
                yield f"byte {at} = {value:#04x}", data[:at] + bytes([value]) + data[at + 1 :]


def under_a_ceiling(cases: list[tuple[bytes, dict[str, Any]]]) -> list[str]:
    """The verdicts of a child process with little memory; it must not grow by more than 64 MiB."""
    told = json.dumps([(data.hex(), options) for data, options in cases])
    child = Path(__file__).with_name("memory_child.py")
    path = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(child)], input=told, capture_output=True, text=True, env=path, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer["grown"] < 64 << 20
    assert [v for v in answer["verdicts"] if v.startswith("ESCAPED")] == []
    verdicts: list[str] = answer["verdicts"]
    return verdicts
