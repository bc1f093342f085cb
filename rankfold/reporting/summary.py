"""The top of the page: the model, its training, and the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePath
from statistics import median

from markupsafe import Markup

from engine.telemetry.format import first_to_last, format_bytes, format_count, format_duration, format_parameters
from rankfold.reporting.chart import Point
from rankfold.reporting.layout import key, table
from rankfold.reporting.markup import element
from rankfold.reporting.reading import Run, count, number, points


def header(runs: Sequence[Run]) -> Markup:
    """Returns the page's title and a line on each run's training."""
    if len(runs) == 1:
        run = runs[0]
        return element("header", element("h1", run.name), element("p", _summary_line(run), class_="what"))
    lines = [
        element("p", key(place), element("b", run.name), " ", _summary_line(run), class_="what")
        for place, run in enumerate(runs)
    ]
    return element("header", element("h1", f"{len(runs)} runs compared"), lines)


def summary(runs: Sequence[Run]) -> Markup:
    """Returns the most important figures."""
    rows: list[tuple[str, list[Markup | str]]] = [
        ("state", [run.status for run in runs]),
        ("reward", [_course(run.series("reward")) for run in runs]),
        ("training loss", [_course(run.series("loss")) for run in runs]),
        ("evaluation loss", [_ends(points(run.evaluations, "eval_loss")) for run in runs]),
        ("speed", [f"{format_count(run.speed)} tokens/s" if run.speed else "–" for run in runs]),
        ("utilisation", [_middle(run.series("mfu"), lambda value: f"{value:.1%}") for run in runs]),
        ("peak memory", [_most_memory(run) for run in runs]),
        ("waiting for data", [_stall(run) for run in runs]),
        ("time in steps", [_time(run) for run in runs]),
    ]
    if len(runs) > 1:
        rows.insert(0, ("run", [Markup("{}{}").format(key(place), run.name) for place, run in enumerate(runs)]))
    shown = [row for row in rows if any(cell != "–" for cell in row[1])]
    notes = [element("p", f"{run.name}: {note}.", class_="missing") for run in runs for note in run.notes]
    return element("section", table(shown, even=True), notes)


def peaks(run: Run) -> dict[int, float]:
    """Returns rank -> peak bytes; rank 0's from the metrics where ranks wrote none."""
    found = {
        rank: max((value for _, value in points(records, "memory")), default=0.0) for rank, records in run.ranks.items()
    }
    if not any(found.values()):
        found = {0: max((value for _, value in run.series("memory")), default=0.0)}
    return {rank: value for rank, value in found.items() if value > 0}


def _summary_line(run: Run) -> str:
    """Returns model, trained parameters, batch, layout, machine and date, as far as they are known."""
    parts = [_model(run), _trained(run), _batch(run), _layout(run), _machine(run), run.fact("started")]
    return " · ".join(part for part in parts if isinstance(part, str) and part)


def _model(run: Run) -> str:
    path, whole = run.option("model.path"), count(run.fact("model.parameters"))
    size = f"{format_parameters(whole)} parameters" if whole else ""
    name = PurePath(path).name or path if isinstance(path, str) else ""
    return ", ".join(
        filter(None, (name, size, _word(run.option("model.dtype")), _word(run.option("model.base_dtype"))))
    )


def _trained(run: Run) -> str:
    rank, trainable = count(run.option("lora.rank")), run.option("trainable")
    parts = []
    if rank:
        targets = run.option("lora.targets")
        where = f" on {', '.join(map(str, targets[:8]))}" if isinstance(targets, list) and targets else ""
        parts.append(f"{'DoRA' if run.option('lora.dora') is True else 'LoRA'} of rank {rank}{where}")
    if isinstance(trainable, list) and trainable:
        parts.append("in full: " + ("everything" if trainable == ["*"] else ", ".join(map(str, trainable[:8]))))
    trained = count(run.fact("model.trained"))
    objective = _word(run.option("objective.name"))
    return " ".join(
        filter(
            None,
            (
                f"{objective}:" if objective and objective != "language_modeling" else "",
                " and ".join(parts),
                f"({format_parameters(trained)} trained)" if trained else "",
            ),
        )
    )


def _batch(run: Run) -> str:
    rows, length = count(run.option("train.global_batch_size")), count(run.option("data.seq_length"))
    return f"{rows} × {length} tokens a step" if rows and length else ""


def _layout(run: Run) -> str:
    axes = [(axis, count(run.fact(f"layout.{axis}"))) for axis in ("tensor", "context", "pipeline", "data")]
    return ", ".join(f"{axis} {size}" for axis, size in axes if size and size > 1)


def _machine(run: Run) -> str:
    device = run.fact("device")
    return f"{run.devices or 1} × {device}" if isinstance(device, str) and device else ""


def _word(value: object) -> str:
    return value if isinstance(value, str) else ""


def _course(values: Sequence[Point]) -> str:
    return first_to_last(values) or "–"


def _ends(values: Sequence[Point]) -> str:
    if len(values) < 2:
        return f"{values[0][1]:.4f}" if values else "–"
    return f"{values[0][1]:.4f} → {values[-1][1]:.4f}"


def _middle(values: Sequence[Point], show: Callable[[float], str]) -> str:
    return show(median(value for _, value in values)) if values else "–"


def _most_memory(run: Run) -> str:
    found = peaks(run)
    if not found:
        return "–"
    rank = max(found, key=lambda rank: found[rank])
    return f"{format_bytes(found[rank])}{f' (rank {rank})' if len(found) > 1 else ''}"


def _stall(run: Run) -> str:
    stalls = run.series("data_stall")
    seconds = sum(value for _, value in run.series("seconds"))
    if not stalls:
        return "–"
    stalled = sum(value for _, value in stalls)
    return f"{stalled:.2f} s{f' ({stalled / seconds:.1%} of the time in steps)' if seconds > 0 else ''}"


def _time(run: Run) -> str:
    seconds = sum(value for _, value in run.series("seconds"))
    return format_duration(seconds) if number(seconds) else "–"
