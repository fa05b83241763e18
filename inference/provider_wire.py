"""Between OpenAI's chat wire and LiteLLM's calls: requests in, chunks, usage and errors out. Pure.

A client's body never reaches LiteLLM's arguments as it is: some of them say where a call goes, with which
key, or that it is not made at all. Only the parameters named here do.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

SCHEME: Final = "provider://"
PASSED: Final = frozenset(
    {
        "frequency_penalty",
        "function_call",
        "functions",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "n",
        "parallel_tool_calls",
        "presence_penalty",
        "prompt_cache_key",
        "reasoning_effort",
        "response_format",
        "safety_identifier",
        "seed",
        "stop",
        "temperature",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "user",
        "verbosity",
    }
)
"""Parameters of a chat call that go out. Not `service_tier`: what is priced is the usual one."""

_OWN_MARK: Final = "ctxgate"
_LONGEST_MESSAGE: Final = 2000
_NAMES: Final = re.compile(r"(?:(?:litellm\.)?[A-Za-z]{0,60}(?:Error|Exception|Timeout)(?: -|:) ){0,4}")
_KEYS: Final = re.compile(
    r"\b(?:sk|rk|pk)-[\w*.-]{6,}|(?<=bearer )\S{8,}|\bAIza[\w-]{6,}|(?<=[?&]key=)[^\s&\"']+", re.IGNORECASE
)
_KEY_REFUSED: Final = re.compile(
    r"API_KEY_INVALID|API key not valid|\binvalid[ _](?:x-)?api[ _-]key", re.IGNORECASE
)
_OWN_FAULT: Final = frozenset({401, 403, 407})
KEY_REFUSED: Final = "The provider refused the gateway's key."
"""What a client is told then: nothing is wrong with its own."""
_HIDDEN: Final = "***"
_NOT_CONNECTED: Final = frozenset(
    {"ConnectError", "ConnectTimeout", "ClientConnectorError", "ConnectionRefusedError", "gaierror"}
)
_BROKEN: Final = frozenset(
    {
        "ClientPayloadError",
        "ConnectionResetError",
        "ReadError",
        "ReadTimeout",
        "RemoteProtocolError",
        "ServerDisconnectedError",
        "WriteError",
    }
)
_STATUS: Final = {408: 504, 529: 503}
_DETAILS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "prompt_tokens_details": {
        "cached_tokens": ("cached_tokens",),
        "created_cache_tokens": ("cache_creation_tokens", "cache_write_tokens"),
    },
    "completion_tokens_details": {"reasoning_tokens": ("reasoning_tokens",)},
}


class BadRequest(Exception):
    """A body that is no chat call; the message says why."""


def provider_url(pool: str) -> str:
    """The root by which the calls of a pool at a provider are told from those to servers."""
    return SCHEME + pool


def pool_of(url: str) -> tuple[str, str] | None:
    """The pool and the path of such a call; None for a server's URL."""
    if not url.startswith(SCHEME):
        return None
    pool, _, path = url[len(SCHEME) :].partition("/")
    return pool, f"/{path}"


def arguments(body: bytes) -> dict[str, Any]:
    """A chat body as arguments of a LiteLLM call, but for the model. Raises `BadRequest`."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest("The body is not valid JSON.") from None
    messages = document.get("messages") if isinstance(document, dict) else None
    if not isinstance(messages, list):
        raise BadRequest("'messages' must be a list.")
    found = {name: value for name, value in document.items() if name in PASSED and value is not None}
    found["messages"] = [_unmarked(one) for one in messages]
    if document.get("stream") is True:
        found |= {"stream": True, "stream_options": {"include_usage": True}}
    return found


def check_media(messages: Sequence[object]) -> None:
    """Raise `BadRequest` for an image elsewhere: but for OpenAI, LiteLLM would fetch it from this host."""
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            image = part.get("image_url") if isinstance(part, dict) else None
            url = image.get("url") if isinstance(image, dict) else image
            if url is not None and not (isinstance(url, str) and url.startswith("data:")):
                raise BadRequest(f"messages[{number}]: this model takes images as data: URLs only.")


def _unmarked(message: object) -> object:
    """A message without the gateway's own marks."""
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    if isinstance(content, list):
        content = [_without_mark(part) for part in content]
        return _without_mark(message) | {"content": content}
    return _without_mark(message)


