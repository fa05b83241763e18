"""The model beside the gateway: what a session cost by policy, and what the model says of the same requests.

The model is that of `compression.schedule`. Its sizes are those that were measured: the requests of the run
that never compacted, the means over all compactions of what stayed cached and what the call took, and what
each compaction left. The gateway decides between two requests, so the model's policies do not see what
arrives. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from ctxgate.compression.economics import Shape, overhead, to_nano, warm_request
from ctxgate.compression.schedule import Step, optimum
from ctxgate.compression.window import (
    KEEP,
    Compact,
    Reason,
    Terms,
    begin,
    compacted,
    decide,
    observed,
    target,
)
from ctxgate.gateway.ledger import ANSWER
from ctxgate.gateway.policy_table import dollars
from ctxgate.gateway.replay_table import table
from ctxgate.inference.rates import format_usd

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ctxgate.compression.window import Conversation, Decision
    from ctxgate.gateway.config import Context
    from ctxgate.gateway.ledger import Attempt
    from ctxgate.inference.rates import Rates

    Decide = Callable[[Conversation, Terms], Decision]

NEVER: Final = "never"
OPTIMUM: Final = "optimum"
ALIKE: Final = 0.02
"""Policies that are no further apart by the model are not told apart: the twin's summaries vary in length."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What was measured of a session: its requests, and the means over its compactions."""

    steps: tuple[Step, ...]
    shape: Shape


@dataclass(frozen=True, slots=True)
class Compared:
    """One policy: dollars by the model and by the gateway's ledger, and how often each compacted."""

    policy: str
    model_nano: int
    gateway_nano: int
    model_cuts: int
    gateway_cuts: int

    @property
    def difference(self) -> float:
        """By how much the gateway's cost differs from the model's, as a part of the model's."""
        return self.gateway_nano / self.model_nano - 1


def policies(triggers: Sequence[int]) -> dict[str, Decide]:
    """The policies by name, as the gateway takes them."""
    found: dict[str, Decide] = {str(trigger): _fixed(trigger) for trigger in triggers}
    return {**found, NEVER: lambda _state, _terms: KEEP, "ski-rental": _ski_rental, "shipped": decide}


def scheduled(cuts: Sequence[int]) -> Decide:
    """Compact before these requests, counted from 0, or as soon after as anything is old enough."""

    def decided(state: Conversation, terms: Terms) -> Decision:
        due = sum(cut <= state.requests for cut in cuts)
        return _compact(terms) if state.passes < due else KEEP

    return decided


def _fixed(trigger: int) -> Decide:
    def decided(state: Conversation, terms: Terms) -> Decision:
        return _compact(terms) if state.tokens >= trigger and state.tokens > terms.shape.base else KEEP

    return decided


def _ski_rental(state: Conversation, terms: Terms) -> Decision:
    pays = state.spent >= overhead(terms.rates, terms.shape) and state.tokens > state.base
    return _compact(terms) if pays else KEEP


def _compact(terms: Terms) -> Compact:
    return Compact(Reason.MONEY, target(terms), None)


