"""The connector's worker side: layers of a step's requests out of a store into blocks, and out of blocks into it.

Loads go layer by layer, in the order in which the layers were saved; a segment gets its name when every layer is in
it. Nothing of vLLM is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from hurray_wire.arrays import Bytes, address
from hurray_wire.errors import (
    Code,
    Difference,
    FrameError,
    HurrayWireError,
    MismatchError,
    StoreError,
    TruncatedError,
)
from hurray_wire.integrations.segments import FoundSegment, SegmentSink, SegmentStore
from hurray_wire.integrations.vllm_layers import LATENT, LayerForm, Scales
from hurray_wire.integrations.vllm_scheduling import Move, Step
from hurray_wire.memory import allocated
from hurray_wire.stream.reader import StreamReader
from hurray_wire.tensor import BlockPagedTensor

__all__ = ["Failure", "Working"]

_NO_SCALES: Scales = (None, None)


class _Room:
    """Memory that each layer's frames are read into in turn: fresh memory's page faults cost as much as a copy."""

    def __init__(self) -> None:
        self._pieces: list[Bytes] = []
        self._used = 0

    def __call__(self, nbytes: int, alignment: int) -> Bytes:
        """A piece that nothing else is read into before `again`."""
        at, self._used = self._used, self._used + 1
        if at == len(self._pieces):
            self._pieces.append(allocated(nbytes, None, alignment))
        if self._pieces[at].size < nbytes or address(self._pieces[at]) % alignment:
            self._pieces[at] = allocated(nbytes, None, alignment)
        return self._pieces[at]

    def again(self) -> None:
        """What was read is where it goes: all can be used anew."""
        self._used = 0


class Failure(NamedTuple):
    """A move that did not happen, and why."""

    request_id: str
    verb: str
    error: HurrayWireError


class _Loading:
    """One segment's tokens on their way into a request's blocks."""

    def __init__(self, move: Move, segment: FoundSegment, chunk_tokens: int, block_size: int) -> None:
        begin = move.begin + segment.first * chunk_tokens
        end = move.begin + segment.stop * chunk_tokens
        self.move, self.keys = move, move.keys[segment.first : segment.stop]
        self.segment, self.chunk_tokens = segment, chunk_tokens
        first, stop = max(move.first, begin), min(move.stop, end)
        blocks = slice((first - move.first) // block_size, -(-(stop - move.first) // block_size))
        self.block_ids = move.block_ids[blocks]
        self.skipped, self.tokens = first - begin, stop - first
        self.reader: StreamReader | None = None
        self._room = _Room()

    def open(self, expect: Mapping[str, Any]) -> None:
        self.reader = self.segment.open(expect, alloc=self._room)

    def layer(self, name: str, count: int) -> tuple[BlockPagedTensor, ...]:
        """The next layer's frames, which must be that one's, and of the chunks that were asked for; until the one after
        it is asked for."""
        assert self.reader is not None
        self._room.again()
        found = []
        for _ in range(count):
            try:
                header = self.reader.next_header()
                if header is None:
                    message = f"the segment ends before layer {name}"
                    raise TruncatedError(message, needed=1, available=0, code=Code.STREAM_TRUNCATED, where="stream")
                self._check(header.inspection.metadata or {}, name)
                found.append(header.read())
            except HurrayWireError:
                raise
            except OSError as error:
                raise StoreError(
                    f"the segment cannot be read: {error}", where=self.segment.where, cause=error
                ) from error
        return tuple(found)

    def _check(self, metadata: Mapping[str, Any], name: str) -> None:
        keys = metadata.get("vllm.keys")
        listed = isinstance(keys, list) and self.keys[0] in keys
        at = keys.index(self.keys[0]) if listed and keys is not None else 0
        held = keys[at : at + len(self.keys)] if isinstance(keys, list) else keys
        wanted = {"vllm.layer": (metadata.get("vllm.layer"), name), "vllm.keys": (held, self.keys)}
        wrong = [Difference(where, found, mine) for where, (found, mine) in wanted.items() if found != mine]
        if wrong:
            raise MismatchError(wrong)
        self.offset = at * self.chunk_tokens

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()


class Working:
    """State of one worker.

    Args:
        store: where segments are, or go.
        form: how a layer's cache is read.
        chunk_tokens: tokens a chunk.
        metadata: what every frame says, and must say: the model, its revision.
        scales: the key's and the value's scale of a layer, by its name.
        layerwise: load in `wait_for_layer` and save in `save_layer`; otherwise all at once, in `load` and `end`.
        strict: raise what goes wrong; otherwise a failed load is reported by its blocks, a failed save is none.
    """

    def __init__(
        self,
        store: SegmentStore,
        form: LayerForm,
        *,
        chunk_tokens: int,
        metadata: Mapping[str, Any],
        scales: Callable[[str], Scales] = lambda name: _NO_SCALES,
        layerwise: bool = True,
        strict: bool = False,
    ) -> None:
        self._store, self._form, self._chunk_tokens = store, form, chunk_tokens
        self._metadata, self._scales = dict(metadata), scales
        self._layerwise, self._strict = layerwise, strict
        self._caches: dict[str, Any] = {}
        self._step = Step([], [])
        self._loading: list[_Loading] = []
        self._loaded = 0
        self._writers: list[tuple[Move, SegmentSink, list[str]]] = []
        self._bad_blocks: set[int] = set()
        self.failures: list[Failure] = []
        """What did not happen since the last look; the caller empties it."""

    @property
    def frames_a_layer(self) -> int:
        """Keys and values, or latents."""
        return 1 if self._form.axes == LATENT else 2

    def register(self, caches: Mapping[str, Any]) -> None:
        """The layers' caches by name, in the order in which the model runs them."""
        self._caches = dict(caches)

    def begin(self, step: Step) -> None:
        """Start a step."""
        self.abandon()
        self._step, self._loaded = step, 0

    # Loads.

    def load(self) -> None:
        """Open what the step loads. vLLM asks before the model runs where there is something, else behind it."""
        for move in self._step.loads:
            self._guarded(move, partial(self._open, move))
        if not self._layerwise:
            for name in self._caches:
                self.wait_for_layer(name)

    def _open(self, move: Move) -> None:
        expect = {**self._metadata, **self._form.expected(next(iter(self._caches.values())))}
        size = self._form.block_size
        loading = [_Loading(move, s, self._chunk_tokens, size) for s in self._store.segments(move.keys)]
        self._loading += loading
        for each in loading:
            each.open(expect)

    def wait_for_layer(self, name: str) -> None:
        """Load layers up to that one."""
        names = list(self._caches)
        while self._loading and self._loaded <= names.index(name):
            layer = names[self._loaded]
            for loading in list(self._loading):
                if loading in self._loading:  # another segment of its move may have failed meanwhile
                    self._guarded(loading.move, partial(self._load_layer, loading, layer))
            self._loaded += 1

    def _load_layer(self, loading: _Loading, name: str) -> None:
        try:
            tensors = loading.layer(name, self.frames_a_layer)
            self._form.check_scales(tensors, self._scales(name))
            first = loading.offset + loading.skipped
            self._form.place(tensors, first, first + loading.tokens, self._caches[name], loading.block_ids)
        except FrameError:
            self._store.discard(loading.keys)  # broken bytes would be found again, and never be replaced
            raise

    def _guarded(self, move: Move, call: Callable[[], None]) -> None:
        """A load that fails is given up whole: its blocks hold some layers, and are reported."""
        try:
            call()
        except HurrayWireError as error:
            for loading in [each for each in self._loading if each.move is move]:
                loading.close()
                self._loading.remove(loading)
            self._bad_blocks.update(move.block_ids)
            self.failures.append(Failure(move.request_id, "load", error))
            if self._strict:
                raise

    def take_bad_blocks(self) -> set[int]:
        """Blocks that should have been loaded and were not, since the last call."""
        taken, self._bad_blocks = self._bad_blocks, set()
        return taken

    # Saves.

    def save_layer(self, name: str, cache: Any) -> None:
        """Add a layer to the step's segments."""
        if self._layerwise:
            self._save(name, cache)

    def _save(self, name: str, cache: Any) -> None:
        if not self._writers:
            for move in list(self._step.saves):
                self._saving(move, partial(self._start, move))
        for move, writer, names in list(self._writers):
            self._saving(move, partial(self._write, move, writer, name, cache))
            names.append(name)

    def _start(self, move: Move) -> None:
        self._writers.append((move, self._store.writer(move.keys), []))

    def _write(self, move: Move, writer: SegmentSink, name: str, cache: Any) -> None:
        layer = list(self._caches).index(name)
        about = {
            **self._metadata,
            "vllm.layer": name,
            "vllm.keys": move.keys,
            "vllm.chunk_tokens": self._chunk_tokens,
            "first_tokens": [move.first],
        }
        tokens = move.stop - move.first
        for t in self._form.tensors(cache, move.block_ids, tokens, layer, self._scales(name)):
            writer.write(t.replace(metadata={**(t.metadata or {}), **about}))

    def _saving(self, move: Move, call: Callable[[], None]) -> None:
        """A save that fails leaves nothing: the chunk will be missed, and computed again."""
        try:
            call()
        except HurrayWireError as error:
            for each in [each for each in self._writers if each[0] is move]:
                each[1].close()
                self._writers.remove(each)
            self._step.saves.remove(move)
            self.failures.append(Failure(move.request_id, "save", error))
            if self._strict:
                raise

    def end(self) -> None:
        """End a step: segments that have every layer get their names, others are given up."""
        if not self._layerwise:
            for name, cache in self._caches.items():
                self._save(name, cache)
        for move, writer, names in list(self._writers):
            if sorted(names) == sorted(self._caches):
                self._saving(move, writer.finish)
        self.abandon()
        self._step = Step([], [])

    def abandon(self) -> None:
        """Give up what is open."""
        for _, writer, _ in self._writers:
            writer.close()
        for loading in self._loading:
            loading.close()
        self._writers, self._loading = [], []
