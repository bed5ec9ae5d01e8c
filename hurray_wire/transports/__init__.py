"""Tensors over transfer engines: NIXL, Mooncake, or plain sockets, behind one interface.

Both ends register their pools once. The sender offers a tensor: its header, and where its pages lie. The receiver reads
the header, chooses pages of its own, and the engine reads straight from the one pool into the other, one-sided; only
tables and scales go through a block in between. Everything that `decode_parts` checks is checked.

An engine's package is imported when an endpoint of it is made, and not before. docs/transports.md says what each one
copies, and how each fault ends.

Example:
    >>> import numpy as np
    >>> import hurray_wire as hw
    >>> from hurray_wire import transports
    >>> theirs, mine = np.ones((4, 2, 1, 8), np.float16), np.zeros((9, 2, 1, 8), np.float16)
    >>> t = hw.BlockPagedTensor(theirs, block_table=[2, 1], seq_ptr=[0, 2], seq_lens=[4])
    >>> with transports.endpoint("socket") as one, transports.endpoint("socket") as other:
    ...     peer, _ = one.connect(other.address), other.connect(one.address)
    ...     registrations = one.register(theirs), other.register(mine)
    ...     outgoing = one.send(peer, t, pages="live")
    ...     back = other.receive(timeout=10).read_into(mine, [7, 3], timeout=10)
    ...     outgoing.wait(timeout=10)
    ...     back.block_table.tolist(), int(mine.sum())
    ([7, 3], 32)
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from hurray_wire.transports.endpoints import Endpoint
from hurray_wire.transports.engine import Engine
from hurray_wire.transports.incoming import Incoming
from hurray_wire.transports.memory import Registration
from hurray_wire.transports.outgoing import Outgoing
from hurray_wire.transports.reading import Reading

__all__ = ["ENGINES", "Endpoint", "Engine", "Incoming", "Outgoing", "Reading", "Registration", "endpoint"]

ENGINES: dict[str, tuple[str, str]] = {
    "nixl": ("nixl", "NixlEngine"),
    "mooncake": ("mooncake", "MooncakeEngine"),
    "socket": ("sockets", "SocketEngine"),
}
"""Name of each engine: its module here, and its class."""


def endpoint(engine: str | Engine, *arguments: Any, **options: Any) -> Endpoint:
    """An end of a transfer engine.

    Args:
        engine: "nixl" (`pip install 'hurray-wire[nixl]'`), "mooncake" (`[mooncake]`), "socket"; or an engine made
            already.
        arguments, options: of the engine's class: see `hurray_wire.transports.nixl`, `.mooncake`, `.sockets`.

    Raises:
        ImportError: its package, or a library of the system that it needs, is not installed.
        ValueError: no such engine.
        TransferError: it does not start.

    Example:
        >>> from hurray_wire import transports
        >>> with transports.endpoint("socket", host="127.0.0.1") as end:
        ...     end.address.decode().split()[1]
        '127.0.0.1'
    """
    if isinstance(engine, Engine):
        return Endpoint(engine)
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(map(repr, ENGINES))}, not {engine!r}")
    module, name = ENGINES[engine]
    make: Callable[..., Engine] = getattr(import_module(f"hurray_wire.transports.{module}"), name)
    return Endpoint(make(*arguments, **options))
