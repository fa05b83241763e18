"""The fields of a replica's event stream; see `config_fields`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.config import KvEvents
from ctxgate.gateway.config_kinds import Scalar, host_problem, text
from ctxgate.gateway.config_schema import Field, Section, Short

if TYPE_CHECKING:
    from ctxgate.gateway.config_schema import Values
    from ctxgate.gateway.config_yaml import Place

_WANTED: Final = "a ZeroMQ address such as tcp://127.0.0.1:5557"
_TCP: Final = re.compile(r"tcp://(?P<host>\[[^\]]+\]|[^:/\s]+):(?P<port>[0-9]{1,5})")
_IPC: Final = re.compile(r"ipc://\S+")
_TOPIC: Final = re.compile(r"[!-~]{1,64}")


def _address(place: Place) -> str:
    value = text(place, _WANTED)
    if _IPC.fullmatch(value):
        return value
    found = _TCP.fullmatch(value)
    if found is None or not 0 < int(found["port"]) < 65536:
        place.fail(f"must be {_WANTED}, or ipc:// and a path")
    if found["host"] == "*":
        place.fail("names no host: the engine listens on `*`, the gateway connects to the engine's host")
    if (problem := host_problem(found["host"].strip("[]"))) is not None:
        place.fail(f"the host {problem}")
    return value


def _topic(place: Place) -> str:
    value = text(place, "a topic")
    if not _TOPIC.fullmatch(value):
        place.fail("must be 1 to 64 printable ASCII characters without spaces")
    return value


ADDRESS: Final = Scalar(
    _address,
    "ZeroMQ address, `tcp://HOST:PORT` or `ipc://PATH`",
    {"type": "string", "pattern": "^(tcp://[^*/\\s]+:[0-9]+|ipc://\\S+)$"},
)
ENDPOINT: Final = Field(
    "endpoint",
    ADDRESS,
    "Where the replica publishes its events: `endpoint` of its `--kv-events-config`, with its host in place "
    "of `*`. The replica has to listen there (`tcp://*:5557`): where its own configuration names a host, it "
    "connects itself, and nobody hears it.",
    required=True,
)
REPLAY_ENDPOINT: Final = Field(
    "replay_endpoint",
    ADDRESS,
    "Where it answers with earlier events: its `replay_endpoint`.",
    default_text="none: a gap in the stream makes what is known void",
)
TOPIC: Final = Field(
    "topic",
    Scalar(_topic, "topic", {"type": "string", "pattern": "^[!-~]{1,64}$"}),
    "The topic of the events, if the replica has one.",
    default_text="all",
)
EVENTS_SECTION: Final = Section((ENDPOINT, REPLAY_ENDPOINT, TOPIC))
KV_EVENTS: Final = Field(
    "kv_events",
    Short(EVENTS_SECTION, ENDPOINT),
    "The replica's stream of cache events (vLLM: `--kv-events-config`). With it the gateway knows what is "
    "left of each conversation's prompt in the replica's cache, to the block. Needs the extra `events`.",
    default_text="none: what is cached is concluded from what was sent",
)


def events_of(values: Values | None) -> KvEvents | None:
    """Where a replica's events are heard; None where they are not."""
    if values is None:
        return None
    return KvEvents(values[ENDPOINT], values.get(REPLAY_ENDPOINT), values.get(TOPIC) or "")
