"""Replays and comparisons as text: aligned columns, colour only where asked for, one progress line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TextIO

from ctxgate.gateway.replay import Sums, Total, summarize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ctxgate.gateway.replay import Played

HEADERS: Final = (
    "requests", "prompt", "cached", "uncached", "output", "cost $", "TTFT p50", "TTFT p95", "oracle",
    "cached/oracle",
)  # fmt: skip
_BOLD, _RED, _DIM, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[2m", "\x1b[0m"
_MOST_ERRORS: Final = 5


def table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, color: bool = False, last: bool = False
) -> str:
    """Aligned text: the first column to the left, the others to the right; `last` sets a total row off."""
    widths = [max(len(row[at]) for row in (headers, *rows)) for at in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    body = [line(row) for row in rows]
    if last and len(body) > 1:
        body.insert(len(body) - 1, rule)
    head = f"{_BOLD}{line(headers)}{_PLAIN}" if color else line(headers)
    return "\n".join((head, rule, *body))


def cells(sums: Sums, *, approximate: bool = False) -> list[str]:
    """The cells of `HEADERS` for one row; `approximate` marks an oracle whose block size is assumed."""
    about = "~" if approximate or sums.drifted else ""
    efficiency = "-" if sums.efficiency is None else f"{about}{sums.efficiency * 100:.1f}%"
    oracle = tokens(sums.oracle)
    return [
        str(sums.requests) + (f" ({sums.failed} failed)" if sums.failed else ""),
        *(tokens(each) for each in (sums.prompt, sums.cached, sums.uncached, sums.output)),
        dollars(sums.cost_nano),
        duration(sums.ttft_p50_s),
        duration(sums.ttft_p95_s),
        oracle if oracle == "-" else about + oracle,
        efficiency,
    ]


def tokens(count: Total) -> str:
    """A token count with thousands separators; `?` marks a sum that leaves unknown ones out."""
    if count.value is None:
        return "-"
    return f"{count.value:,}" + ("?" if count.missing else "")


def dollars(nano: Total) -> str:
    """Dollars to the millionth; `?` marks a sum that leaves unknown ones out."""
    if nano.value is None:
        return "-"
    micro = (nano.value + 500) // 1000  # half up
    return f"{micro // 10**6}.{micro % 10**6:06d}" + ("?" if nano.missing else "")


def duration(seconds: float | None) -> str:
    """Milliseconds, or seconds from ten on."""
    if seconds is None:
        return "-"
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1000:.1f} ms"


def report(played: Sequence[Played], *, assumed: bool, color: bool) -> str:
    """The table of a run, one row per session and a total, then what needs saying about it.

    `assumed` says that nobody told the block size. It matters only where the hits are below the oracle:
    equal ones confirm it, and a warm server's have another reason.
    """
    approximate = assumed and not is_warm(played) and not _confirmed(played)
    rows = [[each.session, *cells(summarize([each]), approximate=approximate)] for each in played]
    overall = summarize(played)
    if len(played) > 1:
        rows.append(["total", *cells(overall, approximate=approximate)])
    text = table(("session", *HEADERS), rows, color=color, last=len(played) > 1)
    return "\n".join((text, *notes(played, overall, approximate=approximate, color=color)))


def is_warm(played: Sequence[Played]) -> bool:
    """Whether a request found more in the cache than the run's earlier ones, as sent, can have left."""
    return any(cached > oracle for cached, oracle in _bounded(played))


def _confirmed(played: Sequence[Played]) -> bool:
    """Whether every request hit exactly what the oracle says."""
    return all(cached == oracle for cached, oracle in _bounded(played))


def _bounded(played: Sequence[Played]) -> list[tuple[int, int]]:
    """Cached tokens and the oracle of each answered request in which both are known."""
    return [
        (measure.usage.cached.value, measure.oracle)
        for each in played
        for measure in each.measures
        if measure.error is None and measure.usage.cached.value is not None and measure.oracle is not None
    ]


def notes(played: Sequence[Played], overall: Sums, *, approximate: bool, color: bool) -> list[str]:
    """Stopped sessions, failures, and what the marks in the table mean."""
    dim, red, plain = (_DIM, _RED, _PLAIN) if color else ("", "", "")
    lines = [
        f"{dim}{each.session}: {len(each.measures)} of {each.requests_recorded} requests: "
        f"{each.stopped}{plain}"
        for each in played
        if each.stopped
    ]
    failures = [(each.session, measure) for each in played for measure in each.measures if measure.error]
    lines += [
        f"{red}{session}, request {measure.turn + 1} failed: {measure.error}{plain}"
        for session, measure in failures[:_MOST_ERRORS]
    ]
    if len(failures) > _MOST_ERRORS:
        lines.append(f"{red}... and {len(failures) - _MOST_ERRORS} more failures{plain}")
    if overall.oracle.value is not None and approximate:
        lines.append(f"{dim}~ the block size is assumed; give the server's own with --block-size{plain}")
    if is_warm(played) and not overall.drifted:
        lines.append(
            f"{dim}cached/oracle is above what these prompts can reach by themselves: the server had them "
            f"from before this run, or a gateway laid them out anew{plain}"
        )
    if overall.drifted:
        lines.append(f"{dim}~ the server counts prompts otherwise than the local tokenizer{plain}")
    sums = (overall.prompt, overall.cached, overall.output, overall.cost_nano)
    if any(each.value is not None and each.missing for each in sums):
        lines.append(f"{dim}? some answers did not report this; they are left out of the sum{plain}")
    return lines


class Progress:
    """One line that is drawn over itself on a terminal, and nothing anywhere else."""

    def __init__(self, stream: TextIO, requests: int) -> None:
        self._stream = stream
        self._requests = requests
        self._done = 0
        self._shown = 0
        self._on = stream.isatty() and requests > 0

    def step(self, label: str, requests: int = 1) -> None:
        """Count finished (or skipped) requests and redraw."""
        self._done += requests
        if not self._on:
            return
        filled = 24 * self._done // self._requests
        text = f"[{'#' * filled}{'.' * (24 - filled)}] {self._done}/{self._requests} {label}"[:78]
        self._stream.write("\r" + text.ljust(self._shown))
        self._stream.flush()
        self._shown = len(text)

    def close(self) -> None:
        """Erase the line."""
        if self._on and self._shown:
            self._stream.write("\r" + " " * self._shown + "\r")
            self._stream.flush()
