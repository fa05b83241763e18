"""What the end of an attempt says of its replica: apart from what the ledger books, and pure.

whole answer ──────────────────────────> WELL
no connection ─────────────────────────> REFUSED
connection broke ──────────────────────> LOST
5xx, error event, answer that is none ─> FAULT
the gateway's own deadline ────────────> STALLED
everything a client can choose, or that is load ─> NEUTRAL
"""

from __future__ import annotations

from typing import Final

import msgspec

from ctxgate.gateway.ledger import Outcome
from ctxgate.routing.health import Sign

_NEUTRAL_ERRORS: Final = frozenset({*range(400, 500), 501, 503})
_OF_OUTCOME: Final = {
    Outcome.COMPLETED: Sign.WELL,
    Outcome.TRUNCATED: Sign.LOST,
    Outcome.TIMED_OUT: Sign.STALLED,
}


def sign_of(outcome: Outcome, status: int | None, error: bytes | None, *, connected: bool) -> Sign:
    """The sign of an attempt that ended.

    `status` is the engine's HTTP status, `error` the JSON of an error inside an answer of status 200,
    each None without one. `connected`: a connection had been made.
    """
    if outcome is Outcome.UNREACHABLE:
        return Sign.LOST if connected else Sign.REFUSED
    if outcome is Outcome.UPSTREAM_ERROR:
        neutral = status == 501 or error_code(error) in _NEUTRAL_ERRORS
        return Sign.NEUTRAL if neutral else Sign.FAULT
    return _OF_OUTCOME.get(outcome, Sign.NEUTRAL)


def error_code(error: bytes | None) -> int | None:
    """The HTTP status in an error object's `code`, where the engine says one; bare or in an envelope."""
    try:
        document = msgspec.json.decode(error or b"null")
    except (msgspec.DecodeError, RecursionError):
        return None
    inner = document.get("error", document) if isinstance(document, dict) else None
    code = inner.get("code") if isinstance(inner, dict) else None
    if isinstance(code, str) and code.isascii() and code.isdecimal() and len(code) == 3:
        return int(code)
    return code if isinstance(code, int) and not isinstance(code, bool) else None
