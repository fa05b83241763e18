"""How long an answer will be: a quantile of the latest ones of its team, model and class of job.

An answer that its limit ended would have been longer. It counts as "at least so long" (the product-limit
estimate of Kaplan and Meier, 1958), so that short limits do not make the answers of others look short.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final, TypeAlias

QUANTILE: Final = 0.75
UNKNOWN: Final = 256
"""Tokens of an answer of which nothing is known."""

ENOUGH: Final = 8
WINDOW: Final = 64
GROUPS: Final = 2048
"""So many groups are kept, those used last; one takes some 2 KB."""

Group: TypeAlias = tuple[str, str, str]
"""Team, model, class of job; the team and the class are empty for all answers of a model."""


class _Lengths:
    """The latest lengths of one group, each with whether its limit ended it."""

    __slots__ = ("_known", "latest")

    def __init__(self) -> None:
        self.latest: deque[tuple[int, bool]] = deque(maxlen=WINDOW)
        self._known: int | None = None

    def add(self, tokens: int, *, cut: bool) -> None:
        self.latest.append((tokens, cut))
        self._known = None

    def quantile(self, share: float) -> int:
        """The length that `share` of the answers do not pass; the longest seen where limits hide it."""
        if self._known is None:
            self._known = quantile(self.latest, share)
        return self._known


class OutputLengths:
    """Lengths by group. `share`: the quantile that is expected, between 0 and 1."""

    def __init__(self, share: float = QUANTILE, *, groups: int = GROUPS) -> None:
        if not 0 < share < 1:
            raise ValueError("a quantile lies between 0 and 1")
        self._share = share
        self._most = groups
        self._groups: OrderedDict[Group, _Lengths] = OrderedDict()

    def __len__(self) -> int:
        """How many groups are kept."""
        return len(self._groups)

    def learn(self, team: str, model: str, job_class: str, tokens: int, *, cut: bool = False) -> None:
        """Note a whole answer of `tokens`; `cut`: its limit ended it."""
        for group in ((team, model, job_class), ("", model, "")):
            known = self._groups.get(group)
            if known is None:
                known = self._groups[group] = _Lengths()
                if len(self._groups) > self._most:
                    self._groups.popitem(last=False)
            self._groups.move_to_end(group)
            known.add(tokens, cut=cut)

    def expected(self, team: str, model: str, job_class: str, limit: int | None = None) -> int:
        """The length to expect, in tokens, never above the request's own `limit`.

        Of a group with too few answers those of its model count, and `UNKNOWN` where there are too few too.
        """
        tokens = UNKNOWN
        for group in ((team, model, job_class), ("", model, "")):
            known = self._groups.get(group)
            if known is not None and len(known.latest) >= ENOUGH:
                tokens = known.quantile(self._share)
                break
        return tokens if limit is None else min(tokens, limit)


def quantile(lengths: deque[tuple[int, bool]], share: float) -> int:
    """The least length that at least `share` of the answers do not pass, by the product-limit estimate."""
    left, longer = len(lengths), 1.0
    longest = 0
    for tokens, cut in sorted(lengths):  # at one length, those that ended by themselves come first
        longest = tokens
        if not cut:
            longer *= 1.0 - 1.0 / left
            if 1.0 - longer >= share - 1e-12:
                return tokens
        left -= 1
    return longest
