"""The tools around the corpus: the compiler of annotated hex, the maker of fixtures, the runner, the mutations."""

from __future__ import annotations

import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from support import ROOT
from test_conformance import CASES, CORPUS

import hurray_wire as hw
from hurray_wire.testing.__main__ import chosen, main
from hurray_wire.testing.runner import DIFFERS, OK, SKIPPED, Decoder, judge

import hexcase  # isort: skip - a tool, found by the path that `support` sets
import mutate  # isort: skip

REFDECODE = shlex.join([sys.executable, str(ROOT / "tools" / "refdecode.py")])
OURS = shlex.join([sys.executable, "-m", "hurray_wire.testing.reporting"])
OUR_WRITER = shlex.join([sys.executable, "-m", "hurray_wire.testing.encoding"])


# Annotated hex.


def nothing(name: str) -> bytes:
    raise KeyError(name)


def compiled(text: str, load: Callable[[str], bytes] = nothing) -> bytes:
    (case,) = hexcase.compile_source("== one\n" + text, load)
    return case.data


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("00 01ff ; a comment", b"\x00\x01\xff"),
        ("u8=255 u16=1 u32=0x10 u64=2 i32=-1", struct.pack("<BHIQi", 255, 1, 16, 2, -1)),
        ("f32=0.5 f64=-2", struct.pack("<fd", 0.5, -2)),
        ("01\npad 4\n02", b"\x01\0\0\0\x02"),
        ("01\npad 4 FF", b"\x01\xff\xff\xff"),
        ("repeat 3 = 01 02", b"\x01\x02" * 3),
        ("ramp 4", bytes(range(4))),
        ("ramp 3 254 1", b"\xfe\xff\x00"),
        ("text ;ü {}", ";ü {}".encode()),
        ("u32=len(a) u32=start(a) u32=end(a) [a 07 08 ]", struct.pack("<3I", 2, 12, 14) + b"\x07\x08"),
        ("ramp 6\nat 2 = FF u8=9", b"\x00\x01\xff\x09\x04\x05"),
        ("ramp 3\ninsert 1 = AA", b"\x00\xaa\x01\x02"),
        ("ramp 5\ndelete 1 2", b"\x00\x03\x04"),
        ("ramp 5\ncut 2", b"\x00\x01"),
        ("macro twice\n$2 $1\nend\ntwice 01 02", b"\x02\x01"),
    ],
)
def test_hex_is_compiled(text: str, data: bytes) -> None:
    assert compiled(text) == data


def test_hex_reads_files_and_other_cases() -> None:
    files = {"a/b": bytes(range(10))}
    assert compiled("file a/b", files.__getitem__) == bytes(range(10))
    assert compiled("file a/b 8", files.__getitem__) == b"\x08\x09"
    assert compiled("file a/b 2 4\n@note x", files.__getitem__) == b"\x02\x03"


def test_hex_digests_within_digests() -> None:
    data = compiled("[outer u64=xxh3(inner) ] u64=xxh3(outer) [inner 01 02 ]")
    assert data[:8] == xxhash.xxh3_64_intdigest(b"\x01\x02").to_bytes(8, "little")
    assert data[8:16] == xxhash.xxh3_64_intdigest(data[:8]).to_bytes(8, "little")
    assert compiled("ramp 16\nxxh3 0 8 at 8")[8:] == xxhash.xxh3_64_intdigest(bytes(range(8))).to_bytes(8, "little")


@pytest.mark.parametrize(
    "text",
    ["0", "xyz", "[a 00", "u32=len(none)", "at 0 = 01", "u8=256", "[a u64=xxh3(a) ]", "macro m\n00", "file none"],
)
def test_hex_that_means_nothing_names_its_line(text: str) -> None:
    with pytest.raises(hexcase.SourceError):
        compiled(text)


def test_the_compiler_of_hex_knows_no_struct() -> None:
    for name in ("hexcase.py", "reference_cases.py", "refdecode.py", "refdecode_xxh3.py", "refdecode_zstd.py"):
        lines = (ROOT / "tools" / name).read_text().splitlines()
        assert not [line for line in lines if line.split()[:2] in (["import", "hurray_wire"], ["from", "hurray_wire"])]


# The maker of fixtures.


