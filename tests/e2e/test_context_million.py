"""A conversation of a million tokens through a pool whose window holds a quarter of it.

The recorded sessions one after the other, as one user goes on with one agent: the ids of tool calls are
renamed for each, and before each the user gives an order of their own that must hold from then on. A request
is played for every `STRIDE`th answer, and for each one shortly before and after a cut; what is left between
two requests is one longer step. What goes out is judged by the rules written here, not by the gateway's.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import pytest

from ctxgate.gateway.sessions import read_session
from e2e.gateway_process import SECRET, until
from e2e.test_context import in_front_of
from support import twin
from support.recorder import Recorder, recording

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from e2e.gateway_process import Gateway

    Message = dict[str, Any]

pytestmark = pytest.mark.e2e

TRAJECTORIES: Final = Path(__file__).parents[3] / "shared" / "trajectories"
WINDOW: Final = 262_144
MILLION: Final = 1_000_000
STRIDE: Final = 8
DENSE: Final = 5  # requests after a cut
NEAR: Final = 0.93  # of the prompt before the last cut: from here on every request is played
BLOCK: Final = 16
_ORDER: Final = re.compile(r"(?:^|(?<=[.!?] ))(?:Never|Always|Do not|Don't) [^.!?\n]+[.!]", re.MULTILINE)
_PATIENCE: Final = aiohttp.ClientTimeout(total=600)


@dataclass
class Conversation:
    """The messages, those requests that it stands for (how many messages each has), and its tools."""

    messages: list[Message] = field(default_factory=list, repr=False)
    requests: list[int] = field(default_factory=list, repr=False)
    tools: dict[str, Message] = field(default_factory=dict, repr=False)
    orders: list[tuple[int, str]] = field(default_factory=list, repr=False)

    def add(self, part: int, path: Path) -> None:
        """Go on with a session. The system message of the first one stays the only one."""
        session = read_session(path)
        order = f"From here on this holds as well: never push to branch release/{part}."
        for tool in session.tools:
            self.tools.setdefault(tool["function"]["name"], dict(tool))
        if self.messages:
            self._say({"role": "user", "content": order})
            self.orders.append((len(self.messages), order))
        for message in session.messages:
            if message["role"] != "system" or not self.messages:
                self._say(_renamed(json.loads(json.dumps(message)), part))

    def _say(self, message: Message) -> None:
        if message["role"] == "assistant":
            self.requests.append(len(self.messages))
        if message["role"] == "user":
            said = _ORDER.findall(message["content"])
            self.orders += [(len(self.messages) + 1, order) for order in said]
        self.messages.append(message)


def _renamed(message: Message, part: int) -> Message:
    for call in message.get("tool_calls") or ():
        call["id"] = f"{part}-{call['id']}"
    if "tool_call_id" in message:
        message["tool_call_id"] = f"{part}-{message['tool_call_id']}"
    return message


@pytest.fixture(scope="module")
def conversation() -> Conversation:
    """The sessions, over and over, until a million tokens are there."""
    paths = sorted(TRAJECTORIES.glob("*.jsonl"), key=lambda path: ("long" not in path.name, path.name))
    if not paths:
        pytest.skip("the recorded sessions lie outside the repository")
    found, tokens = Conversation(), 0
    for part, path in enumerate(cycle(paths)):
        known = len(found.messages)
        found.add(part, path)
        tokens += len(twin.RENDERER.encode(twin.RENDERER.chat_text(found.messages[known:])))
        if tokens >= MILLION:
            return found
    raise AssertionError


def torn(messages: Sequence[Message]) -> set[tuple[str, str]]:
    """Results with no call of their id before them, and calls that the next messages do not answer."""
    found: set[tuple[str, str]] = set()
    waiting: set[str] = set()
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                found.add(("result without call", message["tool_call_id"]))
            waiting.discard(message["tool_call_id"])
            continue
        found |= {("call without result", each) for each in waiting}
        waiting = {call["id"] for call in message.get("tool_calls") or ()}
    return found | {("call without result", each) for each in waiting}


def origins(sent: Sequence[Message], messages: Sequence[Message]) -> list[int | None]:
    """Which of the client's messages each one is, shortened or not; None for one that is the gateway's own.

    The client's messages must come in their order, and what is not text must be as the client has it: a
    message may be shorter, or have something behind it.
    """
    found: list[int | None] = []
    at = 0
    for each in sent:
        own = next((i for i in range(at, len(messages)) if _is_of(each, messages[i])), None)
        found.append(own)
        at = at if own is None else own + 1
    return found


def _is_of(sent: Message, message: Message) -> bool:
    if sent == message:
        return True
    if _but_texts(sent) != _but_texts(message):
        return False
    calls = zip(sent.get("tool_calls") or (), message.get("tool_calls") or (), strict=True)
    if not all(_is_cut(one["function"]["arguments"], other["function"]["arguments"]) for one, other in calls):
        return False
    text, whole = str(sent["content"]), str(message["content"])
    if text.startswith(whole):  # maybe with something brought back at its end
        return text == whole or message["role"] in ("user", "tool")
    if sent["role"] == "tool":
        return len(text) < len(whole)  # the id says whose it is
    return len(text) < len(whole) and text[:40] == whole[:40] and text[-40:] == whole[-40:]


def _but_texts(message: Message) -> Message:
    calls = message.get("tool_calls") or ()
    named = [{**call, "function": {**call["function"], "arguments": ""}} for call in calls]
    return {**message, "content": "", "tool_calls": named}


def _is_cut(arguments: str, whole: str) -> bool:
    """Whether arguments are the client's, or shorter ones of the same names."""
    if arguments == whole:
        return True
    return len(arguments) < len(whole) and json.loads(arguments).keys() == json.loads(whole).keys()


