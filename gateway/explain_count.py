"""Counts what two chat prompts share: with a model's own template and tokenizer, or by their bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.compression.divergence import DivergenceKind
from ctxgate.compression.head import volatile_head
from ctxgate.gateway.explain import SpanCost, Tokens
from ctxgate.inference.prompts import PromptError, PromptRenderer

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from ctxgate.compression.divergence import Divergence
    from ctxgate.compression.head import HeadSpan
    from ctxgate.inference.wire import Body

BYTES_PER_TOKEN: Final = 4
# Nothing is shared, whatever the prompts say.
_ALL_LOST: Final = (DivergenceKind.MODEL_CHANGED, DivergenceKind.SALT, DivergenceKind.TEMPLATE_CHANGED)


@dataclass(frozen=True)
class Renderer:
    """Texts and token ids of whole chat prompts."""

    prompts: PromptRenderer

    @classmethod
    def load(cls, folder: Path | None) -> Renderer:
        """The tokenizer and template of a folder, by default the twin's.

        Raises ValueError for a folder that holds none, ImportError without the extra `twin`.
        """
        prompts = PromptRenderer() if folder is None else PromptRenderer(folder, folder.name)
        try:
            prompts.encode(prompts.chat_text([{"role": "user", "content": "Hello."}]))
        except ImportError:
            raise
        except Exception as error:  # tokenizers raises bare Exception for a missing or broken file
            raise ValueError(f"{prompts.folder}: no usable tokenizer and template: {error}") from error
        return cls(prompts)

    def text(self, body: Body, messages: int | None = None) -> str:
        """The prompt of the first `messages`, by default of all. Raises `PromptError`."""
        request: dict[str, Any] = msgspec.json.decode(body.raw)
        return self.prompts.chat_text(request["messages"][:messages], request.get("tools") or None)

    def ids(self, text: str) -> list[int]:
        """The token ids of a prompt's text."""
        return self.prompts.encode(text)


def count(
    before: Body, after: Body, effective: Divergence, renderer: Renderer | None, block_size: int
) -> tuple[Tokens, tuple[SpanCost, ...]]:
    """The second prompt's tokens, and those behind each volatile span of its head."""
    spans = volatile_head(after)
    known = frozenset((found.head.field, _text(found)) for found in volatile_head(before))
    if renderer is not None:
        try:
            text = renderer.text(after)
            return (
                _counted(before, after, effective, renderer, block_size),
                tuple(_cost(span, known, _behind(span, text, renderer, after)) for span in spans),
            )
        except (PromptError, TypeError):
            pass  # a conversation that the template or the engine refuses still has bytes to count
    costs = tuple(_cost(span, known, _bytes_behind(span, after)) for span in spans)
    return _by_bytes(after, effective, block_size), costs


def _counted(before: Body, after: Body, effective: Divergence, renderer: Renderer, block_size: int) -> Tokens:
    one, two = renderer.ids(renderer.text(before)), renderer.ids(renderer.text(after))
    shared = 0 if effective.kind in _ALL_LOST else _common(one, two)
    could = len(one)
    if effective.kind is not DivergenceKind.EXTENDS:
        held = effective.shared_messages
        could = min(could, len(renderer.ids(renderer.text(after, held))) if held else 0)
    most = max(len(two) - 1, 0)  # the engine always computes the last token
    cached = min(shared, most) // block_size * block_size
    lost = max(min(could, most) // block_size * block_size - cached, 0)
    return Tokens(len(two), cached, lost, renderer.prompts.name, block_size)


def _by_bytes(after: Body, effective: Divergence, block_size: int) -> Tokens:
    prompt = sum(_sizes(after))
    cached = 0 if effective.kind in _ALL_LOST else effective.kept_bytes
    lost = min(effective.avoidable_bytes, prompt - cached)
    return Tokens(
        _tokens(prompt), _tokens(cached), _tokens(cached + lost) - _tokens(cached), None, block_size
    )


def _behind(found: HeadSpan, text: str, renderer: Renderer, after: Body) -> int:
    """Finds the head's text in the prompt, plain or inside a tool's JSON; else counts bytes."""
    head, start = found.head.text, found.span.start
    for whole, before in ((head, head[:start]), (_escaped(head), _escaped(head[:start]))):
        at = text.find(whole)
        if at >= 0:
            kept = len(renderer.ids(text[: at + len(before)]))
            return len(renderer.ids(text)) - kept
    return _bytes_behind(found, after)


def _bytes_behind(found: HeadSpan, after: Body) -> int:
    sizes = _sizes(after)
    inside = len(found.head.text[: found.span.start].encode("utf-8", "surrogatepass"))
    return _tokens(max(sum(sizes[found.head.element :]) - inside, 0))


def _cost(found: HeadSpan, known: Collection[tuple[str, str]], tokens: int) -> SpanCost:
    text = _text(found)
    return SpanCost(found.head.field, found.span.kind, text, tokens, (found.head.field, text) not in known)


def _text(found: HeadSpan) -> str:
    return found.span.label + found.head.text[found.span.start : found.span.end]


def _sizes(body: Body) -> list[int]:
    tools = body.items("tools") if body.has("tools") else []
    return [memoryview(raw).nbytes for raw in (*tools, *body.items("messages"))]


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _tokens(size: int) -> int:
    return -(-size // BYTES_PER_TOKEN)


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
    )
