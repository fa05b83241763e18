"""What whole sessions cost when compacted by one policy or another: the model-level simulation.

The model: the length starts at the stable prefix and grows before each request. A policy may compact just
before a request once the length is above the base: it pays the suffix call `c L + w q + o So`, the length
becomes B, and the request pays `c P + w (S+K) + o b`; otherwise the request pays `c (L-g) + w g + o b`.
Damage counts once per compaction. The best schedule in hindsight comes from dynamic programming over the
cut points, in time linear in the requests.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from ctxgate.compression.economics import overhead, to_nano, warm_request
from ctxgate.compression.window import Compact, Terms, begin, compacted, decide, observed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ctxgate.compression.economics import Shape
    from ctxgate.compression.window import Conversation
    from ctxgate.inference.rates import Rates

    # Whether to compact before a request: the state, the terms and the growth that arrives with it.
    Policy = Callable[[Conversation, Terms, int], bool]

CHARACTERS_PER_TOKEN: Final = 4
TRIGGERS: Final = (60_000, 80_000, 100_000, 130_000, 170_000, 250_000)


@dataclass(frozen=True, slots=True)
class Step:
    """One request of a session: the tokens that are new in its prompt, and those of its answer."""

    growth: int
    output: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a session costs under a policy: an exact amount, and the requests before which it compacts."""

    policy: str
    amount: int
    cuts: tuple[int, ...]

    @property
    def nano(self) -> int:
        """The amount in nano-dollars, rounded half up."""
        return to_nano(self.amount)


def recorded_steps(messages: Iterable[Mapping[str, Any]]) -> tuple[Step, ...]:
    """The requests of a recorded session, one per assistant message.

    A request grows by a quarter of the characters of the messages since the one before, rounded up; the
    leading system message belongs to the prefix. Its output is what the run recorded, else estimated alike.
    """
    steps: list[Step] = []
    characters = 0
    for message in messages:
        role = message["role"]
        if role == "assistant":
            recorded = message.get("_recorded") or {}
            output = recorded.get("output")
            own = _characters(message)
            steps.append(Step(_tokens(characters), _tokens(own) if output is None else output))
            characters = own
        elif role != "system":
            characters += _characters(message)
    return tuple(steps)


