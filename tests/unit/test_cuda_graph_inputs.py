"""What a graph reads and what it may ask: the contract of its inputs, what fits, what is refused, what is counted."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.batch import Batch, Embeddings
from engine.config.data import DataOptions
from engine.config.memory import MemoryOptions
from engine.config.model import ModelOptions
from engine.config.parallel import ParallelOptions
from engine.config.rules import check_config
from engine.config.run import RunConfig
from engine.errors import UserError
from engine.kernels.reference_quantize import dynamic_map, nf4_values
from engine.layers.recompute import MemoryPlan
from engine.models.layer_records import LayerKind
from engine.models.ropes import Rope
from engine.ops.attention.varlen import AttentionChoice
from engine.ops.kernels import REFERENCE
from engine.pipeline.schedules import make_schedule
from engine.training.cuda_graph.build import check_graphs
from engine.training.cuda_graph.counts import GraphCounts
from engine.training.cuda_graph.static_batch import StaticBatch, document_capacity
from engine.training.rank_stages import max_in_flight
from engine.vision.layers.cross_attention import CrossAttentionSizes
from engine.vision.layers.fronts import ImageTower
from engine.vision.layers.token_experts import TokenExperts
from tests.distributed.cases import make_batch
from tests.support.graph_training import CASES, CPU, LENGTH, ON_DEVICE, SHAPE, graph_config
from tests.support.memory_models import build_with
from tests.support.sweeps import sampled
from tests.support.toy_vision import ToyVisionConfig

META = torch.device("meta")


class _NoNewTensors(TorchFunctionMode):
    """Fails where the host makes a tensor of its own numbers, which a GPU would have to wait for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func in (torch.tensor, torch.from_numpy) or (func is torch.as_tensor and not isinstance(args[0], Tensor))
        assert not made, f"{func} hands the device a tensor"
        return func(*args, **(kwargs or {}))


