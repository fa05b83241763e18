"""The outgoing prompt: the client's bytes, with what metering needs put in and said."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from ctxgate.compression.plan import PlanEdit, plan, stream_options, untouched
from ctxgate.inference.wire import parse

BODY = b'{"model":"m","messages":[{"role":"user","content":"x"}]%s}'


def sent(raw: bytes, *, stream: bool = True, served: str | None = None, continuous: bool = False) -> Any:
    """The plan of a body."""
    return plan(parse(raw), stream=stream, served_model=served, continuous_usage=continuous)


def test_a_call_that_needs_nothing_leaves_as_it_came() -> None:
    raw = BODY % b""
    result = sent(raw, stream=False)
    assert b"".join(result.outgoing) == raw
    assert (result.edits, result.injected_usage, result.injected_continuous) == ((), False, False)
    assert b"".join(untouched(parse(raw)).outgoing) == raw


@pytest.mark.parametrize(
    ("options", "continuous", "expected", "injected"),
    [
        (None, False, {"include_usage": True}, (True, False)),
        ({"include_usage": False}, False, {"include_usage": True}, (True, False)),
        ({"include_usage": None, "x": 1}, False, {"include_usage": True, "x": 1}, (True, False)),
        ({"include_usage": True}, False, {"include_usage": True}, (False, False)),
        (None, True, {"include_usage": True, "continuous_usage_stats": True}, (True, True)),
        (
            {"include_usage": True},
            True,
            {"include_usage": True, "continuous_usage_stats": True},
            (False, True),
        ),
        (
            {"include_usage": True, "continuous_usage_stats": True},
            True,
            {"include_usage": True, "continuous_usage_stats": True},
            (False, False),
        ),
        (
            {"continuous_usage_stats": True},
            False,
            {"include_usage": True, "continuous_usage_stats": True},
            (True, False),
        ),
    ],
)
def test_what_a_stream_is_asked_for_and_what_of_it_the_client_did_not_ask(
    options: dict[str, Any] | None, continuous: bool, expected: dict[str, Any], injected: tuple[bool, bool]
) -> None:
    more = b"" if options is None else b',"stream_options":' + json.dumps(options).encode()
    raw = BODY % more
    result = sent(raw, continuous=continuous)
    outgoing = b"".join(result.outgoing)
    assert json.loads(outgoing) == json.loads(raw) | {"stream_options": expected}
    assert (result.injected_usage, result.injected_continuous) == injected
    changed = outgoing != raw
    assert [edit.field for edit in result.edits] == ["stream_options"] * changed
    if not changed:
        assert result.outgoing[0] is raw


def test_a_renamed_model_and_the_usage_options_join_in_one_body() -> None:
    raw = b'{ "stream":true, "model" : "m" , "messages":[{"role":"user","content":"\\"model\\":\\"m\\""}] }'
    result = sent(raw, served='org/"engine"')
    outgoing = b"".join(result.outgoing)
    assert outgoing == raw.replace(b' "m" ', b' "org/\\"engine\\"" ')[:-1] + (
        b',"stream_options":{"include_usage":true}}'
    )
    assert result.edits == (
        PlanEdit("model", "the engine's name of the model"),
        PlanEdit("stream_options", "usage of the stream, for the ledger"),
    )


def test_a_salt_is_put_in_last_and_said() -> None:
    raw = BODY % b""
    result = plan(parse(raw), stream=True, served_model=None, continuous_usage=False, cache_salt="s")
    added = b',"stream_options":{"include_usage":true},"cache_salt":"s"}'
    assert b"".join(result.outgoing) == raw[:-1] + added
    assert [edit.field for edit in result.edits] == ["stream_options", "cache_salt"]
    assert b"".join(untouched(parse(raw), "s").outgoing) == raw[:-1] + b',"cache_salt":"s"}'


@pytest.mark.parametrize("raw", [b"{}", b'{"stream_options":null}'])
def test_no_options_are_empty_options(raw: bytes) -> None:
    assert stream_options(parse(raw)) == {}


@pytest.mark.parametrize("value", [b"1", b"[]", b'"x"', b"true"])
def test_options_that_are_no_object_are_an_error(value: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        stream_options(parse(b'{"stream_options":%s}' % value))
