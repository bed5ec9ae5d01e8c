"""Set up what is needed and run something: `python3 tools/run.py demo | test | lint | fixtures | examples | fuzz`.

In a fresh clone or a used one. Needs nothing but Python 3.11 or newer. Makes `.venv` beside the project once for
each state of pyproject.toml, with the project installed in place.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
STAMP = VENV / "installed-for"


def run(*command: str | Path) -> None:
    """Run a command in the project's folder; leave with its status where it fails."""
    status = subprocess.run([str(word) for word in command], cwd=ROOT, check=False).returncode
    if status:
        sys.exit(status)


def python(*arguments: str) -> None:
    """Run the environment's Python."""
    run(BIN / "python", *arguments)


def set_up() -> None:
    """An environment with the project and its development packages, made anew when pyproject.toml changes."""
    state = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + sys.version.encode()).hexdigest()
    if STAMP.is_file() and STAMP.read_text() == state:
        return
    print(f"setting up {VENV.name} (once)", flush=True)
    venv.EnvBuilder(with_pip=True, clear=True).create(VENV)
    python("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--editable", ".[dev]")
    STAMP.write_text(state)


def demo() -> None:
    """The main job on real data: a cache computed by a model goes from one process to another."""
    python("examples/prefill_decode.py")


def test() -> None:
    """All tests, on two cores."""
    python("-m", "pytest", "-n", "2", "--dist", "loadfile")


def lint() -> None:
    """Formatting, lint and types."""
    python("-m", "ruff", "format", "--check")
    python("-m", "ruff", "check")
    python("-m", "mypy")


def fixtures() -> None:
    """Whether the golden files are what their sources make."""
    python("tools/make_fixtures.py", "--check")
    python("tools/make_dump_goldens.py", "--check")


def examples() -> None:
    """Every example that needs no optional package."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        if "\nimport torch" not in path.read_text():
            print(f"== {path.name}", flush=True)
            python(str(path))


def fuzz() -> None:
    """A minute of hostile input; what it finds stays in .fuzz."""
    python("tools/fuzz.py", "--seconds", "60")


JOBS: dict[str, Callable[[], None]] = {
    "demo": demo,
    "test": test,
    "lint": lint,
    "fixtures": fixtures,
    "examples": examples,
    "fuzz": fuzz,
}


def main() -> None:
    """Run the jobs that are named."""
    names = sys.argv[1:]
    if not names or not set(names) <= JOBS.keys():
        sys.exit(f"usage: python3 tools/run.py {' | '.join(JOBS)}")
    if sys.version_info < (3, 11):  # noqa: UP036 - run by whatever python3 is
        sys.exit("Python 3.11 or newer is needed")
    set_up()
    for name in names:
        JOBS[name]()


if __name__ == "__main__":
    main()
