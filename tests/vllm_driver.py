"""An engine to drive a connector with: requests, blocks and steps in vLLM's order, a model whose cache is known.

A layer's keys and values of a token are drawn from a hash of the tokens up to it, so that any cache can be checked
against what was to be computed. Where vLLM is installed its own classes are the base and the messages; elsewhere
stand-ins of the same fields (vLLM 0.32 `vllm/v1/core/sched/output.py`, `kv_connector/v1/base.py`).
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import sys
import warnings
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


class _Base(ABC):  # noqa: B024 - as vLLM's: what is abstract there is checked against the real one
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._connector_metadata: Any = None
        self._vllm_config, self._kv_transfer_config = vllm_config, vllm_config.kv_transfer_config

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None


def load() -> tuple[ModuleType, bool]:
    """The connector's module, and whether it stands on vLLM's own base class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(BASE)
        except (ImportError, RuntimeError):  # not installed, or beside a torch that it cannot live with
            stand_in = ModuleType(BASE)
            names = {"KVConnectorBase_V1": _Base, "KVConnectorMetadata": object}
            stand_in.__dict__.update(names, KVConnectorRole=Enum("KVConnectorRole", ("SCHEDULER", "WORKER")))
            parents = [BASE.rsplit(".", i)[0] for i in range(1, 6)]
            sys.modules.update({name: ModuleType(name) for name in parents} | {BASE: stand_in})
            try:
                return importlib.import_module("hurray_wire.integrations.vllm"), False
            finally:
                for name in [*parents, BASE]:
                    del sys.modules[name]
        return importlib.import_module("hurray_wire.integrations.vllm"), True


@dataclass
class Request:
    """vLLM's request, as far as a connector looks."""

    request_id: str
    prompt_token_ids: list[int]
    all_token_ids: list[int] = field(default_factory=list)
    mm_features: list[Any] = field(default_factory=list)
    lora_request: Any = None
    cache_salt: str | None = None
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    to_generate: int = 0
    new: bool = True
    preempted: bool = False

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids)


def config(folder: Any, *, block_size: int = 4, model: str = "tiny", revision: Any = None, **options: Any) -> Any:
    """What a connector reads of vLLM's configuration."""
    transfer = {"kv_role": "kv_both", "is_kv_producer": True, "is_kv_consumer": True}
    transfer |= options.pop("transfer", {})
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "rank": 0} | options.pop("parallel", {})
    cache = {"block_size": block_size, "cache_dtype": options.pop("cache_dtype", "auto")}
    layers = options.pop("layers", {})
    where = {} if folder is None else {"folder": str(folder)}
    extra = {**where, "chunk_tokens": 8, **options}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra, **transfer),
        cache_config=SimpleNamespace(**cache),
        model_config=SimpleNamespace(model=model, revision=revision, dtype="float16"),
        parallel_config=SimpleNamespace(**parallel),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )


@dataclass
class Geometry:
    """An instance's cache: axes in letters, and sizes."""

    axes: str = "PHSC"
    blocks: int = 40
    block_size: int = 4
    heads: int = 2
    dim: int = 3
    layers: int = 3
    dtype: Any = np.float16

    def empty(self) -> Any:
        """A cache of rubbish, as allocated."""
        sizes = {"2": 2, "P": self.blocks, "S": self.block_size, "H": self.heads, "D": self.dim, "C": 2 * self.dim}
        if self.axes == "latent":
            return np.full((self.blocks, self.block_size, self.dim), -7, self.dtype)
        if self.axes == "cpu":
            return np.full((self.blocks, self.heads, self.block_size, 2 * self.dim), -7, self.dtype)
        return np.full([sizes[letter] for letter in self.axes], -7, self.dtype)

    def put(self, cache: Any, block: int, slot: int, value: Any) -> None:
        """Write one token's keys and values."""
        if self.axes == "cpu":  # a head's keys a column a token, then its values a row a token
            flat, count = cache[block].reshape(self.heads, -1), self.dim * self.block_size
            key, values = np.broadcast_to(value, (2, self.heads, self.dim))
            flat[:, slot : count : self.block_size] = key
            flat[:, count:][:, slot * self.dim : (slot + 1) * self.dim] = values
        else:
            self.slot(cache, block, slot)[...] = value

    def get(self, cache: Any, block: int, slot: int) -> Any:
        """One token's keys and values."""
        if self.axes != "cpu":
            return self.slot(cache, block, slot)
        flat, count = cache[block].reshape(self.heads, -1), self.dim * self.block_size
        values = flat[:, count:][:, slot * self.dim : (slot + 1) * self.dim]
        return np.stack([flat[:, slot : count : self.block_size], values])

    def slot(self, cache: Any, block: int, slot: int) -> Any:
        """A view of one token's keys and values, `[2, heads, dim]` (a latent's `[dim]`), by plain indexing."""
        if self.axes == "latent":
            return cache[block, slot]
        if self.axes == "PHSC":
            return cache[block, :, slot].reshape(self.heads, 2, self.dim).swapaxes(0, 1)
        if self.axes == "PSHC":
            return cache[block, slot].reshape(self.heads, 2, self.dim).swapaxes(0, 1)
        return cache[:, block, slot] if self.axes == "2PSHD" else cache[block, :, slot]

    def token(self, tokens: Sequence[int], layer: int) -> Any:
        """What the model computes for the last of these tokens."""
        shape = (self.dim,) if self.axes == "latent" else (2, self.heads, self.dim)
        seed = hashlib.sha256(np.array([layer, *tokens]).tobytes()).digest()[:8]
        return np.random.default_rng(int.from_bytes(seed, "little")).standard_normal(shape).astype(self.dtype)


