"""What vLLM's render routes answer: the call that would be made of a request, its tokens among it. Pure.

Sampling values that the twin has no use for are the engine's own defaults. The engine leaves members that
have their default value out of `sampling_params`; so does this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.inference.twin_requests import ChatRequest, CompletionRequest

_USUAL_LIMIT: Final = 16
_DELTAS, _WHOLE = 1, 2  # how an engine hands out its output


def generate_request(
    request_id: str, asked: ChatRequest | CompletionRequest, prompt: Sequence[int], limit: int
) -> dict[str, Any]:
    """The body of one prompt's call, of at most `limit` new tokens."""
    return {
        "request_id": request_id,
        "token_ids": list(prompt),
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": _sampling(asked, limit),
        "model": asked.model,
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": bool(asked.stream),
        "stream_options": _stream_options(asked),
        "cache_salt": asked.cache_salt,
        "priority": 0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def _sampling(asked: ChatRequest | CompletionRequest, limit: int) -> dict[str, Any]:
    members: tuple[tuple[str, Any, Any], ...] = (
        ("n", asked.choices, 1),
        ("presence_penalty", 0.0, None),
        ("frequency_penalty", 0.0, None),
        ("repetition_penalty", 1.0, None),
        ("temperature", 1.0 if asked.temperature is None else asked.temperature, None),
        ("top_p", 1.0 if asked.top_p is None else asked.top_p, None),
        ("min_p", 0.0, None),
        ("seed", asked.seed, None),
        ("stop", list(asked.stops), None),
        ("stop_token_ids", [], None),
        ("ignore_eos", asked.ignore_eos, False),
        ("max_tokens", limit, _USUAL_LIMIT),
        ("min_tokens", asked.min_tokens, 0),
        ("logprobs", asked.wanted_logprobs, None),
        ("prompt_logprobs", asked.prompt_logprobs, None),
        ("skip_special_tokens", not asked.calls_tools, True),
        ("include_stop_str_in_output", asked.include_stop_str_in_output, False),
        ("output_kind", _DELTAS if asked.stream else _WHOLE, None),
        ("skip_clone", True, None),
        ("bad_words", [], None),
        ("skip_reading_prefix_cache", asked.prompt_logprobs is not None, None),
    )
    return {name: value for name, value, usual in members if value is not None and value != usual}


def _stream_options(asked: ChatRequest | CompletionRequest) -> dict[str, bool] | None:
    options = asked.stream_options
    if not asked.stream or options is None:
        return None
    return {
        "include_usage": bool(options.include_usage),
        "continuous_usage_stats": bool(options.continuous_usage_stats),
    }
