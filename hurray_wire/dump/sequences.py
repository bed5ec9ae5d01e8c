"""Sequences by their pages and tokens: a few of them in the summary, all of them with `--seqs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hurray_wire.dump.accounting import shared_prefixes
from hurray_wire.dump.model import Item
from hurray_wire.dump.paper import Column, Paper, Part
from hurray_wire.dump.words import counted, safe

_SHOWN = 12
_IDS_WIDTH = 36


class SequenceRow(NamedTuple):
    """One sequence: where its pages stand in block_table, their ids, its tokens, and the prefix that it shares."""

    seq: int
    start: int
    stop: int
    tokens: int | None
    name: str
    shared_pages: int
    shared_with: int


def sequence_rows(item: Item, most: int | None = None) -> list[SequenceRow]:
    """The sequences of an item, in order; their raw offsets where the tables break rules."""
    ptr, table, lens = item.seq_ptr, item.block_table, item.seq_lens
    if ptr is None or ptr.size < 2:
        return []
    count = ptr.size - 1 if most is None else min(ptr.size - 1, most)
    shared, partner = np.zeros(count, np.int64), np.full(count, -1, np.int64)
    if item.tables_sound and table is not None and table.size:
        shared, partner = shared_prefixes(table, ptr)
    known = lens is not None and lens.size == ptr.size - 1
    tokens: Sequence[int | None] = lens[:count].tolist() if known and lens is not None else [None] * count
    names = _names(item, ptr.size - 1)
    bounds = ptr[: count + 1].tolist()
    return [
        SequenceRow(i, bounds[i], bounds[i + 1], tokens[i], names[i], int(shared[i]), int(partner[i]))
        for i in range(count)
    ]


def _names(item: Item, count: int) -> Sequence[str]:
    found = (item.metadata or {}).get("seq_ids")
    named = isinstance(found, list) and len(found) == count and all(isinstance(name, str) for name in found)
    return [safe(name) for name in found] if named and found else [""] * count


def sequence_table(paper: Paper, item: Item) -> None:
    """The first sequences, for the summary."""
    if item.seq_ptr is None or item.seq_ptr.size < 2:
        return
    rows = sequence_rows(item, _SHOWN)
    total = item.seq_ptr.size - 1
    more = f", the first {len(rows)} of them here (--seqs shows all)" if total > len(rows) else ""
    paper.field("sequences", f"{total:,}{more}")
    paper.table(_COLUMNS, [_cells(item, row) for row in rows], indent=4)


_COLUMNS = (
    Column("seq", right=True),
    Column("id"),
    Column("pages", right=True),
    Column("tokens", right=True),
    Column("shared prefix"),
    Column("page ids"),
)


def _cells(item: Item, row: SequenceRow) -> list[Part]:
    pages = row.stop - row.start
    count: Part = f"{pages:,}" if pages >= 0 else (f"entries {row.start} to {row.stop}", "bad")
    return [
        f"{row.seq:,}",
        row.name if len(row.name) <= 24 else row.name[:21] + "...",
        count,
        "not known" if row.tokens is None else f"{row.tokens:,}",
        shared_words(row),
        _ids(item, row, _IDS_WIDTH),
    ]


def shared_words(row: SequenceRow) -> str:
    """ "2 pages with 0", or ""."""
    return f"{counted(row.shared_pages, 'page')} with {row.shared_with}" if row.shared_pages else ""


def _ids(item: Item, row: SequenceRow, most: int | None) -> Part:
    """The page ids, runs of consecutive ones in short; as many as fit into `most` characters."""
    table = item.block_table
    if table is None or not 0 <= row.start <= row.stop <= table.size:
        return ("outside block_table", "bad") if table is not None and row.stop > row.start else ""
    ids = table[row.start : row.stop]
    pages = item.fields.front.layout_num_pages if item.fields is not None else 0
    text = " ".join(runs(ids[:most].tolist()))
    if most is not None and (len(text) > most or ids.size > most):
        text = text[:most].rpartition(" ")[0] + " ..."
    return text, "bad" if ids.size and int(ids.max()) >= pages else ""


def runs(ids: list[int]) -> list[str]:
    """[4, 5, 6, 9] as ["4-6", "9"]."""
    told: list[str] = []
    first = last = -2
    for page in [*ids, -2]:
        if page == last + 1:
            last = page
            continue
        if last >= 0:
            told.append(str(first) if first == last else f"{first}-{last}")
        first = last = page
    return told


def print_sequences(paper: Paper, item: Item) -> None:
    """Every sequence with every page id (`--seqs`)."""
    rows = sequence_rows(item)
    if not rows:
        empty = item.seq_ptr is not None and item.seq_ptr.size == 1
        paper.field("sequences", "none" if empty else "the table could not be read")
        return
    paper.field("sequences", f"{len(rows):,}")
    for row in rows:
        pages = row.stop - row.start
        tokens = "tokens not known" if row.tokens is None else counted(row.tokens, "token")
        prefix = f", shares {shared_words(row)}" if row.shared_pages else ""
        name = f" {row.name}" if row.name else ""
        words: list[Part] = [(f"seq {row.seq}{name}", "label")]
        words.append(f"  {counted(pages, 'page')}, {tokens}{prefix}: " if pages >= 0 else "  ")
        if pages < 0:
            words.append((f"entries {row.start} to {row.stop}: ends before it begins", "bad"))
        paper.text(*words, _ids(item, row, None), indent=4)
