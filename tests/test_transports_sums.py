"""Payloads that are hashed while they are read: the checksums come behind the offer, or do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from test_transports_faults import IDS, Scene, fails
from transport_engine import Pair

import hurray_wire as hw
from hurray_wire.frame_reader import read_frame_head
from hurray_wire.options import DEFAULT_LIMITS
from hurray_wire.sections import entry_offset
from hurray_wire.tags import SectionKind
from hurray_wire.transports.batches import batches_of
from hurray_wire.transports.messages import PART, Kind, Message, parts_of


@pytest.fixture(autouse=True)
def _hashed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hurray_wire.transports.outgoing.HASHED_LATER_BYTES", 1)
    monkeypatch.setattr("hurray_wire.transports.reading._ASK_SECONDS", 0.0)


def without_sums(**sending: Any) -> tuple[Scene, bytes]:
    """An offer whose checksums are on their way still, and those."""
    scene = Scene(**sending)
    sums = scene.pair.receiver.heard.pop()[1]
    assert PART.unpack_from(sums)[2] == Kind.SUMS
    return scene, sums


def read(scene: Scene, **options: Any) -> hw.BlockPagedTensor:
    return scene.incoming(**options).read_into(scene.mine, IDS, timeout=1)


@pytest.mark.parametrize("threads", [1, 3])
def test_pages_are_read_before_their_checksums_are_known(threads: int) -> None:
    scene, sums = without_sums()
    reading = scene.incoming(threads=threads).start(scene.mine, IDS)
    while reading.progress[0] < reading.progress[1]:
        assert not reading.poll()
    assert not reading.poll()
    assert (scene.mine[IDS] == scene.theirs).all()
    scene.pair.receiver.heard.append(("one", sums))
    assert reading.wait(1).same_tokens(scene.tensor)
    assert scene.outgoing.done


def test_a_payload_that_changed_is_found_by_checksums_that_come_late() -> None:
    scene, sums = without_sums()
    reading = scene.incoming().start(scene.mine, IDS)
    scene.theirs[5, 0, 0, 0] += 1
    while reading.progress[0] < reading.progress[1]:
        reading.poll()
    scene.pair.receiver.heard.append(("one", sums))
    error = fails(lambda: reading.wait(1))
    assert (type(error), error.where, sorted(error.pages_written)) == (hw.ChecksumError, "sections[7]", sorted(IDS))


def test_scales_that_changed_are_found_too() -> None:
    pair, pool = Pair(), np.ones((2, 2, 1, 4), np.int8)
    mine = np.zeros_like(pool)
    scales = np.ones((2, 2), np.float32)
    t = hw.BlockPagedTensor(
        pool, block_table=[0, 1], seq_ptr=[0, 2], seq_lens=[4], quantization="per_block", scales=scales
    )
    pair.one.register(pool), pair.other.register(mine)
    outgoing = pair.one.send(pair.peer, t)
    assert outgoing._prepared is not None
    outgoing._prepared.blocks[0].bytes[128] ^= 1  # behind block_table and seq_ptr
    error = fails(lambda: pair.other.receive().read_into(mine, [0, 1], timeout=1))
    assert (type(error), sorted(error.pages_written)) == (hw.ChecksumError, [0, 1])


def test_without_verification_nobody_waits_for_them() -> None:
    scene, sums = without_sums()
    assert read(scene, verify=False).same_tokens(scene.tensor)
    assert scene.outgoing.done
    scene.pair.receiver.heard.append(("one", sums))
    scene.pair.other.poll()  # of a transfer that has ended


def test_a_sender_that_dies_while_it_hashes() -> None:
    scene, _ = without_sums()
    reading = scene.incoming().start(scene.mine, IDS)
    while reading.progress[0] < reading.progress[1]:
        reading.poll()
    scene.pair.sender.dead = True
    error = fails(lambda: reading.wait(1))
    assert (error.code, error.pages_written.size) == ("peer_lost", IDS.size)


def test_checksums_that_never_come() -> None:
    scene, _ = without_sums()
    with pytest.raises(TimeoutError) as caught:
        scene.incoming().read_into(scene.mine, IDS, timeout=0.05)
    assert caught.value.pages_written.size == IDS.size  # type: ignore[attr-defined]
    assert fails(lambda: scene.outgoing.done).code == "declined"


def test_an_offer_that_is_taken_back_while_it_is_hashed() -> None:
    scene, _ = without_sums()
    reading = scene.incoming().start(scene.mine, IDS)
    while reading.progress[0] < reading.progress[1]:
        reading.poll()
    scene.outgoing.cancel(timeout=0)
    assert fails(lambda: reading.wait(1)).code == "withdrawn"


def test_checksums_of_another_tensor() -> None:
    scene, _ = without_sums()
    other = scene.tensor.replace(layer_index=7)
    sums = Message(Kind.SUMS, scene.outgoing.transfer, hw.encode_header(other, chunk_bytes=1))
    scene.pair.receiver.heard += [("one", part) for part in parts_of(sums, 1 << 20)]
    error = fails(lambda: read(scene))
    assert (type(error), error.code) == (hw.FrameError, "section_cover")


@pytest.mark.parametrize("kind", [SectionKind.DESCRIPTOR, SectionKind.SEQ_LENS, SectionKind.BLOCK_TABLE])
def test_checksums_that_contradict_those_of_the_offer(kind: SectionKind) -> None:
    scene, _ = without_sums()
    header = bytearray(hw.encode_header(scene.tensor, chunk_bytes=1))
    head = read_frame_head(np.frombuffer(bytes(header), np.uint8), 0, DEFAULT_LIMITS, whole=False)
    header[entry_offset(head.table.numbers(kind).start, "checksum", 0)] ^= 1
    body = head.prologue.header_length - 8
    header[body : body + 8] = xxhash.xxh3_64_intdigest(header[:body]).to_bytes(8, "little")
    sums = Message(Kind.SUMS, scene.outgoing.transfer, bytes(header))
    scene.pair.receiver.heard += [("one", part) for part in parts_of(sums, 1 << 20)]
    error = fails(lambda: read(scene))
    assert (type(error), error.code) == (hw.FrameError, "section_cover")


@pytest.mark.parametrize("end", [0, 30, 200])
def test_checksums_that_are_cut(end: int) -> None:
    scene, sums = without_sums()
    scene.pair.receiver.heard.append(("one", sums[: PART.size + end]))
    error = fails(lambda: read(scene))
    assert (isinstance(error, hw.FrameError), scene.untouched(error.pages_written)) == (True, True)


def test_pages_that_cannot_be_read_in_place_wait_in_no_more_blocks_than_a_window() -> None:
    pair = Pair()
    theirs = np.arange(80 * 512 * 1024, dtype=np.uint16).reshape(80, 512, 8, 128)
    mine = np.zeros((80, 512, 16, 128), np.uint16)[:, :, ::2]
    t = hw.BlockPagedTensor(theirs, block_table=range(80), seq_ptr=[0, 80], seq_lens=[80 * 512])
    pair.one.register(theirs)
    pair.one.send(pair.peer, t)
    sums = pair.receiver.heard.pop()
    incoming = pair.other.receive()
    reading = incoming.start(mine, range(80))
    for _ in range(50):
        reading.poll()
    assert reading.progress[0] == sum(batch.nbytes for batch in batches_of(incoming.found)[:2])
    pair.receiver.heard.append(sums)
    assert reading.wait(10).same_tokens(t)
    assert pair.receiver.registrations <= 1 + 1 + 2 + 1  # tables, and a window's blocks, used again and again
