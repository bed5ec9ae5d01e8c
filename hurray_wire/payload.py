"""What of a tensor is sent: which pages, scrubbed or not, as the tensor's own memory wherever that can be.

Both wire forms take their bytes from here. The selection of live pages and the scrubbing happen on the way out; the
tensor itself is not changed, and the pool not copied where its memory already is what the wire wants.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hurray_wire import indices
from hurray_wire.arrays import Bytes, address, raw_view
from hurray_wire.assembly import Parts
from hurray_wire.descriptor import TensorDescriptor
from hurray_wire.dtypes import clear_tail, packed_bytes
from hurray_wire.errors import Code, UnsupportedError
from hurray_wire.indices import Int64Array, IntArray
from hurray_wire.layout import BlockPagedLayout
from hurray_wire.options import EncodeOptions
from hurray_wire.pages import PagePool
from hurray_wire.quantization import PerBlockAffine
from hurray_wire.tables import BufferHandle
from hurray_wire.tags import MIN_ALIGNMENT
from hurray_wire.tensor import BlockPagedTensor

_VIEW_BYTES = 4096
"""Below this a piece costs more as a vector of its own, in the kernel and here, than to copy."""


class PageSource:
    """The pages to send, in wire order: `views` of them without copies where memory allows, or `copy` into place."""

    __slots__ = ("_ids", "_owned", "_page_size", "_pool", "num_pages", "page_bytes")

    def __init__(
        self, pool: PagePool, ids: IntArray | None = None, owned: Int64Array | None = None, page_size: int = 0
    ) -> None:
        self._pool = pool
        self._ids = ids
        self._owned = owned
        self._page_size = page_size
        self.page_bytes = pool.page_bytes
        self.num_pages = pool.num_pages if ids is None else ids.size
        if not self.page_bytes and pool.nbytes:  # pages end inside bytes: the pool goes as one piece
            self.num_pages, self.page_bytes = 1, pool.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.page_bytes

    def _selected(self, start: int, stop: int) -> IntArray | slice:
        return slice(start, stop) if self._ids is None else self._ids[start:stop]

    def whole(self) -> bool:
        """Whether every page is sent as it is."""
        return self._ids is None and self._owned is None

    def flat(self) -> Bytes | None:
        """All pages as one piece of the pool's own memory, or None where they are not that."""
        return self._pool.flat() if self._ids is None and self._owned is None else None

    def _clean(self, start: int, stop: int) -> bool:
        return self._owned is None or bool((self._owned[start:stop] == self._page_size).all())

    def views(self, start: int, stop: int) -> list[Bytes]:
        """The bytes of wire pages `start` to `stop`, as few pieces as can be."""
        if start >= stop or not self.page_bytes:
            return []
        if self._clean(start, stop):
            pieces = self._own_memory(start, stop)
            if pieces is not None:
                return pieces
        out = np.empty((stop - start) * self.page_bytes, np.uint8)
        self.copy(start, stop, out)
        return [out]

    def _own_memory(self, start: int, stop: int) -> list[Bytes] | None:
        if not self._pool.page_bytes:
            flat = self._pool.flat()
            return None if flat is None else [flat]
        if not self._pool.lies_in_pages:
            return None
        if self._ids is None:
            run = self._pool.run(start, stop)
            if run is not None:
                return [run]
            cuts = np.arange(start, stop + 1)
            firsts = cuts[:-1]
        else:
            ids = self._ids[start:stop].astype(np.int64)
            breaks = np.flatnonzero(ids[1:] != ids[:-1] + 1) + 1
            cuts = np.concatenate(([0], breaks, [stop - start]))
            firsts = ids[cuts[:-1]]
        if (stop - start) * self.page_bytes < _VIEW_BYTES * firsts.size and firsts.size > 1:
            return None
        lengths = cuts[1:] - cuts[:-1]
        runs = [self._pool.run(f, f + n) for f, n in zip(firsts.tolist(), lengths.tolist(), strict=True)]
        pieces = [run for run in runs if run is not None]
        return pieces if len(pieces) == len(runs) else self._single_pages(firsts, lengths)

    def _single_pages(self, firsts: Int64Array, lengths: Int64Array) -> list[Bytes] | None:
        """A piece a page, where neighbours in the pool are not neighbours in memory."""
        if self.page_bytes < _VIEW_BYTES:
            return None
        spans = zip(firsts.tolist(), lengths.tolist(), strict=True)
        pages = [self._pool.run(page, page + 1) for first, n in spans for page in range(first, first + n)]
        return [page for page in pages if page is not None]

    def addresses(self) -> Int64Array | None:
        """Where each wire page begins in the pool's own memory, or None where pages do not lie there as on the wire.

        A page that scrubbing changes is not sent from there: see `scrubbed`.
        """
        begin = self._pool.begin()
        if begin is None:
            flat = None if self._pool.page_bytes else self._pool.flat()  # a pool that goes as one piece
            return None if flat is None else np.array([address(flat)])
        ids = np.arange(self.num_pages) if self._ids is None else self._ids.astype(np.int64)
        return begin[0] + ids * begin[1]

    def scrubbed(self) -> Int64Array:
        """The wire pages that have slots to be zeroed on the way out."""
        if self._owned is None:
            return np.zeros(0, np.int64)
        return np.flatnonzero(self._owned != self._page_size)

    def copy_some(self, pages: Int64Array, out: Bytes) -> None:
        """Copy wire pages, by their numbers, into contiguous `out`, scrubbed."""
        ids = pages if self._ids is None else self._ids[pages]
        owned = None if self._owned is None else self._owned[pages]
        PageSource(self._pool, ids, owned, self._page_size).copy(0, pages.size, out)

    def copy(self, start: int, stop: int, out: Bytes) -> None:
        """Copy wire pages `start` to `stop` into contiguous `out`, scrubbed."""
        if not self._pool.page_bytes:
            self._pool.copy_all(out)
            return
        self._pool.copy(self._selected(start, stop), out)
        if not self._clean(start, stop):
            assert self._owned is not None
            clear_slots(out, self._owned[start:stop], self._page_size)


