"""Errors in long logs of many tools, each known by its place, after most of the conversation was left out.

The recorded sessions hold too few reports of errors to judge by: here every round holds one, written as the
tool of that round prints it.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Final

import pytest

from ctxgate.compression.recall_index import RecallIndex, combined
from ctxgate.compression.recall_text import searchable
from ctxgate.compression.said import read_said
from ctxgate.compression.summary import carrier
from ctxgate.compression.summary_record import RecordWork, record_of
from support.survival import prompt_text, rates

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUNDS: Final = 160
KEPT: Final = 8  # rounds at the end
BUDGET: Final = 4_000
BEST: Final = 5
FORMS: Final = (
    "AssertionError: assert {n} == {m} in test_{w}",
    "src/{w}.ts({n},{d}): error TS{c}: Property '{w}{d}' does not exist on type '{w}Props'.",
    "error[E0{d}{d}{d}]: cannot find value `{w}_{n}` in this scope",
    "src/{w}.c:{n}:{d}: error: use of undeclared identifier '{w}_{m}'",
    "npm ERR! missing script: build-{w}-{n}",
    "bash: line {d}: {w}ctl{n}: command not found",
    "java.lang.IllegalStateException: {w} pool {n} is closed",
    "panic: runtime error: index out of range [{n}] with length {m}",
    "make: *** [Makefile:{n}: {w}] Error {d}",
    "cat: /srv/{w}/part-{n}.json: No such file or directory",
    "FAILED tests/test_{w}.py::test_{w}_{n} - ValueError: {m}",
    "fatal: unable to access 'https://git.example/{w}-{n}.git/': Could not resolve host",
    "ERROR {w}.worker: job {n} failed after {d} tries",
    "Process exited with code {d}, while running {w}-{n}",
)
# Never looked at when the definition of an error line was written.
HELD_OUT: Final = (
    "ModuleNotFoundError: No module named '{w}_{n}'",
    "{w}/main.swift:{n}:{d}: error: cannot convert value of type '{w}{m}'",
    "pytest: error: unrecognized arguments: --{w}-{n}",
    "terraform: Error: Invalid reference in {w}.tf line {n}",
    "FAILURE: Build failed with an exception in :{w}:{n}",
    "e: file:///srv/{w}/Main.kt:{n}:{d} Unresolved reference: {w}{m}",
    "[2026-03-04 05:06:07] production.ERROR: {w} {n} has no owner",
    "AttributeError: '{w}' object has no attribute 'part_{n}'",
    "ld: symbol(s) not found for architecture arm64: _{w}_{n}",
    "curl: (22) The requested URL returned error: 404 for /{w}/{n}",
    "{w}.service: Failed with result 'exit-code' after {n} ms",
    "Unhandled promise rejection: {w} {n} closed early",
    "sh: {d}: {w}-{n}: not found",
    "mysqldump: Got error: {c}: Access denied for user '{w}{n}'",
    "System.InvalidOperationException: {w} {n} has no elements",
    "OSError: [Errno 28] No space left on device: '/var/{w}/{n}'",
)
WORDS: Final = (
    "billing",
    "router",
    "ledger",
    "parser",
    "mirror",
    "search",
    "invoice",
    "session",
    "cache",
    "token",
)


def conversation(seed: int, forms: Sequence[str]) -> tuple[list[bytes], list[str]]:
    """Messages, and the error of each round in order."""
    chance = random.Random(seed)
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "Repair the build."},
    ]
    errors: list[str] = []
    for number in range(ROUNDS):
        word, form = chance.choice(WORDS), forms[number % len(forms)]
        figures = {"n": chance.randrange(100, 10_000), "m": chance.randrange(100, 10_000)}
        error = form.format(w=word, d=chance.randrange(1, 9), c=chance.randrange(2000, 9000), **figures)
        lines = [f"{chance.choice(WORDS)} step {chance.randrange(10**5)} done in {at} ms" for at in range(60)]
        lines.insert(chance.randrange(5, 55), error)
        errors.append(error)
        function = {"name": "bash", "arguments": json.dumps({"command": f"make {word}-{number}"})}
        call = {"id": f"c{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": "\n".join(lines)})
    return [json.dumps(each).encode() for each in messages], errors


@pytest.mark.integration
@pytest.mark.parametrize("seed", [1, 2, 77])
@pytest.mark.parametrize("forms", [FORMS, HELD_OUT], ids=["known", "held-out"])
def test_errors_of_any_tool_are_in_the_prompt_or_come_back(seed: int, forms: Sequence[str]) -> None:
    messages, errors = conversation(seed, forms)
    start = len(messages) - 2 * KEPT
    dropped, kept = messages[2:start], [*messages[:2], *messages[start:]]
    record = record_of(RecordWork(dropped, kept, messages[1], BUDGET, sum(map(len, dropped))))
    assert record.text is not None
    index, texts = RecallIndex(), {}
    for number, message in enumerate(dropped):
        texts[str(number)] = searchable(read_said(message))
        index.add(str(number), texts[str(number)])

    def recall(question: str) -> str:
        scores = combined(index.look(question), None)
        best = sorted(scores, key=lambda at: (-scores[at], at))[:BEST]
        windows = [index.windows[at] for at in best]
        return "\n".join(texts[window.id][window.start : window.stop] for window in windows)

    prompt = prompt_text([*kept, carrier(record.text)])
    rate = rates({"error": errors[: ROUNDS - KEPT]}, prompt, recall)["error"]
    assert rate.total >= 150
    assert rate.in_prompt >= 50
    assert rate.share >= 0.9, (str(rate), rate.lost)