def sizes_of(never: Sequence[Attempt], runs: Sequence[Sequence[Attempt]]) -> Sizes:
    """What the runs measured. Raises ValueError where none of them has compacted."""
    cuts = [cut for run in runs for cut in _cuts(run)]
    if not cuts:
        raise ValueError("no policy has compacted: the session is too short for its triggers")
    prefix = sum(_cached(cut.after) for cut in cuts) // len(cuts)
    base = sum(_prompt(cut.after) for cut in cuts) // len(cuts)
    called = [cut.call for cut in cuts if cut.call is not None]
    output = sum(_output(call) for call in called) // max(len(called), 1)
    longer = [_prompt(cut.call) - _prompt(cut.before) for cut in cuts if cut.call is not None]
    instruction = max(0, sum(longer) // max(len(longer), 1))
    lengths = [prefix, *map(_prompt, never)]
    growth = [max(0, after - before) for before, after in pairwise(lengths)]
    steps = tuple(Step(grown, _output(each)) for grown, each in zip(growth, never, strict=True))
    return Sizes(steps, Shape(prefix, 0, max(0, base - prefix), output, instruction))


def modelled(
    decide_: Decide, sizes: Sizes, rates: Rates, believed: Shape, left: Sequence[int] = ()
) -> tuple[int, int]:
    """Nano-dollars and compactions of a policy by the model.

    `believed`: the sizes that it decides by. `left`: the prompt after each of its compactions, as measured;
    the last one goes on, and where there is none the mean of all policies counts.
    """
    terms, shape = Terms(rates, believed), sizes.shape
    state = begin(believed)
    state = replace(state, tokens=shape.prefix)
    amount = cuts = 0
    for step in sizes.steps:
        length = state.tokens + step.growth
        base = left[min(cuts, len(left) - 1)] if left else shape.base
        if length > base and isinstance(decide_(state, terms), Compact):
            # The call reads what was sent; what arrives is part of what is left.
            amount += rates.cached * state.tokens + rates.written * shape.instruction
            amount += rates.output * shape.summary_output
            amount += warm_request(rates, base, base - shape.prefix, step.output)
            state = compacted(observed(state, terms, length), terms, base)
            cuts += 1
        else:
            amount += warm_request(rates, length, step.growth, step.output)
            state = observed(state, terms, length)
    return to_nano(amount), cuts


def carried_out(run: Sequence[Attempt]) -> tuple[int, ...]:
    """The requests before which the compactions of a run took effect, counted from 0."""
    answers = [each for each in run if each.opened.purpose == ANSWER]
    return tuple(
        at
        for at, (before, after) in enumerate(pairwise(answers), start=1)
        if _prompt(after) < _prompt(before)
    )


def left_by(run: Sequence[Attempt]) -> tuple[int, ...]:
    """The prompts after each compaction of a run. A tail holds whole rounds, so they differ."""
    return tuple(_prompt(cut.after) for cut in _cuts(run))


def best_cuts(sizes: Sizes, rates: Rates) -> tuple[int, ...]:
    """The cuts of the best schedule in hindsight."""
    return optimum(sizes.steps, Terms(rates, sizes.shape)).cuts


def believed_shape(sizes: Sizes, context: Context) -> Shape:
    """The sizes that the gateway goes by, of its configuration (see `context_terms`)."""
    return Shape(
        sizes.shape.prefix,
        context.summary_tokens,
        context.tail_tokens,
        context.summary_tokens * 11 // 8,
        sizes.shape.instruction,
    )


def gateway_cuts(run: Sequence[Attempt]) -> int:
    """How many compactions took effect in a run."""
    return len(_cuts(run))


def same_order(compared: Sequence[Compared], apart: float = ALIKE) -> bool:
    """Whether model and gateway order any two policies alike that differ by `apart` or more in the model."""
    for one in compared:
        for other in compared:
            if one.model_nano * (1 + apart) < other.model_nano and one.gateway_nano >= other.gateway_nano:
                return False
    return True


def as_text(compared: Sequence[Compared], sizes: Sizes, *, color: bool = False) -> str:
    """A table, the cheapest policy by the gateway first, and what the model was given."""
    rows = [
        [
            each.policy,
            dollars(each.model_nano),
            dollars(each.gateway_nano),
            f"{each.difference * 100:+.1f}%",
            str(each.model_cuts),
            str(each.gateway_cuts),
        ]
        for each in sorted(compared, key=lambda each: each.gateway_nano)
    ]
    headers = ("policy", "model USD", "gateway USD", "difference", "compactions: model", "gateway")
    shape = sizes.shape
    return (
        table(headers, rows, color=color)
        + f"\nmeasured: prefix {shape.prefix:,}, left behind it {shape.tail:,}, summary call"
        f" {shape.summary_output:,} tokens after an instruction of {shape.instruction:,}"
    )


def as_json(compared: Sequence[Compared], sizes: Sizes) -> dict[str, Any]:
    """The same as JSON."""
    shape = sizes.shape
    return {
        "requests": len(sizes.steps),
        "prefix": shape.prefix,
        "left_behind_it": shape.tail,
        "summary_output": shape.summary_output,
        "instruction": shape.instruction,
        "same_order": same_order(compared),
        "policies": [
            {
                "policy": each.policy,
                "model_usd": format_usd(each.model_nano),
                "gateway_usd": format_usd(each.gateway_nano),
                "difference": each.difference,
                "model_compactions": each.model_cuts,
                "gateway_compactions": each.gateway_cuts,
            }
            for each in compared
        ],
    }


@dataclass(frozen=True, slots=True)
class _Cut:
    """A compaction: the answers before and after it took effect, and the call for its summary, if any."""

    before: Attempt
    after: Attempt
    call: Attempt | None


def _cuts(run: Sequence[Attempt]) -> list[_Cut]:
    found: list[_Cut] = []
    before: Attempt | None = None
    call: Attempt | None = None
    for each in run:
        if each.opened.purpose != ANSWER:
            call = each
            continue
        if before is not None and _prompt(each) < _prompt(before):
            found.append(_Cut(before, each, call))
        before, call = each, None
    return found


def _prompt(attempt: Attempt) -> int:
    return attempt.settled.usage.prompt or 0


def _cached(attempt: Attempt) -> int:
    return attempt.settled.usage.cached.value or 0


def _output(attempt: Attempt) -> int:
    return attempt.settled.usage.output.value or 0