def maker(*arguments: str) -> tuple[int, list[str]]:
    command = [sys.executable, str(ROOT / "tools" / "make_fixtures.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "fixtures"
    shutil.copytree(CORPUS.root, folder, ignore=shutil.ignore_patterns("real"))
    return folder


def states(lines: list[str]) -> dict[str, str]:
    return {path: state.strip() for state, path in ((line[:12], line[12:]) for line in lines if line[12:])}


def test_check_tells_what_is_not_as_it_would_be_made(copy: Path) -> None:
    (copy / "accept/frame-plain.hrkv").write_bytes(b"something else")
    (copy / "reject/nothing.bin").unlink()
    (copy / "reject/by-hand.hrry").write_bytes(b"HRRY")
    status, lines = maker("--check", "--fixtures", str(copy))
    told = states(lines)
    assert status == 1
    assert told.pop("accept/frame-plain.hrkv") == "outdated"
    assert told.pop("reject/nothing.bin") == "missing"
    assert told.pop("reject/by-hand.hrry") == "unexpected"
    assert set(told.values()) == {"ok"}
    assert maker("--fixtures", str(copy))[0] == 0
    assert maker("--check", "--fixtures", str(copy))[0] == 0


def test_what_a_release_has_shipped_only_stays(copy: Path) -> None:
    assert maker("--release", "--fixtures", str(copy))[0] == 0
    assert maker("--check", "--fixtures", str(copy))[0] == 0
    source = copy / "source/accept-bare.hex"
    text = source.read_text().replace("at 5 = FF", "at 5 = FE")
    source.write_text(text.replace("== alignment-of-empty-buffer", "== another-name"))
    maker("--fixtures", str(copy))
    status, lines = maker("--check", "--fixtures", str(copy))
    assert status == 1
    assert "changed, though releasedaccept/minor-newer-nothing-behind.hrry" in lines
    assert "missing, though releasedaccept/alignment-of-empty-buffer.hrry" in lines


# The runner.


def run_by(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = main(list(arguments))
    return status, capsys.readouterr().out


def test_the_runner_finds_the_independent_decoder_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    """A process a case: a part of the corpus, of every class of errors and every form."""
    patterns = ("frame-zstd*", "frame-metadata*", "class:LimitError", "stream-*", "pool-tail*", "lenient*", "foreign-*")
    only = [word for pattern in patterns for word in ("--only", pattern)]
    status, text = run_by("--decode", REFDECODE + " {file} {options}", *only, capsys=capsys)
    assert (status, text.count("differs  decode")) == (0, 0), text
    assert len(chosen(CORPUS, list(patterns))) > 50


def test_the_runner_finds_the_package_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    """One process that is asked line by line: the whole corpus."""
    status, text = run_by("--decode", OURS, capsys=capsys)
    differing = [line for line in text.splitlines() if line.startswith("differs ")]
    assert (status, differing) == (0, [])


def test_the_runner_finds_our_writer_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    only = [word for name in ("frame-*", "statistics-every*", "role-fused") for word in ("--only", name)]
    status, text = run_by("--encode", OUR_WRITER + " {case}", *only, "--verbose", capsys=capsys)
    assert status == 0, text
    assert text.count("ok       encode") >= 6


def test_the_runner_finds_a_decoder_that_accepts_everything(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "yes.py"
    script.write_text('print(\'{"verdict": "accept"}\')')
    command = shlex.join([sys.executable, str(script)])
    status, text = run_by("--decode", command + " {file}", "--only", "foreign-*", "--only", "expect-*", capsys=capsys)
    assert status == 1
    assert "differs  decode  foreign-zip  accepts, must reject" in text
    assert "skipped" in text


@pytest.mark.parametrize(
    ("command", "message"),
    [("echo no JSON", "no verdict"), ("false", "no verdict"), ("/no/such/program", "No such file")],
)
def test_the_runner_survives_any_command(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run_by("--decode", command + " {file}", "--only", "foreign-zip", capsys=capsys)
    assert status == 1
    assert message in text


@pytest.mark.parametrize("command", ["false", "head -c 10", "yes"])
def test_the_runner_survives_any_command_that_is_asked_by_lines(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = run_by("--decode", command, "--only", "foreign-*", capsys=capsys)
    assert status == 1
    assert text.count("differs  decode") == 10


def test_the_runner_survives_any_writer(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("false", "echo x", "/no/such/program"):
        status, text = run_by("--encode", command + " {case}", "--only", "frame-plain", capsys=capsys)
        assert status == 1
        assert "differs  encode  frame-plain" in text


@pytest.mark.parametrize(
    "arguments", [[], ["--decode", "true", "--only", "no such case"], ["--decode", "x", "--fixtures", "/"]]
)
def test_usage_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_judging() -> None:
    case, refused = CASES["plain-float16"], CASES["page-id-minus-one"]
    told = {"verdict": "accept", **(case.expected or {})}
    assert judge(case, told)[0] == OK
    assert judge(case, {**told, "num_seqs": 3})[0] == DIFFERS
    assert judge(case, {key: value for key, value in told.items() if key != "dtype"}) == (DIFFERS, "dtype is not told")
    assert judge(case, {"verdict": "reject", "error_class": "FrameError", "code": "zstd"})[0] == DIFFERS
    error = {"verdict": "reject", **(refused.error or {})}
    assert judge(refused, error)[0] == OK
    assert judge(refused, {**error, "where": None, "offset": None})[0] == OK
    assert judge(refused, {**error, "offset": 0})[0] == DIFFERS
    assert judge(refused, {**error, "code": "rank"})[0] == DIFFERS
    assert judge(CASES["shape-beyond-any-memory"], told)[0] == SKIPPED
    assert judge(case, "text")[0] == judge(case, None)[0] == judge(case, {"verdict": "maybe"})[0] == DIFFERS


def test_a_decoder_is_asked_as_its_command_says() -> None:
    with Decoder("cat {file}") as once, Decoder("cat") as asked:
        assert (once.started, once.takes_options) == (False, False)
        assert (asked.started, asked.takes_options) == (True, True)
        assert asked.ask(Path("a"), {"strict": False}) == {"file": "a", "options": {"strict": False}}


def test_the_package_of_tests_needs_no_hypothesis() -> None:
    code = "import sys, hurray_wire.testing as t; t.Corpus, t.report; assert 'hypothesis' not in sys.modules; t.tensors"
    done = subprocess.run([sys.executable, "-c", code + "; assert 'hypothesis' in sys.modules"], cwd=ROOT, check=False)
    assert done.returncode == 0


# Mutations.


def test_every_mutation_still_applies() -> None:
    assert len(mutate.MUTATIONS) >= 20
    for mutation in mutate.MUTATIONS:
        text = (ROOT / "hurray_wire" / mutation.file).read_text()
        assert text.count(mutation.old) == 1, mutation.name


def test_a_mutation_is_caught() -> None:
    (mutation,) = (m for m in mutate.MUTATIONS if m.name == "page id may equal num_pages")
    caught = mutate.caught_by(mutation)
    assert "page-id-equals-num-pages" in caught
    assert len(caught) < len(CASES) // 10, hw.__name__
