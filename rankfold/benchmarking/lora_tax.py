"""Section `lora-tax`: the cost of adapters on top of their frozen linear, forward and backward.

The ratio of each contestant to the frozen linear (torch's or the engine's, whichever is faster) is taken within each
turn, and shown beside the limit by arithmetic (the low-rank products are not free) and the target of this project.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial

import torch

from engine.models.dtypes import TORCH_DTYPES
from engine.ops.backends import choose_kernels
from engine.ops.kernels import Kernels
from rankfold.benchmarking import lora_layers
from rankfold.benchmarking.case import LIMITS, Case, Checked, Contestant, Timed, check, time_case
from rankfold.benchmarking.ceilings import PRODUCT, Ceilings, Demand
from rankfold.benchmarking.first_hour.targets import LORA_TAX
from rankfold.benchmarking.lora_layers import Layer, make_layer
from rankfold.benchmarking.machine import describe, set_up
from rankfold.benchmarking.options import Shape, TaxOptions, chosen_names, for_device, read_shapes
from rankfold.benchmarking.peers import find_backends, find_peers
from rankfold.benchmarking.table import Report, Table, progress
from rankfold.benchmarking.timing import Summary, paired_ratio, summarise

FROZEN, PLAIN, PEFT = "frozen", "torch LoRA", "PEFT"
TARGETS = {"cpu": 1.10, "cuda": LORA_TAX}
"""The target: the engine's largest ratio to the frozen linear."""
_COLUMNS = (
    "linear", "dropout", "contestant", "median ms", "min ms", "over frozen", "from", "to", "limit", "target",
    "share of ceiling", "error",
)  # fmt: skip
_SHORT_COLUMNS = ("linear", "dropout", "contestant", "limit", "target", "error")


def run(options: TaxOptions) -> Report:
    """Checks every contestant at every shape, then times them.

    Raises:
        UserError: a missing device.
        Wrong: a contestant computes something else.
    """
    device = set_up(options)  # the allocator as in training, for all contestants
    options = for_device(options, device.type)
    dtype = TORCH_DTYPES[options.dtype]
    chosen: Kernels = choose_kernels("auto", device=device, dtype=dtype)[0]
    contestants, absent = find_contestants(options, device, chosen)
    builds = {
        (str(shape), dropout): partial(make_case, shape, dropout, options.rank, contestants, device, dtype)
        for shape in read_shapes(options.shapes or "")
        for dropout in ((0.0, options.dropout) if options.dropout else (0.0,))
    }
    ceilings = Ceilings(device, dtype, copy_mib=1, size=options.ceiling)
    checked = {}
    for (name, dropout), build in builds.items():
        progress("lora-tax", f"checking {name}, dropout {dropout}")
        checked[name, dropout] = check(name, build(), device, LIMITS[dtype])
    rows, verdicts, records, ceiling_seconds = [], [], [], []
    all_timed: dict[tuple[str, float], Timed] = {}
    for (name, dropout), build in builds.items():
        if options.repeats:
            progress("lora-tax", f"timing {name}, dropout {dropout}")
        case = build()
        timed = time_case(case, ceilings, options, device)
        ceiling_seconds += timed.seconds(PRODUCT) if timed.samples else []
        all_timed[name, dropout] = timed
        rows += _rows(name, dropout, options.rank, timed, checked[name, dropout], TARGETS[device.type])
        verdicts += _verdicts(f"{name}, dropout {dropout}", chosen, timed, TARGETS[device.type])
        records.append(_record(name, dropout, case, timed, checked[name, dropout]))
        del case  # before the next one's tensors are made
    verdicts += _layer_verdicts(all_timed, chosen, TARGETS[device.type])
    table = Table(
        title="A linear with adapters over the same linear frozen, forward and backward",
        columns=_COLUMNS if options.repeats else _SHORT_COLUMNS,
        rows=tuple(rows),
        findings=tuple(verdicts),
        data={"cases": records},
    )
    return Report(
        title=f"Cost of adapters: rank {options.rank}, {options.dtype}",
        tables=(table,),
        findings=(*_explanations(options), *ceilings.describe({PRODUCT: ceiling_seconds}), *absent),
        machine=describe(device, ("peft", "triton")),
        data={"section": "lora-tax", "options": asdict(options), "device": device.type},
    )


