"""The demo's table, and sentences that say what it shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ctxgate.gateway.replay import Total, percentile
from ctxgate.gateway.replay_table import HEADERS, cells, duration, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ctxgate.gateway.demo import Compared
    from ctxgate.gateway.replay import Sums

_COLUMNS: Final = HEADERS[: HEADERS.index("oracle")]
_EQUAL_BELOW: Final = 1.05  # a factor that is written as 1.0 is none


def comparison(compared: Sequence[Compared], most: float | None, *, color: bool) -> str:
    """The table, two rows per case, and what it shows. `most`: the largest share that can hit."""
    rows: list[list[str]] = []
    for each in compared:
        rows.append([each.case.label, *[""] * (len(_COLUMNS) + 1)])
        rows.append(["  direct", *_cells(each.direct)])
        rows.append(["  through ctxgate", *_cells(each.through)])
    bound = "" if most is None else f" About {most:.0%} can be: the rest is new in each request."
    legend = f"hit: the share of the prompt that the cache served.{bound}"
    told = (line for each in compared for line in _told(each))
    return "\n".join([table(("", *_COLUMNS, "hit"), rows, color=color), legend, "", *told])


def _cells(sums: Sums) -> list[str]:
    share = _share(sums)
    return [*cells(sums)[: len(_COLUMNS)], "-" if share is None else f"{share:.0%}"]


def _share(sums: Sums) -> float | None:
    """Cached tokens over prompt tokens; None where a request leaves one of them unknown."""
    if not _known(sums.cached) or not sums.prompt.value:
        return None
    return (sums.cached.value or 0) / sums.prompt.value


def _known(total: Total) -> bool:
    return total.value is not None and not total.missing


def _told(compared: Compared) -> Iterator[str]:
    """One honest sentence on a case, and where hits differ, why."""
    direct, through, label = compared.direct, compared.through, compared.case.label
    before, after = _share(direct), _share(through)
    failed = direct.failed or through.failed or direct.requests != through.requests
    if failed or before is None or after is None:
        yield f"{label}: not comparable, some requests failed or reported no usage"
        return
    cost = _cost(direct.cost_nano, through.cost_nano)
    if (direct.prompt, direct.cached) == (through.prompt, through.cached):
        yield f"{label}: the same prompts, the same hits, {cost}{_delay(compared.ttft_added_s)}"
        return
    ttft = f"TTFT p50 is {duration(through.ttft_p50_s)} instead of {duration(direct.ttft_p50_s)}"
    yield f"{label}: {_hits(direct, through, before, after)}, {ttft}; {cost}"
    reasons = [compared.why, compared.case.remedy if after > before else ""]
    if any(reasons):
        yield "  " + " ".join(filter(None, reasons))


def _hits(direct: Sums, through: Sums, before: float, after: float) -> str:
    if f"{before:.0%}" == f"{after:.0%}":
        return f"the cache serves {through.cached.value:,} tokens instead of {direct.cached.value:,}"
    return f"the cache serves {after:.0%} of the prompt instead of {before:.0%}"


def _cost(direct: Total, through: Total) -> str:
    if not _known(direct) or not _known(through):
        return "the cost is unknown"
    before, after = direct.value or 0, through.value or 0
    if before == after:
        return "the same cost"
    if not before or not after:
        free, priced = ("ctxgate", "direct") if before else ("direct", "ctxgate")
        return f"{free} is free, {priced} is not"
    dearer, factor = ("direct", before / after) if before > after else ("ctxgate", after / before)
    if factor < _EQUAL_BELOW:
        return f"the cost differs by {factor - 1:.1%}"
    return f"{dearer} costs {factor:.1f} times as much"


def _delay(added_s: Sequence[float]) -> str:
    """What the gateway added to the first token, where that stands out of the spread between requests."""
    median, low, high = (percentile(added_s, percent) for percent in (50, 25, 75))
    if median is None or low is None or high is None:
        return ""
    if median <= high - low:
        return "; the difference in TTFT is within noise"
    return f"; TTFT {median * 1000:+.1f} ms"
