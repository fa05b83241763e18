"""Calls aborted before their first token are free, whatever the engine's usage says of their prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ctxgate.gateway.flow import Surface
from ctxgate.gateway.metering import Basis, usage_of_answer, usage_of_stream
from ctxgate.inference.chat_stream import StreamReader, StreamTerms, finish_facts
from ctxgate.inference.estimate import TokenRatio
from ctxgate.inference.usage import NOTHING_USED, Certainty
from ctxgate.inference.usage_meter import UsageDialect

BASIS = Basis(prompt_tokens=70, cached_tokens=None, output=TokenRatio())


def usage_object(output: int) -> dict[str, Any]:
    details = {"cached_tokens": 0, "created_cache_tokens": 0}
    return {"prompt_tokens": 64, "completion_tokens": output, "prompt_tokens_details": details}


def whole(output: int, reason: str, choices: int) -> bytes:
    every = [{"index": i, "message": {"content": ""}, "finish_reason": reason} for i in range(choices)]
    return json.dumps({"choices": every, "usage": usage_object(output), "metrics": None}).encode()


@pytest.mark.parametrize("choices", [1, 3])
def test_a_whole_answer_aborted_before_its_first_token_is_free(choices: int) -> None:
    facts = finish_facts(whole(0, "abort", choices))
    metered = usage_of_answer(facts, UsageDialect(choices=choices), Surface.CHAT, BASIS)
    assert metered.usage == NOTHING_USED


@pytest.mark.parametrize("choices", [1, 3])
def test_a_stream_aborted_before_its_first_token_is_free(choices: int) -> None:
    reader = StreamReader(StreamTerms(dialect=UsageDialect(choices=choices)))
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    for data in (json.dumps(role), json.dumps({"choices": [], "usage": usage_object(0)}), "[DONE]"):
        reader.on_event(f"data: {data}\n\n".encode())
    assert usage_of_stream(reader, BASIS).usage == NOTHING_USED


@pytest.mark.parametrize(("output", "reason"), [(5, "abort"), (5, "length")])
def test_what_was_begun_is_counted(output: int, reason: str) -> None:
    facts = finish_facts(whole(output, reason, 2))
    usage = usage_of_answer(facts, UsageDialect(choices=2), Surface.CHAT, BASIS).usage
    assert (usage.prompt, usage.output.value) == (64, output)
    assert usage.output.certainty is Certainty.MEASURED


def test_an_answer_without_output_that_was_not_aborted_is_counted() -> None:
    facts = finish_facts(whole(0, "stop", 2))
    assert usage_of_answer(facts, UsageDialect(choices=2), Surface.CHAT, BASIS).usage.prompt == 64
