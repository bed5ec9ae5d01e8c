"""The decode process's own pages: another page size, other ids, and prefixes that it already has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

import hurray_wire as hw
from handoff.jobs import RECEIVER_PAGE_SIZE
from hurray_wire import engines, ops

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]


class Pool:
    """Pages of every layer and role, `[layers, pages, page_size, heads, dim]`, under one table of one batch.

    Args:
        layers: how many there are.
        roles: kv_role: (heads, dim).
        dtype: the elements' type.
        pages: how many each layer has; ids are given out in no order.
    """

    def __init__(self, layers: int, roles: Mapping[str, tuple[int, int]], dtype: str, pages: int) -> None:
        element = hw.Dtype.of(dtype).numpy
        self.arrays: dict[str, Array] = {
            role: np.empty((layers, pages, RECEIVER_PAGE_SIZE, heads, dim), element)
            for role, (heads, dim) in roles.items()
        }
        for array in self.arrays.values():
            array[...] = 0  # an engine's pool is memory that is in use, not what the system has yet to find
        self._free = np.random.default_rng(7).permutation(np.arange(1, pages))
        self._arrived = {role: np.zeros((layers, heads), np.int64) for role, (heads, _) in roles.items()}
        self.table = np.zeros(0, np.int64)
        self.seq_ptr = np.zeros(1, np.int64)
        self.totals = np.zeros(0, np.int64)

    def _take(self, count: int) -> Ids:
        if count > self._free.size:
            raise MemoryError(f"{count} pages are needed, {self._free.size} are free")
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def seat(self, t: hw.BlockPagedTensor, prefix_pages: Ids | None = None) -> None:
        """Pages for a batch that arrives. What its sequences share at their beginning they share here too.

        Args:
            t: any tensor of the batch.
            prefix_pages: pages that every sequence begins with and that are here already.
        """
        first = np.array((t.metadata or {}).get("first_tokens", [0] * t.num_seqs), np.int64)
        self.totals = first + t.known_lens().astype(np.int64)
        counts = -(-self.totals // RECEIVER_PAGE_SIZE)
        if prefix_pages is None:
            prefix_pages = self._take(shared_tokens(t) // RECEIVER_PAGE_SIZE)
        self.seq_ptr = np.concatenate([[0], np.cumsum(counts)])
        place = np.arange(self.seq_ptr[-1]) - np.repeat(self.seq_ptr[:-1], counts)
        shared = place < prefix_pages.size
        self.table = np.empty(place.size, np.int64)
        self.table[shared] = prefix_pages[place[shared]]
        self.table[~shared] = self._take(int((~shared).sum()))
        for arrived in self._arrived.values():
            arrived[...] = 0

    def put(self, t: hw.BlockPagedTensor) -> None:
        """Scatter a tensor into the pages of its layer and role, a rank's heads into their place among all heads."""
        metadata = t.metadata or {}
        target = self.arrays[t.kv_role][t.layer_index]
        start, stop, _ = metadata.get("heads", (0, t.num_heads, t.num_heads))
        ops.scatter(t, target[:, :, start:stop], self.table, self.seq_ptr, first_tokens=metadata.get("first_tokens", 0))
        self._arrived[t.kv_role][t.layer_index, start:stop] += 1

    def check_complete(self) -> None:
        """Raise unless every head of every layer and role has arrived once."""
        for role, arrived in self._arrived.items():
            if not (arrived == 1).all():
                layer, head = np.argwhere(arrived != 1)[0]
                raise ValueError(f"{role} head {head} of layer {layer} arrived {arrived[layer, head]} times")

    def tensor(self, role: str, layer: int) -> hw.BlockPagedTensor:
        """The batch as it lies in the pool."""
        return hw.BlockPagedTensor(
            self.arrays[role][layer],
            block_table=self.table,
            seq_ptr=self.seq_ptr,
            seq_lens=self.totals,
            kv_role=role,
            layer_index=layer,
        )

    def layers(self, key_dim: int) -> list[tuple[hw.BlockPagedTensor, hw.BlockPagedTensor]]:
        """The batch as a pair a layer; a latent's parts too are views of its pages, the first one `key_dim` wide."""
        count = len(next(iter(self.arrays.values())))
        if "fused" not in self.arrays:
            return [(self.tensor("key", i), self.tensor("value", i)) for i in range(count)]
        fused = [self.tensor("fused", i) for i in range(count)]
        return [
            (
                t.replace(page_pool=t.page_pool[..., :key_dim], kv_role="key"),
                t.replace(page_pool=t.page_pool[..., key_dim:], kv_role="value"),
            )
            for t in fused
        ]


def shared_tokens(t: hw.BlockPagedTensor) -> int:
    """How many tokens all sequences of a tensor have in common, as far as their first pages are the same."""
    rows = engines.padded_block_table(t, fill=-1)
    if len(rows) < 2:
        return 0
    alike = (rows == rows[0]).all(axis=0) & (rows[0] >= 0)
    pages = int(alike.argmin()) if not alike.all() else alike.size
    return min(pages * t.page_size, int(t.known_lens().min()))


def in_dtype(t: hw.BlockPagedTensor, dtype: str) -> hw.BlockPagedTensor:
    """A quantised tensor's values in a model's element type; others as they are."""
    if t.quantization is None:
        return t
    values = ops.dequantize(t)
    return values.replace(page_pool=values.page_pool.astype(hw.Dtype.of(dtype).numpy))
