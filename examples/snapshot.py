"""The real snapshot in `fixtures/real`: keys and values that a trained model computed on real text."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import hurray_wire as hw

FOLDER = Path(__file__).resolve().parent.parent / "fixtures" / "real"
ROLES = ("key", "value")


@dataclass(frozen=True)
class Snapshot:
    """Page pools and tables as an engine holds them, and the digests of each sequence's tokens."""

    pools: dict[str, Any]
    about: dict[str, Any]

    @classmethod
    def load(cls) -> Snapshot:
        """Read the files; bfloat16 is kept as its bits."""
        about = json.loads((FOLDER / "snapshot.json").read_text())
        pools = {role: np.load(FOLDER / about["files"][role]["path"]) for role in ROLES}
        return cls(pools, about)

    def tensor(self, role: str) -> hw.BlockPagedTensor:
        """One role's tensor: two sequences that share their first pages."""
        return hw.BlockPagedTensor(
            self.pools[role],
            dtype=self.about["dtype"],
            block_table=self.about["block_table"],
            seq_ptr=self.about["seq_ptr"],
            seq_lens=self.about["seq_lens"],
            kv_role=role,
            layer_index=self.about["layer_index"],
            metadata={"model": self.about["origin"]["model"]["name"]},
        )

    def agrees(self, tensor: hw.BlockPagedTensor) -> bool:
        """Whether every token of every sequence has the bits that the model computed."""
        expected = [entry[f"{tensor.kv_role}_sha256"] for entry in self.about["sequences"]]
        found = [hashlib.sha256(tensor.gather(seq).tobytes()).hexdigest() for seq in range(tensor.num_seqs)]
        return all(digest == expected[i % len(expected)] for i, digest in enumerate(found))
