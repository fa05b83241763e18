"""`ctxgate replay`: play recorded agent sessions against a gateway or a pool, and say what they cost.

With `--policies` nothing is sent: what each compaction policy would cost follows from the recording.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from argparse import ArgumentTypeError
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ctxgate.compression.schedule import TRIGGERS
from ctxgate.gateway import policy_table, replay_policies
from ctxgate.gateway.config import Context
from ctxgate.gateway.extras import NEEDS_TWIN
from ctxgate.gateway.perturb import Perturbation, parse_perturbations
from ctxgate.gateway.replay import as_json, summarize
from ctxgate.gateway.replay_client import Backend, BackendError
from ctxgate.gateway.replay_count import PromptCounter
from ctxgate.gateway.replay_run import Plan, Player
from ctxgate.gateway.replay_table import Progress, report
from ctxgate.gateway.sessions import Session, SessionError, read_session
from ctxgate.inference.oracle import PrefixOracle

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from ctxgate.gateway.replay import Played
    from ctxgate.gateway.replay_client import ServedModel
    from ctxgate.gateway.replay_run import Tokenize

T = TypeVar("T")

DEFAULT_BLOCK_SIZE: Final = 16  # vLLM's own default on GPUs
_KEY_VARIABLE: Final = "CTXGATE_KEY"
_INTERRUPTED: Final = 130


class Unusable(Exception):
    """The arguments, or the server behind them, do not allow a replay."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run needs to know about the server, and how it is known."""

    plan: Plan
    block_size: int
    block_size_assumed: bool


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    kinds = ", ".join(sorted(kind.value for kind in Perturbation))
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="sessions in JSONL: a header, then chat messages")
    _configure_policies(parser)
    key = parser.add_mutually_exclusive_group()
    key.add_argument("--key", help="client key; visible to other users of this machine, unlike --key-env")
    key.add_argument(
        "--key-env",
        default=_KEY_VARIABLE,
        metavar="NAME",
        help="variable with the key (default: %(default)s)",
    )
    add("--model", help="model to ask for (default: the first one served)")
    add("--task-prefix", default="", metavar="P", help="put before the session's name in x-ctxgate-task")
    add("--perturb", default="", metavar="LIST", help=f"what a real client does to its prompts: {kinds}")
    streams = parser.add_mutually_exclusive_group()
    streams.add_argument("--stream", action="store_true", default=True, help="stream answers (default)")
    streams.add_argument("--no-stream", action="store_false", dest="stream", help="no streams, and no TTFT")
    add(
        "--max-tokens",
        type=_positive,
        default=16,
        metavar="N",
        help="output per request (default: %(default)s)",
    )
    add("--max-requests", type=_positive, metavar="N", help="play at most N requests of each session")
    add(
        "--max-context",
        type=_positive,
        metavar="N",
        help="end a session before a prompt of N tokens or more (default: the model's max_model_len)",
    )
    add(
        "--concurrency",
        type=_positive,
        default=1,
        metavar="N",
        help="sessions at once (default: %(default)s)",
    )
    add(
        "--block-size", type=_positive, metavar="N", help="tokens per cache block (default: as /metrics says)"
    )
    add(
        "--tokenizer", type=Path, metavar="DIR", help="model folder for the local count (default: the twin's)"
    )
    add("--json", action="store_true", help="print JSON")
    add("--no-color", action="store_true", help="no colour on a terminal")


def _configure_policies(parser: argparse.ArgumentParser) -> None:
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--to", metavar="URL", help="base URL of the gateway or of a vLLM server")
    target.add_argument(
        "--policies",
        action="store_true",
        help="send nothing: the dollars of each session by compaction policy, after the recording",
    )
    group = parser.add_argument_group("with --policies")
    group.add_argument(
        "--twin",
        action="store_true",
        help="also play every policy through the whole gateway against a twin, and compare; takes minutes",
    )
    group.add_argument(
        "--rates",
        action="append",
        type=_argument(replay_policies.parse_rates),
        metavar="U/C/W/O",
        help="dollars per million uncached, cached, written and output tokens; may be repeated"
        f" (default: {', '.join(replay_policies.DEFAULT_RATES)})",
    )
    group.add_argument(
        "--shape",
        type=_argument(replay_policies.parse_shape),
        default=replay_policies.DEFAULT_SHAPE,
        metavar="P/S/K/O",
        help="tokens of the stable prefix, the summary, the kept tail and the summary call's output"
        " (default: %(default)s); with --twin only the summary and the tail count, the rest is measured",
    )
    group.add_argument(
        "--triggers",
        type=_argument(replay_policies.parse_triggers),
        default=TRIGGERS,
        metavar="LIST",
        help=f"fixed prompt lengths to compact at (default: {','.join(map(str, TRIGGERS))})",
    )


