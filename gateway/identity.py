"""Who sent a request, and which task it belongs to.

The tenant comes from the credential alone. The task is a correlation the client claims: it is looked
for where agents already put it, always namespaced under the key, and never an authority.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import msgspec

from ctxgate.gateway.errors import Kind, Refused
from ctxgate.gateway.flow import Identified, Surface, Task
from ctxgate.inference.wire import decoded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ctxgate.gateway.config import Key
    from ctxgate.gateway.flow import Inbound

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
_METADATA_KEYS: Final = ("task_id", "session_id", "thread_id")
_BODY_FIELDS: Final = ("prompt_cache_key", "safety_identifier", "user")
_PROMPT_HEAD: Final = 1024
_PROMPTS: Final = {
    Surface.COMPLETIONS: ("prompt", "prompt_embeds"),
    Surface.EMBEDDINGS: ("input", "messages"),
}
# Where a conversation's head ends that has no user message.
_ROOT_MESSAGES: Final = 64
_ROOT_BYTES: Final = 2**20
_MAX_FIELD_BYTES: Final = 16_384


class _Role(msgspec.Struct):
    role: str | None = None


_ROLE: Final = msgspec.json.Decoder(_Role)


def identify(inbound: Inbound, key: Key) -> Identified:
    """Key to tenant, headers and body to task."""
    root = conversation_root(inbound, key)
    return Identified(inbound, key, _task(inbound, root), root)


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


def conversation_root(inbound: Inbound, key: Key) -> bytes:
    """32 bytes naming a conversation by its head, up to and including the first user message.

    Later turns of an append-only conversation share it; another team's equal head does not. A head
    without a user message ends after 64 messages, or with the one that takes it past 1 MiB.
    """
    digest = blake2b(f"{key.organisation}\0{key.team}\0{inbound.model}\0".encode(), digest_size=32)
    if inbound.surface is Surface.CHAT:
        size = 0
        for message in inbound.messages[:_ROOT_MESSAGES]:
            view = memoryview(message)
            digest.update(view)
            size += view.nbytes
            if size > _ROOT_BYTES or _role(message) == "user":
                break
    else:
        prompt = next((name for name in _PROMPTS[inbound.surface] if inbound.body.has(name)), "prompt")
        digest.update(memoryview(inbound.body.get(prompt) or b"")[:_PROMPT_HEAD])
    return digest.digest()


def _role(message: msgspec.Raw) -> str | None:
    try:
        return decoded(_ROLE, message).role
    except msgspec.DecodeError:
        return None  # the engine will say what is wrong with it


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
