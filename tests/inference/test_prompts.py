"""Prompts as vLLM renders them: what happens to messages, tools and tokens on the way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ctxgate.inference.chat_messages import PromptError, conversation, tool_schema
from ctxgate.inference.prompts import TINY, PromptRenderer, compile_template

RENDERER = PromptRenderer()


def turns(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return conversation(messages, "tiny")


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "ls", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def test_a_whole_conversation() -> None:
    text = RENDERER.chat_text(
        [
            {"role": "system", "content": "Be brief."},
            user("list"),
            call('{"path":  "x<y"}'),
            {"role": "tool", "tool_call_id": "c", "content": "a.py"},
        ],
        [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}],
    )
    assert text == (
        "<|begin|>system\nBe brief.\n\nTools, one JSON schema per line:\n"
        '{"type": "function", "function": {"name": "ls", "description": null, '
        '"parameters": {"type": "object"}}}\n'
        'A call is <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>.<|end|>\n'
        "<|begin|>user\nlist<|end|>\n"
        '<|begin|>assistant\n<tool_call>{"name": "ls", "arguments": {"path": "x<y"}}</tool_call><|end|>\n'
        "<|begin|>tool\na.py<|end|>\n"
        "<|begin|>assistant\n"
    )


def test_without_a_system_message_or_tools_there_is_no_head() -> None:
    assert RENDERER.chat_text([user("hi")]) == "<|begin|>user\nhi<|end|>\n<|begin|>assistant\n"


def test_the_prompt_of_a_turn_is_a_prefix_of_the_next() -> None:
    history = [user("one"), {"role": "assistant", "content": "two"}, user("three")]
    first = RENDERER.chat_text(history[:1])
    assert RENDERER.chat_text(history).startswith(first + "two<|end|>\n")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        (None, ""),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": ""}, "b"], "a\nb"),
        ([{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "no"}], "a\nno"),
        ([{"type": "thinking", "thinking": "hm", "closed": True}], "hm"),
    ],
)
def test_content_becomes_text(content: Any, text: str) -> None:
    assert turns(user(content)) == [{"role": "user", "content": text}]


def test_missing_content_is_empty() -> None:
    assert turns({"role": "user"}) == [{"role": "user", "content": ""}]


def test_images_are_refused() -> None:
    with pytest.raises(PromptError, match="tiny is not a multimodal model"):
        turns(user([{"type": "image_url", "image_url": {"url": "x"}}]))


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ('{"b": 1,   "a": 2}', {"b": 1, "a": 2}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("{broken", {}),
        ("[1]", {}),
        ("null", {}),
    ],
)
def test_tool_call_arguments_become_an_object(arguments: Any, parsed: dict[str, Any]) -> None:
    (turn,) = turns(call(arguments))
    assert turn["tool_calls"][0]["function"]["arguments"] == parsed
    assert list(turn["tool_calls"][0]["function"]["arguments"]) == list(parsed)  # key order is kept


def test_the_clients_message_is_left_as_it_was() -> None:
    message = call('{"a": 1}')
    before = json.dumps(message)
    turns(message)
    assert json.dumps(message) == before


def test_no_tool_calls_is_no_member() -> None:
    assert "tool_calls" not in turns({"role": "assistant", "content": "x", "tool_calls": []})[0]


@pytest.mark.parametrize("bad", ["text", {"type": "custom", "function": {}}, {"type": "function"}])
def test_odd_tool_calls_are_refused(bad: Any) -> None:
    with pytest.raises(PromptError) as caught:
        turns({"role": "assistant", "tool_calls": [bad]})
    assert caught.value.param == "tool_calls"


def test_developer_messages_join_the_system_message_at_the_front() -> None:
    given = [
        {"role": "developer", "content": "first"},
        user("hi"),
        {"role": "system", "content": ""},
        {"role": "developer", "content": "second"},
    ]
    assert turns(*given) == [
        {"role": "system", "content": "first\n\nsecond"},
        {"role": "user", "content": "hi"},
    ]


def test_a_developer_message_alone_at_the_front_becomes_system() -> None:
    assert turns({"role": "developer", "content": "x", "name": "ops"}, user("hi"))[0] == {
        "role": "system",
        "content": "x",
        "name": "ops",
    }


def test_system_messages_without_a_developer_stay_where_they_are() -> None:
    roles = [turn["role"] for turn in turns(user("a"), {"role": "system", "content": "b"})]
    assert roles == ["user", "system"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("x-anthropic-billing-header: cch=1\nBe brief.", "Be brief."),
        ("x-anthropic-billing-header: cch=1", ""),
        ("Be brief.\nx-anthropic-billing-header: 1", "Be brief.\nx-anthropic-billing-header: 1"),
    ],
)
def test_the_billing_header_is_dropped_from_system_text(content: str, text: str) -> None:
    assert turns({"role": "system", "content": content})[0]["content"] == text


@pytest.mark.parametrize(
    ("tool", "rendered"),
    [
        (
            {"function": {"parameters": {"z": 1, "a": 2}, "name": "f"}, "type": "function"},
            '{"type": "function", "function": {"name": "f", "description": null, "parameters": '
            '{"z": 1, "a": 2}}}',
        ),
        (
            {"type": "function", "function": {"name": "f", "strict": True, "extra": 1, "description": "d"}},
            '{"type": "function", "function": {"name": "f", "description": "d", "parameters": null, '
            '"strict": true}}',
        ),
        (
            {"type": "function", "function": {"name": "f"}, "defer_loading": False, "cache_control": {}},
            '{"type": "function", "function": {"name": "f", "description": null, "parameters": null, '
            '"defer_loading": false}, "defer_loading": false}',
        ),
    ],
)
def test_tool_wrappers_are_normalised_and_schemas_kept(tool: dict[str, Any], rendered: str) -> None:
    assert json.dumps(tool_schema(tool)) == rendered


def test_an_empty_conversation_is_refused() -> None:
    with pytest.raises(PromptError, match="empty conversation"):
        RENDERER.chat_text([])


def test_a_final_message_can_be_continued() -> None:
    history = [user("a"), {"role": "assistant", "content": "The answer"}]
    text = RENDERER.chat_text(history, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|begin|>user\na<|end|>\n<|begin|>assistant\nThe answer"


def test_what_a_template_raises_is_a_refusal() -> None:
    template = compile_template("{{ raise_exception('only two roles') }}")
    renderer = PromptRenderer()
    renderer.__dict__["_template"] = template
    with pytest.raises(PromptError, match="only two roles"):
        renderer.chat_text([user("a")])


def test_templates_run_in_a_sandbox() -> None:
    renderer = PromptRenderer()
    renderer.__dict__["_template"] = compile_template("{{ messages.__class__.__mro__ }}")
    with pytest.raises(PromptError, match="unsafe"):
        renderer.chat_text([user("a")])


@pytest.mark.parametrize("text", ["hello", "def f(x):\n    return x\n", "漢字 é 🙂", "\x00\x1f", " \n\t "])
def test_any_text_survives_its_tokens(text: str) -> None:
    assert RENDERER.decode(RENDERER.encode(text)) == text


def test_marks_of_the_template_are_single_tokens_and_special() -> None:
    begin, end = RENDERER.encode("<|begin|><|end|>")
    assert [RENDERER.tokenizer.id_to_token(token) for token in (begin, end)] == ["<|begin|>", "<|end|>"]
    assert RENDERER.decode([begin, end]) == ""
    assert RENDERER.decode([begin, end], skip_special=False) == "<|begin|><|end|>"
    assert RENDERER.end == end


def test_words_of_answers_decode_one_by_one() -> None:
    words = RENDERER.printable_words()
    assert len(words) > 50
    assert "".join(RENDERER.decode([word]) for word in words) == RENDERER.decode(words)


def test_the_model_folder_agrees_with_itself() -> None:
    config = json.loads((TINY / "config.json").read_text())
    generation = json.loads((TINY / "generation_config.json").read_text())
    assert config["vocab_size"] == RENDERER.tokenizer.get_vocab_size()
    assert config["eos_token_id"] == generation["eos_token_id"] == RENDERER.end
    assert config["max_position_embeddings"] >= 131072
    assert config["head_dim"] >= 32  # what the CPU engine's attention kernels take


def test_an_end_token_outside_the_vocabulary_is_an_error(tmp_path: Any) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<none>"}')
    with pytest.raises(ValueError, match="not in the vocabulary"):
        _ = PromptRenderer(tmp_path).end
