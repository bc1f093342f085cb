"""Section `memory`: the peak of a LoRA step, and a layer's bytes kept for backward, beside the design's figure.

Kept bytes are counted storage by storage, and computed from the design.

Legend: h width of the residual stream and of the queries, h_kv of keys (and of values), f of the MLP, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace

import torch
from torch import Tensor

from engine.models.dtypes import TORCH_DTYPES
from engine.ops.backends import choose_kernels
from rankfold.benchmarking.machine import describe, set_up
from rankfold.benchmarking.model import Side, draw_batches
from rankfold.benchmarking.options import MemoryOptions, ModelOptions
from rankfold.benchmarking.sides import ENGINE, PEER, PEER_KINDS, SideKind, find_sides, steps_alone
from rankfold.benchmarking.table import Report, Table, progress

_LAYERS = 2
"""Layers of the smaller model. Not 1: below the first layer nothing is trained, so it keeps less than the others."""


def saved_bytes(side: Side, ids_BS: Tensor, own: Iterable[Tensor]) -> int:
    """Returns the bytes of all storages that the graph of a loss keeps, each counted once, without those of `own`.

    Sees tensors saved through autograd, which are all but the closures of non-reentrant checkpointing.
    """
    storages = {tensor.untyped_storage().data_ptr() for tensor in own}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            alive.append(tensor)  # an address identifies one storage only while it is not reused
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        side.loss(ids_BS)
    return sum(kept.values())


def layer_bytes(kind: SideKind, options: ModelOptions, device: torch.device) -> int:
    """Returns the bytes that a model keeps for one additional layer."""
    counts = []
    for layers in (_LAYERS, _LAYERS + 1):
        sized = replace(options, layers=layers)
        side = kind.build(sized, device)
        side.prepare()
        ids = draw_batches(sized, device, 1)[0]
        counts.append(saved_bytes(side, ids, [*side.model.parameters(), *side.model.buffers()]))
    return counts[1] - counts[0]


def plain_bytes(options: ModelOptions) -> int:
    """Returns bytes per token and layer where each op of a LoRA layer keeps its inputs: 6h + 2h_kv + 3f numbers.

    The inputs of two norms and of four products (norms' outputs, attention's output, SwiGLU's output), queries, keys
    and values, gate and up.
    """
    numbers = 6 * options.hidden + 2 * options.kv_width + 3 * options.intermediate
    return numbers * TORCH_DTYPES[options.dtype].itemsize


def designed_bytes(options: ModelOptions, *, bits: bool) -> float:
    """Returns bytes per token and layer of this engine's design: norms and SwiGLU are recomputed, H and statistics are
    kept.

    The residual stream twice, q, attention's output, k, v, [gate | up], H of seven adapters; in fp32 two reciprocal
    norms and attention's logarithm of sums; with dropout a mask for each of four inputs.

    Args:
        options: sizes.
        bits: masks are bits; else a byte per element.
    """
    numbers = 4 * options.hidden + 2 * options.kv_width + 2 * options.intermediate + 7 * options.rank
    statistics = 4 * (2 + options.heads)
    masks = 3 * options.hidden + options.intermediate if options.dropout > 0 else 0
    return numbers * TORCH_DTYPES[options.dtype].itemsize + statistics + masks / (8 if bits else 1)


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
        progress("memory", f"peak memory of {name}")
        peaks[name] = steps_alone(name, options).peak
    kept = {}
    for name, kind in kinds.items():
        if name != _UNSEEN:
            progress("memory", f"what a layer of {name} keeps")
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