def find_contestants(
    options: TaxOptions, device: torch.device, chosen: Kernels
) -> tuple[dict[str, Callable[[Layer], Contestant]], tuple[str, ...]]:
    """Returns name -> its constructor for a layer; and sentences about absent contestants.

    Args:
        options, device: of the section.
        chosen: the backend that a model takes here; it is measured without adapters too, and unfolded where it folds.
    """
    dtype = TORCH_DTYPES[options.dtype]
    backends, absent = find_backends(device, dtype, timed=options.repeats > 0)
    peers = find_peers(options.PEERS, chosen_names(options.peers, options.PEERS, "peers"), device)
    found: dict[str, Callable[[Layer], Contestant]] = {FROZEN: lora_layers.frozen}
    found[f"frozen, engine ({chosen.name})"] = partial(lora_layers.engine, kernels=chosen, adapters=False)
    for name, kernels in backends.items():
        found[f"engine ({name})"] = partial(lora_layers.engine, kernels=kernels)
    shapes = read_shapes(options.shapes or "")
    if any(any(chosen.folds(shape.inputs, sum(shape.outputs), dtype)) for shape in shapes):
        found[f"engine ({chosen.name}), not folded"] = partial(lora_layers.engine, kernels=chosen, fold=False)
    if "torch" in peers:
        found[PLAIN] = lora_layers.plain_torch
    if "peft" in peers:
        found[PEFT] = lora_layers.peft
    return found, (*absent, *peers.sentences())


def make_case(
    shape: Shape,
    dropout: float,
    rank: int,
    contestants: dict[str, Callable[[Layer], Contestant]],
    device: torch.device,
    dtype: torch.dtype,
) -> Case:
    """Returns the case of all contestants on one linear. Each has its own answer, for its own mask."""
    layer = make_layer(shape, rank, dropout, device, dtype)
    return Case(
        size=str(shape),
        demand=Demand(operations=frozen_operations(shape)),
        contestants={name: build(layer) for name, build in contestants.items()},
        answer=list,
        baseline=FROZEN,
    )


def frozen_operations(shape: Shape) -> int:
    """Returns operations of the frozen linear, forward and input gradient."""
    return 4 * shape.tokens * shape.inputs * sum(shape.outputs)


def arithmetic_limit(shape: Shape, rank: int) -> float:
    """Returns operations with adapters over those without: H, H B^T, dH, dB, dA and dH A, each 2 T r of one side's
    width.
    """
    outputs, stacked = sum(shape.outputs), rank * len(shape.outputs)
    low_rank = 6 * shape.tokens * (shape.inputs * stacked + outputs * rank)
    return 1.0 + low_rank / frozen_operations(shape)


def _rows(
    name: str, dropout: float, rank: int, timed: Timed, checked: dict[str, Checked], target: float
) -> list[tuple[str, ...]]:
    limit = f"{arithmetic_limit(read_shapes(name)[0], rank):.3f}"
    rows = []
    for who, found in checked.items():
        adapters = "frozen" not in who
        wanted = (limit if adapters else "", f"{target:.2f}" if who.startswith("engine") else "")
        figures: tuple[str, ...] = ()
        if timed.samples:
            taken = summarise(timed.seconds(who))
            ratio = _over_frozen(timed, who)
            share = paired_ratio(timed.limits, timed.seconds(who)).median
            times = (f"{taken.median * 1e3:.3f}", f"{taken.low * 1e3:.3f}", *(f"{value:.3f}" for value in ratio))
            rows.append((name, str(dropout), who, *times, *wanted, f"{share:.1%}", f"{found.error:.0e}"))
        else:
            rows.append((name, str(dropout), who, *figures, *wanted, f"{found.error:.0e}"))
    return rows


def _over_frozen(timed: Timed, who: str) -> Summary:
    """Returns a contestant's time over that of the faster frozen linear."""
    return paired_ratio(timed.seconds(who), timed.seconds(_faster_frozen(timed)))


def _faster_frozen(timed: Timed) -> str:
    """Returns the frozen linear that ratios refer to: torch's or the engine's, whichever is faster at this shape."""
    frozen = [who for who in timed.samples if who.startswith("frozen")]
    return min(frozen, key=lambda who: summarise(timed.seconds(who)).median)


