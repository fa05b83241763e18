"""What spans several values of a configuration: references, duplicates, order, dates, secrets.

Works on partly read files, so that one run shows every problem.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ctxgate.compression.policy import Level, Policy
from ctxgate.gateway import config_fields as f
from ctxgate.gateway.config_engine import ENGINE, check_engine
from ctxgate.gateway.config_kinds import MIN_PLAUSIBLE_NANO, UNIT_HINT
from ctxgate.gateway.config_provider import KEY_ENV, PROVIDER
from ctxgate.gateway.config_yaml import label, suggestion
from ctxgate.gateway.ledger import OWN_ORGANISATION

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import date

    from ctxgate.gateway.config_schema import Field, Located, Values


MIN_SECRET: Final = 16


def check(root: Values, environ: Mapping[str, str], today: date) -> None:
    """Report every problem between values of a file."""
    pools = root.get(f.POOLS)
    if pools is not None:
        for name, pool in pools.found.items():
            _kind(pool.value)
            _replicas(name, pool.value)
            check_engine(pool.value, len(pool.value.get(f.REPLICAS) or ()))
            _versions(pool.value, today)
            _api_key(pool.value, environ)
        _shared_servers({name: pool.value for name, pool in pools.found.items()})
    _models(root)
    _organisations(root)
    _teams(root)
    _keys(root)
    _cache_salt(root, environ)


def variable_problem(value: str | None) -> str | None:
    """Why the value of an environment variable cannot be sent as a bearer token. Never shows it."""
    if value is None:
        return "is not set"
    if not value:
        return "is empty"
    if not value.isascii() or not value.isprintable() or " " in value:
        return "has spaces, line ends or characters outside ASCII, which no bearer token has"
    return None


def _kind(values: Values) -> None:
    """A pool is made of replicas with prices, or is a provider."""
    stands = [one for one in (f.REPLICAS, ENGINE, f.API_KEY_ENV) if values.at(one) is not values.place]
    if values.at(PROVIDER) is not values.place:
        for one in stands:
            place = values.at(one)
            place.complain("does not go with provider", at=place.key)
        return
    for one in (f.REPLICAS, f.RATES):
        if values.at(one) is values.place:
            values.place.complain(one.missing, at=values.place.key, path=values.place.inside(one.name))


def _replicas(pool: str, values: Values) -> None:
    replicas = values.get(f.REPLICAS) or ()
    _unique(replicas, f.REPLICA_URL, "the same server")
    _unique(replicas, f.REPLICA_NAME, "the same name")
    given = {replica.value.get(f.REPLICA_NAME) for replica in replicas}
    for index, replica in enumerate(replicas):
        derived = f"{pool}-{index}"
        if replica.value.get(f.REPLICA_NAME) is None and derived in given:
            replica.place.complain("needs a name: the one it would get is given to another replica")


def _shared_servers(pools: Mapping[str, Values]) -> None:
    first: dict[str, tuple[str, int]] = {}
    for pool, values in pools.items():
        for replica in values.get(f.REPLICAS) or ():
            url, place = replica.value.get(f.REPLICA_URL), replica.value.at(f.REPLICA_URL)
            if url is None:
                continue
            other, line = first.setdefault(url, (pool, place.line))
            if other != pool:
                place.warn(f"is also in another pool (line {line}): one server with two prices")


def _versions(values: Values, today: date) -> None:
    versions = values.get(f.RATES) or ()
    _unique(versions, f.EFFECTIVE, "the same day")
    for version in versions:
        _prices(version.value)
        _tiers(version.value)
    days = [version.value.get(f.EFFECTIVE) for version in versions]
    known = [day for day in days if day is not None]
    if known and len(known) == len(days) and min(known) > today:
        values.at(f.RATES).warn(f"nothing is effective before {min(known)}: until then those prices are used")


def _prices(values: Values) -> None:
    uncached, cached = values.get(f.UNCACHED), values.get(f.CACHED)
    if uncached is not None and cached is not None and cached > uncached:
        if 0 < uncached < MIN_PLAUSIBLE_NANO:
            values.at(f.UNCACHED).complain(UNIT_HINT)
        values.at(f.CACHED).complain(
            "is above usd_per_million_uncached: a token from the cache never costs more than a computed one"
        )
    if not any(values.get(price) is None or values.get(price) for price in (f.UNCACHED, f.CACHED, f.OUTPUT)):
        values.place.warn("every price is 0: all use of these prices is free")


def _tiers(values: Values) -> None:
    edge = 0
    for tier in values.get(f.TIERS) or ():
        _prices(tier.value)
        above = tier.value.get(f.ABOVE)
        if above is None:
            continue
        if above <= edge:
            tier.value.at(f.ABOVE).complain("must be above the edge of the tier before it")
        edge = above


def _api_key(values: Values, environ: Mapping[str, str]) -> None:
    variable = values.get(f.API_KEY_ENV)
    problem = None if variable is None else variable_problem(environ.get(variable))
    if problem:
        values.at(f.API_KEY_ENV).complain(f"the environment variable named here {problem}")
    provider = values.get(PROVIDER)
    variable = None if provider is None else provider.get(KEY_ENV)
    if provider is not None and variable is not None:
        problem = variable_problem(environ.get(variable))
        if problem:
            provider.at(KEY_ENV).complain(f"the environment variable named here {problem}")


def _cache_salt(root: Values, environ: Mapping[str, str]) -> None:
    variable = root.get(f.CACHE_SALT_ENV)
    if variable is None:
        return
    value = environ.get(variable)
    if not value:
        problem = "is empty" if value == "" else "is not set"
    elif len(value) < MIN_SECRET:
        problem = f"is shorter than {MIN_SECRET} characters: a secret that short can be guessed"
    else:
        return
    root.at(f.CACHE_SALT_ENV).complain(f"the environment variable named here {problem}")


def _organisations(root: Values) -> None:
    teams = root.get(f.TEAMS)
    for team in () if teams is None else teams.found.values():
        if team.value.get(f.ORGANISATION) == OWN_ORGANISATION:
            team.value.at(f.ORGANISATION).complain(
                f"{OWN_ORGANISATION} is reserved: the gateway books its own calls to it"
            )


def _models(root: Values) -> None:
    pools, models = root.get(f.POOLS), root.get(f.MODELS)
    known = () if pools is None else pools.names
    used: set[str] = set()
    for model in () if models is None else models.found.values():
        lines: dict[str, int] = {}
        for pool in model.value.get(f.MODEL_POOLS) or ():
            used.add(pool.value)
            if pool.value in lines:
                pool.place.complain("names the same pool twice")
            lines[pool.value] = pool.place.line
            if pools is not None and pool.value not in known:
                pool.place.complain(f"there is no pool {label(pool.value)}{suggestion(pool.value, known)}")
        _tokenizer(model.value.get(f.TOKENIZER))
    for name, entry in () if pools is None or models is None else pools.found.items():
        if name not in used:
            entry.place.warn("no model names this pool, so it never serves")


def _tokenizer(values: Values | None) -> None:
    if values is None:
        return
    fields = (f.TIKTOKEN, f.TOKENIZER_FILE)
    if all(values.get(one) is not None for one in fields):
        values.place.complain("gives tiktoken and file; one of them counts")
    if all(values.at(one) is values.place for one in fields):
        values.place.complain("must give tiktoken or file")


def _keys(root: Values) -> None:
    keys, teams = root.get(f.KEYS) or (), root.get(f.TEAMS)
    known = () if teams is None else teams.names
    _unique(keys, f.KEY_ID, "the same id")
    _unique(keys, f.KEY_HASH, "the same key")
    for key in keys:
        team = key.value.get(f.KEY_TEAM)
        if team is not None and team not in known:
            key.value.at(f.KEY_TEAM).complain(f"there is no team {label(team)}{suggestion(team, known)}")
    if not keys:
        root.at(f.KEYS).warn("there is no key, so every call is refused")


def _teams(root: Values) -> None:
    teams = root.get(f.TEAMS)
    for team in () if teams is None else teams.found.values():
        layout = team.value.get(f.LAYOUT)
        if layout is None:
            continue
        declared = layout.get(f.VOLATILE) or ()
        for entry in declared:
            given = [entry.value.get(one) is not None for one in (f.VOLATILE_KIND, f.VOLATILE_PATTERN)]
            if all(given):
                entry.place.complain("gives a kind and a pattern; write two entries")
            if not any(given) and not any(
                entry.value.at(one) is not entry.value.place for one in (f.VOLATILE_KIND, f.VOLATILE_PATTERN)
            ):
                entry.place.complain("must give a kind or a pattern")
        level = layout.get(f.LAYOUT_LEVEL) or f.LAYOUT_LEVEL.default
        if declared and not Policy(Level(level)).moves():
            layout.at(f.VOLATILE).warn(f"is not used at the level {level}")


def _unique(entries: Iterable[Located[Values]], field: Field[Any], what: str) -> None:
    first: dict[object, int] = {}
    for entry in entries:
        value = entry.value.get(field)
        if value is None:
            continue
        place = entry.value.at(field)
        if value in first:
            place.complain(f"{what} stands on line {first[value]}")
        else:
            first[value] = place.line
