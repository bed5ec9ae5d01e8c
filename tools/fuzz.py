"""Fuzz every door through which foreign bytes come in: only the package's own errors, bounded time and memory.

    python tools/fuzz.py [--seconds N] [--runs N] [--seed N] [--engine atheris|own] [--corpus DIR] [--found DIR]
    python tools/fuzz.py --replay FILE...

Inputs come from the golden corpus, are changed by what their bytes mean (`tools/fuzzing/mutation.py`), and sealed
again, so that the rules behind the checksums are met. An execution is one call of one door; the counts of each are
printed. With atheris installed libFuzzer keeps the inputs that reach new code of the package; without it, this
program keeps those that get an answer (door, code, field, line) that no other got. Each finding is kept in a file,
once for each place that it comes from. Exit status 1 where there was one.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import importlib
import importlib.util
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")]
MOST_INPUT = 6000
"""Bytes of an input: small ones are quick, and no rule needs a large one."""
MOST_SECONDS = 5.0
"""Processor time of all doors over one input, which takes a few milliseconds."""
MOST_GROWTH = 160 << 20
"""Bytes by which one input may raise the process's peak: a few times what `targets.LIMITS` lets a bomb make."""
HANGS_AFTER = 300
ALL_DOORS_EVERY = 6
"""Of the own engine's inputs, how many meet all doors whatever the quick ones say."""
REPORT_EVERY = 30.0


def seeds(corpus: str | None = None) -> list[bytes]:
    """The golden corpus, its large files left out, and what an earlier run kept."""
    from hurray_wire.testing import Corpus

    data = {case.data() for case in Corpus.load() if case.path.stat().st_size <= MOST_INPUT}
    data |= {path.read_bytes() for path in Path(corpus).glob("*")} if corpus is not None else set()
    return sorted((d for d in data if len(d) <= MOST_INPUT), key=lambda d: (len(d), d))


class Run:
    """One run: its doors, its clock, what was found."""

    def __init__(self, options: argparse.Namespace) -> None:
        from fuzzing.targets import Doors

        self.options = options
        self.doors = Doors()
        self.begun = self.reported = time.monotonic()
        self.found: dict[str, int] = {}
        self.last_answer = self.last_finding = 0.0
        self.peak = self._peak()

    @staticmethod
    def _peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.begun

    @property
    def executions(self) -> int:
        """Calls of doors."""
        return self.doors.calls.total()

    def one(self, data: bytes, *, screened: bool = False) -> bool:
        """All doors over one input, or the quick ones first; whether an answer was new."""
        fresh = False
        begun = time.thread_time()
        try:
            fresh = self.doors.screen(data) if screened else False
            if fresh or not screened:
                fresh |= self.doors.run(data)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            self._finding(data, _signature(self.doors.target, error), traceback.format_exc())
        took, peak = time.thread_time() - begun, self._peak()
        if took > MOST_SECONDS:
            self._finding(data, f"slow after {self.doors.target}", f"{took:.1f} s of processor time")
        if peak > self.peak + MOST_GROWTH:
            self._finding(data, f"memory by {self.doors.target}", f"the peak grew by {peak - self.peak >> 20} MiB")
        self.peak = max(self.peak, peak)
        if fresh:
            self.last_answer = self.elapsed
        if time.monotonic() - self.reported > REPORT_EVERY:
            self.report()
        return fresh

    def _finding(self, data: bytes, signature: str, told: str) -> None:
        self.found[signature] = self.found.get(signature, 0) + 1
        if self.found[signature] > 1:
            return
        self.last_finding = self.elapsed
        folder = Path(self.options.found)
        folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(signature.encode()).hexdigest()[:12]
        (folder / name).write_bytes(data)
        (folder / f"{name}.txt").write_text(f"{signature}\n{told}\n")
        print(f"FOUND {signature}: {folder / name}\n{told}", flush=True)

    def report(self) -> None:
        """A line on how far the run is."""
        self.reported = time.monotonic()
        faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
        print(
            f"{self.elapsed:7.0f} s  {self.executions:>11,} executions  {self.doors.inputs:>9,} inputs  "
            f"{len(self.doors.seen):>5} answers, the last new one at {self.last_answer:.0f} s  "
            f"{len(self.found)} findings  peak {self.peak >> 20} MiB",
            flush=True,
        )

    @property
    def over(self) -> bool:
        """Whether the time or the number of executions is reached."""
        options = self.options
        return self.elapsed >= options.seconds or (options.runs is not None and self.executions >= options.runs)

    def end(self) -> int:
        """The last words; gives the exit status."""
        self.report()
        for name, count in sorted(self.doors.calls.items()):
            print(f"  {count:>11,} {name}")
        for signature, count in self.found.items():
            print(f"  found {count} times: {signature}")
        since = self.elapsed - (self.last_finding if self.found else 0)
        print(f"{self.executions:,} executions in {self.elapsed:.0f} s; the last {since:.0f} s without a new finding")
        shutil.rmtree(self.doors.folder, ignore_errors=True)
        return 1 if self.found else 0


