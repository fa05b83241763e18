"""The members of a request's body that a gateway acts on, by name."""

from __future__ import annotations

from typing import Final

# Fields of vLLM that reach past the caller's own request: into other tenants' caches, the scheduler,
# the engine's memory or its connectors.
ENGINE_FIELDS: Final = frozenset(
    {
        "cache_salt",
        "chat_template",
        "ec_transfer_params",
        "echo",
        "enable_response_messages",
        "ignore_eos",
        "kv_transfer_params",
        "logits_processors",
        "media_io_kwargs",
        "min_tokens",
        "mm_processor_kwargs",
        "previous_input_messages",
        "priority",
        "prompt_embeds",
        "prompt_logprobs",
        "repetition_detection",
        "request_id",
        "return_token_ids",
        "session_id",
        "truncate_prompt_tokens",
        "use_beam_search",
        "vllm_xargs",
        "watermarking",
    }
)
KNOWN: Final = ENGINE_FIELDS | {
    "best_of",
    "chat_template_kwargs",
    "documents",
    "input",
    "max_completion_tokens",
    "max_tokens",
    "metadata",
    "model",
    "n",
    "prompt",
    "prompt_cache_key",
    "reasoning_effort",
    "safety_identifier",
    "service_tier",
    "stream",
    "stream_options",
    "tools",
    "user",
}
