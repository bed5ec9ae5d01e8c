"""The connector in vLLM's order, over vLLM's own base class where it is installed: two instances, one folder."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm_driver
from vllm_driver import Geometry, Instance, Request, config

import hurray_wire as hw
from hurray_wire.errors import Code

MODULE, REAL = vllm_driver.load()
TORCH = importlib.util.find_spec("torch") is not None
PROMPT = list(range(100, 130))
SMALL, LARGE = Geometry(), Geometry(axes="2PSHD", blocks=25, block_size=8)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def instance(folder: Path, geometry: Geometry = SMALL, **options: Any) -> Instance:
    driver = {
        name: options.pop(name)
        for name in ("first_block", "lookahead", "budget", "drafts", "torch", "loads_first")
        if name in options
    }
    settings = config(folder, block_size=geometry.block_size, axes=geometry.axes, **options)
    return Instance(MODULE, settings, geometry, **driver)


@pytest.mark.skipif(not REAL, reason="vLLM is not installed: its base class is a stand-in")
def test_the_base_class_is_whole() -> None:
    """Nothing abstract is left, and each method takes what vLLM hands over."""
    base = importlib.import_module(vllm_driver.BASE).KVConnectorBase_V1
    ours = MODULE.HrkvConnector
    assert issubclass(ours, base)
    assert not ours.__abstractmethods__
    checked = [name for name in vars(ours) if not name.startswith("_") and callable(getattr(base, name, None))]
    assert len(checked) > 12
    for name in checked:
        mine, theirs = (list(inspect.signature(getattr(each, name)).parameters) for each in (ours, base))
        assert mine == theirs, name


@pytest.mark.parametrize("torch", [False, pytest.param(True, marks=pytest.mark.skipif(not TORCH, reason="no torch"))])
@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize(
    "other",
    [
        SMALL,
        LARGE,
        Geometry(axes="P2SHD", block_size=2, blocks=60),
        Geometry(axes="PSHC", block_size=8),
        Geometry(axes="cpu", block_size=8),
    ],
)
def test_one_instance_loads_what_another_computed(
    tmp_path: Path, other: Geometry, compression: Any, layerwise: bool, torch: bool
) -> None:
    options = {"compression": compression, "layerwise": layerwise, "torch": torch}
    first, second = instance(tmp_path, **options), instance(tmp_path, other, first_block=11, **options)
    here, there = Request("a", PROMPT), Request("b", PROMPT)
    assert first.run(here) == 30
    assert second.run(there) == 30 - 24
    for each, request in ((first, here), (second, there)):
        each.check(request)
        assert not each.worker.take_failures()
        assert not each.failed_blocks
    assert first.run(Request("c", [*PROMPT[:17], 7, 8, 9])) == 20 - 16, "a shared prefix"
    assert second.run(Request("d", [7, *PROMPT])) == 31, "the same tokens elsewhere"


def test_latents(tmp_path: Path) -> None:
    geometries = [Geometry(axes="latent", dim=12, block_size=size) for size in (4, 8)]
    first, second = (instance(tmp_path, geometry) for geometry in geometries)
    assert first.run(Request("a", PROMPT)) == 30
    request = Request("b", PROMPT)
    assert second.run(request) == 6
    second.check(request)


def test_a_longer_prompt_keeps_only_what_is_new(tmp_path: Path) -> None:
    first = instance(tmp_path)
    first.run(Request("a", PROMPT))
    before = set(files(tmp_path))
    longer = Request("b", [*PROMPT, *range(500, 530)])
    assert first.run(longer) == 60 - 24
    first.check(longer)
    assert {path.stat().st_ino for path in files(tmp_path)} - {path.stat().st_ino for path in before}
    again = Request("c", [*PROMPT, *range(500, 530)])
    second = instance(tmp_path, LARGE)
    assert second.run(again) == 60 - 56
    second.check(again)
    assert len({path.stat().st_ino for path in files(tmp_path)}) == 2, "a file a step that kept something"


@pytest.mark.parametrize("local", [4, 8, 12, 24, 28])
def test_tokens_that_are_there_already_are_not_loaded(tmp_path: Path, local: int) -> None:
    first = instance(tmp_path)
    first.run(Request("a", PROMPT))
    request = Request("b", PROMPT)
    second = instance(tmp_path)
    request.block_ids = second._allocate(request, local) or request.block_ids
    for layer, cache in enumerate(second.caches.values()):  # what its own prefix cache held
        for at in range(local):
            second.geometry.put(cache, request.block_ids[at // 4], at % 4, SMALL.token(PROMPT[: at + 1], layer))
    assert second.run(request, local=local) == 30 - max(24, local)
    second.check(request)


@pytest.mark.parametrize("loads_first", [False, True])
@pytest.mark.parametrize("budget", [3, 7, 8, 11])
@pytest.mark.parametrize("lookahead", [0, 2])
def test_chunked_prefill_and_blocks_ahead(tmp_path: Path, budget: int, lookahead: int, loads_first: bool) -> None:
    first = instance(tmp_path, budget=budget, lookahead=lookahead, loads_first=loads_first)
    request = Request("a", PROMPT)
    assert first.run(request) == 30
    first.check(request)
    second = instance(tmp_path, LARGE, lookahead=lookahead)
    loaded = Request("b", PROMPT)
    assert second.run(loaded) == 6
    second.check(loaded)


def test_generated_tokens_are_kept_when_they_are_certain(tmp_path: Path) -> None:
    """Drafts are scheduled and computed with the rest; none is ever in a file."""
    first = instance(tmp_path, drafts=3)
    request = Request("a", PROMPT, to_generate=12)
    first.run(request)
    whole = list(request.all_token_ids)
    assert len(whole) == 42
    second = instance(tmp_path)
    again = Request("b", whole)
    assert second.run(again) == 42 - 40
    second.check(again)


def test_a_preempted_request_gets_new_blocks(tmp_path: Path) -> None:
    first = instance(tmp_path, budget=10)
    request = Request("a", PROMPT)
    first.step([request])
    first.preempt(request)
    assert first.run(request, local=0) == 30 - 8
    first.check(request)


def test_several_requests_in_a_step(tmp_path: Path) -> None:
    prompts = [[i, *PROMPT] for i in range(4)]
    first, second = instance(tmp_path, Geometry(blocks=90)), instance(tmp_path, LARGE)
    first.run(*(Request(f"a{i}", prompt) for i, prompt in enumerate(prompts)))
    there = [Request(f"b{i}", prompt) for i, prompt in enumerate(prompts)]
    assert second.run(*there) == 4 * (31 - 24)
    for request in there:
        second.check(request)


# Whose it is.


@pytest.mark.parametrize(
    "other",
    [
        {"lora_request": type("Lora", (), {"lora_name": "x", "lora_path": "/x"})},
        {"cache_salt": "mine"},
        {"mm_features": [type("Image", (), {"identifier": "cat"})]},
        {"prompt_embeds": np.zeros(3)},
        {"skip_reading_prefix_cache": True},
    ],
)
def test_requests_that_differ_in_more_than_tokens(tmp_path: Path, other: Any) -> None:
    first = instance(tmp_path)
    first.run(Request("a", PROMPT))
    assert first.run(Request("b", PROMPT, **other)) == 30


@pytest.mark.parametrize("other", [{"model": "other"}, {"revision": "2"}, {"cache_dtype": "float32"}])
def test_other_models_find_nothing(tmp_path: Path, other: Any) -> None:
    instance(tmp_path).run(Request("a", PROMPT))
    options = {"model": "tiny", **other}
    settings = config(tmp_path, axes="PHSC", **{k: v for k, v in options.items() if k != "model"})
    settings.model_config.model = options["model"]
    assert Instance(MODULE, settings, SMALL).run(Request("b", PROMPT)) == 30


def test_roles(tmp_path: Path) -> None:
    reader = instance(tmp_path, transfer={"is_kv_producer": False})
    reader.run(Request("a", PROMPT))
    assert files(tmp_path) == []
    writer = instance(tmp_path, transfer={"is_kv_consumer": False})
    assert [writer.run(Request(name, PROMPT)) for name in "bc"] == [30, 30]
    assert reader.run(Request("d", PROMPT)) == 6


def test_a_chunk_is_there_when_all_ranks_have_kept_theirs(tmp_path: Path) -> None:
    ranks = [instance(tmp_path, parallel={"tensor_parallel_size": 2, "rank": rank}) for rank in (0, 1)]
    ranks[0].run(Request("a", PROMPT))
    assert ranks[0].run(Request("b", PROMPT)) == 30
    ranks[1].run(Request("c", PROMPT))
    assert [each.run(Request("d", PROMPT)) for each in ranks] == [6, 6]


def test_a_frame_says_what_it_is(tmp_path: Path) -> None:
    first = instance(tmp_path, revision="7")
    first.run(Request("a", PROMPT))
    tensors = list(hw.iter_decode(files(tmp_path)[0].read_bytes()))
    assert [(t.kv_role, t.layer_index) for t in tensors] == [(r, i) for i in range(3) for r in ("key", "value")]
    about = tensors[2].metadata
    assert about is not None
    assert (about["model"], about["revision"], about["first_tokens"]) == ("tiny", "7", [0])
    assert about["vllm.layer"] == "model.layers.1.self_attn.attn"
    assert len(about["vllm.keys"]) == 3


# What goes wrong.


def broken(path: Path, fault: str) -> None:
    """Damage a file in place, so that all of its names lead to it."""
    data = bytearray(path.read_bytes())
    if fault == "half":
        del data[len(data) // 2 :]
    elif fault == "empty":
        data.clear()
    elif fault == "flipped":
        data[len(data) // 2] ^= 1
    elif fault == "overwritten":  # the first half is another writer's
        other = list(hw.iter_decode(data))
        new = b"".join(hw.encode(t, sequence=i, last=i == len(other) - 1, stream_id=1) for i, t in enumerate(other))
        data[: len(data) // 2] = new[: len(data) // 2]
    elif fault == "newer":
        data[8] = 2
        end = int.from_bytes(data[16:20], "little") - 8
        data[end : end + 8] = _digest(bytes(data[:end]))
    with path.open("r+b") as file:
        file.truncate(0)
        file.write(data)


def _digest(header: bytes) -> bytes:
    import xxhash

    return xxhash.xxh3_64_intdigest(header).to_bytes(8, "little")


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("half", hw.TruncatedError),
        ("empty", hw.TruncatedError),
        ("flipped", hw.ChecksumError),
        ("overwritten", hw.FrameError),
        ("newer", hw.UnsupportedError),
    ],
)
def test_a_faulty_file_is_computed_anew(tmp_path: Path, fault: str, error: Any, layerwise: bool) -> None:
    instance(tmp_path).run(Request("a", PROMPT))
    broken(files(tmp_path)[0], fault)
    second = instance(tmp_path, LARGE, first_block=5, layerwise=layerwise)
    request = Request("b", PROMPT)
    second.run(request)
    second.check(request)
    (failure,) = second.worker.take_failures()
    assert (failure.request_id, failure.verb) == ("b", "load")
    assert isinstance(failure.error, error)
    assert second.failed_blocks == {5, 6, 7}
    if error is not hw.UnsupportedError:  # what nobody can read has been replaced
        third = instance(tmp_path)
        assert third.run(Request("c", PROMPT)) == 6
        assert not third.worker.take_failures()


def test_a_failure_that_is_told_a_step_later(tmp_path: Path) -> None:
    """Steps are scheduled ahead of what their workers say."""
    instance(tmp_path).run(Request("a", PROMPT))
    scheduler = (second := instance(tmp_path)).scheduler
    requests = Request("b", PROMPT), Request("c", PROMPT)
    for request in requests:
        scheduler.build_connector_meta(second.schedule([request])[0])
    told = SimpleNamespace(invalid_block_ids={requests[0].block_ids[1]})
    scheduler.update_connector_output(told)
    assert [scheduler.get_num_new_matched_tokens(request, 0) for request in requests] == [(0, False), (24, False)]


def test_a_file_that_is_gone_between_look_and_load(tmp_path: Path) -> None:
    instance(tmp_path).run(Request("a", PROMPT))
    second = instance(tmp_path)
    matched = second.scheduler.get_num_new_matched_tokens

    def and_gone(request: Any, computed: int) -> Any:
        found = matched(request, computed)
        for path in files(tmp_path) if request.request_id == "gone" else []:
            path.unlink()
        return found if found[0] else (24, False)

    second.scheduler.get_num_new_matched_tokens = and_gone
    request = Request("gone", PROMPT)
    output, _ = second.schedule([request])
    second.worker.bind_connector_metadata(second.scheduler.build_connector_meta(output))
    second.worker.start_load_kv(None)
    (failure,) = second.worker.take_failures()
    assert isinstance(failure.error, hw.StoreError)
    assert second.worker.get_block_ids_with_load_errors() == set(request.block_ids[:6])


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    """The reader has the old file: a name that leads elsewhere meanwhile is of no account."""
    instance(tmp_path).run(Request("a", PROMPT))
    second = instance(tmp_path)
    waited = second.worker.wait_for_layer_load

    def and_replaced(name: str) -> None:
        waited(name)
        for path in files(tmp_path):
            beside = path.with_suffix(".new")
            beside.write_bytes(b"another's")
            beside.replace(path)

    second.worker.wait_for_layer_load = and_replaced
    request = Request("b", PROMPT)
    assert second.run(request) == 6
    second.check(request)


@pytest.mark.parametrize(
    ("geometry", "where"),
    [(Geometry(heads=3), "num_heads"), (Geometry(dtype=np.int16), "dtype"), (Geometry(dim=4), "head_dim")],
)
def test_another_geometry_under_the_same_name_is_refused(tmp_path: Path, geometry: Geometry, where: str) -> None:
    instance(tmp_path).run(Request("a", PROMPT))
    second = instance(tmp_path, geometry)
    request = Request("b", PROMPT)
    assert second.run(request) == 30 + 6
    second.check(request)
    (failure,) = second.worker.take_failures()
    assert failure.verb == "load"
    assert isinstance(failure.error, hw.MismatchError)
    assert {difference.where for difference in failure.error.differences} == {where}


def test_another_file_under_a_chunk_s_name_is_refused(tmp_path: Path) -> None:
    first = instance(tmp_path)
    first.run(Request("a", PROMPT))
    ours = files(tmp_path)
    first.run(Request("b", [5, *PROMPT]))
    (stranger,) = {path.stat().st_ino: path for path in files(tmp_path) if path not in ours}.values()
    for path in ours:
        path.unlink()
        path.hardlink_to(stranger)
    second = instance(tmp_path, strict=True)
    with pytest.raises(hw.MismatchError) as caught:
        second.run(Request("c", PROMPT))
    assert {difference.where for difference in caught.value.differences} == {"vllm.keys"}


def test_a_scale_that_is_not_the_layer_s_is_refused(tmp_path: Path) -> None:
    import ml_dtypes

    geometry = Geometry(dtype=ml_dtypes.float8_e4m3fn)
    names = [f"model.layers.{i}.self_attn.attn" for i in range(3)]

    def layers(scale: float) -> Any:
        return {name: type("Layer", (), {"_k_scale": np.float32(scale), "_v_scale": np.float32(1)}) for name in names}

    first = instance(tmp_path, geometry, cache_dtype="fp8_e4m3", layers=layers(0.5))
    first.run(Request("a", PROMPT))
    assert instance(tmp_path, geometry, cache_dtype="fp8_e4m3", layers=layers(0.5)).run(Request("b", PROMPT)) == 6
    other = instance(tmp_path, geometry, cache_dtype="fp8_e4m3", layers=layers(0.25))
    assert other.run(Request("c", PROMPT)) == 36
    (failure,) = other.worker.take_failures()
    assert "quantization" in str(failure.error)


def test_a_full_disk_keeps_nothing_and_stops_nobody(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands for it: writes end in the middle of a frame."""
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    first = instance(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        request = Request("a", PROMPT)
        assert first.run(request) == 30
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    first.check(request)
    (failure,) = first.worker.take_failures()
    assert (failure.verb, type(failure.error), failure.error.code) == ("save", hw.StoreError, Code.STORE)
    assert files(tmp_path) == []
    assert first.run(Request("b", PROMPT)) == 30
    assert len(files(tmp_path)) == 3


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    first = instance(tmp_path / "file" / "folder", strict=True)
    with pytest.raises(hw.StoreError):
        first.run(Request("a", PROMPT))


def test_a_step_that_ends_early_leaves_nothing(tmp_path: Path) -> None:
    first = instance(tmp_path)
    output, _ = first.schedule([Request("a", PROMPT)])
    first.worker.bind_connector_metadata(first.scheduler.build_connector_meta(output))
    first.worker.start_load_kv(None)
    name = next(iter(first.caches))
    first.worker.save_kv_layer(name, first.handed[name], None)
    first.worker.wait_for_save()  # one layer of three
    assert files(tmp_path) == []
    first.worker.shutdown()


# Settings.


@pytest.mark.parametrize(
    ("options", "word"),
    [({"chunk_tokens": 6}, "chunk_tokens"), ({"chunk_tokens": 0}, "chunk"), ({"level": 1}, "level")],
)
def test_settings_are_checked(tmp_path: Path, options: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        instance(tmp_path, **options)


def test_windows_and_states_are_refused_by_name(tmp_path: Path) -> None:
    def groups(*names: str) -> Any:
        made = [type("Group", (), {"kv_cache_spec": type(name, (), {})()}) for name in names]
        return type("Config", (), {"kv_cache_groups": made})

    role = MODULE.KVConnectorRole.WORKER
    for names in (("SlidingWindowSpec",), ("FullAttentionSpec", "MambaSpec")):
        with pytest.raises(hw.UnsupportedError, match=names[-1]) as caught:
            MODULE.HrkvConnector(config(tmp_path), role, groups(*names))
        assert caught.value.code is Code.LAYOUT
    MODULE.HrkvConnector(config(tmp_path), role, groups("MLAAttentionSpec"))


def test_what_vllm_asks_of_the_class(tmp_path: Path) -> None:
    ours = MODULE.HrkvConnector
    assert ours.requires_piecewise_for_cudagraph({})
    assert not ours.requires_piecewise_for_cudagraph({"layerwise": False})
    assert not ours(config(tmp_path), MODULE.KVConnectorRole.WORKER, None).requires_kv_delivery