def clear_slots(pages: Bytes, owned: Int64Array, page_size: int) -> None:
    """Zero all but the first `owned` slots of each page, in place."""
    unowned = np.arange(page_size) >= owned[:, None]
    slots = owned.size * page_size
    if pages.size % slots == 0 and (pages.size // owned.size) % page_size == 0:
        pages.reshape(owned.size, page_size, -1)[unowned] = 0
        return
    bits = np.unpackbits(pages, bitorder="little").reshape(owned.size, page_size, -1)  # slots end inside bytes
    bits[unowned] = 0
    np.copyto(pages, np.packbits(bits.reshape(-1), bitorder="little"))


class Payload(NamedTuple):
    """A tensor as it is sent: descriptor, the source of the pool's pages, and the bytes of all other buffers."""

    descriptor: TensorDescriptor
    pages: PageSource
    tables: tuple[Bytes, ...]
    seq_lens: Bytes | None
    metadata: dict[str, Any] | None


def payload_of(tensor: BlockPagedTensor, options: EncodeOptions) -> Payload:
    """Select, scrub and align as the options say.

    Raises:
        InvalidDescriptorError: the tensor has violations.
        UnsupportedError: `seq_lens_unknown` (scrub), `packed_pool` (pages that end inside bytes, selected or scrubbed).
    """
    if not isinstance(tensor, BlockPagedTensor):
        raise TypeError(f"a BlockPagedTensor is encoded, not {tensor!r}")
    tensor.validate()
    parts = tensor.parts
    ids = None
    if options.pages == "live":
        parts, ids = live_parts(parts)
    owned = _owned(tensor, ids) if options.scrub else None
    descriptor = _aligned(parts.descriptor, options.alignment)
    tables = [raw_view(parts.block_table), raw_view(parts.seq_ptr), *_scale_bytes(parts, owned)]
    if len(tables) > len(descriptor.buffers) - 1:  # scales and zero points of one buffer
        tables[2:] = [np.concatenate(tables[2:])]
    pool = _wire_pool(tensor)
    if (ids is not None or owned is not None) and not pool.page_bytes and pool.nbytes:
        message = "pages that end inside bytes are neither selected nor scrubbed: pack a page to whole bytes"
        raise UnsupportedError(message, code=Code.PACKED_POOL, where="page_pool")
    framed = options.framing != "bare"  # which has no place for them
    lens = None if parts.seq_lens is None or not framed else _lens_bytes(parts.seq_lens, descriptor.index_dtype)
    return Payload(descriptor, PageSource(pool, ids, owned, tensor.page_size), tuple(tables), lens, parts.metadata)


def _wire_pool(tensor: BlockPagedTensor) -> PagePool:
    if tensor.page_pool.ndim != 1 or tensor.descriptor.bit_width >= 8:
        return tensor.pool
    count = tensor.num_pages * tensor.page_size * tensor.num_heads * tensor.head_dim
    cleared = clear_tail(tensor.page_pool, count, tensor.descriptor.bit_width)
    return PagePool(cleared, tensor.num_pages, tensor.page_bytes)


def live_parts(parts: Parts) -> tuple[Parts, IntArray | None]:
    """The tables over the pages that block_table names, in order of first use, and those pages' ids in the pool.

    The page pool is the tensor's still; ids are None where every page is named in the order it has.
    """
    ids, table = indices.first_use(parts.block_table)
    layout = parts.descriptor.layout
    if ids.size == layout.num_pages and (ids == np.arange(ids.size)).all():
        return parts, None
    scales, zero_points = parts.scales, parts.zero_points
    if isinstance(parts.descriptor.quantization, PerBlockAffine):
        scales, zero_points = (None if a is None else a[ids] for a in (scales, zero_points))
    descriptor = resized(parts, ids.size)
    return parts._replace(descriptor=descriptor, block_table=table, scales=scales, zero_points=zero_points), ids


def resized(parts: Parts, num_pages: int) -> TensorDescriptor:
    """The descriptor for another number of the same pages."""
    d = parts.descriptor
    layout = d.layout
    slots = num_pages * layout.page_size
    changed = BlockPagedLayout(
        layout.page_size,
        num_pages,
        layout.paged_axis,
        layout.num_seqs,
        layout.kv_role,
        layout.layer_index,
        layout.block_table_index_type,
    )
    sizes = [handle.byte_size for handle in d.buffers]
    sizes[0] = packed_bytes(slots * d.shape[1] * d.shape[2], d.bit_width)
    if isinstance(d.quantization, PerBlockAffine):
        entry = [a.itemsize for a in (parts.scales, parts.zero_points) if a is not None]
        sizes[3:] = [slots * width for width in entry] if len(sizes) - 3 == len(entry) else [slots * sum(entry)]
    handles = [_resized_handle(old, size) for old, size in zip(d.buffers, sizes, strict=True)]
    return d.replaced(layout=changed, buffers=handles)


def _resized_handle(old: BufferHandle, size: int) -> BufferHandle:
    if size == old.byte_size:
        return old
    alignment = max(old.alignment, MIN_ALIGNMENT) if size else 1
    return BufferHandle(size, alignment, old.device, old.sync_mode, old.memory_class)


def _aligned(descriptor: TensorDescriptor, alignment: int | None) -> TensorDescriptor:
    if alignment is None:
        return descriptor
    handles = [
        BufferHandle(h.byte_size, alignment if h.byte_size else 1, h.device, h.sync_mode, h.memory_class)
        for h in descriptor.buffers
    ]
    return descriptor.replaced(buffers=handles)


def _owned(tensor: BlockPagedTensor, ids: IntArray | None) -> Int64Array:
    lens = tensor.known_lens()
    owned = indices.owned_slots(tensor.block_table, tensor.seq_ptr, lens, tensor.page_size, tensor.num_pages)
    return owned if ids is None else owned[ids]


def _scale_bytes(parts: Parts, owned: Int64Array | None) -> list[Bytes]:
    """Scales and zero points; per block, those of slots that no sequence owns are scrubbed with their slots."""
    arrays: list[npt.NDArray[Any]] = [a for a in (parts.scales, parts.zero_points) if a is not None]
    flat = [raw_view(np.ascontiguousarray(a.astype(a.dtype.newbyteorder("<"), copy=False))) for a in arrays]
    if owned is None or not isinstance(parts.descriptor.quantization, PerBlockAffine):
        return flat
    scrubbed = [run.copy() for run in flat]
    for run in scrubbed:
        if run.size:
            clear_slots(run, owned, parts.descriptor.layout.page_size)
    return scrubbed


def _lens_bytes(seq_lens: IntArray, index: np.dtype[Any]) -> Bytes:
    if seq_lens.dtype == index:
        return raw_view(seq_lens)
    if indices.largest(seq_lens) > np.iinfo(index).max:
        message = f"{index} cannot hold a length of {indices.largest(seq_lens)}"
        raise UnsupportedError(message, code=Code.INDEX_TYPE, where="seq_lens")
    return raw_view(seq_lens.astype(index, copy=False))
