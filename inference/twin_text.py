"""From the engine's tokens to the text of one answer: decoding, stop strings, log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ctxgate.inference.twin_job import Admission, Output

LOGPROB: Final = -1.0  # of every chosen token; the runners-up follow at equal distances
LOGPROB_STEP: Final = 0.5


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in an answer. `tokens` include a last one that shows no text."""

    text: str
    tokens: tuple[int, ...]
    finish: str | None
    stop_reason: str | None = None


@dataclass(slots=True)
class Answer:
    """One choice of a reply while it grows.

    `piece` decodes one token; the twin's words are whole characters, so pieces just add up. Text that
    could be the beginning of a stop string is held back until the answer ends.
    """

    index: int
    prompt: int  # which of the request's prompts it answers
    piece: Callable[[int], str]
    stops: Sequence[str] = ()
    keep_stop: bool = False
    min_tokens: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | None = None
    admission: Admission | None = None
    last_token: float | None = None
    _shown: int = 0

    def feed(self, outputs: Sequence[Output]) -> Delta:
        """Take tokens as they come; what comes after the end is ignored."""
        before = len(self.tokens)
        for output in outputs:
            if self.finish is not None:
                break
            self.admission = output.admission
            self.last_token = output.at
            self.tokens.append(output.token)
            self.finish = output.finish
            piece = self.piece(output.token)
            self.text += piece
            self._check_stops(len(piece))
        return self._delta(before)

    def abort(self) -> Delta:
        """End the answer where it is."""
        self.finish = "abort"
        return self._delta(len(self.tokens))

    def _delta(self, before: int) -> Delta:
        held = 0 if self.finish or not self.stops or self.keep_stop else max(map(len, self.stops)) - 1
        shown = max(self._shown, len(self.text) - held)
        delta = Delta(
            self.text[self._shown : shown], tuple(self.tokens[before:]), self.finish, self.stop_reason
        )
        self._shown = shown
        return delta

    def _check_stops(self, new: int) -> None:
        if not new or len(self.tokens) <= self.min_tokens:
            return
        found: list[tuple[int, int, str]] = []
        for order, stop in enumerate(self.stops):
            at = self.text.find(stop, max(0, len(self.text) - new - len(stop) + 1)) if stop else -1
            if at >= 0:
                found.append((at + len(stop), order, stop))
        if found:
            end, _, stop = min(found)
            self.text = self.text[: end if self.keep_stop else end - len(stop)]
            self.finish, self.stop_reason = "stop", stop


@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """Log-probabilities in the API's shapes. The twin has no distribution: ranks have fixed values."""

    piece: Callable[[int], str]
    words: Sequence[int]

    def chat(self, tokens: Sequence[int], top: int) -> dict[str, Any]:
        """The `logprobs` object of a chat choice with `top` alternatives per token."""
        content = [
            self._entry(token, 0)
            | {"top_logprobs": [self._entry(*pair) for pair in self._ranked(token, top)]}
            for token in tokens
        ]
        return {"content": content}

    def completion(self, tokens: Sequence[int], top: int, offset: int) -> dict[str, Any]:
        """The `logprobs` object of a completion choice whose text begins at `offset`."""
        pieces = [self.piece(token) for token in tokens]
        offsets = [offset + sum(map(len, pieces[:number])) for number in range(len(pieces))]
        return {
            "text_offset": offsets,
            "token_logprobs": [LOGPROB] * len(tokens),
            "tokens": pieces,
            "top_logprobs": [
                {self.piece(other): LOGPROB - LOGPROB_STEP * rank for other, rank in self._ranked(token, top)}
                for token in tokens
            ],
        }

    def _entry(self, token: int, rank: int) -> dict[str, Any]:
        text = self.piece(token)
        return {"token": text, "logprob": LOGPROB - LOGPROB_STEP * rank, "bytes": list(text.encode())}

    def _ranked(self, token: int, top: int) -> list[tuple[int, int]]:
        others = [word for word in self.words[: top + 1] if word != token]
        return [(other, rank) for rank, other in enumerate([token, *others])][:top]
