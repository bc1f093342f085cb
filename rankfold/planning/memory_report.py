"""The report of `rankfold plan memory`: the chosen layout by parts, the next ones, those that do not fit, the YAML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import yaml

from engine.config.hub import recorded, shown
from engine.config.memory import MemoryOptions
from engine.config.parallel import ParallelOptions
from engine.layers.rounding import FLOAT8
from engine.models.decoder_config import DecoderConfig
from engine.models.describe import active_parameters, num_parameters
from engine.planning.ledger import PARTS
from engine.planning.machine import Machine
from engine.planning.peak import fullest
from engine.planning.search import SAME_TIME, Candidate
from engine.planning.stored_formats import base_words
from engine.telemetry.format import counted, format_columns, format_parameters
from rankfold.planning import time_report
from rankfold.planning.memory_question import GIB, Answer
from rankfold.planning.time_by_kernel import model_flops

_SHOWN_GIB = 0.005
"""The smallest number that a table does not show as 0.00."""
WORST = "all tokens on its experts"
"""Name of the row of peaks under the worst routing, where experts are divided over ranks."""
_PER_LAYER_LIMIT = 8
"""Maximum number of pipeline ranks with a column each."""


def report(answer: Answer, *, top: int) -> str:
    """Returns the whole report.

    Args:
        top: number of alternatives to show.
    """
    found = answer.found
    parts = [_question(answer)]
    if found.fitting:
        best = found.fitting[0]
        parts += [_chosen(answer, best), part_table(best)]
        if len(found.fitting) > 1:
            parts.append("Alternatives:\n" + _ranking(answer, found.fitting[1 : top + 1]))
    else:
        parts.append(_nothing_fits(answer))
    if found.too_large:
        parts.append(_too_large(answer, top))
    if found.refused:
        parts.append(_refused(answer))
    if found.fitting:
        parts.append(_yaml(answer, found.fitting[0]))
    return "\n\n".join(parts)


def _question(answer: Answer) -> str:
    config, decoder = answer.config, answer.workload.decoder
    merged = ", merge-aware" if config.lora.merge_aware else ""
    trained = f"LoRA rank {config.lora.rank}{merged}" if config.lora.rank else ""
    if config.trainable:
        trained += (" and " if trained else "") + f"{', '.join(config.trainable)} in full"
    return (
        f"{shown(config.model.path)}: {format_parameters(num_parameters(decoder))} parameters{_active(decoder)}, "
        f"{trained}, {config.model.dtype}"
        f"{f', base {base_words(answer.workload)}' if config.model.base_dtype else ''}"
        f"{', products of codes' if config.model.base_products == 'codes' else ''}{_beside(answer)}\n"
        f"{counted(config.train.global_batch_size, 'row')} of {counted(config.row_length, 'token')} per step, "
        f"{config.train.micro_batch_size} per micro-batch; kernels {answer.workload.kernels}\n"
        f"{answer.devices} x {answer.gpu_memory:g} GiB, of which {answer.capacity / GIB:.1f} GiB each may be used; "
        f"speeds of {answer.machine.name}\n"
        "All figures are predictions; bytes are those of tensors."
    )


def _active(decoder: DecoderConfig) -> str:
    """Returns the number of a mixture's parameters that a token meets."""
    if not decoder.num_experts:
        return ""
    return f", {format_parameters(active_parameters(decoder))} of them active for a token"


def _beside(answer: Answer) -> str:
    count = answer.workload.beside
    if count:
        return f"; {format_parameters(count)} frozen parameters beside it, whose work is not counted"
    if fronts := answer.workload.decoder.fronts:
        rows, columns = fronts[0].usual_tile[:2]
        return f"; {counted(len(answer.workload.tiles), 'tile')} of {rows} x {columns} patches a micro-batch"
    if any(key in answer.hf_config for key in ("vision_config", "vision_encoder")):
        return "; its vision tower is not counted: give its number of parameters with --beside"
    return ""


