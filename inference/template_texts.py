"""The conversations that a template is probed with. Pure data; one answer never depends on another.

Every word is made up here, so that a probe tells nothing of any client. Texts after a place where
templates differ are long where a difference is told by cache blocks: `pad` words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

Message: TypeAlias = "dict[str, Any]"
Request: TypeAlias = "dict[str, Any]"
"""`messages`, and `tools` where there are any."""

# Nine letters and digits: the only form of an id that every known template takes.
CALL_ID: Final = "a1b2c3d4e"
OTHER_ID: Final = "z9y8x7w6v"
ARGUMENTS: Final = '{"path":"notes.txt","lines":[1,20]}'
RESPELLED: Final = '{ "lines": [1, 20],  "path": "notes.txt" }'
_WORDS: Final = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def filler(words: int) -> str:
    """So many short words; no tokenizer makes fewer tokens of them than there are words, or nearly so."""
    return " ".join(_WORDS[number % 10] for number in range(words))


def _tool(name: str, about: str, properties: Message) -> Message:
    parameters = {"type": "object", "properties": properties, "required": sorted(properties)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


READ: Final = _tool(
    "read_lines", "Lines of a file.", {"path": {"type": "string"}, "lines": {"type": "array"}}
)
FIND: Final = _tool("find_text", "Where a text stands.", {"text": {"type": "string"}})


def _reordered(value: Any) -> Any:
    """A JSON value with the members of every object in the opposite order."""
    if isinstance(value, dict):
        return {name: _reordered(member) for name, member in reversed(value.items())}
    return [_reordered(item) for item in value] if isinstance(value, list) else value


def _shuffled(tool: Message) -> Message:
    """The same tool; the keys of its schema in another order."""
    function = tool["function"]
    return tool | {"function": function | {"parameters": _reordered(function["parameters"])}}


@dataclass(frozen=True, slots=True)
class Texts:
    """The probe's conversations. `pad`: words of filler in the task and in the tool's result."""

    pad: int

    @property
    def _opening(self) -> list[Message]:
        task = f"Tell me what the notes say. {filler(self.pad)}".rstrip()
        return [
            {"role": "system", "content": "You keep the notes of a team."},
            {"role": "user", "content": task},
        ]

    def _call(
        self, arguments: str = ARGUMENTS, call_id: str = CALL_ID, content: Message | None = None
    ) -> Message:
        function = {"name": "read_lines", "arguments": arguments}
        head = {"role": "assistant"} | ({"content": None} if content is None else content)
        return head | {"tool_calls": [{"id": call_id, "type": "function", "function": function}]}

    def _result(self, call_id: str = CALL_ID) -> Message:
        text = f"Buy milk. {filler(self.pad)}".rstrip()
        return {"role": "tool", "tool_call_id": call_id, "content": text}

    def plain(self) -> list[Request]:
        """Two turns of a conversation without tools."""
        first = self._opening
        return [{"messages": first}, {"messages": [*first, *_next_turn()]}]

    def tools(self) -> list[Request]:
        """The same with tools that nobody calls."""
        return [turn | {"tools": [READ, FIND]} for turn in self.plain()]

    def tool_results(self) -> list[Request]:
        """Three turns: before a tool call, after its result, after the next message of the user."""
        first = self._opening
        second = [*first, self._call(), self._result()]
        return _with_tools(first, second, [*second, *_next_turn()])

    def reasoning(self) -> list[Request]:
        """Two turns, the first with the reasoning of an unfinished round, the second past that round."""
        thought = {
            "reasoning": "The notes must be read first.",
            "reasoning_content": "The notes must be read first.",
        }
        first = [*self._opening, self._call() | thought, self._result()]
        answer, question = _next_turn()
        last = {"reasoning": "They name milk.", "reasoning_content": "They name milk."}
        return _with_tools(first, [*first, answer | last, question])

    def arguments(self) -> list[Request]:
        """One tool call in two spellings."""
        return [self._round(self._call(arguments)) for arguments in (ARGUMENTS, RESPELLED)]

    def empty_content(self) -> list[Request]:
        """One tool call beside null, missing and empty content."""
        return [
            self._round(self._call(content=content)) for content in ({"content": None}, {}, {"content": ""})
        ]

    def call_ids(self) -> list[Request]:
        """One tool call under two ids."""
        return [self._round(self._call(call_id=one), one) for one in (CALL_ID, OTHER_ID)]

    def tool_order(self) -> list[Request]:
        """Two tools in two orders, their schemas' keys too."""
        first = {"messages": self._opening}
        return [first | {"tools": [READ, FIND]}, first | {"tools": [_shuffled(FIND), _shuffled(READ)]}]

    def _round(self, call: Message, call_id: str = CALL_ID) -> Request:
        return _with_tools([*self._opening, call, self._result(call_id)])[0]


def _next_turn() -> list[Message]:
    return [
        {"role": "assistant", "content": "They say: buy milk."},
        {"role": "user", "content": "And what else?"},
    ]


def _with_tools(*turns: list[Message]) -> list[Request]:
    return [{"messages": messages, "tools": [READ, FIND]} for messages in turns]
