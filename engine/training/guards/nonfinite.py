"""Locates where a step stopped being finite: its micro-batches are recomputed and inspected module by module.

The second computation is the step's own, with its dropout, on weights that are at most a few updates younger (a step
that is not finite changes none). Forward is inspected in the order of the model, then backward in reverse, in
each rank and micro-batch; the first place of all ranks is where it began, because non-finite numbers spread only
onward. Between the linears there are norms, attention and activations: where a linear's input is not finite and
nothing before it is, it is one of those.

Every inspection waits for the device. The resulting gradients are discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.batch import Batch
from engine.distributed.collectives import gather_objects
from engine.distributed.mesh import Axis
from engine.layers.module import ShardedModule, ShardEntry
from engine.models.decoder import Decoder
from engine.models.decoder_layer import DecoderLayer
from engine.optim.flat import FlatParameters
from engine.pipeline.schedule import Kind
from engine.sentences import listed
from engine.training.guards.replicas import NAMED, ReplicaGuard
from engine.training.stage import ModelStage
from engine.training.step import TrainStep

_FORWARD, _BACKWARD = 0, 1
_BEFORE, _AFTER = 0, 1
_EMBEDDING, _END = -1, 1 << 30


class Place(NamedTuple):
    """A place where a number that is not finite was seen. The order of places is that of the computation.

    Args:
        phase: forward or backward.
        microbatch: of the step, on this data-parallel rank.
        order: of the module, as the computation of this phase meets it.
        what: description of the tensor.
        rank: global.
    """

    phase: int
    microbatch: int
    order: tuple[int, ...]
    what: str
    rank: int

    def text(self) -> str:
        phase = "forward" if self.phase == _FORWARD else "backward"
        return f"{self.what}, in {phase} of micro-batch {self.microbatch}, on rank {self.rank}"


class Located(NamedTuple):
    """The findings of the recomputation.

    Args:
        first: the first places, which differ in nothing but the rank; none where everything was finite this time.
        parameters: weights that are not finite themselves, and on which ranks.
    """

    first: tuple[Place, ...]
    parameters: tuple[tuple[str, int], ...]

    def sentence(self) -> str:
        texts = []
        if self.parameters:
            named = listed((f"{name} on rank {rank}" for name, rank in self.parameters), most=NAMED)
            texts.append(f"weights that are not finite: {named}")
        if self.first:
            ranks = sorted(place.rank for place in self.first)
            where = self.first[0].text()
            texts.append(where if len(ranks) == 1 else f"{where} (and ranks {', '.join(map(str, ranks[1:]))})")
        if not texts:
            return "computed again, the step was finite"
        return f"computed again, the first that is not finite is {'; '.join(reversed(texts))}"


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


class _Watch:
    """The first non-finite place on this rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.phase, self.microbatch = _FORWARD, 0
        self.first: Place | None = None

    def look(self, tensor: object, order: tuple[int, ...], what: str, *, phase: int = _FORWARD) -> None:
        # recomputed tensors have been inspected in forward
        if phase != self.phase or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return
        if _is_finite(tensor):
            return
        place = Place(phase, self.microbatch, order, what, self._rank)
        if self.first is None or place < self.first:
            self.first = place

    def look_in_backward(self, tensor: object, order: tuple[int, ...], what: str) -> None:
        """Looks at the tensor's gradient once it is there."""
        if self.phase == _FORWARD and isinstance(tensor, Tensor) and tensor.requires_grad:
            backward = tuple(-number for number in order)
            microbatch = self.microbatch

            def look(gradient: Tensor) -> None:
                self.microbatch = microbatch
                self.look(gradient, backward, what, phase=_BACKWARD)

            tensor.register_hook(look)


def _name(module: ShardedModule, fallback: str) -> str:
    """Returns the logical linears behind a module: layers.3.attention.q_proj, layers.3.attention.k_proj, .."""
    names = dict.fromkeys(entry.name.rpartition(".")[0] for entry in module.entries if entry.name.endswith(".weight"))
    return ", ".join(names) or fallback


def _modules(model: Decoder) -> Iterable[tuple[nn.Module, tuple[int, ...], str, bool]]:
    """Yields the inspected modules, each with its place among the layers, its name, and whether its input
    is inspected: that of a layer is the output of another."""
    if model.embedding is not None:
        yield model.embedding, (_EMBEDDING,), "embed_tokens", False
    for index, (name, layer) in enumerate(model.called_layers.items(), model.part.first):
        for module, what in _inner(layer, name):
            yield module, (index,), what, True
        yield layer, (index,), name, False


def _inner(layer: nn.Module, name: str) -> list[tuple[nn.Module, str]]:
    """Returns the inspected modules inside a layer, and their names: of transformers' own, what has nothing inside."""
    found = []
    for inside, module in layer.named_modules():
        if isinstance(module, ShardedModule):
            found.append((module, _name(module, name)))
        elif not isinstance(layer, DecoderLayer) and next(module.children(), None) is None:
            found.append((module, f"{name}.{inside}"))
    return found


