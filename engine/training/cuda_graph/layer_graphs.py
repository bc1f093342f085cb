"""Graphs of single layers, forward and backward apart: for pipelines, and where loss and optimizer stay as they are.

Embedding, head, loss, transfers between stages, reduction and optimizer are launched by the host as usual. A layer is
replayed inside autograd as one function. Beyond torch's own graphed callables, it needs chaining: a layer's output lies
where the next one reads its input, and all layers of a micro-batch share one pool of memory, captured in the order in
which it is replayed: all forwards, then all backwards from the last on. Gradients between layers pass through two
tensors in turn, at a copy each; one for each layer would be allocated for good.

Several micro-batches of a stage may be alive at once under a pipeline; each has a slot, with its own graphs and memory.
A slot is free again when its backward is done.

Gradients are added to their sinks by the captured kernels, but a sink's report is a call on the host, which a replay
does not make. The call is made when a layer's backward has been launched, so that full buckets leave for the
data-parallel sum while the layers below are still to come, as without graphs. Until then a stage's layers do not take
part in the reduction: their parameters are announced to it one layer at a time, in the stage's last backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from engine.batch import Batch
from engine.layers.graph_capture import Capture, Replayable
from engine.layers.module import ShardEntry, shard_entries
from engine.models.decoder import Decoder
from engine.ops.attention.token_context import TokenContext
from engine.training.cuda_graph.static_batch import StaticBatch, StaticShape

StartReduction = Callable[[Iterable[ShardEntry]], None]


class _GraphedLayer:
    """One layer's two graphs, on one slot.

    Args:
        layer: of the model.
        context: of the slot, static.
        x: static input; requires a gradient where something below it trains.
        dy, dx: static gradients of the output and of the input.
    """

    def __init__(self, layer: nn.Module, context: TokenContext, x: Tensor, dy: Tensor, dx: Tensor) -> None:
        self.entries = tuple(shard_entries(layer))
        self._layer, self._context = layer, context
        self._x, self._dy, self._dx = x, dy, dx
        self._live: Tensor | None = None
        self._forward: Replayable | None = None
        self._backward: Replayable | None = None
        self._anchor = torch.empty(0, device=x.device, requires_grad=True)
        self.start: StartReduction | None = None

    def capture_forward(self, capture: Capture, pool: Any) -> Tensor:
        """Returns the static output; requires a gradient where there will be a backward."""
        self._forward = capture.capture(self._run_forward, pool)
        assert self._live is not None
        return self._forward.outputs[0].detach().requires_grad_(self._live.requires_grad)

    def capture_backward(self, capture: Capture, pool: Any) -> None:
        """Captures backward, after the forwards of all layers and the backwards of those above."""
        assert self._live is not None
        if self._live.requires_grad:
            self._backward = capture.capture(self._run_backward, pool)
        self._live = None

    def _run_forward(self) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            self._live = self._layer(self._x, self._context)
        return (self._live.detach(),)

    def _run_backward(self) -> tuple[Tensor, ...]:
        # nothing may keep these nodes: they would tie later steps to this capture
        live, self._live = self._live, None
        torch.autograd.backward(live, self._dy)
        if self._x.grad is not None:
            self._dx.copy_(self._x.grad)
            self._x.grad = None
        return ()

    def __call__(self, x: Tensor) -> Tensor:
        if self._backward is not None:
            return _Replay.apply(self, x, self._anchor)
        with torch.no_grad():
            return self.replay_forward(x)

    def replay_forward(self, x: Tensor) -> Tensor:
        assert self._forward is not None
        if x.data_ptr() != self._x.data_ptr():
            self._x.copy_(x)
        self._forward.replay()
        return self._forward.outputs[0].detach()

    def replay_backward(self, dy: Tensor) -> Tensor | None:
        assert self._backward is not None
        if dy.data_ptr() != self._dy.data_ptr():
            self._dy.copy_(dy)
        self._backward.replay()
        start, self.start = self.start, None
        if start is not None:
            start(self.entries)
            for sink in [entry.sink for entry in self.entries if entry.sink is not None]:
                for _ in range(sink.uses):
                    sink.added()
        return self._dx.detach() if self._x.requires_grad else None


class _Replay(torch.autograd.Function):
    """A layer as autograd sees it. The anchor says that the output needs a backward where the input does not."""

    @staticmethod
    def forward(ctx: Any, layer: _GraphedLayer, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.layer = layer
        return layer.replay_forward(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None]:
        return None, ctx.layer.replay_backward(dy), None


class Slot:
    """Graphs and memory for one micro-batch that is alive.

    Args:
        model: the stage's part.
        step: 0-dim int64 optimizer steps taken.
        shape: of the micro-batch.
        capture: the way to capture.
        gives_gradient: whether the layers' input needs a gradient.
    """

    def __init__(
        self, model: Decoder, step: Tensor, shape: StaticShape, capture: Capture, *, gives_gradient: bool
    ) -> None:
        self._place = StaticBatch(shape, step.device)
        pool = capture.new_pool()
        made: list[TokenContext] = []

        def make_context() -> tuple[Tensor, ...]:
            context = model.context(self._place.batch, step, training=True)
            if not made:
                made.append(context)
            values = (getattr(context, field.name) for field in fields(context))
            return tuple(value for value in values if isinstance(value, Tensor))

        self._context_graph = capture.capture(make_context, pool)
        self.context = made[0]
        size = (self.context.local_token_index.shape[0], model.config.hidden)
        x, *gradients = (torch.zeros(size, dtype=model.dtype, device=step.device) for _ in range(3))
        x.requires_grad_(gives_gradient)
        self._layers: list[_GraphedLayer] = []
        for index, layer in enumerate(model.layers):
            dy, dx = gradients[(index + 1) % 2], gradients[index % 2]
            self._layers.append(_GraphedLayer(layer, self.context, x, dy, dx))
            x = self._layers[-1].capture_forward(capture, pool)
        for graphs in reversed(self._layers):
            graphs.capture_backward(capture, pool)

    def load(self, batch: Batch) -> None:
        """Takes a micro-batch that fits."""
        self._place.load(batch)
        self._context_graph.replay()

    def run_layers(self, x: Tensor) -> Tensor:
        """Runs the layers on the micro-batch that was loaded. The output stays until its backward is done."""
        for layer in self._layers:
            x = layer(x)
        return x

    def reduce_with(self, start: StartReduction) -> None:
        """Announces and reports each layer's gradients, as the next backward is the stage's last."""
        for layer in self._layers:
            layer.start = start


class StageGraphs:
    """The slots of one stage.

    Args:
        model, step, shape, capture, gives_gradient: see `Slot`.
        num_slots: micro-batches that are alive at once, at most.
    """

    def __init__(
        self,
        model: Decoder,
        step: Tensor,
        shape: StaticShape,
        capture: Capture,
        *,
        gives_gradient: bool,
        num_slots: int,
    ) -> None:
        self._shape = shape
        self._free = [Slot(model, step, shape, capture, gives_gradient=gives_gradient) for _ in range(num_slots)]
        self._taken: dict[int, Slot] = {}
        layers = {id(entry.parameter) for entry in shard_entries(model.layers)}
        self.others = [entry for entry in shard_entries(model) if id(entry.parameter) not in layers]
        """Parameters outside of the layers."""

    def take(self, microbatch: int, batch: Batch) -> Slot | None:
        """Returns a slot with the batch in it; None where it does not fit."""
        if not self._shape.fits(batch):
            return None
        slot = self._taken[microbatch] = self._free.pop()
        slot.load(batch)
        return slot

    def of(self, microbatch: int) -> Slot | None:
        """Returns the slot that the micro-batch took."""
        return self._taken.get(microbatch)

    def release(self, microbatch: int) -> None:
        """Frees a micro-batch's slot, after its backward."""
        slot = self._taken.pop(microbatch, None)
        if slot is not None:
            self._free.append(slot)
