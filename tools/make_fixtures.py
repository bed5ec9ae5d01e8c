"""The golden corpus in `fixtures/`: made, or held to what would be made.

    python tools/make_fixtures.py              writes what is missing or outdated
    python tools/make_fixtures.py --check      writes nothing; prints ok, outdated, missing, unexpected; fails
    python tools/make_fixtures.py --release    adds today's files to fixtures/RELEASED: from then on they only stay

No byte comes from hurray_wire. Cases are written by the reference (`reference_cases.py`), copied from the vectors of
other encoders (`fixtures/hurray-0.1.0`, `fixtures/hrkv`), or annotated hex and stated changes of these
(`fixtures/source/*.hex`, compiled by `hexcase.py`, which knows no format). What a case must give is said by hand for
refusals, and read by `refdecode.py` for the rest, which was written from the specification apart from the package.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import refdecode
from fixture_tags import covers
from hexcase import Case, SourceError, compile_source

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "fixtures"
FORMAT = 1
SOURCES = (
    *("accept-bare", "accept-frames", "accept-streams", "accept-asked"),
    *("reject-first-bytes", "reject-descriptor", "reject-tables", "reject-frame", "reject-metadata"),
    *("reject-streams", "reject-asked"),
)
"""In the order in which one uses cases of another."""
REFERENCE = "pyhurray 0.1.0"
ENCODER = "an independent encoder, from the specification"
ENCODED_AS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("raw", "raw-metadata", "raw-lens-unknown", "raw-align-4096", "uint64-int8-per-block")},
    **{"raw-chunks": {"chunk_bytes": 256}, "raw-pool-without-checksum": {"checksum": False}, "empty-batch": {}},
}
"""Options under which a writer gives the bytes of those frames: all of a raw frame is determined."""

Files = dict[str, bytes]
Entry = dict[str, Any]


class CorpusError(Exception):
    """A case whose bytes and whose told verdict do not go together."""


def reference_written(root: Path) -> tuple[Files, dict[str, str]] | None:
    """Blobs and notes by path as the reference writes them now; None where it is not installed."""
    command = [sys.executable, str(ROOT / "tools" / "reference_cases.py"), "write"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 3:
        return None
    if done.returncode:
        raise CorpusError(done.stderr)
    made = {f"accept/{name}.hrry": case for name, case in json.loads(done.stdout).items()}
    return {path: bytes.fromhex(case["hex"]) for path, case in made.items()}, {p: c["note"] for p, c in made.items()}


def kept(root: Path) -> tuple[Files, dict[str, str]]:
    """The same, from the corpus as it is."""
    cases = json.loads((root / "manifest.json").read_text())["cases"]
    ours = [case for case in cases if case["origin"] == REFERENCE and case["file"].startswith("accept/")]
    return {case["file"]: (root / case["file"]).read_bytes() for case in ours}, {c["file"]: c["note"] for c in ours}


class Corpus:
    """Every file of the corpus and its manifest, in memory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        written = reference_written(root)
        self.has_reference = written is not None
        self.files, self.notes = written or kept(root)
        self.entries: list[Entry] = []
        self._add_vectors()
        for path, data in list(self.files.items()):
            self._add(path, data, REFERENCE, note=self.notes[path])
        for name in SOURCES:
            self._add_source(name)
        self.files["manifest.json"] = self._manifest()

    def _load(self, name: str) -> bytes:
        data = self.files.get(f"{name}.gz") or self.files.get(name)
        return data if data is not None else (self.root / name).read_bytes()

    def _add_vectors(self) -> None:
        """The vectors of other encoders, where they are."""
        for case in json.loads((self.root / "hurray-0.1.0/manifest.json").read_text())["cases"]:
            path = f"hurray-0.1.0/{case['file']}"
            self._add(path, (self.root / path).read_bytes(), REFERENCE, note=case.get("note", ""))
        path = "hurray-0.1.0/container.hrry"
        refused = {"error_class": "UnsupportedError", "code": "container", "where": "magic", "offset": 0}
        self._add(path, (self.root / path).read_bytes(), REFERENCE, error=refused)
        for case in json.loads((self.root / "hrkv/manifest.json").read_text())["cases"]:
            path = f"hrkv/{case['file']}"
            self._add(path, (self.root / path).read_bytes(), ENCODER, encode=ENCODED_AS.get(case["name"]))
        path = "hrkv/stream-of-two-closing-frame.hrkv"
        if not any(entry["file"] == path for entry in self.entries):
            self._add(path, (self.root / path).read_bytes(), ENCODER, options={"stream": True})

    def _add_source(self, name: str) -> None:
        folder = name.partition("-")[0]
        for case in compile_source((self.root / f"source/{name}.hex").read_text(), self._load):
            form = _suffix(case.data, case.name)
            path = f"{folder}/{case.name}{form}"
            packed = case.keys.get("store") == "gzip"
            self.files[path] = case.data
            self._add(path, case.data, f"source/{name}.hex", **_told(case))
            if packed:
                self.files[f"{path}.gz"] = gzip.compress(self.files.pop(path), 9, mtime=0)
                self.entries[-1] |= {"file": f"{path}.gz", "stored": "gzip"}

    def _add(self, path: str, data: bytes, origin: str, **told: Any) -> None:
        folder, _, file = path.partition("/")
        name = file.partition(".")[0]
        options = told.get("options") or {}
        entry: Entry = {
            "name": name if folder in ("accept", "reject") else f"{folder}/{name}",
            "file": path,
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "form": _form(data),
            "verdict": "reject" if told.get("error") else "accept",
            "origin": origin,
            "note": told.get("note", ""),
        }
        report = refdecode.report(data, options)
        entry |= _judged(entry, report, told)
        verdict = {"verdict": "reject", **told["error"]} if told.get("error") else report
        entry["covers"] = sorted({*told.get("covers", ()), *covers(data, verdict, options)})
        self.entries.append(entry)

    def _manifest(self) -> bytes:
        names = [entry["name"] for entry in self.entries]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise CorpusError(f"the same name twice: {sorted(twice)}")
        values = json.loads((self.root / "source/values.json").read_text())
        whole = {"format": FORMAT, "wire": "1.0", "cases": self.entries, "values": values}
        return (_dumped(whole) + "\n").encode()


