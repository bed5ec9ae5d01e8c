"""A child process in which attacks are decoded, each in a fork of its own under ceilings. Not a test.

A fork starts with the parent's memory, warmed up, so that what it grows by is the attack's. It may have 2 GiB of
address space and 20 seconds of processor time (a reader that allocates or loops as it is told dies of them), and
says how much its resident memory grew at most.
"""

from __future__ import annotations

import io
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attacks
import numpy as np
from support import worked

import hurray_wire as hw
from hurray_wire.dump import main as dump_main

ADDRESS_SPACE, SECONDS = 2 << 30, 20


def in_a_fork(call: Callable[[], Any]) -> dict[str, Any]:
    """What `call` gives or raises, by how many bytes the process grew, and its processor time."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(ours)
        told = _measured(call)
        os.write(theirs, json.dumps(told).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(data) if data else {"answer": f"died of status {status}", "grown": 0, "seconds": 0.0}


def _measured(call: Callable[[], Any]) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    before, begun = peak(), time.process_time()
    try:
        answer = f"ok {call()}"
    except hw.HurrayWireError as error:
        answer = f"{type(error).__name__} {error.code}"
        if len(str(error)) > 2000:
            answer = f"ENDLESS MESSAGE of {len(str(error))} characters"
    except BaseException as error:  # what must never come out is told as it is
        answer = f"ESCAPED {type(error).__name__}: {error}"[:500]
    return {"answer": answer, "grown": peak() - before, "seconds": time.process_time() - begun}


def peak() -> int:
    """Bytes of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# Every door, as the attacks meet it: each gives words about a tensor, or raises.


def by_decode(data: bytes, **options: Any) -> str:
    return words(hw.decode(data, **options))


def by_lenient(data: bytes, **options: Any) -> str:
    return words(hw.decode(data, strict=False, verify=False, **options))


def by_inspect(data: bytes, **options: Any) -> str:
    return f"{hw.inspect(data).total_bytes} bytes"


def by_opening(data: bytes, **options: Any) -> str:
    with hw.open_frame(data, **options) as frame:
        return words(frame.tensor())


def by_reading_at(data: bytes, **options: Any) -> str:
    with hw.open_frame(lambda at, n: data[at : at + n], **options) as frame:
        return words(frame.tensor())


def by_feeding(data: bytes, **options: Any) -> str:
    decoder = hw.FrameDecoder(**options)
    for at in range(0, len(data), 4099):
        decoder.feed(data[at : at + 4099])
    found = decoder.next()
    decoder.close()
    return words(found)


def by_stream(data: bytes, **options: Any) -> str:
    with hw.StreamReader(io.BytesIO(data), **options) as reader:
        return words(next(reader))


def by_header(data: bytes, **options: Any) -> str:
    with hw.StreamReader(io.BytesIO(data), **options) as reader:
        header = reader.next_header()
        assert header is not None
        header.skip()
        return "skipped"


def into_pages(data: bytes, **options: Any) -> str:
    pool = np.zeros((9, 4, 2, 8), np.float16)
    try:
        return words(hw.decode_into(data, pool, np.arange(9)[:5], **options))
    except hw.HurrayWireError:
        raise
    except (ValueError, IndexError) as error:  # the pool and the ids are the caller's own
        return f"not for this pool: {error}"[:80]


def words(found: Any) -> str:
    return type(found).__name__


DOORS: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        *(by_decode, by_lenient, by_inspect, by_opening, by_reading_at),
        *(by_feeding, by_stream, by_header, into_pages),
    )
}


def run(*numbers: str) -> None:
    """Every variant of some attacks at every door and the command: a JSON list of what each met."""
    for door in DOORS.values():  # what is made once
        for sound in (hw.encode(worked()), hw.encode(worked(), compression="zstd")):
            door(sound)
    met: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, silent():
        _dumped(Path(folder), hw.encode(worked()))
        for number in map(int, numbers):
            attack = attacks.ATTACKS[number]
            for variant, make in attack.variants.items():
                data = make()
                for name, door in DOORS.items():
                    told = in_a_fork(lambda d=door, b=data, o=attack.options: d(b, **o))  # type: ignore[misc]
                    met.append({"number": number, "variant": variant, "door": name, "bytes": len(data), **told})
                told = in_a_fork(lambda b=data: _dumped(Path(folder), b))  # type: ignore[misc]
                met.append({"number": number, "variant": variant, "door": "hurray-dump", "bytes": len(data), **told})
    sys.__stdout__.write(json.dumps(met))  # type: ignore[union-attr]


@contextmanager
def silent() -> Iterator[None]:
    """What the command prints is kept, to look for what it must not say."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def _dumped(folder: Path, data: bytes) -> str:
    path = folder / "attack"
    path.write_bytes(data)
    fields = ["--hex"] if len(data) < 1 << 20 else []  # of which there is a line each
    status = dump_main([*fields, str(path)])
    printed: list[Any] = [sys.stdout.buffer, sys.stderr.buffer]
    told = "".join(buffer.getvalue().decode() for buffer in printed)
    bad = next((word for word in ("internal error", "Traceback", "not enough memory") if word in told), "")
    return f"status {status}{bad and ', says '}{bad}"
