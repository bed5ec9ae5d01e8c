"""NIXL: agents that read each other's registered memory, over UCX unless told otherwise. Needs `nixl`.

Headers travel as NIXL notifications, pages by READ transfers of descriptor lists. What a peer needs to read a region
(NIXL's partial agent metadata) travels with each offer; an address is the agent's metadata when it was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import urandom
from typing import Any

import numpy as np

from hurray_wire.arrays import Bytes, address
from hurray_wire.errors import Code, TransferError
from hurray_wire.transports.engine import Engine, Region
from hurray_wire.transports.memory import region_bytes
from hurray_wire.transports.runs import Runs

_LOST = ("nixlRemoteDisconnectError", "nixlCanceledError")
_REFUSED = ("nixlNotFoundError", "nixlMismatchError", "nixlInvalidParamError", "nixlNotAllowedError")

_LOOK_MICROSECONDS = 1000
"""How often NIXL's thread looks for what UCX did not wake it for."""


@dataclass(eq=False)
class Work:
    """A transfer of NIXL's; its handle must not be asked about once it has been released."""

    handle: Any
    released: bool = False


class NixlEngine(Engine):
    """One NIXL agent.

    Args:
        name: the agent's name, unique among its peers; None draws one.
        backend: NIXL's plugin.
        progress: a thread of NIXL's, which a sender needs to be read over TCP while it does something else; an end that
            only receives does without, since a reading polls.
        agent: an agent that is there already, with `backend` in it; it is not closed with the endpoint.
    """

    message_bytes = 1 << 20

    def __init__(
        self, name: str | None = None, *, backend: str = "UCX", progress: bool = True, agent: Any = None
    ) -> None:
        if agent is None:
            agent = _agent(name or f"hurray-{urandom(8).hex()}", backend, progress)
        self._agent = agent
        self._backend = backend
        self._admitted: set[tuple[str, bytes]] = set()
        self._regions: dict[int, Region] = {}

    def address(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def connect(self, address: bytes) -> str:
        return self._added(address)

    def _added(self, metadata: bytes) -> str:
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise _translated(error, "metadata that NIXL does not take", Code.MEMORY_REFUSED) from None
        return name.decode() if isinstance(name, bytes) else str(name)

    def register(self, memory: Bytes) -> Region:
        try:
            descriptors = self._agent.get_reg_descs([(address(memory), memory.size, 0, "")], "DRAM")
            registered = self._agent.register_memory(descriptors, backends=[self._backend])
            access = self._agent.get_partial_agent_metadata(registered, False, [self._backend])
        except Exception as error:
            raise _translated(error, "NIXL does not register this memory", Code.MEMORY_REFUSED) from None
        return region_bytes(memory, registered, bytes(access))

    def deregister(self, region: Region) -> None:
        self._agent.deregister_memory(region.token, backends=[self._backend])

    def admit(self, peer: str, access: bytes) -> None:
        if (peer, access) in self._admitted:
            return
        # Metadata names its agent, and loading it replaces what is known of that one: nobody speaks for another.
        if peer.encode() not in access or self._added(access) != peer:
            raise TransferError(f"{peer} gives no access of its own", code=Code.MEMORY_REFUSED, where="access")
        self._admitted.add((peer, access))

    def post(self, peer: str, runs: Runs) -> Work:
        work = None
        try:
            lists = [self._descriptors(start, runs) for start in (runs.target, runs.source)]
            work = Work(self._agent.initialize_xfer("READ", *lists, peer, backends=[self._backend]))
            self._agent.transfer(work.handle)
        except Exception as error:
            if work is not None:
                self._released(work)
            raise _translated(error, f"{peer}: NIXL does not begin to read") from None
        return work

    def _descriptors(self, start: Any, runs: Runs) -> Any:
        rows = np.zeros((start.size, 3), np.uint64)
        rows[:, 0], rows[:, 1] = start, runs.length
        return self._agent.get_xfer_descs(rows, "DRAM")

    def poll(self, work: Work) -> bool:
        try:
            state = self._agent.check_xfer_state(work.handle)
        except Exception as error:
            self._released(work)
            raise _translated(error, "NIXL gave up reading") from None
        if state == "PROC":
            return False
        self._released(work)
        if state != "DONE":
            raise TransferError("NIXL failed to read, and does not say why", where="transfer")
        return True

    def abandon(self, work: Work) -> bool:
        """NIXL lets go at once of what is under way, and UCX goes on to write it: so it is waited for."""
        if work.released:
            return True
        try:
            if self._agent.check_xfer_state(work.handle) == "PROC":
                return False
        except Exception:
            return self._released(work)  # it has failed, as it may
        return self._released(work)

    def _released(self, work: Work) -> bool:
        try:
            self._agent.release_xfer_handle(work.handle)
        except Exception:
            return False
        work.released = True
        return True

    def tell(self, peer: str, message: bytes) -> None:
        try:
            self._agent.send_notif(peer, message)  # NIXL 1.5 fails where a backend is named
        except Exception as error:
            raise _translated(error, f"{peer}: NIXL does not notify", Code.PEER_LOST) from None

    def hear(self) -> list[tuple[str, bytes]]:
        heard = self._agent.get_new_notifs()
        return [(peer, bytes(message)) for peer, messages in heard.items() for message in messages]

    def close(self) -> None:
        self._agent = None


def _agent(name: str, backend: str, progress: bool) -> Any:
    """An agent whose thread sleeps while nothing moves.

    NIXL's Python class asks for a thread that looks without pause (`pthrDelay` 0) and takes a core that hashing could
    use; there is no argument for it. The agent proper is therefore made here, and put in the place of one without a
    backend; where NIXL's insides are others than expected, the thread is as NIXL makes it.
    """
    from nixl import _api

    bindings: Any = getattr(_api, "nixlBind", None)
    if not progress or not hasattr(getattr(bindings, "nixlAgentConfig", None), "pthrDelay"):
        return _api.nixl_agent(name, _api.nixl_agent_config(enable_prog_thread=progress, backends=[backend]))
    agent = _api.nixl_agent(name, _api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    config = bindings.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, _LOOK_MICROSECONDS
    agent.agent = bindings.nixlAgent(name, config)
    agent.create_backend(backend, {})
    return agent


def _translated(error: Exception, message: str, code: Code = Code.TRANSFER_FAILED) -> TransferError:
    """NIXL's exceptions have no base of their own: they are told by name."""
    name = type(error).__name__
    found = Code.PEER_LOST if name in _LOST else Code.MEMORY_REFUSED if name in _REFUSED else code
    return TransferError(f"{message} ({name}: {str(error)[:200]})", code=found, where="transfer")
