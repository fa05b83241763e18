"""Plans the start-up probe of a replica and draws its conclusions. Pure: `probe` is a generator.

It yields what it wants to know (`Render`, `Detokenize`, `Complete`) and is sent a `Told`. Where the
engine renders prompts, tokens are compared; else two prompts are sent one after the other under one
fresh salt, and the second one's cached tokens tell how much of the first it begins with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from ctxgate.inference.template_facts import (
    CacheReport,
    Extension,
    Findings,
    TemplateFacts,
    Turns,
    Verdict,
)
from ctxgate.inference.template_texts import CALL_ID, OTHER_ID, Texts, filler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ctxgate.inference.template_texts import Request

T = TypeVar("T")

Tokens: TypeAlias = "tuple[int, ...]"

# A difference must move more blocks than an engine may hold back: with a draft model it takes one less.
_SPARE_BLOCKS: Final = 1
_PAD_BLOCKS: Final = 4  # words of filler after each place where templates differ, in blocks
_REPEATED_BLOCKS: Final = 3
_ANY_BLOCK: Final = 512  # taken as the largest block where its size is not told
_LEAST_BLOCK: Final = 16
_LEAST_WORDS: Final = 64
_TOKENS_PER_WORD: Final = 3  # the filler's words are short: hardly any tokenizer makes more of one


@dataclass(frozen=True, slots=True)
class Render:
    """Wanted: the token ids of a chat request."""

    body: Request


@dataclass(frozen=True, slots=True)
class Detokenize:
    """Wanted: the text of some tokens."""

    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Complete:
    """Wanted: the usage of a chat request, which is to be answered."""

    body: Request


@dataclass(frozen=True, slots=True)
class Told:
    """An answer; what was not asked for, or not told, is None. `cached` is what the engine itself said."""

    tokens: Tokens | None = None
    text: str | None = None
    prompt: int | None = None
    cached: int | None = None


Ask: TypeAlias = Render | Detokenize | Complete
Asking: TypeAlias = Generator[Ask, Told, T]


def probe(
    salt: str, block_size: int | None, window: int | None = None, *, may_render: bool = True
) -> Asking[Findings]:
    """Find out about one replica. `salt`: a fresh one.

    `block_size` and `window` in tokens, where the engine told them.
    """
    cache = yield from _cache_report(f"{salt}-", block_size, window)
    if may_render and (yield Render(Texts(0).plain()[0])).tokens:
        return Findings(cache, renders=True, facts=(yield from _facts(_ByTokens(), Texts(0))))
    block = block_size or cache.block_size
    if not cache.reports or block is None:
        return Findings(cache)
    by_usage = _ByUsage(salt, block)
    return Findings(cache, facts=(yield from _facts(by_usage, Texts(_PAD_BLOCKS * block))))


def _cache_report(salt: str, block_size: int | None, window: int | None) -> Asking[CacheReport]:
    words = max(_REPEATED_BLOCKS * (block_size or _ANY_BLOCK), _LEAST_WORDS)
    if window is not None:
        words = min(words, window // _TOKENS_PER_WORD)
    body: Request = {"messages": [{"role": "user", "content": filler(words)}]}
    told: list[Told] = []
    for own in ("a", "a", "b"):
        answer = yield Complete(body | {"cache_salt": f"{salt}{own}"})
        if answer.prompt is None:
            return CacheReport()
        told.append(answer)
    first, second, third = told
    if not second.cached:
        return CacheReport(reports=False if second.cached is None else None)
    isolates = not first.cached and not third.cached
    return CacheReport(True, isolates, block_size or block_of_hit(second.prompt or 0, second.cached))


def block_of_hit(prompt: int, hit: int) -> int | None:
    """The likeliest block size by a repeated prompt's hit: the smallest usual one that explains it.

    A hit is the most whole blocks within the prompt's tokens but the last one.
    """
    sizes = [size for size in range(_LEAST_BLOCK, hit + 1, _LEAST_BLOCK) if hit % size == 0]
    return next((size for size in sizes if (prompt - 1) // size * size == hit), None)


def _facts(how: _ByTokens | _ByUsage, texts: Texts) -> Asking[TemplateFacts]:
    return TemplateFacts(
        plain=(yield from how.turns(texts.plain())),
        tools=(yield from how.turns(texts.tools())),
        reasoning=(yield from how.turns(texts.reasoning())),
        tool_results=(yield from how.turns(texts.tool_results())),
        arguments=(yield from how.spellings(texts.arguments())),
        empty_content=(yield from how.spellings(texts.empty_content())),
        tool_order=(yield from how.spellings(texts.tool_order())),
        call_ids=(yield from how.names(texts.call_ids())),
    )


class _ByTokens:
    """Compares the token ids that the engine renders."""

    def turns(self, requests: Sequence[Request]) -> Asking[Turns]:
        """Whether each request's prompt begins with the one before it."""
        rendered = yield from self._rendered(requests)
        if rendered is None:
            return Turns(Extension.UNKNOWN)
        found: list[Turns] = []
        for at, (one, other) in enumerate(pairwise(rendered)):
            kept = common_prefix(one, other)
            if kept == len(one):
                found.append(Turns(Extension.YES))
                continue
            closed = (yield Render(requests[at] | {"add_generation_prompt": False})).tokens
            answer_only = closed is not None and common_prefix(closed, other) == len(closed)
            extension = Extension.BUT_ANSWER if answer_only else Extension.NO
            found.append(Turns(extension, len(one) - kept))
        return _worst(found)

    def spellings(self, requests: Sequence[Request]) -> Asking[Verdict]:
        """How much the first request's prompt differs from the others'."""
        rendered = yield from self._rendered(requests)
        if rendered is None:
            return Verdict.UNKNOWN
        worst = Verdict.EQUIVALENT
        for other in rendered[1:]:
            if other == rendered[0]:
                continue
            texts = yield from self._texts(rendered[0], other)
            if texts is None:
                same = Counter(rendered[0]) == Counter(other)
                verdict = Verdict.REORDERED if same else Verdict.UNKNOWN
            else:
                same = _characters(texts[0]) == _characters(texts[1])
                verdict = Verdict.REORDERED if same else Verdict.DIFFERENT
            worst = max(worst, verdict, key=_SEVERITY.index)
        return worst

    def names(self, requests: Sequence[Request]) -> Asking[Verdict]:
        """Whether two requests that differ in the ids of their calls differ in nothing else."""
        rendered = yield from self._rendered(requests)
        if rendered is None:
            return Verdict.UNKNOWN
        if rendered[0] == rendered[1]:
            return Verdict.EQUIVALENT
        texts = yield from self._texts(*rendered)
        if texts is None:
            return Verdict.UNKNOWN
        return Verdict.RENAMED if texts[0].replace(CALL_ID, OTHER_ID) == texts[1] else Verdict.DIFFERENT

    @staticmethod
    def _rendered(requests: Sequence[Request]) -> Asking[list[Tokens] | None]:
        found: list[Tokens] = []
        for body in requests:
            tokens = (yield Render(body)).tokens
            if tokens is None:
                return None  # the engine or its template refuses such a request
            found.append(tokens)
        return found

    @staticmethod
    def _texts(*prompts: Tokens) -> Asking[list[str] | None]:
        found: list[str] = []
        for tokens in prompts:
            text = (yield Detokenize(tokens)).text
            if text is None:
                return None
            found.append(text)
        return found


