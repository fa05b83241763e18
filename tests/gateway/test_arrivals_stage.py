"""Tool results that are shortened on arrival, through the whole gateway: what it saves is in the ledger."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ctxgate.compression.window import KEEP
from ctxgate.gateway.replay_policies_run import Setting, play
from ctxgate.inference.prompts import PromptRenderer
from support.steady import CONTEXT, RATES, steady

pytestmark = pytest.mark.integration


async def test_the_ledger_says_what_shortened_results_would_have_cost_whole() -> None:
    renderer = PromptRenderer()

    async def played(*, shortened: bool) -> list[tuple[int, int | None]]:
        context = replace(CONTEXT, tool_results=shortened, tool_result_bytes=1024)
        run = await play(steady(16), "never", lambda _state, _terms: KEEP, Setting(RATES, context, renderer))
        settled = [each.settled for each in run.attempts]
        return [(each.charge.total or 0, each.plain_nano) for each in settled]

    whole, short = await played(shortened=False), await played(shortened=True)
    known = [at for at, (_, plain) in enumerate(short) if plain is not None]
    assert len(known) >= 8
    would = sum(short[at][1] or 0 for at in known)
    assert would == pytest.approx(sum(whole[at][0] for at in known), rel=0.04)
    assert sum(short[at][0] for at in known) < 0.7 * would