def _tokens(characters: int) -> int:
    return -(-characters // CHARACTERS_PER_TOKEN)


def _characters(message: Mapping[str, Any]) -> int:
    """Characters of a message's content and of the names and arguments of its tool calls."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    parts += [call[field] for call in calls for field in ("name", "arguments")]
    return sum(map(len, parts))


def fixed(trigger: int) -> Policy:
    """Compact from a length of `trigger` tokens on."""
    return lambda state, _terms, arriving: state.tokens + arriving >= trigger


def never(_state: Conversation, _terms: Terms, _arriving: int) -> bool:
    """Let the conversation grow."""
    return False


def ski_rental(state: Conversation, terms: Terms, _arriving: int) -> bool:
    """Compact once the re-reads since the last base have cost as much as a compaction."""
    return state.spent >= overhead(terms.rates, terms.shape)


def shipped(state: Conversation, terms: Terms, arriving: int) -> bool:
    """The gateway's own rule: `window.decide`."""
    return isinstance(decide(state, terms, arriving), Compact)


def simulate(name: str, policy: Policy, steps: Sequence[Step], terms: Terms) -> Outcome:
    """Play a session under an online policy. Only the rates and the shape of `terms` cost anything."""
    rates, shape = terms.rates, terms.shape
    state = begin(shape)
    amount, cuts = 0, []
    for number, step in enumerate(steps):
        length = state.tokens + step.growth
        if length > shape.base and policy(state, terms, step.growth):
            amount += rates.cached * length + _cut(rates, shape, step)
            cuts.append(number)
            state = compacted(observed(state, terms, length), terms, shape.base)
        else:
            amount += warm_request(rates, length, step.growth, step.output)
            state = observed(state, terms, length)
    return Outcome(name, amount, tuple(cuts))


def _cut(rates: Rates, shape: Shape, step: Step) -> int:
    """What a compaction and the request after it cost, less reading the length there was."""
    call = rates.written * shape.instruction + rates.output * shape.summary_output + shape.damage
    after = rates.cached * shape.prefix + rates.written * (shape.summary + shape.tail)
    return call + after + rates.output * step.output


@dataclass(frozen=True, slots=True)
class _Line:
    """What continuing from one cut costs at request x: `slope * x + start`, apart from what all share."""

    slope: int
    start: int
    cuts: tuple[Any, ...]  # the cuts so far, as (last, (the one before, ...))

    def at(self, x: int) -> int:
        return self.slope * x + self.start


class _Lower:
    """The lower envelope of lines whose slopes never rise, asked at points that never fall."""

    def __init__(self, first: _Line) -> None:
        self._lines = deque([first])

    def add(self, line: _Line) -> None:
        lines = self._lines
        if lines and lines[-1].slope == line.slope:
            if lines[-1].start <= line.start:
                return
            lines.pop()
        while len(lines) >= 2 and _useless(lines[-2], lines[-1], line):
            lines.pop()
        lines.append(line)

    def best(self, x: int) -> _Line:
        lines = self._lines
        while len(lines) >= 2 and lines[1].at(x) <= lines[0].at(x):
            lines.popleft()
        return lines[0]


def _useless(first: _Line, middle: _Line, last: _Line) -> bool:
    """Whether `middle` is nowhere below both its neighbours."""
    return (last.start - first.start) * (first.slope - middle.slope) <= (middle.start - first.start) * (
        first.slope - last.slope
    )


def optimum(steps: Sequence[Step], terms: Terms) -> Outcome:
    """The cheapest schedule in hindsight of the same model.

    With G(i) the growth before request i, the length before it is B + G(i) - G(s+1) where s was the last
    cut. All that a cut s costs later requests is therefore linear in the number of requests, so the best
    last cut is found on a lower envelope of lines.
    """
    rates, shape = terms.rates, terms.shape
    grown = list(accumulate((step.growth for step in steps), initial=0))
    kept = accumulate(
        (
            warm_request(rates, grown[i] + step.growth, step.growth, step.output)
            for i, step in enumerate(steps)
        ),
        initial=0,
    )
    shared = list(kept)  # what requests before i cost, had the conversation begun empty
    start = rates.cached * shape.prefix
    lines = _Lower(_Line(start, start, ()))
    for i, step in enumerate(steps):
        if shape.prefix + grown[i + 1] <= shape.base:
            continue
        before = lines.best(i)
        total = before.at(i) + shared[i] + rates.cached * grown[i + 1] + _cut(rates, shape, step)
        slope = rates.cached * (shape.base - grown[i + 1])
        lines.add(_Line(slope, total - shared[i + 1] - slope * i, (i, before.cuts)))
    # A line counts the read of the next request's own length too; there is none after the last.
    last = len(steps) - 1
    best = lines.best(last)
    return Outcome("optimum", best.at(last) + shared[-1], _flat(best.cuts))


def _flat(cuts: tuple[Any, ...]) -> tuple[int, ...]:
    """The cuts of a line in order."""
    numbers: list[int] = []
    while cuts:
        number, cuts = cuts
        numbers.append(number)
    return tuple(reversed(numbers))


def compare(steps: Sequence[Step], terms: Terms, triggers: Sequence[int] = TRIGGERS) -> tuple[Outcome, ...]:
    """A session under every policy: fixed triggers, never, ski-rental, the shipped rule, the optimum."""
    policies: list[tuple[str, Policy]] = [(str(trigger), fixed(trigger)) for trigger in triggers]
    policies += [("never", never), ("ski-rental", ski_rental), ("shipped", shipped)]
    online = [simulate(name, policy, steps, terms) for name, policy in policies]
    return (*online, optimum(steps, terms))
