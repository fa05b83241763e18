"""The official `openai` client through the gateway to real vLLM: only its base URL and key are changed."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

import openai
import pytest

from ctxgate.gateway.ledger import Outcome
from ctxgate.inference.prompts import PromptRenderer
from e2e.gateway_process import (
    TRUSTED_SECRET,
    Gateway,
    GatewayConfig,
    price,
    serving,
    settled_counters,
    until,
)
from e2e.sdk import HELLO, HISTORY, LOOK, RUN_ON, client_of, without_spaces

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ctxgate.gateway.ledger import Attempt
    from e2e.engine import Engine

pytestmark = pytest.mark.e2e

WINDOW: Final = 131_072


@pytest.fixture(scope="module")
def gateway(engines: Mapping[str, Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    pools = {name: [engine.url] for name, engine in engines.items()}
    with serving(GatewayConfig(tmp_path_factory.mktemp("sdk"), pools, {"abort_drain_s": 60})) as running:
        yield running


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    """An ordinary client."""
    with client_of(gateway.url) as made:
        yield made


@pytest.fixture(scope="module")
def trusted(gateway: Gateway) -> Iterator[openai.OpenAI]:
    """A client whose key may set fields of the engine."""
    with client_of(gateway.url, TRUSTED_SECRET) as made:
        yield made


@pytest.fixture(scope="module")
def direct(engines: Mapping[str, Engine]) -> Iterator[openai.OpenAI]:
    """The engine of the pool `standard` without a gateway."""
    with client_of(engines["standard"].url, "none") as made:
        yield made


def row_of(gateway: Gateway, request_id: str | None) -> Attempt:
    """The one row of a request; waits until it is settled."""

    def found() -> list[Attempt]:
        return [row for row in gateway.rows() if row.opened.request_id == request_id]

    (row,) = until(found, 30, f"request {request_id} is settled")
    attempt: Attempt = row
    return attempt


def tokens_of(row: Attempt) -> tuple[int | None, int | None, int | None]:
    usage = row.settled.usage
    return usage.prompt, usage.cached.value, usage.output.value


# --- Answers ---


@pytest.mark.parametrize(("model", "pool"), [("tiny", "standard"), ("tiny-fast", "fast")])
def test_a_chat_is_answered_metered_and_priced(
    client: openai.OpenAI, gateway: Gateway, model: str, pool: str
) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=HELLO, max_tokens=6, seed=7, extra_headers={"x-ctxgate-task": "sdk chat"}
    )
    answer = raw.parse()
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert raw.headers["x-ctxgate-pool"] == pool
    assert raw.headers["x-ctxgate-replica"] == f"{pool}-0"
    assert raw.headers["x-ctxgate-task"] == "sdk chat"
    assert raw.headers["x-request-id"].startswith("req_")
    assert raw.request_id == raw.headers["x-request-id"]
    row = row_of(gateway, raw.request_id)
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens or 0
    assert tokens_of(row) == (usage.prompt_tokens, cached, usage.completion_tokens)
    assert (row.opened.task, row.opened.team, row.opened.pool) == ("sdk chat", "research", pool)
    nano = sum(price(pool, usage.prompt_tokens - cached, cached, usage.completion_tokens))
    assert row.settled.charge.total == nano
    assert nano == round(float(raw.headers["x-ctxgate-cost"]) * 1e9)
    assert nano == round(json.loads(raw.text)["usage"]["cost"] * 1e9)


@pytest.mark.parametrize("usage", [True, False, None])
def test_a_stream_has_a_usage_chunk_only_if_asked_for(
    trusted: openai.OpenAI, gateway: Gateway, usage: bool | None
) -> None:
    options: Any = openai.omit if usage is None else {"include_usage": usage}
    with trusted.chat.completions.with_streaming_response.create(
        model="tiny", messages=HELLO, max_tokens=9, stream=True, stream_options=options, extra_body=RUN_ON
    ) as response:
        request_id = response.headers["x-request-id"]
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        chunks = list(response.parse())
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert reasons == ["length"]
    row = row_of(gateway, request_id)
    assert row.settled.usage.output.value == 9
    assert row.settled.ttft_us is not None
    told = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert len(told) == (1 if usage else 0)
    assert all(chunk.choices for chunk in chunks[: -1 if usage else None])
    if usage:
        assert chunks[-1].choices == []
        assert told[0].completion_tokens == 9
        assert told[0].model_dump()["cost"] * 1e9 == pytest.approx(row.settled.charge.total)


def test_several_choices_and_logprobs(trusted: openai.OpenAI) -> None:
    answer = trusted.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=4, n=2, logprobs=True, top_logprobs=3, extra_body=RUN_ON
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert [len(token.top_logprobs) for token in choice.logprobs.content or []] == [3, 3, 3, 3]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_the_same_seed_gives_the_same_words(trusted: openai.OpenAI) -> None:
    def words(seed: int) -> str | None:
        answer = trusted.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=12, temperature=1.0, seed=seed, extra_body=RUN_ON
        )
        return answer.choices[0].message.content

    words(1)  # from now on all hit the same cached blocks
    assert words(1) == words(1)
    assert len({words(seed) for seed in (1, 2, 3)}) > 1


def test_tools_and_their_history(client: openai.OpenAI, trusted: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model="tiny", messages=HISTORY, max_tokens=4)
    auto = trusted.chat.completions.create(
        model="tiny", messages=HISTORY, tools=[LOOK], tool_choice="auto", max_tokens=4, extra_body=RUN_ON
    )
    assert plain.usage is not None
    assert auto.usage is not None
    assert auto.usage.prompt_tokens > plain.usage.prompt_tokens, "the tools are part of the prompt"
    assert auto.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [True, False])
def test_a_forced_tool_call_comes_through(client: openai.OpenAI, stream: bool) -> None:
    """The engine's grammar makes even a random model call the tool."""
    forced: Any = {"type": "function", "function": {"name": "look"}}
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": [LOOK], "tool_choice": forced}
    asked |= {"max_tokens": 200, "temperature": 0, "logit_bias": without_spaces()}
    if stream:
        calls = [
            call
            for chunk in client.chat.completions.create(**asked, stream=True)
            for choice in chunk.choices
            for call in choice.delta.tool_calls or ()
        ]
        name = "".join(call.function.name or "" for call in calls if call.function)
        arguments = "".join(call.function.arguments or "" for call in calls if call.function)
        assert calls[0].id
    else:
        message = client.chat.completions.create(**asked).choices[0].message
        assert message.tool_calls is not None
        (whole,) = message.tool_calls
        assert whole.type == "function"
        name, arguments = whole.function.name, whole.function.arguments
        assert whole.id
    assert name == "look"
    assert isinstance(json.loads(arguments)["deep"], bool)


