"""The connector over streams, in vLLM's order: one instance sends what it computes, the other loads it as it comes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest
import vllm_driver
from plugin_helpers import newer, until
from vllm_driver import Geometry, Instance, Request, config

import hurray_wire as hw
from hurray_wire.integrations import segment_streams

MODULE, _ = vllm_driver.load()
PROMPT = list(range(100, 130))
SMALL, LARGE = Geometry(), Geometry(axes="2PSHD", blocks=25, block_size=8)
Make = Callable[..., Instance]


@pytest.fixture
def pair() -> Iterator[Make]:
    """`make("peer" | "listen", geometry, ...)`: the two ends of one address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    made: list[Instance] = []

    def make(end: str, geometry: Geometry = SMALL, **options: Any) -> Instance:
        driver = {name: options.pop(name) for name in ("first_block", "budget") if name in options}
        settings = config(None, block_size=geometry.block_size, axes=geometry.axes, **{end: address}, **options)
        made.append(Instance(MODULE, settings, geometry, **driver))
        return made[-1]

    yield make
    for each in made:
        each.worker.shutdown()
        each.scheduler.shutdown()


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("other", [SMALL, LARGE, Geometry(axes="PSHC", block_size=8), Geometry(axes="cpu")])
def test_one_instance_loads_what_another_sends(pair: Make, other: Geometry, compression: Any, layerwise: bool) -> None:
    options = {"compression": compression, "layerwise": layerwise}
    decode = pair("listen", other, first_block=11, **options)
    prefill = pair("peer", **options)
    here, there = Request("a", PROMPT), Request("b", PROMPT)
    assert prefill.run(here) == 30
    assert decode.run(there) == 30 - 24
    for each, request in ((prefill, here), (decode, there)):
        each.check(request)
        assert not each.worker.take_failures()
        assert not each.failed_blocks
    assert prefill.run(Request("c", PROMPT)) == 30, "an instance that only sends computes all it is asked"
    longer = Request("d", [*PROMPT, *range(500, 530)])
    prefill.run(longer)
    again = Request("e", [*PROMPT, *range(500, 530)])
    assert decode.run(again) == 60 - 56, "of two segments"
    decode.check(again)


