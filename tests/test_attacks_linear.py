"""A million sequences, ten million table entries: memory in proportion to the bytes. Time is for `tools/linear.py`."""

from __future__ import annotations

import json
import sys

import pytest
from stream_helpers import run_child
from support import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import linear  # isort: skip

BLOBS = {
    "sequences": lambda: linear.many_sequences(linear.SEQUENCES),
    "table entries": lambda: linear.long_table(linear.ENTRIES),
}


def measured(name: str) -> None:
    """Run in a child: what each door grows by, as a share of the blob."""
    data = BLOBS[name]()
    found = {door: linear.least(call, data, rounds=1)[1] / len(data) for door, call in linear.DOORS.items()}
    sys.stdout.write(json.dumps(found))


@pytest.mark.parametrize("name", BLOBS)
def test_memory_is_in_proportion(name: str) -> None:
    found = json.loads(run_child("test_attacks_linear", "measured", name, timeout=600))
    assert found.keys() == linear.DOORS.keys()
    assert {door: share for door, share in found.items() if share > linear.most_memory(door)} == {}