def _without_mark(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: member for name, member in value.items() if name != _OWN_MARK}


def asked_model(body: bytes) -> str | None:
    """The name that the body asks for."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    model = document.get("model") if isinstance(document, dict) else None
    return model if isinstance(model, str) else None


def answer(dumped: Mapping[str, Any], model: str | None, *, usage_reported: bool) -> dict[str, Any]:
    """A whole answer, or one chunk of a stream, as OpenAI's wire has it, under the name that was asked for.

    `usage_reported` is False where the provider told no usage and LiteLLM has counted by itself: such
    figures are no measurement and are left out.
    """
    found = {name: value for name, value in dumped.items() if name not in ("usage", "model", "choices")}
    found.pop("provider_specific_fields", None)
    found |= {
        "model": model or dumped.get("model"),
        "choices": [_choice(c) for c in dumped.get("choices") or ()],
    }
    usage = dumped.get("usage")
    if usage_reported and isinstance(usage, dict):
        found["usage"] = usage_of(usage)
    return found


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    found = {"finish_reason": None} | dict(choice)
    found.pop("provider_specific_fields", None)
    for name in ("message", "delta"):
        if isinstance(inner := found.get(name), dict):
            found[name] = {k: v for k, v in inner.items() if k != "provider_specific_fields"}
    return found


def usage_of(usage: Mapping[str, Any]) -> dict[str, Any]:
    """LiteLLM's usage as vLLM writes it: the prompt contains cached tokens; what is not told is left out."""
    found = {
        name: usage[name]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens")
        if usage.get(name) is not None
    }
    for name, members in _DETAILS.items():
        told = usage.get(name)
        if isinstance(told, dict):
            details = {
                ours: next((told[one] for one in theirs if told.get(one) is not None), None)
                for ours, theirs in members.items()
            }
            if known := {ours: value for ours, value in details.items() if value is not None}:
                found[name] = known
    return found


def names_of(error: BaseException) -> Iterator[str]:
    """The class names along an error's causes."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield type(cause).__name__
        cause = cause.__cause__ or cause.__context__


def not_connected(error: BaseException) -> bool:
    """Whether no connection was made, so that the provider saw nothing."""
    return not _NOT_CONNECTED.isdisjoint(names_of(error))


def is_broken(error: BaseException) -> bool:
    """Whether the connection broke after the request was sent."""
    return not _BROKEN.isdisjoint(names_of(error))


def refusal(error: BaseException, hidden: Iterable[str] = ()) -> tuple[int, bytes]:
    """The status and OpenAI's error body of what LiteLLM raised, without the `hidden` texts and any key.

    A key that the provider refuses is the gateway's: 401, but the body, for clients, tells of a 502.
    """
    status = getattr(error, "status_code", None)
    status = _STATUS.get(status, status) if isinstance(status, int) else 500
    if not 400 <= status < 600:
        status = 500
    told = getattr(error, "message", None)
    if status in _OWN_FAULT or (status == 400 and isinstance(told, str) and _KEY_REFUSED.search(told)):
        return 401, error_body(502, KEY_REFUSED)
    message = _NAMES.sub("", told if isinstance(told, str) else "", count=1).strip()
    for text in filter(None, hidden):
        message = message.replace(text, _HIDDEN)
    message = _KEYS.sub(_HIDDEN, message)
    return status, error_body(status, message[:_LONGEST_MESSAGE] or "The provider gave no readable error.")


def error_body(status: int, message: str) -> bytes:
    """OpenAI's error envelope."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})
