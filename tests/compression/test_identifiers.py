"""Exact strings are found, ranked, and written whole."""

from __future__ import annotations

import json

import pytest

from ctxgate.compression.error_lines import is_error, same_kind
from ctxgate.compression.identifiers import (
    TITLE,
    Found,
    Identifier,
    IdentifierKind,
    block,
    collected,
    commands,
    estimated_tokens,
    found_in,
)
from ctxgate.compression.said import Call, Said

RULE, ERROR, COMMAND, PATH, URL, ID, NUMBER = (
    IdentifierKind.RULE,
    IdentifierKind.ERROR,
    IdentifierKind.COMMAND,
    IdentifierKind.PATH,
    IdentifierKind.URL,
    IdentifierKind.ID,
    IdentifierKind.NUMBER,
)


def texts(kind: IdentifierKind, text: str, role: str = "tool") -> list[str]:
    return [each.text for each in found_in(Said(role, text)) if each.kind is kind]


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("see src/core/main.ts:12 and ./ab/c", ["src/core/main.ts", "./ab/c"]),
        ("open /etc/nginx/nginx.conf.", ["/etc/nginx/nginx.conf"]),
        ("(`~/work/x.py`, ../lib/y.rs)", ["~/work/x.py", "../lib/y.rs"]),
        ("a package.json and README.md here", ["package.json", "README.md"]),
        (r"C:\Users\dev\app.py", [r"C:\Users\dev\app.py"]),
        ("@packages/agent/src/main.ts", ["@packages/agent/src/main.ts"]),
        ("dir/sub/deep/", ["dir/sub/deep/"]),
        ("and/or, 1/2, 2026/01/05, application/json, s/a/b/", []),
        ("print/json mode", []),
        ("console.log(x); process.env[y]", []),
        ("https://example.com/a/b.html", []),
    ],
)
def test_paths(text: str, paths: list[str]) -> None:
    assert texts(PATH, text) == paths


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (URL, "see (https://a.example/x?y=1#z), ok.", ["https://a.example/x?y=1#z"]),
        (URL, "<wss://h:8000/v1> http://bc", ["wss://h:8000/v1", "http://bc"]),
        (NUMBER, "took 12.5 ms, 3,400 tokens, 40% of 2 GiB", ["12.5 ms", "3,400 tokens", "40%", "2 GiB"]),
        (NUMBER, "cost $1,234.56 and 7 apples in 2026", ["$1,234.56"]),
        (ID, "123e4567-e89b-12d3-a456-426614174000", ["123e4567-e89b-12d3-a456-426614174000"]),
        (ID, "commit 91079e6 by sofia_kim_7287", ["91079e6", "sofia_kim_7287"]),
        (ID, "flight HAT039, code OI5L9G, ticket ABC-12, issue #77", ["HAT039", "OI5L9G", "ABC-12", "#77"]),
        (ID, "mail sofia.kim@example.com", ["sofia.kim@example.com"]),
        (ID, "deadbeef0 effaced 1234567 ABCDEF", ["deadbeef0"]),
    ],
)
def test_urls_numbers_and_ids(kind: IdentifierKind, text: str, expected: list[str]) -> None:
    assert texts(kind, text) == expected


ERRORS = [
    "TypeError: x is not a function",
    "pkg.module.CustomException: bad",
    "src/a.ts(3,4): error TS2305: Module has no exported member 'X'.",
    "error[E0308]: mismatched types",
    "main.c:3:5: error: expected ';'",
    "Command exited with code 2",
    "process finished with exit code 137",
    "npm ERR! missing script: build",
    "fatal: not a git repository",
    "ls: cannot access 'x': No such file or directory",
    "bash: foo: command not found",
    "2026-01-05T10:00:00Z ERROR db unreachable",
    "[ERROR] failed",
    "FAILED tests/test_a.py::test_b - AssertionError",
    "=== 3 failed, 5 passed ===",
    "panic: runtime error: index out of range",
    "make: *** [all] Error 2",
    "Segmentation fault (core dumped)",
    "Error: not enough seats on flight HAT229",
    'psycopg2.errors.UniqueViolation: duplicate key value violates unique constraint "k"',
    "./api.go:12:3: undefined: newHandler",
    "--- FAIL: TestLedger (0.30s)",
    "CMake Error at lib/CMakeLists.txt:12 (find_package):",
    "PHP Fatal error:  Uncaught Error: Class X is missing",
    "docker: Error response from daemon: No such image: web:3",
    'Error from server (NotFound): pods "web-1" not found',
    'Exception in thread "main" java.lang.NullPointerException: x',
    "kernel: Out of memory: Killed process 812 (node)",
    "ORA-00001: unique constraint (A.PK) violated",
    "CONFLICT (content): Merge conflict in src/a.py",
    'time=1 level=error msg="sync refused"',
    '{"level":"error","msg":"sync refused"}',
    "HTTP/1.1 503 Service Unavailable",
    "ssh: connect to host web port 22: Connection timed out",
    "web.service: Main process exited, code=exited, status=3/FAILURE",
]
FINE = [
    'throw new Error("no such file");',
    "} catch (error) {",
    "except ValueError as error:",
    "console.error(`Error: ${message}`);",
    "0 errors, 0 warnings",
    "5 passed in 0.2s",
    "Command exited with code 0",
    "the error handling was moved",
    "// Error: handled above",
    "HTTP/1.1 200 OK",
    "PROJ-1234: tell of errors in one place",
    'time=1 level=info msg="no error so far"',
    '"level": "error"',
    "Conflict handling was moved",
    "--- PASS: TestError (0.10s)",
    "web.service: Main process exited, code=exited, status=0/SUCCESS",
    "the timeout is 30 s",
    "",
]


