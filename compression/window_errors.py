"""The real window of a model, read from an engine's own refusal of a prompt that is too long.

What `/v1/models` or the configuration says may be wrong (an adapter reports none, a proxy reports the
base model's); the text of the refusal is the engine's own arithmetic.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

# An error text may quote what the client sent. Only its beginning is read, and only whole phrases count.
_LONGEST: Final = 2000
_N: Final = r"(\d{1,10})"


@dataclass(frozen=True, slots=True)
class Overflow:
    """What a refusal tells: the model's `window` in tokens, and the prompt's length where it says so.

    `prompt` is None where only characters or nothing was counted; `at_least` says that the engine stopped
    counting there. `refused_output` says that the prompt was not the reason: the output asked for was.
    """

    window: int
    prompt: int | None = None
    at_least: bool = False
    refused_output: bool = False

    @property
    def of_prompt(self) -> bool:
        """Whether a shorter prompt would help: not where the output asked for exceeds any window alone."""
        return not self.refused_output or self.prompt is not None


# vLLM: prompts counted while tokenizing; before tokenizing it counts characters and names no prompt tokens.
_CONTEXT: Final = re.compile(rf"maximum context length is {_N} tokens")
_PROMPT: Final = re.compile(rf"your prompt contains (at least )?{_N} input tokens")
# OpenAI's own words, which hosted models and other gateways pass on.
_MESSAGES: Final = re.compile(rf"your messages resulted in {_N} tokens")
_REQUESTED: Final = re.compile(rf"you requested {_N} tokens \({_N} in (?:the messages|your prompt)")
# vLLM's last check, which also refuses a prompt that fills the window to the last token. The encoder
# prompt of the same words is measured against another limit.
_DECODER: Final = re.compile(
    rf"The decoder prompt \(length {_N}\) (?:plus the number of requested output tokens \(at least 1\) )?"
    rf"is longer than the maximum model length of {_N}"
)
_OUTPUT: Final = re.compile(
    rf"max_(?:tokens|completion_tokens|output_tokens)={_N} cannot be greater than max_model_len={_N}"
)


def read_overflow(message: str) -> Overflow | None:
    """What the text of an error says about the window; None where it is about something else."""
    text = message[:_LONGEST]
    if decoder := _DECODER.search(text):
        found = Overflow(int(decoder[2]), int(decoder[1]))
    elif output := _OUTPUT.search(text):
        found = Overflow(int(output[2]), refused_output=True)
    elif context := _CONTEXT.search(text):
        found = _counted(int(context[1]), text[context.end() :])
    else:
        return None
    return found if found.window > 0 else None


def _counted(window: int, text: str) -> Overflow:
    """What the text after the window says was counted."""
    if prompt := _PROMPT.search(text):
        return Overflow(window, int(prompt[2]), at_least=prompt[1] is not None)
    if messages := _MESSAGES.search(text):
        return Overflow(window, int(messages[1]))
    if requested := _REQUESTED.search(text):
        length = int(requested[2])
        return Overflow(window, length, refused_output=length < window)
    return Overflow(window)
