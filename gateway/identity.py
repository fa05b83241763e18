"""Who sent a request, which task it belongs to, and how long it may take.

The tenant comes from the credential alone. The task is a correlation the client claims: it is looked
for where agents already put it, always namespaced under the key, and never an authority.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import msgspec

from ctxgate.compression.beginning import Beginnings
from ctxgate.gateway.errors import Kind, Refused
from ctxgate.gateway.flow import Identified, Surface, Task
from ctxgate.routing import tiers
from ctxgate.routing.tiers import TEAMLESS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ctxgate.compression.declared_spans import Sections
    from ctxgate.compression.expressions import Expression
    from ctxgate.gateway.config import Key
    from ctxgate.gateway.flow import Inbound
    from ctxgate.routing.tiers import Classes

TASK_HEADER: Final = "x-ctxgate-task"
MAX_TASK: Final = 256
# After our own header: what agents and clients already send, most specific first.
_TASK_HEADERS: Final = (
    "x-task-id",
    "x-claude-code-session-id",
    "thread-id",
    "session-id",
    "x-session-id",
    "x-session-affinity",
    "x-qwen-code-session-id",
    "x-cagent-session-id",
    "x-openwebui-chat-id",
    "x-litellm-session-id",
    "x-litellm-trace-id",
    "helicone-session-id",
)
_ANY_TASK_HEADER: Final = frozenset(_TASK_HEADERS)
_METADATA_KEYS: Final = ("task_id", "session_id", "thread_id")
_BODY_FIELDS: Final = ("prompt_cache_key", "safety_identifier", "user")
_PROMPTS: Final = {
    Surface.COMPLETIONS: ("prompt", "prompt_embeds"),
    Surface.EMBEDDINGS: ("input", "messages"),
}
_MAX_FIELD_BYTES: Final = 16_384


def identify(inbound: Inbound, key: Key, roots: Roots, classes: Classes = TEAMLESS) -> Identified:
    """Key to tenant, headers and body to task and latency budget. Raises `Refused` naming the header."""
    root = roots.of(inbound, key)
    task = _task(inbound, root)
    tier = _small(inbound, "service_tier")
    try:
        job, budget = tiers.asked(inbound.headers, tier, classes)
    except tiers.BadTier as error:
        raise Refused(Kind.INVALID_VALUE, str(error), error.header) from None
    return Identified(inbound, key, task, root, job, budget, tier if isinstance(tier, str) else None)


def authenticate(headers: Mapping[str, str], find_key: Callable[[str], Key | None]) -> Key:
    """The key behind a bearer token, `x-api-key` or `api-key`; all given ones must agree."""
    secrets = {value for name in ("x-api-key", "api-key") if (value := headers.get(name, "").strip())}
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        secrets.add(token.strip())
    if not secrets:
        message = "No API key given. Send it as 'Authorization: Bearer KEY'."
        raise Refused(Kind.MISSING_KEY, message)
    found = find_key(secrets.pop()) if len(secrets) == 1 else None
    if found is None:
        raise Refused(Kind.UNKNOWN_KEY, "Incorrect API key provided.")
    return found


def tenant_of(key: Key) -> str:
    """The tenant as stores name it: no name of an organisation or a team holds a slash."""
    return f"{key.organisation}/{key.team}"


class Roots:
    """Names conversations by their heads, alike in every turn: see `compression.beginning`.

    `patterns`: by team, the expressions that find volatile text of its heads. `seed` should be a secret of
    the process. `sections`: what is known of texts of heads, to be shared with the layout.
    """

    def __init__(
        self,
        patterns: Mapping[str, tuple[Expression, ...]] = MappingProxyType({}),
        seed: int = 0,
        sections: Sections | None = None,
    ) -> None:
        self._patterns = patterns
        self._beginnings = Beginnings(seed, sections)

    def use(self, patterns: Mapping[str, tuple[Expression, ...]]) -> None:
        """Find volatile text by other expressions from now on; heads that are remembered keep their names."""
        self._patterns = patterns

    def of(self, inbound: Inbound, key: Key) -> bytes:
        """32 bytes naming a conversation by its head, up to and including the first user message.

        Turns of one conversation share it, though a clock in the head moves on; another team's equal head
        does not. A head without a user message ends after 64 messages, or with the one that takes it past
        1 MiB; a prompt that is no chat is known by its first 1024 bytes.
        """
        surface, patterns = inbound.surface, self._patterns.get(key.team, ())
        owner = f"{key.organisation}\0{key.team}\0{inbound.model}\0{surface}"
        if surface is Surface.CHAT:
            return self._beginnings.of_messages(owner, inbound.messages, patterns)
        prompt = next((name for name in _PROMPTS[surface] if inbound.body.has(name)), "prompt")
        return self._beginnings.of_text(owner, inbound.body.get(prompt) or b"", patterns)


def _task(inbound: Inbound, root: bytes) -> Task:
    own = _text(inbound.headers.get(TASK_HEADER))
    if own is not None:
        if not _usable(own):
            message = f"Header '{TASK_HEADER}' must be 1 to {MAX_TASK} printable characters."
            raise Refused(Kind.INVALID_VALUE, message, TASK_HEADER)
        return Task(own, "header")
    metadata = _small(inbound, "metadata")
    if isinstance(metadata, dict):
        for name in _METADATA_KEYS:
            if _usable(value := metadata.get(name)):
                return Task(value, f"metadata.{name}")
    if not _ANY_TASK_HEADER.isdisjoint(inbound.headers):
        for name in _TASK_HEADERS:
            if _usable(value := _text(inbound.headers.get(name))):
                return Task(value, name)
    if trace := _trace_id(inbound.headers.get("traceparent", "")):
        return Task(trace, "traceparent")
    for name in _BODY_FIELDS:
        if _usable(value := _small(inbound, name)):
            return Task(value, name)
    return Task(f"root-{root[:8].hex()}", "root")


def _text(header: str | None) -> str | None:
    """A header's text. HTTP names no charset: what is UTF-8 is read as such, and the rest as Latin-1."""
    if header is None or header.isascii():
        return header
    try:
        return header.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return header


def _usable(value: object) -> TypeGuard[str]:
    return (
        isinstance(value, str) and 0 < len(value) <= MAX_TASK and value.isprintable() and value.strip() != ""
    )


def _small(inbound: Inbound, name: str) -> Any:
    if inbound.body.get(name) is None:
        return None
    if inbound.body.size(name) > _MAX_FIELD_BYTES:
        return None
    try:
        return inbound.body.value(name)
    except msgspec.DecodeError:
        return None  # no task name there; the engine judges the field itself


def _trace_id(header: str) -> str | None:
    """The trace id of a W3C `traceparent`, or None when it is not one."""
    parts = header.split("-")
    if len(parts) < 4 or len(parts[1]) != 32 or set(parts[1]) == {"0"}:
        return None
    return parts[1] if all(c in "0123456789abcdef" for c in parts[1]) else None
