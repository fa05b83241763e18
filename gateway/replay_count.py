"""Counts a replay's prompts by a local tokenizer, in time proportional to what is new.

A conversation grows by a few messages per request, but tokenizing it whole costs more each time. Special
tokens cut a prompt into pieces that a tokenizer treats one by one, so a piece met before is looked up.
Not every tokenizer is like that: the first prompts are tokenized both ways, and where the results
differ, always whole.
"""

from __future__ import annotations

import re
from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from ctxgate.inference.prompts import PromptError, PromptRenderer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any

_CHECKS: Final = 3
_PIECES: Final = 2**15


class PromptCounter:
    """Token ids of chat prompts, by the tokenizer and template of a model folder (default: the twin's)."""

    def __init__(self, folder: Path | None = None) -> None:
        """Load the tokenizer. Raises ValueError for a folder that holds none, ImportError without `twin`."""
        self._renderer = PromptRenderer() if folder is None else PromptRenderer(folder)
        try:
            self._renderer.chat_text([{"role": "user", "content": "Hello."}])
            added = self._renderer.tokenizer.get_added_tokens_decoder().values()
        except ImportError:
            raise
        except Exception as error:  # tokenizers raises bare Exception for a missing or broken file
            raise ValueError(f"{self._renderer.folder}: no usable tokenizer and template: {error}") from error
        contents = sorted((token.content for token in added), key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, contents)) + ")") if contents else None
        self._checks = _CHECKS
        self._piece = lru_cache(_PIECES)(self._encode)

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> array[int] | None:
        """The prompt's token ids, or None for a conversation that the template refuses."""
        try:
            text = self._renderer.chat_text(messages, tools or None)
        except PromptError:
            return None
        if self._special is None:
            return self._encode(text)
        if self._checks == 0:
            return self._joined(text)
        whole = self._encode(text)
        self._checks -= 1
        if self._joined(text) != whole:
            self._special = None
        return whole

    def _encode(self, text: str) -> array[int]:
        return array("I", self._renderer.encode(text))

    def _joined(self, text: str) -> array[int]:
        ids = array("I")
        if self._special is not None:
            for piece in filter(None, self._special.split(text)):
                ids += self._piece(piece)
        return ids
