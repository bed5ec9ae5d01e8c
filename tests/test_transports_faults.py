"""Every way a transfer can fail: one of our errors, the pages to discard named, and no others touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_engine import Pair, Switches, whole

import hurray_wire as hw
from hurray_wire.arrays import address
from hurray_wire.transports import Incoming, Reading
from hurray_wire.transports.messages import MAGIC, PART, Kind, Message, Offer, build_offer, parse_offer, parts_of

PAGE = (4, 2, 8)
PAGES = 9
WIDTH = 128
IDS = whole(PAGES)


class Scene:
    """A tensor offered by one end, not yet read by the other; a page a chunk."""

    def __init__(self, **sending: Any) -> None:
        self.pair = Pair()
        self.theirs = np.random.default_rng(2).integers(0, 99, (PAGES, *PAGE)).astype(np.float16)
        self.mine = np.full((20, *PAGE), 77, np.float16)
        self.registration = self.pair.one.register(self.theirs)
        self.mine_registered = self.pair.other.register(self.mine)
        self.tensor = hw.BlockPagedTensor(self.theirs, block_table=range(PAGES), seq_ptr=[0, 4, 9], seq_lens=[16, 18])
        self.outgoing = self.pair.one.send(self.pair.peer, self.tensor, **{"chunk_bytes": 1, "threads": 1} | sending)

    def incoming(self, **options: Any) -> Incoming:
        return self.pair.other.receive(timeout=1, **options)

    def halfway(self, pages: int = 4, **options: Any) -> Reading:
        """A reading that has brought some pages and stands still."""
        reading = self.incoming(**options).start(self.mine, IDS)
        self.pair.receiver.switches.runs_a_poll = 1
        while reading.progress[0] == 0 and not _moved(self, pages):
            reading.poll()
        self.pair.receiver.switches.runs_a_poll = 0
        return reading

    def untouched(self, written: Any) -> bool:
        """Whether all pages but these are as they were."""
        return bool((np.delete(self.mine, written, axis=0) == 77).all())


def _moved(scene: Scene, pages: int) -> bool:
    return int((scene.mine[IDS] != 77).any(axis=(1, 2, 3)).sum()) >= pages


def fails(act: Callable[[], Any]) -> hw.HurrayWireError:
    with pytest.raises(hw.HurrayWireError) as caught:
        act()
    return caught.value


def test_a_peer_that_dies_before_anything_is_read() -> None:
    scene = Scene()
    incoming = scene.incoming()
    scene.pair.sender.dead = True
    error = fails(lambda: incoming.read_into(scene.mine, IDS, timeout=1))
    assert (type(error), error.code, error.pages_written.size) == (hw.TransferError, "peer_lost", 0)
    assert scene.untouched([])


def test_a_peer_that_dies_in_the_middle() -> None:
    scene = Scene()
    reading = scene.halfway()
    scene.pair.sender.dead = True
    error = fails(lambda: reading.wait(1))
    assert error.code == "peer_lost"
    assert set(error.pages_written) >= set(IDS[(scene.mine[IDS] != 77).any(axis=(1, 2, 3))])
    assert scene.untouched(error.pages_written)
    assert fails(reading.poll) is error
    assert fails(reading.result) is error


def test_a_peer_that_dies_before_it_is_told() -> None:
    scene = Scene()
    scene.pair.receiver.dead = True
    error = fails(lambda: scene.pair.one.send(scene.pair.peer, scene.tensor))
    assert error.code == "peer_lost"
    scene.outgoing.cancel()  # nobody is there to stop
    assert fails(lambda: scene.outgoing.done).code == "cancelled"


def test_a_key_that_is_not_the_peers() -> None:
    scene = Scene()
    incoming = scene.incoming()
    incoming.offer = incoming.offer._replace(access=[b"somebody 1"])
    error = fails(lambda: incoming.read_into(scene.mine, IDS, timeout=1))
    assert (type(error), error.code) == (hw.TransferError, "memory_refused")
    assert scene.untouched([])
    assert fails(lambda: scene.outgoing.done).code == "declined"


def test_memory_that_the_engine_refuses() -> None:
    scene = Scene()
    incoming = scene.incoming()
    scene.pair.receiver.switches.refuses = True
    assert fails(lambda: incoming.read_into(scene.mine, IDS, timeout=1)).code == "memory_refused"


@pytest.mark.parametrize("begun", [False, True], ids=["before", "in the middle"])
def test_memory_that_is_deregistered_takes_its_offers_back(begun: bool) -> None:
    scene = Scene()
    reading = scene.halfway() if begun else None
    incoming = None if begun else scene.incoming()
    scene.registration.close()
    act = reading.poll if reading else lambda: incoming.start(scene.mine, IDS) if incoming else None
    if incoming:
        scene.pair.other.poll()
    error = fails(act)
    assert (type(error), error.code) == (hw.TransferError, "withdrawn")
    if reading is not None:
        assert error.pages_written.size
        assert scene.untouched(error.pages_written)
    assert fails(lambda: scene.outgoing.done).code in ("withdrawn", "cancelled")
    scene.registration.close()  # a second time does nothing


def test_memory_that_vanishes_behind_our_back() -> None:
    scene = Scene()
    reading = scene.halfway()
    scene.pair.sender.regions.clear()
    scene.pair.receiver.switches.runs_a_poll = 1
    error = fails(lambda: reading.wait(1))
    assert error.code == "memory_refused"
    assert scene.untouched(error.pages_written)


def test_an_offer_that_is_taken_back_while_it_waits() -> None:
    scene = Scene()
    scene.outgoing.cancel(timeout=0.01)
    with pytest.raises(TimeoutError):
        scene.pair.other.receive(timeout=0.01)
    scene.pair.one.poll()
    assert fails(lambda: scene.outgoing.done).code == "cancelled"


def newer(header: bytes) -> bytes:
    """The header as a version that is not ours would begin."""
    changed = bytearray(header)
    changed[8] += 1
    body = len(changed)
    count = int.from_bytes(changed[20:24], "little")
    end = 40 + 48 * count
    changed[end : end + 8] = xxhash.xxh3_64_intdigest(bytes(changed[:end])).to_bytes(8, "little")
    assert len(changed) == body
    return bytes(changed)


def test_a_header_of_a_newer_version() -> None:
    scene = Scene()
    peer, message = _offer(scene)
    offer = parse_offer(message.body)
    changed = message._replace(body=build_offer(offer._replace(header=newer(offer.header))))
    _tell(scene, changed)
    error = fails(lambda: scene.pair.other.receive(timeout=1))
    assert (type(error), error.code) == (hw.UnsupportedError, "version")
    assert peer == "one"
    declined = fails(lambda: scene.outgoing.done)
    assert declined.code == "declined"
    assert "version" in str(declined)


def test_messages_of_a_newer_version() -> None:
    scene = Scene()
    _offer(scene)
    scene.pair.receiver.heard.append(("one", PART.pack(MAGIC, 2, Kind.OFFER, 0, 1, 0, 1)))
    error = fails(lambda: scene.pair.other.receive(timeout=1))
    assert (type(error), error.code) == (hw.UnsupportedError, "version")


def _offer(scene: Scene) -> tuple[str, Message]:
    """Take the offer out of the receiver's messages."""
    peer, data = scene.pair.receiver.heard.pop()
    prologue = PART.unpack_from(data)
    return peer, Message(Kind(prologue[2]), prologue[4], data[PART.size :])


