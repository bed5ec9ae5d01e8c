"""`FrameDecoder` as a state machine over streams that are damaged: random splits and acts, held to `iter_decode`.

`test_stream_machine.py` does the same where all is sound.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from stream_helpers import TENSOR, encoded, large, per_block, sample
from stream_ways import drained

import hurray_wire as hw

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"compression": "zstd"},
    {"chunk_bytes": 128},
    {"framing": "bare"},
)
STREAMS = tuple(
    encoded(
        [sample(0), large(1, pages=2), per_block(2)], **({} if "framing" in options else {"stream_id": 77}), **options
    )
    for options in OPTIONS
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A stream, or two, with some bytes another, cut out, put in or cut off; or none, by chance."""
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(STREAMS), min_size=1, max_size=2))))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(data) - 1))
        kind = draw(st.sampled_from(("flip", "flip", "drop", "add", "cut")))
        if kind == "flip":
            data[at] ^= draw(st.integers(1, 255))
        elif kind == "drop":
            del data[at : at + draw(st.integers(1, 80))]
        elif kind == "add":
            data[at:at] = draw(st.binary(min_size=1, max_size=80))
        else:
            del data[max(1, at) :]
    return bytes(data)


class Damaged(RuleBasedStateMachine):
    """One decoder is fed, another receives into its own memory; both must come to what `iter_decode` came to."""

    @initialize(data=damaged())
    def begin(self, data: bytes) -> None:
        self.data = data
        self.tensors, self.error = drained(hw.iter_decode(data))
        self.decoders = {"fed": hw.FrameDecoder(), "offered": hw.FrameDecoder()}
        self.at = dict.fromkeys(self.decoders, 0)
        self.taken: dict[str, int] = dict.fromkeys(self.decoders, 0)
        self.failed = dict.fromkeys(self.decoders, False)

    @rule(count=st.one_of(st.integers(0, 70), st.integers(0, 5000)))
    def feed(self, count: int) -> None:
        decoder, at = self.decoders["fed"], self.at["fed"]
        piece = self.data[at : at + count]
        if self.failed["fed"]:
            with pytest.raises(ValueError, match=r"close"):
                decoder.feed(piece)
            return
        decoder.feed(piece)
        self.at["fed"] = at + len(piece)

    @rule(most=st.integers(1, 3000), hint=st.sampled_from((-1, 0, 1, 65536)))
    def offer(self, most: int, hint: int) -> None:
        decoder, at = self.decoders["offered"], self.at["offered"]
        if decoder.eof:
            with pytest.raises(ValueError, match="wanted"):
                decoder.get_buffer(hint)
            return
        memory = decoder.get_buffer(hint)
        piece = self.data[at : at + min(most, len(memory))]
        if piece:
            memory[: len(piece)] = piece
            decoder.buffer_updated(len(piece))
            self.at["offered"] = at + len(piece)

    @rule(which=st.sampled_from(("fed", "offered")))
    def take(self, which: str) -> None:
        try:
            found = self.decoders[which].next()
        except hw.HurrayWireError:
            assert not self.failed[which], "an error comes out once"
            assert self.error is not None
            assert self.taken[which] == len(self.tensors)
            self.failed[which] = True
            return
        if isinstance(found, TENSOR):
            assert found == self.tensors[self.taken[which]]
            self.taken[which] += 1
        else:
            assert found is hw.NEED_DATA

    @precondition(lambda self: hasattr(self, "data"))
    @rule(count=st.sampled_from((0, -1, 1 << 40)))
    def lie(self, count: int) -> None:
        """More than was offered, or nothing, was received: the caller's own fault, and nothing has happened."""
        with pytest.raises(ValueError, match="not asked for"):
            self.decoders["offered"].buffer_updated(count)

    def teardown(self) -> None:
        if not hasattr(self, "data"):
            return
        for which, decoder in self.decoders.items():
            if which == "fed" and not self.failed[which]:
                decoder.feed(self.data[self.at[which] :])
            while which == "offered" and not decoder.eof and self.at[which] < len(self.data):
                self.offer(1 << 20, -1)
            self._drain(which)
            assert self.taken[which] == len(self.tensors)
            assert self.failed[which] == (self.error is not None)

    def _drain(self, which: str) -> None:
        decoder = self.decoders[which]
        before = -1
        while not self.failed[which] and self.taken[which] != before:
            before = self.taken[which]
            self.take(which)
        if not self.failed[which]:
            try:
                decoder.close()
            except hw.HurrayWireError:
                self.failed[which] = True


TestDamaged = Damaged.TestCase
TestDamaged.settings = settings(max_examples=40, stateful_step_count=15)
