"""Salts: whose requests may find whose blocks in an engine's prefix cache."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from ctxgate.compression import plan as planning
from ctxgate.gateway.cache_salt import Isolation, Salts, kept_secret
from ctxgate.gateway.config import Key
from ctxgate.gateway.errors import Kind, Refused
from ctxgate.gateway.stores.sqlite import SqliteLedger
from ctxgate.inference.wire import parse
from support.gateway import ALPHA, BETA, HELLO, MODEL, STREAM, Gateway, bearer, config
from support.ledgers import price
from support.twin import serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from support.upstream import Upstream

    Start = Callable[..., Awaitable[Gateway]]

SECRET: Final = bytes(32)
EMPTY: Final = parse(b"{}")


def key(team: str = "alpha", organisation: str = "acme") -> Key:
    return Key("k", b"", team, organisation)


def salt(
    level: str = "team", team: str = "alpha", organisation: str = "acme", own: str | None = None
) -> str | None:
    body = EMPTY if own is None else parse(json.dumps({"cache_salt": own}).encode())
    return Salts(SECRET).of(level, key(team, organisation), body)


def test_a_salt_is_the_same_for_ever() -> None:
    """Made with `openssl dgst -sha256 -mac HMAC` from the JSON of level, tenant and own salt."""
    assert salt() == "8eb1ff181a0253d6d2f23b687c372a6e44a58a7251293ad3f92619e899dd1fa9"
    assert salt("organisation", "any") == "77d3427b744137d89b9755f3de1bd9126352071303be00deed0c3aef48f7508e"
    assert salt(own="mine") == "919a65765635f876c8954709bef322cc15ba7152c8c434d102ee983d053cff57"


def test_who_shares_a_salt() -> None:
    assert salt("team", "alpha") != salt("team", "beta")
    assert salt("team", "alpha", "acme") != salt("team", "alpha", "other")
    assert salt("organisation", "alpha") == salt("organisation", "beta")
    assert salt("organisation", "alpha", "acme") != salt("organisation", "alpha", "other")
    assert salt("none") is None
    assert Salts(b"another").of("team", key(), EMPTY) != salt()


def test_an_own_salt_parts_a_domain_and_never_leads_into_another() -> None:
    values = [None, "mine", "yours", salt("team", "beta"), salt("team", "beta", own="mine"), "beta", "acme"]
    found = [
        salt(level, team, own=own) for level in ("team",) for team in ("alpha", "beta") for own in values
    ]
    assert len(set(found)) == len(found)
    assert salt("none", own="mine") is None


def test_joined_names_are_no_other_names() -> None:
    """A tenant's parts stay apart inside the HMAC, whatever stands in them."""
    assert salt("organisation", "x", "acme", own="alpha") != salt("team", "alpha", "acme")
    assert salt("team", 'a","b', "c") != salt("team", "a", 'c","b')


@pytest.mark.parametrize(
    "value", ["1", "false", "[]", '""', '"a@b"', '"a/b"', '"a\\\\b"', '"\\u0000"', f'"{"x" * 129}"']
)
def test_an_own_salt_that_the_engine_would_refuse_is_refused_by_name(value: str) -> None:
    body = parse(b'{"cache_salt":%s}' % value.encode())
    with pytest.raises(Refused) as caught:
        Salts(SECRET).of("team", key(), body)
    assert (caught.value.kind, caught.value.param) == (Kind.INVALID_VALUE, "cache_salt")
    assert Salts(SECRET).of("none", key(), body) is None  # the engine has the word


def test_the_secret_is_never_shown() -> None:
    salts = Salts(b"very secret")
    assert "secret" not in repr(salts).replace("Salts", "")
    assert "very" not in str(salts)


async def test_the_first_secret_stays_for_every_process(tmp_path: Path) -> None:
    first, second = (SqliteLedger(tmp_path / "l.db", price=price) for _ in range(2))
    try:
        assert await kept_secret(first.forms, b"a" * 32, 1) == b"a" * 32
        assert await kept_secret(second.forms, b"b" * 32, 2) == b"a" * 32
    finally:
        await first.close()
        await second.close()


@pytest.mark.parametrize("body", [HELLO, STREAM])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_request_carries_the_salt_of_its_team_and_is_else_untouched(
    upstream: Upstream, start_gateway: Start, path: str, body: dict[str, Any]
) -> None:
    gateway = await start_gateway(upstream, pool={"cache_isolation": "team"})
    raw = json.dumps(body | {"prompt": "x", "stream": body is STREAM}).encode()
    for secret in (ALPHA, BETA, ALPHA):
        assert (await gateway.post(raw, path, [bearer(secret)])).status == 200
    sent = [call.body for call in upstream.calls]
    salts = [json.loads(one)["cache_salt"] for one in sent]
    assert salts[0] == salts[2] != salts[1]
    assert all(len(one) == 64 and set(one) <= set("0123456789abcdef") for one in salts)
    usage = b',"stream_options":{"include_usage":true}' if body is STREAM else b""
    assert sent[0] == raw[:-1] + usage + b',"cache_salt":"' + salts[0].encode() + b'"}'


