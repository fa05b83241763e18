"""What the tests with the official `openai` client share: a client, and what it asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import openai

from ctxgate.inference.prompts import PromptRenderer
from e2e.gateway_process import SECRET

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

HELLO: Final[list[ChatCompletionMessageParam]] = [
    {"role": "user", "content": "Hello there, what is a ledger?"}
]
LOOK: Final[ChatCompletionToolParam] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look a word up.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"deep": {"type": "boolean"}},
            "required": ["deep"],
            "additionalProperties": False,
        },
    },
}
HISTORY: Final[list[ChatCompletionMessageParam]] = [
    *HELLO,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"deep": true}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call-1", "content": "A book of accounts."},
]
RUN_ON: Final = {"ignore_eos": True}
"""Extra body of a trusted client: a random model would stop anywhere."""


def client_of(url: str, key: str = SECRET) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)


def without_spaces() -> dict[str, int]:
    """A `logit_bias` against all white space, in which a random model inside a grammar never ends."""
    tokenizer = PromptRenderer().tokenizer
    texts = (
        (token, tokenizer.decode([token], skip_special_tokens=False))
        for token in range(tokenizer.get_vocab_size())
    )
    return {str(token): -100 for token, text in texts if any(map(str.isspace, text))}
