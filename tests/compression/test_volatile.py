"""The detector of volatile text: what it finds, what it leaves alone, and that its cost is bounded."""

from __future__ import annotations

import re
from re import _constants as ops  # type: ignore[attr-defined]  # the parsed pattern is CPython's own
from re import _parser as parser  # type: ignore[attr-defined]  # as above
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ctxgate.compression import volatile_context, volatile_patterns
from ctxgate.compression.volatile import VolatileKind, find_volatile, masked

if TYPE_CHECKING:
    from collections.abc import Iterator

HEX40 = "9fceb02d0ae598e95dc970b74767f19372d61af8"
HEX64 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

# The volatile text stands between the marks.
POSITIVE = [
    ("clock", "Current time: «2026-01-05T09:00:00Z»"),
    ("clock", "Current time: «2026-01-05 09:00:00.123456+02:00»."),
    ("clock", "The current time is «2024-05-15 15:00:00 EST»."),
    ("clock", "now=«2026-01-05T09:00:00.123Z», zone=UTC"),
    ("clock", "It is «Monday, January 5, 2026 at 9:41 AM»."),
    ("clock", "Session started «5 January 2026, 09:41»"),
    ("clock", "Date: «Mon, 05 Jan 2026 09:00:00 GMT»"),
    ("clock", "$ date\n«Mon Jan  5 09:00:00 UTC 2026»\n"),
    ("clock", "Current time: «9:41 AM»"),
    ("clock", "The time is «14:03:22»."),
    ("clock", "<current_time>«14:03 UTC»</current_time>"),
    ("clock", "- Time: «14:03»"),
    ("clock", "Current date and time (UTC): «2026/01/05 09:00»"),
    ("clock", "Working folder: /srv/runs/«2026-01-05_09-00-00»/out"),
    ("clock", "Log file: build-«20260105T090000Z».log"),
    ("clock", "Last updated «01/05/2026 09:00:01»"),
    ("clock", 'x-state: {"now": "«2026-01-05T09:00»"}'),
    ("date", "Today's date: «2026-01-05»"),
    ("date", "Today's date is «2026-01-05»."),
    ("date", "Today is «Monday, January 5, 2026»."),
    ("date", "today\u2019s date: «5th January 2026»"),
    ("date", "Current date: «05.01.2026»"),
    ("date", "<date>«2026-01-05»</date>"),
    ("date", "Date: «2026-01-05»"),
    ("date", "It is now «Jan 5, 2026»."),
    ("date", "Prices as of «2026-01-05» apply."),
    ("date", "current_date=«2026-01-05»"),
    ("date", "Local date: «1/5/2026»"),
    ("epoch", "timestamp: «1767603600»"),
    ("epoch", '{"ts": «1767603600.25»}'),
    ("epoch", "Generated at «1767603600123»"),
    ("epoch", "Seconds since the epoch: «1767603600»"),
    ("epoch", "The unix time is «1767603600»."),
    ("epoch", "cache buster «1767603600123»"),
    ("uuid", "Session: «3f2b8c1e-9d4a-4e6f-8b7c-1a2b3c4d5e6f»"),
    ("uuid", "request_id=«3F2B8C1E-9D4A-4E6F-8B7C-1A2B3C4D5E6F»;"),
    ("hash", f"build {HEX40[:8]}: «{HEX64}»"),
    ("hash", f"state sha1 «{HEX40}» of the index"),
    ("hash", "nonce: «Zm9vYmFyQ3V4MTIzNDU2Nzg5MEFC»"),
    ("hash", "signed «q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA=» by us"),
    ("counter", "step «17»"),
    ("counter", "You are on step «17 of 50»."),
    ("counter", "This is request «#5»".replace("«#", "#«")),
    ("counter", "Turn «12/40»"),
    ("counter", "Iteration: «4»"),
    ("counter", "<turn>«5»</turn>"),
    ("counter", '{"step": «17»}'),
    ("counter", "session #«88», run no. «3»"),
    ("counter", "request_id: «48213»"),
    ("path", "Scratch folder: /tmp/«tmpab12»"),
    ("path", "Scratch folder: /tmp/«tmpx8_k2j1q»/work"),
    ("path", "Socket: /var/run/«agent.48213».sock".replace("».sock", ".sock»")),
    ("path", "log to /tmp/«agent-48213.log»"),
    ("path", "cwd=/private/var/folders/zz/«zyxvpxvq6csfxvn_n0000000000000»/T".replace("«", "«")),
    ("path", "open /proc/«48213»/cwd"),
    ("path", r"C:\Users\dev\AppData\Local\Temp\«tmp4f9a1c2e»"),
    ("path", "mktemp gave /tmp/«tmp.aB3dE6»"),
    ("pid", "Shell pid «48213» is running"),
    ("pid", "PID: «812»"),
    ("git", "Current branch: «feature/cache-17»"),
    ("git", "branch: «main»\nclean"),
    ("git", "HEAD is now at «3fa9c1d» Fix it"),
    ("git", "git commit: «3fa9c1d»"),
    (
        "git",
        "Repository:\n«On branch main\nYour branch is up to date with 'origin/main'.»\n\nRules: be brief.",
    ),
    ("git", "gitStatus:\n« M src/a.py\n?? notes.md»\n\nBe brief."),
    ("git", "Status:\n«M src/a.py\n?? b.py»\n\nDo it."),
    ("git", "Recent commits:\n«3fa9c1d Fix the cache\n81b2c3d Add tests»\nEnd."),
    ("git", "<git_status>\n«## main...origin/main [ahead 1]\n M a.py»\n</git_status>"),
    ("git", '«On branch x\nChanges not staged for commit:\n  (use "git add" to see)\n\tmodified:   a.py»'),
    ("usage", "tokens left: «12345»"),
    ("usage", "Remaining tokens: «12,345»"),
    ("usage", "You have «12345» tokens remaining."),
    ("usage", "Token usage: «45000/200000»; go on"),
    ("usage", "cost so far: «$0.12»"),
    ("usage", "Budget left is «$1.20»"),
    ("usage", "Context «45%» used"),
    ("usage", "«34%» of the context window used"),
    ("usage", "«7» turns left"),
]
NEGATIVE = [
    "Use Python 3.11.4 and Node 20.10.0.",
    "ctxgate 1.2.3 (2026.1.5)",
    "See RFC 2119 and RFC 9110, section 15.5.1.",
    "In 2024 and 2025 the rules changed.",
    "Knowledge cutoff: 2024-06",
    "Knowledge cutoff: 2024-06-01",
    "The policy of 1 May 2024 applies.",
    "Currently supported since 2024-01-02.",
    "The release date is in the file; the first was on 2023-03-04.",
    "Dates have the form YYYY-MM-DD, for example 2024-05-15.",
    "Timestamps are ISO 8601, e.g. 2024-05-15T10:00:00Z.",
    "format: 2024-05-15 10:00:00",
    "Open from 09:00 to 17:00 on weekdays.",
    "Flights depart daily at 10:30.",
    "Aspect ratio 16:09, scale 1:50",
    "main.py:12:34: error",
    "Line 17: unexpected token",
    "Show lines 10 to 25 of the file, 100 lines at a time.",
    "Genesis 1:14",
    "MAX_SIZE = 1048576",
    "TIMEOUT_MS = 30000",
    "Call +1 555 123 4567 or 1555123456.",
    "ISBN 9783161484100",
    "Order 1767603600 is yours.",
    "const MASK = 0xFFFFFFFF;",
    "mask 00000000000000000000000000000000",
    "nil is 00000000-0000-0000-0000-000000000000",
    "An id looks like 123e4567-e89b-12d3-a456-426614174000.",
    "The colour is #1a2b3c4d",
    "decade facade deadbeef",
    "ThisIsAVeryLongCamelCaseIdentifierName2Of3Parts1",
    "packages/coding-agent/src/tui/tui-renderer2/Version1/Main3.ts",
    "data:image/png;base64," + "iVBORw0KGgoAAAANSUhEUg" * 20,
    "Step 1: read the file. Step 2: edit it.",
    "1. Plan\n2. Act\n3. Check",
    "Go back to step 3.",
    "see turn 4",
    "at most step 9",
    "Max steps: 50",
    "max_tokens: 4096",
    "Maximum tokens: 4096",
    "up to 200000 tokens used",
    "Keep answers under 500 tokens.",
    "Each request 3 items or more",
    "Run 3 tests, then call 2 tools.",
    "HTTP 404 and 503, port 8080",
    "Fix issue #12 and PR #34.",
    "The fee is $50 per passenger; the budget is set by the user.",
    "A bag costs $50.",
    "Write scratch files to /tmp and read /tmp/output.txt",
    "/tmp/build/src/main.c",
    "/run/user/data",
    "/proc/self/status and /proc/cpuinfo",
    "Never commit unless the user asks. Never push.",
    "Create a branch per issue.",
    "Use the branch the user names.",
    "Run git status before git commit.",
    "## Rules\n- Read first\n## Style\nA short answer",
    "Status:\n active",
    "a pid file",
    "Reset the counter after 5 failures.",
    "2 of 3 passengers",
    "Version 2 of 3",
    "half of the context is for tools",
    "Gold members have 3 free bags; silver 2; regular 1.",
    "size=1500000000",
    "Temperature 0.7, top_p 0.95",
    "Apache-2.0 license, Copyright 2024-2026",
    "UTF-8, base64 and SHA-256 are supported.",
    "sorted in O(n log n) for n = 1000000",
    "192.168.1.10 and 10.0.0.1:8080",
    "chapter 4, figure 2, table 3",
    "When 3 is used, the 2 remaining ones are dropped.",
    "Discounts of 20% apply; $50 per bag.",
    "",
]