class _OneDevice(TorchDispatchMode):
    """Fails where a tensor of the host takes part. Fused AdamW has no form without content and is left out."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        assert all(tensor.device == META or not tensor.numel() for tensor in tensors), f"{func} reads the host"
        if func is torch.ops.aten._scaled_mm.out:  # torch has it for devices alone
            return (kwargs or {})["out"]
        return None if func.__name__.startswith("_fused_adamw_") else func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("case", "recompute"),
    sampled(
        product(CASES, ("none", "selective", "full")),
        [*((case, "selective") for case in CASES), ("adapters", "none"), ("adapters", "full"), ("everything", "full")],
    ),
)
def test_a_step_asks_the_device_nothing(case: str, recompute: str):
    """On tensors without content every question, float() or a branch, is an error of torch."""
    built = build_with(CASES[case], MemoryPlan(recompute=recompute), kernels=ON_DEVICE, device=META)
    built.model.inverse_frequencies = tuple(table.to(META) for table in built.model.inverse_frequencies)
    places = [StaticBatch(SHAPE, META) for _ in range(2)]
    built.step.prepare(40.0, 1e-3)
    for table in (nf4_values, dynamic_map):  # of codes, made once for a device
        table(META)
    with _NoNewTensors(), _OneDevice():
        result = built.step.on_device([place.batch for place in places])
    assert result.loss.device == META


def test_a_question_would_be_noticed():
    x = torch.ones(3, device=META)
    with pytest.raises(RuntimeError, match="meta"):
        float(x.sum())
    with pytest.raises(RuntimeError, match="meta"):
        bool(x.sum() > 0)
    with _NoNewTensors(), pytest.raises(AssertionError, match="hands the device"):
        torch.tensor([1, 2], device=META)
    host = torch.ones(3)
    with _OneDevice(), pytest.raises(AssertionError, match="reads the host"):
        x.copy_(host)


# The contract of a graph's inputs.


def _batch(*rows: tuple[int, ...], length: int = LENGTH) -> Batch:
    return make_batch(enumerate(rows), row_length=length, seq_length=LENGTH, vocab_size=50, seed=3)


def test_offsets_are_padded_by_repeating_the_last():
    place = StaticBatch(SHAPE, CPU)
    place.load(_batch((4, 4, 16), (24,)))
    assert place.batch.document_offsets.tolist() == [0, 4, 8, 24, 48, 48, 48]
    place.load(_batch((24,), (20,)))
    assert place.batch.document_offsets.tolist() == [0, 24, 48, 48, 48, 48, 48]
    place.load(_batch((1, 2, 21), (3, 4, 17)))
    assert place.batch.document_offsets.tolist() == [0, 1, 3, 24, 27, 31, 48]


def test_what_is_loaded_lies_where_the_graph_reads_it():
    place = StaticBatch(SHAPE, CPU)
    addresses = [tensor.data_ptr() for tensor in _tensors(place.batch)]
    batch = _batch((5, 19), (24,))
    place.load(batch)
    assert [tensor.data_ptr() for tensor in _tensors(place.batch)] == addresses
    for mine, other in zip(_tensors(place.batch)[:-1], _tensors(batch)[:-1], strict=True):
        assert torch.equal(mine, other) and mine.dtype == other.dtype
    assert place.batch.document_lengths == (), "a graph cannot depend on what the host knows"


def _tensors(batch: Batch) -> list[Tensor]:
    return [
        batch.tokens_BS, batch.labels_BS, batch.positions_BS, batch.token_index_BS, batch.loss_weights_BS,
        batch.document_offsets,
    ]  # fmt: skip


def test_a_place_holds_a_batch_from_the_start():
    batch = StaticBatch(SHAPE, CPU).batch
    assert (
        batch.document_offsets.tolist() == [0, 24, 48, 48, 48, 48, 48] and batch.document_offsets.dtype == torch.int32
    )
    assert batch.loss_weights_BS.sum() == 0 and (batch.labels_BS < 0).all()
    assert batch.positions_BS.tolist() == [list(range(24))] * 2


def test_what_fits():
    assert SHAPE.fits(_batch((24,), (20,))) and SHAPE.fits(_batch((1, 2, 21), (3, 4, 17)))
    assert not SHAPE.fits(_batch((1, 2, 21), (3, 4, 5, 12))), "seven documents"
    assert not SHAPE.fits(_batch((24,)))
    assert not SHAPE.fits(replace(_batch((1, 2, 21), (20,)), document_parents=(-1, 0, 0, -1))), "branches"
    assert not SHAPE.fits(_batch((20,), (20,), length=20))
    assert not SHAPE.fits(_batch((24,), (24,)).with_parts(Embeddings(embeddings_TH=torch.zeros(48, 4))))


def test_capacity():
    common = {"rows": 2, "uniform": False}
    assert document_capacity(None, max_documents_per_row=5, **common) == 10
    assert document_capacity(None, max_documents_per_row=500, **common) == 64
    assert document_capacity(None, rows=2, max_documents_per_row=500, uniform=True) == 1000
    assert document_capacity(7, max_documents_per_row=500, **common) == 7
    with pytest.raises(UserError, match="memory.graph_documents is 1, .* 2 rows"):
        document_capacity(1, max_documents_per_row=5, **common)
    with pytest.raises(UserError, match="memory.graph_documents is 64, .* set memory.graph_documents to 100 or null"):
        document_capacity(64, rows=2, max_documents_per_row=50, uniform=True)


def test_slots_are_as_many_as_micro_batches_wait_for_their_backward():
    """1F1B keeps at most p - s micro-batches on stage s (Narayanan et al., arXiv 2104.04473, section 2.2)."""
    for ranks, micro in ((1, 4), (2, 4), (4, 8), (4, 2)):
        schedule = make_schedule("1f1b", ranks, 1, micro, 0)
        found = [max_in_flight(schedule.actions[rank], rank) for rank in range(ranks)]
        assert found == [min(ranks - rank, micro) for rank in range(ranks)]
    upper = make_schedule("1f1b", 2, 1, 4, 1)
    assert [max_in_flight(upper.actions[rank], rank) for rank in range(2)] == [0, 1]


# What is refused, and what is said.

DATA = DataOptions(packing=True)


def _run_config(memory: MemoryOptions, **sections: Any) -> RunConfig:
    return RunConfig(model=ModelOptions(path="x"), memory=memory, **{"data": DATA, **sections})


CLASHES = [
    ("step", {"data": DataOptions()}, {}, "data.packing is false"),
    ("layer", {"data": DataOptions()}, {}, "data.packing is false"),
    ("step", {"parallel": ParallelOptions(context=2)}, {}, "parallel.context is 2"),
    ("layer", {"parallel": ParallelOptions(context=2)}, {}, "parallel.context is 2"),
    ("step", {}, {"offload_activations": True}, "memory.offload_activations is true"),
    ("layer", {}, {"offload_activations": True}, "memory.offload_activations is true"),
    ("step", {"parallel": ParallelOptions(pipeline=2)}, {}, "parallel.pipeline is 2"),
    ("layer", {"parallel": ParallelOptions(pipeline=2, schedule="zb_h1")}, {}, "parallel.schedule is zb_h1"),
    ("layer", {"parallel": ParallelOptions(pipeline=2, schedule="zb_v")}, {}, "parallel.schedule is zb_v"),
    ("layer", {}, {"recompute": "attention"}, "memory.recompute is attention"),
    ("layer", {}, {"recompute": "full"}, "memory.recompute is full"),
    ("layer", {}, {"activation_dtype": "float8"}, "memory.activation_dtype is float8"),
]


@pytest.mark.parametrize(("graph", "sections", "memory", "words"), CLASHES)
def test_what_a_graph_cannot_hold_is_refused(graph: str, sections: dict, memory: dict, words: str):
    with pytest.raises(UserError, match=words) as caught:
        check_config(_run_config(MemoryOptions(cuda_graph=graph, **memory), **sections))
    message = str(caught.value)
    assert message.startswith(f"memory.cuda_graph is {graph} and ") and message.count(". ") == 0
    check_config(_run_config(MemoryOptions(**memory), **{"data": DATA, **sections}))


@pytest.mark.parametrize(
    ("graph", "sections", "memory"),
    [
        ("step", {}, {"recompute": "full"}),
        ("step", {}, {"activation_dtype": "float8"}),
        ("step", {"parallel": ParallelOptions(tensor=2)}, {}),
        ("layer", {"parallel": ParallelOptions(pipeline=2)}, {"graph_documents": 9}),
        ("layer", {"parallel": ParallelOptions(pipeline=2, schedule="interleaved")}, {"recompute": "none"}),
    ],
)
def test_what_a_graph_can_hold(graph: str, sections: dict, memory: dict):
    check_config(_run_config(MemoryOptions(cuda_graph=graph, **memory), **sections))


def test_a_size_without_a_graph_is_refused():
    with pytest.raises(UserError, match="memory.graph_documents is 8 and memory.cuda_graph is none"):
        MemoryOptions(graph_documents=8)
    with pytest.raises(UserError, match="memory.cuda_graph is 'off'"):
        MemoryOptions(cuda_graph="off")  # type: ignore[arg-type]


def _choice(*, on_device: bool) -> AttentionChoice:
    return AttentionChoice(kernels=REFERENCE, on_device=on_device, sentence="attention: by document: because")


def test_graphs_need_a_gpu_and_attention_that_reads_the_device():
    config, gpu = _run_config(MemoryOptions(cuda_graph="step")), torch.device("cuda")
    plain = graph_config()
    with pytest.raises(UserError, match="memory.cuda_graph is step, but this run is on cpu"):
        check_graphs(config, CPU, _choice(on_device=True), plain)
    with pytest.raises(UserError, match=r"lengths on the host.*\(attention: by document: because\)"):
        check_graphs(config, gpu, _choice(on_device=False), plain)
    check_graphs(config, gpu, _choice(on_device=True), plain)
    check_graphs(_run_config(MemoryOptions()), CPU, _choice(on_device=False), plain)


def test_attention_that_masks_by_lengths_on_the_host_is_refused():
    config, gpu = _run_config(MemoryOptions(cuda_graph="layer"), data=DataOptions(packing=True, seq_length=64)), "cuda"
    kinds = (LayerKind(window=64), LayerKind(), LayerKind())
    check_graphs(config, torch.device(gpu), _choice(on_device=True), graph_config(layer_kinds=kinds))
    for model in (graph_config(layer_kinds=(LayerKind(window=63), *kinds[1:])), graph_config(attention_softcap=50.0)):
        with pytest.raises(UserError, match="less than a row.s 64 tokens"):
            check_graphs(config, torch.device(gpu), _choice(on_device=True), model)


@pytest.mark.parametrize(
    ("model", "graphs"),
    [
        ({"fronts": (ImageTower(model=ToyVisionConfig()),)}, ("layer",)),
        ({"variants": (TokenExperts(qkv_bias=False),), "fronts": (ImageTower(model=ToyVisionConfig()),)}, ()),
        ({"ropes": (Rope(theta=1e4, axes=(0, 1, 2)),), "fronts": (ImageTower(model=ToyVisionConfig()),)}, ()),
        ({"fronts": (ImageTower(model=ToyVisionConfig(), deepstack=1),)}, ()),
        ({"variants": (CrossAttentionSizes(encoded=12, width=32),)}, ()),
    ],
)
def test_what_changes_with_a_micro_batchs_images_is_in_no_graph(model: dict, graphs: tuple[str, ...]):
    gpu, decoder = torch.device("cuda"), graph_config(**model)
    for graph in ("step", "layer"):
        with nullcontext() if graph in graphs else pytest.raises(UserError, match=f"is {graph}, but .* images"):
            check_graphs(_run_config(MemoryOptions(cuda_graph=graph)), gpu, _choice(on_device=True), decoder)


def test_counts_are_told():
    counts = GraphCounts("steps", warmup=3, replayed=40, beside=2)
    assert counts.line() == "40 steps replayed, 3 before the capture, 2 beside the graph (they did not fit)"
