"""The routes beside the metered ones: models, usage, health, metrics and the documentation page."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

import ctxgate
from ctxgate.gateway import report, telemetry
from ctxgate.gateway.archive import is_reference
from ctxgate.gateway.edge import read_headers
from ctxgate.gateway.errors import Kind, Refused, body_of, headers_of
from ctxgate.gateway.identity import MAX_TASK, authenticate, tenant_of
from ctxgate.gateway.instants import FORMS, instant_us
from ctxgate.gateway.ledger import EVERYTHING, LedgerError
from ctxgate.gateway.openapi import add_metered_paths

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from ctxgate.gateway.app import Application
    from ctxgate.gateway.config import Key, Model
    from ctxgate.gateway.services import Services

T = TypeVar("T")
Grouping = Literal["task", "team", "pool", "model", "day", "cause", "class"]
_MOST_ROWS: Final = 10_000
_LAST_OFFSET: Final = 2**40
_DOCS_ASSETS: Final = "/docs/assets"


def management(application: Application) -> FastAPI:
    """The FastAPI application of everything that is not metered."""
    app = FastAPI(
        title="ctxgate", version=ctxgate.__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _failed)
    app.router.redirect_slashes = False
    app.state.docs = application.config.docs
    _add_models(app, application)
    _add_usage(app, application)
    _add_context(app, application)
    _add_routing(app, application)
    _add_operations(app, application)
    if application.config.docs:
        _add_docs(app)
    else:
        _add_front(app)
    return app


def _services(application: Application) -> Services:
    if application.services is None:
        raise Refused(Kind.INTERNAL, "The gateway is not running.")
    return application.services


def _caller(application: Application, request: Request) -> Key:
    return authenticate(read_headers(request.scope["headers"]), _services(application).keys.find)


def _add_models(app: FastAPI, application: Application) -> None:
    @app.get("/v1/models", summary="Models, with the largest window any pool offers")
    async def models(request: Request) -> JSONResponse:
        _caller(application, request)
        services = _services(application)
        entries = [_model_entry(services, m) for m in services.config.models.values()]
        return JSONResponse({"object": "list", "data": entries})

    @app.get("/v1/models/{name:path}", summary="One model")
    async def model(request: Request, name: str) -> JSONResponse:
        _caller(application, request)
        services = _services(application)
        found = services.config.models.get(name)
        if not name:  # the list, by a client that ends its paths with a slash
            return await models(request)
        if found is None:
            message = f"The model '{name[:128]}' does not exist or you do not have access to it."
            raise Refused(Kind.MODEL_NOT_FOUND, message, "model")
        return JSONResponse(_model_entry(services, found))


def _model_entry(services: Services, model: Model) -> dict[str, Any]:
    pools = [services.config.pools[name] for name in model.pools]
    window = services.fleet.window(pools, model.served_name or model.name)
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "ctxgate",
        "max_model_len": window,
        "pools": list(model.pools),
    }


def _add_usage(app: FastAPI, application: Application) -> None:
    @app.get("/v1/usage", summary="Tokens and cost of the caller's own team")
    async def usage(
        request: Request,
        by: Annotated[Grouping, Query(description="what one row stands for")] = "task",
        since: Annotated[str, Query(description=f"attempts opened from then on: {FORMS}")] = "0",
        until: Annotated[str | None, Query(description="attempts opened before then")] = None,
        limit: Annotated[int, Query(ge=1, le=_MOST_ROWS, description="rows, the dearest first")] = 1_000,
        offset: Annotated[
            int, Query(ge=0, le=_LAST_OFFSET, description="rows to skip; an answer's `next` continues it")
        ] = 0,
    ) -> Response:
        key = _caller(application, request)
        services = _services(application)
        now_us = services.now_us()
        ask = partial(
            services.ledger.report,
            where={"organisation": key.organisation, "team": key.team},
            since_us=_instant_us("since", since, now_us),
            until_us=None if until is None else _instant_us("until", until, now_us),
        )
        rows = await ask(by, dearest_first=by != "day", limit=limit + 1, offset=offset)
        # Asked for apart: it covers every row, and a request with attempts in two groups is one in it.
        totals = await ask(EVERYTHING)
        # In a thread: thousands of rows on the loop would hold every stream up.
        page = partial(report.as_page, rows, by, limit=limit, offset=offset)
        body = await asyncio.to_thread(page, totals=totals[0] if totals else None)
        return Response(body, media_type="application/json")


def _instant_us(name: str, text: str, now_us: int) -> int:
    try:
        return instant_us(text, datetime.fromtimestamp(now_us / 1e6, UTC))
    except ValueError as error:
        raise Refused(Kind.INVALID_VALUE, f"'{name}': {error}.", name) from error


def _add_context(app: FastAPI, application: Application) -> None:
    @app.get(
        "/v1/context/{id}",
        summary="A message that left a prompt, as the client had sent it",
        responses={404: {"description": "No original of the caller's team is kept under this id"}},
    )
    async def original(request: Request, id: str) -> Response:  # noqa: A002 - the parameter's name is on the wire
        key = _caller(application, request)
        archive = _services(application).archive
        # Another team's id is as unknown as one that was never given.
        found = await _stored(archive.get(tenant_of(key), id)) if is_reference(id) else None
        if found is None:
            raise Refused(Kind.CONTEXT_NOT_FOUND, "No original is kept under this id.", "id")
        body = b'{"id":"%s","object":"context.original","original":%s}' % (id.encode(), found)
        return Response(body, media_type="application/json")

    @app.delete("/v1/context", summary="Delete what is kept of a task of the caller's team")
    async def forget(
        request: Request,
        task: Annotated[str, Query(min_length=1, max_length=MAX_TASK, description="the task's name")],
    ) -> JSONResponse:
        key = _caller(application, request)
        services = _services(application)
        tenant = tenant_of(key)
        deleted = await _stored(services.archive.delete(tenant, task, services.now_us()))
        services.context.wiped(tenant, deleted.forms)
        services.recall.forget(tenant)  # what is left of the team's is indexed again when asked for
        return JSONResponse({"object": "context.deleted", "task": task, "deleted": deleted.originals})


def _add_routing(app: FastAPI, application: Application) -> None:
    @app.get(
        "/v1/routing/{request_id}",
        summary="Why one of the team's latest requests went where it did, and what came of it",
        responses={404: {"description": "No such request of the caller's team is kept by this process"}},
    )
    async def decisions(request: Request, request_id: str) -> JSONResponse:
        key = _caller(application, request)
        kept = _services(application).routing.decisions
        # Another team's request is as unknown as one that never was.
        found = kept.of(request_id, key.organisation, key.team)
        if found is None:
            message = "No request of this id is kept; each process keeps its latest ones."
            raise Refused(Kind.REQUEST_NOT_FOUND, message, "request_id")
        return JSONResponse({"id": request_id, "object": "routing.decisions", "attempts": found})


async def _stored(work: Awaitable[T]) -> T:
    """What the store answers; where it cannot, that is what the caller is told."""
    try:
        return await work
    except LedgerError as error:
        raise Refused(Kind.LEDGER_UNAVAILABLE, "The store does not answer.") from error


def _add_operations(app: FastAPI, application: Application) -> None:
    @app.get("/health", summary="The process is alive")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready", summary="Every pool has a replica that may be chosen, and the ledger takes writes")
    async def ready() -> JSONResponse:
        services = _services(application)
        pools = {
            name: {
                "replicas": len(pool.replicas),
                "healthy": sum(s.healthy for s in services.fleet.snapshot((pool,))),
            }
            for name, pool in services.config.pools.items()
        }
        problem = services.ledger.problem
        healthy = all(pool["healthy"] for pool in pools.values())
        well = problem is None and healthy and services.fleet.settled() and services.client.ready
        body = {"status": "ready" if well else "not ready", "pools": pools, "ledger": problem or "ok"}
        return JSONResponse(body, status_code=200 if well else 503)

    @app.get("/metrics", summary="Prometheus metrics")
    async def metrics() -> Response:
        services = _services(application)
        services.telemetry.observe(services.fleet, services.ledger, services.misses.index)
        services.scaling.show()
        text = await asyncio.to_thread(services.telemetry.exposition)
        return Response(text, media_type=telemetry.CONTENT_TYPE)

    @app.head("/", include_in_schema=False)
    async def root() -> Response:
        return Response()


def _add_front(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def front() -> dict[str, str]:
        return {"service": "ctxgate"}


def _add_docs(app: FastAPI) -> None:
    # Imported here: the bundle is data for one page, and the page works without any other host.
    from swagger_ui_bundle import swagger_ui_path  # noqa: PLC0415 - see above

    app.mount(_DOCS_ASSETS, StaticFiles(directory=swagger_ui_path), name="docs-assets")

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        return JSONResponse(add_metered_paths(app.openapi()))

    @app.get("/", include_in_schema=False)
    async def front() -> RedirectResponse:
        return RedirectResponse("/docs")

    @app.get("/docs", include_in_schema=False)
    @app.get("/docs/", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="ctxgate",
            swagger_js_url=f"{_DOCS_ASSETS}/swagger-ui-bundle.js",
            swagger_css_url=f"{_DOCS_ASSETS}/swagger-ui.css",
            swagger_favicon_url=f"{_DOCS_ASSETS}/favicon-32x32.png",
        )


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)  # noqa: S101 - narrows a type; the handler is registered for it
    headers = {name.decode(): value.decode() for name, value in headers_of(error)}
    return Response(body_of(error), error.status, headers, "application/json")


async def _failed(request: Request, _: Exception) -> Response:
    return await _refused(request, Refused(Kind.INTERNAL, "The gateway failed to handle this request."))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - as above
    if error.status_code == 405:
        refused = Refused(Kind.METHOD_NOT_ALLOWED, f"{request.method} is not allowed on this path.")
        response = await _refused(request, refused)
        response.headers.update(error.headers or {})
        return response
    where = " See /docs for what is served." if request.app.state.docs else ""
    return await _refused(request, Refused(Kind.ROUTE_NOT_FOUND, f"Unknown request URL.{where}"))


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - as above
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return await _refused(request, Refused(Kind.INVALID_VALUE, f"'{name}': {first['msg']}.", name))
