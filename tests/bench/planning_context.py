"""What the context stage costs a long turn: CPU time of `shape`, with layout done before and not counted.

Two cases: a conversation of which nothing is recorded, and one that outgrew its window in its first turn and
goes out under that compaction ever since. Of both, the length of the turn before is known, as it is once an
engine has measured it.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from datetime import date
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

from ctxgate.compression.window import Conversation
from ctxgate.gateway.config import Context, Model, Pool, Replica
from ctxgate.gateway.context import ContextStage
from ctxgate.gateway.context_level import Mode
from ctxgate.gateway.context_terms import Known
from ctxgate.gateway.fleet import Fleet
from ctxgate.gateway.flow import Allowed
from ctxgate.gateway.telemetry import Telemetry
from ctxgate.inference import wire
from ctxgate.inference.rates import RateCard, Rates

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from ctxgate.compression.policy import Policy
    from ctxgate.gateway.context_turn import Turn
    from ctxgate.gateway.flow import Identified
    from ctxgate.gateway.forms import Forms
    from ctxgate.gateway.layout import LayoutStage
    from ctxgate.gateway.services import Services

NOTHING_RECORDED: Final = "context stage, nothing recorded"
COMPACTED: Final = "context stage, compaction applied"
WINDOW_SHARE: Final = 0.6
"""Of the conversation's length: the window of the one that is compacted."""

_RATES: Final = Rates(10**9, 10**8, 4 * 10**9, 10**9, date(2026, 1, 1))
_POOL: Final = Pool("standard", (Replica("standard-0", "http://127.0.0.1:1"),), RateCard(((_RATES,),)))


class ContextBench:
    """A context stage in front of nothing: originals are not archived, nobody writes summaries."""

    def __init__(self, layout: LayoutStage, forms: Forms, window: int | None) -> None:
        context = Context(summarizer="off", recall=False)
        services = SimpleNamespace(
            config=SimpleNamespace(models={}, teams={"alpha": SimpleNamespace(context=context)}),
            fleet=Fleet({"standard": _POOL}),
            layout=layout,
            forms=forms,
            telemetry=Telemetry(),
            speeds=SimpleNamespace(latency=lambda _: None),
            now_us=lambda: 0,
            spawn=_not_run,
        )
        self._layout = layout
        self._stage = ContextStage(cast("Services", services))
        self._model = Model("mock", ("standard",), window=window)
        self._before: Turn | None = None

    async def turn(self, identified: Identified, policy: Policy) -> tuple[float, int]:
        """CPU seconds of one turn, and how many messages it left out or shortened."""
        laid = await self._layout.lay_out(identified, policy, now_us=0)
        allowed = Allowed(identified, self._model, (_POOL,))
        began = time.process_time()
        shaped = await self._stage.shape(allowed, laid, Mode.AUTO)
        spent = time.process_time() - began
        turn = shaped.turn
        assert turn is not None, "the stage has failed"
        tokens = turn.estimate.tokens
        known = Known(
            len(turn.facts), tokens, turn.said, turn.record, Conversation(0, tokens), tools=turn.tools
        )
        self._stage.remember(turn, known)
        record = turn.record
        return spent, 0 if record is None else len(record.gone()) + len(record.masked) + len(record.split)

    async def measured(
        self, raws: Iterable[bytes], identify: Any, policy: Policy
    ) -> tuple[float, float, int, int, float]:
        """CPU and scan in milliseconds, messages, edits, and the bodies that one turn allocates.

        Times are medians over all turns but the first, which is new as a whole.
        """
        spent: list[float] = []
        scans: list[float] = []
        edits, last = 0, b""
        for raw in raws:
            began = time.process_time()
            wire.parse(raw)
            scans.append(time.process_time() - began)
            cpu, edits = await self.turn(identify(raw), policy)
            spent.append(cpu)
            last = raw
        identified = identify(last)
        tracemalloc.start()
        await self.turn(identified, policy)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        cpu, scan = (1000 * statistics.median(each[1:]) for each in (spent, scans))
        return cpu, scan, len(identified.inbound.messages), edits, peak / len(last)


def _not_run(work: Coroutine[Any, Any, None]) -> None:
    work.close()
