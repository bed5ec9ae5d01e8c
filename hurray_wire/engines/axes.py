"""Axis orders of engines' caches in letters, and the views of keys and values that a cache of an order has.

An order is given, never guessed: a shape cannot tell heads from slots, nor two heads from keys and values. Letters:
P page, S slot (token in a page), H head, D dim, C keys|values in one axis, 2 keys and values as an axis, L layer, X
pack: the low part of D where it stands behind S (`PHDSX`, 16-byte packs of the dim), of S behind D (`PHSDX`).
Views only: nothing is copied here, and no id is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hurray_wire.arrays import as_array, is_torch
from hurray_wire.dtypes import Dtype
from hurray_wire.errors import Code, InvalidDescriptorError

Axes: TypeAlias = str | tuple[str, str]

VLLM_KV_FIRST = "2PSHD"
"""vLLM up to 0.22: `[2, blocks, block_size, heads, dim]` (FLASH_ATTN `get_kv_cache_shape`)."""
VLLM_BLOCKS_FIRST = "P2SHD"
"""vLLM from 0.23 to about 0.27, FlashInfer's backend before, too: `[blocks, 2, block_size, heads, dim]`."""
VLLM_DIFFKV = "PSHC"
"""vLLM's FLASH_ATTN_DIFFKV: keys and values of different dims side by side, slots before heads."""
VLLM_PACKED = "PHSC"
"""vLLM since 0.28: a layer's logical view `[blocks, heads, block_size, key_dim + value_dim]`, whatever its strides."""
VLLM_LBHNC = "LPHSC"
VLLM_LBNHC = "LPSHC"
VLLM_LHBNC = "LHPSC"
VLLM_BLHNC = "PLHSC"
VLLM_BLNHC = "PLSHC"
VLLM_BHLNC = "PHLSC"
"""The six physical orders of all layers (vLLM 0.33 `vllm/v1/kv_cache_layout.py`: its B is P, its N is S)."""
VLLM_V0 = ("PHDSX", "PHDS")
"""vLLM V0 and ROCM_ATTN, keys in packs of 16 bytes (`vllm/v1/attention/ops/paged_attn.py` split_kv_cache)."""
VLLM_CPU = ("PHDS", "PHSD")
"""What CPU_ATTN's vector kernels write into the two halves of a block (`vllm/v1/attention/backends/cpu_attn.py`)."""
FLASHINFER_NHD = "P2SHD"
"""FlashInfer's default (`docs/tutorials/kv_layout.rst`); as a pair of arrays: "PSHD"."""
FLASHINFER_HND = "P2HSD"
"""FlashInfer heads-first; as a pair of arrays: "PHSD"."""
SGLANG = "PSHD"
"""A pool of SGLang, its rows seen as pages (`srt/mem_cache/layout/paged_view.py`)."""
TRTLLM = "PL2HSD"
"""TensorRT-LLM's pool with its last axis taken apart (`_torch/pyexecutor/resource_manager.py` get_buffers)."""

_NAMES = {
    "P": "page",
    "S": "slot",
    "H": "head",
    "D": "dim",
    "C": "keys|values",
    "2": "key/value",
    "L": "layer",
    "X": "pack",
}
_PACK_BYTES = 16  # vLLM V0: x = 16 / itemsize