class _WatchedStage:
    """A stage that records the running micro-batch, and inspects the gradients of its end and its parameters."""

    def __init__(self, stage: ModelStage, watch: _Watch) -> None:
        self._stage, self._watch = stage, watch
        self.model, self.entries, self.step = stage.model, stage.entries, stage.step
        self.load = stage.load
        self.objective, self.references, self.baseline = stage.objective, stage.references, stage.baseline

    @property
    def sums(self) -> Tensor:
        return self._stage.sums

    @property
    def maxima(self) -> Tensor:
        return self._stage.maxima

    def before_last_backward(self, start: Callable[[Iterable[ShardEntry]], None]) -> None:
        """Leaves all reductions to the end of the step: gradients are inspected after backward, and one that is
        being summed is no longer this rank's own, or has been freed."""

    def forward(self, microbatch: int, activation: Tensor | None = None) -> Tensor | None:
        watch = self._watch
        watch.phase, watch.microbatch = _FORWARD, microbatch
        out = self._stage.forward(microbatch, activation)
        if self.model.head is not None:
            watch.look(self._stage.loss_sum, (_END,), "the loss (norm, lm_head and what is made of the logits)")
        return out

    def backward(
        self, microbatch: int, gradient: Tensor | None = None, *, defer_weights: bool = False
    ) -> Tensor | None:
        watch = self._watch
        watch.phase, watch.microbatch = _BACKWARD, microbatch
        made = self._stage.backward(microbatch, gradient, defer_weights=defer_weights)
        self._look_at_parameters(microbatch)
        return made

    def weight_gradients(self, microbatch: int) -> None:
        self._stage.weight_gradients(microbatch)
        self._watch.phase = _BACKWARD
        self._look_at_parameters(microbatch)

    def empty_message(self, kind: Kind, microbatch: int) -> Tensor:
        return self._stage.empty_message(kind, microbatch)

    def _look_at_parameters(self, microbatch: int) -> None:
        self._watch.microbatch = microbatch
        for place, entry in enumerate(reversed(self.entries)):
            if entry.sink is not None:
                # after all activations' gradients of this micro-batch: these tell more about the origin
                self._watch.look(entry.sink.buffer, (_END, place), f"the gradient of {entry.name}", phase=_BACKWARD)


def _put_hooks(model: Decoder, watch: _Watch) -> list[Callable[[], None]]:
    removals: list[Callable[[], None]] = []
    begun: dict[nn.Module, int] = {}
    """The modules that have run, numbered as they began; of a layer, whose output alone is looked at, as it ended."""

    def watch_module(module: nn.Module, layer: tuple[int, ...], name: str, with_input: bool) -> None:
        def before(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            order = (*layer, begun.setdefault(module, len(begun)))
            if inputs:  # else given by names
                watch.look(inputs[0], (*order, _BEFORE), f"the input of {name}")

        def after(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            order = (*layer, begun.setdefault(module, len(begun)))
            output = output[0] if isinstance(output, tuple) else output
            watch.look(output, (*order, _AFTER), f"the output of {name}")
            watch.look_in_backward(output, (*order, _AFTER), f"the gradient of the output of {name}")
            if with_input and inputs:
                watch.look_in_backward(inputs[0], (*order, _BEFORE), f"the gradient of the input of {name}")

        if with_input:
            removals.append(module.register_forward_pre_hook(before).remove)
        removals.append(module.register_forward_hook(after).remove)

    for module, layer, name, with_input in _modules(model):
        watch_module(module, layer, name, with_input)
    return removals


class Locator:
    """Recomputes a step and finds where it stopped being finite.

    Args:
        step: of the run.
        flat: its buffers, whose gradient is zeros between two steps.
        entries: parameters of this rank.
        replicas: knows where a parameter's numbers are.
        world: all ranks of the run.
    """

    def __init__(
        self,
        step: TrainStep,
        flat: FlatParameters,
        entries: Sequence[ShardEntry],
        replicas: ReplicaGuard,
        world: Axis,
    ) -> None:
        self._step, self._flat, self._entries = step, flat, entries
        self._replicas, self._world = replicas, world

    def locate(self, batches: list[Batch], target_count: float, step: int) -> Located:
        """Locates where the step stopped being finite, between two steps. Collective.

        Args:
            batches: this rank's micro-batches.
            target_count: of the global batch.
            step: steps taken when the step began, from which its dropout was drawn.

        Returns:
            The same on all ranks.
        """
        watch = _Watch(self._world.rank)
        removals: list[Callable[[], None]] = []
        stages = self._step.stages

        def watched(stage: ModelStage) -> _WatchedStage:
            removals.extend(_put_hooks(stage.model, watch))
            return _WatchedStage(stage.without_graphs(), watch)

        taken = stages.step.clone()
        stages.step.fill_(step)
        try:
            self._step.with_stages(stages.rebuilt(watched)).gradients(batches, target_count)
        finally:
            for remove in removals:
                remove()
            stages.step.copy_(taken)
        self._flat.gradient.zero_()
        broken = [
            (entry.name, self._world.rank)
            for entry in self._entries
            if not all(_is_finite(part) for part in self._replicas.tensors(entry) if part.is_floating_point())
        ]
        places, parameters = [], []
        for found in gather_objects((watch.first, broken), self._world):
            assert isinstance(found, tuple)
            if found[0] is not None:
                places.append(Place(*found[0]))
            parameters += found[1]
        first = min(places, default=None)
        same = () if first is None else tuple(sorted(place for place in places if place[:3] == first[:3]))
        return Located(first=same, parameters=tuple(parameters))
