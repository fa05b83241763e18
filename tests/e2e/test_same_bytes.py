"""Through the gateway a client gets the engine's own bytes: the same request both ways, at temperature 0.

Ids, times and cache hits differ from call to call, and the gateway adds `usage.cost`; nothing else may.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest

from e2e.gateway_process import GatewayConfig, serving
from e2e.sdk import HELLO, HISTORY, LOOK, client_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import openai

    from e2e.engine import Engine

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def direct(engines: Mapping[str, Engine]) -> Iterator[openai.OpenAI]:
    """The engine of the pool `standard` without a gateway."""
    with client_of(engines["standard"].url, "none") as made:
        yield made


@pytest.fixture(scope="module")
def client(
    engines: Mapping[str, Engine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """The same engine through the gateway."""
    folder = tmp_path_factory.mktemp("bytes")
    # Without a salt, so that both ways find the same blocks in the cache.
    config = GatewayConfig(folder, {"standard": [engines["standard"].url]}, isolation="none")
    with serving(config) as gateway, client_of(gateway.url) as made:
        yield made


_OWN: Final = (  # what differs between two calls of one engine, and what the gateway adds
    (re.compile(r'"id":"[^"]*"'), '"id":"ID"'),
    (re.compile(r'"created":\d+'), '"created":0'),
    (re.compile(r'"(cached|created_cache)_tokens":(\d+|null)'), r'"\1_tokens":0'),
    (re.compile(r'"metrics":\{[^{}]*\}'), '"metrics":{}'),
    (re.compile(r',"cost":[0-9.e-]+'), ""),
)


_WORDS: Final = re.compile(r'"(content|text)":("(?:[^"\\]|\\.)*")')


def normalised(text: str) -> str:
    for pattern, instead in _OWN:
        text = pattern.sub(instead, text)
    return text


def merged(events: Iterable[str]) -> list[str]:
    """A stream without what timing decides: one event per shape and choice, then each choice's words.

    An engine that is faster than its reader sends two tokens in one event, and choices take turns.
    """
    shapes: list[str] = []
    words: dict[str, str] = {}
    for event in sorted(events, key=_choice):
        found = _WORDS.search(event)
        if found:
            words[_choice(event)] = words.get(_choice(event), "") + json.loads(found[2])
        shape = _WORDS.sub(r'"\1":', event)
        if not shapes or shapes[-1] != shape:
            shapes.append(shape)
    return [*shapes, *words.values()]


def _choice(event: str) -> str:
    """The choice an event belongs to; those that belong to none sort behind, in their order."""
    found = re.search(r'"choices":\[\{"index":(\d+)', event)
    return found[1] if found else "none"


SAME: Final[list[tuple[str, dict[str, Any]]]] = [
    ("/chat/completions", {"messages": HELLO}),
    ("/chat/completions", {"messages": HISTORY, "tools": [LOOK]}),
    ("/chat/completions", {"messages": HELLO, "n": 2, "temperature": 1, "top_k": 1}),
    ("/completions", {"prompt": "Once upon a time"}),
    ("/completions", {"prompt": ["Once", "Twice"]}),
]
LOGPROBS: Final[list[tuple[str, dict[str, Any]]]] = [
    ("/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 2}),
    ("/completions", {"prompt": "Once upon a time", "logprobs": 2}),
]


@pytest.mark.parametrize(("path", "body"), SAME + LOGPROBS)
def test_whole_answers_are_the_engines_own_bytes(
    client: openai.OpenAI, direct: openai.OpenAI, path: str, body: dict[str, Any]
) -> None:
    request = {"model": "tiny", "max_tokens": 12, "temperature": 0} | body
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
    request = {"model": "tiny", "max_tokens": 12, "temperature": 0, "stream": True} | body
    if usage:
        request["stream_options"] = {"include_usage": True}
    streams = []
    for one in (direct, direct, client, client):  # the first one through the gateway shows it the fingerprint
        answer = one.post(path, body=request, cast_to=httpx.Response)
        streams.append(merged(normalised(answer.text).split("\n\n")))
    assert "data: [DONE]" in streams[1]
    assert len(streams[1]) > 4
    assert streams[3] == streams[1]