def parsed(marked: str) -> tuple[str, list[str], list[int]]:
    """The text without marks, what stood between them, and where it began."""
    pieces = re.split("[«»]", marked)
    starts = [sum(map(len, pieces[:at])) for at in range(1, len(pieces), 2)]
    return "".join(pieces), pieces[1::2], starts


@pytest.mark.parametrize(("kind", "marked"), POSITIVE)
def test_what_is_found(kind: str, marked: str) -> None:
    text, values, starts = parsed(marked)
    spans = find_volatile(text)
    assert [(text[span.start : span.end], span.kind.value) for span in spans] == [(v, kind) for v in values]
    assert [span.start for span in spans] == starts


@pytest.mark.parametrize("text", NEGATIVE)
def test_what_is_left_alone(text: str) -> None:
    assert [(text[span.start : span.end], span.kind.value) for span in find_volatile(text)] == []


def test_the_tables_are_large_enough_and_name_every_kind() -> None:
    assert len(POSITIVE) >= 60
    assert len(NEGATIVE) >= 60
    assert {kind for kind, _ in POSITIVE} == {kind.value for kind in VolatileKind}


def test_a_head_with_several_spans() -> None:
    text = (
        "You are a coding agent.\n\nRules:\n- Use Python 3.11.\n\n<env>\nToday's date: 2026-01-05\n"
        "Session: 3f2b8c1e-9d4a-4e6f-8b7c-1a2b3c4d5e6f\nScratch: /tmp/tmpab12\n</env>\n"
        "Current time: 2026-01-05T09:00:00Z"
    )
    spans = find_volatile(text)
    assert [(span.kind.value, span.label) for span in spans] == [
        ("date", "Today's date: "),
        ("uuid", "Session: "),
        ("path", "Scratch: /tmp/"),
        ("clock", "Current time: "),
    ]
    assert masked(text, spans) == (
        "You are a coding agent.\n\nRules:\n- Use Python 3.11.\n\n<env>\nToday's date: [date]\n"
        "Session: [uuid]\nScratch: /tmp/[path]\n</env>\nCurrent time: [clock]"
    )


