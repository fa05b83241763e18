"""Every compaction policy through the whole gateway, beside what the model says of the same requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxgate.gateway.config import Context
from ctxgate.gateway.replay_policies_check import (
    NEVER,
    OPTIMUM,
    Compared,
    believed_shape,
    best_cuts,
    carried_out,
    gateway_cuts,
    left_by,
    modelled,
    policies,
    scheduled,
    sizes_of,
)
from ctxgate.gateway.replay_policies_run import PlayFailed, Setting, play
from ctxgate.inference.prompts import PromptRenderer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ctxgate.gateway.replay_policies_check import Sizes
    from ctxgate.gateway.sessions import Session
    from ctxgate.inference.rates import Rates


class Unplayable(Exception):
    """The session, or what answers to it, allows no comparison."""


async def compare(
    session: Session,
    rates: Rates,
    triggers: Sequence[int],
    most: int,
    step: Callable[[], None] = lambda: None,
    context: Context | None = None,
) -> tuple[list[Compared], Sizes]:
    """Play the first `most` requests under every policy, and then under the model's best schedule.

    Raises `Unplayable`. `context` is the team's (default: the defaults).
    """
    context = context or Context()
    setting = Setting(rates, context, PromptRenderer(), most, step)
    chosen = policies(triggers)
    try:
        runs = {name: await play(session, name, decide, setting) for name, decide in chosen.items()}
        sizes = sizes_of(runs[NEVER].attempts, [run.attempts for run in runs.values()])
        chosen[OPTIMUM] = scheduled(best_cuts(sizes, rates))
        runs[OPTIMUM] = await play(session, OPTIMUM, chosen[OPTIMUM], setting)
    except (PlayFailed, ValueError) as error:
        raise Unplayable(str(error)) from error
    believed = believed_shape(sizes, context)
    compared = []
    for name, decide in chosen.items():
        run = runs[name]
        # What is due is cut as soon as anything is old enough: the model does as was done.
        model = scheduled(carried_out(run.attempts)) if name == OPTIMUM else decide
        nano, cuts = modelled(model, sizes, rates, believed, left_by(run.attempts))
        compared.append(Compared(name, nano, run.cost_nano, cuts, gateway_cuts(run.attempts)))
    return compared, sizes
