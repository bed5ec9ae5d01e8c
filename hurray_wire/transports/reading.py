"""One transfer under way: tables and scales first, all checks, then the pages, verified while others still come.

A generator does the work and yields while it waits; `poll` takes a step. Pages go straight to where the receiver wants
them, in batches of whole chunks, several on their way at a time. A chunk is hashed where it has landed, by threads,
while the engine brings the next: nothing that the peer does afterwards can change it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hurray_wire import frame_reader
from hurray_wire.arrays import Bytes, as_bytes
from hurray_wire.assembly import Parts
from hurray_wire.compression import default_threads
from hurray_wire.errors import Code, TransferError
from hurray_wire.indices import Int64Array
from hurray_wire.receiving import destination, fetch_from_buffers, tables_only
from hurray_wire.sections import digest_of
from hurray_wire.tensor import BlockPagedTensor
from hurray_wire.transports.batches import Batch, Wanted, wanted_batches
from hurray_wire.transports.checks import Checks
from hurray_wire.transports.memory import Block, Held
from hurray_wire.transports.messages import Kind, Message
from hurray_wire.transports.runs import Runs, unfolded, wire_pages

if TYPE_CHECKING:
    from hurray_wire.transports.endpoints import Endpoint
    from hurray_wire.transports.incoming import Incoming

WINDOW = 2
"""Batches on their way at a time: what engines that cannot stop bring to its end when a reading is given up."""
_ALIGNMENT = 64
_ASK_SECONDS = 0.2
"""How often a peer that owes checksums is asked whether it is there."""

Steps = Generator[bool, None, Any]
"""Yields True where something went forward, False where it waits for the engine."""


class Posted(NamedTuple):
    """A batch on its way: the engine's work, its bytes, and the block it lands in where the pages cannot take it."""

    batch: Batch
    work: Any
    nbytes: int
    block: Block | None


