"""Health of a replica from the ends of attempts and from probes: a small breaker, pure.

    CLOSED --enough failures in a row--> OPEN --cool-down--> HALF OPEN --success--> CLOSED
                                           ^--------------failure----------'

Half open, one attempt at a time is let through as a trial; the others see the replica as unhealthy.

What one client can bring about must not take replicas from all the others. So a refused connection
counts each time, but a failure that may be the request's own counts once per conversation, and what a
client has chosen, or a lack of room, counts for nothing at all.

Outcomes and probes are kept apart: a replica whose /health answers while its answers fail stays set
aside. The one exception is a process that was gone and is back: what the old one broke off says nothing
of the new one. An attempt counts as a success at the end of its answer, never when its stream opens.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from msgspec.structs import replace

from ctxgate.inference.finding import Finding
from ctxgate.inference.record import Record

THRESHOLD: Final = 3
STALLED_CONVERSATIONS: Final = 5  # a long answer passes the gateway's deadline at a replica that is well, too
SILENT_PROBES: Final = 3
COOL_DOWN_US: Final = 10_000_000


class Sign(Enum):
    """What the end of an attempt says of its replica."""

    WELL = auto()  # a whole answer
    NEUTRAL = auto()  # a refusal, a lack of room, a client that left
    REFUSED = auto()  # no connection; counts each time
    LOST = auto()  # the connection broke; counts once per conversation
    FAULT = auto()  # the engine reported that it failed; counts once per conversation
    STALLED = auto()  # the gateway's own deadline passed; only many conversations of these count


class Health(Record, frozen=True):
    """What is known of one replica.

    `failures` in a row, of these `roots` the conversations that failed and `stalled` those that ran out
    of time (each the latest few); `faulty`: the engine itself reported one of them; `refused`: a
    connection was refused among them. `open_until_us` is 0 while the breaker is closed; times are
    microseconds of one clock that never steps back. `trial` numbers the attempt that tries a half-open
    breaker, 0 for none. `probe_ok` is the verdict of the probes, `silent_probes` how many in a row had
    no answer.
    """

    failures: int = 0
    roots: tuple[bytes, ...] = ()
    stalled: tuple[bytes, ...] = ()
    faulty: bool = False
    refused: bool = False
    open_until_us: int = 0
    trial: int = 0
    probe_ok: bool = True
    silent_probes: int = 0

    def healthy(self, now_us: int) -> bool:
        """Whether attempts may go there; after the cool-down one at a time may."""
        return self.probe_ok and (self.open_until_us == 0 or (self.half_open(now_us) and not self.trial))

    def half_open(self, now_us: int) -> bool:
        """Whether the cool-down is over and no attempt has succeeded since."""
        return 0 < self.open_until_us <= now_us


def began(health: Health, number: int, now_us: int) -> Health:
    """An attempt goes there; it is the trial where the breaker is half open and has none."""
    return replace(health, trial=number) if health.half_open(now_us) and not health.trial else health


def left(health: Health, number: int) -> Health:
    """The attempt of this number is over, however it ended; another one may be the trial."""
    return replace(health, trial=0) if number == health.trial else health


def ended(health: Health, sign: Sign, root: bytes, now_us: int) -> Health:
    """Learn from how an attempt of the conversation `root` ended."""
    match sign:
        case Sign.NEUTRAL:
            return health
        case Sign.WELL:
            return _closed(health)
        case Sign.REFUSED:
            after = replace(health, failures=health.failures + 1, refused=True)
        case Sign.STALLED:
            stalled = _with(health.stalled, root, STALLED_CONVERSATIONS)
            after = replace(health, stalled=stalled)
            return _opened(after, now_us) if len(stalled) >= STALLED_CONVERSATIONS else after
        case Sign.LOST | Sign.FAULT:
            after = replace(
                health,
                failures=health.failures + (root not in health.roots),
                roots=_with(health.roots, root, THRESHOLD),
                faulty=health.faulty or sign is Sign.FAULT,
            )
    return _opened(after, now_us) if after.failures >= THRESHOLD else after


def probed(health: Health, finding: Finding) -> Health:
    """Learn from a probe: one bad answer is enough, but a busy process may miss a probe or two."""
    match finding:
        case Finding.WELL:
            back = _closed(health) if health.refused and not health.faulty else health
            return replace(back, probe_ok=True, silent_probes=0)
        case Finding.UNWELL:
            return replace(health, probe_ok=False, silent_probes=0)
        case Finding.REFUSED:
            return replace(health, probe_ok=False, silent_probes=0, refused=True)
        case Finding.SILENT:
            silent = min(health.silent_probes + 1, SILENT_PROBES)
            return replace(health, silent_probes=silent, probe_ok=health.probe_ok and silent < SILENT_PROBES)


def _opened(health: Health, now_us: int) -> Health:
    return replace(health, open_until_us=now_us + COOL_DOWN_US, trial=0)


def _closed(health: Health) -> Health:
    """Nothing is held against it but what the probes say."""
    return Health(probe_ok=health.probe_ok, silent_probes=health.silent_probes)


def _with(roots: tuple[bytes, ...], root: bytes, most: int) -> tuple[bytes, ...]:
    """The latest conversations, each once."""
    return roots if root in roots else (*roots, root)[-most:]
