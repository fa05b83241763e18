"""Over arbitrary text: prices are exact, only ConfigError is raised, no secret is repeated."""

from __future__ import annotations

import re
from base64 import urlsafe_b64encode
from fractions import Fraction

import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from config_texts import DIGEST, VALID, edited, read_text
from ctxgate.gateway.config_load import ConfigError, Loaded
from ctxgate.gateway.keys import KeyRing, digest, new_key, secret_problem
from ctxgate.inference.rates import format_usd

SECRETS = st.binary(min_size=32, max_size=32).map(
    lambda raw: "cg-" + urlsafe_b64encode(raw).rstrip(b"=").decode()
)
LINES = st.lists(st.sampled_from(VALID.splitlines(keepends=True)), max_size=20).map("".join)
TAGS_AND_SIGNS = ["*a", "&a ", "!!float ", "!x ", "<<", "?", "~", "- ", "#", "|\n", ">-\n", "---\n", "...\n"]
ODD_TEXT = ["%YAML 1.1\n", "\t", "\u2028", "\x00", "0o7", "1e400", "\\x", '"\\ud800"']
PIECES = st.sampled_from([*re.findall(r"[\w.-]+|\s+|[^\w\s]", VALID), *TAGS_AND_SIGNS, *ODD_TEXT])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.dates()
FIELDS = st.sampled_from(
    [
        "listen",
        "store",
        "limits",
        "pools",
        "models",
        "teams",
        "keys",
        "docs",
        "host",
        "port",
        "sqlite",
        "replicas",
        "rates",
        "url",
        "name",
        "tiers",
        "effective",
        "usd_per_million_uncached",
        "usd_per_million_cached",
        "usd_per_million_output",
        "above_prompt_tokens",
        "api_key_env",
        "abort",
        "id",
        "team",
        "sha256",
        "organisation",
        "fast",
        "tiny",
        "research",
    ]
)
TREES = st.recursive(
    SCALARS,
    lambda below: (
        st.lists(below, max_size=4) | st.dictionaries(FIELDS | st.text(max_size=8), below, max_size=5)
    ),
    max_leaves=25,
)


def attempt(text: str, environ: dict[str, str] | None = None) -> Loaded | ConfigError:
    """What reading a text gives; any error but ConfigError fails the test."""
    try:
        return read_text(text, environ)
    except ConfigError as error:
        return error


def check_outcome(text: str) -> None:
    """A text either loads or has problems, each at a line that it has (or just behind its end)."""
    found = attempt(text)
    if isinstance(found, ConfigError):
        breaks = len(re.findall("[\n\r\x85\u2028\u2029]", text))
        assert found.problems
        assert all(1 <= problem.line <= breaks + 1 and problem.column >= 1 for problem in found.problems)


@given(
    whole=st.integers(0, 12_000),
    decimals=st.text("0123456789", max_size=12),
    exponent=st.none() | st.integers(-12, 5),
)
@example(whole=0, decimals="0375", exponent=None)
@example(whole=10_000, decimals="", exponent=None)
@example(whole=10_000, decimals="000000001", exponent=None)
def test_a_price_is_read_exactly_or_refused(whole: int, decimals: str, exponent: int | None) -> None:
    written = f"{whole}" + (f".{decimals}" if decimals else "") + ("" if exponent is None else f"e{exponent}")
    usd = Fraction(whole * 10 ** len(decimals) + int(decimals or "0"), 10 ** len(decimals))
    usd *= Fraction(10) ** (exponent or 0)
    text = edited("usd_per_million_output: 10}", f"usd_per_million_output: {written}}}")
    if usd > 10_000 or (usd * 10**9).denominator != 1:
        message = str(attempt(text))
        assert "pools.fast.rates.usd_per_million_output: " in message
        assert ("is more than 10,000" if usd > 10_000 else "more than nine decimals") in message
    else:
        (rates,) = read_text(text).config.pools["fast"].rates.versions[0]
        assert rates.output == usd * 10**9
        assert Fraction(format_usd(rates.output)) == usd


@given(st.text(max_size=200) | LINES | st.lists(PIECES, max_size=60).map("".join))
@example("a: &a [*a]\npools: *a")
@example("- " * 3000)
@example('"\\U00110000"')
@example("? - a\n: b")
@example("%YAML 99999999999999999999.1\n--- {}\n")
def test_reading_any_text_raises_nothing_but_a_configuration_error(text: str) -> None:
    check_outcome(text)


@given(TREES)
def test_reading_any_tree_raises_nothing_but_a_configuration_error(tree: object) -> None:
    check_outcome(yaml.safe_dump(tree, allow_unicode=True))


@given(st.integers(0, len(VALID)), st.integers(0, 12), st.lists(PIECES, max_size=3).map("".join))
def test_reading_a_damaged_file_raises_nothing_but_a_configuration_error(at: int, cut: int, put: str) -> None:
    check_outcome(VALID[:at] + put + VALID[at + cut :])


@given(SECRETS, st.data())
def test_a_secret_in_place_of_any_value_is_never_repeated(secret: str, data: st.DataObject) -> None:
    """Only names that a loaded configuration legitimately shows are left out: there the file is valid."""
    spots = [match.span() for match in re.finditer(r"(?<=[:,\[{] )[^\s\[\]{},]+(?=[,}\]\n])|(?<=- ){", VALID)]
    start, end = data.draw(st.sampled_from(spots))
    style = data.draw(
        st.sampled_from(["{}", "'{}'", '"{}"', "!x {}", "*{}", "[{}]", "{{{}: 1}}", "http://{}@h", "&{}"])
    )
    found = attempt(VALID[:start] + style.format(secret) + VALID[end:])
    if isinstance(found, ConfigError):
        assert secret[3:] not in f"{found}{found!r}"


@given(SECRETS, st.sampled_from(["", " ", "\n", "x", "\u00e9"]))
def test_an_upstream_key_of_the_environment_is_never_shown(secret: str, tail: str) -> None:
    text = edited("    replicas: [{name", "    api_key_env: FAST_KEY\n    replicas: [{name")
    found = attempt(text, {"FAST_KEY": secret + tail})
    assert isinstance(found, ConfigError) is (tail in (" ", "\n", "\u00e9"))
    assert secret[3:] not in f"{found}{found!r}"


@given(st.binary(min_size=32, max_size=64), st.text(max_size=300))
def test_a_key_ring_opens_to_its_secret_alone(raw: bytes, other: str) -> None:
    secret, hashed = new_key(raw)
    assert hashed == digest(secret)
    assert secret_problem(secret) is None
    text = edited(DIGEST, hashed.hex())
    config = read_text(text).config
    ring = KeyRing(config.keys)
    assert ring.find(secret) is config.keys[0]
    assert other == secret or ring.find(other) is None