def test_a_chunk_is_sent_once(pair: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pair("listen")
    sent: list[Any] = []
    made = segment_streams.StreamedSegmentWriter

    def counted(address: Any, keys: Any, *rest: Any) -> Any:
        sent.append(list(keys))
        return made(address, keys, *rest)

    monkeypatch.setattr(segment_streams, "StreamedSegmentWriter", counted)
    for name in "ab":  # the second instance knows nothing of the first one's
        pair("peer").run(Request(name, PROMPT))
    assert [len(keys) for keys in sent] == [3]


def test_a_layer_is_loaded_while_the_next_one_is_computed(pair: Make) -> None:
    """The model of the one end waits, a layer behind the other's."""
    decode, prefill = pair("listen", LARGE), pair("peer")
    here, there = Request("a", PROMPT), Request("b", PROMPT)
    output, planned = prefill.schedule([here])
    sender = prefill.worker
    sender.bind_connector_metadata(prefill.scheduler.build_connector_meta(output))
    names = list(prefill.caches)
    reached: list[str] = []
    for layer, name in enumerate(names):
        prefill.forward(planned, layer, prefill.caches[name])
        sender.save_kv_layer(name, prefill.handed[name], None)
        if not layer:
            until(lambda: decode.scheduler.get_num_new_matched_tokens(there, 0)[0] > 0)  # its first byte has come
            step, _ = decode.schedule([there])
            assert there.num_computed == 24
            decode.worker.bind_connector_metadata(decode.scheduler.build_connector_meta(step))
            decode.worker.start_load_kv(None)
        decode.worker.wait_for_layer_load(name)
        values = [decode.geometry.get(decode.caches[name], there.block_ids[0], 0), SMALL.token(PROMPT[:1], layer)]
        assert (values[0] == values[1]).all()
        reached.append(name)
    sender.wait_for_save()
    decode.worker.wait_for_save()
    assert reached == names
    assert not decode.worker.take_failures() + sender.take_failures()


def broken_off(data: bytes) -> bytes:
    """All but the closing frame, and half of the last frame with it."""
    return data[: len(data) * 3 // 4]


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize(
    ("change", "error", "found"),
    [
        (flipped, hw.FrameError, True),
        (newer, hw.UnsupportedError, True),
        (broken_off, None, False),
    ],
)
def test_what_is_not_as_it_was_sent_is_computed(
    pair: Make, monkeypatch: pytest.MonkeyPatch, change: Any, error: Any, found: bool, layerwise: bool
) -> None:
    decode = pair("listen", LARGE, first_block=5, layerwise=layerwise)
    with monkeypatch.context() as patched:
        _change_on_the_way(patched, change)
        prefill = pair("peer")
        prefill.run(Request("a", PROMPT))
        failures = prefill.worker.take_failures()
    assert [type(failure.error) for failure in failures] == ([] if found else [hw.StoreError])
    request = Request("b", PROMPT)
    decode.run(request)
    decode.check(request)
    failures = decode.worker.take_failures()
    assert [isinstance(failure.error, error) for failure in failures] == ([True] if found else [])
    assert decode.failed_blocks == ({5, 6, 7} if found else set())
    if error is not hw.UnsupportedError:  # it was given up, and a sound one takes its place
        pair("peer").run(Request("c", PROMPT))
        again = Request("d", PROMPT)
        assert decode.run(again) == 6
        decode.check(again)


def _change_on_the_way(patched: pytest.MonkeyPatch, change: Callable[[bytes], bytes]) -> None:
    """A connection whose stream is kept back to its end, and then sent as it was changed."""

    class Changing(hw.StreamWriter):
        def __init__(self, sock: Any, *, timeout: Any, **options: Any) -> None:
            self._sent: list[bytes] = []
            self._to = sock
            super().__init__(lambda parts: self._sent.extend(map(bytes, parts)), **options)

        def finish(self) -> None:
            super().finish()
            self._to.sendall(change(b"".join(self._sent)))

    patched.setattr(segment_streams, "StreamWriter", Changing)


def test_a_sender_that_dies_while_layers_are_loaded(pair: Make) -> None:
    """The layers that came are given up with the rest."""
    decode, prefill = pair("listen", first_block=3), pair("peer")
    here, there = Request("a", PROMPT), Request("b", PROMPT)
    output, planned = prefill.schedule([here])
    prefill.worker.bind_connector_metadata(prefill.scheduler.build_connector_meta(output))
    name = next(iter(prefill.caches))
    prefill.forward(planned, 0, prefill.caches[name])
    prefill.worker.save_kv_layer(name, prefill.handed[name], None)
    step, _ = decode.schedule([there])
    decode.worker.bind_connector_metadata(decode.scheduler.build_connector_meta(step))
    decode.worker.start_load_kv(None)
    decode.worker.wait_for_layer_load(name)
    thread = Thread(target=prefill.worker.shutdown)
    thread.start()
    for layer in decode.caches:
        decode.worker.wait_for_layer_load(layer)
    thread.join()
    (failure,) = decode.worker.take_failures()
    assert isinstance(failure.error, hw.TruncatedError)
    assert decode.worker.get_block_ids_with_load_errors() == set(there.block_ids[:6])
    decode.worker.wait_for_save()


@pytest.mark.parametrize(("other", "where"), [(Geometry(heads=3), "num_heads"), (Geometry(dim=4), "head_dim")])
def test_another_geometry_is_refused(pair: Make, other: Geometry, where: str) -> None:
    decode = pair("listen", other)
    pair("peer").run(Request("a", PROMPT))
    request = Request("b", PROMPT)
    decode.run(request)
    decode.check(request)
    (failure,) = decode.worker.take_failures()
    assert isinstance(failure.error, hw.MismatchError)
    assert {difference.where for difference in failure.error.differences} == {where}


def test_another_model_finds_nothing(pair: Make) -> None:
    decode = pair("listen", revision="2")
    pair("peer").run(Request("a", PROMPT))
    assert decode.run(Request("b", PROMPT)) == 30


def test_nobody_listens(pair: Make) -> None:
    prefill, request = pair("peer"), Request("a", PROMPT)
    assert prefill.run(request) == 30
    prefill.check(request)
    (failure,) = prefill.worker.take_failures()
    assert (failure.verb, type(failure.error)) == ("save", hw.StoreError)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"timeout": 3},
        {"folder": "/tmp", "peer": "a:1"},
        {"folder": "/tmp", "most_bytes": 1},
        {"peer": "a"},
        {"peer": "a:1", "level": 3},
    ],
)
def test_settings_are_checked(options: Any) -> None:
    with pytest.raises(ValueError, match=r"peer or listen|host:port"):
        Instance(MODULE, config(options.pop("folder", None), **options), SMALL)
