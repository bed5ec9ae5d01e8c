"""Stage 1 (section 3): which form bytes are, from their first ones, and what they seem to be where they are neither."""

from __future__ import annotations

from enum import StrEnum

from hurray_wire.errors import Code, FrameError, TruncatedError, UnsupportedError
from hurray_wire.tags import BARE_MAGIC, CONTAINER_MAGIC, FRAME_MAGIC, VERSION_MAJOR

PREFIX_BYTES = 16
"""Bytes that settle the form: the longest magic, and what foreign files are told by."""

_TELLING = 8
"""Bytes that are enough to take the beginning of a foreign mark for the mark."""

_PLAIN_FRAME = FRAME_MAGIC + bytes([VERSION_MAJOR])
_MAGICS = (BARE_MAGIC, CONTAINER_MAGIC, FRAME_MAGIC)

_FOREIGN = (
    (b"version https:/", "a Git LFS pointer: fetch the file itself (git lfs pull)"),
    (b"PK\x03\x04", "a zip archive (torch.save and np.savez write them)"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"PK\x07\x08", "a split zip archive"),
    (b"\x1f\x8b", "a gzip file: decompress it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd file: decompress it first"),
    (b"\x93NUMPY", "a NumPy .npy file"),
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"\x7fELF", "an ELF binary"),
    (b"<!doctype html", "an HTML page: a download that went wrong?"),
    (b"<html", "an HTML page: a download that went wrong?"),
    *((b"\x80" + bytes([protocol]), "a pickle, which is never loaded here") for protocol in range(2, 6)),
)
_TEXT_PICKLES = (
    b"c__builtin__\n",
    b"cbuiltins\n",
    b"c_io\n",
    b"cio\n",
    b"c__main__\n",
    b"ccopy_reg\n",
    b"cposix\n",
    b"cos\n",
)


class Form(StrEnum):
    """The two wire forms."""

    BARE = "bare"
    HRKV = "hrkv"


def identify(prefix: bytes, offset: int = 0) -> Form:
    """The form of what begins with `prefix` (its first `PREFIX_BYTES`, or all there are) at byte `offset`.

    Raises:
        TruncatedError: nothing, or less than a magic.
        UnsupportedError: `container`, `foreign`, `version`.
        FrameError: `magic`.
    """
    if prefix.startswith(_PLAIN_FRAME):
        return Form.HRKV
    if prefix.startswith(FRAME_MAGIC):
        return _known_version(prefix, len(FRAME_MAGIC), offset, Form.HRKV)
    if prefix.startswith(CONTAINER_MAGIC):
        message = "is HRRYFILE, the reference's container file: read it with pyhurray and send its tensors one by one"
        raise UnsupportedError(message, code=Code.CONTAINER, where="magic", offset=offset)
    if any(magic.startswith(prefix) for magic in _MAGICS):
        needed = min(len(magic) for magic in _MAGICS if magic.startswith(prefix) and len(magic) > len(prefix))
        message = f"too short for a hurray_wire blob: {len(prefix)} bytes ({prefix.hex(' ') or 'none'})"
        raise TruncatedError(message, needed=needed, available=len(prefix), where="magic", offset=offset + len(prefix))
    if prefix.startswith(BARE_MAGIC):
        return _known_version(prefix, len(BARE_MAGIC), offset, Form.BARE)
    seems = foreign(prefix)
    shown = prefix[:8].hex(" ")
    if seems:
        message = f"no hurray_wire blob but {seems}; first bytes {shown}"
        raise UnsupportedError(message, code=Code.FOREIGN, where="magic", offset=offset)
    message = f"no hurray_wire blob: found {shown}, must be {FRAME_MAGIC.hex(' ')} or {BARE_MAGIC.hex(' ')}"
    raise FrameError(message, code=Code.MAGIC, where="magic", offset=offset)


def _known_version(prefix: bytes, at: int, offset: int, form: Form) -> Form:
    if len(prefix) > at and prefix[at] != VERSION_MAJOR:
        message = f"version {prefix[at]} found, this reader knows {VERSION_MAJOR}"
        raise UnsupportedError(message, code=Code.VERSION, where="version_major", offset=offset + at)
    return form


def foreign(prefix: bytes) -> str:
    """What bytes that are no blob seem to be, in words, or ""."""
    lowered = prefix.lower()
    for start, told in _FOREIGN:
        cut = len(prefix) >= _TELLING and start.startswith(prefix)  # a stream's first few bytes
        if prefix.startswith(start) or cut or (start[:1] == b"<" and lowered.lstrip().startswith(start)):
            return told
    if prefix.startswith(_TEXT_PICKLES):
        return "a pickle, which is never loaded here"
    if prefix[8:9] == b"{" and int.from_bytes(prefix[:8], "little") < 100 << 20:
        return "a safetensors file"
    return ""