class _ByUsage:
    """Compares prompts by how much of one is cached after the other, each pair under a salt of its own."""

    def __init__(self, salt: str, block: int) -> None:
        self._block = block
        self._salts: Iterator[str] = (f"{salt}-{number}" for number in range(1000))

    def turns(self, requests: Sequence[Request]) -> Asking[Turns]:
        """Whether each request's prompt begins with the one before it, to the block."""
        told = yield from self._told(requests, next(self._salts))
        if told is None:
            return Turns(Extension.UNKNOWN)
        found: list[Turns] = []
        for (one, _), (_, hit) in pairwise(told):
            lost = one // self._block * self._block - hit
            found.append(Turns(Extension.NO, lost) if self._is_much(lost) else Turns(Extension.YES))
        return _worst(found)

    def spellings(self, requests: Sequence[Request]) -> Asking[Verdict]:
        """Whether the others' prompts are the first one's; how else they differ is not told."""
        for other in requests[1:]:
            same = yield from self._same(requests[0], other)
            if not same:
                return Verdict.UNKNOWN
        return Verdict.EQUIVALENT

    def names(self, requests: Sequence[Request]) -> Asking[Verdict]:
        """Whether the ids, in which alone the two requests differ, are printed."""
        same = yield from self._same(requests[0], requests[1])
        if same is None:
            return Verdict.UNKNOWN
        return Verdict.EQUIVALENT if same else Verdict.RENAMED

    def _same(self, one: Request, other: Request) -> Asking[bool | None]:
        told = yield from self._told((one, other), next(self._salts))
        if told is None:
            return None
        (before, _), (prompt, hit) = told
        return before == prompt and not self._is_much((prompt - 1) // self._block * self._block - hit)

    def _is_much(self, lost: int) -> bool:
        return lost > _SPARE_BLOCKS * self._block

    @staticmethod
    def _told(requests: Sequence[Request], salt: str) -> Asking[list[tuple[int, int]] | None]:
        """The prompt's and the cached tokens of each request, in order."""
        found: list[tuple[int, int]] = []
        for body in requests:
            told = yield Complete(body | {"cache_salt": salt})
            if told.prompt is None:
                return None
            found.append((told.prompt, told.cached or 0))  # known to report hits: absent is none
        return found


_SEVERITY: Final = (Verdict.EQUIVALENT, Verdict.REORDERED, Verdict.UNKNOWN, Verdict.DIFFERENT)
_LOSS: Final = (Extension.YES, Extension.BUT_ANSWER, Extension.NO)


def _worst(found: Sequence[Turns]) -> Turns:
    return max(found, key=lambda turns: (_LOSS.index(turns.extension), turns.lost))


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two prompts begin with in common."""
    length = min(len(one), len(other))
    return next((at for at in range(length) if one[at] != other[at]), length)


def _characters(text: str) -> list[str]:
    return sorted("".join(text.split()))
