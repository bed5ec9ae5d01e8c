"""Measure: `python tools/bench.py [--quick] [--only GROUP ...] [--rounds N] [--json FILE] [--markdown FILE]
[--plot FILE.svg]`.

Ratios within one run, to a warm memory copy of the same payload and to what else does the same work; medians of
interleaved rounds. Exit status 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

from groups import GROUPS
from measure import Results, missed
from peers import decode_times
from plot import svg


def machine() -> str:
    """What it ran on, in one line."""
    cpu = (
        next(
            (
                line.partition(":")[2].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if "model name" in line
            ),
            platform.processor(),
        )
        if Path("/proc/cpuinfo").exists()
        else platform.processor()
    )
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("numpy", "zstandard", "xxhash", "construct"))
    return f"{cpu}, {platform.system()} {platform.release()}, Python {platform.python_version()}, {packages}"


def main() -> None:
    """Run the groups and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path, help="decode time against pool size, ours and the peers', as SVG")
    arguments = parser.parse_args()
    results = Results(5 if arguments.quick else max(arguments.rounds, 3))
    for name in arguments.only:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        GROUPS[name](results, arguments.quick)
    text = f"{machine()}; medians of {results.rounds} interleaved rounds\n{results.markdown()}\n"
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)
    if arguments.plot:
        sizes = [1 << power for power in range(14, 25 if arguments.quick else 31, 2)]
        picture = svg(decode_times(results, sizes), "Time to decode one frame")
        arguments.plot.write_text(picture)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "rows": results.json()}, indent=1))
    failures = missed(results.rows)
    for row in failures:
        print(f"MISSED: {row.group}: {row.name}: {row.ratio:.3f}, must be {row.target}", file=sys.stderr)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
