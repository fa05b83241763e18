"""Where a replica's cache events are heard."""

from __future__ import annotations

import pytest

from config_texts import VALID, read_text, shown
from ctxgate.gateway import config_load
from ctxgate.gateway.config import KvEvents

QUICK = '{name: quick, url: "http://10.0.0.3:8000"'


def with_events(written: str) -> str:
    return VALID.replace(QUICK, f"{QUICK}, kv_events: {written}")


def test_an_address_or_all_three_fields() -> None:
    (quick,) = read_text(with_events("tcp://10.0.0.3:5557")).config.pools["fast"].replicas
    assert quick.kv_events == KvEvents("tcp://10.0.0.3:5557", None, "")
    text = '{endpoint: "tcp://[fd00::3]:5557", replay_endpoint: "ipc:///run/replay", topic: kv}'
    (quick,) = read_text(with_events(text)).config.pools["fast"].replicas
    assert quick.kv_events == KvEvents("tcp://[fd00::3]:5557", "ipc:///run/replay", "kv")
    assert read_text(VALID).config.pools["fast"].replicas[0].kv_events is None


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (
            "http://10.0.0.3:5557",
            "must be a ZeroMQ address such as tcp://127.0.0.1:5557, or ipc:// and a path",
        ),
        ('"tcp://10.0.0.3"', "must be a ZeroMQ address such as tcp://127.0.0.1:5557, or ipc:// and a path"),
        ('"tcp://10.0.0.3:0"', "must be a ZeroMQ address such as tcp://127.0.0.1:5557, or ipc:// and a path"),
        (
            '"tcp://*:5557"',
            "names no host: the engine listens on `*`, the gateway connects to the engine's host",
        ),
        ('"tcp://a b:5557"', "must be a ZeroMQ address such as tcp://127.0.0.1:5557, or ipc:// and a path"),
        ('"tcp://a_b!:5557"', "the host is neither an IP address nor a host name"),
    ],
)
def test_addresses_that_cannot_be_heard(written: str, problem: str) -> None:
    (line,) = shown(with_events(written))
    assert line.endswith(f"kv_events: {problem}")


def test_a_topic_is_one_word() -> None:
    (line,) = shown(with_events('{endpoint: "tcp://10.0.0.3:5557", topic: "two words"}'))
    assert "kv_events.topic: must be 1 to 64 printable ASCII characters" in line


def test_without_the_library_every_stream_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_load, "has_events", lambda: False)
    (line,) = shown(with_events("tcp://10.0.0.3:5557"))
    assert "pools.fast.replicas[0].kv_events: needs the extra `events`: pip install" in line
    assert read_text(VALID).config.pools["fast"].replicas[0].kv_events is None
