"""Sizes that are declared and never come: nothing is allocated that the input has not paid for (case 15).

Each case runs in a child that may have 2 GiB of address space: a reader that allocates what a header declares dies
there, or leaves by a MemoryError. 133 bytes are enough to declare 2^64 - 1.
"""

from __future__ import annotations

import io
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from frames import DESCRIPTOR, METADATA, PAGE_POOL, Section, build, changed, header_resealed, patched, worked_sections
from stream_helpers import run_child
from stream_ways import WAYS
from support import BT, POOL, SP, desc

import hurray_wire as hw

SIZES = (2**30, 2**34, 2**36 + 2**20, 2**40, 2**62, 2**63, 2**64 - 1)
ANYTHING = hw.Limits(descriptor_bytes=2**64, metadata_bytes=2**64, frame_bytes=2**64, decoded_bytes=2**64)
READERS = ("feed-ragged", "buffer-some", "bytesio", "socket", "pipe", "path", "aio-socket", "aio-stream")


def bare_pool(n: int) -> bytes:
    n = n // 128 * 128
    return desc(sizes=(n, 12, 12), num_pages=n // 128)


def bare_pool_and_some_bytes(n: int) -> bytes:
    return bare_pool(n) + bytes(4096)


def bare_table(n: int) -> bytes:
    """Stage 5 does not know how long block_table should be."""
    return desc(sizes=(640, n // 4 * 4, 12)) + POOL.tobytes()


def bare_offsets(n: int) -> bytes:
    return desc(sizes=(640, 12, 2**34), num_seqs=2**32 - 1) + POOL.tobytes() + BT.tobytes()


def bare_scales(n: int) -> bytes:
    """The sizes of NF4 and MXFP scales are not checked."""
    scheme = struct.pack("<BBHIII", 5, 1, 0, 0, 16, 3)
    head = desc(type_tag=0x10, sizes=(320, 12, 12, n), flags=1, quant=scheme)
    return head + bytes(320) + BT.tobytes() + SP.tobytes()


def bare_slack(n: int) -> bytes:
    """More than the shape needs: a lenient reader takes it."""
    return desc(sizes=(n, 12, 12)) + POOL.tobytes()


def bare_descriptor(n: int) -> bytes:
    return patched(desc(), 6, struct.pack("<I", min(n, 2**32 - 1)))


def frame_length(n: int) -> bytes:
    frame = build(worked_sections(), frame_length=min(n // 64 * 64, 2**64 - 64))
    return frame[:800]


def frame_pool(n: int) -> bytes:
    """A raw pool of n bytes: everything about it is lawful, but it does not come."""
    n = n // 128 * 128
    sections = [
        Section(DESCRIPTOR, desc(sizes=(n, 12, 12), num_pages=n // 128)),
        *(s for s in worked_sections() if s.kind not in (DESCRIPTOR, PAGE_POOL)),
    ]
    sections.insert(2, Section(PAGE_POOL, b"", raw_length=n, stored_length=n, checksum=1))
    return moved(build(sections), n, PAGE_POOL)


def moved(frame: bytes, n: int, kind: int) -> bytes:
    """The frame with what stands behind a section n bytes further on, as if that section's bytes were there."""
    data = bytearray(frame)
    (count,) = struct.unpack_from("<H", data, 20)
    for i in range(count):
        at = 40 + 48 * i
        (offset,) = struct.unpack_from("<Q", data, at + 24)
        if data[at] > kind:
            struct.pack_into("<Q", data, at + 24, (offset + n) % 2**64)
    struct.pack_into("<Q", data, 24, (len(frame) + n) % 2**64)
    return header_resealed(bytes(data))


def frame_metadata(n: int) -> bytes:
    n = n // 64 * 64
    sections = worked_sections()
    sections.insert(2, Section(METADATA, b"", raw_length=n, stored_length=n, checksum=1))
    return moved(build(sections), n, METADATA)[:600]


def frame_bomb(n: int) -> bytes:
    """A chunk of a few bytes that says it holds n: all of the frame is there."""
    n = n // 128 * 128
    chunk = bytearray(zstandard.ZstdCompressor().compress(bytes(2**24)))
    stated = chunk[4] & 0xC0
    assert stated == 0x80  # four bytes of content size behind the window's
    at = 5 + (0 if chunk[4] & 0x20 else 1)
    grown = bytearray(chunk[:at]) + struct.pack("<Q", n) + chunk[at + 4 :]
    grown[4] |= 0xC0
    sections = [
        Section(DESCRIPTOR, desc(sizes=(n, 12, 12), num_pages=n // 128)),
        *(s for s in changed(PAGE_POOL, data=bytes(grown), raw_length=n, codec=1) if s.kind != DESCRIPTOR),
    ]
    return build(sections)


def many_sections(n: int) -> bytes:
    frame = build(worked_sections(), section_count=65535, header_length=48 + 48 * 65535, frame_length=2**36)
    return frame[:1000]


CASES: dict[str, Callable[[int], bytes]] = {
    function.__name__: function
    for function in (
        *(bare_pool, bare_pool_and_some_bytes, bare_table, bare_offsets, bare_scales, bare_descriptor),
        *(frame_length, frame_pool, frame_metadata, frame_bomb, many_sections),
    )
}


def peak() -> int:
    """Bytes of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Complaints:
    """What went otherwise than by TruncatedError, LimitError, or FrameError for what cannot be, within seconds
    and without memory."""

    def __init__(self) -> None:
        self.found: list[str] = []
        for way in READERS:  # what is made once
            WAYS[way].run(hw.encode(hw.decode(desc() + POOL.tobytes() + BT.tobytes() + SP.tobytes())), streams="all")
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        self.before = peak()

    def tell(self) -> None:
        sys.stdout.write("\n".join(self.found))

    def judge(self, name: str, call: Callable[[], hw.HurrayWireError | None]) -> None:
        begun = time.monotonic()
        try:
            error: BaseException | None = call()
        except BaseException as raised:
            error = raised
        took = time.monotonic() - begun
        lawful = type(error) in (hw.TruncatedError, hw.LimitError)
        impossible = type(error) is hw.FrameError and error.code in ("frame_length", "section_offset", "zstd")
        if not lawful and not impossible:
            self.found.append(f"{name}: {type(error).__name__}: {error}"[:200])
        if took > 10:
            self.found.append(f"{name}: took {took:.1f} s")
        grown = peak() - self.before
        if grown > 64 << 20:
            self.found.append(f"{name}: grew by {grown >> 20} MiB")
            self.before = peak()


def raising(call: Callable[[], Any]) -> Callable[[], hw.HurrayWireError | None]:
    def run() -> hw.HurrayWireError | None:
        try:
            call()
        except hw.HurrayWireError as error:
            return error
        return None

    return run


def hostile(*cases: str) -> None:
    """Run in a child: some kinds of lies, of every size, to every reader; says what went wrong."""
    complaints = Complaints()
    for case in cases:
        lie(case, complaints)
    complaints.tell()


def lie(case: str, complaints: Complaints) -> None:
    for n in SIZES if case not in ("bare_offsets", "bare_descriptor", "many_sections") else SIZES[1:2]:
        data = CASES[case](n)
        for name, limits in (("limits", hw.DEFAULT_LIMITS), ("no limits", ANYTHING)):
            for way in READERS:
                run = WAYS[way].run
                complaints.judge(f"{case} {n:#x} {name} {way}", lambda r=run, d=data, m=limits: r(d, limits=m).error)  # type: ignore[misc]
            calls: dict[str, Callable[..., Any]] = {
                "decode": hw.decode,
                "iter_decode": lambda d, limits: list(hw.iter_decode(d, limits=limits)),
                "open_frame": lambda d, limits: hw.open_frame(d, limits=limits).tensor(),
                "read_at": lambda d, limits: hw.open_frame(lambda o, k: d[o : o + k], limits=limits).tensor(),
            }
            for call, function in calls.items():
                bound = raising(lambda f=function, d=data, m=limits: f(d, limits=m))  # type: ignore[misc]
                complaints.judge(f"{case} {n:#x} {name} {call}", bound)


GROUPS = [[c for c in CASES if c.startswith("bare")], [c for c in CASES if c.startswith("frame")], ["many_sections"]]


@pytest.mark.parametrize("cases", GROUPS, ids=lambda cases: cases[0])
def test_what_is_declared_and_does_not_come(cases: list[str]) -> None:
    assert run_child("test_stream_hostile", "hostile", *cases) == ""


def lenient() -> None:
    """Run in a child: a lenient `read_into` and `skip` of buffers that are larger than needed, and do not come."""
    complaints = Complaints()
    for n in SIZES:
        for limits in (hw.DEFAULT_LIMITS, ANYTHING):

            def into(n: int = n, limits: hw.Limits = limits) -> None:
                reader = hw.StreamReader(io.BytesIO(bare_slack(n)), strict=False, limits=limits)
                header = reader.next_header()
                assert header is not None
                header.read_into(np.zeros((5, 4, 2, 8), np.float16), range(5))

            def skip(n: int = n, limits: hw.Limits = limits) -> None:
                header = hw.StreamReader(io.BytesIO(bare_slack(n)), strict=False, limits=limits).next_header()
                assert header is not None
                header.skip()

            complaints.judge(f"{n:#x} read_into", raising(into))
            complaints.judge(f"{n:#x} skip", raising(skip))
    complaints.tell()


def test_slack_that_does_not_come() -> None:
    assert run_child("test_stream_hostile", "lenient") == ""


def sparse() -> None:
    """Run in a child: files of the declared length that hold nothing, and tables that are no tables."""
    complaints = Complaints()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sparse"
        for case in (bare_table, bare_scales):
            data = case(2**34)
            path.write_bytes(data)
            with path.open("r+b") as file:
                file.truncate(len(data) + 2**34 + 2**20)
            complaints.judge(f"{case.__name__} open_frame", raising(lambda: hw.open_frame(path)))
            complaints.judge(f"{case.__name__} reader", raising(lambda: list(hw.StreamReader(path))))
    complaints.tell()


def test_sparse_files() -> None:
    assert run_child("test_stream_hostile", "sparse") == ""
