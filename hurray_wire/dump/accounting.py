"""What the tables say of the pool: pages by references, tokens by pages, prefixes that sequences share.

Costs follow the tables' own length, never a claimed number of pages or tokens: a page may take no bytes at all, and
then any number of them costs a sender nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hurray_wire import indices
from hurray_wire.assembly import of_buffers
from hurray_wire.dump.model import BLOCK_TABLE, SEQ_PTR, Fault, Item, Stage, faults_of
from hurray_wire.errors import Code, HurrayWireError, Violation
from hurray_wire.forms import Form
from hurray_wire.indices import IntArray
from hurray_wire.structs.descriptor import descriptor_offset
from hurray_wire.tags import Codec, SectionKind

Int64 = npt.NDArray[np.int64]


def check_tables(item: Item) -> None:
    """Stage 9: block_table, seq_ptr and seq_lens against each other and the descriptor, where all is there."""
    descriptor, stated = item.descriptor, item.tables.get(int(SectionKind.SEQ_LENS))
    tables = item.tables.get(BLOCK_TABLE), item.tables.get(SEQ_PTR)
    if descriptor is None or tables[0] is None or tables[1] is None:
        return
    if (len(tables[0]), len(tables[1])) != descriptor.sizes[1:3] or (item.form is Form.HRKV and item.cover is None):
        return
    try:
        parts = of_buffers(descriptor, None, (tables[0], tables[1]), (), stated, None, strict=False)
    except OverflowError:  # a forced count that the index type does not hold
        message = f"is {descriptor.shape[0]}, more than {descriptor.layout.block_table_index_type} counts"
        item.faults.append(Fault(Stage.TABLES, str(Code.TOKEN_COUNT), "shape[0]", None, message))
        return
    except HurrayWireError as error:
        item.faults += faults_of(error, Stage.TABLES)
        return
    found = parts.violations[len(descriptor.violations) :]
    item.faults += [Fault(Stage.TABLES, str(v.code), v.where, _entry_offset(item, v), v.message) for v in found]
    if not found:
        item.tables_sound = descriptor.layout.page_size > 0
        item.seq_lens = parts.seq_lens


def _entry_offset(item: Item, violation: Violation) -> int | None:
    """Where an entry that breaks a rule stands in the file; the item itself where its table is compressed."""
    name = violation.where.partition("[")[0]
    kind = {"block_table": BLOCK_TABLE, "seq_ptr": SEQ_PTR, "seq_lens": int(SectionKind.SEQ_LENS)}.get(name)
    sections = [section for section in item.sections if section.kind == kind]
    table = {BLOCK_TABLE: item.block_table, SEQ_PTR: item.seq_ptr}.get(kind or 0, item.seq_lens)
    if kind is None:
        place = descriptor_offset(item.descriptor_bytes, violation.where)
        return None if place is None else item.descriptor_offset + place
    if not sections or table is None:
        return None
    if any(section.codec != Codec.RAW for section in sections):
        return item.offset
    return item.offset + sections[0].offset + (violation.index or 0) * table.itemsize


class References(NamedTuple):
    """The pages that table entries name, and how often; and of which tokens are."""

    ids: Int64
    counts: Int64
    live: Int64 | None
    """Ids of pages that hold tokens, None where token counts are not known."""
    owned: int
    """Slots of live pages that a sequence owns."""


def references(item: Item) -> References | None:
    """Who is named how often, from tables that keep the rules."""
    table, ptr = item.block_table, item.seq_ptr
    if not item.tables_sound or table is None or ptr is None or item.descriptor is None:
        return None
    ids, counts = np.unique(table, return_counts=True)
    live, owned = None, 0
    if item.seq_lens is not None:
        live, owned = _live(table, ptr, item.seq_lens, item.descriptor.layout.page_size)
    return References(ids.astype(np.int64), counts, live, owned)


def _live(table: IntArray, ptr: IntArray, lens: IntArray, page_size: int) -> tuple[Int64, int]:
    entries, tokens = indices.live_entries(ptr, lens, page_size)
    ids, inverse = np.unique(table[entries], return_inverse=True)
    owned = np.zeros(ids.size, np.int64)
    np.maximum.at(owned, inverse.reshape(-1), tokens)
    return ids.astype(np.int64), indices.exact_sum(owned)


class Usage(NamedTuple):
    """Pages of the pool by use, and the bytes that travel without being anybody's."""

    pages: int
    referenced: int
    shared: int
    unreferenced: int
    live: int | None
    spare: int | None
    pool_bytes: int
    unreferenced_bytes: int
    empty_slots: int | None
    empty_slot_bytes: int | None