class PageView(NamedTuple):
    """One role's pages in the engine's memory (NumPy, or a torch tensor on a device): pages, slots, heads, dims.

    `order` is `PSHD`, or with the packed axis behind the one it belongs to, `PSHDX` or `PSXHD`.
    """

    array: Any
    order: str

    @property
    def num_pages(self) -> int:
        """Pages."""
        return int(self.array.shape[0])

    @property
    def inner(self) -> tuple[int, int, int]:
        """(page_size, num_heads, head_dim)."""
        sizes = dict(zip(self.order, self.array.shape, strict=True))
        pack = sizes.get("X", 1)
        slots = sizes["S"] * (pack if self.order == "PSXHD" else 1)
        return slots, sizes["H"], sizes["D"] * (pack if self.order == "PSHDX" else 1)

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy type of its elements."""
        if isinstance(self.array, np.ndarray):
            return self.array.dtype
        dtype = Dtype.of(self.array.dtype).numpy
        assert dtype is not None
        return dtype

    @property
    def is_pool(self) -> bool:
        """Whether it can be a tensor's page pool as it is."""
        return self.order == "PSHD" and isinstance(self.array, np.ndarray)

    def split(self, pool: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A pool `[pages, slots, heads, dims]` with the same axis split in two: a view."""
        return pool.reshape(pool.shape[0], *self.array.shape[1:]) if "X" in self.order else pool


def page_views(
    cache: Any, axes: Axes, *, key_dim: int | None = None, layer: int | None = None
) -> tuple[PageView, PageView]:
    """The pages of keys and of values.

    Args:
        cache: one array whose order has a 2 or a C, or a pair (keys, values).
        axes: the order, of a pair one for both or one for each.
        key_dim: where C splits, half of it by default.
        layer: the position along L.

    Raises:
        TypeError, ValueError: an order that is none, or not of this cache.
        InvalidDescriptorError: `shape`, `layer_index`, `num_pages`, `page_size`.
    """
    orders = parse(axes)
    _refuse_key_dim(orders, key_dim)
    if len(orders) == 1:
        array, order = _array(cache, orders[0], "cache"), orders[0]
        chosen = _layer(array, order, layer)
        if "2" in order:
            _sized(array, order, "2", 2)
            views = tuple(_view(array, order, {**chosen, "2": i}) for i in (0, 1))
        else:
            whole = _view(array, order, chosen)
            split = _split(whole.array.shape[-1], key_dim)
            views = (whole._replace(array=whole.array[..., :split]), whole._replace(array=whole.array[..., split:]))
    else:
        names = ("key_cache", "value_cache")
        arrays = [_array(a, order, name) for a, order, name in zip(_pair(cache), orders, names, strict=True)]
        views = tuple(_view(a, order, _layer(a, order, layer)) for a, order in zip(arrays, orders, strict=True))
    _check_same_pages(*views)
    return views[0], views[1]


def parse(axes: Axes) -> tuple[str, ...]:
    """One order for keys and values in one array, or two for an array each.

    Raises:
        TypeError, ValueError: naming the letters that are unknown, double or missing.
    """
    orders = (axes,) if isinstance(axes, str) else axes
    if not isinstance(orders, tuple | list) or len(orders) not in (1, 2) or not all(isinstance(o, str) for o in orders):
        raise TypeError(f"axes must be letters such as 'P2SHD', or a pair of such for (keys, values), not {axes!r}")
    joint = [order for order in orders if set("2C") & set(order)]
    for order in orders:
        _check_letters(order)
    if joint and len(orders) == 2:
        raise ValueError(f"axes {joint[0]!r} is of keys and values in one array, not of one of a pair")
    return tuple(orders) if joint or len(orders) == 2 else (orders[0], orders[0])


def _check_letters(order: str) -> None:
    unknown = sorted(set(order) - set(_NAMES))
    if unknown:
        raise ValueError(f"axes {order!r} has unknown letters {', '.join(unknown)}: known are {_letters(_NAMES)}")
    double = sorted({letter for letter in order if order.count(letter) > 1})
    if double:
        raise ValueError(f"axes {order!r} names {_letters(double)} twice")
    dims = [letter for letter in "DC2" if letter in order]
    if dims not in (["D"], ["C"], ["D", "2"]):
        raise ValueError(f"axes {order!r} must have D, D and 2, or C alone: it has {_letters(dims) or 'none'}")
    missing = [letter for letter in "PSH" if letter not in order]
    if missing:
        raise ValueError(f"axes {order!r} lacks {_letters(missing)}")
    if "X" in order and ("C" in order or order[-2:] not in ("SX", "DX")):
        raise ValueError(f"axes {order!r}: X stands last, behind S (it packs D) or behind D (it packs S)")


def _letters(letters: Any) -> str:
    return ", ".join(f"{letter} ({_NAMES[letter]})" for letter in letters)


def _refuse_key_dim(orders: tuple[str, ...], key_dim: int | None) -> None:
    if key_dim is not None and "C" not in orders[0]:
        raise ValueError(f"key_dim says where C splits: axes {orders[0]!r} has none")


def _pair(cache: Any) -> Any:
    if isinstance(cache, tuple | list) and len(cache) == 2:
        return cache
    raise ValueError("axes without 2 and C are of a pair of arrays (keys, values), and the cache is not one")


def _array(cache: Any, order: str, name: str) -> Any:
    if isinstance(cache, tuple | list):
        raise ValueError(f"axes {order!r} is of one array, and {name} is a {type(cache).__name__}")
    array = cache if on_device(cache) else as_array(cache)
    if array.ndim != len(order):
        shape = tuple(array.shape)
        raise ValueError(f"axes {order!r} names {len(order)} axes, {name} has {array.ndim}: its shape is {shape}")
    return array


def on_device(x: Any) -> bool:
    """Whether `x` is a torch tensor outside the CPU's memory."""
    return is_torch(x) and x.device.type != "cpu"


def _sized(array: Any, order: str, letter: str, size: int) -> None:
    found = int(array.shape[order.index(letter)])
    if found != size:
        message = f"has shape {tuple(array.shape)}: {_letters(letter)} of axes {order!r} is {found}, must be {size}"
        raise InvalidDescriptorError(message, code=Code.SHAPE, where="cache")


def _layer(array: Any, order: str, layer: int | None) -> dict[str, int]:
    if "L" not in order:
        return {}
    if layer is None:
        raise TypeError(f"axes {order!r} has layers: say which, with layer_index")
    count = int(array.shape[order.index("L")])
    if not 0 <= layer < count:
        message = f"is {layer}, the cache has {count} layers"
        raise InvalidDescriptorError(message, code=Code.LAYER_INDEX, where="layer_index")
    return {"L": layer}


def _split(width: int, key_dim: int | None) -> int:
    if key_dim is None:
        if width % 2:
            message = f"keys|values are {width} wide, which is no two halves: give key_dim"
            raise InvalidDescriptorError(message, code=Code.SHAPE, where="key_dim")
        return int(width) // 2
    if not 0 <= key_dim <= width:
        message = f"is {key_dim}, but keys|values are {width} wide"
        raise InvalidDescriptorError(message, code=Code.SHAPE, where="key_dim")
    return key_dim


def _view(array: Any, order: str, chosen: Mapping[str, int]) -> PageView:
    """The array with the chosen positions taken and its axes in the order of a page pool."""
    picked = array[tuple(chosen.get(letter, slice(None)) for letter in order)]
    left = [letter for letter in order.replace("C", "D") if letter not in chosen]
    wanted = "PSHD" if "X" not in left else "PSHDX" if order.endswith("SX") else "PSXHD"
    places = [left.index(letter) for letter in wanted]
    return PageView(picked.permute(*places) if is_torch(picked) else picked.transpose(places), wanted)


def _check_same_pages(key: PageView, value: PageView) -> None:
    pairs = (
        (key.num_pages, value.num_pages, "pages", Code.NUM_PAGES),
        (key.inner[0], value.inner[0], "slots a page", Code.PAGE_SIZE),
    )
    for keys, values, noun, code in pairs:
        if keys != values:
            raise InvalidDescriptorError(f"has {values} {noun}, the keys have {keys}", code=code, where="value_cache")


def new_cache(axes: Axes, num_pages: int, key_inner: tuple[int, ...], value_inner: tuple[int, ...], dtypes: Any) -> Any:
    """Zeros of an order, for keys and values of (page_size, num_heads, head_dim): one array, or a pair.

    Raises:
        TypeError: an order with layers: how many is the caller's to say, with a pool.
        InvalidDescriptorError: `shape`, where a pack does not divide its axis.
    """
    orders = parse(axes)
    if "L" in "".join(orders):
        raise TypeError(f"axes {axes!r} has layers: give the pool to write into")
    caches = [
        _zeros(order, num_pages, inner, np.dtype(dtype))
        for order, inner, dtype in zip(orders, _inners(orders, key_inner, value_inner), dtypes, strict=False)
    ]
    return caches[0] if len(orders) == 1 else (caches[0], caches[1])


def _inners(orders: tuple[str, ...], key_inner: tuple[int, ...], value_inner: tuple[int, ...]) -> list[tuple[int, ...]]:
    if len(orders) == 1 and "C" in orders[0]:
        return [(*key_inner[:2], key_inner[2] + value_inner[2])]
    return [key_inner, value_inner][: len(orders)]


def _zeros(order: str, num_pages: int, inner: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    page_size, num_heads, head_dim = inner
    sizes = {"P": num_pages, "S": page_size, "H": num_heads, "D": head_dim, "C": head_dim, "2": 2}
    if "X" in order:
        packed = "D" if order.endswith("SX") else "S"
        sizes["X"] = _PACK_BYTES // dtype.itemsize
        if sizes[packed] % sizes["X"]:
            message = f"{_letters(packed)} is {sizes[packed]}, no multiple of packs of {sizes['X']}"
            raise InvalidDescriptorError(message, code=Code.SHAPE, where="cache")
        sizes[packed] //= sizes["X"]
    return np.zeros([sizes[letter] for letter in order], dtype)
