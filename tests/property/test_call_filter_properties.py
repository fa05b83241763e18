"""However an answer's calls come in pieces, its client gets those of other tools, and the gateway its own."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ctxgate.inference.call_filter import CallFilter
from support.hearing import spoken_in
from support.upstream import event_bytes

TOOL = "context_recall"
NAMES = st.sampled_from([TOOL, "read", "context_recaller", "context", "c"])
CALLS = st.lists(st.tuples(NAMES, st.text('{}"a:\\é ', max_size=12)), max_size=5)


def pieces(text: str, cuts: list[int]) -> list[str]:
    at = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:stop] for start, stop in pairwise(at)]


@given(CALLS, st.data())
def test_a_stream_without_the_tools_calls_is_what_is_left(
    calls: list[tuple[str, str]], data: st.DataObject
) -> None:
    queues: list[list[dict[str, Any]]] = []
    for index, (name, arguments) in enumerate(calls):
        begins = {"index": index, "id": f"id{index}", "function": {"name": name, "arguments": ""}}
        cuts = data.draw(st.lists(st.integers(0, 20), max_size=3))
        rest = [{"index": index, "function": {"arguments": piece}} for piece in pieces(arguments, cuts)]
        queues.append([begins, *rest])
    parts: list[dict[str, Any]] = []
    last = -1
    while any(queues):  # calls begin in their order; what follows may be interleaved
        open_ = [at for at, queue in enumerate(queues) if queue and at <= last + 1]
        at = data.draw(st.sampled_from(open_))
        last = max(last, at)
        parts.append(queues[at].pop(0))
    events = [event_bytes({"choices": [{"index": 0, "delta": {"content": "t"}, "finish_reason": None}]})]
    while parts:
        count = data.draw(st.integers(1, len(parts)))
        delta = {"tool_calls": parts[:count]}
        parts = parts[count:]
        events.append(event_bytes({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}))
    events.append(event_bytes({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}))

    passing = CallFilter(TOOL)
    out = b""
    while events:
        count = data.draw(st.integers(1, len(events)))
        out += passing.take(b"".join(events[:count]))
        events = events[count:]
    said = spoken_in(out)
    assert said.text == "t"
    own = [(index, arguments) for index, (name, arguments) in enumerate(calls) if name == TOOL]
    assert [(f"id{each.place}", each.arguments) for each in sorted(passing.own, key=lambda c: c.place)] == [
        (f"id{index}", arguments) for index, arguments in own
    ]
    assert sorted(said.calls) == sorted(each for each in calls if each[0] != TOOL)
    assert passing.goes_on is (bool(own) and len(own) == len(calls))
    assert TOOL.encode() + b'"' not in out
