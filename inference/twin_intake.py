"""From a checked request to the tokens the twin will see, with the engine's length checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ctxgate.inference.chat_messages import PromptError
from ctxgate.inference.twin_requests import Refusal, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ctxgate.inference.twin_requests import ChatRequest, CompletionRequest, Conversation


class Renderer(Protocol):
    """What makes tokens of a prompt."""

    @property
    def max_chars_per_token(self) -> int: ...

    @property
    def vocabulary_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str: ...


class Intake:
    """Renders and measures prompts for a window of `max_model_len` tokens."""

    def __init__(self, renderer: Renderer, max_model_len: int) -> None:
        self.renderer = renderer
        self.max_model_len = max_model_len

    def chat_text(self, asked: Conversation) -> str:
        """The rendered conversation. Raises Refusal."""
        try:
            return self.renderer.chat_text(
                [message.model_dump() for message in asked.messages],
                None if asked.tools is None else [tool.model_dump() for tool in asked.tools],
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message,
            )
        except PromptError as error:
            if error.param is None:
                raise Refusal(str(error)) from error
            raise refuse(str(error), error.param) from error

    def chat(self, asked: ChatRequest) -> list[int]:
        """A chat's prompt, no longer than the window. Raises Refusal."""
        return self._encode(self.chat_text(asked))

    def completion(self, asked: CompletionRequest, *, checks_tokens: bool = True) -> list[list[int]]:
        """A completion's prompts, none longer than the window. Raises Refusal.

        `checks_tokens`: ids that the vocabulary lacks are refused; the engine only does so to run them.
        """
        return [
            self._encode(prompt) if isinstance(prompt, str) else self._known(prompt, checks=checks_tokens)
            for prompt in asked.prompts
        ]

    def limit(self, asked: int | None, prompt: int) -> int:
        """The tokens an answer may have: what was asked, cut to the room left. Raises Refusal."""
        window = self.max_model_len
        if asked is not None and asked > window:
            raise refuse(
                f"max_tokens={asked} cannot be greater than max_model_len={window}. "
                "Please request fewer output tokens.",
                "max_tokens",
                asked,
            )
        limit = window - prompt if asked is None else min(asked, window - prompt)
        if limit < 1:
            raise refuse(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
        return limit

    def _encode(self, text: str) -> list[int]:
        longest = self.max_model_len * self.renderer.max_chars_per_token
        if len(text) > longest:
            raise self._too_long(
                f"{len(text)} characters (more than {longest} characters, which is the upper bound for "
                f"{self.max_model_len} input tokens).",
                "input_text",
                len(text),
            )
        tokens = self.renderer.encode(text)
        if len(tokens) > self.max_model_len:
            # The engine's tokenizer stops one token past the window.
            self._check_length(self.max_model_len + 1)
        return tokens

    def _known(self, tokens: list[int], *, checks: bool = True) -> list[int]:
        """Token ids given by the client. Raises Refusal; with `checks`, for ids that the vocabulary lacks."""
        self._check_length(len(tokens))
        if not tokens:
            raise Refusal("You must pass at least one prompt")
        size = self.renderer.vocabulary_size
        unknown: Sequence[int] = [token for token in tokens if not 0 <= token < size]
        if unknown and checks:
            raise Refusal(f"Token id {unknown[0]} is out of vocabulary")
        return tokens

    def _check_length(self, count: int) -> None:
        if count > self.max_model_len:
            qualifier = "at least " if count == self.max_model_len + 1 else ""
            raise self._too_long(
                f"{qualifier}{count} input tokens, which exceeds this limit even without any output tokens.",
                "input_tokens",
                count,
            )

    def _too_long(self, contents: str, parameter: str, value: int) -> Refusal:
        return refuse(
            f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt "
            f"contains {contents} Please reduce the length of the input prompt.",
            parameter,
            value,
        )