def _tell(scene: Scene, message: Message) -> None:
    scene.pair.receiver.heard += [("one", part) for part in parts_of(message, 1 << 20)]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_payload_that_changed_after_it_was_hashed(threads: int) -> None:
    scene = Scene(threads=threads)
    scene.theirs[5, 0, 0, 0] += 1
    incoming = scene.incoming()
    error = fails(lambda: incoming.read_into(scene.mine, IDS, timeout=1))
    assert (type(error), error.code, error.where) == (hw.ChecksumError, "section_checksum", "sections[7]")
    assert IDS[5] in error.pages_written
    assert scene.untouched(error.pages_written)
    assert fails(lambda: scene.outgoing.done).code == "declined"


def test_without_verification_a_change_goes_unseen_and_that_is_asked_for() -> None:
    scene = Scene()
    scene.theirs[5, 0, 0, 0] += 1
    back = scene.incoming(verify=False).read_into(scene.mine, IDS, timeout=1)
    assert (back.page_pool[IDS] == scene.theirs).all()
    scene = Scene(checksum=False)
    scene.theirs[5, 0, 0, 0] += 1
    assert scene.incoming().read_into(scene.mine, IDS, timeout=1).num_seqs == 2


def test_tables_that_changed_are_found_before_a_page_is_written() -> None:
    scene = Scene()
    block = scene.outgoing._prepared
    assert block is not None
    block.blocks[0].bytes[0] ^= 1
    incoming = scene.incoming(verify=False)  # tables are always verified
    error = fails(lambda: incoming.read_into(scene.mine, IDS, timeout=1))
    assert (type(error), error.pages_written.size, scene.untouched([])) == (hw.ChecksumError, 0, True)


