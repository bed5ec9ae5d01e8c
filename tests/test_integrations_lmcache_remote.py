"""The frames in LMCache's older remote backend, over its file connector and over its own server; no GPU, no engine."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from plugin_helpers import imported, quiet

import hurray_wire as hw

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers, which LMCache's serdes import, is not installed")
pytest.importorskip("lmcache.v1", reason="LMCache is not installed", exc_type=ImportError)


mine = imported("hurray_wire.integrations.lmcache_remote")
remote = imported("lmcache.v1.storage_backend.remote_backend")
cpu = imported("lmcache.v1.storage_backend.local_cpu_backend")
config = imported("lmcache.v1.config")
about = imported("lmcache.v1.metadata")
memory = imported("lmcache.v1.memory_management")
utils = imported("lmcache.utils")
server = imported("lmcache.v1.server.__main__")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LoggingHandler.*:DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

METADATA = about.LMCacheMetadata("tiny", 1, 1, 0, 0, torch.bfloat16, (3, 2, 64, 4, 32), chunk_size=64)
FULL = (2, 3, 64, 128)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


@pytest.fixture
def backend(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], tuple[Any, Any]]]:
    """LMCache's backend at a URL with "hrkv" configured by name, and the CPU backend that makes its objects."""
    monkeypatch.setattr(remote, "CreateSerde", mine.create_serde(remote.CreateSerde, page_size=16))
    made = []

    def make(url: str, metadata: Any = METADATA) -> tuple[Any, Any]:
        options = config.LMCacheEngineConfig.from_defaults(
            chunk_size=64, remote_url=url, remote_serde="hrkv", max_local_cpu_size=0.05, local_cpu=False
        )
        objects = cpu.LocalCPUBackend(options, metadata, dst_device="cpu")
        made.append(remote.RemoteBackend(options, metadata, loop, objects, "cpu"))
        return made[-1], objects

    yield make
    for each in made:
        each.close()


def key_of(number: int) -> Any:
    return utils.CacheEngineKey("tiny", 1, 0, number, torch.bfloat16)


def filled(objects: Any, shape: tuple[int, ...] = FULL, format: str = "KV_2LTD") -> Any:
    made = objects.allocate([torch.Size(shape)], [torch.bfloat16], memory.MemoryFormat[format])
    raw = np.random.default_rng(1).standard_normal(shape).astype(ml_dtypes.bfloat16)
    made.tensor.copy_(hw.to_torch(raw))
    return made


@pytest.mark.parametrize("tokens", [64, 10])
def test_through_its_file_connector(backend: Any, tmp_path: Path, tokens: int) -> None:
    store, objects = backend(f"fs://localhost:0/{tmp_path}")
    source = filled(objects, (2, 3, tokens, 128))
    store.submit_put_task(key_of(1), source).result(30)
    (file,) = tmp_path.iterdir()
    assert tokens < 64 or file.stat().st_size < 0.85 * source.get_size()
    found = store.get_blocking(key_of(1))
    assert torch.equal(found.tensor, source.tensor)
    assert found.get_memory_format() is memory.MemoryFormat.KV_2LTD
    source.ref_count_down()


