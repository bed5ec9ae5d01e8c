"""On a terminal: colours unless NO_COLOR says no, the width that there is; and the picture."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from dump_corpus import ROOT, batch, run_child, run_here, stream
from support import worked

import hurray_wire as hw

CSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(arguments: list[str], folder: Path, columns: int = 100, **environment: str) -> tuple[int, str]:
    """The status, and all that the terminal got."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    settings = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")}
    settings |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **environment}
    child = subprocess.Popen(
        [sys.executable, "-m", "hurray_wire.dump", *arguments], cwd=folder, stdout=slave, stderr=slave, env=settings
    )
    os.close(slave)
    told = b""
    while True:
        try:
            piece = os.read(master, 1 << 16)
        except OSError:  # the other end has gone
            break
        if not piece:
            break
        told += piece
    os.close(master)
    return child.wait(timeout=60), told.decode().replace("\r\n", "\n")


def test_colours_on_a_terminal_only(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(hw.encode(worked()))
    status, told = on_terminal(["x"], tmp_path)
    piped = run_child(["x"], tmp_path).out
    assert status == 0
    assert "\x1b[3" in told
    assert CSI.sub("", told) == piped
    assert "\x1b" not in piped


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_where_none_is_wanted(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(hw.encode(batch()))
    _, told = on_terminal(["--map", "x"], tmp_path, 100, **environment)
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|4[0-7]|9[0-7]|10[0-7])[;m]", told)


@pytest.mark.parametrize("columns", [40, 60, 80])
@pytest.mark.parametrize("options", [[], ["--hex"], ["--map", "--seqs", "--stats"]])
def test_lines_fit_a_narrow_terminal(columns: int, options: list[str], tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(hw.encode(batch()))
    status, told = on_terminal([*options, "x"], tmp_path, columns)
    assert status == 0
    assert max(len(line) for line in CSI.sub("", told).splitlines()) <= columns


def test_the_progress_bar_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"".join(stream()))
    status, told = on_terminal(["--verify", "x"], tmp_path)
    assert status == 0
    assert CSI.sub("", told).splitlines()[-1] == "sound"
    assert "\x1b[?25h" in told  # the cursor is there again
    assert run_child(["--verify", "x"], tmp_path).err == ""


def test_the_picture(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(hw.encode(batch()))
    found = run_here(["--svg", "x.svg", "--map", "--stats", "x"], tmp_path)
    assert found == (0, "", "")
    picture = (tmp_path / "x.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(picture)
    shown = "".join(root.itertext()).replace("\N{NO-BREAK SPACE}", " ")
    assert "first NaN or infinity in page_pool: page 3" in shown
    links = set(re.findall(r"https?://[^\"' )<]+", picture))
    assert links <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
    run_here(["--svg", "y.svg", "--map", "--stats", "x"], tmp_path)
    assert (tmp_path / "y.svg").read_text(encoding="utf-8") == picture


def test_the_picture_of_something_broken(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(hw.encode(worked())[:700])
    found = run_here(["--svg", "x.svg", "x"], tmp_path)
    assert (found.status, found.out) == (1, "")
    assert "[truncated]" in found.err
    ElementTree.parse(tmp_path / "x.svg")
