"""The twin's answers in vLLM 0.32's wire shapes: whole bodies and chunks, chat and completions.

Field by field what the engine's typed models write, nulls included. Pure: ids and times are arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ctxgate.inference.twin_job import Admission
    from ctxgate.inference.twin_requests import ChatRequest, CompletionRequest, Sampling
    from ctxgate.inference.twin_text import Answer, Delta, LogProbabilities

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every body and chunk of one reply has in common."""

    id: str
    model: str
    created: int
    fingerprint: str


def model_card(name: str, max_model_len: int, now: int) -> Body:
    """An entry of `/v1/models`."""
    permission: Body = {"id": f"modelperm-{name}", "object": "model_permission", "created": now}
    permission |= {"allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True}
    permission |= {"allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False}
    permission |= {"organization": "*", "group": None, "is_blocking": False}
    card: Body = {"id": name, "object": "model", "created": now, "owned_by": "vllm", "root": name}
    return card | {"parent": None, "max_model_len": max_model_len, "permission": [permission]}


class Reply(ABC):
    """One request's reply while its answers grow."""

    chunk_object: str

    def __init__(
        self,
        request: Sampling,
        envelope: Envelope,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Answer],
        logprobs: LogProbabilities,
    ) -> None:
        self.envelope = envelope
        self.prompts = prompts
        self.answers = answers
        self.logprobs = logprobs
        self.include_usage, self.continuous = request.usage
        self.token_ids = request.return_token_ids

    @abstractmethod
    def opening(self) -> Iterable[Body]:
        """The chunks that come before any token."""

    @abstractmethod
    def chunk(self, answer: Answer, delta: Delta) -> Body | None:
        """The chunk of what is new in one answer; None where nothing is to be sent."""

    @abstractmethod
    def whole(self) -> Body:
        """The body of a reply that is not streamed."""

    @abstractmethod
    def details(self, admission: Admission | None) -> Body:
        """`prompt_tokens_details` without the members that this API leaves null."""

    def closing(self) -> Body | None:
        """The usage chunk, where the client asked for one."""
        if not self.include_usage:
            return None
        usage = self._usage(self.prompts, self.answers)
        usage["prompt_tokens_details"] = self.details(self._first_admission())
        body = self._chunk([]) | {"usage": usage, "system_fingerprint": self.envelope.fingerprint}
        if (metrics := self.metrics()) is not None:
            body["metrics"] = {name: value for name, value in metrics.items() if value is not None}
        return body

    def metrics(self) -> Body | None:
        """Timing of a single answer in milliseconds; None members where it was never scheduled."""
        if len(self.answers) != 1:
            return None
        answer = self.answers[0]
        names = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms")
        body: Body = dict.fromkeys((*names, "tokens_per_second", "speculative_decoding"))
        if answer.admission is None or answer.last_token is None:
            return body
        times = answer.admission
        generation = answer.last_token - times.first_token
        inference = answer.last_token - times.scheduled
        body["time_to_first_token_ms"] = (times.first_token - times.scheduled) * 1000
        body["generation_time_ms"] = generation * 1000
        body["queue_time_ms"] = (times.scheduled - times.arrived) * 1000
        if len(answer.tokens) > 1:
            body["mean_itl_ms"] = generation / (len(answer.tokens) - 1) * 1000
        if inference > 0:
            body["tokens_per_second"] = len(answer.tokens) / inference
        return body

    def _first_admission(self) -> Admission | None:
        return next((answer.admission for answer in self.answers if answer.admission), None)

    def _last_admission(self) -> Admission | None:
        """That of the last prompt's answer that ended last, which is what a whole body reports."""
        ended = [
            (answer.last_token, answer.index, answer.admission)
            for answer in self.answers
            if answer.prompt == self.answers[-1].prompt and answer.last_token is not None
        ]
        return max(ended, key=lambda entry: entry[:2])[2] if ended else None

    def _usage(self, prompts: Iterable[Sequence[int]], answers: Iterable[Answer]) -> Body:
        prompt = sum(map(len, prompts))
        completion = sum(len(answer.tokens) for answer in answers)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
        }

    def _full_usage(self, admission: Admission | None) -> Body:
        absent: Body = {"cached_tokens": None, "created_cache_tokens": None, "multimodal_tokens": None}
        return self._usage(self.prompts, self.answers) | {
            "prompt_tokens_details": absent | self.details(admission),
            "completion_tokens_details": None,
        }

    def _chunk(self, choices: list[Body]) -> Body:
        return {
            "id": self.envelope.id,
            "object": self.chunk_object,
            "created": self.envelope.created,
            "model": self.envelope.model,
            "choices": choices,
        }

    def _stamped(self, chunk: Body, finish: str | None) -> Body:
        """A last chunk carries the fingerprint where no usage chunk follows."""
        if finish is not None and not self.include_usage:
            chunk["system_fingerprint"] = self.envelope.fingerprint
        return chunk

    def _ids(self, tokens: Sequence[int]) -> list[int] | None:
        return list(tokens) if self.token_ids else None


