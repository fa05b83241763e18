"""Needles in haystacks: what is asked, what counts as found, how far a model is reliable, the picture."""

from __future__ import annotations

import dataclasses
import io
import json
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace
from PIL import Image

from ctxgate.gateway import own_calls
from ctxgate.gateway.cli import main
from ctxgate.gateway.config import Model, Pool, Replica
from ctxgate.gateway.context_lengths import Windows
from ctxgate.gateway.fleet import Fleet
from ctxgate.gateway.ledger import Outcome
from ctxgate.gateway.recall_probe import (
    DEPTHS,
    FORMAT,
    Cell,
    Needle,
    Result,
    Row,
    as_text,
    decode,
    encode,
    is_found,
    lengths_of,
    messages,
    needles,
    reliable,
    sentences_for,
)
from ctxgate.gateway.recall_probe_file import reliable_lengths
from ctxgate.gateway.recall_probe_picture import UNKNOWN, centre, colour, picture
from ctxgate.gateway.recall_probe_run import ProbeFailed, Questions, RecallProbe, records_up
from ctxgate.inference.rates import RateCard
from support.behaviours import plays, refuses
from support.gateway import MODEL, RATES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from ctxgate.gateway.services import Services
    from support.gateway import Gateway
    from support.upstream import Exchange, Upstream

    Start = Callable[..., Awaitable[Gateway]]


def row(wanted: int, *shares: float | None) -> Row:
    """Four needles for each depth."""
    cells = [
        Cell(10 * at, round(4 * (share or 0)), 4 if share is not None else 0)
        for at, share in enumerate(shares)
    ]
    return Row(wanted, None if shares[0] is None else wanted - 7, tuple(cells))


RESULT = Result(
    FORMAT, "fast", "swift", 0.9, 993, (row(1000, 1, 1), row(2000, 1, 0.5), row(4000, 0, None)), 24, 9000, 1
)


def test_a_needle_stands_at_its_depth_and_its_code_only_there() -> None:
    for depth in DEPTHS:
        needle = Needle(1000, depth, 0)
        [message] = messages(needle, 200)
        text = message["content"]
        before, _, after = text.partition(f"The access code of the {needle.door} is {needle.code}.")
        assert before.count(" near the ") == round(depth * 2)
        assert after.count(" near the ") == 200 - round(depth * 2)
        assert not any(character.isdigit() for character in before + after)
        assert after.endswith(f"What is the access code of the {needle.door}? Answer with the code alone.")


def test_no_two_haystacks_begin_alike_or_hide_the_same_code() -> None:
    every = list(needles([4000, 1000], DEPTHS, 3))
    assert [each.length for each in every] == [1000] * 33 + [4000] * 33
    assert len({each.code for each in every}) == len(every)
    assert len({messages(each, 8)[0]["content"][:500] for each in every}) == len(every)
    assert messages(every[5], 20) == messages(every[5], 20)


def test_the_haystack_fills_the_length() -> None:
    # one sentence: 100 tokens, 65: 804, so 11 tokens each
    assert sentences_for(1200, (100, 804)) == 101
    assert sentences_for(1199, (100, 804)) == 100
    assert sentences_for(10, (100, 804)) == 0
    with pytest.raises(ValueError, match="did not take more"):
        sentences_for(1000, (100, 100))
    assert lengths_of(131_072) == (8192, 16_384, 32_768, 65_536, 117_964)


@pytest.mark.parametrize(
    ("answer", "found"),
    [("{}", True), ("The code is {}.", True), ("", False), ("No idea.", False), ("1{}", True), ("12", False)],
)
def test_an_answer_is_right_where_it_holds_the_code(answer: str, found: bool) -> None:
    needle = Needle(1000, 50, 0)
    assert is_found(needle, answer.format(needle.code)) is found
    grouped = f"{needle.code[:3]},{needle.code[3:]}"
    assert is_found(needle, grouped)
    assert not is_found(Needle(1000, 60, 0), needle.code)


def test_reliable_is_the_longest_length_before_the_first_that_is_not() -> None:
    good, bad, unknown = row(1000, 1, 1), row(2000, 1, 0.5), row(2000, 1, None)
    assert reliable([row(4000, 1, 1), good], 0.9) == 3993
    assert reliable([row(4000, 1, 1), good, bad], 0.9) == 993
    assert reliable([row(4000, 1, 1), good, bad], 0.75) == 3993
    assert reliable([good, unknown, row(4000, 1, 1)], 0.9) == 993
    assert reliable([bad], 0.9) is None
    assert reliable([], 0.9) is None


