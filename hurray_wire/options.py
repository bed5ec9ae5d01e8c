"""What a caller may ask of encoding and decoding: options, limits, expectations, checked once at the door."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal, TypedDict

from hurray_wire.descriptor import TensorDescriptor
from hurray_wire.dtypes import Dtype
from hurray_wire.errors import Code, Difference, LimitError, MismatchError
from hurray_wire.metadata import Metadata
from hurray_wire.schemes import scheme_name
from hurray_wire.tags import MIN_ALIGNMENT

__all__ = ["DEFAULT_LIMITS", "Alloc", "DecodeOptions", "Decoding", "EncodeOptions", "Encoding", "Limits"]

Alloc = Callable[[int, int], Any]
"""`alloc(nbytes, alignment)` gives a writable buffer: pinned, registered, shared."""

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """What a reader accepts, in bytes and counts, looked at before anything is allocated or read for it.

    Args:
        descriptor_bytes: a descriptor.
        metadata_bytes: a metadata section.
        sections: entries of a section table.
        frame_bytes: frame_length, or a whole bare item.
        decoded_bytes: the sum of a tensor's buffers after decompression.
        stream_bytes, frames: of one stream; None for no limit.

    Example:
        >>> Limits.untrusted(1 << 30).decoded_bytes
        1073741824
    """

    descriptor_bytes: int = 64 * KiB
    metadata_bytes: int = 1 * MiB
    sections: int = 65535
    frame_bytes: int = 64 * GiB
    decoded_bytes: int = 64 * GiB
    stream_bytes: int | None = None
    frames: int | None = None

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            optional = limit.name in ("stream_bytes", "frames") and value is None
            if not optional and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise TypeError(f"limit {limit.name} must be an integer of at least 0, not {value!r}")

    @classmethod
    def untrusted(cls, total_bytes: int) -> Limits:
        """Limits for a peer that is not trusted: nothing it sends makes more than about `total_bytes` be held."""
        return cls(
            descriptor_bytes=4 * KiB,
            metadata_bytes=min(64 * KiB, total_bytes),
            frame_bytes=total_bytes,
            decoded_bytes=total_bytes,
            stream_bytes=total_bytes,
        )

    def check(self, name: str, claimed: int, where: str, offset: int | None = None) -> None:
        """Raise LimitError where `claimed` is over the limit called `name`."""
        limit = getattr(self, name)
        if limit is not None and claimed > limit:
            raise LimitError(claimed=claimed, limit=limit, code=Code(name), where=where, offset=offset)


DEFAULT_LIMITS = Limits()


class Sending(TypedDict, total=False):
    """The keyword arguments that encoding functions and stream writers share."""

    pages: Literal["all", "live"]
    scrub: bool
    compression: Literal["zstd"] | None
    checksum: bool
    alignment: int | None
    chunk_bytes: int | None
    threads: int | None


class Encoding(Sending, total=False):
    """The keyword arguments of every encoding function."""

    framing: Literal["hrkv", "bare"]
    sequence: int
    last: bool
    stream_id: int


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """`Encoding`, checked; the defaults of the wire's own writer (section 4)."""

    framing: str = "hrkv"
    pages: str = "all"
    scrub: bool = False
    compression: str | None = None
    checksum: bool = True
    alignment: int | None = None
    chunk_bytes: int | None = None
    threads: int | None = None
    sequence: int = 0
    last: bool = True
    stream_id: int = 0

    def __post_init__(self) -> None:
        _choice("framing", self.framing, ("hrkv", "bare"))
        _choice("pages", self.pages, ("all", "live"))
        _choice("compression", self.compression, (None, "zstd"))
        for name, bits in (("sequence", 32), ("stream_id", 64)):
            _whole(name, getattr(self, name), 0, (1 << bits) - 1)
        for name in ("chunk_bytes", "threads"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1, 1 << 62)
        if self.alignment is not None:
            check_alignment("alignment", self.alignment, 1 << 31)


def check_alignment(name: str, value: int, most: int) -> None:
    """A power of two from 64 to `most`, or ValueError."""
    _whole(name, value, MIN_ALIGNMENT, most)
    if value & (value - 1):
        raise ValueError(f"{name} must be a power of two from {MIN_ALIGNMENT} to {most}, not {value}")


def _choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def _whole(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {most}, not {value}")


class Decoding(TypedDict, total=False):
    """The keyword arguments of every decoding function."""

    strict: bool
    verify: bool
    expect: Metadata | None
    limits: Limits
    copy: bool | None
    alloc: Alloc | None
    threads: int | None


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """`Decoding`, checked."""

    strict: bool = True
    verify: bool = True
    expect: Mapping[str, Any] | None = None
    limits: Limits = field(default=DEFAULT_LIMITS)
    copy: bool | None = None
    alloc: Alloc | None = None
    threads: int | None = None
    owned: bool = False
    """The bytes are the library's own, not the caller's: views of them may be written to."""

    def __post_init__(self) -> None:
        if not isinstance(self.limits, Limits):
            raise TypeError(f"limits must be a Limits, not {self.limits!r}")
        if self.expect is not None and not isinstance(self.expect, Mapping):
            raise TypeError(f"expect must be a mapping, not {self.expect!r}")
        if self.threads is not None:
            _whole("threads", self.threads, 1, 1 << 16)


DEFAULT_DECODING = DecodeOptions()
_UNVERIFIED = DecodeOptions(verify=False)
DEFAULT_ENCODING = EncodeOptions()


def encode_options(options: Encoding | Sending) -> EncodeOptions:
    """The checked form; no options cost nothing, and the same ones again next to nothing."""
    if not options:
        return DEFAULT_ENCODING
    try:
        return _known_encoding(**options)
    except TypeError:  # what cannot be hashed is no option: the error that names it
        return EncodeOptions(**options)


_known_encoding = lru_cache(maxsize=64, typed=True)(EncodeOptions)


def decode_options(options: Decoding) -> DecodeOptions:
    """The checked form; the common cases, no options and `verify=False` alone, cost nothing."""
    if not options:
        return DEFAULT_DECODING
    return _UNVERIFIED if len(options) == 1 and options.get("verify") is False else DecodeOptions(**options)


def check_expected(descriptor: TensorDescriptor, metadata: Metadata | None, expect: Metadata | None) -> None:
    """Stage 7: raise MismatchError with everything in which the tensor is not what `expect` says."""
    if not expect:
        return
    found = {
        "dtype": descriptor.dtype.name,
        "page_size": descriptor.layout.page_size,
        "num_heads": descriptor.shape[1],
        "head_dim": descriptor.shape[2],
        "kv_role": descriptor.layout.kv_role,
        "layer_index": descriptor.layout.layer_index,
        "num_seqs": descriptor.layout.num_seqs,
        "quantization": descriptor.quantization,
    }
    told = metadata or {}
    pairs = [(name, found[name] if name in found else told.get(name), wanted) for name, wanted in expect.items()]
    differences = [Difference(name, *_compared(name, *pair)) for name, *pair in pairs if _differs(name, *pair)]
    if differences:
        raise MismatchError(differences)


def _compared(name: str, found: Any, wanted: Any) -> tuple[Any, Any]:
    """Both sides in one notation: names for types, names for schemes where a name is asked for."""
    if name == "dtype":
        return found, Dtype.of(wanted).name
    if name == "quantization" and (wanted is None or isinstance(wanted, str)):
        return scheme_name(found), wanted
    return found, list(wanted) if isinstance(wanted, tuple) else wanted


def _differs(name: str, found: Any, wanted: Any) -> bool:
    left, right = _compared(name, found, wanted)
    return bool(left != right)
