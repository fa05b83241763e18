"""How a prompt is made to fit without a model: what must work when nothing else did.

First the oldest tool results give way to one constant line with a reference, then the oldest rounds are
dropped, then the results inside the newest rounds are masked, and at last the longest texts lose their
middle, the first task and what is to stay after all others. Where that is too little, the results of the last
round are masked, but for the very last. Every step stops as soon as the prompt fits. What
one request masked or dropped stays masked or dropped for the ones after it, so that each of them extends the
one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ctxgate.compression.cut import NO_MEDIA, Range, head_length, tail_start, units
from ctxgate.compression.said import with_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    import msgspec

    from ctxgate.compression.cut import Unit
    from ctxgate.compression.dialects.chat import Facts

MASK_TOKENS: Final = 40
"""Tokens a masked result is counted with: an upper bound of the line that stands for it."""

LEAST_MASKED_TOKENS: Final = 80
"""A result of no more stays, its ids and names included: a line in its place would say less and take more."""

NOTICE_TOKENS: Final = 60
"""Tokens of the line that stands for dropped rounds."""

LEAST_SPLIT_TOKENS: Final = 200
"""No text is cut below this: a reference and two ends need as much."""


@dataclass(frozen=True, slots=True)
class Split:
    """A message whose text must be cut to at most `tokens`, beside what in it is no text."""

    at: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Masking:
    """What was decided. `tokens` is the size of the prompt then; `fits` whether it is within the target.

    Where something was dropped, one user message with `notice_text` stands in place of the first range.

    It does not fit only where what may never be touched (the leading messages, and `LEAST_SPLIT_TOKENS` of
    every message that remains) is larger than the target.
    """

    masked: tuple[int, ...]
    dropped: tuple[Range, ...]
    split: tuple[Split, ...]
    tokens: int
    fits: bool


NOTHING: Final = Masking((), (), (), 0, True)


def mask_text(reference: str) -> str:
    """The text of a masked tool result."""
    return f"[An older tool result was left out here to fit the context window. Its id is {reference}.]"


def notice_text(reference: str) -> str:
    """The text of the user message that stands where rounds were dropped without a summary."""
    return (
        "[Record by the gateway, not an instruction: older messages of this conversation were left out here"
        f" to fit the context window. Their id is {reference}.]"
    )


def masked_message(raw: bytes | msgspec.Raw, reference: str) -> bytes:
    """A tool message whose content is the constant line. Raises ValueError for what is no message."""
    return with_text(raw, mask_text(reference))


def mask(  # noqa: PLR0913 - all but two have a default
    messages: Sequence[Facts],
    tokens: Sequence[int],
    *,
    target: int,
    tail_tokens: int = 0,
    keep: Collection[int] = (),
    before: Masking = NOTHING,
    limit: int | None = None,
    media: Mapping[int, int] = NO_MEDIA,
) -> Masking:
    """Decide what is masked, dropped and cut so that the prompt has at most `target` tokens.

    `limit` is what it must not be longer than (default: the target): of the end that is kept, of what is to
    stay whole and of the middle of texts, no more gives way than that needs. `tokens` holds the size of each
    message, `keep` the messages that stay whole as long as anything else can give way, `tail_tokens` the end
    that does. `before` is what an earlier request of the same conversation decided: all of it stays. A round
    that waits for a result is never dropped. `media` holds, by message, how many of its tokens are no text:
    no cut makes them fewer.
    """
    work = _Work(messages, tokens, target, before, media)
    parts = units(messages)
    head = head_length(messages)
    tail = tail_start(parts, tokens, tail_tokens)
    users = [at for at in range(head, len(messages)) if messages[at].role == "user"]
    firm = {*keep, *users[:1], *users[-1:]}
    old = [part for part in parts if head <= part.start < tail]
    new = [part for part in parts if part.start >= max(tail, head)]
    work.mask_results(old, firm)
    work.drop(old, firm)
    work.target = max(target, limit or 0)
    work.mask_results(new[:-1], firm)
    work.drop(new[:-1], firm)
    work.mask_results(old, frozenset())
    work.drop(old, frozenset(users[:1] + users[-1:]))
    firm = {*keep, *users[:1]}
    work.split([at for at in range(head, len(messages)) if at not in firm], where_enough=True)
    work.split(range(head, len(messages)), where_enough=True)
    work.mask_results(new[-1:], {len(messages) - 1})
    work.split(range(head, len(messages)))
    return work.result()


class _Work:
    def __init__(
        self,
        messages: Sequence[Facts],
        tokens: Sequence[int],
        target: int,
        before: Masking,
        media: Mapping[int, int],
    ) -> None:
        self._messages = messages
        self._media = media
        self._sizes = list(tokens)
        self.target = target
        self._masked = set(before.masked)
        self._gone = {at for each in before.dropped for at in range(each.start, each.stop)}
        self._cuts = {each.at: each.tokens for each in before.split}
        for at in self._masked:
            self._sizes[at] = min(self._sizes[at], MASK_TOKENS)
        for at, size in self._cuts.items():
            self._sizes[at] = min(self._sizes[at], size + media.get(at, 0))
        for at in self._gone:
            self._sizes[at] = 0
        self._total = sum(self._sizes) + NOTICE_TOKENS * bool(self._gone)

    def mask_results(self, parts: Iterable[Unit], firm: Collection[int]) -> None:
        """Mask the results in these units, oldest first."""
        for part in parts:
            for at in range(part.start, part.stop):
                if self._total <= self.target:
                    return
                if self._messages[at].role != "tool" or at in firm or self._sizes[at] <= LEAST_MASKED_TOKENS:
                    continue
                self._resize(at, MASK_TOKENS)
                self._masked.add(at)
                self._cuts.pop(at, None)

    def drop(self, parts: Iterable[Unit], firm: Collection[int]) -> None:
        """Drop these units, oldest first."""
        for part in parts:
            if self._total <= self.target:
                return
            inside = range(part.start, part.stop)
            if part.open or part.start in self._gone or any(at in firm for at in inside):
                continue
            if not self._gone:
                self._total += NOTICE_TOKENS
            for at in inside:
                self._resize(at, 0)
            self._gone.update(inside)

    def split(self, indexes: Iterable[int], *, where_enough: bool = False) -> None:
        """Cut the longest texts to one common size that makes the whole fit.

        Where even the least size is not enough, they are cut to that, or with `where_enough` not at all.
        """
        if self._total <= self.target:
            return
        texts = {at: self._sizes[at] - self._media.get(at, 0) for at in indexes if self._can_be_cut(at)}
        rest = self.target - (self._total - sum(texts.values()))
        size = _common_size(list(texts.values()), rest)
        if size < LEAST_SPLIT_TOKENS:
            if where_enough:
                return
            size = LEAST_SPLIT_TOKENS
        for at, text in texts.items():
            if text > size:
                self._resize(at, self._sizes[at] - text + size)
                self._cuts[at] = size

    def result(self) -> Masking:
        masked = tuple(sorted(self._masked - self._gone))
        split = tuple(Split(at, size) for at, size in sorted(self._cuts.items()) if at not in self._gone)
        return Masking(masked, _joined(self._gone), split, self._total, self._total <= self.target)

    def _can_be_cut(self, at: int) -> bool:
        return at not in self._gone and at not in self._masked and bool(self._messages[at].role)

    def _resize(self, at: int, size: int) -> None:
        self._total += size - self._sizes[at]
        self._sizes[at] = size


def _common_size(sizes: Sequence[int], room: int) -> int:
    """The largest size such that texts cut to it need at most `room` together; 0 if none does."""
    left = room
    ordered = sorted(sizes)
    for number, size in enumerate(ordered):
        share = left // (len(ordered) - number)
        if size > share:
            return max(share, 0)
        left -= size
    return max(ordered, default=0)


def _joined(indexes: Collection[int]) -> tuple[Range, ...]:
    """Adjacent indexes as ranges."""
    found: list[Range] = []
    for at in sorted(indexes):
        if found and found[-1].stop == at:
            found[-1] = Range(found[-1].start, at + 1)
        else:
            found.append(Range(at, at + 1))
    return tuple(found)
