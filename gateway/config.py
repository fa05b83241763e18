"""The configuration as frozen values. Loading and checking live in `config_load`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ctxgate.routing.tiers import TEAMLESS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ctxgate.compression.expressions import Expression
    from ctxgate.compression.volatile import VolatileKind
    from ctxgate.inference.pools import EngineSpec
    from ctxgate.inference.rates import RateCard
    from ctxgate.routing.snapshot import Profile, Speed
    from ctxgate.routing.tiers import Classes


@dataclass(frozen=True, slots=True)
class Listen:
    """Where the gateway serves. Loopback unless the operator says otherwise."""

    host: str = "127.0.0.1"
    port: int = 8080


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what a client may send and how long an upstream may take. Seconds and bytes."""

    max_body_bytes: int = 64 * 2**20
    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = 600.0
    idle_timeout_s: float = 300.0
    total_timeout_s: float = 21_600.0
    abort_drain_s: float = 10.0  # how long to wait for the usage of an aborted call
    max_attempts: int = 3  # tries of one request, the first included


@dataclass(frozen=True, slots=True)
class KvEvents:
    """Where a replica's cache events are heard and, if anywhere, told again: ZeroMQ addresses."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class Replica:
    """One vLLM server. `url` is its root, without a path and without a trailing slash."""

    name: str
    url: str
    kv_events: KvEvents | None = None
    draining: bool = False  # it gets no new attempts


@dataclass(frozen=True, slots=True)
class Provider:
    """A hosted model, called through LiteLLM by its name there ("openai/NAME"). `window` in tokens."""

    model: str
    api_key: str = field(repr=False)
    base_url: str | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas with one serving profile and one price."""

    name: str
    replicas: tuple[Replica, ...]
    rates: RateCard
    api_key: str | None = field(default=None, repr=False)  # sent to the replicas as a bearer token
    abort: bool = True  # the replicas accept /inference/v1/abort_requests (vLLM --enable-scale-out)
    continuous_usage: bool = False  # ask for running usage on every chunk; for pools without `abort`
    usage_convention: str = "inclusive"  # prompt tokens include cached ones; "exclusive" where not
    cache_isolation: str = "team"  # who shares cached blocks: "team", "organisation" or "none" (everybody)
    probe: bool = True  # ask the replicas at start what they report and how their template renders
    load: str = "metrics"  # where they tell their load: "metrics", "header" or "off"
    profile: Profile | None = None  # what the replicas are tuned for, where that is said
    speed: Speed | None = None  # how fast one is, before anything was measured; None: nothing is said of it
    engine: EngineSpec | None = None  # how `ctxgate pools` starts the replicas
    provider: Provider | None = None  # a hosted model: then the only replica stands for it


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """What counts a model's tokens: an encoding of tiktoken, or a `tokenizer.json`. One of them is given."""

    tiktoken: str | None = None
    file: Path | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A model name clients ask for: the pools that serve it, the default first."""

    name: str
    pools: tuple[str, ...]
    served_name: str | None = None  # the engine's own name, where it differs
    window: int | None = None  # tokens of prompt and answer together; None: what the replicas report
    tokenizer: Tokenizer | None = None  # None: tokens are estimated by bytes
    recall_probe: Path | None = None  # the result of `ctxgate probe-recall`: how far prompts are reliable
    routing: str = "ctxgate"  # one of routing.policies.POLICIES

    @property
    def engine_name(self) -> str:
        """The name the engine knows the model by."""
        return self.served_name or self.name


@dataclass(frozen=True, slots=True)
class Context:
    """What becomes of a team's long conversations. Sizes are tokens unless they say bytes."""

    compaction: str = "auto"  # one of context_level.Mode
    summarizer: str = "warm_suffix"  # one of context_level.Summarizer
    tail_tokens: int = 20_000
    summary_tokens: int = 4_000
    tool_results: bool = False  # shrink long ones when they arrive
    tool_result_bytes: int = 16_384
    recall: bool = True
    recall_tokens: int = 1_000
    sticky_tools: frozenset[str] = frozenset()
    recall_tool: bool = False  # offered to models, and answered by the gateway


@dataclass(frozen=True, slots=True)
class Team:
    """A team and the organisation that it belongs to."""

    name: str
    organisation: str
    layout: str = "safe"  # the highest layout level of its requests, one of compression.policy.Level
    kinds: frozenset[VolatileKind] = frozenset()  # volatile text of the head, by the detector's kinds
    patterns: tuple[Expression, ...] = ()  # and by expressions
    context: Context = field(default_factory=Context)
    classes: Classes = TEAMLESS  # how long its requests may take, by the class of their job


@dataclass(frozen=True, slots=True)
class Key:
    """A credential. `digest` is the SHA-256 of the secret; the secret itself is never stored."""

    key_id: str
    digest: bytes = field(repr=False)
    team: str
    organisation: str
    allow_engine_fields: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Config:
    """Everything the gateway reads at start."""

    listen: Listen
    store: Path  # the SQLite file
    limits: Limits
    pools: Mapping[str, Pool]
    models: Mapping[str, Model]
    keys: tuple[Key, ...]
    docs: bool = True
    teams: Mapping[str, Team] = field(default_factory=dict)
    forms_days: int = 30  # how long an unused form is kept
    archive_days: int = 30  # how long an original is kept after it left a prompt
    recall_model: str | None = None  # a sentence-transformers model, by name or folder; None: terms alone
    cache_salt_secret: bytes | None = field(default=None, repr=False)  # None: the store keeps one
