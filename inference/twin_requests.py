"""What a client may ask of the twin, checked as vLLM checks it and refused in vLLM's words.

Unknown fields are accepted and ignored, as the engine does.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_SALT: Final = 128
MAX_REPORTED_ERRORS: Final = 10
MAX_ECHOED_CHARACTERS: Final = 200

RequestT = TypeVar("RequestT", bound=BaseModel)


class Refusal(Exception):
    """An answer other than 200, in the shape of vLLM's error body."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, kind: str = "BadRequestError"
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def refuse(message: str, parameter: str, value: object = None) -> Refusal:
    """A refusal that names a parameter in its text too, as vLLM's validation does."""
    suffix = f"(parameter={parameter})" if value is None else f"(parameter={parameter}, value={value})"
    return Refusal(f"{message} {suffix}", parameter)


class StreamOptions(BaseModel):
    """How a stream reports usage."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Sampling(BaseModel):
    """The fields that chat and completions share."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings; none by default."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def choices(self) -> int:
        """Answers per prompt."""
        return 1 if self.n is None else self.n

    @property
    def usage(self) -> tuple[bool, bool]:
        """Whether a stream ends with usage, and whether every chunk carries it."""
        options = self.stream_options or StreamOptions()
        return bool(options.include_usage), bool(options.include_usage and options.continuous_usage_stats)

    def check_sampling(self) -> None:
        """Refuse values no sampler can use."""
        if self.choices < 1:
            raise Refusal(f"n must be at least 1, got {self.n}.")
        if self.temperature is not None and self.temperature < 0:
            raise refuse(
                f"temperature must be non-negative, got {self.temperature}.", "temperature", self.temperature
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise refuse(f"top_p must be in (0, 1], got {self.top_p}.", "top_p", self.top_p)


class Function(BaseModel):
    """The function of a tool; its JSON schema is not looked into."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class Tool(BaseModel):
    """A tool an assistant may call."""

    type: Literal["function"] = "function"
    function: Function
    defer_loading: bool | None = None


class Message(BaseModel):
    """A chat message; roles are free, as in vLLM."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[str | dict[str, Any]] | None = None


class Conversation(BaseModel):
    """What a chat prompt is rendered from."""

    messages: list[Message]
    tools: list[Tool] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="before")
    @classmethod
    def _check_prompt(cls, data: Any) -> Any:
        if isinstance(data, dict):
            if data.get("tools") == []:
                raise refuse(
                    "`tools` must not be an empty array. "
                    "Either provide at least one tool or omit the field entirely.",
                    "tools",
                )
            if data.get("continue_final_message") and data.get("add_generation_prompt"):
                raise Refusal("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        return data


class ChatRequest(Sampling, Conversation):
    """A body of `/v1/chat/completions`."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    tool_choice: str | dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if isinstance(data, dict):
            _check_common(data)
            _check_tool_choice(data)
            if data.get("top_logprobs") and not data.get("logprobs"):
                raise refuse("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        return data

    @property
    def limit(self) -> int | None:
        """The most tokens the client wants."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """How many tokens' probabilities are told at each place; None for none at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may call tools, whose marks are special tokens."""
        return self.tools is not None and self.tool_choice != "none"


class CompletionRequest(Sampling):
    """A body of `/v1/completions`."""

    prompt: list[int] | list[list[int]] | str | list[str]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if isinstance(data, dict):
            _check_common(data)
            if data.get("prompt") is None or data.get("prompt") == "":
                raise refuse("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        return data

    @property
    def limit(self) -> int | None:
        """The most tokens the client wants; 16 where it does not say."""
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """How many tokens' probabilities are told at each place; None for none at all."""
        return self.logprobs

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may call tools: a completion never does."""
        return False

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one answer group each. Raises Refusal where there is none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        items: list[int | str | list[int]] = list(self.prompt)
        if not items:
            raise Refusal("You must pass at least one prompt")
        tokens = [item for item in items if isinstance(item, int)]
        return [tokens] if tokens else [item for item in items if not isinstance(item, int)]


class TokenizeTextRequest(BaseModel):
    """A body of `/tokenize` that holds a text."""

    model: str | None = None
    prompt: str
    return_token_strs: bool | None = False


class TokenizeChatRequest(Conversation):
    """A body of `/tokenize` that holds a conversation."""

    model: str | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(BaseModel):
    """A body of `/detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


def _check_common(data: Mapping[str, Any]) -> None:
    if data.get("stream_options") and not data.get("stream"):
        raise refuse("Stream options can only be defined when `stream=True`.", "stream_options")
    salt = data.get("cache_salt")
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        raise refuse("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > MAX_SALT or any(character in salt for character in "@/\\\0"):
        raise refuse(
            "Parameter 'cache_salt' must be at most 128 characters and must not contain "
            "'@', '/', '\\\\', or NUL.",
            "cache_salt",
        )


def _check_tool_choice(data: Mapping[str, Any]) -> None:
    choice = data.get("tool_choice")
    if choice is None or choice == "none":
        return
    if data.get("tools") is None:
        raise refuse("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if not isinstance(choice, dict) and choice not in ("auto", "required"):
        raise refuse(
            f"Invalid value for `tool_choice`: {choice}! "
            'Only named tools, "none", "auto" or "required" are supported.',
            "tool_choice",
        )


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """A checked request from the bytes of a body. Raises Refusal, with status 400."""
    return validate(kind, decode(body))


def decode(body: bytes) -> Any:
    """The JSON value of a body. Raises Refusal, with status 400."""
    if not body:
        raise _invalid([{"type": "missing", "loc": "body", "msg": "Field required", "input": "None"}])
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        problem = {"type": "json_invalid", "loc": f"body.{error.pos}", "msg": "JSON decode error"}
        raise _invalid([problem | {"input": "<dict of 0 items>", "ctx": {"error": error.msg}}]) from error
    except UnicodeDecodeError as error:
        raise Refusal("There was an error parsing the body") from error


def validate(kind: type[RequestT], data: Any) -> RequestT:
    """A checked request from a JSON value. Raises Refusal, with status 400."""
    if not isinstance(data, dict):
        problem = "Input should be a valid dictionary or object to extract fields from"
        raise _invalid(
            [{"type": "model_attributes_type", "loc": "body", "msg": problem, "input": _summary(data)}]
        )
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _invalid(
            [
                {
                    "type": problem["type"],
                    "loc": ".".join(["body", *_field_path(problem["loc"])]),
                    "msg": problem["msg"],
                    "input": _summary(problem["input"]),
                }
                for problem in error.errors(include_url=False)
            ]
        ) from error


def _field_path(location: tuple[int | str, ...]) -> list[str]:
    """The part of pydantic's location that a client knows: no names of union branches."""
    internal = ("str", "int", "float", "bool", "dict")
    return [str(part) for part in location if str(part) not in internal and "[" not in str(part)]


def _summary(value: object) -> str:
    if isinstance(value, (list, dict)):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = str(value)
    return text if len(text) <= MAX_ECHOED_CHARACTERS else text[:MAX_ECHOED_CHARACTERS] + "...[truncated]"


def _invalid(problems: list[dict[str, Any]]) -> Refusal:
    count = len(problems)
    label = "error" if count == 1 else "errors"
    lines = [f"  {problem}" for problem in problems[:MAX_REPORTED_ERRORS]]
    if count > MAX_REPORTED_ERRORS:
        lines.append(f"  ...and {count - MAX_REPORTED_ERRORS} more {label}")
    message = "\n".join([f"{count} validation {label}:", *lines])
    return Refusal(message, problems[0]["loc"], kind="Bad Request")
