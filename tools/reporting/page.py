"""The page: HTML in one file, no script, no address outside of it; light or dark as the browser wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from statistics import median
from typing import Any

from engine.telemetry.format import format_bytes, format_count, format_duration

from .chart import HALF, WIDTH, Series, bars, line_chart, stacked_bar
from .reading import Run, number, points
from .style import STYLE
from .timeline import simulated, timeline_svg

_PHASES = (
    ("forward_backward", "forward and backward", 0),
    ("reduce", "waiting for reductions", 1),
    ("optimizer", "optimizer", 2),
    ("data", "waiting for data", 3),
    ("rest", "rest", 5),
)


def page(runs: Sequence[Run]) -> str:
    """The report of one run or several."""
    title = " and ".join(run.name for run in runs)
    sections = [
        _summary(runs),
        _section("Loss", _loss(runs), "No training step and no evaluation is recorded."),
        _section("Throughput", _over_steps(runs, "tokens_per_second", "tokens/s", zero=True), "No step is recorded."),
        _section("Speed against devices", _scaling(runs), "") if len(runs) > 1 else "",
        _section("Step time", _each(runs, _breakdown), "Parts of steps are not recorded."),
        _section("Memory by rank", _each(runs, _memory), "Memory is not recorded."),
        _section("Bandwidth", _each(runs, _bandwidth), "Not measured: set log.communication to true."),
        _section("Pipeline", _stacked(runs, _pipeline), "No pipeline, or its schedule is not recorded."),
        _section(
            "Utilisation", _over_steps(runs, "mfu", "share of the ceiling", zero=True, share=True), "Not recorded."
        ),
        _section("Gradient norm and learning rate", _course(runs), "No step is recorded."),
        _section("Configuration", _configuration(runs), "There is no config.yaml."),
        _section("Environment", _environment(runs), "There is no environment.json."),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f"<h1>Training report</h1>{''.join(sections)}</main></body></html>\n"
    )


def _section(title: str, content: str, missing: str) -> str:
    if not content and not missing:
        return ""
    body = content or f'<p class="missing">{escape(missing)}</p>'
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _each(runs: Sequence[Run], draw: Callable[[Run, Sequence[Run]], str]) -> str:
    """The drawings of all runs beside each other; empty where none has one."""
    drawn = [(run, draw(run, runs)) for run in runs]
    if not any(content for _, content in drawn):
        return ""
    missing = '<p class="missing">Not recorded.</p>'
    if len(runs) == 1:
        return drawn[0][1]
    cells = [
        f'<div class="cell"><h3>{_key(place)}{escape(run.name)}</h3>{content or missing}</div>'
        for place, (run, content) in enumerate(drawn)
    ]
    return f'<div class="beside">{"".join(cells)}</div>'


def _stacked(runs: Sequence[Run], draw: Callable[[Run], str]) -> str:
    """The drawings of all runs below each other, for those that need all of the width."""
    drawn = [(place, run, draw(run)) for place, run in enumerate(runs)]
    titled = len(runs) > 1
    return "".join(
        (f"<h3>{_key(place)}{escape(run.name)}</h3>" if titled else "") + content
        for place, run, content in drawn
        if content
    )


def _width(runs: Sequence[Run]) -> int:
    return WIDTH if len(runs) == 1 else HALF


def _key(colour: int) -> str:
    return f'<span class="key b{colour % 6}"></span>'


def _legend(entries: Sequence[tuple[str, int]]) -> str:
    items = [f"<li>{_key(colour)}{escape(name)}</li>" for name, colour in entries]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _summary(runs: Sequence[Run]) -> str:
    rows = [
        ("run", [_key(place) + escape(run.name) for place, run in enumerate(runs)]),
        ("state", [escape(run.status) for run in runs]),
        ("training loss", [_ends(run.series("loss")) for run in runs]),
        ("evaluation loss", [_ends(points(run.evaluations, "eval_loss")) for run in runs]),
        ("speed", [f"{format_count(run.speed)} tokens/s" if run.speed else "–" for run in runs]),
        ("devices", [f"{run.devices or '–'}{_kind(run)}" for run in runs]),
        ("utilisation", [_middle(run.series("mfu"), lambda value: f"{value:.1%}") for run in runs]),
        ("most memory of a rank", [_most_memory(run) for run in runs]),
        ("waiting for data", [_stall(run) for run in runs]),
        ("time in steps", [_time(run) for run in runs]),
    ]
    notes = [f"{run.name}: {note}." for run in runs for note in run.notes]
    warnings = f'<p class="missing">{"<br>".join(map(escape, notes))}</p>' if notes else ""
    return f"<section>{_table(rows, even=True)}{warnings}</section>"


def _table(rows: Sequence[tuple[str, Sequence[str]]], head: Sequence[str] = (), *, even: bool = False) -> str:
    """Names at the left; cells are HTML; `even` gives a column to each run, all equally wide."""
    top = f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>" if head else ""
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for name, cells in rows
    )
    kind = ' class="even"' if even else ""
    return f'<div class="scroll"><table{kind}>{top}{body}</table></div>'


def _ends(values: Sequence[tuple[float, float]]) -> str:
    if len(values) < 2:
        return f"{values[0][1]:.4f}" if values else "–"
    return f"{values[0][1]:.4f} → {values[-1][1]:.4f}"


def _middle(values: Sequence[tuple[float, float]], show: Callable[[float], str]) -> str:
    return show(median(value for _, value in values)) if values else "–"


def _kind(run: Run) -> str:
    device = run.environment.get("device")
    return f" × {escape(str(device))}" if device else ""


def _peaks(run: Run) -> dict[int, float]:
    """Rank -> most bytes; rank 0's from the metrics where ranks wrote none."""
    found = {
        rank: max((value for _, value in points(records, "memory")), default=0.0) for rank, records in run.ranks.items()
    }
    if not any(found.values()):
        found = {0: max((value for _, value in run.series("memory")), default=0.0)}
    return {rank: value for rank, value in found.items() if value > 0}