async def test_embeddings_carry_no_salt(upstream: Upstream, start_gateway: Start) -> None:
    gateway = await start_gateway(upstream, pool={"cache_isolation": "team"})
    raw = b'{"model":"m","input":"x"}'
    assert (await gateway.post(raw, "/v1/embeddings")).status == 200
    assert upstream.calls[0].body == raw


async def test_an_own_salt_is_replaced_where_it_stands(upstream: Upstream, start_gateway: Start) -> None:
    granted = frozenset({"cache_salt"})
    gateway = await start_gateway(upstream, pool={"cache_isolation": "team"}, granted=granted)
    raw = b'{"cache_salt" : "mine", "model":"m","messages":[{"role":"user"}]}'
    assert (await gateway.post(raw)).status == 200
    sent = upstream.calls[0].body
    assert sent == b'{"cache_salt" : "%s", "model":"m","messages":[{"role":"user"}]}' % sent[17:81]
    assert b"mine" not in sent
    refused = await gateway.post(raw.replace(b"mine", b"a/b"))
    assert (refused.status, refused.error["param"]) == (400, "cache_salt")


async def test_without_the_right_an_own_salt_is_refused(upstream: Upstream, start_gateway: Start) -> None:
    gateway = await start_gateway(upstream, pool={"cache_isolation": "team"})
    assert (await gateway.post(HELLO | {"cache_salt": "x"})).status == 400
    assert upstream.calls == []


async def test_a_failed_plan_is_no_way_past_the_isolation(
    upstream: Upstream, start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await start_gateway(upstream, pool={"cache_isolation": "team"})
    await gateway.post(HELLO)
    monkeypatch.setattr(planning, "plan", lambda *_, **__: 1 / 0)
    await gateway.post(HELLO)
    first, second = (call.document["cache_salt"] for call in upstream.calls)
    assert first == second


async def test_the_salt_outlives_a_restart_and_is_one_for_all_gateways_on_a_store(
    upstream: Upstream, start_gateway: Start, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"pool": {"cache_isolation": "team"}, "store": tmp_path / "one.db"}
    first = await start_gateway(upstream, **options)
    second = await start_gateway(upstream, **options)
    await first.post(HELLO)
    await second.post(HELLO)
    await first.stop()
    third = await start_gateway(upstream, **options)
    await third.post(HELLO)
    other = await start_gateway(upstream, pool={"cache_isolation": "team"})
    await other.post(HELLO)
    salts = [call.document["cache_salt"] for call in upstream.calls]
    assert salts[0] == salts[1] == salts[2] != salts[3]


async def test_a_configured_secret_is_used_and_none_is_kept(upstream: Upstream, tmp_path: Path) -> None:
    settings = config(tmp_path / "l.db", [upstream.url], pool={"cache_isolation": "team"})
    gateway = await Gateway.start(replace(settings, cache_salt_secret=SECRET))
    try:
        await gateway.post(HELLO)
        store = gateway.services.ledger.forms  # type: ignore[attr-defined]  # the SQLite ledger's
        assert upstream.calls[0].document["cache_salt"] == salt()
        assert await kept_secret(store, b"b" * 32, 1) == b"b" * 32
    finally:
        await gateway.stop()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("level", "hits"),
    [  # alpha, alpha again, beta of the same organisation, gamma of another
        (Isolation.TEAM, [False, True, False, False]),
        (Isolation.ORGANISATION, [False, True, True, False]),
        (Isolation.NONE, [False, True, True, True]),
    ],
)
async def test_who_hits_whose_blocks_on_a_twin(tmp_path: Path, level: str, hits: list[bool]) -> None:
    prompt = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "all of it " * 60}]}
    async with serving(served_name=MODEL) as twin:
        settings = config(tmp_path / "l.db", [twin.url], pool={"cache_isolation": level})
        gamma = replace(settings.keys[1], key_id="gamma", team="gamma", organisation="other")
        keys = (*settings.keys, replace(gamma, digest=bytes.fromhex(GAMMA_DIGEST)))
        gateway = await Gateway.start(replace(settings, keys=keys))
        try:
            found = []
            for secret in (ALPHA, ALPHA, BETA, GAMMA):
                answer = await gateway.post(prompt, headers=[bearer(secret)])
                usage = answer.document["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert cached in (0, (usage["prompt_tokens"] - 1) // 16 * 16)
                found.append(cached > 0)
            assert found == hits
        finally:
            await gateway.stop()


GAMMA: Final = "cg-gamma-0123456789-0123456789-0123456789"
GAMMA_DIGEST: Final = "4a1ec952f0a3f1c312353d678c6f299424b26dba4d32c893d5195bdf3285a280"
