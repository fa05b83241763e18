"""How the servers of a pool are started: vLLM's arguments and environment from a pool's profile.

    fast       interactivity mode, few sequences at once, speculative decoding where it is configured
    standard   throughput mode, as many sequences as the engine takes

Both cache prefixes and report cached tokens, times and load; both can abort a call by its id, and serve by
priority. An argument is an element of a list and never passes through a shell; a key is never an argument.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Device: TypeAlias = Literal["gpu", "cpu"]

ENTRY: Final = ("-m", "vllm.entrypoints.openai.api_server")
KEY_VARIABLE: Final = "VLLM_API_KEY"
FAST_SEQUENCES: Final = 16
"""Sequences that a fast server runs at once, unless told otherwise."""

CPU_BLOCK: Final = 32  # the smallest cache block of the CPU backend, in tokens
_MODE: Final = {"fast": "interactivity", "standard": "throughput", None: "balanced"}
_BIND: Final = {"gpu": "CUDA_VISIBLE_DEVICES", "cpu": "VLLM_CPU_OMP_THREADS_BIND"}
_QUIET: Final = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_CPU: Final = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "auto"}
COMMON: Final = (
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",
    "--enable-per-request-metrics",
    "--enable-server-load-tracking",
    "--enable-request-id-headers",
    "--enable-scale-out",
)


@dataclass(frozen=True, slots=True)
class Speculative:
    """Speculative decoding: the method, how many tokens it drafts, and what the method needs."""

    method: str
    tokens: int
    model: str | None = None
    lookup_max: int | None = None
    lookup_min: int | None = None

    def as_json(self) -> str:
        """The value of `--speculative-config`."""
        told = {
            "method": self.method,
            "num_speculative_tokens": self.tokens,
            "model": self.model,
            "prompt_lookup_max": self.lookup_max,
            "prompt_lookup_min": self.lookup_min,
        }
        return msgspec.json.encode({k: v for k, v in told.items() if v is not None}).decode()


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What the servers of one pool are started with.

    `bind`: for each replica its GPUs (`CUDA_VISIBLE_DEVICES`) or its cores (`VLLM_CPU_OMP_THREADS_BIND`);
    empty: the engine's choice. `api_key_env` names the variable of the caller's environment with the key that
    the servers shall demand.
    """

    model: str
    served_names: tuple[str, ...] = ()
    device: Device = "gpu"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    tensor_parallel: int = 1
    speculative: Speculative | None = None
    bind: tuple[str, ...] = ()
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    python: str | None = None
    api_key_env: str | None = None


@dataclass(frozen=True, slots=True)
class Events:
    """Where one server publishes its cache events: TCP ports of its own, or `ipc://` addresses."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""

    def as_json(self) -> str:
        """The value of `--kv-events-config`. The server listens: the host gives way to `*`."""
        told = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": _listening(self.endpoint),
            "topic": self.topic,
        }
        if self.replay_endpoint is not None:
            told["replay_endpoint"] = _listening(self.replay_endpoint)
        return msgspec.json.encode(told).decode()


def _listening(address: str) -> str:
    return f"tcp://*:{address.rpartition(':')[2]}" if address.startswith("tcp://") else address


@dataclass(frozen=True, slots=True)
class Launch:
    """One server's start: its arguments, the program first, and what its environment has more."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    api_key_env: str | None = None

    def line(self) -> str:
        """The start as a line for a POSIX shell; a key is named by its variable."""
        words = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        if self.api_key_env is not None:
            words.append(f'{KEY_VARIABLE}="${self.api_key_env}"')
        return " ".join([*words, shlex.join(self.arguments)])


def launch(
    spec: EngineSpec,
    profile: str | None,
    place: tuple[str, int],
    index: int,
    events: Events | None = None,
    python: str = "python3",
) -> Launch:
    """The start of a pool's replica number `index`, which is to listen at the host and port of `place`.

    `profile` is "fast", "standard" or None; `python` the interpreter where the pool names none. Where an
    argument of `extra_args` repeats one of these, the later one counts, as in vLLM itself.
    """
    host, port = place
    arguments = [spec.python or python, *ENTRY, "--model", spec.model]
    if spec.served_names:
        arguments += ["--served-model-name", *spec.served_names]
    arguments += ["--host", host, "--port", str(port)]
    arguments += [*COMMON, "--scheduling-policy", "priority", "--performance-mode", _MODE[profile]]
    arguments += _sizes(spec, profile)
    if spec.device == "cpu":
        arguments += ["--block-size", str(CPU_BLOCK), "--enforce-eager"]
    if spec.speculative is not None:
        arguments += ["--speculative-config", spec.speculative.as_json()]
    if events is not None:
        arguments += ["--kv-events-config", events.as_json()]
    environment = dict(_QUIET) | (_CPU if spec.device == "cpu" else {})
    if spec.bind:
        environment[_BIND[spec.device]] = spec.bind[index]
    return Launch((*arguments, *spec.extra_args), environment | dict(spec.env), spec.api_key_env)


def _sizes(spec: EngineSpec, profile: str | None) -> Sequence[str]:
    sequences = spec.max_num_seqs or (FAST_SEQUENCES if profile == "fast" else None)
    sizes = {
        "--max-model-len": spec.max_model_len,
        "--max-num-seqs": sequences,
        "--tensor-parallel-size": spec.tensor_parallel if spec.tensor_parallel > 1 else None,
    }
    return [word for name, value in sizes.items() if value is not None for word in (name, str(value))]
