"""Sums over a replay, and how they are shown. Expected figures are worked out by hand."""

from __future__ import annotations

import io

import pytest

from ctxgate.gateway.replay import Measure, Played, Total, as_json, percentile, summarize
from ctxgate.gateway.replay_table import Progress, cells, duration, report, table
from ctxgate.inference.usage import UNKNOWN, Usage, measured


def measure(
    turn: int,
    prompt: int,
    cached: int | None,
    output: int = 4,
    *,
    oracle: int | None = None,
    counted: int | None = None,
) -> Measure:
    known = UNKNOWN if cached is None else measured(cached)
    uncached = UNKNOWN if cached is None else measured(prompt - cached)
    usage = Usage(uncached, known, measured(output), prompt_total=measured(prompt))
    return Measure(turn, usage, 1000, 0.010 * (turn + 1), 0.5, None, counted or prompt, oracle)


def played(*measures: Measure, name: str = "s", recorded: int = 3) -> Played:
    return Played(name, f"p/{name}", recorded, list(measures))


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([], 50, None),
        ([7], 50, 7),
        ([7], 95, 7),
        ([3, 1, 2], 50, 2),
        ([4, 3, 2, 1], 50, 2),
        (list(range(1, 101)), 95, 95),
        (list(range(1, 21)), 95, 19),
        ([1, 2], 95, 2),
    ],
)
def test_percentiles_are_nearest_rank(values: list[int], percent: int, expected: int | None) -> None:
    assert percentile(values, percent) == expected


def test_sums_and_efficiency() -> None:
    sums = summarize(
        [
            played(
                measure(0, 100, 0, oracle=0), measure(1, 200, 48, oracle=96), measure(2, 300, 192, oracle=192)
            )
        ]
    )
    assert (sums.requests, sums.failed) == (3, 0)
    assert (sums.prompt, sums.cached, sums.uncached, sums.output) == (
        Total(600),
        Total(240),
        Total(360),
        Total(12),
    )
    assert sums.cost_nano == Total(3000)
    assert sums.oracle == Total(288)
    assert sums.efficiency == pytest.approx(240 / 288)
    assert (sums.ttft_p50_s, sums.ttft_p95_s) == (0.02, 0.03)
    assert not sums.drifted


def test_a_failed_request_is_counted_and_its_tokens_are_not() -> None:
    failed = Measure(1, error="HTTP 500: boom", counted=200)
    sums = summarize([played(measure(0, 100, 0, oracle=0), failed)])
    assert (sums.requests, sums.failed) == (2, 1)
    assert sums.prompt == Total(100)
    assert sums.cost_nano == Total(1000)


def test_unknown_is_not_zero() -> None:
    sums = summarize([played(measure(0, 100, None, oracle=0), measure(1, 200, 96, oracle=96))])
    assert sums.prompt == Total(300)
    assert sums.cached == Total(96, missing=1)
    assert summarize([played(measure(0, 100, None))]).cached == Total(None, missing=1)
    assert summarize([played(measure(0, 100, None))]).efficiency is None


def test_efficiency_weighs_only_requests_with_both_figures() -> None:
    sums = summarize([played(measure(0, 100, None, oracle=96), measure(1, 200, 48, oracle=96))])
    assert sums.efficiency == 0.5


def test_what_the_ledger_booked_goes_before_what_answers_said() -> None:
    one, two = played(measure(0, 100, 0), name="a"), played(measure(0, 100, 0), name="b")
    one.ledger_cost_nano = 5
    assert summarize([one, two]).cost_nano == Total(1005)


def test_another_count_than_the_servers_marks_the_oracle() -> None:
    assert summarize([played(measure(0, 100, 0, oracle=0, counted=99))]).drifted