def _chosen(answer: Answer, best: Candidate) -> str:
    time = best.time
    assert time is not None
    lines = [
        f"Yes. {_recommended(answer, best)}",
        *time_lines(best, answer.machine, answer.devices),
        f"communication: {time.links:.3g} s exposed, {time.hidden_links:.3g} s hidden behind compute",
        f"gradients: {time.reduction:.2g} s of reduction, of which {time.exposed_reduction:.2g} s exposed; update "
        f"{time.update:.2g} s{_host(answer, best)}",
    ]
    return "\n".join(lines) + routing_sentence(best, answer.capacity)


def time_lines(candidate: Candidate, machine: Machine, devices: int) -> list[str]:
    """Returns the lines on a candidate's time: the range, the share of the data sheet's speed, what is assumed, and the
    host's part."""
    found = time_report.range_of(candidate, machine)
    lines = [
        f"step {time_report.seconds(found)}, {time_report.tokens(found, devices)} tokens/s per GPU; "
        f"pipeline bubble {found.likely.bubble:.1%}"
    ]
    if machine.sheet:
        share = time_report.shares(found, model_flops(candidate.workload.on(candidate.layout)) / devices, machine.sheet)
        lines.append(
            f"speed: {share} of the data sheet's {machine.sheet:,.0f} TFLOP/s in 16 bits, counting the model's own "
            "arithmetic"
        )
    lines += time_report.shared(candidate, machine, found.likely)
    if (samples := candidate.workload.samples) is not None:
        lines += time_report.sampling(found, samples, devices) + time_report.judges(samples)
    elif found.likely.teachers:
        lines.append(f"of a step {found.likely.teachers:.3g} s are passes of teachers")
    return [one for one in (*lines, time_report.assumed(machine), time_report.host(found.likely)) if one]


def _recommended(answer: Answer, best: Candidate) -> str:
    """Returns the layout and, where another one is predicted to be a little faster, why it is not that."""
    fastest = min(answer.found.fitting, key=_step)
    if fastest is best:
        return f"Fastest that fits: {best.label()}"
    slower = _step(best) / _step(fastest) - 1
    speed = f"{slower:.1%} slower than" if slower >= 0.0005 else "as fast as"
    return (
        f"Recommended: {best.label()}\n"
        f"It is predicted to be {speed} the fastest that fits, and to take {best.peak / GIB:.1f} GiB "
        f"instead of {fastest.peak / GIB:.1f}: times within {SAME_TIME:.0%} of each other are not told apart."
    )


def _step(candidate: Candidate) -> float:
    assert candidate.time is not None
    return candidate.time.step


def routing_sentence(found: Candidate, capacity: float) -> str:
    """Returns the line on the unevenness that a router may have; nothing where experts are not divided.

    Args:
        capacity: bytes of a device that may be used.
    """
    ranks = found.layout.parallel.expert
    if ranks == 1:
        return ""
    even, worst = found.estimate.peak, fullest(found.worst()).peak
    title = f"\nrouting: {even / GIB:.1f} GiB where tokens spread evenly over the {ranks} ranks of the experts, "
    title += f"{worst / GIB:.1f} GiB where all choose those of one rank, which "
    return title + ("fits too" if worst <= capacity else "does not fit")


def _host(answer: Answer, best: Candidate) -> str:
    """Returns the host memory that a machine needs."""
    if not best.host:
        return ""
    ranks = min(answer.devices, answer.machine.node_size)
    limit = "" if answer.host_memory is None else f" of {answer.host_memory:,.0f}"
    machine = f"each machine of {ranks} GPUs" if ranks > 1 else "the machine"
    return f"\n{best.host * ranks / GIB:,.1f}{limit} GiB of host memory on {machine}"


