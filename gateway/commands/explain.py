"""`ctxgate explain`: what a request would miss of the cache another one left, or what layout makes of it.

With a configuration also where it would go, and why. Nothing is sent.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ctxgate.compression.diverge import NotChat, diverge
from ctxgate.compression.marks import MarkError
from ctxgate.compression.policy import LEVELS, Level, Policy
from ctxgate.compression.volatile import VolatileKind
from ctxgate.gateway.config_load import ConfigError, load
from ctxgate.gateway.context_terms import asked_output
from ctxgate.gateway.explain import Explanation, Price, as_json, as_text
from ctxgate.gateway.explain_count import Renderer, count
from ctxgate.gateway.explain_plan import PlanOf, Team, plan_as_json, plan_as_text, plan_of
from ctxgate.gateway.explain_route import Asked, route_as_text, route_of, route_record
from ctxgate.gateway.extras import NEEDS_TWIN
from ctxgate.gateway.speeds import Speeds
from ctxgate.inference import wire
from ctxgate.inference.estimate import TokenRatio, estimate_prompt_tokens
from ctxgate.routing import tiers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ctxgate.gateway.config import Config
    from ctxgate.inference.wire import Body
    from ctxgate.routing.candidates import RouteDecision

_ROUTE_HEADERS: Final = {
    tiers.CLASS_HEADER: f"the class of its job, of {', '.join(tiers.JobClass)}",
    tiers.TTFT_HEADER: "milliseconds to the first token",
    tiers.LATENCY_HEADER: "milliseconds to the last one",
}
DEFAULT_BLOCK_SIZE: Final = 16  # vLLM's own default on GPUs


class Unusable(Exception):
    """A file or an argument that cannot be explained; the text says why."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("--request", type=Path, required=True, metavar="A.json", help="the chat request that was sent first")
    add(
        "--after",
        type=Path,
        metavar="B.json",
        help="the one sent after it, to be explained; without it, what layout would make of the first",
    )
    add(
        "--layout",
        choices=LEVELS,
        help="the layout level; with --after, of both, which are compared as they came where neither this "
        "nor --volatile is given (default without --after: declared)",
    )
    add(
        "--volatile",
        type=_kinds,
        metavar="KIND,...",
        help=f"what is declared volatile at that level, of {', '.join(VolatileKind)} (default: all)",
    )
    add("--json", action="store_true", help="the same as JSON")
    add(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="model folder to count with: tokenizer.json and tokenizer_config.json (default: the twin's)",
    )
    add(
        "--block-size", type=_positive, default=DEFAULT_BLOCK_SIZE, metavar="N", help="tokens per cache block"
    )
    add(
        "-c",
        "--config",
        type=Path,
        help="configuration whose rates price what is lost, and whose pools serve it",
    )
    route = parser.add_argument_group("where it would go (with --config)")
    route.add_argument("--team", metavar="NAME", help="the team whose classes of jobs count")
    for header, about in _ROUTE_HEADERS.items():
        route.add_argument(_flag(header), dest=header, metavar="VALUE", help=about)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _kinds(text: str) -> frozenset[VolatileKind]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in [*VolatileKind]:
            raise argparse.ArgumentTypeError(f"unknown kind {name!r}; known: {', '.join(VolatileKind)}")
    return frozenset(VolatileKind(name) for name in names)


def run(args: argparse.Namespace) -> int:
    """Print the explanation; 2 for files or arguments that allow none."""
    try:
        print(_plan(args) if args.after is None else _explanation(args), end="")
    except Unusable as error:
        print(f"ctxgate explain: {error}", file=sys.stderr)
        return 2
    return 0


def _flag(header: str) -> str:
    return f"--{header.removeprefix('x-ctxgate-')}"


def _plan(args: argparse.Namespace) -> str:
    body = _body(args.request)
    plan = _plan_of(args.request, body, _policy(args), Team())
    text = plan_as_json(plan) if args.json else plan_as_text(plan)
    if args.config is None:
        return text
    prompt = estimate_prompt_tokens(len(plan.after), TokenRatio()).value or 0
    return _with_route(text, *_route(args, body, prompt), json_too=args.json)


def _with_route(text: str, decision: RouteDecision, asked: Asked, *, json_too: bool) -> str:
    if json_too:
        document = json.loads(text) | {"route": route_record(decision, asked)}
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    return f"{text}\n{route_as_text(decision, asked)}"


def _route(
    args: argparse.Namespace, body: Body, prompt: int, before: Body | None = None, cached: int = 0
) -> tuple[RouteDecision, Asked]:
    """The decision on a request, `cached` tokens of which lie where the one before it went."""
    config = _config(args.config)
    name = body.value("model")
    model = config.models.get(name) if isinstance(name, str) else None
    if model is None:
        raise Unusable(f"{args.config}: the request's model is not in it; known are {_names(config.models)}")
    team = config.teams.get(args.team) if args.team is not None else None
    if team is None and args.team is not None:
        raise Unusable(f"{args.config}: there is no team {args.team}; known are {_names(config.teams)}")
    headers = {header: value for header in _ROUTE_HEADERS if (value := getattr(args, header)) is not None}
    try:
        job, budget = tiers.asked(
            headers, body.value("service_tier"), tiers.TEAMLESS if team is None else team.classes
        )
    except tiers.BadTier as error:
        raise Unusable(str(error).replace(f"Header '{error.header}'", _flag(error.header))) from None
    speeds = Speeds(config.pools.values())
    output = speeds.lengths.expected("", model.name, job, asked_output(body))
    asked = Asked(blake2b((before or body).raw, digest_size=32).digest(), prompt, output, budget)
    day = datetime.now(UTC).date()
    decision = route_of(config, model, asked, day, speeds.of)
    if decision is not None and cached:
        hits = {(decision.pool, decision.replica): cached}
        decision = route_of(config, model, asked, day, speeds.of, hits)
    if decision is None:
        raise Unusable(f"{args.config}: no replica serves the request's model")
    return decision, asked


