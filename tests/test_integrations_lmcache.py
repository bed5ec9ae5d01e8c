"""The serde in LMCache's own storage: its registry, memory objects, file adapter and wrapper; no GPU, no engine."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from lmcache_helpers import imported, quiet
from support import FIXTURES, ROOT

import hurray_wire as hw
from hurray_wire.errors import Code
from hurray_wire.integrations.chunks import ChunkForm

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache.v1", reason="LMCache is not installed", exc_type=ImportError)
sys.path.insert(0, str(ROOT / "examples"))


example = imported("lmcache_serde")
mine = imported("hurray_wire.integrations.lmcache")
theirs = imported("lmcache.v1.distributed.serde")
api = imported("lmcache.v1.distributed.api")
memory = imported("lmcache.v1.memory_management")
pytestmark = pytest.mark.filterwarnings("ignore:.*LoggingHandler.*:DeprecationWarning")

REAL = FIXTURES / "real"
OPTIONS = {"page_size": 16, "num_heads": 4}
LAYOUT = api.MemoryLayoutDesc([torch.Size([2, 3, 64, 4 * 32])], [torch.bfloat16])


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Any]:
    made = example.Storage(tmp_path, OPTIONS)
    yield made
    made.close()


def filled(storage: Any, key: Any, layout: Any = LAYOUT, seed: int = 1) -> Any:
    made = storage.new(key, layout)
    raw = np.random.default_rng(seed).standard_normal(tuple(made.tensor.shape)).astype(ml_dtypes.bfloat16)
    made.tensor.copy_(hw.to_torch(raw))
    return made


def object_of(array: Any, format: str) -> Any:
    """A memory object of LMCache's over an array."""
    tensor = hw.to_torch(np.ascontiguousarray(array))
    shape, dtype = tensor.shape, tensor.dtype
    about = memory.MemoryObjMetadata(
        shape=shape,
        dtype=dtype,
        address=0,
        phy_size=array.nbytes,
        ref_count=1,
        fmt=memory.MemoryFormat[format],
        shapes=[shape],
        dtypes=[dtype],
    )
    return memory.TensorMemoryObj(tensor.reshape(-1).view(torch.uint8), about, None)


def buffer_of(nbytes: int) -> Any:
    return object_of(np.full(nbytes, 0xEE, np.uint8), "BINARY")


def snapshot() -> list[Any]:
    """The real sequences as chunks, `[2, 1, tokens, heads * dim]`."""
    about = json.loads((REAL / "snapshot.json").read_text())
    table, ptr, lens = (about[name] for name in ("block_table", "seq_ptr", "seq_lens"))
    pools = [np.load(REAL / f"{role}_pool.npy").view(ml_dtypes.bfloat16) for role in ("key", "value")]
    return [
        np.stack([pool[table[a:b]].reshape(-1, 384)[:n] for pool in pools])[:, None]
        for a, b, n in zip(ptr, ptr[1:], lens, strict=False)
    ]


# The pair on its own, as LMCache calls it.


@pytest.mark.parametrize("fit", [1.0, None])
@pytest.mark.parametrize(
    ("format", "shape"),
    [
        ("KV_2LTD", (2, 3, 10, 128)),
        ("KV_T2D", (10, 2, 128)),
        ("KV_2TD", (2, 10, 128)),
        ("KV_MLA_FMT", (1, 3, 10, 72)),
        ("KV_MLA_FMT", (10, 72)),
    ],
)
def test_formats_round_trip_through_its_objects(format: str, shape: tuple[int, ...], fit: float | None) -> None:
    form = ChunkForm(page_size=4, num_heads=4)
    serializer = mine.HrkvSerializer(form, format=format, fit=fit)
    source = object_of(np.random.default_rng(0).standard_normal(shape).astype(np.float16), format)
    value = buffer_of(
        serializer.estimate_serialized_size(api.MemoryLayoutDesc(source.get_shapes(), source.get_dtypes()))
    )
    size = serializer.serialize(source, value, example.key_of(1))
    assert (size == value.get_size()) == (fit is not None)
    value.set_used_size(size)
    target = object_of(np.zeros(shape, np.float16), format)
    mine.HrkvDeserializer(form, format=format).deserialize(value, target, example.key_of(1))
    assert torch.equal(target.tensor, source.tensor)
    first = hw.decode_from(value.byte_array)[0]
    said = first.metadata or {}
    assert (first.page_size, said["model"], said["lmcache.format"]) == (4, "tiny/llama", format)


@pytest.mark.parametrize("format", ["BINARY", "EC_TD", "HS_TD"])
def test_objects_of_other_formats_are_refused_by_name(format: str) -> None:
    serializer = mine.HrkvSerializer(ChunkForm(page_size=4, num_heads=4))
    for source in (object_of(np.zeros((10, 128), np.float16), format), memory.BytesBufferMemoryObj(b"abc")):
        said = source.get_memory_format().name
        with pytest.raises(hw.UnsupportedError, match=f"^format: {said}:") as caught:
            serializer.serialize(source, buffer_of(1 << 16), example.key_of(1))
        assert caught.value.code is Code.LAYOUT


