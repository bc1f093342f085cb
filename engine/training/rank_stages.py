"""This rank's stages, and the passes of a step or an evaluation through all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.batch import Batch
from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Axis
from engine.layers.module import ShardEntry
from engine.models.decoder import Decoder
from engine.objectives.objective import Objective
from engine.ops.attention.token_context import AuxiliaryLoss
from engine.pipeline.runner import Runner
from engine.pipeline.schedule import Action
from engine.pipeline.schedules import ScheduleChoice
from engine.training.stage import (
    BASE_REFERENCE,
    COUNTING_PASS,
    EVALUATION,
    REFERENCE,
    TRAINING,
    ModelStage,
    Pass,
    ReadHead,
)

if TYPE_CHECKING:
    from engine.layers.graph_capture import Capture
    from engine.training.cuda_graph.static_batch import StaticShape


class Stages:
    """The stages of a rank.

    Args:
        stages: by their number in the whole model.
        axis: the pipeline's ranks.
        choice: of the schedule.
        balance: the auxiliary loss of routers, which all of these stages share; None without one.
    """

    def __init__(
        self,
        stages: Mapping[int, ModelStage],
        axis: Axis | None = None,
        choice: ScheduleChoice | None = None,
        balance: AuxiliaryLoss | None = None,
    ) -> None:
        self.balance = balance
        self.prepare: Callable[[list[Batch]], list[Batch]] | None = None
        """Adds to the micro-batches of a step or an evaluation before their passes; None adds nothing. Collective."""
        self._stages = dict(sorted(stages.items()))
        self._axis, self._choice = axis or Axis("pp"), choice or ScheduleChoice()
        self._runners: dict[tuple[int, bool], Runner] = {}

    @classmethod
    def whole(cls, stage: ModelStage, balance: AuxiliaryLoss | None = None) -> Stages:
        """Returns one stage that is the whole model."""
        return cls({0: stage}, balance=balance)

    def rebuilt(self, make: Callable[[ModelStage], Any]) -> Stages:
        """Returns the same schedule over the stages that `make` returns for these ones."""
        stages = {number: make(stage) for number, stage in self._stages.items()}
        rebuilt = Stages(stages, self._axis, self._choice, self.balance)
        rebuilt.prepare = self.prepare
        return rebuilt

    @property
    def step(self) -> Tensor:
        """The optimizer steps taken, 0-dim int64; the same tensor in all stages."""
        return next(iter(self._stages.values())).step

    @property
    def objective(self) -> Objective:
        """The objective of the loss; the same in all stages."""
        return self._last.objective

    def entries(self) -> list[ShardEntry]:
        """Parameters of all stages, in forward order."""
        return [entry for stage in self._stages.values() for entry in stage.entries]

    def models(self) -> tuple[Decoder, ...]:
        """The parts of the model, in forward order."""
        return tuple(stage.model for stage in self._stages.values())

    def gradients(
        self,
        batches: list[Batch],
        target_count: Tensor,
        before_last_backward: Callable[[Iterable[ShardEntry]], None],
    ) -> Tensor:
        """Runs forward and backward of a step's micro-batches.

        Args:
            batches: this rank's.
            target_count: 0-dim fp32 sum of the loss weights over the global batch; gradients are divided by it.
            before_last_backward: called with a stage's parameters before the last backward of that stage.

        Returns:
            fp32 [1 + metrics], this rank's sums of the loss and the objective's metrics: 0 where it has no last stage.
        """
        moved = self._prepared(batches)
        if self.has_baseline:
            self._set_baseline(self._baseline_sums(moved))
        self._compare_with_base(moved)
        if self.balance is not None:
            self._count_choices(moved, self.balance)
        for stage in self._stages.values():
            stage.load(moved, target_count, TRAINING)
        self._runner(len(batches), training=True).run(
            lambda stage: self._stages[stage].before_last_backward(before_last_backward)
        )
        return self._sums()

    @torch.no_grad()
    def figures(self, batches: list[Batch]) -> Tensor:
        """Returns the fp32 [1 + metrics] sums of the loss and the objective's metrics without dropout, equal on all
        pipeline ranks."""
        moved = self._prepared(batches)
        self._compare_with_base(moved)
        self._forward(moved, EVALUATION)
        return all_reduce(self._sums(), self._axis)

    @property
    def has_baseline(self) -> bool:
        """Whether `figures` needs one number of the whole data set first."""
        return self._last.objective.baseline is not None

    def compute_baseline(self, groups: Iterable[list[Batch]]) -> None:
        """Computes the baseline that `figures` needs, over a whole data set. Collective over the ranks of dp and pp.

        Args:
            groups: this rank's micro-batches, as many as go through the pipeline together at a time.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self.step.device)
        for group in groups:
            sums += self._baseline_sums(self._moved(group))
        self._set_baseline(sums.float())

    def references(self, batches: list[Batch], *, adapters: bool = True) -> list[Tensor] | None:
        """Returns the reference results of each micro-batch under the current model; None where this rank does not have
        the last stage.

        Args:
            adapters: False leaves them out.
        """
        self._forward(self._moved(batches), REFERENCE if adapters else BASE_REFERENCE)
        found = self._last.references
        return [found.pop(number) for number in range(len(batches))] if found else None

    @torch.no_grad()
    def read_head(self, batches: list[Batch], read: ReadHead) -> list[Tensor] | None:
        """Returns the result of `read` for each micro-batch's output, without dropout; None where this rank does not
        have the last stage."""
        self._forward(self._moved(batches), Pass(head=read))
        found = self._last.references
        return [found.pop(number) for number in range(len(batches))] if found else None

    def capture_layers(self, capture: Capture, shape: StaticShape, num_microbatches: int) -> None:
        """Captures the layers of every stage that has a backward. Between two steps.

        Args:
            num_microbatches: of a step.
        """
        actions = self._choice.schedule(num_microbatches).actions[self._axis.rank]
        for number, stage in self._stages.items():
            if num_slots := max_in_flight(actions, number):
                stage.capture_layers(capture, shape, num_slots)

    def _moved(self, batches: list[Batch]) -> list[Batch]:
        """Returns the micro-batches on the device; pixels go only to the rank that has the first stage."""
        if 0 not in self._stages:
            batches = [batch.without_input() for batch in batches]
        return [batch.to(self.step.device) for batch in batches]

    def _prepared(self, batches: list[Batch]) -> list[Batch]:
        """Returns the micro-batches on the device, with what `prepare` adds."""
        moved = self._moved(batches)
        return moved if self.prepare is None else self.prepare(moved)

    @property
    def _last(self) -> ModelStage:
        """This rank's last stage; the model's last one on the rank that has it."""
        return list(self._stages.values())[-1]

    def maxima(self) -> Tensor:
        """fp32 [maxima], the largest of this rank since the last forward began; -inf where it has no last stage."""
        return torch.stack([stage.maxima for stage in self._stages.values()]).amax(dim=0)

    def _compare_with_base(self, batches: list[Batch]) -> None:
        """Computes the micro-batches' reference results, where the reference is the model without adapters and they
        do not bring them."""
        if self._last.objective.compares_with_base and not all(batch.brings_reference for batch in batches):
            self._forward(batches, BASE_REFERENCE)

    def _count_choices(self, batches: list[Batch], balance: AuxiliaryLoss) -> None:
        """Counts the routers' choices in the whole batch before the first backward: where a backward comes before some
        forward, in a pass of its own. Collective."""
        one_pass = len(batches) == 1 and self._axis.size == 1
        balance.begin(counts_alone=not one_pass)
        if not one_pass:
            self._forward(batches, COUNTING_PASS)
            balance.finish_counts()

    def _baseline_sums(self, batches: list[Batch]) -> Tensor:
        """Returns the fp32 [2] baseline sums of these micro-batches on the last stage's rank, 0 elsewhere."""
        sums = torch.zeros(2, dtype=torch.float32, device=self.step.device)
        objective = self._last.objective
        assert objective.baseline is not None
        others = [objective.baseline.batch(batch) for batch in batches]
        policies = self.references(others)
        bases = self.references(others, adapters=False) if objective.compares_with_base else None
        for number, policy in enumerate(policies or ()):
            base = None if bases is None else bases[number]
            sums += objective.baseline.sums(others[number].to(self.step.device), policy, base)
        return sums

    def _set_baseline(self, sums: Tensor) -> None:
        """Combines the parts of all data-parallel ranks that have the last stage."""
        baseline = self._last.objective.baseline
        if baseline is not None and self._last.model.head is not None:
            self._last.baseline.copy_(baseline.of(sums))

    @torch.no_grad()
    def _forward(self, batches: list[Batch], kind: Pass) -> None:
        for stage in self._stages.values():
            stage.load(batches, 1.0, kind)
        self._runner(len(batches), training=False).run(lambda stage: None)

    def _sums(self) -> Tensor:
        return torch.stack([stage.sums for stage in self._stages.values()]).sum(dim=0)

    def _runner(self, num_microbatches: int, *, training: bool) -> Runner:
        key = num_microbatches, training
        if key not in self._runners:
            schedule = self._choice.schedule(num_microbatches, training=training)
            self._runners[key] = Runner(schedule, self._stages, self._axis)
        return self._runners[key]


def max_in_flight(actions: tuple[Action, ...], stage: int) -> int:
    """Returns the maximum number of micro-batches of `stage` whose backward is pending at once; 0 where it has no
    backward."""
    if not any(action.op == "B" and action.stage == stage for action in actions):
        return 0
    alive = [0]
    for action in actions:
        if action.stage == stage:
            alive.append(alive[-1] + {"F": 1, "B": -1}.get(action.op, 0))
    return max(alive)
