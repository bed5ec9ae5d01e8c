"""The numbered attacks, each at every door in a process of its own under ceilings of memory and time (`ATTACKS.md`)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attacks import ATTACKS, Attack
from stream_helpers import run_child

DUMPED_ROOM = 96 << 20
"""The command has no limits but its own: it decompresses what a file says it holds."""


def complaints(attack: Attack, met: dict[str, Any]) -> list[str]:
    """What went otherwise than it must."""
    door, answer = met["door"], met["answer"]
    told = []
    if door == "by_decode" and answer != "ok BlockPagedTensor" and answer not in attack.outcomes:
        told.append(f"not one of {sorted(attack.outcomes)}")
    if attack.accepted:
        fine = answer == "ok status 0" if door == "hurray-dump" else answer.startswith("ok")
        fine |= door == "into_pages" and answer == "MismatchError mismatch"  # not of this pool's shape
        if not fine:
            told.append("must be accepted")
    elif door == "by_decode" and answer.startswith("ok"):
        told.append("must be refused")
    if answer.startswith(("ESCAPED", "died", "ENDLESS")) or "says" in answer:
        told.append("came out")
    if (
        door in ("by_opening", "by_reading_at", "by_feeding", "by_stream")
        and answer.startswith("ok") != attack.accepted
    ):
        told.append("is not what decode says")
    room = max(attack.room, DUMPED_ROOM if door == "hurray-dump" else 0)
    if met["grown"] > room + 3 * met["bytes"]:
        told.append(f"grew by {met['grown'] >> 10} KiB for {met['bytes']} bytes")
    return [f"{met['variant']!r} {door}: {answer}: {text}" for text in told]


@pytest.fixture(scope="module")
def met() -> dict[int, list[dict[str, Any]]]:
    """What every attack met, from one child."""
    found: dict[int, list[dict[str, Any]]] = {number: [] for number in ATTACKS}
    for row in json.loads(run_child("attack_child", "run", *ATTACKS, timeout=900)):
        found[row["number"]].append(row)
    return found


@pytest.mark.parametrize("number", sorted(ATTACKS), ids=lambda n: f"attack-{n}")
def test_an_attack_is_met(number: int, met: dict[int, list[dict[str, Any]]]) -> None:
    attack = ATTACKS[number]
    assert len(met[number]) == 10 * len(attack.variants)
    assert [text for row in met[number] for text in complaints(attack, row)] == []


@pytest.mark.parametrize("number", sorted(ATTACKS), ids=lambda n: f"attack-{n}")
def test_every_outcome_is_one_of_some_variant(number: int, met: dict[int, list[dict[str, Any]]]) -> None:
    """What the list says can come does come."""
    answers = {row["answer"] for row in met[number] if row["door"] == "by_decode"}
    found = {"ok" if answer.startswith("ok") else answer for answer in answers}
    assert found == set(ATTACKS[number].outcomes)