def test_through_its_own_server(backend: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serving = server.LMCacheServer("127.0.0.1", port, "cpu")
    threading.Thread(target=serving.run, daemon=True).start()
    store, objects = backend(f"lm://127.0.0.1:{port}")
    source = filled(objects)
    store.submit_put_task(key_of(1), source).result(30)
    found = store.get_blocking(key_of(1))
    assert torch.equal(found.tensor, source.tensor)
    source.ref_count_down()


@pytest.mark.parametrize(
    ("format", "shape"), [("KV_T2D", (10, 2, 128)), ("KV_2TD", (2, 10, 128)), ("KV_2LTD", (2, 3, 5, 128))]
)
def test_layer_wise_objects(format: str, shape: tuple[int, ...]) -> None:
    serializer, deserializer = mine.remote_serde(METADATA, page_size=4, compression=None)
    source = object_of(shape, format)
    found = deserializer.deserialize(serializer.serialize(source))
    assert (found.get_memory_format().name, tuple(found.get_shape())) == (format, shape)
    assert torch.equal(found.tensor, source.tensor)


@pytest.mark.parametrize("shape", [(1, 3, 10, 72), (10, 72)])
def test_latents(shape: tuple[int, ...]) -> None:
    metadata = about.LMCacheMetadata("tiny", 1, 1, 0, 0, torch.bfloat16, (3, 1, 64, 1, 72), use_mla=True)
    serializer, deserializer = mine.remote_serde(metadata, page_size=4)
    source = object_of(shape, "KV_MLA_FMT")
    assert torch.equal(deserializer.deserialize(serializer.serialize(source)).tensor, source.tensor)


def object_of(shape: tuple[int, ...], format: str) -> Any:
    raw = np.random.default_rng(1).standard_normal(shape).astype(ml_dtypes.bfloat16)
    tensor = hw.to_torch(raw)
    fields = {"shape": tensor.shape, "dtype": tensor.dtype, "shapes": [tensor.shape], "dtypes": [tensor.dtype]}
    sizes = {"address": 0, "phy_size": raw.nbytes, "ref_count": 1, "fmt": memory.MemoryFormat[format]}
    return memory.TensorMemoryObj(
        tensor.reshape(-1).view(torch.uint8), memory.MemoryObjMetadata(**fields, **sizes), None
    )


@pytest.mark.parametrize(
    ("other", "where"),
    [
        (("other", 1, 1, 0, 0, torch.bfloat16, (3, 2, 64, 4, 32)), "model"),
        (("tiny", 2, 2, 1, 1, torch.bfloat16, (3, 2, 64, 4, 32)), "lmcache.worker_id"),
        (("tiny", 1, 1, 0, 0, torch.float16, (3, 2, 64, 4, 32)), "dtype"),
        (("tiny", 1, 1, 0, 0, torch.bfloat16, (3, 2, 64, 8, 16)), "num_heads"),
        (("tiny", 1, 1, 0, 0, torch.bfloat16, (4, 2, 64, 4, 32)), "lmcache.shapes"),
        (("tiny", 1, 1, 0, 0, torch.bfloat16, (3, 2, 32, 4, 32), False, None, None, 32), "lmcache.shapes"),
    ],
)
def test_another_worker_s_chunk_is_refused(other: Any, where: str) -> None:
    value = mine.remote_serde(METADATA, page_size=4)[0].serialize(object_of(FULL, "KV_2LTD"))
    _, deserializer = mine.remote_serde(about.LMCacheMetadata(*other), page_size=4)
    with pytest.raises(hw.MismatchError) as caught:
        deserializer.deserialize(value)
    assert where in {difference.where for difference in caught.value.differences}


def test_half_a_value_is_our_error() -> None:
    serializer, deserializer = mine.remote_serde(METADATA, page_size=4)
    value = serializer.serialize(object_of(FULL, "KV_2LTD"))
    half = memory.BytesBufferMemoryObj(bytes(value.byte_array[: len(value.byte_array) // 2]))
    with pytest.raises(hw.TruncatedError):
        deserializer.deserialize(half)


def test_memory_is_lmcache_s_and_is_given_back(backend: Any, tmp_path: Path) -> None:
    """The pool holds a hundred chunks: what is fetched, refused or sent does not stay in it."""
    store, objects = backend(f"fs://localhost:0/{tmp_path}")
    store.serializer, store.deserializer = mine.remote_serde(METADATA, page_size=16, allocate=objects.allocate)
    source = filled(objects)
    free = objects.memory_allocator.pin_allocator.num_active_allocations
    _, stranger = mine.remote_serde(
        about.LMCacheMetadata("other", 1, 1, 0, 0, torch.bfloat16, (3, 2, 64, 4, 32)),
        page_size=4,
        allocate=objects.allocate,
    )
    for number in range(150):
        store.submit_put_task(key_of(number), source).result(30)
        found = store.get_blocking(key_of(number))
        assert torch.equal(found.tensor, source.tensor)
        found.ref_count_down()
        with pytest.raises(hw.MismatchError):
            stranger.deserialize(store.serializer.serialize(source))
    assert objects.memory_allocator.pin_allocator.num_active_allocations == free
    source.ref_count_down()


@pytest.mark.parametrize("allocate", [None, lambda *_, **__: None])
def test_a_value_is_a_tensor_of_bytes(allocate: Any) -> None:
    """Of one dimension that is not 1, so that who fetches it allocates as for any chunk."""
    _, deserializer = mine.remote_serde(METADATA, page_size=4)
    value = mine.remote_serde(METADATA, page_size=4, allocate=allocate)[0].serialize(object_of(FULL, "KV_2LTD"))
    assert (value.get_dtype(), value.get_memory_format().name) == (torch.uint8, "KV_2LTD")
    assert list(value.get_shape()) == [1, 1, 1, len(value.byte_array)]
    older = memory.BytesBufferMemoryObj(bytes(value.byte_array))
    for each in (value, older):
        assert torch.equal(deserializer.deserialize(each).tensor, object_of(FULL, "KV_2LTD").tensor)


def test_no_room_is_none() -> None:
    serializer, deserializer = mine.remote_serde(METADATA, page_size=4, allocate=lambda *_, **__: None)
    assert deserializer.deserialize(serializer.serialize(object_of(FULL, "KV_2LTD"))) is None
