"""Conversations that are compacted, without a gateway: processes over one store of forms."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ctxgate.compression.chain import Chains
from ctxgate.compression.compaction import (
    Compaction,
    ShapingMemory,
    covered,
    edits_of,
    root_of,
    texts_of,
)
from ctxgate.compression.dialects.chat import Views
from ctxgate.compression.masked_record import Made, masked_record, masking_of
from ctxgate.compression.masking import mask
from ctxgate.compression.validity import check_cut
from ctxgate.gateway.archive import reference_of
from ctxgate.gateway.context_records import Records
from ctxgate.inference import wire
from support.forms import TENANT, Forms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.compression.ask import Asking
    from ctxgate.compression.dialects.chat import Facts

T = TypeVar("T")


def body_of(messages: Sequence[dict[str, Any]]) -> bytes:
    return json.dumps({"model": "m", "messages": messages}).encode()


@dataclass
class CompactingProcess:
    """One process: applies what is recorded, and masks where a prompt has more bytes than `most`."""

    forms: Forms = field(default_factory=Forms)
    records: Records = field(default_factory=Records)
    views: Views = field(default_factory=Views)
    chains: Chains = field(default_factory=Chains)
    shaping: ShapingMemory = field(default_factory=ShapingMemory)
    made: list[Compaction] = field(default_factory=list)

    def sent(self, messages: Sequence[dict[str, Any]], most: int | None = None) -> bytes:
        """The bytes that go out; checked."""
        raw = body_of(messages)
        body = wire.parse(raw)
        items = body.items("messages")
        facts = self.views.messages(TENANT, items)
        hashes = self.chains.of(TENANT, facts).hashes
        root = root_of(facts, hashes)
        record = self._asked(self.records.read(root, hashes))
        if record is not None and not covered(record, facts):
            record = None
        out = self._applied(body, facts, record)
        if most is None or len(out) <= most:
            return out
        sizes = [memoryview(item).nbytes for item in items]
        masking = mask(facts, sizes, target=most // 2, tail_tokens=most // 4, before=masking_of(record))
        new = masked_record(masking, record, items, hashes, _reference, Made("window", 1))
        if new is None:
            return out
        assert self._asked(self.records.claim(root, new, hashes)) == new
        self.made.append(new)
        return self._applied(body, facts, new)

    def _applied(self, body: wire.Body, facts: Sequence[Facts], record: Compaction | None) -> bytes:
        if record is None:
            return body.raw
        items = body.items("messages")
        texts = texts_of(record, items, facts, _reference, self.shaping)
        spans = wire.array_spans(body, "messages")
        assert spans is not None
        out = b"".join(wire.splice(body.raw, edits_of(spans, record.dropped, record.carrier, texts)))
        after = self.views.messages(TENANT, wire.parse(out).items("messages"))
        carried = bool(record.dropped)
        check_cut(facts, after, record.dropped, texts.keys(), carried=carried, added=2**20)
        return out

    def _asked(self, work: Asking[T]) -> T:
        try:
            ask = next(work)
            while True:
                ask = work.send(self.forms.take(TENANT, ask.claims, ask.reads))
        except StopIteration as end:
            result: T = end.value
            return result


def _reference(digest: bytes) -> str:
    return reference_of(TENANT, digest)


def messages_of(raw: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(raw)["messages"]
    return found
