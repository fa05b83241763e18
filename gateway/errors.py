"""Every refusal of the gateway: a closed set of kinds, one table to the wire, one builder.

    Kind ──TABLE──> Wire(status, type, code) ──envelope()──> {"error": {message, type, param, code}}

The envelope is OpenAI's; `type` and `code` are the words its SDKs branch on. Messages never carry an
upstream's address, a key or any of the request's text.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

import msgspec


class Kind(Enum):
    """Why the gateway refuses."""

    INVALID_JSON = auto()
    INVALID_VALUE = auto()
    MISSING_FIELD = auto()
    FORBIDDEN_FIELD = auto()
    MISSING_KEY = auto()
    UNKNOWN_KEY = auto()
    MODEL_NOT_FOUND = auto()
    ROUTE_NOT_FOUND = auto()
    CONTEXT_NOT_FOUND = auto()
    REQUEST_NOT_FOUND = auto()
    METHOD_NOT_ALLOWED = auto()
    REQUEST_TIMEOUT = auto()
    BODY_TOO_LARGE = auto()
    UNSUPPORTED_ENCODING = auto()
    OVERLOADED = auto()
    LATENCY_EXCEEDED = auto()
    UPSTREAM_UNREACHABLE = auto()
    UPSTREAM_TIMEOUT = auto()
    UPSTREAM_BROKEN = auto()
    POOL_DRAINING = auto()
    LEDGER_UNAVAILABLE = auto()
    SHUTTING_DOWN = auto()
    INTERNAL = auto()


class Wire(NamedTuple):
    """How a kind looks to a client."""

    status: int
    type: str
    code: str


TABLE: Final[dict[Kind, Wire]] = {
    Kind.INVALID_JSON: Wire(400, "invalid_request_error", "invalid_json"),
    Kind.INVALID_VALUE: Wire(400, "invalid_request_error", "invalid_value"),
    Kind.MISSING_FIELD: Wire(400, "invalid_request_error", "missing_required_parameter"),
    Kind.FORBIDDEN_FIELD: Wire(400, "invalid_request_error", "unsupported_parameter"),
    Kind.MISSING_KEY: Wire(401, "invalid_request_error", "missing_api_key"),
    Kind.UNKNOWN_KEY: Wire(401, "invalid_request_error", "invalid_api_key"),
    Kind.MODEL_NOT_FOUND: Wire(404, "invalid_request_error", "model_not_found"),
    Kind.ROUTE_NOT_FOUND: Wire(404, "invalid_request_error", "unknown_url"),
    Kind.CONTEXT_NOT_FOUND: Wire(404, "invalid_request_error", "context_not_found"),
    Kind.REQUEST_NOT_FOUND: Wire(404, "invalid_request_error", "request_not_found"),
    Kind.METHOD_NOT_ALLOWED: Wire(405, "invalid_request_error", "method_not_allowed"),
    Kind.REQUEST_TIMEOUT: Wire(408, "invalid_request_error", "request_timeout"),
    Kind.BODY_TOO_LARGE: Wire(413, "invalid_request_error", "request_too_large"),
    Kind.UNSUPPORTED_ENCODING: Wire(415, "invalid_request_error", "unsupported_encoding"),
    Kind.OVERLOADED: Wire(429, "rate_limit_error", "server_is_overloaded"),
    Kind.LATENCY_EXCEEDED: Wire(504, "server_error", "latency_budget_exceeded"),
    Kind.UPSTREAM_UNREACHABLE: Wire(502, "server_error", "upstream_unreachable"),
    Kind.UPSTREAM_TIMEOUT: Wire(504, "server_error", "upstream_timeout"),
    Kind.UPSTREAM_BROKEN: Wire(502, "server_error", "upstream_error"),
    Kind.POOL_DRAINING: Wire(503, "server_error", "pool_draining"),
    Kind.LEDGER_UNAVAILABLE: Wire(503, "server_error", "ledger_unavailable"),
    Kind.SHUTTING_DOWN: Wire(503, "server_error", "shutting_down"),
    Kind.INTERNAL: Wire(500, "server_error", "internal_error"),
}


@dataclass(eq=False)  # not frozen: Python itself sets an exception's traceback and context
class Refused(Exception):
    """A request ends here. `param` names the field at fault; `retry_after_s` is given when waiting helps."""

    kind: Kind
    message: str
    param: str | None = None
    retry_after_s: int | None = None

    @property
    def status(self) -> int:
        """The HTTP status of this refusal."""
        return TABLE[self.kind].status

    def fresh(self) -> Refused:
        """The same refusal, to be raised: one raised again and again would keep all frames."""
        return Refused(self.kind, self.message, self.param, self.retry_after_s)


STOPPING: Final = Refused(Kind.SHUTTING_DOWN, "The gateway is shutting down.", retry_after_s=2)


def envelope(message: str, type_: str, code: str | None, param: str | None = None) -> bytes:
    """OpenAI's error body."""
    return msgspec.json.encode({"error": {"message": message, "type": type_, "param": param, "code": code}})


def body_of(refused: Refused) -> bytes:
    """The JSON body of a refusal."""
    wire = TABLE[refused.kind]
    return envelope(refused.message, wire.type, wire.code, refused.param)


def event_of(refused: Refused) -> bytes:
    """A refusal inside a stream that has begun: its last event, never followed by `[DONE]`."""
    return b"data: " + body_of(refused) + b"\n\n"


def headers_of(refused: Refused) -> list[tuple[bytes, bytes]]:
    """Headers beside the body: when to come back, or that coming back is no use."""
    if refused.retry_after_s is not None:
        return [(b"retry-after", str(refused.retry_after_s).encode())]
    return []
