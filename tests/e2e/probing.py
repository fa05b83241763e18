"""Plays the start-up probe against a server by a client of the tests' own."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any, Protocol

from ctxgate.inference import template_probe
from ctxgate.inference.template_probe import Complete, Detokenize, Told
from e2e.engine import BLOCK_SIZE

if TYPE_CHECKING:
    from ctxgate.inference.template_facts import Findings


class Served(Protocol):
    """A server by its root."""

    @property
    def url(self) -> str: ...


def told(engine: Served, ask: template_probe.Ask) -> Told:
    """An engine's answer to a probe, asked for by a client of the test's own."""
    match ask:
        case Complete(body):
            answer = post(f"{engine.url}/v1/chat/completions", body | {"model": "tiny", "max_tokens": 1})
            usage = answer["usage"]
            return Told(prompt=usage["prompt_tokens"], cached=usage["prompt_tokens_details"]["cached_tokens"])
        case Detokenize(tokens):
            return Told(text=post(f"{engine.url}/detokenize", {"model": "tiny", "tokens": tokens})["prompt"])
        case _:
            ids = post(f"{engine.url}/v1/chat/completions/render", ask.body | {"model": "tiny"})["token_ids"]
            return Told(tokens=tuple(ids))


def post(url: str, body: dict[str, Any]) -> Any:
    """The JSON of an answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def played(engine: Served, salt: str, *, may_render: bool) -> Findings:
    """What a probe of a server finds; `may_render`: from the tokens that it renders, else by usage."""
    work = template_probe.probe(salt, BLOCK_SIZE, may_render=may_render)
    answer: Told | None = None
    while True:
        try:
            answer = told(engine, next(work) if answer is None else work.send(answer))
        except StopIteration as end:
            findings: Findings = end.value
            return findings
