"""The incremental prompt count equals tokenizing the whole prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from ctxgate.gateway.replay_count import PromptCounter
from ctxgate.gateway.sessions import read_session
from ctxgate.inference.prompts import PromptRenderer

REPAIR = Path(__file__).parents[3] / "shared" / "trajectories" / "repair-a.jsonl"
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}


def grown(turns: int) -> list[dict[str, object]]:
    texts = [
        "plain words",
        "<|begin|>not a turn<|end|>",
        "  leading\n\n",
        "a<tool_call>b</tool_call>",
        "\u00e9\U0001f600",
    ]
    return [
        {"role": ("user", "assistant")[at % 2], "content": f"{texts[at % len(texts)]} {at // 7}"}
        for at in range(turns)
    ]


def test_pieces_add_up_to_the_whole_prompt_beyond_the_checked_ones() -> None:
    counter, whole = PromptCounter(), PromptRenderer()
    for turns in range(1, 24):
        messages = grown(turns)
        ids = counter(messages, [TOOL])
        assert ids is not None
        assert list(ids) == whole.encode(whole.chat_text(messages, [TOOL]))


def test_no_tools_are_rendered_as_no_tools() -> None:
    whole = PromptRenderer()
    ids = PromptCounter()(grown(1), [])
    assert ids is not None
    assert list(ids) == whole.encode(whole.chat_text(grown(1), None))


def test_a_conversation_that_a_text_model_refuses_has_no_count() -> None:
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    assert PromptCounter()([{"role": "user", "content": image}], []) is None


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no usable tokenizer and template"):
        PromptCounter(tmp_path)


@pytest.mark.skipif(not REPAIR.exists(), reason="the recorded sessions lie outside the repository")
@pytest.mark.integration
def test_a_recorded_session_counts_the_same_both_ways() -> None:
    counter, whole = PromptCounter(), PromptRenderer()
    for turn in read_session(REPAIR).turns():
        ids = counter(turn.messages, turn.tools)
        assert ids is not None
        assert list(ids) == whole.encode(whole.chat_text(turn.messages, turn.tools))
