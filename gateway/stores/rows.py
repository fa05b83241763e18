"""Attempts as rows of the table `attempts`, and back."""

from __future__ import annotations

from datetime import date
from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeAlias

from ctxgate.gateway.ledger import Attempt, AttemptOpened, AttemptSettled, Outcome
from ctxgate.gateway.miss import Miss, MissCause
from ctxgate.inference.rates import Charge
from ctxgate.inference.usage import Certainty, Count, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Value: TypeAlias = str | int | None
"""What the ledger stores in a column."""

COUNTS: Final = Usage.__struct_fields__
OPENED_COLUMNS: Final = AttemptOpened.__struct_fields__
MISS_COLUMNS: Final = (
    "miss_cause",
    "miss_detail",
    "miss_field",
    "miss_index",
    "miss_offset",
    "avoidable_tokens",
    "avoidable_nano",
)
"""What rows written before version 3 do not have."""

COUNTERFACTUAL_COLUMNS: Final = ("plain_nano", "fixed_nano")
"""What settlements written before version 4 do not have."""

ROUTING_COLUMNS: Final = ("job_class", "predicted_ttft_us", "fits", "policy")
"""What opening rows written before version 5 do not have."""

ADDED_COLUMNS: Final[dict[str, Value]] = {
    "purpose": "answer",
    "client_tokens": None,
    **dict.fromkeys(ROUTING_COLUMNS),
}
"""What opening rows written before version 4 do not have, and what they stand for."""

SETTLED_COLUMNS: Final = (
    "outcome",
    "status",
    "finish_reason",
    "ttft_us",
    "total_us",
    "settled_at_us",
    *(f"{name}_{kind}" for name in COUNTS for kind in ("tokens", "certainty")),
    "cost_uncached_nano",
    "cost_cached_nano",
    "cost_output_nano",
    "cost_total_nano",
    "cost_exact",
    "rates_effective",
    *MISS_COLUMNS,
    *COUNTERFACTUAL_COLUMNS,
)
COLUMNS: Final = ", ".join((*OPENED_COLUMNS, *SETTLED_COLUMNS))
"""The select list that `attempt_from_row` reads."""

INSERT: Final = (
    f"INSERT INTO attempts ({', '.join(OPENED_COLUMNS)}, incarnation)"  # noqa: S608  # names
    f" VALUES ({', '.join('?' * (len(OPENED_COLUMNS) + 1))}) ON CONFLICT (attempt_id) DO NOTHING"
)
SETTLE: Final = (
    f"UPDATE attempts SET {', '.join(f'{column} = ?' for column in SETTLED_COLUMNS)}"  # noqa: S608  # names
    " WHERE attempt_id = ? AND settled_at_us IS NULL"
)
_opened_values: Callable[[AttemptOpened], tuple[Value, ...]] = attrgetter(*OPENED_COLUMNS)


def opened_values(row: AttemptOpened) -> tuple[Value, ...]:
    """The values of OPENED_COLUMNS."""
    return _opened_values(row)


def settled_values(row: AttemptSettled) -> tuple[Value, ...]:
    """The values of SETTLED_COLUMNS. An unknown count or amount is None, never 0."""
    usage, charge = row.usage, row.charge
    return (
        row.outcome.value,
        row.status,
        row.finish_reason,
        row.ttft_us,
        row.total_us,
        row.settled_at_us,
        usage.uncached.value,
        usage.uncached.certainty.value,
        usage.cached.value,
        usage.cached.certainty.value,
        usage.output.value,
        usage.output.certainty.value,
        usage.reasoning.value,
        usage.reasoning.certainty.value,
        usage.written.value,
        usage.written.certainty.value,
        usage.prompt_total.value,
        usage.prompt_total.certainty.value,
        charge.uncached,
        charge.cached,
        charge.output,
        charge.total,
        int(charge.exact),
        charge.rates_effective.isoformat(),
        *_miss_values(row.miss),
        row.plain_nano,
        row.fixed_nano,
    )


def _miss_values(miss: Miss | None) -> tuple[Value, ...]:
    if miss is None:
        return _NO_MISS
    return (
        miss.cause.value,
        miss.detail,
        miss.field,
        miss.index,
        miss.offset,
        miss.avoidable_tokens,
        miss.avoidable_nano,
    )


_NO_MISS: Final = (None,) * len(MISS_COLUMNS)


def opened_from_values(values: Sequence[Value]) -> AttemptOpened:
    """Read the values of OPENED_COLUMNS."""
    columns = dict(zip(OPENED_COLUMNS, values, strict=True))
    columns["stream"] = bool(columns["stream"])
    fits = columns["fits"]
    columns["fits"] = None if fits is None else bool(fits)
    return AttemptOpened(**columns)  # type: ignore[arg-type]  # the STRICT table fixes each column's type


def settled_from_values(attempt_id: str, values: Sequence[Value]) -> AttemptSettled:
    """Read the values of SETTLED_COLUMNS."""
    column = dict(zip(SETTLED_COLUMNS, values, strict=True))

    def whole(name: str) -> int | None:
        value = column[name]
        return None if value is None else int(value)

    counts = (Count(whole(f"{name}_tokens"), Certainty(str(column[f"{name}_certainty"]))) for name in COUNTS)
    charge = Charge(
        uncached=whole("cost_uncached_nano"),
        cached=whole("cost_cached_nano"),
        output=whole("cost_output_nano"),
        total=whole("cost_total_nano"),
        exact=bool(column["cost_exact"]),
        rates_effective=date.fromisoformat(str(column["rates_effective"])),
    )

    def words(name: str) -> str | None:
        value = column[name]
        return None if value is None else str(value)

    cause = words("miss_cause")
    miss = None
    if cause is not None:
        miss = Miss(
            MissCause(cause),
            words("miss_detail"),
            words("miss_field"),
            *(whole(name) for name in MISS_COLUMNS[3:]),
        )
    return AttemptSettled(
        attempt_id=attempt_id,
        outcome=Outcome(str(column["outcome"])),
        status=whole("status"),
        finish_reason=words("finish_reason"),
        ttft_us=whole("ttft_us"),
        total_us=int(column["total_us"] or 0),
        settled_at_us=int(column["settled_at_us"] or 0),
        usage=Usage(*counts),
        charge=charge,
        miss=miss,
        plain_nano=whole("plain_nano"),
        fixed_nano=whole("fixed_nano"),
    )


def attempt_from_row(values: Sequence[Value]) -> Attempt:
    """Read a row of COLUMNS."""
    width = len(OPENED_COLUMNS)
    opened = opened_from_values(values[:width])
    return Attempt(opened, settled_from_values(opened.attempt_id, values[width:]))
