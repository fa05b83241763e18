"""What a second request would miss of the cache that a first one left, in prose and as JSON. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ctxgate.compression.divergence import DivergenceKind, printable
from ctxgate.gateway.advice import advice
from ctxgate.inference.rates import format_usd, miss_nano

if TYPE_CHECKING:
    from datetime import date

    from ctxgate.compression.divergence import Divergence
    from ctxgate.compression.volatile import VolatileKind
    from ctxgate.inference.rates import RateCard

_SHOWN: Final = 60  # characters of a volatile span and the words before it


@dataclass(frozen=True, slots=True)
class Tokens:
    """The second prompt's tokens: those found in the cache, those lost, and the rest, which is new.

    `counted` says how: by the tokenizer of that name with the engine's hit rule for blocks of
    `block_size`, or, where it is None, at four bytes a token.
    """

    prompt: int
    cached: int
    lost: int
    counted: str | None
    block_size: int


@dataclass(frozen=True, slots=True)
class SpanCost:
    """A volatile span of the head, and the tokens that are read anew each time it changes.

    `changed` says whether the first request has another text there, or none.
    """

    field: str
    kind: VolatileKind
    text: str
    tokens: int
    changed: bool


@dataclass(frozen=True, slots=True)
class Price:
    """The rates that the second request would be charged by."""

    pool: str
    card: RateCard
    day: date

    def of_miss(self, prompt: int, cached: int, lost: int) -> int:
        """Nano-dollars that `lost` tokens of a prompt cost more than they would as cached ones."""
        return miss_nano(prompt, cached, lost, self.card, self.day)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything that is known of a pair of requests.

    `first` is the first difference, but for white space between JSON tokens; `effective` is the first that
    the prompt shows. `layout` is the level at which both were laid out before, None where they are compared
    as they came.
    """

    before: str
    after: str
    first: Divergence
    effective: Divergence
    tokens: Tokens
    spans: tuple[SpanCost, ...]
    price: Price | None = None
    layout: str | None = None

    @property
    def cost_nano(self) -> int | None:
        """What the lost tokens cost, None without rates."""
        if self.price is None:
            return None
        return self.price.of_miss(self.tokens.prompt, self.tokens.cached, self.tokens.lost)

    def span_nano(self, span: SpanCost) -> int | None:
        """What one change of a volatile span costs, None without rates."""
        if self.price is None:
            return None
        lost = min(span.tokens, self.tokens.prompt)
        return self.price.of_miss(self.tokens.prompt, self.tokens.prompt - lost, lost)


def as_text(explanation: Explanation) -> str:
    """Paragraphs for a reader: the difference, what it costs, the volatile head, the fix."""
    first, effective = explanation.first, explanation.effective
    laid = "" if explanation.layout is None else f", both laid out at the level {explanation.layout}"
    head = f"What {explanation.after} would miss, sent after {explanation.before}{laid}:"
    lines = [head, "", first.prose()]
    if first.kind is not DivergenceKind.EXTENDS:
        lines.append(f"  {_where(first)}")
    if effective != first and effective.kind is DivergenceKind.EXTENDS:
        lines.append("That does not reach the prompt as vLLM renders it, and nothing else differs.")
    elif effective != first:
        lines.append("That does not reach the prompt as vLLM renders it. The first difference that does:")
        lines += [effective.prose(), f"  {_where(effective)}"]
    lines += ["", *_token_lines(explanation)]
    if explanation.spans:
        lines += [
            "",
            f"Text in the head of {explanation.after} that looks as if it changes by itself. When it does, "
            "all from there to the prompt's end is read anew, new tokens and parts of blocks included:",
        ]
        lines += [_span_line(explanation, span) for span in explanation.spans]
    lines += ["", f"Fix: {fix(explanation)}"]
    return "\n".join(lines) + "\n"


