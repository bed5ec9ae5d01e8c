"""Registered memory of an endpoint: the caller's pools, and blocks of the endpoint's own for what is small.

Registering costs system calls, and on real networks pinned pages: it is done once. Blocks are kept and used again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np

from hurray_wire.arrays import Bytes, address, as_array, raw_view
from hurray_wire.indices import Int64Array
from hurray_wire.memory import allocated
from hurray_wire.transports.engine import Engine, Region

_LEAST_BLOCK = 4096


def span_of(array: Any) -> Bytes:
    """The bytes from an array's first to its last, whatever its strides: what is registered for it."""
    given = as_array(array)
    if given.flags.c_contiguous:
        return raw_view(given)
    steps = list(zip(given.shape, given.strides, strict=True))
    if not given.size:
        return np.zeros(0, np.uint8)
    reach = sum((n - 1) * abs(stride) for n, stride in steps)
    lowest = given[tuple(slice(n - 1, n) if stride < 0 else slice(0, 1) for n, stride in steps)]
    element = np.lib.stride_tricks.as_strided(lowest, (1,), (given.itemsize,)).view(np.uint8)
    return np.lib.stride_tricks.as_strided(element, (reach + given.itemsize,), (1,))


class Block:
    """Registered memory that is borrowed: give it back with `release`."""

    def __init__(self, memory: Memory, whole: Bytes, region: Region, nbytes: int) -> None:
        self.bytes = whole[:nbytes]
        self.region = region
        self._whole = whole
        self._memory: Memory | None = memory

    @property
    def address(self) -> int:
        """Where its first byte lies."""
        return self.region.start

    def release(self) -> None:
        """Give it back; the second time does nothing."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.put_back(self._whole, self.region)


@dataclass(eq=False, frozen=True, slots=True)
class Held:
    """What an engine may write to still: its work, and the memory, kept until it has let go."""

    work: Any
    block: Block | None
    pool: Any


class Memory:
    """What an endpoint has registered with its engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._regions: dict[int, tuple[Region, Bytes]] = {}
        self._free: defaultdict[int, list[tuple[Bytes, Region]]] = defaultdict(list)
        self._next = 0

    def add(self, memory: Bytes) -> tuple[int, Region]:
        """Register; gives the number by which it is taken back."""
        region = self._engine.register(memory)
        self._next += 1
        self._regions[self._next] = region, memory
        return self._next, region

    def withdraw(self, number: int) -> tuple[Region, Bytes]:
        """Memory that nothing new is to use; it stays registered until the engine is told otherwise."""
        return self._regions.pop(number)

    def holding(self, addresses: Int64Array, nbytes: int) -> list[Region]:
        """The caller's regions that hold `nbytes` at every address; none where one lies outside of all."""
        if not addresses.size or not nbytes:
            return []
        low, high = int(addresses.min()), int(addresses.max()) + nbytes
        for region, _ in self._regions.values():
            if region.start <= low and high <= region.start + region.nbytes:
                return [region]
        found, covered = [], np.zeros(addresses.size, np.bool_)
        for region, _ in self._regions.values():
            inside = (addresses >= region.start) & (addresses + nbytes <= region.start + region.nbytes)
            if inside.any():
                found.append(region)
                covered |= inside
        return found if covered.all() else []

    def take(self, nbytes: int) -> Block:
        """A block of at least one byte, from those that are free, or a new one."""
        size = max(_LEAST_BLOCK, 1 << max(0, nbytes - 1).bit_length())
        if self._free[size]:
            return Block(self, *self._free[size].pop(), nbytes)
        whole = allocated(size, None)
        return Block(self, whole, self._engine.register(whole), nbytes)

    def put_back(self, whole: Bytes, region: Region) -> None:
        """A block that nobody uses any more."""
        self._free[whole.size].append((whole, region))


class Registration:
    """A pool that an endpoint has registered; closing it takes it back, and with it what was offered out of it.

    Example:
        >>> import numpy as np
        >>> from hurray_wire import transports
        >>> pool = np.zeros((4, 2, 1, 8), np.float16)
        >>> with transports.endpoint("socket") as end, end.register(pool) as registration:
        ...     registration.nbytes
        128
    """

    def __init__(self, endpoint: Any, number: int, region: Region) -> None:
        self._endpoint = endpoint
        self._number: int | None = number
        self.region = region

    @property
    def nbytes(self) -> int:
        """Bytes that are registered."""
        return self.region.nbytes

    def close(self) -> None:
        """Withdraw what is offered out of this memory, wait for its readers to stop, and deregister it."""
        number, self._number = self._number, None
        if number is not None:
            self._endpoint.deregister(number, self.region)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def region_bytes(memory: Bytes, token: Any, access: bytes) -> Region:
    """The region of memory that an engine has registered."""
    return Region(address(memory), memory.size, token, access)
