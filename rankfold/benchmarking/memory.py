"""Section `memory`: the peak of a LoRA step, and a layer's bytes kept for backward, beside the design's figure."""

from __future__ import annotations

import sys
from dataclasses import asdict

import torch

from engine.models.dtypes import TORCH_DTYPES
from engine.ops.backends import choose_kernels
from rankfold.benchmarking.machine import describe
from rankfold.benchmarking.options import MemoryOptions
from rankfold.benchmarking.saved import designed_bytes, layer_bytes, plain_bytes
from rankfold.benchmarking.sides import ENGINE, PEER, PEER_KINDS, SideKind, find_sides, set_up, steps_alone
from rankfold.benchmarking.table import Report, Table

PLAIN, DESIGN = "plain LoRA layer, by arithmetic", "this engine, by design"
_UNSEEN = PEER_KINDS["peft-checkpointing"].name


def run(options: MemoryOptions) -> Report:
    """Measures the peak and the kept bytes.

    Raises:
        UserError: a missing device.
    """
    device = set_up(options)
    kinds, peers = find_sides(options, device)
    peaks = {}
    for name in kinds:
        _say(f"peak memory of {name}")
        peaks[name] = steps_alone(name, options).peak
    kept = {}
    for name, kind in kinds.items():
        if name != _UNSEEN:
            _say(f"what a layer of {name} keeps")
            kept[name] = layer_bytes(kind, options, device)
    size = f"hidden {options.hidden}, {options.layers} layers, {options.heads}/{options.kv_heads} heads"
    return Report(
        title=f"Memory of a LoRA step: {size}, MLP {options.intermediate}, vocabulary {options.vocab}, rank "
        f"{options.rank}, {options.rows}x{options.length} tokens, dropout {options.dropout}, {options.dtype}",
        tables=(_peak_table(peaks, device), _kept_table(options, kinds, kept, device)),
        findings=peers.sentences(),
        machine=describe(device, ("transformers", "peft", "liger-kernel", "triton")),
        data={"section": "memory", "options": asdict(options), "device": device.type},
    )


def _say(what: str) -> None:
    print(f"[memory] {what}", file=sys.stderr, flush=True)


def _peak_table(peaks: dict[str, int | None], device: torch.device) -> Table:
    what = "allocated on the GPU" if device.type == "cuda" else "resident, libraries' buffers included"
    findings = [f"Optimizer, gradients, activations and buffers over three steps; {what}; a separate process for each."]
    if peaks[ENGINE] is None:
        findings = ["Not measured: on a CPU it needs Linux and a writable /proc/self/clear_refs."]
    peft = peaks.get(PEER)
    return Table(
        title="Peak above the loaded model",
        columns=("", "peak MiB", f"over {PEER}"),
        rows=tuple((name, _mib(peak), _share(peak, peft)) for name, peak in peaks.items()),
        findings=tuple(findings),
        data={"peak_bytes": peaks},
    )


def _mib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:,.0f}"


def _share(count: float | None, whole: float | None) -> str:
    return "" if count is None or not whole else f"{count / whole:.3f}"


def _kept_table(
    options: MemoryOptions, kinds: dict[str, SideKind], kept: dict[str, int], device: torch.device
) -> Table:
    itemsize = TORCH_DTYPES[options.dtype].itemsize
    kernels, _ = choose_kernels(options.kernels, device=device, dtype=TORCH_DTYPES[options.dtype])
    plain = plain_bytes(options)
    design = designed_bytes(options, bits=kernels.name != "reference")
    each = {**{name: count / options.tokens for name, count in kept.items()}, PLAIN: plain, DESIGN: design}
    findings = [
        "Every storage that autograd keeps for one additional layer, each once, without parameters.",
        f"{PLAIN}: 6h + 2h_kv + 3f numbers per token, h {options.hidden}, h_kv {options.kv_width}, f "
        f"{options.intermediate}.",
        f"{DESIGN}: 4h + 2h_kv + 2f + 7r numbers, statistics in float32, and with dropout four masks.",
        f"Measured over designed: {each[ENGINE] / design:.3f}.",
    ]
    if _UNSEEN in kinds:
        findings.append(f"{_UNSEEN}: keeps layer inputs where autograd's hooks do not see them; not counted.")
    return Table(
        title="Kept for backward, per token and layer",
        columns=("", "bytes", "numbers", "of the plain layer"),
        rows=tuple(
            (name, f"{count:,.0f}", f"{count / itemsize:,.0f}", f"{count / plain:.3f}") for name, count in each.items()
        ),
        findings=tuple(findings),
        data={"layer_bytes": kept, "plain_bytes": plain * options.tokens, "designed_bytes": design * options.tokens},
    )
