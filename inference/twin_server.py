"""The twin over HTTP: the routes of a vLLM API server that a gateway and its clients use.

Wire shapes, ids, errors and counters are those of vLLM 0.32 started with prompt-token details,
per-request metrics, request-id headers, scale-out routes, tool choice and load tracking.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import uuid
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from ctxgate.inference.kv_publisher import EventAddresses, publishing
from ctxgate.inference.prompts import PromptRenderer
from ctxgate.inference.twin import Twin
from ctxgate.inference.twin_engine import TwinEngine, deltas
from ctxgate.inference.twin_http import EventStream, RequestIdHeader, unless_disconnected
from ctxgate.inference.twin_intake import Intake
from ctxgate.inference.twin_job import Job, Vocabulary
from ctxgate.inference.twin_metrics import exposition, load_of
from ctxgate.inference.twin_profile import PROFILES, Profile
from ctxgate.inference.twin_render import generate_request
from ctxgate.inference.twin_replies import ChatReply, CompletionReply, Envelope, model_card
from ctxgate.inference.twin_requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Refusal,
    TokenizeChatRequest,
    TokenizeTextRequest,
    decode,
    parse,
    validate,
)
from ctxgate.inference.twin_text import Answer, LogProbabilities

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

    from starlette.requests import Request
    from starlette.types import ASGIApp

    from ctxgate.inference.twin_replies import Reply
    from ctxgate.inference.twin_requests import Sampling
    from ctxgate.inference.twin_text import Delta

AskedT = TypeVar("AskedT")
PromptT = TypeVar("PromptT")

VERSION: Final = "0.32.0"
SESSION: Final = "x-session-id"
LARGE_BODY: Final = 64 * 1024  # bytes from which rendering leaves the event loop
KV_TOKENS: Final = 2**20  # what the cache holds unless told otherwise


@dataclass(frozen=True, slots=True)
class TwinSettings:
    """How a twin is started. `blocks` counts the null block, as the engine's option does."""

    profile: Profile = PROFILES["standard"]
    served_name: str = "tiny"
    block_size: int = 16
    blocks: int | None = None
    max_model_len: int = 131072
    max_num_queued_reqs: int | None = None
    kv_events: EventAddresses | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool; by default as many as hold KV_TOKENS."""
        return -(-KV_TOKENS // self.block_size) + 1 if self.blocks is None else self.blocks

    @property
    def fingerprint(self) -> str:
        """What `system_fingerprint` says: it changes with the settings."""
        return f"vllm-{VERSION}-{hashlib.sha256(repr(self).encode()).hexdigest()[:8]}"


@dataclass(slots=True)
class _Generation:
    """A request on its way: its reply, its jobs by outside id, its answers by job id."""

    reply: Reply
    session: str | None = None
    jobs: dict[str, list[Job]] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)


class TwinServer:
    """The application state behind the routes."""

    def __init__(self, settings: TwinSettings, renderer: PromptRenderer | None = None) -> None:
        """Raise ValueError where the window does not fit the blocks."""
        self.settings = settings
        self.renderer = renderer or PromptRenderer(name=settings.served_name)
        self.intake = Intake(self.renderer, settings.max_model_len)
        self.vocabulary = Vocabulary(self.renderer.printable_words(), self.renderer.end)
        self.twin = Twin(
            settings.profile,
            self.vocabulary,
            blocks=settings.num_blocks,
            block_size=settings.block_size,
            max_model_len=settings.max_model_len,
        )
        self.engine = TwinEngine(self.twin)
        self.started = time.time()
        self.in_flight = 0
        self._steps: asyncio.Task[None] | None = None
        self._pieces: dict[int, str] = {}
        self._logprobs = LogProbabilities(self.piece, self.vocabulary.words)

    def app(self) -> ASGIApp:
        """The ASGI application; its lifespan runs the engine."""
        routes = [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions/render", self.render_chat, methods=["POST"]),
            Route("/v1/completions/render", self.render_completions, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/inference/v1/abort_requests", self.abort, methods=["POST"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/load", self.load, methods=["GET"]),
        ]
        handlers: dict[Any, Any] = {Refusal: _refused, HTTPException: _no_route}
        return RequestIdHeader(Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan))

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with publishing(self.settings.kv_events) as self.engine.publish:
            self.twin.pool.events = None if self.engine.publish is None else []
            self._steps = asyncio.create_task(self.engine.run())
            try:
                yield
            finally:
                self._steps.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._steps

    def piece(self, token: int) -> str:
        """The text of one token; empty for special ones."""
        text = self._pieces.get(token)
        if text is None:
            text = self._pieces[token] = self.renderer.decode([token])
        return text

    async def chat(self, request: Request) -> Response:
        """Chat completions."""
        body = await request.body()
        asked = parse(ChatRequest, body)
        self._check_model(asked.model)
        self._check_admission(asked.choices)
        prompt = await _off_loop(len(body), self.intake.chat, asked)
        asked.check_sampling()
        envelope = self._envelope("chatcmpl", request, asked)
        answers = [self._answer(asked, index, 0) for index in range(asked.choices)]
        reply = ChatReply(asked, envelope, prompt, answers, self._logprobs)
        generation = _Generation(reply, request.headers.get(SESSION))
        limit = self.intake.limit(asked.limit, len(prompt))
        self._add_jobs(generation, envelope.id, asked, prompt, limit, answers)
        return await self._respond(request, generation, stream=bool(asked.stream))

    async def completions(self, request: Request) -> Response:
        """Completions; one prompt or several, as text or token ids."""
        body = await request.body()
        asked = parse(CompletionRequest, body)
        self._check_model(asked.model)
        prompts = await _off_loop(len(body), self.intake.completion, asked)
        asked.check_sampling()
        self._check_admission(asked.choices * len(prompts))
        envelope = self._envelope("cmpl", request, asked)
        answers = [
            self._answer(asked, number * asked.choices + choice, number)
            for number in range(len(prompts))
            for choice in range(asked.choices)
        ]
        echoes = [self.renderer.decode(prompt) if asked.echo else "" for prompt in prompts]
        reply = CompletionReply(asked, envelope, prompts, answers, self._logprobs, echoes)
        generation = _Generation(reply, request.headers.get(SESSION))
        for number, prompt in enumerate(prompts):
            limit = self.intake.limit(asked.limit, len(prompt))
            own = [answer for answer in answers if answer.prompt == number]
            self._add_jobs(generation, f"{envelope.id}-{number}", asked, prompt, limit, own)
        return await self._respond(request, generation, stream=bool(asked.stream))

    async def render_chat(self, request: Request) -> Response:
        """The tokens that a chat request comes to, and how it would be answered; nothing is generated."""
        body = await request.body()
        asked = parse(ChatRequest, body)
        self._check_model(asked.model)
        prompt = await _off_loop(len(body), self.intake.chat, asked)
        asked.check_sampling()
        limit = self.intake.limit(asked.limit, len(prompt))
        return _json(generate_request(self._request_id("chatcmpl", request, asked), asked, prompt, limit))

    async def render_completions(self, request: Request) -> Response:
        """The same for each prompt of a completions request."""
        body = await request.body()
        asked = parse(CompletionRequest, body)
        self._check_model(asked.model)
        prompts = await _off_loop(len(body), partial(self.intake.completion, checks_tokens=False), asked)
        asked.check_sampling()
        base = self._request_id("cmpl", request, asked)
        names = [base] if len(prompts) == 1 else [f"{base}-{number}" for number in range(len(prompts))]
        limits = [self.intake.limit(asked.limit, len(prompt)) for prompt in prompts]
        calls = zip(names, prompts, limits, strict=True)
        return _json([generate_request(name, asked, prompt, limit) for name, prompt, limit in calls])

    async def models(self, _: Request) -> Response:
        """The one served model."""
        card = model_card(self.settings.served_name, self.settings.max_model_len, int(time.time()))
        return _json({"object": "list", "data": [card]})

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation; no length check, as in the engine."""
        data = decode(await request.body())
        if isinstance(data, dict) and "messages" in data:
            chat = validate(TokenizeChatRequest, data)
            self._check_model(chat.model)
            tokens = self.renderer.encode(self.intake.chat_text(chat))
            strings = chat.return_token_strs
        else:
            text = validate(TokenizeTextRequest, data)
            self._check_model(text.model)
            tokens, strings = self.renderer.encode(text.prompt), text.return_token_strs
        names = [self.renderer.tokenizer.id_to_token(token) for token in tokens] if strings else None
        window = self.settings.max_model_len
        return _json({"count": len(tokens), "max_model_len": window, "tokens": tokens, "token_strs": names})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special ones included."""
        asked = parse(DetokenizeRequest, await request.body())
        self._check_model(asked.model)
        return _json({"prompt": self.renderer.decode(asked.tokens, skip_special=False)})

    async def abort(self, request: Request) -> Response:
        """Abort by outside id: always 200, in the background."""
        data = decode(await request.body())
        if not isinstance(data, dict) or data.get("request_ids") is None:
            raise Refusal("Missing 'request_ids' in request body", kind="Bad Request")
        asyncio.get_running_loop().call_soon(self.engine.abort, list(data["request_ids"]))
        return Response(status_code=200)

    async def metrics(self, _: Request) -> Response:
        """Prometheus text."""
        text = exposition(self.twin, self.settings.served_name, self.started)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(self, _: Request) -> Response:
        """Empty 200; 503 once the engine is dead."""
        alive = self._steps is not None and not self._steps.done()
        return Response(status_code=200 if alive else 503)

    async def version(self, _: Request) -> Response:
        """The vLLM version whose behaviour this is."""
        return _json({"version": VERSION})

    async def load(self, _: Request) -> Response:
        """Generation requests in flight."""
        return _json({"server_load": self.in_flight})

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.served_name:
            raise Refusal(
                f"The model `{name}` does not exist. Valid aliases: {self.settings.served_name}.",
                "model",
                status=404,
                kind="NotFoundError",
            )

    def _check_admission(self, sequences: int) -> None:
        most = self.settings.max_num_queued_reqs
        if most is not None and self.engine.unfinished + sequences > most:
            raise Refusal(
                "The engine is currently busy and cannot accept new requests. "
                "Please try again later or on a different instance.",
                status=503,
                kind="Service Unavailable",
            )

    def _envelope(self, prefix: str, request: Request, asked: Sampling) -> Envelope:
        name = self._request_id(prefix, request, asked)
        return Envelope(name, self.settings.served_name, int(time.time()), self.settings.fingerprint)

    @staticmethod
    def _request_id(prefix: str, request: Request, asked: Sampling) -> str:
        return f"{prefix}-{request.headers.get('x-request-id') or asked.request_id or uuid.uuid4().hex[:16]}"

    def _answer(self, asked: Sampling, index: int, prompt: int) -> Answer:
        return Answer(
            index=index,
            prompt=prompt,
            piece=self.piece,
            stops=asked.stops,
            keep_stop=asked.include_stop_str_in_output,
            min_tokens=asked.min_tokens,
        )

    def _add_jobs(
        self,
        generation: _Generation,
        external: str,
        asked: Sampling,
        prompt: Sequence[int],
        limit: int,
        answers: Sequence[Answer],
    ) -> None:
        for number, answer in enumerate(answers):
            job = Job(
                id=self.engine.job_id(),
                prompt=prompt,
                max_tokens=limit,
                salt=asked.cache_salt,
                seed=(asked.seed or 0) + number,
                ignore_eos=asked.ignore_eos,
                min_tokens=asked.min_tokens,
                read_cache=asked.prompt_logprobs is None,
                session=generation.session,
            )
            generation.jobs.setdefault(external, []).append(job)
            generation.answers[job.id] = answer

    async def _respond(self, request: Request, generation: _Generation, *, stream: bool) -> Response:
        if stream:
            return EventStream(self._chunks(generation))
        done = await unless_disconnected(request.receive, self._whole(generation))
        return Response(status_code=499) if done is None else _json(done, load_of(request.headers, self.twin))

    async def _whole(self, generation: _Generation) -> dict[str, Any]:
        async for _ in self._batches(generation):
            pass
        return generation.reply.whole()

    async def _chunks(self, generation: _Generation) -> AsyncGenerator[bytes]:
        reply = generation.reply
        opened = False
        async with contextlib.aclosing(self._batches(generation)) as batches:
            async for batch in batches:
                if not opened:
                    opened = True
                    for body in reply.opening():
                        yield _event(body)
                for answer, delta in batch:
                    chunk = reply.chunk(answer, delta)
                    if chunk is not None:
                        yield _event(chunk)
        closing = reply.closing()
        if closing is not None:
            yield _event(closing)
        yield b"data: [DONE]\n\n"

    async def _batches(self, generation: _Generation) -> AsyncGenerator[list[tuple[Answer, Delta]]]:
        mailbox = self.engine.submit(generation.jobs)
        self.in_flight += 1
        try:
            async for batch in deltas(self.engine, mailbox, generation.answers):
                yield batch
        finally:
            self.in_flight -= 1
            self.engine.release(generation.jobs)


async def _off_loop(size: int, render: Callable[[AskedT], PromptT], asked: AskedT) -> PromptT:
    """Render in a thread where the body is large, so that other streams go on."""
    if size < LARGE_BODY:
        return render(asked)
    return await asyncio.to_thread(render, asked)


def _json(body: object, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), headers=headers, media_type="application/json")


def _event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _refused(_: Request, error: Refusal) -> Response:
    return Response(msgspec.json.encode(error.body), error.status, media_type="application/json")


async def _no_route(_: Request, error: HTTPException) -> Response:
    """The framework's own answer for unknown paths and methods, embeddings of a text model among them."""
    content = msgspec.json.encode({"detail": error.detail})
    return Response(content, error.status_code, error.headers, media_type="application/json")
