"""An engine's refusal on its way to the client: kept in shape where it has OpenAI's, wrapped where not.

The engine's words, parameter and status pass. Three things change: an envelope that SDKs cannot read
(`{"detail": ...}`, `{"error": "text"}`, HTML) is replaced; context overflow gets the code that agents
branch on; and the gateway's own credentials being refused is its operator's fault, not the client's.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ctxgate.compression.window_errors import Overflow, read_overflow
from ctxgate.gateway.errors import Kind, Refused, body_of, envelope
from ctxgate.inference.sse import SseSplitter, data_of

_MAX_MESSAGE: Final = 2000
_KEY_REFUSED: Final = frozenset({401, 403, 407})


def pass_on(status: int, body: bytes) -> tuple[int, bytes]:
    """The status and body a client gets for an upstream's `status` and `body`."""
    if status in _KEY_REFUSED or status < 400:
        fault = "refused the gateway's credentials" if status >= 400 else "gave an answer that is none"
        refused = Refused(Kind.UPSTREAM_BROKEN, f"The model server {fault}.")
        return refused.status, body_of(refused)
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        document = None
    error = document.get("error") if isinstance(document, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return status, _overflow(error) or body
    message = error if isinstance(error, str) else _detail(document)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, envelope(message[:_MAX_MESSAGE], kind, None)


def _overflow(error: dict[str, Any]) -> bytes | None:
    """The envelope of a prompt that does not fit the window, with OpenAI's type and code."""
    overflow = read_overflow(error["message"])
    if overflow is None or not overflow.of_prompt:
        return None
    param = error.get("param")
    return envelope(
        error["message"],
        "invalid_request_error",
        "context_length_exceeded",
        param if isinstance(param, str) else None,
    )


def _detail(document: object) -> str:
    detail = document.get("detail") if isinstance(document, dict) else None
    return detail if isinstance(detail, str) else "The model server gave no readable error."


def with_reason(refusal: tuple[int, bytes], reason: str) -> tuple[int, bytes]:
    """A refusal of `pass_on` whose message ends with a reason of the gateway's own; else as it is."""
    status, body = refusal
    document: Any = msgspec.json.decode(body)
    error = document["error"]
    error["message"] = f"{error['message']} {reason}"
    return status, msgspec.json.encode(document)


def too_long(body: bytes) -> Overflow | None:
    """What a refusal says of a prompt that does not fit the window; None where it is about something else."""
    try:
        document: Any = msgspec.json.decode(body)
        message = document["error"]["message"]
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError):
        return None
    overflow = read_overflow(message) if isinstance(message, str) else None
    return overflow if overflow is not None and overflow.of_prompt else None


def too_long_event(read: bytes) -> tuple[Overflow, bytes] | None:
    """The same of a stream that begins with a refusal: what it says, and its JSON.

    `read` is the stream's first read; None also where its first event is not whole.
    """
    if b'"error"' not in read:
        return None
    payload = next((data for event in SseSplitter().feed(read) if (data := data_of(event)) is not None), b"")
    overflow = too_long(payload)
    return None if overflow is None else (overflow, payload)
