"""A part of the model as a pipeline stage: forward and backward of loaded micro-batches, and the kinds of pass that
these take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from engine.batch import Batch
from engine.distributed.operations import LOG
from engine.layers.module import ShardEntry, shard_entries
from engine.models.decoder import Decoder
from engine.models.head_figures import TokenFigures
from engine.objectives.objective import Objective
from engine.ops.attention.token_context import AdapterChoice, AuxiliaryLoss, TokenContext
from engine.pipeline.schedule import Kind
from engine.seams import resolve

if TYPE_CHECKING:
    from engine.layers.graph_capture import Capture
    from engine.training.cuda_graph.layer_graphs import StageGraphs
    from engine.training.cuda_graph.static_batch import StaticShape


ReadHead = Callable[[Decoder, Tensor, Batch, TokenContext], Tensor]
"""Computes a result from the last layer's output [T, hidden], in place of a loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """A kind of pass.

    Args:
        training: whether layers run as they do in training, with dropout and counted routers.
        gradients: whether a backward follows.
        adapters: False leaves them out; not in training.
        head: the result on the last stage. The "loss" of the objective, its "reference" (which the next pass of the
            same micro-batches is compared with), "nothing", or the result of a function of the last layer's output.
    """

    training: bool = False
    gradients: bool = False
    adapters: bool = True
    head: Literal["loss", "reference", "nothing"] | ReadHead = "loss"


TRAINING = Pass(training=True, gradients=True)
COUNTING_PASS = Pass(training=True, head="nothing")
"""Training's layers without a backward: routers are counted."""
EVALUATION = Pass()
REFERENCE = Pass(head="reference")
BASE_REFERENCE = Pass(adapters=False, head="reference")
"""The reference is the model without adapters."""


def _own_adapters(batch: Batch) -> None:
    return None


