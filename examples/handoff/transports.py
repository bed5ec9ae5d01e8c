"""The transports that there are, by name."""

from __future__ import annotations

from importlib.util import find_spec

from handoff.connection import SocketTransport, Transport
from handoff.transfer_engines import EngineTransport

ENGINES = {"nixl": "nixl", "mooncake": "mooncake"}
"""Names of transfer engines, and the package that each one is."""


def names() -> list[str]:
    """What can be chosen here: engines where they are installed."""
    engines = ENGINES if find_spec("hurray_wire.transports") is not None else {}
    return ["socket", *(name for name, package in engines.items() if find_spec(package) is not None)]


def compresses(name: str) -> bool:
    """Whether it can send compressed frames."""
    return name not in ENGINES


def make(name: str) -> Transport:
    """One process's own."""
    return SocketTransport() if name == "socket" else EngineTransport(name)
