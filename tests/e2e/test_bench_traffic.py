"""What the bench sends, read by a server that keeps it: conversations as agents hold them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest
from tests.bench.bodies import template
from tests.bench.rows import ALL_ROWS, BAR_ROWS, Bench, Row
from tests.bench.systems import Cores, Running
from tests.bench.tools import Tools, find_tools

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.e2e

ROWS: Final = {row.name: row for row in ALL_ROWS}
COMPILER: Final = any(map(shutil.which, ("cc", "gcc", "clang")))
SHORT_TURNS, LONG_TURNS = 7, 16
STREAM: Final = b'data: {"delta"}\n\n' * 64 + b"data: [DONE]\n\n"


@pytest.fixture(params=["c", "python"])
def tools(request: pytest.FixtureRequest) -> Tools:
    """Both load generators, one after the other."""
    if request.param == "c" and not COMPILER:
        pytest.skip("no C compiler")
    return find_tools(python=request.param == "python")


class Capture:
    """Every body, by connection, in the order of their arrival."""

    def __init__(self) -> None:
        self.port = 0
        self.bodies: list[list[bytes]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine: list[bytes] = []
        self.bodies.append(mine)
        while head := await _head(reader):
            length = re.search(rb"\r\ncontent-length: (\d+)\r\n", head)
            assert length
            body = await reader.readexactly(int(length[1]))
            mine.append(body)
            answer = STREAM if body.endswith(b',"stream":true}') else b'{"usage":{}}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer)
        writer.close()


async def _head(reader: asyncio.StreamReader) -> bytes:
    """b"" when the client has gone."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return b""