def _argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A parser whose ValueErrors argparse shows as they are."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None

    return parsed


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def run(args: argparse.Namespace) -> int:
    """Play and print; 0 if every request was answered, 1 if one failed, 2 if nothing could be played."""
    try:
        if args.policies:
            sessions = read_sessions(args.files)
            return _through_twin(args, sessions) if args.twin else _policies(args, sessions)
        if args.twin:
            raise Unusable("--twin goes with --policies")
        if not args.to.startswith(("http://", "https://")):
            raise Unusable(f"--to {args.to}: must begin with http:// or https://")
        perturbations = parse_perturbations(args.perturb)
        sessions = read_sessions(args.files)
        tokenize = load_tokenizer(args.tokenizer)
        return asyncio.run(_replay(args, sessions, perturbations, tokenize))
    except (Unusable, SessionError, BackendError, OSError, ValueError) as error:
        print(f"ctxgate replay: {error}", file=sys.stderr)
        return 2


def _policies(args: argparse.Namespace, sessions: list[Session]) -> int:
    rates = args.rates or [replay_policies.parse_rates(each) for each in replay_policies.DEFAULT_RATES]
    tables = [replay_policies.policy_table(each, rates, args.shape, args.triggers) for each in sessions]
    if args.json:
        print(json.dumps({"policies": replay_policies.as_json(tables)}, indent=2, ensure_ascii=False))
    else:
        print(replay_policies.as_text(tables, color=_color(args)))
    return 0


def _through_twin(args: argparse.Namespace, sessions: list[Session]) -> int:
    """Model and gateway side by side; 1 where they differ in order."""
    try:
        from ctxgate.gateway import replay_policies_check as check  # noqa: PLC0415 - a command of its own
        from ctxgate.gateway.replay_policies_all import Unplayable, compare  # noqa: PLC0415 - needs an extra
    except ImportError:
        raise Unusable(f"--twin {NEEDS_TWIN}") from None
    rates = args.rates or [replay_policies.parse_rates(replay_policies.DEFAULT_RATES[0])]
    # What recall brings back is no part of the model.
    context = Context(tail_tokens=args.shape.tail, summary_tokens=args.shape.summary, recall=False)
    documents: list[dict[str, Any]] = []
    agree = True
    for session in sessions:
        most = min(session.requests, args.max_requests or session.requests)
        for each in rates:
            progress = Progress(sys.stderr, most * (len(args.triggers) + 4))
            try:
                step = functools.partial(progress.step, session.name, 1)
                compared, sizes = asyncio.run(compare(session, each, args.triggers, most, step, context))
            except Unplayable as error:
                raise Unusable(f"{session.name}: {error}") from error
            finally:
                progress.close()
            agree = agree and check.same_order(compared)
            documents.append({"session": session.name, **check.as_json(compared, sizes)})
            if not args.json:
                print(f"{session.name}, the first {most:,} requests, at {policy_table.rates_of(each)}:")
                print(check.as_text(compared, sizes, color=_color(args)))
    if args.json:
        print(json.dumps({"through_the_gateway": documents}, indent=2, ensure_ascii=False))
    return 0 if agree else 1


