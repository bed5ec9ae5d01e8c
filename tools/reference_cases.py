"""What the reference implementation, `pyhurray` 0.1.0, writes and reads: run in a process of its own.

The reference aborts its process on hostile sizes, so nothing here is imported by a test; it is run:

    python tools/reference_cases.py write           one JSON object: for each case the blob in hex, and a note
    python tools/reference_cases.py read < LINES    for each line, a blob in hex, what its reader says of it

Exit status 3 where pyhurray is not installed. None of these bytes come from hurray_wire.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

try:
    import hurray
except ImportError:  # pragma: no cover - said by the exit status
    sys.exit(3)

MOST_BYTES = 1 << 20
"""No buffer of a case is larger; without a cap the reader allocates what a lie declares."""
LAYOUT = ("page_size", "num_pages", "paged_axis", "num_seqs", "kv_role", "layer_index", "block_table_index_type")


@dataclass(frozen=True)
class Geometry:
    """Pages and sequences: three pages of two tokens; sequences of 3 and 2 tokens."""

    page_size: int = 2
    num_pages: int = 3
    heads: int = 2
    dim: int = 4
    block_table: tuple[int, ...] = (2, 0, 1)
    seq_ptr: tuple[int, ...] = (0, 2, 3)
    tokens: int = 5

    @property
    def elements(self) -> int:
        return self.num_pages * self.page_size * self.heads * self.dim


@dataclass(frozen=True)
class Tensor:
    """One case: an element type, and where it differs from the plainest tensor."""

    name: str
    dtype: int = 0x01
    note: str = ""
    geometry: Geometry = field(default_factory=Geometry)
    layout: dict[str, Any] = field(default_factory=dict)
    scheme: Any = None
    scale_buffers: tuple[bytes, ...] = ()
    statistics: dict[str, Any] | None = None
    extension: dict[str, Any] | None = None
    device: tuple[Any, ...] | None = None


def pattern(size: int) -> bytes:
    """Bytes that look like nothing in particular, the same ones every time."""
    return bytes((i * 37 + 11) & 0xFF for i in range(size))


def pool_of(tensor: Tensor) -> bytes:
    """The pool's bytes; unused bits behind the last element are zero, as the format wants it of a writer."""
    bits = tensor.extension["bit_width"] if tensor.extension else hurray.Dtype.from_tag(tensor.dtype).bit_width
    count = tensor.geometry.elements
    size = (count + 3) // 4 * 3 if bits == 6 else (count * bits + 7) // 8
    value = int.from_bytes(pattern(size), "little") & ((1 << count * bits) - 1)
    return value.to_bytes(size, "little")


def blob_of(tensor: Tensor) -> bytes:
    """The reference's stream of one tensor."""
    geometry, layout = tensor.geometry, {"kv_role": "key", "layer_index": 3, **tensor.layout}
    width = "Q" if layout.get("block_table_index_type") == "uint64" else "I"
    tables = [struct.pack(f"<{len(t)}{width}", *t) for t in (geometry.block_table, geometry.seq_ptr)]
    made = hurray.Tensor(
        pool_of(tensor),
        hurray.Dtype.from_tag(tensor.dtype),
        [geometry.tokens, geometry.heads, geometry.dim],
        None if tensor.device is None else hurray.Device(tensor.device[0], memory_class=tensor.device[1]),
        aux_buffers=[*tables, *tensor.scale_buffers],
        layout=hurray.BlockPagedLayout(geometry.page_size, geometry.num_pages, 0, len(geometry.seq_ptr) - 1, **layout),
        quantization=tensor.scheme,
        statistics=None if tensor.statistics is None else hurray.Statistics(**tensor.statistics),
        extension_type=None if tensor.extension is None else hurray.ExtensionType(**tensor.extension),
    )
    writer = hurray.StreamWriter()
    writer.write(made)
    writer.finish()
    return bytes(writer.getvalue())


# === the cases ===============================================================================================

ODD = Geometry(page_size=1, num_pages=3, heads=1, dim=5, block_table=(2, 0, 1), seq_ptr=(0, 3), tokens=3)
"""15 elements: the last byte of a packed pool is not full."""


def element_types() -> Iterator[Tensor]:
    """Those of which there was no vector yet, and packed pools that end inside a byte."""
    for name, tag in (("complex64", 0x50), ("int64", 0x16), ("uint2", 0x4B), ("float6-e3m2", 0x45)):
        yield Tensor(f"dtype-{name}", tag)
    for name, tag in (("float16", 0x01), ("float32", 0x03), ("complex128", 0x51), ("int4", 0x48)):
        yield Tensor(f"plain-{name}", tag, "the plainest tensor, which hand-written cases start from")
    for name, tag in (("bool", 0x20), ("int2", 0x4A), ("float4-e2m1", 0x43), ("float6-e2m3", 0x44)):
        yield Tensor(f"dtype-{name}-odd-pool", tag, "15 elements: unused bits behind the last one", ODD)
    parts = {"sign_bits": 0, "exponent_bits": 0, "mantissa_bits": 0, "exponent_bias": 0}
    plain = {"is_float": False, "is_signed": False, "has_nan": False, "has_inf": False, **parts}
    for tag, bits in ((0xF0, 1), (0xF1, 2), (0xF4, 4), (0xFE, 40)):
        yield Tensor(f"extension-{tag:02x}-{bits}bit", tag, extension={"bit_width": bits, **plain})
    eight = {"sign_bits": 1, "exponent_bits": 3, "mantissa_bits": 4, "exponent_bias": 3}
    kind = {"is_float": True, "is_signed": False, "has_nan": True, "has_inf": True}
    yield Tensor("extension-f3-8bit-float", 0xF3, extension={"bit_width": 8, **kind, **eight})


