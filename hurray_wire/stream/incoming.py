"""Receiving one item, without I/O: generators that ask for bytes, and judge what they have before they ask for more.

A generator yields a vector of memory that it wants filled and is sent how many bytes came, 0 for the end. The same
generators serve sockets, files, asyncio and fed bytes. Memory for a payload is sized by a header that has been
checked, and only paid for as bytes arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from hurray_wire import bare, frame_reader
from hurray_wire.arrays import Bytes
from hurray_wire.assembly import Parts, of_buffers
from hurray_wire.descriptor import TensorDescriptor, decode_descriptor, stated_length
from hurray_wire.errors import ChecksumError, TruncatedError
from hurray_wire.forms import Form, identify
from hurray_wire.inspection import Inspection, inspect_bare, inspection_of
from hurray_wire.memory import allocated, private
from hurray_wire.options import DecodeOptions, check_expected
from hurray_wire.order import StreamOrder
from hurray_wire.receiving import Chunk, Destination, destination, tables_only
from hurray_wire.sections import header_bytes, is_checked, small_end
from hurray_wire.stream.endpoints import Vector, advanced
from hurray_wire.structs.frame import PROLOGUE_PLAN
from hurray_wire.tags import Codec, SectionKind
from hurray_wire.tensor import BlockPagedTensor

Asking = Generator[Vector, int, Any]
Finish = Callable[[], BlockPagedTensor]
"""The work that is left when all bytes have come: verify, decompress, check; no asking in it."""

_FIRST_BYTES = 10
"""Enough to tell the forms apart and to know a bare descriptor's length, and no more than any item has."""
_SCRATCH_BYTES = 256 << 10


def fill(memory: Bytes, base: int, where: str, *, needed: int, have: int = 0) -> Asking:
    """Ask until `memory` is full; the item begins at `base`, has `have` bytes before these, and takes `needed`."""
    vector = [memoryview(memory)]
    at = 0
    while at < memory.size:
        count = yield vector
        if not count:
            available = have + at
            raise TruncatedError(needed=needed, available=available, where=where, offset=base + available)
        at += count
        vector = advanced(vector, count)


class Incoming:
    """An item whose head has been received and judged; its body has not been asked for."""

    total_bytes: int
    descriptor: TensorDescriptor

    def inspection(self) -> Inspection:
        """What the head says."""
        raise NotImplementedError

    def read(self) -> Asking:
        """Ask for the body; returns a `Finish`."""
        raise NotImplementedError

    def read_into(self, pool: Any, page_ids: Any) -> Asking:
        """Ask for the body, pages straight into a pool; returns a `Finish`. The pool and ids are checked at once."""
        raise NotImplementedError

    def skip(self) -> Asking:
        """Ask for the body and forget it."""
        raise NotImplementedError


def receive(order: StreamOrder, options: DecodeOptions, base: int) -> Asking:
    """Ask for the head of the item at `base` of the stream; returns an `Incoming`, or None at the end of the source.

    A closing frame is received whole, and what follows it is asked for, unless the order says that it is the end.
    """
    first = np.empty(_FIRST_BYTES, np.uint8)
    count = yield [memoryview(first)]
    if not count:
        return None
    while count < _FIRST_BYTES:
        more = yield [memoryview(first)[count:]]
        if not more:
            identify(first[:count].tobytes(), base)  # names what is wrong with these bytes already
            raise frame_reader.truncated(_FIRST_BYTES, count, base, "magic")
        count += more
    if identify(first.tobytes(), base) is Form.BARE:
        return (yield from _receive_bare(first, order, options, base))
    return (yield from _receive_frame(first, order, options, base))


# The bare form.


def _receive_bare(first: Bytes, order: StreamOrder, options: DecodeOptions, base: int) -> Asking:
    order.bare(base)
    length = stated_length(memoryview(first), base)
    options.limits.check("descriptor_bytes", length, "descriptor_length", base + 6)
    data = allocated(length, None)
    data[: first.size] = first
    yield from fill(data[first.size :], base, "descriptor_length", needed=length, have=first.size)
    descriptor = decode_descriptor(data.tobytes(), base=base, strict=options.strict)
    sizes = [handle.byte_size for handle in descriptor.buffers]
    total = bare.check_bare_sizes(sizes, length, base, options)
    order.count(total)
    check_expected(descriptor, None, options.expect)
    return BareIncoming(data, descriptor, total, options, base)


