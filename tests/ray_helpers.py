"""A Ray node of the tests' own on loopback, without a dashboard or reports to anybody."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support import ROOT

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
}


@contextmanager
def ray_node(**options: Any) -> Iterator[Any]:
    """Ray, started for as long as the context lasts; its workers find the package and the tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Ray warns of while it starts is its own
        os.environ |= QUIET
        ray = pytest.importorskip("ray", reason="needs the ray package")
        paths = f"{ROOT}:{ROOT / 'tests'}"
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            configure_logging=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": paths}},
            **{"object_store_memory": 512 << 20, **options},
        )
    try:
        yield ray
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.shutdown()
