"""Section graph of tools/benchmark.py, with functions in place of graphs: what is timed has been compared."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.errors import UserError
from engine.models.dtypes import TORCH_DTYPES
from engine.ops.attention.flash import FLASH2
from engine.ops.attention.varlen import why_not_varlen
from engine.ops.kernels import REFERENCE
from rankfold.benchmarking import graph
from rankfold.benchmarking.graph_side import EAGER, LAYERS, STEP, GraphSide, make_steps
from rankfold.benchmarking.sections import GraphOptions
from tests.support.graph_stand_in import FunctionCapture
from tests.support.graph_training import ON_DEVICE

CPU = torch.device("cpu")
TINY = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 48, "vocab": 131, "rank": 4}
SMALL = GraphOptions(
    **TINY,
    rows=2,
    length=24,
    lengths="24",
    documents=3,
    accumulation=2,
    repeats=2,
    warmup=1,
    dropout=0.1,
    dtype="float32",
)


def _capture(side: GraphSide) -> FunctionCapture:
    def lasting() -> list[Tensor]:
        parameters = [parameter.data for parameter in side.model.parameters()]
        return [*side.lasting(), side.count, side.flat.gradient, *parameters]

    return FunctionCapture(lasting)


def test_all_kinds_are_compared_and_timed():
    found = graph.measure(SMALL, CPU, ON_DEVICE, _capture)
    assert found.difference == {EAGER: 0.0, LAYERS: 0.0, STEP: 0.0}
    assert {name: len(samples) for name, samples in found.samples.items()} == {EAGER: 2, LAYERS: 2, STEP: 2}
    assert found.counts[STEP].startswith("6 steps replayed, 3 before the capture, 0 beside")
    assert found.counts[LAYERS].startswith("12 micro-batches replayed, 6 before the capture, 0 beside")
    table = graph.table(SMALL, {24: found}, ("A sentence.",), {})
    assert [row[0] for row in table.rows] == [f"96 tokens, {name}" for name in (EAGER, LAYERS, STEP)]
    assert "96 tokens, graph of the step: the first 6 losses are equal bit for bit." in table.findings
    assert table.rows[0][4] == "1.00"


def test_a_step_that_computes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    from engine.training.cuda_graph.static_batch import StaticBatch

    load = StaticBatch.load

    def forgets(self: StaticBatch, batch: object) -> None:
        load(self, batch)
        self.batch.document_offsets[1:2] += 1

    monkeypatch.setattr(StaticBatch, "load", forgets)
    with pytest.raises(RuntimeError, match="computes something else"):
        graph.measure(SMALL, CPU, ON_DEVICE, _capture)


def test_steps_are_packed_in_changing_ways():
    steps = make_steps(SMALL, CPU)
    lengths = [batch.document_lengths for batches, _ in steps for batch in batches]
    assert len(set(lengths)) == len(lengths) == 8
    for batches, targets in steps:
        assert targets == sum(batch.num_tokens - len(batch.document_lengths) for batch in batches)
        for batch in batches:
            assert len(batch.document_lengths) == 6 and sum(batch.document_lengths[:3]) == 24
            starts = batch.document_offsets[:-1].long()
            assert (batch.positions_BS.flatten()[starts] == 0).all() and (batch.positions_BS == 0).sum() == 6


def test_the_defaults_run_on_a_gpu():
    """Attention must read the documents on the device, which torch's kernel does in 16 bits alone."""
    options, kernels = GraphOptions(), replace(REFERENCE, name="triton")
    assert why_not_varlen(kernels, device=torch.device("cuda"), dtype=TORCH_DTYPES[options.dtype]) is None
    assert FLASH2.why_not(head_dim=options.hidden // options.heads, capability=(9, 0)) is None


def test_on_a_cpu_that_is_asked_for_the_step_without_graphs_runs_alone():
    table = graph.run(GraphOptions(**{**TINY, "dtype": "float32"}, device="cpu", lengths="24", documents=3, repeats=2))
    assert [row[0] for row in table.rows] == [f"{24 * TINY.get('rows', 1)} tokens, {EAGER}"]
    assert "A CPU has no graphs: the step without them alone." in table.findings


def test_without_a_gpu_there_is_nothing_to_measure():
    with pytest.raises(UserError, match="torch sees no GPU"):
        graph.run(GraphOptions(**TINY))
    with pytest.raises(UserError, match="less than 2 tokens"):
        GraphOptions(**TINY, lengths="512,8", documents=8)
    with pytest.raises(UserError, match="--lengths is 'a'"):
        GraphOptions(**TINY, lengths="a")