class ChatReply(Reply):
    """A reply of `/v1/chat/completions`."""

    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        request: ChatRequest,
        envelope: Envelope,
        prompt: Sequence[int],
        answers: Sequence[Answer],
        logprobs: LogProbabilities,
    ) -> None:
        super().__init__(request, envelope, [prompt], answers, logprobs)
        self._top = (request.top_logprobs or 0) if request.logprobs else None

    def details(self, admission: Admission | None) -> Body:
        if admission is None:
            return {"cached_tokens": 0, "created_cache_tokens": 0}
        return {"cached_tokens": admission.cached, "created_cache_tokens": admission.created}

    def opening(self) -> Iterable[Body]:
        for answer in self.answers:
            choice = {
                "index": answer.index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            chunk = self._chunk([choice])
            if self.continuous:
                chunk["usage"] = self._usage(self.prompts, ()) | {"completion_tokens_details": None}
            yield chunk | {
                "prompt_token_ids": self._ids(self.prompts[0]),
                "prompt_text": None,
            }

    def chunk(self, answer: Answer, delta: Delta) -> Body | None:
        if not delta.text and not delta.tokens and not answer.tokens:
            return None  # aborted before it was scheduled: not even a finish reason
        logprobs = self._logprobs(delta.tokens)
        if not delta.text and delta.finish is None and logprobs is None and not self.token_ids:
            return None
        choice: Body = {
            "index": answer.index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": logprobs,
            "finish_reason": delta.finish,
        }
        if delta.finish is not None:
            choice["stop_reason"] = delta.stop_reason
        choice["token_ids"] = self._ids(delta.tokens)
        chunk = self._chunk([choice])
        if self.continuous:
            chunk["usage"] = self._usage(self.prompts, [answer]) | {"completion_tokens_details": None}
        return self._stamped(chunk, delta.finish)

    def whole(self) -> Body:
        return {
            "id": self.envelope.id,
            "object": "chat.completion",
            "created": self.envelope.created,
            "model": self.envelope.model,
            "choices": [self._choice(answer) for answer in self.answers],
            "service_tier": None,
            "system_fingerprint": self.envelope.fingerprint,
            "usage": self._full_usage(self._last_admission()),
            "prompt_logprobs": None,
            "prompt_token_ids": self._ids(self.prompts[0]),
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": self.metrics(),
        }

    def _choice(self, answer: Answer) -> Body:
        message: Body = {"role": "assistant", "content": answer.text, "refusal": None, "annotations": None}
        message |= {"audio": None, "function_call": None, "reasoning": None}
        return {
            "index": answer.index,
            "message": message,
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": answer.finish,
            "stop_reason": answer.stop_reason,
            "token_ids": self._ids(answer.tokens),
            "routed_experts": None,
        }

    def _logprobs(self, tokens: Sequence[int]) -> Body | None:
        return None if self._top is None else self.logprobs.chat(tokens, self._top)


class CompletionReply(Reply):
    """A reply of `/v1/completions`. `echoes` holds the text that goes before each prompt's answers."""

    chunk_object = "text_completion"

    def __init__(
        self,
        request: CompletionRequest,
        envelope: Envelope,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Answer],
        logprobs: LogProbabilities,
        echoes: Sequence[str],
    ) -> None:
        super().__init__(request, envelope, prompts, answers, logprobs)
        self._top = request.logprobs
        self._echoes = echoes
        self._offsets = [0] * len(answers)
        self._opened: set[int] = set()

    def details(self, admission: Admission | None) -> Body:
        return {"cached_tokens": 0 if admission is None else admission.cached}

    def opening(self) -> Iterable[Body]:
        return ()

    def chunk(self, answer: Answer, delta: Delta) -> Body | None:
        if not delta.text and not delta.tokens and not answer.tokens:
            return None  # aborted before it was scheduled: not even a finish reason
        first = answer.index not in self._opened
        self._opened.add(answer.index)
        choice: Body = {
            "index": answer.index,
            "text": (self._echoes[answer.prompt] if first else "") + delta.text,
            "logprobs": self._logprobs(answer, delta.tokens),
            "finish_reason": delta.finish,
            "stop_reason": delta.stop_reason,
            "prompt_token_ids": self._ids(self.prompts[answer.prompt]) if first else None,
            "token_ids": self._ids(delta.tokens),
        }
        chunk = self._chunk([choice])
        if self.continuous:
            chunk["usage"] = self._usage([self.prompts[answer.prompt]], [answer])
        return self._stamped(chunk, delta.finish)

    def whole(self) -> Body:
        return {
            "id": self.envelope.id,
            "object": "text_completion",
            "created": self.envelope.created,
            "model": self.envelope.model,
            "choices": [self._choice(answer) for answer in self.answers],
            "service_tier": None,
            "system_fingerprint": self.envelope.fingerprint,
            "usage": self._full_usage(self._last_admission()),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": self.metrics(),
        }

    def _choice(self, answer: Answer) -> Body:
        return {
            "index": answer.index,
            "text": self._echoes[answer.prompt] + answer.text,
            "logprobs": self._logprobs(answer, answer.tokens),
            "finish_reason": answer.finish,
            "stop_reason": answer.stop_reason,
            "token_ids": self._ids(answer.tokens),
            "prompt_logprobs": None,
            "prompt_token_ids": self._ids(self.prompts[answer.prompt]),
            "routed_experts": None,
        }

    def _logprobs(self, answer: Answer, tokens: Sequence[int]) -> Body | None:
        if self._top is None:
            return None
        body = self.logprobs.completion(tokens, self._top + 1, self._offsets[answer.index])
        self._offsets[answer.index] += sum(map(len, body["tokens"]))
        return body
