"""What to do about each kind of difference."""

from __future__ import annotations

import pytest

from ctxgate.compression.divergence import DivergenceKind
from ctxgate.gateway.advice import ADVICE, advice


def test_every_kind_has_its_advice() -> None:
    assert set(ADVICE) == set(DivergenceKind)


@pytest.mark.parametrize(
    ("kind", "volatile", "field", "cure"),
    [
        (DivergenceKind.VOLATILE_IN_HEAD, "uuid", "messages[0].content", "`volatile: [uuid]` moves it there"),
        (DivergenceKind.VOLATILE_IN_HEAD, "clock", "tools[1].function.description", "No layout level"),
        (DivergenceKind.VOLATILE_IN_HEAD, "clock", "prompt", None),
        (DivergenceKind.SYSTEM_CHANGED, None, "messages[0].content", "Layout `learned` moves blocks there"),
        (DivergenceKind.TOOLS_REORDERED, None, "tools[1]", "Layout `safe` sends them in the order"),
        (DivergenceKind.TOOLS_RESERIALIZED, None, "tools[1]", "Layout `safe` sends the text"),
        (DivergenceKind.HISTORY_RESERIALIZED, None, "messages[3]", "Layout `safe` sends tool calls"),
        (DivergenceKind.HISTORY_EDITED, None, "messages[3]", None),
    ],
)
def test_advice_names_the_level_that_cures(
    kind: DivergenceKind, volatile: str | None, field: str, cure: str | None
) -> None:
    told = advice(kind, volatile, field)
    assert told.startswith(ADVICE[kind])
    assert ("ayout" in told) is (cure is not None)
    assert (cure or "") in told
