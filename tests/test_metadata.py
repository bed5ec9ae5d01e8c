"""The JSON object of a frame (section 4): what is written, what is accepted, what is refused and where."""

from __future__ import annotations

import json
from typing import Any

import pytest
from frames import METADATA, Section, added, build, entries_of
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import json_values, metadata
from support import reference_verdict, verdict, worked

import hurray_wire as hw

KNOWN: dict[str, tuple[list[Any], list[Any]]] = {
    **{
        name: (["", "tiny", "\u00fc\U0001f600"], [None, 1, True, ["x"], {"a": "b"}])
        for name in ("model", "revision", "tokenizer", "rope")
    },
    "seq_ids": ([["a", "b"], ["", "\u20ac"]], [["a"], ["a", "b", "c"], ["a", 1], "ab", None, {"a": "b"}, ["a", None]]),
    "first_tokens": (
        [[0, 0], [5, 2**70]],
        [[0], [0, 0, 0], [0, -1], [0, 1.0], [0, True], [0, "1"], 0, None, [0, None], {"0": 0}],
    ),
    "heads": (
        [[0, 1, 1], [2, 4, 8], [0, 2**70, 2**70]],
        [[1, 1, 2], [2, 1, 4], [0, 5, 4], [-1, 1, 2], [0, 1], [0, 1, 2, 3], [0, 1.0, 2], [0, True, 2], "012", None, 8],
    ),
    "key_dim": ([0, 3, 8], [9, -1, 4.0, True, "4", None, [4]]),
    "content": (["kv", "latent", "opaque"], ["KV", "", None, 0, ["kv"], {"kv": 1}]),
}


def framed(content: bytes) -> bytes:
    return build(added(Section(METADATA, content)))


def dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def written(data: bytes) -> bytes | None:
    """The metadata section of a frame."""
    found = [data[e["offset"] : e["offset"] + e["raw_length"]] for e in entries_of(data) if e["kind"] == METADATA]
    return found[0] if found else None


@pytest.mark.parametrize("name", KNOWN)
def test_names_with_a_meaning_have_a_checked_type(name: str) -> None:
    sound, broken = KNOWN[name]
    for value in sound:
        found = verdict(framed(dumped({name: value})))
        assert (found.kind, found.item.metadata) == ("ok", {name: value})
        assert hw.decode(hw.encode(worked(metadata={name: value}))).metadata == {name: value}
    for value in broken:
        data = framed(dumped({name: value}))
        assert verdict(data)[:3] == ("FrameError", "metadata", f"metadata.{name}")
        assert reference_verdict(data)[:3] == ("FrameError", "metadata", f"metadata.{name}")
        assert verdict(data).offset is not None
        assert verdict(data, strict=False).code == "metadata"
        with pytest.raises(hw.FrameError) as caught:
            hw.encode(worked(metadata={name: value}))
        assert (caught.value.code, caught.value.where) == ("metadata", f"metadata.{name}")


NO_OBJECT: list[bytes] = [
    *(b" ", b"null", b"[]", b"1", b'"x"', b"{", b"}", b"{]", b'{"a.b"}', b'{"a.b":}', b'{"a.b":1,}', b"{'a.b':1}"),
    *(b'{"a.b":1}{}', b'{"a.b":1} x', b"{a.b:1}", b'{"a.b":01}', b'{"a.b":+1}', b'{"a.b":.5}', b'{"a.b":1.}'),
    *(b'{"a.b":NaN}', b'{"a.b":Infinity}', b'{"a.b":-Infinity}', b'{"a.b":[1,NaN]}', b'{"a.b":1e999}'),
    *(b'{"a.b":1,"a.b":1}', b'{"a.b":1,"a\\u002eb":2}', b'{"x.y":{"k":1,"k":2}}', b'{"model":"a","model":"a"}'),
    *(b'\xef\xbb\xbf{"a.b":1}', b'{"a.b":"\xff"}', b'{"a.b":"\xc3"}', b'{"a.b":"\xed\xa0\x80"}', b"\xff\xfe{\0}\0"),
    *(
        b'{"a.b":"\\ud800"}',
        b'{"\\udfff.b":1}',
        b'{"a.b":"\\x41"}',
        b'{"a.b":"\x01"}',
        b'{"a.b":"\n"}',
        b'{"a.b":/**/1}',
    ),
    *(b'{"a.b":/**/1}', b'{"a.b":True}', b'{"a.b":tru}', b'{"a.b":1}\0', b'\0{"a.b":1}', b'{"a.b":-1e999}'),
    b'{"a.b":' + b"1" * 5000 + b"}",
    b'{"a.b":' + b"[" * 100_000,
    b'{"a.b":' + b"[" * 3000 + b"]" * 3000 + b"}",
    b'{"a.b":' * 5000 + b"1" + b"}" * 5000,
]


