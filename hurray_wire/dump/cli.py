"""The entry point: arguments in, an exit status out; every way that a run can end badly is caught here.

0 is sound, 1 unsound, 2 wrong usage or an unreadable file. Errors go to standard error, a line for each file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TextIO

SOUND, UNSOUND, TROUBLE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hurray-dump`; gives the exit status.

    Args:
        argv: the arguments, without the program's name; None for the process's own.

    Example:
        >>> main(["--diff", "only-one-file"])
        2
    """
    if sys.stdout is None:
        complain("hurray-dump: standard output is closed")
        return TROUBLE
    run = _Run()
    try:
        run.start(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read us has seen enough
        _silence(sys.stdout)
    except KeyboardInterrupt:
        run.status = TROUBLE
    except SystemExit as error:  # argparse has printed its help
        run.status = TROUBLE if error.code else SOUND
    except Exception as error:
        run.status = TROUBLE
        words = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, OSError) and error.filename is not None:
            words = f"{os.fsdecode(error.filename)}: {words}"
        complain(f"hurray-dump: {words}")
        _silence(sys.stdout)
    return run.status


class _Run:
    """One run, so that its status is known however it ends."""

    def __init__(self) -> None:
        self.status = SOUND

    def start(self, argv: Sequence[str] | None) -> None:
        """Parse and do as told."""
        from hurray_wire.dump.arguments import UsageError, parsed

        _prepare(sys.stdout)
        arguments = list(sys.argv[1:] if argv is None else argv)
        if "--version" in arguments:
            from hurray_wire.version import __version__

            print(f"hurray-dump {__version__}")
            return
        try:
            options = parsed(arguments)
        except UsageError as error:
            complain(f"hurray-dump: {error} (hurray-dump --help tells more)")
            self.status = TROUBLE
            return
        from hurray_wire.dump.session import Session

        session = Session(options)
        try:
            session.run()
        finally:
            self.status = session.status


def complain(line: str) -> None:
    """One line on standard error, whatever characters it has and whoever still listens."""
    from hurray_wire.dump.words import safe

    if sys.stderr is None:
        return
    try:
        _prepare(sys.stderr)
        print(safe(line), file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


def _prepare(stream: TextIO) -> None:
    """Characters that the stream's encoding does not have are escaped, not fatal."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def _silence(stream: TextIO) -> None:
    """What is still buffered goes nowhere, lest the interpreter complain on its way out."""
    try:
        number = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
    except (OSError, ValueError):
        return
