"""Whether compaction pays for the conversations of one kind: a switch that turns itself off.

Each compaction is judged once, when it is over (the next one took effect, or the conversation ended):
what it saved less what it cost. When the last `STRETCH` of them together have lost money, compaction for
money stops for that kind of conversation. After `PAUSE` requests without, it is tried again with a clean
record; each further time the pause is twice as long. What must be compacted to fit is compacted anyway,
and is not judged.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

STRETCH: Final = 8
PAUSE: Final = 1000
MOST_DOUBLINGS: Final = 6


@dataclass(frozen=True, slots=True)
class Verdict:
    """The state. `nets` are exact amounts of the compactions judged since it was last switched on.

    `pause` is how many requests it stays off from now, 0 while it is on; `times` how often it went off.
    """

    nets: tuple[int, ...] = field(default=(), repr=False)
    pause: int = 0
    times: int = 0

    @property
    def on(self) -> bool:
        """Whether conversations may be compacted for money."""
        return self.pause == 0

    @property
    def net(self) -> int:
        """What the compactions of the stretch came to together."""
        return sum(self.nets)


NEW: Final = Verdict()


def judged(verdict: Verdict, net: int) -> Verdict:
    """The state after a compaction that came to `net`; it goes off where the stretch has lost.

    While it is off, what is left of compactions from before is not counted.
    """
    if not verdict.on:
        return verdict
    nets = (*verdict.nets, net)[-STRETCH:]
    if len(nets) < STRETCH or sum(nets) >= 0:
        return replace(verdict, nets=nets)
    pause = PAUSE << min(verdict.times, MOST_DOUBLINGS)
    return Verdict(nets, pause, verdict.times + 1)


def passed(verdict: Verdict) -> Verdict:
    """The state after a request of such a conversation."""
    if verdict.on:
        return verdict
    if verdict.pause > 1:
        return replace(verdict, pause=verdict.pause - 1)
    return Verdict(times=verdict.times)
