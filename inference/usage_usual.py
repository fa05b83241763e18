"""The usage object that vLLM sends in nearly every answer, read in one typed step.

Whatever differs in the least, by a member, a type or a sum that does not add up, is not read here but
left to `usage_parse`, which reads this one alike and names every oddity.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ctxgate.inference.usage import UNKNOWN, Usage, measured

LARGEST: Final = 2**40  # beyond any window; a larger figure is garbage

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]


class _PromptDetails(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    cached_tokens: _Tokens | None = None
    created_cache_tokens: _Tokens | None = None


class _OutputDetails(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    reasoning_tokens: _Tokens | None = None


class _Usual(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    prompt_tokens: _Tokens
    completion_tokens: _Tokens
    total_tokens: _Tokens
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _OutputDetails | None = None


_decode: Final = msgspec.json.Decoder(_Usual).decode
_NO_PROMPT_DETAILS: Final = _PromptDetails()


def usual_usage(raw: bytes | msgspec.Raw, *, cached_absent_is_zero: bool, window: int | None) -> Usage | None:
    """The record of a usual usage object of one choice; None for any other, which says nothing of it.

    The prompt count contains the cached tokens. Without a cached figure it is zero where the upstream is
    known to leave a zero out, else unknown.
    """
    try:
        said = _decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    prompt, output = said.prompt_tokens, said.completion_tokens
    details = said.prompt_tokens_details or _NO_PROMPT_DETAILS
    cached, written = details.cached_tokens, details.created_cache_tokens
    if cached is None and cached_absent_is_zero:
        cached = 0
    thought = (
        None if said.completion_tokens_details is None else said.completion_tokens_details.reasoning_tokens
    )
    if said.total_tokens != prompt + output or (thought or 0) > output:
        return None
    if (cached or 0) + (written or 0) > prompt or prompt == 0 or (window is not None and prompt > window):
        return None
    reasoning = UNKNOWN if thought is None else measured(thought)
    if cached is None:
        return Usage(UNKNOWN, UNKNOWN, measured(output), reasoning, prompt_total=measured(prompt))
    return Usage(
        measured(prompt - cached),
        measured(cached),
        measured(output),
        reasoning,
        UNKNOWN if written is None else measured(written),
    )
