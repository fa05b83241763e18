"""What planning one turn of a long conversation costs: CPU time, and memory in bodies.

Everything between the checked body and the bytes to forward, with the forms in memory: no socket, no
ledger. Every turn brings two new messages; all others are known to the process. The CPU time of the scan
that checks a body stands beside it, in the same run: figures are ratios to that.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import tempfile
import time
import tracemalloc
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

from tests.bench.bodies import chat_request
from tests.bench.planning_context import COMPACTED, NOTHING_RECORDED, WINDOW_SHARE, ContextBench
from tests.bench.tools import ROOT

from ctxgate.compression import plan as planning
from ctxgate.compression.policy import Level, Policy
from ctxgate.compression.volatile import VolatileKind
from ctxgate.gateway.flow import Identified, Inbound, Surface, Task
from ctxgate.gateway.forms import Forms
from ctxgate.gateway.layout import LayoutStage
from ctxgate.inference import wire

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from ctxgate.gateway.config import Key

HOME: Final = ROOT / ".make" / "peers"
BYTES_PER_TOKEN: Final = 4
TOKENS: Final = (100_000, 300_000, 1_000_000)
TOOLS: Final = 32
TURNS: Final = 15
PEER_TIMEOUT_S: Final = 600
_SAFE: Final = Policy(Level.SAFE)
_DECLARED: Final = Policy(Level.DECLARED, kinds=frozenset({VolatileKind.CLOCK}))


@dataclass(frozen=True, slots=True)
class Case:
    """What a client does to the turns of a conversation, and the policy that meets it."""

    name: str
    policy: Policy
    habit: str = ""


CASES: Final = (
    Case("nothing to edit", _SAFE),
    Case("calls re-serialized", _SAFE, "spaces"),
    Case("call ids made up anew", _SAFE, "ids"),
    Case("clock in the head, declared", _DECLARED, "clock"),
)


BARRED: Final = frozenset(case.name for case in CASES if case.habit != "ids")  # new ids: all bytes are new


@dataclass(frozen=True, slots=True)
class Cost:
    """One row. Medians over the turns; `bodies` is the peak of what one turn allocated, in bodies."""

    system: str
    case: str
    tokens: int
    messages: int
    edits: int
    cpu_ms: float
    scan_ms: float
    bodies: float | None

    @property
    def barred(self) -> bool:
        """Whether there is a bar for this row."""
        return self.system == "ctxgate" and self.tokens == TOKENS[-1] and self.case in BARRED

    @property
    def ratio(self) -> float:
        """CPU time in scans of the body."""
        return self.cpu_ms / self.scan_ms


class MemoryStore:
    """A form store in memory."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, bytes], bytes] = {}

    async def claim(
        self, tenant: str, claims: Mapping[bytes, bytes], reads: Collection[bytes], now_us: int
    ) -> dict[bytes, bytes]:
        del now_us
        for key, text in claims.items():
            self._texts.setdefault((tenant, key), text)
        return {key: self._texts[tenant, key] for key in (*claims, *reads) if (tenant, key) in self._texts}

    async def forget(self, unused_since_us: int, limit: int) -> int:
        """Nothing is ever dropped."""
        del unused_since_us, limit
        return 0


def measure(*, quick: bool = False) -> list[Cost]:
    """All cases at all sizes."""
    sizes, turns = TOKENS[:1] if quick else TOKENS, 3 if quick else TURNS
    found = [asyncio.run(_measured(case, tokens, turns)) for tokens in sizes for case in CASES]
    windows = {NOTHING_RECORDED: None, COMPACTED: int(sizes[-1] * WINDOW_SHARE)}
    found += [asyncio.run(_context(case, window, sizes[-1], turns)) for case, window in windows.items()]
    return found


async def _context(case: str, window: int | None, tokens: int, turns: int) -> Cost:
    forms = Forms(MemoryStore())
    bench = ContextBench(LayoutStage(forms, _refuse), forms, window)
    raws = _turns(CASES[0], tokens, turns)
    cpu, scan, messages, edits, bodies = await bench.measured(raws, _identified, _SAFE)
    return Cost("ctxgate", case, tokens, messages, edits, cpu, scan, bodies)


async def _measured(case: Case, tokens: int, turns: int) -> Cost:
    stage = LayoutStage(Forms(MemoryStore()), _refuse)
    spent: list[float] = []
    scans: list[float] = []
    edits, last = 0, b""
    for raw in _turns(case, tokens, turns):
        began = time.process_time()
        wire.parse(raw)
        scans.append(time.process_time() - began)
        identified = _identified(raw)
        began = time.process_time()
        edits = await _plan(stage, identified, case.policy)
        spent.append(time.process_time() - began)
        last = raw
    identified = _identified(last)
    tracemalloc.start()
    await _plan(stage, identified, case.policy)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The first turn is new as a whole: not what is measured.
    cpu, scan = (1000 * statistics.median(each[1:]) for each in (spent, scans))
    messages = len(identified.inbound.messages)
    return Cost("ctxgate", case.name, tokens, messages, edits, cpu, scan, peak / len(last))


