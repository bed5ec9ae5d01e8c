"""Every way a blob or a value can be wrong: one exception tree, one closed set of codes.

This room knows no format and no bytes. Rules report `Violation`s, readers raise the exceptions; both carry a
`Code`, a dotted field path (`where`) and, when bytes were read, the absolute byte offset. Nothing that
decoding raises stands outside this tree, apart from `OSError` and `TimeoutError` of the I/O itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

__all__ = [
    "ChecksumError",
    "Code",
    "Difference",
    "FrameError",
    "HurrayWireError",
    "InvalidDescriptorError",
    "LimitError",
    "MismatchError",
    "StoreError",
    "TruncatedError",
    "UnsupportedError",
    "Violation",
]


class Code(StrEnum):
    """The closed set of reasons, grouped by the class that carries them; `schema/codes.md` explains each."""

    # InvalidDescriptorError
    FLAG_RESERVED = "flag_reserved"
    RESERVED_NOT_ZERO = "reserved_not_zero"
    RANK = "rank"
    SHAPE = "shape"
    PAGE_SIZE = "page_size"
    NUM_PAGES = "num_pages"
    NUM_SEQS = "num_seqs"
    PAGED_AXIS = "paged_axis"
    BYTE_OFFSET = "byte_offset"
    KV_ROLE = "kv_role"
    INDEX_TYPE = "index_type"
    LAYER_INDEX = "layer_index"
    BUFFER_COUNT = "buffer_count"
    BUFFER_SIZE = "buffer_size"
    ALIGNMENT = "alignment"
    DEVICE = "device"
    MEMORY_CLASS = "memory_class"
    SYNC_MODE = "sync_mode"
    COLOCATION = "colocation"
    QUANTIZATION_SCHEME = "quantization_scheme"
    QUANTIZATION_AXIS = "quantization_axis"
    QUANTIZATION_BLOCK = "quantization_block"
    QUANTIZATION_STORAGE = "quantization_storage"
    QUANTIZATION_SCALE = "quantization_scale"
    QUANTIZATION_ZERO_POINT = "quantization_zero_point"
    QUANTIZATION_BUFFER = "quantization_buffer"
    SHARD = "shard"
    STATISTICS = "statistics"
    EXTENSION_TYPE = "extension_type"
    COMPOSITE = "composite"
    DESCRIPTOR_LENGTH = "descriptor_length"  # also a FrameError, for a bare item's impossible length
    SEQ_PTR_START = "seq_ptr_start"
    SEQ_PTR_ORDER = "seq_ptr_order"
    SEQ_PTR_END = "seq_ptr_end"
    PAGE_ID = "page_id"
    NEGATIVE_INDEX = "negative_index"
    NOT_INTEGER = "not_integer"
    TOKEN_COUNT = "token_count"
    SEQ_LENS_SUM = "seq_lens_sum"
    SEQ_LENS_RANGE = "seq_lens_range"
    SEQ_LENS_COUNT = "seq_lens_count"

    # FrameError
    MAGIC = "magic"
    HEADER_LENGTH = "header_length"
    FRAME_LENGTH = "frame_length"
    SECTION_ORDER = "section_order"
    SECTION_KIND = "section_kind"
    SECTION_CODEC = "section_codec"
    SECTION_FILTER = "section_filter"
    SECTION_FLAGS = "section_flags"
    SECTION_COVER = "section_cover"
    SECTION_OFFSET = "section_offset"
    PADDING = "padding"
    ZSTD = "zstd"
    METADATA = "metadata"
    SEQUENCE = "sequence"
    STREAM_ID = "stream_id"
    LAST = "last"
    TRAILING_BYTES = "trailing_bytes"

    # TruncatedError, ChecksumError
    TRUNCATED = "truncated"
    STREAM_TRUNCATED = "stream_truncated"
    HEADER_CHECKSUM = "header_checksum"
    SECTION_CHECKSUM = "section_checksum"

    # UnsupportedError
    VERSION = "version"
    CONTAINER = "container"
    FOREIGN = "foreign"
    LAYOUT = "layout"
    DTYPE = "dtype"
    SCHEME = "scheme"
    DYNAMIC = "dynamic"
    SEQ_LENS_UNKNOWN = "seq_lens_unknown"
    COPY_REQUIRED = "copy_required"
    BARE_FORM = "bare_form"
    PACKED_POOL = "packed_pool"

    # LimitError, MismatchError
    DESCRIPTOR_BYTES = "descriptor_bytes"
    METADATA_BYTES = "metadata_bytes"
    SECTIONS = "sections"
    FRAME_BYTES = "frame_bytes"
    DECODED_BYTES = "decoded_bytes"
    STREAM_BYTES = "stream_bytes"
    FRAMES = "frames"
    MISMATCH = "mismatch"

    # StoreError
    STORE = "store"


UNSUPPORTED_CODES = frozenset({Code.VERSION, Code.LAYOUT, Code.DTYPE, Code.SCHEME, Code.DYNAMIC})
"""What a rule may find that is lawful for somebody else: it wins over violations found beside it."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: a code, the field's dotted path, a message; `index` and `value` where an array is meant.

    `tolerable` marks what a lenient reader (`strict=False`) reports instead of raising;
    `offset` is the absolute byte offset of the field when bytes were read.
    """

    code: Code
    where: str
    message: str
    index: int | None = None
    value: int | None = None
    offset: int | None = None
    tolerable: bool = False

    def __str__(self) -> str:
        place = self.where if self.offset is None else f"{self.where} at byte {self.offset}"
        return f"{place}: {self.message}" if place else self.message


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two ends differ: a field's path, what was found, what was expected."""

    where: str
    found: Any
    expected: Any

    def __str__(self) -> str:
        return f"{self.where}: found {self.found!r}, expected {self.expected!r}"


