"""From the bytes of a request to `Inbound`: what the gateway must understand is checked, the rest passes.

Fields the gateway acts on are checked here, so that a wrong type is a clear 400 that names the field
and costs nothing. Fields it does not know go to the engine, whose word on them is final.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.compression.plan import stream_options
from ctxgate.gateway.errors import Kind, Refused
from ctxgate.gateway.flow import Inbound, Surface
from ctxgate.inference import wire

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ctxgate.inference.wire import Body

_HARMLESS: Final = (b"null", b"false", b"0")
_POSITIVE: Final = ("max_tokens", "max_completion_tokens", "n", "best_of")
_OPENING_BRACE: Final = 0x7B
MAX_MESSAGES: Final = 2**16  # a conversation of a million tokens has a few thousand
_SHOWN_NAME: Final = 128
_LONGEST_OPTIONS: Final = 1024
# A parsed part takes some 60 bytes: millions of empty messages would take gigabytes. No window of tokens
# holds so many parts; what makes other bodies large is images, which are long texts.
_LARGE: Final = 2**23
_PART_BEGINS: Final = (b"{", b"[", b'"')
_MOST_PARTS: Final = 2**22


def read_inbound(
    request_id: str, surface: Surface, headers: Mapping[str, str], raw: bytes, received_at_us: int
) -> Inbound:
    """Check a request body. Raises `Refused` naming the field at fault."""
    if len(raw) > _LARGE and sum(map(raw.count, _PART_BEGINS)) > _MOST_PARTS:
        raise Refused(Kind.BODY_TOO_LARGE, "The request body holds too many objects, lists and texts.")
    try:
        body = wire.parse(raw)
    except wire.NotJson as error:
        raise Refused(Kind.INVALID_JSON, f"{error}.") from error
    except wire.NotAnObject as error:
        raise Refused(Kind.INVALID_VALUE, f"{error}.") from error
    model = _model(body)
    stream = _flag(body, "stream")
    _check_stream_options(body, stream)
    for name in _POSITIVE:
        _check_positive(body, name)
    messages = _messages(body) if surface is Surface.CHAT else ()
    if surface is Surface.COMPLETIONS and not body.has("prompt_embeds"):
        _require(body, "prompt")
    if surface is Surface.EMBEDDINGS:
        _check_embedded(body)
    if stream and surface is Surface.EMBEDDINGS:
        raise Refused(Kind.INVALID_VALUE, "Embeddings cannot be streamed.", "stream")
    return Inbound(request_id, surface, headers, body, messages, model, stream, received_at_us)


def check_engine_fields(body: Body, allowed: frozenset[str]) -> None:
    """Refuse fields that act on the engine rather than on the caller's own request.

    A key may be granted single ones (`allow_engine_fields`).
    """
    for name in body.engine_fields:
        value = None if name in allowed else body.get(name)
        if value is not None and (body.size(name) > len(b"false") or bytes(value) not in _HARMLESS):
            raise Refused(Kind.FORBIDDEN_FIELD, f"Field '{name}' may not be set through this gateway.", name)


def _check_embedded(body: Body) -> None:
    """vLLM embeds a text, or a conversation that it renders first."""
    if body.has("messages"):
        _messages(body)
    else:
        _require(body, "input")


def _require(body: Body, name: str) -> None:
    if not body.has(name):
        raise Refused(Kind.MISSING_FIELD, f"Missing required parameter: '{name}'.", name)


def _model(body: Body) -> str:
    _require(body, "model")
    model = _decoded(body, "model")
    if not isinstance(model, str) or not model:
        raise _wrong_type("model", "a non-empty string", model)
    return model


def _flag(body: Body, name: str) -> bool:
    value = _decoded(body, name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _wrong_type(name, "a boolean", value)
    return value


def _check_stream_options(body: Body, stream: bool) -> None:
    if not body.has("stream_options"):
        return
    if not stream:
        message = "'stream_options' may only be set when 'stream' is true."
        raise Refused(Kind.INVALID_VALUE, message, "stream_options")
    if body.size("stream_options") > _LONGEST_OPTIONS:
        raise Refused(Kind.INVALID_VALUE, "'stream_options' is too long.", "stream_options")
    try:
        options = stream_options(body)
    except msgspec.DecodeError as error:
        raise Refused(Kind.INVALID_VALUE, "'stream_options' must be an object.", "stream_options") from error
    for name in ("include_usage", "continuous_usage_stats"):
        if not isinstance(options.get(name), bool | None):
            raise _wrong_type(f"stream_options.{name}", "a boolean", options[name])


def _check_positive(body: Body, name: str) -> None:
    value = _decoded(body, name)
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong_type(name, "an integer", value)
    if value < 1:
        raise Refused(Kind.INVALID_VALUE, f"'{name}' must be at least 1, not {value}.", name)


def _messages(body: Body) -> tuple[msgspec.Raw, ...]:
    _require(body, "messages")
    try:
        messages = body.items("messages")
    except msgspec.DecodeError as error:
        raise Refused(Kind.INVALID_VALUE, "'messages' must be an array of messages.", "messages") from error
    if not messages:
        raise Refused(Kind.INVALID_VALUE, "'messages' must hold at least one message.", "messages")
    if len(messages) > MAX_MESSAGES:
        raise Refused(
            Kind.INVALID_VALUE, f"'messages' must hold at most {MAX_MESSAGES} messages.", "messages"
        )
    begins = bytes([memoryview(message)[0] for message in messages])
    if begins.count(_OPENING_BRACE) != len(begins):
        wrong = next(index for index, byte in enumerate(begins) if byte != _OPENING_BRACE)
        name = f"messages[{wrong}]"
        raise Refused(Kind.INVALID_VALUE, f"'{name}' must be an object.", name)
    return tuple(messages)


def _decoded(body: Body, name: str) -> Any:
    """A small member decoded; a huge value where a scalar belongs is refused undecoded."""
    if body.size(name) > 4096:
        raise Refused(Kind.INVALID_VALUE, f"'{name}' is too long.", name)
    try:
        return body.value(name)
    except msgspec.DecodeError as error:
        raise Refused(Kind.INVALID_VALUE, f"'{name}' is not valid JSON.", name) from error


def _wrong_type(name: str, wanted: str, value: object) -> Refused:
    """Names the type found, never the value: an error must not carry the request's text."""
    found = {str: "a string", bool: "a boolean", int: "an integer", float: "a number"}.get(type(value))
    found = found or (
        "an array" if isinstance(value, list) else "an object" if isinstance(value, dict) else "null"
    )
    return Refused(Kind.INVALID_VALUE, f"'{name[:_SHOWN_NAME]}' must be {wanted}, not {found}.", name)
