"""Live against the reference, `pyhurray`: its descriptors are ours byte for byte, and it reads every blob of ours."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import DTYPES, LAYERS, ROLES, Built, schemes_of, tensors
from support import BARE_CASES, bare_vector

import hurray_wire as hw

CHILD = Path(__file__).with_name("reference_child.py")
PAGES, PAGE_SIZE, HEADS, DIM, SEQS, ENTRIES, TOKENS = 5, 4, 2, 8, 2, 3, 9
# The reference makes no signed float extension: there sign_bits says it. The wire has no such rule.
EXTENSION: dict[str, Any] = {
    **{"bit_width": 24, "is_float": True, "is_signed": False, "sign_bits": 1, "exponent_bits": 8},
    **{"mantissa_bits": 15, "exponent_bias": 127, "has_nan": True, "has_inf": False},
}
STATISTICS: list[dict[str, Any] | None] = [
    None,
    {"nnz": 319},
    {"value_min": -1.5, "value_max": 2.0, "value_abs_max": 2.0, "has_nan": True, "has_inf": False},
    {
        **{"nnz": 2**64 - 1, "sparsity_ratio": 0.25, "value_min": -1.0, "value_max": 1.0, "value_abs_max": 1.0},
        **{"value_mean": 0.5, "value_stddev": 0.125, "nm_n": 2, "nm_m": 4, "has_nan": False, "has_inf": True},
    },
]


class Reference:
    """The long-lived child, asked over its pipes."""

    def __init__(self) -> None:
        command = [sys.executable, str(CHILD)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, name: str, argument: Any = None) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, argument]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the reference's process ended: {self.process.wait()}"
        sound, answer = json.loads(line)
        assert sound, answer
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    pytest.importorskip("hurray")
    child = Reference()
    yield child
    child.close()


def schemes(dtype: hw.Dtype) -> list[list[Any] | None]:
    """Every scheme on a storage type, as class, constructor and keywords of either package."""
    found: list[list[Any] | None] = [None]
    both = {"scale_buffer_index": 3, "zero_point_buffer_index": 4}
    for name in schemes_of(dtype):
        zero, constructor = name.endswith("asymmetric"), "asymmetric" if name.endswith("asymmetric") else "symmetric"
        buffers = both if zero else {"scale_buffer_index": 3}
        if name == "per_tensor":
            points = [0] if dtype.name.startswith("float8") else [0, 1]
            found += [["PerTensorAffine", "", {"scale": 0.1, "zero_point": point}] for point in points]
        elif name.startswith("per_channel"):
            found += [["PerChannelAffine", constructor, {"axis": axis, **buffers}] for axis in (1, 2)]
        elif name.startswith("per_block"):
            block = {"axis": 0, "block_size": PAGE_SIZE, **buffers}
            types = ("float16", "bfloat16", "float32")
            found += [["PerBlockAffine", constructor, {**block, "scale_type": kind}] for kind in types]
        else:
            found.append([name.upper(), "", {"axis": 2, "block_size": 16, "scale_buffer_index": 3}])
    return found


def ours(told: list[Any] | None) -> Any:
    if told is None:
        return None
    cls = getattr(hw, told[0])
    return (getattr(cls, told[1]) if told[1] else cls)(**told[2])


def sizes(bits: int, index_bytes: int, told: list[Any] | None) -> list[int]:
    """Bytes of every buffer, by section 1."""
    elements = PAGES * PAGE_SIZE * HEADS * DIM
    pool = 3 * math.ceil(elements / 4) if bits == 6 else math.ceil(elements * bits / 8)
    found = [pool, ENTRIES * index_bytes, (SEQS + 1) * index_bytes]
    if told is None or told[0] == "PerTensorAffine":
        return found
    keywords = told[2]
    if told[0] in ("NF4", "MXFP"):
        return [*found, 40]
    count = PAGES * PAGE_SIZE if told[0] == "PerBlockAffine" else {1: HEADS, 2: DIM}[keywords["axis"]]
    found.append(count * (4 if keywords.get("scale_type", "float32") == "float32" else 2))
    return [*found, count * 4] if "zero_point_buffer_index" in keywords else found


def combinations(tag: int) -> Iterator[dict[str, Any]]:
    """Every combination of what a descriptor of one element type can say."""
    dtype = hw.Dtype.of(tag)
    bits = EXTENSION["bit_width"] if dtype.is_private else dtype.bit_width
    for index_type, role, layer, told, statistics in itertools.product(
        ("uint32", "uint64"), ROLES, LAYERS, schemes(dtype), STATISTICS
    ):
        yield {
            "type_tag": tag,
            "shape": [TOKENS, HEADS, DIM],
            "layout": {
                **{"page_size": PAGE_SIZE, "num_pages": PAGES, "paged_axis": 0, "num_seqs": SEQS},
                **{"kv_role": role, "layer_index": layer, "block_table_index_type": index_type},
            },
            "sizes": sizes(bits, 4 if index_type == "uint32" else 8, told),
            "quantization": told,
            "statistics": statistics,
            "extension_type": EXTENSION if dtype.is_private else None,
        }


def described(told: dict[str, Any]) -> bytes:
    """The same combination through our own values."""
    extension, statistics = told["extension_type"], told["statistics"]
    return hw.TensorDescriptor(
        told["type_tag"],
        told["shape"],
        hw.BlockPagedLayout(**told["layout"]),
        [hw.BufferHandle(size) for size in told["sizes"]],
        quantization=ours(told["quantization"]),
        statistics=None if statistics is None else hw.Statistics(**statistics),
        extension_type=None if extension is None else hw.ExtensionType(**extension),
    ).encode()


def test_both_know_the_same_element_types(reference: Reference) -> None:
    found = reference.ask("names")
    private = {f"extension {tag:#x}": tag for tag in range(0xF0, 0xFF)}
    assert found == {dtype.name: dtype.tag for dtype in DTYPES} | private


@pytest.mark.parametrize("tag", [*(dtype.tag for dtype in DTYPES), 0xF0, 0xF2, 0xFE])
def test_descriptors_are_the_references_byte_for_byte(reference: Reference, tag: int) -> None:
    asked = list(combinations(tag))
    assert len(asked) >= 2 * 3 * 4 * 4
    answers = reference.ask("descriptors", asked)
    wrong = [told for told, hexed in zip(asked, answers, strict=True) if described(told).hex() != hexed]
    assert not wrong, f"{len(wrong)} of {len(asked)} differ, first {wrong[0]}"


def test_every_scheme_stands_on_some_type() -> None:
    told = [scheme for dtype in DTYPES for scheme in schemes(dtype) if scheme]
    assert {scheme[0] for scheme in told} == {"PerTensorAffine", "PerChannelAffine", "PerBlockAffine", "NF4", "MXFP"}
    assert {scheme[2].get("scale_type") for scheme in told} == {None, "float16", "bfloat16", "float32"}


def read_equally(reference: Reference, blob: bytes, tensor: hw.BlockPagedTensor, buffers: list[bytes]) -> None:
    """The reference's reader finds in a blob what the tensor holds."""
    (found,) = reference.ask("read", blob.hex())
    layout = tensor.layout
    told = {name: getattr(layout, name) for name in found["layout"]}
    assert found["layout"] == told
    assert (found["type_tag"], found["shape"]) == (tensor.dtype.tag, list(tensor.shape))
    assert found["buffers"] == [buffer.hex() for buffer in buffers]
    assert found["descriptor"] == tensor.descriptor.encode().hex()
    scheme, statistics = tensor.quantization, tensor.statistics
    assert found["quantization"] == (None if scheme is None else scheme.encode().hex())
    assert found["statistics"] == (None if statistics is None else int(statistics.computed_mask))
    extension = tensor.descriptor.extension_type
    assert found["bit_width"] == (None if extension is None else extension.bit_width)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(built=tensors())
def test_random_blobs_are_read_by_the_reference(reference: Reference, built: Built) -> None:
    read_equally(reference, hw.encode(built.tensor, framing="bare"), built.tensor, built.buffers)


@pytest.mark.parametrize(
    ("name", "scheme"), [(dtype.name, scheme) for dtype in DTYPES for scheme in ["", *schemes_of(dtype)]]
)
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_blobs_of_every_type_and_scheme_are_read_by_the_reference(
    reference: Reference, name: str, scheme: str, data: st.DataObject
) -> None:
    built = data.draw(tensors(dtypes=[hw.Dtype.of(name)], private=False, scheme=scheme))
    read_equally(reference, hw.encode(built.tensor, framing="bare"), built.tensor, built.buffers)


@pytest.mark.parametrize("name", BARE_CASES)
def test_vectors_are_still_what_the_reference_reads(reference: Reference, name: str) -> None:
    tensor = hw.decode(bare_vector(name))
    buffers = [bytes.fromhex(buffer["hex"]) for buffer in BARE_CASES[name]["buffers"]]
    read_equally(reference, hw.encode(tensor, framing="bare"), tensor, buffers)