class Reading:
    """A tensor on its way into the receiver's pages.

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
        ...     reading = other.receive(timeout=10).start(mine, [7])
        ...     while not reading.poll():
        ...         pass
        ...     reading.progress, reading.result().block_table.tolist()
        ((32, 32), [7])
    """

    def __init__(self, endpoint: Endpoint, incoming: Incoming, pool: Any, page_ids: Any, held: Any) -> None:
        self._endpoint = endpoint
        self._incoming = incoming
        self._options = incoming.options
        found = incoming.found
        self._target = destination(found.descriptor, pool, page_ids)
        self._addresses = self._target.addresses()
        width = found.descriptor.page_bytes
        if self._addresses is not None and width and self._addresses.size:
            endpoint.check_registered(self._addresses, width)
        self._wanted = ~wire_pages(held, found.descriptor.layout.num_pages)
        offer = incoming.offer
        self._sources = unfolded(offer.first, offer.pages, width)
        self._total = int(self._wanted.sum()) * width
        self._came = 0
        self._posted: deque[Posted] = deque()
        self._blocks: list[Block] = []
        self._landed: list[tuple[Posted, Block]] = []
        self._digests: deque[tuple[int, int]] = deque()
        self._checks = Checks(None, 0)
        self._fetch: frame_reader.Fetch
        self._result: BlockPagedTensor | None = None
        self._error: BaseException | None = None
        self._steps: Steps = self._run()

    # What the caller sees.

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes of pages that have come, and of all that are to come."""
        return self._came, self._total

    @property
    def pages_written(self) -> Int64Array:
        """The receiver's ids whose pages may have been written so far; until `result`, none of them is to be used."""
        return self._target.written()

    def poll(self) -> bool:
        """Take a step without waiting; True when it has ended well.

        Raises:
            As `Incoming.read_into`; the reading has then been given up.
        """
        self._step()
        return self._result is not None

    def result(self) -> BlockPagedTensor:
        """The tensor over the receiver's pool.

        Raises:
            ValueError: it has not ended. All else as `poll`.
        """
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise ValueError("the tensor is still on its way: poll, or wait")
        return self._result

    def wait(self, timeout: float | None = None) -> BlockPagedTensor:
        """The tensor, waited for at most so many seconds; after a timeout the reading has been given up.

        Raises:
            As `Incoming.read_into`.
        """
        try:
            self._endpoint.until(self._stepped, timeout, "the tensor is still on its way", self._rest)
        except BaseException as error:  # of the wait itself: a timeout, an interrupt
            if self._error is None:
                self._fail(error)
            raise
        return self.result()

    def _stepped(self) -> bool | None:
        """Whether it has ended; None asks to be called again at once."""
        forward = self._step()
        return True if self._result is not None else None if forward else False

    def _rest(self, seconds: float) -> None:
        """Wait for the engine, or for the sender's checksums."""
        if self._posted and self._posted[0].work is not _NOTHING:
            self._endpoint.engine.rest(self._posted[0].work, seconds)
        else:
            time.sleep(seconds)

    def cancel(self) -> None:
        """Give it up: `pages_written` are to be discarded; the sender is told."""
        if self._result is None and self._error is None:
            self._fail(TransferError("stopped by this end", code=Code.CANCELLED, where="transfer"))

    # The work.

    def _step(self) -> bool:
        if self._error is not None:
            raise self._error
        if self._result is not None:
            return True
        try:
            self._endpoint.poll()
            if self._incoming.withdrawn:
                message = f"{self._incoming.peer} has taken it back"
                raise TransferError(message, code=Code.WITHDRAWN, where="transfer")
            if self._incoming.fault is not None:
                raise self._incoming.fault
            return next(self._steps)
        except StopIteration as ended:
            self._result = ended.value
            self._close()
            self._incoming.finish(Kind.DONE)
            return True
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Stop the engine, then say which pages may have been written."""
        self._error = error
        self._steps.close()
        left = [posted for posted in self._posted if posted.work is not _NOTHING]
        self._blocks = [block for block in self._blocks if block not in [posted.block for posted in left]]
        if self._endpoint.abandon([Held(posted.work, posted.block, self._target.pool) for posted in left]):
            error.add_note("the engine has not let go of these pages: it may write until the endpoint is closed")
        self._posted.clear()
        self._close()
        written = self._target.written()
        error.pages_written = written  # type: ignore[attr-defined]  # TimeoutError and interrupts too
        kind = Kind.STOPPED if self._incoming.withdrawn else Kind.DECLINED
        self._incoming.finish(kind, str(error) or type(error).__name__)

    def _close(self) -> None:
        self._checks.drop()
        for block in self._blocks:
            block.release()
        self._blocks.clear()

    def _run(self) -> Steps:
        parts = yield from self._tables()
        return BlockPagedTensor.of_parts((yield from self._pages(parts)))

    def _tables(self) -> Steps:
        """Tables and scales, and every check that needs no page."""
        found, small, offer = self._incoming.found, self._incoming.small, self._incoming.offer
        sizes = [handle.byte_size for handle in found.descriptor.buffers[1:]]
        offsets = np.cumsum([0] + [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes])
        block = self._endpoint.memory.take(int(offsets[-1]))
        self._blocks.append(block)
        there = [i for i, size in enumerate(sizes) if size]
        source = np.array([offer.buffers[i] for i in there], np.int64)
        target = block.address + offsets[there].astype(np.int64)
        runs = Runs(source, target, np.array([sizes[i] for i in there], np.int64))
        for access in offer.access:
            self._endpoint.engine.admit(self._incoming.peer, access)
        if there:
            work = self._endpoint.engine.post(self._incoming.peer, runs)
            self._posted.append(Posted(Batch(range(0), 0, 0, 0), work, 0, block))
            yield from self._arrived()
        given = [block.bytes[at : at + size] for at, size in zip(offsets.tolist(), sizes, strict=False)]
        return self._checked(small, given)

    def _checked(self, small: frame_reader.Small, given: Sequence[Bytes]) -> Parts:
        found = self._incoming.found
        copies = [as_bytes(buffer.tobytes()) for buffer in given]  # the block is used again
        fetch = fetch_from_buffers(found.head, as_bytes(self._incoming.offer.header), [_NO_POOL, *copies])
        self._fetch = fetch
        small = small._replace(tables=frame_reader.read_tables(found.head, fetch))
        frame_reader.check_payload(found, fetch, self._options, pool=False)
        return self._target.mappable(tables_only(found, small, fetch, self._options))

    def _pages(self, parts: Parts) -> Steps:
        """Batch after batch; those that have come are hashed while others come, and the parts made the receiver's."""
        waiting = deque(wanted_batches(self._incoming.found, self._wanted, self._sources, self._addresses))
        made: list[Parts] = []
        if self._options.verify:
            total = self._incoming.found.descriptor.buffers[0].byte_size
            self._checks = self._endpoint.checks(default_threads(total, self._options.threads) - 1)
        if waiting:
            self._ask(waiting.popleft())
        self._checks.add([lambda: made.append(self._target.adopted(parts))])
        yield True
        while waiting or self._posted:
            if waiting and self._room() > 0:
                self._ask(waiting.popleft())
                yield True
            elif self._posted:
                yield from self._arrived()
            else:
                yield from self._owed()
        yield from self._summed()
        self._checks.finish()
        self._collect()
        return made[0]

    def _ask(self, wanted: Wanted) -> None:
        """Post a batch, and take what is there: some engines copy before they return."""
        self._post(wanted)
        while self._posted and self._is_there(self._posted[0]):
            self._land(self._posted.popleft())

    def _room(self) -> int:
        """Batches that may be asked for; blocks that wait for checksums take room, pages in place do not."""
        return WINDOW - len(self._posted) - len(self._landed)

    def _owed(self) -> Steps:
        """Wait for checksums that the sender has not made yet."""
        asked = time.monotonic()
        while self._options.verify and self._incoming.sums is None:
            if time.monotonic() - asked > _ASK_SECONDS:
                asked = time.monotonic()  # raises where nobody is there to answer
                self._endpoint.tell(self._incoming.peer, Message(Kind.WAITING, self._incoming.transfer, b""))
            yield False
        self._collect()

    def _summed(self) -> Steps:
        """Hold everything to the checksums, whenever they come."""
        yield from self._owed()
        if self._incoming.sums is not None and self._incoming.sums is not self._incoming.found:
            frame_reader.check_payload(self._incoming.sums, self._fetch, self._options, pool=False)

    def _arrived(self) -> Steps:
        """Wait for the first of the batches on their way, and have it verified."""
        while not self._is_there(self._posted[0]):
            self._collect()
            yield False
        self._land(self._posted.popleft())
        yield True

    def _is_there(self, posted: Posted) -> bool:
        return posted.work is _NOTHING or self._endpoint.engine.poll(posted.work)

    def _post(self, wanted: Wanted) -> None:
        """Ask for the pages of a batch that are wanted; they count as written from now on."""
        batch, pages, runs = wanted
        block = None
        if self._addresses is None:
            block = self._endpoint.memory.take(batch.nbytes)
            self._blocks.append(block)
            runs = runs._replace(target=block.address + runs.target)
        else:
            self._target.note(pages)
        work = self._endpoint.engine.post(self._incoming.peer, runs) if pages.size else _NOTHING
        self._posted.append(Posted(batch, work, runs.nbytes, block))

    def _land(self, posted: Posted) -> None:
        """Have a batch hashed that has come; one in a block waits for its checksums there."""
        self._came += posted.nbytes
        if posted.batch.rows and posted.block is not None:
            self._landed.append((posted, posted.block))
        elif self._options.verify:
            self._checks.add(partial(self._verify, rows, posted) for rows in posted.batch.parts())
        self._collect()

    def _collect(self) -> None:
        """What the checksums allow, once they are known: judge what was hashed before, and place what is in blocks."""
        sums = self._incoming.sums
        if sums is not None:
            while self._digests:
                frame_reader.verify_digest(sums.head, *self._digests.popleft())
        if sums is not None or not self._options.verify:
            landed, self._landed = self._landed, []
            for posted, block in landed:
                self._place(posted, block)
        self._checks.look()

    def _place(self, posted: Posted, block: Block) -> None:
        wanted = self._wanted[posted.batch.start : posted.batch.stop]
        self._target.fill_held(posted.batch.start, ~wanted, block.bytes)
        if self._options.verify:
            self._verify(posted.batch.rows, posted)
        self._target.put_wanted(posted.batch.start, wanted, block.bytes)
        block.release()

    def _verify(self, rows: range, posted: Posted) -> None:
        """Hash chunks where they have landed, and hold them to their checksums now or when these have come."""
        for row in rows:
            sums, pieces = self._incoming.sums, self._pieces(row, posted)
            if sums is None:
                self._digests.append((row, digest_of(pieces)))
            else:
                frame_reader.verify_pieces(sums.head, row, pieces)

    def _pieces(self, row: int, posted: Posted) -> list[memoryview]:
        """Where a chunk has landed."""
        width = self._incoming.found.descriptor.page_bytes
        entry = self._incoming.found.head.table.records[row]
        start, stop = entry.raw_offset, entry.raw_offset + entry.raw_length
        if posted.block is None:
            return self._target.memory(slice(start // width, stop // width))
        first = posted.batch.start * width
        return [memoryview(posted.block.bytes[start - first : stop - first])]


_NO_POOL: Bytes = np.zeros(0, np.uint8)
_NOTHING = object()
"""The work of a batch of which nothing is wanted."""
