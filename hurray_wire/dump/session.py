"""One run over all files: the worst of them is its status, and what was asked for is written where it belongs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from hurray_wire.dump.cli import SOUND
from hurray_wire.dump.paper import Paper
from hurray_wire.dump.printers import OutputError, Picture, paper_for
from hurray_wire.dump.report import Report
from hurray_wire.dump.source import opened
from hurray_wire.dump.words import safe


class Session:
    """Files one after the other."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.status = SOUND
        self._picture = Picture() if options.svg else None
        self._paper: Paper = self._picture.paper if self._picture is not None else paper_for(sys.stdout)

    def run(self) -> None:
        """Everything that was asked for."""
        if self.options.extract is not None:
            Path(self.options.extract).mkdir(parents=True, exist_ok=True)
        if self.options.diff:
            self._diff()
        elif self.options.json:
            self._as_json()
        else:
            from hurray_wire.dump.paper_report import PaperReport

            for index, path in enumerate(self.options.files):
                self._file(PaperReport(path, self.options, self._paper, first=index == 0))
        if self._picture is not None:
            Path(self.options.svg).write_text(self._picture.svg("hurray-dump"), encoding="utf-8")

    def _as_json(self) -> None:
        from hurray_wire.dump.json_report import JsonReport

        reports = [JsonReport(path, self.options) for path in self.options.files]
        for report in reports:
            self._file(report)
        self._document("files", [report.facts() for report in reports])

    def _document(self, member: str, facts: list[dict[str, Any]]) -> None:
        import json

        from hurray_wire.dump.json_output import document

        json.dump(document(member, facts), sys.stdout, indent=2)
        print()

    def _file(self, report: Report) -> None:
        try:
            with opened(report.path) as source:
                report.read(source)
        except (BrokenPipeError, KeyboardInterrupt, OutputError):
            self.status = max(self.status, report.status)
            raise
        except OSError as error:
            report.trouble(os_words(error, report.path))
        except MemoryError:
            report.trouble("not enough memory")
        except Exception as error:  # a fault of this program's own must not hide what was printed so far
            report.trouble(f"internal error, please report it: {type(error).__name__}: {error}")
        report.close()
        self.status = max(self.status, report.status)

    def _diff(self) -> None:
        from hurray_wire.dump.difference_session import run_difference

        facts, status = run_difference(self.options, self._paper)
        self.status = max(self.status, status)
        if self.options.json:
            self._document("diff", facts)


def os_words(error: OSError, path: str) -> str:
    """What the system says, and of which file where it is another one."""
    words = error.strerror or str(error)
    return f"{words}: {safe(str(error.filename))}" if error.filename not in (None, path) else words