def alternatives(found: Sequence[tuple[dict[str, str], Answer]]) -> str:
    """Returns the options that make a command fit under which nothing fits."""
    if not found:
        return "Neither a smaller base, nor host memory, nor more recomputation makes room: take more or larger GPUs."
    rows = []
    for added, answer in found:
        best = answer.found.fitting[0]
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in added.items())
        room = f"{best.peak / GIB:.1f} GiB on a GPU"
        speed = time_report.tokens(time_report.range_of(best, answer.machine), answer.devices)
        rows.append((flags, room, f"{speed} tokens/s per GPU"))
    return "It fits with one of these added to the command:\n" + table([(f"  {row[0]}", *row[1:]) for row in rows])


def part_table(candidate: Candidate) -> str:
    """Returns a table of GiB by part at the peak, with a column for each pipeline rank."""
    shown = candidate.estimates if len(candidate.estimates) <= _PER_LAYER_LIMIT else (candidate.estimate,)
    rows = [("GiB at the peak", *(f"rank {one.pipeline_rank}" if len(shown) > 1 else "per rank" for one in shown))]
    for part in PARTS:
        if any(one.parts[part] >= _SHOWN_GIB * GIB for one in shown):
            rows.append((part, *(f"{one.parts[part] / GIB:.2f}" for one in shown)))
    rows.append(("sum", *(f"{one.step / GIB:.2f}" for one in shown)))
    rows.append(("the peak is in", *(one.moment for one in shown)))
    rows.append(("while loading", *(f"{one.load / GIB:.2f}" for one in shown)))
    rows.append(("while saving", *(f"{one.save / GIB:.2f}" for one in shown)))
    if any(one.sampling for one in shown):
        rows.append(("while sampling", *(f"{one.sampling / GIB:.2f}" for one in shown)))
        if any(one.kept_codes for one in shown):
            rows.append(("  the base's codes in it", *(f"{one.kept_codes / GIB:.2f}" for one in shown)))
    if candidate.layout.parallel.expert > 1:
        worst = candidate.worst()
        rows.append((WORST, *(f"{worst[one.pipeline_rank].peak / GIB:.2f}" for one in shown)))
    if any(one.host for one in shown):
        rows.append(("in host memory", *(f"{one.host / GIB:.2f}" for one in shown)))
    return table(rows)


def _ranking(answer: Answer, candidates: Sequence[Candidate]) -> str:
    rows = [("layout", "GiB", "step s", "tokens/s per GPU", "bubble")]
    for one in candidates:
        found = time_report.range_of(one, answer.machine)
        rows.append(
            (
                one.label(),
                f"{one.peak / GIB:.1f}",
                f"{found.likely.step:.3g}",
                time_report.tokens(found, answer.devices),
                f"{found.likely.bubble:.1%}",
            )
        )
    return table(rows)


def _nothing_fits(answer: Answer) -> str:
    """Returns the text where nothing fits, with the bytes that the smallest layout lacks."""
    if not answer.found.too_large:
        return "No layout is possible."
    smallest = answer.found.too_large[0]
    lacks = (smallest.peak - answer.capacity) / GIB
    where = f"lacks {lacks:.1f} GiB on a GPU" if lacks > 0 else "lacks host memory"
    title = f"No layout fits. The smallest, {smallest.label()}, {where}:"
    return f"{title}{_host(answer, smallest)}\n\n{part_table(smallest)}"


def _too_large(answer: Answer, top: int) -> str:
    """Returns the layouts that fit under no recomputation."""
    large = answer.found.too_large
    rows = [("does not fit", "GiB", "largest part", "GiB")]
    for one in large[:top]:
        part = one.estimate.largest_part()
        peak = f"{'' if one.traced else 'over '}{one.peak / GIB:.1f}"
        rows.append((one.label(), peak, part, f"{one.estimate.parts[part] / GIB:.1f}"))
    text = table(rows)
    if len(large) > top:
        causes = Counter(one.estimate.largest_part() for one in large[top:])
        text += f"\nand {len(large) - top} more, by their largest part: " + ", ".join(
            f"{part} {count}" for part, count in causes.most_common()
        )
    return text


