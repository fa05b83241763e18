"""What the end of an attempt says of its replica: a table, and the codes of errors inside answers."""

from __future__ import annotations

import pytest

from ctxgate.gateway.ledger import Outcome
from ctxgate.gateway.signs import error_code, sign_of
from ctxgate.routing.health import Sign


@pytest.mark.parametrize(
    ("outcome", "status", "error", "sign"),
    [
        (Outcome.COMPLETED, 200, None, Sign.WELL),
        (Outcome.REJECTED, 400, None, Sign.NEUTRAL),
        (Outcome.REJECTED, 501, None, Sign.NEUTRAL),
        (Outcome.UPSTREAM_ERROR, 500, None, Sign.FAULT),
        (Outcome.UPSTREAM_ERROR, 502, None, Sign.FAULT),
        (Outcome.UPSTREAM_ERROR, 401, None, Sign.FAULT),  # this replica refuses the pool's key
        (Outcome.UPSTREAM_ERROR, 501, None, Sign.NEUTRAL),
        (Outcome.UPSTREAM_ERROR, 200, None, Sign.FAULT),  # no JSON
        (Outcome.UPSTREAM_ERROR, 200, b'{"code":500}', Sign.FAULT),
        (Outcome.UPSTREAM_ERROR, 200, b'{"message":"engine died"}', Sign.FAULT),
        (Outcome.UPSTREAM_ERROR, 200, b'{"code":400}', Sign.NEUTRAL),
        (Outcome.UPSTREAM_ERROR, 200, b'{"code":499}', Sign.NEUTRAL),
        (Outcome.UPSTREAM_ERROR, 200, b'{"code":501}', Sign.NEUTRAL),
        (Outcome.UPSTREAM_ERROR, 200, b'{"code":503}', Sign.NEUTRAL),
        (Outcome.TRUNCATED, 200, None, Sign.LOST),
        (Outcome.TIMED_OUT, None, None, Sign.STALLED),
        (Outcome.OVERLOADED, 503, None, Sign.NEUTRAL),
        (Outcome.CLIENT_DISCONNECTED, 200, None, Sign.NEUTRAL),
        (Outcome.SHUTDOWN, None, None, Sign.NEUTRAL),
        (Outcome.FAILED, None, None, Sign.NEUTRAL),
        (Outcome.CRASHED, None, None, Sign.NEUTRAL),
    ],
)
def test_each_end_has_its_sign(outcome: Outcome, status: int | None, error: bytes | None, sign: Sign) -> None:
    assert sign_of(outcome, status, error, connected=True) is sign


def test_an_unreachable_replica_refused_the_connection_or_lost_it() -> None:
    assert sign_of(Outcome.UNREACHABLE, None, None, connected=False) is Sign.REFUSED
    assert sign_of(Outcome.UNREACHABLE, None, None, connected=True) is Sign.LOST


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, None),
        (b'{"message":"m","type":"BadRequestError","param":null,"code":400}', 400),
        (b'{"error":{"message":"m","code":404}}', 404),
        (b'{"object":"error","message":"m","code":400}', 400),
        (b'{"code":"400"}', 400),
        (b'{"code":"invalid_prompt"}', None),
        (b'{"code":true}', None),
        (b'{"code":4e2}', None),
        (b'{"code":null}', None),
        (b'{"error":"words"}', None),
        (b'"words"', None),
        (b"[400]", None),
        (b"{", None),
        (b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}", None),
    ],
)
def test_the_code_of_an_error_inside_an_answer(error: bytes | None, code: int | None) -> None:
    assert error_code(error) == code