def test_the_label_is_bounded_and_of_one_line() -> None:
    text = "first line\n" + "x" * 100 + " Current time: 2026-01-05T09:00:00Z"
    (span,) = find_volatile(text)
    assert span.label == text[span.start - 64 : span.start]


@given(
    st.lists(
        st.sampled_from([text for _, text in POSITIVE] + NEGATIVE + ["\n", " ", "0", "a", ":", "«", "-"])
        | st.text(),
        max_size=8,
    ).map("".join)
)
@example("\n\nOn branch x")
def test_spans_are_ordered_disjoint_and_never_empty(text: str) -> None:
    position = 0
    for span in find_volatile(text):
        assert position <= span.start < span.end <= len(text)
        assert text[span.start : span.end].strip()
        assert len(span.label) <= 64
        position = span.end


@given(st.datetimes(), st.sampled_from(["T", " "]), st.sampled_from(["", "Z", "+02:00", " UTC"]))
def test_every_iso_time_of_this_and_the_last_century_is_found(at: Any, joint: str, zone: str) -> None:
    at = at.replace(year=1900 + at.year % 200)
    stamp = at.isoformat(joint) + zone
    text = f"Head.\nCurrent time: {stamp}\nTail."
    assert [text[span.start : span.end] for span in find_volatile(text)] == [stamp]


