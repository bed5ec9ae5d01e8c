"""`python -m hurray_wire.testing`: run the golden corpus against an implementation, and print where it disagrees."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatch

from hurray_wire.testing.corpus import Case, Corpus
from hurray_wire.testing.runner import DIFFERS, OK, SKIPPED, Outcome, run


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m hurray_wire.testing", description=__doc__)
    decode = "prints one JSON object on a file: 'mine --json {file} {options}'; without {file} it is asked by lines"
    made.add_argument("--decode", metavar="CMD", help=decode)
    made.add_argument("--encode", metavar="CMD", help="writes the blob of a case to its output: 'mine-encode {case}'")
    made.add_argument("--fixtures", metavar="DIR", help="the corpus, where it is not that of the repository")
    made.add_argument("--only", metavar="PATTERN", action="append", help="cases of such names, tags or forms: 'zstd-*'")
    made.add_argument("--verbose", action="store_true", help="every case, not only those that disagree")
    return made


def chosen(cases: Iterable[Case], patterns: list[str] | None) -> list[Case]:
    """The cases whose name, form, verdict or a tag is as asked."""
    if not patterns:
        return list(cases)
    return [
        case
        for case in cases
        if any(fnmatch(word, p) for p in patterns for word in (case.name, case.form, case.verdict, *case.covers))
    ]


def table(outcomes: Iterable[Outcome], *, verbose: bool) -> tuple[str, int]:
    """What is to be printed, and the number of disagreements."""
    rows, counts = [], Counter[tuple[str, str, str, str]]()
    for outcome in outcomes:
        group = (outcome.task, outcome.case.form, outcome.case.verdict)
        counts[(*group, outcome.state)] += 1
        if verbose or outcome.state == DIFFERS:
            rows.append(f"{outcome.state:8} {outcome.task:7} {outcome.case.name}  {outcome.message}".rstrip())
    rows += ["", f"{'':24}{OK:>8}{DIFFERS:>9}{SKIPPED:>9}"] if rows else [f"{'':24}{OK:>8}{DIFFERS:>9}{SKIPPED:>9}"]
    for group in sorted({key[:3] for key in counts}):
        numbers = [counts[(*group, state)] for state in (OK, DIFFERS, SKIPPED)]
        rows.append(f"{group[0]:8}{group[1]:6}{group[2]:10}{numbers[0]:8}{numbers[1]:9}{numbers[2]:9}")
    return "\n".join(rows), sum(count for key, count in counts.items() if key[3] == DIFFERS)


def main(arguments: list[str] | None = None) -> int:
    """0 where everything agrees, 1 where something does not, 2 for usage."""
    made = parser()
    asked = made.parse_args(arguments)
    if asked.decode is None and asked.encode is None:
        made.error("give --decode, --encode or both")
    try:
        corpus = Corpus.load(asked.fixtures)
    except (OSError, ValueError) as error:
        made.error(f"no corpus: {error}; give --fixtures")
    cases = chosen(corpus, asked.only)
    if not cases:
        made.error("no case is of that name, form or tag")
    told, disagreements = table(run(cases, asked.decode, asked.encode), verbose=asked.verbose)
    sys.stdout.write(told + "\n")
    return int(disagreements > 0)


if __name__ == "__main__":
    sys.exit(main())
