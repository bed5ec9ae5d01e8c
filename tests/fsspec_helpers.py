"""File systems for the tests: an object store whose files appear when committed, and one that says what it was asked.

Both keep their files in a dictionary of their own; fsspec must be there.
"""

from __future__ import annotations

from typing import Any

import pytest

fsspec = pytest.importorskip("fsspec", reason="needs the fsspec package")

from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402 - found by then
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem  # noqa: E402


class Asked(MemoryFileSystem):  # type: ignore[misc]
    """Files in memory, and every range that was asked for; `mangle` makes its answers others."""

    cachable = False

    def __init__(self, **files: bytes) -> None:
        super().__init__()
        self.store: dict[str, Any] = {}  # its own, not those of every other file system in memory
        self.pseudo_dirs = [""]
        self.requests: list[tuple[str, int, int]] = []
        self.calls: list[str] = []
        self.mangle: Any = None
        for name, data in files.items():
            self.pipe_file(f"/{name}", data)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> Any:
        found = super().cat_file(path, start, end)
        self.calls.append("cat_file")
        self.requests.append((path, start or 0, len(found)))
        return found if self.mangle is None else self.mangle(found)

    def cat_ranges(self, paths: Any, starts: Any, ends: Any, **options: Any) -> Any:
        self.calls.append("cat_ranges")
        count = len(self.calls)
        found = super().cat_ranges(paths, starts, ends, **options)
        del self.calls[count:]  # how many requests it came to is told by them
        return found

    def forget(self) -> None:
        self.requests, self.calls = [], []


class ObjectFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file of `Objects`: uploaded in pieces, there when it is committed."""

    def _initiate_upload(self) -> None:
        self.pieces: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        if self.fs.room is not None and sum(map(len, self.pieces)) + self.buffer.tell() > self.fs.room:
            raise OSError(28, "No space left on device")
        self.pieces.append(self.buffer.getvalue())
        if final and self.autocommit:
            self.commit()
        return True

    def commit(self) -> None:
        self.fs.files[self.path] = b"".join(self.pieces)

    def discard(self) -> None:
        self.fs.discarded += 1


class Objects(AbstractFileSystem):  # type: ignore[misc]
    """An object store, as s3 and its like are; `room` bytes an object at the most."""

    protocol = "s3"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}
        self.room: int | None = None
        self.discarded = 0

    def _open(self, path: str, mode: str = "rb", **options: Any) -> ObjectFile:
        return ObjectFile(self, path, mode, block_size=5 << 20, autocommit=options["autocommit"])

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        if path not in self.files:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.files[path]), "type": "file"}

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        self.info(path)
        return self.files[path][start:end]

    def rm_file(self, path: str) -> None:
        self.info(path)
        del self.files[path]
