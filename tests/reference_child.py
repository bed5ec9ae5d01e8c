"""A child process around the reference, `hurray`: a JSON object a line in, one a line out.

The reference aborts its process on hostile sizes, so it never runs in the test's own. Not a test; needs pyhurray.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import hurray


def scheme(told: list[Any] | None) -> Any:
    """A quantisation object from a class name, a constructor and its keywords."""
    if told is None:
        return None
    name, constructor, keywords = told
    if "scale_type" in keywords:
        keywords = keywords | {"scale_type": hurray.Dtype.from_name(keywords["scale_type"])}
    cls = getattr(hurray, name)
    return (getattr(cls, constructor) if constructor else cls)(**keywords)


def descriptor(told: dict[str, Any]) -> str:
    """The bytes that the reference writes for a tensor of zeros."""
    extension, statistics = told["extension_type"], told["statistics"]
    tensor = hurray.Tensor(
        bytes(told["sizes"][0]),
        hurray.Dtype.from_tag(told["type_tag"]),
        told["shape"],
        aux_buffers=[bytes(size) for size in told["sizes"][1:]],
        layout=hurray.BlockPagedLayout(**told["layout"]),
        quantization=scheme(told["quantization"]),
        statistics=None if statistics is None else hurray.Statistics(**statistics),
        extension_type=None if extension is None else hurray.ExtensionType(**extension),
    )
    encoded: bytes = tensor.descriptor.encode()
    return encoded.hex()


LAYOUT = ("page_size", "num_pages", "paged_axis", "num_seqs", "kv_role", "layer_index", "block_table_index_type")


def read(blob: str) -> list[dict[str, Any]]:
    """What the reference's reader finds in a stream."""
    return [
        {
            "type_tag": tensor.dtype.tag,
            "shape": list(tensor.shape),
            "layout": {name: getattr(tensor.layout, name) for name in LAYOUT},
            "buffers": [bytes(tensor.buffer(i).__array__()).hex() for i in range(tensor.buffer_count)],
            "descriptor": tensor.descriptor.encode().hex(),
            "quantization": None if tensor.quantization is None else tensor.quantization.encode().hex(),
            "statistics": None if tensor.statistics is None else int(tensor.statistics.computed_mask),
            "bit_width": None if tensor.extension_type is None else tensor.extension_type.bit_width,
        }
        for tensor in hurray.StreamReader(bytes.fromhex(blob))
    ]


def names() -> dict[str, int]:
    """Every element type that the reference can make, by tag."""
    found = {}
    for tag in range(256):
        try:
            found[hurray.Dtype.from_tag(tag).name + ("" if tag < 0xF0 else f" {tag:#x}")] = tag
        except hurray.InvalidDescriptorError:
            continue
    return found


def main() -> None:
    """Answer requests until the input ends."""
    answers: dict[str, Callable[[Any], Any]] = {
        "descriptors": lambda items: [descriptor(item) for item in items],
        "read": read,
        "names": lambda _: names(),
    }
    for line in sys.stdin:
        name, argument = json.loads(line)
        try:
            answer = [True, answers[name](argument)]
        except Exception as error:
            answer = [False, f"{type(error).__name__}: {error}"]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
