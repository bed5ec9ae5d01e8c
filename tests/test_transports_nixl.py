"""What NIXL is told, by an agent that only notes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hurray_wire as hw
from hurray_wire.transports.nixl import NixlEngine
from hurray_wire.transports.runs import Runs

RUNS = Runs(np.array([64]), np.array([128]), np.array([8]))


class Agent:
    """States of a transfer, one an ask; asking about what has been released crashes the real one."""

    def __init__(self, *states: str) -> None:
        self.states = list(states)
        self.released = False

    def get_xfer_descs(self, rows: Any, _: str) -> Any:
        return rows

    def initialize_xfer(self, *_: Any, **__: Any) -> str:
        return "handle"

    def transfer(self, _: str) -> None:
        if self.states[:1] == ["refused"]:
            raise RuntimeError("refused")

    def check_xfer_state(self, _: str) -> str:
        assert not self.released
        state = self.states.pop(0)
        if state == "broken":
            raise RuntimeError("broken")
        return state

    def release_xfer_handle(self, _: str) -> None:
        assert not self.released
        self.released = True


def test_what_is_given_up_is_let_go_of_when_nothing_is_written_any_more() -> None:
    agent = Agent("PROC", "PROC", "DONE")
    engine = NixlEngine(agent=agent)
    work = engine.post("peer", RUNS)
    assert [engine.abandon(work), agent.released] == [False, False]
    assert not engine.abandon(work)
    assert [engine.abandon(work), agent.released] == [True, True]
    assert engine.abandon(work)


@pytest.mark.parametrize("end", ["broken", "ERR"])
def test_what_failed_is_let_go_of_once(end: str) -> None:
    agent = Agent("PROC", end)
    engine = NixlEngine(agent=agent)
    work = engine.post("peer", RUNS)
    assert not engine.poll(work)
    with pytest.raises(hw.TransferError):
        engine.poll(work)
    assert engine.abandon(work)
    assert agent.released


def test_what_breaks_while_it_is_given_up_is_let_go_of() -> None:
    agent = Agent("broken")
    engine = NixlEngine(agent=agent)
    assert engine.abandon(engine.post("peer", RUNS))
    assert agent.released


def test_what_does_not_begin_is_let_go_of() -> None:
    agent = Agent("refused")
    with pytest.raises(hw.TransferError):
        NixlEngine(agent=agent).post("peer", RUNS)
    assert agent.released
