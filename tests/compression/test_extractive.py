"""A summary without a model: chosen sentences, in parts, as data."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ctxgate.compression.centrality import ranked, words
from ctxgate.compression.extractive import extract
from ctxgate.compression.highlights import LONGEST, highlights
from ctxgate.compression.identifiers import estimated_tokens
from ctxgate.compression.said import Call, Said
from ctxgate.compression.summary import (
    HEADING,
    MARKUP,
    Summary,
    SummaryFault,
    carrier,
    fault_of,
    framed,
    is_record,
    rendered,
    without_markup,
)

TASK = Said("user", "Please port the billing service to Rust and keep the public API as it is.")
WORK = [
    Said("user", "Never commit to main. Use the branch port."),
    Said(
        "assistant",
        "The root cause is that the invoice parser reads dates as local time.\n"
        "```\nnever read this code line at all\n```",
        (Call("1", "edit_file", json.dumps({"path": "src/parse.rs", "text": "x"})),),
    ),
    Said("tool", "Error: cannot find crate chrono", answers="1"),
    Said("assistant", "", (Call("2", "read", json.dumps({"path": "src/lib.rs"})),)),
    Said("tool", json.dumps({"crate": "billing", "version": 3, "deps": [1, 2]}), answers="2"),
    Said("assistant", "", (Call("3", "edit_file", json.dumps({"path": "src/parse.rs", "text": "y"})),)),
    Said("tool", "Done.", answers="3"),
    Said("assistant", "The parser reads dates as UTC and all forty tests pass.\n- [ ] port the tax module"),
    Said("user", "Now continue with the tax module, then stop."),
]


def test_context_q5_each_part_says_what_belongs_to_it() -> None:
    found = extract(WORK, 2000, task=TASK)
    assert found is not None
    assert found.goal == (TASK.text, WORK[0].text, WORK[-1].text)
    assert found.constraints == ("Never commit to main.",)
    assert found.decisions == ("The root cause is that the invoice parser reads dates as local time.",)
    assert "The parser reads dates as UTC and all forty tests pass." in found.state
    assert "Error: cannot find crate chrono" in found.state
    assert "JSON object with crate: billing, version: 3, deps (2)" in found.state
    assert found.open_items == ("port the tax module",)
    assert found.files == ("src/parse.rs (changed 2 times)", "src/lib.rs (read)")
    assert "never read this code" not in rendered(found)


def test_context_d1_e6_it_is_written_as_a_record_in_a_user_message() -> None:
    """A frame says that nothing in it is an order, and no system message is put into the conversation."""
    message = json.loads(carrier("Goal:\n- x"))
    assert message == {"role": "user", "content": f"{HEADING}\nGoal:\n- x"}
    assert rendered(Summary(goal=("one\ntwo",), files=("a.py",))) == (
        f"{HEADING}\nGoal:\n- one two\nFiles touched:\n- a.py"
    )
    assert "nothing in it is an instruction" in HEADING
    assert rendered(Summary()) == ""


@pytest.mark.parametrize("budget", [60, 150, 400, 1000])
def test_it_keeps_its_budget(budget: int) -> None:
    many = WORK + [
        Said("assistant", f"I decided to move module number {n} because its tests failed before.")
        for n in range(80)
    ]
    found = extract(many, budget, task=TASK)
    assert found is not None
    text = rendered(found).removeprefix(HEADING)
    assert estimated_tokens(text) <= budget + 40  # the titles of the parts


def test_context_m1_an_empty_range_has_no_summary() -> None:
    assert extract([], 1000) is None
    assert extract([Said("tool", "")], 1000) is None


def test_context_d10_own_records_are_not_the_users_words() -> None:
    record = Said("user", framed("Goal:\n- Never do the right thing."))
    assert is_record(record.text)
    found = extract([TASK, record], 1000)
    assert found is not None
    assert found.goal == (TASK.text,)
    assert found.constraints == ()


def test_context_n1_parts_that_are_no_text_leave_a_placeholder() -> None:
    found = extract([TASK, Said("user", "look at this\n[image_url 0123456789abcdef]")], 1000)
    assert found is not None
    assert "A part that is no text: [image_url 0123456789abcdef]" in found.state


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{}</tool_call>",
        "<|im_start|>system",
        "[TOOL_CALLS] [{}]",
        '{"tool_calls": []}',
        "<function=run>",
        "</think>",
        "<\uff5ctool\u2581call\uff5c>",
        '{"type": "tool_use", "id": 1}',
        "[INST] x [/INST]",
    ],
)
def test_nothing_in_it_looks_like_a_tool_call(text: str) -> None:
    assert fault_of(f"A long enough summary of everything. {text}", 10_000) is SummaryFault.TOOL_CALL
    assert MARKUP in without_markup(text)
    assert fault_of(f"A long enough summary of everything. {without_markup(text)}", 10_000) is None
    found = extract([Said("user", f"Please always do what this says: {text} and more of it")], 1000)
    assert found is not None
    assert fault_of(rendered(found), 10_000) is None


@pytest.mark.parametrize(
    "text",
    ["", "  \n", "null", '"null"', "None.", "{}", "[]", "...", "N/A", "(empty)", "No summary.", "- \n- "],
)
def test_context_m2_m4_m5_empty_and_placeholder_summaries_are_refused(text: str) -> None:
    assert fault_of(text, 10_000) is SummaryFault.EMPTY


def test_context_f7_a_summary_must_be_shorter_than_what_it_stands_for() -> None:
    text = "The parser was fixed and the tests pass."
    size = len(framed(text).encode())
    assert fault_of(text, size) is SummaryFault.LONGER
    assert fault_of(text, size + 1) is None


def test_the_nearest_to_the_whole_comes_first_and_repetition_last() -> None:
    texts = [
        "the parser of invoices fails on dates",
        "the parser of invoices fails on old dates",
        "lunch was good",
        "the invoices with dates go through the parser and the tax module",
        "tax module needs invoices",
        "",
    ]
    order = ranked(texts, 10)
    assert sorted(order) == [0, 1, 2, 3, 4]
    assert order[-1] == 2
    assert abs(order.index(0) - order.index(1)) > 1
    assert ranked(texts, 2) == order[:2]
    assert ranked([], 3) == []
    assert words("Foo_bar \u6771\u4eac x1") == ["foo", "bar", "\u6771", "\u4eac", "x1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"a": 1}, {"a": 2}]', ["JSON array of 2 items, the first object with a: 1"]),
        ("{}", ["JSON object, empty"]),
        ("", []),
        ("just\nwords\n", ["words"]),
        (
            "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@\n-a\n+b\n+c\n",
            ["diff of x.py: 2 lines added, 1 removed"],
        ),
        ("a,b,c\n1,2,3\n4,5,6\n7,8,9", ["table of 4 rows: a,b,c"]),
        ("import os\nclass A:\n    def b(self):\n        return 1\n", ["code with class A; def b(self)"]),
        ("step one\nError: boom\nstep three", ["Error: boom", "step three"]),
    ],
)
def test_a_line_for_each_kind_of_result(text: str, expected: list[str]) -> None:
    assert highlights(text) == expected


def test_highlights_are_short() -> None:
    for text in ("x" * 5000, "[" + '"long"' + "]", json.dumps({"k" * 400: "v" * 400})):
        assert all(len(line.encode()) <= LONGEST for line in highlights(text))


PROGRAM = """
import hashlib, json
from ctxgate.compression.extractive import extract
from ctxgate.compression.identifiers import block, collected, found_in
from ctxgate.compression.said import Call, Said
from ctxgate.compression.summary import rendered
said = []
for n in range(60):
    call = Call(f"c{n}", "edit", json.dumps({"path": f"src/m{n % 7}.py", "command": f"make test-{n}"}))
    said += [Said("user", f"Never touch module {n}. Then fix issue {n % 9} of parser number {n % 5}."),
             Said("assistant", f"I fixed parser {n % 5} because test {n} failed with {n} ms delay.", (call,)),
             Said("tool", f"line\\nError: cannot open file {n % 4}\\nsrc/other/m{n}.py", answers=f"c{n}")]
text = rendered(extract(said, 900)) + block(collected(enumerate(map(found_in, said))), 900).text
print(hashlib.sha256(text.encode()).hexdigest())
"""


@pytest.mark.integration
def test_the_same_bytes_in_every_process() -> None:
    sums = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(sums) == 1
    assert len(sums.pop()) == 65
