"""`--diff` from two paths to words or facts: both files are read, then held against each other pair by pair."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from hurray_wire.dump import json_output
from hurray_wire.dump.cli import SOUND, TROUBLE, UNSOUND, complain
from hurray_wire.dump.describe import is_block_paged, layer, role, title
from hurray_wire.dump.difference import Side, compare
from hurray_wire.dump.difference_print import print_difference, print_shortly
from hurray_wire.dump.faults import line
from hurray_wire.dump.model import Fault, Item
from hurray_wire.dump.paper import Paper
from hurray_wire.dump.payload_walk import Budget
from hurray_wire.dump.printers import OutputError
from hurray_wire.dump.scan import VERIFIED_BYTES, Scan, Stop
from hurray_wire.dump.source import FileSource, PipeSource, Source, opened
from hurray_wire.dump.words import counted, safe
from hurray_wire.errors import HurrayWireError

_PIECE_BYTES = 1 << 20


@contextmanager
def _again(path: str) -> Iterator[Source]:
    """A source that can be read at any place: a pipe is put into a file that has no name first."""
    with opened(path) as source:
        if not isinstance(source, PipeSource):
            yield source
            return
        with tempfile.TemporaryFile() as spooled:
            _spool(source, spooled)
            yield FileSource(spooled.fileno())


def _spool(source: PipeSource, spooled: BinaryIO) -> None:
    at = 0
    while piece := source.read(at, _PIECE_BYTES):
        spooled.write(piece)
        at += len(piece)
        source.forget(at)
    spooled.flush()


class _File:
    """One of the two: its tensors, and the first fault."""

    def __init__(self, path: str, source: Source, options: argparse.Namespace) -> None:
        self.name = "stdin" if path == "-" else path
        self.source = source
        self.items: list[Item] = []
        self.fault: tuple[str, Fault] | None = None
        self.faults = 0
        budget = Budget(None if options.verify else VERIFIED_BYTES)
        for event in Scan(source, budget, options.resync).events():
            if isinstance(event, Item):
                self._note(title(event), event.faults)
                if not event.closing:
                    self.items.append(event)
            elif isinstance(event, Stop):
                self._note("", event.faults)

    def _note(self, owner: str, faults: list[Fault]) -> None:
        self.faults += len(faults)
        if faults and self.fault is None:
            self.fault = (owner, faults[0])


def run_difference(options: argparse.Namespace, paper: Paper) -> tuple[list[dict[str, Any]], int]:
    """Both files compared: facts for a document, and the status."""
    current = options.files[0]
    try:
        with _again(options.files[0]) as first:
            current = options.files[1]
            with _again(options.files[1]) as second:
                sides = [_File(p, s, options) for p, s in zip(options.files, (first, second), strict=True)]
                return _compared(options, paper, *sides)
    except (BrokenPipeError, OutputError):
        raise
    except OSError as error:
        complain(f"hurray-dump: {safe(current)}: {error.strerror or error}")
    except MemoryError:
        complain("hurray-dump: not enough memory")
    except Exception as error:  # as in a session: no traceback, whatever happens
        complain(f"hurray-dump: internal error, please report it: {type(error).__name__}: {error}")
    return [], TROUBLE


def _compared(options: argparse.Namespace, paper: Paper, a: _File, b: _File) -> tuple[list[dict[str, Any]], int]:
    facts: list[dict[str, Any]] = []
    pairs, lone = paired(a.items, b.items)
    differing = 0
    for file in (a, b):
        if file.fault is not None:
            complain(line(file.name, *file.fault, file.faults - 1))
    for one, two in pairs:
        sides = (Side(a.name, a.source, one), Side(b.name, b.source, two))
        try:
            found = compare(*sides)
        except HurrayWireError as error:
            complain(f"hurray-dump: cannot compare {safe(a.name)} with {safe(b.name)}: {error}")
            return facts, UNSOUND
        if options.json:
            facts.append(json_output.difference_facts(*sides, found))
        elif not found.none and (not differing or options.full):
            print_difference(paper, *sides, found)
            paper.blank()
        elif not found.none:
            print_shortly(paper, *sides, found)
        differing += not found.none
    facts += [json_output.lone_facts(side, item) for side, item in lone]
    if not options.json:
        _conclude(paper, lone, len(pairs), differing)
    return facts, UNSOUND if differing or lone or a.faults or b.faults else SOUND


def paired(a: list[Item], b: list[Item]) -> tuple[list[tuple[Item, Item]], list[tuple[str, Item]]]:
    """Tensors that belong together, and those that stand in one file only.

    In their order where both files have as many, else by role and layer where these tell a file's tensors apart.
    """
    keys = [_keys(items) for items in (a, b)]
    if len(a) == len(b) or any(len(found) != len(items) for found, items in zip(keys, (a, b), strict=True)):
        pairs = list(zip(a, b, strict=False))
        lone = [("A", item) for item in a[len(pairs) :]] + [("B", item) for item in b[len(pairs) :]]
        return pairs, lone
    first, second = keys
    lone = [("A", item) for key, item in first.items() if key not in second]
    lone += [("B", item) for key, item in second.items() if key not in first]
    return [(item, second[key]) for key, item in first.items() if key in second], lone


def _keys(items: list[Item]) -> dict[tuple[Any, ...], Item]:
    whole = [item for item in items if item.descriptor is not None]
    layouts = {id(item): item.descriptor.layout for item in whole if item.descriptor is not None}
    return {(layouts[id(item)].kv_role, layouts[id(item)].layer_index): item for item in whole}


def _conclude(paper: Paper, lone: list[tuple[str, Item]], pairs: int, differing: int) -> None:
    for side, item in lone:
        what = f", {role(item)}, {layer(item)}" if is_block_paged(item) else ""
        paper.text((f"only in {side}: {title(item)} at byte {item.offset}{what}", "bad"), indent=0)
    if not pairs:
        paper.text(("nothing to compare", "warn"), indent=0)
    elif differing:
        paper.text(
            (f"{differing} of {counted(pairs, 'pair')} {'differs' if differing == 1 else 'differ'}", "bad"), indent=0
        )
    else:
        paper.text((f"no difference in {counted(pairs, 'pair')}", "good"), indent=0)
