"""Write `tests/golden_dump/`: what hurray-dump prints of the test corpus. `--check` writes nothing and compares.

The documentation's picture is made along with them, and not compared: it is drawn by whichever rich is installed.

    python tools/make_dump_goldens.py            # after a change of the output that is meant
    python tools/make_dump_goldens.py --check    # ok, outdated, missing, unexpected; exit 1 unless all are ok

Read the difference before it is committed: a golden file is the output that people see.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import dump_corpus  # noqa: E402 - found by the path just set

PICTURE = ("--svg", str(ROOT / "docs" / "hurray-dump.svg"), "--map", "--seqs", "--stats")


def judge(folder: Path, *, write: bool) -> dict[str, str]:
    """Each golden file's name and what is to be said of it; written where asked."""
    verdicts = {path.name: "unexpected" for path in dump_corpus.GOLDENS.glob("*")}
    for golden in dump_corpus.goldens():
        text, path = golden.text(folder), golden.path
        before = path.read_text(encoding="utf-8") if path.exists() else None
        verdicts[path.name] = "ok" if before == text else "missing" if before is None else "outdated"
        if write and before != text:
            path.write_text(text, encoding="utf-8")
    if write:
        for name in [name for name, verdict in verdicts.items() if verdict == "unexpected"]:
            (dump_corpus.GOLDENS / name).unlink()
    return verdicts


def main(argv: list[str]) -> int:
    """Write or check; gives the exit status."""
    if argv not in ([], ["--check"]):
        print("usage: python tools/make_dump_goldens.py [--check]", file=sys.stderr)
        return 2
    dump_corpus.GOLDENS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        dump_corpus.write(Path(folder))
        verdicts = judge(Path(folder), write=not argv)
        if not argv:
            dump_corpus.run_here([*PICTURE, "batch.hrkv"], Path(folder))
    for name, verdict in sorted(verdicts.items()):
        if verdict != "ok":
            print(f"{verdict:<10} {name}")
    wrong = sum(verdict != "ok" for verdict in verdicts.values())
    print(f"{len(verdicts)} golden outputs, {wrong} {'to be written' if argv else 'written or removed'}")
    return 1 if argv and wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