def layouts() -> Iterator[Tensor]:
    """Roles, layers, index types, and tables at their ends."""
    yield Tensor("role-fused", layout={"kv_role": "fused", "layer_index": None})
    yield Tensor("layer-largest-uint64", layout={"layer_index": 0xFFFFFFFE, "block_table_index_type": "uint64"})
    yield Tensor("heads-zero", note="a pool of no bytes", geometry=Geometry(heads=0))
    yield Tensor("head-dim-zero", note="a pool of no bytes", geometry=Geometry(dim=0))
    yield Tensor("seq-lens-forced-one-sequence", geometry=Geometry(seq_ptr=(0, 3), tokens=5))
    lone = "three sequences, all pages with the second: seq_lens are forced"
    yield Tensor("seq-lens-forced-lone-pages", note=lone, geometry=Geometry(seq_ptr=(0, 0, 3, 3), tokens=4))
    yield Tensor("seq-lens-forced-full-pages", geometry=Geometry(tokens=6))
    yield Tensor("seq-lens-forced-no-tokens", note="pages allocated ahead", geometry=Geometry(tokens=0))
    yield Tensor("seq-lens-unknown", note="(3, 2) and (4, 1) would be the same bytes")
    yield Tensor("pages-spare-and-unused", geometry=Geometry(num_pages=5, block_table=(4, 4, 0), tokens=2))
    yield Tensor("page-size-three", geometry=Geometry(page_size=3, seq_ptr=(0, 1, 3), tokens=7))
    yield Tensor("sequences-without-pages", geometry=Geometry(block_table=(), seq_ptr=(0, 0, 0), tokens=0))


def places() -> Iterator[Tensor]:
    """Every device, and every memory class on one that has it."""
    for kind, memory in (
        *(("cuda", "peer"), ("rocm", "host_pinned"), ("metal", "unified"), ("vulkan", "peer"), ("webgpu", "standard")),
        *(("hexagon", "host_pinned"), ("level_zero", "peer"), ("opencl", "unified")),
    ):
        yield Tensor(f"device-{kind.replace('_', '-')}", device=(kind, memory))
    yield Tensor("device-private-f0", device=(0xF0, 0xF5))
    yield Tensor("device-private-fe-standard", device=(0xFE, "standard"))


def floats(form: str, count: int) -> bytes:
    """Scales: 0.25, 0.5, 0.75, ... as float32 or float16; as bfloat16 the upper halves of float32."""
    values = [0.25 * (i + 1) for i in range(count)]
    if form == "bfloat16":
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return struct.pack(f"<{count}{'e' if form == 'float16' else 'f'}", *values)


def integers(count: int, low: int) -> bytes:
    """Zero points from `low` on, int32."""
    return struct.pack(f"<{count}i", *(low + i % 2 for i in range(count)))


AFFINE = {
    **{"int8": 0x10, "uint8": 0x11, "int16": 0x12, "uint16": 0x13, "int32": 0x14, "uint32": 0x15},
    **{"float8-e4m3": 0x40, "float8-e5m2": 0x41, "int4": 0x48, "uint4": 0x49, "int2": 0x4A, "uint2": 0x4B},
}
SHARED = {"float4-e2m1": 0x43, "float6-e2m3": 0x44, "float6-e3m2": 0x45}


def per_tensor() -> Iterator[Tensor]:
    for name, tag in AFFINE.items():
        zero = 0 if name.startswith("float8") else 1
        yield Tensor(f"per-tensor-{name}", tag, scheme=hurray.PerTensorAffine(-0.5, zero))


def per_channel() -> Iterator[Tensor]:
    symmetric, asymmetric = hurray.PerChannelAffine.symmetric, hurray.PerChannelAffine.asymmetric
    for name in ("uint8", "int16", "uint32", "uint2", "float8-e4m3"):
        scales = (floats("float32", 4),)
        yield Tensor(f"per-channel-dim-{name}", AFFINE[name], scheme=symmetric(2, 3), scale_buffers=scales)
    for name in ("uint16", "int32", "int4", "uint4", "int2"):
        buffers = (floats("float32", 2), integers(2, 0))
        yield Tensor(
            f"per-channel-heads-asymmetric-{name}", AFFINE[name], "", scheme=asymmetric(1, 3, 4), scale_buffers=buffers
        )
    zeros = (floats("float32", 4), bytes(16))
    scheme = asymmetric(2, 3, 4)
    yield Tensor("per-channel-dim-asymmetric-float8-e5m2", 0x41, scheme=scheme, scale_buffers=zeros)
    none = (b"", b"")
    empty = Geometry(heads=0)
    yield Tensor("per-channel-heads-zero", 0x10, geometry=empty, scheme=asymmetric(1, 3, 4), scale_buffers=none)


