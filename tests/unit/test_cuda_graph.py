"""Graphed training against the same training without graphs, bit for bit.

On a CPU functions stand in for graphs (tests.support.graph_stand_in), and torch's flash op is computed by plain torch.
On a GPU: python -m pytest -m gpu tests/unit/test_cuda_graph.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from engine.layers.graph_capture import CudaCapture
from engine.layers.recompute import MemoryPlan
from engine.ops.attention.varlen import VarlenAttention
from engine.ops.gradients import GradientSink
from engine.ops.kernels import Kernels, backend
from engine.optim import reduce
from engine.training.cuda_graph.counts import WARMUP_STEPS
from tests.distributed.cases import make_batch
from tests.support.graph_stand_in import Rerun
from tests.support.graph_training import (
    CASES,
    Step,
    assert_same_bits,
    does_not_fit,
    graphed_step,
    make_steps,
    pair,
    stages_of,
    train,
)
from tests.support.memory_models import build_with
from tests.support.sweeps import sampled
from tests.support.toy_vision import with_images

# read by cuBLAS once, before its first product: the same sums in a graph and without
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.mark.parametrize(
    ("kind", "case", "accumulation"),
    sampled(
        product(("step", "layer"), CASES, (1, 3)),
        [
            ("step", "adapters on fp8", 1), ("step", "everything", 1),
            ("layer", "upper adapters", 3), ("layer", "tied, with adapters", 1),
        ],
    ),
)  # fmt: skip
def test_training_is_the_same_bit_for_bit(kind: str, case: str, accumulation: int):
    """Changing packing and learning rate, dropout, a step beside the graph, one that is skipped."""
    graphed, plain, graphs, _ = pair(case, kind, accumulation=accumulation)
    steps = make_steps(12, accumulation=accumulation, vocab_size=131, broken=8)
    expected = train(plain.step, plain, steps)
    assert not expected.norms[8].isfinite() and plain.optimizer.skipped == 1 and plain.optimizer.step_count == 11
    assert_same_bits(train(graphs, graphed, steps), expected)
    odd = [[does_not_fit(batch) for batch in step.batches] for step in steps[WARMUP_STEPS:]]
    beside = [any(step) for step in odd] if kind == "step" else [micro for step in odd for micro in step]
    assert graphs.counts.warmup == (WARMUP_STEPS if kind == "step" else WARMUP_STEPS * accumulation)
    assert (graphs.counts.beside, graphs.counts.replayed) == (sum(beside), beside.count(False))
    assert 2 <= sum(beside) < len(beside) / 2


@pytest.mark.parametrize("recompute", sampled(("none", "attention", "full"), ("attention",)))
def test_recomputation_is_part_of_a_steps_graph(recompute: str):
    graphed, plain, graphs, _ = pair("adapters", "step", accumulation=2, recompute=recompute)
    steps = make_steps(6, accumulation=2, vocab_size=131)
    assert_same_bits(train(graphs, graphed, steps), train(plain.step, plain, steps))


def test_all_inputs_kept_by_layers_that_are_replayed():
    graphed, plain, graphs, _ = pair("adapters", "layer", accumulation=2, recompute="none")
    steps = make_steps(6, accumulation=2, vocab_size=131)
    assert_same_bits(train(graphs, graphed, steps), train(plain.step, plain, steps))


def test_activations_in_fewer_bits_are_part_of_a_steps_graph():
    graphed, plain, graphs, _ = pair("adapters", "step", accumulation=2, stored=torch.bfloat16)
    steps = make_steps(6, accumulation=2, vocab_size=131)
    assert_same_bits(train(graphs, graphed, steps), train(plain.step, plain, steps))


def test_layers_that_are_replayed_give_a_vision_model_in_front_its_gradients():
    """Nothing else in front of them trains. Micro-batches have other images each time, of other sizes."""
    graphed, plain, graphs, _ = pair("a vision model", "layer", accumulation=2)
    steps = [
        replace(step, batches=[with_images(one, (number, number + 1), seed=number) for one in step.batches])
        for number, step in enumerate(make_steps(6, accumulation=2, vocab_size=131))
    ]
    assert_same_bits(train(graphs, graphed, steps), train(plain.step, plain, steps))
    assert graphs.counts.replayed


@pytest.mark.parametrize("kind", ["step", "layer"])
def test_evaluation_between_steps_is_left_alone_and_leaves_alone(kind: str):
    """An evaluation loads batches of its own into the stage, without dropout."""
    graphed, plain, graphs, _ = pair("adapters", kind, accumulation=1)
    steps = make_steps(9, accumulation=1, vocab_size=131)
    other = make_batch([(0, (7, 5)), (1, (12,))], row_length=12, seq_length=24, vocab_size=131, seed=50)
    losses = []
    for take, built in ((graphs, graphed), (plain.step, plain)):
        seen = []
        for step in steps:
            seen.append(take(step.batches, step.targets, step.lr).loss)
            seen.append(stages_of(built).figures([other, steps[0].batches[0]])[0])
        losses.append(torch.stack(seen))
    assert torch.equal(*losses)


@pytest.mark.parametrize("kind", ["step", "layer"])
def test_the_same_batch_meets_another_mask_at_each_replay(kind: str):
    """Nothing is learnt with a rate of 0, so that what changes is dropout; its count goes on in the graph."""
    graphed, plain, graphs, _ = pair("adapters", kind, accumulation=1)
    same = make_steps(1, accumulation=1, vocab_size=131)[0]
    steps = [replace(same, lr=0.0) for _ in range(8)]
    found, expected = train(graphs, graphed, steps), train(plain.step, plain, steps)
    assert_same_bits(found, expected)
    assert len(set(found.losses.tolist())) == 8


@pytest.mark.parametrize("kind", ["step", "layer"])
def test_a_run_that_goes_on_starts_its_counts_where_they_were(kind: str):
    """Counts, masters and moments are filled in place by a checkpoint, before the first step or later."""
    graphed, plain, graphs, _ = pair("adapters", kind, accumulation=1)
    steps = make_steps(10, accumulation=1, vocab_size=131)
    for take, built in ((graphs, graphed), (plain.step, plain)):
        train(take, built, steps[:6])
        built.stage.step.fill_(40)
        built.optimizer.step_count.fill_(40)
        built.flat.master.mul_(1.01)
        built.flat.publish()
    assert_same_bits(train(graphs, graphed, steps[6:]), train(plain.step, plain, steps[6:]))


def test_one_capture_of_a_step_and_two_of_a_layer():
    graphs = {}
    for kind in ("step", "layer"):
        graphed, _, take, capture = pair("upper adapters", kind, accumulation=2)
        train(take, graphed, make_steps(WARMUP_STEPS + 3, accumulation=2, vocab_size=131)[-3 - WARMUP_STEPS :])
        graphs[kind] = [captured.replays for captured in capture.captured]
    # steps 3 and 4; step 5 does not fit
    assert graphs["step"] == [2]
    # coordinates, three layers forward, the two with adapters backward; of steps 3 to 5 five micro-batches fit
    assert graphs["layer"] == [5, 5, 5, 5, 5, 5]


def test_full_buckets_leave_during_a_replayed_backward(monkeypatch: pytest.MonkeyPatch):
    """In the order and as early as without graphs: each layer's gradients when its backward has been launched."""
    sent: list[tuple[int, int]] = []
    forced: list[bool] = []

    def all_reduce_async(tensor: Tensor, axis: object, *rest: object):
        sent.append((tensor.storage_offset(), tensor.numel()))
        return tensor, reduce.Handle()

    monkeypatch.setattr(reduce, "all_reduce_async", all_reduce_async)
    graphed, plain, graphs, _ = pair("adapters", "layer", accumulation=2)
    replay = Rerun.replay

    def in_silence(rerun: Rerun) -> None:
        with patch.object(GradientSink, "added", lambda sink: None):  # a replay calls nobody on the host
            replay(rerun)

    monkeypatch.setattr(Rerun, "replay", in_silence)
    orders = []
    for take, built in ((graphs, graphed), (plain.step, plain)):
        finish = built.reducer.finish

        def early(finish=finish) -> None:
            forced.append(len(sent) > 0)
            sent.append((-1, 0))
            finish()

        monkeypatch.setattr(built.reducer, "finish", early)
        sent.clear()
        train(take, built, make_steps(5, accumulation=2, vocab_size=131))
        orders.append(list(sent))
    assert orders[0] == orders[1] and all(forced)
    before_the_end = orders[0].index((-1, 0))
    assert before_the_end == len(graphed.reducer._buckets) > 3


