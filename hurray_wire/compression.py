"""Bytes of one chunk in, bytes of one chunk out: byte shuffle, zstd, and the threads that share the chunks.

The only importer of `zstandard`. A chunk is a run of bytes and the width of its elements, nothing more:
frames, sections, descriptors, limits and files must never enter here. Section 4 of the format, rules "zstd"
and "Byte shuffle": what a reader demands is in `check_zstd_frame`, all else is the writer's affair.
"""

from __future__ import annotations

import functools
import operator
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
import zstandard

from hurray_wire.errors import Code, FrameError

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")
R = TypeVar("R")

SHUFFLE_WIDTHS = (2, 4, 8, 16)
_MISFIT = "cannot shuffle {} bytes by width {}: they must be whole elements of 2, 4, 8 or 16 bytes"
_SHIFTED_WIDTHS = (2, 4)  # split by shifting elements; from 8 on strided copies are faster (measured)
_JOINED_BYTES = 256 << 10  # joined in pieces that stay in the L2 cache while each plane passes over them
_SCRATCH_KEPT = 4 << 20
_PACKED_FROM = 128 << 10
_SPOTS, _SPOT_ELEMENTS, _SAMPLED_FROM = 32, 128, 64 << 10
_WORTHWHILE = 1 / 32  # of a plane saved in the sample; less is noise
_THREADED_FROM = 4 << 20
_MOST_THREADS = 8  # a core compresses at a sixth of the speed of a copy: more of them wait for memory
_INTERRUPT = -1  # goes before the error of any item
_MAGIC = bytes.fromhex("28b52ffd")
_WINDOW_LOG = 17
_WINDOW_FLOOR, _BLOCK_MAXIMUM = 8 << 20, 128 << 10
_RLE_BLOCK, _RESERVED_BLOCK = 1, 3
_NOISE_HEAD_BYTES = 14

# Keys and values hold no matches, only skewed bytes: the smallest tables leave little but Huffman coding, and
# beat every level in speed and size. A target_length above 0 would turn Huffman coding off. By zstandard's
# defaults the content size is written, checksum and dictionary id are not.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=_WINDOW_LOG,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
)


def shuffle_width(itemsize: int) -> int:
    """The shuffle's element width for elements of `itemsize` bytes; 0 is no filter."""
    return itemsize if itemsize in SHUFFLE_WIDTHS else 0


def shuffle(raw: Bytes | memoryview, width: int, out: Bytes | memoryview) -> None:
    """Byte j of element i of `raw` to j * n + i of `out`, which is as long and apart from it (section 4)."""
    source, planes = _of_one_size(raw, out, width)
    _split(source, width, 0, planes)


def unshuffle(planes: Bytes | memoryview, width: int, out: Bytes | memoryview) -> None:
    """The inverse of `shuffle`."""
    source, target = _of_one_size(planes, out, width)
    n, step = source.size // width, _JOINED_BYTES // width
    for start in range(0, n, step):
        stop = min(start + step, n)
        piece = target[start * width : stop * width]
        if width == 2:
            words = piece.view("<u2")
            np.multiply(source[n + start : n + stop], 256, out=words, dtype=np.uint16)
            np.add(words, source[start:stop], out=words)
            continue
        for j in range(width):
            np.copyto(piece[j::width], source[j * n + start : j * n + stop])


def _of_one_size(source: Bytes | memoryview, target: Bytes | memoryview, width: int) -> tuple[Bytes, Bytes]:
    a, b = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    if width not in SHUFFLE_WIDTHS or a.size % width or a.size != b.size:
        raise ValueError(_MISFIT.format(a.size, width) + f" and be as many as the {b.size} to write")
    return a, b


