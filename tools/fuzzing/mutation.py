"""Changes that a fuzzer makes: to a field, a table, a section, a stream, or to bytes that mean nothing.

Every change is drawn from the `random.Random` that is handed in, so that a seed repeats it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import zstandard
from frames import Section
from fuzzing import wire
from fuzzing.wire import Bare, Frame

from hurray_wire.dtypes import Dtype, packed_bytes
from hurray_wire.structs.descriptor import FRONT_PLAN, HANDLE_PLAN

NUMBERS = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 48, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 65535, 65536),
    *(2**21, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 64, 2**64 - 1),
)
WORTH_JSON: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**31, 2**63, 2**64, -(2**70), 1e308, "", "a", "\0", "\ud800", "é\U0001f600"),
    *(
        [],
        {},
        [[]],
        {"": {}},
        [0, 1, 2],
        [1, 0, 2],
        [0, 0, 0],
        [None],
        ["a", "b"],
        [0, 2],
        [True, 2, 4],
        "kv",
        "latent",
    ),
)
JSON_NAMES = (
    *("model", "revision", "tokenizer", "rope", "seq_ids", "first_tokens", "heads", "key_dim", "content", "x.y", ""),
    *("a", "my.own", "dtype", "page_size", "num_seqs", "layer", "hurray.x", "\0", "ü.€"),
)
JSON_BYTES = (
    *(
        b"",
        b"{",
        b"{}",
        b"{} ",
        b"\xef\xbb\xbf{}",
        b"[]",
        b"null",
        b"NaN",
        b'{"a":NaN}',
        b'{"a.b":Infinity}',
        b"{'a':1}",
    ),
    *(b'{"model":"a","model":"b"}', b'{"x.y":1e999}', b'{"x.y":-1e999}', b'{"x.y":"\\ud800"}', b'{"x.y":"\xff"}'),
    *(b'{"x.y":' + b"[" * 2000 + b"]" * 2000 + b"}", b'{"x.y":' + b'{"a":' * 700 + b"1" + b"}" * 701),
    *(b'{"x.y":' + b"1" * 5000 + b"}", b'{"x.y":0.' + b"1" * 5000 + b"}", b'{"x.y":1e' + b"9" * 400 + b"}", b"\0" * 8),
    *(b'{"x.y":[' + b"1," * 2000 + b"1]}", b'{"\\u0000":1}', b'{"x.y":"\\u0000"}', b"{" * 3000, b'"' * 100),
)
MOST_POOL = 4096


def number(rng: Random, bits: int, near: int = 0) -> int:
    """A number worth trying in a field of so many bits that has held `near`."""
    drawn = rng.randrange(8)
    if drawn < 3:
        value = rng.choice(NUMBERS)
    elif drawn < 6:
        value = near + rng.choice((-64, -8, -2, -1, 1, 2, 8, 64))
    elif drawn == 6:
        value = rng.choice((near * 2, near // 2, near ^ 1 << rng.randrange(bits), ~near, near * 3))
    else:
        value = rng.getrandbits(bits)
    return value % (1 << bits)


def _patched(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


# Bytes that mean nothing.


def some_bytes(rng: Random, data: bytes) -> bytes:
    """Bytes changed, cut out, doubled or put in."""
    if not data:
        return rng.randbytes(rng.choice((1, 4, 16)))
    at = rng.randrange(len(data))
    drawn = rng.randrange(7)
    if drawn == 0:
        return _patched(data, at, bytes([data[at] ^ 1 << rng.randrange(8)]))
    if drawn == 1:
        return _patched(data, at, bytes([rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))]))
    if drawn in (2, 3):
        width = rng.choice((1, 2, 4, 8))
        at = at // width * width if rng.random() < 0.7 else at
        near = int.from_bytes(data[at : at + width], "little")
        return _patched(data, at, number(rng, 8 * width, near).to_bytes(width, "little"))[: len(data)]
    size = min(rng.choice((1, 1, 2, 4, 8, 48)), len(data) - at)
    if drawn == 4:
        return data[:at] + data[at + size :]
    if drawn == 5:
        return data[:at] + data[at : at + size] * rng.choice((2, 3)) + data[at + size :]
    return data[:at] + rng.randbytes(size) + data[at:]


def shortened(rng: Random, data: bytes) -> bytes:
    """A prefix."""
    return data[: rng.randrange(len(data) + 1)]


def words(rng: Random, data: bytes) -> bytes:
    """An index table with a few entries changed, or grown, or cut."""
    width = rng.choice((4, 4, 8))
    count = len(data) // width
    if not count or rng.random() < 0.1:
        return data + number(rng, 8 * width, 0).to_bytes(width, "little")
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(count) * width
        near = int.from_bytes(data[at : at + width], "little")
        data = _patched(data, at, number(rng, 8 * width, near).to_bytes(width, "little"))
    return data[:-width] if rng.random() < 0.05 else data


def json_text(rng: Random, data: bytes) -> bytes:
    """Metadata: lawful, nearly lawful, or none."""
    drawn = rng.randrange(4)
    if drawn == 0:
        return rng.choice(JSON_BYTES)
    if drawn == 1:
        return some_bytes(rng, data)
    names = rng.sample(JSON_NAMES, rng.randrange(4))
    value = {name: rng.choice(WORTH_JSON) for name in names}
    return json.dumps(value, ensure_ascii=rng.random() < 0.8).encode("utf-8", "surrogatepass")


# Descriptors.


def descriptor(rng: Random, data: bytes) -> bytes:
    """A descriptor with some fields changed, its own length made true again (mostly)."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = _field(rng, data) if rng.random() < 0.85 else some_bytes(rng, data)
    if rng.random() < 0.15:
        data = _optional(rng, data)
    if rng.random() < 0.9 and len(data) >= 10:
        data = _patched(data, 6, struct.pack("<I", len(data)))
    return data


