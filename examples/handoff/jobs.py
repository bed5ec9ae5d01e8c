"""One transfer: what both ends are told of it, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SENDER_PAGE_SIZE, RECEIVER_PAGE_SIZE = 16, 24
STAGES = ("paging", "encoding", "sending", "decoding", "scattering", "rebuilding")
"""What takes time, in order; `elapsed` beside them is all of it as the decode process sees it."""


@dataclass(frozen=True)
class Job:
    """A transfer of one prefilled batch.

    `form` is "cache", for what transformers holds, or "latent", for one fused tensor a layer. `known_prefix`: the
    receiver has the prefix already. `expect`: what a receiver wants that has been set up for something else.
    """

    name: str
    model: str
    dtype: str
    form: str = "cache"
    ranks: tuple[int, ...] = (0,)
    size: int = 1
    """Of how many ranks with a part of the heads each the senders are `ranks`."""
    known_prefix: bool = False
    compression: str | None = None
    quantization: str | None = None
    expect: dict[str, Any] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether nothing on the way may change a bit."""
        return self.quantization is None


@dataclass
class Sent:
    """What a prefill rank says of one transfer."""

    bytes: int = 0
    pages_named: int = 0
    pages_sent: int = 0
    token_bytes: int = 0
    """Of the tokens in the tensors before they were quantised, each sequence's counted, wherever they are shared."""
    header_bytes: int = 0
    """Of the first frame, up to its payload."""
    broken: str | None = None
    """The error of a receiver that went away."""
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Received:
    """What the decode process says of one transfer: the greedy tokens and logits that it led to, and the cache."""

    tokens: Array | None = None
    logits: Array | None = None
    held: list[tuple[Array, Array]] = field(default_factory=list)
    """What was rebuilt of each layer, `[batch, heads, columns, dim]`: keys and values, or a latent's two parts."""
    differences: list[str] = field(default_factory=list)
    """What a receiver that refused has found, one a line."""
    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


def same_bits(a: Array, b: Array) -> bool:
    """Whether two arrays are the same to the bit: NaN equals NaN, zero is not minus zero."""
    return a.dtype == b.dtype and a.shape == b.shape and np.ascontiguousarray(a).tobytes() == b.tobytes()