def _refused(answer: Answer) -> str:
    """Returns each reason for refused layouts once, in the words for the first layout that it refuses."""
    reasons: dict[str, list[str]] = {}
    for one in answer.found.refused:
        kind = "".join(letter for letter in one.reason if not letter.isdigit())
        reasons.setdefault(kind, []).append(f"{one.layout.label()}: {one.reason}")
    lines = [texts[0] + (f" (and {len(texts) - 1} like it)" if len(texts) > 1 else "") for texts in reasons.values()]
    return "Not possible:\n" + "\n".join(f"  {line}" for line in lines)


def _yaml(answer: Answer, best: Candidate) -> str:
    path = "" if answer.folder else " --model.path DIR"
    return (
        f"For rankfold train --config:\n\n{winning_yaml(answer, best)}\n\n"
        f"Saved as run.yaml, it is started with:\n\n    {_launcher(answer)} --config run.yaml{path} "
        "--data.train FILE"
    )


def _launcher(answer: Answer) -> str:
    """Returns the command that starts a process for each GPU, on every node if there are several."""
    if answer.devices == 1:
        return "rankfold train"
    here = min(answer.devices, answer.machine.node_size)
    nodes = answer.devices // here
    several = f" --nnodes {nodes} --rdzv-endpoint HOST:29500" if nodes > 1 else ""
    return f"rankfold train --nproc {here}{several}"


def winning_yaml(answer: Answer, best: Candidate) -> str:
    """Returns the sections that differ from the defaults, as rankfold train reads them."""
    config, folder = answer.config, answer.folder
    path = None if folder is None else recorded(folder)
    sections: dict[str, Any] = {
        "model": {
            "path": path,
            "dtype": config.model.dtype,
            "base_dtype": config.model.base_dtype,
            **({"base_products": "codes"} if config.model.base_products == "codes" else {}),
        },
        "parallel": _changed(best.layout.parallel, ParallelOptions(), ("tensor", "pipeline", "context")),
        "memory": _changed(memory_options(best), MemoryOptions(), ("recompute",)),
        "lora": {
            "rank": config.lora.rank,
            "dropout": config.lora.dropout,
            **({"merge_aware": True} if config.lora.merge_aware else {}),
            "targets": list(config.lora.targets),
        },
        "trainable": list(config.trainable),
        "data": {"seq_length": config.data.seq_length},
        "train": {
            "micro_batch_size": config.train.micro_batch_size,
            "global_batch_size": config.train.global_batch_size,
        },
    }
    for name in ("path", "base_dtype"):
        if sections["model"][name] is None:
            del sections["model"][name]
    if config.objective.kind.answers or config.objective.kind.samples:
        sections["objective"] = {"name": config.objective.name}
    if config.objective.kind.samples:
        names = ("rewards", "num_generations", "max_completion_length", "slots")
        sections["rollout"] = {name: getattr(config.rollout, name) for name in names}
        sections["rollout"]["rewards"] = list(config.rollout.rewards)
    return yaml.safe_dump(sections, sort_keys=False).rstrip()


def memory_options(best: Candidate) -> MemoryOptions:
    """Returns the memory section of a configuration."""
    memory = best.memory
    stored = None if memory.stored_dtype is None else "float8" if memory.stored_dtype == FLOAT8 else "bfloat16"
    return MemoryOptions(
        recompute=memory.recompute,
        recompute_layers=memory.recompute_layers,
        offload_activations=memory.offload,
        offload_weights=best.workload.offload_weights,
        offload_optimizer=best.workload.offload_optimizer,
        activation_dtype=stored,
    )


def _changed(options: Any, defaults: Any, always: tuple[str, ...]) -> dict[str, Any]:
    """Returns fields that differ from the default, and those that are always shown."""
    values, plain = asdict(options), asdict(defaults)
    names = [field.name for field in fields(options)]
    return {name: values[name] for name in names if name in always or values[name] != plain[name]}


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Returns aligned columns: the first to the left, figures to the right."""
    return "\n".join(format_columns(rows))
