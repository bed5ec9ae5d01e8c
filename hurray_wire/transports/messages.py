"""What endpoints tell each other: an offer, and how it ended. Read as anything from a peer is: believed in nothing.

Every message is cut into parts of at most what the engine carries. A part is a prologue (see `PART`) and bytes; an
offer (see `OFFER`) is followed by what its counts say. All numbers are little-endian.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

import numpy as np

from hurray_wire.errors import Code, FrameError, LimitError, TruncatedError, UnsupportedError
from hurray_wire.indices import Int64Array

PART = Struct("<4sBBHQII")
"""Magic, version, kind, reserved, transfer, part, parts."""
OFFER = Struct("<IIIII")
"""Regions whose access follows, bytes of the header, runs of pages, buffers behind the pool; 1 if SUMS follow."""
MAGIC = b"HRTM"
VERSION = 1
MOST_BYTES = 256 << 20
"""Of one message in parts; a header and its runs are a thousandth of their pool."""
_MOST_UNFINISHED, _MOST_PARTS = 64, 1 << 16


class Kind(IntEnum):
    """What a message says about a transfer."""

    OFFER = 1
    DONE = 2
    DECLINED = 3
    WITHDRAWN = 4
    STOPPED = 5
    SUMS = 6
    WAITING = 7


class Message(NamedTuple):
    """A whole message; `transfer` is the sender's number for what it is about."""

    kind: Kind
    transfer: int
    body: bytes


class Offer(NamedTuple):
    """A tensor that a peer may read: its header, where its pages lie, and where each buffer behind the pool does."""

    access: list[bytes]
    header: bytes
    first: Int64Array
    pages: Int64Array
    buffers: list[int]
    sums_follow: bool = False
    """The payload is being hashed: the header with its checksums comes when that is done, while pages are read."""


