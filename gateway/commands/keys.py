"""`ctxgate keys`: make a client key, or hash one that exists. Only the hash is for the configuration."""

from __future__ import annotations

import getpass
import json
import secrets
import sys
from typing import TYPE_CHECKING

from ctxgate.gateway import keys
from ctxgate.gateway.config_kinds import Name

if TYPE_CHECKING:
    import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare `new` and `hash`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser("new", help="make a key; the secret is shown once and stored nowhere")
    new.add_argument("--id", required=True, metavar="ID", help="public name of the key in ledger and logs")
    new.add_argument("--team", required=True, metavar="TEAM", help="the team that the key spends for")
    new.add_argument("--json", action="store_true", help="secret and entry as JSON")
    actions.add_parser("hash", help="read a secret from standard input and print its SHA-256")


def run(args: argparse.Namespace) -> int:
    """Run one action; 2 for an unusable name or secret."""
    return _new(args) if args.action == "new" else _hash()


def _new(args: argparse.Namespace) -> int:
    for option, what in (("id", "the id of a key"), ("team", "the name of a team")):
        problem = Name(what).problem(getattr(args, option))
        if problem:
            print(f"ctxgate keys new: --{option}: {problem}", file=sys.stderr)
            return 2
    secret, digest = keys.new_key(secrets.token_bytes(keys.RANDOM_BYTES))
    entry = {"id": args.id, "team": args.team, "sha256": digest.hex()}
    if args.json:
        print(json.dumps({"secret": secret, "entry": entry}))
        return 0
    print("# The secret, shown this once: give it to the client as its API key.")
    print(secret)
    print("# The entry for `keys:` in the configuration; it holds only the hash.")
    print(f'- {{id: "{args.id}", team: "{args.team}", sha256: "{digest.hex()}"}}')
    return 0


def _hash() -> int:
    try:
        secret = getpass.getpass("Secret (not shown): ") if sys.stdin.isatty() else _one_line()
    except UnicodeDecodeError:
        secret = ""  # no token either; the message below fits
    problem = keys.secret_problem(secret)
    if problem:
        print(f"ctxgate keys hash: {problem}", file=sys.stderr)
        return 2
    print(keys.digest(secret).hex())
    return 0


def _one_line() -> str:
    """Standard input without its last line end; further lines make it no secret."""
    return sys.stdin.read(keys.MAX_SECRET_CHARS + 3).removesuffix("\n").removesuffix("\r")