def test_the_result_file_is_read_back_and_others_are_refused() -> None:
    assert decode(encode(RESULT)) == RESULT
    with pytest.raises(ValueError, match="not the result of a recall probe"):
        decode(b'{"format": 1}')
    with pytest.raises(ValueError, match="not the result of a recall probe"):
        decode(b"text")
    with pytest.raises(ValueError, match="format 2; this program knows 1"):
        decode(encode(RESULT).replace(b'"format": 1', b'"format": 2'))


def test_the_table() -> None:
    assert (
        as_text(RESULT)
        == """\
prompt tokens    0%   10%   all
-------------------------------
          993  100%  100%  100%
        1,993  100%   50%   75%
        3,993    0%     -     -

swift on fast: reliable up to 993 tokens (90% of the needles are found).
"""
    )


def test_the_picture_shows_every_cell_in_its_colour() -> None:
    image = Image.open(io.BytesIO(picture(RESULT)))
    assert image.format == "PNG"
    shares = [[cell.share for cell in each.cells] for each in RESULT.rows]
    assert shares == [[1, 1], [1, 0.5], [0, None]]
    seen = [[image.getpixel(centre(at, depth)) for depth in range(2)] for at in range(3)]
    green, yellow, red = (40, 150, 70), (240, 210, 60), (200, 40, 40)
    assert seen == [[green, green], [green, yellow], [red, UNKNOWN]]
    assert image.getpixel((image.width - 1, image.height - 1)) == (255, 255, 255)
    inked = [image.getpixel((x, centre(0, 0)[1])) for x in range(40, 90)]
    assert any(pixel != (255, 255, 255) for pixel in inked)  # the length stands beside its row
    with pytest.raises(ValueError, match="no lengths"):
        picture(Result(FORMAT, "fast", "swift", 0.9, None, (), 0, 0, 0))


def test_colours_lie_between_red_yellow_and_green() -> None:
    assert colour(0.25) == (220, 125, 50)
    assert colour(0.75) == (140, 180, 65)