class HurrayWireError(ValueError):
    """Root of the tree. `.code` is a `Code`, `.where` a dotted field path, `.offset` an absolute byte offset.

    Example:
        >>> try:
        ...     raise FrameError("found 00, must be 01", code=Code.MAGIC, where="magic", offset=0)
        ... except HurrayWireError as error:
        ...     print(error, error.code == "magic")
        magic at byte 0: found 00, must be 01 True
    """

    default_code: Code | None = None
    pages_written: Any = None
    """Where decoding into a receiver's pool failed on the way: the page ids to discard."""

    def __init__(self, message: str, *, code: Code | None = None, where: str = "", offset: int | None = None) -> None:
        chosen = code if code is not None else self.default_code
        if chosen is None:
            raise TypeError(f"{type(self).__name__} needs a code")
        place = where if offset is None else f"{where or 'input'} at byte {offset}"
        super().__init__(f"{place}: {message}" if place else message)
        self.message = message
        self.code = Code(chosen)
        self.where = where
        self.offset = offset

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception crosses process borders (multiprocessing, concurrent.futures) whole or not at all.
        return _revive, (type(self), self.args, self.__dict__)


def _revive(kind: type[HurrayWireError], args: tuple[Any, ...], state: dict[str, Any]) -> HurrayWireError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidDescriptorError(HurrayWireError):
    """A value breaks a rule of the format; `.violations` lists all that one pass found, the first one leads."""

    def __init__(
        self,
        message: str,
        *,
        code: Code,
        where: str = "",
        offset: int | None = None,
        violations: Sequence[Violation] = (),
    ) -> None:
        super().__init__(message, code=code, where=where, offset=offset)
        self.violations: tuple[Violation, ...] = tuple(violations) or (Violation(code, where, message, offset=offset),)


class FrameError(HurrayWireError):
    """The envelope's bytes are wrong."""


class TruncatedError(FrameError):
    """Ends early: of `.needed` bytes, counted from the item's first, `.available` are there."""

    default_code = Code.TRUNCATED

    def __init__(
        self,
        message: str = "",
        *,
        needed: int,
        available: int,
        code: Code | None = None,
        where: str = "",
        offset: int | None = None,
    ) -> None:
        text = message or f"ends early: needs {needed} bytes, {available} are there"
        super().__init__(text, code=code, where=where, offset=offset)
        self.needed = needed
        self.available = available


class ChecksumError(FrameError):
    """Bytes differ from what was sent."""

    default_code = Code.SECTION_CHECKSUM


class UnsupportedError(HurrayWireError):
    """Legal for somebody else, or not expressible here."""


class LimitError(HurrayWireError):
    """A declared size is over a limit: `.claimed` against `.limit`."""

    def __init__(
        self, message: str = "", *, claimed: int, limit: int, code: Code, where: str = "", offset: int | None = None
    ) -> None:
        text = message or f"declares {claimed}, the limit {code} is {limit}"
        super().__init__(text, code=code, where=where, offset=offset)
        self.claimed = claimed
        self.limit = limit


class MismatchError(HurrayWireError):
    """Sound, but not what `expect` asked for; `.differences` lists every one."""

    default_code = Code.MISMATCH

    def __init__(self, differences: Iterable[Difference]) -> None:
        self_differences = tuple(differences)
        super().__init__("; ".join(map(str, self_differences)), where="expect")
        self.differences = self_differences


class StoreError(HurrayWireError, OSError):
    """A store did not take what was to be kept: it is full, refused, or went away. `__cause__` is its own error.

    An OSError too, with its `errno` where the store's error had one. What was there before is still there, and
    nothing half-written is left under the name.
    """

    default_code = Code.STORE

    def __init__(self, message: str, *, where: str = "", cause: BaseException | None = None) -> None:
        super().__init__(message, where=where)
        self.errno = getattr(cause, "errno", None)


def located(violation: Violation, offset: int | None) -> Violation:
    """The same violation with the absolute byte offset of its field."""
    return violation if offset is None else replace(violation, offset=offset)


def violations_error(violations: Sequence[Violation]) -> HurrayWireError:
    """The one exception for what a stage found: unsupported things win, the first violation leads."""
    lead = next((v for v in violations if v.code in UNSUPPORTED_CODES), violations[0])
    if lead.code in UNSUPPORTED_CODES:
        return UnsupportedError(lead.message, code=lead.code, where=lead.where, offset=lead.offset)
    if lead.code is Code.MAGIC:
        return FrameError(lead.message, code=lead.code, where=lead.where, offset=lead.offset)
    more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
    return InvalidDescriptorError(
        lead.message + more, code=lead.code, where=lead.where, offset=lead.offset, violations=violations
    )