def _most_memory(run: Run) -> str:
    peaks = _peaks(run)
    if not peaks:
        return "–"
    rank = max(peaks, key=lambda rank: peaks[rank])
    return f"{format_bytes(peaks[rank])} (rank {rank})"


def _stall(run: Run) -> str:
    stalls = run.series("data_stall")
    if not stalls:
        return "–"
    return f"{sum(value for _, value in stalls):.3f} s in {len(stalls)} reports"


def _time(run: Run) -> str:
    seconds = sum(value for _, value in run.series("seconds"))
    return format_duration(seconds) if seconds else "–"


def _loss(runs: Sequence[Run]) -> str:
    series, legend = [], []
    for place, run in enumerate(runs):
        colour = place % 6
        own = f"{run.name}: " if len(runs) > 1 else ""
        trained, evaluated = run.series("loss"), points(run.evaluations, "eval_loss")
        tint = colour if len(runs) > 1 else 1
        series.append(Series(name=f"{own}training", points=trained, colour=colour))
        series.append(Series(name=f"{own}evaluation", points=evaluated, colour=tint, dotted=True))
        legend += [(f"{own}training", colour)] if trained else []
        legend += [(f"{own}evaluation (dotted)", tint)] if evaluated else []
    drawn = line_chart(series, title="Loss by step", x_title="step", show=lambda value: f"{value:.4g}")
    return drawn and _legend(legend) + drawn


