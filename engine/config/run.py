"""The whole configuration of a run: one record with a section per concern."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.config.checkpoint import CheckpointOptions
from engine.config.checks import require
from engine.config.data import DataOptions
from engine.config.distillation import DistillationOptions
from engine.config.evaluation import EvaluationOptions
from engine.config.guards import GuardOptions
from engine.config.hub_options import HubOptions
from engine.config.log import LogOptions
from engine.config.lora import LoraOptions
from engine.config.memory import MemoryOptions
from engine.config.model import ModelOptions
from engine.config.objective import ObjectiveOptions
from engine.config.optim import OptimOptions
from engine.config.option import REPORTED, option
from engine.config.parallel import ParallelOptions
from engine.config.rollout import RolloutOptions
from engine.config.train import TrainOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The configuration of a run.

    Args:
        model: Which checkpoint, in which precision.
        trainable: Modules trained in full, beside or instead of adapters, as names with * and ? wildcards: lm_head,
            embed_tokens, layers.*.mlp.*, or * for everything.
        parallel: How the model is divided over the ranks.
        lora: The adapters.
        objective: Which loss is minimised.
        rollout: How completions are generated and scored.
        distillation: Teachers whose probabilities completions are compared with.
        data: Which text, and how it becomes rows of tokens.
        optim: AdamW and its schedule.
        train: How long, in which batches.
        evaluation: Tasks that score the model while it trains.
        memory: Storage of tensors, recomputation and CUDA graphs.
        guards: Checks while it trains.
        checkpoint: Where the run is kept.
        log: The reports of the run.
        hub: Names on the Hugging Face hub.
    """

    model: ModelOptions
    trainable: tuple[str, ...] = option((), REPORTED)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    objective: ObjectiveOptions = field(default_factory=ObjectiveOptions)
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    distillation: DistillationOptions = field(default_factory=DistillationOptions)
    data: DataOptions = field(default_factory=DataOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    guards: GuardOptions = field(default_factory=GuardOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    log: LogOptions = field(default_factory=LogOptions)
    hub: HubOptions = field(default_factory=HubOptions)

    def __post_init__(self) -> None:
        require(
            not isinstance(self.trainable, str),
            f"trainable is the text {self.trainable!r}, but a list is expected: write [{self.trainable!r}].",
        )
        require(
            all(self.trainable),
            "trainable contains an empty name, but names of modules are expected: remove the empty one.",
        )

    @property
    def evaluated_figure(self) -> str | None:
        """The figure of the validation data that decides about checkpoints and the end of a run; None for the loss."""
        return self.checkpoint.judged_completions if self.objective.kind.samples else None

    @property
    def row_length(self) -> int:
        """Maximum tokens of a row. The answers of a pair share one row, each of up to data.seq_length tokens."""
        return self.data.seq_length * self.objective.kind.group
