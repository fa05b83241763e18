"""What the real engine makes of laid-out prompts: their token ids, and the answers it gives to them.

A recording server stands in front of nothing: the gateway's outgoing bodies are taken from it and
rendered by vLLM, beside bodies that the test composes itself by the rule of level `safe`.
"""

from __future__ import annotations

import json
import subprocess
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from ctxgate.gateway.perturb import parse_perturbations, perturb
from ctxgate.gateway.replay_run import Plan, request_body
from ctxgate.gateway.sessions import read_session
from e2e.engine import MODEL
from e2e.gateway_process import TRUSTED_SECRET, GatewayConfig, serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from ctxgate.gateway.sessions import Session, Turn
    from e2e.engine import Engine
    from support.gateway import Gateway
    from support.upstream import Upstream

    Start = Callable[..., Awaitable[Gateway]]

pytestmark = pytest.mark.e2e

TRAJECTORIES: Final = Path(__file__).parents[3] / "shared" / "trajectories"
HABITS: Final = parse_perturbations("tool-order,json-keys,reserialize")
RENDERED: Final = ("airline-000-0.jsonl", "airline-013-0.jsonl", "repair-*.jsonl")


@pytest.fixture(scope="module")
def sessions() -> list[Session]:
    if not TRAJECTORIES.is_dir():
        pytest.skip("the recorded sessions lie outside the repository")
    files = [path for pattern in RENDERED for path in sorted(TRAJECTORIES.glob(pattern))]
    assert len(files) >= 3
    return [read_session(path) for path in files]


def rendered(engine: Engine, body: Mapping[str, Any]) -> list[int]:
    """The token ids of a chat request's prompt, as the engine sees it."""
    prompt = {name: body[name] for name in ("messages", "tools") if name in body}
    request = urllib.request.Request(
        f"{engine.url}/v1/chat/completions/render",
        json.dumps(prompt | {"model": "tiny"}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        document = json.load(answer)
    ids: list[int] = document["token_ids"]
    return ids


def meaning(message: Mapping[str, Any]) -> str:
    """What an assistant message with tool calls says, however it is written."""
    calls = [
        [call["id"], call["function"]["name"], json.loads(call["function"]["arguments"])]
        for call in message["tool_calls"]
    ]
    return json.dumps([message.get("content") or "", calls], sort_keys=True)


class FirstForms:
    """The rule of level `safe`, put down once more: what was sent first is what is sent."""

    def __init__(self) -> None:
        self.messages: dict[str, Any] = {}
        self.tools: dict[str, Any] = {}
        self.order: dict[str, list[str]] = {}

    def body(self, turn: Turn) -> dict[str, Any]:
        document: dict[str, Any] = {"messages": [self._message(message) for message in turn.messages]}
        if turn.tools:
            named = {tool["function"]["name"]: self._tool(tool) for tool in turn.tools}
            names = self.order.setdefault(json.dumps(sorted(named)), list(named))
            document["tools"] = [named[name] for name in names]
        return document

    def _message(self, message: Mapping[str, Any]) -> Any:
        if not message.get("tool_calls"):
            return message
        return self.messages.setdefault(meaning(message), message)

    def _tool(self, tool: Mapping[str, Any]) -> Any:
        return self.tools.setdefault(json.dumps(tool, sort_keys=True), tool)


def turns(sessions: Sequence[Session], *, habits: bool) -> Iterator[Turn]:
    """All requests in order, as the client sends them."""
    for session in sessions:
        for turn in session.turns():
            yield perturb(turn, HABITS) if habits else turn


async def test_safe_renders_as_the_first_seen_form(
    engines: Mapping[str, Engine], sessions: Sequence[Session], upstream: Upstream, start_gateway: Start
) -> None:
    gateway = await start_gateway(upstream, layout="safe")
    first, changed = FirstForms(), 0
    for turn in turns(sessions, habits=True):
        raw = request_body(turn, Plan("m", max_tokens=1))
        assert (await gateway.post(raw)).status == 200
        sent = upstream.calls[-1].document
        wanted = first.body(turn)
        ids = rendered(engines["fast"], sent)
        assert ids == rendered(engines["fast"], wanted)
        changed += ids != rendered(engines["fast"], json.loads(raw))
    assert changed > len(sessions)  # else nothing was put to the test


async def test_off_renders_as_the_client_wrote_it(
    engines: Mapping[str, Engine], sessions: Sequence[Session], upstream: Upstream, start_gateway: Start
) -> None:
    gateway = await start_gateway(upstream)
    for turn in turns(sessions[:2], habits=True):
        raw = request_body(turn, Plan("m", max_tokens=1, stream=True))
        assert (await gateway.post(raw)).status == 200
        assert rendered(engines["fast"], upstream.calls[-1].document) == rendered(
            engines["fast"], json.loads(raw)
        )


WEIGHTS: Final = """
import json, shutil, sys, torch
from pathlib import Path
from safetensors.torch import save_file

source, target = map(Path, sys.argv[1:])
shutil.copytree(source, target)
c = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
(target / "config.json").write_text(json.dumps(c))
torch.manual_seed(7)
h, m, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
shapes = {"self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
          "self_attn.o_proj": (h, q), "mlp.gate_proj": (m, h), "mlp.up_proj": (m, h), "mlp.down_proj": (h, m)}
tokens = (c["vocab_size"], h)
weights = {"model.embed_tokens.weight": torch.randn(tokens), "lm_head.weight": torch.randn(tokens)}
weights["model.norm.weight"] = torch.ones(h)
for layer in range(c["num_hidden_layers"]):
    for name, shape in shapes.items():
        weights[f"model.layers.{layer}.{name}.weight"] = 4 * torch.randn(shape) / shape[1] ** 0.5
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(h)
save_file({k: v.to(torch.bfloat16).contiguous() for k, v in weights.items()}, target / "model.safetensors")
"""
"""Writes a model of real size in its weights: the engine's own dummy ones answer every prompt alike."""


@pytest.fixture
def telling(vllm_python: Path, start_engine: Callable[..., Engine], tmp_path: Path) -> Engine:
    """An engine whose answers depend on all of its prompt."""
    folder = tmp_path / "telling"
    subprocess.run([str(vllm_python), "-c", WEIGHTS, str(MODEL), str(folder)], check=True, timeout=120)
    return start_engine("telling", "--model", str(folder), "--load-format", "safetensors")


def answers(url: str, sessions: Sequence[Session], salt: str) -> list[str]:
    """The engine's greedy answers to all requests, in order, in a cache domain of their own."""
    texts = []
    extra = {"temperature": 0, "cache_salt": salt}
    plan = Plan("tiny", max_tokens=12, stream=False, extra=extra)
    for turn in turns(sessions, habits=False):
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            request_body(turn, plan),
            {"content-type": "application/json", "authorization": f"Bearer {TRUSTED_SECRET}"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            message = json.load(answer)["choices"][0]["message"]
        texts.append(json.dumps([message.get("content"), message.get("tool_calls")]))
    return texts


def test_greedy_answers_are_the_same_at_off_and_safe(
    telling: Engine, sessions: Sequence[Session], tmp_path: Path
) -> None:
    found = {}
    for level in ("off", "safe"):
        folder = tmp_path / level
        folder.mkdir()
        with serving(GatewayConfig(folder, {"standard": [telling.url]}, layout=level)) as gateway:
            found[level] = answers(gateway.url, sessions, f"greedy-{level}")
    assert len(found["off"]) == sum(session.requests for session in sessions)
    assert len(set(found["off"])) > len(found["off"]) // 2  # the answers do depend on the prompts
    assert found["off"] == found["safe"]
