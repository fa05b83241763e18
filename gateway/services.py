"""What the stages of a request work with: made once by the composition root, shared by all requests."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ctxgate.inference.estimate import TokenRatio

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from ctxgate.gateway.config import Config, Pool
    from ctxgate.gateway.fleet import Fleet
    from ctxgate.gateway.keys import KeyRing
    from ctxgate.gateway.ledger import Ledger
    from ctxgate.gateway.telemetry import Telemetry
    from ctxgate.inference.client import UpstreamClient

_UNMEASURED: Final = TokenRatio()


def unix_us() -> int:
    """Now, in Unix microseconds."""
    return time.time_ns() // 1000


def random_id() -> str:
    """An id nobody can guess: whoever knows an attempt's id could abort it at the engine."""
    return secrets.token_hex(16)


@dataclass(slots=True)
class Services:
    """The gateway's working parts. `background` holds tasks that outlive the step that began them."""

    config: Config
    keys: KeyRing
    ledger: Ledger
    client: UpstreamClient
    fleet: Fleet
    telemetry: Telemetry
    now_us: Callable[[], int] = unix_us
    new_id: Callable[[], str] = random_id
    background: set[asyncio.Task[object]] = field(default_factory=set)
    _prompt_ratios: dict[str, TokenRatio] = field(default_factory=dict)

    def prompt_ratio(self, model: str) -> TokenRatio:
        """Bytes of a request body per prompt token of a model, as measured so far."""
        return self._prompt_ratios.get(model, _UNMEASURED)

    def output_ratio(self, model: str) -> TokenRatio:
        """Bytes of text per output token of a model."""
        return self._prompt_ratios.get(model, _UNMEASURED)

    def learn_prompt(self, model: str, body_bytes: int, tokens: int) -> None:
        """Note a measured prompt. `model` is a configured name, so the table is bounded."""
        self._prompt_ratios[model] = self.prompt_ratio(model).updated(body_bytes, tokens)

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Run something beside the request that needs it; waited for at shutdown."""
        task = asyncio.get_running_loop().create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    def upstream_headers(self, pool: Pool) -> dict[str, str]:
        """The headers every call to a pool carries; nothing of the client's is among them."""
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if pool.api_key is not None:
            headers["authorization"] = f"Bearer {pool.api_key}"
        return headers
