"""What is fuzzed: the doors through which foreign bytes come in, and the laws that bind them to each other.

Each call of a door is one execution, counted under its name. An error of `hurray_wire` is an answer; anything else
that comes out, and any answer that contradicts another's, is a finding.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from fuzzing import wire
from fuzzing.mutation import descriptor as another
from fuzzing.mutation import some_bytes

import hurray_wire as hw
from hurray_wire.dump import main as dump_main
from hurray_wire.metadata import KNOWN_NAMES

TENSOR = hw.BlockPagedTensor
MOST_BYTES = 1 << 20
LIMITS = hw.Limits(frame_bytes=1 << 26, decoded_bytes=1 << 24)
MOST_MESSAGE = 20_000
DUMP_EVERY = 40
"""The command costs a hundred times what a door does."""
SCHEMES_EACH, DESCRIPTORS_EACH = 8, 3
"""The smallest doors cost a tenth of it: more changes of the scheme and the descriptor in each input."""
ENDS_EARLY = frozenset({"truncated", "stream_truncated"})
NOT_LOOKED_AT = frozenset({"section_checksum", "zstd", "padding", "trailing_bytes"})
"""What only a look at the payload or behind it finds: whoever does not look may find something that comes later."""
NO_BLOB = frozenset({"UnsupportedError foreign", "FrameError magic"})
"""A stream's reader names what is no blob from its first ten bytes."""
DUMP_OPTIONS: tuple[tuple[str, ...], ...] = (
    *((), ("--verify",), ("--hex",), ("--seqs", "--map"), ("--stats",), ("--json",), ("--resync",)),
    *(("--full", "--hex", "--seqs", "--map", "--stats"), ("--json", "--resync", "--stats"), ("--frame", "0", "--hex")),
)


NO_DIGITS = {ord(digit): None for digit in "0123456789"}


class Broken(Exception):
    """A law does not hold: two doors contradict each other, or a door does what it must not."""


class Answer(NamedTuple):
    """What a door said: a value, or one of the package's errors."""

    value: Any
    error: hw.HurrayWireError | None

    @property
    def code(self) -> str:
        """The error's code, "" without one."""
        return "" if self.error is None else str(self.error.code)

    @property
    def kind(self) -> str:
        """The error's class and code, for telling answers apart."""
        return "" if self.error is None else f"{type(self.error).__name__} {self.error.code}"


def must(holds: bool, law: str, *told: Any) -> None:
    """Raise Broken where a law does not hold."""
    if not holds:
        raise Broken(law, *told)


