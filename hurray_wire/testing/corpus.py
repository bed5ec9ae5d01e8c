"""The golden corpus as values: each case, its bytes, what a reader must say of them. It is read, never written."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Case", "Corpus"]

FORMAT = 1
"""The manifest's own format, which this reads."""


@dataclass(frozen=True)
class Case:
    """One case of the manifest; `docs/conformance.md` says what its entries mean."""

    name: str
    path: Path
    form: str
    """ "bare", "hrkv", or "none" for bytes that begin like neither."""
    verdict: str
    """ "accept" or "reject"."""
    origin: str
    sha256: str
    covers: frozenset[str]
    note: str = ""
    stored: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    """What the reader is asked for: "stream", "strict", "limits", "expect"."""
    expected: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    reference: dict[str, Any] | None = None
    """What the reference implementation says of a bare item, and why it differs where it does."""
    canonical: bool = False
    """Whether decoding and encoding again gives the same bytes."""
    encode: dict[str, Any] | None = None
    """Options under which a writer gives exactly these bytes."""
    implementation_limit: str = ""
    """Why another implementation may accept what is refused here."""

    @property
    def is_stream(self) -> bool:
        """Whether the bytes are those of a whole stream."""
        return bool(self.options.get("stream"))

    def data(self) -> bytes:
        """The bytes.

        Raises:
            ValueError: the file is not the one of the manifest.
        """
        stored = self.path.read_bytes()
        data = gzip.decompress(stored) if self.stored == "gzip" else stored
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise ValueError(f"{self.path} is not the file of the manifest")
        return data


@dataclass(frozen=True)
class Corpus:
    """All cases of a manifest, and its cases of plain values.

    Example:
        >>> corpus = Corpus.load()  # doctest: +SKIP
        >>> len(corpus.cases) > 400  # doctest: +SKIP
        True
    """

    root: Path
    cases: tuple[Case, ...]
    values: tuple[dict[str, Any], ...]

    @classmethod
    def load(cls, root: Path | str | None = None) -> Corpus:
        """The corpus in a folder; by default `fixtures/` of the repository that this package lies in.

        Raises:
            FileNotFoundError: there is no manifest.
            ValueError: it is of another format.
        """
        folder = Path(__file__).resolve().parents[2] / "fixtures" if root is None else Path(root)
        told = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if told["format"] != FORMAT:
            raise ValueError(f"manifest of format {told['format']}, this reads {FORMAT}")
        return cls(folder, tuple(_case(folder, entry) for entry in told["cases"]), tuple(told["values"]))

    def __iter__(self) -> Iterator[Case]:
        return iter(self.cases)

    def named(self, name: str) -> Case:
        """The case of a name."""
        return next(case for case in self.cases if case.name == name)


def _case(folder: Path, entry: dict[str, Any]) -> Case:
    told = {key: value for key, value in entry.items() if key in Case.__dataclass_fields__}
    return Case(**{**told, "path": folder / entry["file"], "covers": frozenset(entry["covers"])})