class Instance:
    """One engine with a connector of each role: `run` takes requests to their end.

    Args:
        first_block: where its allocator begins, so that instances have other ids.
        lookahead: blocks allocated ahead of what a step computes.
        budget: tokens a request computes in a step, for chunked prefill.
        drafts: speculated tokens in every decoding step, none of them accepted.
        torch: whether caches are torch tensors over the same memory.
        loads_first: start loads before the model runs in steps without any, too, as vLLM did before 0.32.
    """

    def __init__(
        self,
        module: Any,
        settings: Any,
        geometry: Geometry,
        *,
        first_block: int = 1,
        lookahead: int = 0,
        budget: int = 1000,
        drafts: int = 0,
        torch: bool = False,
        loads_first: bool = False,
    ) -> None:
        self.loads_first = loads_first
        self.geometry, self.budget, self.lookahead, self.drafts = geometry, budget, lookahead, drafts
        roles = importlib.import_module(module.__name__).KVConnectorRole
        self.scheduler = module.HrkvConnector(settings, roles.SCHEDULER, None)
        self.worker = module.HrkvConnector(settings, roles.WORKER, None)
        self.caches = {f"model.layers.{i}.self_attn.attn": geometry.empty() for i in range(geometry.layers)}
        self.handed = dict(self.caches)
        if torch:
            import hurray_wire as hw

            self.handed = {name: hw.to_torch(cache) for name, cache in self.caches.items()}
        self.worker.register_kv_caches(self.handed)
        self._blocks = itertools.cycle(range(first_block, geometry.blocks))
        self.finished: set[str] = set()
        self.computed = 0
        self.failed_blocks: set[int] = set()
        self.layers_reached: list[str] = []

    def run(self, *requests: Request, local: int = 0) -> int:
        """All steps of some requests at once; gives how many tokens were computed. `local` tokens are there already."""
        before = self.computed
        for request in requests:
            request.num_computed = local
        running = list(requests)
        while running:
            self.step(running)
            for request in [r for r in running if self._is_done(r)]:
                running.remove(request)
                kept, parameters = self.scheduler.request_finished(request, request.block_ids)
                assert (kept, parameters) == (False, None)
                self.finished.add(request.request_id)
        self.step([])
        return self.computed - before

    @staticmethod
    def _is_done(request: Request) -> bool:
        return request.to_generate == 0 and request.num_computed >= len(request.prompt_token_ids)

    def step(self, running: list[Request]) -> None:
        """One step, in vLLM's order: the scheduler's side, then the workers'."""
        output, planned = self.schedule(running)
        metadata = self.scheduler.build_connector_meta(output)
        worker = self.worker
        worker.bind_connector_metadata(metadata)
        context = SimpleNamespace(no_compile_layers={}, attn_metadata=None)
        first = bool(metadata.step.loads) or self.loads_first  # vLLM's has_sync_kv_loads
        if first:
            worker.start_load_kv(context)
        for layer, (name, cache) in enumerate(self.caches.items()):
            worker.wait_for_layer_load(name)
            self.forward(planned, layer, cache)
            worker.save_kv_layer(name, self.handed[name], None)
        if not first:
            worker.start_load_kv(context)
        worker.wait_for_save()
        assert worker.get_finished(output.finished_req_ids) == (None, None)
        bad = worker.get_block_ids_with_load_errors()
        worker.clear_connector_metadata()
        self.failed_blocks |= bad
        self.scheduler.update_connector_output(SimpleNamespace(invalid_block_ids=bad))
        self.update(planned, bad)

    def schedule(self, running: list[Request]) -> tuple[Any, list[tuple[Request, int, int]]]:
        """Blocks, and how many tokens each request computes: (request, first, stop) each."""
        output = SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]
            ),
            num_scheduled_tokens={},
            scheduled_spec_decode_tokens={},
            finished_req_ids=self.finished,
        )
        self.finished = set()
        planned = [self._schedule(request, output) for request in running]
        return output, planned

    def _schedule(self, request: Request, output: Any) -> tuple[Request, int, int]:
        starting = request.new or request.preempted
        if starting:
            asked = [self.scheduler.get_num_new_matched_tokens(request, request.num_computed) for _ in range(2)]
            assert asked[0] == asked[1], "asking has an effect"
            external, later = asked[0]
            assert not later
            assert external % self.geometry.block_size == 0
            assert request.num_computed + external < len(request.all_token_ids)
            request.block_ids = [] if request.preempted else request.block_ids
            added = self._allocate(request, request.num_computed + external + 1)
            self.scheduler.update_state_after_alloc(request, SimpleNamespace(), external)
            request.num_computed += external
        else:
            added = []
        first = request.num_computed
        drafts = self.drafts if first >= len(request.prompt_token_ids) else 0
        stop = min(first + self.budget, len(request.all_token_ids))
        added += self._allocate(request, stop + drafts)
        self._tell(request, added, output)
        output.num_scheduled_tokens[request.request_id] = stop - first + drafts
        if drafts:
            output.scheduled_spec_decode_tokens[request.request_id] = [0] * drafts
        return request, first, stop

    def _tell(self, request: Request, added: list[int], output: Any) -> None:
        if request.new:
            fields = {"prompt_token_ids": request.prompt_token_ids, "mm_features": request.mm_features}
            ids = {"req_id": request.request_id, "block_ids": (list(request.block_ids),)}
            output.scheduled_new_reqs.append(SimpleNamespace(**ids, **fields, num_computed_tokens=request.num_computed))
            request.new = False
            return
        cached = output.scheduled_cached_reqs
        cached.req_ids.append(request.request_id)
        cached.num_computed_tokens.append(request.num_computed)
        if request.preempted:
            cached.resumed_req_ids.add(request.request_id)
            cached.new_block_ids.append((list(request.block_ids),))
            request.preempted = False
        else:
            cached.new_block_ids.append((added,) if added else None)

    def _allocate(self, request: Request, tokens: int) -> list[int]:
        wanted = -(-tokens // self.geometry.block_size) + self.lookahead
        added = [next(self._blocks) for _ in range(wanted - len(request.block_ids))]
        request.block_ids.extend(added)
        return added

    def forward(self, planned: list[tuple[Request, int, int]], layer: int, cache: Any) -> None:
        """What the model writes; behind it rubbish, where drafts are."""
        size = self.geometry.block_size
        for request, first, stop in planned:
            for at in range(first, stop):
                value = self.geometry.token(request.all_token_ids[: at + 1], layer)
                self.geometry.put(cache, request.block_ids[at // size], at % size, value)
            for at in range(stop, stop + (self.drafts if first >= len(request.prompt_token_ids) else 0)):
                self.geometry.put(cache, request.block_ids[at // size], at % size, 99)

    def update(self, planned: list[tuple[Request, int, int]], bad: set[int]) -> None:
        """What a step did, as vLLM takes it: from the first bad block on, tokens are computed again."""
        size = self.geometry.block_size
        for request, first, stop in planned:
            self.computed += stop - first
            request.num_computed = stop
            wrong = [i for i, block in enumerate(request.block_ids) if block in bad]
            if wrong:
                request.num_computed = min(stop, wrong[0] * size)
                request.preempted = True  # it waits, and is scheduled anew
            elif stop == len(request.all_token_ids) and request.to_generate:
                request.to_generate -= 1
                request.all_token_ids.append(1000 + len(request.all_token_ids))

    def preempt(self, request: Request) -> None:
        """Take a request's blocks away."""
        request.preempted, request.num_computed = True, 0

    def check(self, request: Request) -> None:
        """Every token that counts as computed is what the model computes, in every layer."""
        size = self.geometry.block_size
        for layer, cache in enumerate(self.caches.values()):
            for at in range(request.num_computed):
                found = self.geometry.get(cache, request.block_ids[at // size], at % size)
                wanted = self.geometry.token(request.all_token_ids[: at + 1], layer)
                assert np.array_equal(found, wanted), (layer, at)
