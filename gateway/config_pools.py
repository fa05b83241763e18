"""From a pool's `engine` and `provider` sections to values: paths, extras, and what the catalogue knows.

Reads files beside the configuration's own, so it stands apart from the fields and their rules.
"""

from __future__ import annotations

from datetime import date
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from ctxgate.gateway import config_engine as e
from ctxgate.gateway import config_provider as p
from ctxgate.gateway.config import Provider
from ctxgate.gateway.extras import NEEDS_PROVIDERS
from ctxgate.inference import catalogue
from ctxgate.inference.pools import EngineSpec, Speculative

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ctxgate.gateway.config_schema import Values
    from ctxgate.inference.pools import Device
    from ctxgate.inference.rates import RateCard

LISTED_FROM: Final = date(2020, 1, 1)
"""The day from which catalogue prices count: the catalogue names none."""


def engine_of(values: Values | None, folder: Path, api_key_env: str | None) -> EngineSpec | None:
    """How a pool's servers are started; None where that is not said. Paths start at `folder`."""
    if values is None:
        return None
    served, python, env = values.get(e.SERVED), values.get(e.PYTHON), values.get(e.ENV)
    device: Device = "cpu" if values[e.DEVICE] == "cpu" else "gpu"
    return EngineSpec(
        model=_model(values[e.MODEL], folder),
        served_names=() if served is None else (served,),
        device=device,
        max_model_len=values.get(e.WINDOW),
        max_num_seqs=values.get(e.SEQUENCES),
        tensor_parallel=values[e.PARALLEL],
        speculative=_speculative(values.get(e.SPECULATIVE), folder),
        bind=tuple(entry.value for entry in values[e.BIND]),
        extra_args=tuple(entry.value for entry in values[e.EXTRA]),
        env=MappingProxyType({} if env is None else {name: one.value for name, one in env.found.items()}),
        python=None if python is None else str(folder / python),
        api_key_env=api_key_env,
    )


def _model(value: str, folder: Path) -> str:
    """A folder beside the configuration where there is one of that name, else a name for the engine."""
    return str(folder / value) if (folder / value).is_dir() else value


def _speculative(values: Values | None, folder: Path) -> Speculative | None:
    if values is None:
        return None
    model = values.get(e.DRAFT_MODEL)
    return Speculative(
        values[e.METHOD],
        values[e.TOKENS],
        None if model is None else _model(model, folder),
        values.get(e.LOOKUP_MAX),
        values.get(e.LOOKUP_MIN),
    )


def check_provider(pool: Values, *, rates_given: bool) -> None:
    """Report what stands in the way of calling a pool's provider, or of pricing it."""
    values = pool.get(p.PROVIDER)
    if values is None:
        return
    if not catalogue.installed():
        pool.at(p.PROVIDER).complain(NEEDS_PROVIDERS)
        return
    model = values.get(p.MODEL)
    if model is not None and not rates_given and _rates(model) is None:
        values.at(p.MODEL).complain("has no price in LiteLLM's catalogue: give the pool's rates")


def _rates(model: str) -> RateCard | None:
    try:
        found = catalogue.listed(model)
    except catalogue.NoCatalogue:
        return None
    return None if found is None else found.card(LISTED_FROM)


def provider_of(values: Values | None, environ: Mapping[str, str]) -> Provider | None:
    """How a pool's provider is called; None for a pool of servers."""
    if values is None:
        return None
    try:
        found = catalogue.listed(values[p.MODEL])
    except catalogue.NoCatalogue:  # its rates are given
        found = None
    window = None if found is None else found.window
    return Provider(values[p.MODEL], environ[values[p.KEY_ENV]], values.get(p.BASE_URL), window)


def listed_rates(values: Values) -> RateCard:
    """The catalogue's prices of a provider's model, which has some: that was checked."""
    found = _rates(values[p.MODEL])
    assert found is not None  # noqa: S101 - `check_provider` has reported a model without prices
    return found
