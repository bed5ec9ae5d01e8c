"""`inspect`: what a blob says of itself, from its header alone; no payload is touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hurray_wire import bare, frame_reader
from hurray_wire.arrays import Bytes, as_bytes
from hurray_wire.descriptor import TensorDescriptor
from hurray_wire.forms import PREFIX_BYTES, Form, identify
from hurray_wire.options import DEFAULT_DECODING, DecodeOptions
from hurray_wire.sections import BUFFERS, FIXED_BYTES, header_bytes, small_end
from hurray_wire.structs.descriptor import descriptor_spans
from hurray_wire.structs.frame import CHECKSUM_PLAN, PROLOGUE_PLAN, SECTION_PLAN
from hurray_wire.structs.fused import Span
from hurray_wire.tags import SectionKind

__all__ = ["Inspection", "Section", "Span", "frame_spans", "inspect"]


class Section(NamedTuple):
    """One entry of a section table, fields as on the wire; `name` is what its kind is called."""

    name: str
    kind: int
    codec: int
    filter: int
    element_width: int
    flags: int
    raw_offset: int
    raw_length: int
    offset: int
    stored_length: int
    checksum: int


class Inspection:
    """What a blob's header says.

    `.framing` ("hrkv" | "bare"), `.version` (major, minor), `.total_bytes` of the whole item, `.header_bytes` up to the
    first buffer, `.descriptor` (None for a closing frame), `.sections`, `.metadata`; a frame's `.sequence`, `.last`,
    `.stream_id` and `.header_checksum` (None in the bare form); `.spans`: every field in order, with absolute offset,
    path and meaning.

    Example:
        >>> import numpy as np
        >>> import hurray_wire as hw
        >>> t = hw.BlockPagedTensor(np.ones((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> found = hw.inspect(hw.encode(t))
        >>> found.total_bytes, [section.name for section in found.sections]
        (640, ['descriptor', 'seq_lens', 'page_pool', 'block_table', 'seq_ptr'])
    """

    __slots__ = (
        "_header",
        "_offset",
        "_sections",
        "_spans",
        "descriptor",
        "framing",
        "header_bytes",
        "last",
        "metadata",
        "sequence",
        "stream_id",
        "total_bytes",
        "version",
    )

    def __init__(
        self,
        framing: str,
        version: tuple[int, int],
        total_bytes: int,
        header_bytes: int,
        descriptor: TensorDescriptor | None,
        metadata: dict[str, Any] | None,
        sequence: int | None,
        last: bool | None,
        stream_id: int | None,
        header: tuple[bytes, bytes, int, int],
    ) -> None:
        self.framing = framing
        self.version = version
        self.total_bytes = total_bytes
        self.header_bytes = header_bytes
        self.descriptor = descriptor
        self.metadata = metadata
        self.sequence = sequence
        self.last = last
        self.stream_id = stream_id
        self._header = header
        self._sections: tuple[Section, ...] | None = None
        self._spans: list[Span] | None = None

    def __repr__(self) -> str:
        return f"<Inspection {self.framing} {self.total_bytes} bytes: {self.descriptor!r}>"

    @property
    def header_checksum(self) -> int | None:
        """A frame's own checksum of its prologue and section table, which two different frames share only by chance.

        None in the bare form. Pools that were not hashed (`checksum=False`) are not in it.
        """
        if self.framing != Form.HRKV:
            return None
        header = self._header[0]
        checksum: int = CHECKSUM_PLAN.unpack(header, len(header) - CHECKSUM_PLAN.size).header_checksum
        return checksum

    @property
    def sections(self) -> tuple[Section, ...]:
        """The section table; empty in the bare form."""
        if self._sections is None:
            head = self._header[0]
            self._sections = tuple(parse_sections(head)) if self.framing == Form.HRKV else ()
        return self._sections

    @property
    def spans(self) -> list[Span]:
        """Every field of header and descriptor, in order."""
        if self._spans is None:
            head, descriptor, base, at = self._header
            frame = frame_spans(head, base) if self.framing == Form.HRKV else []
            self._spans = frame + descriptor_spans(descriptor, at)
        return self._spans


def section_name(kind: int) -> str:
    """What a section kind is called."""
    if kind in set(SectionKind):
        return SectionKind(kind).name.lower()
    return f"buffer {kind - BUFFERS.start}" if kind in BUFFERS else f"kind {kind:#04x}"


def parse_sections(header: bytes) -> Sequence[Section]:
    """The entries of a frame's header, as far as they are there whole."""
    entries = header[PROLOGUE_PLAN.size : PROLOGUE_PLAN.size + SECTION_PLAN.size * _section_count(header)]
    whole = len(entries) // SECTION_PLAN.size * SECTION_PLAN.size
    sections = []
    for values in SECTION_PLAN.packed.iter_unpack(entries[:whole]):
        entry = SECTION_PLAN.make(values)
        sections.append(
            Section(
                section_name(entry.kind),
                entry.kind,
                entry.codec,
                entry.filter,
                entry.element_width,
                entry.flags,
                entry.raw_offset,
                entry.raw_length,
                entry.offset,
                entry.stored_length,
                entry.checksum,
            )
        )
    return sections


def _section_count(header: bytes) -> int:
    count: int = PROLOGUE_PLAN.unpack(header).section_count if len(header) >= PROLOGUE_PLAN.size else 0
    return count


def frame_spans(header: bytes, base: int) -> list[Span]:
    """Every field of a frame's own tables, as far as the bytes go; `base` is where the frame begins."""
    spans = list(PROLOGUE_PLAN.spans(header, 0, base))
    count = _section_count(header)
    for index in range(count):
        offset = PROLOGUE_PLAN.size + index * SECTION_PLAN.size
        if offset >= len(header):
            return spans
        spans += SECTION_PLAN.spans(header, offset, base, prefix=f"sections[{index}].")
    spans += CHECKSUM_PLAN.spans(header, FIXED_BYTES - CHECKSUM_PLAN.size + count * SECTION_PLAN.size, base)
    return spans


def inspect(data: Any, offset: int = 0) -> Inspection:
    """Read the header of the item at `offset`; works on a prefix that holds it (all that `encode_header` gives).

    A closing frame is shown, with no descriptor. Sections 1, 3 and 4.

    Raises:
        TruncatedError: the header is not all there.
        FrameError, ChecksumError, InvalidDescriptorError, UnsupportedError, LimitError: as in `decode`, before the
            payload.

    Example:
        >>> import numpy as np
        >>> import hurray_wire as hw
        >>> t = hw.BlockPagedTensor(np.zeros((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> found = inspect(hw.encode_header(t))
        >>> found.framing, found.descriptor.layout.page_size, found.spans[0].path
        ('hrkv', 4, 'magic')
    """
    raw = as_bytes(data)
    if not 0 <= offset <= raw.size:
        raise ValueError(f"offset {offset} is outside the {raw.size} bytes")
    form = identify(raw[offset : offset + PREFIX_BYTES].tobytes(), offset)
    if form is Form.BARE:
        return inspect_bare(raw, offset, DEFAULT_DECODING)
    return inspect_frame(raw, offset, DEFAULT_DECODING)


def inspect_bare(raw: Bytes, offset: int, options: DecodeOptions, *, base: int | None = None) -> Inspection:
    """The header of a bare item, its descriptor; `base` where it begins in its source, if not at `offset` of `raw`."""
    base = offset if base is None else base
    descriptor, length = bare.read_bare_descriptor(raw, offset, options)
    total = bare.check_bare_sizes([handle.byte_size for handle in descriptor.buffers], length, offset, options)
    data = raw[offset : offset + length].tobytes()
    return Inspection(
        "bare", (data[4], data[5]), total, length, descriptor, None, None, None, None, (b"", data, base, base)
    )


def inspect_frame(raw: Bytes, offset: int, options: DecodeOptions) -> Inspection:
    """The header of a frame, its small sections and its section table."""
    head = frame_reader.read_frame_head(raw, offset, options.limits, whole=False)
    if head.closing:
        return inspection_of(head, None, b"", raw[offset:])
    available, needed = raw.size - offset, small_end(head.table)
    if available < needed:
        raise frame_reader.truncated(needed, available, offset, "sections")
    found, small = frame_reader.describe(head, frame_reader.fetch_from(raw, offset), options, tables=False)
    return inspection_of(head, found, small.descriptor, raw[offset:])


def inspection_of(
    head: frame_reader.Head, found: frame_reader.Described | None, descriptor: bytes, header: Bytes
) -> Inspection:
    """The inspection of a frame whose bytes `header` begins with."""
    prologue, base = head.prologue, head.base
    at = base if found is None else base + head.table.first(SectionKind.DESCRIPTOR).offset
    return Inspection(
        "hrkv",
        (prologue.version_major, prologue.version_minor),
        prologue.frame_length,
        header_bytes(head.table, prologue.frame_length),
        None if found is None else found.descriptor,
        None if found is None else found.metadata,
        prologue.sequence,
        head.last,
        prologue.stream_id,
        (header[: prologue.header_length].tobytes(), descriptor, base, at),
    )
