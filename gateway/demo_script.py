"""The scripted model of the demo: it reviews ctxgate's own sources, question by question.

It decides like a model would, on what the tools returned, and it is deterministic: the same sources
give the same conversation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ctxgate.gateway.demo_agent import Act, Ask, Say

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ctxgate.gateway.demo_agent import Script

SYSTEM: Final = """\
You are a careful reviewer of a Python code base. You answer questions about it by looking, not by guessing.

How you work:
1. Look before you answer: list folders, grep for names, read the lines that matter.
2. Check claims by running code. A program that prints the figure is worth more than an opinion.
3. Quote file and line where you can. Say what you did not look at.
4. Never change a file. You have no tool for it, and nobody asked you to.
5. One step at a time: a short thought, then the tool call.

The tree is the package `ctxgate`: a gateway between long-running agents and vLLM. Its four parts are
`gateway` (edge, configuration, ledger, commands), `compression` (what happens to a prompt), `routing`
(which replica gets a request) and `inference` (the wire to vLLM, usage, rates). Money is counted in
integer nano-dollars, tokens as cached input, uncached input and output. Paths are relative to the root
of the package. Answer in at most five sentences.
"""
_LINES: Final = 70

_PRICE: Final = """\
# price one request
from datetime import date
from ctxgate.inference.rates import RateCard, Rates, charge, format_usd
from ctxgate.inference.usage import Usage, measured

day = date(2026, 1, 1)
usd = 10**9
rates = Rates(uncached=5 * usd // 2, cached=usd // 4, output=15 * usd, written=5 * usd // 2, effective=day)
usage = Usage(uncached=measured(6074 - 3456), cached=measured(3456), output=measured(285))
print(format_usd(charge(usage, RateCard(((rates,),)), day).total))
"""
_SPLIT: Final = """\
# cut one stream into chunks of every size
from ctxgate.inference.sse import SseSplitter

stream = b'data: {"a": 1}\\n\\n: keep-alive\\r\\n\\r\\ndata: x\\ndata: y\\n\\ndata: [DONE]\\n\\n'
cuts = set()
for size in range(1, len(stream) + 1):
    splitter = SseSplitter()
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    cuts.add(tuple(event for piece in pieces for event in splitter.feed(piece)))
print(len(cuts), "way to cut", len(stream), "bytes;", len(next(iter(cuts))), "events")
"""
_LONGEST: Final = """\
# rank all functions by length
import ast
from pathlib import Path
import ctxgate

root = Path(ctxgate.__path__[0])
found = []
for part in ("gateway", "compression", "routing", "inference"):
    for file in Path(root, part).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = node.end_lineno - node.lineno + 1
                found.append((lines, file.relative_to(root).as_posix(), node.name))
found.sort(reverse=True)
print(len(found), "functions")
for lines, file, name in found[:12]:
    print(lines, file, name)
"""
_COMMANDS: Final = """\
# count the arguments of each sub-command
import argparse, importlib
from ctxgate.gateway.cli import COMMANDS

for name in COMMANDS:
    parser = argparse.ArgumentParser(name)
    importlib.import_module("ctxgate.gateway.commands." + name.replace("-", "_")).configure(parser)
    print(name, len(parser._actions) - 1, "arguments")
"""


def review() -> Script:
    """The whole review: five questions, then file after file until the turns are used up."""
    yield from _money()
    yield from _streams()
    yield from _sizes()
    yield from _commands()
    yield from _reading()


def _money() -> Script:
    yield Ask("What does one request cost, and can a cached token be billed twice? Check it with numbers.")
    yield Act(
        "I start with the packages.", [("list_files", {"path": "."}), ("list_files", {"path": "inference"})]
    )
    yield Act("Where is the price computed?", [_grep(r"def charge|def rates_at|charge\(", ".")])
    yield Act(
        "One function. I read it.", [_read("inference/rates.py"), _read("inference/rates.py", 1 + _LINES)]
    )
    yield Act("And the record that it prices.", [_read("inference/usage.py")])
    (printed,) = yield Act(
        "6,074 prompt tokens of which 3,456 cached, 285 out, at 2.5 / 0.25 / 15 dollars per million.",
        [("run_python", {"code": _PRICE})],
    )
    yield Say(
        "One function prices every request: `charge` in inference/rates.py. The program printed "
        f"{printed.strip()}: 2,618 uncached, 3,456 cached and 285 output tokens, each once. Uncached and "
        "cached are separate counts, so a cached token is never part of the uncached ones."
    )


def _streams() -> Script:
    yield Ask("Does it matter how a stream is cut into chunks on its way through?")
    yield Act("The splitter of server-sent events decides that.", [_grep(r"SseSplitter", ".")])
    yield Act("I read it.", [_read("inference/sse.py")])
    (printed,) = yield Act("Every chunk size from one byte on:", [("run_python", {"code": _SPLIT})])
    yield Say(f"No. {printed.strip().capitalize()}, whatever the size of the chunks.")


def _sizes() -> Script:
    yield Ask("Which functions are the longest, and is any of them hard to follow?")
    (printed,) = yield Act("I measure instead of looking around.", [("run_python", {"code": _LONGEST})])
    ranked = [line.split() for line in printed.splitlines()[1:]]
    for _, path, name in ranked[:2]:
        yield Act(f"`{name}` is among the longest.", [_grep(rf"def {name}\b", path)])
        yield Act("The file around it:", [_read(path)])
    longest = f"{ranked[0][2]} in {ranked[0][1]} with {ranked[0][0]} lines" if ranked else "none"
    yield Say(f"The longest is {longest}. The two that I read do one thing each, from top to bottom.")


def _commands() -> Script:
    yield Ask(
        "List the sub-commands with the number of their arguments, and look at the command line itself."
    )
    yield Act(
        "The entry point first.", [_read("gateway/cli.py"), ("list_files", {"path": "gateway/commands"})]
    )
    (printed,) = yield Act("Each one, as argparse sees it:", [("run_python", {"code": _COMMANDS})])
    count = len(printed.splitlines())
    yield Say(f"{count} sub-commands, each a module of its own that is imported only when it is asked for.")


def _reading() -> Script:
    yield Ask("Go through the rest, file by file, and note what each one is for.")
    for folder in ("gateway", "inference", "routing", "compression"):
        (listing,) = yield Act(f"Next: {folder}.", [("list_files", {"path": folder})])
        for path in _modules(folder, listing.splitlines()):
            yield Act(f"{path}:", [_read(path)])
    yield Say("That was the last file.")


def _modules(folder: str, listing: Iterable[str]) -> list[str]:
    names = (line.split(" ")[0] for line in listing)
    return [f"{folder}/{name}" for name in names if name.endswith(".py")]


def _read(path: str, first: int = 1) -> tuple[str, dict[str, object]]:
    return "read_file", {"path": path, "first": first, "count": _LINES}


def _grep(pattern: str, path: str) -> tuple[str, dict[str, object]]:
    return "grep", {"pattern": pattern, "path": path}
