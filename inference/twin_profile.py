"""How long a step of a vLLM engine takes: the latency shape of a pool, in coefficients.

Prefilling n new tokens of a prompt of L costs `c_lin n + c_att n (L - n/2)` seconds; cut into chunks, the
parts add up to the whole. A decode step costs a fixed part, a part per sequence, and a part per token of
context that attention reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Profile:
    """The serving profile of a pool; times in seconds."""

    name: str
    linear_s: float  # c_lin, per new token
    attention_s: float  # c_att, per pair of a new token and a token it attends to
    step_s: float  # a decode step, whatever its batch
    sequence_s: float  # more for each sequence that decodes
    context_s: float  # more for each token of their contexts
    max_num_seqs: int
    max_num_batched_tokens: int

    def prefill(self, new: int, length: int) -> float:
        """Seconds to compute the last `new` tokens of the first `length` of a prompt."""
        return self.linear_s * new + self.attention_s * new * (length - new / 2)

    def decode(self, contexts: Sequence[int]) -> float:
        """Seconds of one decode step of sequences with these context lengths; 0 for none."""
        if not contexts:
            return 0.0
        return self.step_s + self.sequence_s * len(contexts) + self.context_s * sum(contexts)

    def scaled(self, factor: float) -> Profile:
        """The same shape with every time multiplied by `factor`; 0 takes no time at all."""
        return replace(
            self,
            linear_s=self.linear_s * factor,
            attention_s=self.attention_s * factor,
            step_s=self.step_s * factor,
            sequence_s=self.sequence_s * factor,
            context_s=self.context_s * factor,
        )


PROFILES: Final[Mapping[str, Profile]] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            Profile(
                name="fast",
                linear_s=25e-6,
                attention_s=2.5e-10,
                step_s=7e-3,
                sequence_s=0.15e-3,
                context_s=4e-9,
                max_num_seqs=16,
                max_num_batched_tokens=8192,
            ),
            Profile(
                name="standard",
                linear_s=80e-6,
                attention_s=8e-10,
                step_s=18e-3,
                sequence_s=0.12e-3,
                context_s=10e-9,
                max_num_seqs=64,
                max_num_batched_tokens=8192,
            ),
        )
    }
)
