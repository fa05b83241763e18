"""`ctxgate probe-recall`: how far back a pool's model still finds what it was told, as table and heat map."""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ctxgate.gateway import recall_probe
from ctxgate.gateway.commands.check import DEFAULT_CONFIG
from ctxgate.gateway.config_load import ConfigError, read
from ctxgate.gateway.ledger import LedgerError
from ctxgate.gateway.recall_probe_picture import NEEDS_PICTURES, picture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.gateway.config import Config, Model
    from ctxgate.gateway.fleet import ReplicaRecord
    from ctxgate.gateway.recall_probe import Result

_LEAST_LENGTH: Final = 200  # tokens; a question alone takes about half of it


class Unusable(Exception):
    """The arguments, or what answers to them, do not allow a probe."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("--pool", required=True, help="the pool to ask; its replicas take turns")
    add(
        "-c", "--config", type=Path, default=DEFAULT_CONFIG, help=f"configuration (default: {DEFAULT_CONFIG})"
    )
    add("--model", help="the model to ask for (default: the only one that leads to the pool)")
    add(
        "--lengths",
        type=_numbers,
        metavar="LIST",
        help="prompt tokens, separated by commas (default: parts of the model's window)",
    )
    add(
        "--depths",
        type=_numbers,
        default=recall_probe.DEPTHS,
        metavar="LIST",
        help=f"per cent of the prompt before the needle (default: {','.join(map(str, recall_probe.DEPTHS))})",
    )
    add("--trials", type=int, default=1, metavar="N", help="needles per length and depth (default: 1)")
    add("--max-tokens", type=int, default=64, metavar="N", help="longest answer (default: %(default)s)")
    add(
        "--threshold",
        type=float,
        default=recall_probe.THRESHOLD,
        metavar="SHARE",
        help="of a length's needles, that must be found for it to be reliable (default: %(default)s)",
    )
    add("--patience", type=float, default=600.0, metavar="S", help="longest wait for one answer, in seconds")
    add("--out", type=Path, metavar="FILE", help="write the result there, for `models.NAME.recall_probe`")
    add("--picture", type=Path, metavar="FILE", help=f"write the heat map there, as PNG; {NEEDS_PICTURES}")
    add("--json", action="store_true", help="print the result instead of the table")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 4000,16000") from None


def run(args: argparse.Namespace) -> int:
    """Ask, print and write; 1 where it cannot be asked, saying why, 2 for an argument that is no good."""
    try:
        _check(args)
        config = read(args.config).config
        result = asyncio.run(_probed(config, args))
        if args.out is not None:
            args.out.write_bytes(recall_probe.encode(result))
        if args.picture is not None:
            args.picture.write_bytes(picture(result))
    except ImportError:
        return _failed(f"--picture {NEEDS_PICTURES}", 2)
    except (ConfigError, Unusable) as error:
        return _failed(str(error), 1)
    except ValueError as error:
        return _failed(str(error), 2)
    except (LedgerError, sqlite3.Error, OSError) as error:
        return _failed(f"the ledger, or a file to write, cannot be used: {error}", 1)
    sys.stdout.write(recall_probe.encode(result).decode() if args.json else recall_probe.as_text(result))
    return 0


def _failed(problem: str, code: int) -> int:
    print(f"ctxgate probe-recall: {problem}", file=sys.stderr)
    return code


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError for what makes no sense, ImportError where a picture cannot be drawn afterwards."""
    if args.lengths is not None and min(args.lengths) < _LEAST_LENGTH:
        raise ValueError(f"--lengths: a length has at least {_LEAST_LENGTH} tokens")
    if any(not 0 <= depth <= 100 for depth in args.depths):
        raise ValueError("--depths: a depth lies between 0 and 100 per cent")
    if min(args.trials, args.max_tokens) < 1 or args.patience <= 0:
        raise ValueError("--trials, --max-tokens and --patience are above 0")
    if not 0 < args.threshold <= 1:
        raise ValueError("--threshold lies above 0 and is at most 1")
    if args.picture is not None:
        import PIL  # noqa: F401, PLC0415 - before anything is asked and paid for


async def _probed(config: Config, args: argparse.Namespace) -> Result:
    from ctxgate.gateway.assembly import assembled  # noqa: PLC0415 - heavy: clients and the ledger
    from ctxgate.gateway.keys import KeyRing  # noqa: PLC0415 - as above
    from ctxgate.gateway.recall_probe_run import (  # noqa: PLC0415 - as above
        ProbeFailed,
        Questions,
        RecallProbe,
        records_up,
    )

    model = _model(config, args.pool, args.model)
    async with assembled(config, KeyRing(config.keys)) as services:
        up = await records_up(services, args.pool)
        if not up:
            raise Unusable(f"no replica of pool {args.pool} answers")
        window = _window(up, model)
        lengths = args.lengths
        if lengths is None:
            if window is None:
                raise Unusable("--lengths must be given: no replica reports the model's window")
            lengths = recall_probe.lengths_of(window)
        elif window is not None and max(lengths) > window:
            raise ValueError(
                f"--lengths: {max(lengths):,} is more than the model's window of {window:,} tokens"
            )
        questions = Questions(
            lengths, args.depths, args.trials, args.max_tokens, args.threshold, args.patience
        )
        try:
            return await RecallProbe(services, up, model, questions).run()
        except ProbeFailed as failed:
            raise Unusable(str(failed)) from failed


def _model(config: Config, pool: str, name: str | None) -> Model:
    """The model to ask for. Raises `Unusable`."""
    if pool not in config.pools:
        raise Unusable(f"there is no pool {pool}; known are {', '.join(config.pools)}")
    models = {one.name: one for one in config.models.values() if pool in one.pools}
    if name is not None and name not in models:
        raise Unusable(f"model {name} does not lead to pool {pool}; these do: {', '.join(models)}")
    if not models or (name is None and len(models) > 1):
        raise Unusable(f"--model must say which; to pool {pool} lead: {', '.join(models) or 'none'}")
    return models[name or next(iter(models))]


def _window(records: Sequence[ReplicaRecord], model: Model) -> int | None:
    """The smallest window that is known of the model."""
    told = [record.windows.get(model.engine_name) for record in records]
    known = [window for window in (model.window, *told) if window is not None]
    return min(known, default=None)
