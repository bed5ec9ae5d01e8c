"""Frames in a real Ray object store: what is shared, what is copied, and what is refused."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frames import build
from ray_helpers import ray_node
from stream_helpers import kinds, large, sample

import hurray_wire as hw
from hurray_wire.integrations.ray import from_object, get, put, to_object

KINDS = kinds()
OPTIONS: dict[str, dict[str, Any]] = {
    "raw": {},
    "unhashed": {"checksum": False},
    "live": {"pages": "live"},
    "scrubbed": {"scrub": True},
    "zstd": {"compression": "zstd"},
}

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with ray_node() as ray:
        yield ray


# Values, with or without Ray.


@pytest.mark.parametrize("form", OPTIONS)
def test_a_value_and_back(form: str) -> None:
    for name, tensor in KINDS.items():
        if form == "scrubbed" and tensor.dtype.bit_width < 8:
            continue
        value = to_object(tensor, **OPTIONS[form])
        assert all(isinstance(part, np.ndarray) and part.dtype == np.uint8 and part.ndim == 1 for part in value)
        assert from_object(value) == hw.decode(hw.encode(tensor, **OPTIONS[form])), name


def test_what_is_copied_before_ray_copies_it() -> None:
    tensor = large(0, pages=64)
    assert np.shares_memory(to_object(tensor)[1], tensor.page_pool)
    assert len(to_object(tensor)) == 4
    for one in (to_object(tensor, compression="zstd"), to_object(tensor.replace(page_pool=tensor.page_pool[..., ::2]))):
        assert len(one) == 1
        assert one[0].ctypes.data % 64 == 0
    assert np.shares_memory(from_object(to_object(tensor)).page_pool, tensor.page_pool)


BROKEN: dict[str, tuple[Any, type[hw.HurrayWireError], str]] = {
    "nothing": ([], hw.FrameError, "magic"),
    "None": (None, hw.FrameError, "magic"),
    "bytes": (hw.encode(sample(0)), hw.FrameError, "magic"),
    "a tensor": (sample(0), hw.FrameError, "magic"),
    "lists": ([[1, 2], [3]], hw.FrameError, "magic"),
    "an array of something": ([np.zeros(99, np.uint8)], hw.FrameError, "magic"),
    "half a frame": ([np.frombuffer(hw.encode(sample(0)), np.uint8)[:300]], hw.TruncatedError, "truncated"),
    "a closing frame": ([np.frombuffer(build([]), np.uint8)], hw.FrameError, "last"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_value_of_ours(name: str) -> None:
    value, error, code = BROKEN[name]
    with pytest.raises(error) as caught:
        from_object(value)
    assert caught.value.code == code


def changed(part: int, change: Any) -> list[Any]:
    value = [array.copy() for array in to_object(large(0, pages=12))]
    value[part] = change(value[part])
    return value


@pytest.mark.parametrize("part", range(4))
def test_parts_that_are_not_what_they_were(part: int) -> None:
    with pytest.raises(hw.TruncatedError):
        from_object(changed(part, lambda array: array[: array.size // 2]))
    if part:
        with pytest.raises(hw.FrameError) as caught:
            from_object(changed(part, lambda array: np.concatenate([array, array[:1]])))
        assert caught.value.code == "trailing_bytes"
    with pytest.raises(hw.ChecksumError):
        from_object(changed(part, lambda array: array ^ (np.arange(array.size) == array.size // 2)))
    if part == 1:
        flipped = changed(1, lambda array: array ^ np.uint8(1))
        assert from_object(flipped, verify=False).page_pool.shape == (12, 16, 4, 64)


def test_a_frame_of_a_newer_version() -> None:
    for value in (to_object(large(0)), to_object(large(0), compression="zstd")):
        newer = [value[0].copy(), *value[1:]]
        newer[0][8] = 2
        with pytest.raises(hw.UnsupportedError) as caught:
            from_object(newer)
        assert caught.value.code == "version"


def test_arguments() -> None:
    for options in ({"framing": "bare"}, {"last": False}, {"nonsense": 1}):
        with pytest.raises(TypeError, match="no option"):
            to_object(sample(0), **options)
    with pytest.raises(hw.MismatchError):
        from_object(to_object(sample(0)), expect={"page_size": 5})
    with pytest.raises(hw.LimitError):
        from_object(to_object(large(0)), limits=hw.Limits(decoded_bytes=1000))
    with pytest.raises(hw.UnsupportedError):
        from_object(to_object(large(0), compression="zstd"), copy=False)


# In a real store.


@pytest.mark.parametrize("form", OPTIONS)
def test_through_the_store(ray: Any, form: str) -> None:
    for name, tensor in KINDS.items():
        if form == "scrubbed" and tensor.dtype.bit_width < 8:
            continue
        ref = put(tensor, **OPTIONS[form])
        expected = hw.decode(hw.encode(tensor, **OPTIONS[form]))
        assert get(ref) == get(ray.get(ref)) == expected, name
        with pytest.raises(hw.MismatchError):
            get(ref, expect={"kv_role": "fused"})


def mapping_of(address: int) -> str:
    """The line of /proc/self/maps for an address: what memory it is in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(word, 16) for word in line.split()[0].split("-"))
        if low <= address < high:
            return line
    return ""


