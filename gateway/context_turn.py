"""One request on its way through the context stage, and what of it is needed once it is answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from ctxgate.compression.compaction import edits_of, texts_of
from ctxgate.compression.masked_record import BYTES_PER_TOKEN
from ctxgate.compression.plan import PlanEdit
from ctxgate.compression.recall_tool import NAME, put_back
from ctxgate.compression.validity import Invalid, check_cut, check_put_back
from ctxgate.gateway.context_sizes import (
    KNOWN_SPREAD,
    UNKNOWN_SPREAD,
    Estimate,
    size_of_tools,
    total,
)
from ctxgate.inference import wire
from ctxgate.inference.expand import expanded
from ctxgate.inference.lengths import NOTHING, Measure, measure
from ctxgate.inference.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from msgspec import Raw

    from ctxgate.compression.compaction import Compaction, Ranges, ShapingMemory
    from ctxgate.compression.dialects.chat import Facts, Views
    from ctxgate.compression.recall_tool import HiddenRounds
    from ctxgate.compression.window_errors import Refusal
    from ctxgate.gateway.config import Context, Model, Pool
    from ctxgate.gateway.context_level import Mode
    from ctxgate.gateway.context_sizes import Counting, Lengths
    from ctxgate.gateway.context_terms import Known
    from ctxgate.gateway.flow import Identified
    from ctxgate.inference.lengths import Calibration
    from ctxgate.inference.wire import Body, Edit

_RECORD_SPREAD: Final = 0.1  # of an estimate from all messages of a conversation that was measured
NO_RANGES: Final[Ranges] = ()
_TEXT_SHARE: Final = 0.9  # of the bytes of JSON that hold it
_LEAST_SCALE, _MOST_SCALE = 0.5, 2.0


@dataclass(slots=True)
class Turn:
    """What is known of a request. `facts`, `hashes` and `messages` are those of the client's messages.

    `laid` is the body that came into the stage, `body` the one that goes out. `record` is the compaction
    that it goes out under, `known` what is known of the conversation before it. `said` is the size of the
    messages and tools that go out, `estimate` their length in tokens, of which `arriving` were not sent
    before; `tools` is the size of the tools alone. `shown`: by index, messages that go out in another text
    whatever the record is; they may make the prompt longer by `added` bytes. `frozen`: what is decided now
    can be kept for later requests; `made`: the record was decided for this one. `client_tokens` estimates
    the client's own prompt where another goes out.
    `harder`: see `flow.Allowed`.
    `offered`: it goes out with the tool `context_recall`. `hidden`: by message, calls of it that the client
    does not see.
    `answer_nano`: the price of what the last attempt said.
    `refusal`: an engine refused this request's last prompt. `pending`: the record, which came in place of
    `replaced`, is to be kept once an engine has taken its prompt.
    """

    identified: Identified
    pool: Pool
    model: Model
    context: Context
    mode: Mode
    tenant: str
    facts: Sequence[Facts]
    hashes: Sequence[bytes]
    root: bytes
    laid: Body
    reference: Callable[[bytes], str]
    known: Known | None = None
    record: Compaction | None = None
    body: Body = field(init=False)
    said: Measure = NOTHING
    tools: Measure = field(init=False)
    estimate: Estimate = Estimate(0, 0)  # noqa: RUF009 - immutable
    arriving: int = 0
    frozen: bool = True
    made: bool = False
    shown: dict[int, bytes] = field(default_factory=dict)
    added: int = 0
    client_tokens: int | None = None
    refusal: Refusal | None = None
    pending: bool = False
    replaced: Compaction | None = None
    texts: Mapping[int, bytes] = field(default_factory=dict)
    harder: Fraction = Fraction(1)
    offered: bool = False
    hidden: dict[int, HiddenRounds] = field(default_factory=dict)
    answer_nano: int | None = None

    def __post_init__(self) -> None:
        self.body = self.laid
        self.tools = size_of_tools(self.laid)

    @property
    def messages(self) -> Sequence[Raw]:
        """The client's messages, as they came."""
        return self.identified.inbound.messages

    def offer(self, body: Body) -> None:
        """Go on with a body that holds one tool more."""
        self.offered, self.laid, self.body = True, body, body
        self.tools = size_of_tools(body)

    def put(self, record: Compaction | None, views: Views, memory: ShapingMemory) -> None:
        """Apply a record, and what is `shown` and `hidden`.

        Raises `Invalid` where the result must not be sent.
        """
        self._put(record, views, memory)
        if self.hidden:
            self._put_back(views)

    def _put(self, record: Compaction | None, views: Views, memory: ShapingMemory) -> None:
        if record is None and not self.shown:
            self.record, self.body, self.texts = None, self.laid, {}
            return
        laid = self.laid.items("messages")
        spans = wire.array_spans(self.laid, "messages")
        if spans is None:
            raise Invalid("hidden")
        texts, dropped, carrier = dict(self.shown), NO_RANGES, b""
        try:
            if record is not None:
                dropped, carrier = record.dropped, record.carrier
                texts |= texts_of(record, laid, self.facts, self.reference, memory)
            body = _edited(self.laid, edits_of(spans, dropped, carrier, texts), dropped=bool(dropped))
        except ValueError as error:
            raise Invalid("json") from error
        check_cut(
            views.messages(self.tenant, laid),
            views.messages(self.tenant, body.items("messages")),
            dropped,
            texts.keys(),
            carried=bool(dropped),
            added=self.added,
        )
        self.record, self.body, self.texts = record, body, texts

    def _put_back(self, views: Views) -> None:
        """Put hidden rounds back around the messages that came of them, where these go out as they were.

        All are left out where the result would not be valid; they are not needed for an answer.
        """
        laid, record = self.laid.items("messages"), self.record
        gone = set[int]() if record is None else record.gone()
        carried = record is not None and bool(record.dropped)
        texts: dict[int, bytes] = {}
        items: dict[int, tuple[bytes, ...]] = {}
        sizes: dict[int, tuple[int, int]] = {}
        for at, rounds in self.hidden.items():
            found = None if at in gone or at in self.texts else put_back(laid[at], rounds)
            if found is not None:
                left_out = sum(each < at for each in gone)
                place = at - left_out + (carried and left_out > 0)
                texts[at], items[place] = b",".join(found), found
                sizes[place] = len(rounds.before), len(rounds.after)
        body = expanded(self.body, items)
        try:
            if body is None:
                raise Invalid("hidden")
            before, after = self.body.items("messages"), body.items("messages")
            check_put_back(views.messages(self.tenant, before), views.messages(self.tenant, after), sizes)
        except Invalid:
            self.hidden = {}
            return
        self.body, self.texts = body, {**self.texts, **texts}

    async def measure(self, lengths: Lengths, tokenizers: Counting) -> None:
        """Estimate the length of what goes out."""
        known, calibration = self.known, lengths.of(self.model.name)
        if known is not None and known.record == self.record:
            size = total(self._sizes(lengths, known.length))
            self.said = known.said.minus(known.tools).plus(self.tools).plus(size)
            more = calibration.tokens(self.tools) - calibration.tokens(known.tools)
            self.arriving = await self._arriving(size, known, calibration, tokenizers) + max(more, 0)
            tokens = max(known.tokens + self.arriving + min(more, 0), 0)
            spread = KNOWN_SPREAD * tokens + UNKNOWN_SPREAD * (self.arriving - min(more, 0))
            self.estimate = Estimate(tokens, round(spread))
            return
        self.said = self._said(lengths)
        tokens, share = calibration.tokens(self.said), UNKNOWN_SPREAD
        self.arriving = tokens
        if known is not None and known.tokens:
            scale = known.tokens / max(calibration.tokens(known.said), 1)
            tokens = round(tokens * min(max(scale, _LEAST_SCALE), _MOST_SCALE))
            new = calibration.tokens(total(self._sizes(lengths, known.length)))
            self.arriving, share = min(new, tokens), _RECORD_SPREAD
        self.estimate = Estimate(tokens, round(share * tokens))

    async def _arriving(
        self, size: Measure, known: Known, calibration: Calibration, tokenizers: Counting
    ) -> int:
        """The tokens of the messages that came since the last request; `size` is theirs."""
        facts, messages = self.facts[known.length :], self.laid.items("messages")[known.length :]
        counted = await tokenizers.count(self.model, facts, messages)
        return calibration.tokens(size) if counted is None else counted + calibration.tokens(size.of_media())

    def _sizes(self, lengths: Lengths, start: int = 0) -> list[Measure]:
        """The sizes of the messages from `start` on, as they go out where they do."""
        sizes = lengths.sizes(self.facts[start:], self.laid.items("messages")[start:])
        for at, text in self.texts.items():
            if at >= start:
                sizes[at - start] = measure(text)
        return sizes

    def _said(self, lengths: Lengths) -> Measure:
        """The size of all that goes out."""
        said = self.tools
        if self.record is None:
            return said.plus(total(self._sizes(lengths)))
        gone = self.record.gone()
        kept = (size for at, size in enumerate(self._sizes(lengths)) if at not in gone)
        return said.plus(measure(self.record.carrier)).plus(total(kept))

    def size_from(self, start: int, lengths: Lengths) -> Measure:
        """The size of the messages from `start` on, none of which is left out, as they go out."""
        return total(self._sizes(lengths, start))

    def told(self) -> str | None:
        """The compaction as the client is told of it."""
        record = self.record
        if record is None:
            return None
        masked = len(record.masked) + len(record.split)
        return f"{record.by}; reason={record.reason}; left_out={len(record.gone())}; shortened={masked}"

    def too_large(self) -> str:
        """What of the prompt does not fit, for the client of one that cannot be made shorter."""
        record, results = self.record, 0
        while results < len(self.facts) and self.facts[-1 - results].role == "tool":
            results += 1
        gone, cut = (0, 0) if record is None else (len(record.gone()), len(record.masked) + len(record.split))
        open_ = f", {results} of them results of tools that the model has not seen" if results else ""
        return (
            f"The gateway left out {gone} messages and shortened {cut}; the {len(self.facts) - gone} that "
            f"must stay{open_}, are too long together."
        )

    def reasons(self) -> tuple[PlanEdit, ...]:
        """What was changed, in words."""
        found: list[PlanEdit] = []
        if (record := self.record) is not None:
            parts = [
                f"{count} {what}"
                for count, what in (
                    (len(record.gone()), "messages left out"),
                    (len(record.masked), "tool results masked"),
                    (len(record.split), "messages cut"),
                )
                if count
            ]
            said = f"compaction ({record.by}, {record.reason}): {', '.join(parts)}"
            found.append(PlanEdit("messages", said))
        if self.offered:
            found.append(PlanEdit("tools", f"the tool {NAME}, for the whole conversation"))
        if self.hidden:
            found.append(PlanEdit("messages", "calls that the gateway answered, where they were made"))
        return tuple(found)

    def bytes_per_token(self, lengths: Lengths) -> float:
        """Bytes of text for each token, rather too few: JSON takes more for the same text."""
        size = self.said.plain + self.said.wide
        text = Measure(self.said.plain, self.said.wide)
        tokens = lengths.of(self.model.name).tokens(text) * self.scale(lengths)
        return _TEXT_SHARE * size / tokens if size and tokens else BYTES_PER_TOKEN

    def scale(self, lengths: Lengths) -> float:
        """Tokens of this prompt for each one that the calibration gives."""
        return self.estimate.tokens / max(lengths.of(self.model.name).tokens(self.said), 1)


class Shaped(Record, frozen=True):
    """The body to go on with, what was changed in it, and what is needed once it is answered."""

    body: Body
    reasons: tuple[PlanEdit, ...] = ()
    turn: Turn | None = None


def _edited(body: Body, edits: Sequence[Edit], *, dropped: bool) -> Body:
    """The body after edits. Raises ValueError where it is no JSON object any more."""
    after = None if dropped else wire.rewritten(body, edits)
    return wire.parse(b"".join(wire.splice(body.raw, edits))) if after is None else after
