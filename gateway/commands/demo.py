"""`ctxgate demo`: two twins, the gateway and a working agent; then what the gateway measured.

Nothing outside this machine is contacted and nothing is left behind: the servers listen on loopback,
the key is made for this run, and configuration, ledger and logs live in a temporary folder.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import ctxgate
from ctxgate.gateway.config_load import load
from ctxgate.gateway.demo import CASES, MODELS, PLAIN, TEAMS, Stage, compare, config_text, most
from ctxgate.gateway.demo_agent import Toolbox, work
from ctxgate.gateway.demo_script import SYSTEM, review
from ctxgate.gateway.demo_servers import ServerFailed, Servers, ctxgate_command
from ctxgate.gateway.demo_words import comparison
from ctxgate.gateway.extras import NEEDS_TWIN
from ctxgate.gateway.keys import RANDOM_BYTES, new_key
from ctxgate.gateway.replay_client import Backend, BackendError
from ctxgate.gateway.replay_count import PromptCounter
from ctxgate.gateway.replay_table import Progress

if TYPE_CHECKING:
    import argparse

    from ctxgate.gateway.demo import Compared
    from ctxgate.gateway.sessions import Session

_DEFAULT_TURNS: Final = 24
_DEFAULT_BLOCK_SIZE: Final = 16
_SHOWN_CALLS: Final = 3


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--once", action="store_true", help="end after the tables instead of serving on")
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="the gateway's port (default: a free one)"
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=_DEFAULT_TURNS,
        metavar="N",
        help="requests of the agent (default: %(default)s)",
    )
    parser.add_argument("--no-color", action="store_true", help="no colour on a terminal")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0 if every request was answered, 1 if not, 2 if it could not be set up.

    A signal before the tables gives 128 and its number, as in a shell.
    """
    if args.turns < 1 or not 0 <= args.port < 2**16:
        print("ctxgate demo: --turns starts at 1, --port is a TCP port", file=sys.stderr)
        return 2
    try:
        return asyncio.run(_until_signal(args))
    except ImportError as error:
        print(f"ctxgate demo: {error.name} is missing; the demo {NEEDS_TWIN}", file=sys.stderr)
    except (ServerFailed, BackendError, OSError) as error:
        print(f"ctxgate demo: {error}", file=sys.stderr)
    return 2


async def _until_signal(args: argparse.Namespace) -> int:
    """The demo, ended in order (its children too) by Ctrl-C, SIGTERM or a closed terminal."""
    demo = asyncio.ensure_future(_demo(args))
    received: list[int] = []

    def end(number: int) -> None:
        received.append(number)
        demo.cancel()

    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(each, end, each)
    try:
        return await demo
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]


async def _demo(args: argparse.Namespace) -> int:
    tokenize = PromptCounter()
    with tempfile.TemporaryDirectory(prefix="ctxgate-demo-") as name:
        folder = Path(name)
        session = _work(args.turns)
        async with Servers(folder) as servers:
            stage = await _set_up(servers, folder, args.port)
            compared = await _compare(stage, session)
            bound = most(session, tokenize, stage.block_size)
            color = sys.stdout.isatty() and not args.no_color and not os.environ.get("NO_COLOR")
            print("\n" + comparison(compared, bound, color=color))
            failed = sum(each.direct.failed + each.through.failed for each in compared)
            code = await _print_ledger(folder)
            if not args.once and not failed and not code:
                _print_invitation(stage)
                return await _serve_on(servers)
    return 1 if failed or code else 0


async def _serve_on(servers: Servers) -> int:
    """Wait for a signal, which is the way to end a demo that has shown its tables."""
    try:
        print("ctxgate demo: " + await servers.first_to_end(), file=sys.stderr)
    except asyncio.CancelledError:
        return 0
    return 1


def _work(turns: int) -> Session:
    toolbox = Toolbox(Path(next(iter(ctxgate.__path__))))
    calls: list[str] = []
    session = work("review", SYSTEM, review(), toolbox, turns, calls.append)
    print(
        f"An agent has reviewed ctxgate's own sources in {session.requests} requests, each with the whole "
        f"conversation so far, and {len(calls)} tool calls:"
    )
    for line in calls[:_SHOWN_CALLS]:
        print(f"  {line}")
    if len(calls) > _SHOWN_CALLS:
        print(f"  and {len(calls) - _SHOWN_CALLS} more")
    print()
    return session


async def _set_up(servers: Servers, folder: Path, port: int) -> Stage:
    """Start twins and gateway and ask them what they are."""
    for name in MODELS:
        await servers.spawn(name, ["twin", "--profile", name, "--port", "0"])
    twins = {name: await servers.wait(name) for name in MODELS}
    async with Backend(twins["standard"]) as backend:
        served = (await backend.models())[0]
        block_size = await backend.block_size()
    keys = {team: new_key(secrets.token_bytes(RANDOM_BYTES)) for team in TEAMS}
    day = datetime.now(UTC).date()
    path = folder / "ctxgate.yaml"
    sha256s = {team: digest.hex() for team, (_, digest) in keys.items()}
    text = config_text(twins, served.name, port, folder / "ledger.db", sha256s, day)
    path.write_text(text, encoding="utf-8")
    gateway = await servers.start("gateway", ["serve", "--config", str(path)], ready="/ready")
    for name, url in {**twins, "gateway": gateway}.items():
        print(f"  {name:<9} {url}")
    return Stage(
        twins=twins,
        gateway=gateway,
        keys={team: secret for team, (secret, _) in keys.items()},
        served=served.name,
        rates={name: pool.rates for name, pool in load(path).pools.items()},
        day=day,
        block_size=block_size or _DEFAULT_BLOCK_SIZE,
    )


async def _compare(stage: Stage, session: Session) -> list[Compared]:
    progress = Progress(sys.stderr, 2 * len(CASES) * session.requests)
    try:
        return [await compare(stage, session, case, progress.step) for case in CASES]
    finally:
        progress.close()


async def _print_ledger(folder: Path) -> int:
    """Print `ctxgate report` over the run's ledger; its exit code."""
    print("\nWhat the gateway booked (ctxgate report --by task):")
    sys.stdout.flush()
    command = ctxgate_command(["report", "--by", "task", "--db", str(folder / "ledger.db")])
    child = await asyncio.create_subprocess_exec(*command)
    return await child.wait()


def _print_invitation(stage: Stage) -> None:
    model, key = next(iter(MODELS.values())), stage.keys[PLAIN]
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello."}}]}}'
    print(
        f"\nServing on until Ctrl-C. Base URL {stage.gateway}/v1, key {key}, models "
        f"{', '.join(MODELS.values())}. For example:\n\n"
        f"  curl {stage.gateway}/v1/chat/completions -H 'authorization: Bearer {key}' \\\n"
        f"    -H 'content-type: application/json' -H 'x-ctxgate-task: my-task' -d '{body}'\n"
        f"  curl '{stage.gateway}/v1/usage?by=task' -H 'authorization: Bearer {key}'\n",
        flush=True,
    )
