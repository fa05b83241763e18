"""A tool result that is made shorter keeps its ends, its errors and its structure."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest

from ctxgate.compression.structure import Kind, kind_of
from ctxgate.compression.tool_output import (
    ALGORITHM,
    LEAST_LIMIT,
    Shrunk,
    excerpt,
    reference_line,
    shrink,
    shrink_message,
    split_oversize,
)

ID = "ctx_0123456789abcdef"

LOG = "\n".join(
    [f"2026-01-05 10:00:{n % 60:02d} INFO step {n} done" for n in range(300)]
    + [
        "2026-01-05 10:05:00 INFO connecting",
        "2026-01-05 10:05:01 ERROR cannot connect to db:5432",
        "retrying in 5s",
    ]
    + [f"2026-01-05 10:06:{n % 60:02d} INFO step {n} done" for n in range(300, 600)]
)
CODE = "\n".join(
    line
    for n in range(60)
    for line in (f"class Widget{n}:", f"    def draw_{n}(self, size):", *["        self.total += size;"] * 12)
)
DIFF = "\n".join(
    line
    for n in range(40)
    for line in (
        f"diff --git a/src/m{n}.py b/src/m{n}.py",
        f"--- a/src/m{n}.py",
        f"+++ b/src/m{n}.py",
        "@@ -1,20 +1,20 @@",
        *[" unchanged line of text"] * 20,
        f"-old_{n} = 1",
        f"+new_{n} = 2",
    )
)
TABLE = "\n".join(["name,count,share", *(f"row{n},{n},{n / 7:.3f}" for n in range(500))])
RECORDS = json.dumps(
    [{"id": n, "note": "fine " * 20, **({"error": "disk full"} if n == 70 else {})} for n in range(100)]
)
TEXT = "\n".join(f"Paragraph {n} of a long report about nothing in particular." for n in range(400))


def size(text: str) -> int:
    return len(text.encode())


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (LOG, Kind.LOG),
        (CODE, Kind.CODE),
        (DIFF, Kind.DIFF),
        (TABLE, Kind.TABLE),
        (RECORDS, Kind.JSON),
        (TEXT, Kind.TEXT),
    ],
)
@pytest.mark.parametrize("limit", [600, 2000, 8000])
def test_every_kind_fits_its_limit_and_names_its_original(text: str, kind: Kind, limit: int) -> None:
    short = shrink(text, limit, ID)
    assert short.kind is kind
    assert size(short.text) <= limit
    assert short.left_out == size(text) - size(short.text)
    assert ID in short.text
    assert size(short.text) >= limit // 2 or kind is Kind.JSON, "the room is used"


def test_head_tail_and_error_with_its_surroundings_stay_in_order() -> None:
    lines = shrink(LOG, 2000, ID).text.split("\n")
    all_lines = LOG.split("\n")
    assert lines[0] == all_lines[0]
    assert lines[-2] == all_lines[-1]
    assert lines[-1] == reference_line(ID, size(LOG))
    at = lines.index("2026-01-05 10:05:01 ERROR cannot connect to db:5432")
    assert lines[at - 1] == "2026-01-05 10:05:00 INFO connecting"
    assert lines[at + 1] == "retrying in 5s"
    kept = [line for line in lines[:-1] if not line.startswith("[... ")]
    places = [all_lines.index(line) for line in kept]
    assert places == sorted(places)
    left = sum(int(line.split()[1]) for line in lines if line.startswith("[... "))
    assert left + len(kept) == len(all_lines)


def test_many_errors_of_one_kind_do_not_hide_another() -> None:
    text = "\n".join(f"Error: cannot open file {n}" for n in range(2000)) + "\n" + "ok\n" * 200
    middle = len(text) // 2
    text = text[:middle] + "\nMemoryError: out of memory\n" + text[middle:]
    assert "MemoryError: out of memory" in shrink(text, 1000, ID).text


def test_code_keeps_its_signatures_and_a_diff_its_files() -> None:
    code, diff = shrink(CODE, 8000, ID).text, shrink(DIFF, 8000, ID).text
    assert sum(f"class Widget{n}:" in code for n in range(60)) == 60
    assert sum(f"+++ b/src/m{n}.py" in diff for n in range(40)) == 40
    assert "name,count,share\n" in shrink(TABLE, 600, ID).text


def test_json_stays_json_and_says_how_much_is_missing() -> None:
    """Four items from the start, two from the end, and the one that reports an error."""
    value = json.loads(shrink(RECORDS, 1500, ID).text)
    records = [each for each in value if isinstance(each, dict)]
    notes = [each for each in value if isinstance(each, str)]
    assert {"id": 70, "error": "disk full"}.items() <= next(r for r in records if r["id"] == 70).items()
    assert notes[-1] == reference_line(ID, size(RECORDS))
    missing = sum(int(note[1:].split()[0]) for note in notes[:-1])
    assert missing + len(records) == 100
    assert records[0]["id"] == 0
    assert records[-1]["id"] == 99


def test_json_values_keep_their_bytes() -> None:
    text = '{"big": 123456789012345678901234567890, "float": 1.10, "huge": 1e999, "s": "' + "x" * 5000 + '"}'
    out = shrink(text, 1000, ID).text
    assert '"big":123456789012345678901234567890,"float":1.10,"huge":1e999' in out
    assert set(json.loads(out)) == {"big", "float", "huge", "s", "ctxgate_reference"}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({f"key {n} {'k' * 90}": n for n in range(500)}),
        json.dumps([[[["deep"] * 50] * 20] * 10]),
        json.dumps({"a" * 3000: {"b" * 3000: 1}}),
        "[" * 200 + '"x"' + "]" * 200 + " " * 2000,
        json.dumps(["é\U0001f600" * 800]),
    ],
)
def test_any_json_stays_json_within_the_limit(text: str) -> None:
    short = shrink(text, 800, ID)
    assert short.kind is Kind.JSON
    assert size(short.text) <= 800
    assert ID in json.dumps(json.loads(short.text))


def test_what_only_looks_like_json_is_text() -> None:
    text = "{" + "not json, " * 500 + "}"
    assert shrink(text, 1000, ID).kind is Kind.TEXT


def test_short_texts_are_the_same_object_and_never_grow() -> None:
    text = "a" * LEAST_LIMIT
    assert shrink(text, 0, ID) == Shrunk(text, Kind.TEXT, 0)
    for extra in range(0, 200, 9):
        slightly = "line of text\n" * 40 + "b" * extra
        assert size(shrink(slightly, 500, ID).text) <= size(slightly)


def test_context_l1_l5_one_long_line_keeps_both_ends() -> None:
    text = "start " + "m" * 100_000 + " end"
    out = shrink(text, 1000, ID).text
    assert out.startswith("start m")
    assert "m end\n" in out
    split = split_oversize(text, 1000, ID)
    assert split.startswith("start m")
    assert split.endswith("m end")
    assert reference_line(ID, size(text)) in split
    assert size(split) <= 1000
    assert split_oversize("short", 1000, ID) == "short"


FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
FLAG = "\U0001f1e9\U0001f1ea"
CLUSTERS = [
    FAMILY,
    FLAG,
    "e\u0301",
    "\u0e01\u0e33",
    "\U0001f44d\U0001f3fd",
    "\u2764\ufe0f",
    "\r\n",
    "\u0915\u094d",
]


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_context_r1_no_cut_inside_a_character(cluster: str) -> None:
    """For every offset of the cut, what is kept is whole clusters from both ends."""
    for offset in range(12):
        text = "x" * offset + cluster * 2000
        out = split_oversize(text, 700, ID)
        head, tail = out.split(f"\n{reference_line(ID, size(text))}\n")
        assert head[offset:] == cluster * (len(head[offset:]) // len(cluster))
        assert tail == cluster * (len(tail) // len(cluster))
        assert len(head) >= 40
        assert len(tail) >= 40


def test_context_r1_r3_lone_surrogates_become_replacement_characters() -> None:
    text = ("broken \ud83d text \ude00\n" * 200) + "pair \ud83d\ude00"
    out = shrink(text, 800, ID).text
    out.encode()
    assert "broken \ufffd text \ufffd" in out
    assert "pair \U0001f600" in out


def test_context_r1_escaped_surrogates_in_a_message_are_repaired_and_cut() -> None:
    raw = b'{"role":"tool","tool_call_id":"a","content":"' + rb"x \ud83d y\n" * 300 + b'","n":1.50}'
    out = shrink_message(raw, 600, ID)
    assert out is not None
    content = json.loads(out)["content"]
    content.encode()
    assert content.startswith("x \ufffd y\n")
    assert json.loads(out)["tool_call_id"] == "a"


def test_context_n1_parts_that_are_no_texts_keep_their_bytes() -> None:
    """An image beside a long text is not lost."""
    image = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"},"x":1.0}'
    text = json.dumps({"type": "text", "text": TEXT}).encode()
    raw = b'{"role":"tool","tool_call_id":"a","content":[' + text + b"," + image + b"]}"
    out = shrink_message(raw, 900, ID)
    assert out is not None
    assert image in out
    assert ID in json.loads(out)["content"][0]["text"]
    assert shrink_message(b'{"role":"tool","tool_call_id":"a","content":"short"}', 900, ID) is None
    assert shrink_message(b"[]", 900, ID) is None


def test_the_same_bytes_for_ever() -> None:
    """A change of these sums needs a new `ALGORITHM`: results are frozen where they were sent."""
    every = "\0".join(
        shrink(text, limit, ID).text
        for text in (LOG, CODE, DIFF, TABLE, RECORDS, TEXT)
        for limit in (600, 2000, 8000)
    )
    assert ALGORITHM == 1
    assert sha256(every.encode()).hexdigest()[:16] == "fc2685d2e10b5700"


def test_excerpts_fit_and_hold_no_reference() -> None:
    out = excerpt(TEXT, 500)
    assert size(out) <= 500
    assert out.startswith("Paragraph 0 ")
    assert "ctx" not in out
    assert excerpt("short", 500) == "short"


def test_kinds_of_small_texts() -> None:
    assert kind_of("", []) is Kind.TEXT
    assert kind_of("[1]", ["[1]"]) is Kind.JSON
    assert kind_of("[1", ["[1"]) is Kind.TEXT


HOSTILE = [
    "a" * 10_000,
    "\n" * 10_000,
    "{" * 10_000,
    "[" * 20_000 + "]" * 20_000,
    "1:1:1\n" * 6_000,
    "Error: a b\n" * 4_000,
    "x: " * 15_000,
    "\u0301" * 20_000,
    "|a|b|c|\n" * 6_000,
    FAMILY * 8_000,
    "at " + "(" * 10_000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:6]))
def test_hostile_texts_come_out_within_the_limit(text: str) -> None:
    assert size(shrink(text, 2000, ID).text) <= 2000
