"""The official `openai` client through the gateway to real vLLM: only its base URL and key are changed."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import httpx
import openai
import pytest

from ctxgate.gateway.demo_servers import ctxgate_command
from ctxgate.gateway.ledger import Outcome
from e2e.gateway_process import (
    SECRET,
    TRUSTED_SECRET,
    Gateway,
    GatewayConfig,
    booked,
    engine_idle,
    price,
    serving,
    settled_counters,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

    from ctxgate.gateway.ledger import Attempt
    from e2e.engine import Engine

pytestmark = pytest.mark.e2e

WINDOW: Final = 131_072
HELLO: Final[list[ChatCompletionMessageParam]] = [
    {"role": "user", "content": "Hello there, what is a ledger?"}
]
LOOK: Final[ChatCompletionToolParam] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"deep": {"type": "boolean"}},
            "required": ["deep"],
            "additionalProperties": False,
        },
    },
}
HISTORY: Final[list[ChatCompletionMessageParam]] = [
    *HELLO,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"deep": true}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call-1", "content": "A book of accounts."},
]
RUN_ON: Final = {"ignore_eos": True}


@pytest.fixture(scope="module")
def gateway(engines: Mapping[str, Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    pools = {name: [engine.url] for name, engine in engines.items()}
    with serving(GatewayConfig(tmp_path_factory.mktemp("sdk"), pools, {"abort_drain_s": 60})) as running:
        yield running


def client_of(url: str, key: str = SECRET) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)


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
    if stream:
        calls = [
            call
            for chunk in client.chat.completions.create(**asked, max_tokens=200, temperature=0, stream=True)
            for choice in chunk.choices
            for call in choice.delta.tool_calls or ()
        ]
        name = "".join(call.function.name or "" for call in calls if call.function)
        arguments = "".join(call.function.arguments or "" for call in calls if call.function)
        assert calls[0].id
    else:
        message = client.chat.completions.create(**asked, max_tokens=200, temperature=0).choices[0].message
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
        model="tiny", messages=HELLO, response_format=wanted, max_tokens=200, temperature=0
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
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=10, extra_body={"stop_token_ids": list(range(1000))}
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


def test_embeddings_of_a_model_that_has_none_are_refused_in_the_engines_words(
    client: openai.OpenAI, direct: openai.OpenAI
) -> None:
    errors = []
    for one in (client, direct):
        with pytest.raises(openai.APIStatusError) as caught:
            one.embeddings.create(model="tiny", input="a text")
        errors.append(caught.value)
    through, engine = errors
    assert (through.status_code, through.message) == (engine.status_code, engine.message)
    assert 400 <= through.status_code < 500


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


# --- Time-outs, replicas that fail ---


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_times_out_is_metered_exactly(
    trusted: openai.OpenAI, gateway: Gateway, engines: Mapping[str, Engine], stream: bool
) -> None:
    engine = engines["fast"]
    before, known = settled_counters(engine), {row.opened.attempt_id for row in gateway.rows()}
    impatient = trusted.with_options(timeout=0.7)
    with pytest.raises(openai.APITimeoutError):
        impatient.chat.completions.create(
            model="tiny-fast", messages=HELLO, max_tokens=50_000, extra_body=RUN_ON
        )
    if stream:
        endless = trusted.chat.completions.create(
            model="tiny-fast", messages=HELLO, max_tokens=50_000, stream=True, extra_body=RUN_ON
        )
        for number, _ in enumerate(endless):
            if number == 5:
                break
        endless.close()
    until(gateway.idle, 60, "the gateway is idle")
    until(lambda: engine_idle(engine), 60, "the engine has stopped")
    rows = [row for row in gateway.rows() if row.opened.attempt_id not in known]
    assert [row.settled.outcome for row in rows] == [Outcome.CLIENT_DISCONNECTED] * (2 if stream else 1)
    used = booked(rows)
    assert used == engine.counters() - before
    assert 0 < used.generation < 50_000


def test_a_replica_that_dies_is_left_without_the_client_noticing(
    engines: Mapping[str, Engine], tmp_path: Path
) -> None:
    """Two replicas, one a twin that is killed right before the requests: no probe has noticed yet."""
    with twin(tmp_path) as (url, process):
        config = GatewayConfig(tmp_path, {"standard": [engines["standard"].url, url]})
        with serving(config) as gateway, client_of(gateway.url) as client:
            process.kill()
            process.wait()
            for number in range(12):
                asked: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"Root {number}."}]
                raw = client.chat.completions.with_raw_response.create(
                    model="tiny", messages=asked, max_tokens=2
                )
                assert raw.headers["x-ctxgate-replica"] == "standard-0"
                assert raw.retries_taken == 0
            rows = gateway.rows()
    lost = [row for row in rows if row.opened.replica == "standard-1"]
    assert lost, "the dead replica was tried"
    assert {row.settled.outcome for row in lost} == {Outcome.UNREACHABLE}
    assert {row.settled.charge.total for row in lost} == {0}
    second = {row.opened.request_id for row in rows if row.opened.attempt_number == 2}
    assert second == {row.opened.request_id for row in lost}
    answered = [row for row in rows if row.opened.replica == "standard-0"]
    assert len(answered) == 12
    assert {row.settled.outcome for row in answered} == {Outcome.COMPLETED}


def test_without_any_replica_the_client_retries_and_is_told(tmp_path: Path) -> None:
    with twin(tmp_path) as (url, process), serving(GatewayConfig(tmp_path, {"standard": [url]})) as gateway:
        process.kill()
        process.wait()
        client = client_of(gateway.url).with_options(max_retries=1)
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)
        assert caught.value.status_code == 502
        assert caught.value.code == "upstream_unreachable"
        assert 'ctxgate_requests_total{status="502",surface="chat"} 2.0' in gateway.exposition()


@contextmanager
def twin(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A `ctxgate twin` process that may be killed: its URL and itself."""
    log = folder / "twin.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ctxgate_command(["twin", "--profile", "standard", "--port", "0"]), stdout=output, stderr=output
        )

    def address() -> str | None:
        assert process.poll() is None, log.read_text()
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        return found[0] if found else None

    try:
        yield until(address, 30, "the twin listens"), process
    finally:
        process.kill()
        process.wait()