# ---- cost ------------------------------------------------------------------------------------------------

SCANNED = {
    f"{module.__name__.rpartition('.')[2]}.{name}": value
    for module in (volatile_patterns, volatile_context)
    for name, value in vars(module).items()
    if isinstance(value, re.Pattern)
}
# An unbounded repeat is only used on the words before a match, which are at most 64 characters.
ON_CONTEXT = {"volatile_context._WORDS"}


def width(pattern: re.Pattern[str]) -> int:
    """The most characters that a match can have; what it looks at lies within, or one character beside it."""
    most: int = parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE).getwidth()[1]
    return most


ADVERSARIAL = [
    "a",
    "1",
    "1,",
    "0-",
    "/tmp/",
    "tmp",
    "step ",
    "step 1 of ",
    "tokens ",
    "Mon, ",
    "12:34",
    "2026-01-05",
    "2026-01-05T",
    "aB3/",
    "deadbeef",
    "deadbeef-",
    " ",
    "\n",
    " M a\n",
    "On branch ",
    "current date and time ",
    "is the ",
    "$1.",
    "branch: ",
]


class Steps:
    """A plain backtracking matcher of parsed patterns that counts what it compares."""

    def __init__(self, pattern: re.Pattern[str], text: str) -> None:
        self.tree = list(parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE))
        self.fold = bool(pattern.flags & re.IGNORECASE)
        self.text = text
        self.count = 0

    def end(self, start: int) -> int | None:
        return next(self._all(self.tree, start), None)

    def _all(self, tree: list[Any], at: int) -> Iterator[int]:
        if not tree:
            yield at
            return
        for end in self._one(tree[0], at):
            yield from self._all(tree[1:], end)

    def _one(self, node: Any, at: int) -> Iterator[int]:
        op, argument = node
        self.count += 1
        if op is ops.BRANCH:
            for branch in argument[1]:
                yield from self._all(list(branch), at)
        elif op is ops.SUBPATTERN:
            yield from self._all(list(argument[-1]), at)
        elif op is ops.MAX_REPEAT:
            yield from self._repeat(list(argument[2]), at, *argument[:2])
        elif op in (ops.ASSERT, ops.ASSERT_NOT):
            behind, inner = argument
            place = at - inner.getwidth()[0] if behind < 0 else at
            found = place >= 0 and next(self._all(list(inner), place), None) is not None
            if found is (op is ops.ASSERT):
                yield at
        elif op is ops.AT:
            if self._at(argument, at):
                yield at
        elif at < len(self.text) and self._takes(op, argument, self.text[at]):
            yield at + 1

    def _repeat(self, item: list[Any], at: int, least: int, most: int) -> Iterator[int]:
        if most > 0:
            for end in self._all(item, at):
                if end > at:
                    yield from self._repeat(item, end, max(least - 1, 0), most - 1)
        if least == 0:
            yield at

    def _at(self, where: Any, at: int) -> bool:
        if where is ops.AT_BOUNDARY:
            sides = [
                bool(re.match(r"\w", side))
                for side in (self.text[max(at - 1, 0) : at], self.text[at : at + 1])
            ]
            return sides[0] is not sides[1]
        assert where is ops.AT_END, where
        return self.text[at : at + 1] in ("", "\n")

    def _takes(self, op: Any, argument: Any, character: str) -> bool:
        if op is ops.IN:
            negate = argument[0][0] is ops.NEGATE
            return any(self._takes(item[0], item[1], character) for item in argument[negate:]) is not negate
        if op is ops.CATEGORY:
            return bool(re.fullmatch(CLASSES[argument], character))
        variants = {ord(character), *(map(ord, character.swapcase()) if self.fold else ())}
        if op is ops.RANGE:
            return any(argument[0] <= one <= argument[1] for one in variants)
        if op is ops.NOT_LITERAL:
            return argument not in variants
        assert op is ops.LITERAL, op
        return argument in variants


