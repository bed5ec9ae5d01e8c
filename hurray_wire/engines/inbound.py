"""From tensors to an engine's pages: where they go, whether they fit, one copy of what holds tokens.

Every `to_*` into pages ends here. All is checked before the first byte is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hurray_wire import indices
from hurray_wire.arrays import is_torch
from hurray_wire.dtypes import Dtype
from hurray_wire.engines.axes import Axes, PageView, new_cache, page_views, parse
from hurray_wire.engines.copying import PageCopy, copy_pages
from hurray_wire.engines.device import store_pages
from hurray_wire.engines.storage import check_importable
from hurray_wire.engines.tables import LiveTable, as_int32, check_ids, lens_as_int32, live_table, refused, table_of
from hurray_wire.errors import Code, InvalidDescriptorError, UnsupportedError, Violation, violations_error
from hurray_wire.indices import Int64Array
from hurray_wire.tensor import BlockPagedTensor

Array = npt.NDArray[Any]
Placed = tuple[Any, npt.NDArray[np.int32], npt.NDArray[np.int32]]


def check_pair(key: BlockPagedTensor, value: BlockPagedTensor, *, scaled: bool = True) -> None:
    """Whether two tensors are the keys and values of one layer: roles, layer, pages and tables; types may differ.

    Raises:
        InvalidDescriptorError: `.violations` lists each difference.
        UnsupportedError: what no engine's pool holds; `seq_lens_unknown`.
    """
    for tensor in (key, value):
        check_importable(tensor, scaled=scaled)
    checks = (
        ("key.kv_role", Code.KV_ROLE, key.kv_role, "key"),
        ("value.kv_role", Code.KV_ROLE, value.kv_role, "value"),
        ("value.layer_index", Code.LAYER_INDEX, value.layer_index, key.layer_index),
        ("value.page_size", Code.PAGE_SIZE, value.page_size, key.page_size),
        ("value.num_pages", Code.NUM_PAGES, value.num_pages, key.num_pages),
    )
    tables = (
        ("value.seq_lens", Code.SEQ_LENS_RANGE, value.known_lens(), key.known_lens()),
        ("value.seq_ptr", Code.SEQ_PTR_ORDER, value.seq_ptr, key.seq_ptr),
        ("value.block_table", Code.PAGE_ID, value.block_table, key.block_table),
    )
    violations = [
        Violation(code, where, f"is {found!r}, must be {wanted!r}")
        for where, code, found, wanted in checks
        if found != wanted
    ]
    violations += [
        Violation(code, where, "differs from the key's: the two are no pair")
        for where, code, found, wanted in tables
        if not np.array_equal(found, wanted)
    ]
    if violations:
        raise violations_error(violations)


class Landing(NamedTuple):
    """Where pages go: of the tensor's, each once, and of the engine's; the rows that then name them."""

    sources: Int64Array
    targets: Int64Array
    table: LiveTable

    def rows(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """(block_table padded with 0, seq_lens), int32."""
        return self.table.rows(), lens_as_int32(self.table.seq_lens)


def landing(t: BlockPagedTensor, block_table: Any, num_pages: int | None) -> Landing:
    """The engine's pages for a tensor's: those that the caller's rows name, else its own ids.

    Raises:
        InvalidDescriptorError: rows that are too short or leave the pool; `page_id`, two pages sent to one place.
        UnsupportedError: `index_type`.
    """
    own = table_of(t)
    if block_table is None:
        check_ids(own.ids, num_pages, own.place)
        table = own
    else:
        table = live_table(block_table, own.seq_lens, num_pages=num_pages, page_size=t.page_size)
    as_int32(table.ids, table.place)
    targets, first, inverse = np.unique(table.ids, return_index=True, return_inverse=True)
    sources = own.ids[first]
    arriving = sources[inverse.reshape(-1)]
    clash = own.ids != arriving
    if clash.any():
        found = indices.offence(clash, table.ids)
        message = f"page {found.value} would take the tensor's pages {arriving[found.at]} and {own.ids[found.at]}"
        raise refused(Code.PAGE_ID, table.place(found.at), message, found)
    order = np.argsort(first, kind="stable")
    return Landing(sources[order].astype(np.int64), targets[order].astype(np.int64), table)


def place_pair(
    key: BlockPagedTensor, value: BlockPagedTensor, *, axes: Axes, pool: Any, block_table: Any
) -> tuple[Any, Landing]:
    """Write a pair's live pages into an engine's cache of an axis order, the caller's or a new one.

    Raises:
        TypeError, ValueError: axes.
        InvalidDescriptorError, UnsupportedError: the pair, the pool or the tables do not fit.
    """
    orders = parse(axes)
    check_pair(key, value)
    if len(orders) == 1:
        _check_joint(key, value, split="C" in orders[0])
    if pool is None:
        where = landing(key, block_table, None)
        count = key.num_pages if block_table is None else int(where.targets.max(initial=-1)) + 1
        pool = new_cache(axes, count, _inner(key), _inner(value), (key.dtype.numpy, value.dtype.numpy))
        views = page_views(pool, axes, key_dim=_key_dim(key, orders))
    else:
        views = page_views(pool, axes, key_dim=_key_dim(key, orders), layer=_layer(key, orders))
        where = landing(key, block_table, views[0].num_pages)
    write_pages((key, value), views, where)
    return pool, where


def _inner(t: BlockPagedTensor) -> tuple[int, int, int]:
    return t.page_size, t.num_heads, t.head_dim


def _key_dim(key: BlockPagedTensor, orders: tuple[str, ...]) -> int | None:
    return key.head_dim if "C" in orders[0] else None


def _layer(key: BlockPagedTensor, orders: tuple[str, ...]) -> int | None:
    if "L" in "".join(orders) and key.layer_index is None:
        message = f"is None: axes {orders[0]!r} has layers, and the tensors do not say which they are"
        raise InvalidDescriptorError(message, code=Code.LAYER_INDEX, where="layer_index")
    return key.layer_index


def _check_joint(key: BlockPagedTensor, value: BlockPagedTensor, *, split: bool) -> None:
    """One array has one element type and one number of heads; without a C axis one dim, too."""
    if key.dtype is not value.dtype:
        message = f"is {value.dtype}, the keys are {key.dtype}: one array holds one type, a pair of arrays two"
        raise UnsupportedError(message, code=Code.DTYPE, where="value.dtype")
    sizes = ("num_heads",) if split else ("num_heads", "head_dim")
    for size in sizes:
        if getattr(key, size) != getattr(value, size):
            message = f"is {getattr(value, size)}, the keys have {getattr(key, size)}: give axes of a pair of arrays"
            raise InvalidDescriptorError(message, code=Code.SHAPE, where=f"value.{size}")


def write_pages(
    tensors: Sequence[BlockPagedTensor],
    views: Sequence[PageView],
    where: Landing,
    names: Sequence[str] = ("pool", "pool"),
) -> None:
    """Copy tensors' pages into views of an engine's pool; `names` are the caller's arguments that hold the views.

    Raises:
        InvalidDescriptorError: `page_size`, `shape`.
        UnsupportedError: `dtype`.
        ValueError: the pool is read-only.
    """
    for tensor, view, name in zip(tensors, views, names, strict=False):
        _check_fits(tensor, view, name)
    copies = []
    for tensor, view in zip(tensors, views, strict=True):
        source = view.split(_native(tensor.page_pool))
        if is_torch(view.array):
            store_pages(view.array, where.targets, source[where.sources])
        else:
            copies.append(PageCopy(source, view.array.view(source.dtype)))
    copy_pages(copies, where.sources.size, where.sources, where.targets)


def _native(pool: Array) -> Array:
    return pool if pool.dtype.isnative else pool.astype(pool.dtype.newbyteorder("="))


def _check_fits(t: BlockPagedTensor, view: PageView, name: str) -> None:
    page_size, num_heads, head_dim = view.inner
    if page_size != t.page_size:
        message = f"has pages of {page_size} tokens, the tensor's hold {t.page_size}: repage the tensor first"
        raise InvalidDescriptorError(message, code=Code.PAGE_SIZE, where=name)
    if (num_heads, head_dim) != (t.num_heads, t.head_dim):
        message = f"has {num_heads} heads of {head_dim} {t.kv_role} dims, the tensor {t.num_heads} of {t.head_dim}"
        raise InvalidDescriptorError(message, code=Code.SHAPE, where=name)
    found = Dtype.of(view.array.dtype)
    stored_as_bytes = found.name == "uint8" and t.dtype.name in ("float8_e4m3", "float8_e5m2")
    if (found is not t.dtype and not stored_as_bytes) or not view.numpy.isnative:
        message = f"is {view.array.dtype}, the tensor is {t.dtype}: convert the values first"
        raise UnsupportedError(message, code=Code.DTYPE, where=name)
    if not is_torch(view.array) and not view.array.flags.writeable:
        raise ValueError(f"{name} is read-only")