@pytest.mark.parametrize("line", ERRORS)
def test_lines_that_report_errors(line: str) -> None:
    assert is_error(line)
    assert texts(ERROR, f"before\n   {line}\nafter") == [line]


@pytest.mark.parametrize("line", FINE)
def test_lines_that_do_not(line: str) -> None:
    assert not is_error(line)


def test_errors_of_one_kind_differ_in_names_and_numbers() -> None:
    kinds = {
        same_kind("a.ts(1,2): error TS2339: Property 'x' does not exist."),
        same_kind("a.ts(30,4): error TS2339: Property 'yy' does not exist."),
    }
    assert kinds == {"a.ts(0,0): error TS2339: Property '' does not exist."}
    assert same_kind("error TS2304: Cannot find name 'x'.") != same_kind(
        "error TS2305: Cannot find name 'x'."
    )


def call(**arguments: object) -> Call:
    return Call("c1", "bash", json.dumps(arguments))


def test_commands_are_what_arguments_name_so() -> None:
    assert commands(call(command="npm run check 2>&1 | tail -5")) == ["npm run check 2>&1 | tail -5"]
    assert commands(call(command=["git", "status", "-s"])) == ["git status -s"]
    assert commands(call(cmd=["ls -a", "./run"])) == ["ls -a", "./run"]
    assert commands(call(command="view", path="x")) == []
    assert commands(call(command="cat > f <<'E'\n" + "text of the file\n" * 60)) == [
        "\n".join(["cat > f <<'E'", *["text of the file"] * 22])
    ]
    assert commands(Call("c", "bash", "{broken")) == []
    assert commands(Call("c", "bash", "[1]")) == []


def test_a_message_is_read_with_its_calls() -> None:
    message = Said(
        "assistant",
        "I run it:\n$ make test",
        (Call("c", "edit", '{"path": "src/a.py", "text": "one\\ntwo/b.py", "reservation_id": "QQQQQQ"}'),),
    )
    assert set(found_in(message)) == {
        Found(COMMAND, "make test", told=False),
        Found(PATH, "src/a.py", told=True),
        Found(PATH, "two/b.py", told=True),
        Found(ID, "QQQQQQ", told=True),
    }


def tool(kind: IdentifierKind, text: str) -> Found:
    return Found(kind, text, told=False)


def user(kind: IdentifierKind, text: str) -> Found:
    return Found(kind, text, told=True)


def test_later_more_frequent_and_named_strings_come_first() -> None:
    """Of errors that differ in numbers only, the second comes after the first of every other kind."""
    found = collected(
        [
            (0, [tool(PATH, "old"), user(RULE, "second?"), tool(PATH, "often")]),
            (5, [tool(PATH, "often"), tool(ERROR, "Error 1"), tool(ERROR, "Other")]),
            (9, [tool(PATH, "late"), user(PATH, "named"), tool(ERROR, "Error 2"), user(RULE, "third?")]),
        ]
    )
    assert [each.text for each in found if each.kind is PATH] == ["named", "late", "often", "old"]
    assert [each.text for each in found if each.kind is RULE] == ["second?", "third?"]
    assert [each.text for each in found if each.kind is ERROR] == ["Error 2", "Other", "Error 1"]
    assert found[-2] == Identifier(PATH, "often", 2, 5, told=False)


def path(text: str) -> Identifier:
    return Identifier(PATH, text, 1, 0, told=False)


def test_the_block_fits_its_budget_and_repeats_nothing() -> None:
    every = [path(f"src/module_{n}/file.py") for n in range(500)]
    for budget in (100, 400, 1500):
        out = block(every, budget)
        assert estimated_tokens(out.text) <= budget
        lines = out.text.split("\n")[2:]
        assert lines == [f"- {each.text}" for each in every[: len(lines)]]
        assert out.left_out == 500 - len(lines)
        assert len(lines) > budget // 15
    assert block([path("/x/src/a.py"), path("src/a.py")], 200).text.count("src/a.py") == 1
    assert block([path("src/a.py")], 200, already="(src/a.py)") == block([], 200)
    assert block([], 200).text == ""


def test_context_e2_rules_are_written_whatever_the_budget() -> None:
    rules = [Identifier(RULE, f"Never do thing {n}.", 1, n, told=True) for n in range(50)]
    out = block([*rules, path("src/a.py")], 10)
    assert out.text.startswith(TITLE)
    assert all(f"- {rule.text}" in out.text.split("\n") for rule in rules)
    assert out.left_out == 1


def test_a_multi_line_command_stays_readable() -> None:
    command = Identifier(COMMAND, "cd x\nmake", 1, 0, told=True)
    assert "- cd x\n  make" in block([command], 500).text


HOSTILE = [
    unit * (2_000 // len(unit))
    for unit in (
        *("a", "/", "a/", "a.", "1", "1,", "1 ", "http://", "-", "a_", "a-", "A1", "a@", "@", "\\", "a\\"),
        *(
            "a@a.",
            "aa_aa_",
            "C:\\ ",
            "$1",
            "#1",
            "0123456789abcdef-",
            "aa-",
            "a1_",
            "Error: ",
            "never ",
            "x: ",
        ),
        *("a.b/", "~", "./", "\n", "- must\n", "a. ", '"', "[1:", "E   x\n", "\u00e9/", "1.1"),
    )
]


def test_hostile_texts_cost_no_more_than_their_length() -> None:
    """A pattern that tries every split of a run would not end on any of these within the life of a test."""
    for text in HOSTILE:
        assert len(found_in(Said("user", text))) < 10
