"""`ctxgate check`: every problem of a configuration with its line, or what the file says in short."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.config_load import ConfigError, read
from ctxgate.gateway.config_summary import as_json, as_text

if TYPE_CHECKING:
    import argparse

DEFAULT_CONFIG: Final = Path("configs/ctxgate.yaml")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "-c", "--config", type=Path, default=DEFAULT_CONFIG, help=f"configuration (default: {DEFAULT_CONFIG})"
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")


def run(args: argparse.Namespace) -> int:
    """Print problems (exit code 1), or warnings and a summary (exit code 0)."""
    try:
        loaded = read(args.config)
    except ConfigError as error:
        if args.json:
            print(json.dumps({"ok": False, "problems": [asdict(one) for one in error.problems]}, indent=2))
        else:
            print(error)
            count = len(error.problems)
            print(f"{count} problem{'' if count == 1 else 's'}")
        return 1
    if args.json:
        warnings = [asdict(one) for one in loaded.warnings]
        print(json.dumps({"ok": True, "warnings": warnings, "config": as_json(loaded.config)}, indent=2))
        return 0
    for warning in loaded.warnings:
        print(replace(warning, message=f"warning: {warning.message}"), file=sys.stderr)
    print(as_text(loaded.config, str(args.config)), end="")
    return 0
