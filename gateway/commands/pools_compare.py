"""`ctxgate pools compare`: the same cases to two pools, and whether the first is as good as the second."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ctxgate.gateway.agreement import BadCases, compare, passes, read_cases
from ctxgate.inference.rates import format_usd

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from ctxgate.gateway.agreement import Case, Comparison, Outcome, Share
    from ctxgate.gateway.config import Config, Model
    from ctxgate.gateway.pool_compare import Side

SIGNIFICANT: Final = 0.05


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="FIRST", help="the pool that is to be shown as good")
    parser.add_argument("second", metavar="SECOND", help="the pool that it is compared with")
    parser.add_argument(
        "--cases",
        type=Path,
        required=True,
        metavar="FILE",
        help="one case per line, as JSON: messages, and what else a chat request has; `expect`, a text that "
        "the answer must contain, or a mapping with contains, equals, regex, tool or json; `id`, its name",
    )
    parser.add_argument("--model", help="the model to ask for (default: one that leads to both pools)")
    parser.add_argument("--parallel", type=int, default=4, metavar="N", help="cases at once (default: 4)")
    parser.add_argument(
        "--min-agreement",
        type=float,
        metavar="SHARE",
        help="fail unless the lower end of the agreement's interval reaches this share",
    )
    parser.add_argument(
        "--min-pass",
        type=float,
        metavar="SHARE",
        help="fail unless the lower end of the first pool's pass rate reaches this share, or where the first "
        "pool passes fewer cases than the second and chance does not explain it (p < 0.05)",
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")


ACTIONS: Final[Mapping[str, tuple[str, Callable[[argparse.ArgumentParser], None]]]] = {
    "compare": ("send the same requests to two pools at temperature 0, and compare their answers", _declare),
}


def run(config: Config, args: argparse.Namespace) -> int:
    """Compare; 1 where a threshold is not reached, 2 where nothing could be compared."""
    from ctxgate.gateway import pool_compare  # noqa: PLC0415 - heavy: clients and the ledger

    try:
        cases = read_cases(args.cases.read_text("utf-8"))
        models = pool_compare.models_of(config, (args.first, args.second), args.model)
        found, sides = asyncio.run(_compared(config, args, models, cases))
    except (OSError, UnicodeDecodeError) as error:
        print(f"{args.cases}: cannot be read: {error}", file=sys.stderr)
        return 2
    except (BadCases, pool_compare.NotComparable) as error:
        print(error, file=sys.stderr)
        return 2
    figures = compare(found)
    print(
        json.dumps(as_json(figures, found, sides), indent=2) if args.json else as_text(figures, found, sides)
    )
    failures = verdicts(figures, args.min_agreement, args.min_pass)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


async def _compared(
    config: Config, args: argparse.Namespace, models: Sequence[Model], cases: Sequence[Case]
) -> tuple[list[Outcome], tuple[Side, Side]]:
    from ctxgate.gateway import pool_compare  # noqa: PLC0415 - as above
    from ctxgate.gateway.assembly import assembled  # noqa: PLC0415 - as above
    from ctxgate.gateway.keys import KeyRing  # noqa: PLC0415 - as above

    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            print(f"\r{done} of {len(cases)} cases", end="", file=sys.stderr, flush=True)

    async with assembled(config, KeyRing(config.keys)) as services:
        first = await pool_compare.side(services, args.first, models[0])
        second = await pool_compare.side(services, args.second, models[1])
        found = await pool_compare.outcomes(services, (first, second), cases, max(args.parallel, 1), step)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return found, (first, second)


def verdicts(figures: Comparison, min_agreement: float | None, min_pass: float | None) -> list[str]:
    """The thresholds that are not reached, in words."""
    found: list[str] = []
    if min_agreement is not None and figures.agreement.interval[0] < min_agreement:
        found.append(f"agreement is not shown to reach {min_agreement:g}: {_share(figures.agreement)}")
    if min_pass is not None:
        if figures.first_passes.interval[0] < min_pass:
            found.append(f"the pass rate is not shown to reach {min_pass:g}: {_share(figures.first_passes)}")
        if figures.only_first < figures.only_second and figures.p_value < SIGNIFICANT:
            found.append(f"the first pool passes fewer cases (p = {figures.p_value:.3g})")
    return found


def _share(one: Share) -> str:
    if one.share is None:
        return "no case"
    low, high = one.interval
    return f"{one.share:.1%} ({one.count} of {one.total}; 95 % interval {low:.1%} to {high:.1%})"


def as_text(figures: Comparison, found: Sequence[Outcome], sides: tuple[Side, Side]) -> str:
    """The comparison for a reader."""
    first, second = sides
    lines = [
        f"{len(found)} cases at {first.pool} ({first.model.name}) and {second.pool} ({second.model.name})",
        f"  the same answer        {_share(figures.agreement)}",
        f"  {first.pool + ' passes':<22} {_share(figures.first_passes)}",
        f"  {second.pool + ' passes':<22} {_share(figures.second_passes)}",
        f"  only one passes        {first.pool} {figures.only_first}, {second.pool} {figures.only_second}; "
        f"p = {figures.p_value:.3g} (McNemar, exact)",
    ]
    if figures.failed:
        lines.append(f"  {figures.failed} cases were not answered by both")
    differing = [one.case.name for one in found if one.agrees is False]
    lines += [f"  ! {name}: the answers differ" for name in differing[:10]]
    usd = format_usd(first.cost.nano + second.cost.nano)
    calls = first.cost.calls + second.cost.calls
    lines.append(f"The comparison took {calls} calls, ${usd}; they are booked to the task compare.")
    return "\n".join(lines)


def as_json(figures: Comparison, found: Sequence[Outcome], sides: tuple[Side, Side]) -> dict[str, Any]:
    """The same as plain values; answers are not among them."""
    return {
        "cases": len(found),
        "failed": figures.failed,
        "agreement": _share_json(figures.agreement),
        "passes": {
            sides[0].pool: _share_json(figures.first_passes),
            sides[1].pool: _share_json(figures.second_passes),
        },
        "discordant": {sides[0].pool: figures.only_first, sides[1].pool: figures.only_second},
        "p_value": figures.p_value,
        "cost_usd": format_usd(sides[0].cost.nano + sides[1].cost.nano),
        "outcomes": [
            {
                "id": one.case.name,
                "agrees": one.agrees,
                "passes": {
                    sides[0].pool: passes(one.first, one.case.check) if one.case.check else None,
                    sides[1].pool: passes(one.second, one.case.check) if one.case.check else None,
                },
            }
            for one in found
        ],
    }


def _share_json(one: Share) -> dict[str, Any]:
    return {"count": one.count, "total": one.total, "share": one.share, "interval": list(one.interval)}
