"""Memory options: storage of tensors, recomputation, and replay as CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.choices import Recompute
from engine.config.checks import require, require_at_least, require_choices
from engine.config.option import IGNORED, REPORTED, option

ActivationDType = Literal["bfloat16", "float8"]
CudaGraph = Literal["none", "layer", "step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryOptions:
    """Memory: storage of tensors, recomputation in the backward pass, and replay as CUDA graphs.

    Args:
        recompute: Parts of a layer that backward recomputes. "none" keeps everything; "selective" recomputes norms and
            SwiGLU; "attention" recomputes the attention block too; "full" recomputes each layer from its input. Later
            choices take less memory and more time.
        recompute_layers: How many layers, counted from the first, use memory.recompute "attention" or "full"; the
            others use "selective". null means all layers.
        offload_activations: Keep activations for backward in host memory, and prefetch them one layer ahead of their
            use. Needs a GPU.
        offload_weights: Keep frozen weights in host memory, and prefetch each layer's while the previous layer
            computes, in forward and again in backward. At most two layers of frozen weights are on the device at a
            time.
        offload_optimizer: Keep the fp32 master weights and both moments of AdamW in host memory, and bring them to the
            device piece by piece for the update.
        activation_dtype: Precision in which activations are kept for backward: "bfloat16", or "float8" (e4m3 with one
            scale a token). null keeps them as they are. The rounding error is reported after the first step.
        cuda_graph: Parts of a step that are captured after a few steps and replayed from then on, so that the GPU does
            not wait for the CPU to launch its kernels. "layer" is the forward and the backward of each layer; "step" is
            the whole step, reduction and optimizer included; "none" replays nothing. Needs a GPU and data.packing,
            whose rows are equally long. A micro-batch that does not fit runs without a graph, and is counted in the
            summary. A vision-language model has "layer" at most, and none where its layers depend on the images.
        graph_documents: Maximum number of documents in a micro-batch that is replayed; unused ones cost a little.
            null means 32 per row, or fewer where the data has fewer; with data parallelism, as many as
            the data may ask for.
    """

    recompute: Recompute = option("selective", IGNORED)
    recompute_layers: int | None = option(None, IGNORED)
    offload_activations: bool = option(False, IGNORED)
    offload_weights: bool = option(False, IGNORED)
    offload_optimizer: bool = option(False, IGNORED)
    activation_dtype: ActivationDType | None = option(None, REPORTED)
    cuda_graph: CudaGraph = option("none", IGNORED)
    graph_documents: int | None = option(None, IGNORED)

    def __post_init__(self) -> None:
        require_choices("memory", self)
        if self.recompute_layers is not None:
            require_at_least("memory.recompute_layers", self.recompute_layers, 1, "use null for all layers")
            require(
                self.recompute in ("attention", "full"),
                f"memory.recompute_layers is {self.recompute_layers} and memory.recompute is {self.recompute}, which "
                "treats all layers alike: set memory.recompute to attention or full, or memory.recompute_layers to "
                "null.",
            )
        if self.graph_documents is not None:
            require_at_least("memory.graph_documents", self.graph_documents, 1, "use null for a number that fits")
            require(
                self.cuda_graph != "none",
                f"memory.graph_documents is {self.graph_documents} and memory.cuda_graph is none, so there is no graph "
                "that it could size: set memory.cuda_graph to step or layer, or memory.graph_documents to null.",
            )