def forgetful(upstream: Upstream, limit: int) -> None:
    """A model that only reads the first and the last `limit` characters; 10 characters are a token."""

    def write(exchange: Exchange) -> None:
        text = exchange.document["messages"][0]["content"]
        read = text[:limit] + text[-limit:]
        code = "".join(character for character in read if character.isdigit())
        exchange.answer("stop", code or "I cannot find it.", prompt=len(text) // 10, cached=0, completion=4)

    upstream.default = plays(write)


def probe(services: Services, *lengths: int, step: Callable[[], None] = lambda: None) -> RecallProbe:
    questions = Questions(lengths, (0, 50, 100), 2, 16, 0.9, 60.0)
    records = list(services.fleet.records())
    return RecallProbe(services, records, services.config.models[MODEL], questions, step)


async def test_a_model_that_forgets_the_middle_is_found_out_and_every_call_is_booked(
    upstream: Upstream, start_gateway: Start
) -> None:
    forgetful(upstream, 3000)
    gateway = await start_gateway(upstream)
    steps: list[int] = []
    result = await probe(gateway.services, 2000, 500, step=lambda: steps.append(1)).run()
    assert [each.wanted for each in result.rows] == [500, 2000]
    assert [[cell.found for cell in each.cells] for each in result.rows] == [[2, 2, 2], [2, 0, 2]]
    assert all(cell.asked == 2 for each in result.rows for cell in each.cells)
    for each in result.rows:
        assert each.tokens is not None
        assert each.wanted * 0.9 < each.tokens <= each.wanted * 1.02
    assert result.reliable_length == result.rows[0].tokens
    assert len(steps) == 12
    rows = await gateway.rows()
    assert result.calls == len(rows) == 14
    assert Counter((each.opened.organisation, each.opened.task, each.settled.outcome) for each in rows) == {
        ("ctxgate", "probe", Outcome.COMPLETED): 14
    }
    spent = [each.settled.usage for each in rows]
    assert result.tokens == sum((usage.prompt or 0) + (usage.output.value or 0) for usage in spent)
    assert result.cost_nano == sum(each.settled.charge.total or 0 for each in rows)


async def test_a_length_that_is_refused_is_unknown_not_zero(upstream: Upstream, start_gateway: Start) -> None:
    forgetful(upstream, 10**6)
    answer = upstream.default

    async def windowed(exchange: Exchange) -> None:
        small = len(exchange.body) < 8000
        await (answer if small else refuses(400, b'{"error":{"message":"too long"}}'))(exchange)

    upstream.default = windowed
    gateway = await start_gateway(upstream)
    result = await probe(gateway.services, 500, 2000).run()
    assert result.rows[1] == Row(2000, None, tuple(Cell(depth, 0, 0) for depth in (0, 50, 100)))
    assert result.reliable_length == result.rows[0].tokens is not None


async def test_a_pool_that_does_not_answer_is_said(upstream: Upstream, start_gateway: Start) -> None:
    upstream.default = refuses(400, b"{}")
    gateway = await start_gateway(upstream)
    with pytest.raises(ProbeFailed, match="a short prompt was not answered"):
        await probe(gateway.services, 500).run()
    assert [record.replica.name for record in await records_up(gateway.services, "standard")] == [
        "standard-0"
    ]
    assert await records_up(gateway.services, "other") == []
    await upstream.stop()
    assert await records_up(gateway.services, "standard") == []


async def test_replicas_take_turns(
    upstream: Upstream, other_upstream: Upstream, start_gateway: Start
) -> None:
    for each in (upstream, other_upstream):
        forgetful(each, 10**6)
    gateway = await start_gateway(upstream, other_upstream)
    await probe(gateway.services, 500).run()
    assert Counter(each.opened.replica for each in await gateway.rows()) == {"standard-0": 4, "standard-1": 4}


def test_bad_arguments_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in (
        (["--lengths", "100"], "at least 200"),
        (["--depths", "0,101"], "between 0 and 100"),
        (["--trials", "0"], "above 0"),
        (["--threshold", "1.5"], "at most 1"),
    ):
        assert main(["probe-recall", "--pool", "fast", *arguments]) == 2
        assert says in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["probe-recall", "--pool", "fast", "--lengths", "500,abc"])
    assert "'500,abc' is no list of numbers" in capsys.readouterr().err
    assert main(["probe-recall", "--pool", "fast", "-c", str(tmp_path / "none.yaml")]) == 1
    assert "none.yaml" in capsys.readouterr().err


def test_the_organisation_is_the_gateways_own() -> None:
    assert (own_calls.KEY.organisation, own_calls.TASK.name) == ("ctxgate", "probe")
    assert json.loads(encode(RESULT))["reliable_length"] == 993


def models_with(folder: Path, **files: bytes) -> dict[str, Model]:
    """A model for each file, named for it; one without a file, and one whose file is not there."""
    for name, data in files.items():
        (folder / name).write_bytes(data)
    named = {name: Model(name, ("fast",), recall_probe=folder / name) for name in (*files, "gone")}
    return {**named, "plain": Model("plain", ("fast",))}


def test_reliable_lengths_are_read_and_files_that_are_no_good_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nothing = replace(RESULT, reliable_length=None)
    models = models_with(tmp_path, good=encode(RESULT), bad=b"{}", nothing=encode(nothing))
    assert reliable_lengths(models) == {"good": 993}
    assert [text.split(": ")[0] for text in caplog.messages] == ["model bad", "model nothing", "model gone"]


def test_the_planner_goes_by_the_reliable_length_where_it_is_the_shorter_one(tmp_path: Path) -> None:
    rates = RateCard(((RATES,),))
    pool = Pool("fast", (Replica("fast-0", "http://127.0.0.1:9"),), rates)
    models = models_with(tmp_path, good=encode(RESULT))
    windows = Windows(Fleet({"fast": pool}), models)
    assert windows.of(pool, models["good"]) == 993
    assert windows.of(pool, models["plain"]) is None
    for window, counts in ((2000, 993), (500, 500)):
        assert windows.of(pool, dataclasses.replace(models["good"], window=window)) == counts
    windows.learn(pool, "fast-0", models["good"], 700)
    assert windows.of(pool, models["good"]) == 700
