"""One file being read: who asks for what, what is wrong with it, and the one line that says so at the end.

How the items are shown is for the reports made of this one: on paper, or as facts of a document.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hurray_wire.dump.cli import SOUND, TROUBLE, UNSOUND, complain
from hurray_wire.dump.describe import title
from hurray_wire.dump.faults import line
from hurray_wire.dump.model import Consumer, Fault, Item
from hurray_wire.dump.payload_walk import Budget
from hurray_wire.dump.printers import Bar, flush
from hurray_wire.dump.scan import VERIFIED_BYTES, Scan, Stop, StreamEnd
from hurray_wire.dump.source import Source
from hurray_wire.dump.words import safe

if TYPE_CHECKING:
    from hurray_wire.dump.extract import ItemExtractor


class Report:
    """Reads a file; subclasses show it."""

    def __init__(self, path: str, options: argparse.Namespace) -> None:
        self.path = path
        self.name = "stdin" if path == "-" else path
        self.options = options
        self.status = SOUND
        self.size: int | None = None
        self.faults = 0
        self.unverified = 0
        self.complaint = ""
        self._first: tuple[str, Fault] | None = None
        self._found = False
        self._extractor: ItemExtractor | None = None
        self._bar = Bar(options.verify or options.stats or options.extract is not None)

    def read(self, source: Source) -> None:
        """Scan the file, showing each item as it comes."""
        self.size = source.size
        self._bar.begin(safe(Path(self.name).name), source.size)
        budget = Budget(None if self.options.verify else VERIFIED_BYTES)
        scan = Scan(source, budget, self.options.resync, self._consumers, self._bar.reached)
        for event in scan.events():
            self._bar.clear()
            if isinstance(event, Item):
                self._meet(event, source)
            elif isinstance(event, StreamEnd):
                self.stream(event)
            else:
                self._note("", event.faults)
                self.stop(event)
            flush(sys.stdout)  # whoever watches a live stream sees each frame as it comes
        if self.options.frame is not None and not self._found and not self.faults:
            self.trouble(f"has no frame {self.options.frame}")
        else:
            self.end()

    def _meet(self, item: Item, source: Source) -> None:
        self._note(title(item), item.faults)
        self.unverified += item.verified is False
        for consumer in item.consumers:
            consumer.finish(item)
        if self.options.frame in (None, item.index):
            self._found = True
            self.item(item, source)

    def _consumers(self, item: Item) -> list[Consumer]:
        if self.options.frame not in (None, item.index):
            return []
        wanted: list[Consumer] = []
        if self.options.stats:
            from hurray_wire.dump.statistics import ItemStatistics

            wanted.append(ItemStatistics(item))
        if self.options.extract is not None:
            from hurray_wire.dump.extract import ItemExtractor

            self._extractor = ItemExtractor(Path(self.options.extract), item)
            wanted.append(self._extractor)
        return wanted

    # For those who show.

    def item(self, item: Item, source: Source) -> None:
        """An item that is to be shown."""

    def stream(self, stream: StreamEnd) -> None:
        """A stream has ended."""

    def stop(self, stop: Stop) -> None:
        """Reading has ended, or is taken up elsewhere."""

    def end(self) -> None:
        """The file has been read."""

    # What is wrong.

    def _note(self, owner: str, faults: list[Fault]) -> None:
        if faults:
            self.status = max(self.status, UNSOUND)
            self.faults += len(faults)
            self._first = self._first or (owner, faults[0])

    def trouble(self, message: str) -> None:
        """The file cannot be read, or not to its end."""
        self.status = TROUBLE
        self.complaint = message

    def close(self) -> None:
        """The one line on standard error."""
        self._bar.clear()
        if self._extractor is not None:
            self._extractor.close()
        flush(sys.stdout)
        if self.complaint:
            complain(f"hurray-dump: {safe(self.name)}: {self.complaint}")
        elif self._first is not None:
            complain(line(self.name, *self._first, self.faults - 1))
