"""What this package says of a blob, as the JSON object that a decoding command prints (`docs/conformance.md`).

    python -m hurray_wire.testing.reporting FILE [OPTIONS]     prints one object; exit 0 accepted, 1 refused
    python -m hurray_wire.testing.reporting                    answers a request a line: {"file": ..., "options": ...}

The fields are those of an independent decoder, so that both can be compared word by word.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import hurray_wire as hw
from hurray_wire.forms import Form
from hurray_wire.schemes import scheme_name

__all__ = ["report"]


def report(data: bytes, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """The verdict on one item, or with the option "stream" on a whole stream; nothing but bad options raises.

    Args:
        options: "stream", "strict", "limits", "expect", as in the manifest.

    Example:
        >>> report(b"\\x89HRKV\\r\\n\\x1a\\x02")["code"]
        'version'
    """
    asked = dict(options or {})
    stream = asked.pop("stream", False)
    if "limits" in asked:
        asked["limits"] = hw.Limits(**asked["limits"])
    try:
        tensors = list(_stream(data, asked)) if stream else [hw.decode(data, **asked)]
    except hw.HurrayWireError as error:
        told = {"error_class": type(error).__name__, "code": str(error.code), "where": error.where}
        return {"verdict": "reject", **told, "offset": plain(error.offset)}
    items = [_values(tensor, found) for tensor, found in zip(tensors, _located(data), strict=True)]
    return {"verdict": "accept", "items": items} if stream else {"verdict": "accept", **items[0]}


def _stream(data: bytes, asked: dict[str, Any]) -> Iterator[hw.BlockPagedTensor]:
    decoder = hw.FrameDecoder(**asked, streams="all")
    decoder.feed(data)
    decoder.close()
    while (tensor := decoder.next()) is not hw.NEED_DATA:
        assert isinstance(tensor, hw.BlockPagedTensor)
        yield tensor


def _located(data: bytes) -> Iterator[dict[str, Any]]:
    """Of each item that holds a tensor: its form, its descriptor's bytes, its place in its stream."""
    at = 0
    while at < len(data):
        found, total = _inspected(data, at)
        if found["descriptor"]:
            yield {**found, "descriptor": hashlib.sha256(found["descriptor"]).hexdigest()}
        at += total


def _inspected(data: bytes, at: int) -> tuple[dict[str, Any], int]:
    """As `inspect`, but of what only a lenient reader takes too: lengths and places are sound here."""
    prologue = struct.unpack_from("<8sBBHIIHHQQ", data.ljust(at + 40, b"\0"), at)
    if prologue[0] != b"\x89HRKV\r\n\x1a":
        length = int.from_bytes(data[at + 6 : at + 10], "little")
        sizes = (int.from_bytes(data[at + 85 + 16 * i : at + 93 + 16 * i], "little") for i in range(data[at + 84]))
        place: dict[str, Any] = {"sequence": None, "last": None, "stream_id": None}
        return {"form": str(Form.BARE), "descriptor": data[at : at + length], **place}, length + sum(sizes)
    offset, stored = struct.unpack_from("<QQ", data, at + 64) if prologue[6] else (0, 0)
    place = {"sequence": prologue[4], "last": bool(prologue[3] & 1), "stream_id": plain(prologue[9])}
    descriptor = data[at + offset : at + offset + stored]
    return {"form": str(Form.HRKV), "descriptor": descriptor, **place}, prologue[8]


def _values(tensor: hw.BlockPagedTensor, found: dict[str, Any]) -> dict[str, Any]:
    """Every field of an item, as JSON shows them."""
    d = tensor.descriptor
    lens = None if tensor.seq_lens is None else tensor.seq_lens.tolist()
    extension = d.extension_type
    kinds = ("InvalidDescriptorError",)
    told = {
        "dtype": tensor.dtype.name,
        "type_tag": tensor.dtype.tag,
        "shape": list(tensor.shape),
        "page_size": tensor.page_size,
        "num_pages": tensor.num_pages,
        "num_seqs": tensor.num_seqs,
        "kv_role": tensor.kv_role,
        "layer_index": tensor.layer_index,
        "index_type": tensor.layout.block_table_index_type,
        "handles": [list(handle.record()) for handle in d.buffers],
        "quantization": _scheme(tensor.quantization),
        "statistics": _statistics(tensor.statistics),
        "extension_type": None if extension is None else _extension(extension),
        "composite": d.composite,
        "buffers": [hashlib.sha256(data).hexdigest() for data in buffers_of(tensor)],
        "seq_ptr": tensor.seq_ptr.tolist(),
        "block_table": tensor.block_table.tolist(),
        "seq_lens": lens,
        "violations": [[*kinds, str(v.code), v.where, v.offset] for v in tensor.violations],
        "metadata": tensor.metadata,
    }
    values = {"form": found["form"], **told, **found}
    return {key: plain(value) for key, value in values.items()}


def buffers_of(tensor: hw.BlockPagedTensor) -> list[bytes]:
    """The bytes of every buffer, as on the wire."""
    pool = tensor.page_pool
    pool = pool.astype(pool.dtype.newbyteorder("<"), copy=False)
    scales = [a.tobytes() for a in (tensor.scales, tensor.zero_points) if a is not None]
    if len(scales) > len(tensor.descriptor.buffers) - 3:  # scales and zero points of one buffer
        scales = [b"".join(scales)]
    return [pool.tobytes(), tensor.block_table.tobytes(), tensor.seq_ptr.tobytes(), *scales]


def _scheme(scheme: Any) -> dict[str, Any] | None:
    if scheme is None:
        return None
    told = {field.name: getattr(scheme, field.name) for field in fields(scheme)}
    if "scale_type" in told:
        told["scale_type"] = told["scale_type"].name
    return {"scheme": scheme_name(scheme), **told}


def _statistics(statistics: hw.Statistics | None) -> dict[str, Any] | None:
    if statistics is None:
        return None
    told = {field.name: getattr(statistics, field.name) for field in fields(statistics)}
    return {name: value for name, value in told.items() if value is not None}


def _extension(extension: hw.ExtensionType) -> dict[str, Any]:
    told = {field.name: getattr(extension, field.name) for field in fields(extension)}
    truths = ("is_float", "is_signed", "has_nan", "has_inf")
    return {**told, **{name: bool(told[name]) for name in truths}, "packing": extension.packing}


def plain(value: Any) -> Any:
    """A value as the manifest shows it: wide integers as strings, floats as the hex digits of their 64 bits."""
    if isinstance(value, float):
        return struct.pack(">d", value).hex()
    if isinstance(value, int) and not isinstance(value, bool) and not -(1 << 31) <= value < 1 << 32:
        return str(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def main(arguments: list[str]) -> int:
    """One file, or a request a line."""
    if not arguments:
        for line in sys.stdin:
            asked = json.loads(line)
            sys.stdout.write(json.dumps(report(Path(asked["file"]).read_bytes(), asked["options"])) + "\n")
            sys.stdout.flush()
        return 0
    options = json.loads(arguments[1]) if len(arguments) > 1 else {}
    told = report(Path(arguments[0]).read_bytes(), options)
    sys.stdout.write(json.dumps(told) + "\n")
    return 0 if told["verdict"] == "accept" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
