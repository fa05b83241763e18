"""What a recorded session loses when most of it is left out: of its prompt, and of what one recall brings.

Records of 4,000 tokens made without a model, the last 20,000 tokens kept; recall without embeddings.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from ctxgate.compression.identifiers import estimated_tokens
from ctxgate.compression.recall_index import RecallIndex, combined
from ctxgate.compression.recall_text import searchable
from ctxgate.compression.said import read_said
from ctxgate.compression.summary import carrier, framed
from ctxgate.compression.summary_record import RecordWork, record_of
from support.survival import future_need, plain_survival, prompt_text, rates, survival

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.survival import Recall

TRAJECTORIES: Final = Path(__file__).parents[3] / "shared" / "trajectories"
BUDGET: Final = 4_000
TAIL: Final = 20_000
LATER: Final = 120  # messages behind the cut whose needs are looked at
BEST: Final = 5

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not TRAJECTORIES.is_dir(), reason="the recorded sessions lie outside the repository"),
]


@lru_cache(1)
def session() -> list[bytes]:
    return (TRAJECTORIES / "coding-long-a.jsonl").read_bytes().splitlines()[1:]


def compacted(at: int) -> tuple[list[bytes], str]:
    """The messages that a compaction behind message `at` drops, and the text of the prompt it leaves."""
    lines = session()
    tail, start = 0, at + 1
    while tail + len(lines[start - 1]) // 4 <= TAIL:
        start -= 1
        tail += len(lines[start]) // 4
    dropped, kept = lines[2:start], [*lines[:2], *lines[start : at + 1]]
    record = record_of(RecordWork(dropped, kept, lines[1], BUDGET, sum(map(len, dropped))))
    assert record.text is not None
    assert estimated_tokens(framed(record.text)) <= BUDGET + 100  # the heading
    return dropped, prompt_text([*kept, carrier(record.text)])


def recall_over(messages: Sequence[bytes]) -> Recall:
    """The texts of the best windows for a question."""
    index, texts = RecallIndex(), {}
    for number, message in enumerate(messages):
        texts[str(number)] = searchable(read_said(message))
        index.add(str(number), texts[str(number)])

    def recall(question: str) -> str:
        scores = combined(index.look(question), None)
        best = [index.windows[at] for at in sorted(scores, key=lambda at: (-scores[at], at))[:BEST]]
        return "\n".join(texts[window.id][window.start : window.stop] for window in best)

    return recall


@pytest.mark.parametrize("at", [650])
def test_exact_strings_survive_in_the_prompt_or_come_back(at: int) -> None:
    dropped, prompt = compacted(at)
    recall = recall_over(dropped)
    found = survival(dropped, prompt, recall)
    assert found["rule"].total >= 5
    assert found["rule"].share_in_prompt == 1
    for kind, least in (("error", 0.9), ("path", 0.9), ("command", 0.9), ("number", 0.9), ("id", 0.9)):
        assert found[kind].share >= least, (kind, str(found[kind]), found[kind].lost)
    assert found["path"].share_in_prompt >= 0.5
    plain = plain_survival(dropped, prompt, recall)
    assert plain["rule"].share_in_prompt == 1
    # The session reports two errors that are told plainly: `test_survival_errors` is the judge of more.
    assert plain["error"].total == 2
    assert plain["error"].share == 1, plain["error"].lost
    for kind in ("path", "command"):
        assert plain[kind].total > 10
        assert plain[kind].share >= 0.9, (kind, str(plain[kind]), plain[kind].lost)


@pytest.mark.parametrize("at", [250, 450, 850])
def test_what_is_needed_later_is_in_the_prompt_or_comes_back(at: int) -> None:
    """Nearly all of it is in the prompt itself."""
    dropped, prompt = compacted(at)
    needed = [
        text for texts in future_need(dropped, session()[at + 1 : at + 1 + LATER]).values() for text in texts
    ]
    rate = rates({"needed": needed}, prompt, recall_over(dropped))["needed"]
    assert rate.total >= 20
    assert rate.share_in_prompt >= 0.9, rate.lost
    assert rate.share >= 0.95
