"""From a request to token ids, as vLLM renders and tokenizes it.

vLLM rewrites messages before its chat template sees them: list content becomes text joined by newlines,
tool-call arguments become objects, tool schemas pass through typed models, developer messages become
system ones. Each step here follows the engine's, for everything a text model accepts.

Needs the extra `twin` (jinja2, tokenizers); both are imported on first use.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from jinja2 import Template
    from tokenizers import Tokenizer

TINY: Final = Path(__file__).parent / "assets" / "tiny"

# The key that holds the text of a content part, by the part's type.
TEXT_PARTS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
BILLING_HEADER: Final = "x-anthropic-billing-header"
CONTINUE_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "
TOOL_FIELDS: Final = ("name", "description", "parameters")
OPTIONAL_TOOL_FIELDS: Final = ("strict", "defer_loading")


class PromptError(ValueError):
    """A prompt that the engine refuses; `param` names the field at fault, where vLLM names one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class PromptRenderer:
    """The tokenizer and chat template of a model folder; `name` is the served model's."""

    folder: Path = TINY
    name: str = "tiny"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The fast tokenizer of `tokenizer.json`."""
        from tokenizers import Tokenizer  # noqa: PLC0415 - belongs to the extra

        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @cached_property
    def end(self) -> int:
        """The id of the token that ends an answer."""
        token: str = self._settings["eos_token"]
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"{self.folder}: {token!r} is not in the vocabulary")
        return found

    @cached_property
    def max_chars_per_token(self) -> int:
        """The longest token, which bounds how many characters a window can hold."""
        return max(map(len, self.tokenizer.get_vocab()))

    @cached_property
    def _settings(self) -> dict[str, Any]:
        text = (self.folder / "tokenizer_config.json").read_text(encoding="utf-8")
        return cast("dict[str, Any]", json.loads(text))

    @cached_property
    def _template(self) -> Template:
        return compile_template(self._settings["chat_template"])

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a chat prompt. Raises PromptError for what the template or the engine refuses."""
        from jinja2 import TemplateError  # noqa: PLC0415 - belongs to the extra

        turns = conversation(messages, self.name)
        if not turns:
            raise PromptError(
                "Cannot apply chat template to an empty conversation. Provide at least one message."
            )
        if continue_final_message:
            turns[-1]["content"] += CONTINUE_TAG
        special = {key: value for key, value in self._settings.items() if key.endswith("_token")}
        try:
            text = self._template.render(
                messages=turns,
                tools=None if tools is None else [tool_schema(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt,
                **special,
            )
        except (TemplateError, TypeError) as error:
            raise PromptError(str(error)) from error
        return _cut_at_tag(text) if continue_final_message else text

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered prompt or of a completion's prompt."""
        return self.tokenizer.encode(text).ids

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(tokens, skip_special_tokens=skip_special)

    def printable_words(self) -> tuple[int, ...]:
        """Ids of the tokens that are a space and a lower-case word: what the twin's answers consist of."""
        words = (
            number
            for token, number in self.tokenizer.get_vocab().items()
            if len(token) > 2 and token[0] == "\u0120" and token[1:].isascii() and token[1:].islower()
        )
        return tuple(sorted(words))


def compile_template(source: str) -> Template:
    """A chat template in the sandbox and with the filters that transformers gives it."""
    from jinja2 import TemplateError  # noqa: PLC0415 - belongs to the extra
    from jinja2.ext import loopcontrols  # noqa: PLC0415 - as above
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415 - as above

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _cut_at_tag(text: str) -> str:
    """Drop what the template put after the message that the answer continues."""
    at = text.rindex(CONTINUE_TAG.strip())
    kept = text[:at]
    return kept if text[at : at + len(CONTINUE_TAG)] == CONTINUE_TAG else kept.rstrip()


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
