"""What two ends must have in common, said before they read each other's bytes as nonsense."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from hurray_wire.errors import Code, Difference, Violation
from hurray_wire.ops import derived as d
from hurray_wire.ops.derived import same_bits, sound, trait
from hurray_wire.quantization import PerChannelAffine
from hurray_wire.tensor import BlockPagedTensor

_TRAITS = (*d.IDENTITY, "composite")
_ENDS = ("model", "revision", "tokenizer", "rope", "heads", "content", "key_dim")
"""Metadata that says how elements are to be understood."""
_BATCH = ("model", "revision", "tokenizer", "rope", "seq_ids", "first_tokens", "heads")
"""Metadata that all layers of one batch share."""

_MOST_LAYERS = 4096
"""Missing layers that are named one by one: a layer index can be any number."""


def compatible(a: BlockPagedTensor, b: BlockPagedTensor) -> list[Difference]:
    """Everything in which two tensors differ that would make one end read the other's pages as nonsense.

    Element type, page_size, num_heads, head_dim, kv_role, layer_index, composite role, the quantisation scheme with
    the constants that do not travel with a page (per-tensor scale and zero point, per-channel arrays), and of the
    metadata model, revision, tokenizer, rope, heads, content, key_dim, where both have them. Numbers of pages,
    sequences and tokens, and ids, may differ.

    Returns:
        Differences named as `expect` names them, `found` of `a` and `expected` of `b`; empty when they fit.

    Raises:
        InvalidDescriptorError: a tensor has violations.

    Example:
        >>> import numpy as np
        >>> t = BlockPagedTensor(np.zeros((1, 4, 2, 8), np.float16), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
        >>> other = t.replace(page_pool=np.zeros((9, 2, 2, 8), np.float32), block_table=[8, 1], seq_ptr=[0, 2])
        >>> [str(difference) for difference in compatible(t, other)]
        ["dtype: found 'float16', expected 'float32'", 'page_size: found 4, expected 2']
    """
    sound(a)
    sound(b)
    pairs = ((name, trait(a, name), trait(b, name)) for name in _TRAITS)
    differences = [Difference(name, mine, theirs) for name, mine, theirs in pairs if mine != theirs]
    if a.quantization == b.quantization and isinstance(a.quantization, PerChannelAffine):
        for name in ("scales", "zero_points"):
            if not same_bits(getattr(a, name), getattr(b, name)):
                differences.append(Difference(name, trait(a, name), trait(b, name)))
    return differences + [Difference(name, mine, theirs) for name, mine, theirs in _contradictions(a, b, _ENDS)]


def _contradictions(a: BlockPagedTensor, b: BlockPagedTensor, names: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
    mine, theirs = a.parts.metadata or {}, b.parts.metadata or {}
    for name in names:
        if name in mine and name in theirs and _plain(mine[name]) != _plain(theirs[name]):
            yield name, mine[name], theirs[name]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def check_layers(tensors: Iterable[BlockPagedTensor]) -> list[Violation]:
    """What keeps tensors from being the layers of one batch.

    Every layer between the first and the last must be there, once, as key and value or as fused (corrections of
    composite tensors aside). All must have the same block_table, seq_ptr, seq_lens (where known), page_size and
    num_pages, and must not contradict each other in metadata model, revision, tokenizer, rope, seq_ids, first_tokens,
    heads; key and value of a layer must have the same num_heads. They may differ in element type, head_dim and
    quantisation.

    Args:
        tensors: all layers and roles of one batch, in any order.

    Returns:
        Violations in the order of the tensors, `where` as `tensors[3].block_table`, then `layers[7]` for what a layer
        lacks, `index` being the tensor's or the layer's number; empty when all is well.

    Raises:
        InvalidDescriptorError: a tensor has violations of its own.

    Example:
        >>> import numpy as np
        >>> key = BlockPagedTensor(np.zeros((1, 4, 2, 8), np.float16), block_table=[0], seq_ptr=[0, 1], seq_lens=[4],
        ...                        layer_index=0)
        >>> value = key.replace(kv_role="value")
        >>> check_layers([key, value])
        []
        >>> print(*check_layers([key, value, value.replace(layer_index=2)]), sep="; ")
        layers[1]: is missing; layers[2]: has a value, but no key
    """
    batch = list(tensors)
    for t in batch:
        sound(t)
    violations = [v for i, t in enumerate(batch) for v in _against_first(i, t, batch[0])]
    violations += _repeated(batch)
    for layer, members in sorted(_by_layer(batch).items()):
        violations += _incomplete(layer, [batch[i] for i in members])
    return violations


_ARRAYS = {"block_table": Code.PAGE_ID, "seq_ptr": Code.SEQ_PTR_ORDER, "seq_lens": Code.SEQ_LENS_RANGE}
_SIZES = {"page_size": Code.PAGE_SIZE, "num_pages": Code.NUM_PAGES}


def _against_first(i: int, t: BlockPagedTensor, first: BlockPagedTensor) -> Iterator[Violation]:
    arrays = [name for name in _ARRAYS if getattr(t, name) is not None and getattr(first, name) is not None]
    for found in d.table_differences(t, first, arrays):
        message = f"is {found.found}, in tensors[0] {found.expected}"
        yield Violation(_ARRAYS[found.where], f"tensors[{i}].{found.where}", message, index=i)
    for name, code in _SIZES.items():
        mine, others = getattr(t, name), getattr(first, name)
        if mine != others:
            yield Violation(code, f"tensors[{i}].layout.{name}", f"is {mine}, in tensors[0] {others}", i, mine)
    if "seq_lens" not in arrays and t.total_tokens != first.total_tokens:
        message = f"is {t.total_tokens}, in tensors[0] {first.total_tokens}"
        yield Violation(Code.TOKEN_COUNT, f"tensors[{i}].shape[0]", message, i, t.total_tokens)
    for name, mine, others in _contradictions(t, first, _BATCH):
        message = f"is {_short(mine)}, in tensors[0] {_short(others)}"
        yield Violation(Code.METADATA, f"tensors[{i}].metadata.{name}", message, index=i)
    if t.layer_index is None:
        yield Violation(Code.LAYER_INDEX, f"tensors[{i}].layout.layer_index", "is None: of no layer", index=i)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _repeated(batch: Sequence[BlockPagedTensor]) -> Iterator[Violation]:
    seen: dict[Any, int] = {}
    for i, t in enumerate(batch):
        composite = t.descriptor.composite
        earlier = seen.setdefault((t.layer_index, t.kv_role, composite), i)
        if earlier != i and t.layer_index is not None:
            message = f"is the {t.kv_role} of layer {t.layer_index}, as tensors[{earlier}] is"
            yield Violation(Code.LAYER_INDEX, f"tensors[{i}].layout.layer_index", message, i, t.layer_index)


def _by_layer(batch: Sequence[BlockPagedTensor]) -> dict[int, list[int]]:
    """The tensors of every layer that is there, and none for those that are missing between two of them."""
    found = sorted({t.layer_index for t in batch if t.layer_index is not None})
    layers: dict[int, list[int]] = {layer: [] for layer in found}
    for before, after in pairwise(found):
        layers |= {layer: [] for layer in range(before + 1, min(after, before + _MOST_LAYERS))}
    for i, t in enumerate(batch):
        if t.layer_index is not None and t.descriptor.composite != "correction":
            layers[t.layer_index].append(i)
    return layers


def _incomplete(layer: int, members: Sequence[BlockPagedTensor]) -> Iterator[Violation]:
    where, roles = f"layers[{layer}]", {t.kv_role for t in members}
    if not roles:
        yield Violation(Code.LAYER_INDEX, where, "is missing", index=layer)
    elif "fused" in roles and len(roles) > 1:
        message = f"has a fused tensor, and a {' and a '.join(sorted(roles - {'fused'}))} too"
        yield Violation(Code.KV_ROLE, where, message, index=layer)
    elif roles in ({"key"}, {"value"}):
        lacks = "value" if roles == {"key"} else "key"
        yield Violation(Code.KV_ROLE, where, f"has a {', '.join(roles)}, but no {lacks}", index=layer)
    heads = sorted({t.num_heads for t in members})
    if len(heads) > 1:
        message = f"has {' and '.join(map(str, heads))} heads: key and value have the same"
        yield Violation(Code.SHAPE, where, message, index=layer)
