"""`ctxgate pools command | up | down`: the servers of pools that the configuration says how to start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.pool_launch import NotLaunchable, servers

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from ctxgate.gateway.config import Config

READY_S: Final = 900.0


def _pool(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", nargs="?", metavar="POOL", help="this pool only")


def _state(parser: argparse.ArgumentParser) -> None:
    _pool(parser)
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FOLDER",
        help="where logs and the records of what runs lie (default: pools-state beside the ledger)",
    )


def _wait(parser: argparse.ArgumentParser) -> None:
    _state(parser)
    parser.add_argument(
        "--wait",
        type=float,
        default=READY_S,
        metavar="SECONDS",
        help=f"how long the servers may take until they are ready (default: {READY_S:.0f})",
    )


ACTIONS: Final[Mapping[str, tuple[str, Callable[[argparse.ArgumentParser], None]]]] = {
    "command": ("print the lines that start the pools' vLLM servers, for a shell", _pool),
    "up": ("start the pools' vLLM servers and wait until they are ready", _wait),
    "down": ("end the servers that `up` started, and no others", _state),
}


def run(config: Config, args: argparse.Namespace) -> int:
    """Do one of the actions; 1 where it failed, saying why."""
    from ctxgate.gateway import pool_processes as processes  # noqa: PLC0415 - only what starts servers needs it

    try:
        if args.action == "command":
            for server in servers(config, args.pool):
                print(f"# {server.pool}/{server.replica}\n{server.launch.line()}")
            return 0
        state = processes.State(args.state or config.store.parent / "pools-state")
        if args.action == "down":
            if not processes.down(state, args.pool, _say):
                _say("nothing that `ctxgate pools up` started runs")
            return 0
        processes.up(servers(config, args.pool), state, _say, args.wait)
    except (NotLaunchable, processes.ServersFailed) as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"the state folder cannot be used: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; what was being started has been ended", file=sys.stderr)
        return 130
    return 0


def _say(line: str) -> None:
    print(line, flush=True)
