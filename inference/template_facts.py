"""What a start-up probe found out about a replica: its cache report, and how its chat template renders."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Verdict(StrEnum):
    """How a template renders two spellings of one request."""

    EQUIVALENT = "equivalent"  # the same tokens
    REORDERED = "reordered"  # the same characters, but for their order and white space
    RENAMED = "renamed"  # the same but for the name that was given
    DIFFERENT = "different"  # another text
    UNKNOWN = "unknown"


class Extension(StrEnum):
    """Whether a turn's prompt begins with the prompt of the turn before it."""

    YES = "yes"
    BUT_ANSWER = "but the answer"  # all earlier messages stay; how an answer begins is rendered otherwise
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Turns:
    """The worst of some turns. `lost`: tokens of the earlier prompt that the later one does not begin with.

    Told by usage, `lost` counts whole cache blocks.
    """

    extension: Extension
    lost: int = 0


UNKNOWN_TURNS: Final = Turns(Extension.UNKNOWN)


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """How one chat template of one server renders.

    The first four say whether a turn extends the one before: plain, with tools, with reasoning in the
    history, with tool results. The others compare spellings: a tool call's arguments with other white
    space and key order; null, missing and empty content beside tool calls; tools and their schemas' keys
    in another order; tool calls with other ids.
    """

    plain: Turns = UNKNOWN_TURNS
    tools: Turns = UNKNOWN_TURNS
    reasoning: Turns = UNKNOWN_TURNS
    tool_results: Turns = UNKNOWN_TURNS
    arguments: Verdict = Verdict.UNKNOWN
    empty_content: Verdict = Verdict.UNKNOWN
    tool_order: Verdict = Verdict.UNKNOWN
    call_ids: Verdict = Verdict.UNKNOWN


UNKNOWN_FACTS: Final = TemplateFacts()


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What a prompt that was sent twice, and once more under another salt, told.

    `reports`: the second answer named a hit (True) or no figure at all (False: cached tokens are unknown
    there, not zero); None where it said zero, or a call failed. `isolates`: nothing hit under the first
    use of a salt; None where there was no hit to tell by. `block_size` is an estimate from the hit.
    """

    reports: bool | None = None
    isolates: bool | None = None
    block_size: int | None = None


@dataclass(frozen=True, slots=True)
class Findings:
    """All that one probe of a replica found for one model. `renders`: it has the render endpoint."""

    cache: CacheReport = CacheReport()
    renders: bool = False
    facts: TemplateFacts = UNKNOWN_FACTS
