"""The start of LiteLLM: nothing is fetched, and nothing is left to be imported by the first call."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctxgate.inference import provider_start
from ctxgate.inference.client import Dropped
from ctxgate.inference.providers import Hosted, Providers
from support.gateway import until

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()

FIRST_CALLS = """
import asyncio, json, sys
away = []
def watch(event, arguments):
    if event == "socket.getaddrinfo":
        away.append(str(arguments[0]))
    elif event == "socket.connect":
        away.append(str(arguments[1][0]))
sys.addaudithook(watch)
from ctxgate.inference.providers import Hosted, Providers
from support.provider import FakeProvider

async def main():
    async with FakeProvider() as provider:
        providers = Providers()
        root = provider.url + ("/v1" if sys.argv[1].startswith("openai/") else "")
        providers.serve({"p": Hosted(sys.argv[1], "k", root, ("m",), None)})
        while not providers.ready:
            await asyncio.sleep(0.01)
        before = set(sys.modules)
        for stream in (False, True):
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": stream}
            response = await providers.open("p", "/v1/chat/completions", json.dumps(body).encode())
            while await response.next_chunk():
                pass
        print(json.dumps([len(provider.calls), sorted(set(sys.modules) - before), sorted(set(away))]))
        await providers.close()

asyncio.run(main())
"""


@pytest.mark.integration
@pytest.mark.skipif(find_spec("litellm") is None, reason="needs the extra `providers`")
@pytest.mark.parametrize("model", ["openai/gpt-4o-mini", "gemini/gemini-2.0-flash"])
def test_first_calls_import_nothing_and_nothing_leaves_the_host(model: str) -> None:
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALLS, model], cwd=tests, capture_output=True, text=True, check=True
    )
    calls, imported, away = json.loads(done.stdout.strip().splitlines()[-1])
    assert calls == 2  # the rehearsal reached nobody
    assert imported == []
    assert set(away) <= {"127.0.0.1", "localhost"}


class Library:
    """LiteLLM's place: it is imported when it is let, and counts the calls of each loop."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.calls: list[tuple[str, int]] = []

    def imported(self) -> Any:
        assert self.may.wait(20)
        return self

    async def acompletion(self, **asked: Any) -> Any:
        self.calls.append((asked["model"], threading.get_ident()))
        return SimpleNamespace(model_dump=lambda **_: {"choices": []})


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    one = Library()
    monkeypatch.setattr(provider_start, "imported", one.imported)
    return one


def hosted(model: str) -> Hosted:
    return Hosted(model, "k", "http://127.0.0.1:9", ("m",), None)


async def test_calls_wait_for_the_library_and_it_is_rehearsed_on_another_thread(library: Library) -> None:
    providers = Providers()
    ready = [providers.ready]
    providers.serve({"p": hosted("openai/a")})
    ready.append(providers.ready)
    with pytest.raises(Dropped):
        await providers.get("p", "/health", 0.0)
    call = asyncio.create_task(providers.open("p", "/v1/chat/completions", BODY))
    library.may.set()
    response = await call
    assert response.status == 200
    assert [*ready, providers.ready] == [True, False, True]
    *rehearsed, called = library.calls
    assert len(rehearsed) == 4  # whole and streamed, made up and at nobody
    assert threading.get_ident() not in {thread for _, thread in rehearsed}
    assert called == ("openai/a", threading.get_ident())
    assert (await providers.get("p", "/health", 1.0))[0] == 200
    await providers.close()


async def test_a_pool_that_comes_later_holds_no_other_up(library: Library) -> None:
    providers = Providers()
    providers.serve({"p": hosted("openai/a")})
    library.may.set()
    await until(lambda: providers.ready)
    providers.serve({"p": hosted("openai/a"), "q": hosted("other/b")})
    assert (await providers.open("p", "/v1/chat/completions", BODY)).status == 200
    assert (await providers.open("q", "/v1/chat/completions", BODY)).status == 200
    assert [model for model, _ in library.calls].count("other/b") == 3  # at nobody only where that is sure
    await providers.close()
