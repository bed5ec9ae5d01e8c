"""The format's registries, in value order: every tag that a byte on the wire can hold, and its name.

Values and names only; what a value *means* for other fields stands in `rules`, where it lies in `structs`.
Wire constants stand here once, in hex. Sections are those of the wire specification (`schema/`).
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

BARE_MAGIC = b"HRRY"
CONTAINER_MAGIC = b"HRRYFILE"
FRAME_MAGIC = b"\x89HRKV\r\n\x1a"

VERSION_MAJOR = 1
BLOCK_PAGED = 0x0A
RANK = 3
NO_LAYER = 0xFFFF_FFFF
NO_BUFFER = 0xFFFF_FFFF
DYNAMIC = 0xFFFF_FFFF_FFFF_FFFF
MIN_ALIGNMENT = 64
MAX_FRAME_ALIGNMENT = 2 << 20


class Flag(IntFlag):
    """Descriptor flags (section 1): which optional tables follow the handles."""

    QUANTIZATION = 0x01
    SHARD = 0x02
    EXTENSION_TYPE = 0x04
    STATISTICS = 0x08
    COMPOSITE_MEMBER = 0x10


class TypeTag(IntEnum):
    """Element types (section 2)."""

    FLOAT16 = 0x01
    BFLOAT16 = 0x02
    FLOAT32 = 0x03
    FLOAT64 = 0x04
    INT8 = 0x10
    UINT8 = 0x11
    INT16 = 0x12
    UINT16 = 0x13
    INT32 = 0x14
    UINT32 = 0x15
    INT64 = 0x16
    UINT64 = 0x17
    BOOL = 0x20
    FLOAT8_E4M3 = 0x40
    FLOAT8_E5M2 = 0x41
    FLOAT8_E8M0 = 0x42
    FLOAT4_E2M1 = 0x43
    FLOAT6_E2M3 = 0x44
    FLOAT6_E3M2 = 0x45
    FLOAT128 = 0x46
    INT4 = 0x48
    UINT4 = 0x49
    INT2 = 0x4A
    UINT2 = 0x4B
    COMPLEX64 = 0x50
    COMPLEX128 = 0x51


PRIVATE_TYPES = range(0xF0, 0xFF)
PRIVATE_DEVICES = range(0xF0, 0xFF)
PRIVATE_MEMORY = range(0xF0, 0xFF)


class LayoutTag(IntEnum):
    """The one layout that this package reads and writes."""

    BLOCK_PAGED = 0x0A


class KvRole(IntEnum):
    """Which half of the cache a tensor is; `fused` is whatever is not one of the two."""

    KEY = 0
    VALUE = 1
    FUSED = 2


class IndexType(IntEnum):
    """Width of the entries of block_table and seq_ptr."""

    UINT32 = 0
    UINT64 = 1


class LayerIndex(IntEnum):
    """The sentinel that says: not tied to a layer."""

    NONE = NO_LAYER


class DeviceTag(IntEnum):
    """Where a tensor lived; bytes in a blob are host memory whatever it says."""

    CPU = 0
    CUDA = 1
    ROCM = 2
    METAL = 3
    VULKAN = 4
    WEBGPU = 5
    HEXAGON = 6
    LEVEL_ZERO = 7
    OPENCL = 8


class SyncMode(IntEnum):
    """How a consumer would wait for the bytes; in copied bytes only the first means anything."""

    PRODUCER_SYNCED = 0
    EVENT = 1
    CONSUMER_STREAM = 2


class MemoryClass(IntEnum):
    """Kind of memory on the device."""

    STANDARD = 0
    HOST_PINNED = 1
    UNIFIED = 2
    PEER = 3


class SchemeTag(IntEnum):
    """Quantisation schemes."""

    PER_TENSOR = 0x01
    PER_CHANNEL = 0x02
    PER_BLOCK = 0x03
    NF4 = 0x04
    MXFP = 0x05


class SchemeFlag(IntFlag):
    """Flags of a quantisation scheme."""

    SYMMETRIC = 0x0001


class ScaleType(IntEnum):
    """Element type of the scales of a per-channel or per-block scheme: the type tags of the same names."""

    FLOAT16 = 1
    BFLOAT16 = 2
    FLOAT32 = 3


class StatisticsMask(IntFlag):
    """Which statistics were computed."""

    NNZ = 0x01
    SPARSITY_RATIO = 0x02
    RANGE = 0x04
    MOMENTS = 0x08
    NM = 0x10
    NON_FINITE = 0x20


class CompositeRole(IntEnum):
    """Role of a member of a composite."""

    CORRECTION = 0
    BASE = 1


class FrameFlag(IntFlag):
    """Flags of an HRKV frame (section 4)."""

    LAST = 0x0001


class SectionKind(IntEnum):
    """Section kinds of an HRKV frame; buffer i of the descriptor is 0x10 + i."""

    DESCRIPTOR = 0x01
    SEQ_LENS = 0x02
    METADATA = 0x03
    PAGE_POOL = 0x10
    BLOCK_TABLE = 0x11
    SEQ_PTR = 0x12
    SCALES = 0x13
    ZERO_POINTS = 0x14


class Codec(IntEnum):
    """How a section is stored."""

    RAW = 0
    ZSTD = 1


class Filter(IntEnum):
    """What was done to a chunk before compression."""

    NONE = 0
    SHUFFLE = 1


class SectionFlag(IntFlag):
    """Flags of a section."""

    CHECKSUM = 0x0001
    OPTIONAL = 0x0002
