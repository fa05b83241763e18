"""Every field of the configuration file: the loader, the reference page and the JSON Schema read this."""

from __future__ import annotations

from typing import Final

from ctxgate.compression.policy import LEVELS, Level
from ctxgate.compression.volatile import VolatileKind
from ctxgate.gateway.cache_salt import Isolation
from ctxgate.gateway.config import Limits, Listen
from ctxgate.gateway.config_context import CONTEXT
from ctxgate.gateway.config_engine import ENGINE
from ctxgate.gateway.config_events import KV_EVENTS
from ctxgate.gateway.config_kinds import (
    DAY,
    FILE_PATH,
    FLAG,
    LISTEN_HOST,
    MODEL_PLACE,
    PRICE,
    SERVER_ROOT,
    SHA256,
    VARIABLE,
    Name,
    choice,
    seconds,
    whole,
)
from ctxgate.gateway.config_pattern import EXPRESSION
from ctxgate.gateway.config_provider import PROVIDER
from ctxgate.gateway.config_routing import CLASSES, LOAD, MODEL_ROUTING
from ctxgate.gateway.config_schema import Field, ListOf, MapOf, Section, Short
from ctxgate.gateway.config_speed import PROFILE, SPEED
from ctxgate.inference import wire_fields

MIB: Final = 2**20
_LISTEN: Final = Listen()
_LIMITS: Final = Limits()
_NO_SECRETS: Final = "a secret never stands in this file; "
_DAY_SECONDS: Final = 86_400

# listen
HOST: Final = Field(
    "host", LISTEN_HOST, "Address to serve on. Anything but loopback is reachable by others.", _LISTEN.host
)
PORT: Final = Field("port", whole(0, 65535), "TCP port; 0 takes any free one.", _LISTEN.port)
LISTEN_SECTION: Final = Section((HOST, PORT))

# store
SQLITE: Final = Field("sqlite", FILE_PATH, "The SQLite file of the ledger.", "ctxgate.db")
FORMS_DAYS: Final = Field(
    "forms_days",
    whole(1, 3650),
    "How long the first-seen texts of tools, tool calls and notes are kept after their last use. They lie in "
    "the ledger's file.",
    30,
)
ARCHIVE_DAYS: Final = Field(
    "archive_days",
    whole(1, 3650),
    "How long the originals of messages that left a prompt can be read again, from when they left it.",
    30,
)
RECALL_MODEL: Final = Field(
    "recall_model",
    MODEL_PLACE,
    "The sentence-transformers model that finds what left a prompt by its meaning. Needs the extra `dense`.",
    default_text="none: it is found by its words and exact strings",
)
STORE_SECTION: Final = Section((SQLITE, FORMS_DAYS, ARCHIVE_DAYS, RECALL_MODEL))