def test_what_is_not_expected_is_declined_before_anything_is_read() -> None:
    scene = Scene()
    error = fails(lambda: scene.incoming(expect={"dtype": "bfloat16", "page_size": 4}))
    assert (type(error), len(scene.pair.receiver.posted)) == (hw.MismatchError, 0)
    declined = fails(lambda: scene.outgoing.wait(1))
    assert (declined.code, "bfloat16" in str(declined)) == ("declined", True)


def test_a_receiver_may_decline() -> None:
    scene = Scene()
    incoming = scene.incoming()
    incoming.decline("no pages are free")
    incoming.decline("said once")
    assert "no pages are free" in str(fails(lambda: scene.outgoing.done))
    with pytest.raises(ValueError, match="declined"):
        incoming.start(scene.mine, IDS)


def test_a_timeout_stops_and_says_what_to_discard() -> None:
    scene = Scene()
    reading = scene.halfway()
    with pytest.raises(TimeoutError) as caught:
        reading.wait(0.02)
    written = caught.value.pages_written  # type: ignore[attr-defined]
    assert set(written) >= set(IDS[(scene.mine[IDS] != 77).any(axis=(1, 2, 3))])
    assert scene.untouched(written)
    assert fails(lambda: scene.outgoing.done).code == "declined"
    before = scene.mine.copy()
    scene.pair.receiver.switches.runs_a_poll = 99
    with pytest.raises(TimeoutError):
        reading.poll()
    assert (scene.mine == before).all()


def test_cancelling() -> None:
    scene = Scene()
    reading = scene.halfway()
    reading.cancel()
    assert reading.pages_written.size
    assert fails(reading.poll).code == "cancelled"
    assert fails(lambda: scene.outgoing.done).code == "declined"
    reading.cancel()


def test_an_engine_that_does_not_let_go_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hurray_wire.transports.endpoints._GRACE", 0.02)
    scene = Scene()
    reading = scene.halfway()
    scene.pair.receiver.switches.stubborn = True
    reading.cancel()
    assert "may write" in str(fails(reading.poll).__notes__)
    assert len(scene.pair.other._stuck) == 1
    scene.pair.other.poll()
    assert len(scene.pair.other._stuck) == 1
    blocks = len(scene.pair.receiver.regions) - 1
    scene.mine_registered.close()
    assert len(scene.pair.receiver.regions) == 1 + blocks
    with pytest.raises(ValueError, match="not registered"):
        scene.pair.other.check_registered(np.array([address(scene.mine)]), 1)
    scene.pair.receiver.switches.stubborn = False
    scene.pair.other.poll()
    assert scene.pair.other._stuck == []
    assert len(scene.pair.receiver.regions) == blocks


def test_a_sender_waits_no_longer_than_it_is_told() -> None:
    scene = Scene()
    with pytest.raises(TimeoutError, match="has not read"):
        scene.outgoing.wait(0.01)
    scene.pair.receiver.switches = replace(Switches(), silent=True)
    reading = scene.halfway()
    scene.outgoing.cancel(timeout=0.01)  # the reader is silent
    assert fails(lambda: scene.outgoing.done).code == "cancelled"
    assert fails(reading.poll).code == "withdrawn"


