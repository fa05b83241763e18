"""Bodies as views over their own bytes: what is found, and what is spliced in without touching the rest."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.inference.wire import Body, Edit, NotAnObject, NotJson, parse, splice, with_member

SPACES = st.text(alphabet=" \t\r\n", max_size=3)
NAMES = st.sampled_from(["model", "stream_options", "messages", "a", "", 'q"\\', "é", "x y", "n"]) | st.text(
    st.characters(codec="utf-8"), max_size=5
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=12)
    | st.sampled_from(['"model":"m"', "}", "]", '\\"', '{"model":1}', ',"', "null"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def objects(draw: st.DrawFn) -> tuple[bytes, list[tuple[str, Any]]]:
    """An object's bytes, oddly spaced and escaped, names repeated, and its members as written."""
    members = draw(st.lists(st.tuples(NAMES, VALUES), max_size=6))
    parts = []
    for name, value in members:
        ascii_only = draw(st.booleans())
        written = json.dumps(value, ensure_ascii=ascii_only, indent=draw(st.sampled_from([None, 1])))
        key = draw(st.sampled_from([json.dumps(name, ensure_ascii=ascii_only), escaped(name)]))
        a, b, c, d = (draw(SPACES) for _ in range(4))
        parts.append(f"{a}{key}{b}:{c}{written}{d}")
    inner = ",".join(parts) or draw(SPACES)
    return f"{draw(SPACES)}{{{inner}}}{draw(SPACES)}".encode(), members


def escaped(name: str) -> str:
    """A JSON string with every character as an escape."""
    units = name.encode("utf-16-be")
    return '"' + "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2)) + '"'


@given(objects())
def test_members_are_what_any_reader_finds_and_the_bytes_are_kept(case: tuple[bytes, Any]) -> None:
    raw, members = case
    body = parse(raw)
    assert body.raw is raw
    expected = dict(members)
    assert set(body.members) == set(expected)
    for name, value in expected.items():
        member = body.get(name)
        if name == "messages" and isinstance(value, list):
            assert [json.loads(bytes(item)) for item in body.items(name)] == value
            continue
        assert member is not None
        assert json.loads(bytes(member)) == value
        assert bytes(member) in raw
        assert body.has(name) is (value is not None)
        assert body.size(name) == len(bytes(member))
        assert body.kind(name) == chr(bytes(member)[0])


@given(objects(), NAMES, VALUES)
def test_a_spliced_member_is_read_back_and_nothing_else_changes(
    case: tuple[bytes, list[tuple[str, Any]]], name: str, value: Any
) -> None:
    raw, members = case
    written = json.dumps(value).encode()
    result = b"".join(with_member(parse(raw), name, written))
    assert json.loads(result) == dict(members) | {name: value}
    # Other members stay in their very bytes: what was cut out is a value, what was put in is the new one.
    prefix = _common(raw, result)
    suffix = _common(raw[::-1], result[::-1])
    assert prefix + suffix >= min(len(raw), len(result)) - max(len(written), _longest(raw, members, name))
    if name not in dict(members):
        end = raw.rindex(b"}")
        added = (b"," if members else b"") + msgspec.json.encode(name) + b":" + written
        assert result == raw[:end] + added + raw[end:]


def _common(one: bytes, other: bytes) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _longest(raw: bytes, members: list[tuple[str, Any]], name: str) -> int:
    value = parse(raw).members.get(name)
    return 0 if value is None else len(bytes(value))


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"a","model":"b"}',
        b'{"model":"b","model":"b"}',
        b'{"x":"aaaaaaaaaa","x":"","model":"b"}',
        b'{"x":"","x":"aaaaaaaaaaaaaaaaaaaaa","model":"b"}',
        b'{"x":1,"x":[1,2,{"model":"b"}],"model":"b","model":"b"}',
        b'{"a":"xx","a":"","stream_options":null,"t":" null "}',
        b'{"a":"","a":"null null","model":null}',
        b'{"a":"0123456789","a":"","model":1,"b":"1111111111"}',
    ],
)
def test_repeated_members_never_lead_a_replacement_astray(raw: bytes) -> None:
    name = "stream_options" if b"stream_options" in raw else "model"
    result = b"".join(with_member(parse(raw), name, b'{"include_usage":true}'))
    assert json.loads(result) == json.loads(raw) | {name: {"include_usage": True}}


@given(st.binary(max_size=60), st.data())
def test_splicing_and_its_inverse_give_the_bytes_back(raw: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    edits = [
        Edit(start, end, data.draw(st.binary(max_size=5)))
        for start, end in zip(cuts[::2], cuts[1::2], strict=False)
    ]
    result = b"".join(splice(raw, data.draw(st.permutations(edits))) if _apart(edits) else splice(raw, edits))
    back, shift = [], 0
    for edit in edits:
        start = edit.start + shift
        back.append(Edit(start, start + len(edit.text), raw[edit.start : edit.end]))
        shift += len(edit.text) - (edit.end - edit.start)
    assert b"".join(splice(result, back)) == raw


def _apart(edits: list[Edit]) -> bool:
    return len({edit.start for edit in edits}) == len(edits)


def test_edits_that_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        splice(b"0123456789", [Edit(0, 5, b""), Edit(4, 6, b"")])


def test_untouched_parts_are_views_and_no_copies() -> None:
    raw = b'{"a":' + b'"x"' * 1 + b',"model":"m"}'
    pieces = with_member(parse(raw), "model", b'"n"')
    assert [type(piece) for piece in pieces] == [memoryview, bytes, memoryview]
    assert all(piece.obj is raw for piece in pieces if isinstance(piece, memoryview))


@pytest.mark.parametrize("raw", [b"", b"{", b"{}x", b'{"a":}', b"\xff", b'{"a":NaN}', b'{"a":' * 10_000])
def test_what_is_no_json(raw: bytes) -> None:
    with pytest.raises(NotJson):
        parse(raw)


@pytest.mark.parametrize("raw", [b"[]", b"1", b"null", b'"a"', b"true", b"[{}]"])
def test_what_is_no_object(raw: bytes) -> None:
    with pytest.raises(NotAnObject):
        parse(raw)


def test_absent_null_and_empty() -> None:
    body = parse(b'{"a":null,"b":"","messages":null}')
    assert (body.has("a"), body.has("b"), body.has("c"), body.has("messages")) == (False, True, False, False)
    assert (body.value("a"), body.value("b"), body.value("c")) == (None, "", None)
    assert (body.kind("a"), body.kind("c"), body.size("c")) == ("n", "", 0)
    with pytest.raises(msgspec.ValidationError):
        body.items("b")


def test_a_part_nested_too_deeply_is_a_decode_error() -> None:
    body = Body(b"", None, {"a": msgspec.Raw(b"[" * 5000 + b"]" * 5000)})
    with pytest.raises(msgspec.DecodeError):
        body.value("a")