class Doors:
    """Every target over one input; `calls` counts executions, `seen` remembers what answers there were."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.seen: set[tuple[str, str, str]] = set()
        self.fresh = 0
        self.inputs = 0
        self.folder = Path(tempfile.mkdtemp(prefix="hurray-fuzz-"))
        self._target = ""

    @property
    def target(self) -> str:
        """The door that was called last."""
        return self._target

    def ask(self, target: str, call: Callable[[], Any]) -> Answer:
        """One execution; whatever is not an answer passes through."""
        self.calls[target] += 1
        self._target = target
        try:
            return Answer(call(), None)
        except hw.HurrayWireError as error:
            self._judge(target, error)
            return Answer(None, error.with_traceback(None))

    def _judge(self, target: str, error: hw.HurrayWireError) -> None:
        message = str(error)
        must(0 < len(message) < MOST_MESSAGE, "a message is neither empty nor endless", len(message))
        must(error.offset is None or error.offset >= 0, "an offset lies in the input", error.offset)
        message.encode()
        where, trace = error.where.translate(NO_DIGITS), error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        line = f"{where}:{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}" if trace is not None else where
        self.note(target, str(error.code), line)

    def note(self, target: str, code: str, where: str) -> None:
        """Remember an answer; one that there was not yet makes the input worth keeping."""
        if (target, code, where) not in self.seen:
            self.seen.add((target, code, where))
            self.fresh += 1

    def run(self, data: bytes) -> bool:
        """All doors over one input; whether an answer was new."""
        before, self.inputs = self.fresh, self.inputs + 1
        rng = Random(crc32(data))
        decoded = self.ask("decode", lambda: hw.decode(data, limits=LIMITS))
        self._variants(data, decoded, rng)
        self._inspection(data, decoded)
        self._opened(data, decoded, rng)
        self._into(data, decoded)
        self._streams(data, decoded, rng)
        self._values(data, rng)
        if isinstance(decoded.value, TENSOR):
            self._used(decoded.value, rng)
        if rng.randrange(DUMP_EVERY) == 0:
            self._dumped(data, rng)
        return self.fresh > before

    def screen(self, data: bytes) -> bool:
        """The quick doors over one input; whether an answer was new, and so the others are worth asking."""
        before, self.inputs = self.fresh, self.inputs + 1
        decoded = self.ask("decode", lambda: hw.decode(data, limits=LIMITS))
        self._inspection(data, decoded)
        whole = self._drained("iter_decode", hw.iter_decode(data, limits=LIMITS))
        fed = self._drained("FrameDecoder", _fed_whole(data))
        same = len(fed.value) == len(whole.value) and (fed.error is None) == (whole.error is None)
        must(same or not data, "readers give the same tensors", "fed", fed.kind, whole.kind)
        self._values(data, Random(len(data)), descriptors=1, schemes=2)
        return self.fresh > before

    def _variants(self, data: bytes, decoded: Answer, rng: Random) -> None:
        """Other options of `decode`."""
        tensor = decoded.value
        blind = self.ask("decode", lambda: hw.decode(data, verify=False, limits=LIMITS))
        if tensor is not None:
            must(blind.value == tensor, "verify=False accepts what verify=True accepts", blind.kind)
        elif blind.value is not None:
            must(decoded.code == "section_checksum", "verify=False leaves out checksums only", decoded.kind)
        lenient = self.ask("decode", lambda: hw.decode(data, strict=False, limits=LIMITS))
        if tensor is not None:
            must(lenient.value == tensor and not lenient.value.violations, "strict=False accepts more", lenient.kind)
        elif lenient.value is not None:
            must(bool(lenient.value.violations), "what strict=True refuses has violations", decoded.kind)
            repr(lenient.value)
            self._used(lenient.value, rng)
        if rng.randrange(4) == 0:
            own = self.ask("decode", lambda: hw.decode(bytearray(data), copy=True, alloc=_alloc, limits=LIMITS))
            must(own.kind == decoded.kind and (own.value == tensor), "copy=True gives the same", own.kind, decoded.kind)

    def _inspection(self, data: bytes, decoded: Answer) -> None:
        found = self.ask("inspect", lambda: hw.inspect(data))
        if found.value is not None:
            found.value.spans, found.value.sections, repr(found.value)
        if decoded.value is not None:
            must(found.value is not None, "what decodes can be inspected", found.kind)
            must(found.value.descriptor == decoded.value.descriptor, "inspect says what decode says")
            must(found.value.total_bytes == len(data), "inspect knows the length")
        elif found.error is not None and not {found.code, decoded.code} & (ENDS_EARLY | NOT_LOOKED_AT):
            limit = isinstance(decoded.error, hw.LimitError)
            must(limit or found.kind == decoded.kind, "inspect refuses for decode's reason", found.kind, decoded.kind)

    def _opened(self, data: bytes, decoded: Answer, rng: Random) -> None:
        source: Any = data if rng.randrange(2) else lambda offset, length: data[offset : offset + length]
        frame = self.ask("open_frame", lambda: hw.open_frame(source, limits=LIMITS))
        tensor = decoded.value
        if frame.value is None:
            if decoded.code not in ENDS_EARLY | NOT_LOOKED_AT:
                same = frame.kind == decoded.kind or frame.code in ENDS_EARLY
                must(same, "open_frame refuses for decode's reason", frame.kind, decoded.kind)
            return
        with frame.value as opened:
            whole = self.ask("Frame.tensor", opened.tensor)
            must(tensor is None or whole.value == tensor, "a frame opened is the tensor", whole.kind)
            for seq in range(min(3, opened.inspection.descriptor.layout.num_seqs)):
                ranges = self.ask("Frame.ranges", lambda s=seq: opened.ranges(s))  # type: ignore[misc]
                if ranges.value is not None:
                    must(all(0 <= at <= at + n <= len(data) for at, n in ranges.value), "ranges lie in the input")
                if _affordable(opened, seq):
                    rows = self.ask("Frame.gather", lambda s=seq: opened.gather(s))  # type: ignore[misc]
                    if tensor is not None and tensor.seq_lens is not None:
                        same = rows.code == "packed_pool" or _same(rows.value, tensor.gather(seq))
                        must(same, "a sequence is the tensor's", rows.kind)

    def _into(self, data: bytes, decoded: Answer) -> None:
        found = self.ask("inspect", lambda: hw.inspect(data))
        descriptor = None if found.value is None else found.value.descriptor
        if descriptor is None:
            return
        pool, ids = receivers_pool(descriptor)
        if pool is None:
            return
        into = self.ask("decode_into", lambda: hw.decode_into(data, pool, ids, limits=LIMITS))
        same = into.kind == decoded.kind or (into.error is not None and decoded.code in NOT_LOOKED_AT)
        must(same, "decode_into answers as decode", into.kind, decoded.kind)
        if decoded.value is not None and decoded.value.seq_lens is not None and _cheap(decoded.value):
            must(into.value.same_tokens(decoded.value), "decode_into has decode's tokens")
        if found.value.framing == "hrkv":
            self._parts(data, found.value, decoded)

    def _parts(self, data: bytes, found: Any, decoded: Answer) -> None:
        """Header and buffers apart."""
        sizes = found.descriptor.sizes
        starts = {s.kind: s.offset for s in reversed(found.sections)}
        buffers = [data[at : at + n] for i, n in enumerate(sizes) for at in [starts.get(16 + i, 0)]]
        parts = self.ask("decode_parts", lambda: hw.decode_parts(data[: found.header_bytes], buffers, limits=LIMITS))
        if decoded.value is not None and all(s.codec == 0 and 0 < s.kind < 32 for s in found.sections):
            must(parts.value == decoded.value, "a frame's parts are the frame", parts.kind)

    # Streams.

    def _streams(self, data: bytes, decoded: Answer, rng: Random) -> None:
        whole = self._drained("iter_decode", hw.iter_decode(data, limits=LIMITS))
        fed = self._drained("FrameDecoder", _fed(data, rng))
        offered = self._drained("FrameDecoder", _offered(data, rng))
        pulled = self._drained("StreamReader", _pulled(data, rng))
        for name, other in (("fed", fed), ("offered", offered), ("pulled", pulled)):
            same = len(other.value) == len(whole.value) and all(map(TENSOR.__eq__, other.value, whole.value))
            empty = not data and other.code == "stream_truncated"
            must(
                same, "readers give the same tensors", name, len(other.value), len(whole.value), other.kind, whole.kind
            )
            alike = other.kind == whole.kind or whole.code in ENDS_EARLY or empty or {other.kind, whole.kind} == NO_BLOB
            late = whole.code == "section_checksum" and other.error is not None  # a table's, which comes behind
            must(alike or late, "readers end for the same reason", name, other.kind, whole.kind)
        must(fed.kind == offered.kind == pulled.kind, "splits change nothing", fed.kind, offered.kind, pulled.kind)
        if decoded.value is not None and whole.value:
            must(whole.value[0] == decoded.value, "a stream's first tensor is decode's")
        self.ask("StreamReader.read_into", lambda: _received(data, rng))

    def _drained(self, target: str, tensors: Iterable[hw.BlockPagedTensor]) -> Answer:
        found: list[hw.BlockPagedTensor] = []

        def take() -> None:
            found.extend(tensors)

        return Answer(found, self.ask(target, take).error)

    # Values.

    def _values(
        self, data: bytes, rng: Random, descriptors: int = DESCRIPTORS_EACH, schemes: int = SCHEMES_EACH
    ) -> None:
        frame = wire.taken_apart(data)
        descriptor = data if frame is None else frame.content(wire.DESCRIPTOR)
        length = int.from_bytes(descriptor[6:10], "little")
        descriptor = descriptor[:length]
        for mutant in (descriptor, *(another(rng, descriptor) for _ in range(descriptors))):
            found = self.ask("TensorDescriptor.decode", lambda m=mutant: hw.TensorDescriptor.decode(m))  # type: ignore[misc]
            if found.value is not None:
                again = hw.TensorDescriptor.decode(found.value.encode())
                must(again == found.value, "a descriptor comes back")
        at = wire.HANDLES + wire.HANDLE_BYTES * (descriptor[84] if len(descriptor) > 84 else 0)
        size = int.from_bytes(descriptor[at : at + 4], "little")
        tail = descriptor[at + 4 : at + 4 + size] if size < MOST_BYTES else descriptor[at:]
        for mutant in (tail, *(some_bytes(rng, tail) for _ in range(schemes))):
            scheme = self.ask("decode_quantization", lambda m=mutant: hw.decode_quantization(m))  # type: ignore[misc]
            if scheme.value is not None:
                must(hw.decode_quantization(scheme.value.encode()) == scheme.value, "a scheme comes back")

    def _used(self, tensor: hw.BlockPagedTensor, rng: Random) -> None:
        """What a receiver does with a tensor, and sending it on."""
        self.ask("tensor.use", lambda: _use(tensor))
        if tensor.violations or tensor.nbytes > MOST_BYTES:
            return
        options: dict[str, Any] = rng.choice(({}, {"compression": "zstd"}, {"chunk_bytes": 64}, {"framing": "bare"}))
        if options == {"framing": "bare"} and tensor.metadata:
            options = {}
        again = self.ask("encode", lambda: hw.decode(hw.encode(tensor, **options)))
        if again.value is not None and options.get("framing") != "bare":
            must(again.value == tensor, "what decodes comes back encoded", options)
        later = any("." not in name for name in (tensor.metadata or {}).keys() - KNOWN_NAMES)
        must(again.error is None or later, "what decodes can be sent on", again.kind, options)
        if tensor.seq_lens is not None and _cheap(tensor):
            live = self.ask("encode", lambda: hw.decode(hw.encode(tensor, pages="live", scrub=True)))
            must(live.error is None or later or live.code == "packed_pool", "live pages can be sent on", live.kind)
            if live.value is not None:
                must(live.value.same_tokens(tensor), "live pages hold the tokens")

    # The command.

    def _dumped(self, data: bytes, rng: Random) -> None:
        self.calls["hurray-dump"] += 1
        self._target = "hurray-dump"
        path = self.folder / "input"
        path.write_bytes(data)
        options = rng.choice(DUMP_OPTIONS)
        status, out, err = captured([*options, str(path)])
        must(status in (0, 1), "a readable file is sound or not", status, err[-300:])
        must("internal error" not in err and "Traceback" not in out + err, "the command does not fail", err[-300:])
        must((status == 1) or not err, "a sound file has no complaint", err[-300:])
        if "--json" in options:
            json.loads(out)
        whole = self._drained("iter_decode", hw.iter_decode(data))
        if not isinstance(whole.error, hw.LimitError) and whole.code != "shape":  # lawful, but no array holds it
            sound = whole.error is None and bool(data)
            must(sound == (status == 0), "the command's verdict is the decoder's", status, whole.kind, options)
        self.note("hurray-dump", str(status), "".join(c for c in err[-60:] if c.isalpha()))


def _alloc(nbytes: int, alignment: int) -> Any:
    block = np.zeros(nbytes + alignment, np.uint8)
    start = -int(block.__array_interface__["data"][0]) % alignment
    return block[start : start + nbytes]


def _same(left: Any, right: Any) -> bool:
    return left is not None and left.shape == right.shape and left.tobytes() == right.tobytes()


def _affordable(opened: Any, seq: int) -> bool:
    """Whether a sequence of an opened frame can be gathered within bounds; its tables are sound, or it will not be."""
    layout, shape = opened.inspection.descriptor.layout, opened.inspection.descriptor.shape
    width = max(1, shape[1]) * max(1, shape[2]) * 32
    return bool(layout.page_size * width * (seq + 1) < MOST_BYTES)


def _cheap(tensor: hw.BlockPagedTensor) -> bool:
    """Whether all tokens together are small; pages that many sequences share can make them many."""
    return bool(tensor.total_tokens * max(1, tensor.num_heads) * max(1, tensor.head_dim) < MOST_BYTES // 16)


def receivers_pool(descriptor: hw.TensorDescriptor) -> tuple[Any, Any]:
    """A pool that a blob's pages fit into, with one page to spare, and ids in reverse; None where it would be large."""
    layout, (_, heads, dim) = descriptor.layout, descriptor.shape
    pages = layout.num_pages + 1
    if pages * layout.page_size * max(1, heads) * max(1, dim) > MOST_BYTES or not layout.page_size:
        return None, None
    ids = np.arange(layout.num_pages)[::-1]
    if descriptor.dtype.is_flat:
        if not descriptor.page_bytes:
            return None, None
        return np.zeros(pages * descriptor.page_bytes, np.uint8), ids
    return np.zeros((pages, layout.page_size, heads, dim), descriptor.dtype.numpy), ids


