"""`BlockPagedLayout`: how a pool of pages is cut into sequences (section 1, layout tag 0x0A)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hurray_wire import indices, rules
from hurray_wire.errors import Code, InvalidDescriptorError, Violation, violations_error
from hurray_wire.quantization import CLASSES
from hurray_wire.tags import BLOCK_PAGED, NO_LAYER, RANK, IndexType, KvRole

__all__ = ["INDEX_DTYPES", "INDEX_TYPES", "KV_ROLES", "BlockPagedLayout"]

KV_ROLES = {role.name.lower(): role for role in KvRole}
INDEX_TYPES = {index_type.name.lower(): index_type for index_type in IndexType}
INDEX_DTYPES: dict[str, np.dtype[Any]] = {"uint32": np.dtype("<u4"), "uint64": np.dtype("<u8")}


@dataclass(frozen=True, slots=True)
class BlockPagedLayout:
    """A pool of `num_pages` pages of `page_size` tokens, and `num_seqs` sequences that name pages in it.

    Construction checks types, integer ranges and names; the format's own rules are asked for by `validate_*`.

    Args:
        page_size: tokens a page, uint32.
        num_pages: pages in the pool, uint64; 0 allowed.
        paged_axis: uint32, 0 by the format's rule.
        num_seqs: sequences in the batch, uint32; 0 for an empty batch.
        kv_role: "key", "value" or "fused".
        layer_index: uint32 below 0xFFFFFFFF (the wire's None), or None.
        block_table_index_type: "uint32" or "uint64", of block_table and seq_ptr.

    Raises:
        TypeError: an argument of another type.
        InvalidDescriptorError: a number out of its range, or an unknown name.

    Example:
        >>> layout = BlockPagedLayout(page_size=4, num_pages=5, paged_axis=0, num_seqs=2, layer_index=3)
        >>> layout.validate_against_shape([9, 2, 8])
        >>> layout.validate_index_buffers([0, 2, 3], [0, 1, 0])
    """

    page_size: int
    num_pages: int
    paged_axis: int
    num_seqs: int
    kv_role: str = "key"
    layer_index: int | None = None
    block_table_index_type: str = "uint32"

    tag: ClassVar[int] = BLOCK_PAGED
    name: ClassVar[str] = "block_paged"
    buffer_count: ClassVar[int] = 3
    is_dense: ClassVar[bool] = False
    is_virtual: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field, bits, code in _INTEGERS:
            object.__setattr__(self, field, rules.integer(getattr(self, field), bits, f"layout.{field}", code))
        if self.layer_index is not None:
            layer = rules.integer(self.layer_index, 32, "layout.layer_index", Code.LAYER_INDEX)
            if layer == NO_LAYER:
                message = "is 0xFFFFFFFF, the wire's None; give None"
                raise InvalidDescriptorError(message, code=Code.LAYER_INDEX, where="layout.layer_index")
            object.__setattr__(self, "layer_index", layer)
        _name(self.kv_role, KV_ROLES, "layout.kv_role", Code.KV_ROLE)
        _name(self.block_table_index_type, INDEX_TYPES, "layout.block_table_index_type", Code.INDEX_TYPE)

    @classmethod
    def unchecked(cls, *values: Any) -> BlockPagedLayout:
        """A layout whose values a reader has already checked, in field order: a third of the constructor's time."""
        layout = cls.__new__(cls)
        for field, value in zip(cls.__slots__, values, strict=True):
            object.__setattr__(layout, field, value)
        return layout

    def validate_against_shape(self, shape: Sequence[int]) -> None:
        """Rank 3 (total_tokens, num_heads, head_dim), page_size at least 1, paged_axis 0.

        Raises:
            InvalidDescriptorError: `rank`, `page_size`, `paged_axis`.
        """
        violations = []
        if len(shape) != RANK:
            message = f"is {len(shape)}, must be {RANK}: total_tokens, num_heads, head_dim"
            violations.append(Violation(Code.RANK, "rank", message))
        if self.page_size < 1:
            violations.append(Violation(Code.PAGE_SIZE, "layout.page_size", "is 0, must be at least 1"))
        if self.paged_axis != 0:
            message = f"is {self.paged_axis}, must be 0"
            violations.append(Violation(Code.PAGED_AXIS, "layout.paged_axis", message))
        if violations:
            raise violations_error(violations)

    def validate_index_buffers(self, seq_ptr: Any, block_table: Any) -> None:
        """The four invariants: seq_ptr starts at 0, never decreases, ends at the table's length; ids below num_pages.

        Args:
            seq_ptr: num_seqs + 1 integers: a list, a tuple or an array of any integer type.
            block_table: page ids, seq_ptr[-1] of them.

        Raises:
            InvalidDescriptorError: names the first offending index, its value, and how many more there are.
        """
        ptr = indices.as_indices(seq_ptr, "seq_ptr")
        table = indices.as_indices(block_table, "block_table")
        violations = []
        if ptr.size and ptr.size != self.num_seqs + 1:
            message = f"has {ptr.size} entries, must have num_seqs + 1 = {self.num_seqs + 1}"
            violations.append(Violation(Code.BUFFER_SIZE, "seq_ptr", message))
        violations += indices.check_seq_ptr(ptr, table.size)
        violations += indices.check_block_table(table, self.num_pages)
        if violations:
            raise violations_error(violations)

    def validate_quantization_compatibility(self, quantization: Any) -> None:
        """Whether a scheme can stand on this layout: its axis, and for per-block that a block is a page.

        Raises:
            InvalidDescriptorError: `quantization_axis`, `quantization_block`; `quantization_scheme` for what is
                no scheme object.
        """
        if type(quantization) not in CLASSES.values():
            names = ", ".join(c.__name__ for c in CLASSES.values())
            message = f"{quantization!r} is no scheme: pass one of {names}"
            raise InvalidDescriptorError(message, code=Code.QUANTIZATION_SCHEME, where="quantization")
        violations = rules.check_scheme_fit(quantization.record(), self.page_size)
        if violations:
            raise violations_error(violations)


_INTEGERS = (
    ("page_size", 32, Code.PAGE_SIZE),
    ("num_pages", 64, Code.NUM_PAGES),
    ("paged_axis", 32, Code.PAGED_AXIS),
    ("num_seqs", 32, Code.NUM_SEQS),
)


def _name(value: Any, names: dict[str, Any], where: str, code: Code) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{where} must be a name, not {value!r}")
    if value not in names:
        raise InvalidDescriptorError(f"is {value!r}, must be one of {', '.join(names)}", code=code, where=where)
