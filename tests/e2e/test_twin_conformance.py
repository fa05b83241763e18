"""The twin against a real vLLM: the same requests, the same tokens, the same hits, the same shapes."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pytest

from ctxgate.inference.engine_load import ASK_HEADER, LOAD_HEADER, of_header
from ctxgate.inference.prompts import PromptRenderer
from ctxgate.inference.twin_cache import extend_chain
from e2e.engine import BLOCK_SIZE, Spec, running
from e2e.probing import played
from e2e.traffic import Request, Traffic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e

WINDOW: Final = 3072
BLOCKS: Final = 100  # 99 usable: little more than one window, so that conversations evict each other
REQUESTS: Final = 200
SEED: Final = 20261130


@dataclass
class Server:
    """A server under comparison, and the threads of its own output."""

    url: str
    threads: dict[str, list[int]] = field(default_factory=dict)

    def send(self, request: Request) -> tuple[list[int] | None, dict[str, Any]]:
        """Send a request of the traffic; return the token prompt, if it is one, and the usage."""
        body = dict(request.body)
        if request.continues is not None:
            body["prompt"] = self.threads.get(request.continues, []) + body["prompt"]
        status, answer = fetch(self.url + request.path, body)
        assert status == 200, answer
        bodies = events(answer) if body.get("stream") else [json.loads(answer)]
        if request.remember is not None:
            thread = body["prompt"] + bodies[0]["choices"][0]["token_ids"]
            self.threads[request.remember] = thread if len(thread) < 1500 else []
        prompt = body.get("prompt")
        return prompt if isinstance(prompt, list) else None, bodies[-1]["usage"]


def fetch(url: str, body: Any = None) -> tuple[int, str]:
    """Status and text of an answer. Bytes go as they are, None makes it a GET."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", "x-request-id": "one"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def events(stream: str) -> list[Any]:
    """The JSON events of a stream, which must end with the end mark."""
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@contextmanager
def twin() -> Iterator[Server]:
    """The twin, started as a user would."""
    command = [sys.executable, "-m", "ctxgate.gateway.cli", "twin", "--port", "0", "--time-scale", "0"]
    command += ["--block-size", str(BLOCK_SIZE), "--blocks", str(BLOCKS), "--max-model-len", str(WINDOW)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert ready.startswith("listening on http://"), ready
            yield Server(ready.split()[-1])
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def pair(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A real engine and the twin, with the same block size, blocks and window."""
    flags = ("--max-model-len", str(WINDOW), "--num-gpu-blocks-override", str(BLOCKS))
    spec = Spec("conformance", flags, core=1)
    with running(vllm_python, tmp_path_factory.mktemp("conformance"), spec) as (engine,), twin() as server:
        yield Server(engine.url), server


class Ideal:
    """What a cache that never evicts would hit: tells hits that were lost to eviction."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()

    def hit(self, prompt: list[int], salt: str | None) -> int:
        """The ideal hit of a prompt, which is then remembered."""
        keys: list[bytes] = []
        extend_chain(keys, prompt, BLOCK_SIZE, salt)
        usable = keys[: (len(prompt) - 1) // BLOCK_SIZE]
        run = next((number for number, key in enumerate(usable) if key not in self.seen), len(usable))
        self.seen.update(keys)
        return run * BLOCK_SIZE


def test_two_hundred_requests_hit_the_same_tokens(pair: tuple[Server, Server]) -> None:
    real, model = pair
    renderer, ideal = PromptRenderer(), Ideal()
    differing: list[tuple[int, dict[str, Any], dict[str, Any]]] = []
    hits = lost = 0
    for number, request in enumerate(Traffic(SEED).requests(REQUESTS)):
        _, expected = real.send(request)
        tokens, got = model.send(request)
        if got != expected:
            differing.append((number, expected, got))
        cached = expected["prompt_tokens_details"]["cached_tokens"]
        prompt = tokens or rendered(renderer, request)
        assert len(prompt) == expected["prompt_tokens"]
        hits += cached > 0
        lost += cached < ideal.hit(prompt, request.body.get("cache_salt"))
    print(f"{REQUESTS - len(differing)}/{REQUESTS} equal, {hits} hits, {lost} cut short by eviction")  # noqa: T201 - what a green run saw
    assert differing == []
    assert hits >= 100
    assert lost >= 40


@pytest.mark.parametrize("may_render", [True, False])
def test_a_probe_finds_the_same_by_tokens_and_by_usage(pair: tuple[Server, Server], may_render: bool) -> None:
    real, model = (played(server, "conformance", may_render=may_render) for server in pair)
    assert model == real
    assert real.renders is may_render


def rendered(renderer: PromptRenderer, request: Request) -> list[int]:
    """The prompt of a request that is not given as tokens."""
    if "messages" in request.body:
        text = renderer.chat_text(request.body["messages"], request.body.get("tools"))
        return renderer.encode(text)
    return renderer.encode(request.body["prompt"])


HELLO: Final = [{"role": "user", "content": "hello there"}]
IMAGE: Final = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
LOOK: Final = [{"type": "function", "function": {"name": "look"}}]
CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
RENDER: Final = "/v1/chat/completions/render"
RENDER_TEXT: Final = "/v1/completions/render"
SAID: Final = {"role": "assistant", "content": "hello"}
SHORT: Final = {"model": "tiny", "max_tokens": 2, "ignore_eos": True}
USAGE: Final = {"stream": True, "stream_options": {"include_usage": True}}
EVERY: Final = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}

ANSWERED: Final = [
    (CHAT, SHORT | {"messages": HELLO}),
    (CHAT, SHORT | {"messages": HELLO, "max_tokens": 1, "stream": True}),
    (CHAT, SHORT | {"messages": HELLO, "max_tokens": 1} | USAGE),
    (CHAT, SHORT | {"messages": HELLO, "max_tokens": 1} | EVERY),
    (CHAT, SHORT | {"messages": HELLO, "n": 2}),
    (CHAT, SHORT | {"messages": HELLO, "n": 2, "max_tokens": 1} | USAGE),
    (CHAT, SHORT | {"messages": HELLO, "logprobs": True, "top_logprobs": 2}),
    (CHAT, SHORT | {"messages": HELLO, "tools": LOOK}),
    (CHAT, SHORT | {"messages": HELLO, "return_token_ids": True}),
    (TEXT, SHORT | {"prompt": "hello"}),
    (TEXT, SHORT | {"prompt": ["hello", "bye"], "n": 2}),
    (TEXT, SHORT | {"prompt": [[40, 41], [42]]}),
    (TEXT, SHORT | {"prompt": "hello", "stream": True}),
    (TEXT, SHORT | {"prompt": "hello"} | USAGE),
    (TEXT, SHORT | {"prompt": "hello"} | EVERY),
    (TEXT, SHORT | {"prompt": "hello", "echo": True, "return_token_ids": True}),
    (TEXT, {"model": "tiny", "prompt": "hello", "ignore_eos": True}),
    (TEXT, {"model": "tiny", "prompt": [40] * (WINDOW - 3), "max_tokens": 50, "ignore_eos": True}),
    ("/v1/models", None),
    ("/health", None),
    ("/version", None),
    ("/load", None),
    ("/tokenize", {"model": "tiny", "prompt": "hello <|end|> x"}),
    ("/tokenize", {"messages": HELLO, "tools": LOOK, "return_token_strs": True}),
    ("/detokenize", {"model": "tiny", "tokens": [1, 40, 50]}),
    ("/inference/v1/abort_requests", {"request_ids": ["nobody"]}),
    (RENDER, {"messages": HELLO}),
    (RENDER, SHORT | {"messages": HELLO, "tools": LOOK}),
    (RENDER, {"model": "tiny", "messages": HELLO, "tools": LOOK, "tool_choice": "none", "max_tokens": 16}),
    (RENDER, {"model": "tiny", "messages": [*HELLO, SAID], "add_generation_prompt": False}),
    (RENDER, SHORT | {"messages": HELLO, "n": 2, "logprobs": True, "top_logprobs": 2} | USAGE),
    (RENDER, SHORT | {"messages": HELLO, "seed": 3, "stop": "a", "min_tokens": 1, "cache_salt": "s"}),
    (RENDER, SHORT | {"messages": HELLO, "prompt_logprobs": 0, "include_stop_str_in_output": True}),
    (RENDER_TEXT, SHORT | {"prompt": "hello", "logprobs": 1, "temperature": 0.5, "top_p": 0.9}),
    (RENDER_TEXT, {"model": "tiny", "prompt": ["hello", "bye"]}),
    (RENDER_TEXT, {"model": "tiny", "prompt": [[40, 41], [99999]], "max_tokens": 3} | EVERY),
]


@pytest.mark.parametrize(("path", "body"), ANSWERED)
def test_answers_have_the_same_shape(pair: tuple[Server, Server], path: str, body: Any) -> None:
    expected, got = (fetch(server.url + path, body) for server in pair)
    assert got[0] == expected[0] == 200
    renders = path.endswith("/render")
    streams = isinstance(body, dict) and body.get("stream") and not renders
    read = events if streams else lambda text: text and json.loads(text)
    literal = LITERAL_HERE | RENDERED if renders else LITERAL_HERE
    assert skeleton(read(got[1]), literal) == skeleton(read(expected[1]), literal)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
def test_the_load_is_told_beside_whole_answers_and_never_beside_a_stream(
    pair: tuple[Server, Server], path: str, stream: bool
) -> None:
    content: dict[str, Any] = {"prompt": "hello"} if path == TEXT else {"messages": HELLO}
    body = json.dumps(SHORT | content | {"stream": stream}).encode()
    for server in pair:
        headers = {"content-type": "application/json", ASK_HEADER: "json"}
        request = urllib.request.Request(server.url + path, body, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            told = answer.headers.get(LOAD_HEADER)
            answer.read()
        if stream:
            assert told is None
        else:
            load = of_header(told)
            assert load is not None
            assert (load.running, load.waiting) == (None, 0)
            assert load.kv_usage is not None


LITERAL: Final = frozenset({"object", "finish_reason", "role", "index", "prompt_tokens", "completion_tokens"})
RENDERED: Final = frozenset(
    {"request_id", "token_ids", "sampling_params", "stream", "stream_options", "cache_salt", "priority"}
)
LITERAL_HERE: Final = LITERAL | {
    "count",
    "max_model_len",
    "tokens",
    "token_strs",
    "prompt",
    "total_tokens",
    "output_mode",
}
OPEN: Final = frozenset({"bytes", "root", "version", "server_load"})  # whose contents are each server's own


def skeleton(value: Any, literal: frozenset[str], name: str = "") -> Any:
    """A body without what two servers may say differently: keys in order, kinds of values, some values."""
    if name in OPEN:
        return None
    if name in literal:
        return value
    if isinstance(value, dict):
        if name == "top_logprobs":
            return len(value)
        return [(key, skeleton(member, literal, key)) for key, member in value.items()]
    if isinstance(value, list):
        return [skeleton(member, literal) for member in value]
    return type(value).__name__


REFUSED: Final = [
    (CHAT, {"model": "nope", "messages": HELLO}),
    (CHAT, {"model": "tiny"}),
    (CHAT, {"model": "tiny", "messages": "x"}),
    (CHAT, {"model": "tiny", "messages": []}),
    (CHAT, {"model": "tiny", "messages": HELLO, "max_tokens": 0}),
    (CHAT, {"model": "tiny", "messages": HELLO, "max_tokens": -1}),
    (CHAT, {"model": "tiny", "messages": HELLO, "max_tokens": 5000}),
    (CHAT, {"model": "tiny", "messages": HELLO, "max_tokens": "x"}),
    (CHAT, {"model": "tiny", "messages": HELLO, "temperature": -1}),
    (CHAT, {"model": "tiny", "messages": HELLO, "temperature": "hot"}),
    (CHAT, {"model": "tiny", "messages": HELLO, "top_p": 2}),
    (CHAT, {"model": "tiny", "messages": HELLO, "n": 0}),
    (CHAT, {"model": "tiny", "messages": HELLO, "stop": 5}),
    (CHAT, {"model": "tiny", "messages": HELLO, "stream": "maybe"}),
    (CHAT, {"model": "tiny", "messages": HELLO, "tools": []}),
    (CHAT, {"model": "tiny", "messages": HELLO, "tool_choice": "auto"}),
    (CHAT, {"model": "tiny", "messages": HELLO, "stream_options": {"include_usage": True}}),
    (CHAT, {"model": "tiny", "messages": HELLO, "cache_salt": "a/b"}),
    (CHAT, {"model": "tiny", "messages": HELLO, "cache_salt": ""}),
    (CHAT, {"model": "tiny", "messages": HELLO, "top_logprobs": 2}),
    (CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "x y " * 40 * WINDOW}]}),
    (CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "x y " * WINDOW}]}),
    (CHAT, {"model": "tiny", "messages": [{"role": "user", "content": [IMAGE]}]}),
    (CHAT, b"{nope"),
    (CHAT, b"[1]"),
    (CHAT, b""),
    (TEXT, {"model": "tiny"}),
    (TEXT, {"model": "tiny", "prompt": ""}),
    (TEXT, {"model": "tiny", "prompt": []}),
    (TEXT, {"model": "tiny", "prompt": 5}),
    (TEXT, {"model": "tiny", "prompt": [99999]}),
    (TEXT, {"model": "tiny", "prompt": [40] * WINDOW}),
    (TEXT, {"model": "tiny", "prompt": [40] * (WINDOW + 1)}),
    (TEXT, {"model": "tiny", "prompt": [40] * (WINDOW + 2)}),
    ("/v1/embeddings", {"model": "tiny", "input": "x"}),
    (RENDER, {"model": "nope", "messages": HELLO}),
    (RENDER, {"model": "tiny"}),
    (RENDER, {"model": "tiny", "messages": []}),
    (RENDER, {"model": "tiny", "messages": HELLO, "max_tokens": 0}),
    (RENDER, {"model": "tiny", "messages": HELLO, "max_tokens": 5000}),
    (RENDER, {"model": "tiny", "messages": HELLO, "temperature": -1}),
    (RENDER, {"model": "tiny", "messages": HELLO, "n": 0}),
    (RENDER, {"model": "tiny", "messages": [{"role": "user", "content": "x y " * WINDOW}]}),
    (RENDER_TEXT, {"model": "tiny", "prompt": ""}),
    (RENDER_TEXT, {"model": "tiny", "prompt": [40] * (WINDOW + 2)}),
    (RENDER_TEXT, b"{nope"),
    ("/tokenize", {"model": "nope", "prompt": "x"}),
    ("/inference/v1/abort_requests", {}),
    ("/v1/chat/completions", None),
    ("/v1/nothing", None),
]


@pytest.mark.parametrize(("path", "body"), REFUSED)
def test_refusals_have_the_same_words(pair: tuple[Server, Server], path: str, body: Any) -> None:
    expected, got = (fetch(server.url + path, body) for server in pair)
    assert got[0] == expected[0] >= 400
    assert json.loads(got[1]) == json.loads(expected[1])