def _over_steps(
    runs: Sequence[Run], key: str, unit: str, *, zero: bool = False, share: bool = False, width: int = WIDTH
) -> str:
    series = [Series(name=run.name, points=run.series(key), colour=place % 6) for place, run in enumerate(runs)]
    show: Callable[[float], str] = (lambda value: f"{value:.2%}") if share else format_count
    drawn = line_chart(
        series, title=f"{unit} by step", x_title=f"step ({unit})", show=show, from_zero=zero, width=width
    )
    legend = _legend([(one.name, one.colour) for one in series if one.points]) if len(runs) > 1 else ""
    return drawn and legend + drawn


def _course(runs: Sequence[Run]) -> str:
    norms = _over_steps(runs, "grad_norm", "gradient norm before clipping", zero=True, width=HALF)
    rates = [Series(name=run.name, points=run.series("lr"), colour=place % 6) for place, run in enumerate(runs)]
    lr = line_chart(
        rates,
        title="Learning rate",
        x_title="step (learning rate)",
        show=lambda v: f"{v:.3g}",
        from_zero=True,
        width=HALF,
    )
    return (
        f'<div class="beside"><div class="cell">{norms}</div><div class="cell">{lr}</div></div>' if norms or lr else ""
    )


def _scaling(runs: Sequence[Run]) -> str:
    """Tokens a second by devices, and what the smallest run would give in proportion."""
    known = sorted((float(run.devices), run.speed, run.name) for run in runs if run.devices and run.speed)
    if len({devices for devices, *_ in known}) < 2:
        return ""
    first, base, _ = known[0]
    ideal = [(devices, base * devices / first) for devices in sorted({devices for devices, *_ in known})]
    series = [
        Series(name="measured", points=[(devices, speed) for devices, speed, _ in known], colour=0, joined=False),
        Series(name="in proportion", points=ideal, colour=5, dotted=True),
    ]
    rows = [
        (name, [f"{devices:g}", f"{format_count(speed)}", f"{speed * first / devices / base:.0%}"])
        for devices, speed, name in known
    ]
    head = ("run", "devices", "tokens/s", "of what the smallest gives in proportion")
    chart = line_chart(series, title="Speed against devices", x_title="devices (tokens/s)", from_zero=True)
    return _legend([("measured", 0), ("in proportion to the smallest (dotted)", 5)]) + chart + _table(rows, head)


def _breakdown(run: Run, runs: Sequence[Run]) -> str:
    """Mean of a step: rank 0's phases, and what of the step's time is none of them."""
    totals: dict[str, float] = {}
    for record in run.ranks.get(0, []):
        for phase, seconds in (record.get("phases") or {}).items():
            totals[phase] = totals.get(phase, 0.0) + (number(seconds) or 0.0)
    steps = int(run.steps[-1]["step"] - run.steps[0]["step"] + 1) if run.steps else 0
    wall = sum(value for _, value in run.series("seconds"))
    if not totals or not wall:
        return ""
    totals["data"] = sum(value for _, value in run.series("data_stall"))
    totals["rest"] = max(0.0, wall - sum(totals.values()))
    parts = [(name, totals[key] / steps, colour) for key, name, colour in _PHASES if totals.get(key)]
    bar = stacked_bar(parts, title=f"Step time of {run.name}", show=_seconds, width=_width(runs))
    rows = [(name, [_seconds(value), f"{value * steps / wall:.1%}"]) for name, value, _ in parts]
    rows.append(("a step", [_seconds(wall / steps), ""]))
    return _legend([(name, colour) for name, _, colour in parts]) + bar + _table(rows)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _memory(run: Run, runs: Sequence[Run]) -> str:
    peaks = _peaks(run)
    if not peaks:
        return ""
    longest = max(max(_peaks(one).values(), default=0.0) for one in runs)
    rows = [(f"rank {rank}", value, format_bytes(value)) for rank, value in sorted(peaks.items())]
    shown = rows if len(rows) <= 64 else sorted(rows, key=lambda row: -row[1])[:64]
    note = f"<p>The 64 fullest of {len(rows)} ranks.</p>" if len(rows) > 64 else ""
    kinds = {"cuda": "allocated on the device", "cpu": "resident memory of the process"}
    kind = kinds.get(str(run.environment.get("backend")), "as the run reported it")
    caption = f'<p class="what">Most bytes held at once: {kind}.</p>'
    colour = runs.index(run) % 6
    return (
        caption
        + note
        + bars(rows=shown, title=f"Memory of {run.name}", colour=colour, longest=longest, width=_width(runs))
    )


