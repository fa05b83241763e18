"""Whose prompts a request can hit on a real engine, by the pool's `cache_isolation`."""

from __future__ import annotations

import json
import secrets
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest

from e2e.engine import BLOCK_SIZE
from e2e.gateway_process import SECRET, TRUSTED_SECRET, GatewayConfig, serving, sha256

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from e2e.engine import Engine

pytestmark = pytest.mark.e2e

SISTER: Final = "cg-" + "sis" * 12
"""A key of another team of the same organisation."""

STRANGER: Final = "cg-" + "str" * 12
"""A key of another organisation."""


class Tenants(GatewayConfig):
    """With a second team and a second organisation."""

    def write(self) -> Path:
        path = super().write()
        document = json.loads(path.read_text())
        document["teams"] |= {"design": {"organisation": "acme"}, "rivals": {"organisation": "other"}}
        document["keys"] += [
            {"id": "sister", "team": "design", "sha256": sha256(SISTER)},
            {"id": "stranger", "team": "rivals", "sha256": sha256(STRANGER)},
        ]
        path.write_text(json.dumps(document))
        return path


def prompt() -> list[dict[str, str]]:
    """Several blocks that no engine has seen; the first tokens differ from every other prompt's."""
    return [{"role": "user", "content": f"{secrets.token_hex(8)} {'all of it, word by word, ' * 20}"}]


def cached(url: str, key: str, messages: list[dict[str, str]], **more: Any) -> int | str:
    """`all`, or how many tokens of the prompt were found in the cache."""
    body = {"model": "tiny", "messages": messages, "max_tokens": 1} | more
    answer = httpx.post(
        f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["prompt_tokens"] > 3 * BLOCK_SIZE
    return "all" if found == (usage["prompt_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE else found


@pytest.mark.parametrize(
    ("level", "sister", "stranger"), [("team", 0, 0), ("organisation", "all", 0), ("none", "all", "all")]
)
def test_who_hits_whose_prompts(
    engines: Mapping[str, Engine], tmp_path: Path, level: str, sister: int | str, stranger: int | str
) -> None:
    config = Tenants(tmp_path, {"standard": [engines["standard"].url]}, isolation=level)
    messages = prompt()
    with serving(config) as gateway:
        asked = [SECRET, SECRET, TRUSTED_SECRET, SISTER, STRANGER]
        hits = [cached(gateway.url, key, messages) for key in asked]
        assert hits == [0, "all", "all", sister, stranger]
        text = (gateway.log.read_text(), gateway.exposition())
    with serving(config) as gateway:  # the salt outlives the process
        assert cached(gateway.url, SECRET, messages) == "all"
    assert "salt" not in "".join(text)


def test_two_gateways_on_one_store_share_salts_and_one_on_its_own_does_not(
    engines: Mapping[str, Engine], tmp_path: Path
) -> None:
    pools = {"standard": [engines["standard"].url]}
    messages = prompt()
    with ExitStack() as stack:
        first = stack.enter_context(serving(Tenants(tmp_path, pools)))
        second = stack.enter_context(serving(Tenants(tmp_path, pools)))
        (tmp_path / "alone").mkdir()
        alone = stack.enter_context(serving(Tenants(tmp_path / "alone", pools)))
        found = [cached(one.url, SECRET, messages) for one in (first, second, alone, alone)]
    assert found == [0, "all", 0, "all"]


def test_an_own_salt_parts_a_clients_domain_and_is_no_way_into_another(
    engines: Mapping[str, Engine], tmp_path: Path
) -> None:
    engine = engines["standard"].url
    messages = prompt()
    with serving(Tenants(tmp_path, {"standard": [engine]})) as gateway:
        own = [cached(gateway.url, TRUSTED_SECRET, messages, cache_salt="mine") for _ in range(2)]
        assert own == [0, "all"]
        assert cached(gateway.url, TRUSTED_SECRET, messages) == 0
        assert cached(gateway.url, TRUSTED_SECRET, messages, cache_salt="yours") == 0
    assert cached(engine, "none", messages, cache_salt="mine") == 0  # the engine never saw that salt
    assert cached(engine, "none", messages) == 0  # and nothing went out without one
