"""Whether `tool_choice: none` leaves an engine's prompt as it is.

vLLM renders the tools all the same, unless it was started not to (`--exclude-tools-when-tool-choice-none`):
then the prompt parts from what the cache holds at its very beginning, and a long one is read anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ctxgate.inference.client import UpstreamFailed

if TYPE_CHECKING:
    from ctxgate.gateway.fleet import ReplicaRecord
    from ctxgate.gateway.services import Services

_RENDER: Final = "/v1/chat/completions/render"
_TIMEOUT_S: Final = 10.0
_MOST: Final = 1024
_PROMPT: Final[dict[str, Any]] = {
    "messages": [{"role": "user", "content": "x"}],
    "tools": [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
        }
    ],
}


class ToolRefusal:
    """Asks each engine once, by rendering a small prompt both ways. An engine that does not render: no."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str | None], bool] = {}

    async def is_free(self, services: Services, record: ReplicaRecord, model: str) -> bool:
        """Whether a call to `model` (the engine's name) may refuse tools without losing its cached prompt."""
        key = (record.replica.url, model, record.fingerprint)
        known = self._known.get(key)
        if known is not None:
            return known
        headers = services.upstream_headers(record.pool)
        rendered: list[object] = []
        for more in ({}, {"tool_choice": "none"}):
            body = {"model": model, **_PROMPT, **more}
            try:
                status, document = await services.client.post_json(
                    record.replica.url + _RENDER, body, headers, _TIMEOUT_S
                )
            except UpstreamFailed:
                return False  # it may answer another time
            rendered.append(
                document.get("token_ids") if status == 200 and isinstance(document, dict) else None
            )
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[key] = isinstance(rendered[0], list) and rendered[0] == rendered[1]
        return self._known[key]
