"""Run the model example over several versions of transformers: `python3 tools/model_versions.py --cache FOLDER`.

    python3 tools/model_versions.py --cache FOLDER [VERSION ...]    # an environment a version, made in FOLDER, kept
    python3 tools/model_versions.py --python PATH [--python PATH]   # interpreters that have torch and transformers

Takes longer than CI should; meant for every night, or before a release. Prints a line a version; the exit status is 1
where one of them does not end with "identical".
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path

from run import MODEL, ROOT

VERSIONS = ("4.48.3", "4.53.3", "4.54.1", "4.57.6", "5.0.0", "5.12.0", "5.24.0")
"""The oldest that is supported, and those around which the cache's attributes, arguments or contents have changed."""
EXAMPLE = ROOT / "examples" / "transformers_prefill_decode.py"
LIMIT_SECONDS = 1800


def main() -> int:
    """The exit status."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("versions", nargs="*", metavar="VERSION", help=f"of transformers; {' '.join(VERSIONS)}")
    arguments.add_argument("--cache", type=Path, metavar="FOLDER", help="where environments are made and kept")
    arguments.add_argument("--python", action="append", default=[], metavar="PATH", help="run these, make none")
    options = arguments.parse_args()
    if not options.python and options.cache is None:
        arguments.error("either --cache or --python is needed")
    wrong = 0
    for version in [] if options.python else options.versions or VERSIONS:
        wrong += not _shown(str(_environment(options.cache.resolve(), version)))
    for path in options.python:
        wrong += not _shown(path)
    return int(wrong > 0)


def _shown(interpreter: str) -> bool:
    """Whether one interpreter's run ends with the word; a line about it, and all of it where it does not."""
    found = _run(interpreter, "-c", "import torch, transformers; print(transformers.__version__, torch.__version__)")
    if found.returncode:
        print(f"{interpreter}: cannot run\n{found.stdout}", flush=True)
        return False
    transformers, torch = found.stdout.split()[-2:]
    begun = time.perf_counter()
    done = _run(interpreter, str(EXAMPLE), "--repeats", "1")
    lines = done.stdout.splitlines() or [""]
    good = done.returncode == 0 and lines[-1].split()[-1:] == ["identical"]
    about = next((line.split(": ", 1)[0] for line in lines if line.startswith(f"transformers {transformers}")), "")
    took = f"{time.perf_counter() - begun:.0f} s"
    print(f"{'identical' if good else 'FAILED':<10}torch {torch}, {about or transformers}, {took}", flush=True)
    if not good:
        print(done.stdout, flush=True)
    return good


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """A command's output, with errors among it, and the project importable."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        return subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": path},
            timeout=LIMIT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, str(error), "")


def _environment(cache: Path, version: str) -> Path:
    """The interpreter of an environment with this version: its own few packages before those that all share."""
    shared = cache / "shared"
    pins = [line for line in (ROOT / "tools" / MODEL.pins).read_text().splitlines() if line.startswith("torch==")]
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    _made(shared, [pins, needed])  # torch first: nothing else then chooses another one
    own = cache / f"transformers-{version}"
    _made(own, [], beside=shared)
    _must(_python(own), "-m", "pip", "install", *_QUIET, f"transformers=={version}")
    return _python(own)


_QUIET = ("--quiet", "--disable-pip-version-check")


def _made(folder: Path, installs: list[list[str]], beside: Path | None = None) -> None:
    """An environment, if it is not there and whole; `beside`: one whose packages it sees behind its own."""
    stamp = folder / "made"
    if stamp.is_file():
        return
    print(f"making {folder}", flush=True)
    venv.EnvBuilder(with_pip=True, clear=True).create(folder)
    for packages in installs:
        _must(_python(folder), "-m", "pip", "install", *_QUIET, *packages)
    if beside is not None:
        (_packages(folder) / "shared.pth").write_text(f"{_packages(beside)}\n")
    stamp.touch()


def _python(folder: Path) -> Path:
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


def _packages(folder: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(
        subprocess.run([_python(folder), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    )


def _must(*command: str | Path) -> None:
    """A step of making an environment; its failure ends all."""
    if subprocess.run([str(word) for word in command], check=False).returncode:
        sys.exit(f"failed: {' '.join(map(str, command))}")


if __name__ == "__main__":
    sys.exit(main())
