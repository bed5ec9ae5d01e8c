"""Numbers, names and foreign text in words: units, plurals, and characters that must not reach a terminal."""

from __future__ import annotations

from hurray_wire.dtypes import by_tag
from hurray_wire.tags import PRIVATE_TYPES

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

LAYOUTS = {
    0x01: "row_major",
    0x02: "col_major",
    0x03: "strided",
    0x04: "tiled",
    0x05: "morton",
    0x06: "coo",
    0x07: "csr",
    0x08: "csc",
    0x09: "csf",
    0x0A: "block_paged",
    0x0B: "composite",
    0x40: "hilbert",
}
"""Hurray's layout tags by name: only block_paged is read here, the others are named."""


def layout_name(tag: int) -> str:
    """What a layout tag is called."""
    if tag in LAYOUTS:
        return LAYOUTS[tag]
    if 0xF0 <= tag <= 0xFE:
        return "a private layout"
    return "no layout" if tag in (0x00, 0xFF) else "an unknown layout"


def dtype_name(tag: int) -> str:
    """What a type tag is called."""
    if tag in PRIVATE_TYPES:
        return "private type"
    dtype = by_tag(tag)
    return dtype.name if dtype else "no element type"


def counted(number: int, noun: str, plural: str = "") -> str:
    """ "1 page", "2 pages"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def size(number: int) -> str:
    """ "640 bytes", "1.31 KiB (1,344 bytes)"."""
    exact = counted(number, "byte")
    return exact if number < 1024 else f"{scaled(number)} ({exact})"


def scaled(number: int) -> str:
    """ "1.31 KiB", in the greatest unit that leaves a whole part."""
    if number < 1024:
        return f"{number} B"
    power = min((number.bit_length() - 1) // 10, len(_UNITS))
    return f"{number / (1 << 10 * power):,.2f} {_UNITS[power - 1]}"


def ratio(raw: int, stored: int) -> str:
    """How many times smaller the stored bytes are."""
    return f"{raw / stored:.2f}" if stored else ""


def percent(part: int, whole: int) -> str:
    """ "60.0 %"."""
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"


def place(offset: int) -> str:
    """ "byte 448 (0x1c0)": no separators, so that it can be pasted."""
    return f"byte {offset} ({offset:#x})"


def safe(text: str) -> str:
    """Text with all that a terminal could obey, reorder or choke on escaped: controls, formats, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def clipped(text: str, most: int) -> str:
    """The first `most` characters, and how many more there are."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most:,} more characters)"