@dataclass
class Judge:
    """Judges what goes out for each request, and counts."""

    conversation: Conversation
    before: list[Message] = field(default_factory=list, repr=False)
    told: str = ""
    cuts: int = 0
    requests: int = 0
    faults: list[str] = field(default_factory=list)

    def look(self, length: int, sent: list[Message], told: str) -> bool:
        """Whether this request goes out under another compaction than the one before it."""
        self.requests += 1
        messages = self.conversation.messages[:length]
        extends = sent[: len(self.before)] == self.before
        cut = told != self.told
        if not extends and not cut:
            self.faults.append(f"{length}: does not extend the request before, and no compaction is told of")
        self.cuts += cut
        self.before, self.told = sent, told
        self.faults += [f"{length}: {fault}" for fault in self._faults(messages, sent)]
        return cut

    def _faults(self, messages: list[Message], sent: list[Message]) -> Iterator[str]:
        first = next(at for at, each in enumerate(messages) if each["role"] == "user")
        if sent[: first + 1] != messages[: first + 1]:
            yield "system message and task are not as they came"
        if not str(sent[-1]["content"]).startswith(str(messages[-1]["content"])):
            yield "the last message is not as it came"
        yield from sorted(map(str, torn(sent) - torn(messages)))
        own = [each for each, at in zip(sent, origins(sent, messages), strict=True) if at is None]
        if len(own) > 1 or any(each["role"] != "user" for each in own):
            yield f"{len(own)} messages are not the client's, of roles {[each['role'] for each in own]}"
        said = "\n".join(str(each.get("content")) for each in sent)
        yield from (
            f"not said: {order}"
            for at, order in self.conversation.orders
            if at <= len(messages) and order not in said
        )


async def play(gateway: Gateway, recorder: Recorder, conversation: Conversation) -> tuple[Judge, list[int]]:
    """Play it. Returns the judge, and the tokens of every prompt that was answered."""
    judge, prompts = Judge(conversation), list[int]()
    encoded = [json.dumps(each).encode() for each in conversation.messages]
    tools = json.dumps(list(conversation.tools.values())).encode()
    peak, dense, skipped = NEAR * WINDOW, 0, STRIDE
    url, headers = f"{gateway.url}/v1/chat/completions", {"authorization": f"Bearer {SECRET}"}
    async with aiohttp.ClientSession(timeout=_PATIENCE) as client:
        for length in conversation.requests:
            skipped += 1
            near = bool(prompts) and prompts[-1] > NEAR * peak
            if not (near or dense or skipped >= STRIDE or length == conversation.requests[-1]):
                continue
            dense, skipped = max(0, dense - 1), 0
            body = b'{"model":"tiny","max_tokens":1,"tools":%s,"messages":[%s]}' % (
                tools,
                b",".join(encoded[:length]),
            )
            recorder.asked.clear()
            async with client.post(url, data=body, headers=headers) as answer:
                said = await answer.json(content_type=None)
                assert answer.status == 200, (length, said)
                told = answer.headers.get("x-ctxgate-compaction", "")
            own = [each for each, status in recorder.asked if each.get("max_tokens") == 1 and status == 200]
            if judge.look(length, own[-1]["messages"], told):
                dense, peak = DENSE, max(prompts[-1], said["usage"]["prompt_tokens"])
            prompts.append(said["usage"]["prompt_tokens"])
    return judge, prompts


@pytest.mark.parametrize(
    "context",
    [{"compaction": "window", "summarizer": "off"}, {"compaction": "auto", "summarizer": "extractive"}],
    ids=["window", "auto"],
)
async def test_gateways_n2_a_million_tokens_in_a_window_of_a_quarter(
    tmp_path: Path, conversation: Conversation, context: dict[str, object]
) -> None:
    async with (
        twin.serving(max_model_len=WINDOW, blocks=2 * WINDOW // BLOCK + 1) as engine,
        recording(engine.url) as recorder,
        in_front_of(recorder.url, tmp_path, context) as gateway,
    ):
        judge, prompts = await play(gateway, recorder, conversation)
        await asyncio.to_thread(until, gateway.idle, 60.0, "the gateway is idle")
        rows = await asyncio.to_thread(gateway.rows)
    assert not judge.faults, "\n".join(judge.faults[:10])
    assert max(prompts) <= WINDOW
    assert judge.cuts >= 3
    assert max(row.opened.client_tokens or 0 for row in rows) > 0.9 * MILLION
