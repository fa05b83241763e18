"""Who sent a request and which task it belongs to: the credential alone, and the order of the places."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxgate.gateway.config import Key
from ctxgate.gateway.errors import Kind, Refused
from ctxgate.gateway.flow import Inbound, Surface, Task
from ctxgate.gateway.identity import MAX_TASK, Roots, authenticate, identify
from ctxgate.gateway.inbound import read_inbound

KEY = Key("alpha-ci", b"", "alpha", "acme")
OTHER = Key("beta-ci", b"", "beta", "acme")
SECRETS = {"good": KEY, "other": OTHER}
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
TRACE = "0af7651916cd43dd8448eb211c80319c"


def inbound(headers: dict[str, str] | None = None, surface: Surface = Surface.CHAT, **body: Any) -> Inbound:
    """A checked request."""
    document: dict[str, Any] = {"model": "m", "messages": MESSAGES, "prompt": "p", "input": "i"} | body
    return read_inbound("req", surface, headers or {}, json.dumps(document).encode(), 0)


def task(headers: dict[str, str] | None = None, **body: Any) -> Task:
    """The task of a request of a known key."""
    return identify(inbound(headers, **body), KEY, Roots()).task


def conversation_root(request: Inbound, key: Key) -> bytes:
    """The root of a request, in a process that knows nothing."""
    return Roots().of(request, key)


# In the order of precedence: each place, as headers and as body, and what is found there.
PLACES: list[tuple[dict[str, str], dict[str, Any], Task]] = [
    ({"x-ctxgate-task": "own"}, {}, Task("own", "header")),
    ({}, {"metadata": {"task_id": "t"}}, Task("t", "metadata.task_id")),
    ({}, {"metadata": {"session_id": "s"}}, Task("s", "metadata.session_id")),
    ({}, {"metadata": {"thread_id": "h"}}, Task("h", "metadata.thread_id")),
    *[
        ({name: f"from-{name}"}, {}, Task(f"from-{name}", name))
        for name in (
            "x-task-id",
            "x-claude-code-session-id",
            "thread-id",
            "session-id",
            "x-session-id",
            "x-session-affinity",
            "x-qwen-code-session-id",
            "x-cagent-session-id",
            "x-openwebui-chat-id",
            "x-litellm-session-id",
            "x-litellm-trace-id",
            "helicone-session-id",
        )
    ],
    ({"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}, {}, Task(TRACE, "traceparent")),
    ({}, {"prompt_cache_key": "k"}, Task("k", "prompt_cache_key")),
    ({}, {"safety_identifier": "i"}, Task("i", "safety_identifier")),
    ({}, {"user": "u"}, Task("u", "user")),
]


@pytest.mark.parametrize("first", range(len(PLACES)))
def test_the_first_place_in_order_names_the_task(first: int) -> None:
    headers: dict[str, str] = {}
    body: dict[str, Any] = {}
    for more_headers, more_body, _ in reversed(PLACES[first:]):
        headers |= more_headers
        metadata = body.get("metadata", {}) | more_body.get("metadata", {})
        body |= more_body | ({"metadata": metadata} if metadata else {})
    assert task(headers, **body) == PLACES[first][2]


@pytest.mark.parametrize("value", ["", " ", "x" * (MAX_TASK + 1), "a\x00b", "a\tb", "\u00a0", "\x7f"])
def test_a_value_that_names_nothing_is_passed_over_but_our_own_header_is_refused(value: str) -> None:
    assert task({"x-task-id": value, "session-id": "next"}) == Task("next", "session-id")
    assert task(metadata={"task_id": value}, user="next") == Task("next", "user")
    with pytest.raises(Refused) as refused:
        task({"x-ctxgate-task": value})
    assert (refused.value.kind, refused.value.param) == (Kind.INVALID_VALUE, "x-ctxgate-task")


@pytest.mark.parametrize("value", [1, None, [], {"a": 1}, True, "x" * 20_000])
def test_a_value_of_another_type_is_passed_over(value: Any) -> None:
    assert task(metadata=value, user="u") == Task("u", "user")
    assert task(metadata={"task_id": value}, user="u") == Task("u", "user")
    assert task(user=value).source == "root"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE.upper()}-b7-01",
        f"00-{TRACE[1:]}-b7-01",
        "-" * 9,
    ],
)
def test_a_trace_header_that_is_none_is_passed_over(header: str) -> None:
    assert task({"traceparent": header}).source == "root"


def test_without_any_name_the_conversations_root_is_the_task() -> None:
    found = task()
    assert found.source == "root"
    assert found.name.startswith("root-")
    assert len(found.name) == len("root-") + 16
    later = [*MESSAGES, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "more"}]
    assert task(messages=later) == found  # an append-only conversation keeps it
    assert task(messages=[*MESSAGES[:1], {"role": "user", "content": "other"}]) != found


def test_a_root_belongs_to_one_team_and_one_model() -> None:
    roots = {
        conversation_root(inbound(), KEY),
        conversation_root(inbound(), OTHER),
        conversation_root(inbound(model="n"), KEY),
        conversation_root(inbound(surface=Surface.COMPLETIONS), KEY),
        conversation_root(inbound(surface=Surface.EMBEDDINGS), KEY),
    }
    assert len(roots) == 5
    assert {len(root) for root in roots} == {32}
    assert conversation_root(inbound(), KEY) == conversation_root(inbound(temperature=1), KEY)


def test_a_completions_root_is_in_the_head_of_the_prompt() -> None:
    def root(prompt: Any) -> bytes:
        return conversation_root(inbound(surface=Surface.COMPLETIONS, prompt=prompt), KEY)

    assert root("x" * 2000) == root("x" * 2000 + "more")
    assert root("y" * 2000) != root("x" * 2000)
    assert root([1, 2, 3]) != root([1, 2, 4])


def test_the_root_of_a_conversation_without_a_user_is_in_its_first_64_messages() -> None:
    def root(messages: list[dict[str, str]]) -> bytes:
        return conversation_root(inbound(messages=messages), KEY)

    said = [{"role": "assistant", "content": str(number)} for number in range(64)]
    assert root(said) == root([*said, {"role": "user", "content": "x"}])
    assert root(said) != root([*said[:63], {"role": "user", "content": "x"}])
    assert root(said) != root(said[:63])


def test_the_root_of_a_conversation_without_a_user_ends_with_the_message_past_1_mib() -> None:
    def root(*contents: str) -> bytes:
        messages = [{"role": "assistant", "content": content} for content in contents]
        return conversation_root(inbound(messages=messages), KEY)

    half, more = "x" * 2**19, "y" * 2**19
    assert root(half, more) == root(half, more, "z")  # with their frames, the two are longer than 1 MiB
    assert root(half, more) != root(half, more[:-1] + "z")
    assert root(half, "y") != root(half, "y", "z")


def test_the_root_of_an_embedding_is_in_whatever_is_embedded() -> None:
    def root(**body: Any) -> bytes:
        return conversation_root(inbound(surface=Surface.EMBEDDINGS, **body), KEY)

    other = [{"role": "user", "content": "other"}]
    assert root(messages=MESSAGES) == root(messages=other)  # `input` is there, and counts
    assert root(input=None, messages=MESSAGES) != root(input=None, messages=other)
    assert conversation_root(inbound(surface=Surface.COMPLETIONS, prompt=None, prompt_embeds="A"), KEY) != (
        conversation_root(inbound(surface=Surface.COMPLETIONS, prompt=None, prompt_embeds="B"), KEY)
    )


@pytest.mark.parametrize("header", ["x-ctxgate-task", "x-task-id", "session-id", "helicone-session-id"])
@pytest.mark.parametrize("name", ["\u00fcbersicht", "\u65e5\u672c", "a\u2014b", "\U0001f680", "plain"])
def test_a_task_header_in_utf_8_names_the_same_task_as_the_metadata(header: str, name: str) -> None:
    sent = {header: name.encode().decode("latin-1")}  # as `read_headers` gives it
    assert task(sent).name == task(metadata={"task_id": name}).name == name


def test_a_task_header_that_is_no_utf_8_is_latin_1() -> None:
    assert task({"x-ctxgate-task": "\u00fcbersicht"}).name == "\u00fcbersicht"


@pytest.mark.parametrize("name", ["\u00a0", "\u200b", "\u2028", "\u00fc" * (MAX_TASK + 1), "a\u0085"])
def test_a_task_header_is_judged_by_its_text(name: str) -> None:
    with pytest.raises(Refused):
        task({"x-ctxgate-task": name.encode().decode("latin-1")})


@given(st.dictionaries(st.sampled_from(["authorization", "x-api-key", "api-key"]), st.text(max_size=12)))
def test_only_one_known_secret_in_its_place_gives_a_key(headers: dict[str, str]) -> None:
    shown = {value.partition(" ")[2] if name == "authorization" else value for name, value in headers.items()}
    with suppress(Refused):
        assert authenticate(headers, SECRETS.get) in SECRETS.values()
        assert {secret.strip() for secret in shown} & SECRETS.keys()


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"authorization": "Bearer good"}, KEY),
        ({"authorization": "bearer  good "}, KEY),
        ({"x-api-key": " good"}, KEY),
        ({"api-key": "good"}, KEY),
        ({"authorization": "Bearer good", "x-api-key": "good", "api-key": "good"}, KEY),
        ({"authorization": "Basic zzz", "x-api-key": "good"}, KEY),
        ({"authorization": "Bearer good", "x-api-key": "other"}, Kind.UNKNOWN_KEY),
        ({"authorization": "Bearer good", "x-api-key": "bad"}, Kind.UNKNOWN_KEY),
        ({"authorization": "Bearer bad"}, Kind.UNKNOWN_KEY),
        ({"authorization": "good"}, Kind.MISSING_KEY),
        ({"authorization": "Bearer "}, Kind.MISSING_KEY),
        ({"x-api-key": ""}, Kind.MISSING_KEY),
        ({}, Kind.MISSING_KEY),
    ],
)
def test_the_places_of_a_key(headers: dict[str, str], expected: Key | Kind) -> None:
    if isinstance(expected, Key):
        assert authenticate(headers, SECRETS.get) is expected
        return
    with pytest.raises(Refused) as refused:
        authenticate(headers, SECRETS.get)
    assert refused.value.kind is expected
    assert "bad" not in refused.value.message