def per_block() -> Iterator[Tensor]:
    symmetric, asymmetric = hurray.PerBlockAffine.symmetric, hurray.PerBlockAffine.asymmetric
    for name, form in (("uint8", "float16"), ("int2", "bfloat16"), ("float8-e4m3", "float32"), ("int4", "float16")):
        scheme = symmetric(0, 2, 3, hurray.Dtype.from_name(form))
        yield Tensor(f"per-block-{form}-{name}", AFFINE[name], scheme=scheme, scale_buffers=(floats(form, 6),))
    for name, form in (("uint4", "float16"), ("uint2", "bfloat16"), ("int8", "float32")):
        scheme, buffers = asymmetric(0, 2, 3, 4, hurray.Dtype.from_name(form)), (floats(form, 6), integers(6, 1))
        yield Tensor(f"per-block-asymmetric-{form}-{name}", AFFINE[name], scheme=scheme, scale_buffers=buffers)
    scheme, buffers = asymmetric(0, 2, 3, 4, hurray.float16), (floats("float16", 6), bytes(24))
    yield Tensor("per-block-asymmetric-float16-float8-e5m2", 0x41, scheme=scheme, scale_buffers=buffers)


def carried() -> Iterator[Tensor]:
    """NF4 and MXFP: carried, their scales of any size."""
    yield Tensor("nf4-uint4", 0x49, scheme=hurray.NF4(2, 64, 3), scale_buffers=(pattern(12),))
    for name, tag in {**SHARED, **{n: AFFINE[n] for n in ("float8-e4m3", "float8-e5m2", "int8", "int4")}}.items():
        yield Tensor(f"mxfp-{name}", tag, scheme=hurray.MXFP(2, 32, 3), scale_buffers=(pattern(7),))


def statistics() -> Iterator[Tensor]:
    ranges = {"value_min": -1.5, "value_max": 2.0, "value_abs_max": 2.0, "value_mean": 0.25, "value_stddev": 0.5}
    every = {
        "nnz": 2**63 + 5,
        "sparsity_ratio": 0.125,
        **ranges,
        "nm_n": 2,
        "nm_m": 4,
        "has_nan": True,
        "has_inf": False,
    }
    scheme, scales = hurray.PerChannelAffine.symmetric(1, 3), (floats("float32", 2),)
    yield Tensor("statistics-every-group-quantised", 0x10, scheme=scheme, scale_buffers=scales, statistics=every)
    yield Tensor("statistics-none-computed", statistics={})
    extension = {"bit_width": 8, "is_float": False, "is_signed": True}
    parts = {
        "sign_bits": 0,
        "exponent_bits": 0,
        "mantissa_bits": 0,
        "exponent_bias": 0,
        "has_nan": False,
        "has_inf": False,
    }
    note = "statistics stand before the extension type, although their flag is the higher bit"
    yield Tensor(
        "statistics-and-extension", 0xF8, note, statistics={"nm_n": 1, "nm_m": 2}, extension={**extension, **parts}
    )


def cases() -> Iterator[Tensor]:
    """Every case that the reference writes for the corpus."""
    for group in (element_types, layouts, places, per_tensor, per_channel, per_block, carried, statistics):
        yield from group()


def write() -> dict[str, Any]:
    """Name to blob and note."""
    return {tensor.name: {"hex": blob_of(tensor).hex(), "note": tensor.note} for tensor in cases()}


# === its reader ==============================================================================================


def told(tensor: Any) -> dict[str, Any]:
    """What the reference found in a tensor, and the bytes as which it writes that again."""
    writer = hurray.StreamWriter()
    writer.write(tensor)
    writer.finish()
    return {
        "type_tag": tensor.dtype.tag,
        "shape": list(tensor.shape),
        "layout": {name: getattr(tensor.layout, name) for name in LAYOUT},
        "blob": bytes(writer.getvalue()).hex(),
    }


def read(blob: bytes) -> dict[str, Any]:
    """The verdict of the reference's stream reader on the whole of a blob."""
    try:
        items = [told(item) for item in hurray.StreamReader(blob, max_buffer_bytes=MOST_BYTES)]
    except Exception as error:
        return {"verdict": "reject", "error": type(error).__name__, "message": str(error)}
    return {"verdict": "accept", "items": items}


def main() -> int:
    """`write` or `read`."""
    if sys.argv[1:] == ["write"]:
        print(json.dumps(write()))
        return 0
    if sys.argv[1:] == ["read"]:
        for line in sys.stdin:
            print(json.dumps(read(bytes.fromhex(line.strip()))), flush=True)
        return 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())