def test_structured_output(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        response_format=wanted,
        max_tokens=200,
        temperature=0,
        logit_bias=without_spaces(),
    )
    assert json.loads(answer.choices[0].message.content or "")["colour"] in ("red", "green")


def test_completions_whole_streamed_and_with_several_prompts(trusted: openai.OpenAI) -> None:
    made: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "extra_body": RUN_ON}
    whole = trusted.completions.create(prompt="Once", **made)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 5
    streamed = list(trusted.completions.create(prompt="Once", stream=True, **made))
    assert [c.finish_reason for chunk in streamed for c in chunk.choices if c.finish_reason] == ["length"]
    assert all(chunk.choices and chunk.usage is None for chunk in streamed)
    several = trusted.completions.create(prompt=["Once", "Twice", "Thrice"], **made)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    tokens = trusted.completions.create(prompt=[[40, 41, 42], [43, 44]], **made)
    assert tokens.usage is not None
    assert (tokens.usage.prompt_tokens, tokens.usage.completion_tokens) == (5, 10)


def test_extra_fields_reach_the_engine(client: openai.OpenAI) -> None:
    """`top_k` 1 makes a hot sample greedy; every token is a stop token, so there is one output token."""

    def words(**extra: Any) -> str | None:
        answer = client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=10, temperature=1.5, extra_body=extra
        )
        return answer.choices[0].message.content

    words(top_k=1)
    assert len({words(top_k=1) for _ in range(4)}) == 1
    every = list(range(PromptRenderer().tokenizer.get_vocab_size()))
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=10, extra_body={"stop_token_ids": every}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


