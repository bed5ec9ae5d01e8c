"""The connector's scheduler side: which chunks of which requests are to be loaded and saved in a step.

Nothing of vLLM is imported: requests and the scheduler's output are looked at as vLLM 0.32 hands them over (`vllm/v1/
core/sched/output.py`, `vllm/v1/request.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hurray_wire.integrations.prefix_keys import PrefixKeys, root_of
from hurray_wire.integrations.segments import SegmentStore

__all__ = ["Move", "Scheduling", "Step"]


class Move(NamedTuple):
    """Tokens from `first` to `stop` of a request, into or out of its blocks.

    `keys` name the chunks that hold them, of which the first begins at token `begin`.
    """

    request_id: str
    keys: list[str]
    begin: int
    first: int
    stop: int
    block_ids: list[int]


class Step(NamedTuple):
    """What a step's workers are to do."""

    loads: list[Move]
    saves: list[Move]


class _Request:
    """A request that is running: its tokens, its blocks, and how many of its chunks need not be saved any more."""

    def __init__(self, request: Any, keys: PrefixKeys) -> None:
        self.request, self.keys = request, keys
        self.block_ids: list[int] = []
        self.kept = 0
        self.loaded_blocks: set[int] = set()
        self.distrusted = False

    @property
    def tokens(self) -> Sequence[int]:
        return self.request.all_token_ids or ()


class Scheduling:
    """State of one scheduler.

    Args:
        store: where chunks are looked up.
        identity: what keys and values depend on besides a request.
        block_size: tokens a block; chunks are whole blocks.
        chunk_tokens: tokens a chunk.
        loads, saves: whether this end takes from the store, and adds to it.
    """

    def __init__(
        self,
        store: SegmentStore,
        identity: Mapping[str, Any],
        *,
        block_size: int,
        chunk_tokens: int,
        loads: bool = True,
        saves: bool = True,
    ) -> None:
        if chunk_tokens < 1 or chunk_tokens % block_size:
            raise ValueError(f"chunk_tokens must be a multiple of the block size {block_size}, not {chunk_tokens}")
        self._store, self._identity = store, dict(identity)
        self._block_size, self._chunk_tokens = block_size, chunk_tokens
        self._loads, self._saves = loads, saves
        self._requests: dict[str, _Request] = {}
        self._to_load: dict[str, tuple[int, int]] = {}

    def matched(self, request: Any, num_computed: int) -> int:
        """Tokens behind the first `num_computed` that can be loaded: whole chunks, at least one token left to compute.

        Without effect on what is found later: vLLM may ask several times.
        """
        known = self._known(request)
        if not self._loads or known.distrusted or getattr(request, "skip_reading_prefix_cache", False):
            return 0
        tokens = known.tokens
        keys = known.keys.of(tokens)[: max(len(tokens) - 1, 0) // self._chunk_tokens]
        return max(self._store.leading(keys) * self._chunk_tokens - num_computed, 0)

    def allocated(self, request: Any, num_external: int, num_computed: int) -> None:
        """The request has blocks for `num_external` tokens that are to be loaded behind `num_computed`."""
        self._known(request)
        if num_external > 0:
            self._to_load[request.request_id] = (num_computed, num_computed + num_external)

    def step(self, output: Any) -> Step:
        """The step that a scheduler's output starts."""
        for request_id in output.finished_req_ids:
            self.finished(request_id)
        step = Step([], [])
        for request_id, known, num_computed in self._scheduled(output):
            if request_id in self._to_load:
                step.loads.append(self._move(request_id, known, *self._to_load.pop(request_id)))
                known.loaded_blocks = set(step.loads[-1].block_ids)
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            computed = num_computed + output.num_scheduled_tokens[request_id] - drafts
            if self._saves:
                step.saves.extend(self._due(request_id, known, min(computed, len(known.tokens))))
        return step

    def _scheduled(self, output: Any) -> Iterator[tuple[str, _Request, int]]:
        """Every request of a step, its blocks brought up to date, with its tokens computed before the step."""
        for new in output.scheduled_new_reqs:
            if (known := self._requests.get(new.req_id)) is not None:
                known.block_ids = list(new.block_ids[0])
                yield new.req_id, known, new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            if (known := self._requests.get(request_id)) is None:
                continue
            added = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                known.block_ids = []  # it was preempted: all its blocks are new
            known.block_ids += [] if added is None else added[0]
            yield request_id, known, cached.num_computed_tokens[i]

    def _move(self, request_id: str, known: _Request, first: int, stop: int) -> Move:
        size = self._chunk_tokens
        chunks = slice(first // size, -(-stop // size))
        blocks = slice(first // self._block_size, -(-stop // self._block_size))
        keys = known.keys.of(known.tokens)[chunks]
        return Move(request_id, keys, chunks.start * size, first, stop, known.block_ids[blocks])

    def _due(self, request_id: str, known: _Request, computed: int) -> Iterator[Move]:
        """One move for each run of chunks that are computed and that nobody has kept."""
        keys = known.keys.of(known.tokens)[: computed // self._chunk_tokens]
        missing = [i for i in range(known.kept, len(keys)) if not self._store.has(keys[i])]
        known.kept = max(known.kept, len(keys))
        size = self._chunk_tokens
        for run in _runs(missing):
            yield self._move(request_id, known, run.start * size, run.stop * size)

    def failed(self, block_ids: set[int]) -> None:
        """Blocks that were not loaded, in this step or one before it: their requests compute for themselves, do not
        look again, and keep what they computed."""
        for known in self._requests.values() if block_ids else ():
            if not block_ids.isdisjoint(known.loaded_blocks):
                known.distrusted, known.kept = True, 0

    def finished(self, request_id: str) -> None:
        """The request is over."""
        self._requests.pop(request_id, None)
        self._to_load.pop(request_id, None)

    def _known(self, request: Any) -> _Request:
        known = self._requests.get(request.request_id)
        if known is None:
            root = root_of({**self._identity, **_of_request(request)})
            known = self._requests[request.request_id] = _Request(request, PrefixKeys(root, self._chunk_tokens))
        return known


def _of_request(request: Any) -> dict[str, Any]:
    """What a request's keys and values depend on besides its tokens: adapter, images, embeddings, salt."""
    lora = getattr(request, "lora_request", None)
    features = getattr(request, "mm_features", None) or ()
    embedded = getattr(request, "prompt_embeds", None) is not None
    return {
        "lora": None if lora is None else [lora.lora_name, str(getattr(lora, "lora_path", ""))],
        "images": [str(feature.identifier) for feature in features],
        "salt": getattr(request, "cache_salt", None),
        "alone": request.request_id if embedded else None,  # no tokens tell what embeddings are
    }


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Numbers that follow one another, as ranges."""
    start = None
    for i, number in enumerate(numbers):
        start = number if start is None else start
        if i + 1 == len(numbers) or numbers[i + 1] != number + 1:
            yield range(start, number + 1)
            start = None