class BareIncoming(Incoming):
    """A bare item: each buffer is received into memory of its own, aligned."""

    def __init__(
        self, head: Bytes, descriptor: TensorDescriptor, total_bytes: int, options: DecodeOptions, base: int
    ) -> None:
        self.head = head
        self.descriptor = descriptor
        self.total_bytes = total_bytes
        self.options = options
        self.base = base

    def inspection(self) -> Inspection:
        return inspect_bare(self.head, 0, self.options, base=self.base)

    def _fill(self, memory: Bytes, buffer: int) -> Asking:
        sizes = [handle.byte_size for handle in self.descriptor.buffers]
        have = self.head.size + sum(sizes[:buffer])
        where = f"buffers[{buffer}].byte_size"
        yield from fill(memory, self.base, where, needed=self.total_bytes, have=have)

    def _rest(self) -> Asking:
        """All buffers behind the pool."""
        buffers = []
        for i, handle in enumerate(self.descriptor.buffers[1:], 1):
            memory = allocated(handle.byte_size, self.options.alloc if i > 2 else None)
            yield from self._fill(memory, i)
            buffers.append(memory)
        return buffers

    def _parts(self, pool: Bytes | None, rest: list[Bytes]) -> Parts:
        sizes = [handle.byte_size for handle in self.descriptor.buffers]
        starts = [self.base + self.head.size + sum(sizes[:i]) for i in range(len(sizes))]
        tables = private(rest[0]), private(rest[1])
        strict = self.options.strict
        return of_buffers(
            self.descriptor,
            pool,
            tables,
            rest[2:],
            None,
            None,
            strict=strict,
            offsets=lambda: bare.bare_offsets(self.base, starts),
        )

    def read(self) -> Asking:
        pool = allocated(self.descriptor.buffers[0].byte_size, self.options.alloc)
        yield from self._fill(pool, 0)
        rest = yield from self._rest()
        return lambda: BlockPagedTensor.of_parts(self._parts(pool, rest))

    def read_into(self, pool: Any, page_ids: Any) -> Asking:
        return self._into(destination(self.descriptor, pool, page_ids))

    def _into(self, target: Destination) -> Asking:
        size = self.descriptor.buffers[0].byte_size
        whole = min(size, target.page_bytes * target.ids.size)
        try:
            for start, vector, done in target.vectors(0, whole, _SCRATCH_BYTES):
                yield from fill_vector(vector, self.base, self.head.size + start, self.total_bytes)
                done()
            yield from discard(size - whole, self.base, self.head.size + whole, self.total_bytes)
            rest = yield from self._rest()
            parts = target.mappable(self._parts(None, rest))
        except Exception as error:
            error.pages_written = target.written()  # type: ignore[attr-defined]  # OSError and TimeoutError too
            raise
        return lambda: BlockPagedTensor.of_parts(target.adopted(parts))

    def skip(self) -> Asking:
        yield from discard(self.total_bytes - self.head.size, self.base, self.head.size, self.total_bytes)


def fill_vector(vector: Vector, base: int, have: int, needed: int) -> Asking:
    """Ask until a vector is full."""
    while vector:
        count = yield vector
        if not count:
            where = "frame_length"
            raise TruncatedError(needed=needed, available=have, where=where, offset=base + have)
        have += count
        vector = advanced(vector, count)


def discard(count: int, base: int, have: int, needed: int) -> Asking:
    """Ask for bytes and forget them."""
    scratch = np.empty(min(count, _SCRATCH_BYTES), np.uint8)
    while count:
        part = scratch[: min(count, scratch.size)]
        yield from fill(part, base, "frame_length", needed=needed, have=have)
        count -= part.size
        have += part.size


# The framed form.


def _receive_frame(first: Bytes, order: StreamOrder, options: DecodeOptions, base: int) -> Asking:
    prologue_bytes = np.empty(PROLOGUE_PLAN.size, np.uint8)
    prologue_bytes[: first.size] = first
    size = PROLOGUE_PLAN.size
    yield from fill(prologue_bytes[first.size :], base, "frame_length", needed=size, have=first.size)
    prologue = frame_reader.read_prologue(prologue_bytes.tobytes(), base, options.limits)
    total = prologue.frame_length
    header = np.empty(prologue.header_length, np.uint8)
    header[:size] = prologue_bytes
    yield from fill(header[size:], base, "frame_length", needed=total, have=size)
    head = frame_reader.read_head(header.tobytes(), prologue, base)
    order.frame(head.prologue, head.base)
    order.count(total)
    if head.closing:
        padding = allocated(total - header.size, None)
        yield from fill(padding, base, "frame_length", needed=total, have=header.size)
        frame_reader.check_padding(padding, base + header.size)
        return Closing(total)
    frame_reader.check_limits(head, options.limits)
    # Where a small section lies behind the first buffer the frame is refused, for that and not for what is missing.
    front = allocated(max(header_bytes(head.table, total), small_end(head.table)), None)
    front[: header.size] = header
    yield from fill(front[header.size :], base, "frame_length", needed=total, have=header.size)
    found, small = frame_reader.describe(head, frame_reader.fetch_from(front, 0), options, tables=False)
    return FrameIncoming(front, found, small, options)


