"""What a valid file means: values, defaults, order, paths."""

from __future__ import annotations

import dataclasses
from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from config_texts import DIGEST, FOLDER, VALID, edited, read_text
from ctxgate.gateway.config import Context, Key, Limits, Listen, Model, Replica, Team
from ctxgate.gateway.config_load import ConfigError, load, read
from ctxgate.inference.rates import RateCard, Rates

EXAMPLE = Path(__file__).parents[2] / "configs" / "ctxgate.yaml"


@pytest.mark.parametrize(("given", "level"), [("off", "off"), ('"off"', "off"), ("safe", "safe")])
def test_a_layout_level_needs_no_quotes(given: str, level: str) -> None:
    """YAML itself reads a plain `off` as a truth value."""
    text = VALID.replace("{organisation: acme}", f"{{organisation: acme, layout: {given}}}")
    assert read_text(text).config.teams == {"research": Team("research", "acme", level)}


def test_a_minimal_file_gets_every_default() -> None:
    config = read_text(VALID).config
    assert config.listen == Listen("127.0.0.1", 8080)
    assert config.limits == Limits()
    assert config.store == FOLDER / "ctxgate.db"
    assert config.docs is True
    assert config.teams == {"research": Team("research", "acme")}
    assert config.models == {
        "tiny": Model("tiny", ("standard",), None),
        "swift": Model("swift", ("fast",), None),
    }
    assert config.keys == (Key("research-ci", bytes.fromhex(DIGEST), "research", "acme", frozenset()),)
    fast = config.pools["fast"]
    assert fast.replicas == (Replica("quick", "http://10.0.0.3:8000"),)
    assert (fast.api_key, fast.abort, fast.continuous_usage, fast.usage_convention) == (
        None,
        True,
        False,
        "inclusive",
    )
    assert (fast.cache_isolation, fast.probe, config.cache_salt_secret) == ("team", True, None)


def test_plain_urls_get_names_from_their_pool_and_position() -> None:
    assert read_text(VALID).config.pools["standard"].replicas == (
        Replica("standard-0", "http://10.0.0.1:8000"),
        Replica("standard-1", "http://10.0.0.2:8000"),
    )


def test_every_field_can_be_set() -> None:
    text = VALID.replace(
        "pools:\n",
        "listen: {host: 0.0.0.0, port: 0}\n"
        "store: {sqlite: /var/lib/ledger.db}\n"
        "limits: {max_body_mib: 3, connect_timeout_s: 0.25, first_byte_timeout_s: 90,\n"
        "         idle_timeout_s: 30.5, total_timeout_s: 604800, abort_drain_s: 2, max_attempts: 1}\n"
        "docs: false\n"
        "pools:\n",
        1,
    )
    text = text.replace("    replicas: [{name", "    api_key_env: FAST_KEY\n    replicas: [{name")
    text = text.replace("  fast:\n", "  fast:\n    abort: false\n    continuous_usage: true\n")
    text = text.replace("  fast:\n", "  fast:\n    usage_convention: exclusive\n")
    text = text.replace("  fast:\n", "  fast:\n    cache_isolation: organisation\n    probe: false\n")
    text = text.replace("[standard]}", "[fast], served_name: org/Tiny-1.5B}")
    text = text.replace(f"sha256: {DIGEST}", f"sha256: {DIGEST}, allow_engine_fields: [priority, echo]")
    config = read_text(text, {"FAST_KEY": "upstream-secret"}).config
    assert config.listen == Listen("0.0.0.0", 0)
    assert config.store == Path("/var/lib/ledger.db")
    assert config.limits == Limits(3_145_728, 0.25, 90.0, 30.5, 604_800.0, 2.0, 1)
    assert config.docs is False
    assert config.models["tiny"] == Model("tiny", ("fast",), "org/Tiny-1.5B")
    assert config.keys[0].allow_engine_fields == frozenset({"priority", "echo"})
    fast = config.pools["fast"]
    assert (fast.api_key, fast.abort, fast.continuous_usage, fast.usage_convention) == (
        "upstream-secret",
        False,
        True,
        "exclusive",
    )
    assert (fast.cache_isolation, fast.probe) == ("organisation", False)


def test_the_files_limits_cover_every_limit() -> None:
    """A limit without a field in the file could never be set."""
    from ctxgate.gateway.config_fields import LIMITS_SECTION

    in_file = {field.name.removesuffix("_mib") + ("_bytes" if field.name.endswith("_mib") else "")
               for field in LIMITS_SECTION.fields}  # fmt: skip
    assert in_file == {field.name for field in dataclasses.fields(Limits)}


@pytest.mark.parametrize("host", ["::1", "::", "localhost", "gateway.internal.example", "192.168.0.7"])
def test_any_host_can_be_asked_for(host: str) -> None:
    assert read_text(f'listen: {{host: "{host}"}}\n{VALID}').config.listen == Listen(host, 8080)


def test_an_ipv6_host_needs_no_quotes() -> None:
    assert read_text(f"listen:\n  host: ::1\n{VALID}").config.listen.host == "::1"


