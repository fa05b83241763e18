"""What recorded sessions cost under each compaction policy: the model-level tables. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final

from ctxgate.compression.economics import Shape
from ctxgate.compression.schedule import TRIGGERS, recorded_steps
from ctxgate.compression.window import Terms
from ctxgate.gateway.policy_table import rows, text
from ctxgate.inference.rates import NANO_PER_DOLLAR, Rates, format_usd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.compression.schedule import Outcome, Step
    from ctxgate.gateway.policy_table import Row
    from ctxgate.gateway.sessions import Session

DEFAULT_RATES: Final = ("5/.5/6.25/25", "1.25/.125/1.25/10", "1/.1/1/4", ".14/.0028/.14/.28")
DEFAULT_SHAPE: Final = "18000/4000/20000/5500"
_DAY: Final = date(1970, 1, 1)  # rates of a table are valid for ever


@dataclass(frozen=True, slots=True)
class PolicyTable:
    """One session: its requests, and a row for each set of rates."""

    session: str
    steps: tuple[Step, ...]
    shape: Shape
    rows: tuple[Row, ...]


def parse_rates(text_: str) -> Rates:
    """`uncached/cached/written/output` in dollars per million tokens. Raises ValueError."""
    parts = text_.split("/")
    if len(parts) != 4:
        raise ValueError(f"{text_!r} is not four rates: uncached/cached/written/output")
    try:
        dollars = [Decimal(part) for part in parts]
    except InvalidOperation:
        raise ValueError(f"{text_!r}: a rate is a number of dollars per million tokens") from None
    nano = [each * NANO_PER_DOLLAR for each in dollars]
    if any(not each.is_finite() or each < 0 or each != int(each) for each in nano):
        raise ValueError(f"{text_!r}: a rate is at least 0, with at most nine decimals")
    uncached, cached, written, output = map(int, nano)
    return Rates(uncached, cached, output, written, effective=_DAY)


def parse_shape(text_: str) -> Shape:
    """`prefix/summary/tail/summary output` in tokens. Raises ValueError."""
    parts = text_.split("/")
    if len(parts) != 4 or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"{text_!r} is not four numbers of tokens: prefix/summary/tail/summary output")
    prefix, summary, tail, output = map(int, parts)
    return Shape(prefix, summary, tail, output)


def parse_triggers(text_: str) -> tuple[int, ...]:
    """Prompt lengths in tokens, separated by commas. Raises ValueError."""
    parts = text_.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise ValueError(f"{text_!r} is no list of prompt lengths")
    return tuple(map(int, parts))


def steps_of(session: Session) -> tuple[Step, ...]:
    """The requests of a session as the model sees them, with the outputs that were recorded."""
    outputs = iter(session.outputs)
    messages: list[dict[str, Any]] = []
    for message in session.messages:
        recorded = {"_recorded": {"output": next(outputs)}} if message["role"] == "assistant" else {}
        messages.append({**message, **recorded})
    return recorded_steps(messages)


def policy_table(
    session: Session, rates: Sequence[Rates], shape: Shape, triggers: Sequence[int] = TRIGGERS
) -> PolicyTable:
    """A session under every policy, at each of `rates`."""
    steps = steps_of(session)
    found = rows(steps, [Terms(each, shape) for each in rates], triggers)
    return PolicyTable(session.name, steps, shape, tuple(found))


def as_text(tables: Sequence[PolicyTable], *, color: bool = False) -> str:
    """The tables, each under a line that says what they are of."""
    return "\n\n".join(f"{_title(each)}\n{text(each.rows, color=color)}" for each in tables)


def _title(table: PolicyTable) -> str:
    shape, steps = table.shape, table.steps
    growth, output = sum(step.growth for step in steps), sum(step.output for step in steps)
    return (
        f"{table.session}: {len(steps):,} requests, growth {growth:,}, output {output:,} tokens; dollars by"
        f" policy (prefix {shape.prefix:,}, summary {shape.summary:,}, tail {shape.tail:,}, summary call"
        f" {shape.summary_output:,} tokens)"
    )


def as_json(tables: Sequence[PolicyTable]) -> list[dict[str, Any]]:
    """The tables as JSON: money as integer nano-dollars and decimal strings, and where each policy cuts."""
    return [
        {
            "session": table.session,
            "requests": len(table.steps),
            "growth_tokens": sum(step.growth for step in table.steps),
            "output_tokens": sum(step.output for step in table.steps),
            "shape": {
                "prefix": table.shape.prefix,
                "summary": table.shape.summary,
                "tail": table.shape.tail,
                "summary_output": table.shape.summary_output,
            },
            "rows": [_row(row) for row in table.rows],
        }
        for table in tables
    ]


def _row(row: Row) -> dict[str, Any]:
    rates = row.terms.rates
    names = ("uncached", "cached", "written", "output")
    return {
        "usd_per_million": {name: format_usd(getattr(rates, name)) for name in names},
        "policies": [_outcome(each, row.ratio(each.policy)) for each in row.outcomes],
    }


def _outcome(outcome: Outcome, ratio: float | None) -> dict[str, Any]:
    return {
        "policy": outcome.policy,
        "cost_nano": outcome.nano,
        "cost_usd": format_usd(outcome.nano),
        "to_optimum": ratio,
        "compacted_before": list(outcome.cuts),
    }
