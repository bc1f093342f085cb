"""The tables of section `kernels`, from checked and timed cases."""

from __future__ import annotations

from typing import Any

from rankfold.benchmarking.case import Case, Checked
from rankfold.benchmarking.comparison import Timed
from rankfold.benchmarking.kernels.first_calls import FirstCalls
from rankfold.benchmarking.table import Table
from rankfold.benchmarking.timing import Summary, paired_ratio, summarise


def group_table(
    group: str,
    title: str,
    cases: dict[str, Case],
    timed: dict[str, Timed],
    checked: dict[str, dict[str, Checked]],
    first_calls: FirstCalls,
    traces: dict[str, dict[str, tuple[str, ...]]],
) -> Table:
    """Returns a table with a row per case and contestant; notes and verdicts below."""
    rows, findings = [], []
    for name, case in cases.items():
        for who in case.contestants:
            figures = _figures(timed[name], who, case.baseline)
            calls = _first_calls(first_calls, name, who, checked[name][who])
            rows.append((name, case.size, who, *figures, *calls, f"{checked[name][who].error:.0e}"))
        findings += [each.note for each in case.contestants.values() if each.note]
        findings += _verdicts(name, case, timed[name])
        findings += [f"Kernels of {who}: {', '.join(ran)}." for who, ran in traces.get(name, {}).items() if ran]
    return Table(
        title=title,
        columns=_columns(next(iter(cases.values())).baseline, first_calls, bool(next(iter(timed.values())).samples)),
        rows=tuple(rows),
        findings=tuple(dict.fromkeys(findings)),
        data={
            "group": group,
            "cases": {name: _record(case, timed[name], checked[name]) for name, case in cases.items()},
        },
    )


def _columns(baseline: str, first_calls: FirstCalls, timed: bool) -> tuple[str, ...]:
    figures = ("median ms", "min ms", "limit ms", "share of limit", f"speed over {baseline}") if timed else ()
    warm = ("second process ms",) if first_calls.warm else ()
    return ("op", "size", "contestant", *figures, "first call ms", *warm, "error")


def _figures(timed: Timed, who: str, baseline: str) -> tuple[str, ...]:
    """Returns median, least, limit, share of the limit, speed over the baseline."""
    if not timed.samples:
        return ()
    seconds = timed.seconds(who)
    taken = summarise(seconds)
    against = ""
    if baseline in timed.samples and who != baseline:
        against = f"{paired_ratio(timed.seconds(baseline), seconds).median:.2f}x"
    return (
        f"{taken.median * 1e3:.3f}",
        f"{taken.low * 1e3:.3f}",
        f"{summarise(timed.limits).median * 1e3:.3f}",
        f"{paired_ratio(timed.limits, seconds).median:.1%}",
        against,
    )


def _first_calls(first_calls: FirstCalls, name: str, who: str, checked: Checked) -> tuple[str, ...]:
    """Returns times with empty caches, or of this process, and where measured, with warm caches."""
    cold = first_calls.cold.get(name, {}).get(who, checked.first_seconds)
    warm = first_calls.warm.get(name, {}).get(who)
    return f"{cold * 1e3:,.1f}", *((f"{warm * 1e3:,.1f}",) if warm is not None else ())


def _verdicts(name: str, case: Case, timed: Timed) -> list[str]:
    """Returns the winner of each question of the case, and its lead over the next."""
    if not timed.samples:
        return []
    sentences = []
    for question, names in case.verdicts.items():
        order = sorted(names, key=lambda who: summarise(timed.seconds(who)).median)
        where = f" ({question})" if question else ""
        if len(order) < 2:
            continue
        lead = paired_ratio(timed.seconds(order[1]), timed.seconds(order[0]))
        sentences.append(f"{name}, {case.size}{where}: winner {order[0]}, {_lead(lead)} over {order[1]}.")
    return sentences


def _lead(lead: Summary) -> str:
    text = f"{lead.median:.3f}x (from {lead.low:.3f} to {lead.high:.3f})"
    return text if lead.median > 1.01 else f"{text}, which is no difference,"


def _record(case: Case, timed: Timed, checked: dict[str, Checked]) -> dict[str, Any]:
    return {
        "size": case.size,
        "moved_bytes": case.demand.moved,
        "operations": case.demand.operations,
        "seconds": {who: timed.seconds(who) for who in timed.samples},
        "limit_seconds": timed.limits,
        "error": {who: found.error for who, found in checked.items()},
        "first_call_seconds": {who: found.first_seconds for who, found in checked.items()},
    }
