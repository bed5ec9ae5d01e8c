"""The sender's side: what of a tensor lies where, and what became of the offer.

Nothing is sent but the offer: a peer reads pages out of the pool, and tables and scales where they lie. What does not
lie in registered memory as it is sent (tables, scales, scrubbed pages, pools in another order) is copied once into a
registered block.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import numpy as np

from hurray_wire import frame_writer
from hurray_wire.arrays import Bytes, address
from hurray_wire.compression import default_threads
from hurray_wire.errors import Code, TransferError, UnsupportedError
from hurray_wire.forms import Form
from hurray_wire.indices import Int64Array
from hurray_wire.options import EncodeOptions
from hurray_wire.payload import PageSource, Payload, payload_of
from hurray_wire.tensor import BlockPagedTensor
from hurray_wire.transports.engine import Region
from hurray_wire.transports.memory import Block, Memory
from hurray_wire.transports.messages import Kind, Message, Offer, bare_refused, build_offer, reason_of
from hurray_wire.transports.runs import folded

if TYPE_CHECKING:
    from types import TracebackType

    from hurray_wire.transports.endpoints import Endpoint

_ALIGNMENT = 64
_ASK_SECONDS = 1.0
"""How often a peer that is waited for is asked whether it is there."""
HASHED_LATER_BYTES = 4 << 20
"""A pool from this size on is hashed while its first pages are being read already."""


class Prepared:
    """A tensor ready to be read: the offer, and the blocks that it needs."""

    def __init__(self, memory: Memory, tensor: BlockPagedTensor, options: EncodeOptions) -> None:
        self._memory = memory
        self.blocks: list[Block] = []
        self.regions: dict[int, Region] = {}
        if options.framing != Form.HRKV:
            raise bare_refused()
        try:
            payload = payload_of(tensor, options)
            early = options.checksum and payload.pages.nbytes >= HASHED_LATER_BYTES
            header = frame_writer.frame_header(payload, replace(options, checksum=False) if early else options)
            first, pages = self._pages(payload)
            buffers = self._behind(payload)
        except BaseException:
            self.release()
            raise
        self.tensor = tensor
        self.nbytes = payload.pages.nbytes + sum(table.size for table in payload.tables)
        access = list(dict.fromkeys(region.access for region in self.regions.values()))
        self.offer = Offer(access, header, first, pages, buffers, early)
        self._payload, self._options = payload, options

    def _use(self, regions: list[Region]) -> None:
        for region in regions:
            self.regions[region.start] = region

    def _block(self, nbytes: int) -> Block:
        block = self._memory.take(nbytes)
        self.blocks.append(block)
        self._use([block.region])
        return block

    def _pages(self, payload: Payload) -> tuple[Int64Array, Int64Array]:
        pages = payload.pages
        if not payload.descriptor.page_bytes and pages.nbytes:
            message = "pages end inside bytes: they cannot be placed one by one"
            raise UnsupportedError(message, code=Code.PACKED_POOL, where="page_pool")
        if not pages.nbytes:
            one = np.ones(min(1, pages.num_pages), np.int64)
            return one * 0, one * pages.num_pages
        addresses = pages.addresses()
        if addresses is None:
            block = self._block(pages.nbytes)
            pages.copy(0, pages.num_pages, block.bytes)
            return folded(block.address + np.arange(pages.num_pages) * pages.page_bytes, pages.page_bytes)
        addresses = self._scrubbed(pages, addresses)
        return folded(addresses, pages.page_bytes)

    def _scrubbed(self, pages: PageSource, addresses: Int64Array) -> Int64Array:
        """The pages' addresses; those that scrubbing changes lie in a block."""
        dirty = pages.scrubbed()
        clean = np.delete(addresses, dirty) if dirty.size else addresses
        regions = self._memory.holding(clean, pages.page_bytes)
        if clean.size and not regions:
            raise ValueError("the pool is not registered with this endpoint: register it once, then send")
        self._use(regions)
        if dirty.size:
            block = self._block(dirty.size * pages.page_bytes)
            pages.copy_some(dirty, block.bytes)
            addresses[dirty] = block.address + np.arange(dirty.size) * pages.page_bytes
        return addresses

    def _behind(self, payload: Payload) -> list[int]:
        """Where each buffer behind the pool lies: its own memory where that is registered, else side by side."""
        found = [self._own(table) for table in payload.tables]
        offsets = np.cumsum([0] + [-(-t.size // _ALIGNMENT) * _ALIGNMENT for t in payload.tables]).tolist()
        if None not in found:
            return [place for place in found if place is not None]
        block = self._block(offsets[-1])
        for i, table in enumerate(payload.tables):
            if found[i] is None:
                block.bytes[offsets[i] :][: table.size] = table
        return [block.address + offsets[i] if place is None else place for i, place in enumerate(found)]

    def _own(self, table: Bytes) -> int | None:
        regions = self._memory.holding(np.array([address(table)]), table.size)
        if not regions:
            return None
        self._use(regions)
        return address(table)

    def message(self) -> bytes:
        """The offer as it is told."""
        return build_offer(self.offer)

    def sums(self) -> bytes | None:
        """The header with the payload's checksums, where the offer went without them: hashed now.

        By one thread fewer than otherwise: the peer is reading already, and the engine needs a core for it.
        """
        if not self.offer.sums_follow:
            return None
        threads = max(1, default_threads(self._payload.pages.nbytes, self._options.threads) - 1)
        return frame_writer.frame_header(self._payload, replace(self._options, threads=threads))

    def release(self) -> None:
        """Give the blocks back."""
        for block in self.blocks:
            block.release()


class Outgoing:
    """A tensor that a peer has been offered. Its memory must not change, nor be deregistered, until that has ended.

    Example:
        >>> import numpy as np
        >>> import hurray_wire as hw
        >>> from hurray_wire import transports
        >>> pool = np.ones((4, 2, 1, 8), np.float16)
        >>> t = hw.BlockPagedTensor(pool, block_table=[2], seq_ptr=[0, 1], seq_lens=[2])
        >>> with transports.endpoint("socket") as one, transports.endpoint("socket") as other:
        ...     peer, _ = one.connect(other.address), other.connect(one.address)
        ...     registration = one.register(pool)
        ...     outgoing = one.send(peer, t, pages="live")
        ...     outgoing.done, outgoing.nbytes
        (False, 44)
    """

    def __init__(self, endpoint: Endpoint, peer: str, transfer: int, prepared: Prepared) -> None:
        self.peer = peer
        self.transfer = transfer
        self._endpoint = endpoint
        self._prepared: Prepared | None = prepared
        self._nbytes = prepared.nbytes
        self._error: TransferError | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of pages, tables and scales that are offered."""
        return self._nbytes

    @property
    def done(self) -> bool:
        """Whether the peer has read it, and found it sound if it verifies.

        Raises:
            TransferError: `declined`, `withdrawn`: it ended otherwise.
        """
        self._endpoint.poll()
        if self._error is not None:
            raise self._error
        return self._prepared is None

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the peer is done, at most so many seconds.

        Raises:
            TimeoutError: it is not; it may still read, until `cancel`.
            TransferError: as `done`; `peer_lost`.
        """
        asked = time.monotonic()

        def ended() -> bool:
            nonlocal asked
            if not self.done and time.monotonic() - asked > _ASK_SECONDS:
                asked = time.monotonic()
                self._ask()
            return self._prepared is None

        self._endpoint.until(ended, timeout, f"{self.peer} has not read transfer {self.transfer}")

    def _ask(self) -> None:
        """A word that needs no answer: where nobody is there to hear it, nobody reads any more."""
        try:
            self._endpoint.tell(self.peer, Message(Kind.WAITING, self.transfer, b""))
        except TransferError as error:
            self.ended(error)
            raise

    def cancel(self, timeout: float = 1.0) -> None:
        """Take the offer back, and wait for a peer that reads to stop, at most so many seconds.

        A peer that does not answer may read on: what it reads then fails its checksums, if it has any.
        """
        if self._prepared is None:
            return
        try:
            self._endpoint.tell(self.peer, Message(Kind.WITHDRAWN, self.transfer, b""))
            self._endpoint.until(self._ended, timeout, "")
        except (TransferError, TimeoutError):
            pass  # the peer is gone, or silent
        self.ended(TransferError("taken back by this end", code=Code.CANCELLED, where="transfer"))

    def _ended(self) -> bool:
        self._endpoint.poll()
        return self._prepared is None

    def uses(self, region: Region) -> bool:
        """Whether it is out there still, in this memory."""
        prepared = self._prepared
        return prepared is not None and prepared.regions.get(region.start) is region

    def heard(self, message: Message) -> None:
        """The peer's last word."""
        if message.kind is Kind.DECLINED:
            self.ended(TransferError(f"{self.peer}: {reason_of(message.body)}", code=Code.DECLINED, where="transfer"))
        elif message.kind is Kind.STOPPED:
            self.ended(TransferError(f"{self.peer} stopped reading", code=Code.WITHDRAWN, where="transfer"))
        elif message.kind is Kind.DONE:
            self.ended(None)

    def ended(self, error: TransferError | None) -> None:
        """Nobody reads any more: let go of the tensor and of the blocks."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            self._error = error
            prepared.release()
            self._endpoint.forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


def as_message(transfer: int, prepared: Prepared) -> Message:
    """The offer of a transfer."""
    return Message(Kind.OFFER, transfer, prepared.message())
