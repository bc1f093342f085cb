"""A small model trained with graphs and without, on micro-batches whose packing changes all the time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.batch import Batch
from engine.layers.graph_capture import Capture
from engine.layers.recompute import MemoryPlan
from engine.ops.attention.varlen import VarlenAttention
from engine.ops.kernels import REFERENCE
from engine.training.cuda_graph.build import Graphs
from engine.training.cuda_graph.static_batch import StaticShape
from engine.training.cuda_graph.step_graph import LayerGraphs, StepGraph
from engine.training.rank_stages import Stages
from engine.training.step import TrainStep
from engine.vision.layers.fronts import ImageTower
from tests.distributed.cases import Built, Case, make_batch, small_config
from tests.support.graph_stand_in import FunctionCapture, lasting_tensors
from tests.support.memory_models import build_with, num_targets
from tests.support.toy_vision import ToyVisionConfig
from tests.support.varlen_stand_in import varlen_attn

CPU = torch.device("cpu")
ROWS, LENGTH, DOCUMENTS = 2, 24, 6
SHAPE = StaticShape(rows=ROWS, length=LENGTH, documents=DOCUMENTS)
PACKINGS = ((24,), (9, 15), (5, 5, 5, 9), (1, 23), (8, 8, 8), (13, 11), (20,), (2, 3, 4, 15))
ON_DEVICE = replace(REFERENCE, attention=VarlenAttention(attend=varlen_attn))
EVERYTHING, LAYERS = r".*", r"layers\..*_proj"


def graph_config(**changes: Any):
    return small_config(head_dim=8, num_layers=3, **changes)


CASES = {
    "adapters": Case(config=graph_config(), adapters=LAYERS),
    "adapters apart": Case(config=graph_config(), adapters=LAYERS, fold=False, dropout=0.0),
    "adapters on nf4": Case(config=graph_config(), adapters=LAYERS, base="nf4"),
    "adapters on fp8": Case(config=graph_config(), adapters=LAYERS, base="fp8"),
    "upper adapters": Case(config=graph_config(), adapters=r"layers\.[12]\..*_proj"),
    "everything": Case(config=graph_config(qkv_bias=True, qk_norm=True), trained=EVERYTHING),
    "tied, with adapters": Case(
        config=graph_config(tied_embeddings=True), adapters=LAYERS, trained=r"embed_tokens|norm|layers\..*norm"
    ),
    "a vision model": Case(
        config=graph_config(fronts=(ImageTower(model=ToyVisionConfig()),)), adapters=LAYERS, trained=r"vision\..*"
    ),
}


@dataclass(frozen=True)
class Step:
    """What the host gives for one step."""

    batches: list[Batch]
    targets: float
    lr: float


def make_steps(num: int, *, accumulation: int, vocab_size: int, broken: int | None = None) -> list[Step]:
    """Packings and learning rates that change all the time; step 5 has too many documents, step 7 shorter rows."""
    steps = []
    for number in range(num):
        batches = []
        for micro in range(accumulation):
            rows = [
                (micro * ROWS + row, PACKINGS[(3 * number + 2 * micro + row * (number + 1)) % len(PACKINGS)])
                for row in range(ROWS)
            ]
            length = LENGTH
            if number == 5 and micro == accumulation - 1:
                rows = [(slot, (4, 4, 4, 4, 8)) for slot, _ in rows]
            if number == 7 and micro == 0:
                rows, length = [(slot, (10, 6)) for slot, _ in rows], 16
            batch = make_batch(rows, row_length=length, seq_length=LENGTH, vocab_size=vocab_size, seed=number)
            if number == broken and micro == 0:
                weights = batch.loss_weights_BS.clone()
                weights[1, 10] = torch.inf
                batch = replace(batch, loss_weights_BS=weights)
            batches.append(batch)
        targets = num_targets([replace(b, loss_weights_BS=b.loss_weights_BS.nan_to_num(posinf=1.0)) for b in batches])
        steps.append(Step(batches, targets, 0.0 if number == 4 else 1e-3 * (number % 3 + 1)))
    return steps


def does_not_fit(batch: Batch) -> bool:
    return batch.tokens_BS.shape != (2, 24) or len(batch.document_lengths) > 6


@dataclass
class Run:
    """Figures of every step, and what training left."""

    losses: Tensor
    norms: Tensor
    left: list[Tensor]


def graphed_step(kind: str, built: Built, capture: Capture, accumulation: int) -> Graphs:
    if kind == "step":
        return StepGraph(built.step, capture, SHAPE, num_microbatches=accumulation, device=built.stage.step.device)
    return LayerGraphs(built.step, stages_of(built), capture, SHAPE)


def stages_of(built: Built) -> Stages:
    return built.step._stages


def train(take: TrainStep | Graphs, built: Built, steps: list[Step]) -> Run:
    """Figures are read when the step after next has run, as late as a loop that runs ahead may."""
    results = [take(step.batches, step.targets, step.lr) for step in steps]
    return Run(
        torch.stack([result.loss for result in results]).cpu(),
        torch.stack([result.grad_norm for result in results]).cpu(),
        [tensor.detach().clone().cpu() for tensor in lasting_tensors(built)],
    )


def assert_same_bits(found: Run, expected: Run) -> None:
    bits = {"equal_nan": True, "rtol": 0, "atol": 0}
    torch.testing.assert_close(found.losses, expected.losses, **bits)
    torch.testing.assert_close(found.norms, expected.norms, **bits)
    for mine, other in zip(found.left, expected.left, strict=True):
        torch.testing.assert_close(mine, other, **bits)


def pair(
    case: str, kind: str, *, accumulation: int, recompute: str = "selective", stored: torch.dtype | None = None
) -> tuple[Built, Built, Graphs, FunctionCapture]:
    """Twice the same model, and a graphed step of the first."""
    memory = MemoryPlan(recompute=recompute, stored_dtype=stored)
    graphed, plain = (build_with(CASES[case], memory, kernels=ON_DEVICE) for _ in range(2))
    capture = FunctionCapture(lambda: lasting_tensors(graphed))
    return graphed, plain, graphed_step(kind, graphed, capture, accumulation), capture