def _pieces(data: bytes, rng: Random) -> Iterable[bytes]:
    at = 0
    most = rng.choice((9, 64, 500, 1 << 16)) if len(data) < 1500 else rng.choice((500, 1 << 16))
    if rng.randrange(24) == 0:
        most = 1
    while at < len(data):
        size = rng.randint(1, most)
        yield data[at : at + size]
        at += size


def _fed(data: bytes, rng: Random) -> Iterable[hw.BlockPagedTensor]:
    decoder = hw.FrameDecoder(limits=LIMITS)
    for piece in _pieces(data, rng):
        decoder.feed(piece)
        yield from _ready(decoder)
    if data:
        decoder.close()
        yield from _ready(decoder)


def _fed_whole(data: bytes) -> Iterable[hw.BlockPagedTensor]:
    decoder = hw.FrameDecoder(limits=LIMITS)
    decoder.feed(data)
    yield from _ready(decoder)
    decoder.close()


def _ready(decoder: hw.FrameDecoder) -> Iterable[hw.BlockPagedTensor]:
    while isinstance(found := decoder.next(), TENSOR):
        yield found


def _offered(data: bytes, rng: Random) -> Iterable[hw.BlockPagedTensor]:
    decoder, at = hw.FrameDecoder(limits=LIMITS), 0
    most = rng.choice((50, 700, 1 << 16))
    while not decoder.eof and at < len(data):
        memory = decoder.get_buffer(rng.choice((-1, 0, 1000)))
        piece = data[at : at + min(len(memory), rng.randint(1, most))]
        memory[: len(piece)] = piece
        decoder.buffer_updated(len(piece))
        at += len(piece)
    yield from _ready(decoder)
    if data:
        decoder.close()


