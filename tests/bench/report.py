"""Tables of a run, and the bars a gateway of this kind has to clear, as ratios within the run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tests.bench.background import Disturbance
    from tests.bench.decisions import Decided
    from tests.bench.planning import Cost
    from tests.bench.rows import Cell, MemoryRun

NEVER: Final = math.nan


@dataclass(slots=True)
class Results:
    """Everything one run measured. Keys: row, then system."""

    machine: str
    notes: list[str]
    cells: dict[str, dict[str, Cell]] = field(default_factory=dict)
    memory: dict[str, MemoryRun] = field(default_factory=dict)
    start_s: dict[str, list[float]] = field(default_factory=dict)
    rss_mb: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # start, peak, end of the run
    absent: dict[str, str] = field(default_factory=dict)  # system -> why it was not measured
    planning: list[Cost] = field(default_factory=list)
    decisions: list[Decided] = field(default_factory=list)
    background: list[Disturbance] = field(default_factory=list)

    def errors(self) -> list[str]:
        """Requests that went wrong, by row and system."""
        found = [
            f"{row} / {system}: {cell.errors} errors, e.g. {_example(cell)}"
            for row, systems in self.cells.items()
            for system, cell in systems.items()
            if cell.errors
        ]
        return found + [
            f"memory / {name}: {run.errors} errors" for name, run in self.memory.items() if run.errors
        ]

    def added(self, row: str, system: str, figure: str) -> float:
        """nan where the row lacks the system or the direct call."""
        systems = self.cells.get(row, {})
        if system not in systems or "direct" not in systems:
            return NEVER
        return systems[system].added(systems["direct"], figure)

    def rate(self, row: str, system: str) -> float:
        systems = self.cells.get(row, {})
        return systems[system].rate if system in systems else NEVER

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "notes": self.notes,
            "rows": {
                row: {name: _cell_json(self, row, name, cell) for name, cell in systems.items()}
                for row, systems in self.cells.items()
            },
            "memory_mb": {
                name: {
                    "filling": run.filling,
                    "requests": run.requests,
                    "start": run.at_start,
                    "marks": run.marks,
                    "peak": run.peak,
                }
                for name, run in self.memory.items()
            },
            "rss_mb": {
                name: dict(zip(("start", "peak", "end"), mb, strict=True)) for name, mb in self.rss_mb.items()
            },
            "start_s": self.start_s,
            "planning": [asdict(cost) for cost in self.planning],
            "decisions": [asdict(cost) for cost in self.decisions],
            "background": [asdict(each) for each in self.background],
            "absent": self.absent,
            "errors": self.errors(),
            "bars": [bar.as_json() for bar in bars(self)],
        }


# ---- bars ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bar:
    """A measured figure beside what it must reach and what is aimed at. Lower is better if `lower`."""

    what: str
    value: float
    bar: float
    aim: float
    lower: bool
    unit: str = "x"

    @property
    def mark(self) -> str:
        if math.isnan(self.value):
            return "not measured"
        if self._reaches(self.aim):
            return "pass (aim)"
        return "pass" if self._reaches(self.bar) else "MISS"

    def _reaches(self, limit: float) -> bool:
        return self.value <= limit if self.lower else self.value >= limit

    def as_json(self) -> dict[str, Any]:
        value = None if math.isnan(self.value) else self.value
        aim = None if math.isnan(self.aim) else self.aim
        return {"what": self.what, "value": value, "bar": self.bar, "aim": aim, "mark": self.mark}


def bars(results: Results, system: str = "ctxgate") -> list[Bar]:
    """All bars, those that compare with a peer that was not measured included."""

    def added(row: str, figure: str, other: str) -> float:
        return results.added(row, system, figure) / results.added(row, other, figure)

    def rate(row: str, other: str) -> float:
        return results.rate(row, system) / results.rate(row, other)

    memory = results.memory.get(system)
    end, growth = (memory.marks[-1], memory.marks[-1] / memory.marks[0]) if memory else (NEVER, NEVER)
    start = min(results.start_s.get(system, [NEVER]))
    small, crowd, long = "4k-stream-1", "4k-stream-32", "4m-stream-1"
    by_router = rate("400k-stream-32", "vllm-router")
    chunk = added("paced-32", "delay_p99", "floor")
    return [
        Bar("4 KB, 1 client: added TTFB p50 / floor", added(small, "ttfb_p50", "floor"), 1.8, 1.2, True),
        Bar(
            "4 KB, 1 client: added TTFB p50 / litellm",
            added(small, "ttfb_p50", "litellm"),
            1 / 12,
            NEVER,
            True,
        ),
        Bar("4 KB, 32 clients: req/s / floor", rate(crowd, "floor"), 0.6, 0.8, False),
        Bar("4 KB, 32 clients: req/s / litellm", rate(crowd, "litellm"), 50, NEVER, False),
        Bar("400 KB, 32 clients: req/s / vllm-router", by_router, 1.0, 1.3, False),
        Bar(
            "4 MB, 1 client: added TTFB p50 / vllm-router",
            added(long, "ttfb_p50", "vllm-router"),
            1.0,
            0.6,
            True,
        ),
        Bar("32 paced streams: added chunk delay p99 / floor", chunk, 2.0, 1.2, True),
        Bar("memory after the memory run", end, 200, 120, True, "MB"),
        Bar("memory growth over the memory run", growth, 1.1, 1.03, True),
        Bar("start to first answered request", start, 2.0, 1.0, True, "s"),
        *_planning_bars(results.planning),
        *(
            Bar(f"decision, {cost.case}: CPU p50", cost.p50_us, 200, 150, True, "us")
            for cost in results.decisions
            if cost.barred
        ),
    ]


def _planning_bars(costs: Sequence[Cost]) -> list[Bar]:
    """One for each turn of a million tokens that planning has to be quick for."""
    found: list[Bar] = []
    for cost in costs:
        if cost.barred and cost.bodies is not None:
            what = f"planning {cost.tokens:,} tokens, {cost.case}"
            found.append(Bar(f"{what}: CPU p50", cost.cpu_ms, 10, 5, True, "ms"))
            found.append(Bar(f"{what}: allocated", cost.bodies, 3, 1.5, True, "bodies"))
    return found


# ---- text ---------------------------------------------------------------------------------------


def render(results: Results) -> str:
    """The whole run as Markdown tables."""
    parts = [results.machine, *results.notes, ""]
    load_rows = {row: systems for row, systems in results.cells.items() if not row.startswith("paced")}
    paced = {row: systems for row, systems in results.cells.items() if row.startswith("paced")}
    if load_rows:
        parts += [
            "Added to a direct call (`direct`: the call itself). x = ratio to the floor.",
            "",
            _load(load_rows),
            "",
        ]
    if paced:
        parts += ["Paced streams: delay of a chunk from write to arrival, and gaps between chunks.", ""]
        parts += [_paced(paced), ""]
    parts += _memory(results)
    if results.planning:
        parts += ["Planning at a million tokens: one turn, all but its last two messages known.", ""]
        parts += [_planning(results.planning), ""]
    if results.decisions:
        parts += ["A decision, from what is cached where to the choice that is kept: CPU.", ""]
        parts += [_decisions(results.decisions), ""]
    if results.background:
        what = "Small requests while histories of 900,000 tokens are held, beside `off`"
        parts += [f"{what}; long turns beside `window`.", ""]
        parts += [_background(results.background), ""]
    if results.absent:
        parts += ["Not measured:", *(f"- {name}: {why}" for name, why in results.absent.items()), ""]
    rows = [(bar.what, _number(bar.value, bar.unit), _limit(bar), bar.mark) for bar in bars(results)]
    parts += [table(("bar", "measured", "bar (aim)", ""), rows)]
    problems = results.errors()
    return "\n".join(parts + (["", "Errors:", *problems] if problems else []))


def _load(rows: Mapping[str, Mapping[str, Cell]]) -> str:
    head = ["row", "system", "TTFB p50 ms", "p99", "TTLB p50 ms", "p99", "req/s", "CPU ms/req", "req/s/core"]
    head += ["x TTFB", "x TTLB", "x req/s", "x CPU"]
    lines: list[tuple[str, ...]] = []
    for row, systems in rows.items():
        direct, floor = systems.get("direct"), systems.get("floor")
        for name, cell in systems.items():
            figures = [_figure(cell, direct, f) for f in ("ttfb_p50", "ttfb_p99", "ttlb_p50", "ttlb_p99")]
            cells = [*(f"{f:.2f}" for f in figures), f"{cell.rate:,.0f}", f"{cell.cpu_ms:.2f}"]
            cells.append(f"{1000 / cell.cpu_ms:,.0f}" if cell.cpu_ms else "-")
            lines.append((row, name, *cells, *_ratios(name, cell, direct, floor)))
    return table(head, lines)


def _figure(cell: Cell, direct: Cell | None, figure: str) -> float:
    return cell.median(figure) if direct is None or cell is direct else cell.added(direct, figure)


def _ratios(name: str, cell: Cell, direct: Cell | None, floor: Cell | None) -> list[str]:
    if name in ("direct", "floor") or not direct or not floor:
        return ["", "", "", ""]
    pairs = [(cell.added(direct, f), floor.added(direct, f)) for f in ("ttfb_p50", "ttlb_p50")]
    pairs += [(cell.rate, floor.rate), (cell.cpu_ms, floor.cpu_ms)]
    return [f"{mine / base:.2f}" if base > 0 else "-" for mine, base in pairs]


def _paced(rows: Mapping[str, Mapping[str, Cell]]) -> str:
    head = (
        "row",
        "system",
        "delay p50 us",
        "p99",
        "gap p50 ms",
        "p99",
        "CPU ms/req",
        "x added delay p50",
        "p99",
    )
    lines: list[tuple[str, ...]] = []
    for row, systems in rows.items():
        direct, floor = systems.get("direct"), systems.get("floor")
        for name, cell in systems.items():
            delays = [f"{1000 * cell.median(f):,.0f}" for f in ("delay_p50", "delay_p99")]
            gaps = [f"{cell.median(f):.2f}" for f in ("gap_p50", "gap_p99")]
            ratios = ["", ""]
            if direct and floor and name not in ("direct", "floor"):
                pairs = [(cell.added(direct, f), floor.added(direct, f)) for f in ("delay_p50", "delay_p99")]
                ratios = [f"{mine / base:.2f}" if base > 0 else "-" for mine, base in pairs]
            lines.append((row, name, *delays, *gaps, f"{cell.cpu_ms:.2f}", *ratios))
    return table(head, lines)


def _background(rows: Sequence[Disturbance]) -> str:
    head = (
        "context",
        "requests",
        "p50 ms",
        "p99",
        "long turn p50 ms",
        "summaries",
        "x p50",
        "x p99",
        "x long",
    )
    off, planned = rows[0], rows[1]
    lines = [
        (
            each.mode,
            f"{each.requests:,}",
            *(f"{ms:.2f}" for ms in (each.p50_ms, each.p99_ms, each.long_p50_ms)),
            str(each.compactions),
            f"{each.p50_ms / off.p50_ms:.2f}",
            f"{each.p99_ms / off.p99_ms:.2f}",
            f"{each.long_p50_ms / planned.long_p50_ms:.2f}",
        )
        for each in rows
    ]
    return table(head, lines)


def _planning(costs: Sequence[Cost]) -> str:
    head = (
        "system",
        "turn",
        "tokens",
        "messages",
        "edits",
        "CPU ms",
        "scan ms",
        "x scan",
        "bodies allocated",
    )
    lines = [
        (
            cost.system,
            cost.case,
            *(f"{count:,}" for count in (cost.tokens, cost.messages, cost.edits)),
            *(f"{ms:.2f}" for ms in (cost.cpu_ms, cost.scan_ms)),
            f"{cost.ratio:.1f}",
            "-" if cost.bodies is None else f"{cost.bodies:.2f}",
        )
        for cost in costs
    ]
    return table(head, lines)


def _decisions(costs: Sequence[Decided]) -> str:
    lines = [
        (cost.case, f"{cost.tokens:,}", *(f"{us:.0f}" for us in (cost.p50_us, cost.p90_us, cost.least_us)))
        for cost in costs
    ]
    return table(("replicas", "tokens", "p50 us", "p90", "least"), lines)


def _memory(results: Results) -> list[str]:
    parts: list[str] = []
    if results.rss_mb:
        lines = []
        for name, (start, peak, end) in results.rss_mb.items():
            begun = min(results.start_s.get(name, [NEVER]))
            lines.append((name, *(f"{mb:.0f}" for mb in (start, peak, end)), f"{begun:.2f}"))
        head = ("system", "RSS MB at start", "peak of the run", "end", "start to first answer s")
        parts += [table(head, lines), ""]
    for name, run in results.memory.items():
        filled, *marks = [f"{mark:.1f}" for mark in run.marks]
        text = f"Memory of {name}: {run.at_start:.1f} MB before, {filled} after {run.filling:,} requests"
        text += f", then, over {run.requests:,} more, {', '.join(marks)} MB; peak {run.peak:.1f}."
        parts += [text, ""]
    return parts


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first two to the left, the others to the right."""
    lines = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]

    def text(line: Sequence[str]) -> str:
        pairs = enumerate(zip(line, widths, strict=True))
        cells = (cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in pairs)
        return "| " + " | ".join(cells) + " |"

    rule = "|" + "|".join("-" * (w + 2) if i < 2 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([text(lines[0]), rule, *(text(line) for line in lines[1:])])


def _number(value: float, unit: str) -> str:
    return "-" if math.isnan(value) else f"{value:.2f} {unit}"


def _limit(bar: Bar) -> str:
    sign = "<=" if bar.lower else ">="
    aim = "" if math.isnan(bar.aim) else f" ({bar.aim:g})"
    return f"{sign} {bar.bar:.3g}{aim}"


def _example(cell: Cell) -> str:
    return next((sample.error_samples[0] for sample in cell.rounds if sample.error_samples), "?")


def _cell_json(results: Results, row: str, name: str, cell: Cell) -> dict[str, Any]:
    def finite(value: float) -> float | None:
        return None if math.isnan(value) else round(value, 4)

    figures = ("ttfb_p50", "ttfb_p99", "ttlb_p50", "ttlb_p99", "gap_p50", "gap_p99", "delay_p50", "delay_p99")
    found: dict[str, Any] = {f"{figure}_ms": finite(cell.median(figure)) for figure in figures}
    found |= {f"added_{figure}_ms": finite(results.added(row, name, figure)) for figure in figures}
    found |= {"rate": finite(cell.rate), "cpu_ms": finite(cell.cpu_ms), "errors": cell.errors}
    found["requests"] = sum(sample.requests for sample in cell.rounds)
    found["load_cpu_s"] = sum(sample.load_cpu_s for sample in cell.rounds)
    return found
