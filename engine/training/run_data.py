"""The interface between a run and its data, which its objective chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engine.checkpoint.model_folder import ModelFolder
from engine.config.run import RunConfig
from engine.data.dataset import TokenDataset
from engine.data.order import DataOrder
from engine.data.sources import Sources
from engine.data.tokenizer import Tokenizer
from engine.runtime.launch import Launch
from engine.telemetry.log import Log
from engine.telemetry.metrics import MetricsWriter
from engine.training.build import Training
from engine.training.step_source import StepSource


@dataclass(frozen=True, kw_only=True, slots=True)
class Supplied:
    """What a run gets beside its configuration, which names it.

    Args:
        sources: of records that do not come from files.
        rewards: functions of a Python program, by the names that rollout.rewards has after python:.
        tools: the same of rollout.tools.
        environments: the same of rollout.environment.
    """

    sources: Sources = field(default_factory=dict)
    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    tools: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    environments: Mapping[str, Callable[[], Any]] = field(default_factory=dict)


class TrainingSamples(Protocol):
    """The samples that a run trains on, on this rank."""

    @property
    def num_samples(self) -> int: ...

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step on each rank."""
        ...

    @property
    def order(self) -> DataOrder:
        """The order of the samples that the data cursor counts."""
        ...

    @property
    def family(self) -> Any:
        """The vision-language family that reads images; None where samples have none."""
        ...

    def fingerprint(self) -> str:
        """Returns a hash of all data that training reads."""
        ...


class ValidationSamples(Protocol):
    """The samples that a run is evaluated on, on this rank."""

    @property
    def num_samples(self) -> int: ...


class RunData(Protocol):
    """The data of a run on this rank."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def train(self) -> TrainingSamples: ...

    @property
    def rows(self) -> TokenDataset | None:
        """The training rows; None where they are made while the run trains."""
        ...

    @property
    def validation(self) -> ValidationSamples | None: ...

    def earlier_order(self, before: RunConfig) -> DataOrder:
        """Returns the order that this data has under an earlier configuration of the run."""
        ...

    def know_reference(
        self,
        config: RunConfig,
        training: Training,
        log: Log,
        *,
        run_dir: Path,
        rank: int,
        resumed: Path | None,
    ) -> None:
        """Gives the data its log-likelihoods under the model that the run starts from, where the objective compares
        with it. Collective.

        Args:
            run_dir: where they are kept.
            rank: of this process.
            resumed: the checkpoint whose weights the model has now, in the folder of this run or of another one; None
                where the run has just started.

        Raises:
            UserError: they are absent, belong to other data, or are not finite.
        """
        ...

    def source(
        self,
        config: RunConfig,
        launch: Launch,
        training: Training,
        *,
        metrics: MetricsWriter,
        say: Callable[[str], None],
        run_dir: Path,
    ) -> StepSource:
        """Returns the source of the loop's steps; to be closed.

        Args:
            metrics: gets records on samples.
            say: prints a line on rank 0.
            run_dir: the run's folder.

        Raises:
            UserError: the model cannot take these steps.
        """
        ...


class DataReader(Protocol):
    """The function that `engine.config.objective.ObjectiveKind.data` names."""

    def __call__(
        self,
        config: RunConfig,
        launch: Launch,
        model: ModelFolder,
        tokenizer: Tokenizer,
        log: Log,
        *,
        images: Any,
        supplied: Supplied,
    ) -> RunData:
        """Reads the data of a run. Needs no process group.

        Args:
            model: that is trained.
            images: reads conversations of a vision-language model; None for text alone.
            supplied: records and functions that do not come from files.

        Raises:
            UserError: a record cannot be used.
        """
        ...
