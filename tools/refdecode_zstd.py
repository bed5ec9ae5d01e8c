"""A zstd decompressor (RFC 8878) in plain Python, for one frame of known content size without a dictionary.

`decompress` enforces what the specification, section 4, asks of a compressed section: exactly one zstd frame,
nothing skippable, no dictionary, a stated content size that is the expected one, and a bounded window.  The
output grows only as blocks are decoded, and never by more than one block beyond the expected size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from refdecode_xxh3 import xxh64

_MAGIC = bytes.fromhex("28b52ffd")
_BLOCK_MAX = 128 << 10
_WINDOW_MAX = 8 << 20
_MAX_CODE_BITS = 11


class ZstdError(Exception):
    """The bytes are not the one zstd frame that was announced."""


class _Header(NamedTuple):
    window: int
    has_checksum: bool
    end: int


def decompress(frame: bytes, size: int) -> bytes:
    """The content of `frame`, which is `size` bytes long; ZstdError if anything is not as it must be."""
    try:
        header = _read_header(frame, size)
        out, at = _read_blocks(frame, header, size)
    except IndexError as error:
        raise ZstdError("ends early") from error
    content = bytes(out)
    if header.has_checksum:
        if frame[at : at + 4] != (xxh64(content) & 0xFFFFFFFF).to_bytes(4, "little"):
            raise ZstdError("content checksum differs")
        at += 4
    if at != len(frame):
        raise ZstdError("bytes behind the frame")
    return content


# --- frame and blocks (RFC 8878, section 3.1.1) -------------------------------------------------------------


def _read_header(frame: bytes, size: int) -> _Header:
    if frame[:4] != _MAGIC:
        raise ZstdError("no zstd magic")
    descriptor, at = frame[4], 5
    single_segment = descriptor >> 5 & 1
    if descriptor & 8:
        raise ZstdError("reserved bit set")
    window = 0
    if not single_segment:
        base = 1 << 10 + (frame[at] >> 3)
        window = base + (base >> 3) * (frame[at] & 7)
        at += 1
    dictionary_width = (0, 1, 2, 4)[descriptor & 3]
    size_width = (single_segment, 2, 4, 8)[descriptor >> 6]
    end = at + dictionary_width + size_width
    if len(frame) < end or not size_width:
        raise ZstdError("no content size")
    if dictionary_width:  # RFC 8878 lets an id of 0 mean none; the specification, section 4, wants no id at all
        raise ZstdError("names a dictionary")
    stated = int.from_bytes(frame[end - size_width : end], "little") + (256 if size_width == 2 else 0)
    window = window or stated
    if stated != size or window > max(size, _WINDOW_MAX):
        raise ZstdError("content size or window is not the announced one")
    return _Header(window, bool(descriptor & 4), end)


def _read_blocks(frame: bytes, header: _Header, size: int) -> tuple[bytearray, int]:
    out, at, last = bytearray(), header.end, 0
    state, limit = _State(), min(header.window, _BLOCK_MAX)
    while not last:
        if at + 3 > len(frame):
            raise ZstdError("ends within a block header")
        block_header = int.from_bytes(frame[at : at + 3], "little")
        last, kind, length = block_header & 1, block_header >> 1 & 3, block_header >> 3
        at += 3
        stored = 1 if kind == 1 else length
        if kind == 3 or length > limit or at + stored > len(frame):
            raise ZstdError("impossible block header")
        if kind == 2:
            state.decode_block(frame[at : at + stored], out, limit)
        else:
            out += frame[at : at + stored] * (length if kind == 1 else 1)
        at += stored
        if len(out) > size:
            raise ZstdError("more content than stated")
    if len(out) != size:
        raise ZstdError("less content than stated")
    return out, at


# --- bit readers (section 4.1) ------------------------------------------------------------------------------


class _Backward:
    """A bitstream read from its end; the highest set bit of the last byte is the end mark."""

    def __init__(self, source: bytes) -> None:
        if not source or not source[-1]:
            raise ZstdError("bitstream without end mark")
        self.source = source
        self.left = 8 * len(source) - 9 + source[-1].bit_length()

    def read(self, count: int) -> int:
        self.left -= count
        if self.left < 0:
            raise ZstdError("bitstream ends early")
        at = self.left >> 3
        window = int.from_bytes(self.source[at : at + 8], "little")
        return window >> (self.left & 7) & (1 << count) - 1


class _Forward:
    """A bitstream read from its beginning, lowest bits first."""

    def __init__(self, source: bytes) -> None:
        self.bits = int.from_bytes(source, "little")
        self.size = 8 * len(source)
        self.at = 0

    def read(self, count: int) -> int:
        value = self.bits >> self.at & (1 << count) - 1
        self.at += count
        return value


# --- FSE (section 4.1.1) ------------------------------------------------------------------------------------


class _Fse(NamedTuple):
    """For each state the symbol, the number of bits to read, and the base of the next state."""

    log: int
    symbols: list[int]
    widths: list[int]
    bases: list[int]


def _read_fse(source: bytes, max_log: int, max_symbol: int) -> tuple[_Fse, int]:
    """The table described at the start of `source`, and the number of bytes of its description."""
    bits = _Forward(source[:512])
    log = bits.read(4) + 5
    if log > max_log:
        raise ZstdError("FSE accuracy too high")
    counts: list[int] = []
    remaining = 1 << log
    while remaining > 0 and len(counts) <= max_symbol:
        count = _read_probability(bits, remaining)
        remaining -= abs(count)
        counts.append(count)
        zeros = 3 if count == 0 else 0
        while zeros == 3:
            zeros = bits.read(2)
            counts += [0] * zeros
    if remaining or len(counts) > max_symbol + 1 or bits.at > bits.size:
        raise ZstdError("FSE probabilities do not add up")
    return _build_fse(counts, log), (bits.at + 7) // 8


def _read_probability(bits: _Forward, remaining: int) -> int:
    width = (remaining + 1).bit_length()
    value = bits.read(width)
    low = value & (1 << width - 1) - 1
    spare = (1 << width) - 2 - remaining
    if low < spare:
        bits.at -= 1
        return low - 1
    return (value if value < 1 << width - 1 else value - spare) - 1


def _build_fse(counts: list[int], log: int) -> _Fse:
    size = 1 << log
    symbols, following = [0] * size, [abs(count) for count in counts]
    high = size
    for symbol, count in enumerate(counts):
        if count == -1:
            high -= 1
            symbols[high] = symbol
    step, at = (size >> 1) + (size >> 3) + 3, 0
    for symbol, count in enumerate(counts):
        for _ in range(count):
            symbols[at] = symbol
            at = at + step & size - 1
            while at >= high:
                at = at + step & size - 1
    widths, bases = [0] * size, [0] * size
    for state, symbol in enumerate(symbols):
        widths[state] = log + 1 - following[symbol].bit_length()
        bases[state] = (following[symbol] << widths[state]) - size
        following[symbol] += 1
    return _Fse(log, symbols, widths, bases)


# --- Huffman (section 4.2) ----------------------------------------------------------------------------------


class _Huffman(NamedTuple):
    """For each value of the next `log` bits the symbol and the number of bits that it takes."""

    log: int
    symbols: list[int]
    widths: list[int]


def _read_huffman(source: bytes) -> tuple[_Huffman, int]:
    """The table described at the start of `source`, and the number of bytes of its description."""
    head = source[0]
    if head < 128:
        end = 1 + head
        if end > len(source):
            raise ZstdError("Huffman weights end early")
        return _build_huffman(_read_weights(source[1:end])), end
    count = head - 127
    end = 1 + (count + 1) // 2
    if end > len(source):
        raise ZstdError("Huffman weights end early")
    nibbles = [nibble for byte in source[1:end] for nibble in (byte >> 4, byte & 15)]
    return _build_huffman(nibbles[:count]), end


def _read_weights(source: bytes) -> list[int]:
    """Weights compressed with FSE: two states take turns until the bits are used up."""
    table, start = _read_fse(source, 6, 255)
    bits = _Backward(source[start:])
    current, other = bits.read(table.log), bits.read(table.log)
    weights: list[int] = []
    while len(weights) < 255:
        weights.append(table.symbols[current])
        width = table.widths[current]
        if bits.left < width:
            return [*weights, table.symbols[other]]
        current, other = other, table.bases[current] + bits.read(width)
    raise ZstdError("too many Huffman weights")


def _build_huffman(weights: list[int]) -> _Huffman:
    total = sum(1 << weight >> 1 for weight in weights)
    log = total.bit_length()
    rest = (1 << log) - total
    if not total or log > _MAX_CODE_BITS or rest & rest - 1 or len(weights) > 255:
        raise ZstdError("Huffman weights do not add up")
    weights = [*weights, rest.bit_length()]
    if weights.count(1) < 2:
        raise ZstdError("Huffman tree without a longest code")
    symbols: list[int] = []
    widths: list[int] = []
    for weight in range(1, log + 1):
        for symbol, own in enumerate(weights):
            if own == weight:
                symbols += [symbol] * (1 << weight - 1)
                widths += [log + 1 - weight] * (1 << weight - 1)
    return _Huffman(log, symbols, widths)


def _decode_huffman(table: _Huffman, source: bytes, count: int) -> bytes:
    log, symbols, widths = table
    left, mask = _Backward(source).left, (1 << log) - 1
    out = bytearray()
    for _ in range(count):
        at = left - log
        if at >= 0:
            index = int.from_bytes(source[at >> 3 : (at >> 3) + 3], "little") >> (at & 7) & mask
        else:
            index = int.from_bytes(source[:2], "little") << -at & mask
        out.append(symbols[index])
        left -= widths[index]
        if left < 0:
            raise ZstdError("literals end early")
    if left:
        raise ZstdError("literals leave bits over")
    return bytes(out)


# --- sequence codes (section 3.1.1.3.2) ---------------------------------------------------------------------


def _bases(first: int, widths: list[int]) -> list[int]:
    return [first + sum(1 << width for width in widths[:code]) for code in range(len(widths))]


_LITERAL_WIDTHS = [0] * 16 + [1] * 4 + [2] * 2 + [3] * 2 + [4, *range(6, 17)]
_LITERAL_BASES = _bases(0, _LITERAL_WIDTHS)
_MATCH_WIDTHS = [0] * 32 + [1] * 4 + [2] * 2 + [3] * 2 + [4] * 2 + [5, *range(7, 17)]
_MATCH_BASES = _bases(3, _MATCH_WIDTHS)


class _Kind(NamedTuple):
    """One of the three tables of a sequences section: its limits, and its predefined distribution."""

    shift: int
    max_log: int
    max_symbol: int
    predefined: _Fse


_LITERAL_LENGTH = _Kind(6, 9, 35, _build_fse([4, 3, *[2] * 11, 1, 1, 1, *[2] * 9, 3, 2, *[1] * 5, *[-1] * 4], 6))
_OFFSET = _Kind(4, 8, 31, _build_fse([*[1] * 6, 2, 2, 2, *[1] * 15, *[-1] * 5], 5))
_MATCH_LENGTH = _Kind(2, 9, 52, _build_fse([1, 4, 3, *[2] * 6, *[1] * 37, *[-1] * 7], 6))


class _Sequence(NamedTuple):
    literals: int
    match: int
    offset_value: int


# --- compressed blocks (section 3.1.1.3) --------------------------------------------------------------------


class _State:
    """What one block of a frame hands on to the next: Huffman table, FSE tables, repeat offsets."""

    def __init__(self) -> None:
        self.huffman: _Huffman | None = None
        self.tables: dict[int, _Fse] = {}
        self.repeats = [1, 4, 8]

    def decode_block(self, block: bytes, out: bytearray, limit: int) -> None:
        """Append the content of a compressed block, at most `limit` bytes, to what is decoded so far."""
        end = len(out) + limit
        literals, at = self._read_literals(block, limit)
        sequences = self._read_sequences(block[at:])
        rest = self._execute(sequences, literals, out, end)
        out += literals[rest:]
        if len(out) > end:
            raise ZstdError("block too large")

    def _read_literals(self, block: bytes, limit: int) -> tuple[bytes, int]:
        kind, form = block[0] & 3, block[0] >> 2 & 3
        if kind < 2:
            width, shift = ((1, 3), (2, 4), (1, 3), (3, 4))[form]
            count, stored = int.from_bytes(block[:width], "little") >> shift, 0
            stored = 1 if kind else count
        else:
            width, bits = ((3, 10), (3, 10), (4, 14), (5, 18))[form]
            sizes = int.from_bytes(block[:width], "little") >> 4
            count, stored = sizes & (1 << bits) - 1, sizes >> bits
        end = width + stored
        if end > len(block) or count > limit:
            raise ZstdError("literals too long")
        if kind == 0:
            return block[width:end], end
        if kind == 1:
            return block[width:end] * count, end
        return self._read_huffman_literals(block[width:end], count, kind == 3, 4 if form else 1), end

    def _read_huffman_literals(self, source: bytes, count: int, treeless: bool, streams: int) -> bytes:
        if not treeless:
            self.huffman, start = _read_huffman(source)
            source = source[start:]
        table = self.huffman
        if table is None or not count:
            raise ZstdError("literals without a Huffman table")
        if streams == 1:
            return _decode_huffman(table, source, count)
        if count < 6 or len(source) < 6:
            raise ZstdError("too few literals for four streams")
        part, cuts = (count + 3) // 4, [6]
        for stream in range(3):
            cuts.append(cuts[-1] + int.from_bytes(source[2 * stream : 2 * stream + 2], "little"))
        cuts.append(len(source))
        counts = (part, part, part, count - 3 * part)
        pieces = [source[cuts[i] : cuts[i + 1]] for i in range(4)]
        return b"".join(_decode_huffman(table, piece, n) for piece, n in zip(pieces, counts, strict=True))

    def _read_sequences(self, source: bytes) -> list[_Sequence]:
        count, at = source[0], 1
        if count == 255:
            count, at = source[1] + (source[2] << 8) + 0x7F00, 3
        elif count >= 128:
            count, at = (count - 128 << 8) + source[1], 2
        if not count:
            if at != len(source):
                raise ZstdError("bytes behind the literals")
            return []
        modes, at = source[at], at + 1
        if modes & 3:
            raise ZstdError("reserved bits set")
        for kind in (_LITERAL_LENGTH, _OFFSET, _MATCH_LENGTH):
            at += self._read_table(kind, modes >> kind.shift & 3, source[at:])
        return self._decode_sequences(_Backward(source[at:]), count)

    def _read_table(self, kind: _Kind, mode: int, source: bytes) -> int:
        """Set the table of `kind` as its mode says; the number of bytes taken."""
        if mode == 0:
            self.tables[kind.shift] = kind.predefined
        elif mode == 1:
            if source[0] > kind.max_symbol:
                raise ZstdError("symbol out of range")
            self.tables[kind.shift] = _Fse(0, [source[0]], [0], [0])
            return 1
        elif mode == 2:
            self.tables[kind.shift], taken = _read_fse(source, kind.max_log, kind.max_symbol)
            return taken
        elif kind.shift not in self.tables:
            raise ZstdError("no table to repeat")
        return 0

    def _decode_sequences(self, bits: _Backward, count: int) -> list[_Sequence]:
        tables = literal, offset, match = [
            self.tables[kind.shift] for kind in (_LITERAL_LENGTH, _OFFSET, _MATCH_LENGTH)
        ]
        at_literal, at_offset, at_match = (bits.read(table.log) for table in tables)
        read: Callable[[int], int] = bits.read
        sequences: list[_Sequence] = []
        while True:
            code = offset.symbols[at_offset]
            offset_value = (1 << code) + read(code)
            code = match.symbols[at_match]
            match_length = _MATCH_BASES[code] + read(_MATCH_WIDTHS[code])
            code = literal.symbols[at_literal]
            literal_length = _LITERAL_BASES[code] + read(_LITERAL_WIDTHS[code])
            sequences.append(_Sequence(literal_length, match_length, offset_value))
            if len(sequences) == count:
                break
            at_literal = literal.bases[at_literal] + read(literal.widths[at_literal])
            at_match = match.bases[at_match] + read(match.widths[at_match])
            at_offset = offset.bases[at_offset] + read(offset.widths[at_offset])
        if bits.left:
            raise ZstdError("sequences leave bits over")
        return sequences

    def _execute(self, sequences: list[_Sequence], literals: bytes, out: bytearray, end: int) -> int:
        """Play the sequences on what has been decoded so far; the number of literals used."""
        at = 0
        for step in sequences:
            if at + step.literals > len(literals):
                raise ZstdError("literals used up")
            out += literals[at : at + step.literals]
            at += step.literals
            offset = self._offset(step)
            if not 0 < offset <= len(out) or len(out) + step.match > end:
                raise ZstdError("match out of range")
            source = out[len(out) - offset : len(out) - offset + step.match]
            out += (source * (step.match // offset + 1))[: step.match]
        return at

    def _offset(self, step: _Sequence) -> int:
        """The distance that an offset value stands for, with the three most recent kept (section 3.1.1.5)."""
        first, second, third = self.repeats
        if step.offset_value > 3:
            self.repeats = [step.offset_value - 3, first, second]
            return self.repeats[0]
        index = step.offset_value - (1 if step.literals else 0)
        if index == 1:
            self.repeats = [second, first, third]
        elif index == 2:
            self.repeats = [third, first, second]
        elif index == 3:
            self.repeats = [first - 1, first, second]
        return self.repeats[0]
