"""Requests to LiteLLM's arguments, and its answers and errors to OpenAI's wire."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ctxgate.inference import provider_wire as wire
from ctxgate.inference.provider_wire import BadRequest


def test_only_known_parameters_become_arguments() -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x", "ctxgate": {"pin": True}}, "odd"],
        "api_base": "http://elsewhere",
        "api_key": "k",
        "mock_response": "y",
        "metadata": {"a": 1},
        "fallbacks": ["other"],
        "temperature": 0,
        "tools": None,
    }
    assert wire.arguments(json.dumps(body).encode()) == {
        "messages": [{"role": "user", "content": "x"}, "odd"],
        "temperature": 0,
    }
    found = wire.arguments(json.dumps(body | {"stream": True, "stream_options": {"x": 1}}).encode())
    assert (found["stream"], found["stream_options"]) == (True, {"include_usage": True})
    part = {"type": "text", "text": "t"}
    marked = [{"role": "user", "content": [part | {"ctxgate": {"stability": "stable"}}]}]
    assert wire.arguments(json.dumps({"messages": marked}).encode())["messages"][0]["content"] == [part]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": "x"}', b"[" * 100_000])
def test_what_is_no_chat_call_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        wire.arguments(body)


def test_usage_leaves_out_what_was_not_told() -> None:
    usage = {
        "prompt_tokens": 120,
        "completion_tokens": 5,
        "total_tokens": 125,
        "cost": 0.5,
        "cache_read_input_tokens": 80,
        "prompt_tokens_details": {"cached_tokens": 0, "cache_creation_tokens": 10, "text_tokens": 30},
        "completion_tokens_details": {"reasoning_tokens": None},
    }
    assert wire.usage_of(usage) == {
        "prompt_tokens": 120,
        "completion_tokens": 5,
        "total_tokens": 125,
        "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 10},
    }
    assert wire.usage_of({"prompt_tokens": 3}) == {"prompt_tokens": 3}


def test_an_answer_has_the_name_that_was_asked_for_and_measured_usage_only() -> None:
    dumped = {
        "id": "1",
        "model": "gpt-2026",
        "choices": [{"index": 0, "delta": {"content": "x", "provider_specific_fields": {}}}],
        "usage": {"prompt_tokens": 3},
        "provider_specific_fields": {},
    }
    assert wire.answer(dumped, "mine", usage_reported=False) == {
        "id": "1",
        "model": "mine",
        "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}],
    }
    assert wire.answer(dumped, None, usage_reported=True)["usage"] == {"prompt_tokens": 3}


class Told(Exception):
    def __init__(self, message: str, status_code: Any) -> None:
        super().__init__(message)
        self.message = message
        self.status_code = status_code


@pytest.mark.parametrize(
    ("message", "told", "status", "shown"),
    [
        ("litellm.BadRequestError: OpenAIException - no such thing", 400, 400, "no such thing"),
        ("litellm.Timeout: slow", 408, 504, "slow"),
        ("litellm.InternalServerError: AnthropicException - Overloaded", 529, 503, "Overloaded"),
        ("litellm.RateLimitError: RateLimitError: OpenAIException - wait", 429, 429, "wait"),
        ("", None, 500, "The provider gave no readable error."),
        ("x", 200, 500, "x"),
    ],
)
def test_errors(message: str, told: Any, status: int, shown: str) -> None:
    found, body = wire.refusal(Told(message, told))
    assert (found, json.loads(body)["error"]["message"]) == (status, shown)


GEMINI = (
    'litellm.BadRequestError: GeminiException - {"error": {"code": 400, "message": "API key not valid. '
    'Please pass a valid API key.", "details": [{"reason": "API_KEY_INVALID"}]}}'
)


@pytest.mark.parametrize(
    ("message", "told"),
    [(GEMINI, 400), (GEMINI, 401), ("no access for AIzaSy-key-of-ours", 403), ("invalid x-api-key", 400)],
)
def test_a_key_that_the_provider_refuses_is_not_the_clients(message: str, told: int) -> None:
    status, body = wire.refusal(Told(message, told), ("AIzaSy-key-of-ours",))
    error = {"message": "The provider refused the gateway's key.", "type": "server_error"}
    assert (status, json.loads(body)["error"]) == (401, error | {"param": None, "code": 502})


def test_keys_in_addresses_are_not_shown() -> None:
    told = "POST https://g.example/v1/m:generate?alt=sse&key=secret-1&x=2 failed for AIzaSyAbc_123-4"
    _, body = wire.refusal(Told(told, 429))
    shown = "POST https://g.example/v1/m:generate?alt=sse&key=***&x=2 failed for ***"
    assert json.loads(body)["error"]["message"] == shown


@pytest.mark.parametrize("image", [{"url": "https://a.example/x.png"}, "http://a.example/x.png", {"url": 1}])
def test_an_image_that_the_gateway_would_have_to_fetch_is_refused(image: object) -> None:
    inline = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    kept = {"role": "user", "content": [{"type": "text", "text": "http://a.example"}, inline]}
    wire.check_media(
        [kept, "odd", {"role": "user", "content": "x"}, {"content": ["odd", {"image_url": None}]}]
    )
    with pytest.raises(BadRequest, match=r"messages\[1\]: .* data: URLs only"):
        wire.check_media([kept, {"role": "user", "content": [{"type": "image_url", "image_url": image}]}])


def test_errors_show_neither_keys_nor_where_the_provider_is() -> None:
    told = "Incorrect key own-key-1 at https://internal.example/v1; also sk-live-12345 and Bearer abcdefgh12."
    _, body = wire.refusal(Told(told, 400), ("own-key-1", "https://internal.example/v1", ""))
    assert json.loads(body)["error"]["message"] == "Incorrect key *** at ***; also *** and Bearer ***"
    _, body = wire.refusal(Told("The task-based model is a risk-free one.", 400))
    assert json.loads(body)["error"]["message"] == "The task-based model is a risk-free one."


def test_what_happened_to_the_connection_is_read_from_the_causes() -> None:
    class ConnectError(Exception):
        pass

    class ReadError(Exception):
        pass

    def raised(cause: Exception) -> Exception:
        error = Told("x", 500)
        error.__cause__ = cause
        return error

    assert wire.not_connected(raised(ConnectError()))
    assert not wire.not_connected(raised(ReadError()))
    assert wire.is_broken(raised(ReadError()))
    assert not wire.is_broken(Told("x", 500))
    looped = Told("x", 500)
    looped.__cause__ = looped
    assert not wire.is_broken(looped)


def test_urls_name_pools() -> None:
    assert wire.pool_of(wire.provider_url("hosted") + "/v1/models") == ("hosted", "/v1/models")
    assert wire.pool_of("http://10.0.0.1:8000/v1/models") is None
