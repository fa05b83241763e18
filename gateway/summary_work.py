"""What is given to a summarizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msgspec import Raw

    from ctxgate.gateway.flow import Held
    from ctxgate.inference.wire import Body


@dataclass(frozen=True, slots=True)
class SummaryWork:
    """What is to be summarized.

    `held`: the attempt that was answered last. `sent`: its body as it went out. `dropped`: the client's
    messages that the text stands for, as they came, in order. `task`: the first user message, where it is
    kept. `budget`: tokens of the whole text; only the user's rules may take more. `source_bytes`: what the
    dropped messages take in the prompt now. `shortened`: the client's messages that stay, but lose their
    middle; of them the user's rules are written too.
    """

    held: Held
    sent: Body = field(repr=False)
    dropped: Sequence[Raw] = field(repr=False)
    task: Raw | None = field(repr=False)
    budget: int
    source_bytes: int
    shortened: Sequence[Raw] = field(default=(), repr=False)
