"""Originals over HTTP: by their own team alone, in the client's bytes, deletable by task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ctxgate.gateway.archive import reference_of
from ctxgate.gateway.ledger import LedgerUnavailable
from support.gateway import BETA, bearer

if TYPE_CHECKING:
    from support.gateway import Gateway

TENANT = "acme/alpha"
RAW = b'{"role": "tool",  "content": "half a pair: \\ud83d", "x": 1.0}'
ID = reference_of(TENANT, b"digest")
NONE = "0" * 24


@pytest.fixture
async def kept(gateway: Gateway) -> Gateway:
    """A gateway whose team alpha has an original in the task `fix-bug`."""
    await gateway.services.archive.keep(TENANT, "fix-bug", {ID: RAW}, 1, b"root")
    return gateway


async def test_context_m8_an_original_comes_back_as_the_client_had_sent_it(kept: Gateway) -> None:
    answer = await kept.get(f"/v1/context/{ID}")
    assert answer.status == 200
    assert answer.header("content-type") == "application/json"
    assert answer.body == b'{"id":"%s","object":"context.original","original":%s}' % (ID.encode(), RAW)


@pytest.mark.parametrize("id_", [NONE, "x", ID.upper(), ID[:-1], "..%2f..%2fetc", "%00", "'--"])
async def test_an_unknown_id_is_404_in_the_envelope(kept: Gateway, id_: str) -> None:
    answer = await kept.get(f"/v1/context/{id_}")
    assert answer.status == 404
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["code"] in {"context_not_found", "unknown_url"}


async def test_context_p6_another_teams_id_is_as_unknown_as_one_never_given(
    kept: Gateway,
) -> None:
    other = [bearer(BETA), ("x-ctxgate-task", "fix-bug")]
    answers = [await kept.get(f"/v1/context/{id_}", other) for id_ in (ID, NONE)]
    assert [answer.status for answer in answers] == [404, 404]
    assert answers[0].body == answers[1].body
    assert (await kept.get("/v1/context?task=fix-bug", other, "DELETE")).document["deleted"] == 0
    assert (await kept.get(f"/v1/context/{ID}")).status == 200


async def test_a_tasks_originals_are_deleted_and_counted(kept: Gateway) -> None:
    answer = await kept.get("/v1/context?task=fix-bug", method="DELETE")
    assert answer.status == 200
    assert answer.document == {"object": "context.deleted", "task": "fix-bug", "deleted": 1}
    assert (await kept.get(f"/v1/context/{ID}")).error["code"] == "context_not_found"
    assert (await kept.get("/v1/context?task=fix-bug", method="DELETE")).document["deleted"] == 0


async def test_any_task_name_can_be_named(kept: Gateway) -> None:
    await kept.services.archive.keep(TENANT, "t\u00e4sk & more/1", {NONE: RAW}, 1)
    path = "/v1/context?task=t%C3%A4sk%20%26%20more%2F1"
    assert (await kept.get(path, method="DELETE")).document["deleted"] == 1


@pytest.mark.parametrize(
    ("path", "method", "headers", "status", "code"),
    [
        (f"/v1/context/{ID}", "GET", (), 401, "missing_api_key"),
        ("/v1/context?task=fix-bug", "DELETE", (), 401, "missing_api_key"),
        ("/v1/context", "DELETE", None, 400, "invalid_value"),
        ("/v1/context?task=", "DELETE", None, 400, "invalid_value"),
        ("/v1/context?task=" + "x" * 257, "DELETE", None, 400, "invalid_value"),
        (f"/v1/context/{ID}", "DELETE", None, 405, "method_not_allowed"),
        ("/v1/context?task=fix-bug", "GET", None, 405, "method_not_allowed"),
    ],
)
async def test_bad_calls(kept: Gateway, path: str, method: str, headers: Any, status: int, code: str) -> None:
    answer = await kept.get(path, [bearer()] if headers is None else headers, method)
    assert (answer.status, answer.error["code"]) == (status, code)
    if status == 400:
        assert answer.error["param"] == "task"
    assert (await kept.get(f"/v1/context/{ID}")).status == 200


async def test_a_store_that_does_not_answer_is_503(kept: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any) -> Any:
        raise LedgerUnavailable("/secret/path")

    monkeypatch.setattr(kept.services.archive, "get", fails)
    monkeypatch.setattr(kept.services.archive, "delete", fails)
    for path, method in ((f"/v1/context/{ID}", "GET"), ("/v1/context?task=fix-bug", "DELETE")):
        answer = await kept.get(path, method=method)
        assert (answer.status, answer.error["code"]) == (503, "ledger_unavailable")
        assert b"secret" not in answer.body


async def test_the_description_tells_of_both(kept: Gateway) -> None:
    paths = (await kept.get("/openapi.json", ())).document["paths"]
    get, delete = paths["/v1/context/{id}"]["get"], paths["/v1/context"]["delete"]
    assert get["security"] == delete["security"] == [{"key": []}]
    assert "404" in get["responses"]
    assert [each["name"] for each in delete["parameters"]] == ["task"]
