"""From a request to token ids, as vLLM renders and tokenizes it.

`chat_messages` does what vLLM does to messages and tools; here they meet the model's own chat template
and tokenizer.

Needs the extra `twin` (jinja2, tokenizers); both are imported on first use.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from ctxgate.inference.chat_messages import PromptError, conversation, tool_schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jinja2 import Template
    from tokenizers import Tokenizer

__all__ = ["TINY", "PromptError", "PromptRenderer", "compile_template"]

TINY: Final = Path(__file__).parent / "assets" / "tiny"

CONTINUE_TAG: Final = "CONTINUE_FINAL_MESSAGE_TAG "


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

    @property
    def vocabulary_size(self) -> int:
        """The number of token ids, special ones included."""
        return self.tokenizer.get_vocab_size()

    @property
    def max_chars_per_token(self) -> int:
        """The longest token, which bounds how many characters a window can hold."""
        return self._longest_token

    @cached_property
    def _longest_token(self) -> int:
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
