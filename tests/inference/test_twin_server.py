"""The twin over real HTTP: wire shapes, refusals, counters."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest

from ctxgate.inference.engine_load import ASK_HEADER, LOAD_HEADER, EngineLoad, of_header
from support.twin import CHAT, HELLO, TEXT, USAGE, Client, chat, serving, text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.integration


@pytest.fixture
async def twin() -> AsyncIterator[Client]:
    async with serving() as client:
        yield client


async def test_a_whole_answer_and_its_repeat(twin: Client) -> None:
    long = [{"role": "user", "content": "hello " * 60}]
    first, second = [await twin.ok(CHAT, chat(messages=long), "one") for _ in range(2)]
    prompt = first["usage"]["prompt_tokens"]
    assert first["id"] == "chatcmpl-one"
    assert first["usage"]["completion_tokens"] == 5
    assert first["usage"]["total_tokens"] == prompt + 5
    assert first["choices"] == second["choices"]
    assert first["choices"][0]["finish_reason"] == "length"
    full, hit = prompt // 16 * 16, (prompt - 1) // 16 * 16
    details = [answer["usage"]["prompt_tokens_details"] for answer in (first, second)]
    assert [detail["cached_tokens"] for detail in details] == [0, hit]
    assert [detail["created_cache_tokens"] for detail in details] == [full, full - hit]
    assert first["metrics"]["queue_time_ms"] >= 0


async def test_a_stream_adds_up_to_the_whole(twin: Client) -> None:
    whole = await twin.ok(CHAT, chat(max_tokens=20))
    events = await twin.stream(CHAT, chat(max_tokens=20, stream=True))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert [event["choices"][0]["finish_reason"] for event in events][-2:] == [None, "length"]
    assert all("usage" not in event for event in events)
    assert [("system_fingerprint" in event) for event in events[-2:]] == [False, True]


async def test_usage_comes_last_and_only_when_asked(twin: Client) -> None:
    *chunks, last = await twin.stream(CHAT, chat() | USAGE)
    assert all("usage" not in chunk for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert set(last["usage"]["prompt_tokens_details"]) == {"cached_tokens", "created_cache_tokens"}
    assert last["metrics"]["time_to_first_token_ms"] >= 0


async def test_continuous_usage_is_on_every_chunk_without_details(twin: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await twin.stream(CHAT, chat(stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 5
    assert all("prompt_tokens_details" not in chunk["usage"] for chunk in chunks)
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_several_answers(twin: Client) -> None:
    long = [{"role": "user", "content": "hello " * 60}]
    answer = await twin.ok(CHAT, chat(messages=long, n=3))
    prompt = answer["usage"]["prompt_tokens"]
    texts = {choice["message"]["content"] for choice in answer["choices"]}
    assert len(texts) == 3
    assert answer["usage"]["completion_tokens"] == 15
    assert answer["metrics"] is None
    # A whole body reports the answer that ended last, and that one found the first one's blocks.
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (prompt - 1) // 16 * 16
    assert await twin.metric("prompt_tokens_total") == 3 * prompt


async def test_a_stream_of_several_answers_reports_the_first(twin: Client) -> None:
    long = [{"role": "user", "content": "hello " * 60}]
    events = await twin.stream(CHAT, chat(messages=long, n=2) | USAGE)
    assert [event["choices"][0]["index"] for event in events[:2]] == [0, 1]
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert events[-1]["usage"]["completion_tokens"] == 10


async def test_completions_default_to_sixteen_tokens(twin: Client) -> None:
    answer = await twin.ok(TEXT, {"prompt": "hello", "ignore_eos": True}, "two")
    assert answer["id"] == "cmpl-two"
    assert answer["usage"]["completion_tokens"] == 16


async def test_completions_take_lists_and_echo(twin: Client) -> None:
    answer = await twin.ok(TEXT, text(["hello", "bye"], n=2, echo=True))
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [one.startswith("hello") for one in texts] == [True, True, False, False]
    assert [one.startswith("bye") for one in texts] == [False, False, True, True]
    assert answer["usage"]["completion_tokens"] == 20


async def test_a_completion_stream_echoes_once(twin: Client) -> None:
    events = await twin.stream(TEXT, text(echo=True) | USAGE)
    whole = await twin.ok(TEXT, text(echo=True))
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole["choices"][0]["text"]
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_an_answer_can_be_continued_from_its_tokens(twin: Client) -> None:
    first = await twin.ok(TEXT, text([40] * 50, max_tokens=40, return_token_ids=True))
    tokens = first["choices"][0]["token_ids"]
    assert first["choices"][0]["prompt_token_ids"] == [40] * 50
    assert len(tokens) == 40
    second = await twin.ok(TEXT, text([40] * 50 + tokens + [41]))
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 80  # 89 of 90 were computed


async def test_without_a_limit_an_answer_ends_by_itself(twin: Client) -> None:
    answer = await twin.ok(CHAT, {"model": "tiny", "messages": HELLO})
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] is None
    assert 16 <= answer["usage"]["completion_tokens"] < 256


async def test_a_stop_string_ends_and_is_not_shown(twin: Client) -> None:
    words = (await twin.ok(CHAT, chat(max_tokens=20)))["choices"][0]["message"]["content"].split(" ")
    stop = f"{words[3][-1]} {words[4]}"  # spans two tokens
    answer = await twin.ok(CHAT, chat(max_tokens=20, stop=["never", stop]))
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["message"]["content"] == " ".join(words[:4])[:-1]
    kept = await twin.ok(CHAT, chat(max_tokens=20, stop=stop, include_stop_str_in_output=True))
    assert kept["choices"][0]["message"]["content"] == " ".join(words[:5])
    events = await twin.stream(CHAT, chat(max_tokens=20, stop=stop, stream=True))
    shown = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert shown == choice["message"]["content"]
    assert await twin.metric("request_success_total") == 4
    assert await twin.metric("num_requests_running") == 0


async def test_log_probabilities_name_the_tokens(twin: Client) -> None:
    (choice,) = (await twin.ok(CHAT, chat(logprobs=True, top_logprobs=3)))["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"] == entry["top_logprobs"][0]["token"]
        ranks = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(ranks) == 3
        assert ranks == sorted(ranks, reverse=True)
    (choice,) = (await twin.ok(TEXT, text(logprobs=1)))["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert "".join(tokens) == choice["text"]
    assert offsets == [len("".join(tokens[:number])) for number in range(5)]


@pytest.mark.parametrize(
    ("path", "body", "status", "message", "param"),
    [
        (CHAT, chat(model="nope"), 404, "The model `nope` does not exist. Valid aliases: tiny.", "model"),
        (
            CHAT,
            chat(max_tokens=5000),
            400,
            "max_tokens=5000 cannot be greater than max_model_len=4096. "
            "Please request fewer output tokens. (parameter=max_tokens, value=5000)",
            "max_tokens",
        ),
        (
            TEXT,
            text([40] * 4097),
            400,
            "This model's maximum context length is 4096 tokens. However, your prompt contains at least 4097 "
            "input tokens, which exceeds this limit even without any output tokens. Please reduce the length "
            "of the input prompt. (parameter=input_tokens, value=4097)",
            "input_tokens",
        ),
        (
            TEXT,
            text([40] * 4096),
            400,
            "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
            "max_tokens",
        ),
        (TEXT, text([99999]), 400, "Token id 99999 is out of vocabulary", None),
        (
            CHAT,
            chat(cache_salt="a@b"),
            400,
            "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', "
            "or NUL. (parameter=cache_salt)",
            "cache_salt",
        ),
        (
            CHAT,
            {"model": "tiny"},
            400,
            "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', "
            "'input': '<dict of 1 items>'}",
            "body.messages",
        ),
    ],
)
async def test_refusals(twin: Client, path: str, body: Any, status: int, message: str, param: str) -> None:
    kind = {404: "NotFoundError", 400: "Bad Request" if message[0] == "1" else "BadRequestError"}[status]
    error = {"message": message, "type": kind, "param": param, "code": status}
    assert await twin.post(path, body) == (status, {"error": error})
    assert await twin.metric("prompt_tokens_total") == 0


async def test_embeddings_of_a_text_model_do_not_exist(twin: Client) -> None:
    status, answer = await twin.post("/v1/embeddings", {"model": "tiny", "input": "x"})
    assert (status, answer) == (404, {"detail": "Not Found"})


async def test_a_long_prompt_with_a_small_answer_is_cut_to_the_room_left(twin: Client) -> None:
    answer = await twin.ok(TEXT, text([40] * 4090, max_tokens=100))
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_counters_are_the_sums_of_usage(twin: Client) -> None:
    usages = [
        (await twin.ok(CHAT, chat(messages=[{"role": "user", "content": "x " * count}])))["usage"]
        for count in (10, 40, 40, 80)
    ]
    assert await twin.metric("prompt_tokens_total") == sum(u["prompt_tokens"] for u in usages)
    assert await twin.metric("generation_tokens_total") == 20
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    assert cached > 0
    assert await twin.metric("prompt_tokens_cached_total") == cached
    assert await twin.metric("prefix_cache_hits_total") == cached
    assert await twin.metric("prefix_cache_queries_total") == sum(u["prompt_tokens"] for u in usages)
    assert await twin.metric("request_success_total") == 4
    assert await twin.metric("kv_cache_usage_perc") == 0


async def test_metrics_describe_the_cache() -> None:
    async with serving(block_size=32, blocks=200, served_name='we"ird') as client:
        metrics = await client.get("/metrics")
    config = next(line for line in metrics.splitlines() if line.startswith("vllm:cache_config_info{"))
    assert 'block_size="32"' in config
    assert 'num_gpu_blocks="200"' in config
    assert 'kv_cache_size_tokens="6368"' in config
    assert 'vllm:prompt_tokens_total{engine="0",model_name="we\\"ird"} 0.0' in metrics


async def test_models_health_version_load_tokenize(twin: Client) -> None:
    assert await twin.get("/health") == ""
    assert '"max_model_len":4096' in await twin.get("/v1/models")
    assert await twin.get("/version") == '{"version":"0.32.0"}'
    assert await twin.get("/load") == '{"server_load":0}'
    asked = await twin.ok("/tokenize", {"messages": HELLO, "return_token_strs": True})
    assert asked["token_strs"][0] == "<|begin|>"
    assert asked["count"] == len(asked["tokens"])
    answer = await twin.ok(CHAT, chat())
    assert answer["usage"]["prompt_tokens"] == asked["count"]
    back = await twin.ok("/detokenize", {"tokens": asked["tokens"]})
    assert back["prompt"] == "<|begin|>user\nhello there<|end|>\n<|begin|>assistant\n"


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (TEXT, text())])
async def test_the_load_is_told_beside_whole_answers_where_it_is_asked_for(
    twin: Client, path: str, body: dict[str, Any]
) -> None:
    told: dict[tuple[str, bool], str | None] = {}
    named = "named_metrics."
    for form in ("json", "TEXT", "xml", ""):
        for stream in (False, True):
            headers = {ASK_HEADER: form} if form else {}
            async with twin.session.post(
                twin.url + path, json=body | {"stream": stream}, headers=headers
            ) as answer:
                assert answer.status == 200
                await answer.read()
                told[form, stream] = answer.headers.get(LOAD_HEADER)
    assert of_header(told["json", False] or "") == EngineLoad(waiting=0, kv_usage=0.0)
    assert told["TEXT", False] == f"TEXT {named}num_requests_waiting=0.0, {named}kv_cache_usage_perc=0.0"
    assert {value for way, value in told.items() if way not in {("json", False), ("TEXT", False)}} == {None}


async def test_rendering_tells_the_tokens_and_generates_nothing(twin: Client) -> None:
    asked = await twin.ok("/tokenize", {"messages": HELLO})
    call = await twin.ok(f"{CHAT}/render", chat(n=2, stop="a", cache_salt="s"), "one")
    assert call["request_id"] == "chatcmpl-one"
    assert call["token_ids"] == asked["tokens"]
    assert (call["cache_salt"], call["stream"], call["stream_options"]) == ("s", False, None)
    wanted = {"n": 2, "stop": ["a"], "max_tokens": 5, "ignore_eos": True, "output_kind": 2}
    assert call["sampling_params"].items() >= {**wanted, "temperature": 1.0}.items()
    calls = await twin.ok(f"{TEXT}/render", {"prompt": ["hello", "bye"], "max_tokens": 16}, "two")
    assert [each["request_id"] for each in calls] == ["cmpl-two-0", "cmpl-two-1"]
    assert "max_tokens" not in calls[0]["sampling_params"]  # the engine leaves its default out
    assert await twin.metric("prompt_tokens_total") == 0


async def test_rendering_refuses_what_answering_would(twin: Client) -> None:
    for body, param in (
        (chat(messages=[{"role": "user", "content": "x y " * 4096}]), "input_tokens"),
        (chat(max_tokens=5_000), "max_tokens"),
        (chat(model="nope"), "model"),
    ):
        assert await twin.post(f"{CHAT}/render", body) == await twin.post(CHAT, body)
        assert (await twin.post(f"{CHAT}/render", body))[1]["error"]["param"] == param
    assert (await twin.ok(f"{TEXT}/render", text([[99_999]])))[0]["token_ids"] == [99_999]


async def test_answers_carry_a_request_id(twin: Client) -> None:
    async with twin.session.get(twin.url + "/health", headers={"X-Request-Id": "seen"}) as answer:
        assert answer.headers["x-request-id"] == "seen"
    async with twin.session.get(twin.url + "/health") as answer:
        assert len(answer.headers["x-request-id"]) == 32


async def test_many_streams_at_once_all_end(twin: Client) -> None:
    bodies = [
        chat(messages=[{"role": "user", "content": str(number)}], max_tokens=20) | USAGE
        for number in range(64)
    ]
    streams = await asyncio.gather(*[twin.stream(CHAT, body, "same") for body in bodies])
    assert [events[-1]["usage"]["completion_tokens"] for events in streams] == [20] * 64
    assert await twin.metric("generation_tokens_total") == 64 * 20
    assert await twin.metric("num_requests_running") == await twin.metric("kv_cache_usage_perc") == 0


async def test_the_official_client_is_content(twin: Client) -> None:
    async with openai.AsyncOpenAI(base_url=f"{twin.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 5
        assert chunks[0].choices[0].delta.role == "assistant"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="no", messages=[{"role": "user", "content": "hi"}])
        assert [model.id async for model in client.models.list()] == ["tiny"]
