"""From item to item through a file: which form, whose stream, what has ended, where to go on after damage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from hurray_wire.dump import bare_item, frame_item
from hurray_wire.dump.accounting import check_tables
from hurray_wire.dump.model import LIMITS, Consumer, Fault, Item, Stage, faults_of
from hurray_wire.dump.payload_walk import Budget, Walk
from hurray_wire.dump.resync import Finder
from hurray_wire.dump.source import GoneError, Source
from hurray_wire.errors import HurrayWireError
from hurray_wire.forms import PREFIX_BYTES, Form, identify
from hurray_wire.frame_reader import Head
from hurray_wire.options import DEFAULT_LIMITS
from hurray_wire.order import StreamOrder
from hurray_wire.sections import BUFFERS

VERIFIED_BYTES = 256 << 20
"""Payload that is verified without being asked for."""


@dataclass(slots=True)
class StreamEnd:
    """What a stream came to; in the bare form, what a run of bare items came to."""

    form: Form
    stream_id: int
    first: int
    frames: int = 0
    tensors: int = 0
    closing: bool = False
    complete: bool | None = None
    """Whether LAST was seen and no frame before it is missing; the bare form cannot tell."""
    last: bool = False
    in_order: bool = True
    stored_bytes: int = 0
    raw_bytes: int = 0

    def add(self, item: Item) -> None:
        """Count an item."""
        self.frames += 1
        self.tensors += not item.closing
        self.closing = item.closing
        self.stored_bytes += item.there if item.cut else item.total or 0
        self.raw_bytes += sum(s.raw_length for s in item.sections if s.kind in BUFFERS)
        self.in_order = self.in_order and not any(fault.stage == Stage.ORDER for fault in item.faults)


@dataclass(slots=True)
class Stop:
    """Reading ended here, or was taken up again at `resumed`; `ended`: because the file does, nothing can follow."""

    offset: int
    faults: list[Fault]
    resumed: int | None = None
    ended: bool = False


Event = Item | StreamEnd | Stop


class _Order(StreamOrder):
    """As readers hold a stream to its order, but able to go on behind a fault."""

    def resume(self, head: Head) -> None:
        """Take a frame for the place where it says that it stands."""
        self._sequence, self._stream_id = head.prologue.sequence, head.prologue.stream_id
        self.open = False
        self.frame(head.prologue, head.base)

    def drop(self) -> None:
        """The stream that is open is given up."""
        self.open = False
        self._sequence = 0


@dataclass(slots=True)
class Scan:
    """One file, read once from front to back.

    Args:
        budget: payload bytes to verify, None for all.
        resync: whether to look for the next item behind damage.
        consumers: who else wants an item's payload, asked when its header is known.
        progress: told of the offset that has been reached.
    """

    source: Source
    budget: Budget = field(default_factory=lambda: Budget(VERIFIED_BYTES))
    resync: bool = False
    consumers: Callable[[Item], list[Consumer]] = lambda _: []
    progress: Callable[[int], None] = lambda _: None
    count: int = 0
    _order: _Order = field(default_factory=lambda: _Order(LIMITS))
    _stream: StreamEnd | None = None
    _previous: Item | None = None
    _resumed: bool = False
    """Whether the next item was found behind damage: what it should be is not known."""
    _finder: Finder = field(init=False)

    def __post_init__(self) -> None:
        self._finder = Finder(self.source)

    def events(self) -> Iterator[Event]:
        """Items, ends of streams, and stops, in the order of the file."""
        at: int | None = 0
        while at is not None:
            self.source.forget(at)
            prefix = self.source.read(at, PREFIX_BYTES)
            if not prefix and at:
                break
            try:
                form = identify(prefix, at)
            except HurrayWireError as error:
                stop = Stop(at, faults_of(error, Stage.FIRST_BYTES))
                yield from self._stopped(stop, at)
                at = stop.resumed
                continue
            item = self._item(form, at)
            yield from self._placed(item)
            at = item.end
            if not self._goes_on(item):
                stop = Stop(item.offset, [], ended=item.cut and item.trusted)
                yield from self._stopped(stop, item.offset + 1)
                at = stop.resumed
        yield from self._ended(at)

    def _item(self, form: Form, at: int) -> Item:
        module = bare_item if form is Form.BARE else frame_item
        item = module.read_header(self.source, at, self.count)
        self.count += 1
        if form is Form.HRKV and item.sections:
            frame_item.read_small(self.source, item)
        item.consumers = self.consumers(item) if item.fields is not None else []
        Walk(self.source, item, self.budget, self.progress).run()
        self._pass_over(item)
        check_tables(item)
        _note_limits(item)
        _note_shape(item)
        return item

    def _pass_over(self, item: Item) -> None:
        """On to the item's end: where a pipe ends is not known before it has been read so far."""
        if item.end is not None and item.trusted:
            self.source.forget(item.end)
            if self.source.size is not None:
                item.note_cut(self.source.size)

    def _placed(self, item: Item) -> Iterator[Event]:
        """The item, behind the end of a stream that it does not belong to, before the end of one that it ends."""
        self._hold_to_order(item)
        if self._stream is not None and not self._joins(self._stream, item):
            yield from self._stream_end()
        if self._stream is None:
            stream_id = item.prologue.stream_id if item.prologue is not None else 0
            self._stream = StreamEnd(item.form, stream_id, item.index)
        self._stream.add(item)
        self._previous = item
        item.faults.sort(key=lambda fault: fault.stage)
        yield item
        if item.last:
            self._stream.last = True
            self._stream.complete = not item.cut and self._stream.in_order
            yield from self._stream_end()

    def _hold_to_order(self, item: Item) -> None:
        """Note what is out of its place, and go on from where the item says that it stands."""
        if item.form is Form.BARE:
            with item.stage(Stage.FIRST_BYTES):
                self._order.bare(item.offset)
            self._order.drop()
        elif item.head is not None:
            noted = len(item.faults)
            if not self._resumed:
                with item.stage(Stage.ORDER):
                    self._order.frame(item.head.prologue, item.head.base)
            if self._resumed or len(item.faults) > noted:
                self._order.resume(item.head)
        self._resumed = False

    @staticmethod
    def _joins(stream: StreamEnd, item: Item) -> bool:
        """Whether an item goes on with the stream that is open."""
        if stream.form is not item.form:
            return False
        return item.form is Form.BARE or item.prologue is None or item.prologue.stream_id == stream.stream_id

    def _stream_end(self) -> Iterator[StreamEnd]:
        stream, self._stream = self._stream, None
        if stream is not None:
            if stream.form is Form.HRKV:
                stream.complete = bool(stream.complete)
                self._order.drop()
            yield stream

    def _goes_on(self, item: Item) -> bool:
        """Whether the next item can be looked for where this one says that it ends."""
        if item.end is None or item.cut:
            return False
        if item.trusted:
            return True
        try:
            prefix = self.source.read(item.end, PREFIX_BYTES)
            return not prefix or bool(identify(prefix))
        except (HurrayWireError, GoneError):
            return False

    def _stopped(self, stop: Stop, start: int) -> Iterator[Stop]:
        """A stop, and with `resync` where the next item is; bytes may be lost, so inside a faulty one too."""
        previous = self._previous
        if self.resync and self.count:
            inside = previous is not None and previous.faults and stop.faults
            start = previous.offset + 1 if inside and previous is not None else start
            stop.resumed = self._finder.find(start)
        elif self.resync:
            stop.resumed = self._finder.find(start + 1)
        self._resumed = stop.resumed is not None
        yield stop

    def _ended(self, at: int | None) -> Iterator[Event]:
        """The end of the file: whether a stream that is open should have gone on."""
        unfinished = self._order.open and at is not None
        if unfinished and at is not None:
            try:
                self._order.end(at)
            except HurrayWireError as error:
                yield Stop(at, faults_of(error, Stage.ORDER), ended=True)
        yield from self._stream_end()


def _note_limits(item: Item) -> None:
    """What a reader with its usual limits would refuse, though there is nothing wrong with it."""
    if not item.trusted:
        return
    raw = sum(item.descriptor.sizes) if item.descriptor is not None else 0
    for name, claimed in (("frame_bytes", item.total or 0), ("decoded_bytes", raw)):
        limit = getattr(DEFAULT_LIMITS, name)
        if claimed > limit:
            item.notes.append(f"a reader with default limits refuses it: {name} is {claimed}, the limit {limit}")


def _note_shape(item: Item) -> None:
    """A pool that holds nothing may still have a shape that no array has."""
    descriptor = item.descriptor
    if descriptor is None or descriptor.sizes[0] or descriptor.dtype.is_flat:
        return
    try:
        np.empty(descriptor.pool_shape, descriptor.dtype.numpy)
    except ValueError:
        item.notes.append(f"decode refuses it: NumPy has no array of shape {descriptor.pool_shape}, though it is empty")