def _dumped(manifest: dict[str, Any]) -> str:
    """One line a case: a change of one shows as one."""
    lines = []
    for key, value in manifest.items():
        if isinstance(value, list):
            rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in value)
            lines.append(f'"{key}": [\n{rows}\n]')
        else:
            lines.append(f'"{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}"


def _form(data: bytes) -> str:
    if data.startswith(refdecode.FRAME_MAGIC):
        return "hrkv"
    bare = data.startswith(refdecode.BARE_MAGIC) and not data.startswith(refdecode.CONTAINER_MAGIC)
    return "bare" if bare else "none"


def _suffix(data: bytes, name: str) -> str:
    return {"hrkv": ".hrkv", "bare": ".hrry", "none": ".bin"}[_form(data)]


def _told(case: Case) -> dict[str, Any]:
    """What a source says of a case."""
    keys = case.keys
    told: dict[str, Any] = {"note": keys.get("note", ""), "covers": keys.get("covers", "").split()}
    for name in ("options", "encode"):
        if name in keys:
            told[name] = json.loads(keys[name])
    if "reject" in keys:
        error_class, code, where, offset = keys["reject"].split()
        place = None if offset == "-" else int(offset)
        told["error"] = {"error_class": error_class, "code": code, "where": where, "offset": place}
    if "reference" in keys:
        verdict, _, why = keys["reference"].partition(" ")
        told["reference"] = None if verdict == "-" else {"verdict": verdict, "why": why}
    if "implementation-limit" in keys:
        told["implementation_limit"] = keys["implementation-limit"]
    told["canonical"] = keys.get("canonical") != "no"
    told["authored"] = keys.get("authored") != "no"
    return told


def _judged(entry: Entry, report: dict[str, Any], told: dict[str, Any]) -> Entry:
    """Verdict, expected values or error, and what other implementations are said to do."""
    more: Entry = {}
    if told.get("options"):
        more["options"] = told["options"]
    error = told.get("error")
    limit = told.get("implementation_limit")
    found = {name: report.get(name) for name in error} if error else report["verdict"]
    if error and error["offset"] is None and report["verdict"] == "reject":
        found["offset"] = None  # a place that the case leaves open
    if found != (error or "accept") and not limit:
        raise CorpusError(f"{entry['file']}: refdecode finds {report if error is None else found}, told is {error}")
    if error:
        more["error"] = error
    else:
        more["expected"] = {key: value for key, value in report.items() if key != "verdict"}
    if limit:
        more["implementation_limit"] = limit
    if entry["form"] == "bare" or entry["bytes"] == 0:
        default = {"verdict": entry["verdict"], "why": ""}
        reference = told.get("reference", default)
        if reference is not None:
            more["reference"] = reference
    if not error and entry["form"] == "bare" and not told.get("options"):
        more["canonical"] = told.get("canonical", True)
        if more["canonical"] and told.get("authored", True):
            more["encode"] = {"framing": "bare"}
    if told.get("encode") is not None:
        more["encode"] = {"framing": "hrkv", **told["encode"]}
    return more


# === writing and checking ====================================================================================


def present(root: Path) -> set[str]:
    """The files that the corpus owns."""
    folders = ("accept", "reject")
    found = {str(p.relative_to(root)) for folder in folders for p in (root / folder).glob("*") if p.is_file()}
    return found | ({"manifest.json"} if (root / "manifest.json").is_file() else set())


def _same(path: str, made: bytes, found: bytes) -> bool:
    if path.endswith(".gz"):  # the same content, whichever zlib packed it
        return gzip.decompress(made) == gzip.decompress(found)
    return made == found


def compared(root: Path, files: Files) -> Iterator[tuple[str, str]]:
    """Each file and how it stands: ok, outdated, missing, unexpected."""
    for path in sorted({*files, *present(root)}):
        if path not in files:
            yield path, "unexpected"
        elif not (root / path).is_file():
            yield path, "missing"
        else:
            yield path, "ok" if _same(path, files[path], (root / path).read_bytes()) else "outdated"


def released(root: Path) -> dict[str, str]:
    """Path to sha256 of the files that a release has shipped."""
    path = root / "RELEASED"
    lines = path.read_text().splitlines() if path.is_file() else []
    return {name: digest for digest, name in (line.split() for line in lines if line and not line.startswith("#"))}


def broken_releases(root: Path) -> Iterator[tuple[str, str]]:
    """Released files that are gone or changed."""
    for path, digest in sorted(released(root).items()):
        if not (root / path).is_file():
            yield path, "missing, though released"
        elif hashlib.sha256((root / path).read_bytes()).hexdigest() != digest:
            yield path, "changed, though released"


def check(root: Path) -> int:
    """Print how every file stands; 1 where one is not ok."""
    corpus = Corpus(root)
    told = [*compared(root, corpus.files), *broken_releases(root)]
    for path, state in told:
        print(f"{state:12}{path}")
    if not corpus.has_reference:
        print("pyhurray is not installed: what it writes was taken as it is")
    return int(any(state != "ok" for _, state in told))


def write(root: Path) -> int:
    """Write what is not as it should be, and remove what should not be."""
    files = Corpus(root).files
    for path, state in compared(root, files):
        if state == "unexpected":
            (root / path).unlink()
        elif state != "ok":
            (root / path).parent.mkdir(exist_ok=True)
            (root / path).write_bytes(files[path])
        if state != "ok":
            print(f"{state:12}{path}")
    broken = list(broken_releases(root))
    for path, state in broken:
        print(f"{state:12}{path}")
    return int(bool(broken))


def release(root: Path) -> int:
    """Freeze every case file of today; the manifest may still gain cases."""
    if check(root):
        return 1
    cases = json.loads((root / "manifest.json").read_text())["cases"]
    files = {case["file"]: hashlib.sha256((root / case["file"]).read_bytes()).hexdigest() for case in cases}
    rows = [f"{digest}  {path}" for path, digest in sorted({**files, **released(root)}.items())]
    (root / "RELEASED").write_text("\n".join([RELEASED_HEAD, *rows, ""]))
    return 0


RELEASED_HEAD = "# sha256 and path of every file that a release has shipped: none of them may change or go."


def main() -> int:
    """Do what the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--check", action="store_true")
    group.add_argument("--release", action="store_true")
    parser.add_argument("--fixtures", type=Path, default=FIXTURES, help="another folder than the repository's")
    asked = parser.parse_args()
    try:
        return (
            check(asked.fixtures)
            if asked.check
            else release(asked.fixtures)
            if asked.release
            else write(asked.fixtures)
        )
    except (CorpusError, SourceError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
