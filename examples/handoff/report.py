"""What is printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from handoff.jobs import STAGES, Job, Received, Sent

_COLUMNS = (*STAGES, "elapsed")


def head(dtype_of: str) -> str:
    """The table's head: times in milliseconds."""
    return f"{dtype_of:<34}{'bytes':>12}{'ratio':>7}{'pages':>11}" + "".join(f"{name:>12}" for name in _COLUMNS)


def row(job: Job, sent: Sequence[Sent], received: Received, seconds: Mapping[str, float]) -> str:
    """One transfer."""
    tokens = sum(s.token_bytes for s in sent)
    pages = f"{sum(s.pages_sent for s in sent)}/{sum(s.pages_named for s in sent)}"
    times = "".join(f"{seconds[name] * 1000:>12.1f}" for name in _COLUMNS)
    return f"{job.name:<34}{received.bytes:>12,}{tokens / received.bytes:>7.2f}{pages:>11}{times}"


def recomputed(seconds: float) -> str:
    """What a transfer is an alternative to."""
    return f"{'prefill computed again':<{34 + 12 + 7 + 11 + 12 * len(STAGES)}}{seconds * 1000:>12.1f}"


def stages(sent: Sequence[Sent], received: Received) -> dict[str, float]:
    """Seconds by stage: of several ranks, which work side by side, the slowest one's."""
    names = ("paging", "encoding", "sending")
    return received.seconds | {name: max(s.seconds[name] for s in sent) for name in names}
