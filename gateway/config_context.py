"""The fields of a team's `context` section; see `config_fields`."""

from __future__ import annotations

from typing import Final

from ctxgate.gateway.config import Context
from ctxgate.gateway.config_kinds import Name, choice, whole
from ctxgate.gateway.config_schema import Field, ListOf, Section, Short
from ctxgate.gateway.context_level import MODES, SUMMARIZERS

_CONTEXT: Final = Context()

COMPACTION: Final = Field(
    "compaction",
    choice(*MODES),
    "When older messages of a long conversation give way to a summary. `window`: before the model's window, "
    "or a price tier's edge, is reached. `auto`: also as soon as reading them again costs more than a "
    "compaction. `off`: never. A request may ask for less with `x-ctxgate-compaction`.",
    _CONTEXT.compaction,
)
SUMMARIZER: Final = Field(
    "summarizer",
    choice(*SUMMARIZERS),
    "Who writes summaries. `warm_suffix`: the model itself, in the background, by a call that continues the "
    "conversation and so reads it from the cache; booked to the task. `extractive`: code chooses sentences, "
    "without a model. `off`: nobody; older tool results and rounds are left out, oldest first.",
    _CONTEXT.summarizer,
)
TAIL_TOKENS: Final = Field(
    "tail_tokens",
    whole(0, 10_000_000),
    "The end of a conversation that a compaction leaves as it is, in tokens.",
    _CONTEXT.tail_tokens,
)
SUMMARY_TOKENS: Final = Field(
    "summary_tokens",
    whole(200, 100_000),
    "The longest summary, in tokens, the exact strings that code collects included.",
    _CONTEXT.summary_tokens,
)
TOOL_RESULTS: Final = Field(
    "tool_results",
    choice("off", "on"),
    "Shrink long tool results when they first arrive: their head, tail, error lines and structure stay.",
    "off",
)
TOOL_RESULT_BYTES: Final = Field(
    "tool_result_bytes",
    whole(1024, 100_000_000),
    "What a shrunk tool result holds at most; shorter ones stay as they are.",
    _CONTEXT.tool_result_bytes,
)
RECALL: Final = Field(
    "recall",
    choice("off", "on"),
    "Bring passages of messages that left the prompt back where the last message asks for them.",
    "on",
)
RECALL_TOKENS: Final = Field(
    "recall_tokens",
    whole(100, 100_000),
    "The most that is brought back in one turn, in tokens.",
    _CONTEXT.recall_tokens,
)
RECALL_TOOL: Final = Field(
    "recall_tool",
    choice("off", "on"),
    "Let the model look up what left the prompt by the tool `context_recall`. The gateway answers it, the "
    "client never sees it. Conversations that begin while it is on, with tools of the client's, keep it to "
    "their end, where `compaction` is not `off`. A result has `recall_tokens` at most. Each search is one "
    "more call, booked to the task; the usage that the client is told is that of all calls for its answer.",
    "off",
)
STICKY_TOOLS: Final = Field(
    "sticky_tools",
    ListOf(Name("the name of a tool")),
    "Tools whose latest results a compaction keeps word for word, such as one that keeps a list of tasks.",
    (),
    default_text="none",
)
CONTEXT_SECTION: Final = Section(
    (
        COMPACTION,
        SUMMARIZER,
        TAIL_TOKENS,
        SUMMARY_TOKENS,
        TOOL_RESULTS,
        TOOL_RESULT_BYTES,
        RECALL,
        RECALL_TOKENS,
        RECALL_TOOL,
        STICKY_TOOLS,
    )
)
CONTEXT: Final = Field(
    "context",
    Short(CONTEXT_SECTION, COMPACTION),
    "What becomes of long conversations.",
    default_text="`auto`",
)