async def _plan(stage: LayoutStage, identified: Identified, policy: Policy) -> int:
    laid = await stage.lay_out(identified, policy, now_us=0)
    plan = planning.plan(
        laid.body, stream=True, served_model=None, continuous_usage=False, laid=laid.reasons, cache_salt="s"
    )
    return plan.layout_edits


def _refuse(reason: str) -> None:
    raise AssertionError(f"edits were dropped: {reason}")


def _identified(raw: bytes) -> Identified:
    body = wire.parse(raw)
    messages = tuple(body.items("messages"))
    inbound = Inbound("r", Surface.CHAT, {}, body, messages, "mock", stream=True, received_at_us=0)
    key = cast("Key", SimpleNamespace(organisation="acme", team="alpha"))
    return Identified(inbound, key, Task("t", "header"), b"root")


def _turns(case: Case, tokens: int, turns: int) -> Iterator[bytes]:
    """Requests that grow by two messages each; the last one is of the size asked for."""
    request = chat_request(tokens * BYTES_PER_TOKEN, TOOLS)
    messages = request["messages"]
    for turn in range(turns):
        count = len(messages) - 2 * (turns - 1 - turn)
        changed = [_habit(case.habit, message, turn) for message in messages[:count]]
        yield json.dumps({**request, "messages": changed}, separators=(",", ":")).encode()


def _habit(habit: str, message: dict[str, Any], turn: int) -> dict[str, Any]:
    if habit == "clock" and message["role"] == "system":
        return message | {"content": f"{message['content']}\n\nCurrent time: 2026-05-01T10:{turn:02}:00Z"}
    calls = message.get("tool_calls", ())
    if habit == "ids":
        calls = [call | {"id": f"{call['id']}-{turn}"} for call in calls]
        if "tool_call_id" in message:
            return message | {"tool_call_id": f"{message['tool_call_id']}-{turn}"}
    if habit == "spaces" and turn:  # the first turn is the form first seen
        calls = [call | {"function": _spaced(call["function"])} for call in calls]
    return message | {"tool_calls": calls} if calls else message


def _spaced(function: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(json.loads(function["arguments"]), separators=(" , ", " : "))
    return function | {"arguments": arguments}


# ---- peers --------------------------------------------------------------------------------------

_COUNTERS: Final = {
    "litellm": (
        "token_counter",
        "import litellm\n"
        "def count(request):\n"
        "    return litellm.token_counter('gpt-4', messages=request['messages'], tools=request['tools'])\n",
    ),
    "headroom": (
        "count_messages",
        "from headroom.tokenizers import get_tokenizer\n"
        "counter = get_tokenizer('gpt-4')\n"
        "def count(request):\n"
        "    return counter.count_messages(request['messages'])\n",
    ),
}
# tiktoken would fetch its vocabulary; LiteLLM carries a copy of that of gpt-4.
_VOCABULARY: Final = "lib/python*/site-packages/litellm/litellm_core_utils/tokenizers"
_OFFLINE: Final = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HEADROOM_OFFLINE": "1",
    "HEADROOM_TELEMETRY": "off",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
_HARNESS: Final = """
import json, sys, time
{counter}
raw = open(sys.argv[1], "rb").read()
request = json.loads(raw)
count(request)
spent = []
for _ in range(int(sys.argv[2])):
    began = time.process_time()
    count(request)
    spent.append(1000 * (time.process_time() - began))
print(json.dumps(sorted(spent)[len(spent) // 2]))
"""


def installed_peers() -> dict[str, Path]:
    """By peer, the interpreter of the environment that `make bench-peers` installs it in."""
    pythons = {name: HOME / name / "bin" / "python" for name in _COUNTERS}
    return {name: python for name, python in pythons.items() if (HOME / name / "installed").exists()}


def measure_peer(name: str, python: Path, own: Sequence[Cost], *, quick: bool = False) -> list[Cost]:
    """What a peer spends to count the tokens of the same bodies, beside the scan of the same run.

    Raises `subprocess.SubprocessError` where it does not work.
    """
    what, counter = _COUNTERS[name]
    found: list[Cost] = []
    for cost in [each for each in own if each.system == "ctxgate" and each.case == CASES[0].name]:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            file.write(next(_turns(CASES[0], cost.tokens, 1)))
            file.flush()
            code = _HARNESS.format(counter=counter)
            command = [str(python), "-c", code, file.name, "1" if quick else "5"]
            done = subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                timeout=PEER_TIMEOUT_S,
                env=os.environ | _OFFLINE | _vocabulary(),
            )
        cpu = float(done.stdout.split()[-1])
        found.append(Cost(name, what, cost.tokens, cost.messages, 0, cpu, cost.scan_ms, None))
    return found


def _vocabulary() -> dict[str, str]:
    found = next((HOME / "litellm").glob(_VOCABULARY), None)
    return {} if found is None else {"TIKTOKEN_CACHE_DIR": str(found)}