CLASSES = {
    ops.CATEGORY_DIGIT: r"\d",
    ops.CATEGORY_NOT_DIGIT: r"\D",
    ops.CATEGORY_SPACE: r"\s",
    ops.CATEGORY_NOT_SPACE: r"\S",
    ops.CATEGORY_WORD: r"\w",
}


@pytest.mark.parametrize("name", sorted(SCANNED.keys() - ON_CONTEXT))
def test_a_pattern_is_bounded_in_width_so_that_its_cost_is_linear(name: str) -> None:
    assert width(SCANNED[name]) <= 400


@pytest.mark.parametrize("name", sorted(SCANNED.keys() - ON_CONTEXT))
def test_few_steps_from_any_one_place_of_hostile_text(name: str) -> None:
    for unit in ADVERSARIAL:
        text = unit * (240 // len(unit))
        for start in range(len(unit) + 1):
            steps = Steps(SCANNED[name], text)
            steps.end(start)
            assert steps.count <= 4_000, (unit, start)


def test_the_step_counter_matches_like_re_and_sees_what_explodes() -> None:
    for _, marked in POSITIVE[::3]:
        text = parsed(marked)[0]
        for pattern in SCANNED.values():
            if pattern not in (SCANNED[name] for name in ON_CONTEXT):
                for start in range(0, len(text), 11):
                    match = pattern.match(text, start)
                    assert Steps(pattern, text).end(start) == (match and match.end()), (pattern, text)
    exploding = Steps(re.compile("(?:a{1,9}){1,9}b"), "a" * 14)
    exploding.end(0)
    assert exploding.count > 4_000


MEGABYTES = {"a", "0-", "tokens ", "aB3/"}


@pytest.mark.parametrize("unit", ADVERSARIAL)
def test_hostile_text_up_to_a_megabyte_is_looked_at_a_bounded_number_of_times(
    unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the look-backs, the only work beyond one pass of each pattern."""
    seen = 0
    plain = volatile_context.before

    def counting(text: str, at: int) -> str:
        nonlocal seen
        label = plain(text, at)
        seen += 1 + len(label)
        return label

    monkeypatch.setattr(volatile_context, "before", counting)
    size = 2**20 if unit in MEGABYTES else 2**14
    text = unit * (size // len(unit))
    find_volatile(text)
    assert seen <= 65 * 3 * len(text)