def layer_linears(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """Returns the linears that make up a decoder layer, queries to down projection; empty where one is missing."""
    for qkv in shapes:
        for gate_up in shapes:
            if (
                qkv.kind != "norm-column"
                or gate_up.kind != "norm-column"
                or (len(qkv.outputs), len(gate_up.outputs)) != (3, 2)
            ):
                continue
            tokens, hidden = qkv.tokens, qkv.inputs
            output = Shape(kind="row", tokens=tokens, inputs=qkv.outputs[0], outputs=(hidden,))
            down = Shape(kind="swiglu-row", tokens=tokens, inputs=gate_up.outputs[0], outputs=(hidden,))
            if (gate_up.tokens, gate_up.inputs) == (tokens, hidden) and output in shapes and down in shapes:
                return qkv, output, gate_up, down
    return ()


def _layer_verdicts(timed: dict[tuple[str, float], Timed], chosen: Kernels, target: float) -> list[str]:
    """Returns verdicts on the linears of a layer together, where all were timed: turn by turn, sum over sum."""
    who = f"engine ({chosen.name})"
    linears = layer_linears([read_shapes(name)[0] for name, _ in timed])
    verdicts = []
    for dropout in sorted({dropout for _, dropout in timed}):
        some = [timed[str(linear), dropout] for linear in linears]
        if not some or any(who not in one.samples for one in some):
            continue
        taken = _together(one.seconds(who) for one in some)
        ratio = paired_ratio(taken, _together(one.seconds(_faster_frozen(one)) for one in some))
        over_torch = paired_ratio(taken, _together(one.seconds(FROZEN) for one in some)).median
        verdict = "meets" if ratio.median <= target else "misses"
        verdicts.append(
            f"The four linears of a layer together, dropout {dropout}: {who} at {ratio.median:.3f} ({ratio.low:.3f} to "
            f"{ratio.high:.3f}) {verdict} the target of {target:.2f}; over torch's frozen linears {over_torch:.3f}."
        )
    return verdicts


def _together(samples: Iterable[Sequence[float]]) -> list[float]:
    """Returns the seconds of several cases, added up turn by turn."""
    return [sum(turn) for turn in zip(*samples, strict=True)]


def _verdicts(where: str, chosen: Kernels, timed: Timed, target: float) -> list[str]:
    """Returns a verdict on the engine as a model takes it, and whether another of its kernels would be faster."""
    if not timed.samples:
        return []
    ratios = {who: _over_frozen(timed, who).median for who in timed.samples if who.startswith("engine")}
    taken, fastest = f"engine ({chosen.name})", min(ratios, key=lambda who: ratios[who])
    if taken not in ratios:
        return []
    verdict = "meets" if ratios[taken] <= target else "misses"
    other = f"; {fastest} is faster, {ratios[fastest]:.3f}" if fastest != taken else ""
    return [f"{where}: {taken} at {ratios[taken]:.3f} {verdict} the target of {target:.2f}{other}."]


def _record(name: str, dropout: float, case: Case, timed: Timed, checked: dict[str, Checked]) -> dict:
    return {
        "linear": name,
        "dropout": dropout,
        "operations": case.demand.operations,
        "seconds": {who: timed.seconds(who) for who in timed.samples},
        "over_frozen": {who: _over_frozen(timed, who).median for who in case.contestants if timed.samples},
        "error": {who: found.error for who, found in checked.items()},
        "first_call_seconds": {who: found.first_seconds for who, found in checked.items()},
    }


def _explanations(options: TaxOptions) -> tuple[str, ...]:
    timed = "before anything was timed (column error)" if options.repeats else "and nothing was timed"
    return (
        f"Outputs and all gradients were compared with those in float64, each for the mask it drew, {timed}.",
        "Frozen is the linear alone, all its sections in one product, with the norm or SwiGLU that makes its input: "
        "forward and input gradient. Ratios are to the faster of the two frozen ones. The limit counts the low-rank "
        "products' operations as if they ran as fast.",
        "The share of the ceiling is that of the frozen linear's operations at the speed of the square product.",
    )