def ended_process() -> subprocess.Popen[bytes]:
    """Stands for the system under measurement, whose CPU time nobody asks for here."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process


def write_template(row: Row, folder: Path) -> Path:
    """The file that the load generators read."""
    path = folder / "template"
    path.write_bytes(template(row.size, row.traffic, stream=row.stream))
    return path


@asynccontextmanager
async def capturing() -> AsyncIterator[Capture]:
    """A server that keeps all bodies and answers as the mock would."""
    capture = Capture()
    server = await asyncio.start_server(capture.serve, "127.0.0.1", 0, limit=2**20)
    async with server:
        capture.port = server.sockets[0].getsockname()[1]
        yield capture


class Sent(NamedTuple):
    """The bodies of a cell by connection: of its warm-up, and of what is measured."""

    before: list[list[bytes]]
    measured: list[list[bytes]]


async def sent(tools: Tools, row: Row, requests: int, folder: Path) -> Sent:
    """Of a cell with so many requests."""
    async with capturing() as capture:
        system = Running("capture", capture.port, (), ended_process(), 0.0)
        bench = Bench(tools, Cores.choose(), system, folder)
        sample = await asyncio.to_thread(bench.sample, system, replace(row, requests=requests), 0.0)
    assert (sample.requests, sample.errors) == (requests, 0), sample.error_samples
    found = Sent(capture.bodies[: row.clients], capture.bodies[row.clients :])
    assert len(found.measured) == row.clients, "connections are kept"
    assert sum(map(len, found.measured)) == requests
    return found


# ---- what a conversation is ---------------------------------------------------------------------


def read(body: bytes) -> tuple[list[str], dict[str, Any]]:
    """Its messages as JSON, and its other fields; a body that no engine would take fails."""
    assert not re.search(rb"%[A-Z-]{14}%", body), "a mark was sent"
    document = json.loads(body)
    messages = document.pop("messages")
    assert [message["role"] for message in messages[:2]] == ["system", "user"]
    for call, result in zip(messages[2::2], messages[3::2], strict=True):
        (tool_call,) = call["tool_calls"]
        assert (call["role"], result["role"]) == ("assistant", "tool")
        assert result["tool_call_id"] == tool_call["id"]
        assert set(json.loads(tool_call["function"]["arguments"])) == {"path", "limit", "note"}
    return [json.dumps(message) for message in messages], document


def conversations(bodies: list[bytes]) -> list[list[list[str]]]:
    """The messages of each turn, by conversation; within one, turn k + 1 is turn k and two more."""
    found: list[list[list[str]]] = []
    heads: list[tuple[str, dict[str, Any]]] = []
    for before, body in pairwise([b"", *bodies]):
        messages, rest = read(body)
        heads.append((messages[0], rest))
        if found and len(messages) > len(found[-1][-1]):
            assert messages[:-2] == found[-1][-1]
            assert body.startswith(before[: before.index(b'],"model":')] + b","), "other bytes"
            found[-1].append(messages)
        else:
            found.append([messages])
    assert all(head == heads[0] for head in heads), "system prompt, tools and fields stay"
    return found


@pytest.mark.parametrize("name", ["4k-stream-1", "4k-plain-1"])
async def test_short_conversations_grow_from_their_task_and_follow_each_other(
    name: str, tools: Tools, tmp_path: Path
) -> None:
    (bodies,) = (await sent(tools, ROWS[name], 2 * SHORT_TURNS + 3, tmp_path)).measured
    played = conversations(bodies)
    assert [[len(messages) for messages in turns] for turns in played] == [
        [2, 4, 6, 8, 10, 12, 14],
        [2, 4, 6, 8, 10, 12, 14],
        [2, 4, 6],
    ]
    seen: set[str] = set()
    for turns in played:
        own = set(turns[-1][1:])
        assert len(own) == len(turns[-1]) - 1
        assert not own & seen, "but for its system prompt a conversation is new"
        seen |= own
    assert sum(map(len, bodies[:SHORT_TURNS])) / SHORT_TURNS == pytest.approx(4_096, rel=0.005)


async def test_connections_begin_at_every_turn_and_share_nothing_but_the_head(
    tools: Tools, tmp_path: Path
) -> None:
    cell = await sent(tools, ROWS["4k-stream-32"], 32 * 9, tmp_path)
    played = [conversations(bodies) for bodies in cell.measured]
    first = Counter(len(own[0][0]) for own in played)
    assert first == Counter(2 + 2 * (number % SHORT_TURNS) for number in range(32))
    played += [conversations(bodies) for bodies in cell.before if bodies]
    messages = [set(turns[-1][1:]) for own in played for turns in own]
    assert len(set.union(*messages)) == sum(map(len, messages))


@pytest.mark.parametrize(
    ("name", "clients", "nominal", "messages_at_first"),
    [("400k-stream-1", 3, 400_000, 100), ("4m-stream-1", 1, 4_000_000, 1_144)],
)
async def test_of_a_long_conversation_all_but_the_last_two_messages_are_known(
    name: str, clients: int, nominal: int, messages_at_first: int, tools: Tools, tmp_path: Path
) -> None:
    row = replace(ROWS[name], clients=clients)
    cell = await sent(tools, row, clients * (LONG_TURNS + 3), tmp_path)
    seen = {message for bodies in cell.before for body in bodies for message in read(body)[0]}
    sizes: dict[int, int] = {}
    for number, bodies in enumerate(cell.measured):
        turns = [messages for played in conversations(bodies) for messages in played]
        lengths = [messages_at_first + 2 * ((number + at) % LONG_TURNS) for at in range(len(turns))]
        assert [len(messages) for messages in turns] == lengths, "16 turns, then a fork"
        assert seen.issuperset(turns[0][: messages_at_first - 2])
        seen.update(turns[0][:-2])
        for messages in turns:
            assert seen.issuperset(messages[:-2])
            assert seen.isdisjoint(messages[-2:])
            seen.update(messages)
        sizes |= dict(zip(lengths, map(len, bodies), strict=True))
    assert sorted(sizes) == [messages_at_first + 2 * turn for turn in range(LONG_TURNS)]
    assert sum(sizes.values()) / LONG_TURNS == pytest.approx(nominal, rel=0.005)


async def test_every_long_conversation_is_sent_before_it_is_measured(tools: Tools, tmp_path: Path) -> None:
    cell = await sent(tools, ROWS["400k-plain-16"], 16, tmp_path)
    assert [len(bodies) for bodies in cell.before] == [1] * 16


async def test_siblings_differ_in_their_last_two_messages(tools: Tools, tmp_path: Path) -> None:
    (bodies,) = (await sent(tools, ROWS["4k-stream-1-siblings"], 5, tmp_path)).measured
    turns = [read(body) for body in bodies]
    assert all(rest == turns[0][1] for _, rest in turns)
    assert {len(messages) for messages, _ in turns} == {8}
    assert all(messages[:-2] == turns[0][0][:-2] for messages, _ in turns)
    assert len({message for messages, _ in turns for message in messages[-2:]}) == 10


@pytest.mark.parametrize(("name", "kept"), [("4m-stream-1-new", 1), ("4m-stream-1-rewritten", 2)])
async def test_all_is_new_after_the_system_prompt_or_the_task(
    name: str, kept: int, tools: Tools, tmp_path: Path
) -> None:
    (bodies,) = (await sent(tools, ROWS[name], 3, tmp_path)).measured
    turns = [read(body)[0] for body in bodies]
    assert {tuple(turn[:kept]) for turn in turns} == {tuple(turns[0][:kept])}
    rest = [message for turn in turns for message in turn[kept:]]
    assert len(set(rest)) == len(rest) > 3_000


@pytest.mark.skipif(not COMPILER, reason="no C compiler")
@pytest.mark.parametrize(
    ("name", "clients", "requests"),
    [
        ("4k-stream-1", 1, 3 * SHORT_TURNS),
        ("4k-stream-32", 3, 6 * SHORT_TURNS),
        ("4k-stream-32-siblings", 3, 9),
        ("400k-plain-16", 1, 2 * LONG_TURNS),
        ("4m-stream-1-new", 1, 3),
    ],
)
async def test_both_generators_send_the_same_bytes(
    name: str, clients: int, requests: int, tmp_path: Path
) -> None:
    row = ROWS[name]
    file = write_template(row, tmp_path)
    found = []
    for python in (False, True):
        async with capturing() as capture:
            command = (*find_tools(python=python).load, "--port", str(capture.port), "--body", str(file))
            options = ("--clients", str(clients), "--requests", str(requests), "--run", "7")
            process = await asyncio.create_subprocess_exec(
                *command, *options, "--stream", str(int(row.stream))
            )
            assert await process.wait() == 0
        assert sum(map(len, capture.bodies)) == requests
        found.append(sorted(bodies for bodies in capture.bodies if bodies))
    assert [len(connections) for connections in found] == [clients, clients]
    for ours, theirs in zip(*found, strict=True):
        shared = min(len(ours), len(theirs))  # how many a connection sends is a matter of speed
        assert clients > 1 or shared == requests
        assert ours[:shared] == theirs[:shared]


def test_the_rows_of_the_bars_are_those_of_growing_conversations() -> None:
    assert {ROWS[name].traffic for name in BAR_ROWS} == {"growing"}
    others = {name: str(row.traffic) for name, row in ROWS.items() if row.traffic != "growing"}
    assert others == {
        "4k-stream-1-siblings": "siblings",
        "4k-stream-32-siblings": "siblings",
        "4m-stream-1-rewritten": "rewritten",
        "4m-stream-1-new": "new",
    }
