"""Where the next prompt of a conversation leaves the one before it: learned, by pool and kind of answer.

The next prompt renders the answer anew. Mostly it begins with the whole earlier prompt; some templates
write its last tokens otherwise once the turn is over (an opening of a thought that is left out later).
And only sometimes the answer comes out as the very tokens that were generated: then a hit goes on into it.
Both depend on model, template and client, and show in the paths of blocks that prompts turn out to have.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

ENDINGS: Final = frozenset({"stop", "length", "tool_calls"})
"""Ways for an answer to end that are told apart; all others are one."""

_SEEN: Final = 16  # latest prompts of each kind, of which most are right: some are no next turn at all


@dataclass(slots=True)
class _End:
    """`bounds`: at least and at most how many tokens before the earlier prompt's end each pair parted."""

    short: int = 0
    bounds: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_SEEN))
    reached: deque[bool] = field(default_factory=lambda: deque(maxlen=_SEEN))

    def bound(self, least: int, most: int) -> None:
        """Take one more pair: the smallest number that fits most of the latest ones is believed."""
        self.bounds.append((least, most))
        fits = {
            value: sum(low <= value <= high for low, high in self.bounds)
            for value in {0, *(low for low, _ in self.bounds)}
        }
        self.short = min(fits, key=lambda value: (-fits[value], value))


class Ends:
    """What was seen so far. As many entries as pools and endings."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, str], _End] = {}

    def short(self, pool: str, ending: str) -> int:
        """How many tokens before the end of the earlier prompt the two part; 0 while nothing was seen."""
        return self._end(pool, ending).short

    def reaches(self, pool: str, ending: str) -> bool:
        """Whether hits mostly go on to the end of the answer; not while nothing was seen."""
        reached = self._end(pool, ending).reached
        return 2 * sum(reached) > len(reached)

    def learn(self, pool: str, ending: str, *, prompt: int, block: int, shared: int, answered: int) -> None:
        """Note that a prompt of so many tokens shares `shared` blocks with the next one.

        `answered` are the blocks of the prompt and its answer together, as far as they were stored.
        """
        end, whole = self._end(pool, ending), prompt // block
        if shared < whole:
            end.bound(prompt - (shared + 1) * block + 1, prompt - shared * block)
            return
        end.bound(0, prompt - whole * block)
        if answered > whole:
            end.reached.append(shared >= answered)

    def _end(self, pool: str, ending: str) -> _End:
        key = pool, ending if ending in ENDINGS else ""
        end = self._ends.get(key)
        if end is None:
            end = self._ends[key] = _End()
        return end