def read_sessions(files: list[Path]) -> list[Session]:
    """All sessions, in the order given. Raises `SessionError`, or `Unusable` on equal names and no file."""
    sessions: dict[str, Session] = {}
    for file in files:
        try:
            session = read_session(file)
        except FileNotFoundError:
            raise Unusable(f"{file}: there is no such file") from None
        except OSError as error:
            raise Unusable(f"{file}: cannot be read: {error.strerror}") from None
        if session.name in sessions:
            raise Unusable(f"{file}: session {session.name!r} was given before; a task is one session")
        sessions[session.name] = session
    return list(sessions.values())


def load_tokenizer(folder: Path | None) -> Tokenize | None:
    """The local prompt counter, or None where its packages are missing and none was asked for."""
    try:
        return PromptCounter(folder)
    except ImportError:
        if folder is None:
            return None
        raise Unusable(f"--tokenizer {NEEDS_TWIN}") from None


async def _replay(
    args: argparse.Namespace,
    sessions: list[Session],
    perturbations: frozenset[Perturbation],
    tokenize: Tokenize | None,
) -> int:
    key = args.key or os.environ.get(args.key_env)
    async with Backend(args.to, key) as backend:
        setup = await prepare(backend, args, perturbations)
        requests = sum(min(s.requests, setup.plan.max_requests or s.requests) for s in sessions)
        progress = Progress(sys.stderr, requests)
        oracle = PrefixOracle(setup.block_size)
        player = Player(backend, setup.plan, oracle=oracle, tokenize=tokenize, progress=progress.step)
        interrupted = False
        try:
            await player.play(sessions)
        except asyncio.CancelledError:  # Ctrl-C: what was measured so far is still worth its table
            interrupted = True
        finally:
            progress.close()
    _print(args, player.played, setup, counted=tokenize is not None)
    if interrupted:
        return _INTERRUPTED
    return 1 if summarize(player.played).failed else 0


async def prepare(
    backend: Backend, args: argparse.Namespace, perturbations: frozenset[Perturbation]
) -> Setup:
    """Ask the server what the arguments leave open. Raises `BackendError` or `Unusable`."""
    model = _choose(await backend.models(), args.model)
    reported = None if args.block_size else await backend.block_size()
    block_size = args.block_size or reported
    plan = Plan(
        model=model.name,
        stream=args.stream,
        max_tokens=args.max_tokens,
        task_prefix=args.task_prefix,
        perturbations=perturbations,
        max_requests=args.max_requests,
        max_context=args.max_context or model.max_model_len,
        concurrency=args.concurrency,
    )
    return Setup(plan, block_size or DEFAULT_BLOCK_SIZE, block_size_assumed=block_size is None)


def _choose(models: list[ServedModel], name: str | None) -> ServedModel:
    if not models:
        raise Unusable("the server offers no model")
    if name is None:
        return models[0]
    for model in models:
        if model.name == name:
            return model
    raise Unusable(f"the server has no model {name!r}; it has {', '.join(model.name for model in models)}")


def _print(args: argparse.Namespace, played: list[Played], setup: Setup, *, counted: bool) -> None:
    if args.json:
        print(json.dumps(_json(played, setup, args), indent=2, ensure_ascii=False))
        return
    print(report(played, assumed=setup.block_size_assumed, color=_color(args)))
    if not counted:
        print(f"- no oracle: the local prompt count {NEEDS_TWIN}")


def _color(args: argparse.Namespace) -> bool:
    return sys.stdout.isatty() and not args.no_color and not os.environ.get("NO_COLOR")


def _json(played: list[Played], setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    plan = setup.plan
    sessions = [
        {
            "session": each.session,
            "task": each.task,
            "requests_recorded": each.requests_recorded,
            **as_json(summarize([each])),
            "stopped": each.stopped,
            "errors": [
                {"request": measure.turn + 1, "error": measure.error}
                for measure in each.measures
                if measure.error
            ],
        }
        for each in played
    ]
    return {
        "to": args.to,
        "model": plan.model,
        "stream": plan.stream,
        "max_tokens": plan.max_tokens,
        "max_context": plan.max_context,
        "perturbations": sorted(kind.value for kind in plan.perturbations),
        "block_size": setup.block_size,
        "block_size_assumed": setup.block_size_assumed,
        "sessions": sessions,
        "total": as_json(summarize(played)),
    }