def test_json_has_null_for_unknown_and_exact_dollars() -> None:
    record = as_json(summarize([played(measure(0, 100, None), measure(1, 200, 96, oracle=96))]))
    assert record["prompt_tokens"] == 300
    assert record["cached_tokens"] == 96
    assert record["unknown"] == {"cached_tokens": 1, "uncached_tokens": 1, "oracle_tokens": 1}
    assert record["cost_usd"] == "0.000002"
    assert record["cost_nano"] == 2000
    assert (record["ttft_p50_ms"], record["ttft_p95_ms"]) == (10.0, 20.0)
    assert as_json(summarize([played(measure(0, 100, None))]))["cached_tokens"] is None


def test_cells_show_what_is_unknown_and_approximate() -> None:
    sums = summarize([played(measure(0, 1000, 0, oracle=0), measure(1, 2000, 992, oracle=1984))])
    assert cells(sums) == [
        "2", "3,000", "992", "2,008", "8", "0.000002", "10.0 ms", "20.0 ms", "1,984", "50.0%",
    ]  # fmt: skip
    assert cells(sums, approximate=True)[-2:] == ["~1,984", "~50.0%"]
    unknown = cells(summarize([played(Measure(0, error="x"), measure(1, 50, None))]))
    assert unknown == ["2 (1 failed)", "50", "-", "-", "4", "0.000001", "20.0 ms", "20.0 ms", "-", "-"]


def test_durations_change_unit_at_ten_seconds() -> None:
    assert [duration(s) for s in (None, 0.0123, 9.9994, 10.0)] == ["-", "12.3 ms", "9999.4 ms", "10.0 s"]


def test_table_is_aligned_and_plain() -> None:
    assert table(("name", "n"), [["a", "1"], ["total", "22"]], last=True) == "\n".join(
        ("name    n", "-----  --", "a       1", "-----  --", "total  22")
    )


def test_report_tells_stops_failures_and_assumptions() -> None:
    stopped = played(
        measure(0, 100, 0, oracle=0), Measure(1, error="HTTP 503: busy"), name="long", recorded=9
    )
    stopped.stopped = "the next prompt no longer fits 2048 tokens"
    text = report([stopped, played(measure(0, 100, 32, oracle=48), name="short")], assumed=True, color=False)
    assert "\x1b" not in text
    assert "long: 2 of 9 requests: the next prompt no longer fits 2048 tokens" in text
    assert "long, request 2 failed: HTTP 503: busy" in text
    assert "the block size is assumed" in text
    total = next(line for line in text.splitlines() if line.startswith("total"))
    assert total.split()[1:5] == ["3", "(1", "failed)", "200"]


def test_colour_only_where_asked() -> None:
    assert "\x1b[1m" in report([played(measure(0, 1, 0))], assumed=False, color=True)


def test_an_assumed_block_size_that_the_hits_confirm_needs_no_remark() -> None:
    text = report(
        [played(measure(0, 100, 0, oracle=0), measure(1, 200, 96, oracle=96))], assumed=True, color=False
    )
    assert "~" not in text


def test_hits_above_the_oracle_have_another_reason() -> None:
    cold = [played(measure(0, 100, 0, oracle=0))]
    warm = [played(measure(0, 100, 80, oracle=0), measure(1, 200, 96, oracle=96))]
    remark = (
        "cached/oracle is above what these prompts can reach by themselves: the server had them from before "
        "this run, or a gateway laid them out anew"
    )
    assert report(warm, assumed=True, color=False).splitlines()[-1] == remark
    assert remark not in report(cold, assumed=False, color=False)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_draws_over_itself_on_a_terminal() -> None:
    terminal = Terminal()
    progress = Progress(terminal, 4)
    progress.step("airline", 1)
    progress.step("air", 2)
    assert terminal.getvalue() == (
        "\r[######..................] 1/4 airline\r[##################......] 3/4 air    "
    )
    progress.close()
    assert terminal.getvalue().endswith("\r" + " " * 34 + "\r")


def test_progress_is_silent_where_there_is_no_terminal() -> None:
    piped = io.StringIO()
    progress = Progress(piped, 4)
    progress.step("airline", 1)
    progress.close()
    assert piped.getvalue() == ""
