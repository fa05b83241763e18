"""The OpenAPI description of the metered paths, which FastAPI does not know as they are raw ASGI."""

from __future__ import annotations

from typing import Any, Final

from ctxgate.gateway.flow import PATHS, Surface
from ctxgate.gateway.identity import MAX_TASK, TASK_HEADER

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
_BODIES: Final[dict[Surface, dict[str, Any]]] = {
    Surface.CHAT: {"messages": {"type": "array", "items": {"type": "object"}, "minItems": 1}},
    Surface.COMPLETIONS: {"prompt": {"oneOf": [{"type": "string"}, {"type": "array"}]}},
    Surface.EMBEDDINGS: {"input": {"oneOf": [{"type": "string"}, {"type": "array"}]}},
}
_STATUSES: Final = {
    "400": "A field is wrong; `param` names it",
    "401": "No key, or an unknown one",
    "404": "Unknown model",
    "413": "Body too large",
    "502": "No replica gave an answer",
    "503": "The engines have no room",
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
    needed = _BODIES[surface]
    schema = {
        "type": "object",
        "properties": {"model": {"type": "string"}, "stream": {"type": "boolean"}, **needed},
        "required": ["model", *needed],
        "additionalProperties": True,
    }
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    answers = {"application/json": {"schema": {"type": "object"}}}
    if surface is not Surface.EMBEDDINGS:
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": f"OpenAI {surface.value}, forwarded to a pool and metered",
        "operationId": surface.value,
        "parameters": [
            {
                "name": TASK_HEADER,
                "in": "header",
                "required": False,
                "description": "The task this request is booked to",
                "schema": {"type": "string", "minLength": 1, "maxLength": MAX_TASK},
            }
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": "The engine's answer", "content": answers},
            **{status: {"description": text, **error} for status, text in _STATUSES.items()},
        },
    }
