"""The configuration file -> `Config`, once, at start; everything that is wrong is said at once.

Three steps: read each value where it stands (`config_schema`), check what spans several values,
build the frozen values. The third step runs only on a file without problems.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from ctxgate.compression.volatile import VolatileKind
from ctxgate.gateway import config_context as c
from ctxgate.gateway import config_fields as f
from ctxgate.gateway.config import (
    Config,
    Context,
    Key,
    Limits,
    Listen,
    Model,
    Pool,
    Replica,
    Team,
    Tokenizer,
)
from ctxgate.gateway.config_engine import ENGINE
from ctxgate.gateway.config_events import KV_EVENTS, events_of
from ctxgate.gateway.config_pools import check_provider, engine_of, listed_rates, provider_of
from ctxgate.gateway.config_provider import PROVIDER
from ctxgate.gateway.config_routing import CLASSES, LOAD, MODEL_ROUTING, classes_of, policy_of
from ctxgate.gateway.config_rules import check
from ctxgate.gateway.config_speed import profile_of, speed_of
from ctxgate.gateway.config_yaml import ConfigError, Problem, Unreadable, compose
from ctxgate.gateway.extras import NEEDS_EVENTS, has_events
from ctxgate.inference.provider_wire import provider_url
from ctxgate.inference.rates import RateCard, Rates

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import date

    from ctxgate.gateway.config_schema import Values

MAX_FILE_BYTES: Final = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Loaded:
    """A usable configuration, and what in it works but is probably not meant."""

    config: Config
    warnings: tuple[Problem, ...]


def load(path: Path | str) -> Config:
    """The configuration in a file, for the environment and the day (UTC) of this process.

    Raises ConfigError with every problem of the file; nothing else, whatever the file holds.
    """
    return read(path).config


def read(path: Path | str, environ: Mapping[str, str] | None = None, today: date | None = None) -> Loaded:
    """Like `load`, with the warnings; the environment and the day can be given."""
    return parse(
        _text(path),
        file=os.fspath(path),
        folder=Path(path).absolute().parent,
        environ=os.environ if environ is None else environ,
        today=today or datetime.now(UTC).date(),
    )


def parse(text: str, *, file: str, folder: Path, environ: Mapping[str, str], today: date) -> Loaded:
    """The configuration in a text. `folder` is where relative paths start.

    Raises ConfigError with every problem of the text.
    """
    place = compose(text, file)
    try:
        root = f.ROOT.read(place)
    except Unreadable:  # the document is no mapping; reported
        raise ConfigError(place.report.problems) from None
    check(root, environ, today)
    _events_extra(root)
    for pool in () if root.get(f.POOLS) is None else root[f.POOLS].found.values():
        check_provider(pool.value, rates_given=pool.value.at(f.RATES) is not pool.value.place)
    if place.report.problems:
        raise ConfigError(place.report.problems)
    return Loaded(_config(root, folder, environ), tuple(sorted(place.report.warnings)))


def _events_extra(root: Values) -> None:
    """Report every event stream where the library to hear it is missing."""
    if not has_events():
        pools = root.get(f.POOLS)
        for pool in () if pools is None else pools.found.values():
            for replica in pool.value.get(f.REPLICAS) or ():
                if replica.value.get(KV_EVENTS) is not None:
                    replica.value.at(KV_EVENTS).complain(NEEDS_EVENTS)


def _text(path: Path | str) -> str:
    file = os.fspath(path)
    try:
        with Path(path).open("rb") as source:
            raw = source.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError([Problem(file, 0, 0, "", "there is no such file")]) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "unusable path"
        raise ConfigError([Problem(file, 0, 0, "", f"cannot be read: {reason}")]) from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError([Problem(file, 1, 1, "", f"is larger than {MAX_FILE_BYTES // 2**20} MiB")])
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
        raise ConfigError([Problem(file, line, column, "", "is not UTF-8 text")]) from None


def _config(root: Values, folder: Path, environ: Mapping[str, str]) -> Config:
    store = root.get(f.STORE)
    teams = _teams(root)
    variable = root.get(f.CACHE_SALT_ENV)
    return Config(
        listen=_listen(root.get(f.LISTEN)),
        store=folder / (f.SQLITE.default if store is None else store[f.SQLITE]),
        forms_days=f.FORMS_DAYS.default if store is None else store[f.FORMS_DAYS],
        archive_days=f.ARCHIVE_DAYS.default if store is None else store[f.ARCHIVE_DAYS],
        limits=_limits(root.get(f.LIMITS)),
        pools=MappingProxyType(
            {name: _pool(name, pool.value, folder, environ) for name, pool in root[f.POOLS].found.items()}
        ),
        models=MappingProxyType(
            {name: _model(name, model.value, folder) for name, model in root[f.MODELS].found.items()}
        ),
        keys=_keys(root, teams),
        docs=root[f.DOCS],
        teams=MappingProxyType(teams),
        recall_model=None if store is None else _recall_model(store.get(f.RECALL_MODEL), folder),
        cache_salt_secret=None if variable is None else environ[variable].encode("utf-8", "surrogateescape"),
    )


def _listen(values: Values | None) -> Listen:
    return Listen() if values is None else Listen(values[f.HOST], values[f.PORT])


def _limits(values: Values | None) -> Limits:
    if values is None:
        return Limits()
    return Limits(
        max_body_bytes=values[f.MAX_BODY],
        connect_timeout_s=values[f.CONNECT],
        first_byte_timeout_s=values[f.FIRST_BYTE],
        idle_timeout_s=values[f.IDLE],
        total_timeout_s=values[f.TOTAL],
        abort_drain_s=values[f.ABORT_DRAIN],
        max_attempts=values[f.MAX_ATTEMPTS],
    )


def _pool(name: str, values: Values, folder: Path, environ: Mapping[str, str]) -> Pool:
    variable, hosted = values.get(f.API_KEY_ENV), values.get(PROVIDER)
    provider = provider_of(hosted, environ)
    return Pool(
        name=name,
        replicas=_replicas(name, values) if hosted is None else (Replica(f"{name}-0", provider_url(name)),),
        rates=listed_rates(hosted) if hosted is not None and not values.get(f.RATES) else _rate_card(values),
        api_key=None if variable is None else environ[variable],
        abort=values[f.ABORT] and hosted is None,
        continuous_usage=values[f.CONTINUOUS],
        usage_convention=values[f.CONVENTION],
        cache_isolation=values[f.ISOLATION],
        probe=values[f.PROBE] and hosted is None,
        load=values[LOAD] if hosted is None else "off",
        profile=profile_of(values),
        speed=speed_of(values),
        engine=engine_of(values.get(ENGINE), folder, variable),
        provider=provider,
    )


def _replicas(name: str, values: Values) -> tuple[Replica, ...]:
    return tuple(
        Replica(
            replica.value.get(f.REPLICA_NAME) or f"{name}-{index}",
            replica.value[f.REPLICA_URL],
            events_of(replica.value.get(KV_EVENTS)),
            replica.value[f.DRAINING],
        )
        for index, replica in enumerate(values[f.REPLICAS])
    )


def _rate_card(values: Values) -> RateCard:
    versions = sorted(
        (version.value for version in values[f.RATES]), key=lambda version: version[f.EFFECTIVE]
    )
    return RateCard(tuple(_version(version) for version in versions))


def _version(values: Values) -> tuple[Rates, ...]:
    day = values[f.EFFECTIVE]
    tiers = (_rates(tier.value, day, tier.value[f.ABOVE]) for tier in values[f.TIERS])
    return (_rates(values, day, 0), *tiers)


def _rates(values: Values, day: date, above: int) -> Rates:
    uncached = values[f.UNCACHED]
    written = values.get(f.WRITTEN)
    return Rates(
        uncached=uncached,
        cached=values[f.CACHED],
        output=values[f.OUTPUT],
        written=uncached if written is None else written,
        effective=day,
        above_prompt_tokens=above,
    )


def _model(name: str, values: Values, folder: Path) -> Model:
    probe = values.get(f.RECALL_PROBE)
    return Model(
        name,
        tuple(pool.value for pool in values[f.MODEL_POOLS]),
        values.get(f.SERVED_NAME),
        values.get(f.WINDOW),
        _tokenizer(values.get(f.TOKENIZER), folder),
        None if probe is None else folder / probe,
        policy_of(values.get(MODEL_ROUTING)),
    )


def _recall_model(value: str | None, folder: Path) -> str | None:
    """A folder beside this file where there is one of that name, else a name for the library."""
    if value is not None and (folder / value).is_dir():
        return str(folder / value)
    return value


def _tokenizer(values: Values | None, folder: Path) -> Tokenizer | None:
    if values is None:
        return None
    file = values.get(f.TOKENIZER_FILE)
    return Tokenizer(values.get(f.TIKTOKEN), None if file is None else folder / file)


def _teams(root: Values) -> dict[str, Team]:
    teams = root.get(f.TEAMS)
    if teams is None:
        return {}
    return {name: _team(name, team.value) for name, team in teams.found.items()}


def _team(name: str, values: Values) -> Team:
    context = _context(values.get(c.CONTEXT))
    classes = classes_of(values.get(CLASSES))
    layout = values.get(f.LAYOUT)
    if layout is None:
        return Team(name, values[f.ORGANISATION], context=context, classes=classes)
    declared = [entry.value for entry in layout[f.VOLATILE]]
    kinds = [entry.get(f.VOLATILE_KIND) for entry in declared]
    patterns = [entry.get(f.VOLATILE_PATTERN) for entry in declared]
    return Team(
        name,
        values[f.ORGANISATION],
        layout[f.LAYOUT_LEVEL],
        frozenset(VolatileKind(kind) for kind in kinds if kind is not None),
        tuple(pattern for pattern in patterns if pattern is not None),
        context,
        classes,
    )


def _context(values: Values | None) -> Context:
    if values is None:
        return Context()
    return Context(
        compaction=values[c.COMPACTION],
        summarizer=values[c.SUMMARIZER],
        tail_tokens=values[c.TAIL_TOKENS],
        summary_tokens=values[c.SUMMARY_TOKENS],
        tool_results=values[c.TOOL_RESULTS] == "on",
        tool_result_bytes=values[c.TOOL_RESULT_BYTES],
        recall=values[c.RECALL] == "on",
        recall_tokens=values[c.RECALL_TOKENS],
        recall_tool=values[c.RECALL_TOOL] == "on",
        sticky_tools=frozenset(tool.value for tool in values[c.STICKY_TOOLS]),
    )


def _keys(root: Values, teams: Mapping[str, Team]) -> tuple[Key, ...]:
    return tuple(
        Key(
            key_id=key.value[f.KEY_ID],
            digest=key.value[f.KEY_HASH],
            team=key.value[f.KEY_TEAM],
            organisation=teams[key.value[f.KEY_TEAM]].organisation,
            allow_engine_fields=frozenset(field.value for field in key.value[f.ENGINE_FIELDS]),
        )
        for key in root.get(f.KEYS) or ()
    )


__all__ = ["ConfigError", "Loaded", "Problem", "load", "parse", "read"]
