"""The lines that start vLLM servers."""

from __future__ import annotations

import json
import os
import shlex
import subprocess

import pytest

from ctxgate.inference.pools import EngineSpec, Events, Speculative, launch

PLACE = ("127.0.0.1", 8001)


def option(arguments: tuple[str, ...], name: str) -> str:
    """The value of an option that is given once."""
    (at,) = [index for index, one in enumerate(arguments) if one == name]
    return arguments[at + 1]


def test_a_fast_gpu_pool() -> None:
    spec = EngineSpec(
        "org/model",
        ("tiny", "other"),
        max_model_len=131072,
        tensor_parallel=2,
        speculative=Speculative("ngram", 4, lookup_max=5, lookup_min=2),
        bind=("0,1", "2,3"),
    )
    start = launch(spec, "fast", PLACE, 1)
    assert start.arguments[:5] == (
        "python3",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "org/model",
    )
    at = start.arguments.index("--served-model-name")
    assert start.arguments[at + 1 : at + 3] == ("tiny", "other")
    found = {
        name: option(start.arguments, name)
        for name in start.arguments
        if name
        in ("--performance-mode", "--max-num-seqs", "--max-model-len", "--tensor-parallel-size", "--port")
    }
    assert found == {
        "--performance-mode": "interactivity",
        "--max-num-seqs": "16",
        "--max-model-len": "131072",
        "--tensor-parallel-size": "2",
        "--port": "8001",
    }
    assert json.loads(option(start.arguments, "--speculative-config")) == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 2,
    }
    assert start.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "--block-size" not in start.arguments


def test_a_standard_cpu_pool() -> None:
    spec = EngineSpec(
        "m", device="cpu", bind=("0-3",), env={"VLLM_CPU_KVCACHE_SPACE": "1"}, python="/opt/v/python"
    )
    start = launch(spec, "standard", PLACE, 0)
    assert start.arguments[0] == "/opt/v/python"
    assert option(start.arguments, "--performance-mode") == "throughput"
    assert option(start.arguments, "--block-size") == "32"
    assert "--enforce-eager" in start.arguments
    assert "--max-num-seqs" not in start.arguments
    assert start.environment == {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0-3",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


@pytest.mark.parametrize("profile", ["fast", "standard", None])
def test_what_both_profiles_have(profile: str | None) -> None:
    arguments = launch(EngineSpec("m"), profile, PLACE, 0).arguments
    assert {
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--enable-per-request-metrics",
        "--enable-request-id-headers",
        "--enable-scale-out",
    } <= set(arguments)
    assert option(arguments, "--scheduling-policy") == "priority"


def test_events_are_published_by_a_server_that_listens() -> None:
    events = Events("tcp://10.0.0.3:5557", "tcp://10.0.0.3:5558", "kv")
    told = json.loads(option(launch(EngineSpec("m"), None, PLACE, 0, events).arguments, "--kv-events-config"))
    assert told == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
        "topic": "kv",
    }
    assert json.loads(Events("ipc:///run/kv").as_json())["endpoint"] == "ipc:///run/kv"


def test_a_line_can_be_pasted_and_holds_no_key() -> None:
    spec = EngineSpec(
        "it's a $(model); `x`",
        env={"A": "two words; $B"},
        extra_args=("--chat-template", "a 'b'.jinja"),
        api_key_env="POOL_KEY",
    )
    start = launch(spec, None, PLACE, 0)
    program = (
        "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['A'], os.environ['VLLM_API_KEY']]))"
    )
    line = start.line().replace("python3 -m vllm", f"python3 -c {shlex.quote(program)} vllm", 1)
    done = subprocess.run(
        ["/bin/sh", "-c", line],
        check=True,
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "POOL_KEY": "secret"},
    )
    arguments, value, key = json.loads(done.stdout)
    assert tuple(arguments[1:]) == start.arguments[3:]
    assert (value, key) == ("two words; $B", "secret")
    assert 'VLLM_API_KEY="$POOL_KEY"' in start.line()
