"""Refusals: one closed set, one table to the wire, one envelope; and exceptions that behave as such."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.gateway.errors import TABLE, Kind, Refused, body_of, headers_of
from ctxgate.gateway.upstream_errors import pass_on

if TYPE_CHECKING:
    from collections.abc import Iterator

STATUSES = {
    Kind.INVALID_JSON: 400,
    Kind.INVALID_VALUE: 400,
    Kind.MISSING_FIELD: 400,
    Kind.FORBIDDEN_FIELD: 400,
    Kind.MISSING_KEY: 401,
    Kind.UNKNOWN_KEY: 401,
    Kind.MODEL_NOT_FOUND: 404,
    Kind.ROUTE_NOT_FOUND: 404,
    Kind.CONTEXT_NOT_FOUND: 404,
    Kind.REQUEST_NOT_FOUND: 404,
    Kind.METHOD_NOT_ALLOWED: 405,
    Kind.REQUEST_TIMEOUT: 408,
    Kind.BODY_TOO_LARGE: 413,
    Kind.UNSUPPORTED_ENCODING: 415,
    Kind.INTERNAL: 500,
    Kind.UPSTREAM_UNREACHABLE: 502,
    Kind.UPSTREAM_BROKEN: 502,
    Kind.OVERLOADED: 429,
    Kind.LATENCY_EXCEEDED: 504,
    Kind.POOL_DRAINING: 503,
    Kind.LEDGER_UNAVAILABLE: 503,
    Kind.SHUTTING_DOWN: 503,
    Kind.UPSTREAM_TIMEOUT: 504,
}


def test_every_kind_has_its_status_and_a_code_of_its_own() -> None:
    assert {kind: wire.status for kind, wire in TABLE.items()} == STATUSES
    assert set(TABLE) == set(Kind)
    codes = [wire.code for wire in TABLE.values()]
    assert len(set(codes)) == len(codes)
    assert all((wire.type == "server_error") is (wire.status >= 500) for wire in TABLE.values())


@given(st.sampled_from(Kind), st.text(), st.none() | st.text(), st.none() | st.integers(1, 60))
def test_the_envelope_of_a_refusal(kind: Kind, message: str, param: str | None, wait: int | None) -> None:
    message = message.encode("utf-8", "replace").decode()
    param = param and param.encode("utf-8", "replace").decode()
    refused = Refused(kind, message, param, wait)
    wire = TABLE[kind]
    assert json.loads(body_of(refused)) == {
        "error": {"message": message, "type": wire.type, "param": param, "code": wire.code}
    }
    assert refused.status == wire.status
    assert headers_of(refused) == ([] if wait is None else [(b"retry-after", str(wait).encode())])


def test_a_refusal_passes_through_context_managers_as_any_exception() -> None:
    @contextmanager
    def nothing() -> Iterator[None]:
        yield

    with pytest.raises(Refused) as caught, nothing():
        raise Refused(Kind.INTERNAL, "x") from ValueError("cause")
    assert isinstance(caught.value.__cause__, ValueError)
    assert hash(caught.value) == hash(caught.value)
    caught.value.add_note("a note")


ENVELOPE = b'{"error": {"message":"m","type":"BadRequestError","param":"p","code":400,"x":[1e2]}}'


@pytest.mark.parametrize("status", [400, 404, 409, 422, 429, 500, 503])
def test_openais_shape_passes_byte_for_byte(status: int) -> None:
    assert pass_on(status, ENVELOPE) == (status, ENVELOPE)


@pytest.mark.parametrize(
    ("status", "body", "message", "kind"),
    [
        (404, b'{"detail":"Not Found"}', "Not Found", "invalid_request_error"),
        (500, b'{"error":"boom"}', "boom", "server_error"),
        (503, b'{"error":"x","detail":"y"}', "x", "server_error"),
        (400, b'{"detail":[{"loc":["a"],"input":"secret"}]}', None, "invalid_request_error"),
        (500, b"<html>Internal</html>", None, "server_error"),
        (502, b"", None, "server_error"),
        (400, b'{"error":{"message":7}}', None, "invalid_request_error"),
        (400, b'{"error":{}}', None, "invalid_request_error"),
        (400, b"[]", None, "invalid_request_error"),
        (400, b'"text"', None, "invalid_request_error"),
        (400, b"\xff\xfe", None, "invalid_request_error"),
        (400, b"[" * 100_000, None, "invalid_request_error"),
        (400, b'{"error":' * 50_000, None, "invalid_request_error"),
    ],
)
def test_other_shapes_are_wrapped(status: int, body: bytes, message: str | None, kind: str) -> None:
    passed, raw = pass_on(status, body)
    expected = "The model server gave no readable error." if message is None else message
    assert passed == status
    assert json.loads(raw) == {"error": {"message": expected, "type": kind, "param": None, "code": None}}


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("This model's maximum context length is 8 tokens. However...", "input_tokens"),
        ("The decoder prompt (length 9) is longer than the maximum model length of 8.", None),
    ],
)
def test_a_prompt_beyond_the_window_gets_the_code_that_agents_know(text: str, param: str | None) -> None:
    body = json.dumps({"error": {"message": text, "type": "BadRequestError", "param": param, "code": 400}})
    status, raw = pass_on(400, body.encode())
    assert (status, json.loads(raw)["error"]) == (
        400,
        {
            "message": text,
            "type": "invalid_request_error",
            "param": param,
            "code": "context_length_exceeded",
        },
    )


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=5000 cannot be greater than max_model_len=2048. Please request fewer output tokens.",
        "The encoder prompt (length 900) is longer than the maximum model length of 800.",
        "Unknown tool: maximum context length",
        "'" + "x" * 2000 + "This model's maximum context length is 8 tokens.'",
    ],
)
def test_what_a_shorter_prompt_would_not_cure_is_no_overflow(text: str) -> None:
    body = json.dumps({"error": {"message": text, "type": "BadRequestError", "code": 400}}).encode()
    assert pass_on(400, body) == (400, body)


@pytest.mark.parametrize("status", [401, 403, 407, 204, 206, 301, 302, 304])
def test_a_refused_key_and_an_answer_that_is_none_are_the_upstreams_fault(status: int) -> None:
    passed, raw = pass_on(status, ENVELOPE)
    assert (passed, json.loads(raw)["error"]["code"]) == (502, "upstream_error")
    assert b'"m"' not in raw


def test_a_long_message_is_cut() -> None:
    _, raw = pass_on(400, json.dumps({"detail": "x" * 9000}).encode())
    assert len(json.loads(raw)["error"]["message"]) == 2000
