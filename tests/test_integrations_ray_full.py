"""A Ray object store that is full, and so is the disk that it would spill to."""

from __future__ import annotations

import numpy as np
import pytest
from ray_helpers import ray_node
from stream_helpers import sample

import hurray_wire as hw
from hurray_wire.integrations.ray import get, put

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


def test_a_full_store() -> None:
    """Our error, with Ray's own behind it; what was stored before is still there, and what fits still fits."""
    settings = {"local_fs_capacity_threshold": 0.001, "object_store_full_delay_ms": 10}
    with ray_node(object_store_memory=80 << 20, _system_config=settings) as ray:
        first = put(sample(0))
        pool = np.zeros((100, 64, 16, 1024), np.int8)
        large = hw.BlockPagedTensor(pool, block_table=[0], seq_ptr=[0, 1], seq_lens=[64])
        assert large.nbytes > 80 << 20
        with pytest.raises(hw.StoreError, match="not stored") as caught:
            put(large)
        assert isinstance(caught.value.__cause__, ray.exceptions.RayError)
        assert get(first) == sample(0)
        assert get(put(sample(1))) == sample(1)