def parts_of(message: Message, most: int) -> Iterator[bytes]:
    """The message as it is told, no part longer than `most`."""
    step = max(1, most - PART.size)
    count = max(1, -(-len(message.body) // step))
    for part in range(count):
        piece = message.body[part * step : (part + 1) * step]
        yield PART.pack(MAGIC, VERSION, message.kind, 0, message.transfer, part, count) + piece


class Assembler:
    """Parts of messages, put together again, peer by peer."""

    def __init__(self) -> None:
        self._unfinished: dict[tuple[str, int, int], list[bytes | None]] = {}

    def take(self, peer: str, data: bytes) -> Message | None:
        """The message that a part completes.

        Raises:
            FrameError, UnsupportedError, TruncatedError, LimitError: it is none of ours.
        """
        if len(data) < PART.size:
            raise TruncatedError(needed=PART.size, available=len(data), where="message")
        magic, version, kind, reserved, transfer, part, parts = PART.unpack_from(data)
        if magic != MAGIC:
            raise FrameError(f"a message begins with {magic!r}, must be {MAGIC!r}", code=Code.MAGIC, where="message")
        if version != VERSION:
            raise UnsupportedError(f"messages of version {version}", code=Code.VERSION, where="message.version")
        if kind not in set(Kind) or reserved or part >= parts:
            raise FrameError(f"kind {kind}, part {part} of {parts}", code=Code.SECTION_KIND, where="message.kind")
        piece = data[PART.size :]
        if parts == 1:
            return Message(Kind(kind), transfer, piece)
        if parts > _MOST_PARTS or parts * len(piece) > MOST_BYTES + len(piece):
            raise LimitError(claimed=parts * len(piece), limit=MOST_BYTES, code=Code.FRAME_BYTES, where="message.parts")
        return self._put(peer, Message(Kind(kind), transfer, piece), part, parts)

    def _put(self, peer: str, message: Message, part: int, parts: int) -> Message | None:
        key = (peer, message.transfer, message.kind)
        pieces = self._unfinished.setdefault(key, [None] * parts)
        if len(pieces) != parts:
            del self._unfinished[key]
            raise FrameError(f"{parts} parts, and {len(pieces)}", code=Code.SECTION_COVER, where="message.parts")
        pieces[part] = message.body
        whole = [piece for piece in pieces if piece is not None]
        if len(whole) < parts:
            while len(self._unfinished) > _MOST_UNFINISHED:  # parts that were lost are not waited for for ever
                del self._unfinished[next(iter(self._unfinished))]
            return None
        del self._unfinished[key]
        return message._replace(body=b"".join(whole))


def build_offer(offer: Offer) -> bytes:
    """The body of an OFFER."""
    counts = OFFER.pack(len(offer.access), len(offer.header), offer.first.size, len(offer.buffers), offer.sums_follow)
    access = b"".join(len(blob).to_bytes(4, "little") + blob for blob in offer.access)
    numbers = [offer.first, offer.pages, np.array(offer.buffers, np.int64)]
    return b"".join([counts, access, offer.header, *(part.astype("<i8").tobytes() for part in numbers)])


def parse_offer(body: bytes) -> Offer:
    """The offer in a body: lengths and ranges are checked here, all else where it is used.

    Raises:
        TruncatedError, FrameError.
    """
    _need(body, OFFER.size, "counts")
    regions, header_bytes, runs, buffers, sums_follow = OFFER.unpack_from(body)
    if sums_follow > 1:
        raise FrameError(f"flags are {sums_follow:#x}", code=Code.SECTION_FLAGS, where="offer.flags")
    at, access = OFFER.size, []
    for _ in range(regions):
        _need(body, at + 4, "access")
        length = int.from_bytes(body[at : at + 4], "little")
        _need(body, at + 4 + length, "access")
        access.append(body[at + 4 : at + 4 + length])
        at += 4 + length
    end = at + header_bytes + 16 * runs + 8 * buffers
    _need(body, end, "header")
    if len(body) > end:
        raise FrameError(f"{len(body) - end} bytes follow", code=Code.TRAILING_BYTES, where="offer")
    header, at = body[at : at + header_bytes], at + header_bytes
    numbers = np.frombuffer(body, "<i8", 2 * runs + buffers, at).astype(np.int64)
    if numbers.size and int(numbers.min()) < 0:
        raise FrameError("an address or a count is negative", code=Code.SECTION_OFFSET, where="offer")
    return Offer(
        access, header, numbers[:runs], numbers[runs : 2 * runs], numbers[2 * runs :].tolist(), bool(sums_follow)
    )


def _need(body: bytes, size: int, where: str) -> None:
    if len(body) < size:
        raise TruncatedError(needed=size, available=len(body), where=f"offer.{where}")


def bare_refused() -> UnsupportedError:
    """The bare form has neither lengths nor checksums: nothing could be verified."""
    message = "tensors travel over transfer engines as frames"
    return UnsupportedError(message, code=Code.BARE_FORM, where="framing")


def reason_of(body: bytes) -> str:
    """The text of a DECLINED, whatever came."""
    return body[:1000].decode("utf-8", "replace")


def check_runs(offer: Offer, num_pages: int, page_bytes: int, sizes: Sequence[int]) -> None:
    """Hold an offer to its header: as many pages and buffers, and no address beyond the end of memory.

    Raises:
        FrameError: `section_cover`, `section_offset`.
    """
    most = np.iinfo(np.int64).max
    if len(offer.buffers) != len(sizes):
        message = f"{len(offer.buffers)} buffers behind the pool, the header has {len(sizes)}"
        raise FrameError(message, code=Code.SECTION_COVER, where="offer.buffers")
    pages = offer.pages
    if pages.size and (int(pages.min()) < 1 or int(pages.max()) > num_pages):
        raise FrameError("a run has no pages, or too many", code=Code.SECTION_COVER, where="offer.pages")
    if int(pages.sum()) != num_pages:
        message = f"runs of {int(pages.sum())} pages, the header has {num_pages}"
        raise FrameError(message, code=Code.SECTION_COVER, where="offer.pages")
    room = most - num_pages * page_bytes
    beyond = any(start > most - size for start, size in zip(offer.buffers, sizes, strict=True))
    if beyond or (pages.size and int(offer.first.max()) > room):
        raise FrameError("an address is beyond the end of memory", code=Code.SECTION_OFFSET, where="offer.first")
