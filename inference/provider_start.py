"""LiteLLM's start: imported, made quiet, and rehearsed, all in a thread.

LiteLLM imports much of itself only when it is first called, which would hold the event loop for a second or
more. So each model is called beforehand, in a loop of the thread's own: once with a made-up answer, and once
at an address of this host where nobody listens. Nothing leaves the host, and nothing costs anything.

LiteLLM is told to use the catalogue that it carries, to send no telemetry and to fetch no tokenizers.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import warnings
from contextlib import suppress
from typing import Any, Final

log = logging.getLogger(__name__)
_QUIET: Final = {
    "LITELLM_OFFLINE_MODE": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_BLOG_POSTS": "True",
    "LITELLM_MODE": "PRODUCTION",  # else a file .env of the working folder is read
    "LITELLM_LOG": "ERROR",
}
_SETTINGS: Final = {
    "telemetry": False,
    "suppress_debug_info": True,
    "turn_off_message_logging": True,
    "disable_hf_tokenizer_download": True,
    "disable_token_counter": True,
}
_CALLED_WHERE_TOLD: Final = frozenset(
    {"openai", "anthropic", "gemini", "mistral", "groq", "deepseek", "openrouter", "together_ai", "xai"}
)
"""Providers whose calls go to `api_base` and nowhere else: the others are not called for a rehearsal."""

_REHEARSAL_S: Final = 30.0
_MESSAGES: Final = ({"role": "user", "content": "Hello"},)


def imported() -> Any:
    """LiteLLM, imported and made quiet: seconds of work, so not on an event loop. Raises ImportError."""
    for name, value in _QUIET.items():
        os.environ[name] = value
    # Its own types use a qualifier that pydantic warns of.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"pydantic\._internal\._generate_schema")
    library = importlib.import_module("litellm")
    for name, setting in _SETTINGS.items():
        setattr(library, name, setting)
    logging.getLogger("LiteLLM").setLevel(logging.CRITICAL)  # its records quote prompts
    return library


def rehearse(library: Any, model: str) -> None:
    """Call a model without calling it, so that its first call finds everything imported. Never raises."""
    try:
        asyncio.run(_rehearsed(library, model))
    except Exception as error:  # noqa: BLE001 - what could not be rehearsed is imported by the first call
        log.info("cannot rehearse calls of %s: %s", model, type(error).__name__)


async def _rehearsed(library: Any, model: str) -> None:
    async with asyncio.timeout(_REHEARSAL_S):
        with socket.socket() as nobody:  # bound, so that it is nobody else's, but it does not listen
            nobody.bind(("127.0.0.1", 0))
            nowhere = f"http://127.0.0.1:{nobody.getsockname()[1]}"
            ways: list[dict[str, Any]] = [{"mock_response": "Hello"}]
            if model.partition("/")[0] in _CALLED_WHERE_TOLD:
                ways.append({"api_base": nowhere})
            for way in ways:
                for stream in (False, True):
                    with suppress(Exception):  # it is the point of these calls that nobody answers
                        await _called(library, model, stream=stream, **way)


async def _called(library: Any, model: str, *, stream: bool, **way: Any) -> None:
    own = {"api_key": "none", "num_retries": 0, "max_retries": 0, "timeout": _REHEARSAL_S}
    answer = await library.acompletion(
        model=model, messages=[*_MESSAGES], stream=stream, drop_params=True, **own | way
    )
    if not stream:
        answer.model_dump(exclude_none=True)
        return
    async for chunk in answer:
        chunk.model_dump(exclude_none=True)
