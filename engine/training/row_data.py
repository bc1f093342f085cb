"""Rows that exist before a run begins: records and token stores, read and tokenised once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from engine.checkpoint.model_folder import ModelFolder
from engine.config.rules import check_warmup
from engine.config.run import RunConfig
from engine.data.data_report import context_warning
from engine.data.dataset import TokenDataset
from engine.data.loader import DataLoader, EvalLoader, RowMeanLoader
from engine.data.order import DataOrder
from engine.data.tokenizer import Tokenizer
from engine.runtime.launch import Launch
from engine.seams import resolve
from engine.telemetry.log import Log
from engine.telemetry.metrics import MetricsWriter
from engine.training.build import Training
from engine.training.data_sets import DataSets, show_samples
from engine.training.evaluate import RowValidation
from engine.training.node_data import NodeData
from engine.training.row_shape import shape_of_launch
from engine.training.run_data import Supplied
from engine.training.step_source import RowSource


class ReferenceLoader(Protocol):
    """The function that `engine.config.objective.ObjectiveKind.references` names."""

    def __call__(
        self,
        config: RunConfig,
        training: Training,
        sets: dict[str, TokenDataset],
        log: Log,
        *,
        run_dir: Path,
        rank: int,
        resumed: Path | None,
    ) -> None:
        """See `engine.training.run_data.RunData.know_reference`; `sets` are the rows, by their names."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RowData:
    """Training and validation rows of this rank; see `engine.training.run_data.RunData`."""

    tokenizer: Tokenizer
    train: DataLoader
    validation: EvalLoader | None

    @property
    def rows(self) -> TokenDataset:
        return self.train.dataset

    def earlier_order(self, before: RunConfig) -> DataOrder:
        return replace(self.train.order, batch=before.train.global_batch_size, last_batch=before.train.last_batch)

    def know_reference(
        self, config: RunConfig, training: Training, log: Log, *, run_dir: Path, rank: int, resumed: Path | None
    ) -> None:
        objective = config.objective
        if objective.kind.references is None or objective.compared_with != "initial":
            return
        sets = {"train": self.train.dataset}
        if self.validation is not None:
            sets["validation"] = self.validation.dataset
        load: ReferenceLoader = resolve(objective.kind.references)
        load(config, training, sets, log, run_dir=run_dir, rank=rank, resumed=resumed)

    def source(
        self,
        config: RunConfig,
        launch: Launch,
        training: Training,
        *,
        metrics: MetricsWriter,
        say: Callable[[str], None],
        run_dir: Path,
    ) -> RowSource:
        if self.validation is None:
            return RowSource(self.train)
        return RowSource(self.train, RowValidation(training.stages, training.mesh, training.objective, self.validation))


def read_rows(
    config: RunConfig,
    launch: Launch,
    model: ModelFolder,
    tokenizer: Tokenizer,
    log: Log,
    *,
    images: Any,
    supplied: Supplied,
) -> RowData:
    """Reads records and token stores; see `engine.training.run_data.DataReader`."""
    assert config.data.train is not None
    decoder = model.decoder
    read = DataSets(config, tokenizer, images, decoder, log, NodeData.of_this_process(launch), supplied.sources)
    train, held_out = read.training_set(config.data.train)
    show_samples(config, train, tokenizer, log)
    shape = shape_of_launch(config, launch)
    workers, pinned = config.data.num_workers, launch.device.type == "cuda"
    loader = DataLoader(
        train,
        shape,
        global_batch_size=config.train.global_batch_size,
        seed=config.train.seed,
        last_batch=config.train.last_batch,
        num_workers=workers,
        pin_memory=pinned,
    )
    if config.train.num_epochs is not None:
        check_warmup(config, loader.order.steps_left(0, config.train.num_epochs))
    if config.data.validation is not None:
        held_out = read.dataset(config.data.validation, "validation")
    validation = None
    if held_out is not None:
        kind = RowMeanLoader if config.train.eval_mean == "rows" else EvalLoader
        validation = kind(
            held_out, shape, max_samples=config.train.eval_samples, num_workers=workers, pin_memory=pinned
        )
    if (too_long := context_warning(config.data.seq_length, train.lengths, decoder.context_length)) is not None:
        log.warning(too_long)
    return RowData(tokenizer=tokenizer, train=loader, validation=validation)
