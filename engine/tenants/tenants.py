"""Several runs' models on one frozen base, on this rank: building them, their gradients, and their updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from engine.batch import Batch
from engine.config.run import RunConfig
from engine.distributed.collectives import all_reduce
from engine.distributed.mesh import Mesh
from engine.errors import UserError
from engine.layers.context import LORA_LEAVES, TrainingPlan
from engine.layers.module import ShardEntry
from engine.layers.shared_base import SharedBase
from engine.objectives.objective import Objective
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.tenants.joined_batch import can_join, tokens_of
from engine.tenants.joint_pass import JointPass, Work, peers_of
from engine.tenants.sweep_file import SHARED
from engine.training.build import Training, build_training
from engine.training.stage_layout import plan_partition
from engine.training.start import refuse_early
from engine.training.start_model import ModelPlan, ModelSource

_ANYWHERE = ("layers.0.lora_A",)
"""The first parameter that adapters may have."""


class Tenants:
    """The tenants of a base. Every rank adds the same ones in the same order, and takes the same steps.

    Args:
        config: of the first run; the others may differ in all that does not say what the base is.
        launch, log: of this rank.
        tokens: of a joined micro-batch, at most, unless one part alone has more.
    """

    def __init__(self, config: RunConfig, launch: Launch, log: Log, *, tokens: int) -> None:
        check_layout(config)
        self._config, self._launch, self._log = config, launch, log
        self._shared = SharedBase()
        source, plan = refuse_early(config, launch)
        # rows of different lengths become one, as long as all of them
        self._tokens = min(tokens, source.model.decoder.max_row_length or tokens)
        # stages that suit adapters anywhere, whatever the first run trains
        self._partition = plan_partition(config, source.model.decoder, _ANYWHERE, launch.world_size)
        without = replace(plan, modules=TrainingPlan(seed=plan.modules.seed), trained={}, partition=self._partition)
        bare = replace(config, lora=replace(config.lora, init_from=None))
        self._base = build_training(bare, launch, source, without, log, base=self._shared)
        self._trainings: dict[int, Training] = {}
        self._joins: dict[int, bool] = {}
        self._joint: JointPass | None = None
        self._next = 0

    def num_trained(self, config: RunConfig) -> int:
        """Returns the parameters of a run's adapters, each once over all ranks. Builds nothing.

        Raises:
            UserError: the run's configuration does not fit the model.
        """
        _, plan = refuse_early(config, self._launch)
        return plan.num_trained()

    def add(self, config: RunConfig, objective: Objective | None = None, *, log: Log | None = None) -> int:
        """Builds the model of a run, with fresh adapters, and returns its number. Collective.

        Args:
            config: of the run.
            objective: in place of the configuration's; None for that.
            log: of what is built; None for that of the first model.

        Raises:
            UserError: the run differs in what the base is, or trains more than adapters.
        """
        for name in SHARED:
            if getattr(config, name) != getattr(self._config, name):
                raise UserError(
                    f"the section {name} differs between runs that share a base: give it once, for all of them."
                )
        if config.model.init == "random" and config.train.seed != self._config.train.seed:
            raise UserError(
                f"train.seed is {config.train.seed} and of the first run {self._config.train.seed}, but the base that "
                "they share is drawn from it: give one seed for all of them, or a model with weights."
            )
        source, plan = refuse_early(config, self._launch)
        check_adapters_alone(plan)
        return self.adopt(self.build(config, self._launch, source, plan, log or self._log, objective=objective))

    def build(
        self,
        config: RunConfig,
        launch: Launch,
        source: ModelSource,
        plan: ModelPlan,
        log: Log,
        *,
        documents_per_row: int | None = None,
        mesh: Mesh | None = None,
        objective: Objective | None = None,
    ) -> Training:
        """Builds a model on the base; see `build_training`. Collective. It is no tenant until `adopt` takes it."""
        return build_training(
            config,
            launch,
            source,
            replace(plan, partition=self._partition.training(plan.trained)),
            log,
            documents_per_row=documents_per_row,
            mesh=self._base.mesh,
            base=self._shared,
            objective=objective,
        )

    def adopt(self, training: Training) -> int:
        """Takes a model of `build` as a tenant, and returns its number."""
        number, self._next = self._next, self._next + 1
        self._trainings[number] = training
        self._joins[number] = _joins(training)
        self._joint = None
        return number

    def remove(self, number: int) -> None:
        """Forgets a tenant."""
        del self._trainings[number], self._joins[number]
        self._joint = None

    @property
    def base(self) -> Training:
        """The model without adapters."""
        return self._base

    def __getitem__(self, number: int) -> Training:
        return self._trainings[number]

    def gradients(self, batches: Mapping[int, Sequence[Batch]], targets: Mapping[int, float]) -> dict[int, Tensor]:
        """Adds up the gradients of these tenants' global batches; `update` sums them over ranks.

        Args:
            batches: this rank's micro-batches of each: the same tenants on all ranks, in the same order. Ranks that
                train on different data may have different numbers of them, or none, unless experts are spread over
                these ranks.
            targets: the sum of the loss weights over each one's global batch, over all ranks.

        Returns:
            Tenant -> 0-dim fp32 mean loss over its targets, equal on all ranks.
        """
        return {number: figures[0] for number, figures in self.figures(batches, targets).items()}

    def figures(self, batches: Mapping[int, Sequence[Batch]], targets: Mapping[int, float]) -> dict[int, Tensor]:
        """Does what `gradients` does.

        Returns:
            Tenant -> fp32 [1 + metrics + maxima]: means of its loss and its objective's metrics over its targets, and
            the largest of its maxima.
        """
        device = self._base.stages.step.device
        self._check_counts([len(own) for own in batches.values()])
        counts = {number: torch.full((), targets[number], device=device) for number in batches}
        together = [number for number, own in batches.items() if self._joins[number] and can_join(own)]
        sums: dict[int, Tensor] = {}
        if together:
            self._joint = self._joint or self._make_joint()
            for number in together:  # whose own layers would have waited for their weights
                self._trainings[number].optimizer.flat.finish_publish()
            scales = {number: counts[number].clamp(min=1.0).reciprocal() for number in together}
            work = [Work(number, batch.to(device), scales[number]) for number in together for batch in batches[number]]
            sums = self._joint.gradients(self._grouped(work))
        maxima: dict[int, Tensor] = {}
        for number, own in batches.items():
            if number not in together and own:
                stages = self._trainings[number].stages
                sums[number] = stages.gradients(list(own), counts[number], before_last_backward=_not_yet)
                maxima[number] = stages.maxima()
        mesh = self._base.mesh
        found: dict[int, Tensor] = {}
        for number in batches:
            objective = self._trainings[number].objective
            own_sums = sums.get(number, torch.zeros(1 + len(objective.metrics), device=device)).clone()
            found[number] = all_reduce(all_reduce(own_sums, mesh.dp_cp), mesh.pp) / counts[number].clamp(min=1.0)
            if objective.maxima:
                largest = maxima.get(number, torch.full((len(objective.maxima),), -torch.inf, device=device))
                for axis in (mesh.dp_cp, mesh.pp):
                    largest = all_reduce(largest, axis, dist.ReduceOp.MAX)
                found[number] = torch.cat((found[number], largest))
        return found

    def update(self, number: int, lr: float, loss: Tensor) -> Tensor:
        """Takes a tenant's optimizer step; returns the 0-dim gradient norm."""
        training = self._trainings[number]
        training.reducer.finish()
        norm = training.optimizer.step(lr, loss)
        training.stages.step.add_(1)
        return norm

    def _make_joint(self) -> JointPass:
        joined = {number: one.stages for number, one in self._trainings.items() if self._joins[number]}
        return JointPass(self._base.stages, joined)

    def _grouped(self, work: Sequence[Work]) -> list[list[Work]]:
        """Returns the micro-batches of joined ones, in the order given; tenants whose heads have adapters, whose loss
        is computed otherwise, apart from the others."""
        groups: list[list[Work]] = []
        open_groups: dict[bool, list[Work]] = {}
        held: dict[bool, int] = {}
        for one, size in zip(work, self._sizes(work), strict=True):
            head = self._trainings[one.tenant].plan.modules.adapter("lm_head") is not None
            group, held[head] = open_groups.get(head), held.get(head, 0) + size
            if group is None or held[head] > self._tokens:
                group = open_groups[head] = []
                held[head] = size
                groups.append(group)
            group.append(one)
        return groups

    def _check_counts(self, own: Sequence[int]) -> None:
        """Checks that ranks which send each other rows of experts have as many micro-batches. Collective there.

        Args:
            own: this rank's of each tenant.

        Raises:
            UserError: they have not.
        """
        mesh = self._base.mesh
        if mesh.experts.ep.size == 1:
            return
        ends = torch.tensor([*own, *(-one for one in own)], device=self._base.stages.step.device)
        all_reduce(ends, mesh.dp_cp, dist.ReduceOp.MAX)
        most, least = ends.view(2, -1).tolist()
        if any(first + last for first, last in zip(most, least, strict=True)):
            raise UserError(
                f"a run has {max(most)} micro-batches on one rank and fewer on another, but with parallel.expert above "
                "1 each sends the others rows in every one: give all ranks as many."
            )

    def _sizes(self, work: Sequence[Work]) -> list[int]:
        """Returns the tokens of each micro-batch: on the rank with the most, where ranks send each other rows of
        experts, since these have to join the same ones. Collective there."""
        own, mesh = [tokens_of(one.batch) for one in work], self._base.mesh
        if mesh.experts.ep.size == 1:
            return own
        most = torch.tensor(own, device=self._base.stages.step.device)
        sizes: list[int] = all_reduce(most, mesh.dp_cp, dist.ReduceOp.MAX).tolist()
        return sizes


