"""The context section of a team, and what a model says of its window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from config_texts import FOLDER, VALID, edited, read_text, shown
from ctxgate.gateway.config import Context
from ctxgate.gateway.context_level import Mode, mode_of
from ctxgate.gateway.errors import Refused

if TYPE_CHECKING:
    from ctxgate.gateway.config import Model


def text(context: str) -> str:
    return edited("{organisation: acme}", f"{{organisation: acme, context: {context}}}")


def context(written: str) -> Context:
    return read_text(text(written)).config.teams["research"].context


def model(written: str) -> Model:
    return read_text(
        edited("tiny: {pools: [standard]", f"tiny: {{pools: [standard], {written}")
    ).config.models["tiny"]


def test_a_mode_may_stand_alone_or_in_a_section() -> None:
    for mode in Mode:
        assert context(mode).compaction == context(f"{{compaction: {mode}}}").compaction == mode
    assert context("{}") == read_text(VALID).config.teams["research"].context == Context()


def test_every_field_is_read() -> None:
    found = context(
        "{compaction: window, summarizer: extractive, tail_tokens: 1, summary_tokens: 200, tool_results: on, "
        "tool_result_bytes: 2048, recall: off, recall_tokens: 100, sticky_tools: [todo], recall_tool: on}"
    )
    assert found == Context("window", "extractive", 1, 200, True, 2048, False, 100, frozenset({"todo"}), True)


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("{compaction: 80}", 'compaction: must be "off" or "window" or "auto", but is a number'),
        ("{compaction: on}", "compaction: must be"),
        ("{summary_tokens: 10}", "summary_tokens: must be a whole number from 200"),
        ("{tool_results: true}", 'tool_results: must be "off" or "on"'),
        ("{sticky_tools: todo}", "sticky_tools: must be a list"),
        ("{tail: 3}", "tail: is not a known field"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(written: str, problem: str) -> None:
    assert any(f"teams.research.context.{problem}" in each for each in shown(text(written)))


def test_a_model_may_state_its_window_and_its_tokenizer() -> None:
    assert model("window: 32768").window == 32_768
    assert read_text(VALID).config.models["tiny"].window is None
    named, filed = model("tokenizer: {tiktoken: o200k_base}"), model("tokenizer: {file: q/tokenizer.json}")
    assert named.tokenizer is not None
    assert filed.tokenizer is not None
    assert (named.tokenizer.tiktoken, named.tokenizer.file) == ("o200k_base", None)
    assert (filed.tokenizer.tiktoken, filed.tokenizer.file) == (None, FOLDER / "q/tokenizer.json")


def test_a_model_may_name_the_result_of_its_recall_probe() -> None:
    assert model("recall_probe: found/recall.json").recall_probe == FOLDER / "found/recall.json"
    assert read_text(VALID).config.models["tiny"].recall_probe is None


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("window: 0", "window: must be a whole number from 1024"),
        ("tokenizer: {}", "tokenizer: must give tiktoken or file"),
        ("tokenizer: {tiktoken: a, file: b}", "tokenizer: gives tiktoken and file"),
    ],
)
def test_a_wrong_window_or_tokenizer_is_refused(written: str, problem: str) -> None:
    broken = edited("tiny: {pools: [standard]", f"tiny: {{pools: [standard], {written}")
    assert any(f"models.tiny.{problem}" in each for each in shown(broken))


class Asking:
    """An inbound request as far as its mode goes."""

    def __init__(self, mode: str | None) -> None:
        self.headers = {} if mode is None else {"x-ctxgate-compaction": mode}


@pytest.mark.parametrize("allowed", Mode)
@pytest.mark.parametrize("asked", [None, *Mode, "always"])
def test_a_request_may_only_ask_for_less(allowed: Mode, asked: str | None) -> None:
    config = read_text(text(allowed)).config
    inbound: Any = Asking(asked)
    order = ["off", "window", "auto"]
    if asked == "always" or (asked is not None and order.index(asked) > order.index(allowed)):
        with pytest.raises(Refused) as refused:
            mode_of(inbound, config.keys[0], config)
        assert refused.value.param == "x-ctxgate-compaction"
        return
    assert mode_of(inbound, config.keys[0], config) == (asked or allowed)
