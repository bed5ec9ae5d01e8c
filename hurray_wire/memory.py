"""Memory that decoding hands out: a read-only view of the input where it can be one, else aligned memory of its own."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from hurray_wire.arrays import Bytes, address, as_bytes, frozen
from hurray_wire.descriptor import TensorDescriptor
from hurray_wire.errors import Code, LimitError, UnsupportedError
from hurray_wire.options import Alloc, DecodeOptions
from hurray_wire.quantization import PerBlockAffine, PerChannelAffine
from hurray_wire.tags import MIN_ALIGNMENT


def allocated(nbytes: int, alloc: Alloc | None, alignment: int = MIN_ALIGNMENT) -> Bytes:
    """Writable memory, aligned, or what the caller's `alloc(nbytes, alignment)` gives.

    Large memory is only paid for as it is written to: the system maps its pages at the first touch.

    Raises:
        ValueError: the caller's buffer is read-only, too small or not aligned.
        LimitError: `decoded_bytes`: this process cannot have so much, whatever the limits allow.
    """
    if alloc is not None:
        return _callers(alloc(nbytes, alignment), nbytes, alignment)
    try:
        block = np.empty(nbytes + alignment, np.uint8)
    except (MemoryError, ValueError):
        raise _too_much(nbytes) from None
    start = -address(block) % alignment
    return block[start : start + nbytes]


def private(data: Bytes) -> bytes:
    """A copy that nobody else can change, to be checked and then used.

    Raises:
        LimitError: `decoded_bytes`: this process cannot have so much.
    """
    try:
        return data.tobytes()
    except MemoryError:
        raise _too_much(data.size) from None


def _too_much(nbytes: int) -> LimitError:
    message = f"declares {nbytes} bytes, which this process cannot have"
    return LimitError(message, claimed=nbytes, limit=_machine_bytes(), code=Code.DECODED_BYTES, where="buffers")


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


def _callers(buffer: Any, nbytes: int, alignment: int) -> Bytes:
    memory = as_bytes(buffer)
    if memory.size < nbytes or not memory.flags.writeable or (nbytes and address(memory) % alignment):
        raise ValueError(
            f"alloc must give {nbytes} writable bytes at a multiple of {alignment}; it gave {memory.size} at "
            f"{address(memory):#x}, {'writable' if memory.flags.writeable else 'read-only'}"
        )
    return memory[:nbytes]


_OF_ALIGNMENT = {width: np.dtype(f"u{width}") for width in (2, 4, 8)}


def _fits(data: Bytes, alignment: int) -> bool:
    """Whether elements of this alignment can be viewed where the bytes lie; asked of NumPy, which is quick at it."""
    if data.size < alignment or alignment == 1:
        return True
    return bool(np.ndarray(1, _OF_ALIGNMENT[alignment], data).flags.aligned)


def element_alignment(descriptor: TensorDescriptor, buffer: int) -> int:
    """The alignment that a view of this buffer's elements needs, in bytes."""
    if buffer == 0:
        numpy = descriptor.dtype.numpy
        return 1 if descriptor.dtype.is_flat or numpy is None else numpy.alignment
    scheme = descriptor.quantization
    if buffer == 3 and isinstance(scheme, PerChannelAffine | PerBlockAffine) and scheme.scale_type.numpy is not None:
        return scheme.scale_type.numpy.alignment
    return 4 if buffer == 4 else 1


def placed(data: Bytes, descriptor: TensorDescriptor, buffer: int, options: DecodeOptions) -> Bytes:
    """A buffer's raw bytes as decoding hands them out: viewed read-only, or copied where `copy` or alignment asks.

    Raises:
        UnsupportedError: `copy_required`.
    """
    fits = _fits(data, element_alignment(descriptor, buffer))
    if options.copy or (not fits and options.copy is None):
        own = allocated(data.size, options.alloc)
        np.copyto(own, data)
        return own
    if not fits:
        message = f"its elements need {element_alignment(descriptor, buffer)}-byte alignment, and copy=False"
        raise UnsupportedError(message, code=Code.COPY_REQUIRED, where=f"buffers[{buffer}]")
    return data[:] if options.owned else frozen(data[:])
