"""The `engine` and `provider` sections of a pool."""

from __future__ import annotations

from typing import Any

import pytest

from config_texts import FOLDER, edited, read_text, shown
from ctxgate.gateway import config_pools
from ctxgate.gateway.config import Provider
from ctxgate.gateway.pool_launch import NotLaunchable, servers
from ctxgate.inference import catalogue
from ctxgate.inference.catalogue import Listed
from ctxgate.inference.pools import EngineSpec, Speculative

REPLICA = 'replicas: [{name: quick, url: "http://10.0.0.3:8000"}]\n'
HOSTED = "provider: {model: openai/gpt-4o-mini, api_key_env: HOSTED_KEY}\n"
ENVIRONMENT = {"HOSTED_KEY": "sk-x"}
LISTED = Listed(((0, (150_000_000, 75_000_000, 600_000_000, 150_000_000)),), 128_000)


def engine(inside: str) -> str:
    return edited(REPLICA, f"{REPLICA}    engine: {inside}\n")


def provider(more: str = "") -> str:
    start = edited(REPLICA, HOSTED)
    at = start.index("    rates: {effective: 2026-01-01, usd_per_million_uncached: 1.25")
    return start[:at] + more + start[start.index("models:") :]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "installed", lambda: True)
    monkeypatch.setattr(catalogue, "listed", {"openai/gpt-4o-mini": LISTED}.get)


def test_an_engine_as_it_is_read() -> None:
    text = engine(
        "{model: org/m, served_name: m, device: cpu, max_model_len: 4096, max_num_seqs: 8, bind: ['0-3'], "
        "speculative: {method: ngram, tokens: 3, lookup_max: 4}, extra_args: ['--dtype', 'bfloat16'], "
        "env: {VLLM_CPU_KVCACHE_SPACE: '2'}, python: venv/bin/python}"
    )
    assert read_text(text).config.pools["fast"].engine == EngineSpec(
        model="org/m",
        served_names=("m",),
        device="cpu",
        max_model_len=4096,
        max_num_seqs=8,
        speculative=Speculative("ngram", 3, None, 4),
        bind=("0-3",),
        extra_args=("--dtype", "bfloat16"),
        env={"VLLM_CPU_KVCACHE_SPACE": "2"},
        python=str(FOLDER / "venv/bin/python"),
    )


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        ("{device: cpu}", "pools.fast.engine.model: is missing"),
        ("{model: m, extra_args: ['--api-key', 'x']}", "extra_args[0]: a secret never stands in this file"),
        ("{model: m, extra_args: ['--api-key=x']}", "a secret never stands in this file"),
        ("{model: m, extra_args: ['--api_key', 'x']}", "a secret never stands in this file"),
        ("{model: m, extra_args: ['--api-k=x']}", "a secret never stands in this file"),
        ("{model: m, env: {VLLM_API_KEY: 'x'}}", "a secret never stands in this file"),
        ("{model: m, env: {HF_TOKEN: 'hf_0123456789abcdefghij0123'}}", "looks like a secret"),
        ("{model: m, env: {1-A: 'x'}}", "is letters, digits and _"),
        ("{model: m, bind: ['0', '1']}", "one entry for each of the 1 replicas"),
        ("{model: m, bind: ['0; rm']}", "must be GPUs"),
        ("{model: m, device: cpu, tensor_parallel: 2}", "is for GPUs"),
        ("{model: m, speculative: {method: ngram, tokens: 2, lookup_max: 1, lookup_min: 2}}", "not be above"),
        ("{model: m, extra_args: '--x'}", "must be a list"),
    ],
)
def test_mistakes_in_an_engine_are_named(inside: str, words: str) -> None:
    (line,) = shown(engine(inside))
    assert words in line


def test_servers_are_named_for_the_models_that_lead_to_their_pool() -> None:
    config = read_text(engine("{model: org/m}")).config
    (server,) = servers(config)
    assert (server.pool, server.replica, server.place, server.names) == (
        "fast",
        "quick",
        ("10.0.0.3", 8000),
        ("swift",),
    )
    assert "--served-model-name swift --host 10.0.0.3 --port 8000" in server.launch.line()
    for name, words in (("standard", "says nothing of how"), ("slow", "there is no pool slow")):
        with pytest.raises(NotLaunchable, match=words):
            servers(config, name)


@pytest.mark.usefixtures("installed")
def test_a_provider_is_a_pool_with_one_replica_and_the_catalogues_prices() -> None:
    pool = read_text(provider(), ENVIRONMENT).config.pools["fast"]
    assert pool.provider == Provider("openai/gpt-4o-mini", "sk-x", None, 128_000)
    assert [(one.name, one.url) for one in pool.replicas] == [("fast-0", "provider://fast")]
    assert (pool.abort, pool.probe, pool.load) == (False, False, "off")
    ((rates,),) = pool.rates.versions
    assert (rates.uncached, rates.cached, rates.output) == (150_000_000, 75_000_000, 600_000_000)
    assert "sk-x" not in repr(pool)


@pytest.mark.usefixtures("installed")
def test_rates_that_are_given_count() -> None:
    pool = read_text(edited(REPLICA, HOSTED), ENVIRONMENT).config.pools["fast"]
    assert pool.rates.versions[0][0].uncached == 1_250_000_000


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("text", "environ", "words"),
    [
        (provider(), {}, "api_key_env: the environment variable named here is not set"),
        (provider().replace("gpt-4o-mini", "gpt-none"), ENVIRONMENT, "has no price in LiteLLM's catalogue"),
        (provider().replace("openai/", ""), ENVIRONMENT, "must be a model with its provider"),
        (provider("    engine: {model: m}\n"), ENVIRONMENT, "engine: does not go with provider"),
        (provider(f"    {REPLICA}"), ENVIRONMENT, "replicas: does not go with provider"),
        (
            provider().replace("HOSTED_KEY}", "HOSTED_KEY, base_url: 'https://me:secret@x.example'}"),
            ENVIRONMENT,
            "must not carry credentials",
        ),
    ],
)
def test_mistakes_in_a_provider_are_named(text: str, environ: dict[str, str], words: str) -> None:
    (line,) = shown(text, environ)
    assert words in line


def test_without_the_extra_a_provider_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "installed", lambda: False)
    (line,) = shown(provider(), ENVIRONMENT)
    assert "needs the extra `providers`" in line


def test_a_pool_is_replicas_with_prices() -> None:
    text = provider().replace(HOSTED, "abort: true\n")
    assert [line.partition(": ")[2] for line in shown(text)] == [
        "pools.fast.rates: is missing: a pool without prices is not served. Give effective and the three "
        "usd_per_million_... prices (0 where it is free)",
        "pools.fast.replicas: is missing",
    ]


def test_the_catalogue_module_is_what_the_loader_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> Any:
        raise catalogue.NoCatalogue

    monkeypatch.setattr(catalogue, "installed", lambda: True)
    monkeypatch.setattr(catalogue, "listed", missing)
    assert config_pools._rates("openai/gpt-4o-mini") is None
    pool = read_text(edited(REPLICA, HOSTED), ENVIRONMENT).config.pools["fast"]
    assert pool.provider is not None
    assert pool.provider.window is None
