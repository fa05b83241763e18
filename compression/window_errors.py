"""The real window of a model, read from an engine's own refusal of a prompt that is too long.

What `/v1/models` or the configuration says may be wrong (an adapter reports none, a proxy reports the
base model's); the text of the refusal is the engine's own arithmetic. Other errors quote what a client
sent, so a text is read from its very beginning and the figures at their places, and what it says of the
request has to agree with the request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_LONGEST: Final = 2000


@dataclass(frozen=True, slots=True)
class Overflow:
    """What a refusal tells: the model's `window` in tokens, and what it says that the request had.

    `prompt` is the prompt's length in tokens, None where only `characters` or nothing was counted;
    `at_least` says that the engine stopped counting there. `output`: the tokens asked for, where they are
    named. `refused_output` says that the prompt was not the reason: the output asked for was.
    """

    window: int
    prompt: int | None = None
    at_least: bool = False
    refused_output: bool = False
    output: int | None = None
    characters: int | None = None

    @property
    def of_prompt(self) -> bool:
        """Whether a shorter prompt would help: not where the output asked for fills the window alone."""
        if self.output is not None and self.output >= self.window:
            return False
        return not self.refused_output or self.prompt is not None

    def agrees(self, tokens: int, output: int | None, size: int) -> bool:
        """Whether it can be about a request with a prompt of about `tokens`, in a body of `size` bytes.

        `output`: the tokens asked for, None where the request does not say. An estimate of text that was
        never counted may be wrong by `_APART`; the output is exact.
        """
        if self.output is not None and output is not None and self.output != output:
            return False
        if self.characters is not None:  # a template adds some; bytes are at least as many
            return self.window <= self.characters <= 2 * size + _TEMPLATE_CHARACTERS
        if self.prompt is None:
            return False
        exceeds = self.prompt + (self.output or 0) >= self.window
        known = self.at_least or tokens <= self.prompt * _APART
        return exceeds and known and self.prompt <= tokens * _APART


@dataclass(frozen=True, slots=True)
class Refusal:
    """A prompt that `replica` refused as too long: what it said, and how often this request was refused."""

    overflow: Overflow
    replica: str
    number: int


_APART: Final = 4  # times longer or shorter than it was taken for
_TEMPLATE_CHARACTERS: Final = 8192

# Gateways in between put the names of their errors before the engine's words.
_NAMES: Final = r"(?:[A-Za-z.]{1,60}(?: -|:) ){0,4}"
_CONTEXT: Final = r"This model's maximum context length is (?P<window>\d{1,10}) tokens"
_HAS: Final = rf"{_CONTEXT}\. However, your prompt contains "
_TEXTS: Final = tuple(
    re.compile(_NAMES + text)
    for text in (
        # vLLM: prompts counted while tokenizing, or by characters before that.
        rf"{_HAS}(?P<least>at least )?(?P<prompt>\d{{1,10}}) input tokens",
        rf"{_HAS}(?P<characters>\d{{1,10}}) characters \(more than \d{{1,12}} characters",
        # vLLM, where the answer asked for does not fit behind the prompt.
        rf"{_CONTEXT}\. However, you requested (?P<output>\d{{1,10}}) output tokens and your prompt contains "
        r"(?P<least>at least )?(?P<prompt>\d{1,10}) input tokens",
        r"'max_tokens' or 'max_completion_tokens' is too large: (?P<output>\d{1,10})\. "
        rf"{_CONTEXT} and your request has (?P<prompt>\d{{1,10}}) input tokens",
        # OpenAI's own words, which hosted models and other gateways pass on.
        rf"{_CONTEXT}\. However, your messages resulted in (?P<prompt>\d{{1,10}}) tokens",
        rf"{_CONTEXT}\. However, you requested \d{{1,10}} tokens \((?P<prompt>\d{{1,10}}) in (?:the messages|"
        r"your prompt)[,;] (?P<output>\d{1,10}) (?:in|for) the completion",
        # vLLM's last check, which also refuses a prompt that fills the window to the last token. The encoder
        # prompt of the same words is measured against another limit.
        r"The decoder prompt \(length (?P<prompt>\d{1,10})\) (?:plus the number of requested output tokens "
        r"\(at least 1\) )?is longer than the maximum model length of (?P<window>\d{1,10})",
        r"max_(?:tokens|completion_tokens|output_tokens)=(?P<output>\d{1,10}) cannot be greater than "
        r"max_model_len=(?P<window>\d{1,10})",
        rf"{_CONTEXT}\b",  # in words that are not known: a client may be told, nothing else follows from it
    )
)


def read_overflow(message: str) -> Overflow | None:
    """What the text of an error says about the window; None where it is about something else."""
    text = message[:_LONGEST]
    found = next((match for each in _TEXTS if (match := each.match(text)) is not None), None)
    if found is None:
        return None
    said = found.groupdict()
    window = int(said["window"])
    prompt, output, characters = (_number(said.get(name)) for name in ("prompt", "output", "characters"))
    refused_output = output is not None and (prompt is None or prompt < window)
    if window < 1:
        return None
    return Overflow(window, prompt, said.get("least") is not None, refused_output, output, characters)


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