def test_every_format_of_lmcache_is_known() -> None:
    """A member that is new is refused as not known; those of today are all decided."""
    chunks = importlib.import_module("hurray_wire.integrations.chunk_forms")
    assert {member.name for member in memory.MemoryFormat} == {*chunks.FORMATS, *chunks._REFUSED}


@pytest.mark.parametrize("change", ["model_name", "kv_rank", "object_group_id", "chunk_hash"])
def test_another_key_s_value_is_refused(change: str) -> None:
    form = ChunkForm(page_size=4, num_heads=4)
    source, value = object_of(np.ones((2, 1, 8, 128), np.float16), "KV_2LTD"), buffer_of(1 << 16)
    mine.HrkvSerializer(form).serialize(source, value, example.key_of(1))
    other = {"model_name": "m", "kv_rank": 5, "object_group_id": 1, "chunk_hash": b"x"}[change]
    fields = {name: getattr(example.key_of(1), name) for name in ("chunk_hash", "model_name", "kv_rank")}
    with pytest.raises(hw.MismatchError):
        mine.HrkvDeserializer(form).deserialize(value, source, api.ObjectKey(**{**fields, change: other}))


# Its storage.


def test_the_registry_has_it_once() -> None:
    mine.register()
    mine.register()
    assert theirs.get_registered_serde_types().count("hrkv") == 1
    for options, word in (({"page_size": 16}, "num_heads"), ({**OPTIONS, "level": 3}, "level")):
        with pytest.raises(ValueError, match=word):
            theirs.create_serde_processor(theirs.SerdeConfig("hrkv", options))
    with pytest.raises(ValueError, match="fit"):
        mine.serde({**OPTIONS, "fit": 1.5})


def test_a_chunk_is_stored_and_loaded(storage: Any, tmp_path: Path) -> None:
    key = example.key_of(1)
    source, target = filled(storage, key), filled(storage, example.key_of(2), seed=2)
    assert storage.store(key, source)
    assert storage.load(key, target)
    assert torch.equal(target.tensor, source.tensor)
    (file,) = tmp_path.iterdir()
    first = hw.decode_from(file.read_bytes())[0]
    assert (first.dtype.name, first.page_size, first.num_heads) == ("bfloat16", 16, 4)
    assert file.stat().st_size % 4096 == 0


def faulty(data: bytes, fault: str) -> bytes:
    if fault == "half":
        return data[: len(data) // 2] + bytes(len(data) - len(data) // 2)
    if fault == "flipped":
        spot = len(data) // 3
        return data[:spot] + bytes([data[spot] ^ 4]) + data[spot + 1 :]
    return bytes(len(data))


@pytest.mark.parametrize("fault", ["half", "flipped", "zeros", "short"])
def test_a_faulty_value_is_a_miss(storage: Any, tmp_path: Path, fault: str) -> None:
    key = example.key_of(1)
    source = filled(storage, key)
    assert storage.store(key, source)
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] if fault == "short" else faulty(data, fault))
    assert not storage.load(key, filled(storage, example.key_of(2), seed=2))
    file.write_bytes(data)
    assert storage.load(key, filled(storage, example.key_of(3), seed=2))


def test_another_worker_s_geometry_is_a_miss(storage: Any, tmp_path: Path) -> None:
    key = example.key_of(1)
    assert storage.store(key, filled(storage, key))
    for other in (
        api.MemoryLayoutDesc([torch.Size([2, 3, 64, 4 * 32])], [torch.float16]),  # fp16 read as bf16: same bytes
        api.MemoryLayoutDesc([torch.Size([2, 6, 32, 4 * 32])], [torch.bfloat16]),
    ):
        target = storage.new(example.key_of(9), other)
        assert not storage.load(key, target)
        storage.memory.finish_write_and_delete([example.key_of(9)], tag="example")
    second = example.Storage(tmp_path, {**OPTIONS, "num_heads": 2})
    assert not second.load(key, second.new(key, LAYOUT))
    second.close()


def test_a_share_of_the_raw_size_holds_real_values_and_refuses_noise(tmp_path: Path) -> None:
    chunk = snapshot()[0][:, :, :128]
    options = {"page_size": 16, "num_heads": 12, "compression": "zstd", "fit": 0.8}
    storage = example.Storage(tmp_path, options)
    layout = api.MemoryLayoutDesc([torch.Size(chunk.shape)], [torch.bfloat16])
    source, target = (storage.new(example.key_of(i), layout) for i in (1, 2))
    source.tensor.copy_(hw.to_torch(np.ascontiguousarray(chunk)))
    assert storage.store(example.key_of(1), source)
    assert storage.load(example.key_of(1), target)
    assert torch.equal(target.tensor, source.tensor)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size < 0.82 * chunk.nbytes
    noise = np.frombuffer(np.random.default_rng(0).bytes(chunk.nbytes), np.int16).reshape(chunk.shape).copy()
    source.tensor.view(torch.int16).copy_(torch.from_numpy(noise))
    assert not storage.store(example.key_of(3), source)
    assert list(tmp_path.iterdir()) == [file]
    storage.close()


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    assert "under another model's key: loaded False" in capsys.readouterr().out
