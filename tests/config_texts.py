"""A small valid configuration for the tests to break, and the ways to read it."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from ctxgate.gateway.config_load import ConfigError, Loaded, parse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ctxgate.gateway.config_load import Problem

DIGEST: Final = "a3" * 32
TODAY: Final = date(2026, 6, 1)
FOLDER: Final = Path("/etc/ctxgate")

VALID: Final = f"""\
pools:
  standard:
    replicas: ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    rates: {{effective: 2026-01-01, usd_per_million_uncached: 0.4, usd_per_million_cached: 0.04,
            usd_per_million_output: 1.6}}
  fast:
    replicas: [{{name: quick, url: "http://10.0.0.3:8000"}}]
    rates: {{effective: 2026-01-01, usd_per_million_uncached: 1.25, usd_per_million_cached: 0.125,
            usd_per_million_output: 10}}
models:
  tiny: {{pools: [standard]}}
  swift: {{pools: [fast]}}
teams:
  research: {{organisation: acme}}
keys:
  - {{id: research-ci, team: research, sha256: {DIGEST}}}
"""


def read_text(text: str, environ: Mapping[str, str] | None = None, today: date = TODAY) -> Loaded:
    """The text as a file `c.yaml` in a fixed folder, with a fixed environment and day."""
    return parse(text, file="c.yaml", folder=FOLDER, environ=environ or {}, today=today)


def edited(old: str, new: str) -> str:
    """The valid text with one occurrence of `old` replaced; `old` must be there."""
    assert old in VALID
    return VALID.replace(old, new, 1)


def problems(text: str, environ: Mapping[str, str] | None = None) -> tuple[Problem, ...]:
    """The problems of a text that has some."""
    with pytest.raises(ConfigError) as caught:
        read_text(text, environ)
    return caught.value.problems


def shown(text: str, environ: Mapping[str, str] | None = None) -> list[str]:
    """The problems of a text as they are printed."""
    return [str(problem) for problem in problems(text, environ)]