def _field(rng: Random, data: bytes) -> bytes:
    if len(data) < wire.HANDLES:
        return some_bytes(rng, data)
    if rng.random() < 0.6:
        _, (start, stop) = rng.choice(_FRONT)
    else:  # a handle's, or one behind them
        _, (start, stop) = rng.choice(_HANDLE)
        place = wire.HANDLES + rng.randrange(max(1, len(data) - wire.HANDLES))
        place -= (place - wire.HANDLES) % wire.HANDLE_BYTES if rng.random() < 0.6 else 0
        start, stop = place + start, min(place + stop, len(data))
    if stop <= start:
        return some_bytes(rng, data)
    near = int.from_bytes(data[start:stop], "little")
    return _patched(data, start, number(rng, 8 * (stop - start), near).to_bytes(stop - start, "little"))


_FRONT, _HANDLE = (list(plan.places.items()) for plan in (FRONT_PLAN, HANDLE_PLAN))


def _optional(rng: Random, data: bytes) -> bytes:
    """Another flag set, and bytes behind that may be its table."""
    if len(data) < 14:
        return data
    flag, size = rng.choice(((1, 20), (1, 24), (1, 16), (2, 48), (4, 20), (8, 72), (16, 16)))
    flags = int.from_bytes(data[10:14], "little") | flag
    table = rng.randbytes(size) if rng.random() < 0.5 else bytes(size)
    if flag == 1:
        scheme = rng.choice((1, 2, 3, 4, 5))
        table = struct.pack("<IBBH", size, scheme, 1, rng.randrange(2)) + table[4:]
    return _patched(data, 10, struct.pack("<I", flags)) + table