def _bandwidth(run: Run, runs: Sequence[Run]) -> str:
    """By axis and operation, over all ranks and steps."""
    sums: dict[str, list[float]] = {}
    for records in run.ranks.values():
        for record in records:
            for name, one in (record.get("communication") or {}).items():
                into = sums.setdefault(name, [0.0] * 4)
                for place, key in enumerate(("calls", "sent", "timed", "seconds")):
                    into[place] += number(one.get(key)) or 0.0
    if not sums:
        return ""
    rates = {name: timed / seconds for name, (_, _, timed, seconds) in sums.items() if seconds > 0}
    rows = sorted(((name, rate, f"{format_count(rate)}B/s") for name, rate in rates.items()), key=lambda row: -row[1])
    steps, ranks = max(1, len(run.steps)), len(run.ranks)
    table = [
        (
            name,
            [
                f"{calls / steps / ranks:.1f}",
                format_bytes(sent / steps / ranks),
                f"{timed / sent:.0%}" if sent else "–",
            ],
        )
        for name, (calls, sent, timed, _) in sorted(sums.items(), key=lambda item: -item[1][1])
    ]
    head = ("axis and operation", "calls a report and rank", "sent a report and rank", "of it timed")
    caption = (
        '<p class="what">Bytes that a rank sends over the time from where it begins to where the operation ends; '
        "waiting for the slowest rank is in it.</p>"
    )
    chart = bars(rows, title=f"Bandwidth of {run.name}", colour=runs.index(run) % 6, width=_width(runs))
    return caption + chart + _table(table, head)


def _pipeline(run: Run) -> str:
    found = simulated(run)
    if found is None:
        return ""
    simulation, drawn, count = found
    part = f" The first {drawn} of {count} micro-batches." if drawn < count else ""
    caption = (
        f'<p class="what">On paper, layers alike and backward as long as forward: idle {simulation.bubble:.1%} of the '
        f"time.{part}</p>"
    )
    return caption + _legend([("forward", 0), ("backward", 1)]) + timeline_svg(simulation, run.name)


def _flat(config: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for section, content in config.items():
        if isinstance(content, dict):
            found |= {f"{section}.{name}": _written(value) for name, value in content.items()}
        else:
            found[section] = _written(content)
    return found


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _configuration(runs: Sequence[Run]) -> str:
    flats = [_flat(run.config) for run in runs]
    names = list(dict.fromkeys(name for flat in flats for name in flat))
    if not names:
        return ""
    rows = [(name, [escape(flat.get(name, "–")) for flat in flats]) for name in names]
    head = ["option", *(escape(run.name) for run in runs)]
    if len(runs) == 1:
        return f"<details open><summary>{len(rows)} options</summary>{_table(rows, head, even=True)}</details>"
    different = [row for row in rows if len(set(row[1])) > 1]
    top = _table(different, head, even=True) if different else "<p>All options are equal.</p>"
    whole = f"<details><summary>all {len(rows)} options</summary>{_table(rows, head, even=True)}</details>"
    return f"<h3>What differs</h3>{top}{whole}"


def _environment(runs: Sequence[Run]) -> str:
    flats = [_flat(run.environment) for run in runs]
    names = list(dict.fromkeys(name for flat in flats for name in flat))
    rows = [(name.replace("_", " "), [escape(flat.get(name, "–")) for flat in flats]) for name in names]
    head = ["", *(escape(run.name) for run in runs)] if len(runs) > 1 else []
    return _table(rows, head, even=True) if rows else ""
