"""What a writer can be asked for: place in a stream, alignment; what it refuses; and many threads at once."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from frames import PROLOGUE, entries_of
from support import POOL, frame_vector, reference_verdict, worked

import hurray_wire as hw


def test_the_prologue() -> None:
    data = hw.encode(worked(), sequence=7, last=False, stream_id=0x1122334455667788)
    assert PROLOGUE.unpack_from(data) == (
        *(bytes.fromhex("8948524b560d0a1a"), 1, 0, 0, 7, 48 + 48 * 5, 5, 0, len(data), 0x1122334455667788),
    )
    assert PROLOGUE.unpack_from(hw.encode(worked()))[3:5] == (1, 0)
    assert hw.decode(data) == worked()


@pytest.mark.parametrize("alignment", [64, 256, 4096, 1 << 21, 1 << 22, 1 << 31])
def test_alignment(alignment: int) -> None:
    data = hw.encode(worked(), alignment=alignment)
    lawful = min(alignment, 2 << 20)
    entries = [e for e in entries_of(data) if e["kind"] >= 16]
    assert all(e["offset"] % lawful == 0 for e in entries)
    assert len(data) % lawful == 0
    again = hw.decode(data)
    assert {h.alignment for h in again.descriptor.buffers} == {alignment}
    assert again == worked()
    assert hw.encode(again) == data
    assert hw.encode(again, alignment=64) == hw.encode(worked())
    assert reference_verdict(data).kind == "ok"


def test_a_decoded_empty_handle_keeps_its_alignment() -> None:
    empty = worked(block_table=[], seq_ptr=[0], seq_lens=[])
    assert [h.alignment for h in empty.descriptor.buffers] == [64, 1, 64]
    handles = [replace(handle, alignment=256) for handle in empty.descriptor.buffers]
    told = hw.TensorDescriptor("float16", (0, 2, 8), empty.layout, handles).encode()
    bare = told + POOL.tobytes() + bytes(4)
    t = hw.decode(bare)
    assert hw.encode(t, framing="bare") == bare
    assert [h.alignment for h in hw.decode(hw.encode(t)).descriptor.buffers] == [256] * 3
    assert [h.alignment for h in hw.decode(hw.encode(t, alignment=64)).descriptor.buffers] == [64, 1, 64]
    assert [h.alignment for h in hw.decode(hw.encode(t, pages="live")).descriptor.buffers] == [1, 256, 256]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"framing": "raw"}, {"pages": "some"}, {"compression": "lz4"}, {"alignment": 32}, {"alignment": 96}),
        *({"alignment": 2**32}, {"chunk_bytes": 0}, {"threads": 0}, {"sequence": 2**32}, {"sequence": -1}),
        *({"stream_id": 2**64}, {"stream_id": 1.0}, {"chunk_bytes": "1"}, {"threads": True}, {"level": 3}),
    ],
    ids=str,
)
def test_options_that_are_not(wrong: dict[str, Any]) -> None:
    for write in (hw.encode, hw.encode_parts, hw.encode_buffer, hw.encode_header, hw.encoded_size):
        with pytest.raises((ValueError, TypeError)) as caught:
            write(worked(), **wrong)
        assert not isinstance(caught.value, hw.HurrayWireError)


def test_what_the_bare_form_cannot_carry() -> None:
    told: list[tuple[hw.BlockPagedTensor, dict[str, Any]]] = [
        (worked(metadata={"model": "x"}), {}),
        (worked(), {"compression": "zstd"}),
    ]
    for t, more in told:
        for write in (hw.encode, hw.encode_parts, hw.encode_buffer, hw.encode_header, hw.encoded_size):
            with pytest.raises(hw.UnsupportedError) as caught:
                write(t, framing="bare", **more)
            assert caught.value.code == "bare_form"


def test_many_threads_at_once() -> None:
    """Caches and contexts are shared by nobody who could be disturbed."""
    tensors = [worked(layer_index=i, page_pool=POOL + np.float16(i)) for i in range(8)]
    blobs = [hw.encode(t, compression="zstd") for t in tensors] + [frame_vector("zstd-shuffle2"), frame_vector("raw")]
    expected = [*tensors, hw.decode(blobs[8]), hw.decode(blobs[9])]
    wrong: list[Any] = []

    def work(start: int) -> None:
        for i in range(150):
            at = (start + i) % len(blobs)
            found = hw.decode(blobs[at])
            if found != expected[at] or (at < 8 and hw.encode(found, compression="zstd") != blobs[at]):
                wrong.append(at)

    workers = [threading.Thread(target=work, args=(start,)) for start in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
