"""The floor for Python: a pass-through proxy of FastAPI and aiohttp that parses the body and forwards it.

No keys, no metering, no retries: what is left is the price of the framework and the client.

usage: python -m tests.bench.floor --port N --upstream URL
"""

from __future__ import annotations

import argparse
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_PATH: Final = "/v1/chat/completions"


def make_app(upstream: str) -> FastAPI:
    """The proxy in front of one server."""
    state: dict[str, aiohttp.ClientSession] = {}

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as session:
            state["session"] = session
            yield

    app = FastAPI(lifespan=lifespan, docs_url=None, openapi_url=None)

    @app.post(_PATH)
    async def chat(request: Request) -> Response:
        body = await request.body()
        try:
            parsed: Any = msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            return JSONResponse({"error": {"message": str(error)}}, 400)
        answer = await state["session"].post(
            upstream + _PATH, data=body, headers={"content-type": "application/json"}
        )
        media_type = answer.headers.get("content-type")
        if not parsed.get("stream"):
            async with answer:
                return Response(await answer.read(), answer.status, media_type=media_type)
        return StreamingResponse(_chunks(answer), answer.status, media_type=media_type)

    return app


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with answer:
        async for chunk in answer.content.iter_any():
            yield chunk


def main() -> None:
    parser = argparse.ArgumentParser(description="the minimal pass-through proxy")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", required=True, help="root of the server, without a trailing slash")
    args = parser.parse_args()
    uvicorn.run(
        make_app(args.upstream),
        host="127.0.0.1",
        port=args.port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