@pytest.mark.parametrize("content", NO_OBJECT, ids=lambda content: repr(content[:24]))
def test_what_is_no_json_object(content: bytes) -> None:
    data = framed(content)
    assert verdict(data)[:2] == ("FrameError", "metadata")
    assert reference_verdict(data)[:2] == ("FrameError", "metadata")


@pytest.mark.parametrize(
    "content",
    [
        *(
            b"{}",
            b" \t\r\n{ } ",
            b'{"a.b": [1, 2.5e3, -0, true, false, null, "\\u00fc\\n", {}]}',
            b'{"a.b":"\\ud83d\\ude00"}',
        ),
        *(b'{"anything":1}', b'{"":{"":[]}}', b'{"z.z":1,"a.a":2}', b'{"a.b":123456789012345678901234567890}'),
        *(b'{"a.b":' + b"[" * 60 + b"]" * 60 + b"}", '{"ü.€":"\u2028\U0001f600"}'.encode()),
    ],
    ids=lambda content: repr(content[:24]),
)
def test_what_is_accepted(content: bytes) -> None:
    data = framed(content)
    found = verdict(data)
    assert found.kind == reference_verdict(data).kind == "ok"
    assert (found.item.metadata or {}) == json.loads(content)


def test_reserved_names_are_read_and_not_written() -> None:
    t = hw.decode(framed(b'{"page_order":1,"model":"x"}'))
    assert t.metadata == {"page_order": 1, "model": "x"}
    with pytest.raises(hw.FrameError) as caught:
        hw.encode(t)
    assert (caught.value.code, caught.value.where) == ("metadata", "metadata.page_order")
    assert hw.encode(t.replace(metadata={"model": "x"}))


@pytest.mark.parametrize(
    "told",
    [
        *(
            {"a.b": float("nan")},
            {"a.b": [float("inf")]},
            {"a.b": {1: 2}},
            {"a.b": {"k": {2: 3}}},
            {1: 2},
            {"a.b": b"x"},
        ),
        *({"a.b": {1, 2}}, {"a.b": object()}, {"a.b": 1j}, {"a.b": "\ud800"}, {"\ud800.x": 1}, {None: 1}),
    ],
    ids=lambda told: type(told).__name__,
)
def test_what_json_does_not_have_is_not_written(told: Any) -> None:
    with pytest.raises((hw.FrameError, TypeError)) as caught:
        hw.encode(worked(metadata=told))
    if isinstance(caught.value, hw.FrameError):
        assert caught.value.code == "metadata"


def test_nesting_is_written_exactly_as_deep_as_it_is_read() -> None:
    for depth in range(50, 80):
        value: Any = 1
        for _ in range(depth):
            value = [value]
        readable = verdict(framed(dumped({"a.b": value}))).kind == "ok"
        try:
            hw.encode(worked(metadata={"a.b": value}))
            writable = True
        except hw.FrameError:
            writable = False
        assert readable == writable


own_names = st.text(max_size=5).map(lambda name: name + ".")


@settings(max_examples=200)
@given(told=metadata(2, 8), own=st.dictionaries(own_names, json_values, max_size=3))
def test_what_is_written(told: dict[str, Any] | None, own: dict[str, Any]) -> None:
    """Compact, sorted by code point, nothing escaped that need not be; an empty object is no section."""
    both = {**(told or {}), **own}
    t = worked(metadata=both)
    data = hw.encode(t)
    if not both:
        assert written(data) is None
        return
    expected = json.dumps(both, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
    assert written(data) == expected.encode()
    assert hw.decode(data).metadata == both
    assert hw.decode(data) == t
    assert verdict(data)[:2] == reference_verdict(data)[:2]


def test_names_are_sorted_by_code_point() -> None:
    names = ["z.", "a.", "Z.", "\U0001f600.", "\uffff.", "ü."]
    content = written(hw.encode(worked(metadata=dict.fromkeys(names, 0))))
    assert content == b'{"Z.":0,"a.":0,"z.":0,"\xc3\xbc.":0,"\xef\xbf\xbf.":0,"\xf0\x9f\x98\x80.":0}'


def test_tuples_are_the_lists_that_they_become() -> None:
    t = worked(metadata={"heads": (0, 2, 4), "seq_ids": ("a", "b"), "my.x": {"y": (1, (2,))}})
    assert hw.decode(hw.encode(t)) == t
    assert t == worked(metadata={"heads": [0, 2, 4], "seq_ids": ["a", "b"], "my.x": {"y": [1, [2]]}})


@settings(max_examples=300)
@given(
    content=st.binary(min_size=1, max_size=40)
    | json_values.map(dumped)
    | st.text(min_size=1, max_size=20).map(str.encode)
)
def test_any_bytes_are_metadata_or_a_metadata_error(content: bytes) -> None:
    data = framed(content)
    ours, theirs = verdict(data), reference_verdict(data)
    assert ours.kind == theirs.kind
    assert ours.kind == "ok" or ours[:2] == theirs[:2] == ("FrameError", "metadata")
