"""Where the command `hurray-dump` begins: `main`, and `python -m hurray_dump`.

It stands beside the package because importing anything of the package imports the package first, which takes longer
than a person needs to think better of it. Ctrl-C leaves with status 2 and no traceback from here on: at once while
modules are imported (an interrupt raised amid an import can be swallowed, or end the process by the signal although
it was caught), by KeyboardInterrupt while files are read, and at once again when all is done.
"""

import os
import sys

TYPE_CHECKING = False  # what is imported before Ctrl-C is answered is what every interpreter has imported already
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

_TROUBLE = 2
"""The status of a run that did not come to its end."""


class _Interrupts:
    """What Ctrl-C does: leave at once, or, while this is entered, raise KeyboardInterrupt."""

    def __init__(self) -> None:
        self._raised = False

    def install(self) -> None:
        """Answer SIGINT, unless whoever started the process has it ignored."""
        import signal

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._answer)

    def _answer(self, number: int, frame: "FrameType | None") -> None:
        if self._raised:
            raise KeyboardInterrupt
        os._exit(_TROUBLE)

    def __enter__(self) -> None:
        self._raised = True

    def __exit__(self, *error: object) -> None:
        self._raised = False


def main() -> "NoReturn":
    """Run `hurray-dump` on the process's own arguments, and end the process with its status."""
    status = _TROUBLE
    try:
        interrupts = _Interrupts()
        interrupts.install()
        from hurray_wire.dump import cli

        status = cli.main(interrupts=interrupts)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):  # closed, or nobody listens
                continue
    except KeyboardInterrupt:
        pass
    os._exit(status)  # not by way of the interpreter's end, which an interrupt would make loud


if __name__ == "__main__":
    main()
