"""What this package writes for a case's values, as an encoding command does (`docs/conformance.md`).

    python -m hurray_wire.testing.encoding CASE     CASE is a JSON file; the blob goes to standard output

The descriptor is made of values, handle by handle, and not taken from bytes that were read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import hurray_wire as hw
from hurray_wire.assembly import of_buffers
from hurray_wire.testing.corpus import Case
from hurray_wire.testing.reporting import buffers_of

__all__ = ["encode_case", "request"]

_SCHEMES = {
    "per_tensor": hw.PerTensorAffine,
    "per_channel": hw.PerChannelAffine,
    "per_block": hw.PerBlockAffine,
    "nf4": hw.NF4,
    "mxfp": hw.MXFP,
}


def request(case: Case) -> dict[str, Any]:
    """The object that an encoding command is given: a case's values, its buffers in hex, the writer's options."""
    tensor = hw.decode(case.data())
    buffers = [data.hex() for data in buffers_of(tensor)]
    return {"name": case.name, "values": case.expected, "buffers": buffers, "options": case.encode}


def encode_case(asked: dict[str, Any]) -> bytes:
    """The bytes of a request."""
    values, buffers = asked["values"], [bytes.fromhex(data) for data in asked["buffers"]]
    lens = values["seq_lens"]
    index = np.dtype("<u4" if values["index_type"] == "uint32" else "<u8")
    parts = of_buffers(
        _descriptor(values),
        np.frombuffer(buffers[0], np.uint8),
        buffers[1:3],
        [np.frombuffer(data, np.uint8) for data in buffers[3:]],
        None if lens is None else np.array([int(n) for n in lens], index).tobytes(),
        values["metadata"],
        strict=True,
    )
    options: Any = {key: int(value) if key == "stream_id" else value for key, value in asked["options"].items()}
    return hw.encode(hw.BlockPagedTensor.of_parts(parts), **options)


def _descriptor(values: dict[str, Any]) -> hw.TensorDescriptor:
    layout = hw.BlockPagedLayout(
        values["page_size"],
        int(values["num_pages"]),
        0,
        values["num_seqs"],
        values["kv_role"],
        values["layer_index"],
        values["index_type"],
    )
    handles = [
        hw.BufferHandle(int(size), int(alignment), device, sync, memory)
        for size, alignment, device, sync, memory, _ in values["handles"]
    ]
    scheme, statistics, extension = values["quantization"], values["statistics"], values["extension_type"]
    if extension is not None:
        extension = {name: value for name, value in extension.items() if name != "packing"}
    return hw.TensorDescriptor(
        values["type_tag"],
        [int(size) for size in values["shape"]],
        layout,
        handles,
        quantization=None if scheme is None else _scheme(dict(scheme)),
        statistics=None if statistics is None else hw.Statistics(**{k: _number(k, v) for k, v in statistics.items()}),
        extension_type=None if extension is None else hw.ExtensionType(**extension),
        composite=values["composite"],
    )


def _scheme(told: dict[str, Any]) -> Any:
    name = told.pop("scheme")
    if "scale" in told:
        told["scale"] = _double(told["scale"])
    return _SCHEMES[name](**told)


def _number(name: str, value: Any) -> Any:
    if name == "nnz":
        return int(value)
    return _double(value) if isinstance(value, str) else value


def _double(digits: str) -> float:
    return float(np.frombuffer(bytes.fromhex(digits), ">f8")[0])


def main(arguments: list[str]) -> int:
    """One case."""
    asked = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    sys.stdout.buffer.write(encode_case(asked))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
