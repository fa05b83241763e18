"""Health of a replica from the outcomes of attempts and from probes: a small breaker, pure.

    CLOSED --failures >= THRESHOLD--> OPEN --cool-down--> HALF OPEN --success--> CLOSED
                                        ^------------------failure-----'

Outcomes and probes are kept apart: a replica whose /health answers while its answers fail stays set
aside, and one whose process is gone is set aside by its first failed probe. An attempt counts as a
success at the end of its answer, never when its stream opens. A refusal for lack of room is load, not
sickness, and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

THRESHOLD: Final = 3
COOL_DOWN_US: Final = 10_000_000


@dataclass(frozen=True, slots=True)
class Health:
    """Consecutive failed answers, until when (Unix microseconds) that sets the replica aside, last probe."""

    failures: int = 0
    open_until_us: int = 0
    probe_ok: bool = True

    def healthy(self, now_us: int) -> bool:
        """Whether attempts may go there; after the cool-down they may try again."""
        return self.probe_ok and now_us >= self.open_until_us


def succeeded(health: Health) -> Health:
    """An answer ended well."""
    return replace(health, failures=0, open_until_us=0) if health.failures else health


def failed(health: Health, now_us: int) -> Health:
    """The replica was unreachable, broke off or answered with a server error."""
    failures = health.failures + 1
    opened = now_us + COOL_DOWN_US if failures >= THRESHOLD else health.open_until_us
    return replace(health, failures=failures, open_until_us=opened)


def probed(health: Health, ok: bool) -> Health:
    """The answer of the replica's own health endpoint."""
    return health if health.probe_ok is ok else replace(health, probe_ok=ok)
