"""Seeded agent traffic against any vLLM-compatible server: conversations that grow, fork and return.

The same seed gives the same requests. Histories hold made-up answers, so that what a model says does
not steer the traffic; only `Continuation` prompts carry a server's own output, whose length is fixed.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

WORDS: Final = (
    *("def", "return", "self", "cache", "block", "token", "prefix", "replica", "price", "ledger", "stream"),
    *("chunk", "error", "retry", "deadline", "{}", "[]", "->", "==", "!=", "0", "1", "42", "0x1f"),
    *("\n\n", "é", "ß", "漢字", "🙂", "<|end|>", "queue\n\t"),
)
PROMPT_CHARACTERS: Final = 7000  # a conversation beyond this is given up
TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Read a file",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "where <it> is & what's in it"},
                    "range": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
                },
                "required": ["path"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"parameters": {"type": "object"}, "name": "list", "strict": True}},
    {"type": "function", "function": {"name": "run", "description": None}},
]


@dataclass
class Chat:
    """A conversation under way."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    salt: str | None = None

    @property
    def size(self) -> int:
        return len(str(self.messages)) + len(str(self.tools))


@dataclass(frozen=True)
class Request:
    """One request: path and body. `continues` appends the server's own output to prompts of this name."""

    path: str
    body: dict[str, Any]
    remember: str | None = None
    continues: str | None = None


@dataclass
class Traffic:
    """A generator of requests."""

    seed: int
    chats: list[Chat] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def requests(self, count: int) -> Iterator[Request]:
        """Yield `count` requests."""
        for number in range(count):
            kind = self.random.choices(
                ("grow", "new", "fork", "repeat", "text", "tokens"), (55, 10, 10, 10, 8, 7)
            )[0]
            if kind == "text":
                yield self._text()
            elif kind == "tokens":
                yield self._tokens(number)
            else:
                yield self._chat(kind)

    def prose(self, words: int) -> str:
        """Text of about so many words."""
        return " ".join(self.random.choices(WORDS, k=words))

    def _chat(self, kind: str) -> Request:
        chat = self._pick(kind)
        body: dict[str, Any] = {"model": "tiny", "messages": copy.deepcopy(chat.messages)}
        if chat.tools:
            body["tools"] = chat.tools
        if chat.salt:
            body["cache_salt"] = chat.salt
        return Request("/v1/chat/completions", body | self._limits())

    def _pick(self, kind: str) -> Chat:
        self.chats = [chat for chat in self.chats if chat.size < PROMPT_CHARACTERS]
        if kind == "new" or len(self.chats) < 3:
            chat = self._begin()
            self.chats.append(chat)
            return chat
        chat = self.random.choice(self.chats[-6:])
        if kind == "fork":
            chat = copy.deepcopy(chat)
            del chat.messages[self.random.randint(1, len(chat.messages)) :]
            chat.messages.append({"role": "user", "content": self.prose(30)})
            self.chats.append(chat)
        elif kind == "grow":
            chat.messages += self._turn(with_tools=chat.tools is not None)
        return chat

    def _begin(self) -> Chat:
        role = self.random.choice(("system", "system", "developer"))
        head = {"role": role, "content": self._shared_head()}
        first = {"role": "user", "content": self.prose(self.random.randint(5, 60))}
        tools = copy.deepcopy(TOOLS) if self.random.random() < 0.5 else None
        salt = self.random.choice((None, None, "team-a", "team-b"))
        return Chat([head, first] if self.random.random() < 0.9 else [first], tools, salt)

    def _shared_head(self) -> str:
        """One of three long system prompts, so that conversations share prefixes."""
        own = random.Random(self.random.randrange(3))
        return " ".join(own.choices(WORDS, k=120))

    def _turn(self, *, with_tools: bool) -> list[dict[str, Any]]:
        if not with_tools:
            return [
                {"role": "assistant", "content": self.prose(self.random.randint(3, 50))},
                {"role": "user", "content": self._content()},
            ]
        call_id = f"call-{self.random.randrange(10**6)}"
        arguments = self.random.choice(
            ('{"path": "a.py",  "range": [1, 20]}', "{}", "", '{"text": "\\u00e9 <x> &"}', "[1]", "{broken")
        )
        call = {"id": call_id, "type": "function", "function": {"name": "read", "arguments": arguments}}
        return [
            {"role": "assistant", "content": self.random.choice((None, "", "I look.")), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "content": self._content()},
        ]

    def _content(self) -> Any:
        text = self.prose(self.random.randint(5, 120))
        if self.random.random() < 0.3:
            return [{"type": "text", "text": text}, {"type": "text", "text": self.prose(4)}]
        return text

    def _text(self) -> Request:
        own = random.Random(self.random.randrange(2))
        prompt = " ".join(own.choices(WORDS, k=100)) + self.prose(self.random.randint(0, 40))
        return Request("/v1/completions", {"model": "tiny", "prompt": prompt} | self._limits())

    def _tokens(self, number: int) -> Request:
        """Token ids; every second such request continues the output of the one before."""
        name = "thread"
        fresh = self.random.random() < 0.4 or number < 40
        length = self.random.randint(60, 200) if fresh else self.random.randint(1, 40)
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": [self.random.randrange(3, 900) for _ in range(length)],
        }
        body |= {"max_tokens": self.random.randint(20, 90), "ignore_eos": True, "return_token_ids": True}
        return Request("/v1/completions", body, remember=name, continues=None if fresh else name)

    def _limits(self) -> dict[str, Any]:
        limits: dict[str, Any] = {"max_tokens": self.random.randint(1, 60), "ignore_eos": True}
        if self.random.random() < 0.5:
            limits |= {"stream": True, "stream_options": {"include_usage": True}}
        return limits
