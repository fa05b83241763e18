"""Conversations whose model may look up what left its prompt, in front of a scripted upstream."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ctxgate.compression.recall_tool import NAME
from ctxgate.gateway import recall_answers
from ctxgate.gateway.config import Context
from ctxgate.gateway.recall import Recall
from support.behaviours import plays
from support.gateway import MODEL, bearer, until
from support.recalling import NearProcess
from support.upstream import usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from support.client import Answer
    from support.gateway import Gateway
    from support.upstream import Behaviour, Exchange, Upstream

CONTEXT: Final = Context(
    "window", tool_results=True, tool_result_bytes=1024, recall=False, recall_tokens=400, recall_tool=True
)
NEEDLE: Final = "The deploy key of the mirror is kx-77421-zulu."
QUERY: Final = '{"query": "deploy key of the mirror"}'
TOOLS: Final = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("read", "write")
]
TASK: Final = {"role": "user", "content": "Find the key of the mirror and use it."}
READ: Final = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "r1", "type": "function", "function": {"name": "read", "arguments": "{}"}}],
}
_LINES: Final = [f"{number:04d} nothing of note stands in this line of the listing" for number in range(120)]
RESULT: Final = {
    "role": "tool",
    "tool_call_id": "r1",
    "content": "\n".join([*_LINES[:60], NEEDLE, *_LINES[60:]]),
}
HISTORY: Final = [TASK, READ, RESULT]


def call(arguments: str = QUERY, id_: str = "c1", name: str = NAME) -> dict[str, Any]:
    """A whole tool call."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(
    *made: dict[str, Any], text: str = "", reason: str = "tool_calls", thought: str = "", **figures: Any
) -> Behaviour:
    """An answer with tool calls; in a stream arguments come in pieces of five characters."""

    def write(exchange: Exchange) -> None:
        if not exchange.streams:
            document = exchange.answer_document(reason, text, **figures)
            message = document["choices"][0]["message"]
            message |= {"content": text or None, "tool_calls": list(made)}
            if thought:
                message["reasoning_content"] = thought
            exchange.respond(200, json.dumps(document).encode())
            return
        exchange.head()
        exchange.chunk({"role": "assistant", "content": ""})
        if thought:
            exchange.chunk({"reasoning_content": thought})
        if text:
            exchange.text(text)
        for index, each in enumerate(made):
            said = each["function"]
            begins = {**each, "index": index, "function": {"name": said["name"], "arguments": ""}}
            exchange.chunk({"tool_calls": [begins]})
            for at in range(0, len(said["arguments"]), 5):
                piece = {"index": index, "function": {"arguments": said["arguments"][at : at + 5]}}
                exchange.chunk({"tool_calls": [piece]})
        exchange.chunk({}, reason)
        exchange.usage_chunk(**figures)
        exchange.done()

    return plays(write)


def whole(edit: Callable[[dict[str, Any]], None], *made: dict[str, Any]) -> Behaviour:
    """A whole answer with tool calls, its document edited before it is sent."""

    def write(exchange: Exchange) -> None:
        document = exchange.answer_document("tool_calls", "")
        document["choices"][0]["message"] |= {"content": None, "tool_calls": list(made)}
        edit(document)
        exchange.respond(200, json.dumps(document).encode())

    return plays(write)


def says(text: str, **figures: Any) -> Behaviour:
    """A plain answer."""

    def write(exchange: Exchange) -> None:
        if not exchange.streams:
            exchange.answer(text=text, **figures)
            return
        exchange.head()
        exchange.chunk({"role": "assistant", "content": ""})
        for word in text.split(" "):
            exchange.text(word + " " if not text.endswith(word) else word)
        exchange.chunk({}, "stop")
        exchange.usage_chunk(**figures)
        exchange.done()

    return plays(write)


@dataclass
class Agent:
    """A client of a gateway whose recall process is near. `messages` is its whole history."""

    gateway: Gateway
    upstream: Upstream
    stream: bool = False
    messages: list[dict[str, Any]] = field(default_factory=lambda: [dict(TASK)])
    options: dict[str, Any] = field(default_factory=dict)
    headers: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        near(self.gateway)

    async def begin(self) -> None:
        """The first request, and the result that it led to."""
        self.upstream.play(calls(call("{}", "r1", "read")))
        await self.ask()
        assert self.messages[1]["tool_calls"][0]["function"]["name"] == "read"
        self.messages.append(RESULT)

    async def ask(self, *more: dict[str, Any]) -> Answer:
        """One request; its answer joins the history."""
        self.messages += more
        body = {"model": MODEL, "messages": self.messages, "tools": TOOLS, **self.options}
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = await self.gateway.post(body, headers=(bearer(), *self.headers))
        if answer.status == 200 and not (self.stream and "error" in answer.documents[-1]):
            self.messages.append(merged(answer) if self.stream else answer.document["choices"][0]["message"])
        await until(lambda: not self.gateway.services.background)
        await self.gateway.services.recall.settled()
        return answer

    def sent(self) -> list[list[dict[str, Any]]]:
        """The messages of every call that reached the upstream."""
        return [exchange.document["messages"] for exchange in self.upstream.calls]


def near(gateway: Gateway) -> None:
    """Let a gateway search inside the test's own process."""
    services = gateway.services
    recall_answers.WITHIN_S = 60.0  # type: ignore[misc]  # a busy machine is no slow search
    services.recall = Recall(
        services.archive, NearProcess(), lambda outcome: services.telemetry.recalls.labels(outcome).inc()
    )


def merged(answer: Answer) -> dict[str, Any]:
    """The message that a client makes of a stream, as OpenAI's does: all texts are added up."""
    message: dict[str, Any] = {}
    tools: dict[int, dict[str, Any]] = {}
    for document in answer.documents:
        for choice in document.get("choices", ()):
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    for part in value:
                        _add_call(tools.setdefault(part["index"], {}), part)
                elif value is not None:
                    message[name] = message.get(name, "") + value
    if tools:
        message["tool_calls"] = [tools[index] for index in sorted(tools)]
        message["content"] = message.get("content") or None
    return message


def _add_call(found: dict[str, Any], part: dict[str, Any]) -> None:
    function = found.setdefault("function", {"name": "", "arguments": ""})
    for name, value in part.get("function", {}).items():
        function[name] += value
    found |= {name: value for name, value in part.items() if name not in ("index", "function")}


def extends(requests: Iterable[list[dict[str, Any]]]) -> bool:
    """Whether each prompt begins as the one before it."""
    before: list[dict[str, Any]] = []
    for messages in requests:
        if messages[: len(before)] != before:
            return False
        before = messages
    return True


def figures(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """A usage as a client gets it, without its price."""
    return usage(prompt=prompt, completion=completion, cached=cached)
