"""A file on paper: the summary of its items, or the views that were asked for."""

from __future__ import annotations

import argparse

from hurray_wire.dump import summary
from hurray_wire.dump.describe import title
from hurray_wire.dump.model import Item
from hurray_wire.dump.paper import Paper
from hurray_wire.dump.report import Report
from hurray_wire.dump.scan import Stop, StreamEnd
from hurray_wire.dump.sequences import print_sequences
from hurray_wire.dump.source import Source
from hurray_wire.dump.words import place, size


class PaperReport(Report):
    """Prints each item as it comes."""

    def __init__(self, path: str, options: argparse.Namespace, paper: Paper, *, first: bool) -> None:
        super().__init__(path, options)
        self._paper = paper
        self._first_file = first
        self._named = False
        self._like: tuple[bytes, str] = (b"", "")
        self._alike = False

    def _open(self) -> None:
        """The file's own line, before the first thing that is shown of it."""
        if not self._named:
            self._named = True
            if not self._first_file:
                self._paper.blank()
            summary.print_name(self._paper, self.name, self.size)

    def item(self, item: Item, source: Source) -> None:
        """Summary or views."""
        self._open()
        options = self.options
        if options.hex or options.seqs or options.map or options.stats:
            self._print_views(item, source)
        else:
            self._print_summary(item)

    def _print_summary(self, item: Item) -> None:
        paper, like = self._paper, summary.likeness(item)
        if like and like == self._like[0] and not self.options.full:
            if not self._alike:
                paper.blank()
            self._alike = True
            summary.print_alike(paper, item, self._like[1])
            return
        paper.blank()
        summary.print_item(paper, item)
        self._alike = False
        if like:
            self._like = (like, title(item))

    def _print_views(self, item: Item, source: Source) -> None:
        options, paper = self.options, self._paper
        paper.blank()
        summary.print_heading(paper, item)
        if options.hex:
            from hurray_wire.dump.hexview import print_hex

            print_hex(paper, item, source, full=options.full)
        if options.seqs:
            print_sequences(paper, item)
        if options.map:
            from hurray_wire.dump.pagemap import print_map

            print_map(paper, item, full=options.full)
        if options.stats:
            from hurray_wire.dump.statistics import print_statistics, statistics_of

            print_statistics(paper, item, statistics_of(item))
        if not options.hex:
            summary.print_verdict(paper, item)

    def stream(self, stream: StreamEnd) -> None:
        """Its totals."""
        self._alike = False
        if self.options.frame is None:
            self._open()
            self._paper.blank()
            summary.print_stream(self._paper, stream)

    def stop(self, stop: Stop) -> None:
        """Why and where; nothing of a file that is something else altogether, for which there is the one line."""
        if not self._named and stop.resumed is None:
            return
        self._open()
        if not stop.ended or stop.faults:
            self._paper.blank()
        for fault in stop.faults:
            summary.print_fault(self._paper, None, fault)
        if stop.resumed is not None:
            skipped = f"{size(stop.resumed - stop.offset)} passed over" if stop.resumed > stop.offset else "gone back"
            self._paper.text((f"resumed at {place(stop.resumed)}, {skipped}", "warn"), indent=0)
        elif not stop.ended:
            unknown = "" if stop.faults else ", since where the next frame begins cannot be told"
            advice = "nothing more was found" if self.options.resync else "--resync looks for the next frame"
            self._paper.text((f"stopped at {place(stop.offset)}{unknown}; {advice}", "warn"), indent=0)

    def end(self) -> None:
        """The verdict on the whole file."""
        if self._named:
            self._paper.blank()
            summary.print_end(self._paper, self.faults, self.unverified)
