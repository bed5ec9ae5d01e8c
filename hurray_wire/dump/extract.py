"""`--extract DIR`: every buffer as raw bytes and as `.npy`, written while it is read; tables, descriptor, metadata too.

Element types that NumPy has no name for are saved as unsigned integers of their width, packed ones as their bytes;
`frame0.json` says what they are. Nothing that is there already is written over.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hurray_wire.arrays import Bytes
from hurray_wire.descriptor import TensorDescriptor
from hurray_wire.dtypes import Dtype
from hurray_wire.dump.describe import title
from hurray_wire.dump.model import POOL, Item
from hurray_wire.quantization import PerBlockAffine, PerChannelAffine
from hurray_wire.sections import BUFFERS

_ZEROS = bytes(1 << 20)


class ItemExtractor:
    """A consumer of one item's payload: its buffers as files named after the item."""

    def __init__(self, folder: Path, item: Item) -> None:
        self._folder = folder
        self._stem = title(item).replace(" ", "")
        self._files: dict[int, BinaryIO] = {}
        self._names = _names(item)

    def feed(self, kind: int, raw_offset: int, data: Bytes) -> None:
        """The next bytes of a buffer."""
        self._file(kind).write(memoryview(data))

    def lost(self, kind: int, raw_offset: int, length: int) -> None:
        """Damaged bytes become zeros where more of the buffer follows; a buffer that is cut ends there."""
        if length <= len(_ZEROS) and kind in self._names:
            self._file(kind).write(_ZEROS[:length])

    def _file(self, kind: int) -> BinaryIO:
        if kind not in self._files:
            self._files[kind] = self._create(f"{self._names.get(kind, f'buffer{kind - BUFFERS.start}')}.raw")
        return self._files[kind]

    def _create(self, name: str) -> BinaryIO:
        return (self._folder / f"{self._stem}.{name}").open("xb")

    def finish(self, item: Item) -> None:
        """Close what is written, and write the rest: arrays, tables, descriptor, metadata."""
        self.close()
        if item.closing:
            return
        if item.descriptor is not None:
            for kind, (dtype, shape) in _arrays(item.descriptor).items():
                self._array_of_file(kind, dtype, shape, item.descriptor.sizes[kind - BUFFERS.start])
        for name in ("block_table", "seq_ptr", "seq_lens"):
            array = getattr(item, name)
            if array is not None:
                with self._create(f"{name}.raw") as file:
                    file.write(array.tobytes())
                with self._create(f"{name}.npy") as file:
                    file.write(_header(array.dtype, array.shape) + array.tobytes())
        with self._create("descriptor.raw") as file:
            file.write(item.descriptor_bytes)
        with self._create("json") as file:
            file.write(json.dumps(_facts(item), indent=2).encode() + b"\n")

    def close(self) -> None:
        """Whatever happens, no file stays open."""
        for file in self._files.values():
            file.close()

    def _array_of_file(self, kind: int, dtype: np.dtype[Any], shape: tuple[int, ...], size: int) -> None:
        """A `.npy` beside the raw file, copied piece by piece; none of a buffer that is not all there."""
        name = self._names[kind]
        raw = self._folder / f"{self._stem}.{name}.raw"
        if size and (not raw.exists() or raw.stat().st_size != size):
            return
        with self._create(f"{name}.npy") as file:
            file.write(_header(dtype, shape))
            if size:
                with raw.open("rb") as source:
                    while piece := source.read(len(_ZEROS)):
                        file.write(piece)


def _names(item: Item) -> dict[int, str]:
    names = {POOL: "page_pool", BUFFERS.start + 3: "scales", BUFFERS.start + 4: "zero_points"}
    scheme = item.descriptor.quantization if item.descriptor is not None else None
    if isinstance(scheme, PerBlockAffine | PerChannelAffine) and _shared(scheme):
        names[BUFFERS.start + 3] = "scales_and_zero_points"
    return names


def _shared(scheme: PerBlockAffine | PerChannelAffine) -> bool:
    return scheme.zero_point_buffer_index == scheme.scale_buffer_index


def _arrays(descriptor: TensorDescriptor) -> dict[int, tuple[np.dtype[Any], tuple[int, ...]]]:
    """The payload buffers, each with the type and shape that its `.npy` has."""
    pool = _saved(descriptor.dtype)
    shape: tuple[int, ...] = descriptor.pool_shape
    if descriptor.dtype.is_flat or pool is None or any(n >= 1 << 63 for n in shape):
        pool, shape = np.dtype(np.uint8), (descriptor.sizes[0],)
    found = {POOL: (pool, shape)}
    scheme = descriptor.quantization
    for buffer, size in enumerate(descriptor.sizes[3:], 3):
        dtype: np.dtype[Any] | None = np.dtype(np.uint8)
        if isinstance(scheme, PerBlockAffine | PerChannelAffine) and not _shared(scheme):
            dtype = _saved(scheme.scale_type) if buffer == 3 else np.dtype("<i4")
        assert dtype is not None
        entries: tuple[int, ...] = (size // dtype.itemsize,)
        if isinstance(scheme, PerBlockAffine) and dtype.itemsize > 1:
            entries = (descriptor.layout.num_pages, descriptor.layout.page_size)
        found[BUFFERS.start + buffer] = (dtype, entries)
    return found


def _saved(dtype: Dtype) -> np.dtype[Any] | None:
    """The type that `.npy` can say: NumPy's own, else an unsigned integer of the width."""
    if dtype.numpy is None:
        return None
    return dtype.numpy if dtype.numpy.isbuiltin == 1 else np.dtype(f"<u{dtype.numpy.itemsize}")


def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    facts = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, facts)
    return file.getvalue()


def _facts(item: Item) -> dict[str, Any]:
    from hurray_wire.dump.json_output import descriptor_facts

    return {"descriptor": descriptor_facts(item), "metadata": item.metadata}
