"""Builds a step that replays graphs from the options, or gives the reason why there can be none."""

from __future__ import annotations

from typing import TypeAlias

import torch

from engine.config.run import RunConfig
from engine.errors import UserError
from engine.layers.graph_capture import CudaCapture
from engine.models.decoder_config import DecoderConfig
from engine.ops.attention.varlen import AttentionChoice
from engine.training.cuda_graph.static_batch import StaticShape, document_capacity
from engine.training.cuda_graph.step_graph import LayerGraphs, StepGraph
from engine.training.rank_stages import Stages
from engine.training.step import TrainStep

Graphs: TypeAlias = StepGraph | LayerGraphs


def check_graphs(config: RunConfig, device: torch.device, attention: AttentionChoice, decoder: DecoderConfig) -> None:
    """Checks that this machine and this model's attention allow the requested graphs.

    Raises:
        UserError: they do not; gives the reason.
    """
    graph = config.memory.cuda_graph
    if graph == "none":
        return
    if device.type != "cuda":
        raise UserError(
            f"memory.cuda_graph is {graph}, but this run is on {device.type}, and CUDA graphs need a GPU: set "
            "memory.cuda_graph to none."
        )
    if not attention.on_device:
        raise UserError(
            f"memory.cuda_graph is {graph}, but attention reads the documents' lengths on the host, which a graph "
            f"cannot ({attention.sentence}): set memory.cuda_graph to none, or change the attention that it names."
        )
    length = config.row_length
    windows = [kind.window for kind in decoder.layer_kinds if kind.window is not None]
    if decoder.attention_softcap is not None or min(windows, default=length) < length:
        raise UserError(
            f"memory.cuda_graph is {graph}, but this {decoder.family} model has attention with a cap on scores, or "
            f"that sees less than a row's {length} tokens, and that is computed from lengths on the host: set "
            "memory.cuda_graph to none, or, where there is no cap, data.seq_length to the model's window."
        )
    # a graph has places for tokens alone: not for images, nor for which tokens stand for them
    for variant in decoder.variants:
        if (obstacle := variant.graph_obstacle(decoder.family)) is not None:
            raise UserError(f"memory.cuda_graph is {graph}, but {obstacle}: set memory.cuda_graph to none.")
    if decoder.rope_axes or any(front.adds_levels for front in decoder.fronts):
        raise UserError(
            f"memory.cuda_graph is {graph}, but positions of tokens of this {decoder.family} model, or features added "
            "to them in its first layers, change with the images of a micro-batch: set memory.cuda_graph to none."
        )
    if graph == "step" and decoder.fronts:
        raise UserError(
            "memory.cuda_graph is step, but the sizes of a micro-batch's images are known on the host only: set "
            "memory.cuda_graph to layer or none."
        )


def build_graphs(
    config: RunConfig,
    step: TrainStep,
    stages: Stages,
    *,
    device: torch.device,
    num_microbatches: int,
    data_ranks: int,
    most_documents: int | None,
) -> Graphs:
    """Builds the graphed step that the loop calls in place of `step`.

    Args:
        device: the GPU; see `check_graphs`.
        num_microbatches: of a step, on each rank.
        data_ranks: data-parallel ranks.
        most_documents: in any row of the training data, which size the graphs.

    Raises:
        UserError: memory.graph_documents does not fit the data.
    """
    graph, rows = config.memory.cuda_graph, config.train.micro_batch_size
    assert most_documents is not None, "graphs are sized by the data"
    capacity = document_capacity(
        config.memory.graph_documents,
        rows=rows,
        max_documents_per_row=most_documents,
        uniform=graph == "step" and data_ranks > 1,
    )
    shape = StaticShape(rows=rows, length=config.row_length, documents=capacity)
    capture = CudaCapture(device)
    if graph == "layer":
        return LayerGraphs(step, stages, capture, shape)
    return StepGraph(step, capture, shape, num_microbatches=num_microbatches, device=device)


def graphs_sentence(graphs: Graphs) -> str:
    """Returns the sentence for the log."""
    shape = graphs.shape
    what = "the whole step" if isinstance(graphs, StepGraph) else "each layer's forward and backward"
    return (
        f"CUDA graphs: {what}, for micro-batches of {shape.rows} x {shape.length} tokens in at most {shape.documents} "
        "documents"
    )
