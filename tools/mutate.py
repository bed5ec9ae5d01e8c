"""Is the corpus worth its bytes? Twenty deliberate mistakes in the package's decoder, each of which it must catch.

    python tools/mutate.py [NAME ...]

Each mutation replaces some text in a temporary copy of the package; the corpus runs against the copy in a process of
its own, and the cases that notice are printed. Exit status 1 where a mistake goes unnoticed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hurray_wire"

RUN = """
import json, sys
from hurray_wire.testing import Corpus, report
from hurray_wire.testing.runner import judge

caught = []
for case in Corpus.load(sys.argv[1]):
    try:
        state, _ = judge(case, report(case.data(), case.options))
    except Exception:  # a mistake may let anything out
        state = "differs"
    if state == "differs":
        caught.append(case.name)
print(json.dumps(caught))
"""


class Mutation(NamedTuple):
    """One mistake: a file of the package, and the text that stands there once and is replaced."""

    name: str
    file: str
    old: str
    new: str


MUTATIONS = (
    Mutation(
        "alignment is not checked",
        "rules.py",
        "if handle.alignment < least or not _power_of_two(handle.alignment):",
        "if False:",
    ),
    Mutation("alignment need be no power of two", "rules.py", "or not _power_of_two(handle.alignment)", "or False"),
    Mutation("padding is not checked", "frame_reader.py", "    if padding.any():\n", "    if False:\n"),
    Mutation(
        "page id may equal num_pages",
        "indices.py",
        "if largest(block_table) < num_pages or not block_table.size:",
        "if largest(block_table) <= num_pages or not block_table.size:",
    ),
    Mutation("seq_ptr may decrease", "indices.py", "    if not _ascending(seq_ptr):\n", "    if False:\n"),
    Mutation("seq_ptr may end anywhere", "indices.py", "    if last != entries:\n", "    if False:\n"),
    Mutation("token count is not tied to pages", "indices.py", "if total_tokens <= entries * page_size:", "if True:"),
    Mutation(
        "statistics behind the extension type",
        "structs/descriptor.py",
        '    "statistics" / _flagged(tags.Flag.STATISTICS, STATISTICS),\n'
        '    "extension_type" / _flagged(tags.Flag.EXTENSION_TYPE, EXTENSION_TYPE),\n',
        '    "extension_type" / _flagged(tags.Flag.EXTENSION_TYPE, EXTENSION_TYPE),\n'
        '    "statistics" / _flagged(tags.Flag.STATISTICS, STATISTICS),\n',
    ),
    Mutation(
        "bytes of a newer minor are an error",
        "rules.py",
        "length == d.end or (length > d.end and d.front.version_minor)",
        "length == d.end",
    ),
    Mutation(
        "kinds are compared wrongly",
        "sections.py",
        "falls = (kind[1:] < kind[:-1])",
        "falls = (kind[1:] > kind[:-1] + np.uint8(64))",
    ),
    Mutation("unknown kinds need not be OPTIONAL", "sections.py", "~_known(e) & ~_flag(e, _OPTIONAL)", "_flag(e, 0)"),
    Mutation(
        "the header checksum covers one byte less",
        "frame_reader.py",
        "xxhash.xxh3_64_intdigest(memoryview(header)[:body])",
        "xxhash.xxh3_64_intdigest(memoryview(header)[: body - 1])",
    ),
    Mutation(
        "alignments above 2 MiB are not capped",
        "sections.py",
        "need[rows.start] = min(alignment, MAX_FRAME_ALIGNMENT)",
        "need[rows.start] = alignment",
    ),
    Mutation(
        "a chunk need be no whole page",
        "sections.py",
        "    _check_pages(table, sizes[0], page_bytes, base)\n",
        "",
    ),
    Mutation(
        "planes are put together in the wrong order",
        "compression.py",
        "np.copyto(piece[j::width], source[j * n + start : j * n + stop])",
        "np.copyto(piece[width - 1 - j :: width], source[j * n + start : j * n + stop])",
    ),
    Mutation("the window of zstd is not bounded", "compression.py", "    if window > allowed:\n", "    if False:\n"),
    Mutation(
        "6-bit elements take ceil(n * 6 / 8) bytes",
        "dtypes.py",
        "        return 3 * -(-count // _SIX_BIT_GROUP)\n",
        "        return -(-count * 6 // 8)\n",
    ),
    Mutation("private types need no extension", "rules.py", "    if private and not extended:\n", "    if False:\n"),
    Mutation(
        "peer memory on every device",
        "rules.py",
        "_UNIFIED, _PEER = range(3), range(4)",
        "_UNIFIED, _PEER = range(4), range(4)",
    ),
    Mutation(
        "float8 storage takes any zero point",
        "rules.py",
        "TypeTag.FLOAT8_E4M3: (0, 0),",
        "TypeTag.FLOAT8_E4M3: (-128, 127),",
    ),
    Mutation(
        "scales of both kinds in one buffer are refused",
        "rules.py",
        "zero_point_buffer_index not in (3, 4, NO_BUFFER)",
        "zero_point_buffer_index not in (4, NO_BUFFER)",
    ),
    Mutation(
        "booleans count as integers in metadata",
        "metadata.py",
        "isinstance(value, int) and not isinstance(value, bool) and",
        "isinstance(value, int) and",
    ),
    Mutation(
        "a frame of another stream is taken",
        "order.py",
        "if self.open and prologue.stream_id != self._stream_id:",
        "if False:",
    ),
    Mutation(
        "forced token counts are not forced", "indices.py", "    if seq_ptr.item(step) == entries:\n", "    if False:\n"
    ),
)


def caught_by(mutation: Mutation) -> list[str]:
    """The cases that notice a mutation."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "hurray_wire"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / mutation.file
        text = path.read_text()
        if text.count(mutation.old) != 1:
            raise ValueError(f"{mutation.name}: its text stands {text.count(mutation.old)} times in {mutation.file}")
        path.write_text(text.replace(mutation.old, mutation.new))
        command = [sys.executable, "-c", RUN, str(ROOT / "fixtures")]
        done = subprocess.run(command, cwd=name, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    caught: list[str] = json.loads(done.stdout)
    return caught


def main() -> int:
    """Apply each, print who caught it."""
    chosen = [m for m in MUTATIONS if len(sys.argv) == 1 or m.name in sys.argv[1:]]
    before = set(caught_by(Mutation("none", "version.py", "__version__", "__version__")))
    missed = 0
    for mutation in chosen:
        caught = [name for name in caught_by(mutation) if name not in before]
        missed += not caught
        told = f"{len(caught):4} cases, first {', '.join(caught[:3])}" if caught else "NOT CAUGHT"
        print(f"{mutation.name:45} {told}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