def _source(data: bytes, rng: Random) -> Callable[[memoryview], int]:
    inner, most = io.BytesIO(data), rng.choice((40, 700, 1 << 16))
    return lambda memory: inner.readinto(memory[: rng.randint(1, most)])


def _pulled(data: bytes, rng: Random) -> Iterable[hw.BlockPagedTensor]:
    with hw.StreamReader(_source(data, rng), streams="all", limits=LIMITS, require_last=bool(data)) as reader:
        yield from reader


def _received(data: bytes, rng: Random) -> None:
    """Header by header: pages into a pool, skipped, or read."""
    with hw.StreamReader(_source(data, rng), streams="all", limits=LIMITS) as reader:
        for header in iter(reader.next_header, None):
            assert header is not None
            descriptor = header.inspection.descriptor
            assert descriptor is not None
            pool, ids = receivers_pool(descriptor)
            drawn = rng.randrange(4)
            if pool is None or drawn == 0:
                header.skip()
            elif drawn == 1:
                header.read()
            else:
                header.read_into(pool, ids)


def _use(tensor: hw.BlockPagedTensor) -> None:
    repr(tensor)
    must(tensor.check() == list(tensor.violations), "check lists the violations")
    must(bool(tensor.violations) or tensor == tensor.replace(), "a tensor is itself")
    if tensor.violations or tensor.num_pages > MOST_BYTES or not _cheap(tensor):
        return
    tensor.page_references()
    for seq in range(min(tensor.num_seqs, 4)):
        tensor.pages(seq)
        if tensor.seq_lens is not None:
            rows = tensor.gather(seq)
            must(rows.shape[0] == tensor.seq_lens[seq] == tensor.token_slots(seq).size, "a sequence has its tokens")
            try:
                tensor.dequantize(seq)
            except (hw.UnsupportedError, hw.InvalidDescriptorError):
                continue  # scales are judged at use


def captured(argv: list[str]) -> tuple[int, str, str]:
    """The command run here: its status and what it printed."""
    streams = sys.stdout, sys.stderr
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    sys.stdout, sys.stderr = out, err
    try:
        status = dump_main(argv)
    finally:
        sys.stdout, sys.stderr = streams
    told = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return status, told[0], told[1]