# limits; the defaults are those of `config.Limits`
MAX_BODY: Final = Field(
    "max_body_mib",
    whole(1, 4096, scale=MIB),
    "Largest request body after decompression, in MiB (2^20 bytes); larger ones are answered 413.",
    _LIMITS.max_body_bytes,
    default_text=str(_LIMITS.max_body_bytes // MIB),
)
CONNECT: Final = Field(
    "connect_timeout_s",
    seconds(600),
    "Longest wait for a connection to a replica.",
    _LIMITS.connect_timeout_s,
)
FIRST_BYTE: Final = Field(
    "first_byte_timeout_s",
    seconds(_DAY_SECONDS),
    "Longest wait from dispatch to the first byte of an answer; covers queueing and prefill.",
    _LIMITS.first_byte_timeout_s,
)
IDLE: Final = Field(
    "idle_timeout_s",
    seconds(_DAY_SECONDS),
    "Longest silence of a replica inside an answer.",
    _LIMITS.idle_timeout_s,
)
TOTAL: Final = Field(
    "total_timeout_s",
    seconds(7 * _DAY_SECONDS),
    "Longest time from dispatch to the end of an answer, however steadily its bytes come.",
    _LIMITS.total_timeout_s,
)
ABORT_DRAIN: Final = Field(
    "abort_drain_s",
    seconds(600),
    "How long to wait for the exact usage of a call whose client has gone.",
    _LIMITS.abort_drain_s,
)
MAX_ATTEMPTS: Final = Field(
    "max_attempts", whole(1, 10), "Tries of one request, the first included.", _LIMITS.max_attempts
)
LIMITS_SECTION: Final = Section((MAX_BODY, CONNECT, FIRST_BYTE, IDLE, TOTAL, ABORT_DRAIN, MAX_ATTEMPTS))

# pools
_REPLICA_NAME_ABOUT: Final = "Name in the ledger, in metrics and in headers; unique within the pool."
REPLICA_NAME: Final = Field(
    "name", Name("the name of a replica"), _REPLICA_NAME_ABOUT, default_text="`POOL-N`, N counted from 0"
)
REPLICA_URL: Final = Field(
    "url", SERVER_ROOT, "Root of one vLLM server, without `/v1`; unique within the pool.", required=True
)
DRAINING: Final = Field(
    "draining",
    FLAG,
    "It gets no new requests and ends those it has; a reload (SIGHUP) takes the change over.",
    False,
)
REPLICA_SECTION: Final = Section((REPLICA_NAME, REPLICA_URL, KV_EVENTS, DRAINING))

_PRICE_HINTS: Final[dict[str, str]] = dict.fromkeys(
    ("input", "output", "cached", "uncached", "prompt", "completion", "price"),
    "the unit stands in the name: usd_per_million_uncached, usd_per_million_cached, usd_per_million_output",
)
UNCACHED: Final = Field(
    "usd_per_million_uncached", PRICE, "Prompt tokens that were not in the prefix cache.", required=True
)
CACHED: Final = Field(
    "usd_per_million_cached",
    PRICE,
    "Prompt tokens read from the prefix cache; not above the uncached price.",
    required=True,
)
OUTPUT: Final = Field("usd_per_million_output", PRICE, "Tokens generated, reasoning included.", required=True)
WRITTEN: Final = Field(
    "usd_per_million_written",
    PRICE,
    "The part of the uncached tokens that was newly written to the prefix cache; on vLLM the same price.",
    default_text="`usd_per_million_uncached`",
)
ABOVE: Final = Field(
    "above_prompt_tokens",
    whole(1, 100_000_000),
    "Lower edge of the tier, in tokens: a request whose prompt, cached tokens included, is longer "
    "is priced by the tier as a whole.",
    required=True,
)
TIER_SECTION: Final = Section((ABOVE, UNCACHED, CACHED, OUTPUT, WRITTEN), _PRICE_HINTS)
EFFECTIVE: Final = Field("effective", DAY, "First day (UTC) on which these prices hold.", required=True)
TIERS: Final = Field("tiers", ListOf(TIER_SECTION), "Other prices for long prompts.", (), default_text="none")
RATES_SECTION: Final = Section(
    (EFFECTIVE, UNCACHED, CACHED, OUTPUT, WRITTEN, TIERS),
    _PRICE_HINTS,
    empty="is empty: the pool would be unpriced. Give effective and the three usd_per_million_... prices "
    "(0 where it is free)",
)

REPLICAS: Final = Field(
    "replicas",
    ListOf(Short(REPLICA_SECTION, REPLICA_URL), minimum=1),
    "The servers of the pool.",
    default_text="**required**, but with `provider`",
)
RATES: Final = Field(
    "rates",
    ListOf(RATES_SECTION, minimum=1, single=True),
    "Prices: one version, or a list of dated ones. A request is priced by the version of its day.",
    default_text="**required**, but with `provider`",
    missing="is missing: a pool without prices is not served. Give effective and the three "
    "usd_per_million_... prices (0 where it is free)",
)
API_KEY_ENV: Final = Field(
    "api_key_env",
    VARIABLE,
    "Environment variable with the key that the replicas demand (`vllm serve --api-key`).",
    default_text="no key is sent",
)
ABORT: Final = Field(
    "abort",
    FLAG,
    "The replicas were started with `--enable-scale-out`: a call can be aborted by id and its exact "
    "usage read.",
    True,
)
CONTINUOUS: Final = Field(
    "continuous_usage",
    FLAG,
    "Ask for running usage on every chunk; for pools without `abort`.",
    False,
)
CONVENTION: Final = Field(
    "usage_convention",
    choice("inclusive", "exclusive"),
    "Whether the prompt tokens that the replicas report include the cached ones. vLLM: `inclusive`.",
    "inclusive",
)
ISOLATION: Final = Field(
    "cache_isolation",
    choice(*Isolation),
    "Who shares cached prompts, by a `cache_salt` added to chat and completion requests. `team`: keys of one "
    "team. `organisation`: its teams too. `none`: everybody, and nothing is added; then a client can tell "
    "by the time to the first token whether another one has sent a prompt.",
    Isolation.TEAM.value,
)
PROBE: Final = Field(
    "probe",
    FLAG,
    "Ask each replica, when it is first seen and after an outage, whether it reports cached tokens and how "
    "its chat template renders; three calls per model, or some twenty short ones where it does not render "
    "prompts, booked to the organisation `ctxgate`.",
    True,
)
POOL_SECTION: Final = Section(
    (
        *(REPLICAS, PROVIDER, RATES, PROFILE, SPEED, ENGINE, API_KEY_ENV),
        *(ABORT, CONTINUOUS, CONVENTION, ISOLATION, PROBE, LOAD),
    ),
    {
        "api_key": _NO_SECRETS + "name an environment variable in api_key_env",
        "urls": "is not a known field; replicas takes plain URLs",
        "url": "is not a known field; replicas takes plain URLs",
        "price": "is not a known field; prices stand in rates",
    },
)

# models, teams, keys
MODEL_POOLS: Final = Field(
    "pools",
    ListOf(Name("the name of a pool"), minimum=1),
    "The pools that may serve it, the default first. Each request goes to one of them by its latency budget, "
    "by price, and by where its prefix is warm. Where they differ, its prompt is kept apart in the cache as "
    "the strictest `cache_isolation` demands.",
    required=True,
)
SERVED_NAME: Final = Field(
    "served_name",
    Name("a model's name", wide=True),
    "The engine's own name of the model (`vllm serve --served-model-name`).",
    default_text="the same name",
)
WINDOW: Final = Field(
    "window",
    whole(1024, 100_000_000),
    "The longest prompt and answer together, in tokens, where the replicas report another or none. What a "
    "replica says when it refuses a prompt as too long counts where it is less, until it starts anew.",
    default_text="what the replicas report as `max_model_len`",
)
TIKTOKEN: Final = Field(
    "tiktoken",
    Name("the name of an encoding"),
    "An encoding of the library tiktoken, such as `o200k_base`.",
)
TOKENIZER_FILE: Final = Field("file", FILE_PATH, "A `tokenizer.json` of the library tokenizers.")
TOKENIZER_SECTION: Final = Section((TIKTOKEN, TOKENIZER_FILE))
TOKENIZER: Final = Field(
    "tokenizer",
    TOKENIZER_SECTION,
    "How the tokens of new messages are counted between two answers: by one of these (extra `tokenizers`). "
    "It never replaces what a replica measured.",
    default_text="by their bytes, as measured",
)
RECALL_PROBE: Final = Field(
    "recall_probe",
    FILE_PATH,
    "A result of `ctxgate probe-recall --out`: conversations are compacted before they are longer than what "
    "it found reliable.",
    default_text="the whole window is relied on",
)
MODEL_SECTION: Final = Section((MODEL_POOLS, SERVED_NAME, WINDOW, TOKENIZER, RECALL_PROBE, MODEL_ROUTING))
ORGANISATION: Final = Field(
    "organisation",
    Name("the name of an organisation"),
    "The organisation that the team belongs to.",
    required=True,
)
LAYOUT_LEVEL: Final = Field(
    "level",
    choice(*LEVELS),
    "How far prompts are laid out anew for the prefix cache; each level does what the ones before it do. "
    "`off`: they leave as they came. `safe`: tools, their schemas and tool calls that are equal to ones the "
    "team sent before go out in the order and text of their first sight. `declared`: text that is declared "
    "volatile, by `volatile` or by the client's marks, moves from where it stands to a note at the end of "
    "the last user turn. `learned`: so do blocks of the leading system messages that were seen to change. "
    "A request may ask for less with `x-ctxgate-layout`.",
    Level.SAFE.value,
)
VOLATILE_KIND: Final = Field(
    "kind", choice(*VolatileKind), "What the detector finds of this kind, such as `clock` or `git`."
)
VOLATILE_PATTERN: Final = Field(
    "pattern",
    EXPRESSION,
    "What this expression matches, or its group `value` where it has one; `^` and `$` are the ends of lines. "
    "The syntax is RE2's, which takes linear time on every text: no look-around, no back-references; `\\w`, "
    "`\\d`, `\\s` and `\\b` mean ASCII, `\\pL` any letter. The first 256 matches in a text count.",
)
VOLATILE_SECTION: Final = Section((VOLATILE_KIND, VOLATILE_PATTERN))
VOLATILE: Final = Field(
    "volatile",
    ListOf(Short(VOLATILE_SECTION, VOLATILE_KIND)),
    "What in the leading system and developer messages changes from request to request. Used from the level "
    "`declared` on.",
    (),
    default_text="only what clients mark",
)
LAYOUT_SECTION: Final = Section((LAYOUT_LEVEL, VOLATILE))
LAYOUT: Final = Field(
    "layout",
    Short(LAYOUT_SECTION, LAYOUT_LEVEL),
    "How prompts are laid out for the prefix cache.",
    default_text="`safe`",
)
TEAM_SECTION: Final = Section(
    (ORGANISATION, LAYOUT, CONTEXT, CLASSES), {"organization": "is spelled organisation here"}
)
KEY_ID: Final = Field(
    "id", Name("the id of a key"), "Public name of the key in ledger and logs.", required=True
)
KEY_TEAM: Final = Field(
    "team", Name("the name of a team"), "The team that the key spends for.", required=True
)
KEY_HASH: Final = Field(
    "sha256", SHA256, "Hash of the secret, as `ctxgate keys new` prints it.", required=True
)
ENGINE_FIELDS: Final = Field(
    "allow_engine_fields",
    ListOf(choice(*sorted(wire_fields.ENGINE_FIELDS))),
    "Engine-only request fields that this key may set; from others they are refused.",
    (),
    default_text="none",
)
_HASH_HINT: Final = _NO_SECRETS + "give its hash as sha256 (ctxgate keys new, ctxgate keys hash)"
KEY_SECTION: Final = Section(
    (KEY_ID, KEY_TEAM, KEY_HASH, ENGINE_FIELDS),
    dict.fromkeys(("key", "secret", "token", "api_key", "value", "password"), _HASH_HINT)
    | {
        "hash": "is not a known field; did you mean sha256?",
        "digest": "is not a known field; did you mean sha256?",
    },
)

# the whole file
LISTEN: Final = Field("listen", LISTEN_SECTION, "Where the gateway serves.", default_text="loopback")
STORE: Final = Field(
    "store", STORE_SECTION, "Where the ledger is kept.", default_text="`ctxgate.db` beside this file"
)
LIMITS: Final = Field("limits", LIMITS_SECTION, "Bounds on requests and waits.", default_text="see below")
POOLS: Final = Field(
    "pools",
    MapOf(Name("the name of a pool"), POOL_SECTION, minimum=1),
    "Sets of vLLM servers with one serving profile and one price.",
    required=True,
)
MODELS: Final = Field(
    "models",
    MapOf(Name("a model's name", wide=True), MODEL_SECTION, minimum=1),
    "The model names that clients may ask for.",
    required=True,
)
TEAMS: Final = Field(
    "teams",
    MapOf(Name("the name of a team"), TEAM_SECTION),
    "Who spends: teams and their organisations.",
    default_text="none",
)
KEYS: Final = Field(
    "keys",
    ListOf(KEY_SECTION),
    "The client keys, as hashes. Without any, every call is refused.",
    default_text="none",
)
DOCS: Final = Field("docs", FLAG, "Serve the API reference at `/docs`.", True)
CACHE_SALT_ENV: Final = Field(
    "cache_salt_env",
    VARIABLE,
    "Environment variable with the secret, of 16 characters or more, that cache salts are made with. Give "
    "all gateways of one fleet the same: with another secret every cache is cold.",
    default_text="a random one, made once and kept in the store",
)
ROOT: Final = Section((LISTEN, STORE, LIMITS, POOLS, MODELS, TEAMS, KEYS, CACHE_SALT_ENV, DOCS))
