"""The receiver's side of an offer: its header judged, nothing of the payload read."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from hurray_wire.arrays import Bytes, as_bytes
from hurray_wire.descriptor import TensorDescriptor
from hurray_wire.errors import Code, FrameError, HurrayWireError, TransferError
from hurray_wire.forms import PREFIX_BYTES, Form, identify
from hurray_wire.frame_reader import Described, Head, read_frame_head
from hurray_wire.inspection import Inspection, inspection_of
from hurray_wire.memory import allocated
from hurray_wire.options import DecodeOptions
from hurray_wire.receiving import described_header
from hurray_wire.tensor import BlockPagedTensor
from hurray_wire.transports.messages import Kind, Message, Offer, bare_refused, check_runs
from hurray_wire.transports.reading import Reading

if TYPE_CHECKING:
    from hurray_wire.transports.endpoints import Endpoint


class Incoming:
    """A tensor that a peer offers: `.inspection` says what it is; `read_into` fetches it, `decline` does not.

    Example:
        >>> import numpy as np
        >>> import hurray_wire as hw
        >>> from hurray_wire import transports
        >>> theirs, mine = np.ones((4, 2, 1, 8), np.float16), np.zeros((9, 2, 1, 8), np.float16)
        >>> t = hw.BlockPagedTensor(theirs, block_table=[2], seq_ptr=[0, 1], seq_lens=[2])
        >>> with transports.endpoint("socket") as one, transports.endpoint("socket") as other:
        ...     peer, _ = one.connect(other.address), other.connect(one.address)
        ...     registrations = one.register(theirs), other.register(mine)
        ...     outgoing = one.send(peer, t, pages="live")
        ...     incoming = other.receive(timeout=10, expect={"dtype": "float16", "page_size": 2})
        ...     back = incoming.read_into(mine, [7], timeout=10)
        ...     back.block_table.tolist(), back.same_tokens(t)
        ([7], True)
    """

    def __init__(self, endpoint: Endpoint, peer: str, transfer: int, offer: Offer, options: DecodeOptions) -> None:
        self.peer = peer
        self.transfer = transfer
        self.offer = offer
        self.options = options
        self._endpoint = endpoint
        self._raw = as_bytes(offer.header)
        if identify(offer.header[:PREFIX_BYTES]) is Form.BARE:
            raise bare_refused()
        self.found, self.small = described_header(self._raw, options)
        descriptor = self.found.descriptor
        sizes = [handle.byte_size for handle in descriptor.buffers]
        check_runs(offer, descriptor.layout.num_pages, descriptor.page_bytes, sizes[1:])
        self.sums: Described | None = None if offer.sums_follow else self.found
        self.fault: HurrayWireError | None = None
        self.withdrawn = False
        self.ended = False
        self.reading: Reading | None = None

    @property
    def descriptor(self) -> TensorDescriptor:
        """What kind of tensor it is."""
        return self.found.descriptor

    @property
    def inspection(self) -> Inspection:
        """All that the header says."""
        return inspection_of(self.found.head, self.found, self.small.descriptor, self._raw)

    @property
    def header(self) -> Any:
        """The frame's bytes up to its first buffer."""
        return self._raw

    def start(self, pool: Any, page_ids: Any, *, held: Any = ()) -> Reading:
        """Begin to read wire page j into `pool[page_ids[j]]`; nothing is read before the reading is polled.

        Args:
            pool: as `decode_into` takes it, within memory registered with this endpoint.
            page_ids: distinct ids within the pool, one for each page.
            held: numbers of wire pages that stand at their ids already: they are not read, but verified with the
                others, since checksums cover whole chunks.

        Raises:
            MismatchError, ValueError, IndexError: as `decode_into`; also memory that is not registered.
            TransferError: `withdrawn`.
        """
        if self.withdrawn:
            raise TransferError(f"{self.peer} has taken it back", code=Code.WITHDRAWN, where="transfer")
        if self.reading is not None or self.ended:
            raise ValueError("this offer has been read or declined")
        self.reading = Reading(self._endpoint, self, pool, page_ids, held)
        return self.reading

    def read_into(self, pool: Any, page_ids: Any, *, held: Any = (), timeout: float | None = None) -> BlockPagedTensor:
        """`start`, then wait: a tensor that views `pool`, its block_table in this end's ids. Arguments as `start`.

        Raises:
            TimeoutError, TransferError, ChecksumError and all else that `decode_parts` raises, with `.pages_written`:
                the ids to discard.
        """
        return self.start(pool, page_ids, held=held).wait(timeout)

    def read(self, *, timeout: float | None = None) -> BlockPagedTensor:
        """The tensor over a pool of its own, which is registered for this transfer alone: `read_into` serves better.

        Raises:
            As `read_into`.
        """
        descriptor, layout = self.descriptor, self.descriptor.layout
        memory = allocated(descriptor.buffers[0].byte_size, self.options.alloc)
        pool: Any = memory
        if not descriptor.dtype.is_flat and descriptor.dtype.numpy is not None:
            shape = (layout.num_pages, layout.page_size, *descriptor.shape[1:])
            pool = memory.view(descriptor.dtype.numpy).reshape(shape)
        with self._endpoint.register(memory) if memory.size else nullcontext():
            return self.read_into(pool, range(layout.num_pages), timeout=timeout)

    def decline(self, reason: str = "declined") -> None:
        """Do not read it; the sender is told why."""
        if not self.ended and self.reading is None:
            self.finish(Kind.DECLINED, reason)

    def _summed(self, raw: Bytes) -> Described:
        """The header again, with checksums; all else in it must be as it was.

        Raises:
            FrameError: `section_cover`: it is not; `header_checksum` and all else of the first three stages.
        """
        old, new = self.found.head, read_frame_head(raw, 0, self.options.limits, whole=False)
        start = old.prologue.header_length
        same = (
            old.prologue == new.prologue
            and _without_checksums(old) == _without_checksums(new)
            and all(mine in (0, theirs) for mine, theirs in zip(old.checksums, new.checksums, strict=True))
            and raw[start:].tobytes() == self._raw[start:].tobytes()
        )
        if not same:
            raise FrameError("checksums of another tensor", code=Code.SECTION_COVER, where="offer.sums")
        return self.found._replace(head=new)

    def finish(self, kind: Kind, reason: str = "") -> None:
        """Tell the sender how it ended, once."""
        if not self.ended:
            self.ended = True
            self._endpoint.told(self, Message(kind, self.transfer, reason.encode()))

    def heard(self, message: Message) -> None:
        """The sender's word: checksums that it had not made yet, or that it takes the offer back."""
        if message.kind is Kind.SUMS and self.sums is None:
            try:
                self.sums = self._summed(as_bytes(message.body))
            except HurrayWireError as error:
                self.fault = error
        elif message.kind is Kind.WITHDRAWN:
            self.withdrawn = True
            if self.reading is None:
                self.finish(Kind.STOPPED)


def _without_checksums(head: Head) -> bytes:
    """All of a section table but its checksums and whether there are any."""
    entries = head.table.entries.copy()
    entries["flags"] = 0
    return entries.tobytes()
