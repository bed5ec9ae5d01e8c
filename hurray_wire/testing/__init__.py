"""Hold an implementation of the wire, in any language, to the golden corpus; and strategies for valid tensors.

`python -m hurray_wire.testing --decode 'CMD {file}' --encode 'CMD {case}'` runs the corpus against commands;
`docs/conformance.md` says what they must print. From Python, `Corpus` gives the cases, `report` says of a blob what
such a command must say, and `tensors()` draws valid tensors (it needs hypothesis, imported when it is asked for).

The top room: it imports from every other, and nothing imports it.

Example:
    >>> import numpy as np
    >>> import hurray_wire as hw
    >>> from hurray_wire.testing import report
    >>> t = hw.BlockPagedTensor(np.zeros((1, 4, 1, 8), np.int8), block_table=[0], seq_ptr=[0, 1], seq_lens=[4])
    >>> report(hw.encode(t))["verdict"], report(b"HRR")["code"]
    ('accept', 'truncated')
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hurray_wire.testing.corpus import Case, Corpus
    from hurray_wire.testing.reporting import report
    from hurray_wire.testing.strategies import metadata, tensors

__all__ = ["Case", "Corpus", "metadata", "report", "tensors"]

_HOMES = {
    "Case": "corpus",
    "Corpus": "corpus",
    "metadata": "strategies",
    "report": "reporting",
    "tensors": "strategies",
}


def __getattr__(name: str) -> Any:
    """Each module is imported when something of it is asked for: hypothesis for strategies only."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
