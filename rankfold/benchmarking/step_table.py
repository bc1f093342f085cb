"""The table of section `step`, from its measurements."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import torch

from rankfold.benchmarking.ceilings import PRODUCT
from rankfold.benchmarking.machine import describe
from rankfold.benchmarking.model import operations_per_weight, step_operations
from rankfold.benchmarking.options import StepOptions
from rankfold.benchmarking.remote import FLOOR
from rankfold.benchmarking.sides import BESIDE, ENGINE, PEER, Alone
from rankfold.benchmarking.table import Table
from rankfold.benchmarking.timing import Sample, Summary, paired_ratio, summarise

_COLUMNS = (
    "", "median ms", "min ms", "max ms", "tokens/s", "TFLOP/s", "share of ceiling", "share of floor", "peak MiB",
    "first step ms", "attention",
)  # fmt: skip


@dataclass(kw_only=True, slots=True)
class StepMeasurement:
    """The measurements that the table shows.

    Args:
        samples: of each side, of the floor and of the square product, one per turn.
        alone: of each side.
        absent: sentences: which peers did not take part.
        arrangement: the sentence that says which sides were alive at once.
        attention: kernel that each side's attention ran.
        engine_kernels: the sentence that says which backend the engine took.
        floor: the sentence that says who computes the floor's products.
        operations: of one run of the floor and of the square product.
        agreement: sentences: whether losses agree.
    """

    samples: dict[str, list[Sample]]
    alone: dict[str, Alone]
    absent: tuple[str, ...]
    arrangement: str
    attention: dict[str, str] = field(default_factory=dict)
    engine_kernels: str = ""
    floor: str = ""
    operations: dict[str, int] = field(default_factory=dict)
    agreement: tuple[str, ...] = ()

    @property
    def seconds(self) -> dict[str, list[float]]:
        return {name: [sample.seconds for sample in taken] for name, taken in self.samples.items()}

    @property
    def cpu_seconds(self) -> dict[str, list[float]]:
        return {name: [sample.cpu_seconds for sample in taken] for name, taken in self.samples.items()}


def step_table(options: StepOptions, device: torch.device, measured: StepMeasurement) -> Table:
    """Returns a table with a row per side, the floor and the square product last."""
    size = f"hidden {options.hidden}, {options.layers} layers, {options.heads}/{options.kv_heads} heads"
    documents = f" of {options.documents} documents a row" if options.documents > 1 else ""
    base = "" if options.base_dtype == "none" else f", base in {options.base_dtype}"
    clock = measured.seconds
    return Table(
        title=f"{_NAMES[options.method]} training step: {options.model_type}, {size}, MLP {options.intermediate}, "
        f"vocabulary {options.vocab}, {_trained(options)}, {options.rows}x{options.length} tokens{documents}, "
        f"{options.dtype}{base}",
        columns=_COLUMNS,
        rows=tuple(_row(options, measured, name) for name in clock),
        findings=_findings(options, device, measured),
        machine=describe(device, ("transformers", "peft", "liger-kernel", "triton")),
        data={
            "section": "step",
            "options": asdict(options),
            "device": device.type,
            "seconds": clock,
            "cpu_seconds": measured.cpu_seconds,
            "first_seconds": {name: found.first_seconds for name, found in measured.alone.items()},
            **({"speedup_over_peft": paired_ratio(clock[PEER], clock[ENGINE])._asdict()} if PEER in clock else {}),
            "speedup": {name: paired_ratio(clock[name], clock[ENGINE])._asdict() for name in _peers(measured)},
            "step_operations": step_operations(options),
            "ceiling_operations": measured.operations[PRODUCT],
            "peak_bytes": {name: found.peak for name, found in measured.alone.items()},
            "attention": measured.attention,
            "arrangement": measured.arrangement,
        },
    )


_NAMES = {"lora": "LoRA", "dora": "DoRA", "full": "Full", "merge-aware": "Merge-aware LoRA"}


def _trained(options: StepOptions) -> str:
    if options.method == "full":
        return "all parameters"
    return f"rank {options.rank} on all linears, dropout {options.dropout}"


def _peers(measured: StepMeasurement) -> list[str]:
    return [name for name in measured.samples if name not in (ENGINE, FLOOR, PRODUCT)]


def _row(options: StepOptions, measured: StepMeasurement, name: str) -> tuple[str, ...]:
    clock = measured.seconds
    seconds = clock[name]
    time, alone = summarise(seconds), measured.alone.get(name)
    takes_steps = name not in (FLOOR, PRODUCT)
    operations = measured.operations.get(name, step_operations(options))
    ceiling = [measured.operations[PRODUCT] / each for each in clock[PRODUCT]]
    rates = [operations / each for each in seconds]
    return (
        name,
        *(f"{value * 1e3:.1f}" for value in time),
        f"{options.tokens / time.median:,.0f}" if takes_steps else "",
        f"{operations / time.median / 1e12:.3f}",
        f"{paired_ratio(rates, ceiling).median:.1%}",
        f"{paired_ratio(clock[FLOOR], seconds).median:.1%}" if name != PRODUCT else "",
        f"{alone.peak / 2**20:,.0f}" if alone is not None and alone.peak is not None else "",
        f"{alone.first_seconds * 1e3:,.0f}" if alone is not None else "",
        measured.attention.get(name, ""),
    )


def _spread(ratio: Summary) -> str:
    return f"{ratio.median:.3f} (from {ratio.low:.3f} to {ratio.high:.3f})"


def _findings(options: StepOptions, device: torch.device, measured: StepMeasurement) -> tuple[str, ...]:
    clock, cpu = measured.seconds, measured.cpu_seconds
    findings = [*measured.agreement, measured.arrangement]
    for name in _peers(measured):
        if name == BESIDE:
            findings.append(
                "A step that merges takes "
                f"{_spread(paired_ratio(clock[ENGINE], clock[name]))} of the time of a step with adapters beside the "
                f"same base, and {_spread(paired_ratio(cpu[ENGINE], cpu[name]))} of its CPU time, median of "
                f"{len(clock[ENGINE])} pairs."
            )
            continue
        findings.append(
            f"Speed against {name}: {_spread(paired_ratio(clock[name], clock[ENGINE]))}, median of "
            f"{len(clock[ENGINE])} pairs; above 1 the engine is faster."
        )
        if device.type == "cpu":
            findings.append(f"The same in CPU time of all threads: {_spread(paired_ratio(cpu[name], cpu[ENGINE]))}.")
    rate = measured.operations[FLOOR] / summarise(clock[FLOOR]).median
    findings.append(
        f"The floor is {measured.operations[FLOOR] / 1e9:.1f} GFLOP of products with weights, forward and backward, at "
        f"{rate / 1e9:,.0f} GFLOP/s; attention, adapters and everything else come on top. {measured.floor}"
    )
    findings.append(
        f"A step is {step_operations(options) / 1e9:,.1f} GFLOP ({operations_per_weight(options)} per weight and "
        "token, 6 L s h per token for causal attention); the ceiling is the square product, timed in the same turns."
    )
    findings.append(f"The engine's {measured.engine_kernels}.")
    findings += _memory(device, measured)
    return (*findings, *measured.absent)


def _memory(device: torch.device, measured: StepMeasurement) -> list[str]:
    ours = measured.alone[ENGINE].peak
    if ours is None:
        return ["Peak memory was not measured: on a CPU it needs Linux and a writable /proc/self/clear_refs."]
    what = "allocated on the GPU" if device.type == "cuda" else "resident, libraries' buffers included"
    shares = {name: measured.alone[name].peak for name in _peers(measured)}
    return [
        f"Peak memory above the loaded model ({what}): {ours / theirs:.3f} of {name}'s."
        for name, theirs in shares.items()
        if theirs is not None
    ]
