"""The `ctxgate` command: one module per sub-command, imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING, Final

import ctxgate

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS: Final = {
    "serve": "run the gateway in front of the pools of a configuration",
    "check": "check a configuration; errors name file, line and field",
    "pools": "start, end, probe and compare the servers of the pools",
    "probe-recall": "ask a pool's model for needles in long prompts: how far back does it still find them",
    "keys": "make client keys; only their hashes are stored",
    "report": "tokens and dollars by task, team, pool, model or day",
    "explain": "what a request would miss of the cache another one left; nothing is sent",
    "replay": "play recorded agent sessions against a gateway or a pool",
    "simulate": "routing policies beside each other on a fleet of engine models; nothing is sent",
    "twin": "serve the model of a vLLM server, without a GPU",
    "demo": "two twins, the gateway and a working agent, then what it saved",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit code (2 for unusable arguments)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="ctxgate", description=ctxgate.__doc__)
    parser.add_argument("--version", action="version", version=ctxgate.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = next((a for a in arguments if not a.startswith("-")), None)
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        if name == asked:
            module = importlib.import_module(f"ctxgate.gateway.commands.{name.replace('-', '_')}")
            module.configure(sub)
            sub.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    code: int = args.run(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
