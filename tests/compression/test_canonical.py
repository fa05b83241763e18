"""JSON equality as the engine sees it: the digest agrees with what Python's json writes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.compression.canonical import MAX_DEPTH, canonical_digest, json_equal, same_rendering
from ctxgate.inference.wire import NotJson

TEXT = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates among them
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)

EQUAL = [
    (b"1.0", b"1e0"),
    (b"1.0", b"1.000"),
    (b"10.0", b"1E+1"),
    (b"0.1", b"0.1000000000000000055511151231257827"),
    (b"0", b"-0"),
    (b'"a"', b'"\\u0061"'),
    (b'"/"', b'"\\/"'),
    (b'"\xc3\xa9"', b'"\\u00E9"'),
    (b'"\xf0\x9f\x98\x80"', b'"\\ud83d\\uDE00"'),
    (b'"\\ud83d"', b'"\\uD83D"'),
    (b'{"a":1,"b":[{}]}', b' { "b" : [ { } ] , "a" : 1 } '),
    (b'{"a":1,"a":2}', b'{"a":2}'),
    (b'{"a":1,"\\u0061":2}', b'{"a":2}'),
    (b"[]", b"[\n]\t"),
    (b"1e400", b" 1e400"),
]
DIFFERENT = [
    (b"1", b"1.0"),
    (b"1", b"true"),
    (b"0", b"false"),
    (b"0.0", b"-0.0"),
    (b"0", b"0.0"),
    (b"0", b"null"),
    (b'""', b"null"),
    (b"[]", b"{}"),
    (b"[]", b"[null]"),
    (b"[1,2]", b"[2,1]"),
    (b"[12]", b"[1,2]"),
    (b'"1"', b"1"),
    (b"9007199254740993", b"9007199254740992"),
    (b"9007199254740993", b"9007199254740993.0"),
    (b"1e400", b"2e400"),
    (b"1e400", b"-1e400"),
    (b"1e400", b"1" + b"0" * 400),
    (b'"\\ud83d"', b'"\\ud83e"'),
    (b'"\\ud83d"', b'"\\ufffd"'),
    (b'"\\ud83d"', b'"\\\\ud83d"'),
    (b'"\\ud83d"', b'"\xf0\x9f\x98\x80"'),
    (b'"e\\u0301"', b'"\\u00e9"'),
    (b'{"a":1,"a":2}', b'{"a":1}'),
    (b'{"a":null}', b"{}"),
    (b'{"ab":1}', b'{"a":"b1"}'),
    (b'["a","b"]', b'["a\\",\\"b"]'),
]
NOT_JSON = [
    b"",
    b" ",
    b"{",
    b"[1,]",
    b"01",
    b"1.",
    b"NaN",
    b"-Infinity",
    b'{"a":NaN}',
    b"'a'",
    b'"\n"',
    b'"\xff"',
    b"1 2",
    b"\xef\xbb\xbf1",
    b"9" * 4301,
    b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
    b"[" * 100_000,
]


@pytest.mark.parametrize(("a", "b"), EQUAL)
def test_equal_values(a: bytes, b: bytes) -> None:
    assert json_equal(a, b)
    assert canonical_digest(a) == canonical_digest(b)


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_different_values(a: bytes, b: bytes) -> None:
    assert not json_equal(a, b)
    assert canonical_digest(a) != canonical_digest(b)


@pytest.mark.parametrize("raw", NOT_JSON)
def test_what_is_no_json_equals_only_its_own_bytes(raw: bytes) -> None:
    with pytest.raises(NotJson):
        canonical_digest(raw)
    assert json_equal(raw, raw)
    assert not json_equal(raw, raw + b" ")
    assert not json_equal(raw, b"1")


def test_the_deepest_text_that_counts() -> None:
    deep = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert json_equal(deep, deep.replace(b"]", b" ]"))
    brackets = b'"' + b"[" * 10_000 + b'"'
    assert json_equal(brackets, b" " + brackets)


def test_the_largest_integer_that_counts_is_exact() -> None:
    assert json_equal(b"-" + b"9" * 4300, b" -" + b"9" * 4300)
    assert not json_equal(b"9" * 4300, b"9" * 4299 + b"8")


def test_an_error_does_not_quote_the_input() -> None:
    with pytest.raises(NotJson) as caught:
        canonical_digest(b'{"secret": hunter2}')
    assert "secret" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_the_order_of_members_counts_for_a_rendering() -> None:
    a, b = b'{"a":1,"b":2.0}', b'{"b":2.0,"a":1}'
    assert json_equal(a, b)
    assert not same_rendering(a, b)
    assert same_rendering(a, b'{ "\\u0061": 1, "b": 2e0 }')
    # Python keeps the place of the first and the value of the last.
    assert same_rendering(b'{"a":0,"b":2.0,"a":1}', a)


def shuffled(value: Any, data: st.DataObject) -> Any:
    if isinstance(value, dict):
        names = data.draw(st.permutations(list(value)))
        return {name: shuffled(value[name], data) for name in names}
    return [shuffled(item, data) for item in value] if isinstance(value, list) else value


@given(JSON, st.data())
def test_any_writing_of_a_value_has_its_digest(value: Any, data: st.DataObject) -> None:
    value = json.loads(json.dumps(value))  # two surrogates that make a pair are one character from here on
    plain = json.dumps(value).encode()
    other = json.dumps(
        shuffled(value, data),
        ensure_ascii=data.draw(st.booleans()),
        indent=data.draw(st.sampled_from([None, 2])),
    ).encode("utf-8", "surrogatepass")
    assert json_equal(plain, other)
    assert canonical_digest(plain) == canonical_digest(other)
    assert same_rendering(plain, json.dumps(value, separators=(" ,", " :")).encode())


@given(JSON, JSON)
def test_equality_is_that_of_what_python_writes_back(a: Any, b: Any) -> None:
    one, two = json.dumps(a).encode(), json.dumps(b).encode()
    written = json.dumps(json.loads(one), sort_keys=True) == json.dumps(json.loads(two), sort_keys=True)
    assert json_equal(one, two) is written
    assert (canonical_digest(one) == canonical_digest(two)) is written
    ordered = json.dumps(json.loads(one)) == json.dumps(json.loads(two))
    assert same_rendering(one, two) is ordered


@given(st.binary(max_size=24) | st.text('{}[]",:0123456789.eE-+ \\untrufalsNI', max_size=16).map(str.encode))
def test_arbitrary_bytes_are_equal_to_themselves_and_never_crash(raw: bytes) -> None:
    assert json_equal(raw, raw)
    try:
        digest = canonical_digest(raw)
    except NotJson:
        return
    assert digest == canonical_digest(b" " + raw + b"\n")
    json.loads(raw.decode("utf-8", "surrogatepass"))  # what is accepted, the engine's reader accepts


@pytest.mark.parametrize("seed", ["0", "4242"])
def test_the_digest_is_the_same_in_any_process(seed: str) -> None:
    code = (
        "from ctxgate.compression.canonical import canonical_digest as d;"
        """print(d(b'{"b":[1,2.50,null],"a":"\\\\u00e9"}').hex())"""
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == canonical_digest('{"a":"é","b":[1,2.5,null]}'.encode()).hex()