def _names(known: Iterable[str]) -> str:
    return ", ".join(sorted(known)) or "none"


def _config(path: Path) -> Config:
    try:
        return load(path)
    except ConfigError as error:
        raise Unusable(str(error)) from None


def _policy(args: argparse.Namespace) -> Policy:
    level = Level.DECLARED if args.layout is None else Level(args.layout)
    return Policy(level, kinds=frozenset(VolatileKind) if args.volatile is None else args.volatile)


def _plan_of(path: Path, body: Body, policy: Policy, team: Team) -> PlanOf:
    try:
        return plan_of(path.name, body, policy, team)
    except MarkError as error:
        raise Unusable(f"{path}: {error}") from None


def _explanation(args: argparse.Namespace) -> str:
    explanation = _explain(args)
    text = as_json(explanation) if args.json else as_text(explanation)
    if args.config is None:
        return text
    tokens = explanation.tokens
    before, after = _body(args.request), _body(args.after)
    route = _route(args, after, tokens.prompt, before, tokens.cached)
    return _with_route(text, *route, json_too=args.json)


def _explain(args: argparse.Namespace) -> Explanation:
    before, after = _body(args.request), _body(args.after)
    price = None if args.config is None else _price(args.config, after)
    policy = None if args.layout is args.volatile is None else _policy(args)
    if policy is not None:
        team = Team()
        before, after = (
            wire.parse(_plan_of(path, body, policy, team).after)
            for path, body in ((args.request, before), (args.after, after))
        )
    renderer = _renderer(args.tokenizer)
    try:
        first = diverge(before, after)
        effective = first if first.rendered else diverge(before, after, rendered_only=True)
    except NotChat as error:
        raise Unusable(str(error)) from None
    tokens, spans = count(before, after, effective, renderer, args.block_size)
    level = None if policy is None else policy.level.value
    return Explanation(args.request.name, args.after.name, first, effective, tokens, spans, price, level)


def _body(path: Path) -> Body:
    try:
        body = wire.parse(path.read_bytes())
    except FileNotFoundError:
        raise Unusable(f"{path}: there is no such file") from None
    except OSError as error:
        raise Unusable(f"{path}: cannot be read: {error.strerror}") from None
    except (wire.NotJson, wire.NotAnObject) as error:
        raise Unusable(f"{path}: {error}") from None
    try:
        request: dict[str, Any] = msgspec.json.decode(body.raw)
    except msgspec.DecodeError as error:  # a text or a number that no reader takes
        raise Unusable(f"{path}: is not valid JSON: {error}") from None
    problem = next(_problems(request), None)
    if problem is not None:
        raise Unusable(f"{path}: {problem}")
    # White space between JSON tokens reaches no prompt: without it the first difference is one of content.
    return wire.parse(msgspec.json.format(body.raw, indent=-1))


def _problems(request: dict[str, Any]) -> Iterator[str]:
    """What keeps a body from being a chat request, in the words of its fields."""
    messages, tools = request.get("messages"), request.get("tools")
    if not isinstance(messages, list) or not messages:
        yield "is no chat request: `messages` must be an array with at least one message"
        return
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            yield f"`messages[{at}]` must be an object with a `role`"
        elif not _is_content(message.get("content")):
            yield f"`messages[{at}].content` must be a string or an array of parts"
        elif not isinstance(message.get("tool_calls"), list | None):
            yield f"`messages[{at}].tool_calls` must be an array"
    if not isinstance(tools, list | None):
        yield "`tools` must be an array"
        return
    for at, tool in enumerate(tools or ()):
        if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
            yield f"`tools[{at}]` must be an object with a `function`"


def _is_content(content: object) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, str | dict) for part in content)
    return isinstance(content, str | None)


def _renderer(folder: Path | None) -> Renderer | None:
    try:
        return Renderer.load(folder)
    except ImportError:
        if folder is None:
            return None
        raise Unusable(f"--tokenizer {NEEDS_TWIN}") from None
    except ValueError as error:
        raise Unusable(str(error)) from None


def _price(path: Path, after: Body) -> Price:
    """The rates of the default pool of the model that the second request asks for, of today (UTC)."""
    config = _config(path)
    name = after.value("model")
    model = config.models.get(name) if isinstance(name, str) else None
    if model is None:
        known = ", ".join(sorted(config.models))
        raise Unusable(f"{path}: the second request's model is not in it; known are {known}")
    pool = config.pools[model.pools[0]]
    return Price(pool.name, pool.rates, datetime.now(UTC).date())
