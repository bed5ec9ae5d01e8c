"""Set up what is needed and run something: `python3 tools/run.py JOB ...`; without a job, what there is.

In a fresh clone or a used one. Needs nothing but Python 3.11 or newer. Each environment stands beside the project,
`.venv` and others for what needs large packages, and is made anew when what it is made of changes.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Environment(NamedTuple):
    """A folder with Python, the project in place, and the packages of some extras."""

    folder: str
    extras: str = "dev"
    pins: str = ""
    """A file of exact versions that are installed first: a range would take whatever is newest, torch for CUDA."""
    alone: tuple[str, ...] = ()
    """Packages without what they ask for."""

    def ready(self) -> Path:
        """Its interpreter, set up where that has not been done."""
        folder = ROOT / self.folder
        interpreter = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
        pins = [ROOT / "tools" / self.pins] if self.pins else []
        made_of = b"".join(path.read_bytes() for path in (ROOT / "pyproject.toml", *pins))
        made_of += repr((self.extras, self.alone, sys.version)).encode()
        state = hashlib.sha256(made_of).hexdigest()
        stamp = folder / "installed-for"
        if stamp.is_file() and stamp.read_text() == state:
            return interpreter
        print(f"setting up {self.folder} (once)", flush=True)
        venv.EnvBuilder(with_pip=True, clear=True).create(folder)
        install = (interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        for path in pins:
            run(*install, "--requirement", path)
        run(*install, "--editable", f".[{self.extras}]")
        if self.alone:
            run(*install, "--no-deps", *self.alone)
        stamp.write_text(state)
        return interpreter

    def python(self, *arguments: str) -> None:
        """Run its Python."""
        run(self.ready(), *arguments)

    def pytest(self, *arguments: str) -> None:
        """Run its tests, on two cores."""
        self.python("-m", "pytest", "-n", "2", "--dist", "loadfile", *arguments)


PLAIN = Environment(".venv")
MODEL = Environment(".venv-model", pins="model-pins.txt")
STORES = Environment(".venv-stores", "dev,stores")
# NIXL asks for torch and builds for two CUDAs, gigabytes of which arrays in host memory need nothing.
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
TRANSPORTS = Environment(".venv-transports", "dev,mooncake", alone=NIXL)
MODEL_TRANSPORTS = Environment(".venv-model-transports", "dev,mooncake", pins="model-pins.txt", alone=NIXL)


def run(*command: str | Path) -> None:
    """Run a command in the project's folder; leave with its status where it fails."""
    status = subprocess.run([str(word) for word in command], cwd=ROOT, check=False).returncode
    if status:
        sys.exit(status)


def tests_that_name(*words: str) -> list[str]:
    """The test files in whose text one of the words stands."""
    paths = sorted((ROOT / "tests").glob("test_*.py"))
    return [str(path) for path in paths if any(word in path.read_text() for word in words)]


def demo() -> None:
    """The main job on real data: a cache computed by a model goes from one process to another."""
    PLAIN.python("examples/prefill_decode.py")


def parsers() -> None:
    """Parsers in Python from the Kaitai definitions, which the tests then use; needs npm."""
    PLAIN.python("tools/kaitai.py")


def test() -> None:
    """All tests, on two cores; those of optional packages are skipped, and say so."""
    PLAIN.pytest()


def lint() -> None:
    """Formatting, lint and types."""
    PLAIN.python("-m", "ruff", "format", "--check")
    PLAIN.python("-m", "ruff", "check")
    PLAIN.python("-m", "mypy")


def fixtures() -> None:
    """Whether the golden files are what their sources make."""
    PLAIN.python("tools/make_fixtures.py", "--check")
    PLAIN.python("tools/make_dump_goldens.py", "--check")


OPTIONAL = ("torch", "redis", "fsspec", "ray", "lmcache", "vllm", "nixl", "mooncake")


def examples() -> None:
    """Every example that needs no optional package."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        needed = [name for name in OPTIONAL if f"\nimport {name}" in path.read_text()]
        print(f"== {path.name}{f': needs {needed[0]}, not run here' if needed else ''}", flush=True)
        if not needed:
            PLAIN.python(str(path))


def model() -> None:
    """A real model: prefill in one process, decode in another, bit for bit as if one had done both."""
    MODEL.python("examples/transformers_prefill_decode.py")


def model_tests() -> None:
    """The tests that need torch or transformers."""
    MODEL.pytest(*tests_that_name("torch"))


def stores() -> None:
    """The tests of Redis (where redis-server is), fsspec and Ray."""
    STORES.pytest("-rs", *tests_that_name("integrations.redis", "integrations.fsspec", "integrations.ray"))


def transports() -> None:
    """A cache moved over NIXL, Mooncake and sockets, and the tests of those engines."""
    _look_for_libraries(TRANSPORTS.ready())
    TRANSPORTS.python("examples/transports.py")
    TRANSPORTS.python("-m", "pytest", "-rs", "tests/test_transports_real.py", "tests/test_transports_store.py")


def model_transports() -> None:
    """The real model with its cache over NIXL, then over Mooncake, then over sockets."""
    _look_for_libraries(MODEL_TRANSPORTS.ready())
    for name in ("nixl", "mooncake", "socket"):
        print(f"== {name}", flush=True)
        MODEL_TRANSPORTS.python("examples/transformers_prefill_decode.py", "--transport", name)


def _look_for_libraries(python: Path) -> None:
    if subprocess.run([python, "-c", "import mooncake.engine"], capture_output=True, check=False).returncode:
        print("Mooncake needs libraries of the system; on Debian: apt-get install libibverbs1 libnuma1", flush=True)


def fuzz() -> None:
    """A minute of hostile input; what it finds stays in .fuzz."""
    PLAIN.python("tools/fuzz.py", "--seconds", "60")


JOBS: dict[str, Callable[[], None]] = {
    "demo": demo,
    "parsers": parsers,
    "test": test,
    "lint": lint,
    "fixtures": fixtures,
    "examples": examples,
    "fuzz": fuzz,
    "model": model,
    "model-tests": model_tests,
    "stores": stores,
    "transports": transports,
    "model-transports": model_transports,
}


def main() -> None:
    """Run the jobs that are named."""
    names = sys.argv[1:]
    if not names or not set(names) <= JOBS.keys():
        told = "\n".join(f"  {name:16} {(job.__doc__ or '').splitlines()[0]}" for name, job in JOBS.items())
        sys.exit(f"usage: python3 tools/run.py JOB ...\n{told}")
    if sys.version_info < (3, 11):  # noqa: UP036 - run by whatever python3 is
        sys.exit("Python 3.11 or newer is needed")
    for name in names:
        JOBS[name]()


if __name__ == "__main__":
    main()