def usage(item: Item, found: References) -> Usage:
    """The pool's pages counted; exact integers throughout."""
    assert item.descriptor is not None
    pages, page_size, heads, dim = item.descriptor.pool_shape
    slot_bits = heads * dim * item.descriptor.bit_width
    referenced = int(found.ids.size)
    live = None if found.live is None else int(found.live.size)
    empty = None if live is None else live * page_size - found.owned
    return Usage(
        pages=pages,
        referenced=referenced,
        shared=int(np.count_nonzero(found.counts > 1)),
        unreferenced=pages - referenced,
        live=live,
        spare=None if live is None else referenced - live,
        pool_bytes=item.descriptor.sizes[0],
        unreferenced_bytes=(pages - referenced) * page_size * slot_bits // 8,
        empty_slots=empty,
        empty_slot_bytes=None if empty is None else empty * slot_bits // 8,
    )


class Prefixes(NamedTuple):
    """For each sequence how many leading pages another one also leads with, and the first such other, or -1."""

    pages: Int64
    partner: Int64


def shared_prefixes(table: IntArray, ptr: IntArray) -> Prefixes:
    """Leading pages that sequences have in common, by a hash of each prefix: 64 bits, for display only."""
    num_seqs = ptr.size - 1
    starts = ptr.astype(np.int64)
    counts = np.diff(starts)
    seq = np.repeat(np.arange(num_seqs), counts)
    position = np.arange(table.size) - starts[seq]
    hashes = _prefix_hashes(table, position, starts[seq])
    order = np.argsort(hashes, kind="stable")
    ranked = hashes[order]
    same = ranked[1:] == ranked[:-1]
    shared = np.zeros(table.size, bool)
    shared[order[1:][same]] = True
    shared[order[:-1][same]] = True
    lead = np.zeros(num_seqs, np.int64)
    np.maximum.at(lead, seq[shared], position[shared] + 1)
    return Prefixes(lead, _partners(lead, starts, hashes, seq, order))


def _prefix_hashes(table: IntArray, position: Int64, first: Int64) -> npt.NDArray[np.uint64]:
    """A number for each entry that stands for all of its sequence up to it."""
    mixed = _mixed(table.astype(np.uint64) + _mixed(position.astype(np.uint64)))
    total = np.zeros(table.size + 1, np.uint64)
    np.cumsum(mixed, out=total[1:])
    return total[1:] - total[first]


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64: sums of what it gives do not meet by accident."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _partners(
    lead: Int64, starts: Int64, hashes: npt.NDArray[np.uint64], seq: Int64, order: npt.NDArray[np.intp]
) -> Int64:
    """The first other sequence with the same leading pages; entries of one hash stand in sequence order."""
    partner = np.full(lead.size, -1, np.int64)
    have = np.flatnonzero(lead)
    ranked = hashes[order]
    at = np.searchsorted(ranked, hashes[starts[have] + lead[have] - 1])
    first, second = seq[order[at]], seq[order[np.minimum(at + 1, order.size - 1)]]
    partner[have] = np.where(first == have, second, first)
    return partner


class Affected(NamedTuple):
    """Whom a stretch of the pool belongs to: first and last page, pages referenced, the sequences that do."""

    first_page: int
    last_page: int
    referenced: int
    sequences: Int64


def affected(item: Item, start: int, stop: int) -> Affected | None:
    """The pages in bytes `start` to `stop` of the pool, and the sequences that have them."""
    descriptor, table, ptr = item.descriptor, item.block_table, item.seq_ptr
    if descriptor is None or not descriptor.page_bytes:
        return None
    first, last = start // descriptor.page_bytes, (stop - 1) // descriptor.page_bytes
    if not item.tables_sound or table is None or ptr is None:
        return Affected(first, last, -1, np.zeros(0, np.int64))
    entries = np.flatnonzero((table >= first) & (table <= last))
    sequences = np.unique(np.searchsorted(ptr, entries, side="right") - 1)
    return Affected(first, last, int(np.unique(table[entries]).size), sequences.astype(np.int64))
