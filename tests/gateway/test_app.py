from __future__ import annotations
from typing import TYPE_CHECKING
from support.gateway import HELLO, STREAM
if TYPE_CHECKING:
    from support.gateway import Gateway
    from support.upstream import Upstream

async def test_x(gateway: Gateway, upstream: Upstream) -> None:
    answer = await gateway.post(HELLO)
    assert answer.status == 200, answer
    answer = await gateway.post(STREAM)
    assert answer.status == 200, answer
    print(answer.body.decode(), answer.headers, upstream.calls[1].raw_head)
    rows = await gateway.rows()
    print(rows[0])
    print(await gateway.metrics())

import pytest
@pytest.mark.parametrize("i", range(20))
async def test_y(gateway: Gateway, i) -> None:
    answer = await gateway.post(HELLO)
