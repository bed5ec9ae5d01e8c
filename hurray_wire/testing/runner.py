"""The corpus against commands: what is asked of them, what they answer, where that is not what the manifest says.

A decoding command is either started for each case, with `{file}` and `{options}` in it replaced, or, without `{file}`,
started once and asked a line of JSON a case. `docs/conformance.md` is the protocol in words.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hurray_wire.testing.corpus import Case
from hurray_wire.testing.encoding import request

OK, DIFFERS, SKIPPED = "ok", "differs", "skipped"
NOT_EXPRESSIBLE = 3
"""Exit status by which an encoding command says that it cannot express a case."""
_THREADS = 4
_SECONDS = 120


@dataclass(frozen=True)
class Outcome:
    """What one command made of one case."""

    case: Case
    task: str
    """ "decode" or "encode"."""
    state: str
    message: str = ""


# Judging.


def judge(case: Case, told: Any) -> tuple[str, str]:
    """The state of a decoder's answer, and what is wrong with it."""
    if not isinstance(told, dict) or told.get("verdict") not in ("accept", "reject"):
        return DIFFERS, f"no verdict in {told!r:.100}"
    if told["verdict"] != case.verdict:
        if case.implementation_limit:
            return SKIPPED, f"accepted: {case.implementation_limit}"
        why = f" {told.get('error_class')} {told.get('code')}" if told["verdict"] == "reject" else ""
        return DIFFERS, f"{told['verdict']}s{why}, must {case.verdict}"
    wrong = list(_error_faults(case, told) if case.error else _value_faults(case.expected or {}, told))
    return (DIFFERS, "; ".join(wrong)) if wrong else (OK, "")


def _error_faults(case: Case, told: dict[str, Any]) -> Iterator[str]:
    error = case.error or {}
    for name in ("error_class", "code"):
        if told.get(name) != error[name]:
            yield f"{name} {told.get(name)!r}, must be {error[name]!r}"
    for name in ("where", "offset"):  # an implementation may keep them to itself
        if None not in (told.get(name), error[name]) and told[name] != error[name]:
            yield f"{name} {told[name]!r}, must be {error[name]!r}"


def _value_faults(expected: dict[str, Any], told: dict[str, Any]) -> Iterator[str]:
    for name, value in expected.items():
        if name == "violations":
            if [fault[1:3] for fault in told.get(name) or ()] != [fault[1:3] for fault in value]:
                yield f"violations {told.get(name)!r:.100}, must be {value!r:.100}"
        elif name == "items":
            yield from _item_faults(value, told.get(name))
        elif name not in told:
            yield f"{name} is not told"
        elif told[name] != value:
            yield f"{name} {told[name]!r:.100}, must be {value!r:.100}"


def _item_faults(expected: list[dict[str, Any]], told: Any) -> Iterator[str]:
    if not isinstance(told, list) or len(told) != len(expected):
        yield f"must give {len(expected)} items"
        return
    for index, (value, item) in enumerate(zip(expected, told, strict=True)):
        yield from (f"item {index}: {fault}" for fault in _value_faults(value, item))


# Asking.


class Decoder(AbstractContextManager["Decoder"]):
    """A decoding command."""

    def __init__(self, template: str) -> None:
        self.words = shlex.split(template)
        self.started = not any("{file}" in word for word in self.words)
        self.takes_options = self.started or any("{options}" in word for word in self.words)
        self.process = None
        if self.started:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.process = subprocess.Popen(self.words, **pipes)  # type: ignore[call-overload]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None:
            with suppress(OSError):  # it may have ended with words to it on the way
                self.process.stdin.close()
            self.process.stdout.close()
            self.process.wait()

    def ask(self, path: Path, options: dict[str, Any]) -> Any:
        """The command's answer, parsed; text that is no JSON comes back as it is."""
        if self.process is not None:
            self.process.stdin.write(json.dumps({"file": str(path), "options": options}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        else:
            line = _run(_filled(self.words, file=str(path), options=json.dumps(options))).stdout.decode(
                errors="replace"
            )
        try:
            return json.loads(line)
        except ValueError:
            return line


def _filled(words: Sequence[str], **values: str) -> list[str]:
    for name, value in values.items():
        words = [word.replace("{" + name + "}", value) for word in words]
    return list(words)


def _run(words: list[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(words, capture_output=True, check=False, timeout=_SECONDS)


def decode_one(decoder: Decoder, case: Case, folder: Path) -> Outcome:
    """Ask a decoding command about a case."""
    if case.options and not decoder.takes_options:
        return Outcome(case, "decode", SKIPPED, "the command takes no {options}")
    path = case.path
    if case.stored:
        path = folder / case.path.stem
        path.write_bytes(case.data())
    try:
        return Outcome(case, "decode", *judge(case, decoder.ask(path, case.options)))
    except (OSError, subprocess.TimeoutExpired) as error:
        return Outcome(case, "decode", DIFFERS, str(error))


def encode_one(words: list[str], case: Case, folder: Path) -> Outcome:
    """Ask an encoding command for a case's bytes."""
    path = folder / f"{case.name.replace('/', '-')}.json"
    path.write_text(json.dumps(request(case)), encoding="utf-8")
    try:
        done = _run(_filled(words, case=str(path)))
    except (OSError, subprocess.TimeoutExpired) as error:
        return Outcome(case, "encode", DIFFERS, str(error))
    if done.returncode == NOT_EXPRESSIBLE:
        return Outcome(case, "encode", SKIPPED, "not expressible, says the command")
    if done.returncode:
        return Outcome(case, "encode", DIFFERS, f"exit status {done.returncode}: {done.stderr[-200:]!r}")
    return Outcome(case, "encode", *_compared(done.stdout, case.data()))


def _compared(found: bytes, expected: bytes) -> tuple[str, str]:
    if found == expected:
        return OK, ""
    at = next(
        (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(len(found), len(expected))
    )
    return DIFFERS, f"{len(found)} bytes, must be {len(expected)}; the first difference is at {at}"


def run(cases: Sequence[Case], decode: str | None, encode: str | None) -> Iterator[Outcome]:
    """Every case through the commands that are given, in the order of the corpus."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if decode is not None:
            with Decoder(decode) as decoder:
                threads = 1 if decoder.started else _THREADS
                yield from _mapped(lambda case: decode_one(decoder, case, folder), cases, threads)
        if encode is not None:
            words = shlex.split(encode)
            authored = [case for case in cases if case.encode is not None]
            yield from _mapped(lambda case: encode_one(words, case, folder), authored, _THREADS)


def _mapped(work: Callable[[Case], Outcome], cases: Sequence[Case], threads: int) -> Iterator[Outcome]:
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(work, cases)
