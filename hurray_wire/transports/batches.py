"""Which chunks are read together: large batches, since engines are paid for each, and small ones at the end.

What has come is hashed while more comes; only the last batch has nothing beside it, so it is the smallest.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hurray_wire.frame_reader import Described
from hurray_wire.indices import Int64Array
from hurray_wire.tags import SectionKind

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
