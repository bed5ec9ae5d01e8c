"""A connector for vLLM: layers as HRKV frames in a folder that several instances share, or in streams between two.

vLLM is told by its own options, nothing is patched:

    --kv-transfer-config '{"kv_connector": "HrkvConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "hurray_wire.integrations.vllm", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"folder": "/shared"}}'

With `"peer": "host:port"` for `"folder"` an instance sends what it has computed, layer by layer as the model reaches
it, to one that has `"listen": "host:port"`, which loads layers while others are still computed.

Prompts are cut into chunks; a chunk that any instance has computed is loaded by the others, whatever their block size
and block ids. What is not as the frames say (another model, element type, heads, scale; half a file, a newer version)
is no hit: its blocks are reported, and vLLM computes them. Written against `KVConnectorBase_V1` of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from hurray_wire.engines.axes import VLLM_PACKED
from hurray_wire.errors import Code, UnsupportedError
from hurray_wire.integrations.segment_streams import SegmentStreams
from hurray_wire.integrations.segments import SegmentFolder, SegmentStore
from hurray_wire.integrations.vllm_layers import LayerForm, Scales
from hurray_wire.integrations.vllm_scheduling import Scheduling, Step
from hurray_wire.integrations.vllm_working import Failure, Working

__all__ = ["HrkvConnector", "HrkvConnectorMetadata"]

_STREAMS = ("peer", "listen", "timeout", "most_bytes")
_OPTIONS = ("folder", *_STREAMS, "chunk_tokens", "axes", "key_dim", "compression", "layerwise", "strict", "model")


class HrkvConnectorMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's side has the workers do in a step."""

    def __init__(self, step: Step) -> None:
        self.step = step


class HrkvConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """vLLM's connector class, both roles. `kv_connector_extra_config` has

    folder: where the frames are; or
    peer, listen: host:port that they are sent to, and that they are taken at, one of them or both. Each rank has the
        port behind the one before.
    timeout, most_bytes: of streams: seconds that either end waits (30); what is kept of what came (4 GiB).
    chunk_tokens: tokens a chunk, a multiple of every instance's block size (256).
    axes, key_dim: the order of the caches' axes ("PHSC", what vLLM has had since 0.28), "latent" for MLA.
    compression: null or "zstd". layerwise: move each layer when the model reaches it (true).
    model: the name that frames carry, where it is not vLLM's own. strict: raise what goes wrong (false).
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        options = dict(self._kv_transfer_config.kv_connector_extra_config)
        unknown = sorted(set(options) - set(_OPTIONS))
        streams = not {"peer", "listen"}.isdisjoint(options)
        both = "folder" in options and not set(_STREAMS).isdisjoint(options)
        if unknown or both or not (streams or "folder" in options):
            raise ValueError(f"kv_connector_extra_config needs a folder, or else peer or listen; unknown: {unknown}")
        _check_groups(kv_cache_config)
        self.options = options
        chunk_tokens = options.get("chunk_tokens", 256)
        form, about = self._form(), self._about()
        self._store = self._folder() if "folder" in options else self._streams(role)
        transfer = self._kv_transfer_config
        self._scheduling = Scheduling(
            self._store,
            {**about, "dtype": str(vllm_config.model_config.dtype), "cache_dtype": form.dtype},
            block_size=form.block_size,
            chunk_tokens=chunk_tokens,
            loads=transfer.is_kv_consumer and ("listen" in options or not streams),
            saves=transfer.is_kv_producer and ("peer" in options or not streams),
        )
        self._working = Working(
            self._store,
            form,
            chunk_tokens=chunk_tokens,
            metadata=about,
            scales=self._scales,
            layerwise=options.get("layerwise", True),
            strict=options.get("strict", False),
        )
        self._computed: dict[str, int] = {}

    def _folder(self) -> SegmentStore:
        return SegmentFolder(self.options["folder"], **self._part())

    def _streams(self, role: KVConnectorRole) -> SegmentStore:
        """The worker takes what comes; the scheduler, which may be another process, asks it."""
        asked = {name: self.options[name] for name in _STREAMS if name in self.options}
        return SegmentStreams(**asked, **self._part(), listens=role == KVConnectorRole.WORKER)

    def _part(self) -> dict[str, Any]:
        parallel = self._vllm_config.parallel_config
        ranks = parallel.tensor_parallel_size * getattr(parallel, "pipeline_parallel_size", 1)
        return {"rank": parallel.rank, "ranks": ranks, "compression": self.options.get("compression")}

    def _form(self) -> LayerForm:
        cache = self._vllm_config.cache_config
        axes = self.options.get("axes", VLLM_PACKED)
        return LayerForm(axes, cache.block_size, cache.cache_dtype, self.options.get("key_dim"))

    def _about(self) -> dict[str, Any]:
        model = self._vllm_config.model_config
        about = {"model": self.options.get("model", model.model)}
        return about if model.revision is None else {**about, "revision": model.revision}

    def _scales(self, name: str) -> Scales:
        """A layer's own scales, where its cache is of fewer bits than its model."""
        layers = self._vllm_config.compilation_config.static_forward_context
        layer = layers.get(name) if self._vllm_config.cache_config.cache_dtype.startswith(("fp8", "int8")) else None
        return getattr(layer, "_k_scale", None), getattr(layer, "_v_scale", None)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a save that is dropped is a miss later."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Yes where layers are moved as the model reaches them."""
        return bool(extra_config.get("layerwise", True))

    def take_failures(self) -> list[Failure]:
        """What was not loaded or saved since the last call, each with our error."""
        taken, self._working.failures = self._working.failures, []
        return taken

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that the folder has beyond those computed, loaded within the step."""
        self._computed[request.request_id] = num_computed_tokens
        return self._scheduling.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are there for the tokens that are to be loaded."""
        computed = self._computed.pop(request.request_id, 0)
        self._scheduling.allocated(request, num_external_tokens, computed)

    def build_connector_meta(self, scheduler_output: Any) -> HrkvConnectorMetadata:
        """What the workers load and save in the step."""
        return HrkvConnectorMetadata(self._scheduling.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Requests whose blocks were not loaded do not look into the folder again."""
        self._scheduling.failed(set(connector_output.invalid_block_ids or ()))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """All saves are done in their step: the blocks can be freed."""
        self._scheduling.finished(request.request_id)
        self._computed.pop(request.request_id, None)
        return False, None

    # The workers' side.

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """The layers, in the order in which the model runs them."""
        self._working.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Start a step: the model may save layers before `start_load_kv`, in steps that load nothing."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, HrkvConnectorMetadata)
        self._working.begin(connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Open what the step loads."""
        self._working.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Load layers up to that one."""
        self._working.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Add a layer to what the step saves."""
        self._working.save_layer(layer_name, kv_layer)

    def wait_for_save(self) -> None:
        """Give what the step saved its names."""
        self._working.end()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Nothing outlives its step."""
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM must compute itself."""
        return self._working.take_bad_blocks()

    def shutdown(self) -> None:
        """Close what is open."""
        self._working.abandon()
        self._store.close()


def _check_groups(kv_cache_config: Any) -> None:
    """One group of full-attention layers: a window's blocks, and a state's, are not a prefix's."""
    groups = getattr(kv_cache_config, "kv_cache_groups", None) or ()
    names = [type(group.kv_cache_spec).__name__ for group in groups]
    other = [name for name in names if name not in ("FullAttentionSpec", "MLAAttentionSpec")]
    if len(names) > 1 or other:
        message = f"has groups {names}: one of FullAttentionSpec or MLAAttentionSpec is kept, no windows or states"
        raise UnsupportedError(message, code=Code.LAYOUT, where="kv_cache_config")