def as_json(explanation: Explanation) -> str:
    """The same as a JSON object; money as integer nano-dollars and as a decimal string."""
    tokens = explanation.tokens
    record = {
        "layout": explanation.layout,
        "first": _record(explanation.first),
        "effective": _record(explanation.effective),
        "tokens": {
            "prompt": tokens.prompt,
            "cached": tokens.cached,
            "lost": tokens.lost,
            "counted_by": tokens.counted,
            "block_size": tokens.block_size if tokens.counted else None,
        },
        "cost": _cost_record(explanation),
        "volatile_head": [
            {
                "field": span.field,
                "kind": span.kind.value,
                "text": span.text,
                "changed": span.changed,
                "tokens_per_change": span.tokens,
                "nano_usd_per_change": explanation.span_nano(span),
            }
            for span in explanation.spans
        ],
        "fix": fix(explanation),
    }
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def fix(explanation: Explanation) -> str:
    """How to keep the prefix, to the client's author."""
    first, effective = explanation.first, explanation.effective
    lost = effective.kind is not DivergenceKind.EXTENDS or first.kind is DivergenceKind.EXTENDS
    shown = effective if lost else first
    told = advice(shown.kind, shown.volatile, shown.field)
    return told if lost else f"nothing is lost with vLLM. Other engines may see the difference: {told}"


def shorten(text: str) -> str:
    """A span and the words before it on one line, at most `_SHOWN` characters."""
    shown = printable(text)
    return shown if len(shown) <= _SHOWN else shown[: _SHOWN - 1] + "\u2026"


def _where(divergence: Divergence) -> str:
    kind = divergence.kind.value
    if divergence.volatile is not None:
        kind += f" ({divergence.volatile.value})"
    if divergence.index is None:
        return kind
    element = "tools" if divergence.field.startswith("tools") else "messages"
    place = f"byte {divergence.offset} of {element}[{divergence.index}] as compact JSON"
    return f"{kind} at {divergence.field}, {place}"


def _token_lines(explanation: Explanation) -> list[str]:
    tokens = explanation.tokens
    new = tokens.prompt - tokens.cached - tokens.lost
    mark = "" if tokens.counted else "~"
    how = (
        f"counted by {tokens.counted}, cached in blocks of {tokens.block_size}"
        if tokens.counted
        else "estimated at 4 bytes a token"
    )
    lines = [
        f"{mark}{tokens.prompt:,} prompt tokens ({how}):",
        f"  {mark}{tokens.cached:,} stay cached",
        f"  {mark}{tokens.lost:,} lost: cached by {explanation.before}, and read anew",
        f"  {mark}{new:,} new",
    ]
    if explanation.effective.kind is DivergenceKind.TEMPLATE_CHANGED:
        lines.append("  This is the worst case: a template that ignores the field loses nothing.")
    cost = explanation.cost_nano
    if cost and explanation.price is not None:
        amount = f"{mark}${format_usd(cost)}"
        lines.append(f"The lost tokens cost {amount} more, at the rates of pool {explanation.price.pool}.")
    return lines


def _span_line(explanation: Explanation, span: SpanCost) -> str:
    mark = "" if explanation.tokens.counted else "~"
    cost = explanation.span_nano(span)
    money = "" if cost is None else f" (${format_usd(cost)})"
    return (
        f"  {span.field}: {span.kind.value}, {shorten(span.text)!r}: "
        f"{mark}{span.tokens:,} tokens{money} per turn in which it changes"
        f" ({'it did' if span.changed else 'the same in both'})"
    )


def _record(divergence: Divergence) -> dict[str, Any]:
    return {
        "kind": divergence.kind.value,
        "field": divergence.field,
        "index": divergence.index,
        "offset": divergence.offset,
        "volatile": divergence.volatile.value if divergence.volatile else None,
        "rendered": divergence.rendered,
        "kept_bytes": divergence.kept_bytes,
        "avoidable_bytes": divergence.avoidable_bytes,
        "before": divergence.before_excerpt,
        "after": divergence.after_excerpt,
    }


def _cost_record(explanation: Explanation) -> dict[str, Any] | None:
    cost = explanation.cost_nano
    if cost is None or explanation.price is None:
        return None
    return {"pool": explanation.price.pool, "lost_nano_usd": cost, "lost_usd": format_usd(cost)}
