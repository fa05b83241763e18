"""Explains the misses of requests that pass: what each should find in the cache, and why it did not.

Per request: a hash over the bytes of its messages, look-ups for those that are new. Bodies are compared
only where digests say that the prompt left the one before it and a miss hangs on how; small ones at once,
large ones in a thread, and nothing but the end of an answer ever waits for that, for a moment.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from msgspec import structs

from ctxgate.compression.bounds import at_most
from ctxgate.compression.diverge import diverge
from ctxgate.compression.diverge_text import diverge_texts
from ctxgate.compression.kindred import Kindred
from ctxgate.compression.previous import Owner, Previous, goes_on
from ctxgate.compression.sent import Digester, extends
from ctxgate.gateway.flow import Surface
from ctxgate.gateway.instants import day_of
from ctxgate.gateway.metering import counted, prompt_count
from ctxgate.gateway.miss import Evidence, Miss, bounded, excused, not_reported, verdict
from ctxgate.gateway.seen import Comparison, Seen, chunked
from ctxgate.inference import wire
from ctxgate.inference.rates import miss_nano
from ctxgate.inference.template_facts import Extension
from ctxgate.routing.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ctxgate.compression.divergence import Divergence
    from ctxgate.compression.previous import Before
    from ctxgate.compression.sent import Sent
    from ctxgate.gateway.flow import Held, Identified
    from ctxgate.inference.template_facts import Findings
    from ctxgate.inference.usage import Usage
    from ctxgate.inference.wire import Body
    from ctxgate.routing.prefix_index import Expected, Place

log = logging.getLogger(__name__)
COMPARED_AT_ONCE: Final = 2**14  # bytes of two bodies together; about a millisecond
_NOWHERE: Final = ("", "")  # the place of what went to a server that is gone
LAST_WAIT_S: Final = 0.25  # how long the end of an answer waits for a comparison that is under way


class Misses:
    """What one process knows of prompts that were sent. Belongs to one event loop.

    Nothing here fails a request: `failed` is called where a prompt cannot be explained.
    """

    def __init__(
        self,
        failed: Callable[[], None] = lambda: None,
        *,
        seed: int | None = None,
        compared_at_once: int = COMPARED_AT_ONCE,
    ) -> None:
        self.index = PrefixIndex()
        self._failed = failed
        self._compared_at_once = compared_at_once
        self._digester = Digester(secrets.randbits(64) if seed is None else seed)
        self._previous = Previous()
        self._kindred = Kindred()

    def look(self, identified: Identified, body: Body, salt: str | None) -> Seen | None:
        """The prompt of a request as it goes out; None where it has none that can be followed."""
        try:
            return self._look(identified, body, salt)
        except Exception as error:  # noqa: BLE001 - no defect in explaining may fail a request
            self._defect("look at", error)
            return None

    def expect(self, seen: Seen | None, place: Place) -> Expected | None:
        """What a replica should find of the prompt in its cache, None where nothing is known of it."""
        if seen is None:
            return None
        try:
            return self._expect(seen, place)
        except Exception as error:  # noqa: BLE001 - as above
            self._defect("predict the hit of", error)
            return None

    def hits(self, seen: Seen | None, places: Collection[Place]) -> dict[Place, int]:
        """The tokens of `expect` for several replicas; those of which nothing is known are left out."""
        if seen is None:
            return {}
        try:
            chain = seen.sent.chain
            found = self.index.hits(places, chain, seen.lead.chunks)
            if chunked(self._digester, seen, found.elements):
                found = self.index.hits(places, chain, seen.lead.chunks)
            seen.lead.elements, before = found.elements, seen.before
            if seen.comparison is not None and before is not None and before.place in found.tokens:
                better = self._expect(seen, before.place)  # other bytes may be the same prompt
                if better is not None:
                    found.tokens[before.place] = better.tokens
            return found.tokens
        except Exception as error:  # noqa: BLE001 - as above
            self._defect("predict the hits of", error)
            return {}

    def foreseen(self, held: Held) -> Miss | None:
        """The miss that is to be expected of an attempt, its tokens estimated."""
        try:
            return excused(self._foreseen(held), held.routed.planned.turn)
        except Exception as error:  # noqa: BLE001 - as above
            self._defect("foresee the miss of", error)
            return None

    def _expect(self, seen: Seen, place: Place) -> Expected | None:
        before, comparison, chain = seen.before, seen.comparison, seen.sent.chain
        lead = seen.lead
        expected = self.index.expected(place, chain, lead.chunks, lead.elements)
        if chunked(self._digester, seen, 0 if expected is None else expected.elements):
            expected = self.index.expected(place, chain, lead.chunks, lead.elements)
        if expected is None or before is None or comparison is None:
            return expected
        same_place = before.place == place and bool(before.tokens)
        if comparison.most is None and same_place:  # it may be no difference at all
            self._compare(comparison)
        elif prompt := _foretold(seen):
            self._compare_beside(seen, place, prompt, expected.tokens, expected)
        if not same_place or not comparison.exact or comparison.best.rendered:
            return expected
        # Other bytes, the same prompt: it goes on from the one before, which the index cannot know.
        known = self.index.whole_blocks(place, before.tokens or 0)
        tokens, known = max(expected.tokens, known), max(expected.known, known)
        return structs.replace(expected, tokens=tokens, known=known, counted=True)

    def _foreseen(self, held: Held) -> Miss | None:
        seen, expected = held.routed.planned.seen, held.expected
        if seen is None or seen.before is None or expected is None:
            return None
        prompt = _foretold(seen) or held.attempt.estimated_prompt_tokens
        return self._judged(held, seen, prompt, expected.tokens) if prompt else None

    async def compared(self, held: Held, usage: Usage) -> None:
        """Wait a moment for the comparison that the miss of an attempt hangs on, where it is a long one."""
        seen = held.routed.planned.seen
        comparison = None if seen is None else seen.comparison
        if seen is None or comparison is None or comparison.exact:
            return
        prompt, cached = counted(usage)
        if prompt and cached is not None:
            try:
                self._compare_beside(seen, _place(held), prompt, cached, held.expected)
            except Exception as error:  # noqa: BLE001 - nor may it keep an answer from its client
                self._defect("compare", error)
        if comparison.reading is not None:
            await asyncio.wait({asyncio.ensure_future(comparison.reading)}, timeout=LAST_WAIT_S)

    def _compare_beside(
        self, seen: Seen, place: Place, prompt: int, cached: int, expected: Expected | None
    ) -> None:
        """Begin a long comparison where the verdict hangs on it."""
        comparison = seen.comparison
        if comparison is None or comparison.reading is not None or not self._is_large(comparison):
            return
        if self._is_fulfilled(seen, place, prompt, cached, expected):
            return
        if bounded(self._evidence(seen, place, prompt, cached, expected), comparison.most) is None:
            self._compare(comparison)

    def _is_fulfilled(
        self, seen: Seen, place: Place, prompt: int, cached: int, expected: Expected | None
    ) -> bool:
        """Whether nothing can have been missed: the cheap answer for most requests."""
        if seen.before is not None and seen.before.place != place and not seen.kin:
            return False
        if expected is not None and expected.known > cached:
            return False
        return seen.comparison is None or seen.comparison.is_slight(prompt, self.index.block(place))

    def dispatched(self, held: Held, now_us: int) -> None:
        """An attempt goes out: its prompt is to be found at its replica until it is settled."""
        seen, prompt = held.routed.planned.seen, held.attempt.estimated_prompt_tokens
        if seen is None or prompt is None or len(held.routed.decision.candidates) < 2:
            return  # where there is no choice nobody asks before it is settled
        try:
            at, sent = (held.attempt.attempt_id, _place(held)), seen.sent
            self.index.dispatched(*at, sent.chain, sent.sizes, prompt=prompt, now_us=now_us)
        except Exception as error:  # noqa: BLE001 - as above
            self._defect("note", error)

    def settled(
        self, held: Held, usage: Usage, now_us: int, findings: Findings | None = None, *, there: bool = True
    ) -> Miss | None:
        """Why the attempt missed what it could have found, None where it did not, or never ran.

        Learns from its usage, of its cache where it is still `there`: called once per attempt. `findings` are
        those of a probe of its replica.
        """
        seen = held.routed.planned.seen
        if seen is None:
            return None
        try:
            self.index.withdraw(held.attempt.attempt_id, _place(held))
            miss = self._settled(held, seen, usage, now_us, findings, there=there)
            return excused(miss, held.routed.planned.turn)
        except Exception as error:  # noqa: BLE001 - nor may it leave an attempt unbooked
            self._defect("explain", error)
            return None

    def _look(self, identified: Identified, body: Body, salt: str | None) -> Seen | None:
        inbound, key = identified.inbound, identified.key
        if inbound.surface is Surface.CHAT:
            sent = self._digester.chat(body, body.items("messages"), salt)
        elif inbound.surface is Surface.COMPLETIONS and body.has("prompt") and prompt_count(body) == 1:
            sent = self._digester.text(body, salt)
        else:
            return None
        # No name of a tenant or key holds a slash.
        owner = Owner(f"{key.organisation}/{key.team}", f"{key.key_id}/{identified.task.name}")
        before = self._previous.find(owner, sent)
        if inbound.surface is not Surface.CHAT:
            return self._of_text(owner, sent, body, before)
        if before is None:
            return self._first(owner, sent, body)
        if extends(before.outline, sent.outline):
            return Seen(owner, sent, body, before)
        return Seen(owner, sent, body, before, _by_digests(before, sent, self._body_of(before), body))

    def _first(self, owner: Owner, sent: Sent, body: Body) -> Seen:
        """A conversation's first request: what it can find is the head that an earlier one left."""
        kin = self._kindred.find(owner, sent, body)
        if kin is None:
            return Seen(owner, sent, body)
        comparison = _by_digests(kin.before, sent, kin.body, body)
        return Seen(owner, sent, body, kin.before, comparison, kin=True)

    def _of_text(self, owner: Owner, sent: Sent, body: Body, before: Before | None) -> Seen:
        """A completions request: the same prompt again, or another version of the task's last one."""
        if before is not None or (latest := self._previous.latest(owner)) is None:
            return Seen(owner, sent, body, before)
        earlier = self._body_of(latest)
        one, two = None if earlier is None else earlier.get("prompt"), body.get("prompt")
        found = None if one is None or two is None else diverge_texts(bytes(one), bytes(two))
        if found is None or latest.outline.fields != sent.outline.fields:
            return Seen(owner, sent, body)
        comparison = Comparison(latest.outline, sent.outline)
        comparison.read(found)
        return Seen(owner, sent, body, latest, comparison)

    def _body_of(self, before: Before) -> Body | None:
        """The body of an earlier request, None where it is no longer kept."""
        raw = self._previous.body(before)
        return None if raw is None else self._previous.parsed(before) or wire.parse(raw)

    def _is_large(self, comparison: Comparison) -> bool:
        bodies = comparison.bodies
        return bodies is not None and sum(len(body.raw) for body in bodies) > self._compared_at_once

    def _compare(self, comparison: Comparison) -> None:
        """Compare the bytes, once: at once, or in a thread where there are many."""
        if comparison.bodies is None or comparison.reading is not None:
            return
        if not self._is_large(comparison):
            try:
                comparison.read(_difference(*comparison.bodies))
            except Exception as error:  # noqa: BLE001 - what digests tell is left
                comparison.bodies = None
                self._defect("compare", error)
            return
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(None, _difference, *comparison.bodies)
        reading.add_done_callback(lambda done: self._read(comparison, done))
        comparison.reading = reading

    def _read(self, comparison: Comparison, done: asyncio.Future[Divergence]) -> None:
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            self._defect("compare", error)
        else:
            comparison.read(done.result())

    def _settled(
        self, held: Held, seen: Seen, usage: Usage, now_us: int, findings: Findings | None, *, there: bool
    ) -> Miss | None:
        prompt, cached = counted(usage)
        if not prompt:
            return None
        place = _place(held)
        if cached is None:
            miss = self._untold(seen, held.expected)
        else:
            miss = self._judged(held, seen, prompt, cached, findings)
            if miss is not None and miss.avoidable_tokens is not None:
                day = day_of(held.attempt.opened_at_us)
                nano = miss_nano(prompt, cached, miss.avoidable_tokens, held.routed.pool.rates, day)
                miss = replace(miss, avoidable_nano=nano)
        sent, chunks = seen.sent, seen.lead.chunks
        counts = {"prompt": prompt, "answer": usage.output.reported or 0, "now_us": now_us}
        if there:
            self.index.learn(place, sent.chain, sent.sizes, cached=cached, chunks=chunks, **counts)
        else:
            place = _NOWHERE
        before = None if seen.kin else seen.before
        self._previous.keep(
            seen.owner, seen.sent, seen.body, before, place=place, tokens=prompt, now_us=now_us
        )
        if before is None:
            self._kindred.keep(seen.owner, seen.sent, seen.body, place=place, tokens=prompt, now_us=now_us)
        return miss

    @staticmethod
    def _untold(seen: Seen, expected: Expected | None) -> Miss | None:
        """The miss of an answer that tells no hit. Of several choices none is told by any engine."""
        if (seen.body.value("n") or 1) != 1:
            return None
        return not_reported(None if seen.kin else seen.before, expected)

    def _judged(
        self, held: Held, seen: Seen, prompt: int, cached: int, findings: Findings | None = None
    ) -> Miss | None:
        """The verdict, by the bytes of the two bodies where it hangs on them."""
        place, expected, comparison = _place(held), held.expected, seen.comparison
        if self._is_fulfilled(seen, place, prompt, cached, expected):
            return None
        rewrites = findings is not None and _rewrites(findings)
        evidence = self._evidence(seen, place, prompt, cached, expected, rewrites=rewrites)
        if comparison is None or comparison.exact or comparison.bodies is None:
            return verdict(evidence)
        if (sure := bounded(evidence, comparison.most)) is not None:
            return verdict(sure)
        self._compare(comparison)
        return verdict(structs.replace(evidence, difference=comparison.best, exact=comparison.exact))

    def _evidence(
        self,
        seen: Seen,
        place: Place,
        prompt: int,
        cached: int,
        expected: Expected | None,
        *,
        rewrites: bool = False,
    ) -> Evidence:
        outline, comparison, before = seen.sent.outline, seen.comparison, seen.before
        if seen.kin and before is not None and before.place != place:
            before = None  # another conversation left nothing where it never was
        return Evidence(
            place,
            prompt,
            cached,
            size=outline.size,
            messages=outline.messages,
            block=self.index.block(place),
            slack=self.index.least_shortfall(place),
            before=before,
            difference=None if comparison is None else comparison.best,
            exact=comparison is not None and comparison.exact,
            expected=expected,
            rewrites=rewrites,
            goes_on=before is not None and not seen.kin and goes_on(before, outline),
        )

    def _defect(self, what: str, error: BaseException) -> None:
        # The text of an error may quote a prompt: only its kind is logged.
        log.error("cannot %s a prompt: %s", what, type(error).__name__)
        self._failed()


def _difference(before: Body, after: Body) -> Divergence:
    """The first difference that reaches the prompt, as exact as bytes tell."""
    return diverge(before, after, rendered_only=True)


def _by_digests(before: Before, sent: Sent, earlier: Body | None, body: Body) -> Comparison:
    if earlier is None:
        return Comparison(before.outline, sent.outline)
    most = at_most(earlier, body, before.outline, sent.outline)
    return Comparison(before.outline, sent.outline, (earlier, body), most)


def _place(held: Held) -> Place:
    return held.attempt.pool, held.attempt.replica


def _foretold(seen: Seen) -> int | None:
    """A prompt's tokens, at the ratio of the request before it; None without one that was counted."""
    before = seen.before
    if before is None or before.tokens is None or not before.outline.size:
        return None
    return seen.sent.outline.size * before.tokens // before.outline.size


def _rewrites(findings: Findings) -> bool:
    """Whether a probe saw the template print earlier messages anew in a later turn."""
    facts = findings.facts
    turns = (facts.plain, facts.tools, facts.reasoning, facts.tool_results)
    return any(each.extension is Extension.NO for each in turns)
