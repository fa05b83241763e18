"""The layout stage: a request's edits, checked, or none at all.

Whatever goes wrong here, the client's own bytes go out and the event is counted: layout never makes a
request fail, nor wait for long.
"""

from __future__ import annotations

import logging
import secrets
import traceback
from typing import TYPE_CHECKING, Final

from ctxgate.compression import layout
from ctxgate.compression.edited import edited
from ctxgate.compression.marks import MarkError
from ctxgate.compression.policy import Level
from ctxgate.compression.reverting import Reverting, Side
from ctxgate.compression.validity import Invalid, check_length, check_same
from ctxgate.gateway.errors import Kind, Refused
from ctxgate.gateway.first_look import first_chain, first_look
from ctxgate.gateway.flow import Surface
from ctxgate.gateway.forms import FRESH_US
from ctxgate.gateway.ledger import LedgerError
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ctxgate.compression.declared_spans import Sections
    from ctxgate.compression.dialects.chat import Facts
    from ctxgate.compression.layout import LayoutResult
    from ctxgate.compression.plan import PlanEdit
    from ctxgate.compression.policy import Policy
    from ctxgate.gateway.flow import Identified, Inbound
    from ctxgate.gateway.forms import Forms
    from ctxgate.inference.wire import Body

log = logging.getLogger(__name__)
DROPPED: Final = ("store", "hidden", "longer", "invalid", "defect")
"""Why edits were dropped: the store gave no answer in time; repeated members hide the place; moving
volatile text would make the prompt too long; the edited body failed the checker; an error in the layout.
"""


class Laid(Record, frozen=True):
    """The body to go on with, and what was changed in it.

    `facts` are those of the client's messages without volatile text, which name the conversation; empty
    where layout has not looked at them.
    """

    body: Body
    reasons: tuple[PlanEdit, ...] = ()
    facts: tuple[Facts, ...] = ()


class LayoutStage:
    """Lays requests out as their policies say. Belongs to one event loop.

    `dropped` is called with one of DROPPED whenever a prompt goes out as it came although it should
    have been edited.
    """

    def __init__(self, forms: Forms, dropped: Callable[[str], None]) -> None:
        self._forms = forms
        self._dropped = dropped
        self._memory = layout.Memory(seed=secrets.randbits(64))
        self._reverting = Reverting()
        self._remembers_since_us: int | None = None

    @property
    def memory(self) -> layout.Memory:
        """What is remembered of messages and conversations."""
        return self._memory

    @property
    def sections(self) -> Sections:
        """What is known of texts of heads, for whoever else searches them."""
        return self._memory.taking.sections

    async def lay_out(self, identified: Identified, policy: Policy, now_us: int) -> Laid:
        """The body as it goes on. Never raises for a failure of its own.

        Raises `Refused` where the client's marks of stability are not understood.
        """
        inbound = identified.inbound
        if inbound.surface is not Surface.CHAT:
            return Laid(inbound.body)
        tenant = f"{identified.key.organisation}/{identified.key.team}"  # no name holds a slash
        try:
            return await self._lay_out(inbound, tenant, policy, now_us)
        except MarkError as error:
            raise Refused(Kind.INVALID_VALUE, str(error), error.field) from error
        except (LedgerError, TimeoutError) as error:
            log.warning("request %s is not laid out: %s", inbound.request_id, type(error).__name__)
            self._dropped("store")
        except Invalid as invalid:
            self._dropped("longer" if invalid.reason == "longer" else "invalid")
        except Exception as error:  # noqa: BLE001 - no defect in layout may fail a request that works without it
            # Its text is not logged: it may quote a prompt.
            place = traceback.extract_tb(error.__traceback__)[-1]
            log.error(
                "layout of request %s failed: %s in %s, line %s",
                inbound.request_id,
                type(error).__name__,
                place.name,
                place.lineno,
            )
            self._dropped("defect")
        return Laid(inbound.body)

    async def _lay_out(self, inbound: Inbound, tenant: str, policy: Policy, now_us: int) -> Laid:
        await first_look(self._memory.views, tenant, inbound.messages)
        body, deadline = inbound.body, self._forms.deadline()
        self._ask_again_each_day(now_us)
        prompt = layout.look(body, inbound.messages, tenant, self._memory)
        await first_chain(self._memory.chains, tenant, prompt.facts)
        work = layout.lay_out(body, inbound.messages, prompt, tenant, self._memory, policy)
        answer: Mapping[bytes, bytes] | None = None
        try:
            while True:
                ask = next(work) if answer is None else work.send(answer)
                answer = await self._forms.answer(tenant, ask, now_us, deadline)
        except StopIteration as end:
            result: LayoutResult = end.value
        if result.dropped is not None:
            self._dropped(result.dropped)
        if not result.edits:
            return Laid(body, facts=result.facts)
        before = Side(prompt, inbound.messages)
        return Laid(self._checked(body, before, result, tenant, policy), result.reasons, result.facts)

    def _ask_again_each_day(self, now_us: int) -> None:
        """Let the store know what is in use, though memory would have answered."""
        if self._remembers_since_us is None:
            self._remembers_since_us = now_us
        elif now_us - self._remembers_since_us > FRESH_US:
            self._memory.forget()
            self._remembers_since_us = now_us

    def _checked(self, body: Body, before: Side, result: LayoutResult, tenant: str, policy: Policy) -> Body:
        """The edited body. Raises `Invalid` where it is not the same prompt."""
        try:
            after, rewritten = edited(body, before.prompt, result.edits, tenant, self._memory)
        except ValueError as error:  # NotJson, NotAnObject
            raise Invalid("json") from error
        check_length(before.prompt, rewritten, declared=result.added)
        if policy.moves():
            other = Side(rewritten, after.items("messages"))
            reordered = policy.level is Level.LEARNED
            check_same(*self._reverting.revert(before, other, result.moved, reordered=reordered))
        else:
            check_same(before.prompt, rewritten)
        return after
