"""The fixture's engines are real and count exactly: what the other end-to-end tests stand on."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from e2e.engine import BLOCK_SIZE, Counters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from e2e.engine import Engine

pytestmark = pytest.mark.e2e


def post(url: str, body: dict[str, Any]) -> Any:
    """The decoded answer to one JSON request."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize("pool", ["fast", "standard"])
@pytest.mark.parametrize(("length", "hit"), [(128, 96), (126, 96), (129, 128), (32, 0)])
def test_a_repeat_hits_whole_blocks_short_of_the_last_token(
    engines: Mapping[str, Engine], pool: str, length: int, hit: int
) -> None:
    engine = engines[pool]
    before = engine.counters()
    body = {"model": "tiny", "prompt": [length % 7 + 40] * length, "max_tokens": 2, "ignore_eos": True}
    salt = {"cache_salt": f"{pool}-{length}"}
    usages = [post(f"{engine.url}/v1/completions", body | salt)["usage"] for _ in range(2)]
    assert [u["prompt_tokens"] for u in usages] == [length, length]
    assert [u["prompt_tokens_details"]["cached_tokens"] for u in usages] == [0, hit]
    assert engine.counters() - before == Counters(prompt=2 * length, cached=hit, generation=4)
    assert hit == (length - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_tools_and_their_history_are_accepted(engines: Mapping[str, Engine]) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path":"."}'}}
    body = {
        "model": "tiny",
        "messages": [
            {"role": "user", "content": "list"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
        ],
        "tools": [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}],
        "max_tokens": 3,
        "ignore_eos": True,
    }
    answer = post(f"{engines['standard'].url}/v1/chat/completions", body)
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"
