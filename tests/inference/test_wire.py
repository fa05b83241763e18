"""Bodies as views over their own bytes: what is found, and what is spliced in without touching the rest."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.inference.wire import (
    Body,
    Edit,
    NotAnObject,
    NotJson,
    array_spans,
    parse,
    rewritten,
    splice,
    with_member,
    with_members,
)
from ctxgate.inference.wire_fields import KNOWN

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


def test_several_members_are_spliced_at_once() -> None:
    raw = b'{ "a" : 1, "b":[2] ,"c":"}" }'
    result = b"".join(with_members(parse(raw), {"b": b"null", "x": b"7", "a": b'"one"', "y": b"{}"}))
    assert result == b'{ "a" : "one", "b":null ,"c":"}" ,"x":7,"y":{}}'
    assert b"".join(with_members(parse(raw), {})) == raw
    assert b"".join(with_members(parse(b"{ }"), {"x": b"1", "y": b"2"})) == b'{ "x":1,"y":2}'


def test_one_replacement_led_astray_appends_them_all() -> None:
    raw = b'{"s":"","s":"aaaaaaaaaaaaaaaaaaaaa","model":"b","n":1}'
    result = b"".join(with_members(parse(raw), {"model": b'"m"', "n": b"2", "x": b"3"}))
    assert json.loads(result) == {"s": "a" * 21, "model": "m", "n": 2, "x": 3}


@given(objects(), st.dictionaries(NAMES, VALUES, max_size=4))
def test_spliced_members_are_all_read_back(
    case: tuple[bytes, list[tuple[str, Any]]], added: dict[str, Any]
) -> None:
    raw, members = case
    written = {name: json.dumps(value).encode() for name, value in added.items()}
    assert json.loads(b"".join(with_members(parse(raw), written))) == dict(members) | added


def _common(one: bytes, other: bytes) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _longest(raw: bytes, members: list[tuple[str, Any]], name: str) -> int:
    value = parse(raw).members.get(name)
    return 0 if value is None else len(bytes(value))


def test_a_repeated_member_never_takes_the_place_of_the_messages() -> None:
    """The number that stands for the messages, while the rest is scanned, is no other member's value."""
    raw = b'{"n":"","n":0,"messages":[{}],"n":0}'
    for name in ("n", "model"):
        result = b"".join(with_members(parse(raw), {name: b"0"}))
        assert json.loads(result) == json.loads(raw) | {name: 0}


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


def elements(written: list[str]) -> st.SearchStrategy[str]:
    """An array of these texts, oddly spaced."""
    spaces = st.lists(SPACES, min_size=2 * len(written) + 1, max_size=2 * len(written) + 1)
    return spaces.map(
        lambda gaps: (
            "["
            + ",".join(f"{gaps[2 * at]}{text}{gaps[2 * at + 1]}" for at, text in enumerate(written))
            + (gaps[-1] if not written else "")
            + "]"
        )
    )


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A chat body: members of any kind around messages and tools, both possibly repeated or nested."""
    written = st.lists(VALUES.map(json.dumps), max_size=4)
    arrays = [(name, draw(written.flatmap(elements))) for name in ("messages", "tools")]
    extra = draw(st.lists(st.sampled_from(arrays), max_size=2))
    nested = [("x", "{" + f'"{name}":{text}' + "}") for name, text in draw(st.just(extra))]
    others = [
        (name, json.dumps(value)) for name, value in draw(st.lists(st.tuples(NAMES, VALUES), max_size=3))
    ]
    members = draw(st.permutations([*arrays, *extra, *nested, *others]))
    spell = escaped if draw(st.integers(0, 3)) == 3 else json.dumps
    parts = [f"{draw(SPACES)}{spell(name)}:{draw(SPACES)}{text}" for name, text in members]
    return ("{" + ",".join(parts) + "}").encode()


def texts_of(body: Body, name: str) -> list[bytes]:
    return [bytes(item) for item in body.items(name)] if body.kind(name) == "[" else []


@given(requests())
def test_the_place_of_the_messages_is_that_of_the_array_that_counts(raw: bytes) -> None:
    body = parse(raw)
    if not isinstance(json.loads(raw).get("messages"), list):
        return
    spans = array_spans(body, "messages")
    if spans is None:
        return
    assert [raw[start:end] for start, end in spans] == texts_of(body, "messages")
    marked = b"".join(splice(raw, [Edit(*span, b'"here %d"' % at) for at, span in enumerate(spans)]))
    assert json.loads(marked) == json.loads(raw) | {"messages": [f"here {at}" for at in range(len(spans))]}


@given(requests(), st.data())
def test_edits_inside_elements_give_the_body_that_a_scan_finds(raw: bytes, data: st.DataObject) -> None:
    """Whatever the edits are: the same body as by a scan of the spliced bytes, or none."""
    body = parse(raw)
    edits: list[Edit] = []
    whole = data.draw(st.booleans())
    for name in ("messages", "tools"):
        for span in (array_spans(body, name) or ()) if body.kind(name) == "[" else ():
            if data.draw(st.booleans()):
                continue
            edit = Edit(*span, json.dumps(data.draw(VALUES)).encode())
            edits.append(edit if whole else data.draw(_odd(edit)))
    spliced = _spliced(raw, edits)
    if spliced is None:
        return
    result = rewritten(body, edits)
    if result is None:
        assert not whole or body.frame() is None
        return
    expected = parse(spliced)
    assert result.raw == expected.raw
    assert texts_of(result, "messages") == texts_of(expected, "messages")
    assert {name: bytes(value) for name, value in result.members.items()} == {
        name: bytes(value) for name, value in expected.members.items()
    }
    for name in KNOWN:
        assert bytes(result.get(name) or b"") == bytes(expected.get(name) or b"")
    assert array_spans(result, "messages") == array_spans(expected, "messages")
    assert b"".join(with_members(result, {"model": b'"n"', "n": b"1"})) == b"".join(
        with_members(expected, {"model": b'"n"', "n": b"1"})
    )


def _odd(edit: Edit) -> st.SearchStrategy[Edit]:
    """Edits near an element, of texts that are or are not JSON values."""
    text = edit.text
    texts = st.sampled_from([text, text + b" ", text + b"," + text, text[1:], b"", b'"x"'])
    places = st.tuples(st.integers(edit.start, edit.end), st.integers(edit.start - 1, edit.end + 1))
    return st.builds(lambda place, new: Edit(min(place), max(place), new), places, texts)


def _spliced(raw: bytes, edits: list[Edit]) -> bytes | None:
    """The edited bytes, or None if edits overlap."""
    try:
        return b"".join(splice(raw, edits))
    except ValueError:
        return None


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