@pytest.mark.parametrize(
    ("written", "root"),
    [
        ("http://10.0.0.3:8000/", "http://10.0.0.3:8000"),
        ("HTTP://Engine-3.Example:80", "http://engine-3.example"),
        ("https://engine.example:443/", "https://engine.example"),
        ("https://engine.example:8443", "https://engine.example:8443"),
        ("http://[::1]:8001", "http://[::1]:8001"),
        ("http://[2001:DB8::1]", "http://[2001:db8::1]"),
        ("http://vllm_fast", "http://vllm_fast"),
    ],
)
def test_replica_urls_have_one_spelling(written: str, root: str) -> None:
    config = read_text(edited("http://10.0.0.3:8000", written)).config
    assert config.pools["fast"].replicas == (Replica("quick", root),)


def test_dated_versions_are_sorted_and_tiers_stand_under_their_version() -> None:
    rates = """\
rates:
      - {effective: 2026-05-01, usd_per_million_uncached: 2, usd_per_million_cached: 0.2,
         usd_per_million_output: 8, usd_per_million_written: 2.5}
      - effective: 2026-01-01
        usd_per_million_uncached: 1
        usd_per_million_cached: 0.0375
        usd_per_million_output: 4
        tiers:
          - {above_prompt_tokens: 200000, usd_per_million_uncached: 3, usd_per_million_cached: 0.3,
             usd_per_million_output: 6}
          - {above_prompt_tokens: 272000, usd_per_million_uncached: 4, usd_per_million_cached: 0.4,
             usd_per_million_output: 9, usd_per_million_written: 5}
"""
    start = VALID.index("rates: {effective: 2026-01-01, usd_per_million_uncached: 1.25")
    text = VALID[:start] + rates + VALID[VALID.index("models:") :]
    usd, first, second = 10**9, date(2026, 1, 1), date(2026, 5, 1)
    assert read_text(text).config.pools["fast"].rates == RateCard(
        (
            (
                Rates(1 * usd, 37_500_000, 4 * usd, 1 * usd, first),
                Rates(3 * usd, 300_000_000, 6 * usd, 3 * usd, first, 200_000),
                Rates(4 * usd, 400_000_000, 9 * usd, 5 * usd, first, 272_000),
            ),
            (Rates(2 * usd, 200_000_000, 8 * usd, 2_500_000_000, second),),
        )
    )


def test_aliases_share_whole_values() -> None:
    start = VALID.index("rates: {effective: 2026-01-01, usd_per_million_uncached: 1.25")
    shared = VALID[:start] + "rates: *one\n" + VALID[VALID.index("models:") :]
    config = read_text(shared.replace("rates: {", "rates: &one {", 1)).config
    assert config.pools["fast"].rates == config.pools["standard"].rates
    assert config.pools["fast"].rates.versions[0][0].output == 1_600_000_000


def test_names_that_yaml_reads_otherwise_work_in_quotes() -> None:
    text = VALID.replace("research:", '"123":').replace("team: research", 'team: "123"')
    assert read_text(text).config.keys[0].team == "123"


def test_a_hash_of_digits_alone_is_a_hash() -> None:
    digits = "0123456789" * 6 + "0123"
    assert read_text(edited(DIGEST, digits)).config.keys[0].digest == bytes.fromhex(digits)


def test_mappings_cannot_be_changed() -> None:
    config = read_text(VALID).config
    for mapping in (config.pools, config.models, config.teams):
        with pytest.raises(TypeError):
            mapping["new"] = None  # type: ignore[index] # the type forbids it too


def test_load_reads_a_file_and_puts_the_ledger_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "c.yaml").write_bytes(b"\xef\xbb\xbf" + VALID.encode())
    monkeypatch.chdir(tmp_path)
    assert load("etc/c.yaml").store == tmp_path / "etc" / "ctxgate.db"
    assert load(Path("etc/c.yaml")) == load(tmp_path / "etc" / "c.yaml")


def test_load_takes_secrets_from_the_environment_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.yaml").write_text(
        edited("    replicas: [{name", "    api_key_env: FAST_KEY\n    replicas: [{name")
    )
    monkeypatch.setenv("FAST_KEY", "from-the-process")
    assert load(tmp_path / "c.yaml").pools["fast"].api_key == "from-the-process"


def test_the_example_loads_without_a_warning() -> None:
    loaded = read(EXAMPLE, environ={}, today=datetime.now(UTC).date())
    assert loaded.warnings == ()
    assert list(loaded.config.pools) == ["standard", "fast"]
    assert loaded.config.pools["fast"].replicas == (Replica("fast-0", "http://127.0.0.1:8001"),)
    assert loaded.config.pools["standard"].replicas == (Replica("standard-0", "http://127.0.0.1:8002"),)
    assert loaded.config.limits == Limits()
    assert loaded.config.listen.host == "127.0.0.1"


def test_the_example_of_long_conversations_shows_the_defaults() -> None:
    example = EXAMPLE.read_text("utf-8")
    written = example.replace("    # context: {", "    context: {")
    assert written != example
    assert read_text(written).config.teams["research"].context == Context()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.yaml", None, " there is no such file"),
        ("latin.yaml", b"pools:\n  a: \xe9\n", "2:6: is not UTF-8 text"),
        ("utf16.yaml", "pools:".encode("utf-16"), "1:1: is not UTF-8 text"),
        ("empty.yaml", b"# nothing\n", "1:1: is empty"),
    ],
)
def test_unreadable_files_are_configuration_errors(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == f"{path}:{message}"


@pytest.mark.parametrize("path", [".", "bad\0name"])
def test_paths_that_are_no_file_are_configuration_errors(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(path)


def test_a_file_of_absurd_size_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    with path.open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(ConfigError, match="is larger than 8 MiB"):
        load(path)
