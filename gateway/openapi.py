"""The OpenAPI description of the metered paths, which FastAPI does not know as they are raw ASGI."""

from __future__ import annotations

from typing import Any, Final

from ctxgate.compression.policy import LEVELS
from ctxgate.gateway.context_level import COMPACTION_HEADER, MODES
from ctxgate.gateway.flow import PATHS, Surface
from ctxgate.gateway.identity import MAX_TASK, TASK_HEADER
from ctxgate.gateway.inbound import MAX_MESSAGES
from ctxgate.gateway.layout_level import LAYOUT_HEADER
from ctxgate.routing.tiers import CLASS_HEADER, LATENCY_HEADER, MOST_MS, TTFT_HEADER, JobClass

_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_MESSAGES: Final = {"type": "array", "items": {"type": "object"}, "minItems": 1, "maxItems": MAX_MESSAGES}
_TEXT: Final = {"oneOf": [{"type": "string"}, {"type": "array"}]}
_MEMBERS: Final[dict[Surface, dict[str, Any]]] = {
    Surface.CHAT: {"messages": _MESSAGES},
    Surface.COMPLETIONS: {"prompt": _TEXT},
    Surface.EMBEDDINGS: {"input": _TEXT, "messages": _MESSAGES},
}
_NEEDED: Final[dict[Surface, dict[str, Any]]] = {
    Surface.CHAT: {"required": ["model", "messages"]},
    Surface.COMPLETIONS: {"required": ["model", "prompt"]},
    Surface.EMBEDDINGS: {
        "required": ["model"],
        "anyOf": [{"required": ["input"]}, {"required": ["messages"]}],
    },
}
_PARAMETERS: Final = [
    {
        "name": TASK_HEADER,
        "in": "header",
        "required": False,
        "description": "The task this request is booked to, in UTF-8; without it the task is looked for "
        "where agents already name theirs, and at last made from the conversation's head",
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_TASK},
    },
    {
        "name": LAYOUT_HEADER,
        "in": "header",
        "required": False,
        "description": "How the prompt may be laid out for the prefix cache: the team's level, or less",
        "schema": {"type": "string", "enum": [level.value for level in LEVELS]},
    },
    {
        "name": COMPACTION_HEADER,
        "in": "header",
        "required": False,
        "description": "When the conversation may be compacted: the team's mode, or less",
        "schema": {"type": "string", "enum": [mode.value for mode in MODES]},
    },
    {
        "name": CLASS_HEADER,
        "in": "header",
        "required": False,
        "description": "The class of its job, which the team's latency budgets go by",
        "schema": {"type": "string", "enum": [job.value for job in JobClass]},
    },
    {
        "name": TTFT_HEADER,
        "in": "header",
        "required": False,
        "description": "How long it may take to the first token, in milliseconds from its arrival",
        "schema": {"type": "integer", "minimum": 1, "maximum": MOST_MS},
    },
    {
        "name": LATENCY_HEADER,
        "in": "header",
        "required": False,
        "description": "How long it may take in all, in milliseconds from its arrival",
        "schema": {"type": "integer", "minimum": 1, "maximum": MOST_MS},
    },
]
_REQUEST_ID: Final = {"x-request-id": "The gateway's id of this request"}
_ANSWERED: Final = _REQUEST_ID | {
    "x-ctxgate-pool": "The pool that served the request",
    "x-ctxgate-replica": "The replica that served it",
    "x-ctxgate-tier": "The profile of that pool, fast or standard, where it has one",
    "x-ctxgate-predicted-ttft-ms": "The time to the first token that was predicted there",
    "x-ctxgate-fits": "Whether that kept the request's latency budget, where it has one",
    "x-ctxgate-task": "The task it is booked to, percent-encoded",
    "x-ctxgate-expected-cached": "Prompt tokens that the replica was expected to find in its cache",
    "x-ctxgate-miss": "Why less is cached than could be: `cause; detail=...; field=...; avoidable=N`",
    "x-ctxgate-layout": "The layout level and the number of edits, where the layout changed the prompt",
    "x-ctxgate-compaction": "Who compacted the conversation, why, and how much was left out",
}
_COST: Final = {
    "x-ctxgate-cost": "What the call cost, in US dollars; not on a stream, whose usage event tells it"
}
_STATUSES: Final = {
    "400": "A field is wrong; `param` names it",
    "401": "No key, or an unknown one",
    "404": "Unknown model",
    "408": "The body stopped coming",
    "413": "Body too large",
    "415": "Unknown content encoding",
    "429": "The engines have no room",
    "502": "No replica gave an answer",
    "503": "The ledger takes no requests, or the gateway is being stopped",
    "504": "The engine did not answer in time, or the request's latency budget is over",
}


def add_metered_paths(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the metered surfaces, their key and their error envelope described."""
    components = document.setdefault("components", {})
    components.setdefault("securitySchemes", {})["key"] = {"type": "http", "scheme": "bearer"}
    components.setdefault("schemas", {})["Error"] = _ERROR
    for path, surface in PATHS.items():
        document["paths"][path] = {"post": _operation(surface)}
    for path, operations in document["paths"].items():
        if path.startswith("/v1/"):
            for operation in operations.values():
                operation["security"] = [{"key": []}]
    return document


def _operation(surface: Surface) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {"model": {"type": "string"}, "stream": {"type": "boolean"}, **_MEMBERS[surface]},
        "additionalProperties": True,
        **_NEEDED[surface],
    }
    refused = {
        "headers": _headers(_REQUEST_ID),
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    answers = {"application/json": {"schema": {"type": "object"}}}
    if surface is not Surface.EMBEDDINGS:
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": f"OpenAI {surface.value}, forwarded to a pool and metered",
        "operationId": surface.value,
        "parameters": _PARAMETERS,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {
                "description": "The engine's answer",
                "headers": _headers(_ANSWERED | _COST),
                "content": answers,
            },
            **{status: {"description": text, **refused} for status, text in _STATUSES.items()},
        },
    }


def _headers(descriptions: dict[str, str]) -> dict[str, Any]:
    return {name: {"description": text, "schema": {"type": "string"}} for name, text in descriptions.items()}
