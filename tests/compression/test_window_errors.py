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
            Overflow(2048, characters=90000),
        ),
        (
            "This model's maximum context length is 20000 tokens. However, you requested 19900 output tokens "
            "and your prompt contains at least 4900 input tokens, for a total of at least 24800 tokens.",
            Overflow(20000, 4900, at_least=True, refused_output=True, output=19900),
        ),
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 900. This model's maximum context length "
            "is 1000 tokens and your request has 200 input tokens (900 > 1000 - 200).",
            Overflow(1000, 200, refused_output=True, output=900),
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
            Overflow(2048, refused_output=True, output=5000),
        ),
        (
            "max_completion_tokens=5000 cannot be greater than max_model_len=2048. Please request fewer.",
            Overflow(2048, refused_output=True, output=5000),
        ),
        (
            "This model's maximum context length is 128000 tokens. However, your messages resulted in 130001 "
            "tokens. Please reduce the length of the messages.",
            Overflow(128000, 130001),
        ),
        (
            "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens (8000 in "
            "the messages, 1000 in the completion).",
            Overflow(8192, 8000, refused_output=True, output=1000),
        ),
        (
            "This model's maximum context length is 8192 tokens. However, you requested 9500 tokens (8500 in "
            "your prompt; 1000 for the completion).",
            Overflow(8192, 8500, output=1000),
        ),
        (
            "This model's maximum context length is 8 tokens. However, you requested 1e+30 output tokens and "
            "your prompt contains 9 input tokens",
            Overflow(8),
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
        (Overflow(8, 6, refused_output=True, output=7), True),
        (Overflow(8, 6, refused_output=True, output=8), False),
        (Overflow(8, 9, output=8), False),
    ],
)
def test_a_shorter_prompt_helps_unless_the_output_alone_is_too_long(found: Overflow, answer: bool) -> None:
    assert found.of_prompt is answer


@pytest.mark.parametrize(
    ("found", "tokens", "output", "size", "answer"),
    [
        (Overflow(1000, 1100), 1100, None, 4000, True),
        (Overflow(1000, 1100), 275, 5, 4000, True),  # an estimate of unknown text
        (Overflow(1000, 1100), 274, 5, 4000, False),
        (Overflow(1000, 1100), 4401, 5, 4000, False),
        (Overflow(1000, 900), 900, 5, 4000, False),  # it would have fitted
        (Overflow(1000, 900, output=100), 900, 100, 4000, True),
        (Overflow(1000, 900, output=100), 900, None, 4000, True),
        (Overflow(1000, 900, output=100), 900, 99, 4000, False),
        (Overflow(1000, 1001, at_least=True), 99_000, 5, 400_000, True),
        (Overflow(1000, 1001, at_least=True), 250, 5, 400_000, False),
        (Overflow(1000, characters=50_000), 12_000, 5, 50_500, True),
        (Overflow(1000, characters=50_000), 12_000, 5, 20_000, False),
        (Overflow(1000, characters=900), 12_000, 5, 50_000, False),
        (Overflow(1000), 1100, 5, 4000, False),
        (Overflow(1), 100, None, 4000, False),
    ],
)
def test_what_a_refusal_says_must_agree_with_the_request(
    found: Overflow, tokens: int, output: int | None, size: int, answer: bool
) -> None:
    assert found.agrees(tokens, output, size) is answer


@pytest.mark.parametrize(
    "message",
    [
        "",
        "The model `x` does not exist.",
        "The encoder prompt (length 900) is longer than the maximum model length of 800. Make sure.",
        "This model's maximum context length is 0 tokens.",
        "This model's maximum context length is 99999999999999999999 tokens.",
        "1 validation error: {'loc': ('body', 'messages', 0, 'role'), 'input': 'x " + CONTEXT + "5000" + TAIL,
        "The model `" + CONTEXT + "5000" + TAIL + "` does not exist.",
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
    assert read_overflow(str(refusal.value)) == Overflow(64, refused_output=True, output=65)
    with pytest.raises(Refusal) as refusal:
        intake._known([1] * 70)
    assert read_overflow(str(refusal.value)) == Overflow(64, 70)
    with pytest.raises(Refusal) as refusal:
        intake._encode("window " * 100)
    assert read_overflow(str(refusal.value)) == Overflow(64, 65, at_least=True)
    with pytest.raises(Refusal) as refusal:
        intake._encode("x" * 100_000)
    assert read_overflow(str(refusal.value)) == Overflow(64, characters=100_000)
