"""Prices and windows out of LiteLLM's catalogue."""

from __future__ import annotations

from datetime import date
from importlib.util import find_spec

import pytest

from ctxgate.inference import catalogue
from ctxgate.inference.catalogue import Listed, NoCatalogue, listed, read_entry
from ctxgate.inference.rates import Rates

USUAL = {
    "input_cost_per_token": 2.5e-06,
    "cache_read_input_token_cost": 2.5e-07,
    "output_cost_per_token": 1.5e-05,
    "max_input_tokens": 1_050_000,
    "input_cost_per_token_above_272k_tokens": 5e-06,
    "output_cost_per_token_above_272k_tokens": 2.25e-05,
    "cache_read_input_token_cost_above_272k_tokens": 5e-07,
    "input_cost_per_token_above_272k_tokens_batches": 1e-06,
}


def test_prices_are_whole_nano_dollars_per_million_tokens_by_tier() -> None:
    # 2.5e-06 dollars per token are 2.5 dollars, or 2,500,000,000 nano-dollars, per million
    assert read_entry(USUAL) == Listed(
        (
            (0, (2_500_000_000, 250_000_000, 15_000_000_000, 2_500_000_000)),
            (272_000, (5_000_000_000, 500_000_000, 22_500_000_000, 5_000_000_000)),
        ),
        1_050_000,
    )


def test_what_is_not_named_is_priced_as_input_and_never_below_it() -> None:
    entry = {
        "input_cost_per_token": 3e-06,
        "output_cost_per_token": 1.5e-05,
        "cache_creation_input_token_cost": 3.75e-06,
    }
    found = read_entry(entry)
    assert found == Listed(((0, (3_000_000_000, 3_000_000_000, 15_000_000_000, 3_750_000_000)),), None)
    assert read_entry(entry | {"cache_read_input_token_cost": 1.0}) == found
    assert read_entry({"output_cost_per_token": 1e-6}) is None
    assert read_entry({"input_cost_per_token": "free", "output_cost_per_token": 1e-6}) is None


def test_a_card_has_the_tiers_of_one_version() -> None:
    found = read_entry(USUAL)
    assert found is not None
    day = date(2026, 1, 1)
    ((base, long),) = found.card(day).versions
    assert base == Rates(2_500_000_000, 250_000_000, 15_000_000_000, 2_500_000_000, day)
    assert (long.uncached, long.above_prompt_tokens) == (5_000_000_000, 272_000)


def test_an_entry_without_its_provider_counts_only_for_that_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"input_cost_per_token": 1e-06, "output_cost_per_token": 1e-06}
    table = {"gpt": both | {"litellm_provider": "openai"}, "azure/gpt": both | {"max_input_tokens": 7}}
    monkeypatch.setattr(catalogue, "_catalogue", lambda: table)
    assert listed("openai/gpt") is not None
    assert listed("mistral/gpt") is None
    found = listed("azure/gpt")
    assert found is not None
    assert found.window == 7


def test_without_the_package_there_is_no_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "find_spec", lambda _: None)
    catalogue._catalogue.cache_clear()
    with pytest.raises(NoCatalogue):
        listed("openai/gpt")
    assert not catalogue.installed()


@pytest.mark.integration
@pytest.mark.skipif(find_spec("litellm") is None, reason="needs the extra `providers`")
def test_the_packages_own_file_is_what_the_library_uses() -> None:
    from ctxgate.inference.provider_start import imported

    catalogue._catalogue.cache_clear()
    table = imported().model_cost
    for name in ("gpt-4o-mini", "claude-sonnet-4-5"):
        provider = table[name]["litellm_provider"]
        assert listed(f"{provider}/{name}") == read_entry(table[name]) != None  # noqa: E711 - both are something