def fitted(rng: Random, data: bytes, buffers: list[bytes]) -> tuple[bytes, list[bytes]]:
    """A descriptor's sizes and its buffers made what its shape asks for, where that is small: rules behind are met."""
    if len(data) < wire.HANDLES or data[84] < 3 or len(wire.sizes(data)) < 3 or len(buffers) < 3:
        return data, buffers
    heads, dim = struct.unpack_from("<2Q", data, 28)
    page_size, pages, _, seqs = struct.unpack_from("<IQII", data, 52)
    try:
        bits = Dtype.of(data[14]).bit_width
    except ValueError:
        bits = 8
    elements = pages * page_size * heads * dim
    width = 8 if data[77] == 1 else 4
    buffers = list(buffers)
    if elements * bits <= 8 * MOST_POOL:
        size = packed_bytes(elements, bits)
        buffers[0] = (buffers[0] + bytes(size))[:size]
    if seqs < 64:
        buffers[2] = buffers[2] + rng.choice((b"\0", buffers[2][-1:] or b"\0")) * (width * (seqs + 1))
        buffers[2] = buffers[2][: width * (seqs + 1)]
    buffers[1] = buffers[1][: len(buffers[1]) // width * width]
    return with_sizes(data, buffers), buffers


def with_sizes(data: bytes, buffers: Sequence[bytes]) -> bytes:
    """The descriptor with its handles' sizes those of the buffers."""
    for i, buffer in enumerate(buffers):
        at = wire.HANDLES + wire.HANDLE_BYTES * i
        if at + 8 <= len(data):
            data = _patched(data, at, struct.pack("<Q", len(buffer)))
    return data


# Sections.

FIELDS: dict[str, int] = {
    **{"kind": 8, "codec": 8, "filter": 8, "element_width": 8, "flags": 16, "reserved": 16},
    **{"raw_offset": 64, "raw_length": 64, "offset": 64, "stored_length": 64, "checksum": 64},
}
KINDS = (0, 1, 2, 3, 4, 15, 16, 17, 18, 19, 20, 31, 32, 48, 127, 128, 254, 255)


def entry_field(rng: Random, frame: Frame) -> None:
    """A field of one entry is another."""
    index = rng.randrange(len(frame.sections))
    section = frame.sections[index]
    name = rng.choice(tuple(FIELDS))
    near = getattr(section, name)
    value = number(rng, FIELDS[name], len(section.data) if near is None else near)
    if name in ("codec", "filter") and rng.random() < 0.7:
        value = rng.randrange(3)
    if name == "element_width" and rng.random() < 0.7:
        value = rng.choice((0, 2, 4, 8, 16))
    if name == "kind" and rng.random() < 0.7:
        value = rng.choice(KINDS)
    if name == "flags" and rng.random() < 0.7:
        value = rng.randrange(4)
    change: dict[str, Any] = {name: value}
    frame.sections[index] = replace(section, **change)


def section_content(rng: Random, frame: Frame) -> None:
    """What one section holds is another, by what it means."""
    index = rng.randrange(len(frame.sections))
    section = frame.sections[index]
    change = CONTENT.get(section.kind, some_bytes)
    raw_length = section.raw_length if section.codec else None
    frame.sections[index] = replace(section, data=change(rng, section.data), raw_length=raw_length)


CONTENT: dict[int, Callable[[Random, bytes], bytes]] = {
    **{wire.DESCRIPTOR: descriptor, wire.SEQ_LENS: words, wire.METADATA: json_text},
    **{wire.BLOCK_TABLE: words, wire.SEQ_PTR: words},
}


def section_order(rng: Random, frame: Frame) -> None:
    """A section less, twice, elsewhere, or one that nobody knows."""
    index = rng.randrange(len(frame.sections))
    drawn = rng.randrange(5)
    if drawn == 0:
        del frame.sections[index]
    elif drawn == 1:
        frame.sections.insert(index, frame.sections[index])
    elif drawn == 2:
        other = rng.randrange(len(frame.sections))
        frame.sections[index], frame.sections[other] = frame.sections[other], frame.sections[index]
    else:
        kind = rng.choice((2, 3, 4, 0x30, 0x7F, 0x80))
        data = json_text(rng, b"") if kind == 3 else rng.randbytes(rng.choice((1, 8, 12)))
        frame.sections.append(Section(kind, data or b"{}", flags=1 if kind < 4 else rng.choice((3, 3, 1, 2))))
        if drawn == 4:
            frame.sections.sort(key=lambda s: (s.kind, s.raw_offset))


def split(rng: Random, frame: Frame) -> None:
    """A raw section in two chunks."""
    index = rng.randrange(len(frame.sections))
    section = frame.sections[index]
    if section.codec or len(section.data) < 2:
        return
    cut = rng.randrange(1, len(section.data))
    step = rng.choice((1, 2, 4, 8, 16, 64, 128))
    cut = cut // step * step or cut
    first = replace(section, data=section.data[:cut], raw_length=None)
    second = replace(section, data=section.data[cut:], raw_length=None, raw_offset=section.raw_offset + cut)
    frame.sections[index : index + 1] = [first, second]


def compressed(rng: Random, frame: Frame) -> None:
    """A raw section as zstd, lawful or nearly; the bytes of one that is zstd changed."""
    rows = [i for i, s in enumerate(frame.sections) if s.kind >= wire.PAGE_POOL] or [0]
    index = rng.choice(rows)
    section = frame.sections[index]
    if section.codec:
        frame.sections[index] = replace(section, data=_odd_zstd(rng, section.data))
        return
    raw = section.data
    width = rng.choice((0, 0, 2, 4, 8, 16))
    plain = raw
    if width and len(raw) % width == 0:
        plain = b"".join(raw[j::width] for j in range(width))
    stored = zstandard.ZstdCompressor(
        level=rng.choice((1, 3, 19)),
        write_content_size=rng.random() < 0.9,
        write_checksum=rng.random() < 0.1,
    ).compress(plain)
    if rng.random() < 0.3:
        stored = _odd_zstd(rng, stored)
    frame.sections[index] = replace(
        section, data=stored, raw_length=len(raw), codec=1, filter=int(width > 0), element_width=width
    )


def _odd_zstd(rng: Random, data: bytes) -> bytes:
    drawn = rng.randrange(6)
    if drawn == 0:
        return data + data
    if drawn == 1:
        size = rng.choice((0, 1, 8))
        return struct.pack("<II", 0x184D2A50 + rng.randrange(16), size) + bytes(size) + data
    if drawn == 2:
        return data + struct.pack("<II", 0x184D2A50, 0)
    if drawn == 3 and len(data) > 12:
        return _patched(data, rng.randrange(4, 12), bytes([rng.randrange(256)]))
    return some_bytes(rng, data)


def prologue_field(rng: Random, frame: Frame) -> None:
    """A field of the prologue is another."""
    name = rng.choice(
        ("version", "flags", "sequence", "stream_id", "reserved", "header_length", "section_count", "frame_length")
    )
    told: dict[str, Callable[[], Any]] = {
        "version": lambda: (rng.choice((0, 1, 1, 1, 2, 255)), rng.choice((0, 1, 255))),
        "flags": lambda: rng.choice((0, 1, 1, 2, 0xFFFF)),
        "sequence": lambda: number(rng, 32, frame.prologue.get("sequence", 0)),
        "stream_id": lambda: number(rng, 64, frame.prologue.get("stream_id", 0)),
        "reserved": lambda: number(rng, 16),
        "header_length": lambda: number(rng, 32, 48 + 48 * len(frame.sections)),
        "section_count": lambda: number(rng, 16, len(frame.sections)),
        "frame_length": lambda: number(rng, 64, sum(len(s.data) + 64 for s in frame.sections)) // 64 * 64,
    }
    if rng.random() < 0.2:
        frame.prologue["alignment"] = rng.choice((64, 128, 1024))
    else:
        frame.prologue[name] = told[name]()


def refitted(rng: Random, frame: Frame) -> None:
    """Raw buffers and handles made to fit the descriptor."""
    item = wire.as_bare(frame)
    if any(s.codec for s in frame.sections):
        return
    data, buffers = fitted(rng, item.descriptor, item.buffers)
    small = [s for s in frame.sections if s.kind < wire.PAGE_POOL and s.kind != wire.DESCRIPTOR]
    other = [s for s in frame.sections if s.kind > wire.PAGE_POOL + 15]
    full = [Section(wire.PAGE_POOL + i, b) for i, b in enumerate(buffers[:16]) if b]
    frame.sections = [Section(wire.DESCRIPTOR, data), *small, *full, *other]


CHANGES: tuple[tuple[Callable[[Random, Frame], None], int], ...] = (
    *((section_content, 10), (entry_field, 5), (prologue_field, 3)),
    *((section_order, 3), (split, 2), (compressed, 4), (refitted, 1)),
)


# Items and streams.


def one_frame(rng: Random, data: bytes) -> bytes:
    """A frame changed once or a few times, laid out and sealed again."""
    frame = wire.taken_apart(data)
    if frame is None:
        return some_bytes(rng, data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if frame.sections:
            change = rng.choices([c for c, _ in CHANGES], [w for _, w in CHANGES])[0]
            change(rng, frame)
            if change is section_content and rng.random() < 0.5:
                refitted(rng, frame)
        else:
            prologue_field(rng, frame)
    try:
        built = frame.built()
    except struct.error:  # changes upon changes: a field that its bits do not hold
        return some_bytes(rng, data)
    if rng.random() < 0.05:
        built = some_bytes(rng, built)
    return built


def one_bare(rng: Random, data: bytes) -> bytes:
    """A bare item with descriptor, tables or payload changed."""
    item = wire.bare_apart(data)
    if item is None:
        return some_bytes(rng, data)
    if rng.random() < 0.7 or len(item.buffers) < 3:
        item.descriptor = descriptor(rng, item.descriptor)
    else:
        index = rng.choice((0, 1, 2, 2, *range(3, len(item.buffers))))
        change = words if index in (1, 2) else some_bytes
        item.buffers[index] = change(rng, item.buffers[index])
    if rng.random() < 0.6:
        item.descriptor, item.buffers = fitted(rng, item.descriptor, item.buffers)
    return item.built()


def another_form(rng: Random, data: bytes) -> bytes:
    """The same tensor in the other form."""
    item: Bare | None
    frame = wire.taken_apart(data)
    if frame is not None:
        return wire.as_bare(frame).built()
    item = wire.bare_apart(data)
    if item is None:
        return data
    lens = b"" if rng.random() < 0.3 else (item.buffers[2][4:] if len(item.buffers) > 2 else b"")
    return wire.as_frame(item, lens).built()


def stream(rng: Random, parts: list[bytes], other: bytes) -> list[bytes]:
    """Items of a stream left out, repeated, swapped, closed, numbered, or followed by others."""
    index = rng.randrange(len(parts))
    drawn = rng.randrange(6)
    if drawn == 0:
        return [*parts, *wire.items(other)]
    if drawn == 1:
        return parts[:index] + parts[index + 1 :] or parts
    if drawn == 2:
        return [*parts[:index], parts[index], *parts[index:]]
    if drawn == 3:
        return [*parts, Frame([], {"sequence": len(parts), "flags": 1}).built()]
    return [_numbered(part, i, last=i == len(parts) - 1) for i, part in enumerate(parts)]


def _numbered(data: bytes, sequence: int, *, last: bool) -> bytes:
    frame = wire.taken_apart(data)
    if frame is None:
        return data
    frame.prologue |= {"sequence": sequence, "flags": int(last), "stream_id": 7}
    return frame.built()


def mutated(rng: Random, data: bytes, other: bytes, mutate: Callable[[bytes], bytes] | None = None) -> bytes:
    """One input from another: `other` is a second one to cross it with, `mutate` the fuzzing engine's own change."""
    if rng.random() < 0.02:
        return shortened(rng, data)
    if mutate is not None and rng.random() < 0.1:
        return mutate(data)
    parts = list(wire.items(data)) or [b""]
    if rng.random() < 0.08:
        parts = stream(rng, parts, other)
    index = rng.randrange(len(parts))
    item = parts[index]
    if rng.random() < 0.06:
        item = next(wire.items(other), b"")
    if rng.random() < 0.08:
        item = another_form(rng, item)
    if item.startswith(wire.FRAME_MAGIC):
        item = one_frame(rng, item)
    elif item.startswith(wire.BARE_MAGIC):
        item = one_bare(rng, item)
    else:
        item = some_bytes(rng, item)
    return b"".join((*parts[:index], item, *parts[index + 1 :]))
