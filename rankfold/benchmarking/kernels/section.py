"""Checks and times the cases, group by group.

First every contestant of every case runs once and is compared with the answer in float64: nothing is timed where one
computes a wrong result. Then each case is timed, its contestants in turn with a copy (and a product) that gives the
limit. A table has a row per case and contestant.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rankfold.benchmarking.case import LIMITS, Case, Checked, Timed, check, kernel_names, time_case
from rankfold.benchmarking.ceilings import COPY, PRODUCT, Ceilings
from rankfold.benchmarking.kernels.first_calls import FirstCalls, measure_first_calls
from rankfold.benchmarking.kernels.groups import GROUPS, Build, make_setting
from rankfold.benchmarking.kernels.setting import Setting
from rankfold.benchmarking.machine import describe, set_up
from rankfold.benchmarking.options import KernelOptions, chosen_names, for_device
from rankfold.benchmarking.table import Report, Table, progress
from rankfold.benchmarking.timing import Summary, paired_ratio, summarise


def run(options: KernelOptions) -> Report:
    """Measures the groups asked for.

    Raises:
        UserError: a missing device.
        Wrong: a contestant computes something else.
    """
    device = set_up(options, keeps_freed_memory=False)
    options = for_device(options, device.type)
    setting, absent = make_setting(options, device)
    groups = {name: GROUPS[name] for name in chosen_names(options.only, options.GROUPS, "only")}
    cases = {name: build for _, members in groups.values() for name, build in members.items()}
    first_calls = measure_first_calls(options) if device.type == "cuda" and options.repeats else FirstCalls.on_cpu()
    ceilings = Ceilings(device, setting.dtype, copy_mib=options.copy_mib, size=options.ceiling)
    ceilings.product()  # the first product's setup is not part of a first call
    checked, traces = check_all(setting, cases)
    speeds: dict[str, list[float]] = {COPY: [], PRODUCT: []}
    tables = []
    for group, (title, members) in groups.items():
        timed: dict[str, Timed] = {}
        described: dict[str, Case] = {}
        for name in members:
            case = members[name](setting)
            if not case.contestants:
                continue
            progress("kernels", f"{group}: {name}")
            timed[name] = time_case(case, ceilings, options, device)
            described[name] = case.without_inputs()
            for ceiling, taken in speeds.items():
                taken += [sample.seconds for sample in timed[name].samples.get(ceiling, ())]
        if timed:
            tables.append(group_table(group, title, described, timed, checked, first_calls, traces))
    return _report(options, setting, tuple(tables), ceilings.describe(speeds), absent, first_calls)


def check_all(
    setting: Setting, cases: dict[str, Build]
) -> tuple[dict[str, dict[str, Checked]], dict[str, dict[str, tuple[str, ...]]]]:
    """Runs every contestant once: case -> contestant -> error and seconds; and the names of the kernels that ran.

    Raises:
        Wrong: the first contestant that computes something else.
    """
    checked, traces = {}, {}
    for name, build in cases.items():
        progress("kernels", f"checking {name}")
        case = build(setting)
        checked[name] = check(name, case, setting.device, LIMITS[setting.dtype])
        if case.trace:
            traces[name] = {who: kernel_names(each, setting.device) for who, each in case.contestants.items()}
    return checked, traces


def _report(
    options: KernelOptions,
    setting: Setting,
    tables: tuple[Table, ...],
    speeds: tuple[str, ...],
    absent: tuple[str, ...],
    first_calls: FirstCalls,
) -> Report:
    checked = "Every contestant's result was compared with one in float64 before anything was timed (column error)."
    if not options.repeats:
        checked = "Every contestant's result was compared with one in float64; nothing was timed."
    if setting.device.type == "cpu":
        speeds = (
            *speeds,
            "On a CPU an op's operands may be in its caches; then it exceeds the limit, which is memory's.",
        )
    packages = (
        "triton", "liger-kernel", "quack-kernels", "flash-attn", "flash-attn-4", "transformers", "compressed-tensors",
        "torchao",
    )  # fmt: skip
    return Report(
        title=f"Ops of a step: {options.tokens} tokens, hidden {options.hidden}, MLP {options.intermediate}, "
        f"vocabulary {options.vocab}, rank {options.rank}, {options.dtype}",
        tables=tables,
        findings=(checked, *speeds, *first_calls.sentences(), *absent),
        machine=describe(setting.device, packages),
        data={"section": "kernels", "options": asdict(options), "device": setting.device.type},
    )


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