def _signature(target: str, error: BaseException) -> str:
    """Where a finding comes from: the innermost line of the package, or the law."""
    from fuzzing.targets import Broken

    if isinstance(error, Broken):
        return f"{target}: {error.args[:4]}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "hurray_wire" in Path(frame.filename).parts] or frames
    return f"{target}: {type(error).__name__} in {Path(own[-1].filename).name}:{own[-1].lineno}"


def by_own(run: Run) -> int:
    """Keep the inputs that got a new answer."""
    from fuzzing.mutation import mutated

    rng, kept = Random(run.options.seed), seeds(run.options.corpus)
    for data in list(kept):
        run.one(data)
    while not run.over:
        fresh = kept[-64:] if rng.random() < 0.3 else kept
        data = mutated(rng, rng.choice(fresh), rng.choice(kept))[:MOST_INPUT]
        if run.one(data, screened=rng.randrange(ALL_DOORS_EVERY) > 0):
            kept.append(data)
    return run.end()


def by_atheris(run: Run, atheris: Any) -> int:
    """libFuzzer keeps the inputs that reach new code."""
    from fuzzing.mutation import mutated

    kept = seeds()
    folder = Path(run.options.corpus or tempfile.mkdtemp(prefix="hurray-fuzz-corpus-"))
    folder.mkdir(parents=True, exist_ok=True)
    for data in kept:
        (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)

    def one(data: bytes) -> None:
        run.one(data)
        if run.over:
            status = run.end()
            sys.stdout.flush()
            os._exit(status)  # libFuzzer has no other way to be told

    def change(data: bytes, most: int, seed: int) -> bytes:
        rng = Random(seed)
        engine: Callable[[bytes], bytes] = lambda b: bytes(atheris.Mutate(b, most))  # noqa: E731
        return mutated(rng, bytes(data), rng.choice(kept), engine)[:most]

    seed = run.options.seed or 1
    arguments = [f"-seed={seed}", f"-max_len={MOST_INPUT}", f"-timeout={HANGS_AFTER}", "-rss_limit_mb=4096"]
    arguments += ["-len_control=0", "-print_final_stats=0", "-verbosity=0", "-handle_int=0", "-use_value_profile=0"]
    atheris.Setup([sys.argv[0], *arguments, str(folder)], one, custom_mutator=change)
    atheris.Fuzz()
    return run.end()


def instrumented() -> Any:
    """atheris, the package imported under its eyes."""
    atheris = importlib.import_module("atheris")
    names = (path.relative_to(ROOT).with_suffix("").parts for path in (ROOT / "hurray_wire").rglob("[a-z]*.py"))
    with atheris.instrument_imports(include=["hurray_wire"], enable_loader_override=False):
        for parts in sorted(names):
            if parts[1] not in ("engines", "ops", "testing"):
                importlib.import_module(".".join(parts))
    return atheris


def parsed(argv: list[str]) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--runs", type=int, help="executions after which to stop, if the time is not up before")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=("atheris", "own"), help="by default atheris where it is installed")
    parser.add_argument("--corpus", help="where atheris keeps its inputs, for either engine to go on with")
    parser.add_argument("--found", default=str(ROOT / ".fuzz"), help="where findings go")
    parser.add_argument("--replay", nargs="+", metavar="FILE", help="run these inputs and nothing else")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Fuzz, or replay; gives the exit status."""
    options = parsed(argv)
    engine = options.engine or ("atheris" if importlib.util.find_spec("atheris") else "own")
    atheris = instrumented() if engine == "atheris" and not options.replay else None
    warnings.simplefilter("error")
    run = Run(options)
    if options.replay:
        for name in options.replay:
            run.one(Path(name).read_bytes())
        return run.end()
    print(f"engine {engine}, seed {options.seed}, {options.seconds:.0f} s", flush=True)
    return by_atheris(run, atheris) if atheris is not None else by_own(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
