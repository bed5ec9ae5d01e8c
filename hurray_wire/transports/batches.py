"""Which chunks are read together: large batches, since engines are paid for each, and small ones at the end.

What has come is hashed while more comes; only the last batch has nothing beside it, so it is the smallest.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hurray_wire.frame_reader import Described
from hurray_wire.indices import Int64Array
from hurray_wire.tags import SectionKind
from hurray_wire.transports.runs import Runs, merged

BATCH_BYTES = 64 << 20
"""The most that is asked for together."""
LEAST_BYTES = 8 << 20


class Batch(NamedTuple):
    """Chunks that are read together: their sections, and the wire pages in them."""

    rows: range
    start: int
    stop: int
    nbytes: int

    def parts(self) -> list[range]:
        """Sections for threads to share, so many together that handing them over costs nothing beside hashing them."""
        step = max(1, len(self.rows) * LEAST_BYTES // max(1, self.nbytes))
        return [self.rows[i : i + step] for i in range(0, len(self.rows), step)]


class Wanted(NamedTuple):
    """A batch, the numbers of its pages that are wanted, and from where to where they go."""

    batch: Batch
    pages: Int64Array
    runs: Runs


def wanted_batches(
    found: Described, wanted: npt.NDArray[np.bool_], source: Int64Array, target: Int64Array | None
) -> Iterator[Wanted]:
    """What to read, batch by batch, worked out for all at once: between two batches everything is cold.

    Args:
        wanted: a mask of wire pages.
        source: the address of every page at the peer.
        target: and at this end; None for a block for each batch, addresses in which begin at 0.
    """
    batches, width = batches_of(found), found.descriptor.page_bytes
    if not batches:
        return iter(())
    pages = np.flatnonzero(wanted)
    ends = np.searchsorted(pages, np.array([batch.stop for batch in batches], np.int64))
    if target is None:
        starts = np.repeat([batch.start for batch in batches], [batch.stop - batch.start for batch in batches])
        target = (np.arange(wanted.size) - starts) * width
    if pages.size < wanted.size:
        source, target = source[pages], target[pages]
    runs = merged(source, target, width, ends).cut(ends, width)
    return map(Wanted, batches, (pages[a:b] for a, b in pairwise([0, *ends.tolist()])), runs)


def batches_of(found: Described) -> list[Batch]:
    """The pool's chunks, as many together as make a batch."""
    rows = found.head.table.numbers(int(SectionKind.PAGE_POOL))
    width = found.descriptor.page_bytes
    if not width or not rows:
        return []
    entries = found.head.table.entries[rows.start : rows.stop]
    starts = entries["raw_offset"].astype(np.int64)
    ends = starts + entries["raw_length"].astype(np.int64)
    found_ones = []
    for a, b in pairwise(_bounds(ends)):
        start, stop = int(starts[a]), int(ends[b - 1])
        found_ones.append(Batch(range(rows.start + a, rows.start + b), start // width, stop // width, stop - start))
    return found_ones


def _bounds(ends: Int64Array) -> list[int]:
    """Numbers of chunks between batches, from where each chunk ends: a batch takes half of what is left, within limits.

    Example:
        >>> _bounds(np.arange(1, 17) * (4 << 20))
        [0, 8, 12, 14, 16]
    """
    bounds, at, total = [0], 0, int(ends[-1])
    while at < total:
        step = min(BATCH_BYTES, max(LEAST_BYTES, (total - at) // 2))
        stop = max(bounds[-1] + 1, int(np.searchsorted(ends, at + step, "right")))
        bounds.append(stop)
        at = int(ends[stop - 1])
    return bounds
