"""Which adapters lie on the device with their optimizers, and how the others wait.

What counts is bytes, not adapters: one of rank 64 takes sixteen times what one of rank 4 does. An adapter is counted
whole, whatever ranks it is spread over, so that all of them decide alike. The one that was used least recently goes.
It has been in its file since its last optimizer step, so that nothing is written when it goes; gradients that no step
has taken wait in host memory. Where one of the same kind comes, it takes over the place, and nothing is built.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from engine.config.run import RunConfig
from engine.errors import UserError
from engine.models.dtypes import TORCH_DTYPES
from engine.telemetry.log import Log
from engine.tenants.tenants import Tenants
from engine.training.build import Training
from rankfold.serving.adapter_file import Written, read_adapter, read_written
from rankfold.serving.commands import Adapter
from rankfold.serving.folder import ServerFolder
from rankfold.serving.losses import ClientLoss
from rankfold.serving.ranks import Ranks

_OPTIMIZER_BYTES = 16
"""Of each parameter of an adapter: fp32 gradient, master and two moments."""
_SILENT = Log(1)
_IDLE = 4
"""Adapters that are asked for, for each place, until one that was not among them counts as idle."""


@dataclass(kw_only=True, slots=True)
class _Place:
    """A tenant, and whose adapter it has.

    Args:
        number: of the tenant.
        kind: of its adapter, with seed 0.
        loss: its objective.
        content: a model's name, or path and request of saved weights; None for nothing.
        used: how many adapters had been asked for when it was used last.
    """

    number: int
    kind: Adapter
    loss: ClientLoss
    content: str | tuple[str, str] | None = None
    used: int = 0


@dataclass(kw_only=True, slots=True)
class _Model:
    """A client's model.

    Args:
        adapter: that it trains.
        has_gradient: whether a gradient has been added up since its last step.
        gradient: of a resting one that has some, in host memory; as far as this rank has it.
        scale: the loss scale of a resting one, in host memory, where the gradient has one.
    """

    adapter: Adapter
    has_gradient: bool = False
    gradient: Tensor | None = None
    scale: Sequence[Tensor] = ()


class Residents:
    """The clients' models and the weights that samplers read, as tenants of one base. Collective.

    Args:
        tenants: of the base.
        config: adapter -> the configuration of its model.
        folder: of the server, with each model as of its last step.
        ranks: of the server.
        limit: bytes of adapters with their optimizers on the device. More are there only while commands that are
            executed together, or one model alone, take more.
    """

    def __init__(
        self,
        tenants: Tenants,
        config: Callable[[Adapter], RunConfig],
        folder: ServerFolder,
        ranks: Ranks,
        *,
        limit: float,
    ) -> None:
        self._tenants, self._config, self._folder, self._ranks, self._limit = tenants, config, folder, ranks, limit
        self._models: dict[str, _Model] = {}
        self._places: dict[str | tuple[str, str], _Place] = {}
        """By their content, the one that was used least recently first."""
        self._sizes: dict[Adapter, int] = {}
        self._asked = 0
        """How many adapters were asked for so far."""

    def __contains__(self, model: str) -> bool:
        return model in self._models

    def counts(self) -> tuple[int, int]:
        """Returns how many models lie on the device, and how many rest."""
        awake = sum(content in self._models for content in self._places if isinstance(content, str))
        return awake, len(self._models) - awake

    def adapter(self, model: str) -> Adapter:
        """Returns the adapter that a model trains."""
        return self._models[model].adapter

    def create(self, model: str, adapter: Adapter) -> Training:
        """Builds a model with a fresh adapter.

        Raises:
            UserError: the adapter does not fit the base.
        """
        kind = replace(adapter, seed=0)
        self._make_room(kind, keep=())
        place = self._build(adapter)
        self._models[model] = _Model(adapter=adapter)
        place.content = model
        self._places[model] = place
        return self._tenants[place.number]

    def note(self, model: str, adapter: Adapter) -> None:
        """Takes a model as it is in its file, and has it rest."""
        if model in self._models:
            self.remove(model)
        self._models[model] = _Model(adapter=adapter)

    def remove(self, model: str) -> None:
        """Forgets a model."""
        del self._models[model]
        if (place := self._places.pop(model, None)) is not None:
            self._tenants.remove(place.number)

    def number(self, model: str) -> int:
        """Returns the tenant of a model that is awake."""
        return self._places[model].number

    def loss(self, model: str) -> ClientLoss:
        """Returns the objective of a model that is awake."""
        return self._places[model].loss

    def wake(self, model: str, *, keep: Collection[str] = ()) -> Training:
        """Returns a model, on the device, with its gradient.

        Args:
            keep: models that may not go for it.

        Raises:
            UserError: its file cannot be read; the model rests as before.
        """
        if (found := self._found(model)) is not None:
            return found
        known, path = self._models[model], self._folder.model(model)
        written = self._ranks.decided(lambda: _written(path))
        training = self._place(model, known.adapter, path, written, keep, optimizer=True)
        if known.gradient is not None:
            training.optimizer.flat.gradient.copy_(known.gradient)
        if training.optimizer.loss_scale is not None:
            for tensor, kept in zip(training.optimizer.loss_scale.tensors(), known.scale, strict=False):
                tensor.copy_(kept)
        known.gradient, known.scale = None, ()
        return training

    def has_gradient(self, model: str, has: bool) -> None:
        """Notes whether a gradient has been added up since a model's last step."""
        self._models[model].has_gradient = has

    def reader(self, path: Path, written: Written) -> Training:
        """Returns a model with saved weights.

        Args:
            path: of their file.
            written: what the file says.

        Raises:
            UserError: the file cannot be read.
        """
        content = str(path), written.request  # another request may have written the file anew
        if (found := self._found(content)) is not None:
            return found
        return self._place(content, replace(written.adapter, seed=0), path, written, (), optimizer=False)

    def _found(self, content: str | tuple[str, str]) -> Training | None:
        """Returns an adapter that is on the device, and notes that it is used."""
        self._asked += 1
        if (place := self._places.pop(content, None)) is None:
            return None
        self._places[content], place.used = place, self._asked
        return self._tenants[place.number]

    def parts(self, models: Sequence[str]) -> list[list[str]]:
        """Returns models in lists of those that fit on the device together, in their order."""
        found: list[list[str]] = []
        room = 0.0
        for model in models:
            size = self._size(replace(self.adapter(model), seed=0))
            if not found or size > room:
                found.append([])
                room = self._limit
            found[-1].append(model)
            room -= size
        return found

    def _size(self, kind: Adapter) -> int:
        if kind not in self._sizes:
            config = self._config(kind)
            width = _OPTIMIZER_BYTES + TORCH_DTYPES[config.model.dtype].itemsize
            self._sizes[kind] = self._tenants.num_trained(config) * width
        return self._sizes[kind]

    def _place(
        self, content: str | tuple[str, str], adapter: Adapter, path: Path, written: Written, keep: Collection[str],
        *, optimizer: bool,
    ) -> Training:  # fmt: skip
        """Reads a file into a place of its own."""
        kind = replace(adapter, seed=0)
        place = self._make_room(kind, keep, takes_over=True) or self._build(kind)
        training = self._tenants[place.number]
        try:
            read_adapter(path, training, self._ranks, written, optimizer=optimizer)
        except UserError:
            self._tenants.remove(place.number)
            raise
        place.content, place.used = content, self._asked
        self._places[content] = place
        return training

    def _build(self, adapter: Adapter) -> _Place:
        loss = ClientLoss(self._tenants.base.mesh.cp)
        number = self._tenants.add(self._config(adapter), loss, log=_SILENT)
        return _Place(number=number, kind=replace(adapter, seed=0), loss=loss)

    def _make_room(self, kind: Adapter, keep: Collection[str], *, takes_over: bool = False) -> _Place | None:
        """Lets the adapters rest that were used least recently, until one of a kind fits.

        Args:
            keep: models that stay.
            takes_over: whether the new one is read from a file, so that it can take over a place of its kind.

        Returns:
            Such a place; None where one is to be built.
        """
        if takes_over and (place := self._idle_reader(kind)) is not None:
            return place
        needed = self._size(kind)
        used = sum(self._size(place.kind) for place in self._places.values())
        for content, place in list(self._places.items()):
            if used + needed <= self._limit:
                break
            if content in keep:
                continue
            if isinstance(content, str):
                self._rest(self._models[content], self._tenants[place.number])
            del self._places[content]
            used -= self._size(place.kind)
            if takes_over and self._takes_over(place, kind):
                return place
            self._tenants.remove(place.number)
        return None

    def _idle_reader(self, kind: Adapter) -> _Place | None:
        """Returns the place of saved weights of a kind that no client has asked for in a long time: one that trains
        samples its newest weights, and does not come back to those before."""
        for content, place in self._places.items():
            if not isinstance(content, str) and self._takes_over(place, kind):
                if self._asked - place.used <= _IDLE * len(self._places):
                    return None  # the others were used later
                del self._places[content]
                return place
        return None

    def _takes_over(self, place: _Place, kind: Adapter) -> bool:
        """Returns whether an adapter of a kind can be read into a place; a loss scale is part of what is built."""
        return place.kind == kind and self._tenants[place.number].optimizer.loss_scale is None

    def _rest(self, model: _Model, training: Training) -> None:
        """Keeps what a model's file has not."""
        if model.has_gradient:
            model.gradient = training.optimizer.flat.gradient.to("cpu", copy=True)
        if training.optimizer.loss_scale is not None:
            model.scale = [tensor.to("cpu", copy=True) for tensor in training.optimizer.loss_scale.tensors()]


def _written(path: Path) -> Written:
    written = read_written(path)
    if written is None:
        raise UserError(f"{path}, which has the model as of its last step, is not there any more.")
    return written
