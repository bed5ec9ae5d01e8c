"""A file as facts for `--json`."""

from __future__ import annotations

import argparse
from typing import Any

from hurray_wire.dump import json_output
from hurray_wire.dump.cli import SOUND
from hurray_wire.dump.model import Item
from hurray_wire.dump.report import Report
from hurray_wire.dump.scan import Stop, StreamEnd
from hurray_wire.dump.source import Source
from hurray_wire.dump.words import safe


class JsonReport(Report):
    """Gathers facts; the document is written when all files are read."""

    def __init__(self, path: str, options: argparse.Namespace) -> None:
        super().__init__(path, options)
        self._items: list[dict[str, Any]] = []
        self._streams: list[dict[str, Any]] = []
        self._stops: list[dict[str, Any]] = []

    def item(self, item: Item, source: Source) -> None:
        """All of an item that was asked for."""
        facts = json_output.item_facts(item)
        if self.options.hex:
            facts["spans"] = [json_output.span_facts(span) for span in item.spans]
        if self.options.seqs:
            facts["sequences"] = json_output.sequence_facts(item)
        if self.options.map:
            facts["page_references"] = json_output.map_facts(item)
        if self.options.stats:
            from hurray_wire.dump.statistics import statistics_of

            facts["statistics"] = json_output.statistics_facts(statistics_of(item))
        self._items.append(facts)

    def stream(self, stream: StreamEnd) -> None:
        """Its totals."""
        self._streams.append(json_output.stream_facts(stream))

    def stop(self, stop: Stop) -> None:
        """Why and where."""
        faults = [json_output.fault_facts(fault) for fault in stop.faults]
        self._stops.append({"offset": stop.offset, "resumed": stop.resumed, "faults": faults})

    def facts(self) -> dict[str, Any]:
        """The whole file."""
        return {
            "file": safe(self.name),
            "size": self.size,
            "sound": self.status == SOUND,
            "error": self.complaint or None,
            "items": self._items,
            "streams": self._streams,
            "stops": self._stops,
        }
