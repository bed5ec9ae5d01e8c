"""To and from inference engines: their caches, tables and masks, and tensors (section "engines" of the docs).

Each engine has a room of its own; what they share stands in `axes` (orders and views), `tables` (block tables),
`storage` (what bytes mean), `outbound` and `inbound` (pages out and in), `copying` and `device` (the copies). Nothing
here knows a byte of the wire. torch is used where a torch tensor comes in, transformers only to build its cache.

Example:
    >>> import numpy as np
    >>> from hurray_wire import engines
    >>> cache = np.zeros((2, 8, 16, 2, 64), np.float16)
    >>> key, value = engines.from_vllm(cache, [[3, 1, -1]], [20], axes=engines.VLLM_KV_FIRST, layer_index=0)
    >>> key.num_pages, key.seq_lens.tolist()
    (2, [20])
"""

from hurray_wire.engines.axes import (
    FLASHINFER_HND,
    FLASHINFER_NHD,
    SGLANG,
    TRTLLM,
    VLLM_BHLNC,
    VLLM_BLHNC,
    VLLM_BLNHC,
    VLLM_BLOCKS_FIRST,
    VLLM_CPU,
    VLLM_DIFFKV,
    VLLM_KV_FIRST,
    VLLM_LBHNC,
    VLLM_LBNHC,
    VLLM_LHBNC,
    VLLM_PACKED,
    VLLM_V0,
)
from hurray_wire.engines.flashinfer import from_flashinfer, to_flashinfer
from hurray_wire.engines.lmcache import from_lmcache, to_lmcache
from hurray_wire.engines.sglang import from_sglang, to_sglang
from hurray_wire.engines.tables import padded_block_table, slot_mapping
from hurray_wire.engines.transformers import from_transformers, to_transformers
from hurray_wire.engines.trtllm import from_trtllm, to_trtllm
from hurray_wire.engines.vllm import from_vllm, from_vllm_latent, to_vllm, to_vllm_latent

__all__ = [
    "FLASHINFER_HND",
    "FLASHINFER_NHD",
    "SGLANG",
    "TRTLLM",
    "VLLM_BHLNC",
    "VLLM_BLHNC",
    "VLLM_BLNHC",
    "VLLM_BLOCKS_FIRST",
    "VLLM_CPU",
    "VLLM_DIFFKV",
    "VLLM_KV_FIRST",
    "VLLM_LBHNC",
    "VLLM_LBNHC",
    "VLLM_LHBNC",
    "VLLM_PACKED",
    "VLLM_V0",
    "from_flashinfer",
    "from_lmcache",
    "from_sglang",
    "from_transformers",
    "from_trtllm",
    "from_vllm",
    "from_vllm_latent",
    "padded_block_table",
    "slot_mapping",
    "to_flashinfer",
    "to_lmcache",
    "to_sglang",
    "to_transformers",
    "to_trtllm",
    "to_vllm",
    "to_vllm_latent",
]