async def test_the_async_client_answers_and_streams_side_by_side(gateway: Gateway) -> None:
    async def streamed(client: openai.AsyncOpenAI, number: int) -> int:
        made = await client.chat.completions.create(
            model=("tiny", "tiny-fast")[number % 2],
            messages=HELLO,
            max_tokens=number + 1,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=RUN_ON,
        )
        (tokens,) = [chunk.usage.completion_tokens async for chunk in made if chunk.usage is not None]
        return tokens

    async with openai.AsyncOpenAI(
        base_url=f"{gateway.url}/v1/", api_key=TRUSTED_SECRET, max_retries=0
    ) as client:
        assert await asyncio.gather(*(streamed(client, n) for n in range(16))) == list(range(1, 17))
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)
        assert answer.choices[0].message.role == "assistant"
        assert [model.id async for model in client.models.list()] == ["tiny", "tiny-fast"]


def test_models_are_listed_and_found_with_their_window(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "tiny-fast"]
    found = client.models.retrieve("tiny-fast")
    assert (found.id, found.object) == ("tiny-fast", "model")
    assert found.model_dump()["max_model_len"] == WINDOW
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("huge")
    assert caught.value.code == "model_not_found"


# --- Refusals ---


def test_a_prompt_beyond_the_window(client: openai.OpenAI, gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[40] * (WINDOW + 1), max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.type == "invalid_request_error"
    assert str(WINDOW) in caught.value.message
    row = row_of(gateway, caught.value.request_id)
    assert (row.settled.outcome, row.settled.charge.total) == (Outcome.REJECTED, 0)


def test_an_unknown_model_and_a_wrong_key(client: openai.OpenAI, gateway: Gateway) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="huge", messages=HELLO)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    stranger = client_of(gateway.url, "cg-" + "x" * 40)
    with pytest.raises(openai.AuthenticationError) as refused:
        stranger.chat.completions.create(model="tiny", messages=HELLO)
    assert refused.value.code == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_embeddings_that_the_engine_does_not_offer_are_a_clean_error(
    client: openai.OpenAI, direct: openai.OpenAI
) -> None:
    """A generating vLLM has no such route and answers `{"detail": ...}`, which no SDK can read."""
    errors = []
    for one in (client, direct):
        with pytest.raises(openai.NotFoundError) as caught:
            one.embeddings.create(model="tiny", input="a text")
        errors.append(caught.value)
    through, engine = (error.response.json() for error in errors)
    assert engine == {"detail": "Not Found"}
    assert through["error"]["message"] == "Not Found"
    assert errors[0].type == "invalid_request_error"


@pytest.mark.parametrize("name", ["cache_salt", "priority", "kv_transfer_params", "request_id"])
def test_fields_of_the_engine_are_refused_by_name(
    client: openai.OpenAI, engines: Mapping[str, Engine], name: str
) -> None:
    before = settled_counters(engines["standard"])
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, extra_body={name: "7"})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
    assert engines["standard"].counters() == before


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_p": 7}, {"stop": ["a"] * 1000}])
def test_the_engines_own_refusals_keep_their_words(
    client: openai.OpenAI, direct: openai.OpenAI, bad: dict[str, Any]
) -> None:
    bodies = []
    for one in (client, direct):
        try:
            one.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1, **bad)
        except openai.BadRequestError as error:
            bodies.append(error.response.content)
    assert len(bodies) in (0, 2)
    assert len(set(bodies)) == len(bodies) // 2
