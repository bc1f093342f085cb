"""Modules that know, for each parameter, its logical name, its shard of the whole, and where its gradient goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from engine.distributed.sharding import NamedShard, ShardSpec
from engine.ops.gradients import GradientSink

Fresh = Callable[[tuple[int, ...]], Tensor]
"""The shape of a whole tensor -> its values, fp32, in a model that is not read from a checkpoint."""


class ShardEntry(NamedTuple):
    """A parameter on this rank. `sink` is None where the parameter is frozen; `decays` says whether weight decay
    applies, and is None where the shape and the name do; `fresh` makes initial values that are other than what
    `engine.models.initialise` gives a tensor of this shape."""

    name: str
    parameter: nn.Parameter
    spec: ShardSpec
    sink: GradientSink | None
    decays: bool | None = None
    fresh: Fresh | None = None

    @property
    def shard(self) -> NamedShard:
        return NamedShard(self.name, self.parameter.data, self.spec)


class ShardedModule(nn.Module):
    """Base of every module that owns parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[ShardEntry] = []

    def own(
        self,
        name: str,
        tensor: Tensor,
        spec: ShardSpec,
        *,
        trainable: bool,
        decays: bool | None = None,
        fresh: Fresh | None = None,
    ) -> ShardEntry:
        """Registers `tensor` (storage may be a view of a larger one) as the parameter with logical `name`."""
        assert tuple(tensor.shape) == spec.local_shape, (name, tensor.shape, spec)
        parameter = nn.Parameter(tensor, requires_grad=trainable)
        sink = GradientSink(tensor.shape, tensor.device) if trainable else None
        entry = ShardEntry(name, parameter, spec, sink, decays, fresh)
        self.register_parameter(name.replace(".", "_"), parameter)
        self.entries.append(entry)
        return entry


class AdaptedModule(ShardedModule):
    """A linear, or several on one input, whose adapters may be chosen by token (`AdapterChoice`).

    Its `operands` have a name and adapters, `low_rank`, or None.
    """

    operands: Any
    counted: Tensor | None = None
    """What counts the rows of a step; None where they are not counted."""

    @property
    def trained_leaves(self) -> tuple[Tensor, ...]:
        """The trained tensors of the linear itself."""
        raise NotImplementedError


def shard_entries(module: nn.Module) -> Iterator[ShardEntry]:
    """Yields every parameter of the model on this rank, in forward order, once each."""
    for child in module.modules():
        if isinstance(child, ShardedModule):
            yield from child.entries
