"""Misses of the prefix cache as text table, JSON and CSV, with what to do about each. Pure."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Final

from ctxgate.compression.divergence import DivergenceKind
from ctxgate.gateway.advice import advice
from ctxgate.gateway.miss import BY_GATEWAY, REWRITTEN, MissCause
from ctxgate.gateway.report_table import aligned, dollars
from ctxgate.inference.rates import format_usd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.gateway.ledger import MissRow

_HEADER: Final = ("cause", "detail", "field", "requests", "avoidable tokens", "avoidable USD", "part")
_WORDS: Final = 3  # leading columns of words, the rest are numbers
_COLUMNS: Final = (
    *("cause", "detail", "field", "requests", "attempts"),
    *("avoidable_tokens", "avoidable_nano", "avoidable_usd", "unknown"),
)
_ADVICE: Final = {
    MissCause.MOVED_REPLICA: "keep replicas up; a conversation stays on one while its first messages do.",
    MissCause.EVICTED: "give the pool more KV memory or another replica, or shorten what fills it.",
    MissCause.EXPIRED: "look for restarts and resets of the replica, and for clients beside the gateway.",
    MissCause.NOT_REPORTED: "start vLLM with `--enable-prompt-tokens-details`.",
    MissCause.COMPACTION: advice(DivergenceKind.HISTORY_TRUNCATED),
}


def cure(row: MissRow) -> str:
    """What to do about a miss, in one line."""
    if row.detail == REWRITTEN:
        return "use a template, or template arguments, that keep earlier turns; see `ctxgate pools probe`."
    if row.detail == BY_GATEWAY:
        return "nothing; `ctxgate report --counterfactual` says what compaction saved."
    if row.cause in _ADVICE:
        return _ADVICE[row.cause]
    kind, _, volatile = (row.detail or "").partition("/")
    return advice(DivergenceKind(kind), volatile or None, row.field or "")


def as_table(rows: Sequence[MissRow]) -> str:
    """An aligned table in the order of the rows, and below it what to do about each cause and detail."""
    if not rows:
        return "Nothing matched: no settled attempt here missed the cache.\n"
    printed = aligned([_HEADER, *map(_cells, rows)], _WORDS)
    advices = dict.fromkeys((_name(row), cure(row)) for row in rows)
    return (
        "\n".join(
            [
                printed[0],
                "-" * max(map(len, printed)),
                *printed[1:],
                "",
                *_remarks(rows),
                *(f"{name}: {text}" for name, text in advices),
            ]
        )
        + "\n"
    )


def as_json(rows: Sequence[MissRow]) -> str:
    """A JSON object with `misses`; money as integer nano-dollars and as a decimal string."""
    found = [_record(row) | {"advice": cure(row)} for row in rows]
    return json.dumps({"misses": found}, indent=2, ensure_ascii=False) + "\n"


def as_csv(rows: Sequence[MissRow]) -> str:
    """CSV with a header line."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(_record, rows))
    return text.getvalue()


def _record(row: MissRow) -> dict[str, str | int | None]:
    return {
        "cause": row.cause.value,
        "detail": row.detail,
        "field": row.field,
        "requests": row.requests,
        "attempts": row.attempts,
        "avoidable_tokens": row.avoidable_tokens,
        "avoidable_nano": row.avoidable_nano,
        "avoidable_usd": format_usd(row.avoidable_nano),
        "unknown": row.unknown,
    }


def _name(row: MissRow) -> str:
    # A moved conversation's detail is where it came from, which changes nothing of the advice.
    if row.detail is None or row.cause is MissCause.MOVED_REPLICA:
        return row.cause.value
    return f"{row.cause.value} ({row.detail})"


def _cells(row: MissRow) -> tuple[str, ...]:
    return (
        row.cause.value,
        row.detail or "-",
        row.field or "-",
        f"{row.requests:,}",
        f"{row.avoidable_tokens:,}",
        dollars(row.avoidable_nano),
        f"{row.unknown:,}",
    )


def _remarks(rows: Sequence[MissRow]) -> list[str]:
    remarks = []
    if any("[]" in (row.field or "") for row in rows):
        remarks.append("[]: at several positions; the header `x-ctxgate-miss` of each request named its own.")
    if unknown := sum(row.unknown for row in rows):
        attempts = f"{unknown:,} attempt{'' if unknown == 1 else 's'}"
        told = "whose avoidable tokens or cost are unknown, which the sums leave out"
        remarks.append(f"part: {attempts} {told}.")
    return [*remarks, ""] if remarks else []