class Closing(Incoming):
    """A closing frame, received whole: it ends a stream and holds no tensor."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes


class FrameIncoming(Incoming):
    """A frame: received into one piece of aligned memory that its tensor then views, or page by page into a pool."""

    def __init__(
        self,
        front: Bytes,
        found: frame_reader.Described,
        small: frame_reader.Small,
        options: DecodeOptions,
    ) -> None:
        self.front = front
        self.found = found
        self.small = small
        self.options = options
        self.descriptor = found.descriptor
        self.base = found.head.base
        self.total_bytes = found.head.prologue.frame_length

    def inspection(self) -> Inspection:
        return inspection_of(self.found.head, self.found, self.small.descriptor, self.front)

    def read(self) -> Asking:
        raw = self.found.cover.raw[0] is not None
        memory = allocated(self.total_bytes, self.options.alloc if raw else None, self.found.cover.alignment)
        memory[: self.front.size] = self.front
        body, have = memory[self.front.size :], self.front.size
        yield from fill(body, self.base, "frame_length", needed=self.total_bytes, have=have)
        return lambda: self._finish(memory)

    def _finish(self, memory: Bytes) -> BlockPagedTensor:
        options = replace(self.options, owned=True)
        fetch = frame_reader.fetch_from(memory, 0)
        small = self.small._replace(tables=frame_reader.read_tables(self.found.head, fetch))
        frame_reader.check_payload(self.found, fetch, options)
        return BlockPagedTensor.of_parts(frame_reader.finish(self.found, small, fetch, options))

    def read_into(self, pool: Any, page_ids: Any) -> Asking:
        return self._into(destination(self.descriptor, pool, page_ids))

    def _into(self, target: Destination) -> Asking:
        try:
            at = yield from self._pages(target)
            rest = allocated(self.total_bytes - at, None)
            yield from fill(rest, self.base, "frame_length", needed=self.total_bytes, have=at)
            parts = target.mappable(self._tables(rest, at))
        except Exception as error:
            error.pages_written = target.written()  # type: ignore[attr-defined]  # OSError and TimeoutError too
            raise
        return lambda: BlockPagedTensor.of_parts(target.adopted(parts))

    def _tables(self, rest: Bytes, at: int) -> Parts:
        """Everything but the pool, from the bytes in front of it and behind it."""

        def fetch(start: int, length: int) -> Bytes:
            if start < self.front.size:
                return self.front[start : start + length]
            return rest[max(0, start - at) : max(0, start - at + length)]

        small = self.small._replace(tables=frame_reader.read_tables(self.found.head, fetch))
        options = replace(self.options, owned=True)
        frame_reader.check_payload(self.found, fetch, options, pool=False)
        return tables_only(self.found, small, fetch, options)

    def _pages(self, target: Destination) -> Asking:
        """Ask for the pool's chunks, in order; returns where they end in the frame."""
        head, at = self.found.head, self.front.size
        for index in head.table.numbers(int(SectionKind.PAGE_POOL)):
            entry = head.table.records[index]
            start, stored = entry.offset, entry.stored_length
            gap = allocated(start - at, None)
            yield from fill(gap, self.base, "frame_length", needed=self.total_bytes, have=at)
            frame_reader.check_padding(gap, self.base + at)
            if entry.codec == Codec.RAW:
                yield from self._raw_chunk(index, target)
            else:
                yield from self._coded_chunk(index, target)
            at = start + stored
        return at

    def _raw_chunk(self, index: int, target: Destination) -> Asking:
        """Straight into the pages, hashed as they come."""
        entry = self.found.head.table.records[index]
        checked = self.options.verify and is_checked(entry)
        digest = xxhash.xxh3_64()
        begin, offset = entry.raw_offset, entry.offset
        for start, vector, done in target.vectors(begin, entry.raw_length, _SCRATCH_BYTES):
            have = offset + start - begin
            yield from fill_vector(list(vector), self.base, have, self.total_bytes)
            if checked:
                for piece in vector:
                    digest.update(piece)
            done()
        if checked and digest.intdigest() != self.found.head.checksums[index]:
            message = f"page_pool: {frame_reader.differ(digest.intdigest(), self.found.head.checksums[index])}"
            raise ChecksumError(message, where=f"sections[{index}]", offset=self.base + offset)

    def _coded_chunk(self, index: int, target: Destination) -> Asking:
        head = self.found.head
        entry = head.table.records[index]
        stored = allocated(entry.stored_length, None)
        have = entry.offset
        yield from fill(stored, self.base, "frame_length", needed=self.total_bytes, have=have)
        if self.options.verify:
            frame_reader.verify_section(head, index, stored)
        chunk = Chunk(None, lambda out: frame_reader.decode_chunk(head, index, stored, out))
        target.put(entry.raw_offset, entry.raw_length, chunk)

    def skip(self) -> Asking:
        have = self.front.size
        yield from discard(self.total_bytes - have, self.base, have, self.total_bytes)
