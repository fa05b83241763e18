"""Imported by every Python process of a test's engine at its start, as its `PYTHONPATH` names this folder.

vLLM's workers await their next step by calling `sched_yield` in a loop for up to a second. Linux 6.18 books
no run time to the scheduling group of such a loop: measured there, one engine with one endless stream kept
kernel threads, the other engine and the gateway off its core for 4 to 37 seconds, and a time-out somewhere
was the end of a test. A short sleep, which vLLM itself falls back to on older interpreters, awaits the same
and lets the others run: the longest pause between two chunks was then 0.02 s.
"""

from __future__ import annotations

import os
import time
from typing import Final

PAUSE_S: Final = 1e-6
"""The kernel's timer slack makes about 60 microseconds of it."""


def _rest() -> None:
    time.sleep(PAUSE_S)


os.sched_yield = _rest
