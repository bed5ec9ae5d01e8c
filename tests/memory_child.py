"""A child process that decodes under a memory ceiling: a JSON list of cases in, a JSON object out. Not a test.

A case is `[hex, options]`; the answer lists a verdict each, and how much the process grew in bytes.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import hurray_wire as hw

ROOM = 256 << 20
"""Address space beyond what the imports took; a reader that allocates what it is told to dies of it."""


def attempt(data: bytes, options: dict[str, Any]) -> str:
    """The verdict on one blob, in words."""
    limits = options.pop("limits", None)
    if limits is not None:
        options["limits"] = hw.Limits(**limits)
    try:
        return f"ok {hw.decode(data, **options)!r}"
    except hw.HurrayWireError as error:
        return f"{type(error).__name__} {error.code}"
    except BaseException as error:  # what must never come out is told as it is
        return f"ESCAPED {type(error).__name__}: {error}"


def main() -> None:
    """Decode every case of the input."""
    cases = [(bytes.fromhex(told), options) for told, options in json.load(sys.stdin)]
    with open("/proc/self/statm") as file:  # noqa: PTH123
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    verdicts = [attempt(data, options) for data, options in cases]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    json.dump({"verdicts": verdicts, "grown": grown}, sys.stdout)


if __name__ == "__main__":
    main()
