"""Which memory goes where: runs of bytes from the sender's addresses to the receiver's, neighbours merged.

Pages are what a cache is made of, descriptors are what an engine is paid for: pages that lie side by side at both ends
travel as one. NumPy over whole lists; nothing here knows an engine or a frame.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hurray_wire.indices import Int64Array


class Runs(NamedTuple):
    """`length[i]` bytes go from the peer's address `source[i]` to this process's address `target[i]`."""

    source: Int64Array
    target: Int64Array
    length: Int64Array

    @property
    def nbytes(self) -> int:
        """All bytes."""
        return int(self.length.sum())

    def cut(self, ends: Int64Array, page_bytes: int) -> list[Runs]:
        """The runs up to each of `ends`, numbers of pages at which runs end."""
        stops = np.searchsorted(np.cumsum(self.length) // max(1, page_bytes), ends, "right")
        return [Runs(*(part[a:b] for part in self)) for a, b in pairwise([0, *stops.tolist()])]


def merged(source: Int64Array, target: Int64Array, page_bytes: int, ends: Int64Array | None = None) -> Runs:
    """Pages of `page_bytes` from address to address; those that follow one another at both ends are one run.

    No run goes on over one of `ends`, numbers of pages.

    Example:
        >>> import numpy as np
        >>> runs = merged(np.array([0, 8, 16, 80]), np.array([800, 808, 0, 8]), 8)
        >>> [part.tolist() for part in runs]
        [[0, 16, 80], [800, 0, 8], [16, 8, 8]]
    """
    if not source.size:
        return Runs(source, target, np.zeros(0, np.int64))
    apart = (source[1:] - source[:-1] != page_bytes) | (target[1:] - target[:-1] != page_bytes)
    if ends is not None:
        apart[ends[(ends > 0) & (ends < source.size)] - 1] = True
    bounds = np.concatenate(([0], np.flatnonzero(apart) + 1, [source.size]))
    first = bounds[:-1]
    return Runs(source[first], target[first], (bounds[1:] - first) * page_bytes)


def folded(addresses: Int64Array, page_bytes: int) -> tuple[Int64Array, Int64Array]:
    """Addresses of pages as (first address, number of pages) of each run: how they travel.

    Example:
        >>> import numpy as np
        >>> [part.tolist() for part in folded(np.array([64, 72, 8]), 8)]
        [[64, 8], [2, 1]]
    """
    runs = merged(addresses, addresses, page_bytes)
    return runs.source, runs.length // max(1, page_bytes)


def unfolded(first: Int64Array, pages: Int64Array, page_bytes: int) -> Int64Array:
    """The address of every page: the inverse of `folded`.

    Example:
        >>> import numpy as np
        >>> unfolded(np.array([64, 8]), np.array([2, 1]), 8).tolist()
        [64, 72, 8]
    """
    if first.size == 1:
        return first + np.arange(pages.item()) * page_bytes
    begin = np.cumsum(pages) - pages
    within = np.arange(int(pages.sum())) - np.repeat(begin, pages)
    return np.repeat(first, pages) + within * page_bytes


def wire_pages(numbers: Any, num_pages: int) -> npt.NDArray[np.bool_]:
    """A mask of wire pages from their numbers.

    Raises:
        IndexError: one that there is not.
    """
    given = np.asarray(list(numbers) if isinstance(numbers, set | range) else numbers)
    if given.size and (given.dtype.kind not in "iu" or int(given.min()) < 0 or int(given.max()) >= num_pages):
        raise IndexError(f"held must be numbers of wire pages, from 0 to {num_pages - 1}")
    mask = np.zeros(num_pages, np.bool_)
    mask[given.astype(np.int64)] = True
    return mask
