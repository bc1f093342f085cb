"""Checks and times the cases, group by group.

First every contestant of every case runs once and is compared with the answer in float64: nothing is timed where one
computes a wrong result. Then each case is timed, its contestants in turn with a copy (and a product) that gives the
limit.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

import torch

from rankfold.benchmarking.case import LIMITS, Case, Checked, check
from rankfold.benchmarking.ceilings import COPY, PRODUCT, Ceilings
from rankfold.benchmarking.comparison import Timed, time_case
from rankfold.benchmarking.kernels.first_calls import FirstCalls, measure_first_calls
from rankfold.benchmarking.kernels.groups import GROUPS, Build, make_setting
from rankfold.benchmarking.kernels.setting import Setting
from rankfold.benchmarking.kernels.tables import group_table
from rankfold.benchmarking.kernels.trace import kernel_names
from rankfold.benchmarking.machine import choose_device, describe
from rankfold.benchmarking.options import KernelOptions, chosen_names, for_device
from rankfold.benchmarking.table import Report, Table


def run(options: KernelOptions) -> Report:
    """Measures the groups asked for.

    Raises:
        UserError: a missing device.
        Wrong: a contestant computes something else.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    device = choose_device(options.device)
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
            _say(f"{group}: {name}")
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
        _say(f"checking {name}")
        case = build(setting)
        checked[name] = check(name, case, setting.device, LIMITS[setting.dtype])
        if case.trace:
            traces[name] = {who: kernel_names(each, setting.device) for who, each in case.contestants.items()}
    return checked, traces


def _say(what: str) -> None:
    print(f"[kernels] {what}", file=sys.stderr, flush=True)


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
    packages = ("triton", "liger-kernel", "quack-kernels", "flash-attn", "flash-attn-4", "transformers")
    return Report(
        title=f"Ops of a step: {options.tokens} tokens, hidden {options.hidden}, MLP {options.intermediate}, "
        f"vocabulary {options.vocab}, rank {options.rank}, {options.dtype}",
        tables=tables,
        findings=(checked, *speeds, *first_calls.sentences(), *absent),
        machine=describe(setting.device, packages),
        data={"section": "kernels", "options": asdict(options), "device": setting.device.type},
    )
