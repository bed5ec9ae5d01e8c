"""Set up what is needed and run something: `python3 tools/run.py demo | test | lint | fixtures | examples | stores`.

In a fresh clone or a used one. Needs nothing but Python 3.11 or newer. Makes `.venv` beside the project once for
each state of pyproject.toml, with the project installed in place.
"""

from __future__ import annotations

import hashlib
import os
import shutil
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
    """Every example whose optional packages are there."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        lacking = [name for name in OPTIONAL if f"\nimport {name}" in path.read_text() and not installed(name)]
        print(f"== {path.name}{f': needs {lacking[0]}' if lacking else ''}", flush=True)
        if not lacking:
            python(str(path))


OPTIONAL = ("torch", "redis", "fsspec", "ray")


def installed(name: str) -> bool:
    """Whether the environment has a package; redis, whether there is a server to talk to as well."""
    if name == "redis" and shutil.which("redis-server") is None:
        return False
    words = [str(BIN / "python"), "-c", f"import importlib.util as u, sys; sys.exit(u.find_spec({name!r}) is None)"]
    return not subprocess.run(words, check=False).returncode


def stores() -> None:
    """The integrations' tests with the packages that they are of (redis-server too, where it is there)."""
    python("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--editable", ".[dev,stores]")
    python("-m", "pytest", "-rs", *sorted(str(path) for path in (ROOT / "tests").glob("test_integrations_*.py")))


JOBS: dict[str, Callable[[], None]] = {
    "demo": demo,
    "test": test,
    "lint": lint,
    "fixtures": fixtures,
    "examples": examples,
    "stores": stores,
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
