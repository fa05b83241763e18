"""The fields of a pool's speed before anything was measured; see `config_fields`."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Final

from ctxgate.gateway.config_kinds import Scalar, choice, number, whole
from ctxgate.gateway.config_schema import Field, Section
from ctxgate.routing.latency import default_speed
from ctxgate.routing.snapshot import Speed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ctxgate.gateway.config_schema import Values
    from ctxgate.gateway.config_yaml import Place
    from ctxgate.routing.snapshot import Profile

_PROFILES: Final[Mapping[str, Profile]] = {"fast": "fast", "standard": "standard"}
_MICRO: Final = Decimal(10) ** 6
_MILLI: Final = Decimal(10) ** 3
_NANO: Final = Decimal(10) ** 9
_OF_PROFILE: Final = "that of the `profile`, else of `standard`"


def _amount(unit: str, least: str, most: int, per_second: Decimal) -> Scalar[float]:
    """A time above zero in a unit, read as seconds. Zero is refused: nothing takes no time."""
    wanted = f"a number of {unit} from {least} to {most:,}"

    def read(place: Place) -> float:
        value = number(place, wanted)
        if not Decimal(least) <= value <= most:
            place.fail(f"must be {wanted}")
        return float(value / per_second)

    return Scalar(
        read, f"{unit}, {least} to {most:,}", {"type": "number", "minimum": float(least), "maximum": most}
    )


PROFILE: Final = Field(
    "profile",
    choice(*_PROFILES),
    "What the replicas are tuned for: the first token soon (`fast`), or many tokens cheaply (`standard`). "
    "Requests prefer one by their class or `service_tier`.",
    default_text="not said",
)
PREFILL: Final = Field(
    "prefill_us_per_token",
    _amount("microseconds", "0.001", 1_000_000, _MICRO),
    "Computing one new token of a prompt.",
    default_text=_OF_PROFILE,
)
ATTENTION: Final = Field(
    "attention_ns_per_pair",
    _amount("nanoseconds", "0.000001", 1_000_000, _NANO),
    "For each pair of a new token and one before it that it attends to.",
    default_text=_OF_PROFILE,
)
STEP: Final = Field(
    "step_ms",
    _amount("milliseconds", "0.001", 60_000, _MILLI),
    "One step of decoding, which gives each running answer a token.",
    default_text=_OF_PROFILE,
)
SEQUENCE: Final = Field(
    "sequence_ms",
    _amount("milliseconds", "0.000001", 60_000, _MILLI),
    "What each running answer adds to a step.",
    default_text=_OF_PROFILE,
)
PER_CONTEXT: Final = Field(
    "context_ns_per_token",
    _amount("nanoseconds", "0.000001", 1_000_000_000, _NANO),
    "What each token of the running prompts and answers adds to a step.",
    default_text=_OF_PROFILE,
)
SEQUENCES: Final = Field(
    "max_num_seqs",
    whole(1, 100_000),
    "How many answers a replica decodes at once (vLLM: `--max-num-seqs`).",
    default_text=_OF_PROFILE,
)
SPEED_SECTION: Final = Section((PREFILL, ATTENTION, STEP, SEQUENCE, PER_CONTEXT, SEQUENCES))
SPEED: Final = Field(
    "speed",
    SPEED_SECTION,
    "How fast one replica is, as far as that is known. Until something has been measured, times are "
    "predicted by it; then by what answers took (best with vLLM's `--enable-per-request-metrics`).",
    default_text="that of the `profile`; without one, nothing is predicted before some answers have come",
)


def profile_of(values: Values) -> Profile | None:
    """A pool's profile; None where that is not said."""
    name = values.get(PROFILE)
    return None if name is None else _PROFILES[name]


def speed_of(values: Values) -> Speed | None:
    """The speed to predict a pool's first requests by; None where nothing is said of it."""
    profile, given = profile_of(values), values.get(SPEED)
    if profile is None and given is None:
        return None
    usual = default_speed(profile)
    if given is None:
        return usual

    def told(field: Field[float], else_: float) -> float:
        value = given.get(field)
        return else_ if value is None else value

    return Speed(
        linear_s=told(PREFILL, usual.linear_s),
        attention_s=told(ATTENTION, usual.attention_s),
        step_s=told(STEP, usual.step_s),
        sequence_s=told(SEQUENCE, usual.sequence_s),
        context_s=told(PER_CONTEXT, usual.context_s),
        slots=given.get(SEQUENCES) or usual.slots,
    )
