"""Everything beside the metered surfaces, and the error envelope on every layer."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway import report
from ctxgate.gateway.flow import PATHS
from ctxgate.inference.finding import Finding
from ctxgate.inference.probe import Probe
from ctxgate.inference.providers import AnyClient
from support.gateway import BETA, FORGED, HELLO, bearer, until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.gateway import Gateway
    from support.upstream import Upstream

    Start = Callable[..., Awaitable[Gateway]]


@pytest.mark.parametrize(
    ("method", "path", "key", "status", "code"),
    [
        ("GET", "/nowhere", True, 404, "unknown_url"),
        ("POST", "/v1/responses", True, 404, "unknown_url"),
        ("POST", "/", True, 405, "method_not_allowed"),
        ("POST", "/v1/models", True, 405, "method_not_allowed"),
        ("DELETE", "/v1/usage", True, 405, "method_not_allowed"),
        ("GET", "/v1/chat/completions", True, 405, "method_not_allowed"),
        ("PUT", "/v1/embeddings", True, 405, "method_not_allowed"),
        ("OPTIONS", "/v1/completions", True, 405, "method_not_allowed"),
        ("POST", "/v1/chat/completions", False, 401, "missing_api_key"),
        ("GET", "/v1/models", False, 401, "missing_api_key"),
        ("GET", "/v1/models/m", False, 401, "missing_api_key"),
        ("GET", "/v1/usage", False, 401, "missing_api_key"),
        ("GET", "/v1/models/none", True, 404, "model_not_found"),
        ("GET", "/v1/usage?by=colour", True, 400, "invalid_value"),
        ("GET", "/v1/usage?limit=0", True, 400, "invalid_value"),
        ("GET", "/v1/usage?limit=10001", True, 400, "invalid_value"),
        ("GET", "/v1/usage?offset=-1", True, 400, "invalid_value"),
        ("GET", "/v1/usage?since=-1", True, 400, "invalid_value"),
        ("GET", "/v1/usage?since=x", True, 400, "invalid_value"),
        ("GET", "/v1/usage?since=99999999999999999999999", True, 400, "invalid_value"),
        ("GET", "/v1/usage?until=1e3", True, 400, "invalid_value"),
        ("GET", "/docs/assets/none.js", True, 404, "unknown_url"),
        ("GET", "/docs/assets/../../config.py", True, 404, "unknown_url"),
        ("POST", "/docs/assets/swagger-ui.css", True, 405, "method_not_allowed"),
    ],
)
async def test_every_layer_answers_in_openais_envelope(
    gateway: Gateway, method: str, path: str, key: bool, status: int, code: str
) -> None:
    answer = await gateway.get(path, [bearer()] if key else [], method)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert answer.error["type"] == "invalid_request_error"
    if status == 405:
        assert answer.header("allow")


async def test_an_unknown_key_is_401_in_every_place_a_key_may_stand(gateway: Gateway) -> None:
    for headers in (
        [bearer(FORGED)],
        [("x-api-key", FORGED)],
        [("api-key", FORGED)],
        [("authorization", "Bearer")],
        [("authorization", "Basic dXNlcjpwYXNz")],
        [("authorization", f"Token {bearer()[1]}")],
    ):
        assert (await gateway.post(HELLO, headers=headers)).status == 401
        assert (await gateway.get("/v1/models", headers)).status == 401
    for headers in ([bearer()], [("x-api-key", bearer()[1][7:])], [("Api-Key", bearer()[1][7:])]):
        assert (await gateway.get("/v1/models", headers)).status == 200


async def test_head_of_the_root_is_cheap_and_bodiless(gateway: Gateway) -> None:
    async with gateway.wire() as wire:
        for method, path, status in (("HEAD", "/", 200), ("HEAD", "/v1/chat/completions", 405)):
            wire.request(path, None, [], method)
            assert (await wire.answer(head_only=True)).status == status
        wire.request("/health")
        assert (await wire.answer()).document == {"status": "ok"}  # no byte of a body came before it


@pytest.mark.parametrize("path", [*PATHS, "/v1/models"])
async def test_a_trailing_slash_and_a_query_change_nothing(
    gateway: Gateway, upstream: Upstream, path: str
) -> None:
    body = HELLO | {"prompt": "x", "input": "x"}
    for variant in (path, path + "/", path + "?beta=true", path + "/?a=b"):
        answer = await (gateway.get(variant) if path == "/v1/models" else gateway.post(body, variant))
        assert answer.status == 200, variant
    assert {call.path for call in upstream.calls} <= {path}


async def test_models_are_listed_with_the_window_that_the_probe_saw(
    gateway: Gateway, upstream: Upstream
) -> None:
    record = gateway.services.fleet.record("standard", "standard-0")
    await until(lambda: record.windows)
    answer = await gateway.get("/v1/models")
    entry = {
        "id": "m",
        "object": "model",
        "created": 0,
        "owned_by": "ctxgate",
        "max_model_len": 4096,
        "pools": ["standard"],
    }
    assert answer.document == {"object": "list", "data": [entry]}
    assert (await gateway.get("/v1/models/m")).document == entry


async def test_ready_follows_the_replicas(gateway: Gateway, upstream: Upstream) -> None:
    record = gateway.services.fleet.record("standard", "standard-0")
    await until(lambda: record.windows)
    ready = await gateway.get("/ready", ())
    assert (ready.status, ready.document["pools"]) == (200, {"standard": {"replicas": 1, "healthy": 1}})
    gateway.services.fleet.probed("standard", "standard-0", Probe(Finding.UNWELL))
    answer = await gateway.get("/ready", ())
    assert (answer.status, answer.document["status"]) == (503, "not ready")
    assert (await gateway.get("/health", ())).status == 200


async def test_usage_sums_the_callers_team(gateway: Gateway) -> None:
    for _ in range(3):
        await gateway.post(HELLO, headers=[bearer(), ("x-ctxgate-task", "t1")])
    await gateway.post(HELLO, headers=[bearer(), ("x-ctxgate-task", "t2")])
    await gateway.post(HELLO, headers=[bearer(BETA)])
    await gateway.rows()
    document = (await gateway.get("/v1/usage?by=task")).document
    found = {row["group"]: row for row in document["rows"]}
    assert set(found) == {"t1", "t2"}
    assert found["t1"]["requests"] == 3
    assert (found["t1"]["uncached_tokens"], found["t1"]["cached_tokens"]) == (24, 96)
    assert found["t1"]["output_tokens"] == 9
    later = (await gateway.get("/v1/usage?since=4102444800")).document  # the year 2100
    assert later["rows"] == []


async def test_usage_comes_in_pages_the_dearest_first_with_the_total_of_all(gateway: Gateway) -> None:
    for task, requests in (("t1", 1), ("t2", 3), ("t3", 2)):
        for _ in range(requests):
            await gateway.post(HELLO, headers=[bearer(), ("x-ctxgate-task", task)])
    await gateway.rows()
    first = (await gateway.get("/v1/usage?limit=2")).document
    found = [(row["group"], row["key_id"]) for row in first["rows"]]
    assert found == [("t2", "alpha-ci"), ("t3", "alpha-ci")]
    assert (first["next"], first["total"]["requests"]) == (2, 6)
    last = (await gateway.get(f"/v1/usage?limit=2&offset={first['next']}")).document
    assert [row["group"] for row in last["rows"]] == ["t1"]
    assert (last["next"], last["total"]["requests"]) == (None, 6)


@pytest.mark.parametrize(
    ("query", "requests"),
    [("since=1h", 1), ("until=1h", 0), ("since=2100-01-01", 0), ("until=2100-01-01", 1), ("since=0", 1)],
)
async def test_usage_takes_the_moments_of_the_command(gateway: Gateway, query: str, requests: int) -> None:
    await gateway.post(HELLO)
    await gateway.rows()
    document = (await gateway.get(f"/v1/usage?{query}")).document
    assert document["total"]["requests"] == requests


async def test_usage_is_put_into_words_off_the_event_loop(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    real = report.as_page

    def noting(*arguments: Any, **options: Any) -> bytes:
        threads.append(threading.current_thread())
        return real(*arguments, **options)

    monkeypatch.setattr(report, "as_page", noting)
    assert (await gateway.get("/v1/usage")).status == 200
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


async def test_ready_follows_the_ledger(gateway: Gateway) -> None:
    path = gateway.application.config.store
    assert (await gateway.get("/ready", ())).document["ledger"] == "ok"
    path.rename(path.with_name("kept"))
    gateway.services.ledger._file.check()  # type: ignore[attr-defined]  # the SQLite ledger's
    answer = await gateway.get("/ready", ())
    assert (answer.status, answer.document["status"]) == (503, "not ready")
    assert answer.document["ledger"] == "the ledger's file was deleted or replaced"


async def test_the_documentation_needs_no_other_host_and_describes_the_metered_paths(
    gateway: Gateway,
) -> None:
    page = await gateway.get("/docs", ())
    assert page.status == 200
    for link in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png"):
        assert f"/docs/assets/{link}".encode() in page.body
        assert (await gateway.get(f"/docs/assets/{link}", ())).status == 200
    assert b"https://" not in page.body
    document = (await gateway.get("/openapi.json", ())).document
    assert set(PATHS) | {"/v1/models", "/v1/usage", "/health", "/ready", "/metrics"} <= set(document["paths"])
    operation = document["paths"]["/v1/chat/completions"]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"]["required"] == [
        "model",
        "messages",
    ]
    assert operation["security"] == [{"key": []}]
    assert "security" not in document["paths"]["/health"]["get"]


async def test_the_description_tells_of_every_header_read_or_sent(gateway: Gateway) -> None:
    document = (await gateway.get("/openapi.json", ())).document
    sent = {name for name, _ in (await gateway.post(HELLO)).headers if name.startswith("x-")}
    assert sent == {"x-request-id", "x-ctxgate-pool", "x-ctxgate-replica", "x-ctxgate-task", "x-ctxgate-cost"}
    for path in PATHS:
        operation = document["paths"][path]["post"]
        layout = next(one for one in operation["parameters"] if one["name"] == "x-ctxgate-layout")
        assert layout["schema"]["enum"] == ["off", "safe", "declared", "learned"]
        compaction = next(one for one in operation["parameters"] if one["name"] == "x-ctxgate-compaction")
        assert compaction["schema"]["enum"] == ["off", "window", "auto"]
        assert "x-ctxgate-task" in {one["name"] for one in operation["parameters"]}
        told = {"x-ctxgate-layout", "x-ctxgate-compaction", "x-ctxgate-expected-cached", "x-ctxgate-miss"}
        told |= {"x-ctxgate-tier", "x-ctxgate-predicted-ttft-ms", "x-ctxgate-fits"}
        asked = {one["name"] for one in operation["parameters"]}
        assert {"x-ctxgate-class", "x-ctxgate-ttft-ms", "x-ctxgate-latency-ms"} <= asked
        assert sent | told == set(operation["responses"]["200"]["headers"])
        assert set(operation["responses"]["408"]["headers"]) == {"x-request-id"}


async def test_a_newcomer_is_led_to_the_documentation(gateway: Gateway) -> None:
    root = await gateway.get("/", ())
    assert (root.status, root.header("location")) == (307, "/docs")
    assert (await gateway.get("/docs/", ())).body == (await gateway.get("/docs", ())).body
    assert "/docs" in (await gateway.get("/nowhere", ())).error["message"]


async def test_without_documentation_nothing_leads_to_it(upstream: Upstream, start_gateway: Start) -> None:
    gateway = await start_gateway(upstream, docs=False)
    root = await gateway.get("/", ())
    assert (root.status, root.document) == (200, {"service": "ctxgate"})
    assert "/docs" not in (await gateway.get("/nowhere", ())).error["message"]


async def test_the_documentation_can_be_switched_off(upstream: Upstream, start_gateway: Start) -> None:
    gateway = await start_gateway(upstream, docs=False)
    for path in ("/docs", "/docs/", "/openapi.json", "/docs/assets/swagger-ui.css", "/redoc"):
        assert (await gateway.get(path, ())).error["code"] == "unknown_url"


async def test_a_failing_store_is_an_error_in_the_envelope(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any, **__: Any) -> Any:
        raise OSError("disk /secret/path")

    monkeypatch.setattr(gateway.services.ledger, "report", fails)
    answer = await gateway.get("/v1/usage")
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert b"secret" not in answer.body


async def test_gateways_k7_random_paths_and_tasks_make_no_new_metric(gateway: Gateway) -> None:
    await gateway.post(HELLO)
    before = set(await gateway.metrics())
    async with gateway.wire() as wire:
        for number in range(300):
            wire.request(f"/random/{number}", None, [bearer()])
            assert (await wire.answer()).status == 404
        for number in range(100):
            wire.request(body=HELLO, headers=[bearer(), ("x-ctxgate-task", f"task-{number}")])
            assert (await wire.answer()).status == 200
        for number in range(50):
            wire.request(body=HELLO | {"model": f"model-{number}"}, headers=[bearer()])
            assert (await wire.answer()).status == 404
    after = await gateway.metrics()
    assert set(after) - before <= {
        'ctxgate_requests_total{status="404",surface="chat"}',
        'ctxgate_requests_created{status="404",surface="chat"}',
    }
    assert not any(word in name for name in after for word in ("task", "random", "alpha-ci", "/"))
    assert after['ctxgate_requests_total{status="200",surface="chat"}'] == 101


async def test_metrics_agree_with_the_ledger(gateway: Gateway) -> None:
    for number in range(7):
        await gateway.post(HELLO | {"stream": bool(number % 2)})
    rows = await gateway.rows()
    metrics = await gateway.metrics()

    def total(name: str) -> float:
        return sum(value for key, value in metrics.items() if key.startswith(f"{name}_total{{"))

    assert total("ctxgate_attempts") == len(rows) == 7
    assert (
        total("ctxgate_cost_nano_dollars") == sum(row.settled.charge.total or 0 for row in rows) == 7 * 17_200
    )
    assert total("ctxgate_tokens") == 7 * 43
    assert metrics['ctxgate_ttft_seconds_count{model="m",pool="standard"}'] == 3


def test_the_example_of_an_error_in_the_description_is_the_envelope_itself() -> None:
    from ctxgate.gateway.errors import Kind, Refused, body_of
    from ctxgate.gateway.openapi import add_metered_paths

    document = add_metered_paths({"paths": {}})
    schema = document["components"]["schemas"]["Error"]["properties"]["error"]
    sent = json.loads(body_of(Refused(Kind.INTERNAL, "x")))["error"]
    assert set(schema["required"]) == set(sent)


async def test_ready_waits_for_the_library_of_providers(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AnyClient, "ready", False)
    assert (await gateway.get("/ready", ())).status == 503
    monkeypatch.setattr(AnyClient, "ready", True)
    assert (await gateway.get("/ready", ())).status == 200
