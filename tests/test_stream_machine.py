"""Readers as state machines: random splits, random acts, held to a model that knows where every item ends."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from strategies import tensors
from stream_helpers import TENSOR, as_sent, encoded, large, sample

import hurray_wire as hw


class Item:
    """A tensor of the stream and where its bytes end."""

    def __init__(self, tensor: TENSOR, end: int) -> None:
        self.tensor = tensor
        self.end = end


streams = st.lists(
    st.one_of(
        st.integers(0, 3).map(sample),
        st.integers(0, 3).map(lambda n: large(n, pages=2)),
        tensors(with_metadata=False).map(lambda built: built.tensor),
    ),
    max_size=4,
)
Form = dict[str, Any]
RAW: Form = {}
BARE: Form = {"framing": "bare"}
options: st.SearchStrategy[Form] = st.sampled_from(
    (RAW, {"compression": "zstd"}, {"chunk_bytes": 128}, {"frame_alignment": 1024})
)


def laid_out(groups: list[list[TENSOR]], forms: list[Form]) -> tuple[bytes, list[Item]]:
    """Streams back to back, each with a form of its own, and the items in them."""
    data, items = b"", list[Item]()
    for group, form in zip(groups, forms, strict=True):
        framed = form.get("framing") != "bare"
        stream = encoded(group, **form)
        starts = len(encoded([], **form)) if framed else 0  # the closing frame, behind all others
        for n in range(1, len(group) + 1):
            end = len(data) + len(encoded(group[:n], **form)) - starts
            items.append(Item(as_sent(group[n - 1], form.get("framing", "hrkv")), end))
        data += stream
    return data, items


class Decoders(RuleBasedStateMachine):
    """Two `FrameDecoder`s: one is fed, the other receives into the memory that it offers."""

    @initialize(groups=st.lists(streams, min_size=1, max_size=3), data=st.data())
    def begin(self, groups: list[list[TENSOR]], data: st.DataObject) -> None:
        forms = [data.draw(st.one_of(options, st.just(BARE))) for _ in groups]
        self.data, self.items = laid_out(groups, forms)
        self.fed, self.offered = hw.FrameDecoder(), hw.FrameDecoder()
        self.at = {"fed": 0, "offered": 0}
        self.taken = {"fed": 0, "offered": 0}
        self.ended = False

    @precondition(lambda self: not self.ended)
    @rule(count=st.one_of(st.integers(0, 70), st.integers(0, 5000)))
    def feed(self, count: int) -> None:
        at = self.at["fed"]
        self.fed.feed(memoryview(self.data)[at : at + count])
        self.at["fed"] = min(at + count, len(self.data))

    @precondition(lambda self: not self.ended)
    @rule(most=st.integers(1, 3000), hint=st.sampled_from((-1, 0, 1, 65536)))
    def offer(self, most: int, hint: int) -> None:
        memory = self.offered.get_buffer(hint)
        assert not memory.readonly
        assert len(memory) > 0
        at = self.at["offered"]
        piece = self.data[at : at + min(most, len(memory))]
        if piece:
            memory[: len(piece)] = piece
            self.offered.buffer_updated(len(piece))
            self.at["offered"] = at + len(piece)

    @rule(which=st.sampled_from(("fed", "offered")))
    def take(self, which: str) -> None:
        decoder: hw.FrameDecoder = getattr(self, which)
        whole = [item for item in self.items if item.end <= self.at[which]]
        taken = self.taken[which]
        found = decoder.next()
        if taken == len(whole):
            assert found is hw.NEED_DATA
        else:
            assert found == whole[taken].tensor
            self.taken[which] += 1

    @precondition(lambda self: not self.ended)
    @invariant()
    def nothing_is_over(self) -> None:
        if hasattr(self, "fed"):
            assert not self.fed.eof
            assert self.fed.unused_data == b""

    @precondition(lambda self: not self.ended)
    @rule()
    def finish(self) -> None:
        """All the rest in one piece, and the end: everything is there."""
        self.fed.feed(self.data[self.at["fed"] :])
        while self.at["offered"] < len(self.data):
            self.offer(1 << 20, -1)
        self.at["fed"] = len(self.data)
        self.ended = True
        for decoder in (self.fed, self.offered):
            if self.data:
                decoder.close()

    def teardown(self) -> None:
        if hasattr(self, "data"):
            if not self.ended:
                self.finish()
            for which in ("fed", "offered"):
                while self.taken[which] < len(self.items):
                    self.take(which)
                self.take(which)


class Chosen:
    """A callable source whose pieces hypothesis chooses."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self.inner = io.BytesIO(data)
        self.sizes = sizes
        self.turn = 0

    def __call__(self, memory: memoryview) -> int:
        self.turn += 1
        return self.inner.readinto(memory[: self.sizes[self.turn % len(self.sizes)]])