def private_bytes() -> int:
    """What of this process is in memory of its own."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


NBYTES = 64 << 20


def pool() -> Any:
    return np.random.default_rng(0).integers(0, 255, NBYTES, np.uint8).view(np.float16).reshape(-1, 16, 8, 128)


def big() -> hw.BlockPagedTensor:
    pages = pool()
    count = len(pages)
    table = np.random.default_rng(1).permutation(count)
    return hw.BlockPagedTensor(pages, block_table=table, seq_ptr=[0, count], seq_lens=[count * 16])


@pytest.mark.parametrize("way", ["frame", "verified frame", "plain tensor"])
def test_a_read_is_no_copy(ray: Any, way: str) -> None:
    """The pool lies in the store's shared segment, read-only, and reading all of it takes no memory of this process."""
    tensor = big()
    ref = ray.put(tensor) if way == "plain tensor" else put(tensor)
    expected = tensor.page_pool.view(np.uint64).sum()
    del tensor
    gc.collect()
    before = private_bytes()
    found = ray.get(ref) if way == "plain tensor" else get(ref, verify=way == "verified frame")
    assert "/dev/shm/" in mapping_of(found.page_pool.ctypes.data)
    assert found.page_pool.ctypes.data % 64 == 0
    assert not found.page_pool.flags.writeable
    assert found.page_pool.view(np.uint64).sum() == expected
    assert private_bytes() - before < NBYTES // 4
    again = ray.get(ref) if way == "plain tensor" else get(ref)
    assert again.page_pool.ctypes.data == found.page_pool.ctypes.data, "both are the same memory"


def test_putting_is_one_copy(ray: Any) -> None:
    """Of the pool where it lies, into the shared segment: nothing of its size in between."""
    tensor = big()
    put(tensor)
    gc.collect()
    before = private_bytes()
    ref = put(tensor)
    assert private_bytes() - before < NBYTES // 4
    assert get(ref).page_pool.ctypes.data != tensor.page_pool.ctypes.data


def test_between_actors(ray: Any) -> None:
    """One actor's frames, layer by layer as it makes them, are views in another's process."""

    class Prefill:
        def layers(self, count: int) -> Iterator[Any]:
            for layer in range(count):
                yield to_object(big().replace(layer_index=layer))

    class Decode:
        def take(self, value: Any, layer: int) -> tuple[str, bool, int, int]:
            before = private_bytes()
            found = from_object(value, expect={"layer_index": layer, "dtype": "float16"})
            grown = private_bytes() - before
            line = mapping_of(found.page_pool.ctypes.data)
            return line, found.page_pool.flags.writeable, grown, int(found.page_pool.view(np.uint64).sum())

        def refuse(self, value: Any) -> None:
            from_object(value, expect={"layer_index": 7})

    prefill, decode = ray.remote(Prefill).remote(), ray.remote(Decode).remote()
    expected = int(pool().view(np.uint64).sum())
    refs = []
    for layer, ref in enumerate(prefill.layers.options(num_returns="streaming").remote(2)):
        line, writeable, grown, total = ray.get(decode.take.remote(ref, layer))
        assert "/dev/shm/" in line
        assert not writeable
        assert grown < NBYTES // 4
        assert total == expected
        refs.append(ref)
    assert len(refs) == 2
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ray.get(decode.refuse.remote(refs[0]))
    assert isinstance(caught.value, hw.MismatchError), "our errors cross process borders whole"
    assert caught.value.differences[0].where == "layer_index"
    for actor in (prefill, decode):
        ray.kill(actor)


def test_errors_of_ray_are_rays(ray: Any) -> None:
    def never() -> None:
        raise ZeroDivisionError

    def late() -> None:
        time.sleep(600)

    with pytest.raises(ZeroDivisionError):
        get(ray.remote(never).remote())
    slow = ray.remote(late).remote()
    with pytest.raises(ray.exceptions.GetTimeoutError):
        get(slow, timeout=0.1)
    ray.cancel(slow, force=True)