# On a GPU.


def _gpu_kernels() -> Kernels:
    TRITON = backend("triton")

    return replace(TRITON, attention=VarlenAttention())


@contextmanager
def _deterministic() -> Iterator[None]:
    """torch's flash backward adds up in any order otherwise."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _on_gpu(steps: list[Step], device: torch.device) -> list[Step]:
    """In pinned memory, as the loader gives them."""
    from engine.data.collate import pin

    return [replace(step, batches=[pin(batch) for batch in step.batches]) for step in steps]


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("case", ["adapters", "adapters on nf4", "adapters on fp8", "upper adapters", "everything"])
@pytest.mark.parametrize("kind", ["step", "layer"])
def test_fifty_steps_on_a_gpu_are_the_same_bit_for_bit(kind: str, case: str, accumulation: int):
    device = torch.device("cuda", torch.cuda.current_device())
    setting = {"kernels": _gpu_kernels(), "dtype": torch.bfloat16, "device": device}
    graphed, plain = (build_with(CASES[case], MemoryPlan(), **setting) for _ in range(2))
    steps = _on_gpu(make_steps(50, accumulation=accumulation, vocab_size=131, broken=20), device)
    with _deterministic():
        expected = train(plain.step, plain, steps)
        graphs = graphed_step(kind, graphed, CudaCapture(device), accumulation)
        assert_same_bits(train(graphs, graphed, steps), expected)
    odd = [[does_not_fit(batch) for batch in step.batches] for step in steps[WARMUP_STEPS:]]
    beside = [any(step) for step in odd] if kind == "step" else [micro for step in odd for micro in step]
    assert (graphs.counts.beside, graphs.counts.replayed) == (sum(beside), beside.count(False))


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "attention", "full"])
def test_recomputation_in_a_gpus_graph(recompute: str):
    device = torch.device("cuda", torch.cuda.current_device())
    setting = {"kernels": _gpu_kernels(), "dtype": torch.bfloat16, "device": device}
    graphed, plain = (build_with(CASES["adapters"], MemoryPlan(recompute=recompute), **setting) for _ in range(2))
    steps = _on_gpu(make_steps(10, accumulation=2, vocab_size=131), device)
    with _deterministic():
        expected = train(plain.step, plain, steps)
        graphs = graphed_step("step", graphed, CudaCapture(device), 2)
        assert_same_bits(train(graphs, graphed, steps), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["none", "step", "layer"])
def test_a_step_on_a_gpu_never_waits(kind: str):
    device = torch.device("cuda", torch.cuda.current_device())
    built = build_with(
        CASES["adapters"], MemoryPlan(), kernels=_gpu_kernels(), dtype=torch.bfloat16, device=device
    )  # fmt: skip
    take = built.step if kind == "none" else graphed_step(kind, built, CudaCapture(device), 2)
    steps = _on_gpu(make_steps(WARMUP_STEPS + 8, accumulation=2, vocab_size=131), device)
    for step in steps[: WARMUP_STEPS + 1]:  # compilation, workspaces, the capture
        take(step.batches, step.targets, step.lr)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in steps[WARMUP_STEPS + 1 :]:
            take(step.batches, step.targets, step.lr)
    finally:
        torch.cuda.set_sync_debug_mode("default")
