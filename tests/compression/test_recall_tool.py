"""The tool by which a model asks for what left its prompt."""

from __future__ import annotations

import json

import pytest

from ctxgate.compression import recall_tool
from ctxgate.compression.recall_snippet import Snippet
from ctxgate.compression.recall_tool import NOTHING, TOOL, Wanted, offered, result, wanted
from ctxgate.compression.said import Call


def call(arguments: str) -> Call:
    return Call("call_1", recall_tool.NAME, arguments)


def test_the_tool_is_a_function_with_a_closed_schema() -> None:
    tool = json.loads(TOOL)
    assert (tool["type"], tool["function"]["name"]) == ("function", "context_recall")
    parameters = tool["function"]["parameters"]
    assert set(parameters["properties"]) == {"query", "count"}
    assert (parameters["required"], parameters["additionalProperties"]) == (["query"], False)


def test_a_clients_tool_of_that_name_stays_the_clients() -> None:
    assert offered([json.loads(TOOL)])
    assert not offered([{"type": "function", "function": {"name": "read"}}, 3, {"function": []}, None])
    assert not offered([])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"query": "port"}', Wanted("port", 5)),
        ('{"query": "port", "count": 2}', Wanted("port", 2)),
        ('{"query": "port", "count": 99, "more": 1}', Wanted("port", 10)),
        ('{"query": "port", "count": -3}', Wanted("port", 1)),
        (json.dumps({"query": "x" * 9_000}), Wanted("x" * 2_000, 5)),
    ],
)
def test_what_a_call_asks_for(arguments: str, expected: Wanted) -> None:
    assert wanted(call(arguments)) == expected


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("", "JSON"),
        ("{", "JSON"),
        ("[" * 100_000, "JSON"),
        ("[1]", "`query`"),
        ("{}", "`query`"),
        ('{"query": " "}', "`query`"),
        ('{"query": ["a"]}', "`query`"),
        ('{"query": "a", "count": "many"}', "`count`"),
        ('{"query": "a", "count": true}', "`count`"),
    ],
)
def test_what_is_wrong_is_told_to_the_model(arguments: str, named: str) -> None:
    problem = wanted(call(arguments))
    assert isinstance(problem, str)
    assert problem.startswith("Error: ")
    assert named in problem


@pytest.mark.parametrize(
    ("found", "text"),
    [(Snippet("passages", ("a",), 3), "passages"), (None, NOTHING), ("Error: no", "Error: no")],
)
def test_the_answer_is_a_tool_message_of_that_call(found: Snippet | str | None, text: str) -> None:
    assert json.loads(result("call_1", found)) == {"role": "tool", "tool_call_id": "call_1", "content": text}
