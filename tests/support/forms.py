"""First-seen forms for tests: a store in memory, a way to lay a body out, and the stores under contract."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ctxgate.compression import layout
from ctxgate.compression.policy import SAFE, Level
from ctxgate.compression.reverting import Reverting, Side
from ctxgate.compression.validity import check_length, check_same
from ctxgate.gateway.stores.sqlite import SqliteLedger
from ctxgate.inference import wire
from support.ledgers import price

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from ctxgate.compression.layout import LayoutResult
    from ctxgate.compression.moved import Passage
    from ctxgate.compression.policy import Policy
    from ctxgate.gateway.forms import FormStore

TENANT: Final = "acme/alpha"


@dataclass
class Forms:
    """A store without I/O: what every process of a fleet would share. `asked` counts the questions."""

    by_key: dict[tuple[str, bytes], bytes] = field(default_factory=dict)
    asked: int = 0

    def take(
        self, tenant: str, claims: Mapping[bytes, object], reads: Collection[bytes]
    ) -> dict[bytes, bytes]:
        """First text under each claimed key, and what is known of the read ones."""
        self.asked += 1
        for key, text in claims.items():
            self.by_key.setdefault((tenant, key), bytes(text))  # type: ignore[call-overload]  # bytes or Raw
        return {key: self.by_key[tenant, key] for key in (*claims, *reads) if (tenant, key) in self.by_key}


@dataclass
class Process:
    """One gateway process as far as layout goes: a memory of its own over a shared store."""

    forms: Forms = field(default_factory=Forms)
    tenant: str = TENANT
    memory: layout.Memory = field(default_factory=layout.Memory)
    policy: Policy = SAFE
    reverting: Reverting = field(default_factory=Reverting)

    def result(self, raw: bytes) -> LayoutResult:
        """The edits of one request."""
        body = wire.parse(raw)
        messages = body.items("messages")
        prompt = layout.look(body, messages, self.tenant, self.memory)
        work = layout.lay_out(body, messages, prompt, self.tenant, self.memory, self.policy)
        try:
            ask = next(work)
            while True:
                ask = work.send(self.forms.take(self.tenant, ask.claims, ask.reads))
        except StopIteration as end:
            result: LayoutResult = end.value
            return result

    def sent(self, raw: bytes) -> bytes:
        """The bytes one request goes out with."""
        return b"".join(wire.splice(raw, self.result(raw).edits))

    def checked(self, raw: bytes) -> bytes:
        """The same, after the checker has seen it. Raises `Invalid`."""
        result = self.result(raw)
        out = b"".join(wire.splice(raw, result.edits))
        self.check(raw, out, result.moved, added=result.added)
        return out

    def check(self, raw: bytes, out: bytes, moved: Sequence[Passage] = (), *, added: int = 2**20) -> None:
        """What the gateway checks before it sends `out` instead of `raw`. Raises `Invalid`.

        `added`: bytes that the plan declares to add; any length passes where nothing is said of them.
        """
        before, after = (self._side(text) for text in (raw, out))
        check_length(before.prompt, after.prompt, declared=added if self.policy.moves() else 0)
        if self.policy.moves():
            reordered = self.policy.level is Level.LEARNED
            check_same(*self.reverting.revert(before, after, moved, reordered=reordered))
        else:
            check_same(before.prompt, after.prompt)

    def _side(self, raw: bytes) -> Side:
        body = wire.parse(raw)
        messages = body.items("messages")
        return Side(layout.look(body, messages, self.tenant, self.memory), messages)


@asynccontextmanager
async def _sqlite(folder: Path) -> AsyncIterator[FormStore]:
    ledger = SqliteLedger(folder / "ledger.db", price=price)
    try:
        yield ledger.forms
    finally:
        await ledger.close()


FORM_STORES: Final[dict[str, Callable[[Path], AbstractAsyncContextManager[FormStore]]]] = {"sqlite": _sqlite}
"""By name: opens one more gateway process on the store of a folder."""