def test_closing_an_end_ends_what_goes_on() -> None:
    scene = Scene()
    reading = scene.halfway()
    scene.pair.other.close()
    assert fails(reading.result).code == "cancelled"
    assert fails(lambda: scene.outgoing.done).code == "declined"
    with pytest.raises(ValueError, match="closed"):
        scene.pair.other.poll()
    scene.pair.one.close()
    scene.pair.one.close()


def test_a_receiver_that_dies_is_missed_before_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hurray_wire.transports.outgoing._ASK_SECONDS", 0.0)
    scene = Scene()
    scene.incoming()
    scene.pair.receiver.dead = True
    assert fails(lambda: scene.outgoing.wait(30)).code == "peer_lost"
    assert fails(lambda: scene.outgoing.done).code == "peer_lost"
    scene.pair.receiver.dead = False
    scene.registration.close()  # nobody reads it any more


def test_a_receiver_that_is_asked_whether_it_is_there_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hurray_wire.transports.outgoing._ASK_SECONDS", 0.0)
    scene = Scene()
    with pytest.raises(TimeoutError):
        scene.outgoing.wait(0.02)
    assert scene.incoming().read_into(scene.mine, IDS, timeout=1).same_tokens(scene.tensor)
    assert scene.outgoing.done


def test_an_interrupt_stops_too(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    reading = scene.halfway()

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        reading.wait()
    assert caught.value.pages_written.size  # type: ignore[attr-defined]


def test_the_bare_form_does_not_travel() -> None:
    scene = Scene()
    error = fails(lambda: scene.pair.one.send(scene.pair.peer, scene.tensor, framing="bare"))  # type: ignore[call-arg]
    assert (type(error), error.code) == (hw.UnsupportedError, "bare_form")
    _, message = _offer(scene)
    bare = hw.encode_header(scene.tensor, framing="bare")
    _tell(scene, message._replace(body=build_offer(parse_offer(message.body)._replace(header=bare))))
    assert fails(lambda: scene.pair.other.receive(timeout=1)).code == "bare_form"


# What a peer says is believed in nothing.


def offered() -> tuple[Scene, Message]:
    scene = Scene(chunk_bytes=None)
    _, message = _offer(scene)
    return scene, message


WRONG: dict[str, tuple[Callable[[Offer], Offer], str]] = {
    "too few pages": (lambda o: o._replace(pages=o.pages - 1), "section_cover"),
    "too many pages": (lambda o: o._replace(pages=o.pages + 1), "section_cover"),
    "no runs": (lambda o: o._replace(first=o.first[:0], pages=o.pages[:0]), "section_cover"),
    "an empty run": (lambda o: o._replace(first=o.first.repeat(2), pages=np.array([0, PAGES])), "section_cover"),
    "counts that overflow": (
        lambda o: o._replace(first=o.first.repeat(3), pages=np.array([1 << 62, 1 << 62, PAGES - (1 << 62)])),
        "section_offset",
    ),
    "an address beyond memory": (lambda o: o._replace(first=np.array([(1 << 63) - 9])), "section_offset"),
    "a negative address": (lambda o: o._replace(first=-o.first), "section_offset"),
    "a buffer beyond memory": (lambda o: o._replace(buffers=[(1 << 63) - 2] * 2), "section_offset"),
    "too few buffers": (lambda o: o._replace(buffers=o.buffers[:1]), "section_cover"),
    "too many buffers": (lambda o: o._replace(buffers=o.buffers * 2), "section_cover"),
    "no header": (lambda o: o._replace(header=b""), "truncated"),
    "half a header": (lambda o: o._replace(header=o.header[:100]), "truncated"),
}


@pytest.mark.parametrize("name", WRONG)
def test_offers_that_do_not_fit_their_header(name: str) -> None:
    change, code = WRONG[name]
    scene, message = offered()
    _tell(scene, message._replace(body=build_offer(change(parse_offer(message.body)))))
    assert fails(lambda: scene.pair.other.receive(timeout=1)).code == code
    assert scene.pair.receiver.posted == []
    assert fails(lambda: scene.outgoing.done).code == "declined"


def test_every_prefix_of_an_offer_is_truncated() -> None:
    scene, message = offered()
    for end in range(0, len(message.body), 7):
        _tell(scene, message._replace(body=message.body[:end]))
        assert fails(lambda: scene.pair.other.receive(timeout=1)).code == "truncated"
    _tell(scene, message._replace(body=message.body + b"x"))
    assert fails(lambda: scene.pair.other.receive(timeout=1)).code == "trailing_bytes"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_bytes_are_an_error_of_ours_or_a_tensor(data: st.DataObject) -> None:
    scene, message = offered()
    raw = bytearray(b"".join(parts_of(message, 1 << 20)))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    scene.pair.receiver.heard.append(("one", bytes(raw)))
    written: Any = []
    try:
        back = scene.pair.other.receive(timeout=0.001).read_into(scene.mine, IDS, timeout=1)
        written = IDS
        assert back.same_tokens(scene.tensor)
    except hw.HurrayWireError as error:
        written = [] if error.pages_written is None else error.pages_written
    except TimeoutError:
        pass  # it is no offer any more
    assert scene.untouched(written)


PARTS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "truncated"),
    "cut": (b"HRTM\1", "truncated"),
    "foreign": (PART.pack(b"ABCD", 1, 1, 0, 1, 0, 1), "magic"),
    "unknown kind": (PART.pack(MAGIC, 1, 99, 0, 1, 0, 1), "section_kind"),
    "reserved": (PART.pack(MAGIC, 1, 1, 7, 1, 0, 1), "section_kind"),
    "part beyond parts": (PART.pack(MAGIC, 1, 1, 0, 1, 2, 2), "section_kind"),
    "no parts": (PART.pack(MAGIC, 1, 1, 0, 1, 0, 0), "section_kind"),
    "four billion parts": (PART.pack(MAGIC, 1, 1, 0, 1, 0, 0xFFFFFFFF), "frame_bytes"),
    "too long": (PART.pack(MAGIC, 1, 1, 0, 1, 0, 65000) + bytes(5000), "frame_bytes"),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_are_none(name: str) -> None:
    data, code = PARTS[name]
    pair = Pair()
    pair.receiver.heard.append(("one", data))
    assert fails(lambda: pair.other.receive(timeout=1)).code == code