class ModelStage:
    """One stage; by default the whole model.

    Args:
        model: the stage's part, on its device.
        objective: turns token losses into the loss.
        device: of the batches.
        trains: whether the stage, or one below it, has a trainable parameter; else it has no backward.
        gives_gradient: whether a stage below has a trainable parameter, so that the input's gradient is wanted.
        step: 0-dim int64 that the stages of a rank share; None makes one.
        loss_scale: 0-dim fp32 that the loss is multiplied by before backward; None for 1.
        balance: the auxiliary loss of routers, which the stages of a rank share; None without one.
        choose: a micro-batch -> the adapters of its tokens; None for those of the model.
    """

    def __init__(
        self,
        model: Decoder,
        objective: Objective,
        device: torch.device,
        *,
        trains: bool = True,
        gives_gradient: bool = False,
        step: Tensor | None = None,
        loss_scale: Tensor | None = None,
        balance: AuxiliaryLoss | None = None,
        choose: Callable[[Batch], AdapterChoice | None] = _own_adapters,
    ) -> None:
        self._choose = choose
        self.model, self._balance = model, balance
        self.objective, self._device = objective, device
        self._trains, self._gives_gradient = trains, gives_gradient
        self.entries: list[ShardEntry] = list(shard_entries(model))
        self._batches: list[Batch] = []
        self._alive: dict[int, tuple[Tensor | None, Tensor]] = {}
        self._deferred: dict[int, list[Callable[[], None]]] = {}
        self._graphs: StageGraphs | None = None
        self._start_reduction: Callable[[Iterable[ShardEntry]], None] | None = None
        self._pass = TRAINING
        self._loss_scale = loss_scale
        self._scale = torch.ones((), dtype=torch.float32, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device) if step is None else step
        """Optimizer steps taken; the dropout coordinate, on the device so that a graph can replay it."""
        self.sums = torch.zeros(1 + len(objective.metrics), dtype=torch.float32, device=device)
        """fp32 [1 + metrics]: this rank's loss and metrics, added up since `load`; 0 but on the last stage."""
        self.maxima = torch.zeros(len(objective.maxima), dtype=torch.float32, device=device)
        """fp32 [maxima]: the largest of this rank since `load`; -inf but on the last stage."""
        self.references: dict[int, Tensor] = {}
        """The reference's results by micro-batch; empty but on the last stage."""
        self.baseline = torch.zeros((), dtype=torch.float32, device=device)
        """0-dim fp32, the objective's baseline over the global batch; its value only on the last stage and where the
        objective has one."""

    def without_graphs(self) -> ModelStage:
        """Returns a stage of the same part of the model whose layers run one by one."""
        return ModelStage(
            self.model,
            self.objective,
            self._device,
            trains=self._trains,
            gives_gradient=self._gives_gradient,
            step=self.step,
            loss_scale=self._loss_scale,
            balance=self._balance,
            choose=self._choose,
        )

    @property
    def loss_sum(self) -> Tensor:
        """0-dim fp32, this rank's loss since `load`."""
        return self.sums[0]

    def load(self, batches: list[Batch], target_count: Tensor | float, kind: Pass = TRAINING) -> None:
        """Takes this rank's micro-batches of a step.

        Args:
            batches: one per micro-batch, on the device.
            target_count: sum of the loss weights over the *global* batch; gradients are divided by it. A number, or a
                0-dim fp32 tensor on the device.
            kind: of the pass. `references` keeps its result where that is no loss.
        """
        self._batches, self._pass = batches, kind
        if not isinstance(target_count, Tensor):
            target_count = torch.full_like(self.sums[0], target_count)
        self._scale = target_count.clamp(min=1.0).reciprocal()
        if self._loss_scale is not None:
            self._scale = self._scale * self._loss_scale
        self.sums.zero_()
        self.maxima.fill_(-torch.inf)

    def forward(self, microbatch: int, activation: Tensor | None = None) -> Tensor | None:
        """See engine.pipeline.runner.Stage."""
        batch, model, kind = self._batches[microbatch], self.model, self._pass
        keeps = kind.gradients and self._trains
        if activation is not None and keeps and self._gives_gradient:
            activation.requires_grad_()
        with nullcontext() if keeps else torch.no_grad():
            x, carried = (
                (model.embed(batch, adapters=kind.adapters, step=self.step if kind.training else None), [])
                if activation is None
                else model.unpack(activation, batch)
            )
            slot = self._graphs.take(microbatch, batch) if keeps and self._graphs is not None else None
            if slot is None:
                context = model.context(
                    batch,
                    self.step,
                    training=kind.training,
                    adapters=kind.adapters,
                    carried=carried,
                    choice=self._choose(batch),
                    parts=(self._balance,) if kind.training and self._balance is not None else (),
                )
                out = model.run_layers(x, context)
            else:
                context, out = slot.context, slot.run_layers(x)
            if model.head is not None and callable(kind.head):
                self.references[microbatch] = kind.head(model, out, batch, context)
            elif model.head is not None and kind.head != "nothing":
                objective = self.objective
                head_loss = objective.head_loss if kind.head == "loss" else None
                figures = model.token_figures(
                    out,
                    batch,
                    context,
                    temperature=objective.temperature,
                    entropies=objective.entropy_use if kind.head == "loss" else "none",
                    block_loss=None if head_loss is None else head_loss(batch),
                )
                out = self._loss(microbatch, figures)
            message = None if model.head is not None else model.pack(out, context)
        if keeps:
            if message is not None:
                rows = model.message_rows(batch, model.part.last, of_gradient=True)
                if rows > out.shape[0]:  # gradients of rows below the stream come back with its own
                    out = message[:rows]
            self._alive[microbatch] = activation, out
        LOG.progressed(on_device=True)  # on a single device, and in a long accumulation, nothing else shows it
        return None if message is None else message.detach()

    def _loss(self, microbatch: int, figures: TokenFigures) -> Tensor:
        """Returns the 0-dim loss of a micro-batch, or the reference result that it will be compared with."""
        batch = self._batches[microbatch]
        if self._pass.head == "reference":
            self.references[microbatch] = self.objective.reference(figures.losses_T, batch)
            return self.references[microbatch]
        reference = self.references.pop(microbatch, None)
        found = self.objective.sums(figures.losses_T, batch, reference, self.baseline, figures.entropies_T)
        self.sums.add_(found.figures)
        if found.maxima is not None:
            torch.maximum(self.maxima, found.maxima, out=self.maxima)
        return found.loss

    def backward(
        self, microbatch: int, gradient: Tensor | None = None, *, defer_weights: bool = False
    ) -> Tensor | None:
        """See engine.pipeline.runner.Stage."""
        activation, out = self._alive.pop(microbatch)
        if self._balance is not None:
            self._balance.finish_counts()
        slot = self._graphs.of(microbatch) if self._graphs is not None else None
        start, self._start_reduction = self._start_reduction, None
        if start is not None:
            if self._graphs is None or slot is None:
                start(self.entries)
            else:
                start(self._graphs.others)
                slot.reduce_with(start)
        if gradient is None:
            out = out * self._scale
        if defer_weights:
            assert slot is None, "a graph adds the weights' gradients at once"
            self._deferred[microbatch] = []
            self._defer(self._deferred[microbatch])
        # where each micro-batch has adapters of its own, those of this one may all be above
        if out.requires_grad or self._choose is _own_adapters:
            out.backward(gradient)
        if defer_weights:
            self._defer(None)
        LOG.progressed(on_device=True)
        made = None
        if activation is not None and activation.grad is not None:
            model = self.model
            rows = model.message_rows(self._batches[microbatch], model.part.first, of_gradient=True)
            made = activation.grad[:rows]
        if self._graphs is None or slot is None:
            return made
        self._graphs.release(microbatch)
        return None if made is None else made.clone()  # the slot's next micro-batch writes there while this is sent

    def before_last_backward(self, start: Callable[[Iterable[ShardEntry]], None]) -> None:
        """Announces that the stage's next backward is its last one of the step.

        Args:
            start: called with parameters before their last gradient is reported: their reduction may start with it.
        """
        self._start_reduction = start

    def capture_layers(self, capture: Capture, shape: StaticShape, num_slots: int) -> None:
        """Has the layers of training's micro-batches of this shape replayed from now on. Between two steps.

        Args:
            num_slots: maximum number of micro-batches whose backward is pending at once.
        """
        in_front = [one for one in (self.model.embedding, *self.model.fronts) if one is not None]
        trains_in_front = any(entry.sink is not None for one in in_front for entry in shard_entries(one))
        self._graphs = resolve("engine.training.cuda_graph.layer_graphs:StageGraphs")(
            self.model,
            self.step,
            shape,
            capture,
            gives_gradient=self._gives_gradient or trains_in_front,
            num_slots=num_slots,
        )

    @torch.no_grad()
    def weight_gradients(self, microbatch: int) -> None:
        """See engine.pipeline.runner.Stage."""
        for add in self._deferred.pop(microbatch):
            add()

    def _defer(self, queue: list[Callable[[], None]] | None) -> None:
        for entry in self.entries:
            if entry.sink is not None:
                entry.sink.deferred = queue

    def empty_message(self, kind: Kind, microbatch: int) -> Tensor:
        """See engine.pipeline.runner.Stage."""
        model = self.model
        layer = model.part.first if kind == "activation" else model.part.last
        rows = model.message_rows(self._batches[microbatch], layer, of_gradient=kind == "gradient")
        return torch.empty(rows, model.config.hidden, dtype=model.dtype, device=self._device)
