"""Compile `schema/*.ksy` to Python with the Kaitai Struct compiler, into `build/kaitai` (not under version control).

    python tools/kaitai.py

Needs npm and pip, and the network once: npm `kaitai-struct-compiler` and `js-yaml`, PyPI `kaitaistruct`. The tests use
what lies there, and skip where nothing does; they never install anything.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "schema"
BUILD = ROOT / "build" / "kaitai"
RUNTIME, PARSERS, STAMP = BUILD / "runtime", BUILD / "parsers", BUILD / "compiled-from"
NPM_PACKAGES = ("kaitai-struct-compiler@0.11.0", "js-yaml@4.1.0")
PYTHON_PACKAGE = "kaitaistruct==0.11"

COMPILE = """
const fs = require("fs"), path = require("path"), yaml = require("js-yaml");
const made = require("kaitai-struct-compiler");
const compiler = typeof made === "function" ? new made() : made;
const [schema, out] = process.argv.slice(2);
const read = name => yaml.load(fs.readFileSync(path.join(schema, name + ".ksy"), "utf8"));
const importer = { importYaml: name => Promise.resolve(read(path.basename(name))) };
const compile = name => compiler.compile("python", read(name), importer, false).then(files => {
  for (const [file, text] of Object.entries(files)) fs.writeFileSync(path.join(out, file), text);
});
compile("hurray").then(() => compile("hrkv")).catch(error => { console.error(String(error)); process.exit(1); });
"""


def state() -> str:
    """A digest of what is compiled."""
    sources = b"".join(path.read_bytes() for path in sorted(SCHEMA.glob("*.ksy")))
    return hashlib.sha256(sources + repr((NPM_PACKAGES, PYTHON_PACKAGE)).encode()).hexdigest()


def is_current() -> bool:
    """Whether the parsers are those of today's definitions."""
    return STAMP.is_file() and STAMP.read_text() == state()


def run(*command: str | Path) -> None:
    """A command, in the build folder; its failure is ours."""
    subprocess.run([str(word) for word in command], cwd=BUILD, check=True)


def main() -> int:
    """Install and compile, unless that has been done."""
    if is_current():
        print(f"{PARSERS.relative_to(ROOT)} is up to date")
        return 0
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        print("npm and node are needed", file=sys.stderr)
        return 1
    PARSERS.mkdir(parents=True, exist_ok=True)
    if not (BUILD / "node_modules" / "kaitai-struct-compiler").is_dir():
        run(npm, "install", "--prefix", BUILD, "--no-audit", "--no-fund", "--loglevel=error", *NPM_PACKAGES)
    if not (RUNTIME / "kaitaistruct.py").is_file():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*pip, "--target", RUNTIME, PYTHON_PACKAGE)
    (BUILD / "compile.js").write_text(COMPILE)
    run(node, "compile.js", SCHEMA, PARSERS)
    STAMP.write_text(state())
    print(f"compiled into {PARSERS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
