"""What of a message is no text, and what it counts as."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ctxgate.inference.media import IMAGE_TOKENS, LOW_IMAGE_TOKENS, media_in

PIXELS = "iVBORw0KGgo/" * 25_000  # 300,000 characters of base64
DATA_URL = f"data:image/png;base64,{PIXELS}"


def tokens(message: Any) -> list[int]:
    return [each.tokens for each in media_in(json.dumps(message, separators=(",", ":")).encode())]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "image_url", "image_url": {"url": DATA_URL}}, IMAGE_TOKENS),
        ({"type": "image_url", "image_url": {"url": DATA_URL, "detail": "low"}}, LOW_IMAGE_TOKENS),
        ({"type": "image_url", "image_url": {"url": DATA_URL, "detail": "high"}}, IMAGE_TOKENS),
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, IMAGE_TOKENS),
        ({"image_url": "https://example.com/a.png"}, IMAGE_TOKENS),
        ({"type": "input_image", "image_url": DATA_URL}, IMAGE_TOKENS),
        ({"type": "input_audio", "input_audio": {"data": PIXELS, "format": "wav"}}, 300),
        ({"type": "input_audio", "input_audio": {"data": "aaaa", "format": "wav"}}, 100),
        ({"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}, 1000),
        ({"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{PIXELS * 100}"}}, 20_000),
        ({"type": "file", "file": {"file_data": PIXELS}}, 1000),
    ],
)
def test_a_part_counts_by_its_kind_within_bounds(part: dict[str, Any], expected: int) -> None:
    text = {"type": "text", "text": "Look."}
    assert tokens({"role": "user", "content": [text, part]}) == [expected]
    assert tokens({"role": "user", "content": [part, text, part]}) == [expected, expected]


@pytest.mark.parametrize(
    "member",
    [
        {"files": [{"name": "a.png", "content": PIXELS}]},
        {"files": [{"url": DATA_URL}]},
        {"result": {"artifacts": {"shot": {"data": PIXELS}}}},
        {"content": [{"type": "tool_result", "content": [{"source": {"data": PIXELS}}]}]},
    ],
)
def test_context_g2_a_picture_is_found_in_whatever_member_it_is(member: dict[str, Any]) -> None:
    message = {"role": "tool", "tool_call_id": "a", "content": "Done.", **member}
    assert tokens(message) == [IMAGE_TOKENS]
    escaped = json.dumps(message).replace("/", "\\/").encode()
    assert [each.tokens for each in media_in(escaped)] == [IMAGE_TOKENS]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": DATA_URL},  # an engine reads it as text
        {"role": "user", "content": [{"type": "text", "text": DATA_URL}, PIXELS, 3, None]},
        {"role": "user", "content": [{"text": PIXELS, "image_url": None}]},
        {"role": "assistant", "reasoning_content": PIXELS},
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": PIXELS}}]},
        {"role": "user", "content": "a", "note": "short", "ids": ["ab" * 100]},
        {"role": "user", "content": "a", "note": "many words of text " * 1000},
        [PIXELS],
        PIXELS,
    ],
)
def test_text_stays_text_whatever_it_looks_like(message: Any) -> None:
    assert tokens(message) == []


@pytest.mark.parametrize("raw", [b"", b"{", b'{"files": [1,', b'{"content": "\\ud800"}'])
def test_what_cannot_be_read_is_text(raw: bytes) -> None:
    assert media_in(raw) == []


def test_strings_that_are_nested_too_deeply_count_as_text() -> None:
    def nested(depth: int) -> dict[str, Any]:
        value: Any = PIXELS
        for _ in range(depth):
            value = [value]
        return {"role": "tool", "content": "a", "files": value}

    assert tokens(nested(8)) == [IMAGE_TOKENS]
    assert tokens(nested(9)) == []
