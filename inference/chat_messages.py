"""Messages and tools as a chat template sees them, after vLLM's own rewriting.

vLLM rewrites messages before its chat template sees them: list content becomes text joined by newlines,
tool-call arguments become objects, tool schemas pass through typed models, developer messages become
system ones. Each step here follows the engine's, for everything a text model accepts.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# The key that holds the text of a content part, by the part's type.
TEXT_PARTS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
BILLING_HEADER: Final = "x-anthropic-billing-header"
TOOL_FIELDS: Final = ("name", "description", "parameters")
OPTIONAL_TOOL_FIELDS: Final = ("strict", "defer_loading")


class PromptError(ValueError):
    """A prompt that the engine refuses; `param` names the field at fault, where vLLM names one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def conversation(messages: Iterable[Mapping[str, Any]], model: str) -> list[dict[str, Any]]:
    """Messages as a chat template sees them.

    Raises PromptError for content that a text model cannot take.
    """
    turns = [_turn(message, model) for message in messages]
    if any(turn["role"] == "developer" for turn in turns):
        return _one_system_message(turns)
    return turns


def _turn(message: Mapping[str, Any], model: str) -> dict[str, Any]:
    role: str = message["role"]
    parts = _parts(message.get("content"))
    if role == "system":
        parts = _without_billing_header(parts)
    texts = [text for text in (_part_text(part, model) for part in parts) if text]
    turn: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if role == "assistant" and message.get("tool_calls"):
        turn["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    if role == "assistant" and message.get("reasoning") is not None:
        turn["reasoning"] = turn["reasoning_content"] = message["reasoning"]
    if role == "tool" and "tool_call_id" in message:
        turn["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        turn["name"] = message["name"]
    return turn


def _parts(content: Any) -> list[Any]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return list(content)


def _part_text(part: Any, model: str) -> str | None:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text")
    if kind not in TEXT_PARTS:
        raise PromptError(f"{model} is not a multimodal model")
    return cast("str | None", part.get(TEXT_PARTS[kind]))


def _without_billing_header(parts: list[Any]) -> list[Any]:
    """Drop the attribution line that one client puts first and changes with every request."""
    kept: list[Any] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if isinstance(text, str) and text.startswith(BILLING_HEADER):
            text = text.partition("\n")[2]
            if text:
                kept.append(text)
        else:
            kept.append(part)
    return kept


def _tool_call(call: Any) -> dict[str, Any]:
    """A call with its arguments as an object; what is not the text of an object becomes an empty one."""
    if not isinstance(call, dict):
        raise PromptError("assistant tool_calls entries must be objects.", "tool_calls")
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise PromptError(
            "chat completions only support assistant tool_calls of type 'function'.", "tool_calls"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            arguments = {}
    if not isinstance(arguments, dict):
        arguments = {}
    return call | {"function": function | {"arguments": arguments}}


def _one_system_message(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Developer messages become system ones, and all system messages one, at the front."""
    system = [turn for turn in turns if turn["role"] in ("system", "developer")]
    others = [turn for turn in turns if turn["role"] not in ("system", "developer")]
    if len(system) == 1 and turns[0] is system[0]:
        return [system[0] | {"role": "system"}, *others]
    merged = "\n\n".join(turn["content"] for turn in system if turn["content"])
    return [{"role": "system", "content": merged}, *others]


def tool_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as vLLM's typed models write it: known fields in their order, absent ones as null.

    The JSON schema under `parameters` keeps the client's order. The tool has been validated before.
    """
    given = tool["function"]
    defer = tool.get("defer_loading")
    function = {name: given.get(name) for name in TOOL_FIELDS}
    optional = {"strict": given.get("strict"), "defer_loading": given.get("defer_loading", defer)}
    function |= {name: optional[name] for name in OPTIONAL_TOOL_FIELDS if optional[name] is not None}
    schema: dict[str, Any] = {"type": "function", "function": function}
    return schema if defer is None else schema | {"defer_loading": defer}