def _not_yet(entries: Iterable[ShardEntry]) -> None:
    """Starts no reduction: more gradients may come before the update."""


def _joins(training: Training) -> bool:
    """Returns whether a tenant's rows can be multiplied with the base beside others': its adapters are plain ones of
    linears, its loss needs no other pass and is not scaled. Collective over the pipeline's ranks, which have different
    adapters."""
    objective = training.objective
    plain = not (
        objective.compares_with_base or objective.baseline or objective.entropy_use != "none" or objective.maxima
    )
    plain = plain and objective.head_loss is None
    plain = plain and objective.temperature == 1.0 and training.optimizer.loss_scale is None
    if not plain or training.stages.balance is not None:  # which counts what the tokens of one run choose
        return False
    peers = peers_of({0: training.stages.models()})
    covered = {id(leaf) for one in peers.values() for leaf in one.leaves.get(0, ())}
    entries = [entry for entry in training.stages.entries() if entry.sink is not None]
    here = torch.tensor(all(id(entry.parameter) in covered for entry in entries), dtype=torch.int32)
    return bool(all_reduce(here.to(training.stages.step.device), training.mesh.pp, dist.ReduceOp.MIN))


def check_adapters_alone(plan: ModelPlan) -> None:
    """Checks that a run trains nothing but adapters, beside a base that stays as it is.

    Raises:
        UserError: it does not.
    """
    if plan.modules.merge_aware:
        raise UserError(
            "lora.merge_aware is true, but runs that share a base multiply their tokens with it together: set "
            "lora.merge_aware to false, or train it in a run of its own."
        )
    if full := [name for name in plan.trained if name.rpartition(".")[2] not in LORA_LEAVES]:
        raise UserError(
            f"{full[0]} is to train in full, but runs that share a base train adapters alone: leave trainable out."
        )


def check_layout(config: RunConfig) -> None:
    """Checks that the base stays where it is.

    Raises:
        UserError: its weights move, a step is a graph, or more than adapters trains.
    """
    if config.objective.kind.head is not None:
        raise UserError(
            f"objective.name is {config.objective.name}, whose head trains in full, but runs that share a base train "
            "adapters alone: train it in a run of its own."
        )
    for option, value, needed in (
        ("parallel.shard", config.parallel.shard == "parameters", "optimizer or none"),
        ("memory.offload_weights", config.memory.offload_weights, "false"),
        ("memory.cuda_graph", config.memory.cuda_graph != "none", "none"),
    ):
        if value:
            raise UserError(
                f"{option} is set, but several runs share one base, which has to stay in place: set it to {needed}."
            )
