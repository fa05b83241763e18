"""One request's prompt as it goes out, beside the one before it in its conversation. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from ctxgate.compression.divergence import Divergence
    from ctxgate.compression.previous import Before, Owner
    from ctxgate.compression.sent import Sent
    from ctxgate.inference.wire import Body


@dataclass(slots=True)
class Comparison:
    """Where a prompt leaves the one before it: from digests at once, from the bytes when they are read.

    `exact` says that the bytes were. `bodies`: the two, None where the earlier one is gone or both are
    read. `most`: the difference with the bytes that reading may find at most, None where it may find
    another one. `reading`: the comparison of large ones, under way or done.
    """

    best: Divergence
    bodies: tuple[Body, Body] | None = None
    most: Divergence | None = None
    exact: bool = False
    reading: Awaitable[Divergence] | None = None

    def read(self, found: Divergence) -> None:
        """Take the exact difference."""
        self.best, self.exact, self.bodies = found, True, None


@dataclass(frozen=True, slots=True)
class Seen:
    """A prompt as it goes out, the request before it, and where the two part, None where they do not."""

    owner: Owner
    sent: Sent
    body: Body = field(repr=False)
    before: Before | None
    comparison: Comparison | None
