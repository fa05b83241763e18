"""The window that an engine's refusal names."""

from __future__ import annotations

import pytest

from ctxgate.compression.window_errors import Overflow, read_overflow

CONTEXT = "This model's maximum context length is 2048 tokens. However, your prompt contains "
TAIL = " input tokens, which exceeds this limit even without any output tokens. Please reduce the length."


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (CONTEXT + "5000" + TAIL, Overflow(2048, 5000)),
        (CONTEXT + "at least 2049" + TAIL, Overflow(2048, 2049, at_least=True)),
        (
            CONTEXT + "90000 characters (more than 32768 characters, which is the upper bound for 2048 input "
            "tokens). Please reduce the length of the input prompt.",
            Overflow(2048),
        ),
        (
            "The decoder prompt (length 2048) plus the number of requested output tokens (at least 1) is "
            "longer than the maximum model length of 2048. Make sure that `max_model_len` is no smaller.",
            Overflow(2048, 2048),
        ),
        (
            "The decoder prompt (length 3001) is longer than the maximum model length of 2048. Make sure.",
            Overflow(2048, 3001),
        ),
        (
            "max_tokens=5000 cannot be greater than max_model_len=2048. Please request fewer output tokens.",
            Overflow(2048, refused_output=True),
        ),
        (
            "max_completion_tokens=5000 cannot be greater than max_model_len=2048. Please request fewer.",
            Overflow(2048, refused_output=True),
        ),
        (
            "This model's maximum context length is 128000 tokens. However, your messages resulted in 130001 "
            "tokens. Please reduce the length of the messages.",
            Overflow(128000, 130001),
        ),
        (
            "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens (8000 in "
            "the messages, 1000 in the completion).",
            Overflow(8192, 8000, refused_output=True),
        ),
        (
            "This model's maximum context length is 8192 tokens. However, you requested 9500 tokens (8500 in "
            "your prompt; 1000 for the completion).",
            Overflow(8192, 8500),
        ),
        (f"Upstream: {CONTEXT}5000{TAIL} (parameter=input_tokens, value=5000)", Overflow(2048, 5000)),
    ],
)
def test_each_text_tells_its_window(message: str, expected: Overflow) -> None:
    assert read_overflow(message) == expected


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        (Overflow(8, 9), True),
        (Overflow(8), True),
        (Overflow(8, refused_output=True), False),
        (Overflow(8, 6, refused_output=True), True),
    ],
)
def test_a_shorter_prompt_helps_unless_the_output_alone_is_too_long(found: Overflow, answer: bool) -> None:
    assert found.of_prompt is answer


@pytest.mark.parametrize(
    "message",
    [
        "",
        "The model `x` does not exist.",
        "The encoder prompt (length 900) is longer than the maximum model length of 800. Make sure.",
        "This model's maximum context length is 0 tokens.",
        "This model's maximum context length is 99999999999999999999 tokens.",
        "x" * 2000 + CONTEXT + "5000" + TAIL,  # what stands so far behind is what the client sent
        "The engine is currently busy and cannot accept new requests.",
    ],
)
def test_other_texts_tell_nothing(message: str) -> None:
    assert read_overflow(message) is None


@pytest.mark.integration
def test_the_twin_says_what_the_parser_reads() -> None:
    from ctxgate.inference.prompts import PromptRenderer
    from ctxgate.inference.twin_intake import Intake
    from ctxgate.inference.twin_requests import Refusal

    intake = Intake(PromptRenderer(), 64)
    with pytest.raises(Refusal) as refusal:
        intake.limit(65, 3)
    assert read_overflow(str(refusal.value)) == Overflow(64, refused_output=True)
    with pytest.raises(Refusal) as refusal:
        intake._known([1] * 70)
    assert read_overflow(str(refusal.value)) == Overflow(64, 70)
    with pytest.raises(Refusal) as refusal:
        intake._encode("window " * 100)
    assert read_overflow(str(refusal.value)) == Overflow(64, 65, at_least=True)
    with pytest.raises(Refusal) as refusal:
        intake._encode("x" * 100_000)
    assert read_overflow(str(refusal.value)) == Overflow(64)