# --- The same bytes as without a gateway ---

_OWN: Final = (  # what differs between two calls of one engine, and what the gateway adds
    (re.compile(r'"id":"[^"]*"'), '"id":"ID"'),
    (re.compile(r'"created":\d+'), '"created":0'),
    (re.compile(r'"(cached|created_cache)_tokens":(\d+|null)'), r'"\1_tokens":0'),
    (re.compile(r'"metrics":\{[^{}]*\}'), '"metrics":{}'),
    (re.compile(r',"cost":[0-9.e-]+'), ""),
)


def normalised(text: str) -> str:
    for pattern, instead in _OWN:
        text = pattern.sub(instead, text)
    return text


def merged(events: Iterable[str]) -> list[str]:
    """Events with neighbours that differ only in their words made one: an engine may send two at once."""
    out: list[str] = []
    words: list[str] = []
    for event in events:
        found = re.search(r'"(content|text)":("(?:[^"\\]|\\.)*")', event)
        words.append(json.loads(found[2]) if found else "")
        shape = event.replace(found[0], f'"{found[1]}":') if found else event
        if not out or out[-1] != shape:
            out.append(shape)
    return [*out, "".join(words)]


SAME: Final[list[tuple[str, dict[str, Any]]]] = [
    ("/chat/completions", {"messages": HELLO}),
    ("/chat/completions", {"messages": HISTORY, "tools": [LOOK]}),
    ("/chat/completions", {"messages": HELLO, "n": 2, "logprobs": True, "top_logprobs": 2}),
    ("/completions", {"prompt": "Once upon a time"}),
    ("/completions", {"prompt": ["Once", "Twice"], "logprobs": 2}),
]


@pytest.mark.parametrize(("path", "body"), SAME)
def test_whole_answers_are_the_engines_own_bytes(
    client: openai.OpenAI, direct: openai.OpenAI, path: str, body: dict[str, Any]
) -> None:
    request = body | {"model": "tiny", "max_tokens": 12, "temperature": 0}
    texts = []
    for one in (direct, direct, client):  # after the first, both find the same blocks in the cache
        answer = one.post(path, body=request, cast_to=httpx.Response)
        assert answer.headers["content-type"] == "application/json"
        texts.append(normalised(answer.text))
    assert texts[2] == texts[1]


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize(("path", "body"), SAME)
def test_streams_are_the_engines_own_events(
    client: openai.OpenAI, direct: openai.OpenAI, path: str, body: dict[str, Any], usage: bool
) -> None:
    request = body | {"model": "tiny", "max_tokens": 12, "temperature": 0, "stream": True}
    if usage:
        request["stream_options"] = {"include_usage": True}
    streams = []
    for one in (direct, direct, client, client):  # the first one through the gateway shows it the fingerprint
        answer = one.post(path, body=request, cast_to=httpx.Response)
        streams.append(merged(normalised(answer.text).split("\n\n")))
    assert streams[1][-3:-1] == ["data: [DONE]", ""]
    assert streams[3] == streams[1]
