"""What can be asked of `hurray-dump`: its options, their help, and which of them do not go together."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

_DESCRIPTION = """\
Look into paged KV caches: HRKV frames, Hurray stream items (bare), any concatenation of streams of both, sound or
damaged. Prints what can be read, then where and why reading stopped."""

_EXAMPLES = """\
examples:
  hurray-dump cache.hrkv                 what is in it, and whether it is sound
  hurray-dump --verify cache.hrkv        the whole payload too, however large
  hurray-dump --hex broken.hrkv          every header field with its bytes, wrong ones marked
  hurray-dump --map --seqs cache.hrkv    which pages are whose
  hurray-dump --stats cache.hrkv         value range, NaN, infinity, compressibility
  hurray-dump --diff sent.hrkv got.hrkv  the first field, page, sequence and token that differ
  hurray-dump --resync torn.hrkv         go on behind the damage
  hurray-dump --json cache.hrkv | jq .   for programs
  cat cache.hrkv | hurray-dump -         from a pipe

exit status: 0 sound (--diff: no difference), 1 unsound (--diff: they differ), 2 wrong usage or unreadable file"""


class UsageError(Exception):
    """The command line cannot be obeyed; the message says why."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    made = _Parser(
        prog="hurray-dump",
        usage="hurray-dump [options] FILE...",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("files", metavar="FILE", nargs="+", help="a file, or - for standard input")
    views = made.add_argument_group("what to show (default: a summary of every frame)")
    view = views.add_argument
    view("--hex", action="store_true", help="header and descriptor field by field: offset, bytes, path, value, meaning")
    view("--seqs", action="store_true", help="every sequence with all of its page ids")
    view("--map", action="store_true", help="the pool as a grid: who is referenced how often")
    view("--stats", action="store_true", help="what values each buffer holds; reads all of the payload")
    view("--diff", action="store_true", help="compare two files tensor by tensor")
    view("--json", action="store_true", help="one JSON document; schema/hurray-dump.schema.json describes it")
    view("--frame", metavar="N", type=int, help="show frame N only (all are checked)")
    view("--full", action="store_true", help="nothing left out or put in short")
    how = made.add_argument_group("what to do")
    how.add_argument("--verify", action="store_true", help="verify all of the payload (without: up to 256 MiB a file)")
    how.add_argument("--resync", action="store_true", help="behind damage, look for the next frame and go on")
    how.add_argument("--svg", metavar="FILE", help="write what would be printed as a picture")
    how.add_argument("--extract", metavar="DIR", help="write every buffer there, as .npy and raw")
    made.add_argument("--version", action="store_true", help="print the version and leave")
    return made


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, checked against each other.

    Raises:
        UsageError: they make no sense.
    """
    options = parser().parse_args(argv)
    if options.diff and len(options.files) != 2:
        raise UsageError("--diff takes two files")
    if options.extract is not None and len(options.files) != 1:
        raise UsageError("--extract takes one file")
    if options.files.count("-") > 1:
        raise UsageError("standard input can be read once")
    for first, second in (("json", "svg"), ("diff", "extract"), ("diff", "stats"), ("diff", "frame"), ("diff", "hex")):
        if getattr(options, first) and getattr(options, second) not in (None, False):
            raise UsageError(f"--{first} and --{second} do not go together")
    return options