def _split(source: Bytes, width: int, first: int, planes: Bytes) -> None:
    """Byte planes `first` and up, as many as `planes` has room for."""
    n = source.size // width
    for at in range(0, planes.size, n or 1):
        _split_rows(source[None], width, first + at // n, planes[None, at : at + n])


class _Kit:
    """What a thread works with: zstd contexts, which take 15 us each to build, and up to 4 MiB of each scratch."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor()
        self._scratch = self._packed = np.empty(0, np.uint8)

    def scratch(self, size: int) -> Bytes:
        if size > _SCRATCH_KEPT:
            return np.empty(size, np.uint8)
        if size > self._scratch.size:
            self._scratch = np.empty(size, np.uint8)
        return self._scratch[:size]

    def compress(self, planes: Bytes) -> Bytes:
        """One frame, to be used before the next one is made: zstandard's own memory, or this kit's.

        `compress` takes memory of the worst case each time. Where that is much, its pages are mapped anew for every
        chunk, for which threads wait for one another: compressing into memory that is there is faster by a half.
        """
        if not _PACKED_FROM <= planes.size <= _SCRATCH_KEPT:
            return np.frombuffer(self.compressor.compress(planes.data), np.uint8)
        room = planes.size + planes.size // 128 + 1024  # above ZSTD_compressBound, and a last block of its own
        if room > self._packed.size:
            self._packed = np.empty(room, np.uint8)
        with self.compressor.stream_reader(planes.data, size=planes.size) as reader:
            size = reader.readinto(self._packed)
        return self._packed[:size]


_local = threading.local()


@contextmanager
def _kit() -> Iterator[_Kit]:
    """The thread's kit, dropped when it ends; taken out in use, so a signal handler's chunk gets another."""
    kit: _Kit = _local.__dict__.pop("kit", None) or _Kit()
    try:
        yield kit
    finally:
        _local.kit = kit


class PackedChunk:
    """A chunk's zstd frame that lies nowhere yet: its size, and `write` to put it into memory of that size.

    Planes of noise, most of a frame's bytes, are read from the chunk only then: once, into their place.
    """

    __slots__ = ("_blocks", "_noisy", "_source", "_width", "size")

    def __init__(self, source: Bytes, width: int, noisy: int, frame: Bytes) -> None:
        start = zstandard.frame_header_size(frame.data) if noisy else 0  # a frame with noise before it gets its own
        self._source, self._width, self._noisy, self._blocks = source, width, noisy, frame[start:].tobytes()
        self.size = len(self._blocks) + (_noise_bytes(source.size // width, noisy) if noisy else 0)

    def write(self, out: Bytes) -> None:
        """Put the frame into `out`, which has `size` bytes."""
        at = _write_noise(self._source, self._width, self._noisy, out) if self._noisy else 0
        out.data[at:] = self._blocks


def pack_chunk(raw: Bytes | memoryview, width: int) -> PackedChunk | None:
    """One zstd frame of the chunk's byte planes (`width` 0: of its bytes), or None: store it raw.

    None where a sample shows nothing to gain, so that noise costs little, or where the frame is not smaller. The
    chunk must not change before the frame is written.
    """
    planes = source = np.frombuffer(raw, np.uint8)
    if width and (width not in SHUFFLE_WIDTHS or source.size % width):
        raise ValueError(_MISFIT.format(source.size, width))
    with _kit() as kit:
        noisy = _noise_planes(source, width or 1, kit.compressor)
        if noisy == (width or 1):
            return None
        if width:
            planes = kit.scratch((width - noisy) * (source.size // width))
            _split(source, width, noisy, planes)
        packed = PackedChunk(source, width, noisy, kit.compress(planes))
    return packed if packed.size < source.size else None


def compress_chunk(raw: Bytes | memoryview, width: int) -> bytes | memoryview | None:
    """The same in memory of its own: nothing of the chunk is looked at any more."""
    packed = pack_chunk(raw, width)
    if packed is None:
        return None
    frame = np.empty(packed.size, np.uint8)
    packed.write(frame)
    return frame.data.toreadonly()


def _noise_planes(source: Bytes, width: int, compressor: zstandard.ZstdCompressor) -> int:
    """How many planes, from the first on, are noise in a sample; all, where the whole would gain little."""
    if source.size < _SAMPLED_FROM:
        return 0
    spot = _SPOT_ELEMENTS * width
    rows = source.size // spot
    sample = source[: rows * spot].reshape(rows, spot)[_spots(rows)].reshape(-1, width)
    planes = [np.ascontiguousarray(plane).data for plane in sample.T]
    saved = [1 - len(compressor.compress(plane)) / len(plane) for plane in planes]
    if sum(max(0, part) for part in saved) < width * _WORTHWHILE:
        return width
    return next(j for j, part in enumerate(saved) if part >= _WORTHWHILE)


@functools.lru_cache(maxsize=64)
def _spots(rows: int) -> npt.NDArray[np.intp]:
    """Rows to sample: one in each equal part, at golden-ratio places so as not to keep step with pages."""
    part = np.arange(_SPOTS)
    return ((part + part * 0.618034 % 1) * rows / _SPOTS).astype(np.intp)


def _noise_bytes(plane_bytes: int, noisy: int) -> int:
    """Bytes before the compressed blocks of a frame whose first `noisy` planes are noise."""
    return _NOISE_HEAD_BYTES + noisy * (3 * len(range(0, plane_bytes, _BLOCK_MAXIMUM)) + plane_bytes)


def _write_noise(source: Bytes, width: int, noisy: int, out: Bytes) -> int:
    """A frame's header and its first `noisy` planes in raw blocks; gives where the other planes' blocks begin.

    Those read the same behind these: raw blocks leave repeat offsets and entropy tables alone, and no match reaches
    back into them. zstd by itself would also store noise raw, but copies it three times on the way.
    """
    n, at = source.size // width, _NOISE_HEAD_BYTES
    out.data[:at] = _MAGIC + bytes([0xC0, (_WINDOW_LOG - 10) << 3]) + source.size.to_bytes(8, "little")
    whole, rest = divmod(n, _BLOCK_MAXIMUM)
    for j in range(noisy):
        start = 0
        for count, size in ((whole, _BLOCK_MAXIMUM), (1, rest)):
            if not count * size:
                continue
            # All whole blocks in one call: threads that come back from many short ones wait for each other.
            blocks = out[at : at + count * (3 + size)].reshape(count, 3 + size)
            blocks[:, :3] = np.frombuffer((size << 3).to_bytes(3, "little"), np.uint8)
            elements = source[start * width : (start + count * size) * width].reshape(count, size * width)
            _split_rows(elements, width, j, blocks[:, 3:])
            start, at = start + count * size, at + count * (3 + size)
    return at


def _split_rows(elements: Bytes, width: int, j: int, planes: Bytes) -> None:
    """Byte plane j of elements in rows, a row of the plane for each."""
    if width not in _SHIFTED_WIDTHS:
        np.copyto(planes, elements[:, j::width])
    elif j:
        np.right_shift(elements.view(f"<u{width}"), 8 * j, out=planes, casting="unsafe")
    else:
        np.copyto(planes, elements.view(f"<u{width}"), casting="unsafe")


class _Place(NamedTuple):
    where: str
    offset: int

    def refuse(self, at: int, message: str, code: Code = Code.ZSTD) -> NoReturn:
        raise FrameError(message, code=code, where=self.where, offset=self.offset + at)


def check_zstd_frame(stored: memoryview, raw_length: int, *, where: str, offset: int) -> None:
    """All that must be known of a chunk before a byte is decompressed (section 4, rule "zstd").

    One zstd frame and nothing else, no dictionary, a stated content size of `raw_length`, a window of at most
    the greater of that and 8 MiB. Walks the block headers, reads no payload.

    Raises:
        FrameError: `zstd`, at the byte found wrong.
    """
    place = _Place(where, offset)
    frame = memoryview(stored).cast("B")
    length, content_size, window = _frame_header(frame, place)
    if content_size != raw_length:
        place.refuse(4, f"zstd frame states a content size of {content_size}, must be {raw_length}")
    allowed = max(raw_length, _WINDOW_FLOOR)
    if window > allowed:
        place.refuse(5, f"zstd frame asks for a window of {window}, at most {allowed} is allowed")
    end = _blocks_end(frame, length, min(window, _BLOCK_MAXIMUM), place) + (4 if frame[4] & 0x04 else 0)
    if end != len(frame):
        place.refuse(min(end, len(frame)), f"the zstd frame is {end} bytes, {len(frame)} are stored")


def _frame_header(frame: memoryview, place: _Place) -> tuple[int, int, int]:
    """Length, content size and window from the frame header (RFC 8878, 3.1.1.1, which has bit 4 ignored)."""
    magic = bytes(frame[:4])
    if magic != _MAGIC:
        place.refuse(0, f"found {magic.hex(' ') or 'nothing'}, a zstd frame begins with {_MAGIC.hex(' ')}")
    flags = frame[4] if len(frame) > 4 else 0x20
    single, size_flag = flags >> 5 & 1, flags >> 6
    start = 6 - single
    length = start + (1 << size_flag if single or size_flag else 0)
    if len(frame) < length:
        place.refuse(len(frame), f"zstd frame ends inside its header of {length} bytes")
    if flags & 0x08:
        place.refuse(4, f"found {flags:#04x} in a zstd frame header, where bit 3 is reserved and must be 0")
    if flags & 0x03:
        place.refuse(4, "zstd frame has a dictionary id, none is allowed, not even 0")
    if length == start:
        place.refuse(4, "zstd frame does not state its content size, it must")
    content_size = int.from_bytes(frame[start:length], "little") + (256 if size_flag == 1 else 0)
    window = content_size if single else (8 + (frame[5] & 7)) << (7 + (frame[5] >> 3))
    return length, content_size, window


def _blocks_end(frame: memoryview, at: int, largest: int, place: _Place) -> int:
    """Where the blocks from `at` on should end, from their headers (RFC 8878, 3.1.1.2)."""
    last = 0
    while not last:
        if at + 3 > len(frame):
            place.refuse(len(frame), "zstd frame ends where a block must follow")
        field = int.from_bytes(frame[at : at + 3], "little")
        last, kind, size = field & 1, field >> 1 & 3, field >> 3
        if kind == _RESERVED_BLOCK:
            place.refuse(at, "zstd block of type 3, which is reserved")
        if size > largest:
            place.refuse(at, f"zstd block of {size} bytes, at most {largest} are allowed")
        at += 3 + (1 if kind == _RLE_BLOCK else size)
    return at


def decompress_chunk(
    stored: memoryview, raw_length: int, width: int, out: Bytes | memoryview, *, where: str, offset: int
) -> None:
    """Decompress one chunk into `out`, which is exactly `raw_length` writable contiguous bytes.

    Raises:
        FrameError: `section_filter` for the width; `zstd` for the frame, untouched, or its corrupt payload.
    """
    target, place = np.frombuffer(out, np.uint8), _Place(where, offset)
    if target.size != raw_length:
        raise ValueError(f"out has {target.size} bytes, the chunk {raw_length}")
    if width and (width not in SHUFFLE_WIDTHS or raw_length % width):
        place.refuse(0, _MISFIT.format(raw_length, width), Code.SECTION_FILTER)
    check_zstd_frame(stored, raw_length, where=where, offset=offset)
    with _kit() as kit:
        planes = kit.scratch(raw_length) if width else target
        # Not decompress(max_output_size=): ignored when a frame states its size. With the whole frame at hand
        # and room for all of its content, zstd decodes in one pass, straight into `planes`, without a window.
        try:
            written = kit.decompressor.stream_reader(stored).readinto(planes)
        except zstandard.ZstdError as error:
            place.refuse(0, f"zstd frame is corrupt: {error}")
        if written != raw_length:
            place.refuse(0, f"zstd frame holds {written} bytes, states {raw_length}")
        if width:
            unshuffle(planes, width, target)


def run_chunks(work: Callable[[T], R], items: Sequence[T], *, threads: int) -> list[R]:
    """`[work(item) for item in items]` by up to `threads` threads, the calling one among them.

    After an error no item is begun; those under way are finished, all threads joined, and the error of the
    first item that has one is raised. Threads are fresh: nothing to share between callers or lose in a fork.
    """
    if threads <= 1 or len(items) <= 1:
        return [work(item) for item in items]
    results: dict[int, R] = {}
    errors: dict[int, BaseException] = {}
    waiting, lock = iter(range(len(items))), threading.Lock()

    def drain() -> None:
        while True:
            with lock:
                index = None if errors else next(waiting, None)
            if index is None:
                return
            try:
                results[index] = work(items[index])
            except BaseException as error:
                errors[index if isinstance(error, Exception) else _INTERRUPT] = error

    _drain_together(drain, min(threads, len(items)), errors)
    try:
        if errors:
            raise errors[min(errors)]
    finally:
        errors.clear()  # else the error's traceback keeps it alive, and the chunks with it
    return [results[index] for index in range(len(items))]


def _drain_together(drain: Callable[[], None], threads: int, errors: dict[int, BaseException]) -> None:
    helpers: list[threading.Thread] = []
    try:
        with suppress(RuntimeError):  # a thread that cannot be had costs speed only
            for _ in range(threads - 1):
                helper = threading.Thread(target=drain, name="hurray_wire chunks", daemon=False)
                helper.start()
                helpers.append(helper)
        drain()
    except BaseException as error:  # between two items
        errors[_INTERRUPT] = error
    for helper in helpers:
        helper.join()


def default_threads(total_bytes: int, threads: int | None) -> int:
    """`threads` if given, an integer from 1 on; else 1 below 4 MiB and then the cores at hand, at most 8."""
    if threads is None:
        if total_bytes < _THREADED_FROM:
            return 1
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(cores, _MOST_THREADS)
    if isinstance(threads, bool):
        raise TypeError(f"threads must be an integer or None, not {threads!r}")
    count = operator.index(threads)
    if count < 1:
        raise ValueError(f"threads must be at least 1, not {count}")
    return count
