"""The fields of a pool's `engine` section: how `ctxgate pools` starts its servers; see `config_fields`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.config_kinds import FILE_PATH, MODEL_PLACE, Name, Scalar, choice, text, whole
from ctxgate.gateway.config_schema import Field, ListOf, MapOf, Section
from ctxgate.gateway.config_yaml import looks_like_secret
from ctxgate.inference.pools import FAST_SEQUENCES

if TYPE_CHECKING:
    from ctxgate.gateway.config_schema import Values
    from ctxgate.gateway.config_yaml import Place

_NONE_HERE: Final = "a secret never stands in this file"
_KEY_HINT: Final = f"{_NONE_HERE}; name an environment variable in the pool's api_key_env"
_BIND: Final = re.compile(r"[0-9A-Za-z,|_-]{1,256}")


@dataclass(frozen=True, slots=True)
class _Variable(Name):
    """The name of an environment variable."""

    @property
    def pattern(self) -> str:
        """The regular expression of the whole name."""
        return "[A-Za-z_][A-Za-z0-9_]{0,127}"

    def problem(self, value: str) -> str | None:
        """Why a text is no such name."""
        if value == "VLLM_API_KEY":
            return _KEY_HINT
        return None if re.fullmatch(self.pattern, value) else f"{self.what} is letters, digits and _"


def _argument(place: Place) -> str:
    value = text(place, "an argument of vLLM, in quotes")
    # vLLM takes both dashes and underscores, and what an option's name begins with.
    name = value.partition("=")[0].replace("_", "-")
    if len(name) > len("--api-") and "--api-key".startswith(name):
        place.fail(_KEY_HINT)
    return value


def _value(place: Place) -> str:
    value = text(place, "the value of an environment variable, in quotes")
    if looks_like_secret(value):
        place.fail(f"looks like a secret; {_NONE_HERE}: set it in the environment of `ctxgate pools up`")
    return value


def _bind(place: Place) -> str:
    value = text(place, 'GPUs such as "0,1", or cores such as "0-7"')
    if not _BIND.fullmatch(value):
        place.fail('must be GPUs such as "0,1", or cores such as "0-7"')
    return value


_TEXT: Final = {"type": "string", "minLength": 1}
METHOD: Final = Field(
    "method", Name("a method of speculative decoding"), "Such as `ngram`, `suffix`, `eagle3`.", required=True
)
TOKENS: Final = Field("tokens", whole(1, 64), "Tokens that are drafted at once.", required=True)
DRAFT_MODEL: Final = Field("model", MODEL_PLACE, "The drafting model.", default_text="none")
LOOKUP_MAX: Final = Field("lookup_max", whole(1, 64), "Longest n-gram of `ngram`.", default_text="vLLM's")
LOOKUP_MIN: Final = Field("lookup_min", whole(1, 64), "Shortest n-gram of `ngram`.", default_text="vLLM's")
SPECULATIVE_SECTION: Final = Section((METHOD, TOKENS, DRAFT_MODEL, LOOKUP_MAX, LOOKUP_MIN))

MODEL: Final = Field("model", MODEL_PLACE, "The model that the servers load.", required=True)
SERVED: Final = Field(
    "served_name",
    Name("a model's name", wide=True),
    "The name that they serve it by.",
    default_text="the names by which the configuration's models ask this pool",
)
DEVICE: Final = Field("device", choice("gpu", "cpu"), "What they run on.", "gpu")
WINDOW: Final = Field(
    "max_model_len", whole(256, 100_000_000), "Their window, in tokens.", default_text="the model's"
)
SEQUENCES: Final = Field(
    "max_num_seqs",
    whole(1, 65_536),
    "Sequences that one server runs at once; the others wait.",
    default_text=f"{FAST_SEQUENCES} with the profile `fast`, else vLLM's",
)
PARALLEL: Final = Field("tensor_parallel", whole(1, 1024), "GPUs that one server is spread over.", 1)
SPECULATIVE: Final = Field(
    "speculative",
    SPECULATIVE_SECTION,
    "Speculative decoding: fewer steps for a token while few sequences run.",
    default_text="off",
)
BIND: Final = Field(
    "bind",
    ListOf(Scalar(_bind, "GPUs or cores", {"type": "string", "pattern": f"^{_BIND.pattern}$"})),
    "For each replica its GPUs (`CUDA_VISIBLE_DEVICES`) or its cores (`VLLM_CPU_OMP_THREADS_BIND`).",
    (),
    default_text="vLLM's choice",
)
EXTRA: Final = Field(
    "extra_args",
    ListOf(Scalar(_argument, "argument", _TEXT)),
    "Further arguments, each an entry of its own; one that repeats an argument replaces it.",
    (),
    default_text="none",
)
ENV: Final = Field(
    "env",
    MapOf(_Variable("the name of an environment variable"), Scalar(_value, "value, in quotes", _TEXT)),
    "Further environment variables of the servers, such as `VLLM_CPU_KVCACHE_SPACE`.",
    default_text="none",
)
PYTHON: Final = Field(
    "python",
    FILE_PATH,
    "The interpreter of the environment that holds vLLM.",
    default_text="the one that runs `ctxgate`",
)
ENGINE_SECTION: Final = Section(
    (MODEL, SERVED, DEVICE, WINDOW, SEQUENCES, PARALLEL, SPECULATIVE, BIND, EXTRA, ENV, PYTHON),
    {"api_key": _KEY_HINT, "profile": "stands in the pool itself, beside engine"},
)
ENGINE: Final = Field(
    "engine",
    ENGINE_SECTION,
    "How `ctxgate pools command` and `ctxgate pools up` start the pool's servers, each where its `url` says. "
    "The gateway itself does not read it.",
    default_text="the servers are started by somebody else",
)


def check_engine(pool: Values, replicas: int) -> None:
    """Report what in a pool's engine does not fit together."""
    engine = pool.get(ENGINE)
    if engine is None:
        return
    bind = engine.get(BIND)
    if bind is not None and len(engine.at(BIND).node.value) != replicas:  # unreadable entries count too
        engine.at(BIND).complain(f"must have one entry for each of the {replicas} replicas, in their order")
    if engine.get(DEVICE) == "cpu" and (engine.get(PARALLEL) or 1) > 1:
        engine.at(PARALLEL).complain("is for GPUs; on a CPU a server runs as one")
    drafts = engine.get(SPECULATIVE)
    if drafts is not None:
        longest, shortest = drafts.get(LOOKUP_MAX), drafts.get(LOOKUP_MIN)
        if longest is not None and shortest is not None and shortest > longest:
            drafts.at(LOOKUP_MIN).complain("must not be above lookup_max")