def test_parts_that_never_become_a_message_are_forgotten() -> None:
    pair = Pair()
    for transfer in range(200):
        pair.receiver.heard.append(("one", PART.pack(MAGIC, 1, Kind.OFFER, 0, transfer, 0, 2) + b"x"))
    pair.other.poll()
    assert len(pair.other._assembler._unfinished) <= 65
    pair.receiver.heard += [("one", PART.pack(MAGIC, 1, 1, 0, 7000, p, n) + b"x") for p, n in ((0, 2), (1, 3))]
    assert fails(lambda: pair.other.receive(timeout=1)).code == "section_cover"


def test_nobody_ends_the_transfer_of_another() -> None:
    scene = Scene()
    for kind in (Kind.DONE, Kind.DECLINED, Kind.STOPPED):
        part = PART.pack(MAGIC, 1, kind, 0, scene.outgoing.transfer, 0, 1)
        scene.pair.sender.heard.append(("a stranger", part))
    assert not scene.outgoing.done
    scene.pair.receiver.heard.append(
        ("a stranger", PART.pack(MAGIC, 1, Kind.WITHDRAWN, 0, scene.outgoing.transfer, 0, 1))
    )
    assert scene.incoming().read_into(scene.mine, IDS, timeout=1).num_seqs == 2


@pytest.mark.parametrize("held", [[9], [-1], [0.5], ["x"]], ids=["beyond", "negative", "fraction", "text"])
def test_held_pages_that_there_are_not(held: Any) -> None:
    scene = Scene()
    with pytest.raises(IndexError):
        scene.incoming().start(scene.mine, IDS, held=held)
