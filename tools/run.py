"""Set up what is needed and run something: `python3 tools/run.py JOB ...`, the jobs being those below.

In a fresh clone or a used one. Needs nothing but Python 3.11 or newer. Makes `.venv` beside the project once for
each state of pyproject.toml, with the project installed in place; for models `.venv-model`, with torch as well.
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
MODEL_VENV = ROOT / ".venv-model"
MODEL_PINS = ROOT / "tools" / "model-pins.txt"


def run(*command: str | Path) -> None:
    """Run a command in the project's folder; leave with its status where it fails."""
    status = subprocess.run([str(word) for word in command], cwd=ROOT, check=False).returncode
    if status:
        sys.exit(status)


def python(*arguments: str, folder: Path = VENV) -> None:
    """Run an environment's Python."""
    run(set_up(folder), *arguments)


def set_up(folder: Path) -> Path:
    """An environment with the project and its development packages, made anew when what it is made for changes.

    The one for models has the packages that are pinned for it, installed before anything asks for others.
    """
    interpreter = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    pins = [MODEL_PINS] if folder == MODEL_VENV else []
    contents = b"".join(path.read_bytes() for path in (ROOT / "pyproject.toml", *pins))
    state, stamp = hashlib.sha256(contents + sys.version.encode()).hexdigest(), folder / "installed-for"
    if not stamp.is_file() or stamp.read_text() != state:
        print(f"setting up {folder.name} (once)", flush=True)
        venv.EnvBuilder(with_pip=True, clear=True).create(folder)
        install = (interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        for path in pins:
            run(*install, "--requirement", path)
        run(*install, "--editable", ".[dev]")
        stamp.write_text(state)
    return interpreter


def demo() -> None:
    """The main job on real data: a cache computed by a model goes from one process to another."""
    python("examples/prefill_decode.py")


def parsers() -> None:
    """Parsers in Python from the Kaitai definitions, which the tests then use; needs npm."""
    python("tools/kaitai.py")


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


def model() -> None:
    """A real model: prefill in one process, decode in another, bit for bit as if one had done both."""
    python("examples/transformers_prefill_decode.py", folder=MODEL_VENV)


def model_tests() -> None:
    """The tests that need torch or transformers, which are skipped elsewhere."""
    tests = (path for path in sorted((ROOT / "tests").glob("test_*.py")) if "torch" in path.read_text())
    python("-m", "pytest", "-n", "2", "--dist", "loadfile", *map(str, tests), folder=MODEL_VENV)


JOBS: dict[str, Callable[[], None]] = {
    "demo": demo,
    "parsers": parsers,
    "test": test,
    "lint": lint,
    "fixtures": fixtures,
    "examples": examples,
    "model": model,
    "model-tests": model_tests,
}


def main() -> None:
    """Run the jobs that are named."""
    names = sys.argv[1:]
    if not names or not set(names) <= JOBS.keys():
        sys.exit(f"usage: python3 tools/run.py {' | '.join(JOBS)}")
    if sys.version_info < (3, 11):  # noqa: UP036 - run by whatever python3 is
        sys.exit("Python 3.11 or newer is needed")
    for name in names:
        JOBS[name]()


if __name__ == "__main__":
    main()