class Readers(RuleBasedStateMachine):
    """A `StreamReader`: headers, reading, receiving into pages, skipping, in any order."""

    @initialize(
        groups=st.lists(streams, min_size=1, max_size=2),
        sizes=st.lists(st.one_of(st.integers(1, 60), st.integers(1, 9000)), min_size=1, max_size=7),
        data=st.data(),
    )
    def begin(self, groups: list[list[TENSOR]], sizes: list[int], data: st.DataObject) -> None:
        forms = [data.draw(options) for _ in groups]
        self.bytes, self.items = laid_out(groups, forms)
        self.source = Chosen(self.bytes, sizes)
        self.reader = hw.StreamReader(self.source, streams="all")
        self.taken = 0
        self.header: hw.FrameHeader | None = None

    @property
    def item(self) -> Item | None:
        return self.items[self.taken] if self.taken < len(self.items) else None

    @rule()
    def next_header(self) -> None:
        """Passes over a payload that was not taken."""
        if self.header is not None:
            self.taken += 1
        self.header = self.reader.next_header()
        assert (self.header is None) == (self.item is None)
        if self.header is not None and self.item is not None:
            found = self.header.inspection
            assert found.descriptor == self.item.tensor.descriptor
            assert self.item.end - found.total_bytes + found.header_bytes >= self.source.inner.tell()

    @precondition(lambda self: bool(getattr(self, "header", None)))
    @rule()
    def read(self) -> None:
        assert self.header is not None
        assert self.item is not None
        assert self.header.read() == self.item.tensor
        self._done()

    def _done(self) -> None:
        assert self.item is not None
        assert self.source.inner.tell() == self.item.end
        self.taken += 1
        self.header = None

    @precondition(lambda self: bool(getattr(self, "header", None)))
    @rule()
    def skip(self) -> None:
        assert self.header is not None
        self.header.skip()
        self._done()

    @precondition(lambda self: bool(getattr(self, "header", None)) and not self.item.tensor.dtype.is_flat)
    @rule(seed=st.integers(0, 99), extra=st.integers(0, 3), make=st.sampled_from(("plain", "pages", "heads", ">")))
    def read_into(self, seed: int, extra: int, make: str) -> None:
        assert self.header is not None
        assert self.item is not None
        tensor = self.item.tensor
        shape = (tensor.num_pages + extra, *tensor.page_pool.shape[1:])
        dtype = tensor.page_pool.dtype
        if make == "pages":
            pool = np.zeros((shape[0] * 2, *shape[1:]), dtype)[::2]
        elif make == "heads":
            pool = np.zeros((*shape[:2], shape[2] * 2, shape[3]), dtype)[:, :, ::2]
        else:
            pool = np.zeros(shape, dtype.newbyteorder(">") if make == ">" else dtype)
        ids = np.random.default_rng(seed).permutation(shape[0])[: tensor.num_pages]
        found = self.header.read_into(pool, ids)
        assert found.page_pool is pool
        assert found.num_pages == shape[0]
        assert np.array_equal(found.block_table, ids[tensor.block_table.astype(np.int64)])
        width = dtype.itemsize
        theirs = np.ascontiguousarray(tensor.page_pool).view(f"V{width}")
        ours = np.ascontiguousarray(pool[ids].astype(dtype)).view(f"V{width}")
        assert theirs.tobytes() == ours.tobytes()
        self._done()

    @precondition(lambda self: getattr(self, "reader", None) is not None and self.header is None)
    @rule()
    def iterate(self) -> None:
        item = self.item
        found = next(self.reader, None)
        assert (found is None) == (item is None)
        if item is not None:
            assert found == item.tensor
            self._done()

    def teardown(self) -> None:
        if hasattr(self, "reader"):
            rest = self.items[self.taken + (self.header is not None) :]
            assert list(self.reader) == [item.tensor for item in rest]
            assert self.source.inner.read() == b""


TestDecoders = Decoders.TestCase
TestDecoders.settings = settings(max_examples=40, stateful_step_count=30)
TestReaders = Readers.TestCase
TestReaders.settings = settings(max_examples=60, stateful_step_count=20)
